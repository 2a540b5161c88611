"""The packets behind hires-descent: its two changes, registered, controlled and judged.

  python benchmarks/next_packets.py [--out DIR]

The discovery system runs what a person proposes: the cards' version of HiRes, then each
change on the program before it, with competing accounts and the controls that separate
them, and at last a placebo. Every registered control runs. The search sees the small
trained Llama-family model; the programs are then measured on the held-out Qwen3 one.
Killed, it goes on where it stood. Writes results/next_packets.json and .md.
"""

import argparse
import json
import pathlib

import provenance

from mxjax.discovery.audit import explain
from mxjax.discovery.core.edit_templates import EditTemplate
from mxjax.discovery.core.proposal import ExhaustedError, Proposal, ProposerError
from mxjax.discovery.core.residual import Control, Explanation
from mxjax.discovery.core.store import Store, read_events
from mxjax.discovery.sandbox.local_executor import LocalExecutor
from mxjax.discovery.search.cached_evaluator import CachedEvaluator
from mxjax.discovery.search.search import Search, SearchConfig
from mxjax.discovery.tasks.ptq import (
  edit_templates,
)
from mxjax.discovery.tasks.ptq import (
  margins as ptq_margins,
)
from mxjax.discovery.tasks.ptq import (
  task as ptq,
)
from mxjax.models.loading import embedded

RESULTS = pathlib.Path(__file__).parent / "results"
TASK = {
  "model": str(embedded.trained_folder("llama")),
  "holdout": str(embedded.trained_folder("qwen3")),
  "calibration": [16, 256],
  "windows": [16, 256],
  "replicates": 3,
}
SHOWN = ("log_ppl", "operator_error", "weight_error")

# What HiRes is in the interface's terms, card by card in the order of its stages.
HIRES = ("chart", "balance", "gptq", "one-code", "value-affine", "mlp-three")
BUDGET = 40

COLUMNS = """
def columns_at(block, curvature, exponent):
  def step(index, state):
    codes, errors = state
    target = block[index] - jnp.dot(curvature[:, index], errors)
    code = nearest_codes(target[None], exponent)[0]
    value = element(code, exponent)
    error = (target - value) / curvature[index, index]
    return codes.at[index].set(code), errors.at[index].set(error)
  zeros = (jnp.zeros(32, jnp.uint8), jnp.zeros(32, block.dtype))
  codes, errors = jax.lax.fori_loop(0, 32, step, zeros)
  return codes, jnp.sum(errors * errors)
"""
CHOICE = """
def chosen(block, curvature):
  low = block_exponent(block)
  high = jnp.clip(low + 1, -127, 127).astype(jnp.int32)
  codes, cost = columns_at(block, curvature, low)
  wide, wide_cost = columns_at(block, curvature, high)
  is_wide = {test}
  return jnp.where(is_wide, wide, codes), jnp.where(is_wide, high, low)
"""
SEARCHED = CHOICE.replace("{test}", "wide_cost < cost")
ALWAYS_WIDE = CHOICE.replace("{test}", "jnp.isfinite(wide_cost + cost)")
AS_CHOSEN = """
def encode_weight(block, curvature):
  return chosen(block, curvature)
"""
DESCENT = """
def encode_weight(block, curvature):
  codes, exponent = chosen(block, curvature)
  inverse = jnp.linalg.inv(curvature)
  metric = inverse @ inverse.T
  def step(turn, codes):
    index = turn % 32
    left = block - element(codes, exponent)
    pull = jnp.dot(metric[index], left) / metric[index, index]
    wanted = element(codes[index], exponent) + pull
    return codes.at[index].set(nearest_codes(wanted[None], exponent)[0])
  return jax.lax.fori_loop(0, 96, step, codes), exponent
"""

CONTROLS = (
  Control(
    "neighbour",
    {"kind": "shuffle_stats", "hooks": ["encode_weight"]},
    1,
    "each block is told its neighbour's curvature",
  ),
  Control(
    "attention",
    {"kind": "scope", "part": "attention", "parent": True},
    1,
    "the change in attention linears only",
  ),
)


