// Attention of chains: a query of step k sees step 0's keys of its document causally, and its own chain's keys of steps
// 1..k (the diagonal terms). Flash attention on mma.sync m16n8k16: 4 warps of 16 query (or key) rows each, tiles of 64.
//
// `qkv` holds a row for each chain of each step, [steps * chains, WIDTH]: queries, keys, values; `grad` the same of
// gradients. Step 0's keys and values of all rows come by pointers of their own. Log-sums are in units of log2 and include
// the score's scale. [steps, HEADS, chains]

#define ROW (HEAD_DIM + 8)  // padding: 16-byte accesses of 8 rows then touch all banks once
#define TILE 64
#define STAGE (2 * TILE * ROW)  // two tiles: of keys and values, or of queries and slopes
#define GROUP (HEADS / KEY_HEADS)
#define WIDTH ((HEADS + 2 * KEY_HEADS) * HEAD_DIM)
#define KEYS_AT (HEADS * HEAD_DIM)
#define VALUES_AT ((HEADS + KEY_HEADS) * HEAD_DIM)
#define STEPS_OF_16 (HEAD_DIM / 16)
#define WARPS_THREADS 128

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void load_matrices(u32 r[4], const bf16* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(p)));
}

__device__ __forceinline__ void load_transposed(u32 r[4], const bf16* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(p)));
}

__device__ __forceinline__ void multiply(float c[4], const u32 a[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void wait_copies_but(int one) {
    if (one) asm volatile("cp.async.wait_group 1;" ::: "memory");
    else asm volatile("cp.async.wait_group 0;" ::: "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Starts the copy of a tile of 64 rows of HEAD_DIM; rows from `count` on become 0.
__device__ __forceinline__ void copy_tile(bf16* to, const bf16* from, i64 stride, int count) {
    for (int i = threadIdx.x; i < TILE * (HEAD_DIM / 8); i += WARPS_THREADS) {
        int row = i / (HEAD_DIM / 8), chunk = i % (HEAD_DIM / 8);
        int bytes = row < count ? 16 : 0;
        const bf16* source = from + (row < count ? row : 0) * stride + chunk * 8;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to + row * ROW + chunk * 8)),
                     "l"(source), "r"(bytes)
                     : "memory");
    }
}

// c[8][4] = 16 rows of `a` times 64 rows of `b`, transposed: both [rows, HEAD_DIM] in shared memory.
__device__ __forceinline__ void product_abt(float c[8][4], const bf16* a, const bf16* b) {
    int lane = threadIdx.x % 32;
    const bf16* a_at = a + (lane & 15) * ROW + (lane >> 4) * 8;
    const bf16* b_at = b + ((lane & 7) + ((lane >> 4) << 3)) * ROW + ((lane >> 3) & 1) * 8;
#pragma unroll
    for (int n = 0; n < 8; n++) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0.0f;
#pragma unroll
    for (int k = 0; k < STEPS_OF_16; k++) {
        u32 left[4], right[4];
        load_matrices(left, a_at + k * 16);
#pragma unroll
        for (int n = 0; n < 4; n++) {
            load_matrices(right, b_at + n * 16 * ROW + k * 16);
            multiply(c[2 * n], left, right[0], right[1]);
            multiply(c[2 * n + 1], left, right[2], right[3]);
        }
    }
}

// c[COLUMNS / 8][4] += 16x64 weights (as they came out of product_abt) times 64 rows of `b`, COLUMNS of them.
template <int COLUMNS>
__device__ __forceinline__ void product_ab(float (*c)[4], const float weights[8][4], const bf16* b) {
    int lane = threadIdx.x % 32;
    const bf16* b_at = b + (lane & 15) * ROW + (lane >> 4) * 8;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        u32 left[4], right[4];
        left[0] = pack(weights[2 * k][0], weights[2 * k][1]);
        left[1] = pack(weights[2 * k][2], weights[2 * k][3]);
        left[2] = pack(weights[2 * k + 1][0], weights[2 * k + 1][1]);
        left[3] = pack(weights[2 * k + 1][2], weights[2 * k + 1][3]);
#pragma unroll
        for (int n = 0; n < COLUMNS / 16; n++) {
            load_transposed(right, b_at + k * 16 * ROW + n * 16);
            multiply(c[2 * n], left, right[0], right[1]);
            multiply(c[2 * n + 1], left, right[2], right[3]);
        }
    }
}

