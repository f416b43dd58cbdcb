"""What the sm_100a attention kernels load and multiply: the live key tiles and key chunks, counted, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from test_attention_sm100 import Problem, geometry, module, variant

from fa4gen.codegen import compiler
from fa4gen.codegen.emulator import Memory, Program
from fa4gen.codegen.geometry_sm100 import MMA_K, SWIZZLE_BYTES, Sm100Geometry

pytestmark = pytest.mark.skipif(compiler.nvrtc_version() is None, reason="NVRTC is not installed")


def expected(geo: Sm100Geometry, seen: list[int], used_rows: int, partition_tiles: int | None) -> tuple[int, int, int]:
    """Bytes that copies bring, bytes that MMAs read from shared memory, bytes of O stored; seen: keys of each query tile."""
    loaded = operands = 0
    for keys in seen:
        tiles = -(-keys // geo.block_keys)
        partitions = 1 if partition_tiles is None else -(-tiles // partition_tiles)
        loaded += (partitions if tiles else 0) * geo.qk_stages * used_rows * SWIZZLE_BYTES  # Q, for each partition
        for tile in range(tiles):
            left = keys - tile * geo.block_keys
            chunks = min(-(-left // geo.pv_key_chunk), geo.pv_chunks)
            slots = geo.qk_stages + chunks * geo.o_tiles
            loaded += slots * geo.slot_bytes
            operands += geo.depth // MMA_K * (geo.rows + geo.block_keys) * 2 * MMA_K
            a_rows = geo.rows if geo.shared_key else 0  # P in tensor memory otherwise
            operands += chunks * geo.o_tiles * geo.pv_steps * (a_rows + geo.pv_mma_n) * 2 * MMA_K
    return loaded, operands, len(seen) * geo.qk_stages * used_rows * SWIZZLE_BYTES


@pytest.mark.parametrize(
    ("name", "mask", "partition_keys"),
    [("d128_m2", "causal", None), ("d256", "causal", 256), ("d256", "none", None), ("d512", "causal", None)],
)
def test_dead_tiles_and_chunks_are_neither_loaded_nor_multiplied(name: str, mask: str, partition_keys: int | None) -> None:
    config = variant(name, mask=mask)
    geo = geometry(config)
    group, q_len, keys = geo.rows // 4, 12, 262  # three query tiles of 4 positions: 254, 258 and 262 keys, or all
    problem = Problem(config, keys=keys, q_len=q_len, group=group)
    launch = problem.launch(partition_keys=partition_keys)
    result = Program.from_ptx(module(config).ptx).launch(
        launch.entry, launch.grid, launch.block, launch.smem_bytes, launch.args, memory=Memory(), profile=True
    )
    assert result.hazards == []
    assert problem.right(config.ov_depth**-0.5)
    seen = [254, 258, 262] if mask == "causal" else [keys] * 3
    loaded, operands, stored = expected(geo, seen, 32 if geo.rows == 32 else 64, 1 if partition_keys else None)
    assert result.profile is not None
    engines = {engine: traffic.bytes for engine, traffic in result.profile.traffic.items()}
    assert engines["tensor copy load"] == loaded
    assert engines["tcgen05 operand"] == operands
    assert engines["tensor copy store"] == stored


def test_a_query_tile_without_keys_loads_nothing() -> None:
    config = variant("d256", mask="causal")
    problem = Problem(config, keys=3, q_len=8, group=8)  # 8 positions: the first tile of 4 sees no key, the second up to 3
    launch = problem.launch()
    result = Program.from_ptx(module(config).ptx).launch(
        launch.entry, launch.grid, launch.block, launch.smem_bytes, launch.args, memory=Memory(), profile=True
    )
    assert result.hazards == []
    assert problem.right(config.ov_depth**-0.5)
    assert not np.isfinite(problem.lse[0, :, :5]).any()
    geo = geometry(config)
    assert result.profile is not None
    engines = {engine: traffic.bytes for engine, traffic in result.profile.traffic.items()}
    assert engines["tensor copy load"] == expected(geo, [0, 3], 32, None)[0]
