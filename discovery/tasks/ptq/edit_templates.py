"""Edit cards of the PTQ task: as many decoys as edits known to help, told alike.

A search that finds the good ones has re-assembled a library that we wrote; it has
discovered nothing. What the cards show is whether evidence tells them apart.
"""

from collections.abc import Mapping
from typing import Any

from mxjax.discovery.core.edit_templates import Card
from mxjax.discovery.core.residual import Control, Explanation, Predicted, Symbol
from mxjax.discovery.tasks.ptq.source_templates import (
  BALANCE,
  CHART,
  EXPONENT_SEARCH,
  GPTQ,
  HADAMARD,
  MLP,
  ONE_CODE,
  VALUE,
)


def _accounts(
  observable: str, control: str, told: str, *, own: Symbol = "up"
) -> tuple[Explanation, ...]:
  """The competing stories that every card tells of its edit.

  Args:
    observable: The signature.
    control: The condition that separates the first two.
    told: What the focal account says.
    own: What the focal account predicts of the signature under the control.
  """
  better: Predicted = {"log_ppl": "down", observable: "down"}
  return (
    Explanation("measured", told, {"primary": better, control: {observable: own}}),
    Explanation(
      "generic",
      "any edit of this kind does the same, whatever it was told",
      {"primary": better, control: {observable: "down"}},
    ),
    Explanation(
      "elsewhere",
      "the target gains and the signature has nothing to do with it",
      {"primary": {"log_ppl": "down", observable: "same"}},
    ),
    Explanation(
      "local",
      "the signature falls and nothing follows from it",
      {"primary": {"log_ppl": "same", observable: "down"}},
    ),
    Explanation("nothing", "the edit does nothing", _both("same", observable)),
    Explanation("harm", "the edit destroys something", _harm()),
  )


def _both(symbol: Symbol, observable: str) -> Mapping[str, Mapping[str, Symbol]]:
  return {"primary": {"log_ppl": symbol, observable: symbol}}


def _harm() -> Mapping[str, Mapping[str, Symbol]]:
  return {"primary": {"log_ppl": "up"}}


def _shuffled(hook: str) -> tuple[Control, ...]:
  intervention = {"kind": "shuffle_stats", "hooks": [hook]}
  return (
    Control("neighbour", intervention, 1, "each block is told its neighbour's numbers"),
  )


RANDOM_MAP = (
  Control("rotation", {"kind": "random_map"}, 1, "a random rotation instead"),
)


def _scoped(part: str) -> Control:
  intervention = {"kind": "scope", "part": part, "parent": True}
  return Control(part, intervention, 1, f"the edit in {part} linears only")


def _transform(
  card: str, template: str, observable: str, statement: str, **more: Any
) -> Card:
  uses_stats = "stats[" in template
  control = "neighbour" if uses_stats else "rotation"
  controls = _shuffled("transform") if uses_stats else RANDOM_MAP
  return Card(
    id=card,
    hooks=("transform",),
    template=template,
    plan={"transform": "measured"},
    residual=observable,
    explanations=_accounts(observable, control, statement),
    controls=(*controls, _scoped("attention"), _scoped("mlp")),
    family="geometry",
    statement=statement,
    **more,
  )


def _weights(
  card: str, template: str, curvature: str, statement: str, **more: Any
) -> Card:
  own: Symbol = "up" if curvature != "none" else "down"
  return Card(
    id=card,
    hooks=("encode_weight",),
    template=template,
    plan={"curvature": curvature},
    residual="weight_error",
    explanations=_accounts("weight_error", "neighbour", statement, own=own)
    if curvature != "none"
    else _accounts("weight_error", "attention", statement, own="same"),
    controls=(*_shuffled("encode_weight"), _scoped("attention"), _scoped("mlp")),
    family="discrete",
    statement=statement,
    **more,
  )


