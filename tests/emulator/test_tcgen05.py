"""tcgen05.mma (.ws and not), tcgen05.cp and tcgen05.commit: every layout and operand form against numpy, asynchrony, and what is refused.

Matrices hold small integers, so that every accumulation order gives the same float32 and results are compared exactly.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fa4gen.codegen.emulator import LaunchError, Program, PtxError
from fa4gen.codegen.emulator.layouts import (
    InstructionDescriptor,
    MatrixDescriptor,
    encode_instruction_descriptor,
    encode_tcgen05_descriptor,
    operand_offsets,
    swizzle,
    tcgen05_a_layout,
    tcgen05_d_columns,
    tcgen05_d_layout,
)
from fa4gen.codegen.emulator.tensor_core import multiply_accumulate

pytestmark = pytest.mark.filterwarnings("error")

SEEDS = range(6)
DTYPES: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
BASE = 2048
"""Where dynamic shared memory starts: 1 KiB is reserved, then static shared memory, aligned to 1 KiB."""

# One CTA fills shared memory from `image`, allocates tensor memory, writes `cells` [128, filled] into its first columns, runs `body` in
# thread 0, waits for the mbarrier `bars` with `wait`, and stores `columns` columns of every lane from column `first`.
FRAME = """
.version 8.8
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 dyn[];
.visible .entry k(.param .u64 out, .param .u64 image, .param .u64 cells)
{{
    .shared .align 8 .b64 bars[4];
    .shared .align 4 .u32 slot;
    .reg .pred %p<16>; .reg .b16 %h<4>; .reg .b32 %r<64>; .reg .b64 %rd<16>; .reg .b32 %tid, %warp, %d; .reg .b64 %a, %b;
    mov.u32 %tid, %tid.x; shr.u32 %warp, %tid, 5;
    ld.param.u64 %rd1, [out]; ld.param.u64 %rd2, [image]; ld.param.u64 %rd3, [cells];
    mov.u32 %r1, %tid; mov.u32 %r9, dyn;
FILL: setp.ge.u32 %p1, %r1, {words}; @%p1 bra FILLED;
    shl.b32 %r2, %r1, 2; cvt.u64.u32 %rd5, %r2; add.s64 %rd6, %rd2, %rd5; ld.global.u32 %r3, [%rd6];
    add.u32 %r4, %r9, %r2; st.shared.u32 [%r4], %r3; add.u32 %r1, %r1, 128; bra FILL;
FILLED: fence.proxy.async.shared::cta;
    setp.ne.u32 %p2, %tid, 0; setp.ne.u32 %p3, %warp, 0;
    @%p2 bra READY;
    mbarrier.init.shared::cta.b64 [bars], 1; mbarrier.init.shared::cta.b64 [bars+8], 1; mbarrier.init.shared::cta.b64 [bars+16], 1;
    fence.mbarrier_init.release.cluster;
READY: @%p3 bra NOALLOC;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], {allocated};
NOALLOC: bar.sync 0; ld.shared.u32 %d, [slot];
    {fill}
    {stored} tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;
    @%p2 bra ISSUED;
{body}
ISSUED:
{wait}
    tcgen05.fence::after_thread_sync;
    mul.lo.u32 %r5, %tid, {pitch}; cvt.u64.u32 %rd7, %r5; add.s64 %rd7, %rd1, %rd7; add.u32 %r6, %d, {first};
    {read}
    tcgen05.fence::before_thread_sync; bar.sync 0; @%p3 exit;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %d, {allocated};
}}
"""
WAIT = "W0: mbarrier.try_wait.parity.shared::cta.b64 %p5, [bars], 0; @!%p5 bra W0;"
COMMIT = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [bars];"


@dataclass
class Case:
    """A kernel in the making: its shared-memory image, the tensor memory it starts from, and the body of the issuing thread."""

    body: str = ""
    wait: str = WAIT
    stored: str = "tcgen05.wait::st.sync.aligned;"
    """After `cells` are stored."""
    columns: int = 8
    first: int = 0
    allocated: int = 512
    cells: np.ndarray = field(default_factory=lambda: np.zeros((128, 0), np.uint32))
    image: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))
    expected: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    """What the accumulator should hold."""

    def program(self) -> Program:
        def block(column: int, opcode: str) -> str:
            return f"add.u32 %r7, {'%r6' if opcode == 'ld' else '%d'}, {column};"

        names = "{" + ", ".join(f"%r{20 + i}" for i in range(8)) + "}"
        fill = [f"mul.lo.u32 %r5, %tid, {4 * self.cells.shape[1]};", "cvt.u64.u32 %rd8, %r5; add.s64 %rd8, %rd3, %rd8;"]
        for column in range(0, self.cells.shape[1], 8):
            fill += [f"ld.global.u32 %r{20 + i}, [%rd8+{4 * (column + i)}];" for i in range(8)]
            fill += [block(column, "st"), f"tcgen05.st.sync.aligned.32x32b.x8.b32 [%r7], {names};"]
        read = []
        for column in range(0, self.columns, 8):
            read += [block(column, "ld"), f"tcgen05.ld.sync.aligned.32x32b.x8.b32 {names}, [%r7]; tcgen05.wait::ld.sync.aligned;"]
            read += [f"st.global.u32 [%rd7+{4 * (column + i)}], %r{20 + i};" for i in range(8)]
        return Program.from_ptx(
            FRAME.format(
                words=len(self.image) // 4,
                allocated=self.allocated,
                fill="\n".join(fill),
                stored=self.stored,
                body=self.body,
                wait=self.wait,
                pitch=4 * self.columns,
                first=self.first,
                read="\n".join(read),
            )
        )

    def launch(self, seed: int = 0, program: Program | None = None, **options: Any) -> tuple[np.ndarray, Any]:
        """(what the lanes read [128, columns] uint32, the result)."""
        out = np.zeros((128, self.columns), np.uint32)
        program = self.program() if program is None else program
        cells = self.cells if self.cells.size else np.zeros(1, np.uint32)
        result = program.launch("k", 1, 128, BASE + len(self.image), [out, self.image, cells], seed=seed, **options)
        return out, result

    def clean(self, seeds: Any = SEEDS, **options: Any) -> np.ndarray:
        """The lanes' values as float32, the same under every seed, without findings."""
        program = self.program()
        outs = []
        for seed in seeds:
            out, result = self.launch(seed, program, **options)
            assert not result.hazards, [str(h) for h in result.hazards]
            outs.append(out)
        assert all((o == outs[0]).all() for o in outs)
        return outs[0].view(np.float32)

    def kinds(self, seed: int = 0) -> set[str]:
        return {h.kind for h in self.launch(seed)[1].hazards}

    def place(self, matrix: np.ndarray, major: str, mode: int, leading: int, stride: int) -> int:
        """Append a 16-bit matrix [mn, k] to the image, on a 1 KiB boundary; returns its descriptor."""
        start = -(-len(self.image) // 1024) * 1024
        descriptor = MatrixDescriptor(BASE + start, leading, stride, 0, mode)
        offsets = operand_offsets(descriptor, matrix.shape[0], matrix.shape[1], 2, major) - BASE
        grown = np.zeros(-(-(int(offsets.max()) + 2) // 1024) * 1024, np.uint8)
        grown[: len(self.image)] = self.image
        grown.view(np.uint16)[offsets // 2] = matrix.view(np.uint16)
        self.image = grown
        return encode_tcgen05_descriptor(descriptor)

    def rows(self, matrix: np.ndarray) -> int:
        """Append a K-major matrix of 64 columns with the 128-byte swizzle; its k steps are 32 bytes apart."""
        start = -(-len(self.image) // 1024) * 1024
        raw = np.ascontiguousarray(matrix).view(np.uint8).reshape(-1)
        grown = np.zeros(start + len(raw), np.uint8)
        grown[: len(self.image)] = self.image
        grown[swizzle(BASE + start + np.arange(len(raw)), 128) - BASE] = raw
        self.image = grown
        return encode_tcgen05_descriptor(MatrixDescriptor(BASE + start, 16, 1024, 0, 128))


def mma(
    idesc: int, a: int | str, b: int, *, d: str = "%d", accumulate: bool | str = False, ws: bool = True, tail: str = "", modifiers: str = ""
) -> str:
    """One MMA; `a` is a descriptor, or the text of a tensor-memory operand."""
    enable = accumulate if isinstance(accumulate, str) else "%p6"
    setup = f"setp.ne.u32 %p6, {int(accumulate)}, 0;" if not isinstance(accumulate, str) else ""
    source = a if isinstance(a, str) else "%a"
    if not isinstance(a, str):
        setup += f" mov.b64 %a, {a};"
    return (
        f"{setup} mov.b64 %b, {b}; mov.b32 %r8, {idesc};\n"
        f"tcgen05.mma{'.ws' if ws else ''}.cta_group::1.kind::f16{modifiers} [{d}], {source}, %b, %r8, {enable}{tail};\n"
    )


def integers(seed: int, shape: tuple[int, ...], fmt: str = "bf16") -> np.ndarray:
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(DTYPES[fmt])


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a.astype(np.float32) @ b.astype(np.float32).T


def gathered(out: np.ndarray, m: int, n: int, ws: bool, base_lane: int = 0) -> np.ndarray:
    lane, column = tcgen05_d_layout(m, n, ws, base_lane)
    return out[lane, column]


WS_SHAPES = list(itertools.product((32, 64, 128), (64, 128, 256)))
PLAIN_SHAPES = [(64, 8), (64, 72), (64, 256), (128, 16), (128, 144), (128, 256)]


# -------------------------------------------------------------------------------------------------------------------- shapes


@pytest.mark.parametrize(("m", "n", "ws"), [(*s, True) for s in WS_SHAPES] + [(*s, False) for s in PLAIN_SHAPES if s[0] == 128])
@pytest.mark.parametrize("fmt", ["bf16", "f16"])
def test_every_shape(m, n, ws, fmt):
    """Four k steps inside a 128-byte swizzle atom, the first without accumulation."""
    a, b = integers(m, (m, 64), fmt), integers(n + 1, (n, 64), fmt)
    case = Case(columns=tcgen05_d_columns(m, n, ws))
    a_desc, b_desc = case.rows(a), case.rows(b)
    idesc = encode_instruction_descriptor(InstructionDescriptor(m, n, fmt, fmt), ws)
    for step in range(4):
        case.body += mma(idesc, a_desc + 2 * step, b_desc + 2 * step, accumulate=step > 0, ws=ws)
    case.body += COMMIT
    assert (gathered(case.clean(range(2)), m, n, ws) == product(a, b)).all()


@pytest.mark.parametrize("base_lane", [0, 16])
@pytest.mark.parametrize("n", [8, 72, 256])
def test_half_datapath_shape(n, base_lane):
    """M=64 without .ws uses 16 lanes of each quarter and leaves the others alone."""
    a, b = integers(5, (64, 16)), integers(6, (n, 16))
    case = Case(columns=n, cells=np.full((128, n), 7.0, np.float32).view(np.uint32))
    idesc = encode_instruction_descriptor(InstructionDescriptor(64, n), False)
    case.body = f"add.u32 %r10, %d, {base_lane << 16};" + mma(
        idesc, case.place(a, "k", 0, 128, 256), case.place(b, "k", 0, 128, 256), d="%r10", ws=False
    )
    case.body += COMMIT
    out = case.clean(range(2))
    assert (gathered(out, 64, n, False, base_lane) == product(a, b)).all()
    others = np.ones(128, bool)
    others[tcgen05_d_layout(64, n, False, base_lane)[0]] = False
    assert (out[others] == 7.0).all()


# (major, swizzle, leading, stride) of packed operands of `rows` rows; leading as a function of the rows.
LAYOUTS = [
    ("k", 0, lambda rows: 128, 256), ("k", 0, lambda rows: 16 * rows, 128),
    ("k", 32, lambda rows: 16, 256), ("k", 64, lambda rows: 16, 512), ("k", 128, lambda rows: 16, 1024),
    ("mn", 0, lambda rows: 16 * rows, 128),
    ("mn", 32, lambda rows: 512, 256), ("mn", 64, lambda rows: 1024, 512), ("mn", 128, lambda rows: 2048, 1024),
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda p: f"{p[0]}-{p[1]}")
@pytest.mark.parametrize("which", ["a", "b"])
def test_every_operand_layout(layout, which):
    major, mode, leading, stride = layout
    m, n = 64, 128
    a, b = integers(1, (m, 16)), integers(2, (n, 16))
    case = Case(columns=n // 2)
    plain = ("k", 0, 128, 256)
    a_desc = case.place(a, major, mode, leading(m), stride) if which == "a" else case.place(a, *plain)
    b_desc = case.place(b, major, mode, leading(n), stride) if which == "b" else case.place(b, *plain)
    majors = {f"{which}_major": major}
    case.body = mma(encode_instruction_descriptor(InstructionDescriptor(m, n, **majors), True), a_desc, b_desc) + COMMIT
    assert (gathered(case.clean(range(2)), m, n, True) == product(a, b)).all()


# -------------------------------------------------------------------------------------------------------- A in tensor memory


def packed(lanes: np.ndarray) -> np.ndarray:
    """16-bit A rows [128 lanes, 16] as cells [128, 8]: even k in the low half."""
    return np.ascontiguousarray(lanes).view(np.uint32)


@pytest.mark.parametrize(("m", "n"), [(32, 256), (32, 64), (64, 256), (64, 128), (128, 64)])
def test_each_lane_group_reads_its_own_a(m, n):
    """Distinct A in the 2 (M=64) or 4 (M=32) lane groups makes as many independent products."""
    lanes, b = integers(3, (128, 16)), integers(4, (n, 16))
    case = Case(columns=tcgen05_d_columns(m, n, True), first=16, cells=np.zeros((128, 16), np.uint32))
    case.cells[:, :8] = packed(lanes)
    idesc = encode_instruction_descriptor(InstructionDescriptor(m, n), True)
    case.body = "add.u32 %r10, %d, 16;" + mma(idesc, "[%d]", case.place(b, "k", 0, 128, 256), d="%r10") + COMMIT
    out = case.clean()
    groups = 128 // m
    got = gathered(out, m, n, True)
    for g in range(groups):
        part = slice(g * n // groups, (g + 1) * n // groups)
        assert (got[:, part] == product(lanes[g * m : (g + 1) * m], b[part])).all()
    if groups > 1:
        assert not (got == product(lanes[:m], b)).all()


def test_a_in_tensor_memory_of_the_half_datapath_shape():
    lanes, b = integers(3, (128, 16)), integers(4, (32, 16))
    case = Case(columns=32, first=16, cells=np.zeros((128, 48), np.uint32))
    case.cells[:, :8] = packed(lanes)
    idesc = encode_instruction_descriptor(InstructionDescriptor(64, 32), False)
    case.body = "add.u32 %r10, %d, 16;" + mma(idesc, "[%d]", case.place(b, "k", 0, 128, 256), d="%r10", ws=False) + COMMIT
    rows = tcgen05_a_layout(64, 16, False)[0][0]
    assert (gathered(case.clean(range(2)), 64, 32, False) == product(lanes[rows], b)).all()


def test_next_k_step_of_a_in_tensor_memory_is_eight_columns_on():
    a, b = integers(3, (128, 32)), integers(4, (64, 32))
    case = Case(columns=64, first=16, cells=np.concatenate([packed(a[:, :16]), packed(a[:, 16:])], axis=1))
    idesc = encode_instruction_descriptor(InstructionDescriptor(128, 64), True)
    first, second = case.place(b[:, :16], "k", 0, 128, 256), case.place(b[:, 16:], "k", 0, 128, 256)
    case.body = (
        "add.u32 %r10, %d, 16;" + mma(idesc, "[%d]", first, d="%r10") + mma(idesc, "[%d+8]", second, d="%r10", accumulate=True) + COMMIT
    )
    assert (case.clean(range(2)) == product(a, b)).all()


# -------------------------------------------------------------------------------------------------------- instruction options


def small(fmt: str = "bf16", d_format: str = "f32", **flags: Any) -> tuple[Case, np.ndarray, np.ndarray, int, int, int]:
    """(case, a, b, idesc, descriptors) of one M=128, N=64 product without .ws on an accumulator that holds 100 + column."""
    a, b = integers(8, (128, 16), fmt), integers(9, (64, 16), fmt)
    case = Case(columns=64)
    start = np.broadcast_to(100.0 + np.arange(64), (128, 64))
    bits = start.astype(np.float16).view(np.uint16).astype(np.uint32) if d_format == "f16" else np.float32(start).view(np.uint32)
    case.cells = np.ascontiguousarray(bits)
    idesc = encode_instruction_descriptor(InstructionDescriptor(128, 64, fmt, fmt, d_format, **flags), False)
    return case, a, b, idesc, case.place(a, "k", 0, 128, 256), case.place(b, "k", 0, 128, 256)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("negate_a", "negate_b"), [(False, False), (True, False), (False, True), (True, True)])
def test_accumulation_and_negation(accumulate, negate_a, negate_b):
    case, a, b, idesc, a_desc, b_desc = small(negate_a=negate_a, negate_b=negate_b)
    case.body = mma(idesc, a_desc, b_desc, ws=False, accumulate=accumulate) + COMMIT
    sign = -1 if negate_a != negate_b else 1
    assert (case.clean(range(2)) == sign * product(a, b) + accumulate * (100.0 + np.arange(64))).all()


def test_scaled_accumulator_and_lanes_left_alone():
    case, a, b, idesc, a_desc, b_desc = small()
    lanes = "mov.b32 %r11, 0; mov.b32 %r12, 0xFFFFFFFF; mov.b32 %r13, 5; mov.b32 %r14, 0;"
    text = mma(idesc, a_desc, b_desc, ws=False, accumulate=True, tail=", 3")
    case.body = lanes + text.replace("%r8, %p6", "%r8, {%r11, %r12, %r13, %r14}, %p6") + COMMIT
    out = case.clean(range(2))
    expected = product(a, b) + (100.0 + np.arange(64)) / 8
    kept = np.zeros(128, bool)
    kept[32:64] = kept[[64, 66]] = True
    assert (out[~kept] == expected[~kept]).all()
    assert (out[kept] == 100.0 + np.arange(64)).all()


def test_half_precision_accumulator_is_the_low_half_of_its_cell():
    case, a, b, idesc, a_desc, b_desc = small("f16", "f16")
    case.body = mma(idesc, a_desc, b_desc, ws=False, accumulate=True) + COMMIT
    bits = case.clean(range(2)).view(np.uint32)
    assert ((bits & 0xFFFF).astype(np.uint16).view(np.float16) == (product(a, b) + 100.0 + np.arange(64)).astype(np.float16)).all()


@pytest.mark.parametrize(
    "modifiers", [".collector::b0::fill", ".collector::b3::use", ".collector::b1::lastuse", ".collector::b2::discard", ""]
)
def test_collectors_are_hints_and_a_zero_mask_masks_nothing(modifiers):
    a, b = integers(1, (32, 16)), integers(2, (64, 16))
    case = Case(columns=16)
    idesc = encode_instruction_descriptor(InstructionDescriptor(32, 64), True)
    a_desc, b_desc = case.place(a, "k", 0, 128, 256), case.place(b, "k", 0, 128, 256)
    case.body = "mov.b64 %rd9, 0;" + mma(idesc, a_desc, b_desc, modifiers=modifiers, tail=", %rd9") + COMMIT
    assert (gathered(case.clean([0]), 32, 64, True) == product(a, b)).all()


def test_a_false_guard_issues_nothing():
    a, b = integers(1, (32, 16)), integers(2, (64, 16))
    case = Case(columns=16, cells=np.zeros((128, 16), np.uint32))
    idesc = encode_instruction_descriptor(InstructionDescriptor(32, 64), True)
    a_desc, b_desc = case.place(a, "k", 0, 128, 256), case.place(b, "k", 0, 128, 256)
    once = mma(idesc, a_desc, b_desc, accumulate=True)
    case.body = "setp.eq.u32 %p9, %tid, 99;" + once + once.replace("tcgen05.mma", "@%p9 tcgen05.mma") + COMMIT
    assert (gathered(case.clean([0]), 32, 64, True) == product(a, b)).all()


@pytest.mark.parametrize("fmt", ["bf16", "f16"])
def test_truncating_accumulation(fmt):
    """Each instruction is one truncating_dot on the accumulator that the one before it left."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((32, 64)).astype(DTYPES[fmt]), rng.standard_normal((256, 64)).astype(DTYPES[fmt])
    case = Case(columns=64)
    a_desc, b_desc = case.rows(a), case.rows(b)
    idesc = encode_instruction_descriptor(InstructionDescriptor(32, 256, fmt, fmt), True)
    case.body = "".join(mma(idesc, a_desc + 2 * s, b_desc + 2 * s, accumulate=s > 0) for s in range(4)) + COMMIT
    for mode in ("exact", "truncating"):
        expected = None
        for s in range(4):
            part = slice(16 * s, 16 * s + 16)
            expected = multiply_accumulate(a[:, part].astype(np.float64), b[:, part].astype(np.float64), expected, fmt, fmt, mode)
        assert (gathered(case.clean(range(2), tensor_cores=mode), 32, 256, True) == expected).all()
    with pytest.raises(LaunchError, match="tensor_cores='fast' is none of exact, truncating"):
        case.launch(tensor_cores="fast")


# --------------------------------------------------------------------------------------------------------------------- copies


@pytest.mark.parametrize("form", ["128x256b", "128x128b", "64x128b.warpx2::02_13", "64x128b.warpx2::01_23", "32x128b.warpx4", "4x256b"])
def test_copies_from_shared_memory(form):
    rows, bits = int(form.split("x")[0]), int(form.split("x")[1].split("b")[0])
    columns = bits // 32
    data = np.random.default_rng(0).integers(0, 1 << 16, (rows, 2 * columns)).astype(np.uint16)
    case = Case(columns=8, cells=np.full((128, 8), 77, np.uint32))
    group = max(rows, 8)
    padded = np.zeros((group, 2 * columns), np.uint16)
    padded[:rows] = data
    case.body = f"mov.b64 %a, {case.place(padded, 'k', 0, 16 * group, 128)}; tcgen05.cp.cta_group::1.{form} [%d], %a;" + COMMIT
    out = case.clean().view(np.uint32)
    source = {
        "128": np.arange(128),
        "64x128b.warpx2::02_13": np.arange(128) % 64,
        "64x128b.warpx2::01_23": np.arange(128) // 64 * 32 + np.arange(128) % 32,
        "32x128b.warpx4": np.arange(128) % 32,
        "4x256b": np.arange(4),
    }.get(form if rows < 128 else "128")
    lanes = 32 * np.arange(4) if rows == 4 else np.arange(128)
    expected = np.full((128, 8), 77, np.uint32)
    expected[lanes, :columns] = np.ascontiguousarray(data[source]).view(np.uint32)
    assert (out == expected).all()


def copied_a(order: str) -> Case:
    """A comes into tensor memory by a copy; `order`: what is issued, of c(opy), m(ma), w(ait for a commit), f(ence after it)."""
    a, b = integers(3, (128, 16)), integers(4, (64, 16))
    case = Case(columns=64, first=16, cells=np.ones((128, 8), np.uint32))
    a_desc, b_desc = case.place(a, "k", 0, 128, 256), case.place(b, "k", 0, 128, 256)
    idesc = encode_instruction_descriptor(InstructionDescriptor(128, 64), True)
    text = {
        "c": f"mov.b64 %a, {a_desc}; tcgen05.cp.cta_group::1.128x256b [%d], %a;",
        "m": "add.u32 %r10, %d, 16;" + mma(idesc, "[%d]", b_desc, d="%r10"),
        "w": COMMIT.replace("bars", "bars+8") + "V: mbarrier.try_wait.parity.shared::cta.b64 %p7, [bars+8], 0; @!%p7 bra V;",
        "f": "tcgen05.fence::after_thread_sync;",
    }
    case.body = "".join(text[c] for c in order) + COMMIT
    case.expected = product(a, b)
    return case


def test_a_copy_happens_before_a_later_mma_but_not_the_other_way_round():
    case = copied_a("cm")
    assert (case.clean() == case.expected).all()
    for seed in SEEDS:
        assert "race" in copied_a("mc").kinds(seed)
    assert not copied_a("mwfc").kinds()
    assert copied_a("mwc").kinds() == {"tcgen05_fence"}


# ----------------------------------------------------------------------------------------------------------------- asynchrony


def chain(steps: int = 4, after: str = COMMIT, wait: str = WAIT, between: str = "") -> Case:
    """An M=32, N=64 product of `steps` k steps on one accumulator."""
    a, b = integers(1, (32, 64)), integers(2, (64, 64))
    case = Case(columns=16, wait=wait)
    a_desc, b_desc = case.rows(a), case.rows(b)
    idesc = encode_instruction_descriptor(InstructionDescriptor(32, 64), True)
    case.body = between.join(mma(idesc, a_desc + 2 * s, b_desc + 2 * s, accumulate=s > 0) for s in range(steps)) + after
    case.expected = product(a[:, : 16 * steps], b[:, : 16 * steps])
    return case


def test_same_accumulator_same_shape_is_in_order():
    for seed in range(20):
        case = chain()
        out, result = case.launch(seed)
        assert not result.hazards, [str(h) for h in result.hazards]
        assert (gathered(out.view(np.float32), 32, 64, True) == case.expected).all()


def test_reading_the_accumulator_before_the_commit_is_a_race():
    for seed in SEEDS:
        for case in (chain(after="", wait=""), chain(wait=""), chain(after="", wait="bar.sync 0;")):
            found = case.launch(seed)[1].hazards
            assert "race" in {h.kind for h in found}, seed
            assert any("tensor memory" in h.message and "MMA of warp 0" in h.message for h in found)


def test_a_commit_that_is_missing_or_on_another_barrier_deadlocks():
    for case in (chain(after=""), chain(after=COMMIT.replace("bars", "bars+8"))):
        found = case.launch()[1].hazards
        assert [h.kind for h in found if h.kind == "deadlock"] == ["deadlock"]
        assert "mbarrier shared+0x0" in str(found[-1])


def test_a_commit_covers_everything_issued_before_it():
    """MMAs on two accumulators, one commit; and a commit without any MMA arrives at once."""
    case = chain(1)
    first = case.body.split("tcgen05.commit")[0]
    case.body = first + "add.u32 %r10, %d, 16;" + first.replace("[%d]", "[%r10]") + COMMIT
    case.columns = 32
    out = case.clean()
    assert (gathered(out, 32, 64, True) == case.expected).all()
    assert (gathered(out[:, 16:], 32, 64, True) == case.expected).all()
    empty = Case(columns=8, cells=np.full((128, 8), 3, np.uint32), body=COMMIT)
    assert (empty.clean().view(np.uint32) == 3).all()


def test_a_later_mma_is_not_covered_by_an_earlier_commit():
    for seed in SEEDS:
        case = chain(2)
        first, second = case.body.split("setp.ne.u32 %p6, 1", 1)
        case.body = first + COMMIT + "setp.ne.u32 %p6, 1" + second.split("tcgen05.commit")[0]
        assert "race" in case.kinds(seed)


def test_overwriting_an_operand_before_the_commit_is_a_race():
    """The operands are read when the MMA happens: a store after the issue but before the wait races, after the wait it does not."""
    store = "mov.b32 %r15, 0x7FC07FC0; st.shared.b32 [%r9], %r15;"
    for seed in SEEDS:
        early = chain(1, after=store + COMMIT)
        result = early.launch(seed)[1]
        race = [h for h in result.hazards if h.kind == "race"]
        assert race
        assert "write of shared+0x400" in race[0].message
        assert "MMA of warp 0" in race[0].message
    wait = "V: mbarrier.try_wait.parity.shared::cta.b64 %p7, [bars], 0; @!%p7 bra V;"
    assert not chain(1, after=COMMIT + wait + store).kinds()


def test_an_early_overwrite_changes_the_result_under_some_seed():
    """MMAs may take effect as late as their commit: what is stored meanwhile is what they read."""
    store = "mov.b32 %r15, 0; st.shared.b32 [%r9], %r15; st.shared.b32 [%r9+4], %r15; st.shared.b32 [%r9+8], %r15;"
    case = chain(1, after=store + COMMIT)
    program = case.program()
    results = {bool((gathered(case.launch(s, program)[0].view(np.float32), 32, 64, True) == case.expected).all()) for s in range(20)}
    assert False in results


def two(second_shape: tuple[int, int], offset: int, middle: str = "") -> Case:
    """Two MMAs of one thread, the second on an accumulator `offset` columns on."""
    case = Case(columns=16)
    a, b = integers(1, (32, 16)), integers(2, (256, 16))
    a_desc, b_desc = case.place(a, "k", 0, 128, 256), case.place(b, "k", 0, 128, 256)
    first = encode_instruction_descriptor(InstructionDescriptor(32, 64), True)
    second = encode_instruction_descriptor(InstructionDescriptor(*second_shape), True)
    case.body = mma(first, a_desc, b_desc) + middle + f"add.u32 %r10, %d, {offset};" + mma(second, a_desc, b_desc, d="%r10") + COMMIT
    return case


def test_mmas_on_overlapping_accumulators_are_unordered_unless_committed():
    wait = COMMIT.replace("bars", "bars+8") + "V: mbarrier.try_wait.parity.shared::cta.b64 %p7, [bars+8], 0; @!%p7 bra V;"
    for seed in SEEDS:
        assert not two((32, 64), 0).kinds(seed)
        assert not two((32, 64), 16).kinds(seed)
        assert two((32, 128), 0).kinds(seed) == {"race"}
        assert two((32, 64), 8).kinds(seed) == {"race"}
        assert not two((32, 128), 0, wait + "tcgen05.fence::after_thread_sync;").kinds(seed)
        assert two((32, 128), 0, wait).kinds(seed) == {"tcgen05_fence"}
    # Without the wait, a commit orders nothing.
    assert two((32, 128), 0, COMMIT.replace("bars", "bars+8")).kinds() == {"race"}


def test_a_commit_in_another_thread_does_not_count():
    """Commit tracks the operations of the thread that executes it."""
    for seed in SEEDS:
        case = chain(1, after="", wait="setp.eq.u32 %p8, %tid, 1; @!%p8 bra OTHER; " + COMMIT + " OTHER: " + WAIT)
        assert "race" in case.kinds(seed)


def test_writing_a_in_tensor_memory_needs_the_stores_wait_and_a_barrier():
    """tcgen05.st of A, then an MMA: without wait::st the MMA may read the old cells."""
    case = Case(columns=16, first=8, cells=packed(integers(3, (128, 16))))
    b_desc = case.place(integers(4, (64, 16)), "k", 0, 128, 256)
    idesc = encode_instruction_descriptor(InstructionDescriptor(32, 64), True)
    case.body = "add.u32 %r10, %d, 8;" + mma(idesc, "[%d]", b_desc, d="%r10") + COMMIT
    assert not case.kinds()
    case.stored = ""
    for seed in SEEDS:
        assert "race" in case.kinds(seed)


def test_overwriting_a_in_tensor_memory_before_the_commit_is_a_race():
    case = Case(columns=16, first=8, cells=packed(integers(3, (128, 16))))
    b_desc = case.place(integers(4, (64, 16)), "k", 0, 128, 256)
    idesc = encode_instruction_descriptor(InstructionDescriptor(32, 64), True)
    case.body = "add.u32 %r10, %d, 8;" + mma(idesc, "[%d]", b_desc, d="%r10") + COMMIT
    store = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%d], {%r20}; tcgen05.wait::st.sync.aligned;"
    case.wait = "bar.sync 0;" + store + WAIT
    assert "race" in case.kinds()
    case.wait = WAIT + "tcgen05.fence::after_thread_sync;" + store + "bar.sync 0;"
    assert not case.kinds()
    case.wait = WAIT + store + "bar.sync 0;"
    assert case.kinds() == {"tcgen05_fence"}


# --------------------------------------------------------------------------------------------------------------------- checks


def test_uninitialized_operands_and_accumulators():
    a, b = integers(1, (32, 16)), integers(2, (64, 16))
    case = Case(columns=16)
    idesc = encode_instruction_descriptor(InstructionDescriptor(32, 64), True)
    a_desc, b_desc = case.place(a, "k", 0, 128, 256), case.place(b, "k", 0, 128, 256)
    case.body = mma(idesc, a_desc, b_desc, accumulate=True) + COMMIT
    assert case.kinds() == {"uninitialized"}
    case.body = "add.u32 %r10, %d, 32;" + mma(idesc, "[%r10]", b_desc) + COMMIT
    assert case.kinds() == {"uninitialized"}
    beyond = (b_desc & ~0x3FFF) | (BASE + len(case.image)) >> 4
    case.body = mma(idesc, a_desc, beyond) + COMMIT
    assert "uninitialized" in case.kinds()


def test_bounds_and_allocation():
    a, b = integers(1, (32, 16)), integers(2, (64, 16))
    case = Case(columns=16, allocated=32)
    idesc = encode_instruction_descriptor(InstructionDescriptor(32, 64), True)
    a_desc, b_desc = case.place(a, "k", 0, 128, 256), case.place(b, "k", 0, 128, 256)
    inside = mma(idesc, a_desc, b_desc)
    case.body = inside + "add.u32 %r10, %d, 24;" + inside.replace("[%d]", "[%r10]") + COMMIT
    assert case.kinds() == {"tmem_allocation"}
    case.body = inside + "add.u32 %r10, %d, 500;" + inside.replace("[%d]", "[%r10]") + COMMIT
    assert case.kinds() == {"out_of_bounds"}
    case.body = inside + mma(idesc, a_desc | 0x3FF0, b_desc) + COMMIT
    assert "out_of_bounds" in case.kinds()


GOOD = encode_instruction_descriptor(InstructionDescriptor(32, 64), True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.replace(f"mov.b32 %r8, {GOOD}", f"mov.b32 %r8, {GOOD & ~(31 << 24) | 3 << 24}"), "no shape M=48, N=64"),
        (lambda t: t.replace(f"mov.b32 %r8, {GOOD}", f"mov.b32 %r8, {GOOD & ~(63 << 17) | 4 << 17}"), "no shape M=32, N=32"),
        (lambda t: t.replace(f"mov.b32 %r8, {GOOD}", f"mov.b32 %r8, {GOOD | 4}"), "sparse MMA is not supported"),
        (lambda t: t.replace(f"mov.b32 %r8, {GOOD}", f"mov.b32 %r8, {GOOD & ~(3 << 4)}"), "f16 accumulator needs f16 A and B"),
        (lambda t: t.replace(f"mov.b32 %r8, {GOOD}", f"mov.b32 %r8, {GOOD | 1 << 29}"), "reserved bits"),
        (lambda t: t.replace(".ws", ""), "no shape M=32, N=64"),
        (lambda t: t.replace("%p6;", "%p6, %rd9;"), "zero-column mask 0x8000000000 is not supported"),
        (lambda t: t.replace("[%d]", "[%r10]"), "starts at tensor memory lane 16: it must be 0"),
    ],
)
def test_bad_values_are_errors_that_name_the_line(change, message):
    case = chain(1)
    case.body = change("add.u32 %r10, %d, 0x100000; mov.b64 %rd9, 0x8000000000;\n" + case.body)
    program = case.program()
    with pytest.raises(PtxError, match=message) as caught:
        case.launch(program=program)
    assert caught.value.line


def test_a_descriptor_without_its_version_is_refused():
    case = chain(1)
    place = case.body.index("mov.b64 %b, ") + len("mov.b64 %b, ")
    end = case.body.index(";", place)
    case.body = case.body[:place] + str(int(case.body[place:end]) & ~(1 << 46)) + case.body[end:]
    with pytest.raises(PtxError, match="bits 46-48 must be 0b001"):
        case.launch()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("cta_group::1.kind::f16", "cta_group::2.kind::f16", "pairs of CTAs are not supported"),
        ("cta_group::1.kind::f16", "kind::f16", "names no .cta_group::1"),
        ("kind::f16", "kind::tf32", "is not supported: .kind::f16 is"),
        ("kind::f16", "kind::f16.collector::a::fill", "collector::a::fill is not supported"),
        ("kind::f16", "kind::f16.collector::b4::fill", "collector::b4::fill is not supported"),
        ("kind::f16", "kind::f16.collector::b0::fill.collector::b1::use", "two collector buffers"),
        ("mma.ws", "mma.ws.sp", "sparse MMA is not supported"),
        (", %p6", "", "at least 5 operands"),
        ("shared::cluster.b64", "shared::cta.b64", "named by a .shared::cluster or a generic address"),
        ("mbarrier::arrive::one.", "", "is not supported"),
        ("tcgen05.commit.cta_group::1", "tcgen05.shift.cta_group::1", "is not supported"),
    ],
)
def test_what_is_not_supported_is_refused_when_the_program_is_read(old, new, message):
    case = chain(1)
    case.body = case.body.replace(old, new)
    with pytest.raises(PtxError, match=message) as caught:
        case.program()
    assert caught.value.line
