// Loops shared by torch's own threads. A second set of threads would fight with torch's for the cores: OpenMP's spin
// for milliseconds after every loop. So Python hands over the `GOMP_parallel` that torch itself uses.
#pragma once
#include <atomic>

struct Team {
    typedef void (*Parallel)(void (*)(void*), void*, unsigned, unsigned);
    Parallel parallel;  // null: the caller alone
    int threads;

    // body(task) for tasks 0 .. n - 1, in no certain order. Results must not depend on who does what.
    template <class Body>
    void run(int n, const Body& body) const {
        struct Job {
            const Body& body;
            std::atomic<int> next;
            int n;
        } job{body, {0}, n};
        auto help = [](void* data) {
            Job& job = *static_cast<Job*>(data);
            for (int task; (task = job.next.fetch_add(1)) < job.n;) job.body(task);
        };
        if (!parallel || threads <= 1 || n <= 1)
            help(&job);
        else
            parallel(help, &job, unsigned(threads), 0);
    }

    // body(begin, end) for stretches of `rows` rows, of at least `least` rows each.
    template <class Body>
    void rows(int rows, int least, const Body& body) const {
        const int parts = std::max(1, std::min(rows / std::max(1, least), 4 * threads));
        run(parts, [&](int part) {
            body(int(int64_t(rows) * part / parts), int(int64_t(rows) * (part + 1) / parts));
        });
    }
};
