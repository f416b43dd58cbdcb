"""Measuring on the GPU at hand, through the driver API: read ceiling, one cell's problem with its float64 reference, and timing.

One timed launch: a delay that lets the host get ahead, an L2 flush, an event, the launch, an event. Implementations take turns, launch by
launch, so that a drifting clock or a neighbour on the memory favours none.
"""

from __future__ import annotations

import ctypes
import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal, Protocol

import ml_dtypes
import numpy as np

from .. import compiler, render
from ..attention import attention_launch
from ..backends import BackendError, Compiled, Launch
from ..backends.cuda import CudaBackend, DeviceArray, PreparedLaunch
from ..config import Config
from ..feature_inputs import page_table
from ..geometry import derive
from ..units import DTYPES
from .cells import OPERAND_BYTES, Cell
from .report import FLUSHES, Flush, Times

MIN_FLUSH_BYTES = 256 << 20
FLUSH_L2_MULTIPLE = 4
CEILING_BYTES = 4 << 30
CEILING_REPEATS = 15
# Loads in flight and steps of a thread's span: the ceiling is what the best of them reads.
CEILING_SPANS = ((2, 4), (4, 2), (4, 4), (4, 16), (8, 8))
THREADS = 256
VECTOR_BYTES = 16
VALUES_CHUNK = 512
SCORES_KEYS_PER_BLOCK = THREADS // 32
LATE_PERIOD = 12  # launches, delays and flushes included, that four timed ones take together
SLOW = 3.0  # an implementation this many times slower than the fastest gets SLOW_REPEATS timed launches
SLOW_REPEATS = 5


class Implementation(Protocol):
    """What can be timed on a problem. `output` is O of the last launch, [batch, q_len, heads, depth]; None: it computes nothing."""

    name: str

    def enqueue(self) -> None: ...

    def output(self) -> np.ndarray | None: ...


