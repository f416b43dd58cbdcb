// Kernels of `fa4gen bench`: the read ceiling, inputs, the float64 reference, L2 flushes and a delay. Compiled by NVRTC as they are;
// HALF says whether 16-bit operands are float16 (1) or bfloat16 (0), KV8 whether K and V are e4m3 (1) or as Q (0).

typedef unsigned short operand;
#if KV8
typedef unsigned char kv_operand;
#else
typedef unsigned short kv_operand;
#endif

__device__ __forceinline__ double widen(operand bits) {
    float value;
#if HALF
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
#else
    value = __uint_as_float((unsigned)bits << 16);
#endif
    return value;
}

__device__ __forceinline__ operand narrow(float value) {
    operand bits;
#if HALF
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#else
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#endif
    return bits;
}

#if KV8
__device__ __forceinline__ double widen(kv_operand bits) {
    unsigned pair;
    float value;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"((unsigned short)bits));
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((unsigned short)pair));
    return value;
}

__device__ __forceinline__ kv_operand narrow_kv(float value) {
    unsigned short bits;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(0.0f), "f"(value));
    return (kv_operand)bits;
}
#else
__device__ __forceinline__ kv_operand narrow_kv(float value) {
    return narrow(value);
}
#endif

// --- read ceiling ------------------------------------------------------------------------------------------------------------

// Every thread has LOADS 16-byte loads in flight, STEPS times; a block reads one contiguous span, so the grid is the bytes over the span.
template <unsigned LOADS, unsigned STEPS>
__device__ __forceinline__ void read_span(const uint4* data, unsigned* sink) {
    const uint4* at = data + (unsigned long long)blockIdx.x * (LOADS * STEPS * blockDim.x) + threadIdx.x;
    unsigned folded = 0;
#pragma unroll 1
    for (unsigned step = 0; step < STEPS; ++step, at += LOADS * blockDim.x) {
        uint4 loaded[LOADS];
#pragma unroll
        for (unsigned i = 0; i < LOADS; ++i) loaded[i] = at[i * blockDim.x];
#pragma unroll
        for (unsigned i = 0; i < LOADS; ++i) folded ^= loaded[i].x ^ loaded[i].y ^ loaded[i].z ^ loaded[i].w;
    }
    // Never true in practice, but the compiler cannot know: the loads stay.
    if (folded == 0x9e3779b9u) *sink = folded;
}

extern "C" __global__ void __launch_bounds__(256) bench_read_4x2(const uint4* data, unsigned* sink) { read_span<4, 2>(data, sink); }
extern "C" __global__ void __launch_bounds__(256) bench_read_4x4(const uint4* data, unsigned* sink) { read_span<4, 4>(data, sink); }
extern "C" __global__ void __launch_bounds__(256) bench_read_4x16(const uint4* data, unsigned* sink) { read_span<4, 16>(data, sink); }
extern "C" __global__ void __launch_bounds__(256) bench_read_8x8(const uint4* data, unsigned* sink) { read_span<8, 8>(data, sink); }
extern "C" __global__ void __launch_bounds__(256) bench_read_2x4(const uint4* data, unsigned* sink) { read_span<2, 4>(data, sink); }

// --- delay -------------------------------------------------------------------------------------------------------------------

// Keeps the stream busy while the host enqueues what is timed, so that host time never shows. One thread.
extern "C" __global__ void bench_delay(unsigned nanoseconds) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        __nanosleep(500);
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - start < nanoseconds);
}

// --- inputs ------------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ unsigned long long scramble(unsigned long long x) {
    // The finaliser of splitmix64.
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