__device__ __forceinline__ float quad_sum(float value) {
    value += __shfl_xor_sync(0xffffffffu, value, 1);
    return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

__device__ __forceinline__ float quad_max(float value) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
    return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
}

// This thread's part of the dot product of a row in shared memory with one in global memory; quad_sum makes it whole.
__device__ __forceinline__ float dot_part(const bf16* a, const bf16* b) {
    int pair = (threadIdx.x & 3) * 2;
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 8; k++) {
        u32 x = *reinterpret_cast<const u32*>(a + k * 8 + pair), y = *reinterpret_cast<const u32*>(b + k * 8 + pair);
        sum += low_of(x) * low_of(y) + high_of(x) * high_of(y);
    }
    return sum;
}

// tile: x first chain, y chains (at most 64), z first packed row of the document, w the document's row of the first chain.
extern "C" __global__ void __launch_bounds__(WARPS_THREADS)
    attention_forward(const int4* tiles, const bf16* qkv, int chains, int step, const bf16* keys, const bf16* values,
                      int key_stride, bf16* out, float* log_sums, float scale) {
    extern __shared__ __align__(16) bf16 memory[];
    bf16* query = memory;
    bf16* key = memory + TILE * ROW;
    bf16* value = memory + 2 * TILE * ROW;
    int4 tile = tiles[blockIdx.x];
    int head = blockIdx.y, key_head = head / GROUP;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, pair = (lane & 3) * 2;
    const bf16* q = qkv + ((i64)step * chains + tile.x) * WIDTH + head * HEAD_DIM;
    const bf16* k = keys + (i64)tile.z * key_stride + key_head * HEAD_DIM;
    const bf16* v = values + (i64)tile.z * key_stride + key_head * HEAD_DIM;
    int limit = tile.w + tile.y, blocks = (limit + TILE - 1) / TILE;
    float unit = scale * LOG2E;
    copy_tile(query, q, WIDTH, tile.y);
    copy_tile(key, k, key_stride, limit);
    commit_copies();
    copy_tile(value, v, key_stride, limit);
    commit_copies();

    float sums[HEAD_DIM / 8][4];
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; n++) sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0.0f;
    float top[2] = {-1.0e30f, -1.0e30f}, total[2] = {0.0f, 0.0f};
    int row = warp * 16 + (lane >> 2);
    wait_copies_but(1);
    __syncthreads();

    // The chain's own keys of later steps.
    for (int i = 1; i <= step; i++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int mine = row + half * 8, chain = tile.x + (mine < tile.y ? mine : tile.y - 1);
            const bf16* own = qkv + ((i64)i * chains + chain) * WIDTH + key_head * HEAD_DIM;
            float score = quad_sum(dot_part(query + mine * ROW, own + KEYS_AT)) * unit;
            float now = fmaxf(top[half], score), old = power2(top[half] - now), weight = power2(score - now);
            top[half] = now;
            total[half] = total[half] * old + ((lane & 3) == 0 ? weight : 0.0f);
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 8; n++) {
                u32 own_value = *reinterpret_cast<const u32*>(own + VALUES_AT + n * 8 + pair);
                sums[n][half * 2] = sums[n][half * 2] * old + weight * low_of(own_value);
                sums[n][half * 2 + 1] = sums[n][half * 2 + 1] * old + weight * high_of(own_value);
            }
        }
    }

    // One tile each of keys and values: the next keys come in while the values are used and the other way round. Fewer
    // bytes, so that three blocks share a multiprocessor.
    for (int block = 0; block < blocks; block++) {
        int left = limit - (block + 1) * TILE;
        i64 from = (i64)(block + 1) * TILE * key_stride;
        wait_copies_but(1);
        __syncthreads();
        float scores[8][4];
        product_abt(scores, query + warp * 16 * ROW, key);
        __syncthreads();
        if (left > 0) copy_tile(key, k + from, key_stride, left);
        commit_copies();
        bool masks = (block + 1) * TILE - 1 > tile.w + warp * 16;
        float highest[2] = {top[0], top[1]};
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int at = block * TILE + n * 8 + pair + (i & 1);
                float score = scores[n][i] * unit;
                if (masks && at > tile.w + row + (i >> 1) * 8) score = -1.0e30f;
                scores[n][i] = score;
                highest[i >> 1] = fmaxf(highest[i >> 1], score);
            }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float now_top = quad_max(highest[half]), old = power2(top[half] - now_top);
            top[half] = now_top;
            total[half] *= old;
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 8; n++) {
                sums[n][half * 2] *= old;
                sums[n][half * 2 + 1] *= old;
            }
        }
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                scores[n][i] = power2(scores[n][i] - top[i >> 1]);
                total[i >> 1] += scores[n][i];
            }
        wait_copies_but(1);
        __syncthreads();
        product_ab<HEAD_DIM>(sums, scores, value);
        __syncthreads();
        if (left > 0) copy_tile(value, v + from, key_stride, left);
        commit_copies();
    }

