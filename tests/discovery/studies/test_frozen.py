"""What a study's hash covers, its seeds, and replays of runs that ended early."""

import json

import pytest

from mxjax.discovery.studies import study, verdict_replay


def test_the_frozen_hash_moves_with_a_module_of_the_users(tmp_path):
  module = tmp_path / "own_task.py"
  text = (
    "from mxjax.discovery.tasks.world import World\n\n\nclass Own(World):\n  pass\n"
  )
  module.write_text(text)
  spec = {"task": "own_task:Own", "path": str(tmp_path)}
  hashes = []
  for more in ("", "# another score\n"):
    module.write_text(text + more)
    hashes.append(study.frozen(study.StudyOptions(task=spec, seeds=(5,)))["task"])
  assert hashes[0] != hashes[1]


def test_the_frozen_hash_moves_with_a_cassette(tmp_path):
  hashes = []
  tape = tmp_path / "tape.jsonl"
  reply = {"text": "", "model": "m", "finish_reason": "stop"}
  reply |= {"input_tokens": 1, "output_tokens": 1}
  for request in ("one", "two"):
    tape.write_text(json.dumps({"request": request, "reply": reply}) + "\n")
    replayed = {"kind": "cassette", "cassette": str(tape)}
    made = study.StudyOptions(task={"task": "world"}, seeds=(5,), proposer=replayed)
    hashes.append(study.frozen(made)["hash"])
  assert len(set(hashes)) == 2


def test_a_seed_counts_once():
  with pytest.raises(ValueError, match="distinct seeds"):
    study.StudyOptions(task={"task": "world"}, seeds=(5, 6, 5))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [5, 7])
def test_a_run_that_ended_by_its_proposals_is_replayed_to_its_end(tmp_path, seed):
  options = study.StudyOptions(
    task={"task": "world"},
    seeds=(seed,),
    budget=20,
    config={"proposals_per_call": 0.3},
  )
  held = study.Folder(tmp_path / "study", options)
  assert held.run("quantforge", seed)["closed"] == "proposals"
  before = sorted(held.run_folder("quantforge", seed).rglob("*"))
  assert len(held.replay(seed)) < verdict_replay.PER_TRAJECTORY
  assert sorted(held.run_folder("quantforge", seed).rglob("*")) == before
  held.close()
