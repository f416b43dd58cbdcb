"""NVRTC: PTX, CUBIN and resources without a driver, errors on one line, and a cache that is never trusted."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from fa4gen.codegen import compiler
from fa4gen.codegen.compiler import CompileError, KernelResources, compile_all, compile_source, nvrtc_version, parse_resources
from fa4gen.codegen.config import ARCHES

STORE = 'extern "C" __global__ void store(float* out) { __shared__ float s[32]; s[threadIdx.x] = 1.0f; __syncthreads(); out[0] = s[5]; }\n'
# 32 registers a thread cannot hold 64 live values.
SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) spilling(float* data) {
  float v[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) v[i] = data[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64; ++i) data[(63 - i) * 1024 + threadIdx.x] = v[i] * v[(i + 7) % 64];
}
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FA4GEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "_modules", {})
    return tmp_path / "cache"


def no_compiler(*_: object) -> None:
    raise AssertionError("compiled again")


@pytest.mark.parametrize("arch", ARCHES)
def test_ptx_cubin_and_resources(arch: str) -> None:
    module = compile_source(STORE, arch, "store.cu")
    assert f".target {arch}" in module.ptx
    assert re.search(r"^\.version 9\.0$", module.ptx, re.MULTILINE)
    assert module.cubin.startswith(b"\x7fELF")
    assert list(module.kernels) == ["store"]
    kernel = module.kernels["store"]
    assert 0 < kernel.registers < 32
    assert (kernel.spill_store_bytes, kernel.spill_load_bytes, kernel.stack_bytes) == (0, 0, 0)
    assert (kernel.static_smem_bytes, kernel.barriers) == (128, 1)
    assert module.nvrtc == nvrtc_version() == compiler.PINNED_NVRTC


@pytest.mark.parametrize("arch", ARCHES)
def test_code_is_measured_by_entry(arch: str) -> None:
    def entry(name: str, count: int) -> str:
        add = 'asm volatile("add.rn.f32 %0, %0, 1.0;" : "+f"(x));'
        return f'extern "C" __global__ void {name}(float* out) {{ float x = out[1]; {add * count} out[0] = x; }}\n'

    kernels = compile_source(entry("short_one", 10) + entry("long_one", 510), arch, "two.cu").kernels
    # 16 bytes an instruction; an entry ends on 128.
    assert kernels["long_one"].code_bytes - kernels["short_one"].code_bytes == pytest.approx(500 * 16, abs=128)
    assert 0 < kernels["short_one"].code_bytes < 1024


def test_spills_are_reported() -> None:
    kernel = compile_source(SPILLING, "sm_90a", "spilling.cu").kernels["spilling"]
    assert kernel.registers <= 32
    assert kernel.spill_store_bytes > 0
    assert kernel.spill_load_bytes > 0


def test_no_path_gets_into_the_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = compile_source(STORE, "sm_100a", "some_file_name.cu")
    for needle in (str(tmp_path), os.path.expanduser("~") + "/", "some_file_name", str(Path(compiler.__file__).parent)):
        assert needle not in module.ptx
        assert needle.encode() not in module.cubin


def test_output_does_not_depend_on_file_name_or_moment() -> None:
    first = compile_source(STORE, "sm_90a", "a.cu")
    second = compile_source(STORE, "sm_90a", "b.cu")
    assert first is not second
    assert (first.ptx, first.kernels) == (second.ptx, second.kernels)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("int f( {\n", r"bad\.cu\(1\): error"),
        ('extern "C" __global__ void k() { undeclared = 1; }\n', r"undeclared"),
        # Only ptxas sees inside inline assembly.
        ('extern "C" __global__ void k() { asm volatile("made.up.opcode;"); }\n', r"ptxas.*opcode"),
        ('#include "nothing.h"\n', r"nothing\.h"),
    ],
)
def test_errors_are_one_line_and_keep_the_log(source: str, message: str) -> None:
    with pytest.raises(CompileError, match=message) as caught:
        compile_source(source, "sm_90a", "bad.cu")
    assert len(str(caught.value).splitlines()) == 1
    assert "bad.cu (sm_90a)" in str(caught.value)
    assert caught.value.log


def test_unknown_target() -> None:
    with pytest.raises(CompileError, match="unknown target sm_80"):
        compile_source(STORE, "sm_80", "store.cu")


def test_resources_of_functions_that_were_not_inlined_count_to_their_entry() -> None:
    log = """
ptxas info    : Compiling entry function 'one' for 'sm_90a'
ptxas info    : Function properties for one
    16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 40 registers, used 2 barriers, 16 bytes cumulative stack size, 4096 bytes smem
ptxas info    : Function properties for helper
    0 bytes stack frame, 1 bytes spill stores, 2 bytes spill loads
