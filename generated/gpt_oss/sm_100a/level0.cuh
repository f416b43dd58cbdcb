// fa4_ws_level0_band: reads a warp's own depth band of the shared accumulator, no barrier.
//
// Generated from templates/functions/level0.cuh.j2 for config gpt_oss on sm_100a.
// Do not edit: change the template or the config, then run
//     fa4gen emit --config gpt_oss.yaml
#pragma once

#ifndef FA4_FUNCTIONS_ACCUMULATOR_CUH_16
#define FA4_FUNCTIONS_ACCUMULATOR_CUH_16
#ifndef FA4_TCGEN05_LD_16
#define FA4_TCGEN05_LD_16
// Reads 16 columns of this thread's tensor-memory lane, starting at `tmem`. The registers wait by data dependence: no wait::ld is
// needed to use them. One whole warp executes it, every lane with the same address. PTX ISA "tcgen05.ld", shape .32x32b.
__device__ __forceinline__ void ptx_tcgen05_ld_x16(unsigned tmem, float* regs) {
    asm volatile(
        "tcgen05.ld.sync.aligned.32x32b.x16.b32 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, "
        "%8, %9, %10, %11, %12, %13, %14, %15"
        "}, [%16];"
        :
          "=f"(regs[0]), "=f"(regs[1]), "=f"(regs[2]), "=f"(regs[3]), "=f"(regs[4]), "=f"(regs[5]), "=f"(regs[6]), "=f"(regs[7]),
          "=f"(regs[8]), "=f"(regs[9]), "=f"(regs[10]), "=f"(regs[11]), "=f"(regs[12]), "=f"(regs[13]), "=f"(regs[14]), "=f"(regs[15])
        : "r"(tmem));
}
#endif  // FA4_TCGEN05_LD_16

// Columns [column, column + 16) of this thread's accumulator lane. The accumulator is tensor memory: every warp passes the same column
// address, and the hardware routes each warp to its own 32 lanes.
__device__ __forceinline__ void fa4_accumulator_load_x16(unsigned accumulator, unsigned column, float* regs) {
    ptx_tcgen05_ld_x16(accumulator + column, regs);
}
#endif  // FA4_FUNCTIONS_ACCUMULATOR_CUH_16

// level 0: this warp's own depth band of O, unnormalised, as it is.
//
// In shared-key mode one MMA writes one accumulator, and the 4 packed parts of it are depth bands of the same result: the band is final.
// There is nothing to fold, no maximum to agree on (the exchange of every key tile has made it equal everywhere), and no barrier is
// missing: the warps read disjoint lanes and pass nothing to each other.
//
// A 32-row accumulator of pv_mma_n = 64 columns fills 64 / m_pack = 16 physical columns, and each part of the lanes holds its own share of the
// depth there. So every warp reads the SAME column address; adding an offset per warp would read a neighbour's band. Which depth the
// band starts at is the reader's arithmetic: depth tile * 64 + partition_g * 16.
//
// Call once per output depth tile (1 here), with the accumulator advanced by 16 columns each time.
// The caller has made O visible (waited on its producer's barrier, then tcgen05.fence::after_thread_sync). There is no wait::ld here: the
// registers wait by data dependence, and whoever next overwrites the tensor memory waits for the loads.
//
// o_tmem  tensor-memory address of this depth tile's accumulator
// o_band  receives 16 floats: O[local_row][band] before normalisation
__device__ __forceinline__ void fa4_ws_level0_band(unsigned o_tmem, float (&o_band)[16]) {
    fa4_accumulator_load_x16(o_tmem, 0, o_band + 0);
}
