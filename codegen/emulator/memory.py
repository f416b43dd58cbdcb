"""Global memory of the emulated device: host arrays at device addresses, tensor maps, and the launch argument wrappers."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .layouts import tma_box_shape

Array = NDArray[Any]

POISON16 = 0x7FFF
POISON32 = 0x7FFF_7FFF
"""What memory that was never written reads as: a NaN as bf16, f16, f32 and f64 alike."""

# Device address space: generic addresses of the windows. Shared memory starts at 1 KiB, as on hardware, so that null is never valid.
SHARED_START = 1024
LOCAL_WINDOW = 0x7A00_0000_0000
PARAM_WINDOW = 0x7B00_0000_0000
SHARED_WINDOW = 0x7C00_0000_0000
WINDOW_BYTES = 1 << 32
MODULE_BASE = 0x7D00_0000_0000
GLOBAL_BASE = 0x7F00_0000_0000
GUARD_BYTES = 1 << 16
MAP_ALIGN = 256


class Mapping:
    """One host array in device memory."""

    def __init__(self, base: int, array: Array, name: str, writable: bool = True) -> None:
        self.base = base
        self.array = array
        self.name = name
        self.size = array.nbytes
        self.writable = writable and bool(array.flags.writeable)
        flat = array.reshape(-1).view(np.uint8) if array.nbytes else np.zeros(0, np.uint8)
        self.bytes: NDArray[np.uint8] = flat
        self.words: dict[int, Array] = {1: flat}
        for size, kind in ((2, np.uint16), (4, np.uint32), (8, np.uint64)):
            self.words[size] = flat[: len(flat) // size * size].view(kind)
        self.written: NDArray[np.bool_] | None = None
        """Per byte, whether a poisoned mapping has been written."""

    @property
    def end(self) -> int:
        return self.base + self.size


class Memory:
    """Global memory: every mapped array is read and written in place. Mappings are 256-byte aligned and separated by guard gaps."""

    def __init__(self) -> None:
        self._mappings: list[Mapping] = []
        self._bases: list[int] = []
        self._known: dict[tuple[int, int], Mapping] = {}
        self._next = GLOBAL_BASE

    def map(self, array: Array) -> int:
        """Map a C-contiguous array and return its device address; the same array again gives the same address. ValueError otherwise."""
        return self.mapping(array).base

    def mapping(self, array: Array) -> Mapping:
        if not isinstance(array, np.ndarray):
            raise ValueError(f"only numpy arrays can be mapped, not {type(array).__name__}")
        if array.dtype.hasobject:
            raise ValueError("an array of Python objects cannot be mapped")
        if not array.flags.c_contiguous:
            raise ValueError("an array must be C-contiguous to be mapped: it is read and written in place")
        key = (array.__array_interface__["data"][0], array.nbytes)
        known = self._known.get(key)
        if known is not None:
            return known
        mapping = Mapping(self._next, array, f"array{len(self._mappings)}")
        self._mappings.append(mapping)
        self._bases.append(mapping.base)
        self._known[key] = mapping
        self._next += -(-(array.nbytes + GUARD_BYTES) // MAP_ALIGN) * MAP_ALIGN
        return mapping

    def poison(self, array: Array) -> int:
        """Map an array as not yet written: it is filled with NaN poison and reading a byte before writing it is reported."""
        mapping = self.mapping(array)
        if not mapping.writable:
            raise ValueError("a read-only array cannot be poisoned")
        mapping.bytes[0::2] = POISON16 & 0xFF
        mapping.bytes[1::2] = POISON16 >> 8
        mapping.written = np.zeros(mapping.size, np.bool_)
        return mapping.base

    def find(self, address: int) -> Mapping | None:
        """The mapping that holds a device address."""
        place = bisect.bisect_right(self._bases, address) - 1
        if place < 0:
            return None
        mapping = self._mappings[place]
        return mapping if address < mapping.end else None

    def nearest(self, address: int) -> str:
        """The nearest mapping below an address in words, for messages."""
        place = bisect.bisect_right(self._bases, address) - 1
        if place < 0:
            return "no mapping below it"
        mapping = self._mappings[place]
        return f"{mapping.name}+{address - mapping.base:#x}, which has {mapping.size} bytes"

    def _add(self, mapping: Mapping) -> None:
        """Insert a module-scope variable's mapping at its fixed address."""
        place = bisect.bisect_left(self._bases, mapping.base)
        if place < len(self._bases) and self._bases[place] == mapping.base:
            self._mappings[place] = mapping
            return
        self._bases.insert(place, mapping.base)
        self._mappings.insert(place, mapping)