// Standard normal numbers, a function of (seed, index) alone; two a thread by Box-Muller. count is even.
template <typename Element, Element (*round)(float)>
__device__ __forceinline__ void fill_normal(Element* out, unsigned long long count, unsigned seed) {
    const unsigned long long step = 2ull * gridDim.x * blockDim.x;
    for (unsigned long long at = 2ull * ((unsigned long long)blockIdx.x * blockDim.x + threadIdx.x); at < count; at += step) {
        const unsigned long long bits = scramble(((unsigned long long)seed << 44 ^ at) * 0x9e3779b97f4a7c15ull + 0x632be59bd9b4e019ull);
        const float radius = sqrtf(-2.0f * logf(((unsigned)(bits >> 40) + 1.0f) * 0x1p-24f));
        float sine, cosine;
        sincosf(((unsigned)bits >> 8) * (6.2831853f * 0x1p-24f), &sine, &cosine);
        out[at] = round(radius * cosine);
        out[at + 1] = round(radius * sine);
    }
}

extern "C" __global__ void bench_normal(operand* out, unsigned long long count, unsigned seed) { fill_normal<operand, narrow>(out, count, seed); }
extern "C" __global__ void bench_normal_kv(kv_operand* out, unsigned long long count, unsigned seed) { fill_normal<kv_operand, narrow_kv>(out, count, seed); }

// K or V [batch][keys][units of 16 bytes] in pages [..][page_keys][units]: block (i, b) copies the i-th page of sequence b to table[b][i].
extern "C" __global__ void bench_pages(const uint4* in, uint4* pages, const int* table, unsigned keys, unsigned page_keys, unsigned units) {
    const unsigned first = blockIdx.x * page_keys;
    const unsigned long long count = (unsigned long long)min(page_keys, keys - first) * units;
    const uint4* from = in + ((unsigned long long)blockIdx.y * keys + first) * units;
    uint4* to = pages + (unsigned long long)table[blockIdx.y * gridDim.x + blockIdx.x] * page_keys * units;
    for (unsigned long long i = threadIdx.x; i < count; i += blockDim.x) to[i] = from[i];
}

// --- float64 reference -------------------------------------------------------------------------------------------------------

struct Shape {
    unsigned batch, q_len, heads, kv_heads, keys, depth;
};

// scores [batch][kv_heads][q_len * group][keys] = scale q.k, k times its head's k_scale where KV8; row r is position r / group, head r % group. A warp computes a key's column.
extern "C" __global__ void bench_scores(const operand* q, const kv_operand* k, double* scores, Shape s, double scale, const float* k_scale) {
    const unsigned lane = threadIdx.x % 32, key = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    const unsigned kv_head = blockIdx.y, batch = blockIdx.z, group = s.heads / s.kv_heads, rows = s.q_len * group;
    if (key >= s.keys) return;
#if KV8
    scale *= k_scale[kv_head];
#endif
    double k_row[16];
    const kv_operand* k_at = k + (((unsigned long long)batch * s.keys + key) * s.kv_heads + kv_head) * s.depth;
#pragma unroll
    for (unsigned i = 0; i < 16; ++i) k_row[i] = i * 32 < s.depth ? widen(k_at[i * 32 + lane]) : 0.0;
    for (unsigned row = 0; row < rows; ++row) {
        const operand* q_at = q + (((unsigned long long)batch * s.q_len + row / group) * s.heads + kv_head * group + row % group) * s.depth;
        double sum = 0.0;
#pragma unroll
        for (unsigned i = 0; i < 16; ++i)
            if (i * 32 < s.depth) sum += k_row[i] * widen(q_at[i * 32 + lane]);
        for (unsigned mask = 16; mask; mask /= 2) sum += __shfl_xor_sync(0xffffffff, sum, mask);
        if (lane == 0) scores[(((unsigned long long)batch * s.kv_heads + kv_head) * rows + row) * s.keys + key] = sum * scale;
    }
}

template <typename Operation>
__device__ __forceinline__ double reduce_block(double value, Operation operation, double* shared) {
    for (unsigned mask = 16; mask; mask /= 2) value = operation(value, __shfl_xor_sync(0xffffffff, value, mask));
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
    __syncthreads();
    value = shared[0];
    for (unsigned warp = 1; warp < blockDim.x / 32; ++warp) value = operation(value, shared[warp]);
    return value;
}

