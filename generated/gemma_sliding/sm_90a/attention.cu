// Attention for sm_90a, shared-key: O = softmax(scale Q K^T) V and its LSE
//
// Generated from templates/kernels/attention_sm90a.cu.j2 for config gemma_sliding on sm_90a.
// Do not edit: change the template or the config, then run
//     fa4gen emit --config gemma_sliding.yaml
//
// One CTA works on tiles of n query rows (positions x heads of one KV head), 256 deep, over key tiles of 64 keys. Both MMAs have their
// operands swapped, so that the few query rows are N and the keys, then the depth, are M:
//     S^T[64 keys x n rows]   = K . Q^T         A = K as loaded (K-major), B = Q (K-major)
//     O^T[256 depth x n rows] += V^T . P^T       A = V as loaded (MN-major), B = P (K-major)
// There is an entry for each n of 8, 16, 32: the caller takes the one whose tiles its query rows fill best.
// Of 8 rows there are two, for launches with little to read and with much: with much, 2 CTAs share an SM.
// The four warps of a consumer warpgroup hold four key slices of S^T and four depth bands of O^T (16 of every 64). They share the key tile,
// so they agree on row maxima when a row has outgrown the last ones (fa4_ws_exchange4_max) and on row
// sums once, at the end (fa4_ws_exchange4_add).
//
// Roles: 1 consumer warpgroup (attend), then a warp that fills its ring of K and V (load_keys_values) and a warp for Q (load_queries).
//
// Shared memory of 8 rows, bytes:
//           0  196608  ring
//      196608   16384  q
//      212992    2048  p
//      215040    2048  exchange
//      217088    8192  weights
//      225280      16  last
//      225296      96  mbar_full
//      225392      96  mbar_empty
//      225488      32  mbar_q_full
//      225520      32  mbar_q_empty
//      225552       8  mbar_verdict
//      225560       8  mbar_ready
//      225568       8  mbar_read
//      225576 in all
// Shared memory of 8 rows, two CTAs an SM, bytes:
//           0   81920  ring
//       81920   16384  q
//       98304    2048  p
//      100352    2048  exchange
//      102400    8192  weights
//      110592      16  last
//      110608      40  mbar_full
//      110648      40  mbar_empty
//      110688      32  mbar_q_full
//      110720      32  mbar_q_empty
//      110752       8  mbar_verdict
//      110760       8  mbar_ready
//      110768       8  mbar_read
//      110776 in all
// Shared memory of 16 rows, bytes:
//           0  180224  ring
//      180224   32768  q
//      212992    4096  p
//      217088    2048  exchange
//      219136    8192  weights
//      227328      16  last
//      227344      88  mbar_full
//      227432      88  mbar_empty
//      227520      32  mbar_q_full
//      227552      32  mbar_q_empty
//      227584       8  mbar_verdict
//      227592       8  mbar_ready
//      227600       8  mbar_read
//      227608 in all
// Shared memory of 32 rows, bytes:
//           0  163840  ring
//      163840   32768  q
//      196608    8192  landing
//      204800    8192  p
//      212992    2048  exchange
//      215040    8192  weights
//      223232      16  last
//      223248      80  mbar_full
//      223328      80  mbar_empty
//      223408      16  mbar_q_full
//      223424      16  mbar_q_empty
//      223440       8  mbar_verdict
//      223448       8  mbar_ready
//      223456       8  mbar_read
//      223464 in all
//
// Barriers: 0 exchange of a warpgroup (0 first, once, for the whole CTA, before the roles part); 2 P or O of a
// warpgroup is in shared memory.

typedef unsigned short fa4_bf16;  // the bits of a bfloat16
typedef unsigned short fa4_f16;   // the bits of a float16
struct alignas(64) fa4_tensor_map {
    unsigned char bytes[128];  // as cuTensorMapEncodeTiled made it
};

constexpr unsigned BLOCK_KEYS = 64;     // keys of a key tile: M of S^T, K of O^T
constexpr unsigned DEPTH = 256;          // of a head
constexpr unsigned WARPGROUPS = 1;      // consumers
constexpr unsigned THREADS = 192;
constexpr unsigned O_BLOCKS = 4;        // DEPTH / 64
constexpr unsigned K_STEPS = 4;         // wgmma along 64 of K: 64 / 16
// Swizzled tiles: pieces of [rows][128 bytes], "chunks". The 16-byte unit u of row r lies at unit u ^ (r % 8).
constexpr unsigned SLOT_CHUNKS = 2;       // 64-column chunks of a ring slot
constexpr unsigned SLOT_BYTES = 16384;
constexpr unsigned TILE_SLOTS = 2;        // slots of a K tile, and of a V tile
constexpr unsigned Q_CHUNKS = 4;
constexpr unsigned P_BUFFERS = 2;
constexpr unsigned OUT_CHUNK_COLS = 64;
constexpr unsigned CHUNKS_PER_BLOCK = 1;
constexpr unsigned LITTLE_KEYS = 131072;  // of all sequences and KV heads, whose K and V have 128 MiB
constexpr unsigned KEPT_BLOCKS = 4;     // O blocks that warpgroup 0 finishes
constexpr unsigned MBARRIER_BYTES = 8;
constexpr unsigned MERGE_READS = 8;      // 16-byte reads of other clusters' slices that a thread has under way at most
static_assert(TILE_SLOTS * SLOT_CHUNKS * 64 == DEPTH && O_BLOCKS * 64 == DEPTH, "slots and blocks cover the head");
// What depends on the rows of a tile.
// ROWS           query rows, the N of both MMAs
// FRAGMENT       registers that a lane has of a 64 x ROWS accumulator. Register 4 j + 2 h + v of lane 4 g + c in warp w is M index
//                16 w + 8 h + g (a key, or a depth column), query row 8 j + 2 c + v.
// LANE_ROWS      query rows a lane sees: ROWS / 4, numbered i = 2 j + v
// STMATRIX_*     8 x 8 matrices of one store, and stores of a fragment
// RING_SLOTS     of all rings; SLOTS_PER_RING: one ring a consumer warpgroup
// Q_CHUNK_BYTES  ROWS x 128; a P tile has the same shape: ROWS x 64 keys. Q_CHUNK_UNITS: in units of 16 bytes
// BLOCK_FLOATS   of an O block: FRAGMENT x 128 lanes. With split keys a partition's O passes through global memory and the ring as it lies
//                in the accumulators, PIECE_BLOCKS blocks at a time, which fill at most a slot
// WEIGHTS        [64 partitions][32 lanes] float
// LANDING        [CTAs of the cluster - 1][blocks of a slice][quad of registers][128 threads][4] float: what they send, from the second Q
//                buffer on, which a launch in clusters does without
// HELD_TILES     O tiles that may wait in Q's buffers for the end of the CTA; 1: none does
// LAST           whether this CTA merges the partitions, for the consumers and each producer
// FULL, EMPTY    [RING_SLOTS] mbarriers; Q_FULL, Q_EMPTY: [Q_BUFFERS]; VERDICT: [WARPGROUPS]; READY, READ: 1 each
struct Tile8 {
    static constexpr unsigned ROWS = 8;
    static constexpr unsigned FRAGMENT = 4;
    static constexpr unsigned LANE_ROWS = 2;
    static constexpr unsigned LANE_ROWS_LOG2 = 1;
    static constexpr unsigned STMATRIX_MATRICES = 2;
    static constexpr unsigned STMATRIX_COUNT = 1;
    static constexpr unsigned RING_SLOTS = 12;
    static constexpr unsigned MAX_CLUSTER = 4;
    static constexpr unsigned SLOTS_PER_RING = 12;
    static constexpr unsigned Q_CHUNK_BYTES = 1024;
    static constexpr unsigned Q_CHUNK_UNITS = 64;
    static constexpr unsigned Q_BYTES = 4096;
    static constexpr unsigned Q_BUFFERS = 4;
    static constexpr unsigned HELD_TILES = 4;
    static constexpr unsigned BLOCK_FLOATS = 512;
    static constexpr unsigned PIECE_BLOCKS = 4;
    static constexpr unsigned PIECE_BYTES = 8192;
    static constexpr unsigned RING_OFFSET = 0;
    static constexpr unsigned Q_OFFSET = 196608;
    static constexpr unsigned P_OFFSET = 212992;
    static constexpr unsigned EXCHANGE_OFFSET = 215040;
    static constexpr unsigned WEIGHTS_OFFSET = 217088;
    static constexpr unsigned LAST_OFFSET = 225280;
    static constexpr unsigned FULL_OFFSET = 225296;
    static constexpr unsigned EMPTY_OFFSET = 225392;
    static constexpr unsigned Q_FULL_OFFSET = 225488;
    static constexpr unsigned Q_EMPTY_OFFSET = 225520;
    static constexpr unsigned VERDICT_OFFSET = 225552;
    static constexpr unsigned LANDING_OFFSET = 200704;
    static constexpr unsigned READY_OFFSET = 225560;
    static constexpr unsigned READ_OFFSET = 225568;
};
struct Tile8Shared {
    static constexpr unsigned ROWS = 8;
    static constexpr unsigned FRAGMENT = 4;
    static constexpr unsigned LANE_ROWS = 2;
    static constexpr unsigned LANE_ROWS_LOG2 = 1;
    static constexpr unsigned STMATRIX_MATRICES = 2;
    static constexpr unsigned STMATRIX_COUNT = 1;
    static constexpr unsigned RING_SLOTS = 5;
    static constexpr unsigned MAX_CLUSTER = 4;
    static constexpr unsigned SLOTS_PER_RING = 5;
    static constexpr unsigned Q_CHUNK_BYTES = 1024;
    static constexpr unsigned Q_CHUNK_UNITS = 64;
    static constexpr unsigned Q_BYTES = 4096;
    static constexpr unsigned Q_BUFFERS = 4;
    static constexpr unsigned HELD_TILES = 4;
    static constexpr unsigned BLOCK_FLOATS = 512;
    static constexpr unsigned PIECE_BLOCKS = 4;
    static constexpr unsigned PIECE_BYTES = 8192;
    static constexpr unsigned RING_OFFSET = 0;
    static constexpr unsigned Q_OFFSET = 81920;
    static constexpr unsigned P_OFFSET = 98304;
    static constexpr unsigned EXCHANGE_OFFSET = 100352;
    static constexpr unsigned WEIGHTS_OFFSET = 102400;
    static constexpr unsigned LAST_OFFSET = 110592;
    static constexpr unsigned FULL_OFFSET = 110608;
    static constexpr unsigned EMPTY_OFFSET = 110648;
    static constexpr unsigned Q_FULL_OFFSET = 110688;
    static constexpr unsigned Q_EMPTY_OFFSET = 110720;
    static constexpr unsigned VERDICT_OFFSET = 110752;
    static constexpr unsigned LANDING_OFFSET = 86016;
    static constexpr unsigned READY_OFFSET = 110760;
    static constexpr unsigned READ_OFFSET = 110768;
};
struct Tile16 {
    static constexpr unsigned ROWS = 16;
    static constexpr unsigned FRAGMENT = 8;
    static constexpr unsigned LANE_ROWS = 4;
    static constexpr unsigned LANE_ROWS_LOG2 = 2;
    static constexpr unsigned STMATRIX_MATRICES = 4;
    static constexpr unsigned STMATRIX_COUNT = 1;
    static constexpr unsigned RING_SLOTS = 11;
    static constexpr unsigned MAX_CLUSTER = 4;
    static constexpr unsigned SLOTS_PER_RING = 11;
    static constexpr unsigned Q_CHUNK_BYTES = 2048;
    static constexpr unsigned Q_CHUNK_UNITS = 128;
    static constexpr unsigned Q_BYTES = 8192;
    static constexpr unsigned Q_BUFFERS = 4;
    static constexpr unsigned HELD_TILES = 4;
    static constexpr unsigned BLOCK_FLOATS = 1024;
    static constexpr unsigned PIECE_BLOCKS = 4;
    static constexpr unsigned PIECE_BYTES = 16384;
    static constexpr unsigned RING_OFFSET = 0;
    static constexpr unsigned Q_OFFSET = 180224;
    static constexpr unsigned P_OFFSET = 212992;
    static constexpr unsigned EXCHANGE_OFFSET = 217088;
    static constexpr unsigned WEIGHTS_OFFSET = 219136;
    static constexpr unsigned LAST_OFFSET = 227328;
    static constexpr unsigned FULL_OFFSET = 227344;
    static constexpr unsigned EMPTY_OFFSET = 227432;
    static constexpr unsigned Q_FULL_OFFSET = 227520;
    static constexpr unsigned Q_EMPTY_OFFSET = 227552;
    static constexpr unsigned VERDICT_OFFSET = 227584;
    static constexpr unsigned LANDING_OFFSET = 188416;
    static constexpr unsigned READY_OFFSET = 227592;
    static constexpr unsigned READ_OFFSET = 227600;
};
struct Tile32 {
    static constexpr unsigned ROWS = 32;
    static constexpr unsigned FRAGMENT = 16;
    static constexpr unsigned LANE_ROWS = 8;
    static constexpr unsigned LANE_ROWS_LOG2 = 3;
    static constexpr unsigned STMATRIX_MATRICES = 4;
    static constexpr unsigned STMATRIX_COUNT = 2;
    static constexpr unsigned RING_SLOTS = 10;
    static constexpr unsigned MAX_CLUSTER = 4;
    static constexpr unsigned SLOTS_PER_RING = 10;
    static constexpr unsigned Q_CHUNK_BYTES = 4096;
    static constexpr unsigned Q_CHUNK_UNITS = 256;
    static constexpr unsigned Q_BYTES = 16384;
    static constexpr unsigned Q_BUFFERS = 2;
    static constexpr unsigned HELD_TILES = 1;
    static constexpr unsigned BLOCK_FLOATS = 2048;
    static constexpr unsigned PIECE_BLOCKS = 2;
    static constexpr unsigned PIECE_BYTES = 16384;
    static constexpr unsigned RING_OFFSET = 0;
    static constexpr unsigned Q_OFFSET = 163840;
    static constexpr unsigned P_OFFSET = 204800;
    static constexpr unsigned EXCHANGE_OFFSET = 212992;
    static constexpr unsigned WEIGHTS_OFFSET = 215040;
    static constexpr unsigned LAST_OFFSET = 223232;
    static constexpr unsigned FULL_OFFSET = 223248;
    static constexpr unsigned EMPTY_OFFSET = 223328;
    static constexpr unsigned Q_FULL_OFFSET = 223408;
    static constexpr unsigned Q_EMPTY_OFFSET = 223424;
    static constexpr unsigned VERDICT_OFFSET = 223440;
    static constexpr unsigned LANDING_OFFSET = 180224;
    static constexpr unsigned READY_OFFSET = 223448;
    static constexpr unsigned READ_OFFSET = 223456;
};
// Barrier ids
constexpr unsigned TILE_BARRIER = 2;   // + warpgroup
// Matrix descriptors: 128-byte swizzle, 1,024 bytes between groups of 8 rows (K-major) or of 8 keys (MN-major); the leading offset is
// unused. Addresses are in units of 16 bytes and never carry out of their 14 bits.
constexpr unsigned DESCRIPTOR_HIGH = 1u << 30 | 1024 / 16;
constexpr unsigned DESCRIPTOR_LOW = 1u << 16;
constexpr unsigned DESCRIPTOR_UNIT = 16;
constexpr unsigned K_STEP_UNITS = 2;    // 16 elements along a K-major row: 32 bytes
constexpr unsigned V_STEP_UNITS = 128;  // 16 keys down an MN-major chunk: 2,048 bytes
constexpr unsigned CHUNK_UNITS = 512;   // a chunk of 64 keys x 128 bytes
constexpr float LAZY_LIMIT = 8.0f;  // a probability may reach 2^8 before its row's maximum is renewed
constexpr unsigned WINDOW = 1024;  // keys that a query sees at most
constexpr unsigned PAGE_KEYS = 16;
constexpr unsigned PAGES = 4;         // of a key tile, copied one by one
constexpr unsigned PAGE_LOOKUPS = 1;   // entries of the table that a lane of the ring's producer reads at once
constexpr unsigned TABLE_BATCH = PAGE_LOOKUPS * 32;
constexpr unsigned BATCH_STEP = 1;     // batches from one key tile of a ring to the next, at most
constexpr unsigned LINE_ENTRIES = 32;      // of the table in a line of the cache
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

