"""Schedules, and systematic exploration of the orders of synchronisation events."""

from __future__ import annotations

import numpy as np
import pytest

from fa4gen.codegen.emulator import LaunchError, Uninitialized
from fa4gen.codegen.emulator.explore import Effect, dependent, is_event

pytestmark = pytest.mark.filterwarnings("error")

SHARED = ".shared .align 16 .b8 s[1024];"
SCHEDULES = ["random", "round-robin", "starve:0", "starve:1-3", "ahead:0", "ahead:2,3", "starve:async", "ahead:async"]

ORDER = """
    setp.ne.u32 %p0, %lane, 0; @%p0 bra END; mov.u32 %r3, 0;
    L: atom.global.add.u32 %r1, [%rd60], 1; mul.wide.u32 %rd1, %r1, 4; add.s64 %rd1, %rd60, %rd1; st.global.u32 [%rd1+4], %warp;
    add.u32 %r3, %r3, 1; setp.lt.u32 %p1, %r3, 40; @%p1 bra L; END:
"""


def order(assemble, schedule, seed=0):
    """The warps (4, 40 turns each) in the order in which they took a ticket."""
    out = np.zeros(161, np.uint32)
    result = assemble(ORDER, "x").launch("k", 1, 128, 0, [out], seed=seed, schedule=schedule)
    assert not result.hazards
    assert out[0] == 160
    return out[1:].tolist()


def test_policies_do_what_they_say(assemble):
    for seed in range(6):
        starved = order(assemble, "starve:1-2", seed)
        assert set(starved[:80]) == {0, 3}
        assert set(starved[80:]) == {1, 2}
        ahead = order(assemble, "ahead:2", seed)
        assert ahead[:40] == [2] * 40
        turns = order(assemble, "round-robin", seed)
        first = [turns.index(w) for w in range(4)]
        assert first == sorted(first)
        assert order(assemble, "starve:1-2", seed) == starved
    assert len({tuple(order(assemble, "random", seed)) for seed in range(6)}) > 1


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_starved_warp_that_others_poll_for_still_comes(assemble, schedule):
    """Warps 1 to 3 spin on memory that warp 0 writes."""
    body = """
        setp.ne.u32 %p0, %lane, 0; @%p0 bra END; setp.eq.u32 %p1, %warp, 0; @%p1 bra WRITER;
        SPIN: ld.acquire.cta.global.u32 %r1, [%rd60]; setp.eq.u32 %p2, %r1, 0; @%p2 bra SPIN; ld.global.u32 %r2, [%rd60+16]; bra END;
        WRITER: st.global.u32 [%rd60+16], 5; st.release.cta.global.u32 [%rd60], 1; END:
    """
    for seed in range(4):
        assert not assemble(body, "x").launch("k", 1, 128, 0, [np.zeros(8, np.uint32)], seed=seed, schedule=schedule).hazards


@pytest.mark.parametrize("schedule", ["fair", "starve", "starve:", "ahead:x", "starve:3-1", "round-robin:2", "ahead:1,,2", "starve:99999"])
def test_unknown_schedules(assemble, schedule):
    with pytest.raises(LaunchError, match="schedule") as error:
        assemble("ret;").launch("k", 1, 32, schedule=schedule)
    assert "\n" not in str(error.value)


# ----------------------------------------------------------------------------------------------------------------- exploration


def test_which_instructions_are_events():
    events = [
        "bar.sync",
        "barrier.sync.aligned",
        "mbarrier.arrive.expect_tx.shared.b64",
        "atom.global.add.u32",
        "red.relaxed.gpu.global.add.u32",
    ]
    events += ["ld.acquire.gpu.global.u32", "st.volatile.shared.u32", "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32"]
    others = [
        "bar.warp.sync",
        "mbarrier.try_wait.parity.shared.b64",
        "redux.sync.add.s32",
        "ld.global.u32",
        "st.shared.u32",
        "fence.acq_rel.gpu",
    ]
    assert all(map(is_event, events))
    assert not any(map(is_event, others))


def test_dependence():
    first, second = Effect("a", 0), Effect("a", 1)
    assert not dependent((first,), (first,))
    assert dependent((first,), (second,))
    assert not dependent((first,), (Effect("b", 1),))
    assert dependent((first,), (Effect("a", 0, exclusive=True),))
    assert not dependent((Effect("m", 0, True, True),), (Effect("m", 0, True, True),))
    assert dependent((Effect("m", 0, True, True),), (Effect("m", 0, True),))


def explore(assemble, body, threads, args=(), **options):
    return assemble(body, "x", shared=SHARED).explore("k", 1, threads, 0, args or [np.zeros(4, np.uint32)], **options)


@pytest.mark.parametrize("warps", [1, 2, 3, 4])
def test_every_order_of_independent_atomics_is_tried(assemble, warps):
    body = "setp.ne.u32 %p0, %lane, 0; @%p0 bra END; atom.global.exch.b32 %r1, [%rd60], %tid; END:"
    found = explore(assemble, body, 32 * warps)
    factorial = [1, 1, 2, 6, 24][warps]
    assert (found.complete, found.interleavings, found.events, found.outputs) == (True, factorial, warps, warps)
    assert str(found).startswith(f"all {factorial} interleaving")


