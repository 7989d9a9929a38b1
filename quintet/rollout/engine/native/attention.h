// Attention over pages of keys and values. A page of one KV head is two packed matrices (gemm.h): keys with the
// tokens as columns, values with the tokens along the inner size; so scores and mixed values are the same blocks as
// every other product. A task is up to LIMIT query rows of one KV head whose tokens see the same shared pages (the
// prompt of a group, read once for all of them) and then pages of their own; partial results are merged by their
// running maximum and sum (arXiv 1805.02867, as in arXiv 2205.14135).
#pragma once
#include "gemm.h"

constexpr int LIMIT = 64;           // query rows of a task
constexpr int SPAN = 8;             // pages scored at once
constexpr int COLUMNS = SPAN * PAGE;

template <class P>
struct Scratch {
    typename P::Act chance[LIMIT * COLUMNS] __attribute__((aligned(64)));
    float score[LIMIT * COLUMNS] __attribute__((aligned(64)));
    float mixed[BLOCK * PANEL] __attribute__((aligned(64)));
    float peak[LIMIT], total[LIMIT], fade[LIMIT];
    int seen[LIMIT];
    std::vector<float> out;  // [LIMIT, width]
};

// A list of pages of which page i shows counts[i] tokens, or (counts null) `tokens` consecutive ones in all.
struct Pages {
    const int32_t* ids;
    const int32_t* counts;
    int n, tokens;
    int shown(int i) const { return counts ? counts[i] : std::min(PAGE, tokens - i * PAGE); }
};

template <class P>
struct Attention {
    typedef typename P::Act Act;
    int width;        // head size padded to a multiple of 32
    int kv_heads;
    bool amx;

    size_t page_size() const { return size_t(2) * PAGE * width; }  // of one KV head
    const Act* keys(const Act* layer, int page, int head) const {
        return layer + (size_t(page) * kv_heads + head) * page_size();
    }

    static size_t place(int column, int at, int depth) {  // in a packed matrix; see Matrix::set
        size_t panel = size_t(column / PANEL) * PANEL * depth;
        int c = column % PANEL;
        if (P::PAIRED) return panel + size_t(at / 32) * 1024 + (c / 16) * 512 + (at % 32 / 2) * 32 + (c % 16) * 2 + at % 2;
        return panel + size_t(at) * PANEL + c;
    }

    void write(Act* layer, int page, int head, int offset, const float* k, const float* v, int head_dim) const {
        Act* to = layer + (size_t(page) * kv_heads + head) * page_size();
        for (int d = 0; d < head_dim; ++d) to[place(offset, d, width)] = P::one(k[d]);
        to += size_t(PAGE) * width;
        for (int d = 0; d < head_dim; ++d) to[place(d, offset, PAGE)] = P::one(v[d]);
    }

    void begin(Scratch<P>& s, int rows) const {
        s.out.resize(size_t(LIMIT) * width);
        std::fill(s.out.begin(), s.out.begin() + size_t(rows) * width, 0.0f);
        for (int r = 0; r < rows; ++r) s.peak[r] = -INFINITY, s.total[r] = 0.0f;
    }

    // Rows [first, first + rows) of the task; q holds these rows. `seen` (or null): tokens that each row may see.
    void add(Scratch<P>& s, const Act* layer, int head, const Act* q, int first, int rows, Pages pages,
             const int* seen) const {
        for (int start = 0; start < pages.n; start += SPAN) {
            const int n = std::min(SPAN, pages.n - start);
            const Act* at[SPAN];
            for (int i = 0; i < n; ++i) at[i] = keys(layer, pages.ids[start + i], head);
            for (int r = 0; r < rows; r += BLOCK) scores(s, q + size_t(r) * width, r, std::min(BLOCK, rows - r), at, n);
            for (int i = 0; i < n; ++i) hide(s, rows, i * PAGE + pages.shown(start + i), (i + 1) * PAGE);
            if (seen)
                for (int r = 0; r < rows; ++r) hide_row(s, r, std::max(0, seen[r] - start * PAGE), n * PAGE);
            for (int r = 0; r < rows; ++r) soften(s, r, first + r, n * PAGE);
            for (int r = 0; r < rows; r += BLOCK) mix(s, r, first + r, std::min(BLOCK, rows - r), at, n);
        }
    }

    void finish(Scratch<P>& s, int row, Act* to, int head_dim) const {
        const float scale = 1.0f / s.total[row];
        for (int d = 0; d < head_dim; ++d) to[d] = P::one(s.out[size_t(row) * width + d] * scale);
    }

  private:
    void scores(Scratch<P>& s, const Act* q, int row, int rows, const Act* const* at, int n) const {
        for (int i = 0; i < n; ++i)
            for (int c = 0; c < PAGE; c += PANEL) {
                const Act* panel = at[i] + size_t(c) * width;
                block(q, width, rows, {&panel, 1, width}, s.score + row * COLUMNS + i * PAGE + c, COLUMNS, amx);
            }
    }

    static void hide_row(Scratch<P>& s, int row, int from, int to) {
        for (int c = from; c < to; ++c) s.score[row * COLUMNS + c] = -INFINITY;
    }
    static void hide(Scratch<P>& s, int rows, int from, int to) {
        if (from < to)
            for (int r = 0; r < rows; ++r) hide_row(s, r, from, to);
    }

    // Scores of one row into weights relative to the running maximum; `fade` is what earlier results shrink by.
    static void soften(Scratch<P>& s, int local, int row, int columns) {
        const float* score = s.score + local * COLUMNS;
        Act* chance = s.chance + local * COLUMNS;
        vf top = load(score);
        for (int c = VL; c < columns; c += VL) top = vmax(top, load(score + c));
        const float peak = std::max(s.peak[row], largest(top));
        const vf base = splat(peak == -INFINITY ? 0.0f : peak);
        vf total = {};
        for (int c = 0; c < columns; c += VL) {
            vf e = vexp(load(score + c) - base);
            total += e;
            P::put(chance + c, e);
        }
        s.fade[local] = s.total[row] == 0.0f ? 0.0f : std::exp(s.peak[row] - peak);
        s.total[row] = s.total[row] * s.fade[local] + sum(total);
        s.peak[row] = peak;
    }

    void mix(Scratch<P>& s, int local, int row, int rows, const Act* const* at, int n) const {
        for (int d = 0; d < width; d += PANEL) {
            const Act* parts[SPAN];
            for (int i = 0; i < n; ++i) parts[i] = at[i] + size_t(PAGE) * width + size_t(d) * PAGE;
            block(s.chance + local * COLUMNS, COLUMNS, rows, {parts, n, PAGE}, s.mixed, PANEL, amx);
            for (int r = 0; r < rows; ++r) {
                float* out = s.out.data() + size_t(row + r) * width + d;
                const vf fade = splat(s.fade[local + r]);
                for (int c = 0; c < PANEL; c += VL)
                    store(out + c, load(out + c) * fade + load(s.mixed + r * PANEL + c));
            }
        }
    }
};
