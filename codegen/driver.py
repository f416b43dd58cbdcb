"""The few calls of the CUDA driver that a launch needs, through ctypes: cuda-python builds objects for each."""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from .backends import Compiled, Launch
from .config import ARCHES
from .emulator import TensorMap

# cuda.h: CUdevice_attribute, CUfunction_attribute, CUlaunchAttributeID, CUstreamCaptureMode.
_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR, _MULTIPROCESSOR_COUNT = 75, 76, 16
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
_CLUSTER_DIMENSION = 4
_CAPTURE_RELAXED = 2
# CUtensorMapDataType, CUtensorMapSwizzle, CUtensorMapL2promotion.
_DATA_TYPES = {"uint8": 0, "uint16": 1, "uint32": 2, "int32": 3, "uint64": 4, "int64": 5}
_DATA_TYPES |= {"float16": 6, "float32": 7, "float64": 8, "bfloat16": 9, "float8_e4m3fn": 0}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}
LIBRARY = "libcuda.so.1"
# A launch writes its pointers into a plan's parameters and takes the next number of a workspace: one at a time.
LOCK = threading.RLock()


class _LaunchAttribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint32 * 16))


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    )


@cache
def library() -> Any:
    """libcuda, initialised. Raises RuntimeError where there is none."""
    try:
        cuda = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise RuntimeError("no CUDA driver on this machine") from error
    pointer, uint64 = ctypes.c_void_p, ctypes.c_uint64
    cuda.cuLaunchKernelEx.argtypes = (ctypes.POINTER(_LaunchConfig), pointer, pointer, pointer)
    cuda.cuTensorMapEncodeTiled.argtypes = (pointer, ctypes.c_int, ctypes.c_uint, pointer, *[pointer] * 4, *[ctypes.c_int] * 4)
    cuda.cuMemAlloc_v2.argtypes = (ctypes.POINTER(uint64), ctypes.c_size_t)
    cuda.cuMemsetD8Async.argtypes = (uint64, ctypes.c_ubyte, ctypes.c_size_t, pointer)
    cuda.cuModuleLoadData.argtypes = (ctypes.POINTER(pointer), ctypes.c_char_p)
    cuda.cuModuleGetFunction.argtypes = (ctypes.POINTER(pointer), pointer, ctypes.c_char_p)
    cuda.cuFuncSetAttribute.argtypes = (pointer, ctypes.c_int, ctypes.c_int)
    cuda.cuCtxPushCurrent_v2.argtypes = (pointer,)
    cuda.cuStreamCreate.argtypes = (ctypes.POINTER(pointer), ctypes.c_uint)
    cuda.cuStreamSynchronize.argtypes = (pointer,)
    check(cuda, cuda.cuInit(0), "cuInit")
    return cuda


def check(cuda: Any, status: int, what: str) -> None:
    """Raises RuntimeError naming the call and the driver's error unless `status` is success."""
    if status:
        name = ctypes.c_char_p()
        cuda.cuGetErrorName(status, ctypes.byref(name))
        raise RuntimeError(f"{what}: {name.value.decode() if name.value else status}")


