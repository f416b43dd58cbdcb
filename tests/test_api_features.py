"""What an engine asks of fa4gen.attention beyond plain arrays: on numpy arrays through the emulator; with a GPU, the bits of a sequence in
any batch, layout and number of queries, and arrays of CuPy and JAX."""

from __future__ import annotations

import os
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import fa4gen
from fa4gen.codegen import api, reference
from fa4gen.codegen.config import parse_config
from fa4gen.codegen.feature_inputs import page_table, paged

BF16 = ml_dtypes.bfloat16
LENGTHS = [150, 0, 67]


def inputs(batch: int, q_len: int, keys: int, group: int = 4, kv_heads: int = 1, depth: int = 64, dtype: Any = BF16) -> list[np.ndarray]:
    rng = np.random.default_rng(keys)
    shapes = ((batch, q_len, kv_heads * group, depth), (batch, keys, kv_heads, depth), (batch, keys, kv_heads, depth))
    return [rng.standard_normal(shape, np.float32).astype(dtype) for shape in shapes]


def close(out: Any, lse: Any, expected: Any) -> None:
    assert np.linalg.norm(np.asarray(out, np.float64) - expected[0]) <= 4e-3 * np.linalg.norm(expected[0])
    np.testing.assert_allclose(np.asarray(lse), expected[1], rtol=2.0**-20, atol=2e-4)


# --- on the emulator -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "split_size": 64},
        {"causal": True, "window": 70, "num_splits": 2, "sinks": np.linspace(-2, 4, 4, dtype=np.float32)},
        {"softcap": 3.0, "scale": 1.0},
    ],
    ids=lambda options: " ".join(options),
)
def test_lengths_with_masks_and_score_rules(options: dict[str, Any]) -> None:
    q, k, v = inputs(3, 2, max(LENGTHS))
    lengths = np.array(LENGTHS, np.int32)
    out, lse = fa4gen.attention(q, k, v, seqused_k=lengths, return_lse=True, **options)
    known = {name: value for name, value in options.items() if name in ("window", "softcap", "sinks")}
    causal, scale = options.get("causal", False), options.get("scale", 0.125)
    close(out, lse, reference.attention(q, k, v, key_lengths=lengths, causal=causal, scale=scale, **known))


@pytest.mark.parametrize(("page", "layout"), [(16, "NHD"), (64, "HND")])
def test_pages_in_both_layouts(page: int, layout: Any) -> None:
    q, k, v = inputs(3, 1, max(LENGTHS), kv_heads=2)
    table, lengths = page_table(3, max(LENGTHS), page), np.array(LENGTHS, np.int32)
    pages = [paged(array, table, page) for array in (k, v)]
    if layout == "HND":
        pages = [np.ascontiguousarray(array.swapaxes(1, 2)) for array in pages]
    out, lse = fa4gen.attention(q, *pages, block_table=table, seqused_k=lengths, kv_layout=layout, return_lse=True)
    close(out, lse, reference.attention(q, k, v, key_lengths=lengths, causal=False, scale=0.125))


def test_chosen_pages_of_each_sequence() -> None:
    q, k, v = inputs(2, 2, 300)
    table, lengths = page_table(2, 300, 16), np.array([300, 90], np.int32)
    places = np.full(table.shape, 2**31 - 1, np.int32)
    listed = np.zeros_like(table)
    for b, chosen in enumerate(([0, 3, 4, 9, 18], [5])):
        places[b, : len(chosen)], listed[b, : len(chosen)] = chosen, table[b, chosen]
    pages = [paged(array, table, 16) for array in (k, v)]
    arrays = {"block_table": listed, "page_places": places}
    out, lse = fa4gen.attention(q, *pages, seqused_k=lengths, causal=True, return_lse=True, **arrays)
    close(out, lse, reference.attention(q, *pages, key_lengths=lengths, causal=True, scale=0.125, **arrays))


def test_queries_that_lie_end_to_end() -> None:
    q, k, v = inputs(3, 4, max(LENGTHS))
    starts = np.array([0, 4, 5, 8], np.int32)
    rows = np.ascontiguousarray(q.reshape(12, 4, 64)[:8])
    options = {"causal": True, "seqused_k": np.array(LENGTHS, np.int32), "cu_seqlens_q": starts, "max_seqlen_q": 4}
    out, lse = fa4gen.attention(rows, k, v, return_lse=True, **options)
    expected = reference.attention(rows, k, v, key_lengths=np.array(LENGTHS), query_starts=starts, causal=True, scale=0.125)
    close(out, lse, expected)


@pytest.mark.parametrize(
    ("argument", "arrays"),
    [
        ("page_places", {"page_places": np.zeros((2, 10), np.int32)}),
        ("page_places", {"page_places": np.zeros((2, 10), np.int32), "block_table": np.zeros((2, 10), np.int32)}),
        (
            "page_places",
            {
                "page_places": np.zeros((2, 9), np.int32),
                "block_table": np.zeros((2, 10), np.int32),
                "seqused_k": np.zeros(2, np.int32),
            },
        ),
        (
            "page_places",
            {
                "page_places": np.zeros((2, 10), np.int64),
                "block_table": np.zeros((2, 10), np.int32),
                "seqused_k": np.zeros(2, np.int32),
            },
        ),
    ],
)
def test_page_lists_that_do_not_fit_are_refused(argument: str, arrays: dict[str, Any]) -> None:
    q, k, v = inputs(2, 1, 16)
    with pytest.raises((ValueError, TypeError), match=argument):
        fa4gen.attention(q, k, v, **arrays)


