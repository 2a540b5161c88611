"""`mxjax quantize`: quantizes a model in a run that can be killed and resumed."""

import argparse
import contextlib
import pathlib
import tempfile
from typing import Any

from mxjax.evaluation.cli import arguments

RUN = "run"
"""Name of the subfolder with a run's state and finished layers."""
PASSED_ON = ("store", "check", "chunk", "save_every")
"""Options that `quantize` of the library has too."""


def add_parser(commands: Any) -> argparse.ArgumentParser:
  """Adds the command and its options."""
  parser = commands.add_parser(
    "quantize",
    help="quantize a model; writes a checkpoint, its run and report.html",
    description="Quantizes every decoder linear of MODEL and writes OUT/checkpoint "
    "(Orbax), OUT/run (finished layers, to go on from), OUT/result.json and "
    "OUT/report.html.",
  )
  arguments.add(parser, "model")
  add = parser.add_argument
  add("--method", default="hires", metavar="M", help=arguments.METHOD_HELP)
  arguments.add(parser, "--out")
  chunk_help = "sequences in a device call; bits do not change"
  arguments.add(parser, "--chunk", help=chunk_help)
  add(
    "--resume",
    action="store_true",
    help="continue the run in OUT, if there is one, to the same bits",
  )
  add(
    "--save-every",
    type=arguments.whole(1),
    metavar="LAYERS",
    help="write the hidden states that a killed run goes on from after so many layers; "
    "a kill costs no more than these (every layer, or up to 8 where they exceed 1 GiB)",
  )
  add(
    "--log",
    choices=("bars", "json"),
    default="bars",
    help="progress on stderr: bars, or one JSON event a line for machines",
  )
  arguments.add(parser, "--on-disk", "--dtype")
  _add_sharing(parser.add_argument_group("sharing work with other builds"))
  _add_devices(parser.add_argument_group("devices"))
  arguments.add_run(parser)
  return parser


def _add_sharing(group: Any) -> None:
  add = group.add_argument
  add(
    "--store",
    metavar="DIR",
    help="keep the float model's hidden states and Hessians in DIR, and use those of "
    "an earlier build on the same model and tokens; bits do not change",
  )
  add(
    "--linears",
    metavar="DIR",
    help="take the linears from a folder that `quantize` wrote on the same model and "
    "tokens, by a method that differs only in recovery; bits do not change",
  )
  add(
    "--no-check",
    dest="check",
    action="store_false",
    help="keep a model that collapsed instead of ending with an error",
  )


def _add_devices(group: Any) -> None:
  arguments.add(group, "--mesh")
  add = group.add_argument
  add(
    "--distributed",
    action="store_true",
    help="this is one process of several that run the same command on one --out; "
    "without --mesh all of their devices are on data",
  )
  add(
    "--coordinator",
    metavar="HOST:PORT",
    help="process 0's address; this and the next two are taken from the cluster's "
    "environment when omitted",
  )
  add("--processes", type=int, metavar="N", help="how many there are")
  add("--process", type=int, metavar="I", help="which one this is")


def run(options: argparse.Namespace) -> None:
  """Quantizes the model, measures it, and writes the folder."""
  from mxjax.devices import processes
  from mxjax.evaluation.cli import inputs, outputs, progress
  from mxjax.evaluation.cli.commands import export
  from mxjax.run.progress import Stopped
  from mxjax.storage import atomic_io

  arguments.check_method(options.method)
  folder = pathlib.Path(options.out)
  mesh = inputs.mesh_of(options)
  is_resumed = options.resume and (folder / RUN).is_dir()
  if processes.is_leader() and not is_resumed:
    atomic_io.check_output(folder)
  prepared = inputs.prepare(options, [options.method], mesh)
  if processes.is_leader():
    formats = ", ".join(export.formats(options.method))
    tell = progress.teller(options.log)
    tell(f"a model of {options.method} can be exported as {formats}")
  try:
    row = _quantize(options, folder, prepared)
  except (KeyboardInterrupt, Stopped) as error:
    raise KeyboardInterrupt(
      f"{str(error) or 'interrupted'}; finished layers are in {folder / RUN}; go on "
      f"with: {progress.resume_command(options.arguments)}"
    ) from error
  if not processes.is_leader():
    return
  if options.log == "json":
    progress.emit("finished", out=str(folder))
  outputs.print_rows([row], folder, as_json=options.json)


