"""Dynamic A4 rules: how a quantized linear rounds its mapped inputs.

To add a rule, subclass `ActivationQuantizer` and decorate it with `@register`: it runs,
is saved in checkpoints, exported and audited.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
from typing_extensions import override

from mxjax.errors import NotImplementedRefusal, ValueRefusal
from mxjax.numerics import implementations, mxfp4
from mxjax.numerics.implementations import Implementation
from mxjax.numerics.jax_export import register_dataclass
from mxjax.numerics.precision import block_products
from mxjax.numerics.realization import few_codes, one_code

RULES: dict[str, type] = {}
"""Every registered A4 rule, by its name in checkpoints."""

FEATURES: dict[str, str] = {}
"""Names and descriptions of what registered rules store besides codes."""

Rule = TypeVar("Rule", bound="ActivationQuantizer")


def register(cls: type[Rule]) -> type[Rule]:
  """Registers a dataclass as a pytree and as an A4 rule that checkpoints may hold."""
  if RULES.setdefault(cls.__name__, cls) is not cls:
    raise ValueRefusal(
      "activation_quantizers.register",
      expected="a name that no rule has",
      got=f"{cls.__name__}, which names {RULES[cls.__name__]}",
      mend="give the new rule another name",
    )
  FEATURES.update([cls.feature] if cls.feature else [])
  return register_dataclass(cls)


class KernelTables(NamedTuple):
  """What `pallas_kernels.refinement` needs of a rule; without G_Q, nearest codes.

  Attributes:
    gram: G_Q, packed, or None.
    cross: K_Q, or None for zero.
    changes: Codes of a block that may change.
    rounds_up: Whether exponents are those of `few_codes.scale_rules`.
  """

  gram: jax.Array | None = None
  cross: jax.Array | None = None
  changes: int = 1
  rounds_up: bool = False


class ActivationQuantizer:
  """Base class of dynamic A4 rules: dataclasses whose fields are their stored arrays.

  Attributes:
    is_legal: Whether the results are legal A4.
    edits: How many codes of a block may differ from the nearest ones under
      `scale_rules`; None for any.
    feature: Name and description of what an export format must support, or None if the
      rule stores nothing besides the codes.
    runs_alone: Whether evaluation runs layers with this rule operation by operation, so
      that the rule is compiled once and not in every layer: for rules that are used for
      a few calls and take longer to compile.
  """

  is_legal: ClassVar[bool] = True
  runs_alone: ClassVar[bool] = False
  feature: ClassVar[tuple[str, str] | None] = None

  @property
  def edits(self) -> int | None:
    """How many codes of a block may differ; see the class."""
    return None

  def scale_rules(self, rules: mxfp4.Rules) -> mxfp4.Rules:
    """Returns the rules by which inputs are encoded, where `rules` are the linear's."""
    return rules

  def round_mapped(self, blocks: jax.Array, rules: mxfp4.Rules) -> jax.Array:
    """Rounds float32 inputs `[blocks, 32, n]` in the coordinates of the input map.

    Returns the decoded A4 values, float32, same shape.
    """
    raise NotImplementedRefusal(type(self).__name__, "its own round_mapped", got="none")

  def round(
    self,
    blocks: jax.Array,
    rules: mxfp4.Rules,
    *,
    matrix: jax.Array | None = None,
    implementation: Implementation | None = None,
  ) -> jax.Array:
    """Rounds inputs like `round_mapped`, after applying a map to each block if any.

    `matrix` is float32 `[blocks, 32, 32]`, or None if the inputs are already mapped.
    See `implementations.choose` for `implementation`.
    """
    implementations.choose(f"the A4 rule {type(self).__name__}", implementation)
    mapped = blocks if matrix is None else block_products(matrix, blocks)
    return self.round_mapped(mapped, rules)

  def tables(self) -> tuple[jax.Array, jax.Array | None] | None:
    """Returns G_Q and K_Q as float32 `[blocks, 32, 32]`, or None without tables."""
    return None

  def kernel_tables(self) -> KernelTables | None:
    """Returns what the kernels need, or None if they do not support the rule."""
    return None

  def narrowed(self) -> Self:
    """Returns the rule with its tables in the narrowest sufficient dtype."""
    return self

  def with_weight(self, decoded: jax.Array) -> Self:
    """Returns the rule of a linear whose codes have changed.

    `decoded` are its decoded W4 weights, float32 `[blocks, 32, rows]`. A table K_Q,
    for which the float weights are needed, stays.
    """
    del decoded
    return self


@register
@dataclasses.dataclass(frozen=True)
class Nearest(ActivationQuantizer):
  """Dynamic A4 by the nearest code."""

  @property
  @override
  def edits(self) -> int:
    return 0

  @override
  def round_mapped(self, blocks: jax.Array, rules: mxfp4.Rules) -> jax.Array:
    return mxfp4.round_blocks(blocks, rules)

  @override
  def kernel_tables(self) -> KernelTables:
    return KernelTables()


def _packed_gram(decoded: jax.Array, dtype: Any) -> jax.Array:
  """Returns G_Q of decoded weights `[blocks, 32, rows]` as rules store it."""
  return one_code.pack_symmetric(one_code.gram_of(decoded)).astype(dtype)


