"""Plants one mistake at a time into a copy of the library, and runs the tests on it.

    python tests/mutants.py                  all mutants, into tests/mutants.json
    python tests/mutants.py --only NAME ...  some, beside the results that are there
    python tests/mutants.py --table          the stored results, as Markdown

The mistakes were chosen by reading the library, not the tests. A mutant replaces one
string that must occur exactly once in its file, or among the files of its folder; one
that is not there any more is an error here, to be repaired beside the change that
moved it.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = pathlib.Path(__file__).with_suffix(".json")
LEFT_OUT = shutil.ignore_patterns(".*", "runs", "__pycache__", "*.egg-info", "build")
SECONDS = 900

NUMERICS, SHAPING = "mxjax/numerics", "mxjax/numerics/shaping"
REALIZATION = "mxjax/numerics/realization"
RECOVERY = "mxjax/numerics/recovery"


class Mutant(NamedTuple):
  """One mistake: what it breaks, where, and the tests that should notice."""

  name: str
  file: str
  old: str
  new: str
  tests: tuple[str, ...]


MUTANTS = (
  Mutant(
    "floor scale one binade too large",
    f"{NUMERICS}/mxfp4.py",
    "    exponent -= 2\n",
    "    exponent -= 1\n",
    ("tests/mxjax/numerics/test_mxfp4.py",),
  ),
  Mutant(
    "ties to odd codes",
    f"{NUMERICS}/mxfp4.py",
    'rules.tie_rule == "even" and index % 2 == 0',
    'rules.tie_rule == "even" and index % 2 == 1',
    ("tests/mxjax/numerics/test_mxfp4.py",),
  ),
  Mutant(
    "nibbles swapped in a byte",
    f"{NUMERICS}/mxfp4.py",
    "jnp.array([1, 16], jnp.int32)",
    "jnp.array([16, 1], jnp.int32)",
    ("tests/mxjax/numerics/test_mxfp4.py",),
  ),
  Mutant(
    "contract hash without the rules",
    f"{NUMERICS}/contract.py",
    "text = json.dumps(self.to_dict(), sort_keys=True",
    'text = json.dumps({**self.to_dict(), "rules": 0}, sort_keys=True',
    ("tests/mxjax/numerics/test_contract.py",),
  ),
  Mutant(
    "box projection on the wrong side of a kink",
    f"{NUMERICS}/projections.py",
    "kink_left + sum_left * (kink_right - kink_left) / drop",
    "kink_left - sum_left * (kink_right - kink_left) / drop",
    ("tests/mxjax/numerics/test_projections.py",),
  ),
  Mutant(
    "GPTQ feeds errors back with the wrong sign",
    f"{REALIZATION}/gptq.py",
    'target -= jnp.einsum("...i,...im->...m", coupling',
    'target += jnp.einsum("...i,...im->...m", coupling',
    ("tests/mxjax/numerics/realization/test_gptq.py",),
  ),
  Mutant(
    "GPTQ damping does not grow after a failed factor",
    f"{REALIZATION}/gptq.py",
    "used = jnp.where(good, used, first * growth)",
    "used = jnp.where(good, used, first + 0 * growth)",
    ("tests/mxjax/numerics/realization/test_gptq.py",),
  ),
  Mutant(
    "searched scales keep the worst exponent",
    f"{REALIZATION}/gptq.py",
    "]).argmin(0)",
    "]).argmax(0)",
    ("tests/mxjax/numerics/realization/test_code_descent.py",),
  ),
  Mutant(
    "descent accepts half of the steps that help",
    f"{REALIZATION}/code_descent.py",
    "step * (step * pivot - 2 * pull) < 0",
    "step * (step * pivot - pull) < 0",
    ("tests/mxjax/numerics/realization/test_code_descent.py",),
  ),
  Mutant(
    "one-code score without the factor two",
    f"{REALIZATION}/one_code.py",
    "_rounded_product(2.0 * delta, slope)",
    "_rounded_product(delta, slope)",
    ("tests/mxjax/numerics/realization/test_one_code.py",),
  ),
  Mutant(
    "one-code cross table negated",
    f"{REALIZATION}/one_code.py",
    "decoded, weight - decoded, precision=HIGHEST",
    "decoded, decoded - weight, precision=HIGHEST",
    ("tests/mxjax/numerics/realization/test_one_code.py",),
  ),
  Mutant(
    "cap of the interaction twice as large",
    f"{SHAPING}/local_interaction.py",
    "\nRADIUS = 1 / 8\n",
    "\nRADIUS = 1 / 4\n",
    ("tests/mxjax/numerics/shaping/test_shaping.py",),
  ),
  Mutant(
    "directed excess of the interaction never counted",
    f"{SHAPING}/local_interaction.py",
    "  excess = jnp.abs(",
    "  excess = -jnp.abs(",
    ("tests/mxjax/numerics/shaping/test_shaping.py",),
  ),
  Mutant(
    "correction doubles the volume instead of dividing by it",
    f"{SHAPING}/local_interaction.py",
    "jnp.exp(-log_volume / size)",
    "jnp.exp(log_volume / size)",
    ("tests/mxjax/numerics/shaping/test_shaping.py",),
  ),
  Mutant(
    "full balance accepted when better than half, not than none",
    f"{SHAPING}/dyadic_balance.py",
    "jnp.where(full <= identity, 1.0,",
    "jnp.where(full <= half, 1.0,",
    ("tests/mxjax/numerics/shaping/test_dyadic_balance.py",),
  ),
  Mutant(
    "balance proposed eight times too strong",
    f"{SHAPING}/dyadic_balance.py",
    "project_zero_sum_box_bisection(BOUND * centered, BOUND)",
    "project_zero_sum_box_bisection(centered, BOUND)",
    ("tests/mxjax/numerics/shaping/test_dyadic_balance.py",),
  ),
  Mutant(
    "weights folded by the inverse, not its transpose",
    f"{SHAPING}/input_maps.py",
    "jnp.linalg.inv(self.matrix.astype(blocks.dtype).mT)",
    "jnp.linalg.inv(self.matrix.astype(blocks.dtype))",
    ("tests/mxjax/numerics/shaping/test_input_maps.py",),
  ),
  Mutant(
    "Hadamard signs on one side of the Hessian only",
    f"{SHAPING}/input_maps.py",
    "signed = self._signed(self._signed(hessian).T)",
    "signed = self._signed(hessian).T",
    ("tests/mxjax/numerics/shaping/test_input_maps.py",),
  ),
  Mutant(
    "attention recovery's offset ignores its scale",
    f"{RECOVERY}/value_recovery.py",
    "(sums.target - scale * sums.value) / sums.count",
    "(sums.target - sums.value) / sums.count",
    ("tests/mxjax/methods/test_recovery_fits.py",),
  ),
  Mutant(
    "MLP recovery with a sixteenfold ridge",
    f"{RECOVERY}/mlp_recovery.py",
    "2.0**-8 * jnp.trace(gram",
    "2.0**-4 * jnp.trace(gram",
    ("tests/mxjax/methods/test_recovery_fits.py",),
  ),
  Mutant(
    "durations pass for token ids",
    "mxjax/intake/token_ids.py",
    'array.dtype.kind not in "iu"',
    "not np.issubdtype(array.dtype, np.integer)",
    ("tests/mxjax/intake/test_token_ids.py",),
  ),
  Mutant(
    "token ids beyond int32 wrap",
    "mxjax/intake/token_ids.py",
    "vocabulary or LARGEST + 1",
    "vocabulary or 2**63",
    ("tests/mxjax/intake/test_token_ids.py",),
  ),
  Mutant(
    "whatever a reader raises passes as it is",
    "mxjax/intake/reading.py",
    "  except BaseException as error:",
    "  except UnicodeDecodeError as error:",
    ("tests/evaluation/test_damaged_files.py",),
  ),
  Mutant(
    "a gzip file unpacks to any size",
    "mxjax/intake/reading.py",
    "limit = min(TEXT_BYTES, least + ratio * path.stat().st_size)",
    "limit = 2**40",
    ("tests/evaluation/test_datasets.py",),
  ),
  Mutant(
    "sizes of a config are used before they are checked",
    "models/families/hf_config.py",
    "if field in SIZES and values.get(name) is not None:",
    "if field in SIZES and name in ():",
    ("tests/models/test_config.py",),
  ),
  Mutant(
    "lists in GGUF files may be longer than the file",
    "models/loading/gguf.py",
    "if end > len(self.data) or self.reads > MOST_VALUES:",
    "if end < 0:",
    ("tests/models/loading/test_gguf.py",),
  ),
  Mutant(
    "an index names shards outside its folder",
    "models/loading/weights.py",
    'name.endswith(".safetensors") and "/" not in name',
    'name.endswith("")',
    ("tests/models/loading/test_weights.py",),
  ),
  Mutant(
    "resume deletes what a shortened journal does not list",
    "mxjax/storage/run_events.py",
    "return odd + (new_layers if len(new_layers) > 1 else [])",
    "return []",
    ("tests/mxjax/storage/test_run_folder.py",),
  ),
  Mutant(
    "a journal may list files outside its folder",
    "mxjax/storage/run_events.py",
    "rf\"^({'|'.join(FOLDERS)})/[^/\\\\]+\\.safetensors$\"",
    '"."',
    ("tests/mxjax/storage/test_run_folder.py",),
  ),
  Mutant(
    "verify leaves out what is beside the checkpoint",
    "mxjax/audit/verify.py",
    "if outer != folder:",
    "if outer != outer:",
    ("tests/evaluation/cli/test_every_byte.py",),
  ),
  Mutant(
    "imports of our exports do not look at their sums",
    "mxjax/storage/export/importer.py",
    "check_folder(folder, is_ours=False)",
    "check_folder(folder / 'x', is_ours=False)",
    ("tests/evaluation/cli/test_every_byte.py",),
  ),
  Mutant(
    "processes that write one file share its partial name",
    "mxjax/storage/atomic_io.py",
    'f"{path.name}{PARTIAL}-{secrets.token_hex(4)}"',
    "path.name + PARTIAL",
    ("tests/mxjax/storage/test_atomic_io.py",),
  ),
  Mutant(
    "the room on a disk is not looked at",
    "mxjax/storage/checkpoint.py",
    "atomic_io.check_room(folder.parent, arrays.values(), files=2)",
    "atomic_io.check_room(folder.parent, (), files=2)",
    ("tests/evaluation/cli/test_failing_disks.py",),
  ),
  Mutant(
    "errors of full disks stay as libraries word them",
    "mxjax/storage/atomic_io.py",
    "if number is None and _FULL in str(error):",
    "if number is _FULL:",
    ("tests/mxjax/storage/test_atomic_io.py",),
  ),
  Mutant(
    "tokenizer files wait on the system's own disk",
    "evaluation/cli/outputs.py",
    "    dir=folder, prefix=",
    "    prefix=",
    ("tests/evaluation/cli/test_failing_disks.py",),
  ),
  Mutant(
    "journal lines not chained to the ones before",
    "mxjax/storage/journal.py",
    "hashlib.sha256(before.encode() + rest)",
    "hashlib.sha256(rest)",
    ("tests/mxjax/storage/test_run_folder.py",),
  ),
  Mutant(
    "a run resumes under another identity",
    "mxjax/storage/run_journal.py",
    "if theirs.get(key) != value",
    "if theirs.get(key) is theirs",
    ("tests/mxjax/storage/test_run_folder.py", "tests/mxjax/running/test_resume.py"),
  ),
  Mutant(
    "leftovers of a killed process stay in the run folder",
    "mxjax/storage/run_journal.py",
    "(self.path / name).unlink()",
    "(self.path / name).exists()",
    ("tests/mxjax/storage/test_run_folder.py", "tests/mxjax/running/test_resume.py"),
  ),
  Mutant(
    "damaged files of a checkpoint are used",
    "mxjax/storage",
    'elif verify and file_sha256(file) != entry["sha256"]:',
    'elif verify and file_sha256(file) == "":',
    ("tests/mxjax/storage/test_checkpoint.py",),
  ),
  Mutant(
    "contributions of devices added last to first",
    "mxjax/devices",
    "for row in range(count):",
    "for row in reversed(range(count)):",
    ("tests/mxjax/devices/test_mesh.py",),
  ),
  Mutant(
    "plan counts one scalar too few of a layer's recovery",
    "mxjax/audit/plan.py",
    "4 * (2 * config.num_kv_heads + 4)",
    "4 * (2 * config.num_kv_heads + 3)",
    ("tests/mxjax/audit/test_plan.py",),
  ),
  Mutant(
    "dequantized bias not scaled by the recovery",
    "mxjax/storage/export/dequant.py",
    "jnp.zeros(rows, jnp.float64)) * scale + offset",
    "jnp.zeros(rows, jnp.float64)) + offset",
    ("tests/mxjax/storage/export/test_dequant.py",),
  ),
  Mutant(
    "perplexity of the tokens that were read",
    "evaluation/measures",
    "hidden[:, :-1], ids[:, 1:], ",
    "hidden[:, :-1], ids[:, :-1], ",
    ("tests/evaluation/measures",),
  ),
  Mutant(
    "Fit-3 counts the mean alone",
    "evaluation/measures",
    "0.5 * array.mean() + 0.5 * array.max()",
    "0.5 * array.mean() + 0.5 * array.mean()",
    ("tests/evaluation/test_paper_tables.py", "tests/evaluation/measures"),
  ),
  Mutant(
    "normalized accuracy not normalized",
    "evaluation/tasks/multiple_choice.py",
    "(likelihoods / lengths).argmax()",
    "likelihoods.argmax()",
    ("tests/evaluation/tasks/test_multiple_choice.py",),
  ),
  Mutant(
    "gate admits private attributes",
    "discovery/core/candidate_source.py",
    'if node.attr.startswith("_") or node.attr in FORBIDDEN_ATTRIBUTES:',
    "if node.attr in FORBIDDEN_ATTRIBUTES:",
    ("tests/discovery/core/test_candidate_source.py",),
  ),
  Mutant(
    "a gain supports an excluded explanation",
    "discovery/core/verdict.py",
    'if survivors == "focal" and gains:',
    "if gains:",
    ("tests/discovery/core/test_verdict.py",),
  ),
  Mutant(
    "later controls replace cheaper ones",
    "discovery/search/controls.py",
    "if reached != mask and offer < best.get(reached, (offer[0] + 1, 0, ())):",
    "if reached != mask:",
    ("tests/discovery/search/test_controls.py",),
  ),
  Mutant(
    "ledger releases what a reused call would have cost",
    "discovery/core/ledger.py",
    "self._reserved -= charged",
    "self._reserved -= cost",
    ("tests/discovery/search/test_search.py",),
  ),
  Mutant(
    "endpoint asks again before Retry-After",
    "discovery/proposers/endpoint.py",
    "wait = max(wait, float(after))",
    "wait = min(wait, float(after))",
    ("tests/discovery/proposers/test_proposers.py",),
  ),
  Mutant(
    "rows of GGUF heads stay interleaved",
    "models/loading/gguf.py",
    "paired.swapaxes(1, 2).reshape(rows.shape)",
    "paired.reshape(rows.shape)",
    ("tests/models/loading/test_gguf.py",),
  ),
  Mutant(
    "rotary positions turn half of a pair backwards",
    "models/functional.py",
    "second * cos + first * sin]",
    "second * cos - first * sin]",
    ("tests/models/test_transformer.py",),
  ),
  Mutant(
    "sliding window one position too wide",
    "models/functional.py",
    "masks[1] & (own > positions - window)",
    "masks[1] & (own >= positions - window)",
    ("tests/models/test_transformer.py", "tests/models/test_functional.py"),
  ),
  Mutant(
    "special tokens inside every text",
    "models/tokenizer.py",
    "self.backend.encode(text, add_special_tokens=False)",
    "self.backend.encode(text, add_special_tokens=True)",
    ("tests/models/test_tokenizer.py",),
  ),
  Mutant(
    "unknown config fields are ignored",
    "models/families/hf_config.py",
    "if not (name in known or",
    "if not (name in values or",
    ("tests/models/test_config.py",),
  ),
  Mutant(
    "a loud token weighs without bound",
    "mxjax/calibration/fisher.py",
    "jnp.minimum(squares / squares.mean(), LARGEST)",
    "squares / squares.mean()",
    ("tests/mxjax/calibration/test_output_gradients.py",),
  ),
  Mutant(
    "output moment without the gradients",
    "mxjax/calibration/fisher.py",
    "uniform + SHARE * total / squares",
    "uniform + SHARE * uniform",
    ("tests/mxjax/calibration/test_output_gradients.py",),
  ),
  Mutant(
    "every sequence draws the labels of the first",
    "mxjax/calibration/output_gradients.py",
    "key = jax.random.fold_in(jax.random.key(LABEL_SEED), place)",
    "key = jax.random.fold_in(jax.random.key(LABEL_SEED), 0 * place)",
    ("tests/mxjax/calibration/test_output_gradients.py",),
  ),
  Mutant(
    "the backward pass forgets the input map",
    "mxjax/layers/linear.py",
    "    [blocks] = jax.linear_transpose(weight.input_map.apply, blocks)(blocks)\n",
    "    pass\n",
    ("tests/mxjax/methods/test_scale_distillation.py",),
  ),
  Mutant(
    "shared factors are learned and not installed",
    "mxjax/methods/scale_distillation.py",
    "    factors[block, name] = (1 + steps) * (1 + shared)\n",
    "    factors[block, name] = 1 + steps + 0 * shared\n",
    ("tests/mxjax/methods/test_scale_distillation.py",),
  ),
  Mutant(
    "a resumed tuning starts with new moments",
    "mxjax/running/tuning.py",
    "    learned, state = _restored((learned, state), saved.arrays)\n",
    "    learned, _ = _restored((learned, state), saved.arrays)\n",
    ("tests/mxjax/methods/test_scale_distillation.py",),
  ),
)


def place(tree: pathlib.Path, mutant: Mutant) -> pathlib.Path:
  """The one file with the mutant's string, once; anything else is an error."""
  named = tree / mutant.file
  files = sorted(named.rglob("*.py")) if named.is_dir() else [named]
  counts = {file: file.read_text().count(mutant.old) for file in files}
  if sum(counts.values()) != 1:
    raise ValueError(
      f"mutants: {mutant.name!r}: expected once in {mutant.file}, got "
      f"{sum(counts.values())} times: {mutant.old.strip()!r}; repair the mutant to the "
      "code as it is now."
    )
  return next(file for file, count in counts.items() if count)