def _program(options: argparse.Namespace, subject: Any, tokens: Any) -> Any:
  """Returns the program to run, which may take its linears from another build.

  Raises:
    FileNotFoundError: That build's folder has no run, which alone tells its weights.
    ValueError: That build has other weights or tokens, or more differs than recovery.
  """
  from mxjax import methods
  from mxjax.calibration.calibration import token_fingerprint
  from mxjax.calibration.store import params_digest
  from mxjax.evaluation.cli import inputs
  from mxjax.methods import reused
  from mxjax.run import folder as run_folder
  from mxjax.storage import checkpoint

  program = methods.get(options.method)
  if not options.linears:
    return program
  folder = inputs.checkpoint_folder(options.linears)
  made = checkpoint.read_manifest(folder)["program"]
  run = folder.parent / RUN
  if not (run / run_folder.STATE).is_file():
    raise FileNotFoundError(
      f"quantize: expected --linears with a folder that `quantize` wrote, its {RUN}/ "
      f"included, got {options.linears}, which has none; leave the option out."
    )
  start = run_folder.read_state(run)["identity"]
  theirs, key = made["name"], reused.build_key(program)
  tokens_differ = start["calibration"]["fingerprint"] != token_fingerprint(tokens)
  model_differs = start["model"] != subject.model.config.to_dict()
  model_differs = model_differs or start["weights"] != params_digest(subject.params)
  is_other = tokens_differ or model_differs or key is None
  if is_other or reused.build_key(methods.get(theirs)) != key:
    told = lambda differs: "other" if differs else "the same"
    raise ValueError(
      f"quantize: expected --linears of a build that differs from {options.method} "
      f"only in recovery, on the same tokens and weights, got {theirs} on "
      f"{told(tokens_differ)} tokens and {told(model_differs)} weights in "
      f"{options.linears}; leave the option out."
    )
  return reused.reuse(program, checkpoint.load(folder)[1])


def _quantize(options: argparse.Namespace, folder: pathlib.Path, prepared: Any) -> Any:
  """Runs the method in its run folder, saves what it made, and returns the row."""
  from mxjax import models
  from mxjax.devices import processes
  from mxjax.evaluation import study
  from mxjax.evaluation.cli import inputs, outputs, progress, settings
  from mxjax.run import folder as run_folder
  from mxjax.storage import checkpoint, layer_store

  tokenizer, subject, tokens = prepared
  program = _program(options, subject, tokens)
  is_leader = processes.is_leader()
  is_on_disk = isinstance(subject.params, models.LazyParams)
  tell = progress.teller(options.log)
  with contextlib.ExitStack() as stack:
    run = stack.enter_context(
      run_folder.open_run(folder / RUN, resume=options.resume, mesh=subject.mesh)
    )
    if is_leader:
      outputs.remove_unfinished(folder)
    store: Any = {}
    if is_on_disk:
      # Inside the run folder, so that the leftovers of a killed process are removed.
      place = run.path if is_leader else None
      scratch = tempfile.TemporaryDirectory(dir=place, prefix="scratch-")
      store = layer_store.LayerStore(pathlib.Path(stack.enter_context(scratch)))
    begin = stack.enter_context(progress.progress(options.log if is_leader else "none"))
    stop = stack.enter_context(progress.stopper(tell))
    for name in run.discarded:
      tell(f"resume: discarded {name}, whose work is done again")
    row, quantized = study.run_method(
      subject,
      tokens,
      program,
      run_dir=run,
      **{name: vars(options)[name] for name in PASSED_ON},
      on_progress=stop.follow(begin(options.method)),
      stop=stop,
      into=store,
    )
    model_name = inputs.model_name(options)
    row["record"]["calibration"] |= {
      "seed": options.seed,
      "data": options.calib or "embedded",
      "model": arguments.short_name(model_name),
    }
    steps = study.evaluation_steps(begin("float model"), subject.model.num_layers)
    row["float_perplexity"] = subject.float_perplexities(steps)
    row |= {"layers_on_disk": is_on_disk, "made_by": settings.made_by(options)}
    if not (folder / inputs.CHECKPOINT).exists():
      facts = {key: row["record"][key] for key in ("calibration", "program")}
      facts["extra"] = {"arithmetic": row["arithmetic"]}
      config = subject.model.config
      outputs.save_checkpoint(folder, quantized, config, tokenizer, **facts)
    elif is_leader:
      checkpoint.check_saved(folder / inputs.CHECKPOINT, quantized)
    if is_leader:
      outputs.finish(folder, [row], f"{options.method} on", model_name)
    processes.wait_for_all(subject.mesh)
  return row
