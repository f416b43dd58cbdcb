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
    place = f"shared{address - SHARED_START:+#x}"
    return place if owner is None or owner is w.cta else f"{place} of CTA {owner.index}"


def region(address: int, space: str, w: Warp) -> str:
    """An address as space+offset."""
    if space == "shared":
        return f"shared{address - SHARED_START:+#x}"
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
) -> None:
    """Race and initialisation checks of granules of shared memory, then record the access.

    index: granule indices (an integer array or a slice); epochs: epoch of each, broadcastable; reader: actor that reads, the warp by
    default; owner: whose shared memory it is, the warp's CTA by default.
    """
    cta = w.cta if owner is None else owner
    shadow = cta.shadow
    assert shadow is not None
    limits = w.clock.limits
    if write:
        found = shadow.write_conflict(index, limits, strong)
        if found is not None:
            bad, epochs_before = found
            _report_race(w, code, owner, shadow.shift, index, bad, epochs_before, epochs, "write", who)
        shadow.note_write(index, epochs, strong)
        return
    bad_read, never, last = shadow.read_conflict(index, limits, strong)
    if bad_read is not None:
        _report_race(w, code, owner, shadow.shift, index, bad_read, last, epochs, "read", who)
    if never is not None:
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
        )
    column = shadow.column(w.actor if reader is None else reader, strong)
    shadow.read[index, column] = epochs


def _granule(index: Any, place: int) -> int:
    if isinstance(index, slice):
        return int(index.start) + place
    return int(index.flat[place])


def _report_race(
    w: Warp, code: Code, owner: Cta | None, shift: int, index: Any, bad: Array, before: Array, epochs: Any, verb: str, who: str | None
) -> None:
    place = int(bad.argmax())
    granule = _granule(index, place)
    epoch = int(np.broadcast_to(epochs, bad.shape).flat[place])
    lane = epoch >> hz.LANE_SHIFT & 31
    other = w.cta.access_of(int(before.flat[place]))
    address = granule << shift
    w.cta.report("race", race_message(w, code, verb, shared_place(w, address, owner), lane, other, who), code, w, lane, address, other)


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
) -> None:
    """Race and initialisation checks of accesses of `size` bytes (a power of two) at device addresses `start`, then record them."""
    launch = w.cta.launch
    pages = start >> hz.GLOBAL_PAGE_SHIFT
    first = int(pages[0])
    if b"\x00" in (pages == first).tobytes():
        for number in np.unique(pages).tolist():
            pick = pages == number
            part = epochs[pick] if np.ndim(epochs) else epochs
            check_global(w, code, mapping, start[pick], size, part, write, strong=strong, who=who)
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
    clock = w.clock
    for bad, before, ctas in page.conflicts(index, clock, cta, write, strong):
        _global_race(w, code, mapping, start, bad, before, ctas, epochs, write, who)
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
                )


def _global_race(
    w: Warp, code: Code, mapping: Mapping, start: Int64, bad: Array, before: Array, ctas: Array, epochs: Any, write: bool, who: str | None
) -> None:
    place = int(bad.argmax())
    other = w.cta.access_of(int(before.flat[place]), int(ctas.flat[place]))
    lane = int(np.broadcast_to(epochs, bad.shape).flat[place]) >> hz.LANE_SHIFT & 31
    at = int(start[place // (bad.size // len(start))])
    where = f"global {mapping.name}+{at - mapping.base:#x}"
    w.cta.report("race", race_message(w, code, "write" if write else "read", where, lane, other, who), code, w, lane, at, other)


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
            address, values = address[good], [v[good] for v in values]
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
        return
    raise PtxError(f"stores to {space} memory are not supported", code.line)


# -------------------------------------------------------------------------------------------- release and acquire by address


def publish(w: Warp, space: str, address: int, clock: Clock | None) -> None:
    """A release (or a strong write after a fence) of `clock` at an address."""
    if clock is None:
        return
    cta = w.cta
    if space in ("shared", "cluster"):
        cta, address = owner_of(cta, address)
        known = cta.sync_clocks.get(address)
        if known is None:
            cta.sync_clocks[address] = clock.copy()
        else:
            known.join(clock)
        return
    table = cta.launch.global_sync.setdefault(address, {})
    entries = {cta.cluster.index: clock.limits}
    if clock.foreign:
        entries.update(clock.foreign)
    for index, limits in entries.items():
        known_limits = table.get(index)
        table[index] = limits if known_limits is None else hz._maximum(known_limits, limits)


def observe(w: Warp, space: str, address: int) -> Clock | None:
    """What a read of an address may acquire."""
    cta = w.cta
    if space in ("shared", "cluster"):
        cta, address = owner_of(cta, address)
        return cta.sync_clocks.get(address)
    table = cta.launch.global_sync.get(address)
    if not table:
        return None
    own = table.get(cta.cluster.index)
    foreign = {k: v for k, v in table.items() if k != cta.cluster.index}
    return Clock(own.copy() if own is not None else np.zeros(1, np.int64), foreign or None)


def active(w: Warp, full: bool) -> Int64:
    """Indices of the active lanes."""
    return LANES if full else np.flatnonzero(w.mask)


__all__ = ["Cta", "active", "check_global", "check_shared", "load", "observe", "publish", "store"]
