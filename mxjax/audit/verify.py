"""`mxjax verify`: audits a quantized model from its folder alone.

It compares the manifest with the files, the files with the contract, the model's config
and the format, and the runtime's results with independent arithmetic.
"""

import dataclasses
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mxjax.audit import arithmetic, verify_linears
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.models.config import ModelConfig
from mxjax.models.parameters import parameter_shapes
from mxjax.numerics.contract import PAPER_CONTRACT, Contract
from mxjax.numerics.recovery import mlp_recovery
from mxjax.numerics.recovery.mlp_recovery import MlpRecovery
from mxjax.numerics.recovery.value_recovery import ValueRecovery
from mxjax.run import folder as run_folder
from mxjax.storage import checkpoint, digested_json
from mxjax.storage.atomic_io import damaged_files, file_names
from mxjax.storage.tree_io import walk

ROUNDED = 1e-6
"""Allowance for storing the coefficients in float32, added to their bound."""
_RECOVERY = {"value_recovery": ValueRecovery, "mlp_recovery": MlpRecovery}


@dataclasses.dataclass
class Audit:
  """The result of an audit: no `faults`, one sentence each, if all is sound.

  `counts` are checked items by kind; `contract` is the hash of the model's contract and
  `form` its `Contract.form`.
  """

  folder: str
  faults: list[str] = dataclasses.field(default_factory=list)
  counts: dict[str, int] = dataclasses.field(default_factory=dict)
  contract: str = ""
  is_paper_contract: bool = False
  form: str = ""

  def to_dict(self) -> dict[str, Any]:
    """Converts the audit to nested dicts that JSON can represent."""
    return dataclasses.asdict(self)

  def lines(self) -> list[str]:
    """Summarizes the audit for printing after the faults."""
    looked = ", ".join(f"{count} {name}" for name, count in self.counts.items())
    kind = "the paper's" if self.is_paper_contract else "another than the paper's"
    if self.form != PAPER_CONTRACT.form:
      kind = f"{self.form}, outside the paper's {PAPER_CONTRACT.form} contract"
    verdict = f"{len(self.faults)} faults" if self.faults else "everything holds"
    contract = f"contract {self.contract[:12]}, {kind}" if self.contract else ""
    return [line for line in (contract, f"checked {looked}: {verdict}") if line]


def verify(path: str | os.PathLike[str], *, seed: int = 0) -> Audit:
  """Audits a folder of `mxjax quantize` or a checkpoint; `seed` draws the inputs.

  The run folder beside the checkpoint is audited if there is one.

  Raises:
    FileNotFoundError: There is no checkpoint.
  """
  # A checkpoint itself is audited alone; the output folder of a command with all that
  # is in it.
  outer = folder = pathlib.Path(path)
  if not (folder / checkpoint.MANIFEST).is_file() and (folder / "checkpoint").is_dir():
    folder = folder / "checkpoint"
  audit = Audit(str(folder))
  try:
    manifest = checkpoint.read_manifest(folder)
  except ValueError as error:
    audit.faults.append(str(error))
    return audit
  contract = _read_contract(manifest, audit)
  # The manifest against the folder: what is changed, and what nobody lists.
  files = manifest["files"]
  audit.counts["files"] = len(files)
  damage = [f"file {text}." for text in damaged_files(folder, files, verify=True)]
  known = {*files, checkpoint.MANIFEST}
  unlisted = [name for name in file_names(folder) if name not in known]
  audit.faults += damage
  audit.faults += [f"file {one} is not in {checkpoint.MANIFEST}." for one in unlisted]
  # Damaged files are named and not read, because what they hold means nothing.
  if not damage and contract is not None:
    try:
      params, config = checkpoint.restore_checkpoint(folder, contract=contract)
    except (OSError, TypeError, ValueError) as error:
      audit.faults.append(str(error))
    else:
      audit.counts["arrays"] = len(manifest["arrays"])
      _check_model(params, config, contract, manifest, audit, seed)
  # What lies beside the checkpoint is audited even if that is damaged.
  if outer != folder:
    _check_output_folder(outer, manifest, audit)
  return audit


