"""Every geometry rule keeps something from going wrong: one step inside it a kernel is clean, one step outside, with the rule switched off,
ptxas or the launch refuses it, or the emulator finds a hang, a race, an access out of bounds or a wrong value.

Configs at the very limit are clean: the rules refuse no more than they have to. That m_pack is 2 or 4 is a choice on one side, see
test_packs_of_one_and_eight.
"""

from __future__ import annotations

import itertools
import re
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fa4gen.codegen import artifacts, compiler, reference, render
from fa4gen.codegen.attention import attention_launch
from fa4gen.codegen.backends import BackendError, Compiled
from fa4gen.codegen.backends.emulator import EmulatorBackend
from fa4gen.codegen.config import RULES, Config, ConfigError, disabled_rules, parse_config
from fa4gen.codegen.geometry import all_rules, derive

pytestmark = pytest.mark.skipif(compiler.nvrtc_version() is None, reason="NVRTC is not installed")

# The modes: key-split in layout G and E (one and two warps a part), shared-key with four and with two parts.
MODES: dict[str, dict[str, Any]] = {
    "G": {"m_pack": 4, "rows": 32, "shared_key": False},
    "E": {"m_pack": 2, "rows": 64, "shared_key": False},
    "S": {"m_pack": 4, "rows": 32, "shared_key": True},
    "S2": {"m_pack": 2, "rows": 64, "shared_key": True},
}
KEYS = 700
OUT_BOUND = 4e-3
LSE_BOUND = 1e-4


def fields_of(mode: str, fields: dict[str, Any], arch: str = "sm_100a") -> dict[str, Any]:
    return {"name": "rule", "arch": [arch], **MODES[mode], **fields}


def broken_rules(fields: dict[str, Any]) -> tuple[str, ...]:
    """The rules that refuse a config, each switched off before the next is found."""
    off: list[str] = []
    while True:
        with disabled_rules(*off):
            try:
                parse_config(fields)
            except ConfigError as error:
                if error.rule in off:
                    raise
                off.append(error.rule)
            else:
                return tuple(off)


@cache
def problem(depth: int, q_depth: int) -> tuple[np.ndarray, ...]:
    """q, k, v of 4 positions of 8 heads, and O and LSE of the reference; columns of q and k from q_depth on are 0."""
    rng = np.random.Generator(np.random.PCG64(depth))
    bf16 = np.dtype(ml_dtypes.bfloat16)
    q = (rng.standard_normal((1, 4, 8, depth), np.float32) * 3.0).astype(bf16)
    k, v = (rng.standard_normal((1, KEYS, 1, depth), np.float32).astype(bf16) for _ in range(2))
    q[..., q_depth:] = 0
    k[..., q_depth:] = 0
    return q, k, v, *reference.attention(q, k, v, scale=depth**-0.5, causal=False)


def outcome(
    config: Config, arch: str, text: str | None = None, *, seed: int = 0, q_depth: int | None = None, partition_keys: int | None = None
) -> str:
    """What is wrong with a run: "refused" by ptxas or the launch, "no kernel", kinds of hazards, "value", "spills" (registers, which emit
    refuses), or nothing. text: another attention.cu."""
    depth = config.ov_depth
    q, k, v, out_expected, lse_expected = problem(depth, depth if q_depth is None else q_depth)
    out, lse = np.full(q.shape, np.nan, q.dtype), np.full((1, 8, 4), np.nan, np.float32)
    try:
        if text is None and not render.has_attention(config, arch):
            return "no kernel"
        source = render.render(config, arch)["attention.cu"] if text is None else text
        module = compiler.compile_source(source, arch, "attention.cu")
        launch = attention_launch(config, derive(config, arch), q, k, v, out, lse, partition_keys=partition_keys)
        hazards = EmulatorBackend(seed=seed).run(Compiled(arch, module.ptx), launch).hazards
    except (compiler.CompileError, BackendError):
        return "refused"
    except ValueError as error:
        # A tensor map that no driver would encode.
        if "tensor map" not in str(error):
            raise
        return "refused"
    if hazards:
        return " ".join(sorted({hazard.kind for hazard in hazards}))
    ours = out.astype(np.float64)
    right = (
        np.linalg.norm(ours - out_expected) <= OUT_BOUND * np.linalg.norm(out_expected)
        and (np.abs(lse - lse_expected) <= LSE_BOUND + 2.0**-20 * np.abs(lse_expected)).all()
    )
    if not right:
        return "value"
    try:
        artifacts.spill_gate(config, module)
    except artifacts.EmitError:
        return "spills"
    return ""


