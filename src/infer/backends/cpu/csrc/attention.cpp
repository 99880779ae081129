// Attention over the paged cache for any mix of prefill and decode rows.
//
// The keys of a query are walked in chunks of CHUNK at fixed absolute positions, with one running maximum, sum and output
// per SPLIT of positions; splits are joined in order. What a query sees therefore never depends on the batch, on how its
// prompt was cut, or on the threads. Keys outside a chunk's visible part get a weight of exactly zero.
#include <algorithm>
#include <cmath>

#include "api.h"
#include "pool.h"
#include "simd.h"

namespace infer {

constexpr int CHUNK = 64;          // keys at once
constexpr int SPLIT = 512;         // keys per partial result
constexpr int QUERY_TILE = 16;     // tokens of a prefill row per task
constexpr float NONE = -1e30f;     // score of a key that is not seen


#if defined(__AVX512F__)
static inline void transpose_tile(__m512i r[16]) {
    __m512i t[16];
    for (int i = 0; i < 8; ++i) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; ++i) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 8; ++i) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
}
#endif

// Word i of the sixteen keys goes to out[i]; a word is an fp32 element or a pair of bf16, the last one filled up with 0.
static void transpose_words(const void* const* rows, int64_t bytes, vu* out) {
    int64_t i = 0, words = bytes / 4;
#if defined(__AVX512F__)
    for (; i + 16 <= words; i += 16) {
        __m512i tile[16];
        for (int lane = 0; lane < 16; ++lane) tile[lane] = _mm512_loadu_si512((const char*)rows[lane] + 4 * i);
        transpose_tile(tile);
        for (int j = 0; j < 16; ++j) out[i + j] = (vu)tile[j];
    }
#endif
    for (; 4 * i < bytes; ++i) {
        out[i] = vu{};
        for (int lane = 0; lane < W; ++lane)
            std::memcpy((char*)(out + i) + 4 * lane, (const char*)rows[lane] + 4 * i, std::min<int64_t>(4, bytes - 4 * i));
    }
}

template <class T>
struct Scores;

template <>
struct Scores<float> {
    static constexpr int PER_WORD = 1;
    static inline vf step(vf acc, const float* q, int64_t word, vu keys) { return splat(q[word]) * (vf)keys + acc; }
};

template <>
struct Scores<bf16> {
    static constexpr int PER_WORD = 2;
    static inline vf step(vf acc, const bf16* q, int64_t word, vu keys) {
        uint32_t pair;
        std::memcpy(&pair, q + 2 * word, 4);
        vu both = pair + vu{};
        return DotBF16::step(acc, both, keys);
    }
};

struct Scratch {
    std::vector<vu> keys;       // [CHUNK / 16, words]
    std::vector<float> weights; // [queries, CHUNK]
    std::vector<float> partial; // [queries, V]: output of this split, not yet divided
    std::vector<float> total;   // [queries, V]: joined splits
    std::vector<float> part_max, part_sum, all_max, all_sum, rescale;
    std::vector<float> value;   // [CHUNK, V]
    std::vector<char> query;    // an odd number of bf16, made even
};

template <class T>
class Attention {
  public:
    Attention(const AttentionArgs& a) : a_(a), group_(a.heads / a.kv_heads) {}

    // Tokens first .. last of a row (by their place in the step) for one KV head.
    void task(int64_t row, int64_t first, int64_t last, int64_t head, Scratch& s) const {
        int64_t begin = a_.query_starts[row], stop = a_.query_starts[row + 1];
        int64_t context = a_.seq_lens[row] - (stop - begin);  // tokens before this step's
        int64_t queries = (last - first) * group_;
        int64_t words = (a_.head_size + Scores<T>::PER_WORD - 1) / Scores<T>::PER_WORD;
        reserve(s, queries, words);
        int64_t newest = context + (last - 1 - begin);  // position of the last query
        int64_t oldest = context + (first - begin);
        int64_t from = a_.window ? std::max<int64_t>(0, oldest - a_.window + 1) : 0;
        std::fill_n(s.all_max.begin(), queries, NONE);
        std::fill_n(s.all_sum.begin(), queries, 0.0f);
        std::fill_n(s.total.begin(), queries * a_.value_size, 0.0f);
        for (int64_t split = from / SPLIT * SPLIT; split <= newest; split += SPLIT) {
            std::fill_n(s.part_max.begin(), queries, NONE);
            std::fill_n(s.part_sum.begin(), queries, 0.0f);
            std::fill_n(s.partial.begin(), queries * a_.value_size, 0.0f);
            int64_t split_end = std::min<int64_t>(split + SPLIT, newest + 1);
            int64_t start = std::max(split, from / CHUNK * CHUNK);
            for (int64_t chunk = start; chunk < split_end; chunk += CHUNK) {
                int64_t keys = std::min<int64_t>(CHUNK, newest + 1 - chunk);
                load_keys(row, head, chunk, keys, words, s);
                for (int64_t q = 0; q < queries; ++q) score(first + q / group_, head, q, oldest + q / group_, chunk, words, s);
                load_values(row, head, chunk, from, keys, s);
                add_values(queries, s);
            }
            join(queries, s);
        }
        for (int64_t q = 0; q < queries; ++q) write(first + q / group_, head, q, s);
    }

