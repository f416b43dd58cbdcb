"""Derived numbers: the reference table of sm_100a, invariants of the maps over every legal config, and names."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator

import pytest

from fa4gen.codegen.config import ARCHES, Config, ConfigError, disabled_rules, load_shipped, parse_config, shipped_configs
from fa4gen.codegen.emulator.regions import Regions, add_regions
from fa4gen.codegen.geometry import SMEM_LIMIT_BYTES, Geometry, Region, derive, functions, symbol
from fa4gen.codegen.geometry_sm90 import Sm90Fp8Geometry, Sm90Geometry
from fa4gen.codegen.geometry_sm100 import Sm100Fp8Geometry, Sm100Geometry
from fa4gen.codegen.memory_names import attention_regions, unit_regions
from fa4gen.codegen.units import unit_entry_info

# BN, qk stages, ring slots, TMEM columns, SMEM bytes without the TMEM address, mbarriers, O tiles: the reference kernels' figures.
REFERENCE = {
    "d512": (256, 8, 4, 384, 199_840, 20, 2),
    "d256": (256, 4, 5, 256, 216_240, 22, 1),
    "d128": (256, 2, 6, 384, 206_016, 24, 2),
    "d128_m2": (256, 2, 6, 512, 214_208, 24, 1),
}


def sm100(config: Config) -> Sm100Geometry:
    geo = derive(config, "sm_100a")
    assert isinstance(geo, Sm100Geometry)
    return geo


@pytest.mark.parametrize("name", REFERENCE)
def test_reference_table(name: str) -> None:
    geo = sm100(load_shipped(name))
    block_keys, qk_stages, ring_slots, tmem_columns, smem_bytes, mbarriers, o_tiles = REFERENCE[name]
    assert (geo.block_keys, geo.qk_stages, geo.ring_slots) == (block_keys, qk_stages, ring_slots)
    assert (geo.tmem_columns, geo.o_tiles) == (tmem_columns, o_tiles)
    assert geo.tmem_columns_allocated == {384: 512, 256: 256, 512: 512}[tmem_columns]
    assert smem_bytes <= geo.smem_bytes <= smem_bytes + 16
    assert geo.mbarriers <= mbarriers
    assert geo.slot_bytes == 32 * 1024


def test_key_chunks_of_the_three_layouts() -> None:
    # Shared-key chunks 64 keys x 256 depth; layout G a quarter's keys at once; layout E by K stage.
    assert {name: sm100(load_shipped(name)).pv_key_chunk for name in REFERENCE} == {"d512": 64, "d256": 64, "d128": 64, "d128_m2": 64}
    assert sm100(load_shipped("d64")).pv_key_chunk == 64
    assert (
        sm100(parse_config({"name": "c", "ov_depth": 64, "shared_key": False, "m_pack": 2, "rows": 64, "arch": ["sm_100a"]})).pv_key_chunk
        == 128
    )


def test_one_warpgroup_halves_the_accumulators() -> None:
    two = sm100(load_shipped("d512"))
    one = sm100(parse_config({"name": "c", "ov_depth": 512, "shared_key": True, "warpgroups": 1, "arch": ["sm_100a"]}))
    assert (one.tmem_columns, two.tmem_columns) == (192, 384)
    assert [region.name for region in one.tmem_map] == ["S0", "O0"]
    assert [(region.name, region.offset) for region in two.tmem_map] == [("S0", 0), ("S1", 64), ("O0", 128), ("O1", 256)]
    # What two warpgroups cannot hold, one can: a depth of 512 in two halves.
    fields = {"name": "c", "ov_depth": 512, "shared_key": True, "m_pack": 2, "rows": 64, "arch": ["sm_100a"]}
    with pytest.raises(ConfigError, match="tmem-columns"):
        parse_config(fields)
    assert sm100(parse_config(fields | {"warpgroups": 1})).tmem_columns == 384


def rule_of(fields: dict[str, object]) -> str | None:
    """The rule that refuses a config, None if it is legal."""
    try:
        parse_config(fields)
    except ConfigError as error:
        return error.rule
    return None


def every_config() -> Iterator[Config]:
    """Every combination of the fields that shape a kernel which is legal on sm_100a."""
    product = itertools.product(
        ((4, 32), (2, 64)), (64, 128, 256, 512), (True, False), (None, 1), (None, 64, 128, 256), ("bfloat16", "float32"), (None, 2, 3, 5)
    )
    for (m_pack, rows), depth, shared_key, warpgroups, block_keys, out_dtype, slots in product:
        fields = {
            "name": "c",
            "m_pack": m_pack,
            "rows": rows,
            "ov_depth": depth,
            "shared_key": shared_key,
            "warpgroups": warpgroups,
            "block_keys": block_keys,
            "out_dtype": out_dtype,
            "ring_slots": slots,
            "arch": ["sm_100a"],
        }
        with contextlib.suppress(ConfigError):
            yield parse_config(fields)


def overlap(regions: tuple[Region, ...]) -> bool:
    spans = sorted((region.offset, region.end) for region in regions)
    return any(end > start for (_, end), (start, _) in itertools.pairwise(spans))


def test_maps_of_every_legal_config() -> None:
    count = 0
    for config in every_config():
        count += 1
        geo = sm100(config)
        smem = {region.name: region for region in geo.smem_map}
        assert not overlap(geo.smem_map)
        assert not overlap(geo.tmem_map)
        assert geo.smem_map[-1].end <= geo.smem_bytes <= 232_448
        assert geo.tmem_map[-1].end == geo.tmem_columns <= geo.tmem_columns_allocated <= 512
        assert geo.tmem_columns_allocated in (32, 64, 128, 256, 512)
        for name, region in smem.items():
            if name in ("q", "ring", "p"):
                assert region.offset % 1024 == 0, name  # swizzle atoms
            if name.startswith("mbar"):
                assert region.offset % 8 == 0, name
            if name not in ("q", "ring", "p"):
                # Survives the loop, so it may not lie where the epilogue stages.
                assert region.offset >= geo.arena_bytes
        assert sum(region.size for name, region in smem.items() if name.startswith("mbar")) == 8 * geo.mbarriers
        assert ("exchange" in smem) == ("p" in smem) == config.shared_key
        assert geo.o_tiles * geo.band_cols >= geo.o_phys_cols > (geo.o_tiles - 1) * geo.band_cols
        assert geo.ring_slots >= geo.ring_floor >= 1
        assert geo.v_slots == geo.qk_stages
        assert geo.pv_key_chunk * geo.pv_mma_n * 2 == geo.slot_bytes
    assert count > 50


@pytest.mark.parametrize(("name", "arch"), [(name, arch) for name in shipped_configs() for arch in load_shipped(name).arch])
def test_derived_ring_is_the_largest_legal_one(name: str, arch: str) -> None:
    config = load_shipped(name)
    geo = derive(config, arch)
    fields = config.model_dump() | {"arch": [arch]}
    rings = geo.warpgroups if config.shared_key else geo.m_pack
    step = rings if arch == "sm_90a" else 1
    given = derive(parse_config(fields | {"ring_slots": geo.ring_slots}), arch)
    assert given == geo
    if isinstance(geo, Sm100Fp8Geometry):
        # The copies' ring has what is left: another slot with its two mbarriers would not fit.
        assert geo.smem_bytes + geo.copy_slot_bytes + 16 > SMEM_LIMIT_BYTES
        return
    if isinstance(geo, Sm90Fp8Geometry) and geo.ring_slots * geo.slot_bytes >= 65_536 and geo.slots_per_ring >= 2 * geo.tile_slots:
        # More than that are legal, and slower.
        assert (geo.ring_slots - step) * geo.slot_bytes < 65_536 or geo.slots_per_ring == 2 * geo.tile_slots
        return
    if isinstance(geo, Sm90Geometry):
        # Otherwise a larger ring takes the SM for itself.
        fields |= {"ctas_per_sm": geo.ctas_per_sm}
    with pytest.raises(ConfigError) as caught:
        parse_config(fields | {"ring_slots": geo.ring_slots + step})
    assert caught.value.rule == "smem-bytes"
    assert f"{geo.ring_slots}" in caught.value.remedy


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("equal-depths", {"ov_depth": 128, "qk_depth": 64}),
        ("key-split-depth", {"ov_depth": 512, "shared_key": False, "warpgroups": 1}),
        ("tmem-columns", {"m_pack": 2, "rows": 64}),
        ("smem-bytes", {"ring_slots": 5}),
        ("ring-floor", {"ov_depth": 128, "shared_key": False, "ring_slots": 1}),
        ("epilogue-arena", {"ring_slots": 1}),
        ("key-chunk-steps", {"ov_depth": 128, "shared_key": False, "block_keys": 64}),
        ("block-keys", {"block_keys": 192}),
    ],
)
def test_a_rule_refuses_what_no_other_does(rule: str, changes: dict[str, object]) -> None:
    """With the rule off the same config is accepted or meets a later rule, so it is this rule that acts."""
    fields = {"name": "c", "ov_depth": 512, "shared_key": True, "arch": ["sm_100a"]} | changes
    assert rule_of(fields) == rule
    with disabled_rules(rule):
        assert rule_of(fields) != rule


def test_a_depth_of_three_stages_does_not_divide_the_keys() -> None:
    fields = {"name": "c", "ov_depth": 128, "qk_depth": 192, "shared_key": False, "m_pack": 2, "rows": 64, "arch": ["sm_100a"]}
    with disabled_rules("equal-depths"):
        assert rule_of(fields) == "key-chunk-divides"


def test_unequal_depths_break_the_ring_walk() -> None:
    fields = {"name": "c", "ov_depth": 128, "qk_depth": 64, "shared_key": True, "arch": ["sm_100a"]}
    with disabled_rules("equal-depths"), pytest.raises(ConfigError, match=r"\[ring-walk\]"):
        parse_config(fields)
    fields |= {"shared_key": False, "m_pack": 2, "rows": 64}
    with disabled_rules("equal-depths", "ring-walk"), pytest.raises(ConfigError, match=r"\[sub-tile-bytes\]"):
        parse_config(fields)


@pytest.mark.parametrize("name", [name for name in shipped_configs() if load_shipped(name).arch == ARCHES])
def test_common_fields_agree_between_targets(name: str) -> None:
    config = load_shipped(name)
    ours, theirs = derive(config, "sm_90a"), derive(config, "sm_100a")
    tile_maps = {
        "arch",
        "warpgroups",
        "block_keys",
        "ring_slots",
        "slot_bytes",
        "smem_bytes",
        "mbarriers",
        "tmem_columns",
        "tmem_columns_allocated",
    }
    for field in dataclasses.fields(Geometry):
        if field.name not in tile_maps:
            assert getattr(ours, field.name) == getattr(theirs, field.name), field.name
    assert ours.tmem_columns == 0
    assert ours.smem_bytes <= 232_448
    assert not overlap(ours.smem_map)  # type: ignore[attr-defined]


def test_functions_of_the_modes() -> None:
    assert functions(load_shipped("d512")) == ("exchange4", "level0")
    assert functions(load_shipped("d128")) == ("combine",)


def test_a_target_the_config_does_not_list() -> None:
    config = parse_config({"name": "c", "ov_depth": 512, "shared_key": True, "arch": ["sm_100a"]})
    with pytest.raises(ConfigError, match=r"\[arch-enabled\]"):
        derive(config, "sm_90a")


def test_symbols() -> None:
    assert symbol(load_shipped("d512"), "sm_100a") == "fa4_attention_d512_m4r32_sk_bf16_sm100a"
    assert symbol(load_shipped("d128_nofma"), "sm_90a") == "fa4_attention_d128_m4r32_ks_bf16_nofma_sm90a"
    base = {"name": "c", "ov_depth": 512, "shared_key": True}
    changes = [
        {},
        {"ov_depth": 256},
        {"use_fma": False},
        {"dtype": "float16"},
        {"out_dtype": "float32"},
        {"out_dtype": "float16"},
        {"mask": "causal"},
        {"warpgroups": 1},
        {"tile_rows": 8},
        {"group": 8},
        {"ring_slots": 4},
    ]
    names = [symbol(parse_config(base | {"arch": ["sm_100a"]} | change), "sm_100a") for change in changes]
    assert len(set(names)) == len(names)
    assert all(name.isidentifier() for name in names)


@pytest.mark.parametrize("name", shipped_configs())
def test_regions_name_all_of_the_kernels_shared_memory(name):
    """As the memory map has them: the emulator refuses regions that do not fit, and names each address by one of them."""
    config = load_shipped(name)
    for arch in config.arch:
        geo = derive(config, arch)
        regions = Regions()
        add_regions(regions, attention_regions(geo), 0, geo.smem_bytes)
        for region in geo.smem_map:
            assert regions.name(region.offset).startswith(region.name)
            assert regions.name(region.end - 1).startswith(region.name)
        if config.shared_key:
            start = next(region.offset for region in geo.smem_map if region.name == "exchange")
            assert regions.name(start + 4 * (128 + 17)) == "exchange[0][1][17]"
        for entry, info in unit_entry_info(config, geo).items():
            add_regions(Regions(), unit_regions(geo, entry, info["smem_bytes"]), 0, max(1, info["smem_bytes"]))
