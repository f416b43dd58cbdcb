"""The sm_100a attention kernel: memory maps, launches, results and hazards on the emulator."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fa4gen.codegen import attention_sm100, compiler, reference, render
from fa4gen.codegen.attention import Extents, Workspace, attention_entry_info, attention_launch
from fa4gen.codegen.backends import BackendError, Compiled, Launch
from fa4gen.codegen.backends.emulator import EmulatorBackend
from fa4gen.codegen.config import Config, ConfigError, disabled_rules, load_shipped, parse_config
from fa4gen.codegen.emulator import Uninitialized
from fa4gen.codegen.geometry import derive
from fa4gen.codegen.geometry_sm100 import Sm100Geometry

CONFIGS = ("d64", "d128", "d128_m2", "d128_nofma", "d256", "d256_m2", "d512")

pytestmark = pytest.mark.skipif(compiler.nvrtc_version() is None, reason="NVRTC is not installed")


def variant(name: str, **fields: object) -> Config:
    shipped = {key: value for key, value in load_shipped(name).model_dump().items() if value not in (None, ())}
    return parse_config(shipped | {"arch": ["sm_100a"]} | fields)


def geometry(config: Config) -> Sm100Geometry:
    geo = derive(config, "sm_100a")
    assert isinstance(geo, Sm100Geometry)
    return geo


@cache
def source(config: Config) -> str:
    return render.render(config, "sm_100a")["attention.cu"]


def module(config: Config) -> compiler.Module:
    return compiler.compile_source(source(config), "sm_100a", "attention.cu")


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("name", CONFIGS)
def test_no_spills(name: str, mask: str) -> None:
    (resources,) = module(variant(name, mask=mask)).kernels.values()
    assert (resources.spill_store_bytes, resources.spill_load_bytes, resources.stack_bytes) == (0, 0, 0)
    assert resources.registers <= 128  # 512 threads enter with a 512th of the register file each


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "d256_m2"])
def test_epilogue_staging_is_what_the_geometry_reserves(name: str, out_dtype: str) -> None:
    geo = geometry(variant(name, out_dtype=out_dtype))
    assert geo.arena_map[-1].end == geo.arena_bytes <= geo.q_bytes + geo.ring_slots * geo.slot_bytes
    assert geo.arena("out") % 1024 == 0  # swizzle pattern
    assert all(region.offset % 16 == 0 for region in geo.arena_map)


def test_instruction_descriptor() -> None:
    geo = geometry(load_shipped("d256"))
    assert geo.instruction_descriptor(256, "bfloat16", b_is_mn_major=False) == 0x02400490
    assert geo.instruction_descriptor(256, "float16", b_is_mn_major=True) == 0x02410010
    assert geometry(load_shipped("d128_m2")).instruction_descriptor(256, "bfloat16", b_is_mn_major=False) == 0x04400490


@pytest.mark.parametrize("name", CONFIGS)
def test_a_v_tile_fills_its_slots(name: str) -> None:
    geo = geometry(load_shipped(name))
    assert geo.v_boxes * geo.v_box_chunks * geo.v_box_keys * 128 == geo.slot_bytes == geo.v_boxes * geo.v_box_bytes
    # Every part's keys meet every depth column once: slots x boxes x keys x chunks covers the tile of V.
    assert geo.v_slots * geo.v_boxes * geo.v_box_keys * geo.v_box_chunks * 64 == geo.block_keys * geo.depth
    assert geo.pv_chunks * geo.o_tiles == geo.v_slots
    assert geo.v_box_keys <= 256


def test_launch_refuses_what_does_not_fit() -> None:
    config = load_shipped("d256")
    geo = geometry(config)
    bf16 = np.dtype(ml_dtypes.bfloat16)
    q, k = np.zeros((1, 4, 8, 256), bf16), np.zeros((1, 64, 1, 256), bf16)
    lse = np.zeros((1, 8, 4), np.float32)
    launch = attention_launch(config, geo, q, k, k, q.copy(), lse)
    assert (launch.grid, launch.block, launch.smem_bytes) == ((1, 1, 1), (512, 1, 1), geo.smem_bytes)
    with pytest.raises(ValueError, match="float32"):
        attention_launch(config, geo, q.astype(np.float32), k, k, q.copy(), lse)
    with pytest.raises(ValueError, match="do not fit"):
        attention_launch(config, geo, q, k, k[:, :32], q.copy(), lse)
    with pytest.raises(ValueError, match="lse"):
        attention_launch(config, geo, q, k, k, q.copy(), lse[:, :4])
    with pytest.raises(ValueError, match="finite"):
        attention_launch(config, geo, q, k, k, q.copy(), lse, scale=float("nan"))
    arrays = (q, k, k, q.copy(), lse, Extents(1, 4, 64, 1, 8))
    with pytest.raises(ValueError, match="sm_90a"):
        attention_sm100.attention_launch(config, derive(config, "sm_90a"), *arrays, 1.0, {}, ctas=1, partition_keys=None, workspace=None)


def test_arrays_of_features_that_the_kernel_lacks_are_refused() -> None:
    problem = Problem(load_shipped("d128"), keys=64)
    for name in ("block_table", "key_lengths", "query_starts"):
        with pytest.raises(ValueError, match=f"{name} is given, but no feature of the config"):
            problem.launch(**{name: np.zeros(1, np.int32)})


def test_strides_are_taken_as_given() -> None:
    config = variant("d128")
    dense, strided = Problem(config, keys=300, kv_heads=2, group=4), Problem(config, keys=300, kv_heads=2, group=4)
    strided.k, strided.v = (np.ascontiguousarray(array.swapaxes(1, 2)).swapaxes(1, 2) for array in (dense.k, dense.v))
    for problem in (dense, strided):
        assert EmulatorBackend().run(Compiled("sm_100a", module(config).ptx), problem.launch()).hazards == []
    assert strided.out.tobytes() == dense.out.tobytes()


def test_entry_arguments_are_those_of_the_kernel() -> None:
    config = load_shipped("d128")
    info = attention_entry_info(config, geometry(config))
    names = [argument["name"] for argument in info["arguments"]]
    signature = source(config).split(f"{info['name']}(")[-1].split(") {")[0]
    assert [parameter.split()[-1] for parameter in signature.split(",")] == names
    assert (info["block"], info["smem_bytes"]) == ([512, 1, 1], geometry(config).smem_bytes)


# key tiles, query tiles, CTAs that run at once -> key tiles of a partition
@pytest.mark.parametrize(
    ("key_tiles", "query_tiles", "ctas", "expected"), [(64, 1, 148, 2), (64, 8, 148, 4), (1, 1, 148, 1), (64, 200, 148, 64)]
)
def test_auto_partitions_fill_the_chip(key_tiles: int, query_tiles: int, ctas: int, expected: int) -> None:
    assert attention_sm100.auto_partition_tiles(key_tiles, query_tiles, ctas, 2) == expected


# --- on the emulator --------------------------------------------------------------------------------------------------

# ||out - ref|| / ||ref||: a rounding of P and one of O, each uniform within half a unit in the last place.
OUT_BOUND = {"bfloat16": 4e-3, "float16": 5e-4, "float32": 0.0}
DTYPES: dict[str, Any] = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


class Problem:
    """Inputs drawn from the seed, and outputs that hold NaN until a kernel writes them. growth: factor of the scores' spread."""

    def __init__(
        self, config: Config, *, keys: int, q_len: int = 4, group: int = 8, kv_heads: int = 1, batch: int = 1, growth: float = 1.0
    ) -> None:
        rng = np.random.Generator(np.random.PCG64(keys))
        dtype = DTYPES[config.dtype]
        shape = (batch, q_len, kv_heads * group, config.ov_depth)
        self.config = config
        self.q = (rng.standard_normal(shape, np.float32) * growth).astype(dtype)
        self.k, self.v = (rng.standard_normal((batch, keys, kv_heads, config.ov_depth), np.float32).astype(dtype) for _ in range(2))
        self.out = np.full(shape, np.nan, np.float32).astype(DTYPES[config.out_dtype])
        self.lse = np.full((batch, kv_heads * group, q_len), np.nan, np.float32)

    def launch(self, **options: Any) -> Launch:
        return attention_launch(self.config, geometry(self.config), self.q, self.k, self.v, self.out, self.lse, **options)

    def right(self, scale: float) -> bool:
        out, lse = reference.attention(self.q, self.k, self.v, scale=scale, causal=self.config.mask == "causal")
        ours = self.out.astype(np.float64)
        seen = np.isfinite(lse)
        return bool(
            np.linalg.norm(ours - out) <= max(OUT_BOUND[self.config.dtype], OUT_BOUND[self.config.out_dtype]) * np.linalg.norm(out)
            and (ours[~seen.transpose(0, 2, 1)] == 0).all()
            and (self.lse[~seen] == -np.inf).all()
            and (np.abs(self.lse[seen] - lse[seen]) <= 1e-4 + 2.0**-20 * np.abs(lse[seen])).all()
        )


