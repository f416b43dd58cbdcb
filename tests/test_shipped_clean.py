"""No finding on any shipped kernel: every config and target, under every schedule; FA4GEN_SWEEP=1 does so under 20 seeds each.

The sweep is one test a kernel, shape and schedule, for `pytest -n 32`; what it ran is summed up at the end of the session (conftest.py).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import lru_cache
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

from fa4gen.codegen import attention, units
from fa4gen.codegen.attention import attention_launch
from fa4gen.codegen.backends import Launch
from fa4gen.codegen.config import Config, load_shipped, shipped_configs
from fa4gen.codegen.emulator import Memory, Program
from fa4gen.codegen.feature_inputs import feature_inputs
from fa4gen.codegen.geometry import Geometry, derive
from fa4gen.codegen.geometry_sm90 import Sm90Geometry
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


def policies(warps: int, number: int) -> list[str]:
    """All policies in a sweep, else one, a different one for each kernel."""
    every = list(schedules(warps))
    return every if SWEEP else [every[number % len(every)]]


def clean(program: Program, launch: Launch, seed: int, schedule: str) -> int:
    """Warp instructions of a launch without findings."""
    result = program.launch(
        launch.entry, launch.grid, launch.block, launch.smem_bytes, launch.args, memory=Memory(), seed=seed, schedule=schedule,
        cluster=(launch.cluster, 1, 1), regions=launch.regions,
    )  # fmt: skip
    assert result.hazards == [], f"seed {seed}, {schedule}: {result.hazards[0].report()}"
    return result.instructions


@lru_cache(maxsize=8)
def program_of(name: str, arch: str, file: str, entry: str) -> Program:
    """The entry alone of a kernel's PTX: a third of the module, which is parsed in a third of the time."""
    ptx = compiler.compile_source(render(load_shipped(name), arch)[file], arch, file).ptx
    head, *entries = re.split(r"(?=^\.visible \.entry )", ptx, flags=re.MULTILINE)
    return Program.from_ptx(head + next(text for text in entries if re.match(rf"\.visible \.entry {entry}\b", text)))


# ------------------------------------------------------------------------------------------------------------------ unit kernels


