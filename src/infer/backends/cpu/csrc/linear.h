// y[m, n] = sum over k of x[m, k] * w[n, k] (+ bias[n]): rows of both are read along k, so weights stay as they are stored.
//
// Every output is one accumulator vector over k in order, summed in one fixed way: its bits do not depend on how many
// rows are computed together, on their order, or on the number of threads.
#pragma once

#include "pool.h"
#include "simd.h"

namespace infer {

constexpr int NR = 4;        // weight rows of a block
constexpr int MR = 6;        // tokens of a block: 24 accumulators
constexpr int MB = 24;       // tokens whose x stays in the first cache while a panel of weights passes

// Weight rows of a task. Few tokens: the weights pass once, so a task is long and hands over seldom. Many tokens: the rows
// stay in the second cache while block after block of tokens passes.
static inline int64_t panel_rows(int64_t tokens, int64_t n, int threads) {
    int64_t even = (n / (8 * threads) + NR - 1) / NR * NR;
    int64_t most = tokens <= MB ? 512 : 64;
    return even < 16 ? 16 : even > most ? most : even;
}

// M tokens x NR rows. Rows and tokens are given by pointers, so that callers may gather.
template <class Dot, int M, class Out>
static inline void block(const typename Dot::T* const* x, const typename Dot::T* const* w, int64_t k, vf4 bias, Out* const* y,
                         int count) {
    vf acc[M][NR];
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < NR; ++n) acc[m][n] = splat(0.0f);
    int64_t i = 0;
    for (; i + Dot::STEP <= k; i += Dot::STEP) {
        typename Dot::V wv[NR];
        for (int n = 0; n < NR; ++n) wv[n] = Dot::get(w[n] + i);
        for (int m = 0; m < M; ++m) {
            typename Dot::V xv = Dot::get(x[m] + i);
            for (int n = 0; n < NR; ++n) acc[m][n] = Dot::step(acc[m][n], wv[n], xv);
        }
    }
    if (i < k) {
        typename Dot::V wv[NR];
        for (int n = 0; n < NR; ++n) wv[n] = Dot::get_some(w[n] + i, int(k - i));
        for (int m = 0; m < M; ++m) {
            typename Dot::V xv = Dot::get_some(x[m] + i, int(k - i));
            for (int n = 0; n < NR; ++n) acc[m][n] = Dot::step(acc[m][n], wv[n], xv);
        }
    }
    for (int m = 0; m < M; ++m) {
        vf4 total = sum4(acc[m][0], acc[m][1], acc[m][2], acc[m][3]) + bias;
        if (count == NR)
            store(y[m], total);
        else
            for (int n = 0; n < count; ++n) store_one(y[m] + n, total[n]);
    }
}

// Weight rows first .. last against all tokens. `x` and `y` hold one pointer per token; y[m][n] is output n of token m.
template <class T, class Out>
void linear_rows(const T* const* x, int64_t tokens, const T* w, int64_t k, const T* bias, Out* const* y, int64_t first,
                 int64_t last) {
    typedef typename DotOf<T>::type Dot;
    for (int64_t m0 = 0; m0 < tokens; m0 += MB) {
        int64_t m1 = m0 + MB < tokens ? m0 + MB : tokens;
        for (int64_t n = first; n < last; n += NR) {
            int count = int(last - n < NR ? last - n : NR);
            const T* rows[NR];
            vf4 add = {0, 0, 0, 0};
            for (int r = 0; r < NR; ++r) {
                rows[r] = w + (n + (r < count ? r : count - 1)) * k;
                if (bias && r < count) add[r] = to_float(bias[n + r]);
            }
            for (int64_t m = m0; m < m1;) {
                Out* out[MR];
                int64_t left = m1 - m;
                int here = int(left <= MR ? left : left == MR + 1 || left == MR + 2 ? (left + 1) / 2 : MR);
                for (int r = 0; r < here; ++r) out[r] = y[m + r] + n;
                switch (here) {
                    case 1: block<Dot, 1>(x + m, rows, k, add, out, count); break;
                    case 2: block<Dot, 2>(x + m, rows, k, add, out, count); break;
                    case 3: block<Dot, 3>(x + m, rows, k, add, out, count); break;
                    case 4: block<Dot, 4>(x + m, rows, k, add, out, count); break;
                    case 5: block<Dot, 5>(x + m, rows, k, add, out, count); break;
                    default: block<Dot, 6>(x + m, rows, k, add, out, count); break;
                }
                m += here;
            }
        }
    }
}

}  // namespace infer
