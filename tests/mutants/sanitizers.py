"""Who finds which mutant: the emulator, compute-sanitizer's tools, or a comparison of the output. For the sm_90a kernels, on an H200.

    python tests/mutants/sanitizers.py plan FOLDER            anywhere: chooses mutants, runs the emulator on them
    python tests/mutants/sanitizers.py run FOLDER [SECONDS]   on the GPU: runs each mutant alone and under each tool
    python tests/mutants/sanitizers.py clean FOLDER [SECONDS] on the GPU: every unchanged kernel under each tool
    python tests/mutants/sanitizers.py table FOLDER           prints the table

The compute-sanitizer is the first on PATH: 2026.4 (CUDA 13.5) knows st.async and indirect barriers in clusters, 2025.3 (13.0) does not.
Every launch is a process of its own with a time limit, for mutants hang and crash. The driver compiles the mutant's PTX. What a tool
already reports on the unchanged kernel is no find, so a mutant counts only for tools that are silent on the same launch of the original.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
ALONE_LIMIT = 6.0
"""Seconds for a launch without a tool; the kernels take microseconds."""
TOOL_LIMIT = 20.0
SHARED = " shared"
WORKERS = 14
SYNCHRONISATION = {"race", "deadlock", "mbarrier", "barrier", "proxy_fence", "wgmma_in_flight", "async_exit"}
UNITS = (("d512", "unit_exchange4_loop"), ("d512", "unit_level0"), ("d64", "unit_combine"))
SHARED_KEY = ("d128_sk", "d512", "d256")


def catalogue() -> list[dict[str, Any]]:
    """The subjects: config, entry or launch shapes."""
    from mutants.subjects import SM90, SM90_KEY_SPLIT

    result: list[dict[str, Any]] = [{"config": config, "entry": entry, "shapes": [{}]} for config, entry in UNITS]
    result += [{"config": config, "entry": "", "shapes": list(SM90)} for config in SHARED_KEY]
    return [*result, {"config": "d128", "entry": "", "shapes": list(SM90_KEY_SPLIT)}]


def subject_of(item: dict[str, Any]) -> Any:
    from mutants.subjects import attention_subject, unit

    return unit(item["config"], "sm_90a", item["entry"]) if item["entry"] else attention_subject(item["config"], "sm_90a", *item["shapes"])


def chosen(subjects: list[Any]) -> list[Any]:
    """One site a rule of the unit kernels together, of the shared-key attention kernels together (dealt out to them), of key-split."""
    from mutants.equivalents import equivalent

    result = []
    for family in (subjects[:3], subjects[3:6], subjects[6:]):
        rules: dict[str, list[list[Any]]] = {}
        for place, subject in enumerate(family):
            for mutant in subject.mutants():
                if equivalent(mutant) is None:
                    rules.setdefault(mutant.rule, [[] for _ in family])[place].append(mutant)
        for turn, rule in enumerate(sorted(rules)):
            sites = [found for found in rules[rule] if found]
            executed = [mutant for mutant in sites[turn % len(sites)] if mutant.trials]
            if executed:
                result.append(executed[len(executed) // 2])
    return result


def plan(folder: Path) -> None:
    from mutants.subjects import execute

    folder.mkdir(parents=True, exist_ok=True)
    items = catalogue()
    subjects = [subject_of(item) for item in items]
    originals = []
    for place, (item, subject) in enumerate(zip(items, subjects, strict=True)):
        (folder / f"s{place}.ptx").write_text(subject.text)
        originals += [{"subject": place, "trial": trial, "ptx": f"s{place}.ptx"} for trial in range(len(item["shapes"]))]
    mutants = []
    for number, mutant in enumerate(chosen(subjects)):
        if mutant.tensor_map is not None or isinstance(mutant.program, str):
            continue
        place = subjects.index(mutant.subject)
        found: set[str] = set()
        trial = mutant.trials[0]
        # The launch that merges in a cluster comes last: racecheck of CUDA 13.0 does not come to an end there.
        for trial in sorted(mutant.trials, key=(0, 2, 1).index):
            found = execute(mutant.program, mutant.subject.trials[trial](), mutant.subject.baseline[trial][0], 0)
            if found & set(mutant.kinds):
                break
        (folder / f"m{number}.ptx").write_text(mutant.subject.listing.apply(mutant.edit))
        mutants.append(
            {"name": mutant.name, "rule": mutant.rule, "kinds": mutant.kinds, "subject": place, "trial": trial, "ptx": f"m{number}.ptx",
             "emulator": sorted(found), "found": bool(found & set(mutant.kinds))}
        )  # fmt: skip
        print(mutants[-1]["name"], mutants[-1]["emulator"], flush=True)
    (folder / "plan.json").write_text(json.dumps({"subjects": items, "originals": originals, "mutants": mutants}, indent=1))


def handover(entry: str) -> Any:
    """A launch of cluster_handover.cu and its judgement."""
    import numpy as np

    from fa4gen.codegen.backends import Launch
    from mutants.subjects import Trial

    out = np.zeros((2, 128), np.uint32)
    expected = np.array([[(c if entry == "handover_own" else 1 - c) * 1000 + (i ^ 1) for i in range(128)] for c in range(2)])
    return Trial(Launch(entry, (2, 1, 1), (128, 1, 1), 0, (out,), 2), lambda: bool((out == expected).all()))


HANDOVERS = ("handover_mbarrier", "handover_barrier", "handover_racy", "handover_own", "handover_partial", "handover_async")


def one(folder: Path, subject: int, trial: int, ptx: str, limit: float) -> None:
    """One launch in this process; the last line printed says how it ended."""
    from fa4gen.codegen.backends import BackendError, Compiled
    from fa4gen.codegen.backends.cuda import CudaBackend

    one_trial = subject_of(json.loads((folder / "plan.json").read_text())["subjects"][subject]).trials[trial]()
    try:
        backend = CudaBackend(repeats=0, time_limit=limit)
        # The driver takes a CUBIN or the text of PTX.
        cubin = folder / f"{ptx}.cubin"
        image = (cubin if cubin.exists() else folder / ptx).read_bytes() + b"\0"
        backend.run(Compiled("sm_90a", "", image), one_trial.launch)
        print("VERDICT right" if one_trial.right() else "VERDICT wrong", flush=True)
    except BackendError as error:
        print(f"VERDICT {'hang' if 'did not end' in str(error) else 'error'}: {error}", flush=True)
    # A kernel that hangs would keep an orderly exit waiting.
    os._exit(0)


def sanitizer() -> str:
    known = [shutil.which("compute-sanitizer"), *glob.glob("/usr/local/cuda*/bin/compute-sanitizer")]
    known += glob.glob("/usr/local/cuda*/compute-sanitizer/compute-sanitizer") + glob.glob("/opt/nvidia/*/compute-sanitizer")
    return next(path for path in known if path)


def assemble(folder: Path, files: list[str]) -> None:
    """Make CUBINs of PTX files by ptxas, all at once, so that no launch waits for the driver's compiler; what it refuses stays PTX."""
    known = [shutil.which("ptxas"), *glob.glob("/usr/local/cuda*/bin/ptxas")]
    ptxas = next((path for path in known if path), None)
    if ptxas is None:
        return

    def one_file(name: str) -> None:
        command = [ptxas, "-arch=sm_90a", str(folder / name), "-o", str(folder / name) + ".cubin"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"ptxas refuses {name}: {done.stderr.strip()[:200]}", flush=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(one_file, files))


