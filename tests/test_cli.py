"""The command line: exit codes, one-line errors, and a help that imports nothing heavy."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fa4gen import cli
from fa4gen.cli import main
from fa4gen.codegen.compiler import compile_source
from fa4gen.codegen.config import load_shipped, shipped_configs

COMMAND = [sys.executable, "-m", "fa4gen.cli"]


def failure(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Runs a command that must fail with exit code 2, and returns its one line on stderr."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(("fa4gen: ", "fa4gen emulate: "))
    assert captured.err.endswith("\n")
    assert len(captured.err.splitlines()) == 1
    assert "Traceback" not in captured.err
    assert "internal error" not in captured.err
    return captured.err


def test_help_imports_nothing_heavy() -> None:
    loaded = "print(sorted(m for m in sys.modules if m in sys.argv[1:]), file=sys.stderr)"
    code = f"import sys; from fa4gen.cli import main; main(['--help']); {loaded}"
    heavy = ["numpy", "jinja2", "pydantic", "yaml", "rich", "cuda", "ml_dtypes", "fa4gen.codegen"]
    result = subprocess.run([sys.executable, "-c", code, *heavy], capture_output=True, text=True, check=True)
    assert result.stderr.strip() == "[]"
    for command in ("emit", "export", "check", "run", "list", "schema", "emulate"):
        assert command in result.stdout


@pytest.mark.parametrize("command", sorted(cli.cli.commands))
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert f"fa4gen {command}" in capsys.readouterr().out


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "Commands:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "needle"),
    [
        (["nothing"], "nothing"),
        (["--nothing"], "--nothing"),
        (["emit"], "--config"),
        (["emit", "--config"], "--config"),
        (["emit", "--config", "d512", "--arch", "sm_80"], "sm_80"),
        (["emit", "--config", "d512", "surplus"], "surplus"),
        (["emit", "--config", "d51"], "did you mean d512"),
        *(([command, "--config", "d512", "--config", "d256"], "more than once") for command in ("emit", "run", "inspect", "tune")),
        *(([*command, "--out", ""], "empty path") for command in (["emit", "--config", "d512"], ["check"], ["bench", "--config", "d512"])),
        (["export", "--config", "d64"], "--out"),
        (["export", "--out", "somewhere"], "--config"),
        (["export", "--config", "d64", "--out", ""], "empty path"),
        (["export", "--config", "d64", "--out", "."], "current folder"),
        (["export", "--config", "d64", "--out", "/"], "current folder"),
        (["export", "--config", "d64", "--arch", "sm_90a,sm_80", "--out", "x"], "sm_80"),
        (["export", "--config", "d64", "--arch", "", "--out", "x"], "--arch"),
        (["export", "--config", "d64", "--config", "d64", "--out", "x"], "two configs are named d64"),
        (["export", "--config", "d256_m2", "--arch", "sm_90a", "--out", "x"], "no full kernel for sm_90a"),
        (["check", "--config", "no\nsuch"], "no such file"),
        (["run", "--config", "d512", "--keys", "0"], "--keys"),
        (["run", "--config", "d512", "--keys", "many"], "many"),
        (["run", "--config", "d512", "--seed", "-1"], "--seed"),
        (["run", "--config", "d512", "--backend", "tpu"], "tpu"),
        (["run", "--config", "d512", "--input", "no_such.npz"], "no_such.npz"),
        (["run", "--config", "d512", "--heads", "7", "--kv-heads", "2"], "7"),
        (["list", "surplus"], "surplus"),
        (["emulate"], "FILE.ptx"),
        (["emulate", "no_such.ptx"], "no_such.ptx"),
    ],
)
def test_errors_are_one_line_and_exit_2(arguments: list[str], needle: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert needle in failure(arguments, capsys)


def test_a_refused_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("ov_depth: 512\nshared_key: true\nrows: 64\n")
    assert f"{path}: rows = 64: [pack-fills-warpgroup]" in failure(["emit", "--config", str(path)], capsys)


def test_a_target_the_config_does_not_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "only.yaml"
    path.write_text("ov_depth: 512\nshared_key: true\narch: [sm_100a]\n")
    for command in ("emit", "run"):
        assert "[arch-enabled]" in failure([command, "--config", str(path), "--arch", "sm_90a"], capsys)


def test_a_place_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert "file" in failure(["emit", "--config", "d64", "--out", str(tmp_path / "file" / "below")], capsys)


def test_emit_and_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["emit", "--config", "d64.yaml", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert str(out / "d64" / "sm_90a") in printed
    assert "unit_combine" in printed
    assert main(["check", "--config", "d64", "--out", str(out)]) == 0
    assert capsys.readouterr() == ("", "")
    (out / "d64/sm_90a/unit.cu").write_text("edited\n")
    assert main(["check", "--config", "d64", "--out", str(out)]) == 1
    captured = capsys.readouterr()
    assert "-edited" in captured.out
    assert captured.err == ""
    assert main(["emit", "--config", "d64", "--arch", "sm_90a", "--out", str(out)]) == 0
    assert main(["check", "--config", "d64", "--out", str(out)]) == 0


def test_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "kernels"
    assert main(["export", "--config", "d64", "--arch", "sm_90a, sm_100a", "--out", str(out)]) == 0
    names = ["attention_example.c", "d64_sm_100a.cubin", "d64_sm_90a.cubin", "fa4gen_attention.c", "fa4gen_attention.h", "manifest.json"]
    assert capsys.readouterr().out.splitlines() == [str(out / name) for name in names]
    assert sorted(path.name for path in out.iterdir()) == names
    manifest = json.loads((out / "manifest.json").read_text())
    assert [(kernel["config"]["name"], kernel["arch"], kernel["cubin"]) for kernel in manifest["kernels"]] == [
        ("d64", "sm_90a", "d64_sm_90a.cubin"),
        ("d64", "sm_100a", "d64_sm_100a.cubin"),
    ]
    for name, digest in manifest["outputs"].items():
        assert hashlib.sha256((out / name).read_bytes()).hexdigest() == digest
    for kernel in manifest["kernels"]:
        for entry, facts in kernel["entries"].items():
            assert entry.encode() in (out / kernel["cubin"]).read_bytes()
            assert {"block", "grid", "smem_bytes", "tile_rows", "max_cluster", "arguments", "registers"} <= set(facts)
    # An earlier export is replaced whole; what is somebody's own is not touched.
    assert main(["export", "--config", "d64", "--arch", "sm_90a", "--out", str(out)]) == 0
    assert not (out / "d64_sm_100a.cubin").exists()
    capsys.readouterr()
    (out / "notes.txt").write_text("mine")
    assert "holds notes.txt" in failure(["export", "--config", "d64", "--arch", "sm_90a", "--out", str(out)], capsys)
    assert (out / "notes.txt").read_text() == "mine"
    (tmp_path / "file").write_text("")
    assert "is no folder" in failure(["export", "--config", "d64", "--arch", "sm_90a", "--out", str(tmp_path / "file")], capsys)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "kernels"]


def test_list_shows_every_config(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(["list"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    names = [row[0] for row in rows[1:]]
    assert names == [name for name in shipped_configs() for _ in load_shipped(name).arch]
    (d512,) = [row for row in rows if row[0] == "d512" and "sm_100a" in row]
    assert {"256", "384", "199,856"} <= set(d512)


def test_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "Config"


TWICE = """
extern "C" __global__ void twice(const float* x, float* y, unsigned n) {
  if (threadIdx.x < n) y[threadIdx.x] = 2.0f * x[threadIdx.x];
}
"""


def test_emulate_a_ptx_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("twice.ptx").write_text(compile_source(TWICE, "sm_90a", "twice.cu").ptx)
    np.save("x.npy", np.arange(100, dtype=np.float32))
    command = ["emulate", "twice.ptx", "--entry", "twice", "--block", "128", "--arg", "in:x.npy"]
    assert main([*command, "--arg", "out:float32[100]:y.npy", "--arg", "u32:100"]) == 0
    assert capsys.readouterr() == ("", "")
    assert np.array_equal(np.load("y.npy"), 2 * np.arange(100, dtype=np.float32))
    # One element too few.
    short = [*command, "--arg", "out:float32[99]:y.npy", "--arg", "u32:100"]
    assert main(short) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("out_of_bounds")
    assert main([*short, "--ignore", "out_of_bounds"]) == 0
    capsys.readouterr()
    assert "3 arguments" in failure(command, capsys)
    assert "no_such_kind" in failure([*short, "--ignore", "no_such_kind"], capsys)


def test_a_reader_that_leaves_is_no_error() -> None:
    process = subprocess.Popen([*COMMAND, "schema"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 141
    process.stderr.close()


def test_interrupt_is_quiet(tmp_path: Path) -> None:
    waiting = (
        "import sys, time, click; from fa4gen import cli\n@cli.cli.command()\ndef wait():\n  print('up', flush=True); time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", waiting + "sys.exit(cli.main(['wait']))"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts what it runs in the background with interrupts ignored, and that is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (130, "", "")


def test_a_bug_is_reported_on_one_line_and_shown_on_request(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> None:
        raise ZeroDivisionError("a\nbug")

    monkeypatch.setattr("fa4gen.codegen.config.json_schema", broken)
    assert main(["schema"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fa4gen: internal error: ZeroDivisionError: a\\nbug")
    monkeypatch.setenv("FA4GEN_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        main(["schema"])


@pytest.mark.parametrize("text", ["Unable to allocate 3.81 GiB", ""])
def test_a_request_beyond_memory_is_no_bug(text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def greedy() -> None:
        raise MemoryError(text)

    monkeypatch.setattr("fa4gen.codegen.config.json_schema", greedy)
    assert main(["schema"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"fa4gen: not enough memory: {text or 'ask for less at once'}"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("fa4gen 0.")


def test_module_and_script_are_the_same_command() -> None:
    script = Path(sys.executable).parent / "fa4gen"
    outputs = {
        subprocess.run([*command, "--help"], capture_output=True, check=True, env=os.environ).stdout for command in (COMMAND, [str(script)])
    }
    assert len(outputs) == 1
