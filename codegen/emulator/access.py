"""Loads and stores of lanes in every state space, with bounds, alignment, initialisation and race checks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import hazards as hz
from .cluster import RANK_SHIFT, owner_of
from .decode import Code
from .hazards import Clock
from .machine import LANES, Cta, Warp
from .memory import LOCAL_WINDOW, PARAM_WINDOW, POISON32, SHARED_START, SHARED_WINDOW, Mapping
from .ptx import PtxError

Array = NDArray[Any]
Int64 = NDArray[np.int64]

_POISON: dict[int, Any] = {1: np.uint8(0xFF), 2: np.uint16(0x7FFF), 4: np.uint32(POISON32), 8: np.uint64(POISON32 << 32 | POISON32)}
_TYPES: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_STEPS = {n: np.arange(n, dtype=np.int64) for n in (1, 2, 4, 8, 16, 32)}
_WINDOW_SHIFT = 40


def _any(flags: Array) -> bool:
    return b"\x01" in flags.tobytes()


def shared_place(w: Warp, address: int, owner: Cta | None = None) -> str:
    """A shared-memory address as an offset, with the CTA when it is not the warp's own."""
    place = w.cta.launch.regions.shared(address)
    return place if owner is None or owner is w.cta else f"{place} of CTA {owner.index}"


def region(address: int, space: str, w: Warp) -> str:
    """An address as space+offset."""
    if space == "shared":
        return shared_place(w, address)
    if space == "global":
        return f"global {w.cta.launch.memory.nearest(address).split(',')[0]}"
    return f"{space}+{address:#x}"


# ---------------------------------------------------------------------------------------------------------- shared memory


def shared_faults(
    w: Warp, code: Code, address: Int64, lanes: Int64, size: int, write: bool, owner: Cta | None = None
) -> NDArray[np.bool_] | None:
    """Report lanes that are out of bounds or misaligned; the lanes that may go on, or None for all. owner: whose shared memory it is."""
    cta = w.cta if owner is None else owner
    outside = (address < SHARED_START) | (address > cta.shared_end - size)
    crooked = (address & (size - 1)) != 0
    if not _any(outside) and not _any(crooked):
        return None
    verb = "write" if write else "read"
    crooked &= ~outside
    for flags, kind in ((outside, "out_of_bounds"), (crooked, "misaligned")):
        if _any(flags):
            place = int(flags.argmax())
            at = int(address[place])
            limit = (
                f"the launch has {cta.shared_end - SHARED_START} bytes of shared memory"
                if kind == "out_of_bounds"
                else f"the access needs a multiple of {size}"
            )
            cta.report(
                kind,
                f"{verb} of {size} bytes at {shared_place(w, at, owner)} by {w.name} lane {int(lanes[place])} "
                f"(PTX line {code.line}): {limit}",
                code,
                w,
                int(lanes[place]),
                at,
            )
    good: NDArray[np.bool_] = ~(outside | crooked)
    return good


def race_message(w: Warp, code: Code, verb: str, place: str, lane: int, other: hz.Access, who: str | None = None) -> str:
    return (
        f"{verb} of {place} by {who or w.name} lane {lane} (PTX line {code.line}) is not ordered with the access "
        f"by {other.warp} lane {other.lane} (PTX line {other.line})"
    )


