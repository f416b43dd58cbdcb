"""Kernels under mutation: the stored PTX of an entry, small launches that reach all of it, and how a run is judged."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np

from fa4gen.codegen import attention, reference, units
from fa4gen.codegen.attention import attention_launch
from fa4gen.codegen.backends import Launch
from fa4gen.codegen.config import load_config
from fa4gen.codegen.emulator import Memory, Program, PtxError, TensorMap
from fa4gen.codegen.geometry import derive

from .rules import RULES, WRONG_DATA, Edit, Listing

GENERATED = Path(__file__).parents[2] / "generated"
BUDGET = 4
"""A run that takes this many times the instructions of the unchanged kernel, and then some, does not end."""


@dataclass(frozen=True)
class Trial:
    """One launch and the judgement of its results."""

    launch: Launch
    right: Callable[[], bool]


@dataclass(frozen=True)
class Subject:
    """One entry of one generated PTX file, and makers of launches that together execute all of it."""

    config: str
    arch: str
    entry: str
    file: str
    trials: tuple[Callable[[], Trial], ...]
    without: str = "$^"
    """Pattern of rules that do not apply to this kernel."""

    @property
    def name(self) -> str:
        what = "attention" if self.file == "attention.ptx" else self.entry.removeprefix("unit_")
        return f"{self.config}-{self.arch}-{what}"

    @cached_property
    def listing(self) -> Listing:
        return Listing((GENERATED / self.config / self.arch / self.file).read_text(encoding="utf-8"), self.entry)

    @cached_property
    def text(self) -> str:
        """The unchanged PTX of the entry."""
        return "\n".join(self.listing.lines)

    @cached_property
    def baseline(self) -> list[tuple[int, set[int]]]:
        """(instructions, PTX lines executed) of each trial of the unchanged kernel."""
        result = []
        for make in self.trials:
            program = Program.from_ptx(self.text)
            decoded = program._decode(self.entry)
            seen: set[int] = set()
            for steps in (decoded.full, decoded.masked):
                for index, step in enumerate(steps):
                    steps[index] = _noting(step, seen, decoded.lines[index])
            launch = make().launch
            outcome = program.launch(
                launch.entry, launch.grid, launch.block, launch.smem_bytes, launch.args, memory=Memory(), check=False,
                cluster=(getattr(launch, "cluster", 1), 1, 1),
            )  # fmt: skip
            result.append((outcome.instructions, seen))
        return result

    def mutants(self) -> Iterator[Mutant]:
        """Every edit of every rule, and of the rules about tensor maps."""
        for rule in RULES:
            if re.search(self.without, rule.name) or (rule.plain and self.file != "unit.ptx"):
                continue
            for number, edit in enumerate(rule.edits(self.listing)):
                yield Mutant(self, rule.name, number, rule.kinds, edit, None, rule.plain)
        maps = [i for i, a in enumerate(self.trials[0]().launch.args) if isinstance(a, TensorMap) and a.swizzle]
        for number, place in enumerate(maps):
            yield Mutant(self, "tensor map without swizzle", number, WRONG_DATA, Edit(self.listing.start, {}), place)


def _noting(step: Any, seen: set[int], line: int) -> Any:
    def noted(w: Any, r: Any) -> Any:
        seen.add(line)
        return step(w, r)

    return noted


@dataclass(frozen=True)
class Mutant:
    subject: Subject
    rule: str
    number: int
    kinds: tuple[str, ...]
    edit: Edit
    tensor_map: int | None
    """The argument whose tensor map loses its swizzle."""
    plain: bool = False

    @property
    def name(self) -> str:
        return f"{self.subject.name}: {self.rule} #{self.number}"

    @cached_property
    def trials(self) -> tuple[int, ...]:
        """The trials that execute a changed line."""
        if self.tensor_map is not None:
            return (0,)
        lines = {index + 1 for index in self.edit.lines}
        # An edit of a label's line shows on the instruction after it, and so does one of a line that holds no instruction.
        return tuple(i for i, (_, seen) in enumerate(self.subject.baseline) if lines & seen)

    @cached_property
    def program(self) -> Program | str:
        """The decoded mutant, or why it is refused."""
        try:
            return Program.from_ptx(self.subject.listing.apply(self.edit))
        except PtxError as error:
            return str(error)

    def run(self, seed: int, **options: Any) -> set[str]:
        """What the launches find, up to the first that finds the mutant: hazard kinds, "value", "deadlock", "refused"."""
        program = self.program
        if isinstance(program, str):
            return {"refused"}
        found: set[str] = set()
        for place in self.trials:
            found |= execute(program, self.subject.trials[place](), self.subject.baseline[place][0], seed, self.tensor_map, **options)
            if found & set(self.kinds):
                break
        return found


def execute(program: Program, trial: Trial, instructions: int, seed: int, tensor_map: int | None = None, **options: Any) -> set[str]:
    launch = trial.launch
    args = list(launch.args)
    if tensor_map is not None:
        args[tensor_map] = dataclasses.replace(args[tensor_map], swizzle=0)
    budget = BUDGET * instructions + (1 << 15)
    try:
        result = program.launch(
            launch.entry, launch.grid, launch.block, launch.smem_bytes, args, memory=Memory(), seed=seed, budget=budget,
            cluster=(getattr(launch, "cluster", 1), 1, 1), **options,
        )  # fmt: skip
    except PtxError as error:
        return {"deadlock" if "its budget is" in str(error) else "refused", *(hazard.kind for hazard in error.hazards)}
    found = {hazard.kind for hazard in result.hazards}
    with np.errstate(all="ignore"):
        return found if trial.right() else found | {"value"}


# --- unit kernels -----------------------------------------------------------------------------------------------------


def _unit(config_name: str, arch: str, entry: str, make: Callable[[Any, Any], units.Case]) -> Subject:
    config = load_config(config_name)
    geo = derive(config, arch)

    def trial() -> Trial:
        case = make(config, geo)
        return Trial(case.launch, lambda: case.judge().ok)

    return Subject(config_name, arch, entry, "unit.ptx", (trial,))


def _units(arch: str) -> Iterator[Subject]:
    for entry in ("unit_exchange4_max", "unit_exchange4_add", "unit_exchange4_loop", "unit_level0"):
        yield unit("d512", arch, entry)
    yield unit("d64", arch, "unit_combine")


# --- attention --------------------------------------------------------------------------------------------------------


def unit(config_name: str, arch: str, entry: str) -> Subject:
    """A unit kernel by the name of its entry."""
    makers: dict[str, Callable[[Any, Any], units.Case]] = {
        "unit_exchange4_max": lambda c, g: units.exchange_case(c, g, "max"),
        "unit_exchange4_add": lambda c, g: units.exchange_case(c, g, "add"),
        "unit_exchange4_loop": lambda c, g: units.exchange_case(c, g, "loop"),
        "unit_level0": units.level0_case,
        "unit_combine": units.combine_case,
    }
    return _unit(config_name, arch, entry, makers[entry])


def attention_subject(config_name: str, arch: str, *shapes: dict[str, Any], without: str = "$^") -> Subject:
    config = load_config(config_name)
    geo = derive(config, arch)
    trials = tuple(lambda shape=shape: _attention_trial(config, geo, **shape) for shape in shapes)
    return Subject(config_name, arch, trials[0]().launch.entry, "attention.ptx", trials, without)


@cache
def _problem(depth: int, keys: int, q_len: int, group: int, batch: int, growth: float) -> tuple[Any, ...]:
    """(q, k, v, expected output, expected LSE); growth is a factor of the scores' spread."""
    rng = np.random.Generator(np.random.PCG64(keys))
    dtype = np.dtype(ml_dtypes.bfloat16)
    q = (rng.standard_normal((batch, q_len, group, depth), np.float32) * growth).astype(dtype)
    k, v = (rng.standard_normal((batch, keys, 1, depth), np.float32).astype(dtype) for _ in range(2))
    return q, k, v, *reference.attention(q, k, v, scale=depth**-0.5, causal=False)


