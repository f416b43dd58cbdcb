"""Everything that `fa4gen inspect` shows of one config and target, gathered from the geometry, the pipeline tables and the compiler."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .. import artifacts, compiler, pipeline, render
from ..config import Config
from ..geometry import Geometry, derive, entry_configs, symbol
from ..render import has_attention

WALK_TILES = 4
RING_TILES = 2
RESOURCES = artifacts.RESOURCE_KEYS


@dataclass(frozen=True)
class Kernel:
    """One entry: its launch, and what the compiler says it takes (empty where that is not known). full: the attention kernel."""

    entry: str
    full: bool
    threads: int
    dynamic_smem_bytes: int
    resources: Mapping[str, int]


@dataclass(frozen=True)
class Facts:
    """What is shown. attention: whether the target has the full kernel. source: where the resource figures come from.

    geo: of the entry of attention.cu whose tiles have the most rows; entries: the configs of all, that one first (see entry_configs).
    """

    config: Config
    arch: str
    geo: Geometry
    attention: bool
    kernels: tuple[Kernel, ...]
    source: str
    entries: tuple[Config, ...]

    @property
    def title(self) -> str:
        mode = "shared-key" if self.config.shared_key else "key-split"
        return f"{self.config.name} on {self.arch}: depth {self.geo.depth}, {self.geo.m_pack} x {self.geo.rows} rows, {mode}"


def walk_tiles(geo: Geometry) -> int:
    """Key tiles over which the walk of the ring is shown: a few, and for each of several rings also."""
    return max(WALK_TILES, RING_TILES * pipeline.rings(geo))


def gather(config: Config, arch: str) -> Facts:
    """Raises ConfigError, RenderError, CompileError."""
    attention = has_attention(config, arch)
    entries = sorted(entry_configs(config, arch), key=lambda entry: -derive(entry, arch).tile_rows)
    geo = derive(entries[0], arch)
    resources, source = _resources(config, arch)
    kernels = []
    for entry, info in artifacts.entry_info(config, arch).items():
        x, y, z = info["block"]
        full = info["file"] == "attention.cu"
        kernels.append(Kernel(entry, full, x * y * z, info["smem_bytes"], resources.get(entry, {})))
    return Facts(config, arch, geo, attention, tuple(kernels), source, tuple(entries))


def _resources(config: Config, arch: str) -> tuple[dict[str, Mapping[str, int]], str]:
    """Entry -> registers, spills and the rest: compiled now, or the manifest's where there is no compiler and the sources are the same."""
    sources = {name: text for name, text in render.render(config, arch).items() if name.endswith(".cu")}
    if compiler.nvrtc_version() is not None:
        modules = compiler.compile_all([(text, arch, name) for name, text in sources.items()])
        figures = {entry: asdict(kernel) for module in modules for entry, kernel in module.kernels.items()}
        return {entry: {key: kernel[key] for key in RESOURCES} for entry, kernel in figures.items()}, f"NVRTC {compiler.nvrtc_version()}"
    path = artifacts.default_out() / render.folder(config, arch) / artifacts.MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if all(manifest["outputs"][name] == hashlib.sha256(text.encode()).hexdigest() for name, text in sources.items()):
            kernels: dict[str, Mapping[str, int]] = {
                entry: {key: kernel[key] for key in RESOURCES} for entry, kernel in manifest["kernels"].items()
            }
            return kernels, f"the manifest of {render.folder(config, arch)}"
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return {}, "not known: NVRTC is not installed, and no manifest is of these sources"


def as_json(facts: Facts) -> dict[str, Any]:
    """The same, for programs. Offsets, sizes and bytes as numbers; TMEM offsets and sizes are columns."""
    config, geo = facts.config, facts.geo
    result: dict[str, Any] = {
        "config": config.model_dump(mode="json"),
        "arch": facts.arch,
        "geometry": asdict(geo),
        "resources_from": facts.source,
        "kernels": {
            kernel.entry: {
                "full": kernel.full,
                "threads": kernel.threads,
                "dynamic_smem_bytes": kernel.dynamic_smem_bytes,
                **kernel.resources,
            }
            for kernel in facts.kernels
        },
        "units": [asdict(unit) for unit in pipeline.units(config, geo)],
        "attention": [_attention(entry, facts.arch) for entry in facts.entries] if facts.attention else [],
    }
    return result


def _attention(config: Config, arch: str) -> dict[str, Any]:
    """The tables of one entry of attention.cu."""
    geo = derive(config, arch)
    return {
        "entry": symbol(config, arch),
        "tile_rows": geo.tile_rows,
        "smem_bytes": geo.smem_bytes,
        "ctas_per_sm": getattr(geo, "ctas_per_sm", 1),
        "roles": [asdict(role) for role in pipeline.roles(geo)],
        "tmem": [_content(content) for content in pipeline.tmem_contents(geo)],
        "smem": [_content(content) for content in pipeline.smem_contents(config, geo)],
        "epilogue": [_content(content) for content in pipeline.epilogue(geo)],
        "ring": [asdict(use) for use in pipeline.ring_walk(geo, walk_tiles(geo))],
        "mbarriers": [asdict(barrier) | {"count": barrier.count} for barrier in pipeline.mbarriers(geo)],
        "named_barriers": [asdict(barrier) for barrier in pipeline.named_barriers(config, geo)],
    }


def _content(content: pipeline.Content) -> dict[str, Any]:
    values = asdict(content)
    return {**values.pop("region"), **values}