@cache
def emulator(seed: int) -> EmulatorBackend:
    """One a seed: it keeps the programs that it has parsed."""
    return EmulatorBackend(seed=seed)


def run(
    config: Config, text: str | None = None, *, seed: int = 0, scale: float | None = None, partition_keys: Any = None, **shape: Any
) -> str:
    """What is wrong with a run: kinds of hazards, "value", "refused", "not compiled", or nothing."""
    problem = Problem(config, **shape)
    try:
        compiled = module(config) if text is None else compiler.compile_source(text, "sm_100a", "attention.cu")
        launch = problem.launch(scale=scale, partition_keys=partition_keys)
        hazards = emulator(seed).run(Compiled("sm_100a", compiled.ptx), launch).hazards
    except compiler.CompileError:
        return "not compiled"
    except BackendError:
        return "refused"
    kinds = " ".join(sorted({hazard.kind for hazard in hazards or ()}))
    return kinds or ("" if problem.right(config.ov_depth**-0.5 if scale is None else scale) else "value")


KERNELS = tuple(name for name in CONFIGS if name != "d128_nofma")  # test_seeds has both use_fma

# Edges of the key tile (256), of the P stages (32, 64 keys of a part), of the key chunk (64), and of the last MMA (16).
EDGES = (1, 16, 17, 32, 33, 64, 65, 128, 129, 192, 255, 256, 257, 320, 321, 512, 513, 769, 2100)


