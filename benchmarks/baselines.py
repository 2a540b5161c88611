"""Every method and every ablation of the paper on the small trained models.

  python benchmarks/baselines.py compare llama qwen3 mistral olmo2
  python benchmarks/baselines.py checks llama
  python benchmarks/baselines.py reproduce llama
  python benchmarks/baselines.py rules llama
  python benchmarks/baselines.py next llama qwen3
  python benchmarks/baselines.py stages
  python benchmarks/baselines.py tables [llama qwen3 mistral olmo2] --part PART
  python benchmarks/baselines.py smollm2 [--methods NAMES]
  python benchmarks/baselines.py next-smollm2 [--draws 1 2 3]

`compare`, `checks` (variants of methods whose rank differs from the paper's),
`reproduce`, `next` (hires-descent and each of its changes), `stages` and `tables` (a
part of the paper's tables, see PARTS; of SmolLM2-135M-Instruct if no family is named)
call the product's own commands, as a person would. `rules` runs the controls under each
scale rule, to see how much of what recovery repairs is the floor rule's shrinkage of
block maxima. `smollm2` runs the methods on the fixed token ids of DATA: 8 x 2048
calibration tokens of C4, 8 windows of WikiText-2 and 4 of C4 that calibration did not
see; `next-smollm2` hires-descent on shorter windows of the same ids, 4 x 1024 C4 tokens
a draw. Where a published budget takes hours on a CPU the method has a smaller one,
which its name says. Rows are kept in runs/, so a killed run goes on where it was. Each
writes results/NAME.json, without records by layer, and NAME.md for the documents.
"""

import json
import pathlib
import shlex

import common
import numpy as np

from mxjax import models
from mxjax.cli import main as cli
from mxjax.evaluation import datasets
from mxjax.evaluation.measures.statistics import compare as compare_draws
from mxjax.evaluation.subjects import Subject
from mxjax.evaluation.tables.comparing import compare as compare_methods
from mxjax.evaluation.tables.declared import TABLES
from mxjax.models.loading import embedded
from mxjax.numerics import mxfp4
from mxjax.numerics.contract import PAPER_CONTRACT, Contract

RUNS = pathlib.Path("runs/baselines")
SEQUENCES, LENGTH = 16, 256
"""Of calibration, and of the test."""
REPLICATES = 3
SEEDS = "0,3,5"
FAMILIES = ("llama", "qwen3", "mistral", "olmo2")
ABLATIONS = (
  "stages,components,discrete,rules,local,edits,recovery,encoding,geometry,"
  "next,controls"
)
PARTS = {
  "methods": "main,raw,references,aggregates",
  "ablations": "stages,discrete,progression,components,recovery",
  "details": "geometry,rules,local,edits,fresh,encoding,storage",
  "seeds": "method-seeds",
  "components-seeds": "components-seeds",
  "recovery-seeds": "recovery-seeds,encoding-seeds",
  "costs": "rule-cost,cost",
  "predictions": "predictions",
}
"""The paper's tables, a result each: whole methods, what the parts of HiRes are worth
on tasks, what they do to linears and memory, what several calibration draws tell of
four methods, of K and D, and of recovery, the times, which want a machine without
other work from the first build on, and hires-next."""
DRAWN = ("ablations", "details")
"""Parts that the trained models have of all draws; learned baselines take too long."""
RULES = ("floor", "even", "rceil")
CHECKS = (
  "focus:epochs=0:divisor_logit=Infinity,focus,focus:batch=4:epochs=8,gptq,spinquant:steps=0,spinquant,torq,"
  "mr-gptq,brq,wush,wush+r,hires"
)
SMOLLM2 = (
  "rtn,gptq,brq,hires,wush,mr-gptq,torq,focus,wush+r,batquant:tokens=256:steps=40,"
  "spinquant:batch=1:steps=10,spinquant:steps=0"
)
SMALL = (
  *("--sequences", SEQUENCES, "--length", LENGTH),
  *("--windows", SEQUENCES, "--window-length", LENGTH),
)
SHAPES = "--dtype", "float32", *SMALL
WITHOUT_TASKS = (
  *("--without", "tasks", "--wikitext2", "embedded"),
  *("--replicates", REPLICATES),
)


def call(*words):
  """Runs a command of mxjax in this process; returns how a person would."""
  arguments = [str(word) for word in words]
  if code := cli.main(arguments):
    raise SystemExit(f"mxjax {' '.join(arguments)} ended with {code}")
  return shlex.join(["mxjax", *arguments])


