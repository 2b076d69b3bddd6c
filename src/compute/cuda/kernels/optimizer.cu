// Gradient norm, clipping and AdamW over all parameters at once: they lie in one flat array, matrices first.

#define UPDATE_THREADS 256

// Sum of squares, a part for each block.
extern "C" __global__ void __launch_bounds__(UPDATE_THREADS)
    square_sums(const float* values, i64 count, float* partial) {
    __shared__ float shared[UPDATE_THREADS / 32];
    float sum = 0.0f;
    i64 step = (i64)gridDim.x * UPDATE_THREADS;
#pragma unroll 4
    for (i64 i = (i64)blockIdx.x * UPDATE_THREADS + threadIdx.x; i < count / 4; i += step) {
        float4 v = reinterpret_cast<const float4*>(values)[i];
        sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
    sum = block_sum<UPDATE_THREADS>(sum, shared);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// result[0] = the norm, result[1] = the factor that brings it to at most `limit`. One warp, in a fixed order.
extern "C" __global__ void __launch_bounds__(32) clip_factor(const float* partial, int count, float limit, float* result) {
    double sum = 0.0;
    for (int i = threadIdx.x; i < count; i += 32) sum += partial[i];
#pragma unroll
    for (int lane = 16; lane > 0; lane >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
    if (threadIdx.x > 0) return;
    float norm = (float)sqrt(sum);
    result[0] = norm;
    result[1] = norm > limit ? limit / norm : 1.0f;
}

// `keep` is 1 - rate * decay, for the first `decayed` parameters alone. A norm that is not finite leaves all as it was.
extern "C" __global__ void __launch_bounds__(UPDATE_THREADS)
    adamw(float* weights, bf16* copies, const float* gradients, float* first, float* second, i64 count, i64 decayed,
          const float* clip, float beta1, float beta2, float rate, float second_scale, float epsilon, float keep) {
    float factor = clip[1];
    if (!isfinite(clip[0])) return;
    i64 step = (i64)gridDim.x * UPDATE_THREADS;
#pragma unroll 2
    for (i64 i = (i64)blockIdx.x * UPDATE_THREADS + threadIdx.x; i < count / 4; i += step) {
        float4 g = reinterpret_cast<const float4*>(gradients)[i];
        float4 w = reinterpret_cast<float4*>(weights)[i];
        float4 m = reinterpret_cast<float4*>(first)[i];
        float4 v = reinterpret_cast<float4*>(second)[i];
        float kept = i * 4 < decayed ? keep : 1.0f;
        float *ps[4] = {&g.x, &w.x, &m.x, &v.x};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float slope = ps[0][j] * factor;
            float mean = beta1 * ps[2][j] + (1.0f - beta1) * slope;
            float square = beta2 * ps[3][j] + (1.0f - beta2) * slope * slope;
            ps[2][j] = mean;
            ps[3][j] = square;
            ps[1][j] = ps[1][j] * kept - rate * mean / (sqrtf(square * second_scale) + epsilon);
        }
        reinterpret_cast<float4*>(weights)[i] = w;
        reinterpret_cast<float4*>(first)[i] = m;
        reinterpret_cast<float4*>(second)[i] = v;
        reinterpret_cast<uint2*>(copies)[i] = make_uint2(pack(w.x, w.y), pack(w.z, w.w));
    }
}

// bf16 copies of f32 values.
extern "C" __global__ void __launch_bounds__(UPDATE_THREADS) round_copies(const float* values, bf16* copies, i64 count) {
    i64 step = (i64)gridDim.x * UPDATE_THREADS;
    for (i64 i = (i64)blockIdx.x * UPDATE_THREADS + threadIdx.x; i < count / 4; i += step) {
        float4 w = reinterpret_cast<const float4*>(values)[i];
        reinterpret_cast<uint2*>(copies)[i] = make_uint2(pack(w.x, w.y), pack(w.z, w.w));
    }
}
