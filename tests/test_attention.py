"""The sm_90a attention kernel: geometry, launches, results on the emulator, and the hazards that each removed safeguard causes."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from typing import Any

import numpy as np
import pytest
from attention_problem import Problem, check_batch_independence, check_dominating_key, check_merge_ignores_order, compiled, shows, source
from hypothesis import given
from hypothesis import strategies as st

from fa4gen.codegen import attention, compiler
from fa4gen.codegen.attention import (
    Split,
    Workspace,
    attention_entry_info,
    attention_entry_infos,
    attention_launch,
    auto_split,
    entry_config,
    fixed_split,
    tiling,
    window_tiles,
)
from fa4gen.codegen.backends import Compiled, Launch
from fa4gen.codegen.backends.cuda import CudaBackend, DeviceArray
from fa4gen.codegen.backends.emulator import EmulatorBackend
from fa4gen.codegen.config import Config, ConfigError, parse_config
from fa4gen.codegen.emulator import Uninitialized
from fa4gen.codegen.geometry import SMEM_LIMIT_BYTES, derive, entry_configs, symbol
from fa4gen.codegen.geometry_sm90 import REGISTERS_PER_SM, Sm90Geometry, derive_sm90

SHAPES = [(depth, rows, warpgroups) for depth in (64, 128, 256, 512) for rows in (8, 16, 32) for warpgroups in (1, 2)]


def config(depth: int = 64, tile_rows: int | None = 8, warpgroups: int = 1, **fields: Any) -> Config:
    fields = {"ov_depth": depth, "tile_rows": tile_rows, "warpgroups": warpgroups, "rescale": "eager", **fields}
    given = {key: value for key, value in fields.items() if value is not None}
    return parse_config({"name": "t", "shared_key": True, "arch": ["sm_90a"]} | given)


def geometry(c: Config) -> Sm90Geometry:
    geo = derive(c, "sm_90a")
    assert isinstance(geo, Sm90Geometry)
    return geo


# --- geometry ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("depth", "rows", "warpgroups"), SHAPES)
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
def test_shared_memory_and_registers_fit(depth, rows, warpgroups, out_dtype):
    geo = geometry(config(depth, rows, warpgroups, out_dtype=out_dtype))
    end = 0
    for region in geo.smem_map:
        assert region.offset == end
        # The swizzle pattern repeats every 1,024 bytes; the driver's objects and vector accesses need 8 and 16.
        assert region.offset % (1024 if region.name in ("ring", "q", "p", "out", geo.out_region) else 8) == 0
        end = region.end
    assert end == geo.smem_bytes <= SMEM_LIMIT_BYTES
    assert geo.slots_per_ring * geo.warpgroups == geo.ring_slots
    assert geo.slots_per_ring >= 2
    assert geo.tile_slots * geo.slot_bytes == 64 * depth * 2
    mbarrier_bytes = sum(region.size for region in geo.smem_map if region.name.startswith("mbar"))
    assert mbarrier_bytes == 8 * geo.mbarriers
    if geo.consumer_registers:
        consumers = geo.warpgroups * 128
        assert consumers * geo.consumer_registers + (geo.threads - consumers) * geo.producer_registers <= REGISTERS_PER_SM


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"block_keys": 128}, "wgmma-key-tile"),
        ({"ring_slots": 5, "warpgroups": 2}, "ring-per-warpgroup"),
        ({"ring_slots": 2, "warpgroups": 2}, "ring-floor"),
        ({"ring_slots": 1}, "ring-floor"),
        ({"split": "fixed 100"}, "split-key-tiles"),
        ({"split": "fixed"}, "split"),
        ({"split": "fixed 0"}, "split"),
        ({"split": "128"}, "split"),
        ({"ring_slots": 40}, "smem-bytes"),
        ({"ring_slots": 12, "ov_depth": 128, "ctas_per_sm": 2}, "smem-bytes"),
        ({"ov_depth": 128, "warpgroups": 2, "ctas_per_sm": 2}, "ctas-per-sm"),
        ({"ov_depth": 64, "shared_key": False, "ctas_per_sm": 2}, "ctas-per-sm"),
        ({"ctas_per_sm": 5}, "allowed-value"),
        ({"ov_depth": 64, "kv_dtype": "float8_e4m3fn", "kv_layout": "paged", "page_size": 1}, "fp8-page-rows"),
    ],
)
def test_a_broken_rule_is_named(fields, rule):
    with pytest.raises(ConfigError) as error:
        config(512, **fields)
    assert error.value.rule == rule
    assert "\n" not in str(error.value)


# (depth, rows, CTAs an SM) of which Q, O and what is exchanged leave no memory for a ring.
CROWDED = [(256, 32, 4), (512, 16, 4), (512, 32, 3), (512, 32, 4)]


@pytest.mark.parametrize(
    "shape", [shape for shape in itertools.product((64, 128, 256, 512), (8, 16, 32), (1, 2, 3, 4)) if shape not in CROWDED]
)
def test_ctas_that_share_an_sm_fit_it_together(shape):
    depth, rows, ctas_per_sm = shape
    geo = geometry(config(depth, rows, ctas_per_sm=ctas_per_sm))
    assert geo.ctas_per_sm == ctas_per_sm
    # 228 KiB and 2,048 threads an SM; the system keeps 1 KiB for each CTA.
    assert ctas_per_sm * (geo.smem_bytes + 1_024) <= 233_472
    assert geo.smem_bytes <= geo.smem_limit == 233_472 // ctas_per_sm - 1_024
    assert ctas_per_sm * geo.threads <= 2_048


@pytest.mark.parametrize("shape", CROWDED)
def test_more_ctas_than_an_sm_has_memory_for_are_refused(shape):
    depth, rows, ctas_per_sm = shape
    with pytest.raises(ConfigError, match="ctas_per_sm") as error:
        config(depth, rows, ctas_per_sm=ctas_per_sm)
    assert error.value.rule == "ring-floor"


def test_how_many_ctas_share_an_sm_follows_from_depth_rows_and_ring():
    rows = (8, 16, 32)
    assert [geometry(config(64, tile_rows)).ctas_per_sm for tile_rows in rows] == [4, 2, 2]
    assert [geometry(config(128, tile_rows)).ctas_per_sm for tile_rows in rows] == [2, 2, 2]
    assert [geometry(config(depth, tile_rows)).ctas_per_sm for depth in (256, 512) for tile_rows in rows] == [1] * 6
    assert geometry(config(128, 8, warpgroups=2)).ctas_per_sm == 1
    # A ring that is asked for is had, if need be with the SM for itself.
    assert [geometry(config(128, 8, ring_slots=slots)).ctas_per_sm for slots in (2, 5, 6, 12)] == [2, 2, 1, 1]
    assert [geometry(config(64, 8, ring_slots=slots)).ctas_per_sm for slots in (4, 5, 12, 13)] == [4, 2, 2, 1]


def test_ctas_that_share_an_sm_are_in_the_name_where_the_config_says_so():
    assert "_c" not in symbol(config(128), "sm_90a").removesuffix("_sm90a")
    assert symbol(config(128, ctas_per_sm=2), "sm_90a").endswith("_c2_sm90a")
    both = config(128, warpgroups=None, ctas_per_sm=2, arch=["sm_90a", "sm_100a"])
    assert "_c2" not in symbol(both, "sm_100a")


def test_an_unsplit_launch_has_a_cta_for_each_place_on_the_chip():
    for fields, places in (({"ctas_per_sm": 1}, 3), ({"ctas_per_sm": 2}, 6), ({}, 6)):
        problem = Problem(config(128, **fields), 12, 1, 100, 4)
        # 12 items: as few CTAs as do with the same number of items each.
        assert problem.launch(ctas=3).grid == (places, 1, 1)
        assert problem.launch(ctas=100).grid == (12, 1, 1)


def test_tile_rows_are_an_n_of_wgmma():
    legal = config()
    with pytest.raises(ConfigError) as error:
        derive_sm90(legal.model_copy(update={"tile_rows": 64}))
    assert error.value.rule == "wgmma-tile-rows"


# --- source -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("depth", "rows", "warpgroups"), SHAPES)
def test_the_kernel_compiles_without_spills(depth, rows, warpgroups):
    c = config(depth, rows, warpgroups)
    module = compiler.compile_source(source(c), "sm_90a", "attention.cu")
    ((entry, kernel),) = module.kernels.items()
    assert entry == attention_entry_info(c, geometry(c))["name"]
    assert kernel.spill_store_bytes == kernel.spill_load_bytes == kernel.stack_bytes == 0
    # ptxas says so when it has to insert or serialise warpgroup instructions, or ignores setmaxnreg.
    assert not re.search(r"\(C75\d\d\)|warning", module.log)


@pytest.mark.parametrize("rows", [32, None])
def test_the_source_includes_nothing_and_states_its_arguments(rows):
    c = config(512, rows, 2)
    text = source(c)
    assert "#include" not in text
    assert "do not edit" in text.lower()
    infos = attention_entry_infos(c, "sm_90a")
    assert text.count("__global__") == len(infos)
    for info in infos:
        declaration = re.search(r"\n" + info["name"] + r"\((.*?)\) \{", text, re.DOTALL)
        assert declaration is not None
        names = [part.split()[-1].strip("*") for part in declaration[1].split(",")]
        assert names == [argument["name"] for argument in info["arguments"]]
        assert info["smem_bytes"] == geometry(c.model_copy(update={"tile_rows": info["tile_rows"]})).smem_bytes


def test_tile_rows_left_to_the_launch_give_an_entry_each():
    c = config(64, None, 1)
    assert [entry.tile_rows for entry in entry_configs(c, "sm_90a")] == [8, 16, 32]
    assert entry_configs(config(64, 16), "sm_90a") == (config(64, 16),)
    module = compiler.compile_source(source(c), "sm_90a", "attention.cu")
    names = [info["name"] for info in attention_entry_infos(c, "sm_90a")]
    assert sorted(names) == sorted(module.kernels)
    assert [name.split("_")[-2] for name in names] == ["t8", "t16", "t32"]
    # Each is what a config that gives its rows has: the same code under the same name. NVRTC may order it otherwise among several entries,
    # so that its registers may differ; nothing else of its resources does.
    lone = source(config(64, 16, 1))
    lines = iter(source(c).splitlines())
    assert all(line in lines for line in lone.splitlines() if not line.lstrip().startswith("//"))
    alone = compiler.compile_source(lone, "sm_90a", "attention.cu").kernels[names[1]]
    among = module.kernels[names[1]]
    assert dataclasses.replace(alone, registers=among.registers) == among
    # One info of the config itself is that of its largest tile.
    assert attention_entry_info(c, geometry(c))["name"] == names[2]


def test_items_are_divided_exactly():
    text = source(config(64))
    functions = text[text.index("struct Quotient") : text.index("struct Problem")]
    kernel = """
