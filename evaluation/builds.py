"""Quantizes and measures a model: in memory, or in a folder that survives a kill."""

import contextlib
import dataclasses
import pathlib
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mxjax import methods, models
from mxjax.audit import arithmetic
from mxjax.calibration.calibration import Calibration, Params, token_fingerprint
from mxjax.calibration.store import params_digest
from mxjax.devices import processes
from mxjax.errors import FileNotFoundRefusal, ValueRefusal
from mxjax.evaluation import provenance
from mxjax.evaluation.report import page
from mxjax.evaluation.subjects import (
  EVALUATING,
  Prepared,
  Subject,
  checkpoint_folder,
  evaluation_steps,
)
from mxjax.layers import sizes
from mxjax.methods import finished_linears
from mxjax.methods.program import Program
from mxjax.numerics.contract import PAPER_CONTRACT
from mxjax.run import folder as run_folder
from mxjax.run import progress, quantize
from mxjax.storage import atomic_io, checkpoint, digested_json, layer_store

RUN = "run"
"""Name of the subfolder with a run's state and finished layers."""
SAMPLE_PROMPT = 32
"""Tokens of a test that a sample continues."""
Begin = Callable[[str], progress.OnProgress]
"""Begins to follow a method, given its name."""


def run_method(
  subject: Subject,
  tokens: np.ndarray,
  method: str | Program,
  *,
  on_progress: progress.OnProgress | None = None,
  **options: Any,
) -> tuple[dict[str, Any], Params]:
  """Quantizes with one method and measures the result.

  Calibration tokens are int32 `[sequences, length]`; `on_progress` follows both, and
  its last fraction is 1; `options` are those of `mxjax.run.quantize.run`.

  Returns:
    A JSON-ready row (`method`, `perplexity`, `operator_error`, `size`,
    `size_warning`, `arithmetic`, `seconds`, `record`), and the quantized params.
  """
  program = methods.get(method)
  # Tokens that pass through the model before the evaluation, and in it.
  before = np.size(tokens) * (1 + len(program.recover))
  after = subject.replicates * sum(map(np.size, subject.tests.values()))
  share = before / (before + after)
  follow = on_progress or (lambda now: None)

  def build(now: progress.Progress) -> None:
    nonlocal share
    # With what a program learns of its own, the build takes 1 / (1 - learned) as long.
    share = before / (before + (1 - now.learned) * after)
    follow(now._replace(fraction=share * now.fraction))

  start = time.perf_counter()
  result = quantize.run(
    subject.params,
    Calibration(subject.model, tokens),
    program,
    mesh=subject.mesh,
    on_progress=build,
    **options,
  )
  seconds = time.perf_counter() - start
  if result.record.resumed:
    # Includes the time of interrupted processes.
    seconds = sum(result.record.clock.seconds.values())
  record = result.record.to_dict()
  contract = program.under(options.get("contract", PAPER_CONTRACT))
  size = sizes.size_report(result.params)
  name = contract.marked(program.name)
  row = {
    "method": name,
    "seconds": seconds,
    **subject.measure(
      result.params,
      result.reference,
      evaluation_steps(follow, subject.model.num_layers, share),
    ),
    "size": size,
    # One of several processes warns.
    "size_warning": sizes.warn(name, size) if processes.is_leader() else None,
    "arithmetic": subject.dtype
    and arithmetic.arithmetic(
      result.params,
      subject.dtype,
      record["layers"],
      subject.attention,
    ),
    "record": record,
  }
  return row, result.params


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuildOptions:
  """How a build runs; none of these changes a bit of the model.

  Attributes:
    chunk: Sequences in a device call.
    save_every: Layers after which the hidden states are written, to go on from after a
      kill; with None a resumed build replays the finished layers.
    check: Whether a model that collapsed is an error.
    store: Folder with the float model's hidden states and Hessians, which builds on the
      same model and tokens share.
    linears: Folder of a finished build whose linears are taken; it differs only in
      recovery.
    agreement: Whether KL and flips are measured on the first test, of RTN too, also
      where the tests do not ask for them: two more passes over its windows each, one of
      them by the float model.
    baseline: Whether RTN is measured on the same tests, for the report; its inputs are
      left as they are if the method leaves them so. It reads one calibration sequence.
      Where layers stay on disk or devices share them it is left out, which the report
      says.
    sample: Tokens by which the float and the quantized model continue a text of the
      test, for the report; left out in the same places.
  """

  chunk: int = 1
  save_every: int | None = None
  check: bool = True
  store: pathlib.Path | None = None
  linears: pathlib.Path | None = None
  agreement: bool = True
  baseline: bool = False
  sample: int = 0


