"""`fa4gen run`: what it prints, what it refuses, and that each kind of failure makes it exit 1."""

from __future__ import annotations

import io
import json
import re

import numpy as np
import pytest
from rich.console import Console

from fa4gen.codegen import compiler, golden, reference, runner, units
from fa4gen.codegen.backends import BackendUnavailable, Compiled
from fa4gen.codegen.config import ConfigError, load_config, shipped_configs
from fa4gen.codegen.inputs import InputError
from fa4gen.codegen.runner import RunError, RunOptions


def run(**options) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    code = runner.run(RunOptions(**{"backend": "emulator"} | options), Console(file=out, width=200), Console(file=err, width=200))
    return code, out.getvalue(), err.getvalue()


def row(table: str, kernel: str) -> str:
    lines = [line for line in table.splitlines() if f" {kernel} " in line]
    assert len(lines) == 1, table
    return lines[0]


def test_prints_a_row_for_each_kernel_and_exits_0(tmp_path):
    code, table, notes = run(config="d64", arch="sm_90a", save_path=tmp_path / "out.npz")
    assert code == 0
    assert "emulator" in notes
    combine = row(table, "unit_combine")
    assert "match" in combine
    assert "emulator" in combine
    with np.load(tmp_path / "out.npz") as saved:
        assert saved["sm_90a/unit_combine/ml"].shape == (128, 2)
        assert saved["sm_90a/unit_combine/out"].dtype == np.float32


def test_full_kernel_on_the_users_own_arrays(tmp_path):
    rng = np.random.default_rng(3)
    given = {
        "q": rng.normal(size=(1, 3, 5, 512)).astype(np.float32),
        "k": rng.normal(size=(1, 70, 1, 512)).astype(np.float32),
        "v": rng.normal(size=(1, 70, 1, 512)).astype(np.float32),
    }
    np.savez(tmp_path / "qkv.npz", **given)
    code, table, _ = run(config="d512", arch="sm_90a", input_path=tmp_path / "qkv.npz", save_path=tmp_path / "out.npz")
    assert code == 0, table
    # Not the golden input: there is nothing to compare with.
    assert "match" not in row(table, "attention out")
    bf16 = [given[name].astype(units.DTYPES["bfloat16"]) for name in "qkv"]
    expected, expected_lse = reference.attention(*bf16, scale=512**-0.5, causal=False)
    with np.load(tmp_path / "out.npz") as saved:
        verdicts = runner.judge_attention(saved["out"], saved["lse"], expected, expected_lse)
    assert all(verdict.ok for verdict in verdicts)


def test_a_seed_of_ones_own_has_no_golden():
    code, table, _ = run(config="d64", arch="sm_90a", seed=5)
    assert code == 0
    assert "match" not in table


def test_a_result_off_its_golden_is_a_failure(monkeypatch):
    monkeypatch.setattr(golden, "load", lambda *_: {"out": np.zeros((8, 32, 8), np.uint16), "ml": np.zeros((128, 2), np.uint32)})
    code, table, _ = run(config="d64", arch="sm_90a")
    assert code == 1
    assert "DIFFERS" in row(table, "unit_combine")


def with_sources(monkeypatch, old: str, new: str) -> None:
    compiled_sources = runner.compiled_sources

    def changed(config, arch):
        modules = compiled_sources(config, arch)
        assert old in modules["unit.cu"].ptx
        return modules | {"unit.cu": Compiled(arch, modules["unit.cu"].ptx.replace(old, new))}

    monkeypatch.setattr(runner, "compiled_sources", changed)


def test_a_hazard_is_a_failure_and_is_told(monkeypatch):
    # An arrival instead of a wait leaves the barrier's count as it was and drops its ordering.
    with_sources(monkeypatch, "bar.sync", "bar.arrive")
    code, _, notes = run(config="d64", arch="sm_90a")
    assert code == 1
    assert "race" in notes
    assert "unit_combine" in notes


