"""Every check fires on its bug, with kind and line, under every seed where the schedule does not matter, and is silent on a twin."""

from __future__ import annotations

import numpy as np
import pytest

from fa4gen.codegen.emulator import PtxError, Uninitialized
from fa4gen.codegen.emulator.hazards import Shadow

pytestmark = pytest.mark.filterwarnings("error")

SEEDS = range(12)
SHARED = ".shared .align 16 .b8 s[1024];"
SLOT = "shl.b32 %r2, %tid, 2; mov.u32 %r3, s; add.u32 %r3, %r3, %r2;"
OTHER = "xor.b32 %r4, %r2, 128; mov.u32 %r5, s; add.u32 %r5, %r5, %r4;"


def launch(program, args=(), threads=64, seed=0, blocks=1):
    return program.launch("k", blocks, threads, 0, list(args), seed=seed)


def kinds(program, args=(), threads=64, seed=0, blocks=1):
    return {h.kind for h in launch(program, args, threads, seed, blocks).hazards}


# --------------------------------------------------------------------------------------------------------------------- races


def test_write_then_read_needs_a_barrier(assemble, line_of):
    body = SLOT + OTHER + "\nst.shared.u32 [%r3], %tid; // WRITE\n{sync}\nld.shared.u32 %r1, [%r5]; // READ\n"
    clean, racy = assemble(body.format(sync="bar.sync 0;"), shared=SHARED), assemble(body.format(sync=""), shared=SHARED)
    lines = {line_of(racy, "WRITE"), line_of(racy, "READ")}
    for seed in SEEDS:
        assert not kinds(clean, seed=seed)
        races = [h for h in launch(racy, seed=seed).hazards if h.kind == "race"]
        assert races, seed
        for race in races:
            assert {race.line, race.other.line} == lines
            assert {race.warp, int(race.other.warp.split()[-1])} == {0, 1}
            assert "shared+" in race.message
            assert f"PTX line {race.other.line}" in race.message


def test_read_then_overwrite_needs_a_barrier(assemble):
    """Reuse of a buffer: the second write must not pass the reads of the first."""
    body = SLOT + OTHER + "st.shared.u32 [%r3], %tid; bar.sync 0; ld.shared.u32 %r1, [%r5]; {sync} st.shared.u32 [%r3], %r1;"
    clean, racy = assemble(body.format(sync="bar.sync 0;"), shared=SHARED), assemble(body.format(sync=""), shared=SHARED)
    for seed in SEEDS:
        assert not kinds(clean, seed=seed)
        assert kinds(racy, seed=seed) == {"race"}


def test_conflicts_are_by_the_byte(assemble):
    """Two warps write the two halves of each word: no conflict. One byte further, there is one."""
    body = """
        mul.lo.u32 %r2, %warp, {step}; shl.b32 %r3, %lane, 2; add.u32 %r2, %r2, %r3; mov.u32 %r4, s; add.u32 %r4, %r4, %r2;
        st.shared.u{bits} [%r4], %tid;
    """
    for seed in SEEDS:
        assert not kinds(assemble(body.format(step=2, bits=16), shared=SHARED), seed=seed)
        assert kinds(assemble(body.format(step=1, bits=8), shared=SHARED), seed=seed) == set()
        assert kinds(assemble(body.format(step=0, bits=16), shared=SHARED), seed=seed) == {"race"}


def test_warps_of_one_cta_race_in_global_memory(assemble):
    body = """
        mul.wide.u32 %rd1, %lane, 4; add.s64 %rd1, %rd60, %rd1; setp.eq.u32 %p1, %warp, 0; @%p1 st.global.u32 [%rd1], %tid; {sync}
        @!%p1 ld.global.u32 %r1, [%rd1];
    """
    clean, racy = assemble(body.format(sync="bar.sync 0;"), "x"), assemble(body.format(sync=""), "x")
    for seed in SEEDS:
        x = np.zeros(32, np.uint32)
        assert not kinds(clean, [Uninitialized(x)], seed=seed)
        assert kinds(racy, [np.zeros(32, np.uint32)], seed=seed) == {"race"}


