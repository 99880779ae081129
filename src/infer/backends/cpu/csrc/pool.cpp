#include "pool.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace infer {

namespace {

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
#else
    if (word.load() == value) std::this_thread::yield();
#endif
}

void wake_all(std::atomic<uint32_t>& word) {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
#else
    (void)word;
#endif
}

constexpr uint64_t COUNT = (1u << 24) - 1;

}  // namespace

Pool::Pool(int threads, int spins) : spins_(spins), ranges_(threads > 1 ? threads : 1) {
    for (int i = 1; i < threads; ++i) threads_.emplace_back([this, i] { serve(i); });
}

Pool::~Pool() {
    stop_.store(true);
    epoch_.fetch_add(1);
    wake_all(epoch_);
    for (auto& thread : threads_) thread.join();
}

void Pool::run(int64_t tasks, TaskFunction function, void* context) {
    function_ = function;
    context_ = context;
    done_.store(0, std::memory_order_relaxed);
    ++runs_;
    for (int64_t i = 0, n = size(); i < n; ++i) {
        uint64_t first = tasks * i / n, end = tasks * (i + 1) / n;
        ranges_[i].word.store(runs_ << 48 | end << 24 | first, std::memory_order_release);
    }
    epoch_.fetch_add(1);
    if (sleepers_.load()) wake_all(epoch_);
    take(0);
    for (int i = 0; i < spins_; ++i) {
        if (done_.load(std::memory_order_acquire) == tasks) return;
        relax();
    }
    caller_sleeps_.store(true);
    for (uint32_t done = done_.load(); done != tasks; done = done_.load()) sleep_while(done_, done);
    caller_sleeps_.store(false);
}

void Pool::take(int thread) {
    uint32_t taken = 0;  // of the present run: it does not end before they are reported
    for (int i = 0, n = int(ranges_.size()); i < n; ++i) {
        std::atomic<uint64_t>& range = ranges_[(thread + i) % n].word;
        for (uint64_t word = range.load(std::memory_order_acquire);;) {
            uint64_t task = word & COUNT, end = word >> 24 & COUNT;
            if (task >= end) break;
            if (!range.compare_exchange_weak(word, word + 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
            function_(context_, int64_t(task), thread);
            ++taken;
            word = range.load(std::memory_order_acquire);
        }
    }
    if (!taken) return;
    done_.fetch_add(taken);
    if (caller_sleeps_.load()) wake_all(done_);
}

void Pool::serve(int thread) {
    for (uint32_t seen = 0; !stop_.load();) {
        take(thread);
        for (int i = 0; i < spins_ && epoch_.load(std::memory_order_acquire) == seen; ++i) relax();
        if (epoch_.load() == seen) {
            sleepers_.fetch_add(1);
            while (epoch_.load() == seen) sleep_while(epoch_, seen);
            sleepers_.fetch_sub(1);
        }
        seen = epoch_.load();
    }
}

}  // namespace infer
