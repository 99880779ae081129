// Experts: the tokens of each chosen expert are gathered by pointer, and its two products run as those of linear layers do:
// over plain, packed or block weights. Experts that nobody chose are not read.
#include <algorithm>

#include "api.h"
#include "blocks.h"
#include "linear.h"

namespace infer {

constexpr int64_t SERIAL = 1 << 13;  // elements that one thread computes before another would have woken up

// The weights of all experts, `rows` x `columns` each.
struct Stack {
    const uint8_t* data;
    int form;  // block kind, PACKED or PLAIN
    int64_t rows, columns;
    bool in_blocks() const { return form >= 0; }
};

template <class F>
static void rows_apart(Pool& pool, int64_t rows, int64_t each, F& body) {
    if (rows * each <= SERIAL)
        for (int64_t row = 0; row < rows; ++row) body(row, 0);
    else
        parallel(pool, rows, body);
}

// Tokens by expert: those of used[u] lie at start[u] .. start[u + 1].
struct Groups {
    std::vector<int64_t> used, start;
    int64_t widest = 0;

    // place[i]: where choice i of all tokens' choices lies.
    Groups(const int64_t* ids, int64_t choices, int64_t experts, int64_t* place) {
        std::vector<int64_t> counts(experts, 0);
        for (int64_t i = 0; i < choices; ++i) ++counts[ids[i]];
        int64_t reached = 0;
        for (int64_t e = 0; e < experts; ++e) {
            if (!counts[e]) continue;
            used.push_back(e);
            start.push_back(reached);
            widest = std::max(widest, counts[e]);
            reached += counts[e];
            counts[e] = start.back();
        }
        start.push_back(reached);
        for (int64_t i = 0; i < choices; ++i) place[i] = counts[ids[i]]++;
    }
};

// Every used expert against its tokens: rows of y are given in the order of groups, as are those of x or of quants.
template <class T>
static void products(Pool& pool, const Stack& w, const Groups& groups, const T* const* x, const Activations* const* quants,
                     T* const* y, float* scratch) {
    const int64_t unit = w.form == PLAIN ? NR : TILES * W;
    const int64_t all = w.rows * int64_t(groups.used.size());
    int64_t each = (all / (8 * pool.size()) + unit - 1) / unit * unit;
    each = std::max(unit, std::min(each, groups.widest <= TMB ? 512 : 64 / unit * unit));
    const int64_t panels = (w.rows + each - 1) / each;
    auto body = [&](int64_t task, int thread) {
        const int64_t u = task / panels, first = task % panels * each, last = std::min(first + each, w.rows);
        const int64_t begin = groups.start[u], tokens = groups.start[u + 1] - begin, expert = groups.used[u];
        if (w.in_blocks()) {
            const uint8_t* mine = w.data + expert * (w.rows / W) * tile_bytes(BLOCK_FORMATS[w.form], w.columns);
            block_tiles<T, T>(w.form, quants + begin, tokens, mine, w.columns, nullptr, y + begin, first / W, last / W,
                              scratch + thread * block_scratch(w.columns));
            return;
        }
        const T* mine = (const T*)w.data + expert * w.rows * w.columns;
        if (w.form == PACKED)
            packed_tiles<T, T>(x + begin, tokens, mine, w.columns, nullptr, y + begin, first / W, last / W);
        else
            linear_rows<T, T>(x + begin, tokens, mine, w.columns, nullptr, y + begin, first, last);
    };
    parallel(pool, int64_t(groups.used.size()) * panels, body);
}

static int64_t lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// The parts of `work`, one after the other.
struct Layout {
    int64_t both, hidden, out, x_quants, hidden_quants, scratch, end;