#pragma unroll
    for (int half = 0; half < 2; half++) {
        int mine = row + half * 8;
        float sum = quad_sum(total[half]), inverse = 1.0f / sum;
        if (mine >= tile.y) continue;
        i64 chain = tile.x + mine;
        bf16* to = out + ((i64)step * chains + chain) * (HEADS * HEAD_DIM) + head * HEAD_DIM;
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; n++)
            *reinterpret_cast<u32*>(to + n * 8 + pair) =
                pack(sums[n][half * 2] * inverse, sums[n][half * 2 + 1] * inverse);
        if ((lane & 3) == 0) log_sums[((i64)step * HEADS + head) * chains + chain] = top[half] + log2f(sum);
    }
}

// Gradient of the queries of one step, into `grad`; leaves rowsum(out * gradient) in `means` for the other kernels.
extern "C" __global__ void __launch_bounds__(WARPS_THREADS)
    attention_query_gradient(const int4* tiles, const bf16* qkv, int chains, int step, const bf16* keys,
                             const bf16* values, int key_stride, const bf16* out, const bf16* slopes,
                             const float* log_sums, float* means, bf16* grad, float scale) {
    extern __shared__ __align__(16) bf16 memory[];
    bf16* query = memory;
    bf16* slope = memory + TILE * ROW;
    bf16* key = memory + 2 * TILE * ROW;
    bf16* value = memory + 3 * TILE * ROW;
    int4 tile = tiles[blockIdx.x];
    int head = blockIdx.y, key_head = head / GROUP;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, pair = (lane & 3) * 2;
    i64 first = (i64)step * chains + tile.x;
    const bf16* k = keys + (i64)tile.z * key_stride + key_head * HEAD_DIM;
    const bf16* v = values + (i64)tile.z * key_stride + key_head * HEAD_DIM;
    int limit = tile.w + tile.y, blocks = (limit + TILE - 1) / TILE;
    float unit = scale * LOG2E;
    copy_tile(query, qkv + first * WIDTH + head * HEAD_DIM, WIDTH, tile.y);
    copy_tile(slope, slopes + first * (HEADS * HEAD_DIM) + head * HEAD_DIM, HEADS * HEAD_DIM, tile.y);
    copy_tile(key, k, key_stride, limit);
    copy_tile(value, v, key_stride, limit);
    commit_copies();

    float sums[HEAD_DIM / 8][4];
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; n++) sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0.0f;
    int row = warp * 16 + (lane >> 2);
    float log_sum[2], mean[2];
    wait_copies_but(0);
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int mine = row + half * 8, there = mine < tile.y ? mine : tile.y - 1;
        const bf16* merged = out + (first + there) * (HEADS * HEAD_DIM) + head * HEAD_DIM;
        i64 at = ((i64)step * HEADS + head) * chains + tile.x + there;
        mean[half] = quad_sum(dot_part(slope + mine * ROW, merged));
        log_sum[half] = log_sums[at];
        if (mine < tile.y && (lane & 3) == 0) means[at] = mean[half];
    }
    for (int i = 1; i <= step; i++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int mine = row + half * 8, chain = tile.x + (mine < tile.y ? mine : tile.y - 1);
            const bf16* own = qkv + ((i64)i * chains + chain) * WIDTH + key_head * HEAD_DIM;
            float weight = power2(quad_sum(dot_part(query + mine * ROW, own + KEYS_AT)) * unit - log_sum[half]);
            float factor = weight * (quad_sum(dot_part(slope + mine * ROW, own + VALUES_AT)) - mean[half]);
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 8; n++) {
                u32 own_key = *reinterpret_cast<const u32*>(own + KEYS_AT + n * 8 + pair);
                sums[n][half * 2] += factor * low_of(own_key);
                sums[n][half * 2 + 1] += factor * high_of(own_key);
            }
        }
    }

    for (int block = 0; block < blocks; block++) {
        int left = limit - (block + 1) * TILE;
        i64 from = (i64)(block + 1) * TILE * key_stride;
        wait_copies_but(0);
        __syncthreads();
        float scores[8][4], slants[8][4];
        product_abt(scores, query + warp * 16 * ROW, key);
        product_abt(slants, slope + warp * 16 * ROW, value);
        __syncthreads();
        if (left > 0) copy_tile(value, v + from, key_stride, left);
        bool masks = (block + 1) * TILE - 1 > tile.w + warp * 16;
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int at = block * TILE + n * 8 + pair + (i & 1);
                float weight = power2(scores[n][i] * unit - log_sum[i >> 1]);
                if (masks && at > tile.w + row + (i >> 1) * 8) weight = 0.0f;
                scores[n][i] = weight * (slants[n][i] - mean[i >> 1]);
            }
        product_ab<HEAD_DIM>(sums, scores, key);
        __syncthreads();
        if (left > 0) copy_tile(key, k + from, key_stride, left);
        commit_copies();
    }

