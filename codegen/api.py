"""`fa4gen.attention`: one call on the arrays of any framework with DLPack.

What a call needs beyond its pointers - config, kernel, grid, tensor map shapes, workspace sizes - is a plan, made once for each
combination of shapes, strides and types. What it needs with its pointers is kept too, for addresses seen lately: such a call is one look-up
and the launch. It allocates nothing and waits for nothing, so it can be captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import mmap
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol

import ml_dtypes
import numpy as np

from . import driver
from .attention import Workspace, attention_entry_info, attention_launch, entry_config
from .backends import BackendError, Compiled, Launch
from .config import Config, ConfigError, load_config, parse_config
from .emulator import TensorMap, Uninitialized
from .geometry import derive
from .units import DTYPES

# What an array may be; which of these a kernel takes is checked by argument.
_DTYPES: dict[str, np.dtype[Any]] = {
    **DTYPES,
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    **{name: np.dtype(name) for name in ("float64", "int8", "uint8", "int16", "int32", "int64")},
}
_DLPACK_DTYPES = {
    (0, 32): "int32",
    (0, 64): "int64",
    (2, 16): "float16",
    (2, 32): "float32",
    (2, 64): "float64",
    (4, 16): "bfloat16",
    (10, 8): "float8_e4m3fn",
}
_DLPACK_CUDA = 2
_LOCK = driver.LOCK
DEPTHS = (64, 128, 256, 512)
# Names of the arrays in attention(), and of what the kernel's argument list calls them.
_EXTRAS = {
    "block_table": "block_table",
    "page_places": "page_places",
    "seqused_k": "key_lengths",
    "cu_seqlens_q": "query_starts",
    "sinks": "sinks",
    "k_scale": "k_scale",
    "v_scale": "v_scale",
}
_MAPS = {"q_map": "q", "k_map": "k", "v_map": "v", "out_map": "out"}


@dataclass(frozen=True)
class View:
    """An array on a device: address; extents and strides, in elements; dtype's name; CUDA device index, or -1 for host memory."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: int

    def stand_in(self) -> np.ndarray:
        """A host array of the same layout whose memory is never touched, so takes none: planning needs shapes and strides only."""
        dtype = _DTYPES[self.dtype]
        elements = (
            1 + sum((extent - 1) * stride for extent, stride in zip(self.shape, self.strides, strict=True)) if 0 not in self.shape else 1
        )
        memory = unbacked((elements,), dtype)
        return np.ndarray(self.shape, dtype, memory, 0, tuple(stride * dtype.itemsize for stride in self.strides))


def dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of an array in one piece."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def unbacked(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """A contiguous array whose memory is never touched, so takes none."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    nbytes = max(1, math.prod(shape)) * np.dtype(dtype).itemsize
    memory: np.ndarray = np.frombuffer(mmap.mmap(-1, nbytes, flags=flags, prot=mmap.PROT_READ), np.uint8).view(dtype)
    return memory[: math.prod(shape)].reshape(shape)


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