def slim(row):
  """A row without what it recorded by layer."""
  return {key: value for key, value in row.items() if key != "record"}


def perplexity_cells(row):
  """Mean and half range over replicates, for each text."""
  found = row["perplexity"].values()
  return [f"{text['mean']:.2f} ± {text['spread'] / 2:.2f}" for text in found]


def rows_table(rows, head, cells, exact):
  """A line a method, those that failed with what they said, after the float model."""
  found = next(row["float_perplexity"] for row in rows if "error" not in row)
  lines = [["BF16 weights", *(f"{value:.2f}" for value in found.values()), *exact]]
  for row in rows:
    found = ["failed: " + row["error"]] if "error" in row else cells(row)
    lines.append([row["method"], *found] + [""] * (len(head) - 1 - len(found)))
  return common.markdown(head, lines)


def write(name, result, text):
  common.write(common.RESULTS / f"{name}.json", result, text)


def compare(family, options, made, what="compare", methods="all"):
  """Methods from one calibration; rows of one family are computed once."""
  out = RUNS / f"compare-{family}"
  said = call(
    *("compare", f"models/trained/{family}", "--out", out, *SHAPES),
    *("--replicates", REPLICATES, "--methods", methods),
    *("--operator-error", "--agreement"),
  )
  rows = json.loads((out / "result.json").read_text())
  head = ["method", "perplexity", "operator error", "KL, nats", "flips", "build, s"]
  cells = lambda row: [
    *perplexity_cells(row),
    f"{row['operator_error']:.6f}",
    f"{row['agreement']['kl_mean']:.4f}",
    f"{100 * row['agreement']['flips']:.1f} %",
    f"{row['seconds']:.0f}",
  ]
  result = {**made, "mxjax": said, "rows": [slim(row) for row in rows]}
  text = rows_table(rows, head, cells, ["0", "0", "0 %", "-"])
  write(f"{what}_{family}", result, text)


def checks(family, options, made):
  """Variants that tell why a rank differs."""
  compare(family, options, made, "checks", CHECKS)


def reproduced(name, families, options, made, tables, *extra):
  """Tables of `mxjax reproduce` over the paper's calibration draws."""
  found = ",".join(f"models/trained/{family}" for family in families)
  words = [tables, "--models", found, "--calib", "embedded", *SHAPES, *extra]
  words += ["--seeds", SEEDS, "--local-sequences", SEQUENCES, "--operator-error"]
  collected(name, RUNS / name, options, made, words)


def collected(name, out, options, made, words):
  """Runs `mxjax reproduce`, and writes its tables and results without our paths.

  What is finished in its folder, of other tables too, is in the results.
  """
  said = call("reproduce", *words, "--out", out)
  text = (out / "tables.md").read_text().replace("## ", "### ")
  rows = [
    {"build": "/".join(file.parts[-4:-2])}
    | {key: row[key] for key in ("method", "seconds", "operator_error")}
    | {"perplexity": {n: found["values"] for n, found in row["perplexity"].items()}}
    for file in sorted(out.glob("*/*/build/result.json"))
    for row in json.loads(file.read_text())
  ]
  measured = {}
  for file in sorted(out.glob("*/*/*/evaluation.json")):
    for task, found in json.loads(file.read_text())["tasks"].items():
      place = measured.setdefault("/".join(file.parts[-4:-2]), {})
      place[task] = {key: found[key] for key in ("score", "items", "token_sha256")}
  found = json.dumps({"mxjax": said, "rows": rows, "results": measured})
  for place, word in ((options.data.resolve(), "DATA"), (RUNS.resolve(), "RUNS")):
    found, text = (whole.replace(str(place), word) for whole in (found, text))
  write(name, {**made, **json.loads(found)}, text)


def reproduce(family, options, made):
  """All ablations of one family, without tasks."""
  name = f"reproduce_{family}"
  reproduced(name, [family], options, made, ABLATIONS, *WITHOUT_TASKS)


def next_(family, options, made):
  """HiRes against hires-descent and each of its changes, over calibration draws."""
  extra = (*WITHOUT_TASKS, "--agreement")
  reproduced(f"next_{family}", [family], options, made, "next", *extra)


