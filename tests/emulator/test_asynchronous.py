"""mbarriers, tensor and bulk copies, cp.async, and the producer/consumer ring that they make."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest

from fa4gen.codegen.emulator import Program, PtxError, TensorMap, Uninitialized
from fa4gen.codegen.emulator.layouts import swizzle

pytestmark = pytest.mark.filterwarnings("error")

SEEDS = range(8)
WAIT = "W{n}: mbarrier.try_wait.parity.shared::cta.b64 %p{n}, [{at}], {parity}; @!%p{n} bra W{n};"


def wait(at: str, parity: str | int, n: int) -> str:
    return WAIT.format(at=at, parity=parity, n=n)


def kinds(program, args, threads=32, smem=0, seed=0, blocks=1):
    return {h.kind for h in program.launch("k", blocks, threads, smem, args, seed=seed).hazards}


# ------------------------------------------------------------------------------------------------------------------ mbarriers


def test_phases_parity_states_and_counts(assemble):
    """Two arrivals a phase; the state that arrive returns tests exactly its own phase; expect_tx holds the phase open."""
    program = assemble(
        """
        setp.ne.u32 %p1, %tid, 0; @%p1 exit; mbarrier.init.shared.b64 [b], 2; mov.u32 %r1, 0;
        mbarrier.test_wait.parity.shared.b64 %p2, [b], 1; @%p2 or.b32 %r1, %r1, 1;
        mbarrier.arrive.shared.b64 %rd1, [b]; mbarrier.test_wait.shared.b64 %p2, [b], %rd1; @%p2 or.b32 %r1, %r1, 2;
        mbarrier.pending_count.b64 %r2, %rd1;
        mbarrier.arrive.shared::cta.b64 %rd2, [b]; mbarrier.test_wait.shared.b64 %p2, [b], %rd1; @%p2 or.b32 %r1, %r1, 4;
        mbarrier.test_wait.parity.shared.b64 %p2, [b], 0; @%p2 or.b32 %r1, %r1, 8;
        mbarrier.arrive.release.cta.shared::cta.b64 %rd3, [b], 2; mbarrier.test_wait.parity.shared.b64 %p2, [b], 1;
        @%p2 or.b32 %r1, %r1, 16;
        mbarrier.test_wait.parity.shared.b64 %p2, [b], 0; @%p2 or.b32 %r1, %r1, 32;
        mbarrier.arrive.expect_tx.shared::cta.b64 _, [b], 64; mbarrier.arrive.shared.b64 _, [b];
        mbarrier.test_wait.parity.shared.b64 %p2, [b], 0; @%p2 or.b32 %r1, %r1, 64;
        mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [b], 64; mbarrier.test_wait.parity.shared.b64 %p2, [b], 0;
        @%p2 or.b32 %r1, %r1, 128;
        mbarrier.inval.shared.b64 [b]; st.global.v2.u32 [%rd60], {%r1, %r2};
        """,
        "out",
        shared=".shared .align 8 .b64 b;",
    )
    for seed in SEEDS:
        out = np.zeros(2, np.uint32)
        assert not kinds(program, [out], seed=seed)
        assert out.tolist() == [1 + 4 + 8 + 16 + 128, 2]


def test_arrive_drop_lowers_later_phases(assemble):
    program = assemble(
        "setp.ne.u32 %p1, %tid, 0; @%p1 exit; mbarrier.init.shared.b64 [b], 2; mbarrier.arrive_drop.shared.b64 _, [b];"
        "mbarrier.arrive.shared.b64 _, [b];"
        "mbarrier.arrive.shared.b64 _, [b];" + wait("b", 1, 2) + "st.global.u32 [%rd60], 1;",
        "out",
        shared=".shared .align 8 .b64 b;",
    )
    out = np.zeros(1, np.uint32)
    assert not kinds(program, [out])
    assert out[0] == 1


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("mbarrier.arrive.shared.b64 _, [b]; // HERE", "uninitialized"),
        (
            "mbarrier.init.shared.b64 [b], 1; mbarrier.expect_tx.relaxed.cta.shared.b64 [b], 16;\n"
            "mbarrier.arrive.shared.b64 _, [b], 2; // HERE",
            "mbarrier",
        ),
        ("mbarrier.init.shared.b64 [b+4], 1; // HERE", "misaligned"),
    ],
)
def test_misused_mbarriers(assemble, line_of, body, kind):
    program = assemble("setp.ne.u32 %p1, %tid, 0; @%p1 exit;\n" + body, shared=".shared .align 8 .b8 b[16];")
    found = program.launch("k", 1, 32).hazards
    assert (found[0].kind, found[0].line) == (kind, line_of(program, "HERE"))


def test_an_mbarrier_used_before_its_init_is_ordered_is_a_race(assemble):
    body = "setp.eq.u32 %p1, %tid, 0; @%p1 mbarrier.init.shared.b64 [b], 64; {sync} mbarrier.arrive.shared.b64 _, [b];"
    for seed in SEEDS:
        assert not kinds(assemble(body.format(sync="bar.sync 0;"), shared=".shared .align 8 .b64 b;"), [], 64, seed=seed)
        assert kinds(assemble(body.format(sync=""), shared=".shared .align 8 .b64 b;"), [], 64, seed=seed) & {"race", "uninitialized"}


def test_arrive_releases_and_wait_acquires(assemble):
    body = """
        setp.eq.u32 %p1, %tid, 0; @%p1 mbarrier.init.shared.b64 [b], 32; bar.sync 0; setp.eq.u32 %p2, %warp, 1; @%p2 bra C;
        shl.b32 %r1, %lane, 2; mov.u32 %r2, s; add.u32 %r1, %r1, %r2; {before} mbarrier.arrive.shared.b64 _, [b]; {after} bra END;
        C: W: mbarrier.try_wait.parity.shared.b64 %p3, [b], 0; @!%p3 bra W; ld.shared.u32 %r3, [s+4]; END:
    """
    store = "st.shared.u32 [%r1], 1;"
    shared = ".shared .align 8 .b64 b; .shared .align 8 .b8 s[128];"
    for seed in SEEDS:
        assert not kinds(assemble(body.format(before=store, after=""), shared=shared), [], 64, seed=seed)
        assert kinds(assemble(body.format(before="", after=store), shared=shared), [], 64, seed=seed) & {"race", "uninitialized"}


# --------------------------------------------------------------------------------------------------------------- tensor copies

LOAD = """
    mov.u32 %r1, dyn; add.u32 %r1, %r1, 1023; and.b32 %r1, %r1, 0xfffffc00; mov.u32 %r2, b; setp.eq.u32 %p1, %tid, 0;
    cvta.param.u64 %rd10, map_address;
    @%p1 mbarrier.init.shared.b64 [%r2], 1; @%p1 fence.mbarrier_init.release.cluster; bar.sync 0;
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], {bytes};
    @%p1 cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r1], [{map}, {{{coords}}}], [%r2];
    W: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0; @!%p2 bra W;
