// fa4_ws_exchange4: reduction of one value per row over the parts of a warpgroup, one barrier.
//
// Generated from templates/functions/exchange4.cuh.j2 for config d128_fp8 on sm_100a.
// Do not edit: change the template or the config, then run
//     fa4gen emit --config d128_fp8.yaml
#pragma once

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

#ifndef FA4_ADD_FTZ
#define FA4_ADD_FTZ
// a + b, rounded to nearest. The explicit .rn keeps ptxas from contracting it into an FMA. PTX ISA "add".
__device__ __forceinline__ float ptx_add_ftz(float a, float b) {
    float d;
    asm("add.rn.ftz.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
    return d;
}
#endif  // FA4_ADD_FTZ

// exchange: 4-way reduction across the parts of one softmax warpgroup.
//
// m_pack * rows = 4 * 32 = 128 threads, so (partition_g, local_row) names each thread once and each of the 128 float slots once.
// Shuffles stay inside a warp and the 4 partials of a row live in 4 different warps: they meet in shared memory. Every thread writes
// its own partial and reads all 4 of its row; there is no designated reducer and no broadcast.
//
// Why one barrier is enough. Let p = exchange_seq & 1. Exchange i writes buffer p, waits, reads buffer p. A warp that runs ahead writes
// buffer 1 - p in exchange i+1, which nobody reads before exchange i+1's barrier. To touch p again it must be in exchange i+2, past the
// barrier of i+1; a slower warp arrives at that barrier only after it has finished reading p in exchange i. So no warp is ever two
// exchanges ahead, and two buffers suffice. A second barrier would only lengthen the critical path of every key tile.
//
// The argument needs exchange_seq to count every exchange of the warpgroup and never to restart: the row-sum exchange after the key loop
// continues the count, or it could reuse the buffer that a slow warp still reads.
//
// The left fold over g = 0 .. 3 has the same order in every thread, so all warps of the warpgroup hold bit-identical results: a vote
// on the row maximum comes out the same in each of them, and their partial sums stay in one scale.
//
// local_row      query row of this thread, 0 .. 31
// partition_g    part of the warpgroup this thread belongs to, 0 .. 3
// warp_group_idx 0 or 1; also the id of the barrier, which 128 threads use
// exchange_seq   exchanges this warpgroup has made before
// xchg_smem      2048 bytes: [warpgroup 2][buffer 2][128] float
__device__ __forceinline__ float fa4_ws_exchange4_max(float partial, unsigned local_row, unsigned partition_g,
                                                      unsigned warp_group_idx, unsigned exchange_seq, float* xchg_smem) {
    float* buffer = xchg_smem + (warp_group_idx * 2 + (exchange_seq & 1)) * 128;
    buffer[partition_g * 32 + local_row] = partial;
    // Orders every write of this exchange before every read of it, and the reads of exchange_seq - 1 before the writes of exchange_seq + 1.
    ptx_bar_sync(warp_group_idx, 128);
    float result = buffer[local_row];
    result = ptx_max_ftz(result, buffer[32 + local_row]);
    result = ptx_max_ftz(result, buffer[64 + local_row]);
    result = ptx_max_ftz(result, buffer[96 + local_row]);
    return result;
}

__device__ __forceinline__ float fa4_ws_exchange4_add(float partial, unsigned local_row, unsigned partition_g,
                                                      unsigned warp_group_idx, unsigned exchange_seq, float* xchg_smem) {
    float* buffer = xchg_smem + (warp_group_idx * 2 + (exchange_seq & 1)) * 128;
    buffer[partition_g * 32 + local_row] = partial;
    // Orders every write of this exchange before every read of it, and the reads of exchange_seq - 1 before the writes of exchange_seq + 1.
    ptx_bar_sync(warp_group_idx, 128);
    float result = buffer[local_row];
    result = ptx_add_ftz(result, buffer[32 + local_row]);
    result = ptx_add_ftz(result, buffer[64 + local_row]);
    result = ptx_add_ftz(result, buffer[96 + local_row]);
    return result;
}