def task_words(options):
  """Tasks and texts of the options of `mxjax reproduce`."""
  text = options.data.resolve() / common.WIKITEXT
  return "--items", options.items, "--task-source", "embedded", "--wikitext2", text


def stages(options, made):
  """Stages of all families, on the first items and windows of Fit-3's tasks."""
  c4 = options.data.resolve() / common.C4
  words = (*task_words(options), "--c4", c4)
  reproduced("stages", FAMILIES, options, made, "stages", *words)


def tables(options, made):
  """A part of the paper's tables in the paper's BF16, all on one set of builds.

  Draw 0 of SmolLM2-135M-Instruct is rows 0 to 7 of the reference protocol. The trained
  models are calibrated on embedded text, with three perturbed replicates and windows of
  both texts as short as those they were trained on.
  """
  families = [name for name in options.families if name != "smollm2"]
  words = [PARTS[options.part], "--dtype", "bfloat16", *task_words(options)]
  words += ["--local-sequences", SEQUENCES, "--operator-error"]
  words += ["--without", options.without] if options.without else []
  for row in options.instead:
    words += ["--instead", row]
  is_repeated = "seeds" in options.part or (families and options.part in DRAWN)
  words += ["--seeds", options.seeds or (SEEDS if is_repeated else "0")]
  if families:
    folders = ",".join(f"models/trained/{family}" for family in families)
    words += ["--models", folders, "--calib", "embedded"]
    words += ["--c4", options.data.resolve() / common.C4, *SMALL, "--agreement"]
    words += ["--replicates", REPLICATES]
    name = "tables_trained"
  else:
    calibration, unseen = common.split_c4(options.data, RUNS.resolve() / "c4")
    words += ["--models", "SmolLM2-135M-Instruct", "--c4", unseen]
    words += ["--calib", calibration, "--sampling", "windows"]
    words += ["--sequences", 8, "--length", 2048, "--windows", 8]
    words += ["--window-length", 2048]
    name = "tables_smollm2"
  collected(f"{name}_{options.part}", RUNS / name, options, made, words)


def smollm2(options, made):
  """The methods on the reference token ids."""
  c4, wikitext = common.smollm2_ids(options.data)
  tests = {"WikiText-2": wikitext, "C4": c4[8:12]}
  subject = Subject(*models.from_pretrained(), tests, replicates=REPLICATES)
  folder = RUNS / "compare-smollm2"
  names = options.methods.split(",")
  rows, _ = compare_methods(subject, c4[:8], names, folder=folder, on_method=print)
  head = ["method", *tests, "operator error", "build, s"]
  cells = lambda row: [
    *perplexity_cells(row),
    f"{row['operator_error']:.6f}",
    f"{row['seconds']:.0f}",
  ]
  result = {**made, "rows": [slim(row) for row in rows]}
  write("compare_smollm2", result, rows_table(rows, head, cells, ["0", "-"]))


def next_smollm2(options, made):
  """HiRes and hires-descent on SmolLM2, over draws of C4 tokens."""
  ids, wikitext = (side[:, :1024] for side in common.smollm2_ids(options.data))
  tests = {"WikiText-2": wikitext[:4], "C4": ids[12:16]}
  loaded = models.from_pretrained()
  subject = Subject(*loaded, tests, replicates=2, with_agreement=True)
  rows = {"hires-descent": [], "hires": []}
  for draw in options.draws:
    folder, calibration = RUNS / f"next-smollm2-{draw}", ids[4 * (draw - 1) : 4 * draw]
    found, _ = compare_methods(
      subject, calibration, list(rows), folder=folder, on_method=print
    )
    for row in found:
      rows[row["method"]].append(slim(row))
  lines = []
  for head, value, least in (
    ("perplexity, WikiText-2", lambda r: r["perplexity"]["WikiText-2"]["values"], 0),
    ("perplexity, C4", lambda r: r["perplexity"]["C4"]["values"], 0),
    ("operator error", lambda r: [r["operator_error"]], 1e-3),
    ("KL, nats", lambda r: [r["agreement"]["kl_mean"]], 1e-3),
  ):
    sides = [[value(row) for row in side] for side in rows.values()]
    means = [float(np.mean(side)) for side in sides]
    found = compare_draws(*sides, least=least * means[1])
    lines.append([head, *(f"{mean:.6g}" for mean in means), str(found)])
  text = common.markdown(["quantity", *rows, "difference"], lines)
  write("next_smollm2", {**made, "seeds": options.draws, "rows": rows}, text)


