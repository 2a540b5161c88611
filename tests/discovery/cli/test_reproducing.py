"""Discovery tables from `mxjax reproduce`, in the synthetic world."""

import argparse

import pytest

from mxjax.discovery.cli import parser, reproducing
from mxjax.evaluation.cli import parser as cli

WORDS = ["--studied", "world", "--study-calls", "20", "--study-seeds", "101,102"]


def main(*words):
  return parser.main(["reproduce", *words])


def test_the_names_are_those_of_the_papers_studies():
  from mxjax.discovery.studies.study import STUDIES

  assert {*parser.STUDIES} == {*STUDIES}
  assert {*parser.PAPER_STUDIES} == {*STUDIES} - {"payoff", "payoff-real"}


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
    reproducing, "_tables", lambda name, options: asked.append(name) or []
  )
  monkeypatch.setattr(
    reproducing.reproduce, "run", lambda options: asked.append(options.tables) or 0
  )
  main("all", "--models", "x", "--out", str(tmp_path))
  assert asked == ["all"]
  main("all", "--models", "x", "--out", str(tmp_path), "--studied", "a,b")
  assert asked[1:] == [*parser.PAPER_STUDIES, "all"]
  main("stages,replay,edits", "--out", str(tmp_path), "--studied", "world")
  assert asked[-2:] == ["replay", "stages,edits"]


@pytest.mark.parametrize(
  ("words", "match"),
  [
    (["matched", "--out", "x"], "expected --studied for a discovery table"),
    (
      ["matched", "--out", "x", "--studied", "world", "--study-calls", "19"],
      "expected at least 20 calls",
    ),
    (["matched", "--studied", "world"], "expected --out for the studies"),
    (
      ["matched", "--out", "x", "--studied", "one"],
      "expected --studied world or MODEL",
    ),
  ],
)
def test_what_is_not_said_is_asked_for(capsys, words, match):
  assert main(*words) == 2
  assert match in capsys.readouterr().err


def test_a_study_of_two_models_is_the_ptq_task_on_them():
  built = cli.build_parser(parser.register)
  words = ["discover", "study", "matched", "--out", "x", *reproducing._task("a, b")]
  parsed = built.parse_args(words)
  assert (parsed.task, parsed.model, parsed.holdout_model) == ("ptq", "a", "b")
  assert isinstance(parsed, argparse.Namespace)
