"""What a finding says: both accesses, source lines, names of regions, what is missing, and JSON."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest

from fa4gen.codegen.emulator import LaunchError, Program
from fa4gen.codegen.emulator.command import run_command
from fa4gen.codegen.emulator.regions import Regions

pytestmark = pytest.mark.filterwarnings("error")

RACE = """.version 8.6
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 dyn[];
.entry k(.param .u64 x) {
.reg .pred %p<4>; .reg .b32 %r<8>; .reg .b64 %rd<4>; .shared .align 4 .b32 table[64];
.loc 1 10 3
mov.u32 %r1, %tid.x; shl.b32 %r2, %r1, 2; mov.u32 %r3, dyn; add.u32 %r3, %r3, %r2; xor.b32 %r4, %r2, 128; mov.u32 %r5, dyn;
add.u32 %r5, %r5, %r4; st.shared.u32 [%r3+256], 0; bar.sync 0;
.loc 1 12 5
st.shared.u32 [%r3+256], %r1;
.loc 2 40 1, function_name $L__info_string0, inlined_at 1 14 2
ld.shared.u32 %r6, [%r5+256];
ret;
}
.file 1 "/home/someone/attention.cu"
.file 2 "include/helpers.cuh"
"""


def findings(**options):
    return Program.from_ptx(RACE).launch("k", 1, 64, 1024, [np.zeros(4, np.uint32)], **options).hazards


def test_a_finding_names_both_accesses_their_sources_and_what_is_missing():
    (race,) = findings()
    writes = race.line == 11
    assert {race.line, race.other.line} == {11, 13}
    assert (race.source, race.other.source) == (("attention.cu:12", "helpers.cuh:40") if writes else ("helpers.cuh:40", "attention.cu:12"))
    lines = race.report().split("\n")
    assert len(lines) == 4
    assert lines[0] == str(race)
    assert race.source in lines[1]
    assert race.other.source in lines[2]
    assert "barrier" in lines[3]
    assert "/home" not in race.report()


def test_regions_name_addresses():
    (race,) = findings(regions={"ring": (0, 256), "xchg": (256, 512, (2, 64))})
    assert "(xchg[0][" in race.message
    assert "(xchg[0][" in race.place
    (race,) = findings(regions={"all": (0, 1024)})
    assert "(all+0x" in race.message


def test_static_variables_are_named():
    text = RACE.replace("mov.u32 %r3, dyn", "mov.u32 %r3, table").replace("mov.u32 %r5, dyn", "mov.u32 %r5, table").replace("+256", "")
    (race,) = Program.from_ptx(text).launch("k", 1, 64, 1024, [np.zeros(4, np.uint32)]).hazards
    assert "(table[" in race.message


def test_names_of_places():
    regions = Regions()
    regions.add("ring", 1024, 64)
    regions.add("xchg", 2048, 1024, (2, 128))
    assert regions.name(1024) == "ring"
    assert regions.name(1030) == "ring+0x6"
    assert regions.name(1088) == ""
    assert regions.name(2048 + 4 * (128 + 17)) == "xchg[1][17]"
    assert regions.name(2048 + 4 * 17 + 2) == "xchg[0][17]+2"
    assert regions.shared(1023 + 1) == "shared+0x0 (ring)"
    assert regions.shared(5000) == f"shared{5000 - 1024:+#x}"


@pytest.mark.parametrize("region", [(0,), (0, 0), (-1, 4), (1000, 100), (0, 10, (3,)), ("a", 4), (0, 16, (0,)), (0, 8, "ab")], ids=str)
def test_bad_regions(region):
    with pytest.raises(LaunchError, match="region") as error:
        findings(regions={"x": region})
    assert "\n" not in str(error.value)


def run(folder, *, ptx=RACE, **options):
    (folder / "k.ptx").write_text(ptx)
    np.save(folder / "x.npy", np.zeros(4, np.uint32))
    out, err = io.StringIO(), io.StringIO()
    args = [f"inout:{folder}/x.npy"]
    status = run_command(folder / "k.ptx", "k", block="64", smem=1024, args=args, stdout=out, stderr=err, **options)
    return status, out.getvalue(), err.getvalue()


def test_the_command_prints_the_report(tmp_path):
    status, out, err = run(tmp_path, regions=["xchg=256,512,2x64"])
    assert (status, out) == (1, "")
    assert err.startswith("race: ")
    assert "attention.cu:12" in err
    assert "xchg[0][" in err


def test_json(tmp_path):
    status, out, err = run(tmp_path, as_json=True)
    assert (status, err) == (1, "")
    (race,) = json.loads(out)["hazards"]
    assert race["kind"] == "race"
    assert {race["line"], race["other"]["line"]} == {11, 13}
    assert race["count"] >= 1
    assert race["missing"]
    clean = RACE.replace(".loc 2 40 1", "bar.sync 0; .loc 2 40 1")
    status, out, err = run(tmp_path, ptx=clean, as_json=True)
    assert (status, err) == (0, "")
    assert json.loads(out)["hazards"] == []
    assert json.loads(out)["instructions"] > 0


def test_exploring_from_the_command(tmp_path):
    status, out, err = run(tmp_path, explore=10)
    assert status == 1
    assert out.startswith("all 1 interleaving of 2 synchronisation events")
    assert err.startswith("race: ")
    status, out, _ = run(tmp_path, explore=10, as_json=True)
    assert json.loads(out)["exploration"]["complete"] is True
    order = RACE.replace("st.shared.u32 [%r3+256], %r1;", "ld.param.u64 %rd1, [x]; atom.global.exch.b32 %r7, [%rd1], %r1;")
    order = order.replace("ld.shared.u32 %r6, [%r5+256];", "")
    status, out, err = run(tmp_path, ptx=order, explore=10)
    assert (status, err) == (1, "")
    assert "2 different outputs" in out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule": "fair"}, "schedule 'fair'"),
        ({"regions": ["xchg"]}, "--region 'xchg'"),
        ({"regions": ["xchg=0,10,3"]}, "not an array"),
        ({"regions": ["xchg=0,4096"]}, "ends at byte"),
    ],
)
def test_usage_errors(tmp_path, options, words):
    status, out, err = run(tmp_path, **options)
    assert (status, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


def test_a_deadlock_says_who_would_have_to_come(assemble, line_of):
    body = """
        setp.eq.u32 %p1, %tid, 0; @%p1 mbarrier.init.shared.b64 [s], 2; bar.sync 0; setp.ge.u32 %p2, %warp, 4; @%p2 bra W;
        setp.eq.u32 %p3, %warp, 3; @%p3 exit;
        bar.sync 1, 128; // BAR
        W: setp.eq.u32 %p4, %tid, 128; @%p4 mbarrier.arrive.expect_tx.shared.b64 _, [s], 16384; // ARRIVE
        V: mbarrier.try_wait.parity.shared.b64 %p5, [s], 0; @!%p5 bra V; // WAIT
    """
    program = assemble(body, shared=".shared .align 8 .b64 s;")
    for seed in range(6):
        (found,) = [h for h in program.launch("k", 1, 192, seed=seed).hazards if h.kind == "deadlock"]
        for part in (
            f"warps 0-2 at PTX line {line_of(program, 'BAR')} wait for barrier 1 (96 of 128 threads have arrived)",
            "which warps 4-5 never reached",
            "warp 3 exited without",
            f"warps 4-5 at PTX line {line_of(program, 'WAIT')} wait for mbarrier shared+0x0 (s)",
            "phase 0 needs 1 more arrival and 16,384 bytes",
            f"last arrived: warp 4 at PTX line {line_of(program, 'ARRIVE')}",
        ):
            assert part in found.message, found.message
