"""The examples in docstrings run, and print what they say."""

import doctest
import importlib
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGES = ("mxjax", "models", "pallas_kernels", "evaluation", "discovery")


def modules_with_examples():
  """Dotted names; `rglob` follows no links, so every module comes once."""
  names = []
  for top in PACKAGES:
    for path in sorted((ROOT / top).rglob("*.py")):
      if ">>> " in path.read_text():
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = parts if top == "mxjax" else ("mxjax", *parts)
        names.append(".".join(parts).removesuffix(".__init__"))
  return names


def test_some_module_has_an_example():
  assert "mxjax" in modules_with_examples()


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_print_what_they_say(name):
  outcome = doctest.testmod(importlib.import_module(name))
  assert outcome.attempted > 0, f"{name} has '>>>' but no example that doctest finds"
  assert outcome.failed == 0, f"{outcome.failed} of {outcome.attempted} examples failed"
