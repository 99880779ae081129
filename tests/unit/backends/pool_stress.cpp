// Runs of any number of tasks on pools of any size: each task once, by a thread there is, and all before the run ends.
#include <cstdio>
#include <random>

#include "pool.h"

using namespace infer;

int main() {
    std::mt19937 draw(1);
    for (int threads = 1; threads <= 5; ++threads)
        for (int spins : {0, 10, 2000}) {
            Pool pool(threads, spins);
            for (int run = 0; run < 20000; ++run) {
                int64_t tasks = 1 + draw() % (run % 10 ? 9 : 300);
                std::vector<int> times(tasks), by(tasks, -1);
                auto body = [&](int64_t task, int thread) {
                    ++times[task];
                    by[task] = thread;
                };
                parallel(pool, tasks, body);
                for (int64_t task = 0; task < tasks; ++task)
                    if (times[task] != 1 || by[task] < 0 || by[task] >= threads) {
                        std::printf("%d threads, %d spins: task %d of %d ran %d times, by %d\n", threads, spins, int(task),
                                    int(tasks), times[task], by[task]);
                        return 1;
                    }
            }
        }
}
