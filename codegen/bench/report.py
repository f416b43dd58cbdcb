"""What a benchmark run found: as a table, as JSON (and back), and as a plot."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ..text import one_line
from .cells import Cell

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA_VERSION = 1
OUT_BOUND = 4e-3  # ||out - ref|| / ||ref|| that fa4gen has to keep
PEER_BOUND = 1e-2  # a peer beyond it is wrong: its time counts for nothing

Flush = Literal["zero", "read"]
FLUSHES: tuple[Flush, ...] = ("zero", "read")


class ReportError(ValueError):
    """A report that cannot be read or drawn. `str()` is one line."""

    def __init__(self, text: str) -> None:
        super().__init__(one_line(text))


@dataclass(frozen=True)
class Times:
    """Microseconds of `count` launches: median, 10th and 90th percentile."""

    median: float
    p10: float
    p90: float
    count: int


@dataclass(frozen=True)
class Result:
    """One implementation on one cell.

    implementation: "fa4gen", "stream" (its loads without arithmetic), or a peer's name; config: of the first two
    us: times under each L2 flush; error: relative, against float64, None where nothing is computed; lse_error: absolute
    note: settings; refused: why there are no times
    """

    implementation: str
    config: str | None = None
    us: dict[Flush, Times] = field(default_factory=dict)
    error: float | None = None
    lse_error: float | None = None
    note: str = ""
    refused: str | None = None

    @property
    def is_peer(self) -> bool:
        return self.config is None

    @property
    def right(self) -> bool:
        """Whether the output is within its bound; True for what has none."""
        return self.error is None or self.error <= (PEER_BOUND if self.is_peer else OUT_BOUND)

    def median(self, flush: Flush) -> float | None:
        """Median microseconds under a flush, None where it was not timed."""
        return self.us[flush].median if flush in self.us else None


@dataclass(frozen=True)
class CellResults:
    """All implementations on one cell; dtype and mask are those of the configs."""

    cell: Cell
    dtype: str
    mask: str
    results: list[Result]

    def of(self, implementation: str, config: str) -> Result | None:
        """The result of a config's kernel ("fa4gen") or its loads ("stream")."""
        return next((r for r in self.results if r.implementation == implementation and r.config == config), None)

    def best_peer(self, flush: Flush) -> Result | None:
        """The fastest peer whose output is right."""
        timed = [r for r in self.results if r.is_peer and r.right and flush in r.us]
        return min(timed, key=lambda r: r.us[flush].median, default=None)

    @property
    def configs(self) -> list[str]:
        return [r.config for r in self.results if r.implementation == "fa4gen" and r.config is not None]


@dataclass
class Report:
    """A run. ceiling_gbs: 10^9 bytes a second, before and after the cells, for each span of the read kernel; peers: name -> package and
    version; missing: name -> why it was not measured."""

    date: str
    gpu: dict[str, Any]
    nvrtc: str | None
    fa4gen: str
    repeats: int
    flush_bytes: int
    ceiling_gbs: dict[str, dict[str, float]]
    configs: dict[str, dict[str, Any]]
    peers: dict[str, str]
    missing: dict[str, str]
    cells: list[CellResults] = field(default_factory=list)

    @property
    def ceiling(self) -> float:
        """The read ceiling: the most that any span read, before or after."""
        return max(gbs for spans in self.ceiling_gbs.values() for gbs in spans.values())

    def failures(self) -> list[str]:
        """A line for each of our results that is out of bounds."""
        return [
            f"{entry.cell}: {result.config}: error {result.error:.1e}, bound {OUT_BOUND:.0e}"
            for entry in self.cells
            for result in entry.results
            if not result.is_peer and not result.right
        ]


# --- JSON ----------------------------------------------------------------------------------------------------------------------