extern "C" __global__ void divided(const unsigned* values, const unsigned* by, const unsigned* inverses, unsigned* whole, unsigned* rest,
                                   unsigned count) {
    for (unsigned i = threadIdx.x; i < count; i += 32) {
        const Quotient quotient = divide(values[i], Divisor{by[i], inverses[i]});
        whole[i] = quotient.whole;
        rest[i] = quotient.rest;
    }
}
"""
    rng = np.random.default_rng(0)
    edges = np.array([0, 1, 2, 3, 5, 7, 8, 2**16 - 1, 2**16, 2**16 + 1, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1], np.uint32)
    divisors = np.concatenate([edges[1:], (2 ** (rng.random(60) * 32)).astype(np.uint32)])
    # Around whole multiples, where a quotient that is one off shows.
    multiples = [by * (value // by) + off for by in map(int, divisors) for value in (2**32 - 1, 2**31, by) for off in (-1, 0, 1)]
    near = zip((value % 2**32 for value in multiples), divisors.repeat(9), strict=True)
    pairs = [*((value, by) for value in edges for by in divisors), *near]
    values, by = (np.array(column, np.uint32) for column in zip(*pairs, strict=True))
    whole, rest = np.zeros_like(values), np.zeros_like(values)
    args = [values, by, np.uint32(0xFFFFFFFF) // by, whole, rest, np.uint32(len(values))]
    assert EmulatorBackend().run(compiled(functions + kernel), Launch("divided", (1, 1, 1), (32, 1, 1), 0, args)).hazards == []
    np.testing.assert_array_equal(whole, values // by)
    np.testing.assert_array_equal(rest, values % by)


# --- launches ---------------------------------------------------------------------------------------------------------


@given(st.sampled_from([8, 16, 32]), st.integers(1, 40), st.integers(1, 100))
def test_tiles_cover_every_query_row_once(tile_rows, q_len, group):
    tiles = tiling(tile_rows, q_len, group)
    assert tiles.heads * tiles.positions <= tile_rows
    seen = np.zeros((q_len, group), int)
    for tile in range(tiles.q_tiles):
        position = tile // tiles.tiles_per_position * tiles.positions
        head = tile % tiles.tiles_per_position * tile_rows
        seen[position : position + tiles.positions, head : head + tiles.heads] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize(
    ("q_len", "group", "rows"),
    # A tile that the rows fill; fewer tiles before smaller ones: 3 positions of 5 heads in 16 rows, 24 of 32 rows before twice 16.
    [(1, 1, 8), (1, 8, 8), (1, 9, 16), (2, 8, 16), (3, 5, 16), (4, 8, 32), (5, 8, 32), (1, 24, 32), (1, 33, 32), (2, 12, 32), (7, 1, 8)],
)
def test_a_launch_takes_the_tile_that_fits(q_len, group, rows):
    c = config(64, None, 1)
    assert entry_config(c, "sm_90a", q_len, group).tile_rows == rows
    # The batch, the keys and the split have no say: a sequence's result must not change with its batch.
    entries = {
        Problem(c, batch, q_len, keys, group, kv_heads).launch(partition_keys="auto").entry
        for batch, keys, kv_heads in ((1, 70, 1), (3, 500, 1), (1, 5, 3))
    }
    assert entries == {symbol(c.model_copy(update={"tile_rows": rows}), "sm_90a")}
    assert entry_config(config(64, 16), "sm_90a", q_len, group).tile_rows == 16


def test_a_launch_with_much_to_read_shares_sms():
    c = config(256, None)
    assert [(entry.tile_rows, entry.ctas_per_sm) for entry in entry_configs(c, "sm_90a")] == [(8, None), (8, 2), (16, None), (32, None)]
    # At smaller depths CTAs always share an SM; a config that says how many, or asks for a ring, or for tile rows, has its way.
    for fields in ({"ctas_per_sm": 1}, {"ring_slots": 10}, {"tile_rows": 8}, {"ov_depth": 128}, {"warpgroups": 2}):
        assert all(
            entry.ctas_per_sm == fields.get("ctas_per_sm")
            for entry in entry_configs(config(**{"depth": 256, "tile_rows": None} | fields), "sm_90a")
        )
    for keys, group, ctas in itertools.product((64, 640, 2000), (8, 12, 32), (1, 2, 3)):
        launch = Problem(c, 1, 1, keys, group).launch(ctas=ctas)
        shares = group == 8 and -(-keys // 64) > attention.SHARING_TILES * ctas
        assert ("_c2_" in launch.entry) == shares
        assert launch.grid[0] <= ctas * (1 + shares)


@pytest.mark.parametrize("depth", [256, 512])
def test_sharing_an_sm_changes_no_bits(depth, monkeypatch):
    # Splits that need no merge, one cluster, and several; where a sequence has its own length those meet in one CTA.
    for fields, split in (({}, None), ({}, 128), ({}, 64), ({"rescale": "exact", "mask": "causal"}, 64)):
        c = config(depth, None, **fields)
        problem = Problem(c, 3, 1, 330, 8)
        module = compiled(source(c))
        results = []
        for tiles in (1000, 0):
            monkeypatch.setattr(attention, "SHARING_TILES", tiles)
            problem.poison()
            launch = problem.launch(partition_keys=split, ctas=16)
            assert ("_c2_" in launch.entry) == (tiles == 0)
            assert EmulatorBackend(seed=tiles).run(module, launch).hazards == []
            problem.check(depth**-0.5)
            results.append(problem.out.tobytes() + problem.lse.tobytes())
        assert results[0] == results[1]


@given(st.integers(1, 40), st.integers(1, 100))
def test_no_other_tile_takes_fewer_tiles_or_less_padding(q_len, group):
    chosen = entry_config(config(64, None), "sm_90a", q_len, group).tile_rows
    assert chosen is not None
    cost = {rows: (tiling(rows, q_len, group).q_tiles, rows) for rows in (8, 16, 32)}
    assert cost[chosen] == min(cost.values())


@given(st.sampled_from([64, 512]), st.sampled_from([8, 32]), st.integers(1, 2000), st.integers(1, 600), st.integers(1, 148))
def test_partitions_cover_the_keys(depth, tile_rows, key_tiles, query_tiles, ctas):
    geo = geometry(config(depth, tile_rows))
    split = auto_split(geo, key_tiles, query_tiles, ctas)
    assert 1 <= split.partitions <= geo.max_partitions
    assert (split.partitions - 1) * split.tiles < key_tiles <= split.partitions * split.tiles


# (depth, key tiles, query tiles) -> partitions that were fastest, or within 2% of it, in bench/LOG.md 14 and 20.
MEASURED_SPLITS = [
    ((512, 128, 64), {2}),
    ((512, 32, 256), {1}),
    ((512, 64, 512), {1}),
    ((512, 1, 1), {1}),
    ((512, 512, 4), {16}),
    ((512, 128, 4), {16, 20}),
    ((512, 512, 1), {64}),
    ((256, 512, 1), {64}),
    ((512, 128, 16), {4}),
    ((256, 512, 4), {16, 20}),
    ((256, 128, 64), {2}),
    ((128, 512, 4), {32}),
    ((128, 64, 512), {1}),
]


@pytest.mark.parametrize(("shape", "partitions"), MEASURED_SPLITS)
def test_auto_split_picks_what_was_measured_fastest(shape, partitions):
    depth, key_tiles, query_tiles = shape
    assert auto_split(geometry(config(depth)), key_tiles, query_tiles, 132).partitions in partitions


@pytest.mark.parametrize("depth", [128, 256, 512])
@pytest.mark.parametrize("tile_rows", [8, 32])
def test_auto_split_follows_from_what_things_cost(depth, tile_rows, monkeypatch):
    geo = geometry(config(depth, tile_rows=tile_rows))
    # Query tiles that fill the chip stay whole, and partitions come as whole clusters.
    assert auto_split(geo, 64, 132, 132).partitions == auto_split(geo, 64, 264, 132).partitions == 1
    for key_tiles, query_tiles in itertools.product((3, 17, 64, 100, 512, 2048), (1, 3, 4, 16, 50)):
        split = auto_split(geo, key_tiles, query_tiles, 132)
        assert split.partitions <= geo.max_partitions
        if split.partitions > geo.max_cluster:
            tiles = split.tiles
            assert tiles == -(-key_tiles // (-(-split.partitions // geo.max_cluster) * geo.max_cluster))
    # A merge that costs nothing lets more CTAs read; one that costs more than all the reading leaves the keys whole.
    usual = auto_split(geo, 128, 1, 132).partitions
    monkeypatch.setattr(attention, "MERGE_BYTES_PER_US", 1e9)
    monkeypatch.setattr(attention, "SECOND_STEP_US", 0.0)
    assert auto_split(geo, 128, 1, 132).partitions >= usual > 1
    monkeypatch.setattr(attention, "CLUSTER_US", 1e4)
    monkeypatch.setattr(attention, "MERGE_US", 1e4)
    assert auto_split(geo, 128, 1, 132).partitions == 1


def test_more_ctas_than_the_memory_feeds_are_not_worth_a_merge(monkeypatch):
    geo = geometry(config(512))
    few = auto_split(geo, 512, 4, 132)
    assert few.partitions * 4 * 2 <= 132
    monkeypatch.setattr(attention, "CHIP_BYTES_PER_US", attention.CHIP_BYTES_PER_US * 4)
    assert auto_split(geo, 512, 4, 132).partitions > few.partitions


@pytest.mark.parametrize(
    ("depth", "key_tiles", "query_tiles", "partitions"), [(512, 128, 64, 2), (128, 128, 64, 2), (128, 32, 256, 1), (64, 64, 512, 1)]
)
def test_auto_split_of_eight_bits_goes_by_what_a_cta_can_take(depth, key_tiles, query_tiles, partitions):
    geo = geometry(config(depth, kv_dtype="float8_e4m3fn", warpgroups=2))
    assert auto_split(geo, key_tiles, query_tiles, 132).partitions == partitions


@given(
    st.integers(1, 400), st.integers(1, 40), st.integers(1, 3000), st.sampled_from([8, 16, 32]), st.sampled_from([1, 2, 3, 8]), st.data()
)
def test_window_tiles_bound_what_a_query_tile_sees(window, q_len, keys, tile_rows, group, data):
    c = config(128, tile_rows, mask="causal", window=window)
    positions = min(tiling(tile_rows, q_len, group).positions, q_len)
    bound = window_tiles(c, geometry(c), positions)
    first = data.draw(st.integers(0, q_len - 1)) // positions * positions
    last = min(first + positions, q_len) - 1
    # Position i sees the keys from keys - q_len + i - window + 1 to keys - q_len + i.
    low, high = max(keys - q_len + first - window + 1, 0), keys - q_len + last
    seen = {key // 64 for key in range(low, high + 1)}
    assert len(seen) <= bound
    # With the worst place of the first key the bound is met.
    assert len({key // 64 for key in range(63, 63 + window + positions - 1)}) == bound


def test_a_window_splits_its_own_keys_only():
    c = config(128, 8, rescale="lazy", mask="causal", window=600)
    launches = [Problem(c, 1, 1, keys, 4).launch(ctas=16, partition_keys="auto") for keys in (700, 5000, 60_000)]
    names = [argument["name"] for argument in attention_entry_info(c, geometry(c))["arguments"]]
    splits = {tuple(launch.args[names.index(name)] for name in ("partition_tiles", "partitions")) for launch in launches}
    assert len(splits) == 1
    ((tiles, partitions),) = splits
    assert partitions > 1
    assert window_tiles(c, geometry(c), 1) <= tiles * partitions < 5000 // 64


def test_fixed_split():
    assert fixed_split(9, 128, 64) == Split(2, 5)
    for keys in (0, 32, 100):
        with pytest.raises(ValueError, match="not a positive multiple"):
            fixed_split(9, keys, 64)
    with pytest.raises(ValueError, match="at most 64"):
        fixed_split(65, 64, 64)


def test_arrays_that_do_not_fit_are_refused():
    c = config(group=2)
    good = Problem(c, 1, 2, 70, 2, kv_heads=2)
    good.launch()

    def refused(match: str, **change: np.ndarray) -> None:
        arrays = {"q": good.q, "k": good.k, "v": good.v, "out": good.out, "lse": good.lse} | change
        with pytest.raises(ValueError, match=match) as error:
            attention_launch(c, geometry(c), *arrays.values())
        assert "\n" not in str(error.value)

    refused("q is float32", q=good.q.astype(np.float32))
    refused("contiguous", k=np.asfortranarray(good.k))
    refused("do not fit", v=good.v[:, :5].copy())
    refused("do not fit", out=good.out[:, :1].copy())
    refused("lse is", lse=good.lse.astype(np.float64))
    refused("fixes group 2", k=good.k[:, :, :1].copy(), v=good.v[:, :, :1].copy())
    with pytest.raises(ValueError, match="not finite"):
        good.launch(scale=math.inf)


# --- results ----------------------------------------------------------------------------------------------------------

F16_TO_F32 = {"dtype": "float16", "out_dtype": "float32"}
# config fields, (batch, q_len, keys, group, kv_heads), launch options: every branch of the kernel, small.
CASES: list[tuple[dict[str, Any], tuple[int, int, int, int, int], dict[str, Any]]] = [
    ({}, (1, 1, 1, 1, 1), {}),
    ({}, (1, 1, 63, 8, 1), {"scale": -0.2}),
    ({"use_fma": False}, (1, 1, 65, 8, 1), {"scale": 0.0}),
    ({}, (2, 3, 130, 6, 1), {"ctas": 2}),
    ({"rescale": "lazy"}, (1, 1, 450, 8, 1), {"scale": 3.0}),
    ({"rescale": "lazy", "warpgroups": 2, "use_fma": False, "mask": "causal"}, (2, 5, 300, 3, 1), {"ctas": 1, "scale": -2.0}),
    ({"rescale": "lazy", "warpgroups": 2, "tile_rows": 32}, (1, 4, 600, 8, 1), {"partition_keys": 192}),
    ({"group": 12}, (1, 1, 150, 12, 2), {"ctas": 1}),
    ({"warpgroups": 2}, (1, 1, 64, 8, 1), {"scale": 0.0}),
    ({"warpgroups": 2}, (1, 2, 200, 5, 2), {"ctas": 1}),
    ({"warpgroups": 2, "tile_rows": 32, "mask": "causal"}, (1, 32, 7, 1, 1), {}),
    ({"warpgroups": 2, "mask": "causal"}, (1, 5, 70, 2, 1), {"ctas": 1, "scale": -0.2}),
    ({"warpgroups": 1, "mask": "causal", "tile_rows": 16}, (1, 9, 140, 7, 1), {"ctas": 2}),
    ({"warpgroups": 2}, (1, 1, 520, 8, 1), {"partition_keys": 128}),
    ({"warpgroups": 1}, (1, 1, 520, 12, 1), {"partition_keys": 192, "ctas": 2}),
    ({"warpgroups": 2, "mask": "causal", "out_dtype": "float32"}, (1, 4, 300, 5, 1), {"partition_keys": 64}),
    ({"warpgroups": 2, "use_fma": False} | F16_TO_F32, (1, 2, 320, 4, 1), {"partition_keys": 64, "ctas": 3}),
    ({"tile_rows": 16, "dtype": "float16", "out_dtype": "float16"}, (1, 1, 300, 16, 1), {"partition_keys": "auto", "ctas": 4}),
    ({"warpgroups": 1, "out_dtype": "float32", "depth": 128, "tile_rows": 32}, (1, 4, 100, 8, 2), {"ctas": 1}),
    ({"warpgroups": 2, "depth": 128, "tile_rows": 16, "ring_slots": 4}, (1, 2, 130, 100, 1), {}),
    ({"warpgroups": 2, "depth": 256, "tile_rows": 16}, (1, 1, 250, 16, 1), {"partition_keys": 64, "ctas": 1}),
    ({"warpgroups": 2, "depth": 512, "tile_rows": 32}, (1, 4, 200, 8, 1), {}),
    ({"tile_rows": None, "warpgroups": 1}, (2, 1, 150, 5, 1), {"ctas": 1}),
    # Clusters: one that has all partitions, some without keys; several a query tile; several query tiles one after another.
    ({"depth": 128}, (1, 1, 200, 8, 1), {"partition_keys": 128}),
    ({"depth": 128, "rescale": "lazy"}, (1, 3, 520, 6, 2), {"partition_keys": 128, "ctas": 2}),
    ({"depth": 256, "mask": "causal", "use_fma": False}, (1, 5, 200, 4, 1), {"partition_keys": 64, "ctas": 4}),
    ({"depth": 256, "tile_rows": 32, "out_dtype": "float32"}, (1, 4, 520, 8, 1), {"partition_keys": 64, "ctas": 4}),
    ({"depth": 512, "tile_rows": 8, "mask": "causal"}, (2, 2, 1100, 4, 1), {"partition_keys": 64, "ctas": 8}),
    ({"tile_rows": None, "warpgroups": 2}, (1, 3, 260, 5, 1), {"partition_keys": 128}),
    ({"warpgroups": 1, "depth": 512, "tile_rows": 8, "ring_slots": 2}, (1, 1, 190, 8, 1), {"partition_keys": 128}),
]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_is_right_and_clean_on_the_emulator(case, seed):
    fields, shape, options = case
    c = config(**fields)
    problem = Problem(c, *shape, seed=seed)
    launch = problem.launch(**options)
    outcome = EmulatorBackend(seed=seed).run(compiled(source(c)), launch)
    assert outcome.hazards == []
    problem.check(options.get("scale", c.ov_depth**-0.5))
    # The arrival counters are back at their start.
    assert not np.asarray(launch.args[-1]).any()


@pytest.mark.parametrize("rescale", ["eager", "lazy"])
def test_large_scores_and_one_dominating_key(rescale):
    check_dominating_key(config(warpgroups=2, rescale=rescale), 200)


def test_the_merge_does_not_depend_on_who_is_last():
    check_merge_ignores_order(config(warpgroups=2, out_dtype="float32"), 500, 6)


def test_fixed_partitions_make_a_sequence_independent_of_its_batch():
    check_batch_independence(config(warpgroups=2, out_dtype="float32"))


def test_the_config_says_how_keys_are_split():
    shape = (1, 1, 8192, 8)
    given = Problem(config(), *shape).launch(partition_keys=128)
    fixed = Problem(config(split="fixed 128"), *shape).launch()
    auto = Problem(config(split="auto"), *shape).launch()
    assert [argument for argument in fixed.args if isinstance(argument, np.generic)] == [a for a in given.args if isinstance(a, np.generic)]
    assert fixed.grid == given.grid == (64, 1, 1)
    assert auto.grid == Problem(config(), *shape).launch(partition_keys="auto").grid != (1, 1, 1)
    assert Problem(config(split="fixed 128"), *shape).launch(partition_keys="auto").grid == auto.grid
    # It is a matter of the launch: the kernel is the same.
    assert symbol(config(split="auto"), "sm_90a") == symbol(config(), "sm_90a")


def arrays(launch: Launch) -> list[np.ndarray]:
    return [a.array if isinstance(a, Uninitialized) else a for a in launch.args if isinstance(a, (np.ndarray, Uninitialized))]


def test_a_workspace_is_its_streams_own():
    c = config()
    small, large = Problem(c, 1, 1, 300, 8), Problem(c, 2, 1, 700, 8)
    workspace, other = Workspace(), Workspace()
    launches = [p.launch(partition_keys=64, workspace=workspace) for p in (small, large, small)]
    for stranger in (large.launch(partition_keys=64, workspace=other), large.launch(partition_keys=64)):
        assert not any(np.shares_memory(a, b) for launch in launches for a in arrays(launch)[1:] for b in arrays(stranger)[1:])
    # Numbers rise; what is large enough is used again.
    assert [launch.args[-4] for launch in launches] == [1, 2, 3]
    assert arrays(launches[1])[1:] == arrays(launches[2])[1:]
    for launch, problem in zip(launches, (small, large, small), strict=True):
        problem.poison()
        assert EmulatorBackend().run(compiled(source(c)), launch).hazards == []
        problem.check(0.125)
        assert not arrays(launch)[-1].any()


class Aborted(Exception):
    pass


def test_counters_survive_an_aborted_launch():
    c = config(warpgroups=2, out_dtype="float32")
    problem = Problem(c, 2, 1, 1500, 8)
    module, workspace = compiled(source(c)), Workspace()
    expected = problem.launch(partition_keys=192, ctas=2, workspace=workspace)
    assert EmulatorBackend().run(module, expected).hazards == []
    first = problem.out.tobytes() + problem.lse.tobytes()
    aborted = problem.launch(partition_keys=192, ctas=2, workspace=workspace)
    counters = arrays(aborted)[-1]

    def progress(_: int) -> None:
        if counters.any():
            raise Aborted

    with pytest.raises(Aborted):
        EmulatorBackend().run(module, aborted, progress=progress)
    left = counters.copy()
    assert left.any()
    # A plain count would be taken for arrivals of the next launch: its merge would start too early.
    problem.poison()
    assert EmulatorBackend(seed=1).run(module, problem.launch(partition_keys=192, ctas=2, workspace=workspace)).hazards == []
    assert problem.out.tobytes() + problem.lse.tobytes() == first
    assert not counters.any()
    # The same launch again without its number rising (a graph replayed) is right as long as none was aborted, and shows where one was.
    again = problem.launch(partition_keys=192, ctas=2, workspace=workspace)
    for _ in range(2):
        problem.poison()
        assert EmulatorBackend().run(module, again).hazards == []
        assert problem.out.tobytes() + problem.lse.tobytes() == first
    counters[:] = left - (left != 0) * np.uint64(1 << 32) + np.uint64(int(again.args[-4]) << 32) * (left != 0)
    problem.poison()
    EmulatorBackend().run(module, again)
    assert problem.out.tobytes() + problem.lse.tobytes() != first


# --- removed safeguards -----------------------------------------------------------------------------------------------

MUTANTS = {
    "P is read before all warps have written it": ("MMAs that read them.\n    ptx_bar_sync(TILE_BARRIER + at.warpgroup, 128);", "MMAs"),
    "scores do not wait for K": (
        "wait(at.full + ring.slot * MBARRIER_BYTES, ring.parity);\n        ptx_wgmma_fence();\n        const unsigned k_tile",
        "ptx_wgmma_fence();\n        const unsigned k_tile",
    ),
    "the producer does not wait for an empty slot": (
        "count as bytes.\n                wait(empty + at.slot * MBARRIER_BYTES, at.parity ^ 1);",
        "count as bytes.",
    ),
    "slots are released while they are read": (
        "ptx_wgmma_wait_group<0>();\n    if (at.lane == 0) release_slot(previous);",
        "if (at.lane == 0) release_slot(previous);\n    ptx_wgmma_wait_group<0>();",
    ),
    "scores are used before they are there": (
        "ptx_wgmma_wait_group<0>();\n    if (at.lane == 0) release_slot(previous);\n}\n\n// O^T",
        "if (at.lane == 0) release_slot(previous);\n}\n\n// O^T",
    ),
    "a handover is overwritten": (
        "writes of this one.\n    ptx_bar_sync(MERGE_BARRIER, WARPGROUPS * 128);",
        "writes of this one.",
    ),
    "a handover is read before it is written": (
        "ptx_bar_sync(MERGE_BARRIER, WARPGROUPS * 128);\n    const float2 first",
        "const float2 first",
    ),
    "O is copied out before it is staged": (
        "copies that read it.\n    ptx_bar_sync(TILE_BARRIER + at.warpgroup, 128);",
        "copies that read it.",
    ),
    "Q is overwritten while it is read": ("wait(smem + Tile::Q_EMPTY_OFFSET + at.slot * MBARRIER_BYTES, at.parity ^ 1);", ""),
    "a partition is announced before it is written": (
        "ptx_bar_sync(share.barrier, share.threads);\n    if (at.warpgroup == 0 && at.warp == 0 && ptx_elect_sync())\n        last[0]",
        "if (at.warpgroup == 0 && at.warp == 0 && ptx_elect_sync())\n        last[0]",
    ),
    "padding rows of Q are left as they are": ("if (unit / 8 % Tile::ROWS >= used_rows)", "if (unit / 8 % Tile::ROWS > Tile::ROWS)"),
}


CLUSTER_MUTANTS = {
    "what others send is read before it is there": ("    wait_cluster(ready, parity);\n", ""),
    "slices count as there before their LSEs": ("(CLUSTER - 1) * (SLICE_BYTES + 32 * 4)", "(CLUSTER - 1) * SLICE_BYTES"),
    "a CTA sends over what another still reads": ("    wait_cluster(at.smem + Tile::READ_OFFSET, parity);\n", ""),
    "what others send lies where Q does": ("return p.cluster > 1 ? 1 : Tile::Q_BUFFERS;", "return Tile::Q_BUFFERS;"),
    "mbarriers of others are used before they are initialised": (
        "if (cluster_merges++ == 0) ptx_barrier_cluster_wait();",
        "if (cluster_merges++ == ~0u) ptx_barrier_cluster_wait();",
    ),
    "a slice is announced before it is written": (
        "ptx_bar_sync(TILE_BARRIER, 128);\n    if (at.warp == 0 && ptx_elect_sync()) last[0]",
        "if (at.warp == 0 && ptx_elect_sync()) last[0]",
    ),
}


@pytest.mark.parametrize("mutant", CLUSTER_MUTANTS)
def test_a_removed_safeguard_of_a_cluster_shows(mutant):
    old, new = CLUSTER_MUTANTS[mutant]
    c = config(128, ring_slots=2)
    assert source(c).count(old) == 1
    modules = [compiled(source(c).replace(old, new)), compiled(source(c))]

    # 2 partitions are a cluster; 17 are 9 of them, which two take in turns, and one CTA has no key.
    runs = [(seed, keys) for seed in range(3) for keys in (120, 1030)]

    def shown(module: Compiled, seed: int, keys: int) -> bool:
        return shows(module, Problem(c, 2, 1, keys, 8), seed, ctas=4, partition_keys=64)

    assert any(shown(modules[0], *run) for run in runs)
    assert not any(shown(modules[1], *run) for run in runs[:2])


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_removed_safeguard_shows(mutant):
    old, new = MUTANTS[mutant]
    # A ring of two slots each, so that it is reused at once.
    c = config(warpgroups=2, ring_slots=4)
    assert old in source(c)
    broken = compiled(source(c).replace(old, new))

    runs = [(seed, partition_keys) for seed in range(2) for partition_keys in (None, 384)]
    assert any(shows(broken, Problem(c, 3, 1, 700, 6), seed, ctas=2, partition_keys=keys) for seed, keys in runs)
    assert not any(shows(compiled(source(c)), Problem(c, 3, 1, 700, 6), seed, ctas=2, partition_keys=keys) for seed, keys in runs)


# --- on the GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("depth", "rows", "warpgroups"), SHAPES)
def test_attention_is_right_on_the_gpu(depth, rows, warpgroups):
    gpu = CudaBackend(repeats=2)
    for mask in ("none", "causal"):
        c = config(depth, rows, warpgroups, mask=mask)
        module = compiled(source(c))
        shapes = [(1, 1, 1, 1, 1), (2, 4, 65, 6, 2), (3, 1, 1000, 8, 1), (1, 32, 700, 2, 2), (1, 3, 2, 48, 1)]
        for batch, q_len, keys, group, kv_heads in shapes:
            for options in ({}, {"ctas": 3}, {"partition_keys": 128}, {"partition_keys": "auto"}):
                problem = Problem(c, batch, q_len, keys, group, kv_heads)
                gpu.run(module, problem.launch(**options))
                problem.check(depth**-0.5)


class OnDevice:
    """A problem whose arrays stay on the device, and a workspace there."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.resident: list[DeviceArray] = []
        self.stands: dict[int, np.ndarray] = {}
        for array in (problem.q, problem.k, problem.v, problem.out, problem.lse):
            self.stands[id(array)] = self.put(array)
        self.workspace = Workspace(self.zeros)

    def put(self, array: np.ndarray) -> np.ndarray:
        device = DeviceArray(array.shape, array.dtype)
        device.store(array)
        self.resident.append(device)
        return device.stand_in

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        device = DeviceArray(shape, dtype)
        device.fill(0)
        self.resident.append(device)
        return device.stand_in

    def launch(self, **options: Any) -> Launch:
        p = self.problem
        q, k, v, out, lse = (self.stands[id(array)] for array in (p.q, p.k, p.v, p.out, p.lse))
        return attention_launch(p.config, geometry(p.config), q, k, v, out, lse, workspace=self.workspace, **options)

    def poison(self) -> None:
        for device in self.resident[3:5]:
            device.fill(0xFF)

    def result(self) -> bytes:
        return b"".join(device.fetch().tobytes() for device in self.resident[3:5])

    def counters(self) -> np.ndarray:
        return next(device for device in self.resident if device.stand_in.dtype == np.uint64).fetch()


