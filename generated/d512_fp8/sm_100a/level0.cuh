// fa4_ws_level0_band: reads a warp's own depth band of the shared accumulator, no barrier.
//
// Generated from templates/functions/level0.cuh.j2 for config d512_fp8 on sm_100a.
// Do not edit: change the template or the config, then run
//     fa4gen emit --config d512_fp8.yaml
#pragma once

#ifndef FA4_FUNCTIONS_ACCUMULATOR_CUH_64
#define FA4_FUNCTIONS_ACCUMULATOR_CUH_64
#ifndef FA4_TCGEN05_LD_64
#define FA4_TCGEN05_LD_64
// Reads 64 columns of this thread's tensor-memory lane, starting at `tmem`. The registers wait by data dependence: no wait::ld is
// needed to use them. One whole warp executes it, every lane with the same address. PTX ISA "tcgen05.ld", shape .32x32b.
__device__ __forceinline__ void ptx_tcgen05_ld_x64(unsigned tmem, float* regs) {
    asm volatile(
        "tcgen05.ld.sync.aligned.32x32b.x64.b32 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, "
        "%8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, "
        "%40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, "
        "%56, %57, %58, %59, %60, %61, %62, %63"
        "}, [%64];"
        :
          "=f"(regs[0]), "=f"(regs[1]), "=f"(regs[2]), "=f"(regs[3]), "=f"(regs[4]), "=f"(regs[5]), "=f"(regs[6]), "=f"(regs[7]),
          "=f"(regs[8]), "=f"(regs[9]), "=f"(regs[10]), "=f"(regs[11]), "=f"(regs[12]), "=f"(regs[13]), "=f"(regs[14]), "=f"(regs[15]),
          "=f"(regs[16]), "=f"(regs[17]), "=f"(regs[18]), "=f"(regs[19]), "=f"(regs[20]), "=f"(regs[21]), "=f"(regs[22]), "=f"(regs[23]),
          "=f"(regs[24]), "=f"(regs[25]), "=f"(regs[26]), "=f"(regs[27]), "=f"(regs[28]), "=f"(regs[29]), "=f"(regs[30]), "=f"(regs[31]),
          "=f"(regs[32]), "=f"(regs[33]), "=f"(regs[34]), "=f"(regs[35]), "=f"(regs[36]), "=f"(regs[37]), "=f"(regs[38]), "=f"(regs[39]),
          "=f"(regs[40]), "=f"(regs[41]), "=f"(regs[42]), "=f"(regs[43]), "=f"(regs[44]), "=f"(regs[45]), "=f"(regs[46]), "=f"(regs[47]),
          "=f"(regs[48]), "=f"(regs[49]), "=f"(regs[50]), "=f"(regs[51]), "=f"(regs[52]), "=f"(regs[53]), "=f"(regs[54]), "=f"(regs[55]),
          "=f"(regs[56]), "=f"(regs[57]), "=f"(regs[58]), "=f"(regs[59]), "=f"(regs[60]), "=f"(regs[61]), "=f"(regs[62]), "=f"(regs[63])
        : "r"(tmem));
}
#endif  // FA4_TCGEN05_LD_64

// Columns [column, column + 64) of this thread's accumulator lane. The accumulator is tensor memory: every warp passes the same column
// address, and the hardware routes each warp to its own 32 lanes.
__device__ __forceinline__ void fa4_accumulator_load_x64(unsigned accumulator, unsigned column, float* regs) {
    ptx_tcgen05_ld_x64(accumulator + column, regs);
}
#endif  // FA4_FUNCTIONS_ACCUMULATOR_CUH_64

// level 0: this warp's own depth band of O, unnormalised, as it is.
//
// In shared-key mode one MMA writes one accumulator, and the 4 packed parts of it are depth bands of the same result: the band is final.
// There is nothing to fold, no maximum to agree on (the exchange of every key tile has made it equal everywhere), and no barrier is
// missing: the warps read disjoint lanes and pass nothing to each other.
//
// A 32-row accumulator of pv_mma_n = 256 columns fills 256 / m_pack = 64 physical columns, and each part of the lanes holds its own share of the
// depth there. So every warp reads the SAME column address; adding an offset per warp would read a neighbour's band. Which depth the
// band starts at is the reader's arithmetic: depth tile * 256 + partition_g * 64.
//
// Call once per output depth tile (2 here), with the accumulator advanced by 64 columns each time.
// The caller has made O visible (waited on its producer's barrier, then tcgen05.fence::after_thread_sync). There is no wait::ld here: the
// registers wait by data dependence, and whoever next overwrites the tensor memory waits for the loads.
//
// o_tmem  tensor-memory address of this depth tile's accumulator
// o_band  receives 64 floats: O[local_row][band] before normalisation
__device__ __forceinline__ void fa4_ws_level0_band(unsigned o_tmem, float (&o_band)[64]) {
    fa4_accumulator_load_x64(o_tmem, 0, o_band + 0);
}
