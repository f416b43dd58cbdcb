"""The sm_90a key-split attention kernel: geometry, the combine's bits, results on the emulator, and what each removed safeguard causes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from attention_problem import Problem, check_batch_independence, check_dominating_key, check_merge_ignores_order, compiled, shows, source

from fa4gen.codegen import compiler
from fa4gen.codegen.attention import attention_entry_info, attention_entry_infos, entry_config
from fa4gen.codegen.backends.cuda import CudaBackend
from fa4gen.codegen.backends.emulator import EmulatorBackend
from fa4gen.codegen.config import Config, ConfigError, parse_config
from fa4gen.codegen.geometry import SMEM_LIMIT_BYTES, derive, symbol
from fa4gen.codegen.geometry_sm90 import MAX_REGISTERS, REGISTERS_PER_SM, Sm90KeySplitGeometry
from fa4gen.codegen.render import render, render_stream

from .test_attention_features import PAGED, FeatureProblem

M2 = {"m_pack": 2, "rows": 64}
SHAPES = [(depth, pack, rows) for depth in (64, 128) for pack in (4, 2) for rows in (8, 16, 32, 64) if rows <= 128 // pack]


def config(**fields: Any) -> Config:
    return parse_config({"name": "t", "shared_key": False, "arch": ["sm_90a"], "ov_depth": 64, **fields})


def shaped(depth: int, pack: int, tile_rows: int, **fields: Any) -> Config:
    return config(ov_depth=depth, m_pack=pack, rows=128 // pack, tile_rows=tile_rows, **fields)


def geometry(c: Config) -> Sm90KeySplitGeometry:
    geo = derive(c, "sm_90a")
    assert isinstance(geo, Sm90KeySplitGeometry)
    return geo


# --- geometry ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("depth", "pack", "rows"), SHAPES)
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
def test_shared_memory_and_registers_fit(depth, pack, rows, out_dtype):
    geo = geometry(shaped(depth, pack, rows, out_dtype=out_dtype))
    end = 0
    for region in geo.smem_map:
        assert region.offset == end
        # The swizzle pattern repeats every 1,024 bytes; bulk copies need 16, tensor copies without swizzle 128, mbarriers 8.
        assert region.offset % {"ring": 1024, "q": 1024, "out": 128, "stage": 16, "weights": 16}.get(region.name, 8) == 0
        end = region.end
    assert end == geo.smem_bytes <= SMEM_LIMIT_BYTES
    assert geo.slots_per_ring * pack == geo.ring_slots
    assert geo.slots_per_ring >= 2
    assert geo.slot_bytes == 64 * depth * 2
    assert sum(region.size for region in geo.smem_map if region.name.startswith("mbar")) == 8 * geo.mbarriers
    assert geo.warp_rows * geo.row_warps == rows
    assert geo.part_warps * pack == 4
    assert geo.merge_partitions * geo.partial_floats * 4 <= geo.combine_stage_bytes
    assert geo.merge_row_quads * 4 * 128 == geo.partial_floats
    registers = geo.consumer_registers or MAX_REGISTERS
    others = geo.producer_registers or registers
    assert 128 * registers + (geo.threads - 128) * others <= REGISTERS_PER_SM


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"block_keys": 256}, "wgmma-key-tile"),
        ({"warpgroups": 2}, "key-split-warpgroups"),
        ({"ring_slots": 10}, "ring-per-part"),
        ({"ring_slots": 4, "ov_depth": 128}, "ring-floor"),
        ({"ring_slots": 2, "ov_depth": 128, **M2}, "ring-floor"),
        ({"ring_slots": 40}, "smem-bytes"),
    ],
)
def test_a_broken_rule_is_named(fields, rule):
    with pytest.raises(ConfigError) as error:
        config(**fields)
    assert error.value.rule == rule
    assert "\n" not in str(error.value)


# --- source -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize(("depth", "pack", "rows"), SHAPES)
def test_the_kernel_compiles_without_spills(depth, pack, rows, mask):
    c = shaped(depth, pack, rows, mask=mask)
    module = compiler.compile_source(source(c), "sm_90a", "attention.cu")
    ((entry, kernel),) = module.kernels.items()
    assert entry == attention_entry_info(c, geometry(c))["name"]
    assert kernel.spill_store_bytes == kernel.spill_load_bytes == kernel.stack_bytes == 0
    assert not re.search(r"\(C75\d\d\)|warning", module.log)


def test_the_source_states_its_arguments():
    c = config(ov_depth=128)
    text = source(c)
    assert "#include" not in text
    assert "do not edit" in text.lower()
    infos = attention_entry_infos(c, "sm_90a")
    assert len(infos) == 3
    for info in infos:
        declaration = re.search(r"\n" + info["name"] + r"\((.*?)\) \{", text, re.DOTALL)
        assert declaration is not None
        names = [part.split()[-1].strip("*") for part in declaration[1].split(",")]
        assert names == [argument["name"] for argument in info["arguments"]]


@pytest.mark.parametrize(
    ("fields", "q_len", "group", "rows"),
    [({}, 1, 8, 8), ({}, 2, 8, 16), ({}, 4, 8, 32), ({}, 9, 8, 32), ({}, 1, 48, 32), (M2, 1, 8, 32), (M2, 8, 8, 64), (M2, 5, 12, 64)],
)
def test_a_launch_takes_the_tiles_that_its_rows_fill(fields, q_len, group, rows):
    c = config(**fields)
    entry = entry_config(c, "sm_90a", q_len, group)
    assert entry.tile_rows == rows
    assert Problem(c, 1, q_len, 64, group).launch().entry == symbol(entry, "sm_90a")


def test_no_barrier_among_the_key_tiles():
    body = source(config(ov_depth=128))
    loop = body[body.index("const Cursor k = ring;") :]
    loop = loop[: loop.index("release(smem + Tile::Q_EMPTY_OFFSET")]
    called = set(re.findall(r"\b(\w+)(?:<Tile>)?\(", loop))
    assert {"scores", "softmax", "accumulate", "mask_scores"} < called
    for function in called & set(re.findall(r"__forceinline__ \w+ (\w+)\(", body)):
        text = body[body.index(f" {function}(") :]
        assert "bar_sync" not in text[: text.index("\n}\n")]


def operations(text: str) -> list[str]:
    """The floating-point operations of a function's body, in order, with what they work on."""
    body = text[text.index("fa4_ws_intracta_combine(") :]
    return re.findall(r"^.*ptx_(?:max|sub|mul|fma|add|ex2|rcp|cvt).*$", body[: body.index("\n}\n")], re.MULTILINE)


