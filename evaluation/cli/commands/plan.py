"""`mxjax plan`: estimates the cost of quantizing a model from its config alone."""

import argparse
import json
from typing import Any

from mxjax.evaluation.cli import arguments


def add_parser(commands: Any) -> argparse.ArgumentParser:
  """Adds the command and its options."""
  parser = commands.add_parser(
    "plan",
    help="what quantizing a model will take, from its config alone",
    description="Prints parameters, blocks, storage, memory, disk and passes of HiRes "
    "on MODEL; reads no weights. Memory is a rule of thumb for a process on CPU: "
    "Python, JAX and compiled programs, the model or the layer in work, hidden "
    "states, captured inputs, Hessians and a workspace, and an eighth on top. "
    "Evaluating the quantized model afterwards is not in it.",
  )
  arguments.add(parser, "model", "--sequences", "--length", "--on-disk")
  arguments.add(parser, "--dtype")
  mesh_help = "memory of one of several devices: data=4,model=2"
  arguments.add(parser, "--mesh", help=mesh_help)
  arguments.add(parser, "--json")
  return parser


def run(options: argparse.Namespace) -> None:
  """Prints the plan."""
  from mxjax import models
  from mxjax.audit import plan
  from mxjax.devices import mesh as meshes
  from mxjax.evaluation import estimates, subjects
  from mxjax.evaluation.cli import console, inputs

  config = models.load_config(options.model, dtype=options.dtype)
  planned = plan.plan(
    config,
    sequences=options.sequences,
    length=options.length,
    on_disk=subjects.stays_on_disk(config, options.on_disk),
    **(meshes.sizes(options.mesh) if options.mesh else {}),
  )
  if options.json:
    print(json.dumps(planned.to_dict()))
    return
  seconds = estimates.expected_seconds(planned, ["hires"], options.mesh)
  for table in console.plan_tables(planned, inputs.model_name(options), seconds):
    console.print_table(table)
