"""The generated tree: whole or not at all, described by its manifest, and compared file by file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from pathlib import Path

import pytest

from fa4gen.codegen import artifacts
from fa4gen.codegen.artifacts import EmitError
from fa4gen.codegen.compiler import PREFETCHED_CODE_BYTES, Module, compile_all
from fa4gen.codegen.config import Config, load_shipped, parse_config
from fa4gen.codegen.geometry import derive, entry_configs, symbol
from fa4gen.codegen.render import template_source

FIELDS = {"name": "small", "ov_depth": 64, "shared_key": False}


@pytest.fixture
def config() -> Config:
    return parse_config(FIELDS)


@pytest.fixture
def tree(config: Config, tmp_path: Path) -> Path:
    artifacts.emit(config, config.arch, tmp_path / "out")
    return tmp_path / "out"


def files_of(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_what_is_written(tree: Path) -> None:
    names = {"combine.cuh", "unit.cu", "unit.ptx", "attention.cu", "attention.ptx", "manifest.json"}
    assert set(files_of(tree)) == {f"small/{arch}/{name}" for arch in ("sm_90a", "sm_100a") for name in names}
    ptx = (tree / "small/sm_100a/unit.ptx").read_text()
    assert ".target sm_100a" in ptx
    assert str(tree) not in ptx


def test_the_full_kernel_comes_with_its_launch_facts(tmp_path: Path) -> None:
    ((path, tree),) = artifacts.emit(load_shipped("d512"), ["sm_90a"], tmp_path)
    assert path == tmp_path / "d512" / "sm_90a"
    assert {"attention.cu", "attention.ptx"} <= set(tree.files)
    manifest = json.loads((path / "manifest.json").read_text())
    for rows in (8, 16, 32):
        entry = manifest["kernels"][f"fa4_attention_d512_m4r32_sk_bf16_t{rows}_sm90a"]
        assert entry["file"] == "attention.cu"
        assert entry["tile_rows"] == rows
        assert entry["registers"] > 0
        assert entry["spill_store_bytes"] == entry["spill_load_bytes"] == 0
        assert entry["smem_bytes"] == derive(load_shipped("d512").model_copy(update={"tile_rows": rows}), "sm_90a").smem_bytes
        assert all({"name", "type", "meaning"} <= set(argument) for argument in entry["arguments"])


LONG = {("d512", 32), ("gemma4_global", 32)}
"""Entries whose O, as it is merged, takes more code than a launch fetches ahead."""


def test_code_of_shipped_kernels_is_what_a_launch_fetches_ahead() -> None:
    seen = set()
    for path in sorted(artifacts.default_out().glob("*/sm_*/manifest.json")):
        for kernel in json.loads(path.read_text())["kernels"].values():
            if kernel["file"] == "attention.cu":
                assert kernel["code_bytes"] > 0
                if kernel["code_bytes"] > PREFETCHED_CODE_BYTES:
                    seen.add((path.parent.parent.name, kernel["tile_rows"]))
    assert seen == LONG


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_manifest(tree: Path, config: Config, arch: str) -> None:
    folder = tree / "small" / arch
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["schema_version"] == 1
    assert parse_config(manifest["config"]) == config
    geo = derive(config, arch)
    for key in ("block_keys", "qk_stages", "ring_slots", "tmem_columns", "smem_bytes", "mbarriers", "o_tiles"):
        assert manifest["geometry"][key] == getattr(geo, key)
    assert manifest["nvrtc"] == "13.0.88"
    for name, digest in manifest["outputs"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    assert set(manifest["outputs"]) == {path.name for path in folder.iterdir()} - {"manifest.json"}
    for name, digest in manifest["templates"].items():
        assert hashlib.sha256(template_source(name).encode()).hexdigest() == digest
    assert {"unit/unit.cu.j2", "functions/combine.cuh.j2", "functions/header.cuh.j2"} <= set(manifest["templates"])
    kernel = manifest["kernels"]["unit_combine"]
    assert kernel["registers"] > 0
    assert kernel["spill_store_bytes"] == kernel["spill_load_bytes"] == 0
    assert kernel["block"] == [128, 1, 1]
    assert kernel["smem_bytes"] >= geo.combine_stage_bytes + geo.combine_ml_bytes


def test_a_clean_tree_has_no_difference(tree: Path, config: Config) -> None:
    result = artifacts.check([config], tree, whole=True)
    assert (result.diff, result.notes) == ("", [])


def test_emitting_again_changes_nothing(tree: Path, config: Config) -> None:
    before = files_of(tree)
    artifacts.emit(config, config.arch, tree)
    assert files_of(tree) == before


@pytest.mark.parametrize("name", ["combine.cuh", "unit.cu", "unit.ptx", "manifest.json"])
def test_an_edited_file_is_a_difference(tree: Path, config: Config, name: str) -> None:
    path = tree / "small/sm_90a" / name
    lines = path.read_text().splitlines()
    lines[3] += " // edited"
    path.write_text("\n".join(lines) + "\n")
    diff = artifacts.check([config], tree).diff
    assert f"--- stored/small/sm_90a/{name}\n+++ now/small/sm_90a/{name}\n" in diff
    assert re.search(r"^-.* // edited$", diff, re.MULTILINE)
    assert diff.count("--- ") == 1


def test_line_ends_are_a_difference(tree: Path, config: Config) -> None:
    path = tree / "small/sm_90a/unit.cu"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert "stored/small/sm_90a/unit.cu" in artifacts.check([config], tree).diff


def test_missing_and_stale_files_are_differences(tree: Path, config: Config) -> None:
    (tree / "small/sm_90a/unit.ptx").unlink()
    (tree / "small/sm_100a/level0.cuh").write_text("old\n")
    (tree / "small/sm_80").mkdir()
    (tree / "gone").mkdir()
    diff = artifacts.check([config], tree, whole=True).diff
    assert "--- /dev/null\n+++ now/small/sm_90a/unit.ptx" in diff
    assert "--- stored/small/sm_100a/level0.cuh\n+++ /dev/null" in diff
    assert "stale: small/sm_80 " in diff
    assert "stale: gone " in diff
    assert "gone" not in artifacts.check([config], tree).diff


def test_an_empty_tree_is_a_difference_and_none_an_error(config: Config, tmp_path: Path) -> None:
    assert "now/small/sm_90a/unit.cu" in artifacts.check([config], tmp_path).diff
    with pytest.raises(artifacts.EmitError, match="no generated tree"):
        artifacts.check([config], tmp_path / "none")


@pytest.mark.parametrize("release", ["13.5.37", None])
def test_another_nvrtc_compares_sources_only(tree: Path, config: Config, release: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "nvrtc_version", lambda: release)
    ptx = tree / "small/sm_90a/unit.ptx"
    ptx.write_text(ptx.read_text() + "// of another release\n")
    manifest = tree / "small/sm_90a/manifest.json"
    manifest.write_text(manifest.read_text().replace('"nvrtc": "13.0.88"', '"nvrtc": "13.1.0"'))
    result = artifacts.check([config], tree, whole=True)
    assert result.diff == ""
    (note,) = result.notes
    assert note.startswith("PTX not compared: ")
    assert (release or "no NVRTC") in note
    source = tree / "small/sm_90a/unit.cu"
    source.write_text(source.read_text() + "\n")
    manifest.write_text(manifest.read_text().replace('"ring_slots"', '"ring_slot"'))
    diff = artifacts.check([config], tree, whole=True).diff
    assert "stored/small/sm_90a/unit.cu" in diff
    assert "stored/small/sm_90a/manifest.json" in diff
    ptx.unlink()
    assert "missing: small/sm_90a/unit.ptx\n" in artifacts.check([config], tree, whole=True).diff


def test_a_long_difference_is_cut(tree: Path, config: Config) -> None:
    (tree / "small/sm_90a/unit.ptx").write_text("x\n" * 5000)
    assert "more lines" in artifacts.check([config], tree).diff
    assert artifacts.check([config], tree).diff.count("\n") < 300


def spilling(jobs: list[tuple[str, str, str]]) -> list[Module]:
    modules = compile_all(jobs)
    return [
        dataclasses.replace(
            module,
            kernels={
                name: dataclasses.replace(kernel, spill_store_bytes=160, spill_load_bytes=224) for name, kernel in module.kernels.items()
            },
        )
        for module in modules
    ]


def test_a_kernel_that_spills_is_not_emitted(tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "compile_all", spilling)
    with pytest.raises(EmitError, match=r"small: unit_combine \(sm_90a\) spills 160 bytes.*224.*allow_spills") as caught:
        artifacts.emit(config, config.arch, tmp_path / "out")
    assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "out").exists()
    with pytest.raises(EmitError, match=r"allow_spills names another, which is no kernel of it; those are .*unit_combine"):
        artifacts.emit(parse_config(FIELDS | {"allow_spills": ["unit_combine", "another"]}), config.arch, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    every_entry = ["unit_combine", *(symbol(entry, arch) for arch in config.arch for entry in entry_configs(config, arch))]
    artifacts.emit(parse_config(FIELDS | {"allow_spills": every_entry}), config.arch, tmp_path / "out")
    manifest = json.loads((tmp_path / "out/small/sm_90a/manifest.json").read_text())
    assert manifest["kernels"]["unit_combine"]["spill_load_bytes"] == 224


def test_a_failed_write_leaves_the_old_tree(tree: Path, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files_of(tree)
    written: list[Path] = []
    original = Path.write_bytes

    def full_disk(self: Path, *args: object, **kwargs: object) -> int:
        written.append(self)
        if len(written) == 3:
            raise OSError(28, "No space left on device", str(self))
        return original(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    with pytest.raises(OSError, match="No space left"):
        artifacts.emit(config, config.arch, tree)
    assert len(written) == 3
    assert files_of(tree) == before
    assert sorted(path.name for path in (tree / "small").iterdir()) == ["sm_100a", "sm_90a"]


def test_a_failed_swap_puts_the_old_folder_back(tree: Path, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files_of(tree)
    original = artifacts.os.rename
    calls: list[str] = []

    def failing(source: Path, target: Path) -> None:
        calls.append(str(target))
        if len(calls) == 2:
            raise OSError(5, "Input/output error", str(target))
        original(source, target)

    monkeypatch.setattr(artifacts.os, "rename", failing)
    with pytest.raises(OSError, match="Input/output"):
        artifacts.emit(config, ["sm_90a"], tree)
    assert files_of(tree) == before


def test_somebody_elses_file_is_not_deleted(tree: Path, config: Config) -> None:
    notes = tree / "small/sm_90a/notes.txt"
    notes.write_text("mine\n")
    with pytest.raises(EmitError, match=r"notes\.txt, which was not generated"):
        artifacts.emit(config, config.arch, tree)
    assert notes.read_text() == "mine\n"


def test_a_file_that_is_generated_no_more_goes(tree: Path, config: Config) -> None:
    folder = tree / "small/sm_90a"
    (folder / "level9.cuh").write_text("old\n")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["outputs"]["level9.cuh"] = "0"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    artifacts.emit(config, config.arch, tree)
    assert not (folder / "level9.cuh").exists()
    assert artifacts.check([config], tree, whole=True).diff == ""


def test_one_target_leaves_the_other(tree: Path, config: Config) -> None:
    before = files_of(tree)
    (tree / "small/sm_90a/unit.cu").write_text("old\n")
    (tree / "small/sm_100a/unit.cu").write_text("old\n")
    artifacts.emit(config, ["sm_90a"], tree)
    assert files_of(tree) == before | {"small/sm_100a/unit.cu": b"old\n"}
