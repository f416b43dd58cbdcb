"""The generated tree: generated/<config>/<arch>/ with sources, PTX and a manifest. Built in memory, written whole, compared by `check`."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from .compiler import PINNED_NVRTC, Module, compile_all, nvrtc_version
from .config import Config
from .geometry import derive
from .render import Rendered, folder, has_attention, render_files, template_source
from .text import one_line

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
DIFF_LINES_PER_FILE = 200
RESOURCE_KEYS = ("registers", "spill_store_bytes", "spill_load_bytes", "stack_bytes", "static_smem_bytes", "barriers", "code_bytes")


class EmitError(RuntimeError):
    """Artifacts that may not be written: a kernel that spills, or a folder with other content. `str()` is one line."""

    def __init__(self, text: str) -> None:
        super().__init__(one_line(text))


@dataclass(frozen=True)
class Tree:
    """What one config and target generates: file name -> text, manifest included, and the compiled modules by source file name."""

    config: Config
    arch: str
    files: dict[str, str]
    modules: dict[str, Module]


@dataclass
class CheckResult:
    """`diff` is empty when the stored tree is what would be generated now; `notes` says what could not be compared."""

    diff: str = ""
    notes: list[str] = field(default_factory=list)


def default_out() -> Path:
    """generated/ of the checkout that the package runs from, else ./generated."""
    root = Path(__file__).resolve().parent.parent
    return root / "generated" if (root / "pyproject.toml").is_file() else Path("generated")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def _template_sha256(name: str) -> str:
    return _sha256(template_source(name))


def entry_info(config: Config, arch: str) -> dict[str, dict[str, Any]]:
    """Entry -> its file and launch facts (block, grid, dynamic smem_bytes, arguments), as the modules that launch it state them."""
    from .units import unit_entry_info

    geo = derive(config, arch)
    info = {entry: {"file": "unit.cu", **facts} for entry, facts in unit_entry_info(config, geo).items()}
    if has_attention(config, arch):
        from .attention import attention_entry_infos

        info |= {facts.pop("name"): {"file": "attention.cu", **facts} for facts in attention_entry_infos(config, arch)}
    return info


def known_spills(config: Config) -> None:
    """Raises EmitError for a name in allow_spills that no kernel of the config has: misspelt, it would allow nothing."""
    if config.allow_spills:
        entries = sorted({entry for arch in config.arch for entry in entry_info(config, arch)})
        for name in config.allow_spills:
            if name not in entries:
                raise EmitError(f"{config.name}: allow_spills names {name}, which is no kernel of it; those are {', '.join(entries)}")


def spill_gate(config: Config, module: Module) -> None:
    """Raises EmitError for a kernel that spills without its config's leave."""
    for entry, kernel in sorted(module.kernels.items()):
        spilled = kernel.spill_store_bytes + kernel.spill_load_bytes
        if spilled and entry not in config.allow_spills:
            raise EmitError(
                f"{config.name}: {entry} ({module.arch}) spills {kernel.spill_store_bytes} bytes stored, {kernel.spill_load_bytes} loaded; "
                f"name it in allow_spills to accept that"
            )


def _manifest(config: Config, arch: str, sources: dict[str, Rendered], modules: dict[str, Module], files: dict[str, str]) -> str:
    kernels: dict[str, Any] = {}
    for entry, facts in sorted(entry_info(config, arch).items()):
        kernels[entry] = dict(facts)
        if module := modules.get(facts["file"]):
            if entry not in module.kernels:
                raise EmitError(f"{config.name}: {facts['file']} ({arch}) has no entry {entry}, only {', '.join(sorted(module.kernels))}")
            resources = asdict(module.kernels[entry])
            kernels[entry] |= {key: resources[key] for key in RESOURCE_KEYS}
    templates = sorted({name for rendered in sources.values() for name in rendered.templates})
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "config": config.model_dump(mode="json"),
        "arch": arch,
        "geometry": asdict(derive(config, arch)),
        "nvrtc": next((module.nvrtc for module in modules.values()), None),
        "kernels": kernels,
        "templates": {name: _template_sha256(name) for name in templates},
        "outputs": {name: _sha256(text) for name, text in sorted(files.items())},
    }
    return json.dumps(manifest, indent=2) + "\n"


