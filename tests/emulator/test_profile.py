"""Counts of a launch: wavefronts of shared memory for known access patterns, and bytes by engine."""

from __future__ import annotations

import numpy as np
import pytest

from fa4gen.codegen.emulator import Program, TensorMap
from fa4gen.codegen.emulator.profile import wavefronts

LANES = np.arange(32)


@pytest.mark.parametrize(
    ("address", "size", "expected"),
    [
        (4 * LANES, 4, (1, 1)),
        (4 * (31 - LANES), 4, (1, 1)),
        (0 * LANES, 4, (1, 1)),
        (2 * LANES, 2, (1, 1)),
        (LANES, 1, (1, 1)),
        (8 * LANES, 4, (2, 1)),
        (12 * LANES, 4, (1, 1)),
        (128 * LANES, 4, (32, 1)),
        (128 * (LANES % 2), 4, (2, 1)),
        (132 * LANES, 4, (1, 1)),
        (8 * LANES, 8, (2, 2)),
        (16 * LANES, 8, (4, 2)),
        (16 * LANES, 16, (4, 4)),
        (128 * LANES, 16, (32, 4)),
        (128 * LANES + 16 * (LANES % 8), 16, (4, 4)),
        (512 * (LANES // 8), 16, (4, 4)),
    ],
)
def test_wavefronts_of_a_warp(address, size, expected):
    assert wavefronts(np.asarray(address), LANES, size) == expected


def test_idle_lanes_and_passes_cost_nothing():
    some = np.array([3, 9, 30])
    assert wavefronts(128 * some, some, 4) == (3, 1)
    assert wavefronts(16 * some, some, 16) == (3, 3)
    assert wavefronts(8 * LANES[:16], LANES[:16], 8) == (1, 1)


def launch(program: Program, args=(), threads: int = 32):
    result = program.launch("k", 1, threads, 0, list(args), profile=True)
    assert not result.hazards
    assert result.profile is not None
    return result.profile


def traffic(profile):
    return {name: (t.operations, t.bytes) for name, t in profile.traffic.items()}


def test_lines_and_engines(assemble):
    program = assemble(
        """
        mov.u32 %r1, s; mad.lo.u32 %r2, %tid, 4, %r1; mad.lo.u32 %r3, %lane, 8, %r1; mad.lo.u32 %r4, %lane, 128, %r1;
        mul.wide.u32 %rd1, %tid, 4; add.s64 %rd1, %rd60, %rd1; ld.global.u32 %r5, [%rd1];
        st.shared.u32 [%r2], %r5; bar.sync 0;
        ld.shared.v2.u32 {%r6, %r7}, [%r3]; bar.sync 0;
        setp.lt.u32 %p1, %tid, 4;
        @%p1 st.shared.u32 [%r4], %r6;
        bar.sync 0;
        atom.shared.add.u32 %r8, [s], 1;
        st.global.u32 [%rd1], %r6;
        """,
        "a",
        shared=".shared .align 16 .b8 s[4096];",
    )
    profile = launch(program, [np.arange(64, dtype=np.uint32)], 64)
    assert [(s.opcode, s.executions, s.lanes, s.wavefronts, s.ideal) for s in profile.lines] == [
        ("st.shared.u32", 2, 64, 2, 2),
        ("ld.shared.v2.u32", 2, 64, 4, 4),
        # Warp 1 has no active lane here.
        ("st.shared.u32", 1, 4, 4, 1),
        ("atom.shared.add.u32", 2, 64, 0, 0),
    ]
    assert traffic(profile) == {
        "global load": (2, 256), "global store": (2, 256), "shared load": (2, 512), "shared store": (3, 272), "shared atomic": (2, 256),
    }  # fmt: skip


COPIES = """.version 8.6
.target sm_90a
.address_size 64
.entry k(.param .u64 a, .param .align 64 .b8 m[128]) {
.reg .pred %p<4>; .reg .b32 %r<8>; .reg .b64 %rd<8>; .shared .align 128 .b8 s[2048]; .shared .align 8 .b64 b;
ld.param.u64 %rd2, [a]; mov.u32 %r1, %tid.x; setp.ne.u32 %p1, %r1, 0; @%p1 exit;
mbarrier.init.shared.b64 [b], 1; fence.proxy.async; fence.mbarrier_init.release.cluster;
mov.b64 %rd1, m; cvta.param.u64 %rd1, %rd1;
mbarrier.arrive.expect_tx.shared.b64 _, [b], 1088;
cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [s], [%rd1, {0, 4}], [b];
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [s+1024], [%rd2], 64, [b];
W: mbarrier.try_wait.parity.shared.b64 %p2, [b], 0; @!%p2 bra W;
cp.async.bulk.global.shared::cta.bulk_group [%rd2], [s], 32;
cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; ret; }
"""


def test_copies():
    array = np.zeros((32, 32), np.uint32)
    profile = launch(Program.from_ptx(COPIES), [np.zeros(64, np.uint32), TensorMap(array, box=(8, 32))])
    assert traffic(profile) == {"tensor copy load": (1, 1024), "bulk copy load": (1, 64), "bulk copy store": (1, 32)}


def test_a_launch_without_profile_has_none(assemble):
    assert assemble("").launch("k", 1, 32).profile is None


def test_the_table_and_the_json_hold_the_same(assemble):
    profile = launch(
        assemble("mov.u32 %r1, s; mad.lo.u32 %r1, %tid, 8, %r1; st.shared.u32 [%r1], %r1;", shared=".shared .align 16 .b8 s[256];")
    )
    ((line,), moved) = profile.as_dict().values()
    assert (line["wavefronts"], line["ideal"], moved) == (2, 1, {"shared store": {"operations": 1, "bytes": 128}})
    rows = [row.split() for row in str(profile).splitlines()]
    assert rows[1] == [str(line["line"]), "st.shared.u32", "1", "2", "1", "1"]
    assert rows[2] == ["total", "1", "2", "1", "1"]
    assert rows[-1] == ["shared", "store", "1", "128"]
