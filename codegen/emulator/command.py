"""`fa4gen emulate`: run one entry of a PTX file on arrays from files, list the hazards, write the outputs.

Argument specifications, in the order of the entry's parameters:
    in:FILE.npy                   an array the kernel reads; the parameter is its device address
    out:DTYPE[N,M,...]:FILE.npy   a fresh array, reported when read before it is written; saved at the end
    inout:FILE.npy                read at the start, saved over itself at the end
    u32:7  s64:-1  f32:0.5 ...    a scalar (u8 to u64, s8 to s64, f16, bf16, f32, f64)
    bytes:00ff...                 a by-value structure, in hexadecimal
    tensormap:FILE.json           {"array": one of the three array forms, "box": [...], "swizzle": 128, ...}: the fields of TensorMap
A file named twice is one array, so that a tensor map and a pointer can share it.
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..files import check_writable, write_whole
from .memory import TensorMap, Uninitialized
from .program import LaunchError, LaunchResult, Program
from .ptx import PtxError

Array = NDArray[Any]

HAZARD_KINDS = (
    "race", "uninitialized", "out_of_bounds", "misaligned", "barrier", "deadlock", "proxy_fence", "tcgen05_fence", "wgmma_in_flight",
    "tmem_lane", "tmem_allocation", "mbarrier", "tensor_map",
)  # fmt: skip
MAX_ARRAY_BYTES = 1 << 32
_SCALARS: dict[str, Any] = {
    "u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64, "s8": np.int8, "s16": np.int16, "s32": np.int32, "s64": np.int64,
    "f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64,
}  # fmt: skip
_MAP_FIELDS = (
    "array",
    "box",
    "shape",
    "strides",
    "swizzle",
    "interleave",
    "oob_nan",
    "element_strides",
    "dtype",
    "l2_promotion",
    "offset_bytes",
)


class UsageError(ValueError):
    """A command line that cannot be run: one line."""


@dataclass
class _Arrays:
    """Arrays by file, and which of them are to be saved."""

    by_path: dict[Path, Array] = field(default_factory=dict)
    fresh: set[Path] = field(default_factory=set)
    save: list[Path] = field(default_factory=list)


def parse_dims(text: str, what: str) -> tuple[int, int, int]:
    """X or X,Y or X,Y,Z as three integers. UsageError otherwise."""
    parts = text.split(",")
    if not 1 <= len(parts) <= 3 or not all(re.fullmatch(r"\s*\d{1,12}\s*", p) for p in parts):
        raise UsageError(f"--{what} {text!r} is not X, X,Y or X,Y,Z")
    numbers = [int(p) for p in parts] + [1] * (3 - len(parts))
    return numbers[0], numbers[1], numbers[2]


def _dtype(name: str, spec: str) -> np.dtype[Any]:
    if name == "bfloat16":
        result: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return result
    try:
        result = np.dtype(name)
    except TypeError:
        raise UsageError(f"argument {spec!r}: unknown dtype {name!r}") from None
    if result.hasobject or result.itemsize == 0:
        raise UsageError(f"argument {spec!r}: dtype {name!r} cannot be in device memory")
    return result


def _read_array(path: Path, spec: str) -> Array:
    try:
        loaded = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise UsageError(f"argument {spec!r}: no file {path}") from None
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(f"argument {spec!r}: {path} is not a .npy array ({str(error).splitlines()[0]})") from None
    if not isinstance(loaded, np.ndarray):
        raise UsageError(f"argument {spec!r}: {path} holds several arrays, not one")
    # A copy in C order: a loaded array may be Fortran-ordered or read-only.
    return np.array(loaded, order="C", ndmin=1)


def _array(spec: str, arrays: _Arrays) -> Array:
    form, _, rest = spec.partition(":")
    if form in ("in", "inout"):
        path = Path(rest)
        known = arrays.by_path.get(path)
        if known is None:
            known = arrays.by_path[path] = _read_array(path, spec)
        if form == "inout" and path not in arrays.save:
            arrays.save.append(path)
        return known
    match = re.fullmatch(r"(\w+)\[([\d,\s]*)\]:(.+)", rest)
    if form != "out" or match is None:
        raise UsageError(f"argument {spec!r} is not in:FILE, inout:FILE or out:DTYPE[N,...]:FILE")
    dtype, path = _dtype(match.group(1), spec), Path(match.group(3))
    try:
        shape = tuple(int(x) for x in match.group(2).split(","))
    except ValueError:
        raise UsageError(f"argument {spec!r}: {match.group(2)!r} is not a shape") from None
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    if not 0 < size <= MAX_ARRAY_BYTES:
        raise UsageError(f"argument {spec!r}: an array of {size} bytes is not in 1..{MAX_ARRAY_BYTES}")
    if path in arrays.by_path:
        raise UsageError(f"argument {spec!r}: {path} is named by another argument")
    arrays.by_path[path] = result = np.zeros(shape, dtype)
    arrays.fresh.add(path)
    arrays.save.append(path)
    return result


def _tensor_map(spec: str, path: Path, arrays: _Arrays) -> TensorMap:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"argument {spec!r}: {path} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UsageError(f"argument {spec!r}: {path} is not JSON ({error})") from None
    if not isinstance(fields, dict) or "array" not in fields or "box" not in fields:
        raise UsageError(f"argument {spec!r}: {path} needs an object with at least 'array' and 'box'")
    unknown = sorted(set(fields) - set(_MAP_FIELDS))
    if unknown:
        raise UsageError(f"argument {spec!r}: unknown field {unknown[0]!r}: the fields are {', '.join(_MAP_FIELDS)}")
    if not isinstance(fields["array"], str):
        raise UsageError(f"argument {spec!r}: 'array' is a string such as in:x.npy")
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items() if v is not None}
    values["array"] = _array(fields["array"], arrays)
    if "dtype" in values:
        values["dtype"] = _dtype(str(values["dtype"]), spec)
    try:
        return TensorMap(**values)
    except (ValueError, TypeError) as error:
        raise UsageError(f"argument {spec!r}: {error}") from None


def parse_argument(spec: str, arrays: _Arrays) -> Any:
    """One --arg as a launch argument. UsageError in one line when it is malformed."""
    form, separator, rest = spec.partition(":")
    if not separator:
        raise UsageError(f"argument {spec!r} has no form such as in:, out:, inout:, u32:, f32:, bytes: or tensormap:")
    if form in ("in", "inout"):
        return _array(spec, arrays)
    if form == "out":
        return Uninitialized(_array(spec, arrays))
    if form == "tensormap":
        return _tensor_map(spec, Path(rest), arrays)
    if form == "bytes":
        try:
            return bytes.fromhex(rest)
        except ValueError:
            raise UsageError(f"argument {spec!r} is not hexadecimal") from None
    kind = _SCALARS.get(form)
    if kind is None:
        raise UsageError(f"argument {spec!r}: unknown form {form!r}")
    try:
        if form[0] in "us":
            number = int(rest, 0)
            info = np.iinfo(kind)
            if not info.min <= number <= info.max:
                raise UsageError(f"argument {spec!r}: {number} does not fit {form}")
            return kind(number)
        return kind(float(rest))
    except ValueError as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"argument {spec!r}: {rest!r} is not a number") from None


def save_array(path: Path, array: Array) -> None:
    """Write an array as .npy; the file appears whole or not at all. Raises OSError."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    write_whole(path, buffer.getvalue())


