"""The best programs of a recorded run beside HiRes, WUSH and GPTQ as programs.

  python benchmarks/discovery_recorded.py [--data ../shared/data] [--windows 64]

The run is `tests/golden/ptq_by_a_model`, and its best programs after some numbers of
calls are in `champions.json` there. Each program is fitted twice to the 8 calibration
sequences of 128 tokens of the run's task. On the model of the task, KL is measured on
the text by which the search chose; on a model that no program of the run saw, it is
measured on the first windows of 128 tokens of WikiText-2's test text.

The best programs search the codes of every block of activations while a model runs,
which costs more than HiRes' rule does. So each is measured once more with that rule in
place of its own: what is left of its gain is in its maps and weights. The method
`map-search` of the library, which has these maps, is quantized on the same text.

KL is from the float model, in nats a token. Differences from HiRes are paired by
window; the interval is the mean of a window's difference, plus or minus 1.96 standard
errors over windows. It has no part of the noise of the one calibration draw. The result
is written after every row, and goes on from the rows that it has of the same programs
and texts.
"""

import hashlib
import json
import pathlib

import common
import discovery_champion
import numpy as np

import mxjax
from mxjax.discovery.tasks.ptq import programs
from mxjax.discovery.tasks.ptq.task import PtqTask
from mxjax.models.loading import embedded

RECORDED = pathlib.Path(__file__).parents[1] / "tests" / "golden" / "ptq_by_a_model"
REFERENCES = "gptq", "wush", "hires"
PORTED = "map-search"
PORTED_ROW = f"{PORTED}, the method of the library"
SEARCHED, HELD_OUT = "llama", "qwen3"
TASK = ("objective", "calibration", "windows")
"""What a task on either model has of the recorded one."""
RULED = ", rounding activations as hires does"


def sources():
  """Source of each program by its name in the table."""
  kept = json.loads((RECORDED / "champions.json").read_text())
  best = {f"best after {name.split()[1]} calls": text for name, text in kept.items()}
  ruled = {f"{name}{RULED}": text for name, text in best.items()}
  return {name: programs.source(name) for name in REFERENCES} | best | ruled


def tasks(data, windows, rule):
  """The same task on another model and text, and the recorded one, under an A4 rule."""
  first = (RECORDED / "log.jsonl").read_text().splitlines()[0]
  recorded = json.loads(first)["task"]
  options = {name: recorded[name] for name in TASK} | {"activation_rule": rule}
  length = options["windows"][1]
  text = str(data / common.WIKITEXT)
  folder = lambda model: str(embedded.trained_folder(model))
  held_out = options | {"windows": [windows, length], "test_text": text}
  return {
    HELD_OUT: PtqTask(model=folder(HELD_OUT), **held_out),
    SEARCHED: PtqTask(model=folder(SEARCHED), **options),
  }


def quantized(task, source):
  """The model's params as a program or, without one, the ported method has them."""
  if source is not None:
    return discovery_champion.fitted(task, source)
  model, params = task.options.load()
  calibration = mxjax.Calibration(model, task.options.tokens("fit"))
  return mxjax.quantize(params, calibration, PORTED)


def table(rows, windows):
  """A line a program: KL of the task and held out, and its differences from HiRes."""
  kl = {(row["program"], row["model"]): row["kl"] for row in rows}
  lines = []
  for program in dict.fromkeys(row["program"] for row in rows):
    cells = [program]
    for model in (SEARCHED, HELD_OUT):
      ours, base = kl.get((program, model)), kl.get(("hires", model))
      told = f"{np.mean(ours):.4f}" if ours else ""
      is_compared = ours and base and program != "hires"
      between = discovery_champion.difference([ours], [base]) if is_compared else ""
      cells += [told, between]
    lines.append(cells)
  head = [
    *("program", f"KL, searched: {SEARCHED}", "less that of hires"),
    *(f"KL, held out: {HELD_OUT}, {windows} windows", "less that of hires"),
  ]
  return common.markdown(head, lines)


def main():
  parser = common.parser(__doc__, data=True)
  parser.add_argument("--windows", type=int, default=64, help="held-out windows")
  options = parser.parse_args()
  by_name = sources()
  digest = lambda source: hashlib.sha256(source.encode()).hexdigest()
  digests = {name: digest(source) for name, source in by_name.items()}
  known = {"windows": options.windows, "programs": digests}
  earlier = common.read(options.out, {**known, "rows": []})
  is_same = all(earlier[key] == value for key, value in known.items())
  rows = earlier["rows"] if is_same else []
  done = {(row["model"], row["program"]) for row in rows}
  made = common.stamp()
  by_rule = {
    rule: tasks(options.data, options.windows, rule) for rule in ("program", "one_code")
  }
  for model in (HELD_OUT, SEARCHED):
    for name, source in (by_name | {PORTED_ROW: None}).items():
      if (model, name) in done:
        continue
      task = by_rule["one_code" if name.endswith(RULED) else "program"][model]
      kl = discovery_champion.kl_of_windows(task, quantized(task, source))
      rows.append({"model": model, "program": name, "kl": kl})
      text = discovery_champion.text({**made, **known, "rows": rows})
      options.out.write_text(text)
      options.out.with_suffix(".md").write_text(table(rows, options.windows))
      print(model, name, f"{np.mean(kl):.4f}", flush=True)
  print(table(rows, options.windows))


if __name__ == "__main__":
  main()