// Scores become probabilities in place, one row a block (grid: batch * kv_heads * q_len * group); lse [batch][heads][q_len].
// causal: position i sees keys <= keys - q_len + i, the last `window` of them where that is not 0. softcap: unless 0. sinks [heads]: where
// has_sinks. A row without a key gets probabilities 0, and LSE -inf unless it has a sink.
extern "C" __global__ void __launch_bounds__(256) bench_softmax(double* scores, double* lse, Shape s, unsigned causal, unsigned window,
                                                                double softcap, unsigned has_sinks, const float* sinks) {
    __shared__ double shared[8];
    const unsigned group = s.heads / s.kv_heads, rows = s.q_len * group, row = blockIdx.x % rows, kv_head = blockIdx.x / rows % s.kv_heads;
    const unsigned batch = blockIdx.x / rows / s.kv_heads, position = row / group;
    const long long seen = causal ? (long long)s.keys - s.q_len + position + 1 : s.keys;
    const long long from = window && seen > window ? seen - window : 0;
    const double sink = has_sinks ? sinks[kv_head * group + row % group] : -__longlong_as_double(0x7ff0000000000000ll);
    double* at = scores + (unsigned long long)blockIdx.x * s.keys;
    if (softcap != 0.0)
        for (long long key = threadIdx.x; key < s.keys; key += blockDim.x) at[key] = softcap * tanh(at[key] / softcap);
    double maximum = sink;
    for (long long key = from + threadIdx.x; key < seen; key += blockDim.x) maximum = fmax(maximum, at[key]);
    maximum = reduce_block(maximum, [](double a, double b) { return fmax(a, b); }, shared);
    double sum = 0.0;
    for (long long key = from + threadIdx.x; key < seen; key += blockDim.x) sum += exp(at[key] - maximum);
    if (threadIdx.x == 0 && has_sinks) sum += exp(sink - maximum);
    sum = reduce_block(sum, [](double a, double b) { return a + b; }, shared);
    for (long long key = threadIdx.x; key < s.keys; key += blockDim.x) at[key] = key >= from && key < seen ? exp(at[key] - maximum) / sum : 0.0;
    if (threadIdx.x == 0) lse[((unsigned long long)batch * s.heads + kv_head * group + row % group) * s.q_len + position] = maximum + log(sum);
}

// out [batch][q_len][heads][depth] += P.V over a chunk of keys, V times its head's v_scale where KV8; blockDim.x = depth, grid: chunks x kv_heads x batch. out starts as zeros.
extern "C" __global__ void bench_values(const double* probabilities, const kv_operand* v, double* out, Shape s, unsigned chunk, const float* v_scale) {
    const unsigned column = threadIdx.x, kv_head = blockIdx.y, batch = blockIdx.z, group = s.heads / s.kv_heads, rows = s.q_len * group;
    const unsigned first = blockIdx.x * chunk, end = min(s.keys, first + chunk);
#if KV8
    const double factor = v_scale[kv_head];
#else
    const double factor = 1.0;
#endif
    for (unsigned row_0 = 0; row_0 < rows; row_0 += 8) {
        double sums[8] = {};
        const double* p = probabilities + (((unsigned long long)batch * s.kv_heads + kv_head) * rows + row_0) * s.keys;
        for (unsigned key = first; key < end; ++key) {
            const double value = widen(v[(((unsigned long long)batch * s.keys + key) * s.kv_heads + kv_head) * s.depth + column]) * factor;
#pragma unroll
            for (unsigned i = 0; i < 8; ++i)
                if (row_0 + i < rows) sums[i] += p[(unsigned long long)i * s.keys + key] * value;
        }
#pragma unroll
        for (unsigned i = 0; i < 8; ++i) {
            const unsigned row = row_0 + i;
            if (row < rows) atomicAdd(out + (((unsigned long long)batch * s.q_len + row / group) * s.heads + kv_head * group + row % group) * s.depth + column, sums[i]);
        }
    }
}