def accounts(told, blind, one_place):
  """Why a change of the weights' codes should help: the focal account first."""
  acting = (
    ("measured", told, "up", "down"),
    ("blind", blind, "down", "down"),
    ("one place", one_place, "up", "same"),
  )
  other = (
    (
      "local",
      "the weights' error falls and nothing that can be told from noise follows",
      {"log_ppl": "same", "weight_error": "down"},
    ),
    (
      "nothing",
      "the change does nothing",
      {"log_ppl": "same", "weight_error": "same"},
    ),
    ("harm", "it destroys something", {"weight_error": "up"}),
  )
  return (
    *(
      Explanation(
        name,
        statement,
        {
          "primary": {"log_ppl": "down", "weight_error": "down"},
          "neighbour": {"weight_error": neighbour},
          "attention": {"weight_error": attention},
        },
      )
      for name, statement, neighbour, attention in acting
    ),
    *(
      Explanation(name, statement, {"primary": primary})
      for name, statement, primary in other
    ),
  )


def change(name, template, told, blind, one_place):
  """A change of `encode_weight` as a card."""
  return EditTemplate(
    id=name,
    hooks=("encode_weight",),
    template=edit_templates.SNIPPETS["element"] + COLUMNS + template,
    residual="weight_error",
    explanations=accounts(told, blind, one_place),
    controls=CONTROLS,
    statement=told,
  )


IN_DOWN = "all of it comes from the wide input of the down projection"
START = "HiRes"
SEARCHED_CARD = change(
  "searched exponents",
  SEARCHED + AS_CHOSEN,
  "a block whose maximum is 6 to 8 times the scale loses by clipping it, and the "
  "compensated errors tell when",
  "the wider exponent is the better one whatever the errors are measured by",
  IN_DOWN,
)
DESCENT_CARD = change(
  "block descent",
  SEARCHED + DESCENT,
  "a code decided before its block's others were is no longer the best one",
  "deciding codes twice helps whatever the curvature",
  IN_DOWN,
)
WIDE_CARD = change(
  "always the wider exponent",
  ALWAYS_WIDE + AS_CHOSEN,
  "clipping is what costs, so no block should clip",
  "any other exponent does the same",
  IN_DOWN,
)
STEPS = (
  (SEARCHED_CARD, START),
  (DESCENT_CARD, SEARCHED_CARD.id),
  (WIDE_CARD, START),
)
"""Changes in the order of their packets, each with the program that it revises."""


def composed(source):
  """The initial program with the cards of HiRes."""
  by_id = {card.id: card for card in edit_templates.EDIT_TEMPLATES}
  for name in HIRES:
    card = by_id[name]
    source = card.edit(source, dict(card.params[0]))
  return source


class Scripted:
  """Proposes HiRes and then the steps, each on the program that it revises."""

  name = "next-packets"

  def __init__(self, initial):
    """Takes the source of the initial program."""
    self.sources = {"": initial, START: composed(initial)}
    for card, parent in STEPS:
      self.sources[card.id] = card.edit(self.sources[parent], {})

  def propose(self, context):
    """See `Proposer.propose`."""
    done = {experiment.label for experiment in context.history}
    if START not in done:
      return Proposal(source=self.sources[START], label=START)
    left = [(card, parent) for card, parent in STEPS if card.id not in done]
    if not left:
      raise ProposerError("every step was proposed")
    card, parent = left[0]
    if context.parent.source != self.sources[parent]:
      raise ExhaustedError("the step revises another program")
    return Proposal(
      source=self.sources[card.id],
      label=card.id,
      note=card.statement,
      residual=card.residual,
      explanations=card.explanations,
      controls=card.controls,
      declared=card.hooks,
    )


def shown(values):
  """The observables that tables show."""
  return {name: round(values[name], 6) for name in SHOWN if name in values}


