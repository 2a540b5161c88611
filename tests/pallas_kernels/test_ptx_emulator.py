import ml_dtypes
import numpy as np
import pytest

from tests.pallas_kernels import ptx_emulator, ptx_machine


def kernel(body, parameters=2, threads=32):
  """PTX with one entry; `%rd0`, `%rd1`, ... are the arrays' addresses."""
  names = [f"\t.param .u64 k_param_{i}" for i in range(parameters)]
  loads = "".join(f"ld.param.b64 %rd{i}, [k_param_{i}];\n" for i in range(parameters))
  return (
    f".visible .entry k(\n{', '.join(names)}\n)\n.reqntid {threads}, 1, 1\n"
    f"{{\n{loads}mov.u32 %r0, %tid.x;\n{body}\nret;\n}}\n"
  )


def own(address, size, result="%rd9"):
  """Instructions for the address of a thread's own element."""
  return f"mul.wide.u32 %rd8, %r0, {size};\nadd.s64 {result}, {address}, %rd8;\n"


def test_blocks_read_compute_and_write():
  body = """
    mov.u32 %r1, %ctaid.x;
    shl.b32 %r2, %r1, 5;
    add.s32 %r0, %r0, %r2;
  """
  body += (
    own("%rd0", 4) + "ld.global.b32 %r3, [%rd9];\nadd.rn.f32 %r4, %r3, 0f3F800000;"
  )
  body += own("%rd1", 4) + "st.global.b32 [%rd9], %r4;"
  x = np.arange(96, dtype=np.float32)
  out = np.zeros(96, np.float32)
  got = ptx_emulator.launch(kernel(body), (3, 1, 1), [x, out])
  np.testing.assert_array_equal(got[1], x + 1)
  assert not out.any()


def test_one_array_may_be_input_and_output():
  body = own("%rd0", 4) + "ld.global.b32 %r3, [%rd9];\nadd.s32 %r4, %r3, 5;"
  body += own("%rd1", 4) + "st.global.b32 [%rd9], %r4;"
  x = np.arange(32, dtype=np.int32)
  after = ptx_emulator.launch(kernel(body), (1, 1, 1), [x, x])
  np.testing.assert_array_equal(after[0], x + 5)
  np.testing.assert_array_equal(after[1], x + 5)


def test_a_loop_runs_as_often_as_its_predicate_says():
  body = """
    mov.b32 %r1, 0;
    $L_again:
    add.s32 %r1, %r1, 3;
    setp.lt.s32 %p1, %r1, 10;
    @%p1 bra $L_again;
  """
  body += own("%rd0", 4) + "st.global.b32 [%rd9], %r1;"
  [got] = ptx_emulator.launch(kernel(body, 1), (1, 1, 1), [np.zeros(32, np.int32)])
  assert (got == 12).all()


def test_threads_that_are_off_neither_read_nor_write():
  # Half of the addresses are outside.
  body = "setp.lt.u32 %p1, %r0, 16;\nmov.b32 %r3, 7;\n" + own("%rd0", 4)
  body += "@%p1 ld.global.b32 %r3, [%rd9];\n" + own("%rd1", 4)
  body += "st.global.b32 [%rd9], %r3;"
  x, out = np.arange(16, dtype=np.int32), np.zeros(32, np.int32)
  _, got = ptx_emulator.launch(kernel(body), (1, 1, 1), [x, out])
  np.testing.assert_array_equal(got, [*range(16), *[7] * 16])


def test_an_address_outside_or_not_aligned_is_an_error():
  for length, offset in ((31, 0), (32, 4), (32, -4), (64, 2)):
    body = own("%rd0", 4) + f"ld.global.b32 %r3, [%rd9 + {offset}];"
    with pytest.raises(IndexError, match="an address"):
      ptx_emulator.launch(kernel(body, 1), (1, 1, 1), [np.zeros(length, np.int32)])


def test_a_branch_that_threads_do_not_share_is_refused():
  body = "setp.lt.u32 %p1, %r0, 16;\n@%p1 bra $L_end;\n$L_end:"
  with pytest.raises(NotImplementedError, match="do not share"):
    ptx_emulator.launch(kernel(body, 1), (1, 1, 1), [np.zeros(1, np.int32)])


