// Attention for sm_100a, shared-key: O = softmax(scale Q K^T) V and its LSE
//
// Generated from templates/kernels/attention_sm100a.cu.j2 for config d128_fp8 on sm_100a.
// Do not edit: change the template or the config, then run
//     fa4gen emit --config d128_fp8.yaml
//
// One CTA works on one tile of 32 query rows (positions x heads of one KV head), 128 deep, over key tiles of 256 keys, by tcgen05.mma.ws
// with M = 32. An accumulator of 32 rows x N columns is folded onto all 128 lanes of tensor memory: element (m, n) lies in lane
// m + 32 * (n / (N / 4)), column n % (N / 4). So 4 "parts" of 32 lanes each hold a share of the columns, and thread t of a warpgroup
// works on row t % 32 of part t / 32.
//     S[32 x 256]  = Q . K^T   A = Q, B = K, both K-major in shared memory; N = 256: part g gets keys [64 g, 64 g + 64)
//     O[32 x 128] += P . V     A = P, K-major in shared memory, B = V, MN-major; N = 128: part g gets 32 depth columns
// All parts attend to the same keys and hold depth bands of one O. They agree on the row maximum of each tile (fa4_ws_exchange4_max) and
// on the row sum once, at the end (fa4_ws_exchange4_add).
// Two softmax warpgroups take every other key tile, each with S and O of its own, and are merged at the end.
//
// Roles, 512 threads (each with a comment on what it waits for and signals):
//     warps  0 -  3  softmax, warpgroup 0: scores to probabilities; at the end O and LSE    192 registers
//     warps  4 -  7  softmax, warpgroup 1: scores to probabilities; at the end O and LSE    192 registers
//     warps  8 - 11  correct: rescales O in tensor memory when a row maximum has grown   88
//     warp  12       load: Q, K and V by TMA                                               40
//     warp  13       multiply: one thread issues every MMA                                 40
//     warps 14 - 15  convert: K and V from e4m3 to float16, zeros in V past the sequence's end  40
//
// Tensor memory, columns of all 128 lanes (192 used, 256 allocated):
//           0      64  S0
//          64      64  S1
//         128      32  O0
//         160      32  O1
//
// Shared memory, bytes:
//           0    8192  q
//        8192   65536  ring
//       73728  114688  raw
//      188416   32768  p
//      221184    2048  exchange
//      223232    1024  correction
//      224256     192  scales
//      224448      16  mbar_ring_full
//      224464      16  mbar_ring_empty
//      224480      56  mbar_raw_full
//      224536      56  mbar_raw_empty
//      224592      16  mbar_s_full
//      224608      32  mbar_p_ready
//      224640      32  mbar_correction
//      224672      16  mbar_o_full
//      224688      32  mbar_scales
//      224720       4  tmem_address
//      224736 in all
// In the epilogue, over Q and the rings:
//           0    8192  out
//        8192   16384  windows
//       24576     256  window_ml
//
// mbarriers (arrivals a phase; who arrives -> who waits). w is the warpgroup of a key tile, the phase its number of the tile:
//     raw_full[7]      1  load, and the bytes of the copies -> convert
//     raw_empty[7]     2  convert: both warps have read the slot -> load
//     ring_full[2]     2  convert: both warps have written their half, and of Q -> multiply
//     ring_empty[2]    1  multiply, commit behind the last MMA that reads the slot -> convert
//     s_full[w]        1  multiply, commit behind S; once more when every MMA is done -> softmax w
//     p_ready[w][0]    8  softmax w: S is read, stage 0 of P is written (4 warps); correct: O is rescaled (4 warps) -> multiply
//     p_ready[w][1]    4  softmax w: stage 1 of P is written -> multiply
//     correction[w][0] 4  softmax w: factors are written -> correct
//     correction[w][1] 4  correct: factors are read -> softmax w
//     scales[w][0]     4  correct: scales of the first, third .. key tile of w are written -> softmax w
//     scales[w][1]     4  correct: those of the second, fourth .. -> softmax w
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
constexpr unsigned QK_STAGES = 2;        // sub-tiles [BLOCK_KEYS][64] of a K tile: depth / 64
constexpr unsigned O_TILES = 1;          // P.V MMAs that cover O: each N = 128, 32 columns of tensor memory
constexpr unsigned PV_KEY_CHUNK = 128;    // keys in one V sub-tile
constexpr unsigned PV_CHUNKS = 2;        // key chunks of a V tile
constexpr unsigned PV_STEPS = 8;         // MMAs along a key chunk, 16 keys each
constexpr unsigned MMA_K = 16;
constexpr unsigned P_STAGES = 2;         // parts in which a thread hands over its probabilities
constexpr unsigned P_STAGE_COLS = 32;
constexpr unsigned STAGE_1_CHUNK = 0;    // the chunk, and the MMA of it, that first needs stage 1
constexpr unsigned STAGE_1_STEP = 2;
constexpr float RESCALE_LOG2 = 8.0f;      // O is rescaled when a maximum has grown by more than a factor 2^8
// Tensor memory
constexpr unsigned TMEM_COLUMNS = 256;
constexpr unsigned S_COLUMN = 0;         // + warpgroup * S_COLS
constexpr unsigned S_COLS = 64;
constexpr unsigned O_COLUMN = 128;       // + warpgroup * O_PHYS_COLS
constexpr unsigned O_PHYS_COLS = 32;
constexpr unsigned BAND_COLS = 32;       // of an O tile
constexpr unsigned CORRECTION_COLS = 32;
// Shared memory
constexpr unsigned SWIZZLE_BYTES = 128;
constexpr unsigned Q_OFFSET = 0;
constexpr unsigned Q_BYTES = 8192;
constexpr unsigned Q_CHUNK_BYTES = 4096;  // [ROWS][128]
constexpr unsigned RING_OFFSET = 8192;
constexpr unsigned RING_SLOTS = 2;
constexpr unsigned SLOT_BYTES = 32768;    // [BLOCK_KEYS][128] of K; as many bytes of V
constexpr unsigned K_BOX_KEYS = 64;       // keys of a K copy
constexpr unsigned V_BOX_KEYS = 64;       // keys of a V copy
constexpr unsigned V_BOX_ROWS = 64;       // rows of 64 columns of it: 1 for each key
constexpr unsigned RAW_OFFSET = 73728;
constexpr unsigned RAW_SLOTS = 7;
constexpr unsigned RAW_SLOT_BYTES = 16384;  // a sub-tile in 8 bits
constexpr unsigned RAW_ROW_BYTES = 64;      // 64 columns of it
constexpr unsigned V_ATOM_KEYS = 128;      // a slot with V is pieces of [V_ATOM_KEYS][128 bytes]
constexpr unsigned V_COLUMN_CHUNKS = 2;    // such pieces, side by side, have the same keys
constexpr unsigned P_OFFSET = 188416;
constexpr unsigned P_TILE_BYTES = 16384;  // of a warpgroup: pieces of [ROWS][64 keys]
constexpr unsigned P_ATOM_KEYS = 64;
constexpr unsigned P_ATOM_BYTES = 4096;
constexpr unsigned EXCHANGE_OFFSET = 221184;
constexpr unsigned FACTORS_OFFSET = 223232;  // [WARPGROUPS][128] float
constexpr unsigned RING_FULL_OFFSET = 224448;
constexpr unsigned RING_EMPTY_OFFSET = 224464;
constexpr unsigned RAW_FULL_OFFSET = 224480;
constexpr unsigned RAW_EMPTY_OFFSET = 224536;
constexpr unsigned SCALES_OFFSET = 224256;  // [WARPGROUPS][SCALE_BUFFERS][SCALE_VALUES][SCALE_RUNS] float: of K, log2 and inverse of V's
constexpr unsigned SCALE_KEYS = 64;      // keys of a page among a part's
constexpr unsigned SCALE_RUNS = 4;      // of a key tile
constexpr unsigned PART_RUNS = 1;       // of a part of it
constexpr unsigned SCALE_BUFFERS = 2;   // key tiles of a warpgroup
constexpr unsigned SCALE_VALUES = 3;
constexpr unsigned SCALES_FULL_OFFSET = 224688;
constexpr float SMALLEST_V_SCALE = 5.421010862e-20f;  // 2^-64
constexpr unsigned S_FULL_OFFSET = 224592;
constexpr unsigned P_READY_OFFSET = 224608;
constexpr unsigned CORRECTION_OFFSET = 224640;
constexpr unsigned O_FULL_OFFSET = 224672;
constexpr unsigned TMEM_ADDRESS_OFFSET = 224720;
constexpr unsigned MBARRIER_BYTES = 8;
// Epilogue
constexpr unsigned OUT_OFFSET = 0;
constexpr unsigned OUT_CHUNK_COLS = 64;   // columns of one TMA store
constexpr unsigned OUT_CHUNK_BYTES = 4096;
constexpr unsigned OUT_CHUNKS = 2;
constexpr unsigned OUT_TILE_BYTES = 8192;
// 16-byte blocks of an output row
constexpr unsigned BAND_BLOCKS = 4;      // of a part's columns
constexpr unsigned OUT_K = 8;            // elements of a block
constexpr unsigned LEVEL2_COLS = 32;     // columns of O that a thread finishes
constexpr unsigned O_QUADS = 1024;      // 16-byte pieces of a partition's O in the workspace
constexpr unsigned WINDOWS_OFFSET = 8192;
constexpr unsigned WINDOW_ML_OFFSET = 24576;
// Matrix descriptors, in units of 16 bytes: 128-byte swizzle (2 << 61), version 1 (1 << 46), 1,024 bytes between groups of 8 rows (K-major)
// or of 8 keys (MN-major). V also has 16384 bytes between its 64-column atoms; a K-major operand does not use that field.
constexpr unsigned DESCRIPTOR_UNIT = 16;
constexpr unsigned long long SWIZZLED = 2ull << 61 | 1ull << 46 | 1024ull / DESCRIPTOR_UNIT << 32;
constexpr unsigned long long K_MAJOR = SWIZZLED | 1ull << 16;
constexpr unsigned long long V_MAJOR = SWIZZLED | 16384ull / DESCRIPTOR_UNIT << 16;
constexpr unsigned K_STEP_BYTES = 32;     // 16 elements along a K-major row
constexpr unsigned V_STEP_BYTES = 2048;   // 16 keys down an MN-major atom
// Instruction descriptors: float32 D, float16 A and B, M = 32, N = 256 (S) and 128 with B MN-major (P.V)
constexpr unsigned QK_INSTRUCTION = 0x02400010;
constexpr unsigned PV_INSTRUCTION = 0x02210010;
constexpr unsigned PAGE_KEYS = 64;
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

