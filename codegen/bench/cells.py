"""Cells: the attention problems that are measured, from the command line, a YAML file, or a shipped series; and the arithmetic on them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from ..config import MAX_WINDOW, PAGE_SIZES, Config, parse_config
from ..text import one_line

DEPTHS = (64, 128, 256, 512)
OPERAND_BYTES = {None: 2, "float8_e4m3fn": 1}  # of K and V by kv_dtype; None: as Q, bf16 or f16
MAX_COUNT = 1 << 24
MAX_KV_BYTES = 1 << 37
MAX_CELLS_BYTES = 1 << 20
MAX_CELLS = 1000


class CellError(ValueError):
    """A cell or a file of cells that cannot be used. `str()` is one line naming where it stands, the field and the remedy."""

    def __init__(self, where: str, text: str) -> None:
        super().__init__(one_line(f"{where}: {text}"))


@dataclass(frozen=True)
class Cell:
    """One attention problem: q [batch, q_len, heads, depth] over k, v [batch, keys, kv_heads, depth].

    published_us: a time in microseconds that others have published for it, or None.
    The rest are features of a config, see there: K and V in pages of page_size keys, in no order; key_lengths read on the device, all of
    them `keys`; causal; window; softcap; sinks; and kv_dtype, of K and V where it is not that of Q, which only configs say.
    """

    depth: int
    keys: int
    batch: int = 1
    q_len: int = 1
    heads: int = 32
    kv_heads: int = 4
    published_us: float | None = None
    kv_dtype: str | None = None
    causal: bool = False
    page_size: int | None = None
    key_lengths: bool = False
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V: what any kernel has to read once. With a window that is the keys in sight of any query."""
        keys = self.keys if self.window is None else min(self.keys, self.window + self.q_len - 1)
        return 2 * self.batch * keys * self.kv_heads * self.depth * OPERAND_BYTES[self.kv_dtype]

    def floor_us(self, ceiling_gbs: float) -> float:
        """Time in microseconds of reading K and V once at `ceiling_gbs` (10^9 bytes a second)."""
        return self.kv_bytes / (ceiling_gbs * 1e3)

    def __str__(self) -> str:
        asked = {
            "causal": self.causal,
            f"p{self.page_size}": self.page_size is not None,
            "len": self.key_lengths,
            f"win{self.window}": self.window is not None,
            f"cap{self.softcap:g}" if self.softcap else "": self.softcap is not None,
            "sinks": self.sinks,
            "kv8": self.kv_dtype is not None,
        }
        shape = f"d{self.depth} b{self.batch} k{self.keys} q{self.q_len} h{self.heads}/{self.kv_heads}"
        return " ".join([shape, *(name for name, on in asked.items() if on)])

    def applied_to(self, config: Config) -> tuple[Config, Cell]:
        """The config with this cell's features beside its own, and the cell with the config's. Raises ConfigError where they do not go."""
        asked: dict[str, Any] = {
            "mask": "causal" if self.causal else None,
            "kv_layout": "paged" if self.page_size else None,
            "page_size": self.page_size,
            "key_lengths": self.key_lengths or None,
            "window": self.window,
            "softcap": self.softcap,
            "sinks": self.sinks or None,
        }
        change = {name: value for name, value in asked.items() if value is not None and value != getattr(config, name)}
        if change:
            config = parse_config(config.model_dump() | change)
        names = ("page_size", "key_lengths", "window", "softcap", "sinks")
        return config, replace(self, causal=config.mask == "causal", **{name: getattr(config, name) for name in names})


_FIELDS = tuple(field.name for field in fields(Cell) if field.name != "kv_dtype")


def _cell(given: Mapping[str, Any], where: str) -> Cell:
    for name, value in given.items():
        if name not in _FIELDS:
            close = difflib.get_close_matches(str(name), _FIELDS, n=1)
            remedy = f"did you mean {close[0]}?" if close else f"a cell has {', '.join(_FIELDS)}"
            raise CellError(where, f"unknown field {str(name)[:40]}; {remedy}")
        if name == "published_us":
            if type(value) not in (int, float) or not 0 < value < 1e9:
                raise CellError(where, f"{name} = {str(value)[:40]}: expected microseconds")
        elif name in ("causal", "key_lengths", "sinks"):
            if type(value) is not bool:
                raise CellError(where, f"{name} = {str(value)[:40]}: expected true or false")
        elif name == "softcap":
            if type(value) not in (int, float) or not 0 < value < 1e9:
                raise CellError(where, f"{name} = {str(value)[:40]}: expected a positive number")
        elif name == "page_size":
            if type(value) is not int or value not in PAGE_SIZES:
                raise CellError(where, f"{name} = {str(value)[:40]}: expected {', '.join(map(str, PAGE_SIZES))}")
        elif name == "window":
            if type(value) is not int or not 1 <= value <= MAX_WINDOW:
                raise CellError(where, f"{name} = {str(value)[:40]}: expected an integer from 1 to {MAX_WINDOW:,}")
        elif type(value) is not int or not 1 <= value <= MAX_COUNT:
            raise CellError(where, f"{name} = {str(value)[:40]}: expected an integer from 1 to {MAX_COUNT:,}")
    for name in ("depth", "keys"):
        if name not in given:
            raise CellError(where, f"{name} is missing")
    cell = Cell(**given)
    if cell.depth not in DEPTHS:
        raise CellError(where, f"depth = {cell.depth}: expected {', '.join(map(str, DEPTHS))}")
    if cell.window is not None and not cell.causal:
        raise CellError(where, f"window = {cell.window}: it ends at the query's own position; set causal: true")
    if cell.heads % cell.kv_heads:
        raise CellError(where, f"heads = {cell.heads} is not a multiple of kv_heads = {cell.kv_heads}")
    if cell.kv_bytes > MAX_KV_BYTES:
        raise CellError(where, f"K and V have {cell.kv_bytes:,} bytes, more than {MAX_KV_BYTES:,}")
    return cell


