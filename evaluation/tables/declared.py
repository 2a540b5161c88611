"""The tables of the paper as data: rows are methods, columns are quantities.

A row's label is the paper's, and its method what `methods.get` takes; the float model
is the row whose method is `BF16`.
"""

from collections.abc import Mapping
from typing import NamedTuple

from mxjax.evaluation.tasks.tasks import FLOAT, SEVEN

THREE = ("wikitext2", "c4", "arc_challenge")
FIT3 = (*THREE, "fit3")
FIT7 = (*SEVEN, "fit7")
MEASURES = ("local", "cost")
"""What columns need of a build beside its row and the tasks."""
DRAWS = (0, 3, 5)
"""Calibration seeds of the paper's multi-seed tables."""


class Declared(NamedTuple):
  """A table.

  Attributes:
    label: Its label in the paper; empty for a table of ours.
    title: What it shows.
    rows: Methods by the label of their row.
    columns: Names of `quantities.QUANTITIES`.
    paper: Keys of `paper.json` with its printed rows.
    draws: Calibration seeds.
    reference: Row that the others are compared with, in `columns[-1]`.
    is_by_model: Whether models are columns, of `columns[0]`, instead of rows.
    takes_others: Whether results of methods without a row get one.
  """

  label: str
  title: str
  rows: Mapping[str, str]
  columns: tuple[str, ...]
  paper: tuple[str, ...] = ()
  draws: tuple[int, ...] = (0,)
  reference: str = ""
  is_by_model: bool = False
  takes_others: bool = False


_RTN_STAGE = "weights=rtn:rounding=nearest"
_NO_RECOVERY = "hires:recover=none"
_NEAREST, _SENSITIVITY = "hires:rounding=nearest", "hires:rounding=sensitivity"
_NO_K, _NO_D = "hires:use_interaction=false", "hires:use_balance=false"
_NEITHER = f"{_NO_K}:use_balance=false"
_ATTENTION, _MLP = "hires:recover=attention", "hires:recover=mlp"
# Paper: the stale control measures the MLP's statistics on the Stage-II parent, without
# attention recovery, and deploys both.
_STALE = "hires:recover=attention+mlp-parent"
# Paper: "before A4 encoding" is read as before both encodings, because the control's
# local error falls by 0.02 % at most; with rounded weights it falls by more.
_EARLY = "hires:recover=attention-unencoded+mlp-unencoded"
_WITHOUT_A4 = "hires:recover=attention-unrounded+mlp-unrounded"
_METHODS = {
  "RTN": "rtn",
  "GPTQ": "gptq",
  "MR-GPTQ": "mr-gptq",
  "BRQ": "brq",
  "WUSH": "wush",
  "TORQ": "torq",
  "BATQuant+GPTQ": "batquant",
  "SpinQuant+GPTQ": "spinquant",
  "FOCUS": "focus",
  "HiRes": "hires",
}
_STAGES = {
  "Strict RTN": "rtn",
  "+ Geometric shaping": f"hires:{_RTN_STAGE}:recover=none",
  "+ Discrete realization": _NO_RECOVERY,
  "+ Structural recovery": "hires",
}
_RULES = {"Nearest": _NEAREST, "Sensitivity": _SENSITIVITY, "Full": "hires"}

