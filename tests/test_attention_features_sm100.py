"""Features of the sm_100a kernels, shared-key and key-split, against float64 on the emulator: paged, ragged, masked and capped variants."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

import fa4gen
from fa4gen.codegen import compiler
from fa4gen.codegen.api import choose_config
from fa4gen.codegen.attention import attention_entry_info, attention_launch
from fa4gen.codegen.config import PAGE_SIZES, Config, ConfigError, disabled_rules, load_shipped, parse_config
from fa4gen.codegen.emulator import Memory, Program
from fa4gen.codegen.geometry import derive
from fa4gen.codegen.geometry_sm100 import Sm100Fp8Geometry, Sm100Geometry
from fa4gen.codegen.render import render

from .test_attention_features import FP8, FP8_PAGES, LISTED, PAGED, RAGGED, FeatureProblem

pytestmark = pytest.mark.skipif(compiler.nvrtc_version() is None, reason="NVRTC is not installed")

KERNELS = ("d64", "d128", "d128_m2", "d256", "d256_m2", "d512")


def variant(name: str, **fields: Any) -> Config:
    shipped = {key: value for key, value in load_shipped(name).model_dump().items() if value not in (None, ())}
    return parse_config(shipped | {"arch": ["sm_100a"]} | fields)


def source(c: Config) -> str:
    return render(c, "sm_100a")["attention.cu"]


@cache
def program(text: str) -> Program:
    return Program.from_ptx(compiler.compile_source(text, "sm_100a", "attention.cu").ptx)


def run(problem: FeatureProblem, seed: int = 0, schedule: str = "random", text: str | None = None, **options: Any) -> list[str]:
    """Kinds of hazards."""
    launch = problem.launch(**options)
    result = program(text or source(problem.config)).launch(
        launch.entry, launch.grid, launch.block, launch.smem_bytes, launch.args, memory=Memory(), seed=seed, schedule=schedule
    )
    return sorted({hazard.kind for hazard in result.hazards})


# Softmax of a warpgroup, correction, load, multiply and clear or convert, left behind and run ahead.
SCHEDULES = (
    *("random", "starve:14", "ahead:14", "starve:async", "starve:13", "ahead:12", "round-robin", "ahead:async", "starve:8-11"),
    *("starve:0-3", "ahead:0-7", "starve:12", "ahead:13", "starve:14-15", "starve:15", "ahead:14-15"),
)
ALL = {"page_size": 16, "mask": "causal", "window": 50, "sinks": True} | RAGGED | PAGED
# config, its fields, (queries, lengths, group, kv_heads), launch options. Key tiles have 256 keys, which parts and chunks cut by 64.
CASES: list[tuple[str, dict[str, Any], tuple[list[int], list[int], int, int], dict[str, Any]]] = [
    ("d256", {"key_lengths": True}, ([1] * 4, [0, 1, 130, 300], 8, 1), {}),
    ("d512", RAGGED | {"mask": "causal", "out_dtype": "float32"}, ([9, 1, 0], [60, 270, 9], 2, 1), {"partition_keys": 256}),
    ("d128", RAGGED, ([3, 1, 0, 4], [60, 270, 9, 0], 5, 1), {"partition_keys": 256}),
    ("d256_m2", {"key_lengths": True, "mask": "causal"}, ([3] * 2, [514, 65], 4, 1), {}),
    ("d128_m2", RAGGED | {"mask": "causal", "window": 90}, ([9, 1], [300, 140], 5, 1), {}),
    ("d256", {"ov_depth": 64, "page_size": 1, "mask": "causal"} | PAGED, ([2] * 2, [0, 270], 5, 1), {}),
    ("d64", {"page_size": 1, "kv_layout": "paged"}, ([1], [70], 8, 1), {}),
    ("d128", {"page_size": 64, "mask": "causal", "out_dtype": "float32"} | PAGED, ([2] * 2, [300, 77], 5, 1), {"partition_keys": 256}),
    ("d256", {"block_keys": 128, "page_size": 256, "warpgroups": 1} | PAGED, ([1] * 2, [140, 20], 8, 1), {"partition_keys": 128}),
    ("d256", {"page_size": 128, "mask": "causal", "window": 70} | PAGED, ([4] * 2, [600, 40], 8, 1), {}),
    ("d128_m2", {"mask": "causal", "window": 300}, ([4], [900], 8, 1), {"partition_keys": 256}),
    ("d64", {"sinks": True, "mask": "causal", "window": 128, "key_lengths": True}, ([2] * 2, [0, 600], 8, 1), {"partition_keys": 256}),
    ("d256", {"softcap": 20.0, "mask": "causal"}, ([3], [300], 5, 1), {"scale": -3.0}),
    ("d128", {"softcap": 3.0, "sinks": True}, ([1], [300], 5, 1), {"scale": 1.0, "partition_keys": 256}),
    ("d256", {"page_size": 16} | LISTED, ([1] * 2, [0, 400], 8, 1), {}),
    ("d128", {"page_size": 32, "mask": "causal", "window": 200} | LISTED, ([4] * 2, [700, 130], 5, 1), {"partition_keys": 256}),
    ("d512", {"page_size": 256, "mask": "causal", "window": 20} | LISTED, ([4] * 2, [600, 5], 5, 1), {}),
    ("d128_m2", ALL | {"page_list": True}, ([4, 7, 0], [300, 130, 20], 5, 1), {}),
    ("d256_m2", ALL, ([4, 1, 9], [100, 0, 322], 6, 1), {}),
    ("d256_m2", FP8, ([1], [600], 8, 1), {"scale": -0.2}),
    ("d256", FP8_PAGES | PAGED | {"page_size": 16, "out_dtype": "float32"}, ([1] * 2, [0, 520], 6, 1), {"partition_keys": 256}),
    ("d256", FP8_PAGES | LISTED | {"ov_depth": 64, "page_size": 64, "sinks": True, "softcap": 20.0}, ([1] * 2, [80, 900], 12, 1), {}),
    ("d512", FP8 | RAGGED | PAGED | {"page_size": 32, "mask": "causal", "window": 90}, ([8, 1], [300, 0], 2, 1), {}),
    ("d128", FP8_PAGES | PAGED | {"page_size": 256, "mask": "causal", "sinks": True}, ([2] * 2, [600, 7], 5, 1), {}),
    ("d128_m2", FP8 | {"key_lengths": True, "use_fma": False}, ([1] * 2, [1, 300], 8, 1), {"partition_keys": 256}),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: f"{CASES[n][0]}-{n}")
def test_a_feature_is_right_and_clean(number: int) -> None:
    name, fields, shape, options = CASES[number]
    problem = FeatureProblem(variant(name, **fields), *shape, seed=number, heads_first=number % 2 == 1)
    assert run(problem, number, SCHEDULES[number % len(SCHEDULES)], **options) == []
    problem.check(options.get("scale"))


# Those that come closest to the limit: 128 scores a thread, and key partitions.
@pytest.mark.parametrize("name", ["d64", "d128_m2", "d256_m2"])
def test_no_spills_with_all_features(name: str) -> None:
    c = variant(name, **ALL | {"softcap": 30.0, "rescale": "exact", "page_size": 1, "page_list": True})
    (resources,) = compiler.compile_source(source(c), "sm_100a", "attention.cu").kernels.values()
    assert (resources.spill_store_bytes, resources.spill_load_bytes, resources.stack_bytes) == (0, 0, 0)
    assert resources.registers <= 128


# Sub-tiles of 8 bits are converted by warps of few registers.
@pytest.mark.parametrize(("name", "fields"), [("d256_m2", FP8_PAGES), ("d512", FP8)])
def test_no_spills_in_8_bits_with_all_features(name: str, fields: dict[str, Any]) -> None:
    c = variant(name, **ALL | fields | {"softcap": 30.0, "rescale": "exact", "page_list": True})
    (resources,) = compiler.compile_source(source(c), "sm_100a", "attention.cu").kernels.values()
    assert (resources.spill_store_bytes, resources.spill_load_bytes, resources.stack_bytes) == (0, 0, 0)
    assert resources.registers <= 128


# (config, window, keys, keys of a partition). Rows of one tile outgrow their maxima at different keys; with 258 keys some of the queries
# are the first to see a second key tile, so to have a second warpgroup; windows of 100 begin in the first tile for some of them.
@pytest.mark.parametrize(
    ("name", "window", "keys", "partition_keys"),
    [("d256", None, 258, None), ("d128", None, 514, 256), ("d256", 100, 357, None)],
)
def test_verifying_four_tokens_gives_the_bits_of_four_steps(name: str, window: int | None, keys: int, partition_keys: int | None) -> None:
    fields = {"rescale": "exact", "mask": "causal", "key_lengths": True, "out_dtype": "float32", "window": window}
    c = variant(name, **fields)
    options: dict[str, Any] = {"partition_keys": partition_keys, "scale": 1.0}
    verify = FeatureProblem(c, [4], [keys], 8)
    assert run(verify, **options) == []
    verify.check(1.0)
    for i in (0, 2):
        step = FeatureProblem(c, [1], [keys - 3 + i], 8)
        step.q, step.k, step.v = verify.q[:, i : i + 1].copy(), verify.k, verify.v
        assert run(step, 1, **options) == []
        assert step.out.tobytes() == verify.out[:, i : i + 1].tobytes()
        assert step.lse.tobytes() == verify.lse[:, :, i : i + 1].tobytes()


def test_a_sequence_gives_the_same_bits_alone_in_a_batch_and_in_pages() -> None:
    fields = {"rescale": "exact", "mask": "causal", "key_lengths": True, "out_dtype": "float32"}
    c, paged = variant("d256", **fields), variant("d256", **fields, kv_layout="paged", page_size=64)
    lengths = [270, 0, 260]
    many, pages = (FeatureProblem(config, [2] * 3, lengths, 2) for config in (c, paged))
    alone = FeatureProblem(c, [2], [260], 2)
    alone.q, alone.k, alone.v = many.q[2:].copy(), many.k[2:, :260].copy(), many.v[2:, :260].copy()
    for seed, problem in enumerate((many, pages, alone)):
        assert run(problem, seed, partition_keys=256, scale=1.0) == []
    assert pages.out.tobytes() == many.out.tobytes()
    assert pages.lse.tobytes() == many.lse.tobytes()
    assert alone.out.tobytes() == many.out[2:].tobytes()
    assert alone.lse.tobytes() == many.lse[2:].tobytes()


def test_lengths_and_starts_that_lie_outside_count_as_the_nearest() -> None:
    c = variant("d64", **RAGGED)
    honest, wrong = (FeatureProblem(c, [2, 3], [0, 300], 8) for _ in range(2))
    wrong.arrays |= {"key_lengths": np.array([-5, 1000], np.int32), "query_starts": np.array([-3, 2, 900], np.int32)}
    for problem in (honest, wrong):
        assert run(problem, partition_keys=256) == []
    assert wrong.out.tobytes() == honest.out.tobytes()
    assert wrong.lse.tobytes() == honest.lse.tobytes()


# What is removed -> (config, its fields, the text, what stands in its place). Each must show as a hazard or a wrong value.
MUTANTS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "V past the end is not cleared": ("d256", {"key_lengths": True}, "rows[unit] = make_uint4(0, 0, 0, 0);", ";"),
    "V is cleared before it has landed": (
        "d128",
        {"key_lengths": True},
        "wait(smem + RING_LANDED_OFFSET + slot * MBARRIER_BYTES, use / RING_SLOTS & 1);",
        "",
    ),
    "cleared V is not fenced": ("d512", {"key_lengths": True}, "proxy.\n        ptx_fence_proxy_async();", "proxy."),
    "a page past the end is looked up": ("d256", PAGED | {"page_size": 16}, "if (key >= item.keys) return -1;", ""),
    "a dead chunk of a window is multiplied": (
        "d256",
        {"mask": "causal", "window": 70},
        "for (unsigned chunk = first;",
        "for (unsigned chunk = 0;",
    ),
    "stage 1 of P is not waited for in a window": ("d256", {"mask": "causal", "window": 70}, "if (first > STAGE_1_CHUNK)", "if (false)"),
    "queries of the next sequence are stored": ("d64", RAGGED, "min(p.tile_positions, item.q_len - item.position)", "p.tile_positions"),
    "converted K and V are not fenced": ("d256", FP8, "reads of it.\n            ptx_fence_proxy_async();", "reads of it."),
    "V of 8 bits past the end is not cleared": (
        "d256",
        FP8 | {"key_lengths": True},
        "low[i * STEP_UNITS] = high[i * STEP_UNITS] = make_uint4(0, 0, 0, 0);",
        ";",
    ),
    "scales are not waited for": (
        "d256",
        FP8_PAGES | PAGED | {"page_size": 16},
        "wait(scales_full(smem, at.warpgroup, round), round / SCALE_BUFFERS & 1);",
        "",
    ),
    "the sink joins every partition": ("d256", {"sinks": True}, "split ? MINUS_INFINITY : row_sink", "row_sink"),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_removed_safeguard_shows(mutant: str) -> None:
    name, fields, old, new = MUTANTS[mutant]
    c = variant(name, **fields)
    assert old in source(c)
    ragged = c.ragged_queries
    problem = FeatureProblem(c, [3, 2] if ragged else [1], [70, 140] if ragged else [444], 8)
    if c.key_lengths and not ragged:
        # Behind its end the sequence has numbers that are none.
        problem.arrays["key_lengths"][:] = 400
        if c.page_size:
            problem.arrays["block_table"][:, 25:] = 1 << 30
        else:
            problem.k[:, 400:] = problem.v[:, 400:] = np.nan

    def wrong(seed: int) -> bool:
        problem.poison()
        if run(problem, seed, text=source(c).replace(old, new), partition_keys=256 if c.sinks else None):
            return True
        try:
            problem.check()
        except AssertionError:
            return True
        return False

    assert any(wrong(seed) for seed in range(3))


def test_boxes_of_pages_fill_a_slot() -> None:
    for name in KERNELS:
        for page in PAGE_SIZES:
            geo = derive(variant(name, kv_layout="paged", page_size=page), "sm_100a")
            assert isinstance(geo, Sm100Geometry)
            assert geo.v_boxes * geo.v_box_bytes == geo.slot_bytes
            assert geo.k_box_keys <= page
            assert geo.v_box_keys <= page
            # No box reaches over the end of its piece of the slot.
            assert geo.v_atom_keys % geo.v_box_keys == 0
            assert geo.v_box_chunks == 1 or geo.v_box_keys == geo.v_atom_keys


def test_copies_of_8_bits_fill_what_they_begin_at() -> None:
    """The rule fp8-copy-rows: a page of one key is 64 bytes of a slot, and the next one would land between two places of a copy."""
    with disabled_rules("fp8-copy-rows"):
        problem = FeatureProblem(variant("d256", page_size=1, **FP8 | PAGED), [1], [3], 8)
        assert "misaligned" in run(problem)


def test_an_entry_states_the_arguments_of_its_features() -> None:
    c = variant("d128", **ALL)
    problem = FeatureProblem(c, [1, 3], [20, 70], 2)
    geo = derive(c, "sm_100a")
    info = attention_entry_info(c, geo)
    names = [argument["name"] for argument in info["arguments"]]
    signature = source(c).split(f"{info['name']}(")[-1].split(") {")[0]
    assert [parameter.split()[-1].strip("*") for parameter in signature.split(",")] == names
    assert names[-6:] == ["block_table", "table_pages", "key_lengths", "query_starts", "total_q", "sinks"]
    assert len(problem.launch().args) == len(names)
    with pytest.raises(ValueError, match="block_table is missing"):
        attention_launch(c, geo, problem.q, problem.k, problem.v, problem.out, problem.lse, **problem.arrays | {"block_table": None})


def test_a_feature_that_a_target_lacks_is_refused_on_one_line() -> None:
    line = r"\[feature-target\].*sm_90a lacks it.*set shared_key: true.* or list a target other than"
    with pytest.raises(ConfigError, match=line) as error:
        variant("d128", arch=["sm_90a", "sm_100a"], rescale="exact")
    assert "\n" not in str(error.value)


def test_8_bits_give_the_bits_of_the_same_numbers_in_16() -> None:
    """float16 has every e4m3, so that K and V of 8 bits whose scales are 1 multiply as they would if they were float16."""
    wide = variant("d256", dtype="float16", key_lengths=True, mask="causal")
    narrow = variant("d256", dtype="float16", key_lengths=True, mask="causal", **FP8)
    problems = [FeatureProblem(c, [2] * 2, [300, 70], 4) for c in (narrow, wide)]
    problems[1].q, problems[1].k, problems[1].v = problems[0].q, *(x.astype(np.float16) for x in (problems[0].k, problems[0].v))
    problems[0].arrays |= {name: np.ones(1, np.float32) for name in ("k_scale", "v_scale")}
    for problem in problems:
        assert run(problem) == []
    assert problems[0].out.tobytes() == problems[1].out.tobytes()
    assert problems[0].lse.tobytes() == problems[1].lse.tobytes()


def test_8_bits_halve_the_copies_and_are_converted_without_bank_conflicts() -> None:
    c = variant("d256", **FP8)
    problem = FeatureProblem(c, [4], [300], 8)
    geo, launch = derive(c, "sm_100a"), problem.launch()
    assert isinstance(geo, Sm100Fp8Geometry)
    result = program(source(c)).launch(
        launch.entry, launch.grid, launch.block, launch.smem_bytes, launch.args, memory=Memory(), profile=True
    )
    assert result.hazards == []
    assert result.profile is not None
    # Two tiles of K; of V all chunks of the first, and of the second the one that has keys.
    sub_tiles = 2 * geo.qk_stages + geo.v_slots + 1
    assert result.profile.traffic["tensor copy load"].bytes == geo.q_bytes + sub_tiles * geo.slot_bytes // 2
    units = {"ld": (sub_tiles * geo.copy_slot_bytes + geo.q_bytes) // 16, "st": (sub_tiles * geo.slot_bytes + geo.q_bytes) // 16}
    for opcode, count in units.items():
        lines = [line for line in result.profile.shared.values() if line.opcode == f"{opcode}.shared.v4.u32"]
        assert sum(line.lanes for line in lines) >= count
        assert all(line.wavefronts == line.ideal for line in lines)


def test_a_call_with_8_bits_finds_a_kernel_of_every_depth() -> None:
    for depth in (64, 128, 256, 512):
        for page, page_scales in ((None, False), (16, False), (256, True)):
            facts = (depth, "bfloat16", "float8_e4m3fn", "bfloat16", True, None, None, False, page, True, False, False, page_scales, True)
            geo = derive(choose_config(*facts, "sm_100a"), "sm_100a")
            assert isinstance(geo, Sm100Fp8Geometry)
            assert geo.raw_slots * geo.copy_slot_bytes >= 65_536


@pytest.mark.parametrize("fields", [{}, FP8], ids=["16 bits", "8 bits"])
def test_the_call_runs_a_config_for_sm_100a_on_numpy_arrays(fields: dict[str, Any]) -> None:
    c = variant("d64", key_lengths=True, mask="causal", rescale="exact", **fields)
    problem = FeatureProblem(c, [2] * 2, [0, 70], 4)
    lengths, scales = problem.arrays["key_lengths"], {name: problem.arrays.get(name) for name in ("k_scale", "v_scale")}
    out, lse = fa4gen.attention(problem.q, problem.k, problem.v, config=c, seqused_k=lengths, causal=True, return_lse=True, **scales)
    problem.out, problem.lse = out, lse
    problem.check()
