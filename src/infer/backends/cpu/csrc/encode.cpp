// Plain weights into blocks: the same bytes as quantization/weight_only.py makes, whose rounding this follows step by step.
//
// Built without contraction of products and sums. Lanes are sixteen blocks that follow one another in memory; every sum of
// a block is added in halves, so neither the lane nor the thread that a block falls to changes its bytes.
#include <atomic>

#include "api.h"
#include "block_format.h"
#include "pool.h"

namespace infer {

constexpr int64_t GROUPS_PER_TASK = 64;  // of sixteen blocks

static inline vf absolute(vf x) { return (vf)((vu)x & 0x7fffffffu); }
static inline vf smaller(vf a, vf b) { return a < b ? a : b; }
static inline vf within(vf x, float low, float high) {
    x = x > low ? x : splat(low);
    return x < high ? x : splat(high);
}
// To the nearest integer, ties to even; beyond 2^22 it only stays beyond.
static inline vf nearest(vf x) {
    const vf magic = splat(12582912.0f);
    return (x + magic) - magic;
}
static inline vf inverse(vf x) { return x != 0.0f ? splat(1.0f) / x : splat(0.0f); }

// fp32 to fp16, to nearest, ties to even; beyond its range an infinity.
static uint16_t half_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint16_t sign = uint16_t(bits >> 16 & 0x8000u);
    bits &= 0x7fffffffu;
    if (bits >= 0x47800000u) return sign | 0x7c00u;
    if (bits < 0x38800000u) {  // less than 2^-14: a multiple of 2^-24
        float small, magic = 0.5f;  // whose last bit is worth 2^-24
        std::memcpy(&small, &bits, 4);
        small += magic;
        std::memcpy(&bits, &small, 4);
        return sign | uint16_t(bits - 0x3f000000u);
    }
    bits += 0xfffu + (bits >> 13 & 1u);
    return sign | uint16_t((bits - 0x38000000u) >> 13);
}

// Sixteen numbers as fp16 and back; false where fp16 does not reach.
static bool round_halves(vf& x, uint16_t* halves) {
    for (int lane = 0; lane < W; ++lane) {
        if (!(x[lane] <= 65504.0f && x[lane] >= -65504.0f)) return false;
        halves[lane] = half_of(x[lane]);
        x[lane] = half_to_float(halves[lane]);
    }
    return true;
}

static inline vf added_in_halves(vf* x) {
    for (int half = QK / 2; half; half /= 2)
        for (int i = 0; i < half; ++i) x[i] = x[i] + x[i + half];
    return x[0];
}

static inline float number(const float* p) { return *p; }
static inline float number(const bf16* p) { return to_float(*p); }
static inline float number(const uint16_t* p) { return half_to_float(*p); }

// Element i of sixteen blocks in x[i]; lanes behind the last block hold zeros.
template <class T>
static void read_blocks(const T* rows, int count, vf* x) {
    float block[QK * W] = {};
    for (int i = 0; i < count * QK; ++i) block[i] = number(rows + i);
    for (int i = 0; i < QK; ++i)
        for (int lane = 0; lane < W; ++lane) x[i][lane] = block[lane * QK + i];
}

// Each writes the blocks of `count` lanes; false: fp16 does not reach their scale.
static bool encode_q8_0(const vf* x, int count, uint8_t* out) {
    vf most = absolute(x[0]);
    for (int i = 1; i < QK; ++i) most = vmax(most, absolute(x[i]));
    vf scale = most / 127.0f;
    uint16_t halves[W];
    if (!round_halves(scale, halves)) return false;
    const vf factor = inverse(scale);
    int32_t quants[QK][W];
    for (int i = 0; i < QK; ++i) {
        vi q = __builtin_convertvector(within(nearest(x[i] * factor), -127.0f, 127.0f), vi);
        std::memcpy(quants[i], &q, sizeof q);
    }
    for (int lane = 0; lane < count; ++lane, out += 34) {
        std::memcpy(out, halves + lane, 2);
        for (int i = 0; i < QK; ++i) out[2 + i] = uint8_t(int8_t(quants[i][lane]));
    }
    return true;
}