def launch(folder: Path, job: dict[str, Any], tool: str, seconds: float) -> dict[str, Any]:
    """Run one launch in a process of its own, alone or under a tool. found: errors that the tool reports."""
    prefix = [sanitizer(), "--tool", tool, "--print-limit", "3"] if tool else []
    inner = seconds - 2 if tool else seconds - 1.5
    command = [*prefix, sys.executable, __file__, "one", str(folder), str(job["subject"]), str(job["trial"]), job["ptx"], str(inner)]
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=seconds + 4)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output = (process.communicate()[0] or "") + "\nVERDICT hang: killed"
    verdict = (re.findall(r"VERDICT (.*)", output) or ["error: no verdict"])[-1]
    errors = re.findall(r"(?:ERROR|RACECHECK|SYNCCHECK) SUMMARY: (\d+)", output)
    # A tool that is killed with the launch has printed what it found, without a summary.
    reports = re.findall(r"^========= (?:Error:|Invalid|Barrier error|Uninitialized)", output, re.MULTILINE)
    count = int(errors[-1]) if errors else len(reports)
    return {
        "verdict": verdict,
        "found": count,
        "seconds": round(time.monotonic() - start, 1),
        "output": output[-1500:] if count or tool == "" else output[-300:],
    }


def run(folder: Path, seconds: float) -> None:
    """All launches, the cheap and telling ones first, until the time is up."""
    end = time.monotonic() + seconds
    known = json.loads((folder / "plan.json").read_text())
    assemble(folder, sorted({job["ptx"] for job in known["originals"] + known["mutants"]}))
    jobs: list[tuple[str, dict[str, Any], str, float]] = []
    for job in known["originals"]:
        jobs += [(f"original {job['subject']} {job['trial']}", job, tool, ALONE_LIMIT if not tool else TOOL_LIMIT) for tool in ("", *TOOLS)]
    jobs += [(job["name"], job, "", ALONE_LIMIT) for job in known["mutants"]]
    telling = sorted(known["mutants"], key=lambda job: not SYNCHRONISATION & set(job["kinds"]))
    for job in telling:
        synchronises = bool(SYNCHRONISATION & set(job["kinds"]))
        jobs += [(job["name"], job, tool, TOOL_LIMIT) for tool in (TOOLS if synchronises else ("memcheck", "racecheck"))]
    results: dict[str, dict[str, Any]] = {}
    hangs: set[str] = set()

    def work(task: tuple[str, dict[str, Any], str, float]) -> None:
        name, job, tool, limit = task
        if time.monotonic() + 3 > end:
            return
        outcome = launch(folder, job, tool, min(8.0 if name in hangs else limit, max(3.0, end - time.monotonic())))
        if outcome["verdict"].startswith("hang"):
            hangs.add(name)
        results.setdefault(name, {})[tool or "alone"] = outcome
        print(f"{name} [{tool or 'alone'}]: {outcome['verdict'][:80]}, {outcome['found']} found, {outcome['seconds']} s", flush=True)

    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(work, jobs))
    (folder / "results.json").write_text(json.dumps(results, indent=1))


