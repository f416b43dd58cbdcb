"""All that is derived from a config: tiles, memory maps, ring, symbol names. Each number is computed here once; templates index them.

Common derivations are in this module, a target's own maps and rules in geometry_sm90.py and geometry_sm100.py.
Source of the rules: the packed-TMEM warp-specialised attention design.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal, TypedDict

from .config import ARCHES, RULES, WARPGROUP_THREADS, Config, ConfigError, fixed_keys, require, switched_off

F32_BYTES = 4
OPERAND_BYTES = 2  # bf16 and f16: Q, K, V, P
FP8_BYTES = 1  # K and V with kv_dtype
MBARRIER_BYTES = 8
SMEM_LIMIT_BYTES = 232_448  # 228 KiB of an SM less the 1 KiB the system keeps for the CTA; the same on sm_90 and sm_100
SUB_TILE_DEPTH = 64  # depth of one K sub-tile: 128 bytes, one swizzle atom
MAX_MMA_N = 256
MAX_ACCUMULATOR_READ_COLS = 64
MIN_TMEM_ALLOCATION = 32
OUT_STORE_BYTES = 16
WGMMA_TILE_ROWS = (8, 16, 32)  # values of N that the shared-key kernel for sm_90a is made for
SHARING_ROWS = 8  # of tiles whose launches have the choice of one CTA an SM or two: with more rows two are slower (bench/LOG.md 19)
OUT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
OUT_CTYPES = {"bfloat16": "fa4_bf16", "float16": "fa4_f16", "float32": "float"}
SHORT_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}

Function = Literal["exchange4", "level0", "combine"]


@dataclass(frozen=True)
class Region:
    """A named span of shared memory (offset and size in bytes) or of tensor memory (in columns of all 128 lanes)."""

    name: str
    offset: int
    size: int

    @property
    def end(self) -> int:
        return self.offset + self.size


class Common(TypedDict):
    """The fields of `Geometry` that do not depend on the target's memory maps, ready to be passed on as keywords."""

    m_pack: int
    rows: int
    tile_rows: int
    depth: int
    warpgroups: int
    qk_stages: int
    o_phys_cols: int
    pv_mma_n: int
    band_cols: int
    o_tiles: int
    combine_stage_bytes: int
    combine_ml_bytes: int
    exchange_bytes: int
    out_bytes: int
    out_k: int
    accumulator_read_cols: int
    combine_band: int
    unit_tmem_columns: int


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """What every target derives. A part is one of the m_pack row copies of a warpgroup: thread t owns row t % rows of part t / rows.

    arch: "sm_90a" | "sm_100a"
    tile_rows: rows of a tile that carry queries; depth: head dim; warpgroups: softmax warpgroups of a CTA
    block_keys: keys of a key tile (BN); qk_stages: K sub-tiles [block_keys, 64] of a key tile
    ring_slots, slot_bytes: the ring K and V share, one sub-tile a slot
    smem_bytes, mbarriers: dynamic shared memory of the full kernel and the mbarriers in it
    o_phys_cols: columns of the 128-lane accumulator image: depth / m_pack in shared-key, depth in key-split
    pv_mma_n, o_tiles, band_cols: N of a P.V MMA, how many of them cover O, and the columns each fills (pv_mma_n / m_pack)
    tmem_columns, tmem_columns_allocated: used, and rounded up to what tcgen05.alloc gives (0 without tensor memory)
    combine_stage_bytes, combine_ml_bytes: raw O_g [m_pack, depth/4, rows, 4] f32 and (m, l) [m_pack, rows, 2] f32 of one warpgroup
    exchange_bytes: 2 warpgroups x 2 parities x 128 f32
    out_bytes, out_k: size of an output element, and how many make a 16-byte store
    accumulator_read_cols: accumulator columns of one read, at most 64: a .x64 load already takes 64 registers
    combine_band: depth columns that one part of a warpgroup produces in the combine (depth / m_pack)
    unit_tmem_columns: columns a unit kernel allocates for its accumulator image, a power of two
    """

    arch: str
    m_pack: int
    rows: int
    tile_rows: int
    depth: int
    warpgroups: int
    block_keys: int
    qk_stages: int
    ring_slots: int
    slot_bytes: int
    smem_bytes: int
    mbarriers: int
    o_phys_cols: int
    pv_mma_n: int
    band_cols: int
    o_tiles: int
    tmem_columns: int
    tmem_columns_allocated: int
    combine_stage_bytes: int
    combine_ml_bytes: int
    exchange_bytes: int
    out_bytes: int
    out_k: int
    accumulator_read_cols: int
    combine_band: int
    unit_tmem_columns: int

    @property
    def smem_limit(self) -> int:
        """Most bytes of dynamic shared memory that a CTA of the full kernel may have."""
        return SMEM_LIMIT_BYTES


