"""tcgen05.ld and .st in every shape, with and without packing, against the placement that the ISA describes, written out once more here."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from fa4gen.codegen.emulator import PtxError, Uninitialized

pytestmark = pytest.mark.filterwarnings("error")

COLUMNS = 128
SPLIT = 64
SHAPES = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}  # registers a repetition
FRAME = """
    setp.eq.u32 %p1, %warp, 0; @!%p1 bra ALLOCATED; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], 128;
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned; ALLOCATED: bar.sync 0; ld.shared.u32 %r250, [slot];
    shl.b32 %r251, %warp, 21; add.u32 %r250, %r250, %r251; {body}
    tcgen05.fence::before_thread_sync; bar.sync 0; @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r250, 128;
"""


def cell(shape: str, thread: int, register: int, split: int) -> tuple[int, int]:
    """(lane of the warp's quarter, column) of 32 bits of a register (9.7.16.2.3)."""
    quad, place = divmod(thread, 4)
    if shape == "32x32b":
        return thread, register
    if shape == "16x32bx2":
        half, lane = divmod(thread, 16)
        return lane, register + split * half
    if shape == "16x64b":
        pair, odd = divmod(place, 2)
        return quad + 8 * odd, 2 * register + pair
    if shape == "16x128b":
        step, lower = divmod(register, 2)
        return quad + 8 * lower, 4 * step + place
    step, within = divmod(register, 4)  # 16x256b
    lower, odd = divmod(within, 2)
    return quad + 8 * lower, 8 * step + 2 * place + odd


def placed(shape: str, count: int, split: int, packed: bool) -> Iterator[tuple[int, int, int, list[int]]]:
    """thread, register, lane, columns: one, or the two whose low halves share the register."""
    for thread in range(32):
        for register in range(count):
            lane, column = cell(shape, thread, register, 0)
            shift = split if shape == "16x32bx2" and thread >= 16 else 0
            yield thread, register, lane, [2 * column + shift, 2 * column + 1 + shift] if packed else [column + shift]


def registers(count: int) -> str:
    return "{" + ", ".join(f"%r{i}" for i in range(count)) + "}"


# Columns that a repetition spans; the two halves of 16x32bx2 lie SPLIT apart.
SPANS = {"32x32b": 1, "16x64b": 2, "16x128b": 4, "16x256b": 8, "16x32bx2": 1}
ROOM = {shape: SPLIT if shape == "16x32bx2" else COLUMNS for shape in SHAPES}
FORMS = [
    (shape, num, packed)
    for shape in SHAPES
    for packed in (False, True)
    for num in (1, 4, ROOM[shape] // (SPANS[shape] * (2 if packed else 1)))
]


@pytest.mark.parametrize(("shape", "num", "packed"), FORMS)
def test_store_then_load_back_by_lanes(assemble, shape, num, packed):
    """What one shape stores, 32x32b loads read; and the shape loads what it has stored."""
    count = SHAPES[shape] * num
    split = f", {SPLIT}" if shape == "16x32bx2" else ""
    body = "".join(f"mov.u32 %r{i}, 9;" for i in range(64))
    for first in range(0, COLUMNS, 64):
        body += f"tcgen05.st.sync.aligned.32x32b.x64.b32 [%r250+{first}], {registers(64)};"
    body += "tcgen05.wait::st.sync.aligned;"
    # Register r of thread t holds t * 256 + r in its low half and that + 32768 in its high half.
    body += "mul.lo.u32 %r249, %lane, 256;"
    for i in range(count):
        body += f"add.u32 %r{i}, %r249, {i}; add.u32 %r248, %r{i}, 32768; shl.b32 %r248, %r248, 16; or.b32 %r{i}, %r{i}, %r248;"
    body += f"tcgen05.st.sync.aligned.{shape}.x{num}{'.unpack::16b' if packed else ''}.b32 [%r250]{split}, {registers(count)};"
    body += "tcgen05.wait::st.sync.aligned;"
    body += f"tcgen05.ld.sync.aligned.{shape}.x{num}{'.pack::16b' if packed else ''}.b32 {registers(count)}, [%r250]{split};"
    body += f"tcgen05.wait::ld.sync.aligned; mul.wide.u32 %rd1, %tid, {4 * count}; add.s64 %rd1, %rd60, %rd1;"
    body += "".join(f"st.global.u32 [%rd1+{4 * i}], %r{i};" for i in range(count))
    body += f"mul.wide.u32 %rd2, %tid, {4 * COLUMNS}; add.s64 %rd2, %rd61, %rd2;"
    for first in range(0, COLUMNS, 64):
        body += f"tcgen05.ld.sync.aligned.32x32b.x64.b32 {registers(64)}, [%r250+{first}]; tcgen05.wait::ld.sync.aligned;"
        body += "".join(f"st.global.u32 [%rd2+{4 * (first + i)}], %r{i};" for i in range(64))
    program = assemble(FRAME.format(body=body), "back cells", shared=".shared .align 4 .u32 slot;", target="sm_100a")
    back, cells = np.zeros((128, count), np.uint32), np.zeros((128, COLUMNS), np.uint32)
    result = program.launch("k", 1, 128, 0, [Uninitialized(back), Uninitialized(cells)])
    assert not result.hazards, [str(h) for h in result.hazards]
    value = np.arange(32, dtype=np.uint32)[:, None] * 256 + np.arange(count, dtype=np.uint32)
    value |= (value + 32768) << 16
    expected = np.full((32, COLUMNS), 9, np.uint32)
    for thread, register, lane, columns in placed(shape, count, SPLIT, packed):
        for half, column in enumerate(columns):
            expected[lane, column] = value[thread, register] >> 16 * half & 0xFFFF if packed else value[thread, register]
    for warp in range(4):
        assert (back[32 * warp : 32 * warp + 32] == value).all()
        assert (cells[32 * warp : 32 * warp + 32] == expected).all()


@pytest.mark.parametrize(
    "text",
    [
        "tcgen05.ld.sync.aligned.32x32b.x256.b32 {%r0}, [%r250];",
        "tcgen05.ld.sync.aligned.16x128b.x128.b32 {%r0}, [%r250];",
        "tcgen05.ld.sync.aligned.16x256b.x64.b32 {%r0}, [%r250];",
        "tcgen05.ld.sync.aligned.32x32b.x32.pack::16b.b32 " + registers(16) + ", [%r250];",  # as many registers as without packing
        "tcgen05.st.sync.aligned.16x256b.x2.b32 [%r250], " + registers(4) + ";",
        "tcgen05.ld.red.sync.aligned.32x32b.x2.max.f32 {%r0, %r1}, %r2, [%r250];",  # sm_103a
    ],
)
def test_forms_that_do_not_exist(assemble, text):
    with pytest.raises(PtxError):
        assemble(FRAME.format(body=text), shared=".shared .align 4 .u32 slot;", target="sm_100a")