// `count` arrivals at the mbarrier at once; releases this thread's earlier accesses. PTX ISA "mbarrier.arrive".
__device__ __forceinline__ void ptx_mbarrier_arrive_count(unsigned barrier, unsigned count) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
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

// As ptx_tma_load_5d, with a policy of createpolicy for the lines of L2 that the copy passes through. PTX ISA "cp.async.bulk.tensor".
__device__ __forceinline__ void ptx_tma_load_5d_hint(unsigned destination, const fa4_tensor_map* map, unsigned barrier,
                                                     unsigned long long policy, int c0, int c1, int c2, int c3, int c4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, { %4, %5, %6, %7, %8 }], [%2], %3;" ::"r"(destination),
        "l"(map), "r"(barrier), "l"(policy), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}

// What becomes of the L2 lines of a copy: they are the first to go, or take the place that lines of a copy without a policy have.
// PTX ISA "createpolicy".
__device__ __forceinline__ unsigned long long ptx_createpolicy_evict_first() {
    unsigned long long policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ unsigned long long ptx_createpolicy_evict_unchanged() {
    unsigned long long policy;
    asm("createpolicy.fractional.L2::evict_unchanged.b64 %0, 1.0;" : "=l"(policy));
    return policy;
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

// D[64 x 8] = A[64 x 16] . B[16 x 8] (+ D if `accumulate`), bf16 operands described by shared-memory descriptors, float32 D.
// A and B are K-major. Asynchronous: nobody touches `d` before a wait_group. PTX ISA "wgmma.mma_async".
__device__ __forceinline__ void ptx_wgmma_a_k(float (&d)[4], unsigned long long a, unsigned long long b, bool accumulate) {
    asm volatile(
        "{\n\t.reg .pred accumulate;\n\t"
        "setp.ne.b32 accumulate, %6, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3"
        "}, %4, %5, accumulate, 1, 1, 0, 0;\n\t}"
        :
          "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "l"(a), "l"(b), "r"((int)accumulate)
        : "memory");
}

// D[64 x 8] = A[64 x 16] . B[16 x 8] (+ D if `accumulate`), bf16 operands described by shared-memory descriptors, float32 D.
// A is MN-major (stored transposed, as V is), B K-major. Asynchronous: nobody touches `d` before a wait_group. PTX ISA "wgmma.mma_async".
__device__ __forceinline__ void ptx_wgmma_a_mn(float (&d)[4], unsigned long long a, unsigned long long b, bool accumulate) {
    asm volatile(
        "{\n\t.reg .pred accumulate;\n\t"
        "setp.ne.b32 accumulate, %6, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3"
        "}, %4, %5, accumulate, 1, 1, 1, 0;\n\t}"
        :
          "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "l"(a), "l"(b), "r"((int)accumulate)
        : "memory");
}

// D[64 x 16] = A[64 x 16] . B[16 x 16] (+ D if `accumulate`), bf16 operands described by shared-memory descriptors, float32 D.
// A and B are K-major. Asynchronous: nobody touches `d` before a wait_group. PTX ISA "wgmma.mma_async".
__device__ __forceinline__ void ptx_wgmma_a_k(float (&d)[8], unsigned long long a, unsigned long long b, bool accumulate) {
    asm volatile(
        "{\n\t.reg .pred accumulate;\n\t"
        "setp.ne.b32 accumulate, %10, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, "
        "%4, %5, %6, %7"
        "}, %8, %9, accumulate, 1, 1, 0, 0;\n\t}"
        :
          "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
        : "l"(a), "l"(b), "r"((int)accumulate)
        : "memory");
}

// D[64 x 16] = A[64 x 16] . B[16 x 16] (+ D if `accumulate`), bf16 operands described by shared-memory descriptors, float32 D.
// A is MN-major (stored transposed, as V is), B K-major. Asynchronous: nobody touches `d` before a wait_group. PTX ISA "wgmma.mma_async".
__device__ __forceinline__ void ptx_wgmma_a_mn(float (&d)[8], unsigned long long a, unsigned long long b, bool accumulate) {
    asm volatile(
        "{\n\t.reg .pred accumulate;\n\t"
        "setp.ne.b32 accumulate, %10, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, "
        "%4, %5, %6, %7"
        "}, %8, %9, accumulate, 1, 1, 1, 0;\n\t}"
        :
          "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
        : "l"(a), "l"(b), "r"((int)accumulate)
        : "memory");
}

// D[64 x 32] = A[64 x 16] . B[16 x 32] (+ D if `accumulate`), bf16 operands described by shared-memory descriptors, float32 D.
// A and B are K-major. Asynchronous: nobody touches `d` before a wait_group. PTX ISA "wgmma.mma_async".
__device__ __forceinline__ void ptx_wgmma_a_k(float (&d)[16], unsigned long long a, unsigned long long b, bool accumulate) {
    asm volatile(
        "{\n\t.reg .pred accumulate;\n\t"
        "setp.ne.b32 accumulate, %18, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, "
        "%4, %5, %6, %7, "
        "%8, %9, %10, %11, "
        "%12, %13, %14, %15"
        "}, %16, %17, accumulate, 1, 1, 0, 0;\n\t}"
        :
          "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
        : "l"(a), "l"(b), "r"((int)accumulate)
        : "memory");
}

// D[64 x 32] = A[64 x 16] . B[16 x 32] (+ D if `accumulate`), bf16 operands described by shared-memory descriptors, float32 D.
// A is MN-major (stored transposed, as V is), B K-major. Asynchronous: nobody touches `d` before a wait_group. PTX ISA "wgmma.mma_async".
__device__ __forceinline__ void ptx_wgmma_a_mn(float (&d)[16], unsigned long long a, unsigned long long b, bool accumulate) {
    asm volatile(
        "{\n\t.reg .pred accumulate;\n\t"
        "setp.ne.b32 accumulate, %18, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, "
        "%4, %5, %6, %7, "
        "%8, %9, %10, %11, "
        "%12, %13, %14, %15"
        "}, %16, %17, accumulate, 1, 1, 1, 0;\n\t}"
        :
          "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
        : "l"(a), "l"(b), "r"((int)accumulate)
        : "memory");
}

// Orders this warp's register accesses before the next wgmma. PTX ISA "wgmma.fence".
__device__ __forceinline__ void ptx_wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Closes the group of this warp's earlier wgmma. PTX ISA "wgmma.commit_group".
__device__ __forceinline__ void ptx_wgmma_commit_group() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most `pending` of the latest wgmma groups are unfinished. PTX ISA "wgmma.wait_group".
template <int pending>
__device__ __forceinline__ void ptx_wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Stores 2 matrices of 8 x 8 16-bit elements, transposed: lane 8 i + c gives the address of the 16 bytes that receive column c of matrix i.
// `matrix` holds this lane's two elements of each (row lane / 4, columns 2 (lane % 4) and the next). PTX ISA "stmatrix".
__device__ __forceinline__ void ptx_stmatrix_trans(unsigned address, const unsigned (&matrix)[2]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address),
"r"(matrix[0]), "r"(matrix[1])
                 : "memory");
}

// Stores 4 matrices of 8 x 8 16-bit elements, transposed: lane 8 i + c gives the address of the 16 bytes that receive column c of matrix i.
// `matrix` holds this lane's two elements of each (row lane / 4, columns 2 (lane % 4) and the next). PTX ISA "stmatrix".
__device__ __forceinline__ void ptx_stmatrix_trans(unsigned address, const unsigned (&matrix)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
"r"(matrix[0]), "r"(matrix[1]), "r"(matrix[2]), "r"(matrix[3])
                 : "memory");
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

// Fetches a line of global memory as far as the L2 cache. PTX ISA "prefetch".
__device__ __forceinline__ void ptx_prefetch_l2(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Starts the copy of `bytes` contiguous bytes (a multiple of 16, both ends aligned to 16) to shared memory; they count towards `barrier`
// when they land. PTX ISA "cp.async.bulk".
__device__ __forceinline__ void ptx_bulk_load(unsigned destination, const void* source, unsigned bytes, unsigned barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
                 "l"(source), "r"(bytes), "r"(barrier)
                 : "memory");
}

// CTAs of the cluster; 1 in a launch without clusters. PTX ISA "%cluster_nctarank".
__device__ __forceinline__ unsigned ptx_cluster_nctarank() {
    unsigned size;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
}

// The barrier of all threads of the cluster, in two halves. An arrival releases nothing by itself: a fence before it says what.
// PTX ISA "barrier.cluster".
__device__ __forceinline__ void ptx_barrier_cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void ptx_barrier_cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The shared::cluster address of `address`, one of this CTA's own shared memory, in the CTA of that rank. PTX ISA "mapa".
__device__ __forceinline__ unsigned ptx_mapa(unsigned address, unsigned rank) {
    unsigned remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
}

// Starts a store to the shared memory of any CTA of the cluster; its bytes count towards `barrier`, of the same CTA, when they are there.
// Whoever waits for that barrier sees them. PTX ISA "st.async".
__device__ __forceinline__ void ptx_st_async(unsigned address, float value, unsigned barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(address), "f"(value), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void ptx_st_async_v4(unsigned address, float4 value, unsigned barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], { %1, %2, %3, %4 }, [%5];" ::"r"(address),
                 "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier)
                 : "memory");
}

