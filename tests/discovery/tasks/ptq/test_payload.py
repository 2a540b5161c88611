"""The digests of what each hook decided."""

import numpy as np

from mxjax.discovery.tasks.ptq import payload
from mxjax.discovery.tasks.ptq.payload import DECIDED, Place

LINEAR = ("order", "map", "codes", "scales", "gram", "cross")


def operands():
  arrays = {field: np.arange(4, dtype=np.uint8) for field in LINEAR}
  made = {Place(0, "mlp", name): dict(arrays) for name in ("up_proj", "gate_proj")}
  made[Place(0, "self_attn", "value_recovery")] = {"scale": np.ones(2, np.float32)}
  made[Place(0, "mlp", "mlp_recovery")] = {"gate_shift": np.ones(1, np.float32)}
  return made


def test_a_digest_changes_with_the_content_that_its_hook_decides_and_no_other():
  before = payload.digests(operands())
  assert payload.digests(operands()) == before
  assert before.keys() == DECIDED.keys()
  for place, fields in operands().items():
    for field in fields:
      changed = operands()
      changed[place][field] = fields[field] + 1
      after = payload.digests(changed)
      moved = {hook for hook in DECIDED if after[hook] != before[hook]}
      decided = {
        hook for hook, parts in DECIDED.items() if {field, place.leaf} & {*parts}
      }
      assert moved == decided, (place, field)
      assert moved


def test_a_digest_knows_where_the_content_lies():
  up, gate = Place(0, "mlp", "up_proj"), Place(0, "mlp", "gate_proj")
  made = operands()
  made[up]["codes"] = made[up]["codes"] + 1
  swapped = {**made, up: made[gate], gate: made[up]}
  first, second = payload.digests(made), payload.digests(swapped)
  assert first["encode_weight"] != second["encode_weight"]