@pytest.mark.parametrize("fields", [{}, {"use_fma": False}, {**M2, "out_dtype": "float32"}], ids=str)
def test_the_combine_keeps_the_order_of_its_operations(fields):
    c = config(ov_depth=128, **fields)
    full, function = operations(source(c)), operations(render(c, "sm_90a")["combine.cuh"])
    assert full == function
    assert len(full) > 10


# --- results ----------------------------------------------------------------------------------------------------------

# config fields, (batch, q_len, keys, group, kv_heads), launch options: every branch of the kernel, small.
CASES: list[tuple[dict[str, Any], tuple[int, int, int, int, int], dict[str, Any]]] = [
    ({}, (1, 1, 1, 1, 1), {}),
    ({"tile_rows": 8}, (1, 1, 63, 8, 1), {"scale": -0.2}),
    ({"use_fma": False, "tile_rows": 8}, (1, 1, 64, 8, 1), {"scale": 0.0}),
    ({"tile_rows": 16}, (2, 3, 65, 5, 1), {"ctas": 2}),
    ({}, (1, 4, 127, 6, 2), {"ctas": 1}),
    ({"group": 12}, (1, 2, 257, 12, 2), {"ctas": 1}),
    ({"mask": "causal"}, (1, 32, 7, 1, 1), {}),
    ({"mask": "causal", "tile_rows": 8}, (1, 5, 70, 2, 1), {"ctas": 1, "scale": -0.2}),
    ({"mask": "causal", "tile_rows": 16}, (1, 9, 320, 7, 1), {"ctas": 2}),
    ({"tile_rows": 8}, (1, 1, 1000, 8, 1), {"partition_keys": 128}),
    ({"tile_rows": 8}, (1, 1, 1300, 2, 1), {"partition_keys": 64}),
    ({}, (1, 1, 700, 100, 1), {"partition_keys": 192, "ctas": 2}),
    ({"mask": "causal", "out_dtype": "float32"}, (2, 4, 300, 5, 1), {"partition_keys": 64}),
    (
        {"use_fma": False, "dtype": "float16", "out_dtype": "float32", "mask": "causal"},
        (1, 9, 320, 8, 1),
        {"partition_keys": 64, "ctas": 3},
    ),
    ({"tile_rows": 16, "dtype": "float16", "out_dtype": "float16"}, (1, 1, 300, 16, 1), {"partition_keys": "auto", "ctas": 4}),
    ({"tile_rows": 32}, (1, 2, 129, 6, 1), {"partition_keys": 64}),
    ({"ov_depth": 128}, (1, 4, 500, 8, 1), {}),
    ({"ov_depth": 128, "tile_rows": 8, "ring_slots": 8}, (1, 1, 1000, 8, 1), {"ctas": 1}),
    ({"ov_depth": 128, "use_fma": False, "mask": "causal"}, (1, 6, 700, 5, 1), {"ctas": 1, "partition_keys": 128, "scale": 1.0}),
    ({"ov_depth": 128, **M2}, (1, 12, 320, 6, 1), {}),
    ({"ov_depth": 128, **M2, "mask": "causal"}, (1, 70, 256, 1, 1), {"ctas": 1}),
    ({"ov_depth": 128, **M2, "out_dtype": "float32"}, (1, 4, 450, 16, 1), {"partition_keys": 64, "ctas": 3}),
    ({**M2, "tile_rows": 32}, (1, 5, 200, 6, 1), {"ctas": 2}),
    ({**M2, "tile_rows": 8, "mask": "causal"}, (1, 3, 200, 5, 1), {"partition_keys": 64}),
    ({**M2, "tile_rows": 16, "ring_slots": 4, "use_fma": False}, (2, 3, 400, 8, 1), {"ctas": 1}),
]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_is_right_and_clean_on_the_emulator(case, seed):
    fields, shape, options = case
    c = config(**fields)
    problem = Problem(c, *shape, seed=seed)
    launch = problem.launch(**options)
    assert EmulatorBackend(seed=seed).run(compiled(source(c)), launch).hazards == []
    problem.check(options.get("scale", c.ov_depth**-0.5))
    # The arrival counters are back at their start.
    assert not np.asarray(launch.args[-1]).any()


