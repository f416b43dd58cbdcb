"""`fa4gen bench` and `fa4gen tune`: cells, reports from recorded measurements, write-back; with a GPU the measured path."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from rich.console import Console

from fa4gen.codegen import compiler, reference, render, tune, units
from fa4gen.codegen.backends import BackendUnavailable
from fa4gen.codegen.backends.cuda import device_arch
from fa4gen.codegen.bench import command, measure, peers, report
from fa4gen.codegen.bench.cells import Cell, CellError, choose_cells, load_cells, parse_cell, shipped_series
from fa4gen.codegen.config import load_config, parse_config
from fa4gen.codegen.feature_inputs import page_table, paged
from fa4gen.codegen.geometry import derive

CELL = Cell(depth=512, batch=16, keys=8192, q_len=1, heads=32, kv_heads=4)


def has_gpu() -> bool:
    try:
        return bool(device_arch())
    except BackendUnavailable:
        return False


needs_no_gpu = pytest.mark.skipif(has_gpu(), reason="shows what happens without a GPU")


def fa4gen(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    code = "import sys; from fa4gen.cli import main; sys.exit(main())"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=cwd, timeout=600)


# --- cells ---------------------------------------------------------------------------------------------------------------------


def test_a_cell_is_read_from_the_command_line():
    assert parse_cell("depth=512,batch=16,keys=8192,q_len=1,heads=32,kv_heads=4") == CELL
    assert parse_cell(" q-len = 1, keys=8192 ,depth=512, batch=16") == CELL
    assert parse_cell("depth=64,keys=1") == Cell(depth=64, keys=1, batch=1, q_len=1, heads=32, kv_heads=4)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "name=value"),
        ("depth", "name=value"),
        ("depth=512", "keys is missing"),
        ("keys=1", "depth is missing"),
        ("depth=512,keys=1,key=2", "did you mean keys?"),
        ("depth=512,keys=1,colour=2", "unknown field colour"),
        ("depth=512,keys=1,keys=2", "given twice"),
        ("depth=512,keys=many", "expected an integer"),
        ("depth=512,keys=0", "keys = 0"),
        ("depth=512,keys=-4", "keys = -4"),
        ("depth=512,keys=1.5", "keys = 1.5"),
        ("depth=100,keys=8", "expected 64, 128, 256, 512"),
        ("depth=512,keys=8,heads=10,kv_heads=4", "not a multiple"),
        ("depth=512,keys=99999999999", "expected an integer"),
        ("depth=512,keys=1000000,batch=1000000", "bytes"),
        ("depth=512,keys=8\n,batch=\x1b[31m", "expected an integer"),
    ],
)
def test_a_bad_cell_is_refused_in_one_line(text, says):
    with pytest.raises(CellError) as caught:
        parse_cell(text)
    assert says in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "0 cells"),
        ("3", "expected a list"),
        ("- 3", "cell 1: expected fields"),
        ("- {depth: 512, keys: 8}\n- {depth: 512, keys: true}", "cell 2: keys = True"),
        ("mine:\n  - {depth: 512, keys: 8, batch: 0}", "mine: cell 1: batch = 0"),
        ("- {depth: 512, keys: 8, published_us: soon}", "published_us = soon"),
        ("- {depth: 512, keys: 8, published_us: .inf}", "published_us = inf"),
        ("- [", "not YAML"),
        ("- 2001-99-99", "not YAML"),
        ("\x00", "not YAML"),
    ],
)
def test_a_bad_file_of_cells_is_refused_in_one_line(tmp_path, text, says):
    path = tmp_path / "cells.yaml"
    path.write_text(text)
    with pytest.raises(CellError) as caught:
        load_cells(str(path))
    assert says in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_missing_or_binary_file_of_cells_is_refused(tmp_path):
    with pytest.raises(CellError, match=r"no such file; shipped series are decode, published, odd"):
        load_cells("nothing-here")
    (tmp_path / "cells").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CellError, match="not UTF-8"):
        load_cells(str(tmp_path / "cells"))


def test_shipped_series_are_the_documented_cells():
    assert shipped_series() == ("decode", "published", "odd", "features", "models")
    decode = load_cells("decode")
    shapes = [(16, 8192, 1), (64, 2048, 1), (1, 32768, 1), (16, 8192, 4), (128, 4096, 1)]
    assert decode == [Cell(depth=d, batch=b, keys=k, q_len=q, heads=32, kv_heads=4) for d in (512, 256, 128) for b, k, q in shapes]
    published = {cell.keys: cell.published_us for cell in load_cells("published")}
    assert published == {1: 9.5, 512: 13.8, 2048: 14.6, 8192: 19.0, 32768: 36.6}
    odd = [cell for cell in load_cells("odd") if cell.depth == 512]
    assert {cell.group for cell in odd} == {5, 6, 7, 8, 12, 16}
    assert {cell.keys for cell in odd} == {4095, 4096, 4097}
    assert {cell.q_len for cell in odd} == {1, 2, 3, 4}
    assert len({(cell.batch, cell.kv_heads) for cell in odd}) == 1
    for series, names in (
        ("features", ("d512", "d256", "d128_sk")),
        ("models", ("gemma4_global", "gemma_sliding", "llama3", "qwen3", "gpt_oss")),
    ):
        for cell in load_cells(series):
            assert command.with_features([load_config(name) for name in names if load_config(name).ov_depth == cell.depth], cell, "sm_90a")


def test_cells_are_narrowed_to_the_configs_and_come_once():
    assert len(choose_cells([], None, [512])) == 5
    both = choose_cells(["depth=512,batch=16,keys=8192"], "decode", [512, 256])
    assert both[0] == CELL
    assert len(both) == 10
    with pytest.raises(CellError, match="no config of depth 256"):
        choose_cells(["depth=256,keys=8"], None, [512])
    with pytest.raises(CellError, match="no cell of depth 64"):
        choose_cells([], "published", [64])


@pytest.mark.parametrize("cell", load_cells("decode") + load_cells("odd"), ids=str)
def test_the_floor_is_k_and_v_over_the_ceiling(cell):
    elements = np.empty((cell.batch, cell.keys, cell.kv_heads, cell.depth), np.float16).nbytes
    assert cell.kv_bytes == 2 * elements
    assert cell.floor_us(4000.0) == pytest.approx(2 * elements / 4000e9 * 1e6)


def test_the_floor_agrees_with_the_recorded_figure():
    assert CELL.floor_us(4679) == pytest.approx(229.5, abs=0.05)


# --- reports -------------------------------------------------------------------------------------------------------------------


def times(median: float) -> dict[report.Flush, report.Times]:
    return {"zero": report.Times(median, median - 1, median + 2, 40), "read": report.Times(median - 8, median - 9, median - 7, 40)}


def recorded(**changes) -> report.Report:
    """A run of one cell: two configs, stream for one of them, a fast wrong peer, a refusing peer, two right ones."""
    results = [
        report.Result("fa4gen", "d512", times(250.0), 2.4e-3, 1e-5, "128 CTAs, 200 registers"),
        report.Result("stream", "d512", times(240.0)),
        report.Result("fa4gen", "mine", times(300.0), 2.5e-3, 1e-5),
        report.Result("triton-split", None, times(306.9), 2.2e-3, None, "32 keys, 4 warps, 2 stages, 3 partitions"),
        report.Result("sdpa-efficient", None, times(708.0), 2.3e-3),
        report.Result("sdpa-flash", None, times(100.0), math.inf),
        report.Result("fa3", None, refused="RuntimeError: head dimension at most 256"),
    ]
    values = {
        "date": "2026-11-30T02:00:00+00:00",
        "gpu": {"name": "NVIDIA H200", "arch": "sm_90a", "sms": 132, "l2_bytes": 62914560, "driver": "580.1", "cuda": "13.0"},
        "nvrtc": "13.0.88",
        "fa4gen": "0.1.0",
        "repeats": 40,
        "flush_bytes": 1 << 28,
        "ceiling_gbs": {"before": {"4x16": 4600.0}, "after": {"4x16": 4679.0}},
        "configs": {"d512": {"ov_depth": 512}, "mine": {"ov_depth": 512}},
        "peers": {"triton-split": "triton 3.6.0"},
        "missing": {"flashinfer-tc": "flashinfer-python: No module named 'flashinfer'"},
        "cells": [report.CellResults(replace(CELL, published_us=400.0), "bfloat16", "none", results)],
    }
    return report.Report(**(values | changes))


def test_a_report_survives_json():
    text = report.to_json(recorded())
    assert report.from_json(text, "x.json") == recorded()
    data = json.loads(text)
    assert data["read_ceiling_gbs"] == 4679.0
    assert data["cells"][0]["kv_bytes"] == CELL.kv_bytes
    assert data["cells"][0]["floor_us"] == pytest.approx(CELL.kv_bytes / 4679e3)
    assert "Infinity" not in text


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", "{}", '{"schema_version": 99}', '{"schema_version": 1, "cells": 3}', '{"schema_version": 1, "cells": [{}]}'],
)
def test_what_is_no_report_is_refused_in_one_line(text):
    with pytest.raises(report.ReportError, match=r"^x\.json: ") as caught:
        report.from_json(text, "x.json")
    assert str(caught.value).isprintable()


def test_the_table_compares_with_the_best_peer_that_is_right():
    rows = [dict(zip(range(len(report.MAIN_COLUMNS)), row, strict=True)) for row in report.main_rows(recorded())]
    assert list(rows[0].values()) == [
        *("d512 b16 k8192 q1 h32/4", "d512", "250.0", "242.0", "240.0", "232.0", "91.8%"),
        *("triton-split", "306.9", "1.23x", "1.24x", "229.5", "400.0", "2.4e-03"),
    ]
    assert list(rows[1].values())[1:8] == ["mine", "300.0", "292.0", "-", "-", "76.5%", "triton-split"]
    columns, peer_rows = report.peer_rows(recorded())
    assert columns == ["cell", "triton-split", "sdpa-efficient", "sdpa-flash", "fa3"]
    assert peer_rows == [["d512 b16 k8192 q1 h32/4", "306.9", "708.0", "100.0 WRONG", "-"]]


def test_why_a_peer_has_no_time_is_told_once():
    cells = recorded().cells
    twice = [*cells, replace(cells[0], cell=replace(CELL, keys=4096))]
    assert report.peer_notes(recorded(cells=twice)) == [
        "sdpa-flash is wrong by inf (d512 b16 k8192 q1 h32/4 and 1 more)",
        "fa3 refuses: RuntimeError: head dimension at most 256 (d512 b16 k8192 q1 h32/4 and 1 more)",
    ]
    assert report.peer_notes(recorded())[0].endswith("inf (d512 b16 k8192 q1 h32/4)")


def test_the_table_without_peers_or_stream_says_so():
    ours = report.Result("fa4gen", "d512", times(250.0), 2.4e-3)
    rows = report.main_rows(recorded(cells=[report.CellResults(CELL, "bfloat16", "none", [ours])]))
    assert rows[0][4:12] == ["-", "-", "91.8%", "-", "-", "-", "-", "229.5"]


@pytest.mark.parametrize("error", [5e-3, math.inf, math.nan])
def test_a_wrong_output_of_ours_fails_the_run(error, tmp_path):
    wrong = recorded(cells=[report.CellResults(CELL, "bfloat16", "none", [report.Result("fa4gen", "d512", times(1.0), error)])])
    assert len(wrong.failures()) == 1
    assert report.main_rows(wrong)[0][-1].endswith("WRONG")
    path = tmp_path / "wrong.json"
    path.write_text(report.to_json(replace(wrong)))
    assert fa4gen("bench", "--show", str(path)).returncode == 1


def test_show_prints_and_plots_a_recorded_run(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(report.to_json(recorded()))
    shown = fa4gen("bench", "--show", str(path), "--out", str(tmp_path / "plots"))
    assert shown.returncode == 0
    assert "read ceiling 4,679 GB/s" in shown.stdout
    assert "not measured: flashinfer-tc: flashinfer-python: No module named 'flashinfer'" in shown.stdout
    assert "fa3 refuses: RuntimeError: head dimension at most 256 (d512" in shown.stdout
    assert all(len(line) < 400 for line in shown.stdout.splitlines())
    (plot,) = (tmp_path / "plots").iterdir()
    assert plot.name == "nvidia-h200-20261130T020000Z.svg"
    assert b"<svg" in plot.read_bytes()
    assert plot.read_bytes() == report.draw(recorded())


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(report.ReportError, match=r"install fa4gen\[bench\]"):
        report.draw(recorded())


# --- what is measured ----------------------------------------------------------------------------------------------------------


def test_configs_share_a_problem_where_dtype_and_mask_agree():
    base = load_config("d512")
    fixed = base.model_copy(update={"name": "fixed", "group": 6})
    causal = base.model_copy(update={"name": "causal", "mask": "causal"})
    other = load_config("d256")
    assert command.matching([base, fixed, causal, other], CELL) == {("bfloat16", "none"): [base], ("bfloat16", "causal"): [causal]}
    assert command.matching([fixed], replace(CELL, heads=24)) == {("bfloat16", "none"): [fixed]}


def test_configs_without_a_kernel_are_refused_only_where_asked_for():
    configs = [load_config("d512"), load_config("d256_m2")]
    assert command.with_kernel(configs, "sm_90a", asked=False) == configs[:1]
    with pytest.raises(command.BenchError, match="d256_m2 has no attention kernel for sm_90a"):
        command.with_kernel(configs, "sm_90a", asked=True)
    with pytest.raises(command.BenchError, match="no config"):
        command.with_kernel(configs[1:], "sm_90a", asked=False)


def test_two_configs_of_one_name_are_refused(tmp_path):
    path = tmp_path / "d512.yaml"
    path.write_text("ov_depth: 512\nshared_key: true\nwarpgroups: 1\n")
    with pytest.raises(command.BenchError, match="two different configs are named d512"):
        command.chosen_configs((str(path), "d256", str(Path(render.__file__).parents[1] / "configs" / "d512.yaml")))
    assert [config.name for config in command.chosen_configs(("d512", "d512.yaml"))] == ["d512"]


def test_peers_are_chosen_by_name(monkeypatch):
    monkeypatch.setattr(
        peers, "installed", lambda: ({"fa3": "fa3-fwd 0.0.3", "triton-split": "triton 3.6.0"}, {"sdpa-flash": "torch: none"})
    )
    assert peers.choose("none") == ({}, {})
    assert peers.choose("auto") == peers.installed()
    assert peers.choose("triton-split, fa3")[0] == {"fa3": "fa3-fwd 0.0.3", "triton-split": "triton 3.6.0"}
    with pytest.raises(peers.PeerError, match="'fa4' is no peer"):
        peers.choose("fa4")
    with pytest.raises(peers.PeerError, match="sdpa-flash cannot be used: torch: none"):
        peers.choose("sdpa-flash")


@pytest.mark.parametrize("cell", load_cells("decode") + load_cells("published"), ids=str)
def test_partition_counts_surround_the_sm_count(cell):
    counts = peers.partition_counts(cell, 132)
    heads = cell.batch * cell.kv_heads
    assert counts == sorted(set(counts))
    assert counts[0] >= 1
    assert counts[-1] <= max(1, cell.keys // 16)
    if heads < 132 and cell.keys >= 8192:
        assert any(heads * count >= 132 for count in counts)
        assert any(heads * count <= 132 for count in counts)


@pytest.fixture
def on_the_cpu(monkeypatch):
    """torch without a GPU as the peers' torch, compiling nothing."""
    torch = pytest.importorskip("torch")
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    monkeypatch.setattr(peers, "torch", torch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    return torch


def peer_tensors(torch, cell: Cell) -> tuple[peers.Tensors, np.ndarray]:
    """A cell's inputs for a peer, in float32 on the CPU, and O in float64."""
    rng = np.random.default_rng(1)
    q, k, v = (
        rng.standard_normal((cell.batch, length, heads, cell.depth)).astype(np.float32)
        for length, heads in ((cell.q_len, cell.heads), (cell.keys, cell.kv_heads), (cell.keys, cell.kv_heads))
    )
    sinks = np.linspace(-2, 6, cell.heads, dtype=np.float32) if cell.sinks else None
    tensors = peers.Tensors.__new__(peers.Tensors)
    tensors.cell, tensors.scale, tensors.causal, tensors.time = cell, 0.2, cell.causal, lambda run: 1.0
    tensors.q, tensors.k, tensors.v = (torch.from_numpy(x) for x in (q, k, v))
    tensors.sinks = None if sinks is None else torch.from_numpy(sinks)
    tensors.page_size, tensors._pages, tensors._table = cell.page_size or peers.PAGE_KEYS, None, None
    if cell.page_size is not None:
        table = page_table(cell.batch, cell.keys, cell.page_size)
        tensors._pages = tuple(torch.from_numpy(np.nan_to_num(paged(x, table, cell.page_size))) for x in (k, v))
        tensors._table = torch.from_numpy(table)
    rules = {"causal": cell.causal, "window": cell.window, "softcap": cell.softcap, "sinks": sinks}
    return tensors, reference.attention(q, k, v, scale=tensors.scale, **rules)[0]


SMALL = Cell(depth=64, keys=200, batch=2, heads=8, kv_heads=2)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("flex", {"softcap": 3.0}),
        ("flex", {"causal": True, "q_len": 4, "softcap": 3.0}),
        ("flex", {"causal": True, "window": 30, "sinks": True}),
        ("flex", {"causal": True, "window": 70, "q_len": 4}),
        ("flex", {"causal": True, "page_size": 16, "q_len": 4}),
        ("flex", {"causal": True, "page_size": 16, "keys": 203, "window": 50, "q_len": 4, "softcap": 2.0, "sinks": True}),
        ("flex", {"page_size": 16, "keys": 250}),
        ("math", {"causal": True, "window": 70}),
        ("math", {"causal": True, "window": 70, "q_len": 4}),
        ("math", {"causal": True, "window": 300, "q_len": 4}),
    ],
    ids=str,
)
def test_what_a_peer_of_torch_is_asked_for(name, change, on_the_cpu, monkeypatch):
    monkeypatch.setitem(peers._PREPARE, "math", lambda name, tensors: peers._sdpa("MATH", name, tensors))
    tensors, expected = peer_tensors(on_the_cpu, replace(SMALL, **change))
    peer = peers.prepare(name, tensors)
    assert measure.relative_error(peer.output(), expected) < 1e-6
    if name == "math":
        window = tensors.cell.window
        assert tensors.kv_in_sight[0].shape[2] == min(200, window + tensors.cell.q_len - 1), "no key out of every query's sight is read"


