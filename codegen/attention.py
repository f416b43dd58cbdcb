"""Launching the full attention kernel: tensor maps, arguments and grid for arrays on the host, and what the manifest says of the entry."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import ml_dtypes
import numpy as np

from .backends import Launch
from .config import Config, fixed_keys
from .emulator import TensorMap, Uninitialized
from .geometry import F32_BYTES, FP8_BYTES, OPERAND_BYTES, SUB_TILE_DEPTH, Geometry, derive, entry_configs, sharing_entry, symbol
from .geometry_sm90 import MAX_PARTITIONS, SWIZZLE_BYTES, WARP_THREADS, Sm90Fp8Geometry, Sm90Geometry, Sm90KeySplitGeometry
from .geometry_sm100 import Sm100Fp8Geometry
from .memory_names import attention_regions
from .units import DTYPES

if TYPE_CHECKING:
    from .backends import Argument

H200_SMS = 132
TMA_STRIDE_BYTES = 16
MAX_LISTED_KEYS = 1 << 30  # of a sequence whose pages are listed, so that places of keys and their sums are integers of the kernel
# What auto_split expects of an H200, in bytes and microseconds, fitted to 117 sweeps of it (bench/LOG.md 14): what a CTA that reads alone
# takes for a key tile (a fixed part and its bytes; as much again for every ROWS_OF_TWICE rows), what the memory gives all CTAs together,
# and what comes on top: an item (its first bytes, its last tile, O), a merge in a cluster or in one CTA, and the second step of several
# clusters; a merging CTA reads other partitions at MERGE_BYTES_PER_US.
TILE_US = 0.24
CTA_BYTES_PER_US = 185e3
ROWS_OF_TWICE = 64
# With 8-bit K and V it is the CTA's arithmetic that says, at any rows.
FP8_TILE_US = 0.19
FP8_BYTES_PER_US = 94e3
CHIP_BYTES_PER_US = 4.55e6
ITEM_US = 1.5
CLUSTER_US = 0.5
SECOND_STEP_US = 2.5
MERGE_US = 2.5
MERGE_BYTES_PER_US = 35e3
# How long bytes are on their way while the memory is busy: a CTA reads no more than its ring in that time.
RING_US = 1.35
MAX_WAVES = 4
# Key tiles for each SM, of all query tiles together, beyond which CTAs share SMs: with less to read one on each is faster.
SHARING_TILES = 10
MAX_KEY_TILES = 1 << 31
MAX_ITEMS = (1 << 31) - 1  # partitions of query tiles of a launch: kernels add the grid to their index in 32 bits


@dataclass(frozen=True)
class Tiling:
    """How q_len positions of `group` query heads fold into tiles of tile_rows query rows of one KV head.

    heads, positions: of a tile; row r is position r // heads, head r % heads. A group larger than a tile takes tiles_per_position of them.
    q_tiles: tiles of one KV head.
    """

    heads: int
    positions: int
    tiles_per_position: int
    q_tiles: int


def tiling(tile_rows: int, q_len: int, group: int) -> Tiling:
    """The tiling that the kernel derives from its arguments; the boxes of the tensor maps have to agree with it."""
    heads = min(group, tile_rows)
    positions = tile_rows // heads
    tiles_per_position = -(-group // tile_rows)
    return Tiling(heads, positions, tiles_per_position, -(-q_len // positions) * tiles_per_position)


def entry_config(config: Config, arch: str, q_len: int, group: int) -> Config:
    """The config of the entry that runs q_len positions of `group` query heads per KV head: with the fewest tiles, then the smallest ones.

    Every tile reads all keys and values, and rows without a query are work for nothing. Which entry runs depends on the sequence's own
    q_len and group only, never on its batch: results that must not change with the batch need that. A launch with much to read takes
    sharing_entry's of the same tiles instead, whose results are the same.
    """
    entries = entry_configs(config, arch)
    if len(entries) == 1:
        return entries[0]
    return min(entries, key=lambda entry: (tiling(derive(entry, arch).tile_rows, q_len, group).q_tiles, entry.tile_rows))


class Workspace:
    """Where the partitions of a launch meet: their O and LSE, and a counter of arrivals for every query tile. It belongs to one stream.

    Launches in one stream may share it, since one ends before the next begins; launches that may overlap need one each. It grows as
    launches ask for more: what earlier ones use stays as it is.

    allocate: (shape, dtype) -> an array of zeros. On a GPU it zeroes device memory and returns what stands for that in a launch's arguments
    (such as DeviceArray.stand_in); zeroed once, because every launch leaves the counters at 0, and one that was aborted is told apart by
    `number`: counters carry the number of the launch that they count for, so a later launch starts afresh from whatever it finds.
    number: of the last launch made.
    """

    def __init__(self, allocate: Callable[[tuple[int, ...], Any], np.ndarray] = np.zeros) -> None:
        self._allocate = allocate
        kinds: dict[str, Any] = {"partial_o": np.float32, "partial_lse": np.float32, "arrived": np.uint64}
        self._arrays = {name: np.empty(0, dtype) for name, dtype in kinds.items()}
        self.number = 0

    def next_launch(self, partial_o: int, partial_lse: int, arrived: int) -> tuple[np.uint32, np.ndarray, np.ndarray, np.ndarray]:
        """The number of a launch that has not been made yet, and arrays of at least so many elements."""
        for name, needed in (("partial_o", partial_o), ("partial_lse", partial_lse), ("arrived", arrived)):
            array = self._arrays[name]
            if array.size < needed:
                self._arrays[name] = self._allocate((needed,), array.dtype)
        self.number = self.number % (2**32 - 1) + 1
        o, lse, counters = self._arrays.values()
        return np.uint32(self.number), o, lse, counters


@dataclass(frozen=True)
class Split:
    """Partitions of the keys: `partitions` of `tiles` key tiles each cover them, the last may be shorter."""

    tiles: int
    partitions: int


def fixed_split(key_tiles: int, partition_keys: int, block_keys: int) -> Split:
    """Partitions of `partition_keys` keys each, whatever else is in the batch.

    Raises ValueError unless that is whole key tiles, and at most MAX_PARTITIONS partitions.
    """
    if partition_keys < block_keys or partition_keys % block_keys:
        raise ValueError(f"a partition of {partition_keys} keys is not a positive multiple of {block_keys}")
    tiles = partition_keys // block_keys
    split = Split(tiles, -(-key_tiles // tiles))
    if split.partitions > MAX_PARTITIONS:
        raise ValueError(f"partitions of {partition_keys} keys would be {split.partitions}; at most {MAX_PARTITIONS} are merged")
    return split


def cluster_size(geo: Sm90Geometry, partitions: int) -> int:
    """CTAs of a cluster, a power of two: they take a partition each and merge through each other's shared memory.

    By the partitions alone, since the order of a merge follows from it. One cluster has them all where it can; several merge in a second
    step, which is no slower than a merge in one CTA where all clusters run at once (bench/LOG.md 14).
    """
    return min(geo.max_cluster, 1 << (partitions - 1).bit_length())


def tile_bytes(geo: Geometry) -> int:
    """Bytes of K and V in a key tile."""
    return 2 * geo.block_keys * geo.depth * (FP8_BYTES if isinstance(geo, Sm90Fp8Geometry | Sm100Fp8Geometry) else OPERAND_BYTES)


def alone_us(geo: Geometry) -> float:
    """Microseconds that a CTA takes for a key tile when it reads alone."""
    if isinstance(geo, Sm90Fp8Geometry):
        return FP8_TILE_US + tile_bytes(geo) / FP8_BYTES_PER_US
    return (TILE_US + tile_bytes(geo) / CTA_BYTES_PER_US) * (1 + geo.tile_rows / ROWS_OF_TWICE)


def ring_us(geo: Geometry) -> float:
    """Microseconds in which a CTA that shares its SM gets a key tile through its ring while the memory is busy; 0: its ring is no limit."""
    if isinstance(geo, Sm90Geometry) and geo.ctas_per_sm > 1:
        return RING_US * tile_bytes(geo) / (geo.ring_slots * geo.slot_bytes)
    return 0.0


def bounding_window(config: Config) -> int | None:
    """The window in keys, where it bounds the key tiles of a query tile: a list of pages says only on the device which of them it has."""
    return None if config.page_list else config.window


def window_tiles(config: Config, geo: Geometry, positions: int) -> int:
    """Key tiles that the windows of a query tile of `positions` positions reach, at most; MAX_KEY_TILES where nothing bounds them."""
    window = bounding_window(config)
    if window is None:
        return MAX_KEY_TILES
    # Together the windows have window + positions - 1 keys, the first of which may be the last of its tile.
    return -(-(window + positions - 2) // geo.block_keys) + 1


def auto_split(geo: Sm90Geometry, key_tiles: int, query_tiles: int, ctas: int) -> Split:
    """The split expected to finish first on `ctas` CTAs that run at once; each of `query_tiles` query tiles has `key_tiles` key tiles.

    The exported launcher has this in C (templates/export/attention.c.j2), of the same operations in the same order.
    """
    most = min(key_tiles, MAX_PARTITIONS, max(1, MAX_WAVES * ctas // query_tiles))
    # Whole clusters: a CTA of one that has no keys only waits for the others.
    counts = [count for count in range(1, most + 1) if count % cluster_size(geo, count) == 0]
    splits = [Split(tiles, -(-key_tiles // tiles)) for tiles in (-(-key_tiles // count) for count in counts)]
    return min(splits, key=lambda split: _expected_us(geo, split, query_tiles, ctas))


def _expected_us(geo: Sm90Geometry, split: Split, query_tiles: int, ctas: int) -> float:
    """Microseconds that a launch is expected to take, less what all splits have in common."""
    partial_bytes = geo.tile_rows * geo.depth * F32_BYTES
    cluster = cluster_size(geo, split.partitions)
    clusters = -(-split.partitions // cluster)
    waves, grid = _waves(query_tiles * clusters * cluster, ctas, cluster)
    alone, together = alone_us(geo), grid * tile_bytes(geo) / CHIP_BYTES_PER_US
    if together > alone:
        together = max(together, ring_us(geo))
    # A CTA near both limits is a little slower than either says.
    alone_2, together_2 = alone * alone, together * together
    us = waves * (split.tiles * math.sqrt(math.sqrt(alone_2 * alone_2 + together_2 * together_2)) + ITEM_US)
    if cluster > 1:
        slice_us = partial_bytes / cluster / MERGE_BYTES_PER_US
        us += CLUSTER_US + slice_us
        if clusters > 1:
            us += SECOND_STEP_US + clusters * slice_us
    elif split.partitions > 1:
        us += MERGE_US + split.partitions * partial_bytes / MERGE_BYTES_PER_US
    return us


def _waves(items: int, ctas: int, cluster: int) -> tuple[int, int]:
    """Items that the busiest CTA takes, and as few CTAs as do with that, whole clusters: they then work in step."""
    clusters = items // cluster
    waves = -(-clusters // max(1, _resident(ctas, cluster) // cluster))
    return waves, -(-clusters // waves) * cluster


def _resident(ctas: int, cluster: int) -> int:
    """CTAs that run at once in clusters, which stay within a GPC of at most 18 SMs: 132 SMs hold 29 to 32 clusters of 4, chip by chip.

    With 32, a chip that holds fewer takes the others in a second wave (bench/LOG.md 7).
    """
    return ctas if cluster <= 2 else ctas * 7 // 8 // cluster * cluster


def problem_arguments(config: Config, geo: Geometry) -> list[tuple[str, str, str]]:
    """(name, C type, meaning) of the arguments between the tensor maps and the workspace, which both targets share."""
    ragged = config.ragged_queries
    return [
        ("lse", "float*", f"{'[kv_heads * group][total_q]' if ragged else '[batch][kv_heads * group][q_len]'} float32, natural logarithm"),
        ("batch", "unsigned", "sequences"),
        ("q_len", "unsigned", "query positions of each sequence" + (", at most" if ragged else "")),
        ("keys", "unsigned", "keys of each sequence" + (", at most" if config.key_lengths else "")),
        ("kv_heads", "unsigned", "KV heads"),
        ("group", "unsigned", f"query heads per KV head{f' (fixed: {config.group})' if config.group else ''}"),
        ("scale", "float", "softmax scale"),
        ("partition_tiles", "unsigned", f"key tiles of {geo.block_keys} keys in a partition"),
    ]


def _quotient_arguments(config: Config) -> list[tuple[str, str]]:
    """(name, meaning) of what the shared-key kernel for sm_90a is told so that it need not divide; see _quotients."""
    if not config.shared_key:
        return []
    divisors = {
        "kv_heads": "kv_heads",
        "q_tiles": "q_tiles",
        "clusters": "partitions / CTAs of a cluster",
        "tiles_per_position": "query tiles that share a position, of tile_rows heads each",
        "partition_tiles": "partition_tiles",
    }
    return [
        *([] if config.group else [("tile_positions", "query positions of a tile: as many as the group fits in, at least 1")]),
        ("q_tiles", "query tiles of a KV head"),
        *((f"{name}_inverse", f"(2^32 - 1) / {meaning}, rounded down") for name, meaning in divisors.items()),
    ]


def _quotients(config: Config, tiles: Tiling, kv_heads: int, clusters: int, partition_tiles: int) -> list[np.uint32]:
    """Values of _quotient_arguments, each uint32. Within a launch of a few microseconds divisions show: bench/LOG.md 21."""
    if not config.shared_key:
        return []
    divisors = (kv_heads, tiles.q_tiles, clusters, tiles.tiles_per_position, partition_tiles)
    counts = [tiles.q_tiles] if config.group else [tiles.positions, tiles.q_tiles]
    return [np.uint32(n) for n in (*counts, *(0xFFFFFFFF // divisor for divisor in divisors))]


def feature_arguments(config: Config) -> list[tuple[str, str, str]]:
    """(name, C type, meaning) of the arguments that the config's features add at the end, the same on both targets.

    export.ARGUMENT_VALUES says where the exported launcher takes each from.
    """
    features = set(config.features())
    scaled = "[pages][kv_heads]" if config.kv_scale == "page" else "[kv_heads]"
    arguments = [
        ("paged", "block_table", "const int*", f"[batch][table_pages]: pages of {config.page_size} keys; none past the end is read"),
        ("paged", "table_pages", "unsigned", "pages that the table has room for in each sequence"),
        ("page_list", "page_places", "const int*", "[batch][table_pages], ascending: the place of each listed page in its sequence"),
        ("key_lengths", "key_lengths", "const int*", "[batch]: keys of each sequence, 0 to keys"),
        ("ragged_queries", "query_starts", "const int*", "[batch + 1], rising: first row of each sequence in Q and O, and their end"),
        ("ragged_queries", "total_q", "unsigned", "rows of Q, O and LSE; no query_starts counts beyond it"),
        ("sinks", "sinks", "const float*", "[kv_heads * group]: a logit of each query head, natural logarithm"),
        ("kv_dtype", "k_scale", "const float*", f"{scaled}: factor of K"),
        ("kv_dtype", "v_scale", "const float*", f"{scaled}: factor of V{', positive' if config.kv_scale == 'page' else ''}"),
    ]
    return [(name, kind, meaning) for feature, name, kind, meaning in arguments if feature in features]


def attention_entry_info(config: Config, geo: Geometry) -> dict[str, Any]:
    """Name, block, grid rule, dynamic shared memory in bytes, and the arguments in order (name, C type, meaning) of an entry.

    Of several entries (see entry_configs) it is the one whose tiles have geo.tile_rows rows.
    """
    if geo.arch == "sm_100a":
        from . import attention_sm100

        return attention_sm100.attention_entry_info(config, geo)
    geo = _sm90(geo)
    out_type = config.out_dtype
    swizzle = f"{SWIZZLE_BYTES}-byte swizzle, zero fill"
    out_swizzle = "no swizzle" if isinstance(geo, Sm90KeySplitGeometry) else swizzle
    query = f"[batch][kv_heads][q_len][group][{geo.depth}], box 1 x 1 x positions x heads x"
    columns = geo.row_bytes if isinstance(geo, Sm90Fp8Geometry) else SUB_TILE_DEPTH
    key = f"[batch][kv_heads][{geo.depth // columns}][keys][{columns}], box 1 x 1 x {geo.slot_chunks} x {geo.block_keys} x {columns}"
    key_swizzle = swizzle.replace(str(SWIZZLE_BYTES), str(geo.row_bytes)) if isinstance(geo, Sm90Fp8Geometry) else swizzle
    arguments = [
        ("q_map", "CUtensorMap", f"Q {config.dtype} {query} 64, {swizzle}"),
        ("k_map", "CUtensorMap", f"K {config.kv_dtype or config.dtype} {key}, {key_swizzle}"),
        ("v_map", "CUtensorMap", "V, as k_map"),
        ("out_map", "CUtensorMap", f"O {out_type} {query} {geo.out_chunk_cols}, {out_swizzle}"),
        *problem_arguments(config, geo),
        ("partitions", "unsigned", f"partitions that cover {_covered(config)}, at most {geo.max_partitions}; 1 needs no workspace"),
        *((name, "unsigned", meaning) for name, meaning in _quotient_arguments(config)),
        ("launch", "unsigned", "rises with every launch that uses the workspace; a launch repeated as it is may keep it"),
        ("partial_o", "float*", f"workspace, [query tiles * partitions][{geo.tile_rows * geo.depth}] float32: O of each partition"),
        ("partial_lse", "float*", f"workspace, [query tiles * partitions][{_lse_rows(geo)}] float32: log2 of the LSE of each partition"),
        ("arrived", "unsigned long long*", "workspace, [query tiles * CTAs of a cluster] uint64: 0 at first, and again after a launch"),
        *feature_arguments(config),
    ]
    return {
        "name": symbol(_with_rows(config, geo), geo.arch),
        "tile_rows": geo.tile_rows,
        "block": [geo.threads, 1, 1],
        "grid": [
            "at most query tiles * partitions CTAs: "
            f"query tiles = batch * kv_heads * ceil(q_len / positions) * ceil(group / {geo.tile_rows}), "
            f"positions = {geo.tile_rows} / min(group, {geo.tile_rows})",
            1,
            1,
        ],
        "smem_bytes": geo.smem_bytes,
        "arguments": [{"name": name, "type": kind, "meaning": meaning} for name, kind, meaning in arguments],
    }


def _covered(config: Config) -> str:
    return (
        "the keys"
        if bounding_window(config) is None
        else "the keys, or if fewer those of a query tile's windows, from their first key tile on"
    )


def attention_entry_infos(config: Config, arch: str) -> list[dict[str, Any]]:
    """attention_entry_info of every entry of attention.cu."""
    return [attention_entry_info(entry, derive(entry, arch)) for entry in entry_configs(config, arch)]


def attention_launch(
    config: Config,
    geo: Geometry,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    *,
    scale: float | None = None,
    ctas: int | None = None,
    partition_keys: int | Literal["auto"] | None = None,
    workspace: Workspace | None = None,
    block_table: np.ndarray | None = None,
    page_places: np.ndarray | None = None,
    max_keys: int | None = None,
    key_lengths: np.ndarray | None = None,
    query_starts: np.ndarray | None = None,
    max_q_len: int | None = None,
    sinks: np.ndarray | None = None,
    k_scale: np.ndarray | None = None,
    v_scale: np.ndarray | None = None,
) -> Launch:
    """The launch that fills `out` and `lse`.

    q: [batch, q_len, q_heads, depth], C-contiguous; k, v: [batch, keys, kv_heads, depth], the depth contiguous, other strides multiples
    of 16 bytes, all in the config's dtype, k and v in its kv_dtype if it has one; q_heads is a multiple of kv_heads. out: as q, in
    out_dtype; lse: [batch, q_heads, q_len] float32, natural logarithm.
    The rest goes with the config's features, each array C-contiguous int32 or float32 and given exactly where its feature is on:
    block_table: [batch, table_pages]; k, v are then pages, [pages, page_size, kv_heads, depth] in any order of strides (paged).
    max_keys: keys that a sequence of the table has at most, default all that the table has room for (paged), or 2^30 (page_list).
    page_places: as block_table, ascending: place of each listed page in its sequence (page_list). key_lengths: [batch], what
    lies outside 0 to `keys` counts as the nearer of the two (key_lengths).
    query_starts: [batch + 1]; q and out are then [total_q, q_heads, depth], lse is [q_heads, total_q], and max_q_len the most queries of a
    sequence (ragged_queries): rows beyond that, and those of no sequence, are left as they are, and a start that falls or lies outside
    counts as the nearest that does not. sinks: [q_heads], natural logarithm (sinks). k_scale, v_scale: factors of K
    and V, [kv_heads], or with kv_scale page [pages, kv_heads], those of V positive then (kv_dtype).
    scale: softmax scale, default 1 / sqrt(depth). ctas: CTAs that run at once where each has an SM for itself, default the SMs of the
    target's first chip; on sm_90a the grid is no larger than ctas_per_sm times that, and each CTA takes several items where there are more.
    partition_keys: keys of a partition, a multiple of the key tile; "auto": chosen so that `ctas` CTAs finish first (fastest,
    but a sequence's bits depend on what else is in the batch; with a window on sm_90a partitions of the window's keys alone); None: as
    the config's `split` says, else all keys in one partition.
    workspace: of the stream that the launch will run in; a new one unless given.
    Raises ValueError where an array does not fit.
    """
    if partition_keys is None and config.split is not None:
        partition_keys = fixed_keys(config.split) or "auto"
    given = {
        "block_table": block_table,
        "page_places": page_places,
        "key_lengths": key_lengths,
        "query_starts": query_starts,
        "sinks": sinks,
        "k_scale": k_scale,
        "v_scale": v_scale,
    }
    extents, scale = check_features(config, q, k, v, out, lse, scale, given, max_q_len=max_q_len, max_keys=max_keys)
    if geo.arch == "sm_100a":
        from . import attention_sm100

        ctas = attention_sm100.B200_SMS if ctas is None else ctas
        return attention_sm100.attention_launch(
            config, geo, q, k, v, out, lse, extents, scale, given, ctas=ctas, partition_keys=partition_keys, workspace=workspace
        )
    ctas = H200_SMS if ctas is None else ctas
    batch, q_len, keys, kv_heads, group = extents
    entry = entry_config(config, geo.arch, q_len, group)
    geo = _sm90(geo if entry == config else derive(entry, geo.arch))
    tiles = tiling(geo.tile_rows, q_len, group)
    query_tiles = batch * kv_heads * tiles.q_tiles
    # A list has tiles of its pages alone.
    key_tiles = -(-read_keys(keys, k, given) // geo.block_keys)
    reached = min(key_tiles, window_tiles(config, geo, min(tiles.positions, q_len)))
    if query_tiles * reached > SHARING_TILES * ctas and (shared := sharing_entry(config, geo.arch, entry)) != entry:
        entry, geo = shared, _sm90(derive(shared, geo.arch))
    ctas *= geo.ctas_per_sm
    if partition_keys is None:
        split = Split(key_tiles, 1)
    elif partition_keys == "auto":
        split = auto_split(geo, reached, query_tiles, ctas)
    else:
        split = fixed_split(key_tiles, partition_keys, geo.block_keys)
    cluster = cluster_size(geo, split.partitions)
    own_lengths = config.key_lengths or config.kv_layout == "paged" or config.rescale == "exact"
    if own_lengths and partition_keys != "auto" and split.partitions > geo.max_cluster:
        # How many partitions a launch has follows from its longest sequence, and a second step of the merge would change the others' bits.
        # Within one cluster the merge is the one without, partition by partition.
        cluster = 1
    # Clusters are full; a partition past the last key has nothing to add.
    partitions = -(-split.partitions // cluster) * cluster
    items = query_tiles * partitions
    require_items(items)
    _, grid = _waves(items, ctas, cluster)
    parts = items if partitions > cluster or cluster == 1 < partitions else 1
    number, partial_o, partial_lse, arrived = (workspace or Workspace()).next_launch(
        max(1, parts // cluster) * geo.tile_rows * geo.depth, parts * _lse_rows(geo), query_tiles * cluster
    )
    args: tuple[Argument, ...] = (
        query_map(q, kv_heads, tiles, SWIZZLE_BYTES // q.itemsize, SWIZZLE_BYTES),
        key_map(k, geo.box_chunks, geo.box_keys),
        key_map(v, geo.v_box_chunks, geo.box_keys),
        query_map(
            out,
            kv_heads,
            # A tile's last positions may belong to the next sequence: they are stored one by one.
            replace(tiles, positions=1) if config.ragged_queries else tiles,
            geo.out_chunk_cols,
            0 if isinstance(geo, Sm90KeySplitGeometry) else SWIZZLE_BYTES,
        ),
        Uninitialized(lse),
        *(np.uint32(n) for n in (batch, q_len, keys, kv_heads, group)),
        np.float32(scale),
        np.uint32(split.tiles),
        np.uint32(partitions),
        *_quotients(config, tiles, kv_heads, partitions // cluster, split.tiles),
        number,
        Uninitialized(partial_o),
        Uninitialized(partial_lse),
        arrived,
        *feature_values(config, given, q),
    )
    return Launch(symbol(entry, geo.arch), (grid, 1, 1), (geo.threads, 1, 1), geo.smem_bytes, args, cluster, attention_regions(geo))


def require_items(items: int) -> None:
    """Raises ValueError where a launch has more partitions of query tiles than kernels count, as the launcher for C refuses them."""
    if items > MAX_ITEMS:
        raise ValueError(f"batch, kv_heads and q_len make {items:,} partitions of query tiles; at most {MAX_ITEMS:,} are launched")


def read_keys(keys: int, k: np.ndarray, given: Mapping[str, np.ndarray | None]) -> int:
    """Keys that a kernel reads of each sequence at most: of `keys` a list of pages has those of its pages alone."""
    table = given.get("block_table")
    return keys if given.get("page_places") is None or table is None else table.shape[1] * k.shape[1]


class Extents(NamedTuple):
    """The sizes that a kernel is told. q_len, keys: of each sequence, or the most that one has."""

    batch: int
    q_len: int
    keys: int
    kv_heads: int
    group: int


def check_features(
    config: Config,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    scale: float | None,
    given: Mapping[str, np.ndarray | None],
    *,
    max_q_len: int | None = None,
    max_keys: int | None = None,
) -> tuple[Extents, float]:
    """The sizes and the softmax scale of a launch whose config may have features; `given` holds the features' arrays by argument name.

    Raises ValueError where an array does not fit, is missing, or has no place in the config.
    """
    wanted = {name for name, kind, _ in feature_arguments(config) if kind.endswith("*")}
    for name, array in given.items():
        if (array is not None) != (name in wanted):
            raise ValueError(f"{name} is {'missing: the config asks for it' if name in wanted else 'given, but no feature of the config'}")
    _check_extras(config, max_q_len, max_keys)
    dtype, out_dtype = DTYPES[config.dtype], DTYPES[config.out_dtype]
    kv_dtype = dtype if config.kv_dtype is None else np.dtype(ml_dtypes.float8_e4m3fn)
    query_rank = 3 if config.ragged_queries else 4
    for name, array, rank, kind in (("q", q, query_rank, dtype), ("out", out, query_rank, out_dtype)):
        if array.ndim != rank or array.dtype != kind or not array.flags.c_contiguous or 0 in array.shape:
            raise ValueError(f"{name} is {array.dtype} {array.shape}; expected a contiguous, non-empty {kind} array of rank {rank}")
    for name, array in (("k", k), ("v", v)):
        if array.ndim != 4 or array.dtype != kv_dtype or 0 in array.shape:
            raise ValueError(f"{name} is {array.dtype} {array.shape}; expected a non-empty {kv_dtype} array of rank 4")
        steps = [step for step, extent in zip(array.strides, array.shape, strict=True) if extent > 1]
        if array.strides[3] != array.itemsize or any(step <= 0 or step % TMA_STRIDE_BYTES for step in steps[:-1]):
            raise ValueError(f"{name} has strides of {array.strides} bytes; the depth has to be contiguous, the others multiples of 16")
    q_heads, depth = q.shape[-2:]
    table, starts = given.get("block_table"), given.get("query_starts")
    batch = q.shape[0] if starts is None else starts.size - 1
    kv_heads = k.shape[2]
    if depth != config.ov_depth or k.shape[3] != depth or v.shape != k.shape or q_heads % kv_heads or out.shape != q.shape:
        raise ValueError(f"q {q.shape}, k {k.shape}, v {v.shape}, out {out.shape} do not fit depth {config.ov_depth} or each other")
    q_len = q.shape[1] if starts is None else max_q_len or 0
    keys = k.shape[1]
    if table is not None:
        room = table.shape[-1] * k.shape[1]
        most = MAX_LISTED_KEYS if given.get("page_places") is not None else room
        keys = most if max_keys is None else max_keys
        if k.shape[1] != config.page_size:
            raise ValueError(f"k {k.shape} has pages of {k.shape[1]} keys; the config has {config.page_size}")
        if not 1 <= keys <= most:
            raise ValueError(f"max_keys is {keys}; the block table has room for {most}")
    elif k.shape[0] != batch:
        raise ValueError(f"q {q.shape}, k {k.shape}, v {v.shape}, out {out.shape} do not fit depth {config.ov_depth} or each other")
    lse_shape = (batch, q_heads, q_len) if starts is None else (q_heads, q.shape[0])
    if lse.shape != lse_shape or lse.dtype != np.float32 or not lse.flags.c_contiguous:
        raise ValueError(f"lse is {lse.dtype} {lse.shape}; expected contiguous float32 {lse_shape}")
    scaled = (k.shape[0], kv_heads) if config.kv_scale == "page" else (kv_heads,)
    shapes: dict[str, tuple[tuple[int, ...], type]] = {
        "block_table": ((batch, table.shape[-1] if table is not None else 0), np.int32),
        "page_places": ((batch, table.shape[-1] if table is not None else 0), np.int32),
        "key_lengths": ((batch,), np.int32),
        "query_starts": ((batch + 1,), np.int32),
        "sinks": ((q_heads,), np.float32),
        "k_scale": (scaled, np.float32),
        "v_scale": (scaled, np.float32),
    }
    for name, array in given.items():
        if array is None:
            continue
        shape, of = shapes[name]
        if array.shape != shape or array.dtype != of or not array.flags.c_contiguous or batch < 1:
            raise ValueError(f"{name} is {array.dtype} {array.shape}; expected contiguous {np.dtype(of)} {shape}")
    group = q_heads // kv_heads
    if config.group not in (None, group):
        raise ValueError(f"the config fixes group {config.group}; q and k have {group}")
    scale = 1.0 / math.sqrt(depth) if scale is None else scale
    if not math.isfinite(scale):
        raise ValueError(f"scale {scale} is not finite")
    return Extents(batch, q_len, keys, kv_heads, group), scale


def _check_extras(config: Config, max_q_len: int | None, max_keys: int | None) -> None:
    if (max_q_len is not None) != config.ragged_queries:
        raise ValueError(f"max_q_len is {max_q_len}; it goes with ragged_queries, and is the most queries of a sequence")
    if max_q_len is not None and max_q_len < 1:
        raise ValueError(f"max_q_len is {max_q_len}; a sequence has at least 1 query")
    if max_keys is not None and config.kv_layout != "paged":
        raise ValueError(f"max_keys is {max_keys}; it goes with kv_layout paged")


def feature_values(config: Config, given: Mapping[str, np.ndarray | None], q: np.ndarray) -> list[Any]:
    """The arguments of a launch that feature_arguments lists, from the arrays by name and Q."""
    table = given.get("block_table")
    sizes = {"table_pages": np.uint32(table.shape[1] if table is not None else 0), "total_q": np.uint32(q.shape[0])}
    return [sizes[name] if name in sizes else given[name] for name, _, _ in feature_arguments(config)]


def _lse_rows(geo: Sm90Geometry) -> int:
    """LSEs of a partition in the workspace: one a row, in shared-key one a lane."""
    return geo.tile_rows if isinstance(geo, Sm90KeySplitGeometry) else WARP_THREADS


def _with_rows(config: Config, geo: Geometry) -> Config:
    entries = entry_configs(config, geo.arch)
    return entries[0] if len(entries) == 1 else next(entry for entry in entries if entry.tile_rows == geo.tile_rows)


def _sm90(geo: Geometry) -> Sm90Geometry:
    if not isinstance(geo, Sm90Geometry):
        raise ValueError(f"there is no full kernel for {geo.arch}")
    return geo


def query_map(array: np.ndarray, kv_heads: int, tiles: Tiling, columns: int, swizzle: int) -> TensorMap:
    """Q or O [batch, q_len, q_heads, depth] as [batch][kv_heads][q_len][group][depth], a box of a tile's rows and `columns` columns."""
    # Ragged queries are one long sequence to the copies.
    batch, q_len, q_heads, depth = array.shape if array.ndim == 4 else (1, *array.shape)
    group = q_heads // kv_heads
    # From the extents: a contiguous array may have any stride along an axis of one element.
    per_head = depth * array.itemsize
    per_position = q_heads * per_head
    return TensorMap(
        array,
        box=(1, 1, tiles.positions, tiles.heads, columns),
        shape=(batch, kv_heads, q_len, group, depth),
        strides=(q_len * per_position, group * per_head, per_position, per_head),
        swizzle=swizzle,
        # As key_map's; there is no promotion to 32 bytes.
        l2_promotion=swizzle if swizzle > 32 else 0,
    )


