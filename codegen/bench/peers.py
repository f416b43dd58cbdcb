"""Other implementations of the same attention, where they are installed: torch's SDPA backends and flex attention, FlashAttention-3,
FlashInfer, and a split-KV kernel in Triton written for this comparison. The one file that imports them; every import may fail.

A peer gets the layout that suits it, prepared before it is timed: contiguous heads for SDPA, flex attention and Triton, narrowed to the
keys in sight of any query where the peer has no window of its own; pages of 64 keys for FlashInfer. Where the cell has pages, those that
take pages get the cell's, and the others are out; the same goes for softcap and sinks. Query rows of a KV head are packed (position-major)
where the peer has no grouped heads of its own.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from importlib import import_module, metadata
from typing import Any, NamedTuple

import numpy as np

from ..backends.cuda import DeviceArray
from ..text import one_line
from .cells import Cell

MAX_REASON = 160

torch: Any = None
triton: Any = None
tl: Any = None
_MISSING: dict[str, str] = {}


def _reason(error: Exception) -> str:
    """An exception in one short line: its first line, paths cut to file names, since reports travel."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = re.sub(r"(?:/[\w.+@-]+)+/([\w.+@-]+)", r"\1", f"{type(error).__name__}: {lines[0]}")
    return one_line(text)[:MAX_REASON]


def _import(name: str, package: str) -> Any:
    try:
        return import_module(name)
    except Exception as error:  # a binary that does not fit raises what it likes
        _MISSING[package] = _reason(error)
        return None


torch = _import("torch", "torch")
if torch is not None and not torch.cuda.is_available():
    _MISSING["torch"] = "this torch sees no CUDA device"
    torch = None
triton = _import("triton", "triton") if torch is not None else None
tl = _import("triton.language", "triton") if triton is not None else None

PAGE_KEYS = 64
FLEX_QUERIES = 128  # queries of a block of flex attention's masks
FLASHINFER_WORKSPACE_BYTES = 256 << 20
MAX_DRAFT = 32  # queries whose mask fits in the one word that is built here

Time = Callable[[Callable[[], Any]], float]  # device seconds of what the callable enqueues


class PeerError(Exception):
    """A peer that was asked for and cannot be had, or a name that is none; the message is one line."""


class Refused(Exception):
    """A peer that does not take this problem; the message says why in one line."""


class _Package(NamedTuple):
    """What a peer imports, and the distribution that holds it."""

    module: str
    distribution: str


_SDPA = _Package("torch", "torch")
_PACKAGES = {
    "sdpa-cudnn": _SDPA,
    "sdpa-flash": _SDPA,
    "sdpa-efficient": _SDPA,
    "flex": _Package("torch.nn.attention.flex_attention", "torch"),
    "fa3": _Package("fa3_fwd_interface", "fa3-fwd"),
    "flashinfer-tc": _Package("flashinfer", "flashinfer-python"),
    "flashinfer-cc": _Package("flashinfer", "flashinfer-python"),
    "flashinfer-xqa": _Package("flashinfer", "flashinfer-python"),
    "triton-split": _Package("triton", "triton"),
}
NAMES = tuple(_PACKAGES)


def installed() -> tuple[dict[str, str], dict[str, str]]:
    """Peers that can be used here with their package and version, and those that cannot with the reason."""
    usable, missing = {}, {}
    for name, package in _PACKAGES.items():
        if torch is None:
            missing[name] = f"torch: {_MISSING['torch']}"
        elif _import(package.module, package.distribution) is None:
            missing[name] = f"{package.distribution}: {_MISSING[package.distribution]}"
        else:
            try:
                version = metadata.version(package.distribution)
            except metadata.PackageNotFoundError:
                version = "unknown version"
            usable[name] = f"{package.distribution} {version}"
    return usable, missing