def run_tests(tree: pathlib.Path, tests: tuple[str, ...]) -> tuple[int | None, str]:
  """Pytest's exit code (None: too slow) and its first failing test, or last lines."""
  command = [
    sys.executable,
    "-m",
    "pytest",
    "-x",
    "-q",
    "-rfE",
    "-p",
    "no:cacheprovider",
  ]
  environment = os.environ | {
    "PYTHONPATH": str(tree),
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
  }
  try:
    done = subprocess.run(
      [*command, *tests],
      cwd=tree,
      env=environment,
      capture_output=True,
      text=True,
      timeout=SECONDS,
    )
  except subprocess.TimeoutExpired:
    return None, f"no result within {SECONDS} s"
  failing = re.findall(
    r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", done.stdout, re.MULTILINE
  )
  told = failing[0] if failing else done.stdout[-2000:] + done.stderr[-2000:]
  return done.returncode, told


def judge(tree: pathlib.Path, mutant: Mutant) -> dict[str, object]:
  """Plants the mutant, runs its tests, and puts the file back."""
  file = place(tree, mutant)
  source = file.read_text()
  file.write_text(source.replace(mutant.old, mutant.new))
  start = time.perf_counter()
  try:
    code, told = run_tests(tree, mutant.tests)
  finally:
    file.write_text(source)
  if code not in (0, 1, None):
    raise RuntimeError(f"mutants: {mutant.name!r}: pytest ended with {code}:\n{told}")
  return {
    "mutant": mutant.name,
    "file": file.relative_to(tree).as_posix(),
    "from": mutant.old.strip(),
    "to": mutant.new.strip(),
    "caught by": None if code == 0 else told,
    "seconds": round(time.perf_counter() - start),
  }


