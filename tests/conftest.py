"""GPU tests are skipped, with the reason, where there is no device of an architecture that fa4gen generates for."""

from __future__ import annotations

from typing import Any

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


def _summed(terminalreporter: Any, name: str) -> dict[str, list[float]]:
    """The figures of a property, (kernel, figure, ...) of each test, summed up by kernel."""
    totals: dict[str, list[float]] = {}
    for report in (*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")):
        for key, value in report.user_properties:
            if key == name:
                sums = totals.setdefault(value[0], [0] * (len(value) - 1))
                sums[:] = (a + b for a, b in zip(sums, value[1:], strict=True))
    return totals


def _mutants(terminalreporter: Any) -> None:
    totals = _summed(terminalreporter, "mutants")
    if totals:
        terminalreporter.section("mutants of every site: found under the default seed, later, not at all, equivalent")
        for kernel, figures in sorted(totals.items()):
            terminalreporter.write_line(f"{kernel:40}" + "".join(f"{figure:8,.0f}" for figure in figures))
        terminalreporter.write_line(f"{'all':40}" + "".join(f"{sum(column):8,.0f}" for column in zip(*totals.values(), strict=True)))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What a sweep ran (the property "sweep": kernel, launches, warp instructions, seconds), kernel by kernel, and the mutants it found."""
    _mutants(terminalreporter)
    totals = _summed(terminalreporter, "sweep")
    launches = sum(sums[0] for sums in totals.values())
    if launches <= len(totals) * 4:
        return
    terminalreporter.section("launches without a finding")
    for kernel, (count, instructions, seconds) in sorted(totals.items()):
        figures = f"{count:6,.0f} launches {instructions / 1e6:8.1f} M warp instructions {seconds / 60:6.1f} min"
        terminalreporter.write_line(f"{kernel:40} {figures}")
    minutes = sum(sums[2] for sums in totals.values()) / 60
    terminalreporter.write_line(f"{launches:,.0f} launches of {len(totals)} kernels in {minutes:.0f} core minutes, no finding")
