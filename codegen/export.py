"""An export: CUBINs, a C header with a small launcher for them, and a manifest, for machines that have no compiler.

The launcher's numbers come from the launches that attention.py makes: a launch of each entry is planned here on arrays without memory, and
its tensor maps and workspace are read off. `exported.py` is the Python side of the same folder.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from . import attention, driver
from .api import View, dense
from .artifacts import RESOURCE_KEYS, EmitError, known_spills, spill_gate, write_folder
from .attention import Workspace, attention_entry_info, attention_launch, feature_arguments
from .compiler import Module, compile_all
from .config import Config, fixed_keys
from .emulator import TensorMap
from .exported import MANIFEST, SCHEMA_VERSION, cubin_name, entry_facts
from .geometry import derive, entry_configs
from .geometry_sm90 import MAX_PARTITIONS
from .render import has_attention, render, render_text

HEADER, LAUNCHER, EXAMPLE = "fa4gen_attention.h", "fa4gen_attention.c", "attention_example.c"
# Whether CTAs stay and take several items each (as _waves in attention.py), by target.
RESIDENT_GRID = {"sm_90a": True, "sm_100a": False}
# Name of a kernel's argument -> the launcher's address of its value.
ARGUMENT_VALUES = {
    "q_map": "&plan->maps[Q_MAP].encoded",
    "k_map": "&plan->maps[K_MAP].encoded",
    "v_map": "&plan->maps[V_MAP].encoded",
    "out_map": "&plan->maps[OUT_MAP].encoded",
    "lse": "&lse",
    "batch": "&read.batch",
    "q_len": "&read.q_len",
    "keys": "&plan->keys",
    "kv_heads": "&read.kv_heads",
    "group": "&plan->group",
    "scale": "&scale",
    "partition_tiles": "&plan->partition_tiles",
    "partitions": "&plan->partitions",
    "tile_positions": "&plan->tile_positions",
    "q_tiles": "&plan->q_tiles",
    "kv_heads_inverse": "&plan->kv_heads_inverse",
    "q_tiles_inverse": "&plan->q_tiles_inverse",
    "clusters_inverse": "&plan->clusters_inverse",
    "tiles_per_position_inverse": "&plan->tiles_per_position_inverse",
    "partition_tiles_inverse": "&plan->partition_tiles_inverse",
    "launch": "&number",
    "partial_o": "&partial_o",
    "partial_lse": "&partial_lse",
    "arrived": "&workspace->counters",
    "block_table": "&read.block_table",
    "table_pages": "&read.table_pages",
    "page_places": "&read.page_places",
    "key_lengths": "&read.key_lengths",
    "query_starts": "&read.query_starts",
    "total_q": "&read.total_q",
    "sinks": "&read.sinks",
    "k_scale": "&read.k_scale",
    "v_scale": "&read.v_scale",
}
EXTRA_ARRAYS = ("block_table", "page_places", "key_lengths", "query_starts", "sinks", "k_scale", "v_scale")
MAPS = ("q_map", "k_map", "v_map", "out_map")

# Bytes, exponent bits and mantissa bits of a number.
NUMBER_TYPES = {"bfloat16": (2, 8, 7), "float16": (2, 5, 10), "float32": (4, 8, 23), "float8_e4m3fn": (1, 4, 3)}
# ||out - expected|| / ||expected|| that the example accepts: the bound of the full kernel in bf16, which f16 stays below.
OUT_BOUND = "4e-3"


def _stand_in(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return View(0, shape, dense(shape), dtype, 0).stand_in()


def _map_facts(name: str, value: Any) -> list[int]:
    """The fields of the launcher's map_facts."""
    if not isinstance(value, TensorMap) or len(value.shape) != 5 or value.interleave or set(value.element_strides) != {1}:
        raise EmitError(f"{name} is no tensor map of rank 5 that the launcher for C can make")
    code = driver.map_codes(value)
    return [code.data_type, value.dtype.itemsize, value.box[4], code.swizzle, code.promotion, code.nan_fill, value.box[2], value.box[3]]