@pytest.mark.parametrize("name", KERNELS)
def test_every_edge_of_the_keys(name: str) -> None:
    config = variant(name)
    assert {keys: found for keys in EDGES if (found := run(config, keys=keys, q_len=1, group=3))} == {}


@pytest.mark.parametrize("name", KERNELS)
def test_every_edge_of_the_keys_causal(name: str) -> None:
    config = variant(name, mask="causal")
    # 20 positions: some rows end in every key chunk that the tile's first row does not reach.
    assert {keys: found for keys in EDGES[::3] if (found := run(config, keys=keys, q_len=20, group=1))} == {}


@pytest.mark.parametrize("use_fma", [True, False])
@pytest.mark.parametrize("name", KERNELS)
def test_seeds(name: str, use_fma: bool) -> None:
    config = variant(name, use_fma=use_fma)
    assert [run(config, seed=seed, keys=(520, 600, 769, 800, 1100)[seed], q_len=2, growth=5.0) for seed in range(5)] == [""] * 5


@pytest.mark.parametrize(
    ("group", "kv_heads", "q_len", "batch", "mask"),
    [(1, 2, 40, 1, "causal"), (6, 1, 11, 2, "none"), (40, 2, 3, 1, "causal"), (80, 1, 2, 1, "none"), (8, 2, 5, 2, "causal")],
)
@pytest.mark.parametrize("name", ["d128_m2", "d256"])
def test_groups(name: str, group: int, kv_heads: int, q_len: int, batch: int, mask: str) -> None:
    assert run(variant(name, mask=mask), keys=300, group=group, kv_heads=kv_heads, q_len=q_len, batch=batch) == ""


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("name", KERNELS)
def test_partitions(name: str, mask: str) -> None:
    config = variant(name, mask=mask)
    # Three partitions, the last one short.
    assert [run(config, seed=seed, keys=1100, q_len=20, group=2, partition_keys=512) for seed in range(2)] == [""] * 2
    # One key tile each: no partition has work for warpgroup 1.
    assert run(config, keys=700, q_len=2, group=4, partition_keys=256) == ""


