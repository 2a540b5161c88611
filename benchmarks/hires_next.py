"""hires-next and hires-rotated, their parts and controls, over calibration draws.

  python benchmarks/hires_next.py --data ../shared/data [--draws 1 2 3] [--rows ROW ...]
    [--method hires-rotated] [--model models/trained/llama] [--runs DIR]

Calibration is 8 rows of C4 tokens a draw: rows 0 to 7, 8 to 15 and 16 to 23 of the
documents in the file, of 2,048 tokens for SmolLM2-135M-Instruct and of 512 for a small
trained model. Draw 128 has the paper's number of rows, which are 56 to 183. Draws 512
and 513 of a small model have as many tokens as the paper, in rows 184 to 695 and 696 to
1,207, and draw 1024 has both. Windows to measure on have the same length, 8 of each
text (16 for a small model), and there are four kinds of text, none of which any draw
reads:

  WikiText-2   the test set from its start
  C4           rows 40 and on of the documents
  Python       modules of Python's own standard library
  German       messages of GNU coreutils in German, the catalogue that `--german` names

The weight of the labels is chosen on half as many other windows of each kind, which
`validation` of the result has for the rows that differ in it. With `--kept-back` only
the last 8 (16) windows of C4 and of WikiText-2 are measured, on which no option was
chosen. KL is from the float model, in nats a token; differences of log
perplexity and of KL are paired by window, with their standard error.

The control `float, labels` is the float model with the factors that `--method`, by
default `hires-next`, learns instead, from the same labels in the same steps: what it
gains is adaptation to the calibration text, and no quantization is in it.

The result file is rewritten after every row. Rows already in it are kept if code, texts
and options are the same, and refused otherwise: one file has the rows of one code.

Rows of a draw that differ in their tuning alone share the layers that are tuned, which
are quantized once: `shares_layers` of a row tells that they were there. With `--runs`
layers are also written to a run folder, as `mxjax quantize` does, and a process goes on
from there if the same code began it, which `is_resumed` tells. The code of tuning may
be another, because it comes after them, and what it does is not kept.
`build_seconds` are what this process spent on the row, and `stage_seconds` what all
processes spent on its layers, and the last one on its tuning.
"""

import dataclasses
import functools
import gettext
import hashlib
import json
import pathlib
import sysconfig
import time
from typing import NamedTuple

import common
import jax
import jax.numpy as jnp
import numpy as np

from mxjax import methods, models
from mxjax.calibration import gradients, streams
from mxjax.calibration.calibration import Calibration, replace_weights
from mxjax.devices import execution, kept_programs
from mxjax.methods import scale_distillation
from mxjax.methods.program import Program
from mxjax.methods.scale_distillation import ScaleDistillation
from mxjax.numerics import mxfp4
from mxjax.numerics.contract import PAPER_CONTRACT
from mxjax.run import reporting, tune
from mxjax.run.progress import Report
from mxjax.run.quantize import run
from mxjax.run.record import StageClock, peak_memory_bytes
from mxjax.run.setup import Setup