def test_lanes_exchange_registers():
  body = (
    "shfl.sync.bfly.b32 %r1, %r0, 8, 31, -1;\nshfl.sync.idx.b32 %r2, %r0, 3, 31, -1;"
  )
  body += own("%rd0", 4) + "st.global.b32 [%rd9], %r1;"
  body += own("%rd1", 4) + "st.global.b32 [%rd9], %r2;"
  lane = np.arange(64, dtype=np.int32)
  blank = np.zeros(64, np.int32)
  got = ptx_emulator.launch(kernel(body, threads=64), (1, 1, 1), [blank, blank.copy()])
  np.testing.assert_array_equal(got[0], lane ^ 8)
  np.testing.assert_array_equal(got[1], lane // 32 * 32 + 3)


def swizzled(matrix, width):
  """Where each element of `[rows, 16]` lies, rows of `width` bytes, in elements."""
  row, column = np.indices(matrix.shape)
  address = row * width + 2 * column
  return (address ^ ((address >> 7 & (width // 16 - 1)) << 4)) // 2


def columns_first(matrix, width):
  """Like `swizzled` of a matrix whose rows are contiguous, as many as fit a width."""
  row, column = np.indices(matrix.shape)
  address = row // (width // 2) * 16 * width + 2 * (row % (width // 2))
  address += column * width
  return (address ^ ((address >> 7 & (width // 16 - 1)) << 4)) // 2


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(("width", "mode"), [(128, 1), (64, 2), (32, 3)])
def test_a_product_of_a_warp_group_is_that_of_its_tiles(width, mode, is_transposed):
  """Both operands from shared memory, put there as the tensor copy engine does."""
  rng = np.random.default_rng(mode)
  draw = lambda *shape: rng.integers(-8, 9, shape).astype(ml_dtypes.bfloat16)
  a, b = draw(64, 16), draw(32, 16)
  shared = np.zeros(16384 // 2, ml_dtypes.bfloat16)
  shared[swizzled(a, width)] = a
  lies = columns_first if is_transposed else swizzled
  shared[8192 // 2 + lies(b, width)] = b
  # Eight columns further, and past the contiguous rows of a transposed operand.
  stride, leading = 8 * width >> 4, 16 * width >> 4
  words = [at >> 4 | leading << 16 | stride << 32 | mode << 62 for at in (0, 8192)]
  body = own("%rd0", 128)
  for i in range(8):
    # A thread copies 128 bytes, 16 at a time.
    body += f"ld.global.v4.b32 {{%r1, %r2, %r3, %r4}}, [%rd9 + {16 * i}];\n"
    body += "mul.wide.u32 %rd7, %r0, 128;\n"
    body += f"st.shared.v4.b32 [%rd7 + {16 * i}], {{%r1, %r2, %r3, %r4}};\n"
  sums = ", ".join(f"%r{20 + i}" for i in range(16))
  body += f"mov.b64 %rd5, {words[0]};\nmov.b64 %rd6, {words[1]};\n"
  turn = int(is_transposed)
  name = "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16"
  body += f"{name} {{{sums}}}, %rd5, %rd6, 0, 1, 1, 0, {turn};\n"
  body += f"mov.pred %p1, -1;\n{name} {{{sums}}}, %rd5, %rd6, %p1, 1, 1, 0, {turn};\n"
  body += own("%rd1", 64)
  body += "".join(f"st.global.b32 [%rd9 + {4 * i}], %r{20 + i};\n" for i in range(16))
  out = np.zeros((128, 16), np.float32)
  _, got = ptx_emulator.launch(kernel(body, threads=128), (1, 1, 1), [shared, out])
  thread, register = np.indices(got.shape)
  lane = thread % 32
  row = thread // 32 * 16 + lane // 4 + 8 * (register % 4 // 2)
  column = register // 4 * 8 + 2 * (lane % 4) + register % 2
  want = 2 * (a.astype(np.float32) @ b.astype(np.float32).T)
  np.testing.assert_array_equal(got, want[row, column])


@pytest.mark.parametrize("is_transposed", [False, True])
def test_matrices_of_a_warp_are_loaded_multiplied_and_stored(is_transposed):
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.integers(-8, 9, shape).astype(ml_dtypes.bfloat16)
  a, b = draw(16, 16), draw(16, 8)
  # Four 8 x 8 matrices in the order of the fragment, and two of the right operand.
  blocks = [a[r : r + 8, c : c + 8] for c in (0, 8) for r in (0, 8)]
  blocks += [b[k : k + 8].T if not is_transposed else b[k : k + 8] for k in (0, 8)]
  blocks += [b[:8], b[8:]]  # Not read.
  memory = np.stack(blocks)
  body = own("%rd0", 32)
  for i in range(2):
    body += f"ld.global.v4.b32 {{%r1, %r2, %r3, %r4}}, [%rd9 + {16 * i}];\n"
    body += "mul.wide.u32 %rd7, %r0, 32;\n"
    body += f"st.shared.v4.b32 [%rd7 + {16 * i}], {{%r1, %r2, %r3, %r4}};\n"
  body += "mul.wide.u32 %rd6, %r0, 16;\n"
  load = "ldmatrix.sync.aligned.m8n8.x4"
  body += f"{load}.shared.b16 {{%r10, %r11, %r12, %r13}}, [%rd6];\n"
  trans = ".trans" if is_transposed else ""
  body += f"{load}{trans}.shared.b16 {{%r14, %r15, %r16, %r17}}, [%rd6 + 512];\n"
  body += "mov.b32 %r20, 0f3F800000;\n"
  body += "".join(f"mov.b32 %r{i}, %r20;\n" for i in (21, 22, 23))
  body += "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r20, %r21, %r22, %r23}"
  body += ", {%r10, %r11, %r12, %r13}, {%r14, %r15}, {%r20, %r21, %r22, %r23};\n"
  body += own("%rd1", 16) + "st.global.v4.b32 [%rd9], {%r20, %r21, %r22, %r23};\n"
  _, got = ptx_emulator.launch(
    kernel(body), (1, 1, 1), [memory, np.zeros((32, 4), np.float32)]
  )
  lane, register = np.indices(got.shape)
  row, column = lane // 4 + 8 * (register // 2), 2 * (lane % 4) + register % 2
  want = 1 + a.astype(np.float32) @ b.astype(np.float32)
  np.testing.assert_array_equal(got, want[row, column])


def test_a_sign_is_copied_to_the_magnitude_of_the_second():
  sign, value = np.float32([[-3, 3, -0.0, 0.0], [2, -2, 0.5, -0.5]]).view(np.uint32)
  got = ptx_machine.evaluate("copysign.f32", [sign, value]).view(np.float32)
  np.testing.assert_array_equal(got, np.float32([-2, 2, -0.5, 0.5]))


def test_a_kernel_of_mosaic_elects_a_thread_of_each_warp():
  body = """
    .loc\t1 40 9
    elect.sync %r5|%p1, -1;
    // begin inline asm
    {
.reg .b32 part;
mov.b32 part, %r0;
add.s32 %r1, part, 7;
}
    selp.b32 %r2, %r1, 0, %p1;
  """
  body += own("%rd1", 4) + "st.global.b32 [%rd9], %r2;"
  text = kernel(body, threads=64).replace(".reqntid", ".maxntid")
  x, out = np.zeros(1, np.int32), np.zeros(64, np.int32)
  got = ptx_emulator.launch(text, (1, 1, 1), [x, out])[1]
  want = np.where(np.arange(64) % 32 == 0, np.arange(64) + 7, 0)
  np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
  ("operation", "register", "expected"),
  [
    ("cvt.s16.s8", 0x01FF, 0xFFFF),
    ("cvt.u16.u8", 0x01FF, 0x00FF),
    ("cvt.s32.s16", 0x8000, 0xFFFF8000),
    ("cvt.u16.u32", 0x12345, 0x2345),
    ("cvt.rn.f32.u16", 0xFFFF, 0x477FFF00),
    ("cvt.rn.f32.s8", 0x01FF, 0xBF800000),
  ],
)
def test_integers_are_converted_from_the_lower_bits(operation, register, expected):
  size = np.uint32 if register > 0xFFFF else np.uint16
  got = ptx_machine.evaluate(operation, [np.array([register], size)])
  assert int(got[0]) == expected
