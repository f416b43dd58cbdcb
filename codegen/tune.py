"""`fa4gen tune`: measures the legal geometry choices of a config on the GPU at hand and writes the fastest back into its file."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from . import compiler, render
from .bench.cells import Cell, choose_cells, with_kv_dtypes
from .bench.command import with_kernel
from .bench.report import FLUSHES, OUT_BOUND, Flush, Times
from .config import Config, ConfigError, load_config, parse_config, shipped_configs
from .files import write_whole
from .geometry import derive

if TYPE_CHECKING:
    from rich.console import Console

    from .bench.measure import Gpu, Own

# Fields that are tuned, with every value worth offering: the config's rules say which are legal. Fields no config has are skipped.
CANDIDATES: dict[str, tuple[Any, ...]] = {
    "tile_rows": (8, 16, 32, 64),
    "warpgroups": (1, 2),
    "ctas_per_sm": (1, 2, 3, 4),
    "slot_depth": (64, 128, 256),
    "ring_slots": tuple(range(2, 65)),
    "rescale": ("eager", "lazy"),
}
DEFAULT_REPEATS = 15
# A score this close to the best is as good: repeated measurements of one kernel differ by about as much.
NOISE = 0.003
SHOWN = 25


class TuneError(Exception):
    """Tuning cannot start, or its result cannot be written; the message is one line."""


@dataclass(frozen=True)
class TuneOptions:
    """What `fa4gen tune` was asked for.

    config: a file, or a shipped name in a checkout; cells, cells_ref: as for bench; fields: those to tune, none: all of CANDIDATES
    repeats: launches of each variant under each L2 flush; write: False only prints the table
    """

    config: str
    cells: tuple[str, ...] = ()
    cells_ref: str | None = None
    fields: tuple[str, ...] = ()
    repeats: int = DEFAULT_REPEATS
    write: bool = True


@dataclass
class Variant:
    """One legal choice. values: the tuned fields that are given (others are derived); us: its times on each cell so far;
    refused: why it is out."""

    config: Config
    values: dict[str, Any]
    registers: int | None = None
    us: list[dict[Flush, Times]] = field(default_factory=list)
    refused: str | None = None

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.values.items()) or "as derived"


# --- what is legal -------------------------------------------------------------------------------------------------------------


def tuned_fields(asked: Sequence[str]) -> tuple[str, ...]:
    """The fields to tune. Raises TuneError for a name that is not tuned."""
    known = tuple(name for name in CANDIDATES if name in Config.model_fields)
    for name in asked:
        if name not in known:
            raise TuneError(f"--field {name[:40]}: fields that are tuned are {', '.join(known)}")
    return tuple(name for name in known if not asked or name in asked)


def legal_variants(config: Config, arch: str, fields: Sequence[str]) -> list[Variant]:
    """Every choice of `fields` that the rules allow on all of the config's targets, the config's own first, each geometry once.

    A field that the config does not give may stay derived; one that it gives keeps a value of its own.
    """
    given = config.model_dump(mode="json", exclude_none=True)
    choices = [tuple(dict.fromkeys([given.get(name), *CANDIDATES[name]])) for name in fields]
    # Defaults such as a rescale policy are values too: only None means derived.
    others = {name: value for name, value in given.items() if name not in fields}
    seen: set[Any] = set()
    variants = []
    for values in itertools.product(*choices):
        chosen = {name: value for name, value in zip(fields, values, strict=True) if value is not None}
        try:
            candidate = parse_config(others | chosen)
            geometry = derive(candidate, arch)
        except ConfigError:
            continue
        # What is not geometry, such as a rescale policy, tells variants apart as well.
        rest = tuple(value for name, value in chosen.items() if not hasattr(geometry, name))
        if (geometry, rest) not in seen:
            seen.add((geometry, rest))
            variants.append(Variant(candidate, chosen))
    return variants


def refuse_spills(variant: Variant, module: compiler.Module) -> None:
    """Notes the registers, and refuses a variant whose kernel spills."""
    for entry, kernel in module.kernels.items():
        variant.registers = max(kernel.registers, variant.registers or 0)
        spilled = kernel.spill_store_bytes + kernel.spill_load_bytes
        if spilled and entry not in variant.config.allow_spills:
            variant.refused = f"spills {spilled} bytes"


# --- the choice ----------------------------------------------------------------------------------------------------------------


def scores(variants: Sequence[Variant]) -> list[float]:
    """For each variant the geometric mean, over cells and flushes, of its median over the best one's: 1 is best everywhere."""
    measured = [variant for variant in variants if variant.refused is None]
    if not measured:
        return [math.inf for _ in variants]
    tables = [[us[flush].median for us in variant.us for flush in FLUSHES] for variant in measured]
    best = [min(column) for column in zip(*tables, strict=True)]
    means = iter([math.exp(sum(math.log(us / least) for us, least in zip(row, best, strict=True)) / len(best)) for row in tables])
    return [next(means) if variant.refused is None else math.inf for variant in variants]


