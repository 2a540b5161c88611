"""RTN and HiRes on the small trained model of every family: perplexity and errors.

  python benchmarks/families.py [FAMILY ...]

Calibrates on the text that the models were trained on (the first half of the embedded
passages) and measures on the second half, which they have not seen; perplexity is the
mean of three runs, two with the embedding perturbed by 1e-6. Writes
benchmarks/results/families.json and families.md; families that are not named keep
their entry.
"""

import json
import pathlib
import sys

import provenance
import trained

from mxjax.evaluation import study
from mxjax.models import families
from mxjax.models.loading import embedded

RESULT = pathlib.Path(__file__).parent / "results" / "families.json"
CALIBRATION, TEST = (8, 256), (32, 256)
METHODS = ("rtn", "hires")
REPLICATES = 3


def measure(family):
  folder = embedded.trained_folder(family)
  subject, calibration = trained.subject(family, CALIBRATION, TEST, REPLICATES)
  rows, _ = study.compare(subject, calibration, METHODS)
  training = json.loads((folder / "training.json").read_text())
  result = {
    "parameters": training["parameters"],
    "trained_tokens": training["trained_tokens"],
    "float_perplexity": rows[0]["float_perplexity"]["passages"],
    "unigram_perplexity": training["test_perplexity_of_unigrams"],
  }
  for row in rows:
    result[row["method"]] = {
      "perplexity": row["perplexity"]["passages"]["mean"],
      "half_range": row["perplexity"]["passages"]["spread"] / 2,
      "operator_error": row["operator_error"],
      "kl": row["agreement"]["kl_mean"],
      "flips": row["agreement"]["flips"],
      "seconds": round(row["seconds"], 1),
    }
  return result


def table(report):
  """The table of docs/results/methods.md."""
  head = ["family", "unigrams", "float", "RTN", "HiRes"]
  head += ["operator error, RTN / HiRes", "KL, RTN / HiRes"]
  lines = []
  for name, found in sorted(report["families"].items()):
    rtn, hires = found["rtn"], found["hires"]
    plain = (found["unigram_perplexity"], found["float_perplexity"])
    lines.append(
      [
        name,
        *(f"{value:.2f}" for value in plain),
        *(f"{row['perplexity']:.2f} ± {row['half_range']:.2f}" for row in (rtn, hires)),
        f"{rtn['operator_error']:.4f} / {hires['operator_error']:.4f}",
        f"{rtn['kl']:.4f} / {hires['kl']:.4f}",
      ]
    )
  return provenance.markdown(head, lines)


def main():
  made = provenance.stamp()
  names = sys.argv[1:] or list(families.FAMILIES)
  report = json.loads(RESULT.read_text()) if RESULT.is_file() else {"families": {}}
  for name in names:
    report["families"][name] = measure(name) | made
    print(name, json.dumps(report["families"][name]), flush=True)
    report |= {"calibration": CALIBRATION, "test": TEST, "replicates": REPLICATES}
    RESULT.write_text(json.dumps(report, indent=1) + "\n")
    RESULT.with_suffix(".md").write_text(table(report))


if __name__ == "__main__":
  main()
