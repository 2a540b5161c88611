"""An outcome is addressed by what a task reads, and not by where it lies."""

import shutil

from mxjax.discovery.core.store import Store
from mxjax.discovery.sandbox.local_executor import LocalExecutor
from mxjax.discovery.search.cached_evaluator import CachedEvaluator
from mxjax.discovery.tasks.ptq.task import PtqTask
from mxjax.models.loading import embedded

SIZES = {"calibration": [8, 32], "windows": [2, 32], "objective": "kl"}


def fingerprint(folder, **options):
  task = PtqTask(**SIZES, **options)
  return CachedEvaluator(task, LocalExecutor(task), Store(folder)).fingerprint


def test_a_copy_of_model_and_text_has_the_same_outcomes(tmp_path):
  llama, qwen3 = (embedded.trained_folder(name) for name in ("llama", "qwen3"))
  copy = shutil.copytree(llama, tmp_path / "elsewhere")
  text = "\n\n".join(f"Line {n} of a text that is long enough." for n in range(400))
  files = tmp_path / "a.txt", tmp_path / "b.txt"
  for file in files:
    file.write_text(text)
  mine = fingerprint(tmp_path / "store", model=str(llama), test_text=str(files[0]))
  again = fingerprint(tmp_path / "store", model=str(copy), test_text=str(files[1]))
  assert again == mine
  other = fingerprint(tmp_path / "store", model=str(qwen3), test_text=str(files[0]))
  files[1].write_text(text.replace("long", "short"))
  changed = fingerprint(tmp_path / "store", model=str(copy), test_text=str(files[1]))
  assert len({mine, other, changed}) == 3
