"""Names of the kernels' dynamic shared memory, for the emulator's findings: `exchange[1][0][17]` and not a number."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .config import WARPGROUP_THREADS
from .geometry import F32_BYTES, MBARRIER_BYTES, Geometry
from .geometry_sm90 import Sm90Geometry
from .geometry_sm100 import Sm100Geometry

if TYPE_CHECKING:
    from .emulator.regions import RegionMap


def _array(offset: int, size: int, *shape: int, element: int = F32_BYTES) -> tuple[int, int, tuple[int, ...]]:
    """A region of so many elements: the first extent, left out, is what fills it; without a shape where that does not come out even."""
    inner = math.prod(shape) * element
    return (offset, size, (size // inner, *shape)) if size % inner == 0 else (offset, size, ())


def attention_regions(geo: Geometry) -> RegionMap:
    """The full kernel's: name to (offset, bytes, array shape or ())."""
    if not isinstance(geo, Sm90Geometry | Sm100Geometry):
        return {}
    shapes: dict[str, tuple[int, ...]] = {
        "exchange": (2, WARPGROUP_THREADS),
        "correction": (WARPGROUP_THREADS,),
        "weights": (geo.tile_rows,),
        "maxsum": (geo.rows, 2),
    }
    result: dict[str, tuple[int, int, tuple[int, ...]]] = {}
    for region in geo.smem_map:
        if region.name.startswith("mbar"):
            result[region.name] = _array(region.offset, region.size, element=MBARRIER_BYTES)
        elif isinstance(geo, Sm100Geometry) and region.name == geo.copy_region:
            result[region.name] = _array(region.offset, region.size, element=geo.copy_slot_bytes)
        elif region.name == "ring":
            result[region.name] = _array(region.offset, region.size, element=geo.slot_bytes)
        elif region.name in shapes:
            result[region.name] = _array(region.offset, region.size, *shapes[region.name])
        else:
            result[region.name] = (region.offset, region.size, ())
    return result


def unit_regions(geo: Geometry, entry: str, smem_bytes: int) -> RegionMap:
    """Those of the unit kernels that have some: the combine's, and the accumulator image in place of tensor memory on sm_90a."""
    if entry == "unit_combine":
        stage, ml = geo.combine_stage_bytes, geo.combine_ml_bytes
        out = geo.rows * geo.depth * geo.out_bytes
        result = {
            "stage": _array(0, stage, geo.depth // 4, geo.rows, 4),
            "maxsum": _array(stage, ml, geo.rows, 2),
            "out": _array(stage + ml, out, geo.rows, geo.out_k, element=geo.out_bytes),
        }
        image = stage + ml + out
        return result | ({"image": _array(image, smem_bytes - image, geo.depth)} if smem_bytes > image else {})
    return {"image": _array(0, smem_bytes, geo.o_phys_cols)} if smem_bytes else {}


__all__ = ["attention_regions", "unit_regions"]
