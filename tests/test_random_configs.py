"""Random configs: each is refused with a rule's name, or renders, compiles without spills and passes its unit kernels on the emulator.

Equal sources are compiled and run once. The draws lean towards the edges of legality: a legal config, then a few fields changed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from fa4gen.codegen import units
from fa4gen.codegen.backends import Compiled
from fa4gen.codegen.backends.emulator import EmulatorBackend
from fa4gen.codegen.compiler import Module, compile_source
from fa4gen.codegen.config import Config, ConfigError, parse_config
from fa4gen.codegen.geometry import all_rules, derive
from fa4gen.codegen.render import render

# A hundred take some 20 seconds of compiling; FA4GEN_SWEEP=1 draws as many as a sweep has time for. Fewer shards meet more rules each.
EXAMPLES = 2000 if "FA4GEN_SWEEP" in os.environ else 240
# Run on several workers; each shard has a seed of its own, so that the examples are the same everywhere.
SHARDS = 2


def sound(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields that other fields decide."""
    depth = fields["ov_depth"] if fields["shared_key"] else min(fields["ov_depth"], 128)
    return fields | {"rows": 128 // fields["m_pack"], "ov_depth": depth}


# A config that is legal, but for the combinations that only geometry refuses.
SOUND = st.fixed_dictionaries(
    {
        "name": st.just("random"),
        "ov_depth": st.sampled_from([64, 128, 256, 512]),
        "shared_key": st.booleans(),
        "m_pack": st.sampled_from([2, 4]),
    },
    optional={
        "use_fma": st.booleans(),
        "arch": st.sampled_from([["sm_90a"], ["sm_100a"], ["sm_100a", "sm_90a"]]),
        "dtype": st.sampled_from(["bfloat16", "float16"]),
        "out_dtype": st.sampled_from(["bfloat16", "float16", "float32"]),
        "mask": st.sampled_from(["none", "causal"]),
        "warpgroups": st.sampled_from([1, 2]),
    },
).map(sound)

EDGES: dict[str, st.SearchStrategy[Any]] = {
    "rows": st.sampled_from([16, 32, 64, 128, "32"]),
    "qk_depth": st.sampled_from([64, 128, 256, 512]),
    "block_keys": st.sampled_from([16, 63, 64, 96, 128, 256, 512]),
    "ring_slots": st.integers(0, 14),
    "tile_rows": st.sampled_from([4, 8, 16, 32, 64]),
    "group": st.integers(-1, 12),
    "warpgroups": st.sampled_from([1, 2, 3, True]),
    "ctas_per_sm": st.sampled_from([0, 1, 5, True]),
    "shared_key": st.sampled_from([True, False, 1, "true"]),
    "ov_depth": st.sampled_from([32, 64, 128, 192, 256, 512, 1024]),
    "arch": st.sampled_from([[], ["sm_90a", "sm_90a"], ["sm_80"], "sm_90a"]),
    "out_dtype": st.sampled_from(["float64", "bfloat16", None]),
    "mask": st.sampled_from(["causal", "window"]),
    "allow_spills": st.sampled_from([[], ["unit_combine"], ["not a name"]]),
    "name": st.sampled_from(["random", "Random", "", "../random"]),
    "ring_slot": st.just(4),
}


@st.composite
def configs(draw: Callable[..., Any]) -> dict[str, Any]:
    fields: dict[str, Any] = dict(draw(SOUND))
    for key in draw(st.lists(st.sampled_from(sorted(EDGES)), max_size=2)):
        fields[key] = draw(EDGES[key])
    return fields


@cache
def compiled(source: str, arch: str, file: str) -> Module:
    return compile_source(source, arch, file)


_ran: set[tuple[str, str]] = set()


def check_units(config: Config, arch: str, module: Module) -> None:
    """Runs the unit kernels of a source on the emulator, the first time it is seen."""
    if (module.source, arch) in _ran:
        return
    backend = EmulatorBackend()
    for case in units.cases(config, derive(config, arch)):
        outcome = backend.run(Compiled(arch, module.ptx), case.launch)
        assert outcome.hazards == [], case.entry
        verdict = case.judge()
        assert verdict.ok, (case.entry, verdict)
    _ran.add((module.source, arch))


def parsed(fields: dict[str, Any]) -> Config | ConfigError:
    try:
        return parse_config(fields)
    except ConfigError as error:
        return error


def check_config(fields: dict[str, Any]) -> str:
    """The rule that refuses a config, or "legal" once everything it generates has been checked."""
    config = parsed(fields)
    if isinstance(config, ConfigError):
        assert config.rule in all_rules()
        assert len(str(config).splitlines()) == 1
        return config.rule
    for arch in config.arch:
        for file, source in render(config, arch).items():
            if file.endswith(".cu"):
                module = compiled(source, arch, file)
                spilled = {name for name, kernel in module.kernels.items() if kernel.spill_store_bytes or kernel.spill_load_bytes}
                assert not spilled - set(config.allow_spills)
                if file == "unit.cu":
                    check_units(config, arch, module)
    return "legal"


@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_configs(shard: int) -> None:
    outcomes: Counter[str] = Counter()

    @hypothesis.seed(shard)
    @settings(max_examples=EXAMPLES // SHARDS, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @hypothesis.given(configs())
    def draw_and_check(fields: dict[str, Any]) -> None:
        outcomes[check_config(fields)] += 1

    draw_and_check()
    # The draws must reach both sides, and many of the rules.
    assert sum(outcomes.values()) >= EXAMPLES // SHARDS
    assert outcomes["legal"] >= EXAMPLES // SHARDS // 5
    assert len(outcomes) > 8
