"""A fixture that turns the body of a kernel into a program, so that a test shows only the instructions it is about."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fa4gen.codegen.emulator import Program

_FRAME = """.version 8.8
.target {target}
.address_size 64
{module}
.visible .entry k({params})
{{
    .reg .pred %p<32>; .reg .b16 %h<32>; .reg .b32 %r<256>; .reg .b64 %rd<64>; .reg .f32 %f<256>; .reg .f64 %d<32>;
    .reg .b32 %tid, %lane, %warp;
    {shared}
    mov.u32 %tid, %tid.x;
    mov.u32 %lane, %laneid;
    shr.u32 %warp, %tid, 5;
    {loads}
{body}
}}
"""

Assemble = Callable[..., Program]


@pytest.fixture
def assemble() -> Assemble:
    """assemble(body, params="a b", shared=..., module=...): entry `k`; 64-bit pointer parameter number i is in %rd{60+i} (at most 4).

    %tid, %lane and %warp hold what they say. A body line ending in `// NAME` can be found with line_of.
    """

    def make(body: str, params: str = "", shared: str = "", module: str = "", target: str = "sm_90a") -> Program:
        names = params.split()
        text = _FRAME.format(
            target=target,
            module=module,
            params=", ".join(f".param .u64 {n}" for n in names),
            shared=shared,
            loads="\n    ".join(f"ld.param.u64 %rd{60 + i}, [{n}];" for i, n in enumerate(names)),
            body=body,
        )
        program = Program.from_ptx(text)
        program.text = text  # type: ignore[attr-defined]
        return program

    return make


@pytest.fixture
def line_of() -> Callable[[Program, str], int]:
    """Line number of the PTX line that carries the comment `// NAME`."""

    def find(program: Program, name: str) -> int:
        lines = program.text.split("\n")  # type: ignore[attr-defined]
        found = [i + 1 for i, line in enumerate(lines) if line.rstrip().endswith(f"// {name}")]
        assert len(found) == 1, f"{name} marks {len(found)} lines"
        return found[0]

    return find