def test_reads_alone_have_one_order(assemble):
    body = "setp.ne.u32 %p0, %lane, 0; @%p0 bra END; ld.relaxed.gpu.global.u32 %r1, [%rd60]; END:"
    found = explore(assemble, body, 128)
    assert (found.complete, found.interleavings, found.outputs) == (True, 1, 1)


def test_barriers_in_turn_have_one_order(assemble):
    body = "st.shared.u32 [s], 1; bar.sync 0; ld.shared.u32 %r1, [s]; bar.sync 1; bar.sync 0; st.shared.u32 [s], %r1;"
    body = "setp.eq.u32 %p1, %tid, 0; @%p1 st.shared.u32 [s], 1; bar.sync 0; ld.shared.u32 %r1, [s]; bar.sync 1; bar.sync 0;"
    found = explore(assemble, body, 128)
    assert (found.complete, found.interleavings, found.events, found.hazards) == (True, 1, 12, [])


def test_two_groups_sharing_a_barrier_are_found_without_luck(assemble):
    """Of the three ways to pair four arrivals in twos only one is right; a single schedule may well show none of the wrong ones."""
    body = """
        shr.u32 %r10, %tid, 6; and.b32 %r11, %tid, 63; shl.b32 %r12, %r10, 8; shl.b32 %r13, %r11, 2; add.u32 %r12, %r12, %r13;
        mov.u32 %r14, s; add.u32 %r14, %r14, %r12; xor.b32 %r15, %r12, 128; mov.u32 %r16, s; add.u32 %r16, %r16, %r15;
        st.shared.u32 [%r14], %tid; bar.sync {id}, 64; ld.shared.u32 %r1, [%r16];
    """
    shared = explore(assemble, body.format(id=1), 128)
    assert shared.complete
    assert shared.interleavings == 6
    assert {h.kind for h in shared.hazards} == {"race"}
    separate = explore(assemble, body.format(id="%r10"), 128)
    assert (separate.complete, separate.interleavings, separate.hazards) == (True, 1, [])


def test_a_deadlock_of_some_orders_only(assemble):
    """Two arrivals at an mbarrier of one: the second completes the next phase, and a wait that has not looked yet misses the first."""
    body = """
        setp.eq.u32 %p1, %tid, 0; @%p1 mbarrier.init.shared.b64 [s], 1; bar.sync 0; setp.ne.u32 %p9, %lane, 0; @%p9 bra E;
        setp.eq.u32 %p2, %warp, 0; @%p2 bra A; mbarrier.arrive.shared.b64 _, [s]; bra E;
        A: mbarrier.arrive.shared.b64 _, [s]; W: mbarrier.try_wait.parity.shared.b64 %p5, [s], 0; @!%p5 bra W; E:
    """
    found = explore(assemble, body, 64)
    assert (found.complete, found.interleavings, found.deadlocks) == (True, 2, 1)
    assert {"deadlock", "mbarrier"} <= {h.kind for h in found.hazards}
    assert "1 end in a deadlock" in str(found)


def test_copies_land_in_every_order(assemble):
    """Two loads that report to one mbarrier have one order that matters; a thread that polls two of them apart sees both."""
    start = """
        setp.eq.u32 %p1, %tid, 0; mov.u32 %r20, s; mov.u32 %r22, b; @!%p1 bra END;
        mbarrier.init.shared.b64 [b], 1; mbarrier.init.shared.b64 [b+8], 1; fence.mbarrier_init.release.cluster;
        mbarrier.arrive.expect_tx.shared.b64 _, [b], 16; mbarrier.arrive.expect_tx.shared.b64 _, [b+8], 16;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r20], [%rd60], 16, [%r22];
        add.u32 %r23, %r22, 8; add.u32 %r24, %r20, 16;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r24], [%rd60], 16, [%r23];
        W: mbarrier.try_wait.parity.shared.b64 %p2, [b], 0; @!%p2 bra W; V: mbarrier.try_wait.parity.shared.b64 %p2, [b+8], 0; @!%p2 bra V;
        END:
    """
    program = assemble(start, "x", shared=SHARED + ".shared .align 8 .b64 b[2];")
    found = program.explore("k", 1, 32, 0, [np.zeros(4, np.uint32)])
    assert (found.complete, found.interleavings, found.events, found.hazards) == (True, 1, 4, [])


def test_the_limit_is_kept_and_said(assemble):
    body = "setp.ne.u32 %p0, %lane, 0; @%p0 bra END; atom.global.exch.b32 %r1, [%rd60], %tid; END:"
    found = explore(assemble, body, 128, limit=5)
    assert not found.complete
    assert found.interleavings <= 5
    assert found.left > 0
    assert "stopped at the limit" in str(found)
    with pytest.raises(LaunchError, match="below 1"):
        explore(assemble, body, 128, limit=0)
    with pytest.raises(LaunchError, match="one CTA or one cluster"):
        assemble(body, "x").explore("k", 2, 32, 0, [np.zeros(4, np.uint32)])


def test_outputs_are_those_of_a_plain_launch(assemble):
    body = "mul.wide.u32 %rd1, %tid, 4; add.s64 %rd1, %rd60, %rd1; bar.sync 0; st.global.u32 [%rd1], %tid;"
    out = np.full(64, 7, np.uint32)
    found = explore(assemble, body, 64, [Uninitialized(out)])
    assert not found.hazards
    assert (out == np.arange(64)).all()
