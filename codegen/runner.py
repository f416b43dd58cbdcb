"""`fa4gen run`: every unit kernel and the full kernel of a config, on the GPU or the emulator, against the references and goldens."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from . import compiler, golden, render, units
from .backends import Backend, BackendError, BackendUnavailable, Compiled, Launch, Outcome
from .config import Config, load_config
from .feature_inputs import feature_inputs
from .files import check_writable, npz, write_whole
from .geometry import Geometry, derive
from .inputs import InputError, read_qkv
from .progress import emulation_progress

if TYPE_CHECKING:
    from rich.console import Console

    from .emulator import Hazard

DEFAULT_SHAPE = {"batch": 1, "q_len": 4, "keys": 1024, "heads": 8, "kv_heads": 1}
OUT_BOUND = 4e-3  # ||out - ref|| / ||ref||; libraries' bfloat16 kernels are at 1.6e-3 to 3.2e-3
LSE_BOUND = 2e-3  # plus 2^-20 |LSE|
MAX_ELEMENTS = 1 << 30  # of q, k and v together: a float64 reference of more would not fit most machines
TABLE_WIDTH = 200  # more than a row of the table needs
# Distance of the full kernel from its golden. The GPU's tensor cores truncate where the emulator rounds, so P and O differ in last places.
GOLDEN_DISTANCE = 2e-3


class RunError(Exception):
    """The run cannot start; the message is one line."""


@dataclass(frozen=True)
class RunOptions:
    """What `fa4gen run` was asked for; a shape of None is the default (DEFAULT_SHAPE), or the input file's."""

    config: str | Path
    backend: str = "auto"
    arch: str | None = None
    batch: int | None = None
    q_len: int | None = None
    keys: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    seed: int = 0
    input_path: Path | None = None
    save_path: Path | None = None
    update_golden: bool = False
    as_json: bool = False

    def shape_options(self) -> dict[str, int]:
        """The shape options that were given."""
        return {name: value for name in DEFAULT_SHAPE if (value := getattr(self, name)) is not None}


@dataclass(frozen=True)
class Row:
    """One line of the table. golden: "match", "DIFFERS", "MISSING" (a checkout without it), or why there is nothing to compare."""

    arch: str
    kernel: str
    backend: str
    shape: str
    verdict: units.Verdict | None
    golden: str
    hazards: int | None
    seconds: float | None

    @property
    def failed(self) -> bool:
        return self.verdict is not None and (not self.verdict.ok or bool(self.hazards) or self.golden in ("DIFFERS", "MISSING"))


# --- what runs where --------------------------------------------------------------------------------------------------


def choose_backends(asked: str, arches: tuple[str, ...]) -> tuple[dict[str, Backend], list[str]]:
    """A backend for each architecture, and a line on each choice saying which and why.

    Raises RunError where the GPU was asked for and there is none of the architecture.
    """
    from .backends.emulator import EmulatorBackend

    emulator = EmulatorBackend()
    if asked == "emulator":
        return dict.fromkeys(arches, emulator), ["emulator: asked for"]
    try:
        from .backends.cuda import CudaBackend

        gpu = CudaBackend()
    except BackendUnavailable as error:
        if asked == "cuda":
            raise RunError(f"--backend cuda: {error}") from error
        return dict.fromkeys(arches, emulator), [f"emulator: {error}"]
    chosen: dict[str, Backend] = {}
    notes = []
    for arch in arches:
        if arch == gpu.arch:
            chosen[arch] = gpu
            notes.append(f"{arch}: {gpu.device_name}")
        elif asked == "auto":
            chosen[arch] = emulator
            notes.append(f"{arch}: emulator, the GPU ({gpu.device_name}) is {gpu.arch}")
        else:
            notes.append(f"{arch}: not run, the GPU ({gpu.device_name}) is {gpu.arch}")
    if not chosen:
        raise RunError(f"--backend cuda: the GPU ({gpu.device_name}) is {gpu.arch}, asked for {', '.join(arches)}")
    return chosen, notes


