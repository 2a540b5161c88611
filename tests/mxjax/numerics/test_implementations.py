import jax
import jax.numpy as jnp
import pytest

import mxjax
from mxjax.numerics import implementations
from mxjax.numerics.implementations import choose
from mxjax.pallas_kernels import mxfp4_encode

OPERATION = {"native": None, "pallas": None}


@pytest.mark.parametrize(
  ("platform", "kernel"), [("cpu", "native"), ("gpu", "pallas"), ("tpu", "xla")]
)
def test_none_takes_the_platforms_kernel_where_it_can_and_should(platform, kernel):
  assert choose("op", None, platform=platform, **OPERATION) == kernel
  assert choose("op", None, platform=platform) == "xla"
  assert choose("op", None, platform=platform, slower=(kernel,), **OPERATION) == "xla"


@pytest.mark.parametrize(
  ("implementation", "platform"),
  [("native", "cpu"), ("pallas", "gpu"), ("interpret", "cpu"), ("interpret", "gpu")],
)
def test_an_explicit_choice_is_taken_or_refused(implementation, platform):
  args = "op", implementation
  # Even where None would pass it over.
  chosen = choose(*args, platform=platform, slower=(implementation,), **OPERATION)
  assert chosen == implementation
  for obstacles in ({}, {"native": "of a reason", "pallas": "of a reason"}):
    with pytest.raises(NotImplementedError, match="op: implementation='"):
      choose(*args, platform=platform, **obstacles)


def test_kernels_of_another_platform_are_refused():
  with pytest.raises(NotImplementedError, match="is gpu and native kernels need a CPU"):
    choose("op", "native", platform="gpu", **OPERATION)
  with pytest.raises(NotImplementedError, match="is cpu and compiled kernels need an"):
    choose("op", "pallas", platform="cpu", **OPERATION)


def test_an_unknown_name_is_refused():
  known = "'xla', 'native', 'pallas', 'interpret', got 'cuda'"
  with pytest.raises(ValueError, match=f"op: implementation must be None, {known}"):
    choose("op", "cuda")


def test_the_public_encoder_takes_the_pallas_kernel_on_a_gpu(monkeypatch):
  assert mxjax.encode is mxfp4_encode.encode
  traced = lambda: str(jax.make_jaxpr(lambda x: mxjax.encode(x))(jnp.ones((2, 32))))
  assert "pallas_call" not in traced()
  monkeypatch.setattr(implementations, "target_platform", lambda: "gpu")
  assert "name=mxjax_mxfp4_encode" in traced()