def common(config: Config) -> Common:
    """The target-independent part of the geometry."""
    m_pack, rows, depth = config.m_pack, config.rows, config.ov_depth
    o_phys_cols = depth // m_pack if config.shared_key else depth
    # Key-split: layout G (m_pack 4) covers O in tiles of 64 columns, layout E (m_pack 2) in one.
    key_split_n = MAX_MMA_N if m_pack == 4 else m_pack * depth
    pv_mma_n = min(depth, MAX_MMA_N) if config.shared_key else key_split_n
    band_cols = pv_mma_n // m_pack
    out_bytes = OUT_BYTES[config.out_dtype]
    return Common(
        m_pack=m_pack,
        rows=rows,
        tile_rows=config.tile_rows or rows,
        depth=depth,
        warpgroups=config.warpgroups or 2,
        qk_stages=(config.qk_depth or depth) // SUB_TILE_DEPTH,
        o_phys_cols=o_phys_cols,
        pv_mma_n=pv_mma_n,
        band_cols=band_cols,
        o_tiles=-(-o_phys_cols // band_cols),
        combine_stage_bytes=m_pack * rows * depth * F32_BYTES,
        combine_ml_bytes=m_pack * rows * 2 * F32_BYTES,
        exchange_bytes=2 * 2 * WARPGROUP_THREADS * F32_BYTES,
        out_bytes=out_bytes,
        out_k=OUT_STORE_BYTES // out_bytes,
        accumulator_read_cols=min(MAX_ACCUMULATOR_READ_COLS, band_cols),
        combine_band=depth // m_pack,
        unit_tmem_columns=max(MIN_TMEM_ALLOCATION, 1 << (o_phys_cols - 1).bit_length()),
    )


def place(sizes: list[tuple[str, int]]) -> tuple[Region, ...]:
    """Regions one after another from 0, in the given order; empty ones are left out."""
    regions: list[Region] = []
    end = 0
    for name, size in sizes:
        if size:
            regions.append(Region(name, end, size))
            end += size
    return tuple(regions)


@cache
def _derive(config: Config, arch: str, disabled: frozenset[str]) -> Geometry:
    geometry: Geometry
    if arch == "sm_90a":
        from .geometry_sm90 import derive_sm90

        geometry = derive_sm90(config)
    else:
        from .geometry_sm100 import derive_sm100

        geometry = derive_sm100(config)
    if config.split is not None and (keys := fixed_keys(config.split)) is not None:
        remedy = f"use a multiple of {geometry.block_keys}"
        require(keys % geometry.block_keys == 0, "split-key-tiles", "split", config.split, remedy, f"{geometry.block_keys} keys on {arch}")
    return geometry


def derive(config: Config, arch: str) -> Geometry:
    """The geometry of `config` on `arch`. Raises ConfigError where a derived rule is broken or the config does not list the target."""
    try:
        require(arch in config.arch, "arch-enabled", "arch", list(config.arch), f"add {arch} to arch, or use {' or '.join(config.arch)}")
    except ConfigError as error:
        raise error.with_source(config.name) from None
    try:
        return _derive(config, arch, switched_off())
    except ConfigError as error:
        if len(config.arch) == 1:
            raise
        # Each target has its own limits: say whose these are, and that the other one can be had alone.
        raise error.on_target(arch) from None


def all_rules() -> dict[str, str]:
    """Every rule id and its sentence, those that only one target has included."""
    from . import geometry_sm90, geometry_sm100  # noqa: F401 - importing them registers their rules

    return dict(RULES)


def functions(config: Config) -> tuple[Function, ...]:
    """The device functions that the config uses, in the order of their files."""
    return ("exchange4", "level0") if config.shared_key else ("combine",)


def entry_configs(config: Config, arch: str) -> tuple[Config, ...]:
    """The config of each entry of attention.cu, by tile rows: `config` itself, or, where tile_rows is left to the launch, one for each.

    The kernels for sm_90a have a choice: tile rows are the N of their MMAs. With m_pack 2 a part has a warp for each 32 rows, so that tiles
    of fewer leave warps idle: a config can ask for them. Entries that have an SM for themselves are followed by one that shares it, where
    that gives the same results (see sharing_entry).
    """
    if arch != "sm_90a" or config.tile_rows is not None or (config.shared_key and config.m_pack != 4):
        return (config,)
    choices = WGMMA_TILE_ROWS if config.m_pack == 4 else (32, config.rows)
    entries = [config.model_copy(update={"tile_rows": rows}) for rows in choices]
    return tuple(found for entry in entries for found in (entry, _sharing(entry)) if found is not None)


def _sharing(entry: Config) -> Config | None:
    """An entry of SHARING_ROWS rows with two CTAs an SM, where one is derived and the merge of partitions stays the same."""
    if not entry.shared_key or entry.tile_rows != SHARING_ROWS or entry.ctas_per_sm is not None:
        return None
    alone = derive(entry, "sm_90a")
    shared = entry.model_copy(update={"ctas_per_sm": 2})
    try:
        geometry = derive(shared, "sm_90a")
    except ConfigError:
        # A ring that is asked for, or two warpgroups, leave no room.
        return None
    same = (getattr(alone, fact, 1) == getattr(geometry, fact, 1) for fact in ("warpgroups", "max_cluster"))
    return shared if getattr(alone, "ctas_per_sm", 1) == 1 and all(same) else None


def sharing_entry(config: Config, arch: str, entry: Config) -> Config:
    """The entry of `entry`'s tile rows whose CTAs share an SM, or itself where there is none. Both give the same bits."""
    others = (other for other in entry_configs(config, arch) if other.tile_rows == entry.tile_rows and other != entry)
    return next(others, entry)


def symbol(config: Config, arch: str, kind: str = "attention") -> str:
    """The name of a kernel: `fa4_attention_d512_m4r32_sk_bf16_sm100a`; what differs from the defaults is spelled out before the target."""
    parts = [
        f"fa4_{kind}",
        f"d{config.ov_depth}",
        f"m{config.m_pack}r{config.rows}",
        "sk" if config.shared_key else "ks",
        SHORT_DTYPES[config.dtype],
    ]
    if config.out_dtype != "bfloat16":
        parts.append(f"o{SHORT_DTYPES[config.out_dtype]}")
    if config.mask != "none":
        parts.append(config.mask)
    if not config.use_fma:
        parts.append("nofma")
    if config.rescale != "lazy":
        parts.append(config.rescale)
    flags = {"len": config.key_lengths, "ragged": config.ragged_queries, "sinks": config.sinks, "list": config.page_list}
    if config.page_size is not None:
        parts.append(f"p{config.page_size}")
    parts += [flag for flag, on in flags.items() if on]
    if config.window is not None:
        parts.append(f"win{config.window}")
    if config.softcap is not None:
        parts.append("cap" + f"{config.softcap:g}".replace(".", "p").replace("-", "m").replace("+", ""))
    if config.kv_dtype is not None:
        parts.append("kv8" if config.kv_scale == "head" else "kv8page")
    given = {"b": config.block_keys, "s": config.ring_slots, "w": config.warpgroups, "t": config.tile_rows, "g": config.group}
    if arch == "sm_90a":
        given["c"] = config.ctas_per_sm
    parts += [f"{letter}{value}" for letter, value in given.items() if value is not None]
    parts.append(arch.replace("_", ""))
    return "_".join(parts)


__all__ = [
    "ARCHES",
    "WGMMA_TILE_ROWS",
    "Common",
    "Function",
    "Geometry",
    "Region",
    "all_rules",
    "common",
    "derive",
    "entry_configs",
    "functions",
    "place",
    "symbol",
]
