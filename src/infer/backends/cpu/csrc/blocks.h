// Linear layers over weights in the blocks of a GGUF, as block_format.h lays them out.
//
// Activations become int8 with one scale per 32 columns. Sums within 32 (or 16) columns are exact integers and are added
// as floats in the order of columns, one accumulator per output: bits do not depend on the batch or the threads.
#pragma once

#include "block_format.h"
#include "packed.h"

namespace infer {

// 32 activations of a token. What its quants sum up to, in halves if the weights have two scales: times minus the offset
// of the weights, or for weights with a minimum times the scale.
struct Activations {
    int8_t quants[QK];
    float scale;
    union {
        int32_t start[2];
        float sum[2];
    };
};

// acc + four products of unsigned weight bytes with signed activation bytes, per lane.
static inline vi dot_bytes(vi acc, vu weights, int32_t four) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)weights, _mm512_set1_epi32(four));
#else
    for (int i = 0; i < 4; ++i) acc += (vi)((weights >> (8 * i)) & 0xffu) * int32_t(int8_t(uint32_t(four) >> (8 * i)));
    return acc;
#endif
}

static inline int32_t total(vi v) {
    v += __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    return v[0] + v[1];
}

static inline float largest(vf v) {
    v = vmax(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    v = vmax(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    v = vmax(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    return v[0] > v[1] ? v[0] : v[1];
}

// x [columns] for weights of one kind.
template <class T>
static inline void quantize_row(BlockFormat f, const T* x, int64_t columns, Activations* out) {
    vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    typedef int8_t b16 __attribute__((vector_size(16)));
    for (int64_t b = 0; b < columns / QK; ++b) {
        Activations& a = out[b];
        vf lo = load(x + b * QK), hi = load(x + b * QK + W);
        a.scale = largest(vmax(lo < 0.0f ? -lo : lo, hi < 0.0f ? -hi : hi)) / 127.0f;
        float inverse = a.scale > 0.0f ? 1.0f / a.scale : 0.0f;
        vi first = __builtin_convertvector((lo * inverse + magic) - magic, vi);
        vi second = __builtin_convertvector((hi * inverse + magic) - magic, vi);
        b16 q = __builtin_convertvector(first, b16), r = __builtin_convertvector(second, b16);
        std::memcpy(a.quants, &q, W);
        std::memcpy(a.quants + W, &r, W);
        int32_t sums[2] = {total(f.parts == 1 ? first + second : first), f.parts == 1 ? 0 : total(second)};
        for (int h = 0; h < 2; ++h) {
            if (f.minimum)
                a.sum[h] = a.scale * float(sums[h]);
            else
                a.start[h] = -f.offset * sums[h];
        }
    }
}

// Scales as they lie in the headers of blocks of 32 columns.
template <int KIND>
struct StoredScales {
    const uint8_t* heads;
    int64_t tile;
    inline void get(int64_t b, int n, vf* scale, vf* low) const {
        scales_of<KIND>(heads + n * tile + b * head_bytes(BLOCK_FORMATS[KIND]), 0, scale, low);
    }
};

// Scales that read_scales has made of the headers of larger blocks.
template <int KIND, int N>
struct ReadScales {
    static constexpr int PARTS = BLOCK_FORMATS[KIND].parts, EACH = PARTS * (1 + BLOCK_FORMATS[KIND].minimum);
    const float* scales;
    inline void get(int64_t b, int n, vf* scale, vf* low) const {
        const float* place = scales + (b * N + n) * EACH * W;
        for (int h = 0; h < PARTS; ++h) {
            scale[h] = load(place + h * W);
            if (EACH > PARTS) low[h] = load(place + (PARTS + h) * W);
        }
    }
};

template <int KIND, int N>
static inline void read_scales(const uint8_t* heads, int64_t blocks, int64_t tile, float* out) {
    typedef ReadScales<KIND, N> Read;
    constexpr int PER = BLOCK_FORMATS[KIND].columns / QK;
    for (int64_t b = 0; b < blocks; b += PER)
        for (int n = 0; n < N; ++n) {
            const uint8_t* head = heads + n * tile + b / PER * head_bytes(BLOCK_FORMATS[KIND]);
#pragma GCC unroll 8
            for (int part = 0; part < PER; ++part) {
                vf scale[2], low[2];
                scales_of<KIND>(head, part, scale, low);
                float* place = out + ((b + part) * N + n) * Read::EACH * W;
                for (int h = 0; h < Read::PARTS; ++h) {
                    store(place + h * W, scale[h]);
                    if (BLOCK_FORMATS[KIND].minimum) store(place + (Read::PARTS + h) * W, low[h]);
                }
            }
        }
}

// M tokens x N tiles. Lines of the next N tiles are called into the second cache if `ahead`.
template <int KIND, int M, int N, class Scales>
static inline void block_product(const Activations* const* x, const uint8_t* w, int64_t blocks, int64_t tile,
                                 const Scales& scales, bool ahead, vf (*result)[N]) {
    constexpr BlockFormat F = BLOCK_FORMATS[KIND];
    constexpr int BYTES = quant_bytes(F), EACH = 8 / F.parts;
    vf out[M][N];
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) out[m][n] = splat(0.0f);
    for (int64_t b = 0; b < blocks; ++b) {
        const uint8_t* quants = w + b * BYTES;
        if (ahead)
            for (int n = 0; n < N; ++n)
                for (int i = 0; i < BYTES; i += 64) __builtin_prefetch(quants + (n + N) * tile + i, 0, 2);
#pragma GCC unroll 2
        for (int h = 0; h < F.parts; ++h) {
            vi acc[M][N];
            for (int m = 0; m < M; ++m)
                for (int n = 0; n < N; ++n) acc[m][n] = (F.minimum ? 0 : x[m][b].start[h]) + vi{};
#pragma GCC unroll 8
            for (int j = 0; j < EACH; ++j) {
                int i = F.parts == 1 && F.low == 4 ? j / 2 + j % 2 * 4 : h * EACH + j;  // both halves of a byte in turn
                vu part[N];
                for (int n = 0; n < N; ++n) part[n] = weights_of<F.low, F.high>(quants + n * tile, i);
                for (int m = 0; m < M; ++m) {
                    int32_t four;
                    std::memcpy(&four, x[m][b].quants + 4 * i, 4);
                    for (int n = 0; n < N; ++n) acc[m][n] = dot_bytes(acc[m][n], part[n], four);
                }
            }
            for (int n = 0; n < N; ++n) {
                vf scale[2], low[2];
                scales.get(b, n, scale, low);
                for (int m = 0; m < M; ++m) {
                    out[m][n] = floats(acc[m][n]) * (scale[h] * x[m][b].scale) + out[m][n];
                    if (F.minimum) out[m][n] = low[h] * x[m][b].sum[h] + out[m][n];
                }
            }
        }
    }
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) result[m][n] = out[m][n];
}

// Floats of scratch that block_tiles takes.
static inline int64_t block_scratch(int64_t columns) { return columns / QK * TILES * 4 * W; }

// Tiles first .. last (of sixteen rows) against all tokens, given by pointers: y[m][n] is output n of token m.
template <class T, class Out>
void block_tiles(int kind, const Activations* const* x, int64_t tokens, const uint8_t* w, int64_t columns, const T* bias,
                 Out* const* y, int64_t first, int64_t last, float* scratch);

}  // namespace infer
