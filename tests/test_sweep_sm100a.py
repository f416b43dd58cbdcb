"""The sweep over the sm_100a matrix: what it plans, a slice of it, and that it goes on where it stopped and reports what it finds."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import sweep_sm100a as sweep
from sweep_sm100a import Case

from fa4gen.codegen import compiler

pytestmark = pytest.mark.skipif(compiler.nvrtc_version() is None, reason="NVRTC is not installed")


def test_the_plan_is_the_whole_matrix() -> None:
    plan = list(sweep.cases())
    keys = {case.keys for case in plan}
    assert {1, 2100} <= keys <= set(range(1, 2101))
    for config in sweep.CONFIGS:
        geo = sweep.geometry(sweep.variant(config))
        for step in (geo.block_keys, geo.pv_key_chunk):
            assert {edge + by for edge in range(step, 2100, step) for by in (-1, 0, 1)} <= keys
    assert len(plan) == len(set(plan)) == 6 * 2 * 2 * 3 * 2 * len(keys) * 5
    # The first round has every cell once, all seeds alike.
    first = plan[: len(plan) // 5]
    assert len({case[:-1] for case in first}) == len(first)
    assert len({(case.config, case.keys, case.seed) for case in first}) == 6 * len(keys) * 5


SLICE = [
    Case("d64", True, "none", 6, 3, 1, 0),  # partitions without a key
    Case("d128_m2", True, "causal", 8, 1, 321, 2),
    Case("d256", False, "none", 8, 3, 257, 3),
    Case("d512", True, "causal", 1, 1, 129, 4),
]


@pytest.mark.parametrize("case", SLICE, ids=lambda case: case.name)
def test_a_slice(case: Case) -> None:
    assert case in set(sweep.cases())
    record = sweep.run(case)
    assert record["found"] == ""
    assert 0 <= record["lse"] <= 1e-4


def test_a_sweep_goes_on_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    plan = [Case("d64", True, "none", 8, 1, keys, seed) for keys, seed in ((64, 0), (65, 1))]
    monkeypatch.setattr(sweep, "cases", lambda: iter(plan))
    log, summary, ptx = tmp_path / "log.jsonl", tmp_path / "summary.json", tmp_path / "ptx.json"
    arguments = ["--log", str(log), "--summary", str(summary), "--ptx", str(ptx), "--processes", "1"]
    _, text = sweep.ptx_of(plan[0].kernel)
    ptx.write_text(json.dumps({plan[0].kernel: text}))
    # One is done, under the same PTX; a line was cut short.
    done = {"case": plan[0].name, "kernel": plan[0].kernel, "found": "", "out": 1e-3, "lse": 0.0, "ptx": sweep.digest(text)}
    log.write_text(json.dumps(done) + '\n{"case": "d64 f\n')
    assert sweep.main(arguments) == 0
    _, records = sweep.read_log(log)
    assert [records[case.name]["found"] for case in plan] == ["", ""]
    assert Counter(line.split('"')[3] for line in log.read_text().splitlines() if line.endswith("}") and "case" in line)[plan[0].name] == 1
    # Tensor memory is not waited for: both are run again, and found.
    ptx.write_text(json.dumps({plan[0].kernel: text.replace("tcgen05.wait::st.sync.aligned;", "")}))
    assert sweep.main(arguments) == 1
    told = json.loads(summary.read_text())
    assert set(told["found"]) == {case.name for case in plan}
    assert (told["planned"], told["run"]) == (2, 2)
    assert plan[0].name in capsys.readouterr().out


def test_a_sweep_goes_on_from_its_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    plan = [Case("d64", True, "none", 8, 1, keys, 0) for keys in (1, 2, 3)]
    monkeypatch.setattr(sweep, "cases", lambda: iter(plan))
    log, summary, ptx = tmp_path / "log.jsonl", tmp_path / "summary.json", tmp_path / "ptx.json"
    arguments = ["--summary", str(summary), "--ptx", str(ptx), "--processes", "1"]
    _, text = sweep.ptx_of(plan[0].kernel)
    ptx.write_text(json.dumps({plan[0].kernel: text}))
    hashes = {plan[0].kernel: sweep.digest(text)}
    # A record under another PTX counts for nothing; one with a finding is run again by who has the summary alone.
    lines = zip(plan, ("", "race", ""), (hashes[plan[0].kernel], hashes[plan[0].kernel], "other"), strict=True)
    told = {
        c.name: {"case": c.name, "kernel": c.kernel, "found": found, "out": 2e-3, "lse": 0.0, "ptx": under} for c, found, under in lines
    }
    first = sweep.summary_of(plan, hashes, [{"python": "3"}], told, sweep.Earlier(frozenset(), {}, []))
    assert (first["run"], first["kernels"][plan[0].kernel]["clean"], set(first["found"])) == (2, 1, {plan[1].name})
    summary.write_text(json.dumps(first))
    assert sweep.main(["--log", str(log), *arguments]) == 0
    assert set(sweep.read_log(log)[1]) == {plan[1].name, plan[2].name}
    second = json.loads(summary.read_text())
    row = second["kernels"][plan[0].kernel]
    assert (second["run"], row["clean"], row["out"], second["found"], len(second["versions"])) == (3, 3, 2e-3, {}, 2)
    assert sweep.read_summary(summary, plan, hashes).names == {case.name for case in plan}
    assert sweep.read_summary(summary, plan, {plan[0].kernel: "changed"}).names == frozenset()
    summary.write_text("{}")
    with pytest.raises(SystemExit):
        sweep.main(["--log", str(log), *arguments])
    assert "no summary" in capsys.readouterr().err