FIXED = [(512, 1), (256, 2), (512, 2), (128, 1)]


@pytest.mark.gpu
@pytest.mark.parametrize(("depth", "warpgroups"), FIXED)
def test_a_thousand_launches_give_the_same_bits(depth, warpgroups):
    gpu = CudaBackend()
    c = config(depth, None, warpgroups, split="fixed 256")
    for q_len in (1, 4):
        device = OnDevice(Problem(c, 2, q_len, 3000, 8, 2))
        prepared = [gpu.prepare(compiled(source(c)), device.launch(ctas=ctas), device.resident) for ctas in (132, 7)]
        results = set()
        for turn in range(1000):
            device.poison()
            prepared[turn % 2].enqueue()
            results.add(hash(device.result()))
            assert not device.counters().any()
        assert len(results) == 1


@pytest.mark.gpu
@pytest.mark.parametrize(("depth", "warpgroups"), FIXED)
def test_a_sequence_gives_the_same_bits_in_any_batch(depth, warpgroups):
    gpu = CudaBackend()
    c = config(depth, None, warpgroups, out_dtype="float32", split="fixed 512")
    module = compiled(source(c))
    for q_len, keys in ((1, 2100), (4, 1000)):
        many = Problem(c, 64, q_len, keys, 8, 1)
        gpu.run(module, many.launch())
        for batch in (1, 7):
            few = Problem(c, batch, q_len, keys, 8, 1)
            few.q, few.k, few.v = (array[5 : 5 + batch].copy() for array in (many.q, many.k, many.v))
            gpu.run(module, few.launch())
            assert few.out.tobytes() == many.out[5 : 5 + batch].tobytes()
            assert few.lse.tobytes() == many.lse[5 : 5 + batch].tobytes()


