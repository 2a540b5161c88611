"""`mxjax quantize`: quantizes a model in a run that can be killed and resumed."""

import argparse
import pathlib
from typing import Any

from mxjax import methods
from mxjax.cli import options as shared


def add_parser(commands: Any) -> None:
  """Adds the command and its options."""
  parser = commands.add_parser(
    "quantize",
    help="quantize a model; writes a checkpoint, its run and report.html",
    description="Quantizes every decoder linear of MODEL and writes OUT/checkpoint "
    "(Orbax), OUT/run (finished layers, to go on from), OUT/report.html, and its "
    "numbers as OUT/result.json and OUT/result.csv.",
  )
  shared.add(parser, "model")
  add = parser.add_argument
  add("--method", default="hires", metavar="M", help=shared.METHOD_HELP)
  shared.add(parser, "--out")
  chunk_help = "sequences in a device call; bits do not change"
  shared.add(parser, "--chunk", help=chunk_help)
  add(
    "--resume",
    action="store_true",
    help="continue the run in OUT, if there is one, to the same bits",
  )
  add(
    "--save-every",
    type=shared.whole(1),
    metavar="LAYERS",
    help="also save the hidden states after every so many layers, so that --resume "
    "need not run the layers before them again; by default none are saved",
  )
  add(
    "--log",
    choices=("bars", "json"),
    default="bars",
    help="progress on stderr: bars, or one JSON event a line for machines",
  )
  add(
    "--no-check",
    dest="check",
    action="store_false",
    help="keep a model that collapsed instead of ending with an error",
  )
  shared.add(parser, "--on-disk", "--dtype")
  _add_report(parser.add_argument_group("report"))
  _add_sharing(parser.add_argument_group("sharing work with other builds"))
  _add_devices(parser.add_argument_group("devices"))
  shared.add_run(
    parser,
    action=argparse.BooleanOptionalAction,
    default=True,
    help="compare every prediction of the first test with the float model's: KL and "
    "flips; it takes two more passes over the windows, and two for RTN",
  )
  parser.set_defaults(run=run)


def _add_report(group: Any) -> None:
  add = group.add_argument
  add(
    "--baseline",
    action=argparse.BooleanOptionalAction,
    default=True,
    help="also measure RTN on the same test, beside which the report shows the result",
  )
  add(
    "--sample",
    type=shared.whole(0),
    default=24,
    metavar="N",
    help="tokens by which both models continue a text of the test; 0 for none",
  )


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


def _add_devices(group: Any) -> None:
  shared.add(group, "--mesh")
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
  from mxjax.cli import export, inputs, output, stopping
  from mxjax.devices import processes
  from mxjax.evaluation import builds
  from mxjax.run.progress import Stopped

  # What can be refused at once is, before other processes are joined or a model is
  # read.
  shared.check_method(options.method)
  folder = pathlib.Path(options.out)
  mesh = inputs.mesh_of(options)
  builds.check_folder(folder, resume=options.resume)
  reads_data = methods.get(options.method).reads_data
  if options.sequences is None and mesh is None and not reads_data:
    # The report's errors of linears and the sanity gate read no more.
    options.sequences = 1
  prepared = inputs.prepare(options, [options.method], mesh)
  is_leader = processes.is_leader()
  tell = output.teller(options.log)
  form = options.log if is_leader else "none"
  how = builds.BuildOptions(
    chunk=options.chunk,
    save_every=options.save_every,
    check=options.check,
    store=pathlib.Path(options.store) if options.store else None,
    linears=pathlib.Path(options.linears) if options.linears else None,
    agreement=options.agreement,
    baseline=options.baseline,
    sample=options.sample,
  )
  try:
    with output.progress(form) as begin, stopping.stopper(tell) as stop:
      row = builds.build(
        prepared,
        options.method,
        folder,
        how,
        resume=options.resume,
        command=options.arguments,
        # The stopper learns from the progress whether a layer is in work.
        begin=lambda name: stop.follow(begin(name)),
        stop=stop,
        tell=tell,
      )
  except (KeyboardInterrupt, Stopped) as error:
    # A request to stop ends as Ctrl-C does, with exit code 130 and how to go on.
    raise KeyboardInterrupt(
      f"{str(error) or 'interrupted'}; what is finished is in {folder / builds.RUN}; "
      f"go on with: {stopping.resume_command(options.arguments)}"
    ) from error
  # Process 0 alone has written results.
  if not is_leader:
    return
  if options.log == "json":
    output.emit("finished", out=str(folder))
  output.print_rows([row], folder, as_json=options.json)
  forms = ", ".join(export.formats(options.method, options.model))
  tell(f"next: mxjax export {folder} --out OUT --format FORMAT, one of {forms}")
