"""fa4gen.attention: on numpy arrays through the emulator, its errors, the plans it makes; with a GPU and torch, against float64."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fake_driver import DeviceLike, FakeDriver, Seen, require_gcc

import fa4gen
from fa4gen.codegen import api, driver, reference
from fa4gen.codegen.attention import attention_entry_info, attention_launch, key_map, query_map, tiling
from fa4gen.codegen.backends import Compiled
from fa4gen.codegen.geometry import derive

BF16 = ml_dtypes.bfloat16
E4M3 = ml_dtypes.float8_e4m3fn
OUT_BOUND = 4e-3


def problem(batch: int = 2, q_len: int = 2, keys: int = 130, group: int = 4, kv_heads: int = 1, depth: int = 64, dtype: Any = BF16) -> Any:
    rng = np.random.default_rng(batch * keys + q_len)
    shapes = ((batch, q_len, kv_heads * group, depth), (batch, keys, kv_heads, depth), (batch, keys, kv_heads, depth))
    return tuple(rng.standard_normal(shape, np.float32).astype(dtype) for shape in shapes)


def close(out: Any, lse: Any, expected: Any) -> None:
    ours = np.asarray(out).astype(np.float64)
    assert np.linalg.norm(ours - expected[0]) <= OUT_BOUND * np.linalg.norm(expected[0])
    np.testing.assert_allclose(lse, expected[1], rtol=2.0**-20, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "dtype"),
    [({}, BF16), ({"causal": True}, np.float16), ({"num_splits": 3}, BF16), ({"split_size": 64, "causal": True, "scale": 0.3}, BF16)],
)
def test_numpy_arrays_run_on_the_emulator(options: dict[str, Any], dtype: Any) -> None:
    q, k, v = problem(dtype=dtype)
    out, lse = fa4gen.attention(q, k, v, return_lse=True, **options)
    assert out.dtype == q.dtype
    close(out, lse, reference.attention(q, k, v, scale=options.get("scale", 64**-0.5), causal=options.get("causal", False)))


@pytest.mark.parametrize("pages", [False, True])
def test_keys_and_values_may_have_eight_bits(pages: bool) -> None:
    q, k, v = problem(kv_heads=2, keys=64)
    arrays: dict[str, Any] = {"k": k.astype(E4M3), "v": v.astype(E4M3)}
    rng = np.random.default_rng(5)
    scales = {name: rng.uniform(0.5, 2, (2, 2) if pages else 2).astype(np.float32) for name in ("k_scale", "v_scale")}
    table = {"block_table": np.array([[1], [0]], np.int32)} if pages else {}
    out, lse = fa4gen.attention(q, **arrays, **scales, **table, return_lse=True)
    close(out, lse, reference.attention(q, **arrays, **scales, **table, scale=64**-0.5, causal=False))


def test_a_shipped_config_decides_the_output_type() -> None:
    q, k, v = problem(depth=128, keys=64)
    out = np.empty(q.shape, BF16)
    assert fa4gen.attention(q, k, v, config="d128_sk", out=out, causal=fa4gen_mask("d128_sk")) is out
    assert np.isfinite(out.astype(np.float32)).all()


def fa4gen_mask(name: str) -> bool:
    from fa4gen.codegen.config import load_config

    return load_config(name).mask == "causal"


def replaced(name: str, change: Any) -> Any:
    def make(arrays: dict[str, Any]) -> None:
        arrays[name] = change(arrays[name])

    return make


def eight_bits(**given: Any) -> Any:
    """K and V in 8 bits, with scales but for what is `given`; None leaves an argument out."""

    def make(arrays: dict[str, Any]) -> None:
        scales = {name: np.ones(2, np.float32) for name in ("k_scale", "v_scale")}
        arrays |= {name: arrays[name].astype(E4M3) for name in ("k", "v")} | scales | given
        for name in [name for name, value in given.items() if value is None]:
            del arrays[name]

    return make


@pytest.mark.parametrize(
    ("argument", "change", "kind"),
    [
        ("q", replaced("q", lambda a: a[0]), ValueError),
        ("q", replaced("q", lambda a: a[:, :, :, ::2]), ValueError),
        ("q", replaced("q", lambda a: a.astype(np.float32)), TypeError),
        ("q", replaced("q", lambda a: a.astype(np.complex64)), TypeError),
        ("q", replaced("q", lambda a: np.concatenate([a, a[:, :, :1]], 2)), ValueError),
        ("k", replaced("k", lambda a: a[:1]), ValueError),
        ("k", replaced("k", lambda a: a[..., :32]), ValueError),
        ("k", replaced("k", lambda a: a.tolist()), TypeError),
        ("v", replaced("v", lambda a: a[:, :-1]), ValueError),
        ("v", replaced("v", lambda a: a.astype(np.float16)), TypeError),
        ("out", replaced("out", lambda a: a[:, :1]), ValueError),
        ("out", replaced("out", lambda a: a.astype(np.int32)), TypeError),
        ("seqused_k", lambda a: a.update(seqused_k=np.zeros(2, np.int64)), TypeError),
        ("seqused_k", lambda a: a.update(seqused_k=np.zeros(3, np.int32)), ValueError),
        ("block_table", lambda a: a.update(block_table=np.zeros(2, np.int32)), ValueError),
        ("cu_seqlens_q", lambda a: a.update(q=a["q"][0], out=a["out"][0], cu_seqlens_q=np.zeros(1, np.int32), max_seqlen_q=1), ValueError),
        ("max_seqlen_q", lambda a: a.update(max_seqlen_q=1), ValueError),
        ("sinks", lambda a: a.update(sinks=np.zeros(3, np.float32)), ValueError),
        ("k_scale", lambda a: a.update(k_scale=np.ones(2, np.float32)), ValueError),
        ("k_scale", eight_bits(k_scale=None), ValueError),
        ("v_scale", eight_bits(v_scale=None), ValueError),
        ("k_scale", eight_bits(k_scale=np.ones(4, np.float32)), ValueError),
        ("k_scale", eight_bits(k_scale=np.ones((2, 2), np.float32), v_scale=np.ones((2, 2), np.float32)), ValueError),
        ("v_scale", eight_bits(v_scale=np.ones(2)), TypeError),
        ("v_scale", eight_bits(block_table=np.zeros((2, 1), np.int32), v_scale=np.ones((2, 2), np.float32)), ValueError),
        ("k's dtype", eight_bits(config="d64"), ValueError),
        ("v", replaced("k", lambda a: a.astype(E4M3)), TypeError),
        ("window", lambda a: a.update(window=5), ValueError),
        ("num_splits", lambda a: a.update(num_splits=0), ValueError),
        ("num_splits", lambda a: a.update(num_splits=2, split_size=64), ValueError),
        ("split_size", lambda a: a.update(split_size=65), ValueError),
        ("kv_layout", lambda a: a.update(kv_layout="NCHW"), ValueError),
        ("stream", lambda a: a.update(stream=7), ValueError),
        ("causal", lambda a: a.update(config="d64", causal=not fa4gen_mask("d64")), ValueError),
        ("head dim", lambda a: a.update(config="d512", causal=fa4gen_mask("d512")), ValueError),
    ],
)
def test_what_does_not_fit_is_refused_by_name(argument: str, change: Any, kind: type[Exception]) -> None:
    q, k, v = problem(group=2, kv_heads=2)
    arrays: dict[str, Any] = {"q": q, "k": k, "v": v, "out": np.full(q.shape, 7, BF16)}
    out = arrays["out"]
    change(arrays)
    with pytest.raises(kind) as refused:
        fa4gen.attention(**arrays)
    assert argument in str(refused.value)
    assert "\n" not in str(refused.value)
    assert (out == 7).all()


def test_a_plan_touches_no_memory_of_its_arrays() -> None:
    """A cache of 4 TB, planned on a machine that has not so much."""
    shape = (1, 1 << 32, 4, 128)
    array = api.View(0, shape, (1 << 41, 512, 128, 1), "bfloat16", 0).stand_in()
    assert array.shape == shape
    assert array.strides == (1 << 42, 1024, 256, 2)


def test_a_plan_of_strided_keys_keeps_their_type() -> None:
    """What has room between rows has a base of bytes; its tensor map is of elements all the same."""
    for dtype in ("bfloat16", "float16"):
        keys = api.View(0, (3, 7, 2, 64), (7 * 2 * 64, 64, 7 * 64, 1), dtype, 0).stand_in()
        tensor_map = key_map(keys, 1, 64)
        assert np.dtype(tensor_map.dtype).name == dtype
        assert tensor_map.strides == (7 * 2 * 64 * 2, 7 * 64 * 2, 16, 64 * 2)


def test_axes_of_one_element_may_have_any_stride() -> None:
    """[batch, heads, 1, d] with its middle axes swapped is contiguous, with a stride of d along the one query."""
    queries = api.View(0, (2, 1, 8, 64), (8 * 64, 64, 64, 1), "float16", 0)
    assert queries.strides == api._contiguous(queries)
    assert query_map(queries.stand_in(), 2, tiling(32, 1, 4), 64, 128).strides == (8 * 64 * 2, 4 * 64 * 2, 8 * 64 * 2, 64 * 2)


def test_a_plan_has_no_workspace() -> None:
    """Terabytes of partitions are planned: the driver is who says that they do not fit."""
    q = api.View(16, (512, 1, 8192, 512), (8192 * 512, 8192 * 512, 512, 1), "bfloat16", 0)
    k = api.View(16, (512, 4096, 8192, 512), (4096 * 8192 * 512, 8192 * 512, 512, 1), "bfloat16", 0)
    out_lse = {"out": q, "lse": api.View(16, (512, 8192, 1), (8192, 1, 1), "float32", 0)}
    arrays = {"q": q, "k": k, "v": k, **out_lse}
    stand_ins = {name: array.stand_in() for name, array in arrays.items()}
    _, launch, names = api.plan_launch(arrays, stand_ins, api.Options(num_splits=64), "sm_90a", 132)
    assert launch.args[names.index("partial_o")].array.nbytes == 16 * 512 * 8192 * 8 * 512 * 4


def test_dlpack_is_read_as_it_is() -> None:
    array = np.arange(24, dtype=np.float32).reshape(4, 6)[1:, ::2]
    seen = api.view("q", array)
    assert (seen.shape, seen.strides, seen.dtype, seen.device) == ((3, 3), (6, 2), "float32", -1)
    assert seen.pointer == array.ctypes.data


def test_importing_the_package_loads_no_kernel_machinery() -> None:
    loaded = "import fa4gen, sys; print(*[name for name in ('numpy', 'jinja2', 'pydantic', 'cuda') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True).stdout.split() == []


# --- with a GPU and torch ------------------------------------------------------------------------------------------------------


def on_gpu(*arrays: Any) -> Any:
    torch = pytest.importorskip("torch")
    return [torch.from_numpy(array.astype(np.float32)).cuda().to(torch.bfloat16) for array in arrays]


@pytest.mark.gpu
@pytest.mark.parametrize("depth", api.DEPTHS)
@pytest.mark.parametrize(("q_len", "group", "keys"), [(1, 8, 1), (1, 8, 4097), (4, 6, 700), (17, 1, 300)])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"num_splits": 5}, {"split_size": 256, "causal": True}], ids=str)
def test_gpu_against_float64(depth: int, q_len: int, group: int, keys: int, options: dict[str, Any]) -> None:
    q, k, v = problem(3, q_len, keys, group, 2, depth)
    out, lse = fa4gen.attention(*on_gpu(q, k, v), return_lse=True, **options)
    close(out.float().cpu(), lse.cpu(), reference.attention(q, k, v, scale=depth**-0.5, causal=options.get("causal", False)))


@pytest.mark.gpu
@pytest.mark.parametrize("depth", api.DEPTHS)
@pytest.mark.parametrize(("q_len", "group", "pages"), [(1, 8, 60), (4, 6, 9), (4, 8, 9)])
@pytest.mark.parametrize("of_pages", [False, True])
def test_gpu_takes_keys_and_values_of_eight_bits(depth: int, q_len: int, group: int, pages: int, of_pages: bool) -> None:
    torch = pytest.importorskip("torch")
    q, k, v = problem(3, q_len, pages * 64, group, 2, depth)
    eight = {name: array.astype(E4M3).reshape(3 * pages, 64, 2, depth) for name, array in (("k", k), ("v", v))}
    rng = np.random.default_rng(depth)
    scales = {name: rng.uniform(0.1, 3, (3 * pages, 2) if of_pages else 2).astype(np.float32) for name in ("k_scale", "v_scale")}
    table = rng.permutation(3 * pages).astype(np.int32).reshape(3, pages)
    on_device = {name: torch.from_numpy(array).cuda() for name, array in scales.items()} | {"block_table": torch.from_numpy(table).cuda()}
    for name, array in eight.items():
        on_device[name] = torch.from_numpy(array.view(np.uint8)).cuda().view(torch.float8_e4m3fn)
    expected = reference.attention(q, **eight, **scales, block_table=table, scale=depth**-0.5, causal=True)
    for options in ({}, {"num_splits": 3}, {"split_size": 320}):
        out, lse = fa4gen.attention(*on_gpu(q), **on_device, causal=True, return_lse=True, **options)
        close(out.float().cpu(), lse.cpu(), expected)


@pytest.mark.gpu
def test_gpu_graph_replays_give_the_same_bits() -> None:
    torch = pytest.importorskip("torch")
    q, k, v = on_gpu(*problem(2, 1, 5000, 8, 2, 128))
    eager = fa4gen.attention(q, k, v, num_splits=8)
    out = torch.zeros_like(q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fa4gen.attention(q, k, v, num_splits=8, out=out)
        fa4gen.attention(q, k, v, num_splits=40, out=torch.empty_like(q))
    for _ in range(3):
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, eager)
    assert torch.equal(fa4gen.attention(q, k, v, num_splits=8), eager)


@pytest.mark.gpu
def test_gpu_streams_have_workspaces_of_their_own() -> None:
    torch = pytest.importorskip("torch")
    inputs = [on_gpu(*problem(2, 1, keys, 8, 2, 256)) for keys in (5000, 6001)]
    expected = [fa4gen.attention(*arrays, num_splits=20) for arrays in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    results: list[list[Any]] = [[], []]
    for _ in range(20):
        for stream, arrays, kept in zip(streams, inputs, results, strict=True):
            with torch.cuda.stream(stream):
                kept.append(fa4gen.attention(*arrays, num_splits=20))
    torch.cuda.synchronize()
    assert all(torch.equal(out, want) for kept, want in zip(results, expected, strict=True) for out in kept)


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [64, 512])
def test_gpu_takes_strides_as_they_are(depth: int) -> None:
    """K and V with heads before keys, or with room between rows; a query whose one position has a stride of its own."""
    torch = pytest.importorskip("torch")
    q, k, v = problem(2, 1, 700, 4, 2, depth)
    expected = reference.attention(q, k, v, scale=depth**-0.5, causal=False)
    on_q, on_k, on_v = on_gpu(q, k, v)
    padded = torch.zeros(2, 710, 3, depth + 16, device="cuda", dtype=torch.bfloat16)[:, 3:703, :2, 8 : depth + 8]
    padded.copy_(on_v)
    swapped_q = torch.empty(2, 8, 1, depth, device="cuda", dtype=torch.bfloat16).transpose(1, 2).copy_(on_q)
    assert swapped_q.stride()[1] == depth
    out, lse = fa4gen.attention(swapped_q, on_k.transpose(1, 2).contiguous().transpose(1, 2), padded, return_lse=True)
    close(out.float().cpu(), lse.cpu(), expected)
    hnd = (array.transpose(1, 2).contiguous() for array in (on_k, on_v))
    out, lse = fa4gen.attention(on_q, *hnd, kv_layout="HND", return_lse=True, num_splits=3)
    close(out.float().cpu(), lse.cpu(), expected)


@pytest.mark.gpu
def test_gpu_refuses_host_arrays_beside_device_ones() -> None:
    q, k, v = on_gpu(*problem())
    with pytest.raises(ValueError, match="k is on the host"):
        fa4gen.attention(q, k.cpu(), v)


@pytest.mark.gpu
def test_gpu_torch_op_passes_torchs_own_checks() -> None:
    torch = pytest.importorskip("torch")
    import fa4gen.torch_op

    q, k, v = on_gpu(*problem(2, 1, 300, 8, 2, 128))
    out, lse = torch.ops.fa4gen.attention(q, k, v, num_splits=3)
    expected = fa4gen.attention(q, k, v, num_splits=3, return_lse=True)
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])
    torch.library.opcheck(torch.ops.fa4gen.attention.default, (q, k, v), test_utils=("test_schema", "test_faketensor"))


def test_torch_op_says_that_it_needs_torch() -> None:
    if "torch" in sys.modules or __import__("importlib.util").util.find_spec("torch"):
        pytest.skip("torch is installed")
    with pytest.raises(ImportError, match="needs torch"):
        import fa4gen.torch_op  # noqa: F401


# --- the driver's part, against a driver that only records ---------------------------------------------------------------------


def test_launches_reach_the_driver_as_planned(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    require_gcc()
    fake = FakeDriver(tmp_path)
    fake.install(monkeypatch)
    q, k, v = problem(2, 3, 1000, 4, 2, dtype=np.float16)
    out = np.zeros_like(q)
    config = api.choose_config(64, "float16", "float16", "float16", *(False, None, None, False, None, *[False] * 5), "sm_90a")
    fake.expect(attention_entry_info(config, derive(config, "sm_90a"))["arguments"])

    def call(**options: Any) -> Seen:
        fa4gen.attention(*(DeviceLike(a) for a in (q, k, v)), out=DeviceLike(out), **options)
        return fake.last()

    def numbers(seen: Seen, *names: str) -> list[int]:
        return [seen.number(name) for name in names]

    arguments = {"num_splits": 4, "scale": 0.25, "stream": 48}
    seen = call(**arguments)
    lse = np.empty((2, 8, 3), np.float32)
    expected = attention_launch(config, derive(config, "sm_90a"), q, k, v, out, lse, scale=0.25, partition_keys=256)
    assert (seen.entry, seen.grid, seen.block) == (expected.entry, expected.grid, expected.block)
    assert (seen.shared_bytes, seen.cluster) == (expected.smem_bytes, expected.cluster)
    assert numbers(seen, "q_map", "k_map", "v_map", "out_map") == [array.ctypes.data for array in (q, k, v, out)]
    assert seen.stream == 48
    plain = ("batch", "q_len", "keys", "kv_heads", "group", "scale", "partition_tiles", "partitions")
    assert [seen.parameters[name] for name in plain] == [np.asarray(value).tobytes() for value in expected.args[5:13]]
    assert seen.number("launch") == 1
    spaces = ("lse", "partial_o", "partial_lse", "arrived")
    workspace = numbers(seen, *spaces)
    assert 0 not in workspace
    assert len(set(workspace)) == 4
    # The same plan again, other memory for the keys: a new number and address, the workspace as it was; another stream, its own.
    k = k.copy()
    seen = call(**arguments)
    assert seen.number("launch") == 2
    assert seen.number("k_map") == k.ctypes.data
    assert numbers(seen, *spaces) == workspace
    seen = call(**arguments | {"stream": 64})
    assert seen.number("launch") == 1
    assert not set(numbers(seen, *spaces)) & set(workspace)
    for options, match in (({"window": 3}, "window"), ({"num_splits": 0}, "num_splits")):
        with pytest.raises(ValueError, match=match):
            call(**options)
    with pytest.raises(ValueError, match="v is on CUDA device 1"):
        fa4gen.attention(DeviceLike(q), DeviceLike(k), DeviceLike(v, 1), out=DeviceLike(out))
    with pytest.raises(ValueError, match="out is missing"):
        fa4gen.attention(DeviceLike(q), DeviceLike(k), DeviceLike(v))
    with pytest.raises(RuntimeError, match="CUDA device 1"):
        fa4gen.attention(*(DeviceLike(a, 1) for a in (q, k, v, out)[:3]), out=DeviceLike(out, 1))
    assert fake.count("launches") == 3


class Stub:
    """A stand-in for torch as far as `attention` knows it: tensors that say they are on CUDA device 0, and never touch memory."""

    class Tensor:
        def __init__(self, address: int, shape: tuple[int, ...], dtype: str = "float16", strides: tuple[int, ...] | None = None) -> None:
            self.address, self.shape, self.dtype, self.is_cuda = address, shape, f"torch.{dtype}", True
            self.strides = strides or api.dense(shape)

        def data_ptr(self) -> int:
            return self.address

        def stride(self) -> tuple[int, ...]:
            return self.strides

        def get_device(self) -> int:
            return 0

        def dim(self) -> int:
            return len(self.shape)

        def new_empty(self, shape: tuple[int, ...], dtype: str) -> Stub.Tensor:
            return Stub.Tensor(1 << 33, shape, dtype)

    class _C:
        current = 48

        @classmethod
        def _cuda_getCurrentRawStream(cls, device: int) -> int:
            return cls.current

    float16, float32 = "float16", "float32"

    @staticmethod
    def empty_like(tensor: Stub.Tensor, dtype: str | None = None) -> Stub.Tensor:
        return Stub.Tensor(1 << 32, tensor.shape, dtype or tensor.dtype.removeprefix("torch."))


class NoCode(api.Generated):
    """Kernels that a driver which only records is content with."""

    def compiled(self, config: Any, arch: str) -> Compiled:
        return Compiled(arch, "", config.name.encode())


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> FakeDriver:
    require_gcc()
    fake = FakeDriver(tmp_path)
    fake.install(monkeypatch)
    monkeypatch.setitem(sys.modules, "torch", Stub)
    return fake


def test_a_call_of_before_is_launched_as_if_it_were_new(stub: FakeDriver) -> None:
    """Random calls that differ in any of what a launch follows from, on a cache that has seen the others and on an empty one."""
    rng = random.Random(7)
    used, ready = api.Attention(NoCode()), 0
    own = {"launch", "partial_o", "partial_lse", "arrived"}

    def rarely(other: Any, usual: Any = None) -> Any:
        return other if rng.random() < 0.12 else usual

    for _ in range(300):
        heads, keys, causal = rarely(16, 8), rarely(1000, 64), rarely(True, False)
        q, k, v = (rarely(2, 1) << 20 | place << 28 for place in (1, 2, 3))
        kv_shape, strides = (2, keys, 2, 64), rarely((keys * 256, 256, 64, 1))
        arrays = {"q": Stub.Tensor(q, (2, 1, heads, 64)), "k": Stub.Tensor(k, kv_shape, strides=strides), "v": Stub.Tensor(v, kv_shape)}
        options: dict[str, Any] = {"causal": causal, "scale": rarely(0.5), "num_splits": rarely(3), "return_lse": rarely(True, False)}
        options["stream"] = rarely(64)
        if lengths := rarely(True):
            arrays["seqused_k"] = Stub.Tensor(rng.choice([1, 2]) << 40, (2,), "int32")
        if rarely(True):
            arrays["out"] = Stub.Tensor(rng.choice([1, 2]) << 41, (2, 1, heads, 64), rng.choice(["float16", "float32"]))
        out_dtype = arrays["out"].dtype.removeprefix("torch.") if "out" in arrays else "float16"
        config = api.choose_config(
            *(64, "float16", "float16", out_dtype, causal, None, None, False, None, bool(lengths), False, False, False, False), "sm_90a"
        )
        stub.expect(attention_entry_info(config, derive(config, "sm_90a"))["arguments"])
        seen = []
        for caller in (used, api.Attention(NoCode())):
            before, known = stub.count("launches"), caller.latest
            caller.attention(**arrays, **options)
            assert stub.count("launches") == before + 1
            ready += caller is used and caller.latest is known
            seen.append(stub.last())
        ours, fresh = seen
        internal = own if options["return_lse"] else own | {"lse"}
        assert {n: p for n, p in ours.parameters.items() if n not in internal} == {
            n: p for n, p in fresh.parameters.items() if n not in internal
        }
        assert (ours.entry, ours.grid, ours.cluster, ours.stream) == (fresh.entry, fresh.grid, fresh.cluster, fresh.stream)
        # One stream's launches are counted together, whoever makes them.
        assert fresh.number("launch") == ours.number("launch") + 1
    assert 30 < ready < 250


def test_a_call_of_before_allocates_nothing(stub: FakeDriver) -> None:
    caller = api.Attention(NoCode())
    q, k, v = (Stub.Tensor(place << 28, (1, extent, 2, 64)) for place, extent in ((1, 1), (2, 300), (3, 300)))
    caller.attention(q, k, v, num_splits=3)
    before = [stub.count(name) for name in ("allocations", "encodings", "modules")]
    for _ in range(3):
        caller.attention(q, k, v, num_splits=3)
    assert [stub.count(name) for name in ("allocations", "encodings", "modules")] == before
    # Repeated as a graph repeats it, a launch keeps its number.
    config = api.choose_config(64, "float16", "float16", "float16", *(False, None, None, False, None, *[False] * 5), "sm_90a")
    stub.expect(attention_entry_info(config, derive(config, "sm_90a"))["arguments"])
    assert caller.latest is not None
    for repeat, number in ((caller.latest.enqueue_again, 4), (caller.latest.enqueue, 5), (caller.latest.enqueue_again, 5)):
        repeat()
        assert stub.last().number("launch") == number
    # Another address of Q: its map alone.
    caller.attention(Stub.Tensor(9 << 28, q.shape), k, v, num_splits=3)
    assert [stub.count(name) for name in ("allocations", "encodings", "modules")] == [before[0], before[1] + 1, before[2]]


def test_threads_share_a_stream(stub: FakeDriver) -> None:
    """Each launch takes a number of its own, and the counters that belong to it."""
    caller = api.Attention(NoCode())
    before, failures = stub.count("launches"), []

    def work(thread: int) -> None:
        try:
            for step in range(100):
                q, k, v = (Stub.Tensor((place * 16 + step % 7) << 24, (1, 1 + thread % 2, 2, 64)) for place in (1, 2, 3))
                caller.attention(q, k, v, num_splits=2)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert stub.count("launches") == before + 400
    assert driver.device(0).workspace(Stub._C.current).number == 400


def test_a_growing_cache_does_not_pile_up_workspaces(stub: FakeDriver) -> None:
    caller = api.Attention(NoCode())
    before = stub.count("allocations")
    for batch in range(1, 200):
        q, k, v = (Stub.Tensor(place << 28, (batch, 1 if place == 1 else 640, 2, 64)) for place in (1, 2, 3))
        caller.attention(q, k, v, num_splits=10)
    # Four arrays, each half as large again as the one before.
    assert 4 <= stub.count("allocations") - before <= 4 * 16


def test_more_calls_than_are_kept(stub: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api.Attention, "MAX_READY", 3)
    monkeypatch.setattr(api.Attention, "MAX_PLANS", 2)
    monkeypatch.setattr(api.Plan, "MAPS_KEPT", 2)
    caller = api.Attention(NoCode())
    config = api.choose_config(64, "float16", "float16", "float16", *(False, None, None, False, None, *[False] * 5), "sm_90a")
    stub.expect(attention_entry_info(config, derive(config, "sm_90a"))["arguments"])
    for step in range(40):
        q, k, v = (Stub.Tensor((place * 16 + step % 5) << 24, (1, 1 + step % 3, 2, 64)) for place in (1, 2, 3))
        caller.attention(q, k, v)
        seen = stub.last()
        assert [seen.number(name) for name in ("q_map", "k_map", "v_map")] == [a.address for a in (q, k, v)]
        assert seen.number("keys") == 1 + step % 3


def test_what_is_no_tensor_beside_tensors_is_named(stub: FakeDriver) -> None:
    tensors = {name: Stub.Tensor(place << 28, (1, 3, 2, 64)) for place, name in enumerate("qkv", 1)}
    for name, bad in (("k", [1]), ("v", np.zeros((1, 3, 2, 64), np.float16)), ("sinks", 7), ("out", "here")):
        with pytest.raises(TypeError, match=f"{name} is a {type(bad).__name__}, q a torch tensor"):
            api.Attention(NoCode()).attention(**(tensors | {name: bad}))
