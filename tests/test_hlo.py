"""The reader of compiled programs, on a text in the form of XLA's GPU compiler."""

import jax
import jax.numpy as jnp

from tests import hlo

TEXT = """HloModule jit_f, is_scheduled=true

%fused_slice (p.0: f32[64,1024], p.1: s32[]) -> f32[1,1024] {
  %p.0 = f32[64,1024]{1,0} parameter(0)
  %p.1 = s32[] parameter(1)
  ROOT %slice.1 = f32[1,1024]{1,0} dynamic-slice(%p.0, %p.1), metadata={}
}

%body (state: (s32[], f32[64,1024])) -> (s32[], f32[64,1024]) {
  %state = (s32[], f32[64,1024]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %table = f32[64,1024]{1,0} get-tuple-element(%state), index=1
  %row = f32[1,1024]{1,0} fusion(%table, %i), kind=kLoop, calls=%fused_slice
  ROOT %next = (s32[], f32[64,1024]{1,0}) tuple(%i, %table)
}

ENTRY %main (w: bf16[2048,1024], x: bf16[4,1024], t: f32[64,1024]) -> bf16[4,2048] {
  %w = bf16[2048,1024]{1,0} parameter(0), sharding={replicated}
  %x = bf16[4,1024]{1,0} parameter(1)
  %t = f32[64,1024]{1,0} parameter(2)
  %zero = s32[] constant(0)
  %start = (s32[], f32[64,1024]{1,0}) tuple(%zero, /*index=1*/%t)
  %while.1 = (s32[], f32[64,1024]{1,0}) while(%start), condition=%c, body=%body@TURNS@
  %row.s = ((f32[64,1024], s32[]), f32[1,1024], u32[]) @START@
  %row.d = f32[1,1024]{1,0} fusion-done(%row.s)
  %copy.1 = bf16[2048,1024]{0,1} copy(%w), metadata={op_name="x"}
  %gemm = (bf16[4,2048]{1,0}, s8[33554432]{0}) custom-call(%x, %copy.1), @PRODUCT@
  ROOT %y = bf16[4,2048]{1,0} get-tuple-element(%gemm), index=0
}
"""
TEXT = TEXT.replace(
  "@PRODUCT@",
  'custom_call_target="__cublas$lt$matmul", '
  'backend_config={"lhs_contracting_dimensions":["1"]}',
)
TEXT = TEXT.replace(
  "@START@", "fusion-start(%t, %zero), kind=kLoop, calls=%fused_slice"
)
KNOWN = ', backend_config={"known_trip_count":{"n":"64"}}'
WEIGHTS = {("bf16", (2048, 1024))}


def test_counts_follow_loops_and_take_slices_for_what_they_are():
  counts = hlo.Program(TEXT.replace("@TURNS@", KNOWN)).counts()
  weight, x, row = 2 * 2048 * 1024, 2 * 4 * 1024, 4 * 1024
  assert counts["launches"] == 64 + 3
  # A row is read and written 64 times and once; a scalar with it. The product reads
  # the copy.
  loop = 65 * (2 * row + 4)
  assert counts["bytes"] == loop + 2 * weight + (weight + x + 2 * 4 * 2048)
  assert counts["bf16 operations of products"] == 2 * 4 * 1024 * 2048


def test_a_loop_of_unknown_length_and_a_copied_weight_are_named():
  known, unknown = (
    hlo.Program(TEXT.replace("@TURNS@", turns)) for turns in (KNOWN, "")
  )
  assert known.waiting() == [] and unknown.waiting() == ["while.1"]
  assert known.copies(WEIGHTS) == ["main: copy.1 = bf16[2048,1024]{0,1}"]
  assert known.copies({("f32", (2048, 1024))}) == []


def test_a_program_of_this_machine_is_read_too():
  """Whatever the backend, a loop with a fixed length is known and another is not."""

  def fixed(x):
    return jax.lax.fori_loop(0, 5, lambda _, x: jnp.sin(x) @ x, x)

  def open_(x):
    return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x + jnp.sin(x), x)

  read = lambda f: hlo.Program(jax.jit(f).lower(jnp.ones((8, 8))).compile().as_text())
  assert read(fixed).waiting() == []
  assert len(read(open_).waiting()) == 1