@register
@dataclasses.dataclass(frozen=True)
class OneCode(ActivationQuantizer):
  """Dynamic A4 with one-code refinement (Eq. hires-code-score).

  Attributes:
    gram: G_Q, packed upper triangle, row by row, `[blocks, 528]`; float32, or bfloat16
      after `pack_for_inference`.
    cross: K_Q, `[blocks, 32, 32]`, same dtypes.
  """

  gram: jax.Array
  cross: jax.Array

  feature = "refinement", "tables that refine codes of the activations"

  @property
  @override
  def edits(self) -> int:
    return 1

  @override
  def round(
    self,
    blocks: jax.Array,
    rules: mxfp4.Rules,
    *,
    matrix: jax.Array | None = None,
    implementation: Implementation | None = None,
  ) -> jax.Array:
    return one_code.refined_blocks(
      blocks, *self.tables(), rules, matrix=matrix, implementation=implementation
    )

  @override
  def tables(self) -> tuple[jax.Array, jax.Array]:
    # Scores are float32 whatever dtype the tables are stored in.
    gram = one_code.unpack_symmetric(self.gram).astype(jnp.float32)
    return gram, self.cross.astype(jnp.float32)

  @override
  def kernel_tables(self) -> KernelTables:
    return KernelTables(self.gram, self.cross)

  @override
  def with_weight(self, decoded: jax.Array) -> Self:
    return dataclasses.replace(self, gram=_packed_gram(decoded, self.gram.dtype))

  def narrowed(self) -> "OneCode":
    """Returns bfloat16 tables, which suffice to rank candidates."""
    return OneCode(self.gram.astype(jnp.bfloat16), self.cross.astype(jnp.bfloat16))


@register
@dataclasses.dataclass(frozen=True)
class FewCodes(ActivationQuantizer):
  """Dynamic A4 that changes a few codes of each block, one at a time; see `few_codes`.

  Attributes:
    gram: G_Q, as in `OneCode`.
    changes: The most codes that change, at least 1 (static).
    rounds_up: Whether exponents round up from 7 scales, as under the rule `even`,
      where the linear's rule is `floor` (static).

  Raises:
    ValueError: `changes` is less than 1.
  """

  gram: jax.Array
  changes: int = dataclasses.field(default=1, metadata={"static": True})
  rounds_up: bool = dataclasses.field(default=False, metadata={"static": True})

  feature = OneCode.feature

  def __post_init__(self) -> None:
    """Checks the number of changes."""
    if self.changes < 1:
      raise ValueRefusal(
        "FewCodes",
        expected="changes of at least 1",
        got=self.changes,
        mend="use Nearest to change no code",
      )

  @property
  @override
  def edits(self) -> int:
    return self.changes

  @override
  def scale_rules(self, rules: mxfp4.Rules) -> mxfp4.Rules:
    return few_codes.scale_rules(rules, self.rounds_up)

  @override
  def round(
    self,
    blocks: jax.Array,
    rules: mxfp4.Rules,
    *,
    matrix: jax.Array | None = None,
    implementation: Implementation | None = None,
  ) -> jax.Array:
    return few_codes.refined_blocks(
      blocks,
      self.tables()[0],
      self.scale_rules(rules),
      changes=self.changes,
      matrix=matrix,
      implementation=implementation,
    )

  @override
  def tables(self) -> tuple[jax.Array, None]:
    return one_code.unpack_symmetric(self.gram).astype(jnp.float32), None

  @override
  def kernel_tables(self) -> KernelTables:
    return KernelTables(self.gram, None, self.changes, self.rounds_up)

  @override
  def with_weight(self, decoded: jax.Array) -> Self:
    return dataclasses.replace(self, gram=_packed_gram(decoded, self.gram.dtype))

  def narrowed(self) -> "FewCodes":
    """Returns bfloat16 tables, which suffice to rank candidates."""
    return dataclasses.replace(self, gram=self.gram.astype(jnp.bfloat16))


@register
@dataclasses.dataclass(frozen=True)
class Clipped(ActivationQuantizer):
  """Dynamic A4 that clips values to shares of the block's range before rounding.

  Attributes:
    low: Share of the block's smallest value that is kept, float32 `[blocks]`.
    high: Share of its largest value, float32 `[blocks]`.
  """

  low: jax.Array
  high: jax.Array

  feature = "clipping", "learned clipping of the activations"

  @override
  def round_mapped(self, blocks: jax.Array, rules: mxfp4.Rules) -> jax.Array:
    return mxfp4.round_blocks(clip_blocks(blocks, self.low, self.high), rules)


def clip_blocks(blocks: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
  """Clips blocks `[blocks, 32, n]` to shares of their own smallest and largest value.

  `low` and `high` are the shares, `[blocks]` or `[blocks, n]`.
  """
  share = lambda part: part[:, None, None] if part.ndim == 1 else part[:, None, :]
  smallest = share(low) * blocks.min(-2, keepdims=True)
  largest = share(high) * blocks.max(-2, keepdims=True)
  return jnp.clip(blocks, smallest, largest)


@register
@dataclasses.dataclass(frozen=True)
class Unrounded(ActivationQuantizer):
  """Unrounded inputs, which make a linear weight-only; not a legal A4 rule.

  The product is that of decoded weights and mapped inputs in the inputs' own dtype.
  """

  is_legal = False

  def round_mapped(self, blocks: jax.Array, rules: mxfp4.Rules) -> jax.Array:
    """Returns the inputs unchanged."""
    del rules
    return blocks
