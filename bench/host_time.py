"""Host time of fa4gen.attention on warm caches, beside the launch call inside it: python bench/host_time.py, with a GPU and torch."""

import time
from collections.abc import Callable

import torch

from fa4gen.codegen.api import GENERATED, attention


def microseconds(call: Callable[[], object], repeats: int = 500) -> float:
    """Median of 9 rounds; the queue is drained before each so that a full one does not count."""
    rounds = []
    for _ in range(9):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        rounds.append((time.perf_counter() - start) / repeats * 1e6)
    return sorted(rounds)[4]


q = torch.randn(1, 1, 8, 128, device="cuda", dtype=torch.bfloat16)
k, v = (torch.randn(1, 64, 1, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
out = torch.empty_like(q)
attention(q, k, v)
attention(q, k, v, out=out)
print(f"torch.empty_like(q)         {microseconds(lambda: torch.empty_like(q)):.2f} us")
print(f"attention(q, k, v)          {microseconds(lambda: attention(q, k, v)):.2f} us")
print(f"attention(q, k, v, out=out) {microseconds(lambda: attention(q, k, v, out=out)):.2f} us")
ready = GENERATED.latest
assert ready is not None
print(f"its cuLaunchKernelEx        {microseconds(ready.enqueue_again):.2f} us")