ptxas info    : Compiling entry function 'two' for 'sm_90a'
ptxas info    : Function properties for two
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
"""
    assert parse_resources(log) == {"one": KernelResources(40, 5, 10, 16, 4096, 2, 0), "two": KernelResources(8, 0, 0, 0, 0, 0, 0)}


def test_a_second_process_takes_the_module_from_the_cache(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compile_source(STORE, "sm_90a", "store.cu")
    assert len(list(own_cache.rglob("*.module"))) == 1
    assert not list(own_cache.rglob("*.tmp"))
    monkeypatch.setattr(compiler, "_modules", {})
    monkeypatch.setattr(compiler, "_compile", no_compiler)
    assert compile_source(STORE, "sm_90a", "store.cu") == first
    with pytest.raises(AssertionError, match="compiled again"):
        compile_source(STORE + "\n", "sm_90a", "store.cu")
    with pytest.raises(AssertionError, match="compiled again"):
        compile_source(STORE, "sm_100a", "store.cu")


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "text", "folder"])
def test_a_damaged_entry_is_rebuilt(own_cache: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    first = compile_source(STORE, "sm_90a", "store.cu")
    (path,) = own_cache.rglob("*.module")
    data = path.read_bytes()
    if damage == "folder":
        path.unlink()
        path.mkdir()
    else:
        changed = {"flip": data[:-1] + bytes([data[-1] ^ 1]), "truncate": data[:-100], "empty": b"", "text": b"not a module\n"}[damage]
        path.write_bytes(changed)
    monkeypatch.setattr(compiler, "_modules", {})
    again = compile_source(STORE, "sm_90a", "store.cu")
    assert (again.ptx, again.cubin, again.kernels) == (first.ptx, first.cubin, first.kernels)
    if damage != "folder":
        monkeypatch.setattr(compiler, "_modules", {})
        monkeypatch.setattr(compiler, "_compile", no_compiler)
        assert compile_source(STORE, "sm_90a", "store.cu") == again


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FA4GEN_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert compile_source(STORE, "sm_90a", "store.cu").kernels


def test_another_release_does_not_share_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_source(STORE, "sm_90a", "store.cu")
    monkeypatch.setattr(compiler, "_modules", {})
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: "13.5.37")
    monkeypatch.setattr(compiler, "_compile", no_compiler)
    with pytest.raises(AssertionError, match="compiled again"):
        compile_source(STORE, "sm_90a", "store.cu")


def test_jobs_come_back_in_order() -> None:
    jobs = [(STORE.replace("store", f"store{i}"), arch, "store.cu") for i in range(3) for arch in ARCHES]
    assert [(module.source, module.arch, module.file_name) for module in compile_all(jobs)] == jobs


def test_without_nvrtc_there_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    for cached in (compiler._nvrtc, compiler.nvrtc_version):
        cached.cache_clear()
    try:
        with pytest.raises(CompileError, match=r"NVRTC cannot be used: .*; install cuda-python and nvidia-cuda-nvrtc==13\.0\.88") as caught:
            compile_source(STORE, "sm_90a", "store.cu")
        assert len(str(caught.value).splitlines()) == 1
        assert nvrtc_version() is None
    finally:
        for cached in (compiler._nvrtc, compiler.nvrtc_version):
            cached.cache_clear()


def test_line_information_leads_findings_back_to_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fa4gen.codegen.emulator import Program

    source = """extern "C" __global__ void racy(float* out) {
  __shared__ float s[64];
  s[threadIdx.x] = 1.0f;
  out[threadIdx.x] = s[threadIdx.x ^ 32];
}
"""
    monkeypatch.chdir(tmp_path)
    plain, lined = (compile_source(source, "sm_90a", "racy.cu", line_info=flag) for flag in (False, True))
    assert ".loc" not in plain.ptx
    assert str(tmp_path) not in lined.ptx
    assert compile_source(source, "sm_90a", "racy.cu").ptx == plain.ptx

    def instructions(ptx: str) -> list[str]:
        return [line for line in ptx.split("\n") if line.endswith(";")]

    assert instructions(plain.ptx) == [line for line in instructions(lined.ptx) if not line.lstrip().startswith((".loc", ".file"))]
    hazards = Program.from_ptx(lined.ptx).launch("racy", 1, 64, args=[np.zeros(64, np.float32)]).hazards
    races = [hazard for hazard in hazards if hazard.kind == "race"]
    assert races
    assert {race.source for race in races} | {race.other.source for race in races if race.other} == {"racy.cu:3", "racy.cu:4"}
    assert not any(hazard.source for hazard in Program.from_ptx(plain.ptx).launch("racy", 1, 64, args=[np.zeros(64, np.float32)]).hazards)
