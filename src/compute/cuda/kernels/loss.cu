// Forward KL divergence from the target to the draft over the draft vocabulary, a block of 512 threads for each row.

#define LOSS_THREADS 512
#define VOCAB_CHUNKS (VOCAB / 8)

struct Peak {
    float top;  // in units of log2
    float sum;  // of 2^(value - top)
    int index;  // of the first largest
};

__device__ __forceinline__ Peak merge(const Peak& a, const Peak& b) {
    float top = fmaxf(a.top, b.top);
    Peak r;
    r.top = top;
    r.sum = a.sum * power2(a.top - top) + b.sum * power2(b.top - top);
    bool first = a.top > b.top || (a.top == b.top && a.index < b.index);
    r.index = first ? a.index : b.index;
    return r;
}

__device__ __forceinline__ Peak peak_of_row(const bf16* row) {
    __shared__ Peak shared[LOSS_THREADS / 32];
    Peak peak = {-3.0e38f, 0.0f, 0x7fffffff};
    for (int chunk = threadIdx.x; chunk < VOCAB_CHUNKS; chunk += LOSS_THREADS) {
        Eight z = load8(row + chunk * 8);
        float top = z.v[0];
#pragma unroll
        for (int j = 1; j < 8; j++) top = fmaxf(top, z.v[j]);
        float scaled = top * LOG2E;
        if (scaled > peak.top) {
            peak.sum *= power2(peak.top - scaled);
            peak.top = scaled;
            peak.index = chunk * 8;
#pragma unroll
            for (int j = 7; j >= 0; j--)
                if (z.v[j] == top) peak.index = chunk * 8 + j;
        }
#pragma unroll
        for (int j = 0; j < 8; j++) peak.sum += power2(z.v[j] * LOG2E - peak.top);
    }
#pragma unroll
    for (int lane = 16; lane > 0; lane >>= 1) {
        Peak other;
        other.top = __shfl_xor_sync(0xffffffffu, peak.top, lane);
        other.sum = __shfl_xor_sync(0xffffffffu, peak.sum, lane);
        other.index = __shfl_xor_sync(0xffffffffu, peak.index, lane);
        peak = merge(peak, other);
    }
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = peak;
    __syncthreads();
    peak = shared[0];
#pragma unroll
    for (int warp = 1; warp < LOSS_THREADS / 32; warp++) peak = merge(peak, shared[warp]);
    return peak;
}

// log-sum-exp of each row, in units of log2.
extern "C" __global__ void __launch_bounds__(LOSS_THREADS) target_log_sums(const bf16* logits, float* log_sums) {
    Peak peak = peak_of_row(logits + (i64)blockIdx.x * VOCAB);
    if (threadIdx.x == 0) log_sums[blockIdx.x] = peak.top + log2f(peak.sum);
}

// Row i is chain first + i, its target row first + i + step - start. Replaces the logits by the loss's gradient times
// `weight`; gives each row's loss and best token. Rows past their document's end weigh nothing.
extern "C" __global__ void __launch_bounds__(LOSS_THREADS)
    loss_and_gradient(bf16* logits, const bf16* targets, const float* log_sums, const int* ends, int first, int step,
                      int start, float weight, float* losses, int* best, int wants_gradient) {
    __shared__ float shared[LOSS_THREADS / 32];
    int chain = first + blockIdx.x;
    bf16* row = logits + (i64)blockIdx.x * VOCAB;
    if (chain + step >= ends[chain]) {
        if (threadIdx.x == 0) {
            losses[chain] = 0.0f;
            best[chain] = 0;
        }
        if (!wants_gradient) return;
        for (int chunk = threadIdx.x; chunk < VOCAB_CHUNKS; chunk += LOSS_THREADS)
            *reinterpret_cast<uint4*>(row + chunk * 8) = make_uint4(0, 0, 0, 0);
        return;
    }
    int local = chain + step - start;
    const bf16* target = targets + (i64)local * VOCAB;
    float target_log = log_sums[local];
    Peak peak = peak_of_row(row);
    float draft_log = peak.top + log2f(peak.sum);
    float loss = 0.0f;
    for (int chunk = threadIdx.x; chunk < VOCAB_CHUNKS; chunk += LOSS_THREADS) {
        Eight z = load8(row + chunk * 8), t = load8(target + chunk * 8);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float wanted = t.v[j] * LOG2E - target_log, given = z.v[j] * LOG2E - draft_log;
            float p = power2(wanted), q = power2(given);
            loss += p * (wanted - given);
            z.v[j] = weight * (q - p);
        }
        if (wants_gradient) store8(row + chunk * 8, z);
    }
    loss = block_sum<LOSS_THREADS>(loss, shared);
    if (threadIdx.x == 0) {
        losses[chain] = loss * LN2;
        best[chain] = peak.index;
    }
}
