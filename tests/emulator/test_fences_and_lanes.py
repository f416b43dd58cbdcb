"""fence.sc between threads, lanes of one warp against each other, and what is read before anything has written it."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.filterwarnings("error")

SEEDS = range(8)
SHARED = ".shared .align 16 .b32 s[64];"


def findings(program, args=(), threads=32, blocks=1, seed=0, **options):
    return program.launch("k", blocks, threads, 0, list(args), seed=seed, **options).hazards


def kinds(program, args=(), threads=32, blocks=1, **options):
    """Kinds found under any seed."""
    return {h.kind for seed in SEEDS for h in findings(program, [a.copy() for a in args], threads, blocks, seed, **options)}


# -------------------------------------------------------------------------------------------------------------------- fence.sc


LAST_CTA = """
    mul.wide.u32 %rd1, %tid, 4; add.s64 %rd1, %rd60, %rd1; mov.u32 %r1, %ctaid.x; mul.wide.u32 %rd2, %r1, 256; add.s64 %rd2, %rd1, %rd2;
    st.global.u32 [%rd2], %tid;
    {before}
    bar.sync 0;
    setp.ne.u32 %p1, %tid, 0; @%p1 bra JOIN;
    atom.relaxed.gpu.global.add.u32 %r2, [%rd61], 1; st.shared.u32 [s], %r2;
    JOIN: bar.sync 0;
    ld.shared.u32 %r3, [s]; setp.ne.u32 %p2, %r3, 1; @%p2 exit;
    {after}
    xor.b32 %r4, %r1, 1; mul.wide.u32 %rd3, %r4, 256; add.s64 %rd3, %rd1, %rd3; ld.global.u32 %r5, [%rd3]; // READ
    add.u32 %r5, %r5, 1; st.global.u32 [%rd1+512], %r5;
