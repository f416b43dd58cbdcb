"""The PTX grammar: scopes, labels, literals, dialects, and one clear line for everything malformed."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest

from fa4gen.codegen.emulator import LaunchError, Program, PtxError
from fa4gen.codegen.emulator.ptx import parse

pytestmark = pytest.mark.filterwarnings("error")

HEADER = ".version 8.8\n.target sm_90a\n.address_size 64\n"


def run(program: Program, count: int = 32, entry: str = "k") -> np.ndarray:
    out = np.zeros(count, np.uint32)
    result = program.launch(entry, 1, count, 0, [out])
    assert not result.hazards
    return out


def test_scopes_redeclare_registers_and_labels(assemble):
    """Inline assembly bodies are nested scopes: the same names again are other registers and other labels."""
    program = assemble(
        """
        mov.u32 %r1, 5;
        { .reg .b32 %r1; .reg .pred P1; mov.u32 %r1, 7;
          setp.eq.u32 P1, %r1, 7; @P1 bra DONE; mov.u32 %r1, 9; DONE: mov.u32 %r2, %r1; }
        { .reg .b32 %r1; .reg .pred P1; mov.u32 %r1, 70;
          setp.eq.u32 P1, %r1, 7; @P1 bra DONE; mov.u32 %r1, 90; DONE: mov.u32 %r3, %r1; }
        mad.lo.u32 %r4, %r1, 10000, %r2; mad.lo.u32 %r4, %r3, 100, %r4;
        mul.wide.u32 %rd1, %tid, 4; add.s64 %rd1, %rd60, %rd1; st.global.u32 [%rd1], %r4;
        """,
        "out",
    )
    assert (run(program) == 5 * 10000 + 7 + 90 * 100).all()


@pytest.mark.parametrize(
    ("literal", "bits"),
    [("-1", 0xFFFFFFFF), ("0x1f", 31), ("017", 15), ("0b101", 5), ("12U", 12), ("0f3F800000", 0x3F800000), ("0fBF800000", 0xBF800000)],
)
def test_literals(assemble, literal, bits):
    program = assemble(f"mov.b32 %r1, {literal}; mul.wide.u32 %rd1, %tid, 4; add.s64 %rd1, %rd60, %rd1; st.global.b32 [%rd1], %r1;", "out")
    assert (run(program) == bits).all()


def test_foreign_dialect():
    """What LLVM prints: .param::entry, untyped moves, .ptr attributes, names with $, launch bounds, a block comment."""
    text = (
        HEADER.replace("sm_90a", "sm_100a")
        + """
    /* generated */ .extern .shared .align 128 .b8 dyn$mem_1[];
    .visible .entry kernel_$abc_0123456789(.param .u64 .ptr .global .align 16 kernel_$abc_param_0,
    .param .align 8 .b8 kernel_$abc_param_1[24])
    .maxntid 64 .minnctapersm 1 .explicitcluster .reqnctapercluster 1, 1, 1
    { .reg .pred %p<2>; .reg .b32 %r<9>; .reg .b64 %rd<5>;
      ld.param::entry.b64 %rd1, [kernel_$abc_param_0]; ld.param::entry.b32 %r1, [kernel_$abc_param_1+16];
      mov.b32 %r2, dyn$mem_1; mov.b32 %r7, 1; .loc 1 2 3
      mov.u32 %r3, %tid.x; shl.b32 %r4, %r3, 2; add.s32 %r5, %r2, %r4; st.shared.b32 [%r5], %r1;
      bar.sync %r7, 64; xor.b32 %r6, %r4, 128; add.s32 %r5, %r2, %r6; ld.shared.b32 %r8, [%r5];
      mul.wide.u32 %rd2, %r3, 4; add.s64 %rd3, %rd1, %rd2; st.global.b32 [%rd3], %r8; ret; }"""
    )
    program = Program.from_ptx(text)
    out = np.zeros(64, np.uint32)
    result = program.launch("kernel_$abc_0123456789", 1, 64, 256, [out, np.array([1, 2, 3, 4, 5, 6], np.uint32).tobytes()])
    assert not result.hazards
    assert (out == 5).all()


def test_parameters_have_their_layout():
    entry = parse(HEADER + ".entry k(.param .u32 a, .param .u64 b, .param .align 64 .b8 c[128], .param .u8 d) { ret; }").entries["k"]
    assert [(p.name, p.offset, p.size, p.align) for p in entry.params] == [
        ("a", 0, 4, 4),
        ("b", 8, 8, 8),
        ("c", 64, 128, 64),
        ("d", 192, 1, 1),
    ]


@pytest.mark.parametrize(
    ("body", "line", "words"),
    [
        ("frobnicate.u32 %r1, %r2;", 5, "unknown instruction frobnicate.u32"),
        ("add.u32 %r1, %r2, %nope;", 5, "unknown register %nope"),
        ("bra NOWHERE;", 5, "unknown label NOWHERE"),
        ("add.u32 %r1, %r2;", 5, "takes 3 operands"),
        ("add.f32 %p1, %r1, %r2;", 5, "is .pred"),
        ("mov.u32 %r1, %r2", 6, "expected"),
        ("@%r1 bra X; X:", 5, "not a predicate"),
        ("ld.global.u32 %r1, %r2;", 5, "brackets"),
        ("X: X: ret;", 5, "defined twice"),
        ("add.u32 %r1, %r2, 0xzz;", 5, ""),
        ("call foo;", 5, "not supported"),
        ("mov.u32 %r1, nothing_here;", 5, "unknown name nothing_here"),
        ("setmaxnreg.inc.sync.aligned.u32 7;", 5, "multiple of 8"),
        ("ld.shared.u64 %r1, [%r2];", 5, "narrower"),
    ],
)
def test_malformed_text_names_its_line(body, line, words):
    text = HEADER + ".entry k() {\n.reg .pred %p<4>; .reg .b32 %r<4>; " + body + "\n}\n"
    with pytest.raises(PtxError) as error:
        Program.from_ptx(text)
    message = str(error.value)
    assert message.startswith(f"PTX line {line}:")
    assert words in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "text", ["", "hello", "{", "\x00\x01", ".version", ".version 8.0\n.entry k(", HEADER + ".entry k() {" + "{" * 50000]
)
def test_junk_is_refused(text):
    with pytest.raises(PtxError):
        Program.from_ptx(text)


def test_any_truncation_is_refused_or_parsed(assemble):
    """Cutting a program anywhere never does anything but raise PtxError."""
    text = assemble(
        "L: setp.lt.u32 %p1, %tid, 4; @!%p1 bra L; { .reg .b32 x; mov.b32 x, -1; st.shared.v4.b32 [s+16], {x, x, %r1, 0f3F800000}; }",
        "a b",
        shared=".shared .align 16 .b8 s[64];",
        module=".const .align 4 .b32 table[4] = {1, -2, 0x3, 4};",
    ).text
    refused = []
    for end in range(len(text)):
        try:
            Program.from_ptx(text[:end])
        except PtxError as error:
            refused.append(str(error))
    assert len(refused) > len(text) // 2
    assert not any("\n" in message for message in refused)


def test_mutated_programs_are_refused_or_run(assemble):
    """Random edits of a program: whatever comes out, parsing and running it raises nothing but the two errors, each one line."""
    text = assemble(
        """
        mul.wide.u32 %rd1, %tid, 4; add.s64 %rd2, %rd60, %rd1; ld.global.v2.f32 {%f1, %f2}, [%rd60+8]; fma.rn.f32 %f3, %f1, 0f3F000000, %f2;
        setp.gt.and.f32 %p1|%p2, %f3, 0f00000000, %p3; @%p1 bra A; shfl.sync.bfly.b32 %r1|%p4, %r2, 1, 31, -1; A: bar.sync 1, 64;
        { .reg .b32 x<4>; mov.b64 {x0, x1}, %rd1; lop3.b32 x2, x0, x1, %r1, 0x96; ld.shared.v2.b32 {x2, _}, [s+8]; }
        mbarrier.init.shared.b64 [s], 1; mbarrier.arrive.expect_tx.shared::cta.b64 _, [s], 0; cvt.rn.bf16x2.f32 %r3, %f1, %f2;
        atom.global.add.u32 %r4, [%rd2], 1; st.global.f32 [%rd2], %f3; selp.b32 %r5, 1, 0, %p2; vote.sync.ballot.b32 %r6, %p1, 0xffffffff;
        """,
        "a",
        shared=".shared .align 16 .b8 s[64];",
    ).text
    pieces = re.findall(r"[\w$%.:]+|\s+|.", text)
    spare = [*pieces, "-1", "0xfffffffffffffffffffff", "1e999", "{", "]", "0", ".v4", "%p1", "%laneid", "99999999999", ".reg", "0f7FC00000"]
    rng = random.Random(5)
    ran = 0
    for seed in range(400):
        mutant = list(pieces)
        for _ in range(rng.choice((1, 1, 2, 3))):
            mutant[rng.randrange(len(mutant))] = rng.choice(spare)
        try:
            program = Program.from_ptx("".join(mutant))
            for entry in program.entries.values():
                args = [np.zeros(64, np.float32) if p.size == 8 else bytes(p.size) for p in entry.params]
                program.launch(entry.name, 2, 64, 128, args, seed=seed, budget=4000)
                ran += 1
        except (PtxError, LaunchError) as error:
            if "\n" in str(error) or len(str(error)) > 500:
                raise
    assert ran > 20


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"entry": "nope"}, "no entry"),
        ({"args": []}, "takes 1 arguments"),
        ({"args": [np.uint32(1)]}, "has 4 bytes"),
        ({"args": [3]}, "pass arrays"),
        ({"args": [np.zeros((4, 4), np.float32).T]}, "C-contiguous"),
        ({"block": 1025}, "larger than 1024"),
        ({"block": (0, 1, 1)}, "below 1"),
        ({"block": (2, 2, 65)}, "larger"),
        ({"grid": 0}, "below 1"),
        ({"grid": (1, 70000, 1)}, "larger than"),
        ({"grid": (2048, 1024, 1)}, "more than the 1048576 CTAs"),
        ({"smem": 232449}, "dynamic shared memory"),
        ({"smem": -1}, "dynamic shared memory"),
        ({"block": 96}, "requires a block"),
    ],
)
def test_impossible_launches_are_refused(arguments, words):
    program = Program.from_ptx(HEADER + ".entry k(.param .u64 a) .reqntid 64 { ret; }")
    call = {"entry": "k", "grid": 1, "block": 64, "smem": 0, "args": [np.zeros(4, np.float32)], **arguments}
    if words == "requires a block":
        call["block"] = 96
    with pytest.raises(LaunchError) as error:
        program.launch(call["entry"], call["grid"], call["block"], call["smem"], call["args"])
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_name_of_any_length_makes_a_short_error():
    """Found by fuzzing: an error quotes names."""
    with pytest.raises(PtxError) as error:
        Program.from_ptx(HEADER + ".entry k() { mov.u32 %r1, " + "x" * 5000 + "; }")
    assert len(str(error.value)) < 400


def test_instruction_budget_ends_an_endless_loop(assemble):
    program = assemble("L: st.shared.u32 [s], %tid; bra L;", shared=".shared .u32 s;")
    with pytest.raises(PtxError, match="budget"):
        program.launch("k", 1, 32, budget=50_000)


@pytest.mark.parametrize("directive", [".reqnctapercluster", ".maxclusterrank", ".reqntid", ".maxntid", ".minnctapersm", ".maxnreg"])
@pytest.mark.parametrize("value", ["0", "-1", "2, 0, 1"])
def test_a_dimension_below_1_is_refused(directive, value):
    with pytest.raises(PtxError, match=f"PTX line .*{directive} {value}: a dimension below 1"):
        Program.from_ptx(HEADER + f".entry k(.param .u64 a) {directive} {value} {{ ret; }}")


@pytest.mark.parametrize(
    ("declaration", "match"),
    [(f".shared .align {n} .b8 x[4];", f"PTX line .*\\.align {n} is no power of two") for n in (0, 3, -8)]
    + [(".shared .b8 x[-5];", "PTX line .*x has a negative dimension")],
)
def test_declarations_that_cannot_be_are_refused(declaration, match):
    with pytest.raises(PtxError, match=match):
        Program.from_ptx(HEADER + f".entry k() {{ {declaration} ret; }}")
