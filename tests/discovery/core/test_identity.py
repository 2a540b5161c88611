"""Content addresses of the library's own sources."""

import importlib
import sys

import pytest

from mxjax.discovery.core import identity
from mxjax.discovery.tasks.ptq import task as ptq


@pytest.fixture
def package(tmp_path, monkeypatch):
  """A package of two files, importable under a name of its own."""
  folder = tmp_path / "hashed_package"
  (folder / "inner").mkdir(parents=True)
  (folder / "__init__.py").write_text("")
  (folder / "inner" / "deep.py").write_text("VALUE = 1\n")
  monkeypatch.syspath_prepend(tmp_path)
  importlib.invalidate_caches()
  yield folder
  sys.modules.pop("hashed_package", None)


def test_the_source_digest_moves_with_any_file_of_a_package(package):
  before = identity.source_digest("hashed_package")
  assert identity.source_digest("hashed_package") == before
  (package / "inner" / "deep.py").write_text("VALUE = 2\n")
  changed = identity.source_digest("hashed_package")
  (package / "inner" / "deep.py").rename(package / "inner" / "moved.py")
  assert len({before, changed, identity.source_digest("hashed_package")}) == 3


def test_a_package_without_sources_is_refused(package):
  for path in package.rglob("*.py"):
    path.unlink()
  with pytest.raises(FileNotFoundError, match="got none"):
    identity.source_digest("hashed_package")


@pytest.mark.parametrize(
  "file",
  [
    "mxjax.numerics/realization/one_code.py",
    "mxjax.run/quantize.py",
    "mxjax.methods/hires/hires.py",
    "mxjax.pallas_kernels/gptq.py",
    "mxjax.discovery.tasks/ptq/phases.py",
  ],
)
def test_the_evaluator_of_the_quantization_task_hashes_the_library(file, monkeypatch):
  package, path = file.split("/", 1)
  assert package in ptq.EVALUATOR_PACKAGES
  before = identity.source_digest(*ptq.EVALUATOR_PACKAGES)
  original = identity._python_files

  def one_changed(folder, prefix):
    for name, digest in original(folder, prefix):
      yield name, digest + "x" * (name == path)

  monkeypatch.setattr(identity, "_python_files", one_changed)
  assert identity.source_digest(*ptq.EVALUATOR_PACKAGES) != before
