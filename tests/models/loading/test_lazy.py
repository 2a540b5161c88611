"""Params on disk: the same model, a layer at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax import methods, models
from mxjax.calibration.calibration import Calibration
from mxjax.models.families import to_hf_config
from mxjax.models.loading import weights
from mxjax.models.parameters import StoredTensor
from mxjax.run.quantize import run
from mxjax.storage import layer_store
from tests import tiny

LAYERS = 10
TOKENS = np.random.default_rng(0).integers(0, 61, (2, 16)).astype(np.int32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A checkpoint with layers of about half a megabyte each."""
  path = tmp_path_factory.mktemp("layers") / "hf"
  widths = dict(hidden_size=128, intermediate_size=512, head_dim=32)
  config = tiny.config(num_layers=LAYERS, tie_embeddings=False, **widths)
  params = models.CausalLM(config).init(jax.random.key(0), TOKENS)["params"]
  weights.save_folder(path, to_hf_config(config), params)
  return path


@pytest.mark.slow
def test_the_same_tree_whether_loaded_or_read_by_layer(folder):
  model, params = models.from_pretrained(folder)
  same_model, lazy = models.open_pretrained(folder)
  assert model == same_model
  assert list(lazy) == list(params)
  jax.tree.map(np.testing.assert_array_equal, params, dict(lazy))
  with pytest.raises(KeyError):
    lazy["layers_99"]


def test_nothing_is_read_until_a_key_is_asked_for(folder, tmp_path, monkeypatch):
  read = []

  def spy(name, shape, values):
    return StoredTensor(name, shape, lambda: read.append(name) or values())

  monkeypatch.setattr(weights, "StoredTensor", spy)
  _, lazy = models.open_pretrained(folder)
  assert read == []
  assert len(lazy) == LAYERS + 3
  lazy["layers_4"]
  assert len(read) == 9
  assert all(name.startswith("model.layers.4.") for name in read)


def test_a_nan_is_found_when_its_layer_is_read(golden, tmp_path):
  stored = {name: value.copy() for name, value in golden.weights.items()}
  stored["model.layers.1.mlp.up_proj.weight"][0, 0] = np.nan
  _, lazy = models.open_pretrained(golden.save(tmp_path / "hf", stored))
  lazy["layers_0"]
  with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj.weight has 1 of"):
    lazy["layers_1"]


def live_bytes():
  return sum(array.nbytes for array in jax.live_arrays())


def peak_while_quantizing(model, params, store):
  """Largest sum of live arrays at any step, above what lived before."""
  before, sizes = live_bytes(), []
  result = run(
    params,
    Calibration(model, TOKENS),
    methods.get("rtn"),
    into=store,
    on_progress=lambda now: sizes.append(live_bytes()),
  )
  return max(sizes) - before, result


@pytest.mark.slow
def test_a_run_holds_few_layers_however_many_there_are(folder, tmp_path):
  model, lazy = models.open_pretrained(folder)
  layer = sum(leaf.nbytes for leaf in jax.tree.leaves(lazy["layers_0"]))
  on_disk, result = peak_while_quantizing(model, lazy, layer_store.LayerStore(tmp_path))
  assert on_disk < 3 * layer < LAYERS * layer / 3
  params = lazy.load()
  in_memory, plain = peak_while_quantizing(model, params, None)
  # The float model is not counted here, and yet the quantized layers pile up.
  assert in_memory > on_disk + layer
  for name in plain.params:
    left, right = plain.params[name], result.params[name]
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(np.testing.assert_array_equal, left, right)


def test_a_store_forgets_what_is_deleted(tmp_path):
  store = layer_store.LayerStore(tmp_path)
  store["norm"], store["layers_0"] = {"weight": jnp.ones(2)}, {"a": jnp.zeros(3)}
  assert list(store) == ["norm", "layers_0"]
  assert store["layers_0"]["a"].shape == (3,)
  del store["layers_0"], store["norm"]
  assert len(store) == 0
  assert not list(tmp_path.iterdir())
