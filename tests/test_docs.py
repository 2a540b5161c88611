"""The documents name files that exist, and show what the result files hold."""

import importlib.util
import json
import pathlib
import re

import pytest

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


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_file_and_folder_that_is_named_exists(document):
  text = document.read_text()
  named = {*PATHS.findall(text), *FOLDERS.findall(text)}
  missing = [
    path for path in sorted(named) if "NAME" not in path and not (ROOT / path).exists()
  ]
  assert not missing, f"{name_of(document)} names {missing}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_included_result_exists(document):
  for place in INCLUDES.findall(document.read_text()):
    assert (document.parent / place).is_file(), place


def test_every_table_of_results_is_shown():
  shown = {
    (document.parent / place).resolve()
    for document in DOCUMENTS
    for place in INCLUDES.findall(document.read_text())
  }
  assert set((ROOT / "benchmarks" / "results").glob("*.md")) <= shown


def test_the_documents_are_short():
  words = sum(len(document.read_text().split()) for document in DOCUMENTS)
  assert words <= 16_400
  assert len((ROOT / "README.md").read_text().splitlines()) < 150


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


RESULTS = ROOT / "benchmarks" / "results"


def result(name):
  return json.loads((RESULTS / f"{name}.json").read_text())


def test_every_edit_is_shown_with_its_first_parameters():
  edits = {"useful": edit_templates.USEFUL, "decoy": edit_templates.DECOYS}
  expected = {"(initial program)": None} | {
    card.label(dict(card.params[0])): kind for kind in edits for card in edits[kind]
  }
  cards = result("edit_cards")["cards"]
  shown = {label: row.get("kind") for label, row in cards.items()}
  assert shown == expected, "run python benchmarks/edit_cards.py"


def prefill():
  data, written = result("prefill_cpu"), {"one code (HiRes)": "one code"}
  written["float, bfloat16 arithmetic"] = "bfloat16"
  times = data["ratio_to_float32"], data["cpu_ratio_to_float32"]
  names = {kind: kind for kind in times[0]} | written
  return {row: [f"{t[kind]:.2f}" for t in times] for row, kind in names.items()}


def packed_memory():
  tables = "bfloat16 tables"
  storages = ("as quantized", tables, f"{tables}, int8 embeddings")
  return {
    name: [f"{sizes[storage]['to_bf16']:.3f}" for storage in storages]
    for name, sizes in result("memory")["sizes"].items()
  }


def instructions():
  forms = {
    "instructions": ".1f",
    "on integer units": ".1f",
    "memory rate at most": ".2f",
  }
  return {
    name.replace("nearest, split", "map and nearest, split"): [
      format(kernel[key], form) for key, form in forms.items()
    ]
    for name, kernel in result("gpu_counts")["kernels"].items()
  }


PROGRAMS = {
  "a float layer with its inputs captured": ("capture",),
  "Hessian of width 4,096 / 12,288": ("Hessian, width 4096", "Hessian, width 12288"),
  "two trials of the balance, width 12,288": ("trials, width 12288",),
  "half step of all blocks, width 12,288": ("half step, width 12288",),
  "attention / MLP recovery": ("attention recovery", "mlp recovery"),
}
"""The functions of a row of the table of a build, by their names in the result file."""


def programs():
  functions = result("gpu_programs")["functions"]
  of = lambda names, read: " / ".join(read(functions[name]) for name in names)
  product = lambda f: next(key for key in f if key.endswith("operations of products"))
  kind = {"bf16": "bfloat16", "f32": "float32"}
  return {
    row: [
      of(names, lambda f: str(f["launches"])),
      of(names, lambda f: f"{f['bytes'] / 1e9:.2g}"),
      of(names, lambda f: f"{f[product(f)] / 1e12:.2g}")
      + f" T in {kind[product(functions[names[0]]).split()[0]]}",
    ]
    for row, names in PROGRAMS.items()
  }


def mesh_memory():
  size = lambda value: "-" if value is None else f"{value / 1e6:.1f}"
  name = lambda mesh: (
    f"data={mesh['data']}, model={mesh['model']}" if mesh else "one device"
  )
  keys = ("params_at_rest_per_device", "peak_lead", "peak_others")
  rows = result("mesh_memory")["rows"]
  return {name(row["mesh"]): [size(row[key]) for key in keys] for row in rows}


def large_models():
  parts = ("calibration stream", "captured inputs", "Hessians", "workspace", "all")
  return {
    f"{row['model']}, data={row['mesh']['data']}, model={row['mesh']['model']}": [
      f"{row['first_device_bytes'][part] / 1e9:.1f}" for part in parts
    ]
    for row in result("scale_plan")["rows"]
  }


def shown_rows(document, head, label_cells=1):
  """Cells of the table under a head, by what its first cells say."""
  text = (ROOT / "docs" / document).read_text()
  (body,) = re.findall(rf"^{re.escape(head)}\n\|[-| ]+\|\n((?:\|.*\n)+)", text, re.M)
  rows = [[c.strip() for c in line.strip("|").split("|")] for line in body.split("\n")]
  return {", ".join(r[:label_cells]): r[label_cells:] for r in rows if len(r) > 1}


@pytest.mark.parametrize(
  ("document", "head", "label_cells", "measured"),
  [
    ("results/runtime.md", "| forward | time | CPU time |", 1, prefill),
    (
      "results/runtime.md",
      "| | as quantized | bfloat16 tables | and int8 embeddings |",
      *(1, packed_memory),
    ),
    (
      "results/runtime.md",
      "| kernel | instructions | on integer units | bound / memory rate |",
      *(1, instructions),
    ),
    (
      "results/runtime.md",
      "| function | launches | GB | operations of products |",
      *(1, programs),
    ),
    (
      "guides/devices.md",
      "| mesh | params at rest | peak of the first device | peak of the others |",
      *(1, mesh_memory),
    ),
    (
      "guides/devices.md",
      "| model | mesh | stream | inputs | Hessians | workspace | all |",
      *(2, large_models),
    ),
  ],
)
def test_a_typed_table_shows_its_result_file(document, head, label_cells, measured):
  expected, shown = measured(), shown_rows(document, head, label_cells)
  assert len(shown) > 3
  for label, cells in shown.items():
    assert cells == expected[label.removesuffix(" (shapes only)")], label