def winner(variants: Sequence[Variant]) -> Variant | None:
    """The variant to keep: of those within NOISE of the best score the config's own (the first), else the one with the fewest fields given.

    None where all are refused.
    """
    scored = list(zip(scores(variants), variants, strict=True))
    least = min((score for score, _ in scored), default=math.inf)
    if math.isinf(least):
        return None
    close = [(score, variant) for score, variant in scored if score <= least * (1 + NOISE)]
    if close[0][1] is variants[0]:
        return variants[0]
    return min(close, key=lambda pair: (len(pair[1].values), pair[0]))[1]


# --- the file ------------------------------------------------------------------------------------------------------------------


def edited(text: str, values: Mapping[str, Any], source: str) -> str:
    """YAML `text` with top-level fields set to plain `values`: those present are replaced where they stand, others come last.

    Comments, order and everything else stay. Raises TuneError where the result would not say just that.
    """
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode):
        raise TuneError(f"{source}: not a mapping")
    before = yaml.safe_load(text)
    replaced: list[tuple[int, int, str]] = []
    added = dict(values)
    for key, value in root.value:
        if key.value in added:
            replaced.append((value.start_mark.index, value.end_mark.index, str(added.pop(key.value))))
    for start, end, new in sorted(replaced, reverse=True):
        text = text[:start] + new + text[end:]
    if added:
        if root.flow_style:
            end = text.rindex("}")
            text = text[:end].rstrip().removesuffix(",") + "".join(f", {name}: {value}" for name, value in added.items()) + text[end:]
        else:
            newline = "\r\n" if "\r\n" in text else "\n"
            text = (text if text.endswith("\n") else text + newline) + "".join(f"{name}: {value}{newline}" for name, value in added.items())
    try:
        after = yaml.safe_load(text)
    except yaml.YAMLError:
        after = None
    if after != before | dict(values):
        raise TuneError(
            f"{source}: cannot be edited in place; set {', '.join(f'{name}: {value}' for name, value in values.items())} by hand"
        )
    return text


def config_path(ref: str) -> Path:
    """The file that a result is written to: `ref` itself, or a shipped config's file in a checkout. Raises TuneError, ConfigError."""
    path = Path(ref)
    if path.is_file():
        return path.resolve()
    name = ref.removesuffix(".yaml")
    if name in shipped_configs():
        shipped = Path(str(resources.files("fa4gen.configs").joinpath(f"{name}.yaml"))).resolve()
        if (shipped.parents[1] / "pyproject.toml").is_file():
            return shipped
        raise TuneError(f"{name} is the installed package's own config; copy it and give the copy's path")
    load_config(ref)  # raises the refusal that names what is wrong with the path
    raise TuneError(f"{ref}: not a file")


def write_back(path: Path, values: Mapping[str, Any]) -> bool:
    """Sets `values` in a config file, whole or not at all; returns whether that changed it. Raises TuneError, ConfigError, OSError."""
    data = path.read_bytes()
    text = data.decode("utf-8")
    new = edited(text, values, path.name)
    parse_config(yaml.safe_load(new), path.name)
    if new == text:
        return False
    write_whole(path, new.encode("utf-8"))
    return True


# --- the run -------------------------------------------------------------------------------------------------------------------