def test_pages_in_sight_of_every_query_need_no_mask(on_the_cpu):
    """Then a page's keys are told from those of other sequences by the list alone, which is what is compiled."""
    import torch.nn.attention.flex_attention as flex

    for change, whole in [
        ({}, True),
        ({"causal": True, "window": 32}, True),
        ({"causal": True, "window": 40}, False),
        ({"keys": 201}, False),
    ]:
        tensors, _ = peer_tensors(on_the_cpu, replace(SMALL, page_size=16, **({"keys": 208} | change)))
        k, _, mask = peers._flex_pages(flex, tensors)
        assert (mask.mask_mod is flex.noop_mask) == whole
        for sequence in range(2):
            count = int(mask.kv_num_blocks[sequence, 0, 0])
            listed = mask.kv_indices[sequence, 0, 0, :count]
            keys = k[0].reshape(2, -1, 16, 64)[:, listed].reshape(2, -1, 64)
            first = tensors.first_key // 16 * 16
            expected = tensors.k[sequence, first:].transpose(0, 1)
            assert on_the_cpu.equal(keys[:, : expected.shape[1]], expected)
            assert keys.shape[1] - expected.shape[1] == -tensors.cell.keys % 16


class FakeFlashInfer:
    """Keeps what FlashInfer's wrappers are asked for."""

    def __init__(self, output) -> None:
        self.asked, self.output = {}, output
        self.attention_sink_decl = {"fa2": "source"}

    def _wrapper(self, workspace, layout, **options):
        self.asked |= options
        return self

    BatchDecodeWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper = _wrapper

    def get_batch_prefill_attention_sink_uri(self, *key):
        return "sink_" + "_".join(str(part) for part in key[-4:])

    def plan(self, *tables, **options):
        self.asked |= options

    def run(self, q, pages, *more):
        self.asked["more"] = more
        return self.output

    def xqa_batch_decode_with_kv_cache(self, q, pages, workspace, table, lengths, most, **options):
        self.asked |= options | {"most": most, "lengths": lengths, "q": q}
        return self.output


