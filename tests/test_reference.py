"""The references against definitions written another way, and the golden inputs against what they promise."""

from __future__ import annotations

import numpy as np
import pytest

from fa4gen.codegen import golden, reference
from fa4gen.codegen.feature_inputs import quantised


def test_exchange_reference_is_a_left_fold_of_each_row():
    partial = golden.exchange_input(1, "max", count=18, rows=32)
    out = reference.exchange4(partial, "max", m_pack=4, rows=32)
    for row, warpgroup, query in [(0, 0, 0), (3, 1, 31), (16, 0, 7)]:
        values = [partial[row, warpgroup * 128 + g * 32 + query] for g in range(4)]
        assert {float(out[row, warpgroup * 128 + g * 32 + query]) for g in range(4)} == {float(max(values))}


def test_exchange_reference_sums_in_order_of_the_parts():
    # 2^24 + 1 - 2^24: the left fold loses the 1, another order would keep it.
    partial = np.zeros((1, 256), np.float32)
    partial[0, 0], partial[0, 32], partial[0, 64] = 2.0**24, 1.0, -(2.0**24)
    out = reference.exchange4(partial, "add", m_pack=4, rows=32)
    assert out[0, 0] == 0.0
    partial[0, 0], partial[0, 32], partial[0, 64] = 2.0**24, -(2.0**24), 1.0
    assert reference.exchange4(partial, "add", m_pack=4, rows=32)[0, 96] == 1.0


def test_exchange_reference_prefers_positive_zero_and_flushes_subnormals():
    partial = np.full((1, 256), -0.0, np.float32)
    partial[0, 64] = 0.0
    partial[0, 1] = np.float32(1e-40)
    out = reference.exchange4(partial, "max", m_pack=2, rows=64)
    assert not np.signbit(out[0, 0])
    assert out[0, 1] == 0.0
    assert np.signbit(out[0, 2])


@pytest.mark.parametrize("m_pack", [2, 4])
def test_combine_reference_equals_softmax_over_all_partitions(m_pack):
    rows, depth, keys, scale = 128 // m_pack, 64, 24, 0.125
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(m_pack, rows, keys)) * 20
    values = rng.normal(size=(m_pack, keys, depth))
    m = scores.max(axis=2).astype(np.float32)
    p = np.exp((scores - m[..., None]) * scale)
    image = np.einsum("grk,gkd->grd", p, values).astype(np.float32)
    row_sum = p.sum(axis=2).astype(np.float32)
    out, bound, _, merged = reference.combine(
        image.reshape(128, depth),
        m.reshape(128),
        row_sum.reshape(128),
        scale * np.log2(np.e),
        m_pack=m_pack,
        rows=rows,
        use_fma=True,
        out_dtype="float32",
    )
    joined = scores.transpose(1, 0, 2).reshape(rows, -1) * scale
    weights = np.exp(joined - joined.max(axis=1, keepdims=True))
    expected = weights / weights.sum(axis=1, keepdims=True) @ values.reshape(-1, depth)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    np.testing.assert_allclose(merged, weights.sum(axis=1), rtol=1e-5)
    assert (bound > 0).all()
    assert bound.max() < 1e-4


def test_attention_reference_causal_is_aligned_to_the_end():
    rng = np.random.default_rng(1)
    q, k, v = rng.normal(size=(1, 4, 2, 64)), rng.normal(size=(1, 2, 1, 64)), rng.normal(size=(1, 2, 1, 64))
    out, lse = reference.attention(q, k, v, scale=0.125, causal=True)
    # keys - q_len = -2: queries 0 and 1 see nothing, query 2 sees key 0, query 3 both.
    assert (out[:, :2] == 0).all()
    assert np.isneginf(lse[0, :, :2]).all()
    np.testing.assert_allclose(out[0, 2], np.broadcast_to(v[0, 0, 0], (2, 64)))
    full, _ = reference.attention(q, k, v, scale=0.125, causal=False)
    np.testing.assert_allclose(out[0, 3], full[0, 3])


