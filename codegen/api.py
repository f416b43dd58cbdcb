"""`fa4gen.attention`: one call on the arrays of any framework with DLPack.

What a call needs beyond its pointers - config, kernel, grid, tensor map shapes, workspace sizes - is a plan, made once for each
combination of shapes, strides and types. A later call looks its plan up, writes pointers and launches: it allocates nothing and waits for
nothing, so it can be captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import ml_dtypes
import numpy as np

from . import compiler
from .attention import Workspace, attention_entry_info, attention_launch, entry_config
from .backends import BackendError, Compiled, Launch
from .config import Config, ConfigError, load_config, parse_config
from .emulator import TensorMap, Uninitialized
from .geometry import derive
from .render import render
from .units import DTYPES

if TYPE_CHECKING:
    from .driver import Device

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
    # -1: the producer need not wait, the launch goes into the caller's stream.
    kind, index = array.__dlpack_device__()
    on_gpu = int(kind) == _DLPACK_CUDA
    capsule = array.__dlpack__(stream=-1) if on_gpu else array.__dlpack__()
    tensor = ctypes.cast(_capsule_pointer(capsule, b"dltensor"), ctypes.POINTER(_DLTensor)).contents
    known = _DLPACK_DTYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if known is None:
        raise TypeError(f"{name} has DLPack type {tensor.code} of {tensor.bits} bits, which no kernel takes")
    shape = tuple(tensor.shape[: tensor.ndim])
    dense = (math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    strides = tuple(tensor.strides[: tensor.ndim] if tensor.strides else dense)
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
    exact: bool,
    arch: str,
    page_list: bool = False,
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
    expected_shapes: dict[str, tuple[int, ...]] = {"seqused_k": (batch,), "sinks": (heads,), "k_scale": (kv_heads,), "v_scale": (kv_heads,)}
    expected_shapes |= {"out": q.shape, "lse": (batch, heads, q.shape[1]) if starts is None else (heads, q.shape[0])}
    for name, shape in expected_shapes.items():
        if name in arrays and arrays[name].shape != shape:
            raise ValueError(f"{name} has shape {arrays[name].shape}; expected {shape}")
    for name, array in arrays.items():
        if name not in ("k", "v") and array.strides != _contiguous(array):
            raise ValueError(f"{name} has strides of {array.strides} elements; expected a contiguous array")
    fp8 = k.dtype == "float8_e4m3fn"
    for name in ("k_scale", "v_scale"):
        if (name in arrays) != fp8:
            raise ValueError(f"{name} is {'missing: k and v are float8_e4m3fn' if fp8 else f'given, but k and v are {k.dtype}'}")
    if options.num_splits is not None and options.split_size is not None:
        raise ValueError("num_splits and split_size are both given; one decides the other")
    for name in ("num_splits", "split_size", "window", "max_seqlen_q"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; expected at least 1")


def _contiguous(array: View) -> tuple[int, ...]:
    """Strides of a contiguous array of that shape, as it has them along axes of one element."""
    steps = (math.prod(array.shape[axis + 1 :]) for axis in range(len(array.shape)))
    return tuple(have if extent == 1 else step for have, step, extent in zip(array.strides, steps, array.shape, strict=True))


def _place(array: View) -> str:
    return "the host" if array.device < 0 else f"CUDA device {array.device}"


def _swapped(array: View) -> View:
    """[.., kv_heads, keys, d] as [.., keys, kv_heads, d]."""
    a, b, c, d = array.shape
    s, t, u, w = array.strides
    return View(array.pointer, (a, c, b, d), (s, u, t, w), array.dtype, array.device)


def plan_launch(
    arrays: Mapping[str, View],
    stand_ins: Mapping[str, np.ndarray],
    options: Options,
    arch: str,
    ctas: int | None,
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
        *(None if table is None else k.shape[1], "seqused_k" in arrays, "cu_seqlens_q" in arrays),
    )
    listed = "page_places" in arrays
    if config is None:
        config = choose_config(*asked, options.split_size is not None and _supports_exact(arch), arch, listed)
    else:
        has = (
            *(config.ov_depth, config.dtype, config.kv_dtype or config.dtype, config.out_dtype, config.mask == "causal"),
            *(config.window, config.softcap, config.sinks, config.page_size, config.key_lengths, config.ragged_queries),
            config.page_list,
        )
        names = (
            *("q's head dim", "q's dtype", "k's dtype", "out's dtype", "causal", "window", "softcap", "sinks"),
            *("block_table (page size)", "seqused_k", "cu_seqlens_q", "page_places"),
        )
        for name, call, fixed in zip(names, (*asked, listed), has, strict=True):
            if call != fixed:
                raise ValueError(f"{name}: the call has {call}, config {config.name} has {fixed}")
        if arch not in config.arch:
            raise ValueError(f"config {config.name} is for {', '.join(config.arch)}, not for {arch}")
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


def _compiled(config: Config, arch: str) -> Compiled:
    module = compiler.compile_source(render(config, arch)["attention.cu"], arch, "attention.cu")
    return Compiled(arch, module.ptx, module.cubin)


# --- on a GPU ------------------------------------------------------------------------------------------------------------------


class Plan:
    """A launch whose parameters lie packed in host memory; `enqueue` writes this call's pointers into it and launches.

    Tensor maps are encoded again only for addresses not seen lately.
    """

    MAPS_KEPT = 512

    def __init__(self, device: Device, compiled: Compiled, launch: Launch, arguments: list[str]) -> None:
        from . import driver

        self.device = device
        self._launch = driver.KernelLaunch(device, compiled, launch)
        self._table = (ctypes.c_void_p * len(arguments))()
        self._keep: list[Any] = []
        self._maps: list[tuple[int, str, TensorMap, dict[int, Any]]] = []
        self._pointers: list[tuple[str, Any]] = []
        self.workspace: list[tuple[str, int]] = []
        self._number: Any = None
        inverse = {kernel: call for call, kernel in _EXTRAS.items()} | {"lse": "lse"}
        for index, (name, value) in enumerate(zip(arguments, launch.args, strict=True)):
            argument = value.array if isinstance(value, Uninitialized) else value
            if isinstance(argument, TensorMap):
                self._maps.append((index, _MAPS[name], argument, {}))
                continue
            if isinstance(argument, np.ndarray):
                cell: Any = ctypes.c_uint64(0)
                if name in inverse:
                    self._pointers.append((inverse[name], cell))
                else:
                    self.workspace.append((name, argument.nbytes))
                    self._pointers.append((name, cell))
            elif name == "launch":
                cell = self._number = ctypes.c_uint32(0)
            else:
                raw = np.asarray(argument).tobytes()
                cell = ctypes.create_string_buffer(raw, len(raw))
            self._keep.append(cell)
            self._table[index] = ctypes.addressof(cell)
        # A map's stand-in is planned with; what is encoded are its numbers.
        self._maps = [(index, name, driver.without_array(tensor_map), kept) for index, name, tensor_map, kept in self._maps]

    def enqueue(self, pointers: dict[str, int], stream: int) -> None:
        """pointers: address of each array of the call, by its name; lse may be 0 for the workspace's own."""
        from . import driver

        with driver.LOCK:
            space = self.device.workspace(stream)
            for name, nbytes in self.workspace:
                pointers[name] = space.reserve(name, nbytes)
            table = self._table
            for index, name, tensor_map, kept in self._maps:
                address = pointers[name]
                encoded = kept.get(address)
                if encoded is None:
                    if len(kept) >= self.MAPS_KEPT:
                        kept.clear()
                    encoded = kept[address] = driver.encode(tensor_map, address)
                table[index] = encoded.address
            for name, cell in self._pointers:
                cell.value = pointers[name]
            if self._number is not None:
                self._number.value = space.next_number()
            self._launch.enqueue(table, stream)