def test_ctas_race_in_global_memory_whatever_their_order(assemble):
    body = "mul.wide.u32 %rd1, %tid, 4; add.s64 %rd1, %rd60, %rd1; mov.u32 %r2, %ctaid.x; {write}"
    writes = assemble(body.format(write="st.global.u32 [%rd1], %r2;"), "x")
    read = assemble(body.format(write="setp.eq.u32 %p1, %r2, 0; @%p1 st.global.u32 [%rd1], %r2; @!%p1 ld.global.u32 %r3, [%rd1];"), "x")
    reads = assemble(body.format(write="ld.global.u32 %r3, [%rd1];"), "x")
    own = assemble(body.format(write="mul.wide.u32 %rd2, %r2, 128; add.s64 %rd1, %rd1, %rd2; st.global.u32 [%rd1], %r2;"), "x")
    for seed in SEEDS:
        for program, expected in ((writes, {"race"}), (read, {"race"}), (reads, set()), (own, set())):
            assert kinds(program, [np.zeros(96, np.uint32)], 32, seed, blocks=3) == expected


def test_two_barriers_that_do_not_include_both_warps_order_nothing(assemble):
    """Four warps, barriers 1 and 2 of two warps each: warp 0's data reaches warp 1, not warp 2."""
    body = (
        SLOT
        + """
        shr.u32 %r6, %warp, 1; add.u32 %r6, %r6, 1; setp.eq.u32 %p1, %warp, 0; @%p1 st.shared.u32 [s], %warp; bar.sync %r6, 64;
        setp.eq.u32 %p2, %warp, {reader}; @%p2 ld.shared.u32 %r1, [s];
    """
    )
    clean, racy = assemble(body.format(reader=1), shared=SHARED), assemble(body.format(reader=2), shared=SHARED)
    for seed in SEEDS:
        assert not kinds(clean, threads=128, seed=seed)
        assert "race" in kinds(racy, threads=128, seed=seed)


def test_order_is_transitive_through_another_warp(assemble):
    """0 -> barrier 1 -> 1 -> barrier 2 -> 2 orders 0 before 2."""
    body = """
        setp.ne.u32 %p0, %warp, 0; @%p0 bra B; st.shared.u32 [s], 7; bar.arrive 1, 64; bra END;
        B: setp.ne.u32 %p1, %warp, 1; @%p1 bra C; bar.sync 1, 64; bar.arrive 2, 64; bra END;
        C: bar.sync 2, 64; ld.shared.u32 %r1, [s]; END:
    """
    broken = body.replace("bar.sync 1, 64; bar.arrive 2, 64;", "bar.arrive 2, 64; bar.sync 1, 64;")
    for seed in SEEDS:
        assert not kinds(assemble(body, shared=SHARED), threads=96, seed=seed)
        assert "race" in kinds(assemble(broken, shared=SHARED), threads=96, seed=seed)


def test_strong_accesses_do_not_race_with_each_other(assemble):
    strong = assemble(
        "red.shared.add.u32 [s], 1; ld.relaxed.cta.shared.u32 %r1, [s];".join(
            ("setp.eq.u32 %p1, %tid, 0; @%p1 st.shared.u32 [s], 0; bar.sync 0;", "")
        ),
        shared=SHARED,
    )
    mixed = assemble(
        "setp.eq.u32 %p1, %tid, 0; @%p1 st.shared.u32 [s], 0; bar.sync 0; red.shared.add.u32 [s], 1; ld.shared.u32 %r1, [s];", shared=SHARED
    )
    for seed in SEEDS:
        assert not kinds(strong, seed=seed)
        assert kinds(mixed, seed=seed) == {"race"}


