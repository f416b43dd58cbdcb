"""sm_100a: accumulators in tensor memory, tcgen05.mma.ws, one ring of K and V sub-tiles in shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .config import WARPGROUP_THREADS, Config, register_rules, require, require_features
from .geometry import (
    F32_BYTES,
    FP8_BYTES,
    MAX_ACCUMULATOR_READ_COLS,
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

# What the kernel has beyond contiguous K and V of equal lengths, see Config.features.
FEATURES: frozenset[str] = frozenset(
    {"paged", "key_lengths", "ragged_queries", "window", "softcap", "sinks", "page_list", "kv_dtype", "exact"}
)
TMEM_COLUMNS = 512
BLOCK_KEYS_CHOICES = (64, 128, 256)
P_STAGES = 2
MMA_K = 16
TMEM_ADDRESS_BYTES = 4
SMEM_ALIGN_BYTES = 16
SWIZZLE_BYTES = 128  # one row of a swizzled tile; 8 of them are the pattern
CORRECTION_COLS = 32
COPY_ALIGNMENT = 128  # bytes in shared memory
CONVERT_WARPS = 2  # those that the issuing warpgroup has beside the load and the MMA warp
SCALE_BUFFERS = 2  # key tiles of a warpgroup whose scales are in shared memory at once
SCALES = 3  # of a run of keys: of K, and of V its logarithm and its inverse

register_rules({"fp8-copy-rows": f"on sm_100a a page's rows of 8-bit K and V fill the {COPY_ALIGNMENT} bytes that a copy begins at"})


@dataclass(frozen=True, kw_only=True)
class Sm100Geometry(Geometry):
    """What sm_100a adds.

    s_cols: TMEM columns of one S accumulator (block_keys / m_pack)
    pv_key_chunk: keys of one P.V MMA; pv_stages: parts in which P is handed over
    v_slots: ring positions of a V tile; ring_floor: slots below which the schedule hangs or the epilogue has no room
    arena_bytes: epilogue staging, in the dead span of Q, ring and P
    tmem_map: S and O of each warpgroup, offsets and sizes in columns
    smem_map: offsets and sizes in bytes; what must survive the key loop comes after the ring and P
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

    # What only the full kernel needs: derived from the fields above, and not part of the manifest.

    @property
    def page_keys(self) -> int:
        """Keys that lie together in memory at most: a page's, or without pages as many as a copy can want."""
        return MAX_MMA_N

    @property
    def converts(self) -> bool:
        """Whether K and V are 8-bit and go through a ring of their own to warps that bring them to 16 bits in the ring of the MMAs."""
        return False

    @property
    def copy_region(self) -> str:
        """The region of `smem_map` with the slots that copies fill."""
        return "ring"

    @property
    def copy_slots(self) -> int:
        """Slots of that region."""
        return self.ring_slots

    @property
    def copy_slot_bytes(self) -> int:
        """Bytes of such a slot, a sub-tile as it comes from memory."""
        return self.slot_bytes

    @property
    def copy_row_bytes(self) -> int:
        """Bytes of a row of it, 64 columns, and the width of its swizzle."""
        return SWIZZLE_BYTES

    @property
    def paged(self) -> bool:
        """Whether K and V are pages, which a warp looks up and loads, instead of a thread."""
        return False

    @property
    def stores_positions(self) -> bool:
        """Whether O is stored a position at a time, where the next one may be another sequence's."""
        return False

    @property
    def clears(self) -> bool:
        """Whether what lies in V past a sequence's end is cleared: unless it lies past the end of the tensor, it may be anything."""
        return any(region.name == "mbar_ring_landed" for region in self.smem_map)

    def offset(self, name: str) -> int:
        """Offset in bytes of a region of `smem_map`. Raises KeyError."""
        return _region(self.smem_map, name).offset

    def column(self, name: str) -> int:
        """First TMEM column of a region of `tmem_map`, relative to the allocation. Raises KeyError."""
        return _region(self.tmem_map, name).offset

    def arena(self, name: str) -> int:
        """Offset in bytes of a region of `arena_map`, from the start of shared memory. Raises KeyError."""
        return _region(self.arena_map, name).offset

    @property
    def shared_key(self) -> bool:
        """Whether P is a tile in shared memory: parts are depth bands of one O, not key partitions."""
        return self.p_bytes > 0

    @property
    def layout_e(self) -> bool:
        """Whether the parts are the two key halves of an M = 64 accumulator, whose V sub-tile holds the full depth of a key chunk."""
        return not self.shared_key and self.m_pack == 2

    @property
    def threads(self) -> int:
        """Softmax warpgroups, one correction warpgroup, and one warpgroup of which the load warp and the MMA warp work."""
        return (self.warpgroups + 2) * WARPGROUP_THREADS

    @property
    def softmax_registers(self) -> int:
        """setmaxnreg of a softmax thread, which holds s_cols scores; all budgets together fill the register file at two warpgroups."""
        return 192

    @property
    def correction_registers(self) -> int:
        """setmaxnreg of a correction thread."""
        return 88

    @property
    def issue_registers(self) -> int:
        """setmaxnreg of the warpgroup that holds the load warp and the MMA warp."""
        return 40

    @property
    def q_chunk_bytes(self) -> int:
        """64 depth columns of the Q tile: [rows][128 bytes]."""
        return self.rows * SWIZZLE_BYTES

    @property
    def pv_chunks(self) -> int:
        """Key chunks of a V tile (of each part's keys, where parts have keys of their own)."""
        return self.v_slots // self.o_tiles

    @property
    def pv_steps(self) -> int:
        """MMAs (of 16 keys) along one key chunk."""
        return self.pv_key_chunk // MMA_K

    @property
    def s_read_cols(self) -> int:
        """Columns of S that a softmax thread reads at a time."""
        return min(MAX_ACCUMULATOR_READ_COLS, self.s_cols)

    @property
    def p_stage_cols(self) -> int:
        """Scores of a thread in one stage of P."""
        return self.s_cols // self.pv_stages

    @property
    def stage_1_chunk(self) -> int:
        """The key chunk that first needs stage 1 of P."""
        return self.p_stage_cols // self.pv_key_chunk

    @property
    def stage_1_step(self) -> int:
        """The MMA of that chunk that first needs stage 1 of P."""
        return self.p_stage_cols % self.pv_key_chunk // MMA_K

    @property
    def k_box_keys(self) -> int:
        """Keys of one K copy."""
        return min(self.block_keys, self.page_keys)

    @property
    def v_atom_keys(self) -> int:
        """Keys of a piece [keys][64 columns] of a slot with V."""
        return self.pv_key_chunk if self.shared_key or self.layout_e else self.block_keys

    @property
    def v_column_chunks(self) -> int:
        """Such pieces of a slot with V that have the same keys."""
        if self.shared_key:
            return self.pv_mma_n // SUB_TILE_DEPTH
        return self.depth // SUB_TILE_DEPTH if self.layout_e else 1

    @property
    def v_box_keys(self) -> int:
        """Keys of one V copy."""
        return min(self.v_atom_keys, self.page_keys)

    @property
    def v_box_chunks(self) -> int:
        """64-column chunks of one V copy: pages smaller than a piece are copied to each piece by themselves."""
        return self.v_column_chunks if self.v_box_keys == self.v_atom_keys else 1

    @property
    def v_box_bytes(self) -> int:
        """Bytes of one V copy."""
        return self.v_box_keys * self.v_box_chunks * self.copy_row_bytes

    @property
    def v_boxes(self) -> int:
        """TMA copies that fill a slot with V: without pages one, and one for each key half in layout E."""
        return self.copy_slot_bytes // self.v_box_bytes

    @property
    def v_atom_bytes(self) -> int:
        """From one 64-column atom of the P.V MMA's B operand to the next: the keys of a chunk, 128 bytes each."""
        return self.pv_key_chunk * SWIZZLE_BYTES

    @property
    def out_swizzle(self) -> int:
        """Swizzle of the staged O tile in bytes: 128 in shared-key; 0 in key-split, whose combine writes 16-byte blocks.

        A position of those would not begin where a TMA store can: stored one by one, they are swizzled as well.
        """
        return SWIZZLE_BYTES if self.shared_key or self.stores_positions else 0

    @property
    def out_chunk_cols(self) -> int:
        """Columns of O that one TMA store moves."""
        return self.out_swizzle // self.out_bytes if self.out_swizzle else self.out_k

    @property
    def out_chunk_bytes(self) -> int:
        """[rows][out_chunk_cols] of the staged O tile."""
        return self.rows * self.out_chunk_cols * self.out_bytes

    @property
    def level2_cols(self) -> int:
        """Columns of O a thread brings to one level-2 merge: its band of a depth tile, or its share of the combined depth."""
        return self.band_cols if self.shared_key else self.combine_band

    @property
    def level2_tiles(self) -> int:
        """Level-2 merges of a tile, each with a staging window of its own."""
        return self.o_tiles if self.shared_key else 1

    @property
    def window_bytes(self) -> int:
        """One level-2 staging window: the columns of all parts, float32."""
        return WARPGROUP_THREADS * self.level2_cols * F32_BYTES

    @property
    def correction_cols(self) -> int:
        """O columns that a correction thread rescales at a time."""
        return min(CORRECTION_COLS, self.o_phys_cols)

    @property
    def arena_map(self) -> tuple[Region, ...]:
        """Epilogue staging over the dead Q, ring and P: the O tile first, where a swizzled store finds its pattern's boundary."""
        staging = [] if self.shared_key else [(f"stage{w}", self.combine_stage_bytes) for w in range(self.warpgroups)]
        maxsums = [] if self.shared_key else [(f"maxsum{w}", self.combine_ml_bytes) for w in range(self.warpgroups)]
        windows = [("windows", self.depth * self.rows * F32_BYTES), ("window_ml", 2 * self.rows * F32_BYTES)]
        return place([("out", self.rows * self.depth * self.out_bytes), *(windows if self.warpgroups == 2 else []), *staging, *maxsums])

    def instruction_descriptor(self, n: int, dtype: str, *, b_is_mn_major: bool) -> int:
        """The 32-bit descriptor of a tcgen05.mma of kind::f16 with M = rows: float32 D, A K-major (PTX ISA, "Instruction descriptor")."""
        operand = 1 if dtype == "bfloat16" else 0
        return 1 << 4 | operand << 7 | operand << 10 | int(b_is_mn_major) << 16 | n >> 3 << 17 | self.rows >> 4 << 24


