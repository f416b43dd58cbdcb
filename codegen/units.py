"""The unit kernels of a config: their launch parameters, golden launches, and how their outputs are judged against the references."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np

from . import golden, reference
from .backends import Launch
from .config import Config
from .emulator import Uninitialized
from .geometry import Geometry
from .memory_names import unit_regions

DTYPES: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}
EXCHANGE_COUNT = 18  # even: the last maximum then uses buffer 0, the one that a final sum with a restarted sequence would collide with
EXCHANGE_FIRST_SEQ = 0


@dataclass(frozen=True)
class Verdict:
    """Worst error of an output against its reference, the bound of that element, and whether every element is within its bound."""

    error: float
    bound: float
    ok: bool


@dataclass(frozen=True)
class Case:
    """A kernel ready to run: the launch, its output arrays by name (poisoned until the launch), and the judgement of what they then hold.

    exact: outputs are bit-equal on every backend, so a golden is compared bit for bit.
    """

    entry: str
    shape: str
    launch: Launch
    outputs: Mapping[str, np.ndarray]
    judge: Callable[[], Verdict]
    exact: bool = True


def poisoned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """An array of NaNs: an element that a kernel forgets to write cannot pass for a result."""
    return np.full(shape, np.nan, np.float32).astype(dtype)


def worst(out: np.ndarray, expected: np.ndarray, bound: np.ndarray) -> Verdict:
    """Elementwise comparison; the error reported is that of the element nearest to (or furthest over) its bound. NaN never passes."""
    ours, expected = out.astype(np.float64), expected.astype(np.float64)
    bound = np.broadcast_to(bound, expected.shape)
    with np.errstate(invalid="ignore", divide="ignore"):
        same = (ours == expected) | (np.isnan(ours) & np.isnan(expected))
        error = np.where(same, 0.0, np.where(np.isnan(ours - expected), np.inf, np.abs(ours - expected)))
        excess = np.where(error <= bound, np.where(bound > 0, error / bound, 0.0), np.where(bound > 0, error / bound, np.inf))
    index = np.unravel_index(int(np.argmax(excess)), excess.shape)
    return Verdict(float(error[index]), float(bound[index]), bool((error <= bound).all()))


def exact(out: np.ndarray, expected: np.ndarray) -> Verdict:
    """Bit equality; where the bits differ the error is the largest difference in value, infinity if only the bits differ."""
    if np.array_equal(out.view(np.uint32), expected.view(np.uint32)):
        return Verdict(0.0, 0.0, True)
    verdict = worst(out, expected, np.zeros(()))
    return Verdict(verdict.error or float("inf"), 0.0, False)


# --- launch parameters ------------------------------------------------------------------------------------------------

_EXCHANGE_ARGUMENTS = [
    {"name": "partial", "type": "const float*", "meaning": "[count][256] float32, thread t = warpgroup * 128 + part * rows + row"},
    {"name": "out", "type": "float*", "meaning": "[count][256] float32, the reduction each thread got"},
    {"name": "first_seq", "type": "unsigned", "meaning": "sequence number of the first exchange"},
    {"name": "count", "type": "unsigned", "meaning": "number of exchanges"},
]


def unit_entry_info(config: Config, geo: Geometry) -> dict[str, dict[str, Any]]:
    """Per entry of unit.cu: block, grid, dynamic shared memory in bytes, and the arguments in order (name, C type, meaning)."""
    image_bytes = 0 if geo.tmem_columns else 128 * geo.o_phys_cols * 4
    if config.shared_key:
        exchange = {"block": [256, 1, 1], "grid": [1, 1, 1], "smem_bytes": 0, "arguments": _EXCHANGE_ARGUMENTS}
        level0_arguments = [
            {"name": "tmem_image", "type": "const float*", "meaning": f"[128][{geo.o_phys_cols}] float32, the accumulator"},
            {"name": "band", "type": "float*", "meaning": f"[128][{geo.o_phys_cols}] float32, what each lane read"},
        ]
        return {
            "unit_exchange4_max": exchange,
            "unit_exchange4_add": exchange,
            "unit_exchange4_loop": exchange,
            "unit_level0": {"block": [128, 1, 1], "grid": [1, 1, 1], "smem_bytes": image_bytes, "arguments": level0_arguments},
        }
    out_tile_bytes = geo.rows * geo.depth * geo.out_bytes
    combine_arguments = [
        {"name": "tmem_image", "type": "const float*", "meaning": f"[128][{geo.depth}] float32, unnormalised O of {geo.m_pack} partitions"},
        {"name": "row_max", "type": "const float*", "meaning": "[128] float32, m of each partition and row"},
        {"name": "row_sum", "type": "const float*", "meaning": "[128] float32, l of each partition and row"},
        {"name": "scale_log2e", "type": "float", "meaning": "softmax scale * log2(e)"},
        {
            "name": "out",
            "type": f"{config.out_dtype}*",
            "meaning": f"[{geo.depth // geo.out_k}][{geo.rows}][{geo.out_k}] {config.out_dtype}",
        },
        {"name": "ml", "type": "float*", "meaning": "[128][2] float32, m and l of the merged row as each thread got them"},
    ]
    return {
        "unit_combine": {
            "block": [128, 1, 1],
            "grid": [1, 1, 1],
            "smem_bytes": geo.combine_stage_bytes + geo.combine_ml_bytes + out_tile_bytes + image_bytes,
            "arguments": combine_arguments,
        }
    }


def _launch(config: Config, geo: Geometry, entry: str, args: list[Any]) -> Launch:
    info = unit_entry_info(config, geo)[entry]
    regions = unit_regions(geo, entry, info["smem_bytes"])
    return Launch(entry, tuple(info["grid"]), tuple(info["block"]), info["smem_bytes"], args, regions=regions)


# --- golden launches --------------------------------------------------------------------------------------------------


def exchange_case(
    config: Config,
    geo: Geometry,
    op: Literal["max", "add", "loop"],
    *,
    seed: int = 0,
    count: int = EXCHANGE_COUNT,
    first_seq: int = EXCHANGE_FIRST_SEQ,
) -> Case:
    """unit_exchange4_<op> over `count` exchanges of two warpgroups."""
    entry = f"unit_exchange4_{op}"
    partial = golden.exchange_input(seed, op, count=count, rows=geo.rows)
    out = poisoned(partial.shape, DTYPES["float32"])
    if op == "loop":
        expected = reference.exchange4_loop(partial, m_pack=geo.m_pack, rows=geo.rows)
    else:
        expected = reference.exchange4(partial, op, m_pack=geo.m_pack, rows=geo.rows)
    launch = _launch(config, geo, entry, [partial, Uninitialized(out), np.uint32(first_seq), np.uint32(count)])
    return Case(entry, f"{count} x 256", launch, {"out": out}, lambda: exact(out, expected))


def level0_case(config: Config, geo: Geometry, *, seed: int = 0) -> Case:
    """unit_level0 over the whole accumulator image."""
    image = golden.level0_input(seed, columns=geo.o_phys_cols)
    band = poisoned(image.shape, DTYPES["float32"])
    launch = _launch(config, geo, "unit_level0", [image, Uninitialized(band)])
    return Case("unit_level0", f"128 x {geo.o_phys_cols}", launch, {"band": band}, lambda: exact(band, reference.level0(image)))


def combine_case(config: Config, geo: Geometry, *, seed: int = 0, given: golden.CombineInput | None = None) -> Case:
    """unit_combine on the golden partitions, or on those given."""
    data = given or golden.combine_input(seed, m_pack=geo.m_pack, rows=geo.rows, depth=geo.depth)
    out = poisoned((geo.depth // geo.out_k, geo.rows, geo.out_k), DTYPES[config.out_dtype])
    ml = poisoned((128, 2), DTYPES["float32"])
    args = [data.tmem_image, data.row_max, data.row_sum, data.scale_log2e, Uninitialized(out), Uninitialized(ml)]

    def judge() -> Verdict:
        expected, bound, m, merged_l = reference.combine(
            data.tmem_image,
            data.row_max,
            data.row_sum,
            float(data.scale_log2e),
            m_pack=geo.m_pack,
            rows=geo.rows,
            use_fma=config.use_fma,
            out_dtype=config.out_dtype,
        )
        tile = out.astype(np.float64).transpose(1, 0, 2).reshape(geo.rows, geo.depth)
        verdict = worst(tile, expected, bound)
        # m is one of the inputs; l carries one rounding a term and the error of its scale, far below 2^-18.
        parts = ml.astype(np.float64).reshape(geo.m_pack, geo.rows, 2)
        ml_ok = (parts[..., 0] == m).all() and (np.abs(parts[..., 1] - merged_l) <= 2.0**-18 * merged_l).all()
        return Verdict(verdict.error, verdict.bound, verdict.ok and bool(ml_ok))

    shape = f"{geo.m_pack} x {geo.rows} x {geo.depth}"
    return Case("unit_combine", shape, _launch(config, geo, "unit_combine", args), {"out": out, "ml": ml}, judge)


def cases(config: Config, geo: Geometry, *, seed: int = 0) -> list[Case]:
    """Every unit kernel of the config on its golden input."""
    if not config.shared_key:
        return [combine_case(config, geo, seed=seed)]
    return [
        exchange_case(config, geo, "max", seed=seed),
        exchange_case(config, geo, "add", seed=seed),
        exchange_case(config, geo, "loop", seed=seed),
        level0_case(config, geo, seed=seed),
    ]
