"""Who does what in the full kernels and the unit kernels: roles, who arrives and who waits at each barrier, the walk of the ring, and what
lies where until when. Offsets, counts and bytes are the geometry's; `fa4gen inspect` shows these tables, and the tests compare them with
what the emulator sees the compiled kernels do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .config import WARPGROUP_THREADS, Config
from .geometry import F32_BYTES, MBARRIER_BYTES, SUB_TILE_DEPTH, Geometry, Region, place
from .geometry_sm90 import WARP_THREADS, Sm90Fp8Geometry, Sm90Geometry, Sm90KeySplitGeometry
from .geometry_sm100 import CONVERT_WARPS, SCALE_BUFFERS, Sm100Fp8Geometry, Sm100Geometry

WARPS = WARPGROUP_THREADS // WARP_THREADS  # of a warpgroup
MERGE_BARRIER_SM90 = 4
TILE_BARRIER_SM90 = 2
LEVEL2_BARRIER_SM100 = 3
HARNESS_BARRIER = 15

How = Literal["arrive", "expect_tx", "commit"]


@dataclass(frozen=True)
class Role:
    """Warps of the full kernel that run one function. registers: a thread's after setmaxnreg, 0 where the launch's own are kept."""

    name: str
    first_warp: int
    warps: int
    registers: int
    task: str

    @property
    def idle(self) -> bool:
        return self.name == IDLE


IDLE = "idle"


@dataclass(frozen=True)
class Arrival:
    """`count` arrivals a phase of one role: by mbarrier.arrive of its warps or threads, one that announces bytes, or a commit behind MMAs.

    each_cta: as many come from every CTA of the cluster.
    """

    role: str
    count: int
    how: How
    each_cta: bool = False

    def total(self, cluster: int) -> int:
        """Arrivals in a launch with clusters of so many CTAs."""
        return self.count * (cluster if self.each_cta else 1)


@dataclass(frozen=True)
class Mbarrier:
    """An mbarrier of the full kernel.

    offset: bytes in shared memory. arrivals: what completes a phase, beside `tx_bytes` bytes that asynchronous copies bring (0: none;
    of Q for a full tile); waits: roles. phase: what the phases number. means: what a completed phase says. split_only: used only where
    keys are split. in_cluster: used only where partitions are merged in clusters (True), or only where not (None: either way).
    """

    name: str
    offset: int
    arrivals: tuple[Arrival, ...]
    tx_bytes: int
    waits: tuple[str, ...]
    phase: str
    means: str
    split_only: bool = False
    in_cluster: bool | None = None

    @property
    def count(self) -> int:
        """Arrivals of a phase without clusters: what mbarrier.init is given."""
        return self.total(1)

    def total(self, cluster: int) -> int:
        """The same in a launch with clusters of so many CTAs."""
        return sum(arrival.total(cluster) for arrival in self.arrivals)


@dataclass(frozen=True)
class NamedBarrier:
    """One use of a named barrier: its id, the threads it counts, the roles they belong to, and what it orders."""

    number: int
    threads: int
    roles: tuple[str, ...]
    orders: str


@dataclass(frozen=True)
class RingUse:
    """One use of a ring slot: what the producer brings, and what releases it.

    position: in the walk of its ring; slot: of all slots; parity: of the phase of `full` that announces it. operand: "K" or "V"; tile: key
    tile; sub_tile: of that tile. key, depth: what the copy begins at, a key of the tile and a depth column.
    """

    ring: int
    position: int
    slot: int
    parity: int
    operand: Literal["K", "V"]
    tile: int
    sub_tile: int
    key: int
    depth: int
    released: str


@dataclass(frozen=True)
class Content:
    """What lies in a region, who writes and reads it, and when it is dead."""

    region: Region
    holds: str
    writes: str
    reads: str
    until: str


# --- roles ------------------------------------------------------------------------------------------------------------


def softmax_role(geo: Geometry, index: int) -> str:
    """The name of the role that works on scores, "softmax" on sm_100a, "attend" on sm_90a, and which where there are several: they are
    warpgroups, in the key-split kernel for sm_90a parts of one.
    """
    name = "softmax" if isinstance(geo, Sm100Geometry) else "attend"
    return f"{name} {index}" if _consumers(geo) > 1 else name


def rings(geo: Geometry) -> int:
    """Rings of the full kernel: one on sm_100a, on sm_90a one for each warpgroup, in key-split for each part."""
    return 1 if isinstance(geo, Sm100Geometry) else _consumers(geo)


def _consumers(geo: Geometry) -> int:
    return geo.m_pack if isinstance(geo, Sm90KeySplitGeometry) else geo.warpgroups


def _consumer_warps(geo: Geometry) -> int:
    return geo.part_warps if isinstance(geo, Sm90KeySplitGeometry) else WARPS


def _softmax_roles(geo: Geometry) -> tuple[str, ...]:
    return tuple(softmax_role(geo, index) for index in range(_consumers(geo)))


def _producer(geo: Sm90Geometry, ring: int) -> str:
    return f"load K V {ring}" if _consumers(geo) > 1 else "load K V"


def roles(geo: Geometry) -> tuple[Role, ...]:
    """The roles of the full kernel, in the order of their warps; warps that leave at once are "idle"."""
    if isinstance(geo, Sm100Geometry):
        task = "scores to probabilities; at the end O and LSE"
        result = [Role(name, WARPS * w, WARPS, geo.softmax_registers, task) for w, name in enumerate(_softmax_roles(geo))]
        first = WARPS * geo.warpgroups
        loads = "Q, K and V by TMA, " + ("one warp" if geo.paged else "one thread")
        clear = [Role("clear", first + WARPS + 2, 1, geo.issue_registers, "zeros in V past the sequence's end")] if geo.clears else []
        if geo.converts:
            clear = [Role("convert", first + WARPS + 2, CONVERT_WARPS, geo.issue_registers, "K and V from 8 bits to 16")]
        idle = first + WARPS + 2 + sum(role.warps for role in clear)
        left = first + 2 * WARPS - idle
        idles = [Role(IDLE, idle, left, geo.issue_registers, "complete the warpgroup")] if left else []
        scales = "; looks up the scales of pages" if _scale_runs(geo) else ""
        return (
            *result,
            Role("correct", first, WARPS, geo.correction_registers, f"rescales O when a row maximum has grown{scales}"),
            Role("load", first + WARPS, 1, geo.issue_registers, loads),
            Role("multiply", first + WARPS + 1, 1, geo.issue_registers, "issues every MMA, one thread"),
            *clear,
            *idles,
        )
    assert isinstance(geo, Sm90Geometry)
    task = "scores, probabilities and O of its key tiles; at the end O and LSE"
    warps, producers = _consumer_warps(geo), _consumers(geo)
    result = [Role(name, warps * i, warps, geo.consumer_registers, task) for i, name in enumerate(_softmax_roles(geo))]
    first = WARPS * geo.warpgroups
    for ring in range(producers):
        result.append(Role(_producer(geo, ring), first + ring, 1, geo.producer_registers, "fills a ring with K and V by TMA, one thread"))
    result.append(Role("load Q", first + producers, 1, geo.producer_registers, "Q of every item by TMA, one thread"))
    left = geo.producer_warps - producers - 1
    if left:
        result.append(Role(IDLE, first + producers + 1, left, geo.producer_registers, "complete the warpgroup"))
    return tuple(result)


def role_of_warp(geo: Geometry, warp: int) -> Role:
    """The role that a warp of the CTA runs. Raises KeyError for a warp that the CTA does not have."""
    for role in roles(geo):
        if role.first_warp <= warp < role.first_warp + role.warps:
            return role
    raise KeyError(warp)


# --- barriers ---------------------------------------------------------------------------------------------------------


def mbarriers(geo: Geometry) -> tuple[Mbarrier, ...]:
    """Every mbarrier of the full kernel, in the order of their addresses."""
    result = _mbarriers_sm100(geo) if isinstance(geo, Sm100Geometry) else _mbarriers_sm90(_sm90(geo))
    return tuple(sorted(result, key=lambda barrier: barrier.offset))


def _sm90(geo: Geometry) -> Sm90Geometry:
    assert isinstance(geo, Sm90Geometry)
    return geo


def _mbarriers_sm100(geo: Sm100Geometry) -> list[Mbarrier]:
    def at(region: str, index: int) -> int:
        return geo.offset(region) + index * MBARRIER_BYTES

    load, multiply, correct, convert = "load", "multiply", "correct", "convert"
    commit = (Arrival(multiply, 1, "commit"),)
    use, announce = "use of the slot", (Arrival(load, 1, "expect_tx"),)
    landed = "the slot's copy has landed; with the first key tile's K slices also those of Q, whose bytes add"
    result = []
    if geo.converts:
        both_warps = (Arrival(convert, CONVERT_WARPS, "arrive"),)
        for slot in range(geo.copy_slots):
            where = at("mbar_raw_full", slot)
            result.append(Mbarrier(f"raw_full[{slot}]", where, announce, geo.copy_slot_bytes, (convert,), use, landed))
            where, means = at("mbar_raw_empty", slot), "the slot is read"
            result.append(Mbarrier(f"raw_empty[{slot}]", where, both_warps, 0, (load,), use, means))
    for slot in range(geo.ring_slots):
        where = at("mbar_ring_full", slot)
        if geo.converts:
            means = "the slot has 16 bits"
            result.append(Mbarrier(f"ring_full[{slot}]", where, both_warps, 0, (multiply,), use, means))
        else:
            result.append(Mbarrier(f"ring_full[{slot}]", where, announce, geo.slot_bytes, (multiply,), use, landed))
        means = "the MMAs have read the slot"
        if geo.clears:
            ends = "V of a tile that reaches past the sequence's end has landed; clear then completes ring_full"
            result.append(
                Mbarrier(f"ring_landed[{slot}]", at("mbar_ring_landed", slot), announce, geo.slot_bytes, ("clear",), "such use", ends)
            )
        filler = convert if geo.converts else load
        result.append(Mbarrier(f"ring_empty[{slot}]", at("mbar_ring_empty", slot), commit, 0, (filler,), use, means))
    for w, softmax in enumerate(_softmax_roles(geo)):
        tile = f"key tile of {softmax}"
        means = "S is complete, and after the last key tile every MMA is"
        result.append(Mbarrier(f"s_full[{w}]", at("mbar_s_full", w), commit, 0, (softmax,), f"{tile}, and the end", means))
        both = (Arrival(softmax, WARPS, "arrive"), Arrival(correct, WARPS, "arrive"))
        means = "S is read, stage 0 of P is written, O is rescaled"
        first = w * geo.pv_stages
        result.append(Mbarrier(f"p_ready[{w}][0]", at("mbar_p_ready", first), both, 0, (multiply,), tile, means))
        own = (Arrival(softmax, WARPS, "arrive"),)
        result.append(Mbarrier(f"p_ready[{w}][1]", at("mbar_p_ready", first + 1), own, 0, (multiply,), tile, "stage 1 of P is written"))
        later = f"{tile} but the first"
        result.append(
            Mbarrier(f"correction[{w}][0]", at("mbar_correction", 2 * w), own, 0, (correct,), later, "rescale factors are written")
        )
        back = (Arrival(correct, WARPS, "arrive"),)
        result.append(
            Mbarrier(f"correction[{w}][1]", at("mbar_correction", 2 * w + 1), back, 0, (softmax,), later, "rescale factors are read")
        )
        waits = (correct,) if geo.shared_key else (correct, multiply)
        means = "P.V is done" + ("" if geo.shared_key else ": O is free for correction, and P for the next S over it")
        result.append(Mbarrier(f"o_full[{w}]", at("mbar_o_full", w), commit, 0, waits, tile, means))
        for buffer in range(SCALE_BUFFERS if _scale_runs(geo) else 0):
            where, means = at("mbar_scales", SCALE_BUFFERS * w + buffer), "scales of a key tile are written"
            result.append(Mbarrier(f"scales[{w}][{buffer}]", where, back, 0, (softmax,), f"every other {tile}", means))
    return result


def _scale_runs(geo: Sm100Geometry) -> int:
    """Runs of keys in a key tile that have scales of their own."""
    return geo.scale_runs if isinstance(geo, Sm100Fp8Geometry) else 0


def _mbarriers_sm90(geo: Sm90Geometry) -> list[Mbarrier]:
    def at(region: str, index: int) -> int:
        return geo.offset(region) + index * MBARRIER_BYTES

    consumers = _softmax_roles(geo)
    key_split = isinstance(geo, Sm90KeySplitGeometry)
    # Shared-key: the threads, since those that merge partitions give a slot back one by one.
    readers = geo.row_warps if isinstance(geo, Sm90KeySplitGeometry) else WARPGROUP_THREADS
    result = []
    for slot in range(geo.ring_slots):
        w = slot // geo.slots_per_ring
        producer, consumer = _producer(geo, w), consumers[w]
        announce = (Arrival(producer, 1, "expect_tx"),)
        result.append(
            Mbarrier(
                f"full[{slot}]",
                at("mbar_full", slot),
                announce,
                geo.copy_bytes if isinstance(geo, Sm90Fp8Geometry) else geo.slot_bytes,
                (consumer,),
                "use of the slot",
                "the slot's copy has landed",
            )
        )
        release: tuple[Arrival, ...] = (Arrival(consumer, readers, "arrive"),)
        means = "the warps have read the slot" if isinstance(geo, Sm90Fp8Geometry) else "the warps' MMAs have read the slot"
        result.append(Mbarrier(f"empty[{slot}]", at("mbar_empty", slot), release, 0, (producer,), "use of the slot", means))
    for buffer in range(geo.q_buffers):
        # In a cluster the second buffer takes what the other CTAs send.
        in_cluster = False if buffer and geo.max_cluster > 1 else None
        announce = (Arrival("load Q", 1, "expect_tx"),)
        where, means = at("mbar_q_full", buffer), "Q has landed"
        result.append(Mbarrier(f"q_full[{buffer}]", where, announce, geo.q_bytes, consumers, "item", means, in_cluster=in_cluster))
        release = tuple(Arrival(consumer, _consumer_warps(geo), "arrive") for consumer in consumers)
        where, means = at("mbar_q_empty", buffer), "Q is read, and the O staged over it is stored" if geo.out_region == "q" else "Q is read"
        result.append(Mbarrier(f"q_empty[{buffer}]", where, release, 0, ("load Q",), "item", means, in_cluster=in_cluster))
    if key_split:
        announce = (Arrival(consumers[0], 1, "expect_tx"),)
        means = "O of some partitions, first also all their LSEs, have landed, as many bytes as there are"
        result.append(Mbarrier("merge", at("mbar_merge", 0), announce, 0, consumers, "copy in a merge", means, split_only=True))
        return result
    clusters = any(region.name == "mbar_ready" for region in geo.smem_map)
    for w, consumer in enumerate(consumers):
        own = (Arrival(consumer, 1, "arrive"),)
        means = "whether this CTA merges the partitions is decided"
        where, waits, in_cluster = at("mbar_verdict", w), (_producer(geo, w),), False if clusters else None
        result.append(Mbarrier(f"verdict[{w}]", where, own, 0, waits, "partition", means, split_only=True, in_cluster=in_cluster))
    if clusters:
        (consumer,), phase = consumers, "partition"
        announce = (Arrival(consumer, 1, "expect_tx"),)
        means = "what the other CTAs of the cluster send has landed, their slices of O and LSEs, as many bytes as there are"
        result.append(Mbarrier("ready", at("mbar_ready", 0), announce, 0, consumers, phase, means, split_only=True, in_cluster=True))
        all_ctas = (Arrival(consumer, 1, "arrive", each_cta=True),)
        means = "every CTA of the cluster has read what was sent to it"
        result.append(Mbarrier("read", at("mbar_read", 0), all_ctas, 0, consumers, phase, means, split_only=True, in_cluster=True))
    return result


def named_barriers(config: Config, geo: Geometry) -> tuple[NamedBarrier, ...]:
    """The named barriers of the full kernel, one entry for each use."""
    consumers = _softmax_roles(geo)
    two = geo.warpgroups == 2
    start = tuple(role.name for role in roles(geo))
    if isinstance(geo, Sm100Geometry):
        result = [NamedBarrier(0, geo.threads, start, "start: mbarriers and tensor memory before the roles part")]
        for w, softmax in enumerate(consumers):
            if geo.shared_key:
                result.append(NamedBarrier(w, WARPGROUP_THREADS, (softmax,), "exchange: row maxima each key tile, row sums at the end"))
            else:
                result.append(
                    NamedBarrier(w, WARPGROUP_THREADS, (softmax,), "combine or level 1: O and (m, l) of all parts before they are read")
                )
        result.append(
            NamedBarrier(0, WARPGROUP_THREADS, consumers[:1], "workspace written; then the output tile staged, tensor memory read")
        )
        if two:
            result.append(NamedBarrier(LEVEL2_BARRIER_SM100, 2 * WARPGROUP_THREADS, consumers, "level 2: a window before it is read"))
        return tuple(result)
    geo = _sm90(geo)
    result = [NamedBarrier(0, geo.threads, start, "start: mbarriers before the roles part")]
    if isinstance(geo, Sm90KeySplitGeometry):
        orders = "combine or level 1: O and (m, l) of all parts before they are read"
        result.append(NamedBarrier(0, WARPGROUP_THREADS, consumers, orders))
        result.append(NamedBarrier(1, WARPGROUP_THREADS, consumers, "O tile staged; with split keys also the workspace of a partition"))
        return tuple(result)
    when = "when a row has outgrown the last maxima" if config.rescale == "lazy" else "each key tile"
    for w, attend in enumerate(consumers):
        result.append(NamedBarrier(w, WARPGROUP_THREADS, (attend,), f"exchange: row maxima {when}, row sums at the end"))
        vote = ", with the vote on an exchange" if config.rescale == "lazy" else ""
        result.append(
            NamedBarrier(TILE_BARRIER_SM90 + w, WARPGROUP_THREADS, (attend,), f"P of a key tile, at the end O, in shared memory{vote}")
        )
    if two:
        result.append(
            NamedBarrier(
                MERGE_BARRIER_SM90, 2 * WARPGROUP_THREADS, consumers, "merge of the warpgroups, or an item of one alone; partitions"
            )
        )
    return tuple(result)


# --- the ring ---------------------------------------------------------------------------------------------------------


def ring_walk(geo: Geometry, tiles: int) -> tuple[RingUse, ...]:
    """The uses of the slots that copies fill over `tiles` whole key tiles of one query tile: each ring in the order in which it is filled,
    which is also the order in which it is read and released. On sm_100a 16 bits made of 8 take the same walk of their own ring.
    """
    if isinstance(geo, Sm100Geometry):
        return tuple(_walk_sm100(geo, tiles))
    return tuple(_walk_sm90(_sm90(geo), tiles))


def _walk_sm100(geo: Sm100Geometry, tiles: int) -> list[RingUse]:
    result: list[RingUse] = []

    def use(operand: Literal["K", "V"], tile: int, sub_tile: int, key: int, depth: int, released: str) -> None:
        position = len(result)
        slot, parity = position % geo.copy_slots, position // geo.copy_slots & 1
        if geo.converts:
            released = f"conversion for {released}"
        result.append(RingUse(0, position, slot, parity, operand, tile, sub_tile, key, depth, released))

    held = not geo.shared_key and not geo.layout_e
    for step in range(tiles + geo.warpgroups):
        tile = step - geo.warpgroups
        if tile >= 0:
            for part in range(geo.v_slots):
                chunk, o_tile = divmod(part, geo.o_tiles)
                key = chunk * geo.pv_key_chunk if geo.pv_chunks > 1 else 0
                depth = 0 if geo.layout_e else o_tile * geo.v_box_chunks * SUB_TILE_DEPTH
                whole = held and not geo.converts
                released = f"P.V of tile {tile}" + (", second half of P: the whole V tile is held" if whole else f", sub-tile {part}")
                use("V", tile, part, key, depth, released)
        if step < tiles:
            for stage in range(geo.qk_stages):
                use("K", step, stage, 0, stage * SUB_TILE_DEPTH, f"S of tile {step}, depth slice {stage}")
    return result


def _slot_columns(geo: Sm90Geometry) -> int:
    """Depth columns of a ring slot."""
    return geo.slot_chunks * (geo.row_bytes if isinstance(geo, Sm90Fp8Geometry) else SUB_TILE_DEPTH)


def _walk_sm90(geo: Sm90Geometry, tiles: int) -> list[RingUse]:
    result: list[RingUse] = []
    key_split = isinstance(geo, Sm90KeySplitGeometry)
    for ring in range(_consumers(geo)):
        position = 0
        for tile in range(ring, tiles, _consumers(geo)):
            for part in range(2 * geo.tile_slots):
                round_, slot = divmod(position, geo.slots_per_ring)
                sub_tile = part % geo.tile_slots
                depth = sub_tile * _slot_columns(geo)
                is_k = part < geo.tile_slots
                product = "S" if is_k else "P.V"
                when = "" if key_split else ", once the next slot's MMAs are issued or all are done"
                if isinstance(geo, Sm90Fp8Geometry):
                    when = ", once the warps have its bytes in registers"
                released = f"{product} of tile {tile}{when}"
                result.append(
                    RingUse(
                        ring,
                        position,
                        ring * geo.slots_per_ring + slot,
                        round_ & 1,
                        "K" if is_k else "V",
                        tile,
                        sub_tile,
                        0,
                        depth,
                        released,
                    )
                )
                position += 1
    return result


# --- what lies where --------------------------------------------------------------------------------------------------


def tmem_contents(geo: Geometry) -> tuple[Content, ...]:
    """Tensor memory of the full kernel, in columns; none on sm_90a."""
    if not isinstance(geo, Sm100Geometry):
        return ()
    result = []
    for region in geo.tmem_map:
        w = int(region.name[1:])
        softmax = softmax_role(geo, w)
        if region.name.startswith("S"):
            keys = f"part g: scores of keys {geo.s_cols} g to {geo.s_cols} g + {geo.s_cols - 1}"
            if geo.shared_key:
                result.append(Content(region, keys, "multiply (S = Q.K)", softmax, f"{softmax} has read it into registers"))
            else:
                holds = f"{keys}; then P over its first {geo.s_cols // 2} columns"
                result.append(
                    Content(region, holds, f"multiply (S = Q.K), {softmax} (P)", f"{softmax} (S), multiply (P)", "P.V has read P")
                )
        else:
            bands = f"depth columns {geo.band_cols} g to {geo.band_cols} g + {geo.band_cols - 1} of O"
            if geo.o_tiles > 1:
                bands += f", of each of {geo.o_tiles} O tiles"
            holds = f"part g: {bands}" if geo.shared_key else f"part g: all {geo.depth} depth columns of its own key partition"
            result.append(Content(region, holds, "multiply (P.V), correct", f"correct, {softmax} (end)", "the epilogue has read it"))
    return tuple(result)


def smem_contents(config: Config, geo: Geometry) -> tuple[Content, ...]:
    """Shared memory of the full kernel, in bytes."""
    table = _smem_sm100(geo) if isinstance(geo, Sm100Geometry) else _smem_sm90(_sm90(geo), config)
    regions = geo.smem_map if isinstance(geo, (Sm90Geometry, Sm100Geometry)) else ()
    result = []
    for region in regions:
        inside = [barrier for barrier in mbarriers(geo) if region.offset <= barrier.offset < region.end]
        if inside:
            writes = dict.fromkeys(_family(arrival.role) for barrier in inside for arrival in barrier.arrivals)
            reads = dict.fromkeys(_family(role) for barrier in inside for role in barrier.waits)
            means = "; ".join(dict.fromkeys(barrier.means for barrier in inside))
            result.append(
                Content(
                    region,
                    f"{len(inside)} mbarrier{'s' if len(inside) > 1 else ''}: {means}",
                    ", ".join(writes),
                    ", ".join(reads),
                    "the end",
                )
            )
        else:
            result.append(Content(region, *table[region.name]))
    return tuple(result)


def _family(role: str) -> str:
    """A role without its warpgroup."""
    return role.rstrip("0123456789").strip()


def _smem_sm100(geo: Sm100Geometry) -> dict[str, tuple[str, str, str, str]]:
    threads = WARPGROUP_THREADS
    last = "the last MMA"
    v = (
        f"[{geo.v_box_keys} keys][{geo.v_box_chunks * SUB_TILE_DEPTH} depth]"
        if geo.v_boxes == 1
        else f"{geo.v_boxes} x [{geo.v_box_keys} keys][{geo.v_box_chunks * SUB_TILE_DEPTH} depth]"
    )
    sub_tiles = f"K [{geo.block_keys} keys][{SUB_TILE_DEPTH} depth] or V {v}, swizzled"
    filler = "convert" if geo.converts else "load (TMA)"
    scaled = f"{geo.warpgroups} x {SCALE_BUFFERS} x [3][{_scale_runs(geo)} runs of keys] float32: of K, log2 and inverse of V's"
    return {
        "q": (
            f"Q tile [{geo.rows} rows][{geo.depth}], in swizzled pieces of 64 columns",
            f"load (TMA), {filler}" if geo.converts else filler,
            "multiply",
            last,
        ),
        "ring": (f"{geo.ring_slots} slots: {sub_tiles}", filler, "multiply", f"its MMAs; after {last} the epilogue's"),
        "raw": (f"{geo.copy_slots} slots of 8 bits: {sub_tiles}", "load (TMA)", "convert", f"conversion; after {last} the epilogue's"),
        "scales": (scaled, "correct", "softmax", "softmax has read them"),
        "p": (f"{geo.warpgroups} x P [{geo.rows} rows][{geo.block_keys} keys], swizzled", "softmax", "multiply", "P.V of its key tile"),
        "exchange": (
            f"{geo.warpgroups} x 2 parities x [{threads}] float32: partial maxima, then sums",
            "softmax",
            "softmax",
            "the row sums",
        ),
        "correction": (f"{geo.warpgroups} x [{threads}] float32: factors of O", "softmax", "correct", "correct has read them"),
        "tmem_address": ("first column of the tensor memory", "warp 0 (tcgen05.alloc)", "every warp", "the roles part"),
    }


def _smem_sm90(geo: Sm90Geometry, config: Config) -> dict[str, tuple[str, str, str, str]]:
    rows, depth = geo.tile_rows, geo.depth
    columns = _slot_columns(geo)
    staged = " O tile over it at the end" if geo.out_region == "q" else ""
    until = "the item's last S" + (f";{staged}" if staged else "")
    merge = "level 2" + ("; O tile over it at the end" if geo.out_region == "merge_o" else "")
    several = f"{rings(geo)} rings" if rings(geo) > 1 else "1 ring"
    pieces = f"; merging partitions: O, {geo.piece_bytes:,} bytes a slot" if geo.piece_bytes else ""
    staged_rows = geo.rows if isinstance(geo, Sm90KeySplitGeometry) else rows
    weights = f"[{geo.max_partitions} partitions][{rows if isinstance(geo, Sm90KeySplitGeometry) else WARP_THREADS}]"
    return {
        "stage": (
            f"raw O of {geo.m_pack} parts, [{depth} / 4][{geo.rows} rows][4] float32 each; merging partitions: their O",
            "attend, bulk copies",
            "attend",
            "the item's end",
        ),
        "maxsum": (f"[{geo.m_pack}][{geo.rows} rows] (m, l) float32", "attend", "attend", "combine or level 1"),
        "ring": (
            f"{several} of {geo.slots_per_ring} slots: K or V [{geo.block_keys} keys][{columns} depth], swizzled{pieces}",
            "load K V (TMA)",
            "attend",
            "its MMAs",
        ),
        "q": (f"{geo.q_buffers} x Q tile [{rows} rows][{depth}], in swizzled pieces of 64 columns", "load Q (TMA)", "attend", until),
        "landing": (
            "slices of O that the other CTAs of a cluster send, float32, from the second Q tile on, which is not used then",
            "attend of the other CTAs",
            "attend",
            "the partitions' merge",
        ),
        "p": (
            f"{geo.warpgroups} x {geo.p_buffers} x P [{rows} rows][{geo.block_keys} keys], swizzled",
            "attend",
            "attend (wgmma)",
            "its P.V",
        ),
        "out": (f"O tile [{staged_rows} rows][{depth}] {config.out_dtype}", "attend", "TMA store", "the item's end"),
        "merge_o": (f"O that the other warpgroup finishes, [{rows * depth}] float32", "attend", "attend", merge),
        "merge_ml": (f"2 x [{WARP_THREADS}] (m, l) float32", "attend", "attend", "level 2"),
        "exchange": ("2 warpgroups x 2 parities x [128] float32: partial maxima, then sums", "attend", "attend", "the row sums"),
        "weights": (f"{weights} float32: LSE of each", "attend", "attend", "the partitions' merge"),
        "last": (
            "whether this CTA merges the partitions: for the consumers, for each producer",
            "attend",
            "attend, load K V",
            "the item's end",
        ),
    }


def epilogue(geo: Geometry) -> tuple[Content, ...]:
    """What the epilogue stages over memory that the key loop no longer needs, with offsets in shared memory."""
    if isinstance(geo, Sm100Geometry):
        softmax = _softmax_roles(geo)
        table = {
            "out": (f"O tile [{geo.rows} rows][{geo.depth}], {geo.out_bytes} bytes each", softmax[0], "TMA store", "the end"),
            "windows": (
                f"{geo.level2_tiles} x [128 threads][{geo.level2_cols}] float32: columns of {softmax[-1]}",
                softmax[-1],
                softmax[0],
                "level 2",
            ),
            "window_ml": (f"[{geo.rows} rows] (m, l) float32 of {softmax[-1]}", softmax[-1], softmax[0], "level 2"),
        }
        for w, name in enumerate(softmax):
            table[f"stage{w}"] = (f"raw O of {geo.m_pack} parts, [{geo.depth} / 4][{geo.rows} rows][4] float32 each", name, name, "level 1")
            table[f"maxsum{w}"] = (f"[{geo.m_pack}][{geo.rows} rows] (m, l) float32", name, name, "level 1")
        return tuple(Content(region, *table[region.name]) for region in geo.arena_map)
    geo = _sm90(geo)
    if geo.out_region == "out":
        return ()
    at = Region("out", geo.offset(geo.out_region), geo.tile_rows * geo.depth * geo.out_bytes)
    text = f"O tile [{geo.tile_rows} rows][{geo.depth}], over {'the Q buffer of the item' if geo.out_region == 'q' else geo.out_region}"
    return (Content(at, text, "attend", "TMA store", "the item's end"),)


# --- unit kernels -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unit:
    """A unit kernel's memory and named barriers. smem: dynamic shared memory; static_bytes of it beside; tmem_columns: allocated."""

    entry: str
    static: tuple[Region, ...]
    dynamic: tuple[Region, ...]
    tmem: tuple[Region, ...]
    tmem_allocated: int
    barriers: tuple[NamedBarrier, ...]