def choose(asked: str) -> tuple[dict[str, str], dict[str, str]]:
    """Peers to measure, with versions, and those left out, with reasons. asked: "auto" (all installed), "none", or names with commas.

    Raises PeerError for an unknown name, and for one that is asked for and cannot be used.
    """
    if asked == "none":
        return {}, {}
    if asked == "auto":
        return installed()
    names = [name.strip() for name in asked.split(",")]
    for name in names:
        if name not in NAMES:
            raise PeerError(one_line(f"--peers: {name[:40]!r} is no peer; use auto, none, or some of {', '.join(NAMES)}"))
    usable, missing = installed()
    for name in names:
        if name in missing:
            raise PeerError(one_line(f"--peers: {name} cannot be used: {missing[name]}"))
    return {name: usable[name] for name in NAMES if name in names}, {}


# --- a problem as torch tensors ------------------------------------------------------------------------------------------------


def _tensor(array: DeviceArray) -> Any:
    tensor = torch.as_tensor(array, device="cuda")
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.int16 else tensor


class Tensors:
    """q, k, v of a problem as torch tensors that share its memory, and copies in other layouts, made when first used."""

    def __init__(
        self,
        cell: Cell,
        q: DeviceArray,
        k: DeviceArray,
        v: DeviceArray,
        *,
        scale: float,
        causal: bool,
        sms: int,
        time: Time,
        pages: tuple[DeviceArray, DeviceArray] | None = None,
        table: np.ndarray | None = None,
        sinks: np.ndarray | None = None,
    ) -> None:
        self.cell, self.scale, self.causal, self.sms, self.time = cell, scale, causal, sms, time
        self.q, self.k, self.v = (_tensor(array) for array in (q, k, v))
        self.sinks = None if sinks is None else torch.from_numpy(sinks).cuda()
        self._pages = None if pages is None else tuple(_tensor(array) for array in pages)
        self._table = None if table is None else torch.from_numpy(table).cuda()
        self.page_size = cell.page_size or PAGE_KEYS

    @cached_property
    def packed_q(self) -> Any:
        """[batch, kv_heads, q_len * group, depth], row = position * group + head of the group."""
        cell = self.cell
        split = self.q.view(cell.batch, cell.q_len, cell.kv_heads, cell.group, cell.depth)
        return split.permute(0, 2, 1, 3, 4).reshape(cell.batch, cell.kv_heads, cell.q_len * cell.group, cell.depth).contiguous()

    @cached_property
    def head_kv(self) -> tuple[Any, Any]:
        """k and v as contiguous [batch, kv_heads, keys, depth]."""
        return self.k.transpose(1, 2).contiguous(), self.v.transpose(1, 2).contiguous()

    @property
    def first_key(self) -> int:
        """The first key in sight of any query."""
        window = self.cell.window
        return 0 if window is None else max(self.cell.keys - self.cell.q_len + 1 - window, 0)

    @property
    def kv_in_sight(self) -> tuple[Any, Any]:
        """head_kv from first_key on: views, since all sequences have the same length."""
        k, v = self.head_kv
        return k[:, :, self.first_key :], v[:, :, self.first_key :]

    @cached_property
    def pages(self) -> tuple[Any, Any]:
        """k and v as [batch * pages, page_size, kv_heads, depth]; a copy only where the keys do not fill the last page."""
        if self._pages is not None:
            k, v = self._pages
            return k, v
        short = -self.cell.keys % PAGE_KEYS
        whole = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, short)) if short else x for x in (self.k, self.v))
        k, v = (x.reshape(-1, PAGE_KEYS, *x.shape[2:]) for x in whole)
        return k, v

    @cached_property
    def table(self) -> Any:
        """[batch, pages of a sequence] int32: the pages of each sequence."""
        if self._table is not None:
            return self._table
        per_sequence = -(-self.cell.keys // PAGE_KEYS)
        return torch.arange(self.cell.batch * per_sequence, dtype=torch.int32, device=self.q.device).view(self.cell.batch, per_sequence)

    @cached_property
    def visible(self) -> Any:
        """[1, 1, q_len * group, keys in sight] bool: what the rows of packed_q see of kv_in_sight; None where that is everything."""
        cell = self.cell
        if not self.causal or cell.q_len == 1:
            return None
        key = torch.arange(self.first_key, cell.keys, device=self.q.device)
        last = (cell.keys - cell.q_len + torch.arange(cell.q_len, device=self.q.device)).repeat_interleave(cell.group)[:, None]
        seen = key <= last
        return (seen if cell.window is None else seen & (key > last - cell.window))[None, None]

    def unpack(self, out: Any) -> Any:
        """[batch, kv_heads, q_len * group, depth] back to [batch, q_len, heads, depth]."""
        cell = self.cell
        split = out.reshape(cell.batch, cell.kv_heads, cell.q_len, cell.group, cell.depth)
        return split.permute(0, 2, 1, 3, 4).reshape(cell.batch, cell.q_len, cell.heads, cell.depth)


def _fastest(
    tensors: Tensors, ways: Iterable[tuple[Callable[[], Callable[[], Any]], str]], *, enough: int | None = None
) -> tuple[Callable[[], Any], str]:
    """The fastest of some ways to run a peer, and its note; ways: what makes the run, and a note. Those that fail are out.

    enough: so many that work are tried, None: all. Raises Refused where all fail.
    """
    found: list[tuple[float, Callable[[], Any], str]] = []
    failure = ""
    for make, note in ways:
        if enough is not None and len(found) >= enough:
            break
        try:
            run = make()
            run()
            torch.cuda.synchronize()
            found.append((tensors.time(run), run, note))
        except Exception as error:  # too much shared memory, a compiler failure
            torch.cuda.synchronize()
            failure = _reason(error)
    if not found:
        raise Refused(failure)
    _, run, note = min(found, key=lambda way: way[0])
    return run, note


class Peer:
    """A peer ready to run on one problem. `note`: the settings that were tuned, in words."""

    def __init__(self, name: str, run: Callable[[], Any], canonical: Callable[[Any], Any], note: str = "") -> None:
        self.name, self.note = name, note
        self._run, self._canonical = run, canonical
        self._last: Any = None

    def enqueue(self) -> None:
        self._last = self._run()

    def output(self) -> np.ndarray | None:
        """O of the last launch, [batch, q_len, heads, depth] float32."""
        array: np.ndarray = self._canonical(self._last).float().cpu().numpy()
        return array


def prepare(name: str, tensors: Tensors) -> Peer:
    """A peer on a problem, after a first run. Raises Refused where it does not take the problem."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            peer = _PREPARE[name](name, tensors)
            peer.enqueue()
            torch.cuda.synchronize()
    except Refused:
        raise
    except Exception as error:  # each library has its own ways to say no
        torch.cuda.synchronize()  # raises where the device itself is lost
        raise Refused(_reason(error)) from error
    return peer


def release() -> None:
    """Gives torch's cached device memory back to the driver."""
    if torch is not None:
        torch.cuda.empty_cache()


# --- libraries -----------------------------------------------------------------------------------------------------------------


def _sdpa(backend: str, name: str, tensors: Tensors) -> Peer:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    cell = tensors.cell
    for feature, asked in (("pages", cell.page_size), ("softcap", cell.softcap), ("sinks", cell.sinks)):
        if asked:
            raise Refused(f"it has no {feature}")
    q, (k, v), scale, visible = tensors.packed_q, tensors.kv_in_sight, tensors.scale, tensors.visible
    chosen = getattr(SDPBackend, backend)

    def run() -> Any:
        with sdpa_kernel(chosen):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)

    return Peer(name, run, tensors.unpack)