"""


def tensor_program(body, out=True, maps=1):
    params = ", ".join([f".param .align 64 .b8 map{i}[128]" for i in range(maps)] + [".param .u64 out"] * out)
    return Program.from_ptx(
        f""".version 8.6
        .target sm_90a
        .address_size 64
        .extern .shared .align 1024 .b8 dyn[];
        .entry k({params}) {{
        .reg .pred %p<16>; .reg .b32 %r<32>; .reg .b64 %rd<64>; .reg .b32 %tid, %lane, %warp; .shared .align 8 .b64 b[8];
        mov.u32 %tid, %tid.x; mov.u32 %lane, %laneid; shr.u32 %warp, %tid, 5; {"ld.param.u64 %rd60, [out];" if out else ""}
        {body} }}"""
    )


COPY_OUT = """
    // Copy {bytes} bytes of the box to `out`, linearly.
    mov.u32 %r10, %tid; L: setp.ge.u32 %p5, %r10, {words}; @%p5 bra E; shl.b32 %r11, %r10, 2; add.u32 %r12, %r1, %r11;
    ld.shared.u32 %r13, [%r12];
    cvt.u64.u32 %rd1, %r11; add.s64 %rd1, %rd60, %rd1; st.global.u32 [%rd1], %r13; add.u32 %r10, %r10, 32; bra L; E:
"""


def load_box(tensor_map, coords, seed=0):
    """What a load leaves in shared memory (1,024-byte aligned), as bytes."""
    size = tensor_map.box_bytes
    text = LOAD.replace("cvta.param.u64 %rd10, map_address;", "mov.b64 %rd9, map0; cvta.param.u64 %rd10, %rd9;")
    body = text.format(bytes=size, rank=len(coords), map="%rd10", coords=", ".join(map(str, coords))) + COPY_OUT.format(
        bytes=size, words=size // 4
    )
    out = np.zeros(size, np.uint8)
    result = tensor_program(body).launch("k", 1, 32, size + 1024, [tensor_map, out], seed=seed)
    assert not result.hazards, [str(h) for h in result.hazards]
    return out


def expected_box(array, box, coords, fill=0):
    """The box by the definition: one element at a time, outermost first."""
    out = np.full(box, fill, array.dtype)
    start = coords[::-1]
    for index in itertools.product(*map(range, box)):
        position = [s + i for s, i in zip(start, index, strict=True)]
        if all(0 <= p < extent for p, extent in zip(position, array.shape, strict=True)):
            out[index] = array[tuple(position)]
    return out


POLICIES = [
    "createpolicy.fractional.L2::evict_first.b64 %rd20, 1.0;",
    "createpolicy.fractional.L2::evict_last.L2::evict_unchanged.b64 %rd20, 0.5;",
    "mov.b64 %rd20, 1;",
]


@pytest.mark.parametrize("policy", POLICIES)
def test_cache_hints_change_nothing(policy, monkeypatch):
    """On tensor and bulk copies in both directions, on cp.async, and on ordinary loads and stores."""
    array = np.random.default_rng(0).integers(1, 60000, (20, 48)).astype(np.uint16)
    tensor_map = TensorMap(array, box=(8, 16), swizzle=32)
    hinted = LOAD.replace("bytes [%r1]", "bytes.L2::cache_hint [%r1]").replace("}}}], [%r2];", "}}}], [%r2], %rd20;")
    assert hinted.count("%rd20") == hinted.count("hint") == 1
    plain = load_box(tensor_map, (16, 3))
    monkeypatch.setitem(globals(), "LOAD", policy + hinted)
    assert (load_box(tensor_map, (16, 3)) == plain).all()
    monkeypatch.setitem(globals(), "LOAD", policy + hinted.replace(", %rd20;", ";"))
    with pytest.raises(PtxError, match="takes 4 operands"):
        load_box(tensor_map, (16, 3))

    body = (
        policy
        + """
        mov.u32 %r1, dyn; mov.u32 %r2, b; setp.eq.u32 %p1, %tid, 0; ld.param.u64 %rd61, [in];
        @%p1 mbarrier.init.shared.b64 [%r2], 1; bar.sync 0; @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 128;
        @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%r1], [%rd61], 128, [%r2], %rd20;
        W: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0; @!%p2 bra W;
        @%p1 cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%rd60], [%r1], 128, %rd20;
        @%p1 cp.async.bulk.commit_group; @%p1 cp.async.bulk.wait_group 0;
        shl.b32 %r3, %tid, 2; cvt.u64.u32 %rd1, %r3; add.s64 %rd2, %rd61, %rd1; add.s64 %rd3, %rd60, %rd1; add.u32 %r4, %r1, %r3;
        cp.async.ca.shared.global.L2::cache_hint.L2::128B [%r4+128], [%rd2+128], 4, %rd20; cp.async.wait_all; ld.shared.u32 %r5, [%r4+128];
        st.global.L1::no_allocate.L2::cache_hint.u32 [%rd3+128], %r5, %rd20;
        ld.global.nc.L1::no_allocate.L2::cache_hint.L2::256B.u32 %r6, [%rd2+256], %rd20; st.global.cs.u32 [%rd3+256], %r6;
        ld.global.L1::evict_last.u32 %r7, [%rd2+384]; st.global.wt.u32 [%rd3+384], %r7;
    """
    )
    text = f""".version 8.6
        .target sm_90a
        .address_size 64
        .extern .shared .align 1024 .b8 dyn[];
        .entry k(.param .u64 out, .param .u64 in) {{
        .reg .pred %p<16>; .reg .b32 %r<32>; .reg .b64 %rd<64>; .reg .b32 %tid; .shared .align 8 .b64 b;
        mov.u32 %tid, %tid.x; ld.param.u64 %rd60, [out]; {body} }}"""
    data = np.random.default_rng(1).integers(0, 1 << 32, 128, dtype=np.uint32)
    out = np.zeros_like(data)
    result = Program.from_ptx(text).launch("k", 1, 32, 512, [out, data])
    assert not result.hazards, [str(h) for h in result.hazards]
    assert (out == data).all()


@pytest.mark.parametrize("mode", [0, 32, 64, 128])
@pytest.mark.parametrize("coords", [(0, 0), (16, 3), (-8, -2), (24, 18), (100, 0)])
def test_load_swizzles_and_fills_out_of_bounds(mode, coords):
    array = np.random.default_rng(0).integers(1, 60000, (20, 48)).astype(np.uint16)
    box = (16, (mode or 128) // 2)
    tensor_map = TensorMap(array, box, swizzle=mode)
    linear = expected_box(array, box, coords).tobytes()
    smem = load_box(tensor_map, coords, seed=abs(coords[0]))
    # The swizzle acts on the absolute address; the destination is a multiple of 1,024.
    assert smem.tobytes() == bytes(
        linear[i] if mode == 0 else linear[int(np.flatnonzero(swizzle(np.arange(len(linear)), mode) == i)[0])] for i in range(len(linear))
    )


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_ranks_and_strides(rank):
    shape = (2, 3, 4, 5, 16)[-rank:]
    array = np.arange(np.prod(shape), dtype=np.uint32).reshape(shape)
    box = (1, 2, 2, 3, 8)[-rank:]
    coords = (4, 1, -1, 2, 1)[:rank]
    assert load_box(TensorMap(array, box), coords).tobytes() == expected_box(array, box, coords).tobytes()


def test_nan_fill_and_a_view_with_its_own_strides():
    array = np.arange(64, dtype=np.float32).reshape(8, 8)
    # Every second row, from row 1: shape (4, 8), stride of two rows.
    tensor_map = TensorMap(array, (4, 8), shape=(4, 8), strides=(64,), offset_bytes=32, oob_nan=True)
    got = load_box(tensor_map, (0, 2)).view(np.float32).reshape(4, 8)
    assert (got[:2] == array[5::2]).all()
    assert np.isnan(got[2:]).all()


STORE = """
    mov.u32 %r1, dyn; mov.u32 %r10, %tid; L: setp.ge.u32 %p5, %r10, {words}; @%p5 bra E; shl.b32 %r11, %r10, 2;
    add.u32 %r12, %r1, %r11; add.u32 %r13, %r10, 1;
    st.shared.u32 [%r12], %r13; add.u32 %r10, %r10, 32; bra L; E: fence.proxy.async.shared::cta; bar.sync 0; mov.b64 %rd9, map0;
    cvta.param.u64 %rd10, %rd9;
    setp.eq.u32 %p1, %tid, 0; @%p1 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd10, {{{coords}}}], [%r1];
    @%p1 cp.async.bulk.commit_group;
    {wait} {after}