@pytest.mark.parametrize("keys", [1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 320, 1000])
def test_every_edge_of_the_keys(keys):
    c = config(tile_rows=8, mask="causal" if keys % 2 else "none")
    for seed in range(5):
        problem = Problem(c, 1, 2, keys, 4, seed=seed)
        assert EmulatorBackend(seed=seed).run(compiled(source(c)), problem.launch()).hazards == []
        problem.check(0.125)


D128_M2 = {**M2, "ov_depth": 128}
SINKS = {"sinks": True, "mask": "causal", "window": 128}
AUTO = {"partition_keys": "auto", "ctas": 16}  # partitions of the window alone
# config fields, (queries, lengths, group, kv_heads), launch options
FEATURE_CASES: list[tuple[dict[str, Any], tuple[list[int], list[int], int, int], dict[str, Any]]] = [
    ({"tile_rows": 8, "key_lengths": True}, ([1] * 4, [0, 1, 130, 300], 8, 1), {}),
    ({"tile_rows": 64, "key_lengths": True, "mask": "causal"} | D128_M2, ([5] * 3, [3, 150, 0], 9, 1), {"partition_keys": 64}),
    ({"tile_rows": 16, "ov_depth": 128, "page_size": 16, "mask": "causal"} | PAGED, ([2] * 2, [0, 200], 5, 1), {"partition_keys": 128}),
    ({"tile_rows": 8, "page_size": 1} | PAGED, ([1], [70], 8, 1), {}),
    ({"tile_rows": 32, "page_size": 32} | M2 | PAGED, ([1] * 2, [70, 200], 8, 1), {"ctas": 1}),
    ({"tile_rows": 8, "page_size": 128} | PAGED, ([1] * 2, [170, 64], 8, 1), {}),
    ({"tile_rows": 32, "mask": "causal", "window": 70, "use_fma": False}, ([4], [300], 8, 1), {"partition_keys": 64}),
    ({"tile_rows": 8, "mask": "causal", "window": 600, "key_lengths": True}, ([2] * 3, [40, 640, 1500], 4, 1), AUTO),
    ({"tile_rows": 32, "mask": "causal", "window": 1000, "key_lengths": True} | D128_M2, ([3] * 2, [1063, 1700], 5, 1), AUTO),
    ({"tile_rows": 8, "page_size": 16} | SINKS | PAGED, ([1] * 3, [0, 400, 77], 8, 1), {"partition_keys": 128}),
    ({"tile_rows": 32, "softcap": 20.0, "sinks": True, "mask": "causal"} | D128_M2, ([3], [140], 5, 2), {"scale": -3.0}),
    ({"tile_rows": 8, "softcap": 3.0, "out_dtype": "float32"}, ([1], [130], 8, 1), {"scale": 1.0}),
    ({"tile_rows": 8, "key_lengths": True, "out_dtype": "float16"}, ([2] * 2, [130, 1], 4, 1), {}),
]