@dataclass(frozen=True, kw_only=True)
class Sm100FeatureGeometry(Sm100Geometry):
    """What features add (Config.features).

    page_size: keys of a page, None without pages
    ragged_queries: whether the positions of a tile may belong to several sequences
    """

    page_size: int | None
    ragged_queries: bool

    @property
    def page_keys(self) -> int:
        return super().page_keys if self.page_size is None else self.page_size

    @property
    def paged(self) -> bool:
        return self.page_size is not None

    @property
    def stores_positions(self) -> bool:
        return self.ragged_queries


@dataclass(frozen=True, kw_only=True)
class Sm100Fp8Geometry(Sm100FeatureGeometry):
    """What 8-bit K and V add: the copies fill a ring of their own, from which sub-tiles reach the ring of the MMAs as 16 bits.

    raw_slots: of the copies' ring; scale_keys: keys that have one scale for sure, of a part's in a key tile; None with scales of heads
    """

    raw_slots: int
    scale_keys: int | None

    @property
    def converts(self) -> bool:
        return True

    @property
    def copy_region(self) -> str:
        return "raw"

    @property
    def copy_slots(self) -> int:
        return self.raw_slots

    @property
    def copy_slot_bytes(self) -> int:
        return self.slot_bytes // OPERAND_BYTES * FP8_BYTES

    @property
    def copy_row_bytes(self) -> int:
        return SUB_TILE_DEPTH * FP8_BYTES

    @property
    def correction_registers(self) -> int:
        # One softmax warpgroup leaves plenty. With two, conversion takes some from here, unless pages have scales to look up.
        if self.warpgroups == 1:
            return 120
        return super().correction_registers if self.scale_keys else 72

    @property
    def issue_registers(self) -> int:
        if self.warpgroups == 1:
            return 120
        return super().issue_registers if self.scale_keys else 56

    @property
    def scale_runs(self) -> int:
        """Scales of K in a key tile; 0 with scales of heads."""
        return self.block_keys // self.scale_keys if self.scale_keys else 0

    @property
    def part_runs(self) -> int:
        """Those of a part's keys."""
        return self.s_cols // self.scale_keys if self.scale_keys else 0

    @property
    def scale_buffers(self) -> int:
        """Key tiles of a warpgroup whose scales are in shared memory at once."""
        return SCALE_BUFFERS

    @property
    def scale_values(self) -> int:
        """Numbers of a run of keys: the scale of K, and of V's its logarithm and its inverse."""
        return SCALES


