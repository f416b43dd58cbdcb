"""What the tests of both sm_90a attention kernels share: problems, their check against the reference, and properties of split keys."""

from __future__ import annotations

import contextlib
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from fa4gen.codegen import compiler, reference
from fa4gen.codegen.attention import attention_launch
from fa4gen.codegen.backends import Compiled, Launch
from fa4gen.codegen.backends.emulator import EmulatorBackend
from fa4gen.codegen.config import Config
from fa4gen.codegen.geometry import derive
from fa4gen.codegen.render import render

DTYPES: dict[str, Any] = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
# ||out - ref|| / ||ref||: a rounding of P and one of O, each uniform within half a unit in the last place.
OUT_BOUND = {"bfloat16": 4e-3, "float16": 5e-4}


@cache
def source(c: Config) -> str:
    return render(c, "sm_90a")["attention.cu"]


def compiled(text: str) -> Compiled:
    module = compiler.compile_source(text, "sm_90a", "attention.cu")
    return Compiled("sm_90a", module.ptx, module.cubin)


class Problem:
    """Inputs drawn from the seed, and outputs that hold NaN until a kernel writes them."""

    def __init__(self, c: Config, batch: int, q_len: int, keys: int, group: int, kv_heads: int = 1, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        dtype = DTYPES[c.dtype]
        self.config = c
        self.q = rng.standard_normal((batch, q_len, kv_heads * group, c.ov_depth), np.float32).astype(dtype)
        self.k, self.v = (rng.standard_normal((batch, keys, kv_heads, c.ov_depth), np.float32).astype(dtype) for _ in range(2))
        self.out = np.empty(self.q.shape, DTYPES[c.out_dtype])
        self.lse = np.empty((batch, kv_heads * group, q_len), np.float32)
        self.poison()

    def poison(self) -> None:
        self.out[:] = np.nan
        self.lse[:] = np.nan

    def launch(self, **options: Any) -> Launch:
        return attention_launch(self.config, derive(self.config, "sm_90a"), self.q, self.k, self.v, self.out, self.lse, **options)

    def check(self, scale: float) -> None:
        out, lse = reference.attention(self.q, self.k, self.v, scale=scale, causal=self.config.mask == "causal")
        ours = self.out.astype(np.float64)
        assert np.linalg.norm(ours - out) <= OUT_BOUND[self.config.dtype] * np.linalg.norm(out)
        seen = np.isfinite(lse)
        assert (ours[~seen.transpose(0, 2, 1)] == 0).all()
        assert (self.lse[~seen] == -np.inf).all()
        assert (np.abs(self.lse[seen] - lse[seen]) <= 1e-4 + 2.0**-20 * np.abs(lse[seen])).all()


def check_dominating_key(c: Config, keys: int, **options: Any) -> None:
    """Scores far above and far below the others, on the emulator."""
    problem = Problem(c, 1, 1, keys, 8)
    problem.k[0, 77] *= 40
    problem.k[0, 150:] *= -40
    assert EmulatorBackend().run(compiled(source(c)), problem.launch(**options)).hazards == []
    problem.check(c.ov_depth**-0.5)


def check_merge_ignores_order(c: Config, keys: int, seeds: int) -> None:
    """Partitions of 64 keys give the same bits whichever of them is the last to arrive."""
    problem = Problem(c, 1, 1, keys, 8)
    results = set()
    for seed in range(seeds):
        problem.poison()
        assert EmulatorBackend(seed=seed).run(compiled(source(c)), problem.launch(partition_keys=64)).hazards == []
        results.add(problem.out.tobytes() + problem.lse.tobytes())
    assert len(results) == 1


def check_batch_independence(c: Config) -> None:
    """With partitions of fixed size a sequence's bits do not depend on what else is in the batch."""
    many = Problem(c, 3, 1, 300, 6)
    EmulatorBackend(seed=1).run(compiled(source(c)), many.launch(partition_keys=128, ctas=2))
    alone = Problem(c, 1, 1, 300, 6)
    alone.q, alone.k, alone.v = many.q[1:2].copy(), many.k[1:2].copy(), many.v[1:2].copy()
    EmulatorBackend().run(compiled(source(c)), alone.launch(partition_keys=128))
    assert alone.out.tobytes() == many.out[1].tobytes()
    assert alone.lse.tobytes() == many.lse[1].tobytes()


def shows(module: Compiled, problem: Problem, seed: int, **options: Any) -> bool:
    """Whether anything is wrong with a run of `module` on the emulator: hazards, or what it computes."""
    hazards = EmulatorBackend(seed=seed).run(module, problem.launch(**options)).hazards
    with contextlib.suppress(AssertionError):
        problem.check(problem.config.ov_depth**-0.5)
        return bool(hazards)
    return True