  private:
    void reserve(Scratch& s, int64_t queries, int64_t words) const {
        s.keys.resize(CHUNK / W * words);
        s.weights.resize(queries * CHUNK);
        s.partial.resize(queries * a_.value_size);
        s.total.resize(queries * a_.value_size);
        s.value.resize(CHUNK * a_.value_size);
        for (auto* v : {&s.part_max, &s.part_sum, &s.all_max, &s.all_sum, &s.rescale}) v->resize(queries);
    }

    const T* cell(const void* cache, int64_t row, int64_t head, int64_t position, int64_t size) const {
        int64_t block = a_.block_table[row * a_.table_width + position / a_.block_size];
        return (const T*)cache + ((block * a_.block_size + position % a_.block_size) * a_.kv_heads + head) * size;
    }

    void load_keys(int64_t row, int64_t head, int64_t chunk, int64_t keys, int64_t words, Scratch& s) const {
        for (int64_t g = 0; g < CHUNK / W; ++g) {
            const void* rows[W];
            for (int lane = 0; lane < W; ++lane) {  // a place behind the last key repeats it: its weight will be zero
                int64_t key = std::min<int64_t>(g * W + lane, keys - 1);
                rows[lane] = cell(a_.k_cache, row, head, chunk + key, a_.head_size);
            }
            transpose_words(rows, a_.head_size * sizeof(T), s.keys.data() + g * words);
        }
    }

    // Zeros where no query of the task looks: behind the last key, and in front of the window, where blocks may be gone.
    void load_values(int64_t row, int64_t head, int64_t chunk, int64_t from, int64_t keys, Scratch& s) const {
        for (int64_t key = 0; key < CHUNK; ++key) {
            float* out = s.value.data() + key * a_.value_size;
            if (key >= keys || chunk + key < from) {
                std::fill_n(out, a_.value_size, 0.0f);
                continue;
            }
            const T* in = cell(a_.v_cache, row, head, chunk + key, a_.value_size);
            int64_t i = 0;
            for (; i + W <= a_.value_size; i += W) store(out + i, load(in + i));
            for (; i < a_.value_size; ++i) out[i] = to_float(in[i]);
        }
    }

    // Weights of the chunk's keys for one query, and the factor for what the split has summed up before.
    void score(int64_t token, int64_t head, int64_t q, int64_t position, int64_t chunk, int64_t words, Scratch& s) const {
        const T* query = (const T*)a_.q + token * a_.q_stride + (head * group_ + q % group_) * a_.head_size;
        if (a_.head_size % Scores<T>::PER_WORD) {  // no model has it
            s.query.assign(words * Scores<T>::PER_WORD * sizeof(T), 0);
            std::memcpy(s.query.data(), query, a_.head_size * sizeof(T));
            query = (const T*)s.query.data();
        }
        float* weights = s.weights.data() + q * CHUNK;
        vf scores[CHUNK / W];
        for (auto& v : scores) v = splat(0.0f);
        const vu* keys = s.keys.data();
        for (int64_t word = 0; word < words; ++word)
            for (int g = 0; g < CHUNK / W; ++g) scores[g] = Scores<T>::step(scores[g], query, word, keys[g * words + word]);
        vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        int low = int(std::max<int64_t>(a_.window ? position - a_.window + 1 - chunk : 0, 0));
        int high = int(std::min<int64_t>(position - chunk, CHUNK));
        vf best = splat(NONE);
        for (int g = 0; g < CHUNK / W; ++g) {
            vf v = scores[g] * a_.scale;
            if (a_.softcap > 0.0f) v = vtanh(v / a_.softcap) * a_.softcap;
            vi key = lane + g * W;
            v = ((key >= low) & (key <= high)) ? v : splat(NONE);
            scores[g] = v;
            best = vmax(best, v);
        }
        float top = std::max(s.part_max[q], max_of(best));
        vf added = splat(0.0f);
        for (int g = 0; g < CHUNK / W; ++g) {
            vf e = vexp(scores[g] - top);
            e = scores[g] > 0.5f * NONE ? e : splat(0.0f);
            added = added + e;
            store(weights + g * W, e);
        }
        float factor = s.part_max[q] > 0.5f * NONE ? vexp(splat(s.part_max[q] - top))[0] : 0.0f;
        s.part_max[q] = top;
        s.part_sum[q] = s.part_sum[q] * factor + sum(added);
        s.rescale[q] = factor;
    }

