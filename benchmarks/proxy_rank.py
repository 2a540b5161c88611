"""How fast the free proxy of the ptq task is, and how well it ranks what is real.

  python benchmarks/proxy_rank.py

Candidates are the edit templates on the GPTQ program. On the small Llama-family model,
each has its proxy, which includes tracing and compiling, the proxy again, compiled, and
the KL divergence that an evaluator call measures. Rank correlations are Spearman's,
over all candidates that run, and over those whose KL is at most GPTQ's plus a half.
"""

import json
import tempfile
import time

import common
import numpy as np
import scipy.stats

from mxjax.discovery.core import store
from mxjax.discovery.sandbox.local_executor import LocalExecutor
from mxjax.discovery.search.cached_evaluator import CachedEvaluator
from mxjax.discovery.tasks.ptq import programs
from mxjax.discovery.tasks.ptq.edit_templates import EDIT_TEMPLATES
from mxjax.discovery.tasks.ptq.task import PtqTask
from mxjax.models.loading import embedded

SHAPES = {"objective": "kl", "calibration": [8, 128], "windows": [16, 128]}
RECOVERY = {"recover_value", "recover_mlp"}


def candidates():
  """Sources by label, of which the proxy sees what changed."""
  start = programs.source("gptq")
  made = {"gptq": start}
  for card in EDIT_TEMPLATES:
    if not set(card.hooks) & RECOVERY:
      made[card.label(card.params[0])] = card.edit(start, card.params[0])
  return made


def correlation(rows):
  """Spearman's rank correlation of proxy and KL, and how many rows it is over."""
  pairs = [(row["proxy"], row["kl"]) for row in rows]
  found = scipy.stats.spearmanr(*zip(*pairs, strict=True))
  return {"rows": len(rows), "spearman": float(found.statistic)}


def measured():
  """One row a candidate."""
  task = PtqTask(model=str(embedded.trained_folder("llama")), **SHAPES)
  executor = LocalExecutor(task)
  folder = store.Store(tempfile.mkdtemp(prefix="mxjax-proxy-"))
  real = CachedEvaluator(task, executor, folder)
  again = executor.sibling(task.proxy())
  proxy = CachedEvaluator(task.proxy(), again, folder)
  seconds = []
  for label, text in candidates().items():
    start = time.perf_counter()
    prepared = real.prepare(text)
    (fast,) = proxy.measure(prepared.full_call)
    first = time.perf_counter() - start
    again.run([prepared.full_call], lambda *done: seconds.append(done[-1]))
    (slow,) = real.measure(prepared.full_call)
    row = {"label": label, "status": [fast.status, slow.status]}
    row |= {"proxy": fast.values.get("proxy_error"), "kl": slow.values.get("kl")}
    yield row | {"seconds": first, "seconds again": seconds[-1]}


def main():
  parser = common.parser(__doc__)
  options = parser.parse_args()
  rows = []
  for row in measured():
    rows.append(row)
    print(json.dumps(row), flush=True)
  ran = [row for row in rows if row["proxy"] is not None and row["kl"] is not None]
  near = [row for row in ran if row["kl"] <= 1.5 * rows[0]["kl"]]
  middle = lambda key: float(np.median([row[key] for row in rows[1:]]))
  result = {
    **common.stamp("scipy"),
    "options": SHAPES,
    "all": correlation(ran),
    "near gptq": correlation(near),
    "median seconds": middle("seconds"),
    "median seconds again": middle("seconds again"),
    "rows": rows,
  }
  common.write(options.out, result)


if __name__ == "__main__":
  main()
