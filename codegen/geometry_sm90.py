"""sm_90a: accumulators in wgmma registers, K and V through TMA rings, one ring a consumer warpgroup.

Shared-key: both MMAs have their operands swapped, so that the few query rows are N: S^T[64 keys x rows] = K . Q^T and
O^T[depth x rows] += V^T . P^T. Key-split: one warp (m_pack 4) or two (m_pack 2) work alone on a key tile by mma.sync, one ring a part.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from .config import PAGE_SIZES, WARPGROUP_THREADS, Config, register_rules, require, require_features
from .geometry import (
    F32_BYTES,
    FP8_BYTES,
    MBARRIER_BYTES,
    OPERAND_BYTES,
    SMEM_LIMIT_BYTES,
    WGMMA_TILE_ROWS,
    Geometry,
    Region,
    common,
    place,
)

# What the shared-key kernel has beyond contiguous K and V of equal lengths, see Config.features.
FEATURES: frozenset[str] = frozenset(
    {"paged", "key_lengths", "ragged_queries", "window", "softcap", "sinks", "page_list", "kv_dtype", "exact"}
)
# Of those, what the key-split kernel has.
KEY_SPLIT_FEATURES: frozenset[str] = frozenset({"paged", "key_lengths", "window", "softcap", "sinks"})
MMA_M = 64
MMA_K = 16
COPY_ALIGNMENT = 128  # of a copy's place in shared memory, in bytes
SWIZZLE_BYTES = 128  # one row of a swizzled tile; 8 of them are the pattern, and tiles start on its boundary
DESCRIPTOR_UNIT_BYTES = 16
SLOT_DEPTH = 128  # depth columns of a ring slot: two swizzled sub-tiles, one copy
FP8_SLOT_DEPTH = 256  # of a slot of 8-bit K or V: as many bytes, two sub-tiles again
MIN_SLOT_BYTES = 8_192  # a slot also takes an O block of a partition that is merged, 32 rows of 64 float32
WARP_THREADS = 32
REGISTERS_PER_SM = 65_536
SMEM_PER_SM_BYTES = 233_472
SMEM_PER_CTA_BYTES = 1_024  # of it, that the system keeps for every CTA
SHARED_SM_DEPTH = 128  # at most, for more CTAs than one an SM whatever a launch reads; beyond it see SHARING_ROWS of geometry.py
FOUR_CTAS_O_ELEMENTS = 512  # of O, for four of them: 8 rows of depth 64, whose 72 registers a thread are fewer than the 80 there are
FP8_RING_BYTES = 65_536  # of all rings of 8 bits
MAX_REGISTERS = 255
REGISTER_STEP = 8
LITTLE_BYTES = 134_217_728  # of K and V, at most, whose L2 lines had better be the first to go (bench/LOG.md 22)
P_BUFFERS = 2
LAST_BYTES = 16  # a flag for the consumers and one for each producer
MAX_PARTITIONS = 64
MAX_CLUSTER = 4  # more would merge in fewer steps, but leave more SMs of a GPC without work
KEY_STEP_O_ELEMENTS = 2_048  # of a warp's O, 64 registers a lane: beyond it, the scores of a whole key tile do not fit beside O
MERGE_READS = 8  # 16-byte reads of partitions that a thread has in flight: enough to hide shared memory's latency
TWO_BATCHES_O_ELEMENTS = 8_192  # of O, 64 registers a thread: they leave room for a second batch of K or V
HELD_TILES = 4  # a batch of 128 gives a CTA four items of four KV heads
HELD_BYTES = 32_768  # of those tiles at most
SECOND_Q_RING_BYTES = 98_304  # a ring of 96 KiB already keeps the memory busy; what is beyond may go to a second Q buffer
# A ring of 96 KiB already keeps the memory busy where nothing is computed; where 32 rows are, 128 KiB do and 96 KiB are 2% slower.
FULL_RING_BYTES = 131_072
LEAST_RING_BYTES = 81_920  # below it, clusters cost more than they bring

register_rules(
    {
        "wgmma-key-tile": "on sm_90a a key tile is 64 keys, the M of wgmma",
        "wgmma-tile-rows": "on sm_90a tile_rows is the N of wgmma in the full kernel: 8, 16 or 32",
        "fp8-page-rows": "on sm_90a a page's rows of K begin at a multiple of 128 bytes in shared memory",
        "ring-per-warpgroup": "on sm_90a every warpgroup has a ring of its own: ring_slots is a multiple of warpgroups",
        "ring-per-part": "on sm_90a every part of a key-split warpgroup has a ring of its own: ring_slots is a multiple of m_pack",
        "key-split-warpgroups": "on sm_90a a key-split kernel has one consumer warpgroup: the O of a second one leaves no room for a ring",
        "ctas-per-sm": "on sm_90a CTAs share an SM in shared-key with one warpgroup: the others need its registers for themselves",
    }
)


@dataclass(frozen=True, kw_only=True)
class Sm90Geometry(Geometry):
    """What sm_90a adds. A chunk is a [rows of the tile, 128 bytes] piece of a tile in shared memory, the width of the swizzle.

    ctas_per_sm: CTAs that an SM runs at once; each has that part of its shared memory and of its registers
    threads, producer_warps: of the CTA; the producer warps follow the consumer warpgroups
    consumer_registers, producer_registers: setmaxnreg budgets, 0 where the launch's own are kept
    slots_per_ring: ring_slots / warpgroups
    slot_chunks: chunks of 64 depth columns in a slot; tile_slots: slots of one K tile, and of one V tile
    box_chunks, box_keys: of one copy of K or V: a whole slot, or, where pages are smaller than a key tile, a page's rows of one chunk
    v_box_chunks: of one copy of V: all chunks of a slot also where pages are smaller, if the 16 keys of an MMA are of one page
    k_steps: wgmma along 64 keys or 64 depth columns (64 / 16)
    k_step_units, v_step_units, chunk_units, q_chunk_units: steps of a matrix descriptor, in its units of 16 bytes: 16 elements along a
        K-major row, 16 keys down an MN-major chunk, a chunk of a slot, a chunk of Q
    o_blocks: 64-depth blocks of O^T, one accumulator of `fragment` registers each
    kept_blocks: blocks that warpgroup 0 finishes in the level-2 merge; warpgroup 1 finishes the others
    fragment: registers of a 64 x tile_rows accumulator (tile_rows / 2); lane_rows: query rows a lane sees in it (tile_rows / 4)
    lane_rows_log2: log2(lane_rows), steps in which the row reduction halves what a lane holds
    stmatrix_matrices, stmatrix_count: 8 x 8 matrices of one store, and stores that write a fragment
    q_bytes, q_buffers, q_chunks, q_chunk_bytes: the Q tile, copies of it in shared memory, its 64-column chunks
    held_tiles: O tiles that may wait in Q's buffers until the CTA's last item; 1: none does
    p_tile_bytes, p_buffers: a P tile [tile_rows, 64 keys], two for each warpgroup
    out_chunk_cols, out_chunks: columns of O in 128 bytes, chunks of the tile
    out_region: where the O tile is staged: over "q" when it has Q's size, else over the "merge_o" of two warpgroups, else in "out"
    merge_bytes: what the warpgroups hand each other in the level-2 merge, O f32; 0 for one warpgroup
    max_cluster: CTAs of a cluster that merges partitions, at most (1: none does); each merges whole O blocks
    merge_reads: 16-byte reads of other clusters' slices that a thread has in flight at most
    max_partitions: most partitions of the keys; block_floats: of an O block of all lanes
    piece_blocks, piece_bytes: O blocks that pass through a ring slot at once when partitions are merged
    smem_map: offsets and sizes in bytes
    """

    ctas_per_sm: int
    threads: int
    producer_warps: int
    consumer_registers: int
    producer_registers: int
    slots_per_ring: int
    slot_chunks: int
    box_chunks: int
    box_keys: int
    v_box_chunks: int
    tile_slots: int
    k_steps: int
    k_step_units: int
    v_step_units: int
    chunk_units: int
    q_chunk_units: int
    o_blocks: int
    kept_blocks: int
    fragment: int
    lane_rows: int
    lane_rows_log2: int
    stmatrix_matrices: int
    stmatrix_count: int
    q_bytes: int
    q_buffers: int
    held_tiles: int
    q_chunks: int
    q_chunk_bytes: int
    p_tile_bytes: int
    p_buffers: int
    out_chunk_cols: int
    out_chunks: int
    out_region: str
    merge_bytes: int
    max_partitions: int
    max_cluster: int
    merge_reads: int
    block_floats: int
    piece_blocks: int
    piece_bytes: int
    smem_map: tuple[Region, ...]

    @property
    def smem_limit(self) -> int:
        return smem_share(self.ctas_per_sm)

    @property
    def tile_pages(self) -> int:
        """Pages of a key tile that are copied one by one; 1 where a copy brings the whole tile."""
        return self.block_keys // self.box_keys

    @property
    def page_lookups(self) -> int:
        """Entries of the block table that a lane of the ring's producer reads at once: together they hold the pages of a key tile."""
        return -(-self.tile_pages // WARP_THREADS)

    @property
    def little_keys(self) -> int:
        """Keys, of all sequences and KV heads together, whose K and V have LITTLE_BYTES."""
        return LITTLE_BYTES // (2 * self.depth * OPERAND_BYTES)

    @property
    def little_mib(self) -> int:
        """LITTLE_BYTES in MiB."""
        return LITTLE_BYTES >> 20

    def window_entries(self, window: int) -> int:
        """Entries of the block table of the key tiles that a window of so many keys touches, at most, for all positions of a query tile."""
        keys = window + self.tile_rows - 1
        return ((keys - 1) // self.block_keys + 2) * self.tile_pages

    def table_at_once(self, window: int) -> bool:
        """Whether one entry of the block table a lane, from an item's first key tile on, holds all pages of a window of so many keys."""
        return self.page_lookups == 1 and self.window_entries(window) <= WARP_THREADS

    @property
    def batch_step(self) -> int:
        """Batches of page_lookups entries a lane from one key tile of a ring to the next, at most."""
        return max(1, self.warpgroups * self.tile_pages // (WARP_THREADS * self.page_lookups))

    def offset(self, name: str) -> int:
        """Offset in bytes of a region of `smem_map`. Raises KeyError."""
        for region in self.smem_map:
            if region.name == name:
                return region.offset
        raise KeyError(name)


@dataclass(frozen=True, kw_only=True)
class Sm90Fp8Geometry(Sm90Geometry):
    """What K and V of 8 bits add. What Sm90Geometry says of descriptors of K and V does not apply: both reach the MMA through registers.

    row_bytes: a key's row of a chunk, as many depth columns: the width of the swizzle
    copy_bytes: what the copies of a slot bring; a slot may be larger
    chunk_batches: batches of 64 columns in a chunk, four wgmma each; batches: of a K or V tile
    a_buffers: batches in registers: two, one read and converted while the other is multiplied, where O leaves the registers for it
    """

    row_bytes: int
    copy_bytes: int
    chunk_batches: int
    batches: int
    a_buffers: int

    @property
    def little_keys(self) -> int:
        return LITTLE_BYTES // (2 * self.depth * FP8_BYTES)


@dataclass(frozen=True, kw_only=True)
class Sm90KeySplitGeometry(Sm90Geometry):
    """What key-split adds. What Sm90Geometry says of P tiles, wgmma accumulators and pieces of O does not apply and is 0.

    part_warps: warps of a part, rows / 32, each with the 32 rows of the part that its lanes stand for; row_warps: those of them whose rows
        carry queries, so the warps that read a ring slot
    warp_rows: rows of a tile that such a warp works on; row_blocks: 8 of them a block, the N of P.V
    m_tiles: 16 rows each, the M of Q.K (8 rows fill half of one)
    key_steps: steps in which a warp works through a key tile; with 32 rows of depth 128, registers hold the scores of half a tile only
    key_blocks, depth_blocks, depth_steps: 8 keys of a step (N of Q.K), 16 depth columns (M of P.V), 16 depth columns (K of Q.K)
    partial_floats: of a partition's O in the workspace; merge_partitions: partitions that the staging area holds at once in their merge
    merge_row_quads: float4s of O that a thread merges; merge_unroll: partitions it reads at once
    """

    part_warps: int
    row_warps: int
    warp_rows: int
    row_blocks: int
    m_tiles: int
    key_steps: int
    key_blocks: int
    depth_blocks: int
    depth_steps: int
    partial_floats: int
    merge_partitions: int
    merge_row_quads: int
    merge_unroll: int


def smem_share(ctas_per_sm: int) -> int:
    """Bytes of shared memory for each of the CTAs that an SM runs at once; for one they are SMEM_LIMIT_BYTES."""
    return SMEM_PER_SM_BYTES // ctas_per_sm - SMEM_PER_CTA_BYTES


def derive_sm90(config: Config) -> Sm90Geometry:
    """The sm_90a geometry. Raises ConfigError naming the rule that the config breaks.

    Shared-key configs with m_pack 2 get one too: their unit kernels use its common part, and no full kernel is made from the rest.
    """
    supported = KEY_SPLIT_FEATURES if not config.shared_key else FEATURES if config.m_pack == 4 else frozenset()
    remedy = "" if supported == FEATURES else "set shared_key: true, m_pack: 4 and rows: 32"
    require_features(config, "sm_90a", supported, remedy)
    if not config.shared_key:
        return _derive_key_split(config)
    shape = common(config)
    # One keeps up with the memory at every tile size, and then a second one only adds a merge. With half the bytes to wait for it does not.
    shape["warpgroups"] = config.warpgroups or (1 if config.kv_dtype is None or (config.ctas_per_sm or 1) > 1 else 2)
    depth, warpgroups, out_bytes = shape["depth"], shape["warpgroups"], shape["out_bytes"]
    has_kernel = config.m_pack == 4
    fp8 = config.kv_dtype is not None
    tile_rows = shape["tile_rows"]
    remedy = f"use {MMA_M}, leave it out, or list only sm_100a"
    require(config.block_keys in (None, MMA_M), "wgmma-key-tile", "block_keys", config.block_keys, remedy)
    require(not has_kernel or tile_rows in WGMMA_TILE_ROWS, "wgmma-tile-rows", "tile_rows", tile_rows, "use 8, 16 or 32")

    remedy = "set warpgroups: 1, or leave ctas_per_sm out"
    require(config.ctas_per_sm in (None, 1) or warpgroups == 1, "ctas-per-sm", "ctas_per_sm", config.ctas_per_sm, remedy)

    kv_bytes = FP8_BYTES if fp8 else OPERAND_BYTES
    slot_depth = min(depth, FP8_SLOT_DEPTH if fp8 else SLOT_DEPTH)
    row_bytes = min(SWIZZLE_BYTES, depth * kv_bytes)
    slot_chunks = slot_depth * kv_bytes // row_bytes
    chunk_bytes = MMA_M * row_bytes
    slot_bytes = max(slot_chunks * chunk_bytes, MIN_SLOT_BYTES)
    box_keys = min(config.page_size or MMA_M, MMA_M)
    remedy = f"use one of {', '.join(str(page) for page in PAGE_SIZES if page * row_bytes >= COPY_ALIGNMENT)}"
    require(box_keys * row_bytes >= COPY_ALIGNMENT, "fp8-page-rows", "page_size", config.page_size, remedy)
    small_pages = box_keys < MMA_M

    lane_rows = tile_rows // 4
    q_chunk_bytes = tile_rows * SWIZZLE_BYTES
    q_bytes = tile_rows * depth * OPERAND_BYTES
    out_region = "q" if out_bytes == OPERAND_BYTES else "merge_o" if warpgroups == 2 else "out"
    merge_bytes = tile_rows * depth * F32_BYTES if warpgroups == 2 else 0

    def smem_map_for(slots: int, q_buffers: int, cluster: int) -> tuple[Region, ...]:
        # Swizzled regions come first: all are multiples of the 1 KiB pattern, so each starts on it.
        return place(
            [
                ("ring", slots * slot_bytes),
                ("q", q_buffers * q_bytes),
                # What the others of a cluster send lies in the second Q buffer, which a launch in clusters does without, and here.
                ("landing", max(0, tile_rows * depth * F32_BYTES * (cluster - 1) // cluster - (q_buffers - 1) * q_bytes)),
                ("p", warpgroups * P_BUFFERS * q_chunk_bytes),
                ("out", tile_rows * depth * out_bytes if out_region == "out" else 0),
                ("merge_o", merge_bytes),
                ("merge_ml", 2 * WARP_THREADS * 2 * F32_BYTES if warpgroups == 2 else 0),
                ("exchange", shape["exchange_bytes"]),
                ("weights", MAX_PARTITIONS * WARP_THREADS * F32_BYTES),
                ("last", LAST_BYTES),
                ("mbar_full", slots * MBARRIER_BYTES),
                ("mbar_empty", slots * MBARRIER_BYTES),
                ("mbar_q_full", q_buffers * MBARRIER_BYTES),
                ("mbar_q_empty", q_buffers * MBARRIER_BYTES),
                ("mbar_verdict", warpgroups * MBARRIER_BYTES),
                ("mbar_ready", MBARRIER_BYTES if warpgroups == 1 else 0),
                ("mbar_read", MBARRIER_BYTES if warpgroups == 1 else 0),
            ]
        )

    def buffers_and_slots(sharing: int) -> tuple[int, int, int, int]:
        # max_cluster, q_buffers, held_tiles, and the most slots beside them. Rings are measured by what those of an SM have together.
        def most_slots(q_buffers: int, cluster: int) -> int:
            free = smem_share(sharing) - smem_map_for(0, q_buffers, cluster)[-1].end
            return max(0, free // (slot_bytes + 2 * MBARRIER_BYTES)) // warpgroups * warpgroups

        # What the others of a cluster send needs room that nothing else uses: a CTA may still be at work when the first of them are done.
        widest = min(MAX_CLUSTER, depth // MMA_M) if warpgroups == 1 else 1
        clusters = [cluster for cluster in (4, 2) if cluster <= widest]
        limits = (FULL_RING_BYTES, LEAST_RING_BYTES)
        wide = (cluster for least in limits for cluster in clusters if sharing * most_slots(2, cluster) * slot_bytes >= least)
        max_cluster = next(wide, 1)
        q_buffers = 2 if max_cluster > 1 or sharing * most_slots(2, 1) * slot_bytes >= SECOND_Q_RING_BYTES else 1
        # O waits in Q's buffers, see store_held in the template: where every item of an unsplit launch has work, so not with ragged
        # queries, of which some have no tile. The ring gives up to 24 KiB for it, which it has beyond what the memory needs.
        held_tiles = 1
        if out_region == "q" and warpgroups == 1 and not config.ragged_queries and sharing * HELD_TILES * q_bytes <= HELD_BYTES:
            q_buffers = held_tiles = HELD_TILES
        return max_cluster, q_buffers, held_tiles, most_slots(q_buffers, max_cluster)

    # Where O leaves them the registers, several CTAs hide what each waits for (bench/LOG.md 19).
    useful = 1 if warpgroups == 2 or depth > SHARED_SM_DEPTH else 4 if tile_rows * depth <= FOUR_CTAS_O_ELEMENTS else 2
    choices = [config.ctas_per_sm] if config.ctas_per_sm else [sharing for sharing in (4, 2, 1) if sharing <= useful]
    # A ring that is asked for may leave room for fewer.
    sharing = next((choice for choice in choices if buffers_and_slots(choice)[3] >= (config.ring_slots or 1)), choices[-1])
    max_cluster, q_buffers, held_tiles, most = buffers_and_slots(sharing)
    # Slots of a tile are released one behind: the next one's MMAs are issued first. A tile of one slot has none to wait for.
    tile_slots = depth // slot_depth
    floor = min(tile_slots, 2) * warpgroups
    useful_slots = most
    if fp8:
        # More slots than keep the memory busy are slower (bench/LOG.md 19), but every warpgroup needs a tile of K and of V.
        useful_slots = max(FP8_RING_BYTES // slot_bytes, 2 * tile_slots * warpgroups) // warpgroups * warpgroups
    ring_slots = config.ring_slots or min(most, useful_slots)
    given = config.ring_slots is not None
    key, value = ("ring_slots", ring_slots) if given else ("ov_depth", depth)
    smaller = "use a smaller tile_rows, or one warpgroup" if sharing == 1 else "use a smaller ctas_per_sm, or a smaller tile_rows"
    remedy = f"use a multiple of {warpgroups} from {floor} to {most}" if most >= floor else smaller
    require(ring_slots % warpgroups == 0, "ring-per-warpgroup", key, value, remedy)
    require(ring_slots >= floor, "ring-floor", key, value, remedy, f"{ring_slots} of at least {floor}")
    smem_map = smem_map_for(ring_slots, q_buffers, max_cluster)
    smem_bytes = smem_map[-1].end
    among = f", and {sharing} CTAs an SM leave each {smem_share(sharing):,}" if sharing > 1 else ""
    found = f"{ring_slots} slots need {smem_bytes:,}{among}"
    require(smem_bytes <= smem_share(sharing), "smem-bytes", key, value, remedy, found)

    # One ring's producer warp each, and one for Q. Two consumer warpgroups leave 168 registers a thread, so the producers lend theirs,
    # which setmaxnreg does by whole warpgroups.
    producer_warps = warpgroups + 1
    consumer_registers = producer_registers = 0
    if warpgroups == 2:
        producer_warps = 4
        producer_registers = 40
        left = REGISTERS_PER_SM - producer_warps * WARP_THREADS * producer_registers
        consumer_registers = min(MAX_REGISTERS, left // (warpgroups * WARPGROUP_THREADS)) // REGISTER_STEP * REGISTER_STEP
    stmatrix_matrices = min(4, lane_rows)
    kept_blocks = -(-depth // MMA_M // warpgroups)
    block_floats = tile_rows // 2 * WARPGROUP_THREADS
    piece_blocks = max(1, min(slot_bytes // (block_floats * F32_BYTES), kept_blocks))

    derived = Sm90Geometry(
        arch="sm_90a",
        **shape,
        block_keys=MMA_M,
        ring_slots=ring_slots,
        slot_bytes=slot_bytes,
        smem_bytes=smem_bytes,
        mbarriers=2 * ring_slots + 2 * q_buffers + warpgroups + (2 if warpgroups == 1 else 0),
        tmem_columns=0,
        tmem_columns_allocated=0,
        ctas_per_sm=sharing,
        threads=warpgroups * WARPGROUP_THREADS + producer_warps * WARP_THREADS,
        producer_warps=producer_warps,
        consumer_registers=consumer_registers,
        producer_registers=producer_registers,
        slots_per_ring=ring_slots // warpgroups,
        slot_chunks=slot_chunks,
        box_chunks=1 if small_pages else slot_chunks,
        box_keys=box_keys,
        v_box_chunks=slot_chunks if not small_pages or (box_keys >= MMA_K and not fp8) else 1,
        tile_slots=tile_slots,
        k_steps=MMA_M // MMA_K,
        k_step_units=MMA_K * OPERAND_BYTES // DESCRIPTOR_UNIT_BYTES,
        v_step_units=MMA_K * SWIZZLE_BYTES // DESCRIPTOR_UNIT_BYTES,
        chunk_units=chunk_bytes // DESCRIPTOR_UNIT_BYTES,
        q_chunk_units=q_chunk_bytes // DESCRIPTOR_UNIT_BYTES,
        o_blocks=depth // MMA_M,
        kept_blocks=kept_blocks,
        fragment=tile_rows // 2,
        lane_rows=lane_rows,
        lane_rows_log2=lane_rows.bit_length() - 1,
        stmatrix_matrices=stmatrix_matrices,
        stmatrix_count=lane_rows // stmatrix_matrices,
        q_bytes=q_bytes,
        q_buffers=q_buffers,
        held_tiles=held_tiles,
        q_chunks=depth * OPERAND_BYTES // SWIZZLE_BYTES,
        q_chunk_bytes=q_chunk_bytes,
        p_tile_bytes=q_chunk_bytes,
        p_buffers=P_BUFFERS,
        out_chunk_cols=SWIZZLE_BYTES // out_bytes,
        out_chunks=depth * out_bytes // SWIZZLE_BYTES,
        out_region=out_region,
        merge_bytes=merge_bytes,
        max_partitions=MAX_PARTITIONS,
        max_cluster=max_cluster,
        merge_reads=MERGE_READS,
        block_floats=block_floats,
        piece_blocks=piece_blocks,
        piece_bytes=piece_blocks * block_floats * F32_BYTES,
        smem_map=smem_map,
    )
    if not fp8:
        return derived
    shared = {field.name: getattr(derived, field.name) for field in fields(derived)}
    return Sm90Fp8Geometry(
        **shared,
        row_bytes=row_bytes,
        copy_bytes=slot_chunks * chunk_bytes,
        chunk_batches=row_bytes // MMA_M,
        batches=depth // MMA_M,
        a_buffers=2 if tile_rows * depth <= TWO_BATCHES_O_ELEMENTS else 1,
    )


def _derive_key_split(config: Config) -> Sm90KeySplitGeometry:
    shape = common(config)
    m_pack, rows, depth, tile_rows, out_bytes = (shape[key] for key in ("m_pack", "rows", "depth", "tile_rows", "out_bytes"))
    remedy = f"use {MMA_M}, leave it out, or list only sm_100a"
    require(config.block_keys in (None, MMA_M), "wgmma-key-tile", "block_keys", config.block_keys, remedy)
    require(config.ctas_per_sm in (None, 1), "ctas-per-sm", "ctas_per_sm", config.ctas_per_sm, "set shared_key: true, or leave it out")
    remedy = "use 1, leave it out, or list only sm_100a"
    require(config.warpgroups in (None, 1), "key-split-warpgroups", "warpgroups", config.warpgroups, remedy)
    shape["warpgroups"] = 1

    slot_chunks = depth * OPERAND_BYTES // SWIZZLE_BYTES
    slot_bytes = slot_chunks * MMA_M * SWIZZLE_BYTES
    q_chunk_bytes = tile_rows * SWIZZLE_BYTES
    q_bytes = tile_rows * depth * OPERAND_BYTES
    partial_floats = tile_rows * depth
    box_keys = min(config.page_size or MMA_M, MMA_M)

    def smem_map_for(slots: int, q_buffers: int) -> tuple[Region, ...]:
        # Swizzled regions come first: all are multiples of the 1 KiB pattern, so each starts on it.
        return place(
            [
                ("ring", slots * slot_bytes),
                ("q", q_buffers * q_bytes),
                ("stage", shape["combine_stage_bytes"]),
                ("out", rows * depth * out_bytes),
                ("maxsum", shape["combine_ml_bytes"]),
                ("weights", MAX_PARTITIONS * tile_rows * F32_BYTES),
                ("mbar_full", slots * MBARRIER_BYTES),
                ("mbar_empty", slots * MBARRIER_BYTES),
                ("mbar_q_full", q_buffers * MBARRIER_BYTES),
                ("mbar_q_empty", q_buffers * MBARRIER_BYTES),
                ("mbar_merge", MBARRIER_BYTES),
            ]
        )

    def most_slots(q_buffers: int) -> int:
        free = SMEM_LIMIT_BYTES - smem_map_for(0, q_buffers)[-1].end
        return free // (slot_bytes + 2 * MBARRIER_BYTES) // m_pack * m_pack

    q_buffers = 2 if most_slots(2) * slot_bytes >= SECOND_Q_RING_BYTES else 1
    most = most_slots(q_buffers)
    warp_rows = min(tile_rows, WARP_THREADS)
    key_steps = 2 if warp_rows * depth > KEY_STEP_O_ELEMENTS else 1
    if key_steps == 2 and tile_rows > WARP_THREADS and not config.use_fma:
        key_steps = 4  # two row warps a part and scores scaled beforehand: half a tile's scores would not fit either
    if key_steps == 2 and config.features():
        key_steps = 4  # nor would they beside what features keep
    # In several steps K of a tile is still needed when V of it is waited for.
    floor = min(key_steps, 2) * m_pack
    ring_slots = config.ring_slots or most
    key, value = ("ring_slots", ring_slots) if config.ring_slots is not None else ("ov_depth", depth)
    remedy = f"use a multiple of {m_pack} from {floor} to {most}"
    require(ring_slots % m_pack == 0, "ring-per-part", key, value, remedy)
    require(ring_slots >= floor, "ring-floor", key, value, remedy, f"{ring_slots} of at least {floor}")
    smem_map = smem_map_for(ring_slots, q_buffers)
    smem_bytes = smem_map[-1].end
    require(smem_bytes <= SMEM_LIMIT_BYTES, "smem-bytes", key, value, remedy, f"{ring_slots} slots need {smem_bytes:,}")

    part_warps = rows // WARP_THREADS
    merge_row_quads = partial_floats // 4 // WARPGROUP_THREADS
    # A producer warp for each ring and one for Q, filled up to whole warpgroups: with m_pack 4 the second of them leaves the consumers too
    # few registers, and setmaxnreg gives back what producers do not need.
    producer_warps = -(-(m_pack + 1) // 4) * 4
    producer_registers = 40 if producer_warps > 4 else 0
    return Sm90KeySplitGeometry(
        arch="sm_90a",
        **shape,
        block_keys=MMA_M,
        ring_slots=ring_slots,
        slot_bytes=slot_bytes,
        smem_bytes=smem_bytes,
        mbarriers=2 * ring_slots + 2 * q_buffers + 1,
        tmem_columns=0,
        tmem_columns_allocated=0,
        ctas_per_sm=1,
        threads=WARPGROUP_THREADS + producer_warps * WARP_THREADS,
        producer_warps=producer_warps,
        consumer_registers=MAX_REGISTERS // REGISTER_STEP * REGISTER_STEP if producer_registers else 0,
        producer_registers=producer_registers,
        slots_per_ring=ring_slots // m_pack,
        slot_chunks=slot_chunks,
        box_chunks=slot_chunks if box_keys == MMA_M else 1,
        box_keys=box_keys,
        v_box_chunks=slot_chunks if box_keys == MMA_M else 1,
        tile_slots=1,
        k_steps=MMA_M // MMA_K,
        k_step_units=0,
        v_step_units=0,
        chunk_units=0,
        q_chunk_units=0,
        o_blocks=depth // MMA_M,
        kept_blocks=0,
        fragment=0,
        lane_rows=0,
        lane_rows_log2=0,
        stmatrix_matrices=0,
        stmatrix_count=0,
        q_bytes=q_bytes,
        q_buffers=q_buffers,
        held_tiles=1,
        q_chunks=slot_chunks,
        q_chunk_bytes=q_chunk_bytes,
        p_tile_bytes=0,
        p_buffers=0,
        out_chunk_cols=shape["out_k"],
        out_chunks=depth // shape["out_k"],
        out_region="out",
        merge_bytes=0,
        max_partitions=MAX_PARTITIONS,
        max_cluster=1,
        merge_reads=0,
        block_floats=0,
        piece_blocks=0,
        piece_bytes=0,
        smem_map=smem_map,
        part_warps=part_warps,
        row_warps=-(-tile_rows // WARP_THREADS),
        warp_rows=warp_rows,
        row_blocks=warp_rows // 8,
        m_tiles=-(-warp_rows // 16),
        key_steps=key_steps,
        key_blocks=MMA_M // 8 // key_steps,
        depth_blocks=depth // 16,
        depth_steps=depth // MMA_K,
        partial_floats=partial_floats,
        merge_partitions=min(MAX_PARTITIONS, shape["combine_stage_bytes"] // (partial_floats * F32_BYTES)),
        merge_row_quads=merge_row_quads,
        merge_unroll=max(1, MERGE_READS // merge_row_quads),
    )
