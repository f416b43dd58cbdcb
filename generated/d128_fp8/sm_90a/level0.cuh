// fa4_ws_level0_band: reads a warp's own depth band of the shared accumulator, no barrier.
//
// Generated from templates/functions/level0.cuh.j2 for config d128_fp8 on sm_90a.
// Do not edit: change the template or the config, then run
//     fa4gen emit --config d128_fp8.yaml
#pragma once

#ifndef FA4_FUNCTIONS_ACCUMULATOR_CUH_32
#define FA4_FUNCTIONS_ACCUMULATOR_CUH_32
// Columns [column, column + 32) of this thread's accumulator lane. The accumulator is an image of tensor memory in shared memory,
// [column][128 lanes] float, so that a warp reads 32 neighbouring words.
__device__ __forceinline__ void fa4_accumulator_load_x32(const float* accumulator, unsigned column, float* regs) {
    const unsigned lane = threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < 32; ++i) regs[i] = accumulator[(column + i) * 128 + lane];
}
#endif  // FA4_FUNCTIONS_ACCUMULATOR_CUH_32

// level 0: this warp's own depth band of O, unnormalised, as it is.
//
// In shared-key mode one MMA writes one accumulator, and the 4 packed parts of it are depth bands of the same result: the band is final.
// There is nothing to fold, no maximum to agree on (the exchange of every key tile has made it equal everywhere), and no barrier is
// missing: the warps read disjoint lanes and pass nothing to each other.
//
// A 32-row accumulator of pv_mma_n = 128 columns fills 128 / m_pack = 32 physical columns, and each part of the lanes holds its own share of the
// depth there. So every warp reads the SAME column address; adding an offset per warp would read a neighbour's band. Which depth the
// band starts at is the reader's arithmetic: depth tile * 128 + partition_g * 32.
//
// Call once per output depth tile (1 here), with the accumulator advanced by 32 columns each time.
//
// o_tmem  this depth tile's columns of the accumulator image in shared memory
// o_band  receives 32 floats: O[local_row][band] before normalisation
__device__ __forceinline__ void fa4_ws_level0_band(const float* o_tmem, float (&o_band)[32]) {
    fa4_accumulator_load_x32(o_tmem, 0, o_band + 0);
}