def parse_cell(text: str) -> Cell:
    """A cell from `depth=512,batch=16,keys=8192,q_len=1,heads=32,kv_heads=4`; depth and keys have to be given. Raises CellError."""
    where = f"cell {text[:80]!r}"
    given: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        name = name.replace("-", "_")
        if not equals or not name:
            raise CellError(where, f"{part.strip()[:40]!r} is not name=value")
        if name in given:
            raise CellError(where, f"{name} is given twice")
        try:
            flags = {"true": True, "false": False}
            given[name] = flags[value] if value in flags else float(value) if name in ("published_us", "softcap") else int(value)
        except ValueError:
            given[name] = value
    return _cell(given, where)


def _cells_of(document: object, source: str) -> list[Cell]:
    if isinstance(document, Mapping):
        return [cell for series, part in document.items() for cell in _cells_of(part, f"{source}: {str(series)[:40]}")]
    if not isinstance(document, list):
        raise CellError(source, "expected a list of cells, or names with a list of cells each")
    cells = []
    for index, entry in enumerate(document, 1):
        where = f"{source}: cell {index}"
        if not isinstance(entry, Mapping):
            raise CellError(where, "expected fields such as {depth: 512, keys: 8192}")
        cells.append(_cell(entry, where))
    return cells


def _shipped() -> dict[str, Any]:
    text = resources.files("fa4gen.codegen.bench").joinpath("cells.yaml").read_text(encoding="utf-8")
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def shipped_series() -> tuple[str, ...]:
    """Names of the series of cells that come with the package."""
    return tuple(_shipped())


def load_cells(ref: str) -> list[Cell]:
    """Cells of a YAML file (a path first: a list of cells, or names with such lists), or of a shipped series. Raises CellError."""
    path = Path(ref)
    try:
        if path.is_file():
            data = path.read_bytes()
            if len(data) > MAX_CELLS_BYTES:
                raise CellError(ref, f"more than {MAX_CELLS_BYTES:,} bytes")
            document = yaml.safe_load(data.decode("utf-8-sig"))
        elif ref in shipped_series():
            return _cells_of(_shipped()[ref], ref)
        else:
            raise CellError(ref, f"no such file; shipped series are {', '.join(shipped_series())}")
    except OSError as error:
        raise CellError(ref, error.strerror or type(error).__name__) from None
    except UnicodeDecodeError as error:
        raise CellError(ref, f"not UTF-8 at byte {error.start}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise CellError(ref, f"not YAML{f', line {mark.line + 1}' if mark else ''}") from None
    except (RecursionError, ValueError) as error:
        if isinstance(error, CellError):
            raise
        raise CellError(ref, f"not YAML ({type(error).__name__})") from None
    cells = _cells_of(document, ref)
    if not 0 < len(cells) <= MAX_CELLS:
        raise CellError(ref, f"{len(cells)} cells; expected 1 to {MAX_CELLS:,}")
    return cells


def choose_cells(texts: Sequence[str], ref: str | None, depths: Sequence[int]) -> list[Cell]:
    """The cells asked for: `texts` (parse_cell), then those of `ref` (load_cells); without either the `decode` series.

    Cells of a series or file are narrowed to `depths`, those of the configs; each cell comes once. Raises CellError where none is left,
    or a cell from `texts` has another depth.
    """
    chosen = [parse_cell(text) for text in texts]
    for cell in chosen:
        if cell.depth not in depths:
            raise CellError(f"cell {cell}", f"no config of depth {cell.depth} was asked for")
    if ref is not None or not chosen:
        chosen += [cell for cell in load_cells(ref or "decode") if cell.depth in depths]
    if not chosen:
        raise CellError(ref or "decode", f"no cell of depth {' or '.join(map(str, sorted(set(depths))))}")
    return list(dict.fromkeys(chosen))


def with_kv_dtypes(cells: Sequence[Cell], configs: Sequence[Config]) -> list[Cell]:
    """Each cell once for every type of K and V that a config of its depth has."""
    return [
        replace(cell, kv_dtype=kind)
        for cell in cells
        for kind in dict.fromkeys(config.kv_dtype for config in configs if config.ov_depth == cell.depth)
    ]