def unit_cases() -> Iterator[tuple[str, str, int, str]]:
    for number, (name, arch) in enumerate(KERNELS):
        config = load_shipped(name)
        for place, info in enumerate(units.unit_entry_info(config, derive(config, arch)).values()):
            for schedule in policies(info["block"][0] // 32, place + number):
                yield name, arch, place, schedule


@pytest.mark.parametrize(("name", "arch", "place", "schedule"), list(unit_cases()))
def test_unit_kernels(name, arch, place, schedule, record_property):
    config = load_shipped(name)
    case = units.cases(config, derive(config, arch))[place]
    program = program_of(name, arch, "unit.cu", case.entry)
    start, instructions = time.process_time(), 0
    for seed in SEEDS:
        instructions += clean(program, case.launch, seed, schedule)
        assert case.judge().ok
    record_property("sweep", (f"{name}-{arch}-unit", len(SEEDS), instructions, time.process_time() - start))


# ---------------------------------------------------------------------------------------------------------------------- attention


SHAPES = ("whole", "merged", "merged alone")
"""Keys that wrap every ring, several items in a CTA where the kernel takes them; cut into partitions, merged in a cluster where there are
clusters; the same where clusters would not pay."""


def shapes(config: Config, arch: str) -> tuple[str, ...]:
    """Clusters are the shared-key kernel's for sm_90a; elsewhere the last CTA merges in any case."""
    return SHAPES if SWEEP and arch == "sm_90a" and config.shared_key else SHAPES[:2]


def problem_size(config: Config, geo: Geometry, shape: str) -> dict[str, Any]:
    """keys, batch and options of a launch."""
    key_split = geo.arch == "sm_90a" and not config.shared_key
    if shape != "whole" and geo.arch == "sm_90a" and not key_split:
        # Two clusters of four, or more of two, at the same time: of room for ten CTAs eight take them, see attention._resident.
        assert isinstance(geo, Sm90Geometry)
        return {"keys": 4 * geo.block_keys + 40, "batch": 1, "partition_keys": geo.block_keys, "ctas": -(-10 // geo.ctas_per_sm)}
    if shape != "whole":
        return {"keys": 3 * geo.block_keys + 40, "batch": 1, "partition_keys": geo.block_keys, "ctas": 3}
    if geo.arch != "sm_90a":
        return {"keys": 3 * geo.block_keys + 40, "batch": 1}
    # Every CTA of one SM takes one item more than Q has buffers.
    assert isinstance(geo, Sm90Geometry)
    items = geo.q_buffers + 1
    # Key-split has a ring for each part, and each part every m_pack-th key tile.
    tiles = geo.m_pack * (geo.ring_slots // geo.m_pack // 2 + 1)
    if not key_split:
        tiles = -(-geo.warpgroups * (geo.slots_per_ring // (2 * geo.tile_slots) + 1) // items)
    return {"keys": tiles * geo.block_keys + 40, "batch": items * geo.ctas_per_sm, "ctas": 1}


def attention_cases() -> Iterator[tuple[str, str, str, str]]:
    for number, (name, arch) in enumerate(KERNELS):
        config = load_shipped(name)
        if has_attention(config, arch):
            for place, shape in enumerate(shapes(config, arch)):
                for schedule in policies(derive(config, arch).threads // 32, number + place):
                    yield name, arch, shape, schedule


@lru_cache(maxsize=16)
def problem(name: str, arch: str, shape: str, rows: tuple[int, int]) -> tuple[Any, np.ndarray, dict[str, Any]]:
    """(inputs of a kernel, its expected output, options of the launch); rows: queries of a sequence and heads of a KV head."""
    config = load_shipped(name)
    size = problem_size(config, derive(config, arch), shape)
    rng = np.random.Generator(np.random.PCG64(1))
    batch, keys = size.pop("batch"), size.pop("keys")
    q = rng.standard_normal((batch, rows[0], rows[1], config.ov_depth), np.float32).astype(DTYPES[config.dtype])
    k, v = (rng.standard_normal((batch, keys, 1, config.ov_depth), np.float32).astype(q.dtype) for _ in range(2))
    inputs = feature_inputs(config, q, k, v)
    return inputs, inputs.expected(config.ov_depth**-0.5)[0], dict(inputs.arrays) | size


def launch_of(name: str, arch: str, shape: str, rows: tuple[int, int], sharing: bool = False) -> Launch:
    """sharing: of two entries with tiles of the same rows, the one whose CTAs share an SM."""
    config = load_shipped(name)
    inputs, _, options = problem(name, arch, shape, rows)
    alone = mock.patch.object(attention, "cluster_size", return_value=1) if shape == "merged alone" else nullcontext()
    with alone, mock.patch.object(attention, "SHARING_TILES", 0) if sharing else nullcontext():
        return attention_launch(config, derive(config, arch), inputs.q, inputs.k, inputs.v, inputs.out, inputs.lse, **options)


@pytest.mark.parametrize(("name", "arch", "shape", "schedule"), list(attention_cases()))
def test_attention_kernels(name, arch, shape, schedule, record_property):
    config = load_shipped(name)
    group = config.group or 8
    # A launch takes the entry whose tiles its rows fill: each seed has its turn with one of the tile sizes.
    sizes = [((queries, group), False) for queries in dict.fromkeys(-(-rows // group) for rows in (12, 8, 32))]
    sizes += [
        (rows, True) for rows, _ in sizes if launch_of(name, arch, shape, rows, True).entry != launch_of(name, arch, shape, rows).entry
    ]
    start, instructions = time.process_time(), 0
    for seed in SEEDS:
        rows, sharing = sizes[seed % len(sizes)]
        launch = launch_of(name, arch, shape, rows, sharing)
        inputs, expected, _ = problem(name, arch, shape, rows)
        inputs.plain_out[:] = np.nan
        instructions += clean(program_of(name, arch, "attention.cu", launch.entry), launch, seed, schedule)
        distance = np.linalg.norm(inputs.plain_out.astype(np.float64) - expected)
        assert distance <= 4e-3 * np.linalg.norm(expected), f"seed {seed}, {schedule}"
    record_property("sweep", (f"{name}-{arch}-attention", len(SEEDS), instructions, time.process_time() - start))
