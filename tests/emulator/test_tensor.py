"""wgmma, mma.sync, ldmatrix and stmatrix against numpy, their asynchrony, and their checks."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fa4gen.codegen.emulator import Program, Uninitialized
from fa4gen.codegen.emulator.layouts import (
    MatrixDescriptor,
    encode_wgmma_descriptor,
    mma_a_fragment,
    mma_b_fragment,
    mma_d_fragment,
    operand_offsets,
    wgmma_a_fragment,
    wgmma_d_fragment,
)
from fa4gen.codegen.emulator.tensor_core import multiply_accumulate

pytestmark = pytest.mark.filterwarnings("error")

SEEDS = range(6)
DTYPES: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}

# A warpgroup copies an image of shared memory (`words` 32-bit words), multiplies, and stores its accumulators register by register.
WGMMA = """
.version 8.8
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 dyn[];
.entry k(.param .u64 out, .param .u64 image, .param .u64 a_desc, .param .u64 b_desc, .param .u64 a_regs) {{
.reg .pred %p<16>; .reg .b32 %r<400>; .reg .f32 %f<260>; .reg .b64 %rd<32>; .reg .b32 %tid;
mov.u32 %tid, %tid.x; ld.param.u64 %rd1, [out]; ld.param.u64 %rd2, [image]; ld.param.u64 %rd3, [a_desc]; ld.param.u64 %rd4, [b_desc];
ld.param.u64 %rd9, [a_regs];
mov.u32 %r1, %tid; mov.u32 %r9, dyn;
FILL: setp.ge.u32 %p1, %r1, {words}; @%p1 bra FILLED; shl.b32 %r2, %r1, 2; cvt.u64.u32 %rd5, %r2; add.s64 %rd6, %rd2, %rd5;
ld.global.u32 %r3, [%rd6];
add.u32 %r4, %r9, %r2; st.shared.u32 [%r4], %r3; add.u32 %r1, %r1, 128; bra FILL;
FILLED: fence.proxy.async.shared::cta; {sync}
{setup}
wgmma.fence.sync.aligned;
{body}
{after}
mul.wide.u32 %rd7, %tid, {row}; add.s64 %rd8, %rd1, %rd7;
{stores}
}}
"""


def wgmma_program(n: int, body: str, setup: str = "", after: str = "", words: int = 0, sync: str = "bar.sync 0;") -> Program:
    stores = "\n".join(f"st.global.f32 [%rd8+{4 * i}], %f{i};" for i in range(n // 2))
    return Program.from_ptx(WGMMA.format(words=words, sync=sync, setup=setup, body=body, after=after, row=2 * n, stores=stores))


def registers(n: int) -> str:
    return "{" + ", ".join(f"%f{i}" for i in range(n // 2)) + "}"


def mma(n: int, fmt: str, a: str = "%rd3", b: str = "%rd4", accumulate: str = "0", flags: str = "1, 1, 0, 0") -> str:
    return f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{fmt}.{fmt} {registers(n)}, {a}, {b}, {accumulate}, {flags};"


WAIT = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"


def place(image: np.ndarray, matrix: np.ndarray, start: int, leading: int, stride: int, mode: int, major: str) -> int:
    """Write a matrix [mn, 16] into the shared-memory image (which starts at address 1,024); returns its descriptor."""
    descriptor = MatrixDescriptor(1024 + start, leading, stride, 0, mode)
    image.view(np.uint16)[(operand_offsets(descriptor, matrix.shape[0], 16, 2, major) - 1024) // 2] = matrix.view(np.uint16)
    return encode_wgmma_descriptor(descriptor)


# (major, swizzle, leading, stride) of matrices whose tiles are packed; T = 8 elements a 16-byte chunk, W / 2 elements a swizzle row.
LAYOUTS = [
    ("k", 0, 128, 256), ("k", 32, 16, 256), ("k", 64, 16, 512), ("k", 128, 16, 1024),
    ("mn", 0, 2048, 128), ("mn", 32, 512, 256), ("mn", 64, 1024, 512), ("mn", 128, 2048, 1024),
]  # fmt: skip


def accumulators(out: np.ndarray, n: int) -> np.ndarray:
    result = np.zeros((64, n), np.float32)
    rows, cols = wgmma_d_fragment(n)
    result[rows, cols] = out
    return result


@pytest.mark.parametrize("layout_a", LAYOUTS, ids=str)
@pytest.mark.parametrize("layout_b", LAYOUTS, ids=str)
def test_wgmma_reads_every_layout(layout_a, layout_b):
    rng = np.random.default_rng(1)
    n, fmt = 32, "bf16"
    a, b = (rng.integers(-8, 9, (rows, 16)).astype(DTYPES[fmt]) for rows in (64, n))
    image = np.zeros(16384, np.uint8)
    a_desc = place(image, a, 0, layout_a[2], layout_a[3], layout_a[1], layout_a[0])
    b_desc = place(image, b, 8192, layout_b[2], layout_b[3], layout_b[1], layout_b[0])
    flags = f"1, 1, {int(layout_a[0] == 'mn')}, {int(layout_b[0] == 'mn')}"
    program = wgmma_program(n, mma(n, fmt, flags=flags) + WAIT, words=4096)
    out = np.zeros((128, n // 2), np.float32)
    args = [Uninitialized(out), image, np.uint64(a_desc), np.uint64(b_desc), np.zeros(1, np.uint32)]
    result = program.launch("k", 1, 128, 16384, args)
    assert not result.hazards, [str(h) for h in result.hazards]
    assert (accumulators(out, n) == a.astype(np.float64) @ b.astype(np.float64).T).all()


@pytest.mark.parametrize("fmt", ["bf16", "f16"])
@pytest.mark.parametrize("n", [8, 24, 64, 256])
def test_wgmma_shapes_accumulation_scales_and_register_operands(n, fmt):
    """D = -A.B + (A.B + start): the second instruction chains on the first, A of the third comes from registers."""
    rng = np.random.default_rng(n)
    a, b = (rng.standard_normal((rows, 16)).astype(DTYPES[fmt]) for rows in (64, n))
    start = rng.standard_normal((128, n // 2)).astype(np.float32)
    image = np.zeros(32768, np.uint8)
    descriptors = place(image, a, 0, 128, 256, 0, "k"), place(image, b, 8192, 128, 256, 0, "k")
    rows, cols = wgmma_a_fragment()
    a_regs = np.ascontiguousarray(a.view(np.uint16)[rows, cols]).view(np.uint32)[..., 0]
    setup = f"mul.wide.u32 %rd10, %tid, {2 * n}; add.s64 %rd10, %rd9, %rd10;" + "".join(
        f"ld.global.f32 %f{i}, [%rd10+{4 * i}];" for i in range(n // 2)
    )
    setup += (
        f"mul.wide.u32 %rd11, %tid, 16; add.s64 %rd11, %rd9, %rd11; ld.global.v4.u32 {{%r20, %r21, %r22, %r23}}, [%rd11+{start.nbytes}];"
    )
    body = (
        mma(n, fmt, accumulate="1")
        + mma(n, fmt, accumulate="1", flags="-1, 1, 0, 0")
        + mma(n, fmt, a="{%r20, %r21, %r22, %r23}", accumulate="1", flags="1, 1, 0")
        + WAIT
    )
    program = wgmma_program(n, body, setup, words=8192)
    extra = np.concatenate([start.view(np.uint32).ravel(), a_regs.ravel()])
    for seed in SEEDS:
        out = np.zeros((128, n // 2), np.float32)
        result = program.launch("k", 1, 128, 32768, [Uninitialized(out), image, *map(np.uint64, descriptors), extra], seed=seed)
        assert not result.hazards, [str(h) for h in result.hazards]
        product = a.astype(np.float64) @ b.astype(np.float64).T
        assert np.allclose(accumulators(out, n), product + accumulators(start, n), rtol=1e-5, atol=1e-5)


def operands(n=8):
    image = np.zeros(8192, np.uint8)
    a, b = np.ones((64, 16), ml_dtypes.bfloat16), np.ones((n, 16), ml_dtypes.bfloat16)
    return image, place(image, a, 0, 128, 256, 0, "k"), place(image, b, 4096, 128, 256, 0, "k")


def run_small(body: str, seed: int, after: str = "", sync: str = "bar.sync 0;"):
    image, a_desc, b_desc = operands()
    out = np.zeros((128, 4), np.float32)
    program = wgmma_program(8, body, after=after, words=2048, sync=sync)
    result = program.launch("k", 1, 128, 8192, [out, image, np.uint64(a_desc), np.uint64(b_desc), np.zeros(1, np.uint32)], seed=seed)
    return {h.kind for h in result.hazards}, out


def test_accumulators_hold_poison_until_the_wait():
    early = mma(8, "bf16") + "wgmma.commit_group.sync.aligned; mov.f32 %f9, %f0; wgmma.wait_group.sync.aligned 0; mov.f32 %f1, %f9;"
    for seed in SEEDS:
        _, out = run_small(early, seed)
        assert np.isnan(out[:, 1]).all()
        assert (out[:, 0] == 16).all()


def test_wait_leaves_the_named_number_of_groups_in_flight():
    second = "{%f4, %f5, %f6, %f7}"
    body = (
        mma(8, "bf16")
        + "wgmma.commit_group.sync.aligned;"
        + mma(8, "bf16").replace(registers(8), second)
        + "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 1; mov.f32 %f8, %f4; mov.f32 %f9, %f0;"
        + "wgmma.wait_group.sync.aligned 0;"
        + "mov.f32 %f0, %f8; mov.f32 %f1, %f9; mov.f32 %f2, %f4;"
    )
    for seed in SEEDS:
        _, out = run_small(body, seed)
        assert np.isnan(out[:, 0]).all()
        assert (out[:, 1:3] == 16).all()


def test_operands_need_a_barrier_before_and_a_wait_before_reuse():
    overwrite = "st.shared.u32 [%r9], %tid;"
    done = mma(8, "bf16") + WAIT
    for seed in SEEDS:
        assert run_small(done, seed)[0] == set()
        assert run_small(done, seed, sync="")[0] & {"race", "uninitialized"}
        # Other warps still read the tile: a barrier is needed as well as the wait.
        assert run_small(done, seed, after=f"bar.sync 0; setp.eq.u32 %p2, %tid, 0; @%p2 {overwrite}")[0] == set()
        assert run_small(done, seed, after=f"setp.eq.u32 %p2, %tid, 0; @%p2 {overwrite}")[0] == {"race"}
        unwaited = mma(8, "bf16") + "wgmma.commit_group.sync.aligned;"
        after = f"bar.sync 0; setp.eq.u32 %p2, %tid, 0; @%p2 {overwrite} wgmma.wait_group.sync.aligned 0;"
        assert run_small(unwaited, seed, after=after)[0] == {"wgmma_in_flight"}


def test_operand_outside_shared_memory_and_divergence(line_of):
    image, a_desc, b_desc = operands()
    program = wgmma_program(8, mma(8, "bf16") + WAIT, words=2048)
    args = [np.zeros((128, 4), np.float32), image, np.uint64(a_desc), np.uint64(b_desc + (4096 >> 4)), np.zeros(1, np.uint32)]
    assert "out_of_bounds" in {h.kind for h in program.launch("k", 1, 128, 8192, args).hazards}
    split = wgmma_program(8, "setp.lt.u32 %p3, %tid, 16; @%p3 bra SKIP; " + mma(8, "bf16") + " SKIP: " + WAIT, words=2048)
    args[3] = np.uint64(b_desc)
    found = split.launch("k", 1, 128, 8192, args).hazards
    assert "barrier" in {h.kind for h in found}
    assert any("wgmma.mma_async" in h.message and "part of warp 0" in h.message for h in found)


@pytest.mark.parametrize("fmt", ["bf16", "f16"])
@pytest.mark.parametrize("trans", [False, True])
def test_ldmatrix_mma_and_stmatrix(assemble, fmt, trans):
    """A (16 x 16) through ldmatrix.x4, B (16 x 8) through ldmatrix.x2.trans, one mma, and A's fragments back through stmatrix."""
    rng = np.random.default_rng(4)
    a, b = rng.integers(-9, 9, (16, 16)).astype(DTYPES[fmt]), rng.integers(-9, 9, (16, 8)).astype(DTYPES[fmt])
    c = rng.standard_normal((16, 8)).astype(np.float32)
    back = ".trans" if trans else ""
    body = f"""
        shl.b32 %r1, %lane, 4; mov.u32 %r2, s; add.u32 %r3, %r2, %r1; cvt.u64.u32 %rd1, %r1; add.s64 %rd2, %rd61, %rd1;
        ld.global.v4.u32 {{%r4, %r5, %r6, %r7}}, [%rd2]; st.shared.v4.u32 [%r3], {{%r4, %r5, %r6, %r7}};
        setp.lt.u32 %p1, %lane, 16; @%p1 ld.global.v4.u32 {{%r4, %r5, %r6, %r7}}, [%rd2+512];
        @%p1 st.shared.v4.u32 [%r3+512], {{%r4, %r5, %r6, %r7}};
        bar.warp.sync -1;
        // Lane i points to row i % 16 of the left or the right eight columns.
        and.b32 %r8, %lane, 15; shr.u32 %r9, %lane, 4; shl.b32 %r10, %r8, 5; shl.b32 %r11, %r9, 4; add.u32 %r12, %r10, %r11;
        add.u32 %r12, %r2, %r12;
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r20, %r21, %r22, %r23}}, [%r12];
        shl.b32 %r13, %r8, 4; add.u32 %r13, %r2, %r13; ldmatrix.sync.aligned.m8n8.x2.trans.shared::cta.b16 {{%r24, %r25}}, [%r13+512];
        shr.u32 %r14, %lane, 2; and.b32 %r15, %lane, 3; mad.lo.u32 %r16, %r14, 8, 0; mad.lo.u32 %r16, %r15, 2, %r16;
        mul.wide.u32 %rd3, %r16, 4; add.s64 %rd4, %rd62, %rd3;
        ld.global.v2.f32 {{%f0, %f1}}, [%rd4]; ld.global.v2.f32 {{%f2, %f3}}, [%rd4+256];
        mma.sync.aligned.m16n8k16.row.col.f32.{fmt}.{fmt}.f32 {{%f4, %f5, %f6, %f7}}, {{%r20, %r21, %r22, %r23}}, {{%r24, %r25}},
            {{%f0, %f1, %f2, %f3}};
        add.s64 %rd5, %rd60, %rd3; st.global.v2.f32 [%rd5], {{%f4, %f5}}; st.global.v2.f32 [%rd5+256], {{%f6, %f7}};
        bar.warp.sync -1; stmatrix.sync.aligned.m8n8.x4{back}.shared.b16 [%r12], {{%r20, %r21, %r22, %r23}}; bar.warp.sync -1;
        ld.shared.v4.u32 {{%r4, %r5, %r6, %r7}}, [%r3]; add.s64 %rd6, %rd60, %rd1; st.global.v4.u32 [%rd6+512], {{%r4, %r5, %r6, %r7}};
    """
    program = assemble(body, "out ab c", shared=".shared .align 128 .b8 s[1024];")
    out = np.zeros(256, np.uint32)
    source = np.concatenate([a.view(np.uint16).ravel(), b.view(np.uint16).ravel()])
    result = program.launch("k", 1, 32, 0, [Uninitialized(out), source, c])
    assert not result.hazards, [str(h) for h in result.hazards]
    expected = (a.astype(np.float64) @ b.astype(np.float64) + c).astype(np.float32)
    assert (out[:128].view(np.float32).reshape(16, 8) == expected).all()
    stored = out[128:].view(DTYPES[fmt]).reshape(16, 16)
    blocks = a.reshape(2, 8, 2, 8)
    assert (stored == (blocks.transpose(0, 3, 2, 1) if trans else blocks).reshape(16, 16)).all()


