"""CUDA C++ -> PTX, CUBIN and a resource report, with NVRTC through cuda-python. No driver and no device is needed.

A PTX-only compile does not check inline assembly, so the CUBIN is always built: ptxas is what proves the text.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from .config import ARCHES
from .text import one_line

PINNED_NVRTC = "13.0.88"
# With a driver at hand NVRTC caches what ptxas made of a PTX, and a hit leaves the resource report out: no-cache.
OPTIONS = ("--std=c++17", "--ptxas-options=-v", "--no-cache")
LINE_INFO = "--generate-line-info"
CACHE_SCHEMA = 2
PREFETCHED_CODE_BYTES = 65_536  # of a kernel, that an H200 fetches as it is launched, as far as timing tells (bench/LOG.md 20)


class CompileError(RuntimeError):
    """NVRTC is missing or refused a source. `str()` is one line; `.log` holds the compiler's whole log."""

    def __init__(self, summary: str, log: str = "") -> None:
        super().__init__(one_line(summary))
        self.log = log


@dataclass(frozen=True)
class KernelResources:
    """What ptxas reports for one entry. Registers per thread; bytes; barriers is the count of barrier ids reserved.

    code_bytes: of its instructions in the CUBIN. With more than PREFETCHED_CODE_BYTES a launch waits for code that no cache has any more.
    """

    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    static_smem_bytes: int
    barriers: int
    code_bytes: int


@dataclass(frozen=True)
class Module:
    """One compiled source file. ptx is text, cubin an ELF image for `arch`; kernels maps entry names to their resources."""

    arch: str
    file_name: str
    source: str
    ptx: str
    cubin: bytes
    kernels: dict[str, KernelResources]
    log: str

    @property
    def nvrtc(self) -> str:
        """The NVRTC release that wrote the PTX, such as "13.0.88"."""
        return ptx_release(self.ptx) or "unknown"


def ptx_release(ptx: str) -> str | None:
    """The release in the header comment of NVRTC's PTX, or None."""
    match = re.search(r"^// Cuda compilation tools, release [\d.]+, V([\d.]+)", ptx, re.MULTILINE)
    return match[1] if match else None


@cache
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise CompileError(f"NVRTC cannot be used: {error}; install cuda-python and nvidia-cuda-nvrtc=={PINNED_NVRTC}") from None
    try:
        # The library itself is loaded by the first call.
        nvrtc.nvrtcVersion()
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CompileError(f"NVRTC's library cannot be loaded: {reason}; install nvidia-cuda-nvrtc=={PINNED_NVRTC}") from None
    return nvrtc


@cache
def nvrtc_version() -> str | None:
    """The exact release of the NVRTC at hand, such as "13.0.88", or None without one. The API tells only 13.0, its PTX the rest."""
    try:
        _nvrtc()
        ptx, _, _ = _run_nvrtc("", "sm_90a", "version.cu")
    except CompileError:
        return None
    return ptx_release(ptx)


def _run_nvrtc(source: str, arch: str, file_name: str, line_info: bool = False) -> tuple[str, bytes, str]:
    nvrtc = _nvrtc()
    success = nvrtc.nvrtcResult.NVRTC_SUCCESS

    def call(name: str, *args: Any) -> Any:
        status, *values = getattr(nvrtc, name)(*args)
        if status != success:
            raise CompileError(f"{file_name} ({arch}): {name} failed: {status.name}")
        return values[0] if values else None

    def fetch(size_name: str, get_name: str) -> bytes:
        buffer = bytearray(call(size_name, program))
        call(get_name, program, buffer)
        return bytes(buffer)

    program = call("nvrtcCreateProgram", source.encode(), file_name.encode(), 0, [], [])
    try:
        chosen = (*OPTIONS, LINE_INFO) if line_info else OPTIONS
        options = [f"--gpu-architecture={arch}".encode(), *(option.encode() for option in chosen)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = fetch("nvrtcGetProgramLogSize", "nvrtcGetProgramLog").rstrip(b"\0").decode("utf-8", "replace")
        if status != success:
            raise CompileError(f"{file_name} ({arch}): {_first_error(log) or status.name}", log)
        ptx = fetch("nvrtcGetPTXSize", "nvrtcGetPTX").rstrip(b"\0").decode()
        cubin = fetch("nvrtcGetCUBINSize", "nvrtcGetCUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    if line_info:
        # NVRTC puts the working folder before the name.
        ptx = re.sub(r'^(\s*\.file\s+\d+\s+)"[^"\n]*"', lambda match: f'{match[1]}"{file_name}"', ptx, flags=re.MULTILINE)
    return ptx, cubin, log


def _first_error(log: str) -> str | None:
    """The first line of a compiler log that says what is wrong, its file and line included."""
    return next((re.sub(r"\s+", " ", line).strip() for line in log.splitlines() if re.search(r"\b(error|fatal)\b", line)), None)


def parse_resources(log: str) -> dict[str, KernelResources]:
    """Entry name -> resources, from a `--ptxas-options=-v` log. A function not inlined counts to its entry."""
    kernels: dict[str, dict[str, int]] = {}
    entry: dict[str, int] = {}
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '([^']+)'", line):
            entry = kernels.setdefault(match[1], dict.fromkeys(KernelResources.__dataclass_fields__, 0))
        elif match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            for key, value in zip(("stack_bytes", "spill_store_bytes", "spill_load_bytes"), match.groups(), strict=True):
                entry[key] += int(value)
        elif match := re.search(r"Used (\d+) registers", line):
            entry["registers"] = int(match[1])
            for key, pattern in (("barriers", r"used (\d+) barriers"), ("static_smem_bytes", r"(\d+) bytes smem")):
                if found := re.search(pattern, line):
                    entry[key] = int(found[1])
    return {name: KernelResources(**values) for name, values in kernels.items()}


