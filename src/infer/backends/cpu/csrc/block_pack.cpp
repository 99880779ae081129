// From the order of a GGUF into that of block_format.h, and rows back out of it.
#include "api.h"
#include "block_format.h"
#include "pool.h"

namespace infer {

static void nibbles(const uint8_t* in, int count, uint8_t* low, uint8_t* high) {
    for (int i = 0; i < count; ++i) low[i] = in[i] & 15, high[i] = in[i] >> 4;
}

// The unsigned quants of one block as it is stored (github.com/ggml-org/ggml, ggml-common.h), in the order of columns.
static inline void read_quants(int kind, const uint8_t* in, uint8_t* out) {
    switch (kind) {
        case Q8_0:
            for (int i = 0; i < 32; ++i) out[i] = in[2 + i] ^ 0x80u;
            break;
        case Q4_0: nibbles(in + 2, 16, out, out + 16); break;
        case Q4_1: nibbles(in + 4, 16, out, out + 16); break;
        case Q5_0:
        case Q5_1: {
            const uint8_t* fifth = in + (kind == Q5_0 ? 2 : 4);
            nibbles(fifth + 4, 16, out, out + 16);
            for (int i = 0; i < 32; ++i) out[i] |= (fifth[i / 8] >> i % 8 & 1) << 4;
            break;
        }
        case Q4_K:
        case Q5_K:
            for (int j = 0; j < 4; ++j) nibbles(in + (kind == Q4_K ? 16 : 48) + 32 * j, 32, out + 64 * j, out + 64 * j + 32);
            if (kind == Q5_K)
                for (int i = 0; i < 256; ++i) out[i] |= (in[16 + i % 32] >> i / 32 & 1) << 4;
            break;
        case Q6_K:
            for (int h = 0; h < 2; ++h) nibbles(in + 64 * h, 64, out + 128 * h, out + 128 * h + 64);
            for (int i = 0; i < 256; ++i) out[i] |= (in[128 + i / 128 * 32 + i % 32] >> i / 32 % 4 * 2 & 3) << 4;
            break;
        default: {
            const uint8_t* two = in + (kind == Q2_K ? 16 : 32);
            for (int i = 0; i < 256; ++i) out[i] = two[i / 128 * 32 + i % 32] >> i / 32 % 4 * 2 & 3;
            if (kind == Q3_K)
                for (int i = 0; i < 256; ++i) out[i] |= (in[i % 32] >> i / 32 & 1) << 2;
        }
    }
}

// The header of one row: fp16 numbers side by side with those of the other rows, then the rest four bytes at a time, or
// one at a time where every byte is a scale of its own.
static inline void place_head(int kind, const uint8_t* in, int lane, uint8_t* head) {
    const BlockFormat f = BLOCK_FORMATS[kind];
    const int rest = f.head - 2 * f.halves;
    const uint8_t* halves = kind == Q6_K ? in + 208 : kind == Q2_K ? in + 80 : kind == Q3_K ? in + 108 : in;
    const uint8_t* scales = kind == Q6_K ? in + 192 : kind == Q2_K ? in : kind == Q3_K ? in + 96 : in + 4;
    for (int i = 0; i < f.halves; ++i) std::memcpy(head + 2 * W * i + 2 * lane, halves + 2 * i, 2);
    head += 2 * W * f.halves;
    if (rest == 16)
        for (int i = 0; i < rest; ++i) head[W * i + lane] = scales[i];
    else
        for (int i = 0; i < rest; i += 4) std::memcpy(head + W * i + 4 * lane, scales + i, 4);
}

// As weights_of reads them: four quants of a row at a time.
static inline void place_quants(BlockFormat f, const uint8_t* quants, int lane, uint8_t* out) {
    const uint32_t low_bits = 0x01010101u * ((1u << f.low) - 1u), high_bits = 0x01010101u * ((1u << f.high) - 1u);
    uint32_t low[8] = {}, high[2] = {};
    const int per = f.high ? 8 / f.high : 1;
    for (int i = 0; i < QK / 4; ++i) {
        const uint32_t four = load_as<uint32_t>(quants + 4 * i);
        const uint32_t bits = four & low_bits;
        if (f.low == 2)
            low[i / 4] |= bits << i % 4 * 2;
        else
            low[i % f.low] |= bits << i / f.low * f.low;
        if (f.high) high[i / per] |= (four >> f.low & high_bits) << i % per * f.high;
    }
    for (int i = 0; i < f.low; ++i) std::memcpy(out + 64 * i + 4 * lane, low + i, 4);
    for (int i = 0; i < f.high; ++i) std::memcpy(out + 64 * (f.low + i) + 4 * lane, high + i, 4);
}

template <int KIND, class T>
static void row_of(const uint8_t* w, int64_t columns, int64_t row, T* out) {
    constexpr BlockFormat F = BLOCK_FORMATS[KIND];
    constexpr int PER = F.columns / QK, COLUMNS = QK / F.parts;
    const uint8_t* tile = w + row / W * tile_bytes(F, columns);
    const uint8_t* heads = tile + columns / QK * quant_bytes(F);
    const int lane = int(row % W);
    for (int64_t b = 0; b < columns / QK; ++b) {
        vf scale[2], low[2];
        scales_of<KIND>(heads + b / PER * head_bytes(F), int(b % PER), scale, low);
        for (int i = 0; i < QK / 4; ++i) {
            uint32_t four = weights_of<F.low, F.high>(tile + b * quant_bytes(F), i)[lane];
            for (int c = 4 * i; c < 4 * i + 4; ++c, four >>= 8) {
                float value = float(int(four & 255u) - F.offset) * scale[c / COLUMNS][lane];
                store_one(out + b * QK + c, F.minimum ? value + low[c / COLUMNS][lane] : value);
            }
        }
    }
}

}  // namespace infer