_plans: dict[tuple[Any, ...], Plan] = {}
MAX_PLANS = 4096
_plans_lock = threading.Lock()


def _make_plan(named: Mapping[str, Any], options: Options) -> Plan:
    from . import driver

    arrays = {name: view(name, array) for name, array in named.items()}
    if options.kv_layout == "HND":
        arrays |= {name: _swapped(arrays[name]) for name in ("k", "v") if len(arrays[name].shape) == 4}
    elif options.kv_layout != "NHD":
        raise ValueError(f"kv_layout is {options.kv_layout!r}; expected NHD or HND")
    _check(arrays, options)
    if arrays["q"].device < 0:
        raise ValueError("q is on the host; expected arrays on a CUDA device, or numpy arrays for the emulator")
    device = driver.device(arrays["q"].device)
    # A call without return_lse has its LSE in the workspace.
    if "lse" not in arrays:
        q = arrays["q"].shape
        shape = (q[0], q[2], q[1]) if len(q) == 4 else (q[1], q[0])
        arrays["lse"] = View(0, shape, tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape))), "float32", arrays["q"].device)
    stand_ins = {name: array.stand_in() for name, array in arrays.items()}
    config, launch, arguments = plan_launch(arrays, stand_ins, options, device.arch, device.sms)
    plan = Plan(device, _compiled(config, device.arch), launch, arguments)
    if "lse" not in named:
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


