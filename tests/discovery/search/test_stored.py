"""What a run paid for has a digest, and files of others are read within bounds."""

import json
import shutil

import pytest

from mxjax.cli.main import main
from mxjax.discovery.audit import verify
from mxjax.discovery.core import store
from mxjax.discovery.proposers import endpoint
from mxjax.discovery.search import runs
from tests.cases import slow

TRUSTED = runs.Trusted(sandbox="off")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  folder = tmp_path_factory.mktemp("stored") / "run"
  words = ["discover", "run", "--task", "world", "--budget", "4", "--seed", "3"]
  assert main([*words, "--sandbox", "off", "--holdout", "off", f"--out={folder}"]) == 0
  return folder


def copied(finished, tmp_path, events=None):
  """A copy of the run; with `events`, one that was killed after so many."""
  folder = tmp_path / "run"
  shutil.copytree(finished, folder)
  if events is not None:
    lines = (folder / "log.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "log.jsonl").write_bytes(b"".join(lines[:events]))
  return folder


def flipped(path, place):
  """Changes one bit of a file."""
  data = bytearray(path.read_bytes())
  data[int(place * (len(data) - 1))] ^= 1
  path.write_bytes(data)


def test_an_intact_run_verifies(finished):
  assert verify.verify(finished, calls=0, trusted=TRUSTED).complaints == ()


@pytest.mark.parametrize("kind", ["outcomes", "proposals"])
@pytest.mark.parametrize("place", [*slow(0.0, 0.1, 0.35), 0.6, *slow(0.85), 1.0])
def test_a_changed_result_is_found_and_no_run_goes_on_with_it(
  finished, tmp_path, capsys, kind, place
):
  folder = copied(finished, tmp_path, events=2)
  for path in (folder / kind).glob("*.json"):
    flipped(path, place)
  assert main(["discover", "resume", str(folder), "--sandbox", "off"]) == 2
  told = capsys.readouterr().err
  assert "expected a result as it was paid for" in told
  assert "put back an intact copy" in told
  assert len(told.splitlines()) == 1
  shutil.copyfile(finished / "log.jsonl", folder / "log.jsonl")
  complaints = verify.verify(folder, calls=0, trusted=TRUSTED).complaints
  files = [path.name for path in (folder / kind).glob("*.json")]
  assert all(any(name in told for told in complaints) for name in files)


def test_a_digit_that_reads_as_the_same_number_is_a_change_too(tmp_path):
  kept = store.Store(tmp_path)
  kept.put("outcomes", "a", {"loss": 0.30000000000000004})
  path = tmp_path / "outcomes" / "a.json"
  text = path.read_text()
  changed = text.replace("0.30000000000000004", "0.30000000000000005")
  assert changed != text and json.loads(changed) == json.loads(text)
  path.write_text(changed)
  with pytest.raises(ValueError, match="changed since"):
    kept.get("outcomes", "a")


def test_an_outcome_of_another_run_is_found(finished, tmp_path):
  """Its digest holds, and its values are not those of the log."""
  folder = copied(finished, tmp_path)
  kept = store.Store(tmp_path / "other")
  path = next((folder / "outcomes").glob("*.json"))
  entry = store.read_stored(path)
  entry["outcome"]["values"]["loss"] += 1.0
  kept.put("outcomes", path.stem, entry)
  shutil.copyfile(tmp_path / "other" / "outcomes" / path.name, path)
  (told,) = verify.verify(folder, calls=0, trusted=TRUSTED).complaints
  assert told.startswith(f"the outcome {path.stem[:12]} is not that of event ")


def test_options_that_the_log_does_not_know_are_found(finished, tmp_path):
  folder = copied(finished, tmp_path)
  options = json.loads((folder / "run.json").read_text())
  options["config"]["budget"] = 5
  (folder / "run.json").write_text(json.dumps(options))
  (told,) = verify.verify(folder, calls=0, trusted=TRUSTED).complaints
  assert told == "run.json has another config than the log began with"


@pytest.mark.parametrize("name", store.FOR_PEOPLE)
def test_what_people_read_of_a_run_is_as_it_was_written(finished, tmp_path, name):
  for change, told in (
    (lambda path: flipped(path, 0.5), f"{name} was changed after it was written"),
    (lambda path: path.unlink(), f"{name} is not there any more"),
    (
      lambda path: (path.parent / store.DIGESTS).unlink(),
      f"{name} has no digest in {store.DIGESTS}",
    ),
    (lambda path: flipped(path.parent / store.DIGESTS, 0.0), store.DIGESTS),
  ):
    folder = copied(finished, tmp_path)
    change(folder / name)
    complaints = verify.verify(folder, calls=0, trusted=TRUSTED).complaints
    assert any(told in each for each in complaints), complaints
    shutil.rmtree(folder)


def test_a_report_that_is_written_again_is_the_one_that_counts(finished, tmp_path):
  folder = copied(finished, tmp_path)
  flipped(folder / "report.html", 0.5)
  assert main(["discover", "report", str(folder)]) == 0
  assert verify.verify(folder, calls=0, trusted=TRUSTED).complaints == ()


FORGED = {
  "deep": b"[" * 100_000 + b"]" * 100_000,
  "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
  "no object": b"[]",
  "null": b"null",
  "no UTF-8": b'{"a": "\xff\xfe"}',
  "not a number": b'{"event": NaN}',
  "empty": b"",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*slow(*[*FORGED][:-1]), [*FORGED][-1]])
def test_forged_files_are_told_in_one_sentence_that_names_them(
  finished, tmp_path, capsys, name
):
  folder = copied(finished, tmp_path, events=2)
  for what in ("run.json", "log.jsonl", "outcomes", "proposals"):
    paths = [folder / what]
    if (folder / what).is_dir():
      paths = [*(folder / what).glob("*.json")]
    kept = [path.read_bytes() for path in paths]
    for path in paths:
      path.write_bytes(FORGED[name] + (b"\n" if what == "log.jsonl" else b""))
    capsys.readouterr()
    assert main(["discover", "resume", str(folder), "--sandbox", "off"]) == 2, what
    told = capsys.readouterr().err
    # A resumed run compares its log event by event, and names the folder.
    place = folder if what == "log.jsonl" else folder / what
    assert str(place) in told, what
    assert "expected" in told and "; " in told
    assert len(told.splitlines()) == 1
    for path, data in zip(paths, kept, strict=True):
      path.write_bytes(data)
  tape = tmp_path / "tape.jsonl"
  tape.write_bytes(FORGED[name] + b"\n")
  with pytest.raises(ValueError, match="a recorded reply in line 1"):
    endpoint.Cassette(tape, "replay")
