"""Options of methods that cannot be: in a name, and of a program."""

import dataclasses
import re

import pytest

from mxjax import methods
from mxjax.methods.scale_distillation import ScaleDistillation

NAMES = (
  ("gptq:scales=stale", "cannot be 'stale'.*fresh, lagged, static"),
  ("gptq:colour=red", "no option 'colour=red'; write one of damping"),
  ("gptq:order=activation", "need scales='static'"),
  ("batquant:steps=many", "its default is 160"),
  ("hires:use_balance=0", "should be a valid boolean; its default is true"),
  ("hires:use_balance=True", "as in JSON; its default is true"),
  ("gptq:damping=-1", "greater than or equal to 0; its default is 0.01"),
  ("wush:damping=NaN", "a finite number"),
  ("spinquant:batch=0", "greater than or equal to 1; its default is 8"),
  ("hires+tune:length=0", "greater than or equal to 1"),
  ("brq:sizes=[0]", r"its default is \[32\]"),
  ("gptq:damping=0.1:damping=0.2", "each option of gptq once, got damping"),
  ("hires:recover=mlp+mlp-parent", "each recovery fit .* once, got mlp and mlp"),
  ("wush+r+r", "unknown method"),
  ("hires:recover=head", "unknown recovery 'head'; write none, or attention"),
  ("hires:recover=mlp-late", "-parent or -unrounded"),
  ("quip+r", "unknown method 'quip\\+r'"),
  ("hires-descent:weights=rtn", "no option 'weights=rtn'"),
  ("hires:balance_by=layer", "no option 'balance_by=layer'"),
  (
    "hires-descent:two_sided=true",
    "needs the gradients of weighting=fisher, got wei",
  ),
  ("hires-descent:rounds_up=true", "got changes=0; give changes=1 or more"),
  ("hires-next:max_condition=0.5", "greater than or equal to 1; its default is 32.0"),
  ("hires-next:chart=geodesic", "one of reference, geometric; its default is geo"),
  ("hires:chart=geometric", "no option 'chart=geometric'"),
  ("hires-next:changes=2:rounding=nearest", "would ignore rounding=nearest"),
  ("hires:two_sided=true", "no option 'two_sided=true'"),
  ("hires:weights=rtn:damping=0.1", "would ignore damping=0.1; use weights=gptq"),
)
"""Names with a wrong option, and what the refusal says."""

CHANGES = (
  ({"rounding": "nearset"}, "one of full, sensitivity, nearest; its default is full"),
  ({"damping": -0.01}, "option damping of hires cannot be -0.01"),
  ({"tune": ScaleDistillation(length=0)}, "length of the tuning of hires"),
)
"""Programs of a user's own with a wrong option."""


def test_a_wrong_option_is_explained():
  programs = [(dataclasses.replace(methods.HIRES, **some), m) for some, m in CHANGES]
  for method, message in (*NAMES, *programs):
    with pytest.raises(ValueError) as caught:
      methods.get(method)
    assert re.search(message, str(caught.value)), (method, str(caught.value))
