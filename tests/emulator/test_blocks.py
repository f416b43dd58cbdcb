"""Blocks of register instructions: the same registers, counts and schedules as instruction by instruction."""

from __future__ import annotations

import random

import numpy as np
import pytest

from fa4gen.codegen.emulator import blocks
from fa4gen.codegen.emulator.machine import Run

pytestmark = pytest.mark.filterwarnings("error")

SINGLES = [
    "add.rn.ftz.f32 {d}, {a}, {b};", "sub.rn.f32 {d}, {a}, {b};", "mul.rn.ftz.f32 {d}, {a}, {b};", "mul.rn.f32 {d}, {a}, 0f3F000000;",
    "fma.rn.ftz.f32 {d}, {a}, {b}, {c};", "fma.rn.f32 {d}, {a}, {b}, {c};", "max.ftz.f32 {d}, {a}, {b};", "max.f32 {d}, {a}, {b}, {c};",
    "min.f32 {d}, {a}, {b};", "neg.f32 {d}, {a};", "abs.ftz.f32 {d}, {a};", "ex2.approx.ftz.f32 {d}, {a};", "mov.f32 {d}, {a};",
    "mov.f32 {d}, {a}; mov.f32 {a}, {b};", "setp.gt.f32 %p1, {a}, {b}; selp.f32 {d}, {b}, {a}, %p1;",
    "mov.b32 %r1, {a}; add.s32 %r2, %r1, 77; and.b32 %r2, %r2, -5; mov.b32 {d}, %r2;",
    "cvt.rn.bf16x2.f32 %r3, {a}, {b}; xor.b32 %r3, %r3, %r2; mov.b32 {d}, %r3;",
    "mov.b64 %rd1, {{{a}, {b}}}; mov.b64 %rd2, {{{b}, {c}}}; fma.rn.f32x2 %rd3, %rd1, %rd2, %rd1; mov.b64 {{{d}, {a}}}, %rd3;",
]  # fmt: skip
VALUES = 24


def instructions(rng: random.Random, count: int) -> str:
    """Instructions over %f0 to %f23: runs of one kind, as unrolled loops have them, and mixtures, with every kind of dependence."""
    text = []
    while len(text) < count:
        kinds = [rng.choice(SINGLES) for _ in range(rng.choice((1, 1, 2, 3)))]
        start, step = rng.randrange(VALUES), rng.choice((1, 1, -1, 5, 0))
        for turn in range(rng.choice((1, 4, 8))):
            for kind in kinds:
                a, b, c = ((start + step * turn + by) % VALUES if rng.random() < 0.8 else rng.randrange(VALUES) for by in (0, 1, 2))
                d = (start + step * turn) % VALUES if rng.random() < 0.5 else rng.randrange(VALUES)
                text.append(kind.format(a=f"%f{a}", b=f"%f{b}", c=f"%f{c}", d=f"%f{d}"))
    return "\n".join(text)


def body(rng: random.Random) -> str:
    load = "mul.wide.u32 %rd10, %tid, 4; add.s64 %rd10, %rd60, %rd10;\n"
    load += "\n".join(f"ld.global.f32 %f{n}, [%rd10+{512 * n}];" for n in range(VALUES))
    load += "mov.u32 %r1, 1; mov.u32 %r2, 2; mov.u32 %r3, 3; mov.u32 %r9, 0;"
    # A loop, a part that only some lanes take, and a barrier that makes the warps wait for each other.
    loop = f"L: {instructions(rng, 40)} setp.lt.u32 %p2, %lane, 7; @%p2 bra M; {instructions(rng, 12)} M: bar.sync 0;"
    loop += f"{instructions(rng, 20)} @%p2 mov.f32 %f3, %f4; add.u32 %r9, %r9, 1; setp.lt.u32 %p3, %r9, 3; @%p3 bra L;"
    return load + loop + "\n".join(f"st.global.f32 [%rd10+{512 * n}], %f{n};" for n in range(VALUES))


def inputs(rng: np.random.Generator) -> np.ndarray:
    """[VALUES, 128] float32 with zeros, subnormals, infinities and NaN among them."""
    values = rng.standard_normal((VALUES, 128)).astype(np.float32)
    special = np.array([0, -0.0, 1e-40, -1e-45, 2.0**-126, np.inf, -np.inf, np.nan, 3e38], np.float32)
    return np.where(rng.random(values.shape) < 0.1, rng.choice(special, values.shape), values)


@pytest.mark.parametrize("number", range(12))
def test_blocks_change_nothing(assemble, monkeypatch, number):
    """Random instructions, under seeds that draw each quantum: bit-equal registers, as many instructions, as many barriers."""
    program = assemble(body(random.Random(number)), "x")
    start = inputs(np.random.default_rng(number))
    ran = []
    run = blocks.Block.run
    monkeypatch.setattr(blocks.Block, "run", lambda block, w, r: ran.append(block.length) or run(block, w, r))

    def launch(seed: int) -> tuple[bytes, int, int, list]:
        array = start.copy()
        result = program.launch("k", 1, 128, 0, [array], seed=seed, schedule=("random", "round-robin")[seed % 2])
        return array.tobytes(), result.instructions, result.barriers, result.hazards

    together = [launch(seed) for seed in range(4)]
    assert max(ran) > 20
    use = Run.use

    def singly(self: Run, code: object) -> None:
        use(self, code)
        self.steps, self.blocks = self.code.full, {}

    monkeypatch.setattr(Run, "use", singly)
    ran.clear()
    assert [launch(seed) for seed in range(4)] == together
    assert not ran


def started(count: int) -> str:
    """Registers that have been written, and a place where a block begins."""
    return "".join(f"mov.f32 %f{n}, 0f3F800000;" for n in range(count)) + "bra L; L: "


def test_independent_instructions_share_a_call(assemble):
    text = "".join(f"fma.rn.ftz.f32 %f{n}, %f{n + 20}, %f40, %f41; ex2.approx.ftz.f32 %f{n}, %f{n};" for n in range(16))
    program = assemble(f"{started(42)}{text} bar.sync 0;", "x")
    code = program._decode("k")
    block = next(block for block in code.blocks.values() if block.length == 32)
    assert len(blocks._operations(code, block.start, block.length)) == 2


def test_steps_that_were_replaced_are_run(assemble):
    """Whoever wraps steps of a block sees every instruction."""
    program = assemble(started(3) + "mul.rn.f32 %f1, %f1, %f2;" * 16 + "bar.sync 0;", "x")
    code = program._decode("k")
    assert code.steps()[1]
    seen = []
    for index, step in enumerate(code.full):
        code.full[index] = lambda w, r, index=index, step=step: seen.append(index) or step(w, r)
    result = program.launch("k", 1, 32, 0, [np.zeros(4, np.uint32)])
    assert len(seen) == result.instructions