def _entry(config: Config, arch: str) -> dict[str, Any]:
    """What the launcher has to know of the entry whose tile rows `config` has."""
    geo = derive(config, arch)
    group, kv_heads, batch = config.group or 1, 1, 2
    ragged, page = config.ragged_queries, config.page_size
    q_shape = (batch, 1, kv_heads * group, geo.depth) if not ragged else (batch, kv_heads * group, geo.depth)
    lse_shape = (batch, kv_heads * group, 1) if not ragged else (kv_heads * group, batch)
    k_shape = (batch, page or geo.block_keys, kv_heads, geo.depth)
    scaled = (batch, kv_heads) if config.kv_scale == "page" else (kv_heads,)
    shapes = {
        "block_table": (batch, 1),
        "page_places": (batch, 1),
        "key_lengths": (batch,),
        "query_starts": (batch + 1,),
        "sinks": (kv_heads * group,),
        "k_scale": scaled,
        "v_scale": scaled,
    }
    wanted = {name: kind for name, kind, _ in feature_arguments(config) if kind.endswith("*")}
    extras: dict[str, Any] = {name: _stand_in(shapes[name], "float32" if "float" in kind else "int32") for name, kind in wanted.items()}
    if ragged:
        extras["max_q_len"] = 1
    # One partition: the workspace is then of one.
    needed: list[int] = []

    def allocate(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        needed.append(shape[0])
        return np.empty(0, dtype)

    q, out, lse = _stand_in(q_shape, config.dtype), _stand_in(q_shape, config.out_dtype), _stand_in(lse_shape, "float32")
    k, v = (_stand_in(k_shape, config.kv_dtype or config.dtype) for _ in range(2))
    launch = attention_launch(
        *(config, geo, q, k, v, out, lse),
        partition_keys=-(-k_shape[1] // geo.block_keys) * geo.block_keys,
        workspace=Workspace(allocate),
        **extras,
    )
    info = attention_entry_info(config, geo)
    names = [argument["name"] for argument in info["arguments"]]
    if unknown := [name for name in names if name not in ARGUMENT_VALUES]:
        raise EmitError(f"{config.name} ({arch}): {launch.entry} takes {unknown[0]}, which the launcher for C does not know")
    given = dict(zip(names, launch.args, strict=True))
    partial_floats, lse_floats = needed[:2]
    return {
        "name": launch.entry,
        "numbers": [
            *(geo.tile_rows, launch.block[0], launch.smem_bytes, geo.block_keys),
            *(partial_floats, lse_floats, getattr(geo, "max_cluster", 1), getattr(geo, "ctas_per_sm", 1), geo.warpgroups),
            *(attention.tile_bytes(geo), attention.alone_us(geo), attention.ring_us(geo)),
        ],
        "maps": [_map_facts(name, given[name]) for name in MAPS],
        "arguments": names,
    }


def _summary(config: Config) -> str:
    """What the config adds, for the header's list."""
    added = {
        f"causal, window {config.window}" if config.window else "causal": config.mask == "causal",
        f"softcap {config.softcap:g}" if config.softcap else "": config.softcap is not None,
        f"PAGED by {config.page_size}": config.kv_layout == "paged",
        "PAGE LIST": config.page_list,
        "KEY LENGTHS": config.key_lengths,
        "RAGGED": config.ragged_queries,
        "SINKS": config.sinks,
        "FP8": config.kv_dtype is not None and config.kv_scale == "head",
        "FP8 with scales of pages": config.kv_scale == "page",
        f"{config.group} query heads a KV head": config.group is not None,
        f"split {config.split}": config.split is not None,
        "rescale exact": config.rescale == "exact",
    }
    return "".join(f", {text}" for text, on in added.items() if on)


def _hash(data: bytes) -> int:
    """64-bit FNV-1a, as in the launcher."""
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value


def _context(targets: Sequence[tuple[Config, str]], cubins: Mapping[str, bytes], command: str) -> dict[str, Any]:
    """What the templates of an export are rendered from."""
    from .. import __version__

    configs = list(dict.fromkeys(config for config, _ in targets))
    archs = list(dict.fromkeys(arch for _, arch in targets))
    kernels: list[dict[str, Any]] = []
    rendered = []
    for config in configs:
        own: list[dict[str, Any] | None] = []
        for arch in archs:
            if (config, arch) not in targets:
                own.append(None)
                continue
            entries = [_entry(entry, arch) for entry in entry_configs(config, arch)]
            cubin = cubin_name(config, arch)
            kernel = {
                "index": len(kernels),
                "arguments": entries[0]["arguments"],
                "entries": entries,
                "cubin": cubin,
                "cubin_bytes": len(cubins[cubin]),
                "cubin_hash": f"UINT64_C(0x{_hash(cubins[cubin]):016x})",
            }
            own.append(kernel)
            kernels.append(kernel)
        fixed = fixed_keys(config.split) if config.split else None
        own_lengths = config.key_lengths or config.kv_layout == "paged" or config.rescale == "exact"
        flags = (int(flag) for flag in (config.page_list, config.ragged_queries, own_lengths))
        rendered.append(
            {
                "name": config.name,
                "constant": f"FA4GEN_CONFIG_{config.name.upper()}",
                "depth": config.ov_depth,
                "dtype": config.dtype,
                "kv_dtype": config.kv_dtype or config.dtype,
                "out_dtype": config.out_dtype,
                "summary": _summary(config),
                "archs": [arch for arch in archs if (config, arch) in targets],
                "kernels": own,
                "numbers": [
                    config.ov_depth,
                    config.page_size or 0,
                    config.group or 0,
                    fixed or 0,
                    attention.bounding_window(config) or 0,
                    *flags,
                ],
                "scale": f"{np.float32(1.0 / math.sqrt(config.ov_depth)):.9g}",
            }
        )
    version = {arch: re.fullmatch(r"sm_(\d+)(\d)a", arch) for arch in archs}
    return {
        "banner": f"Written by fa4gen {__version__}: {command}. Do not edit; export again.",
        "schema_version": SCHEMA_VERSION,
        "configs": rendered,
        "kernels": kernels,
        "archs": [
            {"name": arch, "major": match[1], "minor": match[2], "resident_grid": RESIDENT_GRID[arch]}
            for arch, match in version.items()
            if match
        ],
        "max_entries": max(len(kernel["entries"]) for kernel in kernels),
        "argument_names": list(ARGUMENT_VALUES),
        "argument_values": ARGUMENT_VALUES,
        "extra_arrays": EXTRA_ARRAYS,
        "tma_stride_bytes": attention.TMA_STRIDE_BYTES,
        "max_partitions": MAX_PARTITIONS,
        "max_listed_keys": attention.MAX_LISTED_KEYS,
        "chip_bytes_per_us": attention.CHIP_BYTES_PER_US,
        "merge_bytes_per_us": attention.MERGE_BYTES_PER_US,
        "item_us": attention.ITEM_US,
        "merge_us": attention.MERGE_US,
        "cluster_us": attention.CLUSTER_US,
        "second_step_us": attention.SECOND_STEP_US,
        "max_waves": attention.MAX_WAVES,
        "sharing_tiles": attention.SHARING_TILES,
    }


def _example(config: Config) -> dict[str, Any]:
    """What the example has to know of the config that it runs."""
    flags = {
        "causal": config.mask == "causal",
        "window": config.window or 0,
        "page": config.page_size or 0,
        "page_list": config.page_list,
        "key_lengths": config.key_lengths,
        "ragged": config.ragged_queries,
        "sinks": config.sinks,
        "fp8": config.kv_dtype is not None,
        "page_scales": config.kv_scale == "page",
        "group": config.group or 4,
        "softcap": config.softcap or 0,
    }
    types = {"q": config.dtype, "kv": config.kv_dtype or config.dtype, "out": config.out_dtype}
    return {"flags": flags, "types": {name: NUMBER_TYPES[dtype] for name, dtype in types.items()}, "out_bound": OUT_BOUND}


def _manifest(targets: Sequence[tuple[Config, str]], modules: Sequence[Module], files: dict[str, bytes]) -> str:
    from .. import __version__

    kernels = []
    for (config, arch), module in zip(targets, modules, strict=True):
        entries = entry_facts(config, arch)
        for name, facts in entries.items():
            resources = asdict(module.kernels[name])
            facts |= {key: resources[key] for key in RESOURCE_KEYS}
        kernels.append(
            {
                "config": config.model_dump(mode="json"),
                "arch": arch,
                "cubin": cubin_name(config, arch),
                "nvrtc": module.nvrtc,
                "entries": entries,
            }
        )
    outputs = {name: hashlib.sha256(data).hexdigest() for name, data in sorted(files.items())}
    manifest = {"export_schema": SCHEMA_VERSION, "fa4gen": __version__, "kernels": kernels, "outputs": outputs}
    return json.dumps(manifest, indent=2) + "\n"


def sources(targets: Sequence[tuple[Config, str]], cubins: Mapping[str, bytes], command: str) -> dict[str, bytes]:
    """The header and the launcher for CUBINs by file name; `command` is named in their banners. Raises EmitError, RenderError."""
    context = _context(targets, cubins, command)
    titles = {
        HEADER: ("export/attention.h.j2", "Attention kernels for C: what a program includes."),
        LAUNCHER: ("export/attention.c.j2", "Attention kernels for C: the launcher, on the CUDA driver alone."),
        EXAMPLE: ("export/example.c.j2", "Attention kernels for C: an example that checks and measures itself."),
    }
    context |= _example(targets[0][0]) | {"config": context["configs"][0]}
    return {name: render_text(template, context | {"title": title}).encode() for name, (template, title) in titles.items()}


def export_files(configs: Sequence[Config], archs: Iterable[str] | None = None) -> dict[str, bytes]:
    """File name -> contents of an export. archs: default, all that each config lists and has a full kernel for.

    Raises ConfigError (a target that a config does not list), EmitError (two configs of one name, no full kernel, spills), CompileError.
    """
    chosen = None if archs is None else list(dict.fromkeys(archs))
    targets: list[tuple[Config, str]] = []
    for config in configs:
        if any(other.name == config.name for other, _ in targets):
            raise EmitError(f"two configs are named {config.name}; an export keeps them apart by name")
        known_spills(config)
        for arch in chosen or config.arch:
            derive(config, arch)
            if has_attention(config, arch):
                targets.append((config, arch))
            elif chosen:
                raise EmitError(f"{config.name}: there is no full kernel for {arch}")
        if not any(other == config for other, _ in targets):
            raise EmitError(f"{config.name}: there is no full kernel for {', '.join(config.arch)}")
    modules = compile_all([(render(config, arch)["attention.cu"], arch, "attention.cu") for config, arch in targets])
    for (config, _), module in zip(targets, modules, strict=True):
        spill_gate(config, module)
    files = {cubin_name(config, arch): module.cubin for (config, arch), module in zip(targets, modules, strict=True)}
    named = " ".join(f"--config {config.name}" for config in configs)
    command = f"fa4gen export {named} --arch {','.join(dict.fromkeys(arch for _, arch in targets))}"
    files |= sources(targets, files, command)
    files[MANIFEST] = _manifest(targets, modules, files).encode()
    return files


def export(configs: Sequence[Config], archs: Iterable[str] | None, out: Path) -> list[str]:
    """Writes an export into the folder `out`, whole or not at all, and returns the names of its files.

    An earlier export there is replaced; a folder that holds anything else is refused. Raises as export_files, and EmitError and OSError for
    the folder.
    """
    folder = out.resolve()
    if Path.cwd().is_relative_to(folder):
        raise EmitError(f"{out} is the current folder or one around it, and would be replaced whole; choose another --out")
    if folder.exists() and not folder.is_dir():
        raise EmitError(f"{out} exists and is no folder")
    files = export_files(configs, archs)
    write_folder(folder, files)
    return sorted(files)
