"""Clusters: ranks, distributed shared memory, the cluster barrier, remote mbarriers, multicast copies and commits, and their checks."""

from __future__ import annotations

import numpy as np
import pytest

from fa4gen.codegen.emulator import LaunchError, Program, PtxError, TensorMap, Uninitialized

pytestmark = pytest.mark.filterwarnings("error")

SEEDS = range(8)
SYNC = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
# %r100: rank; %r101: rank of the next CTA; %r102: CTAs of the cluster.
RANKS = """
    mov.u32 %r100, %cluster_ctarank; mov.u32 %r102, %cluster_nctarank; add.u32 %r101, %r100, 1; rem.u32 %r101, %r101, %r102;
"""


def launch(program: Program, args: list, *, cluster=(2, 1, 1), grid=None, threads: int = 32, seed: int = 0, smem: int = 0):
    return program.launch("k", cluster if grid is None else grid, threads, smem, args, seed=seed, cluster=cluster)


def kinds(program: Program, args: list, **options) -> set[str]:
    return {h.kind for h in launch(program, args, **options).hazards}


def clean(program: Program, args: list, **options) -> None:
    result = launch(program, args, **options)
    assert not result.hazards, [str(h) for h in result.hazards]


# ----------------------------------------------------------------------------------------------------------- ranks and launches


