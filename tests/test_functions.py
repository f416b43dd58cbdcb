"""The device functions: what their PTX and SASS hold, their results on the emulator, and the races that each removed safeguard causes."""

from __future__ import annotations

import re
import subprocess
import sysconfig
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from fa4gen.codegen import compiler, golden, units
from fa4gen.codegen.backends import Compiled
from fa4gen.codegen.backends.emulator import EmulatorBackend
from fa4gen.codegen.config import ARCHES, Config, load_config, parse_config, shipped_configs
from fa4gen.codegen.geometry import derive
from fa4gen.codegen.render import render

# Those of a model have the functions of their depth's.
SHARED_KEY = [name for name in shipped_configs() if load_config(name).shared_key and not load_config(name).features()]
TARGETS = [(name, arch) for name in shipped_configs() for arch in load_config(name).arch]
KEY_SPLIT = [name for name in shipped_configs() if not load_config(name).shared_key]


@cache
def unit_module(config: Config, arch: str) -> compiler.Module:
    return compiler.compile_source(render(config, arch)["unit.cu"], arch, "unit.cu")


def entries(listing: str, header: str) -> dict[str, str]:
    """A PTX or SASS listing cut at each entry: name -> text."""
    pieces = re.split(header, listing)
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))


def sass(cubin: bytes, folder: Path) -> dict[str, str]:
    tool = next(Path(sysconfig.get_paths()["purelib"]).glob("nvidia/**/bin/nvdisasm"), None)
    assert tool is not None, "nvdisasm comes with the dev extra"
    (folder / "unit.cubin").write_bytes(cubin)
    listing = subprocess.run([str(tool), str(folder / "unit.cubin")], capture_output=True, text=True, check=True).stdout
    return entries(listing, r"\.section\s+\.text\.(\w+),")


def run(module_ptx: str, arch: str, case: units.Case, seed: int = 0):
    return EmulatorBackend(seed=seed).run(Compiled(arch, module_ptx), case.launch)


# --- exchange -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", SHARED_KEY)
def test_one_barrier_per_exchange_in_ptx_and_sass(name, arch, tmp_path):
    module = unit_module(load_config(name), arch)
    ptx = entries(module.ptx, r"\.visible \.entry (\w+)")
    machine = sass(module.cubin, tmp_path)
    # The rolled loop of unit_exchange4_loop holds the maximum's barrier once, and the final sum has its own.
    for entry, barriers in {"unit_exchange4_max": 1, "unit_exchange4_add": 1, "unit_exchange4_loop": 2}.items():
        assert len(re.findall(r"\bbar(?:rier)?\.(?:cta\.)?sync\b", ptx[entry])) == barriers
        assert len(re.findall(r"\bBAR\.SYNC\b", machine[entry])) == barriers
        assert "BAR.RED" not in machine[entry]


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", SHARED_KEY)
@pytest.mark.parametrize("op", ["max", "add", "loop"])
def test_exchange_is_exact_and_equal_in_all_warps(name, arch, op):
    config = load_config(name)
    geo = derive(config, arch)
    case = units.exchange_case(config, geo, op, seed=3)
    outcome = run(unit_module(config, arch).ptx, arch, case)
    assert outcome.hazards == []
    assert case.judge().ok
    parts = case.outputs["out"].view(np.uint32).reshape(-1, 2, geo.m_pack, geo.rows)
    assert (parts == parts[:, :, :1]).all()


@pytest.mark.parametrize("first_seq", [1, 2**32 - 3])
def test_exchange_sequence_may_start_anywhere_and_wrap(first_seq):
    config = load_config("d512")
    case = units.exchange_case(config, derive(config, "sm_100a"), "loop", first_seq=first_seq)
    outcome = run(unit_module(config, "sm_100a").ptx, "sm_100a", case)
    assert outcome.hazards == []
    assert case.judge().ok


BARRIER = "ptx_bar_sync(warp_group_idx, 128);"
SEEDS = range(20)


def mutated(config: Config, arch: str, old: str, new: str, count: int) -> str:
    """PTX of unit.cu with `old` replaced; the count keeps a mutation from silently not applying."""
    source = render(config, arch)["unit.cu"]
    assert source.count(old) == count
    return compiler.compile_source(source.replace(old, new), arch, "unit.cu").ptx


