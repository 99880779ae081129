// The inner loops of attention for one compute dtype: products of queries and keys, sums of weighted values.
//
// A "word" is 32 bits: one fp32, or two bf16 that a dot product takes at once. Each number is summed up in the order of
// the words of a head, or of the keys, whatever is computed beside it.
#pragma once

#include <algorithm>

#include "fp8.h"
#include "simd.h"

namespace infer {

constexpr int GROUP = 16;      // neighbouring keys; where they lie in one block they are read in place
constexpr int CHUNK = 64;      // keys whose transposed words lie in scratch at a time
constexpr int SPLIT = 128;     // keys per partial result
constexpr int VALUE_PAD = 32;  // values are computed in pieces of this many elements
constexpr int MOST_ROWS = 6;   // query rows whose sums are in registers at a time

// Where keys or values of one head lie: the first of GROUP, and the bytes from one to the next.
struct Rows {
    const char* first;
    int64_t step;
};

// What will be read next, fetched into the cache in the order of addresses and in small portions beside the arithmetic: the
// hardware follows neighbouring lines, not heads of tokens, and a burst would wait for itself.
struct Ahead {
    const char* first[CHUNK / GROUP];
    int64_t pieces = 0, bytes = 0, portion = 0;  // bytes: of one piece
    int64_t piece = 0, at = 0;

