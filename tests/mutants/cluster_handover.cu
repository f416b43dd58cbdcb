// What compute-sanitizer's racecheck makes of a hand-over between two CTAs of a cluster, in the smallest form of it: each CTA writes its
// shared memory, hands it over, and reads the other's. Launch: 2 CTAs, a cluster of 2, 128 threads; out: [2][128] unsigned.
// _mbarrier hands over by a release arrival at the other's mbarrier and an acquire wait, as the attention kernels do; _barrier by the
// cluster barrier; _racy not at all; _own hands over between the threads of a CTA, by an mbarrier too. _partial is _mbarrier among the first
// two warps alone, which meet at a barrier of theirs before one of their threads arrives. _async sends (st.async) instead of writing: every
// thread's bytes complete the other's mbarrier. _split hands nothing over: a warp waits at the cluster barrier, which all have arrived at,
// only after the others have passed it. It ends on the device and on the emulator, not under racecheck.

__device__ __forceinline__ unsigned shared_address(const void* place) { return static_cast<unsigned>(__cvta_generic_to_shared(place)); }

__device__ __forceinline__ unsigned rank_of_cta() {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ unsigned in_cta(unsigned address, unsigned rank) {
    unsigned result;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(address), "r"(rank));
    return result;
}

__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ unsigned load_cluster(unsigned address) {
    unsigned value;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}

__device__ __forceinline__ void wait_for(unsigned barrier) {
    unsigned done = 0;
    while (!done) {
        asm volatile(
            "{\n\t.reg .pred complete;\n\tmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 complete, [%1], 0;\n\t"
            "selp.u32 %0, 1, 0, complete;\n\t}"
            : "=r"(done)
            : "r"(barrier)
            : "memory");
    }
}

template <int FORM>
__device__ __forceinline__ void handover(unsigned* out) {
    __shared__ unsigned box[128];
    __shared__ __align__(8) unsigned long long arrived;
    const unsigned rank = rank_of_cta();
    const unsigned other = FORM == 3 ? rank : rank ^ 1;
    const unsigned barrier = shared_address(&arrived);
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(FORM == 3 ? 128 : FORM == 6 ? 96 : 1) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        if (FORM == 5) asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(128 * 4) : "memory");
    }
    cluster_barrier();
    if (FORM == 6) {
        asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
        if (threadIdx.x >= 96) wait_for(barrier);
        __syncwarp();
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
        if (threadIdx.x < 96) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
        out[rank * 128 + threadIdx.x] = (rank ^ 1) * 1000 + (threadIdx.x ^ 1);
        return;
    }
    if (FORM == 4 && threadIdx.x >= 64) {
        out[rank * 128 + threadIdx.x] = (rank ^ 1) * 1000 + (threadIdx.x ^ 1);
        cluster_barrier();
        return;
    }
    if (FORM == 5) {
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
                         in_cta(shared_address(&box[threadIdx.x]), other)),
                     "r"(rank * 1000 + threadIdx.x), "r"(in_cta(barrier, other))
                     : "memory");
    } else {
        box[threadIdx.x] = rank * 1000 + threadIdx.x;
    }
    if (FORM == 0 || FORM == 4) {
        if (FORM == 0) __syncthreads();
        if (FORM == 4) asm volatile("bar.sync 1, 64;" ::: "memory");
        if (threadIdx.x == 0) {
            asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(in_cta(barrier, other)) : "memory");
        }
    }
    if (FORM == 1) cluster_barrier();
    if (FORM == 3) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
    if (FORM == 0 || FORM >= 3) wait_for(barrier);
    const unsigned from = shared_address(&box[threadIdx.x ^ 1]);
    out[rank * 128 + threadIdx.x] = load_cluster(in_cta(from, FORM == 5 ? rank : other));
    cluster_barrier();
}

extern "C" __global__ void __launch_bounds__(128) handover_mbarrier(unsigned* out) { handover<0>(out); }
extern "C" __global__ void __launch_bounds__(128) handover_barrier(unsigned* out) { handover<1>(out); }
extern "C" __global__ void __launch_bounds__(128) handover_racy(unsigned* out) { handover<2>(out); }
extern "C" __global__ void __launch_bounds__(128) handover_own(unsigned* out) { handover<3>(out); }
extern "C" __global__ void __launch_bounds__(128) handover_partial(unsigned* out) { handover<4>(out); }
extern "C" __global__ void __launch_bounds__(128) handover_async(unsigned* out) { handover<5>(out); }
extern "C" __global__ void __launch_bounds__(128) handover_split(unsigned* out) { handover<6>(out); }
