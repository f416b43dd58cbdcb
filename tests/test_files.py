"""Output files: whole or not at all, as readable as any other, never over something that is no file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fa4gen.cli import main
from fa4gen.codegen.files import check_writable, npz, write_whole


def test_a_file_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    write_whole(path, b"first")

    def broken(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="No space left") as refused:
        write_whole(path, b"second")
    assert refused.value.filename == str(path)
    assert path.read_bytes() == b"first"
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]


def test_written_files_are_as_readable_as_others(tmp_path):
    write_whole(tmp_path / "a", b"text")
    (tmp_path / "b").write_text("text")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_a_symbolic_link_is_written_through(tmp_path):
    (tmp_path / "target").write_bytes(b"old")
    (tmp_path / "link").symlink_to("target")
    write_whole(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_bytes() == b"new"


def test_what_is_no_file_is_left_alone(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(OSError, match="not a regular file"):
            write_whole(path, b"x")
    assert not (tmp_path / "pipe").is_file()
    with pytest.raises(OSError, match="no such folder"):
        check_writable(tmp_path / "missing" / "file")


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--config", "d64", "--arch", "sm_90a", "--save"],
        ["inspect", "--config", "d64", "--svg"],
    ],
)
def test_commands_refuse_a_device_before_they_start(tmp_path, capsys, arguments):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert main([*arguments, str(pipe)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert "not a regular file" in captured.err
    assert not Path(pipe).is_file()


def test_equal_arrays_give_equal_archives():
    arrays = {"a": np.arange(5), "b": np.zeros((2, 3), np.float32)}
    assert npz(arrays) == npz({name: array.copy() for name, array in arrays.items()})


def test_checking_a_tree_that_is_not_there_is_one_line(tmp_path, capsys):
    assert main(["check", "--out", str(tmp_path / "missing")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert "no generated tree" in captured.err


@pytest.mark.parametrize("command", ["schema", "list", "--help"])
def test_a_closed_stdout_is_no_error(command):
    shell = f"{sys.executable} -m fa4gen.cli {command} >&-"
    finished = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    assert (finished.returncode, finished.stderr) == (0, "")


def test_a_full_disk_names_the_file(tmp_path):
    shell = f"ulimit -f 4; {sys.executable} -m fa4gen.cli emit --config d64 --arch sm_90a --out {tmp_path}"
    finished = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    assert finished.returncode == 2
    assert len(finished.stderr.splitlines()) == 1
    assert str(tmp_path / "d64" / "sm_90a") in finished.stderr
    assert not (tmp_path / "d64" / "sm_90a").exists()
