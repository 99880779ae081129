// Keys and values into the paged cache.
#include <type_traits>

#include "api.h"
#include "fp8.h"

namespace infer {

static inline void put(float* to, vf x, int count) { store_some(to, x, count); }
static inline void put(bf16* to, vf x, int count) { store_some(to, x, count); }
static inline void put(fp8* to, vf x, int count) {
    vb bytes = to_fp8(x);
    std::memcpy(to, &bytes, count);
}

template <class T, class C>
static void write(const T* from, C* cache, const int64_t* slots, int64_t tokens, int64_t row, int64_t stride, float scale) {
    for (int64_t t = 0; t < tokens; ++t) {
        const T* in = from + t * stride;
        C* out = cache + slots[t] * row;
        if (std::is_same<T, C>::value) {
            std::memcpy(out, in, row * sizeof(T));
            continue;
        }
        for (int64_t i = 0; i < row; i += W) {
            int count = int(row - i < W ? row - i : W);
            vf x = load_some(in + i, count);
            put(out + i, std::is_same<C, fp8>::value ? x / scale : x, count);
        }
    }
}

}  // namespace infer

extern "C" void infer_write_kv(int dtype, int cache_dtype, const void* k, const void* v, void* k_cache, void* v_cache,
                               const int64_t* slots, int64_t tokens, int64_t k_row, int64_t v_row, int64_t k_stride,
                               int64_t v_stride, float k_scale, float v_scale) {
    using namespace infer;
    auto both = [&](auto from, auto to) {
        typedef decltype(from) T;
        typedef decltype(to) C;
        write((T)k, (C)k_cache, slots, tokens, k_row, k_stride, k_scale);
        write((T)v, (C)v_cache, slots, tokens, v_row, v_stride, v_scale);
    };
    auto as = [&](auto from) {
        if (cache_dtype == FP32) both(from, (float*)nullptr);
        if (cache_dtype == BF16) both(from, (bf16*)nullptr);
        if (cache_dtype == FP8) both(from, (fp8*)nullptr);
    };
    dtype == FP32 ? as((const float*)nullptr) : as((const bf16*)nullptr);
}
