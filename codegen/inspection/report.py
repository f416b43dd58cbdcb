"""The tables of `fa4gen inspect`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from .. import pipeline
from ..geometry import Geometry, Region, derive, symbol
from ..geometry_sm90 import Sm90Geometry
from ..geometry_sm100 import Sm100Geometry
from .facts import Facts, walk_tiles

if TYPE_CHECKING:
    from rich.console import Console

REGISTER_FILE = 65_536


@dataclass(frozen=True)
class Sheet:
    """A table: its title, its headers (a leading ">" aligns the column right), its rows."""

    title: str
    headers: tuple[str, ...]
    rows: Sequence[Sequence[str]]


def sheets(facts: Facts) -> list[Sheet]:
    """Every table, in the order in which it is printed."""
    result = [*_attention_sheets(facts)] if facts.attention else []
    others = [_others(facts)] if facts.attention and len(facts.entries) > 1 else []
    return [*result, *others, _kernels(facts), *_unit_sheets(facts)]


def _others(facts: Facts) -> Sheet:
    """The entries that the tables above are not of."""
    rows = []
    for entry in facts.entries[1:]:
        geo = derive(entry, facts.arch)
        name = symbol(entry, facts.arch)
        rows.append((name, str(geo.tile_rows), f"{geo.smem_bytes:,}", str(geo.ring_slots), f"{geo.slot_bytes:,}", str(geo.mbarriers)))
    title = f"Other entries of attention.cu (the tables above are of {facts.geo.tile_rows} rows a tile; for these set tile_rows)"
    return Sheet(title, ("entry", ">rows a tile", ">SMEM", ">ring slots", ">of bytes", ">mbarriers"), rows)


def _attention_sheets(facts: Facts) -> Iterator[Sheet]:
    config, geo = facts.config, facts.geo
    yield _roles(geo)
    if isinstance(geo, Sm100Geometry):
        used = f"{geo.tmem_columns} of {geo.tmem_columns_allocated} allocated"
        lanes = f"lanes {geo.rows} g to {geo.rows} g + {geo.rows - 1} of every column are part g, row lane % {geo.rows}"
        rows = [_content(content) for content in pipeline.tmem_contents(geo)]
        yield Sheet(f"Tensor memory, columns ({used}; {lanes})", ("region", ">from", ">columns", *_CONTENT), rows)
    rows = [_content(content) for content in pipeline.smem_contents(config, geo)]
    sharing = f", {geo.ctas_per_sm} CTAs an SM" if isinstance(geo, Sm90Geometry) and geo.ctas_per_sm > 1 else ""
    yield Sheet(f"Shared memory, bytes ({geo.smem_bytes:,}{sharing})", ("region", ">offset", ">bytes", *_CONTENT), rows)
    if over := pipeline.epilogue(geo):
        regions = geo.smem_map if isinstance(geo, Sm100Geometry) else ()
        span = " and ".join(region.name for region in regions if region.offset < max(content.region.end for content in over))
        title = f"Epilogue, over {span} (dead by then)" if span else "Epilogue"
        yield Sheet(title, ("region", ">offset", ">bytes", *_CONTENT), [_content(content) for content in over])
    yield _ring(geo)
    yield _mbarriers(geo)
    rows = [(str(b.number), f"{b.threads}", _list(b.roles), b.orders) for b in pipeline.named_barriers(config, geo)]
    yield Sheet("Named barriers (each thread arrives and waits)", (">id", ">threads", "who", "orders"), rows)


_CONTENT = ("holds", "written by", "read by", "dead after")


def _content(content: pipeline.Content) -> tuple[str, ...]:
    region = content.region
    return region.name, f"{region.offset:,}", f"{region.size:,}", content.holds, content.writes, content.reads, content.until


def _list(names: Sequence[str]) -> str:
    """Names in a line; more than four as the first and the last."""
    return ", ".join(names) if len(names) <= 4 else f"{names[0]} to {names[-1]}"


def _roles(geo: Geometry) -> Sheet:
    rows = []
    total = 0
    for role in pipeline.roles(geo):
        warps = f"{role.first_warp}-{role.first_warp + role.warps - 1}" if role.warps > 1 else str(role.first_warp)
        total += role.registers * role.warps * 32
        rows.append(
            (
                role.name,
                warps,
                str(role.registers or "as launched"),
                f"{role.registers * role.warps * 32:,}" if role.registers else "-",
                role.task,
            )
        )
    title = f"Roles (registers: {total:,} of {REGISTER_FILE:,})" if total else "Roles"
    return Sheet(title, ("role", ">warps", ">registers a thread", ">in all", "task"), rows)


def _ring(geo: Geometry) -> Sheet:
    """A row for each tile of K or V: the slot of each sub-tile, `'` where its phase has parity 1."""
    rows = []
    tiles = walk_tiles(geo)
    walk = pipeline.ring_walk(geo, tiles)
    two_rings = pipeline.rings(geo) > 1
    for (ring, operand, tile), group in groupby(walk, key=lambda use: (use.ring, use.operand, use.tile)):
        uses = list(group)
        slots = " ".join(f"{use.slot}{_PRIME if use.parity else ''}" for use in uses)
        what = f"{operand} of key tile {tile}"
        corners = [_corner(use) for use in uses]
        parts = " ".join(corners if len(corners) <= 2 else (*corners[:2], "..", corners[-1]))
        released = uses[0].released.split(", depth slice")[0].split(", sub-tile")[0]
        rows.append((*((str(ring),) if two_rings else ()), str(uses[0].position), what, slots, parts, released))
    headers = (
        *((">ring",) if two_rings else ()),
        ">use",
        "filled with",
        f"slot of each sub-tile ({_PRIME}: parity 1)",
        "sub-tiles (key, depth)",
        "released by",
    )
    count, size = (geo.copy_slots, geo.copy_slot_bytes) if isinstance(geo, Sm100Geometry) else (geo.ring_slots, geo.slot_bytes)
    return Sheet(f"Ring walk, {tiles} key tiles: {count} slots of {size:,} bytes", headers, rows)


_PRIME = "'"


def _corner(use: pipeline.RingUse) -> str:
    return f"({use.key}, {use.depth})"


def _mbarriers(geo: Geometry) -> Sheet:
    """Slots and buffers that differ in nothing but their number are one row."""
    rows = []

    def alike(barrier: pipeline.Mbarrier) -> tuple[object, ...]:
        return barrier.name.split("[")[0], barrier.arrivals, barrier.tx_bytes, barrier.waits, barrier.phase, barrier.in_cluster

    for _, group in groupby(pipeline.mbarriers(geo), key=alike):
        same = list(group)
        first, last = same[0], same[-1]
        name = first.name if len(same) == 1 else f"{first.name[:-1]}-{last.name.split('[')[1]}"
        who = " + ".join(f"{arrival.role} {_how(arrival)}" for arrival in first.arrivals)
        tx = f"{first.tx_bytes:,}" if first.tx_bytes else "-"
        uses = ["split keys"] if first.split_only else []
        if first.in_cluster is not None:
            uses.append("in a cluster" if first.in_cluster else "without a cluster")
        when = f"{first.phase} ({', '.join(uses)})" if uses else first.phase
        count = " + ".join(f"{a.count} a CTA" for a in first.arrivals if a.each_cta)
        rest = sum(a.count for a in first.arrivals if not a.each_cta)
        count = f"{count} + {rest}" if count and rest else count or str(rest)
        rows.append((name, f"{first.offset:,}", count, tx, who, _list(first.waits), when, first.means))
    headers = ("mbarrier", ">offset", ">arrivals", ">bytes", "who arrives", "who waits", "a phase is", "complete, it says")
    return Sheet(f"mbarriers ({geo.mbarriers}; arrivals and bytes of a phase)", headers, rows)


def _how(arrival: pipeline.Arrival) -> str:
    if arrival.how == "arrive":
        return f"({arrival.count} warp{'s' if arrival.count > 1 else ''})"
    return f"({arrival.count}, announces the bytes)" if arrival.how == "expect_tx" else f"({arrival.count} commit behind its MMAs)"


def _kernels(facts: Facts) -> Sheet:
    rows = []
    for kernel in facts.kernels:
        found = kernel.resources
        figures = ("-",) * 6
        if found:
            spills = f"{found['spill_store_bytes']} + {found['spill_load_bytes']}"
            figures = (
                str(found["registers"]),
                spills,
                str(found["stack_bytes"]),
                str(found["barriers"]),
                f"{found['code_bytes']:,}",
                f"{found['static_smem_bytes']:,}",
            )
        rows.append(
            (kernel.entry, "attention.cu" if kernel.full else "unit.cu", str(kernel.threads), *figures, f"{kernel.dynamic_smem_bytes:,}")
        )
    if not facts.attention:
        rows.append((f"attention on {facts.arch}", "not generated", *("-",) * 8))
    headers = (
        "kernel",
        "file",
        ">threads",
        ">registers",
        ">spilled, stored + loaded",
        ">stack",
        ">named barriers",
        ">code",
        ">static SMEM",
        ">dynamic SMEM",
    )
    return Sheet(f"Kernels (registers and bytes a thread; {facts.source})", headers, rows)


def _unit_sheets(facts: Facts) -> Iterator[Sheet]:
    rows = []
    barriers = []
    for unit in pipeline.units(facts.config, facts.geo):
        name = unit.entry
        for space, regions in (("static SMEM", unit.static), ("dynamic SMEM", unit.dynamic), ("TMEM", unit.tmem)):
            for region in regions:
                rows.append((name, space, *_span(region)))
                name = ""
        name = unit.entry
        for barrier in unit.barriers:
            barriers.append((name, str(barrier.number), str(barrier.threads), _list(barrier.roles), barrier.orders))
            name = ""
    yield Sheet("Unit kernels: memory (SMEM in bytes, TMEM in columns)", ("kernel", "in", "region", ">from", ">size"), rows)
    yield Sheet("Unit kernels: named barriers", ("kernel", ">id", ">threads", "who", "orders"), barriers)


def _span(region: Region) -> tuple[str, str, str]:
    return region.name, f"{region.offset:,}", f"{region.size:,}"


# --- printing ---------------------------------------------------------------------------------------------------------


def show(facts: Facts, console: Console) -> None:
    """Rich tables on a terminal; elsewhere plain aligned columns, whose rows are never folded."""
    if not console.is_terminal:
        print(plain(facts), file=console.file, end="")
        return
    from rich.markup import escape
    from rich.table import Table

    console.print(f"[bold]{escape(facts.title)}[/bold]", highlight=False)
    for sheet in sheets(facts):
        table = Table(title=escape(sheet.title), title_justify="left", title_style="bold", box=None, pad_edge=False)
        for header in sheet.headers:
            table.add_column(header.lstrip(">"), justify="right" if header.startswith(">") else "left", overflow="fold")
        for row in sheet.rows:
            table.add_row(*(escape(cell) for cell in row))
        console.print()
        console.print(table)


def plain(facts: Facts) -> str:
    """Every table as text, columns two blanks apart."""
    lines = [facts.title]
    for sheet in sheets(facts):
        lines += ["", sheet.title]
        headers = [header.lstrip(">") for header in sheet.headers]
        widths = [max(len(cell) for cell in column) for column in zip(headers, *sheet.rows, strict=True)]
        for row in (headers, *sheet.rows):
            cells = [
                cell.rjust(width) if header.startswith(">") else cell.ljust(width)
                for cell, width, header in zip(row, widths, sheet.headers, strict=True)
            ]
            lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines) + "\n"
