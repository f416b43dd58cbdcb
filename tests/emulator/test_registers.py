"""setmaxnreg and griddepcontrol: no values change, broken rules are found."""

from __future__ import annotations

import pytest

from fa4gen.codegen.emulator import PtxError

pytestmark = pytest.mark.filterwarnings("error")

SEEDS = range(6)
SPLIT = "shr.u32 %r1, %warp, 2; setp.eq.u32 %p1, %r1, 0; @%p1 bra FIRST; {others} bra END; FIRST: {first} END: bar.sync 0;"


def run(assemble, first: str, others: str, threads: int, seed: int = 0):
    return assemble(SPLIT.format(first=first, others=others)).launch("k", 1, threads, seed=seed).hazards


def test_a_warp_specialized_kernel_is_clean(assemble):
    others = "griddepcontrol.wait; griddepcontrol.launch_dependents; setmaxnreg.dec.sync.aligned.u32 40;"
    for seed in SEEDS:
        assert not run(assemble, "setmaxnreg.inc.sync.aligned.u32 240;", others, 384, seed)


def test_increase_waits_for_a_decrease(assemble):
    """Two warpgroups hold 256 registers a thread each; the third gets 24 only when one of them gives some back."""
    body = (
        "shr.u32 %r1, %warp, 2; setp.eq.u32 %p1, %r1, 2; @%p1 bra THIRD; setmaxnreg.inc.sync.aligned.u32 256; bar.sync 1, 384;"
        "setp.eq.u32 %p2, %r1, 0; @%p2 bra END; {give} bra END;"
        "THIRD: bar.sync 1, 384; setmaxnreg.inc.sync.aligned.u32 24; END: bar.sync 0;"
    )
    for seed in SEEDS:
        assert not assemble(body.format(give="setmaxnreg.dec.sync.aligned.u32 200;")).launch("k", 1, 384, seed=seed).hazards
        found = assemble(body.format(give="")).launch("k", 1, 384, seed=seed).hazards
        assert [h.kind for h in found] == ["deadlock"]
        assert "wait for 768 registers (65536 of 65536 are held by others)" in found[0].message


def test_roles_of_one_warpgroup_may_differ(assemble):
    program = assemble(
        "setp.eq.u32 %p1, %warp, 1; @%p1 bra OTHER; setmaxnreg.inc.sync.aligned.u32 64; bra END; OTHER: setmaxnreg.dec.sync.aligned.u32 24;"
        "END: bar.sync 0;"
    )
    for seed in SEEDS:
        assert not program.launch("k", 1, 128, seed=seed).hazards


def test_part_of_a_warp(assemble):
    program = assemble("setp.lt.u32 %p1, %lane, 9; @%p1 setmaxnreg.dec.sync.aligned.u32 32;")
    assert {h.kind for h in program.launch("k", 1, 32).hazards} == {"barrier"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("setmaxnreg.inc.sync.aligned.u32 260;", "a multiple of 8 in 24..256"),
        ("setmaxnreg.dec.sync.aligned.u32 16;", "a multiple of 8 in 24..256"),
        ("setmaxnreg.dec.sync.aligned.u32 %r1;", "must be an integer constant"),
        ("setmaxnreg.sync.aligned.u32 32;", "is not supported"),
        ("griddepcontrol.launch;", "is not supported"),
        ("griddepcontrol.wait %r1;", "takes 0 operands"),
    ],
)
def test_malformed(assemble, text, message):
    with pytest.raises(PtxError, match=message):
        assemble(text)
