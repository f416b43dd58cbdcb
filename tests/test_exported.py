"""Exported kernels launched from Python: without compiler or templates, as fa4gen.attention launches them, and what is refused."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_driver import DeviceLike, FakeDriver, Seen, require_gcc

import fa4gen
from fa4gen.codegen import exported, reference
from fa4gen.codegen.attention import attention_entry_info
from fa4gen.codegen.config import Config, load_config, parse_config
from fa4gen.codegen.exported import ExportedError, cubin_name, entry_facts
from fa4gen.codegen.geometry import derive

FIELDS: dict[str, Any] = {"ov_depth": 64, "shared_key": True, "dtype": "float16", "out_dtype": "float16"}


def write(folder: Path, targets: list[tuple[Config, str]], change: Callable[[dict[str, Any]], None] | None = None) -> Path:
    """An export whose CUBINs are no code."""
    cubins = {cubin_name(config, arch): f"{config.name} {arch}".encode() for config, arch in targets}
    kernels = [
        {"config": c.model_dump(mode="json"), "arch": arch, "cubin": cubin_name(c, arch), "entries": entry_facts(c, arch)}
        for c, arch in targets
    ]
    outputs = {name: hashlib.sha256(data).hexdigest() for name, data in cubins.items()}
    manifest: dict[str, Any] = {"export_schema": exported.SCHEMA_VERSION, "fa4gen": "0.0", "kernels": kernels, "outputs": outputs}
    if change:
        change(manifest)
    for name, data in (cubins | {"manifest.json": json.dumps(manifest).encode()}).items():
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture
def fake(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    require_gcc()
    driver = FakeDriver(tmp_path_factory.mktemp("driver"))
    driver.install(monkeypatch)
    return driver


def arrays(batch: int = 2, q_len: int = 3, keys: int = 1000, heads: int = 8, kv_heads: int = 2, depth: int = 64) -> list[Any]:
    shapes = ((batch, q_len, heads, depth), (batch, keys, kv_heads, depth), (batch, keys, kv_heads, depth), (batch, q_len, heads, depth))
    return [np.zeros(shape, np.float16) for shape in shapes]


def call(attention: Any, fake: FakeDriver, of: Config, given: list[Any], **options: Any) -> Seen:
    q, k, v, out = (DeviceLike(array) for array in given)
    fake.expect(attention_entry_info(of, derive(of, of.arch[0]))["arguments"])
    before = fake.count("launches")
    attention(q, k, v, out=out, **options)
    assert fake.count("launches") == before + 1
    return fake.last()


def test_an_exported_kernel_is_launched_as_a_generated_one(tmp_path: Path, fake: FakeDriver) -> None:
    config = parse_config(FIELDS | {"name": "mine", "arch": ["sm_90a"]})
    loaded = fa4gen.load_exported(write(tmp_path, [(config, "sm_90a")]))
    given = arrays()
    some: list[dict[str, Any]] = [
        {},
        {"num_splits": 7},
        {"split_size": 64, "scale": 0.5},
        {"config": "mine"},
        {"config": config, "stream": 48},
    ]
    for options in some:
        ours = call(loaded.attention, fake, config, given, **options)
        theirs = call(fa4gen.attention, fake, config, given, **(options | {"config": config}))
        for name in ("entry", "grid", "block", "shared_bytes", "cluster", "stream"):
            assert getattr(ours, name) == getattr(theirs, name)
        for name in set(ours.parameters) - {"launch", "lse", "partial_o", "partial_lse", "arrived"}:
            assert ours.parameters[name] == theirs.parameters[name]


def test_the_config_follows_from_the_call(tmp_path: Path, fake: FakeDriver) -> None:
    plain = parse_config(FIELDS | {"name": "plain", "arch": ["sm_90a", "sm_100a"]})
    exact = parse_config(FIELDS | {"name": "exact", "rescale": "exact", "arch": ["sm_90a"]})
    causal = parse_config(FIELDS | {"name": "causal", "mask": "causal", "arch": ["sm_90a"]})
    targets = [(plain, "sm_90a"), (plain, "sm_100a"), (exact, "sm_90a"), (causal, "sm_90a")]
    loaded = fa4gen.load_exported(write(tmp_path, targets))
    assert loaded.targets == [(config.name, arch) for config, arch in targets]
    given = arrays()
    assert call(loaded.attention, fake, causal, given, causal=True).entry.startswith("fa4_attention_d64_m4r32_sk_f16_of16_causal_t")
    assert "exact" not in call(loaded.attention, fake, plain, given).entry
    assert "exact" in call(loaded.attention, fake, exact, given, split_size=64).entry
    assert "exact" in call(loaded.attention, fake, exact, given, config="exact").entry
    before = fake.count("launches")
    q, k, v, out = (DeviceLike(array) for array in given)
    for options, match in (
        ({"config": "other"}, "config is other; .* has plain for sm_90a"),
        ({"config": "causal"}, "causal: the call has False, config causal has True"),
        ({"causal": True, "window": 3}, "no exported config is made for the call: .*window: the call has 3"),
    ):
        with pytest.raises(ValueError, match=match):
            loaded.attention(q, k, v, out=out, **options)
    with pytest.raises(TypeError, match="q is a numpy array"):
        loaded.attention(*given[:3])
    assert fake.count("launches") == before


@pytest.mark.parametrize(
    ("major", "kind", "match"),
    [(10, ValueError, "the GPU is sm_100a; .* has mine for sm_90a"), (8, RuntimeError, "sm_80a")],
)
def test_another_architecture_is_refused(major: int, kind: type[Exception], match: str, tmp_path: Path, fake: FakeDriver) -> None:
    config = parse_config(FIELDS | {"name": "mine", "arch": ["sm_90a"]})
    loaded = fa4gen.load_exported(write(tmp_path, [(config, "sm_90a")]))
    q, k, v, out = (DeviceLike(array) for array in arrays())
    before = fake.count("launches")
    fake.set(capability_major=major)
    with pytest.raises(kind, match=match):
        loaded.attention(q, k, v, out=out)
    assert fake.count("launches") == before


def changed(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        place: Any = manifest
        for step in path[:-1]:
            place = place[step]
        if to is None:
            del place[path[-1]]
        else:
            place[path[-1]] = to

    return change


ENTRY = "fa4_attention_d64_m4r32_sk_f16_of16_t8_sm90a"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (changed("export_schema", to=99), "export_schema is 99"),
        (changed("export_schema", to=None), "export_schema is None"),
        (changed("kernels", to=[]), "lists no kernels"),
        (changed("kernels", to=[7]), "not the manifest of an export"),
        (changed("kernels", 0, "cubin", to="other.cubin"), "not the manifest of an export"),
        (changed("kernels", 0, "config", "rows", to=31), "rows = 31"),
        (changed("kernels", 0, "config", "surprise", to=1), "surprise"),
        (changed("kernels", 0, "entries", ENTRY, to=None), "launches this kernel otherwise"),
        (changed("kernels", 0, "entries", ENTRY, "smem_bytes", to=1), "launches this kernel otherwise"),
        (changed("kernels", 0, "entries", ENTRY, "arguments", 4, "name", to="other"), "launches this kernel otherwise"),
        (changed("outputs", "mine_sm_90a.cubin", to="00"), "mine_sm_90a.cubin: not the file"),
    ],
)
def test_what_is_no_export_of_this_version_is_refused(change: Any, match: str, tmp_path: Path) -> None:
    config = parse_config(FIELDS | {"name": "mine", "arch": ["sm_90a"]})
    with pytest.raises(ExportedError, match=match) as refused:
        fa4gen.load_exported(write(tmp_path, [(config, "sm_90a")], change))
    assert "\n" not in str(refused.value)


def test_what_is_missing_or_no_json_is_refused(tmp_path: Path) -> None:
    config = parse_config(FIELDS | {"name": "mine", "arch": ["sm_90a"]})
    with pytest.raises(ExportedError, match=r"nowhere/manifest.json: No such file"):
        fa4gen.load_exported(tmp_path / "nowhere")
    write(tmp_path, [(config, "sm_90a")])
    (tmp_path / "mine_sm_90a.cubin").unlink()
    with pytest.raises(ExportedError, match=r"mine_sm_90a.cubin: No such file"):
        fa4gen.load_exported(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ExportedError, match="not JSON"):
        fa4gen.load_exported(tmp_path)


WITHOUT_A_COMPILER = """
import sys