def _trees(targets: Sequence[tuple[Config, str]], *, compiled: bool) -> list[Tree]:
    """The trees of several targets, compiled together; without `compiled` they have sources and no PTX or resource figures."""
    for config, _ in targets:
        known_spills(config)
    rendered = [render_files(config, arch) for config, arch in targets]
    jobs = [(index, name) for index, sources in enumerate(rendered) for name in sources if compiled and name.endswith(".cu")]
    modules: list[dict[str, Module]] = [{} for _ in targets]
    built = compile_all([(rendered[index][name].text, targets[index][1], name) for index, name in jobs])
    for (index, name), module in zip(jobs, built, strict=True):
        modules[index][name] = module
    trees = []
    for (config, arch), sources, built_here in zip(targets, rendered, modules, strict=True):
        files = {name: source.text for name, source in sources.items()}
        for name, module in built_here.items():
            spill_gate(config, module)
            files[name.removesuffix(".cu") + ".ptx"] = module.ptx
        files[MANIFEST] = _manifest(config, arch, sources, built_here, files)
        trees.append(Tree(config, arch, files, built_here))
    return trees


def build(config: Config, arch: str) -> Tree:
    """Renders and compiles one target of a config. Raises ConfigError, RenderError, CompileError, EmitError (spills not allowed)."""
    return _trees([(config, arch)], compiled=True)[0]


def write_folder(path: Path, files: Mapping[str, str | bytes]) -> None:
    """Replaces the folder `path` by one with exactly `files`: written beside it, then swapped in by renames, so it is never half written.

    A folder with files that a manifest in it does not list is refused: they are somebody's. Raises EmitError, OSError.
    """
    if path.is_dir():
        known = {MANIFEST, *_listed_outputs(path / MANIFEST)}
        foreign = sorted(entry.name for entry in path.iterdir() if entry.name not in known and entry.name not in files)
        if foreign:
            raise EmitError(f"{path} holds {foreign[0]}, which was not generated; move it, or choose another --out")
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        fresh, old = scratch / "new", scratch / "old"
        fresh.mkdir()
        for name, content in files.items():
            try:
                (fresh / name).write_bytes(content if isinstance(content, bytes) else content.encode())
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(path / name)) from error
        if path.exists():
            os.rename(path, old)
        try:
            os.rename(fresh, path)
        except BaseException:
            if old.exists():
                os.rename(old, path)
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _listed_outputs(manifest: Path) -> set[str]:
    try:
        outputs = json.loads(manifest.read_text(encoding="utf-8"))["outputs"]
        return {name for name in outputs if isinstance(name, str)}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def emit(config: Config, archs: Iterable[str], out: Path | None = None) -> list[tuple[Path, Tree]]:
    """Generates `archs` of a config under out/<config>/<arch>/ (default: default_out()) and returns each folder with its tree.

    Everything is rendered and compiled before anything is written. Raises ConfigError, RenderError, CompileError, EmitError, OSError.
    """
    root = default_out() if out is None else out
    trees = _trees([(config, arch) for arch in archs], compiled=True)
    written = []
    for tree in trees:
        path = root / folder(config, tree.arch)
        write_folder(path, tree.files)
        written.append((path, tree))
    return written


def _without_compiler_figures(manifest: str) -> str:
    """A manifest less what depends on the NVRTC release, to compare what does not."""
    try:
        data = json.loads(manifest)
        data.pop("nvrtc")
        for kernel in data["kernels"].values():
            for key in RESOURCE_KEYS:
                kernel.pop(key, None)
        data["outputs"] = {name: digest for name, digest in data["outputs"].items() if not name.endswith(".ptx")}
    except (ValueError, KeyError, TypeError, AttributeError):
        return manifest
    return json.dumps(data, indent=2) + "\n"


