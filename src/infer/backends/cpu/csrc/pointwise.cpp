#include <cmath>
#include <cstring>

#include "api.h"
#include "pool.h"
#include "simd.h"

namespace infer {

constexpr int64_t SMALL = 1 << 14;  // elements that are not worth waking a thread for

template <class F>
static void over_rows(Pool& pool, int64_t rows, int64_t width, F& body) {
    parallel_rows(pool, rows, rows * width <= SMALL ? rows : (SMALL / 4 + width - 1) / width, body);
}

template <class T, class U>
static void rms_norm(Pool& pool, const T* x, const T* residual, const U* weight, T* y, T* total, int64_t rows, int64_t n,
                     float eps) {
    auto body = [&](int64_t row) {
        const T* in = x + row * n;
        T* out = y + row * n;
        if (residual) {
            const T* add = residual + row * n;
            T* sum_row = total + row * n;
            for (int64_t i = 0; i < n; i += W) {
                int count = int(n - i < W ? n - i : W);
                store_some(sum_row + i, load_some(in + i, count) + load_some(add + i, count), count);
            }
            in = sum_row;
        }
        vf squares = splat(0.0f);
        for (int64_t i = 0; i < n; i += W) {
            vf v = load_some(in + i, int(n - i < W ? n - i : W));
            squares = v * v + squares;
        }
        vf scale = splat(1.0f / std::sqrt(sum(squares) / float(n) + eps));
        for (int64_t i = 0; i < n; i += W) {
            int count = int(n - i < W ? n - i : W);
            store_some(out + i, load_some(in + i, count) * scale * load_some(weight + i, count), count);
        }
    };
    over_rows(pool, rows, n, body);
}

template <class T, int KIND>
static void gate(Pool& pool, const T* x, T* y, int64_t rows, int64_t n) {
    auto body = [&](int64_t row) {
        const T *g = x + row * 2 * n, *up = g + n;
        T* out = y + row * n;
        for (int64_t i = 0; i < n; i += W) {
            int count = int(n - i < W ? n - i : W);
            vf a = load_some(g + i, count), b = load_some(up + i, count);
            vf activated;
            if (KIND == 0) {
                activated = a * vsigmoid(a);
            } else {
                vf inner = 0.79788456080286535588f * (a + 0.044715f * a * a * a);
                activated = 0.5f * a * (1.0f + vtanh(inner));
            }
            store_some(out + i, activated * b, count);
        }
    };
    over_rows(pool, rows, 2 * n, body);
}

template <class T>
static void rotary(Pool& pool, const T* x, const float* cos, const float* sin, T* y, int64_t tokens, int64_t heads,
                   int64_t size, int64_t half, int64_t stride) {
    auto body = [&](int64_t token) {
        const float *c = cos + token * half, *s = sin + token * half;
        for (int64_t head = 0; head < heads; ++head) {
            const T* in = x + token * stride + head * size;
            T* out = y + (token * heads + head) * size;
            for (int64_t i = 0; i < half; i += W) {
                int count = int(half - i < W ? half - i : W);
                vf a = load_some(in + i, count), b = load_some(in + half + i, count);
                vf vc = load_some(c + i, count), vs = load_some(s + i, count);
                store_some(out + i, a * vc - b * vs, count);
                store_some(out + half + i, b * vc + a * vs, count);
            }
            if (2 * half < size) std::memcpy(out + 2 * half, in + 2 * half, sizeof(T) * (size - 2 * half));
        }
    };
    over_rows(pool, tokens, heads * size, body);
}

}  // namespace infer

using namespace infer;

extern "C" void* infer_pool_create(int threads, int spins) { return new Pool(threads, spins); }
extern "C" void infer_pool_destroy(void* pool) { delete static_cast<Pool*>(pool); }