@pytest.mark.parametrize("name", ["d128", "d512"])
def test_fixed_partitions_are_independent_of_batch_mates(name: str) -> None:
    config = variant(name, split="fixed 512")
    alone, together = Problem(config, keys=900, group=1), Problem(config, keys=900, group=1, batch=2)
    together.q[1], together.k[1], together.v[1] = alone.q[0], alone.k[0], alone.v[0]
    for seed, problem in enumerate((alone, together)):
        assert EmulatorBackend(seed=seed).run(Compiled("sm_100a", module(config).ptx), problem.launch()).hazards == []
    assert together.out[1].tobytes() == alone.out[0].tobytes()
    assert together.lse[1].tobytes() == alone.lse[0].tobytes()


def test_split_policies() -> None:
    def grid(split: str | None, **options: Any) -> int:
        return Problem(variant("d128", **({} if split is None else {"split": split})), keys=8192).launch(**options).grid[0]

    assert (grid(None), grid("fixed 512"), grid("auto"), grid("fixed 512", partition_keys="auto")) == (1, 16, 16, 16)
    assert (grid(None, partition_keys=256), grid("auto", ctas=4)) == (32, 4)
    with pytest.raises(ValueError, match="multiple of 256"):
        grid(None, partition_keys=300)


def arrays(launch: Launch) -> list[np.ndarray]:
    return [a.array if isinstance(a, Uninitialized) else a for a in launch.args if isinstance(a, (np.ndarray, Uninitialized))]


def test_a_workspace_is_its_streams_own() -> None:
    config = variant("d64")
    small, large = Problem(config, keys=300), Problem(config, keys=700, batch=2)
    workspace = Workspace()
    launches = [p.launch(partition_keys=256, workspace=workspace) for p in (small, large, small)]
    stranger = large.launch(partition_keys=256, workspace=Workspace())
    assert not any(np.shares_memory(a, b) for launch in launches for a in arrays(launch)[1:] for b in arrays(stranger)[1:])
    # Numbers rise; what is large enough is used again.
    assert [launch.args[-4] for launch in launches] == [1, 2, 3]
    assert arrays(launches[1])[1:] == arrays(launches[2])[1:]
    for launch, problem in zip(launches, (small, large, small), strict=True):
        problem.out[:], problem.lse[:] = np.nan, np.nan
        assert emulator(0).run(Compiled("sm_100a", module(config).ptx), launch).hazards == []
        assert problem.right(0.125)
        assert not arrays(launch)[-1].any()


class Aborted(Exception):
    pass


