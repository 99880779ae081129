// Eight-bit floats of the KV cache: e4m3fn (4 bits of exponent, 3 of mantissa, no infinity; NaN is 0x7f and 0xff).
// Arithmetic that meets no denormal number: their treatment is a setting of each thread.
#pragma once

#include "simd.h"

namespace infer {

struct fp8 {
    uint8_t bits;
};

typedef uint16_t vw __attribute__((vector_size(64)));
typedef uint8_t vb __attribute__((vector_size(16)));
typedef uint8_t vb2 __attribute__((vector_size(32)));

constexpr float FP8_MAX = 448.0f;

// Sixteen floats to the nearest e4m3fn, ties to even; beyond the largest number the largest; a NaN stays a NaN.
static inline vb to_fp8(vf x) {
    vu bits = (vu)x;
    vu sign = bits >> 24 & 0x80u;
    vi is_nan = x != x;
    vf size = from_bits(bits & 0x7fffffffu);
    size = size > FP8_MAX ? splat(FP8_MAX) : size;
    vu all = (vu)size;
    vu normal = ((all + 0x7ffffu + (all >> 20 & 1u)) >> 20) - (120u << 3);
    vu small = (vu)(size + 16384.0f) - 0x46800000u;  // one unit of this sum is 2^-9, the smallest e4m3fn
    vu value = size < 0.015625f ? small : normal;
    value = (vu)is_nan ? vu{} + 0x7fu : value;
    return __builtin_convertvector(value | sign, vb);
}

// Numbers without sign, as bf16.
struct Fp8Table {
    alignas(64) uint16_t value[128];
    constexpr Fp8Table() : value() {
        for (int i = 8; i < 127; ++i) value[i] = uint16_t((i << 4) + (120 << 7));
        for (int i = 1; i < 8; ++i) {  // i * 2^-9
            int top = i >= 4 ? 2 : i >= 2 ? 1 : 0;
            value[i] = uint16_t(((118 + top) << 7) | ((i << (7 - top)) & 127));
        }
        value[127] = 0x7fc0;
    }
};
constexpr Fp8Table FP8_TABLE;

static inline bf16 to_bf16(fp8 x) { return bf16{uint16_t(FP8_TABLE.value[x.bits & 127] | (x.bits & 128) << 8)}; }

// Thirty-two of them.
static inline vw to_bf16(const fp8* p) {
#if defined(__AVX512BW__)
    __m512i x = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p));
    const __m512i* table = (const __m512i*)FP8_TABLE.value;
    __m512i low = _mm512_permutex2var_epi16(_mm512_load_si512(table), x, _mm512_load_si512(table + 1));
    __m512i high = _mm512_permutex2var_epi16(_mm512_load_si512(table + 2), x, _mm512_load_si512(table + 3));
    __m512i value = _mm512_mask_mov_epi16(low, _mm512_test_epi16_mask(x, _mm512_set1_epi16(64)), high);
    return (vw)_mm512_or_si512(value, _mm512_slli_epi16(_mm512_and_si512(x, _mm512_set1_epi16(128)), 8));
#else
    bf16 out[32];
    for (int i = 0; i < 32; ++i) out[i] = to_bf16(p[i]);
    return load_as<vw>(out);
#endif
}

}  // namespace infer