"""


@pytest.mark.parametrize("mode", [0, 128])
@pytest.mark.parametrize("coords", [(0, 0), (-8, 5), (16, 2)])
def test_store_writes_in_bounds_only(mode, coords):
    array = np.zeros((6, 32), np.uint32)
    tensor_map = TensorMap(array, (4, 32), swizzle=mode)
    program = tensor_program(
        STORE.format(words=128, coords=f"{coords[0]}, {coords[1]}", wait="@%p1 cp.async.bulk.wait_group 0;", after=""), out=False
    )
    for seed in SEEDS:
        array[:] = 0
        assert not kinds(program, [tensor_map], smem=1024, seed=seed)
        data = np.arange(1, 129, dtype=np.uint32)
        box = (
            data
            if not mode
            else data[(swizzle(np.arange(0, 512, 16) + 0, mode) // 16)[:, None].repeat(4, 1).ravel() * 4 + np.tile(np.arange(4), 32)]
        )
        expected = np.zeros_like(array)
        for y, x in np.ndindex(4, 32):
            if 0 <= coords[1] + y < 6 and 0 <= coords[0] + x < 32:
                expected[coords[1] + y, coords[0] + x] = box.reshape(4, 32)[y, x]
        assert (array == expected).all()


def test_source_of_a_store_may_be_reused_only_after_its_wait():
    again = "@%p1 st.shared.u32 [%r1], 0;"
    for waiting, expected in (
        ("@%p1 cp.async.bulk.wait_group.read 0;", set()),
        ("@%p1 cp.async.bulk.wait_group.read 1;", {"race", "async_exit"}),
        ("", {"race", "async_exit"}),
    ):
        program = tensor_program(STORE.format(words=128, coords="0, 0", wait=waiting, after=again), out=False)
        for seed in SEEDS:
            assert kinds(program, [TensorMap(np.zeros((6, 32), np.uint32), (4, 32))], smem=1024, seed=seed) == expected


def test_stored_data_is_visible_after_the_full_wait_only():
    read = "@%p1 ld.global.u32 %r14, [%rd60];"
    for waiting, expected in (("@%p1 cp.async.bulk.wait_group 0;", set()), ("@%p1 cp.async.bulk.wait_group.read 0;", {"race"})):
        program = tensor_program(STORE.format(words=128, coords="0, 0", wait=waiting, after=read))
        for seed in SEEDS:
            array = np.zeros((6, 32), np.uint32)
            assert kinds(program, [TensorMap(array, (4, 32)), array], smem=1024, seed=seed) == expected


def test_reading_a_box_before_its_barrier_is_a_race_and_two_loads_conflict():
    array = np.ones((16, 32), np.uint32)
    base = LOAD.replace("cvta.param.u64 %rd10, map_address;", "mov.b64 %rd9, map0; cvta.param.u64 %rd10, %rd9;").format(
        bytes=512, rank=2, map="%rd10", coords="0, 0"
    )
    read = "ld.shared.u32 %r13, [%r1];"
    early = base.replace("W: mbarrier.try_wait", read + " W: mbarrier.try_wait")
    load = next(line for line in base.split("\n") if "cp.async.bulk.tensor" in line)
    twice = base.replace(load, load + "\n" + load.replace("0, 0", "0, 4")).replace(", 512;", ", 1024;")
    for seed in SEEDS:
        args = [TensorMap(array, (4, 32))]
        assert not kinds(tensor_program(base + read, out=False), args, 64, 2048, seed)
        assert "race" in kinds(tensor_program(early, out=False), args, 64, 2048, seed)
        assert "race" in kinds(tensor_program(twice, out=False), args, 64, 2048, seed)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (("add.u32 %r1, %r1, 1023;", "add.u32 %r1, %r1, 70;"), "misaligned"),
        (("and.b32 %r1, %r1, 0xfffffc00;", "add.u32 %r1, %r1, 2049;"), "out_of_bounds"),
    ],
)
def test_faulty_destinations(change, kind):
    text = LOAD.replace("cvta.param.u64 %rd10, map_address;", "mov.b64 %rd9, map0; cvta.param.u64 %rd10, %rd9;").format(
        bytes=512, rank=2, map="%rd10", coords="0, 0"
    )
    text = text.replace(*change)
    if kind == "misaligned":
        text = text.replace("and.b32 %r1, %r1, 0xfffffc00;", "")
    assert kind in kinds(tensor_program(text, out=False), [TensorMap(np.ones((16, 32), np.uint32), (4, 32))], 32, 2048)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"box": (4, 257)}, "1..256"), ({"box": (4, 6)}, "multiple of 16"), ({"box": (4, 32), "swizzle": 64}, "wider than"),
        ({"box": (4,)}, "rank 2"),
        ({"box": (4, 32), "strides": (8,)}, "multiple of 16"), ({"box": (4, 32), "shape": (17, 32)}, "ends at byte"),
        ({"box": (4, 32), "swizzle": 16}, "modes"),
        ({"box": (4, 32), "element_strides": (9, 1)}, "1..8"), ({"box": (4, 32), "offset_bytes": 8}, "multiple of 16"),
    ],
)  # fmt: skip
def test_illegal_tensor_maps(fields, words):
    with pytest.raises(ValueError, match=words) as error:
        TensorMap(np.zeros((16, 32), np.float32), **fields)
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------------------------------------------- bulk copies and cp.async


def test_bulk_copies_in_and_out(assemble):
    program = assemble(
        """
        setp.ne.u32 %p1, %tid, 0; @%p1 exit; mbarrier.init.shared.b64 [b], 1; fence.mbarrier_init.release.cluster;
        mbarrier.arrive.expect_tx.shared.b64 _, [b], 256;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [s], [%rd61], 256, [b];
        W: mbarrier.try_wait.parity.shared.b64 %p2, [b], 0; @!%p2 bra W; ld.shared.u32 %r1, [s]; add.u32 %r1, %r1, 1;
        st.shared.u32 [s], %r1;
        fence.proxy.async.shared::cta; cp.async.bulk.global.shared::cta.bulk_group [%rd60], [s], 256; cp.async.bulk.commit_group;
        cp.async.bulk.wait_group 0;
        cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd60], [s], 128; cp.async.bulk.commit_group;
        cp.async.bulk.wait_group 0;
        """,
        "out x",
        shared=".shared .align 128 .b8 s[256]; .shared .align 8 .b64 b;",
    )
    x = np.arange(64, dtype=np.uint32)
    y = x.copy()
    y[0] += 1
    for seed in SEEDS:
        out = np.zeros(64, np.uint32)
        assert not kinds(program, [Uninitialized(out), x], seed=seed)
        assert out.tolist() == [2 * v for v in y[:32]] + y[32:].tolist()


def test_cp_async_groups(assemble):
    body = """
        shl.b32 %r1, %tid, 4; mov.u32 %r2, s; add.u32 %r2, %r2, %r1; cvt.u64.u32 %rd1, %r1; add.s64 %rd2, %rd61, %rd1;
        add.s64 %rd3, %rd60, %rd1;
        cp.async.cg.shared.global [%r2], [%rd2], 16; cp.async.commit_group; cp.async.ca.shared.global [%r2+512], [%rd2], 8, 4;
        cp.async.commit_group;
        cp.async.wait_group {keep}; ld.shared.v2.u32 {{%r3, %r4}}, [%r2]; ld.shared.u32 %r5, [%r2+{second}];
        st.global.v4.u32 [%rd3], {{%r3, %r4, %r5, 0}};
    """
    x = np.random.default_rng(1).integers(0, 1 << 32, (32, 4), np.uint32)
    early = {"race", "async_exit"}
    for keep, second, expected in ((0, 516, set()), (1, 8, {"async_exit"}), (1, 516, early), (2, 8, early)):
        program = assemble(body.format(keep=keep, second=second), "out x", shared=".shared .align 16 .b8 s[1024];")
        for seed in SEEDS:
            out = np.zeros((32, 4), np.uint32)
            assert kinds(program, [out, x], seed=seed) == expected
            if "race" not in expected:
                assert (out[:, :2] == x[:, :2]).all()
                assert (out[:, 2] == (0 if second == 516 else x[:, 2])).all()


# ------------------------------------------------------------------------------------------------------------------- the ring

RING = """
    // Warp 0 loads tiles of 512 bytes into 2 slots; warps 1 and 2 add them up. full: b[0..1], empty: b[2..3].
    mov.u32 %r1, dyn; mov.u32 %r2, b; setp.eq.u32 %p1, %tid, 0; mov.b64 %rd9, map0; cvta.param.u64 %rd10, %rd9;
    @%p1 mbarrier.init.shared.b64 [%r2], 1; @%p1 mbarrier.init.shared.b64 [%r2+8], 1; @%p1 mbarrier.init.shared.b64 [%r2+16], 2;
    @%p1 mbarrier.init.shared.b64 [%r2+24], 2; @%p1 fence.mbarrier_init.release.cluster;
    bar.sync 0; mov.u32 %r3, 0; mov.u32 %r9, 0; setp.ne.u32 %p2, %warp, 0; @%p2 bra CONSUME; setp.ne.u32 %p3, %lane, 0; @%p3 bra END;
    PRODUCE: and.b32 %r4, %r3, 1; shr.u32 %r5, %r3, 1; and.b32 %r5, %r5, 1; xor.b32 %r6, %r5, {first}; shl.b32 %r7, %r4, 3;
    add.u32 %r7, %r2, %r7;
    PW: {empty} shl.b32 %r8, %r4, 9; add.u32 %r8, %r1, %r8; shl.b32 %r10, %r3, 2;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r7], 512;
    cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r8], [%rd10, {{0, %r10}}], [%r7];
    add.u32 %r3, %r3, 1; setp.lt.u32 %p5, %r3, 8; @%p5 bra PRODUCE; bra END;
    CONSUME: and.b32 %r4, %r3, 1; shr.u32 %r5, %r3, 1; and.b32 %r5, %r5, 1; shl.b32 %r7, %r4, 3; add.u32 %r7, %r2, %r7;
    CW: {full} shl.b32 %r8, %r4, 9; add.u32 %r8, %r1, %r8; sub.u32 %r11, %warp, 1; mad.lo.u32 %r8, %r11, 256, %r8;
    shl.b32 %r12, %lane, 3; add.u32 %r8, %r8, %r12;
    {read} add.u32 %r9, %r9, %r13; add.u32 %r9, %r9, %r14; {release}
    add.u32 %r3, %r3, 1; setp.lt.u32 %p5, %r3, 8; @%p5 bra CONSUME;
    sub.u32 %r15, %tid, 32; mul.wide.u32 %rd1, %r15, 4; add.s64 %rd1, %rd60, %rd1; st.global.u32 [%rd1], %r9; END:
"""
PARTS = {
    "first": "1",
    "empty": "mbarrier.try_wait.parity.shared.b64 %p4, [%r7+16], %r6; @!%p4 bra PW;",
    "full": "mbarrier.try_wait.parity.shared.b64 %p4, [%r7], %r5; @!%p4 bra CW;",
    "read": "ld.shared.v2.u32 {%r13, %r14}, [%r8];",
    # Ordinary reads, which the refill could overtake without the proxy fence.
    "release": "fence.proxy.async.shared::cta; bar.warp.sync -1; setp.eq.u32 %p6, %lane, 0; @%p6 mbarrier.arrive.shared.b64 _, [%r7+16];",
}


def run_ring(seed, **changes):
    array = np.random.default_rng(3).integers(0, 1000, (32, 32)).astype(np.uint32)
    out = np.zeros(64, np.uint32)
    result = tensor_program(RING.format(**{**PARTS, **changes})).launch(
        "k", 1, 96, 1024, [TensorMap(array, (4, 32)), Uninitialized(out)], seed=seed
    )
    return {h.kind for h in result.hazards}, out, array.reshape(8, 64, 2).sum(axis=(0, 2))


def test_ring_is_clean_and_right_under_every_seed():
    for seed in range(20):
        found, out, expected = run_ring(seed)
        assert not found
        assert (out == expected).all()


@pytest.mark.parametrize(
    "changes",
    [
        {"empty": ""},
        {"full": ""},
        {
            "release": "setp.eq.u32 %p6, %lane, 0; @%p6 mbarrier.arrive.shared.b64 _, [%r7+16];",
            "read": "",
            "full": PARTS["full"] + PARTS["release"] + PARTS["read"],
        },
        {"full": PARTS["full"].replace("[%r7]", "[%r7+16]")},
        {"first": "0"},
    ],
    ids=["no wait for empty", "no wait for full", "released before it is read", "waits for the wrong barrier", "wrong first parity"],
)
def test_broken_ring_is_found_under_every_seed(changes):
    for seed in range(20):
        found, _, _ = run_ring(seed, **changes)
        assert found & {"race", "deadlock"}, seed


@pytest.mark.parametrize("fence", ["", "fence.acq_rel.cta;", "fence.proxy.async.global;"])
def test_a_ring_whose_reads_are_not_fenced_for_the_refill(fence):
    for seed in range(20):
        found, _, _ = run_ring(seed, release=PARTS["release"].replace("fence.proxy.async.shared::cta;", fence))
        assert found == {"proxy_fence"}, seed


def test_bytes_that_do_not_balance_are_named():
    """A phase that has its arrivals but waits for bytes for ever: too many announced, or more copied than announced."""
    array = np.zeros((6, 32), np.uint32)
    for announced, said in ((516, "4 bytes that expect_tx announced never came"), (256, "256 bytes more came than expect_tx announced")):
        text = LOAD.replace("cvta.param.u64 %rd10, map_address;", "mov.b64 %rd9, map0; cvta.param.u64 %rd10, %rd9;")
        program = tensor_program(text.format(bytes=announced, rank=2, map="%rd10", coords="0, 0"), out=False)
        hazards = program.launch("k", 1, 32, 4096, [TensorMap(array, (4, 32))]).hazards
        assert {h.kind for h in hazards} == {"mbarrier", "deadlock"}
        assert any(said in h.message for h in hazards if h.kind == "mbarrier")


def test_what_is_in_flight_at_the_exit_is_its_own_warps():
    """The report names the warp that issued the copy, whichever warp leaves last."""
    program = tensor_program(STORE.format(words=128, coords="0, 0", wait="", after=""), out=False)
    for seed in SEEDS:
        hazards = program.launch("k", 1, 128, 1024, [TensorMap(np.zeros((6, 32), np.uint32), (4, 32))], seed=seed).hazards
        assert {(h.warp, h.who) for h in hazards if h.kind == "async_exit"} == {(0, "warp 0")}


@pytest.mark.parametrize("to_global", [False, True])
def test_a_copy_of_gigabytes_takes_no_memory(assemble, to_global):
    """A size in a register is anything up to 4 GiB; what does not fit is refused before it is looked at byte by byte."""
    copy = (
        "cp.async.bulk.global.shared::cta.bulk_group [%rd60], [%r2], %r3; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
        if to_global
        else "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd60], %r3, [b];"
    )
    body = "mov.u32 %r2, s; mov.u32 %r3, 4294967280; setp.eq.u32 %p1, %tid, 0; @%p1 mbarrier.init.shared.b64 [b], 1; bar.sync 0;"
    program = assemble(body + "@!%p1 bra END; " + copy + " END:", "out", shared=".shared .align 16 .b8 s[64]; .shared .align 8 .b64 b;")
    tracemalloc.start()
    hazards = program.launch("k", 1, 32, 0, [np.zeros(16, np.uint32)]).hazards
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "out_of_bounds" in {h.kind for h in hazards}
    assert peak < 1 << 26