@pytest.mark.parametrize("case", FEATURE_CASES, ids=str)
def test_a_feature_is_right_and_clean_on_the_emulator(case):
    fields, shape, options = case
    seed = len(str(case))
    problem = FeatureProblem(config(**fields), *shape, seed=seed, heads_first=seed % 2 == 1)
    assert EmulatorBackend(seed=seed).run(compiled(source(problem.config)), problem.launch(**options)).hazards == []
    problem.check(options.get("scale"))


@pytest.mark.parametrize("fields", [{"ov_depth": 128}, D128_M2], ids=str)
def test_all_features_together_do_not_spill(fields):
    c = config(page_size=16, softcap=30.0, **SINKS, **PAGED, **fields)
    kernels = compiler.compile_source(source(c), "sm_90a", "attention.cu").kernels
    assert [kernel.spill_store_bytes + kernel.spill_load_bytes + kernel.stack_bytes for kernel in kernels.values()] == [0] * len(kernels)


@pytest.mark.parametrize("pack", [{}, M2], ids=["warp", "two warps"])
def test_keys_past_the_end_are_cleared(pack):
    c = config(key_lengths=True, tile_rows=128 // pack.get("m_pack", 4), **pack)
    text = source(c).replace("if ((int)(unit / 8 % BLOCK_KEYS) >= valid) rows[unit] = make_uint4(0, 0, 0, 0);", ";")
    assert text != source(c)
    problem = FeatureProblem(c, [1] * 2, [200, 130], 40)
    EmulatorBackend().run(compiled(text), problem.launch())
    with pytest.raises(AssertionError):
        problem.check()


@pytest.mark.parametrize("feature", [{"ragged_queries": True}, {"rescale": "exact"}], ids=str)
def test_other_features_are_refused(feature):
    with pytest.raises(ConfigError, match=r"\[feature-target\].*sm_90a lacks it.*set shared_key: true"):
        config(**feature)


def test_large_scores_and_one_dominating_key():
    for options in ({}, {"partition_keys": 64}):
        check_dominating_key(config(tile_rows=8), 300, **options)


def test_the_merge_does_not_depend_on_who_is_last():
    check_merge_ignores_order(config(tile_rows=8, out_dtype="float32"), 1400, 5)


def test_fixed_partitions_make_a_sequence_independent_of_its_batch():
    check_batch_independence(config(tile_rows=8, out_dtype="float32"))


def test_the_stream_variant_has_the_same_entry():
    c = config(ov_depth=128)
    text = render_stream(c, "sm_90a")
    module = compiler.compile_source(text, "sm_90a", "attention.cu")
    assert sorted(module.kernels) == sorted(info["name"] for info in attention_entry_infos(c, "sm_90a"))
    assert "mma.sync" not in module.ptx


# --- removed safeguards -----------------------------------------------------------------------------------------------

MUTANTS = {
    "scores do not wait for K": ("wait(at.full + k.slot * MBARRIER_BYTES, k.parity);", ""),
    "P.V does not wait for V": ("if (step == 0) wait(at.full + v.slot * MBARRIER_BYTES, v.parity);", ""),
    "scores do not wait for Q": ("wait(smem + Tile::Q_FULL_OFFSET + q.slot * MBARRIER_BYTES, q.parity);", ""),
    "the producer does not wait for an empty slot": (
        "count as bytes.\n                wait(empty + at.slot * MBARRIER_BYTES, at.parity ^ 1);",
        "count as bytes.",
    ),
    "K is released before it is read": (
        "scores<Tile>(s, at, at.ring + k.slot",
        "release(at.full + Tile::TO_EMPTY + k.slot * MBARRIER_BYTES, lane);\n                scores<Tile>(s, at, at.ring + k.slot",
    ),
    "V is never released": (
        "            release(at.full + Tile::TO_EMPTY + v.slot * MBARRIER_BYTES, lane);\n",
        "",
    ),
    "Q is overwritten while it is read": ("wait(smem + Tile::Q_EMPTY_OFFSET + at.slot * MBARRIER_BYTES, at.parity ^ 1);", ""),
    "O is copied out before it is staged": ("before the next item's stores.\n    ptx_bar_sync(TILE_BARRIER, CONSUMERS);", "stores."),
    "the O tile is written while it is copied out": ("if (at.thread < 32) ptx_bulk_wait_group_read();\n\n    float* stage", "float* stage"),
    "the combine reads O before all parts have staged it": ("every part's reads.\n    ptx_bar_sync(warp_group_idx, 128);", "reads."),
    "a partition is announced before it is written": ("which releases them all.\n    ptx_bar_sync(TILE_BARRIER, CONSUMERS);", "all."),
    "a merge does not wait for its copies": ("wait(merge, merge_parity);", ""),
    "a merge overwrites what it reads": (
        "the next copy over it.\n        ptx_fence_proxy_async();\n        ptx_bar_sync(TILE_BARRIER, CONSUMERS);",
        "",
    ),
    "the O tile is copied out without a proxy fence": ("ptx_fence_proxy_async();\n    // Orders the O tile", "// Orders the O tile"),
    "a merge copies over what level 1 still reads": (
        "ptx_fence_proxy_async_global();\n    ptx_fence_proxy_async();",
        "ptx_fence_proxy_async_global();",
    ),
    "a slot is released for lane 0 alone": (
        "__syncwarp();\n    if (lane == 0) ptx_mbarrier_arrive(mbarrier);",
        "if (lane == 0) ptx_mbarrier_arrive(mbarrier);",
    ),
    "the CTA ends before O is copied out": (
        "the last copies have read it.\n    if (at.thread < 32) ptx_bulk_wait_group_read();",
        "the last copies have read it.",
    ),
    "rows past the tile are left as they are": ("unit < STAGE_BYTES / 16", "unit < 0"),
    "padding rows of Q are left as they are": ("if (unit / 8 % Tile::ROWS >= used_rows)", "if (unit / 8 % Tile::ROWS > Tile::ROWS)"),
}


# (batch, keys), keys of a partition: rings of two slots that are reused at once, and a merge that takes its partitions in two rounds.
MUTANT_RUNS = [((3, 700), None), ((1, 1100), 64)]


def mutant_config() -> Config:
    return config(tile_rows=8, ring_slots=8)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_removed_safeguard_shows(mutant):
    old, new = MUTANTS[mutant]
    c = mutant_config()
    assert old in source(c)
    broken = compiled(source(c).replace(old, new))
    runs = [(seed, run) for seed in range(2) for run in MUTANT_RUNS]
    assert any(shows(broken, Problem(c, batch, 1, keys, 6), seed, ctas=2, partition_keys=part) for seed, ((batch, keys), part) in runs)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("shape", "partition_keys"), MUTANT_RUNS)
