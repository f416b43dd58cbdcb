"""Tensor memory: every load and store shape, allocation rules, lanes of a warp, waits."""

from __future__ import annotations

import numpy as np
import pytest

from fa4gen.codegen.emulator import Uninitialized
from fa4gen.codegen.emulator.layouts import tmem_map, tmem_registers

pytestmark = pytest.mark.filterwarnings("error")

SEEDS = range(6)
ALLOC = """
    setp.eq.u32 %p1, %warp, 0; @!%p1 bra ALLOCATED; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], {columns};
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned; ALLOCATED: bar.sync 0; ld.shared.u32 %r250, [slot];
"""
FREE = "tcgen05.fence::before_thread_sync; bar.sync 0; @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r250, {columns};"


def kernel(assemble, body: str, columns: int = 64, params: str = "", free: str = FREE, alloc: str = ALLOC):
    return assemble(
        alloc.format(columns=columns) + body + free.format(columns=columns), params, shared=".shared .align 4 .u32 slot;", target="sm_100a"
    )


def names(first: int, count: int) -> str:
    return "{" + ", ".join(f"%r{first + i}" for i in range(count)) + "}"


def fill(columns: int) -> str:
    """Every warp writes lane * 1000 + column into its 32 lanes of columns 0 .. columns - 1."""
    text = "mul.lo.u32 %r249, %tid, 1000; mov.u32 %r248, %r250;"
    for first in range(0, columns, 16):
        text += "".join(f"add.u32 %r{i}, %r249, {first + i};" for i in range(16))
        text += f"tcgen05.st.sync.aligned.32x32b.x16.b32 [%r250+{first}], {names(0, 16)};"
    return text + "tcgen05.wait::st.sync.aligned;"


@pytest.mark.parametrize(
    ("shape", "num"), [("32x32b", 1), ("32x32b", 32), ("16x64b", 4), ("16x128b", 8), ("16x256b", 4), ("16x32bx2", 8), ("16x64b", 16)]
)
def test_loads_of_every_shape(assemble, shape, num):
    count = tmem_registers(shape, num)
    split = ", 16" if shape == "16x32bx2" else ""
    body = fill(64) + f"tcgen05.ld.sync.aligned.{shape}.x{num}.b32 {names(0, count)}, [%r250+4]{split}; tcgen05.wait::ld.sync.aligned;"
    body += f"mul.wide.u32 %rd1, %tid, {4 * count}; add.s64 %rd1, %rd60, %rd1;" + "".join(
        f"st.global.u32 [%rd1+{4 * i}], %r{i};" for i in range(count)
    )
    program = kernel(assemble, body, params="out")
    lane, column = tmem_map(shape, num, 16 if split else 0)
    for seed in SEEDS:
        out = np.zeros((128, count), np.uint32)
        result = program.launch("k", 1, 128, 0, [Uninitialized(out)], seed=seed)
        assert not result.hazards, [str(h) for h in result.hazards]
        for warp in range(4):
            assert (out[32 * warp : 32 * warp + 32] == (32 * warp + lane) * 1000 + column + 4).all()


def test_stores_of_other_shapes_and_packing(assemble):
    """16x256b stores read back as 32x32b; .unpack::16b spreads halves, .pack::16b joins them again."""
    body = (
        fill(64)
        + "".join(f"mad.lo.u32 %r{i}, %tid, 100, {i};" for i in range(8))
        + f"tcgen05.st.sync.aligned.16x256b.x2.b32 [%r250], {names(0, 8)}; tcgen05.wait::st.sync.aligned;"
        + f"tcgen05.ld.sync.aligned.32x32b.x16.b32 {names(16, 16)}, [%r250]; tcgen05.wait::ld.sync.aligned;"
        + f"tcgen05.st.sync.aligned.32x32b.x4.unpack::16b.b32 [%r250+32], {names(0, 4)}; tcgen05.wait::st.sync.aligned;"
        + f"tcgen05.ld.sync.aligned.32x32b.x4.pack::16b.b32 {names(32, 4)}, [%r250+32];"
        + f"tcgen05.ld.sync.aligned.32x32b.x2.b32 {names(36, 2)}, [%r250+32];"
        + "tcgen05.wait::ld.sync.aligned; mul.wide.u32 %rd1, %tid, 88; add.s64 %rd1, %rd60, %rd1;"
        + "".join(f"st.global.u32 [%rd1+{4 * i}], %r{16 + i};" for i in range(22))
    )
    out = np.zeros((128, 22), np.uint32)
    result = kernel(assemble, body, params="out").launch("k", 1, 128, 0, [out])
    assert not result.hazards, [str(h) for h in result.hazards]
    lane, column = tmem_map("16x256b", 2)
    expected = np.arange(128)[:, None] * 1000 + np.arange(16)
    for warp in range(4):
        expected[32 * warp + lane, column] = (32 * warp + np.arange(32))[:, None] * 100 + np.arange(8)
    assert (out[:, :16] == expected).all()
    value = np.arange(128)[:, None] * 100 + np.arange(4)
    assert (out[:, 16:20] == value).all()
    assert (out[:, 20:] == np.stack([value[:, 0] & 0xFFFF, value[:, 0] >> 16], 1)).all()


