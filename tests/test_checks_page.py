"""The worked example of docs/checks.md does what the page says."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np

from fa4gen.codegen.emulator.command import HAZARD_KINDS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "checks.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def session(text: str, folder: Path) -> tuple[str, int]:
    """What the commands of a console block print, in the form of the block, and the last exit status."""
    printed, status = [], 0
    for command in re.findall(r"^\$ (.*)$", text, re.MULTILINE):
        program, *arguments = shlex.split(command)
        start = [sys.executable] if program == "python" else [sys.executable, "-c", "from fa4gen.cli import main; raise SystemExit(main())"]
        done = subprocess.run([*start, *arguments], cwd=folder, capture_output=True, text=True, check=False)
        printed.append(f"$ {command}\n{done.stdout}{done.stderr}")
        status = done.returncode
    return "".join(printed), status


def test_the_worked_example(tmp_path):
    (listing,), (fix,), (racy, clean) = blocks("ptx"), blocks("diff"), blocks("console")
    file = tmp_path / "reverse.ptx"
    file.write_text(listing)
    assert session(racy, tmp_path) == (racy, 1)
    before, added, after = (line[1:] for line in fix.splitlines())
    assert listing.count(f"{before}\n{after}\n") == 1
    file.write_text(listing.replace(f"{before}\n{after}\n", f"{before}\n{added}\n{after}\n"))
    assert session(clean, tmp_path) == (clean, 0)
    assert (np.load(tmp_path / "y.npy") == np.arange(64)[::-1]).all()


def test_every_kind_is_explained_and_no_other():
    table = PAGE.split("## What is checked")[1].split("## What is not checked")[0]
    named = re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `")))
    assert set(named) == set(HAZARD_KINDS)


def test_the_readme_links_to_the_page():
    assert "(docs/checks.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
