"""Features of the sm_90a shared-key kernel against float64: paged, ragged, masked and capped variants, on the emulator and on the GPU."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from attention_problem import DTYPES, OUT_BOUND, compiled, source

from fa4gen.codegen import compiler, reference
from fa4gen.codegen.attention import attention_entry_infos, attention_launch
from fa4gen.codegen.backends import Launch
from fa4gen.codegen.backends.emulator import EmulatorBackend
from fa4gen.codegen.config import Config, parse_config
from fa4gen.codegen.emulator import Memory, Program
from fa4gen.codegen.emulator.memory import SHARED_START
from fa4gen.codegen.geometry import derive
from fa4gen.codegen.inspection.trace import Recorder

PAGED = {"kv_layout": "paged", "key_lengths": True}


def config(depth: int = 64, **fields: Any) -> Config:
    return parse_config({"name": "t", "shared_key": True, "arch": ["sm_90a"], "ov_depth": depth} | fields)


class FeatureProblem:
    """Inputs of a config with features. Keys past a sequence's end are NaN, pages lie in any order, and outputs hold NaN until written."""

    def __init__(
        self, c: Config, queries: list[int], lengths: list[int], group: int, kv_heads: int = 1, seed: int = 0, heads_first: bool = False
    ) -> None:
        rng = np.random.default_rng(seed)
        dtype = DTYPES[c.dtype]
        self.config, self.queries, self.lengths = c, queries, lengths
        batch, most, heads = len(lengths), max(1, *lengths), group * kv_heads
        if not c.key_lengths:
            assert min(lengths) == most
        self.arrays: dict[str, Any] = {}
        if c.key_lengths:
            self.arrays["key_lengths"] = np.array(lengths, np.int32)
        total = sum(queries)
        rows = (total,) if c.ragged_queries else (batch, queries[0])
        self.q = rng.standard_normal((*rows, heads, c.ov_depth), np.float32).astype(dtype)
        if c.ragged_queries:
            self.arrays |= {"query_starts": np.cumsum([0, *queries]).astype(np.int32), "max_q_len": max(queries)}
        if c.sinks:
            self.arrays["sinks"] = rng.standard_normal(heads).astype(np.float32) * 3
        kv_dtype = dtype if c.kv_dtype is None else np.dtype(ml_dtypes.float8_e4m3fn)
        pairs = rng.standard_normal((2, batch, most, kv_heads, c.ov_depth), np.float32).astype(kv_dtype)
        for b, length in enumerate(lengths):
            pairs[:, b, length:] = np.nan
        if c.page_size:
            page = c.page_size
            room = -(-most // page)
            places = rng.permutation(batch * room + 1)[: batch * room].reshape(batch, room).astype(np.int32)
            pages = np.full((2, batch * room + 1, page, kv_heads, c.ov_depth), np.nan, kv_dtype)
            for b, length in enumerate(lengths):
                for i in range(-(-length // page)):
                    part = pairs[:, b, i * page : (i + 1) * page]
                    pages[:, places[b, i], : part.shape[1]] = part
            if heads_first:
                pages = np.ascontiguousarray(pages.swapaxes(2, 3)).swapaxes(2, 3)
            # What lies past a sequence's end is no page: reading it would show.
            table = np.where(np.arange(room)[None, :] * page < np.array(lengths)[:, None], places, 1 << 30).astype(np.int32)
            self.arrays |= {"block_table": table, "max_keys": most}
            if c.page_list:
                self.list_pages(rng, table, pages)
            self.k, self.v = pages
        elif heads_first:
            self.k, self.v = (np.ascontiguousarray(array.swapaxes(1, 2)).swapaxes(1, 2) for array in pairs)
        else:
            self.k, self.v = pairs
        if c.kv_dtype is not None:
            scaled = (kv_heads,) if c.kv_scale == "head" else (self.k.shape[0], kv_heads)
            self.arrays |= {name: np.exp2(rng.uniform(-3, 3, scaled)).astype(np.float32) for name in ("k_scale", "v_scale")}
        if c.kv_scale == "page":
            # Pages of zeros may have scale 0; that of a page of no sequence is not read.
            self.arrays["v_scale"][rng.integers(0, self.k.shape[0])] = 0
            unused = np.setdiff1d(np.arange(self.k.shape[0]), self.arrays["block_table"])
            self.arrays["k_scale"][unused] = self.arrays["v_scale"][unused] = np.nan
        self.out = np.empty(self.q.shape, DTYPES[c.out_dtype])
        self.lse = np.empty((heads, total) if c.ragged_queries else (batch, heads, queries[0]), np.float32)
        self.poison()

    def list_pages(self, rng: np.random.Generator, table: np.ndarray, pages: np.ndarray) -> None:
        """Lists some of each sequence's pages, and with one in four a page too many at the end; the others hold NaN from now on."""
        page, listed = pages.shape[2], np.full(table.shape, 1 << 30, np.int32)
        page_places = np.full(table.shape, 2**31 - 1, np.int32)
        for b, length in enumerate(self.lengths):
            live = -(-length // page)
            chosen = np.flatnonzero(rng.random(live) < 0.6)
            pages[:, table[b, np.setdiff1d(np.arange(live), chosen)]] = np.nan
            listed[b, : len(chosen)], page_places[b, : len(chosen)] = table[b, chosen], chosen
            if len(chosen) < table.shape[1]:
                # The first place that is not of the sequence ends the list.
                page_places[b, len(chosen)] = live
        self.arrays |= {"block_table": listed, "page_places": page_places}

    def poison(self) -> None:
        self.out[:] = np.nan
        self.lse[:] = np.nan

    def launch(self, **options: Any) -> Launch:
        c = self.config
        return attention_launch(c, derive(c, c.arch[0]), self.q, self.k, self.v, self.out, self.lse, **self.arrays, **options)

    def check(self, scale: float | None = None) -> None:
        c = self.config
        known = {name: array for name, array in self.arrays.items() if name not in ("max_keys", "max_q_len")}
        if c.page_size and not c.key_lengths:
            known["key_lengths"] = np.array(self.lengths)
        scale = c.ov_depth**-0.5 if scale is None else scale
        causal = c.mask == "causal"
        out, lse = reference.attention(self.q, self.k, self.v, scale=scale, causal=causal, window=c.window, softcap=c.softcap, **known)
        ours = self.out.astype(np.float64)
        # Pages whose V has scale 0 count as 2^-64 of it: all that a row sees may lie in them.
        least = 2.0**-56 if c.kv_scale == "page" else 0.0
        assert np.linalg.norm(ours - out) <= OUT_BOUND[c.dtype] * np.linalg.norm(out) + least * ours.size**0.5
        seen = np.isfinite(lse)
        assert (self.lse[~seen] == -np.inf).all()
        assert (np.abs(self.lse[seen] - lse[seen]) <= 2e-4 + 2.0**-20 * np.abs(lse[seen])).all()
        assert (np.abs(ours[(out == 0).all(axis=-1)]) <= least).all()


# config fields, (queries, lengths, group, kv_heads), launch options
Case = tuple[dict[str, Any], tuple[list[int], list[int], int, int], dict[str, Any]]
RAGGED = {"ragged_queries": True, "key_lengths": True}
LISTED = PAGED | {"page_list": True}
FP8 = {"kv_dtype": "float8_e4m3fn"}
FP8_PAGES = FP8 | {"kv_scale": "page"}
AUTO = {"partition_keys": "auto", "ctas": 16}
CAUSAL_PAGES = {"page_size": 16, "mask": "causal", "window": 90, "tile_rows": 8}
CASES: list[Case] = [
    ({"key_lengths": True}, ([1] * 4, [0, 1, 130, 64], 8, 1), {}),
    ({"key_lengths": True, "mask": "causal"}, ([5] * 3, [3, 150, 0], 5, 1), {"partition_keys": 64}),
    ({"key_lengths": True, "warpgroups": 2}, ([1] * 3, [0, 70, 300], 12, 1), {"partition_keys": 128}),
    ({"key_lengths": True}, ([2] * 2, [500, 90], 1, 2), {"partition_keys": 64, "ctas": 3}),
    *(
        (PAGED | {"page_size": page, "mask": "causal"}, ([2] * 4, [0, 1, 77, 200], 5, 2), {"partition_keys": 128})
        for page in (1, 16, 32, 64, 128, 256)
    ),
    (PAGED | {"page_size": 16, "warpgroups": 2}, ([1] * 3, [450, 65, 0], 8, 1), {"partition_keys": 128, "ctas": 2}),
    (PAGED | {"page_size": 32, "ov_depth": 128}, ([1] * 2, [450, 33], 8, 1), {"partition_keys": 128}),
    (PAGED | CAUSAL_PAGES | {"ov_depth": 128}, ([2] * 3, [0, 1, 200], 4, 2), {"partition_keys": 64}),
    (PAGED | {"page_size": 64, "warpgroups": 2, "out_dtype": "float32"}, ([1] * 2, [450, 64], 8, 1), {"partition_keys": 64}),
    ({"kv_layout": "paged", "page_size": 16}, ([1] * 2, [100, 100], 8, 1), {}),
    # More entries of the table than the producer reads at once; two producers that skip each other's.
    (PAGED | {"page_size": 16}, ([1], [1100], 8, 1), {}),
    (PAGED | {"page_size": 1, "warpgroups": 2}, ([1], [300], 8, 1), {}),
    ({"mask": "causal", "window": 1}, ([3] * 2, [130, 130], 4, 1), {}),
    ({"mask": "causal", "window": 70}, ([4], [300], 8, 1), {}),
    ({"mask": "causal", "window": 64, "warpgroups": 2}, ([17], [263], 1, 1), {"scale": 2.0}),
    ({"mask": "causal", "window": 100, "ov_depth": 128}, ([4] * 2, [500, 500], 2, 1), {"partition_keys": 64}),
    ({"mask": "causal", "window": 150, "ov_depth": 128}, ([1] * 2, [1100, 1100], 8, 1), {"partition_keys": 64}),
    ({"mask": "causal", "window": 400, "ov_depth": 128, "out_dtype": "float32"}, ([1], [1100], 8, 1), {"partition_keys": 64}),
    ({"mask": "causal", "window": 90, "key_lengths": True}, ([2] * 3, [0, 40, 400], 8, 1), {"partition_keys": 128}),
    # Partitions of the window alone: in a cluster, in several, in one CTA; sequences that they cover whole, and ones that they do not.
    *(
        ({"mask": "causal", "window": window, "key_lengths": True, "ov_depth": depth}, ([2] * 3, lengths, 4, 1), AUTO)
        for depth, window, lengths in (
            (128, 300, [0, 40, 1500]),
            (128, 1000, [1063, 1000, 1800]),
            (256, 300, [384, 385, 2000]),
            (64, 600, [700, 1, 1400]),
        )
    ),
    (RAGGED | PAGED | {"page_size": 16, "mask": "causal", "window": 600, "ov_depth": 256}, ([4, 1, 9], [900, 0, 1222], 6, 1), AUTO),
    ({"mask": "causal", "window": 1000, "key_lengths": True, "warpgroups": 2, "ov_depth": 128}, ([17, 17], [1700, 900], 2, 1), AUTO),
    # Fewer key tiles in the window than queries see keys; several items a CTA, O of all but the last held; more CTAs than items.
    ({"mask": "causal", "window": 5, "key_lengths": True, "ov_depth": 128}, ([3] * 5, [2, 0, 700, 64, 129], 8, 2), AUTO | {"ctas": 1}),
    ({"softcap": 3.0}, ([1], [130], 8, 1), {"scale": 1.0}),
    ({"softcap": 20.0, "mask": "causal", "warpgroups": 2}, ([3], [200], 5, 1), {"scale": -3.0}),
    ({"sinks": True, "key_lengths": True}, ([1] * 3, [0, 1, 130], 12, 1), {}),
    ({"sinks": True, "warpgroups": 2}, ([2], [300], 5, 2), {"partition_keys": 64}),
    ({"sinks": True, "ov_depth": 128, "mask": "causal", "window": 128}, ([1] * 2, [520, 520], 8, 1), {"partition_keys": 64}),
    *(
        (LISTED | {"page_size": page} | fields, shape, options)
        for page, fields, shape, options in (
            (16, {}, ([1] * 4, [0, 5, 200, 133], 8, 1), {}),
            (16, {"mask": "causal"}, ([4] * 3, [300, 2, 150], 5, 1), {"partition_keys": 64, "ctas": 3}),
            (128, {"mask": "causal", "sinks": True, "warpgroups": 2}, ([2], [700], 8, 1), {"partition_keys": 256}),
            (16, {"mask": "causal", "window": 150}, ([4] * 2, [0, 450], 5, 1), {"partition_keys": 64}),
            (32, {"mask": "causal", "window": 230, "warpgroups": 2, "rescale": "exact"}, ([17], [500], 2, 1), {"partition_keys": 192}),
            (16, {"mask": "causal", "ragged_queries": True}, ([4, 1, 9], [100, 0, 222], 6, 1), {"ctas": 2}),
        )
    ),
    (RAGGED, ([1, 0, 5, 3], [90, 10, 0, 200], 5, 1), {}),
    (RAGGED | {"mask": "causal"}, ([17, 1, 4], [60, 150, 4], 2, 2), {"partition_keys": 64}),
    (RAGGED | {"mask": "causal", "warpgroups": 2, "out_dtype": "float32"}, ([3, 4, 1], [60, 150, 300], 8, 1), {"partition_keys": 64}),
    (RAGGED | PAGED | {"page_size": 16, "mask": "causal", "window": 50, "sinks": True}, ([4, 1, 9], [100, 0, 222], 6, 1), {"ctas": 2}),
    ({"rescale": "exact", "mask": "causal"}, ([4], [450], 8, 1), {"scale": 3.0, "partition_keys": 128}),
    ({"rescale": "exact", "use_fma": False, "dtype": "float16", "out_dtype": "float32"}, ([1], [450], 8, 1), {"scale": 1.0}),
    # 8 bits: entries of one tile size each, so that one is compiled.
    (FP8 | {"tile_rows": 8, "key_lengths": True}, ([1] * 4, [0, 1, 130, 64], 8, 2), {}),
    (FP8 | {"tile_rows": 32, "key_lengths": True, "mask": "causal"}, ([5] * 3, [3, 250, 0], 5, 1), {"partition_keys": 128}),
    (FP8 | {"ov_depth": 128, "warpgroups": 1, "mask": "causal", "window": 100, "tile_rows": 8}, ([4], [300], 2, 1), {"scale": -0.2}),
    (
        FP8 | {"ov_depth": 256, "out_dtype": "float32", "key_lengths": True, "tile_rows": 8},
        ([1] * 2, [200, 30], 8, 1),
        {"partition_keys": 64},
    ),
    (FP8 | {"ov_depth": 512, "dtype": "float16", "out_dtype": "float16", "tile_rows": 32, "rescale": "eager"}, ([4], [130], 6, 1), {}),
    (FP8 | RAGGED | PAGED | {"page_size": 16, "tile_rows": 16, "mask": "causal"}, ([4, 1, 9], [100, 0, 222], 6, 2), {"partition_keys": 64}),
    (FP8_PAGES | LISTED | {"page_size": 1, "ov_depth": 128, "tile_rows": 8}, ([1] * 2, [90, 200], 8, 2), {"partition_keys": 64}),
    (FP8_PAGES | PAGED | {"page_size": 32, "softcap": 20.0, "sinks": True, "tile_rows": 16}, ([2] * 3, [0, 1, 300], 5, 2), {}),
    (FP8_PAGES | {"kv_layout": "paged", "page_size": 64, "rescale": "exact", "tile_rows": 8}, ([1] * 2, [200, 200], 4, 1), {"scale": 1.0}),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_feature_is_right_and_clean_on_the_emulator(case):
    fields, shape, options = case
    c = config(**({"depth": fields["ov_depth"]} if "ov_depth" in fields else {}), **{k: v for k, v in fields.items() if k != "ov_depth"})
    seed = len(str(case))
    problem = FeatureProblem(c, *shape, seed=seed, heads_first=seed % 2 == 1)
    launch = problem.launch(**options)
    assert EmulatorBackend(seed=seed).run(compiled(source(c)), launch).hazards == []
    problem.check(options.get("scale"))


# The most that shared-key kernels keep in registers.
HEAVY = {"softcap": 30.0, "sinks": True, "mask": "causal", "window": 128, "rescale": "exact", "out_dtype": "float32"}


@pytest.mark.parametrize("depth", [64, 128])
def test_as_many_ctas_as_share_an_sm_by_default_never_spill(depth):
    c = config(depth=depth, page_size=16, **(HEAVY | RAGGED | PAGED))
    kernels = compiler.compile_source(source(c), "sm_90a", "attention.cu").kernels
    assert len(kernels) == 3
    assert [kernel.spill_store_bytes + kernel.spill_load_bytes + kernel.stack_bytes for kernel in kernels.values()] == [0] * 3


def run(problem: FeatureProblem, seed: int = 0, **options: Any) -> FeatureProblem:
    assert EmulatorBackend(seed=seed).run(compiled(source(problem.config)), problem.launch(**options)).hazards == []
    return problem


# (warpgroups, window, keys, keys of a partition, use_fma). In partitions of several key tiles, rows of one tile outgrow their maxima at
# different keys; with 66 keys some of the queries are the first to see a second key tile, so to have a second warpgroup.
@pytest.mark.parametrize(
    ("warpgroups", "window", "keys", "partition_keys", "use_fma"),
    [(1, None, 322, None, True), (1, 130, 322, 256, True), (2, None, 66, None, True), (2, 200, 450, 128, True), (2, 64, 322, None, False)],
)
def test_verifying_four_tokens_gives_the_bits_of_four_steps(warpgroups, window, keys, partition_keys, use_fma):
    fields = {"rescale": "exact", "mask": "causal", "key_lengths": True, "out_dtype": "float32"}
    c = config(**fields, use_fma=use_fma, warpgroups=warpgroups, window=window)
    options = {"partition_keys": partition_keys, "scale": 1.0}
    verify = run(FeatureProblem(c, [4], [keys], 8), **options)
    verify.check(1.0)
    for i in range(4):
        step = FeatureProblem(c, [1], [keys - 3 + i], 8)
        step.q, step.k, step.v = verify.q[:, i : i + 1].copy(), verify.k, verify.v
        run(step, seed=1, **options)
        assert step.out.tobytes() == verify.out[:, i : i + 1].tobytes()
        assert step.lse.tobytes() == verify.lse[:, :, i : i + 1].tobytes()


def test_a_sequence_gives_the_same_bits_alone_in_a_batch_and_in_pages():
    fields = {"rescale": "exact", "mask": "causal", "key_lengths": True, "out_dtype": "float32"}
    c, paged = config(**fields), config(**fields, kv_layout="paged", page_size=16)
    lengths = [520, 0, 130, 1]
    many = run(FeatureProblem(c, [2] * 4, lengths, 5), partition_keys=64, scale=1.0, ctas=3)
    pages = FeatureProblem(paged, [2] * 4, lengths, 5)
    assert pages.q.tobytes() == many.q.tobytes()
    run(pages, partition_keys=64, scale=1.0)
    assert pages.out.tobytes() == many.out.tobytes()
    assert pages.lse.tobytes() == many.lse.tobytes()
    alone = FeatureProblem(c, [2], [130], 5)
    alone.q, alone.k, alone.v = many.q[2:3].copy(), many.k[2:3, :130].copy(), many.v[2:3, :130].copy()
    run(alone, partition_keys=64, scale=1.0)
    assert alone.out.tobytes() == many.out[2:3].tobytes()
    assert alone.lse.tobytes() == many.lse[2:3].tobytes()


@pytest.mark.parametrize(
    ("layout", "page", "window"),
    [(PAGED, 16, 130), (PAGED, 16, 600), (PAGED, 32, 70), (PAGED, 64, 200), (LISTED, 16, None), (LISTED, 16, 130), (LISTED, 16, 200)],
)
def test_only_pages_in_sight_of_a_query_are_loaded(layout, page, window):
    """Whole pages of a key tile before the window stay away as well, and so do tiles of pages that are no less than a tile."""
    c = config(**layout, page_size=page, mask="causal", window=window)
    problem = FeatureProblem(c, [4], [900], 8)
    launch = problem.launch()
    recorder = Recorder({id(launch.args[1]): "k", id(launch.args[2]): "v"}, SHARED_START)
    arguments = (launch.entry, launch.grid, launch.block, launch.smem_bytes, list(launch.args))
    result = Program.from_ptx(compiled(source(c)).ptx).launch(*arguments, memory=Memory(), observer=recorder)
    assert result.hazards == []
    problem.check()
    listed = problem.arrays["block_table"][0]
    places = problem.arrays.get("page_places", np.arange(len(listed))[None])[0]
    first = 0 if window is None else np.searchsorted(places, (900 - 4 + 1 - window) // page)
    live = {int(page) for page in listed[first : np.searchsorted(places, -(-900 // page))]}
    assert len(live) < 50
    for operand in ("k", "v"):
        # A page past the list lies outside: its box brings zeros, no memory is read.
        loaded = {copy.coordinates[4] for copy in recorder.copies[0] if copy.array == operand}
        assert {page for page in loaded if 0 <= page < len(problem.k)} == live


def test_pages_before_a_window_may_hold_anything():
    """An engine may give them to another sequence: what it writes there is not multiplied by a probability of 0."""
    for page, window, queries in ((16, 130, 1), (16, 130, 3), (16, 600, 2), (32, 70, 1)):
        c = config(**PAGED, page_size=page, mask="causal", window=window)
        problem = FeatureProblem(c, [queries] * 2, [900, 333], 4)
        kept = problem.k.copy(), problem.v.copy()
        for table, length in zip(problem.arrays["block_table"], problem.lengths, strict=True):
            before = table[: max(length - queries + 1 - window, 0) // page]
            problem.k[before] = problem.v[before] = np.nan
        result = EmulatorBackend(seed=1).run(compiled(source(c)), problem.launch(partition_keys=64 if page == 32 else None))
        assert result.hazards == []
        problem.k[:], problem.v[:] = kept
        problem.check()


def test_lengths_that_the_launch_has_no_keys_for_count_as_the_nearest():
    """More partitions than CTAs take would be waited for by a merge for ever."""
    c = config(key_lengths=True)
    honest, wrong = (FeatureProblem(c, [1] * 3, [0, 200, 200], 8) for _ in range(2))
    wrong.arrays = {"key_lengths": np.array([-5, 1000, 200], np.int32)}
    for problem in (honest, wrong):
        run(problem, partition_keys=64)
    assert wrong.out.tobytes() == honest.out.tobytes()
    assert wrong.lse.tobytes() == honest.lse.tobytes()


# Starts that fall, that lie before or past the queries, and whose last is not their number.
@pytest.mark.parametrize("starts", [[0, 9, 4, 12], [-7, 3, 5000, 2], [5, 5, 9, 1 << 30], [8, 6, 4, 2]], ids=str)
def test_query_starts_that_do_not_rise_stay_within_the_arrays(starts):
    c = config(**RAGGED, mask="causal")
    problem = FeatureProblem(c, [4, 5, 3], [70, 10, 130], 5)
    problem.arrays["query_starts"] = np.array(starts, np.int32)
    problem.arrays["max_q_len"] = 12
    launch = problem.launch(partition_keys=64, ctas=2)
    kinds = {hazard.kind for hazard in EmulatorBackend(seed=3).run(compiled(source(c)), launch).hazards}
    # Sequences that claim one query each write it: what it holds is open, but nothing else happens.
    assert kinds <= {"race"}
    # Rows of a sequence that its starts describe well are right, whatever the others say.
    known = dict(problem.arrays)
    for b in range(3):
        first, end = np.clip(starts[b], 0, 12), np.clip(starts[b + 1], 0, 12)
        taken = [row for other in range(3) if other != b for row in range(max(starts[other], 0), min(starts[other + 1], 12))]
        if end <= first or set(taken) & set(range(first, end)):
            continue
        alone = {"query_starts": np.array([0, end - first]), "key_lengths": known["key_lengths"][b : b + 1]}
        rows = slice(first, end)
        expected, lse = reference.attention(problem.q[rows], problem.k[b : b + 1], problem.v[b : b + 1], scale=0.125, causal=True, **alone)
        assert np.linalg.norm(problem.out[rows] - expected) <= OUT_BOUND[c.dtype] * np.linalg.norm(expected)
        seen = np.isfinite(lse)
        assert np.allclose(problem.lse[:, rows][seen], lse[seen], atol=2e-4)


@pytest.mark.parametrize(
    ("depth", "fields", "lengths", "options"),
    [
        (64, {}, [300, 1], {"partition_keys": 128, "ctas": 2}),
        (64, {}, [384, 172], {"partition_keys": 128, "ctas": 2}),
        (128, {"out_dtype": "float32"}, [128, 1], {"ctas": 1}),
        (128, FP8, [384, 172], {"partition_keys": 128, "ctas": 2}),
    ],
    ids=str,
)
def test_a_warpgroup_alone_with_an_item_waits_for_the_other(depth, fields, lengths, options):
    """An item of one key tile after one of several: the answer of publish, the partitions' weights and O tiles have one place each."""
    c = config(depth, key_lengths=True, warpgroups=2, tile_rows=8, **fields)
    geo = derive(c, "sm_90a")
    assert geo.q_buffers == 2, "with one buffer the next item's Q waits for both warpgroups"
    for seed in range(4):
        run(FeatureProblem(c, [1] * 2, lengths, 5, 2), seed, **options).check()


@pytest.mark.parametrize("fields", [{}, PAGED | {"page_size": 16}, FP8 | {"ov_depth": 128}], ids=str)
def test_a_warpgroup_without_keys_gives_no_answer_before_its_producer_has_read_the_last(fields):
    """Partitions of a key tile, with a window: every item in which it lies is the other warpgroup's alone, but both finish it."""
    fields = {"mask": "causal", "window": 200, "warpgroups": 2, "tile_rows": 16, "key_lengths": True} | fields
    depth = fields.pop("ov_depth", 64)
    c = config(depth=depth, **fields)
    changed = source(c).replace("if (passes_empty_slot(item, warpgroup)) {", "if (false) {")
    assert changed != source(c)
    for text, clean in ((source(c), True), (changed, False)):
        found = set()
        for seed in range(2):
            problem = FeatureProblem(c, [1, 1], [700, 94], 1, 2)
            result = EmulatorBackend(seed=seed).run(compiled(text), problem.launch(ctas=1, partition_keys=64))
            found |= {hazard.kind for hazard in result.hazards}
            if clean:
                problem.check()
        assert not found if clean else found & {"race", "mbarrier"}


def test_rows_past_the_last_sequence_are_left_alone():
    """A batch that is padded for a captured graph: the arrays have more rows than query_starts names."""
    c = config(**RAGGED)
    problem = FeatureProblem(c, [1, 2, 3], [70, 10, 130], 5)
    problem.arrays["query_starts"] = np.array([0, 1, 3, 3], np.int32)
    run(problem, partition_keys=64)
    assert np.isnan(problem.out[3:].astype(np.float32)).all()
    assert np.isnan(problem.lse[:, 3:]).all()
    problem.q, problem.out, problem.lse = problem.q[:3], problem.out[:3], problem.lse[:, :3]
    problem.check()


def placed(pages: np.ndarray, place: str, spare: int = 0) -> np.ndarray:
    """`pages` [n, p keys, h KV heads, d] as a view of memory with the axes of `place`, outermost first (2: K beside V), NaN elsewhere,
    and room for `spare` more keys a page."""
    extents = dict(zip("nphd", pages.shape, strict=True)) | {"2": 2}
    extents["p"] += spare
    memory = np.full([extents[axis] for axis in place], np.nan, pages.dtype)
    half = memory[(slice(None),) * place.index("2") + (1,)] if "2" in place else memory
    axes = place.replace("2", "")
    view = half.transpose([axes.index(axis) for axis in "nphd"])[:, : pages.shape[1]]
    view[:] = pages
    return view


@pytest.mark.parametrize(("k_place", "v_place"), [("n2hpd", "nph2d"), ("hpnd", "n2phd")])
def test_pages_of_k_and_of_v_may_lie_differently(k_place, v_place):
    c = config(128, **PAGED, **CAUSAL_PAGES)
    problem = FeatureProblem(c, [2] * 2, [130, 17], 4, 3)
    problem.k, problem.v = placed(problem.k, k_place), placed(problem.v, v_place, spare=1)
    run(problem).check()


def test_an_entry_states_the_arguments_of_its_features():
    c = config(kv_layout="paged", page_size=16, key_lengths=True, ragged_queries=True, sinks=True)
    text = source(c)
    for info in attention_entry_infos(c, "sm_90a"):
        declaration = re.search(r"\n" + info["name"] + r"\((.*?)\) \{", text, re.DOTALL)
        assert declaration is not None
        names = [part.split()[-1].strip("*") for part in declaration[1].split(",")]
        assert names == [argument["name"] for argument in info["arguments"]]
        assert names[-6:] == ["block_table", "table_pages", "key_lengths", "query_starts", "total_q", "sinks"]


def test_feature_arrays_that_do_not_fit_are_refused():
    c = config(kv_layout="paged", page_size=16, key_lengths=True, ragged_queries=True, sinks=True)
    good = FeatureProblem(c, [1, 3], [20, 70], 2)
    good.launch()
    arrays = dict(good.arrays)

    def refused(match: str, **change: Any) -> None:
        good.arrays = {name: value for name, value in (arrays | change).items() if value is not None}
        with pytest.raises(ValueError, match=match) as error:
            good.launch()
        assert "\n" not in str(error.value)

    refused("block_table is missing", block_table=None)
    refused("k_scale is given", k_scale=np.ones(1, np.float32))
    refused("block_table is int64", block_table=arrays["block_table"].astype(np.int64))
    refused("key_lengths is int32", key_lengths=np.zeros(3, np.int32))
    refused("sinks is float64", sinks=arrays["sinks"].astype(np.float64))
    refused("max_q_len is None", max_q_len=None)
    refused("max_keys is 81", max_keys=81)