def view(name: str, array: Any) -> View:
    """What `array` is. Raises TypeError naming the argument where it has no DLPack, or a type that no kernel takes."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        dtype = str(array.dtype).removeprefix("torch.")
        if dtype not in _DTYPES:
            raise TypeError(f"{name} is {dtype}, which no kernel takes")
        return View(array.data_ptr(), tuple(array.shape), tuple(array.stride()), dtype, array.get_device())
    if not hasattr(array, "__dlpack__"):
        raise TypeError(f"{name} is a {type(array).__name__}; expected an array with DLPack, such as a torch tensor")
    kind, index = array.__dlpack_device__()
    on_gpu = int(kind) == _DLPACK_CUDA
    # -1: the producer need not wait, the launch goes into the caller's stream. JAX takes that for a stream, and waits for none without it.
    waits = on_gpu and type(array).__module__.partition(".")[0] not in ("jax", "jaxlib")
    capsule = array.__dlpack__(stream=-1) if waits else array.__dlpack__()
    tensor = ctypes.cast(_capsule_pointer(capsule, b"dltensor"), ctypes.POINTER(_DLTensor)).contents
    known = _DLPACK_DTYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if known is None:
        raise TypeError(f"{name} has DLPack type {tensor.code} of {tensor.bits} bits, which no kernel takes")
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else dense(shape)
    return View((tensor.data or 0) + tensor.byte_offset, shape, strides, known, int(index) if on_gpu else -1)


# --- which config --------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def choose_config(
    depth: int,
    dtype: str,
    kv_dtype: str,
    out_dtype: str,
    causal: bool,
    window: int | None,
    softcap: float | None,
    sinks: bool,
    page_size: int | None,
    key_lengths: bool,
    ragged_queries: bool,
    page_list: bool,
    page_scales: bool,
    exact: bool,
    arch: str,
) -> Config:
    """The config that `attention` generates for what a call asks. Raises ValueError where there is none, TypeError for its types."""
    if depth not in DEPTHS:
        raise ValueError(f"q has head dim {depth}; there are kernels for {', '.join(map(str, DEPTHS))}")
    if dtype not in ("bfloat16", "float16"):
        raise TypeError(f"q is {dtype}; expected bfloat16 or float16")
    if kv_dtype not in (dtype, "float8_e4m3fn"):
        raise TypeError(f"k is {kv_dtype}; expected {dtype}, as q, or float8_e4m3fn")
    if out_dtype not in ("bfloat16", "float16", "float32"):
        raise TypeError(f"out is {out_dtype}; expected bfloat16, float16 or float32")
    if window is not None and not causal:
        raise ValueError("window is given without causal: a window ends at a query's own position")
    fields: dict[str, Any] = {
        "name": f"attention_d{depth}",
        "ov_depth": depth,
        "shared_key": True,
        "m_pack": 4,
        "rows": 32,
        "mask": "causal" if causal else "none",
        "dtype": dtype,
        "out_dtype": out_dtype,
        "arch": [arch],
        "kv_layout": "contiguous" if page_size is None else "paged",
        "page_size": page_size,
        "key_lengths": key_lengths,
        "ragged_queries": ragged_queries,
        "window": window,
        "softcap": softcap,
        "sinks": sinks,
        "kv_dtype": kv_dtype if kv_dtype != dtype else None,
        "kv_scale": "page" if page_scales else "head",
        "page_list": page_list,
        "rescale": "exact" if exact else "lazy",
    }
    try:
        return parse_config(fields)
    except ConfigError as error:
        raise ValueError(str(error)) from error


def _supports_exact(arch: str) -> bool:
    from . import geometry_sm90, geometry_sm100

    return "exact" in (geometry_sm90 if arch == "sm_90a" else geometry_sm100).FEATURES


# --- checks and planning -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """What a call asks beside its arrays."""

    config: Config | None = None
    causal: bool = False
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    num_splits: int | None = None
    split_size: int | None = None
    max_seqlen_q: int | None = None
    kv_layout: Literal["NHD", "HND"] = "NHD"


def _check(arrays: Mapping[str, View], options: Options) -> None:
    """Raises ValueError or TypeError naming the argument."""
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    rank = 3 if "cu_seqlens_q" in arrays else 4
    for name, array, expected in (("q", q, rank), ("k", k, 4), ("v", v, 4)):
        if len(array.shape) != expected or 0 in array.shape:
            raise ValueError(f"{name} has shape {array.shape}; expected a non-empty array of rank {expected}")
        if array.pointer % 16:
            raise ValueError(f"{name} begins at an address that is not a multiple of 16")
    for name, array in arrays.items():
        if array.device != q.device:
            raise ValueError(f"{name} is on {_place(array)}, q on {_place(q)}")
    if v.dtype != k.dtype:
        raise TypeError(f"v is {v.dtype}, k is {k.dtype}")
    if v.shape != k.shape:
        raise ValueError(f"v has shape {v.shape}, k has {k.shape}")
    heads, depth = q.shape[-2:]
    if k.shape[3] != depth:
        raise ValueError(f"k has head dim {k.shape[3]}, q has {depth}")
    kv_heads = k.shape[2]
    if heads % kv_heads:
        raise ValueError(f"q has {heads} heads, which is no multiple of the {kv_heads} of k")
    for name in ("block_table", "page_places", "seqused_k", "cu_seqlens_q"):
        if name in arrays and arrays[name].dtype != "int32":
            raise TypeError(f"{name} is {arrays[name].dtype}; expected int32")
    for name in ("sinks", "k_scale", "v_scale"):
        if name in arrays and arrays[name].dtype != "float32":
            raise TypeError(f"{name} is {arrays[name].dtype}; expected float32")
    starts = arrays.get("cu_seqlens_q")
    if starts is not None and (len(starts.shape) != 1 or starts.shape[0] < 2):
        raise ValueError(f"cu_seqlens_q has shape {starts.shape}; expected [batch + 1]")
    if (options.max_seqlen_q is not None) != (starts is not None):
        raise ValueError("max_seqlen_q is the most queries of a sequence: give it with cu_seqlens_q, and only then")
    batch = q.shape[0] if starts is None else starts.shape[0] - 1
    table = arrays.get("block_table")
    if table is not None and (len(table.shape) != 2 or table.shape[0] != batch):
        raise ValueError(f"block_table has shape {table.shape}; expected [{batch}, pages of a sequence]")
    places = arrays.get("page_places")
    if places is not None and table is None:
        raise ValueError("page_places is given without block_table: it says where the pages listed there lie in their sequence")
    if places is not None and "seqused_k" not in arrays:
        raise ValueError("page_places is given without seqused_k: a list of pages does not say where its sequence ends")
    if places is not None and table is not None and places.shape != table.shape:
        raise ValueError(f"page_places has shape {places.shape}; expected that of block_table, {table.shape}")
    if table is None and k.shape[0] != batch:
        raise ValueError(f"k has {k.shape[0]} sequences, q has {batch}")
    expected_shapes: dict[str, tuple[int, ...]] = {"seqused_k": (batch,), "sinks": (heads,)}
    expected_shapes |= {"out": q.shape, "lse": (batch, heads, q.shape[1]) if starts is None else (heads, q.shape[0])}
    for name, shape in expected_shapes.items():
        if name in arrays and arrays[name].shape != shape:
            raise ValueError(f"{name} has shape {arrays[name].shape}; expected {shape}")
    for name, array in arrays.items():
        if name not in ("k", "v") and array.strides != _contiguous(array):
            raise ValueError(f"{name} has strides of {array.strides} elements; expected a contiguous array")
    _check_scales(arrays)
    if options.num_splits is not None and options.split_size is not None:
        raise ValueError("num_splits and split_size are both given; one decides the other")
    for name in ("num_splits", "split_size", "window", "max_seqlen_q"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; expected at least 1")


def _check_scales(arrays: Mapping[str, View]) -> None:
    """Raises ValueError naming the argument: both scales are of heads, or both of the pages that a block table lists."""
    k = arrays["k"]
    fp8 = k.dtype == "float8_e4m3fn"
    kv_heads = k.shape[2]
    for name in ("k_scale", "v_scale"):
        if (name in arrays) != fp8:
            raise ValueError(f"{name} is {'missing: k and v are float8_e4m3fn' if fp8 else f'given, but k and v are {k.dtype}'}")
        if not fp8:
            continue
        shapes = [(kv_heads,)] + [(k.shape[0], kv_heads)] * ("block_table" in arrays)
        shape = arrays[name].shape
        if shape not in shapes:
            raise ValueError(f"{name} has shape {shape}; expected {' or '.join(map(str, shapes))}")
        if shape != arrays["k_scale"].shape:
            raise ValueError(f"{name} has shape {shape}, k_scale has {arrays['k_scale'].shape}")


def _contiguous(array: View) -> tuple[int, ...]:
    """Strides of a contiguous array of that shape, as it has them along axes of one element."""
    steps = dense(array.shape)
    return tuple(have if extent == 1 else step for have, step, extent in zip(array.strides, steps, array.shape, strict=True))


def _place(array: View) -> str:
    return "the host" if array.device < 0 else f"CUDA device {array.device}"


def _swapped(array: View) -> View:
    """[.., kv_heads, keys, d] as [.., keys, kv_heads, d]."""
    a, b, c, d = array.shape
    s, t, u, w = array.strides
    return View(array.pointer, (a, c, b, d), (s, u, t, w), array.dtype, array.device)


# What a call asks of a config beside its target, in the order of choose_config's arguments.
ASKED = (
    *("q's head dim", "q's dtype", "k's dtype", "out's dtype", "causal", "window", "softcap", "sinks"),
    *("block_table (page size)", "seqused_k", "cu_seqlens_q", "page_places", "k_scale (of pages)"),
)


def _has(config: Config) -> tuple[Any, ...]:
    """What `config` is made for, as ASKED."""
    return (
        *(config.ov_depth, config.dtype, config.kv_dtype or config.dtype, config.out_dtype, config.mask == "causal"),
        *(config.window, config.softcap, config.sinks, config.page_size, config.key_lengths, config.ragged_queries),
        *(config.page_list, config.kv_scale == "page"),
    )


def require_config(config: Config, asked: tuple[Any, ...], arch: str) -> None:
    """Raises ValueError naming the first of ASKED that `config` is not made for, or the target."""
    for name, call, fixed in zip(ASKED, asked, _has(config), strict=True):
        if call != fixed:
            raise ValueError(f"{name}: the call has {call}, config {config.name} has {fixed}")
    if arch not in config.arch:
        raise ValueError(f"config {config.name} is for {', '.join(config.arch)}, not for {arch}")


class Kernels(Protocol):
    """Where the kernels of a call come from."""

    def config(self, ref: Config | str) -> Config:
        """The config that a caller names."""
        ...

    def choose(self, asked: tuple[Any, ...], exact: bool, arch: str) -> Config:
        """The config for a call that names none. exact: rows whose bits depend on no other row are wanted, where the target has that.

        Raises ValueError or TypeError naming the argument.
        """
        ...

    def compiled(self, config: Config, arch: str) -> Compiled:
        """Raises what says in one line why there is none."""
        ...


class Generated:
    """Kernels rendered and compiled when they are first asked for."""

    def config(self, ref: Config | str) -> Config:
        return _loaded(ref) if isinstance(ref, str) else ref

    def choose(self, asked: tuple[Any, ...], exact: bool, arch: str) -> Config:
        return choose_config(*asked, exact and _supports_exact(arch), arch)

    def compiled(self, config: Config, arch: str) -> Compiled:
        # Imported here: exported kernels are launched without a compiler and without Jinja.
        from .compiler import compile_source
        from .render import render

        module = compile_source(render(config, arch)["attention.cu"], arch, "attention.cu")
        return Compiled(arch, module.ptx, module.cubin, module.source, module.file_name)


@lru_cache(maxsize=64)
def _loaded(ref: str) -> Config:
    return load_config(ref)


def plan_launch(
    arrays: Mapping[str, View],
    stand_ins: Mapping[str, np.ndarray],
    options: Options,
    arch: str,
    ctas: int | None,
    kernels: Kernels | None = None,
    allocate: Callable[[tuple[int, ...], Any], np.ndarray] = unbacked,
) -> Any:
    """(config, launch, argument names) for arrays that passed _check; `stand_ins` are those of the launch, out and lse included.

    allocate: makes the workspace; by default it has no memory, since a plan needs its sizes only.

    Raises ValueError or TypeError naming the argument.
    """
    q, k = arrays["q"], arrays["k"]
    table = arrays.get("block_table")
    config = options.config
    asked = (
        *(q.shape[-1], q.dtype, k.dtype, arrays["out"].dtype, options.causal, options.window, options.softcap, "sinks" in arrays),
        *(None if table is None else k.shape[1], "seqused_k" in arrays, "cu_seqlens_q" in arrays, "page_places" in arrays),
        "k_scale" in arrays and len(arrays["k_scale"].shape) == 2,
    )
    if config is None:
        config = (kernels or Generated()).choose(asked, options.split_size is not None, arch)
    else:
        require_config(config, asked, arch)
    geo = derive(config, arch)
    q_len = options.max_seqlen_q or q.shape[1]
    entry = derive(entry_config(config, arch, q_len, q.shape[-2] // k.shape[2]), arch)
    keys = k.shape[1] if table is None else table.shape[1] * k.shape[1]
    partition_keys: int | Literal["auto"] | None = "auto" if config.split is None else None
    if options.split_size is not None:
        if options.split_size % entry.block_keys:
            raise ValueError(f"split_size is {options.split_size}; expected a multiple of {entry.block_keys}, the keys of a tile")
        partition_keys = options.split_size
    elif options.num_splits is not None:
        tiles = -(-keys // entry.block_keys)
        partition_keys = -(-tiles // min(options.num_splits, tiles)) * entry.block_keys
    extras: dict[str, Any] = {_EXTRAS[name]: array for name, array in stand_ins.items() if name in _EXTRAS}
    if options.max_seqlen_q is not None:
        extras["max_q_len"] = options.max_seqlen_q
    extras["workspace"] = Workspace(allocate)
    launch = attention_launch(
        config,
        geo,
        *(stand_ins[name] for name in ("q", "k", "v", "out", "lse")),
        scale=options.scale,
        ctas=ctas,
        partition_keys=partition_keys,
        **extras,
    )
    arguments = [argument["name"] for argument in attention_entry_info(config, entry)["arguments"]]
    if len(arguments) != len(launch.args):
        raise RuntimeError(f"{launch.entry} takes {len(arguments)} arguments, the launch has {len(launch.args)}")
    return config, launch, arguments


# --- on a GPU ------------------------------------------------------------------------------------------------------------------


class Ready:
    """A launch with its parameters in place: `enqueue` launches it, and again."""

    __slots__ = ("_keep", "_launch", "_number", "_space", "_table", "plan")

    def __init__(self, plan: Plan, stream: _InStream, table: Any, keep: Any) -> None:
        self.plan = plan
        self._space, self._number, self._launch = stream.space, stream.number, stream.launch.enqueue
        self._table, self._keep = table, keep

    def enqueue(self) -> None:
        """Launches, with the workspace's next number. Raises RuntimeError."""
        with _LOCK:
            self._number.value = self._space.next_number()
            self._launch(self._table)

    def enqueue_again(self) -> None:
        """Launches with the number of the last time, as a graph does: the driver's call and no more. Raises RuntimeError."""
        with _LOCK:
            self._launch(self._table)