def _read_contract(manifest: Mapping[str, Any], audit: Audit) -> Contract | None:
  try:
    contract = Contract.from_dict(manifest["contract"])
  except (KeyError, TypeError, ValueError) as error:
    audit.faults.append(f"contract: the manifest's cannot be read ({error}).")
    return None
  audit.contract = contract.hash
  audit.is_paper_contract = contract == PAPER_CONTRACT
  audit.form = contract.form
  if contract.hash == manifest["contract_hash"]:
    return contract
  audit.faults.append(
    f"contract: the manifest states the hash {manifest['contract_hash']}, its contract "
    f"has {contract.hash}."
  )
  return None


def _check_model(
  params: Mapping[str, Any],
  config: Mapping[str, Any],
  contract: Contract,
  manifest: Mapping[str, Any],
  audit: Audit,
  seed: int,
) -> None:
  """Checks params against the model that their config builds."""
  try:
    built = ModelConfig.from_dict(dict(config))
  except (TypeError, ValueError) as error:
    audit.faults.append(
      f"model config: expected that of a model of mxjax.models, got another ({error}); "
      "a model of your own cannot be audited beyond its files."
    )
    return
  _check_params(params, built, contract, audit, seed)
  _check_arithmetic(params, built.dtype, manifest, audit)


def _check_params(
  params: Mapping[str, Any],
  config: ModelConfig,
  contract: Contract,
  audit: Audit,
  seed: int,
) -> None:
  """Checks coverage, every linear, every other tensor, and recovery."""
  # Every node is taken from here when it is checked; what remains is in no config.
  nodes = dict(walk(params))
  if "lm_head" in params:
    # Rotated models have their own head, whatever their config ties.
    config = dataclasses.replace(config, tie_embeddings=False)
  shapes = {"/".join(path): shape for path, shape in parameter_shapes(config).items()}
  linears = 0
  for name, shape in shapes.items():
    node = nodes.pop(name, None)
    is_target = name.startswith("layers_") and name.split("/")[-2] in contract.targets
    found = tuple(getattr(node, "shape", ()))
    if node is None:
      audit.faults.append(f"{name} is missing.")
    elif found != shape:
      audit.faults.append(f"{name} has shape {found}, expected {shape}.")
    elif isinstance(node, QuantizedLinear):
      if node.rules != contract.rules:
        audit.faults.append(f"{name} has {node.rules}, not the contract's.")
      # A seed for each linear: its inputs do not depend on how many were drawn before
      # it.
      rng = np.random.default_rng([seed, linears])
      faults = verify_linears.faults(node, rng, contract.activations)
      audit.faults += [f"{name}: {text}." for text in faults]
      linears += 1
    elif is_target:
      audit.faults.append(f"{name} is a target of the contract and is not quantized.")
    else:
      faults = verify_linears.payload_faults(node)
      audit.faults += [f"{name} {text}." for text in faults]
  audit.counts["quantized linears"] = linears
  audit.counts["other tensors"] = len(shapes) - linears
  audit.counts["recovery leaves"] = 0
  # Remaining nodes are not parameters of the float model.
  for name, node in nodes.items():
    kind = _RECOVERY.get(name.split("/")[-1])
    if kind is None or not isinstance(node, kind) or not name.startswith("layers_"):
      audit.faults.append(
        f"{name} is no parameter of this model and no recovery: it is beyond the "
        "allowance of 2 scalars a key-value head and 3 a layer."
      )
      continue
    audit.counts["recovery leaves"] += 1
    audit.faults += [f"{name}: {text}." for text in _recovery_faults(node, config)]