def test_release_and_acquire_in_shared_memory(assemble):
    body = """
        setp.eq.u32 %p9, %tid, 0; @%p9 st.shared.u32 [s], 0; bar.sync 0; setp.ne.u32 %p0, %lane, 0; @%p0 bra END;
        setp.ne.u32 %p1, %warp, 0; @%p1 bra CONSUMER; st.shared.u32 [s+4], 5; st.{release}.shared.u32 [s], 1; bra END;
        CONSUMER: ld.{acquire}.shared.u32 %r1, [s]; setp.eq.u32 %p2, %r1, 0; @%p2 bra CONSUMER; ld.shared.u32 %r2, [s+4]; END:
    """
    clean = assemble(body.format(release="release.cta", acquire="acquire.cta"), shared=SHARED)
    for seed in SEEDS:
        assert not kinds(clean, seed=seed)
        for release, acquire in (("relaxed.cta", "acquire.cta"), ("release.cta", "relaxed.cta"), ("volatile", "volatile")):
            assert kinds(assemble(body.format(release=release, acquire=acquire), shared=SHARED), seed=seed) == {"race"}


# ------------------------------------------------------------------------------------------------------------------ barriers


def test_two_groups_sharing_one_barrier_id_are_found(assemble):
    """Two warpgroups exchange through their own buffers, but with one barrier id: generations mix under some schedules."""
    body = """
        shr.u32 %r10, %tid, 7; and.b32 %r11, %tid, 127; shl.b32 %r12, %r10, 9; shl.b32 %r13, %r11, 2; add.u32 %r12, %r12, %r13;
        mov.u32 %r14, s; add.u32 %r14, %r14, %r12; xor.b32 %r15, %r12, 384; mov.u32 %r16, s; add.u32 %r16, %r16, %r15;
        mov.u32 %r17, {ids};
        st.shared.u32 [%r14], %tid; bar.sync %r17, 128; ld.shared.u32 %r1, [%r16];
    """
    shared, separate = assemble(body.format(ids=1), shared=SHARED), assemble(body.format(ids="%r10"), shared=SHARED)
    found = [kinds(shared, threads=256, seed=seed) for seed in SEEDS]
    assert sum("race" in f for f in found) >= 3
    for seed in SEEDS:
        assert not kinds(separate, threads=256, seed=seed)


@pytest.mark.parametrize(
    ("body", "threads", "words"),
    [
        ("mov.u32 %r9, 16;\nbar.sync %r9, 64; // HERE", 64, "not in 0..15"),
        ("mov.u32 %r9, 40;\nbar.sync 1, %r9; // HERE", 64, "not a multiple of 32"),
        ("setp.eq.u32 %p1, %warp, 0;\n@%p1 bar.sync 1, 64;\n@!%p1 bar.sync 1, 96;", 64, "named"),
        ("setp.lt.u32 %p1, %lane, 16; @%p1 bra L;\nbar.sync 0; // HERE\nbra END; L: bar.sync 0; END:", 32, "part of warp 0"),
        ("setp.lt.u32 %p1, %lane, 16;\n@%p1 bar.sync 0; // HERE", 32, "part of warp 0"),
    ],
)
def test_misused_barriers(assemble, line_of, body, threads, words):
    program = assemble(body)
    for seed in SEEDS:
        found = [h for h in launch(program, threads=threads, seed=seed).hazards if h.kind == "barrier"]
        assert found
        assert any(words in h.message for h in found)
        if "HERE" in body:
            assert line_of(program, "HERE") in {h.line for h in found}


def test_a_warp_arriving_twice_is_found(assemble):
    """128 arrivals in which one warp counts twice release the others too early."""
    program = assemble("setp.ne.u32 %p1, %warp, 0; @!%p1 bar.arrive 1, 128; @!%p1 bar.arrive 1, 128; @%p1 bar.sync 1, 128;")
    found = [launch(program, threads=96, seed=seed).hazards for seed in SEEDS]
    assert any("second time" in h.message for hs in found for h in hs)


def test_divergent_loop_around_a_barrier(assemble):
    body = "mov.u32 %r1, 0; L: bar.sync 0; add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, {n}; @%p1 bra L; bar.sync 1;"
    for seed in SEEDS:
        assert not kinds(assemble(body.format(n=3)), seed=seed)
        assert "barrier" in kinds(assemble("and.b32 %r9, %lane, 1; add.u32 %r9, %r9, 1;" + body.format(n="%r9")), seed=seed)


# ------------------------------------------------------------------------------------------------------------------ deadlocks


