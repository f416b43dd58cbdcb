"""State spaces: vectors, generic addresses, constants, local memory, atomics; bounds, alignment and initialisation."""

from __future__ import annotations

import numpy as np
import pytest

from fa4gen.codegen.emulator import Memory, Uninitialized

pytestmark = pytest.mark.filterwarnings("error")

SEEDS = range(5)
OUT = "mul.wide.u32 %rd1, %tid, 4; add.s64 %rd1, %rd60, %rd1;"


def hazards(program, args, threads=32, smem=0, seed=0, **kwargs):
    return program.launch("k", 1, threads, smem, args, seed=seed, **kwargs).hazards


def test_vector_accesses_of_every_width(assemble):
    body = """
        mul.wide.u32 %rd1, %tid, 32; add.s64 %rd2, %rd61, %rd1; add.s64 %rd3, %rd60, %rd1;
        ld.global.nc.L1::no_allocate.L2::128B.v4.f32 {%f1, %f2, %f3, %f4}, [%rd2]; ld.global.v2.b64 {%rd4, %rd5}, [%rd2+16];
        mul.lo.u32 %r9, %tid, 32; mov.u32 %r8, s; add.u32 %r8, %r8, %r9;
        st.shared.v2.f32 [%r8], {%f1, %f2}; st.shared.v4.b32 [%r8+16], {%f3, %f4, %f1, %f2}; ld.shared.b64 %rd6, [%r8];
        ld.shared.v2.b64 {%rd7, %rd8}, [%r8+16];
        st.global.v2.b64 [%rd3], {%rd6, %rd7}; st.global.b64 [%rd3+16], %rd5; st.global.b64 [%rd3+24], %rd4;
    """
    program = assemble(body, "out x", shared=".shared .align 32 .b8 s[1024];")
    x = np.random.default_rng(0).integers(0, 1 << 32, (32, 8), np.uint32)
    out = np.zeros((32, 8), np.uint32)
    assert not hazards(program, [Uninitialized(out), x])
    assert (out == x[:, [0, 1, 2, 3, 6, 7, 4, 5]]).all()


def test_narrow_accesses_extend_by_type(assemble):
    body = """
        cvt.u64.u32 %rd1, %tid; add.s64 %rd2, %rd61, %rd1; ld.global.s8 %r1, [%rd2]; ld.global.u8 %r2, [%rd2]; ld.global.u8 %h1, [%rd2];
        shl.b64 %rd3, %rd1, 4; add.s64 %rd3, %rd60, %rd3; cvt.u32.u16 %r3, %h1; st.global.v4.u32 [%rd3], {%r1, %r2, %r3, 0};
        st.global.u8 [%rd3+12], %r1;
    """
    x = np.arange(112, 144).astype(np.uint8)
    out = np.zeros((32, 4), np.uint32)
    assert not hazards(assemble(body, "out x"), [out, x])
    assert (out[:, 0].astype(np.int32) == x.view(np.int8)).all()
    assert (out[:, 1:] == x[:, None]).all()


