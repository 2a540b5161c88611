"""Parts of the best recorded program, taken out one at a time, at HiRes' run-time cost.

  python benchmarks/recorded_parts.py [--data ../shared/data] [--windows 64]

The program is the best after 20 calls of the run in `tests/golden/ptq_by_a_model`.
Each row fits it without a part of its search, with HiRes' rule for activations, to the
8 calibration sequences of 128 tokens of the run's task, on a model and a text that no
program of the run saw; see `discovery_recorded.py`. Differences are from the whole
program, and paired by window. The result is written after every row, and goes on from
the rows that it has.
"""

import hashlib

import common
import discovery_champion
import discovery_recorded
import numpy as np

BEST = "best after 20 calls"
SEARCH = "0, 5 * blocks, again, (values, exponents, gradient))"
NO_SEARCH = SEARCH.replace("5 * blocks", "0")
DESCENT = "jax.lax.fori_loop(0, 2 * width, descend, (values, gradient))"
NO_DESCENT = DESCENT.replace("2 * width", "0")
CHOSEN = "'transform': 'solved', 'passes': 8"
ONE = "'transform': 'measured', 'passes': 1"
PARTS = {
  "whole": {},
  "one map in the place of the best of 84": {CHOSEN: ONE},
  "GPTQ and descent, without the search of a block's codes": {SEARCH: NO_SEARCH},
  "GPTQ alone": {SEARCH: NO_SEARCH, DESCENT: NO_DESCENT},
}
"""What is replaced in the source of the program, by the name of the row."""


def source(changes):
  """The program with some of its text replaced, each of which occurs once."""
  text = discovery_recorded.sources()[BEST]
  for old, new in changes.items():
    assert text.count(old) == 1, old
    text = text.replace(old, new)
  return text


def table(rows):
  """A line a row: mean KL, and its difference from the whole program."""
  kl = {row["part"]: row["kl"] for row in rows}
  lines = []
  for part, ours in kl.items():
    cells = [part, f"{np.mean(ours):.4f}", ""]
    if part != "whole":
      cells[-1] = discovery_champion.difference([ours], [kl["whole"]])
    lines.append(cells)
  return common.markdown(["program", "KL", "less that of the whole"], lines)


def main():
  parser = common.parser(__doc__, data=True)
  parser.add_argument("--windows", type=int, default=64, help="held-out windows")
  options = parser.parse_args()
  made = common.stamp()
  tasks = discovery_recorded.tasks(options.data, options.windows, "one_code")
  task = tasks[discovery_recorded.HELD_OUT]
  earlier = common.read(options.out, {"windows": options.windows, "rows": []})
  rows = earlier["rows"] if earlier["windows"] == options.windows else []
  for part, changes in PARTS.items():
    text = source(changes)
    digest = hashlib.sha256(text.encode()).hexdigest()
    if any((row["part"], row["program"]) == (part, digest) for row in rows):
      continue
    fitted = discovery_champion.fitted(task, text)
    kl = discovery_champion.kl_of_windows(task, fitted)
    rows.append({"part": part, "program": digest, "kl": kl})
    result = {**made, "windows": options.windows, "rows": rows}
    options.out.write_text(discovery_champion.text(result))
    options.out.with_suffix(".md").write_text(table(rows))
    print(part, f"{np.mean(kl):.4f}", flush=True)
  print(table(rows))


if __name__ == "__main__":
  main()