extern "C" void infer_rms_norm(void* pool, int dtype, int weight_dtype, const void* x, const void* residual,
                               const void* weight, void* y, void* total, int64_t rows, int64_t n, float eps) {
    Pool& p = *static_cast<Pool*>(pool);
    if (dtype == FP32)
        rms_norm(p, (const float*)x, (const float*)residual, (const float*)weight, (float*)y, (float*)total, rows, n, eps);
    else if (weight_dtype == FP32)
        rms_norm(p, (const bf16*)x, (const bf16*)residual, (const float*)weight, (bf16*)y, (bf16*)total, rows, n, eps);
    else
        rms_norm(p, (const bf16*)x, (const bf16*)residual, (const bf16*)weight, (bf16*)y, (bf16*)total, rows, n, eps);
}

extern "C" void infer_gate(void* pool, int dtype, int kind, const void* x, void* y, int64_t rows, int64_t n) {
    Pool& p = *static_cast<Pool*>(pool);
    if (dtype == FP32)
        kind ? gate<float, 1>(p, (const float*)x, (float*)y, rows, n) : gate<float, 0>(p, (const float*)x, (float*)y, rows, n);
    else
        kind ? gate<bf16, 1>(p, (const bf16*)x, (bf16*)y, rows, n) : gate<bf16, 0>(p, (const bf16*)x, (bf16*)y, rows, n);
}

extern "C" void infer_rotary(void* pool, int dtype, const void* x, const float* cos, const float* sin, void* y,
                             int64_t tokens, int64_t heads, int64_t size, int64_t half, int64_t stride) {
    Pool& p = *static_cast<Pool*>(pool);
    if (dtype == FP32)
        rotary(p, (const float*)x, cos, sin, (float*)y, tokens, heads, size, half, stride);
    else
        rotary(p, (const bf16*)x, cos, sin, (bf16*)y, tokens, heads, size, half, stride);
}

template <class T>
static void unary(int kind, const T* x, T* y, int64_t count) {
    for (int64_t i = 0; i < count; i += W) {
        int some = int(count - i < W ? count - i : W);
        vf v = load_some(x + i, some);
        store_some(y + i, kind ? vtanh(v) : vsigmoid(v), some);
    }
}

extern "C" void infer_unary(int dtype, int kind, const void* x, void* y, int64_t count) {
    if (dtype == FP32)
        unary(kind, (const float*)x, (float*)y, count);
    else
        unary(kind, (const bf16*)x, (bf16*)y, count);
}

extern "C" void infer_angles(const int64_t* positions, const float* frequencies, float factor, float* cos, float* sin,
                             int64_t tokens, int64_t size) {
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t i = 0; i < size; ++i) {
            float angle = float(positions[t]) * frequencies[i];
            cos[t * size + i] = std::cos(angle) * factor;
            sin[t * size + i] = std::sin(angle) * factor;
        }
}

namespace infer {

template <class T>
static void scale(const T* x, T* y, int64_t count, float factor) {
    for (int64_t i = 0; i < count; i += W) {
        int left = int(count - i < W ? count - i : W);
        store_some(y + i, load_some(x + i, left) * factor, left);
    }
}

}  // namespace infer

extern "C" void infer_scale(int dtype, const void* x, void* y, int64_t count, float factor) {
    if (dtype == FP32)
        scale((const float*)x, (float*)y, count, factor);
    else
        scale((const bf16*)x, (bf16*)y, count, factor);
}

extern "C" void infer_copy_rows(const void* x, void* y, int64_t rows, int64_t row, int64_t stride) {
    for (int64_t i = 0; i < rows; ++i) std::memcpy((char*)y + i * row, (const char*)x + i * stride, size_t(row));
}

extern "C" void infer_gather_rows(const void* x, const int64_t* ids, void* y, int64_t count, int64_t row) {
    for (int64_t i = 0; i < count; ++i) std::memcpy((char*)y + i * row, (const char*)x + ids[i] * row, size_t(row));
}

extern "C" void infer_place_rows(const void* x, void* y, int64_t rows, int64_t row, int64_t stride) {
    for (int64_t r = 0; r < rows; ++r) std::memcpy((uint8_t*)y + r * stride, (const uint8_t*)x + r * row, row);
}
