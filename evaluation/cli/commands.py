"""The short commands: `mxjax plan`, `mxjax generate` and `mxjax demo`."""

import argparse
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from mxjax import models
from mxjax.audit import plan as plan_module
from mxjax.devices import mesh as meshes
from mxjax.evaluation import datasets, study
from mxjax.evaluation.cli import cli_inputs, console, outputs

DEMO_METHODS = ("rtn", "gptq", "brq", "hires")
DEMO_CALIBRATION = (8, 512)
DEMO_TEST = (8, 512)
DEMO_PROMPT = "The history of the steam engine begins"


def plan(options: argparse.Namespace) -> None:
  """`mxjax plan`."""
  config = models.load_config(options.model)
  planned = plan_module.plan(
    config,
    sequences=options.sequences,
    length=options.length,
    chunk=options.chunk,
    on_disk=cli_inputs.stays_on_disk(options, config),
    **(meshes.sizes(options.mesh) if options.mesh else {}),
  )
  if options.json:
    print(json.dumps(planned.to_dict()))
    return
  for table in console.plan_tables(planned, options.model or "SmolLM2-135M"):
    console.STDOUT.print(table)


def generate(options: argparse.Namespace) -> None:
  """`mxjax generate`."""
  model, params, tokenizer, _ = cli_inputs.restore(options.checkpoint)
  text = _continue(
    model,
    params,
    tokenizer,
    options.prompt,
    max_new_tokens=options.max_new_tokens,
    temperature=options.temperature,
    top_k=options.top_k,
    top_p=options.top_p,
    key=jax.random.key(options.seed),
  )
  print(json.dumps({"text": text}) if options.json else text)


def _continue(
  model: models.CausalLM,
  params: Mapping[str, Any],
  tokenizer: models.Tokenizer,
  prompt: str,
  **options: Any,
) -> str:
  ids = tokenizer.encode(prompt)
  if not len(ids):
    raise ValueError("generate: the prompt is empty; give at least one word.")
  output = models.generate(model, params, ids[None], eos_id=tokenizer.eos_id, **options)
  return tokenizer.decode(np.asarray(output[0]))


def demo(options: argparse.Namespace) -> None:
  """`mxjax demo`."""
  folder = outputs.fresh_folder(pathlib.Path(options.out))
  model, params = models.from_pretrained(None)
  tokenizer = models.load_tokenizer(None)
  load = lambda split, shape: datasets.load_tokens(
    None, tokenizer, count=shape[0], length=shape[1], split=split
  )
  tests = {"unseen passages": load("test", DEMO_TEST)}
  subject = study.Subject(model, params, tests)
  tokens = load("calibration", DEMO_CALIBRATION)
  with console.progress_bars() as begin:
    rows, quantized = study.compare(subject, tokens, DEMO_METHODS, on_method=begin)
  folder.mkdir(parents=True, exist_ok=True)
  outputs.finish(folder, rows, "mxjax demo: SmolLM2-135M")
  console.STDOUT.print(console.comparison_table(rows))
  console.STDOUT.print(f"report: {folder / 'report.html'}")
  if quantized is not None:
    outputs.save(folder, rows[-1], quantized, model, tokenizer)
    text = _continue(model, quantized, tokenizer, DEMO_PROMPT, max_new_tokens=24)
    console.STDOUT.print(f"{rows[-1]['method']} says: {text!r}", markup=False)