// a + b, rounded to nearest, subnormals kept. PTX ISA "add".
__device__ __forceinline__ float ptx_add_rn(float a, float b) {
    float d;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
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

// 1 / x, approximate (at most 1 ulp), subnormals flushed. PTX ISA "rcp".
__device__ __forceinline__ float ptx_rcp_approx_ftz(float x) {
    float d;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
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

// Columns [column, column + 32) of this thread's accumulator lane. The accumulator is tensor memory: every warp passes the same column
// address, and the hardware routes each warp to its own 32 lanes.
__device__ __forceinline__ void fa4_accumulator_load_x32(unsigned accumulator, unsigned column, float* regs) {
    ptx_tcgen05_ld_x32(accumulator + column, regs);
}

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
// The caller has made O visible (waited on its producer's barrier, then tcgen05.fence::after_thread_sync). There is no wait::ld here: the
// registers wait by data dependence, and whoever next overwrites the tensor memory waits for the loads.
//
// o_tmem  tensor-memory address of this depth tile's accumulator
// o_band  receives 32 floats: O[local_row][band] before normalisation
__device__ __forceinline__ void fa4_ws_level0_band(unsigned o_tmem, float (&o_band)[32]) {
    fa4_accumulator_load_x32(o_tmem, 0, o_band + 0);
}

// The number of the CTA along x, read again wherever it is called: the compiler does not know that it stays. PTX ISA "%ctaid".
__device__ __forceinline__ unsigned ptx_ctaid_x() {
    unsigned x;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x)::"memory");
    return x;
}

