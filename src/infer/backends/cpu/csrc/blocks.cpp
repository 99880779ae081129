#include "blocks.h"

#include <vector>

#include "api.h"
#include "packed.h"

namespace infer {

constexpr int BM = 4;    // tokens of a block: 4 x 3 sums of integers and as many of floats
constexpr int BMB = 32;  // tokens whose activations stay in the first cache while a panel of weights passes

template <int KIND, int N, class Out>
static void tokens(const Quantized* x, int64_t count, const uint8_t* w, int64_t blocks, int64_t tile, vf* bias,
                   Out* const* y, int64_t column) {
    for (int64_t m = 0; m < count;) {
        int64_t left = count - m;
        int here = int(left <= BM ? left : left < 2 * BM ? (left + 1) / 2 : BM);
        Out* out[BM];
        for (int r = 0; r < here; ++r) out[r] = y[m + r] + column;
        bool ahead = m == 0;
        switch (here) {
            case 1: blocks_block<KIND, 1, N>(x + m, w, blocks, tile, bias, out, ahead); break;
            case 2: blocks_block<KIND, 2, N>(x + m, w, blocks, tile, bias, out, ahead); break;
            case 3: blocks_block<KIND, 3, N>(x + m, w, blocks, tile, bias, out, ahead); break;
            default: blocks_block<KIND, 4, N>(x + m, w, blocks, tile, bias, out, ahead); break;
        }
        m += here;
    }
}

template <int KIND, class T, class Out>
static void linear(Pool& pool, const T* x, const uint8_t* w, const T* bias, Out* y, int8_t* work, int64_t count, int64_t n,
                   int64_t k) {
    int64_t blocks = k / QK, tile = tile_bytes(KIND, blocks), tiles = n / W;
    int8_t* quants = work;
    float* scales = (float*)(quants + count * k);
    int32_t* sums = (int32_t*)(scales + count * blocks);
    std::vector<Quantized> rows(count);
    std::vector<Out*> out(count);
    auto quantize = [&](int64_t m, int) {
        rows[m] = {quants + m * k, scales + m * blocks, sums + m * blocks};
        out[m] = y + m * n;
        quantize_row(x + m * k, blocks, quants + m * k, scales + m * blocks, sums + m * blocks);
    };
    if (count < 8)
        for (int64_t m = 0; m < count; ++m) quantize(m, 0);
    else
        parallel(pool, count, quantize);
    int64_t each = task_tiles(count, tiles, pool.size());
    auto body = [&](int64_t task, int) {
        int64_t first = task * each, last = first + each < tiles ? first + each : tiles;
        for (int64_t m0 = 0; m0 < count; m0 += BMB) {
            int64_t here = count - m0 < BMB ? count - m0 : BMB;
            for (int64_t t = first; t < last;) {
                vf add[TILES];
                int wide = last - t >= TILES ? TILES : 1;
                for (int i = 0; i < wide; ++i) add[i] = bias ? load(bias + (t + i) * W) : splat(0.0f);
                if (wide == TILES)
                    tokens<KIND, TILES>(rows.data() + m0, here, w + t * tile, blocks, tile, add, out.data() + m0, t * W);
                else
                    tokens<KIND, 1>(rows.data() + m0, here, w + t * tile, blocks, tile, add, out.data() + m0, t * W);
                t += wide;
            }
        }
    };
    parallel(pool, (tiles + each - 1) / each, body);
}

template <class T, class Out>
static void linear_of(Pool& pool, int kind, const void* x, const uint8_t* w, const void* bias, void* y, int8_t* work,
                      int64_t count, int64_t n, int64_t k) {
    if (kind == Q8_0)
        linear<Q8_0>(pool, (const T*)x, w, (const T*)bias, (Out*)y, work, count, n, k);
    else if (kind == Q4_0)
        linear<Q4_0>(pool, (const T*)x, w, (const T*)bias, (Out*)y, work, count, n, k);
    else
        linear<Q4_1>(pool, (const T*)x, w, (const T*)bias, (Out*)y, work, count, n, k);
}

// One row of a packed weight, dequantised.
template <class T>
static void row_of(int kind, const uint8_t* w, int64_t blocks, int64_t row, T* out) {
    BlockFormat f = block_format(kind);
    const uint8_t* tile = w + row / W * tile_bytes(kind, blocks);
    const uint8_t* scales = tile + blocks * f.quant_bytes;
    int64_t lane = row % W;
    for (int64_t b = 0; b < blocks; ++b) {
        uint16_t half;
        std::memcpy(&half, scales + b * f.scale_sets * 32 + 2 * lane, 2);
        float scale = half_to_float(half), low = 0.0f;
        if (kind == Q4_1) {
            std::memcpy(&half, scales + b * 64 + 32 + 2 * lane, 2);
            low = half_to_float(half);
        }
        const uint8_t* quants = tile + b * f.quant_bytes;
        for (int i = 0; i < QK; ++i) {
            int value;
            if (kind == Q8_0) {
                value = int(quants[i / 4 * 64 + 4 * lane + i % 4]) - 128;
            } else {
                int at = i % 16;
                uint8_t byte = quants[at / 4 * 64 + 4 * lane + at % 4];
                value = (i < 16 ? byte & 15 : byte >> 4) - (kind == Q4_0 ? 8 : 0);
            }
            store_one(out + b * QK + i, float(value) * scale + low);
        }
    }
}

}  // namespace infer

