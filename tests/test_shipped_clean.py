"""No finding on any shipped kernel: every config and target, under every schedule; FA4GEN_SWEEP=1 does so under 20 seeds each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fa4gen.codegen import units
from fa4gen.codegen.attention import attention_launch
from fa4gen.codegen.backends import Launch
from fa4gen.codegen.config import load_shipped, shipped_configs
from fa4gen.codegen.emulator import Memory, Program
from fa4gen.codegen.feature_inputs import feature_inputs
from fa4gen.codegen.geometry import derive
from fa4gen.codegen.render import has_attention, render

compiler = pytest.importorskip("fa4gen.codegen.compiler")
pytestmark = pytest.mark.skipif(compiler.nvrtc_version() is None, reason="NVRTC is not installed")

SWEEP = "FA4GEN_SWEEP" in os.environ
SEEDS = range(20) if SWEEP else range(1)
DTYPES: dict[str, Any] = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
KERNELS = [(name, arch) for name in shipped_configs() for arch in load_shipped(name).arch]


def schedules(warps: int) -> Iterator[str]:
    """Every policy: each group of four warps (the roles) starved and run ahead, and so the asynchronous operations."""
    yield from ("random", "round-robin", "starve:async", "ahead:async")
    roles = [*(f"{w}-{min(w + 4, warps) - 1}" for w in range(0, warps, 4)), *(str(w) for w in range(max(0, warps - 4), warps))]
    for role in dict.fromkeys(roles):
        yield from (f"starve:{role}", f"ahead:{role}")


def clean(program: Program, launch: Launch, seed: int, schedule: str) -> None:
    result = program.launch(
        launch.entry, launch.grid, launch.block, launch.smem_bytes, launch.args, memory=Memory(), seed=seed, schedule=schedule,
        cluster=(getattr(launch, "cluster", 1), 1, 1),
    )  # fmt: skip
    assert result.hazards == [], f"seed {seed}, {schedule}: {result.hazards[0]}"


def policies(launch: Launch, number: int) -> list[str]:
    """All policies in a sweep, else one, a different one for each kernel."""
    every = list(schedules(launch.block[0] // 32))
    return every if SWEEP else [every[number % len(every)]]


@pytest.mark.parametrize(("name", "arch"), KERNELS)
def test_unit_kernels(name, arch):
    config = load_shipped(name)
    geo = derive(config, arch)
    program = Program.from_ptx(compiler.compile_source(render(config, arch)["unit.cu"], arch, "unit.cu").ptx)
    for number, case in enumerate(units.cases(config, geo)):
        for schedule in policies(case.launch, number + KERNELS.index((name, arch))):
            for seed in SEEDS:
                clean(program, case.launch, seed, schedule)
                assert case.judge().ok


@pytest.mark.parametrize("partitioned", [False, True])
@pytest.mark.parametrize(("name", "arch"), KERNELS)
def test_attention_kernels(name, arch, partitioned):
    config = load_shipped(name)
    if not has_attention(config, arch):
        pytest.skip(f"{name} has no attention kernel for {arch}")
    geo = derive(config, arch)
    program = Program.from_ptx(compiler.compile_source(render(config, arch)["attention.cu"], arch, "attention.cu").ptx)
    rng = np.random.Generator(np.random.PCG64(1))
    keys = 3 * geo.block_keys + 40
    q = rng.standard_normal((1, 2, config.group or 6, config.ov_depth), np.float32).astype(DTYPES[config.dtype])
    k, v = (rng.standard_normal((1, keys, 1, config.ov_depth), np.float32).astype(q.dtype) for _ in range(2))
    inputs = feature_inputs(config, q, k, v)
    out, expected = inputs.plain_out, inputs.expected(config.ov_depth**-0.5)[0]
    policy = None
    for seed in SEEDS:
        out[:] = np.nan
        options = inputs.arrays | {"ctas": 3} | ({"partition_keys": geo.block_keys} if partitioned else {})
        launch = attention_launch(config, geo, inputs.q, inputs.k, inputs.v, inputs.out, inputs.lse, **options)
        policy = policy or policies(launch, KERNELS.index((name, arch)) + partitioned)
        for schedule in policy:
            fresh = attention_launch(config, geo, inputs.q, inputs.k, inputs.v, inputs.out, inputs.lse, **options)
            clean(program, fresh, seed, schedule)
            assert np.linalg.norm(out.astype(np.float64) - expected) <= 4e-3 * np.linalg.norm(expected)
