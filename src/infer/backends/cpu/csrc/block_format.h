// Which block types of a GGUF are multiplied as they are stored, and how sixteen rows of them lie side by side.
//
// Tile of sixteen rows = for each 32 columns their quants, then for each block of the format its header (scales).
// Quants are unsigned: value = quant - offset. Lane r of a 64-byte vector holds bytes of row r. `low` bits of the quants
// of 32 columns fill `low` vectors, `high` more bits fill `high` vectors; weights_of says which bit lies where.
// A header is the fp16 numbers of sixteen rows, then the packed small scales, four bytes of each row or one at a time.
// A tile takes exactly the bytes that its rows take in the file.
#pragma once

#include <type_traits>

#include "simd.h"

namespace infer {

enum BlockKind { Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, Q2_K, Q3_K, BLOCK_KINDS };
constexpr int QK = 32;  // columns that share an activation scale

struct BlockFormat {
    int low, high;   // bits of a quant
    int offset;      // of the unsigned quants
    int parts;       // scales per 32 columns
    bool minimum;    // a number is added besides
    int columns;     // of one block
    int stored;      // its bytes, of one row
    int head;        // those that are no quants
    int halves;      // fp16 numbers that the header begins with
};

constexpr BlockFormat BLOCK_FORMATS[BLOCK_KINDS] = {
    {8, 0, 128, 1, false, 32, 34, 2, 1},     // Q8_0
    {4, 0, 8, 1, false, 32, 18, 2, 1},       // Q4_0
    {4, 0, 0, 1, true, 32, 20, 4, 2},        // Q4_1
    {4, 1, 16, 1, false, 32, 22, 2, 1},      // Q5_0
    {4, 1, 0, 1, true, 32, 24, 4, 2},        // Q5_1
    {4, 0, 0, 1, true, 256, 144, 16, 2},     // Q4_K
    {4, 1, 0, 1, true, 256, 176, 16, 2},     // Q5_K
    {4, 2, 32, 2, false, 256, 210, 18, 1},   // Q6_K
    {2, 0, 0, 2, true, 256, 84, 20, 2},      // Q2_K
    {2, 1, 4, 2, false, 256, 110, 14, 1},    // Q3_K
};

// `quant_bytes` of 32 columns of sixteen rows, `head_bytes` of one block of sixteen rows.
constexpr int64_t quant_bytes(BlockFormat f) { return 64 * (f.low + f.high); }
constexpr int64_t head_bytes(BlockFormat f) { return W * f.head; }
constexpr int64_t tile_bytes(BlockFormat f, int64_t columns) {
    return columns / QK * quant_bytes(f) + columns / f.columns * head_bytes(f);
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

static inline vf floats(vi v) { return __builtin_convertvector(v, vf); }
static inline vf floats(vu v) { return __builtin_convertvector((vi)v, vf); }

// Sixteen bytes, one of each row.
template <class Byte>
static inline vf load_bytes(const uint8_t* p) {
    typedef Byte bytes __attribute__((vector_size(16)));
    return floats(__builtin_convertvector(load_as<bytes>(p), vi));
}

// Quants 4i .. 4i + 3 of 32 columns (i = 0 .. 7): four bytes per row. `quants` is where those 32 columns begin.
template <int LOW, int HIGH>
static inline __attribute__((always_inline)) vu weights_of(const uint8_t* quants, int i) {
    if (LOW == 8) return load_as<vu>(quants + 64 * i);
    vu v;
    if (LOW == 4)
        v = (load_as<vu>(quants + 64 * (i % 4)) >> (i / 4 * 4)) & 0x0f0f0f0fu;
    else
        v = (load_as<vu>(quants + 64 * (i / 4)) >> (i % 4 * 2)) & 0x03030303u;
    if (HIGH) {
        constexpr int PER = HIGH ? 8 / HIGH : 1;
        constexpr uint32_t MASK = 0x01010101u * (((1u << HIGH) - 1u) << LOW);
        vu h = load_as<vu>(quants + 64 * (LOW + i / PER));
        int up = LOW - i % PER * HIGH;
        v |= (up >= 0 ? h << up : h >> -up) & MASK;
    }
    return v;
}

// The scales of 32 columns, `part` 0 .. 7 of a block whose header lies at `head`; and the numbers to add, with their sign.
template <int KIND>
static inline __attribute__((always_inline)) void scales_of(const uint8_t* head, int part, vf* scale, vf* low) {
    vf d = load_halves(head);
    if (KIND == Q8_0 || KIND == Q4_0 || KIND == Q5_0) {
        scale[0] = d;
    } else if (KIND == Q4_1 || KIND == Q5_1) {
        scale[0] = d;
        low[0] = load_halves(head + 32);
    } else if (KIND == Q4_K || KIND == Q5_K) {
        // Six bits each: of parts 4 .. 7 the low four are nibbles of the third word, the others lie on top of parts 0 .. 3.
        vu s = load_as<vu>(head + 64) >> (part % 4 * 8), m = load_as<vu>(head + 128) >> (part % 4 * 8);
        vu rest = load_as<vu>(head + 192) >> (part % 4 * 8);
        vu sc = part < 4 ? s & 63u : (rest & 15u) | ((s >> 2) & 48u);
        vu mn = part < 4 ? m & 63u : ((rest >> 4) & 15u) | ((m >> 2) & 48u);
        scale[0] = d * floats(sc);
        low[0] = -(load_halves(head + 32) * floats(mn));
    } else if (KIND == Q6_K) {
        for (int h = 0; h < 2; ++h) scale[h] = d * load_bytes<int8_t>(head + 32 + (2 * part + h) * W);
    } else if (KIND == Q2_K) {
        vf minimum = load_halves(head + 32);
        for (int h = 0; h < 2; ++h) {
            typedef uint8_t bytes __attribute__((vector_size(16)));
            vu both = __builtin_convertvector(load_as<bytes>(head + 64 + (2 * part + h) * W), vu);
            scale[h] = d * floats(both & 15u);
            low[h] = -(minimum * floats(both >> 4));
        }
    } else {
        // Sixteen numbers of six bits: low nibbles in two words, the high two bits in the third.
        for (int h = 0; h < 2; ++h) {
            int s = 2 * part + h;
            vu nibble = (load_as<vu>(head + 32 + 64 * (s / 4 % 2)) >> (s % 4 * 8 + s / 8 * 4)) & 15u;
            vu top = (load_as<vu>(head + 160) >> (s % 4 * 8 + s / 4 * 2)) & 3u;
            scale[h] = d * floats((vi)(nibble | top << 4) - 32);
        }
    }
}

// f(std::integral_constant<int, kind>) for a kind given as a number.
template <class F>
static inline void with_kind(int kind, F&& f) {
    switch (kind) {
        case Q8_0: return f(std::integral_constant<int, Q8_0>{});
        case Q4_0: return f(std::integral_constant<int, Q4_0>{});
        case Q4_1: return f(std::integral_constant<int, Q4_1>{});
        case Q5_0: return f(std::integral_constant<int, Q5_0>{});
        case Q5_1: return f(std::integral_constant<int, Q5_1>{});
        case Q4_K: return f(std::integral_constant<int, Q4_K>{});
        case Q5_K: return f(std::integral_constant<int, Q5_K>{});
        case Q6_K: return f(std::integral_constant<int, Q6_K>{});
        case Q2_K: return f(std::integral_constant<int, Q2_K>{});
        default: return f(std::integral_constant<int, Q3_K>{});
    }
}

}  // namespace infer
