"""sm_100a: accumulators in tensor memory, tcgen05.mma.ws, one ring of K and V sub-tiles in shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from .config import WARPGROUP_THREADS, Config, require
from .geometry import (
    F32_BYTES,
    MAX_MMA_N,
    MBARRIER_BYTES,
    MIN_TMEM_ALLOCATION,
    OPERAND_BYTES,
    SMEM_LIMIT_BYTES,
    SUB_TILE_DEPTH,
    Geometry,
    Region,
    common,
    place,
)

TMEM_COLUMNS = 512
BLOCK_KEYS_CHOICES = (64, 128, 256)
P_STAGES = 2
MMA_K = 16
TMEM_ADDRESS_BYTES = 4
SMEM_ALIGN_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class Sm100Geometry(Geometry):
    """What sm_100a adds.

    s_cols: TMEM columns of one S accumulator (block_keys / m_pack)
    pv_key_chunk: keys of one P.V MMA; pv_stages: parts in which P is handed over
    v_slots: ring positions of a V tile; ring_floor: slots below which the schedule hangs or the epilogue has no room
    arena_bytes: epilogue staging, in the dead Q and ring span
    tmem_map: S and O of each warpgroup, offsets and sizes in columns
    smem_map: offsets and sizes in bytes; what must survive the key loop comes after the ring
    """

    s_cols: int
    pv_key_chunk: int
    pv_stages: int
    v_slots: int
    ring_floor: int
    arena_bytes: int
    q_bytes: int
    p_bytes: int
    correction_bytes: int
    tmem_map: tuple[Region, ...]
    smem_map: tuple[Region, ...]


def _align_down(value: int, step: int) -> int:
    return value // step * step


def derive_sm100(config: Config) -> Sm100Geometry:
    """The sm_100a geometry. Raises ConfigError naming the rule that the config breaks."""
    shape = common(config)
    m_pack, rows, depth, warpgroups = shape["m_pack"], shape["rows"], shape["depth"], shape["warpgroups"]
    qk_stages, pv_mma_n, o_tiles, o_phys_cols = shape["qk_stages"], shape["pv_mma_n"], shape["o_tiles"], shape["o_phys_cols"]

    # The key tile: S takes what O leaves of each warpgroup's share of the columns.
    column_share = TMEM_COLUMNS // warpgroups
    widest = min(MAX_MMA_N, _align_down((column_share - o_phys_cols) * m_pack, 16))
    legal = [choice for choice in BLOCK_KEYS_CHOICES if choice <= widest]
    block_keys = config.block_keys or (legal[-1] if legal else BLOCK_KEYS_CHOICES[0])
    require(block_keys in BLOCK_KEYS_CHOICES, "block-keys", "block_keys", block_keys, "use 64, 128 or 256, or leave it out")
    s_cols = block_keys // m_pack

    tmem_map = place([(f"S{w}", s_cols) for w in range(warpgroups)] + [(f"O{w}", o_phys_cols) for w in range(warpgroups)])
    tmem_columns = tmem_map[-1].end
    tmem_key, tmem_value, remedy = "ov_depth", depth, "use a smaller ov_depth, a larger m_pack, or warpgroups: 1"
    if config.block_keys and legal:
        tmem_key, tmem_value, remedy = "block_keys", block_keys, f"use at most {legal[-1]}"
    detail = f"{warpgroups} x ({s_cols} + {o_phys_cols}) = {tmem_columns}"
    require(tmem_columns <= TMEM_COLUMNS, "tmem-columns", tmem_key, tmem_value, remedy, detail)
    allocated = max(MIN_TMEM_ALLOCATION, 1 << (tmem_columns - 1).bit_length())

    # The keys of one P.V MMA, and the V sub-tile that holds them.
    slot_bytes = block_keys * SUB_TILE_DEPTH * OPERAND_BYTES
    keys_per_part = block_keys if config.shared_key else s_cols
    if config.shared_key:
        pv_key_chunk = block_keys * SUB_TILE_DEPTH // pv_mma_n
    elif m_pack == 4:
        pv_key_chunk = keys_per_part
    else:
        pv_key_chunk = keys_per_part // qk_stages
    detail = f"{keys_per_part} keys in chunks of {pv_key_chunk}"
    remedy = "use a larger block_keys"
    divides = pv_key_chunk > 0 and keys_per_part % pv_key_chunk == 0
    require(divides, "key-chunk-divides", "block_keys", block_keys, remedy, detail)
    require(pv_key_chunk % (MMA_K * P_STAGES) == 0, "key-chunk-steps", "block_keys", block_keys, remedy, detail)
    v_slots = o_tiles * (keys_per_part // pv_key_chunk)
    require(
        v_slots == qk_stages,
        "ring-walk",
        "qk_depth",
        config.qk_depth or depth,
        "make qk_depth and ov_depth equal",
        f"a V tile takes {v_slots} slots, a K tile {qk_stages}",
    )
    v_sub_tile_bytes = pv_key_chunk * pv_mma_n * OPERAND_BYTES
    require(
        v_sub_tile_bytes == slot_bytes,
        "sub-tile-bytes",
        "block_keys",
        block_keys,
        "use 256, or leave it out",
        f"V {v_sub_tile_bytes:,}, K {slot_bytes:,} bytes",
    )

    # Shared memory: Q and ring die with the key loop; P, exchange, correction, mbarriers and the TMEM address outlive it.
    q_bytes = rows * depth * OPERAND_BYTES
    p_bytes = warpgroups * rows * block_keys * OPERAND_BYTES if config.shared_key else 0
    exchange_bytes = shape["exchange_bytes"] // 2 * warpgroups if config.shared_key else 0
    correction_bytes = warpgroups * WARPGROUP_THREADS * F32_BYTES

    def fixed_barriers() -> list[tuple[str, int]]:
        return [
            ("mbar_s_full", warpgroups * MBARRIER_BYTES),
            ("mbar_p_ready", warpgroups * P_STAGES * MBARRIER_BYTES),
            ("mbar_correction", warpgroups * 2 * MBARRIER_BYTES),
            ("mbar_o_full", warpgroups * MBARRIER_BYTES),
        ]

    def smem_map_for(slots: int) -> tuple[Region, ...]:
        return place(
            [
                ("q", q_bytes),
                ("ring", slots * slot_bytes),
                ("p", p_bytes),
                ("exchange", exchange_bytes),
                ("correction", correction_bytes),
                ("mbar_ring_full", slots * MBARRIER_BYTES),
                ("mbar_ring_empty", slots * MBARRIER_BYTES),
                *fixed_barriers(),
                ("tmem_address", TMEM_ADDRESS_BYTES),
            ]
        )

    def smem_bytes_for(slots: int) -> int:
        return -(-smem_map_for(slots)[-1].end // SMEM_ALIGN_BYTES) * SMEM_ALIGN_BYTES

    # Epilogue: key-split stages every O_g and (m, l); two warpgroups hand one band and its (m, l) over; then the output tile.
    staging = 0 if config.shared_key else shape["combine_stage_bytes"] + shape["combine_ml_bytes"]
    handover = (depth * rows + 2 * rows) * F32_BYTES if warpgroups == 2 else 0
    arena_bytes = warpgroups * staging + handover + rows * depth * shape["out_bytes"]
    arena_slots = max(0, -(-(arena_bytes - q_bytes) // slot_bytes))
    # Key-split holds a whole V tile at once; shared-key releases each V slot as its MMA is issued.
    schedule_floor = max(2, 1 if config.shared_key else v_slots)

    fixed_bytes = smem_bytes_for(1) - slot_bytes - 2 * MBARRIER_BYTES
    most_slots = max(0, (SMEM_LIMIT_BYTES - fixed_bytes) // (slot_bytes + 2 * MBARRIER_BYTES))
    while most_slots > 0 and smem_bytes_for(most_slots) > SMEM_LIMIT_BYTES:
        most_slots -= 1
    ring_slots = config.ring_slots or max(1, most_slots)
    slots_key, slots_value = ("ring_slots", ring_slots) if config.ring_slots else ("block_keys", block_keys)
    slots_remedy = f"use at most {most_slots} slots" if config.ring_slots and most_slots else "use a smaller block_keys, or one warpgroup"
    smem_bytes = smem_bytes_for(ring_slots)
    require(smem_bytes <= SMEM_LIMIT_BYTES, "smem-bytes", slots_key, slots_value, slots_remedy, f"{ring_slots} slots need {smem_bytes:,}")
    fits = schedule_floor <= most_slots
    floor_remedy = f"use {schedule_floor} to {most_slots} slots" if fits else "use a smaller block_keys"
    require(ring_slots >= schedule_floor, "ring-floor", slots_key, slots_value, floor_remedy, f"{ring_slots} of at least {schedule_floor}")
    fits = arena_slots <= most_slots
    arena_remedy = f"use {arena_slots} to {most_slots} slots" if fits else "use a narrower out_dtype, or one warpgroup"
    require(
        arena_bytes <= q_bytes + ring_slots * slot_bytes,
        "epilogue-arena",
        slots_key,
        slots_value,
        arena_remedy,
        f"{arena_bytes:,} bytes of staging, {q_bytes + ring_slots * slot_bytes:,} of Q and ring",
    )

    return Sm100Geometry(
        arch="sm_100a",
        **shape,
        block_keys=block_keys,
        ring_slots=ring_slots,
        slot_bytes=slot_bytes,
        smem_bytes=smem_bytes,
        mbarriers=2 * ring_slots + sum(size for _, size in fixed_barriers()) // MBARRIER_BYTES,
        tmem_columns=tmem_columns,
        tmem_columns_allocated=allocated,
        s_cols=s_cols,
        pv_key_chunk=pv_key_chunk,
        pv_stages=P_STAGES,
        v_slots=v_slots,
        ring_floor=max(schedule_floor, arena_slots),
        arena_bytes=arena_bytes,
        q_bytes=q_bytes,
        p_bytes=p_bytes,
        correction_bytes=correction_bytes,
        tmem_map=tmem_map,
        smem_map=smem_map_for(ring_slots),
    )
