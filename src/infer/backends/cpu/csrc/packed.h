// y[m, n] = sum over k of x[m, k] * w[n, k] for packed weights: sixteen rows side by side, lane = row.
//
// Packed order is [n / 16][k / P][16][P]: P = 1 for fp32, 2 for bf16 (the pair of one dot-product lane). Every output is
// one lane of one accumulator over k in order: no sum across lanes, no split of k. Its bits therefore do not depend on
// the number of tokens or threads, and weights stream through in the order they lie in memory.
#pragma once

#include "pool.h"
#include "simd.h"

namespace infer {

constexpr int TILES = 3;   // tiles of sixteen rows that pass together
constexpr int TM = 8;      // tokens of a block: 24 accumulators
constexpr int TMB = 24;    // tokens whose x stays in the first cache while a panel of weights passes

template <class T>
struct Lane;

template <>
struct Lane<float> {
    static constexpr int P = 1;
    static inline vf step(vf acc, vf w, const float* x) { return w * x[0] + acc; }
};

template <>
struct Lane<bf16> {
    static constexpr int P = 2;
    static inline vf step(vf acc, vf w, const bf16* x) {
        uint32_t pair;
        std::memcpy(&pair, x, 4);
        return DotBF16::step(acc, (vu)w, pair + vu{});
    }
};

template <class T, int M, int N, class Out>
static inline void tile_block(const T* const* x, const T* w, int64_t k, const T* bias, Out* const* y, bool ahead) {
    constexpr int P = Lane<T>::P;
    const int64_t tile = k * W;
    vf acc[M][N];
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) acc[m][n] = splat(0.0f);
    for (int64_t i = 0; i < k; i += P) {
        vf wv[N];
        for (int n = 0; n < N; ++n) {
            const T* place = w + n * tile + i * W;
            wv[n] = load_as<vf>(place);
            if (ahead) __builtin_prefetch(place + N * tile, 0, 2);
        }
        for (int m = 0; m < M; ++m)
            for (int n = 0; n < N; ++n) acc[m][n] = Lane<T>::step(acc[m][n], wv[n], x[m] + i);
    }
    for (int n = 0; n < N; ++n) {
        vf add = bias ? load(bias + n * W) : splat(0.0f);
        for (int m = 0; m < M; ++m) store(y[m] + n * W, acc[m][n] + add);
    }
}

template <class T, int N, class Out>
static inline void tile_tokens(const T* const* x, int64_t tokens, const T* w, int64_t k, const T* bias, Out* const* y,
                               int64_t column) {
    for (int64_t m = 0; m < tokens;) {
        int64_t left = tokens - m;
        int here = int(left <= TM ? left : left < 2 * TM ? (left + 1) / 2 : TM);
        Out* out[TM];
        for (int r = 0; r < here; ++r) out[r] = y[m + r] + column;
        bool ahead = m == 0;
        switch (here) {
            case 1: tile_block<T, 1, N>(x + m, w, k, bias, out, ahead); break;
            case 2: tile_block<T, 2, N>(x + m, w, k, bias, out, ahead); break;
            case 3: tile_block<T, 3, N>(x + m, w, k, bias, out, ahead); break;
            case 4: tile_block<T, 4, N>(x + m, w, k, bias, out, ahead); break;
            case 5: tile_block<T, 5, N>(x + m, w, k, bias, out, ahead); break;
            case 6: tile_block<T, 6, N>(x + m, w, k, bias, out, ahead); break;
            case 7: tile_block<T, 7, N>(x + m, w, k, bias, out, ahead); break;
            default: tile_block<T, 8, N>(x + m, w, k, bias, out, ahead); break;
        }
        m += here;
    }
}

// Tiles first .. last (of sixteen rows) against all tokens.
template <class T, class Out>
void packed_tiles(const T* const* x, int64_t tokens, const T* w, int64_t k, const T* bias, Out* const* y, int64_t first,
                  int64_t last) {
    for (int64_t m0 = 0; m0 < tokens; m0 += TMB) {
        int64_t count = tokens - m0 < TMB ? tokens - m0 : TMB;
        int64_t t = first;
        for (; t + TILES <= last; t += TILES)
            tile_tokens<T, TILES, Out>(x + m0, count, w + t * W * k, k, bias ? bias + t * W : nullptr, y + m0, t * W);
        for (; t < last; ++t)
            tile_tokens<T, 1, Out>(x + m0, count, w + t * W * k, k, bias ? bias + t * W : nullptr, y + m0, t * W);
    }
}

// How the tiles of a product are cut into tasks. Few tokens: weights pass once, and what a task calls ahead at its end is for
// nobody, so there are two for each thread. Many: weights of a task stay in the cache. Outputs of a task in bf16 fill whole
// cache lines, if that leaves a task for each thread: two threads never write to the same one, which costs most where they
// share no cache.
struct Portions {
    int64_t tiles, unit, count;

    Portions(int64_t tokens, int64_t tiles, int threads) : tiles(tiles), unit(tiles >= 2 * TILES * threads ? 2 * TILES : TILES) {
        count = tiles < unit ? 1 : tiles / unit;
        if (tokens <= TMB && count > 2 * threads) count = 2 * threads;
    }
    int64_t begin(int64_t task) const {
        return task == count ? tiles : (2 * task * tiles + count * unit) / (2 * count * unit) * unit;
    }
};

template <class T, class Out>
void packed_linear(Pool& pool, const T* const* x, int64_t tokens, const T* w, int64_t n, int64_t k, const T* bias,
                   Out* const* y) {
    Portions portions(tokens, n / W, pool.size());
    auto body = [&](int64_t task, int) {
        packed_tiles<T, Out>(x, tokens, w, k, bias, y, portions.begin(task), portions.begin(task + 1));
    };
    parallel(pool, portions.count, body);
}

}  // namespace infer
