"""The small trained models as benchmarks quantize and measure them."""

from mxjax import models
from mxjax.evaluation import datasets, study
from mxjax.models.loading import embedded


def subject(family, calibration, test, replicates):
  """What to study on a trained model, and its calibration tokens.

  Args:
    family: A name in models/trained.
    calibration: Sequences and their length.
    test: Windows and their length.
    replicates: Perturbed runs of each perplexity.
  """
  folder = embedded.trained_folder(family)
  model, params = models.from_pretrained(folder)
  tokenizer = models.load_tokenizer(folder)
  load = lambda split, shape: datasets.load_tokens(
    None, tokenizer, count=shape[0], length=shape[1], split=split
  )
  found = study.Subject(
    model,
    params,
    {"passages": load("test", test)},
    replicates=replicates,
    with_agreement=True,
  )
  return found, load("calibration", calibration)
