"""`fa4gen inspect`: gathers, prints, and writes what was asked for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import pipeline, runner
from ..config import Config, load_config
from ..files import check_writable, write_whole
from ..geometry import SUB_TILE_DEPTH, Geometry, derive, symbol
from ..geometry_sm100 import Sm100Geometry
from ..progress import emulation_progress
from ..render import has_attention
from ..text import one_line
from .facts import as_json, gather
from .picture import picture
from .report import show
from .trace import Recorder, chrome_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console

    from ..emulator import LaunchResult

PIDS_PER_TARGET = 10_000


class InspectError(Exception):
    """What was asked for cannot be shown; the message is one line."""

    def __init__(self, text: str) -> None:
        super().__init__(one_line(text))


@dataclass(frozen=True)
class InspectOptions:
    """What `fa4gen inspect` was asked for. The shape is that of the traced run; None is runner.DEFAULT_SHAPE."""

    config: str | Path
    arch: str | None = None
    svg: Path | None = None
    trace: Path | None = None
    json: bool = False
    batch: int | None = None
    q_len: int | None = None
    keys: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    seed: int = 0

    def run_options(self) -> runner.RunOptions:
        """The same shape and seed for the runner."""
        return runner.RunOptions(
            config=self.config,
            batch=self.batch,
            q_len=self.q_len,
            keys=self.keys,
            heads=self.heads,
            kv_heads=self.kv_heads,
            seed=self.seed,
        )


def run(options: InspectOptions, console: Console, errors: Console) -> int:
    """Prints the tables (or JSON) of each target and writes the files; returns the exit code, 1 if the traced run has hazards.

    Raises ConfigError, RenderError, CompileError, BackendError, RunError, InspectError, each with a one-line message, and OSError; nothing
    is printed or written then.
    """
    config = load_config(options.config)
    arches: tuple[str, ...] = (options.arch,) if options.arch else config.arch
    for arch in arches:
        derive(config, arch)
    for path in (options.svg, options.trace):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise InspectError(f"{path}: {'is a folder' if path.is_dir() else 'no such folder'}")
    if options.svg is not None and options.trace is not None and options.svg.absolute() == options.trace.absolute():
        raise InspectError(f"{options.svg}: --svg and --trace name the same file")
    given = options.run_options().shape_options()
    if given and options.trace is None:
        raise InspectError(f"--{next(iter(given)).replace('_', '-')} is the shape of a traced run; give --trace FILE as well")
    traced = [arch for arch in arches if has_attention(config, arch)]
    if options.trace is not None and not traced:
        raise InspectError(f"{config.name} has no attention kernel for {' or '.join(arches)}: there is nothing to trace")
    for path in (options.svg, options.trace):
        if path is not None:
            check_writable(path)
    found = [gather(config, arch) for arch in arches]
    trace, hazards = _trace(config, traced, options, errors) if options.trace is not None else (None, [])

    if options.svg is not None:
        write_whole(options.svg, picture(found).encode())
    if options.trace is not None:
        write_whole(options.trace, (json.dumps(trace, separators=(",", ":")) + "\n").encode())
    if options.json:
        console.file.write(json.dumps({facts.arch: as_json(facts) for facts in found}, indent=2) + "\n")
    else:
        for index, facts in enumerate(found):
            if index:
                console.file.write("\n")
            show(facts, console)
    for line in hazards:
        errors.print(line, highlight=False, markup=False, soft_wrap=True)
    return 1 if hazards else 0


def _trace(config: Config, arches: list[str], options: InspectOptions, errors: Console) -> tuple[dict[str, Any], list[str]]:
    """One trace of a run on each target, and a line for each hazard."""
    traces = []
    hazards: list[str] = []
    with emulation_progress(errors) as progress:
        for index, arch in enumerate(arches):
            trace, result = trace_attention(config, arch, options.run_options(), progress(f"{arch} attention"))
            for event in trace["traceEvents"]:
                event["pid"] += index * PIDS_PER_TARGET
                if event["name"] == "process_name" and len(arches) > 1:
                    event["args"]["name"] += f" ({arch})"
            traces.append(trace)
            hazards += [f"{arch} attention: {hazard.kind}: {hazard.message}" for hazard in result.hazards]
    merged = traces[0]
    for trace in traces[1:]:
        merged["traceEvents"] += trace["traceEvents"]
    merged["otherData"] |= {"kernels": [trace["otherData"].pop("kernel") for trace in traces]}
    return merged, hazards


def trace_attention(
    config: Config, arch: str, options: runner.RunOptions, progress: Callable[[int], None] | None = None
) -> tuple[dict[str, Any], LaunchResult]:
    """The Chrome trace of an emulated run of the full kernel on the runner's input, and what the emulator says of that run.

    Raises RunError for a shape that is not possible, CompileError, InspectError where the kernel cannot be executed.
    """
    run = record_attention(config, arch, options, progress)
    geo, result = run.geo, run.result
    names = {barrier.offset: barrier.name for barrier in pipeline.mbarriers(geo)}
    uses: dict[tuple[int, int], list[str]] = {}
    for barrier in pipeline.named_barriers(config, geo):
        what = uses.setdefault((barrier.number, barrier.threads), [])
        if (use := barrier.orders.split(":")[0]) not in what:
            what.append(use)

    def row(warp: int) -> str:
        role = pipeline.role_of_warp(geo, warp)
        return role.name if role.warps == 1 else f"{role.name}, warp {warp}"

    def named(number: int, threads: int) -> str:
        known = uses.get((number, threads))
        return f"barrier {number} of {threads}" + (f" ({'; '.join(known)})" if known else "")

    trace = chrome_trace(
        run.recorder,
        row=row,
        mbarrier=lambda offset: names.get(offset, f"mbarrier at {offset}"),
        barrier=named,
        metadata={
            "kernel": {
                "entry": symbol(run.entry, arch),
                "arch": arch,
                "shape": run.shape,
                "scheduler_seed": options.seed,
                "warp_instructions": result.instructions,
                "hazards": len(result.hazards),
            }
        },
    )
    return trace, result


@dataclass(frozen=True)
class Recorded:
    """A run of the full kernel under a recorder. shape: in words; entry, geo: of the entry that ran; cluster: CTAs of a cluster."""

    recorder: Recorder
    result: LaunchResult
    shape: str
    entry: Config
    geo: Geometry
    cluster: int


def record_attention(
    config: Config,
    arch: str,
    options: runner.RunOptions,
    progress: Callable[[int], None] | None = None,
    **launch_options: Any,
) -> Recorded:
    """Runs the full kernel on the emulator under a recorder.

    launch_options: partition_keys, ctas, as attention_launch takes them. Raises RunError, CompileError, InspectError.
    """
    from ..attention import attention_entry_info, attention_launch, entry_config
    from ..emulator import LaunchError, Memory, Program, PtxError, TensorMap
    from ..emulator.memory import SHARED_START
    from ..feature_inputs import feature_inputs

    problem = runner.attention_problem(config, options)
    entry = entry_config(config, arch, problem.q.shape[1], problem.q.shape[2] // problem.k.shape[2])
    geo = derive(entry, arch)
    compiled = runner.compiled_sources(config, arch)["attention.cu"]
    inputs = feature_inputs(config, problem.q, problem.k, problem.v)
    launch = attention_launch(entry, geo, inputs.q, inputs.k, inputs.v, inputs.out, inputs.lse, **inputs.arrays, **launch_options)
    arguments = [argument["name"] for argument in attention_entry_info(entry, geo)["arguments"]]
    arrays = {
        id(value): name.removesuffix("_map") for name, value in zip(arguments, launch.args, strict=True) if isinstance(value, TensorMap)
    }

    def label(array: str, coordinates: Sequence[int]) -> str:
        if array in ("k", "v"):
            page = f"page {coordinates[4]} " if config.page_size else ""
            return f"{array.upper()} {page}key {coordinates[1]} depth {coordinates[0] + coordinates[2] * SUB_TILE_DEPTH}"
        return f"{array.upper()} depth {coordinates[0]}"

    def accumulator(column: int) -> str:
        regions = geo.tmem_map if isinstance(geo, Sm100Geometry) else ()
        return next((region.name for region in regions if region.offset <= column < region.end), f"column {column}")

    recorder = Recorder(arrays, SHARED_START, label, accumulator)
    cluster = launch.cluster
    try:
        result = Program.from_ptx(compiled.ptx).launch(
            launch.entry,
            launch.grid,
            launch.block,
            launch.smem_bytes,
            list(launch.args),
            memory=Memory(),
            seed=options.seed,
            progress=progress,
            cluster=(cluster, 1, 1) if cluster > 1 else None,
            observer=recorder,
        )
    except (PtxError, LaunchError) as error:
        raise InspectError(f"{launch.entry}: {error}") from error
    return Recorded(recorder, result, problem.shape, entry, geo, cluster)


__all__ = ["InspectError", "InspectOptions", "record_attention", "run", "trace_attention"]