def compiled_sources(config: Config, arch: str) -> dict[str, Compiled]:
    """unit.cu and, where it is generated, attention.cu: compiled, or the stored PTX of the same sources where NVRTC cannot be had."""
    sources = {name: text for name, text in render.render(config, arch).items() if name.endswith(".cu")}
    if compiler.nvrtc_version() is not None:
        modules = {name: compiler.compile_source(text, arch, name) for name, text in sources.items()}
        return {name: Compiled(arch, module.ptx, module.cubin, sources[name], name) for name, module in modules.items()}
    stored = Path(__file__).resolve().parent.parent / "generated" / config.name / arch
    compiled = {}
    for name, text in sources.items():
        ptx = stored / name.replace(".cu", ".ptx")
        if not ptx.is_file() or (stored / name).read_text() != text:
            raise RunError(f"NVRTC is not installed and no stored PTX matches {name} of {config.name} on {arch}")
        compiled[name] = Compiled(arch, ptx.read_text())
    return compiled


# --- the full kernel --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionProblem:
    """q, k, v in the config's dtype, what they are called in the table, and whether they are the golden's."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    is_golden: bool

    @property
    def shape(self) -> str:
        batch, q_len, heads, _ = self.q.shape
        return f"b{batch} q{q_len} h{heads}/{self.k.shape[2]} k{self.k.shape[1]}"


def attention_problem(config: Config, options: RunOptions) -> AttentionProblem:
    """The user's q, k, v, or the golden generator's for the shapes asked for. Raises RunError, InputError."""
    dtype = units.DTYPES[config.dtype]
    given = options.shape_options()
    if options.input_path is not None:
        if given:
            raise RunError(f"--input gives the shapes; --{next(iter(given)).replace('_', '-')} cannot be given beside it")
        q, k, v = read_qkv(options.input_path, depth=config.ov_depth, dtype=dtype)
        problem = AttentionProblem(q, k, v, False)
    else:
        shape = DEFAULT_SHAPE | ({"heads": config.group * given.get("kv_heads", 1)} if config.group else {}) | given
        for name, value in shape.items():
            if value < 1:
                raise RunError(f"--{name.replace('_', '-')} {value}: expected at least 1")
        heads = shape["q_len"] * shape["heads"] + 2 * shape["keys"] * shape["kv_heads"]
        if (elements := shape["batch"] * heads * config.ov_depth) > MAX_ELEMENTS:
            raise RunError(f"q, k and v have {elements:,} elements; run makes at most {MAX_ELEMENTS:,}")
        if shape["heads"] % shape["kv_heads"]:
            raise RunError(f"--heads {shape['heads']} is not a multiple of --kv-heads {shape['kv_heads']}")
        q, k, v = golden.attention_input(
            options.seed,
            batch=shape["batch"],
            q_len=shape["q_len"],
            q_heads=shape["heads"],
            kv_heads=shape["kv_heads"],
            keys=shape["keys"],
            depth=config.ov_depth,
            dtype=dtype,
        )
        problem = AttentionProblem(q, k, v, options.seed == 0 and not given)
    group = problem.q.shape[2] // problem.k.shape[2]
    if config.group is not None and group != config.group:
        raise RunError(f"{config.name} is for {config.group} query heads per KV head, the input has {group}")
    return problem


def judge_attention(
    out: np.ndarray, lse: np.ndarray, expected_out: np.ndarray, expected_lse: np.ndarray
) -> tuple[units.Verdict, units.Verdict]:
    """Verdicts on O (relative Frobenius norm) and on LSE (worst element).

    NaN never passes; rows without a key must be exactly 0 and -inf.
    """
    ours = out.astype(np.float64)
    distance = float(np.linalg.norm(ours - expected_out))
    norm = float(np.linalg.norm(expected_out))
    error = distance / norm if norm else distance
    empty = np.isneginf(expected_lse).transpose(0, 2, 1)
    out_ok = error <= OUT_BOUND and not (ours[empty] != 0).any()
    lse_bound = LSE_BOUND + 2.0**-20 * np.where(np.isfinite(expected_lse), np.abs(expected_lse), 0.0)
    out_verdict = units.Verdict(error if math.isfinite(error) else float("inf"), OUT_BOUND, bool(out_ok))
    return out_verdict, units.worst(lse, expected_lse, lse_bound)


# --- the run ----------------------------------------------------------------------------------------------------------


def _golden_state(config: Config, arch: str, kernel: str, matches: Callable[[Mapping[str, np.ndarray]], bool], comparable: bool) -> str:
    if not comparable:
        return "-"
    stored = golden.load(config.name, arch, kernel)
    if stored is None:
        return "-" if golden.golden_folder() is None else "MISSING"
    return "match" if matches(stored) else "DIFFERS"


def _is_shipped(config: Config) -> bool:
    """Whether `config` is the shipped one of its name: goldens are those of the shipped configs."""
    from .config import shipped_configs

    return config.name in shipped_configs() and load_config(config.name) == config


class _Run:
    def __init__(self, config: Config, options: RunOptions, progress: Callable[[str], Callable[[int], None]]) -> None:
        self.config = config
        self.options = options
        self.progress = progress
        self.shipped = _is_shipped(config)
        self.rows: list[Row] = []
        self.saved: dict[str, np.ndarray] = {}
        self.hazards: list[tuple[str, Hazard]] = []

    def _execute(self, backend: Backend, compiled: Compiled, case_launch: Launch) -> Outcome:
        outcome = backend.run(compiled, case_launch, progress=self.progress(f"{compiled.arch} {case_launch.entry}"))
        for hazard in outcome.hazards or []:
            self.hazards.append((f"{compiled.arch} {case_launch.entry}", hazard))
        return outcome

    def unit(self, arch: str, geo: Geometry, backend: Backend, compiled: Compiled) -> None:
        for case in units.cases(self.config, geo, seed=self.options.seed):
            outcome = self._execute(backend, compiled, case.launch)
            verdict = case.judge()
            comparable = self.shipped and self.options.seed == 0
            if self.options.update_golden and comparable and verdict.ok and not outcome.hazards:
                golden.store(self.config.name, arch, case.entry, case.outputs)
            state = _golden_state(self.config, arch, case.entry, partial(golden.equal_bits, case.outputs), comparable)
            hazards = None if outcome.hazards is None else len(outcome.hazards)
            self.rows.append(Row(arch, case.entry, backend.name, case.shape, verdict, state, hazards, outcome.seconds))
            self.saved |= {f"{arch}/{case.entry}/{name}": array for name, array in case.outputs.items()}

    def attention(self, arch: str, geo: Geometry, backend: Backend, compiled: Compiled, problem: AttentionProblem) -> None:
        from .attention import attention_launch

        config = self.config
        scale = 1.0 / math.sqrt(config.ov_depth)
        inputs = feature_inputs(config, problem.q, problem.k, problem.v)
        launch = attention_launch(config, geo, inputs.q, inputs.k, inputs.v, inputs.out, inputs.lse, scale=scale, **inputs.arrays)
        outcome = self._execute(backend, compiled, launch)
        out, lse = inputs.plain_out, inputs.plain_lse
        verdicts = judge_attention(out, lse, *inputs.expected(scale))
        comparable = self.shipped and problem.is_golden
        outputs = {"out": out, "lse": lse}
        if self.options.update_golden and comparable and all(v.ok for v in verdicts) and not outcome.hazards:
            golden.store(config.name, arch, "attention", outputs)
        hazards = None if outcome.hazards is None else len(outcome.hazards)
        for (name, array), verdict in zip(outputs.items(), verdicts, strict=True):

            def near(stored: Mapping[str, np.ndarray], name: str = name, array: np.ndarray = array) -> bool:
                return name in stored and golden.relative_distance(array, stored[name]) <= GOLDEN_DISTANCE

            state = _golden_state(config, arch, "attention", near, comparable)
            self.rows.append(Row(arch, f"attention {name}", backend.name, problem.shape, verdict, state, hazards, outcome.seconds))
            self.saved |= {f"{arch}/attention/{name}": array}
            self.saved.setdefault(name, array)


def run(options: RunOptions, console: Console | None = None, errors: Console | None = None) -> int:
    """Run and print one row per kernel; returns the exit code: 1 if anything is out of bounds, off its golden, or hazardous.

    Raises ConfigError, CompileError, RenderError, InputError, BackendError or RunError, each with a one-line message, before anything is
    printed or saved.
    """
    from rich.console import Console

    console = console or Console()
    errors = errors or Console(stderr=True)
    config = load_config(options.config)
    arches: tuple[str, ...] = (options.arch,) if options.arch else config.arch
    geometries = {arch: derive(config, arch) for arch in arches}
    if options.update_golden:
        if not _is_shipped(config):
            raise RunError(f"{config.name} is not a shipped config: it has no goldens")
        if options.seed or options.input_path or options.shape_options():
            raise RunError("--update-golden stores the outputs of the default input: leave --seed, --input and the shapes out")
    if options.save_path is not None:
        try:
            check_writable(options.save_path)
        except OSError as error:
            raise RunError(f"{options.save_path}: {error.strerror}") from error
    problem = attention_problem(config, options)
    backends, notes = choose_backends(options.backend, arches)
    for note in notes:
        errors.print(note, highlight=False, markup=False, soft_wrap=True)
    with emulation_progress(errors) as progress:
        state = _Run(config, options, progress)
        for arch, backend in backends.items():
            compiled = compiled_sources(config, arch)
            state.unit(arch, geometries[arch], backend, compiled["unit.cu"])
            if "attention.cu" in compiled:
                state.attention(arch, geometries[arch], backend, compiled["attention.cu"], problem)
            else:
                state.rows.append(Row(arch, "attention", "-", "-", None, "not generated yet", None, None))
    if options.save_path is not None:
        _save(options.save_path, state.saved)
    if options.as_json:
        console.file.write(json.dumps(_as_json(config, state)) + "\n")
    else:
        _print_table(console, config, state.rows)
    for kernel, hazard in () if options.as_json else state.hazards:
        errors.print(f"{kernel}: {hazard.report()}", highlight=False, markup=False, soft_wrap=True)
    return 1 if any(row.failed for row in state.rows) else 0


def _save(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Outputs as .npz, bfloat16 widened to float32 (numpy's format has no name for it); the file appears whole or not at all."""
    widened: dict[str, Any] = {
        name: array.astype(np.float32) if array.dtype == units.DTYPES["bfloat16"] else array for name, array in arrays.items()
    }
    try:
        write_whole(path, npz(widened))
    except OSError as error:
        raise RunError(f"{path}: {error.strerror or error}") from error