def table(rows: list[dict[str, object]]) -> str:
  """The results as Markdown."""
  lines = ["| mutant | file | caught by |", "|---|---|---|"]
  for row in rows:
    caught = f"`{row['caught by']}`" if row["caught by"] else "**SURVIVED**"
    lines.append(f"| {row['mutant']} | `{row['file']}` | {caught} |")
  return "\n".join(lines)


def main() -> int:
  """Runs what is asked for; 1 where a mutant survived."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--only", nargs="+", metavar="NAME", help="parts of names")
  parser.add_argument("--table", action="store_true", help="print stored results")
  parser.add_argument("--check", action="store_true", help="only look for the strings")
  options = parser.parse_args()
  stored = json.loads(RESULTS.read_text()) if RESULTS.is_file() else []
  if options.table:
    print(table(stored))
    return 0
  asked = [
    mutant
    for mutant in MUTANTS
    if not options.only or any(part in mutant.name for part in options.only)
  ]
  absent = []
  for mutant in asked:
    try:
      place(ROOT, mutant)
      for test in mutant.tests:
        (ROOT / test).stat()
    except (ValueError, OSError) as error:
      absent.append(str(error))
  if absent or options.check:
    print("\n".join(absent) or f"{len(asked)} mutants fit the code.")
    return 2 if absent else 0
  results = {row["mutant"]: row for row in stored}
  # Programs of the library as it is are compiled once for all mutants.
  with tempfile.TemporaryDirectory(prefix="mxjax-mutants-") as scratch:
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{scratch}/compiled")
    tree = pathlib.Path(scratch) / "tree"
    shutil.copytree(ROOT, tree, symlinks=True, ignore=LEFT_OUT)
    tests = tuple(sorted({test for mutant in asked for test in mutant.tests}))
    code, told = run_tests(tree, tests)
    if code != 0:
      raise RuntimeError(f"mutants: the tests fail without a mutant:\n{told}")
    for mutant in asked:
      results[mutant.name] = row = judge(tree, mutant)
      print(f"{row['seconds']:>4} s  {mutant.name}: {row['caught by'] or 'SURVIVED'}")
      order = [results[one.name] for one in MUTANTS if one.name in results]
      RESULTS.write_text(json.dumps(order, indent=1) + "\n")
  return int(any(results[mutant.name]["caught by"] is None for mutant in asked))


if __name__ == "__main__":
  sys.exit(main())
