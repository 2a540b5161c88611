"""Studies: statistics against the paper's numbers, freezing, resuming, tables."""

import json
import pathlib

import numpy as np
import pytest

from mxjax.cli.main import main
from mxjax.discovery.core import store
from mxjax.discovery.core.candidate_source import admit
from mxjax.discovery.search import checkers
from mxjax.discovery.studies import checker_cases, figures, study, tables
from mxjax.discovery.studies.arms import ARMS
from mxjax.discovery.studies.results import Results
from mxjax.discovery.studies.tables import PAPER
from mxjax.discovery.tasks import world
from mxjax.evaluation.measures.statistics import compare_seeds, share_interval

BUDGET = 20
TASK = world.World(seed=3)


def column(table, name):
  header, *rows = PAPER[table]
  return [float(row[header.index(name)]) for row in rows[:8]]


def test_the_paired_t_interval_is_the_papers():
  found = compare_seeds(
    column("framework_seeds", "QuantForge"), column("framework_seeds", "ReflectMem")
  )
  assert found.mean == pytest.approx(-0.25)
  assert found.t_interval == pytest.approx((-0.386058, -0.113942), abs=1e-6)
  assert (found.wins, found.losses) == (7, 1)


def test_the_compilation_pairs_are_the_papers():
  rows = [[float(v) for v in row[1:]] for row in PAPER["compilation_seeds"][1:3]]
  found = compare_seeds(*rows)
  assert found.mean == pytest.approx(-0.275)
  assert found.deviation == pytest.approx(0.111, abs=5e-4)
  assert found.t_interval == pytest.approx((-0.368, -0.182), abs=5e-4)
  # All eight favor it: the smallest p that eight sign flips can give.
  assert found.sign_flip_p == pytest.approx(2 / 256)
  assert found.exact_interval[1] < 0


def test_the_signed_rank_interval_covers_what_it_says():
  generator = np.random.default_rng(0)
  found = [compare_seeds(generator.standard_normal(8), np.zeros(8)) for _ in range(400)]
  covered = np.mean([f.exact_interval[0] <= 0 <= f.exact_interval[1] for f in found])
  assert found[0].exact_coverage == pytest.approx(1 - 10 / 256)
  assert covered == pytest.approx(found[0].exact_coverage, abs=0.03)


def test_no_false_accept_in_twenty_has_the_papers_upper_limit():
  low, high = share_interval(0, 20)
  assert low == 0
  assert high == pytest.approx(0.17, abs=0.005)


def test_the_papers_budgets_add_up():
  header, *rows = PAPER["compilation_budget"]
  for row in rows:
    *parts, total = map(int, row[1:])
    assert sum(parts) == total == 240
  assert header[-1] == "Total"


def test_half_of_the_cases_are_real_and_all_are_admitted():
  cases = checker_cases.make(TASK)
  assert len(cases) == 40
  assert sum(case.is_real for case in cases) == 20
  assert len({case.name for case in cases}) == 40
  parent = admit(TASK.interface.default_source(), TASK.interface)
  for case in cases:
    changed = checkers.by_source(
      admit(case.source, TASK.interface), parent, case.computation
    )
    # Only the edit of another hook leaves the declared text alone.
    assert changed.implemented != case.name.startswith("other hook")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp("study") / "world"
  options = study.StudyOptions(
    task={"task": "world"}, seeds=(4, 5), tuning_seeds=(1,), budget=BUDGET
  )
  held = study.Folder(path, options)
  yield held
  held.close()


def quiet(line):
  del line


@pytest.mark.slow
def test_a_study_is_resumed_to_the_same_results(folder):
  first = study.conduct(folder, "replay", quiet)
  before = {p: p.stat().st_mtime_ns for p in folder.path.glob("runs/*/log.jsonl")}
  again = study.conduct(study.Folder(folder.path, folder.options), "replay", quiet)
  assert json.dumps(first) == json.dumps(again)
  assert before
  assert all(p.stat().st_mtime_ns == stamp for p, stamp in before.items())
  for seed, transitions in first["replay"].items():
    assert len(transitions) <= 6
    log = store.read_events(folder.run_folder("quantforge", int(seed)))
    verdicts = {e["packet"]: e for e in log if e["event"] == "verdict"}
    assert all(verdicts[t["packet"]]["excluded"] for t in transitions)
  shown = "\n".join(t.markdown() for t in tables.tables(first))
  assert "15/48 = 0.31" in shown


