// Unit kernels: each device function alone, in one CTA
//
// Generated from templates/unit/unit.cu.j2 for config d512_fp8 on sm_100a.
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

// Columns [column, column + 64) of this thread's accumulator lane. The accumulator is tensor memory: every warp passes the same column
// address, and the hardware routes each warp to its own 32 lanes.
__device__ __forceinline__ void fa4_accumulator_load_x64(unsigned accumulator, unsigned column, float* regs) {
    ptx_tcgen05_ld_x64(accumulator + column, regs);
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
// The caller has made O visible (waited on its producer's barrier, then tcgen05.fence::after_thread_sync). There is no wait::ld here: the
// registers wait by data dependence, and whoever next overwrites the tensor memory waits for the loads.
//
// o_tmem  tensor-memory address of this depth tile's accumulator
// o_band  receives 64 floats: O[local_row][band] before normalisation
__device__ __forceinline__ void fa4_ws_level0_band(unsigned o_tmem, float (&o_band)[64]) {
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

// Allocates `columns` (a power of two, 32 to 512) of tensor memory and writes their address to `address_smem`. Blocks until they are
// free; one whole warp executes it. PTX ISA "tcgen05.alloc".
__device__ __forceinline__ void ptx_tcgen05_alloc(unsigned* address_smem, unsigned columns) {
    const unsigned destination = static_cast<unsigned>(__cvta_generic_to_shared(address_smem));
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(destination), "r"(columns) : "memory");
}

// Promises that this CTA allocates no more tensor memory. PTX ISA "tcgen05.relinquish_alloc_permit".
__device__ __forceinline__ void ptx_tcgen05_relinquish() {
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" ::: "memory");
}

// Writes 64 columns of this thread's tensor-memory lane, starting at `tmem`; done when wait::st returns. One whole warp executes it,
// every lane with the same address. PTX ISA "tcgen05.st", shape .32x32b.
__device__ __forceinline__ void ptx_tcgen05_st_x64(unsigned tmem, const float* regs) {
    asm volatile(
        "tcgen05.st.sync.aligned.32x32b.x64.b32 [%0], {"
        "%1, %2, %3, %4, %5, %6, %7, %8, "
        "%9, %10, %11, %12, %13, %14, %15, %16, "
        "%17, %18, %19, %20, %21, %22, %23, %24, "
        "%25, %26, %27, %28, %29, %30, %31, %32, "
        "%33, %34, %35, %36, %37, %38, %39, %40, "
        "%41, %42, %43, %44, %45, %46, %47, %48, "
        "%49, %50, %51, %52, %53, %54, %55, %56, "
        "%57, %58, %59, %60, %61, %62, %63, %64"
        "};"
        :
        : "r"(tmem),
          "f"(regs[0]), "f"(regs[1]), "f"(regs[2]), "f"(regs[3]), "f"(regs[4]), "f"(regs[5]), "f"(regs[6]), "f"(regs[7]),
          "f"(regs[8]), "f"(regs[9]), "f"(regs[10]), "f"(regs[11]), "f"(regs[12]), "f"(regs[13]), "f"(regs[14]), "f"(regs[15]),
          "f"(regs[16]), "f"(regs[17]), "f"(regs[18]), "f"(regs[19]), "f"(regs[20]), "f"(regs[21]), "f"(regs[22]), "f"(regs[23]),
          "f"(regs[24]), "f"(regs[25]), "f"(regs[26]), "f"(regs[27]), "f"(regs[28]), "f"(regs[29]), "f"(regs[30]), "f"(regs[31]),
          "f"(regs[32]), "f"(regs[33]), "f"(regs[34]), "f"(regs[35]), "f"(regs[36]), "f"(regs[37]), "f"(regs[38]), "f"(regs[39]),
          "f"(regs[40]), "f"(regs[41]), "f"(regs[42]), "f"(regs[43]), "f"(regs[44]), "f"(regs[45]), "f"(regs[46]), "f"(regs[47]),
          "f"(regs[48]), "f"(regs[49]), "f"(regs[50]), "f"(regs[51]), "f"(regs[52]), "f"(regs[53]), "f"(regs[54]), "f"(regs[55]),
          "f"(regs[56]), "f"(regs[57]), "f"(regs[58]), "f"(regs[59]), "f"(regs[60]), "f"(regs[61]), "f"(regs[62]), "f"(regs[63])
        : "memory");
}

// Waits for this thread's earlier tcgen05.st. PTX ISA "tcgen05.wait".
__device__ __forceinline__ void ptx_tcgen05_wait_st() { asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory"); }

// Waits for this thread's earlier tcgen05.ld. PTX ISA "tcgen05.wait".
__device__ __forceinline__ void ptx_tcgen05_wait_ld() { asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory"); }

// Frees what tcgen05.alloc gave; required before the CTA exits. One whole warp executes it. PTX ISA "tcgen05.dealloc".
__device__ __forceinline__ void ptx_tcgen05_dealloc(unsigned tmem, unsigned columns) {
    asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(tmem), "r"(columns) : "memory");
}

// Orders this thread's earlier tcgen05 operations before the barrier or arrive that follows. PTX ISA "tcgen05.fence".
__device__ __forceinline__ void ptx_tcgen05_fence_before() {
    asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}

// Orders this thread's later tcgen05 operations after the barrier or wait that came before. PTX ISA "tcgen05.fence".
__device__ __forceinline__ void ptx_tcgen05_fence_after() {
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

// Allocates tensor memory and fills it with tmem_image [128][128] float; returns its address. Barrier 15 belongs to the harness.
__device__ __forceinline__ unsigned harness_load_accumulator(const float* tmem_image, unsigned* tmem_address_smem) {
    if (threadIdx.x / 32 == 0) {
        ptx_tcgen05_alloc(tmem_address_smem, 128);
        ptx_tcgen05_relinquish();
    }
    // Orders the allocation, and the address that it writes to shared memory, before every warp's use of it.
    ptx_tcgen05_fence_before();
    ptx_bar_sync(15, 128);
    ptx_tcgen05_fence_after();
    const unsigned tmem = *tmem_address_smem;
#pragma unroll 1
    for (unsigned column = 0; column < 128; column += 64) {
        float values[64];
#pragma unroll
        for (int i = 0; i < 64; ++i) values[i] = tmem_image[threadIdx.x * 128 + column + i];
        ptx_tcgen05_st_x64(tmem + column, values);
    }
    // A warp reads back only the lanes it has written itself, so its own stores are all it has to wait for.
    ptx_tcgen05_wait_st();
    return tmem;
}

// Frees the tensor memory once every warp's loads have returned.
__device__ __forceinline__ void harness_free_accumulator(unsigned tmem) {
    ptx_tcgen05_wait_ld();
    // Orders every warp's loads before the memory is given back.
    ptx_tcgen05_fence_before();
    ptx_bar_sync(15, 128);
    ptx_tcgen05_fence_after();
    if (threadIdx.x / 32 == 0) ptx_tcgen05_dealloc(tmem, 128);
}

// tmem_image, band: [128 lanes][128 columns] float. Thread t reads lane t, one output depth tile of 64 columns after the other.
extern "C" __global__ void __launch_bounds__(128, 1) unit_level0(const float* tmem_image, float* band) {
    __shared__ unsigned tmem_address;
    const unsigned o_tmem = harness_load_accumulator(tmem_image, &tmem_address);
#pragma unroll 1
    for (unsigned tile = 0; tile < 2; ++tile) {
        float o_band[64];
        fa4_ws_level0_band(o_tmem + tile * 64, o_band);
#pragma unroll
        for (int i = 0; i < 64; ++i) band[threadIdx.x * 128 + tile * 64 + i] = o_band[i];
    }
    harness_free_accumulator(o_tmem);
}