@pytest.mark.parametrize("name", ["d64", "d256"])
def test_counters_survive_an_aborted_launch(name: str) -> None:
    """The next launch in the stream starts afresh from the arrivals that it finds, and leaves none."""
    config = variant(name)
    problem, kernel, workspace = Problem(config, keys=1100), Compiled("sm_100a", module(config).ptx), Workspace()

    def launched(seed: int, progress: Callable[[int], None] | None = None) -> bytes:
        problem.out.fill(np.nan)
        problem.lse.fill(np.nan)
        launch = problem.launch(partition_keys=512, workspace=workspace)
        hazards = EmulatorBackend(seed=seed).run(kernel, launch, progress=progress).hazards
        assert hazards == []
        return problem.out.tobytes() + problem.lse.tobytes()

    first = launched(0)
    counters = problem.launch(partition_keys=512, workspace=workspace).args[-1]
    assert isinstance(counters, np.ndarray)
    assert not counters.any()

    def abort(_: int) -> None:
        if counters.any():
            raise Aborted

    with pytest.raises(Aborted):
        launched(1, abort)
    assert counters.any()
    assert launched(2) == first
    assert not counters.any()


@pytest.mark.parametrize("name", ["d128", "d256"])
@pytest.mark.parametrize("use_fma", [True, False])
@pytest.mark.parametrize("scale", [-0.1, 0.0, 3.0])
def test_any_scale(name: str, use_fma: bool, scale: float) -> None:
    assert run(variant(name, use_fma=use_fma), keys=600, scale=scale) == ""


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_without_a_key(name: str) -> None:
    # 3 keys, 9 positions of 8 heads: the first tiles see nothing, one sees a part.
    assert run(variant(name, mask="causal"), keys=3, q_len=9, group=8) == ""


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("d64", {"dtype": "float16", "out_dtype": "float16"}),
        ("d128", {"out_dtype": "float32"}),
        ("d128", {"block_keys": 128, "mask": "causal"}),
        ("d128", {"warpgroups": 1, "mask": "causal"}),
        ("d128_m2", {"dtype": "float16"}),
        ("d256", {"ov_depth": 64}),
        ("d256", {"ov_depth": 128, "out_dtype": "float32"}),
        ("d256", {"block_keys": 128, "tile_rows": 8}),
        ("d256_m2", {"warpgroups": 1, "out_dtype": "float32"}),
        ("d512", {"warpgroups": 1, "mask": "causal"}),
        ("d512", {"out_dtype": "float32", "group": 8}),
    ],
)
def test_other_configs(name: str, fields: dict[str, Any]) -> None:
    config = variant(name, **fields)
    assert [run(config, seed=seed, keys=keys, growth=3.0) for seed, keys in enumerate((100, 900, 1000))] == [""] * 3


def test_rescaling_is_lazy() -> None:
    config = variant("d256")
    never = source(config).replace("__any_sync(0xffffffff, factor != 1.0f)", "false")
    assert never != source(config)
    # Scores of spread 1 never outgrow the first maximum by 2^8; scores of spread 8 do.
    assert run(config, never, keys=1100) == ""
    assert run(config, never, keys=1100, growth=8.0) == "value"
    assert run(config, keys=1100, growth=8.0) == ""