def _activations(
  card: str, template: str, tables: str, statement: str, **more: Any
) -> Card:
  return Card(
    id=card,
    hooks=("encode_act",),
    template=template,
    plan={"tables": tables},
    residual="activation_error",
    explanations=_accounts("activation_error", "neighbour", statement),
    controls=_shuffled("encode_act"),
    family="discrete",
    statement=statement,
    **more,
  )


def _structure(
  card: str,
  hook: str,
  template: str,
  key: str,
  residual: str,
  statement: str,
  **more: Any,
) -> Card:
  gains: Mapping[str, Symbol] = {"log_ppl": "down"}
  return Card(
    id=card,
    hooks=(hook,),
    template=template,
    plan={key: True},
    residual=residual,
    explanations=(
      Explanation(
        "path", statement, {"primary": gains, "neighbour": {"log_ppl": "same"}}
      ),
      Explanation(
        "generic",
        "any correction of this size does the same",
        {"primary": gains, "neighbour": gains},
      ),
      Explanation("nothing", "nothing moves", {"primary": {"log_ppl": "same"}}),
      Explanation("harm", "the edit destroys something", _harm()),
    ),
    controls=_shuffled(hook),
    family="structure",
    statement=statement,
    **more,
  )


def _balance(card: str, plan: str, statement: str, template: str, **more: Any) -> Card:
  return Card(
    id=card,
    hooks=("balance",),
    template=template,
    plan={"balance": plan},
    residual="operator_error",
    explanations=_accounts("operator_error", "neighbour", statement),
    controls=(
      *_shuffled("balance"),
      Control("dose", {"kind": "dose", "factor": -1.0}, 2, "the opposite balance"),
    ),
    family="geometry",
    statement=statement,
    **more,
  )


USEFUL = (
  _transform(
    "hadamard",
    HADAMARD + "\ndef transform(stats):\n  return hadamard()\n",
    "contaminated",
    "spreading large values over their block frees the others' codes",
    follow_ups=("chart",),
  ),
  _transform(
    "chart",
    CHART,
    "operator_error",
    "both operands' moments meet in the middle of their geometric mean",
    params=({"exponent": 0.5}, {"exponent": 0.35}),
    follow_ups=("gptq", "gptq-local"),
  ),
  _transform(
    "diagonal",
    "\ndef transform(stats):\n"
    "  a = jnp.sqrt(jnp.diagonal(stats['activation']) + 1e-12)\n"
    "  b = jnp.sqrt(jnp.diagonal(stats['weight']) + 1e-12)\n"
    "  return jnp.diag(jnp.sqrt(b / a) / jnp.sqrt(jnp.mean(b / a)))\n",
    "activation_error",
    "large channels move to the weights' side",
  ),
  _weights(
    "gptq",
    GPTQ,
    "full",
    "errors of earlier columns are made good by later ones",
    follow_ups=("one-code", "weight-exponent"),
  ),
  _weights("gptq-local", GPTQ, "local", "errors are made good inside a block"),
  _weights(
    "weight-exponent",
    EXPONENT_SEARCH
    + "\ndef encode_weight(block, curvature):\n  return searched(block)\n",
    "none",
    "the exponent of least squared error beats the floor rule",
    params=({"first": 1, "second": -1},),
  ),
  _activations(
    "act-exponent",
    EXPONENT_SEARCH
    + "\ndef encode_act(block, gram, cross):\n  return searched(block)\n",
    "realized",
    "the exponent of least squared error beats the floor rule",
    params=({"first": 1, "second": -1},),
  ),
  _activations(
    "one-code",
    ONE_CODE,
    "realized",
    "one code of a block absorbs the output error of the others",
    params=({"rounds": 1}, {"rounds": 2}, {"rounds": 3}),
    follow_ups=("value-affine", "mlp-three"),
  ),
  _balance(
    "balance",
    "measured",
    "groups whose activation risk is larger are expanded",
    BALANCE,
    params=({"strength": 0.125}, {"strength": 0.25}),
  ),
  _structure(
    "value-affine",
    "recover_value",
    VALUE,
    "attention",
    "value_error",
    "value outputs are shrunk and shifted alike within a head",
    follow_ups=("mlp-three",),
  ),
  _structure(
    "mlp-three",
    "recover_mlp",
    MLP,
    "mlp",
    "mlp_error",
    "gate and up errors share a shift and two scales in a layer",
    params=({"ridge": 0.0039}, {"ridge": 0.1}),
  ),
)