def _emulate(named: dict[str, Any], options: Options) -> None:
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
    config, launch, _ = plan_launch(arrays, named, options, arch, None, np.zeros)
    outcome = EmulatorBackend().run(_compiled(config, arch), launch)
    if outcome.hazards:
        raise BackendError(f"{launch.entry}: {outcome.hazards[0].kind}: {outcome.hazards[0].message}")


# --- the call ------------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _loaded(config: Config | str) -> Config:
    return load_config(config) if isinstance(config, str) else config


def attention(
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

    q: [batch, q_len, q_heads, d], or [total_q, q_heads, d] with cu_seqlens_q; bfloat16 or float16, contiguous; d is 64, 128, 256 or 512.
    k, v: [batch, keys, kv_heads, d], or pages [pages, page, kv_heads, d] with block_table; kv_layout "HND" swaps their middle axes. q's
    dtype, or float8_e4m3fn with k_scale and v_scale. d is contiguous, other strides are multiples of 16 bytes.
    All arrays are of one framework with DLPack and on one GPU. numpy arrays run on the emulator, for tests: seconds, not microseconds.

    config: a Config, or its name or file; default: generated from what the call asks.
    block_table: [batch, pages] int32, pages of each sequence. seqused_k: [batch] int32, keys of each sequence. Both are read on the device:
    what they hold is not checked, an entry of block_table past a sequence's end is not read, and a length beyond the keys counts as all.
    page_places: as block_table, which then lists chosen pages (block-sparse): the place of each in its sequence, ascending; a place at or
    past the sequence's end (2^31 - 1, say) ends the list. Only listed pages are read. seqused_k counts the whole sequence, and causal
    and window go by it and by the places.
    cu_seqlens_q: [batch + 1] int32, first query of each sequence and the end; max_seqlen_q: the most queries of a sequence.
    causal: query i of n sees keys <= keys - n + i. window: and only the last `window` of them. softcap: s = softcap tanh(s / softcap).
    sinks: [q_heads] float32, a logit of each head that takes part in the softmax without a value. scale: default 1 / sqrt(d).
    k_scale, v_scale: [kv_heads] float32.
    num_splits: partitions of the keys that CTAs share out. split_size: keys of a partition instead, a multiple of the key tile, which
    makes a sequence's result the same bits in any batch. Neither: as many as are expected to finish first.
    out: written instead of a new array (needed where the framework is not torch); its dtype may be bfloat16, float16 or float32. A pair
    (out, lse) with return_lse. lse: [batch, q_heads, q_len], or [q_heads, total_q], float32, natural logarithm.
    stream: a CUstream handle or an object with cuda_stream or ptr; default: torch's current stream, else the default stream.

    After the first call of its shapes a call neither allocates (torch's new outputs aside) nor waits, so it can be captured in a CUDA
    graph. Launches in one stream share a workspace: replays of graphs captured in one stream must not overlap.
    Raises TypeError and ValueError naming the argument, RuntimeError for the GPU and its driver; nothing is launched then.
    """
    named = {"q": q, "k": k, "v": v}
    if block_table is not None:
        named["block_table"] = block_table
    if page_places is not None:
        named["page_places"] = page_places
    if seqused_k is not None:
        named["seqused_k"] = seqused_k
    if cu_seqlens_q is not None:
        named["cu_seqlens_q"] = cu_seqlens_q
    if sinks is not None:
        named["sinks"] = sinks
    if k_scale is not None:
        named["k_scale"] = k_scale
    if v_scale is not None:
        named["v_scale"] = v_scale
    chosen = None if config is None else _loaded(config)
    torch = sys.modules.get("torch")
    on_torch = torch is not None and isinstance(q, torch.Tensor)
    lse = None
    if return_lse and isinstance(out, tuple):
        out, lse = out
    if isinstance(q, np.ndarray):
        options = Options(chosen, causal, window, softcap, scale, num_splits, split_size, max_seqlen_q, kv_layout)
        if stream is not None:
            raise ValueError("stream is given, but numpy arrays run on the emulator")
        if out is None:
            out = np.empty(q.shape, q.dtype if chosen is None else _DTYPES[chosen.out_dtype])
        if lse is None:
            lse = np.empty((q.shape[0], q.shape[2], q.shape[1]) if q.ndim == 4 else (*q.shape[1::-1],), np.float32)
        _emulate(named | {"out": out, "lse": lse}, options)
        return (out, lse) if return_lse else out
    if torch is not None and on_torch:
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype if chosen is None else getattr(torch, chosen.out_dtype), device=q.device)
        if return_lse and lse is None:
            shape = (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0])
            lse = torch.empty(shape, dtype=torch.float32, device=q.device)
        handle = torch._C._cuda_getCurrentRawStream(q.get_device()) if stream is None and q.is_cuda else stream
    else:
        if out is None or (return_lse and lse is None):
            raise ValueError(
                f"out is missing: only torch is asked for new arrays, q is a {type(q).__name__}; with return_lse give (out, lse)"
            )
        handle = 0 if stream is None else stream
    named["out"] = out
    if lse is not None:
        named["lse"] = lse
    pointers: dict[str, int] = {}
    key: list[Any] = [chosen, causal, window, softcap, scale, num_splits, split_size, max_seqlen_q, kv_layout]
    if on_torch:
        try:
            for name, array in named.items():
                pointers[name] = array.data_ptr()
                # Alignment is checked with the plan, so a key has it.
                key += (name, array.shape, array.stride(), array.dtype, array.get_device(), pointers[name] & 15)
        except AttributeError:
            raise TypeError(f"{name} is a {type(array).__name__}, q a torch tensor") from None
    else:
        for name, array in named.items():
            seen = view(name, array)
            pointers[name] = seen.pointer
            key += (name, seen.shape, seen.strides, seen.dtype, seen.device, seen.pointer & 15)
    frozen = tuple(key)
    plan = _plans.get(frozen)
    if plan is None:
        options = Options(chosen, causal, window, softcap, scale, num_splits, split_size, max_seqlen_q, kv_layout)
        plan = _make_plan(named, options)
        with _plans_lock:
            if len(_plans) >= MAX_PLANS:
                _plans.clear()
            _plans[frozen] = plan
    plan.enqueue(pointers, handle if isinstance(handle, int) else _stream_handle(handle))
    return (out, lse) if return_lse else out


def _stream_handle(stream: Any) -> int:
    for attribute in ("cuda_stream", "ptr"):
        if isinstance(handle := getattr(stream, attribute, None), int):
            return handle
    try:
        return int(stream)
    except (TypeError, ValueError):
        raise TypeError(f"stream is a {type(stream).__name__}; expected a CUstream handle or an object with cuda_stream") from None
