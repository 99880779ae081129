// One task of attention: some query rows against a split of the keys of some KV heads. See attention.cpp.
#pragma once

#include <algorithm>
#include <type_traits>

#include "api.h"
#include "attention_math.h"

namespace infer {

constexpr float NONE = -1e30f;  // score of a key that is not seen

static inline int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// Takes pieces of a block of memory, one after the other. With no memory it only counts.
class Arena {
  public:
    explicit Arena(char* base) : base_(base) {}
    template <class U>
    U* take(int64_t count) {
        U* at = base_ ? (U*)(base_ + used_) : nullptr;
        used_ += round_up(count * int64_t(sizeof(U)), 64);
        return at;
    }
    int64_t used() const { return used_; }

  private:
    char* base_;
    int64_t used_ = 0;
};

// The result of some splits for the query rows of a tile: fp32, the output not yet divided by the sum.
struct Partial {
    float *top, *sum, *out;  // [rows], [rows], [rows, padded values]
    Partial() = default;
    Partial(Arena& arena, int64_t rows, int64_t values)
        : top(arena.take<float>(rows)), sum(arena.take<float>(rows)), out(arena.take<float>(rows * values)) {}
};

struct Tile {
    int64_t row, first, last;  // tokens of the step
    int64_t from, newest;      // first key that any of its queries sees, and the last
    int64_t first_split, splits;
};

// T computes, C is stored. The query rows of a task are those of its tokens, for the query heads of some KV heads.
template <class T, class C>
class Attention {
  public:
    // heads: KV heads of a task, at most.
    Attention(const AttentionArgs& a, int64_t tokens, int64_t heads)
        : a_(a), group_(a.heads / a.kv_heads), words_(round_up(a.head_size, 16 * Words<T>::SIZE) / Words<T>::SIZE),
          values_(round_up(a.value_size, VALUE_PAD)), rows_(group_ * tokens * heads) {}

    Partial partial(Arena& arena) const { return Partial(arena, rows_, values_); }

    struct Scratch {
        uint32_t* queries;  // [rows, words]
        vu* keys;           // [CHUNK / 16, words]
        float* scores;      // [rows, SPLIT]
        T* weights;         // [rows, SPLIT]
        T* staged;          // [CHUNK, words or values]: what is not stored as it is computed with
        Partial part, total;
        Scratch(const Attention& at, Arena& arena)
            : queries(arena.take<uint32_t>(at.rows_ * at.words_)), keys(arena.take<vu>(CHUNK / W * at.words_)),
              scores(arena.take<float>(at.rows_ * SPLIT)), weights(arena.take<T>(at.rows_ * SPLIT)),
              staged(arena.take<T>(CHUNK * std::max(at.words_ * Words<T>::SIZE, at.values_))), part(at.partial(arena)),
              total(at.partial(arena)) {}
    };

    // The tile's tokens for KV heads head .. head + heads.
    struct Task {
        const Tile& tile;
        int64_t head, heads;
        int64_t rows;  // query rows of one KV head
        int64_t all() const { return rows * heads; }
    };
    Task task(const Tile& tile, int64_t head, int64_t heads) const {
        return Task{tile, head, heads, (tile.last - tile.first) * group_};
    }

    void load_queries(const Task& t, Scratch& s) const {
        for (int64_t r = 0; r < t.all(); ++r) {
            const T* from = (const T*)a_.q + token(t, r) * a_.q_stride + query_head(t, r) * a_.head_size;
            char* to = (char*)(s.queries + r * words_);
            std::memset(to + a_.head_size * sizeof(T), 0, 4 * words_ - a_.head_size * sizeof(T));
            std::memcpy(to, from, a_.head_size * sizeof(T));
        }
    }

    // What a split reads first.
    Ahead begin_split(const Task& t, int64_t split) const {
        int64_t begin = std::max(split * SPLIT, t.tile.from / CHUNK * CHUNK);
        return fetch(a_.k_cache, t, begin, std::min((split + 1) * SPLIT, t.tile.newest + 1), a_.head_size);
    }