def _finite(value: Any) -> Any:
    """JSON has no infinity: it becomes the string "inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return "inf"
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def to_json(report: Report) -> str:
    """The report as JSON text; bytes and floor of each cell are added for the reader."""
    data = {"schema_version": SCHEMA_VERSION, **asdict(report)}
    data["read_ceiling_gbs"] = report.ceiling
    for entry, stored in zip(report.cells, data["cells"], strict=True):
        stored["kv_bytes"] = entry.cell.kv_bytes
        stored["floor_us"] = entry.cell.floor_us(report.ceiling)
    return json.dumps(_finite(data), indent=1, allow_nan=False) + "\n"


def _number(value: Any) -> float | None:
    return None if value is None else math.inf if value == "inf" else float(value)


def _result(stored: Mapping[str, Any]) -> Result:
    us: dict[Flush, Times] = {flush: Times(**stored["us"][flush]) for flush in FLUSHES if flush in stored["us"]}
    return Result(
        implementation=str(stored["implementation"]),
        config=stored["config"],
        us=us,
        error=_number(stored["error"]),
        lse_error=_number(stored["lse_error"]),
        note=str(stored["note"]),
        refused=stored["refused"],
    )


def from_json(text: str, source: str) -> Report:
    """The report that `to_json` wrote. Raises ReportError naming `source`."""
    try:
        data = json.loads(text)
        if data["schema_version"] != SCHEMA_VERSION:
            raise ReportError(f"{source}: schema version {data['schema_version']}, this fa4gen reads {SCHEMA_VERSION}")
        cells = [
            CellResults(Cell(**entry["cell"]), entry["dtype"], entry["mask"], [_result(stored) for stored in entry["results"]])
            for entry in data["cells"]
        ]
        plain = {name: data[name] for name in Report.__dataclass_fields__ if name != "cells"}
        report = Report(**plain, cells=cells)
        if not report.ceiling > 0:
            raise ReportError(f"{source}: no read ceiling in it")
    except ReportError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ReportError(f"{source}: not a report of `fa4gen bench` ({type(error).__name__}: {error})") from error
    return report


def file_stem(report: Report) -> str:
    """A name for the report's files: GPU and date, such as nvidia-h200-20261130T020000Z."""
    gpu = re.sub(r"[^a-z0-9]+", "-", str(report.gpu.get("name", "gpu")).lower()).strip("-")
    return f"{gpu}-{re.sub(r'[^0-9TZ]', '', report.date.replace('+00:00', 'Z'))}"


# --- table ---------------------------------------------------------------------------------------------------------------------


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _ratio(theirs: float | None, ours: float | None) -> str:
    return "-" if theirs is None or ours is None or ours == 0 else f"{theirs / ours:.2f}x"


def main_rows(report: Report) -> list[list[str]]:
    """The main table's rows as text: one for each cell and config, columns as MAIN_COLUMNS."""
    rows = []
    for entry in report.cells:
        for config in entry.configs or [""]:
            ours, stream = entry.of("fa4gen", config), entry.of("stream", config)
            times = {flush: ours.median(flush) if ours else None for flush in FLUSHES}
            loads = {flush: stream.median(flush) if stream else None for flush in FLUSHES}
            peers = {flush: entry.best_peer(flush) for flush in FLUSHES}
            peer_us = {flush: peer.median(flush) if peer else None for flush, peer in peers.items()}
            floor = entry.cell.floor_us(report.ceiling)
            share = "-" if not times["zero"] else f"{floor / times['zero'] * 100:.1f}%"
            error = "-" if ours is None or ours.error is None else f"{ours.error:.1e}" + ("" if ours.right else " WRONG")
            zero_peer = peers["zero"]
            rows.append(
                [
                    str(entry.cell),
                    config or "-",
                    _us(times["zero"]),
                    _us(times["read"]),
                    _us(loads["zero"]),
                    _us(loads["read"]),
                    share,
                    zero_peer.implementation if zero_peer else "-",
                    _us(peer_us["zero"]),
                    _ratio(peer_us["zero"], times["zero"]),
                    _ratio(peer_us["read"], times["read"]),
                    _us(floor),
                    _us(entry.cell.published_us),
                    error,
                ]
            )
    return rows


MAIN_COLUMNS = (
    "cell",
    "config",
    "fa4gen us",
    "clean",
    "stream us",
    "clean",
    "of ceiling",
    "best peer",
    "us",
    "ratio",
    "clean",
    "floor us",
    "published",
    "error",
)
_LEFT = {"cell", "config", "best peer"}


def peer_rows(report: Report) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the peers' own table: median us of each after a zero-fill flush, "-" where it refuses."""
    names = list(dict.fromkeys(r.implementation for entry in report.cells for r in entry.results if r.is_peer))
    rows = []
    for entry in report.cells:
        by_name = {r.implementation: r for r in entry.results if r.is_peer}
        rows.append([str(entry.cell), *(_peer_cell(by_name.get(name)) for name in names)])
    return ["cell", *names], rows


