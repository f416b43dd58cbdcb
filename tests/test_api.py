"""fa4gen.attention: on numpy arrays through the emulator, its errors, the plans it makes; with a GPU and torch, against float64."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import fa4gen
from fa4gen.codegen import api, driver, reference
from fa4gen.codegen.attention import attention_launch
from fa4gen.codegen.geometry import derive

BF16 = ml_dtypes.bfloat16
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

RECORDER = r"""
#include <stdint.h>
#include <string.h>
#include <stdlib.h>
typedef struct { int id; char pad[4]; unsigned value[16]; } Attribute;
typedef struct { unsigned grid[3], block[3], shared; void *stream; Attribute *attributes; unsigned count; } Config;
unsigned launches, grid, block, shared, cluster; void *stream; uint64_t scalars[32]; uint64_t map_address[4]; static char map[4][128];
int cuInit(unsigned f) { return f; }
int cuGetErrorName(int s, const char **n) { (void)s; *n = "CUDA_ERROR"; return 0; }
int cuDeviceGet(int *d, int i) { *d = i; return i ? 101 : 0; }
int cuDeviceGetAttribute(int *v, int a, int d) { (void)d; *v = a == 75 ? 9 : a == 76 ? 0 : 132; return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { (void)d; *c = (void *)8; return 0; }
int cuCtxPushCurrent_v2(void *c) { (void)c; return 0; }
int cuCtxPopCurrent_v2(void **c) { *c = 0; return 0; }
int cuCtxGetCurrent(void **c) { *c = (void *)8; return 0; }
int cuThreadExchangeStreamCaptureMode(int *m) { *m = 0; return 0; }
int cuMemAlloc_v2(uint64_t *a, size_t n) { static uint64_t next = 1 << 20; *a = next; next += n + 4096; return 0; }
int cuStreamCreate(void **s, unsigned f) { (void)f; *s = (void *)16; return 0; }
int cuStreamSynchronize(void *s) { (void)s; return 0; }
int cuStreamDestroy_v2(void *s) { (void)s; return 0; }
int cuMemsetD8Async(uint64_t a, unsigned char b, size_t n, void *s) { (void)a; (void)b; (void)n; (void)s; return 0; }
int cuModuleLoadData(void **m, const void *i) { (void)i; *m = (void *)24; return 0; }
int cuModuleGetFunction(void **f, void *m, const char *n) { (void)m; (void)n; *f = (void *)32; return 0; }
int cuFuncSetAttribute(void *f, int a, int v) { (void)f; (void)v; return a != 8; }
int cuTensorMapEncodeTiled(void *m, int t, unsigned r, uint64_t a, uint64_t *d, uint64_t *s, unsigned *b, unsigned *e, int i, int z,
                           int l, int o) {
  uint64_t first = d[0] | (uint64_t)t << 32;
  (void)s; (void)b; (void)e; (void)l; (void)z;
  if ((uintptr_t)m % 64 || a % 16 || r != 5 || i || o) return 1;
  memcpy(m, &a, 8); memcpy((char *)m + 8, &first, 8);
  return 0;
}
int cuLaunchKernelEx(Config *c, void *f, void **p, void **x) {
  if (f != (void *)32 || x) return 1;
  launches++; grid = c->grid[0]; block = c->block[0]; shared = c->shared; stream = c->stream;
  cluster = c->count ? (c->attributes->id == 4 ? c->attributes->value[0] : 99) : 1;
  for (int i = 0; i < 4; i++) { memcpy(map[i], p[i], 128); memcpy(&map_address[i], map[i], 8); }
  for (int i = 4; i < 17; i++) { scalars[i] = 0; memcpy(&scalars[i], p[i], i == 4 || i > 13 ? 8 : 4); }
  return 0;
}
"""


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


def test_launches_reach_the_driver_as_planned(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc on this machine")
    (tmp_path / "recorder.c").write_text(RECORDER)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(tmp_path / "recorder.so"), str(tmp_path / "recorder.c")], check=True)
    recorder = ctypes.CDLL(str(tmp_path / "recorder.so"))
    monkeypatch.setattr(driver.ctypes, "CDLL", lambda name: recorder)
    monkeypatch.setattr(driver, "library", driver.library.__wrapped__)
    monkeypatch.setattr(driver, "_devices", {})
    monkeypatch.setattr(api, "_plans", {})
    q, k, v = problem(2, 3, 1000, 4, 2, dtype=np.float16)
    out = np.zeros_like(q)

    def call(**options: Any) -> dict[str, int]:
        fa4gen.attention(*(DeviceLike(a) for a in (q, k, v)), out=DeviceLike(out), **options)
        names = ("launches", "grid", "block", "shared", "cluster")
        return {name: ctypes.c_uint.in_dll(recorder, name).value for name in names}

    scalars = (ctypes.c_uint64 * 32).in_dll(recorder, "scalars")
    addresses = (ctypes.c_uint64 * 4).in_dll(recorder, "map_address")
    arguments = {"num_splits": 4, "scale": 0.25, "stream": 48}
    seen = call(**arguments)
    config = api.choose_config(64, "float16", "float16", "float16", *(False, None, None, False, None, False, False, False), "sm_90a")
    lse = np.empty((2, 8, 3), np.float32)
    expected = attention_launch(config, derive(config, "sm_90a"), q, k, v, out, lse, scale=0.25, partition_keys=256)
    fixed = {"block": expected.block[0], "shared": expected.smem_bytes, "cluster": expected.cluster}
    assert seen == {"launches": 1, "grid": expected.grid[0], **fixed}
    assert list(addresses) == [array.ctypes.data for array in (q, k, v, out)]
    assert ctypes.c_void_p.in_dll(recorder, "stream").value == 48
    plain = [int.from_bytes(np.asarray(value).tobytes(), "little") for value in expected.args[5:13]]
    assert list(scalars[5:13]) == plain
    assert list(scalars[13:14]) == [1]
    workspace = [scalars[4], *scalars[14:17]]
    assert 0 not in workspace
    assert len(set(workspace)) == 4
    # The same plan again, other memory for the keys: a new number and address, the workspace as it was; another stream, its own.
    k = k.copy()
    assert call(**arguments)["launches"] == 2
    assert scalars[13] == 2
    assert addresses[1] == k.ctypes.data
    assert [scalars[4], *scalars[14:17]] == workspace
    call(**arguments | {"stream": 64})
    assert scalars[13] == 1
    assert not {scalars[4], *scalars[14:17]} & set(workspace)
    for options, match in (({"window": 3}, "window"), ({"num_splits": 0}, "num_splits")):
        with pytest.raises(ValueError, match=match):
            call(**options)
    with pytest.raises(ValueError, match="v is on CUDA device 1"):
        fa4gen.attention(DeviceLike(q), DeviceLike(k), DeviceLike(v, 1), out=DeviceLike(out))
    with pytest.raises(ValueError, match="out is missing"):
        fa4gen.attention(DeviceLike(q), DeviceLike(k), DeviceLike(v))
    with pytest.raises(RuntimeError, match="CUDA device 1"):
        fa4gen.attention(*(DeviceLike(a, 1) for a in (q, k, v, out)[:3]), out=DeviceLike(out, 1))
    assert ctypes.c_uint.in_dll(recorder, "launches").value == 3
