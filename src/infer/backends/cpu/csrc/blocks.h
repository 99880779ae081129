// Linear layers over weights in the blocks of a GGUF, as block_format.h lays them out.
//
// Activations become int8 with one scale per 32 columns. Sums within 32 (or 16) columns are exact integers and are added
// as floats in the order of columns, one accumulator per output: bits do not depend on the batch or the threads.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

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

#if defined(__AVX2__) && !defined(__AVX512VNNI__)
// Eight lanes of dot_bytes. Pairs of products fit into 16 bits as long as a weight has no more than seven.
template <int BITS>
static inline __m256i dot_half(__m256i acc, __m256i weights, __m256i four) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i low = BITS < 8 ? weights : _mm256_and_si256(weights, _mm256_set1_epi8(127));
    acc = _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(low, four), ones));
    if (BITS < 8) return acc;
    __m256i top = _mm256_and_si256(_mm256_srli_epi16(weights, 7), _mm256_set1_epi8(1));
    return _mm256_add_epi32(acc, _mm256_slli_epi32(_mm256_madd_epi16(_mm256_maddubs_epi16(top, four), ones), 7));
}
#endif

// acc + four products of unsigned weight bytes of so many bits with signed activation bytes, per lane.
template <int BITS>
static inline vi dot_bytes(vi acc, vu weights, int32_t four) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)weights, _mm512_set1_epi32(four));
#elif defined(__AVX2__)
    __m256i sums[2], bytes[2], x = _mm256_set1_epi32(four);
    std::memcpy(sums, &acc, sizeof sums);
    std::memcpy(bytes, &weights, sizeof bytes);
    for (int i = 0; i < 2; ++i) sums[i] = dot_half<BITS>(sums[i], bytes[i], x);
    std::memcpy(&acc, sums, sizeof sums);
    return acc;
#else
    for (int i = 0; i < 4; ++i) acc += (vi)((weights >> (8 * i)) & 0xffu) * int32_t(int8_t(uint32_t(four) >> (8 * i)));
    return acc;
#endif
}

typedef int32_t vi8 __attribute__((vector_size(32)));
typedef int32_t vi4 __attribute__((vector_size(16)));

// All sixteen lanes folded by `join`, whose order must not matter.
template <class Join>
static inline int32_t fold(vi v, Join join) {
    vi8 a = join(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7), __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15));
    vi4 b = join(__builtin_shufflevector(a, a, 0, 1, 2, 3), __builtin_shufflevector(a, a, 4, 5, 6, 7));
    b = join(b, __builtin_shufflevector(b, b, 2, 3, 0, 1));
    b = join(b, __builtin_shufflevector(b, b, 1, 0, 3, 2));
    return b[0];
}

static inline int32_t total(vi v) {
    return fold(v, [](auto a, auto b) { return a + b; });
}

// Bits of numbers without a sign are ordered like the numbers; a NaN is above all of them.
static inline float largest(vi bits) {
    int32_t best = fold(bits, [](auto a, auto b) { return a > b ? a : b; });
    float f;
    std::memcpy(&f, &best, 4);
    return f;
}

// The low byte of each lane.
static inline void store_bytes(int8_t* p, vi v) {
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)v));
#else
    for (int i = 0; i < W; ++i) p[i] = int8_t(v[i]);
#endif
}

// x [columns] for weights of one kind.
template <class T>
static inline void quantize_row(BlockFormat f, const T* x, int64_t columns, Activations* out) {
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, which is in the low bits then
    for (int64_t b = 0; b < columns / QK; ++b) {
        Activations& a = out[b];
        vf lo = load(x + b * QK), hi = load(x + b * QK + W);
        vi first = (vi)lo & 0x7fffffff, second = (vi)hi & 0x7fffffff;
        a.scale = largest(first > second ? first : second) / 127.0f;
        float inverse = a.scale > 0.0f ? 1.0f / a.scale : 0.0f;
        first = (vi)(lo * inverse + magic) - (vi)magic;
        second = (vi)(hi * inverse + magic) - (vi)magic;
        store_bytes(a.quants, first);
        store_bytes(a.quants + W, second);
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

// Memory to call into the second cache while a product runs: so many lines of 64 bytes with every 32 columns.
struct Ahead {
    const uint8_t* from;
    int lines;
};

// M tokens x N tiles.
template <int KIND, int M, int N, class Scales>
static inline void block_product(const Activations* const* x, const uint8_t* w, int64_t blocks, int64_t tile,
                                 const Scales& scales, Ahead ahead, vf (*result)[N]) {
    constexpr BlockFormat F = BLOCK_FORMATS[KIND];
    constexpr int BYTES = quant_bytes(F), EACH = 8 / F.parts;
    vf out[M][N];
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) out[m][n] = splat(0.0f);
    int64_t b = 0;
    do {  // there is at least one, and sums stay in registers
        const uint8_t* quants = w + b * BYTES;
        for (int i = 0; i < ahead.lines; ++i) __builtin_prefetch(ahead.from + (b * ahead.lines + i) * 64, 0, 2);
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
                    for (int n = 0; n < N; ++n) acc[m][n] = dot_bytes<F.low + F.high>(acc[m][n], part[n], four);
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
    } while (++b < blocks);
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
