// Attention for sm_90a, key-split: O = softmax(scale Q K^T) V and its LSE
//
// Generated from templates/kernels/attention_sm90a_ks.cu.j2 for config d128_nofma on sm_90a.
// Do not edit: change the template or the config, then run
//     fa4gen emit --config d128_nofma.yaml
//
// One CTA works on tiles of n query rows (positions x heads of one KV head), 128 deep, over key tiles of 64 keys. The
// consumer warpgroup is 4 parts, a warp each. Part g takes key tiles g, g + 4, ... and keeps maxima, sums and an O of all depth for
// them. Nothing passes between the parts while the keys last; they are merged at the end (fa4_ws_intracta_combine).
// A warp multiplies n rows by mma.sync, which leaves each product in the registers that the next one reads:
//     S[rows x keys]     = Q . K^T       A = Q, B = K, both along the depth
//     O^T[depth x rows] += V^T . P^T     A = V, transposed as it is loaded, B = P: two key blocks of S, as they are
// In the second the rows are N, so that 8 of them need no padding to 16, and O no registers for it.
// There is an entry for each n of 8, 16, 32: the caller takes the one whose tiles its query rows fill best.
//
// Roles: warps 0 to 3 consume (attend); then 4 warps fill a ring of K and V each, one for each part (load_keys_values), and one
// loads Q (load_queries). The other warps complete the warpgroups that setmaxnreg asks for.
//
// Shared memory of 8 rows, bytes:
//           0  131072  ring
//      131072    4096  q
//      135168   65536  stage
//      200704    8192  out
//      208896    1024  maxsum
//      209920    2048  weights
//      211968      64  mbar_full
//      212032      64  mbar_empty
//      212096      16  mbar_q_full
//      212112      16  mbar_q_empty
//      212128       8  mbar_merge
//      212136 in all
// Shared memory of 16 rows, bytes:
//           0  131072  ring
//      131072    8192  q
//      139264   65536  stage
//      204800    8192  out
//      212992    1024  maxsum
//      214016    4096  weights
//      218112      64  mbar_full
//      218176      64  mbar_empty
//      218240      16  mbar_q_full
//      218256      16  mbar_q_empty
//      218272       8  mbar_merge
//      218280 in all
// Shared memory of 32 rows, bytes:
//           0  131072  ring
//      131072   16384  q
//      147456   65536  stage
//      212992    8192  out
//      221184    1024  maxsum
//      222208    8192  weights
//      230400      64  mbar_full
//      230464      64  mbar_empty
//      230528      16  mbar_q_full
//      230544      16  mbar_q_empty
//      230560       8  mbar_merge
//      230568 in all
//
// mbarriers (arrivals a phase; who arrives -> who waits):
//     full     1  load_keys_values, and the bytes of the copy -> attend
//     empty    1  attend, each warp that reads the slot -> load_keys_values
//     q_full   1  load_queries, and the bytes of the copies -> attend
//     q_empty  4  attend, each warp once an item -> load_queries
//     merge    1  the thread that starts the copies of a merge, and their bytes -> merge_partitions
// Named barriers: 0 once for the whole CTA, before the roles part, then the combine; 1 what else the consumers order among themselves.

typedef unsigned short fa4_bf16;  // the bits of a bfloat16
typedef unsigned short fa4_f16;   // the bits of a float16
struct alignas(64) fa4_tensor_map {
    unsigned char bytes[128];  // as cuTensorMapEncodeTiled made it
};

