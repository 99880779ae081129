// Draws tokens from rows of logits: temperature, top-k, top-p and min-p, then the inverse of the cumulative probability in
// the order of ids. Nothing is sorted but the few tokens at a border. Each row depends on itself alone. Of a row with a mask
// only the allowed logits are looked at: they are moved together first.
#include <algorithm>

#include "api.h"
#include "pool.h"
#include "simd.h"

namespace infer {

constexpr int SHIFT = 19;                  // sign, exponent and four bits of the mantissa choose a bucket
constexpr int BUCKETS = 1 << (32 - SHIFT);
constexpr int64_t BLOCK = 128;             // weights of one partial sum

// The thread's own memory.
struct Space {
    float* weights;    // [n]
    int32_t* ids;      // [n]
    int32_t* border;   // [n] places whose order at a border must be known
    double* mass;      // [max(BUCKETS, blocks)]
    uint32_t* counts;  // [BUCKETS]
    float* allowed;    // [n] logits that a mask allows
    int32_t* places;   // [n] where they were
};

static int64_t padded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

static int64_t sums(int64_t n) { return std::max<int64_t>(BUCKETS, (n + BLOCK - 1) / BLOCK); }

static int64_t space_bytes(int64_t n, bool masked) {
    return (masked ? 5 : 3) * padded(4 * n) + padded(8 * sums(n)) + padded(4 * BUCKETS);
}

static Space space_at(uint8_t* place, int64_t n) {
    Space s;
    s.weights = (float*)place, place += padded(4 * n);
    s.ids = (int32_t*)place, place += padded(4 * n);
    s.border = (int32_t*)place, place += padded(4 * n);
    s.mass = (double*)place, place += padded(8 * sums(n));
    s.counts = (uint32_t*)place, place += padded(4 * BUCKETS);
    s.allowed = (float*)place, place += padded(4 * n);
    s.places = (int32_t*)place;
    return s;
}

// A number whose order as an integer is that of the float; -0 and 0 are one.
static inline uint32_t key(float x) {
    x += 0.0f;
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

static float highest(const float* x, int64_t n) {
    vf best = splat(-__builtin_inff());
    int64_t i = 0;
    for (; i + W <= n; i += W) best = vmax(best, load(x + i));
    float most = max_of(best);
    for (; i < n; ++i) most = x[i] > most ? x[i] : most;
    return most;
}

// Of equal values the lower place comes first.
static void sort_border(const float* values, int32_t* places, int64_t count) {
    std::sort(places, places + count, [values](int32_t a, int32_t b) {
        return values[a] != values[b] ? values[a] > values[b] : a < b;
    });
}

// The places of the `k` highest of x, ascending, into s.ids.
static void keep_highest(const float* x, int64_t n, int64_t k, const Space& s) {
    std::memset(s.counts, 0, 4 * BUCKETS);
    for (int64_t i = 0; i < n; ++i) ++s.counts[key(x[i]) >> SHIFT];
    int64_t above = 0, bucket = BUCKETS - 1;
    for (; above + s.counts[bucket] < k; --bucket) above += s.counts[bucket];
    int64_t at_border = 0;
    for (int64_t i = 0; i < n; ++i)
        if (key(x[i]) >> SHIFT == uint32_t(bucket)) s.border[at_border++] = int32_t(i);
    std::nth_element(s.border, s.border + (k - above - 1), s.border + at_border, [x](int32_t a, int32_t b) {
        return x[a] != x[b] ? x[a] > x[b] : a < b;
    });
    const int32_t last = s.border[k - above - 1];
    const float least = x[last];
    int64_t kept = 0;
    for (int64_t i = 0; i < n; ++i)
        if (x[i] > least || (x[i] == least && i <= last)) s.ids[kept++] = int32_t(i);
}

// The least weight of the smallest set of best tokens that reaches `p` of the total, and the last place that has it.
static std::pair<float, int64_t> nucleus(const float* w, int64_t n, double p, const Space& s) {
    double total = 0;
    std::memset(s.counts, 0, 4 * BUCKETS);
    std::memset(s.mass, 0, 8 * BUCKETS);
    for (int64_t i = 0; i < n; ++i) {
        uint32_t bucket = key(w[i]) >> SHIFT;
        ++s.counts[bucket];
        s.mass[bucket] += w[i];
    }
    for (int bucket = 0; bucket < BUCKETS; ++bucket) total += s.mass[bucket];
    const double limit = p * total;
    double before = 0;
    int64_t bucket = BUCKETS - 1, left = n;
    for (; left > s.counts[bucket] && before + s.mass[bucket] < limit; --bucket) {
        before += s.mass[bucket];
        left -= s.counts[bucket];
    }
    int64_t at_border = 0;
    for (int64_t i = 0; i < n; ++i)
        if (key(w[i]) >> SHIFT == uint32_t(bucket)) s.border[at_border++] = int32_t(i);
    sort_border(w, s.border, at_border);
    int64_t last = 0;  // the best stays, whatever p
    for (before += w[s.border[0]]; last + 1 < at_border && before < limit; before += w[s.border[last]]) ++last;
    return {w[s.border[last]], s.border[last]};
}

// First place whose cumulative weight exceeds number * total; never one of weight 0.
static int64_t invert(const float* w, int64_t n, double number, double* blocks) {
    typedef double vd __attribute__((vector_size(64)));
    double total = 0;
    for (int64_t begin = 0, b = 0; begin < n; begin += BLOCK, ++b) {
        int64_t stop = std::min(begin + BLOCK, n), i = begin;
        vd lanes{};
        for (; i + 8 <= stop; i += 8) {
            typedef float v8 __attribute__((vector_size(32)));
            lanes += __builtin_convertvector(load_as<v8>(w + i), vd);
        }
        double sum = ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
        for (; i < stop; ++i) sum += w[i];
        blocks[b] = total += sum;
    }
    const double target = number * total;
    const int64_t num_blocks = (n + BLOCK - 1) / BLOCK;
    int64_t b = std::upper_bound(blocks, blocks + num_blocks, target) - blocks;
    if (b == num_blocks) b = std::lower_bound(blocks, blocks + num_blocks, total) - blocks;
    double so_far = b ? blocks[b - 1] : 0.0;
    int64_t last = -1;
    for (int64_t i = b * BLOCK; i < std::min(b * BLOCK + BLOCK, n); ++i) {
        if (w[i] == 0.0f) continue;
        last = i;
        so_far += w[i];
        if (so_far > target) break;
    }
    return last;
}

// The place of the highest value, of equal ones the first; where there is a NaN, that of the first one.
static int64_t best(const float* x, int64_t n) {
    constexpr int64_t PIECE = 64 * W;
    float most = -__builtin_inff();
    int64_t where = 0;
    for (int64_t begin = 0; begin < n; begin += PIECE) {
        int64_t stop = std::min(begin + PIECE, n), i = begin;
        vf high = splat(most);
        vi odd{};
        for (; i + W <= stop; i += W) {
            vf v = load(x + i);
            high = vmax(v, high);
            odd |= v != v;
        }
        float top = max_of(high);
        bool nan = any(odd);
        for (; i < stop; ++i) {
            top = x[i] > top ? x[i] : top;
            nan |= x[i] != x[i];
        }
        if (nan) return std::find_if(x + begin, x + stop, [](float v) { return v != v; }) - x;
        if (top > most) most = top, where = begin;
    }
    for (; where < n && x[where] != most; ++where) {}
    return where < n ? where : 0;
}

static int64_t draw(const float* x, int64_t n, float temperature, int64_t top_k, double top_p, float min_p, double number,
                    const Space& s) {
    const float most = highest(x, n);
    const bool chosen = top_k > 0 && top_k < n;
    int64_t count = chosen ? top_k : n;
    if (chosen) {
        keep_highest(x, n, top_k, s);
        for (int64_t i = 0; i < count; ++i) s.weights[i] = x[s.ids[i]];
    }
    const float* from = chosen ? s.weights : x;
    for (int64_t i = 0; i < count; i += W) {
        int some = int(count - i < W ? count - i : W);
        store_some(s.weights + i, vexp((load_some(from + i, some) - most) / temperature), some);
    }
    float least = min_p;
    int64_t last = n;
    if (top_p < 1.0) {
        auto [border, place] = nucleus(s.weights, count, top_p, s);
        if (border >= least) least = border, last = place;
    }
    if (least > 0.0f) {
        int64_t kept = 0;
        for (int64_t i = 0; i < count; ++i) {
            float w = s.weights[i];
            if (w > least || (w == least && i <= last)) {
                s.ids[kept] = chosen ? s.ids[i] : int32_t(i);
                s.weights[kept++] = w;
            }
        }
        return s.ids[invert(s.weights, kept, number, s.mass)];
    }
    int64_t place = invert(s.weights, count, number, s.mass);
    return chosen ? s.ids[place] : place;
}

// Moves the logits whose bit is set together, in the order of ids. Returns how many there are.
static int64_t gather_allowed(const float* x, const uint8_t* mask, int64_t n, const Space& s) {
    constexpr int64_t BITS = 32;
    int64_t count = 0;
    for (int64_t begin = 0; begin < n; begin += BITS, mask += BITS / 8) {
        uint32_t word = uint32_t(mask[0]) | uint32_t(mask[1]) << 8 | uint32_t(mask[2]) << 16 | uint32_t(mask[3]) << 24;
        if (n - begin < BITS) word &= (1u << (n - begin)) - 1;
        if (word == ~0u) {
            std::memcpy(s.allowed + count, x + begin, sizeof(float) * BITS);
            for (int64_t i = 0; i < BITS; ++i) s.places[count + i] = int32_t(begin + i);
            count += BITS;
            continue;
        }
        for (; word; word &= word - 1) {
            int64_t place = begin + __builtin_ctz(word);
            s.allowed[count] = x[place];
            s.places[count++] = int32_t(place);
        }
    }
    return count;
}

// As `draw`, among what the mask allows; at temperature 0 the best of it. -1 where nothing is left.
static int64_t draw_allowed(const float* x, const uint8_t* mask, int64_t n, float temperature, int64_t top_k, double top_p,
                            float min_p, double number, const Space& s) {
    const int64_t count = gather_allowed(x, mask, n, s);
    const int64_t top = count ? best(s.allowed, count) : -1;
    if (top < 0 || !(s.allowed[top] > -__builtin_inff())) return -1;
    if (temperature == 0.0f) return s.places[top];
    return s.places[draw(s.allowed, count, temperature, top_k, top_p, min_p, number, s)];
}

}  // namespace infer

using namespace infer;

extern "C" int64_t infer_draw_work(void* pool, int masked, int64_t n) {
    return static_cast<Pool*>(pool)->size() * space_bytes(n, masked);
}

extern "C" void infer_best(void* pool, const float* logits, int64_t* ids, float* values, int64_t count, int64_t n) {
    auto body = [&](int64_t i, int) {
        ids[i] = best(logits + i * n, n);
        values[i] = logits[i * n + ids[i]];
    };
    parallel(*static_cast<Pool*>(pool), count, body);
}

extern "C" void infer_draw(void* pool, const float* logits, const int64_t* rows, const float* temperatures,
                           const int64_t* top_k, const double* top_p, const float* min_p, const double* numbers,
                           const uint8_t* masks, int64_t* ids, void* work, int64_t count, int64_t n) {
    auto body = [&](int64_t i, int thread) {
        const Space s = space_at((uint8_t*)work + thread * space_bytes(n, masks), n);
        const float* x = logits + rows[i] * n;
        if (masks)
            ids[i] = draw_allowed(x, masks + i * ((n + 31) / 32 * 4), n, temperatures[i], top_k[i], top_p[i], min_p[i], numbers[i], s);
        else
            ids[i] = draw(x, n, temperatures[i], top_k[i], top_p[i], min_p[i], numbers[i], s);
    };
    parallel(*static_cast<Pool*>(pool), count, body);
}