@pytest.mark.gpu
def test_streams_with_a_workspace_each_do_not_disturb_each_other():
    from cuda.bindings import driver

    gpu = CudaBackend()
    c = config(512, None, 1)
    module = compiled(source(c))
    devices = [OnDevice(Problem(c, 1, 1, 3000, 8, 2, seed=seed)) for seed in range(4)]
    streams = [driver.cuStreamCreate(1)[1] for _ in devices]
    prepared = [gpu.prepare(module, device.launch(partition_keys=192, ctas=32), device.resident) for device in devices]
    expected = []
    for device, launch in zip(devices, prepared, strict=True):
        launch.enqueue()
        expected.append(device.result())
    for _ in range(30):
        for device in devices:
            device.poison()
        assert int(driver.cuCtxSynchronize()[0]) == 0
        for _ in range(5):
            for launch, stream in zip(prepared, streams, strict=True):
                launch.enqueue(stream)
        assert int(driver.cuCtxSynchronize()[0]) == 0
        assert [device.result() for device in devices] == expected
        assert not any(device.counters().any() for device in devices)


@pytest.mark.gpu
def test_what_an_aborted_launch_leaves_does_not_count_on_the_gpu():
    gpu = CudaBackend()
    c = config(256, None, 2, split="fixed 128")
    device = OnDevice(Problem(c, 3, 1, 1000, 8, 2))
    module = compiled(source(c))
    gpu.prepare(module, device.launch(), device.resident).enqueue()
    first = device.result()
    counters = next(d for d in device.resident if d.stand_in.dtype == np.uint64)
    left = np.random.default_rng(0).integers(0, 8, counters.stand_in.shape).astype(np.uint64) + np.uint64(device.workspace.number << 32)
    counters.store(left)
    device.poison()
    gpu.prepare(module, device.launch(), device.resident).enqueue()
    assert device.result() == first
    assert not device.counters().any()


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_a_launch_of_more_items_than_kernels_count_is_refused(arch):
    """As the launcher for C does; nothing is read of the arrays, which have no memory behind them."""

    def vast(*shape: int, dtype: Any = np.float16) -> np.ndarray:
        strides = [int(np.prod(shape[axis + 1 :], dtype=np.int64)) * np.dtype(dtype).itemsize for axis in range(len(shape))]
        return np.lib.stride_tricks.as_strided(np.zeros(1, dtype), shape, strides)

    c = parse_config({"name": "vast", "ov_depth": 64, "shared_key": True, "dtype": "float16", "out_dtype": "float16", "arch": [arch]})
    geo = derive(c, arch)
    for batch, keys, partition_keys in ((1 << 31, 1, None), (1 << 29, 4 * geo.block_keys, geo.block_keys)):
        q, k = vast(batch, 1, 1, 64), vast(batch, keys, 1, 64)
        with pytest.raises(
            ValueError, match=r"^batch, kv_heads and q_len make 2,147,483,648 partitions of query tiles; at most 2,147,483,647 are"
        ):
            attention_launch(c, geo, q, k, k, q, vast(batch, 1, 1, dtype=np.float32), partition_keys=partition_keys)
