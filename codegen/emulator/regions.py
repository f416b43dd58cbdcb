"""Names for addresses in shared memory: static variables of the PTX, and regions of dynamic shared memory that the caller describes."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence

from .memory import SHARED_START

RegionMap = Mapping[str, Sequence[object]]
"""Name to (offset, bytes) or (offset, bytes, shape) in dynamic shared memory; the shape is that of an array that fills the region."""


class Regions:
    """Named ranges of shared memory."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int, str, tuple[int, ...]]] = []
        """(first address, bytes, name, shape), by address."""
        self._starts: list[int] = []

    def add(self, name: str, address: int, size: int, shape: tuple[int, ...] = ()) -> None:
        """Name `size` bytes from `address`. ValueError for a shape that does not divide them."""
        if size < 1 or address < 0:
            raise ValueError(f"region {name!r} of {size} bytes at {address}: both must be positive")
        if shape and (min(shape) < 1 or size % math.prod(shape)):
            raise ValueError(f"region {name!r} of {size} bytes is not an array of shape {shape}")
        place = bisect.bisect_right(self._starts, address)
        self._starts.insert(place, address)
        self._ranges.insert(place, (address, size, name, shape))

    def name(self, address: int) -> str:
        """The region and the place in it, such as `xchg[1][17]` or `ring+0x400`; empty where nothing is named."""
        place = bisect.bisect_right(self._starts, address) - 1
        while place >= 0:
            start, size, name, shape = self._ranges[place]
            if address < start + size:
                offset = address - start
                if not shape:
                    return f"{name}{offset:+#x}" if offset else name
                element = size // math.prod(shape)
                index, rest = divmod(offset, element)
                indices = []
                for extent in reversed(shape):
                    index, inner = divmod(index, extent)
                    indices.append(inner)
                return name + "".join(f"[{i}]" for i in reversed(indices)) + (f"+{rest}" if rest else "")
            place -= 1
        return ""

    def shared(self, address: int) -> str:
        """An address of shared memory as an offset, with its name where it has one."""
        name = self.name(address)
        return f"shared{address - SHARED_START:+#x}" + (f" ({name})" if name else "")


def add_regions(regions: Regions, described: RegionMap, base: int, limit: int) -> None:
    """Add the caller's regions, offsets from `base`. ValueError in one line for one that does not fit `limit` bytes."""
    for name, fields in described.items():
        if not 2 <= len(fields) <= 3:
            raise ValueError(f"region {name!r} is not (offset, bytes) or (offset, bytes, shape)")
        try:
            offset, size = (int(x) for x in fields[:2])  # type: ignore[call-overload]
            shape = tuple(int(x) for x in fields[2]) if len(fields) == 3 and fields[2] else ()  # type: ignore[attr-defined]
        except (TypeError, ValueError):
            raise ValueError(f"region {name!r} is not made of integers") from None
        if offset < 0 or size < 1 or offset + size > limit:
            raise ValueError(f"region {name!r} ends at byte {offset + size} of {limit} bytes of dynamic shared memory")
        regions.add(name, base + offset, size, shape)


__all__ = ["RegionMap", "Regions", "add_regions"]
