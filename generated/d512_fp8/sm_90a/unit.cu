// Unit kernels: each device function alone, in one CTA
//
// Generated from templates/unit/unit.cu.j2 for config d512_fp8 on sm_90a.
// Do not edit: change the template or the config, then run
//     fa4gen emit --config d512_fp8.yaml

// Waits until `threads` threads (whole warps) have arrived at barrier `id` of this CTA; orders their shared-memory accesses.
// PTX ISA "bar".
__device__ __forceinline__ void ptx_bar_sync(unsigned id, unsigned threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// max(a, b); a NaN loses to a number, subnormal inputs count as zero. PTX ISA "max".
__device__ __forceinline__ float ptx_max_ftz(float a, float b) {
    float d;
    asm("max.ftz.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
    return d;
}

// a + b, rounded to nearest. The explicit .rn keeps ptxas from contracting it into an FMA. PTX ISA "add".
__device__ __forceinline__ float ptx_add_ftz(float a, float b) {
    float d;
    asm("add.rn.ftz.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
    return d;
}

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

// Columns [column, column + 64) of this thread's accumulator lane. The accumulator is an image of tensor memory in shared memory,
// [column][128 lanes] float, so that a warp reads 32 neighbouring words.
__device__ __forceinline__ void fa4_accumulator_load_x64(const float* accumulator, unsigned column, float* regs) {
    const unsigned lane = threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < 64; ++i) regs[i] = accumulator[(column + i) * 128 + lane];
}

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
//
// o_tmem  this depth tile's columns of the accumulator image in shared memory
// o_band  receives 64 floats: O[local_row][band] before normalisation
__device__ __forceinline__ void fa4_ws_level0_band(const float* o_tmem, float (&o_band)[64]) {
    fa4_accumulator_load_x64(o_tmem, 0, o_band + 0);
}

// partial, out: [count][256] float; thread t is warpgroup t / 128, part t % 128 / 32, row t % 32.
// Row i of `partial` is exchange number first_seq + i.
extern "C" __global__ void __launch_bounds__(256, 1)
unit_exchange4_max(const float* partial, float* out, unsigned first_seq, unsigned count) {
    __shared__ float xchg[2 * 2 * 128];
    const unsigned thread = threadIdx.x % 128;
#pragma unroll 1
    for (unsigned i = 0; i < count; ++i)
        out[i * 256 + threadIdx.x] = fa4_ws_exchange4_max(partial[i * 256 + threadIdx.x], thread % 32, thread / 32, threadIdx.x / 128, first_seq + i, xchg);
}

extern "C" __global__ void __launch_bounds__(256, 1)
unit_exchange4_add(const float* partial, float* out, unsigned first_seq, unsigned count) {
    __shared__ float xchg[2 * 2 * 128];
    const unsigned thread = threadIdx.x % 128;
#pragma unroll 1
    for (unsigned i = 0; i < count; ++i)
        out[i * 256 + threadIdx.x] = fa4_ws_exchange4_add(partial[i * 256 + threadIdx.x], thread % 32, thread / 32, threadIdx.x / 128, first_seq + i, xchg);
}

// What the attention kernel does: `max` for the first count - 1 rows (the key tiles), then `add` for the last (the row sum), one sequence.
extern "C" __global__ void __launch_bounds__(256, 1)
unit_exchange4_loop(const float* partial, float* out, unsigned first_seq, unsigned count) {
    __shared__ float xchg[2 * 2 * 128];
    const unsigned thread = threadIdx.x % 128;
    if (count == 0) return;
    unsigned seq = first_seq;
    unsigned i = threadIdx.x;
#pragma unroll 1
    for (; seq != first_seq + count - 1; ++seq, i += 256)
        out[i] = fa4_ws_exchange4_max(partial[i], thread % 32, thread / 32, threadIdx.x / 128, seq, xchg);
    out[i] = fa4_ws_exchange4_add(partial[i], thread % 32, thread / 32, threadIdx.x / 128, seq, xchg);
}

// Fills the accumulator image [128 columns][128 lanes] from tmem_image [128][128] float. Each thread writes and reads its own lane only.
__device__ __forceinline__ void harness_load_accumulator(const float* tmem_image, float* accumulator) {
#pragma unroll 8
    for (unsigned column = 0; column < 128; ++column)
        accumulator[column * 128 + threadIdx.x] = tmem_image[threadIdx.x * 128 + column];
}

// tmem_image, band: [128 lanes][128 columns] float. Thread t reads lane t, one output depth tile of 64 columns after the other.
extern "C" __global__ void __launch_bounds__(128, 1) unit_level0(const float* tmem_image, float* band) {
    extern __shared__ __align__(16) float o_tmem[];
    harness_load_accumulator(tmem_image, o_tmem);
#pragma unroll 1
    for (unsigned tile = 0; tile < 2; ++tile) {
        float o_band[64];
        fa4_ws_level0_band(o_tmem + tile * 8192, o_band);
#pragma unroll
        for (int i = 0; i < 64; ++i) band[threadIdx.x * 128 + tile * 64 + i] = o_band[i];
    }
}