# Rule -> mode, target, fields one step inside, fields one step outside, other rules that the step breaks as well, what must be found.
TIGHT: list[tuple[str, str, str, dict[str, Any], dict[str, Any], tuple[str, ...], str]] = [
    ("pack-fills-warpgroup", "S", "sm_100a", {"ov_depth": 256}, {"ov_depth": 256, "rows": 64}, (), "race"),
    ("pack-fills-warpgroup", "E", "sm_100a", {"ov_depth": 128}, {"ov_depth": 128, "rows": 32}, (), "race"),
    # N of a .ws MMA; more keys than a box of a tensor map has, so that a slot waits for bytes that no copy brings.
    ("block-keys", "S", "sm_100a", {"ov_depth": 64, "block_keys": 64}, {"ov_depth": 64, "block_keys": 32}, (), "refused"),
    ("block-keys", "S", "sm_100a", {"ov_depth": 64, "block_keys": 256}, {"ov_depth": 64, "block_keys": 512}, (), "deadlock"),
    # 512 columns; 576.
    ("tmem-columns", "S2", "sm_100a", {"ov_depth": 256}, {"ov_depth": 512}, (), "tmem_allocation"),
    ("smem-bytes", "S", "sm_100a", {"ov_depth": 512, "ring_slots": 4}, {"ov_depth": 512, "ring_slots": 5}, (), "refused"),
    # S of the second slot of a K tile is issued before the first slot is released.
    (
        "ring-floor", "S", "sm_90a", {"ov_depth": 256, "warpgroups": 1, "ring_slots": 2},
        {"ov_depth": 256, "warpgroups": 1, "ring_slots": 1}, (), "deadlock",
    ),
    # A warp reads K twice, each time followed by V.
    ("ring-floor", "G", "sm_90a", {"ov_depth": 128, "ring_slots": 8}, {"ov_depth": 128, "ring_slots": 4}, (), "deadlock"),
    # The staging would reach into the rescaling factors, the mbarriers and the TMEM address.
    ("epilogue-arena", "G", "sm_100a", {"ov_depth": 128, "ring_slots": 5}, {"ov_depth": 128, "ring_slots": 4}, (), "race"),
    ("epilogue-arena", "E", "sm_100a", {"ov_depth": 128, "ring_slots": 6}, {"ov_depth": 128, "ring_slots": 5}, (), "race"),
    # The same into the exchange of the row sums, behind P.
    ("epilogue-arena", "S", "sm_100a", {"ov_depth": 512, "ring_slots": 2}, {"ov_depth": 512, "ring_slots": 1}, (), "race"),
    # Layout G holds a whole V tile, 2 slots at depth 128: the first half of P multiplies all of it before the second half does.
    ("ring-floor", "G", "sm_100a", {"ov_depth": 128, "ring_slots": 5}, {"ov_depth": 128, "ring_slots": 1}, ("epilogue-arena",), "deadlock"),
    # A stage of P would be half an MMA.
    ("key-chunk-steps", "G", "sm_100a", {"ov_depth": 128, "block_keys": 128}, {"ov_depth": 128, "block_keys": 64}, (), "refused"),
    # Q has room for ov_depth columns: more reach into the ring.
    ("equal-depths", "G", "sm_100a", {"ov_depth": 128}, {"ov_depth": 128, "qk_depth": 192}, ("ring-walk",), "race"),
    ("equal-depths", "S", "sm_100a", {"ov_depth": 256}, {"ov_depth": 256, "qk_depth": 320}, ("ring-walk",), "race"),
    # Less: arrays are as deep as V, and the rest of their depth would be left out of the scores.
    ("equal-depths", "G", "sm_100a", {"ov_depth": 128}, {"ov_depth": 128, "qk_depth": 64}, ("ring-walk",), "value"),
    ("equal-depths", "S", "sm_100a", {"ov_depth": 256}, {"ov_depth": 256, "qk_depth": 128}, ("ring-walk",), "value"),
    # Layout E multiplies both parts' V at once: N = 512.
    ("key-split-depth", "E", "sm_100a", {"ov_depth": 128, "warpgroups": 1}, {"ov_depth": 256, "warpgroups": 1}, (), "refused"),
    # Two warpgroups with the O of four partitions each, 256 deep, take 640 columns.
    (
        "key-split-depth", "G", "sm_100a", {"ov_depth": 128}, {"ov_depth": 256, "block_keys": 128},
        ("tmem-columns", "epilogue-arena"), "tmem_allocation",
    ),
    # One warpgroup has the room, but a thread's share of the merge is 64 columns of four parts beside its own: not in its registers.
    ("key-split-depth", "G", "sm_100a", {"ov_depth": 128, "warpgroups": 1}, {"ov_depth": 256, "warpgroups": 1}, (), "spills"),
    # Two slots of K depth and four of V: S lacks half of the depth.
    ("ring-walk", "S", "sm_100a", {"ov_depth": 256}, {"ov_depth": 256, "qk_depth": 128}, ("equal-depths",), "value"),
    # A V tile of layout E is cut along its keys into as many chunks as K is along the depth.
    (
        "key-chunk-divides", "E", "sm_100a", {"ov_depth": 128}, {"ov_depth": 128, "qk_depth": 192},
        ("equal-depths", "key-chunk-steps", "sub-tile-bytes"), "race",
    ),
    # Half as many bytes of V: the copies of the two parts' keys meet in a slot.
    ("sub-tile-bytes", "E", "sm_100a", {"ov_depth": 128}, {"ov_depth": 128, "qk_depth": 256}, ("equal-depths",), "race"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "mode", "arch", "inside", "outside", "others", "found"), TIGHT)