# --- bits, with a GPU and torch ------------------------------------------------------------------------------------------------


def on_gpu(*arrays: np.ndarray) -> list[Any]:
    torch = pytest.importorskip("torch")
    return [
        torch.from_numpy(array).cuda() if array.dtype == np.int32 else torch.from_numpy(array.astype(np.float32)).cuda().bfloat16()
        for array in arrays
    ]


def same(ours: Any, theirs: Any) -> bool:
    """Whether two (out, lse) have equal bits."""
    torch = pytest.importorskip("torch")
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("depth", api.DEPTHS)
def test_gpu_a_sequence_has_the_same_bits_in_any_batch_and_layout(depth: int, q_len: int, causal: bool) -> None:
    """split_size fixes the partitions: alone, among others, padded with lengths, in pages of 16 and 64 in any order."""
    lengths = np.array([5000, 1, 700, 256, 3000, 257, 0], np.int32)
    q, k, v = inputs(len(lengths), q_len, int(lengths.max()), 8, 2, depth)
    options = {"causal": causal, "split_size": 256, "return_lse": True, "scale": 0.5}
    dq, dk, dv, used = on_gpu(q, k, v, lengths)
    many = fa4gen.attention(dq, dk, dv, seqused_k=used, **options)
    for page in (16, 64):
        table = page_table(len(lengths), int(lengths.max()), page)
        pages = on_gpu(paged(k, table, page), paged(v, table, page), table)
        assert same(fa4gen.attention(dq, *pages[:2], block_table=pages[2], seqused_k=used, **options), many), page
    for b, length in enumerate(lengths):
        one = slice(b, b + 1)
        alone = fa4gen.attention(dq[one], dk[one], dv[one], seqused_k=used[one], **options)
        assert same(alone, [part[one] for part in many]), length
        if length:
            plain = fa4gen.attention(dq[one], dk[one, : int(length)].contiguous(), dv[one, : int(length)].contiguous(), **options)
            assert same(plain, [part[one] for part in many]), length
    twice = fa4gen.attention(*(x.repeat(20, 1, 1, 1) for x in (dq, dk, dv)), seqused_k=used.repeat(20), **options)
    assert same([part[-len(lengths) :] for part in twice], many)


@pytest.mark.gpu
@pytest.mark.parametrize("warpgroups", [1, 2])
@pytest.mark.parametrize("window", [None, 1, 200, 1000])
@pytest.mark.parametrize("depth", api.DEPTHS)
def test_gpu_verifying_four_tokens_has_the_bits_of_four_steps(depth: int, window: int | None, warpgroups: int) -> None:
    options: dict[str, Any] = {"causal": True, "window": window, "split_size": 512, "return_lse": True, "scale": 1.0}
    fields = {"ov_depth": depth, "shared_key": True, "mask": "causal", "window": window, "key_lengths": True, "rescale": "exact"}
    config = parse_config(fields | {"name": f"verify{warpgroups}", "warpgroups": warpgroups, "arch": ["sm_90a"]})
    q, k, v = inputs(3, 4, 3000, 8, 2, depth)
    dq, dk, dv = on_gpu(q, k, v)
    for lengths in ([3000, 67, 1026], [4, 515, 2049], [130, 66, 513]):
        (used,) = on_gpu(np.array(lengths, np.int32))
        out, lse = fa4gen.attention(dq, dk, dv, config=config, seqused_k=used, **options)
        for i in range(4):
            step = fa4gen.attention(dq[:, i : i + 1].contiguous(), dk, dv, config=config, seqused_k=used - (3 - i), **options)
            assert same(step, (out[:, i : i + 1].contiguous(), lse[:, :, i : i + 1].contiguous())), (lengths, i)


# --- other frameworks ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_gpu_takes_arrays_of_cupy() -> None:
    cupy = pytest.importorskip("cupy")
    q, k, v = inputs(2, 3, 700, 4, 2, 128, np.float16)
    arrays = [cupy.asarray(array) for array in (q, k, v)]
    out, lse = cupy.full_like(arrays[0], cupy.nan), cupy.full((2, 8, 3), cupy.nan, cupy.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    fa4gen.attention(*arrays, causal=True, out=(out, lse), return_lse=True, stream=stream)
    stream.synchronize()
    close(out.get(), lse.get(), reference.attention(q, k, v, causal=True, scale=128**-0.5))


@pytest.mark.gpu
def test_gpu_takes_arrays_of_jax() -> None:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("this jax sees no GPU")
    q, k, v = inputs(2, 3, 700, 4, 2, 128)
    arrays = [jax.device_put(array) for array in (q, k, v)]
    out, lse = jax.numpy.zeros(q.shape, q.dtype), jax.numpy.zeros((2, 8, 3), np.float32)
    for array in (*arrays, out, lse):
        array.block_until_ready()
    fa4gen.attention(*arrays, causal=True, out=(out, lse), return_lse=True)
    from fa4gen.codegen.backends.cuda import CudaBackend

    backend = CudaBackend(repeats=0)
    event = backend.event()
    backend.record(event)
    backend.wait(event, "attention")
    close(np.asarray(out).astype(np.float32), np.asarray(lse), reference.attention(q, k, v, causal=True, scale=128**-0.5))