TABLES: Mapping[str, Declared] = {
  "main": Declared(
    "tab:cross-model-fit7",
    "Fit-7 across models",
    _METHODS,
    ("fit7",),
    ("cross_model_fit7",),
    is_by_model=True,
    takes_others=True,
  ),
  "progression": Declared(
    "tab:stage-progression",
    "Fit-3 of stages, and of interventions in full HiRes",
    _STAGES
    | {
      "Remove local interaction K": _NO_K,
      "Remove diagonal balance (D=I)": _NO_D,
      "Disable one-code refinement": _NEAREST,
      "Use stale MLP statistics": _STALE,
    },
    ("fit3",),
    ("stage_progression",),
    is_by_model=True,
  ),
  "raw": Declared(
    "tab:raw-llama3b, raw-qwen4b, raw-mistral7b, raw-qwen8b, raw-llama8b, raw-olmo13b, "
    "qwen32-transfer",
    "Complete seven-task results",
    {FLOAT: FLOAT} | _METHODS,
    FIT7,
    ("raw_seven_task",),
    takes_others=True,
  ),
  "references": Declared(
    "tab:ablation-bf16", "BF16 references", {FLOAT: FLOAT}, SEVEN, ("ablation_bf16",)
  ),
  "seeds": Declared(
    "tab:calib-seed-stability",
    "Calibration seeds",
    {"HiRes": "hires", "WUSH": "wush"},
    FIT7,
    ("calib_seed_stability",),
    DRAWS,
    "WUSH",
    takes_others=True,
  ),
  "method-seeds": Declared(
    "",
    "Methods over calibration seeds",
    {name: _METHODS[name] for name in ("HiRes", "WUSH", "BRQ", "GPTQ")},
    FIT7,
    draws=DRAWS,
    reference="HiRes",
  ),
  "aggregates": Declared(
    "tab:alternative-aggregates",
    "Alternative aggregates",
    {"WUSH": "wush", "HiRes": "hires"},
    ("fit3", "mean_damage", "worst", "acc5", "fit7"),
    ("alternative_aggregates",),
    takes_others=True,
  ),
  "stages": Declared(
    "tab:stage-progression-raw",
    "Stages",
    _STAGES,
    (*THREE, "mean_damage3", "worst3", "fit3"),
    ("stage_progression_raw",),
    reference="+ Structural recovery",
  ),
  "components": Declared(
    "tab:component-ablations",
    "K and D",
    {
      "Full HiRes": "hires",
      "Remove local interaction K": _NO_K,
      "D=I": _NO_D,
      "K=0, D=I": _NEITHER,
    },
    FIT3,
    ("component_ablations",),
    reference="Full HiRes",
  ),
  "components-seeds": Declared(
    "tab:kd-multiseed",
    "K and D over calibration seeds",
    {"Full": "hires", "K=0": _NO_K, "D=I": _NO_D, "Reference": _NEITHER},
    FIT7,
    ("kd_multiseed",),
    DRAWS,
    "Full",
  ),
  "geometry": Declared(
    "tab:geometry-replacement, geometry-paired",
    "WUSH's geometry with HiRes' refinement and recovery",
    {"WUSH": "wush", "WUSH+R": "wush+r", "HiRes": "hires"},
    ("wikitext2", "c4", "acc5", "fit7"),
    ("geometry_replacement",),
    DRAWS,
    "WUSH+R",
  ),
  "discrete": Declared(
    "tab:discrete-ablations",
    "Discrete realization",
    {
      "Strict RTN realization": f"hires:{_RTN_STAGE}",
      "Sequential reconstruction": _NEAREST,
      "Full discrete realization": "hires",
    },
    FIT3,
    ("discrete_ablations",),
    reference="Full discrete realization",
  ),
  "rules": Declared(
    "tab:onecode-rules",
    "One-code rules over calibration seeds",
    _RULES,
    FIT7,
    ("onecode_rules",),
    DRAWS,
    "Full",
  ),
  "local": Declared(
    "tab:onecode-local",
    "Local objectives of the one-code rules",
    _RULES,
    ("local_sensitivity", "local_mismatch", "fit7"),
    ("onecode_local",),
  ),
  "edits": Declared(
    "tab:onecode-edits",
    "Codes that the one-code rule edits",
    {"HiRes": "hires"},
    ("codes_per_block", "edited_elements"),
    ("onecode_edits",),
  ),
  "rule-cost": Declared(
    "tab:onecode-cost",
    "Cost of one-code refinement",
    {"Without refinement": _NEAREST, "With refinement": "hires"},
    ("build_minutes", "tokens_per_second"),
    ("onecode_cost",),
  ),
  "recovery": Declared(
    "tab:structural-ablations",
    "Recovery paths",
    {
      "Both paths disabled": _NO_RECOVERY,
      "Attention only": _ATTENTION,
      "MLP only": _MLP,
      "Both paths": "hires",
      "Stale MLP statistics": _STALE,
    },
    FIT3,
    ("structural_ablations",),
    reference="Both paths",
  ),
  "recovery-seeds": Declared(
    "tab:structural-multiseed",
    "Recovery paths over calibration seeds",
    {"None": _NO_RECOVERY, "Attention": _ATTENTION, "MLP": _MLP, "Both": "hires"},
    FIT7,
    ("structural_multiseed",),
    DRAWS,
    "Both",
  ),
  "fresh": Declared(
    "tab:fresh-stale-multiseed",
    "MLP statistics after (fresh) and before (stale) attention recovery",
    {"Fresh": "hires", "Stale": _STALE},
    FIT3,
    ("fresh_stale_multiseed",),
    DRAWS,
    "Stale",
  ),
  "encoding": Declared(
    "tab:encoding-boundary",
    "Recovery fitted before and after A4 encoding",
    {"none": _NO_RECOVERY, "pre-encoding": _EARLY, "post-encoding": "hires"},
    ("layer_mse", *FIT3),
    ("encoding_boundary_endpoints", "encoding_boundary_mse"),
    reference="post-encoding",
  ),
  "encoding-seeds": Declared(
    "tab:encoding-boundary-seeds",
    "The encoding boundary over calibration seeds",
    {"pre-encoding": _EARLY, "post-encoding": "hires"},
    FIT3,
    ("encoding_boundary_seeds",),
    DRAWS,
    "post-encoding",
  ),
  "storage": Declared(
    "tab:hires-storage",
    "Static storage of the BF16-decoded layout",
    {"HiRes": "hires"},
    ("blocks", "bf16_gib", "auxiliary_mib", "total_gib", "increase"),
    ("storage",),
  ),
  "cost": Declared(
    "tab:hires-full-cost",
    "Forward latency and quantization time",
    {FLOAT: FLOAT, "HiRes": "hires"},
    ("forward_ms", "build_minutes"),
    ("full_cost",),
  ),
  "encodings": Declared(
    "",
    "Recovery fitted before both encodings, before that of the inputs, and after both",
    {
      "none": _NO_RECOVERY,
      "before both": _EARLY,
      "before A4": _WITHOUT_A4,
      "after both": "hires",
    },
    ("layer_mse", *FIT3),
    reference="after both",
  ),
  "next": Declared(
    "",
    "Searched exponents and descent",
    {
      "searched weight exponents": "hires-descent:descent=0",
      "descent": "hires-descent:scales=fresh",
      "hires-descent": "hires-descent",
      "full HiRes": "hires",
    },
    FIT3,
    draws=DRAWS,
    reference="full HiRes",
  ),
  "predictions": Declared(
    "",
    "Quantizing for the model's predictions",
    {
      FLOAT: FLOAT,
      "tuned WUSH with Fisher weights": "wush:weighting=fisher+tune",
      "hires-next": "hires-next",
      "hires-rotated": "hires-rotated",
      "hires-rotated, no labels": "hires-rotated+tune:label_weight=0",
      "HiRes": "hires",
    },
    FIT7,
    draws=DRAWS,
    reference="HiRes",
  ),
  "controls": Declared(
    "",
    "Controls of recovery",
    {
      "RTN + recovery": "rtn+r",
      "HiRes without recovery": _NO_RECOVERY,
      "HiRes": "hires",
      "strict RTN": "rtn",
    },
    FIT3,
    draws=DRAWS,
    reference="strict RTN",
  ),
}
"""The tables by name; those without a label are ours."""