def test_generic_addresses_reach_shared_local_and_global(assemble):
    body = """
        mov.u64 %rd10, s; cvta.shared.u64 %rd10, %rd10; mul.wide.u32 %rd11, %tid, 4; add.s64 %rd10, %rd10, %rd11; st.u32 [%rd10], %tid;
        mov.u64 %rd12, depot; cvta.local.u64 %rd12, %rd12; mov.u32 %r5, 1000; st.u32 [%rd12+4], %r5; ld.local.u32 %r6, [depot+4];
        isspacep.shared %p1, %rd10; isspacep.global %p2, %rd60; isspacep.local %p3, %rd60;
        cvta.to.shared.u64 %rd13, %rd10; cvt.u32.u64 %r7, %rd13; ld.shared.u32 %r8, [%r7];
        // Half of the lanes read shared memory through the pointer that the other half uses for local memory.
        and.b32 %r9, %lane, 1; setp.eq.u32 %p4, %r9, 0; add.s64 %rd14, %rd12, 4; selp.b64 %rd15, %rd10, %rd14, %p4; ld.u32 %r10, [%rd15];
        add.u32 %r1, %r6, %r8; add.u32 %r1, %r1, %r10; selp.b32 %r11, 100000, 0, %p1; selp.b32 %r12, 200000, 0, %p2;
        selp.b32 %r13, 400000, 0, %p3;
        add.u32 %r1, %r1, %r11; add.u32 %r1, %r1, %r12; add.u32 %r1, %r1, %r13;
    """
    program = assemble(body + OUT + "st.u32 [%rd1], %r1;", "out", shared=".shared .align 4 .b8 s[128]; .local .align 8 .b8 depot[16];")
    out = np.zeros(32, np.uint32)
    assert not hazards(program, [out])
    assert out.tolist() == [300000 + 1000 + i + (i if i % 2 == 0 else 1000) for i in range(32)]


def test_module_variables_keep_state_and_initialisers(assemble):
    module = """
    .const .align 4 .f32 table[4] = {0f3F800000, 2.0, -3.0, 4.5};
    .global .align 8 .u64 where[2] = {generic(table), table+8};
    .visible .global .u32 counter = 5;
    """
    body = """
        and.b32 %r2, %tid, 3; shl.b32 %r2, %r2, 2; mov.u64 %rd2, table; cvt.u64.u32 %rd3, %r2; add.s64 %rd2, %rd2, %rd3;
        ld.const.f32 %f1, [%rd2];
        ld.global.u64 %rd4, [where+8]; ld.f32 %f2, [%rd4]; add.f32 %f1, %f1, %f2; setp.eq.u32 %p1, %tid, 0;
        @%p1 red.global.add.u32 [counter], 1;
        bar.warp.sync -1; ld.relaxed.gpu.global.u32 %r3, [counter]; cvt.rn.f32.u32 %f3, %r3; add.f32 %f1, %f1, %f3;
    """
    program = assemble(body + OUT + "st.global.f32 [%rd1], %f1;", "out", module=module)
    for launch in range(2):
        out = np.zeros(32, np.float32)
        assert not hazards(program, [out])
        assert out.tolist() == [(1.0, 2.0, -3.0, 4.5)[i % 4] - 3.0 + 6 + launch for i in range(32)]


