"""Eight virtual devices give what one gives; sizes that do not fit are refused."""

import functools
import hashlib
import json
import os
import pathlib
import re
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mxjax
from mxjax.calibration.calibration import Calibration
from mxjax.devices import mesh as meshes
from mxjax.devices.placement import ONE_DEVICE, Placement
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.numerics import mxfp4
from mxjax.numerics.realization.activation_quantizers import Nearest
from mxjax.storage import checkpoint, checkpoint_arrays
from tests import refusals, tiny

MARGIN = 1e-6
"""Relative: products of few rows may be formed in another order by the backend."""


@pytest.fixture(scope="module")
def lowered(tmp_path_factory):
  """The folder in which JAX leaves the programs of the script, before XLA's passes."""
  return tmp_path_factory.mktemp("lowered")


def run_on_mesh(lowered, *facts):
  """What the script finds, for linears of one shape: half as many programs."""
  config = tiny.config(num_kv_heads=4, intermediate_size=64)
  script = pathlib.Path(__file__).with_name("on_mesh.py")
  command = [sys.executable, str(script), json.dumps(config.to_dict()), *facts]
  done = subprocess.run(
    command,
    env={**os.environ, "JAX_DUMP_IR_TO": str(lowered)},
    capture_output=True,
    text=True,
    timeout=570,
  )
  assert done.returncode == 0, done.stderr
  return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.fixture(scope="module")
def found(lowered):
  perplexities = "quantized perplexity", "float perplexity"
  facts = "ordered sum", "saved", "restored", *perplexities, "resumed", "light"
  return run_on_mesh(lowered, *facts)


def assert_no_empty_array(lowered):
  """Fails if a program of a mesh has an array without elements.

  On one inside `shard_map` jaxlib 0.11.2 ends the process.
  """
  programs = [path.read_text() for path in lowered.glob("*_compile.mlir")]
  on_mesh = [text for text in programs if "sdy.manual_computation" in text]
  assert on_mesh
  # Attributes of an operation have the type index.
  empty = re.compile(r"tensor<(?:\d+x)*0x(?!index)")
  assert not [text for text in on_mesh if empty.search(text)]


@pytest.mark.slow
def test_results_are_those_of_one_device(found, lowered):
  alone, on_mesh = found["light"]
  assert on_mesh == alone
  assert_no_empty_array(lowered)


@pytest.mark.slow
def test_hires_on_a_mesh_is_that_of_one_device(tmp_path):
  alone, on_mesh = run_on_mesh(tmp_path, "hires-descent")["hires-descent"]
  assert on_mesh == alone
  assert_no_empty_array(tmp_path)


@pytest.mark.slow
def test_a_run_goes_on_with_another_mesh(found):
  resumed = found["resumed"]
  assert resumed["bits"] == found["light"][0]
  before, after = resumed["changed"]["mesh"]
  assert before == {"data": 8, "model": 1, "processes": 1}
  assert after == {"data": 1, "model": 8, "processes": 1}


@pytest.mark.slow
def test_contributions_are_added_in_order(found):
  sums = found["ordered sum"]
  assert sums["got"] == sums["expected"] != sums["other order"]


@pytest.mark.slow
@pytest.mark.parametrize("params", ["float", "quantized"])
def test_perplexity_does_not_depend_on_the_mesh(found, params):
  assert max(found[f"{params} perplexity"].values()) <= MARGIN


@pytest.mark.slow
def test_checkpoints_restore_onto_any_number_of_devices(found):
  saved = found["saved"]
  for size, restored in found["restored"].items():
    assert restored["bits"] == saved["bits"]
    assert len(set(restored["rows"])) == 1
    assert len(restored["rows"]) == len(restored["bytes"]) == int(size)
  whole = saved["bytes"][0]
  most = [max(found["restored"][size]["bytes"]) for size in ("1", "2", "4", "8")]
  assert most[0] == whole
  assert most == sorted(most, reverse=True) and most[3] < most[2] < most[1] < whole