def _driver_release() -> str | None:
    """The driver's own version such as "580.95.05", from NVML, which every driver brings along."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        text = ctypes.create_string_buffer(96)
        if nvml.nvmlInit_v2() or nvml.nvmlSystemGetDriverVersion(text, len(text)):
            return None
        return text.value.decode()
    except (OSError, AttributeError, UnicodeDecodeError):
        return None


@cache
def _source() -> str:
    return resources.files("fa4gen.codegen.bench").joinpath("kernels.cu").read_text(encoding="utf-8")


class Gpu:
    """The GPU and what the benchmark does on it: kernels of its own, flushes, delays, timed launches. BackendUnavailable without one."""

    def __init__(self, backend: CudaBackend | None = None) -> None:
        self.backend = backend or CudaBackend(repeats=0)
        driver, device = self._driver_and_device()
        attributes = driver.CUdevice_attribute

        def attribute(name: str) -> int:
            status, value = driver.cuDeviceGetAttribute(getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{name}"), device)
            if int(status):
                raise BackendError(f"cuDeviceGetAttribute({name}) failed")
            return int(value)

        self.sms = attribute("MULTIPROCESSOR_COUNT")
        self.l2_bytes = attribute("L2_CACHE_SIZE")
        cuda = int(driver.cuDriverGetVersion()[1])
        self.info: dict[str, Any] = {
            "name": self.backend.device_name,
            "arch": self.backend.arch,
            "sms": self.sms,
            "l2_bytes": self.l2_bytes,
            "driver": _driver_release(),
            "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
        }
        self.flush_bytes = max(MIN_FLUSH_BYTES, -(-FLUSH_L2_MULTIPLE * self.l2_bytes >> 20) << 20)
        self._modules: dict[tuple[str, str | None], Compiled] = {}
        self._delays: dict[int, PreparedLaunch] = {}
        self._flushed = DeviceArray((self.flush_bytes,), np.uint8)
        self._flushed.fill(0)
        self._sink = DeviceArray((1,), np.uint32)
        self._read_flush = self._read_launch(self._flushed, 8, 8)
        self._events = (self.backend.event(), self.backend.event())

    @staticmethod
    def _driver_and_device() -> tuple[Any, Any]:
        from cuda.bindings import driver

        return driver, driver.cuDeviceGet(0)[1]

    def kernels(self, dtype: str = "bfloat16", kv_dtype: str | None = None) -> Compiled:
        """kernels.cu for operands of `dtype`, K and V of `kv_dtype` if that is given."""
        kinds = dtype, kv_dtype
        if kinds not in self._modules:
            choice = f"#define HALF {int(dtype == 'float16')}\n#define KV8 {int(kv_dtype is not None)}\n"
            module = compiler.compile_source(choice + _source(), self.backend.arch, "kernels.cu")
            self._modules[kinds] = Compiled(module.arch, module.ptx, module.cubin)
        return self._modules[kinds]

    def prepare(
        self,
        entry: str,
        grid: tuple[int, int, int],
        block: int,
        args: Sequence[Any],
        resident: Sequence[DeviceArray],
        dtype: str = "bfloat16",
        kv_dtype: str | None = None,
    ) -> PreparedLaunch:
        """A launch of one of kernels.cu's entries."""
        return self.backend.prepare(self.kernels(dtype, kv_dtype), Launch(entry, grid, (block, 1, 1), 0, list(args)), resident)

    def _read_launch(self, data: DeviceArray, loads: int, steps: int) -> PreparedLaunch:
        blocks = data.nbytes // (VECTOR_BYTES * THREADS * loads * steps)
        resident = (data, self._sink)
        return self.prepare(f"bench_read_{loads}x{steps}", (blocks, 1, 1), THREADS, [a.stand_in for a in resident], resident)

    def synchronize(self, what: str) -> None:
        """Waits for all enqueued work. Raises BackendError naming `what`."""
        self.backend.record(self._events[1])
        self.backend.wait(self._events[1], what)

    def flush(self, how: Flush) -> None:
        """Enqueues an L2 flush: "zero" writes zeros over it, which leaves it dirty; "read" reads other memory through it: clean."""
        if how == "zero":
            self._flushed.fill(0)
        else:
            self._read_flush.enqueue()

    def delay(self, seconds: float) -> None:
        """Enqueues a wait of at least `seconds`, rounded up to a power of two of microseconds."""
        nanoseconds = 1000 << max(0, math.ceil(math.log2(max(seconds, 1e-6) * 1e6)))
        if nanoseconds not in self._delays:
            self._delays[nanoseconds] = self.prepare("bench_delay", (1, 1, 1), 1, [np.uint32(nanoseconds)], ())
        self._delays[nanoseconds].enqueue()

    def timed(self, name: str, enqueue: Callable[[], None], *, flush: Flush | None, host_seconds: float) -> float:
        """Device seconds of what `enqueue` enqueues, which takes the host about host_seconds."""
        start, end = self._events
        self.delay(2 * host_seconds + 30e-6)
        if flush:
            self.flush(flush)
        self.backend.record(start)
        enqueue()
        self.backend.record(end)
        self.backend.wait(end, name)
        return self.backend.seconds_between(start, end)

    def read_ceiling(self) -> dict[str, float]:
        """10^9 bytes a second that plain 16-byte loads read, for each span; the median of several launches over random data."""
        data = DeviceArray((CEILING_BYTES // 2,), np.uint16)
        try:
            self.normal(data, seed=1)
            result = {}
            for loads, steps in CEILING_SPANS:
                launch = self._read_launch(data, loads, steps)
                seconds = [self.timed("read ceiling", launch.enqueue, flush=None, host_seconds=1e-5) for _ in range(CEILING_REPEATS)]
                result[f"{loads}x{steps}"] = round(data.nbytes / float(np.median(seconds)) * 1e-9, 1)
            return result
        finally:
            data.free()

    def normal(self, array: DeviceArray, *, seed: int, dtype: str = "bfloat16", kv_dtype: str | None = None) -> None:
        """Fills an array of `dtype`, or `kv_dtype`, with standard normal numbers, the same on every device for a seed."""
        entry, size = ("bench_normal", 2) if kv_dtype is None else ("bench_normal_kv", 1)
        args = [array.stand_in, np.uint64(array.nbytes // size), np.uint32(seed)]
        launch = self.prepare(entry, (16 * self.sms, 1, 1), THREADS, args, (array,), dtype, kv_dtype)
        launch.enqueue()
        self.synchronize("bench_normal")


class Problem:
    """Random q, k, v of a cell on the device, and O [batch, q_len, heads, depth] and LSE [batch, heads, q_len] of them in float64.

    dtype: "bfloat16" | "float16". The reference is computed on the device in float64 from the rounded operands.
    scales: k_scale and v_scale, [kv_heads] float32, where the cell has a kv_dtype.
    pages, table: k and v in pages, [pages, page_size, kv_heads, depth], and the pages of each sequence, where the cell has pages; sinks: a
    logit of each query head, where it has those. Raises BackendError.
    """

    def __init__(self, gpu: Gpu, cell: Cell, dtype: str, *, causal: bool, seed: int = 0) -> None:
        self.gpu, self.cell, self.dtype, self.causal = gpu, cell, dtype, causal
        self.scale = 1.0 / math.sqrt(cell.depth)
        self._arrays: list[DeviceArray] = []
        try:
            kind = DTYPES[dtype]
            kv_kind = kind if cell.kv_dtype is None else np.dtype(ml_dtypes.float8_e4m3fn)
            self.q = self.array((cell.batch, cell.q_len, cell.heads, cell.depth), kind)
            self.k = self.array((cell.batch, cell.keys, cell.kv_heads, cell.depth), kv_kind)
            self.v = self.array(self.k.stand_in.shape, kv_kind)
            for index, operand in enumerate((self.q, self.k, self.v)):
                gpu.normal(operand, seed=3 * seed + index + 11, dtype=dtype, kv_dtype=cell.kv_dtype if index else None)
            self.scales: dict[str, DeviceArray] = {}
            if cell.kv_dtype is not None:
                heads = np.arange(cell.kv_heads, dtype=np.float32)
                for name, values in (("k_scale", 0.75 + heads / 16), ("v_scale", 1.25 - heads / 16)):
                    self.scales[name] = self.array((cell.kv_heads,), np.float32)
                    self.scales[name].store(values)
            self.sinks = np.linspace(-2, 6, cell.heads, dtype=np.float32) if cell.sinks else None
            self.table = None if cell.page_size is None else page_table(cell.batch, cell.keys, cell.page_size)
            self.pages = None if self.table is None else (self._paged(self.k, self.table), self._paged(self.v, self.table))
            self.out, self.lse = self._reference()
        except BaseException:
            self.free()
            raise

    def array(self, shape: tuple[int, ...], dtype: Any) -> DeviceArray:
        """Device memory that is freed with the problem."""
        array = DeviceArray(shape, dtype)
        self._arrays.append(array)
        return array

    def free(self) -> None:
        """Frees every device array of the problem."""
        while self._arrays:
            self._arrays.pop().free()

    def _paged(self, array: DeviceArray, table: np.ndarray) -> DeviceArray:
        """K or V in pages; what lies past the last key is zero."""
        cell, page_size = self.cell, self.cell.page_size or 1
        pages = self.array((table.size, page_size, cell.kv_heads, cell.depth), array.stand_in.dtype)
        pages.fill(0)
        units = cell.kv_heads * cell.depth * OPERAND_BYTES[cell.kv_dtype] // VECTOR_BYTES
        sizes = (np.uint32(n) for n in (cell.keys, page_size, units))
        grid = (table.shape[1], cell.batch, 1)
        launch = self.gpu.prepare("bench_pages", grid, THREADS, [array.stand_in, pages.stand_in, table, *sizes], (array, pages), self.dtype)
        launch.enqueue()
        self.gpu.synchronize("bench_pages")
        launch.free()
        return pages

    def feature_arrays(self) -> dict[str, Any]:
        """The arguments of attention_launch that the cell's features ask for."""
        cell = self.cell
        arrays: dict[str, Any] = {name: array.stand_in for name, array in self.scales.items()}
        if self.table is not None:
            arrays |= {"block_table": self.table, "max_keys": cell.keys}
        if cell.key_lengths:
            arrays["key_lengths"] = np.full(cell.batch, cell.keys, np.int32)
        if self.sinks is not None:
            arrays["sinks"] = self.sinks
        return arrays

    def _reference(self) -> tuple[np.ndarray, np.ndarray]:
        cell, gpu = self.cell, self.gpu
        scores = DeviceArray((cell.batch * cell.heads * cell.q_len, cell.keys), np.float64)
        out = DeviceArray(self.q.stand_in.shape, np.float64)
        lse = DeviceArray((cell.batch, cell.heads, cell.q_len), np.float64)
        arrays = (self.q, self.k, self.v, scores, out, lse, *self.scales.values())
        q, k, v, scores_, out_, lse_, *factors = (a.stand_in for a in arrays)
        k_scale, v_scale = factors or (np.uint64(0), np.uint64(0))
        shape = np.array([cell.batch, cell.q_len, cell.heads, cell.kv_heads, cell.keys, cell.depth], np.uint32).tobytes()
        heads, scale, chunk = (cell.kv_heads, cell.batch), np.float64(self.scale), np.uint32(VALUES_CHUNK)
        sinks = np.zeros(cell.heads, np.float32) if self.sinks is None else self.sinks
        rules = (np.uint32(cell.window or 0), np.float64(cell.softcap or 0), np.uint32(cell.sinks), sinks)
        steps: list[tuple[str, tuple[int, int, int], int, list[Any]]] = [
            ("bench_scores", (-(-cell.keys // SCORES_KEYS_PER_BLOCK), *heads), THREADS, [q, k, scores_, shape, scale, k_scale]),
            ("bench_softmax", (len(scores_), 1, 1), THREADS, [scores_, lse_, shape, np.uint32(self.causal), *rules]),
            ("bench_values", (-(-cell.keys // VALUES_CHUNK), *heads), cell.depth, [scores_, v, out_, shape, chunk, v_scale]),
        ]
        try:
            out.fill(0)
            for entry, grid, block, args in steps:
                gpu.prepare(entry, grid, block, args, arrays, self.dtype, cell.kv_dtype).enqueue()
            gpu.synchronize("the float64 reference")
            return out.fetch(), lse.fetch()
        finally:
            for array in (scores, out, lse):
                array.free()


def relative_error(out: np.ndarray, expected: np.ndarray) -> float:
    """||out - expected|| / ||expected||, infinity where anything is NaN; the absolute distance where `expected` is all zeros."""
    difference = float(np.linalg.norm(out.astype(np.float64) - expected))
    norm = float(np.linalg.norm(expected))
    error = difference / norm if norm else difference
    return error if math.isfinite(error) else math.inf


def own_sources(config: Config, arch: str) -> tuple[str, str | None]:
    """attention.cu of a config, and its stream variant (the same loads, no arithmetic), None where the template has none."""
    normal = render.render(config, arch)["attention.cu"]
    stream = render.render_stream(config, arch)
    return normal, stream if stream != normal else None


class Own:
    """A config's attention kernel on a problem: `name` is "fa4gen", or "stream" for the variant that only loads."""

    def __init__(self, problem: Problem, config: Config, name: str, source: str) -> None:
        self.name, self.config, self.problem = name, config, problem
        gpu, cell = problem.gpu, problem.cell
        module = compiler.compile_source(source, gpu.backend.arch, "attention.cu")
        self._out = problem.array(problem.q.stand_in.shape, DTYPES[config.out_dtype])
        self._lse = problem.array((cell.batch, cell.heads, cell.q_len), np.float32)
        resident = (problem.q, *(problem.pages or (problem.k, problem.v)), self._out, self._lse, *problem.scales.values())
        q, k, v, out, lse = (array.stand_in for array in resident[:5])
        geo = derive(config, gpu.backend.arch)
        # A config may fix how the keys are split; the fastest way is what is measured otherwise.
        split: Literal["auto"] | None = None if config.split else "auto"
        options: dict[str, Any] = {"scale": problem.scale, "ctas": gpu.sms, "partition_keys": split} | problem.feature_arrays()
        launch = attention_launch(config, geo, q, k, v, out, lse, **options)
        self.grid = launch.grid
        self.resources = module.kernels[launch.entry]
        self._prepared = gpu.backend.prepare(Compiled(module.arch, module.ptx, module.cubin), launch, resident)
        self.enqueue = self._prepared.enqueue
        # Poison: what the kernel does not write reads as NaN.
        self._out.fill(0xFF)
        self._lse.fill(0xFF)

    def output(self) -> np.ndarray | None:
        return self._out.fetch() if self.name != "stream" else None

    def lse_error(self) -> float:
        """Largest |LSE - reference| over the rows that see a key; infinity where a row without one is not -inf, or anything is NaN."""
        ours, expected = self._lse.fetch().astype(np.float64), self.problem.lse
        empty = np.isneginf(expected)
        if not np.isneginf(ours[empty]).all():
            return math.inf
        error = np.abs(ours[~empty] - expected[~empty])
        worst = float(error.max()) if error.size else 0.0
        return worst if math.isfinite(worst) else math.inf

    def free(self) -> None:
        """Frees the launch's own copies."""
        self._prepared.free()


@dataclass(frozen=True)
class Checked:
    """An implementation that ran: its error (None: it has no output), and the host's seconds for one launch."""

    implementation: Implementation
    error: float | None
    host_seconds: float


def _times(seconds: Sequence[float]) -> Times:
    low, middle, high = (round(float(x) * 1e6, 3) for x in np.percentile(np.array(seconds), (10, 50, 90)))
    return Times(middle, low, high, len(seconds))


def check(problem: Problem, implementation: Implementation) -> Checked:
    """Runs once for the result, compares it with the reference, and twice more to warm up."""
    implementation.enqueue()
    problem.gpu.synchronize(implementation.name)
    out = implementation.output()
    host = math.inf
    for _ in range(2):
        start = time.perf_counter()
        implementation.enqueue()
        host = min(host, time.perf_counter() - start)
        problem.gpu.synchronize(implementation.name)
    return Checked(implementation, None if out is None else relative_error(out, problem.out), host)


def time_all(gpu: Gpu, checked: Iterable[Checked], *, repeats: int, flushes: Sequence[Flush] = FLUSHES) -> list[dict[Flush, Times]]:
    """Times of each implementation under each flush, in the order given, measured in turns.

    repeats: launches of each under each flush; those SLOW times slower than the fastest get fewer.
    """
    items = list(checked)
    # Every fourth timed launch of a stream starts about 0.8 us late, whatever it runs (bench/LOG.md 19). Without launches in between that
    # number at random, the late ones would always be the same implementation's.
    between = random.Random(0)

    def once(item: Checked, flush: Flush) -> float:
        name = item.implementation.name
        for _ in range(between.randrange(LATE_PERIOD)):
            gpu.delay(1e-6)
        return gpu.timed(name, item.implementation.enqueue, flush=flush, host_seconds=item.host_seconds)

    first = [once(item, flushes[0]) for item in items]
    fastest = min(first, default=0.0)
    rounds = [repeats if seconds <= SLOW * fastest else min(repeats, SLOW_REPEATS) for seconds in first]
    samples: list[dict[Flush, list[float]]] = [{flush: [] for flush in flushes} for _ in items]
    for turn in range(repeats):
        # Another one starts each round, so that nobody always runs after the same neighbour.
        for place in range(len(items)):
            index = (turn + place) % len(items)
            if turn < rounds[index]:
                for flush in flushes if turn % 2 == 0 else reversed(flushes):
                    samples[index][flush].append(once(items[index], flush))
    return [{flush: _times(seconds) for flush, seconds in sample.items()} for sample in samples]