typedef unsigned short fa4_bf16;  // the bits of a bfloat16

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

// a * b + c, rounded once, subnormals kept. PTX ISA "fma".
__device__ __forceinline__ float ptx_fma_rn(float a, float b, float c) {
    float d;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
    return d;
}

// Rounds two floats to bfloat16 (nearest even) and packs them: `low` in bits 0-15, `high` in bits 16-31. PTX ISA "cvt".
__device__ __forceinline__ unsigned ptx_cvt_bf16x2(float low, float high) {
    unsigned d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

// Writes 32 columns of a row to the staged output tile, from 16-byte block `first_block` of the row.
// The tile is pieces of [row 32][128 bytes]; 16-byte unit u of a row lies at u ^ (row % 8), as a swizzled TMA store reads it.
__device__ __forceinline__ void fa4_stage_columns(fa4_bf16* o_smem, unsigned first_block, unsigned local_row,
                                                  const float (&o)[32]) {
#pragma unroll
    for (unsigned block = 0; block < 4; ++block) {
        const unsigned out_block = first_block + block;
        const unsigned i = block * 8;
        const unsigned unit = (out_block / 8 * 32 + local_row) * 8 + ((out_block % 8) ^ (local_row % 8));
        reinterpret_cast<uint4*>(o_smem)[unit] =
            make_uint4(ptx_cvt_bf16x2(o[i], o[i + 1]), ptx_cvt_bf16x2(o[i + 2], o[i + 3]),
                       ptx_cvt_bf16x2(o[i + 4], o[i + 5]), ptx_cvt_bf16x2(o[i + 6], o[i + 7]));
    }
}

// level 2: merges the two warpgroups of the CTA, normalises, and writes 32 depth columns of the thread's row.
//
// Warpgroup 1 scatters its unnormalised columns of one output depth tile and its (m, l) to shared memory and is done;
// warpgroup 0 waits, gathers, brings both to one scale, and writes.
//
//     m = max(m_0, m_1)    scale_w = 2^((m_w - m))    l = scale_0 l_0 + scale_1 l_1    out = (scale_0 O_0 + scale_1 O_1) / l
//
// merged = false is for a CTA with a single key tile. Warpgroup 1 has left then: a barrier of 256 threads would never complete, and
// the window holds whatever was there before, of which even 0 times a NaN is not 0.
//
// A row without a key has l = 0 and O = 0, and gives 0.
//
// local_row, partition_g  thread = partition_g * 32 + local_row of warpgroup warp_group_idx
// own_max, own_sum        m, l of the row
// scale_log2e             softmax scale * log2(e); unused: the scores are scaled before the maximum is taken
// o_band                  32 columns, not normalised
// first                   whether this call carries (m, l)
// window_smem             16384 bytes: [g 4][32 / 4][row 32][4] float
// maxsum_smem             256 bytes: [row 32][m, l] float
// first_block             16-byte block of the output row that the columns begin at
// o_smem                  output tile: see fa4_stage_columns
// partial                 if not null, the columns go there instead: [32 / 4][row 32][4] float, from this thread's row on
// returns                 {m, l} of the merged row (to warpgroup 0)
__device__ __forceinline__ float2 fa4_ws_level2_reduce_scatter_write(unsigned local_row, unsigned partition_g,
                                                                     bool merged, unsigned warp_group_idx,
                                                                     float own_max, float own_sum, float scale_log2e,
                                                                     float (&o_band)[32],
                                                                     bool first, float* window_smem, float* maxsum_smem,
                                                                     unsigned first_block, fa4_bf16* o_smem,
                                                                     float4* partial) {
    float m = own_max;
    float l = own_sum;
    if (merged) {
        float4* window = reinterpret_cast<float4*>(window_smem) + partition_g * 256 + local_row;
        float2* maxsum = reinterpret_cast<float2*>(maxsum_smem);
        if (warp_group_idx == 1) {
#pragma unroll
            for (unsigned i = 0; i < 32; i += 4)
                window[i / 4 * 32] = make_float4(o_band[i], o_band[i + 1], o_band[i + 2], o_band[i + 3]);
            if (first && partition_g == 0) maxsum[local_row] = make_float2(own_max, own_sum);
        }
        // Orders warpgroup 1's window before warpgroup 0's reads of it.
        ptx_bar_sync(3, 256);
        if (warp_group_idx == 1) return make_float2(m, l);
        const float2 peer = maxsum[local_row];
        m = ptx_max_ftz(own_max, peer.x);
        const float reference = m == __uint_as_float(0xff800000u) ? 0.0f : m;
        const float own_scale = ptx_ex2_approx_ftz(ptx_sub_rn(own_max, reference));
        const float peer_scale = ptx_ex2_approx_ftz(ptx_sub_rn(peer.x, reference));
        l = ptx_fma_rn(peer_scale, peer.y, ptx_mul_rn(own_scale, own_sum));
#pragma unroll
        for (unsigned i = 0; i < 32; i += 4) {
            const float4 o = window[i / 4 * 32];
            o_band[i + 0] = ptx_fma_ftz(peer_scale, o.x, ptx_mul_ftz(own_scale, o_band[i + 0]));
            o_band[i + 1] = ptx_fma_ftz(peer_scale, o.y, ptx_mul_ftz(own_scale, o_band[i + 1]));
            o_band[i + 2] = ptx_fma_ftz(peer_scale, o.z, ptx_mul_ftz(own_scale, o_band[i + 2]));
            o_band[i + 3] = ptx_fma_ftz(peer_scale, o.w, ptx_mul_ftz(own_scale, o_band[i + 3]));
        }
    }
    const float inverse_l = l > 0.0f ? ptx_rcp_approx_ftz(l) : 0.0f;
#pragma unroll
    for (unsigned i = 0; i < 32; ++i) o_band[i] = ptx_mul_ftz(o_band[i], inverse_l);
    if (partial != nullptr) {
#pragma unroll
        for (unsigned i = 0; i < 32; i += 4)
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
    const int* key_lengths;  // [batch]
    const int* block_table;  // [batch][table_pages]
    unsigned table_pages;
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
    unsigned keys;            // of this sequence
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
    // A length that the launch has no partitions for would leave a merge waiting for CTAs that do not exist.
    item.keys = min(max(p.key_lengths[item.batch], 0), (int)p.keys);
    item.all_see = (int)item.keys;
    item.seen = (int)item.keys;
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

// The page of `count` keys from `key` on. None where all of them are dead: its box lies outside the tensor and brings zeros.
__device__ __forceinline__ int page_of(const Problem& p, const Item& item, unsigned key, unsigned count) {
    if (key >= item.keys) return -1;
    return p.block_table[(unsigned long long)item.batch * p.table_pages + key / PAGE_KEYS];
}

// The key of a row of a slot with V, counted from the first of the slot's.
__device__ __forceinline__ unsigned v_key(unsigned row) {
    return row % V_ATOM_KEYS;
}

// Load role, one warp: Q once, then K and V of every key tile through the copies' ring, in the order in which the MMA role reads them.
// The order: step i brings V of tile i - WARPGROUPS, then K of tile i, so that a warpgroup has scores while the other's P.V runs.
// A slot is [BLOCK_KEYS] rows of 64 columns of K or V, box after box; a lane copies one, and looks up its page while the slot may still be in use.
// The swizzle goes by the shared address, so rows of a tile may land apart.
// Waits: `raw_empty` of a slot (the convert role has read it). Signals: `raw_full`, by the copies' bytes.
__device__ __forceinline__ void load(const Problem& p, const Item& item, const fa4_tensor_map* q_map, const fa4_tensor_map* k_map,
                                     const fa4_tensor_map* v_map, unsigned smem, unsigned lane) {
    if (lane == 0) {
        ptx_prefetch_tensormap(q_map);
        ptx_prefetch_tensormap(k_map);
        ptx_prefetch_tensormap(v_map);
    }
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
                const unsigned first_key = tile * BLOCK_KEYS + part / O_TILES * PV_KEY_CHUNK;
                const int page = page_of(p, item, first_key + v_key(lane * V_BOX_ROWS), V_BOX_KEYS);
                wait(smem + RAW_EMPTY_OFFSET + ring.slot * MBARRIER_BYTES, ring.parity ^ 1);
                if (lane == 0) ptx_mbarrier_arrive_expect_tx(full, RAW_SLOT_BYTES);
                // Orders the announcement before the copies of all lanes.
                __syncwarp();
#pragma unroll 1
                for (unsigned row = lane * V_BOX_ROWS; row < BLOCK_KEYS; row += 32 * V_BOX_ROWS) {
                    ptx_tma_load_5d(slot + row * RAW_ROW_BYTES, v_map, full, 0, (first_key + v_key(row)) % PAGE_KEYS,
                                    part % O_TILES * V_COLUMN_CHUNKS + row / V_ATOM_KEYS, item.kv_head, page);
                }
                ring.advance(RAW_SLOTS);
            }
        }
        if (step < item.tiles) {
            const unsigned first_key = (item.first_tile + step) * BLOCK_KEYS;
#pragma unroll 1
            for (unsigned stage = 0; stage < QK_STAGES; ++stage) {
                const unsigned slot = smem + RAW_OFFSET + ring.slot * RAW_SLOT_BYTES;
                const unsigned full = smem + RAW_FULL_OFFSET + ring.slot * MBARRIER_BYTES;
                const int page = page_of(p, item, first_key + lane * K_BOX_KEYS, K_BOX_KEYS);
                wait(smem + RAW_EMPTY_OFFSET + ring.slot * MBARRIER_BYTES, ring.parity ^ 1);
                if (lane == 0) {
                    // The depth slice of Q comes with the first K slice that it meets.
                    ptx_mbarrier_arrive_expect_tx(full, step == 0 ? RAW_SLOT_BYTES + q_chunk_bytes : RAW_SLOT_BYTES);
                    if (step == 0)
                        ptx_tma_load_5d(smem + Q_OFFSET + stage * Q_CHUNK_BYTES, q_map, full, stage * SUB_TILE_DEPTH, item.head, item.position,
                                    item.kv_head, item.batch);
                }
                // Orders the announcement before the copies of all lanes.
                __syncwarp();
#pragma unroll 1
                for (unsigned row = lane * K_BOX_KEYS; row < BLOCK_KEYS; row += 32 * K_BOX_KEYS) {
                    ptx_tma_load_5d(slot + row * RAW_ROW_BYTES, k_map, full, 0, (first_key + row) % PAGE_KEYS, stage, item.kv_head, page);
                }
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
__device__ __forceinline__ void convert(const Problem& p, const Item& item, unsigned char* smem_bytes, unsigned smem, unsigned half, unsigned lane) {
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
            if (part < v_parts) {
                // What lies in V past the sequence's end may be no number: 0 of its probability would not make it 0.
                const int valid = (int)item.keys - (int)(tile * BLOCK_KEYS + (part / O_TILES) * PV_KEY_CHUNK);
                if (valid < (int)BLOCK_KEYS)
#pragma unroll 1
                    for (unsigned i = 0; i < WARP_ROWS / STEP_ROWS; ++i)
                        if ((int)v_key(half * WARP_ROWS + i * STEP_ROWS + row) >= valid)
                            low[i * STEP_UNITS] = high[i * STEP_UNITS] = make_uint4(0, 0, 0, 0);
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
__device__ __forceinline__ void multiply(const Item& item, unsigned smem, unsigned tmem) {
    const unsigned qk_instruction = QK_INSTRUCTION;
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

// Scales of a key tile's runs of SCALE_KEYS keys: of K, then log2 of V's, then its inverse. That of V joins the exponent, so that P has it and
// a maximum is one of what P becomes; row sums take it out again.
__device__ __forceinline__ float* scales_at(unsigned char* smem_bytes, unsigned warpgroup, unsigned round) {
    return reinterpret_cast<float*>(smem_bytes + SCALES_OFFSET) + (warpgroup * SCALE_BUFFERS + round % SCALE_BUFFERS) * (SCALE_VALUES * SCALE_RUNS);
}

// The mbarrier of these scales, `scales`: ScaleReader::write completes it, softmax waits for it.
__device__ __forceinline__ unsigned scales_full(unsigned smem, unsigned warpgroup, unsigned round) {
    return smem + SCALES_FULL_OFFSET + (warpgroup * SCALE_BUFFERS + round % SCALE_BUFFERS) * MBARRIER_BYTES;
}

// Scales of one key tile after another, by the correction warps: pages are looked up two tiles ahead of what is written, their scales read one
// ahead, so that no key tile waits for memory.
struct ScaleReader {
    static constexpr unsigned RUNS = (SCALE_RUNS + 127) / 128;  // of a thread
    const float* k_scale;
    const float* v_scale;
    int pages[RUNS];
    float k[RUNS], v[RUNS];

    __device__ __forceinline__ void look_up(const Problem& p, const Item& item, unsigned tile, unsigned thread) {
#pragma unroll
        for (unsigned i = 0; i < RUNS; ++i) {
            const unsigned run = thread + i * 128;
            pages[i] = tile < item.tiles && run < SCALE_RUNS ? page_of(p, item, (item.first_tile + tile) * BLOCK_KEYS + run * SCALE_KEYS, SCALE_KEYS) : -1;
        }
    }
    // Of the pages looked up last.
    __device__ __forceinline__ void read(const Problem& p, const Item& item) {
#pragma unroll
        for (unsigned i = 0; i < RUNS; ++i) {
            const long long index = (long long)pages[i] * p.kv_heads + item.kv_head;
            k[i] = pages[i] < 0 ? 1.0f : k_scale[index];
            v[i] = pages[i] < 0 ? 1.0f : v_scale[index];
        }
    }
    // Signals: `scales` of the tile.
    __device__ __forceinline__ void write(const Item& item, unsigned char* smem_bytes, unsigned smem, unsigned tile, unsigned thread) const {
        if (tile >= item.tiles) return;
        const unsigned warpgroup = tile % WARPGROUPS, round = tile / WARPGROUPS;
        float* const scales = scales_at(smem_bytes, warpgroup, round);
#pragma unroll
        for (unsigned i = 0; i < RUNS; ++i) {
            const unsigned run = thread + i * 128;
            if (run < SCALE_RUNS) {
                // A page of zeros may have scale 0, whose logarithm is none.
                const float positive = fmaxf(v[i], SMALLEST_V_SCALE);
                scales[run] = k[i];
                scales[SCALE_RUNS + run] = ptx_lg2_approx_ftz(positive);
                scales[2 * SCALE_RUNS + run] = ptx_rcp_approx_ftz(positive);
            }
        }
        arrive_warp(scales_full(smem, warpgroup, round), thread % 32);
    }
};

// The state of a thread's query row.
struct Row {
    float reference = MINUS_INFINITY;      // scaled score that probabilities are relative to: the maximum, or up to RESCALE_LOG2 below it
    float offset = 0.0f;                   // -reference, 0 while there is no key: 2^(-inf + 0) = 0 instead of 2^(inf - inf)
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
// Waits: `s_full` (the MMA role's commit: S is there, and the previous P.V has read P), `correction_empty` (factors read), `scales`.
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
        // The correction warps have written the scales of this tile.
        wait(scales_full(smem, at.warpgroup, round), round / SCALE_BUFFERS & 1);
        const float* const scales_of_keys = scales_at(smem_bytes, at.warpgroup, round) + at.part * PART_RUNS;
#pragma unroll
        for (unsigned run = 0; run < PART_RUNS; ++run) {
            const float k_factor = scales_of_keys[run] * scale_log2e;
            const float log2_v = scales_of_keys[SCALE_RUNS + run];
#pragma unroll
            for (unsigned i = run * SCALE_KEYS; i < run * SCALE_KEYS + SCALE_KEYS; ++i)
                s[i] = __fmaf_rn(s[i], k_factor, log2_v);
        }
        const int first_key = (item.first_tile + tile) * BLOCK_KEYS;
        if (first_key + (int)BLOCK_KEYS > item.all_see) {
            // Keys past the end do not count.
            const int visible = (int)item.keys - first_key - (int)(at.part * S_COLS);
#pragma unroll
            for (unsigned column = 0; column < S_COLS; ++column)
                if ((int)column >= visible) s[column] = MINUS_INFINITY;
        }

        // All parts of the row agree on its maximum, so their votes, factors and sums stay in one scale.
        const float own_maximum = ptx_max_ftz(state.reference, largest(s));
        const float maximum = fa4_ws_exchange4_max(own_maximum, at.row, at.part, at.warpgroup, state.exchange_seq++, exchange);
        float factor = 1.0f;
        // -inf on both sides (no key yet) is NaN, which is not greater.
        if (__any_sync(0xffffffff, maximum - state.reference > RESCALE_LOG2)) {
            // No key so far: nothing to rescale, and the growth would be infinite.
            const float offset = maximum == MINUS_INFINITY ? 0.0f : -maximum;
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
        const float* const inverse_v = scales_of_keys + 2 * SCALE_RUNS;
#pragma unroll
        for (unsigned stage = 0; stage < P_STAGES; ++stage) {
            unsigned packed[P_STAGE_COLS / 2];
#pragma unroll
            for (unsigned pair = 0; pair < P_STAGE_COLS / 2; ++pair) {
                const unsigned column = stage * P_STAGE_COLS + 2 * pair;
                const float2 x = ptx_add_f32x2(make_float2(s[column], s[column + 1]), offsets);
                const float2 probability = make_float2(ptx_ex2_approx_ftz(x.x), ptx_ex2_approx_ftz(x.y));
                // Without V's scale, which its part of P has.
                state.sum = ptx_fma_f32x2(probability, make_float2(inverse_v[column / SCALE_KEYS], inverse_v[(column + 1) / SCALE_KEYS]), state.sum);
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

// The 16-byte block of an output row that this thread's columns begin at.
__device__ __forceinline__ unsigned first_block(const Place& at) {
    return at.part * BAND_BLOCKS;
}

// The same place in a partition's O.
__device__ __forceinline__ unsigned first_quad(const Place& at) {
    return first_block(at) * (OUT_K / 4) * ROWS + at.row;
}

// Row sums, then O by output depth tile: level 0 reads the band, level 2 merges the warpgroups, normalises and writes.
// Returns {m, l}.
__device__ __forceinline__ float2 gather(const Row& state, const Place& at, const Sink& sink, unsigned tmem,
                                         float scale_log2e, bool merged) {
    // Continues the sequence of the key tiles' maxima: restarting it could meet a buffer that a slow warp still reads.
    const float sum = fa4_ws_exchange4_add(state.sum.x + state.sum.y, at.row, at.part, at.warpgroup, state.exchange_seq,
                                           reinterpret_cast<float*>(sink.smem + EXCHANGE_OFFSET));
    float2 ml;
    {
        float band[LEVEL2_COLS];
        fa4_ws_level0_band(tmem + O_COLUMN + at.warpgroup * O_PHYS_COLS, band);
        // The next barrier orders these loads before the tensor memory is freed.
        ptx_tcgen05_wait_ld();
        ptx_tcgen05_fence_before();
        ml = fa4_ws_level2_reduce_scatter_write(at.row, at.part, merged, at.warpgroup, state.reference, sum, scale_log2e, band,
                                                true, reinterpret_cast<float*>(sink.smem + WINDOWS_OFFSET),
                                                reinterpret_cast<float*>(sink.smem + WINDOW_ML_OFFSET), first_block(at),
                                                reinterpret_cast<fa4_bf16*>(sink.smem + OUT_OFFSET),
                                                sink.partial == nullptr ? nullptr : sink.partial + first_quad(at));
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
    {
        float band[LEVEL2_COLS];
#pragma unroll
        for (unsigned column = 0; column < LEVEL2_COLS; ++column) band[column] = 0.0f;
#pragma unroll 1
        for (unsigned i = 0; i < item.used; ++i) {
            const float weight = ptx_ex2_approx_ftz(lse[i * ROWS] + offset) * inverse;
#pragma unroll
            for (unsigned quad = 0; quad < LEVEL2_COLS / 4; ++quad) {
                const float4 part = from[i * O_QUADS + first_quad(at) + quad * ROWS];
                band[quad * 4 + 0] = __fmaf_rn(weight, part.x, band[quad * 4 + 0]);
                band[quad * 4 + 1] = __fmaf_rn(weight, part.y, band[quad * 4 + 1]);
                band[quad * 4 + 2] = __fmaf_rn(weight, part.z, band[quad * 4 + 2]);
                band[quad * 4 + 3] = __fmaf_rn(weight, part.w, band[quad * 4 + 3]);
            }
        }
        fa4_stage_columns(reinterpret_cast<fa4_bf16*>(smem_bytes + OUT_OFFSET), first_block(at), at.row, band);
    }
    return top + ptx_lg2_approx_ftz(sum);
}

// O and LSE of the tile: what the softmax warpgroups do after their key tiles.
// Waits: `s_full` once more (the MMA role's last commit: every MMA is done, so O is complete and Q and the ring are dead).
// Warpgroup 1 leaves when it has handed over its part; warpgroup 0 frees the tensor memory and stores.
// Of several partitions, the CTA that finishes last merges them and stores.
__device__ __forceinline__ void finish(const Row& state, const Problem& p, const Item& item, const Place& at, const fa4_tensor_map* out_map,
                                       float* lse, const Workspace& workspace, unsigned char* smem_bytes, unsigned smem, unsigned tmem,
                                       float scale_log2e) {
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
        ml = gather(state, at, sink, tmem, scale_log2e, merged);
        if (at.warpgroup == 1) return;
    }
    else {
        // No row of the tile sees a key.
#pragma unroll 1
        for (unsigned unit = at.thread; unit < OUT_TILE_BYTES / 16; unit += 128)
            reinterpret_cast<uint4*>(smem_bytes + OUT_OFFSET)[unit] = make_uint4(0, 0, 0, 0);
    }
    // m scale log2(e) + log2(l); without a key both terms are -inf.
    float log2_lse = ptx_add_rn(ml.x, ptx_lg2_approx_ftz(ml.y));

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
// It also looks up the scales of every key tile's pages, and has them in shared memory a tile of the warpgroup ahead: `scales`.
__device__ __forceinline__ void correct(const Problem& p, const Item& item, unsigned char* smem_bytes, unsigned smem, unsigned tmem,
                                        unsigned thread, const float* k_scale, const float* v_scale) {
    const float* const factors = reinterpret_cast<const float*>(smem_bytes + FACTORS_OFFSET);
    ScaleReader reader{k_scale, v_scale};
    for (unsigned tile = 0; tile < WARPGROUPS; ++tile) {
        reader.look_up(p, item, tile, thread);
        reader.read(p, item);
        reader.write(item, smem_bytes, smem, tile, thread);
    }
    reader.look_up(p, item, WARPGROUPS, thread);
    reader.read(p, item);
    reader.look_up(p, item, WARPGROUPS + 1, thread);
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
        // Of the warpgroup's next tile, over those of its previous one: the factors of this tile came after it.
        reader.write(item, smem_bytes, smem, tile + WARPGROUPS, thread);
        reader.read(p, item);
        reader.look_up(p, item, tile + WARPGROUPS + 2, thread);
    }
}

// --- entry -----------------------------------------------------------------------------------------------------------

// q_map    [batch][kv_heads][q_len][group][128], box 1 x 1 x positions x heads x 64, 128-byte swizzle
// k_map    [pages][kv_heads][2][page keys][64], box 1 x 1 x 1 x 64 x 64, 64-byte swizzle
// v_map    as k_map, box 1 x 1 x 1 x 64 x 64
// out_map  as q_map, box 1 x 1 x positions x heads x 64, 128-byte swizzle
// lse      [batch][kv_heads * group][q_len] float, natural logarithm
// partition_tiles, partitions: key tiles of a partition, and how many of them cover the keys; with one, the last four are not read
// launch: a number that rises with every launch that uses the workspace, see arrive_last
// partial_o, partial_lse, arrived: see Workspace. It belongs to one launch at a time, so to a stream; `arrived` is 0 at first, and after a launch.
// Grid: batch * partitions * tiles * kv_heads, one CTA each. Block: THREADS.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
fa4_attention_d128_m4r32_sk_bf16_p64_len_kv8page_sm100a(
    const __grid_constant__ fa4_tensor_map q_map, const __grid_constant__ fa4_tensor_map k_map,
    const __grid_constant__ fa4_tensor_map v_map, const __grid_constant__ fa4_tensor_map out_map, float* lse, unsigned batch,
    unsigned q_len, unsigned keys, unsigned kv_heads, unsigned group, float scale,
    unsigned partition_tiles, unsigned partitions, unsigned launch, float* partial_o, float* partial_lse, unsigned long long* arrived, const int* block_table, unsigned table_pages, const int* key_lengths, const float* k_scale, const float* v_scale) {
    extern __shared__ __align__(1024) unsigned char smem_bytes[];
    const unsigned smem = (unsigned)__cvta_generic_to_shared(smem_bytes);
    // The same in all lanes; the shuffle lets the compiler know.
    const unsigned warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    const unsigned lane = threadIdx.x % 32;
    Problem p = describe(q_len, keys, kv_heads, group, partition_tiles, partitions);
    p.block_table = block_table;
    p.table_pages = table_pages;
    p.key_lengths = key_lengths;
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
        for (unsigned buffer = 0; buffer < WARPGROUPS * SCALE_BUFFERS; ++buffer) ptx_mbarrier_init(smem + SCALES_FULL_OFFSET + buffer * MBARRIER_BYTES, 4);
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
        const float scale_log2e = scale * LOG2E;
        // Worked out anew: what is kept from before the roles part is kept within the few registers that the issuing warps have.
        const Item own = item_at(p, ptx_ctaid_x());
        Row state;
        softmax(state, p, own, at, smem_bytes, smem, tmem, scale_log2e);
        const Workspace workspace{partial_o, partial_lse, arrived, launch};
        finish(state, p, own, at, &out_map, lse, workspace, smem_bytes, smem, tmem, scale_log2e);
    } else if (warp < WARPGROUPS * 4 + 4) {
        ptx_setmaxnreg_dec<88>();
        correct(p, item, smem_bytes, smem, tmem, threadIdx.x % 128, k_scale, v_scale);
    } else {
        ptx_setmaxnreg_dec<40>();
        if (warp == LOAD_WARP)
            load(p, item, &q_map, &k_map, &v_map, smem, lane);
        else if (warp == MMA_WARP && ptx_elect_sync())
            multiply(item, smem, tmem);
        else if (warp >= CONVERT_WARP)
            convert(p, item, smem_bytes, smem, warp - CONVERT_WARP, lane);
    }
}
