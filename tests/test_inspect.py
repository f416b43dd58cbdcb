"""`fa4gen inspect`: its tables against what the emulator sees the kernels do, the picture, the trace, the command."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fa4gen.cli import main
from fa4gen.codegen import artifacts, compiler, pipeline, runner, units
from fa4gen.codegen.backends import Compiled
from fa4gen.codegen.config import Config, load_shipped, parse_config, shipped_configs
from fa4gen.codegen.emulator import LaunchResult, Memory, Program
from fa4gen.codegen.emulator.memory import SHARED_START
from fa4gen.codegen.feature_inputs import page_table
from fa4gen.codegen.geometry import SUB_TILE_DEPTH, Geometry, derive
from fa4gen.codegen.geometry_sm90 import Sm90Geometry
from fa4gen.codegen.geometry_sm100 import Sm100Geometry
from fa4gen.codegen.inspection import command, facts, picture, report, trace
from fa4gen.codegen.render import has_attention, render

SVG = "{http://www.w3.org/2000/svg}"
WALK_TILES = 4

pytestmark = pytest.mark.skipif(compiler.nvrtc_version() is None, reason="NVRTC is not installed")


def variant(name: str, **fields: object) -> Config:
    shipped = {key: value for key, value in load_shipped(name).model_dump().items() if value not in (None, ())}
    return parse_config(shipped | fields)


# The kernels of models differ from these by features; what that changes is looked at by name.
KERNELS = [
    (name, arch)
    for name in shipped_configs()
    for arch in load_shipped(name).arch
    if has_attention(load_shipped(name), arch) and not load_shipped(name).features()
]
FP8_KERNELS = [("d128_fp8", "sm_100a"), ("d512_fp8", "sm_100a")]


@dataclass(frozen=True)
class Run:
    config: Config
    geo: Geometry
    recorder: trace.Recorder
    result: LaunchResult
    cluster: int


@cache
def recorded(
    config: Config, arch: str, tiles: int = WALK_TILES, partition_tiles: int | None = None, *, batch: int = 1, seed: int = 0
) -> Run:
    """A run over whole key tiles of one full tile of query rows for each sequence."""
    geo = derive(config, arch)
    partition_keys = None if partition_tiles is None else partition_tiles * geo.block_keys
    shape = {"batch": batch, "keys": tiles * geo.block_keys, "q_len": geo.tile_rows // 8, "heads": 8}
    options = runner.RunOptions(config=config.name, seed=seed, **shape)
    # One SM: on sm_90a its CTAs take the whole batch, one sequence after the other.
    run = command.record_attention(config, arch, options, partition_keys=partition_keys, ctas=1)
    assert run.geo == geo
    run.recorder.finish()
    return Run(config, geo, run.recorder, run.result, run.cluster)


# --- barriers ---------------------------------------------------------------------------------------------------------

VARIANTS: list[tuple[str, str, dict[str, Any], int, int | None]] = [
    *((name, arch, {}, WALK_TILES * pipeline.rings(derive(load_shipped(name), arch)), None) for name, arch in KERNELS),
    ("gpt_oss", "sm_90a", {"window": 1024}, 16, None),
    ("qwen3", "sm_90a", {}, 6, 2),
    ("d128", "sm_90a", {"tile_rows": 8}, 16, 8),
    ("d128_m2", "sm_90a", {"tile_rows": 32}, 16, 8),
    ("d256", "sm_90a", {"warpgroups": 1, "tile_rows": 8}, 4, None),
    ("d256", "sm_90a", {"rescale": "lazy"}, 4, None),
    ("d512", "sm_90a", {"out_dtype": "float32"}, 5, None),
    ("d512", "sm_90a", {"tile_rows": 16}, 6, 2),
    ("d256", "sm_100a", {"warpgroups": 1}, 3, None),
    ("d128", "sm_100a", {"warpgroups": 1}, 3, None),
    ("d512", "sm_100a", {}, 8, 4),
    ("d128_m2", "sm_100a", {"mask": "causal"}, 5, None),
    *((name, arch, {}, 7, None) for name, arch in FP8_KERNELS),
]


def observed_roles(run: Run, counts: Counter[tuple[int, str]]) -> Counter[tuple[str, str]]:
    """Arrivals by (role, how) instead of by warp."""
    result: Counter[tuple[str, str]] = Counter()
    for (warp, how), count in counts.items():
        result[pipeline.role_of_warp(run.geo, warp).name, how] += count
    return result


@pytest.mark.parametrize(("name", "arch", "fields", "tiles", "partition_tiles"), VARIANTS)
def test_mbarrier_table_is_what_the_kernel_does(
    name: str, arch: str, fields: dict[str, Any], tiles: int, partition_tiles: int | None
) -> None:
    config = variant(name, **fields)
    geo = derive(config, arch)
    # So many sequences that every CTA of an SM uses every buffer of Q.
    batch = max(geo.q_buffers, 2) * geo.ctas_per_sm if isinstance(geo, Sm90Geometry) else 2
    run = recorded(config, arch, tiles, partition_tiles, batch=batch)
    assert run.result.hazards == []
    table = pipeline.mbarriers(run.geo)
    ctas = {cta for cta, _ in run.recorder.mbarriers}
    assert run.recorder.mbarriers.keys() == {(cta, barrier.offset) for cta in ctas for barrier in table}
    assert len(table) == run.geo.mbarriers
    for barrier in table:
        logs = [run.recorder.mbarriers[cta, barrier.offset] for cta in ctas]
        expected = Counter({(arrival.role, arrival.how): arrival.total(run.cluster) for arrival in barrier.arrivals})
        assert {log.count for log in logs} == {barrier.total(run.cluster)}, barrier.name
        merged_otherwise = barrier.in_cluster is not None and barrier.in_cluster != (run.cluster > 1)
        if merged_otherwise or (barrier.split_only and partition_tiles is None):
            assert all(log.complete == 0 for log in logs), barrier.name
            continue
        assert any(log.complete for log in logs), barrier.name
        for log in logs:
            for phase in log.phases[:-1]:
                assert observed_roles(run, phase) == expected, barrier.name
            assert sum(log.phases[-1].values()) == 0, barrier.name
        roles = {pipeline.role_of_warp(run.geo, warp).name for log in logs for warp in log.waits}
        assert roles == set(barrier.waits), barrier.name
        if barrier.split_only:
            continue
        # Bytes of a phase: the slot's, with those of a slice of Q where the table says so, or of a partition's O in a merge.
        extra = {0, run.geo.q_chunk_bytes} if "those of Q" in barrier.means else {0}
        pieces = {run.geo.piece_bytes} if isinstance(run.geo, Sm90Geometry) and partition_tiles and "full[" in barrier.name else set()
        announced = {amount for log in logs for amount in log.expected_bytes[:-1]}
        assert announced <= {barrier.tx_bytes + more for more in extra} | pieces, barrier.name


@pytest.mark.parametrize(("name", "arch", "fields", "tiles", "partition_tiles"), VARIANTS)
def test_named_barrier_table_is_what_the_kernel_does(
    name: str, arch: str, fields: dict[str, Any], tiles: int, partition_tiles: int | None
) -> None:
    config = variant(name, **fields)
    geo = derive(config, arch)
    # So many sequences that every CTA of an SM uses every buffer of Q.
    batch = max(geo.q_buffers, 2) * geo.ctas_per_sm if isinstance(geo, Sm90Geometry) else 2
    run = recorded(config, arch, tiles, partition_tiles, batch=batch)
    seen = set()
    for (_, number), completions in run.recorder.named.items():
        for threads, warps in completions:
            assert len(warps) * 32 == threads
            seen.add((number, threads, tuple(dict.fromkeys(pipeline.role_of_warp(run.geo, warp).name for warp in warps))))
    table = {(barrier.number, barrier.threads, barrier.roles) for barrier in pipeline.named_barriers(run.config, run.geo)}
    assert seen == table


ROLES_IN_SOURCES = {"load_keys_values": "load K V", "load_queries": "load Q", "merge_partitions": "attend"}


@pytest.mark.parametrize(
    ("name", "arch"),
    [(name, arch) for name, arch in KERNELS + FP8_KERNELS if arch == "sm_100a" or not load_shipped(name).shared_key],
)
def test_the_comment_in_the_source_says_the_same(name: str, arch: str) -> None:
    """The head of attention.cu lists its mbarriers: `name[..] arrivals  who arrives -> who waits`."""
    text = render(load_shipped(name), arch)["attention.cu"]
    listed = text.split("// mbarriers (arrivals a phase")[1].split("// Named barriers")[0].splitlines()[1:]
    left = list(pipeline.mbarriers(derive(load_shipped(name), arch)))
    for line in filter(None, listed):
        found = re.fullmatch(r"//\s+(\S+)\s+(\w+)  (.*) -> (.*)", line)
        assert found, line
        pattern, count, arrives, waits = found.groups()
        family, *indices = re.findall(r"\w+", pattern)
        # No index, [n] and [w] stand for all of them; a second one is meant as it is.
        names = re.compile(family + r"(\[\d+\])?" + "".join(re.escape(f"[{index}]") for index in indices[1:]))
        same = [barrier for barrier in left if names.fullmatch(barrier.name)]
        assert same, line
        for barrier in same:
            left.remove(barrier)
            # A name stands for a count that differs between entries; what mbarrier.init is given is compared elsewhere.
            assert not count.isdigit() or barrier.count == int(count), line
            said = {ROLES_IN_SOURCES.get(role, role) for role in re.sub(r" w$| w,|\(.*?\)", "", waits).replace(" ", "").split(",")}
            assert {role.rstrip("0123456789 ") for role in barrier.waits} == said, line
            assert all(_said(arrival.role, arrives) for arrival in barrier.arrivals), line
    assert left == []


def _said(role: str, text: str) -> bool:
    family = role.rstrip("0123456789 ")
    return any(
        word in text for word in (family, *(source for source, name in ROLES_IN_SOURCES.items() if name == family), "the thread that")
    )


@pytest.mark.parametrize(("name", "arch"), [(name, arch) for name in shipped_configs() for arch in load_shipped(name).arch])
def test_unit_tables_are_what_the_kernels_do(name: str, arch: str) -> None:
    config = load_shipped(name)
    geo = derive(config, arch)
    table = {unit.entry: unit for unit in pipeline.units(config, geo)}
    program = Program.from_ptx(runner.compiled_sources(config, arch)["unit.cu"].ptx)
    info = units.unit_entry_info(config, geo)
    kernels = {kernel.entry: kernel for kernel in facts.gather(config, arch).kernels}
    assert list(table) == [case.entry for case in units.cases(config, geo)]
    for case in units.cases(config, geo):
        recorder, launch, unit = trace.Recorder({}, SHARED_START), case.launch, table[case.entry]
        program.launch(launch.entry, launch.grid, launch.block, launch.smem_bytes, list(launch.args), memory=Memory(), observer=recorder)
        seen = {(number, threads) for (_, number), found in recorder.named.items() for threads, _ in found}
        assert seen == {(barrier.number, barrier.threads) for barrier in unit.barriers}
        assert recorder.mbarriers == {}
        assert sum(region.size for region in unit.dynamic) == info[case.entry]["smem_bytes"] == kernels[case.entry].dynamic_smem_bytes
        # Up to the alignment of the dynamic part behind it.
        slack = kernels[case.entry].resources["static_smem_bytes"] - sum(region.size for region in unit.static)
        assert slack == 0 or (unit.dynamic and 0 < slack < 16)
        # Every barrier that the compiler reserves by number is in the table; 16 where the number is a variable.
        assert kernels[case.entry].resources["barriers"] in (16, *(barrier.number + 1 for barrier in unit.barriers), 0)


# --- the ring ---------------------------------------------------------------------------------------------------------


def expected_copies(config: Config, geo: Geometry, use: pipeline.RingUse) -> list[tuple[int, tuple[int, ...]]]:
    """Offset within the slot, and coordinates, of each copy that fills it. The coordinates end with the page where there are pages."""
    if isinstance(geo, Sm100Geometry):
        boxes = geo.v_boxes if use.operand == "V" else 1
        starts = [(box * geo.copy_slot_bytes // boxes, use.key + box * geo.s_cols) for box in range(boxes)]
        return [(offset, (0, use.tile * geo.block_keys + key, use.depth // SUB_TILE_DEPTH)) for offset, key in starts]
    assert isinstance(geo, Sm90Geometry)
    chunk, first = use.depth // SUB_TILE_DEPTH, use.tile * geo.block_keys + use.key
    if config.page_size is None:
        return [(0, (0, first, chunk))]
    (table,) = page_table(1, WALK_TILES * geo.block_keys, config.page_size)
    if geo.tile_pages == 1:
        return [(0, (0, first % config.page_size, chunk, 0, int(table[first // config.page_size])))]
    if use.operand == "V" and geo.v_box_chunks > geo.box_chunks:
        pages = [int(page) for page in table[first // config.page_size :][: geo.tile_pages]]
        return [(place * geo.slot_bytes // geo.tile_pages, (0, 0, chunk, 0, page)) for place, page in enumerate(pages)]
    chunk_bytes, page_bytes = geo.slot_bytes // geo.slot_chunks, geo.slot_bytes // geo.slot_chunks // geo.tile_pages
    return [
        (c * chunk_bytes + page * page_bytes, (0, 0, chunk + c, 0, int(table[first // config.page_size + page])))
        for page in range(geo.tile_pages)
        for c in range(geo.slot_chunks)
    ]


@pytest.mark.parametrize(("name", "arch"), [*KERNELS, ("llama3", "sm_90a"), ("qwen3", "sm_90a"), ("d512_fp8", "sm_100a")])
def test_ring_walk_is_what_the_producer_does(name: str, arch: str) -> None:
    config = load_shipped(name)
    run = recorded(config, arch)
    geo = run.geo
    assert isinstance(geo, (Sm90Geometry, Sm100Geometry))
    names = {barrier.offset: barrier.name for barrier in pipeline.mbarriers(geo)}
    region, slots, slot_bytes = "ring", geo.ring_slots, geo.slot_bytes
    if isinstance(geo, Sm100Geometry):
        region, slots, slot_bytes = geo.copy_region, geo.copy_slots, geo.copy_slot_bytes
    prefix = f"{region}_" if arch == "sm_100a" else ""
    copies = [copy for copy in run.recorder.copies[0] if copy.array in ("k", "v")]
    by_ring = itertools.groupby(pipeline.ring_walk(geo, WALK_TILES), key=lambda use: use.ring)
    walks = {ring: list(uses) for ring, uses in by_ring}
    producers = sorted({copy.warp for copy in copies})
    assert len(producers) == len(walks)
    for producer, (ring, uses) in zip(producers, walks.items(), strict=True):
        mine = iter([copy for copy in copies if copy.warp == producer])
        first_slot = min(use.slot for use in uses)
        filled: Counter[int] = Counter()
        for position, use in enumerate(uses):
            assert (use.position, use.ring) == (position, ring)
            for offset, coordinates in expected_copies(config, geo, use):
                copy = next(mine)
                assert copy.array == use.operand.lower()
                assert copy.offset == geo.offset(region) + use.slot * slot_bytes + offset
                assert copy.coordinates[: len(coordinates)] == coordinates
                assert names[copy.mbarrier] == f"{prefix}full[{use.slot}]"
            assert use.parity == filled[use.slot] % 2
            filled[use.slot] += 1
        assert next(mine, None) is None
        assert first_slot == ring * (slots // len(walks))
        for slot, count in filled.items():
            (full,) = [offset for offset, name in names.items() if name == f"{prefix}full[{slot}]"]
            (empty,) = [offset for offset, name in names.items() if name == f"{prefix}empty[{slot}]"]
            assert run.recorder.mbarriers[0, full].complete == run.recorder.mbarriers[0, empty].complete == count


@pytest.mark.parametrize("name", [name for name, arch in KERNELS if arch == "sm_100a"])
def test_ring_is_released_in_the_order_of_the_walk(name: str) -> None:
    run = recorded(load_shipped(name), "sm_100a")
    names = {barrier.offset: barrier.name for barrier in pipeline.mbarriers(run.geo)}
    commits = [names[flight.args["mbarrier"]] for flight in run.recorder.flights if flight.kind == "commit"]
    slots = [int(re.findall(r"\d+", name)[0]) for name in commits if name.startswith("ring_empty")]
    assert slots == [use.slot for use in pipeline.ring_walk(run.geo, WALK_TILES)]


# --- maps -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "arch"), KERNELS + FP8_KERNELS)
def test_maps_are_the_geometry(name: str, arch: str) -> None:
    config = load_shipped(name)
    geo = derive(config, arch)
    assert isinstance(geo, (Sm90Geometry, Sm100Geometry))
    smem = pipeline.smem_contents(config, geo)
    assert tuple(content.region for content in smem) == geo.smem_map
    ends = [0, *(content.region.end for content in smem)]
    assert [content.region.offset for content in smem] == ends[:-1]
    assert geo.smem_bytes - 16 < ends[-1] <= geo.smem_bytes
    roles = pipeline.roles(geo)
    assert [role.first_warp for role in roles] == list(itertools.accumulate((role.warps for role in roles), initial=0))[:-1]
    assert roles[-1].first_warp + roles[-1].warps == geo.threads // 32
    assert sum(role.registers * role.warps * 32 for role in roles) <= 65_536
    known = {role.name for role in roles}
    for barrier in pipeline.mbarriers(geo):
        assert {arrival.role for arrival in barrier.arrivals} | set(barrier.waits) <= known
    for content in pipeline.epilogue(geo):
        # Only over what is dead by then, or what the table of the main map names for it.
        over = {
            other.region.name for other in smem if other.region.offset < content.region.end and content.region.offset < other.region.end
        }
        assert over <= ({"q", "ring", "raw"} if arch == "sm_100a" else {"q", "merge_o"})
    if isinstance(geo, Sm100Geometry):
        assert tuple(content.region for content in pipeline.tmem_contents(geo)) == geo.tmem_map
    else:
        assert pipeline.tmem_contents(geo) == ()


def test_setmaxnreg_is_the_roles_registers() -> None:
    for name, arch in KERNELS:
        config = load_shipped(name)
        geo = derive(config, arch)
        wanted = {role.registers for role in pipeline.roles(geo)} - {0}
        ptx = runner.compiled_sources(config, arch)["attention.cu"].ptx
        assert {int(count) for count in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx)} == wanted


# --- tables -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["d512", "d128_m2", "d256_m2", "d128_fp8"])
def test_text(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--config", name]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    assert "\x1b" not in output.out
    assert all(line == line.rstrip() for line in output.out.splitlines())
    config = load_shipped(name)
    for arch in config.arch:
        geo = derive(config, arch)
        part = output.out.split(f"{name} on {arch}")[1].split(f"{name} on ")[0]
        kernels = part.split("\nKernels")[1].split("\n\n")[0].splitlines()
        for kernel in facts.gather(config, arch).kernels:
            line = next(line for line in kernels if line.split()[0] == kernel.entry)
            assert f" {kernel.resources['registers']} " in line
            assert line.endswith(f"{kernel.dynamic_smem_bytes:,}")
        if not has_attention(config, arch):
            assert "not generated" in part
            continue
        assert isinstance(geo, (Sm90Geometry, Sm100Geometry))
        for region in geo.smem_map:
            assert re.search(rf"^  {region.name}\s+{region.offset:,}\s+{region.size:,}\s", part, re.MULTILINE)
        for use in pipeline.ring_walk(geo, facts.walk_tiles(geo)):
            assert f"{use.operand} of key tile {use.tile} " in part


def test_json_has_every_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--config", "d512", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert list(data) == ["sm_90a", "sm_100a"]
    geo = derive(load_shipped("d512"), "sm_100a")
    (found,) = data["sm_100a"]["attention"]
    assert [barrier["name"] for barrier in found["mbarriers"]] == [barrier.name for barrier in pipeline.mbarriers(geo)]
    assert [barrier["count"] for barrier in found["mbarriers"]] == [barrier.count for barrier in pipeline.mbarriers(geo)]
    assert [(region["name"], region["offset"], region["size"]) for region in found["tmem"]] == [
        ("S0", 0, 64), ("S1", 64, 64), ("O0", 128, 128), ("O1", 256, 128)
    ]  # fmt: skip
    assert len(found["ring"]) == WALK_TILES * 2 * geo.qk_stages
    kernel = data["sm_100a"]["kernels"][found["entry"]]
    assert kernel["registers"] == 128
    assert kernel["spill_store_bytes"] == 0
    assert kernel["dynamic_smem_bytes"] == geo.smem_bytes
    entries = data["sm_90a"]["attention"]
    assert [(entry["tile_rows"], entry["ctas_per_sm"]) for entry in entries] == [(32, 1), (16, 1), (8, 1), (8, 2)]
    assert {entry["entry"] for entry in entries} == {name for name, kernel in data["sm_90a"]["kernels"].items() if kernel["full"]}
    assert all(entry["tmem"] == [] for entry in entries)


def test_figures_come_from_the_manifest_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_shipped("d256")
    artifacts.emit(config, ["sm_90a"], tmp_path)
    monkeypatch.setattr(artifacts, "default_out", lambda: tmp_path)
    compiled = facts.gather(config, "sm_90a")
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: None)
    stored = facts.gather(config, "sm_90a")
    assert "manifest" in stored.source
    assert stored.kernels == compiled.kernels
    other = facts.gather(variant("d256", use_fma=False), "sm_90a")
    assert "not known" in other.source
    assert all(kernel.resources == {} for kernel in other.kernels)
    assert "not known" in report.plain(other)
    ElementTree.fromstring(picture.picture([other]))


def test_terminal_gets_rich_tables() -> None:
    from rich.console import Console

    console = Console(force_terminal=True, width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    report.show(facts.gather(load_shipped("d128"), "sm_100a"), console)
    text = console.export_text()
    for sheet in report.sheets(facts.gather(load_shipped("d128"), "sm_100a")):
        assert sheet.title.split(" (")[0] in text
    assert "[0-5]" in text  # not taken for markup


# --- picture ----------------------------------------------------------------------------------------------------------


def text_boxes(root: ElementTree.Element) -> list[tuple[str, float, float, float, float]]:
    """Every label with left, top, right and bottom, by the font sizes of the style and an average width of a character."""
    sizes = {"h1": 19.0, "h2": 13.5, "dim": 11.0, "in small": 10.0}
    found = []
    for label in root.iter(f"{SVG}text"):
        size = sizes.get(label.attrib.get("class", ""), 12.0)
        width = len(label.text or "") * 0.52 * size
        x, y = float(label.attrib["x"]), float(label.attrib["y"])
        left = x - {"middle": width / 2, "end": width}.get(label.attrib.get("text-anchor", "start"), 0.0)
        found.append((label.text or "", left, y - 0.7 * size, left + width, y))
    return found


@pytest.mark.parametrize("name", shipped_configs())
def test_picture(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "picture.svg"
    assert main(["inspect", "--config", name, "--svg", str(file)]) == 0
    capsys.readouterr()
    assert os.listdir(tmp_path) == ["picture.svg"]
    text = file.read_text()
    root = ElementTree.fromstring(text)
    # Self-contained: nothing is fetched, no script runs.
    assert not re.search(r"href|url\(|@import|<script|<image|@font-face", text)
    assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]
    assert "prefers-color-scheme: dark" in text
    _, _, width, height = (float(number) for number in root.attrib["viewBox"].split())
    for rect in root.iter(f"{SVG}rect"):
        box = {key: float(rect.attrib.get(key, 0)) for key in ("x", "y", "width", "height")}
        assert 0 <= box["x"] <= box["x"] + box["width"] <= width + 0.1
        assert 0 <= box["y"] <= box["y"] + box["height"] <= height + 0.1
    for label in root.iter(f"{SVG}text"):
        assert 0 <= float(label.attrib["x"]) <= width
        assert 0 <= float(label.attrib["y"]) <= height
    labels = text_boxes(root)
    assert [text for text, left, _, right, _ in labels if left < 0 or right > width] == []
    pairs = itertools.combinations(labels, 2)
    assert [(a[0], b[0]) for a, b in pairs if a[1] < b[3] and b[1] < a[3] and a[2] < b[4] and b[2] < a[4]] == []


def tipped(root: ElementTree.Element, start: str) -> list[dict[str, float]]:
    """Boxes of the rectangles whose tooltip begins so, in document order."""
    found = []
    for rect in root.iter(f"{SVG}rect"):
        title = rect.find(f"{SVG}title")
        if title is not None and (title.text or "").startswith(start):
            found.append({key: float(rect.attrib[key]) for key in ("x", "y", "width", "height")})
    return found


@pytest.mark.parametrize(("name", "arch"), KERNELS)
def test_picture_is_to_scale(name: str, arch: str) -> None:
    config = load_shipped(name)
    geo = derive(config, arch)
    assert isinstance(geo, (Sm90Geometry, Sm100Geometry))
    root = ElementTree.fromstring(picture.picture([facts.gather(config, arch)]))
    scale = picture.INNER / geo.smem_limit
    for region in geo.smem_map:
        box = tipped(root, f"{region.name}: {region.offset:,} to {region.end:,}")[0]
        assert box["x"] == pytest.approx(picture.MARGIN + region.offset * scale, abs=0.1)
        assert box["width"] == pytest.approx(max(region.size * scale, 0.6), abs=0.1)
    if isinstance(geo, Sm100Geometry):
        boxes = {region.name: tipped(root, f"{region.name}: columns")[0] for region in geo.tmem_map}
        per_column = boxes["O0"]["width"] / geo.o_phys_cols
        for region in geo.tmem_map:
            assert boxes[region.name]["width"] == pytest.approx(region.size * per_column, abs=0.1)
            assert boxes[region.name]["x"] - boxes["S0"]["x"] == pytest.approx(region.offset * per_column, abs=0.2)
    walk = pipeline.ring_walk(geo, facts.walk_tiles(geo))
    drawn = tipped(root, "slot ")
    assert len(drawn) == len(walk)
    # One row a slot, no two boxes of a slot over each other.
    for slot in {use.slot for use in walk}:
        row = [box for box, use in zip(drawn, walk, strict=True) if use.slot == slot]
        assert len({box["y"] for box in row}) == 1
        assert all(left["x"] + left["width"] <= right["x"] + 0.1 for left, right in itertools.pairwise(row))


# --- trace ------------------------------------------------------------------------------------------------------------


def check_trace(data: dict[str, Any]) -> None:
    """The rules of the trace event format that the viewers rely on."""
    events = data["traceEvents"]
    assert data["displayTimeUnit"] in ("ms", "ns")
    rows = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    processes = {event["pid"] for event in events if event["name"] == "process_name"}
    slices: dict[tuple[int, int], list[tuple[int, int]]] = {}
    flights: dict[tuple[int, str, str], list[dict[str, Any]]] = {}
    for event in events:
        assert event["ph"] in ("M", "X", "b", "e")
        assert isinstance(event["name"], str)
        assert event["name"]
        assert event["pid"] in processes
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
            continue
        assert (event["pid"], event["tid"]) in rows
        assert isinstance(event["ts"], int)
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] > 0
            slices.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
        else:
            flights.setdefault((event["pid"], event["cat"], event["id"]), []).append(event)
    for spans in slices.values():
        open_ends: list[int] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1], "slices of a row overlap without nesting"
            open_ends.append(end)
    for pair in flights.values():
        assert [event["ph"] for event in pair] == ["b", "e"]
        begin, end = pair
        assert (begin["name"], begin["tid"]) == (end["name"], end["tid"])
        assert begin["ts"] < end["ts"]


SEEDED = [*((name, arch, 0) for name, arch in KERNELS), ("d512", "sm_90a", 1), ("d128", "sm_100a", 1), ("d512", "sm_100a", 2)]


@pytest.mark.parametrize(("name", "arch", "seed"), SEEDED)
def test_trace(name: str, arch: str, seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.json"
    arguments = ["--keys", "600", "--seed", str(seed), "--json"]
    assert main(["inspect", "--config", name, "--arch", arch, "--trace", str(file), *arguments]) == 0
    assert capsys.readouterr().err == ""
    assert os.listdir(tmp_path) == ["trace.json"]
    data = json.loads(file.read_text())
    check_trace(data)
    geo = derive(load_shipped(name), arch)
    events = data["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert len(rows) == geo.threads // 32  # type: ignore[attr-defined]
    assert all(row.startswith(pipeline.role_of_warp(geo, warp).name) for warp, row in rows.items())
    assert "instruction" in data["otherData"]["time"]
    (kernel,) = data["otherData"]["kernels"]
    assert kernel["hazards"] == 0
    assert kernel["shape"].endswith("k600")
    assert max(event["ts"] for event in events if "ts" in event) <= kernel["warp_instructions"]
    waits = {event["name"].removeprefix("wait ") for event in events if event["ph"] == "X" and event["cat"] == "wait"}
    known = {barrier.name for barrier in pipeline.mbarriers(geo)}
    assert waits <= known
    assert {barrier.split("[")[0] for barrier in waits} == {b.name.split("[")[0] for b in pipeline.mbarriers(geo) if not b.split_only}
    begun = [event for event in events if event["ph"] == "b"]
    # On sm_90a key-split multiplies by mma.sync, which is not asynchronous.
    kinds = {"sm_100a": {"mma", "commit"}, "sm_90a": {"mma"} if load_shipped(name).shared_key else set()}
    assert {event["cat"] for event in begun} == {"load", "store"} | kinds[arch]
    assert any("mma" in event["name"] for event in events if event.get("cat") == "issue")
    if isinstance(geo, Sm100Geometry):
        # S of every key tile and P.V into O, each into the accumulator of its warpgroup.
        products = {event["name"] for event in begun if event["cat"] == "mma"}
        assert products == {f"tcgen05.mma -> {region.name}" for region in geo.tmem_map}
    assert {event["name"][:6] for event in begun if event["cat"] == "load"} == {"load Q", "load K", "load V"}
    assert all(event["args"]["signals"] in known for event in begun if event["cat"] == "load")
    barriers = {event["name"] for event in events if event["ph"] == "X" and event["cat"] == "barrier"}
    assert any(("exchange" if load_shipped(name).shared_key else "combine") in barrier for barrier in barriers)


def test_trace_of_both_targets_keeps_them_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.json"
    assert main(["inspect", "--config", "d256", "--trace", str(file), "--keys", "100", "--q-len", "9"]) == 0
    capsys.readouterr()
    data = json.loads(file.read_text())
    check_trace(data)
    assert [kernel["arch"] for kernel in data["otherData"]["kernels"]] == ["sm_90a", "sm_100a"]
    names = {event["pid"]: event["args"]["name"] for event in data["traceEvents"] if event["name"] == "process_name"}
    assert len(names) == len(set(names.values())) == 2 * 3  # 9 positions of 8 heads are 3 tiles of 32 rows
    assert {name.split("(")[1] for name in names.values()} == {"sm_90a)", "sm_100a)"}


def test_trace_of_a_deadlock_shows_who_waits(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = render(load_shipped("d256"), "sm_100a")["attention.cu"]
    never = text.replace("ptx_tcgen05_commit(smem + RING_EMPTY_OFFSET + ring.slot * MBARRIER_BYTES);", "")
    assert never != text
    module = compiler.compile_source(never, "sm_100a", "attention.cu")
    monkeypatch.setattr(runner, "compiled_sources", lambda config, arch: {"attention.cu": Compiled(arch, module.ptx)})
    file = tmp_path / "trace.json"
    assert main(["inspect", "--config", "d256", "--arch", "sm_100a", "--trace", str(file), "--json"]) == 1
    assert "deadlock" in capsys.readouterr().err
    data = json.loads(file.read_text())
    check_trace(data)
    stuck = {event["name"] for event in data["traceEvents"] if event.get("args", {}).get("unfinished") and event["cat"] == "wait"}
    assert any(name.startswith("wait ring_empty") for name in stuck)
    assert any(name.startswith(("wait s_full", "wait ring_full")) for name in stuck)


def test_observer_changes_nothing() -> None:
    config = load_shipped("d128")
    problem = runner.attention_problem(config, runner.RunOptions(config="d128", keys=300))
    from fa4gen.codegen.attention import attention_launch

    results = []
    for observer in (None, trace.Recorder({}, SHARED_START)):
        out, lse = units.poisoned(problem.q.shape, units.DTYPES["bfloat16"]), units.poisoned((1, 8, 4), units.DTYPES["float32"])
        launch = attention_launch(config, derive(config, "sm_100a"), problem.q, problem.k, problem.v, out, lse)
        program = Program.from_ptx(runner.compiled_sources(config, "sm_100a")["attention.cu"].ptx)
        result = program.launch(
            launch.entry, launch.grid, launch.block, launch.smem_bytes, list(launch.args), memory=Memory(), seed=3, observer=observer
        )
        results.append((result.instructions, result.barriers, result.hazards, out.tobytes(), lse.tobytes()))
    assert results[0] == results[1]


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "needle"),
    [
        (["--config", "d51"], "did you mean d512"),
        (["--config", "d512", "--arch", "sm_80"], "sm_80"),
        (["--config", "d512", "--svg", "no_such_folder/x.svg"], "no such folder"),
        (["--config", "d512", "--svg", "."], "is a folder"),
        (["--config", "d512", "--trace", "no_such_folder/x.json"], "no such folder"),
        (["--config", "d512", "--svg", "same", "--trace", "same"], "same file"),
        (["--config", "d512", "--keys", "10"], "--trace"),
        (["--config", "d512", "--trace", "x.json", "--keys", "0"], "--keys"),
        (["--config", "d512", "--trace", "x.json", "--heads", "7", "--kv-heads", "2"], "multiple"),
        (["--config", "d512", "--nothing"], "--nothing"),
        (["--config", "d256_m2", "--arch", "sm_90a", "--trace", "x.json"], "nothing to trace"),
    ],
)
def test_bad_arguments_are_one_line(
    arguments: list[str], needle: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert needle in captured.err
    assert "internal error" not in captured.err
    assert os.listdir(tmp_path) == []


def test_a_failed_write_leaves_what_was_there(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.svg"
    file.write_text("old")

    def refuse(source: str, target: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    monkeypatch.setenv("FA4GEN_CACHE_DIR", str(tmp_path / "cache"))
    assert main(["inspect", "--config", "d64", "--svg", str(file)]) == 2
    assert capsys.readouterr().err == f"fa4gen: {file}: No space left on device\n"
    assert file.read_text() == "old"
    assert [name for name in os.listdir(tmp_path) if name != "cache"] == ["x.svg"]


def test_pipe_that_closes_early_is_no_traceback() -> None:
    shell = f"{sys.executable} -m fa4gen.cli inspect --config d64 --json | head -1"
    result = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    assert result.stderr == ""