def launches() -> list[tuple[str, str]]:
    """Every sm_90a launch that has to be clean, as (what, which): the catalogue's, and the sweep's of every shipped attention kernel."""
    import test_shipped_clean as sweep

    from fa4gen.codegen.geometry import entry_configs

    subjects = [(f"subject {place}", str(trial)) for place, item in enumerate(catalogue()) for trial in range(len(item["shapes"]))]
    kernels = dict.fromkeys(name for name, arch, _, _ in sweep.attention_cases() if arch == "sm_90a")
    split = {name for name in kernels if not sweep.load_shipped(name).shared_key}
    whole = [(name, shape) for name in kernels for shape in (sweep.SHAPES[:2] if name in split else sweep.SHAPES)]
    # Entries whose CTAs share an SM, where there are two of the same rows.
    paired = [
        name
        for name in kernels
        if len(entries := entry_configs(sweep.load_shipped(name), "sm_90a")) > len({entry.tile_rows for entry in entries})
    ]
    return subjects + whole + [(name, shape + SHARED) for name in paired for shape in sweep.SHAPES]


def launch_once(what: str, which: str, limit: float) -> None:
    """One of `launches()`, or a hand-over of cluster_handover.cu, in this process; the last line printed says how it ended."""
    import numpy as np
    import test_shipped_clean as sweep

    from fa4gen.codegen import compiler
    from fa4gen.codegen.backends import BackendError
    from fa4gen.codegen.backends.cuda import CudaBackend
    from mutants.subjects import Trial

    if what == "handover":
        source, file = (Path(__file__).parent / "cluster_handover.cu").read_text(), "cluster_handover.cu"
        trial = handover(which)
    elif what.startswith("subject "):
        item = catalogue()[int(what.split()[1])]
        file = "unit.cu" if item["entry"] else "attention.cu"
        source = sweep.render(sweep.load_shipped(item["config"]), "sm_90a")[file]
        trial = subject_of(item).trials[int(which)]()
    else:
        file, rows = "attention.cu", (1, sweep.load_shipped(what).group or 8)
        source = sweep.render(sweep.load_shipped(what), "sm_90a")[file]
        shape = which.removesuffix(SHARED)
        inputs, expected, _ = sweep.problem(what, "sm_90a", shape, rows)
        inputs.plain_out[:] = np.nan

        def right() -> bool:
            return bool(np.linalg.norm(inputs.plain_out.astype(np.float64) - expected) <= 4e-3 * np.linalg.norm(expected))

        trial = Trial(sweep.launch_of(what, "sm_90a", shape, rows, which != shape), right)
    try:
        # Compiled by NVRTC, and kept by content: only the first of the tools waits for it.
        CudaBackend(repeats=0, time_limit=limit).run(compiler.compile_source(source, "sm_90a", file), trial.launch)
        print("VERDICT right" if trial.right() else "VERDICT wrong", flush=True)
    except BackendError as error:
        print(f"VERDICT {'hang' if 'did not end' in str(error) else 'error'}: {error}", flush=True)
    # A kernel that hangs would keep an orderly exit waiting.
    os._exit(0)