def races_by_seed(ptx: str, arch: str, config: Config, op: str) -> list[int]:
    found = []
    for seed in SEEDS:
        case = units.exchange_case(config, derive(config, arch), op)
        found.append(sum(hazard.kind == "race" for hazard in run(ptx, arch, case, seed).hazards))
    return found


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", ["d512", "d256_m2"])
@pytest.mark.parametrize("op", ["max", "add", "loop"])
def test_correct_exchange_is_clean_under_every_schedule(name, arch, op):
    config = load_config(name)
    ptx = unit_module(config, arch).ptx
    for seed in SEEDS:
        case = units.exchange_case(config, derive(config, arch), op)
        assert run(ptx, arch, case, seed).hazards == []
        assert case.judge().ok


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", ["d512", "d256_m2"])
@pytest.mark.parametrize(
    ("what", "op", "old", "new", "count"),
    [
        ("no barrier", "max", BARRIER, "", 2),
        ("no barrier", "add", BARRIER, "", 2),
        ("one buffer", "max", "(exchange_seq & 1)", "0", 2),
        ("one buffer", "add", "(exchange_seq & 1)", "0", 2),
        ("sequence restarts for the sum", "loop", "threadIdx.x / 128, seq, xchg);\n}", "threadIdx.x / 128, 0, xchg);\n}", 1),
    ],
)
def test_a_missing_safeguard_is_a_race_under_every_schedule(name, arch, what, op, old, new, count):
    config = load_config(name)
    races = races_by_seed(mutated(config, arch, old, new, count), arch, config, op)
    assert all(races), f"{what}: silent under seeds {[seed for seed, found in zip(SEEDS, races, strict=True) if not found]}"


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", ["d512", "d256_m2"])
def test_two_warpgroups_sharing_a_barrier_id_race_under_some_schedule(name, arch):
    config = load_config(name)
    ptx = mutated(config, arch, BARRIER, "ptx_bar_sync(0, 128);", 2)
    assert any(races_by_seed(ptx, arch, config, "loop"))


# --- level 0 ------------------------------------------------------------------------------------------------------

LEVEL0_ALONE = """
extern "C" __global__ void __launch_bounds__(128, 1) alone(unsigned o_tmem, float* out) {{
    float band[{cols}];
    fa4_ws_level0_band(o_tmem, band);
#pragma unroll
    for (int i = 0; i < {cols}; ++i) out[i] = band[i];
}}
"""


