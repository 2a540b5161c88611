"""Strict JAX modes for every test, and the golden vectors."""

import gc
import hashlib
import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import numpy as np
import pytest

from mxjax.numerics import precision

ROOT = pathlib.Path(__file__).parent.parent
SHARED = ROOT.parent / "shared"
GOLDEN = pathlib.Path(__file__).parent / "golden"
VECTORS_SHA256 = "cbc62b5727d2e9fca4b696f6213a0a4028f0a746c7f92cac4f768b88ae534556"


def pytest_configure(config):
  del config
  jax.config.update("jax_numpy_dtype_promotion", "strict")
  jax.config.update("jax_numpy_rank_promotion", "raise")


CACHES_UP_TO = 3 << 30
"""Resident bytes of a test process above which compiled programs are dropped."""


@pytest.fixture(scope="module", autouse=True)
def bounded_caches():
  """Thousands of compiled programs of earlier modules would fill a small machine."""
  yield
  statm = pathlib.Path("/proc/self/statm")
  if not statm.is_file():
    return
  if int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") > CACHES_UP_TO:
    jax.clear_caches()
    gc.collect()


class Vectors:
  """Golden arrays by name, float64 oracle values made without JAX."""

  def __init__(self, path):
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    assert digest == VECTORS_SHA256, f"{path} changed: {digest}"
    self._arrays = np.load(path)

  def __getitem__(self, name):
    return self._arrays[name]

  def cases(self, group):
    """Names of the second level below a group."""
    names = {key.split("/")[1] for key in self._arrays.files if key.startswith(group)}
    return sorted(names)


@pytest.fixture(scope="session")
def vectors():
  return Vectors(GOLDEN / "vectors.npz")


@pytest.fixture(scope="session")
def tiny_config():
  """Two layers with grouped queries, every width a multiple of 32."""
  from mxjax.models import ModelConfig

  return ModelConfig(
    vocab_size=61,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    norm_eps=1e-5,
    tie_embeddings=True,
    rope_theta=1e4,
    max_positions=128,
  )


@pytest.fixture
def float64():
  with precision.float64_scope():
    yield


@pytest.fixture(scope="session")
def shared():
  """The folder of reference data beside the checkout; tests skip without it."""
  if not SHARED.is_dir():
    pytest.skip(f"no reference data at {SHARED}")
  return SHARED


@pytest.fixture(scope="session")
def tiny_model(tiny_config):
  from mxjax.models import CausalLM

  return CausalLM(tiny_config)


@pytest.fixture(scope="session")
def tiny_params(tiny_model):
  """Weights larger than an init's, each with one loud channel: rounding matters."""
  tokens = np.zeros((1, 4), np.int32)
  params = tiny_model.init(jax.random.key(0), tokens)["params"]
  rng = np.random.default_rng(0)

  def louder(path, leaf):
    if "proj" not in jax.tree_util.keystr(path):
      return leaf
    scale = np.ones(leaf.shape[-1])
    scale[rng.integers(leaf.shape[-1])] = 6.0
    loud = rng.standard_normal(leaf.shape) * 0.15 * scale
    return jax.numpy.asarray(loud, "bfloat16")

  return jax.tree_util.tree_map_with_path(louder, params)


@pytest.fixture(scope="session")
def tiny_tokens():
  return np.random.default_rng(1).integers(0, 61, (5, 32)).astype(np.int32)