// One arrival at an mbarrier of any CTA of the cluster; releases this thread's earlier accesses to all of them. PTX ISA "mbarrier.arrive".
__device__ __forceinline__ void ptx_mbarrier_arrive_cluster(unsigned barrier) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// As mbarrier_try_wait, and acquires what threads of other CTAs of the cluster have released. PTX ISA "mbarrier.try_wait".
__device__ __forceinline__ bool ptx_mbarrier_try_wait_cluster(unsigned barrier, unsigned parity) {
    unsigned done;
    asm volatile(
        "{\n\t.reg .pred complete;\n\t"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 complete, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, complete;\n\t}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
}

// Orders ordinary accesses to global memory before this fence, of this thread or seen by it, with those of the copy engine after it.
// PTX ISA "fence.proxy".
__device__ __forceinline__ void ptx_fence_proxy_async_global() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
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

// --- the problem and its work items ----------------------------------------------------------------------------------

// A quotient and what is left.
struct Quotient {
    unsigned whole, rest;
};

// A divisor and (2^32 - 1) / by, which the host works out: a division takes some thirty instructions that wait for each other, and a
// launch of a few microseconds begins with them.
struct Divisor {
    unsigned by, inverse;
};

__device__ __forceinline__ Quotient divide(unsigned value, const Divisor& divisor) {
    // value / by exceeds value * inverse / 2^32 by at most value / 2^32: less than 1.
    const unsigned low = __umulhi(value, divisor.inverse);
    const unsigned rest = value - low * divisor.by;
    return rest < divisor.by ? Quotient{low, rest} : Quotient{low + 1, rest - divisor.by};
}

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
    Divisor by_kv_heads, by_q_tiles, by_clusters, by_tiles_per_position, by_partition_tiles;  // clusters: of one query tile
    const int* key_lengths;  // [batch]
    const int* block_table;  // [batch][table_pages]
    unsigned table_pages;
};

__device__ __forceinline__ unsigned cluster_log2(const Problem& p) {
    return 31 - __clz(p.cluster);
}

// Quotients that the host has worked out for a launch.
struct Quotients {
    unsigned tile_positions, q_tiles;
    unsigned kv_heads_inverse, q_tiles_inverse, clusters_inverse, tiles_per_position_inverse, partition_tiles_inverse;
};

__device__ __forceinline__ Problem describe(unsigned batch, unsigned q_len, unsigned keys, unsigned kv_heads, unsigned group,
                                            unsigned partition_tiles, unsigned partitions, unsigned tile_rows,
                                            unsigned cluster, const Quotients& quotients) {
    Problem p{batch, q_len, keys, kv_heads, group, tile_rows};
    p.tile_heads = min(group, tile_rows);
    p.tile_positions = quotients.tile_positions;
    p.tiles_per_position = (group + tile_rows - 1) / tile_rows;
    p.q_tiles = quotients.q_tiles;
    p.partition_tiles = partition_tiles;
    p.partitions = partitions;
    p.cluster = cluster;
    p.items = batch * partitions * p.q_tiles * kv_heads;
    p.by_kv_heads = {kv_heads, quotients.kv_heads_inverse};
    p.by_q_tiles = {p.q_tiles, quotients.q_tiles_inverse};
    p.by_clusters = {partitions >> cluster_log2(p), quotients.clusters_inverse};
    p.by_tiles_per_position = {p.tiles_per_position, quotients.tiles_per_position_inverse};
    p.by_partition_tiles = {partition_tiles, quotients.partition_tiles_inverse};
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
    int all_from;              // keys from it on are in every row's window
    unsigned first_partition;  // the first one that takes part: with keys, or in a cluster with one that has
    unsigned first_page;       // that a row of the tile may see a key of; its key tile may begin with others
    unsigned keys;            // of this sequence
    unsigned first_tile, end_tile;
};

// What is known of an item before the lengths of its sequence have come.
struct Coordinates {
    unsigned batch, kv_head, query_tile, partition, position, head;  // see Item
};

__device__ __forceinline__ Coordinates coordinates_at(const Problem& p, unsigned index) {
    Coordinates place;
    // The KV head runs fastest: clusters side by side read neighbouring memory.
    const Quotient head = divide(index >> cluster_log2(p), p.by_kv_heads);
    const Quotient tile = divide(head.whole, p.by_q_tiles);
    const Quotient part = divide(tile.whole, p.by_clusters);
    place.kv_head = head.rest;
    place.partition = (part.rest << cluster_log2(p)) + (index & (p.cluster - 1));
    place.batch = part.whole;
    place.query_tile = (place.batch * p.q_tiles + tile.rest) * p.kv_heads + place.kv_head;
    const Quotient position = divide(tile.rest, p.by_tiles_per_position);
    place.position = position.whole * p.tile_positions;
    place.head = position.rest * p.tile_rows;
    return place;
}

// What only the device knows of a sequence. Everything else about an item waits for it, so each role reads its first item's early, and the
// producers have its coordinates by then: worked out where the item is used, they would wait for these lengths as well.
struct Lengths {
    int keys;
};

// Of the item at `index`, which may lie past the last one.
__device__ __forceinline__ Lengths lengths_at(const Problem& p, unsigned index, const Coordinates& place) {
    if (index >= p.items) return Lengths{};
    return Lengths{p.key_lengths[place.batch]};
}

__device__ __forceinline__ Item item_at(const Problem& p, const Coordinates& place, const Lengths& lengths) {
    Item item;
    item.batch = place.batch;
    item.kv_head = place.kv_head;
    item.query_tile = place.query_tile;
    item.partition = place.partition;
    item.position = place.position;
    item.head = place.head;
    // A length that the launch has no partitions for would leave a merge waiting for CTAs that do not exist.
    item.keys = min(max(lengths.keys, 0), (int)p.keys);
    // Position i sees keys - q_len + i + 1 keys: the first row of the tile the fewest, the last the most.
    const int before = (int)item.keys - (int)p.q_len;
    item.all_see = max(before + (int)item.position + 1, 0);
    const int seen = max(before + (int)min(item.position + p.tile_positions, p.q_len), 0);
    const unsigned tiles = (seen + BLOCK_KEYS - 1) / BLOCK_KEYS;
    // The first row's window begins first, the last one's last. Partitions that cover all keys lie at the same ones whatever the window: those
    // before it have no work. Fewer of them lie from the window's first tile on. `used` counts from the first one that takes part, of whole
    // clusters.
    item.all_from = max(seen - (int)WINDOW, 0);
    const unsigned first_key = max(before + (int)item.position + 1 - (int)WINDOW, 0);
    item.first_page = first_key / PAGE_KEYS;
    const unsigned start = tiles ? first_key / BLOCK_KEYS : 0;
    const unsigned base = tiles > p.partitions * p.partition_tiles ? start : 0;
    item.first_partition = 0;
    item.used = 1;
    if (p.partitions > 1) {
        item.first_partition = divide(start - base, p.by_partition_tiles).whole & ~(p.cluster - 1);
        item.used = max((int)divide(tiles - base + p.partition_tiles - 1, p.by_partition_tiles).whole - (int)item.first_partition, 1);
    }
    item.split = item.used > 1;
    item.first_tile = max(base + item.partition * p.partition_tiles, start);
    item.end_tile = min(base + item.partition * p.partition_tiles + p.partition_tiles, tiles);
    return item;
}