def asked_of_flashinfer(torch, monkeypatch, name: str, cell: Cell) -> tuple[dict, peers.Tensors]:
    tensors, _ = peer_tensors(torch, cell)
    fake = FakeFlashInfer(tensors.q.flatten(0, 1))
    monkeypatch.setattr(peers, "import_module", lambda name: fake)
    monkeypatch.setattr(peers, "FLASHINFER_WORKSPACE_BYTES", 1 << 10)
    assert np.array_equal(peers.prepare(name, tensors).output(), tensors.q.numpy())
    return fake.asked, tensors


def test_flashinfer_is_asked_for_the_cells_features(on_the_cpu, monkeypatch):
    cell = replace(SMALL, causal=True, window=70)
    for name in ("flashinfer-tc", "flashinfer-cc"):
        asked, _ = asked_of_flashinfer(on_the_cpu, monkeypatch, name, replace(cell, softcap=30.0))
        assert (asked["window_left"], asked["logits_soft_cap"], asked["more"]) == (69, 30.0, ())
    for window, module in ((None, "sink_64_64_0_False"), (70, "sink_64_64_0_True")):
        asked, tensors = asked_of_flashinfer(on_the_cpu, monkeypatch, "flashinfer-tc", replace(cell, window=window, sinks=True))
        assert asked["more"] == (tensors.sinks, tensors.scale)
        assert asked["jit_args"][0] == module, "a module for each depth"
        assert asked["jit_kwargs"] == {"use_sliding_window": window is not None}
        assert asked.get("window_left", -1) == (window or 0) - 1
    asked, tensors = asked_of_flashinfer(on_the_cpu, monkeypatch, "flashinfer-xqa", replace(cell, sinks=True))
    assert (asked["window_left"], asked["sinks"], asked["q_len_per_req"], asked["mask"]) == (69, tensors.sinks, 1, None)
    assert asked["most"] == 256
    assert asked["lengths"].numpy().tolist() == [200, 200]