def test_special_registers(assemble):
    names = [
        "%clusterid.x", "%clusterid.y", "%nclusterid.x", "%nclusterid.y", "%cluster_ctaid.x", "%cluster_ctaid.y", "%cluster_nctaid.x",
        "%cluster_nctaid.y", "%cluster_ctarank", "%cluster_nctarank", "%is_explicit_cluster", "%ctaid.x", "%ctaid.y",
    ]  # fmt: skip
    body = (
        "mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.y; mad.lo.u32 %r1, %r2, 4, %r1; mul.wide.u32 %rd1, %r1, 64; add.s64 %rd1, %rd60, %rd1;"
    )
    for i, name in enumerate(names):
        destination = "%p1" if name == "%is_explicit_cluster" else "%r3"
        convert = "selp.u32 %r3, 1, 0, %p1;" if destination == "%p1" else ""
        body += f"mov.{'pred' if convert else 'u32'} {destination}, {name}; {convert} st.global.u32 [%rd1+{4 * i}], %r3;"
    program = assemble("setp.ne.u32 %p2, %tid, 0; @%p2 exit;" + body, "out")
    for seed in SEEDS:
        out = np.zeros((16, 16), np.uint32)
        clean(program, [out], cluster=(2, 2, 1), grid=(4, 4, 1), seed=seed)
        for y in range(4):
            for x in range(4):
                expected = [x // 2, y // 2, 2, 2, x % 2, y % 2, 2, 2, x % 2 + 2 * (y % 2), 4, 1, x, y]
                assert out[4 * y + x, : len(names)].tolist() == expected


def test_launches_that_cannot_be_made(assemble):
    program = assemble("ret;")
    with pytest.raises(LaunchError, match="16 CTAs, more than 8"):
        launch(program, [], cluster=(4, 4, 1))
    with pytest.raises(LaunchError, match="is not a multiple of the cluster"):
        launch(program, [], cluster=(2, 1, 1), grid=(3, 1, 1))
    text = ".version 8.8\n.target sm_100a\n.address_size 64\n.visible .entry k() .explicitcluster .reqnctapercluster 2, 1, 1\n{ ret; }"
    required = Program.from_ptx(text)
    assert required.entries["k"].cluster == (2, 1, 1)
    required.launch("k", 4, 32)
    required.launch("k", 4, 32, cluster=(2, 1, 1))
    with pytest.raises(LaunchError, match="requires clusters"):
        required.launch("k", 4, 32, cluster=(4, 1, 1))
    with pytest.raises(LaunchError, match="not a multiple"):
        required.launch("k", 3, 32)
    limited = Program.from_ptx(text.replace(".reqnctapercluster 2, 1, 1", ".maxclusterrank 2"))
    with pytest.raises(LaunchError, match="4 CTAs, more than 2"):
        limited.launch("k", 4, 32, cluster=(4, 1, 1))


# -------------------------------------------------------------------------------------------------- distributed shared memory


def ring(first: str = SYNC, last: str = SYNC, generic: bool = False) -> str:
    """Every CTA reads the words of the next one, adds 1,000 to its own copy there, and returns both."""
    if generic:
        remote = "mov.u64 %rd2, box; cvta.shared.u64 %rd3, %rd2; mul.wide.u32 %rd4, %tid, 4; add.s64 %rd3, %rd3, %rd4;"
        remote += "mapa.u64 %rd5, %rd3, %r101;"
        read, write = "ld.u32 %r5, [%rd5];", "st.u32 [%rd5+128], %r6;"
    else:
        remote = "mapa.shared::cluster.u32 %r4, %r2, %r101;"
        read, write = "ld.shared::cluster.u32 %r5, [%r4];", "st.shared::cluster.u32 [%r4+128], %r6;"
    return (
        RANKS
        + "mov.u32 %r1, box; shl.b32 %r2, %tid, 2; add.u32 %r2, %r1, %r2; mad.lo.u32 %r3, %r100, 100, %tid; st.shared.u32 [%r2], %r3;"
        + remote
        + first
        + f"{read} // READ\n"
        + f"add.u32 %r6, %r5, 1000; {write} // WRITE\n"
        + last
        + "ld.shared.u32 %r7, [%r2+128]; mov.u32 %r8, %ctaid.x; mad.lo.u32 %r8, %r8, 32, %tid;"
        + "mul.wide.u32 %rd6, %r8, 8; add.s64 %rd6, %rd60, %rd6; st.global.v2.u32 [%rd6], {%r5, %r7};"
    )


BOX = ".shared .align 16 .b8 box[256];"


@pytest.mark.parametrize("generic", [False, True])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_reads_and_writes_of_another_ctas_shared_memory(assemble, generic, size):
    program = assemble(ring(generic=generic), "out", shared=BOX)
    for seed in SEEDS if size == 2 else (0, 1):
        out = np.zeros((2 * size, 32, 2), np.uint32)
        clean(program, [Uninitialized(out)], cluster=(size, 1, 1), grid=(2 * size, 1, 1), seed=seed)
        rank = np.arange(2 * size) % size
        assert (out[:, :, 0] == (((rank + 1) % size) * 100)[:, None] + np.arange(32)).all()
        assert (out[:, :, 1] == 1000 + (rank * 100)[:, None] + np.arange(32)).all()


@pytest.mark.parametrize("generic", [False, True])
def test_what_no_cluster_barrier_orders_is_a_race(assemble, line_of, generic):
    before = assemble(ring(first="bar.sync 0;", generic=generic), "out", shared=BOX)
    after = assemble(ring(last="bar.sync 0;", generic=generic), "out", shared=BOX)
    for seed in SEEDS:
        out = np.zeros((2, 32, 2), np.uint32)
        found = launch(before, [out], seed=seed).hazards
        assert {h.kind for h in found} & {"race", "uninitialized"}
        found = launch(after, [out], seed=seed).hazards
        assert "race" in {h.kind for h in found} or "uninitialized" in {h.kind for h in found}
        for hazard in found:
            if hazard.kind == "race":
                lines = {hazard.line, hazard.other.line}
                assert line_of(after, "WRITE") in lines
                assert "of CTA" in hazard.message or "CTA" in hazard.other.warp


def test_relaxed_arrival_does_not_release(assemble):
    relaxed = "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;"
    program = assemble(ring(first=relaxed), "out", shared=BOX)
    for seed in SEEDS:
        assert "race" in kinds(program, [np.zeros((2, 32, 2), np.uint32)], seed=seed)
    fenced = assemble(ring(first="barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"), "out", shared=BOX)
    clean(fenced, [np.zeros((2, 32, 2), np.uint32)])


def test_ranks_of_addresses_and_ranks_that_do_not_exist(assemble):
    program = assemble(
        RANKS + "mov.u32 %r1, box; mapa.shared::cluster.u32 %r4, %r1, %r101; getctarank.shared::cluster.u32 %r5, %r4;"
        "getctarank.shared::cluster.u32 %r6, %r1; mov.u32 %r8, %ctaid.x; mul.wide.u32 %rd6, %r8, 8; add.s64 %rd6, %rd60, %rd6;"
        "setp.ne.u32 %p1, %tid, 0; @%p1 exit; st.global.v2.u32 [%rd6], {%r5, %r6};",
        "out",
        shared=BOX,
    )
    out = np.zeros((4, 2), np.uint32)
    clean(program, [out], cluster=(4, 1, 1))
    assert out.tolist() == [[1, 0], [2, 1], [3, 2], [0, 3]]
    bad = assemble("mov.u32 %r1, box; mov.u32 %r2, 2; mapa.shared::cluster.u32 %r3, %r1, %r2;", shared=BOX)
    with pytest.raises(PtxError, match="rank 2 is outside a cluster of 2"):
        launch(bad, [])


def test_a_plain_shared_access_does_not_reach_another_cta(assemble):
    program = assemble(
        RANKS + "mov.u32 %r1, box; mapa.shared::cluster.u32 %r4, %r1, %r101; ld.shared.u32 %r5, [%r4];" + SYNC, "out", shared=BOX
    )
    assert kinds(program, [np.zeros(1, np.uint32)]) == {"out_of_bounds"}


def test_atomics_on_another_ctas_shared_memory(assemble):
    """Every thread of every CTA adds to a counter of CTA 0."""
    body = (
        RANKS
        + "mov.u32 %r1, box; setp.eq.u32 %p1, %tid, 0; mov.u32 %r9, 0; @%p1 st.shared.u32 [%r1], %r9;"
        + SYNC
        + "mov.u32 %r2, 0; mapa.shared::cluster.u32 %r3, %r1, %r2; mov.u32 %r4, 1; red.shared::cluster.add.u32 [%r3], %r4;"
        + SYNC
        + "setp.ne.u32 %p2, %r100, 0; @%p2 exit; @!%p1 exit; ld.shared.u32 %r5, [%r1]; st.global.u32 [%rd60], %r5;"
    )
    program = assemble(body, "out", shared=BOX)
    for seed in SEEDS:
        out = np.zeros(1, np.uint32)
        clean(program, [out], cluster=(4, 1, 1), threads=64, seed=seed)
        assert out[0] == 256


def test_access_after_the_other_cta_has_exited(assemble):
    body = (
        RANKS
        + "setp.eq.u32 %p9, %tid, 0; mov.u32 %r1, box; @%p9 st.shared.u32 [%r1], %r100;"
        + SYNC
        + "setp.eq.u32 %p1, %r100, 1; @%p1 exit; mov.u32 %r7, 0; LOOP: add.u32 %r7, %r7, 1; setp.lt.u32 %p2, %r7, 400; @%p2 bra LOOP;"
        + "mapa.shared::cluster.u32 %r4, %r1, %r101; ld.shared::cluster.u32 %r5, [%r4];"
    )
    program = assemble(body, "out", shared=BOX)
    messages = [str(h) for s in SEEDS for h in launch(program, [np.zeros(1, np.uint32)], seed=s).hazards]
    assert any("accesses the shared memory of CTA 1, which has exited" in m for m in messages)


# ------------------------------------------------------------------------------------------------------------ cluster barrier


def test_phases_of_the_cluster_barrier_order_a_ping_pong(assemble):
    """Two CTAs write one global counter in turns."""
    body = (
        RANKS + "setp.ne.u32 %p1, %tid, 0; mov.u32 %r1, 0; LOOP: and.b32 %r2, %r1, 1; setp.ne.u32 %p2, %r2, %r100; or.pred %p3, %p1, %p2;"
    )
    body += "@%p3 bra SKIP; ld.global.u32 %r3, [%rd60]; add.u32 %r3, %r3, 1; st.global.u32 [%rd60], %r3; SKIP: bar.warp.sync -1;"
    body += "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; add.u32 %r1, %r1, 1; setp.lt.u32 %p4, %r1, 10; @%p4 bra LOOP;"
    program = assemble(body, "out")
    for seed in SEEDS:
        out = np.zeros(1, np.uint32)
        clean(program, [out], threads=64, seed=seed)
        assert out[0] == 10


def test_exited_threads_count_as_arrived(assemble):
    program = assemble(RANKS + "setp.eq.u32 %p1, %r100, 1; @%p1 exit; setp.gt.u32 %p2, %tid, 40; @%p2 exit;" + SYNC.replace(".aligned", ""))
    for seed in SEEDS:
        clean(program, [], threads=64, seed=seed)


def test_a_cta_that_never_arrives_deadlocks_the_others(assemble):
    program = assemble(
        RANKS + "setp.eq.u32 %p9, %tid, 0; @%p9 mbarrier.init.shared.b64 [b], 1; setp.eq.u32 %p1, %r100, 0; @%p1 bra ARRIVE;"
        "W: mbarrier.try_wait.parity.shared.b64 %p2, [b], 0; @!%p2 bra W; ARRIVE:" + SYNC,
        shared=".shared .align 8 .b64 b;",
    )
    found = launch(program, []).hazards
    assert [h.kind for h in found] == ["deadlock"]
    assert "waits for the cluster barrier, phase 0 (32 of 64 threads have arrived), which CTA 1 warp 0 never reached" in found[0].message
    assert "waits for mbarrier" in found[0].message


def test_arriving_twice_and_waiting_without_arriving(assemble):
    twice = assemble("barrier.cluster.arrive.aligned; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;")
    assert "barrier" in {k for s in SEEDS for k in kinds(twice, [], seed=s)}
    alone = assemble("barrier.cluster.wait.aligned;")
    assert kinds(alone, []) == {"barrier"}


def test_part_of_a_warp_at_an_aligned_cluster_barrier(assemble):
    program = assemble("setp.lt.u32 %p1, %tid, 7; @%p1 barrier.cluster.arrive.aligned; @!%p1 barrier.cluster.arrive.aligned;")
    assert "barrier" in kinds(program, [])


def test_a_cluster_of_one(assemble):
    """Without a cluster, a CTA is rank 0 of its own: mapa, the cluster barrier and shared::cluster accesses work on itself."""
    program = assemble(ring(), "out", shared=BOX)
    out = np.zeros((3, 32, 2), np.uint32)
    result = program.launch("k", 3, 32, 0, [Uninitialized(out)])
    assert not result.hazards, [str(h) for h in result.hazards]
    assert (out[:, :, 0] == np.arange(32)).all()


# ---------------------------------------------------------------------------------------------------------- remote mbarriers


def handover(arrive: str, count: int = 1, wait: bool = True, init_sync: str = SYNC) -> str:
    """CTA 1 writes into CTA 0's box and arrives at CTA 0's mbarrier; CTA 0 waits, reads the box, and returns it."""
    return (
        RANKS + f"setp.eq.u32 %p1, %tid, 0; mov.u32 %r1, box; mov.u32 %r2, b;"
        f"@%p1 mbarrier.init.shared::cta.b64 [b], {count}; @%p1 fence.mbarrier_init.release.cluster;"
        + init_sync
        + "setp.eq.u32 %p2, %r100, 0; @%p2 bra CONSUMER;"
        + "mov.u32 %r9, 0; mapa.shared::cluster.u32 %r3, %r1, %r9; mapa.shared::cluster.u32 %r4, %r2, %r9; shl.b32 %r5, %tid, 2;"
        + f"add.u32 %r6, %r3, %r5; add.u32 %r7, %tid, 7; {arrive} bra END; CONSUMER:"
        + ("W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p3, [b], 0; @!%p3 bra W;" if wait else "")
        + "shl.b32 %r5, %tid, 2; add.u32 %r5, %r1, %r5; ld.shared.u32 %r8, [%r5]; mul.wide.u32 %rd1, %tid, 4; add.s64 %rd1, %rd60, %rd1;"
        + "st.global.u32 [%rd1], %r8; END:"
        + SYNC
    )


STORE = "st.shared::cluster.u32 [%r6], %r7;"
BOXES = BOX + " .shared .align 8 .b64 b;"


@pytest.mark.parametrize(
    ("arrive", "count"),
    [
        (STORE + "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r4];", 32),
        (STORE + "bar.warp.sync -1; @%p1 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r4], 1;", 1),
        ("@%p1 mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%r4], 128; bar.warp.sync -1;"
         "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r6], %r7, [%r4];", 1),
    ],
)  # fmt: skip
def test_handing_data_to_another_cta(assemble, arrive, count):
    program = assemble(handover(arrive, count), "out", shared=BOXES)
    for seed in SEEDS:
        out = np.zeros(32, np.uint32)
        clean(program, [Uninitialized(out)], seed=seed)
        assert (out == np.arange(32) + 7).all()


def test_handing_data_over_wrongly(assemble):
    arrive = "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r4];"
    good = STORE + arrive
    for seed in SEEDS:
        out = np.zeros(32, np.uint32)
        # The consumer does not wait, the data is written after the arrival, the arrival does not release, the barrier may not exist yet.
        assert kinds(assemble(handover(good, 32, wait=False), "out", shared=BOXES), [out], seed=seed) & {"race", "uninitialized"}
        assert kinds(assemble(handover(arrive + STORE, 32), "out", shared=BOXES), [out], seed=seed) & {"race", "uninitialized"}
        assert "race" in kinds(assemble(handover(good.replace("release", "relaxed"), 32), "out", shared=BOXES), [out], seed=seed)
        assert kinds(assemble(handover(good, 32, init_sync="bar.sync 0;"), "out", shared=BOXES), [out], seed=seed) & {
            "race",
            "uninitialized",
        }
    assert "deadlock" in kinds(assemble(handover(good, 33), "out", shared=BOXES), [out])
    assert "mbarrier" in kinds(assemble(handover(good + "@%p1 " + arrive, 16), "out", shared=BOXES), [out])


def test_bulk_copy_to_another_cta(assemble):
    copy = (
        "shl.b32 %r10, %tid, 2; add.u32 %r11, %r1, %r10; st.shared.u32 [%r11], %r7; fence.proxy.async.shared::cta; bar.warp.sync -1;"
        "@%p1 mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%r4], 128;"
        "@%p1 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r3], [%r1], 128, [%r4];"
    )
    program = assemble(handover(copy), "out", shared=BOXES)
    early = assemble(handover(copy + "st.shared.u32 [%r11], %r7;"), "out", shared=BOXES)
    elsewhere = assemble(handover(copy.replace("128, [%r4]", "128, [%r2]")), "out", shared=BOXES)
    for seed in SEEDS:
        out = np.zeros(32, np.uint32)
        clean(program, [Uninitialized(out)], seed=seed)
        assert (out == np.arange(32) + 7).all()
        assert "race" in kinds(early, [out], seed=seed)
    with pytest.raises(PtxError, match="not in the shared memory of the CTA that is written"):
        launch(elsewhere, [out])


# ------------------------------------------------------------------------------------------------------------------ multicast


MULTICAST = {
    "tensor": "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
    "[%r1], [%rd1, {%r9, %r9}], [b], %h1;",
    "bulk": "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r1], [%rd2], 512, [b], %h1;",
}


def multicast(kind: str, mask: str, wait: str = "W: mbarrier.try_wait.parity.shared::cta.b64 %p3, [b], 0; @!%p3 bra W;") -> str:
    """CTA 0 loads 512 bytes into every CTA of the mask; each waits on its own mbarrier and returns what it has."""
    return (
        RANKS + "setp.eq.u32 %p1, %tid, 0; mov.u32 %r1, box; mov.u32 %r9, 0;"
        "@%p1 mbarrier.init.shared::cta.b64 [b], 1; @%p1 fence.mbarrier_init.release.cluster;"
        + "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [b], 512;"
        + SYNC
        + "mov.b64 %rd1, k_param_0; cvta.param.u64 %rd1, %rd1; ld.param.u64 %rd2, [k_param_1]; ld.param.u64 %rd3, [k_param_2];"
        + f"setp.eq.u32 %p2, %r100, 0; and.pred %p2, %p2, %p1; mov.b16 %h1, {mask}; @%p2 {MULTICAST[kind]}"
        + wait
        + "shl.b32 %r5, %tid, 4; add.u32 %r5, %r1, %r5; ld.shared.v4.u32 {%r10, %r11, %r12, %r13}, [%r5]; mov.u32 %r6, %ctaid.x;"
        + "mad.lo.u32 %r6, %r6, 32, %tid; mul.wide.u32 %rd4, %r6, 16; add.s64 %rd4, %rd3, %rd4;"
        + "st.global.v4.u32 [%rd4], {%r10, %r11, %r12, %r13};"
        + SYNC
    )


def multicast_program(body: str) -> Program:
    return Program.from_ptx(
        ".version 8.8\n.target sm_100a\n.address_size 64\n"
        ".visible .entry k(.param .align 64 .b8 k_param_0[128], .param .u64 k_param_1, .param .u64 k_param_2)\n{\n"
        ".reg .pred %p<8>; .reg .b16 %h<4>; .reg .b32 %r<128>; .reg .b64 %rd<16>; .reg .b32 %tid;\n"
        ".shared .align 1024 .b8 box[512]; .shared .align 8 .b64 b;\nmov.u32 %tid, %tid.x;\n" + body + "\n}"
    )


@pytest.mark.parametrize("kind", ["tensor", "bulk"])
def test_multicast_loads(kind):
    data = np.random.default_rng(0).integers(0, 1 << 32, (8, 16), dtype=np.uint32)
    program = multicast_program(multicast(kind, "15"))
    partial = multicast_program(multicast(kind, "11"))
    unwaited = multicast_program(multicast(kind, "15", ""))
    for seed in SEEDS:
        out = np.zeros((4, 8, 16), np.uint32)
        args = [TensorMap(data, box=(8, 16)), data, out]
        clean(program, args, cluster=(4, 1, 1), seed=seed)
        assert (out == data).all()
        assert kinds(unwaited, args, cluster=(4, 1, 1), seed=seed) & {"race", "uninitialized"}
    # CTA 2 is left out and waits for ever.
    found = launch(partial, args, cluster=(4, 1, 1)).hazards
    assert [h.kind for h in found] == ["deadlock", "mbarrier"]
    assert "CTA 2" in found[0].message
    assert "of CTA 2: phase 0 has all its arrivals" in found[1].message
    with pytest.raises(PtxError, match="multicast mask 0x1f does not name CTAs of a cluster of 4"):
        launch(multicast_program(multicast(kind, "31")), args, cluster=(4, 1, 1))


@pytest.mark.parametrize("kind", ["tensor", "bulk"])
def test_multicast_to_the_largest_cluster(kind):
    data = np.random.default_rng(1).integers(0, 1 << 32, (8, 16), dtype=np.uint32)
    program, partial = multicast_program(multicast(kind, "255")), multicast_program(multicast(kind, "127"))
    for seed in (0, 1):
        out = np.zeros((8, 8, 16), np.uint32)
        args = [TensorMap(data, box=(8, 16)), data, out]
        clean(program, args, cluster=(8, 1, 1), seed=seed)
        assert (out == data).all()
    assert "CTA 7" in launch(partial, args, cluster=(8, 1, 1)).hazards[0].message


def gather(arrivals: int) -> str:
    """Every CTA stores 32 words at its place in CTA 0's shared memory and arrives at CTA 0's mbarrier; CTA 0 returns them all."""
    return (
        RANKS
        + f"setp.eq.u32 %p1, %tid, 0; @%p1 mbarrier.init.shared::cta.b64 [b], {arrivals}; @%p1 fence.mbarrier_init.release.cluster;"
        + SYNC
        + "mov.u32 %r1, all; mov.u32 %r2, b; mov.u32 %r9, 0;"
        + "mapa.shared::cluster.u32 %r3, %r1, %r9; mapa.shared::cluster.u32 %r4, %r2, %r9;"
        + "mad.lo.u32 %r5, %r100, 32, %tid; shl.b32 %r6, %r5, 2; add.u32 %r3, %r3, %r6; mul.lo.u32 %r7, %r5, 3;"
        + "st.shared::cluster.u32 [%r3], %r7; mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r4];"
        + "setp.ne.u32 %p2, %r100, 0; @%p2 bra END;"
        + "W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p3, [b], 0; @!%p3 bra W; mov.u32 %r8, 0;"
        + "LOOP: mad.lo.u32 %r5, %r8, 32, %tid; shl.b32 %r6, %r5, 2; add.u32 %r7, %r1, %r6; ld.shared.u32 %r10, [%r7];"
        + "cvt.u64.u32 %rd1, %r6; add.s64 %rd1, %rd60, %rd1; st.global.u32 [%rd1], %r10; add.u32 %r8, %r8, 1;"
        + "setp.lt.u32 %p4, %r8, %r102; @%p4 bra LOOP; END:"
        + SYNC
    )


@pytest.mark.parametrize("size", [1, 3, 8])
def test_every_cta_arrives_at_the_mbarrier_of_one(assemble, size):
    shared = ".shared .align 16 .b8 all[1024]; .shared .align 8 .b64 b;"
    for seed in (0, 1, 2):
        out = np.zeros((size, 32), np.uint32)
        clean(assemble(gather(32 * size), "out", shared=shared), [Uninitialized(out)], cluster=(size, 1, 1), seed=seed)
        assert (out.reshape(-1) == 3 * np.arange(32 * size)).all()
    # One arrival fewer: CTA 0 may read what a CTA has not written yet. One more: it waits for ever.
    assert kinds(assemble(gather(32 * size + 1), "out", shared=shared), [out], cluster=(size, 1, 1)) == {"deadlock"}
    if size > 1:
        found = {kind for seed in range(6) for kind in kinds(assemble(gather(32 * (size - 1)), "out", shared=shared), [out],
                                                             cluster=(size, 1, 1), seed=seed)}  # fmt: skip
        assert found & {"race", "uninitialized", "mbarrier"}


def test_multicast_commit(assemble):
    """CTA 0's commit arrives at the mbarriers of the CTAs of the mask."""
    body = (
        RANKS
        + "setp.eq.u32 %p1, %tid, 0; @%p1 mbarrier.init.shared::cta.b64 [b], 1; @%p1 fence.mbarrier_init.release.cluster;"
        + SYNC
        + "setp.eq.u32 %p2, %r100, 0; and.pred %p2, %p2, %p1; mov.b16 %h1, {mask}; mov.u32 %r1, b;"
        + "@%p2 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r1], %h1;"
        + "W: mbarrier.try_wait.parity.shared::cta.b64 %p3, [b], 0; @!%p3 bra W;"
        + SYNC
    )
    for seed in SEEDS:
        clean(assemble(body.replace("{mask}", "3"), shared=BOXES, target="sm_100a"), [], seed=seed)
    assert kinds(assemble(body.replace("{mask}", "1"), shared=BOXES, target="sm_100a"), []) == {"deadlock"}
    assert kinds(assemble(body.replace("{mask}", "2"), shared=BOXES, target="sm_100a"), []) == {"deadlock"}