def clean(folder: Path, seconds: float) -> None:
    """All of `launches()` under every tool, the hand-overs under racecheck: counts in FOLDER/clean.json, reports in clean-*.txt."""
    end = time.monotonic() + seconds
    folder.mkdir(parents=True, exist_ok=True)
    known = subprocess.run([sanitizer(), "--version"], capture_output=True, text=True, check=False).stdout.split("Version ")[-1].split()
    jobs = [(*launch, tool) for tool in ("racecheck", *TOOLS) for launch in launches()]
    jobs = list(dict.fromkeys([*jobs, *(("handover", name, "racecheck") for name in HANDOVERS)]))
    counts: dict[str, dict[str, str]] = {}

    def work(job: tuple[str, str, str]) -> None:
        what, which, tool = job
        limit = min(90.0, end - time.monotonic())
        if limit < 10:
            return
        options = ["--racecheck-report", "all"] if tool == "racecheck" else []
        prefix = [sanitizer(), "--tool", tool, *options, "--print-limit", "20", "--show-backtrace", "no"]
        command = [*prefix, sys.executable, __file__, "once", what, which, str(limit - 5)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            output = (process.communicate()[0] or "") + "\nVERDICT hang: killed"
        found = re.findall(r"SUMMARY: (?:\d+ hazards displayed \()?(.*?)\)?$", output, re.MULTILINE)
        verdict = (re.findall(r"VERDICT (.*)", output) or ["error: no verdict"])[-1]
        counts.setdefault(f"{what}, {which}", {})[tool] = f"{found[-1] if found else 'no summary'}; {verdict}"
        print(f"{what}, {which} [{tool}]: {counts[f'{what}, {which}'][tool]}", flush=True)
        if not found or not found[-1].startswith("0 errors"):
            (folder / f"clean-{what}-{which}-{tool}.txt".replace(" ", "-")).write_text(output[:20_000])

    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(work, jobs))
    (folder / "clean.json").write_text(json.dumps({"compute-sanitizer": known[:1], "launches": counts}, indent=1))


def table(folder: Path) -> None:
    known, results = (json.loads((folder / name).read_text()) for name in ("plan.json", "results.json"))

    def mark(job: dict[str, Any], tool: str) -> str:
        outcome = results.get(job["name"], {}).get(tool)
        original = results.get(f"original {job['subject']} {job['trial']}", {}).get(tool)
        if outcome is None or original is None:
            return "not run"
        if tool == "alone":
            return {"righ": "-", "wron": "found", "hang": "hangs"}.get(outcome["verdict"][:4], "crashes")
        if original["found"]:
            return "(noise)"
        return "found" if outcome["found"] else "-"

    columns = ("emulator", "alone", *TOOLS)
    rows = []
    for job in known["mutants"]:
        marks = {"emulator": "found" if job["found"] else "-", **{tool: mark(job, tool) for tool in columns[1:]}}
        rows.append((job, marks))
        print(f"| {job['name']} | {', '.join(job['kinds'][:2])} | " + " | ".join(marks[c] for c in columns) + " |")
    groups = {"synchronisation": SYNCHRONISATION, "other": set()}
    for title, kinds in groups.items():
        members = [marks for job, marks in rows if bool(SYNCHRONISATION & set(job["kinds"])) == bool(kinds)]
        print(title, len(members))
        for column in columns:
            print("   ", column, dict(Counter(marks[column] for marks in members)))


def main() -> None:
    command, folder, *rest = sys.argv[1:]
    if command == "plan":
        plan(Path(folder))
    elif command == "one":
        one(Path(folder), int(rest[0]), int(rest[1]), rest[2], float(rest[3]))
    elif command == "once":
        launch_once(folder, rest[0], float(rest[1]))
    elif command == "clean":
        clean(Path(folder), float(rest[0]) if rest else 600)
    elif command == "run":
        run(Path(folder), float(rest[0]) if rest else 600)
    else:
        table(Path(folder))


if __name__ == "__main__":
    main()
