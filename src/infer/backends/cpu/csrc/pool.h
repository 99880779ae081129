// A few threads that run one function over task numbers. Each has a range of its own and then takes what others have left;
// so what a thread writes is mostly what it wrote or reads next. Waiting threads spin a bounded while, then sleep on a futex.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace infer {

typedef void (*TaskFunction)(void* context, int64_t task, int thread);

class Pool {
  public:
    Pool(int threads, int spins);
    ~Pool();

    // Runs function(context, 0 .. tasks-1, thread) and returns when all are done. The caller takes part, and waits only
    // for helpers that hold a task: one that the machine has not woken yet is not missed. One caller at a time.
    void run(int64_t tasks, TaskFunction function, void* context);

    int size() const { return int(threads_.size()) + 1; }

  private:
    void serve(int thread);
    void take(int thread);

    std::vector<std::thread> threads_;
    int spins_;
    TaskFunction function_ = nullptr;
    void* context_ = nullptr;
    // 16 bits that change with every run, 24 bits for the end of the range, 24 for the next task. A task is claimed by
    // exchanging the whole word, so whatever a helper has read before, what it claims belongs to the present run.
    struct alignas(64) Range {
        std::atomic<uint64_t> word{0};
    };
    std::vector<Range> ranges_;
    uint64_t runs_ = 0;
    alignas(64) std::atomic<uint32_t> done_{0};
    alignas(64) std::atomic<uint32_t> epoch_{0};
    std::atomic<uint32_t> sleepers_{0};
    std::atomic<bool> caller_sleeps_{false};
    std::atomic<bool> stop_{false};
};

constexpr int64_t MOST_TASKS = (1 << 24) - 1;

template <class F>
void parallel(Pool& pool, int64_t tasks, F& body) {
    if (tasks == 1 || pool.size() == 1) {
        for (int64_t task = 0; task < tasks; ++task) body(task, 0);
        return;
    }
    pool.run(tasks, [](void* context, int64_t task, int thread) { (*static_cast<F*>(context))(task, thread); }, &body);
}

// body(row) for all rows, in portions: at least so many to a task, and no more than it takes to give each thread some.
template <class F>
void parallel_rows(Pool& pool, int64_t rows, int64_t least, F& body) {
    constexpr int64_t MOST = 32;
    int64_t each = std::max({int64_t(1), least, std::min(MOST, (rows + pool.size() - 1) / pool.size())});
    auto task = [&](int64_t index, int) {
        for (int64_t row = index * each, stop = std::min(rows, row + each); row < stop; ++row) body(row);
    };
    parallel(pool, (rows + each - 1) / each, task);
}

}  // namespace infer
