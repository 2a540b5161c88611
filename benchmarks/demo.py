"""What `mxjax demo` takes and prints, from a new folder and without compiled programs.

  python benchmarks/demo.py

The command runs in a process of its own, as a person would run it, in an empty folder
and with an empty cache. Seconds are by the clock from the start of the process to its
end; beside them stand those that all cores worked for it, which hardly depend on other
work of the machine, and the load before and after.
"""

import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

import common

WORDS = ["demo"]
ROOT = pathlib.Path(__file__).parents[1]
NAMES = {"rtn": "RTN", "hires": "HiRes"}


def environment(home):
  """The variables of this process, but for those that keep compiled programs."""
  kept = {k: v for k, v in os.environ.items() if k != common.KEPT_PROGRAMS}
  places = [str(ROOT), *filter(None, [kept.get("PYTHONPATH")])]
  return kept | {"XDG_CACHE_HOME": home, "PYTHONPATH": os.pathsep.join(places)}


def worked():
  """Processor seconds of the processes that this one has waited for."""
  used = resource.getrusage(resource.RUSAGE_CHILDREN)
  return used.ru_utime + used.ru_stime


def slim(row):
  """A row without what it recorded by layer and by window."""
  (text,) = row["perplexity"].values()
  names = "method", "seconds", "evaluation_seconds", "operator_error", "size"
  return {name: row[name] for name in names} | {"perplexity": text["mean"]}


def table(result):
  """A line a model: perplexity, operator error and megabytes."""
  head = ["method", "perplexity", "operator error", "MB"]
  rows = result["rows"]
  whole = f"{rows[0]['size']['bf16_total'] / 1e6:.0f}"
  lines = [["float", f"{result['float_perplexity']:.2f}", "0", whole]]
  for row in rows:
    cells = [NAMES[row["method"]], f"{row['perplexity']:.2f}"]
    cells += [f"{row['operator_error']:.6f}", f"{row['size']['total'] / 1e6:.0f}"]
    lines.append(cells)
  return common.markdown(head, lines)


def main():
  options = common.parser(__doc__).parse_args()
  result = common.stamp()
  with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as home:
    before, start = worked(), time.perf_counter()
    done = subprocess.run(
      [sys.executable, "-m", "mxjax", *WORDS],
      cwd=folder,
      env=environment(home),
      stdout=subprocess.PIPE,
      text=True,
      check=True,
    )
    result |= {
      "seconds": round(time.perf_counter() - start, 1),
      "processor_seconds": round(worked() - before, 1),
      "load_at_end": os.getloadavg()[0],
      "prints": done.stdout.splitlines(),
    }
    rows = json.loads((pathlib.Path(folder) / "runs/demo/result.json").read_text())
  (text,) = rows[0]["float_perplexity"].items()
  result |= {"text": text[0], "float_perplexity": text[1]}
  result["rows"] = [slim(row) for row in rows]
  common.write(options.out, result, table(result))


if __name__ == "__main__":
  main()