def gain_of(row):
  """Mean factor that a row's recovery puts on values; None without recovery."""
  gains = []
  for layer in row["record"]["layers"]:
    gains += layer["recovery"].get("attention", {}).get("scale", [])
  return float(np.mean(gains)) if gains else None


def trained(family):
  """What to study on a trained model, and its calibration tokens."""
  folder = embedded.trained_folder(family)
  tokenizer = models.load_tokenizer(folder)
  load = lambda split: datasets.load_tokens(
    None, tokenizer, count=SEQUENCES, length=LENGTH, split=split
  )
  tests, loaded = {"passages": load("test")}, models.from_pretrained(folder)
  options = {"replicates": REPLICATES, "with_agreement": True}
  return Subject(*loaded, tests, **options), load("calibration")


def rules(family, options, made):
  """RTN and HiRes with and without repairs, under every scale rule."""
  contracts = {
    f"[{rule}]": Contract(rules=mxfp4.Rules(scale_rule=rule)) for rule in RULES
  }
  assert contracts["[floor]"].hash == PAPER_CONTRACT.hash
  programs, folder = list(TABLES["controls"].rows.values()), RUNS / f"rules-{family}"
  rows, _ = compare_methods(
    *trained(family), programs, folder=folder, contracts=contracts
  )
  if failed := [row for row in rows if "error" in row]:
    raise SystemExit(f"{failed[0]['method']}: {failed[0]['error']}")
  found = {row["method"]: row for row in rows}
  plain = {"rtn+r": "rtn", "hires": "hires:recover=none"}
  repairs = {
    f"{name} [{rule}]": f"{plain[name]} [{rule}]" for rule in RULES for name in plain
  }
  lines, summary = [], {}
  for name, row in found.items():
    kl, (ours,) = row["agreement"]["kl_mean"], row["perplexity"].values()
    entry = slim(row) | {"mean_gain": gain_of(row)}
    repaired = "-"
    if name in repairs:
      before = found[repairs[name]]
      (theirs,) = before["perplexity"].values()
      entry["log_perplexity_repaired"] = float(np.log(theirs["mean"] / ours["mean"]))
      entry["kl_repaired"] = before["agreement"]["kl_mean"] - kl
      share = 100 * entry["kl_repaired"] / before["agreement"]["kl_mean"]
      repaired = f"{share:+.1f} %"
    gain = "-" if entry["mean_gain"] is None else f"{entry['mean_gain']:.4f}"
    error = f"{row['operator_error']:.6f}"
    lines.append([name, *perplexity_cells(row), error, f"{kl:.4f}", repaired, gain])
    summary[name] = entry
  head = ["program [scale rule]", "perplexity", "operator error", "KL, nats"]
  head += ["KL repaired", "mean factor fitted"]
  shape = [SEQUENCES, LENGTH]
  result = {**made, "calibration": shape, "test": shape, "rows": summary}
  write(f"rules_{family}", result, common.markdown(head, lines))


BY_FAMILY = {
  "compare": compare,
  "checks": checks,
  "reproduce": reproduce,
  "rules": rules,
  "next": next_,
}
WHOLE = {
  "smollm2": smollm2,
  "next-smollm2": next_smollm2,
  "stages": stages,
  "tables": tables,
}


def main():
  parser = common.parser(__doc__, data=True, out=False)
  parser.add_argument("what", choices=(*BY_FAMILY, *WHOLE))
  parser.add_argument("families", nargs="*", metavar="FAMILY")
  parser.add_argument("--draws", type=int, nargs="+", default=[1, 2, 3])
  parser.add_argument("--methods", default=SMOLLM2, help="of smollm2")
  parser.add_argument("--part", choices=PARTS, default="ablations", help="of tables")
  parser.add_argument("--items", type=int, default=100, help="of each task of tables")
  parser.add_argument("--without", help="columns or rows of tables, by name")
  parser.add_argument("--instead", action="append", default=[], metavar="ROW=METHOD")
  parser.add_argument("--seeds", help="draws of tables, 0 or 0,3,5 if omitted")
  options = parser.parse_args()
  made = common.stamp()
  if options.what in WHOLE:
    WHOLE[options.what](options, made)
    return
  for family in options.families:
    BY_FAMILY[options.what](family, options, made)


if __name__ == "__main__":
  main()