def test_nothing_shows_with_all_safeguards(shape, partition_keys, seed):
    c = mutant_config()
    batch, keys = shape
    assert not shows(compiled(source(c)), Problem(c, batch, 1, keys, 6), seed, ctas=2, partition_keys=partition_keys)


# --- on the GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("depth", "pack", "rows"), SHAPES)
def test_attention_is_right_on_the_gpu(depth, pack, rows):
    gpu = CudaBackend(repeats=2)
    for mask in ("none", "causal"):
        c = shaped(depth, pack, rows, mask=mask)
        module = compiled(source(c))
        for shape in [(1, 1, 1, 1, 1), (2, 4, 65, 6, 2), (3, 1, 1000, 8, 1), (1, 32, 700, 2, 2), (1, 3, 2, 48, 1)]:
            for options in ({}, {"ctas": 3}, {"partition_keys": 128}, {"partition_keys": "auto"}):
                problem = Problem(c, *shape)
                gpu.run(module, problem.launch(**options))
                problem.check(depth**-0.5)


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("shape", [(1, 32, 65, 2, 2), (2, 8, 63, 6, 1), (1, 8, 300, 8, 1)], ids=str)
def test_scores_scaled_first_with_64_rows_of_depth_128(mask, shape):
    """The case with the most registers: four key steps a tile, and no spills."""
    c = config(ov_depth=128, use_fma=False, mask=mask, tile_rows=64, **M2)
    assert geometry(c).key_steps == 4
    batch, q_len, keys, group, kv_heads = shape
    problem = Problem(c, batch, q_len, keys, group, kv_heads)
    module = compiler.compile_source(source(c), "sm_90a", "attention.cu")
    assert all(kernel.spill_store_bytes == kernel.spill_load_bytes == 0 for kernel in module.kernels.values())
    assert EmulatorBackend(seed=1).run(compiled(source(c)), problem.launch()).hazards == []
    problem.check(128**-0.5)