def check_folder(folder: pathlib.Path, *, resume: bool) -> None:
  """Rejects a folder that has something in it, unless that is a run to be resumed.

  Raises:
    FileExistsError: It has.
  """
  # Another process may come when the first has already begun to write.
  if processes.is_leader() and not (resume and (folder / RUN).is_dir()):
    atomic_io.check_output(folder)


def build(
  prepared: Prepared,
  method: str,
  folder: pathlib.Path,
  options: BuildOptions = BuildOptions(),
  *,
  resume: bool = False,
  command: Sequence[str] = (),
  begin: Begin = lambda name: lambda now: None,
  stop: Callable[[], bool] | None = None,
  tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
  """Quantizes in a run folder, measures, and writes checkpoint, result and report.

  The folder gets `run/`, with which a killed build is resumed, `checkpoint/`,
  `result.json`, `result.csv`, `report.html`, and last the list of these that `verify`
  checks. Of several processes that build together, only the first writes.

  Args:
    prepared: The model and what it is calibrated and tested on.
    method: What `methods.get` takes.
    folder: A new folder, or with `resume` that of an unfinished build.
    options: How it runs.
    resume: Whether to continue a run in the folder, if there is one.
    command: Words of the command that asked for it, for the result.
    begin: Begins to follow the method, then the float model.
    stop: Asked after each layer whether to stop.
    tell: Gets sentences on what happens.

  Returns:
    The row of `run_method`, with `float_perplexity`, `made_by`, `layers_on_disk`, and
    `shared_with`: the folders whose work it took over, which its seconds do not count.
    Where they are asked for, also `baseline` and `sample`.

  Raises:
    FileExistsError: The folder has something in it.
    ValueError: Linears are of a build that does not fit.
    progress.Stopped: `stop` asked for it.
  """
  check_folder(folder, resume=resume)
  if options.agreement:
    compared = dataclasses.replace(prepared.subject, with_agreement=True)
    prepared = prepared._replace(subject=compared)
  subject = prepared.subject
  program = _program(prepared, method, options)
  is_leader = processes.is_leader()
  is_on_disk = isinstance(subject.params, models.LazyParams)
  with contextlib.ExitStack() as stack:
    run = stack.enter_context(
      run_folder.open_run(folder / RUN, resume=resume, mesh=subject.mesh)
    )
    if is_leader:
      # Behind the lock of the run folder: no other process writes here.
      remove_unfinished(folder)
    into: Any = {}
    if is_on_disk:
      # Inside the run folder, so that the leftovers of a killed process are removed.
      place = run.path if is_leader else None
      scratch = tempfile.TemporaryDirectory(dir=place, prefix="scratch-")
      into = layer_store.LayerStore(pathlib.Path(stack.enter_context(scratch)))
    for name in run.discarded:
      tell(f"resume: discarded {name}, whose work is done again")
    row, quantized = run_method(
      subject,
      prepared.tokens,
      program,
      run_dir=run,
      store=options.store,
      check=options.check,
      chunk=options.chunk,
      save_every=options.save_every,
      on_progress=begin(method),
      stop=stop,
      into=into,
    )
    row["record"]["calibration"] |= {
      "seed": prepared.sample.seed,
      "data": prepared.sample.source or "embedded",
      "model": provenance.short_name(prepared.name),
    }
    steps = evaluation_steps(begin("float model"), subject.model.num_layers)
    row["float_perplexity"] = subject.float_perplexities(steps)
    shared = filter(None, (options.store, options.linears))
    row |= {
      "layers_on_disk": is_on_disk,
      "shared_with": list(map(str, shared)),
      "made_by": provenance.made_by(command),
    }
    # A build that was killed later than this has saved it; then it must hold these very
    # params.
    if not (folder / checkpoint.CHECKPOINT).exists():
      save_checkpoint(
        folder,
        quantized,
        subject.model.config,
        prepared.tokenizer,
        calibration=row["record"]["calibration"],
        program=row["record"]["program"],
        contract=program.under(PAPER_CONTRACT),
        extra={"arithmetic": row["arithmetic"]},
      )
    elif is_leader:
      checkpoint.check_saved(folder / checkpoint.CHECKPOINT, quantized)
    # After the checkpoint: what only the report shows must not cost it.
    if not is_on_disk and subject.mesh is None:
      plain = page.baseline_of(row["method"])
      if options.baseline and program.name != plain:
        row["baseline"] = _baseline(prepared, plain, begin(plain), stop)
      if options.sample:
        row["sample"] = sample(
          subject, prepared.tokenizer, quantized, options.sample, begin
        )
    if is_leader:
      finish(folder, [row], f"{method} on", prepared.name)
    processes.wait_for_all(subject.mesh)
  return row


def _baseline(
  prepared: Prepared,
  method: str,
  follow: progress.OnProgress,
  stop: Callable[[], bool] | None,
) -> dict[str, Any]:
  """Measures RTN, whose codes no data decides: one sequence passes through."""
  row, _ = run_method(
    prepared.subject,
    prepared.tokens[:1],
    method,
    on_progress=follow,
    stop=stop,
    # It is shown however it fares, and nothing reads its record.
    check=False,
    probe=False,
  )
  kept = ("method", "perplexity", "operator_error", "agreement", "size", "seconds")
  return {key: row[key] for key in kept}


def sample(
  subject: Subject,
  tokenizer: models.Tokenizer,
  quantized: Params,
  tokens: int,
  begin: Begin = lambda name: lambda now: None,
) -> dict[str, str] | None:
  """Continues the beginning of a test by the likeliest tokens, in both models.

  The texts are `prompt`, `float` and `quantized`; None without a test or room for them.
  `begin` is as in `build`.
  """
  model, window = subject.model, next(iter(subject.tests.values()), None)
  if window is None or not isinstance(model, models.CausalLM):
    return None
  prompt = window[:1, :SAMPLE_PROMPT]
  count = min(tokens, model.config.max_positions - prompt.shape[1])
  if count < 1:
    return None
  made = {}
  for name, params in (("float", subject.params), ("quantized", quantized)):
    follow, layers = begin(f"text of the {name} model"), model.config.num_layers
    tell = lambda done, follow=follow, layers=layers: follow(
      progress.Progress(
        layers - 1, layers, f"{EVALUATING}, token {done}/{count}", done / count
      )
    )
    tell(0)
    # By layers, because a GPU's compiler takes longer for two whole models.
    made[name] = models.generate(
      model, params, prompt, max_new_tokens=count, tokens_at_once=1
    )
    tell(count)
  text = lambda ids: tokenizer.decode(np.asarray(ids).tolist())
  # Cut from the whole, because a token's text depends on those before it.
  start = text(prompt[0])
  texts = {name: text(ids[0]).removeprefix(start) for name, ids in made.items()}
  return {"prompt": start, **texts}


def _program(prepared: Prepared, method: str, options: BuildOptions) -> Program:
  """Returns the program to run, which may take its linears from another build.

  Raises:
    FileNotFoundError: That build's folder has no run, which alone tells its weights.
    ValueError: That build has other weights or tokens, or more differs than recovery.
  """
  program, subject = methods.get(method), prepared.subject
  if not options.linears:
    return program
  folder = checkpoint_folder(options.linears)
  made = checkpoint.read_manifest(folder)["program"]
  run = folder.parent / RUN
  if not (run / run_folder.STATE).is_file():
    raise FileNotFoundRefusal(
      "quantize",
      expected=f"--linears with a folder that `quantize` wrote, its {RUN}/ included",
      got=f"{options.linears}, which has none",
      mend="leave the option out",
    )
  start = run_folder.read_state(run)["identity"]
  theirs, key = made["name"], finished_linears.build_key(program)
  tokens = token_fingerprint(prepared.tokens)
  tokens_differ = start["calibration"]["fingerprint"] != tokens
  model_differs = start["model"] != subject.model.config.to_dict()
  # After the config, because the digest reads all weights.
  model_differs = model_differs or start["weights"] != params_digest(subject.params)
  is_other = tokens_differ or model_differs or key is None
  if is_other or finished_linears.build_key(methods.get(theirs)) != key:
    word = lambda differs: "other" if differs else "the same"
    raise ValueRefusal(
      "quantize",
      expected=f"--linears of a build that differs from {method} only in recovery, on "
      "the same tokens and weights",
      got=f"{theirs} on {word(tokens_differ)} tokens and {word(model_differs)} weights "
      f"in {options.linears}",
      mend="leave the option out",
    )
  contract = program.under(PAPER_CONTRACT)
  params = checkpoint.load(folder, contract=contract, products=None)[1]
  return finished_linears.reuse(program, params)


def save_checkpoint(
  folder: pathlib.Path,
  params: Params,
  config: models.ModelConfig,
  tokenizer: models.Tokenizer,
  **facts: Any,
) -> None:
  """Writes a checkpoint and its tokenizer; `facts` are passed to `save_checkpoint`."""
  folder.mkdir(parents=True, exist_ok=True)
  # On the disk of the result: the system's own place for such files may be full.
  scratch = tempfile.TemporaryDirectory(
    dir=folder, prefix=f"tokenizer{atomic_io.PARTIAL}-"
  )
  with atomic_io.explaining(folder), scratch as place:
    tokenizer.save(pathlib.Path(place))
    checkpoint.save_checkpoint(
      folder / checkpoint.CHECKPOINT,
      params,
      config,
      tokenizer_files=sorted(pathlib.Path(place).iterdir()),
      **facts,
    )


def remove_unfinished(folder: pathlib.Path) -> None:
  """Removes the unfinished files of a process that was killed while saving.

  The list of what it once finished goes too: the run that goes on writes a new one.
  """
  (folder / digested_json.OUTPUTS).unlink(missing_ok=True)
  for place in folder.glob(f"*{atomic_io.PARTIAL}*"):
    if place.is_dir():
      shutil.rmtree(place)
    else:
      place.unlink()


def finish(
  folder: pathlib.Path, rows: Sequence[Mapping[str, Any]], what: str, model: str
) -> None:
  """Writes result.json, result.csv, report.html, and the list that `verify` checks.

  The report's title is `what` and the last part of the model's name or path.
  """
  title = f"{what} {provenance.short_name(model)}"
  with atomic_io.explaining(folder):
    atomic_io.write_json(folder / "result.json", rows, indent=1)
    numbers = page.comma_separated_table(rows, title)
    atomic_io.write_durably(folder / "result.csv", numbers.encode())
    page.write_report(
      folder / "report.html",
      rows,
      title=title,
      subtitle=f"{model}, {provenance.forms(rows)}",
      files=("result.json", "result.csv"),
    )
    # Last, because it lists the digests of the files before it.
    digested_json.write_outputs(folder)
