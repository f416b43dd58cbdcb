"""The emulator as a backend: any architecture, no GPU, every hazard check on unless told otherwise."""

from __future__ import annotations

import time
from collections.abc import Callable

from .. import compiler
from ..emulator import Hazard, LaunchError, Memory, Program, PtxError
from ..emulator.program import source_lines
from . import BackendError, Compiled, Launch, Outcome


class EmulatorBackend:
    name = "emulator"

    def __init__(self, *, seed: int = 0, check: bool = True) -> None:
        self.seed = seed
        self.check = check
        self._programs: dict[str, Program] = {}

    def run(self, compiled: Compiled, launch: Launch, *, progress: Callable[[int], None] | None = None) -> Outcome:
        try:
            program = self._programs.get(compiled.ptx)
            if program is None:
                program = self._programs[compiled.ptx] = Program.from_ptx(compiled.ptx)
            start = time.perf_counter()
            result = program.launch(
                launch.entry,
                grid=launch.grid,
                block=launch.block,
                smem=launch.smem_bytes,
                args=list(launch.args),
                memory=Memory(),
                seed=self.seed,
                check=self.check,
                progress=progress,
                cluster=(launch.cluster, 1, 1),
                regions=launch.regions,
            )
        except (PtxError, LaunchError) as error:
            found = located(error.hazards, program, compiled, launch.entry) if isinstance(error, PtxError) and program else []
            raise BackendError(f"{launch.entry}: {error}", found) from error
        seconds = time.perf_counter() - start
        return Outcome(seconds, located(result.hazards, program, compiled, launch.entry), result.instructions)


def located(hazards: list[Hazard], program: Program, compiled: Compiled, entry: str) -> list[Hazard]:
    """The findings with the lines of the CUDA source that their PTX lines come from, where the source and a compiler are at hand.

    Stored PTX has no line information. The source compiled with it gives the same instructions, one for one: they tell the lines.
    """
    if not hazards or not compiled.source or compiler.nvrtc_version() is None:
        return hazards
    try:
        lined = Program.from_ptx(compiler.compile_source(compiled.source, compiled.arch, compiled.file_name, line_info=True).ptx)
    except (compiler.CompileError, PtxError):
        return hazards
    lines = source_lines(program, lined, entry)
    return [hazard.at_sources(lines) for hazard in hazards]