def test_a_step_inside_is_clean_and_a_step_outside_fails(
    rule: str, mode: str, arch: str, inside: dict[str, Any], outside: dict[str, Any], others: tuple[str, ...], found: str
) -> None:
    config = parse_config(fields_of(mode, inside, arch))
    assert [outcome(config, arch, seed=seed) for seed in range(2)] == ["", ""]
    fields = fields_of(mode, outside, arch)
    broken = broken_rules(fields)
    assert sorted(broken) == sorted((rule, *others))
    with disabled_rules(*broken):
        results = [outcome(parse_config(fields), arch, seed=seed) for seed in range(2)]
    assert all(found in result for result in results), results


@pytest.mark.parametrize(("mode", "depth", "step"), [("S", 256, 1), ("G", 128, 4)])
def test_smem_bytes_on_sm_90a(mode: str, depth: int, step: int) -> None:
    """By default a ring has all that there is; `step` more slots, one for each ring, are too many."""
    one = {"ov_depth": depth, "warpgroups": 1}
    config = parse_config(fields_of(mode, one, "sm_90a"))
    assert outcome(config, "sm_90a") == ""
    more = fields_of(mode, {**one, "ring_slots": derive(config, "sm_90a").ring_slots + step}, "sm_90a")
    assert broken_rules(more) == ("smem-bytes",)
    with disabled_rules("smem-bytes"):
        assert outcome(parse_config(more), "sm_90a") == "refused"


def with_slots(config: Config, slots: int) -> str:
    """attention.cu that uses `slots` of the slots it has: its memory map, and with it the room of the epilogue, stay as they are."""
    text = render.render(config, "sm_100a")["attention.cu"]
    fewer = re.sub(r"(constexpr unsigned RING_SLOTS =) \d+;", rf"\1 {slots};", text)
    assert fewer != text
    return fewer


def test_ring_floor() -> None:
    """Layout G holds a whole V tile, 2 slots at depth 128: the first half of P multiplies all of it before the second half does."""
    config = parse_config(fields_of("G", {"ov_depth": 128}))
    assert [outcome(config, "sm_100a", with_slots(config, 2), seed=seed) for seed in range(2)] == ["", ""]
    assert ["deadlock" in outcome(config, "sm_100a", with_slots(config, 1), seed=seed) for seed in range(2)] == [True, True]


@pytest.mark.parametrize(
    ("mode", "depth", "old", "new"),
    [
        # The producer's positions of a V tile; the consumer's stay.
        ("G", 128, "part < O_TILES; ++part", "part < O_TILES + 1; ++part"),
        ("G", 128, "part < O_TILES; ++part", "part < O_TILES - 1; ++part"),
        ("S", 256, "part < chunks * O_TILES; ++part", "part < chunks * O_TILES + 1; ++part"),
        ("S", 512, "part < chunks * O_TILES; ++part", "part < chunks * O_TILES - 1; ++part"),
    ],
)
def test_ring_walk(mode: str, depth: int, old: str, new: str) -> None:
    config = parse_config(fields_of(mode, {"ov_depth": depth}))
    text = render.render(config, "sm_100a")["attention.cu"]
    assert old in text
    assert all(outcome(config, "sm_100a", text.replace(old, new), seed=seed) for seed in range(2))


CONSEQUENCES = ("key-chunk-divides", "ring-walk", "sub-tile-bytes")


def test_rules_that_follow_from_the_others() -> None:
    """With K and V equally deep these three cannot be broken: they are there for whoever changes how tiles are cut."""
    refused = 0
    for mode, depth, keys, warpgroups in itertools.product(MODES, (64, 128, 256, 512), (None, 64, 128, 256), (1, 2)):
        fields = fields_of(mode, {"ov_depth": depth, "warpgroups": warpgroups} | ({} if keys is None else {"block_keys": keys}))
        broken = broken_rules(fields)
        refused += bool(broken)
        assert not set(broken) & set(CONSEQUENCES), fields
    assert refused > 10
    assert set(CONSEQUENCES) & set(broken_rules(fields_of("G", {"ov_depth": 128, "qk_depth": 64}))) == {"ring-walk"}