def peer_notes(report: Report) -> list[str]:
    """A line for each peer and reason why it has no time, or a wrong output, with the first cell of that and how many more there are."""
    cells: dict[str, list[str]] = {}
    for entry in report.cells:
        for result in entry.results:
            if result.is_peer and result.refused is not None:
                cells.setdefault(f"{result.implementation} refuses: {result.refused}", []).append(str(entry.cell))
            elif result.is_peer and not result.right:
                cells.setdefault(f"{result.implementation} is wrong by {result.error:.1e}", []).append(str(entry.cell))
    return [f"{text} ({at[0]}{f' and {len(at) - 1} more' if len(at) > 1 else ''})" for text, at in cells.items()]


def _peer_cell(result: Result | None) -> str:
    if result is None or result.refused is not None:
        return "-"
    return _us(result.median("zero")) + ("" if result.right else " WRONG")


def _table(title: str, columns: Iterable[str], rows: Iterable[list[str]]) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in _LEFT else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row, style="red" if any("WRONG" in text for text in row) else None)
    return table


def print_report(report: Report, console: Console) -> None:
    """The tables: ours against loads alone, the best peer and the floor; then every peer."""
    gpu = f"{report.gpu.get('name')}, driver {report.gpu.get('driver') or 'unknown'}, NVRTC {report.nvrtc or 'unknown'}"
    title = f"{gpu}, {report.date}: read ceiling {report.ceiling:,.0f} GB/s; medians of {report.repeats} launches, L2 zero-filled or clean"
    console.print(_table(title, MAIN_COLUMNS, main_rows(report)), soft_wrap=True)
    columns, rows = peer_rows(report)
    if len(columns) > 1:
        console.print(_table("Peers, us, L2 zero-filled", columns, rows), soft_wrap=True)
    for line in peer_notes(report):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for name, reason in report.missing.items():
        console.print(f"not measured: {name}: {reason}", highlight=False, markup=False, soft_wrap=True)


# --- plot ----------------------------------------------------------------------------------------------------------------------


def draw(report: Report) -> bytes:
    """An SVG: for each cell, the share of the read ceiling that fa4gen, its loads alone and the best peer reach. Raises ReportError."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise ReportError("the plot needs matplotlib: install fa4gen[bench]") from None
    import io

    labels: list[str] = []
    bars: dict[str, list[float]] = {"fa4gen": [], "stream (loads alone)": [], "best peer": []}
    for entry in report.cells:
        floor = entry.cell.floor_us(report.ceiling)
        peer = entry.best_peer("zero")
        for config in entry.configs or [""]:
            labels.append(f"{entry.cell}\n{config}" if config else str(entry.cell))
            shown = (entry.of("fa4gen", config), entry.of("stream", config), peer)
            for series, result in zip(bars.values(), shown, strict=True):
                us = result.median("zero") if result else None
                series.append(floor / us * 100 if us else 0.0)
    with matplotlib.rc_context({"svg.hashsalt": "fa4gen", "font.size": 8}):
        figure = Figure(figsize=(9, 1.5 + 0.55 * len(labels)), layout="constrained")
        axes = figure.subplots()
        for index, (name, values) in enumerate(bars.items()):
            at = [row + (index - 1) * 0.27 for row in range(len(labels))]
            axes.barh(at, values, height=0.25, label=name, color=("#1b6ca8", "#b8c4cc", "#d98032")[index])
        axes.set_yticks(range(len(labels)), labels)
        axes.invert_yaxis()
        axes.set_xlim(0, 100)
        axes.set_xlabel(f"K and V bytes over time, % of the read ceiling ({report.ceiling:,.0f} GB/s), L2 zero-filled")
        axes.set_title(f"{report.gpu.get('name')}, {report.date[:10]}")
        axes.grid(axis="x", color="#dddddd")
        axes.set_axisbelow(True)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.02 - 0.6 / (1.5 + 0.55 * len(labels))), ncols=3, frameon=False)
        data = io.BytesIO()
        figure.savefig(data, format="svg", metadata={"Date": None})
    return data.getvalue()
