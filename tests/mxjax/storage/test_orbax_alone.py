"""The page's lines restore a checkpoint in a process that cannot import mxjax."""

import pathlib
import re
import subprocess
import sys

import numpy as np

from mxjax.numerics import mxfp4
from mxjax.storage import checkpoint
from tests.mxjax import quantized

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "guides" / "export.md"


def test_a_checkpoint_is_read_by_orbax_alone(tiny_params, tiny_config, tmp_path):
  params = quantized.model(tiny_params, "rtn")
  (tmp_path / "run").mkdir()
  checkpoint.save_checkpoint(tmp_path / "run" / "checkpoint", params, tiny_config)
  section = PAGE.read_text().partition("## Without mxjax")[2]
  lines = re.search(r"```python\n(.*?)```", section, re.DOTALL)
  assert lines is not None
  program = f"""
import sys, warnings
sys.modules["mxjax"] = None  # Importing it is an error now.
warnings.simplefilter("ignore")
RUN = {str(tmp_path / "run")!r}
{lines[1]}
import numpy
numpy.save({str(tmp_path / "weight.npy")!r}, weight)
assert not [name for name in sys.modules if name.startswith("mxjax.")]
"""
  done = subprocess.run(
    [sys.executable, "-c", program],
    cwd=tmp_path,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  leaf = params["layers_0"]["self_attn"]["q_proj"]["weight"]
  ours = np.asarray(mxfp4.decode(leaf.weight), np.float32)
  np.testing.assert_array_equal(np.load(tmp_path / "weight.npy"), ours)
