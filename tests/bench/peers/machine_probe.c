// What this machine can do: machine_probe BYTES THREADS, then commands on standard input, one line each.
//   read   GB/s of a plain read of an arena of BYTES (2 MiB pages asked for), median of 5 passes
//   peaks  G operations per second of fp32 FMA, bf16 dot and int8 dot products that touch registers alone; 0: not here
// Threads sleep between commands, so that a probe beside an engine costs it nothing.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { PASSES = 5, MAX_THREADS = 64, CHAINS = 12 };
enum work { READ, FP32, BF16, INT8 };

typedef uint64_t lanes __attribute__((vector_size(64)));
typedef float floats __attribute__((vector_size(64)));

static char *arena;
static size_t arena_bytes;
static int num_threads;
static enum work current;
static pthread_barrier_t begin, end;
static volatile uint64_t sink[MAX_THREADS * 8];  // or the reads would be dropped
static double started[MAX_THREADS], ended[MAX_THREADS];

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void read_share(int thread) {
    size_t share = arena_bytes / (size_t)num_threads / 256 * 256;
    const lanes *from = (const lanes *)(arena + share * (size_t)thread);
    lanes a = {0}, b = {0}, c = {0}, d = {0};
    for (size_t i = 0; i < share / 64; i += 4) {
        a ^= from[i];
        b ^= from[i + 1];
        c ^= from[i + 2];
        d ^= from[i + 3];
    }
    a ^= b ^ c ^ d;
    for (int i = 0; i < 8; ++i) sink[thread * 8 + i] = a[i];
}

// Twelve chains hide the latency. One volatile block per round, or the compiler would spill them or drop what nobody reads.
#if defined(__AVX512F__)
#define ONE(NAME, I) NAME " %12, %12, %" #I "\n\t"
#define CHAIN_LOOP(NAME)                                                                                     \
    floats x = {0}, a = x, b = x, c = x, d = x, e = x, f = x, g = x, h = x, p = x, q = x, r = x, s = x;         \
    for (long i = 0; i < rounds; ++i)                                                                       \
        __asm__ volatile(ONE(NAME, 0) ONE(NAME, 1) ONE(NAME, 2) ONE(NAME, 3) ONE(NAME, 4) ONE(NAME, 5)        \
                         ONE(NAME, 6) ONE(NAME, 7) ONE(NAME, 8) ONE(NAME, 9) ONE(NAME, 10) ONE(NAME, 11)    \
                         : "+v"(a), "+v"(b), "+v"(c), "+v"(d), "+v"(e), "+v"(f), "+v"(g), "+v"(h), "+v"(p),    \
                           "+v"(q), "+v"(r), "+v"(s)                                                         \
                         : "v"(x))
#endif

static long per_instruction(enum work work) {
    return work == FP32 ? 32 : work == BF16 ? 64 : 128;
}

static int has(enum work work) {
#if defined(__AVX512F__)
    if (work == FP32) return 1;
#endif
#if defined(__AVX512BF16__)
    if (work == BF16) return 1;
#endif
#if defined(__AVX512VNNI__)
    if (work == INT8) return 1;
#endif
    return 0;
}

static void compute(enum work work, long rounds) {
#if defined(__AVX512F__)
    if (work == FP32) {
        CHAIN_LOOP("vfmadd231ps");
    }
#endif
#if defined(__AVX512BF16__)
    if (work == BF16) {
        CHAIN_LOOP("vdpbf16ps");
    }
#endif
#if defined(__AVX512VNNI__)
    if (work == INT8) {
        CHAIN_LOOP("vpdpbusd");
    }
#endif
    (void)rounds;
    (void)work;
}

static const long ROUNDS = 10000000;

static void *run(void *argument) {
    int thread = (int)(intptr_t)argument;
    for (;;) {
        pthread_barrier_wait(&begin);
        started[thread] = now();
        if (current == READ)
            read_share(thread);
        else
            compute(current, ROUNDS);
        ended[thread] = now();
        pthread_barrier_wait(&end);
    }
    return NULL;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

// Seconds of each pass, sorted.
static void measure(enum work work, double *took) {
    current = work;
    for (int i = -1; i < PASSES; ++i) {  // the first one wakes the threads
        pthread_barrier_wait(&begin);
        pthread_barrier_wait(&end);
        double first = started[0], last = ended[0];
        for (int k = 1; k < num_threads; ++k) {
            if (started[k] < first) first = started[k];
            if (ended[k] > last) last = ended[k];
        }
        if (i >= 0) took[i] = last - first;
    }
    qsort(took, PASSES, sizeof *took, ascending);
}

int main(int count, char **words) {
    if (count != 3) {
        fprintf(stderr, "usage: %s BYTES THREADS\n", words[0]);
        return 2;
    }
    const size_t huge = (size_t)2 << 20;
    arena_bytes = (strtoull(words[1], NULL, 10) + huge - 1) / huge * huge;
    num_threads = atoi(words[2]);
    if (arena_bytes == 0 || num_threads < 1 || num_threads > MAX_THREADS) return 2;
    arena = aligned_alloc(huge, arena_bytes);
    if (arena == NULL) return 1;
#if defined(MADV_HUGEPAGE)
    madvise(arena, arena_bytes, MADV_HUGEPAGE);
#endif
    memset(arena, 1, arena_bytes);
    pthread_barrier_init(&begin, NULL, (unsigned)num_threads + 1);
    pthread_barrier_init(&end, NULL, (unsigned)num_threads + 1);
    for (intptr_t i = 0; i < num_threads; ++i) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, run, (void *)i) != 0) return 1;
    }
    char line[64];
    double took[PASSES];
    while (fgets(line, sizeof line, stdin) != NULL) {
        if (strcmp(line, "read\n") == 0) {
            measure(READ, took);
            printf("%.2f\n", (double)arena_bytes / took[PASSES / 2] / 1e9);
        } else if (strcmp(line, "peaks\n") == 0) {
            for (enum work work = FP32; work <= INT8; ++work) {
                double rate = 0;
                if (has(work)) {
                    measure(work, took);
                    rate = (double)ROUNDS * CHAINS * (double)(per_instruction(work) * num_threads) / took[0] / 1e9;
                }
                printf("%.1f%c", rate, work == INT8 ? '\n' : ' ');
            }
        } else {
            fprintf(stderr, "unknown command: %s", line);
            return 2;
        }
        fflush(stdout);
    }
    return 0;
}
