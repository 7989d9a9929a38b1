// LoRA's adapters (arXiv 2106.09685): their gradients, and weights that they are added to. All sums are float32.
//
// With x [rows, inputs] and g = d(loss)/d(output), an adapter's gradients are scale (g up)' x and scale g' (x down') (' =
// transposed): each of two activations is made narrow by a factor, then multiplied by what the other became. First
// threads share rows, then columns, so a gradient is one thread's sum over rows in their order: the same bits, whatever
// the number of threads. Activations are widened a block at a time, into the first-level cache.
#pragma once
#include <algorithm>
#include <vector>

#include "gemm.h"
#include "rows.h"
#include "team.h"

struct Adapter {
    const float *down, *up;      // [rank, inputs], [outputs, rank]
    float *grad_down, *grad_up;  // are added to; null: not wanted
    int32_t rank, first, outputs;  // its outputs are columns [first, first + outputs) of the layers' side by side
    float scale;
};

constexpr int SHORT = 16, LONG = 512;   // rows and columns of a block that is made narrow
constexpr int DEEP = 64, STRIP = 128;   // ... of a block whose gradient is made
constexpr int LONG_LD = LONG + 16, STRIP_LD = STRIP + 16;  // rows do not share the cache's sets

// out [N, W vectors] += a b: a's number (n, k) lies at n * each + k * step, row k of b at k * ldb.
template <int N, int W>
[[gnu::always_inline]] static inline void add_product(const float* a, int each, int step, const float* b, int ldb,
                                                      int depth, float* out, int ld) {
    vf sums[N][W];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 2
        for (int w = 0; w < W; ++w) sums[n][w] = load(out + n * ld + w * VL);
    for (int k = 0; k < depth; ++k, a += step, b += ldb) {
        vf right[W];
#pragma GCC unroll 2
        for (int w = 0; w < W; ++w) right[w] = load(b + w * VL);
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) {
            const vf x = splat(a[n * each]);
#pragma GCC unroll 2
            for (int w = 0; w < W; ++w) sums[n][w] += x * right[w];
        }
    }
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 2
        for (int w = 0; w < W; ++w) store(out + n * ld + w * VL, sums[n][w]);
}

// An adapter's factor with the activations that it makes narrow, and that its gradient is a product of. Its number
// (column, rank) and its gradient's lie at column * of_column + rank * of_rank.
template <class P>
struct Side {
    typedef typename P::Act Act;
    const Act* from;  // [rows, width], `stride` apart
    int stride, width, rank;
    const float* factor;
    float* grad;
    int of_column, of_rank;
    float scale;
    float *packed = nullptr, *narrow = nullptr;  // [width, pad()]; from times factor [rows, pad()]
    const float* other = nullptr;                // the other side's `narrow`

    int pad() const { return up(rank, VL); }
    int strips() const { return (width + STRIP - 1) / STRIP; }

    void pack() const {
        for (int c = 0; c < width; ++c)
            for (int r = 0; r < pad(); ++r)
                packed[size_t(c) * pad() + r] = r < rank ? factor[size_t(c) * of_column + size_t(r) * of_rank] : 0.0f;
    }

    // Rows [row, row + SHORT) of `narrow`, which has room for all of them.
    void make_narrow(int row, int rows) const {
        alignas(64) float wide[SHORT * LONG_LD];
        float* to = narrow + size_t(row) * pad();
        std::fill(to, to + SHORT * pad(), 0.0f);
        std::fill(wide + rows * LONG_LD, wide + SHORT * LONG_LD, 0.0f);
        for (int c = 0; c < width; c += LONG) {
            const int n = std::min(LONG, width - c);
            widen(row, rows, c, n, wide, LONG_LD);
            const float* b = packed + size_t(c) * pad();
            int r = 0;
            for (; r + 2 * VL <= pad(); r += 2 * VL)
                for (int i = 0; i < SHORT; i += TALL)
                    add_product<TALL, 2>(wide + i * LONG_LD, LONG_LD, 1, b + r, pad(), n, to + i * pad() + r, pad());
            for (; r < pad(); r += VL)
                for (int i = 0; i < SHORT; i += 2 * TALL)
                    add_product<2 * TALL, 1>(wide + i * LONG_LD, LONG_LD, 1, b + r, pad(), n, to + i * pad() + r, pad());
        }
    }

