"""The sm_100a attention kernels over their whole matrix on the emulator, in as many processes as there are cores to spare.

    python tests/sweep_sm100a.py --log sweep.jsonl --summary summary.json --processes 32 --minutes 10

Six configs, both use_fma, no mask and causal, groups of 1, 6 and 8, 1 and 3 partitions, keys from 1 to 2,100 with every edge of the key
tile and of the key chunk, 5 seeds: each run has all hazard checks on, and is compared with the float64 reference within DESIGN section 7.
It stops after --minutes, and goes on where the log and the summary end: a case that is clean in one of them is not run again unless its PTX
has changed. First everything under one seed each, then the edges of the key tile under the others, then the rest. The summary has what was
run, case by case, and what was found; the exit status is 1 if anything was found.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import hashlib
import itertools
import json
import multiprocessing
import os
import platform
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from test_attention_sm100 import Problem, geometry, source, variant

from fa4gen.codegen import compiler, emulator, reference
from fa4gen.codegen.attention import Workspace
from fa4gen.codegen.attention_sm100 import attention_entry_info
from fa4gen.codegen.backends import Launch
from fa4gen.codegen.config import Config
from fa4gen.codegen.emulator import Memory, Program, Uninitialized
from fa4gen.codegen.files import write_whole

CONFIGS = ("d64", "d128", "d128_m2", "d256", "d256_m2", "d512")
MASKS = ("none", "causal")
PARTITIONS = (1, 3)
SEEDS = range(5)
MOST_KEYS = 2100
# Query positions of a group: a tile of 32 rows full or nearly so, and some rows that end in every key chunk.
POSITIONS = {1: 20, 6: 5, 8: 4}
# Spread of the scores: at 1 nothing is rescaled, at 8 most tiles are. Every key count meets each of them under some seed.
SPREADS = (1.0, 5.0, 3.0, 8.0, 2.0)
# DESIGN section 7.
OUT_BOUND = 4e-3
LSE_BOUND = 2e-3
KEY_TILE, KEY_CHUNK, MMA_KEYS = 256, 64, 16
PROGRESS_SECONDS = 30


class Case(NamedTuple):
    """One run; `name` says which."""

    config: str
    use_fma: bool
    mask: str
    group: int
    partitions: int
    keys: int
    seed: int

    @property
    def kernel(self) -> str:
        return f"{self.config} {'fma' if self.use_fma else 'nofma'} {self.mask}"

    @property
    def name(self) -> str:
        return f"{self.kernel} group{self.group} partitions{self.partitions} keys{self.keys} seed{self.seed}"


def around(step: int) -> set[int]:
    """The multiples of `step` and their neighbours, within the keys of the sweep."""
    return {edge + by for edge in range(0, MOST_KEYS + 1, step) for by in (-1, 0, 1) if 1 <= edge + by <= MOST_KEYS}


def key_counts() -> list[list[int]]:
    """The telling ones first: one key, the most and the edges of a key tile; those of a chunk; those of an MMA in the first chunk."""
    tile = around(KEY_TILE) | {1, MOST_KEYS}
    chunk = around(KEY_CHUNK) - tile
    mma = {keys for keys in around(MMA_KEYS) if keys <= KEY_CHUNK} - chunk - tile
    return [sorted(tile), sorted(chunk), sorted(mma)]


def cases() -> Iterator[Case]:
    """Every case once, in the order in which they are run.

    First everything under one seed each, all seeds in turn: the edges of the key tile, then the rest, few keys (which are cheap) before
    many. Then the edges of the key tile under the other seeds, then the rest. Mixed within, so that a sweep cut short has seen some of
    everything.
    """
    tile, *others = key_counts()
    rest = [keys for each in others for keys in each]
    bands = [[keys for keys in rest if low < keys <= high] for low, high in itertools.pairwise((0, 256, 512, 1024, MOST_KEYS))]
    order = [([0], tile), *(([0], band) for band in bands), (SEEDS[1:], tile), *((SEEDS[1:], band) for band in bands)]
    for turns, keys in order:
        for turn in turns:
            axes = itertools.product(CONFIGS, (True, False), MASKS, POSITIONS, PARTITIONS)
            # Every key count meets all seeds over the other axes.
            round_ = [
                Case(*launched, count, SEEDS[(place + 2 * number + turn) % len(SEEDS)])
                for number, launched in enumerate(axes)
                for place, count in enumerate(keys)
            ]
            random.Random(turn).shuffle(round_)
            yield from round_


def config_of(kernel: str) -> Config:
    name, fma, mask = kernel.split()
    return variant(name, use_fma=fma == "fma", mask=mask)


def ptx_of(kernel: str) -> tuple[str, str]:
    return kernel, compiler.compile_source(source(config_of(kernel)), "sm_100a", "attention.cu").ptx


def launch_of(case: Case, problem: Problem) -> Launch:
    """The launch of a case. Where 3 partitions of whole tiles are more than the keys fill, those left over must leave no trace."""
    if case.partitions == 1:
        return problem.launch()
    tiles = -(-case.keys // KEY_TILE)
    launch = problem.launch(partition_keys=-(-tiles // case.partitions) * KEY_TILE)
    geo = geometry(problem.config)
    names = [argument["name"] for argument in attention_entry_info(problem.config, geo)["arguments"]]
    args = dict(zip(names, launch.args, strict=True))
    items = launch.grid[0] // int(args["partitions"])
    parts = items * case.partitions
    number, partial_o, partial_lse, arrived = Workspace().next_launch(parts * geo.rows * geo.depth, parts * geo.rows, items)
    args |= {"partitions": np.uint32(case.partitions), "launch": number, "arrived": arrived}
    args |= {"partial_o": Uninitialized(partial_o), "partial_lse": Uninitialized(partial_lse)}
    return dataclasses.replace(launch, grid=(parts, 1, 1), args=tuple(args.values()))


_programs: dict[str, Program] = {}
_ptx: dict[str, str] = {}


def run(case: Case) -> dict[str, Any]:
    """Runs one case. found: kinds of hazards, "out" or "lse" beyond its bound, an exception, or nothing."""
    begin = time.perf_counter()
    if case.kernel not in _programs:
        _programs[case.kernel] = Program.from_ptx(_ptx.get(case.kernel) or ptx_of(case.kernel)[1])
    spread = SPREADS[(case.keys + case.seed) % len(SPREADS)]
    config = config_of(case.kernel)
    problem = Problem(config, keys=case.keys, q_len=POSITIONS[case.group], group=case.group, growth=spread)
    record: dict[str, Any] = {"case": case.name, "kernel": case.kernel}
    try:
        launch = launch_of(case, problem)
        result = _programs[case.kernel].launch(
            launch.entry, launch.grid, launch.block, launch.smem_bytes, launch.args, memory=Memory(), seed=case.seed
        )
    except Exception as error:  # whatever goes wrong belongs to the case, not to the sweep
        return record | {"found": f"{type(error).__name__}: {error}"}
    found = sorted({hazard.kind for hazard in result.hazards})
    expected, lse = reference.attention(problem.q, problem.k, problem.v, scale=config.ov_depth**-0.5, causal=case.mask == "causal")
    seen = np.isfinite(lse)
    ours = problem.out.astype(np.float64)
    out_error = float(np.linalg.norm(ours - expected) / np.linalg.norm(expected))
    lse_errors = np.abs(problem.lse[seen] - lse[seen])
    lse_error = float(lse_errors.max(initial=0.0))
    if not out_error <= OUT_BOUND or not (ours[~seen.transpose(0, 2, 1)] == 0).all():
        found.append("out")
    if not (lse_errors <= LSE_BOUND + 2.0**-20 * np.abs(lse[seen])).all() or not (problem.lse[~seen] == -np.inf).all():
        found.append("lse")
    return record | {
        "found": " ".join(found), "out": float(f"{out_error:.3g}"), "lse": float(f"{lse_error:.3g}"),
        "seconds": round(time.perf_counter() - begin, 2),
    }  # fmt: skip


def _begin(ptx: dict[str, str]) -> None:
    _ptx.update(ptx)


def versions() -> dict[str, str]:
    """What a result depends on besides the PTX: `emulator` is a hash of its sources."""
    (package,) = emulator.__path__
    sources = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(Path(package).glob("*.py"))))
    nvrtc = compiler.nvrtc_version() or "none"
    return {"python": platform.python_version(), "numpy": np.__version__, "nvrtc": str(nvrtc), "emulator": sources.hexdigest()[:16]}


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_log(path: Path) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """The versions of every sweep that wrote to the log, and its cases by name, the last of each. A line cut short is left out."""
    runs, records = [], {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if "case" in entry:
            records[entry["case"]] = entry
        else:
            runs.append(entry)
    return runs, records


class Earlier(NamedTuple):
    """What a summary says of runs under the PTX of today."""

    names: frozenset[str]
    """Cases that were clean."""
    rows: dict[str, dict[str, Any]]
    """Worst errors of each kernel."""
    versions: list[dict[str, str]]


def read_summary(path: Path | None, plan: Iterable[Case], hashes: dict[str, str]) -> Earlier:
    """The runs that a summary tells of; a kernel whose PTX has changed since has none. ValueError: it is no summary of this plan."""
    if path is None or not path.exists():
        return Earlier(frozenset(), {}, [])
    try:
        told = json.loads(path.read_text())
        rows = {name: row for name, row in told["kernels"].items() if row["ptx"] == hashes.get(name)}
        names: set[str] = set()
        for kernel, cases_ in by_kernel(plan).items():
            if kernel in rows:
                bits = np.unpackbits(np.frombuffer(base64.b64decode(rows[kernel]["done"]), np.uint8), count=len(cases_))
                names.update(case.name for case, bit in zip(cases_, bits, strict=True) if bit)
        return Earlier(frozenset(names), rows, told["versions"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no summary of this sweep: {error}") from error


def by_kernel(plan: Iterable[Case]) -> dict[str, list[Case]]:
    result: dict[str, list[Case]] = defaultdict(list)
    for case in plan:
        result[case.kernel].append(case)
    return result


def summary_of(
    plan: Iterable[Case], hashes: dict[str, str], runs: list[dict[str, Any]], records: dict[str, dict[str, Any]], earlier: Earlier
) -> dict[str, Any]:
    """Counts and worst errors of each kernel, what was found, and the versions it was found under.

    "done" of a kernel: a bit for each of its cases in the order of the plan, set where it was run and clean; base64.
    """
    records = {name: record for name, record in records.items() if record.get("ptx") == hashes.get(record["kernel"])}
    rows: dict[str, dict[str, Any]] = {}
    for kernel, cases_ in by_kernel(plan).items():
        old = earlier.rows.get(kernel, {})
        worst = {error: old.get(error, 0.0) for error in ("out", "lse")}
        clean = np.zeros(len(cases_), np.bool_)
        run = 0
        for place, case in enumerate(cases_):
            record = records.get(case.name)
            run += record is not None or case.name in earlier.names
            if record is None:
                clean[place] = case.name in earlier.names
                continue
            clean[place] = not record["found"]
            for error in worst:
                worst[error] = max(worst[error], record.get(error, 0.0))
        done = base64.b64encode(np.packbits(clean).tobytes()).decode()
        rows[kernel] = {"planned": len(cases_), "run": run, "clean": int(clean.sum()), **worst, "ptx": hashes[kernel], "done": done}
    found = {name: record["found"] for name, record in sorted(records.items()) if record["found"]}
    versions = sorted({tuple(sorted(each.items())) for each in (*earlier.versions, *runs)})
    return {
        "planned": sum(row["planned"] for row in rows.values()), "run": sum(row["run"] for row in rows.values()), "found": found,
        "bounds": {"out": OUT_BOUND, "lse": LSE_BOUND}, "kernels": rows, "versions": [dict(each) for each in versions],
    }  # fmt: skip


def table(summary: dict[str, Any]) -> str:
    """The summary for people."""
    lines = ["kernel                 run of planned   clean  worst O error  worst LSE error"]
    for name, row in summary["kernels"].items():
        lines.append(f"{name:20} {row['run']:6,} of {row['planned']:6,}  {row['clean']:6,}  {row['out']:13.2e}  {row['lse']:15.2e}")
    lines.append(f"{summary['run']:,} of {summary['planned']:,} cases run, {len(summary['found'])} with findings")
    return "\n".join(lines + [f"{name}: {found}" for name, found in summary["found"].items()])


def kernels(plan: Iterable[Case], stored: Path | None, processes: int) -> dict[str, str]:
    """PTX of every kernel of the plan: what `stored` holds; where there is no such file compiled, and kept there."""
    if stored is not None and stored.exists():
        ptx: dict[str, str] = json.loads(stored.read_text())
        return ptx
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        ptx = dict(pool.imap_unordered(ptx_of, sorted({case.kernel for case in plan})))
    if stored is not None:
        write_whole(stored, json.dumps(ptx).encode())
    return ptx


def sweep(plan: list[Case], ptx: dict[str, str], log: Path, processes: int, seconds: float, earlier: Earlier) -> None:
    """Runs what log and summary lack, in the order of the plan, until `seconds` have passed; each result is a line of the log at once."""
    stop = time.monotonic() + seconds
    _, records = read_log(log)
    hashes = {kernel: digest(text) for kernel, text in ptx.items()}
    todo = [case for case in plan if case.name not in earlier.names and records.get(case.name, {}).get("ptx") != hashes[case.kernel]]
    done = reported = 0
    with log.open("a") as file, multiprocessing.get_context("spawn").Pool(processes, _begin, (ptx,)) as pool:
        file.write(json.dumps(versions()) + "\n")
        begin = time.monotonic()
        results = pool.imap_unordered(run, todo)
        while done < len(todo) and (left := stop - time.monotonic()) > 0:
            try:
                record = results.next(timeout=left)
            except multiprocessing.TimeoutError:
                break
            file.write(json.dumps(record | {"ptx": hashes[record["kernel"]]}) + "\n")
            done += 1
            if record["found"]:
                print(f"{record['case']}: {record['found']}", flush=True)
            if (elapsed := time.monotonic() - begin) >= PROGRESS_SECONDS * (reported + 1):
                reported = int(elapsed // PROGRESS_SECONDS)
                file.flush()
                print(f"{elapsed:6.0f} s: {done:,} of {len(todo):,} cases, {done / elapsed:.1f} a second", flush=True)
        pool.terminate()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--log", type=Path, required=True, help="a line a case; a sweep goes on where it ends")
    parser.add_argument(
        "--summary", type=Path, help="JSON with counts, worst errors, findings and versions; one that is there is gone on with"
    )
    parser.add_argument("--ptx", type=Path, help="JSON with the PTX of the kernels, written if it is not there: for where NVRTC is not")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--minutes", type=float, default=24 * 60.0)
    chosen = parser.parse_args(arguments)
    if chosen.processes < 1 or not chosen.minutes > 0:
        parser.error("--processes and --minutes are positive")
    plan = list(cases())
    # One thread a process; a process that numpy has been imported in no longer asks.
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    ptx = kernels(plan, chosen.ptx, chosen.processes)
    hashes = {kernel: digest(text) for kernel, text in ptx.items()}
    try:
        earlier = read_summary(chosen.summary, plan, hashes)
    except ValueError as error:
        parser.error(str(error))
    sweep(plan, ptx, chosen.log, chosen.processes, chosen.minutes * 60, earlier)
    summary = summary_of(plan, hashes, *read_log(chosen.log), earlier)
    if chosen.summary:
        write_whole(chosen.summary, (json.dumps(summary, indent=1) + "\n").encode())
    print(table(summary))
    return 1 if summary["found"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
