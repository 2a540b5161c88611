import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.models import functional
from mxjax.models.transformer import CausalLM, DecoderLayer
from mxjax.numerics import implementations
from mxjax.pallas_kernels.attention import prefill
from mxjax.pallas_kernels.attention.prefill import Tile
from tests import refusals, targets
from tests.cases import slow
from tests.pallas_kernels.attention.problems import error, exact, problem
from tests.tiny import config

SMALL = Tile(32, 16, warps=4, stages=2)
"""So that short sequences have tiles and chunks with and without a mask."""


@pytest.fixture
def on_a_gpu(monkeypatch):
  """Kernels are chosen as on a GPU; nothing can be run then."""
  monkeypatch.setattr(implementations, "target", lambda: targets.HOPPER)


def sequences(batch, length, dtype=jnp.bfloat16, head_dim=32, seed=0):
  return problem(batch, length, 4, 2, length, head_dim, dtype, seed)


@pytest.mark.parametrize(
  ("length", "window"),
  [
    *((1, None), (32, 7), (100, None), (100, 70)),
    *slow((1, 1), (32, None), (100, 1), (100, 7), (100, 1000)),
    *slow((160, None), (160, 7), (160, 70)),
  ],
)
def test_the_kernel_equals_the_definition_and_the_reference(length, window):
  arrays = sequences(2, length)
  got = prefill.launch(*arrays, window=window, tile=SMALL, interpret=True)
  assert got.shape == (2, length, 128) and got.dtype == jnp.bfloat16
  want = functional.causal_attention(*arrays, window=window)
  # The reference's weights are rounded at another maximum.
  assert error(got, want) <= 2.0**-7
  assert error(got, exact(*arrays, 0, window)) <= 2.0**-7


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 30])
def test_the_shipped_tile_equals_the_reference(window):
  arrays = sequences(1, 200, seed=1)
  how = {"window": window, "implementation": "interpret"}
  got = functional.causal_attention(*arrays, **how)
  want = functional.causal_attention(*arrays, window=window)
  assert error(got, want) <= 2.0**-7
  # Recovery fits are measured so.
  with jax.enable_x64(True):
    np.testing.assert_array_equal(functional.causal_attention(*arrays, **how), got)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 40])
def test_a_prompt_behind_cached_tokens_reads_nothing_after_itself(window):
  queries, keys, values = problem(2, 50, 8, 2, 150, 32, jnp.bfloat16, seed=2)
  for start in (0, 37, 100):
    newest = [a[:, start : start + 50] for a in (keys, values)]
    past = [a.at[:, start:].set(jnp.nan) for a in (keys, values)]
    got, filled = functional.cached_attention(
      *(queries, *newest, past, jnp.int32(start)),
      window=window,
      implementation="interpret",
    )
    assert error(got, exact(queries, keys, values, start, window)) <= 2.0**-7
    for after, whole in zip(filled, (keys, values), strict=True):
      stop = start + 50
      np.testing.assert_array_equal(
        *(np.asarray(a[:, :stop].astype(jnp.float32)) for a in (after, whole))
      )


def test_scores_far_apart_do_not_overflow():
  queries, keys, values = sequences(1, 64)
  keys = keys.at[:, 20].set(400 * queries[:, 50, :2]).at[:, 30].set(-400)
  got = prefill.launch(queries, keys, values, tile=SMALL, interpret=True)
  assert error(got, exact(queries, keys, values, 0)) <= 2.0**-7


def test_a_gradient_takes_the_reference_forward_and_backward():
  arrays = sequences(1, 40)

  def loss(how, *arrays):
    made = functional.causal_attention(*arrays, window=9, implementation=how)
    return jnp.sum(made.astype(jnp.float32) ** 2)

  got, want = (
    jax.jit(jax.value_and_grad(functools.partial(loss, how), argnums=(0, 1, 2)))(
      *arrays
    )
    for how in ("interpret", "xla")
  )
  jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.slow
def test_the_kernel_runs_mapped_and_in_a_scan():
  arrays = [jnp.stack([a, a[::-1]]) for a in sequences(2, 40)]
  run = lambda parts: prefill.launch(*parts, tile=SMALL, interpret=True)
  want = [run([a[i] for a in arrays]) for i in range(2)]
  mapped = jax.vmap(lambda *parts: run(parts))(*arrays)
  _, scanned = jax.lax.scan(lambda _, parts: (_, run(parts)), None, arrays)
  for got in (mapped, scanned):
    np.testing.assert_array_equal(got, jnp.stack(want))


