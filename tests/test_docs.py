"""Documents show the numbers of the result files."""

import importlib.util
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


@pytest.fixture(scope="module")
def fill_docs():
  path = ROOT / "benchmarks" / "fill_docs.py"
  spec = importlib.util.spec_from_file_location("fill_docs", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_tables_are_those_of_the_result_files(fill_docs, document):
  text = document.read_text()
  assert text.count("<!-- results/") == len(fill_docs.PLACE.findall(text))
  assert fill_docs.filled(text) == text, "run python benchmarks/fill_docs.py"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_result_file_that_is_named_exists(document):
  text = document.read_text()
  for word in text.replace("`", " ").replace(",", " ").split():
    if word.startswith("benchmarks/results/"):
      assert (ROOT / word.rstrip(".;:)")).is_file(), word