def _as_json(config: Config, state: _Run) -> dict[str, Any]:
    """The rows and the findings as plain values; an error that is not finite is null."""
    rows = []
    for row in state.rows:
        values = {key: value for key, value in vars(row).items() if key != "verdict"}
        verdict = row.verdict
        error = verdict.error if verdict is not None and math.isfinite(verdict.error) else None
        rows.append(values | {"error": error, "bound": verdict and verdict.bound, "failed": row.failed})
    return {"config": config.name, "rows": rows, "hazards": [{"kernel": kernel} | hazard.as_json() for kernel, hazard in state.hazards]}


def _print_table(console: Console, config: Config, rows: list[Row]) -> None:
    from rich.console import Console as WideConsole
    from rich.table import Table
    from rich.text import Text

    types = f"{config.dtype} -> {config.out_dtype}"
    title = f"{config.name}: depth {config.ov_depth}, m_pack {config.m_pack}, {types}, mask {config.mask}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for header in ("kernel", "backend", "shape"):
        table.add_column(header, no_wrap=True)
    for header in ("error", "bound", "golden", "hazards", "time"):
        table.add_column(header, justify="right", no_wrap=True)
    for index, row in enumerate(rows):
        if not index or rows[index - 1].arch != row.arch:
            table.add_row(Text(row.arch, style="bold"))
        numbers = ("-", "-") if row.verdict is None else (f"{row.verdict.error:.2e}", f"{row.verdict.bound:.2e}")
        hazards = "-" if row.hazards is None else str(row.hazards)
        seconds = "-" if row.seconds is None else f"{row.seconds * 1e6:.1f} us" if row.backend == "cuda" else f"{row.seconds:.2f} s"
        cells = (f"  {row.kernel}", row.backend, row.shape, *numbers, row.golden, hazards, seconds)
        table.add_row(*(Text(cell) for cell in cells), style="red" if row.failed else None)
    # A row is never folded or cut, whatever the width of the terminal, the pipe or the file.
    natural = console.measure(table, options=console.options.update(width=TABLE_WIDTH)).maximum
    WideConsole(file=console.file, width=max(console.width, natural), force_terminal=console.is_terminal).print(table)


__all__ = ["BackendError", "InputError", "RunError", "RunOptions", "run"]