LENGTH, CHUNK = 2048, 256
SMALL, WINDOWS = 512, 16
REFERENCE, PAPER, NEXT = "hires I + II", "hires", "hires-next"
FLOAT, CONTROL = "float", "float, labels"
WITHOUT_LABELS = "+tune:label_weight=0"
PAPER_AMOUNT = 128
SMALL_AMOUNT = 512
DRAWS = {
  **{draw: slice(8 * draw - 8, 8 * draw) for draw in (1, 2, 3)},
  PAPER_AMOUNT: slice(56, 56 + PAPER_AMOUNT),
  SMALL_AMOUNT: slice(184, 184 + SMALL_AMOUNT),
  SMALL_AMOUNT + 1: slice(184 + SMALL_AMOUNT, 184 + 2 * SMALL_AMOUNT),
  2 * SMALL_AMOUNT: slice(184, 184 + 2 * SMALL_AMOUNT),
}
"""Rows of C4 by calibration draw.

Windows of SmolLM2-135M-Instruct are 24 to 27, 40 to 47 and the last 8, those of a small
model 24 to 31, 40 to 55 and the last 16.
"""
GERMAN = pathlib.Path("/usr/share/locale/de/LC_MESSAGES/coreutils.mo")
WITHOUT_BOTH = ":use_interaction=false:use_balance=false"
LABELS = {
  WITHOUT_BOTH: ", K = 0, D = I",
  ":two_sided=false": ", one-sided",
  ":recover=attention+mlp": ", recovery",
  "+tune:steps=256:label_weight=0": ", 256 steps, no labels",
  "+tune:steps=256": ", 256 steps",
  "+tune:epochs=1": ", one pass",
  "+tune:label_weight=0.": ", labels at most .",
  "+tune:label_weight=0": ", no labels",
}
"""How tables show options of `hires-next`."""
hires = functools.partial(dataclasses.replace, methods.HIRES)
ROWS = {
  REFERENCE: hires(recover=()),
  PAPER: methods.HIRES,
  "fisher": hires(recover=(), weighting="fisher"),
  "fisher, K = 0, D = I": hires(
    recover=(), weighting="fisher", use_interaction=False, use_balance=False
  ),
  "tuned": hires(recover=(), tune=ScaleDistillation()),
  "fisher, tuned": hires(recover=(), weighting="fisher", tune=ScaleDistillation()),
  "hires-next": methods.HIRES_NEXT,
  "rtn": methods.get("rtn"),
  "rtn, tuned": methods.get("rtn+tune"),
  "wush": methods.get("wush"),
  "wush, fisher, tuned": methods.get("wush:weighting=fisher+tune"),
}


MODULES = (
  "argparse",
  "ast",
  "csv",
  "dataclasses",
  "datetime",
  "fractions",
  "typing",
  "zipfile",
)
VALIDATION_MODULES = (
  "calendar",
  "configparser",
  "enum",
  "inspect",
  "json/decoder",
  "pathlib",
  "statistics",
  "tarfile",
)
"""Modules of Python's standard library, an equal part from the start of each."""


@dataclasses.dataclass(frozen=True)
class Texts:
  """Calibration rows by draw, int32 `[8, T]` (`[128, T]`), windows `[n, T]` by text.

  `sources` has the digest of each text that was read, by its name.
  """

  draws: dict
  test: dict
  validation: dict
  kept_back: dict
  sources: dict


