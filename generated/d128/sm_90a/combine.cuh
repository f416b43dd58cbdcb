// fa4_ws_intracta_combine: LSE merge of the key partitions of a warpgroup, one barrier.
//
// Generated from templates/functions/combine.cuh.j2 for config d128 on sm_90a.
// Do not edit: change the template or the config, then run
//     fa4gen emit --config d128.yaml
#pragma once

#ifndef FA4_FUNCTIONS_OUTPUT_TYPE_CUH
#define FA4_FUNCTIONS_OUTPUT_TYPE_CUH
typedef unsigned short fa4_bf16;  // the bits of a bfloat16
#endif  // FA4_FUNCTIONS_OUTPUT_TYPE_CUH

#ifndef FA4_BAR_SYNC
#define FA4_BAR_SYNC
// Waits until `threads` threads (whole warps) have arrived at barrier `id` of this CTA; orders their shared-memory accesses.
// PTX ISA "bar".
__device__ __forceinline__ void ptx_bar_sync(unsigned id, unsigned threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
#endif  // FA4_BAR_SYNC

#ifndef FA4_MAX_FTZ
#define FA4_MAX_FTZ
// max(a, b); a NaN loses to a number, subnormal inputs count as zero. PTX ISA "max".
__device__ __forceinline__ float ptx_max_ftz(float a, float b) {
    float d;
    asm("max.ftz.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
    return d;
}
#endif  // FA4_MAX_FTZ

#ifndef FA4_SUB_RN
#define FA4_SUB_RN
// a - b, rounded to nearest, subnormals kept. PTX ISA "sub".
__device__ __forceinline__ float ptx_sub_rn(float a, float b) {
    float d;
    asm("sub.rn.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
    return d;
}
#endif  // FA4_SUB_RN

#ifndef FA4_EX2_APPROX_FTZ
#define FA4_EX2_APPROX_FTZ
// 2^x, approximate (at most 2 ulp), subnormals flushed; 2^-inf = +0. PTX ISA "ex2".
__device__ __forceinline__ float ptx_ex2_approx_ftz(float x) {
    float d;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
    return d;
}
#endif  // FA4_EX2_APPROX_FTZ

#ifndef FA4_RCP_APPROX_FTZ
#define FA4_RCP_APPROX_FTZ
// 1 / x, approximate (at most 1 ulp), subnormals flushed. PTX ISA "rcp".
__device__ __forceinline__ float ptx_rcp_approx_ftz(float x) {
    float d;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
    return d;
}
#endif  // FA4_RCP_APPROX_FTZ

#ifndef FA4_MUL_FTZ
#define FA4_MUL_FTZ
// a * b, rounded to nearest, subnormals flushed. The explicit .rn keeps ptxas from contracting it into an FMA. PTX ISA "mul".
__device__ __forceinline__ float ptx_mul_ftz(float a, float b) {
    float d;
    asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
    return d;
}
#endif  // FA4_MUL_FTZ

#ifndef FA4_FMA_FTZ
#define FA4_FMA_FTZ
// a * b + c, rounded once, subnormals flushed. PTX ISA "fma".
__device__ __forceinline__ float ptx_fma_ftz(float a, float b, float c) {
    float d;
    asm("fma.rn.ftz.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
    return d;
}
#endif  // FA4_FMA_FTZ

#ifndef FA4_ADD_RN
#define FA4_ADD_RN
// a + b, rounded to nearest, subnormals kept. PTX ISA "add".
__device__ __forceinline__ float ptx_add_rn(float a, float b) {
    float d;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
    return d;
}
#endif  // FA4_ADD_RN

#ifndef FA4_MUL_RN
#define FA4_MUL_RN
// a * b, rounded to nearest, subnormals kept. PTX ISA "mul".
__device__ __forceinline__ float ptx_mul_rn(float a, float b) {
    float d;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
    return d;
}
#endif  // FA4_MUL_RN

#ifndef FA4_FMA_RN
#define FA4_FMA_RN
// a * b + c, rounded once, subnormals kept. PTX ISA "fma".
__device__ __forceinline__ float ptx_fma_rn(float a, float b, float c) {
    float d;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
    return d;
}
#endif  // FA4_FMA_RN

#ifndef FA4_CVT_BF16X2
#define FA4_CVT_BF16X2
// Rounds two floats to bfloat16 (nearest even) and packs them: `low` in bits 0-15, `high` in bits 16-31. PTX ISA "cvt".
__device__ __forceinline__ unsigned ptx_cvt_bf16x2(float low, float high) {
    unsigned d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}
#endif  // FA4_CVT_BF16X2

#ifndef FA4_FUNCTIONS_ACCUMULATOR_CUH_64
#define FA4_FUNCTIONS_ACCUMULATOR_CUH_64
// Columns [column, column + 64) of this thread's accumulator lane. The accumulator is an image of tensor memory in shared memory,
// [column][128 lanes] float, so that a warp reads 32 neighbouring words.
__device__ __forceinline__ void fa4_accumulator_load_x64(const float* accumulator, unsigned column, float* regs) {
    const unsigned lane = threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < 64; ++i) regs[i] = accumulator[(column + i) * 128 + lane];
}
#endif  // FA4_FUNCTIONS_ACCUMULATOR_CUH_64

// combine: merges the 4 key partitions of one warpgroup into one normalised tile of 32 query rows x 128 depth.
//
// The 4 packed parts of the accumulator are independent key partitions over the same query rows. Thread (g, row) holds partition g's
// unnormalised O_g[row][0 .. 127] in its accumulator lane, and its row maximum m_g and row sum l_g. With the partitions in different warps
// the merge has to go through shared memory:
//
//     m = max_g m_g    scale_g = 2^((m_g - m) * scale_log2e)    l = sum_g scale_g l_g    out = (sum_g scale_g O_g) / l
//
// Each part then produces the depth columns [g * 32, g * 32 + 32) of its row, 128 / m_pack = 32 of them.
//
// The order of operations is the contract: equal inputs give equal bits on every target and on the emulator.
// An empty partition brings m_g = -inf, l_g = 0 and a finite O_g: its scale is 0 and it adds 0 * O_g = 0. At least one partition has keys.
//
// local_row, partition_g  thread = partition_g * 32 + local_row
// warp_group_idx          id of the barrier, which 128 threads use
// own_max, own_sum        m_g in raw score units, l_g
// scale_log2e             softmax scale * log2(e)
// o_tmem                  accumulator image in shared memory
// stage_smem              65536 bytes: raw O, [g 4][depth / 4 = 32][row 32][4] float, so that the threads of a warp touch neighbouring 16 bytes
// maxsum_smem             1024 bytes: [g 4][row 32][m, l] float
// o_smem                  output, [depth / 8 = 16][row 32][8], 16 bytes a block: the layout an unswizzled TMA store reads
// returns                 {m, l} of the row, equal in all parts
__device__ __forceinline__ float2 fa4_ws_intracta_combine(unsigned local_row, unsigned partition_g, unsigned warp_group_idx,
                                                          float own_max, float own_sum, float scale_log2e,
                                                          const float* o_tmem, float* stage_smem,
                                                          float* maxsum_smem, fa4_bf16* o_smem) {
    float4* stage = reinterpret_cast<float4*>(stage_smem);
    float2* maxsum = reinterpret_cast<float2*>(maxsum_smem);

#pragma unroll
    for (unsigned column = 0; column < 128; column += 64) {
        float o[64];
        fa4_accumulator_load_x64(o_tmem, column, o);
#pragma unroll
        for (unsigned i = 0; i < 64; i += 4)
            stage[(partition_g * 32 + (column + i) / 4) * 32 + local_row] = make_float4(o[i], o[i + 1], o[i + 2], o[i + 3]);
    }
    maxsum[partition_g * 32 + local_row] = make_float2(own_max, own_sum);

    // Orders every part's staging before every part's reads.
    ptx_bar_sync(warp_group_idx, 128);

    const float2 ml0 = maxsum[0 + local_row];
    const float2 ml1 = maxsum[32 + local_row];
    const float2 ml2 = maxsum[64 + local_row];
    const float2 ml3 = maxsum[96 + local_row];
    const float m = ptx_max_ftz(ptx_max_ftz(ptx_max_ftz(ml0.x, ml1.x), ml2.x), ml3.x);
    const float scale0 = ptx_ex2_approx_ftz(ptx_mul_ftz(ptx_sub_rn(ml0.x, m), scale_log2e));
    const float scale1 = ptx_ex2_approx_ftz(ptx_mul_ftz(ptx_sub_rn(ml1.x, m), scale_log2e));
    const float scale2 = ptx_ex2_approx_ftz(ptx_mul_ftz(ptx_sub_rn(ml2.x, m), scale_log2e));
    const float scale3 = ptx_ex2_approx_ftz(ptx_mul_ftz(ptx_sub_rn(ml3.x, m), scale_log2e));
    // The two lanes of the packed form that sm_100a uses, one after the other: the same operations, the same bits.
    const float l02 = ptx_fma_rn(scale2, ml2.y, ptx_mul_rn(scale0, ml0.y));
    const float l13 = ptx_fma_rn(scale3, ml3.y, ptx_mul_rn(scale1, ml1.y));
    const float l = ptx_add_rn(l02, l13);
    const float inverse_l = ptx_rcp_approx_ftz(l);

#pragma unroll
    for (unsigned block = 0; block < 4; ++block) {
        const unsigned out_block = partition_g * 4 + block;
        float o[8];
#pragma unroll
        for (unsigned i = 0; i < 8; i += 4) {
            const unsigned row_quad = (out_block * 8 + i) / 4 * 32 + local_row;
            const float4 o0 = stage[0 + row_quad];
            const float4 o1 = stage[1024 + row_quad];
            const float4 o2 = stage[2048 + row_quad];
            const float4 o3 = stage[3072 + row_quad];
            o[i + 0] = ptx_mul_ftz(scale0, o0.x);
            o[i + 1] = ptx_mul_ftz(scale0, o0.y);
            o[i + 2] = ptx_mul_ftz(scale0, o0.z);
            o[i + 3] = ptx_mul_ftz(scale0, o0.w);
            o[i + 0] = ptx_fma_ftz(scale1, o1.x, o[i + 0]);
            o[i + 1] = ptx_fma_ftz(scale1, o1.y, o[i + 1]);
            o[i + 2] = ptx_fma_ftz(scale1, o1.z, o[i + 2]);
            o[i + 3] = ptx_fma_ftz(scale1, o1.w, o[i + 3]);
            o[i + 0] = ptx_fma_ftz(scale2, o2.x, o[i + 0]);
            o[i + 1] = ptx_fma_ftz(scale2, o2.y, o[i + 1]);
            o[i + 2] = ptx_fma_ftz(scale2, o2.z, o[i + 2]);
            o[i + 3] = ptx_fma_ftz(scale2, o2.w, o[i + 3]);
            o[i + 0] = ptx_fma_ftz(scale3, o3.x, o[i + 0]);
            o[i + 1] = ptx_fma_ftz(scale3, o3.y, o[i + 1]);
            o[i + 2] = ptx_fma_ftz(scale3, o3.z, o[i + 2]);
            o[i + 3] = ptx_fma_ftz(scale3, o3.w, o[i + 3]);
        }
#pragma unroll
        for (unsigned i = 0; i < 8; ++i) o[i] = ptx_mul_ftz(o[i], inverse_l);
        reinterpret_cast<uint4*>(o_smem)[out_block * 32 + local_row] =
            make_uint4(ptx_cvt_bf16x2(o[0], o[1]), ptx_cvt_bf16x2(o[2], o[3]), ptx_cvt_bf16x2(o[4], o[5]), ptx_cvt_bf16x2(o[6], o[7]));
    }
    return make_float2(m, l);
}