class Workspace:
    """Device memory of one stream where partitions meet (see attention.Workspace). It only grows, and keeps what it had: a captured graph
    goes on using that."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._blocks: dict[str, tuple[int, int]] = {}
        self.number = 0

    def next_number(self) -> int:
        self.number = number = self.number % (2**32 - 1) + 1
        return number

    def reserve(self, name: str, nbytes: int) -> int:
        """The address of at least so many bytes, zeroed when they were made.

        What was too small stays with those who use it, so each is at least half as large again: their sum stays a small multiple of the
        largest, however slowly launches grow.
        """
        address, size = self._blocks.get(name, (0, 0))
        if not address or size < nbytes:
            size = max(nbytes, size + size // 2)
            address = self._device.zeros(size)
            self._blocks[name] = address, size
        return address


class Device:
    """A GPU: its context, modules, and a workspace for each stream. Use device()."""

    def __init__(self, index: int) -> None:
        self.cuda = cuda = library()
        self.index = index
        handle = ctypes.c_int()
        check(cuda, cuda.cuDeviceGet(ctypes.byref(handle), index), f"CUDA device {index}")
        major, minor, self.sms = (
            self._attribute(handle, attribute)
            for attribute in (_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR, _MULTIPROCESSOR_COUNT)
        )
        self.arch = f"sm_{major}{minor}a"
        if self.arch not in ARCHES:
            raise RuntimeError(f"q is on CUDA device {index}, which is {self.arch}; kernels are generated for {', '.join(ARCHES)}")
        context = ctypes.c_void_p()
        check(cuda, cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), "cuDevicePrimaryCtxRetain")
        self.context = context.value
        self._workspaces: dict[int, Workspace] = {}
        self._modules: dict[bytes, ctypes.c_void_p] = {}

    def _attribute(self, handle: ctypes.c_int, attribute: int) -> int:
        value = ctypes.c_int()
        check(self.cuda, self.cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, handle), "cuDeviceGetAttribute")
        return value.value

    def __enter__(self) -> None:
        check(self.cuda, self.cuda.cuCtxPushCurrent_v2(self.context), "cuCtxPushCurrent")

    def __exit__(self, *_: object) -> None:
        self.cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def workspace(self, stream: int) -> Workspace:
        found = self._workspaces.get(stream)
        if found is None:
            found = self._workspaces[stream] = Workspace(self)
        return found

    def zeros(self, nbytes: int) -> int:
        """New device memory of zeros, also while the thread captures a graph: the zeroing is not captured."""
        cuda = self.cuda
        address, stream, mode = ctypes.c_uint64(), ctypes.c_void_p(), ctypes.c_int(_CAPTURE_RELAXED)
        with self:
            check(cuda, cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "cuThreadExchangeStreamCaptureMode")
            try:
                check(cuda, cuda.cuMemAlloc_v2(ctypes.byref(address), nbytes), f"workspace of {nbytes} bytes")
                check(cuda, cuda.cuStreamCreate(ctypes.byref(stream), 1), "cuStreamCreate")
                try:
                    check(cuda, cuda.cuMemsetD8Async(address, 0, nbytes, stream), "cuMemsetD8Async")
                    check(cuda, cuda.cuStreamSynchronize(stream), "cuStreamSynchronize")
                finally:
                    cuda.cuStreamDestroy_v2(stream)
            finally:
                cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        return address.value

    def function(self, compiled: Compiled, entry: str, shared_bytes: int) -> int:
        """The handle of a kernel, its dynamic shared memory allowed."""
        cuda = self.cuda
        if compiled.cubin is None:
            raise RuntimeError(f"{entry}: no CUBIN to run")
        if compiled.arch != self.arch:
            raise RuntimeError(f"{entry} is compiled for {compiled.arch}; q is on CUDA device {self.index}, which is {self.arch}")
        function = ctypes.c_void_p()
        with self:
            module = self._modules.get(compiled.cubin)
            if module is None:
                module = ctypes.c_void_p()
                check(cuda, cuda.cuModuleLoadData(ctypes.byref(module), compiled.cubin), "cuModuleLoadData")
                self._modules[compiled.cubin] = module
            check(cuda, cuda.cuModuleGetFunction(ctypes.byref(function), module, entry.encode()), f"cuModuleGetFunction({entry})")
            what = f"{entry}: {shared_bytes} bytes of shared memory"
            check(cuda, cuda.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes), what)
        return int(function.value or 0)


_devices: dict[int, Device] = {}


def device(index: int) -> Device:
    """The GPU of that index. Raises RuntimeError where there is none, or one of another architecture."""
    with LOCK:
        if index not in _devices:
            _devices[index] = Device(index)
        return _devices[index]


class KernelLaunch:
    """A kernel with its grid in one stream, ready to be launched with a table of parameter addresses."""

    def __init__(self, device: Device, function: int, launch: Launch, stream: int) -> None:
        self._device = device
        self._entry = launch.entry
        self._function = ctypes.c_void_p(function)
        self._config = _LaunchConfig()
        self._config.grid[:] = launch.grid
        self._config.block[:] = launch.block
        self._config.shared_bytes = launch.smem_bytes
        self._config.stream = stream
        if launch.cluster > 1:
            attribute = _LaunchAttribute(id=_CLUSTER_DIMENSION)
            attribute.value[:3] = (launch.cluster, 1, 1)
            self._config.attributes = ctypes.pointer(attribute)
            self._config.attribute_count = 1
        self._reference = ctypes.byref(self._config)
        self._launch = device.cuda.cuLaunchKernelEx
        self._get_current = device.cuda.cuCtxGetCurrent
        self._current = ctypes.c_void_p()
        self._current_reference = ctypes.byref(self._current)
        self._context = device.context

    def enqueue(self, table: Any) -> None:
        """Launches; LOCK is held."""
        self._get_current(self._current_reference)
        if self._current.value == self._context:
            status = self._launch(self._reference, self._function, table, None)
        else:
            with self._device:
                status = self._launch(self._reference, self._function, table, None)
        if status:
            check(self._device.cuda, status, f"{self._entry}: launch")


class Encoded:
    """The driver's 128 bytes of a tensor map, aligned as cuTensorMapEncodeTiled wants them."""

    def __init__(self) -> None:
        self._memory = ctypes.create_string_buffer(128 + 64)
        self.address = -(-ctypes.addressof(self._memory) // 64) * 64


class MapCodes(NamedTuple):
    """Numbers of CUtensorMapDataType, CUtensorMapSwizzle, CUtensorMapL2promotion and CUtensorMapFloatOOBfill."""

    data_type: int
    swizzle: int
    promotion: int
    nan_fill: int


def map_codes(tensor_map: TensorMap) -> MapCodes:
    """How the driver calls what a tensor map asks."""
    return MapCodes(
        _DATA_TYPES[np.dtype(tensor_map.dtype).name],
        _SWIZZLES[tensor_map.swizzle],
        _PROMOTIONS[tensor_map.l2_promotion],
        int(tensor_map.oob_nan),
    )


def encode(tensor_map: TensorMap, address: int) -> Encoded:
    """The driver's form of a tensor map whose array begins at a device address."""
    cuda = library()
    rank = len(tensor_map.shape)
    encoded = Encoded()
    codes = map_codes(tensor_map)
    status = cuda.cuTensorMapEncodeTiled(
        encoded.address,
        codes.data_type,
        rank,
        address + tensor_map.offset_bytes,
        (ctypes.c_uint64 * rank)(*reversed(tensor_map.shape)),
        (ctypes.c_uint64 * (rank - 1))(*reversed(tensor_map.strides)),
        (ctypes.c_uint32 * rank)(*reversed(tensor_map.box)),
        (ctypes.c_uint32 * rank)(*reversed(tensor_map.element_strides)),
        0,
        codes.swizzle,
        codes.promotion,
        codes.nan_fill,
    )
    check(cuda, status, "cuTensorMapEncodeTiled")
    return encoded


def without_array(tensor_map: TensorMap) -> TensorMap:
    """The same numbers without the array, whose memory can then go."""
    bare = object.__new__(TensorMap)
    for field in dataclasses.fields(tensor_map):
        value = np.empty(0, tensor_map.dtype) if field.name == "array" else getattr(tensor_map, field.name)
        object.__setattr__(bare, field.name, value)
    return bare