def _check_arithmetic(
  params: Mapping[str, Any], dtype: str, manifest: Mapping[str, Any], audit: Audit
) -> None:
  """Compares the arithmetic that a checkpoint states, if it does, with what is here."""
  stated = (manifest["extra"] or {}).get("arithmetic")
  if not stated:
    return
  found = arithmetic.arithmetic(params, dtype)
  # Only the run knows these; the stored model does not show them.
  elsewhere = {arithmetic.BUILD, arithmetic.ATTENTION}
  audit.faults += [
    f"arithmetic: the manifest states {name} as {stated.get(name)}, the model has "
    f"{found.get(name)}."
    for name in sorted((stated.keys() | found) - elsewhere)
    if stated.get(name) != found.get(name)
  ]


def _recovery_faults(node: Any, config: ModelConfig) -> Iterator[str]:
  """Checks shape, dtype and bounds of one recovery leaf."""
  is_values = isinstance(node, ValueRecovery)
  shape = (config.num_kv_heads,) if is_values else ()
  values = {name: np.asarray(value) for name, value in vars(node).items()}
  for name, value in values.items():
    if value.shape != shape or value.dtype != np.float32:
      yield f"{name} is {value.dtype} {value.shape}, its allowance is float32 {shape}"
      return
    if not np.isfinite(value).all():
      yield f"{name} is not finite"
      return
  if is_values:
    return
  total = sum(abs(float(values[k])) for k in ("gate_shift", "gate_scale", "up_scale"))
  if total > mlp_recovery.L1_BOUND + ROUNDED:
    yield (
      f"|alpha| + |beta| + |eta| is {total:.6f}, above the bound of "
      f"{mlp_recovery.L1_BOUND}"
    )
  if values["gate_deviation"] < 0:
    yield f"sigma_g is {float(values['gate_deviation'])}, below zero"


def _check_output_folder(
  folder: pathlib.Path, manifest: Mapping[str, Any], audit: Audit
) -> None:
  """Checks what is beside the checkpoint: the run, the results, and nothing else."""
  vouched = {f"checkpoint/{one}" for one in (*manifest["files"], checkpoint.MANIFEST)}
  if (folder / "run" / run_folder.STATE).is_file():
    vouched |= _check_run_folder(folder / "run", manifest, audit)
  # `mxjax import` writes a checkpoint alone, which vouches for itself.
  if {*file_names(folder)} - vouched:
    audit.faults += [
      f"{text}." for text in digested_json.output_faults(folder, vouched)
    ]


def _check_run_folder(
  folder: pathlib.Path, manifest: Mapping[str, Any], audit: Audit
) -> set[str]:
  """Checks the run's state, its files, and that the checkpoint has the same types.

  Returns the files that the state vouches for.
  """
  try:
    state = run_folder.read_state(folder)
  except ValueError as error:
    audit.faults.append(str(error))
    return set()
  if not state["end"]:
    text = f"run/{run_folder.STATE} does not say that the run finished."
    audit.faults.append(text)
  listed = run_folder.listed_files(state)
  audit.faults += [f"run/{text}." for text in damaged_files(folder, listed)]
  is_tuned = state["tuning"] is not None
  for one in state["layers"]:
    for path, node in one["nodes"].items():
      # Only types and static fields are compared: arrays have digests in both places.
      saved = manifest["nodes"].get(f"{one['name']}/{path}")
      if _type(saved, is_tuned) != _type(node, is_tuned):
        audit.faults.append(
          f"{one['name']}/{path} is of another type in the checkpoint than in run/."
        )
  audit.counts["layers of the run"] = len(state["layers"])
  return {f"run/{name}" for name in listed}


def _type(node: Any, is_tuned: bool) -> Any:
  """Returns a node's description; of a tuned linear, what tuning leaves as it was.

  What is learned folds into the input map, which may get another type, or be the first.
  """
  if not is_tuned or not node or node["type"] != QuantizedLinear.__name__:
    return node
  children = {
    name: one for name, one in node["children"].items() if name != "input_map"
  }
  return {**node, "children": children}
