"""`fa4gen bench` as a whole: cells and configs in, measurements, table, JSON and plot out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import __version__
from .. import compiler
from ..config import Config, ConfigError, load_config, load_shipped, shipped_configs
from ..files import write_whole
from ..render import has_attention
from ..text import one_line
from .cells import Cell, choose_cells, with_kv_dtypes
from .report import CellResults, Report, ReportError, Result, draw, file_stem, from_json, print_report, to_json

if TYPE_CHECKING:
    from rich.console import Console

    from . import peers
    from .measure import Gpu, Implementation, Own, Problem

DEFAULT_REPEATS = 40
TUNING_REPEATS = 3


class BenchError(Exception):
    """The benchmark cannot start; the message is one line."""


@dataclass(frozen=True)
class BenchOptions:
    """What `fa4gen bench` was asked for.

    configs: files or shipped names, none: every shipped config with a kernel for the GPU but those of models; cells: `name=value,...` texts
    cells_ref: a YAML file or shipped series; out: folder of the JSON and the plot; peers: "auto", "none" or names with commas
    time_limit: seconds after which no further cell is started, None: no limit; show: an earlier run's JSON, shown instead of measuring
    """

    configs: tuple[str, ...] = ()
    cells: tuple[str, ...] = ()
    cells_ref: str | None = None
    out: Path | None = None
    peers: str = "auto"
    repeats: int = DEFAULT_REPEATS
    time_limit: float | None = None
    show: Path | None = None


def default_out() -> Path:
    """bench/results/ of the checkout that the package runs from, else ./bench-results."""
    root = Path(__file__).resolve().parents[2]
    return root / "bench" / "results" if (root / "pyproject.toml").is_file() else Path("bench-results")


def _unmeasured(config: Config) -> list[str]:
    """The features of a config that cells have no inputs for."""
    missing = {"ragged_queries", "page_list"} | ({"kv_dtype"} if config.kv_scale == "page" else set())
    return [feature for feature in config.features() if feature in missing]


def chosen_configs(refs: tuple[str, ...]) -> list[Config]:
    """The configs of `refs`, each once, or every shipped one. Raises ConfigError, BenchError for two of one name."""
    configs = list(dict.fromkeys(load_config(ref) for ref in refs)) if refs else [load_shipped(name) for name in shipped_configs()]
    # Those of models would measure each cell again, with features that nobody asked for.
    configs = [config for config in configs if refs or not set(config.features()) - {"kv_dtype"}]
    names = [config.name for config in configs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise BenchError(f"two different configs are named {twice}; give one of them another name")
    return configs


def with_kernel(configs: list[Config], arch: str, *, asked: bool) -> list[Config]:
    """The configs that have an attention kernel for `arch`. Raises BenchError for one that was asked for and has none."""
    for config in configs:
        if unmeasured := _unmeasured(config):
            raise BenchError(f"{config.name} asks for {unmeasured[0]}, which is not measured")
    usable = [config for config in configs if arch in config.arch and has_attention(config, arch)]
    if asked and len(usable) < len(configs):
        missing = next(config.name for config in configs if config not in usable)
        raise BenchError(f"{missing} has no attention kernel for {arch}, the GPU's architecture")
    if not usable:
        raise BenchError(f"no config has an attention kernel for {arch}, the GPU's architecture")
    return usable


def with_features(configs: list[Config], cell: Cell, arch: str) -> dict[Cell, list[Config]]:
    """The configs with the features of the cell, by the cell with theirs; those left out that have no kernel with these features."""
    applied: dict[Cell, list[Config]] = {}
    for config in configs:
        try:
            # A cell's feature is asked of the GPU at hand alone.
            variant, full = cell.applied_to(config.model_copy(update={"arch": (arch,)}))
        except ConfigError:
            continue
        applied.setdefault(full, []).append(variant)
    return applied


def matching(configs: list[Config], cell: Cell) -> dict[tuple[str, str], list[Config]]:
    """The configs that a cell can be run with, by the (dtype, mask) that they share the inputs and the reference of."""
    groups: dict[tuple[str, str], list[Config]] = {}
    for config in configs:
        if config.ov_depth == cell.depth and config.kv_dtype == cell.kv_dtype and config.group in (None, cell.group):
            groups.setdefault((config.dtype, config.mask), []).append(config)
    return groups


# --- one cell ------------------------------------------------------------------------------------------------------------------


def _own(problem: Problem, config: Config) -> Iterator[Own]:
    from .measure import Own, own_sources

    normal, stream = own_sources(config, problem.gpu.backend.arch)
    yield Own(problem, config, "fa4gen", normal)
    if stream is not None:
        yield Own(problem, config, "stream", stream)


def _own_note(own: Own) -> str:
    used = own.resources
    spills = used.spill_store_bytes + used.spill_load_bytes
    return f"{own.grid[0]} CTAs, {used.registers} registers" + (f", {spills} bytes spilled" if spills else "")


def _prepared_peers(problem: Problem, names: list[str]) -> tuple[list[peers.Peer], list[Result]]:
    from . import peers

    gpu = problem.gpu

    def tuning_time(run: Callable[[], Any]) -> float:
        return sorted(gpu.timed("tuning", run, flush="read", host_seconds=2e-4) for _ in range(TUNING_REPEATS))[TUNING_REPEATS // 2]

    tensors = peers.Tensors(
        problem.cell,
        *(problem.q, problem.k, problem.v),
        pages=problem.pages,
        table=problem.table,
        sinks=problem.sinks,
        scale=problem.scale,
        causal=problem.causal,
        sms=gpu.sms,
        time=tuning_time,
    )
    ready, refused = [], []
    for name in names:
        try:
            ready.append(peers.prepare(name, tensors))
        except peers.Refused as error:
            refused.append(Result(name, refused=str(error)))
    return ready, refused


def measure_cell(gpu: Gpu, cell: Cell, dtype: str, mask: str, configs: list[Config], names: list[str], repeats: int) -> CellResults:
    """All implementations on one cell, in one run on the same data. Raises BackendError."""
    from .measure import Problem, check, time_all

    problem = Problem(gpu, cell, dtype, causal=mask == "causal")
    owned: list[Own] = []
    try:
        for config in configs:
            owned += _own(problem, config)
        ready: list[peers.Peer] = []
        if cell.kv_dtype is not None:
            # None of them takes such K and V beside a 16-bit Q.
            refused = [Result(name, refused=f"K and V are {cell.kv_dtype}") for name in names]
        else:
            ready, refused = _prepared_peers(problem, names) if names else ([], [])
        implementations: list[Implementation] = [*owned, *ready]
        checked = [check(problem, implementation) for implementation in implementations]
        lse_errors = [own.lse_error() if own.name == "fa4gen" else None for own in owned]
        times = time_all(gpu, checked, repeats=repeats)
        results = [
            Result(own.name, own.config.name, us, item.error, lse_error, _own_note(own))
            for own, item, us, lse_error in zip(owned, checked, times, lse_errors, strict=False)
        ]
        results += [
            Result(peer.name, None, us, item.error, None, peer.note)
            for peer, item, us in zip(ready, checked[len(owned) :], times[len(owned) :], strict=True)
        ]
        return CellResults(cell, dtype, mask, results + refused)
    finally:
        for own in owned:
            own.free()
        problem.free()


# --- the run -------------------------------------------------------------------------------------------------------------------


def _save(report: Report, out: Path) -> Path:
    path = out / f"{file_stem(report)}.json"
    out.mkdir(parents=True, exist_ok=True)
    write_whole(path, to_json(report).encode())
    return path


def _plot(report: Report, out: Path, errors: Console) -> None:
    try:
        path = out / f"{file_stem(report)}.svg"
        out.mkdir(parents=True, exist_ok=True)
        write_whole(path, draw(report))
        errors.print(f"plot: {path}", highlight=False, markup=False, soft_wrap=True)
    except ReportError as error:
        errors.print(f"no plot: {error}", highlight=False, markup=False, soft_wrap=True)


@contextmanager
def _peers_released() -> Iterator[None]:
    """Frees what torch still caches of one cell before the next one allocates."""
    import gc
    import sys

    yield
    if module := sys.modules.get("fa4gen.codegen.bench.peers"):
        gc.collect()
        module.release()


def _show(options: BenchOptions, path: Path, console: Console, errors: Console) -> int:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ReportError(f"{path}: not UTF-8 text") from None
    report = from_json(text, str(path))
    print_report(report, console)
    if options.out is not None:
        _plot(report, options.out, errors)
    return 1 if report.failures() else 0


def run(options: BenchOptions, console: Console, errors: Console) -> int:
    """Measures and reports; returns 1 where an output of ours is out of bounds, else 0.

    Raises ConfigError, CellError, BenchError, PeerError, BackendError (BackendUnavailable without a GPU), CompileError, ReportError: each
    with a message of one line. The JSON is written after every cell, so that an interrupted run keeps what it has.
    """
    if options.show is not None:
        return _show(options, options.show, console, errors)
    configs = chosen_configs(options.configs)
    cells = with_kv_dtypes(choose_cells(options.cells, options.cells_ref, [config.ov_depth for config in configs]), configs)
    from .measure import Gpu

    gpu = Gpu()
    arch = gpu.backend.arch
    configs = with_kernel(configs, arch, asked=bool(options.configs))
    started = time.monotonic()

    def note(text: str) -> None:
        errors.print(one_line(text), highlight=False, markup=False, soft_wrap=True)

    usable: dict[str, str] = {}
    missing: dict[str, str] = {}
    if options.peers != "none":
        from . import peers

        usable, missing = peers.choose(options.peers)
    note(f"{gpu.backend.device_name}: {len(cells)} cells, peers: {', '.join(usable) or 'none'}")
    report = Report(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        gpu=gpu.info,
        nvrtc=compiler.nvrtc_version(),
        fa4gen=__version__,
        repeats=options.repeats,
        flush_bytes=gpu.flush_bytes,
        ceiling_gbs={"before": gpu.read_ceiling()},
        configs={config.name: config.model_dump(mode="json") for config in configs},
        peers=usable,
        missing=missing,
    )
    out = options.out or default_out()
    skipped = 0
    for index, cell in enumerate(cells, 1):
        groups = [
            (full, dtype, mask, group)
            for full, variants in with_features(configs, cell, arch).items()
            for (dtype, mask), group in matching(variants, full).items()
        ]
        if not groups:
            note(f"{index}/{len(cells)} {cell}: no config for it")
        for full, dtype, mask, group in groups:
            if options.time_limit is not None and time.monotonic() - started > options.time_limit:
                skipped += 1
                continue
            with _peers_released():
                entry = measure_cell(gpu, full, dtype, mask, group, list(usable), options.repeats)
            report.cells.append(entry)
            _save(report, out)
            ours = ", ".join(f"{r.config} {r.us['zero'].median:.1f} us" for r in entry.results if r.implementation == "fa4gen")
            best = entry.best_peer("zero")
            note(f"{index}/{len(cells)} {full}: {ours}" + (f"; {best.implementation} {best.us['zero'].median:.1f} us" if best else ""))
    if not report.cells:
        raise BenchError("nothing was measured: no cell fits a config, or the time limit came first")
    if skipped:
        note(f"time limit: {skipped} of {len(cells)} cells were not measured")
    report = replace(report, ceiling_gbs=report.ceiling_gbs | {"after": gpu.read_ceiling()})
    path = _save(report, out)
    print_report(report, console)
    note(f"report: {path}")
    _plot(report, out, errors)
    for line in report.failures():
        note(f"out of bounds: {line}")
    return 1 if report.failures() else 0
