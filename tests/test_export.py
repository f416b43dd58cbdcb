"""The exported launcher for C against the Python driver, launch by launch, on a driver that only records; its errors; the folder."""

from __future__ import annotations

import ctypes
import math
import os
import random
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fake_driver import FakeDriver, Seen, require_gcc

from fa4gen.codegen import api, driver, export, geometry_sm90, geometry_sm100
from fa4gen.codegen.attention import attention_entry_info
from fa4gen.codegen.backends import Compiled
from fa4gen.codegen.backends.cuda import device_arch
from fa4gen.codegen.config import Config, load_config, parse_config
from fa4gen.codegen.exported import cubin_name
from fa4gen.codegen.geometry import derive

FEATURES = {"sm_90a": geometry_sm90.FEATURES, "sm_100a": geometry_sm100.FEATURES}
CAPABILITY = {"sm_90a": {"capability_major": 9, "capability_minor": 0}, "sm_100a": {"capability_major": 10, "capability_minor": 0}}
CUDA_ROOTS = (*filter(None, [os.environ.get("CUDA_HOME")]), "/usr/local/cuda", *map(str, sorted(Path("/usr/local").glob("cuda-1[3-9]*"))))
OK, ARGUMENT, ARCHITECTURE, FILE, WORKSPACE, DRIVER = range(6)
PLAIN: list[dict[str, Any]] = [
    {"ov_depth": 64, "shared_key": False},
    {"ov_depth": 128, "shared_key": False, "out_dtype": "float32", "dtype": "float16"},
    {"ov_depth": 128, "shared_key": False, "m_pack": 2, "rows": 64},
    {"ov_depth": 64, "shared_key": True},
    {"ov_depth": 128, "shared_key": True, "split": "fixed 512"},
    {"ov_depth": 256, "shared_key": True, "group": 6},
    {"ov_depth": 512, "shared_key": True, "split": "auto", "mask": "causal"},
    {"ov_depth": 512, "shared_key": True, "out_dtype": "float32"},
    {"ov_depth": 128, "shared_key": True, "tile_rows": 16},
    {"ov_depth": 128, "shared_key": True, "warpgroups": 2},
]


def featured(arch: str, rng: random.Random) -> dict[str, Any]:
    """A config with some of the features that the target's kernels have."""
    has = {feature for feature in sorted(FEATURES[arch]) if rng.random() < 0.6}
    causal = "window" in has or rng.random() < 0.5
    depths = [64, 128, 256, 512]
    # A page of one key of 64 bytes is too small a copy; on sm_100a copies have no more.
    pages = [16, 32, 64, 128, 256] if arch == "sm_100a" and "kv_dtype" in has else [1, 16, 32, 64, 128, 256]
    return {
        "ov_depth": rng.choice(depths[1:] if "kv_dtype" in has else depths),
        "shared_key": True,
        "mask": "causal" if causal else "none",
        "kv_layout": "paged" if "paged" in has else "contiguous",
        "page_size": rng.choice(pages) if "paged" in has else None,
        "key_lengths": "key_lengths" in has or {"paged", "page_list"} <= has,
        "page_list": {"paged", "page_list"} <= has,
        "ragged_queries": "ragged_queries" in has,
        "window": 77 if "window" in has else None,
        "softcap": 30.0 if "softcap" in has else None,
        "sinks": "sinks" in has,
        "kv_dtype": "float8_e4m3fn" if "kv_dtype" in has else None,
        "kv_scale": "page" if {"kv_dtype", "paged", "sinks"} <= has else "head",
        "rescale": "exact" if "exact" in has else "lazy",
    }


def all_targets() -> list[tuple[Config, str]]:
    rng = random.Random(5)
    targets: list[tuple[Config, str]] = []
    for fields in PLAIN:
        config = parse_config(fields | {"name": f"plain{len(targets)}"})
        targets += [(config, arch) for arch in config.arch]
    for arch in FEATURES:
        for _ in range(24 if FEATURES[arch] else 0):
            config = parse_config(featured(arch, rng) | {"name": f"featured{len(targets)}", "arch": [arch]})
            targets.append((config, arch))
    return targets