def code_bytes(cubin: bytes) -> dict[str, int]:
    """Entry name -> bytes of its instructions, from the section headers of an ELF image (ELF-64, little-endian)."""
    (offset,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    # Of each header: where its name begins, where the section lies, and its length.
    headers = [struct.unpack_from("<I20xQQ", cubin, offset + index * size) for index in range(count)]
    strings = headers[names][1]
    result = {}
    for name, _, length in headers:
        text = cubin[strings + name : cubin.index(b"\0", strings + name)].decode()
        if text.startswith(".text."):
            result[text.removeprefix(".text.")] = length
    return result


def _compile(source: str, arch: str, file_name: str, line_info: bool) -> Module:
    ptx, cubin, log = _run_nvrtc(source, arch, file_name, line_info)
    sizes = code_bytes(cubin)
    kernels = {name: replace(kernel, code_bytes=sizes.get(name, 0)) for name, kernel in parse_resources(log).items()}
    entries = re.findall(r"^\s*(?:\.visible\s+)?\.entry\s+([\w$]+)", ptx, re.MULTILINE)
    if sorted(entries) != sorted(kernels) or not all(kernel.registers for kernel in kernels.values()):
        raise CompileError(f"{file_name} ({arch}): ptxas reports on {sorted(kernels)}, the PTX has entries {sorted(entries)}", log)
    return Module(arch, file_name, source, ptx, cubin, kernels, log)


def cache_dir() -> Path:
    """Where compiled modules are kept between runs: $FA4GEN_CACHE_DIR, else fa4gen/ in the user's cache folder. Not created here."""
    if chosen := os.environ.get("FA4GEN_CACHE_DIR"):
        return Path(chosen)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "fa4gen"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fa4gen"


def _cache_path(source: str, arch: str, file_name: str, line_info: bool = False) -> Path:
    # The file name is part of the key: it stands in the log's messages.
    parts = [str(CACHE_SCHEMA), nvrtc_version() or "", arch, file_name, *OPTIONS, *([LINE_INFO] if line_info else []), source]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    return cache_dir() / key[:2] / f"{key}.module"


def _cache_read(path: Path, source: str, arch: str, file_name: str) -> Module | None:
    """The module stored at `path`, or None if there is none or it is damaged in any way."""
    try:
        digest, _, body = path.read_bytes().partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() != digest:
            return None
        head, _, cubin = body.partition(b"\n")
        stored = json.loads(head)
        kernels = {name: KernelResources(**values) for name, values in stored["kernels"].items()}
        return Module(arch, file_name, source, stored["ptx"], cubin, kernels, stored["log"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _cache_write(path: Path, module: Module) -> None:
    """Stores a module; where the folder cannot be written nothing is stored, since the cache only saves time."""
    head = {"ptx": module.ptx, "log": module.log, "kernels": {name: asdict(kernel) for name, kernel in module.kernels.items()}}
    body = json.dumps(head).encode() + b"\n" + module.cubin
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError:
        return


_modules: dict[tuple[str, str, str, bool], Module] = {}
_modules_lock = threading.Lock()


def compile_source(source: str, arch: str, file_name: str, line_info: bool = False) -> Module:
    """Compiles one self-contained source for `arch` ("sm_90a" | "sm_100a") to PTX and CUBIN, or takes the module from the cache.

    file_name appears in error messages only, and with line_info in the PTX, whose .loc directives then say which source line each
    instruction comes from (the emulator's findings name it). Stored PTX is compiled without. Raises CompileError: NVRTC missing, or the
    source refused by the compiler or by ptxas.
    """
    if arch not in ARCHES:
        raise CompileError(f"{file_name}: unknown target {arch}; use {' or '.join(ARCHES)}")
    key = (source, arch, file_name, line_info)
    with _modules_lock:
        if key in _modules:
            return _modules[key]
    _nvrtc()
    path = _cache_path(source, arch, file_name, line_info)
    module = _cache_read(path, source, arch, file_name)
    if module is None:
        module = _compile(source, arch, file_name, line_info)
        _cache_write(path, module)
    with _modules_lock:
        return _modules.setdefault(key, module)


def compile_all(jobs: list[tuple[str, str, str]]) -> list[Module]:
    """compile_source for each (source, arch, file_name), in order, in parallel: NVRTC works outside the interpreter's lock."""
    if len(jobs) < 2:
        return [compile_source(*job) for job in jobs]
    with ThreadPoolExecutor(max_workers=min(len(jobs), os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda job: compile_source(*job), jobs))
