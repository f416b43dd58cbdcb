"""GPU tests are skipped, with the reason, where there is no device of an architecture that fa4gen generates for."""

from __future__ import annotations

import pytest

from fa4gen.codegen.backends import BackendUnavailable
from fa4gen.codegen.backends.cuda import device_arch
from fa4gen.codegen.config import ARCHES


def _why_no_gpu() -> str | None:
    try:
        arch = device_arch()
    except BackendUnavailable as error:
        return str(error)
    return None if arch in ARCHES else f"the GPU is {arch}; kernels are generated for {', '.join(ARCHES)}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    if reason := _why_no_gpu():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))