def packets(folder):
  """What every packet registered, showed and was judged, in order."""
  found = []
  for story in explain.stories(folder, read_events(folder)):
    verdict = story.verdict or {}
    found.append(
      {
        "label": story.packet.get("label", "RTN"),
        "packet": story.packet["id"][:12],
        "program": story.packet["packet"]["program"][:12],
        "parent": story.packet["packet"]["parent"][:12],
        "answers": [p[:12] for p in story.packet["packet"]["response_to"]],
        "conditions": {
          outcome["condition"]: {
            "status": outcome["status"],
            **shown(outcome["values"]),
            "observed": verdict.get("observed", {}).get(outcome["condition"], {}),
          }
          for outcome in story.outcomes
        },
        "verdict": verdict.get("verdict", ""),
        "reason": verdict.get("reason", ""),
        "left": verdict.get("survivors", []),
        "excluded": list(verdict.get("excluded", [])),
        "response": verdict.get("response", ""),
        "implemented": [check["implemented"] for check in story.checks],
      }
    )
  return found


def held_out(task, folder, sources):
  """The programs on the model that no packet saw."""
  other = task.holdout()
  store = Store(folder / "heldout")
  evaluator = CachedEvaluator(other, LocalExecutor(other), store)
  found = {}
  for name, source in sources.items():
    call = evaluator.prepare(source).call
    (outcome,) = evaluator.measure(call)
    found[name or "RTN"] = {"status": outcome.status, **shown(outcome.values)}
  store.close()
  return found


def tables(result):
  """Packets, and the programs on the held-out model."""
  lines = []
  for packet in result["packets"]:
    for name, outcome in packet["conditions"].items():
      is_first = name == "primary"
      moved = ", ".join(
        f"{k} {v}" for k, v in outcome["observed"].items() if k in SHOWN
      )
      numbers = [f"{outcome[k]:.6f}" if k in outcome else "-" for k in SHOWN]
      left = f"{packet['verdict']}; left: {', '.join(packet['left'])}"
      ended = left if is_first and packet["verdict"] else ""
      label = packet["label"] if is_first else ""
      lines.append([label, name, *numbers, moved or "-", ended])
  margins = [f"{result['margins'][name]:.6f}" for name in SHOWN]
  lines.append(["margin of a change", "", *margins, "", ""])
  names = [name.replace("_", " ") for name in SHOWN]
  head = ["packet", "condition", *names, "against its parent", "verdict"]
  rows = [
    [name, *(f"{values[key]:.6f}" for key in SHOWN)]
    for name, values in result["held_out"].items()
  ]
  return (
    provenance.markdown(head, lines)
    + "\nHeld out:\n\n"
    + provenance.markdown(["program", *names], rows)
  )


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--out", default="runs/next_packets")
  folder = pathlib.Path(parser.parse_args().out)
  kept = folder / "task.json"
  if kept.exists():
    spec = json.loads(kept.read_text())
  else:
    spec = ptq_margins.calibrated(TASK)
    folder.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(spec))
  task = ptq.PtqTask(**{key: value for key, value in spec.items() if key != "task"})
  proposer, store = Scripted(task.interface.default_source()), Store(folder / "run")
  evaluator = CachedEvaluator(task, LocalExecutor(task), store)
  config = SearchConfig(budget=BUDGET, sequential=False)
  Search(config, evaluator, proposer, store).run(
    lambda event: print(event["event"], event.get("label", ""), flush=True)
  )
  result = {
    **provenance.stamp(hidden=("--out",)),
    "calibration": spec["calibration"],
    "windows": spec["windows"],
    "replicates": spec["replicates"],
    "margins": shown(spec["margins"]),
    "packets": packets(folder / "run"),
    "held_out": held_out(task, folder, proposer.sources),
  }
  path = RESULTS / "next_packets.json"
  path.write_text(json.dumps(result, indent=1) + "\n")
  path.with_suffix(".md").write_text(tables(result))


if __name__ == "__main__":
  main()