    template <int Q>
    void add_block(int64_t q, int64_t i, int width, Scratch& s) const {
        vf acc[Q][4];
        for (int r = 0; r < Q; ++r)
            for (int c = 0; c < width; ++c)
                acc[r][c] = load(s.partial.data() + (q + r) * a_.value_size + i + c * W) * s.rescale[q + r];
        for (int key = 0; key < CHUNK; ++key) {
            const float* value = s.value.data() + key * a_.value_size + i;
            for (int c = 0; c < width; ++c) {
                vf v = load(value + c * W);
                for (int r = 0; r < Q; ++r) acc[r][c] = s.weights[(q + r) * CHUNK + key] * v + acc[r][c];
            }
        }
        for (int r = 0; r < Q; ++r)
            for (int c = 0; c < width; ++c) store(s.partial.data() + (q + r) * a_.value_size + i + c * W, acc[r][c]);
    }

    void add_values(int64_t queries, Scratch& s) const {
        int64_t wide = a_.value_size / W * W;
        for (int64_t i = 0; i < wide; i += 4 * W) {
            int width = int(std::min<int64_t>(4, (wide - i) / W));
            int64_t q = 0;
            if (width == 4) {
                for (; q + 4 <= queries; q += 4) add_block<4>(q, i, 4, s);
                for (; q < queries; ++q) add_block<1>(q, i, 4, s);
            } else {
                for (; q < queries; ++q) add_block<1>(q, i, width, s);
            }
        }
        for (int64_t q = 0; q < queries; ++q)
            for (int64_t i = wide; i < a_.value_size; ++i) {
                float acc = s.partial[q * a_.value_size + i] * s.rescale[q];
                for (int key = 0; key < CHUNK; ++key)
                    acc = __builtin_fmaf(s.weights[q * CHUNK + key], s.value[key * a_.value_size + i], acc);
                s.partial[q * a_.value_size + i] = acc;
            }
    }

    void join(int64_t queries, Scratch& s) const {
        for (int64_t q = 0; q < queries; ++q) {
            if (!(s.part_max[q] > 0.5f * NONE)) continue;  // this query sees nothing of the split
            float top = std::max(s.all_max[q], s.part_max[q]);
            float before = s.all_max[q] > 0.5f * NONE ? vexp(splat(s.all_max[q] - top))[0] : 0.0f;
            float now = vexp(splat(s.part_max[q] - top))[0];
            s.all_max[q] = top;
            s.all_sum[q] = s.all_sum[q] * before + s.part_sum[q] * now;
            float *total = s.total.data() + q * a_.value_size, *part = s.partial.data() + q * a_.value_size;
            for (int64_t i = 0; i < a_.value_size; ++i) total[i] = total[i] * before + part[i] * now;
        }
    }

    void write(int64_t token, int64_t head, int64_t q, Scratch& s) const {
        T* out = (T*)a_.out + (token * a_.heads + head * group_ + q % group_) * a_.value_size;
        float inverse = s.all_sum[q] > 0.0f ? 1.0f / s.all_sum[q] : 0.0f;
        for (int64_t i = 0; i < a_.value_size; ++i) store_one(out + i, s.total[q * a_.value_size + i] * inverse);
    }

    const AttentionArgs& a_;
    int64_t group_;
};

template <class T>
static void attention(Pool& pool, const AttentionArgs& a) {
    struct Item {
        int64_t row, first, last;
    };
    std::vector<Item> items;
    for (int64_t row = a.rows; row-- > 0;)  // the long rows come last in a step: start with them
        for (int64_t first = a.query_starts[row]; first < a.query_starts[row + 1]; first += QUERY_TILE)
            items.push_back({row, first, std::min<int64_t>(first + QUERY_TILE, a.query_starts[row + 1])});
    std::vector<Scratch> scratch(pool.size());
    Attention<T> attention(a);
    auto body = [&](int64_t task, int thread) {
        const Item& item = items[task / a.kv_heads];
        attention.task(item.row, item.first, item.last, task % a.kv_heads, scratch[thread]);
    };
    parallel(pool, int64_t(items.size()) * a.kv_heads, body);
}

}  // namespace infer

extern "C" void infer_attention(void* pool, int dtype, const AttentionArgs* args) {
    infer::Pool& p = *static_cast<infer::Pool*>(pool);
    if (dtype == FP32)
        infer::attention<float>(p, *args);
    else
        infer::attention<infer::bf16>(p, *args);
}
