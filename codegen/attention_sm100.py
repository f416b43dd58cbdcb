"""Launching the sm_100a attention kernel: tensor maps, arguments and grid for arrays on the host; what the manifest says of the entry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from .attention import (
    Extents,
    Workspace,
    feature_arguments,
    feature_values,
    key_map,
    problem_arguments,
    query_map,
    read_keys,
    require_items,
    tiling,
)
from .backends import Launch
from .config import Config
from .emulator import Uninitialized
from .geometry import SUB_TILE_DEPTH, Geometry, symbol
from .geometry_sm100 import SWIZZLE_BYTES, Sm100Geometry
from .memory_names import attention_regions

if TYPE_CHECKING:
    from .backends import Argument

B200_SMS = 148


def auto_partition_tiles(key_tiles: int, query_tiles: int, ctas: int, warpgroups: int) -> int:
    """Key tiles of a partition, such that `ctas` CTAs have work where there are keys for them.

    A partition has a tile for each warpgroup at least: one tile keeps a warpgroup idle, and costs a merge all the same.
    """
    partitions = max(1, min(ctas // query_tiles, key_tiles // warpgroups))
    return -(-key_tiles // partitions)


def attention_entry_info(config: Config, geo: Geometry) -> dict[str, Any]:
    """Name, block, grid rule, dynamic shared memory in bytes, and the arguments in order (name, C type, meaning) of the full kernel."""
    geo = _sm100(geo)
    query = f"{'[1][kv_heads][total_q]' if config.ragged_queries else '[batch][kv_heads][q_len]'}[group][{geo.depth}], box 1 x 1 x"
    pages, keys = ("pages", "page keys") if config.kv_layout == "paged" else ("batch", "keys")
    key = f"[{pages}][kv_heads][{geo.depth // SUB_TILE_DEPTH}][{keys}][{SUB_TILE_DEPTH}], box 1 x 1 x"
    positions = "1" if geo.stores_positions else "positions"
    swizzle, key_swizzle = (f"{width}-byte swizzle" for width in (SWIZZLE_BYTES, geo.copy_row_bytes))
    kv_dtype = config.kv_dtype or config.dtype
    out_swizzle = swizzle if geo.out_swizzle else "no swizzle"
    arguments = [
        ("q_map", "CUtensorMap", f"Q {config.dtype} {query} positions x heads x {SUB_TILE_DEPTH}, {swizzle}, zero fill"),
        ("k_map", "CUtensorMap", f"K {kv_dtype} {key} 1 x {geo.k_box_keys} x {SUB_TILE_DEPTH}, {key_swizzle}, zero fill"),
        (
            "v_map",
            "CUtensorMap",
            f"V {kv_dtype} {key} {geo.v_box_chunks} x {geo.v_box_keys} x {SUB_TILE_DEPTH}, {key_swizzle}, zero fill",
        ),
        ("out_map", "CUtensorMap", f"O {config.out_dtype} {query} {positions} x heads x {geo.out_chunk_cols}, {out_swizzle}"),
        *problem_arguments(config, geo),
        ("partitions", "unsigned", "partitions that cover the keys; 1 needs no workspace"),
        ("launch", "unsigned", "rises with every launch that uses the workspace; a launch repeated as it is may keep it"),
        ("partial_o", "float*", f"workspace, [query tiles][partitions][{geo.depth // 4}][{geo.rows}][4] float32: O of each partition"),
        ("partial_lse", "float*", f"workspace, [query tiles][partitions][{geo.rows}] float32: log2 of the LSE of each partition"),
        ("arrived", "unsigned long long*", "workspace, [query tiles] uint64: 0 at first, and again after a launch"),
        *feature_arguments(config),
    ]
    return {
        "name": symbol(config, geo.arch),
        "block": [geo.threads, 1, 1],
        "grid": [
            "query tiles * partitions CTAs: "
            f"query tiles = batch * kv_heads * ceil(q_len / positions) * ceil(group / {geo.tile_rows}), "
            f"positions = {geo.tile_rows} / min(group, {geo.tile_rows})",
            1,
            1,
        ],
        "smem_bytes": geo.smem_bytes,
        "arguments": [{"name": name, "type": kind, "meaning": meaning} for name, kind, meaning in arguments],
    }


def attention_launch(
    config: Config,
    geo: Geometry,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    extents: Extents,
    scale: float,
    given: Mapping[str, np.ndarray | None],
    *,
    ctas: int,
    partition_keys: int | Literal["auto"] | None,
    workspace: Workspace | None,
) -> Launch:
    """The launch that fills `out` and `lse`: one CTA for each partition of the keys of each query tile.

    As attention.attention_launch describes them: arrays that it has checked, their extents, the softmax scale, and the features' arrays by
    argument name. ctas: CTAs that run at once, which "auto" fills. partition_keys: a multiple of the key tile, "auto", or None: all keys in
    one partition.
    Raises ValueError where partition_keys does not fit, or makes too many partitions.
    """
    geo = _sm100(geo)
    batch, q_len, keys, kv_heads, group = extents
    tiles = tiling(geo.tile_rows, q_len, group)
    items = batch * kv_heads * tiles.q_tiles
    key_tiles = -(-read_keys(keys, k, given) // geo.block_keys)
    if partition_keys is None:
        partition_tiles = key_tiles
    elif partition_keys == "auto":
        partition_tiles = auto_partition_tiles(key_tiles, items, ctas, geo.warpgroups)
    elif partition_keys > 0 and partition_keys % geo.block_keys == 0:
        partition_tiles = partition_keys // geo.block_keys
    else:
        raise ValueError(f"a partition of {partition_keys} keys is not a positive multiple of {geo.block_keys}")
    partitions = -(-key_tiles // partition_tiles)
    require_items(items * partitions)
    parts = items * partitions if partitions > 1 else 1
    number, partial_o, partial_lse, arrived = (workspace or Workspace()).next_launch(parts * geo.rows * geo.depth, parts * geo.rows, items)
    args: tuple[Argument, ...] = (
        query_map(q, kv_heads, tiles, SUB_TILE_DEPTH, SWIZZLE_BYTES),
        key_map(k, 1, geo.k_box_keys, SUB_TILE_DEPTH),
        key_map(v, geo.v_box_chunks, geo.v_box_keys, SUB_TILE_DEPTH),
        # A tile's last positions may belong to the next sequence: they are stored one by one.
        query_map(out, kv_heads, replace(tiles, positions=1) if geo.stores_positions else tiles, geo.out_chunk_cols, geo.out_swizzle),
        Uninitialized(lse),
        *(np.uint32(n) for n in (batch, q_len, keys, kv_heads, group)),
        np.float32(scale),
        np.uint32(partition_tiles),
        np.uint32(partitions),
        number,
        Uninitialized(partial_o),
        Uninitialized(partial_lse),
        arrived,
        *feature_values(config, given, q),
    )
    grid, regions = (items * partitions, 1, 1), attention_regions(geo)
    return Launch(symbol(config, geo.arch), grid, (geo.threads, 1, 1), geo.smem_bytes, args, regions=regions)


def _sm100(geo: Geometry) -> Sm100Geometry:
    if not isinstance(geo, Sm100Geometry):
        raise ValueError(f"this is the sm_100a kernel; the geometry is for {geo.arch}")
    return geo
