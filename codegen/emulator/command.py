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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..files import check_writable, write_whole
from .explore import Exploration
from .memory import Memory, TensorMap, Uninitialized
from .program import LaunchError, LaunchResult, Program
from .ptx import PtxError

Array = NDArray[Any]

HAZARD_KINDS = (
    "race", "uninitialized", "out_of_bounds", "misaligned", "barrier", "deadlock", "proxy_fence", "tcgen05_fence", "wgmma_in_flight",
    "tmem_lane", "tmem_allocation", "mbarrier", "tensor_map", "async_exit",
)  # fmt: skip
MAX_ARRAY_BYTES = 1 << 32
MAX_PTX_BYTES = 1 << 26
DEFAULT_COMMAND_BUDGET = 10_000_000  # warp instructions; the slowest kernels, endless loops of stores, take minutes for them
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
        fields = json.loads(_read_text(path, "JSON"))
    except json.JSONDecodeError as error:
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
    schedule: str = "random",
    explore: int | None = None,
    regions: Sequence[str] = (),
    budget: int | None = None,
    as_json: bool = False,
    progress: Callable[[int], None] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
) -> int:
    """The command with its options already split. Returns the exit status: 0 clean, 1 hazards (listed on stderr), 2 usage.

    entry: None takes the only entry of the file. ignore: hazard kinds that are neither listed nor counted. profile: print wavefronts of
    shared memory by PTX line and bytes by engine on stdout. explore: execute at most so many orders of the synchronisation events instead
    of one; different outputs are a finding too. budget: warp instructions after which the run is given up (DEFAULT_COMMAND_BUDGET).
    as_json: print the findings as one JSON object on stdout, with "stopped" where the run was given up. Outputs are saved unless the run
    could not be made.
    """
    budget = budget or DEFAULT_COMMAND_BUDGET
    err = sys.stderr if stderr is None else stderr
    out = sys.stdout if stdout is None else stdout
    exploration: Exploration | None = None
    try:
        with _prepared(Path(file), entry, grid, block, smem, ignore, args, regions) as launch:
            if explore:
                exploration = launch.explore(explore, budget, progress)
            else:
                result = launch.run(seed, check, profile, schedule, budget, progress)
    except (UsageError, PtxError, LaunchError) as error:
        # What was found before a launch was given up is often why.
        before = [hazard for hazard in error.hazards if hazard.kind not in ignore] if isinstance(error, PtxError) else []
        if as_json and isinstance(error, PtxError):
            print(json.dumps({"hazards": [hazard.as_json() for hazard in before], "stopped": str(error)}), file=out)
        else:
            for hazard in before:
                print(hazard, file=err)
        print(f"fa4gen emulate: {error}", file=err)
        return 2
    found = result.hazards if exploration is None else exploration.hazards
    hazards = [h for h in found if h.kind not in ignore]
    differs = exploration is not None and exploration.outputs > 1
    if as_json:
        report: dict[str, Any] = {"hazards": [h.as_json() for h in hazards]}
        if exploration is not None:
            report["exploration"] = {k: v for k, v in vars(exploration).items() if k != "hazards"}
        else:
            report |= {"instructions": result.instructions, "barriers": result.barriers}
            if result.profile is not None:
                report["profile"] = result.profile.as_dict()
        print(json.dumps(report), file=out)
    else:
        if exploration is None and result.profile is not None:
            print(result.profile, file=out)
        if exploration is not None:
            print(exploration, file=out)
        for hazard in hazards:
            print(hazard.report(), file=err)
    return 1 if hazards or differs else 0


def _region(text: str) -> tuple[str, tuple[int, int, tuple[int, ...]]]:
    """NAME=OFFSET,BYTES[,NxM...] of dynamic shared memory."""
    match = re.fullmatch(r"([^=]+)=(\d{1,9}),(\d{1,9})(?:,(\d{1,9}(?:x\d{1,9})*))?", text)
    if match is None:
        raise UsageError(f"--region {text!r} is not NAME=OFFSET,BYTES or NAME=OFFSET,BYTES,NxM")
    shape = tuple(int(n) for n in match[4].split("x")) if match[4] else ()
    return match[1], (int(match[2]), int(match[3]), shape)


@dataclass
class _Launch:
    """A launch that is ready: the entry, its geometry and arguments, and the arrays behind them."""

    program: Program
    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    smem: int
    values: list[Any]
    arrays: _Arrays
    regions: dict[str, tuple[int, int, tuple[int, ...]]]

    @property
    def fresh(self) -> list[Array]:
        """Outputs nobody has written: those reached through a tensor map only are poisoned too."""
        return [self.arrays.by_path[path] for path in self.arrays.fresh]

    def run(
        self, seed: int, check: bool, profile: bool, schedule: str, budget: int, progress: Callable[[int], None] | None
    ) -> LaunchResult:
        memory = Memory()
        for array in self.fresh:
            memory.poison(array)
        return self.program.launch(
            self.entry, self.grid, self.block, self.smem, self.values, memory=memory, seed=seed, check=check, progress=progress,
            profile=profile, schedule=schedule, regions=self.regions, budget=budget,
        )  # fmt: skip

    def explore(self, limit: int, budget: int, progress: Callable[[int], None] | None) -> Exploration:
        return self.program.explore(
            self.entry,
            self.grid,
            self.block,
            self.smem,
            self.values,
            limit,
            regions=self.regions,
            poisoned=self.fresh,
            budget=budget,
            progress=progress,
        )


def _read_text(file: Path, kind: str = "PTX") -> str:
    try:
        if file.exists() and not file.is_file():
            raise UsageError(f"{file} cannot be read (not a regular file)")
        with file.open("rb") as opened:
            data = opened.read(MAX_PTX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{file} cannot be read ({error.strerror})") from None
    if len(data) > MAX_PTX_BYTES:
        raise UsageError(f"{file} has more than {MAX_PTX_BYTES:,} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{file} is not {kind} text") from None


@contextmanager
def _prepared(
    file: Path,
    entry: str | None,
    grid: str,
    block: str,
    smem: int,
    ignore: Sequence[str],
    args: Sequence[str],
    regions: Sequence[str],
) -> Iterator[_Launch]:
    """Everything of a launch but the launch; at the end the outputs are saved."""
    for kind in ignore:
        if kind not in HAZARD_KINDS:
            raise UsageError(f"--ignore {kind!r} is none of {', '.join(HAZARD_KINDS)}")
    grid3, block3 = parse_dims(grid, "grid"), parse_dims(block, "block")
    program = Program.from_ptx(_read_text(file))
    if entry is None:
        if len(program.entries) != 1:
            raise UsageError(f"--entry is needed: {file} has {', '.join(program.entries) or 'no entry'}")
        entry = next(iter(program.entries))
    arrays = _Arrays()
    values = [parse_argument(spec, arrays) for spec in args]
    for path in arrays.save:
        try:
            check_writable(path)
        except OSError as error:
            raise UsageError(f"{path} cannot be written ({error.strerror})") from None
    yield _Launch(program, entry, grid3, block3, smem, values, arrays, dict(map(_region, regions)))
    for path in arrays.save:
        try:
            save_array(path, arrays.by_path[path])
        except OSError as error:
            raise UsageError(f"{path} cannot be written ({error.strerror})") from None