    // One split, into s.part. At its end `next` is fetched.
    void split(const Task& t, int64_t split, const Ahead& next, Scratch& s) const {
        int64_t start = split * SPLIT, end = std::min(start + SPLIT, t.tile.newest + 1);
        int64_t begin = std::max(start, t.tile.from / CHUNK * CHUNK);
        Ahead ahead;
        for (int64_t chunk = begin; chunk < end; chunk += CHUNK) {
            if (chunk + CHUNK < end)
                ahead = fetch(a_.k_cache, t, chunk + CHUNK, end, a_.head_size);
            else
                ahead = fetch(a_.v_cache, t, begin, end, a_.value_size);
            score(t, chunk, end, chunk - start, s, ahead);
        }
        weigh(t, start, begin, end, s);
        std::fill_n(s.part.out, t.all() * values_, 0.0f);
        for (int64_t chunk = begin; chunk < end; chunk += CHUNK) {
            if (chunk + CHUNK < end)
                ahead = fetch(a_.v_cache, t, chunk + CHUNK, end, a_.value_size);
            else
                ahead = next;
            add_values(t, chunk, end, chunk - start, s, ahead);
        }
        for (int64_t i = 0; i < t.all() * values_; i += 2 * W) {
            vf a = load(s.part.out + i), b = load(s.part.out + i + W);
            Words<T>::in_order(a, b);
            store(s.part.out + i, a);
            store(s.part.out + i + W, b);
        }
    }

    void begin_total(const Task& t, Partial& total) const {
        std::fill_n(total.top, t.all(), NONE);
        std::fill_n(total.sum, t.all(), 0.0f);
        std::fill_n(total.out, t.all() * values_, 0.0f);
    }

    // total and then part, in this order.
    void join(const Task& t, const Partial& part, Partial& total) const {
        for (int64_t r = 0; r < t.all(); ++r) {
            if (part.top[r] == NONE && part.sum[r] == 0.0f) continue;  // this query sees nothing of the split
            float top = std::max(total.top[r], part.top[r]);
            vf factors = vexp(vf{total.top[r] - top, part.top[r] - top});
            vf before = splat(factors[0]), now = splat(factors[1]);
            total.top[r] = top;
            total.sum[r] = total.sum[r] * factors[0] + part.sum[r] * factors[1];
            float *to = total.out + r * values_, *from = part.out + r * values_;
            for (int64_t i = 0; i < values_; i += W) store(to + i, load(to + i) * before + load(from + i) * now);
        }
    }

    void write(const Task& t, const Partial& total) const {
        for (int64_t r = 0; r < t.all(); ++r) {
            T* out = (T*)a_.out + (token(t, r) * a_.heads + query_head(t, r)) * a_.value_size;
            vf inverse = splat(a_.out_scale / total.sum[r]);
            for (int64_t i = 0; i < a_.value_size; i += W)
                store_some(out + i, load(total.out + r * values_ + i) * inverse, int(std::min<int64_t>(W, a_.value_size - i)));
        }
    }

  private:
    int64_t token(const Task& t, int64_t row) const { return t.tile.first + row % t.rows / group_; }
    int64_t query_head(const Task& t, int64_t row) const { return (t.head + row / t.rows) * group_ + row % group_; }

    const char* cell(const void* cache, int64_t row, int64_t position, int64_t size) const {
        int64_t block = a_.block_table[row * a_.table_width + position / a_.block_size];
        return (const char*)cache + (block * a_.block_size + position % a_.block_size) * a_.kv_heads * size * sizeof(C);
    }

    Ahead fetch(const void* cache, const Task& t, int64_t chunk, int64_t end, int64_t size) const {
        Ahead ahead;
        if (a_.block_size % GROUP || t.rows > MOST_ROWS) return ahead;
        ahead.bytes = GROUP * a_.kv_heads * size * int64_t(sizeof(C));
        for (int64_t at = chunk; at < end && at < chunk + CHUNK; at += GROUP)
            ahead.first[ahead.pieces++] = cell(cache, t.tile.row, at, size);
        ahead.portion = (ahead.bytes + t.heads - 1) / t.heads;
        return ahead;
    }

    // The groups of a chunk for one head. Copies, with zeros behind the last element, where they do not lie in one block or
    // are not stored as they are computed with; with zeros for places outside of `from` .. `end`, if `clean`.
    int locate(const void* cache, const Task& t, int64_t head, int64_t chunk, int64_t from, int64_t end, bool clean,
               int64_t size, int64_t padded, Scratch& s, Rows* out) const {
        bool plain = std::is_same<T, C>::value && size == padded && a_.block_size % GROUP == 0;
        int groups = 0;
        for (int64_t at = chunk; at < end && at < chunk + CHUNK; at += GROUP, ++groups) {
            if (plain && (!clean || (at >= from && at + GROUP <= end))) {
                out[groups] = {cell(cache, t.tile.row, at, size) + head * size * sizeof(C), int64_t(a_.kv_heads * size * sizeof(C))};
                continue;
            }
            T* to = s.staged + groups * GROUP * padded;
            out[groups] = {(const char*)to, int64_t(padded * sizeof(T))};
            for (int64_t i = 0; i < GROUP; ++i, to += padded) {
                int64_t copied = 0;
                if (at + i >= from && at + i < end) {
                    copy((const C*)cell(cache, t.tile.row, at + i, size) + head * size, size, to);
                    copied = size;
                }
                std::memset((char*)(to + copied), 0, (padded - copied) * sizeof(T));
            }
        }
        return groups;
    }