def _attention_trial(
    config: Any,
    geo: Any,
    *,
    keys: int,
    q_len: int = 1,
    group: int = 20,
    batch: int = 1,
    growth: float = 1.0,
    clusters: bool = True,
    **options: Any,
) -> Trial:
    """clusters: whether partitions may merge in clusters; else the last CTA merges them, as where several clusters would not pay."""
    q, k, v, expected, expected_lse = _problem(config.ov_depth, keys, q_len, group, batch, growth)
    out = np.full(q.shape, np.nan, np.float32).astype(q.dtype)
    lse = np.full(expected_lse.shape, np.nan, np.float32)
    one_cta = nullcontext() if clusters else mock.patch.object(attention, "cluster_size", return_value=1)
    with one_cta:
        launch = attention_launch(config, geo, q, k, v, out, lse, **options)

    def right() -> bool:
        error = np.linalg.norm(out.astype(np.float64) - expected)
        return bool(error <= 4e-3 * np.linalg.norm(expected) and (np.abs(lse - expected_lse) <= 1e-3).all())

    return Trial(launch, right)


SM90: tuple[dict[str, Any], ...] = (
    # Twice as many items as Q has slots in one CTA, so that everything is reused; then the keys cut into partitions, which several clusters
    # take side by side, or two CTAs.
    {"keys": 140, "batch": 4, "ctas": 1, "group": 32},
    {"keys": 300, "partition_keys": 64, "ctas": 10},
    {"keys": 300, "partition_keys": 64, "ctas": 2, "clusters": False},
)
SM90_KEY_SPLIT: tuple[dict[str, Any], ...] = (
    # Rings of each part that wrap, two items in one CTA; then partitions and their merge.
    {"keys": 1100, "batch": 3, "ctas": 1, "group": 32},
    {"keys": 700, "partition_keys": 64, "ctas": 2, "batch": 2},
)
_SM100: tuple[dict[str, Any], ...] = (
    {"keys": 1300, "group": 32}, {"keys": 600, "partition_keys": 256}, {"keys": 700, "growth": 20.0}, {"keys": 9},
)  # fmt: skip


