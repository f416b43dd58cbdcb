"""Kernels that `fa4gen export` wrote, launched from Python: neither NVRTC nor Jinja is imported here."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .api import Attention, require_config
from .attention import attention_entry_info
from .backends import Compiled
from .config import Config, ConfigError, parse_config
from .geometry import derive, entry_configs
from .text import one_line

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"


class ExportedError(RuntimeError):
    """An export that cannot be used. `str()` is one line naming the file."""

    def __init__(self, text: str) -> None:
        super().__init__(one_line(text))


def cubin_name(config: Config, arch: str) -> str:
    """The file of a target's CUBIN in an export."""
    return f"{config.name}_{arch}.cubin"


def entry_facts(config: Config, arch: str) -> dict[str, dict[str, Any]]:
    """Entry -> its block, grid rule, dynamic smem_bytes, arguments, tile rows, largest cluster and CTAs an SM, for the manifest."""
    facts = {}
    for entry in entry_configs(config, arch):
        geo = derive(entry, arch)
        info = attention_entry_info(entry, geo)
        name = info.pop("name")
        shared = {fact: getattr(geo, fact, 1) for fact in ("max_cluster", "ctas_per_sm")}
        facts[name] = info | {"tile_rows": geo.tile_rows} | shared
    return facts


@dataclass(frozen=True)
class _Kernel:
    config: Config
    cubin: bytes


class Exported:
    """The kernels of an export: `attention` is fa4gen.attention on them.

    A call's config is the one named, or the first of the export that is made for what the call asks.
    """

    def __init__(self, folder: Path, kernels: dict[tuple[str, str], _Kernel]) -> None:
        self.folder = folder
        self._kernels = kernels
        self._caller = Attention(self)
        self.attention = self._caller.attention

    @property
    def targets(self) -> list[tuple[str, str]]:
        """(config's name, target) of each kernel, in the order of the export."""
        return list(self._kernels)

    def config(self, ref: Config | str) -> Config:
        """The exported config of that name, or equal to the one given."""
        for kernel in self._kernels.values():
            if ref in (kernel.config.name, kernel.config):
                return kernel.config
        name = ref.name if isinstance(ref, Config) else ref
        raise ValueError(f"config is {name}; {self.folder} has {self._names()}")

    def choose(self, asked: tuple[Any, ...], exact: bool, arch: str) -> Config:
        """The first config that a call is served by. exact: one whose rows depend on no other row is taken before others."""
        candidates = [kernel.config for (_, own), kernel in self._kernels.items() if own == arch]
        if not candidates:
            raise ValueError(f"the GPU is {arch}; {self.folder} has {self._names()}")
        fitting, refusals = [], []
        for config in candidates:
            try:
                require_config(config, asked, arch)
                fitting.append(config)
            except ValueError as error:
                refusals.append(str(error))
        if not fitting:
            raise ValueError(f"no exported config is made for the call: {'; '.join(refusals)}")
        return next((config for config in fitting if exact and config.rescale == "exact"), fitting[0])

    def compiled(self, config: Config, arch: str) -> Compiled:
        kernel = self._kernels.get((config.name, arch))
        if kernel is None:
            raise ValueError(f"config {config.name} was not exported for {arch}; {self.folder} has {self._names()}")
        return Compiled(arch, "", kernel.cubin)

    def _names(self) -> str:
        return ", ".join(f"{name} for {arch}" for name, arch in self._kernels)


def load_exported(folder: str | os.PathLike[str]) -> Exported:
    """The kernels of a folder that `fa4gen export` wrote; `.attention(q, k, v, ...)` is fa4gen.attention on them, without numpy arrays.

    Raises ExportedError where a file is missing or not the one that the manifest lists, or where this version of fa4gen would launch a
    kernel otherwise than the one that exported it.
    """
    path = Path(folder)
    manifest = _manifest(path)
    kernels: dict[tuple[str, str], _Kernel] = {}
    try:
        for stored in manifest["kernels"]:
            try:
                config = parse_config(stored["config"] | {"arch": tuple(stored["config"]["arch"])}, str(path / MANIFEST))
            except ConfigError as error:
                raise ExportedError(f"{error}; export it again with this version of fa4gen") from None
            arch = stored["arch"]
            where = f"{path / MANIFEST}: {config.name} for {arch}"
            own = json.loads(json.dumps(entry_facts(config, arch)))
            theirs = {name: {key: facts.get(key) for key in own.get(name, facts)} for name, facts in stored["entries"].items()}
            if own != theirs:
                by = manifest["fa4gen"]
                raise ExportedError(f"{where}: fa4gen {by} launches this kernel otherwise than this version; export it again")
            kernels[config.name, arch] = _Kernel(config, _cubin(path / stored["cubin"], manifest["outputs"][stored["cubin"]]))
    except (KeyError, TypeError, AttributeError) as error:
        raise ExportedError(f"{path / MANIFEST}: not the manifest of an export ({type(error).__name__}: {error})") from None
    if not kernels:
        raise ExportedError(f"{path / MANIFEST}: lists no kernels")
    return Exported(path, kernels)


def _manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except OSError as error:
        raise ExportedError(f"{path / MANIFEST}: {error.strerror}") from None
    except ValueError as error:
        raise ExportedError(f"{path / MANIFEST}: not JSON ({error})") from None
    version = manifest.get("export_schema") if isinstance(manifest, dict) else None
    if version != SCHEMA_VERSION:
        raise ExportedError(f"{path / MANIFEST}: export_schema is {version}; this version of fa4gen reads {SCHEMA_VERSION}")
    return dict(manifest)


def _cubin(path: Path, digest: str) -> bytes:
    try:
        cubin = path.read_bytes()
    except OSError as error:
        raise ExportedError(f"{path}: {error.strerror}") from None
    if hashlib.sha256(cubin).hexdigest() != digest:
        raise ExportedError(f"{path}: not the file that its manifest lists")
    return cubin
