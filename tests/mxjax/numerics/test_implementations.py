import functools

import jax
import jax.numpy as jnp

import mxjax
from mxjax.numerics import implementations
from mxjax.numerics.implementations import choose
from mxjax.pallas_kernels import mxfp4_encode
from tests import refusals

OPERATION = {"native": None, "pallas": None}


def test_none_takes_the_platforms_kernel_where_it_can_and_should():
  for platform, kernel in (("cpu", "native"), ("gpu", "pallas"), ("tpu", "xla")):
    asked = functools.partial(choose, "op", None, platform=platform)
    assert asked(**OPERATION) == kernel
    assert asked() == asked(slower=(kernel,), **OPERATION) == "xla"


EXPLICIT = [("native", "cpu"), ("pallas", "gpu"), ("interpret", "cpu")]
EXPLICIT += [("interpret", "gpu")]


def test_an_explicit_choice_is_taken_or_refused():
  for implementation, platform in EXPLICIT:
    # Even where None would pass it over.
    how = {"platform": platform, "slower": (implementation,)}
    assert choose("op", implementation, **how, **OPERATION) == implementation
  call = lambda *which, **how: lambda: choose("op", *which, **how)
  refusals.check(
    [
      *(
        (
          call(name, platform=platform, **obstacles),
          f"op: expected a call that implementation='{name}'",
        )
        for name, platform in EXPLICIT
        for obstacles in ({}, {"native": "of a reason", "pallas": "of a reason"})
      ),
      (call("native", platform="gpu", **OPERATION), "gpu", "a CPU"),
      (call("pallas", platform="cpu", **OPERATION), "cpu", "compiled kernels"),
    ],
    NotImplementedError,
  )
  names = "'xla', 'native', 'pallas', 'interpret'"
  refusals.check([(call("cuda"), names, "'cuda'")])


def test_the_public_encoder_takes_the_pallas_kernel_on_a_gpu(monkeypatch):
  assert mxjax.encode is mxfp4_encode.encode
  traced = lambda: str(jax.make_jaxpr(lambda x: mxjax.encode(x))(jnp.ones((2, 32))))
  assert "pallas_call" not in traced()
  monkeypatch.setattr(implementations, "target_platform", lambda: "gpu")
  assert "name=mxjax_mxfp4_encode" in traced()
