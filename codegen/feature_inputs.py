"""Plain q, k, v as a config's features want them: keys in pages or 8 bits, lengths and query starts as arrays, logits of the sinks.

`fa4gen run`, `inspect --trace` and the tests start from contiguous q, k, v of equal lengths; a config with features takes the same
attention in another form, so that one reference serves all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from . import reference, units
from .config import Config
from .golden import Bits

E4M3_MAX = 448.0


@dataclass(frozen=True)
class FeatureInputs:
    """What attention_launch takes in place of q [batch, q_len, q_heads, d], k and v [batch, keys, kv_heads, d].

    q, k, v: as the config's layout wants them. arrays: the features' arguments of attention_launch, by name. out, lse: poisoned, in the
    layout of the launch.
    """

    config: Config
    plain: tuple[np.ndarray, np.ndarray, np.ndarray]
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    arrays: Mapping[str, Any]
    out: np.ndarray
    lse: np.ndarray

    @property
    def plain_out(self) -> np.ndarray:
        """What `out` holds, as [batch, q_len, q_heads, d]."""
        return self.out.reshape(self.plain[0].shape)

    @property
    def plain_lse(self) -> np.ndarray:
        """What `lse` holds, as [batch, q_heads, q_len]."""
        batch, q_len, heads, _ = self.plain[0].shape
        return self.lse.reshape(heads, batch, q_len).swapaxes(0, 1) if self.config.ragged_queries else self.lse

    def expected(self, scale: float) -> tuple[np.ndarray, np.ndarray]:
        """plain_out and plain_lse in float64; of K and V as they are once they have 8 bits."""
        config = self.config
        q, k, v = self.plain
        known = {name: self.arrays[name] for name in ("k_scale", "v_scale") if name in self.arrays}
        if config.kv_scale == "page":
            known |= {"block_table": self.arrays["block_table"], "key_lengths": np.full(len(k), k.shape[1])}
            k, v = self.k, self.v
        return reference.attention(
            *(q, k, v),
            scale=scale,
            causal=config.mask == "causal",
            window=config.window,
            softcap=config.softcap,
            sinks=self.arrays.get("sinks"),
            **known,
        )


def page_table(batch: int, keys: int, page_size: int) -> np.ndarray:
    """[batch, pages of a sequence] int32: a page for each `page_size` keys of each sequence, in an order without order."""
    room = -(-keys // page_size)
    words = Bits(0, f"pages {batch} {room}").integers((batch * room,), 0, 1 << 32)
    return np.argsort(words, kind="stable").astype(np.int32).reshape(batch, room)


def paged(array: np.ndarray, table: np.ndarray, page_size: int) -> np.ndarray:
    """[batch, keys, kv_heads, d] as pages [batch * table_pages, page_size, kv_heads, d]; NaN where the last one has no key."""
    batch, _, *rest = array.shape
    room = table.shape[1]
    pages = np.full((batch * room, page_size, *rest), np.nan, array.dtype)
    for b in range(batch):
        for i, page in enumerate(table[b]):
            part = array[b, i * page_size : (i + 1) * page_size]
            pages[page, : len(part)] = part
    return pages


def quantised(array: np.ndarray, axes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """`array` as float8_e4m3fn, and the float32 scales that restore it, one for all of `axes`: the largest number becomes the type's."""
    widest = np.nanmax(np.abs(array.astype(np.float32)), axis=axes, keepdims=True)
    scale = np.asarray(np.where(widest > 0, widest, 1.0) / E4M3_MAX, np.float32)
    return (array.astype(np.float32) / scale).astype(ml_dtypes.float8_e4m3fn), np.ascontiguousarray(scale.squeeze(axes))


def feature_inputs(config: Config, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> FeatureInputs:
    """q [batch, q_len, q_heads, d], k and v [batch, keys, kv_heads, d] for `config`: every sequence has all the keys."""
    batch, q_len, heads, depth = q.shape
    keys = k.shape[1]
    arrays: dict[str, Any] = {}
    own_q, own_k, own_v = q, k, v
    if config.kv_dtype is not None and config.kv_scale == "head":
        (k, arrays["k_scale"]), (v, arrays["v_scale"]) = (quantised(array, (0, 1, 3)) for array in (k, v))
        own_k, own_v = k, v
    if config.page_size is not None:
        table = page_table(batch, keys, config.page_size)
        own_k, own_v = (paged(array, table, config.page_size) for array in (k, v))
        arrays |= {"block_table": table, "max_keys": keys}
    if config.kv_scale == "page":
        (own_k, arrays["k_scale"]), (own_v, arrays["v_scale"]) = (quantised(array, (1, 3)) for array in (own_k, own_v))
    if config.page_list:
        arrays["page_places"] = np.tile(np.arange(arrays["block_table"].shape[1], dtype=np.int32), (batch, 1))
    if config.key_lengths:
        arrays["key_lengths"] = np.full(batch, keys, np.int32)
    if config.ragged_queries:
        own_q = q.reshape(batch * q_len, heads, depth)
        arrays |= {"query_starts": np.arange(0, (batch + 1) * q_len, q_len, dtype=np.int32), "max_q_len": q_len}
    if config.sinks:
        arrays["sinks"] = Bits(0, "sinks").dyadic((heads,), low=-16, high=16, step=0.25)
    lse_shape = (heads, batch * q_len) if config.ragged_queries else (batch, heads, q_len)
    return FeatureInputs(
        config,
        (q, k, v),
        own_q,
        own_k,
        own_v,
        arrays,
        units.poisoned(own_q.shape, units.DTYPES[config.out_dtype]),
        units.poisoned(lse_shape, units.DTYPES["float32"]),
    )