@pytest.mark.parametrize("of_pages", [False, True])
def test_attention_reference_multiplies_keys_and_values_by_their_scales(of_pages):
    rng = np.random.default_rng(3)
    q, k, v = rng.normal(size=(2, 1, 4, 8)), rng.normal(size=(3, 4, 2, 8)), rng.normal(size=(3, 4, 2, 8))
    table, lengths = np.array([[2, 0], [1, 9]]), np.array([7, 2])
    k_scale, v_scale = (rng.uniform(0.5, 2, (3, 2) if of_pages else 2) for _ in range(2))
    each = (slice(None), None, slice(None), None) if of_pages else (None, None, slice(None), None)
    ours = reference.attention(q, k, v, scale=0.3, causal=False, block_table=table, key_lengths=lengths, k_scale=k_scale, v_scale=v_scale)
    plain = reference.attention(q, k * k_scale[each], v * v_scale[each], scale=0.3, causal=False, block_table=table, key_lengths=lengths)
    for a, b in zip(ours, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


def test_eight_bits_hold_the_largest_number_of_each_head():
    array = np.random.default_rng(4).normal(size=(2, 5, 3, 8)).astype(np.float32)
    array[:, :, 1] = 0
    eight, scale = quantised(array, (0, 1, 3))
    assert scale.shape == (3,)
    restored = eight.astype(np.float32) * scale[:, None]
    # Three bits behind the first; the smallest numbers lie 2^-9 apart.
    assert (np.abs(restored - array) <= np.maximum(np.abs(array) / 16, scale[:, None] * 2.0**-10) * 1.0001).all()
    np.testing.assert_allclose(np.abs(restored).max(axis=(0, 1, 3)), np.abs(array).max(axis=(0, 1, 3)), rtol=1e-6)


def test_golden_inputs_depend_on_seed_and_stream_only():
    first = golden.attention_input(0, batch=1, q_len=4, q_heads=8, kv_heads=1, keys=32, depth=64, dtype=np.dtype(np.float32))
    again = golden.attention_input(0, batch=1, q_len=4, q_heads=8, kv_heads=1, keys=32, depth=64, dtype=np.dtype(np.float32))
    other = golden.attention_input(1, batch=1, q_len=4, q_heads=8, kv_heads=1, keys=32, depth=64, dtype=np.dtype(np.float32))
    for a, b, c in zip(first, again, other, strict=True):
        assert np.array_equal(a, b)
        assert not np.array_equal(a, c)
    # The stream is pinned: a numpy release that changed it would silently change every golden.
    assert golden.Bits(0, "pin").integers((4,), 0, 1 << 16).tolist() == [26716, 26255, 35139, 14463]


def test_attention_input_holds_its_hard_cases():
    q, k, v = (
        a.astype(np.float64)
        for a in golden.attention_input(0, batch=1, q_len=2, q_heads=8, kv_heads=1, keys=64, depth=512, dtype=np.dtype(np.float32))
    )
    scores = np.einsum("hd,kd->hk", q[0, 0], k[0, :, 0]) / np.sqrt(512)
    assert (scores[0] == 0).all()
    assert scores[1].argmax() == 32
    assert np.exp(scores[1] - scores[1].max()).sum() < 1.001
    assert scores[2].max() < 0
    assert np.array_equal(v, np.round(v * 32) / 32)


def test_combine_input_holds_its_hard_cases():
    data = golden.combine_input(0, m_pack=4, rows=32, depth=128)
    m = data.row_max.reshape(4, 32)
    assert np.isneginf(m[1:, 0]).all()
    assert np.isfinite(m[0, 0])
    assert np.isfinite(m).any(axis=0).all()
    assert (m[:, 3] == m[0, 3]).all()
    assert np.isfinite(data.tmem_image).all()
    x = (m[1, 6] - m[0, 6]) * float(data.scale_log2e)
    assert -200 < x < -126
