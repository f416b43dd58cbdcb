"""A CUDA driver that only records (fake_libcuda.c), in place of libcuda.so.1."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fa4gen.codegen import api, driver

SOURCE = Path(__file__).with_name("fake_libcuda.c")
SIZES = {"CUtensorMap": 128, "unsigned": 4, "float": 4}


def require_gcc() -> None:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc on this machine")


class DeviceLike:
    """A host array that says it is on CUDA device `index`."""

    def __init__(self, array: np.ndarray, index: int = 0) -> None:
        self.array = array
        self.index = index

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.index

    def __dlpack__(self, stream: int | None = None) -> Any:
        assert stream == -1
        return self.array.__dlpack__()


@dataclass(frozen=True)
class Seen:
    """The last launch: parameters are by name, a tensor map's as fake_libcuda.c records it."""

    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    cluster: int
    stream: int
    parameters: dict[str, bytes]

    def number(self, name: str) -> int:
        """An integer parameter, a pointer, or the address of a tensor map."""
        return int.from_bytes(self.parameters[name][:8], "little")


class FakeDriver:
    """The library, its settings and what it saw; counters go on rising as long as the process lives."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "fake_libcuda.so"
        command = ["gcc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", str(self.path), str(SOURCE)]
        subprocess.run(command, check=True)
        self.library = ctypes.CDLL(str(self.path))
        self._arguments: list[str] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Makes fa4gen's Python driver call it, with no device and no plan of before."""
        monkeypatch.setattr(driver, "LIBRARY", str(self.path))
        monkeypatch.setattr(driver, "library", driver.library.__wrapped__)
        monkeypatch.setattr(driver, "_devices", {})
        api.GENERATED.forget()
        # Parameters of a launch that nobody expects are not read: a kernel may have fewer than the last one.
        self.expect([])
        self.set(capability_major=9, capability_minor=0, multiprocessors=132, current_context=8, fail_next_launch=0)

    def set(self, **values: int) -> None:
        for name, value in values.items():
            kind: Any = ctypes.c_void_p if name == "current_context" else ctypes.c_int
            kind.in_dll(self.library, name).value = value

    def count(self, name: str) -> int:
        return ctypes.c_uint.in_dll(self.library, name).value

    def expect(self, arguments: list[dict[str, Any]]) -> None:
        """The next launches' arguments (name, type), as a manifest lists them."""
        sizes = [8 if argument["type"].endswith("*") else SIZES[argument["type"]] for argument in arguments]
        self._arguments = [argument["name"] for argument in arguments]
        (ctypes.c_uint * 64).in_dll(self.library, "parameter_sizes")[: len(sizes)] = sizes
        ctypes.c_uint.in_dll(self.library, "parameter_count").value = len(sizes)

    def last(self) -> Seen:
        raw = bytes((ctypes.c_ubyte * (64 * 128)).in_dll(self.library, "parameters"))
        sizes = (ctypes.c_uint * 64).in_dll(self.library, "parameter_sizes")
        grid, block = ((ctypes.c_uint * 3).in_dll(self.library, name) for name in ("grid", "block"))
        return Seen(
            (ctypes.c_char * 256).in_dll(self.library, "launched").value.decode(),
            (grid[0], grid[1], grid[2]),
            (block[0], block[1], block[2]),
            self.count("shared_bytes"),
            self.count("cluster"),
            ctypes.c_uint64.in_dll(self.library, "stream").value,
            {name: raw[index * 128 : index * 128 + sizes[index]] for index, name in enumerate(self._arguments)},
        )
