// What a sparse block computes beside its products: the choice of experts, and the sum with the expert for every token.
//
// Every token by itself, in one order. Equal scores: the lower id comes first; NaN comes before every number.
#include <limits>
#include <vector>

#include "api.h"
#include "pool.h"
#include "simd.h"

namespace infer {

namespace {

struct Rule {
    int64_t top_k;
    int scoring, renormalize;
    int64_t groups, top_groups;
    int group_score;
    float scale;
};

struct Tap {
    uint8_t* data;
    int64_t size, stride;
};

constexpr float SMALLEST_SUM = 1e-20f;  // sigmoid scores may all be zero
constexpr int64_t FEW = 16;             // tokens of a task: fewer are routed before another thread would have woken up

bool before(float a, float b) { return a > b || (a != a && b == b); }

// The `count` best of values, best first. `taken` has a cell per value, all zero; it marks those that were chosen.
void best(const float* values, int64_t size, int64_t count, int64_t* ids, uint8_t* taken) {
    for (int64_t k = 0; k < count; ++k) {
        int64_t found = -1;
        for (int64_t i = 0; i < size; ++i)
            if (!taken[i] && (found < 0 || before(values[i], values[found]))) found = i;
        taken[found] = 1;
        ids[k] = found;
    }
}

// values become exp(value - largest) / their sum.
void softmax(float* values, int64_t size) {
    float top = values[0];
    for (int64_t i = 1; i < size; ++i) top = values[i] > top ? values[i] : top;
    vf total = splat(0.0f);
    for (int64_t i = 0; i < size; i += W) {
        int count = int(size - i < W ? size - i : W);
        vf power = vexp(load_some(values + i, count) - top);
        store_some(values + i, power, count);
        total += load_some(values + i, count);
    }
    float all = sum(total);
    for (int64_t i = 0; i < size; ++i) values[i] /= all;
}

void sigmoids(float* values, int64_t size) {
    for (int64_t i = 0; i < size; i += W) {
        int count = int(size - i < W ? size - i : W);
        vf x = load_some(values + i, count);
        store_some(values + i, x < -88.0f ? splat(0.0f) : vsigmoid(x), count);  // where vexp has reached its end
    }
}

// Outside of the best groups nothing can be chosen.
void keep_best_groups(const Rule& rule, float* ranking, int64_t experts) {
    const int64_t size = experts / rule.groups;
    std::vector<float> marks(rule.groups);
    std::vector<int64_t> ids(rule.groups);
    std::vector<uint8_t> chosen(rule.groups, 0), taken(size);
    for (int64_t g = 0; g < rule.groups; ++g) {
        int64_t two[2];
        std::memset(taken.data(), 0, size);
        best(ranking + g * size, size, rule.group_score == TOP2_SUM ? 2 : 1, two, taken.data());
        marks[g] = ranking[g * size + two[0]];
        if (rule.group_score == TOP2_SUM) marks[g] += ranking[g * size + two[1]];
    }
    best(marks.data(), rule.groups, rule.top_groups, ids.data(), chosen.data());
    for (int64_t i = 0; i < experts; ++i)
        if (!chosen[i / size]) ranking[i] = -std::numeric_limits<float>::infinity();
}

void route(const Rule& rule, const float* logits, const float* bias, float* weights, int64_t* ids, int64_t experts) {
    std::vector<float> scores(logits, logits + experts);
    std::vector<uint8_t> taken(experts, 0);
    if (rule.scoring == SOFTMAX) softmax(scores.data(), experts);
    if (rule.scoring == SIGMOID) sigmoids(scores.data(), experts);
    if (bias || rule.groups > 1) {
        std::vector<float> ranking(scores);
        if (bias)
            for (int64_t i = 0; i < experts; ++i) ranking[i] += bias[i];
        if (rule.groups > 1) keep_best_groups(rule, ranking.data(), experts);
        best(ranking.data(), experts, rule.top_k, ids, taken.data());
    } else {
        best(scores.data(), experts, rule.top_k, ids, taken.data());
    }
    for (int64_t k = 0; k < rule.top_k; ++k) weights[k] = scores[ids[k]];
    if (rule.scoring == TOP_K_SOFTMAX) softmax(weights, rule.top_k);
    if (rule.renormalize) {
        float total = 0.0f;
        for (int64_t k = 0; k < rule.top_k; ++k) total += weights[k];
        for (int64_t k = 0; k < rule.top_k; ++k) weights[k] /= total + SMALLEST_SUM;
    }
    if (rule.scale != 1.0f)
        for (int64_t k = 0; k < rule.top_k; ++k) weights[k] *= rule.scale;
}

template <class T>
void route_all(Pool& pool, const Rule& rule, const T* logits, const float* bias, float* weights, int64_t* ids,
               const Tap& tap, int64_t tokens, int64_t experts) {
    auto body = [&](int64_t token) {
        std::vector<float> row(experts);
        for (int64_t i = 0; i < experts; ++i) row[i] = to_float(logits[token * experts + i]);
        int64_t* mine = ids + token * rule.top_k;
        route(rule, row.data(), bias, weights + token * rule.top_k, mine, experts);
        if (!tap.data) return;
        uint8_t* place = tap.data + token * tap.stride;
        for (int64_t k = 0; k < rule.top_k; ++k) std::memcpy(place + k * tap.size, mine + k, tap.size);
    };
    auto some = [&](int64_t task, int) {
        const int64_t last = (task + 1) * FEW < tokens ? (task + 1) * FEW : tokens;
        for (int64_t token = task * FEW; token < last; ++token) body(token);
    };
    parallel(pool, (tokens + FEW - 1) / FEW, some);
}

// Rounded to T as often as if each step were an operation of its own.
template <class T>
void add_shared(const T* x, const T* shared, const T* gate, T* y, int64_t tokens, int64_t n) {
    for (int64_t token = 0; token < tokens; ++token) {
        T factor{};
        if (gate) store_some(&factor, vsigmoid(splat(to_float(gate[token]))), 1);
        for (int64_t i = 0; i < n; i += W) {
            int count = int(n - i < W ? n - i : W);
            vf part = load_some(shared + token * n + i, count);
            if (gate) {
                T rounded[W];
                store(rounded, part * to_float(factor));
                part = load(rounded);
            }
            store_some(y + token * n + i, load_some(x + token * n + i, count) + part, count);
        }
    }
}

}  // namespace

}  // namespace infer

