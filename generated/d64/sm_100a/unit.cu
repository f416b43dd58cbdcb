// Unit kernels: each device function alone, in one CTA
//
// Generated from templates/unit/unit.cu.j2 for config d64 on sm_100a.
// Do not edit: change the template or the config, then run
//     fa4gen emit --config d64.yaml

typedef unsigned short fa4_bf16;  // the bits of a bfloat16

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

// a - b, rounded to nearest, subnormals kept. PTX ISA "sub".
__device__ __forceinline__ float ptx_sub_rn(float a, float b) {
    float d;
    asm("sub.rn.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
    return d;
}

// 2^x, approximate (at most 2 ulp), subnormals flushed; 2^-inf = +0. PTX ISA "ex2".
__device__ __forceinline__ float ptx_ex2_approx_ftz(float x) {
    float d;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
    return d;
}

// 1 / x, approximate (at most 1 ulp), subnormals flushed. PTX ISA "rcp".
__device__ __forceinline__ float ptx_rcp_approx_ftz(float x) {
    float d;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
    return d;
}

// a * b, rounded to nearest, subnormals flushed. The explicit .rn keeps ptxas from contracting it into an FMA. PTX ISA "mul".
__device__ __forceinline__ float ptx_mul_ftz(float a, float b) {
    float d;
    asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
    return d;
}

// a * b + c, rounded once, subnormals flushed. PTX ISA "fma".
__device__ __forceinline__ float ptx_fma_ftz(float a, float b, float c) {
    float d;
    asm("fma.rn.ftz.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
    return d;
}

// a + b, rounded to nearest, subnormals kept. PTX ISA "add".
__device__ __forceinline__ float ptx_add_rn(float a, float b) {
    float d;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
    return d;
}

// max(max(a, b), c) in one instruction, sm_100 and later. PTX ISA "max".
__device__ __forceinline__ float ptx_max3_ftz(float a, float b, float c) {
    float d;
    asm("max.ftz.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
    return d;
}

// Lane-wise a * b on two packed floats, rounded to nearest, subnormals kept; sm_100 and later. PTX ISA "mul".
__device__ __forceinline__ float2 ptx_mul_f32x2(float2 a, float2 b) {
    float2 d;
    asm("{\n\t.reg .b64 a, b, d;\n\t"
        "mov.b64 a, { %2, %3};\n\tmov.b64 b, { %4, %5};\n\t"
        "mul.rn.f32x2 d, a, b;\n\t"
        "mov.b64 { %0, %1}, d;\n\t}"
        : "=f"(d.x), "=f"(d.y)
        : "f"(a.x), "f"(a.y), "f"(b.x), "f"(b.y));
    return d;
}

// Lane-wise a * b + c on two packed floats, rounded once, subnormals kept; sm_100 and later. PTX ISA "fma".
__device__ __forceinline__ float2 ptx_fma_f32x2(float2 a, float2 b, float2 c) {
    float2 d;
    asm("{\n\t.reg .b64 a, b, c, d;\n\t"
        "mov.b64 a, { %2, %3};\n\tmov.b64 b, { %4, %5};\n\tmov.b64 c, { %6, %7};\n\t"
        "fma.rn.f32x2 d, a, b, c;\n\t"
        "mov.b64 { %0, %1}, d;\n\t}"
        : "=f"(d.x), "=f"(d.y)
        : "f"(a.x), "f"(a.y), "f"(b.x), "f"(b.y), "f"(c.x), "f"(c.y));
    return d;
}

// Rounds two floats to bfloat16 (nearest even) and packs them: `low` in bits 0-15, `high` in bits 16-31. PTX ISA "cvt".
__device__ __forceinline__ unsigned ptx_cvt_bf16x2(float low, float high) {
    unsigned d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
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

// combine: merges the 4 key partitions of one warpgroup into one normalised tile of 32 query rows x 64 depth.
//
// The 4 packed parts of the accumulator are independent key partitions over the same query rows. Thread (g, row) holds partition g's
// unnormalised O_g[row][0 .. 63] in its accumulator lane, and its row maximum m_g and row sum l_g. With the partitions in different warps
// the merge has to go through shared memory:
//
//     m = max_g m_g    scale_g = 2^((m_g - m) * scale_log2e)    l = sum_g scale_g l_g    out = (sum_g scale_g O_g) / l
//
// Each part then produces the depth columns [g * 16, g * 16 + 16) of its row, 64 / m_pack = 16 of them.
//
// The order of operations is the contract: equal inputs give equal bits on every target and on the emulator.
// An empty partition brings m_g = -inf, l_g = 0 and a finite O_g: its scale is 0 and it adds 0 * O_g = 0. At least one partition has keys.
//
// local_row, partition_g  thread = partition_g * 32 + local_row
// warp_group_idx          id of the barrier, which 128 threads use
// own_max, own_sum        m_g in raw score units, l_g
// scale_log2e             softmax scale * log2(e)
// o_tmem                  tensor-memory address of O, the same for all warps; the caller has made it visible
// stage_smem              32768 bytes: raw O, [g 4][depth / 4 = 16][row 32][4] float, so that the threads of a warp touch neighbouring 16 bytes
// maxsum_smem             1024 bytes: [g 4][row 32][m, l] float
// o_smem                  output, [depth / 8 = 8][row 32][8], 16 bytes a block: the layout an unswizzled TMA store reads
// returns                 {m, l} of the row, equal in all parts
__device__ __forceinline__ float2 fa4_ws_intracta_combine(unsigned local_row, unsigned partition_g, unsigned warp_group_idx,
                                                          float own_max, float own_sum, float scale_log2e,
                                                          unsigned o_tmem, float* stage_smem,
                                                          float* maxsum_smem, fa4_bf16* o_smem) {
    float4* stage = reinterpret_cast<float4*>(stage_smem);
    float2* maxsum = reinterpret_cast<float2*>(maxsum_smem);

#pragma unroll
    for (unsigned column = 0; column < 64; column += 64) {
        float o[64];
        fa4_accumulator_load_x64(o_tmem, column, o);
#pragma unroll
        for (unsigned i = 0; i < 64; i += 4)
            stage[(partition_g * 16 + (column + i) / 4) * 32 + local_row] = make_float4(o[i], o[i + 1], o[i + 2], o[i + 3]);
    }
    maxsum[partition_g * 32 + local_row] = make_float2(own_max, own_sum);

    // Orders every part's staging before every part's reads.
    ptx_bar_sync(warp_group_idx, 128);

    const float2 ml0 = maxsum[0 + local_row];
    const float2 ml1 = maxsum[32 + local_row];
    const float2 ml2 = maxsum[64 + local_row];
    const float2 ml3 = maxsum[96 + local_row];
    const float m = ptx_max_ftz(ptx_max3_ftz(ml0.x, ml1.x, ml2.x), ml3.x);
    const float scale0 = ptx_ex2_approx_ftz(ptx_mul_ftz(ptx_sub_rn(ml0.x, m), scale_log2e));
    const float scale1 = ptx_ex2_approx_ftz(ptx_mul_ftz(ptx_sub_rn(ml1.x, m), scale_log2e));
    const float scale2 = ptx_ex2_approx_ftz(ptx_mul_ftz(ptx_sub_rn(ml2.x, m), scale_log2e));
    const float scale3 = ptx_ex2_approx_ftz(ptx_mul_ftz(ptx_sub_rn(ml3.x, m), scale_log2e));
    const float2 l01 = ptx_mul_f32x2(make_float2(scale0, scale1), make_float2(ml0.y, ml1.y));
    const float2 l0123 = ptx_fma_f32x2(make_float2(scale2, scale3), make_float2(ml2.y, ml3.y), l01);
    const float l = ptx_add_rn(l0123.x, l0123.y);
    const float inverse_l = ptx_rcp_approx_ftz(l);

#pragma unroll
    for (unsigned block = 0; block < 2; ++block) {
        const unsigned out_block = partition_g * 2 + block;
        float o[8];
#pragma unroll
        for (unsigned i = 0; i < 8; i += 4) {
            const unsigned row_quad = (out_block * 8 + i) / 4 * 32 + local_row;
            const float4 o0 = stage[0 + row_quad];
            const float4 o1 = stage[512 + row_quad];
            const float4 o2 = stage[1024 + row_quad];
            const float4 o3 = stage[1536 + row_quad];
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

// Allocates tensor memory and fills it with tmem_image [128][64] float; returns its address. Barrier 15 belongs to the harness.
__device__ __forceinline__ unsigned harness_load_accumulator(const float* tmem_image, unsigned* tmem_address_smem) {
    if (threadIdx.x / 32 == 0) {
        ptx_tcgen05_alloc(tmem_address_smem, 64);
        ptx_tcgen05_relinquish();
    }
    // Orders the allocation, and the address that it writes to shared memory, before every warp's use of it.
    ptx_tcgen05_fence_before();
    ptx_bar_sync(15, 128);
    ptx_tcgen05_fence_after();
    const unsigned tmem = *tmem_address_smem;
#pragma unroll 1
    for (unsigned column = 0; column < 64; column += 64) {
        float values[64];
#pragma unroll
        for (int i = 0; i < 64; ++i) values[i] = tmem_image[threadIdx.x * 64 + column + i];
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
    if (threadIdx.x / 32 == 0) ptx_tcgen05_dealloc(tmem, 64);
}

// tmem_image: [128 lanes][64] float, lane = partition * 32 + row. row_max, row_sum: [128] float.
// out: [8][32][8] bfloat16. ml: [128][m, l] float, what each thread got back.
extern "C" __global__ void __launch_bounds__(128, 1)
unit_combine(const float* tmem_image, const float* row_max, const float* row_sum, float scale_log2e, fa4_bf16* out, float* ml) {
    extern __shared__ __align__(16) unsigned char smem[];
    float* stage = reinterpret_cast<float*>(smem);
    float* maxsum = reinterpret_cast<float*>(smem + 32768);
    fa4_bf16* o_smem = reinterpret_cast<fa4_bf16*>(smem + 33792);
    __shared__ unsigned tmem_address;
    const unsigned o_tmem = harness_load_accumulator(tmem_image, &tmem_address);
    const float2 result = fa4_ws_intracta_combine(threadIdx.x % 32, threadIdx.x / 32, 0, row_max[threadIdx.x], row_sum[threadIdx.x], scale_log2e, o_tmem, stage, maxsum, o_smem);
    reinterpret_cast<float2*>(ml)[threadIdx.x] = result;
    harness_free_accumulator(o_tmem);
    // Orders the tile's writes before the copy out, which crosses threads.
    ptx_bar_sync(15, 128);
    for (unsigned block = threadIdx.x; block < 256; block += 128)
        reinterpret_cast<uint4*>(out)[block] = reinterpret_cast<const uint4*>(o_smem)[block];
}
