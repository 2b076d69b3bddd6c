// Operations row by row: norms, rotary embedding, activation. One block has THREADS threads; a row of HIDDEN elements is
// dealt out in chunks of 8.

#define THREADS 256
#define CHUNKS (HIDDEN / 8)
#define OWN ((CHUNKS + THREADS - 1) / THREADS)

// One row to y = x / rms(x) * weight; gives 1 / rms.
__device__ __forceinline__ float norm_row(const bf16* x, const float* weight, float eps, bf16* y) {
    __shared__ float shared[THREADS / 32];
    Eight values[OWN];
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        int chunk = threadIdx.x + i * THREADS;
        if (chunk < CHUNKS) {
            values[i] = load8(x + chunk * 8);
#pragma unroll
            for (int j = 0; j < 8; j++) sum += values[i].v[j] * values[i].v[j];
        }
    }
    float scale = rsqrtf(block_sum<THREADS>(sum, shared) / HIDDEN + eps);
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        int chunk = threadIdx.x + i * THREADS;
        if (chunk < CHUNKS) {
            Eight w = load8(weight + chunk * 8);
#pragma unroll
            for (int j = 0; j < 8; j++) values[i].v[j] *= scale * w.v[j];
            store8(y + chunk * 8, values[i]);
        }
    }
    return scale;
}

extern "C" __global__ void __launch_bounds__(THREADS) rms_norm(const bf16* x, int x_stride, const float* weight,
                                                               float eps, bf16* y, int y_stride, float* scale) {
    i64 row = blockIdx.x;
    float inverse = norm_row(x + row * x_stride, weight, eps, y + row * y_stride);
    if (scale && threadIdx.x == 0) scale[row] = inverse;
}

// The normed embedding of each token.
extern "C" __global__ void __launch_bounds__(THREADS)
    embed_norm(const u32* tokens, const bf16* table, const float* weight, float eps, bf16* y, int y_stride) {
    i64 row = blockIdx.x;
    norm_row(table + (i64)tokens[row] * HIDDEN, weight, eps, y + row * y_stride);
}

// dx = add + the norm's gradient for dy + extra. `extra` and `add` may be null; with `map`, theirs are the rows that it
// names, and none where it is negative. Each block leaves its part of the weight's gradient in a row of `partial`.
extern "C" __global__ void __launch_bounds__(THREADS)
    rms_norm_backward(const bf16* x, int x_stride, const bf16* dy, int dy_stride, const bf16* extra, int extra_stride,
                      const bf16* add, int add_stride, const int* map, const float* scale, const float* weight,
                      bf16* dx, int dx_stride, float* partial, int rows) {
    __shared__ float shared[THREADS / 32];
    Eight slopes[OWN];
#pragma unroll
    for (int i = 0; i < OWN; i++)
#pragma unroll
        for (int j = 0; j < 8; j++) slopes[i].v[j] = 0.0f;
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        i64 other = map ? map[row] : row;
        float inverse = scale[row];
        Eight normed[OWN], gradient[OWN];
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            int chunk = threadIdx.x + i * THREADS;
            if (chunk < CHUNKS) {
                normed[i] = load8(x + row * x_stride + chunk * 8);
                gradient[i] = load8(dy + row * dy_stride + chunk * 8);
                if (extra && other >= 0) {
                    Eight more = load8(extra + other * extra_stride + chunk * 8);
#pragma unroll
                    for (int j = 0; j < 8; j++) gradient[i].v[j] += more.v[j];
                }
                Eight w = load8(weight + chunk * 8);
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    normed[i].v[j] *= inverse;
                    slopes[i].v[j] += gradient[i].v[j] * normed[i].v[j];
                    gradient[i].v[j] *= w.v[j];
                    sum += gradient[i].v[j] * normed[i].v[j];
                }
            }
        }
        float along = block_sum<THREADS>(sum, shared) / HIDDEN;
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            int chunk = threadIdx.x + i * THREADS;
            if (chunk < CHUNKS) {
                Eight result;
#pragma unroll
                for (int j = 0; j < 8; j++)
                    result.v[j] = inverse * (gradient[i].v[j] - normed[i].v[j] * along);
                if (add && other >= 0) {
                    Eight more = load8(add + other * add_stride + chunk * 8);
#pragma unroll
                    for (int j = 0; j < 8; j++) result.v[j] += more.v[j];
                }
                store8(dx + row * dx_stride + chunk * 8, result);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        int chunk = threadIdx.x + i * THREADS;
        if (chunk < CHUNKS) {
            float4* to = reinterpret_cast<float4*>(partial + (i64)blockIdx.x * HIDDEN + chunk * 8);
            to[0] = make_float4(slopes[i].v[0], slopes[i].v[1], slopes[i].v[2], slopes[i].v[3]);
            to[1] = make_float4(slopes[i].v[4], slopes[i].v[5], slopes[i].v[6], slopes[i].v[7]);
        }
    }
}