@pytest.mark.parametrize(
    ("operation", "kind", "value", "expected"),
    [
        ("add", "u32", 3, 3 * 64), ("min", "s32", -7, -7), ("max", "u32", 9, 9), ("or", "b32", 6, 6), ("xor", "b32", 5, 0),
        ("inc", "u32", 9, 64 % 10),
        ("exch", "b32", 8, 8), ("add", "u64", 1 << 33, 64 << 33), ("add", "f32", 0.5, 32.0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("space", ["global", "shared"])
def test_atomics_of_two_warps_on_one_word(assemble, operation, kind, value, expected, space):
    size = 64 if kind == "u64" else 32
    bank = "%rd" if size == 64 else "%f" if kind == "f32" else "%r"
    target = "[%rd61]" if space == "global" else "[s]"
    body = f"""
        mov.b{size} {bank}5, {value if kind != "f32" else "0f3F000000"}; setp.eq.u32 %p1, %tid, 0; mov.b{size} {bank}6, 0;
        @%p1 st.shared.b{size} [s], {bank}6; bar.sync 0; atom.{space}.{operation}.{kind} {bank}7, {target}, {bank}5; bar.sync 0;
        ld.{space}.b{size} {bank}8, {target}; @%p1 st.global.b{size} [%rd60], {bank}8;
    """
    dtype = {"u32": np.uint32, "s32": np.int32, "b32": np.uint32, "u64": np.uint64, "f32": np.float32}[kind]
    for seed in SEEDS:
        out, x = np.zeros(1, dtype), np.zeros(1, dtype)
        assert not hazards(assemble(body, "out x", shared=".shared .align 8 .b8 s[8];"), [out, x], 64, seed=seed)
        assert out[0] == expected


def test_compare_and_swap_lock(assemble):
    """A spin lock built from atom.cas and exch orders the guarded counter."""
    body = """
        setp.ne.u32 %p1, %lane, 0; @%p1 bra END;
        LOCK: atom.acquire.gpu.global.cas.b32 %r1, [%rd61], 0, 1; setp.ne.u32 %p2, %r1, 0; @%p2 bra LOCK;
        ld.global.u32 %r2, [%rd60]; add.u32 %r2, %r2, 1; st.global.u32 [%rd60], %r2; atom.release.gpu.global.exch.b32 %r3, [%rd61], 0;
        END:
    """
    program = assemble(body, "out lock")
    for seed in SEEDS:
        out, lock = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
        assert not hazards(program, [out, lock], 256, seed=seed)
        assert out[0] == 8
    unlocked = assemble(body.replace("@%p2 bra LOCK;", ""), "out lock")
    # A warp that fails to take the lock goes on regardless; schedules without contention happen to be ordered.
    found = [hazards(unlocked, [np.zeros(1, np.uint32), np.zeros(1, np.uint32)], 256, seed=seed) for seed in range(16)]
    assert {h.kind for hs in found for h in hs} == {"race"}


# ------------------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize(
    ("access", "kind", "words"),
    [
        ("ld.shared.u32 %r1, [s+64]; // HERE", "out_of_bounds", "shared+0x40"),
        ("st.shared.u32 [s+60], %r0; st.shared.u32 [s+64], %r0; // HERE", "out_of_bounds", "shared+0x40"),
        ("ld.shared.u32 %r1, [0]; // HERE", "out_of_bounds", "shared-0x400"),
        ("st.shared.u32 [s+2], %r0; // HERE", "misaligned", "shared+0x2"),
        ("st.shared.v4.u32 [s+8], {%r0, %r0, %r0, %r0}; // HERE", "misaligned", "multiple of 16"),
        ("ld.global.u32 %r1, [%rd60+128]; // HERE", "out_of_bounds", "array0+0x80"),
        ("ld.global.u32 %r1, [%rd60+-4]; // HERE", "out_of_bounds", "global address"),
        ("st.global.u32 [%rd60+122], %r0; // HERE", "misaligned", "multiple of 4"),
        ("ld.global.v2.u32 {%r1, %r2}, [%rd60+124]; // HERE", "out_of_bounds", "array0+0x7c"),
        ("mov.u64 %rd5, 0; ld.u32 %r1, [%rd5]; // HERE", "out_of_bounds", "0x0"),
        ("atom.global.add.u32 %r1, [%rd60+128], 1; // HERE", "out_of_bounds", "array0+0x80"),
        ("ld.shared.u32 %r1, [s]; // HERE", "uninitialized", "shared+0x0"),
        ("ld.global.u32 %r1, [%rd61+4]; // HERE", "uninitialized", "array1+0x4"),
        ("atom.shared.add.u32 %r1, [s+4], 1; // HERE", "uninitialized", "shared+0x4"),
        ("st.local.u32 [d+16], %r0; // HERE", "out_of_bounds", "local+0x10"),
    ],
)
def test_fault_is_reported_with_its_line(assemble, line_of, access, kind, words):
    program = assemble(
        f"setp.ne.u32 %p1, %tid, 37; @%p1 exit; mov.u32 %r0, 1;\n{access}", "out x", shared=".shared .align 16 .b8 s[64]; .local .b8 d[16];"
    )
    for seed in SEEDS:
        found = hazards(program, [np.zeros(32, np.uint32), Uninitialized(np.zeros(4, np.uint32))], 64, seed=seed)
        assert [h.kind for h in found] == [kind], [str(h) for h in found]
        assert (found[0].line, found[0].warp, found[0].lane) == (line_of(program, "HERE"), 1, 5)
        assert words in found[0].message
        assert isinstance(found[0].address, int)


def test_faulting_loads_give_poison_and_stores_are_dropped(assemble):
    body = OUT + "ld.global.f32 %f1, [%rd60+256]; st.global.u32 [%rd60+256], 1; st.global.f32 [%rd1], %f1;"
    out = np.zeros(32, np.float32)
    assert {h.kind for h in hazards(assemble(body, "out"), [out])} == {"out_of_bounds"}
    assert np.isnan(out).all()


def test_initialisation_is_tracked_by_the_byte(assemble):
    """Writing the low half of a word leaves its high half unwritten."""
    body = "setp.ne.u32 %p1, %tid, 0; @%p1 exit; st.{space}.u16 [{at}], 1; ld.{space}.u16 %r1, [{at}]; ld.{space}.u32 %r2, [{at}];"
    for space, at in (("shared", "s"), ("global", "%rd60")):
        program = assemble(body.format(space=space, at=at), "x", shared=".shared .align 4 .b8 s[8];")
        assert [h.kind for h in hazards(program, [Uninitialized(np.zeros(4, np.uint32))])] == ["uninitialized"]


def test_poison_survives_until_written_across_launches(assemble):
    memory = Memory()
    x, out = np.zeros(32, np.uint32), np.zeros(32, np.uint32)
    memory.poison(x)
    copy = assemble(
        OUT + "mul.wide.u32 %rd2, %tid, 4; add.s64 %rd2, %rd61, %rd2; ld.global.u32 %r1, [%rd2]; st.global.u32 [%rd1], %r1;", "out x"
    )
    assert [h.kind for h in copy.launch("k", 1, 32, 0, [out, x], memory).hazards] == ["uninitialized"]
    fill = assemble(OUT + "st.global.u32 [%rd1], %tid;", "x")
    assert not fill.launch("k", 1, 32, 0, [x], memory).hazards
    assert not copy.launch("k", 1, 32, 0, [out, x], memory).hazards
    assert out.tolist() == list(range(32))


def test_a_finding_is_reported_once_with_its_count(assemble):
    program = assemble(
        "mov.u32 %r1, 0; L: ld.shared.u32 %r2, [s]; add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 10; @%p1 bra L;", shared=".shared .u32 s;"
    )
    found = hazards(program, [])
    assert len(found) == 1
    assert found[0].count == 10
    assert str(found[0]).endswith("[10 times]")


def test_without_checks_nothing_is_reported(assemble):
    program = assemble(
        "ld.shared.u32 %r1, [s]; st.shared.u32 [s], %tid;" + OUT + "st.global.u32 [%rd1], %tid;", "out", shared=".shared .u32 s;"
    )
    out = np.zeros(64, np.uint32)
    assert not hazards(program, [out], 64, check=False)
    assert out.tolist() == list(range(64))


def test_mappings_are_aligned_guarded_and_stable():
    memory = Memory()
    arrays = [np.zeros(n, np.uint8) for n in (1, 1000, 4096)]
    bases = [memory.map(a) for a in arrays]
    assert all(b % 256 == 0 for b in bases)
    assert all(later - base >= a.nbytes + 4096 for base, later, a in zip(bases, bases[1:], arrays, strict=False))
    assert memory.map(arrays[1]) == bases[1]
    with pytest.raises(ValueError, match="C-contiguous"):
        memory.map(np.zeros((4, 4))[:, 1:])


def test_read_only_arrays_refuse_stores(assemble):
    x = np.zeros(32, np.uint32)
    x.setflags(write=False)
    found = hazards(assemble(OUT + "st.global.u32 [%rd1], %tid;", "out"), [x])
    assert [h.kind for h in found] == ["out_of_bounds"]
    assert "read-only" in found[0].message