#pragma unroll
    for (int half = 0; half < 2; half++) {
        int mine = row + half * 8;
        if (mine >= tile.y) continue;
        bf16* to = grad + (first + mine) * WIDTH + head * HEAD_DIM;
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; n++)
            *reinterpret_cast<u32*>(to + n * 8 + pair) = pack(sums[n][half * 2] * scale, sums[n][half * 2 + 1] * scale);
    }
}

// A block's share of HEAD_DIM: both sums of 256 columns would not fit in registers.
#define PARTS (HEAD_DIM > 128 ? 2 : 1)
#define PART (HEAD_DIM / PARTS)

struct KeyTile {
    int row;        // first packed row
    int rows;       // at most 64
    int first;      // the document's row of the first key
    int chain;      // first chain of the document
    int chains;     // of the document
    int first_row;  // the document's row of its first chain
};

// Gradients of step 0's keys and values from the queries of all steps.
extern "C" __global__ void __launch_bounds__(WARPS_THREADS)
    attention_key_gradient(const KeyTile* tiles, const bf16* qkv, int chains, int steps, const bf16* keys,
                           const bf16* values, int key_stride, const bf16* slopes, const float* log_sums,
                           const float* means, bf16* key_grad, bf16* value_grad, int grad_stride, float scale) {
    extern __shared__ __align__(16) bf16 memory[];
    __shared__ float columns[2][2][TILE];
    bf16* key = memory;
    bf16* value = memory + TILE * ROW;
    bf16* stages = memory + 2 * TILE * ROW;
    KeyTile tile = tiles[blockIdx.x];
    int key_head = blockIdx.y, part = blockIdx.z * PART;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, pair = (lane & 3) * 2;
    float unit = scale * LOG2E;
    int begin = tile.first > tile.first_row ? tile.first - tile.first_row : 0;
    int count = tile.chains > begin ? (tile.chains - begin + TILE - 1) / TILE : 0;
    int blocks = count * GROUP * steps;
    copy_tile(key, keys + (i64)tile.row * key_stride + key_head * HEAD_DIM, key_stride, tile.rows);
    copy_tile(value, values + (i64)tile.row * key_stride + key_head * HEAD_DIM, key_stride, tile.rows);

    auto fetch = [&](int block, int into) {
        int start = begin + block % count * TILE, rest = block / count;
        int head = key_head * GROUP + rest % GROUP, step = rest / GROUP;
        i64 chain = tile.chain + start;
        i64 at = (i64)step * chains + chain;
        int left = tile.chains - start;
        copy_tile(stages + into * STAGE, qkv + at * WIDTH + head * HEAD_DIM, WIDTH, left);
        copy_tile(stages + into * STAGE + TILE * ROW, slopes + at * (HEADS * HEAD_DIM) + head * HEAD_DIM, HEADS * HEAD_DIM, left);
        int column = threadIdx.x % TILE;
        i64 from = ((i64)step * HEADS + head) * chains + chain + column;
        if (threadIdx.x < TILE) columns[into][0][column] = column < left ? log_sums[from] : 1.0e30f;
        else columns[into][1][column] = column < left ? means[from] : 0.0f;
    };

    float key_sums[PART / 8][4], value_sums[PART / 8][4];
#pragma unroll
    for (int n = 0; n < PART / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) key_sums[n][i] = value_sums[n][i] = 0.0f;
    int row = warp * 16 + (lane >> 2);
    if (blocks > 0) fetch(0, 0);
    commit_copies();
    for (int block = 0; block < blocks; block++) {
        int now = block & 1;
        if (block + 1 < blocks) {
            fetch(block + 1, now ^ 1);
            commit_copies();
            wait_copies_but(1);
        } else {
            wait_copies_but(0);
        }
        __syncthreads();
        const bf16* query = stages + now * STAGE;
        const bf16* slope = stages + now * STAGE + TILE * ROW;
        int start = begin + block % count * TILE;
        float weights[8][4], slants[8][4];
        product_abt(weights, key + warp * 16 * ROW, query);
        product_abt(slants, value + warp * 16 * ROW, slope);
        bool masks = tile.first + warp * 16 + 15 > tile.first_row + start;
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int column = n * 8 + pair + (i & 1);
                float weight = power2(weights[n][i] * unit - columns[now][0][column]);
                if (masks && tile.first + row + (i >> 1) * 8 > tile.first_row + start + column) weight = 0.0f;
                weights[n][i] = weight;
                slants[n][i] = weight * (slants[n][i] - columns[now][1][column]);
            }
        product_ab<PART>(value_sums, weights, slope + part);
        product_ab<PART>(key_sums, slants, query + part);
        __syncthreads();
    }