@pytest.mark.parametrize(("causal", "rows"), [(True, [1, 3, 7, 15]), (False, [15, 15, 15, 15])])
def test_xqa_is_told_which_drafts_a_query_sees(causal, rows, on_the_cpu, monkeypatch):
    asked, _ = asked_of_flashinfer(on_the_cpu, monkeypatch, "flashinfer-xqa", replace(SMALL, causal=causal, q_len=4))
    assert asked["mask"].numpy().view(np.uint32).tolist() == [[[row] for row in rows]] * 2
    assert asked["q"].shape == (8, 8, 64)
    longest = peers._draft_mask(replace(SMALL, q_len=peers.MAX_DRAFT), True)
    assert longest.view(np.uint32)[1, -1, 0] == 0xFFFFFFFF


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("sdpa-flash", {"sinks": True}, "it has no sinks"),
        ("sdpa-flash", {"page_size": 16}, "it has no pages"),
        ("flashinfer-cc", {"sinks": True}, "its decode kernel has no sinks"),
        ("flashinfer-tc", {"sinks": True, "softcap": 2.0}, "its kernel with sinks has no softcap"),
        ("flashinfer-xqa", {"softcap": 2.0}, "it has no softcap"),
        ("flashinfer-xqa", {"q_len": 4, "causal": True, "window": 8}, "its window is the last query's for all queries"),
        ("flashinfer-xqa", {"q_len": 33}, "more than 32 queries"),
        ("flex", {"window": 8, "causal": True}, "RuntimeError: out of it"),
        ("flex", {"causal": True}, "there is no feature to compile for: see SDPA"),
    ],
)
def test_a_peer_that_refuses_says_why_in_one_line(name, change, reason, on_the_cpu, monkeypatch):
    tensors, _ = peer_tensors(on_the_cpu, replace(SMALL, **change))

    def fails(*_, **__):
        raise RuntimeError("\n  out of it\nat length")

    monkeypatch.setattr(on_the_cpu, "compile", fails)
    if name.startswith("flashinfer"):
        monkeypatch.setattr(peers, "import_module", lambda name: FakeFlashInfer(None))
        monkeypatch.setattr(peers, "FLASHINFER_WORKSPACE_BYTES", 1 << 10)
    with pytest.raises(peers.Refused) as caught:
        peers.prepare(name, tensors)
    assert str(caught.value) == reason


