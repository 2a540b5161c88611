"""The tree, the wheel and what `import mxjax` may touch."""

import ast
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
LINKED = ("discovery", "evaluation", "models", "pallas_kernels")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]


def run(*command, **options):
  return subprocess.run(
    [sys.executable, *command],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=False,
    **options,
  )


def packages_in_tree():
  """Dotted names of the folders that hold Python files; `rglob` follows no links."""
  names = set()
  for top in ("mxjax", *LINKED):
    for path in (ROOT / top).rglob("*.py"):
      parts = path.relative_to(ROOT).parent.parts
      names.add(".".join(parts if top == "mxjax" else ("mxjax", *parts)))
  return names


@pytest.mark.parametrize("name", LINKED)
def test_the_package_links_to_the_top_level_folder(name):
  link = ROOT / "mxjax" / name
  assert link.is_symlink(), f"{link} must be a symlink, not a copy"
  assert link.readlink() == pathlib.Path("..") / name
  assert (ROOT / name / "__init__.py").is_file()
  assert not (ROOT / name).is_symlink()


def test_every_package_of_the_tree_is_listed_for_the_wheel():
  listed = SETUPTOOLS["packages"]
  assert len(listed) == len(set(listed))
  assert set(listed) == packages_in_tree()
  expected_map = {f"mxjax.{name}": name for name in LINKED} | {"mxjax": "mxjax"}
  assert SETUPTOOLS["package-dir"] == expected_map


DISTRIBUTIONS = {
  "orbax": "orbax-checkpoint",
  "typing_extensions": "typing-extensions",
}
"""Names to install, where they differ from the imported ones."""
OPTIONAL = {"ray", "lm_eval"}
"""Imported where an extra is asked for."""
CARRIED = {"modeling_mxfp4.py"}
"""Files that exported folders carry and nothing here imports."""


def test_the_declared_dependencies_are_those_that_are_imported():
  """Each is used somewhere, none is used undeclared, and extras bring no torch."""
  project = PYPROJECT["project"]
  declared = {re.split(r"[>=<\[]", name)[0] for name in project["dependencies"]}
  imported = set()
  for top in ("mxjax", *LINKED):
    for path in (ROOT / top).rglob("*.py"):
      if path.name in CARRIED:
        continue
      for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
          imported |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
          imported.add(node.module.partition(".")[0])
  foreign = imported - set(sys.stdlib_module_names) - {"mxjax"} - OPTIONAL
  assert {DISTRIBUTIONS.get(name, name) for name in foreign} <= declared | {
    "huggingface_hub",  # of transformers and datasets
    "pyarrow",  # of datasets
    "ml_dtypes",  # of jax
  }
  # jax.export needs flatbuffers and does not require it.
  assert declared - {DISTRIBUTIONS.get(name, name) for name in foreign} == {
    "flatbuffers"
  }
  extras = project["optional-dependencies"]
  assert {"cuda", "harness", "ray"} <= set(extras)
  named = [*project["dependencies"], *(n for names in extras.values() for n in names)]
  assert not any("torch" in name or "llama" in name for name in named)


@pytest.mark.slow
def test_the_wheel_holds_every_module_once_under_one_name(tmp_path):
  # A copy: setuptools leaves its build folder behind, and stale files in it would
  # get into the next wheel.
  source = tmp_path / "source"
  ignore = shutil.ignore_patterns("__pycache__")
  for top in ("mxjax", *LINKED):
    shutil.copytree(ROOT / top, source / top, symlinks=True, ignore=ignore)
  for name in {"pyproject.toml", "README.md", "LICENSE"} & set(os.listdir(ROOT)):
    shutil.copy(ROOT / name, source)
  done = run(
    *("-m", "pip", "wheel", "--no-deps", "--quiet"),
    *("--wheel-dir", str(tmp_path), str(source)),
  )
  assert done.returncode == 0, done.stderr
  (wheel,) = tmp_path.glob("*.whl")
  names = zipfile.ZipFile(wheel).namelist()
  assert len(names) == len(set(names))
  tops = {name.split("/")[0] for name in names}
  version = PYPROJECT["project"]["version"]
  assert tops == {"mxjax", f"mxjax-{version}.dist-info"}
  expected = {
    str(path.relative_to(ROOT)) for path in (ROOT / "mxjax").rglob("*.py")
  } | {
    f"mxjax/{path.relative_to(ROOT)}"
    for top in LINKED
    for path in (ROOT / top).rglob("*.py")
  }
  assert {name for name in names if name.endswith(".py")} == expected
  assert "mxjax/py.typed" in names


def test_the_linter_refuses_bare_imports():
  planted = "".join(f"import {name}\nfrom {name} import x\n" for name in LINKED)
  done = run(
    *("-m", "ruff", "check", "--select", "TID251", "--output-format", "concise"),
    *("--stdin-filename", "mxjax/planted.py", "-"),
    input=planted,
  )
  assert done.returncode == 1, done.stderr
  for name in LINKED:
    assert done.stdout.count(f"TID251 `{name}` is banned") == 2, done.stdout


def test_importing_the_package_is_light_and_leaves_jax_as_it_was():
  program = """
import sys
import mxjax
assert "jax" not in sys.modules and "numpy" not in sys.modules
import jax
before = dict(jax.config.values)
assert sorted(mxjax._MODULES) == sorted(mxjax.__all__) and mxjax.encode
for name in set(mxjax.__all__) - {
  "from_pretrained", "load_tokenizer", "FlaxModel", "apply"
}:
  getattr(mxjax, name)
heavy = {"transformers", "datasets", "orbax", "torch", "optax", "flax", "tokenizers"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
changed = {k for k, v in jax.config.values.items() if before.get(k) != v}
assert not changed, changed
assert not jax.config.jax_enable_x64
"""
  done = run("-c", program)
  assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_importing_every_floor_leaves_64_bit_mode_off():
  program = """
import jax, mxjax.run.quantize, mxjax.methods, mxjax.models
assert not jax.config.jax_enable_x64
"""
  done = run("-c", program)
  assert done.returncode == 0, done.stderr


def test_the_version_is_read_on_first_use():
  program = """
import sys
import mxjax
assert "__version__" not in vars(mxjax) and "importlib.metadata" not in sys.modules
print(mxjax.__version__)
"""
  done = run("-c", program)
  assert done.stdout.strip() == PYPROJECT["project"]["version"], done.stderr
