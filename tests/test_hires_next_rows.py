"""The rows of `benchmarks/hires_next.py`: the control, the signs, and what is kept."""

import json
import pathlib
import sys

import jax
import numpy as np
import pytest

from mxjax import methods
from mxjax.calibration.calibration import Calibration
from mxjax.run.quantize import run

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "benchmarks"))
hires_next = pytest.importorskip("hires_next")


def rows(**losses):
  """Three draws of rows with these losses by window, and a KL of a tenth of each."""
  found = []
  for draw in (1, 2, 3):
    for name, loss in losses.items():
      windows = [loss, loss + 0.01 * draw, loss - 0.01 * draw]
      text = {"kl": [loss / 10] * 3, "loss": windows}
      both = {"texts": {"C4": text}, "validation": {"C4": text}}
      found.append({"draw": draw, "name": name, **both})
  return found


def test_the_share_of_quantization_is_what_the_float_model_does_not_gain():
  made = {
    hires_next.FLOAT: 2.0,
    hires_next.CONTROL: 1.9,
    hires_next.PAPER: 3.0,
    hires_next.NEXT: 2.6,
    hires_next.NEXT + hires_next.WITHOUT_LABELS: 2.7,
  }
  table = hires_next.tables(rows(**made), (1, 2, 3))
  [line] = [line for line in table.splitlines() if line.startswith("| C4 |")]
  _, text, gain, unlabelled, adapted, share, added, of_float, _ = line.split("|")
  first = lambda cell: float(cell.split()[0])
  assert first(gain) == pytest.approx(0.4)
  assert first(unlabelled) == pytest.approx(0.3)
  assert first(adapted) == pytest.approx(0.1)
  assert first(share) == pytest.approx(0.75)
  # Less KL than without labels here, which is a gain.
  assert first(added) == pytest.approx(-0.01)
  assert first(of_float) == pytest.approx(0.19)


def test_a_share_of_no_gain_is_not_told():
  made = {
    hires_next.FLOAT: 2.0,
    hires_next.CONTROL: 1.9,
    hires_next.PAPER: 3.0,
    hires_next.NEXT: 3.1,
    hires_next.NEXT + hires_next.WITHOUT_LABELS: 2.7,
  }
  assert "no gain" in hires_next.tables(rows(**made), (1, 2, 3))


def test_the_tables_of_one_draw_tell_of_the_method_that_they_are_asked_for():
  names = hires_next.rows_of("hires-rotated")
  assert names[:5] == ["float", "hires", "hires-next", "hires-rotated", "float, labels"]
  # The row of `hires-next` must not be taken for the method's own: it gains .1.
  losses = dict(zip(names, (2.0, 3.0, 2.9, 2.6, 1.9, 2.7, 2.65), strict=True))
  found = [row for row in rows(**losses) if row["draw"] == 1]
  table = hires_next.tables(found, [1], "hires-rotated")
  assert table.startswith("KL from the float model, draw 1:")
  [line] = [
    line for line in table.splitlines() if line.startswith("| hires-rotated |")
  ][:1]
  assert line.split("|")[2:4] == [" 0.2600 ", " -0.0400 ± 0.0000 "]
  assert "gain of hires-rotated" in table
  [line] = [line for line in table.splitlines() if line.startswith("| C4 |")]
  assert line.split("|")[2].split()[0] == "+0.4000"
  assert (
    hires_next.tables(found, [1, 2], "hires-rotated") == f"Only {len(found)} rows.\n"
  )


def test_a_run_folder_is_of_one_code_model_draw_and_program_before_its_tuning():
  of = lambda name, model=None, draw=1: hires_next.folder_of(
    "0123456789", model, draw, methods.get(name)
  )
  one = of("rtn+tune")
  assert one.startswith("01234567-1-")
  assert one == of("rtn+tune:epochs=1") == of("rtn")
  others = {
    one,
    of("rtn", "llama"),
    of("rtn", draw=2),
    of("gptq"),
    of("gptq:damping=1"),
  }
  assert len(others) == 5


def test_rows_that_learn_before_their_layers_are_not_tuned_from_shared_ones():
  with pytest.raises(SystemExit, match="spinquant.tune learns before its layers"):
    hires_next.build(None, None, methods.get("spinquant+tune"), {})


def test_rows_of_another_code_or_command_are_refused(tmp_path):
  file, shared = tmp_path / "rows.json", {"code": "a", "sources": {"C4": "b"}}
  found = [{"draw": 1, "name": "hires"}]
  file.write_text(json.dumps({**shared, "rows": found}))
  kept = hires_next.kept_rows
  assert kept(file, shared, [(1, "hires")]) == found
  assert kept(tmp_path / "none.json", shared, []) == []
  with pytest.raises(SystemExit, match="rows of another code"):
    kept(file, {**shared, "code": "c"}, [(1, "hires")])
  # A control learns as one method, and a row is measured on one set of windows.
  shared = hires_next.shared_by_rows({"C4": "b"}, "hires-next", False)
  file.write_text(json.dumps({**shared, "rows": found}))
  assert kept(file, shared, [(1, "hires")]) == found
  for what, *changed in (
    ("sources", {"C4": "c"}, "hires-next", False),
    ("method", {"C4": "b"}, "hires-rotated", False),
    ("windows", {"C4": "b"}, "hires-next", True),
  ):
    with pytest.raises(SystemExit, match=f"rows of another {what}$"):
      kept(file, hires_next.shared_by_rows(*changed), [(1, "hires")])
  with pytest.raises(SystemExit, match="does not make: hires"):
    kept(file, shared, [(2, "hires")])


@pytest.mark.slow
def test_the_control_learns_from_labels_without_any_quantization(
  tiny_model, tiny_params, monkeypatch
):
  """On what it learned it gains log perplexity and leaves the float model."""
  monkeypatch.setattr(hires_next, "CHUNK", 32)
  tokens = np.random.default_rng(0).integers(0, 61, (3, 32)).astype(np.int32)
  program = methods.get("rtn+tune")
  built = hires_next.build(tiny_params, Calibration(tiny_model, tokens), program, {})
  learned = hires_next.labelled_float(
    tiny_model, tiny_params, tokens, built, program.tune
  )
  assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(learned))
  measured = lambda params: hires_next.measured(
    tiny_model, tiny_params, params, list(tokens)
  )
  before, after = measured(tiny_params), measured(learned)
  assert np.mean(after["loss"]) < np.mean(before["loss"]) - 1e-4
  assert np.mean(after["kl"]) > 1e-6 > np.abs(before["kl"]).max()


@pytest.mark.slow
def test_rows_share_the_layers_that_they_tune(tiny_model, tiny_params, monkeypatch):
  """Tuned from shared layers, a model has the bits of a run of its own."""
  tokens = np.random.default_rng(0).integers(0, 61, (3, 32)).astype(np.int32)
  calibration, layers, runs = Calibration(tiny_model, tokens), {}, []
  monkeypatch.setattr(
    hires_next, "run", lambda *a, **k: runs.append(a[2]) or run(*a, **k)
  )
  for name in ("rtn+tune:epochs=1", "rtn+tune:label_weight=0"):
    program = methods.get(name)
    built = hires_next.build(tiny_params, calibration, program, layers)
    alone = run(tiny_params, calibration, program, check=False, probe=False)
    assert built.tuning["divergence"] == alone.record.tuning["divergence"]
    same = jax.tree.map(np.array_equal, built.params, dict(alone.params))
    assert all(jax.tree.leaves(same))
  assert [program.name for program in runs] == ["rtn"]
