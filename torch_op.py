"""`torch.ops.fa4gen.attention`: fa4gen.attention as a torch custom op, which torch.compile and export can trace.

Importing this module registers the op; it needs torch. The op returns (out, lse).
"""

from __future__ import annotations

from typing import Any

try:
    import torch
except ImportError as error:
    raise ImportError("fa4gen.torch_op needs torch") from error

from .codegen.api import attention as _attention


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_table: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    num_splits: int | None = None,
    split_size: int | None = None,
    page_places: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """fa4gen.attention with return_lse; its arguments mean the same."""
    result: tuple[torch.Tensor, torch.Tensor] = _attention(
        *(q, k, v),
        block_table=block_table,
        seqused_k=seqused_k,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        causal=causal,
        window=window,
        softcap=softcap,
        sinks=sinks,
        scale=scale,
        k_scale=k_scale,
        v_scale=v_scale,
        num_splits=num_splits,
        split_size=split_size,
        page_places=page_places,
        return_lse=True,
    )
    return result


def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0])
    # As fa4gen.attention makes them: contiguous, whatever the layout of q.
    return q.new_empty(q.shape), q.new_empty(shape, dtype=torch.float32)


_op = torch.library.custom_op("fa4gen::attention", attention, mutates_args=(), device_types="cuda")
_op.register_fake(_fake)
