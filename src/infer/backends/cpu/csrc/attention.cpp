// Attention over the paged cache for any mix of prefill and decode rows.
//
// The keys of a query are walked in splits of SPLIT at fixed absolute positions; each gives a maximum, a sum and an output
// of its own, and these are joined in order. What a query sees therefore never depends on the batch, on how its prompt was
// cut, or on the threads. Keys of a split that a query does not see get a weight of exactly zero.
#include <atomic>
#include <memory>

#include "api.h"
#include "attention_kernel.h"
#include "pool.h"

namespace infer {

constexpr int64_t TILE_ROWS = 48;     // query rows of a task: tokens of one row times the query heads of a KV head
constexpr int64_t TILE_TOKENS = 16;

// Tiles of all rows, the long rows, which come last in a step, first.
static std::vector<Tile> tiles_of(const AttentionArgs& a, int64_t tokens) {
    std::vector<Tile> tiles;
    for (int64_t row = a.rows; row-- > 0;) {
        int64_t stop = a.query_starts[row + 1], context = a.seq_lens[row] - stop;
        for (int64_t first = a.query_starts[row]; first < stop; first += tokens) {
            Tile tile{row, first, std::min(first + tokens, stop), 0, 0, 0, 0};
            tile.newest = context + tile.last - 1;
            tile.from = a.window ? std::max<int64_t>(0, context + first - a.window + 1) : 0;
            tile.first_split = tile.from / SPLIT;
            tile.splits = tile.newest / SPLIT + 1 - tile.first_split;
            tiles.push_back(tile);
        }
    }
    return tiles;
}

// How a step is cut into tasks: a tile for some heads, and all its splits or one of them.
struct Cut {
    int64_t tokens = 1, heads, head_parts;
    bool apart;

    Cut(const AttentionArgs& a, int threads) {
        int64_t group = a.heads / a.kv_heads, longest = 1, keys = 0, most = 0, sum = 0;
        for (int64_t row = 0; row < a.rows; ++row) {
            int64_t fresh = a.query_starts[row + 1] - a.query_starts[row];
            keys += a.seq_lens[row];
            longest = std::max(longest, fresh);
            most = std::max(most, a.seq_lens[row] * std::min(fresh, TILE_TOKENS));
            sum += a.seq_lens[row] * fresh;
        }
        tokens = std::min(longest, std::max<int64_t>(1, std::min(TILE_TOKENS, TILE_ROWS / group)));
        int64_t tiles = 0;
        for (int64_t row = 0; row < a.rows; ++row) tiles += (a.query_starts[row + 1] - a.query_starts[row] + tokens - 1) / tokens;
        apart = threads > 1 && most * 2 * threads > sum;  // else threads end at much the same time without
        int64_t tasks = apart ? tiles * (keys / std::max<int64_t>(1, a.rows) / SPLIT + 1) : tiles;
        // All heads of a key lie together: one task reads them all, if there are tasks enough and few query rows.
        heads = std::min(a.kv_heads, std::max<int64_t>(1, TILE_ROWS / (group * tokens)));
        if (tasks < 2 * threads && threads > 1) heads = std::min(heads, std::max<int64_t>(1, a.kv_heads * tasks / (2 * threads)));
        head_parts = (a.kv_heads + heads - 1) / heads;
    }
};

// Splits are joined by the task that ends last, where they are tasks of their own, else as they come.
template <class T, class C>
static void attention(Pool& pool, const AttentionArgs& a) {
    typedef Attention<T, C> Kernel;
    Cut cut(a, pool.size());
    Kernel kernel(a, cut.tokens, cut.heads);
    struct Piece {
        int64_t tile, head, parts, first_task, first_partial;
    };
    std::vector<Tile> tiles = tiles_of(a, cut.tokens);
    std::vector<Piece> pieces;
    int64_t tasks = 0, partials = 0;
    for (size_t i = 0; i < tiles.size(); ++i)
        for (int64_t head = 0; head < a.kv_heads; head += cut.heads) {
            int64_t parts = cut.apart ? tiles[i].splits : 1;
            pieces.push_back({int64_t(i), head, parts, tasks, partials});
            tasks += parts;
            if (parts > 1) partials += parts;
        }
    Arena scratch_size(nullptr), partial_size(nullptr);
    typename Kernel::Scratch sized(kernel, scratch_size);
    kernel.partial(partial_size);
    int64_t each = scratch_size.used();
    std::unique_ptr<char[]> memory(new char[each * pool.size() + partial_size.used() * partials + 64]);
    char* base = memory.get() + (64 - (uintptr_t)memory.get() % 64) % 64;
    std::vector<typename Kernel::Scratch> scratch;
    for (int i = 0; i < pool.size(); ++i) {
        Arena arena(base + each * i);
        scratch.emplace_back(kernel, arena);
    }
    Arena arena(base + each * pool.size());
    std::vector<Partial> parts;
    for (int64_t i = 0; i < partials; ++i) parts.push_back(kernel.partial(arena));
    std::vector<std::atomic<int64_t>> waiting(pieces.size());
    for (size_t i = 0; i < pieces.size(); ++i) waiting[i].store(pieces[i].parts, std::memory_order_relaxed);
    auto piece_of = [&](int64_t number) {
        auto starts_later = [](int64_t task, const Piece& piece) { return task < piece.first_task; };
        return std::upper_bound(pieces.begin(), pieces.end(), number, starts_later) - 1 - pieces.begin();
    };
    auto task_of = [&](const Piece& piece) {
        return kernel.task(tiles[piece.tile], piece.head, std::min(cut.heads, a.kv_heads - piece.head));
    };
    auto body = [&](int64_t number, int thread) {
        int64_t own = piece_of(number), later = number + 1;  // which this thread takes next, unless its range has ended
        const Piece& piece = pieces[own];
        typename Kernel::Scratch& s = scratch[thread];
        typename Kernel::Task task = task_of(piece);
        const Tile& tile = task.tile;
        Ahead next;
        if (later < tasks) {
            const Piece& other = pieces[piece_of(later)];
            next = kernel.begin_split(task_of(other), tiles[other.tile].first_split + later - other.first_task);
        }
        kernel.load_queries(task, s);
        kernel.begin_total(task, s.total);
        if (piece.parts == 1) {
            for (int64_t i = 0; i < tile.splits; ++i) {
                bool last = i + 1 == tile.splits;
                kernel.split(task, tile.first_split + i, last ? next : kernel.begin_split(task, tile.first_split + i + 1), s);
                kernel.join(task, s.part, s.total);
            }
            return kernel.write(task, s.total);
        }
        Partial* of_piece = parts.data() + piece.first_partial;
        int64_t part = number - piece.first_task;
        std::swap(s.part, of_piece[part]);
        kernel.split(task, tile.first_split + part, next, s);
        std::swap(s.part, of_piece[part]);
        if (waiting[own].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
        for (int64_t i = 0; i < piece.parts; ++i) kernel.join(task, of_piece[i], s.total);
        kernel.write(task, s.total);
    };
    parallel(pool, tasks, body);
}

}  // namespace infer

extern "C" void infer_attention(void* pool, int dtype, const AttentionArgs* args) {
    using namespace infer;
    Pool& p = *static_cast<Pool*>(pool);
    if (args->cache_dtype == FP8)
        dtype == FP32 ? attention<float, fp8>(p, *args) : attention<bf16, fp8>(p, *args);
    else
        dtype == FP32 ? attention<float, float>(p, *args) : attention<bf16, bf16>(p, *args);
}
