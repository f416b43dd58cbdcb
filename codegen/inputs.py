"""The user's own q, k, v: read from .npz or .safetensors, checked, converted to the config's dtype."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from .text import one_line

_SAFETENSORS_DTYPES: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}
_ACCEPTED = tuple(dtype.name for dtype in _SAFETENSORS_DTYPES.values())
_NAMES = ("q", "k", "v")


class InputError(ValueError):
    """An input file that cannot be used; the message is one line naming the file and the array."""


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    with path.open("rb") as raw:
        if not zipfile.is_zipfile(raw):
            raise InputError(f"{path}: not an .npz archive")
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in _NAMES if name in file.files}
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise InputError(f"{path}: {name} is not a stored array")
    # numpy stores bfloat16 as a 2-byte void type; no other 2-byte void array makes sense here.
    return {name: a.view(ml_dtypes.bfloat16) if a.dtype == np.dtype("V2") else a for name, a in arrays.items()}


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    import safetensors

    arrays = {}
    try:
        tensors = safetensors.deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise InputError(one_line(f"{path}: {error}")) from error
    for name, tensor in tensors:
        if name in _NAMES:
            dtype = _SAFETENSORS_DTYPES.get(tensor["dtype"])
            if dtype is None:
                raise InputError(f"{path}: {name} is {tensor['dtype']}; expected one of {', '.join(_SAFETENSORS_DTYPES)}")
            arrays[name] = np.frombuffer(bytes(tensor["data"]), dtype).reshape(tensor["shape"])
    return arrays


def read_qkv(path: Path, *, depth: int, dtype: np.dtype[Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q [batch, q_len, q_heads, depth], k and v [batch, keys, kv_heads, depth] from `path`, converted to `dtype`.

    bfloat16, float16 and float32 arrays are taken. Raises InputError for anything that is not three such arrays of matching shapes, or
    whose values `dtype` cannot hold.
    """
    try:
        if path.suffix == ".safetensors":
            arrays = _read_safetensors(path)
        elif path.suffix == ".npz":
            arrays = _read_npz(path)
        else:
            raise InputError(f"{path}: expected a file named .npz or .safetensors")
    except (OSError, EOFError, ValueError, OverflowError, zipfile.BadZipFile, MemoryError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(one_line(f"{path}: {getattr(error, 'strerror', None) or error or type(error).__name__}")) from error
    missing = [name for name in _NAMES if name not in arrays]
    if missing:
        raise InputError(f"{path}: no array named {' or '.join(missing)}")
    for name, array in arrays.items():
        if array.dtype.name not in _ACCEPTED:
            raise InputError(f"{path}: {name} is {array.dtype.name}; expected {', '.join(_ACCEPTED)}")
        if array.ndim != 4 or 0 in array.shape:
            expected = f"[batch, q_len, q_heads, {depth}]" if name == "q" else f"[batch, keys, kv_heads, {depth}]"
            raise InputError(f"{path}: {name} has shape {array.shape}; expected {expected}")
        if array.shape[3] != depth:
            raise InputError(f"{path}: {name} has depth {array.shape[3]}; this config is for {depth}")
        if not np.isfinite(array).all():
            raise InputError(f"{path}: {name} has values that are not finite")
    q, k, v = (arrays[name] for name in _NAMES)
    if k.shape != v.shape:
        raise InputError(f"{path}: k has shape {k.shape}, v {v.shape}; expected the same")
    if q.shape[0] != k.shape[0]:
        raise InputError(f"{path}: q has batch {q.shape[0]}, k {k.shape[0]}; expected the same")
    if q.shape[2] % k.shape[2]:
        raise InputError(f"{path}: q has {q.shape[2]} heads, k {k.shape[2]}; expected a multiple")
    with np.errstate(over="ignore"):
        converted = [np.ascontiguousarray(array.astype(dtype)) for array in (q, k, v)]
    for name, array in zip(_NAMES, converted, strict=True):
        if not np.isfinite(array).all():
            raise InputError(f"{path}: {name} has values that {dtype.name} cannot hold")
    return converted[0], converted[1], converted[2]