def test_of_several_ways_the_fastest_that_works_is_measured(on_the_cpu):
    tensors, _ = peer_tensors(on_the_cpu, SMALL)
    times = {"slow": 3.0, "fast": 1.0, "middling": 2.0}

    def way(name):
        def make():
            if name not in times:
                raise MemoryError(f"{name} is too large")
            return lambda: name

        return make, f"note of {name}"

    tensors.time = lambda run: times[run()]
    run, note = peers._fastest(tensors, map(way, ["large", "slow", "fast", "larger", "middling"]))
    assert (run(), note) == ("fast", "note of fast")
    assert peers._fastest(tensors, map(way, ["large", "slow", "middling", "fast"]), enough=2)[1] == "note of middling"
    with pytest.raises(peers.Refused, match="MemoryError: larger is too large"):
        peers._fastest(tensors, map(way, ["large", "larger"]))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(("half", "kv8"), [(0, 0), (1, 0), (0, 1)])
def test_the_benchmark_kernels_compile(arch, half, kv8):
    module = compiler.compile_source(f"#define HALF {half}\n#define KV8 {kv8}\n{measure._source()}", arch, "kernels.cu")
    spans = {f"bench_read_{loads}x{steps}" for loads, steps in measure.CEILING_SPANS}
    others = {"bench_delay", "bench_normal", "bench_normal_kv", "bench_scores", "bench_softmax", "bench_values", "bench_pages"}
    assert spans | others | {"bench_read_8x8"} == set(module.kernels)
    for loads, steps in measure.CEILING_SPANS:
        span = measure.VECTOR_BYTES * measure.THREADS * loads * steps
        assert measure.CEILING_BYTES % span == 0, "the grid covers the buffer"
    assert measure.MIN_FLUSH_BYTES % (measure.VECTOR_BYTES * measure.THREADS * 64) == 0


def test_the_stream_variant_has_the_loads_and_no_arithmetic():
    config = load_config("d512")
    normal, stream = measure.own_sources(config, "sm_90a")
    assert stream is not None
    ptx = {text: compiler.compile_source(text, "sm_90a", "attention.cu").ptx for text in (normal, stream)}
    assert ptx[normal].count("cp.async.bulk.tensor") >= ptx[stream].count("cp.async.bulk.tensor.5d.shared::cluster") > 0
    assert "wgmma.mma_async" in ptx[normal]
    assert "wgmma.mma_async" not in ptx[stream]


def test_relative_error_never_lets_a_nan_pass():
    expected = np.array([3.0, 4.0])
    assert measure.relative_error(np.array([3.0, 4.5]), expected) == pytest.approx(0.1)
    assert measure.relative_error(np.array([3.0, np.nan]), expected) == math.inf
    assert measure.relative_error(np.array([0.5, 0.0]), np.zeros(2)) == 0.5


class FakeGpu:
    """Gives each implementation a fixed time and remembers the order of launches; every `period`-th launch ends `late` seconds late."""

    def __init__(self, seconds, period=1, late=0.0):
        self.seconds, self.order, self.launches, self.period, self.late = seconds, [], 0, period, late

    def delay(self, seconds):
        self.launches += 1

    def timed(self, name, enqueue, *, flush, host_seconds):
        self.order.append((name, flush))
        self.launches += 3  # a delay, a flush and the launch itself
        return self.seconds[name] + self.late * (self.launches % self.period < 3)


class FakeImplementation:
    def __init__(self, name):
        self.name = name

    def enqueue(self):
        raise AssertionError("launched outside of a timed launch")

    def output(self):
        return None


def test_implementations_take_turns_and_slow_ones_get_fewer_launches():
    gpu = FakeGpu({"a": 1e-4, "b": 2e-4, "slow": 1e-3})
    checked = [measure.Checked(FakeImplementation(name), None, 1e-5) for name in gpu.seconds]
    us = measure.time_all(gpu, checked, repeats=8)
    assert [entry["zero"].median for entry in us] == pytest.approx([100.0, 200.0, 1000.0])
    assert [(entry["zero"].count, entry["read"].count) for entry in us] == [(8, 8), (8, 8), (5, 5)]
    starts = [gpu.order[3 + 6 * turn][0] for turn in range(5)]
    assert starts == ["a", "b", "slow", "a", "b"]


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 9])
def test_what_makes_some_launches_late_makes_no_implementation_slower(count):
    """An H200 starts every fourth timed launch late. In turns without anything between them they are always the same implementations'."""
    gpu = FakeGpu({str(i): 1e-5 for i in range(count)}, period=12, late=8e-7)
    checked = [measure.Checked(FakeImplementation(name), None, 1e-5) for name in gpu.seconds]
    us = measure.time_all(gpu, checked, repeats=40)
    assert [entry[flush].median for entry in us for flush in ("zero", "read")] == pytest.approx([10.0] * 2 * count, abs=1e-3)


# --- tuning --------------------------------------------------------------------------------------------------------------------


def test_legal_variants_come_once_each_and_start_with_the_config_itself():
    config = load_config("d512")
    variants = tune.legal_variants(config, "sm_90a", ("tile_rows", "warpgroups", "ring_slots"))
    assert variants[0].values == {}
    assert variants[0].config == config
    geometries = [derive(variant.config, "sm_90a") for variant in variants]
    assert len(set(geometries)) == len(geometries) > 10
    assert {geometry.warpgroups for geometry in geometries} == {1, 2}
    assert {geometry.tile_rows for geometry in geometries} >= {16, 32}
    for variant in variants:
        assert parse_config({"name": "d512", "ov_depth": 512, "shared_key": True} | variant.values) == variant.config


def test_fewer_fields_give_fewer_variants_and_unknown_ones_are_refused():
    config = load_config("d512")
    assert {tuple(v.values) for v in tune.legal_variants(config, "sm_90a", ("warpgroups",))} == {(), ("warpgroups",)}
    assert tune.tuned_fields(("warpgroups",)) == ("warpgroups",)
    with pytest.raises(tune.TuneError, match="--field rows"):
        tune.tuned_fields(("rows",))


def test_a_field_that_a_config_gives_keeps_a_value():
    config = parse_config({"ov_depth": 512, "shared_key": True, "warpgroups": 1, "name": "mine"})
    variants = tune.legal_variants(config, "sm_90a", ("warpgroups",))
    assert [variant.values for variant in variants] == [{"warpgroups": 1}, {"warpgroups": 2}]


def variant(values, *medians, refused=None) -> tune.Variant:
    return tune.Variant(load_config("d512"), values, 200, [times(us) for us in medians], refused)


