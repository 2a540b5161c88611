"""Every digest that identifies: whatever it is of, another value has another digest."""

import numpy as np
import pytest

from mxjax.calibration import store
from mxjax.calibration.calibration import Calibration, token_fingerprint
from mxjax.evaluation.tasks import multiple_choice
from mxjax.evaluation.tasks.multiple_choice import Request
from mxjax.storage import digested_json, tree_io


def ids(*values):
  return np.array(values, np.int32)


def params(name="q", dtype=np.float32, shape=(2, 2), last=3.0):
  weight = np.array([0, 1, 2, last], dtype).reshape(shape)
  return {"layer": {name: weight}}


class Takes:
  """A model whose inputs are any pytree."""

  takes_any_inputs = True


def inputs(name="ids", dtype=np.int32, shape=(1, 4), last=3):
  tokens = {name: np.array([0, 1, 2, last], dtype).reshape(shape)}
  return Calibration(Takes(), tokens, vocab_size=8)


IDENTITIES = {
  "tokens": (
    token_fingerprint,
    lambda: ids([0, 1], [2, 3]),
    [ids([0, 1], [2, 4]), ids([0, 1, 2, 3]), ids([0], [1], [2], [3])],
  ),
  "inputs of any model": (
    lambda calibration: calibration.fingerprint,
    inputs,
    [
      inputs(last=4),
      inputs(name="other"),
      inputs(dtype=np.uint32),
      inputs(shape=(2, 2)),
    ],
  ),
  "items of a task": (
    multiple_choice._fingerprint,
    lambda: [Request(ids(1, 2), ids(3)), Request(ids(4), ids(5))],
    [
      [Request(ids(1, 2), ids(4)), Request(ids(4), ids(5))],
      [Request(ids(1), ids(2, 3)), Request(ids(4), ids(5))],
      [Request(ids(4), ids(5)), Request(ids(1, 2), ids(3))],
      [Request(ids(1, 2), ids(3))],
    ],
  ),
  "weights": (
    store.params_digest,
    params,
    [params(last=4.0), params(name="k"), params(shape=(4, 1))]
    # The same bytes in another dtype.
    + [{"layer": {"q": params()["layer"]["q"].view(np.int32)}}]
    + [{"other": params()["layer"]}],
  ),
  "stored arrays": (
    lambda arrays: tree_io.describe_arrays(arrays),
    lambda: {"a": ids(1, 2)},
    [{"a": ids(1, 3)}, {"a": ids([1, 2])}, {"b": ids(1, 2)}],
  ),
  "records": (
    digested_json.digest,
    lambda: {"a": 1, "b": [1, 2]},
    [{"a": 2, "b": [1, 2]}, {"a": 1, "b": [2, 1]}, {"a": 1}, {"b": 1, "a": [1, 2]}],
  ),
}


@pytest.mark.parametrize("name", IDENTITIES)
def test_another_value_has_another_digest_and_an_equal_one_the_same(name):
  digest, make, others = IDENTITIES[name]
  found = [digest(value) for value in (make(), *others)]
  assert digest(make()) == found[0]
  texts = [str(one) for one in found]
  assert len(set(texts)) == len(texts)
