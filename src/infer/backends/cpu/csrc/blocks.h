// Linear layers over weights in blocks of 32 with their own scales (GGUF's Q8_0, Q4_0, Q4_1), as they are stored.
//
// Sixteen rows lie side by side: tile = for each block its quants, then for each block its sixteen fp16 scales (and
// minimums). In a block's quants, lane r of vector j holds four neighbouring weights of row r as bytes; a 4-bit vector
// holds weights 4j .. in its low and 16 + 4j .. in its high halves. Activations become int8 with one scale per 32.
// Sums within a block are exact integers; blocks are added in order: bits do not depend on the batch or the threads.
#pragma once

#include "pool.h"
#include "simd.h"

namespace infer {

enum BlockKind { Q8_0 = 0, Q4_0 = 1, Q4_1 = 2 };
constexpr int QK = 32;

struct BlockFormat {
    int quant_bytes;   // of one block of sixteen rows
    int scale_sets;    // sixteen fp16 each
    int row_bytes;     // of one block of one row, as stored
};

static inline BlockFormat block_format(int kind) {
    if (kind == Q8_0) return {512, 1, 34};
    if (kind == Q4_0) return {256, 1, 18};
    return {256, 2, 20};
}

static inline int64_t tile_bytes(int kind, int64_t blocks) {
    BlockFormat f = block_format(kind);
    return blocks * (f.quant_bytes + 32 * f.scale_sets);
}

static inline float half_to_float(uint16_t h) {
    uint32_t sign = uint32_t(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, fraction = h & 0x3ffu, bits;
    if (exponent == 31) {
        bits = sign | 0x7f800000u | fraction << 13;
    } else if (exponent) {
        bits = sign | (exponent + 112u) << 23 | fraction << 13;
    } else {
        float small = float(fraction) * 5.9604644775390625e-8f;  // 2^-24
        std::memcpy(&bits, &small, 4);
        bits |= sign;
    }
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

static inline vf load_halves(const void* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#else
    uint16_t h[W];
    std::memcpy(h, p, sizeof h);
    vf v;
    for (int i = 0; i < W; ++i) v[i] = half_to_float(h[i]);
    return v;
#endif
}

// acc + four products of unsigned weight bytes with signed activation bytes, per lane.
static inline vi dot_bytes(vi acc, vu weights, int32_t four) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)weights, _mm512_set1_epi32(four));
#else
    for (int i = 0; i < 4; ++i) acc += (vi)((weights >> (8 * i)) & 0xffu) * int32_t(int8_t(uint32_t(four) >> (8 * i)));
    return acc;
#endif
}

// A token's activations in int8. `sums` are of the quants of each block.
struct Quantized {
    const int8_t* quants;
    const float* scales;
    const int32_t* sums;
};

template <class T>
static inline void quantize_row(const T* x, int64_t blocks, int8_t* quants, float* scales, int32_t* sums) {
    for (int64_t b = 0; b < blocks; ++b) {
        vf lo = load(x + b * QK), hi = load(x + b * QK + W);
        vf top = vmax(lo < 0.0f ? -lo : lo, hi < 0.0f ? -hi : hi);
        float amax = max_of(top);
        float scale = amax / 127.0f;
        float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
        vf magic = splat(12582912.0f);
        vi a = __builtin_convertvector((lo * inverse + magic) - magic, vi);
        vi c = __builtin_convertvector((hi * inverse + magic) - magic, vi);
        typedef int8_t b16 __attribute__((vector_size(16)));
        b16 qa = __builtin_convertvector(a, b16), qc = __builtin_convertvector(c, b16);
        std::memcpy(quants + b * QK, &qa, 16);
        std::memcpy(quants + b * QK + 16, &qc, 16);
        vi both = a + c;
        int32_t total = 0;
        for (int i = 0; i < W; ++i) total += both[i];
        scales[b] = scale;
        sums[b] = total;
    }
}

template <int KIND, int M, int N, class Out>
static inline void blocks_block(const Quantized* x, const uint8_t* w, int64_t blocks, int64_t tile, vf* bias, Out* const* y,
                                bool ahead) {
    constexpr int BYTES = KIND == Q8_0 ? 512 : 256, SETS = KIND == Q4_1 ? 2 : 1;
    vf out[M][N];
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) out[m][n] = splat(0.0f);
    const uint8_t* scales = w + blocks * BYTES;
    for (int64_t b = 0; b < blocks; ++b) {
        vi acc[M][N];
        for (int m = 0; m < M; ++m) {
            int32_t start = KIND == Q8_0 ? -128 * x[m].sums[b] : KIND == Q4_0 ? -8 * x[m].sums[b] : 0;
            for (int n = 0; n < N; ++n) acc[m][n] = start + vi{};
        }
        const uint8_t* block = w + b * BYTES;
        for (int j = 0; j < BYTES / 64; ++j) {
            vu raw[N];
            for (int n = 0; n < N; ++n) {
                raw[n] = load_as<vu>(block + n * tile + j * 64);
                if (ahead) __builtin_prefetch(block + (n + N) * tile + j * 64, 0, 2);
            }
            for (int half = 0; half < (KIND == Q8_0 ? 1 : 2); ++half) {
                vu part[N];
                for (int n = 0; n < N; ++n)
                    part[n] = KIND == Q8_0 ? raw[n] : half ? (raw[n] >> 4) & 0x0f0f0f0fu : raw[n] & 0x0f0f0f0fu;
                for (int m = 0; m < M; ++m) {
                    int32_t four;
                    std::memcpy(&four, x[m].quants + b * QK + 16 * half + 4 * j, 4);
                    for (int n = 0; n < N; ++n) acc[m][n] = dot_bytes(acc[m][n], part[n], four);
                }
            }
        }
        for (int n = 0; n < N; ++n) {
            const uint8_t* place = scales + n * tile + b * SETS * 32;
            vf scale = load_halves(place);
            for (int m = 0; m < M; ++m)
                out[m][n] = __builtin_convertvector(acc[m][n], vf) * (scale * x[m].scales[b]) + out[m][n];
            if (KIND == Q4_1) {
                vf low = load_halves(place + 32);
                for (int m = 0; m < M; ++m) out[m][n] = low * (x[m].scales[b] * float(x[m].sums[b])) + out[m][n];
            }
        }
    }
    for (int n = 0; n < N; ++n)
        for (int m = 0; m < M; ++m) store(y[m] + n * W, out[m][n] + bias[n]);
}

}  // namespace infer