TARGETS = all_targets()


def structure(header: str, name: str) -> type[ctypes.Structure]:
    """The ctypes form of a structure as the header declares it."""
    kinds: dict[str, Any] = {"size_t": ctypes.c_size_t, "uint32_t": ctypes.c_uint32, "uint64_t": ctypes.c_uint64}
    kinds |= {"int64_t": ctypes.c_int64, "float": ctypes.c_float}
    (body,) = re.findall(rf"typedef struct {name} {{\n(.*?)\n}} {name};", header, re.DOTALL)
    fields = [
        (field, kinds[kind] * int(count) if count else kinds[kind])
        for kind, field, count in re.findall(r"^  (\w+) (\w+)(?:\[(\d+)\])?;", body, re.MULTILINE)
    ]
    return type(name, (ctypes.Structure,), {"_fields_": tuple(fields)})


class Launcher:
    """An exported folder's launcher, compiled by gcc without a warning, with the recording driver as its libcuda."""

    def __init__(self, folder: Path, libcuda: Path, configs: list[Config]) -> None:
        flags = ["-std=c11", "-O1", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror", "-shared", "-fPIC"]
        library = folder / "launcher.so"
        command = ["gcc", *flags, f'-DFA4GEN_LIBCUDA="{libcuda}"', "-o", str(library), str(folder / export.LAUNCHER), "-ldl", "-lm"]
        subprocess.run(command, check=True)
        self.folder, self.configs, self.library = folder, configs, ctypes.CDLL(str(library))
        self.library.fa4gen_error_message.restype = ctypes.c_char_p
        header = (folder / export.HEADER).read_text()
        self.Args, self.Workspace, self.Plan = (structure(header, f"fa4gen_{name}") for name in ("attention_args", "workspace", "plan"))

    def open(self) -> tuple[int, Any]:
        kernels = ctypes.c_void_p()
        return self.library.fa4gen_open(str(self.folder).encode(), ctypes.byref(kernels)), kernels

    def message(self) -> str:
        text: str = self.library.fa4gen_error_message().decode()
        return text

    def workspace_bytes(self, kernels: Any, args: Any) -> tuple[int, int, int]:
        counters, partials = ctypes.c_size_t(), ctypes.c_size_t()
        status = self.library.fa4gen_workspace_bytes(kernels, ctypes.byref(args), ctypes.byref(counters), ctypes.byref(partials))
        return status, counters.value, partials.value

    def attention(self, kernels: Any, args: Any, workspace: Any, plan: Any = None, stream: int = 0) -> int:
        by_reference = [None if each is None else ctypes.byref(each) for each in (args, workspace, plan)]
        status: int = self.library.fa4gen_attention(kernels, *by_reference, ctypes.c_void_p(stream))
        return status

    def args(self, of: Config, **fields: Any) -> Any:
        args = self.Args(struct_bytes=ctypes.sizeof(self.Args), config=self.configs.index(of))
        for name, value in fields.items():
            if name.endswith("_strides"):
                getattr(args, name)[:] = value
            else:
                setattr(args, name, value)
        return args

    def workspace(self, counter_bytes: int, partial_bytes: int, launches: int = 0) -> Any:
        return self.Workspace(
            struct_bytes=ctypes.sizeof(self.Workspace),
            counters=1 << 40,
            counter_bytes=counter_bytes,
            partials=1 << 41,
            partial_bytes=partial_bytes,
            launches=launches,
        )


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> FakeDriver:
    require_gcc()
    return FakeDriver(tmp_path_factory.mktemp("driver"))


def written(folder: Path, targets: list[tuple[Config, str]]) -> list[Config]:
    """The texts of an export whose CUBINs are no code: nothing here runs any."""
    cubins = {cubin_name(config, arch): f"{config.name} {arch}".encode() for config, arch in targets}
    for name, data in (cubins | export.sources(targets, cubins, "a test")).items():
        (folder / name).write_bytes(data)
    return list(dict.fromkeys(config for config, _ in targets))


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory, fake: FakeDriver) -> Launcher:
    folder = tmp_path_factory.mktemp("export")
    return Launcher(folder, fake.path, written(folder, TARGETS))


