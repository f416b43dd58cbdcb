"""Instructions between the CTAs of a cluster: barrier.cluster and st.async (PTX ISA 9.1 sections 9.7.13.4 and 9.7.9.12)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import hazards as hz
from .access import check_shared, shared_faults, shared_index, split_cluster
from .alu import Steps
from .asynchronous import check_visible, complete_on, in_flight, mbarrier_at, shared_reader
from .control import aligned
from .decode import Assembler, instruction
from .machine import RETRY, Warp, bits_of
from .ptx import Instruction, PtxFault, Vector

Array = NDArray[Any]


@instruction("barrier.cluster.arrive")
def _arrive(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.13.4. Release by default; a thread that arrives again before it has waited is reported."""
    release = "relaxed" not in words
    asm.operands(0)
    code = asm.code

    def step(w: Warp, r: list[Any]) -> None:
        cluster = w.cta.cluster
        again = w.mask & (w.cluster_phase >= 0)
        if again.any():
            lane = int(again.argmax())
            w.cta.report(
                "barrier",
                f"{code.opcode} by {w.name} lane {lane} (PTX line {code.line}), "
                "which has arrived at the cluster barrier without waiting for it",
                code,
                w,
                lane,
            )
        w.cluster_phase[w.mask] = cluster.phase
        cluster.arrive(w, bits_of(w.mask), release)

    return aligned(asm, (step, step)) if "aligned" in words else (step, step)


@instruction("barrier.cluster.wait")
def _wait(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.13.4. Always acquires."""
    asm.operands(0)
    code = asm.code

    def step(w: Warp, r: list[Any]) -> int | None:
        cluster = w.cta.cluster
        phases = w.cluster_phase[w.mask]
        if (phases < 0).any():
            lane = int((w.mask & (w.cluster_phase < 0)).argmax())
            w.cta.report(
                "barrier",
                f"{code.opcode} by {w.name} lane {lane} (PTX line {code.line}), which has not arrived at the cluster barrier",
                code,
                w,
                lane,
            )
        if (phases >= cluster.phase).any():
            w.group.blocked = ("cluster", cluster, code)
            cluster.waiting.append((w, w.group))
            return RETRY
        w.cluster_phase[w.mask] = -1
        if w.cta.check and cluster.done is not None:
            w.clock.join(cluster.done)
        return None

    return aligned(asm, (step, step)) if "aligned" in words else (step, step)


_VALUES = {"b32": 4, "u32": 4, "s32": 4, "f32": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8}


@instruction("st.async")
def _st_async(asm: Assembler, ins: Instruction, words: list[str]) -> Steps:
    """9.7.9.12: stores into the shared memory of a CTA of the cluster that report their bytes to an mbarrier there."""
    size = _VALUES.get(words[-1], 0)
    if not size or "mbarrier::complete_tx::bytes" not in words:
        raise asm.error(f"{ins.opcode} is not supported")
    operands = asm.operands(3)
    count = next((int(word[1:]) for word in words if word in ("v2", "v4")), 1)
    items = operands[1].items if isinstance(operands[1], Vector) else (operands[1],)
    if len(items) != count:
        raise asm.error(f"{ins.opcode} needs {count} values")
    read, barrier_address = shared_reader(asm, operands[0], ["shared"]), shared_reader(asm, operands[2], ["shared"])
    values = [asm.source(item, f"u{8 * size}") for item in items]
    code = asm.code
    total = size * count

    def step(w: Warp, r: list[Any]) -> None:
        cta = w.cta
        lanes = np.flatnonzero(w.mask)
        address, target = np.asarray(read(r), np.int64)[lanes], barrier_address(r)[lanes]
        data = np.stack([r[v][lanes] for v in values], axis=1)
        who = f"st.async of {w.name}"
        for at in np.unique(target).tolist():
            here = np.flatnonzero(target == at)
            barrier = mbarrier_at(w, code, int(at), int(lanes[here[0]]))
            for owner, places, offsets in split_cluster(w, code, address[here], lanes[here]):
                chosen = here if places is None else here[places]
                if owner is not barrier.cta:
                    raise PtxFault("the mbarrier is not in the shared memory of the CTA that is written")
                good = shared_faults(w, code, offsets, lanes[chosen], total, True, owner)
                if good is not None:
                    offsets, chosen = offsets[good], chosen[good]
                slot: tuple[int, int] | None = None
                if cta.check:
                    slot = cta.async_slot(w, who)
                    assert owner.shadow is not None
                    actor, time = slot
                    epochs = (lanes[chosen] << hz.LANE_SHIFT) + np.int64(time << hz.CLOCK_SHIFT | actor | int(code.tag))
                    index, wide = shared_index(owner.shadow, offsets, total)
                    check_shared(w, code, index, epochs[:, None] if wide else epochs, True, who=who, owner=owner)
                    in_flight(owner, slot, code, w, who)
                    check_visible(w, code, barrier, int(lanes[chosen[0]]) if len(chosen) else 0)
                cells = owner.words[size]
                index_ = offsets[:, None] // size + np.arange(count)

                def move(cells: Array = cells, index_: Array = index_, value: Array = data[chosen]) -> None:
                    cells[index_] = value

                complete_on(w, barrier, total * len(here if places is None else places), slot, move)

    return step, step


__all__: list[str] = []