@pytest.mark.slow
def test_a_process_reads_its_part_of_a_checkpoint(tmp_path, monkeypatch):
  monkeypatch.setattr(checkpoint_arrays, "CHUNK_BYTES", 2**17)
  codes = np.random.default_rng(0).integers(0, 256, (2048, 1024), np.uint8)
  scales = jnp.full((2048, 64), 127, jnp.uint8)
  tensor = mxfp4.MXTensor(jnp.asarray(codes), scales)
  params = {"proj": {"weight": QuantizedLinear(tensor, None, Nearest())}}
  folder = checkpoint.save_checkpoint(tmp_path / "checkpoint", params, {})
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = str(free.getsockname()[1])
  script = pathlib.Path(__file__).with_name("restore_part.py")
  processes = [
    subprocess.Popen(
      [sys.executable, str(script), str(folder), port, str(process)],
      stdout=subprocess.PIPE,
      text=True,
    )
    for process in range(2)
  ]
  parts = [json.loads(process.communicate(timeout=300)[0]) for process in processes]
  assert [part["rows"] for part in parts] == [[0, 1024], [1024, 2048]]
  for part in parts:
    rows = codes[slice(*part["rows"])]
    assert part["codes"] == hashlib.sha256(rows.tobytes()).hexdigest()
    assert rows.nbytes <= part["read"] < 1.2 * rows.nbytes


def test_a_host_copy_does_not_stay_with_an_array():
  array = jnp.arange(6.0).reshape(2, 3)
  apart = meshes.alias(array)
  assert apart is not array
  assert apart.unsafe_buffer_pointer() == array.unsafe_buffer_pointer()
  np.testing.assert_array_equal(apart, array)


@pytest.mark.slow
def test_a_mesh_of_one_device_changes_nothing(tiny_model, tiny_params, tiny_tokens):
  calib = Calibration(tiny_model, tiny_tokens[:2])
  mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("data",))
  quantize = functools.partial(
    mxjax.quantize, tiny_params, calib, "rtn", check=False, probe=False
  )
  alone, on_mesh = quantize(), quantize(mesh=mesh)
  assert jax.tree.structure(alone) == jax.tree.structure(on_mesh)
  for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(on_mesh), strict=True):
    np.testing.assert_array_equal(a, b)


def test_normalize_orders_and_completes_the_axes():
  device = np.asarray(jax.devices()[:1])
  for shape, names in (((1,), ("model",)), ((1, 1), ("model", "data"))):
    mesh = meshes.normalize(jax.sharding.Mesh(device.reshape(shape), names))
    assert mesh is not None
    assert mesh.axis_names == ("data", "model")


def test_meshes_that_do_not_fit_are_refused(monkeypatch):
  make = lambda word: lambda: meshes.make(**meshes.sizes(word))
  other = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("tensor",))
  refusals.check(
    [
      (make("data=3,model=5"), "data x model devices"),
      *((make(word), repr(word)) for word in ("model=0", "rows=2", "data")),
      (make("data=1,data=1"), "data=1,data=1", "once"),
      (lambda: meshes.normalize(other), "the axes data and model"),
    ]
  )
  # No device is left idle unasked.
  monkeypatch.setattr(jax, "devices", lambda: [object()] * 8)
  refusals.check(
    [
      (lambda: meshes.make(model=3), "got 3", "data=2", "idle"),
      (lambda: meshes.make(model=9), "devices out of 8", "device_count=9"),
      (lambda: meshes.make(data=4, model=4), "got data=4, model=4", "device_count=16"),
    ]
  )


def test_sequences_must_divide_over_the_devices():
  class TwoDevices:
    size = 2

  two = Placement(TwoDevices())
  assert two.chunk_size(4, 1) == 2
  assert ONE_DEVICE.chunk_size(5, 3) == 3
  with pytest.raises(ValueError, match="divides over 2 devices, got 5"):
    two.chunk_size(5, 1)
  with pytest.raises(ValueError, match="expected chunk 1 beside a mesh, got 4"):
    two.chunk_size(8, 4)


@pytest.mark.slow
def test_a_store_beside_a_mesh_is_refused(
  tiny_model, tiny_params, tiny_tokens, tmp_path
):
  calib = Calibration(tiny_model, tiny_tokens[:1])
  with pytest.raises(ValueError, match="expected a store or a mesh, got both"):
    mxjax.quantize(
      tiny_params, calib, "rtn", mesh=meshes.make(1, 1), store=tmp_path / "store"
    )
