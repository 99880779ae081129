// Experts: the tokens of each chosen expert are gathered by pointer, and its two products run as plain linears.
#include <algorithm>

#include "api.h"
#include "linear.h"

namespace infer {

template <class T>
static void moe(Pool& pool, const T* x, const int64_t* ids, const float* weights, const T* gate_up, const T* down, T* y,
                T* work, int64_t tokens, int64_t top_k, int64_t experts, int64_t n, int64_t inner) {
    std::vector<int64_t> start(experts + 1, 0);
    for (int64_t i = 0; i < tokens * top_k; ++i) ++start[ids[i] + 1];
    for (int64_t e = 0; e < experts; ++e) start[e + 1] += start[e];
    std::vector<int64_t> place(start.begin(), start.end() - 1);
    std::vector<const T*> in(tokens * top_k);
    T *both = work, *hidden = both + tokens * top_k * 2 * inner, *out = hidden + tokens * top_k * inner;
    std::vector<T*> both_rows(tokens * top_k), out_rows(tokens * top_k);
    std::vector<const T*> hidden_rows(tokens * top_k);
    for (int64_t i = 0; i < tokens * top_k; ++i) {
        int64_t to = place[ids[i]]++;
        in[to] = x + i / top_k * n;
        both_rows[to] = both + to * 2 * inner;
        hidden_rows[to] = hidden + to * inner;
        out_rows[to] = out + i * n;
    }
    std::vector<int64_t> used;
    for (int64_t e = 0; e < experts; ++e)
        if (start[e + 1] > start[e]) used.push_back(e);
    int64_t up_rows = panel_rows(tokens, 2 * inner, pool.size()), panels = (2 * inner + up_rows - 1) / up_rows;
    auto up = [&](int64_t task, int) {
        int64_t e = used[task / panels], first = task % panels * up_rows, last = std::min(first + up_rows, 2 * inner);
        int64_t begin = start[e];
        linear_rows<T, T>(in.data() + begin, start[e + 1] - begin, gate_up + e * 2 * inner * n, n, nullptr,
                          both_rows.data() + begin, first, last);
    };
    parallel(pool, int64_t(used.size()) * panels, up);
    auto activate = [&](int64_t row, int) {
        const T *g = both + row * 2 * inner, *u = g + inner;
        T* h = hidden + row * inner;
        for (int64_t i = 0; i < inner; i += W) {
            int count = int(std::min<int64_t>(W, inner - i));
            vf a = load_some(g + i, count), b = load_some(u + i, count);
            store_some(h + i, a * vsigmoid(a) * b, count);
        }
    };
    parallel(pool, tokens * top_k, activate);
    int64_t down_rows = panel_rows(tokens, n, pool.size()), down_panels = (n + down_rows - 1) / down_rows;
    auto back = [&](int64_t task, int) {
        int64_t e = used[task / down_panels], first = task % down_panels * down_rows, last = std::min(first + down_rows, n);
        int64_t begin = start[e];
        linear_rows<T, T>(hidden_rows.data() + begin, start[e + 1] - begin, down + e * n * inner, inner, nullptr,
                          out_rows.data() + begin, first, last);
    };
    parallel(pool, int64_t(used.size()) * down_panels, back);
    auto add = [&](int64_t token, int) {
        for (int64_t i = 0; i < n; i += W) {
            int count = int(std::min<int64_t>(W, n - i));
            vf total = splat(0.0f);
            for (int64_t k = 0; k < top_k; ++k)
                total = load_some(out + (token * top_k + k) * n + i, count) * weights[token * top_k + k] + total;
            store_some(y + token * n + i, total, count);
        }
    };
    parallel(pool, tokens, add);
}

}  // namespace infer

extern "C" void infer_moe(void* pool, int dtype, const void* x, const int64_t* ids, const float* weights,
                          const void* gate_up, const void* down, void* y, void* work, int64_t tokens, int64_t top_k, int64_t experts,
                          int64_t n, int64_t inner) {
    using namespace infer;
    Pool& p = *static_cast<Pool*>(pool);
    if (dtype == FP32)
        moe(p, (const float*)x, ids, weights, (const float*)gate_up, (const float*)down, (float*)y, (float*)work, tokens, top_k, experts,
            n, inner);
    else
        moe(p, (const bf16*)x, ids, weights, (const bf16*)gate_up, (const bf16*)down, (bf16*)y, (bf16*)work, tokens, top_k, experts, n,
            inner);
}