    // Adds to the gradient of a strip of columns.
    void add_gradient(int strip, int rows) const {
        static thread_local Buffer<float> room;
        alignas(64) float wide[DEEP * STRIP_LD];
        room.reserve(size_t(pad()) * STRIP);
        float* sums = room.data();
        std::fill(sums, sums + pad() * STRIP, 0.0f);
        const int first = strip * STRIP, n = std::min(STRIP, width - first);
        for (int row = 0; row < rows; row += DEEP) {
            const int depth = std::min(DEEP, rows - row);
            widen(row, depth, first, n, wide, STRIP_LD);
            const float* a = other + size_t(row) * pad();
            for (int c = 0; c < n; c += 2 * VL)
                for (int r = 0; r < rank; r += TALL) {
                    float* to = sums + r * STRIP + c;
                    if (n - c > VL)
                        add_product<TALL, 2>(a + r, 1, pad(), wide + c, STRIP_LD, depth, to, STRIP);
                    else
                        add_product<TALL, 1>(a + r, 1, pad(), wide + c, STRIP_LD, depth, to, STRIP);
                }
        }
        for (int c = 0; c < n; ++c)
            for (int r = 0; r < rank; ++r)
                grad[size_t(first + c) * of_column + size_t(r) * of_rank] += scale * sums[r * STRIP + c];
    }

  private:
    void widen(int row, int rows, int column, int n, float* to, int ld) const {
        const Act* at = from + size_t(row) * stride + column;
        for (int r = 0; r < rows; ++r, at += stride, to += ld) {
            int i = 0;
            for (; i + VL <= n; i += VL) store(to + i, get<P>(at + i));
            if (i < n) store(to + i, get<P>(at + i, n - i));
        }
    }
};

template <class P>
static void adapters_backward(Team team, int rows, int inputs, int outputs, const typename P::Act* x,
                              const typename P::Act* grad, const Adapter* adapters, int n) {
    static thread_local Buffer<float> room;
    std::vector<Side<P>> sides;
    size_t size = 0;
    for (const Adapter* a = adapters; a < adapters + n; ++a) {
        sides.push_back({x, inputs, inputs, a->rank, a->down, a->grad_down, 1, inputs, a->scale});
        sides.push_back({grad + a->first, outputs, a->outputs, a->rank, a->up, a->grad_up, a->rank, 1, a->scale});
        size += size_t(inputs + a->outputs + 2 * up(rows, SHORT)) * up(a->rank, VL);
    }
    room.reserve(size);
    float* at = room.data();
    for (Side<P>& side : sides) {
        side.packed = at, at += size_t(side.width) * side.pad();
        side.narrow = at, at += size_t(up(rows, SHORT)) * side.pad();
    }
    struct Strip {
        const Side<P>& side;
        int number;
    };
    std::vector<Strip> strips;
    for (size_t i = 0; i < sides.size(); ++i) {
        sides[i].other = sides[i ^ 1].narrow;
        if (sides[i].grad)
            for (int s = 0; s < sides[i].strips(); ++s) strips.push_back({sides[i], s});
    }
    team.run(int(sides.size()), [&](int i) { sides[i].pack(); });
    team.run((rows + SHORT - 1) / SHORT, [&](int block) {
        const int row = block * SHORT;
        for (size_t i = 0; i < sides.size(); ++i)
            if (sides[i ^ 1].grad) sides[i].make_narrow(row, std::min(SHORT, rows - row));
    });
    team.run(int(strips.size()), [&](int i) { strips[i].side.add_gradient(strips[i].number, rows); });
}

// out = base [outputs, inputs] + the sum of scale up down; all adapters have that shape.
template <class P>
static void merge(Team team, int outputs, int inputs, const float* base, const Adapter* adapters, int n,
                  typename P::Act* out) {
    static thread_local Buffer<float> room;
    const int width = up(inputs, PANEL);
    size_t ranks = 0;
    for (int i = 0; i < n; ++i) ranks += adapters[i].rank;
    room.reserve(std::max(size_t(1), ranks * width));
    float* const downs = room.data();  // scaled, end to end, rows padded
    float* to = downs;
    for (const Adapter* a = adapters; a < adapters + n; ++a)
        for (int r = 0; r < a->rank; ++r, to += width)
            for (int c = 0; c < inputs; ++c) to[c] = a->scale * a->down[size_t(r) * inputs + c];
    auto merge_rows = [&](int row, int rows) {
        for (int c = 0; c < inputs; c += PANEL) {
            alignas(64) float sums[TALL * PANEL] = {};
            const float* b = downs + c;
            for (const Adapter* a = adapters; a < adapters + n; b += size_t(a->rank) * width, ++a) {
                const float* left = a->up + size_t(row) * a->rank;
                if (rows == TALL)
                    add_product<TALL, 2>(left, a->rank, 1, b, width, a->rank, sums, PANEL);
                else
                    for (int r = 0; r < rows; ++r)
                        add_product<1, 2>(left + r * a->rank, 0, 1, b, width, a->rank, sums + r * PANEL, PANEL);
            }
            for (int r = 0; r < rows; ++r)
                for (int i = c; i < std::min(inputs, c + PANEL); i += VL) {
                    const size_t at = size_t(row + r) * inputs + i;
                    put<P>(out + at, get<F32>(base + at, inputs - i) + load(sums + r * PANEL + i - c), inputs - i);
                }
        }
    };
    team.run((outputs + TALL - 1) / TALL, [&](int block) {
        merge_rows(block * TALL, std::min(TALL, outputs - block * TALL));
    });
}