@pytest.fixture(autouse=True)
def recording(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python driver calls the recording one too."""
    if "fake" in request.fixturenames:
        request.getfixturevalue("fake").install(monkeypatch)


# --- the same launch from C and from Python ------------------------------------------------------------------------------------


class Call:
    """A random call: what Python is given, and the same for C."""

    def __init__(self, config: Config, arch: str, rng: random.Random) -> None:
        depth, page = config.ov_depth, config.page_size
        group = config.group or rng.choice([1, 2, 4, 5, 6, 7, 8, 12, 16, 40])
        kv_heads = rng.choice([1, 1, 2, 3, 8])
        heads = kv_heads * group
        batch = rng.choice([1, 1, 2, 3, 5, 16, 131])
        q_len = rng.choice([1, 1, 1, 2, 4, 8, 17, 100])
        keys = int(math.exp(rng.uniform(0, math.log(200_000))))
        self.c: dict[str, Any] = {"batch": batch, "q_len": q_len, "q_heads": heads, "kv_heads": kv_heads}
        self.arrays: dict[str, api.View] = {}
        q_shape: tuple[int, ...] = (batch, q_len, heads, depth)
        lse_shape: tuple[int, ...] = (batch, heads, q_len)
        max_seqlen_q = None
        if config.ragged_queries:
            total = rng.randint(1, batch * q_len)
            self.c["total_q"], max_seqlen_q = total, q_len
            q_shape, lse_shape = (total, heads, depth), (heads, total)
            self.array("cu_seqlens_q", (batch + 1,), "int32", "query_starts")
        sequences = batch
        if page:
            table_pages, sequences = -(-keys // page), rng.choice([1, 7, 5000])
            self.c |= {"pages": sequences, "table_pages": table_pages}
            self.array("block_table", (batch, table_pages), "int32", "block_table")
            if config.page_list:
                self.array("page_places", (batch, table_pages), "int32", "page_places")
            keys = page
        else:
            self.c["keys"] = keys
        # A contiguous array may have any stride along an axis of one element.
        odd = tuple(8 if extent == 1 else step for step, extent in zip(api.dense(q_shape), q_shape, strict=True))
        self.array("q", q_shape, config.dtype, "q", rng.choice([None, odd]))
        kv_dtype = config.kv_dtype or config.dtype
        for name in ("k", "v"):
            shape = (sequences, keys, kv_heads, depth)
            strides = self.strides(shape, 16 // api._DTYPES[kv_dtype].itemsize, rng)
            self.array(name, shape, kv_dtype, name, strides)
            # Zeros stand for one piece.
            if strides is None or rng.random() < 0.5:
                strides = strides or self.arrays[name].strides
                self.c[f"{name}_strides"] = strides[:3]
            elif strides != api._contiguous(self.arrays[name]):
                self.c[f"{name}_strides"] = strides[:3]
        self.array("out", q_shape, config.out_dtype, "out")
        if rng.random() < 0.5:
            self.array("lse", lse_shape, "float32", "lse")
        if config.key_lengths:
            self.array("seqused_k", (batch,), "int32", "key_lengths")
        if config.sinks:
            self.array("sinks", (heads,), "float32", "sinks")
        if config.kv_dtype:
            scaled = (kv_heads,) if config.kv_scale == "head" else (self.arrays["k"].shape[0], kv_heads)
            self.array("k_scale", scaled, "float32", "k_scale")
            self.array("v_scale", scaled, "float32", "v_scale")
        block_keys = derive(config, arch).block_keys
        split = rng.choice([{}, {}, {"num_splits": rng.randint(1, 70)}, {"split_size": block_keys * rng.randint(1, 40)}])
        if rng.random() < 0.05:
            split = {"split_size": block_keys + 8}
        self.c |= split
        scale = rng.choice([None, 0.3, 1 / 7])
        if scale is not None:
            self.c["scale"] = scale
        self.options = api.Options(
            config,
            config.mask == "causal",
            config.window,
            config.softcap,
            scale,
            split.get("num_splits"),
            split.get("split_size"),
            max_seqlen_q,
        )

    def array(self, name: str, shape: tuple[int, ...], dtype: str, c_name: str, strides: tuple[int, ...] | None = None) -> None:
        # Addresses far apart, so that a mix-up shows.
        address = (len(self.arrays) + 1) << 44 | 0x1230
        self.arrays[name] = api.View(address, shape, strides or api.dense(shape), dtype, 0)
        self.c[c_name] = address

    @staticmethod
    def strides(shape: tuple[int, ...], unit: int, rng: random.Random) -> tuple[int, ...] | None:
        """In one piece, heads before keys, or with room between rows, heads and sequences; None: in one piece."""
        _, keys, heads, depth = shape
        kind = rng.choice(["dense", "swapped", "padded"])
        if kind == "dense":
            return None
        if kind == "swapped":
            return keys * heads * depth, depth, keys * depth, 1
        per_head = depth + unit * rng.randint(0, 3)
        per_key = heads * per_head + unit * rng.randint(0, 3)
        return keys * per_key + unit * rng.randint(0, 3), per_key, per_head, 1

    def python(self, device: driver.Device, arch: str, stream: int) -> dict[str, int]:
        """Launches by the Python driver; returns what it wants of the workspace, in bytes."""
        arrays = dict(self.arrays)
        api._check(arrays, self.options)
        own_lse = "lse" not in arrays
        if own_lse:
            q = arrays["q"].shape
            shape = (q[0], q[2], q[1]) if len(q) == 4 else (q[1], q[0])
            arrays["lse"] = api.View(0, shape, api.dense(shape), "float32", 0)
        stand_ins = {name: array.stand_in() for name, array in arrays.items()}
        _, launch, arguments = api.plan_launch(arrays, stand_ins, self.options, arch, device.sms)
        plan = api.Plan(device, Compiled(arch, "", b"cubin"), launch, arguments, self.options)
        if own_lse:
            plan.workspace.append(("lse", stand_ins["lse"].nbytes))
        wanted = dict(plan.workspace)
        plan.ready({name: array.pointer for name, array in self.arrays.items()}, stream).enqueue()
        return wanted


def test_c_launches_what_python_launches(launcher: Launcher, fake: FakeDriver) -> None:
    """Entry, grid, cluster, shared memory, every tensor map and every parameter, over configs, features and random shapes."""
    rng = random.Random(11)
    compared, refused, entries, clusters = 0, 0, set(), set()
    for arch in CAPABILITY:
        for multiprocessors in (132, 148, 78):
            fake.set(**CAPABILITY[arch], multiprocessors=multiprocessors)
            status, kernels = launcher.open()
            assert status == OK, launcher.message()
            device = driver.Device(0)
            for config, target in TARGETS:
                if target != arch:
                    continue
                plan = launcher.Plan()
                for _ in range(9):
                    call = Call(config, arch, rng)
                    fake.expect(attention_entry_info(config, derive(config, arch))["arguments"])
                    args = launcher.args(config, **call.c)
                    before = fake.count("launches")
                    try:
                        wanted = call.python(device, arch, 48)
                    except ValueError:
                        assert launcher.workspace_bytes(kernels, args)[0] == ARGUMENT
                        assert launcher.attention(kernels, args, launcher.workspace(1 << 40, 1 << 40), plan, 48) == ARGUMENT
                        assert fake.count("launches") == before
                        refused += 1
                        continue
                    expected = fake.last()
                    status, counter_bytes, partial_bytes = launcher.workspace_bytes(kernels, args)
                    assert status == OK, launcher.message()
                    workspace = launcher.workspace(counter_bytes, partial_bytes, rng.choice([0, 41, 2**32 - 1]))
                    number = workspace.launches % (2**32 - 1) + 1
                    used = plan if rng.random() < 0.7 else None
                    assert launcher.attention(kernels, args, workspace, used, 48) == OK, launcher.message()
                    assert fake.count("launches") == before + 2
                    seen = fake.last()
                    same_launch(seen, expected, workspace, wanted, call)
                    assert (seen.number("launch"), workspace.launches) == (number, number)
                    compared += 1
                    entries.add(seen.entry)
                    clusters.add(seen.cluster)
            launcher.library.fa4gen_close(kernels)
    assert compared > 1000
    assert refused > 10
    assert len(entries) > len(TARGETS)
    assert {1, 2, 4} <= clusters
    # Of entries with tiles of the same rows the one that shares an SM, and the one that does not.
    shared = {entry for entry in entries if "_t8_c2_" in entry}
    assert shared & {entry.replace("_t8_", "_t8_c2_") for entry in entries - shared}


def same_launch(seen: Seen, expected: Seen, workspace: Any, wanted: dict[str, int], call: Call) -> None:
    for name in ("entry", "grid", "block", "shared_bytes", "cluster", "stream"):
        assert getattr(seen, name) == getattr(expected, name), (name, call.c)
    own = {*wanted, "launch"}
    for name, value in seen.parameters.items():
        if name not in own:
            assert value == expected.parameters[name], (name, call.c, value.hex(), expected.parameters[name].hex())
    # The workspace: as much as Python's, its pieces aligned, one after another and within what was given.
    assert workspace.counter_bytes == wanted["arrived"]
    assert seen.number("arrived") == workspace.counters
    pieces = sorted((seen.number(name), nbytes) for name, nbytes in wanted.items() if name != "arrived")
    end = workspace.partials
    for address, nbytes in pieces:
        assert address % 16 == 0
        assert end <= address < end + 16
        end = address + nbytes
    assert workspace.partials + workspace.partial_bytes - 16 < end <= workspace.partials + workspace.partial_bytes


def opened(launcher: Launcher) -> Any:
    status, kernels = launcher.open()
    assert status == OK, launcher.message()
    return kernels


def named(name: str) -> Config:
    return next(config for config, _ in TARGETS if config.name == name)


def plain_call(launcher: Launcher, of: Config, **changed: Any) -> Any:
    """A legal call of a config without features, with some fields changed."""
    fields = {"batch": 2, "q_len": 3, "q_heads": 8, "kv_heads": 2, "keys": 1000, "q": 1 << 20, "k": 1 << 21, "v": 1 << 22, "out": 1 << 23}
    return launcher.args(of, **(fields | changed))


@pytest.mark.parametrize(
    ("argument", "changed"),
    [
        ("config", {"config": 999}),
        ("batch", {"batch": 0}),
        ("batch", {"batch": 1 << 31}),
        ("batch", {"batch": 1 << 30, "kv_heads": 1 << 20, "q_heads": 1 << 20}),
        ("q_len", {"q_len": 0}),
        ("q_heads", {"q_heads": 7}),
        ("kv_heads", {"kv_heads": 0}),
        ("keys", {"keys": 0}),
        ("keys", {"keys": 1 << 31}),
        ("total_q", {"total_q": 5}),
        ("pages", {"pages": 5}),
        ("table_pages", {"table_pages": 5}),
        ("num_splits", {"num_splits": 2, "split_size": 64}),
        ("split_size", {"split_size": 65}),
        ("split_size", {"split_size": 64, "keys": 64 * 65}),
        ("num_splits", {"num_splits": 65, "keys": 64 * 65}),
        ("scale", {"scale": math.nan}),
        ("k_strides[0]", {"k_strides": (-8, 128, 64)}),
        ("k_strides[1]", {"k_strides": (128_000, 4, 64)}),
        ("v_strides[2]", {"v_strides": (128_000, 128, 1 << 62)}),
        ("k has a stride", {"k_strides": (1 << 39, 128, 64)}),
        ("q ", {"q": 0}),
        ("q ", {"q": (1 << 20) + 8}),
        ("k ", {"k": 0}),
        ("v ", {"v": (1 << 22) + 2}),
        ("out", {"out": 0}),
        ("lse", {"lse": 2}),
        ("block_table", {"block_table": 1 << 20}),
        ("page_places", {"page_places": 1 << 20}),
        ("key_lengths", {"key_lengths": 1 << 20}),
        ("query_starts", {"query_starts": 1 << 20}),
        ("sinks", {"sinks": 1 << 20}),
        ("k_scale", {"k_scale": 1 << 20}),
        ("v_scale", {"v_scale": 1 << 20}),
        ("struct_bytes", {"struct_bytes": 8}),
        ("struct_bytes", {"struct_bytes": 0}),
    ],
    ids=str,
)
def test_c_refuses_by_name(argument: str, changed: dict[str, Any], launcher: Launcher, fake: FakeDriver) -> None:
    kernels = opened(launcher)
    config = named("plain0")
    workspace = launcher.workspace(1 << 40, 1 << 40)
    assert launcher.attention(kernels, plain_call(launcher, config), workspace) == OK, launcher.message()
    plan, before = launcher.Plan(), fake.count("launches")
    assert launcher.attention(kernels, plain_call(launcher, config, **changed), workspace, plan) == ARGUMENT
    assert argument in launcher.message()
    assert "\n" not in launcher.message()
    assert (fake.count("launches"), workspace.launches) == (before, 1)
    # A plan that was refused serves the next call.
    assert launcher.attention(kernels, plain_call(launcher, config), workspace, plan) == OK
    launcher.library.fa4gen_close(kernels)


def test_c_asks_for_what_a_config_needs(launcher: Launcher, fake: FakeDriver) -> None:
    rng = random.Random(3)
    kernels = opened(launcher)
    workspace = launcher.workspace(1 << 50, 1 << 50)
    missing = set()
    for config, arch in TARGETS:
        if arch != "sm_90a":
            continue
        given = Call(config, arch, rng).c | {"num_splits": 1, "split_size": 0}
        assert launcher.attention(kernels, launcher.args(config, **given), workspace) == OK, launcher.message()
        before = fake.count("launches")
        for name in (*export.EXTRA_ARRAYS, "total_q", "pages", "table_pages"):
            if name in given:
                assert launcher.attention(kernels, launcher.args(config, **(given | {name: 0})), workspace) == ARGUMENT
                assert name in launcher.message()
                missing.add(name)
        assert fake.count("launches") == before
    assert {"block_table", "page_places", "key_lengths", "query_starts", "sinks", "total_q", "pages", "table_pages"} <= missing


def test_c_refuses_what_is_no_pointer_or_too_small(launcher: Launcher, fake: FakeDriver) -> None:
    kernels, config = opened(launcher), named("plain0")
    args = plain_call(launcher, config, num_splits=4)
    status, counters, partials = launcher.workspace_bytes(kernels, args)
    assert status == OK
    enough = launcher.workspace(counters, partials)
    before = fake.count("launches")
    assert launcher.attention(None, args, enough) == ARGUMENT
    assert launcher.attention(kernels, None, enough) == ARGUMENT
    assert launcher.attention(kernels, args, None) == ARGUMENT
    for bad, part in (
        (launcher.workspace(counters - 1, partials), "workspace.counters"),
        (launcher.workspace(counters, partials - 1), "workspace.partials"),
    ):
        assert launcher.attention(kernels, args, bad) == WORKSPACE
        assert part in launcher.message()
    # Without the caller's own LSE it goes into the workspace.
    assert launcher.workspace_bytes(kernels, plain_call(launcher, config, num_splits=4, lse=1 << 30))[2] == partials - 2 * 8 * 3 * 4
    unaligned = launcher.workspace(counters, partials)
    unaligned.partials += 4
    assert launcher.attention(kernels, args, unaligned) == ARGUMENT
    fake.set(current_context=16)
    assert launcher.attention(kernels, args, enough) == ARGUMENT
    assert "context" in launcher.message()
    fake.set(current_context=8, fail_next_launch=1)
    assert launcher.attention(kernels, args, enough) == DRIVER
    assert "CUDA_ERROR_FAKE" in launcher.message()
    assert (fake.count("launches"), enough.launches) == (before, 0)
    assert launcher.attention(kernels, args, enough) == OK
    launcher.library.fa4gen_close(kernels)


def test_c_grows_with_its_structure(launcher: Launcher) -> None:
    """A caller built against a later header: fields this launcher does not know are fine while they are 0."""
    kernels, config = opened(launcher), named("plain0")
    size = ctypes.sizeof(launcher.Args)
    longer = (ctypes.c_ubyte * (size + 16))()
    args = plain_call(launcher, config)
    args.struct_bytes = size + 16
    ctypes.memmove(longer, ctypes.byref(args), size)
    workspace = launcher.workspace(1 << 40, 1 << 40)
    assert launcher.attention(kernels, longer, workspace) == OK
    longer[size + 3] = 1
    assert launcher.attention(kernels, longer, workspace) == ARGUMENT
    assert "later version" in launcher.message()
    # And one built against an earlier one, that ended with out.
    args.struct_bytes = launcher.Args.lse.offset
    assert launcher.attention(kernels, args, workspace) == OK
    launcher.library.fa4gen_close(kernels)


def test_c_keeps_what_did_not_change(launcher: Launcher, fake: FakeDriver) -> None:
    kernels, config = opened(launcher), named("plain0")
    workspace, plan = launcher.workspace(1 << 40, 1 << 40), launcher.Plan()

    def encodings(**changed: Any) -> int:
        before = fake.count("encodings")
        assert launcher.attention(kernels, plain_call(launcher, config, **changed), workspace, plan) == OK, launcher.message()
        return fake.count("encodings") - before

    assert encodings() == 4
    assert encodings() == 0
    assert encodings(scale=0.5) == 4
    assert encodings(scale=0.5, q=1 << 30, k=1 << 31) == 2
    assert encodings(scale=0.5, q=1 << 30, k=1 << 31, lse=1 << 33) == 0
    moved = type(plan).from_buffer_copy(plan)
    before = fake.count("encodings")
    assert launcher.attention(kernels, plain_call(launcher, config, scale=0.5), workspace, moved) == OK
    assert fake.count("encodings") == before + 4
    launcher.library.fa4gen_close(kernels)


def test_c_opens_only_where_it_has_kernels(launcher: Launcher, fake: FakeDriver, tmp_path: Path) -> None:
    for changed, code, match in (
        ({"capability_major": 8, "capability_minor": 6}, ARCHITECTURE, "sm_86"),
        ({"current_context": 0}, ARGUMENT, "no CUDA context"),
    ):
        fake.set(**changed)
        status, kernels = launcher.open()
        assert (status, kernels.value) == (code, None)
        assert match in launcher.message()
        fake.set(**CAPABILITY["sm_90a"], current_context=8)
    assert launcher.library.fa4gen_open(None, ctypes.byref(ctypes.c_void_p())) == ARGUMENT
    assert launcher.library.fa4gen_open(b"here", None) == ARGUMENT
    # One config for one target only.
    kernels = opened(launcher)
    fake.set(**CAPABILITY["sm_100a"])
    other = opened(launcher)
    only = next(config for config, arch in TARGETS if config.arch == ("sm_90a",))
    args = launcher.args(only, **Call(only, "sm_90a", random.Random(1)).c)
    assert launcher.attention(other, args, launcher.workspace(1 << 40, 1 << 40)) == ARCHITECTURE
    assert only.name in launcher.message()
    unloaded = fake.count("unloaded")
    for each in (kernels, other):
        launcher.library.fa4gen_close(each)
    assert fake.count("unloaded") > unloaded + len(PLAIN)


@pytest.mark.parametrize("damage", ["missing", "short", "longer", "another"])
def test_c_loads_only_its_own_cubins(damage: str, launcher: Launcher, fake: FakeDriver, tmp_path: Path) -> None:
    names = [path.name for path in launcher.folder.glob("*.cubin")]
    for name in names:
        (tmp_path / name).write_bytes((launcher.folder / name).read_bytes())
    victim = tmp_path / sorted(name for name in names if "sm_90a" in name)[3]
    data = victim.read_bytes()
    if damage == "missing":
        victim.unlink()
    else:
        victim.write_bytes({"short": data[:-1], "longer": data + b"x", "another": data[:-1] + b"x"}[damage])
    kernels = ctypes.c_void_p()
    assert launcher.library.fa4gen_open(str(tmp_path).encode(), ctypes.byref(kernels)) == FILE
    assert victim.name in launcher.message()
    assert kernels.value is None


def test_c_says_what_a_driver_lacks(tmp_path: Path, fake: FakeDriver) -> None:
    config = parse_config({"name": "one", "ov_depth": 64, "shared_key": True})
    (tmp_path / "old.c").write_text("int cuInit(unsigned flags) { return (int)flags; }\n")
    old = tmp_path / "old.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(old), str(tmp_path / "old.c")], check=True)
    for path, match in ((old, "too old"), (tmp_path / "none.so", "no CUDA driver")):
        folder = tmp_path / path.stem
        folder.mkdir()
        launcher = Launcher(folder, path, written(folder, [(config, "sm_90a")]))
        assert launcher.open()[0] == DRIVER
        assert match in launcher.message()


def test_c_declares_what_cuda_h_does(tmp_path: Path, launcher: Launcher) -> None:
    """Where there is a cuda.h, the launcher's own declarations agree with it."""
    headers = [path for path in (Path(root) / "include/cuda.h" for root in CUDA_ROOTS) if path.is_file()]
    if not headers:
        pytest.skip("no cuda.h on this machine")
    flags = ["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-include", str(headers[0])]
    subprocess.run(["gcc", *flags, "-c", "-o", str(tmp_path / "x.o"), str(launcher.folder / export.LAUNCHER)], check=True)


def test_the_header_is_also_cpp(tmp_path: Path, launcher: Launcher) -> None:
    (tmp_path / "user.cpp").write_text(f'#include "{export.HEADER}"\nint main() {{ return FA4GEN_CONFIG_PLAIN0 == 0 ? FA4GEN_OK : 1; }}\n')
    if subprocess.run(["g++", "--version"], capture_output=True, check=False).returncode:
        pytest.skip("no g++ on this machine")
    command = ["g++", "-std=c++11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only", f"-I{launcher.folder}"]
    subprocess.run([*command, str(tmp_path / "user.cpp")], check=True)


@pytest.mark.parametrize("index", [0, 2, -1, -2, -3])
def test_the_example_compiles_without_a_warning(index: int, tmp_path: Path) -> None:
    require_gcc()
    written(tmp_path, [TARGETS[index]])
    flags = ["-std=c11", "-O1", "-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Werror"]
    subprocess.run(["gcc", *flags, "-c", "-o", str(tmp_path / "x.o"), str(tmp_path / export.EXAMPLE)], check=True)


EVERY_FEATURE: dict[str, Any] = {"name": "every_feature", "ov_depth": 128, "shared_key": True, "dtype": "float16", "out_dtype": "float32"}
EVERY_FEATURE |= {"mask": "causal", "window": 300, "softcap": 20.0, "sinks": True, "kv_layout": "paged", "page_size": 16}
EVERY_FEATURE |= {"page_list": True, "key_lengths": True, "ragged_queries": True, "arch": ["sm_90a"]}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["d64", "d128_sk", "d512", "gemma_sliding", "gpt_oss", "every_feature"])
def test_gpu_the_example_is_right(name: str, tmp_path: Path) -> None:
    """It compares its results with a double loop, and its exit code says how that went."""
    require_gcc()
    config = parse_config(EVERY_FEATURE) if name == "every_feature" else load_config(name)
    if device_arch() not in config.arch:
        pytest.skip(f"{name} has no kernel for {device_arch()}")
    export.export([config], [device_arch()], tmp_path / "kernels")
    program = tmp_path / "attention_example"
    sources = [str(tmp_path / "kernels" / source) for source in (export.EXAMPLE, export.LAUNCHER)]
    subprocess.run(["gcc", "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-o", str(program), *sources, "-ldl", "-lm"], check=True)
    result = subprocess.run([str(program), str(tmp_path / "kernels")], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(": equal\n") == 2