def _region(regions: tuple[Region, ...], name: str) -> Region:
    for region in regions:
        if region.name == name:
            return region
    raise KeyError(name)


def _align_down(value: int, step: int) -> int:
    return value // step * step


def derive_sm100(config: Config) -> Sm100Geometry:
    """The sm_100a geometry. Raises ConfigError naming the rule that the config breaks."""
    require_features(config, "sm_100a", FEATURES)
    shape = common(config)
    fp8 = config.kv_dtype is not None
    if fp8 and config.shared_key and shape["band_cols"] > MAX_ACCUMULATOR_READ_COLS:
        # A band of 128 columns leaves the merge of two warpgroups too few registers beside the roles that 8 bits add: two tiles of 64.
        pv_mma_n = MAX_ACCUMULATOR_READ_COLS * config.m_pack
        shape |= {"pv_mma_n": pv_mma_n, "band_cols": MAX_ACCUMULATOR_READ_COLS, "o_tiles": shape["depth"] // pv_mma_n}
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
    # Layout G hands over P of every chunk in two stages; the others walk whole chunks, and wait for a stage where one begins.
    layout_g = not config.shared_key and m_pack == 4
    chunk_step = MMA_K * P_STAGES if layout_g else MMA_K
    require(pv_key_chunk % chunk_step == 0, "key-chunk-steps", "block_keys", block_keys, remedy, detail)
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

    # Shared memory: Q, ring and P die with the key loop; exchange, correction, mbarriers and the TMEM address outlive it.
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

    clears = not fp8 and (config.key_lengths or config.kv_layout == "paged")
    ring_mbarriers = 3 if clears else 2
    raw_slot_bytes = slot_bytes // OPERAND_BYTES * FP8_BYTES if fp8 else 0
    remedy = "use a page_size of 16 or more"
    fills = not fp8 or (config.page_size or COPY_ALIGNMENT) * SUB_TILE_DEPTH * FP8_BYTES >= COPY_ALIGNMENT
    require(fills, "fp8-copy-rows", "page_size", config.page_size, remedy)
    scale_keys = min(config.page_size, s_cols) if config.kv_scale == "page" and config.page_size else None
    scales_bytes = warpgroups * SCALE_BUFFERS * SCALES * (block_keys // scale_keys) * F32_BYTES if scale_keys else 0

    def smem_map_for(slots: int, raw_slots: int = int(fp8)) -> tuple[Region, ...]:
        return place(
            [
                ("q", q_bytes),
                ("ring", slots * slot_bytes),
                ("raw", raw_slots * raw_slot_bytes),
                ("p", p_bytes),
                ("exchange", exchange_bytes),
                ("correction", correction_bytes),
                ("scales", scales_bytes),
                ("mbar_ring_full", slots * MBARRIER_BYTES),
                ("mbar_ring_landed", slots * MBARRIER_BYTES if clears else 0),
                ("mbar_ring_empty", slots * MBARRIER_BYTES),
                ("mbar_raw_full", raw_slots * MBARRIER_BYTES),
                ("mbar_raw_empty", raw_slots * MBARRIER_BYTES),
                *fixed_barriers(),
                ("mbar_scales", warpgroups * SCALE_BUFFERS * MBARRIER_BYTES if scale_keys else 0),
                ("tmem_address", TMEM_ADDRESS_BYTES),
            ]
        )

    def smem_bytes_for(slots: int, raw_slots: int = int(fp8)) -> int:
        return -(-smem_map_for(slots, raw_slots)[-1].end // SMEM_ALIGN_BYTES) * SMEM_ALIGN_BYTES

    # Epilogue: key-split stages every O_g and (m, l); two warpgroups hand one band and its (m, l) over; then the output tile.
    staging = 0 if config.shared_key else shape["combine_stage_bytes"] + shape["combine_ml_bytes"]
    handover = (depth * rows + 2 * rows) * F32_BYTES if warpgroups == 2 else 0
    arena_bytes = warpgroups * staging + handover + rows * depth * shape["out_bytes"]
    # P lies behind the ring and dies with it.
    arena_slots = max(0, -(-(arena_bytes - q_bytes - p_bytes) // slot_bytes)) if not fp8 else 0
    # Layout G holds a whole V tile at once; the others release each V slot behind its own MMAs.
    schedule_floor = v_slots if layout_g else 1

    fixed_bytes = smem_bytes_for(1) - slot_bytes - ring_mbarriers * MBARRIER_BYTES
    most_slots = max(0, (SMEM_LIMIT_BYTES - fixed_bytes) // (slot_bytes + ring_mbarriers * MBARRIER_BYTES))
    while most_slots > 0 and smem_bytes_for(most_slots) > SMEM_LIMIT_BYTES:
        most_slots -= 1
    # Of 8-bit K and V the copies' ring, which hides the memory's latency, gets what the MMAs and the conversion need not have.
    wanted = schedule_floor + 1 if fp8 else most_slots
    ring_slots = config.ring_slots or max(1, min(wanted, most_slots))
    raw_slots = max(int(fp8), (SMEM_LIMIT_BYTES - smem_bytes_for(ring_slots, 0)) // (raw_slot_bytes + 2 * MBARRIER_BYTES)) if fp8 else 0
    slots_key, slots_value = ("ring_slots", ring_slots) if config.ring_slots else ("block_keys", block_keys)
    slots_remedy = f"use at most {most_slots} slots" if config.ring_slots and most_slots else "use a smaller block_keys, or one warpgroup"
    smem_bytes = smem_bytes_for(ring_slots, raw_slots)
    require(smem_bytes <= SMEM_LIMIT_BYTES, "smem-bytes", slots_key, slots_value, slots_remedy, f"{ring_slots} slots need {smem_bytes:,}")
    fits = schedule_floor <= most_slots
    floor_remedy = f"use {schedule_floor} to {most_slots} slots" if fits else "use a smaller block_keys"
    require(ring_slots >= schedule_floor, "ring-floor", slots_key, slots_value, floor_remedy, f"{ring_slots} of at least {schedule_floor}")
    fits = arena_slots <= most_slots and not fp8
    arena_remedy = f"use {arena_slots} to {most_slots} slots" if fits else "use a narrower out_dtype, or one warpgroup"
    dead_bytes = q_bytes + ring_slots * slot_bytes + raw_slots * raw_slot_bytes + p_bytes
    require(
        arena_bytes <= dead_bytes,
        "epilogue-arena",
        slots_key,
        slots_value,
        arena_remedy,
        f"{arena_bytes:,} bytes of staging, {dead_bytes:,} of Q, ring and P",
    )

    smem_map = smem_map_for(ring_slots, raw_slots)
    fields: dict[str, Any] = dict(
        arch="sm_100a",
        **shape,
        block_keys=block_keys,
        ring_slots=ring_slots,
        slot_bytes=slot_bytes,
        smem_bytes=smem_bytes,
        mbarriers=sum(region.size for region in smem_map if region.name.startswith("mbar")) // MBARRIER_BYTES,
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
        smem_map=smem_map,
    )
    if not config.features():
        return Sm100Geometry(**fields)
    fields |= {"page_size": config.page_size, "ragged_queries": config.ragged_queries}
    return Sm100Fp8Geometry(**fields, raw_slots=raw_slots, scale_keys=scale_keys) if fp8 else Sm100FeatureGeometry(**fields)
