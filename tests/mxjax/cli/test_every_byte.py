"""A finished folder of `quantize` and its exports: no byte changes unnoticed."""

import json
import random
import shutil
import string

import pytest

from mxjax.audit import verify
from mxjax.run.folder import RunFolder
from mxjax.storage import export
from tests.mxjax.cli import square

CLASSES = (string.ascii_letters, string.digits, '"{}[]:,', string.whitespace)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
  """A model, what `quantize` made of it, and its two exports."""
  from mxjax.cli.main import main

  root = tmp_path_factory.mktemp("every-byte")
  model = square.write(root / "model")
  assert main([*square.quantize(model, root / "out", "rtn"), "--json"]) == 0
  for form in ("safetensors", "compressed-tensors"):
    words = ["export", str(root / "out"), "--format", form, "--windows", "0"]
    assert main([*words, "--out", str(root / form)]) == 0
  return root


def damages(data, seed):
  """A flipped bit of each class of bytes and at both ends; cut, longer, gone."""
  rng = random.Random(seed)
  chosen = {0, len(data) - 1} if data else set()
  for kind in CLASSES:
    at = [i for i, byte in enumerate(data[:20_000]) if chr(byte) in kind]
    chosen |= {rng.choice(at)} if at else set()
  for at in sorted(chosen):
    yield data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
  yield from (data[:-1], data[: len(data) // 2], data + b"\n", None)


def harmed(folder, every=1):
  """Damages each file of a folder in turn; yields its name and whether it matters.

  Of `every` damages in a row a file gets one, and the next file gets the next of them.
  """
  for number, file in enumerate(sorted(p for p in folder.rglob("*") if p.is_file())):
    # Orbax writes hundreds of files, all listed in one way.
    if "arrays" in file.parts and number % 16:
      continue
    data = file.read_bytes()
    for kind, other in enumerate(damages(data, number)):
      if other == data or (kind - number) % every:
        continue
      if other is None:
        file.unlink()
      else:
        file.write_bytes(other)
      yield f"{file.relative_to(folder)} {other and other[:80]}", same(data, other)
      file.write_bytes(data)


def same(data, other):
  """Whether both are the same JSON, with an exponent or an escape in other letters."""
  try:
    return json.loads(data) == json.loads(other or b"")
  except ValueError:
    return False


@pytest.fixture
def folder(made, tmp_path):
  return lambda name: shutil.copytree(made / name, tmp_path / name)


@pytest.fixture
def bytes_only(monkeypatch):
  """Leaves out the arithmetic of the audit, which the bytes do not need."""
  empty = lambda *_, **__: ({}, json.loads(CONFIG))
  monkeypatch.setattr(verify.checkpoint, "restore_checkpoint", empty)
  for check in ("_check_params", "_check_arithmetic"):
    monkeypatch.setattr(verify, check, lambda *_: None)


CONFIG = json.dumps(
  dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_layers"), 1)
  | dict.fromkeys(("num_heads", "num_kv_heads", "norm_eps", "rope_theta"), 1)
  | {"head_dim": 2, "max_positions": 1}
)


@pytest.mark.slow
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_verify_notices_every_byte_of_an_output_folder(folder, bytes_only, every):
  out = folder("out")
  assert verify.verify(out).faults == []
  harms = harmed(out, every)
  missed = [name for name, is_same in harms if not _faults(out) and not is_same]
  assert not missed
  assert verify.verify(out).faults == []


def _faults(out):
  try:
    return verify.verify(out).faults
  except FileNotFoundError as error:
    return [str(error)]


@pytest.mark.slow
@pytest.mark.parametrize(
  "place", ["", "run", "run/layers", "run/streams", "checkpoint"]
)
def test_verify_notices_what_came(folder, bytes_only, place):
  out = folder("out")
  (out / place / "more.bin").write_bytes(b"")
  assert any("more.bin" in fault for fault in verify.verify(out).faults)


def test_verify_notices_what_went(folder, bytes_only):
  out = folder("out")
  shutil.rmtree(out / "run")
  assert any("state.json is missing" in fault for fault in verify.verify(out).faults)
  (out / "mxjax_files.json").unlink()
  (fault,) = verify.verify(out).faults
  assert "mxjax_files.json" in fault and "--resume" in fault


def test_resume_refuses_or_repairs_every_byte(folder):
  run = folder("out") / "run"
  before = {p: p.read_bytes() for p in sorted(run.rglob("*")) if p.is_file()}
  for name, _ in harmed(run):
    now = {p: p.read_bytes() for p in sorted(run.rglob("*")) if p.is_file()}
    try:
      with RunFolder(run, resume=True) as opened:
        assert len(opened.finished) == 3, name
    except (FileExistsError, ValueError):
      assert now == {p: p.read_bytes() for p in now}, name
    for path, data in before.items():
      path.write_bytes(data)


@pytest.mark.parametrize("form", ["safetensors", "compressed-tensors"])
def test_an_export_is_read_back_only_whole(folder, form):
  out = folder(form)
  readers = {
    "safetensors": export.read_state,
    "compressed-tensors": export.read_compressed_tensors,
  }
  missed = []
  for name, is_same in harmed(out):
    # Without its manifest it is a folder of another program.
    if is_same or (form != "safetensors" and name == "mxjax_export.json None"):
      continue
    try:
      readers[form](out)
    except (FileNotFoundError, ValueError):
      continue
    missed.append(name)
  assert not missed
  readers[form](out)
  (out / "model.safetensors.index.json").write_text("{}")
  with pytest.raises(ValueError, match="index.json is not listed"):
    readers[form](out)
