"""Divergence, reconvergence, warp-wide exchanges, named barriers and their reductions, atomics as synchronisation."""

from __future__ import annotations

import numpy as np
import pytest

from fa4gen.codegen.emulator import PtxError, Uninitialized

pytestmark = pytest.mark.filterwarnings("error")

SEEDS = range(6)
STORE = "mul.wide.u32 %rd1, %tid, 4; add.s64 %rd1, %rd60, %rd1; st.global.u32 [%rd1], %r1;"


def run(program, threads=32, seed=0, blocks=1, extra=(), words=None, kinds=()):
    out = np.zeros(threads * blocks if words is None else words, np.uint32)
    result = program.launch("k", blocks, threads, 0, [out, *extra], seed=seed)
    assert [h.kind for h in result.hazards] == list(kinds), [str(h) for h in result.hazards]
    return out


def test_nested_divergence_and_loops(assemble):
    """Each lane runs its own number of iterations inside branches; the Collatz length of lane + 1."""
    body = """
        add.u32 %r2, %tid, 1; mov.u32 %r1, 0;
        LOOP: setp.eq.u32 %p1, %r2, 1; @%p1 bra DONE;
        add.u32 %r1, %r1, 1; and.b32 %r3, %r2, 1; setp.eq.u32 %p2, %r3, 0; @%p2 bra EVEN;
        mad.lo.u32 %r2, %r2, 3, 1; bra.uni LOOP;
        EVEN: shr.u32 %r2, %r2, 1; bra.uni LOOP;
        DONE:
    """
    out = run(assemble(body + STORE, "out"), 48)

    def collatz(n: int) -> int:
        return 0 if n == 1 else 1 + collatz(n // 2 if n % 2 == 0 else 3 * n + 1)

    assert out.tolist() == [collatz(i + 1) for i in range(48)]


def test_lanes_reconverge_before_a_warp_wide_exchange(assemble):
    """Lanes that took different paths of different lengths meet again at the shuffle: every source lane takes part."""
    body = """
        mov.u32 %r1, %lane; and.b32 %r2, %lane, 3; setp.eq.u32 %p1, %r2, 1; @%p1 bra A; setp.eq.u32 %p2, %r2, 2; @%p2 bra B;
        add.u32 %r1, %r1, 100; bra JOIN;
        A: add.u32 %r1, %r1, 200; add.u32 %r1, %r1, 1; add.u32 %r1, %r1, 1; bra JOIN;
        B: add.u32 %r1, %r1, 300;
        JOIN: shfl.sync.bfly.b32 %r1, %r1, 1, 31, -1;
    """
    value = [i + (100, 202, 300, 100)[i & 3] for i in range(32)]
    assert run(assemble(body + STORE, "out")).tolist() == [value[i ^ 1] for i in range(32)]


def test_a_lane_may_compute_for_long_while_the_others_wait_for_it(assemble):
    body = """
        mov.u32 %r1, 0; setp.eq.u32 %p1, %lane, 0; @!%p1 bra JOIN;
        LOOP: add.u32 %r1, %r1, 1; setp.lt.u32 %p2, %r1, 80000; @%p2 bra LOOP;
        JOIN: bar.warp.sync -1;
    """
    assert run(assemble(body + STORE, "out")).tolist() == [80000] + [0] * 31


@pytest.mark.parametrize("schedule", ["random", "round-robin", "ahead:0", "ahead:1"])
def test_lanes_wait_for_one_that_polls_for_another_warp_however_long_that_computes(assemble, schedule):
    """Lane 0 of warp 0 spins on a flag that warp 1 sets after a long loop; the others of warp 0 wait for lane 0."""
    body = """
        mov.u32 %r1, 0; setp.eq.u32 %p1, %tid, 0; @!%p1 bra MEET; st.volatile.shared.u32 [flag], %r1;
        MEET: bar.sync 0;
        setp.eq.u32 %p2, %warp, 1; @%p2 bra COMPUTE;
        @!%p1 bra JOIN;
        SPIN: ld.volatile.shared.u32 %r2, [flag]; setp.ne.u32 %p3, %r2, 7; @%p3 bra SPIN;
        JOIN: bar.warp.sync -1; mov.u32 %r1, 7; bra END;
        COMPUTE: add.u32 %r1, %r1, 1; setp.lt.u32 %p4, %r1, 12000; @%p4 bra COMPUTE;
        mov.u32 %r3, 7; setp.eq.u32 %p5, %tid, 32; @%p5 st.volatile.shared.u32 [flag], %r3;
        END:
    """
    program = assemble(body + STORE, "out", shared=".shared .u32 flag;")
    for seed in range(2):
        out = np.zeros(64, np.uint32)
        result = program.launch("k", 1, 64, 0, [out], seed=seed, schedule=schedule)
        assert result.hazards == [], [str(hazard) for hazard in result.hazards]
        assert out.tolist() == [7] * 32 + [12000] * 32


def test_a_lane_that_computes_without_a_turn_for_long_does_not_poll(assemble):
    """A lane of each of 32 warps computes while its warp's others wait for it: some have no turn between two looks of the machine."""
    body = """
        mov.u32 %r1, 0; setp.eq.u32 %p1, %lane, 0; @!%p1 bra JOIN;
        LOOP: add.u32 %r1, %r1, 1; setp.lt.u32 %p2, %r1, 4000; @%p2 bra LOOP;
        JOIN: bar.warp.sync -1;
    """
    program = assemble(body + STORE, "out")
    for seed in range(2):
        out = np.zeros(1024, np.uint32)
        result = program.launch("k", 1, 1024, 0, [out], seed=seed)
        assert result.hazards == [], [str(hazard) for hazard in result.hazards]
        assert out.tolist() == ([4000] + [0] * 31) * 32


def test_a_lane_that_polls_for_one_that_waits_for_it_is_reported(assemble):
    """A warp's lanes meet at a barrier; one of them waits for what another will write only after it."""
    body = """
        mov.u32 %r1, 0; setp.eq.u32 %p1, %lane, 0; @!%p1 bra JOIN;
        SPIN: ld.volatile.shared.u32 %r1, [flag]; setp.ne.u32 %p2, %r1, 7; @%p2 bra SPIN;
        JOIN: bar.warp.sync -1;
        setp.eq.u32 %p3, %lane, 1; mov.u32 %r3, 7; @%p3 st.volatile.shared.u32 [flag], %r3;
    """
    zero = "mov.u32 %r9, 0; st.volatile.shared.u32 [flag], %r9; bar.warp.sync -1;"
    program = assemble(zero + body + STORE, "out", shared=".shared .u32 flag;")
    result = program.launch("k", 1, 32, 0, [np.zeros(32, np.uint32)])
    assert "barrier" in {hazard.kind for hazard in result.hazards}
    assert any("executed by part of warp 0 only" in hazard.message for hazard in result.hazards)


def test_one_lane_may_wait_for_another_of_its_warp(assemble):
    """Independent thread scheduling: lane 0 spins on a flag that lane 1 sets on the other path."""
    body = """
        mov.u32 %r1, 0; setp.eq.u32 %p1, %lane, 0; @!%p1 bra OTHER;
        SPIN: ld.volatile.shared.u32 %r2, [flag]; setp.ne.u32 %p2, %r2, 7; @%p2 bra SPIN;
        mov.u32 %r1, 5; bra JOIN;
        OTHER: setp.eq.u32 %p3, %lane, 1; mov.u32 %r3, 7; @%p3 st.volatile.shared.u32 [flag], %r3;
        JOIN: bar.warp.sync -1;
    """
    for seed in SEEDS:
        program = assemble(
            "mov.u32 %r9, 0; st.volatile.shared.u32 [flag], %r9; bar.warp.sync -1;" + body + STORE,
            "out",
            shared=".shared .u32 flag;",
        )
        assert run(program, seed=seed).tolist() == [5] + [0] * 31


@pytest.mark.parametrize(
    ("mode", "b", "c", "source", "valid"),
    [
        ("bfly", 5, 31, lambda i: i ^ 5, lambda i: True),
        ("up", 3, 0, lambda i: i - 3 if i >= 3 else i, lambda i: i >= 3),
        ("down", 4, 31, lambda i: i + 4 if i + 4 <= 31 else i, lambda i: i + 4 <= 31),
        ("idx", 9, 31, lambda i: 9, lambda i: True),
        # Segments of eight lanes: width 8 makes c = ((32 - 8) << 8) | clamp.
        ("up", 2, 0x1800, lambda i: i - 2 if i % 8 >= 2 else i, lambda i: i % 8 >= 2),
        ("idx", 3, 0x181F, lambda i: i // 8 * 8 + 3, lambda i: True),
    ],
)
def test_shuffles(assemble, mode, b, c, source, valid):
    body = f"mad.lo.u32 %r2, %lane, 10, 7; shfl.sync.{mode}.b32 %r1|%p1, %r2, {b}, {c}, -1; @!%p1 add.u32 %r1, %r1, 1000;"
    assert run(assemble(body + STORE, "out")).tolist() == [10 * source(i) + 7 + (0 if valid(i) else 1000) for i in range(32)]


def test_votes_matches_elections_and_reductions(assemble):
    body = """
        and.b32 %r2, %lane, 1; setp.eq.u32 %p1, %r2, 1; vote.sync.ballot.b32 %r3, %p1, -1; vote.sync.any.pred %p2, %p1, -1;
        vote.sync.all.pred %p3, !%p1, -1; vote.sync.uni.pred %p4, %p1, -1;
        elect.sync %r4|%p5, -1; activemask.b32 %r5; redux.sync.add.s32 %r6, %lane, -1; redux.sync.max.u32 %r7, %lane, -1;
        shr.u32 %r8, %lane, 3; match.any.sync.b32 %r9, %r8, -1;
        selp.b32 %r10, 1, 0, %p2; selp.b32 %r11, 2, 0, %p3; selp.b32 %r12, 4, 0, %p4; selp.b32 %r13, 8, 0, %p5;
        or.b32 %r10, %r10, %r11; or.b32 %r10, %r10, %r12; or.b32 %r10, %r10, %r13;
        mul.lo.u32 %r14, %tid, 32; cvt.u64.u32 %rd1, %r14; add.s64 %rd1, %rd60, %rd1;
        st.global.v4.u32 [%rd1], {%r3, %r4, %r5, %r6}; st.global.v4.u32 [%rd1+16], {%r7, %r9, %r10, %r8};
    """
    out = run(assemble(body, "out"), words=256).reshape(32, 8)
    assert (out[:, 0] == 0xAAAAAAAA).all()
    assert (out[:, 1] == 0).all()
    assert (out[:, 2] == 0xFFFFFFFF).all()
    assert (out[:, 3] == 496).all()
    assert (out[:, 4] == 31).all()
    assert [hex(x) for x in out[:, 5]] == [hex(0xFF << 8 * (i // 8)) for i in range(32)]
    assert out[:, 6].tolist() == [9] + [1] * 31


def test_elect_in_a_branch_counts_only_its_lanes(assemble):
    body = """
        mov.u32 %r1, 0; setp.lt.u32 %p1, %lane, 20; @%p1 bra JOIN;
        elect.sync %r2|%p2, 0xfff00000; selp.b32 %r1, 1, 0, %p2;
        JOIN:
    """
    assert run(assemble(body + STORE, "out")).tolist() == [int(i == 20) for i in range(32)]


def test_barrier_orders_warps_and_reductions_see_every_thread(assemble):
    body = """
        shl.b32 %r2, %tid, 2; mov.u32 %r3, s; add.u32 %r3, %r3, %r2; st.shared.u32 [%r3], %tid; bar.sync 0;
        xor.b32 %r2, %r2, 508; mov.u32 %r3, s; add.u32 %r3, %r3, %r2; ld.shared.u32 %r1, [%r3];
        setp.lt.u32 %p1, %tid, 100; barrier.cta.red.popc.aligned.u32 %r4, 1, 128, %p1; bar.red.and.pred %p2, 1, 128, %p1;
        bar.red.or.pred %p3, 1, 128, !%p1; selp.b32 %r5, 1000, 0, %p2; selp.b32 %r6, 2000, 0, %p3;
        add.u32 %r1, %r1, %r5; add.u32 %r1, %r1, %r6; mul.lo.u32 %r4, %r4, 10000; add.u32 %r1, %r1, %r4;
    """
    program = assemble(body + STORE, "out", shared=".shared .align 4 .b8 s[512];")
    for seed in SEEDS:
        assert run(program, 128, seed).tolist() == [127 - i + 2000 + 100 * 10000 for i in range(128)]


def test_arrive_and_sync_pair_producers_with_consumers(assemble):
    """Warp 0 fills, arrives and goes on; warp 1 waits. Ids come from registers."""
    body = """
        mov.u32 %r9, 3; mov.u32 %r1, 0; setp.eq.u32 %p1, %warp, 1; @%p1 bra CONSUMER;
        shl.b32 %r2, %lane, 2; mov.u32 %r3, s; add.u32 %r3, %r3, %r2; st.shared.u32 [%r3], 42; bar.arrive %r9, 64; bra END;
        CONSUMER: barrier.cta.sync.aligned %r9, 64; shl.b32 %r2, %lane, 2; mov.u32 %r3, s; add.u32 %r3, %r3, %r2;
        ld.shared.u32 %r1, [%r3];
        END:
    """
    program = assemble(body + STORE, "out", shared=".shared .align 4 .b8 s[128];")
    for seed in SEEDS:
        assert run(program, 64, seed).tolist() == [0] * 32 + [42] * 32


def test_exited_warps_do_not_count_at_a_whole_cta_barrier(assemble):
    program = assemble("setp.ge.u32 %p1, %tid, 64; @%p1 exit; bar.sync 0; mov.u32 %r1, 1;" + STORE, "out")
    for seed in SEEDS:
        assert run(program, 128, seed).tolist() == [1] * 64 + [0] * 64


def test_partial_last_warp(assemble):
    program = assemble("bar.sync 0; vote.sync.ballot.b32 %r1, 1, -1;" + STORE, "out")
    assert run(program, 40).tolist() == [0xFFFFFFFF] * 32 + [0xFF] * 8


def test_branch_tables(assemble):
    body = """
        and.b32 %r2, %warp, 3;
        T: .branchtargets A, B, C;
        setp.gt.u32 %p1, %r2, 2; @%p1 bra D; brx.idx %r2, T;
        A: mov.u32 %r1, 10; bra END; B: mov.u32 %r1, 20; bra END; C: mov.u32 %r1, 30; bra END; D: mov.u32 %r1, 40;
        END:
    """
    assert run(assemble(body + STORE, "out"), 128).tolist() == [10 * (1 + i // 32) for i in range(128)]


def test_last_arriver_through_a_global_counter(assemble):
    """Fence, atomic counter, fence: the last CTA sees what all others wrote, and the checker agrees under every seed."""
    body = """
        mov.u32 %r2, %ctaid.x; setp.ne.u32 %p1, %tid, 0; @%p1 bra END; mul.wide.u32 %rd1, %r2, 4; add.s64 %rd1, %rd61, %rd1;
        add.u32 %r3, %r2, 1; st.global.u32 [%rd1], %r3; FENCE atom.global.add.u32 %r4, [%rd62], 1; FENCE
        setp.ne.u32 %p2, %r4, 4; @%p2 bra END; mov.u32 %r1, 0; mov.u32 %r5, 0;
        SUM: mul.wide.u32 %rd1, %r5, 4; add.s64 %rd1, %rd61, %rd1; ld.global.u32 %r6, [%rd1]; add.u32 %r1, %r1, %r6; add.u32 %r5, %r5, 1;
        setp.lt.u32 %p3, %r5, 5; @%p3 bra SUM; st.global.u32 [%rd60], %r1;
        END:
    """
    for fence in ("fence.acq_rel.gpu;", "membar.gl;"):
        program = assemble(body.replace("FENCE", fence), "out x counter")
        for seed in SEEDS:
            out, x, counter = np.zeros(1, np.uint32), np.zeros(5, np.uint32), np.zeros(1, np.uint32)
            result = program.launch("k", 5, 32, 0, [Uninitialized(out), Uninitialized(x), counter], seed=seed)
            assert not result.hazards, [str(h) for h in result.hazards]
            assert out[0] == 15
    # The atomic's own semantics serve as well.
    strong = assemble(body.replace("FENCE", "").replace("atom.global.add", "atom.global.acq_rel.gpu.add"), "out x counter")
    weak = assemble(body.replace("FENCE", ""), "out x counter")
    for seed in SEEDS:
        arrays = [np.zeros(1, np.uint32), np.zeros(5, np.uint32), np.zeros(1, np.uint32)]
        assert not strong.launch("k", 5, 32, 0, arrays, seed=seed).hazards
        arrays = [np.zeros(1, np.uint32), np.zeros(5, np.uint32), np.zeros(1, np.uint32)]
        assert {h.kind for h in weak.launch("k", 5, 32, 0, arrays, seed=seed).hazards} == {"race"}


def test_grid_wide_wait_starts_the_ctas_it_waits_for(assemble):
    """A CTA that spins on what a later CTA writes: release and acquire order the data."""
    body = """
        mov.u32 %r2, %ctaid.x; setp.ne.u32 %p1, %tid, 0; @%p1 bra END; setp.eq.u32 %p2, %r2, 2; @%p2 bra PRODUCE;
        SPIN: ld.acquire.gpu.global.u32 %r3, [%rd61]; setp.eq.u32 %p3, %r3, 0; @%p3 nanosleep.u32 20; @%p3 bra SPIN;
        ld.global.u32 %r4, [%rd62]; mul.wide.u32 %rd1, %r2, 4; add.s64 %rd1, %rd60, %rd1; st.global.u32 [%rd1], %r4; bra END;
        PRODUCE: st.global.u32 [%rd62], 99; st.release.gpu.global.u32 [%rd61], 1;
        END:
    """
    program = assemble(body, "out flag data")
    for seed in SEEDS:
        out, flag, data = np.zeros(3, np.uint32), np.zeros(1, np.uint32), np.zeros(1, np.uint32)
        result = program.launch("k", 3, 32, 0, [out, flag, Uninitialized(data)], seed=seed, budget=3_000_000)
        assert not result.hazards, [str(h) for h in result.hazards]
        assert out.tolist() == [99, 99, 0]


def test_runs_are_reproducible_and_seeds_differ(assemble):
    """The order in which warps reach a counter depends on the seed, and on nothing else."""
    body = "setp.ne.u32 %p1, %lane, 0; @%p1 bra END; atom.global.add.u32 %r1, [%rd61], 1;" + STORE + "END:"
    program = assemble(body, "out counter")

    def order(seed):
        return tuple(run(program, 256, seed, extra=[np.zeros(1, np.uint32)])[::32].tolist())

    orders = [order(seed) for seed in range(8)]
    assert orders == [order(seed) for seed in range(8)]
    assert all(sorted(o) == list(range(8)) for o in orders)
    assert len(set(orders)) > 3


def test_trap_names_its_line(assemble, line_of):
    program = assemble("setp.eq.u32 %p1, %tid, 33;\n@%p1 trap; // HERE", "")
    with pytest.raises(PtxError, match=f"line {line_of(program, 'HERE')}.*trap executed by warp 1"):
        program.launch("k", 1, 64)


@pytest.mark.parametrize(
    "instruction",
    [
        "shfl.sync.idx.b32 %r2, %r1, 20, 31, {members};",
        "vote.sync.ballot.b32 %r2, %p2, {members};",
        "redux.sync.add.u32 %r2, %r1, {members};",
        "match.any.sync.b32 %r2, %r1, {members};",
        "bar.warp.sync {members};",
    ],
)
def test_a_member_that_is_predicated_off_is_reported(assemble, instruction):
    """The member mask names lanes that have to execute the instruction: a predicate that stops some of them is as a branch around it."""
    body = "mov.u32 %r1, %tid; setp.ge.u32 %p2, %tid, 0; setp.lt.u32 %p1, %tid, {lanes}; @%p1 " + instruction + " mov.u32 %r1, 0;"
    for lanes, members, kinds in ((16, "0xffffffff", ["barrier"]), (16, "0xffff", []), (32, "0xffffffff", []), (0, "0xffffffff", [])):
        if "shfl" in instruction and members == "0xffff":
            continue  # it reads lane 20
        run(assemble(body.format(lanes=lanes, members=members) + STORE, "out"), kinds=kinds)