using namespace infer;

extern "C" void infer_pack_blocks(void* pool, int kind, const void* stored, void* packed, int64_t n, int64_t k) {
    with_kind(kind, [&](auto number) {
        constexpr int KIND = decltype(number)::value;
        constexpr BlockFormat F = BLOCK_FORMATS[KIND];
        const int64_t blocks = k / F.columns, per = F.columns / QK;
        auto body = [&](int64_t tile, int) {
            const uint8_t* in = (const uint8_t*)stored + tile * W * blocks * F.stored;
            uint8_t* out = (uint8_t*)packed + tile * tile_bytes(F, k);
            for (int lane = 0; lane < W; ++lane)
                for (int64_t block = 0; block < blocks; ++block, in += F.stored) {
                    uint8_t quants[256];
                    read_quants(KIND, in, quants);
                    place_head(KIND, in, lane, out + k / QK * quant_bytes(F) + block * head_bytes(F));
                    for (int64_t b = 0; b < per; ++b)
                        place_quants(F, quants + b * QK, lane, out + (block * per + b) * quant_bytes(F));
                }
        };
        parallel(*(Pool*)pool, n / W, body);
    });
}

extern "C" void infer_pack_words(void* pool, const void* rows, void* packed, int64_t n, int64_t words) {
    auto body = [&](int64_t tile, int) {
        const uint32_t* in = (const uint32_t*)rows + tile * W * words;
        uint32_t* out = (uint32_t*)packed + tile * W * words;
        for (int64_t first = 0; first < words; first += W) {  // what is read and written stays in the first cache
            const int64_t last = first + W < words ? first + W : words;
            for (int lane = 0; lane < W; ++lane)
                for (int64_t word = first; word < last; ++word) out[word * W + lane] = in[lane * words + word];
        }
    };
    parallel(*(Pool*)pool, n / W, body);
}

extern "C" void infer_block_rows(int dtype, int kind, const void* packed, const int64_t* ids, void* y, int64_t count,
                                 int64_t k) {
    with_kind(kind, [&](auto number) {
        constexpr int KIND = decltype(number)::value;
        for (int64_t i = 0; i < count; ++i) {
            if (dtype == FP32)
                row_of<KIND>((const uint8_t*)packed, k, ids[i], (float*)y + i * k);
            else
                row_of<KIND>((const uint8_t*)packed, k, ids[i], (bf16*)y + i * k);
        }
    });
}