using namespace infer;

extern "C" void infer_pack_blocks(int kind, const void* stored, void* packed, int64_t n, int64_t k) {
    BlockFormat f = block_format(kind);
    int64_t blocks = k / QK;
    int head = 2 * f.scale_sets, body = f.row_bytes - head;
    for (int64_t row = 0; row < n; ++row) {
        const uint8_t* in = (const uint8_t*)stored + row * blocks * f.row_bytes;
        uint8_t* tile = (uint8_t*)packed + row / W * tile_bytes(kind, blocks);
        int64_t lane = row % W;
        for (int64_t b = 0; b < blocks; ++b, in += f.row_bytes) {
            for (int s = 0; s < f.scale_sets; ++s)
                std::memcpy(tile + blocks * f.quant_bytes + (b * f.scale_sets + s) * 32 + 2 * lane, in + 2 * s, 2);
            for (int i = 0; i < body; ++i)
                tile[b * f.quant_bytes + i / 4 * 64 + 4 * lane + i % 4] = kind == Q8_0 ? in[head + i] ^ 0x80u : in[head + i];
        }
    }
}

extern "C" void infer_block_rows(int dtype, int kind, const void* packed, const int64_t* ids, void* y, int64_t count,
                                 int64_t k) {
    for (int64_t i = 0; i < count; ++i) {
        if (dtype == FP32)
            row_of(kind, (const uint8_t*)packed, k / QK, ids[i], (float*)y + i * k);
        else
            row_of(kind, (const uint8_t*)packed, k / QK, ids[i], (bf16*)y + i * k);
    }
}

extern "C" void infer_block_linear(void* pool, int dtype, int out_fp32, int kind, const void* x, const void* w,
                                   const void* bias, void* y, void* work, int64_t count, int64_t n, int64_t k) {
    Pool& p = *static_cast<Pool*>(pool);
    if (dtype == FP32)
        linear_of<float, float>(p, kind, x, (const uint8_t*)w, bias, y, (int8_t*)work, count, n, k);
    else if (out_fp32)
        linear_of<bf16, float>(p, kind, x, (const uint8_t*)w, bias, y, (int8_t*)work, count, n, k);
    else
        linear_of<bf16, bf16>(p, kind, x, (const uint8_t*)w, bias, y, (int8_t*)work, count, n, k);
}
