"""Discovery tables from `mxjax reproduce`, in the synthetic world."""

import pytest

from mxjax.cli import main as cli
from mxjax.cli import reproduce_studies
from mxjax.discovery.studies import study
from mxjax.discovery.studies.arms import PAPER_STUDIES
from mxjax.discovery.studies.study_jobs import planned

WORDS = ["--studied", "world", "--study-calls", "20", "--study-seeds", "101,102"]


def main(*words):
  return cli.main(["reproduce", *words])


@pytest.mark.slow
def test_a_study_becomes_tables_beside_the_papers_and_a_picture(tmp_path, capsys):
  assert main("matched", "--out", str(tmp_path), *WORDS) == 0
  folder = tmp_path / "discovery"
  text = (folder / "tables.md").read_text()
  heads = [line for line in text.splitlines() if line.startswith("## ")]
  reduced = "(reduced: 20 of 240 calls, 2 of 8 seeds)"
  assert len(heads) >= 2
  assert all(head.endswith((reduced, ": paper")) for head in heads)
  assert sum(head.endswith(": paper") for head in heads) >= 1
  assert "<svg" in (folder / "anytime.html").read_text()
  assert (folder / "tables.csv").stat().st_size
  assert main("matched", "--out", str(tmp_path), *WORDS) == 0
  assert (folder / "tables.md").read_text() == text


def test_all_holds_the_studies_if_it_is_said_what_they_search(tmp_path, monkeypatch):
  asked = []
  monkeypatch.setattr(
    reproduce_studies, "_studies", lambda names, options: asked.append(names) or 0
  )
  monkeypatch.setattr(
    reproduce_studies.reproduce,
    "run_builds",
    lambda options: asked.append(options.tables) or 0,
  )
  main("all", "--models", "x", "--out", str(tmp_path))
  assert asked == ["all"]
  main("all", "--models", "x", "--out", str(tmp_path), "--studied", "a,b")
  assert asked[1:] == [[*PAPER_STUDIES], "all"]
  main("stages,replay,edits", "--out", str(tmp_path), "--studied", "world")
  assert asked[-2:] == [["replay"], "stages,edits"]


@pytest.mark.slow
def test_a_failing_study_costs_itself(tmp_path, monkeypatch, capsys):
  conduct = study.conduct

  def failing(folder, name, tell):
    if name == "controls":
      raise FloatingPointError("no control\nis left")
    return conduct(folder, name, tell)

  monkeypatch.setattr(study, "conduct", failing)
  assert main("controls,matched", "--out", str(tmp_path), *WORDS) == 1
  assert "failed, controls: no control is left" in capsys.readouterr().err
  assert "## Threshold crossings" in (tmp_path / "discovery/tables.md").read_text()


def test_what_is_not_said_is_asked_for(capsys, tmp_path):
  out = ("matched", "--out", str(tmp_path / "new"))
  for words, message in (
    (out, "expected --studied world or MODEL,HELDOUT for a discovery table, got none"),
    ((*out, "--studied", "one"), "for a discovery table, got one; name the model"),
    ((*out, "--studied", "world", "--study-calls", "19"), "expected at least 20 calls"),
    (("matched", "--studied", "world"), "expected --out for the studies"),
  ):
    assert main(*words) == 2
    assert message in capsys.readouterr().err
  assert not (tmp_path / "new").exists()


def test_a_study_of_two_models_is_the_ptq_task_on_them():
  task = planned(["a", "b"], 240, None).task
  assert task == {"task": "ptq", "model": "a", "holdout": "b"}
