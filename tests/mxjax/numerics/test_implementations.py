import functools
import logging
import types

import jax
import jax.numpy as jnp
import pytest

import mxjax
from mxjax.numerics import implementations
from mxjax.numerics.implementations import Target, choose
from mxjax.pallas_kernels import mxfp4_encode
from tests import refusals, targets

OPERATION = {"native": None, "pallas": None}


@pytest.fixture(autouse=True)
def nothing_was_told(monkeypatch):
  monkeypatch.setattr(implementations, "_named", set())


def test_none_takes_the_devices_kernel_where_it_can_and_should():
  kernels = [(targets.CPU, "native"), (targets.AMPERE, "pallas")]
  kernels += [(targets.HOPPER, "pallas"), (targets.BLACKWELL, "pallas")]
  for target, kernel in kernels:
    asked = functools.partial(choose, "op", None, on=target)
    assert asked(**OPERATION) == kernel
    assert asked() == asked(slower=(kernel,), **OPERATION) == "xla"
  for target in (targets.TURING, targets.AMD, targets.TPU):
    assert choose("op", None, on=target, **OPERATION) == "xla"
  needs_float8 = functools.partial(choose, "op", None, capability=(8, 9), **OPERATION)
  assert needs_float8(on=targets.AMPERE) == "xla"
  assert needs_float8(on=targets.ADA) == "pallas"


NO_KERNEL = [
  (targets.TURING, {}, "needs compute capability 8.0 and Tesla T4 has 7.5"),
  (targets.AMPERE, {"capability": (8, 9)}, "capability 8.9 and NVIDIA A100 has 8.0"),
  (targets.AMD, {}, "NVIDIA GPU, and no compute capability is known of AMD Instinct"),
  (targets.TPU, {}, "the platform is tpu and compiled kernels need an NVIDIA GPU"),
  (targets.HOPPER, {"pallas": "it takes float32"}, "it takes float32"),
]


@pytest.mark.parametrize("target, how, why", NO_KERNEL)
def test_the_first_fallback_of_each_place_is_logged_with_its_reason(
  target, how, why, caplog
):
  with caplog.at_level(logging.INFO, "mxjax"):
    for place in ("one", "two", "one"):
      assert choose(place, None, on=target, **OPERATION | how) == "xla"
  assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
  for place, record in zip(("one", "two"), caplog.records, strict=True):
    message = record.getMessage()
    assert message.startswith(f"{place} runs through XLA, not by a kernel: ")
    assert why in message


def test_what_is_no_fallback_is_not_logged(caplog):
  with caplog.at_level(logging.INFO, "mxjax"):
    choose("no kernel", None, on=targets.HOPPER)
    choose("no kernel", None, on=targets.TURING)
    choose("slower", None, on=targets.HOPPER, slower=("pallas",), **OPERATION)
    choose("asked", "xla", on=targets.TURING, **OPERATION)
    assert not caplog.records
    choose("a CPU's", None, on=targets.CPU, native="of a reason")
  [record] = caplog.records
  assert record.levelname == "INFO" and "of a reason" in record.getMessage()


EXPLICIT = [("native", targets.CPU), ("pallas", targets.HOPPER)]
EXPLICIT += [("interpret", targets.CPU), ("interpret", targets.TURING)]


def test_an_explicit_choice_is_taken_or_refused():
  for implementation, target in EXPLICIT:
    # Even where None would pass it over.
    how = {"on": target, "slower": (implementation,)}
    assert choose("op", implementation, **how, **OPERATION) == implementation
  call = lambda *which, **how: lambda: choose("op", *which, **how)
  refusals.check(
    [
      *(
        (
          call(name, on=target, **obstacles),
          f"op: expected a call that implementation='{name}'",
        )
        for name, target in EXPLICIT
        for obstacles in ({}, {"native": "of a reason", "pallas": "of a reason"})
      ),
      (call("native", on=targets.HOPPER, **OPERATION), "gpu", "a CPU"),
      (call("pallas", on=targets.CPU, **OPERATION), "cpu", "compiled kernels"),
      (call("pallas", on=targets.TURING, **OPERATION), "8.0", "Tesla T4 has 7.5"),
    ],
    NotImplementedError,
  )
  names = "'xla', 'native', 'pallas', 'interpret'"
  refusals.check([(call("cuda"), names, "'cuda'")])


def device(platform, kind, capability=None, **rest):
  facts = {"platform": platform, "device_kind": kind, **rest}
  if capability is not None:
    facts["compute_capability"] = capability
  return types.SimpleNamespace(**facts)


def test_a_device_is_known_by_its_capability_not_by_its_name():
  target_of = implementations.target_of.__wrapped__
  for given, want in (
    (
      device("gpu", "NVIDIA RTX 5090", "12.0", core_count=170),
      Target("gpu", "NVIDIA RTX 5090", (12, 0), 170),
    ),
    (device("rocm", "AMD", "gfx942"), Target("gpu", "AMD")),
    (device("gpu", "AMD", "gfx90a"), Target("gpu", "AMD")),
    (device("cuda", "NVIDIA H20", "9.0"), Target("gpu", "NVIDIA H20", (9, 0))),
    (device("tpu", "TPU v5e", core_count=1), Target("tpu", "TPU v5e")),
  ):
    assert target_of(given) == want


def test_a_mesh_of_a_device_that_is_not_here_is_the_target(monkeypatch):
  monkeypatch.setattr(implementations, "_described", {})
  assert implementations.target().platform == "cpu"
  of = lambda kind: types.SimpleNamespace(
    device_kind=kind, platform="cuda", num_cores=99
  )
  mesh = types.SimpleNamespace(abstract_device=of("NVIDIA L4"))
  monkeypatch.setattr(jax.sharding, "get_abstract_mesh", lambda: mesh)
  unknown = implementations.target()
  assert unknown == Target("gpu", "NVIDIA L4", None, 99)
  assert "no compute capability is known of NVIDIA L4" in unknown.obstacle()
  implementations._described["NVIDIA L4"] = targets.ADA
  assert implementations.target() is targets.ADA
  # One that is here is what it is.
  mesh.abstract_device = of(jax.local_devices()[0].device_kind)
  assert implementations.target().platform == "cpu"


def test_the_default_device_is_the_target():
  for default in (jax.local_devices()[0], "cpu"):
    with jax.default_device(default):
      assert implementations.target().platform == "cpu"


def test_the_public_encoder_takes_the_pallas_kernel_on_a_gpu(monkeypatch):
  assert mxjax.encode is mxfp4_encode.encode
  traced = lambda: str(jax.make_jaxpr(lambda x: mxjax.encode(x))(jnp.ones((2, 32))))
  assert "pallas_call" not in traced()
  monkeypatch.setattr(implementations, "target", lambda: targets.HOPPER)
  assert "name=mxjax_mxfp4_encode" in traced()
