// Memory bandwidth of STREAM's Triad, a[i] = b[i] + 3 c[i], by a thread on each CPU of a list.
//
//   triad BYTES ROUNDS CPU...    BYTES: size of each of the three arrays of a thread
//
// Prints one line per round: the GB/s, with three words of traffic counted for each element. Each
// thread touches its arrays first, so they lie on its NUMA node. The arrays ask for huge pages.

#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>

#include <barrier>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

namespace {

#if defined(__x86_64__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
void triad(double* __restrict a, const double* __restrict b, const double* __restrict c,
           std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) a[i] = b[i] + 3.0 * c[i];
}

double* array(std::size_t count, double value) {
    void* memory = mmap(nullptr, count * sizeof(double), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        std::perror("triad: mmap");
        std::exit(1);
    }
    madvise(memory, count * sizeof(double), MADV_HUGEPAGE);
    auto* numbers = static_cast<double*>(memory);
    for (std::size_t i = 0; i < count; ++i) numbers[i] = value;
    return numbers;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 4) {
        std::fputs("triad BYTES ROUNDS CPU...\n", stderr);
        return 2;
    }
    const std::size_t count = std::strtoull(argv[1], nullptr, 10) / sizeof(double);
    const long rounds = std::strtol(argv[2], nullptr, 10);
    const int threads = argc - 3;
    std::barrier gate(threads + 1);
    std::vector<std::thread> workers;
    for (int index = 0; index < threads; ++index) {
        const long cpu = std::strtol(argv[3 + index], nullptr, 10);
        workers.emplace_back([&, cpu] {
            cpu_set_t set;
            CPU_ZERO(&set);
            CPU_SET(static_cast<std::size_t>(cpu), &set);
            pthread_setaffinity_np(pthread_self(), sizeof set, &set);
            double* b = array(count, 1.0);
            double* c = array(count, 2.0);
            double* a = array(count, 0.0);
            for (long round = 0; round < rounds; ++round) {
                gate.arrive_and_wait();
                triad(a, b, c, count);
                gate.arrive_and_wait();
            }
            if (a[count / 2] != 7.0) std::exit(3);
        });
    }
    const double moved = 3.0 * sizeof(double) * static_cast<double>(count) * threads;
    for (long round = 0; round < rounds; ++round) {
        gate.arrive_and_wait();
        const auto begin = std::chrono::steady_clock::now();
        gate.arrive_and_wait();
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
        std::printf("%.6f\n", moved / took.count() / 1e9);
    }
    for (auto& worker : workers) worker.join();
    return 0;
}
