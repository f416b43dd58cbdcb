"""The sm_100a attention kernel: resources against the reference kernels, memory maps, launch arguments."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from fa4gen.codegen import attention_sm100, compiler, render
from fa4gen.codegen.config import Config, load_shipped, parse_config
from fa4gen.codegen.geometry import derive
from fa4gen.codegen.geometry_sm100 import Sm100Geometry

CONFIGS = ("d64", "d128", "d128_m2", "d128_nofma", "d256", "d256_m2", "d512")
# SASS instructions, bar.sync and ex2 of the reference kernels for the same function (group 8, no mask, contiguous).
REFERENCE = {"d512": (7072, 9, 156), "d256": (4296, 8, 154), "d128": (3664, 6, 162), "d128_m2": (5144, 6, 308)}

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
    return render._render_file(config, "sm_100a", "kernels/attention_sm100a.cu.j2", False, None).text


def module(config: Config) -> compiler.Module:
    return compiler.compile_source(source(config), "sm_100a", "attention.cu")


def nvdisasm() -> Path | None:
    try:
        import nvidia
    except ImportError:
        return None
    found = [file for root in nvidia.__path__ for file in Path(root).glob("**/bin/nvdisasm")]
    return found[0] if found else (Path(path) if (path := shutil.which("nvdisasm")) else None)


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("name", CONFIGS)
def test_no_spills(name: str, mask: str) -> None:
    (resources,) = module(variant(name, mask=mask)).kernels.values()
    assert (resources.spill_store_bytes, resources.spill_load_bytes, resources.stack_bytes) == (0, 0, 0)
    assert resources.registers <= 128  # 512 threads enter with a 512th of the register file each


@pytest.mark.parametrize("name", REFERENCE)
def test_smaller_than_the_reference_kernel(name: str, tmp_path: Path) -> None:
    instructions, barriers, exponentials = REFERENCE[name]
    compiled = module(variant(name, group=8))
    assert len(re.findall(r"\bbar\.sync\b", compiled.ptx)) <= barriers
    assert len(re.findall(r"\bex2\.approx", compiled.ptx)) <= exponentials
    tool = nvdisasm()
    if tool is None:
        pytest.skip("nvdisasm is not installed: SASS instructions not counted")
    cubin = tmp_path / "attention.cubin"
    cubin.write_bytes(compiled.cubin)
    listing = subprocess.run([tool, "-c", cubin], capture_output=True, text=True, check=True).stdout
    ours = len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+\S", listing, re.MULTILINE))
    assert 1000 < ours < instructions


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
    launch = attention_sm100.attention_launch(config, geo, q, k, k, q.copy(), lse)
    assert (launch.grid, launch.block, launch.smem_bytes) == ((1, 1, 1), (512, 1, 1), geo.smem_bytes)
    with pytest.raises(ValueError, match="float32"):
        attention_sm100.attention_launch(config, geo, q.astype(np.float32), k, k, q.copy(), lse)
    with pytest.raises(ValueError, match="do not fit"):
        attention_sm100.attention_launch(config, geo, q, k, k[:, :32], q.copy(), lse)
    with pytest.raises(ValueError, match="lse"):
        attention_sm100.attention_launch(config, geo, q, k, k, q.copy(), lse[:, :4])
    with pytest.raises(ValueError, match="finite"):
        attention_sm100.attention_launch(config, geo, q, k, k, q.copy(), lse, scale=float("nan"))
    with pytest.raises(ValueError, match="sm_90a"):
        attention_sm100.attention_launch(config, derive(config, "sm_90a"), q, k, k, q.copy(), lse)


def test_entry_arguments_are_those_of_the_kernel() -> None:
    config = load_shipped("d128")
    info = attention_sm100.attention_entry_info(config, geometry(config))
    names = [argument["name"] for argument in info["arguments"]]
    signature = source(config).split(f"{info['name']}(")[-1].split(") {")[0]
    assert [parameter.split()[-1] for parameter in signature.split(",")] == names