static bool encode_q4_1(const vf* x, int count, uint8_t* out) {
    constexpr float LEVELS[] = {15.0f, 16.2f, 17.4f};
    vf low = x[0], high = x[0], parts[QK], products[QK], squares[QK];
    for (int i = 1; i < QK; ++i) low = smaller(low, x[i]), high = vmax(high, x[i]);
    if (max_of(vmax(absolute(low), absolute(high))) > 1048064.0f) return false;  // 65504 * (15 + 1)
    std::memcpy(parts, x, sizeof parts);
    const vf total = added_in_halves(parts);
    vf best = splat(__builtin_inff()), scale = splat(0.0f), minimum = low;
    for (float levels : LEVELS) {
        const vf factor = inverse((high - low) / levels);
        const vf shift = 7.5f - (high + low) / 2.0f * factor;
        for (int i = 0; i < QK; ++i) {
            vf q = within(nearest(x[i] * factor + shift), 0.0f, 15.0f);
            parts[i] = q, squares[i] = q * q, products[i] = x[i] * q;
        }
        const vf ones = added_in_halves(parts), square = added_in_halves(squares), product = added_in_halves(products);
        const vf spread = 32.0f * square - ones * ones;
        const vf step = spread > 0.0f ? (32.0f * product - ones * total) / spread : splat(0.0f);
        const vf offset = (total - step * ones) / 32.0f;
        const vf error = -(offset * total + step * product);
        const vi better = (error < best) & (factor < __builtin_inff());
        best = better ? error : best, scale = better ? step : scale, minimum = better ? offset : minimum;
    }
    minimum = minimum + 0.0f;  // a zero without a sign
    uint16_t scales[W], minima[W];
    if (!round_halves(scale, scales) || !round_halves(minimum, minima)) return false;
    const vf factor = inverse(scale);
    int32_t quants[QK][W];
    for (int i = 0; i < QK; ++i) {
        vi q = __builtin_convertvector(within(nearest((x[i] - minimum) * factor), 0.0f, 15.0f), vi);
        std::memcpy(quants[i], &q, sizeof q);
    }
    for (int lane = 0; lane < count; ++lane, out += 20) {
        std::memcpy(out, scales + lane, 2);
        std::memcpy(out + 2, minima + lane, 2);
        for (int i = 0; i < QK / 2; ++i) out[4 + i] = uint8_t(quants[i][lane] | quants[QK / 2 + i][lane] << 4);
    }
    return true;
}

template <class T>
static bool encode(Pool& pool, int kind, const T* rows, int64_t blocks, uint8_t* out) {
    const int64_t groups = (blocks + W - 1) / W, bytes = BLOCK_FORMATS[kind].stored;
    std::atomic<bool> fine{true};
    auto body = [&](int64_t task, int) {
        const int64_t end = (task + 1) * GROUPS_PER_TASK < groups ? (task + 1) * GROUPS_PER_TASK : groups;
        for (int64_t group = task * GROUPS_PER_TASK; group < end && fine.load(std::memory_order_relaxed); ++group) {
            vf x[QK];
            const int count = int(blocks - group * W < W ? blocks - group * W : W);
            read_blocks(rows + group * W * QK, count, x);
            vi finite = absolute(x[0]) < __builtin_inff();
            for (int i = 1; i < QK; ++i) finite &= absolute(x[i]) < __builtin_inff();
            bool good = true;
            for (int lane = 0; lane < W; ++lane) good &= finite[lane] != 0;
            uint8_t* place = out + group * W * bytes;
            if (!good || !(kind == Q8_0 ? encode_q8_0(x, count, place) : encode_q4_1(x, count, place)))
                fine.store(false, std::memory_order_relaxed);
        }
    };
    parallel(pool, (groups + GROUPS_PER_TASK - 1) / GROUPS_PER_TASK, body);
    return fine.load();
}

}  // namespace infer

using namespace infer;

extern "C" int64_t infer_encode_blocks(void* pool, int dtype, int kind, const void* rows, int64_t blocks, void* out) {
    Pool& threads = *(Pool*)pool;
    uint8_t* place = (uint8_t*)out;
    if (dtype == FP32) return encode(threads, kind, (const float*)rows, blocks, place);
    if (dtype == BF16) return encode(threads, kind, (const bf16*)rows, blocks, place);
    return encode(threads, kind, (const uint16_t*)rows, blocks, place);
}
