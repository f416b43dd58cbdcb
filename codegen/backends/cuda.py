"""The GPU at hand, through the CUDA driver API: no runtime, no framework. Loading, tensor maps and launches are driver.py's.

Every array travels to the device between two guard bands, which are compared after the launch, and back; an overrun is an error. A launch
that does not end within the time limit is reported instead of waited for.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import driver as launching
from ..emulator import TensorMap, Uninitialized
from . import BackendError, BackendUnavailable, Compiled, Launch, Outcome

_GUARD_BYTES = 4096
_GUARD_BYTE = 0xA5


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise BackendUnavailable(f"cuda-python is not installed ({error})") from error
    return driver


def _call(result: tuple[Any, ...], what: str) -> Any:
    """The value of a driver call, or BackendError naming the call and the driver's error."""
    status, *values = result
    if int(status) != 0:
        driver = _driver()
        _, name = driver.cuGetErrorName(status)
        raise BackendError(f"{what}: {name.decode() if name else status}")
    return values[0] if len(values) == 1 else tuple(values)


def device_arch() -> str:
    """Architecture of device 0 as "sm_90a"-style name. Raises BackendUnavailable saying why there is none."""
    driver = _driver()
    try:
        status = driver.cuInit(0)[0]
    except RuntimeError as error:
        raise BackendUnavailable("no CUDA driver on this machine") from error
    if int(status) != 0:
        name = driver.cuGetErrorName(status)[1]
        raise BackendUnavailable(f"the CUDA driver does not start ({name.decode() if name else status})")
    device = _call(driver.cuDeviceGet(0), "cuDeviceGet")
    attribute = driver.CUdevice_attribute
    major = _call(driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device), "cuDeviceGetAttribute")
    minor = _call(driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device), "cuDeviceGetAttribute")
    return f"sm_{major}{minor}a"


