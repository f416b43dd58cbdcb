"""`fa4gen emulate`: arguments, exit statuses, one-line errors, outputs that appear whole or not at all."""

from __future__ import annotations

import io
import json
import os

import numpy as np
import pytest

from fa4gen.codegen.emulator.command import run_command

pytestmark = pytest.mark.filterwarnings("error")

PTX = """.version 8.0
.target sm_90a
.address_size 64
.entry scale(.param .u64 out, .param .u64 x, .param .f32 factor, .param .u32 offset) {
.reg .b32 %r<8>; .reg .f32 %f<4>; .reg .b64 %rd<8>;
ld.param.u64 %rd1, [out]; ld.param.u64 %rd2, [x]; ld.param.f32 %f1, [factor]; ld.param.u32 %r4, [offset]; mov.u32 %r1, %tid.x;
mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x;
mad.lo.u32 %r1, %r2, %r3, %r1; mul.wide.u32 %rd3, %r1, 4; add.s64 %rd4, %rd2, %rd3; ld.global.f32 %f2, [%rd4]; mul.f32 %f2, %f2, %f1;
cvt.u64.u32 %rd5, %r4; add.s64 %rd3, %rd3, %rd5; add.s64 %rd4, %rd1, %rd3; st.global.f32 [%rd4], %f2; ret; }
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "k.ptx").write_text(PTX)
    np.save(tmp_path / "x.npy", np.arange(64, dtype=np.float32))
    return tmp_path


def run(folder, args, file="k.ptx", entry="scale", grid="2", block="32", **options):
    stderr = io.StringIO()
    status = run_command(
        folder / file, entry, grid, block, args=[a.replace("@", str(folder) + "/") for a in args], stderr=stderr, **options
    )
    return status, stderr.getvalue()


GOOD = ["out:float32[64]:@y.npy", "in:@x.npy", "f32:0.5", "u32:0"]


def test_clean_run_writes_its_output(folder):
    assert run(folder, GOOD) == (0, "")
    assert (np.load(folder / "y.npy") == np.arange(64) * 0.5).all()
    assert sorted(p.name for p in folder.iterdir()) == ["k.ptx", "x.npy", "y.npy"]


def test_inout_and_the_only_entry(folder):
    assert run(folder, ["inout:@x.npy", "in:@x.npy", "f32:2", "u32:0"], entry=None) == (0, "")
    assert (np.load(folder / "x.npy") == np.arange(64) * 2).all()


def test_hazards_are_listed_and_can_be_ignored(folder):
    args = [*GOOD[:3], "u32:4"]
    status, text = run(folder, args)
    assert status == 1
    first, at = text.splitlines()
    assert first.startswith("out_of_bounds: write of 4 bytes at global")
    assert at.startswith("    at     PTX line ")
    assert run(folder, args, ignore=["out_of_bounds"]) == (0, "")
    assert np.isnan(np.load(folder / "y.npy")[0])


def test_profile_is_printed_on_stdout(folder):
    stdout = io.StringIO()
    assert run(folder, GOOD, profile=True, stdout=stdout) == (0, "")
    assert stdout.getvalue().splitlines()[-2:] == ["global load            2    256", "global store           2    256"]


def test_json_holds_the_profile(folder):
    stdout = io.StringIO()
    assert run(folder, GOOD, profile=True, as_json=True, stdout=stdout)[0] == 0
    assert json.loads(stdout.getvalue())["profile"]["traffic"]["global load"] == {"operations": 2, "bytes": 256}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"args": GOOD[:3]}, "takes 4 arguments, not 3"),
        ({"args": [*GOOD[:3], "u32:-1"]}, "does not fit u32"),
        ({"args": [*GOOD[:3], "u32:x"]}, "not a number"),
        ({"args": [*GOOD[:3], "u99:1"]}, "unknown form"),
        ({"args": [*GOOD[:3], "7"]}, "has no form"),
        ({"args": [GOOD[0], "in:@nope.npy", *GOOD[2:]]}, "no file"),
        ({"args": [GOOD[0], "in:@k.ptx", *GOOD[2:]]}, "not a .npy array"),
        ({"args": ["out:float32:@y.npy", *GOOD[1:]]}, "is not in:FILE"),
        ({"args": ["out:floot[4]:@y.npy", *GOOD[1:]]}, "unknown dtype"),
        ({"args": ["out:float32[99999999999]:@y.npy", *GOOD[1:]]}, "bytes is not in"),
        ({"args": ["out:float32[64]:@no/y.npy", *GOOD[1:]]}, "no such folder"),
        ({"args": GOOD, "file": "nope.ptx"}, "cannot be read"),
        ({"args": GOOD, "file": "x.npy"}, "PTX"),
        ({"args": GOOD, "entry": "nope"}, "no entry 'nope'"),
        ({"args": GOOD, "grid": "0"}, "below 1"),
        ({"args": GOOD, "block": "2000"}, "larger than 1024"),
        ({"args": GOOD, "block": "1,2,3,4"}, "--block"),
        ({"args": GOOD, "grid": "-1"}, "--grid"),
        ({"args": GOOD, "smem": 300000}, "shared memory"),
        ({"args": GOOD, "ignore": ["rase"]}, "--ignore 'rase'"),
    ],
)
def test_usage_errors_are_one_line_and_write_nothing(folder, change, words):
    status, text = run(folder, **change)
    assert status == 2
    assert words in text
    assert text.count("\n") == 1
    assert not (folder / "y.npy").exists()


def test_tensor_map_arguments(folder):
    (folder / "t.ptx").write_text(
        """.version 8.6
        .target sm_90a
        .address_size 64
        .entry copy(.param .align 64 .b8 source[128], .param .align 64 .b8 target[128]) {
        .reg .pred %p<4>; .reg .b32 %r<8>; .reg .b64 %rd<8>; .shared .align 128 .b8 s[512]; .shared .align 8 .b64 b;
        mov.u32 %r1, %tid.x; setp.ne.u32 %p1, %r1, 0; @%p1 exit; mbarrier.init.shared.b64 [b], 1; fence.mbarrier_init.release.cluster;
        mov.b64 %rd1, source;
        cvta.param.u64 %rd1, %rd1; mov.b64 %rd2, target; cvta.param.u64 %rd2, %rd2;
        mbarrier.arrive.expect_tx.shared.b64 _, [b], 512;
        cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [s], [%rd1, {0, 4}], [b];
        W: mbarrier.try_wait.parity.shared.b64 %p2, [b], 0; @!%p2 bra W;
        cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd2, {0, 0}], [s];
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; ret; }"""
    )
    np.save(folder / "m.npy", np.arange(512, dtype=np.uint32).reshape(16, 32))
    for name, array in (("a", f"in:{folder}/m.npy"), ("b", f"out:uint32[4,32]:{folder}/n.npy")):
        (folder / f"{name}.json").write_text(json.dumps({"array": array, "box": [4, 32], "swizzle": 128}))
    assert run(folder, ["tensormap:@a.json", "tensormap:@b.json"], file="t.ptx", entry="copy", grid="1") == (0, "")
    assert (np.load(folder / "n.npy") == np.arange(128, 256).reshape(4, 32)).all()
    for content, words in (
        ("{", "not JSON"),
        ('{"box": [4]}', "at least"),
        ('{"array": "in:x", "box": [1], "boxx": 1}', "unknown field 'boxx'"),
    ):
        (folder / "a.json").write_text(content)
        status, text = run(folder, ["tensormap:@a.json", "tensormap:@b.json"], file="t.ptx", entry="copy", grid="1")
        assert (status, text.count("\n")) == (2, 1)
        assert words in text


ENDLESS = """
.version 9.0
.target sm_90a
.address_size 64
.visible .entry endless(.param .u64 p)
{
    .reg .b64 %rd<2>;
    .reg .b32 %r<2>;
    ld.param.u64 %rd1, [p];
    mov.u32 %r1, 1;
AGAIN:
    st.global.u32 [%rd1], %r1;
    bra AGAIN;
}
"""


def test_an_endless_kernel_ends_with_its_budget_in_one_line(tmp_path):
    (tmp_path / "endless.ptx").write_text(ENDLESS)
    out, err = io.StringIO(), io.StringIO()
    arguments = [f"out:uint32[1]:{tmp_path / 'y.npy'}"]
    assert run_command(tmp_path / "endless.ptx", None, block="1", args=arguments, budget=5000, stdout=out, stderr=err) == 2
    assert len(err.getvalue().splitlines()) == 1
    assert "5000" in err.getvalue()
    assert not (tmp_path / "y.npy").exists()


def test_a_file_that_is_no_file_or_too_large_is_refused_at_once(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr("fa4gen.codegen.emulator.command.MAX_PTX_BYTES", 100)
    (tmp_path / "large.ptx").write_text(ENDLESS)
    for name, word in (("pipe", "regular file"), ("large.ptx", "bytes")):
        err = io.StringIO()
        assert run_command(tmp_path / name, None, stderr=err) == 2
        assert len(err.getvalue().splitlines()) == 1
        assert word in err.getvalue()


def test_json_of_a_run_that_was_given_up(folder):
    """What was found until then, and why it stopped; stderr has the one line alone."""
    (folder / "spin.ptx").write_text(
        ".version 8.0\n.target sm_90a\n.address_size 64\n.entry spin() {\n.reg .b32 %r<4>; .shared .u32 x;\n"
        "mov.u32 %r1, %tid.x;\nL: st.shared.u32 [x], %r1;\nbra L; }"
    )
    stdout = io.StringIO()
    status, text = run(folder, [], file="spin.ptx", entry="spin", grid="1", budget=2000, as_json=True, stdout=stdout)
    assert status == 2
    report = json.loads(stdout.getvalue())
    assert {hazard["kind"] for hazard in report["hazards"]} == {"race"}
    assert text.splitlines() == [f"fa4gen emulate: {report['stopped']}"]
    assert "budget is 2000" in report["stopped"]