class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("jinja2", "cuda") or "nvrtc" in name:
            raise ImportError(f"{name} is not on this machine")


sys.meta_path.insert(0, Blocked())
import fa4gen
from fa4gen.codegen import driver

loaded = fa4gen.load_exported(sys.argv[1])
driver.LIBRARY = sys.argv[2]
import numpy as np
from fake_driver import DeviceLike

q, out = (DeviceLike(np.zeros((1, 1, 8, 64), np.float16)) for _ in range(2))
k, v = (DeviceLike(np.zeros((1, 300, 2, 64), np.float16)) for _ in range(2))
loaded.attention(q, k, v, out=out)
print(*sorted({name.split(".")[0] for name in sys.modules} & {"jinja2", "cuda", "nvidia"}), "launched")
"""


def test_loading_and_launching_needs_neither_nvrtc_nor_jinja(tmp_path: Path, fake: FakeDriver) -> None:
    config = parse_config(FIELDS | {"name": "mine", "arch": ["sm_90a"]})
    write(tmp_path, [(config, "sm_90a")])
    command = [sys.executable, "-c", WITHOUT_A_COMPILER, str(tmp_path), str(fake.path)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    assert result.stdout.split() == ["launched"], result.stderr


def test_a_written_export_loads(tmp_path: Path) -> None:
    from fa4gen.codegen.export import export

    config = load_config("d64")
    export([config], None, tmp_path / "kernels")
    loaded = fa4gen.load_exported(tmp_path / "kernels")
    assert loaded.targets == [("d64", "sm_90a"), ("d64", "sm_100a")]
    assert loaded.compiled(config, "sm_90a").cubin == (tmp_path / "kernels" / "d64_sm_90a.cubin").read_bytes()


@pytest.mark.gpu
def test_gpu_an_export_computes(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from fa4gen.codegen.export import export

    configs = [load_config(name) for name in ("d64", "d128_sk")]
    export(configs, None, tmp_path / "kernels")
    loaded = fa4gen.load_exported(tmp_path / "kernels")
    for depth in (64, 128):
        rng = np.random.default_rng(depth)
        q, k, v = (rng.standard_normal(shape, np.float32) for shape in ((3, 4, 8, depth), (3, 777, 2, depth), (3, 777, 2, depth)))
        given = [torch.from_numpy(array).cuda().to(torch.bfloat16) for array in (q, k, v)]
        out, lse = loaded.attention(*given, return_lse=True, num_splits=3)
        expected = reference.attention(*(array.float().cpu().numpy() for array in given), scale=depth**-0.5, causal=False)
        assert np.linalg.norm(out.float().cpu().numpy() - expected[0]) <= 4e-3 * np.linalg.norm(expected[0])
        np.testing.assert_allclose(lse.cpu().numpy(), expected[1], rtol=2.0**-20, atol=1e-4)