"""
"""Every thread of two CTAs writes; the last CTA to count itself reads what the other wrote."""


def last_cta(assemble, before, after):
    return assemble(LAST_CTA.format(before=before, after=after), "x n", shared=SHARED)


@pytest.mark.parametrize("fence", ["fence.sc.gpu;", "membar.gl;", "membar.sys;"])
def test_fences_of_all_threads_around_a_relaxed_atomic_of_one(assemble, fence):
    program = last_cta(assemble, fence, fence)
    for seed in SEEDS:
        x = np.zeros((3, 64), np.uint32)
        assert findings(program, [x, np.zeros(1, np.uint32)], 64, 2, seed) == []
        assert (x[2] == np.arange(64) + 1).all()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("fence.sc.gpu;", ""),
        ("", "fence.sc.gpu;"),
        ("fence.sc.cta;", "fence.sc.gpu;"),
        ("fence.sc.gpu;", "fence.sc.cluster;"),
        ("fence.acq_rel.gpu;", "fence.sc.gpu;"),
    ],
)
def test_fences_that_do_not_reach_each_other_give_no_order(assemble, before, after):
    program = last_cta(assemble, before, after)
    assert kinds(program, [np.zeros((3, 64), np.uint32), np.zeros(1, np.uint32)], 64, 2) == {"race"}


def test_fences_of_one_cta_and_of_one_cluster(assemble):
    """Two warps of one CTA, or two CTAs of a cluster: the narrower scope reaches."""
    body = """
        mov.u32 %r1, {who}; setp.ne.u32 %p1, %r1, 0; @%p1 bra READER; setp.ne.u32 %p3, %lane, 0; @%p3 exit;
        st.global.u32 [%rd60], 7; fence.sc.{scope}; st.relaxed.gpu.global.u32 [%rd61], 1; exit;
        READER: setp.ne.u32 %p3, %lane, 0; @%p3 exit;
        W: ld.relaxed.gpu.global.u32 %r2, [%rd61]; setp.eq.u32 %p2, %r2, 0; @%p2 bra W; {fence} ld.global.u32 %r3, [%rd60];
    """

    def found(who, scope, fence, **options):
        program = assemble(body.format(who=who, scope=scope, fence=fence), "x f")
        return {h.kind for s in SEEDS for h in findings(program, [np.zeros(1, np.uint32), np.zeros(1, np.uint32)], seed=s, **options)}

    assert found("%warp", "cta", "fence.sc.cta;", threads=64) == set()
    assert found("%warp", "cta", "", threads=64) == {"race"}
    assert found("%ctaid.x", "cluster", "fence.sc.cluster;", blocks=2, cluster=(2, 1, 1)) == set()
    assert found("%ctaid.x", "cta", "fence.sc.cta;", blocks=2, cluster=(2, 1, 1)) == {"race"}
    assert found("%ctaid.x", "cluster", "fence.sc.cluster;", blocks=2) == {"race"}


def test_what_other_clusters_have_passed_on_is_known_behind_a_fence(assemble):
    """CTA 0 -> CTA 1 -> CTA 2, each by fence.sc: CTA 2 may read what CTA 0 wrote."""
    body = """
        mov.u32 %r1, %ctaid.x; setp.ne.u32 %p3, %lane, 0; @%p3 exit; setp.eq.u32 %p1, %r1, 0; @%p1 bra FIRST;
        W: ld.relaxed.gpu.global.u32 %r2, [%rd61]; setp.lt.u32 %p2, %r2, %r1; @%p2 bra W; fence.sc.gpu;
        setp.eq.u32 %p4, %r1, 2; @%p4 bra LAST; fence.sc.gpu; st.relaxed.gpu.global.u32 [%rd61], 2; exit;
        LAST: ld.global.u32 %r3, [%rd60]; exit;
        FIRST: st.global.u32 [%rd60], 7; fence.sc.gpu; st.relaxed.gpu.global.u32 [%rd61], 1;
    """
    program = assemble(body, "x f")
    assert kinds(program, [np.zeros(1, np.uint32), np.zeros(1, np.uint32)], blocks=3) == set()


def test_exploration_tries_both_orders_of_two_fences(assemble):
    """Only one of the orders makes it right: the write happens before the read where its fence comes first."""
    body = """
        setp.ne.u32 %p3, %lane, 0; @%p3 exit; setp.ne.u32 %p1, %warp, 0; @%p1 bra READER; st.shared.u32 [s], 7; fence.sc.cta; exit;
        READER: fence.sc.cta; ld.shared.u32 %r3, [s];
    """
    result = assemble(body, shared=SHARED).explore("k", 1, 64, 0, [])
    assert result.complete
    assert result.interleavings == 2
    assert "race" in {h.kind for h in result.hazards}


# ----------------------------------------------------------------------------------------------------------------------- lanes


@pytest.mark.parametrize(
    ("address", "value", "kind"),
    [
        ("and.b32 %r2, %tid, 15;", "%tid", {"race"}),
        ("and.b32 %r2, %tid, 15;", "%r2", set()),
        ("xor.b32 %r2, %tid, 5;", "%tid", set()),
        ("mov.u32 %r2, 3;", "%lane", {"race"}),
        ("mov.u32 %r2, 3;", "9", set()),
    ],
)
@pytest.mark.parametrize("space", ["shared", "global", "generic"])
def test_lanes_that_store_to_one_place(assemble, line_of, space, address, value, kind):
    body = f"{address} shl.b32 %r3, %r2, 2; mov.u32 %r4, s; add.u32 %r4, %r4, %r3; cvt.u64.u32 %rd1, %r3; add.s64 %rd1, %rd60, %rd1;"
    body += f"st.{space}.u32 [{'%r4' if space == 'shared' else '%rd1'}], {value}; // STORE".replace("st.generic", "st")
    program = assemble(body, "x", shared=SHARED)
    found = findings(program, [np.zeros(64, np.uint32)])
    assert {h.kind for h in found} == kind
    if found:
        (race,) = found
        assert race.line == race.other.line == line_of(program, "STORE")
        assert race.lane != race.other.lane
        assert "which of them stays" in race.message
        assert race.place
        assert race.missing


def test_lanes_that_store_vectors_or_matrices_to_one_place(assemble):
    vector = "mov.u32 %r4, s; st.shared.v4.b32 [%r4], {1, 2, 3, %lane};"
    assert kinds(assemble(vector, shared=SHARED)) == {"race"}
    assert kinds(assemble(vector.replace("%lane}", "4}"), shared=SHARED)) == set()
    matrix = "mov.u32 %r4, s; mov.b32 %r5, {value}; stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r4], {{%r5}};"
    assert kinds(assemble(matrix.format(value="%lane"), shared=SHARED)) == {"race"}
    assert kinds(assemble(matrix.format(value="7"), shared=SHARED)) == set()


def test_atomics_and_strong_stores_of_lanes_to_one_place_are_no_race(assemble):
    for text in ("red.shared.add.u32 [s], 1;", "st.relaxed.cta.shared.u32 [s], %tid;"):
        assert kinds(assemble("st.shared.u32 [s], 0; bar.sync 0;" + text, shared=SHARED)) == set()


@pytest.mark.parametrize(("sync", "kind"), [("", {"race"}), ("bar.warp.sync -1;", set())])
def test_lanes_of_a_warp_hand_over_by_bar_warp_sync(assemble, sync, kind):
    """Whether the warp is converged or has diverged in between."""
    whole = f"shl.b32 %r1, %lane, 2; mov.u32 %r2, s; add.u32 %r2, %r2, %r1; st.shared.u32 [%r2], %lane; {sync} ld.shared.u32 %r3, [s];"
    assert kinds(assemble(whole, shared=SHARED)) == kind
    apart = f"""
        setp.eq.u32 %p1, %lane, 0; @!%p1 bra JOIN; st.shared.u32 [s], 7; JOIN: {sync}
        setp.eq.u32 %p2, %lane, 1; @%p2 ld.shared.u32 %r3, [s];
    """
    assert kinds(assemble(apart, shared=SHARED)) == kind


HAND_OVER = """
    setp.eq.u32 %p1, %tid, 0; mov.u32 %r9, bar; @%p1 mbarrier.init.shared.b64 [%r9], 1; bar.sync 0;
    setp.ge.u32 %p2, %tid, 32; @%p2 bra READ;
    shl.b32 %r1, %lane, 2; mov.u32 %r2, s; add.u32 %r2, %r2, %r1; setp.lt.u32 %p3, %lane, 4; setp.eq.u32 %p4, %lane, {leader};
    {body}
    bra DONE;
    READ: mbarrier.try_wait.parity.acquire.cta.shared.b64 %p5, [%r9], 0; @!%p5 bra READ;
    ld.shared.u32 %r3, [s+4];
    DONE:
"""
ARRIVE = "mbarrier.arrive.release.cta.shared.b64 %rd9, [%r9];"


@pytest.mark.parametrize(
    "body",
    [
        # All lanes; some, which have met the others again; some, one of which goes on alone.
        f"st.shared.u32 [%r2], %lane; SYNC @%p4 {ARRIVE}",
        f"@!%p3 bra JOIN; st.shared.u32 [%r2], %lane; JOIN: SYNC @%p4 {ARRIVE}",
        f"@!%p3 bra JOIN; st.shared.u32 [%r2], %lane; JOIN: SYNC @!%p4 bra OVER; {ARRIVE} OVER:",
        f"@!%p3 bra JOIN; st.shared.u32 [%r2], %lane; SYNC @!%p4 bra JOIN; {ARRIVE} JOIN:",
        # The same lanes have been apart before.
        f"@!%p3 bra MEET; add.u32 %r1, %r1, 0; MEET: @!%p3 bra JOIN; st.shared.u32 [%r2], %lane; JOIN: SYNC @!%p4 bra OVER; {ARRIVE} OVER:",
    ],
)
@pytest.mark.parametrize("leader", [0, 1, 3])
def test_an_arrival_releases_what_its_own_lane_did(assemble, body, leader):
    """Lane 1 stores, the leader arrives: only a bar.warp.sync between the two makes it a hand-over, unless they are one."""

    def found(sync: str) -> set[str]:
        text = HAND_OVER.format(leader=leader, body=body.replace("SYNC", sync))
        return kinds(assemble(text, shared=SHARED + " .shared .align 8 .b64 bar;"), threads=64)

    assert found("") == (set() if leader == 1 else {"race"})
    lanes = 0xF if "SYNC @!%p4 bra JOIN" in body else -1
    assert found(f"bar.warp.sync {lanes};") == set()


# -------------------------------------------------------------------------------------------------------- registers, local memory


def test_a_register_that_nothing_has_written(assemble, line_of):
    program = assemble("add.u32 %r1, %r2, 1; // READ", "out")
    (found,) = findings(program, [np.zeros(1, np.uint32)])
    assert (found.kind, found.line) == ("uninitialized", line_of(program, "READ"))
    assert "register %r2" in found.message
    assert found.place == "register %r2"


@pytest.mark.parametrize(
    ("body", "lane"),
    [
        ("setp.lt.u32 %p1, %lane, 5; @%p1 mov.u32 %r2, 1; add.u32 %r1, %r2, 1;", 5),
        ("setp.lt.u32 %p1, %lane, 5; @%p1 mov.u32 %r2, 1; @%p1 add.u32 %r1, %r2, 1;", None),
        ("setp.lt.u32 %p1, %lane, 5; @%p1 bra A; mov.u32 %r2, 1; A: add.u32 %r1, %r2, 1;", 0),
        ("setp.lt.u32 %p1, %lane, 5; @%p1 bra A; mov.u32 %r2, 1; bra B; A: mov.u32 %r2, 2; B: add.u32 %r1, %r2, 1;", None),
        ("setp.lt.u32 %p1, %lane, 40; @%p1 bra A; bra B; A: mov.u32 %r2, 1; B: add.u32 %r1, %r2, 1;", None),
        ("mov.u32 %r3, 0; L: setp.eq.u32 %p1, %r3, 0; @%p1 bra N; add.u32 %r1, %r2, 1; N: mov.u32 %r2, 1; add.u32 %r3, %r3, 1; "
         "setp.lt.u32 %p2, %r3, 3; @%p2 bra L;", None),
        ("@%p5 mov.u32 %r1, 0;", 0),
        ("st.global.u32 [%rd60], %r7;", 0),
        ("mov.b64 %rd1, {%r1, %r2};", 0),
        ("mov.b64 {%r1, %r2}, %rd60; add.u32 %r3, %r1, %r2;", None),
        ("ld.shared.v2.u32 {%r1, %r2}, [s]; add.u32 %r3, %r1, %r2;", None),
        ("mov.u32 %r4, s; ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r5}, [%r4]; add.u32 %r3, %r5, 1;", None),
        ("mov.u32 %r4, s; stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r4], {%r5};", 0),
        ("setp.eq.u32 %p1|%p2, %lane, 0; selp.u32 %r1, 1, 2, %p2;", None),
        ("cvt.f32.u32 %f1, %lane; cvt.rn.bf16.f32 %h1, %f1; mov.b16 %h2, %h1;", None),
        ("shfl.sync.bfly.b32 %r1|%p1, %lane, 1, 31, -1; @%p1 mov.u32 %r2, %r1;", None),
    ],
)  # fmt: skip
def test_paths_to_a_register(assemble, body, lane):
    zero = "shl.b32 %r90, %lane, 2; mov.u32 %r91, s; add.u32 %r91, %r91, %r90; st.shared.u32 [%r91], 0; st.shared.u32 [%r91+128], 0;"
    program = assemble(zero + "bar.sync 0;" + body, "x", shared=SHARED)
    found = [h for h in findings(program, [np.zeros(1, np.uint32)]) if h.kind == "uninitialized"]
    assert [h.lane for h in found] == ([] if lane is None else [lane])
    assert findings(program, [np.zeros(1, np.uint32)], check=False) == []


def test_local_memory_that_nothing_has_written(assemble, line_of):
    body = """
        .local .align 4 .b8 frame[16]; mov.u32 %r1, 4; st.local.u32 [frame], %r1; ld.local.u32 %r2, [frame];
        setp.lt.u32 %p1, %lane, 9; @%p1 st.local.u32 [frame+4], %r1; ld.local.u32 %r3, [frame+4]; // READ
    """
    program = assemble(body)
    (found,) = findings(program)
    assert (found.kind, found.line, found.lane) == ("uninitialized", line_of(program, "READ"), 9)
    assert "local+0x4" in found.message
    assert findings(program, check=False) == []