def _flex_options(cell: Cell) -> list[dict[str, int]]:
    """Kernel options of flex attention, the first that work: more loads under way than it asks for itself, and its own."""
    tile_keys = min(64 if cell.depth <= 256 else 32, cell.page_size or PAGE_KEYS)
    return [{"BLOCK_N": tile_keys, "num_warps": 4, "num_stages": 3}, {}]


def _flex_pages(flex: Any, tensors: Tensors) -> tuple[Any, Any, Any]:
    """K and V [1, kv_heads, pages * page_size, depth], and the block mask that names each sequence's pages in sight, a page a block."""
    cell, table, size, device = tensors.cell, tensors.table, tensors.page_size, tensors.q.device
    k, v = (x.flatten(0, 1).transpose(0, 1)[None] for x in tensors.pages)
    pages = k.shape[2] // size
    # By page: the sequence that it belongs to, and its place there.
    owner = torch.full((pages,), -1, dtype=torch.int32, device=device)
    place = torch.zeros((pages,), dtype=torch.int32, device=device)
    sequence, index = (torch.arange(length, dtype=torch.int32, device=device) for length in table.shape)
    flat = table.flatten().long()
    owner[flat] = sequence.repeat_interleave(table.shape[1])
    place[flat] = index.repeat(table.shape[0])
    causal, window, last = tensors.causal, cell.window, cell.keys - cell.q_len

    def seen(batch: Any, head: Any, query: Any, key: Any) -> Any:
        page = key // size
        position = place[page] * size + key % size
        inside = (owner[page] == batch) & (position < cell.keys)
        if causal:
            inside = inside & (position <= query + last)
        return inside if window is None else inside & (position > query + last - window)

    first_page = tensors.first_key // size
    listed = table[:, first_page:]
    rows = -(-cell.q_len // FLEX_QUERIES)
    indices = torch.zeros((cell.batch, 1, rows, pages), dtype=torch.int32, device=device)
    indices[..., : listed.shape[1]] = listed[:, None, None]
    counts = torch.full((cell.batch, 1, rows), listed.shape[1], dtype=torch.int32, device=device)
    # Listed as blocks to be masked, since the kernel shares out these by their number, but full ones by all keys of all sequences.
    whole = (not causal or cell.q_len == 1) and cell.keys % size == 0 and tensors.first_key % size == 0
    mask = flex.BlockMask.from_kv_blocks(
        counts, indices, BLOCK_SIZE=(FLEX_QUERIES, size), mask_mod=None if whole else seen, seq_lengths=(cell.q_len, pages * size)
    )
    return k, v, mask


def _flex_keys(flex: Any, tensors: Tensors) -> tuple[Any, Any, Any]:
    """K and V [batch, kv_heads, keys in sight, depth], and the block mask, None where every query sees them all."""
    cell, (k, v) = tensors.cell, tensors.kv_in_sight
    if not tensors.causal or cell.q_len == 1:
        return k, v, None
    window, last = cell.window, k.shape[2] - cell.q_len

    def seen(batch: Any, head: Any, query: Any, key: Any) -> Any:
        inside = key <= query + last
        return inside if window is None else inside & (key > query + last - window)

    return k, v, flex.create_block_mask(seen, None, None, cell.q_len, k.shape[2], device=k.device)


def _flex(name: str, tensors: Tensors) -> Peer:
    flex = import_module("torch.nn.attention.flex_attention")
    cell, q, sinks = tensors.cell, tensors.q.transpose(1, 2), tensors.sinks
    if not (cell.page_size or cell.window or cell.softcap or cell.sinks or (tensors.causal and cell.q_len > 1)):
        # Compiled for seconds, for each cell anew.
        raise Refused("there is no feature to compile for: see SDPA")
    k, v, mask = (_flex_keys if cell.page_size is None else _flex_pages)(flex, tensors)
    cap = cell.softcap or 0.0

    def capped(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
        # cap * tanh(score / cap), by the exponential function, for which the GPU has an instruction
        return cap - 2 * cap / (1 + torch.exp(score * (2 / cap)))

    options: dict[str, Any] = {"score_mod": capped if cap else None, "block_mask": mask, "scale": tensors.scale, "enable_gqa": True}
    if sinks is not None:
        options["return_aux"] = flex.AuxRequest(lse=True)
    torch.compiler.reset()  # what was compiled for other cells counts towards a limit

    def compiled(kernel: dict[str, int]) -> Callable[[], Any]:
        def attend(q: Any, k: Any, v: Any) -> Any:
            result = flex.flex_attention(q, k, v, kernel_options=kernel, **options)
            if sinks is None:
                return result
            # A sink is a key without a value: it takes its share of each row's sum.
            out, more = result
            return (out * torch.sigmoid(more.lse - sinks[:, None])[..., None]).to(q.dtype)

        attend = torch.compile(attend, dynamic=False, fullgraph=True)
        return lambda: attend(q, k, v)

    ways = [(partial(compiled, kernel), ", ".join(f"{key} {value}" for key, value in kernel.items())) for kernel in _flex_options(cell)]
    run, note = _fastest(tensors, ways, enough=1)
    return Peer(name, run, lambda out: out.transpose(1, 2), note or "its own options")


def _fa3(name: str, tensors: Tensors) -> Peer:
    attend = import_module("fa3_fwd_interface").flash_attn_with_kvcache
    cell, q = tensors.cell, tensors.q
    if cell.sinks:
        raise Refused("it has no sinks")
    options: dict[str, Any] = {"softmax_scale": tensors.scale, "causal": tensors.causal, "pack_gqa": True}
    if cell.page_size is not None:
        options["page_table"] = tensors.table
    if cell.key_lengths or cell.page_size is not None:
        options["cache_seqlens"] = torch.full((cell.batch,), cell.keys, dtype=torch.int32, device="cuda")
    if cell.window is not None:
        options["window_size"] = (cell.window - 1, 0)
    if cell.softcap is not None:
        options["softcap"] = cell.softcap
    k, v = (tensors.k, tensors.v) if cell.page_size is None else tensors.pages
    return Peer(name, lambda: attend(q, k, v, **options), lambda out: out)


def _flashinfer(tensor_cores: bool, name: str, tensors: Tensors) -> Peer:
    flashinfer = import_module("flashinfer")
    cell, kind, device = tensors.cell, tensors.q.dtype, tensors.q.device
    workspace = torch.empty(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    if cell.sinks and not tensor_cores:
        raise Refused("its decode kernel has no sinks")
    if cell.sinks and cell.softcap is not None:
        raise Refused("its kernel with sinks has no softcap")
    per_sequence = -(-cell.keys // tensors.page_size)
    first_page = torch.arange(cell.batch + 1, dtype=torch.int32, device=device) * per_sequence
    page = tensors.table.flatten()
    last_keys = torch.full((cell.batch,), cell.keys - (per_sequence - 1) * tensors.page_size, dtype=torch.int32, device=device)
    sizes = (cell.heads, cell.kv_heads, cell.depth, tensors.page_size)
    types = {"q_data_type": kind, "kv_data_type": kind, "sm_scale": tensors.scale}
    if cell.window is not None:
        types["window_left"] = cell.window - 1
    if cell.softcap is not None:
        types["logits_soft_cap"] = cell.softcap
    q = tensors.q.view(cell.batch * cell.q_len, cell.heads, cell.depth)
    more: tuple[Any, ...] = ()
    if cell.q_len == 1 and not cell.sinks:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=tensor_cores)
        wrapper.plan(first_page, page, last_keys, *sizes, **types)
    elif tensor_cores:
        module: dict[str, Any] = {}
        if tensors.sinks is not None:
            module, more = _sink_module(kind, cell), (tensors.sinks, tensors.scale)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2", **module)
        first_query = torch.arange(cell.batch + 1, dtype=torch.int32, device=device) * cell.q_len
        wrapper.plan(first_query, first_page, page, last_keys, *sizes, causal=tensors.causal, **types)
    else:
        raise Refused("its decode kernel takes one query")
    pages = tensors.pages
    return Peer(name, lambda: wrapper.run(q, pages, *more), lambda out: out.view(tensors.q.shape))


def _sink_module(kind: Any, cell: Cell) -> dict[str, Any]:
    """Arguments that make FlashInfer's paged wrapper that with sinks, as BatchAttentionWithAttentionSinkWrapper does.

    That class names its module without the depth, so that two depths share one; the name here is that of the prebuilt modules.
    """
    attention = import_module("flashinfer.jit.attention")
    source = import_module("flashinfer.jit.attention.variants").attention_sink_decl["fa2"]
    window, types, depths = cell.window is not None, (kind, kind, kind, torch.int32), (cell.depth, cell.depth)
    uri = attention.get_batch_prefill_attention_sink_uri("fa2", *types, *depths, 0, window)
    arguments = [uri, *types, *depths, ["sink"], ["float"], ["sm_scale"], ["double"], "AttentionSink", source]
    return {"jit_args": arguments, "jit_kwargs": {"use_sliding_window": window}}


def _draft_mask(cell: Cell, causal: bool) -> np.ndarray:
    """[batch, q_len, 2] uint16: a bit for each of the last q_len keys that a query sees, the lowest first, 32 to a query."""
    rows = np.array([(1 << (query + 1 if causal else cell.q_len)) - 1 for query in range(cell.q_len)], np.uint32)
    return np.tile(rows.view(np.uint16).reshape(1, cell.q_len, 2), (cell.batch, 1, 1))


def _flashinfer_xqa(name: str, tensors: Tensors) -> Peer:
    attend = import_module("flashinfer.decode").xqa_batch_decode_with_kv_cache
    cell, device = tensors.cell, tensors.q.device
    if cell.softcap is not None:
        raise Refused("it has no softcap")
    if cell.q_len > 1 and cell.window is not None:
        raise Refused("its window is the last query's for all queries")
    if cell.q_len > MAX_DRAFT:
        raise Refused(f"more than {MAX_DRAFT} queries")
    # Counters lie in it, and each launch leaves them at zero.
    workspace = torch.zeros(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    lengths = torch.full((cell.batch,), cell.keys, dtype=torch.int32, device=device).view(torch.uint32)
    options = {
        "bmm1_scale": tensors.scale,
        "window_left": -1 if cell.window is None else cell.window - 1,
        "sinks": tensors.sinks,
        "q_len_per_req": cell.q_len,
        "mask": None if cell.q_len == 1 else torch.from_numpy(_draft_mask(cell, tensors.causal)).to(device),
    }
    q, pages, table = tensors.q.view(cell.batch * cell.q_len, cell.heads, cell.depth), tensors.pages, tensors.table
    most = table.shape[1] * tensors.page_size
    return Peer(name, lambda: attend(q, pages, workspace, table, lengths, most, **options), lambda out: out.view(tensors.q.shape))


# --- split-KV in Triton --------------------------------------------------------------------------------------------------------
# Triton evaluates every annotation of a kernel, so only constexpr parameters have one.


def _split_kernel(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    out,
    partial_o,
    partial_lse,
    sinks,
    table,
    keys,
    partition_keys,
    q_len,
    scale_log2e,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    MERGED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    PAGE: tl.constexpr,
):
    """One partition of one KV head: its normalised O and log2 LSE to the partials, or O itself where there is one partition."""
    partition, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, column, key = tl.arange(0, TILE_ROWS), tl.arange(0, DEPTH), tl.arange(0, TILE_KEYS)
    valid = (row < ROWS)[:, None]
    queries = tl.load(q + (head * ROWS + row)[:, None] * DEPTH + column[None, :], mask=valid, other=0.0)
    origin = 0
    if WINDOW > 0:
        # Partitions share out the keys in sight of any row.
        origin = tl.maximum(keys - q_len + 1 - WINDOW, 0) // TILE_KEYS * TILE_KEYS
    first = origin + partition * partition_keys
    end = tl.minimum(keys, first + partition_keys)
    maximum = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    accumulated = tl.zeros([TILE_ROWS, DEPTH], tl.float32)
    k_head, v_head = k + head * keys * DEPTH, v + head * keys * DEPTH
    if PAGE > 0:
        sequence_pages = table + head // KV_HEADS * ((keys + PAGE - 1) // PAGE)
        k_head, v_head = k + head % KV_HEADS * DEPTH, v + head % KV_HEADS * DEPTH
    for start in range(first, end, TILE_KEYS):
        at = start + key
        inside = at < end
        offset = at.to(tl.int64) * DEPTH
        if PAGE > 0:
            page = tl.load(sequence_pages + at // PAGE, mask=inside, other=0).to(tl.int64)
            offset = (page * PAGE + at % PAGE) * (KV_HEADS * DEPTH)
        k_tile = tl.load(k_head + offset[None, :] + column[:, None], mask=inside[None, :], other=0.0)
        scores = tl.dot(queries, k_tile) * scale_log2e
        if SOFTCAP > 0:
            # tanh(x) = 1 - 2 / (1 + e^2x), in units of log2.
            scores = SOFTCAP * 1.4426950408889634 * (1 - 2 / (1 + tl.exp2(scores * (2 / SOFTCAP))))
        visible = inside[None, :]
        if CAUSAL:
            visible = visible & (at[None, :] <= (keys - q_len + row // GROUP)[:, None])
            if WINDOW > 0:
                visible = visible & (at[None, :] > (keys - q_len - WINDOW + row // GROUP)[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        grown = tl.maximum(maximum, tl.max(scores, 1))
        safe = tl.where(grown == float("-inf"), 0.0, grown)
        p = tl.exp2(scores - safe[:, None])
        factor = tl.exp2(maximum - safe)
        total = total * factor + tl.sum(p, 1)
        v_tile = tl.load(v_head + offset[:, None] + column[None, :], mask=inside[:, None], other=0.0)
        accumulated = tl.dot(p.to(v_tile.dtype), v_tile, accumulated * factor[:, None])
        maximum = grown
    if SINKS:
        # A sink is a key without a value; the first partition has it.
        sink = tl.load(sinks + head % KV_HEADS * GROUP + row % GROUP) * 1.4426950408889634
        sink = tl.where(partition == 0, sink, float("-inf"))
        grown = tl.maximum(maximum, sink)
        safe = tl.where(grown == float("-inf"), 0.0, grown)
        factor = tl.exp2(maximum - safe)
        total = total * factor + tl.exp2(sink - safe)
        accumulated = accumulated * factor[:, None]
        maximum = grown
    result = accumulated / tl.where(total > 0.0, total, 1.0)[:, None]
    if MERGED:
        slot = (head * tl.num_programs(0) + partition) * TILE_ROWS + row
        tl.store(partial_o + slot[:, None] * DEPTH + column[None, :], result, mask=valid)
        tl.store(partial_lse + slot, maximum + tl.log2(total))
    else:
        tl.store(out + (head * ROWS + row)[:, None] * DEPTH + column[None, :], result.to(out.dtype.element_ty), mask=valid)


def _merge_kernel(  # type: ignore[no-untyped-def]
    partial_o,
    partial_lse,
    out,
    partitions,
    ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    MOST_PARTITIONS: tl.constexpr,
):
    """One query row of one KV head: the partials weighted by their LSE."""
    row, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    partition, column = tl.arange(0, MOST_PARTITIONS), tl.arange(0, DEPTH)
    first = head * partitions * TILE_ROWS + row
    lse = tl.load(partial_lse + first + partition * TILE_ROWS, mask=partition < partitions, other=float("-inf"))
    maximum = tl.max(lse, 0)
    safe = tl.where(maximum == float("-inf"), 0.0, maximum)
    weight_sum = tl.sum(tl.exp2(lse - safe), 0)
    total = tl.zeros([DEPTH], tl.float32)
    for index in range(partitions):
        weight = tl.exp2(tl.load(partial_lse + first + index * TILE_ROWS) - safe)
        total += weight * tl.load(partial_o + (first + index * TILE_ROWS) * DEPTH + column)
    result = total / tl.where(weight_sum > 0.0, weight_sum, 1.0)
    tl.store(out + (head * ROWS + row) * DEPTH + column, result.to(out.dtype.element_ty))


class Variant(NamedTuple):
    """Meta-parameters of the Triton kernel: keys of a tile, warps, pipeline stages."""

    tile_keys: int
    warps: int
    stages: int


VARIANTS = (
    Variant(16, 4, 3),
    Variant(32, 4, 2),
    Variant(32, 4, 3),
    Variant(32, 8, 3),
    Variant(64, 4, 2),
    Variant(64, 8, 2),
    Variant(128, 8, 2),
)
WAVES = (1, 2, 4)
MAX_TRITON_ROWS = 128

_split: Any = None
_merge: Any = None
if triton is not None:
    # Sizes that differ between cells are not specialised on: one compilation a variant.
    _split = triton.jit(_split_kernel, do_not_specialize=["keys", "partition_keys", "q_len"])
    _merge = triton.jit(_merge_kernel, do_not_specialize=["partitions"])


def _triton_runner(tensors: Tensors, variant: Variant, partitions: int) -> Callable[[], Any]:
    cell, q = tensors.cell, tensors.packed_q
    k, v = tensors.head_kv if cell.page_size is None else tensors.pages
    # Their address is never read where the cell has none.
    sinks, table = (q if array is None else array for array in (tensors.sinks, None if cell.page_size is None else tensors.table))
    heads, rows = cell.batch * cell.kv_heads, cell.q_len * cell.group
    tile_rows = max(16, triton.next_power_of_2(rows))
    keys = cell.keys
    if cell.window is not None:
        keys -= max(cell.keys - cell.q_len + 1 - cell.window, 0) // variant.tile_keys * variant.tile_keys
    partition_keys = -(-keys // partitions // variant.tile_keys) * variant.tile_keys
    partition_keys = max(partition_keys, variant.tile_keys)
    while partition_keys * partitions < keys:
        partition_keys += variant.tile_keys
    partitions = -(-keys // partition_keys)
    merged = partitions > 1
    out = torch.empty_like(q)
    partial_o = torch.empty((heads, partitions, tile_rows, cell.depth) if merged else (1,), dtype=torch.float32, device="cuda")
    partial_lse = torch.empty((heads, partitions, tile_rows) if merged else (1,), dtype=torch.float32, device="cuda")
    scale_log2e = tensors.scale * math.log2(math.e)
    shape = {"ROWS": rows, "TILE_ROWS": tile_rows, "DEPTH": cell.depth}
    most = triton.next_power_of_2(partitions)

    def run() -> Any:
        _split[(partitions, heads)](
            *(q, k, v, out, partial_o, partial_lse, sinks, table, cell.keys, partition_keys, cell.q_len, scale_log2e),
            **shape,
            GROUP=cell.group,
            TILE_KEYS=variant.tile_keys,
            CAUSAL=tensors.causal,
            MERGED=merged,
            KV_HEADS=cell.kv_heads,
            WINDOW=cell.window or 0,
            SOFTCAP=cell.softcap or 0,
            SINKS=cell.sinks,
            PAGE=cell.page_size or 0,
            num_warps=variant.warps,
            num_stages=variant.stages,
        )
        if merged:
            _merge[(rows, heads)](partial_o, partial_lse, out, partitions, **shape, MOST_PARTITIONS=most)
        return out

    return run


def partition_counts(cell: Cell, sms: int) -> list[int]:
    """Numbers of partitions worth trying: those that fill the SMs for each of WAVES, from below and from above."""
    heads = cell.batch * cell.kv_heads
    wanted = {rounded for waves in WAVES for rounded in (sms * waves // heads, -(-sms * waves // heads))}
    in_sight = cell.keys if cell.window is None else min(cell.keys, cell.window + cell.q_len)
    most = max(1, in_sight // min(variant.tile_keys for variant in VARIANTS))
    return sorted({min(max(1, count), most) for count in wanted})


def _triton_split(name: str, tensors: Tensors, variants: Sequence[Variant] = VARIANTS) -> Peer:
    cell = tensors.cell
    if cell.q_len * cell.group > MAX_TRITON_ROWS:
        raise Refused(f"more than {MAX_TRITON_ROWS} query rows a KV head")
    runs = (
        (
            partial(_triton_runner, tensors, variant, count),
            f"{variant.tile_keys} keys, {variant.warps} warps, {variant.stages} stages, {count} partitions",
        )
        for variant in variants
        for count in partition_counts(cell, tensors.sms)
    )
    run, note = _fastest(tensors, runs)
    return Peer(name, run, tensors.unpack, note)


_PREPARE: dict[str, Callable[[str, Tensors], Peer]] = {
    "sdpa-cudnn": partial(_sdpa, "CUDNN_ATTENTION"),
    "sdpa-flash": partial(_sdpa, "FLASH_ATTENTION"),
    "sdpa-efficient": partial(_sdpa, "EFFICIENT_ATTENTION"),
    "flex": _flex,
    "fa3": _fa3,
    "flashinfer-tc": partial(_flashinfer, True),
    "flashinfer-cc": partial(_flashinfer, False),
    "flashinfer-xqa": _flashinfer_xqa,
    "triton-split": _triton_split,
}
