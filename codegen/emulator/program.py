"""Programs and launches: PTX text, arguments, results."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import alu, asynchronous, blocks, cluster_control, control, memops, registers, tcgen05_mma, tensor, tensor_core, tmem
from .asynchronous import TENSOR_MAP_MAGIC
from .cluster import MAX_CLUSTER
from .decode import Assembler, DecodedEntry
from .explore import Exploration, ExploringRun, explore
from .hazards import Hazard
from .machine import Run
from .memory import MODULE_BASE, PARAM_WINDOW, SHARED_START, Mapping, Memory, TensorMap, Uninitialized
from .observe import Observer, watched
from .profile import Profile
from .ptx import TYPE_BYTES, Entry, Module, PtxError, Variable, parse
from .regions import RegionMap, Regions, add_regions
from .schedule import Schedule

Array = NDArray[Any]

INSTRUCTION_TABLES = (alu, control, memops, asynchronous, tensor, tmem, tcgen05_mma, cluster_control, registers)
"""The modules whose import fills the instruction table."""

DECODE_PASSES = (blocks,)
"""The modules whose import adds to what decoding does, after the tables."""

MAX_SHARED_BYTES = 232_448
MAX_THREADS = 1024
MAX_CTAS = 1 << 20
"""Minutes of emulation if each does nothing."""
MAX_LOCAL_BYTES = 1 << 19
MAX_MODULE_BYTES = 1 << 29
DEFAULT_BUDGET = 200_000_000


class LaunchError(ValueError):
    """A launch that cannot be made: one line that says why."""


@dataclass
class LaunchResult:
    """hazards: what the checks found; instructions: warp instructions executed; barriers: completions of bar.sync-style barriers.

    profile: shared-memory wavefronts and bytes by engine, of a launch with profile=True.
    """

    hazards: list[Hazard] = field(default_factory=list)
    instructions: int = 0
    barriers: int = 0
    profile: Profile | None = None


def _align(value: int, to: int) -> int:
    return -(-value // to) * to


class Program:
    """A PTX module ready to be launched."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.entries: dict[str, Entry] = module.entries
        self._decoded: dict[str, DecodedEntry] = {}
        self._layouts: dict[str, tuple[dict[str, tuple[str, int]], int, int]] = {}
        self._module_addresses, self._module_mappings = self._place_module_variables()

    @classmethod
    def from_ptx(cls, text: str) -> Program:
        """Parse PTX and decode every entry. PtxError names the line of anything unknown."""
        program = cls(parse(text))
        for name in program.entries:
            program._decode(name)
        return program

    # ----------------------------------------------------------------------------------------------------------- variables

    def _place_module_variables(self) -> tuple[dict[str, tuple[str, int]], list[Mapping]]:
        addresses: dict[str, tuple[str, int]] = {}
        mappings: list[Mapping] = []
        variables = [v for v in self.module.variables.values() if v.space in ("global", "const")]
        for entry in self.module.entries.values():
            variables += [
                Variable(f"{entry.name}::{name}", v.space, v.type, v.align, v.size, v.line, v.extern, v.data, v.references)
                for name, v in entry.variables.items()
                if v.space in ("global", "const")
            ]
        at = MODULE_BASE
        for variable in variables:
            if variable.extern and not variable.size:
                raise PtxError(f"extern variable {variable.name} is not defined in this module", variable.line)
            at = _align(at, max(variable.align, 16))
            addresses[variable.name] = ("module", at)
            raw = bytearray(variable.data if variable.data is not None else bytes(variable.size))
            array = np.frombuffer(raw, np.uint8)
            mappings.append(Mapping(at, array, variable.name, writable=variable.space == "global"))
            at += variable.size + 256
            if at - MODULE_BASE > MAX_MODULE_BYTES:
                raise PtxError(f"module variables take more than {MAX_MODULE_BYTES} bytes", variable.line)
        for variable, mapping in zip(variables, mappings, strict=True):
            for position, name, offset in variable.references:
                known = addresses.get(name)
                if known is None:
                    raise PtxError(f"the initialiser of {variable.name} names the unknown {name}", variable.line)
                size = TYPE_BYTES[variable.type]
                mapping.array[position : position + size] = np.frombuffer((known[1] + offset).to_bytes(8, "little")[:size], np.uint8)
        return addresses, mappings

    def _layout(self, entry: Entry) -> tuple[dict[str, tuple[str, int]], int, int]:
        """(addresses of every variable the entry sees, bytes of static shared memory, bytes of local memory a lane)."""
        known = self._layouts.get(entry.name)
        if known is not None:
            return known
        addresses = dict(self._module_addresses)
        for name in entry.variables:
            inner = f"{entry.name}::{name}"
            if inner in addresses:
                addresses[name] = addresses[inner]
        shared, local = SHARED_START, 0
        dynamic: list[Variable] = []
        named = [*self.module.variables.items(), *entry.variables.items()]
        for name, variable in named:
            if variable.space == "shared":
                if variable.extern:
                    dynamic.append(variable)
                    continue
                shared = _align(shared, max(variable.align, 1))
                addresses[name] = ("shared", shared)
                shared += variable.size
            elif variable.space == "local":
                local = _align(local, max(variable.align, 1))
                addresses[name] = ("local", local)
                local += variable.size
        for variable in dynamic:
            addresses[variable.name] = ("shared", _align(shared, max(variable.align, 16)))
        if dynamic:
            # Dynamic shared memory of all extern arrays is one and the same.
            shared = max(address for space, address in (addresses[v.name] for v in dynamic))
        if local > MAX_LOCAL_BYTES:
            raise PtxError(f"{entry.name} uses {local} bytes of local memory a thread, more than {MAX_LOCAL_BYTES}", entry.line)
        result = addresses, shared - SHARED_START, local
        self._layouts[entry.name] = result
        return result

    def _decode(self, name: str) -> DecodedEntry:
        decoded = self._decoded.get(name)
        if decoded is None:
            entry = self.entries[name]
            addresses, shared, local = self._layout(entry)
            decoded = self._decoded[name] = DecodedEntry(Assembler(self.module, entry, addresses, shared, local))
        return decoded

    def _regions(self, kernel: Entry, described: RegionMap, smem: int) -> Regions:
        """Names of shared memory: the caller's regions, which start where dynamic shared memory does, and the entry's own variables."""
        addresses, static, _ = self._layout(kernel)
        result = Regions()
        add_regions(result, described, SHARED_START + static, smem)
        for name, variable in [*self.module.variables.items(), *kernel.variables.items()]:
            if variable.space == "shared" and variable.size:
                space, address = addresses[name]
                element = TYPE_BYTES[variable.type]
                if element == 1 and variable.align in (2, 4, 8) and variable.size % variable.align == 0:
                    # Compilers write arrays as bytes that are aligned to an element.
                    element = variable.align
                shape = (variable.size // element,) if element > 1 and variable.size > element else ()
                if space == "shared":
                    result.add(source_name(name), address, variable.size, shape)
        return result

    # -------------------------------------------------------------------------------------------------------------- launch

    def launch(
        self,
        entry: str,
        grid: Sequence[int] = (1, 1, 1),
        block: Sequence[int] = (128, 1, 1),
        smem: int = 0,
        args: Sequence[Any] = (),
        memory: Memory | None = None,
        seed: int = 0,
        check: bool = True,
        progress: Callable[[int], None] | None = None,
        budget: int = DEFAULT_BUDGET,
        tensor_cores: str = "exact",
        cluster: Sequence[int] | None = None,
        observer: Observer | None = None,
        profile: bool = False,
        schedule: str = "random",
        regions: RegionMap | None = None,
    ) -> LaunchResult:
        """Run one entry on `args` (arrays, numpy scalars, bytes, TensorMap, Uninitialized) and return what the checks found.

        grid and block count CTAs and threads, smem is dynamic shared memory in bytes, budget bounds the warp instructions, tensor_cores is
        the accumulation model of matrix instructions, "exact" or "truncating" (tensor_core.py), cluster the CTAs of a cluster along each
        axis (the entry's .reqnctapercluster, or one CTA, when left out), observer is told what happens, profile counts
        shared-memory wavefronts and bytes by engine, schedule is the policy that chooses the next warp (schedule.py), regions names parts
        of dynamic shared memory in messages: name to (offset, bytes) or (offset, bytes, shape). Arrays are written in place.
        LaunchError for a launch that cannot be made, PtxError for an instruction that cannot be executed (its
        `hazards` hold what was found before).
        """
        options = self._options(entry, grid, block, smem, args, memory, tensor_cores, cluster, schedule, regions)
        if observer is not None:
            options["code"] = watched(options["code"], observer)
        run = Run(
            **options, seed=seed, check=check, budget=budget, progress=progress, observer=observer, profile=Profile() if profile else None
        )
        try:
            with np.errstate(all="ignore"):
                run.run()
            run.global_shadow.pages.clear()
        except PtxError as error:
            error.hazards = run.reporter.hazards()
            raise
        return LaunchResult(run.reporter.hazards(), run.instructions, run.barriers, run.profile)

    def explore(
        self,
        entry: str,
        grid: Sequence[int] = (1, 1, 1),
        block: Sequence[int] = (128, 1, 1),
        smem: int = 0,
        args: Sequence[Any] = (),
        limit: int = 1000,
        budget: int = DEFAULT_BUDGET,
        cluster: Sequence[int] | None = None,
        regions: RegionMap | None = None,
        poisoned: Sequence[Array] = (),
        progress: Callable[[int], None] | None = None,
    ) -> Exploration:
        """Execute a launch of one CTA, or one cluster, in every order of its synchronisation events that can make a difference.

        At most `limit` orders are executed; the result says whether that was all. The arguments are those of `launch`; poisoned: arrays
        that nobody has written yet, beside those given as Uninitialized. Afterwards the arrays hold the outputs of the last order.
        LaunchError and PtxError as there, and LaunchError for more than one CTA or cluster.
        """
        if limit < 1:
            raise LaunchError(f"a limit of {limit} interleavings is below 1")
        arrays = {id(a): (a, a.copy()) for a in map(_array_of, args) if a is not None}

        def make(states: list[Any]) -> tuple[ExploringRun, Callable[[], bytes]]:
            for array, before in arrays.values():
                if array.flags.writeable:
                    array[...] = before
            memory = Memory()
            for array in poisoned:
                memory.poison(array)
            options = self._options(entry, grid, block, smem, args, memory, "exact", cluster, "random", regions)
            run = ExploringRun(**options, plan=states, seed=0, check=True, budget=budget, progress=progress)
            if run.total_clusters != 1:
                raise LaunchError(f"exploration is for one CTA or one cluster, not a grid of {run.total} CTAs")

            def digest() -> bytes:
                state = hashlib.sha256()
                for array, _ in arrays.values():
                    state.update(array.tobytes())
                return state.digest()

            return run, digest

        with np.errstate(all="ignore"):
            return explore(make, limit)

    def _options(
        self,
        entry: str,
        grid: Sequence[int],
        block: Sequence[int],
        smem: int,
        args: Sequence[Any],
        memory: Memory | None,
        tensor_cores: str,
        cluster: Sequence[int] | None,
        schedule: str,
        regions: RegionMap | None,
    ) -> dict[str, Any]:
        """What a Run needs, checked."""
        kernel = self.entries.get(entry)
        if kernel is None:
            raise LaunchError(f"no entry {entry!r}: the module has {', '.join(self.entries) or 'none'}")
        grid3, block3 = _dim3("grid", grid), _dim3("block", block)
        threads = block3[0] * block3[1] * block3[2]
        if threads > MAX_THREADS or block3[2] > 64:
            raise LaunchError(f"a block of {threads} threads ({block3}) is larger than {MAX_THREADS} (z at most 64)")
        if grid3[0] >= 1 << 31 or max(grid3[1:]) > 65535:
            raise LaunchError(f"grid {grid3} is larger than (2^31-1, 65535, 65535)")
        if grid3[0] * grid3[1] * grid3[2] > MAX_CTAS:
            raise LaunchError(f"grid {grid3} has more than the {MAX_CTAS} CTAs that are emulated")
        if kernel.reqntid is not None and block3 != kernel.reqntid:
            raise LaunchError(f"{entry} requires a block of {kernel.reqntid}, not {block3}")
        if kernel.maxntid is not None and threads > kernel.maxntid[0] * kernel.maxntid[1] * kernel.maxntid[2]:
            raise LaunchError(f"{entry} allows blocks of at most {kernel.maxntid}, not {block3}")
        cluster3 = _cluster(kernel, grid3, cluster)
        if tensor_cores not in tensor_core.MODES:
            raise LaunchError(f"tensor_cores={tensor_cores!r} is none of {', '.join(tensor_core.MODES)}")
        decoded = self._decode(entry)
        _, static, _ = self._layout(kernel)
        if smem < 0 or static + smem > MAX_SHARED_BYTES:
            raise LaunchError(f"{static} bytes of static and {smem} of dynamic shared memory are not in 0..{MAX_SHARED_BYTES}")
        try:
            policy = Schedule(schedule)
            names = self._regions(kernel, regions or {}, smem)
        except ValueError as error:
            raise LaunchError(str(error)) from None
        memory = Memory() if memory is None else memory
        for mapping in self._module_mappings:
            memory._add(mapping)
        params, maps = _pack_arguments(kernel, args, memory)
        return {
            "code": decoded, "grid": grid3, "block": block3, "shared_bytes": static + smem, "dynamic_bytes": smem, "params": params,
            "tensor_maps": maps, "memory": memory, "tensor_cores": tensor_cores, "cluster": cluster3, "schedule": policy, "regions": names,
        }  # fmt: skip


def source_name(name: str) -> str:
    """A variable as its source calls it: of a function's static variable, which C++ names _ZZ<function>E<length><name>, the name."""
    found = re.match(r"_ZZ.*?E(\d+)(\w+)$", name)
    return found[2][: int(found[1])] if found and len(found[2]) >= int(found[1]) else name


def source_lines(program: Program, lined: Program, entry: str) -> dict[int, str]:
    """PTX line of `program` to file:line, by the line information of `lined`: the same module compiled with it. Empty where they differ."""
    known, other = program.entries.get(entry), lined.entries.get(entry)
    if known is None or other is None or [i.opcode for i in known.instructions] != [i.opcode for i in other.instructions]:
        return {}
    return {mine.line: theirs.source for mine, theirs in zip(known.instructions, other.instructions, strict=True) if theirs.source}


def _array_of(value: Any) -> Array | None:
    """The array behind an argument."""
    if isinstance(value, TensorMap | Uninitialized):
        return value.array
    return value if isinstance(value, np.ndarray) and value.ndim else None


def _cluster(kernel: Entry, grid: tuple[int, int, int], cluster: Sequence[int] | None) -> tuple[int, int, int]:
    """The cluster of a launch, checked."""
    wanted = None if cluster is None else _dim3("cluster", cluster)
    if kernel.cluster is not None and wanted is not None and wanted != kernel.cluster:
        raise LaunchError(f"{kernel.name} requires clusters of {kernel.cluster}, not {wanted}")
    result = wanted or kernel.cluster or (1, 1, 1)
    size = result[0] * result[1] * result[2]
    limit = MAX_CLUSTER if kernel.max_cluster is None else min(MAX_CLUSTER, kernel.max_cluster)
    if size > limit:
        raise LaunchError(f"clusters of {result} have {size} CTAs, more than {limit}")
    if any(g % c for g, c in zip(grid, result, strict=True)):
        raise LaunchError(f"grid {grid} is not a multiple of the cluster {result}")
    return result


def _dim3(what: str, value: Sequence[int]) -> tuple[int, int, int]:
    values = [value] if isinstance(value, int) else list(value)
    if not 1 <= len(values) <= 3:
        raise LaunchError(f"{what} {value!r} does not have one to three dimensions")
    try:
        numbers = [int(v) for v in values] + [1] * (3 - len(values))
    except (TypeError, ValueError):
        raise LaunchError(f"{what} {value!r} is not made of integers") from None
    if min(numbers) < 1:
        raise LaunchError(f"{what} {tuple(numbers)} has a dimension below 1")
    return numbers[0], numbers[1], numbers[2]


def _pack_arguments(kernel: Entry, args: Sequence[Any], memory: Memory) -> tuple[bytes, list[TensorMap]]:
    if len(args) != len(kernel.params):
        raise LaunchError(f"{kernel.name} takes {len(kernel.params)} arguments, not {len(args)}")
    buffer = bytearray(kernel.param_bytes)
    maps: list[TensorMap] = []
    for number, (value, param) in enumerate(zip(args, kernel.params, strict=True)):
        try:
            if isinstance(value, TensorMap):
                memory.map(value.array)
                raw = TENSOR_MAP_MAGIC + len(maps).to_bytes(8, "little")
                raw = raw.ljust(128, b"\0")
                maps.append(value)
            elif isinstance(value, Uninitialized):
                raw = memory.poison(value.array).to_bytes(8, "little")
            elif isinstance(value, np.ndarray) and value.ndim:
                raw = memory.map(value).to_bytes(8, "little")
            elif isinstance(value, np.generic | np.ndarray):
                raw = value.tobytes()
            elif isinstance(value, bytes | bytearray):
                raw = bytes(value)
            else:
                raise LaunchError(
                    f"argument {number} of {kernel.name} is a {type(value).__name__}: pass arrays, numpy scalars, bytes or a TensorMap"
                )
        except LaunchError:
            raise
        except ValueError as error:
            raise LaunchError(f"argument {number} of {kernel.name}: {error}") from None
        if len(raw) != param.size:
            raise LaunchError(f"argument {number} of {kernel.name} has {len(raw)} bytes, the parameter {param.size}")
        buffer[param.offset : param.offset + param.size] = raw
    return bytes(buffer), maps


__all__ = ["PARAM_WINDOW", "LaunchError", "LaunchResult", "Program"]