constexpr unsigned PART_ROWS = 32;      // of the combine: thread t of the warpgroup stands for row t % PART_ROWS of part t / PART_ROWS
constexpr unsigned BLOCK_KEYS = 64;     // keys of a key tile
constexpr unsigned DEPTH = 128;         // of a head
constexpr unsigned PARTS = 4;
constexpr unsigned PART_WARPS = 1;      // warps of a part
constexpr unsigned THREADS = 384;
constexpr unsigned CONSUMERS = 128;
constexpr unsigned DEPTH_BLOCKS = 8;    // blocks of 16 depth columns
// Swizzled tiles: pieces of [rows][128 bytes], "chunks" of 64 depth columns. The 16-byte unit u of row r lies at unit u ^ (r % 8).
constexpr unsigned SLOT_CHUNKS = 2;     // of a ring slot: a K tile or a V tile
constexpr unsigned CHUNK_BYTES = 8192;
constexpr unsigned SLOT_BYTES = 16384;
constexpr unsigned Q_CHUNKS = 2;
// The O tile: [DEPTH / OUT_COLS][PART_ROWS][OUT_COLS], 16 bytes a row of a block.
constexpr unsigned OUT_COLS = 8;
constexpr unsigned OUT_BLOCKS = 16;
constexpr unsigned OUT_BLOCK_BYTES = PART_ROWS * 16;
constexpr unsigned BAND_COLS = 32;      // depth columns of a row that one part merges
constexpr unsigned STAGE_BYTES = 65536;
constexpr unsigned MBARRIER_BYTES = 8;
static_assert(SLOT_CHUNKS * 64 == DEPTH && DEPTH_BLOCKS * 16 == DEPTH, "chunks and blocks cover the head");
// Tile: what depends on the rows of a tile.
// ROWS            query rows; ROW_WARPS: warps of a part whose rows carry queries
// ROW_BLOCKS      of such a warp, 8 rows each; M_TILES: 16 rows each, the upper half of it empty with 8 rows
// KEY_STEPS       in which a warp works through a key tile, STEP_KEYS keys each; KEY_BLOCKS: 8 keys each
//                 Lane 4 g + c holds of S rows 16 m + 8 h + g and keys 8 n + 2 c + v in s[m][n][2 h + v], of O^T depth columns
//                 16 d + 8 h + g and rows 8 r + 2 c + v in o[d][r][2 h + v]. Of its rows in S, number i is 8 i + g.
// RING_SLOTS      of all rings; SLOTS_PER_RING: one ring a part
// PARTIAL_FLOATS  of a partition's O in the workspace, [DEPTH / 4][ROWS][4]. A merge copies MERGE_PARTITIONS of them at a time over
//                 `stage`; a thread has MERGE_QUADS float4s of each, and reads MERGE_UNROLL partitions at once
// STAGE           [PARTS][DEPTH / 4][PART_ROWS][4] float: raw O of the parts
// WEIGHTS         [64 partitions][ROWS] float
// FULL, EMPTY     [RING_SLOTS] mbarriers, TO_EMPTY apart; Q_FULL, Q_EMPTY: [Q_BUFFERS]
struct Tile8 {
    static constexpr unsigned ROWS = 8;
    static constexpr unsigned ROW_WARPS = 1;
    static constexpr unsigned ROW_BLOCKS = 1;
    static constexpr unsigned M_TILES = 1;
    static constexpr unsigned KEY_STEPS = 1;
    static constexpr unsigned KEY_BLOCKS = 8;
    static constexpr unsigned STEP_KEYS = 64;
    static constexpr unsigned RING_SLOTS = 8;
    static constexpr unsigned SLOTS_PER_RING = 2;
    static constexpr unsigned Q_CHUNK_BYTES = 1024;
    static constexpr unsigned Q_BYTES = 2048;
    static constexpr unsigned Q_BUFFERS = 2;
    static constexpr unsigned PARTIAL_FLOATS = 1024;
    static constexpr unsigned MERGE_PARTITIONS = 16;
    static constexpr unsigned MERGE_QUADS = 2;
    static constexpr unsigned MERGE_UNROLL = 4;
    static constexpr unsigned RING_OFFSET = 0;
    static constexpr unsigned Q_OFFSET = 131072;
    static constexpr unsigned STAGE_OFFSET = 135168;
    static constexpr unsigned OUT_OFFSET = 200704;
    static constexpr unsigned MAXSUM_OFFSET = 208896;
    static constexpr unsigned WEIGHTS_OFFSET = 209920;
    static constexpr unsigned FULL_OFFSET = 211968;
    static constexpr unsigned EMPTY_OFFSET = 212032;
    static constexpr unsigned TO_EMPTY = EMPTY_OFFSET - FULL_OFFSET;
    static constexpr unsigned Q_FULL_OFFSET = 212096;
    static constexpr unsigned Q_EMPTY_OFFSET = 212112;
    static constexpr unsigned MERGE_OFFSET = 212128;
    static_assert(ROW_WARPS * ROW_BLOCKS * 8 == ROWS && KEY_STEPS * STEP_KEYS == BLOCK_KEYS, "fragments cover rows and keys");
};
struct Tile16 {
    static constexpr unsigned ROWS = 16;
    static constexpr unsigned ROW_WARPS = 1;
    static constexpr unsigned ROW_BLOCKS = 2;
    static constexpr unsigned M_TILES = 1;
    static constexpr unsigned KEY_STEPS = 1;
    static constexpr unsigned KEY_BLOCKS = 8;
    static constexpr unsigned STEP_KEYS = 64;
    static constexpr unsigned RING_SLOTS = 8;
    static constexpr unsigned SLOTS_PER_RING = 2;
    static constexpr unsigned Q_CHUNK_BYTES = 2048;
    static constexpr unsigned Q_BYTES = 4096;
    static constexpr unsigned Q_BUFFERS = 2;
    static constexpr unsigned PARTIAL_FLOATS = 2048;
    static constexpr unsigned MERGE_PARTITIONS = 8;
    static constexpr unsigned MERGE_QUADS = 4;
    static constexpr unsigned MERGE_UNROLL = 2;
    static constexpr unsigned RING_OFFSET = 0;
    static constexpr unsigned Q_OFFSET = 131072;
    static constexpr unsigned STAGE_OFFSET = 139264;
    static constexpr unsigned OUT_OFFSET = 204800;
    static constexpr unsigned MAXSUM_OFFSET = 212992;
    static constexpr unsigned WEIGHTS_OFFSET = 214016;
    static constexpr unsigned FULL_OFFSET = 218112;
    static constexpr unsigned EMPTY_OFFSET = 218176;
    static constexpr unsigned TO_EMPTY = EMPTY_OFFSET - FULL_OFFSET;
    static constexpr unsigned Q_FULL_OFFSET = 218240;
    static constexpr unsigned Q_EMPTY_OFFSET = 218256;
    static constexpr unsigned MERGE_OFFSET = 218272;
    static_assert(ROW_WARPS * ROW_BLOCKS * 8 == ROWS && KEY_STEPS * STEP_KEYS == BLOCK_KEYS, "fragments cover rows and keys");
};
struct Tile32 {
    static constexpr unsigned ROWS = 32;
    static constexpr unsigned ROW_WARPS = 1;
    static constexpr unsigned ROW_BLOCKS = 4;
    static constexpr unsigned M_TILES = 2;
    static constexpr unsigned KEY_STEPS = 2;
    static constexpr unsigned KEY_BLOCKS = 4;
    static constexpr unsigned STEP_KEYS = 32;
    static constexpr unsigned RING_SLOTS = 8;
    static constexpr unsigned SLOTS_PER_RING = 2;
    static constexpr unsigned Q_CHUNK_BYTES = 4096;
    static constexpr unsigned Q_BYTES = 8192;
    static constexpr unsigned Q_BUFFERS = 2;
    static constexpr unsigned PARTIAL_FLOATS = 4096;
    static constexpr unsigned MERGE_PARTITIONS = 4;
    static constexpr unsigned MERGE_QUADS = 8;
    static constexpr unsigned MERGE_UNROLL = 1;
    static constexpr unsigned RING_OFFSET = 0;
    static constexpr unsigned Q_OFFSET = 131072;
    static constexpr unsigned STAGE_OFFSET = 147456;
    static constexpr unsigned OUT_OFFSET = 212992;
    static constexpr unsigned MAXSUM_OFFSET = 221184;
    static constexpr unsigned WEIGHTS_OFFSET = 222208;
    static constexpr unsigned FULL_OFFSET = 230400;
    static constexpr unsigned EMPTY_OFFSET = 230464;
    static constexpr unsigned TO_EMPTY = EMPTY_OFFSET - FULL_OFFSET;
    static constexpr unsigned Q_FULL_OFFSET = 230528;
    static constexpr unsigned Q_EMPTY_OFFSET = 230544;
    static constexpr unsigned MERGE_OFFSET = 230560;
    static_assert(ROW_WARPS * ROW_BLOCKS * 8 == ROWS && KEY_STEPS * STEP_KEYS == BLOCK_KEYS, "fragments cover rows and keys");
};
// Barrier ids
constexpr unsigned COMBINE_BARRIER = 0;
constexpr unsigned TILE_BARRIER = 1;
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

// Starts the copy of `bytes` contiguous bytes (a multiple of 16, both ends aligned to 16) to shared memory; they count towards `barrier`
// when they land. PTX ISA "cp.async.bulk".
__device__ __forceinline__ void ptx_bulk_load(unsigned destination, const void* source, unsigned bytes, unsigned barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
                 "l"(source), "r"(bytes), "r"(barrier)
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

// Orders ordinary accesses to global memory before this fence, of this thread or seen by it, with those of the copy engine after it.
// PTX ISA "fence.proxy".
__device__ __forceinline__ void ptx_fence_proxy_async_global() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
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

// Loads four matrices of 8 x 8 16-bit elements: lane 8 i + r gives the address of the 16 bytes of row r of matrix i. This
// lane receives two elements of each: row lane / 4, columns 2 (lane % 4) and the next.
// PTX ISA "ldmatrix".
__device__ __forceinline__ void ptx_ldmatrix_x4(unsigned (&matrix)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3 }, [%4];"
                 : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
                 : "r"(address)
                 : "memory");
}

// Loads four matrices of 8 x 8 16-bit elements, transposed: lane 8 i + r gives the address of the 16 bytes of row r of matrix i. This
// lane receives two elements of each: rows 2 (lane % 4) and the next, column lane / 4.
// PTX ISA "ldmatrix".
__device__ __forceinline__ void ptx_ldmatrix_x4_trans(unsigned (&matrix)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 { %0, %1, %2, %3 }, [%4];"
                 : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
                 : "r"(address)
                 : "memory");
}

// D[16 x 8] += A[16 x 16] . B[16 x 8] of one warp, bf16 operands, float32 D. Lane 4 g + c holds of D rows g and g + 8, columns 2 c and
// the next; of A rows g, g + 8 of k 2 c and the next, then of k + 8; of B k 2 c and the next, then k + 8, of column g.
// PTX ISA "mma.sync".
__device__ __forceinline__ void ptx_mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %0, %1, %2, %3 }, "
        "{ %4, %5, %6, %7 }, { %8, %9 }, { %0, %1, %2, %3 };"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
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

// 1 / x, approximate (at most 1 ulp), subnormals flushed. PTX ISA "rcp".
__device__ __forceinline__ float ptx_rcp_approx_ftz(float x) {
    float d;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
    return d;
}