def test_misaligned_matrix_row(assemble, line_of):
    program = assemble(
        "mov.u32 %r1, s;\nldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r2}, [%r1+8]; // HERE", shared=".shared .align 16 .b8 s[64];"
    )
    found = program.launch("k", 1, 32).hazards
    assert [(h.kind, h.line) for h in found] == [("misaligned", line_of(program, "HERE"))]


@pytest.mark.parametrize("fmt", ["bf16", "f16"])
@pytest.mark.parametrize("mode", ["exact", "truncating"])
def test_wgmma_accumulates_in_the_chosen_model(fmt, mode):
    """A chain of two: each instruction rounds, or truncates, what the one before it left."""
    rng = np.random.default_rng(9)
    n = 32
    a, b = (rng.standard_normal((rows, 16)).astype(DTYPES[fmt]) for rows in (64, n))
    image = np.zeros(16384, np.uint8)
    descriptors = place(image, a, 0, 128, 256, 0, "k"), place(image, b, 8192, 128, 256, 0, "k")
    program = wgmma_program(n, mma(n, fmt) + mma(n, fmt, accumulate="1") + WAIT, words=4096)
    out = np.zeros((128, n // 2), np.float32)
    args = [out, image, *map(np.uint64, descriptors), np.zeros(1, np.uint32)]
    result = program.launch("k", 1, 128, 16384, args, tensor_cores=mode)
    assert not result.hazards, [str(h) for h in result.hazards]
    wide = a.astype(np.float64), b.astype(np.float64)
    once = multiply_accumulate(*wide, None, fmt, fmt, mode)
    assert (accumulators(out, n) == multiply_accumulate(*wide, once, fmt, fmt, mode)).all()


@pytest.mark.parametrize("fmt", ["bf16", "f16"])
@pytest.mark.parametrize("mode", ["exact", "truncating"])
@pytest.mark.parametrize("k", [8, 16])
def test_mma_sync_accumulates_in_the_chosen_model(assemble, fmt, mode, k):
    rng = np.random.default_rng(10)
    a, b = rng.standard_normal((16, k)).astype(DTYPES[fmt]), rng.standard_normal((k, 8)).astype(DTYPES[fmt])
    c = rng.standard_normal((16, 8)).astype(np.float32)
    fragments = [
        a.view(np.uint16)[mma_a_fragment(k)],
        b.view(np.uint16)[mma_b_fragment(k)],
        c.view(np.uint16).reshape(16, 8, 2)[mma_d_fragment()],
    ]
    registers = np.ascontiguousarray(np.concatenate(fragments, axis=1)).view(np.uint32)[..., 0]
    first, last = k // 4, k // 4 + k // 8
    body = f"mul.wide.u32 %rd1, %lane, {4 * registers.shape[1]}; add.s64 %rd1, %rd61, %rd1;"
    body += "".join(f"ld.global.u32 %r{i}, [%rd1+{4 * i}];" for i in range(last))
    body += "".join(f"ld.global.f32 %f{i}, [%rd1+{4 * (last + i)}];" for i in range(4))
    names = [", ".join(f"%r{i}" for i in part) for part in (range(first), range(first, last))]
    body += f"mma.sync.aligned.m16n8k{k}.row.col.f32.{fmt}.{fmt}.f32 "
    body += f"{{%f4, %f5, %f6, %f7}}, {{{names[0]}}}, {{{names[1]}}}, {{%f0, %f1, %f2, %f3}};"
    body += "mul.wide.u32 %rd2, %lane, 16; add.s64 %rd2, %rd60, %rd2; st.global.v4.f32 [%rd2], {%f4, %f5, %f6, %f7};"
    out = np.zeros((32, 4), np.float32)
    result = assemble(body, "out regs").launch("k", 1, 32, 0, [out, registers], tensor_cores=mode)
    assert not result.hazards, [str(h) for h in result.hazards]
    expected = multiply_accumulate(a.astype(np.float64), b.astype(np.float64).T, c, fmt, fmt, mode)
    assert (out == expected[mma_d_fragment()]).all()
