#include "blocks.h"

#include "api.h"

namespace infer {

constexpr int BM = 4;  // tokens of a block: 4 x 3 sums of integers and as many of floats

template <int KIND, int N, class T, class Out, class Scales>
static inline void block_tokens(const Activations* const* x, int64_t tokens, const uint8_t* w, int64_t blocks, int64_t tile,
                                const Scales& scales, const T* bias, Out* const* y, int64_t column) {
    // The next tiles are called evenly over all passes, as far as whole lines allow.
    const int64_t passes = (tokens + BM - 1) / BM, lines = (N * tile + 63) / 64;
    const int each = int((lines + passes * blocks - 1) / (passes * blocks));
    int64_t called = 0;
    for (int64_t m = 0; m < tokens;) {
        int64_t left = tokens - m;
        int here = int(left <= BM ? left : left < 2 * BM ? (left + 1) / 2 : BM);
        vf result[BM][N];
        Ahead ahead = {w + N * tile + 64 * called, called < lines ? each : 0};
        called += each * blocks;
        switch (here) {
            case 1: block_product<KIND, 1, N>(x + m, w, blocks, tile, scales, ahead, result); break;
            case 2: block_product<KIND, 2, N>(x + m, w, blocks, tile, scales, ahead, result); break;
            case 3: block_product<KIND, 3, N>(x + m, w, blocks, tile, scales, ahead, result); break;
            default: block_product<KIND, 4, N>(x + m, w, blocks, tile, scales, ahead, result); break;
        }
        for (int n = 0; n < N; ++n) {
            vf add = bias ? load(bias + column + n * W) : splat(0.0f);
            for (int r = 0; r < here; ++r) store(y[m + r] + column + n * W, result[r][n] + add);
        }
        m += here;
    }
}

template <int KIND, int N, class T, class Out>
static void block_group(const Activations* const* x, int64_t tokens, const uint8_t* w, int64_t blocks, const T* bias,
                        Out* const* y, int64_t column, float* scratch) {
    constexpr BlockFormat F = BLOCK_FORMATS[KIND];
    const int64_t tile = tile_bytes(F, blocks * QK);
    const uint8_t* heads = w + blocks * quant_bytes(F);
    if constexpr (F.columns == QK) {
        block_tokens<KIND, N>(x, tokens, w, blocks, tile, StoredScales<KIND>{heads, tile}, bias, y, column);
    } else {
        read_scales<KIND, N>(heads, blocks, tile, scratch);
        block_tokens<KIND, N>(x, tokens, w, blocks, tile, ReadScales<KIND, N>{scratch}, bias, y, column);
    }
}

template <class T, class Out>
void block_tiles(int kind, const Activations* const* x, int64_t tokens, const uint8_t* w, int64_t columns, const T* bias,
                 Out* const* y, int64_t first, int64_t last, float* scratch) {
    with_kind(kind, [&](auto number) {
        constexpr int KIND = decltype(number)::value;
        const int64_t tile = tile_bytes(BLOCK_FORMATS[KIND], columns), blocks = columns / QK;
        int64_t t = first;
        for (; t + TILES <= last; t += TILES)
            block_group<KIND, TILES>(x, tokens, w + t * tile, blocks, bias, y, t * W, scratch);
        for (; t < last; ++t) block_group<KIND, 1>(x, tokens, w + t * tile, blocks, bias, y, t * W, scratch);
    });
}

template void block_tiles(int, const Activations* const*, int64_t, const uint8_t*, int64_t, const float*, float* const*,
                          int64_t, int64_t, float*);
template void block_tiles(int, const Activations* const*, int64_t, const uint8_t*, int64_t, const bf16*, float* const*,
                          int64_t, int64_t, float*);
template void block_tiles(int, const Activations* const*, int64_t, const uint8_t*, int64_t, const bf16*, bf16* const*,
                          int64_t, int64_t, float*);

// Whole lines, so that what lies behind does not share one.
static int64_t activation_bytes(int64_t tokens, int64_t columns) {
    return (tokens * (columns / QK) * int64_t(sizeof(Activations)) + 63) / 64 * 64;
}

template <class T, class Out>
static void block_linear(Pool& pool, int kind, const T* x, const uint8_t* w, const T* bias, Out* y, uint8_t* work,
                         int64_t tokens, int64_t n, int64_t k) {
    const int64_t blocks = k / QK;
    Activations* rows = (Activations*)work;
    float* scratch = (float*)(work + activation_bytes(tokens, k));
    std::vector<const Activations*> in(tokens);
    std::vector<Out*> out(tokens);
    for (int64_t m = 0; m < tokens; ++m) in[m] = rows + m * blocks, out[m] = y + m * n;
    auto quantize = [&](int64_t m) { quantize_row(BLOCK_FORMATS[kind], x + m * k, k, rows + m * blocks); };
    parallel_rows(pool, tokens, tokens < 8 ? tokens : 1, quantize);
    const Portions portions(tokens, n / W, pool.size());
    auto body = [&](int64_t task, int thread) {
        block_tiles(kind, in.data(), tokens, w, k, bias, out.data(), portions.begin(task), portions.begin(task + 1),
                    scratch + thread * block_scratch(k));
    };
    parallel(pool, portions.count, body);
}

}  // namespace infer

using namespace infer;

extern "C" int64_t infer_block_work(void* pool, int64_t tokens, int64_t k) {
    return activation_bytes(tokens, k) +
           static_cast<Pool*>(pool)->size() * block_scratch(k) * int64_t(sizeof(float));
}

extern "C" void infer_block_linear(void* pool, int dtype, int out_fp32, int kind, const void* x, const void* w,
                                   const void* bias, void* y, void* work, int64_t tokens, int64_t n, int64_t k) {
    Pool& p = *static_cast<Pool*>(pool);
    const uint8_t* weights = (const uint8_t*)w;
    uint8_t* space = (uint8_t*)work;
    if (dtype == FP32)
        block_linear(p, kind, (const float*)x, weights, (const float*)bias, (float*)y, space, tokens, n, k);
    else if (out_fp32)
        block_linear(p, kind, (const bf16*)x, weights, (const bf16*)bias, (float*)y, space, tokens, n, k);
    else
        block_linear(p, kind, (const bf16*)x, weights, (const bf16*)bias, (bf16*)y, space, tokens, n, k);
}
