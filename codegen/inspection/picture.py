"""The picture of `fa4gen inspect --svg`: shared memory and tensor memory to scale, the ring's walk, the roles; self-contained SVG.

Coloured areas carry dark text in either colour scheme; what stands on the background follows the viewer's (light where it does not say).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from xml.sax.saxutils import escape, quoteattr

from .. import pipeline
from ..geometry import SMEM_LIMIT_BYTES, Geometry, symbol
from ..geometry_sm90 import Sm90Geometry
from ..geometry_sm100 import TMEM_COLUMNS, Sm100Geometry
from .facts import Facts, walk_tiles

WIDTH = 1200
MARGIN = 30
INNER = WIDTH - 2 * MARGIN
TMEM_LANES = 128
CHAR = 0.6  # width of a character, in font sizes; labels that do not fit by it are left to the tooltip
SMALL_PARTS = 100  # regions below this part of the memory there is are drawn once more, magnified

COLOURS = {
    "q": "#8fc1a9",
    "ring": "#b7c9e2",
    "p": "#f2c57c",
    "s": "#f6dfa4",
    "o": "#d7a9c4",
    "exchange": "#e39b84",
    "factors": "#c9b6e4",
    "barrier": "#c4c9cf",
    "k": "#9fc0ea",
    "v": "#b9d8a2",
    "other": "#dcd6c8",
}
_REGION_COLOURS = {
    "q": "q",
    "ring": "ring",
    "raw": "k",
    "scales": "factors",
    "p": "p",
    "out": "o",
    "merge_o": "s",
    "merge_ml": "factors",
    "landing": "s",
    "exchange": "exchange",
    "correction": "factors",
    "weights": "factors",
    "windows": "s",
    "window_ml": "factors",
    "tmem_address": "other",
    "last": "other",
}

STYLE = """
  text { font-family: ui-sans-serif, system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif; font-size: 12px; fill: #23272e; }
  .bg { fill: #fdfdfc; }
  .h1 { font-size: 19px; font-weight: 600; }
  .h2 { font-size: 13.5px; font-weight: 600; }
  .dim { fill: #626b76; font-size: 11px; }
  .in { fill: #1d2126; }
  .small { font-size: 10px; }
  .box { stroke: #4a5059; stroke-width: 0.7; }
  .over { stroke: none; }
  .frame { fill: none; stroke: #8a929c; stroke-width: 1; }
  .free { fill: none; stroke: #8a929c; stroke-width: 1; stroke-dasharray: 4 3; }
  .cut { stroke: #4a5059; stroke-width: 0.7; stroke-dasharray: 2 2; }
  .lead { stroke: #8a929c; stroke-width: 0.7; }
  @media (prefers-color-scheme: dark) {
    text { fill: #dfe3e8; }
    .bg { fill: #1a1d22; }
    .dim { fill: #9aa4b0; }
    .in { fill: #1d2126; }
    .frame, .free, .lead { stroke: #77808b; }
  }
"""


class _Sheet:
    """Shapes so far, and where the next section begins."""

    def __init__(self) -> None:
        self.shapes: list[str] = []
        self.y = 0.0

    def text(self, x: float, y: float, text: str, cls: str = "", anchor: str = "start") -> None:
        attributes = f' class="{cls}"' if cls else ""
        anchored = f' text-anchor="{anchor}"' if anchor != "start" else ""
        self.shapes.append(f'<text x="{x:.1f}" y="{y:.1f}"{attributes}{anchored}>{escape(text)}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, cls: str) -> None:
        self.shapes.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{cls}"/>')

    def rect(self, x: float, y: float, width: float, height: float, *, fill: str = "", cls: str = "box", tip: str = "") -> None:
        colour = f' fill="{COLOURS[fill]}"' if fill else ""
        title = f"<title>{escape(tip)}</title>" if tip else ""
        self.shapes.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.6):.2f}" height="{height:.1f}" class="{cls}"{colour}>{title}</rect>'
        )

    def fitting(self, x: float, y: float, width: float, choices: Iterable[str], size: float = 12) -> bool:
        """The first of `choices` that fits `width`, centred; False if none does."""
        for text in choices:
            if len(text) * CHAR * size <= width - 6:
                self.text(x + width / 2, y, text, "in" if size >= 12 else "in small", "middle")
                return True
        return False

    def heading(self, text: str, note: str = "") -> None:
        self.y += 30
        self.text(MARGIN, self.y, text, "h2")
        if note:
            self.text(MARGIN + len(text) * 8.6 + 16, self.y, note, "dim")
        self.y += 10


def picture(targets: Sequence[Facts]) -> str:
    """One SVG with a panel for each target."""
    sheet = _Sheet()
    for facts in targets:
        _panel(sheet, facts)
    height = sheet.y + MARGIN
    title = "; ".join(facts.title for facts in targets)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'role="img" aria-label={quoteattr(title)}>'
    )
    background = f'<rect class="bg" width="{WIDTH}" height="{height:.0f}"/>'
    lines = [head, f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>", background, *sheet.shapes, "</svg>"]
    return "\n".join(lines) + "\n"


def _panel(sheet: _Sheet, facts: Facts) -> None:
    sheet.y += 44
    sheet.text(MARGIN, sheet.y, facts.title, "h1")
    entry = symbol(facts.entries[0], facts.arch)
    kernel = next((kernel for kernel in facts.kernels if kernel.entry == entry), None)
    if kernel is None:
        sheet.y += 22
        sheet.text(MARGIN, sheet.y, f"There is no attention kernel for {facts.arch}: its unit kernels only.", "dim")
        _units(sheet, facts)
        return
    figures = [kernel.entry, f"{kernel.threads} threads"]
    if kernel.resources:
        spilled = kernel.resources["spill_store_bytes"] + kernel.resources["spill_load_bytes"]
        figures += [f"{kernel.resources['registers']} registers at entry", f"{spilled} bytes spilled"]
    sheet.y += 20
    sheet.text(MARGIN, sheet.y, ", ".join(figures), "dim")
    _smem(sheet, facts)
    if isinstance(facts.geo, Sm100Geometry):
        _tmem(sheet, facts.geo)
    _ring(sheet, facts.geo)
    _roles(sheet, facts.geo)


# --- shared memory ----------------------------------------------------------------------------------------------------


def _colour(name: str) -> str:
    if name.startswith("mbar"):
        return "barrier"
    if name.startswith(("stage", "o_image")):
        return "s"
    if name.startswith("maxsum"):
        return "factors"
    return _REGION_COLOURS.get(name, "other")


def _tip(content: pipeline.Content) -> str:
    region = content.region
    return (
        f"{region.name}: {region.offset:,} to {region.end:,}, {region.size:,} bytes. {content.holds}. "
        f"Written by {content.writes}, read by {content.reads}, dead after {content.until}."
    )


def _smem(sheet: _Sheet, facts: Facts) -> None:
    geo = facts.geo
    contents = pipeline.smem_contents(facts.config, geo)
    free = geo.smem_limit - geo.smem_bytes
    sharing = f" for each of {geo.ctas_per_sm} CTAs an SM" if isinstance(geo, Sm90Geometry) and geo.ctas_per_sm > 1 else ""
    sheet.heading("Shared memory", f"{geo.smem_bytes:,} bytes, {free:,} of {geo.smem_limit:,}{sharing} left; to scale")
    scale = INNER / geo.smem_limit
    top = sheet.y
    _bar(sheet, contents, scale, top, 46, geo)
    sheet.rect(MARGIN + geo.smem_bytes * scale, top, free * scale, 46, cls="free", tip=f"{free:,} bytes not used")
    sheet.y = top + 46
    if over := pipeline.epilogue(geo):
        sheet.y += 6
        _bar(sheet, over, scale, sheet.y, 26, None)
        end = max(content.region.end for content in over)
        where = "over dead memory" if isinstance(geo, Sm90Geometry) else "over the dead Q and ring"
        # Up to the lines that lead to the magnified part below.
        small = [content.region.offset for content in contents if content.region.size < geo.smem_limit // SMALL_PARTS]
        room = (min(small, default=geo.smem_limit) - end) * scale
        label = f"epilogue, {where}"
        sheet.text(MARGIN + end * scale + 8, sheet.y + 17, label if len(label) * CHAR * 11 + 12 <= room else "epilogue", "dim")
        sheet.y += 26
    tiny = [content for content in contents if content.region.size < geo.smem_limit // SMALL_PARTS]
    if not tiny:
        return
    # What is too small to see, magnified; lines show where it is.
    sheet.y += 26
    first, last = tiny[0].region.offset, tiny[-1].region.end
    inset = [content for content in contents if first <= content.region.offset < last]
    width = INNER * 0.94
    left = WIDTH - MARGIN - width
    for edge, corner in ((MARGIN + first * scale, left), (MARGIN + last * scale, left + width)):
        sheet.line(edge, top + 46, edge, sheet.y - 24, "lead")
        sheet.line(edge, sheet.y - 24, corner, sheet.y, "lead")
    # Each as wide as its label needs, or all in proportion to that where they do not fit; what is left in proportion to the size.
    needs = [len(f"{content.region.name} {content.region.size:,}") * CHAR * 10 + 8 for content in inset]
    needs = [need * min(1.0, width / sum(needs)) for need in needs]
    rest = max(width - sum(needs), 0)
    total = sum(content.region.size for content in inset)
    x = left
    for content, need in zip(inset, needs, strict=True):
        region = content.region
        here = need + rest * region.size / total
        sheet.rect(x, sheet.y, here, 26, fill=_colour(region.name), tip=_tip(content))
        short = region.name.removeprefix("mbar_")
        sheet.fitting(x, sheet.y + 17, here, [f"{region.name} {region.size:,}", f"{short} {region.size:,}", short], 10)
        x += here
    sheet.text(left - 8, sheet.y + 11, "magnified,", "dim", "end")
    sheet.text(left - 8, sheet.y + 24, "not to scale", "dim", "end")
    sheet.y += 26


def _bar(sheet: _Sheet, contents: Sequence[pipeline.Content], scale: float, y: float, height: float, geo: Geometry | None) -> None:
    for content in contents:
        region = content.region
        x, width = MARGIN + region.offset * scale, region.size * scale
        sheet.rect(x, y, width, height, fill=_colour(region.name), tip=_tip(content))
        slots = geo.ring_slots if geo is not None and region.name == "ring" else 1
        if isinstance(geo, Sm100Geometry) and region.name == geo.copy_region:
            slots = geo.copy_slots
        for slot in range(1, slots):
            sheet.line(x + width * slot / slots, y + height * 0.5, x + width * slot / slots, y + height, "cut")
        middle = y + height / 2 + 4
        if slots > 1:
            sheet.fitting(x, y + 16, width, [f"{region.name}: {slots} slots of {region.size // slots:,}", region.name])
            for slot in range(slots):
                sheet.fitting(x + width * slot / slots, y + height - 7, width / slots, [f"slot {slot}", str(slot)], 10)
        else:
            sheet.fitting(x, middle, width, [f"{region.name}: {region.size:,}", region.name])


# --- tensor memory ----------------------------------------------------------------------------------------------------


def _tmem(sheet: _Sheet, geo: Sm100Geometry) -> None:
    note = f"{geo.tmem_columns} columns used, {geo.tmem_columns_allocated} allocated of {TMEM_COLUMNS}; 128 lanes; to scale"
    sheet.heading("Tensor memory", note)
    left, scale = MARGIN + 70, (INNER - 70) / TMEM_COLUMNS
    height = TMEM_LANES * 1.25
    top = sheet.y + 14
    for content in pipeline.tmem_contents(geo):
        region = content.region
        x, width = left + region.offset * scale, region.size * scale
        is_s = region.name.startswith("S")
        tip = f"{region.name}: columns {region.offset} to {region.end - 1}. {content.holds}. "
        tip += f"Written by {content.writes}, read by {content.reads}, dead after {content.until}."
        sheet.rect(x, top, width, height, fill="s" if is_s else "o", tip=tip)
        over = width / 2 if is_s and not geo.shared_key else 0.0
        lines = 9 if over else 0  # two lines a cell: what S holds over its whole width, and P below in the columns it takes
        if over:
            sheet.rect(x, top, over, height, fill="p", cls="over", tip=f"P of the key tile, over the first {region.size // 2} columns of S")
        tiles = 1 if is_s else geo.o_tiles
        for tile in range(1, tiles):
            sheet.line(x + width * tile / tiles, top, x + width * tile / tiles, top + height, "cut")
        for part in range(geo.m_pack):
            y = top + part * geo.rows * 1.25
            if part:
                sheet.line(x, y, x + width, y, "cut")
            middle = y + geo.rows * 1.25 / 2 + 4
            if over:
                sheet.fitting(x, middle + lines, over, ["then P of these keys", "then P", "P"], 10)
            for tile in range(tiles):
                band = width / tiles
                sheet.fitting(x + tile * band, middle - lines, band, _part_labels(geo, is_s, part, tile), 10)
        sheet.text(x, top - 4, f"{region.name}", "h2")
        columns = f"{region.offset}-{region.end - 1}"
        room = width - 24
        label = next((text for text in (f"columns {columns}", columns) if len(text) * CHAR * 11 <= room), "")
        sheet.text(x + 24, top - 4, label, "dim")
    sheet.rect(left + geo.tmem_columns * scale, top, (TMEM_COLUMNS - geo.tmem_columns) * scale, height, cls="free")
    for part in range(geo.m_pack):
        y = top + part * geo.rows * 1.25 + geo.rows * 1.25 / 2
        sheet.text(left - 8, y, f"part {part}", "", "end")
        sheet.text(left - 8, y + 13, f"{part * geo.rows}-{(part + 1) * geo.rows - 1}", "dim", "end")
    sheet.y = top + height


def _part_labels(geo: Sm100Geometry, is_s: bool, part: int, tile: int) -> list[str]:
    if is_s:
        keys = f"{part * geo.s_cols}-{(part + 1) * geo.s_cols - 1}"
        return [f"keys {keys} of the tile", f"keys {keys}", keys]
    first = tile * geo.band_cols if not geo.shared_key else tile * geo.pv_mma_n + part * geo.band_cols
    depth = f"depth {first}-{first + geo.band_cols - 1}"
    return [depth] if geo.shared_key else [f"key partition {part}, {depth}", f"part {part}, {depth}", depth]


# --- ring -------------------------------------------------------------------------------------------------------------


def _ring(sheet: _Sheet, geo: Geometry) -> None:
    tiles = walk_tiles(geo)
    walk = pipeline.ring_walk(geo, tiles)
    rings = [list(uses) for _, uses in groupby(walk, key=lambda use: use.ring)]
    slots = (geo.copy_slots if isinstance(geo, Sm100Geometry) else geo.ring_slots) // len(rings)
    longest = max(len(uses) for uses in rings)
    note = f"{tiles} key tiles, in the order of the fills; a box lasts until its slot is filled again; K2.3: key tile 2, sub-tile 3"
    sheet.heading("Ring" if len(rings) == 1 else "Rings", note)
    left = MARGIN + 70
    step = (INNER - 70) / (longest + slots - 1)
    row = 19
    for uses in rings:
        top = sheet.y + 16
        for (operand, tile), group in groupby(uses, key=lambda use: (use.operand, use.tile)):
            same = list(group)
            x = left + same[0].position * step
            sheet.line(x, top - 12, x, top + row * slots, "lead")
            sheet.text(x + 3, top - 4, f"{operand}{tile}", "dim")
        for use in uses:
            y = top + (use.slot - use.ring * slots) * row
            x, width = left + use.position * step, slots * step - 1
            tip = (
                f"slot {use.slot}, phase parity {use.parity}: {use.operand} of key tile {use.tile}, from key {use.key}, depth {use.depth}. "
                f"Released by {use.released}."
            )
            sheet.rect(x, y + 1, width, row - 3, fill=use.operand.lower(), tip=tip)
            sheet.fitting(x, y + 13, width + 4, [f"{use.operand}{use.tile}.{use.sub_tile}", f"{use.sub_tile}"], 10)
        for slot in range(slots):
            sheet.text(left - 8, top + slot * row + 13, f"slot {uses[0].ring * slots + slot}", "", "end")
        sheet.y = top + row * slots


# --- roles ------------------------------------------------------------------------------------------------------------


def _roles(sheet: _Sheet, geo: Geometry) -> None:
    table = pipeline.roles(geo)
    total = sum(role.registers * role.warps * 32 for role in table)
    note = "a box is a warp, as wide as its threads' registers" + (f"; {total:,} registers of 65,536 in all" if total else "")
    sheet.heading("Roles", note)
    widest = max(max(role.registers for role in table), 1)
    left = MARGIN + 110.0

    def row(role: pipeline.Role) -> tuple[float, str]:
        """Width of a warp's box, and what stands behind the boxes where a box is too narrow for its figure."""
        width = 62 * (role.registers or widest) / widest
        if not role.registers:
            return width, "registers as launched"
        return width, "" if role.registers >= 0.6 * widest else f"{role.registers} registers a thread"

    rows = [(role, *row(role)) for role in table]
    task = max(left + role.warps * (width + 2) + 4 + len(label) * CHAR * 11 for role, width, label in rows) + 24
    for role, width, label in rows:
        y = sheet.y + 6
        x = left
        sheet.text(x - 10, y + 14, role.name, "", "end")
        sheet.text(x - 10, y + 27, _warps(role), "dim", "end")
        for _ in range(role.warps):
            colour = "other" if role.idle else "k" if role.name.startswith(("load", "multiply")) else "s"
            sheet.rect(x, y + 3, width, 24, fill=colour, tip=f"{role.name}: {role.registers or 'as launched'} registers a thread")
            if not label:
                sheet.fitting(x, y + 19, width, [str(role.registers)], 10)
            x += width + 2
        if label:
            sheet.text(x + 4, y + 19, label, "dim")
        sheet.text(task, y + 13, role.task)
        if not role.idle:
            sheet.text(task, y + 27, _signals(geo, role.name), "dim")
        sheet.y = y + 28


def _warps(role: pipeline.Role) -> str:
    return f"warp {role.first_warp}" if role.warps == 1 else f"warps {role.first_warp}-{role.first_warp + role.warps - 1}"


def _signals(geo: Geometry, role: str) -> str:
    """Mbarriers that a role waits for and those it arrives at; [*] stands for every index of a family that has more than one."""
    table = pipeline.mbarriers(geo)
    every = _indices(table)

    def families(barriers: Iterable[pipeline.Mbarrier]) -> str:
        return ", ".join(_shown(family, own, every[family]) for family, own in _indices(barriers).items()) or "none"

    waits = families(barrier for barrier in table if role in barrier.waits)
    signals = families(barrier for barrier in table if role in {arrival.role for arrival in barrier.arrivals})
    return f"waits for {waits}; signals {signals}"


def _shown(family: str, own: list[str], every: list[str]) -> str:
    """Some mbarriers of a family: all of it, all with one first or last index, a run of neighbours, or each by itself."""
    if len(own) == 1:
        return family + own[0]
    if own == every:
        return f"{family}[*]"
    within = own[0][: own[0].index("]") + 1]  # "[0]" of "[0][1]"
    if within != own[0] and own == [index for index in every if index.startswith(within)]:
        return f"{family}{within}[*]"
    across = own[0][own[0].rindex("[") :]  # "[1]" of "[0][1]"
    if across != own[0] and own == [index for index in every if index.endswith(across)]:
        return f"{family}[*]{across}"
    start = every.index(own[0])
    if own == every[start : start + len(own)]:
        return f"{family}{own[0][:-1]}-{own[-1][1:]}"
    return ", ".join(family + index for index in own)


def _indices(barriers: Iterable[pipeline.Mbarrier]) -> dict[str, list[str]]:
    """The brackets behind the name of each family of mbarriers, "" for one alone."""
    found: dict[str, list[str]] = {}
    for barrier in barriers:
        family, bracket, rest = barrier.name.partition("[")
        found.setdefault(family, []).append(bracket + rest)
    return found


# --- unit kernels alone -----------------------------------------------------------------------------------------------


def _units(sheet: _Sheet, facts: Facts) -> None:
    scale = INNER / SMEM_LIMIT_BYTES
    for unit in pipeline.units(facts.config, facts.geo):
        regions = unit.dynamic or unit.static
        sheet.heading(unit.entry, f"shared memory, {sum(region.size for region in regions):,} bytes, to scale")
        for region in regions:
            x, width = MARGIN + region.offset * scale, region.size * scale
            label = f"{region.name}: {region.size:,}"
            sheet.rect(x, sheet.y, width, 34, fill=_colour(region.name), tip=f"{label} bytes")
            if not sheet.fitting(x, sheet.y + 21, width, [label, region.name]) and region is regions[-1]:
                sheet.text(x + width + 8, sheet.y + 21, label, "dim")
        sheet.y += 34


__all__ = ["picture"]