@dataclass(frozen=True, eq=False)
class Uninitialized:
    """An argument array that the kernel has to write before it may read: reading it earlier is an `uninitialized` hazard."""

    array: Array


@dataclass(frozen=True, eq=False)
class TensorMap:
    """A tiled tensor map over an array, in place of the opaque object that cuTensorMapEncodeTiled makes.

    shape, box, strides and element_strides are in the array's axis order, outermost first; strides are bytes of all axes but the
    innermost. Fields left out are filled in from the array. Instruction coordinates are innermost first. swizzle: 0, 32, 64 or 128 bytes.
    Rules: driver API, cuTensorMapEncodeTiled; ValueError in one line.
    """

    array: Array
    box: tuple[int, ...]
    shape: tuple[int, ...] = None  # type: ignore[assignment]
    strides: tuple[int, ...] = None  # type: ignore[assignment]
    swizzle: int = 0
    interleave: int = 0
    oob_nan: bool = False
    element_strides: tuple[int, ...] = None  # type: ignore[assignment]
    dtype: Any = None
    l2_promotion: int = 0
    offset_bytes: int = 0

    def __post_init__(self) -> None:
        def refuse(message: str) -> None:
            raise ValueError(f"tensor map: {message}")

        if not isinstance(self.array, np.ndarray) or not self.array.flags.c_contiguous:
            refuse("the array must be a C-contiguous numpy array")
        kind = np.dtype(self.array.dtype if self.dtype is None else self.dtype)
        shape = tuple(int(x) for x in (self.array.shape if self.shape is None else self.shape))
        rank = len(shape)
        if not 1 <= rank <= 5:
            refuse(f"rank {rank} is not in 1..5")
        if self.strides is None:
            if self.shape is not None and tuple(self.array.shape) != shape:
                steps = [kind.itemsize]
                for extent in shape[:0:-1]:
                    steps.insert(0, steps[0] * extent)
                strides = tuple(steps[:-1])
            else:
                strides = tuple(int(x) for x in self.array.strides[:-1])
        else:
            strides = tuple(int(x) for x in self.strides)
        box = tuple(int(x) for x in self.box)
        steps_ = (1,) * rank if self.element_strides is None else tuple(int(x) for x in self.element_strides)
        if len(box) != rank or len(strides) != rank - 1 or len(steps_) != rank:
            refuse(f"a shape of rank {rank} needs a box of {rank}, {rank - 1} strides and {rank} element strides")
        if kind.itemsize not in (1, 2, 4, 8):
            refuse(f"elements of {kind.itemsize} bytes do not exist")
        if self.offset_bytes % 16:
            refuse(f"the global address must be a multiple of 16, the offset is {self.offset_bytes}")
        if self.interleave not in (0, 16, 32) or self.swizzle not in (0, 32, 64, 128) or self.l2_promotion not in (0, 64, 128, 256):
            refuse(f"interleave {self.interleave}, swizzle {self.swizzle} or L2 promotion {self.l2_promotion} is not one of the modes")
        if self.interleave:
            refuse("interleaved layouts are not supported")
        for extent in shape:
            if not 1 <= extent <= 1 << 32:
                refuse(f"extent {extent} is not in 1..2^32")
        for stride in strides:
            if stride % 16 or not 0 <= stride < 1 << 40:
                refuse(f"stride {stride} is not a multiple of 16 below 2^40")
        for extent in box:
            if not 1 <= extent <= 256:
                refuse(f"box extent {extent} is not in 1..256")
        for step in steps_:
            if not 1 <= step <= 8:
                refuse(f"element stride {step} is not in 1..8")
        inner = box[-1] * kind.itemsize
        if inner % 16:
            refuse(f"the innermost box extent is {inner} bytes, not a multiple of 16")
        if self.swizzle and inner > self.swizzle:
            refuse(f"the innermost box extent of {inner} bytes is wider than the {self.swizzle}-byte swizzle")
        if self.oob_nan and kind.kind not in "fV":
            refuse("out-of-bounds NaN needs a floating-point type")
        last = self.offset_bytes + shape[-1] * kind.itemsize + sum((e - 1) * s for e, s in zip(shape[:-1], strides, strict=True))
        if last > self.array.nbytes:
            refuse(f"the tensor ends at byte {last} of an array of {self.array.nbytes}")
        for name, value in (("shape", shape), ("strides", strides), ("box", box), ("element_strides", steps_), ("dtype", kind)):
            object.__setattr__(self, name, value)

    @property
    def box_bytes(self) -> int:
        """Bytes of one box, out-of-bounds elements included."""
        return math.prod(tma_box_shape(self.box, self.element_strides)) * int(np.dtype(self.dtype).itemsize)
