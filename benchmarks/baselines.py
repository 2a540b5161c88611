"""Every method and every ablation of the paper on the small trained models.

  python benchmarks/baselines.py compare llama
  python benchmarks/baselines.py checks llama
  python benchmarks/baselines.py reproduce llama
  python benchmarks/baselines.py stages [--data ../shared/data]
  python benchmarks/baselines.py tables smollm2 --part methods [--data ../shared/data]
  python benchmarks/baselines.py rules llama
  python benchmarks/baselines.py next llama qwen3 mistral olmo2
  python benchmarks/baselines.py next-smollm2 [--data ../shared/data] [--draws 1 2 3]
  python benchmarks/baselines.py smollm2 [--data ../shared/data] [--methods NAMES]

`compare`, `reproduce` and `stages` are the product's own commands, called as a person
would;
`checks` compares variants of those methods whose rank differs from the paper's;
`rules` runs the controls under each scale rule, to see how much of what recovery
repairs is the floor rule's shrinkage of block maxima. `smollm2` runs the methods on the
fixed token ids of DATA: 8 x 2048 calibration tokens of C4, 8 windows of WikiText-2 and
4 of C4 documents that calibration did not see. `next` compares hires-descent, and
each of its two changes alone, with HiRes over calibration draws; `next-smollm2` both
programs on shorter windows of the same ids, 4 x 1024 C4 tokens a draw. Where a
published budget takes hours on a CPU the method has a smaller one, which its name says.
Rows are kept in runs/, so a killed run goes on where it was. Each writes
benchmarks/results/NAME.json, rows without their records by layer, and NAME.md, the
table that docs/results/methods.md or docs/results/hires_descent.md shows.
"""

import argparse
import json
import pathlib

import numpy as np
import provenance
import trained

from mxjax import models
from mxjax.evaluation import study
from mxjax.evaluation.cli import parser as cli
from mxjax.evaluation.measures.statistics import compare as compare_draws
from mxjax.evaluation.reproduce.declared import TABLES
from mxjax.numerics import mxfp4
from mxjax.numerics.contract import PAPER_CONTRACT, Contract

RESULTS = pathlib.Path(__file__).parent / "results"
RUNS = pathlib.Path("runs/baselines")
CALIBRATION, TEST = (16, 256), (16, 256)
REPLICATES = 3
SEEDS = "0,3,5"
ITEMS = 100
CALIBRATION_DOCUMENTS = 600
"""Of the thousand of C4; the others are unseen text."""
FAMILIES = ("llama", "qwen3", "mistral", "olmo2")
ABLATIONS = (
  "stages,components,discrete,rules,local,edits,recovery,encoding,geometry,readings,"
  "next,controls"
)
PARTS = {
  "methods": "main,raw,references,aggregates",
  "ablations": "stages,discrete,progression,components,recovery",
  "details": "geometry,rules,local,edits,rule-cost,fresh,encoding,storage,cost",
}
"""The paper's tables of one calibration draw, in three results."""
RULES = ("floor", "even", "rceil")
CHECKS = (
  *("rtn+rceil", "focus", "focus:batch=4:epochs=8"),
  *("gptq", "spinquant:steps=0", "spinquant", "torq", "mr-gptq"),
  *("brq", "wush", "wush+r", "hires"),
)
SMOLLM2 = (
  *("rtn", "gptq", "brq", "hires", "wush", "mr-gptq", "torq", "focus", "wush+r"),
  *("batquant:tokens=256:steps=40", "spinquant:batch=1:steps=10"),
  "spinquant:steps=0",
)


def options_of(model, out):
  """The options of `compare`."""
  words = [str(model), "--out", out, "--dtype", "float32"]
  words += ["--sequences", CALIBRATION[0], "--length", CALIBRATION[1]]
  words += ["--windows", TEST[0], "--window-length", TEST[1]]
  return [str(word) for word in [*words, "--replicates", REPLICATES]]


def call(command, *words):
  """Runs a command of mxjax in this process."""
  arguments = [command, *words]
  if code := cli.main(arguments):
    raise SystemExit(f"mxjax {' '.join(arguments)} ended with {code}")
  return "mxjax " + " ".join(arguments)