def check_shared(
    w: Warp,
    code: Code,
    index: Any,
    epochs: Any,
    write: bool,
    *,
    strong: bool = False,
    reader: int | None = None,
    who: str | None = None,
    owner: Cta | None = None,
    proxy: bool = False,
    inits: bool = False,
) -> Int64 | None:
    """Race and initialisation checks of granules of shared memory, then record the access; the last writes before a read.

    index: granule indices (an integer array or a slice); epochs: epoch of each, broadcastable; reader: actor that reads, the warp by
    default; owner: whose shared memory it is, the warp's CTA by default; proxy: the access goes through the asynchronous proxy; inits: it
    is to an mbarrier, whose initialisation a fence.mbarrier_init orders too.
    """
    cta = w.cta if owner is None else owner
    shadow = cta.shadow
    assert shadow is not None
    clock = w.clock
    limits = clock.limits
    of_writes: Int64 | None = None
    if proxy:
        # Reads are fenced like writes: an asynchronous write can overtake an ordinary read that it merely follows.
        limits = clock.lower(hz.SHARED_PROXY, w.cta.cluster.floor)
    elif inits:
        of_writes = np.maximum(limits, clock.table[hz.INITS])
    parts, last = shadow.conflicts(index, limits, write, strong, of_writes)
    if parts:
        plane = hz.SHARED_PROXY if proxy else hz.ORDER
        for bad, before in parts:
            _settle_shared(w, code, owner, shadow.shift, index, bad, before, epochs, "write" if write else "read", who, plane)
    if write:
        shadow.note_write(index, epochs, strong)
        return None
    if np.count_nonzero(last) != last.size:
        never = last == 0
        place = int(never.argmax())
        granule = _granule(index, place)
        epoch = np.broadcast_to(epochs, never.shape).flat[place]
        lane = int(epoch) >> hz.LANE_SHIFT & 31
        at = granule << shadow.shift
        cta.report(
            "uninitialized",
            f"read of {shared_place(w, at, owner)} by {who or w.name} lane {lane} (PTX line {code.line}), which nothing has written",
            code,
            w,
            lane,
            at,
            place=shared_place(w, at, owner),
            missing="a write before the read",
        )
    shadow.note_read(index, epochs, w.actor if reader is None else reader, strong)
    return last


def _granule(index: Any, place: int) -> int:
    if isinstance(index, slice):
        return int(index.start) + place
    return int(index.flat[place])