    Layout(int threads, int64_t size, const Stack& up, const Stack& down, int64_t tokens, int64_t choices) {
        both = 0;
        hidden = both + lines(choices * up.rows * size);
        out = hidden + lines(choices * down.columns * size);
        x_quants = out + lines(choices * down.rows * size);
        hidden_quants = x_quants + lines(up.in_blocks() ? tokens * (up.columns / QK) * int64_t(sizeof(Activations)) : 0);
        scratch = hidden_quants + lines(down.in_blocks() ? choices * (down.columns / QK) * int64_t(sizeof(Activations)) : 0);
        int64_t widest = std::max(up.in_blocks() ? up.columns : 0, down.in_blocks() ? down.columns : 0);
        end = scratch + threads * block_scratch(widest) * int64_t(sizeof(float));
    }
};

template <class T>
static void moe(Pool& pool, const T* x, const int64_t* ids, const float* weights, const Stack& up, const Stack& down, T* y,
                uint8_t* work, int64_t tokens, int64_t top_k, int64_t experts) {
    const int64_t n = up.columns, inner = down.columns, choices = tokens * top_k;
    const Layout at(pool.size(), sizeof(T), up, down, tokens, choices);
    T *both = (T*)(work + at.both), *hidden = (T*)(work + at.hidden), *out = (T*)(work + at.out);
    Activations *x_quants = (Activations*)(work + at.x_quants), *hidden_quants = (Activations*)(work + at.hidden_quants);
    float* scratch = (float*)(work + at.scratch);
    std::vector<int64_t> place(choices);
    const Groups groups(ids, choices, experts, place.data());
    std::vector<const T*> in(choices), hidden_rows(choices);
    std::vector<const Activations*> in_quants(choices), hidden_quant_rows(choices);
    std::vector<T*> both_rows(choices), out_rows(choices);
    for (int64_t i = 0; i < choices; ++i) {
        const int64_t to = place[i];
        in[to] = x + i / top_k * n;
        in_quants[to] = x_quants + i / top_k * (n / QK);
        both_rows[to] = both + to * 2 * inner;
        hidden_rows[to] = hidden + to * inner;
        hidden_quant_rows[to] = hidden_quants + to * (inner / QK);
        out_rows[to] = out + i * n;
    }
    auto quantize = [&](int64_t token, int) {
        quantize_row(BLOCK_FORMATS[up.form], x + token * n, n, x_quants + token * (n / QK));
    };
    if (up.in_blocks()) rows_apart(pool, tokens, n, quantize);
    products(pool, up, groups, in.data(), in_quants.data(), both_rows.data(), scratch);
    auto activate = [&](int64_t row, int) {
        const T *g = both + row * 2 * inner, *u = g + inner;
        T* h = hidden + row * inner;
        for (int64_t i = 0; i < inner; i += W) {
            int count = int(std::min<int64_t>(W, inner - i));
            vf a = load_some(g + i, count), b = load_some(u + i, count);
            store_some(h + i, a * vsigmoid(a) * b, count);
        }
        if (down.in_blocks()) quantize_row(BLOCK_FORMATS[down.form], h, inner, hidden_quants + row * (inner / QK));
    };
    rows_apart(pool, choices, inner, activate);
    products(pool, down, groups, hidden_rows.data(), hidden_quant_rows.data(), out_rows.data(), scratch);
    auto add = [&](int64_t token, int) {
        for (int64_t i = 0; i < n; i += W) {
            int count = int(std::min<int64_t>(W, n - i));
            vf total = splat(0.0f);
            for (int64_t k = 0; k < top_k; ++k)
                total = load_some(out + (token * top_k + k) * n + i, count) * weights[token * top_k + k] + total;
            store_some(y + token * n + i, total, count);
        }
    };
    rows_apart(pool, tokens, n * top_k, add);
}

}  // namespace infer

using namespace infer;

extern "C" int64_t infer_moe_work(void* pool, int dtype, int up_form, int down_form, int64_t tokens, int64_t top_k, int64_t n,
                                  int64_t inner) {
    const Stack up{nullptr, up_form, 2 * inner, n}, down{nullptr, down_form, n, inner};
    return Layout(static_cast<Pool*>(pool)->size(), dtype == FP32 ? 4 : 2, up, down, tokens, tokens * top_k).end;
}

extern "C" void infer_moe(void* pool, int dtype, const void* x, const int64_t* ids, const float* weights,
                          const void* gate_up, int up_form, const void* down_weights, int down_form, void* y, void* work,
                          int64_t tokens, int64_t top_k, int64_t experts, int64_t n, int64_t inner) {
    Pool& p = *static_cast<Pool*>(pool);
    const Stack up{(const uint8_t*)gate_up, up_form, 2 * inner, n}, down{(const uint8_t*)down_weights, down_form, n, inner};
    if (dtype == FP32)
        moe(p, (const float*)x, ids, weights, up, down, (float*)y, (uint8_t*)work, tokens, top_k, experts);
    else
        moe(p, (const bf16*)x, ids, weights, up, down, (bf16*)y, (uint8_t*)work, tokens, top_k, experts);
}