@pytest.mark.parametrize(
    ("lane", "expected"), [("0", set()), ("%quarter", set()), ("0x600000", {"tmem_lane"}), ("0x100000", {"tmem_lane"})]
)
def test_a_warp_reaches_its_own_quarter_only(assemble, lane, expected):
    """A base lane below 32 counts from the warp's quarter; lane 96 belongs to warp 3; a 32-lane access cannot begin at lane 16."""
    body = fill(64) + f"and.b32 %r1, %warp, 3; shl.b32 %r1, %r1, 21; add.u32 %r2, %r250, {lane.replace('%quarter', '%r1')};"
    body += "setp.lt.u32 %p2, %warp, 3; @!%p2 bra SKIP; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r3}, [%r2];"
    body += "tcgen05.wait::ld.sync.aligned; SKIP:"
    program = kernel(assemble, body)
    for seed in SEEDS:
        found = {h.kind for h in program.launch("k", 1, 128, seed=seed).hazards}
        assert found & {"tmem_lane"} == expected
        if not expected:
            assert not found


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r1}, [%r250+64]; // HERE", "tmem_allocation"),
        ("tcgen05.st.sync.aligned.32x32b.x2.b32 [%r250+63], {%r1, %r2}; // HERE\ntcgen05.wait::st.sync.aligned;", "tmem_allocation"),
        ("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r1}, [%r250+512]; // HERE", "out_of_bounds"),
        ("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r1}, [%r250+5]; // HERE", "uninitialized"),
        (
            "setp.lt.u32 %p3, %lane, 5; @%p3 bra SKIP;\n"
            "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r1}, [%r250]; // HERE\nSKIP: bar.warp.sync -1;",
            "barrier",
        ),
    ],
)
def test_faulty_accesses(assemble, line_of, body, kind):
    program = kernel(assemble, "\n" + body + "\ntcgen05.wait::ld.sync.aligned;")
    for seed in SEEDS:
        found = program.launch("k", 1, 128, seed=seed).hazards
        assert (kind, line_of(program, "HERE")) in {(h.kind, h.line) for h in found}


def test_a_lane_past_the_last_is_named(assemble):
    body = "setp.ne.u32 %p2, %warp, 3; @%p2 bra SKIP; add.u32 %r2, %r250, 0x800000;"
    program = kernel(assemble, body + "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r1}, [%r2]; SKIP: tcgen05.wait::ld.sync.aligned;")
    (found,) = [h.message for h in program.launch("k", 1, 128).hazards if h.kind == "out_of_bounds"]
    assert "tensor memory lane 128 by warp 3" in found
    assert found.endswith("there are 128 lanes")


@pytest.mark.parametrize(
    ("columns", "free", "extra", "words"),
    [
        (48, FREE, "", "power of two"),
        (64, "bar.sync 0;", "", "not deallocated"),
        (64, FREE.replace("{columns}", "32"), "", "allocated with 64 columns"),
        (64, FREE + "@%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r250, 64;", "", "is not allocated"),
        (64, FREE, "@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], 32; @%p1 bra X; X:", "relinquished"),
    ],
    ids=["size", "leak", "wrong size freed", "double free", "alloc after relinquish"],
)
def test_allocation_rules(assemble, columns, free, extra, words):
    program = kernel(assemble, extra, columns, free=free)
    for seed in SEEDS:
        found = [h for h in program.launch("k", 1, 128, seed=seed).hazards if h.kind == "tmem_allocation"]
        assert any(words in h.message for h in found), [str(h) for h in found]


