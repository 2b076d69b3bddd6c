// What all kernels share. Compiled by NVRTC in front of every other file; needs no header.
//
// Matrices are row-major with a stride in elements; widths and strides are multiples of 8, so that every access of a row
// is one of 16 bytes. bf16 lives in memory alone, arithmetic is f32.

typedef unsigned short bf16;
typedef unsigned int u32;
typedef long long i64;

#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f

__device__ __forceinline__ float low_of(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// Rounds to nearest even.
__device__ __forceinline__ u32 pack(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// 2^x, within 2^-22.
__device__ __forceinline__ float power2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

struct Eight {
    float v[8];
};

__device__ __forceinline__ Eight load8(const bf16* from) {
    uint4 raw = *reinterpret_cast<const uint4*>(from);
    Eight r;
    r.v[0] = low_of(raw.x), r.v[1] = high_of(raw.x), r.v[2] = low_of(raw.y), r.v[3] = high_of(raw.y);
    r.v[4] = low_of(raw.z), r.v[5] = high_of(raw.z), r.v[6] = low_of(raw.w), r.v[7] = high_of(raw.w);
    return r;
}

__device__ __forceinline__ Eight load8(const float* from) {
    float4 a = reinterpret_cast<const float4*>(from)[0];
    float4 b = reinterpret_cast<const float4*>(from)[1];
    return Eight{{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}

__device__ __forceinline__ void store8(bf16* to, const Eight& r) {
    *reinterpret_cast<uint4*>(to) =
        make_uint4(pack(r.v[0], r.v[1]), pack(r.v[2], r.v[3]), pack(r.v[4], r.v[5]), pack(r.v[6], r.v[7]));
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int lane = 16; lane > 0; lane >>= 1) value += __shfl_xor_sync(0xffffffffu, value, lane);
    return value;
}

// The sum over a block of THREADS, in every thread. `shared` holds one float for each warp.
template <int THREADS>
__device__ __forceinline__ float block_sum(float value, float* shared) {
    value = warp_sum(value);
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < THREADS / 32; warp++) sum += shared[warp];
    return sum;
}