def key_map(array: np.ndarray, chunks: int, keys: int, columns: int | None = None) -> TensorMap:
    """K or V [batch, keys, kv_heads, depth] as [batch][kv_heads][depth / 64][keys][64]; a copy brings `keys` rows of swizzled chunks.

    columns: of a chunk, default as many as 128 bytes hold, so 128 of 8-bit elements. Pages take the place of sequences.
    """
    batch, extent, kv_heads, depth = array.shape
    columns = min(SWIZZLE_BYTES // array.itemsize, depth) if columns is None else columns
    base, offset = _memory(array)
    shape = (batch, kv_heads, depth // columns, extent, columns)
    per_batch, per_key, per_head, per_column = array.strides
    strides = (per_batch, per_head, columns * per_column, per_key)
    return TensorMap(
        base,
        box=(1, 1, chunks, keys, columns),
        shape=shape,
        # numpy leaves the stride of an axis of one element open; a copy never steps along it.
        strides=tuple(TMA_STRIDE_BYTES if count == 1 else step for step, count in zip(strides, shape[:-1], strict=True)),
        swizzle=columns * array.itemsize,
        # L2 fetches a row of a box at once. Without it a launch of a few microseconds takes 2 to 4% longer (bench/LOG.md 22).
        l2_promotion=columns * array.itemsize,
        # The base may be of bytes.
        dtype=array.dtype,
        offset_bytes=offset,
    )


def _memory(array: np.ndarray) -> tuple[np.ndarray, int]:
    """The contiguous array that holds `array`, a view of it or itself, and where in it `array` begins, in bytes."""
    base = array
    while not base.flags.c_contiguous:
        if not isinstance(base.base, np.ndarray):
            raise ValueError(f"an array of strides {array.strides} is no view of a contiguous one")
        base = base.base
    return base, array.__array_interface__["data"][0] - base.__array_interface__["data"][0]