@pytest.mark.skipif(compiler.nvrtc_version() is None, reason="NVRTC is not installed")
def test_a_finding_names_source_lines_and_places(monkeypatch):
    source = runner.render.render(load_config("d512"), "sm_90a")["unit.cu"]
    # An arrival instead of a wait leaves the barrier's count as it was and drops its ordering.
    changed = source.replace('asm volatile("bar.sync', 'asm volatile("bar.arrive')
    assert changed != source
    compiled = Compiled("sm_90a", compiler.compile_source(changed, "sm_90a", "unit.cu").ptx, None, changed, "unit.cu")
    monkeypatch.setattr(runner, "compiled_sources", lambda config, arch: {"unit.cu": compiled})
    monkeypatch.setattr(units, "cases", lambda config, geo, seed: [units.exchange_case(config, geo, "max")])
    code, _, notes = run(config="d512", arch="sm_90a")
    assert code == 1
    report = notes[notes.index("sm_90a unit_exchange4_max: race: ") :].splitlines()[:4]
    assert re.match(r"    at     PTX line \d+, unit\.cu:\d+ \(warp \d, lane \d+\): shared\+0x\w+ \(xchg\[\d+\]\)$", report[1])
    assert re.match(r"    after  PTX line \d+, unit\.cu:\d+ \(warp \d, lane \d+\)$", report[2])
    assert report[3].startswith("    needs  a barrier")
    code, text, notes = run(config="d512", arch="sm_90a", as_json=True)
    assert code == 1
    assert "race" not in notes
    found = json.loads(text)
    race = next(h for h in found["hazards"] if h["kind"] == "race")
    assert race["kernel"].startswith("sm_90a unit_exchange4")
    assert race["source"].startswith("unit.cu:")
    assert race["other"]["source"].startswith("unit.cu:")
    (row, missing) = found["rows"]
    assert (row["kernel"], row["failed"], row["hazards"]) == ("unit_exchange4_max", True, len(found["hazards"]))
    assert missing["golden"] == "not generated yet"


def test_a_result_out_of_bounds_is_a_failure(monkeypatch):
    with_sources(monkeypatch, "rcp.approx.ftz.f32", "ex2.approx.ftz.f32")
    code, _, _ = run(config="d64", arch="sm_90a")
    assert code == 1


def test_says_what_is_not_generated():
    config = next(name for name in ("d256_m2", "d64") if "attention.cu" not in runner.render.render(load_config(name), "sm_90a"))
    code, table, _ = run(config=config, arch="sm_90a")
    assert code == 0
    assert "not generated yet" in row(table, "attention")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"heads": 6, "kv_heads": 4}, "multiple"),
        ({"keys": 0}, "--keys"),
        ({"input_path": "qkv.npz", "keys": 5}, "--keys"),
        ({"save_path": "missing/out.npz"}, "missing/out.npz"),
        ({"keys": 4_000_000_000}, "elements"),
        ({"batch": 10**30}, "elements"),
        ({"update_golden": True, "seed": 1}, "--update-golden"),
        ({"update_golden": True, "keys": 7}, "--update-golden"),
    ],
)
def test_refuses_in_one_line(tmp_path, options, words):
    options = {name: tmp_path / value if name.endswith("path") else value for name, value in options.items()}
    with pytest.raises((RunError, InputError), match=words) as refused:
        run(config="d64", arch="sm_90a", **options)
    assert "\n" not in str(refused.value)


def test_a_failed_save_leaves_no_file(tmp_path):
    (tmp_path / "out.npz").mkdir()
    with pytest.raises(RunError, match=r"out\.npz"):
        run(config="d64", arch="sm_90a", save_path=tmp_path / "out.npz")
    assert [path.name for path in tmp_path.iterdir()] == ["out.npz"]


def test_the_gpu_asked_for_and_absent_is_an_error(monkeypatch):
    from fa4gen.codegen.backends import cuda

    def absent(*_, **__):
        raise BackendUnavailable("no CUDA driver on this machine")

    monkeypatch.setattr(cuda.CudaBackend, "__init__", absent)
    with pytest.raises(RunError, match="--backend cuda: no CUDA driver"):
        run(config="d64", backend="cuda")
    _, notes = runner.choose_backends("auto", ("sm_90a",))
    assert notes == ["emulator: no CUDA driver on this machine"]