@pytest.mark.parametrize(
    ("mode", "fields"),
    [
        # One slot where every slot is released alone: loads and MMAs take turns. The arena takes P too: 49,408 bytes at depth 256, of which
        # Q and one slot have 49,152.
        ("S", {"ov_depth": 256, "ring_slots": 1}),
        ("S2", {"ov_depth": 256, "ring_slots": 1}),
        # Chunks of one MMA.
        ("S", {"ov_depth": 512, "block_keys": 64}),
        ("S2", {"ov_depth": 256, "block_keys": 64}),
        ("E", {"ov_depth": 128, "block_keys": 64}),
    ],
)
def test_at_the_limit_of_the_rules(mode: str, fields: dict[str, Any]) -> None:
    config = parse_config(fields_of(mode, fields))
    assert [outcome(config, "sm_100a", seed=seed) for seed in range(2)] == ["", ""]


@pytest.mark.parametrize(("mode", "depth"), [("G", 64), ("E", 128), ("S", 512)])
def test_one_ring_slot_does_not_hang_where_every_slot_is_released_alone(mode: str, depth: int) -> None:
    """So there is no floor but that of the epilogue, whose room these keep."""
    config = parse_config(fields_of(mode, {"ov_depth": depth}))
    assert [outcome(config, "sm_100a", with_slots(config, 1), seed=seed) for seed in range(2)] == ["", ""]


@pytest.mark.parametrize(
    ("mode", "fields"),
    [
        ("S", {"ov_depth": 128, "ring_slots": 1, "warpgroups": 1}),
        ("S", {"ov_depth": 128, "ring_slots": 2, "warpgroups": 2}),
        ("G", {"ov_depth": 64, "ring_slots": 4}),
        ("G", {"ov_depth": 128, "ring_slots": 4, "tile_rows": 16}),
        ("E", {"ov_depth": 64, "ring_slots": 2}),
    ],
)
@pytest.mark.parametrize("partition_keys", [None, 192])
def test_one_slot_a_ring_on_sm_90a(mode: str, fields: dict[str, Any], partition_keys: int | None) -> None:
    """Where a slot is a tile that is worked through in one step: K of a tile is released before V of it is waited for."""
    config = parse_config(fields_of(mode, fields, "sm_90a"))
    assert [outcome(config, "sm_90a", seed=seed, partition_keys=partition_keys) for seed in range(2)] == ["", ""]


PACKS: list[tuple[str, str, dict[str, Any], str]] = [
    # M = 16 is none of an MMA.
    ("S", "sm_100a", {"ov_depth": 256, "m_pack": 8, "rows": 16}, "refused"),
    # The combine is of two or four parts.
    ("G", "sm_100a", {"ov_depth": 64, "m_pack": 8, "rows": 16}, "refused"),
    ("G", "sm_100a", {"ov_depth": 64, "m_pack": 1, "rows": 128}, "refused"),
    # A thread would hold a whole row of O.
    ("S", "sm_100a", {"ov_depth": 256, "m_pack": 1, "rows": 128, "warpgroups": 1}, "spills"),
    ("S", "sm_90a", {"ov_depth": 64, "m_pack": 1, "rows": 128, "warpgroups": 1}, "no kernel"),
    # Here it works: the one point where the rule is a choice. With one part there is nothing to pack, to exchange or to combine.
    ("S", "sm_100a", {"ov_depth": 64, "m_pack": 1, "rows": 128}, ""),
]


@pytest.mark.parametrize(("mode", "arch", "fields", "found"), PACKS)
def test_packs_of_one_and_eight(mode: str, arch: str, fields: dict[str, Any], found: str) -> None:
    config = Config.model_construct(**fields_of(mode, fields, arch) | {"arch": (arch,)})
    with disabled_rules(*all_rules()):
        assert outcome(config, arch) == found


def test_every_geometry_rule_is_shown() -> None:
    """Every rule that a geometry checks for sm_100a, and those of the fields that it builds on."""
    sources = "".join((Path(render.__file__).parent / name).read_text() for name in ("geometry_sm100.py", "geometry.py"))
    checked = set(re.findall(r'^ +"([a-z-]+)",$|require\(.*?, "([a-z-]+)",', sources, re.MULTILINE))
    rules = {rule for pair in checked for rule in pair if rule} & set(RULES)
    assert {"block-keys", "tmem-columns", "smem-bytes", "ring-floor", "epilogue-arena", "ring-walk"} <= rules
    rules |= {"pack-fills-warpgroup", "equal-depths", "key-split-depth"}
    assert rules - {rule for rule, *_ in TIGHT} == {"arch-enabled", "split-key-tiles"}  # of targets and launches