def test_the_winner_is_fastest_over_all_cells():
    slow, fast, mixed = variant({}, 110, 220), variant({"ring_slots": 4}, 100, 200), variant({"warpgroups": 1}, 99, 240)
    spilled = variant({"tile_rows": 8}, refused="spills 8 bytes")
    assert tune.winner([slow, fast, mixed, spilled]) is fast
    assert tune.scores([slow, spilled])[1] == math.inf
    columns, rows = tune.table_rows([slow, fast, spilled], [CELL, CELL], fast)
    assert rows[0][0] == "ring_slots 4 *"
    assert rows[0][3] == "100.0 / 92.0"
    assert rows[-1] == ["tile_rows 8", "200", "refused", "spills 8 bytes"]
    assert len(columns) == 5


def test_noise_changes_nothing():
    own, other = variant({}, 1000.5), variant({"ring_slots": 4}, 1000.0)
    assert tune.winner([own, other]) is own
    two, one = variant({"ring_slots": 4, "warpgroups": 1}, 900.0), variant({"warpgroups": 1}, 900.4)
    assert tune.winner([own, two, one]) is one
    assert tune.winner([variant({}, refused="spills 8 bytes")]) is None


COMMENTED = """\
# What this is for.
m_pack: 4
rows: 32   # of a tile
ring_slots: 4  # measured long ago

"ov_depth": 512
shared_key: true
arch: [sm_90a]
# the end
"""


def test_write_back_keeps_comments_and_order(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(COMMENTED)
    assert tune.write_back(path, {"ring_slots": 6, "warpgroups": 1})
    assert path.read_text() == COMMENTED.replace("ring_slots: 4 ", "ring_slots: 6 ") + "warpgroups: 1\n"
    assert load_config(path).ring_slots == 6
    assert not tune.write_back(path, {"ring_slots": 6, "warpgroups": 1})
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.yaml"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{ov_depth: 512, ring_slots: 4, shared_key: true}", "{ov_depth: 512, ring_slots: 6, shared_key: true, warpgroups: 1}"),
        ("{ov_depth: 512, shared_key: true,}\n", "{ov_depth: 512, shared_key: true, ring_slots: 6, warpgroups: 1}\n"),
        ("ov_depth: 512\r\nring_slots: 4\r\n", "ov_depth: 512\r\nring_slots: 6\r\nwarpgroups: 1\r\n"),
        ("ov_depth: 512\narch: [sm_90a]", "ov_depth: 512\narch: [sm_90a]\nring_slots: 6\nwarpgroups: 1\n"),
        ("arch:\n  - sm_90a\nring_slots: '4' # old\n", "arch:\n  - sm_90a\nring_slots: 6 # old\nwarpgroups: 1\n"),
    ],
)
def test_fields_are_edited_in_place(text, expected):
    assert tune.edited(text, {"ring_slots": 6, "warpgroups": 1}, "x.yaml") == expected