def test_deadlock_names_every_waiting_warp(assemble, line_of):
    """A 96-thread barrier with 64 threads, and a warp that waits for an mbarrier phase nobody completes."""
    program = assemble(
        """
        setp.eq.u32 %p1, %tid, 0; @%p1 mbarrier.init.shared::cta.b64 [s], 3; bar.sync 0; setp.eq.u32 %p2, %warp, 2; @%p2 bra W;
        bar.sync 5, 96; // BAR
        bra END; W: setp.eq.u32 %p0, %lane, 0; @%p0 mbarrier.arrive.shared.b64 _, [s];
        SPIN: mbarrier.try_wait.parity.shared.b64 %p3, [s], 0; // WAIT
        @!%p3 bra SPIN; END:
        """,
        shared=SHARED,
    )
    for seed in SEEDS:
        found = [h for h in launch(program, threads=96, seed=seed).hazards if h.kind == "deadlock"]
        assert len(found) == 1
        text = found[0].message
        for part in (
            f"warps 0-1 at PTX line {line_of(program, 'BAR')} wait for barrier 5 (64 of 96 threads have arrived)",
            f"warp 2 at PTX line {line_of(program, 'WAIT')} waits for mbarrier shared+0x0",
            "phase 0, parity 0",
            "2 of 3 arrivals pending",
        ):
            assert part in text, text


def test_waiting_on_the_wrong_parity_deadlocks(assemble):
    body = """
        setp.eq.u32 %p1, %tid, 0; @%p1 mbarrier.init.shared.b64 [s], 32; bar.sync 0; setp.eq.u32 %p2, %warp, 1; @%p2 bra W;
        mbarrier.arrive.shared.b64 %rd1, [s]; bra END; W: SPIN: mbarrier.try_wait.parity.shared.b64 %p3, [s], {p}; @!%p3 bra SPIN; END:
    """
    for seed in SEEDS:
        assert not kinds(assemble(body.format(p=0), shared=SHARED), seed=seed)
    # Parity 1 passes on the fresh barrier, and blocks for good once phase 0 has completed.
    found = [kinds(assemble(body.format(p=1), shared=SHARED), seed=seed) for seed in SEEDS]
    assert {"deadlock"} in found
    assert set() in found


def test_polling_two_barriers_in_turn_is_no_deadlock(assemble):
    """A warp that polls A then B must get false from A's test, although A never completes before B is served."""
    program = assemble(
        """
        setp.eq.u32 %p1, %tid, 0; @%p1 mbarrier.init.shared.b64 [s], 1; @%p1 mbarrier.init.shared.b64 [s+8], 1;
        @%p1 mbarrier.init.shared.b64 [s+16], 1; bar.sync 0;
        setp.ne.u32 %p9, %lane, 0; @%p9 bra END; setp.eq.u32 %p2, %warp, 1; @%p2 bra OTHER;
        POLL: mbarrier.try_wait.parity.shared.b64 %p3, [s], 0; @%p3 bra END; mbarrier.test_wait.parity.shared.b64 %p4, [s+8], 0;
        @!%p4 bra POLL;
        mbarrier.arrive.shared.b64 _, [s+16]; mov.u32 %r1, 1;
        LAST: mbarrier.try_wait.parity.shared.b64 %p3, [s], 0; @!%p3 bra LAST; bra END;
        OTHER: mbarrier.arrive.shared.b64 _, [s+8]; W: mbarrier.try_wait.parity.shared.b64 %p5, [s+16], 0; @!%p5 bra W;
        mbarrier.arrive.shared.b64 _, [s];
        END:
        """,
        shared=SHARED,
    )
    for seed in SEEDS:
        assert not kinds(program, seed=seed)