def units(config: Config, geo: Geometry) -> tuple[Unit, ...]:
    """The unit kernels of a config: their shared and tensor memory and named barriers."""
    on_sm100 = geo.tmem_columns > 0
    image_bytes = 0 if on_sm100 else WARPGROUP_THREADS * geo.o_phys_cols * F32_BYTES
    address = place([("tmem_address", 4)]) if on_sm100 else ()
    tmem = place([("O", geo.o_phys_cols)]) if on_sm100 else ()
    allocated = geo.unit_tmem_columns if on_sm100 else 0
    warpgroup = ("the CTA",)
    harness = NamedBarrier(HARNESS_BARRIER, WARPGROUP_THREADS, warpgroup, "harness: allocation before use, loads before it is freed")
    if config.shared_key:
        exchange = tuple(
            NamedBarrier(w, WARPGROUP_THREADS, (f"warpgroup {w}",), "exchange: partial values before they are read") for w in range(2)
        )
        buffers = place([("xchg", geo.exchange_bytes)])
        entries = ("unit_exchange4_max", "unit_exchange4_add", "unit_exchange4_loop")
        level0 = Unit("unit_level0", address, place([("o_image", image_bytes)]), tmem, allocated, (harness,) if on_sm100 else ())
        return (*(Unit(entry, buffers, (), (), 0, exchange) for entry in entries), level0)
    out_bytes = geo.rows * geo.depth * geo.out_bytes
    dynamic = place([("stage", geo.combine_stage_bytes), ("maxsum", geo.combine_ml_bytes), ("out", out_bytes), ("o_image", image_bytes)])
    combine = NamedBarrier(0, WARPGROUP_THREADS, warpgroup, "combine: O and (m, l) of all parts before they are read")
    orders = "harness: allocation before use, loads before it is freed, " if on_sm100 else "harness: "
    copy = NamedBarrier(HARNESS_BARRIER, WARPGROUP_THREADS, warpgroup, f"{orders}the output tile before it is copied")
    return (Unit("unit_combine", address, dynamic, tmem, allocated, (combine, copy)),)


__all__ = [
    "Arrival",
    "Content",
    "Mbarrier",
    "NamedBarrier",
    "RingUse",
    "Role",
    "Unit",
    "epilogue",
    "mbarriers",
    "named_barriers",
    "ring_walk",
    "rings",
    "role_of_warp",
    "roles",
    "smem_contents",
    "softmax_role",
    "tmem_contents",
    "units",
]