using namespace infer;

extern "C" void infer_route(void* pool, int dtype, const void* logits, const float* bias, float* weights, int64_t* ids,
                            void* tap, int64_t tap_size, int64_t tap_stride, int64_t tokens, int64_t experts, int64_t top_k,
                            int scoring, int renormalize, int64_t groups, int64_t top_groups, int group_score, float scale) {
    Pool& p = *static_cast<Pool*>(pool);
    const Rule rule{top_k, scoring, renormalize, groups, top_groups, group_score, scale};
    const Tap place{(uint8_t*)tap, tap_size, tap_stride};
    if (dtype == FP32)
        route_all(p, rule, (const float*)logits, bias, weights, ids, place, tokens, experts);
    else
        route_all(p, rule, (const bf16*)logits, bias, weights, ids, place, tokens, experts);
}

extern "C" void infer_widen(const void* x, float* y, int64_t count) {
    for (int64_t i = 0; i < count; i += W) {
        int here = int(count - i < W ? count - i : W);
        store_some(y + i, load_some((const bf16*)x + i, here), here);
    }
}

extern "C" void infer_add_shared(int dtype, const void* x, const void* shared, const void* gate, void* y, int64_t tokens,
                                 int64_t n) {
    if (dtype == FP32)
        add_shared((const float*)x, (const float*)shared, (const float*)gate, (float*)y, tokens, n);
    else
        add_shared((const bf16*)x, (const bf16*)shared, (const bf16*)gate, (bf16*)y, tokens, n);
}
