"""The serving features on hardware against float64: layouts x masks x types, every group and q_len, random lengths with 0 and 1 among them.

Outputs are poisoned, and so is what lies past each sequence's end. Each test is a kernel (one config) and all the shapes that it is run on.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from .test_attention_features import FP8, FP8_PAGES, LISTED, PAGED, RAGGED, FeatureProblem, compiled, config, source

LAYOUTS: dict[str, dict[str, Any]] = {
    "contiguous": {"key_lengths": True},
    "ragged": RAGGED,
    **{f"pages of {page}": PAGED | {"page_size": page} for page in (1, 16, 32, 64, 128, 256)},
    "pages of 16, listed": LISTED | {"page_size": 16},
    "pages of 64, listed": LISTED | {"page_size": 64},
    "pages of 16, ragged": RAGGED | PAGED | {"page_size": 16},
}
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"mask": "causal"},
    "window": {"mask": "causal", "window": 90},
    "sinks and softcap": {"mask": "causal", "sinks": True, "softcap": 20.0},
    "exact": {"mask": "causal", "rescale": "exact"},
}
TYPES: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "float16": {"dtype": "float16", "out_dtype": "float16"},
    "e4m3": FP8,
    "e4m3, scales of pages": FP8_PAGES,
}
KERNELS = [
    (layout, mask, kind)
    for layout, mask, kind in itertools.product(LAYOUTS, MASKS, TYPES)
    if "page_size" in LAYOUTS[layout] or "kv_scale" not in TYPES[kind]
]
GROUPS = (1, 2, 4, 5, 6, 7, 8, 12, 16)
QUERIES = (1, 2, 4, 8, 17)


@pytest.mark.gpu
@pytest.mark.parametrize(("layout", "mask", "kind"), KERNELS)
def test_random_lengths(layout: str, mask: str, kind: str) -> None:
    from fa4gen.codegen.backends.cuda import CudaBackend

    fields = LAYOUTS[layout] | MASKS[mask] | TYPES[kind]
    # A page's row of 64 bytes is too small a copy; several chunks of a page's V are one copy, of which depth 64 has one.
    page = fields.get("page_size")
    kernel = config(128 if page in (16, 32) or (page == 1 and "kv_dtype" in fields) else 64, **fields)
    module, gpu = compiled(source(kernel)), CudaBackend(repeats=0)
    rng = np.random.Generator(np.random.PCG64([list(LAYOUTS).index(layout), list(MASKS).index(mask)]))
    for number, (group, q_len) in enumerate(itertools.product(GROUPS, QUERIES)):
        lengths = [int(keys) for keys in rng.integers(0, 300, 3)]
        lengths[number % 3] = number % 2
        queries = [q_len, int(rng.integers(0, q_len + 1)), q_len] if "ragged" in layout else [q_len] * 3
        options: dict[str, Any] = ({}, {"partition_keys": 64}, {"partition_keys": 128})[number % 3]
        problem = FeatureProblem(kernel, queries, lengths, group, 1, seed=number, heads_first=number % 4 == 0)
        gpu.run(module, problem.launch(**options))
        problem.check()
