"""The list of mutants fits the code as it is, and every one was caught."""

import json

import pytest

from tests import mutants

MUTANTS = mutants.read()


def test_every_mutant_fits_the_code():
  told = [text for mutant in MUTANTS for text in mutants.misfits(mutants.ROOT, mutant)]
  assert not told, "\n".join(told)


def test_names_are_unique_and_every_mutant_was_caught():
  names = [mutant.name for mutant in MUTANTS]
  assert len(set(names)) == len(names)
  results = json.loads(mutants.RESULTS.read_text())
  assert [row["mutant"] for row in results] == names
  assert not [row["mutant"] for row in results if row["caught by"] is None]


@pytest.mark.parametrize("count", [0, 2])
def test_text_that_does_not_occur_once_is_refused(tmp_path, count):
  (tmp_path / "one.py").write_text("size = 32\n" * count)
  mutant = mutants.Mutant(
    "wide blocks", "one.py", "size = 32", "size = 64", ["none.py"]
  )
  absent, misplaced = mutants.misfits(tmp_path, mutant)
  assert "none.py is not in the tree" in absent
  assert f"expected once in one.py, got {count} times" in misplaced
