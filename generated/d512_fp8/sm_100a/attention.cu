// Attention for sm_100a, shared-key: O = softmax(scale Q K^T) V and its LSE
//
// Generated from templates/kernels/attention_sm100a.cu.j2 for config d512_fp8 on sm_100a.
// Do not edit: change the template or the config, then run
//     fa4gen emit --config d512_fp8.yaml
//
// One CTA works on one tile of 32 query rows (positions x heads of one KV head), 512 deep, over key tiles of 256 keys, by tcgen05.mma.ws
// with M = 32. An accumulator of 32 rows x N columns is folded onto all 128 lanes of tensor memory: element (m, n) lies in lane
// m + 32 * (n / (N / 4)), column n % (N / 4). So 4 "parts" of 32 lanes each hold a share of the columns, and thread t of a warpgroup
// works on row t % 32 of part t / 32.
//     S[32 x 256]  = Q . K^T   A = Q, B = K, both K-major in shared memory; N = 256: part g gets keys [64 g, 64 g + 64)
//     O[32 x 512] += P . V     A = P, K-major in shared memory, B = V, MN-major; N = 256: part g gets 64 depth columns of each of 2 O tiles
// All parts attend to the same keys and hold depth bands of one O. They agree on the row maximum of each tile (fa4_ws_exchange4_max) and
// on the row sum once, at the end (fa4_ws_exchange4_add).
// Two softmax warpgroups take every other key tile, each with S and O of its own, and are merged at the end.
//
// Roles, 512 threads (each with a comment on what it waits for and signals):
//     warps  0 -  3  softmax, warpgroup 0: scores to probabilities; at the end O and LSE    192 registers
//     warps  4 -  7  softmax, warpgroup 1: scores to probabilities; at the end O and LSE    192 registers
//     warps  8 - 11  correct: rescales O in tensor memory when a row maximum has grown   72
//     warp  12       load: Q, K and V by TMA                                               56
//     warp  13       multiply: one thread issues every MMA                                 56
//     warps 14 - 15  convert: K and V from e4m3 to float16                                     56
//
// Tensor memory, columns of all 128 lanes (384 used, 512 allocated):
//           0      64  S0
//          64      64  S1
//         128     128  O0
//         256     128  O1
//
// Shared memory, bytes:
//           0   32768  q
//       32768   65536  ring
//       98304   81920  raw
//      180224   32768  p
//      212992    2048  exchange
//      215040    1024  correction
//      216064      16  mbar_ring_full
//      216080      16  mbar_ring_empty
//      216096      40  mbar_raw_full
//      216136      40  mbar_raw_empty
//      216176      16  mbar_s_full
//      216192      32  mbar_p_ready
//      216224      32  mbar_correction
//      216256      16  mbar_o_full
//      216272       4  tmem_address
//      216288 in all
// In the epilogue, over Q and the rings:
//           0   32768  out
//       32768   65536  windows
//       98304     256  window_ml
//
// mbarriers (arrivals a phase; who arrives -> who waits). w is the warpgroup of a key tile, the phase its number of the tile:
//     raw_full[5]      1  load, and the bytes of the copies -> convert
//     raw_empty[5]     2  convert: both warps have read the slot -> load
//     ring_full[2]     2  convert: both warps have written their half, and of Q -> multiply
//     ring_empty[2]    1  multiply, commit behind the last MMA that reads the slot -> convert
//     s_full[w]        1  multiply, commit behind S; once more when every MMA is done -> softmax w
//     p_ready[w][0]    8  softmax w: S is read, stage 0 of P is written (4 warps); correct: O is rescaled (4 warps) -> multiply
//     p_ready[w][1]    4  softmax w: stage 1 of P is written -> multiply
//     correction[w][0] 4  softmax w: factors are written -> correct
//     correction[w][1] 4  correct: factors are read -> softmax w
//     o_full[w]        1  multiply, commit behind P.V -> correct
// Named barriers:
//     0                all 512 threads, once, before the roles part
//     0, 1             the 128 threads of a softmax warpgroup: exchange; then workspace written, O staged
//     3                the 256 threads of both: level 2

typedef unsigned short fa4_bf16;  // the bits of a bfloat16
typedef unsigned short fa4_f16;   // the bits of a float16
struct alignas(64) fa4_tensor_map {
    unsigned char bytes[128];  // as cuTensorMapEncodeTiled made it
};

// Tile
constexpr unsigned ROWS = 32;            // M of the MMAs
constexpr unsigned TILE_ROWS = 32;       // rows that carry queries
constexpr unsigned BLOCK_KEYS = 256;     // keys of a key tile: N of S
constexpr unsigned WARPGROUPS = 2;       // of softmax
constexpr unsigned THREADS = 512;
constexpr unsigned LOAD_WARP = 12;
constexpr unsigned MMA_WARP = 13;
constexpr unsigned CONVERT_WARP = 14;  // the first of
constexpr unsigned CONVERT_WARPS = 2;
constexpr unsigned SUB_TILE_DEPTH = 64;   // depth of a K sub-tile: one 128-byte row of the swizzle
constexpr unsigned QK_STAGES = 8;        // sub-tiles [BLOCK_KEYS][64] of a K tile: depth / 64
constexpr unsigned O_TILES = 2;          // P.V MMAs that cover O: each N = 256, 64 columns of tensor memory
constexpr unsigned PV_KEY_CHUNK = 64;    // keys in one V sub-tile
constexpr unsigned PV_CHUNKS = 4;        // key chunks of a V tile
constexpr unsigned PV_STEPS = 4;         // MMAs along a key chunk, 16 keys each
constexpr unsigned MMA_K = 16;
constexpr unsigned P_STAGES = 2;         // parts in which a thread hands over its probabilities
constexpr unsigned P_STAGE_COLS = 32;
constexpr unsigned STAGE_1_CHUNK = 0;    // the chunk, and the MMA of it, that first needs stage 1
constexpr unsigned STAGE_1_STEP = 2;
constexpr float RESCALE_LOG2 = 8.0f;      // O is rescaled when a maximum has grown by more than a factor 2^8
// Tensor memory
constexpr unsigned TMEM_COLUMNS = 512;
constexpr unsigned S_COLUMN = 0;         // + warpgroup * S_COLS
constexpr unsigned S_COLS = 64;
constexpr unsigned O_COLUMN = 128;       // + warpgroup * O_PHYS_COLS
constexpr unsigned O_PHYS_COLS = 128;
constexpr unsigned BAND_COLS = 64;       // of an O tile
constexpr unsigned CORRECTION_COLS = 32;
// Shared memory
constexpr unsigned SWIZZLE_BYTES = 128;
constexpr unsigned Q_OFFSET = 0;
constexpr unsigned Q_BYTES = 32768;
constexpr unsigned Q_CHUNK_BYTES = 4096;  // [ROWS][128]
constexpr unsigned RING_OFFSET = 32768;
constexpr unsigned RING_SLOTS = 2;
constexpr unsigned SLOT_BYTES = 32768;    // [BLOCK_KEYS][128] of K; as many bytes of V
constexpr unsigned V_BOX_CHUNKS = 4;     // 64-column chunks of a V copy
constexpr unsigned RAW_OFFSET = 98304;
constexpr unsigned RAW_SLOTS = 5;
constexpr unsigned RAW_SLOT_BYTES = 16384;  // a sub-tile in 8 bits
constexpr unsigned RAW_ROW_BYTES = 64;      // 64 columns of it
constexpr unsigned P_OFFSET = 180224;
constexpr unsigned P_TILE_BYTES = 16384;  // of a warpgroup: pieces of [ROWS][64 keys]
constexpr unsigned P_ATOM_KEYS = 64;
constexpr unsigned P_ATOM_BYTES = 4096;
constexpr unsigned EXCHANGE_OFFSET = 212992;
constexpr unsigned FACTORS_OFFSET = 215040;  // [WARPGROUPS][128] float
constexpr unsigned RING_FULL_OFFSET = 216064;
constexpr unsigned RING_EMPTY_OFFSET = 216080;
constexpr unsigned RAW_FULL_OFFSET = 216096;
constexpr unsigned RAW_EMPTY_OFFSET = 216136;
constexpr unsigned S_FULL_OFFSET = 216176;
constexpr unsigned P_READY_OFFSET = 216192;
constexpr unsigned CORRECTION_OFFSET = 216224;
constexpr unsigned O_FULL_OFFSET = 216256;
constexpr unsigned TMEM_ADDRESS_OFFSET = 216272;
constexpr unsigned MBARRIER_BYTES = 8;
// Epilogue
constexpr unsigned OUT_OFFSET = 0;
constexpr unsigned OUT_CHUNK_COLS = 64;   // columns of one TMA store
constexpr unsigned OUT_CHUNK_BYTES = 4096;
constexpr unsigned OUT_CHUNKS = 8;
// 16-byte blocks of an output row
constexpr unsigned O_TILE_BLOCKS = 32;   // of an O tile
constexpr unsigned BAND_BLOCKS = 8;      // of a part's columns
constexpr unsigned OUT_K = 8;            // elements of a block
constexpr unsigned LEVEL2_COLS = 64;     // columns of O that a thread finishes in an O tile
constexpr unsigned O_QUADS = 4096;      // 16-byte pieces of a partition's O in the workspace
constexpr unsigned WINDOWS_OFFSET = 32768;
constexpr unsigned WINDOW_BYTES = 32768;
constexpr unsigned WINDOW_ML_OFFSET = 98304;
// Matrix descriptors, in units of 16 bytes: 128-byte swizzle (2 << 61), version 1 (1 << 46), 1,024 bytes between groups of 8 rows (K-major)
// or of 8 keys (MN-major). V also has 8192 bytes between its 64-column atoms; a K-major operand does not use that field.
constexpr unsigned DESCRIPTOR_UNIT = 16;
constexpr unsigned long long SWIZZLED = 2ull << 61 | 1ull << 46 | 1024ull / DESCRIPTOR_UNIT << 32;
constexpr unsigned long long K_MAJOR = SWIZZLED | 1ull << 16;
constexpr unsigned long long V_MAJOR = SWIZZLED | 8192ull / DESCRIPTOR_UNIT << 16;
constexpr unsigned K_STEP_BYTES = 32;     // 16 elements along a K-major row
constexpr unsigned V_STEP_BYTES = 2048;   // 16 keys down an MN-major atom
// Instruction descriptors: float32 D, float16 A and B, M = 32, N = 256 (S) and 256 with B MN-major (P.V)
constexpr unsigned QK_INSTRUCTION = 0x02400010;
constexpr unsigned PV_INSTRUCTION = 0x02410010;
constexpr unsigned NEGATE_A = 1u << 13;
constexpr float LOG2E = 1.44269504f;
constexpr float LN2 = 0.69314718f;
constexpr float MINUS_INFINITY = __builtin_bit_cast(float, 0xff800000u);

