"""Hostile input: mutated PTX, made-up instructions and absurd launches end in PtxError, LaunchError or a result, soon and in little memory.

A few hundred cases run in every test run, other ones each time their number is raised: FA4GEN_FUZZ=600 fuzzes for ten minutes, from
FA4GEN_FUZZ_SEED on, and prints what would have to become a test here.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fa4gen.codegen.emulator import LaunchError, Memory, Program, PtxError, TensorMap
from fa4gen.codegen.emulator.decode import TABLE

resource = pytest.importorskip("resource")

GENERATED = Path(__file__).parents[2] / "generated"
SECONDS = float(os.environ.get("FA4GEN_FUZZ", "0"))
FIRST = int(os.environ.get("FA4GEN_FUZZ_SEED", "0"))
CASES = 100
CASE_SECONDS = 20
CASE_BYTES = 3 << 30
BUDGET = 20_000

ABSURD = (
    "0", "1", "-1", "3", "7", "31", "33", "255", "256", "65535", "65536", "2147483647", "2147483648", "4294967295", "4294967296",
    "9223372036854775807", "18446744073709551615", "18446744073709551616", "99999999999999999999999999", "-99999999999999999999", "0x0",
    "0xffffffffffffffffff", "08", "0f7fc00000", "0f3f800000", "0d7ff0000000000000", "1e999", "1.5", "0b2",
)  # fmt: skip
TOKEN = re.compile(r"[\w.:%$]+|[^\s\w]")
MODIFIERS = re.findall(
    r"\S+",
    "u8 s8 b8 u16 s16 b16 u32 s32 b32 u64 s64 b64 f16 bf16 f32 f64 f16x2 bf16x2 f32x2 b128 pred e4m3 e5m2 e4m3x2 tf32 rn rz rm rp rni rzi "
    "ftz sat relu NaN approx full wide hi lo cc eq ne lt le gt ge num nan equ and or xor add min max exch cas inc dec popc any all ballot "
    "uni sync arrive red aligned cta cluster gpu sys acquire release relaxed weak volatile acq_rel sc global shared shared::cta "
    "shared::cluster local param const v2 v4 v8 async proxy mbarrier_init bulk tensor 1d 2d 3d 5d tile bulk_group commit_group wait_group "
    "read mbarrier::complete_tx::bytes multicast::cluster L2::cache_hint noinc init inval expect_tx complete_tx try_wait test_wait parity "
    "noComplete m16n8k8 m16n8k16 m64n8k16 m64n256k16 row col x1 x2 x4 x128 trans m8n8 fence mma_async commit wait alloc dealloc "
    "relinquish_alloc_permit ld st cp mma ws cta_group::1 cta_group::2 kind::f16 kind::tf32 16x64b 32x32b 16x256b wait::ld wait::st "
    "before_thread_sync after_thread_sync up down bfly idx match warp l r clamp wrap shiftamt to f4e rc8 128x256b 4x256b warpx4 normal "
    "finite xorsign abs collector::a::fill pack::16b unpack::16b",
)
OPERANDS = (
    "%r1", "%r2", "%r3", "%rd1", "%rd2", "%f1", "%f2", "%p1", "!%p2", "%h1", "%d1", "%r1|%p1", "%p1|%p3", "_", "%tid.x", "%laneid", "table",
    "[table]", "[table+8]", "[%r4]", "[%r4+16]", "[%rd1]", "[%rd1+4]", "[%rd2, {%r1, %r2}]", "[%rd2, {%r1}]", "[x]", "[0]", "[-8]",
    "{%r1, %r2}", "{%f1, %f2, %f3, %f4}", "{%h1, %h2}", "{}", "{%r1, _}", "{%r1, %r2, %r3, %f1}", "%q1", "x", "local", "[local]",
)  # fmt: skip
FRAME = """.version 8.8
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 x, .param .align 64 .b8 map[128]) {{
.reg .pred %p<8>; .reg .b16 %h<8>; .reg .b32 %r<64>; .reg .b64 %rd<16>; .reg .f32 %f<64>; .reg .f64 %d<4>; .reg .b128 %q<4>;
.shared .align 1024 .b8 table[4096]; .local .align 16 .b8 local[64];
ld.param.u64 %rd1, [x]; mov.u64 %rd2, map; mov.u32 %r1, %tid.x; mov.u32 %r4, table; setp.lt.u32 %p1, %r1, 7; setp.eq.u32 %p2, %r1, 3;
shl.b32 %r2, %r1, 2; mov.u32 %r3, 16; mov.f32 %f1, 0f3f800000; mov.f32 %f2, 0f40000000;
{body}
}}
"""


@cache
def corpus() -> tuple[tuple[str, tuple[str, ...]], ...]:
    """(PTX of one entry, its name) of shipped kernels, small and large."""
    result = []
    for file in sorted(GENERATED.glob("*/sm_*/unit.ptx")) + sorted(GENERATED.glob("d*/sm_*/attention.ptx")):
        text = file.read_text(encoding="utf-8")
        head, *bodies = re.split(r"(?=^\.visible \.entry )", text, flags=re.MULTILINE)
        for body in bodies[-1:] if file.name == "attention.ptx" else bodies:
            result.append((head + body, tuple(re.findall(r"\.entry (\w+)", body))))
    return tuple(result)


def made_up(rng: random.Random) -> str:
    """A few instructions of the table with modifiers and operands that need not fit."""
    lines = []
    for _ in range(rng.randrange(1, 5)):
        words = [rng.choice(sorted(TABLE)), *rng.choices(MODIFIERS, k=rng.randrange(0, 5))]
        operands = [rng.choice(ABSURD) if rng.random() < 0.15 else rng.choice(OPERANDS) for _ in range(rng.randrange(0, 6))]
        guard = rng.choice(("", "", "", "@%p1 ", "@!%p2 "))
        lines.append(f"{guard}{'.'.join(words)} {', '.join(operands)};")
    return FRAME.format(body="\n".join(lines))


def of_operand_types(rng: random.Random) -> str:
    """An instruction of a shipped kernel, with other operands or modifiers, alone."""
    text, _ = rng.choice(corpus())
    lines = [line.strip() for line in text.split("\n") if line.endswith(";") and not line.lstrip().startswith((".", "ld.param", "//"))]
    chosen = []
    for line in rng.choices(lines, k=rng.randrange(1, 4)):
        line = re.sub(r"%(rd|r|f|p|h|rs)\d+", lambda m: f"%{'h' if m[1] == 'rs' else m[1]}{rng.randrange(4)}", line)
        line = re.sub(r"\$L\w+", "END", line)
        if rng.random() < 0.7:
            opcode, _, rest = line.partition(" ")
            words = opcode.split(".")
            place = rng.randrange(len(words))
            words[place : place + rng.randrange(2)] = rng.choices(MODIFIERS, k=rng.randrange(2)) if place else words[:1]
            line = ".".join(words) + " " + rest
        if rng.random() < 0.5:
            tokens = TOKEN.findall(line)
            tokens[rng.randrange(len(tokens))] = rng.choice(ABSURD + OPERANDS)
            line = " ".join(tokens)
        chosen.append(line if line.endswith(";") else line + ";")
    return FRAME.format(body="{ .reg .pred complete, accumulate;\n" + "\n".join(chosen) + "\n}\nEND: ret;")


def mutated(rng: random.Random) -> str:
    """A shipped kernel with bytes flipped, its end cut off, tokens swapped, or numbers made absurd."""
    text, _ = rng.choice(corpus())
    for _ in range(rng.choice((1, 1, 2, 5))):
        if not text:
            break
        kind = rng.randrange(6)
        if kind == 0:
            data = bytearray(text.encode())
            for _ in range(rng.choice((1, 3, 20))):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(7)
            text = data.decode("utf-8", "replace")
        elif kind == 1:
            text = text[: rng.randrange(len(text))]
        elif kind == 2:
            lines = text.split("\n")
            i, j = (rng.randrange(len(lines)) for _ in range(2))
            lines[i], lines[j] = lines[j], lines[i]
            text = "\n".join(lines)
        elif kind == 3:
            numbers = list(re.finditer(r"(?<![%\w$.])\d+\b", text))
            if numbers:
                found = rng.choice(numbers)
                text = text[: found.start()] + rng.choice(ABSURD) + text[found.end() :]
        else:
            start = rng.randrange(len(text))
            window = text[start : start + 400]
            tokens = list(TOKEN.finditer(window))
            if len(tokens) > 2:
                a, b = sorted(rng.sample(tokens, 2), key=lambda m: m.start())
                swapped = window[: a.start()] + b[0] + window[a.end() : b.start()] + (a[0] if kind == 4 else "") + window[b.end() :]
                text = text[:start] + swapped + text[start + 400 :]
    return text


def launched(rng: random.Random, program: Program) -> None:
    """Launch an entry with sizes and arguments that need not fit."""
    sane = rng.random() < 0.8

    def size(sizes: tuple[Any, ...]) -> Any:
        return rng.choice(sizes[:3] if sane else sizes)

    name = rng.choice(sorted(program.entries) or ["k"])
    entry = program.entries.get(name)
    array = np.zeros(4096, np.float32)
    args: list[Any] = []
    for param in entry.params if entry else ():
        if param.size == 8:
            args.append(array)
        elif param.size == 128:
            args.append(TensorMap(np.zeros((64, 64), np.float16), (16, 16), swizzle=rng.choice((0, 32))))
        elif param.size == 4:
            args.append(rng.choice((np.uint32(1), np.float32(0.5), np.uint32(0xFFFFFFFF))))
        else:
            args.append(bytes(param.size) if param.size < 1 << 16 else b"")
    if not sane and args:
        args[rng.randrange(len(args))] = rng.choice((np.uint64(1 << 63), np.float64(1), b"", None, "x", np.zeros(0), [1], np.uint8(1)))
    if not sane and rng.random() < 0.3:
        args.pop() if args else args.append(array)
    bound = entry and (entry.reqntid or entry.maxntid)
    block = bound or size((32, 64, (40, 2), 1024, 0, -1, 1 << 40, (1, 1, 65), "x", (1, 2, 3, 4), 1025))
    grid = size((1, 2, (1, 2), 0, -5, 1 << 31, (1, 1 << 17), "many", 10**30, (3, 5, 7))) if entry else 1
    program.launch(
        name, grid, block, size((0, 65536, 200000, -1, 1 << 62)), args, memory=Memory(), seed=rng.randrange(9), budget=BUDGET,
        check=rng.random() < 0.8, profile=rng.random() < 0.1, schedule=size(("random", "round-robin", "ahead:async", "ahead:9999", "x:y")),
        cluster=size((None, 1, None, 2, 8, 0, 9, "z")),
    )  # fmt: skip


class TooSlow(Exception):
    pass


@contextmanager
def bounded(seconds: int) -> Iterator[None]:
    """Interrupt the body after so long, and let it have CASE_BYTES of memory beyond what is in use."""

    def stop(*_: Any) -> None:
        raise TooSlow(f"more than {seconds} s")

    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    limits = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    if pages:
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + CASE_BYTES, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run_case(seed: int) -> str | None:
    """What went wrong with one case, or None."""
    rng = random.Random(seed)
    make: Callable[[random.Random], str] = rng.choice((made_up, of_operand_types, of_operand_types, mutated))
    text = make(rng)
    try:
        with bounded(CASE_SECONDS):
            launched(rng, Program.from_ptx(text))
    except (PtxError, LaunchError) as error:
        message = str(error)
        return f"{seed}: {len(message)} characters or several lines" if "\n" in message or len(message) > 500 else None
    except Exception:
        return f"case {seed} ({make.__name__}): {traceback.format_exc()}"
    return None


MMA = "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%f1, %f2, %f3, %f4}, {%r1, %r2}, {%r3}, "


@pytest.mark.parametrize(
    ("body", "module", "words"),
    [
        # Found by fuzzing: each ended in another exception.
        ("", ".global .u32 x = 1e999;", "not a number"),
        ("", ".global .u32 x = 18446744073709551616;", "does not fit 64 bits"),
        ("mov.u32 %r1, 99999999999999999999999999;", "", "does not fit 64 bits"),
        ("addc;", "", "is not a type"),
        ("bar;", "", "a modifier is missing"),
        ("set.eq %r1, %r2, %r3;", "", "a modifier is missing"),
        ("createpolicy.fractional;", "", "there are only 0 operands"),
        ("prmt.b32.x128 %r1, %r2, %r3, %r4;", "", ".x128 is not supported"),
        ("dp4a.wait::ld.u32 %r1, %r2, %r3, %r4;", "", ".wait::ld is not supported"),
        ("match.any.sync.inval %r1, %r2, %r3;", "", "is not a type"),
        ("mov.u32 %r1, %q1;", "", "128-bit registers"),
        ("mov.u32 {%h1, %h2}, %tid.x;", "", "from a register or a constant only"),
        ("or.f64 %rd1, %rd2, %rd3;", "", "or has no type .f64"),
        (MMA + "{" + ", ".join(["0f00000000"] * 5) + "};", "", "C is a vector of 4"),
        (MMA + "%f5;", "", "C is a vector of 4"),
        ("testp.finite.b32 %p1, %r1;", "", "testp has no type .b32"),
        ("mov.u32 %r5, 300000; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r5], 32;", "", None),
        ("mov.u32 %r5, 300000; mbarrier.init.shared.b64 [%r5], 1; mbarrier.arrive.shared.b64 _, [%r5];", "", None),
    ],
)
def test_what_fuzzing_found(body, module, words):
    """words: of the PtxError; None where the launch goes on, to findings of what is out of bounds."""
    text = FRAME.format(body=body).replace(".address_size 64", f".address_size 64\n{module}")
    args = [np.zeros(64, np.float32), bytes(128)]
    if words is None:
        assert "out_of_bounds" in {h.kind for h in Program.from_ptx(text).launch("k", 1, 32, 0, args).hazards}
        return
    with pytest.raises(PtxError, match=words) as error:
        Program.from_ptx(text).launch("k", 1, 32, 0, args)
    assert re.match(r"PTX line \d+: ", str(error.value))


TYPES = [
    "pred",
    "u8",
    "s8",
    "b8",
    "u16",
    "s16",
    "b16",
    "u32",
    "s32",
    "b32",
    "u64",
    "s64",
    "b64",
    "f16",
    "bf16",
    "f32",
    "f64",
    "f16x2",
    "bf16x2",
    "b128",
]
REGISTERS = {"pred": "%p", "8": "%h", "16": "%h", "32": "%r", "64": "%rd", "128": "%q", "16x2": "%r"}
PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
def test_every_instruction_takes_or_refuses_every_type(part):
    """With one to four registers of that size: no other exception than one that names the line."""
    found = []
    for opcode, kind, count in itertools.product(sorted(TABLE)[part::PARTS], TYPES, range(1, 5)):
        register = REGISTERS[kind if kind == "pred" else kind.lstrip("usbf")]
        text = FRAME.format(body=f"{opcode}.{kind} {', '.join(f'{register}{i}' for i in range(count))};")
        try:
            Program.from_ptx(text).launch("k", 1, 32, 0, [np.zeros(64, np.float32), bytes(128)], check=False, budget=2000)
        except (PtxError, LaunchError):
            continue
        except Exception as error:
            found.append(f"{opcode}.{kind} with {count}: {error!r}")
    assert not found, "\n".join(found[:5])


def test_a_defect_of_the_emulator_is_not_taken_for_a_fault_of_the_ptx(monkeypatch, tmp_path, capsys):
    """Only PtxFault is: another exception inside an instruction passes through, and the command says so in one line."""
    from fa4gen.cli import main
    from fa4gen.codegen.emulator import memops

    def broken(*_: Any) -> None:
        raise IndexError("list index out of range")

    monkeypatch.setattr(memops, "load", broken)
    text = FRAME.format(body="ld.global.u32 %r5, [%rd1];")
    with pytest.raises(IndexError):
        Program.from_ptx(text).launch("k", 1, 32, 0, [np.zeros(64, np.float32), bytes(128)])
    (tmp_path / "k.ptx").write_text(text)
    np.save(tmp_path / "x.npy", np.zeros(64, np.float32))
    assert main(["emulate", str(tmp_path / "k.ptx"), "--block", "32", "--arg", f"in:{tmp_path}/x.npy", "--arg", "bytes:" + "00" * 128]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["fa4gen: internal error: IndexError: list index out of range (FA4GEN_DEBUG=1 shows where)"]


def test_a_few_cases():
    found = [failure for seed in range(CASES) if (failure := run_case(seed)) is not None]
    assert not found, "\n".join(found[:5])


@pytest.mark.skipif(not SECONDS, reason="set FA4GEN_FUZZ=SECONDS")
def test_many_cases():
    end, seed, found = time.monotonic() + SECONDS, FIRST, []
    while time.monotonic() < end:
        failure = run_case(seed)
        if failure is not None:
            found.append(failure)
            print(failure, flush=True)
        seed += 1
    print(f"cases {FIRST} to {seed - 1}")
    assert not found, f"{len(found)} of {seed - FIRST} cases"