def run_command(
    file: str | Path,
    entry: str | None,
    grid: str = "1",
    block: str = "128",
    smem: int = 0,
    seed: int = 0,
    ignore: Sequence[str] = (),
    args: Sequence[str] = (),
    *,
    check: bool = True,
    profile: bool = False,
    progress: Callable[[int], None] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
) -> int:
    """The command with its options already split. Returns the exit status: 0 clean, 1 hazards (listed on stderr), 2 usage.

    entry: None takes the only entry of the file. ignore: hazard kinds that are neither listed nor counted. profile: print wavefronts of
    shared memory by PTX line and bytes by engine on stdout. Outputs are saved unless the run could not be made.
    """
    err = sys.stderr if stderr is None else stderr
    try:
        result = _run(Path(file), entry, grid, block, smem, seed, ignore, args, check, profile, progress)
    except (UsageError, PtxError, LaunchError) as error:
        # What was found before a launch was given up is often why.
        for hazard in error.hazards if isinstance(error, PtxError) else ():
            if hazard.kind not in ignore:
                print(hazard, file=err)
        print(f"fa4gen emulate: {error}", file=err)
        return 2
    if result.profile is not None:
        print(result.profile, file=sys.stdout if stdout is None else stdout)
    hazards = [h for h in result.hazards if h.kind not in ignore]
    for hazard in hazards:
        print(hazard, file=err)
    return 1 if hazards else 0


def _run(
    file: Path,
    entry: str | None,
    grid: str,
    block: str,
    smem: int,
    seed: int,
    ignore: Sequence[str],
    args: Sequence[str],
    check: bool,
    profile: bool,
    progress: Callable[[int], None] | None,
) -> LaunchResult:
    for kind in ignore:
        if kind not in HAZARD_KINDS:
            raise UsageError(f"--ignore {kind!r} is none of {', '.join(HAZARD_KINDS)}")
    grid3, block3 = parse_dims(grid, "grid"), parse_dims(block, "block")
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{file} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise UsageError(f"{file} is not PTX text") from None
    program = Program.from_ptx(text)
    if entry is None:
        if len(program.entries) != 1:
            raise UsageError(f"--entry is needed: {file} has {', '.join(program.entries) or 'no entry'}")
        entry = next(iter(program.entries))
    arrays = _Arrays()
    values = [parse_argument(spec, arrays) for spec in args]
    memory = None
    if arrays.fresh:
        from .memory import Memory

        # Outputs reached through a tensor map only are poisoned too.
        memory = Memory()
        for path in arrays.fresh:
            memory.poison(arrays.by_path[path])
    for path in arrays.save:
        try:
            check_writable(path)
        except OSError as error:
            raise UsageError(f"{path} cannot be written ({error.strerror})") from None
    result = program.launch(entry, grid3, block3, smem, values, memory=memory, seed=seed, check=check, progress=progress, profile=profile)
    for path in arrays.save:
        try:
            save_array(path, arrays.by_path[path])
        except OSError as error:
            raise UsageError(f"{path} cannot be written ({error.strerror})") from None
    return result