DECOYS = (
  _transform(
    "permutation",
    "\ndef transform(stats):\n"
    "  return jnp.eye(32, dtype=jnp.float64)[(jnp.arange(32) * 13 + 5) % 32]\n",
    "contaminated",
    "another order within the block separates large values",
  ),
  _transform(
    "centering",
    "\ndef transform(stats):\n"
    "  return jnp.eye(32, dtype=jnp.float64) - {share} * jnp.ones((32, 32)) / 32\n",
    "activation_error",
    "taking most of the mean out of a block narrows its range",
    params=({"share": 0.5}, {"share": 0.9}),
  ),
  _transform(
    "wrong-chart",
    CHART.replace("stats['activation']", "stats['ACT']")
    .replace("stats['weight']", "stats['activation']")
    .replace("stats['ACT']", "stats['weight']"),
    "operator_error",
    "both operands' moments meet in the middle of their inverse mean",
    params=({"exponent": 0.5},),
  ),
  _weights(
    "wide-weights",
    "\ndef encode_weight(block, curvature):\n"
    "  exponent = jnp.clip(block_exponent(block) + {shift}, -127, 127)\n"
    "  return nearest_codes(block, exponent), exponent.astype(jnp.int32)\n",
    "none",
    "a wider range keeps the largest weights from saturating",
    params=({"shift": 1}, {"shift": 2}),
  ),
  _weights(
    "diagonal-only",
    "\ndef encode_weight(block, curvature):\n"
    "  exponent = block_exponent(block)\n"
    "  pull = 0.1 * jnp.diagonal(curvature) / jnp.max(jnp.diagonal(curvature))\n"
    "  return nearest_codes(block * (1 + pull), exponent), exponent\n",
    "local",
    "weights with little curvature are rounded outwards",
  ),
  _weights(
    "full-without-solve",
    "\ndef encode_weight(block, curvature):\n"
    "  exponent = block_exponent(block)\n"
    "  return nearest_codes(block, exponent), exponent\n",
    "local",
    "telling the encoder its curvature is enough",
  ),
  _activations(
    "clip-activations",
    "\ndef encode_act(block, gram, cross):\n"
    "  exponent = jnp.clip(block_exponent(block) - {shift}, -127, 127)\n"
    "  return nearest_codes(block, exponent), exponent.astype(jnp.int32)\n",
    "realized",
    "a narrower range gives the many small values finer codes",
    params=({"shift": 1},),
  ),
  _activations(
    "stale-tables",
    ONE_CODE,
    "float",
    "one code of a block absorbs the error against the float weights",
    params=({"rounds": 1},),
  ),
  _balance(
    "stale-balance",
    "stale",
    "risks of the native coordinates balance the mapped ones",
    BALANCE,
    params=({"strength": 0.25}, {"strength": 1.0}),
  ),
  _structure(
    "value-shift",
    "recover_value",
    "\ndef recover_value(stats):\n"
    "  n = stats['count']\n"
    "  return jnp.stack([stats['value_square'] / stats['product'],\n"
    "                    stats['target'] / n])\n",
    "attention",
    "value_error",
    "value outputs lack the mean of their targets",
  ),
  _structure(
    "mlp-first-cell",
    "recover_mlp",
    "\ndef recover_mlp(stats):\n  return -0.1 * jnp.sign(stats['target'][0])\n",
    "mlp",
    "mlp_error",
    "the first cell shows which way gate and up err",
  ),
)

CARDS = (*USEFUL, *DECOYS)
assert len(USEFUL) == len(DECOYS)