def test_growing_allocations_and_an_allocation_that_waits(assemble):
    """Sizes must not increase; a request that does not fit waits for the other warp's deallocation."""
    grow = """
        setp.ne.u32 %p1, %warp, 0; @%p1 exit; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], 32;
        ld.shared.u32 %r1, [slot];
        tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], 64; ld.shared.u32 %r2, [slot];
        tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 32; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 64;
    """
    found = assemble(grow, shared=".shared .u32 slot;", target="sm_100a").launch("k", 1, 64).hazards
    assert [h.kind for h in found] == ["tmem_allocation"]
    assert "must not increase" in found[0].message
    wait = """
        shl.b32 %r9, %warp, 2; mov.u32 %r8, slot; add.u32 %r8, %r8, %r9;
        tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r8], 512; ld.shared.u32 %r1, [%r8];
        tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 512;
    """
    program = assemble(wait, shared=".shared .align 8 .b8 slot[16];", target="sm_100a")
    for seed in SEEDS:
        assert not program.launch("k", 1, 128, seed=seed).hazards
    stuck = assemble(
        wait.replace("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 512;", "bar.sync 0;"),
        shared=".shared .align 8 .b8 slot[16];",
        target="sm_100a",
    )
    found = stuck.launch("k", 1, 64).hazards
    assert any(h.kind == "deadlock" and "free columns of tensor memory" in h.message for h in found)


def test_other_warps_need_the_wait_and_a_barrier(assemble):
    """Warp 4 (the same quarter as warp 0) reads what warp 0 stored; the write back of warp 0 needs the load's wait as well."""
    body = """
        setp.eq.u32 %p2, %warp, 0; setp.eq.u32 %p3, %warp, 4; @!%p2 bra R; mov.u32 %r1, 7;
        tcgen05.st.sync.aligned.32x32b.x1.b32 [%r250], {{%r1}}; {store_wait} {store_before}
        R: {barrier} {load_after} @!%p3 bra W; tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r2}}, [%r250]; {load_wait} {load_before}
        W: bar.sync 0; {store_after} @!%p2 bra E; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r250], {{%r1}}; tcgen05.wait::st.sync.aligned; E:
    """
    good = {"store_wait": "tcgen05.wait::st.sync.aligned;", "barrier": "bar.sync 0;", "load_wait": "tcgen05.wait::ld.sync.aligned;"}
    for access in ("store", "load"):
        good |= {f"{access}_before": "tcgen05.fence::before_thread_sync;", f"{access}_after": "tcgen05.fence::after_thread_sync;"}
    for seed in SEEDS:
        assert not kernel(assemble, body.format(**good)).launch("k", 1, 160, seed=seed).hazards
        for drop in good:
            found = {h.kind for h in kernel(assemble, body.format(**{**good, drop: ""})).launch("k", 1, 160, seed=seed).hazards}
            assert ("tcgen05_fence" if drop.endswith(("before", "after")) else "race") in found, drop


@pytest.mark.parametrize(
    ("use", "ordered"),
    [
        ("add.u32 %r1, %r3, 1;", True),
        ("mov.b64 %rd1, {%r2, %r3};", True),
        ("setp.eq.u32 %p4, %r3, 9;", True),
        ("tcgen05.st.sync.aligned.32x32b.x1.b32 [%r250+2], {%r3};", True),
        ("add.u32 %r1, %r2, 1;", False),
        ("", False),
    ],
)
def test_using_what_a_load_brought_waits_for_it(assemble, use, ordered):
    """A load into %r2, then one into %r3; a store to the second one's cell is ordered after it once %r3 has been read."""
    body = (
        fill(16)
        + "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r2}, [%r250]; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r3}, [%r250+1];"
        + use
        + "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r250+1], {%r249}; tcgen05.wait::st.sync.aligned; tcgen05.wait::ld.sync.aligned;"
    )
    program = kernel(assemble, body)
    for seed in SEEDS:
        found = {h.kind for h in program.launch("k", 1, 128, seed=seed).hazards}
        assert found == (set() if ordered else {"race"})
