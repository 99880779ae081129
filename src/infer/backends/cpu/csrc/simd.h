// Sixteen floats at a time, in GCC's vector extensions: one source for AVX-512, AVX2, NEON and anything else.
// Every reduction in this library goes through `sum`/`sum4`, so that its order is the same wherever a value is computed.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // gcc 12 warns of its own header
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

namespace infer {

constexpr int W = 16;
typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));
typedef float vf4 __attribute__((vector_size(16)));

struct bf16 {
    uint16_t bits;
};

static inline vf splat(float x) { return vf{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

template <class V>
static inline V load_as(const void* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

static inline vf from_bits(vu bits) { return (vf)bits; }

static inline vf load(const float* p) { return load_as<vf>(p); }
static inline vf load(const bf16* p) { return from_bits(__builtin_convertvector(load_as<vh>(p), vu) << 16); }

// The first `count` (0..16) elements, zeros behind them.
template <class T>
static inline vf load_some(const T* p, int count) {
    if (count == W) return load(p);
    T part[W] = {};
    std::memcpy(part, p, sizeof(T) * count);
    return load(part);
}

// Round to nearest even; a NaN stays a NaN.
static inline vh round_bf16(vf x) {
#if defined(__AVX512BF16__) && defined(__AVX512DQ__)
    constexpr int DENORMAL = 0x20;  // which the instruction takes for zero
    if (__builtin_expect(_mm512_fpclass_ps_mask((__m512)x, DENORMAL) == 0, 1)) return (vh)_mm512_cvtneps_pbh((__m512)x);
#endif
    vu bits = (vu)x;
    vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    vu nan = (bits >> 16) | 0x40u;
    vi is_nan = (x != x);
    return __builtin_convertvector((vu)is_nan ? nan : rounded, vh);
}

static inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }
static inline void store(bf16* p, vf v) {
    vh h = round_bf16(v);
    std::memcpy(p, &h, sizeof h);
}

static inline void store(float* p, vf4 v) { std::memcpy(p, &v, sizeof v); }
static inline void store(bf16* p, vf4 v) {
    vh h = round_bf16(__builtin_shufflevector(v, v, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3));
    std::memcpy(p, &h, 8);
}

template <class T>
static inline void store_some(T* p, vf v, int count) {
    if (count == W) return store(p, v);
    T part[W];
    store(part, v);
    std::memcpy(p, part, sizeof(T) * count);
}

static inline float to_float(float x) { return x; }
static inline float to_float(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

static inline void store_one(float* p, float x) { *p = x; }
static inline void store_one(bf16* p, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    p->bits = x != x ? uint16_t((bits >> 16) | 0x40u) : uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline vf vmax(vf a, vf b) { return a > b ? a : b; }

// The sums of four vectors. Each is added in halves (0+8 .. 7+15, then 0+4 .. 3+7, 0+2 and 1+3, 0+1), whatever stands beside it.
static inline vf4 sum4(vf a, vf b, vf c, vf d) {
    vf ab = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
            __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    vf cd = __builtin_shufflevector(c, d, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
            __builtin_shufflevector(c, d, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    vf quarters = __builtin_shufflevector(ab, cd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
                  __builtin_shufflevector(ab, cd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    vf pairs = quarters +
               __builtin_shufflevector(quarters, quarters, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    vf sums = pairs + __builtin_shufflevector(pairs, pairs, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    return vf4{sums[0], sums[4], sums[8], sums[12]};
}

static inline float sum(vf v) { return sum4(v, v, v, v)[0]; }

static inline float max_of(vf v) {
    float best = v[0];
    for (int i = 1; i < W; ++i) best = v[i] > best ? v[i] : best;
    return best;
}

static inline bool any(vi v) {
    int32_t found = 0;
    for (int i = 0; i < W; ++i) found |= v[i];
    return found != 0;
}

// exp to about 1 ulp of fp32: 2^n * p(r), r = x - n ln 2 in two parts (Cody and Waite), p the degree-6 minimax of Cephes.
static inline vf vexp(vf x) {
    vf low = splat(-87.3f), high = splat(88.37f);
#if defined(__AVX512F__)
    __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, (__m512)low, _CMP_NLT_UQ);
    x = (vf)_mm512_min_ps((__m512)high, _mm512_max_ps((__m512)low, (__m512)x));  // of a NaN in the second place: the NaN
    vf n = (vf)_mm512_roundscale_ps((__m512)(x * 1.44269504088896341f), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    vi tiny = x < low;
    x = x < low ? low : x;
    x = x > high ? high : x;
    vf shifted = x * 1.44269504088896341f;
    vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    vf n = (shifted + magic) - magic;
#endif
    vf r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
#if defined(__AVX512F__)
    return (vf)_mm512_maskz_scalef_ps(normal, (__m512)p, (__m512)n);
#else
    vi exponent = (__builtin_convertvector(n, vi) + 127) << 23;
    vf result = p * (vf)exponent;
    return tiny ? splat(0.0f) : result;
#endif
}

static inline vf vsigmoid(vf x) { return splat(1.0f) / (splat(1.0f) + vexp(-x)); }

static inline vf vtanh(vf x) {
    vf e = vexp(splat(-2.0f) * (x < 0.0f ? -x : x));
    vf t = (splat(1.0f) - e) / (splat(1.0f) + e);
    return x < 0.0f ? -t : t;
}

// One step of a dot product over the elements of one 64-byte vector: acc += a * b, lane by lane.
struct DotF32 {
    typedef float T;
    typedef vf V;
    static constexpr int STEP = 16;
    static inline V get(const float* p) { return load(p); }
    static inline V get_some(const float* p, int count) { return load_some(p, count); }
    static inline vf step(vf acc, V a, V b) { return a * b + acc; }
};

struct DotBF16 {
    typedef bf16 T;
    typedef vu V;  // 32 bf16 as 16 pairs
    static constexpr int STEP = 32;
    static inline V get(const bf16* p) { return load_as<vu>(p); }
    static inline V get_some(const bf16* p, int count) {
        bf16 part[STEP] = {};
        std::memcpy(part, p, sizeof(bf16) * count);
        return get(part);
    }
    static inline vf step(vf acc, V a, V b) {
#if defined(__AVX512BF16__)
        return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
        acc = from_bits(a << 16) * from_bits(b << 16) + acc;
        return from_bits(a & 0xffff0000u) * from_bits(b & 0xffff0000u) + acc;
#endif
    }
};

template <class T>
struct DotOf;
template <>
struct DotOf<float> {
    typedef DotF32 type;
};
template <>
struct DotOf<bf16> {
    typedef DotBF16 type;
};

}  // namespace infer