@pytest.mark.parametrize(
  ("capability", "memory", "stages"),
  [
    ((9, 0), 232448, 3),
    ((10, 3), 232448, 3),
    ((8, 0), 166912, 2),
    ((8, 9), 101376, 2),
    ((12, 0), 101376, 2),
    (None, 101376, 2),
  ],
)
def test_a_program_fits_the_shared_memory_of_the_device(capability, memory, stages):
  assert Tile.of(128, capability).stages == stages
  for head_dim in (16, 32, 64, 128, 256):
    assert Tile.of(head_dim, capability).shared_bytes(head_dim) <= memory - 2048


def lowered_layer(config, length, **variables):
  """The program of a layer of a model for a GPU, as text."""
  layer = DecoderLayer(config, parent=None)
  hidden = jax.ShapeDtypeStruct((1, length, config.hidden_size), config.dtype)
  params = jax.eval_shape(layer.init, jax.random.key(0), hidden)
  run = lambda params, x: layer.apply({**params, **variables}, x)
  return targets.lowered_for_a_gpu(run, params, hidden)


def largest(program):
  """Elements of the largest array of a program."""
  shapes = re.findall(r"tensor<((?:\d+x)+)[a-z]", program)
  return max(int(np.prod([int(n) for n in s.split("x")[:-1]])) for s in shapes)


def test_no_scores_are_in_the_program_of_a_bfloat16_layer_for_a_gpu(
  on_a_gpu, monkeypatch
):
  length = 1024
  bfloat16 = config(dtype="bfloat16")
  scores = bfloat16.num_heads * functional.QUERY_CHUNK * length
  program = lowered_layer(bfloat16, length)
  assert "mxjax_prefill_attention" in program
  assert largest(program) < scores / 2
  monkeypatch.setattr(prefill, "obstacle", lambda *_: "it may not")
  program = lowered_layer(bfloat16, length)
  assert "mxjax_prefill_attention" not in program
  assert largest(program) >= scores / 2


def test_a_prompt_and_a_token_beside_a_cache_have_kernels_of_their_own(on_a_gpu):
  model, array = CausalLM(config(dtype="bfloat16")), jax.ShapeDtypeStruct
  ids = array((1, 4), jnp.int32)
  params = jax.eval_shape(model.init, jax.random.key(0), ids)["params"]["layers_0"]
  cache = jax.eval_shape(lambda: model.empty_cache(1, 128))
  for tokens, kernel in ((100, "prefill"), (1, "cached")):
    hidden = array((1, tokens, model.config.hidden_size), jnp.bfloat16)
    operands = params, cache, hidden, array((), jnp.int32)
    program = targets.lowered_for_a_gpu(model.layer_with_cache, *operands)
    names = {n for n in ("prefill", "cached") if f"mxjax_{n}_attention" in program}
    assert names == {kernel}


def test_float32_and_branches_take_the_reference_on_a_gpu(on_a_gpu):
  assert "prefill" not in lowered_layer(config(dtype="float32"), 64)
  at = np.arange(64, dtype=np.int32)[None]
  tree = functional.Tree(at, np.full_like(at, 64))
  branching = {"tree": {"self_attn": {"tree": tree}}}
  assert "prefill" not in lowered_layer(config(dtype="bfloat16"), 64, **branching)


def test_the_record_names_what_is_chosen(monkeypatch):
  name = lambda dtype: CausalLM(config(dtype=dtype)).attention["sequences"]
  assert name("bfloat16") == name("float32") == "xla"
  monkeypatch.setattr(implementations, "target", lambda: targets.HOPPER)
  assert (name("bfloat16"), name("float32")) == ("pallas", "xla")


def test_what_does_not_fit_is_refused_and_none_takes_the_reference(monkeypatch):
  cases = [
    (24, "bfloat16", "power of two from 16 to 256", "24"),
    (32, "float32", "bfloat16", "float32, float32, float32"),
  ]
  for head_dim, dtype, *words in cases:
    arrays = sequences(1, 8, jnp.dtype(dtype), head_dim)
    attend = functools.partial(functional.causal_attention, *arrays)
    asked = functools.partial(attend, implementation="interpret")
    refusals.check([(asked, *words)], NotImplementedError)
    with monkeypatch.context() as patch:
      patch.setattr(implementations, "target", lambda: targets.HOPPER)
      pair = attend(implementation=None), attend(implementation="xla")
    np.testing.assert_array_equal(*pair)
