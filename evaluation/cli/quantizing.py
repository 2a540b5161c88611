"""`mxjax quantize` and `mxjax verify`: a run that may be killed, and its audit."""

import argparse
import contextlib
import json
import pathlib
import shutil
import tempfile
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np

from mxjax import methods, models
from mxjax.audit import verify as verify_module
from mxjax.devices import processes
from mxjax.evaluation import study
from mxjax.evaluation.cli import cli_inputs, console, devices, outputs, progress
from mxjax.running import pipeline
from mxjax.storage import atomic_io, checkpoint, layer_store, run_folder

RUN = "run"


def quantize(options: argparse.Namespace) -> None:
  """`mxjax quantize`."""
  methods.get(options.method)
  folder = pathlib.Path(options.out)
  mesh = devices.mesh_of(options)
  is_leader = processes.is_leader()
  if is_leader and not (options.resume and (folder / RUN).is_dir()):
    atomic_io.check_output(folder)
  model, tokenizer, subject, tokens = cli_inputs.prepare(options, mesh)
  try:
    with contextlib.ExitStack() as stack:
      opened = run_folder.open_run(folder / RUN, resume=options.resume, mesh=mesh)
      run = stack.enter_context(opened)
      if is_leader:
        _remove_unfinished(folder)
      row, quantized = _run_method(options, run, subject, tokens, stack)
      row["record"]["calibration"] |= {
        "seed": options.seed,
        "data": options.calib or "embedded",
        "model": pathlib.Path(options.model or "SmolLM2-135M").name,
      }
      row["float_perplexity"] = subject.float_perplexities()
      if not (folder / cli_inputs.CHECKPOINT).exists():
        outputs.save(folder, row, quantized, model, tokenizer)
      elif is_leader:
        checkpoint.check_saved(folder / cli_inputs.CHECKPOINT, quantized)
      if is_leader:
        subject_name = options.model or "SmolLM2-135M"
        outputs.finish(folder, [row], f"{options.method} on {subject_name}")
      processes.wait_for_all(mesh)
  except (KeyboardInterrupt, pipeline.Stopped) as error:
    raise progress.Interrupted(
      f"{str(error) or 'interrupted'}; finished layers are in {folder / RUN}",
      progress.resume_command(options.arguments),
    ) from error
  if not is_leader:
    return
  if options.log == "json":
    progress.emit("finished", out=str(folder))
  outputs.print_rows(options, [row], folder)


def _run_method(
  options: argparse.Namespace,
  run: run_folder.RunFolder,
  subject: study.Subject,
  tokens: np.ndarray,
  stack: contextlib.ExitStack,
) -> tuple[dict[str, Any], Mapping[str, Any]]:
  """Quantizes and measures, visibly; what it needs lives as long as the stack."""
  on_disk = isinstance(subject.params, models.LazyParams)
  tell = lambda text: (
    progress.emit("message", text=text)
    if options.log == "json"
    else console.STDERR.print(text, markup=False)
  )
  store: MutableMapping[str, Any] = {}
  is_leader = processes.is_leader()
  if on_disk:
    # Inside the run folder, so that what a killed process leaves is removed.
    place = run.path if is_leader else None
    scratch = tempfile.TemporaryDirectory(dir=place, prefix="scratch-")
    store = layer_store.LayerStore(pathlib.Path(stack.enter_context(scratch)))
  form = options.log if is_leader else "none"
  begin = stack.enter_context(progress.progress(form))
  stop = stack.enter_context(progress.stopper(tell))
  for name in run.discarded:
    tell(f"resume: discarded {name}, which was not finished")
  row, quantized = study.run_method(
    subject,
    tokens,
    options.method,
    run_dir=run,
    chunk=options.chunk,
    on_progress=stop.follow(begin(options.method)),
    stop=stop,
    into=store,
  )
  row["layers_on_disk"] = on_disk
  return row, quantized


def _remove_unfinished(folder: pathlib.Path) -> None:
  """Removes what a process that was killed while saving left beside the run."""
  for place in folder.glob("*.partial*"):
    if place.is_dir():
      shutil.rmtree(place)
    else:
      place.unlink()


def verify(options: argparse.Namespace) -> int:
  """`mxjax verify`: 0 where everything holds, 1 where anything does not."""
  found = verify_module.verify(options.folder, seed=options.seed)
  if options.json:
    print(json.dumps(found.to_dict()))
  else:
    for fault in found.faults:
      print(fault)
    for line in found.lines():
      console.STDOUT.print(line, markup=False, highlight=False)
  return 1 if found.faults else 0
