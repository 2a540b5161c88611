"""RTN and HiRes on the small trained model of every family: perplexity and errors.

  python benchmarks/families.py [FAMILY ...]

Calibrates on the text that the models were trained on (the first half of the embedded
passages) and measures on the second half, which they have not seen. Writes
benchmarks/results/families.json; families that are not named keep their entry.
"""

import json
import pathlib
import sys

import provenance

from mxjax.evaluation import datasets, study
from mxjax.models import embedded, families, from_pretrained, load_tokenizer

RESULT = pathlib.Path(__file__).parent / "results" / "families.json"
CALIBRATION, TEST = (8, 256), (32, 256)
METHODS = ("rtn", "hires")


def measure(family):
  folder = embedded.trained_folder(family)
  model, params = from_pretrained(folder)
  tokenizer = load_tokenizer(folder)
  load = lambda split, shape: datasets.load_tokens(
    None, tokenizer, count=shape[0], length=shape[1], split=split
  )
  subject = study.Subject(
    model, params, {"passages": load("test", TEST)}, with_agreement=True
  )
  rows, _ = study.compare(subject, load("calibration", CALIBRATION), METHODS)
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
      "operator_error": row["operator_error"],
      "kl": row["agreement"]["kl_mean"],
      "flips": row["agreement"]["flips"],
      "seconds": round(row["seconds"], 1),
    }
  return result


def main():
  made = provenance.stamp()
  names = sys.argv[1:] or list(families.FAMILIES)
  report = json.loads(RESULT.read_text()) if RESULT.is_file() else {"families": {}}
  for name in names:
    report["families"][name] = measure(name) | made
    print(name, json.dumps(report["families"][name]), flush=True)
    report |= {"calibration": CALIBRATION, "test": TEST}
    RESULT.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
  main()