class _InStream:
    """A plan's part for one stream: that stream's workspace and the launch into it."""

    def __init__(self, plan: Plan, stream: int) -> None:
        self.space = plan.device.workspace(stream)
        self.launch = driver.KernelLaunch(plan.device, plan.function, plan.launch, stream)
        self.number = ctypes.c_uint32(0)
        self.workspace = {name: self.space.reserve(name, nbytes) for name, nbytes in plan.workspace}


class Plan:
    """All of a launch but its addresses and its stream."""

    MAPS_KEPT = 512

    def __init__(self, device: driver.Device, compiled: Compiled, launch: Launch, arguments: list[str], options: Options) -> None:
        self.device = device
        self.launch = dataclasses.replace(launch, args=())
        self.function = device.function(compiled, launch.entry, launch.smem_bytes)
        # Alive as long as the plan: a call is known by its config's identity.
        self.options = options
        self.workspace: list[tuple[str, int]] = []
        self._arguments = len(arguments)
        self._scalars: list[tuple[int, Any]] = []
        self._maps: list[tuple[int, str, TensorMap, dict[int, Any]]] = []
        self._pointers: list[tuple[int, str]] = []
        self._number_index: int | None = None
        self._streams: dict[int, _InStream] = {}
        inverse = {kernel: call for call, kernel in _EXTRAS.items()}
        for index, (name, value) in enumerate(zip(arguments, launch.args, strict=True)):
            argument = value.array if isinstance(value, Uninitialized) else value
            if isinstance(argument, TensorMap):
                # A map's stand-in is planned with; what is encoded are its numbers.
                self._maps.append((index, _MAPS[name], driver.without_array(argument), {}))
            elif isinstance(argument, np.ndarray):
                self._pointers.append((index, inverse.get(name, name)))
                if name not in inverse and name != "lse":
                    self.workspace.append((name, argument.nbytes))
            elif name == "launch":
                self._number_index = index
            else:
                raw = np.asarray(argument).tobytes()
                self._scalars.append((index, ctypes.create_string_buffer(raw, len(raw))))

    def ready(self, pointers: Mapping[str, int], stream: int) -> Ready:
        """The launch for the addresses of a call's arrays by name; what is not among them is the workspace's."""
        with _LOCK:
            own = self._streams.get(stream)
            if own is None:
                own = self._streams[stream] = _InStream(self, stream)
            table = (ctypes.c_void_p * self._arguments)()
            addresses = own.workspace | dict(pointers)
            cells = (ctypes.c_uint64 * len(self._pointers))(*(addresses[name] for _, name in self._pointers))
            keep: list[Any] = [cells]
            for (index, _), place in zip(self._pointers, range(ctypes.addressof(cells), sys.maxsize, 8), strict=False):
                table[index] = place
            for index, scalar in self._scalars:
                table[index] = ctypes.addressof(scalar)
            if self._number_index is not None:
                table[self._number_index] = ctypes.addressof(own.number)
            for index, name, tensor_map, kept in self._maps:
                encoded = self._encoded(tensor_map, addresses[name], kept)
                keep.append(encoded)
                table[index] = encoded.address
        return Ready(self, own, table, keep)

    def _encoded(self, tensor_map: TensorMap, address: int, kept: dict[int, Any]) -> Any:
        """A tensor map is encoded again only for an address not seen lately."""
        encoded = kept.get(address)
        if encoded is None:
            if len(kept) >= self.MAPS_KEPT:
                kept.clear()
            encoded = kept[address] = driver.encode(tensor_map, address)
        return encoded