def unordered_accesses(w: Warp, before: Int64, lanes: Int64, plane: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """(which earlier accesses of this cluster did not happen before, which did but are not ordered in the sense of `plane`).

    before: epochs of the accesses, lanes: the lane that now accesses each. A lane is ordered with itself by its program.
    """
    clock = w.clock
    cluster = w.cta.cluster
    actors = before & hz.ACTOR_MASK
    same = (cluster.family[actors] == w.main) & ((before >> hz.LANE_SHIFT & 31) == lanes)
    happened = clock.covers(hz.ORDER, before) | same
    if plane == hz.ORDER:
        return ~happened, np.zeros(len(before), np.bool_)
    fenced = clock.covers(plane, before) | (cluster.floor[actors] == hz.EVER)
    return ~happened, happened & ~fenced


def _settle_shared(
    w: Warp,
    code: Code,
    owner: Cta | None,
    shift: int,
    index: Any,
    bad: Array,
    before: Array,
    epochs: Any,
    verb: str,
    who: str | None,
    plane: int,
) -> None:
    """Report what is left of an apparent conflict once lanes are told apart."""
    places = np.flatnonzero(bad)
    seen = before.reshape(-1)[places]
    mine = np.broadcast_to(epochs, bad.shape).reshape(-1)[places]
    racy, unfenced = unordered_accesses(w, seen, mine >> hz.LANE_SHIFT & 31, plane)
    for flags, kind in ((racy, "race"), (unfenced, "proxy_fence")):
        if flags.any():
            place = int(flags.argmax())
            address = _granule(index, int(places[place])) << shift
            report_conflict(
                w, code, kind, verb, shared_place(w, address, owner), int(mine[place]) >> hz.LANE_SHIFT & 31, address, int(seen[place]), who
            )


def report_conflict(
    w: Warp, code: Code, kind: str, verb: str, place: str, lane: int, address: int, before: int, who: str | None, cluster: int | None = None
) -> None:
    """Report an access that is not ordered with an earlier one (epoch `before`) in the way that `kind` asks for."""
    other = w.cta.access_of(before, cluster)
    by = who or w.name
    if kind == "race":
        missing = _missing_edge(w, before, cluster)
        in_flight = cluster in (None, w.cta.cluster.index) and w.cta.cluster.still_reading(w, before)
        if in_flight:
            kind = "wgmma_in_flight"
            message = (
                f"{verb} of {place} by {by} lane {lane} (PTX line {code.line}) while it may still be read as an operand "
                f"by {other.warp} (PTX line {other.line})"
            )
            missing = f"wgmma.wait_group by {other.warp.removeprefix('wgmma of ')} after that wgmma, before it lets the tile be overwritten"
        else:
            message = race_message(w, code, verb, place, lane, other, who)
    elif kind == "proxy_fence":
        missing = f"fence.proxy.async after PTX line {other.line}, before the barrier or arrival that lets {by} go on"
        message = (
            f"{verb} of {place} by {by} lane {lane} (PTX line {code.line}) through the asynchronous proxy: the earlier access "
            f"by {other.warp} lane {other.lane} (PTX line {other.line}) has not been fenced for it"
        )
    else:
        behind = (before & hz.ACTOR_MASK) < w.clock.table.shape[1] and bool(w.clock.covers(hz.TENSOR, np.array([before], np.int64))[0])
        missing = (
            f"tcgen05.fence::after_thread_sync by {w.name} after the wait or barrier, before PTX line {code.line}"
            if behind
            else f"tcgen05.fence::before_thread_sync after PTX line {other.line}, before the arrival or barrier"
        )
        message = (
            f"{verb} of {place} by {by} lane {lane} (PTX line {code.line}) is ordered with the access by {other.warp} lane {other.lane} "
            f"(PTX line {other.line}) by a barrier, but not fenced: {missing}"
        )
    w.cta.report(kind, message, code, w, lane, address, other, place=place, missing=missing)


def _missing_edge(w: Warp, before: int, cluster: int | None) -> str:
    """What would order an earlier access, in words."""
    if cluster is not None and cluster != w.cta.cluster.index:
        return "a release by the other CTA and an acquire here, both at .gpu scope, or a grid of its own"
    family = int(w.cta.cluster.family[before & hz.ACTOR_MASK])
    if family == w.main:
        return f"bar.warp.sync between the lanes of {w.name}"
    if family >= 0:
        return "a barrier, or an mbarrier arrival there and a wait here, between the two accesses"
    return "a wait for the asynchronous operation (its mbarrier, group or tcgen05.wait) that reaches this access"


def tmem_place(cell: int) -> str:
    return f"tensor memory lane {cell >> 9} column {cell & 511}"


def shared_index(shadow: hz.Shadow, address: Int64, size: int) -> tuple[Any, bool]:
    """(granule indices of lanes' accesses, whether they have a second axis)."""
    if size >> shadow.shift == 0:
        shadow.refine(size.bit_length() - 1)
    count = size >> shadow.shift
    base = address >> shadow.shift
    return (base, False) if count == 1 else (base[:, None] + _STEPS[count], True)


def _shared(
    w: Warp, code: Code, address: Int64, lanes: Int64, size: int, write: bool, strong: bool, owner: Cta | None = None
) -> NDArray[np.bool_] | None:
    good = shared_faults(w, code, address, lanes, size, write, owner)
    if (profile := w.cta.launch.profile) is not None:
        profile.shared_access(code, address, lanes, size, "store" if write else "load")
    if w.cta.check:
        if good is not None:
            address, lanes = address[good], lanes[good]
            if not len(address):
                return good
        shadow = (w.cta if owner is None else owner).shadow
        assert shadow is not None
        epochs = w.epochs if len(lanes) == 32 else w.epochs[lanes]
        epochs = epochs + (code.strong_tag if strong else code.tag)
        index, wide = shared_index(shadow, address, size)
        check_shared(w, code, index, epochs[:, None] if wide else epochs, write, strong=strong, owner=owner)
    return good


def split_cluster(w: Warp, code: Code, address: Int64, lanes: Int64) -> list[tuple[Cta, Any, Int64]]:
    """[(CTA, places or None for all, offsets)] of shared::cluster addresses, with a report for CTAs that have exited."""
    ranks = address >> RANK_SHIFT
    first = int(ranks[0])
    result: list[tuple[Cta, Any, Int64]] = []
    if b"\x00" not in (ranks == first).tobytes():
        owner, _ = owner_of(w.cta, int(address[0]))
        result.append((owner, None, address if first == 0 else address - (first << RANK_SHIFT)))
    else:
        for rank in sorted(set(ranks.tolist())):
            places = np.flatnonzero(ranks == rank)
            owner, _ = owner_of(w.cta, int(address[places[0]]))
            result.append((owner, places, address[places] - (rank << RANK_SHIFT)))
    for owner, places, _ in result:
        check_alive(w, code, owner, int(lanes[0 if places is None else places[0]]))
    return result


def check_alive(w: Warp, code: Code, owner: Cta, lane: int) -> None:
    """Report an access to the shared memory of a CTA that has exited (5.1.5: it must stay until others are done with it)."""
    if owner.live == 0:
        w.cta.report(
            "out_of_bounds",
            f"{code.opcode} by {w.name} lane {lane} (PTX line {code.line}) accesses the shared memory of CTA {owner.index}, "
            "which has exited",
            code,
            w,
            lane,
        )


# ---------------------------------------------------------------------------------------------------------- global memory


def global_mapping(w: Warp, code: Code, address: Int64, lanes: Int64, size: int, write: bool) -> list[tuple[Mapping, Any]]:
    """[(mapping, lanes within it or None for all)]; lanes that fault are reported and left out."""
    memory = w.cta.launch.memory
    mapping = memory.find(int(address[0]))
    crooked = (address & (size - 1)) != 0
    bad = _any(crooked)
    if mapping is not None and not bad:
        inside = (address >= mapping.base) & (address <= mapping.end - size)
        if b"\x00" not in inside.tobytes() and (not write or mapping.writable):
            return [(mapping, None)]
    verb = "write" if write else "read"
    result: list[tuple[Mapping, Any]] = []
    groups: dict[int, tuple[Mapping, list[int]]] = {}
    reported: set[str] = set()
    for place, at in enumerate(address.tolist()):
        found = memory.find(at)
        reason, kind = "", "out_of_bounds"
        if found is None or at + size > found.end:
            reason = f"it is outside every mapping (nearest: {memory.nearest(at)})"
        elif crooked[place]:
            reason, kind = f"the access needs a multiple of {size}", "misaligned"
        elif write and not found.writable:
            reason = f"{found.name} is read-only"
        if reason:
            # One lane stands for all that fault in the same way.
            if kind in reported:
                continue
            reported.add(kind)
            lane = int(lanes[place])
            where = f"global {found.name}+{at - found.base:#x}" if found else f"global address {at:#x}"
            w.cta.report(
                kind, f"{verb} of {size} bytes at {where} by {w.name} lane {lane} (PTX line {code.line}): {reason}", code, w, lane, at
            )
            continue
        assert found is not None
        groups.setdefault(found.base, (found, []))[1].append(place)
    for found, places in groups.values():
        result.append((found, np.array(places, np.int64)))
    return result


def check_global(
    w: Warp,
    code: Code,
    mapping: Mapping,
    start: Int64,
    size: int,
    epochs: Any,
    write: bool,
    *,
    strong: bool = False,
    who: str | None = None,
    proxy: bool = False,
) -> None:
    """Race and initialisation checks of accesses of `size` bytes (a power of two) at device addresses `start`, then record them."""
    launch = w.cta.launch
    pages = start >> hz.GLOBAL_PAGE_SHIFT
    first = int(pages[0])
    if b"\x00" in (pages == first).tobytes():
        for number in np.unique(pages).tolist():
            pick = pages == number
            part = epochs[pick] if np.ndim(epochs) else epochs
            check_global(w, code, mapping, start[pick], size, part, write, strong=strong, who=who, proxy=proxy)
        return
    page = launch.global_shadow.page(first)
    if size >> page.shift == 0:
        page.refine(size.bit_length() - 1)
    count = size >> page.shift
    index = (start & ((1 << hz.GLOBAL_PAGE_SHIFT) - 1)) >> page.shift
    if count > 1:
        index = index[:, None] + (_STEPS[count] if count in _STEPS else np.arange(count))
        epochs = epochs[:, None] if np.ndim(epochs) else epochs
    cta = w.cta.cluster.index
    floor = w.cta.cluster.floor if proxy else None
    for bad, before, ctas in page.conflicts(index, w.clock, cta, write, strong, floor):
        _settle_global(w, code, mapping, start, bad, before, ctas, epochs, write, who, proxy)
    page.note(index, epochs, cta, write, strong)
    if mapping.written is not None:
        offset = start - mapping.base
        if write:
            for k in range(size):
                mapping.written[offset + k] = True
        else:
            known = mapping.written[offset]
            for k in range(1, size):
                known = known & mapping.written[offset + k]
            if not known.all():
                place = int((~known).argmax())
                lane = int(np.broadcast_to(epochs, index.shape).reshape(len(start), -1)[place, 0]) >> hz.LANE_SHIFT & 31
                at = int(start[place])
                w.cta.report(
                    "uninitialized",
                    f"read of global {mapping.name}+{at - mapping.base:#x} by {who or w.name} lane {lane} "
                    f"(PTX line {code.line}), which nothing has written",
                    code,
                    w,
                    lane,
                    at,
                    place=f"global {mapping.name}+{at - mapping.base:#x}",
                    missing="a write before the read",
                )


def _settle_global(
    w: Warp,
    code: Code,
    mapping: Mapping,
    start: Int64,
    bad: Array,
    before: Array,
    ctas: Array,
    epochs: Any,
    write: bool,
    who: str | None,
    proxy: bool,
) -> None:
    """Report what is left of an apparent conflict once lanes and other clusters' clocks are looked at."""
    places = np.flatnonzero(bad)
    seen = before.reshape(-1)[places]
    where = np.broadcast_to(ctas, bad.shape).reshape(-1)[places]
    mine = np.broadcast_to(epochs, bad.shape).reshape(-1)[places]
    plane = hz.GLOBAL_PROXY if proxy else hz.ORDER
    own = w.cta.cluster.index
    racy, unfenced = np.zeros(len(places), np.bool_), np.zeros(len(places), np.bool_)
    for cluster in np.unique(where).tolist():
        pick = where == cluster
        if cluster == own:
            racy[pick], unfenced[pick] = unordered_accesses(w, seen[pick], mine[pick] >> hz.LANE_SHIFT & 31, plane)
            continue
        known = None if w.clock.foreign is None else w.clock.foreign.get(cluster)
        if known is None:
            racy[pick] = True
            continue
        happened = known.covers(hz.ORDER, seen[pick])
        racy[pick] = ~happened
        if proxy:
            unfenced[pick] = happened & ~known.covers(plane, seen[pick])
    for flags, kind in ((racy, "race"), (unfenced, "proxy_fence")):
        if flags.any():
            place = int(flags.argmax())
            at = int(start[int(places[place]) // (bad.size // len(start))])
            lane = int(mine[place]) >> hz.LANE_SHIFT & 31
            words = f"global {mapping.name}+{at - mapping.base:#x}"
            report_conflict(w, code, kind, "write" if write else "read", words, lane, at, int(seen[place]), who, int(where[place]))


# ------------------------------------------------------------------------------------------------------------ lane accesses


def split_generic(address: Int64) -> list[tuple[str, Any]]:
    """[(space, places or None for all)] of generic addresses (5.4: the windows of shared, local and param memory)."""
    tops = address >> _WINDOW_SHIFT
    first = int(tops[0])
    if b"\x00" not in (tops == first).tobytes():
        return [(_space_of(first), None)]
    spaces: dict[str, list[int]] = {}
    for place, top in enumerate(tops.tolist()):
        spaces.setdefault(_space_of(top), []).append(place)
    return [(space, np.array(places, np.int64)) for space, places in spaces.items()]


_TOPS = {SHARED_WINDOW >> _WINDOW_SHIFT: "shared", LOCAL_WINDOW >> _WINDOW_SHIFT: "local", PARAM_WINDOW >> _WINDOW_SHIFT: "param"}
WINDOWS = {"shared": SHARED_WINDOW, "cluster": SHARED_WINDOW, "local": LOCAL_WINDOW, "param": PARAM_WINDOW}


def _space_of(top: int) -> str:
    return _TOPS.get(top, "global")


_NAMED = {"shared": "cluster"}
"""Generic addresses in the shared window may name any CTA of the cluster."""


def load(
    w: Warp, code: Code, space: str, address: Int64, lanes: Int64, size: int, count: int, strong: bool = False, owner: Cta | None = None
) -> list[Array]:
    """`count` vectors of unsigned integers of `size` bytes, one element a lane, from consecutive addresses.

    space: shared, cluster (shared::cluster addresses), global, local, param or generic; owner: whose shared memory, the own by default.
    """
    if space == "cluster":
        pieces = split_cluster(w, code, address, lanes)
        if pieces[0][1] is None:
            return load(w, code, "shared", pieces[0][2], lanes, size, count, strong, pieces[0][0])
        gathered = [np.empty(len(address), _TYPES[size]) for _ in range(count)]
        for other, places, offsets in pieces:
            for out, value in zip(gathered, load(w, code, "shared", offsets, lanes[places], size, count, strong, other), strict=True):
                out[places] = value
        return gathered
    if space == "generic":
        parts = split_generic(address)
        if len(parts) == 1 and parts[0][1] is None:
            found = parts[0][0]
            return load(w, code, _NAMED.get(found, found), address - WINDOWS.get(found, 0), lanes, size, count, strong)
        result = [np.empty(len(address), _TYPES[size]) for _ in range(count)]
        for found, places in parts:
            values = load(w, code, _NAMED.get(found, found), address[places] - WINDOWS.get(found, 0), lanes[places], size, count, strong)
            for out, value in zip(result, values, strict=True):
                out[places] = value
        return result
    total = size * count
    if space == "shared":
        good = _shared(w, code, address, lanes, total, False, strong, owner)
        words = (w.cta if owner is None else owner).words[size]
        if good is None:
            index = address >> (size.bit_length() - 1)
            if count == 1:
                return [words[index]]
            return [words[index + k] for k in range(count)]
        index = np.where(good, address, SHARED_START) >> (size.bit_length() - 1)
        return [np.where(good, words[np.minimum(index + k, len(words) - 1)], _POISON[size]) for k in range(count)]
    if space == "global":
        parts_ = global_mapping(w, code, address, lanes, total, False)
        if (profile := w.cta.launch.profile) is not None:
            profile.move("global load", len(lanes) * total)
        check = w.cta.check
        if len(parts_) == 1 and parts_[0][1] is None:
            mapping = parts_[0][0]
            if check:
                epochs = (w.epochs if len(lanes) == 32 else w.epochs[lanes]) + (code.strong_tag if strong else code.tag)
                check_global(w, code, mapping, address, total, epochs, False, strong=strong)
            words = mapping.words[size]
            index = (address - mapping.base) >> (size.bit_length() - 1)
            if count == 1:
                return [words[index]]
            return [words[index + k] for k in range(count)]
        result = [np.full(len(address), _POISON[size]) for _ in range(count)]
        for mapping, places in parts_:
            pick = slice(None) if places is None else places
            if check:
                epochs = w.epochs[lanes[pick]] + (code.strong_tag if strong else code.tag)
                check_global(w, code, mapping, address[pick], total, epochs, False, strong=strong)
            index = (address[pick] - mapping.base) >> (size.bit_length() - 1)
            for k in range(count):
                result[k][pick] = mapping.words[size][index + k]
        return result
    if space == "param":
        return _flat_load(w, code, w.cta.launch.params, w.cta.launch.param_bytes, address, lanes, size, count, "param")
    if space == "local":
        local = w.local
        if local is None:
            raise PtxError("local memory is used but not declared", code.line)
        stride = local.shape[1]
        if w.local_written is not None:
            _check_local(w, code, w.local_written, address, lanes, size * count)
        return _flat_load(w, code, local.reshape(-1), stride, address, lanes, size, count, "local", lanes * stride)
    raise PtxError(f"loads from {space} memory are not supported", code.line)


def _flat_load(
    w: Warp, code: Code, flat: Array, limit: int, address: Int64, lanes: Int64, size: int, count: int, space: str, base: Any = 0
) -> list[Array]:
    total = size * count
    bad = (address < 0) | (address > limit - total)
    if _any(bad):
        place = int(bad.argmax())
        _flat_fault(w, code, space, int(address[place]), int(lanes[place]), total, limit, "read")
    safe = np.where(bad, 0, address) + base
    result = []
    for k in range(count):
        at = safe[:, None] + (k * size + _STEPS[size])
        value = np.ascontiguousarray(flat[at]).view(_TYPES[size])[:, 0]
        result.append(np.where(bad, _POISON[size], value))
    return result


def _check_local(w: Warp, code: Code, written: NDArray[np.bool_], address: Int64, lanes: Int64, total: int) -> None:
    """Report a read of local memory that its lane has not written."""
    inside = np.flatnonzero((address >= 0) & (address <= written.shape[1] - total))
    never = ~written[lanes[inside, None], address[inside, None] + np.arange(total)].all(axis=1)
    if never.any():
        place = int(inside[int(never.argmax())])
        lane, at = int(lanes[place]), int(address[place])
        w.cta.report(
            "uninitialized",
            f"read of local+{at:#x} by {w.name} lane {lane} (PTX line {code.line}), which nothing has written",
            code,
            w,
            lane,
            at,
            place=f"local+{at:#x}",
            missing="a write before the read",
        )


def _flat_fault(w: Warp, code: Code, space: str, address: int, lane: int, total: int, limit: int, verb: str) -> None:
    w.cta.report(
        "out_of_bounds",
        f"{verb} of {total} bytes at {space}+{address:#x} by {w.name} lane {lane} (PTX line {code.line}): the space has {limit} bytes",
        code,
        w,
        lane,
        address,
    )


def store(
    w: Warp,
    code: Code,
    space: str,
    address: Int64,
    lanes: Int64,
    size: int,
    values: list[Array],
    strong: bool = False,
    owner: Cta | None = None,
) -> None:
    """Write vectors of unsigned integers of `size` bytes to consecutive addresses. space, owner: as in `load`."""
    if space == "cluster":
        for other, places, offsets in split_cluster(w, code, address, lanes):
            pick = slice(None) if places is None else places
            store(w, code, "shared", offsets, lanes[pick], size, [v[pick] for v in values], strong, other)
        return
    if space == "generic":
        for found, places in split_generic(address):
            base = WINDOWS.get(found, 0)
            if places is None:
                store(w, code, _NAMED.get(found, found), address - base, lanes, size, values, strong)
            else:
                store(w, code, _NAMED.get(found, found), address[places] - base, lanes[places], size, [v[places] for v in values], strong)
        return
    total = size * len(values)
    shift = size.bit_length() - 1
    w.cta.launch.progress_count += 1
    if space == "shared":
        good = _shared(w, code, address, lanes, total, True, strong, owner)
        if good is not None:
            address, lanes, values = address[good], lanes[good], [v[good] for v in values]
        if w.cta.check and not strong and _shared_by_lanes(address):
            check_lanes(w, code, space, address, lanes, values, owner)
        words = (w.cta if owner is None else owner).words[size]
        index = address >> shift
        for k, value in enumerate(values):
            words[index + k if k else index] = value
        return
    if space == "global":
        if (profile := w.cta.launch.profile) is not None:
            profile.move("global store", len(lanes) * total)
        for mapping, places in global_mapping(w, code, address, lanes, total, True):
            pick = slice(None) if places is None else places
            if w.cta.check:
                epochs = (w.epochs if len(lanes) == 32 and places is None else w.epochs[lanes[pick]]) + (
                    code.strong_tag if strong else code.tag
                )
                check_global(w, code, mapping, address[pick], total, epochs, True, strong=strong)
                if not strong and _shared_by_lanes(address[pick]):
                    check_lanes(w, code, space, address[pick], lanes[pick], [v[pick] for v in values])
            elif mapping.written is not None:
                for k in range(total):
                    mapping.written[address[pick] - mapping.base + k] = True
            index = (address[pick] - mapping.base) >> shift
            for k, value in enumerate(values):
                mapping.words[size][index + k] = value[pick]
        return
    if space == "local":
        local = w.local
        if local is None:
            raise PtxError("local memory is used but not declared", code.line)
        limit = local.shape[1]
        bad = (address < 0) | (address > limit - total)
        if _any(bad):
            place = int(bad.argmax())
            _flat_fault(w, code, "local", int(address[place]), int(lanes[place]), total, limit, "write")
        good_ = ~bad
        flat = local.reshape(-1)
        base = (address + lanes * limit)[good_]
        for k, value in enumerate(values):
            raw = np.ascontiguousarray(value[good_]).view(np.uint8).reshape(-1, size)
            flat[base[:, None] + (k * size + _STEPS[size])] = raw
        if w.local_written is not None:
            w.local_written.reshape(-1)[base[:, None] + np.arange(total)] = True
        return
    raise PtxError(f"stores to {space} memory are not supported", code.line)


# -------------------------------------------------------------------------------------------- release and acquire by address


Scoped = list[tuple[int, Clock]]
"""Clocks by distance: 0 within the CTA, 1 the cluster, 2 the device."""


def publish(w: Warp, space: str, address: int, clocks: Scoped) -> None:
    """Releases (or a strong write after fences) at an address: each clock for readers at most so far away."""
    cta = w.cta
    if space in ("shared", "cluster"):
        owner, address = owner_of(cta, address)
        table = owner.sync_clocks.setdefault(address, {})
    else:
        table = cta.launch.global_sync.setdefault(address, {})
    for scope, clock in clocks:
        key = (scope, cta.index, cta.cluster.index)
        released = clock.copy()
        cta.cluster.settle_proxy(released)
        known = table.get(key)
        if known is None:
            table[key] = released
        else:
            known.join(released)


def observe(w: Warp, space: str, address: int, scope: int) -> Scoped:
    """What a read of an address may acquire at a scope, by how far away it was released."""
    cta = w.cta
    if space in ("shared", "cluster"):
        owner, address = owner_of(cta, address)
        table = owner.sync_clocks.get(address)
    else:
        table = cta.launch.global_sync.get(address)
    result: Scoped = []
    for (released, index, cluster), clock in (table or {}).items():
        distance = 0 if index == cta.index else 1 if cluster == cta.cluster.index else 2
        if distance > released or distance > scope:
            continue
        if cluster == cta.cluster.index:
            result.append((distance, clock))
            continue
        alone = Clock(clock.table.copy(), None, clock.lanes)
        foreign = {k: v for k, v in (clock.foreign or {}).items() if k != cta.cluster.index}
        foreign[cluster] = alone
        own = (clock.foreign or {}).get(cta.cluster.index)
        seen = Clock(np.zeros((hz.PLANES, 1), np.int64)) if own is None else own.copy()
        seen.foreign = foreign
        result.append((distance, seen))
    return result


def check_lanes(w: Warp, code: Code, space: str, address: Int64, lanes: Int64, values: list[Array], owner: Cta | None = None) -> None:
    """Report lanes of one store that write different values to one place: which of them stays is not defined (9.7.9.11).

    address: byte addresses of accesses of one size that are aligned to it, so that those which overlap are equal.
    """
    order = np.argsort(address, kind="stable")
    ranked = address[order]
    for place in np.flatnonzero(ranked[1:] == ranked[:-1]).tolist():
        first, second = int(order[place]), int(order[place + 1])
        if all(value[first] == value[second] for value in values):
            continue
        at = int(address[first])
        if space == "shared":
            words = shared_place(w, at, owner)
        else:
            mapping = w.cta.launch.memory.find(at)
            words = f"global {mapping.name}+{at - mapping.base:#x}" if mapping else f"global address {at:#x}"
        a, b = int(lanes[first]), int(lanes[second])
        w.cta.report(
            "race",
            f"lanes {a} and {b} of {w.name} write different values to {words} in one instruction (PTX line {code.line}): "
            "which of them stays is not defined",
            code,
            w,
            b,
            at,
            hz.Access(code.line, w.name, a, w.cta.launch.code.sources.get(code.line, "")),
            place=words,
            missing="one lane that writes, or an address of its own for each",
        )
        return


def _shared_by_lanes(address: Int64) -> bool:
    """Whether two accesses of one instruction may be at one address; most instructions go up or down from lane to lane."""
    if len(address) < 2:
        return False
    step = address[1:] - address[:-1]
    if not (b"\x00" in (step > 0).tobytes() and b"\x00" in (step < 0).tobytes()):
        return False
    ranked = np.sort(address)
    return b"\x01" in (ranked[1:] == ranked[:-1]).tobytes()


def active(w: Warp, full: bool) -> Int64:
    """Indices of the active lanes."""
    return LANES if full else np.flatnonzero(w.mask)


__all__ = ["Cta", "active", "check_global", "check_shared", "load", "observe", "publish", "report_conflict", "store", "unordered_accesses"]
