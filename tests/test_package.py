"""The wheel holds the package and nothing else, and works away from the repository; the sdist holds the whole project."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import fa4gen
from fa4gen.codegen.config import shipped_configs

ROOT = Path(fa4gen.__file__).resolve().parent
NOT_SOURCE = shutil.ignore_patterns(
    ".git", ".venv", ".typing", "build", "dist", "*.egg-info", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"
)

if not (ROOT / "pyproject.toml").is_file():
    pytest.skip("not a checkout", allow_module_level=True)


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A wheel and an sdist, built from a copy so that the checkout stays clean."""
    place = tmp_path_factory.mktemp("package")
    source = place / "source"
    shutil.copytree(ROOT, source, ignore=NOT_SOURCE)
    code = "from setuptools import build_meta; import sys; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
    found = {}
    for kind, function in (("sdist", "build_sdist"), ("wheel", "build_wheel")):
        result = subprocess.run([sys.executable, "-c", code, function, str(place)], cwd=source, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        found[kind] = place / result.stdout.splitlines()[-1]
    return found


@pytest.fixture(scope="module")
def wheel_names(archives: dict[str, Path]) -> set[str]:
    with zipfile.ZipFile(archives["wheel"]) as wheel:
        return set(wheel.namelist())


def files_below(folder: str, *patterns: str) -> set[str]:
    return {str(path.relative_to(ROOT)) for pattern in patterns for path in (ROOT / folder).rglob(pattern)}


def test_wheel_is_the_package_and_its_metadata(wheel_names: set[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_names}
    assert tops == {"fa4gen", f"fa4gen-{fa4gen.__version__}.dist-info"}
    folders = {name.split("/")[1] for name in wheel_names if name.startswith("fa4gen/")}
    assert folders == {"__init__.py", "cli.py", "torch_op.py", "codegen", "templates", "configs"}


def test_wheel_has_code_and_data(wheel_names: set[str]) -> None:
    expected = files_below("codegen", "*.py", "*.npz") | files_below("templates", "*.j2", "*.py") | files_below("configs", "*.yaml", "*.py")
    assert len(expected) > 50
    assert {f"fa4gen/{name}" for name in expected} <= wheel_names
    assert {f"fa4gen/configs/{name}.yaml" for name in shipped_configs()} <= wheel_names
    assert any(name.endswith("licenses/LICENSE") for name in wheel_names)


def test_sdist_has_the_project(archives: dict[str, Path]) -> None:
    with tarfile.open(archives["sdist"]) as sdist:
        names = {name.split("/", 1)[1] for name in sdist.getnames() if "/" in name}
    expected = {"pyproject.toml", "Makefile", "README.md", "LICENSE", ".ci/run", "tests/test_package.py", "configs/d512.yaml"}
    expected |= {str(path.relative_to(ROOT)) for path in (ROOT / "generated").rglob("*") if path.is_file()}
    expected |= files_below("tests", "*.py", "*.npz") | files_below("templates", "*.j2")
    assert expected <= names


def test_wheel_works_outside_the_repository(archives: dict[str, Path], tmp_path: Path) -> None:
    site, place = tmp_path / "site", tmp_path / "place"
    place.mkdir()
    with zipfile.ZipFile(archives["wheel"]) as wheel:
        wheel.extractall(site)
    environment = os.environ | {"PYTHONPATH": str(site)}

    def output(*command: str) -> str:
        result = subprocess.run([sys.executable, *command], cwd=place, env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        return result.stdout

    assert output("-c", "import fa4gen; print(fa4gen.__file__)").startswith(str(site))
    assert '"ov_depth"' in output("-m", "fa4gen.cli", "schema")
    assert "d512" in output("-m", "fa4gen.cli", "list")
    output("-m", "fa4gen.cli", "emit", "--config", "d64.yaml")
    assert (place / "generated/d64/sm_100a/unit.ptx").is_file()
    assert output("-m", "fa4gen.cli", "check", "--config", "d64") == ""
    assert "unit_combine" in output("-m", "fa4gen.cli", "run", "--config", "d64.yaml", "--arch", "sm_90a", "--backend", "emulator")
