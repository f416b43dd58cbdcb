"""The truncating accumulation model against what an H200's wgmma and mma.sync gave for the same operands, bit for bit.

One CTA per class of values multiplies a 64 x 64 by an 8 x 64 matrix in four steps of 16, on top of an accumulator: once by wgmma
m64n8k16, once by mma.sync m16n8k16. `python tests/emulator/test_tensor_core_h200.py` on such a GPU writes the stored results anew.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fa4gen.codegen import compiler
from fa4gen.codegen.backends import Compiled, Launch
from fa4gen.codegen.backends.cuda import CudaBackend, device_arch
from fa4gen.codegen.emulator import Program, Uninitialized
from fa4gen.codegen.emulator.tensor_core import truncated_dot, widen
from fa4gen.codegen.files import npz, write_whole

STORED = Path(__file__).parent.parent / "data" / "h200_tensor_core.npz"
FORMATS = {"bf16": (8, 7), "f16": (5, 10)}  # bits of exponent and fraction
M, N, K, STEP = 64, 8, 64, 16

# Class -> lowest and highest exponent of the operands' values, the same of the accumulator's, and what is special.
CLASSES: dict[str, tuple[int, int, int, int, str]] = {
    "one exponent": (0, 0, 0, 0, ""),
    "near": (-2, 2, -3, 6, ""),
    "spread": (-7, 7, -12, 14, ""),
    "far apart": (-12, 12, -24, 24, ""),
    "large accumulator": (-6, 0, 15, 25, ""),
    "small accumulator": (0, 6, -30, -10, ""),
    "no accumulator": (-4, 4, 0, 0, "zero accumulator"),
    "half zeros": (-4, 4, -4, 4, "zeros"),
    "subnormal operands": (-4, 4, -20, -10, "subnormal operands"),
    "subnormal results": (-72, -66, -149, -120, ""),
    "cancelling": (-3, 3, -3, 3, "cancelling"),
    "positive": (-3, 3, -3, 3, "positive"),
    "special": (-3, 3, -3, 3, "infinities and NaN"),
}
KERNEL = r"""
// One CTA of 128 threads a class. a [class][64][64], b [class][8][64], c, by_wgmma, by_mma [class][64][8]
extern "C" __global__ void __launch_bounds__(128) multiply_TYPE(const uint4* a, const uint4* b, const float* c, float* by_wgmma,
                                                                    float* by_mma) {
    // Rows of 128 bytes, their 16-byte units exchanged as the 128-byte swizzle has them.
    __shared__ __align__(1024) uint4 a_tile[64 * 8], b_tile[8 * 8];
    const unsigned thread = threadIdx.x, warp = thread / 32, group = thread % 32 / 4, pair = thread % 4;
    a += blockIdx.x * 64 * 8, b += blockIdx.x * 8 * 8, c += blockIdx.x * 512, by_wgmma += blockIdx.x * 512, by_mma += blockIdx.x * 512;
    for (unsigned unit = thread; unit < 64 * 8; unit += 128) a_tile[unit ^ (unit / 8 % 8)] = a[unit];
    if (thread < 8 * 8) b_tile[thread ^ (thread / 8)] = b[thread];
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    const unsigned at = (16 * warp + group) * 8 + 2 * pair;
    float d[4] = {c[at], c[at + 1], c[at + 64], c[at + 65]}, e[4] = {c[at], c[at + 1], c[at + 64], c[at + 65]};

    const unsigned long long swizzled = 1ull << 62 | (1024ull >> 4) << 32 | 1ull << 16;
    // One asm statement: nothing may touch d between the fence and the wait.
    const unsigned long long a_operand = swizzled | (unsigned)__cvta_generic_to_shared(a_tile) >> 4;
    const unsigned long long b_operand = swizzled | (unsigned)__cvta_generic_to_shared(b_tile) >> 4;
    asm volatile("wgmma.fence.sync.aligned;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n8k16.f32.TYPE.TYPE {%0, %1, %2, %3}, %4, %8, 1, 1, 1, 0, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n8k16.f32.TYPE.TYPE {%0, %1, %2, %3}, %5, %9, 1, 1, 1, 0, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n8k16.f32.TYPE.TYPE {%0, %1, %2, %3}, %6, %10, 1, 1, 1, 0, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n8k16.f32.TYPE.TYPE {%0, %1, %2, %3}, %7, %11, 1, 1, 1, 0, 0;\n\t"
                 "wgmma.commit_group.sync.aligned;\n\twgmma.wait_group.sync.aligned 0;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "l"(a_operand), "l"(a_operand + 2), "l"(a_operand + 4), "l"(a_operand + 6), "l"(b_operand), "l"(b_operand + 2),
                   "l"(b_operand + 4), "l"(b_operand + 6)
                 : "memory");

    const unsigned* a_words = reinterpret_cast<const unsigned*>(a) + (16 * warp + group) * 32 + pair;
    const unsigned* b_words = reinterpret_cast<const unsigned*>(b) + group * 32 + pair;
#pragma unroll
    for (unsigned step = 0; step < 4; ++step) {
        const unsigned* x = a_words + 8 * step;
        const unsigned* y = b_words + 8 * step;
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.TYPE.TYPE.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(e[0]), "+f"(e[1]), "+f"(e[2]), "+f"(e[3])
                     : "r"(x[0]), "r"(x[256]), "r"(x[4]), "r"(x[260]), "r"(y[0]), "r"(y[4]));
    }
    by_wgmma[at] = d[0], by_wgmma[at + 1] = d[1], by_wgmma[at + 64] = d[2], by_wgmma[at + 65] = d[3];
    by_mma[at] = e[0], by_mma[at + 1] = e[1], by_mma[at + 64] = e[2], by_mma[at + 65] = e[3];
}
"""


def bits(rng: np.random.PCG64, shape: tuple[int, ...], lowest: int, highest: int, exponent_bits: int, fraction_bits: int) -> np.ndarray:
    """Bit patterns of values with exponents from lowest to highest, any fraction and sign; what is too small is subnormal or 0."""
    raw = rng.random_raw(int(np.prod(shape))).reshape(shape)
    bias = (1 << exponent_bits - 1) - 1
    exponent = (raw >> np.uint64(32)).astype(np.int64) % (highest - lowest + 1) + lowest + bias
    fraction = (raw & np.uint64((1 << fraction_bits) - 1)).astype(np.int64)
    # Below the smallest normal number the leading 1 becomes part of the fraction.
    shift = np.maximum(1 - exponent, 0)
    small = (fraction | 1 << fraction_bits) >> np.minimum(shift, 62)
    size = np.where(exponent > 0, np.clip(exponent, 0, 2 * bias) << fraction_bits | fraction, small)
    return size | (raw >> np.uint64(63)).astype(np.int64) << exponent_bits + fraction_bits


def operands(fmt: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """a [class][64][64] and b [class][8][64] as uint16, c [class][64][8] float32; drawn from a bit generator, the same everywhere."""
    exponent_bits, fraction_bits = FORMATS[fmt]
    made: list[tuple[np.ndarray, ...]] = []
    for number, (lowest, highest, c_lowest, c_highest, special) in enumerate(CLASSES.values()):
        rng = np.random.PCG64(number)
        a, b = (bits(rng, shape, lowest, highest, exponent_bits, fraction_bits) for shape in ((M, K), (N, K)))
        c = bits(rng, (M, N), c_lowest, c_highest, 8, 23)
        sign, top = 1 << 15, ((1 << exponent_bits) - 1) << fraction_bits
        chance = rng.random_raw(a.size).reshape(a.shape) % np.uint64(64)
        if special == "zero accumulator":
            c[:] = 0
        elif special == "zeros":
            a[chance < 32] &= sign
        elif special == "subnormal operands":
            a = a & (sign | (1 << fraction_bits) - 1)
        elif special == "cancelling":
            a[:, 1::2], b[:, 1::2] = a[:, ::2] ^ sign, b[:, ::2]
            a[:, 1::2] ^= (chance[:, 1::2] < 8).astype(np.int64)
        elif special == "positive":
            a, b, c = a & ~sign, b & ~sign, c & 0x7FFFFFFF
        elif special == "infinities and NaN":
            a[(chance == 0) & (np.arange(M)[:, None] < 32)] = top
            b[3, 5], b[5, 40] = top | sign, top | 1
            c[::7, 1], c[::9, 2] = 0x7F800000, 0xFFC00001
        made.append((a.astype(np.uint16), b.astype(np.uint16), c.astype(np.uint32).view(np.float32)))
    a, b, c = (np.stack(arrays) for arrays in zip(*made, strict=True))
    return a, b, c


def module(fmt: str) -> compiler.Module:
    return compiler.compile_source(KERNEL.replace("TYPE", fmt), "sm_90a", "multiply.cu")


def launch(fmt: str) -> tuple[Launch, np.ndarray, np.ndarray]:
    """The launch over all classes and its outputs by wgmma and by mma.sync."""
    a, b, c = operands(fmt)
    by_wgmma, by_mma = np.zeros_like(c), np.zeros_like(c)
    return Launch(f"multiply_{fmt}", (len(CLASSES), 1, 1), (128, 1, 1), 0, (a, b, c, by_wgmma, by_mma)), by_wgmma, by_mma


def different(got: np.ndarray, want: np.ndarray) -> dict[str, int]:
    """Class -> how many results differ in any bit."""
    wrong = (got.view(np.uint32) != want.view(np.uint32)).sum(axis=(1, 2))
    return {name: int(count) for name, count in zip(CLASSES, wrong, strict=True) if count}


@pytest.fixture(scope="module")
def stored() -> dict[str, np.ndarray]:
    with np.load(STORED) as archive:
        return dict(archive)


@pytest.mark.parametrize("instruction", ["wgmma", "mma"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_the_model_is_what_an_h200_computes(stored: dict[str, np.ndarray], fmt: str, instruction: str) -> None:
    a, b, c = operands(fmt)
    assert [int(x.view(np.uint16).astype(np.uint64).sum()) for x in (a, b, c)] == stored[f"{fmt}_inputs"].tolist()
    with np.errstate(invalid="ignore"):  # signalling NaNs
        a, b = widen(a, fmt), widen(b, fmt)
    for step in range(0, K, STEP):
        c = truncated_dot(a[..., step : step + STEP], b[..., step : step + STEP], c, fmt, fmt)
    assert different(c, stored[f"{fmt}_{instruction}"]) == {}


@pytest.mark.skipif(compiler.nvrtc_version() is None, reason="NVRTC is not installed")
@pytest.mark.parametrize("fmt", FORMATS)
def test_the_emulator_gives_the_same_bits_in_that_mode_and_others_in_the_exact_one(stored: dict[str, np.ndarray], fmt: str) -> None:
    program = Program.from_ptx(module(fmt).ptx)
    for tensor_cores in ("truncating", "exact"):
        job, by_wgmma, by_mma = launch(fmt)
        args = (*job.args[:3], Uninitialized(by_wgmma), Uninitialized(by_mma))
        assert program.launch(job.entry, job.grid, job.block, 0, args, tensor_cores=tensor_cores).hazards == []
        wrong = different(by_wgmma, stored[f"{fmt}_wgmma"]) | different(by_mma, stored[f"{fmt}_mma"])
        assert bool(wrong) == (tensor_cores == "exact"), wrong


def on_device(fmt: str) -> tuple[np.ndarray, np.ndarray]:
    compiled = module(fmt)
    job, by_wgmma, by_mma = launch(fmt)
    CudaBackend(repeats=1).run(Compiled("sm_90a", compiled.ptx, compiled.cubin), job)
    return by_wgmma, by_mma


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_gpu_gives_what_is_stored(stored: dict[str, np.ndarray], fmt: str) -> None:
    if device_arch() != "sm_90a":
        pytest.skip(f"the GPU is {device_arch()}; wgmma is for sm_90a")
    by_wgmma, by_mma = on_device(fmt)
    assert (different(by_wgmma, stored[f"{fmt}_wgmma"]), different(by_mma, stored[f"{fmt}_mma"])) == ({}, {})


if __name__ == "__main__":
    results: dict[str, np.ndarray] = {}
    for each in FORMATS:
        results[f"{each}_inputs"] = np.array([x.view(np.uint16).astype(np.uint64).sum() for x in operands(each)])
        results |= dict(zip((f"{each}_wgmma", f"{each}_mma"), (x.view(np.uint32) for x in on_device(each)), strict=True))
    write_whole(STORED, npz(results))