@pytest.mark.parametrize(
    "spin", ["ld.volatile.shared.u32 %r1, [s];", "atom.shared.cas.b32 %r1, [s], 1, 2;", "ld.relaxed.gpu.global.u32 %r1, [%rd60];"]
)
def test_spinning_for_good_is_a_deadlock(assemble, line_of, spin):
    """Polling memory that nobody writes ends with the report, well before the budget."""
    body = f"""
        setp.eq.u32 %p1, %tid, 0; @%p1 st.volatile.shared.u32 [s], 0; bar.sync 0; setp.eq.u32 %p3, %warp, 1; @%p3 bra W;
        L: {spin} setp.ne.u32 %p2, %r1, 0;
        @!%p2 bra L; // SPIN
        bra END; W: bar.sync 1, 64; END:
    """
    program = assemble(body, "flag", shared=SHARED)
    found = program.launch("k", 1, 64, 0, [np.zeros(1, np.uint32)], budget=1_000_000).hazards
    assert [h.kind for h in found] == ["deadlock"]
    assert "warp 0 spins at PTX line" in found[0].message
    assert "warp 1 at PTX line" in found[0].message


def test_spinning_on_what_a_bulk_store_writes_ends(assemble):
    """Asynchronous bytes land although the warps never stop running: here a flag written by a bulk store."""
    body = """
        setp.ne.u32 %p1, %tid, 0; @%p1 bra END; mov.u32 %r1, 1; st.shared.v4.u32 [s], {%r1, %r1, %r1, %r1}; fence.proxy.async.shared::cta;
        cp.async.bulk.global.shared::cta.bulk_group [%rd60], [s], 16; cp.async.bulk.commit_group;
        L: ld.volatile.global.u32 %r2, [%rd60]; setp.eq.u32 %p2, %r2, 0; @%p2 bra L; cp.async.bulk.wait_group 0; END:
    """
    program = assemble(body, "flag", shared=SHARED)
    for seed in SEEDS:
        assert kinds(program, [np.zeros(4, np.uint32)], 32, seed) == {"race"}


def test_findings_before_an_instruction_that_cannot_be_executed_are_kept(assemble):
    program = assemble("st.global.u32 [%rd60+4], %tid; bar.sync 0; trap;", "a")
    with pytest.raises(PtxError, match="trap") as error:
        program.launch("k", 1, 64, 0, [np.zeros(2, np.uint32)])
    assert {hazard.kind for hazard in error.value.hazards} == {"race"}


def test_a_deadlock_in_every_cta_of_a_huge_grid_ends(assemble):
    """No CTA can go on, and starting another never helps: that is known once as many wait as can be resident."""
    program = assemble("bar.sync 0, 64;")
    result = program.launch("k", 1 << 20, 32, 200_000)
    assert {hazard.kind for hazard in result.hazards} == {"deadlock"}
    assert len(str(result.hazards[0])) < 2000


def shadow_conflicts(shadow: Shadow, index, limits: list[int], write: bool = True) -> list[list[int]]:
    parts, _ = shadow.conflicts(index, np.array(limits, np.int64), write, False)
    return [np.flatnonzero(bad).tolist() for bad, _ in parts]


@pytest.mark.parametrize("columns", [0, 512])
def test_bounds_of_regions_hide_no_read(columns):
    """Random reads by a few actors whose time goes on, against all reads looked at one by one; accesses of nothing included."""
    rng = np.random.default_rng(columns)
    shadow = Shadow(4096, 0, columns)
    model = np.zeros((3, 4096), np.int64)
    now = [1, 1, 1]
    for _ in range(300):
        actor = int(rng.integers(3))
        now[actor] += int(rng.integers(2))
        index = rng.integers(4096) + np.arange(int(rng.integers(0, 40))) * int(rng.choice([1, 16, 600]))
        index = index[index < 4096]
        epochs = (rng.integers(32, size=len(index)) << 16) | actor | now[actor] << 40
        shadow.note_read(index, epochs, actor)
        model[actor, index] = epochs
        limits = [(now[each] - int(rng.integers(3))) << 40 | (1 << 40) - 1 for each in range(3)]
        start = int(rng.integers(4000))
        for written in (rng.integers(4096, size=int(rng.integers(0, 20))), slice(start, start + int(rng.integers(1, 96)))):
            bad = [np.flatnonzero(model[each][written] > limits[each]).tolist() for each in range(3)]
            assert sorted(shadow_conflicts(shadow, written, limits)) == sorted(places for places in bad if places)
