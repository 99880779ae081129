#include "linear.h"

#include "api.h"
#include "packed.h"

namespace infer {

template <class T, class Out>
static void linear(Pool& pool, bool packed, const T* x, const T* w, const T* bias, Out* y, int64_t tokens, int64_t n,
                   int64_t k) {
    std::vector<const T*> in(tokens);
    std::vector<Out*> out(tokens);
    for (int64_t m = 0; m < tokens; ++m) in[m] = x + m * k, out[m] = y + m * n;
    if (packed) return packed_linear(pool, in.data(), tokens, w, n, k, bias, out.data());
    int64_t rows = panel_rows(tokens, n, pool.size());
    int64_t panels = (n + rows - 1) / rows;
    auto body = [&](int64_t panel, int) {
        int64_t first = panel * rows, last = first + rows < n ? first + rows : n;
        linear_rows<T, Out>(in.data(), tokens, w, k, bias, out.data(), first, last);
    };
    parallel(pool, panels, body);
}

}  // namespace infer

using namespace infer;

extern "C" void infer_linear(void* pool, int dtype, int packed, int out_fp32, const void* x, const void* w,
                             const void* bias, void* y, int64_t tokens, int64_t n, int64_t k) {
    Pool& p = *static_cast<Pool*>(pool);
    if (dtype == FP32) {
        linear(p, packed, (const float*)x, (const float*)w, (const float*)bias, (float*)y, tokens, n, k);
    } else if (out_fp32) {
        linear(p, packed, (const bf16*)x, (const bf16*)w, (const bf16*)bias, (float*)y, tokens, n, k);
    } else {
        linear(p, packed, (const bf16*)x, (const bf16*)w, (const bf16*)bias, (bf16*)y, tokens, n, k);
    }
}

namespace infer {

// Sixteen rows lie side by side in groups of P columns.
template <class T, int P>
static void packed_rows(const T* packed, const int64_t* ids, T* y, int64_t count, int64_t k) {
    for (int64_t i = 0; i < count; ++i, y += k) {
        const T* row = packed + ids[i] / W * W * k + ids[i] % W * P;
        for (int64_t j = 0; j < k; j += P, row += W * P)
            for (int p = 0; p < P; ++p) y[j + p] = row[p];
    }
}

}  // namespace infer

extern "C" void infer_packed_rows(int dtype, const void* packed, const int64_t* ids, void* y, int64_t count, int64_t k) {
    if (dtype == FP32)
        packed_rows<float, 1>((const float*)packed, ids, (float*)y, count, k);
    else
        packed_rows<bf16, 2>((const bf16*)packed, ids, (bf16*)y, count, k);
}
