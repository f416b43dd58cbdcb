"""Host time of fa4gen.attention on warm caches, beside the launch call inside it: python bench/host_time.py, with a GPU and torch."""

import time
from collections.abc import Callable

import torch

from fa4gen.codegen import api, driver
from fa4gen.codegen.api import attention


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
print(f"torch.empty                 {microseconds(lambda: torch.empty(q.shape, dtype=q.dtype, device=q.device)):.2f} us")
print(f"attention(q, k, v)          {microseconds(lambda: attention(q, k, v)):.2f} us")
print(f"attention(q, k, v, out=out) {microseconds(lambda: attention(q, k, v, out=out)):.2f} us")
plan = next(reversed(api._plans.values()))
with driver.LOCK:
    print(f"its cuLaunchKernelEx        {microseconds(lambda: plan._launch.enqueue(plan._table, 0)):.2f} us")