@pytest.mark.parametrize("text", ["ov_depth: 512\n...\n", "[1]", "ring_slots: &a 4\ngroup: *a\n"])
def test_what_cannot_be_edited_is_left_alone(text, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(tune.TuneError, match=r"^mine\.yaml: "):
        tune.write_back(path, {"ring_slots": 6, "warpgroups": 1})
    assert path.read_text() == text


def test_an_illegal_result_is_not_written(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(COMMENTED)
    with pytest.raises(ValueError, match="ring"):
        tune.write_back(path, {"ring_slots": 1})
    assert path.read_text() == COMMENTED


def test_the_installed_packages_own_config_is_not_touched(monkeypatch, tmp_path):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "d512.yaml").write_text(COMMENTED)
    monkeypatch.setattr(tune.resources, "files", lambda package: tmp_path / "configs")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(tune.TuneError, match="copy it"):
        tune.config_path("d512")
    (tmp_path / "pyproject.toml").touch()
    assert tune.config_path("d512.yaml") == (tmp_path / "configs" / "d512.yaml").resolve()


# --- runs on a recorded GPU ----------------------------------------------------------------------------------------------------


class RecordedOwn:
    """Stands for a kernel on a problem: its time is a function of the config, its error of `wrong`."""

    wrong: tuple[str, ...] = ()

    def __init__(self, problem, config, name, source):
        self.problem, self.config, self.name = problem, config, name
        self.resources = compiler.KernelResources(100, 0, 0, 0, 0, 1, 4096)
        self.grid = (128, 1, 1)

    @property
    def us(self) -> float:
        return {"stream": 240.0}.get(self.name, 250.0 + 50 * (self.config.warpgroups == 1))

    def lse_error(self) -> float:
        return 1e-6

    def free(self) -> None:
        self.config = None


@pytest.fixture
def recorded_gpu(monkeypatch):
    """measure's GPU side replaced by recorded figures; everything around it is the real thing. Yields the list of measured cells."""
    measured = []

    class Gpu:
        def __init__(self):
            self.backend = type("Backend", (), {"arch": "sm_90a", "device_name": "NVIDIA H200"})()
            self.info, self.flush_bytes = dict(recorded().gpu), 1 << 28

        def read_ceiling(self):
            return {"4x4": 4600.0 + len(measured)}

    class Problem:
        def __init__(self, gpu, cell, dtype, *, causal):
            self.gpu, self.cell, self.scale, self.causal = gpu, cell, 0.1, causal
            measured.append(cell)

        def free(self):
            self.cell = None

    def check(problem, own):
        assert problem.cell is not None, "freed too early"
        error = None if own.name == "stream" else 1.0 if own.config.name in RecordedOwn.wrong else 2e-3
        return measure.Checked(own, error, 1e-5)

    monkeypatch.setattr(measure, "Gpu", Gpu)
    monkeypatch.setattr(measure, "Problem", Problem)
    monkeypatch.setattr(measure, "Own", RecordedOwn)
    monkeypatch.setattr(measure, "check", check)
    monkeypatch.setattr(measure, "time_all", lambda gpu, checked, *, repeats: [times(item.implementation.us) for item in checked])
    # There is nothing to free, and collecting the garbage of a test process that has run the emulator takes seconds a cell.
    monkeypatch.setattr(command, "_peers_released", contextlib.nullcontext)
    return measured


def consoles() -> tuple[Console, Console]:
    return Console(file=io.StringIO(), width=400), Console(file=io.StringIO(), width=400)


def text_of(console: Console) -> str:
    return console.file.getvalue()


def test_a_cell_says_what_it_asks_of_a_config():
    cell = parse_cell("depth=512,keys=8192,causal=true,page_size=16,key_lengths=true,window=1024,softcap=30,sinks=true")
    assert str(cell) == "d512 b1 k8192 q1 h32/4 causal p16 len win1024 cap30 sinks"
    assert cell.kv_bytes == 2 * 1024 * 4 * 512 * 2
    config, full = cell.applied_to(load_config("d512").model_copy(update={"arch": ("sm_90a",)}))
    assert full == cell
    assert config.features() == ("paged", "key_lengths", "window", "softcap", "sinks")
    assert (config.page_size, config.mask, config.window, config.softcap) == (16, "causal", 1024, 30.0)


def test_a_cell_takes_on_the_features_of_a_config():
    plain = Cell(depth=64, keys=8192, heads=64, kv_heads=8)
    config, full = plain.applied_to(load_config("gpt_oss"))
    assert config == load_config("gpt_oss")
    assert full == replace(plain, causal=True, page_size=16, key_lengths=True, window=128, sinks=True)
    # Of d256_m2 there is no kernel with features on sm_90a: no config for such a cell.
    assert command.with_features([load_config("d256_m2")], replace(plain, depth=256, softcap=3.0), "sm_90a") == {}


@pytest.mark.parametrize("text", ["page_size=17", "window=5", "softcap=-1", "sinks=1", "causal=yes", "causal=true,window=0"])
def test_features_that_do_not_go_are_refused(text):
    with pytest.raises(CellError, match=text.split(",")[-1].split("=")[0]):
        parse_cell(f"depth=512,keys=64,{text}")


def test_a_run_measures_reports_and_stores_every_cell(recorded_gpu, tmp_path):
    console, errors = consoles()
    options = command.BenchOptions(("d512", "d256"), ("depth=512,keys=64,batch=2",), "decode", tmp_path, "none", 7)
    assert command.run(options, console, errors) == 0
    assert [cell.depth for cell in recorded_gpu] == [512] * 6 + [256] * 5
    stored = sorted(tmp_path.iterdir())
    assert [path.suffix for path in stored] == [".json", ".svg"]
    found = report.from_json(stored[0].read_text(), "stored")
    assert [entry.cell for entry in found.cells] == recorded_gpu
    assert found.repeats == 7
    assert found.ceiling == 4611.0, "the larger of before and after"
    assert set(found.configs) == {"d512", "d256"}
    assert "250.0" in text_of(console)
    assert "11/11 d256" in text_of(errors)


def test_a_wrong_kernel_makes_the_run_exit_1(recorded_gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(RecordedOwn, "wrong", ("d256",))
    console, errors = consoles()
    assert command.run(command.BenchOptions(("d512", "d256"), out=tmp_path, peers="none"), console, errors) == 1
    assert text_of(errors).count("out of bounds: d256") == 5


def test_a_time_limit_leaves_cells_out_and_says_so(recorded_gpu, tmp_path):
    console, errors = consoles()
    with pytest.raises(command.BenchError, match="time limit"):
        command.run(command.BenchOptions(("d512",), out=tmp_path, peers="none", time_limit=0.0), console, errors)
    assert recorded_gpu == []
    assert list(tmp_path.iterdir()) == []


def test_tuning_keeps_the_fastest_that_is_right(recorded_gpu, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("ov_depth: 512\nshared_key: true\nwarpgroups: 1 # so far\n")
    console, errors = consoles()
    options = tune.TuneOptions(str(path), ("depth=512,keys=64",), fields=("warpgroups",))
    assert tune.run(replace(options, write=False), console, errors) == 0
    assert "warpgroups: 1" in path.read_text()
    assert tune.run(options, console, errors) == 0
    assert path.read_text() == "ov_depth: 512\nshared_key: true\nwarpgroups: 2 # so far\n"
    assert "warpgroups 2 *" in text_of(console)
    assert tune.run(options, console, errors) == 0
    assert text_of(errors).rstrip().endswith("(unchanged)")


def test_tuning_writes_nothing_where_nothing_is_right(recorded_gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(RecordedOwn, "wrong", ("mine",))
    path = tmp_path / "mine.yaml"
    path.write_text("ov_depth: 512\nshared_key: true\n")
    console, errors = consoles()
    assert tune.run(tune.TuneOptions(str(path), ("depth=512,keys=64",), fields=("warpgroups",)), console, errors) == 1
    assert path.read_text() == "ov_depth: 512\nshared_key: true\n"
    assert "wrong on d512 b1 k64" in text_of(console)


# --- commands ------------------------------------------------------------------------------------------------------------------


@needs_no_gpu
@pytest.mark.parametrize("arguments", [("bench", "--config", "d512"), ("bench",), ("tune", "--config", "d512")])
def test_without_a_gpu_a_command_says_so_in_one_line(arguments, tmp_path):
    done = fa4gen(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("fa4gen: ")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("bench", "--config", "d512", "--cell", "depth=256,keys=8"), "no config of depth 256"),
        (("bench", "--config", "d512", "--cells", "nothing"), "no such file"),
        (("bench", "--config", "nothing"), "[readable-file]"),
        (("bench", "--show", "nothing.json"), "nothing.json: No such file"),
        (("bench", "--repeats", "1"), "--repeats"),
        (("tune",), "--config"),
        (("tune", "--config", "d512", "--field", "rows"), "--field rows"),
        (("tune", "--config", "d64"), "no cell of depth 64"),
        (("tune", "--config", "nothing"), "[readable-file]"),
    ],
)
def test_a_mistake_is_one_line(arguments, says, tmp_path):
    done = fa4gen(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


# --- on the GPU ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpu() -> measure.Gpu:
    return measure.Gpu()


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_device_reference_agrees_with_numpy(gpu, dtype, causal):
    cell = Cell(depth=128, batch=2, keys=1025, q_len=5, heads=6, kv_heads=2)
    problem = measure.Problem(gpu, cell, dtype, causal=causal)
    q, k, v = (array.fetch() for array in (problem.q, problem.k, problem.v))
    out, lse = reference.attention(q, k, v, scale=problem.scale, causal=causal)
    problem.free()
    assert np.abs(problem.out - out).max() < 1e-12
    assert np.abs(problem.lse - lse).max() < 1e-12
    values = np.concatenate([a.astype(np.float64).ravel() for a in (q, k, v)])
    assert abs(values.mean()) < 0.01
    assert abs(values.std() - 1) < 0.01
    assert abs((np.abs(values) < 1).mean() - 0.6827) < 0.01


@pytest.mark.gpu
@pytest.mark.parametrize("features", [{"window": 70, "sinks": True}, {"softcap": 2.0, "page_size": 16, "key_lengths": True}])
def test_features_in_the_device_reference_and_in_our_kernel(gpu, features):
    config, cell = Cell(depth=128, batch=2, keys=1025, q_len=5, heads=6, kv_heads=2, causal=True, **features).applied_to(
        load_config("d128_sk").model_copy(update={"arch": (gpu.backend.arch,)})
    )
    problem = measure.Problem(gpu, cell, "bfloat16", causal=True)
    q, k, v = (array.fetch() for array in (problem.q, problem.k, problem.v))
    rules = {"window": cell.window, "softcap": cell.softcap, "sinks": problem.sinks}
    out, lse = reference.attention(q, k, v, scale=problem.scale, causal=True, **rules)
    assert np.abs(problem.out - out).max() < 1e-12
    assert np.abs(problem.lse - lse).max() < 1e-12
    own = measure.Own(problem, config, "fa4gen", measure.own_sources(config, gpu.backend.arch)[0])
    assert measure.check(problem, own).error <= report.OUT_BOUND
    assert own.lse_error() < 2e-3
    own.free()
    problem.free()


@pytest.mark.gpu
def test_rows_that_see_no_key_are_zero_in_the_device_reference(gpu):
    problem = measure.Problem(gpu, Cell(depth=64, keys=3, q_len=5, heads=2, kv_heads=1), "bfloat16", causal=True)
    problem.free()
    assert (problem.out[:, :2] == 0).all()
    assert np.isneginf(problem.lse[:, :, :2]).all()
    assert np.isfinite(problem.lse[:, :, 2:]).all()


@pytest.mark.gpu
def test_the_ceiling_and_the_flushes_are_plausible(gpu):
    ceiling = gpu.read_ceiling()
    assert all(500 < gbs < 20_000 for gbs in ceiling.values())
    small = measure.DeviceArray((gpu.l2_bytes // 4,), np.uint8)
    gpu.normal(small, seed=1)
    read = gpu._read_launch(small, 4, 4)

    def median(flush: report.Flush | None) -> float:
        return float(np.median([gpu.timed("read", read.enqueue, flush=flush, host_seconds=1e-5) for _ in range(9)]))

    warm = median(None)
    assert median("zero") > 1.2 * warm, "a zero-fill leaves nothing of it in L2"
    assert median("read") > 1.2 * warm, "neither does a read"
    small.free()


@pytest.mark.gpu
def test_an_output_that_is_wrong_is_found(gpu):
    config = load_config("d512")
    if gpu.backend.arch not in config.arch or not render.has_attention(config, gpu.backend.arch):
        pytest.skip(f"no attention kernel for {gpu.backend.arch}")
    problem = measure.Problem(gpu, Cell(depth=512, batch=2, keys=1000, heads=8, kv_heads=1), "bfloat16", causal=False)
    normal, _ = measure.own_sources(config, gpu.backend.arch)
    own = measure.Own(problem, config, "fa4gen", normal)
    assert measure.relative_error(own.output(), problem.out) == math.inf, "poisoned until it runs"
    checked = measure.check(problem, own)
    assert checked.error <= report.OUT_BOUND
    assert own.lse_error() < 2e-3
    problem.out = problem.out + 0.01 * np.abs(problem.out).max()
    assert measure.check(problem, own).error > report.OUT_BOUND
    own.free()
    problem.free()


@pytest.mark.gpu
def test_bench_and_tune_run_from_end_to_end(gpu, tmp_path):
    config = load_config("d512")
    if gpu.backend.arch not in config.arch or not render.has_attention(config, gpu.backend.arch):
        pytest.skip(f"no attention kernel for {gpu.backend.arch}")
    path = tmp_path / "mine.yaml"
    path.write_text("ov_depth: 512 # deep\nshared_key: true\n")
    cell = ("--cell", "depth=512,keys=2048,heads=8,kv_heads=1")
    done = fa4gen("bench", "--config", str(path), *cell, "--repeats", "5", "--peers", "none", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    (stored,) = (tmp_path / "out").glob("*.json")
    found = report.from_json(stored.read_text(), stored.name)
    assert str(tmp_path) not in stored.read_text()
    ours = found.cells[0].of("fa4gen", "mine")
    assert ours.right
    assert 1 < ours.us["read"].median < 1000
    tuned = fa4gen("tune", "--config", str(path), *cell, "--field", "warpgroups", "--repeats", "5")
    assert tuned.returncode == 0, tuned.stderr
    assert path.read_text().startswith("ov_depth: 512 # deep\nshared_key: true\n")
    assert (yaml.safe_load(path.read_text()) or {}).get("warpgroups") in (None, 1, 2)


@pytest.mark.gpu
@pytest.mark.skipif(os.environ.get("FA4GEN_PEERS") != "1", reason="set FA4GEN_PEERS=1 to run every installed peer")
@pytest.mark.parametrize(
    "cell",
    [
        Cell(depth=128, batch=2, keys=1000, heads=32, kv_heads=4),
        Cell(depth=128, batch=2, keys=1024, q_len=4),
        Cell(depth=128, batch=2, keys=1000, causal=True, window=300),
        Cell(depth=128, batch=2, keys=1000, causal=True, window=300, q_len=4, page_size=16, key_lengths=True),
        Cell(depth=128, batch=2, keys=1000, softcap=30.0),
        Cell(depth=64, batch=2, keys=1024, causal=True, window=128, sinks=True, page_size=16, key_lengths=True),
    ],
    ids=str,
)
def test_installed_peers_are_right(gpu, cell):
    problem = measure.Problem(gpu, cell, "bfloat16", causal=cell.causal)
    ready, refused = command._prepared_peers(problem, list(peers.installed()[0]))
    errors = {peer.name: measure.check(problem, peer).error for peer in ready}
    assert errors
    assert all(error < report.PEER_BOUND for error in errors.values()), (errors, refused)
    assert units.DTYPES["bfloat16"] == problem.q.stand_in.dtype
    problem.free()