// Whether the CTA has work: keys, or a part in the merge of its cluster, of whose partitions only the first ones may have keys.
__device__ __forceinline__ bool has_work(const Problem& p, const Item& item) {
    // What counts in a cluster is the first of its partitions.
    const unsigned first = item.split ? item.partition & ~(p.cluster - 1) : item.partition;
    return first - item.first_partition < item.used;
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

// --- split keys ------------------------------------------------------------------------------------------------------

// What the partitions of a query tile hand over in global memory: each its O, normalised, and the log2 of its LSE.
struct Workspace {
    float* o;                     // [query_tile][partition][block][quad of registers][128 threads][4]
    float* lse;                   // [query_tile][partition][32 lanes]
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

// The blocks of O that a warpgroup finishes, and the barrier of the threads that finish the item together.
struct Share {
    bool low, high;  // blocks below KEPT_BLOCKS, and from there on
    unsigned barrier, threads;

    __device__ __forceinline__ bool has(unsigned block) const { return block < KEPT_BLOCKS ? low : high; }
    __device__ __forceinline__ bool any() const { return low || high; }
};

__device__ __forceinline__ Share share_of(const Item& item, unsigned warpgroup) {
    return Share{true, true, TILE_BARRIER, 128};
}

template <class Tile>
__device__ __forceinline__ unsigned q_buffers_of(const Problem& p) {
    return p.cluster > 1 ? 1 : Tile::Q_BUFFERS;  // see LANDING
}

__device__ __forceinline__ void wait_cluster(unsigned mbarrier, unsigned parity) {
    while (!ptx_mbarrier_try_wait_cluster(mbarrier, parity)) {
    }
}

// --- producers -------------------------------------------------------------------------------------------------------

// Whether a launch reads so little, each byte once, that it is faster where its lines of L2 replace each other than where they replace what other
// kernels have written, which has to go to memory first. With more of them it is the other way round, as measured.
__device__ __forceinline__ bool reads_little(const Problem& p) {
    const unsigned long long keys = min(p.keys, WINDOW + p.q_len);
    return p.q_tiles == 1 && keys * p.kv_heads * p.batch <= LITTLE_KEYS;
}

// Which entries of its table a sequence's window needs is only known with its length. While that is on its way, a lane each fetches the lines
// of a table that has no more of them. Not by loads, which an assembler drops where nobody needs what they bring.
__device__ __forceinline__ void touch_table(const Problem& p, const Coordinates& place, unsigned lane) {
    if (p.table_pages <= 32 * LINE_ENTRIES && lane * LINE_ENTRIES < p.table_pages)
        ptx_prefetch_l2(p.block_table + (unsigned long long)place.batch * p.table_pages + lane * LINE_ENTRIES);
}

// Fills one ring, in the order its consumer reads it: K then V of every key tile of its warpgroup, then, in the CTA that merges the
// partitions of a query tile, their O. A warp runs it.
// Waits: `empty` of the slot (attend releases it), `verdict` after a partition (publish gives it).
// Signals: `full` of the slot, by the copy's bytes.
template <class Tile>
__device__ __forceinline__ void load_keys_values(const Problem& p, const fa4_tensor_map* k_map, const fa4_tensor_map* v_map,
                                                 const Workspace& workspace, const unsigned char* smem_bytes, unsigned smem,
                                                 unsigned warpgroup, unsigned lane, Coordinates place, Lengths lengths) {
    const unsigned ring = smem + Tile::RING_OFFSET + warpgroup * Tile::SLOTS_PER_RING * SLOT_BYTES;
    const unsigned full = smem + Tile::FULL_OFFSET + warpgroup * Tile::SLOTS_PER_RING * MBARRIER_BYTES;
    const unsigned empty = smem + Tile::EMPTY_OFFSET + warpgroup * Tile::SLOTS_PER_RING * MBARRIER_BYTES;
    unsigned verdict_parity = 0;
    const unsigned long long policy = reads_little(p) ? ptx_createpolicy_evict_first() : ptx_createpolicy_evict_unchanged();
    Cursor at;
    for (unsigned index = blockIdx.x; index < p.items; index += gridDim.x, place = coordinates_at(p, index), lengths = lengths_at(p, index, place)) {
        const Item item = item_at(p, place, lengths);
        if (!has_work(p, item)) continue;
        const int* table = p.block_table + (unsigned long long)item.batch * p.table_pages;
        // A lane reads an entry of the table, and the warp so many at once, a batch ahead: what one waits for would hold up the copies of a
        // key tile every time. Before the window and past the end there is no page: the box lies outside and brings zeros.
        const auto entry_of = [&](unsigned batch, unsigned lookup) {
            const unsigned entry = batch * TABLE_BATCH + lookup * 32 + lane;
            return entry >= item.first_page && entry * PAGE_KEYS < item.keys ? table[entry] : -1;
        };
        unsigned batch = (item.first_tile + warpgroup) * BLOCK_KEYS / PAGE_KEYS / TABLE_BATCH;
        int entries[PAGE_LOOKUPS], ahead[PAGE_LOOKUPS];
#pragma unroll
        for (unsigned lookup = 0; lookup < PAGE_LOOKUPS; ++lookup) {
            entries[lookup] = entry_of(batch, lookup);
            ahead[lookup] = entry_of(batch + BATCH_STEP, lookup);
        }
        for (unsigned tile = item.first_tile + warpgroup; tile < item.end_tile; tile += WARPGROUPS) {
            const unsigned entry = tile * BLOCK_KEYS / PAGE_KEYS;
            if (entry / TABLE_BATCH != batch) {
                batch += BATCH_STEP;
#pragma unroll
                for (unsigned lookup = 0; lookup < PAGE_LOOKUPS; ++lookup) {
                    entries[lookup] = ahead[lookup];
                    ahead[lookup] = entry_of(batch + BATCH_STEP, lookup);
                }
            }
            int pages[PAGES];
#pragma unroll
            for (unsigned i = 0; i < PAGES; ++i) pages[i] = __shfl_sync(0xffffffff, entries[i / 32], (entry + i) % 32);
#pragma unroll 1
            for (unsigned part = 0; part < 2 * TILE_SLOTS; ++part) {
                // Keys past the end arrive as zeros and count as bytes.
                wait(empty + at.slot * MBARRIER_BYTES, at.parity ^ 1);
                const unsigned landed = full + at.slot * MBARRIER_BYTES;
                // One thread, and every copy written out: a lane for each would have them issued one by one as well, by a loop.
                if (ptx_elect_sync()) {
                    ptx_mbarrier_arrive_expect_tx(landed, SLOT_BYTES);
                    if (part < TILE_SLOTS) {
#pragma unroll
                        for (unsigned i = 0; i < PAGES; ++i)
#pragma unroll
                            for (unsigned chunk = 0; chunk < SLOT_CHUNKS; ++chunk)
                                // The swizzle goes by the shared address, so rows of a chunk may land apart.
                                ptx_tma_load_5d_hint(ring + at.slot * SLOT_BYTES + chunk * (BLOCK_KEYS * 128) + i * (PAGE_KEYS * 128), k_map, landed, policy, 0, 0,
                                                     part * SLOT_CHUNKS + chunk, item.kv_head, pages[i]);
                    } else {
#pragma unroll
                        for (unsigned i = 0; i < PAGES; ++i)
                            ptx_tma_load_5d_hint(ring + at.slot * SLOT_BYTES + i * (SLOT_CHUNKS * PAGE_KEYS * 128), v_map, landed, policy, 0, 0,
                                                 (part - TILE_SLOTS) * SLOT_CHUNKS, item.kv_head, pages[i]);
                    }
                }
                at.advance(Tile::SLOTS_PER_RING);
            }
        }
        const Share share = share_of(item, warpgroup);
        if (!item.split || !share.any() || p.cluster > 1) continue;
        wait(smem + Tile::VERDICT_OFFSET + warpgroup * MBARRIER_BYTES, verdict_parity);
        verdict_parity ^= 1;
        const unsigned merges = reinterpret_cast<const unsigned*>(smem_bytes + Tile::LAST_OFFSET)[1 + warpgroup];
        // Orders every lane's read before the announcements of one of them, after which the consumers may write the next answer.
        __syncwarp();
        if (!merges) continue;
        // The partitions were written by ordinary stores, which the verdict has made visible here; these copies belong to the other proxy.
        ptx_fence_proxy_async_global();
        const float* partial = workspace.o + (unsigned long long)(item.query_tile * p.partitions + item.first_partition) * (O_BLOCKS * Tile::BLOCK_FLOATS);
#pragma unroll 1
        for (unsigned block = 0; block < item.used * O_BLOCKS; block += Tile::PIECE_BLOCKS) {
            if (!share.has(block % O_BLOCKS)) continue;
            wait(empty + at.slot * MBARRIER_BYTES, at.parity ^ 1);
            const unsigned landed = full + at.slot * MBARRIER_BYTES;
            if (ptx_elect_sync()) ptx_mbarrier_arrive_expect_tx(landed, Tile::PIECE_BYTES);
            if (ptx_elect_sync()) ptx_bulk_load(ring + at.slot * SLOT_BYTES, partial + (unsigned long long)block * Tile::BLOCK_FLOATS, Tile::PIECE_BYTES, landed);
            at.advance(Tile::SLOTS_PER_RING);
        }
    }
}

// Loads the query tile of every item, a buffer ahead of the consumers where there are two.
// One thread runs it.
// Waits: `q_empty` of the buffer (attend releases it, every warp once an item). Signals: `q_full`, by the copies' bytes.
template <class Tile>
__device__ __forceinline__ void load_queries(const Problem& p, const fa4_tensor_map* q_map, unsigned smem, Coordinates place, Lengths lengths) {
    // Rows of the box outside the tensor (heads past the group, positions past q_len) arrive as zeros and count as bytes.
    const unsigned bytes = Q_CHUNKS * p.tile_positions * p.tile_heads * 128;
    Cursor at;
    for (unsigned index = blockIdx.x; index < p.items; index += gridDim.x, place = coordinates_at(p, index), lengths = lengths_at(p, index, place)) {
        const Item item = item_at(p, place, lengths);
        if (!has_work(p, item)) continue;
        const unsigned full = smem + Tile::Q_FULL_OFFSET + at.slot * MBARRIER_BYTES;
        wait(smem + Tile::Q_EMPTY_OFFSET + at.slot * MBARRIER_BYTES, at.parity ^ 1);
        ptx_mbarrier_arrive_expect_tx(full, bytes);
#pragma unroll 1
        for (unsigned chunk = 0; chunk < Q_CHUNKS; ++chunk)
            ptx_tma_load_5d(smem + Tile::Q_OFFSET + at.slot * Tile::Q_BYTES + chunk * Tile::Q_CHUNK_BYTES, q_map, full, chunk * 64, item.head, item.position,
                            item.kv_head, item.batch);
        at.advance(q_buffers_of<Tile>(p));
    }
}

// --- rows of a fragment ----------------------------------------------------------------------------------------------

// The fragment rows of a lane, reduced over the 8 lanes that hold the same ones (of other keys): every step keeps half of the rows and
// passes the rest on, so that each lane is left with one row, the same in 8 / LANE_ROWS lanes.
// Lane 4 g + c gets fragment row i = g LANE_ROWS / 8, which is query row 8 (i / 2) + 2 c + i % 2.
template <class Tile, bool MAXIMUM>
__device__ __forceinline__ float reduce_rows(float (&rows)[Tile::LANE_ROWS], unsigned lane) {
#pragma unroll
    for (unsigned step = 0; step < 3; ++step) {
        const unsigned mask = 16 >> step;
        if (step < Tile::LANE_ROWS_LOG2) {
            const unsigned half = Tile::LANE_ROWS >> (step + 1);
            const bool upper = lane & mask;
#pragma unroll
            for (unsigned i = 0; i < half; ++i) {
                const float given = upper ? rows[i] : rows[i + half];
                const float kept = upper ? rows[i + half] : rows[i];
                const float received = __shfl_xor_sync(0xffffffff, given, mask);
                rows[i] = MAXIMUM ? fmaxf(kept, received) : kept + received;
            }
        } else {
            const float received = __shfl_xor_sync(0xffffffff, rows[0], mask);
            rows[0] = MAXIMUM ? fmaxf(rows[0], received) : rows[0] + received;
        }
    }
    return rows[0];
}

// That row.
template <class Tile>
__device__ __forceinline__ unsigned row_of_lane(unsigned lane) {
    const unsigned fragment_row = lane / 4 >> (3 - Tile::LANE_ROWS_LOG2);
    return fragment_row / 2 * 8 + lane % 4 * 2 + fragment_row % 2;
}

// The inverse: what the lanes hold for their row, to every lane that has that row in its fragment.
template <class Tile>
__device__ __forceinline__ float row_value(float mine, unsigned i, unsigned lane) {
    return __shfl_sync(0xffffffff, mine, (lane & 3) + 4 * (i << (3 - Tile::LANE_ROWS_LOG2)));
}

// --- operand tiles ---------------------------------------------------------------------------------------------------

// The low word of the descriptor of the swizzled tile at this shared address; adding 16-byte units moves the tile.
__device__ __forceinline__ unsigned descriptor_low(unsigned address) {
    return DESCRIPTOR_LOW | address / DESCRIPTOR_UNIT;
}

__device__ __forceinline__ unsigned long long descriptor(unsigned low) {
    return (unsigned long long)DESCRIPTOR_HIGH << 32 | low;
}

__device__ __forceinline__ unsigned pack_p(float low, float high) {
    return ptx_cvt_bf16x2(low, high);
}

// Writes a fragment as a [ROWS][64] tile of 16-bit elements, 128-byte swizzle: P for the next MMA, or a 64-column chunk of O.
// stmatrix transposes: matrix 2 j + h is M indices 16 w + 8 h .. + 7 of query rows 8 j .. 8 j + 7; each row of the tile gets 16 bytes.
template <class Tile, unsigned (*pack)(float, float)>
__device__ __forceinline__ void store_fragment(const float (&fragment)[Tile::FRAGMENT], unsigned tile, unsigned warp, unsigned lane) {
    const unsigned matrix = lane / 8 % Tile::STMATRIX_MATRICES;
    const unsigned row = matrix / 2 * 8 + lane % 8;
    const unsigned address = tile + row * 128 + ((warp * 2 + matrix % 2) ^ (lane % 8)) * 16;
#pragma unroll
    for (unsigned store = 0; store < Tile::STMATRIX_COUNT; ++store) {
        unsigned packed[Tile::STMATRIX_MATRICES];
#pragma unroll
        for (unsigned m = 0; m < Tile::STMATRIX_MATRICES; ++m) {
            const unsigned pair = store * 2 * Tile::STMATRIX_MATRICES + m * 2;
            packed[m] = pack(fragment[pair], fragment[pair + 1]);
        }
        ptx_stmatrix_trans(address + store * (Tile::STMATRIX_MATRICES / 2 * 8 * 128), packed);
    }
}

// --- consumer --------------------------------------------------------------------------------------------------------

// Four registers of a fragment: query rows i = 2 quad and 2 quad + 1, each at two M indices.
template <class Tile>
__device__ __forceinline__ float4 quad_of(const float (&fragment)[Tile::FRAGMENT], unsigned quad) {
    return make_float4(fragment[quad * 4], fragment[quad * 4 + 1], fragment[quad * 4 + 2], fragment[quad * 4 + 3]);
}

// Gives a slot of the ring back for the whole warp. mbarrier: its `empty`, at which every thread of the consumer arrives.
__device__ __forceinline__ void release_slot(unsigned mbarrier) {
    ptx_mbarrier_arrive_count(mbarrier, 32);
}

// What a consumer warp knows about its place.
struct Place {
    unsigned warpgroup, warp, lane;  // warp within the warpgroup: its key slice and depth band
    unsigned ring, full, empty;      // shared addresses of the warpgroup's ring
    unsigned p_tiles, verdict;
    float* exchange;
    unsigned char* smem_bytes;
    unsigned smem;
};

// Softmax state of a tile: of one query row a lane (the row of reduce_rows), and of the fragment rows.
template <class Tile>
struct Rows {
    float maximum;               // agreed on last for the row; bit-equal in the four warps
    float offset[Tile::LANE_ROWS];     // -maximum of each fragment row * scale_log2e, 0 while there is no key
    float sum[Tile::LANE_ROWS];        // of this lane's own probabilities
    unsigned exchange_seq;       // never restarts: see exchange
};

// S^T = K . Q^T. Waits: `full` of each K slot (the copies of load_keys_values). Signals: `empty` of each.
template <class Tile>
__device__ __forceinline__ void scores(float (&s)[Tile::FRAGMENT], const Place& at, Cursor& ring, unsigned q_tile) {
    const unsigned q_low = descriptor_low(q_tile);
    unsigned previous = 0;
#pragma unroll
    for (unsigned part = 0; part < TILE_SLOTS; ++part) {
        wait(at.full + ring.slot * MBARRIER_BYTES, ring.parity);
        ptx_wgmma_fence();
        const unsigned k_tile = descriptor_low(at.ring + ring.slot * SLOT_BYTES);
#pragma unroll
        for (unsigned chunk = 0; chunk < SLOT_CHUNKS; ++chunk)
#pragma unroll
            for (unsigned step = 0; step < K_STEPS; ++step)
                ptx_wgmma_a_k(s, descriptor(k_tile + chunk * CHUNK_UNITS + step * K_STEP_UNITS),
                              descriptor(q_low + (part * SLOT_CHUNKS + chunk) * Tile::Q_CHUNK_UNITS + step * K_STEP_UNITS),
                              (part | chunk | step) != 0);
        ptx_wgmma_commit_group();
        if (part > 0) {
            // This slot's group is still running, the previous one's has read its slot.
            ptx_wgmma_wait_group<1>();
            if (at.lane == 0) release_slot(previous);
        }
        previous = at.empty + ring.slot * MBARRIER_BYTES;
        ring.advance(Tile::SLOTS_PER_RING);
    }
    ptx_wgmma_wait_group<0>();
    if (at.lane == 0) release_slot(previous);
}

// A slot of V is [PAGES][SLOT_CHUNKS][PAGE_KEYS rows][128 bytes], as a copy of all chunks of a page leaves it: the 16 keys of an MMA are of one
// page. Those of K lie chunk by chunk, since an MMA takes all its 64 keys in equal steps.
__device__ constexpr unsigned row_of_key(unsigned chunk, unsigned key) {
    return (key / PAGE_KEYS * SLOT_CHUNKS + chunk) * PAGE_KEYS + key % PAGE_KEYS;
}
__device__ constexpr unsigned key_of_row(unsigned row) {
    return row / (SLOT_CHUNKS * PAGE_KEYS) * PAGE_KEYS + row % PAGE_KEYS;
}

// O^T += V^T . P^T. Waits: `full` of each V slot (the copies of load_keys_values). Signals: `empty` of each.
template <class Tile>
__device__ __forceinline__ void accumulate(float (&o)[O_BLOCKS][Tile::FRAGMENT], const Place& at, Cursor& ring, unsigned p_tile, int valid) {
    const unsigned p_low = descriptor_low(p_tile);
    unsigned previous = 0;
#pragma unroll
    for (unsigned part = 0; part < TILE_SLOTS; ++part) {
        wait(at.full + ring.slot * MBARRIER_BYTES, ring.parity);
        if (valid < (int)BLOCK_KEYS) {
            // What lies past the sequence's end may be no number: 0 of its probability would not make it 0.
            uint4* rows = reinterpret_cast<uint4*>(at.smem_bytes + (at.ring - at.smem) + ring.slot * SLOT_BYTES);
            for (unsigned unit = at.warp * 32 + at.lane; unit < SLOT_BYTES / 16; unit += 128)
                if ((int)key_of_row(unit / 8) >= valid) rows[unit] = make_uint4(0, 0, 0, 0);
            ptx_fence_proxy_async();
            // Orders all threads' zeros before the MMAs of each warp.
            ptx_bar_sync(TILE_BARRIER + at.warpgroup, 128);
        }
        ptx_wgmma_fence();
        const unsigned v_tile = descriptor_low(at.ring + ring.slot * SLOT_BYTES);
#pragma unroll
        for (unsigned chunk = 0; chunk < SLOT_CHUNKS; ++chunk)
#pragma unroll
            for (unsigned step = 0; step < K_STEPS; ++step)
                ptx_wgmma_a_mn(o[part * SLOT_CHUNKS + chunk], descriptor(v_tile + row_of_key(chunk, step * 16) * 8),
                               descriptor(p_low + step * K_STEP_UNITS), true);
        ptx_wgmma_commit_group();
        if (part > 0) {
            ptx_wgmma_wait_group<1>();
            if (at.lane == 0) release_slot(previous);
        }
        previous = at.empty + ring.slot * MBARRIER_BYTES;
        ring.advance(Tile::SLOTS_PER_RING);
    }
    ptx_wgmma_wait_group<0>();
    if (at.lane == 0) release_slot(previous);
}

// Scores of keys that a row does not see become -inf: keys past the end, and for each position those after its own.
template <class Tile>
__device__ __forceinline__ void mask_scores(float (&s)[Tile::FRAGMENT], const Problem& p, const Item& item, const Place& at, unsigned tile) {
    const int key = (int)(tile * BLOCK_KEYS + at.warp * 16 + at.lane / 4);
#pragma unroll
    for (unsigned i = 0; i < Tile::LANE_ROWS; ++i) {
        const unsigned row = i / 2 * 8 + at.lane % 4 * 2 + i % 2;
        // Padding rows lie past the last position; the bound keeps them within the keys as well.
        const int seen = min((int)item.keys - (int)p.q_len + (int)(item.position + row / p.tile_heads) + 1, (int)item.keys);
#pragma unroll
        for (unsigned h = 0; h < 2; ++h)
            if (key + (int)(8 * h) >= seen || key + (int)(8 * h) < seen - (int)WINDOW) s[i / 2 * 4 + h * 2 + i % 2] = MINUS_INFINITY;
    }
}

// Agrees on the rows' maxima within the warpgroup, and brings sums and O to a new maximum's scale where one grew.
template <class Tile>
__device__ __forceinline__ void agree_on_maxima(const float (&s)[Tile::FRAGMENT], float (&o)[O_BLOCKS][Tile::FRAGMENT], Rows<Tile>& rows, const Place& at,
                                                float scale_log2e) {
    float seen[Tile::LANE_ROWS];
#pragma unroll
    for (unsigned i = 0; i < Tile::LANE_ROWS; ++i) seen[i] = fmaxf(s[i / 2 * 4 + i % 2], s[i / 2 * 4 + 2 + i % 2]);
    const float mine = fmaxf(rows.maximum, reduce_rows<Tile, true>(seen, at.lane));
    const float maximum = fa4_ws_exchange4_max(mine, at.lane, at.warp, at.warpgroup, rows.exchange_seq++, at.exchange);

    // The maxima are bit-equal in the four warps, so the vote is the same in each: the branch is the warpgroup's.
    if (__any_sync(0xffffffff, maximum > rows.maximum)) {
        // A row without a key so far has maximum -inf; offset 0 keeps its probabilities at 2^-inf = 0 instead of 2^(inf - inf).
        const float offset = maximum == MINUS_INFINITY ? 0.0f : -maximum * scale_log2e;
        const float factor = ptx_ex2_approx_ftz(__fmaf_rn(rows.maximum, scale_log2e, offset));
        rows.maximum = maximum;
#pragma unroll
        for (unsigned i = 0; i < Tile::LANE_ROWS; ++i) {
            rows.offset[i] = row_value<Tile>(offset, i, at.lane);
            const float row_factor = row_value<Tile>(factor, i, at.lane);
            rows.sum[i] *= row_factor;
#pragma unroll
            for (unsigned block = 0; block < O_BLOCKS; ++block) {
                o[block][i / 2 * 4 + i % 2] *= row_factor;
                o[block][i / 2 * 4 + 2 + i % 2] *= row_factor;
            }
        }
    }
}

// The exponent of a score's probability, against its row's maximum.
__device__ __forceinline__ float exponent(float score, float offset, float scale_log2e) {
    return __fmaf_rn(score, scale_log2e, offset);
}

// Turns scores into probabilities, against the maxima agreed on last: exact as long as no exponent passes LAZY_LIMIT, since the reference
// of a softmax cancels. The barrier that hands P over is also the vote on that, so that a tile without growth has no exchange.
// first: the warpgroup's first key tile of the item. It settles the maxima of all rows: a row that sees no key of it sees none at all.
template <class Tile>
__device__ __forceinline__ void softmax(float (&s)[Tile::FRAGMENT], float (&o)[O_BLOCKS][Tile::FRAGMENT], Rows<Tile>& rows, const Place& at,
                                        unsigned p_tile, bool first, float scale_log2e) {
    if (!first) {
        float probability[Tile::FRAGMENT];
        float top = MINUS_INFINITY;
#pragma unroll
        for (unsigned r = 0; r < Tile::FRAGMENT; ++r) {
            const float x = exponent(s[r], rows.offset[r / 4 * 2 + r % 2], scale_log2e);
            top = fmaxf(top, x);
            probability[r] = ptx_ex2_approx_ftz(x);
        }
        store_fragment<Tile, pack_p>(probability, p_tile, at.warp, at.lane);
        ptx_fence_proxy_async();
        // Orders the four warps' parts of P before the MMAs that read them; the vote is the same in every thread.
        if (!ptx_bar_red_or(TILE_BARRIER + at.warpgroup, 128, top > LAZY_LIMIT)) {
#pragma unroll
            for (unsigned r = 0; r < Tile::FRAGMENT; ++r) rows.sum[r / 4 * 2 + r % 2] += probability[r];
            return;
        }
    }
    agree_on_maxima(s, o, rows, at, scale_log2e);
#pragma unroll
    for (unsigned r = 0; r < Tile::FRAGMENT; ++r) {
        s[r] = ptx_ex2_approx_ftz(exponent(s[r], rows.offset[r / 4 * 2 + r % 2], scale_log2e));
        rows.sum[r / 4 * 2 + r % 2] += s[r];
    }
    store_fragment<Tile, pack_p>(s, p_tile, at.warp, at.lane);
    ptx_fence_proxy_async();
    // Orders the four warps' parts of P before the MMAs that read them.
    ptx_bar_sync(TILE_BARRIER + at.warpgroup, 128);
}

__device__ __forceinline__ unsigned pack_out(float low, float high) {
    return ptx_cvt_bf16x2(low, high);
}

// Writes this partition's O and LSE to the workspace. True in the CTA that is the last of the query tile to do so: it merges all of them.
// Signals: `verdict`, to the ring's producer.
template <class Tile>
__device__ __forceinline__ bool publish(const float (&o)[O_BLOCKS][Tile::FRAGMENT], float log2_lse, const Problem& p, const Item& item,
                                        const Place& at, const Share& share, const Workspace& workspace) {
    const unsigned slot = item.query_tile * p.partitions + item.partition;
    float4* partial = reinterpret_cast<float4*>(workspace.o + (unsigned long long)slot * (O_BLOCKS * Tile::BLOCK_FLOATS));
    partial += at.warp * 32 + at.lane;
#pragma unroll
    for (unsigned block = 0; block < O_BLOCKS; ++block)
        if (share.has(block))
#pragma unroll
            for (unsigned quad = 0; quad < Tile::FRAGMENT / 4; ++quad)
                partial[(block * (Tile::FRAGMENT / 4) + quad) * 128] = quad_of<Tile>(o[block], quad);
    if (at.warpgroup == 0 && at.warp == 0) workspace.lse[slot * 32 + at.lane] = log2_lse;
    // The merging CTA's copy engine reads what these ordinary stores write.
    ptx_fence_proxy_async_global();
    unsigned* last = reinterpret_cast<unsigned*>(at.smem_bytes + Tile::LAST_OFFSET);
    // Orders every thread's part of the partition before the arrival, which releases them all.
    ptx_bar_sync(share.barrier, share.threads);
    if (at.warpgroup == 0 && at.warp == 0 && ptx_elect_sync())
        last[0] = arrive_last(workspace.arrived + item.query_tile, workspace.launch, item.used);
    // Orders the answer, and with it the other partitions, before every thread's reads.
    ptx_bar_sync(share.barrier, share.threads);
    const unsigned answer = last[0];
    if (at.warp == 0 && ptx_elect_sync()) {
        last[1 + at.warpgroup] = answer;
        ptx_mbarrier_arrive(at.verdict);
    }
    return answer != 0;
}

// O of all partitions of a query tile, in the order of the keys whichever CTA does it; returns the log2 of the LSE.
// Waits: `full` of each slot (the pieces that load_keys_values copies). Signals: `empty` of each.
template <class Tile>
__device__ __forceinline__ float merge_partitions(float (&o)[O_BLOCKS][Tile::FRAGMENT], const Problem& p, const Item& item, const Place& at,
                                                  Cursor& ring, const Share& share, const Workspace& workspace) {
    float4* all = reinterpret_cast<float4*>(at.smem_bytes + Tile::WEIGHTS_OFFSET);
    const float4* from = reinterpret_cast<const float4*>(workspace.lse + (item.query_tile * p.partitions + item.first_partition) * 32);
    const unsigned thread = at.warp * 32 + at.lane;
#pragma unroll 1
    for (unsigned i = thread; i < item.used * 8; i += share.threads) all[i] = from[i];
    // Orders the LSEs' stores to shared memory before their reads.
    ptx_bar_sync(share.barrier, share.threads);
    const float* lse = reinterpret_cast<const float*>(all) + at.lane;
    float top = MINUS_INFINITY;
#pragma unroll 1
    for (unsigned i = 0; i < item.used; ++i) top = fmaxf(top, lse[i * 32]);
    const float reference = top == MINUS_INFINITY ? 0.0f : -top;
    float sum = 0.0f;
#pragma unroll 1
    for (unsigned i = 0; i < item.used; ++i) sum += ptx_ex2_approx_ftz(lse[i * 32] + reference);
    const float inverse = sum > 0.0f ? ptx_rcp_approx_ftz(sum) : 0.0f;
#pragma unroll
    for (unsigned block = 0; block < O_BLOCKS; ++block)
#pragma unroll
        for (unsigned r = 0; r < Tile::FRAGMENT; ++r) o[block][r] = 0.0f;
#pragma unroll 1
    for (unsigned i = 0; i < item.used; ++i) {
        const float mine = ptx_ex2_approx_ftz(lse[i * 32] + reference) * inverse;
        float weight[Tile::LANE_ROWS];
#pragma unroll
        for (unsigned row = 0; row < Tile::LANE_ROWS; ++row) weight[row] = row_value<Tile>(mine, row, at.lane);
#pragma unroll
        for (unsigned piece = 0; piece < O_BLOCKS; piece += Tile::PIECE_BLOCKS)
            if (share.has(piece)) {
                wait(at.full + ring.slot * MBARRIER_BYTES, ring.parity);
                const unsigned offset = at.ring - at.smem + ring.slot * SLOT_BYTES;
                const float4* parts = reinterpret_cast<const float4*>(at.smem_bytes + offset) + at.warp * 32 + at.lane;
#pragma unroll
                for (unsigned block = 0; block < Tile::PIECE_BLOCKS; ++block)
#pragma unroll
                    for (unsigned quad = 0; quad < Tile::FRAGMENT / 4; ++quad) {
                        const float4 part = parts[(block * (Tile::FRAGMENT / 4) + quad) * 128];
                        float* own = &o[piece + block][quad * 4];
                        own[0] = __fmaf_rn(weight[quad * 2], part.x, own[0]);
                        own[1] = __fmaf_rn(weight[quad * 2 + 1], part.y, own[1]);
                        own[2] = __fmaf_rn(weight[quad * 2], part.z, own[2]);
                        own[3] = __fmaf_rn(weight[quad * 2 + 1], part.w, own[3]);
                    }
                // These were ordinary reads; the copy that refills the slot belongs to the other proxy and could overtake them. Each
                // thread gives its own back: one that did so for the warp would be as right, but racecheck does not follow that.
                ptx_fence_proxy_async();
                ptx_mbarrier_arrive(at.empty + ring.slot * MBARRIER_BYTES);
                ring.advance(Tile::SLOTS_PER_RING);
            }
    }
    return top + ptx_lg2_approx_ftz(sum);
}

// log2 of the LSE of several parts, and what makes the O of one a summand of the whole.
struct Weights {
    float top, inverse, log2_lse;

    __device__ __forceinline__ float of(float log2_part) const { return ptx_ex2_approx_ftz(log2_part + top) * inverse; }
};

// log2_parts: [parts][32 lanes], of this lane; parts is a multiple of STEP. Here and in the other merges loops stay loops: written out
// they made entries longer than the 64 KiB of code that a launch does not wait for.
constexpr unsigned STEP = 4;
__device__ __forceinline__ Weights weigh(unsigned parts, const float* log2_parts) {
    float top = MINUS_INFINITY;
#pragma unroll 1
    for (unsigned i = 0; i < parts; i += STEP)
#pragma unroll
        for (unsigned j = 0; j < STEP; ++j) top = fmaxf(top, log2_parts[(i + j) * 32]);
    // No key in any of them: all weights are 2^-inf = 0.
    const float reference = top == MINUS_INFINITY ? 0.0f : -top;
    float sum = 0.0f;
#pragma unroll 1
    for (unsigned i = 0; i < parts; i += STEP)
#pragma unroll
        for (unsigned j = 0; j < STEP; ++j) sum += ptx_ex2_approx_ftz(log2_parts[(i + j) * 32] + reference);
    return Weights{reference, sum > 0.0f ? ptx_rcp_approx_ftz(sum) : 0.0f, top + ptx_lg2_approx_ftz(sum)};
}

template <class Tile>
__device__ __forceinline__ void add_weighted(float (&o)[Tile::FRAGMENT], unsigned quad, const float (&weight)[Tile::LANE_ROWS], const float4& part) {
    float* own = &o[quad * 4];
    own[0] = __fmaf_rn(weight[quad * 2], part.x, own[0]);
    own[1] = __fmaf_rn(weight[quad * 2 + 1], part.y, own[1]);
    own[2] = __fmaf_rn(weight[quad * 2], part.z, own[2]);
    own[3] = __fmaf_rn(weight[quad * 2 + 1], part.w, own[3]);
}

// The first half of the merge in a cluster: its CTAs hold a partition each; afterwards each holds, in o[0 ..], O of all of them in a slice of
// O_BLOCKS / CLUSTER blocks, the rank-th. Returns the log2 of their LSE. Every CTA sends the others their slices as they lie in the
// accumulators, into memory kept for that: nobody has to have reached this point, or to be asked.
// Waits: `ready` (the slices and LSEs of all others have landed). Signals: `ready` of every other CTA, by the stores' bytes.
template <class Tile, unsigned CLUSTER>
__device__ __forceinline__ float merge_cluster(float (&o)[O_BLOCKS][Tile::FRAGMENT], float log2_lse, unsigned rank, const Place& at,
                                               unsigned parity) {
    constexpr unsigned QUADS = Tile::FRAGMENT / 4;
    constexpr unsigned SLICE = O_BLOCKS / CLUSTER;
    constexpr unsigned SLICE_QUADS = SLICE * QUADS;
    constexpr unsigned SLICE_BYTES = SLICE_QUADS * 128 * 16;
    const unsigned thread = at.warp * 32 + at.lane;
    const unsigned ready = at.smem + Tile::READY_OFFSET;
    if (thread == 0) ptx_mbarrier_arrive_expect_tx(ready, (CLUSTER - 1) * (SLICE_BYTES + 32 * 4));
    // In a CTA, slices and LSEs of the others lie in the order of their ranks.
#pragma unroll
    for (unsigned r = 0; r < CLUSTER; ++r)
        if (r != rank) {
            const unsigned place = rank - (rank > r);
            const unsigned slice = ptx_mapa(at.smem + Tile::LANDING_OFFSET, r) + place * SLICE_BYTES + thread * 16;
            const unsigned landed = ptx_mapa(ready, r);
#pragma unroll
            for (unsigned quad = 0; quad < SLICE_QUADS; ++quad)
                ptx_st_async_v4(slice + quad * (128 * 16), quad_of<Tile>(o[r * SLICE + quad / QUADS], quad % QUADS), landed);
            if (at.warp == 0) ptx_st_async(ptx_mapa(at.smem + Tile::WEIGHTS_OFFSET, r) + (place * 32 + at.lane) * 4, log2_lse, landed);
        }
    wait_cluster(ready, parity);

    const float* lses = reinterpret_cast<const float*>(at.smem_bytes + Tile::WEIGHTS_OFFSET) + at.lane;
    const float4* slices = reinterpret_cast<const float4*>(at.smem_bytes + Tile::LANDING_OFFSET) + thread;
    float log2_parts[CLUSTER];
#pragma unroll
    for (unsigned r = 0; r < CLUSTER; ++r) log2_parts[r] = r == rank ? log2_lse : lses[(r - (r > rank)) * 32];
    float top = log2_parts[0];
#pragma unroll
    for (unsigned r = 1; r < CLUSTER; ++r) top = fmaxf(top, log2_parts[r]);
    const float reference = top == MINUS_INFINITY ? 0.0f : -top;
    float sum = 0.0f;
#pragma unroll
    for (unsigned r = 0; r < CLUSTER; ++r) sum += ptx_ex2_approx_ftz(log2_parts[r] + reference);
    const float inverse = sum > 0.0f ? ptx_rcp_approx_ftz(sum) : 0.0f;

    // The own slice first: what is there has been sent.
#pragma unroll
    for (unsigned r = 1; r < CLUSTER; ++r)
        if (r == rank)
#pragma unroll
            for (unsigned block = 0; block < SLICE; ++block)
#pragma unroll
                for (unsigned i = 0; i < Tile::FRAGMENT; ++i) o[block][i] = o[r * SLICE + block][i];
    float merged[SLICE][Tile::FRAGMENT];
#pragma unroll
    for (unsigned block = 0; block < SLICE; ++block)
#pragma unroll
        for (unsigned i = 0; i < Tile::FRAGMENT; ++i) merged[block][i] = 0.0f;
    // In the order of the partitions, so of the keys. A loop, unless all the own slice's registers would be held through it.
#pragma unroll (SLICE_QUADS > MERGE_READS ? CLUSTER : 1)
    for (unsigned r = 0; r < CLUSTER; ++r) {
        const unsigned place = r - (r > rank);
        const float mine = ptx_ex2_approx_ftz((r == rank ? log2_lse : lses[place * 32]) + reference) * inverse;
        float weight[Tile::LANE_ROWS];
#pragma unroll
        for (unsigned row = 0; row < Tile::LANE_ROWS; ++row) weight[row] = row_value<Tile>(mine, row, at.lane);
#pragma unroll
        for (unsigned quad = 0; quad < SLICE_QUADS; ++quad)
            add_weighted<Tile>(merged[quad / QUADS], quad % QUADS, weight,
                               r == rank ? quad_of<Tile>(o[quad / QUADS], quad % QUADS) : slices[(place * SLICE_QUADS + quad) * 128]);
    }
#pragma unroll
    for (unsigned block = 0; block < SLICE; ++block)
#pragma unroll
        for (unsigned r = 0; r < Tile::FRAGMENT; ++r) o[block][r] = merged[block][r];
    return top + ptx_lg2_approx_ftz(sum);
}

// The second half, where a query tile has several clusters: each CTA hands over its slice in global memory, and the last one of that slice
// merges them. Returns whether this is the last one.
template <class Tile, unsigned CLUSTER>
__device__ __forceinline__ bool merge_clusters(float (&o)[O_BLOCKS][Tile::FRAGMENT], float& log2_lse, const Problem& p, const Item& item,
                                               unsigned rank, const Place& at, const Workspace& workspace) {
    constexpr unsigned QUADS = Tile::FRAGMENT / 4;
    constexpr unsigned SLICE = O_BLOCKS / CLUSTER;
    constexpr unsigned SLICE_QUADS = SLICE * QUADS;
    constexpr unsigned AHEAD = SLICE_QUADS < MERGE_READS ? MERGE_READS / SLICE_QUADS : 1;  // clusters read together, a power of two
    const unsigned thread = at.warp * 32 + at.lane;
    const unsigned groups = p.partitions / CLUSTER;
    const unsigned used = (item.used + CLUSTER - 1) / CLUSTER;
    const unsigned first = item.query_tile * groups + item.first_partition / CLUSTER;
    float4* partial = reinterpret_cast<float4*>(workspace.o + (unsigned long long)first * (O_BLOCKS * Tile::BLOCK_FLOATS));
    partial += rank * SLICE_QUADS * 128 + thread;
    float4* mine = partial + (item.partition - item.first_partition) / CLUSTER * (O_BLOCKS * QUADS * 128);
#pragma unroll
    for (unsigned quad = 0; quad < SLICE_QUADS; ++quad) mine[quad * 128] = quad_of<Tile>(o[quad / QUADS], quad % QUADS);
    // Every rank writes the LSE, next to that of the same rank in the other clusters: an arrival releases what its own CTA wrote.
    float* lse = workspace.lse + (item.query_tile * p.partitions + rank * groups) * 32;
    if (at.warp == 0) lse[(item.partition - item.first_partition) / CLUSTER * 32 + at.lane] = log2_lse;
    unsigned* last = reinterpret_cast<unsigned*>(at.smem_bytes + Tile::LAST_OFFSET);
    // Orders every thread's part of the slice before the arrival, which releases them all.
    ptx_bar_sync(TILE_BARRIER, 128);
    if (at.warp == 0 && ptx_elect_sync()) last[0] = arrive_last(workspace.arrived + item.query_tile * CLUSTER + rank, workspace.launch, used);
    // Orders the answer, and with it the other clusters' slices, before every thread's reads.
    ptx_bar_sync(TILE_BARRIER, 128);
    if (!last[0]) return false;

    float4 part[AHEAD][SLICE_QUADS];
    const auto read = [&](unsigned from) {
#pragma unroll
        for (unsigned i = 0; i < AHEAD; ++i)
#pragma unroll
            for (unsigned quad = 0; quad < SLICE_QUADS; ++quad)
                part[i][quad] = partial[(min(from + i, used - 1) * (O_BLOCKS * QUADS) + quad) * 128];
    };
    // The first slices travel while the LSEs do.
    read(0);
    float4* all = reinterpret_cast<float4*>(at.smem_bytes + Tile::WEIGHTS_OFFSET) + CLUSTER * 8;  // after the cluster's own
    // Clusters are worked on several at a time: those past the last one weigh nothing.
    const unsigned whole = (used + (AHEAD > STEP ? AHEAD : STEP) - 1) & ~((AHEAD > STEP ? AHEAD : STEP) - 1);
    const float4 nothing = make_float4(MINUS_INFINITY, MINUS_INFINITY, MINUS_INFINITY, MINUS_INFINITY);
#pragma unroll 1
    for (unsigned i = thread; i < whole * 8; i += 128) all[i] = i < used * 8 ? reinterpret_cast<const float4*>(lse)[i] : nothing;
    // Orders the LSEs' stores to shared memory before their reads.
    ptx_bar_sync(TILE_BARRIER, 128);
    const float* staged = reinterpret_cast<const float*>(all) + at.lane;
    const Weights weights = weigh(whole, staged);
#pragma unroll
    for (unsigned block = 0; block < SLICE; ++block)
#pragma unroll
        for (unsigned r = 0; r < Tile::FRAGMENT; ++r) o[block][r] = 0.0f;
#pragma unroll 1
    for (unsigned from = 0;;) {
#pragma unroll
        for (unsigned i = 0; i < AHEAD; ++i) {
            const float own = weights.of(staged[(from + i) * 32]);
            float weight[Tile::LANE_ROWS];
#pragma unroll
            for (unsigned row = 0; row < Tile::LANE_ROWS; ++row) weight[row] = row_value<Tile>(own, row, at.lane);
#pragma unroll
            for (unsigned quad = 0; quad < SLICE_QUADS; ++quad) add_weighted<Tile>(o[quad / QUADS], quad % QUADS, weight, part[i][quad]);
        }
        from += AHEAD;
        if (from >= used) break;
        read(from);
    }
    log2_lse = weights.log2_lse;
    return true;
}

// Both halves. Returns whether this CTA holds its slice of the whole; if not, the last CTA of the slice does.
template <class Tile, unsigned CLUSTER>
__device__ __forceinline__ bool merge_in_cluster(float (&o)[O_BLOCKS][Tile::FRAGMENT], float& log2_lse, const Problem& p, const Item& item,
                                                 unsigned rank, const Place& at, const Workspace& workspace, unsigned parity) {
    log2_lse = merge_cluster<Tile, CLUSTER>(o, log2_lse, rank, at, parity);
    return item.used <= CLUSTER || merge_clusters<Tile, CLUSTER>(o, log2_lse, p, item, rank, at, workspace);
}

// Ends the merge in a cluster, in two halves: this CTA has read what the others sent; all have, and each may send of its next item.
// Waits: `read` (every CTA has read). Signals: `read` of every CTA. Before the first half every thread has passed a barrier: the arrivals
// release all of their reads.
template <class Tile>
__device__ __forceinline__ void announce_read(const Problem& p, const Place& at) {
    const unsigned thread = at.warp * 32 + at.lane;
    if (thread < p.cluster) ptx_mbarrier_arrive_cluster(ptx_mapa(at.smem + Tile::READ_OFFSET, thread));
}

template <class Tile>
__device__ __forceinline__ void take_back(const Place& at, unsigned parity) {
    wait_cluster(at.smem + Tile::READ_OFFSET, parity);
}

// What O of the lane's row is multiplied by. A row without a key has sum 0 and O 0. Padding rows become 0, so that the staged tile leaves
// zeros there for the next Q.
template <class Tile>
__device__ __forceinline__ float inverse_of(float sum, const Problem& p, unsigned lane) {
    const bool padding = row_of_lane<Tile>(lane) >= p.tile_heads * p.tile_positions;
    return sum > 0.0f && !padding ? ptx_rcp_approx_ftz(sum) : 0.0f;
}

// m scale log2(e) + log2(l); without a key both terms are -inf.
__device__ __forceinline__ float log2_lse_of(float maximum, float sum, float scale_log2e) {
    return __fmaf_rn(maximum, scale_log2e, ptx_lg2_approx_ftz(sum));
}

// Normalisation, the merge of the partitions, O and LSE of an item.
// inverse, log2_lse: of the lane's row in this partition. cluster_merges: this CTA's so far.
// held: O stays in shared memory, for store_held.
// O is staged where Q was: all of this item's Q . K have been waited for.
template <class Tile>
__device__ __forceinline__ void finish(float (&o)[O_BLOCKS][Tile::FRAGMENT], float inverse, float log2_lse, const Problem& p, const Item& item, const Place& at,
                                       Cursor& ring, const fa4_tensor_map* out_map, float* lse, const Workspace& workspace,
                                       unsigned out_tile, unsigned& cluster_merges, bool held) {
    const Share share = share_of(item, at.warpgroup);

#pragma unroll
    for (unsigned i = 0; i < Tile::LANE_ROWS; ++i) {
        const float row_inverse = row_value<Tile>(inverse, i, at.lane);
#pragma unroll
        for (unsigned block = 0; block < O_BLOCKS; ++block) {
            o[block][i / 2 * 4 + i % 2] *= row_inverse;
            o[block][i / 2 * 4 + 2 + i % 2] *= row_inverse;
        }
    }
    unsigned first_block = 0, blocks = O_BLOCKS;
    bool writes_lse = at.warp == 3 && at.warpgroup == 0;
    const bool in_cluster = item.split && p.cluster > 1;
    const unsigned parity = cluster_merges % 2;
    if (in_cluster) {
        const unsigned rank = item.partition & (p.cluster - 1);
        // The other CTAs have initialised their mbarriers: every thread has arrived in `attention`. Keys of its own a CTA attends to before that.
        if (cluster_merges++ == 0) ptx_barrier_cluster_wait();
        bool ours = true;
        if constexpr (Tile::MAX_CLUSTER == 4) {
            if (p.cluster == 4)
                ours = merge_in_cluster<Tile, 4>(o, log2_lse, p, item, rank, at, workspace, parity);
            else
                ours = merge_in_cluster<Tile, 2>(o, log2_lse, p, item, rank, at, workspace, parity);
        } else if constexpr (Tile::MAX_CLUSTER == 2) {
            ours = merge_in_cluster<Tile, 2>(o, log2_lse, p, item, rank, at, workspace, parity);
        }
        if (!ours) {
            ptx_bar_sync(TILE_BARRIER, 128);
            announce_read<Tile>(p, at);
            take_back<Tile>(at, parity);
            return;
        }
        blocks = O_BLOCKS >> cluster_log2(p);
        first_block = rank * blocks;
        writes_lse = writes_lse && rank == 0;
    } else if (item.split) {
        if (!publish<Tile>(o, log2_lse, p, item, at, share, workspace)) return;
        log2_lse = merge_partitions<Tile>(o, p, item, at, ring, share, workspace);
    }

#pragma unroll
    for (unsigned block = 0; block < O_BLOCKS; ++block)
        if (share.has(block) && block < blocks)
            store_fragment<Tile, pack_out>(o[block], out_tile + (first_block + block) * Tile::Q_CHUNK_BYTES, at.warp, at.lane);
    ptx_fence_proxy_async();
    // Orders the warpgroup's part of the O tile before the copies that read it.
    if (!held) ptx_bar_sync(TILE_BARRIER + at.warpgroup, 128);
    if (!held && ptx_elect_sync()) {
        // A thread of each warp, since a copy takes a thread longer to start than to stage.
#pragma unroll 1
        for (unsigned chunk = first_block * CHUNKS_PER_BLOCK + at.warp; chunk < (first_block + blocks) * CHUNKS_PER_BLOCK; chunk += 4)
            // Rows of the box outside the tensor are dropped.
            if (share.has(chunk / CHUNKS_PER_BLOCK))
                ptx_tma_store_5d(out_map, out_tile + chunk * Tile::Q_CHUNK_BYTES, chunk * OUT_CHUNK_COLS, item.head, item.position,
                                 item.kv_head, item.batch);
        ptx_bulk_commit_group();
    }
    __syncwarp();
    if (in_cluster) announce_read<Tile>(p, at);

    // One lane a row writes the LSE, in natural units.
    const unsigned row = row_of_lane<Tile>(at.lane);
    const bool padding = row >= p.tile_heads * p.tile_positions;
    const unsigned position = item.position + row / p.tile_heads;
    const unsigned head = item.head + row % p.tile_heads;
    const bool first_lane = (at.lane / 4 & ((8 >> Tile::LANE_ROWS_LOG2) - 1)) == 0;
    if (writes_lse && first_lane && !padding && position < p.q_len && head < p.group) {
        const unsigned long long q_head = (unsigned long long)(item.batch * p.kv_heads + item.kv_head) * p.group + head;
        lse[q_head * p.q_len + position] = log2_lse * LN2;
    }
    // The tile is free for reuse when the copies have read it: attend passes that on (q_empty).
    if (!held && ptx_elect_sync()) ptx_bulk_wait_group_read();
    __syncwarp();
    if (in_cluster) take_back<Tile>(at, parity);
}

// Stores the O tiles that wait in Q's buffers, those of the item at `index` and of the `held - 1` before it. A CTA's first tiles wait for its
// last: written between the others' reads they would leave the L2 cache, and every turn of the memory from reading to writing costs.
// last_slot: the buffer of the item at `index`. Signals: `q_empty` of each buffer.
template <class Tile>
__device__ __forceinline__ void store_held(const Problem& p, const Place& at, const fa4_tensor_map* out_map, unsigned held, unsigned index,
                                           unsigned last_slot) {
    // Orders the warpgroup's part of the O tiles before the copies that read them.
    ptx_bar_sync(TILE_BARRIER + at.warpgroup, 128);
    // A lane an item, so that the places of all are worked out at once; a thread of each warp, as in finish.
    if (at.lane < held) {
        const unsigned before = held - 1 - at.lane;
        const unsigned stored = index - before * gridDim.x;
        const Coordinates place = coordinates_at(p, stored);
        const Item item = item_at(p, place, lengths_at(p, stored, place));
        const unsigned slot = (last_slot + Tile::Q_BUFFERS - before) % Tile::Q_BUFFERS;
        const Share share = share_of(item, at.warpgroup);
#pragma unroll 1
        for (unsigned chunk = at.warp; chunk < O_BLOCKS * CHUNKS_PER_BLOCK; chunk += 4)
            // Rows of the box outside the tensor are dropped.
            if (share.has(chunk / CHUNKS_PER_BLOCK))
                ptx_tma_store_5d(out_map, at.smem + Tile::Q_OFFSET + slot * Tile::Q_BYTES + chunk * Tile::Q_CHUNK_BYTES, chunk * OUT_CHUNK_COLS, item.head,
                                 item.position, item.kv_head, item.batch);
        ptx_bulk_commit_group();
        ptx_bulk_wait_group_read();
        ptx_mbarrier_arrive(at.smem + Tile::Q_EMPTY_OFFSET + slot * MBARRIER_BYTES);
    }
    __syncwarp();
}

// Attends: for every item the key tiles of this warpgroup, then O and LSE.
// Waits: `q_full` (load_queries), `full` of the ring's slots (load_keys_values). Signals: `empty` of each slot, `q_empty` once an item.
template <class Tile>
__device__ __forceinline__ void attend(const Problem& p, const fa4_tensor_map* out_map, float* lse, const Workspace& workspace,
                                       unsigned char* smem_bytes, unsigned smem, unsigned warpgroup, unsigned warp, unsigned lane,
                                       float scale_log2e, Lengths lengths) {
    const unsigned first_slot = warpgroup * Tile::SLOTS_PER_RING;
    const Place at{warpgroup,
                   warp,
                   lane,
                   smem + Tile::RING_OFFSET + first_slot * SLOT_BYTES,
                   smem + Tile::FULL_OFFSET + first_slot * MBARRIER_BYTES,
                   smem + Tile::EMPTY_OFFSET + first_slot * MBARRIER_BYTES,
                   smem + Tile::P_OFFSET + warpgroup * P_BUFFERS * Tile::Q_CHUNK_BYTES,
                   smem + Tile::VERDICT_OFFSET + warpgroup * MBARRIER_BYTES,
                   reinterpret_cast<float*>(smem_bytes + Tile::EXCHANGE_OFFSET),
                   smem_bytes,
                   smem};
    // Maxima are taken of raw scores, which needs a positive scale: a negative one flips the scores' sign, and 0 becomes a scale so small
    // that every probability is still 1 (0 itself would make -inf * 0 of a masked score).
    const bool flip = scale_log2e < 0.0f;
    scale_log2e = fmaxf(fabsf(scale_log2e), 1e-30f);

    Cursor ring, q;
    Rows<Tile> rows;
    rows.exchange_seq = 0;
    float o[O_BLOCKS][Tile::FRAGMENT];
    float s[Tile::FRAGMENT];
    unsigned p_buffer = 0;
    unsigned cluster_merges = 0;
    // A CTA of one item has none to wait for.
    const bool holds = Tile::HELD_TILES > 1 && p.partitions == 1 && p.items > gridDim.x;
    unsigned held = 0;
#pragma unroll 1
    for (unsigned index = blockIdx.x; index < p.items; index += gridDim.x, lengths = lengths_at(p, index, coordinates_at(p, index))) {
        const Item item = item_at(p, coordinates_at(p, index), lengths);
        if (!has_work(p, item)) continue;
        rows.maximum = MINUS_INFINITY;
#pragma unroll
        for (unsigned i = 0; i < Tile::LANE_ROWS; ++i) rows.offset[i] = rows.sum[i] = 0.0f;
#pragma unroll
        for (unsigned block = 0; block < O_BLOCKS; ++block)
#pragma unroll
            for (unsigned r = 0; r < Tile::FRAGMENT; ++r) o[block][r] = 0.0f;

        const unsigned q_tile = smem + Tile::Q_OFFSET + q.slot * Tile::Q_BYTES;
        wait(smem + Tile::Q_FULL_OFFSET + q.slot * MBARRIER_BYTES, q.parity);
        // Without a key.
        float inverse = 0.0f, log2_lse = MINUS_INFINITY;
#pragma unroll 1
        for (unsigned tile = item.first_tile + warpgroup; tile < item.end_tile; tile += WARPGROUPS) {
            scores<Tile>(s, at, ring, q_tile);
            if (flip)
#pragma unroll
                for (unsigned r = 0; r < Tile::FRAGMENT; ++r) s[r] = -s[r];
            if ((int)((tile + 1) * BLOCK_KEYS) > item.all_see || (int)(tile * BLOCK_KEYS) < item.all_from) mask_scores<Tile>(s, p, item, at, tile);
            // Two P tiles: a warp ahead writes one while another's MMAs still read the other; with a barrier a tile none is two ahead.
            const unsigned p_tile = at.p_tiles + p_buffer * Tile::Q_CHUNK_BYTES;
            p_buffer ^= 1;
            softmax(s, o, rows, at, p_tile, tile == item.first_tile + warpgroup || (int)tile < item.all_from / (int)BLOCK_KEYS + (int)WARPGROUPS, scale_log2e);
            if (tile + WARPGROUPS >= item.end_tile) {
                // All probabilities are there, and the last V may still be on its way.
                const float own_sum = reduce_rows<Tile, false>(rows.sum, lane);
                const float sum = fa4_ws_exchange4_add(own_sum, lane, warp, warpgroup, rows.exchange_seq++, at.exchange);
                inverse = inverse_of<Tile>(sum, p, lane);
                log2_lse = log2_lse_of(rows.maximum, sum, scale_log2e);
            }
            accumulate<Tile>(o, at, ring, p_tile, (int)(item.keys - tile * BLOCK_KEYS));
        }
        finish<Tile>(o, inverse, log2_lse, p, item, at, ring, out_map, lse, workspace, q_tile, cluster_merges, holds);
        if (holds) {
            // The buffer that is left has the next Q; those after it need the others.
            const bool needed = ++held == Tile::HELD_TILES - 1 && index + 2 * gridDim.x < p.items;
            if (needed || index + gridDim.x >= p.items) {
                store_held<Tile>(p, at, out_map, held, index, q.slot);
                held = 0;
            }
        } else if (lane == 0) {
            ptx_mbarrier_arrive(smem + Tile::Q_EMPTY_OFFSET + q.slot * MBARRIER_BYTES);
        }
        q.advance(q_buffers_of<Tile>(p));
    }
    if (p.cluster > 1 && cluster_merges == 0) {
        // A thread that has arrived (in `attention`) waits once before it ends; aligned, so with lanes together that may have gone apart above.
        __syncwarp();
        ptx_barrier_cluster_wait();
    }
}

// --- entries ---------------------------------------------------------------------------------------------------------

// q_map, out_map  [batch][kv_heads][q_len][group][DEPTH], box 1 x 1 x positions x heads x 128 bytes, 128-byte swizzle
// k_map, v_map    [batch][kv_heads][DEPTH / 64][keys][64], box 1 x 1 x SLOT_CHUNKS x BLOCK_KEYS x 64, 128-byte swizzle
// lse             [batch][kv_heads * group][q_len] float, natural logarithm
// partition_tiles, partitions: key tiles of a partition, and how many of them cover the keys; with one, the last four are not read
// tile_positions to partition_tiles_inverse: see Quotients
// launch: a number that rises with every launch that uses the workspace, see arrive_last
// partial_o, partial_lse, arrived: see Workspace. It belongs to one launch at a time, so to a stream; `arrived` is 0 at first, and after a launch.
// Grid: any number of CTAs; CTA c takes items c, c + gridDim.x, ... Block: THREADS.
template <class Tile>
__device__ __forceinline__ void attention(const fa4_tensor_map& q_map, const fa4_tensor_map& k_map, const fa4_tensor_map& v_map,
                                          const fa4_tensor_map& out_map, float* lse, unsigned batch, unsigned q_len, unsigned keys,
                                          unsigned kv_heads, unsigned group, float scale, unsigned partition_tiles, unsigned partitions,
                                          const Quotients& quotients, const Workspace& workspace, const int* block_table, unsigned table_pages, const int* key_lengths) {
    extern __shared__ __align__(1024) unsigned char smem_bytes[];
    const unsigned smem = (unsigned)__cvta_generic_to_shared(smem_bytes);
    // The same in all lanes; the shuffle lets the compiler know.
    const unsigned warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    const unsigned lane = threadIdx.x % 32;
    // The consumers have nothing else to do yet; the producers go on to what their first copies wait for.
    if (warp == 0 && ptx_elect_sync()) {
        for (unsigned slot = 0; slot < Tile::RING_SLOTS; ++slot) {
            ptx_mbarrier_init(smem + Tile::FULL_OFFSET + slot * MBARRIER_BYTES, 1);     // the producer; the copy's bytes follow
            ptx_mbarrier_init(smem + Tile::EMPTY_OFFSET + slot * MBARRIER_BYTES, 128);  // the consumer's threads
        }
        ptx_fence_mbarrier_init();
    }
    if (warp == 1 && ptx_elect_sync()) {
        for (unsigned buffer = 0; buffer < Tile::Q_BUFFERS; ++buffer) {
            ptx_mbarrier_init(smem + Tile::Q_FULL_OFFSET + buffer * MBARRIER_BYTES, 1);
            ptx_mbarrier_init(smem + Tile::Q_EMPTY_OFFSET + buffer * MBARRIER_BYTES, 4 * WARPGROUPS);
        }
        for (unsigned producer = 0; producer < WARPGROUPS; ++producer)
            ptx_mbarrier_init(smem + Tile::VERDICT_OFFSET + producer * MBARRIER_BYTES, 1);  // publish
        ptx_mbarrier_init(smem + Tile::READY_OFFSET, 1);                       // merge_cluster; the bytes that the other CTAs send follow
        ptx_mbarrier_init(smem + Tile::READ_OFFSET, ptx_cluster_nctarank());  // announce_read of every CTA
        ptx_fence_mbarrier_init();
    }
    __syncwarp();
    Problem p = describe(batch, q_len, keys, kv_heads, group, partition_tiles, partitions, Tile::ROWS, ptx_cluster_nctarank(), quotients);
    p.block_table = block_table;
    p.table_pages = table_pages;
    p.key_lengths = key_lengths;
    // The cluster's barrier orders the initialisation, which fence_mbarrier_init has released to the cluster, before the other CTAs'
    // arrivals. Without a cluster it would be a barrier of all threads of the CTA: no role may meet it alone.
    if (p.cluster > 1) ptx_barrier_cluster_arrive_relaxed();

    const unsigned producer = warp - WARPGROUPS * 4;
    const Coordinates place = coordinates_at(p, blockIdx.x);
    const Lengths lengths = lengths_at(p, blockIdx.x, place);
    if (warp < WARPGROUPS * 4) {
        // Tile rows that no box covers: zeros, once.
        const unsigned used_rows = p.tile_heads * p.tile_positions;
        if (used_rows < Tile::ROWS) {
            for (unsigned unit = threadIdx.x; unit < q_buffers_of<Tile>(p) * Tile::Q_BYTES / 16; unit += WARPGROUPS * 128)
                if (unit / 8 % Tile::ROWS >= used_rows) reinterpret_cast<uint4*>(smem_bytes + Tile::Q_OFFSET)[unit] = make_uint4(0, 0, 0, 0);
            ptx_fence_proxy_async();
        }
        // Warps that wait for the first keys fetch what the producers are about to need.
        if (warp == 2 && ptx_elect_sync()) {
            ptx_prefetch_tensormap(&k_map);
            ptx_prefetch_tensormap(&v_map);
            ptx_prefetch_tensormap(&q_map);
        }
        if (warp == 3 && blockIdx.x < p.items) touch_table(p, place, lane);
    }
    __syncwarp();
    // Orders the mbarriers' initialisation before all work with them, and the zeros before the consumers'. One instruction for all roles:
    // synccheck takes two for threads that went different ways.
    ptx_bar_sync(0, THREADS);

    if (warp < WARPGROUPS * 4) {
        attend<Tile>(p, &out_map, lse, workspace, smem_bytes, smem, 0, warp % 4, lane, scale * LOG2E, lengths);
    } else {
        if (producer == WARPGROUPS) {
            if (ptx_elect_sync()) load_queries<Tile>(p, &q_map, smem, place, lengths);
        } else if (producer < WARPGROUPS) {
            load_keys_values<Tile>(p, &k_map, &v_map, workspace, smem_bytes, smem, producer, lane, place, lengths);
        }
        __syncwarp();
        // Nothing of theirs needs it, but a thread that has arrived waits once before it ends.
        if (p.cluster > 1) ptx_barrier_cluster_wait();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
fa4_attention_d256_m4r32_sk_bf16_causal_p16_len_win1024_t8_sm90a(
    const __grid_constant__ fa4_tensor_map q_map, const __grid_constant__ fa4_tensor_map k_map, const __grid_constant__ fa4_tensor_map v_map,
    const __grid_constant__ fa4_tensor_map out_map, float* lse, unsigned batch, unsigned q_len, unsigned keys, unsigned kv_heads,
    unsigned group, float scale, unsigned partition_tiles, unsigned partitions, unsigned tile_positions, unsigned q_tiles,
    unsigned kv_heads_inverse, unsigned q_tiles_inverse, unsigned clusters_inverse, unsigned tiles_per_position_inverse,
    unsigned partition_tiles_inverse, unsigned launch, float* partial_o, float* partial_lse,
    unsigned long long* arrived, const int* block_table, unsigned table_pages, const int* key_lengths) {
    attention<Tile8>(q_map, k_map, v_map, out_map, lse, batch, q_len, keys, kv_heads, group, scale, partition_tiles, partitions,
                    Quotients{tile_positions, q_tiles, kv_heads_inverse, q_tiles_inverse, clusters_inverse, tiles_per_position_inverse, partition_tiles_inverse},
                    Workspace{partial_o, partial_lse, arrived, launch}, block_table, table_pages, key_lengths);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
fa4_attention_d256_m4r32_sk_bf16_causal_p16_len_win1024_t8_c2_sm90a(
    const __grid_constant__ fa4_tensor_map q_map, const __grid_constant__ fa4_tensor_map k_map, const __grid_constant__ fa4_tensor_map v_map,
    const __grid_constant__ fa4_tensor_map out_map, float* lse, unsigned batch, unsigned q_len, unsigned keys, unsigned kv_heads,
    unsigned group, float scale, unsigned partition_tiles, unsigned partitions, unsigned tile_positions, unsigned q_tiles,
    unsigned kv_heads_inverse, unsigned q_tiles_inverse, unsigned clusters_inverse, unsigned tiles_per_position_inverse,
    unsigned partition_tiles_inverse, unsigned launch, float* partial_o, float* partial_lse,
    unsigned long long* arrived, const int* block_table, unsigned table_pages, const int* key_lengths) {
    attention<Tile8Shared>(q_map, k_map, v_map, out_map, lse, batch, q_len, keys, kv_heads, group, scale, partition_tiles, partitions,
                    Quotients{tile_positions, q_tiles, kv_heads_inverse, q_tiles_inverse, clusters_inverse, tiles_per_position_inverse, partition_tiles_inverse},
                    Workspace{partial_o, partial_lse, arrived, launch}, block_table, table_pages, key_lengths);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
fa4_attention_d256_m4r32_sk_bf16_causal_p16_len_win1024_t16_sm90a(
    const __grid_constant__ fa4_tensor_map q_map, const __grid_constant__ fa4_tensor_map k_map, const __grid_constant__ fa4_tensor_map v_map,
    const __grid_constant__ fa4_tensor_map out_map, float* lse, unsigned batch, unsigned q_len, unsigned keys, unsigned kv_heads,
    unsigned group, float scale, unsigned partition_tiles, unsigned partitions, unsigned tile_positions, unsigned q_tiles,
    unsigned kv_heads_inverse, unsigned q_tiles_inverse, unsigned clusters_inverse, unsigned tiles_per_position_inverse,
    unsigned partition_tiles_inverse, unsigned launch, float* partial_o, float* partial_lse,
    unsigned long long* arrived, const int* block_table, unsigned table_pages, const int* key_lengths) {
    attention<Tile16>(q_map, k_map, v_map, out_map, lse, batch, q_len, keys, kv_heads, group, scale, partition_tiles, partitions,
                    Quotients{tile_positions, q_tiles, kv_heads_inverse, q_tiles_inverse, clusters_inverse, tiles_per_position_inverse, partition_tiles_inverse},
                    Workspace{partial_o, partial_lse, arrived, launch}, block_table, table_pages, key_lengths);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
fa4_attention_d256_m4r32_sk_bf16_causal_p16_len_win1024_t32_sm90a(
    const __grid_constant__ fa4_tensor_map q_map, const __grid_constant__ fa4_tensor_map k_map, const __grid_constant__ fa4_tensor_map v_map,
    const __grid_constant__ fa4_tensor_map out_map, float* lse, unsigned batch, unsigned q_len, unsigned keys, unsigned kv_heads,
    unsigned group, float scale, unsigned partition_tiles, unsigned partitions, unsigned tile_positions, unsigned q_tiles,
    unsigned kv_heads_inverse, unsigned q_tiles_inverse, unsigned clusters_inverse, unsigned tiles_per_position_inverse,
    unsigned partition_tiles_inverse, unsigned launch, float* partial_o, float* partial_lse,
    unsigned long long* arrived, const int* block_table, unsigned table_pages, const int* key_lengths) {
    attention<Tile32>(q_map, k_map, v_map, out_map, lse, batch, q_len, keys, kv_heads, group, scale, partition_tiles, partitions,
                    Quotients{tile_positions, q_tiles, kv_heads_inverse, q_tiles_inverse, clusters_inverse, tiles_per_position_inverse, partition_tiles_inverse},
                    Workspace{partial_o, partial_lse, arrived, launch}, block_table, table_pages, key_lengths);
}
