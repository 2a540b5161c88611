"""The documents name files that exist, and show results that were measured."""

import importlib.util
import json
import pathlib
import re

from mxjax.discovery.tasks.ptq import edit_templates

ROOT = pathlib.Path(__file__).parent.parent
DOCUMENTS = sorted(
  [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
)
TOPS = "benchmarks|discovery|docs|evaluation|examples|models|mxjax|pallas_kernels|tests"
PATHS = re.compile(rf"\b(?:{TOPS})/[\w./-]*\w\.(?:py|md|json|txt|svg)\b")
FOLDERS = re.compile(rf"`((?:{TOPS})/[\w/]*)`")
INCLUDES = re.compile(r"^```\{(?:include|literalinclude)\} (\S+)$", re.MULTILINE)


def name_of(document):
  return str(document.relative_to(ROOT))


def test_every_file_and_folder_that_is_named_exists():
  missing = []
  for document in DOCUMENTS:
    text = document.read_text()
    named = {*PATHS.findall(text), *FOLDERS.findall(text)}
    missing += [
      f"{name_of(document)}: {path}"
      for path in sorted(named)
      if "NAME" not in path and not (ROOT / path).exists()
    ]
  assert not missing, "\n".join(missing)


def test_every_included_result_exists():
  missing = [
    f"{name_of(document)}: {place}"
    for document in DOCUMENTS
    for place in INCLUDES.findall(document.read_text())
    if not (document.parent / place).is_file()
  ]
  assert not missing, "\n".join(missing)


def test_every_table_of_results_is_shown():
  shown = {
    (document.parent / place).resolve()
    for document in DOCUMENTS
    for place in INCLUDES.findall(document.read_text())
  }
  assert set((ROOT / "benchmarks" / "results").glob("*.md")) <= shown


def test_the_figure_is_that_of_the_result_files():
  path = ROOT / "benchmarks" / "readme_figure.py"
  spec = importlib.util.spec_from_file_location("readme_figure", path)
  figure = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(figure)
  assert figure.draw() == figure.FIGURE.read_text(), f"run python {path.name}"


def test_the_readme_shows_what_its_example_printed():
  shown = re.search(
    r"```python\n.*?```\n\n```\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
  )
  result = ROOT / "benchmarks" / "results" / "readme_example.json"
  assert shown is not None
  assert shown[1].splitlines() == json.loads(result.read_text())["prints"]


def test_the_imports_of_the_readme_work():
  code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
  assert code is not None
  compile(code[1], "README.md", "exec")
  lines = [line for line in code[1].splitlines() if re.match("import |from ", line)]
  assert lines
  exec("\n".join(lines), {})


def test_every_edit_is_shown_with_its_first_parameters():
  edits = {"useful": edit_templates.USEFUL, "decoy": edit_templates.DECOYS}
  expected = {"(initial program)": None} | {
    card.label(dict(card.params[0])): kind for kind in edits for card in edits[kind]
  }
  result = ROOT / "benchmarks" / "results" / "edit_cards.json"
  cards = json.loads(result.read_text())["cards"]
  shown = {label: row.get("kind") for label, row in cards.items()}
  assert shown == expected, "run python benchmarks/edit_cards.py"