@cache
def subjects() -> tuple[Subject, ...]:
    return (
        *_units("sm_90a"),
        *_units("sm_100a"),
        # A key tile of d256 takes 4 of its ring's 10 slots, one of d512 all 8: most of their ring steps never wrap.
        attention_subject(
            "d256",
            "sm_90a",
            SM90[0],
            {"keys": 640, "partition_keys": 64, "ctas": 10},
            {"keys": 512, "partition_keys": 64, "ctas": 2, "clusters": False},
            without="^ring one slot|^parity kept",
        ),
        attention_subject("d512", "sm_90a", *SM90),
        # Two CTAs an SM. Tiles of 8 rows, whose O waits where Q was: of 16 items in a CTA most are stored early, each buffer once first in
        # line. So many partitions that a merge by one CTA goes around the ring, and around Q's buffers.
        attention_subject(
            "d128_sk",
            "sm_90a",
            {"keys": 70, "batch": 32, "ctas": 1, "group": 8},
            {"keys": 300, "partition_keys": 64, "ctas": 5, "group": 8},
            {"keys": 1100, "partition_keys": 64, "ctas": 1, "group": 8, "clusters": False},
        ),
        attention_subject("d128", "sm_90a", *SM90_KEY_SPLIT),
        # Every ring wraps; partitions; scores that grow, so that O is rescaled; work for one of the two warpgroups only.
        # K and V of d64 take turns in an even ring: V never has its last slot.
        attention_subject("d64", "sm_100a", *_SM100, without="^ring one slot|^parity kept"),
        attention_subject("d128", "sm_100a", *_SM100),
        attention_subject("d256", "sm_100a", *_SM100),
        attention_subject("d512", "sm_100a", *_SM100),
    )