def slim(row):
  """A row without what it recorded by layer."""
  return {key: value for key, value in row.items() if key != "record"}


def linears_of(row):
  """Records of all linears."""
  layers = row["record"]["layers"]
  return [linear for layer in layers for linear in layer["linears"].values()]


def perplexity_cell(row):
  """Mean and half range over replicates."""
  (found,) = row["perplexity"].values()
  return f"{found['mean']:.2f} ± {found['spread'] / 2:.2f}"


def write(name, result, text):
  """The two result files."""
  (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
  (RESULTS / f"{name}.md").write_text(text)
  print(text, flush=True)


def compare(family, made, what="compare", methods="all"):
  """Methods from one calibration; rows of one family are computed once."""
  out = RUNS / f"compare-{family}"
  measured = ["--methods", methods, "--operator-error", "--agreement"]
  said = call("compare", *options_of(f"models/trained/{family}", out), *measured)
  rows = json.loads((out / "result.json").read_text())
  (exact,) = next(r["float_perplexity"] for r in rows if "error" not in r).values()
  lines = [["BF16 weights", f"{exact:.2f}", "0", "0", "0 %", "-"]]
  for row in rows:
    if "error" in row:
      lines.append([row["method"], "failed: " + row["error"], "", "", "", ""])
      continue
    lines.append(
      [
        row["method"],
        perplexity_cell(row),
        f"{row['operator_error']:.6f}",
        f"{row['agreement']['kl_mean']:.4f}",
        f"{100 * row['agreement']['flips']:.1f} %",
        f"{row['seconds']:.0f}",
      ]
    )
  head = ["method", "perplexity", "operator error", "KL, nats", "flips", "build, s"]
  result = {**made, "mxjax": said, "rows": [slim(row) for row in rows]}
  write(f"{what}_{family}", result, provenance.markdown(head, lines))


def checks(family, made):
  """Variants that tell why a rank differs."""
  compare(family, made, "checks", ",".join(CHECKS))


def reproduced(name, families, made, tables, *extra, data=""):
  """Tables of `mxjax reproduce` over the paper's calibration draws; hides `data`."""
  out = RUNS / name
  models_ = ",".join(f"models/trained/{family}" for family in families)
  words = [tables, "--models", models_, "--out", str(out), "--calib", "embedded"]
  words += ["--dtype", "float32"]
  words += ["--sequences", CALIBRATION[0], "--length", CALIBRATION[1]]
  words += ["--windows", TEST[0], "--window-length", TEST[1], "--seeds", SEEDS]
  words += ["--local-sequences", TEST[0], "--operator-error", *extra]
  collected(name, made, words, {data: "DATA"} if data else {})


def collected(name, made, words, hidden):
  """Runs `mxjax reproduce`, and writes its tables and results; hides paths.

  What is finished in its folder, of other tables too, is in the results.
  """
  out = pathlib.Path(words[words.index("--out") + 1])
  said = call("reproduce", *map(str, words))
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
  for place, word in hidden.items():
    found, text = (whole.replace(str(place), word) for whole in (found, text))
  write(name, {**made, **json.loads(found)}, text)


WITHOUT_TASKS = (
  *("--without", "tasks", "--wikitext2", "embedded"),
  *("--replicates", REPLICATES),
)


def reproduce(family, made):
  """All ablations of one family, without tasks."""
  reproduced(f"reproduce_{family}", [family], made, ABLATIONS, *WITHOUT_TASKS)


def next_(family, made):
  """HiRes against hires-descent and each of its changes, over calibration draws."""
  extra = (*WITHOUT_TASKS, "--agreement")
  reproduced(f"next_{family}", [family], made, "next", *extra)


def stages(options, made):
  """Stages of all families, on the first items and windows of Fit-3's tasks."""
  data = pathlib.Path(options.data)
  words = ["--items", ITEMS, "--task-source", "embedded"]
  words += ["--wikitext2", data / "wikitext2" / "wiki.test.raw"]
  words += ["--c4", data / "c4" / "c4_en_train_first1000.jsonl"]
  reproduced("stages", FAMILIES, made, "stages", *words, data=data)


def split_c4(data, folder):
  """Writes the C4 documents as two files, to calibrate on and to measure on."""
  file = data / "c4" / "c4_en_train_first1000.jsonl"
  lines = file.read_text().splitlines(keepends=True)
  parts = {"calibration": lines[:CALIBRATION_DOCUMENTS]}
  parts["unseen"] = lines[CALIBRATION_DOCUMENTS:]
  folder.mkdir(parents=True, exist_ok=True)
  for name, part in parts.items():
    (folder / f"c4_{name}.jsonl").write_text("".join(part))
  return [folder / f"c4_{name}.jsonl" for name in parts]


def tables(options, made):
  """The paper's tables of SmolLM2-135M, or of a small model, in the paper's BF16.

  Calibration draw 0 of SmolLM2 is rows 0 to 7 of the reference protocol.
  """
  data = pathlib.Path(options.data).resolve()
  calibration, unseen = split_c4(data, RUNS.resolve() / "c4")
  for name in options.families:
    is_small = name in FAMILIES
    length = 256 if is_small else 2048
    model = f"models/trained/{name}" if is_small else "SmolLM2-135M"
    words = [PARTS[options.part], "--models", model, "--dtype", "bfloat16"]
    words += ["--out", RUNS / f"tables_{name}", "--seeds", options.seeds]
    words += ["--calib", calibration, "--sampling", "windows"]
    words += ["--sequences", 16 if is_small else 8, "--length", length]
    words += ["--items", options.items, "--task-source", "embedded"]
    words += ["--wikitext2", data / "wikitext2" / "wiki.test.raw", "--c4", unseen]
    words += ["--windows", 16 if is_small else 8, "--window-length", length]
    words += ["--local-sequences", options.local_sequences, "--operator-error"]
    words += ["--replicates", REPLICATES] if is_small else []
    words += ["--without", options.without] if options.without else []
    made_of = f"tables_{name}_{options.part}"
    collected(made_of, made, words, {data: "DATA", RUNS.resolve(): "RUNS"})


def next_smollm2(options, made):
  """HiRes and hires-descent on SmolLM2, over draws of C4 tokens."""
  data = pathlib.Path(options.data)
  ids = np.load(data / "c4" / "smollm2_calib_16x2048.npy")[:, :1024]
  wikitext = np.load(data / "wikitext2" / "smollm2_test_8x2048.npy")[:4, :1024]
  model, params = models.from_pretrained(None)
  subject = study.Subject(
    model,
    params,
    {"WikiText-2": wikitext, "C4": ids[12:16]},
    replicates=2,
    with_agreement=True,
  )
  rows = {"hires-descent": [], "hires": []}
  for draw in options.draws:
    found, _ = study.compare(
      subject,
      ids[4 * (draw - 1) : 4 * draw],
      list(rows),
      folder=RUNS / f"next-smollm2-{draw}",
      on_method=print,
    )
    for row in found:
      rows[row["method"]].append(slim(row))
  result = {"seeds": options.draws, "rows": rows}
  ours, theirs = rows.values()
  lines = []
  for head, read, least in (
    ("perplexity, WikiText-2", lambda r: r["perplexity"]["WikiText-2"]["values"], 0),
    ("perplexity, C4", lambda r: r["perplexity"]["C4"]["values"], 0),
    ("operator error", lambda r: [r["operator_error"]], 1e-3),
    ("KL, nats", lambda r: [r["agreement"]["kl_mean"]], 1e-3),
  ):
    sides = [[read(row) for row in side] for side in (ours, theirs)]
    means = [float(np.mean(side)) for side in sides]
    found = compare_draws(*sides, least=least * means[1])
    lines.append([head, *(f"{mean:.6g}" for mean in means), str(found)])
  head = ["quantity", *rows, "difference"]
  write("next_smollm2", {**made, **result}, provenance.markdown(head, lines))


def gain_of(row):
  """Mean factor that a row's repair puts on outputs: of linears, or of values."""
  gains = [linear["gain"] for linear in linears_of(row) if "gain" in linear]
  for layer in row["record"]["layers"]:
    gains += layer["recovery"].get("attention", {}).get("scale", [])
  return float(np.mean(gains)) if gains else None


def rules(family, made):
  """RTN and HiRes with and without repairs, under every scale rule."""
  subject, calibration = trained.subject(family, CALIBRATION, TEST, REPLICATES)
  programs = list(TABLES["controls"].rows.values())
  contracts = {
    f"[{rule}]": Contract(rules=mxfp4.Rules(scale_rule=rule)) for rule in RULES
  }
  assert contracts["[floor]"].hash == PAPER_CONTRACT.hash
  rows, _ = study.compare(
    subject,
    calibration,
    programs,
    folder=RUNS / f"rules-{family}",
    contracts=contracts,
  )
  found = {row["method"]: row for row in rows}
  if failed := [row for row in rows if "error" in row]:
    raise SystemExit(f"{failed[0]['method']}: {failed[0]['error']}")
  repairs = {
    f"{repaired} [{rule}]": f"{plain} [{rule}]"
    for rule in RULES
    for plain, repaired in (
      ("rtn", "rtn+gain"),
      ("rtn", "rtn+r"),
      ("hires:recover=none", "hires"),
    )
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
    lines.append(
      [name, perplexity_cell(row), f"{row['operator_error']:.6f}", f"{kl:.4f}"]
      + [repaired, gain]
    )
    summary[name] = entry
  head = ["program [scale rule]", "perplexity", "operator error", "KL, nats"]
  head += ["KL repaired", "mean factor fitted"]
  result = {**made, "calibration": CALIBRATION, "test": TEST, "rows": summary}
  write(f"rules_{family}", result, provenance.markdown(head, lines))


def smollm2(options, made):
  """The methods on the reference token ids."""
  data = pathlib.Path(options.data)
  ids = np.load(data / "c4" / "smollm2_calib_16x2048.npy")
  calibration, unseen = ids[:8], ids[8:12]
  model, params = models.from_pretrained(None)
  tests = {
    "WikiText-2": np.load(data / "wikitext2" / "smollm2_test_8x2048.npy"),
    "C4": unseen,
  }
  subject = study.Subject(model, params, tests, replicates=REPLICATES)
  names = options.methods.split(",") if options.methods else SMOLLM2
  rows, _ = study.compare(
    subject, calibration, names, folder=RUNS / "compare-smollm2", on_method=print
  )
  exact = next(r["float_perplexity"] for r in rows if "error" not in r)
  lines = [["BF16 weights", *(f"{exact[test]:.2f}" for test in tests), "0", "-"]]
  for row in rows:
    if "error" in row:
      lines.append([row["method"], "failed: " + row["error"], "", "", ""])
      continue
    cells = [
      f"{found['mean']:.2f} ± {found['spread'] / 2:.2f}"
      for found in row["perplexity"].values()
    ]
    error = f"{row['operator_error']:.6f}"
    lines.append([row["method"], *cells, error, f"{row['seconds']:.0f}"])
  head = ["method", *tests, "operator error", "build, s"]
  result = {**made, "rows": [slim(row) for row in rows]}
  write("compare_smollm2", result, provenance.markdown(head, lines))


COMMANDS = {
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
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("what", choices=(*COMMANDS, *WHOLE))
  parser.add_argument("families", nargs="*", metavar="FAMILY")
  parser.add_argument("--data", default="../shared/data")
  parser.add_argument("--draws", type=int, nargs="+", default=[1, 2, 3])
  parser.add_argument("--methods", help="of smollm2, with commas between")
  parser.add_argument("--part", choices=PARTS, default="ablations", help="of tables")
  parser.add_argument("--seeds", default=SEEDS, help="calibration draws")
  parser.add_argument("--items", type=int, default=ITEMS, help="of each task")
  parser.add_argument("--local-sequences", type=int, default=16)
  parser.add_argument("--without", help="columns or rows of tables, by name")
  options = parser.parse_args()
  made = provenance.stamp(hidden=("--data",))
  if options.what in WHOLE:
    WHOLE[options.what](options, made)
    return
  for family in options.families:
    COMMANDS[options.what](family, made)


if __name__ == "__main__":
  main()