// Rounds two floats to bfloat16 (nearest even) and packs them: `low` in bits 0-15, `high` in bits 16-31. PTX ISA "cvt".
__device__ __forceinline__ unsigned ptx_cvt_bf16x2(float low, float high) {
    unsigned d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
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

// combine: merges the 4 key partitions of one warpgroup into one normalised tile of 32 query rows x 128 depth.
//
// The 4 parts of the warpgroup hold independent key partitions over the same query rows. Partition g's unnormalised O_g is in stage_smem,
// written by its own warps; thread (g, row) brings its row maximum m_g and row sum l_g:
//
//     m = max_g m_g    scale_g = 2^((m_g - m))    l = sum_g scale_g l_g    out = (sum_g scale_g O_g) / l
//
// Each part then produces the depth columns [g * 32, g * 32 + 32) of its row, 128 / m_pack = 32 of them.
//
// The order of operations is the contract: equal inputs give equal bits on every target and on the emulator.
// An empty partition brings m_g = -inf, l_g = 0 and a finite O_g: its scale is 0 and it adds 0 * O_g = 0. At least one partition has keys.
//
// local_row, partition_g  thread = partition_g * 32 + local_row
// warp_group_idx          id of the barrier, which 128 threads use
// own_max, own_sum        m_g in raw score units, l_g
// scale_log2e             softmax scale * log2(e); unused: the scores are scaled before the maximum is taken
// stage_smem              65536 bytes: raw O, [g 4][depth / 4 = 32][row 32][4] float, so that the threads of a warp touch neighbouring 16 bytes
// maxsum_smem             1024 bytes: [g 4][row 32][m, l] float
// o_smem                  output, [depth / 8 = 16][row 32][8], 16 bytes a block: the layout an unswizzled TMA store reads
// returns                 {m, l} of the row, equal in all parts
__device__ __forceinline__ float2 fa4_ws_intracta_combine(unsigned local_row, unsigned partition_g, unsigned warp_group_idx,
                                                          float own_max, float own_sum, float scale_log2e,
                                                          float* stage_smem,
                                                          float* maxsum_smem, fa4_bf16* o_smem) {
    float4* stage = reinterpret_cast<float4*>(stage_smem);
    float2* maxsum = reinterpret_cast<float2*>(maxsum_smem);

    maxsum[partition_g * 32 + local_row] = make_float2(own_max, own_sum);

    // Orders every part's staging before every part's reads.
    ptx_bar_sync(warp_group_idx, 128);

    const float2 ml0 = maxsum[0 + local_row];
    const float2 ml1 = maxsum[32 + local_row];
    const float2 ml2 = maxsum[64 + local_row];
    const float2 ml3 = maxsum[96 + local_row];
    const float m = ptx_max_ftz(ptx_max_ftz(ptx_max_ftz(ml0.x, ml1.x), ml2.x), ml3.x);
    const float scale0 = ptx_ex2_approx_ftz(ptx_sub_rn(ml0.x, m));
    const float scale1 = ptx_ex2_approx_ftz(ptx_sub_rn(ml1.x, m));
    const float scale2 = ptx_ex2_approx_ftz(ptx_sub_rn(ml2.x, m));
    const float scale3 = ptx_ex2_approx_ftz(ptx_sub_rn(ml3.x, m));
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

// level 1: the combine without its normalisation. Merges the 4 key partitions of one warpgroup and keeps the result in registers, so that
// it can be merged with what other CTAs have.
//
//     m = max_g m_g    scale_g = 2^((m_g - m))    l = sum_g scale_g l_g    band = sum_g scale_g O_g
//
// Unlike the combine it takes a row without any key (its keys are all with others, or masked): every scale is then 2^-inf = 0,
// the band is 0, and m = -inf, l = 0 say so.
//
// local_row, partition_g  thread = partition_g * 32 + local_row
// warp_group_idx          id of the barrier, which 128 threads use
// own_max, own_sum        m_g in raw score units, l_g
// scale_log2e             softmax scale * log2(e); unused: the scores are scaled before the maximum is taken
// stage_smem              65536 bytes: raw O, [g 4][depth / 4 = 32][row 32][4] float
// maxsum_smem             1024 bytes: [g 4][row 32][m, l] float
// o_band                  receives depth columns [partition_g * 32, + 32) of the row, not normalised
// returns                 {m, l} of the row, equal in all parts
__device__ __forceinline__ float2 fa4_ws_level1_combine(unsigned local_row, unsigned partition_g, unsigned warp_group_idx, float own_max,
                                                        float own_sum, float scale_log2e, float* stage_smem,
                                                        float* maxsum_smem, float (&o_band)[32]) {
    float4* stage = reinterpret_cast<float4*>(stage_smem);
    float2* maxsum = reinterpret_cast<float2*>(maxsum_smem);
    maxsum[partition_g * 32 + local_row] = make_float2(own_max, own_sum);

    // Orders every part's staging before every part's reads.
    ptx_bar_sync(warp_group_idx, 128);

    float2 ml[4];
#pragma unroll
    for (unsigned g = 0; g < 4; ++g) ml[g] = maxsum[g * 32 + local_row];
    float m = ml[0].x;
#pragma unroll
    for (unsigned g = 1; g < 4; ++g) m = ptx_max_ftz(m, ml[g].x);
    const float reference = m == __uint_as_float(0xff800000u) ? 0.0f : m;
    float scale[4];
    float l = 0.0f;
#pragma unroll
    for (unsigned g = 0; g < 4; ++g) {
        scale[g] = ptx_ex2_approx_ftz(ptx_sub_rn(ml[g].x, reference));
        l = g == 0 ? ptx_mul_rn(scale[g], ml[g].y) : ptx_fma_rn(scale[g], ml[g].y, l);
    }
#pragma unroll
    for (unsigned quad = 0; quad < 8; ++quad) {
#pragma unroll
        for (unsigned g = 0; g < 4; ++g) {
            const float4 o = stage[(g * 32 + partition_g * 8 + quad) * 32 + local_row];
            float* band = o_band + 4 * quad;
            band[0] = g == 0 ? ptx_mul_ftz(scale[g], o.x) : ptx_fma_ftz(scale[g], o.x, band[0]);
            band[1] = g == 0 ? ptx_mul_ftz(scale[g], o.y) : ptx_fma_ftz(scale[g], o.y, band[1]);
            band[2] = g == 0 ? ptx_mul_ftz(scale[g], o.z) : ptx_fma_ftz(scale[g], o.z, band[2]);
            band[3] = g == 0 ? ptx_mul_ftz(scale[g], o.w) : ptx_fma_ftz(scale[g], o.w, band[3]);
        }
    }
    return make_float2(m, l);
}

// --- the problem and its work items ----------------------------------------------------------------------------------

struct Problem {
    unsigned batch, q_len, keys, kv_heads, group;
    unsigned tile_rows;           // query rows of a tile
    unsigned tile_heads;          // heads of one position in a tile: row r is position r / tile_heads, head r % tile_heads
    unsigned tile_positions;      // positions of a tile: 1 where the group fills it
    unsigned tiles_per_position;  // tiles that share a position: 1 unless the group is larger than a tile
    unsigned q_tiles;             // tiles of one KV head
    unsigned partition_tiles;     // key tiles of a partition
    unsigned partitions;          // of every query tile; those past its last key have no work
    unsigned cluster;             // CTAs of a cluster, a power of two; they take as many partitions of one query tile, rank r the r-th of them
    unsigned items;
};

__device__ __forceinline__ unsigned cluster_log2(const Problem& p) {
    return 31 - __clz(p.cluster);
}

__device__ __forceinline__ Problem describe(unsigned batch, unsigned q_len, unsigned keys, unsigned kv_heads, unsigned group,
                                            unsigned partition_tiles, unsigned partitions, unsigned tile_rows,
                                            unsigned cluster) {
    Problem p{batch, q_len, keys, kv_heads, group, tile_rows};
    p.tile_heads = min(group, tile_rows);
    p.tile_positions = p.tile_heads == tile_rows ? 1 : tile_rows / p.tile_heads;
    p.tiles_per_position = (group + tile_rows - 1) / tile_rows;
    p.q_tiles = (q_len <= p.tile_positions ? 1 : (q_len + p.tile_positions - 1) / p.tile_positions) * p.tiles_per_position;
    p.partition_tiles = partition_tiles;
    p.partitions = partitions;
    p.cluster = cluster;
    p.items = batch * partitions * p.q_tiles * kv_heads;
    return p;
}

// One query tile and one partition of the keys it attends to.
struct Item {
    unsigned batch, kv_head;
    unsigned query_tile;       // among those of all sequences and KV heads
    unsigned partition, used;  // used: partitions of this query tile that have work; 1 if there is no key at all
    bool split;                // used > 1
    unsigned position, head;  // of query row 0; the head counts within the group
    int all_see;              // keys below it are visible to every row of the tile
    unsigned tiles, first_tile, end_tile;  // tiles: key tiles of the sequence
};

__device__ __forceinline__ Item item_at(const Problem& p, unsigned index) {
    Item item;
    // The KV head runs fastest: clusters side by side read neighbouring memory.
    // Divided anew for each number: quotients kept side by side take registers that 32 rows of depth 128 do not have.
    const unsigned unit = index >> cluster_log2(p);
    const unsigned groups = p.partitions >> cluster_log2(p);
    const unsigned tile = unit / p.kv_heads % p.q_tiles;
    item.kv_head = unit % p.kv_heads;
    item.partition = (unit / p.kv_heads / p.q_tiles % groups << cluster_log2(p)) + (index & (p.cluster - 1));
    item.batch = unit / p.kv_heads / p.q_tiles / groups;
    item.query_tile = (item.batch * p.q_tiles + tile) * p.kv_heads + item.kv_head;
    item.position = tile / p.tiles_per_position * p.tile_positions;
    item.head = tile % p.tiles_per_position * p.tile_rows;
    item.all_see = (int)p.keys;
    const int seen = (int)p.keys;
    const unsigned tiles = (seen + BLOCK_KEYS - 1) / BLOCK_KEYS;
    item.tiles = tiles;
    item.used = p.partitions == 1 ? 1 : max((tiles + p.partition_tiles - 1) / p.partition_tiles, 1);
    item.split = p.partitions > 1 && tiles > p.partition_tiles;
    item.first_tile = item.partition * p.partition_tiles;
    item.end_tile = min(item.first_tile + p.partition_tiles, tiles);
    return item;
}

// Whether the CTA has work: keys, or a part in the merge of its cluster, of whose partitions only the first ones may have keys.
__device__ __forceinline__ bool has_work(const Problem& p, const Item& item) {
    // What counts in a cluster is the first of its partitions.
    const unsigned first = item.split ? item.partition & ~(p.cluster - 1) : item.partition;
    // Below `used`, without the division that it takes.
    return first == 0 || first * p.partition_tiles < item.tiles;
}

// Keys that a query row sees.
__device__ __forceinline__ int row_sees(const Problem& p, const Item& item, unsigned row) {
    return (int)p.keys;
}

// --- rings -----------------------------------------------------------------------------------------------------------

// Where a role is in a ring. A slot's `full` completes when its copy has landed, its `empty` when the consumer's warps have read it;
// the n-th use of a slot is the phase of parity n % 2 of both.
struct Cursor {
    unsigned slot = 0, parity = 0;

    __device__ __forceinline__ void advance(unsigned slots) {
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

// --- producers -------------------------------------------------------------------------------------------------------

// Fills one ring, in the order its part reads it: K then V of every key tile of the part. One thread runs it.
// Waits: `empty` of the slot (attend releases it). Signals: `full` of the slot, by the copy's bytes.
template <class Tile>
__device__ __forceinline__ void load_keys_values(const Problem& p, const fa4_tensor_map* k_map, const fa4_tensor_map* v_map, unsigned smem,
                                                 unsigned part) {
    const unsigned ring = smem + Tile::RING_OFFSET + part * Tile::SLOTS_PER_RING * SLOT_BYTES;
    const unsigned full = smem + Tile::FULL_OFFSET + part * Tile::SLOTS_PER_RING * MBARRIER_BYTES;
    const unsigned empty = smem + Tile::EMPTY_OFFSET + part * Tile::SLOTS_PER_RING * MBARRIER_BYTES;
    Cursor at;
    for (unsigned index = blockIdx.x; index < p.items; index += gridDim.x) {
        const Item item = item_at(p, index);
        if (!has_work(p, item)) continue;
        for (unsigned tile = item.first_tile + part; tile < item.end_tile; tile += PARTS) {
#pragma unroll 1
            for (unsigned operand = 0; operand < 2; ++operand) {
                // Keys past the end arrive as zeros and count as bytes.
                wait(empty + at.slot * MBARRIER_BYTES, at.parity ^ 1);
                const unsigned landed = full + at.slot * MBARRIER_BYTES;
                ptx_mbarrier_arrive_expect_tx(landed, SLOT_BYTES);
                ptx_tma_load_5d(ring + at.slot * SLOT_BYTES, operand == 0 ? k_map : v_map, landed, 0, tile * BLOCK_KEYS, 0, item.kv_head,
                                item.batch);
                at.advance(Tile::SLOTS_PER_RING);
            }
        }
    }
}

// Loads the query tile of every item, a buffer ahead of the consumers where there are two.
// One thread runs it.
// Waits: `q_empty` of the buffer (attend releases it, every warp once an item). Signals: `q_full`, by the copies' bytes.
template <class Tile>
__device__ __forceinline__ void load_queries(const Problem& p, const fa4_tensor_map* q_map, unsigned smem) {
    // Rows of the box outside the tensor (heads past the group, positions past q_len) arrive as zeros and count as bytes.
    const unsigned bytes = Q_CHUNKS * p.tile_positions * p.tile_heads * 128;
    Cursor at;
    for (unsigned index = blockIdx.x; index < p.items; index += gridDim.x) {
        const Item item = item_at(p, index);
        if (!has_work(p, item)) continue;
        const unsigned full = smem + Tile::Q_FULL_OFFSET + at.slot * MBARRIER_BYTES;
        wait(smem + Tile::Q_EMPTY_OFFSET + at.slot * MBARRIER_BYTES, at.parity ^ 1);
        ptx_mbarrier_arrive_expect_tx(full, bytes);
#pragma unroll 1
        for (unsigned chunk = 0; chunk < Q_CHUNKS; ++chunk)
            ptx_tma_load_5d(smem + Tile::Q_OFFSET + at.slot * Tile::Q_BYTES + chunk * Tile::Q_CHUNK_BYTES, q_map, full, chunk * 64, item.head, item.position,
                            item.kv_head, item.batch);
        at.advance(Tile::Q_BUFFERS);
    }
}

// --- consumer --------------------------------------------------------------------------------------------------------

// What a consumer thread knows about its place.
struct Place {
    unsigned thread, lane;
    unsigned part, row_warp;     // of PARTS, of PART_WARPS: the warp works on rows from 32 * row_warp
    unsigned ring, full;         // shared addresses of the part's ring; a slot's `empty` lies TO_EMPTY behind its `full`
    unsigned matrix;             // where this lane's row of four 8 x 8 matrices lies in a swizzled tile of keys: see key_matrices
    unsigned smem;
    unsigned char* smem_bytes;
};

// Fragments of a warp, see Tile.
template <class Tile>
using Scores = float[Tile::M_TILES][Tile::KEY_BLOCKS][4];
template <class Tile>
using Output = float[DEPTH_BLOCKS][Tile::ROW_BLOCKS][4];

// Softmax state of a warp's rows, for the rows 8 i + g of lane 4 g + c.
template <class Tile>
struct Rows {
    float maximum[Tile::ROW_BLOCKS];  // of the scores so far, in units of log2
    float offset[Tile::ROW_BLOCKS];   // -maximum, 0 while there is no key
    float sum[Tile::ROW_BLOCKS];      // of this lane's own probabilities
};

// One arrival for the warp, after what all of its lanes have read. These were ordinary reads; the copy that refills what they read belongs
// to the other proxy and could overtake them.
__device__ __forceinline__ void release(unsigned mbarrier, unsigned lane) {
    ptx_fence_proxy_async();
    __syncwarp();
    if (lane == 0) ptx_mbarrier_arrive(mbarrier);
}

// Byte offset of the row that lane 8 i + r gives for matrix i of 16 keys x 16 depth columns (two 16-byte units): key 8 (i / 2) + r,
// unit i % 2. The units of another pair, 2 u and 2 u + 1, lie where XOR with 32 u leads.
__device__ __forceinline__ unsigned key_matrices(unsigned lane) {
    return (lane / 16 * 8 + lane % 8) * 128 + ((lane / 8 % 2) ^ (lane % 8)) * 16;
}

// S = Q . K^T.
template <class Tile>
__device__ __forceinline__ void scores(Scores<Tile>& s, const Place& at, unsigned k_tile, unsigned q_tile) {
#pragma unroll
    for (unsigned m = 0; m < Tile::M_TILES; ++m)
#pragma unroll
        for (unsigned n = 0; n < Tile::KEY_BLOCKS; ++n)
#pragma unroll
            for (unsigned r = 0; r < 4; ++r) s[m][n][r] = 0.0f;
    // With 8 rows, matrix i of a load is unit i of four, the depth of two steps; else rows 8 (i % 2) and on, unit i / 2.
    constexpr bool EIGHT = Tile::ROWS == 8;
    const unsigned q_row = q_tile + (EIGHT ? at.lane % 8 : at.row_warp * 32 + at.lane / 8 % 2 * 8 + at.lane % 8) * 128;
    const unsigned q_unit = (at.lane / (EIGHT ? 8 : 16) ^ at.lane % 8) * 16;
    unsigned q_pair[4];
#pragma unroll
    for (unsigned step = 0; step < 8; ++step) {
        const unsigned chunk = step / 4;
        const unsigned unit_pair = step % 4 * 32;
        unsigned q[Tile::M_TILES][4];
        if constexpr (EIGHT) {
            if (step % 2 == 0) ptx_ldmatrix_x4(q_pair, q_row + chunk * Tile::Q_CHUNK_BYTES + (q_unit ^ unit_pair));
            q[0][0] = q_pair[step % 2 * 2];
            q[0][2] = q_pair[step % 2 * 2 + 1];
            q[0][1] = q[0][3] = 0;
        } else {
#pragma unroll
            for (unsigned m = 0; m < Tile::M_TILES; ++m)
                ptx_ldmatrix_x4(q[m], q_row + chunk * Tile::Q_CHUNK_BYTES + m * 16 * 128 + (q_unit ^ unit_pair));
        }
#pragma unroll
        for (unsigned n = 0; n < Tile::KEY_BLOCKS; n += 2) {
            unsigned k[4];
            ptx_ldmatrix_x4(k, k_tile + chunk * CHUNK_BYTES + n * 8 * 128 + (at.matrix ^ unit_pair));
#pragma unroll
            for (unsigned m = 0; m < Tile::M_TILES; ++m) {
                ptx_mma_m16n8k16(s[m][n], q[m], k[0], k[1]);
                ptx_mma_m16n8k16(s[m][n + 1], q[m], k[2], k[3]);
            }
        }
    }
}

__device__ __forceinline__ unsigned pack_p(float low, float high) {
    return ptx_cvt_bf16x2(low, high);
}

// O^T += V^T . P^T.
template <class Tile>
__device__ __forceinline__ void accumulate(Output<Tile>& o, const Scores<Tile>& s, const Place& at, unsigned v_tile) {
#pragma unroll
    for (unsigned n = 0; n < Tile::KEY_BLOCKS; n += 2) {
        unsigned probabilities[Tile::ROW_BLOCKS][2];
#pragma unroll
        for (unsigned r = 0; r < Tile::ROW_BLOCKS; ++r)
#pragma unroll
            for (unsigned half = 0; half < 2; ++half) {
                const float* pair = s[r / 2][n + half] + r % 2 * 2;
                probabilities[r][half] = pack_p(pair[0], pair[1]);
            }
#pragma unroll
        for (unsigned d = 0; d < DEPTH_BLOCKS; ++d) {
            unsigned v[4];
            ptx_ldmatrix_x4_trans(v, v_tile + d / 4 * CHUNK_BYTES + n * 8 * 128 + (at.matrix ^ d % 4 * 32));
#pragma unroll
            for (unsigned r = 0; r < Tile::ROW_BLOCKS; ++r) ptx_mma_m16n8k16(o[d][r], v, probabilities[r][0], probabilities[r][1]);
        }
    }
}

// Scores of keys that a row does not see become -inf: those past the end.
template <class Tile>
__device__ __forceinline__ void mask_scores(Scores<Tile>& s, const Problem& p, const Item& item, const Place& at, unsigned first_key) {
    const int key = (int)(first_key + at.lane % 4 * 2);
#pragma unroll
    for (unsigned i = 0; i < Tile::ROW_BLOCKS; ++i) {
        const int seen = row_sees(p, item, at.row_warp * 32 + i * 8 + at.lane / 4);
#pragma unroll
        for (unsigned n = 0; n < Tile::KEY_BLOCKS; ++n)
#pragma unroll
            for (unsigned v = 0; v < 2; ++v)
                if (key + (int)(n * 8 + v) >= seen) s[i / 2][n][i % 2 * 2 + v] = MINUS_INFINITY;
    }
}

// Turns scores into probabilities, against maxima that include this key tile's; brings sums and O to a new maximum's scale where one grew.
template <class Tile>
__device__ __forceinline__ void softmax(Scores<Tile>& s, Output<Tile>& o, Rows<Tile>& rows, const Place& at, float scale_log2e) {
    float maximum[Tile::ROW_BLOCKS];
    bool grew = false;
#pragma unroll
    for (unsigned i = 0; i < Tile::ROW_BLOCKS; ++i) {
        maximum[i] = rows.maximum[i];
#pragma unroll
        for (unsigned n = 0; n < Tile::KEY_BLOCKS; ++n)
            maximum[i] = fmaxf(maximum[i], fmaxf(s[i / 2][n][i % 2 * 2], s[i / 2][n][i % 2 * 2 + 1]));
        // The other keys of the row are in the lanes of the same g.
        maximum[i] = fmaxf(maximum[i], __shfl_xor_sync(0xffffffff, maximum[i], 1));
        maximum[i] = fmaxf(maximum[i], __shfl_xor_sync(0xffffffff, maximum[i], 2));
        grew |= maximum[i] > rows.maximum[i];
    }
    if (__any_sync(0xffffffff, grew)) {
#pragma unroll
        for (unsigned i = 0; i < Tile::ROW_BLOCKS; ++i) {
            // A row without a key so far has maximum -inf; offset 0 keeps its probabilities at 2^-inf = 0 instead of 2^(inf - inf).
            rows.offset[i] = maximum[i] == MINUS_INFINITY ? 0.0f : -maximum[i];
            const float factor = ptx_ex2_approx_ftz(rows.maximum[i] + rows.offset[i]);
            rows.maximum[i] = maximum[i];
            rows.sum[i] *= factor;
#pragma unroll
            for (unsigned v = 0; v < 2; ++v) {
                // In O^T the row 8 i + 2 c + v is this lane's.
                const float row_factor = __shfl_sync(0xffffffff, factor, (at.lane % 4 * 2 + v) * 4);
#pragma unroll
                for (unsigned d = 0; d < DEPTH_BLOCKS; ++d) {
                    o[d][i][v] *= row_factor;
                    o[d][i][2 + v] *= row_factor;
                }
            }
        }
    }
#pragma unroll
    for (unsigned i = 0; i < Tile::ROW_BLOCKS; ++i)
#pragma unroll
        for (unsigned n = 0; n < Tile::KEY_BLOCKS; ++n)
#pragma unroll
            for (unsigned v = 0; v < 2; ++v) {
                float& score = s[i / 2][n][i % 2 * 2 + v];
                score = ptx_ex2_approx_ftz(score + rows.offset[i]);
                rows.sum[i] += score;
            }
}

// --- merge -----------------------------------------------------------------------------------------------------------

// What the partitions of a query tile hand over in global memory: each its O, normalised, and the log2 of its LSE.
struct Workspace {
    float* o;           // [query_tile][partition][PARTIAL_FLOATS]
    float* lse;         // [query_tile][partition][ROWS]
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

// Raw O of the warp's rows to its part's place in `stage`. Rows from ROWS on stay as they are: finite.
template <class Tile>
__device__ __forceinline__ void stage_o(const Output<Tile>& o, const Place& at) {
    // This lane's first element: depth column g, row 32 row_warp + 2 c.
    float* stage = reinterpret_cast<float*>(at.smem_bytes + Tile::STAGE_OFFSET) + at.part * (DEPTH * PART_ROWS) +
                   (at.lane / 16 * PART_ROWS + at.row_warp * 32 + at.lane % 4 * 2) * 4 + at.lane / 4 % 4;
#pragma unroll
    for (unsigned d = 0; d < DEPTH_BLOCKS; ++d)
#pragma unroll
        for (unsigned r = 0; r < Tile::ROW_BLOCKS; ++r)
#pragma unroll
            for (unsigned i = 0; i < 4; ++i) stage[((d * 4 + i / 2 * 2) * PART_ROWS + r * 8 + i % 2) * 4] = o[d][r][i];
}

// The value of this thread's own row, lane of the warp's 32: value[i] of lane 4 g + c is that of row 8 i + g.
template <class Tile>
__device__ __forceinline__ float own_row(const float (&value)[Tile::ROW_BLOCKS], unsigned lane) {
    float own = 0.0f;
#pragma unroll
    for (unsigned i = 0; i < Tile::ROW_BLOCKS; ++i) {
        const float candidate = __shfl_sync(0xffffffff, value[i], lane % 8 * 4);
        if (lane / 8 == i) own = candidate;
    }
    return own;
}

// The log2 of a row's LSE: m scale log2(e) + log2(l). Without a key both terms are -inf.
__device__ __forceinline__ float log2_lse_of(float2 ml, float scale_log2e) {
    return ml.x + ptx_lg2_approx_ftz(ml.y);
}

// Writes this partition's O and LSE to the workspace. True in the CTA that is the last of the query tile to do so: it merges all of them.
// Every thread brings the unnormalised columns of its part of its row.
template <class Tile>
__device__ __forceinline__ bool publish(const float (&band)[BAND_COLS], float2 ml, const Problem& p, const Item& item, const Place& at,
                                        const Workspace& workspace, float scale_log2e) {
    const unsigned place = item.query_tile * p.partitions + item.partition;
    const unsigned row = at.thread % PART_ROWS;
    if (row < Tile::ROWS) {
        // A row without a key in this partition has sum 0 and O 0.
        const float inverse = ml.y > 0.0f ? ptx_rcp_approx_ftz(ml.y) : 0.0f;
        float4* partial = reinterpret_cast<float4*>(workspace.o + (unsigned long long)place * Tile::PARTIAL_FLOATS) +
                          at.part * (BAND_COLS / 4) * Tile::ROWS + row;
#pragma unroll
        for (unsigned i = 0; i < BAND_COLS; i += 4)
            partial[i / 4 * Tile::ROWS] =
                make_float4(band[i] * inverse, band[i + 1] * inverse, band[i + 2] * inverse, band[i + 3] * inverse);
        if (at.part == 0) workspace.lse[place * Tile::ROWS + row] = log2_lse_of(ml, scale_log2e);
    }
    // The merging CTA's copy engine reads what these ordinary stores write, and writes over what level 1 has read of `stage`.
    ptx_fence_proxy_async_global();
    ptx_fence_proxy_async();
    // Orders every thread's part of the partition before the arrival, which releases them all.
    ptx_bar_sync(TILE_BARRIER, CONSUMERS);
    const bool last = at.thread == 0 && arrive_last(workspace.arrived + item.query_tile, workspace.launch, item.used);
    // Orders the answer, and with it the other partitions, before every thread's reads.
    return ptx_bar_red_or(TILE_BARRIER, CONSUMERS, last);
}

// Writes four columns of a row to the O tile: float4 number `quad` of the row.
__device__ __forceinline__ void store_quad(unsigned char* out, unsigned quad, unsigned row, float4 value) {
    reinterpret_cast<uint2*>(out)[(quad / 2 * PART_ROWS + row) * 2 + quad % 2] =
        make_uint2(ptx_cvt_bf16x2(value.x, value.y), ptx_cvt_bf16x2(value.z, value.w));
}

// O of all partitions of a query tile to the O tile, in the order of the keys whichever CTA does it. Thread t merges row t % ROWS.
// Returns the log2 of that row's LSE.
// Waits: `merge`, the copies that one of these threads starts: of the LSEs and the first partitions' O, then of the next ones'.
template <class Tile>
__device__ __forceinline__ float merge_partitions(const Problem& p, const Item& item, const Place& at, const Workspace& workspace,
                                                  unsigned& merge_parity) {
    const unsigned row = at.thread % Tile::ROWS;
    const unsigned long long first = (unsigned long long)item.query_tile * p.partitions;
    const unsigned merge = at.smem + Tile::MERGE_OFFSET;
    const float* lse = reinterpret_cast<const float*>(at.smem_bytes + Tile::WEIGHTS_OFFSET) + row;
    const float4* stage = reinterpret_cast<const float4*>(at.smem_bytes + Tile::STAGE_OFFSET) + at.thread;
    float4 merged[Tile::MERGE_QUADS];
#pragma unroll
    for (unsigned i = 0; i < Tile::MERGE_QUADS; ++i) merged[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float offset = 0.0f, inverse = 0.0f, log2_lse = 0.0f;
#pragma unroll 1
    for (unsigned begin = 0; begin < item.used; begin += Tile::MERGE_PARTITIONS) {
        const unsigned count = min(item.used - begin, Tile::MERGE_PARTITIONS);
        if (at.thread < 32 && ptx_elect_sync()) {
            // The partitions were written by ordinary stores, which publish has made visible here; these copies belong to the other proxy.
            ptx_fence_proxy_async_global();
            const unsigned lse_bytes = begin == 0 ? item.used * Tile::ROWS * 4 : 0;
            ptx_mbarrier_arrive_expect_tx(merge, count * Tile::PARTIAL_FLOATS * 4 + lse_bytes);
            if (begin == 0) ptx_bulk_load(at.smem + Tile::WEIGHTS_OFFSET, workspace.lse + first * Tile::ROWS, lse_bytes, merge);
            ptx_bulk_load(at.smem + Tile::STAGE_OFFSET, workspace.o + (first + begin) * Tile::PARTIAL_FLOATS,
                          count * Tile::PARTIAL_FLOATS * 4, merge);
        }
        __syncwarp();
        wait(merge, merge_parity);
        merge_parity ^= 1;
        if (begin == 0) {
            float top = MINUS_INFINITY;
            for (unsigned i = 0; i < item.used; ++i) top = fmaxf(top, lse[i * Tile::ROWS]);
            offset = top == MINUS_INFINITY ? 0.0f : -top;
            float sum = 0.0f;
            for (unsigned i = 0; i < item.used; ++i) sum += ptx_ex2_approx_ftz(lse[i * Tile::ROWS] + offset);
            // A row without a key in any partition: weights 0.
            inverse = sum > 0.0f ? ptx_rcp_approx_ftz(sum) : 0.0f;
            log2_lse = top + ptx_lg2_approx_ftz(sum);
        }
#pragma unroll(Tile::MERGE_UNROLL)
        for (unsigned i = 0; i < count; ++i) {
            const float weight = ptx_ex2_approx_ftz(lse[(begin + i) * Tile::ROWS] + offset) * inverse;
#pragma unroll
            for (unsigned quad = 0; quad < Tile::MERGE_QUADS; ++quad) {
                const float4 o = stage[i * (Tile::PARTIAL_FLOATS / 4) + quad * CONSUMERS];
                merged[quad].x = __fmaf_rn(weight, o.x, merged[quad].x);
                merged[quad].y = __fmaf_rn(weight, o.y, merged[quad].y);
                merged[quad].z = __fmaf_rn(weight, o.z, merged[quad].z);
                merged[quad].w = __fmaf_rn(weight, o.w, merged[quad].w);
            }
        }
        // Orders these reads of `stage` before the next copy over it.
        ptx_fence_proxy_async();
        ptx_bar_sync(TILE_BARRIER, CONSUMERS);
    }
#pragma unroll
    for (unsigned quad = 0; quad < Tile::MERGE_QUADS; ++quad)
        store_quad(at.smem_bytes + Tile::OUT_OFFSET, (at.thread + quad * CONSUMERS) / Tile::ROWS, row, merged[quad]);
    return log2_lse;
}

// The merge of the parts, then of the partitions; O and LSE of an item.
template <class Tile>
__device__ __forceinline__ void finish(const Output<Tile>& o, Rows<Tile>& rows, const Problem& p, const Item& item, const Place& at,
                                       const fa4_tensor_map* out_map, float* lse, const Workspace& workspace, unsigned& merge_parity,
                                       float scale_log2e) {
    const unsigned row = at.thread % PART_ROWS;
    // Rows past the tile bring what keeps the combine finite; so does a row that sees no key, whose O is 0 in all parts.
    const bool in_tile = row < Tile::ROWS;
    float own_max = 0.0f, own_sum = 1.0f;
    if (at.row_warp < Tile::ROW_WARPS) {
        stage_o<Tile>(o, at);
#pragma unroll
        for (unsigned i = 0; i < Tile::ROW_BLOCKS; ++i) {
            rows.sum[i] += __shfl_xor_sync(0xffffffff, rows.sum[i], 1);
            rows.sum[i] += __shfl_xor_sync(0xffffffff, rows.sum[i], 2);
        }
        const float maximum = own_row<Tile>(rows.maximum, at.lane);
        const float sum = own_row<Tile>(rows.sum, at.lane);
        if (in_tile) {
            own_max = maximum;
            own_sum = sum;
        }
    }
    // The previous item's copies have read the O tile; the next barrier tells the others.
    if (at.thread < 32) ptx_bulk_wait_group_read();

    float* stage = reinterpret_cast<float*>(at.smem_bytes + Tile::STAGE_OFFSET);
    float* maxsum = reinterpret_cast<float*>(at.smem_bytes + Tile::MAXSUM_OFFSET);
    float log2_lse;
    if (item.split) {
        float band[BAND_COLS];
        const float2 ml = fa4_ws_level1_combine(row, at.part, COMBINE_BARRIER, own_max, own_sum, scale_log2e, stage, maxsum, band);
        if (!publish<Tile>(band, ml, p, item, at, workspace, scale_log2e)) return;
        log2_lse = merge_partitions<Tile>(p, item, at, workspace, merge_parity);
    } else {
        const float2 ml = fa4_ws_intracta_combine(row, at.part, COMBINE_BARRIER, own_max, own_sum, scale_log2e, stage, maxsum,
                                                  reinterpret_cast<fa4_bf16*>(at.smem_bytes + Tile::OUT_OFFSET));
        log2_lse = log2_lse_of(ml, scale_log2e);
    }
    ptx_fence_proxy_async();
    // Orders the O tile before the copies that read it, and the reads of `stage` before the next item's stores.
    ptx_bar_sync(TILE_BARRIER, CONSUMERS);
    if (at.thread < 32 && ptx_elect_sync()) {
#pragma unroll 1
        for (unsigned block = 0; block < OUT_BLOCKS; ++block)
            // Rows of the box outside the tensor are dropped.
            ptx_tma_store_5d(out_map, at.smem + Tile::OUT_OFFSET + block * OUT_BLOCK_BYTES, block * OUT_COLS, item.head, item.position,
                             item.kv_head, item.batch);
        ptx_bulk_commit_group();
    }
    __syncwarp();

    // One thread a row writes the LSE, in natural units.
    const unsigned position = item.position + at.thread / p.tile_heads;
    const unsigned head = item.head + at.thread % p.tile_heads;
    if (at.thread < p.tile_heads * p.tile_positions && position < p.q_len && head < p.group) {
        const unsigned long long q_head = (unsigned long long)(item.batch * p.kv_heads + item.kv_head) * p.group + head;
        lse[q_head * p.q_len + position] = log2_lse * LN2;
    }
}

// Attends: for every item the key tiles of this warp's part, then O and LSE.
// Waits: `q_full` (load_queries), `full` of the ring's slots (load_keys_values). Signals: `empty` of each slot, `q_empty` once an item.
template <class Tile>
__device__ __forceinline__ void attend(const Problem& p, const fa4_tensor_map* out_map, float* lse, const Workspace& workspace,
                                       unsigned char* smem_bytes, unsigned smem, unsigned warp, unsigned lane, float scale_log2e) {
    const unsigned part = warp / PART_WARPS;
    const unsigned first_slot = part * Tile::SLOTS_PER_RING;
    const Place at{warp * 32 + lane,
                   lane,
                   part,
                   warp % PART_WARPS,
                   smem + Tile::RING_OFFSET + first_slot * SLOT_BYTES,
                   smem + Tile::FULL_OFFSET + first_slot * MBARRIER_BYTES,
                   key_matrices(lane),
                   smem,
                   smem_bytes};

    Cursor ring, q;
    Rows<Tile> rows;
    Output<Tile> o;
    Scores<Tile> s;
    unsigned merge_parity = 0;
#pragma unroll 1
    for (unsigned index = blockIdx.x; index < p.items; index += gridDim.x) {
        const Item item = item_at(p, index);
        if (!has_work(p, item)) continue;
#pragma unroll
        for (unsigned i = 0; i < Tile::ROW_BLOCKS; ++i) {
            rows.maximum[i] = MINUS_INFINITY;
            rows.offset[i] = rows.sum[i] = 0.0f;
        }
#pragma unroll
        for (unsigned d = 0; d < DEPTH_BLOCKS; ++d)
#pragma unroll
            for (unsigned r = 0; r < Tile::ROW_BLOCKS; ++r)
#pragma unroll
                for (unsigned i = 0; i < 4; ++i) o[d][r][i] = 0.0f;

        wait(smem + Tile::Q_FULL_OFFSET + q.slot * MBARRIER_BYTES, q.parity);
#pragma unroll 1
        for (unsigned tile = item.first_tile + part; tile < item.end_tile; tile += PARTS) {
            const Cursor k = ring;
            ring.advance(Tile::SLOTS_PER_RING);
            const Cursor v = ring;
            ring.advance(Tile::SLOTS_PER_RING);
            wait(at.full + k.slot * MBARRIER_BYTES, k.parity);
#pragma unroll 1
            for (unsigned step = 0; step < Tile::KEY_STEPS; ++step) {
                scores<Tile>(s, at, at.ring + k.slot * SLOT_BYTES + step * Tile::STEP_KEYS * 128,
                             smem + Tile::Q_OFFSET + q.slot * Tile::Q_BYTES);
                if (step == Tile::KEY_STEPS - 1) release(at.full + Tile::TO_EMPTY + k.slot * MBARRIER_BYTES, lane);
#pragma unroll
                for (unsigned m = 0; m < Tile::M_TILES; ++m)
#pragma unroll
                    for (unsigned n = 0; n < Tile::KEY_BLOCKS; ++n)
#pragma unroll
                        for (unsigned r = 0; r < 4; ++r) s[m][n][r] = __fmul_rn(s[m][n][r], scale_log2e);
                const unsigned first_key = tile * BLOCK_KEYS + step * Tile::STEP_KEYS;
                if ((int)(first_key + Tile::STEP_KEYS) > item.all_see) mask_scores<Tile>(s, p, item, at, first_key);
                softmax<Tile>(s, o, rows, at, scale_log2e);
                if (step == 0) wait(at.full + v.slot * MBARRIER_BYTES, v.parity);
                accumulate<Tile>(o, s, at, at.ring + v.slot * SLOT_BYTES + step * Tile::STEP_KEYS * 128);
            }
            release(at.full + Tile::TO_EMPTY + v.slot * MBARRIER_BYTES, lane);
        }
        release(smem + Tile::Q_EMPTY_OFFSET + q.slot * MBARRIER_BYTES, lane);
        q.advance(Tile::Q_BUFFERS);
        finish<Tile>(o, rows, p, item, at, out_map, lse, workspace, merge_parity, scale_log2e);
    }
    // Shared memory has to stay until the last copies have read it.
    if (at.thread < 32) ptx_bulk_wait_group_read();
}

// --- entry -----------------------------------------------------------------------------------------------------------

// q_map           [batch][kv_heads][q_len][group][DEPTH], box 1 x 1 x positions x heads x 64, 128-byte swizzle
// out_map         the same, box 1 x 1 x positions x heads x OUT_COLS, no swizzle
// k_map, v_map    [batch][kv_heads][DEPTH / 64][keys][64], box 1 x 1 x SLOT_CHUNKS x BLOCK_KEYS x 64, 128-byte swizzle
// lse             [batch][kv_heads * group][q_len] float, natural logarithm
// partition_tiles, partitions: key tiles of a partition, and how many of them cover the keys; with one, the last three are not read
// launch: a number that rises with every launch that uses the workspace, see arrive_last
// partial_o, partial_lse, arrived: see Workspace. It belongs to one launch at a time, so to a stream; `arrived` is 0 at first, and again
// after a launch.
// Grid: any number of CTAs; CTA c takes items c, c + gridDim.x, ... Block: THREADS.
template <class Tile>
__device__ __forceinline__ void attention(const fa4_tensor_map& q_map, const fa4_tensor_map& k_map, const fa4_tensor_map& v_map,
                                          const fa4_tensor_map& out_map, float* lse, unsigned batch, unsigned q_len, unsigned keys,
                                          unsigned kv_heads, unsigned group, float scale, unsigned partition_tiles, unsigned partitions,
                                          const Workspace& workspace) {
    extern __shared__ __align__(1024) unsigned char smem_bytes[];
    const unsigned smem = (unsigned)__cvta_generic_to_shared(smem_bytes);
    // The same in all lanes; the shuffle lets the compiler know.
    const unsigned warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    const unsigned lane = threadIdx.x % 32;
    const Problem p = describe(batch, q_len, keys, kv_heads, group, partition_tiles, partitions,
                               Tile::ROWS, 1);

    if (warp == 0 && ptx_elect_sync()) {
        for (unsigned slot = 0; slot < Tile::RING_SLOTS; ++slot) {
            ptx_mbarrier_init(smem + Tile::FULL_OFFSET + slot * MBARRIER_BYTES, 1);  // the producer; the copy's bytes follow
            ptx_mbarrier_init(smem + Tile::EMPTY_OFFSET + slot * MBARRIER_BYTES, Tile::ROW_WARPS);
        }
        for (unsigned buffer = 0; buffer < Tile::Q_BUFFERS; ++buffer) {
            ptx_mbarrier_init(smem + Tile::Q_FULL_OFFSET + buffer * MBARRIER_BYTES, 1);
            ptx_mbarrier_init(smem + Tile::Q_EMPTY_OFFSET + buffer * MBARRIER_BYTES, 4);
        }
        ptx_mbarrier_init(smem + Tile::MERGE_OFFSET, 1);
        ptx_fence_mbarrier_init();
    }
    // Tile rows that no box covers: zeros, once.
    const unsigned used_rows = p.tile_heads * p.tile_positions;
    if (used_rows < Tile::ROWS) {
        for (unsigned unit = threadIdx.x; unit < Tile::Q_BUFFERS * Tile::Q_BYTES / 16; unit += THREADS)
            if (unit / 8 % Tile::ROWS >= used_rows) reinterpret_cast<uint4*>(smem_bytes + Tile::Q_OFFSET)[unit] = make_uint4(0, 0, 0, 0);
    }
    // Rows past the tile, which the combine reads as well: zeros.
    if constexpr (Tile::ROWS < PART_ROWS) {
        for (unsigned unit = threadIdx.x; unit < STAGE_BYTES / 16; unit += THREADS)
            reinterpret_cast<uint4*>(smem_bytes + Tile::STAGE_OFFSET)[unit] = make_uint4(0, 0, 0, 0);
        // The copies of a merge write over these zeros.
        ptx_fence_proxy_async();
    }
    // Orders the mbarriers' initialisation and the zeros before every role.
    ptx_bar_sync(COMBINE_BARRIER, THREADS);

    if (warp < 4) {
        ptx_setmaxnreg_inc<248>();
        attend<Tile>(p, &out_map, lse, workspace, smem_bytes, smem, warp, lane, scale * LOG2E);
    } else {
        ptx_setmaxnreg_dec<40>();
        const unsigned producer = warp - 4;
        if (producer < PARTS && ptx_elect_sync()) {
            ptx_prefetch_tensormap(&k_map);
            ptx_prefetch_tensormap(&v_map);
            load_keys_values<Tile>(p, &k_map, &v_map, smem, producer);
        } else if (producer == PARTS && ptx_elect_sync()) {
            load_queries<Tile>(p, &q_map, smem);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
fa4_attention_d128_m4r32_ks_bf16_nofma_t8_sm90a(
    const __grid_constant__ fa4_tensor_map q_map, const __grid_constant__ fa4_tensor_map k_map,
    const __grid_constant__ fa4_tensor_map v_map, const __grid_constant__ fa4_tensor_map out_map, float* lse, unsigned batch,
    unsigned q_len, unsigned keys, unsigned kv_heads, unsigned group, float scale, unsigned partition_tiles,
    unsigned partitions, unsigned launch, float* partial_o, float* partial_lse, unsigned long long* arrived) {
    attention<Tile8>(q_map, k_map, v_map, out_map, lse, batch, q_len, keys, kv_heads, group, scale, partition_tiles, partitions,
                     Workspace{partial_o, partial_lse, arrived, launch});
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
fa4_attention_d128_m4r32_ks_bf16_nofma_t16_sm90a(
    const __grid_constant__ fa4_tensor_map q_map, const __grid_constant__ fa4_tensor_map k_map,
    const __grid_constant__ fa4_tensor_map v_map, const __grid_constant__ fa4_tensor_map out_map, float* lse, unsigned batch,
    unsigned q_len, unsigned keys, unsigned kv_heads, unsigned group, float scale, unsigned partition_tiles,
    unsigned partitions, unsigned launch, float* partial_o, float* partial_lse, unsigned long long* arrived) {
    attention<Tile16>(q_map, k_map, v_map, out_map, lse, batch, q_len, keys, kv_heads, group, scale, partition_tiles, partitions,
                     Workspace{partial_o, partial_lse, arrived, launch});
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
fa4_attention_d128_m4r32_ks_bf16_nofma_t32_sm90a(
    const __grid_constant__ fa4_tensor_map q_map, const __grid_constant__ fa4_tensor_map k_map,
    const __grid_constant__ fa4_tensor_map v_map, const __grid_constant__ fa4_tensor_map out_map, float* lse, unsigned batch,
    unsigned q_len, unsigned keys, unsigned kv_heads, unsigned group, float scale, unsigned partition_tiles,
    unsigned partitions, unsigned launch, float* partial_o, float* partial_lse, unsigned long long* arrived) {
    attention<Tile32>(q_map, k_map, v_map, out_map, lse, batch, q_len, keys, kv_heads, group, scale, partition_tiles, partitions,
                     Workspace{partial_o, partial_lse, arrived, launch});
}
