"""Checks beyond plain races: proxies, mbarriers, wgmma, tensor maps, tensor memory, exits, lanes and scopes; each with a silent twin."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from fa4gen.codegen.emulator import Program, TensorMap, Uninitialized
from fa4gen.codegen.emulator.layouts import MatrixDescriptor, encode_wgmma_descriptor

from .test_tensor import WAIT, WGMMA, mma, operands, run_small, wgmma_program

pytestmark = pytest.mark.filterwarnings("error")

SEEDS = range(6)
SHARED = ".shared .align 1024 .b8 s[2048]; .shared .align 8 .b64 b[4];"
INIT = "setp.eq.u32 %p1, %tid, 0; mov.u32 %r20, s; mov.u32 %r21, b; @%p1 mbarrier.init.shared.b64 [b], {count};"
FENCED = INIT + "@%p1 fence.mbarrier_init.release.cluster; bar.sync 0;"


def launch(program, args=(), threads=64, seed=0, **options):
    return program.launch("k", 1, threads, 0, list(args), seed=seed, **options)


def kinds(program, args=(), threads=64, seed=0, **options):
    return {h.kind for h in launch(program, args, threads, seed, **options).hazards}


def check(program, line, kind, args=(), threads=64, words=""):
    """The only kind found is `kind`, at `line`, under every seed."""
    for seed in SEEDS:
        found = launch(program, args, threads, seed).hazards
        assert {h.kind for h in found} == {kind}, [str(h) for h in found]
        assert line in {h.line for h in found}, [str(h) for h in found]
        assert any(words in h.message for h in found), [str(h) for h in found]
        assert all(h.missing for h in found)


# --------------------------------------------------------------------------------------------------------------------- proxies


STORE_OUT = """
    shl.b32 %r1, %tid, 2; mov.u32 %r20, s; add.u32 %r2, %r20, %r1; st.shared.u32 [%r2], %tid; // WRITE
    {fence}
    {barrier}
    setp.ne.u32 %p1, %tid, 0; @%p1 bra END;
    {late}
    cp.async.bulk.global.shared::cta.bulk_group [%rd60], [%r20], 256; // COPY
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; END:
"""


def store_out(assemble, fence="", barrier="bar.sync 0;", late=""):
    return assemble(STORE_OUT.format(fence=fence, barrier=barrier, late=late), "out", shared=SHARED)


@pytest.mark.parametrize("fence", ["fence.proxy.async;", "fence.proxy.async.shared::cta;"])
def test_a_bulk_store_needs_the_writers_proxy_fence(assemble, line_of, fence):
    clean = store_out(assemble, fence)
    for seed in SEEDS:
        out = np.zeros(64, np.uint32)
        assert not kinds(clean, [Uninitialized(out)], seed=seed)
        assert (out == np.arange(64)).all()
    racy = store_out(assemble)
    check(racy, line_of(racy, "COPY"), "proxy_fence", [np.zeros(64, np.uint32)])
    (found,) = launch(racy, [np.zeros(64, np.uint32)]).hazards
    assert found.other.line == line_of(racy, "WRITE")
    assert "fence.proxy.async" in found.missing


def test_a_proxy_fence_counts_anywhere_on_the_way_but_not_in_another_space_or_of_another_kind(assemble, line_of):
    assert not kinds(store_out(assemble, late="fence.proxy.async;"), [np.zeros(64, np.uint32)])
    for fence in ("fence.proxy.async.global;", "fence.acq_rel.gpu;", "fence.proxy.alias;"):
        program = store_out(assemble, fence)
        check(program, line_of(program, "COPY"), "proxy_fence", [np.zeros(64, np.uint32)])


def test_a_fence_before_the_write_orders_nothing(assemble, line_of):
    text = STORE_OUT.replace("st.shared.u32 [%r2], %tid;", "fence.proxy.async; st.shared.u32 [%r2], %tid;")
    program = assemble(text.format(fence="", barrier="bar.sync 0;", late=""), "out", shared=SHARED)
    check(program, line_of(program, "COPY"), "proxy_fence", [np.zeros(64, np.uint32)])


def test_without_the_barrier_it_is_a_race(assemble):
    for seed in SEEDS:
        assert "race" in kinds(store_out(assemble, "fence.proxy.async;", ""), [np.zeros(64, np.uint32)], seed=seed)


def test_a_load_over_ordinary_accesses_needs_the_fence_and_its_reader_none(assemble, line_of):
    body = (
        FENCED.format(count=1)
        + """
        {write}
        {fence} bar.sync 0; @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [b], 256;
        @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r20], [%rd60], 256, [%r21]; // LOAD
        W: mbarrier.try_wait.parity.shared.b64 %p2, [b], 0; @!%p2 bra W; ld.shared.u32 %r3, [s];
        """
    )
    x = np.zeros(64, np.uint32)
    write = "shl.b32 %r1, %tid, 2; add.u32 %r2, %r20, %r1; st.shared.u32 [%r2], %tid;"
    unfenced = assemble(body.format(write=write, fence=""), "x", shared=SHARED)
    check(unfenced, line_of(unfenced, "LOAD"), "proxy_fence", [x])
    # A read is fenced like a write, however it is itself ordered with what wrote before.
    read = write + "fence.proxy.async; ld.shared.u32 %r3, [%r2]; // READ"
    overtaken = assemble(body.format(write=read, fence=""), "x", shared=SHARED)
    check(overtaken, line_of(overtaken, "LOAD"), "proxy_fence", [x])
    assert launch(overtaken, [x]).hazards[0].other.line == line_of(overtaken, "READ")
    for clean in ((write, "fence.proxy.async;"), ("", ""), (read + "\n", "fence.proxy.async;")):
        program = assemble(body.format(write=clean[0], fence=clean[1]), "x", shared=SHARED)
        for seed in SEEDS:
            assert not kinds(program, [x], seed=seed), clean


def test_global_memory_written_before_a_bulk_load_needs_a_fence_of_global_memory(assemble, line_of):
    body = (
        FENCED.format(count=1)
        + """
        mul.wide.u32 %rd1, %tid, 4; add.s64 %rd1, %rd60, %rd1; st.global.u32 [%rd1], %tid; // WRITE
        {fence} bar.sync 0; @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [b], 256;
        @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r20], [%rd60], 256, [%r21]; // LOAD
        W: mbarrier.try_wait.parity.shared.b64 %p2, [b], 0; @!%p2 bra W;
        """
    )
    for fence in ("fence.proxy.async;", "fence.proxy.async.global;"):
        program = assemble(body.format(fence=fence), "x", shared=SHARED)
        assert not kinds(program, [np.zeros(64, np.uint32)])
    for fence in ("", "fence.proxy.async.shared::cta;"):
        program = assemble(body.format(fence=fence), "x", shared=SHARED)
        check(program, line_of(program, "LOAD"), "proxy_fence", [np.zeros(64, np.uint32)])


# ------------------------------------------------------------------------------------------------------------------- mbarriers


def test_an_mbarrier_is_initialised_before_a_copy_signals_it(assemble, line_of):
    """By what comes before the copy in the CTA, a fence of it or not."""
    body = (
        INIT.format(count=1)
        + """// INIT
        {fence} setp.eq.u32 %p1, %tid, 32; @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [b], 16;
        @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r20], [%rd60], 16, [%r21];
        W: mbarrier.try_wait.parity.shared.b64 %p2, [b], 0; @!%p2 bra W;
        """
    )
    x = np.zeros(4, np.uint32)
    for order in ("@%p1 fence.mbarrier_init.release.cluster; bar.sync 0;", "fence.proxy.async.shared::cta; bar.sync 0;", "bar.sync 0;"):
        assert not kinds(assemble(body.format(fence=order), "x", shared=SHARED), [x])
    for nothing in ("", "@%p1 fence.mbarrier_init.release.cluster;"):
        bare = assemble(body.format(fence=nothing), "x", shared=SHARED)
        assert any({"race", "mbarrier"} & kinds(bare, [x], seed=seed) for seed in SEEDS), nothing


def test_arrivals_of_threads_need_the_barrier_only(assemble):
    body = INIT.format(count=64) + "bar.sync 0; mbarrier.arrive.shared.b64 _, [b]; W: mbarrier.try_wait.parity.shared.b64 %p2, [b], 0;"
    for seed in SEEDS:
        assert not kinds(assemble(body + "@!%p2 bra W;", shared=SHARED), seed=seed)


def test_a_live_mbarrier_is_not_initialised_again(assemble, line_of):
    body = INIT.format(count=1) + "{inval}\n@%p1 mbarrier.init.shared.b64 [b], 1; // AGAIN\n"
    assert not kinds(assemble(body.format(inval="@%p1 mbarrier.inval.shared.b64 [b];"), shared=SHARED))
    again = assemble(body.format(inval=""), shared=SHARED)
    check(again, line_of(again, "AGAIN"), "mbarrier", words="live")


def test_an_invalidated_mbarrier_is_not_used(assemble, line_of):
    body = INIT.format(count=1) + "@%p1 mbarrier.inval.shared.b64 [b];\n@%p1 mbarrier.arrive.shared.b64 _, [b]; // USE\n"
    program = assemble(body, shared=SHARED)
    check(program, line_of(program, "USE"), "mbarrier", words="invalidated")


def test_a_store_over_an_mbarrier_is_found_at_its_next_use(assemble, line_of):
    body = INIT.format(count=2) + "@%p1 st.shared.u32 [b+{at}], 0;\n@%p1 mbarrier.arrive.shared.b64 _, [b]; // USE\n"
    over = assemble(body.format(at=4), shared=SHARED)
    check(over, line_of(over, "USE"), "mbarrier", words="overwritten")
    assert not kinds(assemble(body.format(at=8), shared=SHARED))


OVERRUN = (
    INIT.format(count=1)
    + """
    @%p1 mbarrier.init.shared.b64 [b+8], 1; bar.sync 0; setp.ne.u32 %p9, %lane, 0; @%p9 bra END; setp.ne.u32 %p3, %warp, 0; @%p3 bra OTHER;
    mbarrier.arrive.shared.b64 _, [b];
    {wait}
    mbarrier.arrive.shared.b64 _, [b]; bra END;
    OTHER: W0: mbarrier.try_wait.parity.shared.b64 %p4, [b], 0; @!%p4 bra W0; // FIRST
    {tell}
    W1: mbarrier.try_wait.parity.shared.b64 %p4, [b], 1; @!%p4 bra W1; END:
    """
)


def test_a_phase_that_could_complete_before_the_last_one_was_seen(assemble, line_of):
    """Two arrivals in a row let a wait miss the first phase, whether or not it did in this schedule."""
    good = OVERRUN.format(
        wait="V: mbarrier.try_wait.parity.shared.b64 %p4, [b+8], 0; @!%p4 bra V;", tell="mbarrier.arrive.shared.b64 _, [b+8];"
    )
    clean, late = assemble(good, shared=SHARED), assemble(OVERRUN.format(wait="", tell=""), shared=SHARED)
    for seed in SEEDS:
        assert not kinds(clean, seed=seed)
        assert "mbarrier" in kinds(late, seed=seed) or "deadlock" in kinds(late, seed=seed)
    found = [h for seed in range(20) for h in launch(late, seed=seed).hazards if h.kind == "mbarrier"]
    assert line_of(late, "FIRST") in {h.line for h in found}
    assert any("two ahead" in h.message for h in found) or any("could then miss it" in h.message for h in found)


def test_waiting_again_for_the_phase_before_ones_own_arrival(assemble, line_of):
    body = FENCED.format(count=64) + "mov.u32 %r5, 0; LOOP: mbarrier.arrive.shared.b64 _, [b];\nW: mbarrier.try_wait.parity.shared.b64 "
    body += "%p2, [b], {parity}; // WAIT\n@!%p2 bra W; add.u32 %r5, %r5, 1; bar.sync 0; setp.lt.u32 %p3, %r5, 2; @%p3 bra LOOP;"
    clean = assemble(body.format(parity="%r5"), shared=SHARED)
    for seed in SEEDS:
        assert not kinds(clean, seed=seed)
    stale = assemble(body.format(parity="0"), shared=SHARED)
    # The last warp to arrive completes the phase and then waits for one that never ends.
    for seed in SEEDS:
        found = launch(stale, seed=seed).hazards
        assert ("mbarrier", line_of(stale, "WAIT")) in {(h.kind, h.line) for h in found}


# ----------------------------------------------------------------------------------------------------------------------- wgmma

COMMIT = "wgmma.commit_group.sync.aligned;"


def wgmma_kinds(body, after="", setup="", text=None):
    image, a_desc, b_desc = operands()
    program = wgmma_program(8, body, setup, after, words=2048) if text is None else text
    result = set()
    for seed in SEEDS:
        args = [np.zeros((128, 4), np.float32), image, np.uint64(a_desc), np.uint64(b_desc), np.zeros(1, np.uint32)]
        result.add(frozenset(h.kind for h in program.launch("k", 1, 128, 8192, args, seed=seed).hazards))
    assert len(result) == 1
    return set(result.pop())


@pytest.mark.parametrize("touch", ["mov.f32 %f9, %f0;", "mov.f32 %f3, 0f00000000;", "add.f32 %f9, %f9, %f2;"])
def test_accumulators_are_not_touched_before_the_wait(touch):
    setup = "mov.f32 %f9, 0f00000000; mov.f32 %f10, 0f00000000;"
    assert wgmma_kinds(mma(8, "bf16") + COMMIT + touch + "wgmma.wait_group.sync.aligned 0;", setup=setup) == {"wgmma_in_flight"}
    assert wgmma_kinds(mma(8, "bf16") + WAIT + touch, setup=setup) == set()
    # Other registers may be.
    assert wgmma_kinds(mma(8, "bf16") + COMMIT + "mov.f32 %f9, %f10;" + "wgmma.wait_group.sync.aligned 0;", setup=setup) == set()


def test_fragments_of_a_are_not_touched_before_the_wait():
    registers = "mov.b32 %r20, 0; mov.b32 %r21, 0; mov.b32 %r22, 0; mov.b32 %r23, 0;"
    multiply = mma(8, "bf16", a="{%r20, %r21, %r22, %r23}", flags="1, 1, 0")
    assert wgmma_kinds(multiply + WAIT + "mov.b32 %r21, 1;", setup=registers) == set()
    early = multiply + COMMIT + "mov.b32 %r21, 1; wgmma.wait_group.sync.aligned 0;"
    assert wgmma_kinds(early, setup=registers) == {"wgmma_in_flight"}


def test_wgmma_fence_comes_first_and_after_other_accesses():
    assert wgmma_kinds(mma(8, "bf16") + WAIT + "wgmma.fence.sync.aligned;" + mma(8, "bf16", accumulate="1") + WAIT) == set()
    touched = mma(8, "bf16") + WAIT + "mul.f32 %f0, %f0, %f0; FENCE " + mma(8, "bf16", accumulate="1") + WAIT
    assert wgmma_kinds(touched.replace("FENCE", "wgmma.fence.sync.aligned;")) == set()
    assert wgmma_kinds(touched.replace("FENCE", "")) == {"wgmma_in_flight"}
    # A chain on one accumulator needs none.
    assert wgmma_kinds(mma(8, "bf16") + mma(8, "bf16", accumulate="1") + WAIT) == set()

    first = wgmma_program(8, mma(8, "bf16") + WAIT, words=2048)
    assert wgmma_kinds("", text=first) == set()
    stores = "\n".join(f"st.global.f32 [%rd8+{4 * i}], %f{i};" for i in range(4))
    bare = WGMMA.replace("wgmma.fence.sync.aligned;\n", "").format(
        words=2048, sync="bar.sync 0;", setup="", body=mma(8, "bf16") + WAIT, after="", row=16, stores=stores
    )
    assert wgmma_kinds("", text=Program.from_ptx(bare)) == {"wgmma_in_flight"}


def test_an_operand_overwritten_before_the_wait_is_in_flight_and_without_a_barrier_a_race():
    overwrite = "setp.eq.u32 %p2, %tid, 0; @%p2 st.shared.u32 [%r9], %tid;"
    for seed in SEEDS:
        done = mma(8, "bf16") + WAIT
        assert run_small(done, seed, after="bar.sync 0;" + overwrite)[0] == set()
        assert run_small(done, seed, after=overwrite)[0] == {"race"}
        after = f"bar.sync 0; {overwrite} wgmma.wait_group.sync.aligned 0;"
        assert run_small(mma(8, "bf16") + COMMIT, seed, after=after)[0] == {"wgmma_in_flight"}


def test_wgmma_operands_written_by_threads_need_the_proxy_fence():
    stores = "\n".join(f"st.global.f32 [%rd8+{4 * i}], %f{i};" for i in range(4))
    text = WGMMA.replace("fence.proxy.async.shared::cta;", "").format(
        words=2048, sync="bar.sync 0;", setup="", body=mma(8, "bf16") + WAIT, after="", row=16, stores=stores
    )
    assert wgmma_kinds("", text=Program.from_ptx(text)) == {"proxy_fence"}


def test_wgmma_never_waited_for():
    assert wgmma_kinds(mma(8, "bf16") + COMMIT, after="exit;") == {"async_exit"}
    assert wgmma_kinds(mma(8, "bf16"), after="exit;") == {"async_exit"}
    assert wgmma_kinds(mma(8, "bf16") + WAIT, after="exit;") == set()


# ----------------------------------------------------------------------------------------------------------------- tensor maps

TILE = """
.version 8.8
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 dyn[];
.entry k(.param .align 64 .b8 map[128], .param .u64 a_desc, .param .u64 b_desc) {{
.reg .pred %p<16>; .reg .b32 %r<64>; .reg .f32 %f<16>; .reg .b64 %rd<32>; .reg .b32 %tid; .shared .align 1024 .b64 b[128];
mov.u32 %tid, %tid.x; ld.param.u64 %rd3, [a_desc]; ld.param.u64 %rd4, [b_desc]; mov.b64 %rd5, map; cvta.param.u64 %rd6, %rd5;
mov.u32 %r1, dyn; add.u32 %r1, %r1, {offset}; mov.u32 %r2, b; setp.eq.u32 %p1, %tid, 0;
@%p1 mbarrier.init.shared.b64 [b], 1; @%p1 fence.mbarrier_init.release.cluster; bar.sync 0;
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [b], {bytes};
@%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd6, {{0, 0}}], [%r2];
W: mbarrier.try_wait.parity.shared.b64 %p2, [b], 0; @!%p2 bra W;
wgmma.fence.sync.aligned; {mma} // MMA
wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; ret; }}
"""


def tile_kinds(map_swizzle=128, descriptor_swizzle=128, columns=64, offset=0, base_offset=0):
    """A tile of 64 rows that a tensor load brings and a wgmma reads as A and (its first 8 rows) as B."""
    program = Program.from_ptx(TILE.format(mma=mma(8, "bf16"), bytes=128 * columns, offset=offset))
    start = 1024 + 1024 + offset
    stride = 8 * (descriptor_swizzle or 16)
    descriptor = encode_wgmma_descriptor(MatrixDescriptor(start, 16, stride, base_offset, descriptor_swizzle))
    array = np.zeros((64, columns), ml_dtypes.bfloat16)
    result = set()
    for seed in SEEDS:
        args = [TensorMap(array, (64, columns), swizzle=map_swizzle), np.uint64(descriptor), np.uint64(descriptor)]
        found = program.launch("k", 1, 128, 128 * columns + 32768, args, seed=seed).hazards
        result.add(frozenset((h.kind, h.line) for h in found))
    assert len(result) == 1
    (found,) = result
    assert all(line == 1 + TILE.split("\n").index(next(x for x in TILE.split("\n") if "// MMA" in x)) for _, line in found)
    return {kind for kind, _ in found}


def test_the_descriptor_reads_the_layout_that_the_tensor_map_wrote():
    assert tile_kinds() == set()
    assert tile_kinds(64, 64, columns=32) == set()
    assert "tensor_map" in tile_kinds(64, 128, columns=32)
    assert "tensor_map" in tile_kinds(128, 0)
    assert tile_kinds(0, 64, columns=32) == {"tensor_map"}
    # Half a swizzle row: the rows of the box are closer than the descriptor thinks.
    assert "tensor_map" in tile_kinds(128, 128, columns=32)
    # A tile off the pattern's boundary is fine where the descriptor's base offset says so.
    assert tile_kinds(offset=256) == {"tensor_map"}
    assert tile_kinds(offset=256, base_offset=2) == set()


def test_an_unaligned_tensor_map():
    text = TILE.format(mma="", bytes=8192, offset=0).replace(
        ".param .align 64 .b8 map[128]", ".param .u64 pad, .param .align 8 .b8 map[128]"
    )
    text = text.replace("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;", "")
    array = np.zeros((64, 64), ml_dtypes.bfloat16)
    args = [np.uint64(0), TensorMap(array, (64, 64), swizzle=128), np.uint64(0), np.uint64(0)]
    found = Program.from_ptx(text).launch("k", 1, 128, 16384, args).hazards
    assert {h.kind for h in found} == {"tensor_map"}
    assert "not aligned to 64" in found[0].message


# --------------------------------------------------------------------------------------------------------------- tensor memory


def test_the_base_of_tensor_memory_is_read_not_assumed(assemble, line_of):
    body = """
        setp.ne.u32 %p1, %warp, 0; @%p1 bra A; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], 512; // ALLOC
        A: bar.sync 0; {base}
        tcgen05.st.sync.aligned.32x32b.x1.b32 [%r1], {{%tid}}; tcgen05.wait::st.sync.aligned; tcgen05.fence::before_thread_sync; bar.sync 0;
        @%p1 bra E; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 512; E:
    """
    options = {"shared": ".shared .u32 slot;", "target": "sm_100a"}
    clean = assemble(body.format(base="ld.shared.u32 %r1, [slot];"), **options)
    assumed = assemble(body.format(base="mov.u32 %r1, 0;"), **options)
    for seed in SEEDS:
        assert not kinds(clean, threads=128, seed=seed)
    check(assumed, line_of(assumed, "ALLOC"), "tmem_allocation", threads=128, words="assumed")
    # A smaller block lies anywhere: cells that are not allocated are touched.
    small = assemble(body.format(base="mov.u32 %r1, 0;").replace("512", "64"), **options)
    assert any("which is not allocated" in h.message for seed in range(8) for h in launch(small, threads=128, seed=seed).hazards)


# ------------------------------------------------------------------------------------------------------------------------ exits


def test_copies_are_waited_for_before_the_exit(assemble, line_of):
    tail = " cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; END:"
    for new in ("END:", "cp.async.bulk.commit_group; END:", "cp.async.bulk.wait_group 0; END:"):
        text = STORE_OUT.replace(tail.strip(), new)
        assert text != STORE_OUT
        program = assemble(text.format(fence="fence.proxy.async;", barrier="bar.sync 0;", late=""), "out", shared=SHARED)
        check(program, line_of(program, "COPY"), "async_exit", [np.zeros(64, np.uint32)])
    load = FENCED.format(count=1) + "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [b], 16;\n"
    load += "@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r20], [%rd60], 16, [%r21]; // LOAD\n{wait}"
    wait = "W: mbarrier.try_wait.parity.shared.b64 %p2, [b], 0; @!%p2 bra W;"
    assert not kinds(assemble(load.format(wait=wait), "x", shared=SHARED), [np.zeros(4, np.uint32)])
    lost = assemble(load.format(wait=""), "x", shared=SHARED)
    check(lost, line_of(lost, "LOAD"), "async_exit", [np.zeros(4, np.uint32)])


# ------------------------------------------------------------------------------------------------------------------------ lanes


def test_diverged_lanes_are_ordered_by_the_warps_barrier_only(assemble, line_of):
    body = """
        setp.ne.u32 %p1, %lane, 0; @%p1 bra MEET; st.shared.u32 [s], 7; // WRITE
        MEET: {sync}
        ld.shared.u32 %r1, [s]; // READ
    """
    clean = assemble(body.format(sync="bar.warp.sync -1;"), shared=SHARED)
    racy = assemble(body.format(sync=""), shared=SHARED)
    for seed in SEEDS:
        assert not kinds(clean, threads=32, seed=seed)
        found = [h for h in launch(racy, threads=32, seed=seed).hazards if h.kind == "race"]
        assert found
        assert {found[0].line, found[0].other.line} == {line_of(racy, "WRITE"), line_of(racy, "READ")}
        assert "bar.warp.sync" in found[0].missing


def test_one_lanes_arrival_releases_what_that_lane_knows(assemble):
    """The other lanes' writes reach the waiting warp only through the warp's barrier before the arrival."""
    body = (
        FENCED.format(count=1)
        + """
        setp.ne.u32 %p3, %warp, 0; @%p3 bra WAIT; shl.b32 %r1, %lane, 2; add.u32 %r2, %r20, %r1; st.shared.u32 [%r2], %tid;
        {sync} setp.eq.u32 %p4, %lane, 0; {arrive} bra END;
        WAIT: W: mbarrier.try_wait.parity.shared.b64 %p2, [b], 0; @!%p2 bra W; ld.shared.u32 %r3, [s+{lane}]; END:
        """
    )
    predicated = "@%p4 mbarrier.arrive.shared.b64 _, [b];"
    branched = "@!%p4 bra END; mbarrier.arrive.shared.b64 _, [b];"
    for arrive in (predicated, branched):
        for seed in SEEDS:
            assert not kinds(assemble(body.format(sync="bar.warp.sync -1;", arrive=arrive, lane=4), shared=SHARED), seed=seed)
            assert kinds(assemble(body.format(sync="", arrive=arrive, lane=4), shared=SHARED), seed=seed) == {"race"}
            # What the arriving lane itself wrote is released.
            assert not kinds(assemble(body.format(sync="", arrive=arrive, lane=0), shared=SHARED), seed=seed)


def test_lanes_exchange_through_memory_with_the_warps_barrier(assemble):
    body = """
        shl.b32 %r1, %lane, 2; mov.u32 %r20, s; add.u32 %r2, %r20, %r1; st.shared.u32 [%r2], %tid; {sync}
        xor.b32 %r3, %r1, {other}; add.u32 %r3, %r20, %r3; ld.shared.u32 %r4, [%r3];
    """
    for seed in SEEDS:
        assert not kinds(assemble(body.format(sync="bar.warp.sync -1;", other=4), shared=SHARED), threads=32, seed=seed)
        assert not kinds(assemble(body.format(sync="", other=0), shared=SHARED), threads=32, seed=seed)
        assert kinds(assemble(body.format(sync="", other=4), shared=SHARED), threads=32, seed=seed) == {"race"}


# ----------------------------------------------------------------------------------------------------------------------- scopes


@pytest.mark.parametrize(
    ("release", "acquire", "clean"),
    [
        ("st.release.gpu.global.u32 [%rd60], 1;", "ld.acquire.gpu.global.u32 %r1, [%rd60];", True),
        ("fence.acq_rel.gpu; st.relaxed.gpu.global.u32 [%rd60], 1;", "ld.relaxed.gpu.global.u32 %r1, [%rd60]; fence.acq_rel.gpu;", True),
        ("st.release.cta.global.u32 [%rd60], 1;", "ld.acquire.gpu.global.u32 %r1, [%rd60];", False),
        ("st.release.gpu.global.u32 [%rd60], 1;", "ld.acquire.cta.global.u32 %r1, [%rd60];", False),
        ("fence.acq_rel.cta; st.relaxed.gpu.global.u32 [%rd60], 1;", "ld.relaxed.gpu.global.u32 %r1, [%rd60]; fence.acq_rel.gpu;", False),
        ("fence.acq_rel.gpu; st.relaxed.gpu.global.u32 [%rd60], 1;", "ld.relaxed.gpu.global.u32 %r1, [%rd60]; fence.acq_rel.cta;", False),
    ],
)
def test_a_release_reaches_as_far_as_both_scopes(assemble, release, acquire, clean):
    body = f"""
        mov.u32 %r9, %ctaid.x; setp.ne.u32 %p1, %r9, 0; setp.ne.u32 %p0, %lane, 0; @%p0 bra END; @%p1 bra READER;
        st.global.u32 [%rd60+16], 5; {release} bra END;
        READER: {acquire} setp.eq.u32 %p2, %r1, 0; @%p2 bra READER; ld.global.u32 %r2, [%rd60+16]; END:
    """
    program = assemble(body, "x")
    for seed in SEEDS:
        found = {h.kind for h in program.launch("k", 2, 32, 0, [np.zeros(8, np.uint32)], seed=seed).hazards}
        assert found == (set() if clean else {"race"})
    # Within one CTA every scope is wide enough.
    inside = body.replace("mov.u32 %r9, %ctaid.x;", "mov.u32 %r9, %warp;")
    for seed in SEEDS:
        assert not kinds(assemble(inside, "x"), [np.zeros(8, np.uint32)], threads=64, seed=seed)