def test_a_gpu_of_another_architecture_leaves_the_rest_to_the_emulator(monkeypatch):
    from fa4gen.codegen.backends import cuda

    def present(self, *_, **__):
        self.arch, self.device_name = "sm_90a", "NVIDIA H200"

    monkeypatch.setattr(cuda.CudaBackend, "__init__", present)
    chosen, notes = runner.choose_backends("auto", ("sm_90a", "sm_100a"))
    assert [chosen[arch].name for arch in ("sm_90a", "sm_100a")] == ["cuda", "emulator"]
    assert notes == ["sm_90a: NVIDIA H200", "sm_100a: emulator, the GPU (NVIDIA H200) is sm_90a"]
    with pytest.raises(RunError, match="sm_100a"):
        runner.choose_backends("cuda", ("sm_100a",))


def test_judging_attention_rejects_nan_and_wrong_empty_rows():
    q, k, v = golden.attention_input(0, batch=1, q_len=3, q_heads=2, kv_heads=1, keys=2, depth=64, dtype=np.dtype(np.float32))
    expected = reference.attention(q, k, v, scale=0.125, causal=True)
    out, lse = expected[0].astype(np.float32), expected[1].astype(np.float32)
    assert all(verdict.ok for verdict in runner.judge_attention(out, lse, *expected))
    for index, value in [((0, 2, 0, 5), np.nan), ((0, 0, 0, 0), 1e-6)]:
        wrong = out.copy()
        wrong[index] = value
        assert not runner.judge_attention(wrong, lse, *expected)[0].ok
    for index, value in [((0, 0, 2), np.nan), ((0, 0, 0), 0.0), ((0, 1, 2), lse[0, 1, 2] + 3e-3)]:
        wrong = lse.copy()
        wrong[index] = value
        assert not runner.judge_attention(out, wrong, *expected)[1].ok


@pytest.mark.parametrize("name", shipped_configs())
def test_every_shipped_config_matches_its_goldens(name):
    """One stored output for every function, config and target, and for the full kernel where it is generated."""
    code, table, _ = run(config=name)
    assert code == 0, table
    rows = [line for line in table.splitlines() if " emulator " in line]
    assert len(rows) >= len(load_config(name).arch)
    assert all(" match " in line for line in rows), table


def test_a_golden_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(golden, "golden_folder", lambda: tmp_path)
    (tmp_path / "d64").mkdir()
    (tmp_path / "d64" / "sm_90a-unit_combine.npz").write_bytes(b"not an archive")
    with pytest.raises(golden.GoldenError, match=r"d64/sm_90a-unit_combine\.npz") as refused:
        run(config="d64", arch="sm_90a")
    assert "\n" not in str(refused.value)


def test_a_target_the_config_does_not_list_is_refused_by_name(tmp_path):
    (tmp_path / "one.yaml").write_text("ov_depth: 64\nshared_key: true\narch: [sm_90a]\n")
    with pytest.raises(ConfigError, match="one: arch") as refused:
        run(config=tmp_path / "one.yaml", arch="sm_100a")
    assert refused.value.rule == "arch-enabled"


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_row_is_cut_or_folded_in_a_narrow_terminal(width):
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None)
    runner.run(RunOptions(config="d64", backend="emulator", arch="sm_90a"), console, Console(file=io.StringIO()))
    combine = row(out.getvalue(), "unit_combine")
    for cell in ("emulator", "4 x 32 x 64", "match", " s"):
        assert cell in combine


def test_a_checkout_without_a_golden_is_a_failure_and_an_installed_package_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(golden, "golden_folder", lambda: tmp_path)
    code, table, _ = run(config="d64", arch="sm_90a")
    assert code == 1
    assert "MISSING" in row(table, "unit_combine")
    monkeypatch.setattr(golden, "golden_folder", lambda: None)
    code, table, _ = run(config="d64", arch="sm_90a")
    assert code == 0
    assert "MISSING" not in table