class CudaBackend:
    """Runs CUBINs on device 0.

    repeats: timed launches after the one whose results come back (0: its own time is reported). Results are those of the first launch.
    """

    name = "cuda"

    def __init__(self, *, repeats: int = 5, time_limit: float = 30.0) -> None:
        self.arch = device_arch()
        self.repeats = repeats
        self.time_limit = time_limit
        driver = _driver()
        device = _call(driver.cuDeviceGet(0), "cuDeviceGet")
        self.device_name = _call(driver.cuDeviceGetName(128, device), "cuDeviceGetName").split(b"\0")[0].decode()
        context = _call(driver.cuDevicePrimaryCtxRetain(device), "cuDevicePrimaryCtxRetain")
        _call(driver.cuCtxSetCurrent(context), "cuCtxSetCurrent")

    def _launcher(self, compiled: Compiled, launch: Launch) -> Callable[[int], launching.KernelLaunch]:
        """The launch for a stream; the kernel is loaded now. Raises BackendError."""
        if compiled.cubin is None:
            raise BackendError(f"{launch.entry}: no CUBIN to run")
        if compiled.arch != self.arch:
            raise BackendError(f"{launch.entry} is compiled for {compiled.arch}, the GPU ({self.device_name}) is {self.arch}")
        try:
            device = launching.device(0)
            function = device.function(compiled, launch.entry, launch.smem_bytes)
        except RuntimeError as error:
            raise BackendError(str(error)) from error
        return lambda stream: launching.KernelLaunch(device, function, launch, stream)

    def prepare(self, compiled: Compiled, launch: Launch, resident: Sequence[DeviceArray] = ()) -> PreparedLaunch:
        """A launch that can be repeated: the stand-ins of `resident` among its arguments mean their device memory, other arrays are
        copied to the device now and stay there until the PreparedLaunch is freed. Raises BackendError."""
        return PreparedLaunch(self._launcher(compiled, launch), launch, resident)

    def event(self) -> Any:
        """A timing event; events live as long as the process."""
        return _call(_driver().cuEventCreate(0), "cuEventCreate")

    def record(self, event: Any) -> None:
        _call(_driver().cuEventRecord(event, 0), "cuEventRecord")

    def seconds_between(self, start: Any, end: Any) -> float:
        """Device time from one completed event to another."""
        return float(_call(_driver().cuEventElapsedTime(start, end), "cuEventElapsedTime")) * 1e-3

    def wait(self, event: Any, what: str) -> None:
        """Waits for a recorded event. Raises BackendError naming `what` where work before it failed or outlasts the time limit."""
        driver = _driver()
        deadline = time.monotonic() + self.time_limit
        while (status := int(driver.cuEventQuery(event)[0])) == int(driver.CUresult.CUDA_ERROR_NOT_READY):
            if time.monotonic() > deadline:
                raise BackendError(f"{what} did not end within {self.time_limit:g} s on {self.device_name}")
            time.sleep(0)
        if status != 0:
            name = driver.cuGetErrorName(driver.CUresult(status))[1].decode()
            raise BackendError(f"{what} failed on {self.device_name}: {name}")

    def run(self, compiled: Compiled, launch: Launch, *, progress: Callable[[int], None] | None = None) -> Outcome:
        kernel = self._launcher(compiled, launch)(0)
        buffers = _Buffers(_driver())
        try:
            parameters = [_parameter(argument, buffers) for argument in launch.args]
            table = (ctypes.c_void_p * max(1, len(parameters)))(*[ctypes.addressof(p) for p in parameters])

            def go() -> float:
                return self._timed_launch(kernel, launch, table)

            first = go()
            # A second launch may overwrite what the first has written, so the results are fetched before the timed ones.
            buffers.fetch(launch.entry)
            times = sorted(go() for _ in range(self.repeats)) or [first]
        finally:
            buffers.free()
        return Outcome(times[len(times) // 2])

    def _timed_launch(self, kernel: launching.KernelLaunch, launch: Launch, table: Any) -> float:
        driver = _driver()
        start = _call(driver.cuEventCreate(0), "cuEventCreate")
        end = _call(driver.cuEventCreate(0), "cuEventCreate")
        _call(driver.cuEventRecord(start, 0), "cuEventRecord")
        _enqueue(kernel, table)
        _call(driver.cuEventRecord(end, 0), "cuEventRecord")
        self.wait(end, launch.entry)
        seconds = self.seconds_between(start, end)
        driver.cuEventDestroy(start)
        driver.cuEventDestroy(end)
        return seconds


def _enqueue(kernel: launching.KernelLaunch, table: Any) -> None:
    try:
        with launching.LOCK:
            kernel.enqueue(table)
    except RuntimeError as error:
        raise BackendError(str(error)) from error


class DeviceArray:
    """Device memory of a shape and dtype that outlives launches; needs a CudaBackend, which makes the context.

    stand_in: a host array of the same layout that takes its place in the arguments of a Launch (directly, or in a TensorMap). Its own
    memory is never read or written, so it takes none.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.stand_in = np.empty(shape, dtype)
        self.address = int(_call(_driver().cuMemAlloc(self.stand_in.nbytes), f"device memory, {self.stand_in.nbytes} bytes"))

    @property
    def nbytes(self) -> int:
        return self.stand_in.nbytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Zero-copy access for frameworks; bfloat16, which the protocol does not know, shows as int16."""
        dtype = self.stand_in.dtype
        known = dtype if dtype.kind in "fiub" and dtype.isbuiltin == 1 else np.dtype(np.int16)
        return {"shape": self.stand_in.shape, "typestr": known.str, "data": (self.address, False), "version": 3}

    def fill(self, byte: int) -> None:
        """Sets every byte, in stream order."""
        _call(_driver().cuMemsetD8Async(self.address, byte, self.nbytes, 0), "fill device memory")

    def store(self, array: np.ndarray) -> None:
        """Sets what it holds, once all work before it is done; `array` is contiguous and of its layout."""
        if array.nbytes != self.nbytes or not array.flags.c_contiguous:
            raise BackendError(f"an array of {array.nbytes} bytes does not fit one of {self.nbytes}")
        _call(_driver().cuMemcpyHtoD(self.address, array.ctypes.data, array.nbytes), "copy to the device")

    def fetch(self) -> np.ndarray:
        """A host copy, once all work before it is done."""
        array = np.empty_like(self.stand_in)
        _call(_driver().cuMemcpyDtoH(array.ctypes.data, self.address, array.nbytes), "copy from the device")
        return array

    def free(self) -> None:
        """Gives the memory back; nothing may use it any more."""
        if self.address:
            _call(_driver().cuMemFree(self.address), "free device memory")
            self.address = 0


class PreparedLaunch:
    """A launch whose parameters are encoded and whose arrays are on the device; `enqueue` repeats it, in the default stream or another."""

    def __init__(self, launcher: Callable[[int], launching.KernelLaunch], launch: Launch, resident: Sequence[DeviceArray]) -> None:
        self.launch = launch
        self._launcher = launcher
        self._streams: dict[int, launching.KernelLaunch] = {}
        self._buffers = _Buffers(_driver(), resident)
        try:
            self._parameters = [_parameter(argument, self._buffers) for argument in launch.args]
        except BaseException:
            self._buffers.free()
            raise
        self._table = (ctypes.c_void_p * max(1, len(self._parameters)))(*[ctypes.addressof(p) for p in self._parameters])

    def enqueue(self, stream: Any = 0) -> None:
        handle = int(stream)
        kernel = self._streams.get(handle)
        if kernel is None:
            kernel = self._streams[handle] = self._launcher(handle)
        _enqueue(kernel, self._table)

    def free(self) -> None:
        """Frees what was copied for this launch; resident arrays stay."""
        self._buffers.free()


class _Buffers:
    """Device copies of the host arrays of one launch; the same memory used by several arguments is copied once.

    resident: arrays that are on the device already, found by their stand-ins; they are neither copied nor freed here.
    """

    def __init__(self, driver: Any, resident: Sequence[DeviceArray] = ()) -> None:
        self._driver = driver
        self._allocations: dict[tuple[int, int], tuple[int, np.ndarray]] = {}
        self._resident = {(r.stand_in.__array_interface__["data"][0], r.nbytes): r.address for r in resident}

    def address(self, array: np.ndarray) -> int:
        if not array.flags.c_contiguous:
            raise BackendError("an array argument is not contiguous")
        key = (array.__array_interface__["data"][0], array.nbytes)
        if key in self._resident:
            return self._resident[key]
        if key not in self._allocations:
            guard = np.full(_GUARD_BYTES, _GUARD_BYTE, np.uint8)
            image = np.concatenate([guard, array.reshape(-1).view(np.uint8), guard])
            base = int(_call(self._driver.cuMemAlloc(image.nbytes), f"device memory, {image.nbytes} bytes"))
            self._allocations[key] = (base, array)
            _call(self._driver.cuMemcpyHtoD(base, image.ctypes.data, image.nbytes), "copy to the device")
        return self._allocations[key][0] + _GUARD_BYTES

    def fetch(self, entry: str) -> None:
        for base, array in self._allocations.values():
            image = np.empty(array.nbytes + 2 * _GUARD_BYTES, np.uint8)
            _call(self._driver.cuMemcpyDtoH(image.ctypes.data, base, image.nbytes), "copy from the device")
            if (image[:_GUARD_BYTES] != _GUARD_BYTE).any() or (image[-_GUARD_BYTES:] != _GUARD_BYTE).any():
                raise BackendError(f"{entry} wrote outside an array of shape {array.shape}")
            if array.flags.writeable:
                array.reshape(-1).view(np.uint8)[:] = image[_GUARD_BYTES:-_GUARD_BYTES]

    def free(self) -> None:
        for base, _ in self._allocations.values():
            self._driver.cuMemFree(base)
        self._allocations.clear()


def _parameter(argument: Any, buffers: _Buffers) -> Any:
    """The bytes of one kernel parameter, as a ctypes object that keeps them alive."""
    if isinstance(argument, Uninitialized):
        argument = argument.array
    if isinstance(argument, TensorMap):
        try:
            encoded = launching.encode(argument, buffers.address(argument.array))
        except RuntimeError as error:
            raise BackendError(str(error)) from error
        return ctypes.create_string_buffer(ctypes.string_at(encoded.address, 128), 128)
    if isinstance(argument, np.ndarray):
        return ctypes.c_uint64(buffers.address(argument))
    if isinstance(argument, np.generic):
        raw = argument.tobytes()
        return ctypes.create_string_buffer(raw, len(raw))
    if isinstance(argument, bytes):
        return ctypes.create_string_buffer(argument, len(argument))
    raise BackendError(f"an argument of type {type(argument).__name__} cannot be passed to a kernel")