# What is removed -> (config, the text, what stands in its place). Each must show as a hazard or a wrong value.
MUTANTS = {
    "P.V does not wait for P": ("d256", "correction warps.\n            wait(p_ready, (round - 1) & 1);", "correction warps."),
    "P.V does not wait for the second stage of P": ("d128", "wait(p_ready + MBARRIER_BYTES, (round - 1) & 1);", ""),
    "S overwrites P before P.V has read it": ("d128_m2", "wait(o_full, (round - 1) & 1);", ""),
    "MMAs do not wait for K": (
        "d512",
        "++stage) {\n                wait(smem + RING_FULL_OFFSET + ring.slot * MBARRIER_BYTES, ring.parity);",
        "++stage) {",
    ),
    "the load does not wait for an empty slot": (
        "d512",
        "wait(smem + RING_EMPTY_OFFSET + ring.slot * MBARRIER_BYTES, ring.parity ^ 1);",
        "",
    ),
    "slots are not released": ("d64", "if (stage == 1) ptx_tcgen05_commit(smem + RING_EMPTY_OFFSET + ring.slot * MBARRIER_BYTES);", ""),
    "softmax does not wait for S": ("d128", "wait(s_full, round & 1);", ""),
    "P is handed over before its stores are done": ("d128", "columns);\n            ptx_tcgen05_wait_st();", "columns);"),
    "the correction does not wait for the factors": ("d256", "wait(full, (round - 1) & 1);", ""),
    "O is added to before its rescaling is stored": (
        "d128",
        "ptx_tcgen05_wait_st();\n                ptx_tcgen05_fence_before();",
        "ptx_tcgen05_fence_before();",
    ),
    "the epilogue does not wait for the last MMA": ("d256", "wait(smem + S_FULL_OFFSET + at.warpgroup * MBARRIER_BYTES, rounds & 1);", ""),
    "the output is copied before it is staged": ("d256", "before it is freed.\n    ptx_bar_sync(0, 128);", "before it is freed."),
    "both depth tiles share a window": ("d512", "WINDOWS_OFFSET + o_tile * WINDOW_BYTES", "WINDOWS_OFFSET"),
    "a dead key chunk is loaded": ("d256", "part < chunks * O_TILES", "part < PV_CHUNKS * O_TILES"),
    "a single key tile is merged": (
        "d256",
        "const bool merged = item.tiles > 1;\n    if (!merged && at.warpgroup == 1) return;",
        "const bool merged = true; if (item.tiles <= 1 && at.warpgroup == 1) return;",
    ),
    "tensor memory is kept": ("d256", "ptx_tcgen05_dealloc(tmem, TMEM_COLUMNS);", ""),
    "a partition's part is not published": ("d256", "publishes it.\n        ptx_bar_sync(0, 128);", "publishes it."),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_removed_safeguard_shows(mutant: str) -> None:
    name, old, new = MUTANTS[mutant]
    config = variant(name)
    assert old in source(config)
    broken = source(config).replace(old, new)
    shapes = [{"keys": 1300, "growth": 5.0}, {"keys": 100}, {"keys": 1300, "partition_keys": 512}]
    assert any(run(config, broken, seed=seed, **shape) for seed in range(3) for shape in shapes)


# Rule -> (config, fields one step inside, fields one step outside, how that fails).
TIGHT: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    # S and O of two warpgroups take 640 columns.
    "tmem-columns": (
        "d256_m2",
        {"ov_depth": 512, "warpgroups": 1},
        {"ov_depth": 512, "block_keys": 128, "ring_slots": 3},
        "tmem_allocation",
    ),
    "smem-bytes": ("d512", {"ring_slots": 4}, {"ring_slots": 5}, "refused"),
    # A stage of P would be half an MMA of 16 keys.
    "key-chunk-steps": ("d128", {"block_keys": 128}, {"block_keys": 64}, "not compiled"),
    # Two slots of K depth and four of V: S lacks half of the depth.
    "ring-walk": ("d256", {}, {"qk_depth": 128}, "value"),
    # Stage 0 of P.V holds the first slot of a V tile and waits for the second.
    "ring-floor": ("d128", {"ring_slots": 5}, {"ring_slots": 1}, "deadlock"),
    # The staging reaches into the rescaling factors, the mbarriers and the tensor memory address.
    "epilogue-arena": ("d128", {"ring_slots": 5}, {"ring_slots": 4}, ""),
}


@pytest.mark.parametrize("rule", TIGHT)
def test_rules_are_tight(rule: str) -> None:
    name, inside, outside, failure = TIGHT[rule]
    assert run(variant(name, **inside), keys=700) == ""
    with pytest.raises(ConfigError):
        variant(name, **outside)
    with disabled_rules(*TIGHT, "equal-depths"):
        found = run(variant(name, **outside), keys=700)
    assert found
    assert failure in found