def test_some_of_the_seeds_make_a_study_that_says_so(folder):
  part = study.conduct(folder, "replay", quiet, seeds=(5,))
  assert part["seeds"] == [5]
  assert set(part["replay"]) == set(part["runs"]["quantforge"]) == {"5"}
  with pytest.raises(ValueError, match=r"seeds \[4, 5\] frozen in .*, got \[9\]"):
    study.conduct(folder, "replay", quiet, seeds=(5, 9))


def test_other_options_do_not_continue_a_folder(folder):
  changed = study.StudyOptions(
    task={"task": "world"}, seeds=(4, 5), tuning_seeds=(1,), budget=BUDGET, gate=0.9
  )
  with pytest.raises(ValueError, match="frozen with, got other options"):
    study.Folder(folder.path, changed)


def test_tuning_seeds_are_not_compared_on():
  with pytest.raises(ValueError, match="tuned"):
    study.StudyOptions(task={"task": "world"}, seeds=(1, 2), tuning_seeds=(2,))


def test_outcomes_of_other_runs_save_time_and_no_calls(folder):
  found = folder.run("no-compile", 4)
  assert found["ledger"]["total"] == BUDGET
  assert found["ledger"]["probe"] == 0


def test_the_ideal_is_beyond_what_a_search_reached(folder):
  found = folder.landmarks(4)
  last = folder.run("quantforge", 4)["marks"][-1][2]
  assert found["ideal"] < last <= found["initial"] + world.MARGIN
  assert found["ideal"] < found["gate"] < found["initial"]


@pytest.mark.slow
def test_best_of_n_always_revises_the_initial_program(folder):
  folder.run("best-of-n", 4)
  events = store.read_events(folder.run_folder("best-of-n", 4))
  programs = [e for e in events if e["event"] == "program"]
  assert {e["parent"] for e in programs[1:]} == {programs[0]["program"]}
  labels = [e["label"] for e in events if e["event"] == "packet" and "label" in e]
  assert any("+" in label for label in labels)


def test_plan_tells_calls_and_starts_nothing(capsys, tmp_path):
  place = tmp_path / "study"
  arguments = ["discover", "study", "matched", "--task", "world", "--plan"]
  assert main([*arguments, "--out", str(place)]) == 0
  assert "7680 evaluator calls" in capsys.readouterr().out
  assert not place.exists()


def test_every_study_names_known_arms():
  for each in study.STUDIES.values():
    assert set(each.arms) <= set(ARMS)


def test_the_anytime_figure_has_our_medians_and_the_papers():
  path = pathlib.Path(__file__).parents[3] / "benchmarks/results/studies_world.json"
  values = json.loads(path.read_text())["studies"]["matched"]["results"]
  page = figures.anytime(values)
  assert page.count("<svg") == 2
  assert page.count('class="band') == len(values["runs"]) == 4
  final = Results(values).median("quantforge")
  assert f"<title>QuantForge, evaluator calls 240: {final}</title>" in page
  for arm, *cells in PAPER["anytime_values"][1:]:
    for call, cell in zip(PAPER["anytime_values"][0][1:], cells, strict=True):
      assert f"<title>{arm}, evaluator calls {call}: {float(cell):.4g}</title>" in page


def test_a_positive_paired_difference_favors_the_constrained():
  free = {**dict.fromkeys(("improves", "implemented", "repeats"), False), "change": 0.0}
  gained = {**free, "improves": True}
  pair = {"focal": "refuted", "free": free, "constrained": gained}
  values = {
    "study": "replay",
    "target": "loss",
    "runs": {"quantforge": {}},
    "seeds": [1, 2],
    "budget": 240,
    "replay": {"1": [pair, pair], "2": [{**pair, "free": gained, "constrained": free}]},
  }
  (table,) = [t for t in tables.tables(values) if "by trajectory (" in t.title]
  assert [row[1:] for row in table.rows] == [["0", "1"], ["2", "0"], ["+2", "-1"]]


def test_every_run_of_a_study_has_its_own_seed(folder):
  for arm in ("quantforge", "reflect"):
    made = {seed: folder.options.run(arm, seed) for seed in (4, 5)}
    assert {seed: each.config["seed"] for seed, each in made.items()} == {4: 4, 5: 5}
    assert {seed: each.task["seed"] for seed, each in made.items()} == {4: 4, 5: 5}
