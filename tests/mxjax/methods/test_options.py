"""Options of methods that cannot be: in a name, and of a program."""

import dataclasses
import re

import pytest

from mxjax import methods
from mxjax.methods.scale_distillation import ScaleDistillation

NAMES = (
  ("gptq:scales=stale", "scales of gptq: .*fresh, lagged, static.*got 'stale'"),
  ("gptq:colour=red", "option of gptq .activations, damping, .*got 'colour=red'"),
  ("gptq:order=activation", "expected scales=static .*got scales=fresh"),
  ("batquant:steps=many", "the default, 160"),
  ("hires:use_balance=0", "a valid boolean, got '0'; .* default, true"),
  ("hires:use_balance=True", "as in JSON, got 'True'; .* default, true"),
  ("gptq:damping=-1", "greater than or equal to 0, got .* default, 0.01"),
  ("wush:damping=NaN", "a finite number"),
  ("spinquant:batch=0", "greater than or equal to 1, got .* default, 8"),
  ("hires+tune:length=0", "greater than or equal to 1"),
  ("brq:sizes=[0]", r"the default, \[32\]"),
  ("gptq:damping=0.1:damping=0.2", "each option of gptq once, got damping"),
  ("hires:recover=mlp+mlp-parent", "each recovery fit .*, got mlp and mlp"),
  ("wush+r+r", "expected one of .*got 'wush"),
  ("hires:recover=head", "recover: expected none, or attention .*got 'head'"),
  ("hires:recover=mlp-late", "-parent or -unrounded"),
  ("quip+r", "expected one of .*got 'quip\\+r'"),
  ("hires-descent:weights=rtn", "got 'weights=rtn'"),
  ("hires:balance_by=layer", "got 'balance_by=layer'"),
  (
    "hires-descent:two_sided=true",
    "weighting=fisher for two_sided=true, .*got wei",
  ),
  ("hires-descent:rounds_up=true", "changes=1 or more .*got changes=0"),
  ("hires-next:candidates=8", "use_balance=false for candidates=8, .*got use_in"),
  ("hires-descent:map_steps=8", "candidates=1 or more for map_steps=8, .*got cand"),
  ("hires-next:max_condition=0.5", "greater than or equal to 1, .* default, 32.0"),
  ("hires-next:chart=geodesic", "one of reference, geometric, .* default, geo"),
  ("hires:chart=geometric", "got 'chart=geometric'"),
  ("hires-next:changes=2:rounding=nearest", "for changes=2, .*got rounding=nearest"),
  ("hires:two_sided=true", "got 'two_sided=true'"),
  ("hires:weights=rtn:damping=0.1", "got damping=0.1; use weights=gptq"),
  ("gptq:activations=int8", "expected one of mxfp4, float, got 'int8'"),
  ("focus:activations=float", "to round its inputs, because its scales are learned"),
  ("batquant:activations=float", "maps and clipping are learned through the rounding"),
  ("spinquant:activations=float", "rotations are learned through the rounding"),
  ("hires:rounding=nearest:activations=float", "no rounding beside activations=float"),
  ("hires-next:activations=float:changes=1", "no changes beside activations=float"),
  ("rtn+r:recover=mlp-unrounded:activations=float", "leave -unrounded out"),
)
"""Names with a wrong option, and what the refusal says."""

CHANGES = (
  ({"rounding": "nearset"}, "one of full, sensitivity, nearest, .* default, full"),
  ({"damping": -0.01}, "option damping of hires: .* got -0.01"),
  ({"tune": ScaleDistillation(length=0)}, "length of the tuning of hires"),
)
"""Programs of a user's own with a wrong option."""


def test_a_wrong_option_is_explained():
  programs = [(dataclasses.replace(methods.HIRES, **some), m) for some, m in CHANGES]
  for method, message in (*NAMES, *programs):
    with pytest.raises(ValueError) as caught:
      methods.get(method)
    assert re.search(message, str(caught.value)), (method, str(caught.value))