// out = the sums of the columns of `partial`, added to what is there or not. Block: 32 columns by 32 rows.
extern "C" __global__ void __launch_bounds__(1024)
    reduce_columns(const float* partial, int rows, int width, const float* divisor, float* out, int accumulate) {
    __shared__ float shared[32][33];
    int column = blockIdx.x * 32 + threadIdx.x % 32, line = threadIdx.x / 32;
    float sum = 0.0f;
    if (column < width)
        for (int row = line; row < rows; row += 32) sum += partial[(i64)row * width + column];
    shared[line][threadIdx.x % 32] = sum;
    __syncthreads();
    if (line > 0 || column >= width) return;
#pragma unroll
    for (int i = 1; i < 32; i++) sum += shared[i][threadIdx.x];
    // A weight of exactly 0 gets no gradient this way: see column_products.
    if (divisor) sum = divisor[column] == 0.0f ? 0.0f : sum / divisor[column];
    out[column] = accumulate ? out[column] + sum : sum;
}

// Sums of weight * gradient over each column of a matrix, a slice of rows for each blockIdx.y. Where x = norm(e) * w feeds
// a product with W and e is frozen, w's gradient is this over w: no gradient to x is ever made.
extern "C" __global__ void __launch_bounds__(THREADS)
    column_products(const bf16* weight, int weight_stride, const float* gradient, int gradient_stride, int rows,
                    int width, float* partial) {
    int column = (blockIdx.x * THREADS + threadIdx.x) * 2;
    if (column >= width) return;
    float first = 0.0f, second = 0.0f;
#pragma unroll 8
    for (i64 row = blockIdx.y; row < rows; row += gridDim.y) {
        u32 w = *reinterpret_cast<const u32*>(weight + row * weight_stride + column);
        float2 g = *reinterpret_cast<const float2*>(gradient + row * gradient_stride + column);
        first += low_of(w) * g.x;
        second += high_of(w) * g.y;
    }
    *reinterpret_cast<float2*>(partial + (i64)blockIdx.y * width + column) = make_float2(first, second);
}

// to[i] = from[map[i]], rows of `width` elements.
extern "C" __global__ void __launch_bounds__(THREADS)
    gather_rows(const bf16* from, int from_stride, const int* map, bf16* to, int to_stride, int width) {
    i64 row = blockIdx.x, source = map[row];
    for (int chunk = threadIdx.x; chunk < width / 8; chunk += THREADS)
        *reinterpret_cast<uint4*>(to + row * to_stride + chunk * 8) =
            *reinterpret_cast<const uint4*>(from + source * from_stride + chunk * 8);
}

// Turns the first `heads` heads of each row, in place, to its position; direction -1 turns back.
extern "C" __global__ void __launch_bounds__(THREADS)
    rope(bf16* x, int stride, int heads, const int* positions, int offset, const float2* table, float direction) {
    i64 row = blockIdx.x;
    const float2* turns = table + (i64)(positions[row] + offset) * (HEAD_DIM / 2);
    bf16* line = x + row * stride;
    for (int i = threadIdx.x; i < heads * (HEAD_DIM / 4); i += THREADS) {
        int head = i / (HEAD_DIM / 4), pair = i % (HEAD_DIM / 4) * 2;
        u32* first = reinterpret_cast<u32*>(line + head * HEAD_DIM + pair);
        u32* second = reinterpret_cast<u32*>(line + head * HEAD_DIM + HEAD_DIM / 2 + pair);
        float2 a = turns[pair], b = turns[pair + 1];
        float sine_a = a.y * direction, sine_b = b.y * direction;
        float low_a = low_of(*first), low_b = high_of(*first), up_a = low_of(*second), up_b = high_of(*second);
        *first = pack(low_a * a.x - up_a * sine_a, low_b * b.x - up_b * sine_b);
        *second = pack(up_a * a.x + low_a * sine_a, up_b * b.x + low_b * sine_b);
    }
}

// out = silu(gate) * up; a row of `gate_up` is the gate, then up.
extern "C" __global__ void __launch_bounds__(THREADS) silu_mul(const bf16* gate_up, bf16* out) {
    i64 row = blockIdx.y;
    int column = (blockIdx.x * THREADS + threadIdx.x) * 8;
    if (column >= INNER) return;
    Eight gate = load8(gate_up + row * (2 * INNER) + column);
    Eight up = load8(gate_up + row * (2 * INNER) + INNER + column);
#pragma unroll
    for (int j = 0; j < 8; j++) gate.v[j] = __fdividef(gate.v[j], 1.0f + __expf(-gate.v[j])) * up.v[j];
    store8(out + row * INNER + column, gate);
}

// Replaces `gate_up` by its gradient, given that of silu_mul's output.
extern "C" __global__ void __launch_bounds__(THREADS) silu_mul_backward(bf16* gate_up, const bf16* gradient) {
    i64 row = blockIdx.y;
    int column = (blockIdx.x * THREADS + threadIdx.x) * 8;
    if (column >= INNER) return;
    bf16* line = gate_up + row * (2 * INNER) + column;
    Eight gate = load8(line), up = load8(line + INNER), slope = load8(gradient + row * INNER + column);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float sigmoid = __fdividef(1.0f, 1.0f + __expf(-gate.v[j]));
        float silu = gate.v[j] * sigmoid;
        gate.v[j] = slope.v[j] * up.v[j] * (sigmoid + silu * (1.0f - sigmoid));
        up.v[j] = slope.v[j] * silu;
    }
    store8(line, gate);
    store8(line + INNER, up);
}
