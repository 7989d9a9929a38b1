// Threads that share the tasks of one loop at a time. The caller works too and goes on when all *tasks* are done, not
// when all threads have arrived: a thread that the system has put aside between two tasks holds nobody up, which on a
// machine shared with others is most of the time of a barrier.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include <immintrin.h>

class Pool {
    // Generation of the loop (24 bits), its number of tasks (20) and the next task to be taken (20) change together,
    // so that a thread that wakes late can neither take a task twice nor one of a loop that is over.
    std::atomic<uint64_t> ticket{0};
    std::atomic<int> done{0}, asleep{0};
    std::atomic<bool> closing{false}, waiting{false};
    void (*call)(const void*, int, int) = nullptr;
    const void* work = nullptr;
    std::mutex mutex;
    std::condition_variable wake, finished;
    std::vector<std::thread> threads;
    static constexpr uint64_t MASK = (1 << 20) - 1;
    static constexpr int SPINS = 2000;  // some tens of microseconds

    static bool open(uint64_t t) { return (t & MASK) < (t >> 20 & MASK); }

    // Take and do tasks until none is left.
    void help(int worker) {
        for (uint64_t t = ticket.load(std::memory_order_acquire); open(t);) {
            if (!ticket.compare_exchange_weak(t, t + 1, std::memory_order_acq_rel)) continue;
            call(work, int(t & MASK), worker);
            const int all = int(t >> 20 & MASK);  // read before the last task is told done
            if (done.fetch_add(1) + 1 == all && waiting.load()) {
                std::lock_guard<std::mutex> lock(mutex);
                finished.notify_one();
            }
            t = ticket.load(std::memory_order_acquire);
        }
    }

    void live(int worker) {
        while (!closing.load()) {
            help(worker);
            int spins = 0;
            while (spins++ < SPINS && !open(ticket.load(std::memory_order_acquire))) _mm_pause();
            if (spins <= SPINS) continue;
            std::unique_lock<std::mutex> lock(mutex);
            asleep.fetch_add(1);
            wake.wait(lock, [&] { return closing.load() || open(ticket.load()); });
            asleep.fetch_sub(1);
        }
    }

  public:
    explicit Pool(int count) {
        for (int worker = 1; worker < count; ++worker) threads.emplace_back([this, worker] { live(worker); });
    }
    Pool(const Pool&) = delete;
    ~Pool() {
        {
            std::lock_guard<std::mutex> lock(mutex);
            closing = true;
        }
        wake.notify_all();
        for (std::thread& thread : threads) thread.join();
    }

    // body(task, worker) for tasks 0 .. n - 1, fewer than 2^20, by the caller (worker 0) and the threads.
    template <class Body>
    void run(int n, const Body& body) {
        if (threads.empty() || n <= 1) {
            for (int task = 0; task < n; ++task) body(task, 0);
            return;
        }
        call = [](const void* b, int task, int worker) { (*static_cast<const Body*>(b))(task, worker); };
        work = &body;
        done.store(0, std::memory_order_relaxed);
        const uint64_t generation = (ticket.load(std::memory_order_relaxed) >> 40) + 1;
        ticket.store(generation << 40 | uint64_t(n) << 20);  // publishes what stands above
        if (asleep.load()) {
            std::lock_guard<std::mutex> lock(mutex);
            wake.notify_all();
        }
        help(0);
        for (int spins = 0; spins < SPINS && done.load(std::memory_order_acquire) < n; ++spins) _mm_pause();
        if (done.load() == n) return;
        std::unique_lock<std::mutex> lock(mutex);  // a thread was put aside in its task: do not spin in its place
        waiting.store(true);
        finished.wait(lock, [&] { return done.load() == n; });
        waiting.store(false);
    }

    // As `run`, in stretches of neighbouring tasks: for many small ones.
    template <class Body>
    void run_many(int n, const Body& body) {
        const int parts = std::min(n, 4 * (int(threads.size()) + 1));
        run(parts, [&](int part, int worker) {
            const int end = int(int64_t(n) * (part + 1) / parts);
            for (int task = int(int64_t(n) * part / parts); task < end; ++task) body(task, worker);
        });
    }
};