def _measure_cell(gpu: Gpu, cell: Cell, config: Config, variants: Sequence[Variant], sources: Mapping[int, str], repeats: int) -> None:
    """Checks and times every variant that is still in on one cell."""
    from .bench.measure import Checked, Own, Problem, check, time_all

    problem = Problem(gpu, cell.applied_to(config)[1], config.dtype, causal=config.mask == "causal")
    running: list[tuple[Variant, Own, Checked]] = []
    owned: list[Own] = []
    try:
        for variant in variants:
            if variant.refused is None:
                own = Own(problem, variant.config, "fa4gen", sources[id(variant)])
                owned.append(own)
                checked = check(problem, own)
                lse_error = own.lse_error()
                if checked.error is None or checked.error > OUT_BOUND or not math.isfinite(lse_error):
                    variant.refused = f"wrong on {cell}: error {checked.error}, LSE error {lse_error}"
                else:
                    running.append((variant, own, checked))
        for (variant, _, _), us in zip(running, time_all(gpu, [c for _, _, c in running], repeats=repeats), strict=True):
            variant.us.append(us)
    finally:
        for own in owned:
            own.free()
        problem.free()


def table_rows(variants: Sequence[Variant], cells: Sequence[Cell], chosen: Variant | None) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the result, best first, refused ones last."""
    columns = ["variant", "registers", "score", *(str(cell) for cell in cells)]
    rows = []
    for score, variant in sorted(zip(scores(variants), variants, strict=True), key=lambda pair: pair[0]):
        name = f"{variant} *" if variant is chosen else str(variant)
        registers = "-" if variant.registers is None else str(variant.registers)
        if variant.refused is not None:
            rows.append([name, registers, "refused", variant.refused])
        else:
            rows.append([name, registers, f"{score:.4f}", *(f"{us['zero'].median:.1f} / {us['read'].median:.1f}" for us in variant.us)])
    return columns, rows


def _print(console: Console, variants: Sequence[Variant], cells: Sequence[Cell], chosen: Variant | None) -> None:
    from rich.table import Table

    columns, rows = table_rows(variants, cells, chosen)
    table = Table(title="us, L2 zero-filled / clean; * is kept", title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column == "variant" else "right", no_wrap=True)
    for row in rows[:SHOWN]:
        table.add_row(*row)
    console.print(table, soft_wrap=True)
    if len(rows) > SHOWN:
        console.print(f"and {len(rows) - SHOWN} more", highlight=False)


def run(options: TuneOptions, console: Console, errors: Console) -> int:
    """Tunes a config; returns 0, or 1 where no variant is right.

    Raises ConfigError, CellError, TuneError, BenchError, BackendError (BackendUnavailable without a GPU), CompileError: one line each.
    """
    path = config_path(options.config)
    config = load_config(path)
    fields = tuned_fields(options.fields)
    cells = choose_cells(options.cells, options.cells_ref, [config.ov_depth])
    cells = with_kv_dtypes([cell for cell in cells if config.group in (None, cell.group)], [config])
    if not cells:
        raise TuneError(f"no cell has the group of {config.name}, {config.group}")
    from .bench.measure import Gpu

    gpu = Gpu()
    arch = gpu.backend.arch
    with_kernel([config], arch, asked=True)
    variants = legal_variants(config, arch, fields)

    def note(text: str) -> None:
        errors.print(text, highlight=False, markup=False, soft_wrap=True)

    note(f"{gpu.backend.device_name}: {len(variants)} variants of {', '.join(fields)} on {len(cells)} cells")
    alone = len(legal_variants(config.model_copy(update={"arch": (arch,)}), arch, fields))
    if alone > len(variants):
        note(f"{alone - len(variants)} more are legal on {arch} alone: a config that lists only {arch} can have them")
    sources = {id(variant): render.render(variant.config, arch)["attention.cu"] for variant in variants}
    modules = compiler.compile_all([(sources[id(variant)], arch, "attention.cu") for variant in variants])
    for variant, module in zip(variants, modules, strict=True):
        refuse_spills(variant, module)
    for index, cell in enumerate(cells, 1):
        note(f"{index}/{len(cells)} {cell}")
        _measure_cell(gpu, cell, config, variants, sources, options.repeats)
    chosen = winner(variants)
    _print(console, variants, cells, chosen)
    if chosen is None:
        note("no variant is right: the file stays as it is")
        return 1
    if options.write:
        changed = write_back(path, chosen.values)
        note(f"{path.name}: {chosen}" + ("; run `fa4gen emit` to bring the generated tree up to date" if changed else " (unchanged)"))
    return 0


__all__ = ["CANDIDATES", "TuneError", "TuneOptions", "Variant", "edited", "legal_variants", "run", "winner", "write_back"]