#pragma unroll
    for (int half = 0; half < 2; half++) {
        int mine = row + half * 8;
        if (mine >= tile.rows) continue;
        i64 at = (i64)(tile.row + mine) * grad_stride + key_head * HEAD_DIM + part + pair;
#pragma unroll
        for (int n = 0; n < PART / 8; n++) {
            *reinterpret_cast<u32*>(key_grad + at + n * 8) =
                pack(key_sums[n][half * 2] * scale, key_sums[n][half * 2 + 1] * scale);
            *reinterpret_cast<u32*>(value_grad + at + n * 8) =
                pack(value_sums[n][half * 2], value_sums[n][half * 2 + 1]);
        }
    }
}

#define OWN_PAIRS (HEAD_DIM / 64)

// Gradients of the chains' own keys and values of step `slot`, from the queries of that and later steps; a warp for each
// (chain, key head).
extern "C" __global__ void __launch_bounds__(256)
    attention_own_gradient(const bf16* qkv, int chains, int slot, int steps, const bf16* slopes, const float* log_sums,
                           const float* means, bf16* grad, float scale) {
    int number = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    int chain = number / KEY_HEADS, key_head = number % KEY_HEADS;
    if (chain >= chains) return;
    i64 own = ((i64)slot * chains + chain) * WIDTH + key_head * HEAD_DIM;
    u32 key[OWN_PAIRS], value[OWN_PAIRS];
    float key_sum[OWN_PAIRS][2], value_sum[OWN_PAIRS][2];
#pragma unroll
    for (int i = 0; i < OWN_PAIRS; i++) {
        key[i] = *reinterpret_cast<const u32*>(qkv + own + KEYS_AT + (i * 32 + lane) * 2);
        value[i] = *reinterpret_cast<const u32*>(qkv + own + VALUES_AT + (i * 32 + lane) * 2);
        key_sum[i][0] = key_sum[i][1] = value_sum[i][0] = value_sum[i][1] = 0.0f;
    }
    for (int step = slot; step < steps; step++) {
#pragma unroll
        for (int member = 0; member < GROUP; member++) {
            int head = key_head * GROUP + member;
            i64 at = (i64)step * chains + chain;
            i64 stat = ((i64)step * HEADS + head) * chains + chain;
            u32 query[OWN_PAIRS], slope[OWN_PAIRS];
            float score = 0.0f, slant = 0.0f;
#pragma unroll
            for (int i = 0; i < OWN_PAIRS; i++) {
                int column = head * HEAD_DIM + (i * 32 + lane) * 2;
                query[i] = *reinterpret_cast<const u32*>(qkv + at * WIDTH + column);
                slope[i] = *reinterpret_cast<const u32*>(slopes + at * (HEADS * HEAD_DIM) + column);
                score += low_of(query[i]) * low_of(key[i]) + high_of(query[i]) * high_of(key[i]);
                slant += low_of(slope[i]) * low_of(value[i]) + high_of(slope[i]) * high_of(value[i]);
            }
            float weight = power2(warp_sum(score) * (scale * LOG2E) - log_sums[stat]);
            float factor = weight * (warp_sum(slant) - means[stat]) * scale;
#pragma unroll
            for (int i = 0; i < OWN_PAIRS; i++) {
                key_sum[i][0] += factor * low_of(query[i]);
                key_sum[i][1] += factor * high_of(query[i]);
                value_sum[i][0] += weight * low_of(slope[i]);
                value_sum[i][1] += weight * high_of(slope[i]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < OWN_PAIRS; i++) {
        *reinterpret_cast<u32*>(grad + own + KEYS_AT + (i * 32 + lane) * 2) = pack(key_sum[i][0], key_sum[i][1]);
        *reinterpret_cast<u32*>(grad + own + VALUES_AT + (i * 32 + lane) * 2) = pack(value_sum[i][0], value_sum[i][1]);
    }
}

// out[t] = the sum over steps k of row t - k of step k: what the embedding of chain t's first token did at all steps that
// embed it. Keys and values from step `first_key_step` on. Rows of another document are 0, being unsupervised.
extern "C" __global__ void __launch_bounds__(256)
    sum_shifted(const bf16* grad, int chains, int steps, int first_key_step, bf16* out) {
    int chain = blockIdx.x;
    for (int column = threadIdx.x * 8; column < WIDTH; column += 256 * 8) {
        Eight sum;
#pragma unroll
        for (int j = 0; j < 8; j++) sum.v[j] = 0.0f;
        int last = steps - 1 < chain ? steps - 1 : chain;
        for (int step = column < KEYS_AT ? 0 : first_key_step; step <= last; step++) {
            Eight more = load8(grad + ((i64)step * chains + chain - step) * WIDTH + column);
#pragma unroll
            for (int j = 0; j < 8; j++) sum.v[j] += more.v[j];
        }
        store8(out + (i64)chain * WIDTH + column, sum);
    }
}
