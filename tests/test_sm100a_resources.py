"""What the sm_100a attention kernels take: the table in bench/sm100a_resources.md, and the reference kernels of the same function."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from fa4gen.codegen import compiler, render
from fa4gen.codegen.config import load_shipped, parse_config, shipped_configs
from fa4gen.codegen.geometry import derive

REPOSITORY = Path(__file__).parent.parent
TABLE = REPOSITORY / "bench" / "sm100a_resources.md"


class Row(NamedTuple):
    """A row of the table; None: not known. spills: bytes stored and loaded; barriers: bar.sync, then bar.red."""

    instructions: int | None
    spills: tuple[int, int] | None
    smem: int
    barriers: tuple[int, int]
    exponentials: int


def numbers(cell: str) -> list[int]:
    return [int(number.replace(",", "")) for number in re.findall(r"[\d,]+", cell)]


def feature_rows() -> dict[str, tuple[str, Row]]:
    """Of the model configs: their features, and their rows."""
    section = TABLE.read_text().split("| model config |")[1].split("\n\n")[0]
    rows = {}
    for line in section.splitlines()[2:]:
        name, features, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        (instructions,), (stores, loads), (smem,), (syncs, votes), (exponentials,) = (numbers(cell) for cell in cells)
        rows[name] = (features, Row(instructions, (stores, loads), smem, (syncs, votes), exponentials))
    return rows


@cache
def table() -> tuple[dict[str, Row], dict[str, Row]]:
    """The rows of our kernels, and those of the reference kernels under the name of the row above them."""
    ours: dict[str, Row] = {}
    references: dict[str, Row] = {}
    section = TABLE.read_text().split("| config |")[1].split("\n\n")[0]
    for line in section.splitlines()[2:]:
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        instructions, spills, (smem,), barriers, (exponentials,) = (numbers(cell) for cell in cells)
        row = Row(
            instructions[0] if instructions else None,
            (spills[0], spills[1]) if spills else None,
            smem,
            (barriers[0], barriers[1] if len(barriers) > 1 else 0),
            exponentials,
        )
        if name == "reference":
            references[list(ours)[-1]] = row
        else:
            ours[name] = row
    return ours, references


def counted(ptx: str) -> tuple[tuple[int, int], int]:
    """bar.sync and bar.red, and ex2, of a PTX."""
    return (len(re.findall(r"\bbar\.sync\b", ptx)), len(re.findall(r"\bbar\.red\b", ptx))), len(re.findall(r"\bex2\.approx", ptx))


def nvdisasm() -> Path | None:
    try:
        import nvidia
    except ImportError:
        return None
    found = [file for root in nvidia.__path__ for file in Path(root).glob("**/bin/nvdisasm")]
    return found[0] if found else (Path(path) if (path := shutil.which("nvdisasm")) else None)


def test_the_table_has_the_kernels_and_what_they_are_compared_with() -> None:
    ours, references = table()
    assert set(ours) == {"d64", "d128", "d128_m2", "d256", "d256_m2", "d512"}
    # Instructions, bar.sync and ex2 as published of the reference kernels, spills of the one that has any.
    published = {"d512": (7072, 9, 156), "d256": (4296, 8, 154), "d128": (3664, 6, 162), "d128_m2": (5144, 6, 308)}
    assert {name: (row.instructions, row.barriers[0], row.exponentials) for name, row in references.items()} == published
    assert references["d512"].spills == (160, 224)


@pytest.mark.parametrize("name", ["d512", "d256", "d128", "d128_m2"])
def test_no_more_than_the_reference_kernel(name: str) -> None:
    """The table, which the tests below hold to be true: fewer instructions, no spills, SMEM within 16 bytes, no more bar.sync and ex2."""
    ours, references = (rows[name] for rows in table())
    assert ours.instructions is not None
    assert references.instructions is not None
    assert ours.instructions < references.instructions
    assert ours.spills == (0, 0)
    assert abs(ours.smem - references.smem) <= 16
    assert ours.barriers[0] <= references.barriers[0]
    assert ours.exponentials <= references.exponentials


@pytest.mark.skipif(compiler.nvrtc_version() is None, reason="NVRTC is not installed")
@pytest.mark.parametrize("name", table()[0])
def test_the_table_is_true(name: str, tmp_path: Path) -> None:
    row = table()[0][name]
    shipped = {key: value for key, value in load_shipped(name).model_dump().items() if value not in (None, ())}
    config = parse_config(shipped | {"arch": ["sm_100a"], "group": 8})
    module = compiler.compile_source(render.render(config, "sm_100a")["attention.cu"], "sm_100a", "attention.cu")
    (kernel,) = module.kernels.values()
    assert (kernel.spill_store_bytes, kernel.spill_load_bytes, kernel.stack_bytes, kernel.registers) == (0, 0, 0, 128)
    assert derive(config, "sm_100a").smem_bytes == row.smem
    assert counted(module.ptx) == (row.barriers, row.exponentials)
    if (tool := nvdisasm()) is None:
        pytest.skip("nvdisasm is not installed: SASS instructions not counted")
    cubin = tmp_path / "attention.cubin"
    cubin.write_bytes(module.cubin)
    listing = subprocess.run([tool, "-c", cubin], capture_output=True, text=True, check=True).stdout
    assert len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+\S", listing, re.MULTILINE)) == row.instructions


@pytest.mark.parametrize("name", [name for name in shipped_configs() if "sm_100a" in load_shipped(name).arch])
def test_what_features_take(name: str) -> None:
    assert (name in feature_rows()) == bool(load_shipped(name).features())
    if name not in feature_rows():
        return
    features, row = feature_rows()[name]
    folder = REPOSITORY / "generated" / name / "sm_100a"
    manifest = json.loads((folder / "manifest.json").read_text())
    (kernel,) = (entry for entry in manifest["kernels"].values() if entry["file"] == "attention.cu")
    assert features == ", ".join(load_shipped(name).features())
    assert (kernel["spill_store_bytes"], kernel["spill_load_bytes"]) == row.spills
    assert kernel["smem_bytes"] == row.smem
    assert counted((folder / "attention.ptx").read_text()) == (row.barriers, row.exponentials)


@pytest.mark.parametrize("name", [name for name in shipped_configs() if "sm_100a" in load_shipped(name).arch])
def test_what_ships_keeps_it(name: str) -> None:
    """The stored kernels take the group from the launch; registers, spills, barriers and ex2 are those of the table all the same."""
    folder = REPOSITORY / "generated" / name / "sm_100a"
    manifest = json.loads((folder / "manifest.json").read_text())
    (kernel,) = (entry for entry in manifest["kernels"].values() if entry["file"] == "attention.cu")
    assert [kernel[key] for key in ("registers", "spill_store_bytes", "spill_load_bytes", "stack_bytes")] == [128, 0, 0, 0]
    if name in table()[0]:
        row = table()[0][name]
        assert kernel["smem_bytes"] == row.smem
        assert counted((folder / "attention.ptx").read_text()) == (row.barriers, row.exponentials)