def _diff(path: str, stored: str | None, fresh: str | None) -> str:
    """Unified diff from the stored file to the one generated now, either of which may be missing; long ones are cut."""
    lines = list(
        difflib.unified_diff(
            (stored or "").splitlines(),
            (fresh or "").splitlines(),
            "/dev/null" if stored is None else f"stored/{path}",
            "/dev/null" if fresh is None else f"now/{path}",
            lineterm="",
        )
    )
    if not lines and stored != fresh:
        # Equal lines in unequal files: line ends, or an empty file on one side only.
        lines = [f"--- stored/{path}", f"+++ now/{path}", "(only line ends differ, or one of them is empty or missing)"]
    if len(lines) > DIFF_LINES_PER_FILE:
        lines = [*lines[:DIFF_LINES_PER_FILE], f"... {len(lines) - DIFF_LINES_PER_FILE:,} more lines"]
    return "".join(line + "\n" for line in lines)


def _read(path: Path) -> str | None:
    try:
        return path.read_bytes().decode("utf-8", "replace")
    except FileNotFoundError:
        return None


def check(configs: Iterable[Config], root: Path | None = None, *, whole: bool = False) -> CheckResult:
    """Generates every target of `configs` and compares it with the tree at `root` (default: default_out()).

    PTX and resource figures are compared only under the pinned NVRTC, sources and the rest of the manifest always. whole: `configs` are all
    there should be, so other folders in the tree are reported too. Raises ConfigError, RenderError, CompileError, EmitError, OSError.
    """
    root = default_out() if root is None else root
    if not root.is_dir():
        raise EmitError(f"{root}: no generated tree there (fa4gen emit makes one)")
    configs = list(configs)
    result = CheckResult()
    release = nvrtc_version()
    exact = release == PINNED_NVRTC
    if not exact:
        result.notes.append(
            f"PTX not compared: {f'other NVRTC, {release}' if release else 'no NVRTC'} (the stored PTX is of {PINNED_NVRTC})"
        )
    parts: list[str] = []
    targets = [(config, arch) for config in configs for arch in config.arch]
    for tree in _trees(targets, compiled=exact):
        where = folder(tree.config, tree.arch)
        entries = _visible(root / where)
        parts += [f"stale: {where / entry.name} is a folder\n" for entry in entries if entry.is_dir()]
        stored_names = {entry.name for entry in entries if not entry.is_dir()}
        if not exact:
            expected_ptx = {Path(name).stem + ".ptx" for name in tree.files if name.endswith(".cu")}
            parts += [f"missing: {where / name}\n" for name in sorted(expected_ptx - stored_names)]
            stored_names -= expected_ptx
        for name in sorted(stored_names | set(tree.files)):
            stored, fresh = _read(root / where / name), tree.files.get(name)
            if name == MANIFEST and not exact and stored is not None and fresh is not None:
                stored, fresh = _without_compiler_figures(stored), _without_compiler_figures(fresh)
            if stored != fresh:
                parts.append(_diff(str(where / name), stored, fresh))
    parts += _stale(root, configs, whole=whole)
    result.diff = "".join(parts)
    return result


def _visible(path: Path) -> list[Path]:
    """Sorted entries of a folder, none if there is no such folder; dot files are nobody's output."""
    return sorted(entry for entry in path.iterdir() if not entry.name.startswith(".")) if path.is_dir() else []


def _stale(root: Path, configs: list[Config], *, whole: bool) -> list[str]:
    """A line for each entry of the tree that no config generates."""
    expected = {config.name: set(config.arch) for config in configs}
    lines = []
    for config_dir in _visible(root):
        if config_dir.name not in expected:
            if whole:
                lines.append(f"stale: {config_dir.name} is generated by no config\n")
            continue
        for entry in _visible(config_dir):
            if entry.name not in expected[config_dir.name]:
                lines.append(f"stale: {config_dir.name}/{entry.name} is generated by no config\n")
    return lines
