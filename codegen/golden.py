"""Golden inputs, stored outputs, and how outputs are compared with them.

Inputs come from the raw words of a PCG64 bit generator, whose stream numpy guarantees; distribution methods may change between releases.
Values lie on a dyadic grid, so that products are exact. Outputs are stored as raw bits in tests/golden/<config>/<arch>-<kernel>.npz and
change only on purpose (`fa4gen run --update-golden`).
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .files import npz, write_whole


class GoldenError(ValueError):
    """A stored golden that cannot be read; the message is one line naming the file."""


class Bits:
    """Reproducible integers and dyadic floats from a seed and a stream name."""

    def __init__(self, seed: int, stream: str) -> None:
        digest = hashlib.sha256(f"{seed}/{stream}".encode()).digest()
        self._generator = np.random.PCG64(np.random.SeedSequence(int.from_bytes(digest[:16], "little")))

    def integers(self, shape: tuple[int, ...], low: int, high: int) -> np.ndarray:
        """int64 of `shape` in [low, high); high - low is a power of two, so that every value is equally likely."""
        span = high - low
        if span & (span - 1):
            raise ValueError(f"{span} is no power of two")
        words = self._generator.random_raw(int(np.prod(shape, dtype=np.int64)))
        top_bits = words >> np.uint64(64 - span.bit_length() + 1)
        return np.asarray(top_bits.astype(np.int64).reshape(shape) + low)

    def dyadic(self, shape: tuple[int, ...], *, low: int, high: int, step: float) -> np.ndarray:
        """float32 multiples of `step` (a power of two): step * integers in [low, high)."""
        return np.asarray(self.integers(shape, low, high) * step, np.float32)


def exchange_input(seed: int, name: str, *, count: int, rows: int) -> np.ndarray:
    """partial [count, 256] float32: random rows, then the hard ones.

    All -inf; equal in every part; +0 against -0; subnormal; one part far above the others; large and negative.
    """
    bits = Bits(seed, f"exchange/{name}")
    partial = bits.dyadic((count, 256), low=-4096, high=4096, step=2.0**-6)
    parts = np.arange(256) % 128 // rows
    subnormal = bits.integers((256,), 0, 1 << 20).astype(np.uint32).view(np.float32)
    hard = [
        np.full(256, -np.inf),
        partial[0, np.arange(256) // 128 * 128 + np.arange(256) % rows],
        np.where(parts == 1, 0.0, -0.0),
        subnormal,
        np.where(parts == 1, 2.0**60, partial[0]),
        partial[0] - 2.0**20,
        np.where(parts == 0, -np.inf, partial[0]),
    ]
    for row, values in zip(range(1, count, 2), hard, strict=False):
        partial[row] = np.asarray(values, np.float32)
    return partial


def level0_input(seed: int, *, columns: int) -> np.ndarray:
    """tmem_image [128, columns] float32; every cell holds another value, so that a misplaced read shows."""
    bits = Bits(seed, "level0")
    cells = np.arange(128 * columns, dtype=np.float32).reshape(128, columns)
    noise = bits.dyadic((128, columns), low=-4, high=4, step=2.0**-7)
    return np.asarray((cells - 64 * columns) * 2.0**-4 + noise, np.float32)


@dataclass(frozen=True)
class CombineInput:
    """tmem_image [128, depth], row_max [128], row_sum [128] float32 and the softmax scale times log2(e)."""

    tmem_image: np.ndarray
    row_max: np.ndarray
    row_sum: np.ndarray
    scale_log2e: np.float32


def combine_input(seed: int, *, m_pack: int, rows: int, depth: int) -> CombineInput:
    """Random partitions; the first rows are the hard ones.

    Empty partitions (all but the first, all but the last, the first), equal maxima, one partition far above the others, large negative
    maxima, differences around the flush threshold of the scale.
    """
    bits = Bits(seed, "combine")
    image = bits.dyadic((m_pack, rows, depth), low=-128, high=128, step=2.0**-5)
    row_max = bits.dyadic((m_pack, rows), low=-512, high=512, step=2.0**-6)
    row_sum = bits.dyadic((m_pack, rows), low=0, high=8192, step=2.0**-6) + np.float32(1)
    empty = np.zeros((m_pack, rows), bool)
    empty[1:, 0] = True
    empty[:-1, 1] = True
    empty[0, 2] = True
    row_max[:, 3] = row_max[0, 3]
    row_max[1, 4] = 4096.0
    row_max[:, 5] -= 2.0**14
    row_max[0, 6], row_max[1:, 6] = 0.0, -1009.0
    row_max[0, 7], row_max[1:, 7] = 0.0, -1000.0
    row_max[empty], row_sum[empty] = -np.inf, 0.0
    image[empty] = 0.0
    # 1 / 8 is the softmax scale of depth 64; the golden needs some scale, not a given one.
    scale_log2e = np.float32(0.125 * 1.4426950408889634)
    return CombineInput(image.reshape(128, depth), row_max.reshape(128), row_sum.reshape(128), scale_log2e)


def attention_input(
    seed: int, *, batch: int, q_len: int, q_heads: int, kv_heads: int, keys: int, depth: int, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q [batch, q_len, q_heads, depth], k and v [batch, keys, kv_heads, depth] in `dtype`, multiples of 1/32 in [-2, 2).

    Hard cases, in the first position of each batch and as far as there are heads: a zero query (all scores equal), a query that one key
    dominates, a query whose scores are all far below zero.
    """
    bits = Bits(seed, "attention")
    q = bits.dyadic((batch, q_len, q_heads, depth), low=-64, high=64, step=2.0**-5)
    k = bits.dyadic((batch, keys, kv_heads, depth), low=-64, high=64, step=2.0**-5)
    v = bits.dyadic((batch, keys, kv_heads, depth), low=-64, high=64, step=2.0**-5)
    group = q_heads // kv_heads
    q[:, 0, 0] = 0.0
    if q_heads > 1:
        q[:, 0, 1] = 2.0 * k[:, keys // 2, 1 // group]
    if q_heads > 2:
        # Column 0 of every key becomes 2, so a query of -64 there alone pushes every score down by 128 before scaling.
        q[:, 0, 2, 0] = -64.0
        k[:, :, 2 // group, 0] = 2.0
    return q.astype(dtype), k.astype(dtype), v.astype(dtype)


# --- stored outputs ---------------------------------------------------------------------------------------------------


def golden_folder() -> Path | None:
    """tests/golden of a checkout; None where the package is installed without it."""
    folder = Path(__file__).resolve().parent.parent / "tests" / "golden"
    return folder if folder.is_dir() else None


def _path(folder: Path, config: str, arch: str, kernel: str) -> Path:
    return folder / config / f"{arch}-{kernel}.npz"


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def load(config: str, arch: str, kernel: str) -> dict[str, np.ndarray] | None:
    """Stored outputs of a kernel as raw bits (uint16 or uint32 arrays by output name); None where none are stored. Raises GoldenError."""
    folder = golden_folder()
    if folder is None or not (path := _path(folder, config, arch, kernel)).is_file():
        return None
    try:
        with np.load(path) as stored:
            return {name: stored[name] for name in stored.files}
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
        raise GoldenError(f"{path.parent.name}/{path.name} is no golden: {error}") from error


def store(config: str, arch: str, kernel: str, outputs: Mapping[str, np.ndarray]) -> Path:
    """Write the outputs of a kernel as its golden; the file appears whole or not at all."""
    folder = golden_folder()
    if folder is None:
        raise FileNotFoundError("no tests/golden folder: goldens are written in a checkout")
    path = _path(folder, config, arch, kernel)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, npz({name: _bits(array) for name, array in outputs.items()}))
    return path


def equal_bits(outputs: Mapping[str, np.ndarray], stored: Mapping[str, np.ndarray]) -> bool:
    """Whether every stored output has exactly the bits of the one at hand."""
    return outputs.keys() == stored.keys() and all(np.array_equal(_bits(outputs[name]), stored[name]) for name in stored)


def relative_distance(output: np.ndarray, stored_bits: np.ndarray) -> float:
    """||output - golden|| / ||golden|| over the finite elements; infinity where shapes or the places of non-finite elements differ."""
    if stored_bits.shape != output.shape or stored_bits.dtype.itemsize != output.dtype.itemsize:
        return float("inf")
    golden = stored_bits.view(output.dtype).astype(np.float64)
    ours = output.astype(np.float64)
    finite = np.isfinite(golden)
    if not np.array_equal(finite, np.isfinite(ours)) or not np.array_equal(ours[~finite], golden[~finite]):
        return float("inf")
    norm = float(np.linalg.norm(golden[finite]))
    distance = float(np.linalg.norm(ours[finite] - golden[finite]))
    return distance / norm if norm else distance