    void some() {
        for (int64_t left = portion; left > 0 && piece < pieces;) {
            const char* from = first[piece] + at;
            int64_t count = std::min(left, bytes - at);
            for (int64_t i = 0; i < count; i += 64) __builtin_prefetch(from + i, 0, 2);  // into L2
            at += count;
            left -= count;
            if (at >= bytes) at = 0, ++piece;
        }
    }
};

template <class T>
struct Words;

template <>
struct Words<float> {
    static constexpr int SIZE = 1;  // elements of a word
    static inline vf step(vf acc, uint32_t one, vu many) {
        float x;
        std::memcpy(&x, &one, 4);
        return splat(x) * (vf)many + acc;
    }
    // Values of 32 elements of one key.
    static inline void values(const char* at, int64_t, vu* out) {
        out[0] = load_as<vu>(at);
        out[1] = load_as<vu>(at + 64);
    }
    // Stores the weights of 32 keys and adds them to `sum`.
    static inline vf weights(float* to, vf a, vf b, vf sum) {
        store(to, a);
        store(to + W, b);
        return sum + a + b;
    }
    static inline void in_order(vf& a, vf& b) { (void)a, (void)b; }
};

template <>
struct Words<bf16> {
    static constexpr int SIZE = 2;
    static inline vf step(vf acc, uint32_t one, vu many) { return DotBF16::step(acc, one + vu{}, many); }
    // Values of 32 elements of two keys, as pairs; within 128 bits, as x86 interleaves.
    static inline void values(const char* at, int64_t step, vu* out) {
        vw a = load_as<vw>(at), b = load_as<vw>(at + step);
        out[0] = (vu)__builtin_shufflevector(a, b, 0, 32, 1, 33, 2, 34, 3, 35, 8, 40, 9, 41, 10, 42, 11, 43, 16, 48, 17, 49,
                                             18, 50, 19, 51, 24, 56, 25, 57, 26, 58, 27, 59);
        out[1] = (vu)__builtin_shufflevector(a, b, 4, 36, 5, 37, 6, 38, 7, 39, 12, 44, 13, 45, 14, 46, 15, 47, 20, 52, 21, 53,
                                             22, 54, 23, 55, 28, 60, 29, 61, 30, 62, 31, 63);
    }
    static inline vf weights(bf16* to, vf a, vf b, vf sum) {
#if defined(__AVX512BF16__)
        vu pairs = (vu)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
#else
        vh low = round_bf16(a), high = round_bf16(b);
        vu pairs;
        std::memcpy(&pairs, &low, sizeof low);
        std::memcpy((char*)&pairs + sizeof low, &high, sizeof high);
#endif
        std::memcpy(to, &pairs, sizeof pairs);
        return DotBF16::step(sum, pairs, vu{} + 0x3f803f80u);  // times one: what is divided by is what was added up
    }
    static inline void in_order(vf& a, vf& b) {
        vf first = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        b = __builtin_shufflevector(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
        a = first;
    }
};

// Sixteen rows of sixteen words -> sixteen vectors, one word of every row each.
static inline void transpose(const char* first, int64_t step, vu* out) {
#if defined(__AVX512F__)
    __m512i rows[4][4];
    for (int i = 0; i < 4; ++i, first += step)
        for (int quad = 0; quad < 4; ++quad) {
            auto piece = [&](int row) { return _mm_loadu_si128((const __m128i*)(first + row * step + 16 * quad)); };
            __m512i r = _mm512_castsi128_si512(piece(0));
            r = _mm512_mask_broadcast_i32x4(r, 0x00f0, piece(4));
            r = _mm512_mask_broadcast_i32x4(r, 0x0f00, piece(8));
            rows[quad][i] = _mm512_mask_broadcast_i32x4(r, 0xf000, piece(12));
        }
    for (int quad = 0; quad < 4; ++quad) {
        const __m512i* r = rows[quad];
        __m512i a = _mm512_unpacklo_epi32(r[0], r[1]), b = _mm512_unpackhi_epi32(r[0], r[1]);
        __m512i c = _mm512_unpacklo_epi32(r[2], r[3]), d = _mm512_unpackhi_epi32(r[2], r[3]);
        out[4 * quad] = (vu)_mm512_unpacklo_epi64(a, c);
        out[4 * quad + 1] = (vu)_mm512_unpackhi_epi64(a, c);
        out[4 * quad + 2] = (vu)_mm512_unpacklo_epi64(b, d);
        out[4 * quad + 3] = (vu)_mm512_unpackhi_epi64(b, d);
    }
#else
    typedef uint32_t vq __attribute__((vector_size(16)));
    for (int quad = 0; quad < 4; ++quad)
        for (int lane = 0; lane < 4; ++lane) {
            vq r[4];
            for (int i = 0; i < 4; ++i) r[i] = load_as<vq>(first + (4 * lane + i) * step + 16 * quad);
            vq a = __builtin_shufflevector(r[0], r[1], 0, 4, 1, 5), b = __builtin_shufflevector(r[0], r[1], 2, 6, 3, 7);
            vq c = __builtin_shufflevector(r[2], r[3], 0, 4, 1, 5), d = __builtin_shufflevector(r[2], r[3], 2, 6, 3, 7);
            vq word[4] = {__builtin_shufflevector(a, c, 0, 1, 4, 5), __builtin_shufflevector(a, c, 2, 3, 6, 7),
                          __builtin_shufflevector(b, d, 0, 1, 4, 5), __builtin_shufflevector(b, d, 2, 3, 6, 7)};
            for (int i = 0; i < 4; ++i) std::memcpy((char*)(out + 4 * quad + i) + 16 * lane, &word[i], 16);
        }
#endif
}

// out[r * stride + g * 16 ..] = products of query row r with the keys of group g; keys[g * words + word].
template <class T, int R>
static inline void products(const uint32_t* queries, const vu* keys, int64_t words, int groups, float* out, int64_t stride) {
    if (groups == 4) {
        vf acc[R][4];
        for (auto& row : acc)
            for (auto& sum : row) sum = splat(0.0f);
        for (int64_t word = 0; word < words; ++word)
            for (int r = 0; r < R; ++r)
                for (int g = 0; g < 4; ++g)
                    acc[r][g] = Words<T>::step(acc[r][g], queries[r * words + word], keys[g * words + word]);
        for (int r = 0; r < R; ++r)
            for (int g = 0; g < 4; ++g) store(out + r * stride + g * W, acc[r][g]);
        return;
    }
    for (int g = 0; g < groups; ++g) {
        vf acc[R];
        for (auto& sum : acc) sum = splat(0.0f);
        for (int64_t word = 0; word < words; ++word)
            for (int r = 0; r < R; ++r) acc[r] = Words<T>::step(acc[r], queries[r * words + word], keys[g * words + word]);
        for (int r = 0; r < R; ++r) store(out + r * stride + g * W, acc[r]);
    }
}

// sums[r * stride + ..] += weights of row r times the values of `groups` groups; N * 16 elements from `at` on.
template <class T, int R, int N>
static inline void weighted(const uint32_t* weights, int64_t weight_stride, const Rows* rows, int64_t at, int groups,
                            float* sums, int64_t stride, Ahead& ahead) {
    constexpr int STEPS = GROUP / Words<T>::SIZE;
    vf acc[R][N];
    for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n) acc[r][n] = load(sums + r * stride + n * W);
    for (int g = 0; g < groups; ++g) {
        ahead.some();
        const char* value_row = rows[g].first + at * sizeof(T);
        for (int step = 0; step < STEPS; ++step, value_row += rows[g].step * Words<T>::SIZE) {
            vu value[N];
            for (int n = 0; n < N; n += 2) Words<T>::values(value_row + n * W * sizeof(T), rows[g].step, value + n);
            for (int r = 0; r < R; ++r)
                for (int n = 0; n < N; ++n)
                    acc[r][n] = Words<T>::step(acc[r][n], weights[r * weight_stride + g * STEPS + step], value[n]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n) store(sums + r * stride + n * W, acc[r][n]);
}

// Calls body(first row, std::integral_constant<int, rows>) for pieces of at most MOST_ROWS rows, as even as can be.
template <class F>
static inline void in_pieces(int64_t count, F&& body) {
    int64_t left = (count + MOST_ROWS - 1) / MOST_ROWS;
    for (int64_t row = 0; row < count; --left) {
        int64_t rows = (count - row + left - 1) / left;
        switch (rows) {
            case 1: body(row, std::integral_constant<int, 1>{}); break;
            case 2: body(row, std::integral_constant<int, 2>{}); break;
            case 3: body(row, std::integral_constant<int, 3>{}); break;
            case 4: body(row, std::integral_constant<int, 4>{}); break;
            case 5: body(row, std::integral_constant<int, 5>{}); break;
            default: body(row, std::integral_constant<int, 6>{}); break;
        }
        row += rows;
    }
}

static inline float top_of(vf v) {
    vf a = vmax(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    a = vmax(a, __builtin_shufflevector(a, a, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    a = vmax(a, __builtin_shufflevector(a, a, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    return a[0] > a[1] ? a[0] : a[1];
}

}  // namespace infer
