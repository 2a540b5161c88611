"""The contract's hash, by which results say under which rules they were made."""

import dataclasses

import pytest

from mxjax.numerics import mxfp4
from mxjax.numerics.contract import PAPER_CONTRACT, Contract


@pytest.mark.parametrize(
  "change",
  [
    {"rules": mxfp4.Rules(scale_rule="even")},
    {"rules": mxfp4.Rules(tie_rule="even")},
    {"targets": PAPER_CONTRACT.targets[:-1]},
    {"block_size": 16},
    {"element": "E3M0"},
    {"scale": "E4M3"},
    {"kv_cache": True},
    {"activations": "float"},
  ],
  ids=str,
)
def test_every_field_moves_the_hash(change):
  changed = dataclasses.replace(PAPER_CONTRACT, **change)
  assert changed.hash != PAPER_CONTRACT.hash
  assert Contract.from_dict(changed.to_dict()) == changed
