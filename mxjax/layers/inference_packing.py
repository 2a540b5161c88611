"""Optional packing of params that trades a small, stated cost for memory or speed.

Evaluation under the contract runs without it.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.errors import ValueRefusal
from mxjax.layers.linear import Int8Matrix
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.numerics import implementations, mxfp4
from mxjax.numerics.precision import HIGHEST
from mxjax.pallas_kernels import mxfp4_decode
from mxjax.pallas_kernels.mxfp4_encode import encode
from mxjax.pallas_kernels.products import float8
from mxjax.pallas_kernels.products.float8_matmul import float8_matmul

Products = Literal["bfloat16", "float8", "fastest"]
FLOAT8_ERROR = 2.0**-9
"""Largest error of a float8 product, relative to its norm, with which it is taken: a
fiftieth of what rounding the inputs costs. Exact sums would give 0."""
FLOAT8_PRODUCTS = "float8-products"
"""What records of a model call float8 products."""

_log = logging.getLogger("mxjax")


def pack_for_inference(
  params: Mapping[str, Any],
  *,
  tables: bool = True,
  embeddings: Literal["int8"] | None = None,
  products: Products | None = "fastest",
) -> dict[str, Any]:
  """Returns params that need less memory or time and run through the same calls.

  Args:
    params: A model's params, quantized or not.
    tables: Whether to store the one-code tables G_Q and K_Q in bfloat16, which halves
      them. They only rank candidate codes: every A4 operand stays legal, and only
      near-ties can change.
    embeddings: Storage of the embedding and of an untied head: `int8` (8 bits, one
      float32 scale per row), or None for no change. This changes the model;
      docs/guides/quantize.md has the cost.
    products: Dtype in which a GPU multiplies many rows of a quantized linear:
      `bfloat16`, `float8` (weights decoded to one byte with one scale per tensor), or
      None for no change; see `with_products`.

  Returns:
    New params that share unchanged leaves with `params`.

  Raises:
    ValueError: `embeddings` or `products` is not a known name.

  Example:
    >>> params = {"embed_tokens": {"weight": jnp.ones((64, 32), jnp.bfloat16)}}
    >>> packed = pack_for_inference(params, embeddings="int8")
    >>> packed["embed_tokens"]["weight"].codes.nbytes
    2048
  """
  _check("embeddings", embeddings, ("int8",))
  _check("products", products, get_args(Products))
  narrow = lambda _, leaf: dataclasses.replace(leaf, rounding=leaf.rounding.narrowed())
  result = _map_linears(narrow, params) if tables else params
  result = dict(with_products(result, products))
  for name in ("embed_tokens", "lm_head") if embeddings else ():
    # A tied head is not in the params, and what is packed already is no array.
    weight = result[name]["weight"] if name in result else None
    if isinstance(weight, jax.Array | np.ndarray):
      result[name] = {**result[name], "weight": int8_matrix(jnp.asarray(weight))}
  return result


def _check(name: str, got: Any, kinds: tuple[str, ...]) -> None:
  if got not in (None, *kinds):
    known = " or ".join(map(repr, kinds))
    raise ValueRefusal(
      "pack_for_inference", expected=f"{name} None or {known}", got=repr(got)
    )


def with_products(
  params: Mapping[str, Any], products: Products | None = "fastest"
) -> Mapping[str, Any]:
  """Returns params whose quantized linears are multiplied in another dtype on a GPU.

  Products of legal values are exact in bfloat16 and in float8; the GPU rounds sums of
  float8 products. What holds fewer rows than a tile is not affected, and neither is
  anything on a CPU. A linear whose scales differ too much for float8 keeps bfloat16;
  the logger `mxjax` warns and names it.

  Args:
    params: A model's params, quantized or not.
    products: `bfloat16`, `float8` (weights decoded to one byte with one scale per
      tensor), `fastest`, which is float8 where `float8_is_faster` and no change
      elsewhere, or None for no change.

  Raises:
    ValueError: `products` is not a known name.
  """
  _check("products", products, get_args(Products))
  if products == "fastest":
    # A float model does not wait for the check.
    first = next(_linears(params), None)
    is_faster = first is not None and float8_is_faster(_device_of(first))
    products = "float8" if is_faster else None
  if products is None:
    return params
  misfits: list[str] = []

  def choose(path: str, leaf: QuantizedLinear) -> QuantizedLinear:
    # What is not rounded to A4 does not fit eight bits.
    if products != "float8" or not leaf.rounding.is_legal:
      return dataclasses.replace(leaf, float8_scale=None)
    scale, fits = mxfp4_decode.float8_range(leaf.weight)
    if not fits:
      misfits.append(path)
    return dataclasses.replace(leaf, float8_scale=scale if fits else None)

  result = _map_linears(choose, params)
  if misfits:
    _log.warning(
      "%d linears stay with bfloat16 products because the scales of their weights do "
      "not fit float8: %s",
      len(misfits),
      ", ".join(misfits),
    )
  return result


def has_float8_products(params: Mapping[str, Any]) -> bool:
  """Tells whether a GPU multiplies many rows of any of the linears in float8."""
  return any(leaf.float8_scale is not None for leaf in _linears(params))


def _linears(node: Any) -> Iterator[QuantizedLinear]:
  if isinstance(node, Mapping):
    for value in node.values():
      yield from _linears(value)
  elif isinstance(node, QuantizedLinear):
    yield node


def float8_is_faster(device: Any) -> bool:
  """Decides whether quantized linears are multiplied in float8 on a device by default.

  They are on an NVIDIA GPU that has float8, of compute capability 8.9 or newer, whose
  float8 product passes a check: its error is at most `FLOAT8_ERROR`. The logger `mxjax`
  says once a process which way it went: as information, or as a warning where the check
  fails.
  """
  if implementations.target_of(device).obstacle(implementations.FLOAT8):
    return False
  return _passes(device)


@functools.cache
def _passes(device: Any) -> bool:
  with jax.default_device(device):
    error = float(float8_error())
  passes = error <= FLOAT8_ERROR
  _log.log(
    logging.INFO if passes else logging.WARNING,
    "many rows are multiplied in %s on this %s, whose float8 products have an error of "
    "%.1e (allowed: %.1e); products='bfloat16' or 'float8' decides otherwise",
    "float8" if passes else "bfloat16",
    device.device_kind,
    error,
    FLOAT8_ERROR,
  )
  return passes


def _device_of(params: Any) -> Any:
  """Returns a device where params lie, else the default one."""
  arrays = [leaf for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array)]
  return next(iter((arrays[0] if arrays else jnp.zeros(())).devices()))


def float8_error() -> jax.Array:
  """Measures the error of the float8 product on random operands, over their norm."""
  keys = jax.random.split(jax.random.key(0), 2)
  x, weight = (encode(jax.random.normal(key, (128, 4096))) for key in keys)
  scale, _ = mxfp4_decode.float8_range(weight)
  got = float8_matmul(float8.of_tensor(x), weight, scale)
  # Legal values are exact in float8, so only sums can differ.
  values = (mxfp4.decode(tensor, jnp.float32) for tensor in (x, weight))
  want = jnp.einsum("nd,md->nm", *values, precision=HIGHEST)
  return jnp.linalg.norm(got - want) / jnp.linalg.norm(want)


@jax.jit
def int8_matrix(weight: jax.Array) -> Int8Matrix:
  """Rounds each row `[rows, d]` to int8 with its largest magnitude at 127."""
  wide = weight.astype(jnp.float32)
  largest = jnp.abs(wide).max(axis=1)
  # A row of zeros stays zeros, where 0 / 0 would be NaN. -128 is not used, so that
  # codes are symmetric.
  scales = jnp.where(largest > 0, largest, 1.0) / 127.0
  codes = jnp.round(wide / scales[:, None]).astype(jnp.int8)
  return Int8Matrix(codes, scales)


def _map_linears(
  change: Callable[[str, QuantizedLinear], Any], node: Any, path: str = ""
) -> Any:
  """Applies `change` to every quantized linear and its slash-separated path."""
  if isinstance(node, Mapping):
    inside = f"{path}/" if path else ""
    return {
      key: _map_linears(change, value, f"{inside}{key}") for key, value in node.items()
    }
  return change(path, node) if isinstance(node, QuantizedLinear) else node