def _make_plan(arrays: dict[str, View], options: Options, kernels: Kernels) -> Plan:
    _check(arrays, options)
    if arrays["q"].device < 0:
        raise ValueError("q is on the host; expected arrays on a CUDA device, or numpy arrays for the emulator")
    device = driver.device(arrays["q"].device)
    # A call without return_lse has its LSE in the workspace.
    own_lse = "lse" not in arrays
    if own_lse:
        q = arrays["q"].shape
        shape = (q[0], q[2], q[1]) if len(q) == 4 else (q[1], q[0])
        arrays["lse"] = View(0, shape, dense(shape), "float32", arrays["q"].device)
    stand_ins = {name: array.stand_in() for name, array in arrays.items()}
    config, launch, arguments = plan_launch(arrays, stand_ins, options, device.arch, device.sms, kernels)
    plan = Plan(device, kernels.compiled(config, device.arch), launch, arguments, options)
    if own_lse:
        plan.workspace.append(("lse", stand_ins["lse"].nbytes))
    return plan


# --- on the emulator -----------------------------------------------------------------------------------------------------------


def _host_view(name: str, array: np.ndarray) -> View:
    if array.dtype.name not in _DTYPES:
        raise TypeError(f"{name} is {array.dtype.name}, which no kernel takes")
    if any(stride % array.itemsize for stride in array.strides):
        raise ValueError(f"{name} has strides of {array.strides} bytes, which are not whole elements")
    # numpy promises no more than its dtype's alignment, and the emulator places arrays anew.
    return View(0, array.shape, tuple(stride // array.itemsize for stride in array.strides), array.dtype.name, -1)


def _emulate(named: dict[str, Any], options: Options, kernels: Kernels) -> None:
    from .backends.emulator import EmulatorBackend

    for name, array in named.items():
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{name} is a {type(array).__name__}, q a numpy array")
    if options.kv_layout == "HND":
        named |= {name: named[name].swapaxes(1, 2) for name in ("k", "v") if named[name].ndim == 4}
    elif options.kv_layout != "NHD":
        raise ValueError(f"kv_layout is {options.kv_layout!r}; expected NHD or HND")
    arrays = {name: _host_view(name, array) for name, array in named.items()}
    _check(arrays, options)
    arch = options.config.arch[0] if options.config else "sm_90a"
    config, launch, _ = plan_launch(arrays, named, options, arch, None, kernels, np.zeros)
    outcome = EmulatorBackend().run(kernels.compiled(config, arch), launch)
    if outcome.hazards:
        raise BackendError(f"{launch.entry}: {outcome.hazards[0]}", outcome.hazards)


# --- the call ------------------------------------------------------------------------------------------------------------------


class Attention:
    """`attention` on the kernels of one source.

    A call is known by its options, and by shape, strides, type and address of every array: then it is ready and only launched. Else its
    plan is looked up by all but the addresses, and made if it is new.
    """

    MAX_PLANS = 4096
    MAX_READY = 4096

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._ready: dict[tuple[Any, ...], tuple[Ready, Config | None]] = {}
        self.latest: Ready | None = None  # made ready last

    def forget(self) -> None:
        """Drops every plan. What graphs have captured goes on to work."""
        self._plans.clear()
        self._ready.clear()
        self.latest = None

    def attention(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        config: Config | str | None = None,
        block_table: Any = None,
        seqused_k: Any = None,
        cu_seqlens_q: Any = None,
        max_seqlen_q: int | None = None,
        causal: bool = False,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Any = None,
        scale: float | None = None,
        k_scale: Any = None,
        v_scale: Any = None,
        num_splits: int | None = None,
        split_size: int | None = None,
        out: Any = None,
        return_lse: bool = False,
        stream: Any = None,
        kv_layout: Literal["NHD", "HND"] = "NHD",
        page_places: Any = None,
    ) -> Any:
        """Softmax attention of few queries over many keys, in one kernel. Returns out, or (out, lse) with return_lse.

        q: [batch, q_len, q_heads, d], or [total_q, q_heads, d] with cu_seqlens_q; bfloat16 or float16, contiguous; d: 64, 128, 256 or 512.
        k, v: [batch, keys, kv_heads, d], or pages [pages, page, kv_heads, d] with block_table; kv_layout "HND" swaps their middle axes. q's
        dtype, or float8_e4m3fn with k_scale and v_scale. d is contiguous, other strides are multiples of 16 bytes.
        All arrays are of one framework with DLPack and on one GPU. numpy arrays run on the emulator, for tests: seconds, not microseconds.

        config: a Config, or its name or file; default: generated from what the call asks.
        block_table: [batch, pages] int32, pages of each sequence. seqused_k: [batch] int32, keys of each sequence. Both are read on the
        device: what they hold is not checked, an entry of block_table past a sequence's end is not read, and a length beyond the keys
        counts as all.
        page_places: as block_table, which then lists chosen pages (block-sparse): the place of each in its sequence, ascending; a place at
        or past the sequence's end (2^31 - 1, say) ends the list. Only listed pages are read. seqused_k counts the whole sequence, and
        causal and window go by it and by the places.
        cu_seqlens_q: [batch + 1] int32, first query of each sequence and the end; max_seqlen_q: the most queries of a sequence.
        causal: query i of n sees keys <= keys - n + i. window: and only the last `window` of them. softcap: s = softcap tanh(s / softcap).
        sinks: [q_heads] float32, a logit of each head that takes part in the softmax without a value. scale: default 1 / sqrt(d).
        k_scale, v_scale: factors of K and V, [kv_heads] float32, or with block_table [pages, kv_heads], then those of V positive. Q and P
        are multiplied as float16 where K and V are float8_e4m3fn: a q beyond 65,504 becomes infinite.
        num_splits: partitions of the keys that CTAs share out. split_size: keys of a partition instead, a multiple of the key tile, which
        makes a sequence's result the same bits in any batch. Neither: as many as are expected to finish first.
        out: written instead of a new array (needed where the framework is not torch); its dtype may be bfloat16, float16 or float32. A pair
        (out, lse) with return_lse. lse: [batch, q_heads, q_len], or [q_heads, total_q], float32, natural logarithm.
        stream: a CUstream handle or an object with cuda_stream or ptr; default: torch's current stream, else the default stream.

        After the first call of its shapes a call neither allocates (torch's new outputs aside) nor waits, so it can be captured in a CUDA
        graph. Launches in one stream share a workspace: replays of graphs captured in one stream must not overlap.
        Raises TypeError and ValueError naming the argument, RuntimeError for the GPU and its driver; nothing is launched then.
        """
        chosen = None if config is None else self._kernels.config(config)
        torch = sys.modules.get("torch")
        on_torch = torch is not None and isinstance(q, torch.Tensor)
        lse = None
        if return_lse and isinstance(out, tuple):
            out, lse = out
        key: tuple[Any, ...] | None = None
        handle = 0
        if torch is not None and on_torch:
            # empty_like and new_empty take a fraction of the time of torch.empty with all its arguments.
            if out is None:
                out = torch.empty_like(q) if chosen is None else torch.empty_like(q, dtype=getattr(torch, chosen.out_dtype))
            if return_lse and lse is None:
                lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else q.shape[1::-1], dtype=torch.float32)
            if stream is None:
                handle = torch._C._cuda_getCurrentRawStream(q.get_device()) if q.is_cuda else 0
            else:
                handle = stream if type(stream) is int else _stream_handle(stream)
            try:
                key = (
                    *(handle, id(chosen), causal, window, softcap, scale, num_splits, split_size, max_seqlen_q, kv_layout),
                    *(q.shape, q.stride(), q.dtype, q.data_ptr(), q.get_device()),
                    *(k.shape, k.stride(), k.dtype, k.data_ptr(), k.get_device()),
                    *(v.shape, v.stride(), v.dtype, v.data_ptr(), v.get_device()),
                    *(out.shape, out.stride(), out.dtype, out.data_ptr(), out.get_device()),
                )
                if not (lse is block_table is page_places is seqused_k is cu_seqlens_q is sinks is k_scale is v_scale is None):
                    key += tuple(
                        None if each is None else (each.shape, each.stride(), each.dtype, each.data_ptr(), each.get_device())
                        for each in (lse, block_table, page_places, seqused_k, cu_seqlens_q, sinks, k_scale, v_scale)
                    )
            except AttributeError:
                # What is no tensor is named below.
                key = None
            else:
                found = self._ready.get(key)
                if found is not None:
                    found[0].enqueue()
                    return (out, lse) if return_lse else out

        options = Options(chosen, causal, window, softcap, scale, num_splits, split_size, max_seqlen_q, kv_layout)
        optional = {"block_table": block_table, "page_places": page_places, "seqused_k": seqused_k, "cu_seqlens_q": cu_seqlens_q}
        optional |= {"sinks": sinks, "k_scale": k_scale, "v_scale": v_scale}
        named = {"q": q, "k": k, "v": v} | {name: array for name, array in optional.items() if array is not None}
        if isinstance(q, np.ndarray):
            if not isinstance(self._kernels, Generated):
                raise TypeError("q is a numpy array, which runs on the emulator; exported kernels run on a GPU only")
            if stream is not None:
                raise ValueError("stream is given, but numpy arrays run on the emulator")
            if out is None:
                out = np.empty(q.shape, q.dtype if chosen is None else _DTYPES[chosen.out_dtype])
            if lse is None:
                lse = np.empty((q.shape[0], q.shape[2], q.shape[1]) if q.ndim == 4 else (*q.shape[1::-1],), np.float32)
            _emulate(named | {"out": out, "lse": lse}, options, self._kernels)
            return (out, lse) if return_lse else out
        if not on_torch:
            if out is None or (return_lse and lse is None):
                given = f"q is a {type(q).__name__}; with return_lse give (out, lse)"
                raise ValueError(f"out is missing: only torch is asked for new arrays, {given}")
            handle = 0 if stream is None else _stream_handle(stream)
        named["out"] = out
        if lse is not None:
            named["lse"] = lse
        if torch is not None and on_torch:
            for name, array in named.items():
                if not isinstance(array, torch.Tensor):
                    raise TypeError(f"{name} is a {type(array).__name__}, q a torch tensor")
        arrays = {name: view(name, array) for name, array in named.items()}
        ready = self._planned(arrays, options).ready({name: array.pointer for name, array in arrays.items()}, handle)
        self.latest = ready
        if key is not None:
            if len(self._ready) >= self.MAX_READY:
                self._ready.clear()
            # With its config, which the key knows by identity only.
            self._ready[key] = ready, chosen
        ready.enqueue()
        return (out, lse) if return_lse else out

    def _planned(self, arrays: dict[str, View], options: Options) -> Plan:
        """The plan for arrays of these shapes, strides and types, and addresses as aligned as these."""
        known = (each for name, array in arrays.items() for each in (name, array.shape, array.strides, array.dtype, array.device))
        key = (options, *known, *(array.pointer & 15 for array in arrays.values()))
        plan = self._plans.get(key)
        if plan is None:
            if options.kv_layout == "HND":
                arrays |= {name: _swapped(arrays[name]) for name in ("k", "v") if len(arrays[name].shape) == 4}
            elif options.kv_layout != "NHD":
                raise ValueError(f"kv_layout is {options.kv_layout!r}; expected NHD or HND")
            plan = _make_plan(dict(arrays), options, self._kernels)
            if len(self._plans) >= self.MAX_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        return plan


def _stream_handle(stream: Any) -> int:
    for attribute in ("cuda_stream", "ptr"):
        if isinstance(handle := getattr(stream, attribute, None), int):
            return handle
    try:
        return int(stream)
    except (TypeError, ValueError):
        raise TypeError(f"stream is a {type(stream).__name__}; expected a CUstream handle or an object with cuda_stream") from None


GENERATED = Attention(Generated())
attention = GENERATED.attention