@pytest.mark.parametrize("name", SHARED_KEY)
def test_level0_alone_has_no_barrier_no_shared_memory_and_one_address(name, tmp_path):
    config = load_config(name)
    geo = derive(config, "sm_100a")
    source = render(config, "sm_100a")["level0.cuh"] + LEVEL0_ALONE.format(cols=geo.band_cols)
    module = compiler.compile_source(source, "sm_100a", "alone.cu")
    # No thread index anywhere: the address can only come from the parameter, the same for all warps.
    for absent in ("bar.", "barrier.", ".shared", "%tid", "%warpid", "%laneid", "wait::ld"):
        assert absent not in module.ptx
    assert module.ptx.count("tcgen05.ld") == -(-geo.band_cols // 64)
    machine = sass(module.cubin, tmp_path)["alone"]
    for absent in ("BAR.", "LDS", "STS", "S2R"):
        assert absent not in machine
    resources = module.kernels["alone"]
    assert (resources.static_smem_bytes, resources.spill_store_bytes, resources.spill_load_bytes) == (0, 0, 0)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", SHARED_KEY)
def test_level0_reads_each_lane_as_it_is(name, arch):
    config = load_config(name)
    case = units.level0_case(config, derive(config, arch), seed=5)
    assert run(unit_module(config, arch).ptx, arch, case).hazards == []
    assert case.judge().ok


# --- combine ------------------------------------------------------------------------------------------------------


def combine_variants() -> list[Config]:
    base = {"shared_key": False, "use_fma": True}
    return [
        parse_config(
            base | {"name": "variant", "m_pack": m_pack, "rows": 128 // m_pack, "ov_depth": depth, "out_dtype": out, "use_fma": fma}
        )
        for m_pack in (2, 4)
        for depth in (64, 128)
        for out in ("bfloat16", "float16", "float32")
        for fma in (True, False)
        if depth == 64 or fma
    ]


def variant_id(config: Config) -> str:
    return f"m{config.m_pack}-d{config.ov_depth}-{config.out_dtype}{'' if config.use_fma else '-nofma'}"


COMBINE_ALONE = """
extern "C" __global__ void __launch_bounds__(128, 1)
alone({acc} o_tmem, float m, float l, float scale, float2* ml, {out_ctype}* unused) {{
    __shared__ __align__(16) float stage[{stage}];
    __shared__ __align__(16) float maxsum[{ml}];
    extern __shared__ __align__(16) {out_ctype} tile[];
    ml[threadIdx.x] = fa4_ws_intracta_combine(threadIdx.x % {rows}, threadIdx.x / {rows}, 0, m, l, scale, o_tmem, stage, maxsum, tile);
}}
"""


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", KEY_SPLIT)
def test_combine_alone_has_one_barrier(name, arch, tmp_path):
    config = load_config(name)
    geo = derive(config, arch)
    # Stage and accumulator sizes only matter for addressing here: 32 KiB keeps static shared memory legal.
    harness = COMBINE_ALONE.format(
        acc="unsigned" if arch == "sm_100a" else "const float*",
        out_ctype="fa4_bf16",
        stage=8192,
        ml=geo.combine_ml_bytes // 4,
        rows=geo.rows,
    )
    module = compiler.compile_source(render(config, arch)["combine.cuh"] + harness, arch, "alone.cu")
    assert len(re.findall(r"\bbar\.sync\b", module.ptx)) == 1
    assert len(re.findall(r"\bBAR\.SYNC\b", sass(module.cubin, tmp_path)["alone"])) == 1
    assert module.kernels["alone"].spill_store_bytes == 0


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("config", combine_variants(), ids=variant_id)
def test_combine_is_within_its_bound(config, arch):
    case = units.combine_case(config, derive(config, arch), seed=7)
    assert run(unit_module(config, arch).ptx, arch, case).hazards == []
    verdict = case.judge()
    assert verdict.ok, f"error {verdict.error}, bound {verdict.bound}"


@pytest.mark.parametrize("m_pack", [2, 4])
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16", "float32"])
def test_both_targets_combine_to_the_same_bits(m_pack, out_dtype):
    config = parse_config(
        {"name": "v", "m_pack": m_pack, "rows": 128 // m_pack, "ov_depth": 128, "shared_key": False, "out_dtype": out_dtype}
    )
    outputs = []
    for arch in ARCHES:
        case = units.combine_case(config, derive(config, arch), seed=11)
        assert run(unit_module(config, arch).ptx, arch, case).hazards == []
        outputs.append(case.outputs)
    for name in outputs[0]:
        assert outputs[0][name].tobytes() == outputs[1][name].tobytes()


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("m_pack", [2, 4])
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16", "float32"])
def test_empty_partitions_are_finite_and_exact(arch, m_pack, out_dtype):
    """One partition with keys and l a power of two: the result is its O / l exactly, whichever partition it is."""
    config = parse_config(
        {"name": "v", "m_pack": m_pack, "rows": 128 // m_pack, "ov_depth": 64, "shared_key": False, "out_dtype": out_dtype}
    )
    geo = derive(config, arch)
    image = golden.Bits(0, "empty").dyadic((m_pack, geo.rows, 64), low=-64, high=64, step=2.0**-4)
    row_max, row_sum = np.full((m_pack, geo.rows), -np.inf, np.float32), np.zeros((m_pack, geo.rows), np.float32)
    full = np.arange(geo.rows) % m_pack
    row_max[full, np.arange(geo.rows)], row_sum[full, np.arange(geo.rows)] = -37.5, 4.0
    image[np.isneginf(row_max)] = 0.0
    data = golden.CombineInput(image.reshape(128, 64), row_max.reshape(128), row_sum.reshape(128), np.float32(0.25))
    case = units.combine_case(config, geo, given=data)
    assert run(unit_module(config, arch).ptx, arch, case).hazards == []
    tile = case.outputs["out"].astype(np.float64).transpose(1, 0, 2).reshape(geo.rows, 64)
    np.testing.assert_array_equal(tile, image[full, np.arange(geo.rows)] / 4.0)
    np.testing.assert_array_equal(case.outputs["ml"], np.broadcast_to(np.float32([-37.5, 4.0]), (128, 2)))


# --- the headers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "arch"), TARGETS)
def test_headers_compile_together_and_twice(name, arch):
    """A user may include several of them, in any order and again."""
    headers = [
        text.replace("#pragma once\n", "") for file, text in sorted(render(load_config(name), arch).items()) if file.endswith(".cuh")
    ]
    compiler.compile_source("\n".join(headers) + '\nextern "C" __global__ void empty() {}\n', arch, "headers.cu")


@pytest.mark.parametrize(("name", "arch"), TARGETS)
def test_every_emitted_wrapper_is_used(name, arch):
    for file, text in render(load_config(name), arch).items():
        for function in re.findall(r"__forceinline__ \S+ (ptx_\w+)\(", text):
            assert len(re.findall(rf"\b{function}\b", text)) > 1, f"{file} emits {function} and never calls it"