def texts(data, german, source=None):
  """The texts of a model by its own tokenizer; without `source` of the embedded one."""
  tokenizer = models.load_tokenizer(source)
  length, count = (SMALL, WINDOWS) if source else (LENGTH, 8)
  sources = {}

  def read(name, text):
    sources[name] = hashlib.sha256(text.encode()).hexdigest()
    return tokenizer.encode(text)

  def rows(ids, number):
    cut = np.asarray(ids[: number * length], np.int32)
    assert len(cut) == number * length, f"{len(ids)} tokens are less than {number} rows"
    return cut.reshape(number, length)

  last = lambda ids: rows(ids, len(ids) // length)[-count:]

  def of_modules(names):
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    parts = [read(name, (library / f"{name}.py").read_text()) for name in names]
    return np.concatenate([rows(ids, count // len(names)) for ids in parts])

  c4_ids = read("C4", common.c4_text(data))
  # The last windows are those on which nothing is chosen or learned.
  c4 = rows(c4_ids, len(c4_ids) // length - count)
  wikitext_ids = read("WikiText-2", (data / common.WIKITEXT).read_text())
  if source is None:
    wikitext = common.smollm2_ids(data)[1]
    assert (c4[:16] == common.smollm2_ids(data)[0]).all(), "another tokenizer"
  else:
    wikitext = rows(wikitext_ids, count)
  train = (data / "wikitext2" / "wiki.train.raw.first1MB_noblank.txt").read_text()
  messages = rows(read("German", german_messages(german)), 2 * count)
  test = {
    "WikiText-2": wikitext,
    "C4": c4[40 : 40 + count],
    "Python": of_modules(MODULES),
    "German": messages[:count],
  }
  validation = {
    "WikiText-2": rows(read("WikiText-2, train", train), count // 2),
    "C4": c4[24 : 24 + count // 2],
    "Python": of_modules(VALIDATION_MODULES)[::2],
    "German": messages[count : count + count // 2],
  }
  draws = {draw: c4[of] for draw, of in DRAWS.items() if of.stop <= len(c4)}
  kept_back = {"WikiText-2": last(wikitext_ids), "C4": last(c4_ids)}
  return Texts(draws, test, validation, kept_back, sources)


def german_messages(file):
  """The translations of a message catalogue that are sentences, 80 characters or more.

  They are in the order of the catalogue, which is that of the English.
  """
  with file.open("rb") as opened:
    catalogue = gettext.GNUTranslations(opened)._catalog
  found = [text for key, text in catalogue.items() if key and isinstance(text, str)]
  return "\n\n".join(text for text in found if len(text) >= 80)


TUNING = "methods/scale_distillation.py", "run/tune.py"
"""Sources of tuning, which layers before it do not depend on."""


def code_digest(without=()):
  """The digest of the library's sources, which rows of one file have in common."""
  digest, root = hashlib.sha256(), pathlib.Path(methods.__file__).parents[1]
  for folder in ("calibration", "layers", "methods", "models", "numerics", "run"):
    for file in sorted((root / folder).rglob("*.py")):
      if file.relative_to(root).as_posix() not in without:
        digest.update(file.read_bytes())
  return digest.hexdigest()


@functools.partial(jax.jit, static_argnames="model")
def of_window(model, outer, exact, ours, ids):
  """Mean KL and mean negative log-likelihood of a window."""

  def chunk(item):
    exact, ours, targets = item
    scores = [
      jax.nn.log_softmax(model.logits(outer, hidden[None])[0])
      for hidden in (exact, ours)
    ]
    divergence = (jnp.exp(scores[0]) * (scores[0] - scores[1])).sum(-1)
    return divergence, -jnp.take_along_axis(scores[1], targets[:, None], 1)[:, 0]

  split = lambda a: a.reshape(-1, CHUNK, *a.shape[1:])
  targets = jnp.roll(ids[0], -1)
  divergence, loss = jax.lax.map(
    chunk, (split(exact[0]), split(ours[0]), split(targets))
  )
  return divergence.mean(), loss.reshape(-1)[:-1].mean()


def measured(model, params, quantized, windows, kept=None):
  """KL and negative log-likelihood by window.

  `kept` is a dictionary of what the float model has behind its last layer, which is
  nearly half of the work of a row: found in it for these windows, or put into it.
  """
  outer = streams.outer_params(model, params)
  ids = [jnp.asarray(window[None]) for window in windows]
  kept, key = {} if kept is None else kept, np.asarray(windows).tobytes()
  if key not in kept:
    kept[key] = streams.final_hiddens(model, params, ids)
  exact = kept[key]
  is_float = quantized is params
  ours = exact if is_float else streams.final_hiddens(model, quantized, ids)
  each = zip(exact, ours, ids, strict=True)
  values = [of_window(model, outer, *one) for one in each]
  kl, loss = (np.asarray([float(v[i]) for v in values]) for i in (0, 1))
  return {"kl": kl.tolist(), "loss": loss.tolist()}


class FloatDivergence(scale_distillation.PredictionDivergence):
  """The same loss of the float model with factors on the inputs of its linears."""

  def layer(self, shared, own, hidden, layer):
    del shared
    return self.model.layer(float_scaled(layer, own, self.model), hidden)


def float_scaled(layer, own, model):
  """Folds factors into the float weights of a layer, in float32."""
  weights = {
    (sublayer, name): layer[sublayer][name]["weight"].astype(jnp.float32) * factor[None]
    for (sublayer, name), factor in scale_distillation.input_factors(own, model).items()
  }
  return replace_weights(layer, weights)


class Built(NamedTuple):
  """A quantized model, and what a row tells of its build."""

  params: dict
  stage_seconds: dict
  stage_peak_bytes: dict
  tuning: dict | None


def build(params, calibration, program, layers, run_dir=None):
  """Quantizes a model; its layers before tuning are put into `layers`, or found there.

  `layers` is a dictionary of one draw. They are kept in `run_dir`, if there is one.
  """
  plain = untuned(program)
  if program.tune and type(program).prepare is not Program.prepare:
    raise SystemExit(f"{program.name} learns before its layers are quantized, too")
  if plain not in layers:
    resumes = run_dir is not None and run_dir.is_dir()
    layers[plain] = run(
      params,
      calibration,
      plain,
      run_dir=run_dir,
      resume=resumes,
      check=False,
      probe=False,
    )
  found = layers[plain]
  clock = StageClock(
    dict(found.record.clock.seconds), dict(found.record.clock.peak_bytes)
  )
  quantized, tuning = dict(found.params), None
  if program.tune:
    setup = Setup.of(params, calibration, program, PAPER_CONTRACT, probe=False)
    execution.trim_malloc(execution.LARGE_BYTES)
    with reporting.logged(program.name) as told, clock.stage("tuning"):
      report = Report(program, setup.model.num_layers, clock, told)
      tuned, tuning = tune.distill_scales(setup, quantized, None, report)
    quantized |= tuned
  return Built(quantized, clock.seconds, clock.peak_bytes, tuning)


def labelled_float(model, params, tokens, built, options):
  """The control: the float model, with factors learned as `built` learned its own.

  `options` are those of its tuning. The weight of the labels is that of each of its
  steps, which the control's own divergence, zero at first, would leave at nothing.
  """
  tuning, quantized = built.tuning, built.params
  names = [model.layer_name(index) for index in range(model.num_layers)]
  chunks, order = options.chunks(tokens), options.order(len(options.chunks(tokens)))
  assert order == tuning["order"]
  learned = options.initial([quantized[name] for name in names], model)
  state = [tune.optimizer(options, len(order)).init(layer) for layer in learned]
  teachers = streams.final_hiddens(model, params, chunks)
  objective = FloatDivergence(model, mxfp4.PAPER_RULES)
  for step, seen in enumerate(order):
    weight = np.float32(options.weight_of_labels(tuning["divergence"][:step]))
    examples = [
      gradients.Example(chunks[chunk], teachers[chunk], jnp.asarray(weight))
      for chunk in seen
    ]
    result = gradients.gradients(objective, params, None, learned, examples)
    learned, state = tune.update(options, len(order), learned, state, result.own)
  layers = zip(names, learned, strict=True)
  scaled = {name: float_scaled(params[name], own, model) for name, own in layers}
  return {**params, **scaled}


def paired(row, reference):
  """Mean and standard error of a difference over windows."""
  difference = np.subtract(row, reference)
  return difference.mean(), difference.std(ddof=1) / len(difference) ** 0.5


def label(name):
  """How tables name a row."""
  for options, short in LABELS.items():
    name = name.replace(options, short)
  return name


def mean_of(rows, key, text):
  """Means over rows of KL or loss, by window."""
  return np.mean([row["texts"][text][key] for row in rows], axis=0)


def spread(values):
  """Mean and standard deviation over draws, if there are several."""
  deviation = f" ± {np.std(values, ddof=1):.4f}" if len(values) > 1 else ""
  return f"{np.mean(values):.4f}{deviation}"


def difference(rows, others, key, text):
  """Mean over draws of a difference, with its standard error over windows."""
  pair = mean_of(rows, key, text), mean_of(others, key, text)
  return "{:+.4f} ± {:.4f}".format(*paired(*pair))


def by_text(whole, kinds, key, shown):
  """A table of a quantity by row and text, beside its difference from HiRes."""
  head, lines = ["row"], []
  for text in kinds:
    head += [f"{text} {'KL' if key == 'kl' else 'ppl'}", f"less that of {PAPER}"]
  for name, rows in whole.items():
    cells = [label(name)]
    for text in kinds:
      cells += [shown(rows, text), difference(rows, whole[PAPER], key, text)]
    lines.append(cells)
  return common.markdown(head, lines)


def tables(rows, draws, method=NEXT):
  """Markdown tables: KL first, perplexity beside it, then what is adaptation.

  Rows that not all draws have are left out.
  """
  names = dict.fromkeys(row["name"] for row in rows)
  whole = {name: [row for row in rows if row["name"] == name] for name in names}
  whole = {name: same for name, same in whole.items() if len(same) == len(draws)}
  if PAPER not in whole:
    return f"Only {len(rows)} rows.\n"
  kinds = list(rows[0]["texts"])
  quantized = {name: same for name, same in whole.items() if name != FLOAT}
  mean_kl = lambda row, text: np.mean(row["texts"][text]["kl"])
  divergence = lambda same, text: spread([mean_kl(row, text) for row in same])
  perplexity = lambda same, text: f"{np.exp(mean_of(same, 'loss', text).mean()):.2f}"
  parts = [
    "KL from the float model, "
    + (f"means of {len(draws)} draws:" if len(draws) > 1 else f"draw {draws[0]}:"),
    by_text(quantized, kinds, "kl", divergence),
    "Perplexity, and the difference of its logarithm:",
    by_text(whole, kinds, "loss", perplexity),
  ]
  if {FLOAT, CONTROL, method, method + WITHOUT_LABELS} <= whole.keys():
    parts += ["Adaptation and quantization:", adaptation(whole, kinds, method)]
  of = {name: told for name, told in weights_of(method).items() if name in whole}
  if len(of) > 1 and all("validation" in row for name in of for row in whole[name]):
    parts += ["The weight of the labels:", by_weight(whole, of, kinds)]
  return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def adaptation(whole, kinds, method=NEXT):
  """What the labels give to the float model, beside what `method` gains.

  The share of quantization is that of the gain of log perplexity which the float model
  does not get from the same labels. It stands only where the gain is over twice its
  standard error.
  """
  head = [
    "text",
    f"gain of {method}",
    "gain without labels",
    "gain of the float model by labels",
    "share of quantization",
    f"KL that labels add to {method}",
    "KL of the float model with labels",
  ]
  lines = []
  for text in kinds:
    loss = {name: mean_of(whole[name], "loss", text) for name in whole}
    gain, error = paired(loss[PAPER], loss[method])
    adapted, _ = paired(loss[FLOAT], loss[CONTROL])
    lines.append(
      [
        text,
        f"{gain:+.4f} ± {error:.4f}",
        difference(whole[PAPER], whole[method + WITHOUT_LABELS], "loss", text),
        difference(whole[FLOAT], whole[CONTROL], "loss", text),
        f"{1 - adapted / gain:.2f}" if gain > 2 * error else "no gain",
        difference(whole[method], whole[method + WITHOUT_LABELS], "kl", text),
        f"{mean_of(whole[CONTROL], 'kl', text).mean():.4f}",
      ]
    )
  return common.markdown(head, lines)


def by_weight(whole, weights, kinds):
  """KL and perplexity on the windows that choose, and on those that are reported."""
  head, lines = ["most that labels weigh"], []
  for part in ("validation", "test"):
    head += [f"{part} {text}, KL / ppl" for text in kinds]
  for name, weight in weights.items():
    cells = [weight]
    for part in ("validation", "texts"):
      for text in kinds:
        of = lambda key, name=name, part=part, text=text: np.mean(
          [row[part][text][key] for row in whole[name]]
        )
        cells.append(f"{of('kl'):.4f} / {np.exp(of('loss')):.2f}")
    lines.append(cells)
  return common.markdown(head, lines)


def shared_by_rows(sources, method, is_kept_back):
  """What all rows of a file have in common."""
  windows = "kept back" if is_kept_back else "test"
  return {
    "code": code_digest(),
    "sources": sources,
    "method": method,
    "windows": windows,
  }


def kept_rows(file, shared, wanted):
  """The rows that a file has already.

  Raises:
    SystemExit: They are of other code or texts, or not what this command makes.
  """
  if not file.is_file():
    return []
  found = json.loads(file.read_text())
  differing = [key for key, value in shared.items() if found.get(key) != value]
  stray = [
    row["name"] for row in found["rows"] if (row["draw"], row["name"]) not in wanted
  ]
  if differing or stray:
    raise SystemExit(
      f"{file} has rows of another {' and '.join(differing)}"
      if differing
      else f"{file} has rows that this command does not make: {', '.join(stray)}"
    )
  return found["rows"]


def method_of(name):
  """The program of a row."""
  return ROWS.get(name) or methods.get(name)


def weights_of(method):
  """Rows that differ in the most that labels weigh, by it; `method` itself is the last.

  Its own weight is less where 2.25 times the divergence is.
  """
  few_labels = f"{method}+tune:label_weight=0.06"
  return {method + WITHOUT_LABELS: "0", few_labels: ".06", method: ".45"}


def rows_of(method):
  """The rows that tell of a method, of its labels and of its control."""
  return list(dict.fromkeys([FLOAT, PAPER, NEXT, method, CONTROL, *weights_of(method)]))


def untuned(program):
  """The program without its tuning, by the same name whatever that was."""
  return dataclasses.replace(program, tune=None, name=program.name.partition("+")[0])


def folder_of(code, model, draw, program):
  """The name of the run folder of a program's layers, by code, model and draw.

  `code` is the digest of the sources that layers depend on.
  """
  described = json.dumps([model, untuned(program).describe()], sort_keys=True)
  digest = hashlib.sha256(described.encode())
  return f"{code[:8]}-{draw}-{digest.hexdigest()[:8]}"


def main():
  parser = common.parser(__doc__, data=True, out=False)
  parser.add_argument("--draws", type=int, nargs="+", default=[1, 2, 3])
  parser.add_argument(
    "--rows", nargs="+", help="by default those that tell of --method"
  )
  parser.add_argument("--method", default=NEXT, help="whose control `float, labels` is")
  parser.add_argument("--model", help="a folder; SmolLM2-135M-Instruct if omitted")
  parser.add_argument("--german", type=pathlib.Path, default=GERMAN)
  parser.add_argument("--out", type=pathlib.Path, help="results/hires_next*.json")
  parser.add_argument("--compiled", help="a folder of compiled programs to keep")
  parser.add_argument("--runs", type=pathlib.Path, help="a folder of run folders")
  parser.add_argument("--kept-back", action="store_true", help="other windows")
  options = parser.parse_args()
  options.rows = options.rows or rows_of(options.method)
  if CONTROL in options.rows:
    learns = method_of(options.method).tune
    if not learns:
      parser.error(f"{options.method} learns no factors that {CONTROL!r} could learn")
    if learns.map_rate:
      parser.error(f"{options.method} learns whole maps, and {CONTROL!r} factors alone")
  if options.out is None:
    name = f"_{pathlib.Path(options.model).name}" if options.model else ""
    options.out = common.RESULTS / f"hires_next{name}.json"
  made = common.stamp()
  execution.keep_freed_memory()
  if options.compiled:
    kept_programs.keep_compiled(options.compiled)
  model, params = models.from_pretrained(options.model)
  found = texts(options.data, options.german, options.model)
  shared = shared_by_rows(found.sources, options.method, options.kept_back)
  wanted = [(draw, name) for draw in options.draws for name in options.rows]
  rows = kept_rows(options.out, shared, wanted)
  windows = found.kept_back if options.kept_back else found.test
  kept, layers, latest, of_method = {}, {}, None, None
  measure = lambda windows, quantized: {
    text: measured(model, params, quantized, ids, kept) for text, ids in windows.items()
  }
  for draw, name in wanted:
    if any((row["draw"], row["name"]) == (draw, name) for row in rows):
      continue
    if draw != latest:
      layers, latest, of_method = {}, draw, None
    start = time.perf_counter()
    entries = {}
    if name == FLOAT:
      quantized = params
    else:
      program = method_of(options.method if name == CONTROL else name)
      calibration = Calibration(model, found.draws[draw])
      built = of_method if name == CONTROL else None
      if built is None:
        run_dir = options.runs and options.runs / folder_of(
          code_digest(TUNING), options.model, draw, program
        )
        entries = {
          "shares_layers": untuned(program) in layers,
          "is_resumed": run_dir is not None and run_dir.is_dir(),
        }
        built = build(params, calibration, program, layers, run_dir)
      if name == options.method:
        of_method = built
      quantized = built.params
      entries |= {
        "stage_seconds": built.stage_seconds,
        "stage_peak_bytes": built.stage_peak_bytes,
        "tuning": built.tuning,
      }
    if name == CONTROL:
      quantized = labelled_float(model, params, found.draws[draw], built, program.tune)
    row = {
      "draw": draw,
      "name": name,
      "build_seconds": time.perf_counter() - start,
      "peak_bytes": peak_memory_bytes(),
      "has_run_folder": options.runs is not None,
      **entries,
      "texts": measure(windows, quantized),
    }
    if not options.kept_back:
      row["validation"] = measure(found.validation, quantized)
    rows.append(row)
    common.write(options.out, {**made, **shared, "rows": rows})
    print(
      draw,
      name,
      {t: round(np.mean(v["kl"]), 4) for t, v in row["texts"].items()},
      flush=True,
    )
  common.write(
    options.out,
    {**made, **shared, "rows": rows},
    tables(rows, options.draws, options.method),
  )


if __name__ == "__main__":
  main()