// Makes the 8 bytes at shared address `barrier` an mbarrier whose phases complete after `arrivals` arrivals (and their bytes).
// PTX ISA "mbarrier.init".
__device__ __forceinline__ void ptx_mbarrier_init(unsigned barrier, unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes this thread's mbarrier.init visible to the copy engine. PTX ISA "fence.mbarrier_init".
__device__ __forceinline__ void ptx_fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// One arrival at the mbarrier; releases this thread's earlier accesses. PTX ISA "mbarrier.arrive".
__device__ __forceinline__ void ptx_mbarrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Announces `bytes` of copies to the current phase, then arrives once. PTX ISA "mbarrier.arrive", .expect_tx.
__device__ __forceinline__ void ptx_mbarrier_arrive_expect_tx(unsigned barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// True once the phase of this parity has completed: on a fresh mbarrier parity 1 has, parity 0 has not. It may give up early: callers loop.
// PTX ISA "mbarrier.try_wait".
__device__ __forceinline__ bool ptx_mbarrier_try_wait(unsigned barrier, unsigned parity) {
    unsigned done;
    asm volatile(
        "{\n\t.reg .pred complete;\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 complete, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, complete;\n\t}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
}

// True in exactly one lane of a converged warp, the same one every time. PTX ISA "elect.sync".
__device__ __forceinline__ bool ptx_elect_sync() {
    unsigned elected;
    asm volatile(
        "{\n\t.reg .pred leader;\n\t"
        "elect.sync _|leader, 0xffffffff;\n\t"
        "selp.u32 %0, 1, 0, leader;\n\t}"
        : "=r"(elected));
    return elected != 0;
}

// Fetches a tensor map towards the copy engine. PTX ISA "prefetch".
__device__ __forceinline__ void ptx_prefetch_tensormap(const fa4_tensor_map* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Starts the copy of one box of a rank-5 tensor to shared memory; coordinates innermost first, elements outside the tensor arrive as zeros.
// The whole box counts towards `barrier` when it lands. PTX ISA "cp.async.bulk.tensor".
__device__ __forceinline__ void ptx_tma_load_5d(unsigned destination, const fa4_tensor_map* map, unsigned barrier, int c0, int c1, int c2,
                                                int c3, int c4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, { %3, %4, %5, %6, %7 }], [%2];" ::"r"(destination),
        "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}

// Starts the copy of one box from shared memory to a rank-5 tensor; coordinates innermost first, elements outside the tensor are dropped.
// Belongs to this thread's next bulk group. PTX ISA "cp.async.bulk.tensor".
__device__ __forceinline__ void ptx_tma_store_5d(const fa4_tensor_map* map, unsigned source, int c0, int c1, int c2, int c3, int c4) {
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, { %2, %3, %4, %5, %6 }], [%1];" ::"l"(map),
                 "r"(source), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
                 : "memory");
}

// Closes this thread's bulk group. PTX ISA "cp.async.bulk.commit_group".
__device__ __forceinline__ void ptx_bulk_commit_group() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all of this thread's bulk groups have read their sources. PTX ISA "cp.async.bulk.wait_group".
__device__ __forceinline__ void ptx_bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Orders this thread's earlier shared-memory accesses before later ones of the asynchronous proxy (wgmma, TMA). PTX ISA "fence.proxy".
__device__ __forceinline__ void ptx_fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Raises the register limit of every warp of this warpgroup to `count`, waiting until they are free. PTX ISA "setmaxnreg".
template <int count>
__device__ __forceinline__ void ptx_setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

// Lowers the register limit of every warp of this warpgroup to `count` and gives the rest back. PTX ISA "setmaxnreg".
template <int count>
__device__ __forceinline__ void ptx_setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

// Waits until `threads` threads (whole warps) have arrived at barrier `id` of this CTA; orders their shared-memory accesses.
// PTX ISA "bar".
__device__ __forceinline__ void ptx_bar_sync(unsigned id, unsigned threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// As bar.sync, and returns to all of them whether `predicate` holds in any of the `threads` threads. PTX ISA "bar.red".
__device__ __forceinline__ bool ptx_bar_red_or(unsigned id, unsigned threads, bool predicate) {
    unsigned any;
    asm volatile(
        "{\n\t.reg .pred mine, any;\n\t"
        "setp.ne.b32 mine, %3, 0;\n\t"
        "bar.red.or.pred any, %1, %2, mine;\n\t"
        "selp.u32 %0, 1, 0, any;\n\t}"
        : "=r"(any)
        : "r"(id), "r"(threads), "r"((unsigned)predicate)
        : "memory");
    return any != 0;
}

// Raises *address to at least `value`, at GPU scope, unordered with other accesses but those to the same address. PTX ISA "red", .max.
__device__ __forceinline__ void ptx_red_max_relaxed(unsigned long long* address, unsigned long long value) {
    asm volatile("red.relaxed.gpu.global.max.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

// Adds `value` to *address and returns what was there. Releases what this thread has seen written and acquires what earlier callers had, at
// GPU scope. PTX ISA "atom", .add.
__device__ __forceinline__ unsigned long long ptx_atom_add_acq_rel(unsigned long long* address, unsigned long long value) {
    unsigned long long previous;
    asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;" : "=l"(previous) : "l"(address), "l"(value) : "memory");
    return previous;
}

// Stores to global memory as an atomic does: whole, at GPU scope, and in order with other atomics on the address. PTX ISA "st", .relaxed.
__device__ __forceinline__ void ptx_st_relaxed(unsigned long long* address, unsigned long long value) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
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

// Waits for this thread's earlier tcgen05.ld. PTX ISA "tcgen05.wait".
__device__ __forceinline__ void ptx_tcgen05_wait_ld() { asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory"); }

// Waits for this thread's earlier tcgen05.st. PTX ISA "tcgen05.wait".
__device__ __forceinline__ void ptx_tcgen05_wait_st() { asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory"); }

// D = A . B (+ D if `accumulate`): packed-lane MMA of kind::f16, 16 deep; A and B are shared-memory matrix descriptors, D a tensor-memory
// address. Asynchronous: tcgen05.commit tells when it is done. One thread issues for the CTA. PTX ISA "tcgen05.mma.ws".
__device__ __forceinline__ void ptx_tcgen05_mma_ws_ss(unsigned d, unsigned long long a, unsigned long long b, unsigned instruction,
                                                      bool accumulate) {
    asm volatile(
        "{\n\t.reg .pred accumulate;\n\t"
        "setp.ne.b32 accumulate, %4, 0;\n\t"
        "tcgen05.mma.ws.cta_group::1.kind::f16 [%0], %1, %2, %3, accumulate;\n\t}" ::"r"(d),
        "l"(a), "l"(b), "r"(instruction), "r"((unsigned)accumulate)
        : "memory");
}

// One arrival at the mbarrier once every MMA that this thread has issued so far is done; orders them as fence::before_thread_sync does.
// PTX ISA "tcgen05.commit".
__device__ __forceinline__ void ptx_tcgen05_commit(unsigned barrier) {
    asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(barrier) : "memory");
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

// Reads 32 columns of this thread's tensor-memory lane, starting at `tmem`. The registers wait by data dependence: no wait::ld is
// needed to use them. One whole warp executes it, every lane with the same address. PTX ISA "tcgen05.ld", shape .32x32b.
__device__ __forceinline__ void ptx_tcgen05_ld_x32(unsigned tmem, float* regs) {
    asm volatile(
        "tcgen05.ld.sync.aligned.32x32b.x32.b32 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, "
        "%8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31"
        "}, [%32];"
        :
          "=f"(regs[0]), "=f"(regs[1]), "=f"(regs[2]), "=f"(regs[3]), "=f"(regs[4]), "=f"(regs[5]), "=f"(regs[6]), "=f"(regs[7]),
          "=f"(regs[8]), "=f"(regs[9]), "=f"(regs[10]), "=f"(regs[11]), "=f"(regs[12]), "=f"(regs[13]), "=f"(regs[14]), "=f"(regs[15]),
          "=f"(regs[16]), "=f"(regs[17]), "=f"(regs[18]), "=f"(regs[19]), "=f"(regs[20]), "=f"(regs[21]), "=f"(regs[22]), "=f"(regs[23]),
          "=f"(regs[24]), "=f"(regs[25]), "=f"(regs[26]), "=f"(regs[27]), "=f"(regs[28]), "=f"(regs[29]), "=f"(regs[30]), "=f"(regs[31])
        : "r"(tmem));
}

// Writes 32 columns of this thread's tensor-memory lane, starting at `tmem`; done when wait::st returns. One whole warp executes it,
// every lane with the same address. PTX ISA "tcgen05.st", shape .32x32b.
__device__ __forceinline__ void ptx_tcgen05_st_x32(unsigned tmem, const float* regs) {
    asm volatile(
        "tcgen05.st.sync.aligned.32x32b.x32.b32 [%0], {"
        "%1, %2, %3, %4, %5, %6, %7, %8, "
        "%9, %10, %11, %12, %13, %14, %15, %16, "
        "%17, %18, %19, %20, %21, %22, %23, %24, "
        "%25, %26, %27, %28, %29, %30, %31, %32"
        "};"
        :
        : "r"(tmem),
          "f"(regs[0]), "f"(regs[1]), "f"(regs[2]), "f"(regs[3]), "f"(regs[4]), "f"(regs[5]), "f"(regs[6]), "f"(regs[7]),
          "f"(regs[8]), "f"(regs[9]), "f"(regs[10]), "f"(regs[11]), "f"(regs[12]), "f"(regs[13]), "f"(regs[14]), "f"(regs[15]),
          "f"(regs[16]), "f"(regs[17]), "f"(regs[18]), "f"(regs[19]), "f"(regs[20]), "f"(regs[21]), "f"(regs[22]), "f"(regs[23]),
          "f"(regs[24]), "f"(regs[25]), "f"(regs[26]), "f"(regs[27]), "f"(regs[28]), "f"(regs[29]), "f"(regs[30]), "f"(regs[31])
        : "memory");
}

// 2^x, approximate (at most 2 ulp), subnormals flushed; 2^-inf = +0. PTX ISA "ex2".
__device__ __forceinline__ float ptx_ex2_approx_ftz(float x) {
    float d;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
    return d;
}

// log2(x), approximate (absolute error 2^-22 near 1, else relative), subnormals flushed; log2(0) = -inf. PTX ISA "lg2".
__device__ __forceinline__ float ptx_lg2_approx_ftz(float x) {
    float d;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
    return d;
}

// max(a, b); a NaN loses to a number, subnormal inputs count as zero. PTX ISA "max".
__device__ __forceinline__ float ptx_max_ftz(float a, float b) {
    float d;
    asm("max.ftz.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
    return d;
}

// max(max(a, b), c) in one instruction, sm_100 and later. PTX ISA "max".
__device__ __forceinline__ float ptx_max3_ftz(float a, float b, float c) {
    float d;
    asm("max.ftz.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
    return d;
}

// a - b, rounded to nearest, subnormals kept. PTX ISA "sub".
__device__ __forceinline__ float ptx_sub_rn(float a, float b) {
    float d;
    asm("sub.rn.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
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

// Lane-wise a + b on two packed floats, rounded to nearest, subnormals kept; sm_100 and later. PTX ISA "add".
__device__ __forceinline__ float2 ptx_add_f32x2(float2 a, float2 b) {
    float2 d;
    asm("{\n\t.reg .b64 a, b, d;\n\t"
        "mov.b64 a, { %2, %3};\n\tmov.b64 b, { %4, %5};\n\t"
        "add.rn.f32x2 d, a, b;\n\t"
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

// a * b + c, rounded once, subnormals kept. PTX ISA "fma".
__device__ __forceinline__ float ptx_fma_rn(float a, float b, float c) {
    float d;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
    return d;
}

// Rounds two floats to float16 (nearest even) and packs them: `low` in bits 0-15, `high` in bits 16-31. PTX ISA "cvt".
__device__ __forceinline__ unsigned ptx_cvt_f16x2(float low, float high) {
    unsigned d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

// Two e4m3 as float16, exactly: the low byte in bits 0-15, the high one in bits 16-31. PTX ISA "cvt".
__device__ __forceinline__ unsigned ptx_cvt_f16x2_e4m3x2(unsigned short pair) {
    unsigned d;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(d) : "h"(pair));
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

// The number of the CTA along x, read again wherever it is called: the compiler does not know that it stays. PTX ISA "%ctaid".
__device__ __forceinline__ unsigned ptx_ctaid_x() {
    unsigned x;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x)::"memory");
    return x;
}

typedef unsigned short fa4_bf16;  // the bits of a bfloat16

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

// a * b, rounded to nearest, subnormals kept. PTX ISA "mul".
__device__ __forceinline__ float ptx_mul_rn(float a, float b) {
    float d;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
    return d;
}

// Rounds two floats to bfloat16 (nearest even) and packs them: `low` in bits 0-15, `high` in bits 16-31. PTX ISA "cvt".
__device__ __forceinline__ unsigned ptx_cvt_bf16x2(float low, float high) {
    unsigned d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

// Writes 64 columns of a row to the staged output tile, from 16-byte block `first_block` of the row.
// The tile is pieces of [row 32][128 bytes]; 16-byte unit u of a row lies at u ^ (row % 8), as a swizzled TMA store reads it.
__device__ __forceinline__ void fa4_stage_columns(fa4_bf16* o_smem, unsigned first_block, unsigned local_row,
                                                  const float (&o)[64]) {
#pragma unroll
    for (unsigned block = 0; block < 8; ++block) {
        const unsigned out_block = first_block + block;
        const unsigned i = block * 8;
        const unsigned unit = (out_block / 8 * 32 + local_row) * 8 + ((out_block % 8) ^ (local_row % 8));
        reinterpret_cast<uint4*>(o_smem)[unit] =
            make_uint4(ptx_cvt_bf16x2(o[i], o[i + 1]), ptx_cvt_bf16x2(o[i + 2], o[i + 3]),
                       ptx_cvt_bf16x2(o[i + 4], o[i + 5]), ptx_cvt_bf16x2(o[i + 6], o[i + 7]));
    }
}

// level 2: merges the two warpgroups of the CTA, normalises, and writes 64 depth columns of the thread's row.
//
// Warpgroup 1 scatters its unnormalised columns of one output depth tile and its (m, l) to shared memory and is done;
// warpgroup 0 waits, gathers, brings both to one scale, and writes.
//
//     m = max(m_0, m_1)    scale_w = 2^((m_w - m) * scale_log2e)    l = scale_0 l_0 + scale_1 l_1    out = (scale_0 O_0 + scale_1 O_1) / l
//
// Each of the 2 depth tiles has a window of its own: warpgroup 1 may be writing the next one while warpgroup 0 still reads this
// one. The (m, l) of a row is the same for all of them, so only the first carries it.
//
// merged = false is for a CTA with a single key tile. Warpgroup 1 has left then: a barrier of 256 threads would never complete, and
// the window holds whatever was there before, of which even 0 times a NaN is not 0.
//
// A row without a key has l = 0 and O = 0, and gives 0.
//
// local_row, partition_g  thread = partition_g * 32 + local_row of warpgroup warp_group_idx
// own_max, own_sum        m, l of the row
// scale_log2e             softmax scale * log2(e)
// o_band                  64 columns, not normalised
// first                   whether this call carries (m, l)
// window_smem             32768 bytes: [g 4][64 / 4][row 32][4] float
// maxsum_smem             256 bytes: [row 32][m, l] float
// first_block             16-byte block of the output row that the columns begin at
// o_smem                  output tile: see fa4_stage_columns
// partial                 if not null, the columns go there instead: [64 / 4][row 32][4] float, from this thread's row on
// v_scale                 factor of V
// returns                 {m, l} of the merged row (to warpgroup 0)
__device__ __forceinline__ float2 fa4_ws_level2_reduce_scatter_write(unsigned local_row, unsigned partition_g,
                                                                     bool merged, unsigned warp_group_idx,
                                                                     float own_max, float own_sum, float scale_log2e,
                                                                     float (&o_band)[64],
                                                                     bool first, float* window_smem, float* maxsum_smem,
                                                                     unsigned first_block, fa4_bf16* o_smem,
                                                                     float4* partial, float v_scale) {
    float m = own_max;
    float l = own_sum;
    if (merged) {
        float4* window = reinterpret_cast<float4*>(window_smem) + partition_g * 512 + local_row;
        float2* maxsum = reinterpret_cast<float2*>(maxsum_smem);
        if (warp_group_idx == 1) {
#pragma unroll
            for (unsigned i = 0; i < 64; i += 4)
                window[i / 4 * 32] = make_float4(o_band[i], o_band[i + 1], o_band[i + 2], o_band[i + 3]);
            if (first && partition_g == 0) maxsum[local_row] = make_float2(own_max, own_sum);
        }
        // Orders warpgroup 1's window before warpgroup 0's reads of it.
        ptx_bar_sync(3, 256);
        if (warp_group_idx == 1) return make_float2(m, l);
        const float2 peer = maxsum[local_row];
        m = ptx_max_ftz(own_max, peer.x);
        const float reference = m == __uint_as_float(0xff800000u) ? 0.0f : m;
        const float own_scale = ptx_ex2_approx_ftz(ptx_mul_ftz(ptx_sub_rn(own_max, reference), scale_log2e));
        const float peer_scale = ptx_ex2_approx_ftz(ptx_mul_ftz(ptx_sub_rn(peer.x, reference), scale_log2e));
        l = ptx_fma_rn(peer_scale, peer.y, ptx_mul_rn(own_scale, own_sum));
#pragma unroll
        for (unsigned i = 0; i < 64; i += 4) {
            const float4 o = window[i / 4 * 32];
            o_band[i + 0] = ptx_fma_ftz(peer_scale, o.x, ptx_mul_ftz(own_scale, o_band[i + 0]));
            o_band[i + 1] = ptx_fma_ftz(peer_scale, o.y, ptx_mul_ftz(own_scale, o_band[i + 1]));
            o_band[i + 2] = ptx_fma_ftz(peer_scale, o.z, ptx_mul_ftz(own_scale, o_band[i + 2]));
            o_band[i + 3] = ptx_fma_ftz(peer_scale, o.w, ptx_mul_ftz(own_scale, o_band[i + 3]));
        }
    }
    const float inverse_l = l > 0.0f ? ptx_rcp_approx_ftz(l) * v_scale : 0.0f;
#pragma unroll
    for (unsigned i = 0; i < 64; ++i) o_band[i] = ptx_mul_ftz(o_band[i], inverse_l);
    if (partial != nullptr) {
#pragma unroll
        for (unsigned i = 0; i < 64; i += 4)
            partial[i / 4 * 32] = make_float4(o_band[i], o_band[i + 1], o_band[i + 2], o_band[i + 3]);
    } else {
        fa4_stage_columns(o_smem, first_block, local_row, o_band);
    }
    return make_float2(m, l);
}

// --- the problem -----------------------------------------------------------------------------------------------------

struct Problem {
    unsigned q_len, keys, kv_heads, group;
    unsigned partition_tiles;     // key tiles of a partition
    unsigned partitions;          // of every query tile; those past its last key have no work
    unsigned tile_heads;          // heads of one position in a tile: row r is position r / tile_heads, head r % tile_heads
    unsigned tile_positions;      // positions of a tile: 1 where the group fills it
    unsigned tiles_per_position;  // tiles that share a position: 1 unless the group is larger than a tile
    unsigned q_tiles;             // tiles of one KV head
};

__device__ __forceinline__ Problem describe(unsigned q_len, unsigned keys, unsigned kv_heads, unsigned group, unsigned partition_tiles,
                                            unsigned partitions) {
    Problem p{q_len, keys, kv_heads, group, partition_tiles, partitions};
    p.tile_heads = min(group, TILE_ROWS);
    p.tile_positions = TILE_ROWS / p.tile_heads;
    p.tiles_per_position = (group + TILE_ROWS - 1) / TILE_ROWS;
    p.q_tiles = (q_len + p.tile_positions - 1) / p.tile_positions * p.tiles_per_position;
    return p;
}

// One query tile and one partition of the keys it attends to: the work of a CTA. Every role takes its key tiles from here.
struct Item {
    unsigned batch, kv_head;
    unsigned query_tile;            // among those of all sequences and KV heads
    unsigned partition, used;       // used: partitions of this query tile that have work; 1 if there is no key at all
    unsigned position, head;        // of query row 0; the head counts within the group
    int all_see;                    // keys below it are visible to every row of the tile
    int seen;                       // keys below it are visible to some row
    unsigned first_tile, tiles;     // key tiles; number i of them belongs to warpgroup i % WARPGROUPS
};

__device__ __forceinline__ Item item_at(const Problem& p, unsigned index) {
    Item item;
    // The KV head runs fastest: CTAs side by side read neighbouring memory.
    item.kv_head = index % p.kv_heads;
    const unsigned tile = index / p.kv_heads % p.q_tiles;
    item.partition = index / p.kv_heads / p.q_tiles % p.partitions;
    item.batch = index / p.kv_heads / p.q_tiles / p.partitions;
    item.query_tile = (item.batch * p.q_tiles + tile) * p.kv_heads + item.kv_head;
    item.position = tile / p.tiles_per_position * p.tile_positions;
    item.head = tile % p.tiles_per_position * TILE_ROWS;
    item.all_see = (int)p.keys;
    item.seen = (int)p.keys;
    const unsigned tiles = (item.seen + BLOCK_KEYS - 1) / BLOCK_KEYS;
    item.used = max((tiles + p.partition_tiles - 1) / p.partition_tiles, 1);
    item.first_tile = item.partition * p.partition_tiles;
    item.tiles = min(p.partition_tiles, tiles - min(tiles, item.first_tile));
    return item;
}

// Key chunks of V that some row sees: the load and the MMA role leave out the rest alike.
__device__ __forceinline__ unsigned live_chunks(const Item& item, unsigned tile) {
    return min((item.seen - tile * BLOCK_KEYS + PV_KEY_CHUNK - 1) / PV_KEY_CHUNK, PV_CHUNKS);
}

// Where a role is in a ring. The n-th use of a slot is the phase of parity n % 2 of its `full` and of its `empty`.
struct Cursor {
    unsigned slot = 0, parity = 0;

    __device__ __forceinline__ void advance(unsigned slots = RING_SLOTS) {
        if (++slot == slots) {
            slot = 0;
            parity ^= 1;
        }
    }
};

__device__ __forceinline__ void wait(unsigned mbarrier, unsigned parity) {
    while (!ptx_mbarrier_try_wait(mbarrier, parity)) {
    }
}

// One arrival for the whole warp, after what all of its lanes have done.
__device__ __forceinline__ void arrive_warp(unsigned mbarrier, unsigned lane) {
    __syncwarp();
    if (lane == 0) ptx_mbarrier_arrive(mbarrier);
}

// --- load ------------------------------------------------------------------------------------------------------------

// Load role, one thread: Q once, then K and V of every key tile through the copies' ring, in the order in which the MMA role reads them.
// The order: step i brings V of tile i - WARPGROUPS, then K of tile i, so that a warpgroup has scores while the other's P.V runs.
// Waits: `raw_empty` of a slot (the convert role has read it). Signals: `raw_full`, by the copy's bytes.
// Keys past the end arrive as zeros and count as bytes.
__device__ __forceinline__ void load(const Problem& p, const Item& item, const fa4_tensor_map* q_map, const fa4_tensor_map* k_map,
                                     const fa4_tensor_map* v_map, unsigned smem) {
    ptx_prefetch_tensormap(q_map);
    ptx_prefetch_tensormap(k_map);
    ptx_prefetch_tensormap(v_map);
    // Rows of the Q box outside the tensor (heads past the group, positions past q_len) arrive as zeros.
    const unsigned q_chunk_bytes = p.tile_positions * p.tile_heads * SWIZZLE_BYTES;
    Cursor ring;
#pragma unroll 1
    for (unsigned step = 0; step < item.tiles + WARPGROUPS; ++step) {
        if (step >= WARPGROUPS) {
            const unsigned tile = item.first_tile + step - WARPGROUPS;
            const unsigned chunks = live_chunks(item, tile);
#pragma unroll 1
            for (unsigned part = 0; part < chunks * O_TILES; ++part) {
                const unsigned slot = smem + RAW_OFFSET + ring.slot * RAW_SLOT_BYTES;
                const unsigned full = smem + RAW_FULL_OFFSET + ring.slot * MBARRIER_BYTES;
                wait(smem + RAW_EMPTY_OFFSET + ring.slot * MBARRIER_BYTES, ring.parity ^ 1);
                ptx_mbarrier_arrive_expect_tx(full, RAW_SLOT_BYTES);
                const unsigned key = tile * BLOCK_KEYS + part / O_TILES * PV_KEY_CHUNK;
                ptx_tma_load_5d(slot, v_map, full, 0, key, part % O_TILES * V_BOX_CHUNKS, item.kv_head, item.batch);
                ring.advance(RAW_SLOTS);
            }
        }
        if (step < item.tiles) {
#pragma unroll 1
            for (unsigned stage = 0; stage < QK_STAGES; ++stage) {
                const unsigned full = smem + RAW_FULL_OFFSET + ring.slot * MBARRIER_BYTES;
                wait(smem + RAW_EMPTY_OFFSET + ring.slot * MBARRIER_BYTES, ring.parity ^ 1);
                // The depth slice of Q comes with the first K slice that it meets.
                ptx_mbarrier_arrive_expect_tx(full, step == 0 ? RAW_SLOT_BYTES + q_chunk_bytes : RAW_SLOT_BYTES);
                if (step == 0)
                    ptx_tma_load_5d(smem + Q_OFFSET + stage * Q_CHUNK_BYTES, q_map, full, stage * SUB_TILE_DEPTH, item.head, item.position,
                                    item.kv_head, item.batch);
                ptx_tma_load_5d(smem + RAW_OFFSET + ring.slot * RAW_SLOT_BYTES, k_map, full, 0, (item.first_tile + step) * BLOCK_KEYS, stage,
                                item.kv_head, item.batch);
                ring.advance(RAW_SLOTS);
            }
        }
    }
}

// --- convert ---------------------------------------------------------------------------------------------------------

__device__ __forceinline__ unsigned half_pair(unsigned pair) {
    return ptx_cvt_f16x2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000));
}

// 64 columns of Q in place, from bfloat16 to float16: K and V are float16, which has every e4m3.
__device__ __forceinline__ void convert_queries(unsigned char* chunk, unsigned half, unsigned lane) {
    uint4* const units = reinterpret_cast<uint4*>(chunk);
#pragma unroll 1
    for (unsigned unit = half * 32 + lane; unit < Q_CHUNK_BYTES / 16; unit += CONVERT_WARPS * 32) {
        const uint4 pairs = units[unit];
        units[unit] = make_uint4(half_pair(pairs.x), half_pair(pairs.y), half_pair(pairs.z), half_pair(pairs.w));
    }
}

__device__ __forceinline__ uint4 eight_halves(unsigned low, unsigned high) {
    return make_uint4(ptx_cvt_f16x2_e4m3x2((unsigned short)low), ptx_cvt_f16x2_e4m3x2((unsigned short)(low >> 16)),
                      ptx_cvt_f16x2_e4m3x2((unsigned short)high), ptx_cvt_f16x2_e4m3x2((unsigned short)(high >> 16)));
}

// Convert role, two warps: every sub-tile that the load role brings, in its order, from e4m3 to float16; each warp its half of the 256 rows
// of 64 columns, of K or V alike. A row of 64 bytes has the 64-byte swizzle of its copy (16-byte unit u lies at u ^ row / 2 % 4) and becomes
// one of 128 bytes with the MMA's (unit u at u ^ row % 8). A lane takes 16 bytes of every 8th row, the warp 512 bytes in a row.
// Waits: `raw_full` (the copies of the load role), `ring_empty` (the MMA role's commit behind the last MMA that reads the slot).
// Signals: `ring_full`, `raw_empty`.
__device__ __forceinline__ void convert(const Item& item, unsigned char* smem_bytes, unsigned smem, unsigned half, unsigned lane) {
    constexpr unsigned STEP_ROWS = 8;
    constexpr unsigned WARP_ROWS = BLOCK_KEYS / CONVERT_WARPS;
    constexpr unsigned BATCH = 4;  // loads under way at once
    constexpr unsigned STEP_UNITS = STEP_ROWS * SWIZZLE_BYTES / 16;
    const unsigned row = lane / 4, unit = lane % 4 ^ row / 2;
    Cursor raw, ring;
#pragma unroll 1
    for (unsigned step = 0; step < item.tiles + WARPGROUPS; ++step) {
        // Sub-tiles of V, then of K.
        const unsigned tile = item.first_tile + step - WARPGROUPS;
        const unsigned v_parts = step < WARPGROUPS ? 0 : (live_chunks(item, tile)) * O_TILES;
        const unsigned parts = v_parts + (step < item.tiles ? QK_STAGES : 0);
#pragma unroll 1
        for (unsigned part = 0; part < parts; ++part) {
            const uint4* const from = reinterpret_cast<const uint4*>(smem_bytes + RAW_OFFSET + raw.slot * RAW_SLOT_BYTES + half * WARP_ROWS * RAW_ROW_BYTES) + lane;
            unsigned char* const to = smem_bytes + RING_OFFSET + ring.slot * SLOT_BYTES + (half * WARP_ROWS + row) * SWIZZLE_BYTES;
            uint4* const low = reinterpret_cast<uint4*>(to + ((unit * 2) ^ row) * 16);
            uint4* const high = reinterpret_cast<uint4*>(to + ((unit * 2 + 1) ^ row) * 16);
            wait(smem + RAW_FULL_OFFSET + raw.slot * MBARRIER_BYTES, raw.parity);
            // Q has come with the first K.
            if (step == 0) convert_queries(smem_bytes + Q_OFFSET + part * Q_CHUNK_BYTES, half, lane);
            wait(smem + RING_EMPTY_OFFSET + ring.slot * MBARRIER_BYTES, ring.parity ^ 1);
#pragma unroll 1
            for (unsigned i = 0; i < WARP_ROWS / STEP_ROWS; i += BATCH) {
                uint4 bytes[BATCH];
#pragma unroll
                for (unsigned j = 0; j < BATCH; ++j) bytes[j] = from[(i + j) * 32];
#pragma unroll
                for (unsigned j = 0; j < BATCH; ++j) {
                    low[(i + j) * STEP_UNITS] = eight_halves(bytes[j].x, bytes[j].y);
                    high[(i + j) * STEP_UNITS] = eight_halves(bytes[j].z, bytes[j].w);
                }
            }
            // The MMA reads the slot through the asynchronous proxy; the copy that refills the other one could overtake the reads of it.
            ptx_fence_proxy_async();
            __syncwarp();
            if (lane == 0) {
                ptx_mbarrier_arrive(smem + RING_FULL_OFFSET + ring.slot * MBARRIER_BYTES);
                ptx_mbarrier_arrive(smem + RAW_EMPTY_OFFSET + raw.slot * MBARRIER_BYTES);
            }
            raw.advance(RAW_SLOTS);
            ring.advance();
        }
    }
}

// --- MMA -------------------------------------------------------------------------------------------------------------

// The low word of the descriptor of the swizzled tile at this shared address; adding 16-byte units moves it.
__device__ __forceinline__ unsigned long long operand(unsigned long long descriptor, unsigned address) {
    return descriptor | address / DESCRIPTOR_UNIT;
}

// MMA role, one thread: S = Q . K^T and O += P . V of all warpgroups, in the order of the load role: step i is P.V of tile i - WARPGROUPS,
// then S of tile i.
// Waits: `ring_full` (the convert role), `p_ready` (softmax and, for stage 0, correction).
// Signals by commit: `ring_empty` of each slot, `s_full`, `o_full`; and `s_full` once more at the end, when every MMA is done.
__device__ __forceinline__ void multiply(const Item& item, unsigned smem, unsigned tmem, bool negative_scale) {
    // Maxima are taken of raw scores, which needs a positive scale: a negative one moves its sign into Q.
    const unsigned qk_instruction = QK_INSTRUCTION | (negative_scale ? NEGATE_A : 0);
    Cursor ring;
#pragma unroll 1
    for (unsigned step = 0; step < item.tiles + WARPGROUPS; ++step) {
        const unsigned warpgroup = step % WARPGROUPS;
        const unsigned round = step / WARPGROUPS;  // tile number of the warpgroup whose S is computed; P.V is one behind
        const unsigned s_full = smem + S_FULL_OFFSET + warpgroup * MBARRIER_BYTES;
        const unsigned o_full = smem + O_FULL_OFFSET + warpgroup * MBARRIER_BYTES;
        const unsigned p_ready = smem + P_READY_OFFSET + warpgroup * P_STAGES * MBARRIER_BYTES;
        const unsigned s = tmem + S_COLUMN + warpgroup * S_COLS;
        if (step >= WARPGROUPS) {
            const unsigned o = tmem + O_COLUMN + warpgroup * O_PHYS_COLS;
            const unsigned p = smem + P_OFFSET + warpgroup * P_TILE_BYTES;
            const unsigned chunks = live_chunks(item, item.first_tile + step - WARPGROUPS);
            // Stage 0 of P: written by the softmax warps; O rescaled by the correction warps.
            wait(p_ready, (round - 1) & 1);
            ptx_tcgen05_fence_after();
#pragma unroll 1
            for (unsigned chunk = 0; chunk < chunks; ++chunk) {
#pragma unroll 1
                for (unsigned o_tile = 0; o_tile < O_TILES; ++o_tile) {
                    wait(smem + RING_FULL_OFFSET + ring.slot * MBARRIER_BYTES, ring.parity);
                    const unsigned v = smem + RING_OFFSET + ring.slot * SLOT_BYTES;
#pragma unroll
                    for (unsigned k = 0; k < PV_STEPS; ++k) {
                        if (k == STAGE_1_STEP && chunk == STAGE_1_CHUNK && o_tile == 0) {
                            // Stage 1 of P: written by the softmax warps.
                            wait(p_ready + MBARRIER_BYTES, (round - 1) & 1);
                            ptx_tcgen05_fence_after();
                        }
                        const unsigned key = chunk * PV_KEY_CHUNK + k * MMA_K;
                        const unsigned a = p + key / P_ATOM_KEYS * P_ATOM_BYTES + key % P_ATOM_KEYS * 2;
                        ptx_tcgen05_mma_ws_ss(o + o_tile * BAND_COLS, operand(K_MAJOR, a), operand(V_MAJOR, v + k * V_STEP_BYTES),
                                              PV_INSTRUCTION, round > 1 || key > 0);
                    }
                    ptx_tcgen05_commit(smem + RING_EMPTY_OFFSET + ring.slot * MBARRIER_BYTES);
                    ring.advance();
                }
            }
            ptx_tcgen05_commit(o_full);
        }
        if (step < item.tiles) {
            // S is free: the softmax warps had read the previous one when they handed over the P that was waited for above.
#pragma unroll 1
            for (unsigned stage = 0; stage < QK_STAGES; ++stage) {
                wait(smem + RING_FULL_OFFSET + ring.slot * MBARRIER_BYTES, ring.parity);
#pragma unroll
                for (unsigned k = 0; k < SUB_TILE_DEPTH / MMA_K; ++k) {
                    const unsigned a = smem + Q_OFFSET + stage * Q_CHUNK_BYTES + k * K_STEP_BYTES;
                    const unsigned b = smem + RING_OFFSET + ring.slot * SLOT_BYTES + k * K_STEP_BYTES;
                    ptx_tcgen05_mma_ws_ss(s, operand(K_MAJOR, a), operand(K_MAJOR, b), qk_instruction, (stage | k) != 0);
                }
                ptx_tcgen05_commit(smem + RING_EMPTY_OFFSET + ring.slot * MBARRIER_BYTES);
                ring.advance();
            }
            ptx_tcgen05_commit(s_full);
        }
    }
    // O is complete, and nothing reads Q, the ring or P any more: the epilogue may stage over them.
    for (unsigned warpgroup = 0; warpgroup < min(item.tiles, WARPGROUPS); ++warpgroup)
        ptx_tcgen05_commit(smem + S_FULL_OFFSET + warpgroup * MBARRIER_BYTES);
}

// --- softmax ---------------------------------------------------------------------------------------------------------

// The state of a thread's query row.
struct Row {
    float reference = MINUS_INFINITY;      // raw score that probabilities are relative to: the maximum, or up to RESCALE_LOG2 below it
    float offset = 0.0f;                   // -reference * scale_log2e, 0 while there is no key: 2^(-inf + 0) = 0 instead of 2^(inf - inf)
    float2 sum = make_float2(0.0f, 0.0f);  // of this thread's own probabilities, even and odd columns
    unsigned exchange_seq = 0;             // exchanges of the warpgroup so far; never restarts
};

// What a softmax thread knows about its place.
struct Place {
    unsigned warpgroup, thread, lane;  // thread of the warpgroup
    unsigned row, part;                // thread = part * ROWS + row: its keys of a tile are [part * S_COLS, part * S_COLS + S_COLS)
};

// The largest of a thread's scores.
__device__ __forceinline__ float largest(const float (&s)[S_COLS]) {
    float top[4];
#pragma unroll
    for (unsigned chain = 0; chain < 4; ++chain) top[chain] = ptx_max_ftz(s[2 * chain], s[2 * chain + 1]);
#pragma unroll
    for (unsigned column = 8; column < S_COLS; column += 8)
#pragma unroll
        for (unsigned chain = 0; chain < 4; ++chain)
            top[chain] = ptx_max3_ftz(top[chain], s[column + 2 * chain], s[column + 2 * chain + 1]);
    return ptx_max_ftz(ptx_max3_ftz(top[0], top[1], top[2]), top[3]);
}

// Softmax role, a warpgroup: turns S of its key tiles into P, and keeps the row's reference and sum.
// Waits: `s_full` (the MMA role's commit: S is there, and the previous P.V has read P), `correction_empty` (factors read).
// Signals: `correction_full`, then `p_ready` of stage 0 and 1.
__device__ __forceinline__ void softmax(Row& state, const Problem& p, const Item& item, const Place& at, unsigned char* smem_bytes,
                                        unsigned smem, unsigned tmem, float scale_log2e) {
    const unsigned s_tmem = tmem + S_COLUMN + at.warpgroup * S_COLS;
    const unsigned s_full = smem + S_FULL_OFFSET + at.warpgroup * MBARRIER_BYTES;
    const unsigned p_ready = smem + P_READY_OFFSET + at.warpgroup * P_STAGES * MBARRIER_BYTES;
    const unsigned correction_full = smem + CORRECTION_OFFSET + at.warpgroup * 2 * MBARRIER_BYTES;
    float* const factors = reinterpret_cast<float*>(smem_bytes + FACTORS_OFFSET);
    float* const exchange = reinterpret_cast<float*>(smem_bytes + EXCHANGE_OFFSET);
    unsigned char* const p_row = smem_bytes + P_OFFSET + at.warpgroup * P_TILE_BYTES + at.row * SWIZZLE_BYTES;
    const float2 scales = make_float2(scale_log2e, scale_log2e);

    unsigned round = 0;  // tile number of the warpgroup
#pragma unroll 1
    for (unsigned tile = at.warpgroup; tile < item.tiles; tile += WARPGROUPS, ++round) {
        // S of this tile is complete (multiply's commit).
        wait(s_full, round & 1);
        ptx_tcgen05_fence_after();
        float s[S_COLS];
        ptx_tcgen05_ld_x64(s_tmem + 0, s + 0);
        // S may be overwritten once stage 0 of P is handed over.
        ptx_tcgen05_wait_ld();
        const int first_key = (item.first_tile + tile) * BLOCK_KEYS;
        if (first_key + (int)BLOCK_KEYS > item.all_see) {
            // Keys past the end do not count.
            const int visible = (int)p.keys - first_key - (int)(at.part * S_COLS);
#pragma unroll
            for (unsigned column = 0; column < S_COLS; ++column)
                if ((int)column >= visible) s[column] = MINUS_INFINITY;
        }

        // All parts of the row agree on its maximum, so their votes, factors and sums stay in one scale.
        const float own_maximum = ptx_max_ftz(state.reference, largest(s));
        const float maximum = fa4_ws_exchange4_max(own_maximum, at.row, at.part, at.warpgroup, state.exchange_seq++, exchange);
        float factor = 1.0f;
        // -inf on both sides (no key yet) is NaN, which is not greater.
        if (__any_sync(0xffffffff, (maximum - state.reference) * scale_log2e > RESCALE_LOG2)) {
            // No key so far: nothing to rescale, and the growth would be infinite.
            const float offset = maximum == MINUS_INFINITY ? 0.0f : -maximum * scale_log2e;
            factor = state.reference == MINUS_INFINITY ? 0.0f : ptx_ex2_approx_ftz(ptx_sub_rn(offset, state.offset));
            state.offset = offset;
            state.reference = maximum;
            state.sum = ptx_mul_f32x2(state.sum, make_float2(factor, factor));
        }
        if (round > 0) {
            // The correction warps have read the previous tile's factors. (The S of this tile follows from that by way of multiply, but
            // through an asynchronous commit, which only promises to order its MMAs.)
            wait(correction_full + MBARRIER_BYTES, round & 1);
            factors[at.warpgroup * 128 + at.thread] = factor;
            arrive_warp(correction_full, at.lane);
        }

        const float2 offsets = make_float2(state.offset, state.offset);
#pragma unroll
        for (unsigned stage = 0; stage < P_STAGES; ++stage) {
            unsigned packed[P_STAGE_COLS / 2];
#pragma unroll
            for (unsigned pair = 0; pair < P_STAGE_COLS / 2; ++pair) {
                const unsigned column = stage * P_STAGE_COLS + 2 * pair;
                const float2 x = ptx_fma_f32x2(make_float2(s[column], s[column + 1]), scales, offsets);
                const float2 probability = make_float2(ptx_ex2_approx_ftz(x.x), ptx_ex2_approx_ftz(x.y));
                state.sum = ptx_add_f32x2(state.sum, probability);
                packed[pair] = ptx_cvt_f16x2(probability.x, probability.y);
            }
#pragma unroll
            for (unsigned octet = 0; octet < P_STAGE_COLS / 8; ++octet) {
                // 8 keys are one 16-byte unit; unit u of a row lies at u ^ (row % 8) of its 128 bytes.
                const unsigned key = at.part * S_COLS + stage * P_STAGE_COLS + octet * 8;
                *reinterpret_cast<uint4*>(p_row + key / P_ATOM_KEYS * P_ATOM_BYTES + ((key % P_ATOM_KEYS / 8) ^ (at.row % 8)) * 16) =
                    make_uint4(packed[4 * octet], packed[4 * octet + 1], packed[4 * octet + 2], packed[4 * octet + 3]);
            }
            // The MMA reads P through the asynchronous proxy.
            ptx_fence_proxy_async();
            ptx_tcgen05_fence_before();
            arrive_warp(p_ready + stage * MBARRIER_BYTES, at.lane);
        }
    }
}

// What the partitions of a query tile hand over in global memory: each its O, normalised, and the log2 of its LSE.
struct Workspace {
    float* o;                     // [query_tile][partition][depth / 4][row][4]
    float* lse;                   // [query_tile][partition][row]
    unsigned long long* arrived;  // [query_tile], see arrive_last
    unsigned launch;              // the number of this launch
};

// Whether this thread is the last of `expected` to arrive at a counter in this launch; it then acquires what the others have released.
//
// A counter is 0 between launches: the last arrival sees to that. A launch that was aborted may leave anything, so a counter also names the
// launch that it counts for, in its upper half: every arrival first raises it to its own launch's number, with nothing counted, which
// leaves a count under way as it is and starts afresh from what an earlier launch left. Numbers of launches with one workspace rise; the
// same may come again (a graph that is replayed) as long as no launch in between was aborted. The raise waits for nothing.
__device__ __forceinline__ bool arrive_last(unsigned long long* counter, unsigned launch, unsigned expected) {
    const unsigned long long none = (unsigned long long)launch << 32;
    ptx_red_max_relaxed(counter, none);
    if (ptx_atom_add_acq_rel(counter, 1) != none + expected - 1) return false;
    ptx_st_relaxed(counter, 0);
    return true;
}

// What the epilogue of a CTA writes to: the staged output tile, or the partition's place in the workspace.
struct Sink {
    unsigned char* smem;
    float4* partial;  // of this thread's row; null: the staged tile
};

// The 16-byte block of an output row that this thread's columns of an O tile begin at.
__device__ __forceinline__ unsigned first_block(unsigned o_tile, const Place& at) {
    return o_tile * O_TILE_BLOCKS + at.part * BAND_BLOCKS;
}

// The same place in a partition's O.
__device__ __forceinline__ unsigned first_quad(unsigned o_tile, const Place& at) {
    return first_block(o_tile, at) * (OUT_K / 4) * ROWS + at.row;
}

// Row sums, then O by output depth tile: level 0 reads the band, level 2 merges the warpgroups, normalises and writes.
// Returns {m, l}.
__device__ __forceinline__ float2 gather(const Row& state, const Place& at, const Sink& sink, unsigned tmem,
                                         float scale_log2e, bool merged, float v_scale) {
    // Continues the sequence of the key tiles' maxima: restarting it could meet a buffer that a slow warp still reads.
    const float sum = fa4_ws_exchange4_add(state.sum.x + state.sum.y, at.row, at.part, at.warpgroup, state.exchange_seq,
                                           reinterpret_cast<float*>(sink.smem + EXCHANGE_OFFSET));
    float2 ml;
#pragma unroll 1
    for (unsigned o_tile = 0; o_tile < O_TILES; ++o_tile) {
        float band[LEVEL2_COLS];
        fa4_ws_level0_band(tmem + O_COLUMN + at.warpgroup * O_PHYS_COLS + o_tile * BAND_COLS, band);
        // The next barrier orders these loads before the tensor memory is freed.
        ptx_tcgen05_wait_ld();
        ptx_tcgen05_fence_before();
        ml = fa4_ws_level2_reduce_scatter_write(at.row, at.part, merged, at.warpgroup, state.reference, sum, scale_log2e, band,
                                                o_tile == 0, reinterpret_cast<float*>(sink.smem + WINDOWS_OFFSET + o_tile * WINDOW_BYTES),
                                                reinterpret_cast<float*>(sink.smem + WINDOW_ML_OFFSET), first_block(o_tile, at),
                                                reinterpret_cast<fa4_bf16*>(sink.smem + OUT_OFFSET),
                                                sink.partial == nullptr ? nullptr : sink.partial + first_quad(o_tile, at), v_scale);
    }
    return ml;
}

// O of all partitions of a query tile to the staged tile, in the order of the keys whichever CTA does it. Returns the log2 of the LSE.
__device__ __forceinline__ float merge_partitions(const Problem& p, const Item& item, const Place& at, const Workspace& workspace,
                                                  unsigned char* smem_bytes) {
    const unsigned first = item.query_tile * p.partitions;
    const float* lse = workspace.lse + first * ROWS + at.row;
    const float4* from = reinterpret_cast<const float4*>(workspace.o) + (unsigned long long)first * O_QUADS;
    float top = MINUS_INFINITY;
#pragma unroll 1
    for (unsigned i = 0; i < item.used; ++i) top = ptx_max_ftz(top, lse[i * ROWS]);
    const float offset = top == MINUS_INFINITY ? 0.0f : -top;
    float sum = 0.0f;
#pragma unroll 1
    for (unsigned i = 0; i < item.used; ++i) sum += ptx_ex2_approx_ftz(lse[i * ROWS] + offset);
    // A row without a key in any partition: weights 0.
    const float inverse = sum > 0.0f ? ptx_rcp_approx_ftz(sum) : 0.0f;
#pragma unroll 1
    for (unsigned o_tile = 0; o_tile < O_TILES; ++o_tile) {
        float band[LEVEL2_COLS];
#pragma unroll
        for (unsigned column = 0; column < LEVEL2_COLS; ++column) band[column] = 0.0f;
#pragma unroll 1
        for (unsigned i = 0; i < item.used; ++i) {
            const float weight = ptx_ex2_approx_ftz(lse[i * ROWS] + offset) * inverse;
#pragma unroll
            for (unsigned quad = 0; quad < LEVEL2_COLS / 4; ++quad) {
                const float4 part = from[i * O_QUADS + first_quad(o_tile, at) + quad * ROWS];
                band[quad * 4 + 0] = __fmaf_rn(weight, part.x, band[quad * 4 + 0]);
                band[quad * 4 + 1] = __fmaf_rn(weight, part.y, band[quad * 4 + 1]);
                band[quad * 4 + 2] = __fmaf_rn(weight, part.z, band[quad * 4 + 2]);
                band[quad * 4 + 3] = __fmaf_rn(weight, part.w, band[quad * 4 + 3]);
            }
        }
        fa4_stage_columns(reinterpret_cast<fa4_bf16*>(smem_bytes + OUT_OFFSET), first_block(o_tile, at), at.row, band);
    }
    return top + ptx_lg2_approx_ftz(sum);
}

// O and LSE of the tile: what the softmax warpgroups do after their key tiles.
// Waits: `s_full` once more (the MMA role's last commit: every MMA is done, so O is complete and Q and the ring are dead).
// Warpgroup 1 leaves when it has handed over its part; warpgroup 0 frees the tensor memory and stores.
// Of several partitions, the CTA that finishes last merges them and stores.
__device__ __forceinline__ void finish(const Row& state, const Problem& p, const Item& item, const Place& at, const fa4_tensor_map* out_map,
                                       float* lse, const Workspace& workspace, unsigned char* smem_bytes, unsigned smem, unsigned tmem,
                                       float scale_log2e, const float* v_scale) {
    // With one key tile (or none) warpgroup 1 has nothing and is not waited for. Both take the same branch.
    const bool merged = item.tiles > 1;
    if (!merged && at.warpgroup == 1) return;
    const unsigned place = item.query_tile * p.partitions + item.partition;
    const bool split = item.used > 1;
    float2 ml = make_float2(MINUS_INFINITY, 0.0f);
    if (item.tiles > 0) {
        const unsigned rounds = (item.tiles - at.warpgroup + WARPGROUPS - 1) / WARPGROUPS;
        wait(smem + S_FULL_OFFSET + at.warpgroup * MBARRIER_BYTES, rounds & 1);
        ptx_tcgen05_fence_after();
        float4* const partial = reinterpret_cast<float4*>(workspace.o) + (unsigned long long)place * O_QUADS;
        const Sink sink{smem_bytes, split ? partial : nullptr};
        ml = gather(state, at, sink, tmem, scale_log2e, merged, v_scale[item.kv_head]);
        if (at.warpgroup == 1) return;
    }
    // m scale log2(e) + log2(l); without a key both terms are -inf.
    float log2_lse = ptx_fma_rn(ml.x, scale_log2e, ptx_lg2_approx_ftz(ml.y));

    if (split) {
        if (at.part == 0) workspace.lse[place * ROWS + at.row] = log2_lse;
        // Orders the warpgroup's part of the workspace before the arrival that publishes it.
        ptx_bar_sync(0, 128);
        // The last partition to arrive has seen all others' parts.
        const bool last = at.thread == 0 && arrive_last(workspace.arrived + item.query_tile, workspace.launch, item.used);
        // Orders the arrival before every thread's reads of the workspace.
        if (!ptx_bar_red_or(0, 128, last)) {
            ptx_tcgen05_fence_after();
            if (at.thread < 32) ptx_tcgen05_dealloc(tmem, TMEM_COLUMNS);
            return;
        }
        log2_lse = merge_partitions(p, item, at, workspace, smem_bytes);
    }
    // The TMA reads the staged tile through the asynchronous proxy.
    ptx_fence_proxy_async();
    // Orders the warpgroup's part of the tile before the copies, and its reads of tensor memory before it is freed.
    ptx_bar_sync(0, 128);
    ptx_tcgen05_fence_after();
    if (at.thread < 32) {
        ptx_tcgen05_dealloc(tmem, TMEM_COLUMNS);
        if (ptx_elect_sync()) {
#pragma unroll 1
            for (unsigned chunk = 0; chunk < OUT_CHUNKS; ++chunk)
                // Rows of the box outside the tensor are dropped.
                ptx_tma_store_5d(out_map, smem + OUT_OFFSET + chunk * OUT_CHUNK_BYTES, chunk * OUT_CHUNK_COLS, item.head, item.position,
                                 item.kv_head, item.batch);
            ptx_bulk_commit_group();
        }
        __syncwarp();
    }

    // One thread a row writes the LSE, in natural units.
    const unsigned position = item.position + at.row / p.tile_heads;
    const unsigned head = item.head + at.row % p.tile_heads;
    if (at.part == 0 && at.row < p.tile_heads * p.tile_positions && position < p.q_len && head < p.group) {
        const unsigned long long q_head = (unsigned long long)(item.batch * p.kv_heads + item.kv_head) * p.group + head;
        lse[q_head * p.q_len + position] = log2_lse * LN2;
    }
    // Shared memory has to stay until the copies have read it. Threads that have issued none have nothing to wait for.
    if (at.thread < 32) ptx_bulk_wait_group_read();
}

// --- correction ------------------------------------------------------------------------------------------------------

// Correction role, one warpgroup: brings O to the scale of a new row reference, in tensor memory, between two P.V of a softmax warpgroup.
// Thread t owns lane t of every accumulator, as softmax thread t does.
// Waits: `correction_full` (the softmax warps have written the factors), `o_full` (the MMA role's commit behind the previous P.V).
// Signals: `correction_empty` (factors read), `p_ready` of stage 0 (O may be added to).
__device__ __forceinline__ void correct(const Item& item, const float* factors, unsigned smem, unsigned tmem, unsigned thread) {
    const unsigned lane = thread % 32;
#pragma unroll 1
    for (unsigned tile = 0; tile < item.tiles; ++tile) {
        const unsigned warpgroup = tile % WARPGROUPS;
        const unsigned round = tile / WARPGROUPS;
        // The first P.V of a warpgroup overwrites O: nothing to rescale, no factors.
        if (round > 0) {
            const unsigned full = smem + CORRECTION_OFFSET + warpgroup * 2 * MBARRIER_BYTES;
            // The softmax warps have written this tile's factors.
            wait(full, (round - 1) & 1);
            const float factor = factors[warpgroup * 128 + thread];
            arrive_warp(full + MBARRIER_BYTES, lane);
            // The previous P.V is done. The softmax role has seen as much through s_full, but tcgen05 operations are ordered only for
            // threads that wait for the commit themselves.
            wait(smem + O_FULL_OFFSET + warpgroup * MBARRIER_BYTES, (round - 1) & 1);
            // Lazy: the softmax role leaves the factor at 1 until some row's maximum has grown enough.
            if (__any_sync(0xffffffff, factor != 1.0f)) {
                ptx_tcgen05_fence_after();
                const unsigned o = tmem + O_COLUMN + warpgroup * O_PHYS_COLS;
#pragma unroll
                for (unsigned column = 0; column < O_PHYS_COLS; column += CORRECTION_COLS) {
                    float values[CORRECTION_COLS];
                    ptx_tcgen05_ld_x32(o + column, values);
                    // The stores below overwrite what is read here: a data dependence orders the values, but not the accesses.
                    ptx_tcgen05_wait_ld();
#pragma unroll
                    for (unsigned i = 0; i < CORRECTION_COLS; i += 2) {
                        const float2 scaled = ptx_mul_f32x2(make_float2(values[i], values[i + 1]), make_float2(factor, factor));
                        values[i] = scaled.x;
                        values[i + 1] = scaled.y;
                    }
                    ptx_tcgen05_st_x32(o + column, values);
                }
                ptx_tcgen05_wait_st();
                ptx_tcgen05_fence_before();
            }
        }
        arrive_warp(smem + P_READY_OFFSET + warpgroup * P_STAGES * MBARRIER_BYTES, lane);
    }
}

// --- entry -----------------------------------------------------------------------------------------------------------

// q_map    [batch][kv_heads][q_len][group][512], box 1 x 1 x positions x heads x 64, 128-byte swizzle
// k_map    [batch][kv_heads][8][keys][64], box 1 x 1 x 1 x 256 x 64, 64-byte swizzle
// v_map    as k_map, box 1 x 1 x 4 x 64 x 64
// out_map  as q_map, box 1 x 1 x positions x heads x 64, 128-byte swizzle
// lse      [batch][kv_heads * group][q_len] float, natural logarithm
// partition_tiles, partitions: key tiles of a partition, and how many of them cover the keys; with one, the last four are not read
// launch: a number that rises with every launch that uses the workspace, see arrive_last
// partial_o, partial_lse, arrived: see Workspace. It belongs to one launch at a time, so to a stream; `arrived` is 0 at first, and after a launch.
// Grid: batch * partitions * tiles * kv_heads, one CTA each. Block: THREADS.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
fa4_attention_d512_m4r32_sk_bf16_kv8_sm100a(
    const __grid_constant__ fa4_tensor_map q_map, const __grid_constant__ fa4_tensor_map k_map,
    const __grid_constant__ fa4_tensor_map v_map, const __grid_constant__ fa4_tensor_map out_map, float* lse, unsigned batch,
    unsigned q_len, unsigned keys, unsigned kv_heads, unsigned group, float scale,
    unsigned partition_tiles, unsigned partitions, unsigned launch, float* partial_o, float* partial_lse, unsigned long long* arrived, const float* k_scale, const float* v_scale) {
    extern __shared__ __align__(1024) unsigned char smem_bytes[];
    const unsigned smem = (unsigned)__cvta_generic_to_shared(smem_bytes);
    // The same in all lanes; the shuffle lets the compiler know.
    const unsigned warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    const unsigned lane = threadIdx.x % 32;
    const Problem p = describe(q_len, keys, kv_heads, group, partition_tiles, partitions);
    const Item item = item_at(p, blockIdx.x);
    // The same for the whole CTA: a partition past the last key that some row sees.
    if (item.partition >= item.used) return;

    if (warp == 0) {
        ptx_tcgen05_alloc(reinterpret_cast<unsigned*>(smem_bytes + TMEM_ADDRESS_OFFSET), TMEM_COLUMNS);
        ptx_tcgen05_relinquish();
    }
    if (warp == LOAD_WARP && ptx_elect_sync()) {
        for (unsigned slot = 0; slot < RING_SLOTS; ++slot) {
            ptx_mbarrier_init(smem + RING_FULL_OFFSET + slot * MBARRIER_BYTES, CONVERT_WARPS);
            ptx_mbarrier_init(smem + RING_EMPTY_OFFSET + slot * MBARRIER_BYTES, 1);
        }
        for (unsigned slot = 0; slot < RAW_SLOTS; ++slot) {
            ptx_mbarrier_init(smem + RAW_FULL_OFFSET + slot * MBARRIER_BYTES, 1);
            ptx_mbarrier_init(smem + RAW_EMPTY_OFFSET + slot * MBARRIER_BYTES, CONVERT_WARPS);
        }
        for (unsigned warpgroup = 0; warpgroup < WARPGROUPS; ++warpgroup) {
            ptx_mbarrier_init(smem + S_FULL_OFFSET + warpgroup * MBARRIER_BYTES, 1);
            ptx_mbarrier_init(smem + P_READY_OFFSET + warpgroup * P_STAGES * MBARRIER_BYTES, 8);
            ptx_mbarrier_init(smem + P_READY_OFFSET + (warpgroup * P_STAGES + 1) * MBARRIER_BYTES, 4);
            ptx_mbarrier_init(smem + CORRECTION_OFFSET + warpgroup * 2 * MBARRIER_BYTES, 4);
            ptx_mbarrier_init(smem + CORRECTION_OFFSET + (warpgroup * 2 + 1) * MBARRIER_BYTES, 4);
            ptx_mbarrier_init(smem + O_FULL_OFFSET + warpgroup * MBARRIER_BYTES, 1);
        }
        ptx_fence_mbarrier_init();
    }
    // Tile rows that no box covers: zeros.
    const unsigned used_rows = p.tile_heads * p.tile_positions;
    if (used_rows < ROWS) {
        for (unsigned unit = threadIdx.x; unit < Q_BYTES / 16; unit += THREADS)
            if (unit / 8 % ROWS >= used_rows) reinterpret_cast<uint4*>(smem_bytes + Q_OFFSET)[unit] = make_uint4(0, 0, 0, 0);
        ptx_fence_proxy_async();
    }
    // Orders the allocation and its address, the mbarriers' initialisation and the zeros before every role.
    ptx_tcgen05_fence_before();
    ptx_bar_sync(0, THREADS);
    ptx_tcgen05_fence_after();
    const unsigned tmem = *reinterpret_cast<const volatile unsigned*>(smem_bytes + TMEM_ADDRESS_OFFSET);

    if (warp < WARPGROUPS * 4) {
        ptx_setmaxnreg_inc<192>();
        const unsigned thread = threadIdx.x % 128;
        const Place at{warp / 4, thread, lane, thread % ROWS, thread / ROWS};
        // Worked out anew: what is kept from before the roles part is kept within the few registers that the issuing warps have.
        const Item own = item_at(p, ptx_ctaid_x());
        // A negative scale is in the sign of S already (see multiply). 0 becomes a scale so small that every probability is still 1: 0
        // itself would make -inf * 0 of a masked score.
        const float scale_log2e = fmaxf(fabsf(scale * LOG2E * k_scale[own.kv_head]), 1e-30f);
        Row state;
        softmax(state, p, own, at, smem_bytes, smem, tmem, scale_log2e);
        const Workspace workspace{partial_o, partial_lse, arrived, launch};
        finish(state, p, own, at, &out_map, lse, workspace, smem_bytes, smem, tmem, scale_log2e, v_scale);
    } else if (warp < WARPGROUPS * 4 + 4) {
        ptx_setmaxnreg_dec<72>();
        correct(item, reinterpret_cast<const float*>(smem_bytes + FACTORS_OFFSET), smem, tmem, threadIdx.x % 128);
    } else {
        ptx_setmaxnreg_dec<56>();
        if (warp == LOAD_WARP && ptx_elect_sync())
            load(p, item, &q_map, &k_map, &v_map, smem);
        else if (warp == MMA_WARP && ptx_elect_sync())
            multiply(item, smem, tmem, scale * k_scale[item.kv_head] < 0.0f);
        else if (warp >= CONVERT_WARP)
            convert(item, smem_bytes, smem, warp - CONVERT_WARP, lane);
    }
}