    static void copy(const T* from, int64_t size, T* to) { std::memcpy(to, from, size * sizeof(T)); }
    template <class U = T>
    static void copy(const fp8* from, int64_t size, U* to) {
        int64_t i = 0;
        for (; i + 32 <= size; i += 32) put(to + i, to_bf16(from + i));
        for (; i < size; ++i) put_one(to + i, to_bf16(from[i]));
    }
    static void put(bf16* to, vw x) { std::memcpy(to, &x, sizeof x); }
    static void put(float* to, vw x) {
        bf16 both[32];
        put(both, x);
        store(to, load(both));
        store(to + W, load(both + W));
    }
    static void put_one(bf16* to, bf16 x) { *to = x; }
    static void put_one(float* to, bf16 x) { *to = to_float(x); }

    // Scores of a chunk, places behind its last group left as they are.
    void score(const Task& t, int64_t chunk, int64_t end, int64_t place, Scratch& s, Ahead& ahead) const {
        Rows keys[CHUNK / GROUP];
        for (int64_t h = 0; h < t.heads; ++h) {
            int groups = locate(a_.k_cache, t, t.head + h, chunk, 0, end, false, a_.head_size, words_ * Words<T>::SIZE, s, keys);
            for (int g = 0; g < groups; ++g) {
                ahead.some();
                for (int64_t word = 0; word < words_; word += 16)
                    transpose(keys[g].first + 4 * word, keys[g].step, s.keys + g * words_ + word);
            }
            in_pieces(t.rows, [&](int64_t row, auto n) {
                row += h * t.rows;
                products<T, n>(s.queries + row * words_, s.keys, words_, groups, s.scores + row * SPLIT + place, SPLIT);
            });
        }
    }

    // Scores to weights, with the maximum and the sum of each query row.
    void weigh(const Task& t, int64_t start, int64_t begin, int64_t end, Scratch& s) const {
        int64_t context = a_.seq_lens[t.tile.row] - a_.query_starts[t.tile.row + 1];  // plus a token's number: its position
        int stop = int(round_up(end - start, 2 * W));
        vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        for (int64_t r = 0; r < t.all(); ++r) {
            float* scores = s.scores + r * SPLIT;
            T* weights = s.weights + r * SPLIT;
            int64_t position = context + token(t, r);
            int low = int(a_.window ? std::max<int64_t>(position - a_.window + 1 - start, 0) : 0);
            int high = int(std::min<int64_t>(position - start, SPLIT));
            vf best = splat(NONE);
            for (int i = int(begin - start); i < stop; i += W) {
                vf v = load(scores + i) * a_.scale;
                if (a_.softcap > 0.0f) v = vtanh(v / a_.softcap) * a_.softcap;
                if (i < low || i + W > high) {
                    vi key = lane + i;
                    v = ((key >= low) & (key <= high)) ? v : splat(NONE);
                }
                store(scores + i, v);
                best = vmax(v, best);
            }
            float top = top_of(best);
            vf added = splat(0.0f);
            auto weight = [&](int i) {
                vf v = load(scores + i);
                return v == NONE ? splat(0.0f) : vexp(v - top);
            };
            for (int i = int(begin - start); i < stop; i += 2 * W)
                added = Words<T>::weights(weights + i, weight(i), weight(i + W), added);
            s.part.top[r] = top;
            s.part.sum[r] = sum(added);
        }
    }

    // Values that no query of the task looks at count as zeros: before the window blocks may be gone.
    void add_values(const Task& t, int64_t chunk, int64_t end, int64_t place, Scratch& s, Ahead& ahead) const {
        constexpr int64_t STRIDE = SPLIT / Words<T>::SIZE;
        Rows values[CHUNK / GROUP];
        for (int64_t h = 0; h < t.heads; ++h) {
            int groups = locate(a_.v_cache, t, t.head + h, chunk, t.tile.from, end, true, a_.value_size, values_, s, values);
            in_pieces(t.rows, [&](int64_t row, auto n) {
                row += h * t.rows;
                const uint32_t* weights = (const uint32_t*)(s.weights + row * SPLIT + place);
                float* out = s.part.out + row * values_;
                int64_t at = 0;
                for (; at + 4 * W <= values_; at += 4 * W)
                    weighted<T, n, 4>(weights, STRIDE, values, at, groups, out + at, values_, ahead);
                if (at < values_) weighted<T, n, 2>(weights, STRIDE, values, at, groups, out + at, values_, ahead);
            });
        }
    }

    const AttentionArgs& a_;
    int64_t group_, words_, values_, rows_;
};

}  // namespace infer
