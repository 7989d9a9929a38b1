// Causal attention of packed samples, forward and backward. Every segment attends to itself causally and to the whole
// of its prefix (a prompt that its samples share, or nothing). A piece is some segments with one prefix, a task one key
// head of a piece: its keys and values are packed once and serve all query heads and segments.
//
// All products are blocks of gemm.h. Keys and values lie in pages of 32 tokens, packed with the tokens as columns (for
// scores) or along the inner size (for mixing). With P = softmax(S) and dS = P (dP - rowsum(dO O)) the backward pass is
// dV' = dO' P, dK' = Q' dS (' transposed, so that P and dS are packed as they are made) and dQ = dS K: algorithm 2 of
// arXiv 2205.14135, where S is computed again from the log-sums.
#pragma once
#include <cstdint>
#include <vector>

#include "gemm.h"
#include "rows.h"

constexpr int TOKENS = 32;         // of a page
constexpr int QUERIES = 64;        // rows of a block of queries
constexpr int CHUNK = 8 * TOKENS;  // keys that are taken at once in backward

struct Heads {
    int32_t queries, keys, size;
    float scale;
};

// Segments [first, first + count) of which each sees rows [prefix, prefix + length). Slots: first rows of the float32
// sums that take the gradients of the prefix, and of the segments' own keys and values; -1: straight to the gradient.
struct Piece {
    int32_t prefix, length, first, count, prefix_slot, own_slot;
};

struct Span {
    int32_t start, length;
};

// A prompt's gradients are the sum of `count` slots that lie one after the other.
struct Sum {
    int32_t start, length, slot, count;
};

constexpr int SIDE = 8;  // of a square that is transposed at once

static inline void turn(const bf16* from, size_t ld, bf16* to, size_t to_ld) {
    __m128i a[8], b[8];
    for (int i = 0; i < 8; ++i) a[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * ld));
    for (int i = 0; i < 4; ++i) {
        b[2 * i] = _mm_unpacklo_epi16(a[i], a[i + 4]);
        b[2 * i + 1] = _mm_unpackhi_epi16(a[i], a[i + 4]);
    }
    for (int i = 0; i < 4; ++i) {
        a[2 * i] = _mm_unpacklo_epi16(b[i], b[i + 4]);
        a[2 * i + 1] = _mm_unpackhi_epi16(b[i], b[i + 4]);
    }
    for (int i = 0; i < 4; ++i) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 2 * i * to_ld), _mm_unpacklo_epi16(a[i], a[i + 4]));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + (2 * i + 1) * to_ld), _mm_unpackhi_epi16(a[i], a[i + 4]));
    }
}

static inline void turn(const float* from, size_t ld, float* to, size_t to_ld) {
    for (int r = 0; r < SIDE; r += 4)
        for (int c = 0; c < SIDE; c += 4) {
            __m128 x[4];
            for (int i = 0; i < 4; ++i) x[i] = _mm_loadu_ps(from + (r + i) * ld + c);
            _MM_TRANSPOSE4_PS(x[0], x[1], x[2], x[3]);
            for (int i = 0; i < 4; ++i) _mm_storeu_ps(to + (c + i) * to_ld + r, x[i]);
        }
}

static inline void store_8(float* to, const float* from) { std::copy(from, from + 8, to); }
#ifdef QUINTET_BF16
static inline void store_8(bf16* to, const float* from) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), (__m128i)_mm256_cvtneps_pbh(_mm256_loadu_ps(from)));
}
#endif

// Zeros where nothing was written; grows, never shrinks.
template <class T>
struct Room {
    std::vector<T> store;
    T* at(size_t n) {
        if (store.size() < n + 64) store.assign(n + 64, T(0));
        return reinterpret_cast<T*>(up64(reinterpret_cast<size_t>(store.data()), 64));
    }
};

template <class P>
struct Pages {
    typedef typename P::Act Act;
    Room<Act> room;
    Act* data = nullptr;
    int tokens = 0, n = 0, width = 0;

    Act* page(int p) const { return data + size_t(p) * TOKENS * width; }

    void shape(int count, int w) {
        tokens = count, width = w, n = (count + TOKENS - 1) / TOKENS;
        data = room.at(size_t(n) * TOKENS * width);
        std::fill(data, data + size_t(n) * TOKENS * width, Act(0));
    }

    // Rows [tokens, size] of `stride`: tokens as columns.
    void columns(const Act* from, size_t stride, int size) {
        for (int t = 0; t < tokens; ++t, from += stride) {
            Act* to = page(t / TOKENS);
            const int c = t % TOKENS;
            if constexpr (P::PAIRED) {
                to += c / 16 * 512 + c % 16 * 2;
                for (int d = 0; d + 1 < size; d += 2) memcpy(to + d / 32 * 1024 + d % 32 * 16, from + d, 4);
                if (size % 2) to[size / 32 * 1024 + (size - 1) % 32 * 16] = from[size - 1];
            } else {
                to += size_t(c / PANEL) * PANEL * width + c % PANEL;
                for (int d = 0; d < size; ++d) to[size_t(d) * PANEL] = from[d];
            }
        }
    }

    // Tokens along the inner size.
    void inner(const Act* from, size_t stride, int size) {
        for (int t = 0; t < tokens; t += 1 + P::PAIRED) {
            Act* to = page(t / TOKENS);
            const int k = t % TOKENS;
            const Act* row = from + t * stride;
            if constexpr (P::PAIRED) {
                static const Act zeros[4096] = {};
                interleave(to + k * 16, TOKENS * PANEL, row, t + 1 < tokens ? row + stride : zeros, size);
            } else {
                for (int d = 0; d < size; d += PANEL)
                    std::copy(row + d, row + std::min(size, d + PANEL), to + size_t(d) * TOKENS + k * PANEL);
            }
        }
    }

    // Columns [0, size) of two rows side by side, `panel` numbers from one panel of 32 columns to the next.
    static void interleave(Act* to, size_t panel, const Act* even, const Act* odd, int size) {
        for (int d = 0; d < size; d += 16) {
            uint32_t both[16] = {};
            if (size - d >= 16)
                for (int i = 0; i < 16; ++i) both[i] = uint32_t(even[d + i]) | uint32_t(odd[d + i]) << 16;
            else
                for (int i = 0; i < size - d; ++i) both[i] = uint32_t(even[d + i]) | uint32_t(odd[d + i]) << 16;
            memcpy(to + d / 32 * panel + d % 32 / 16 * 512, both, 64);
        }
    }
};

// The right side of a product over the rows of a block, columns = keys of a chunk: written two rows at a time.
template <class P>
struct Packed {
    typedef typename P::Act Act;
    Room<Act> room;
    Act* data = nullptr;
    int depth = 0;

    void shape(int rows) {
        depth = up(rows, TOKENS);
        data = room.at(size_t(CHUNK) * depth);
    }
    const Act* panel(int column) const { return data + size_t(column) * depth; }

    // Columns [c, c + VL) of rows r and r + 1.
    void put(int r, int c, vf even, vf odd) {
        Act* to = data + size_t(c / PANEL) * PANEL * depth;
        if constexpr (P::PAIRED) {
#ifdef QUINTET_BF16
            const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)even));
            const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)odd));
            to += r / 32 * 1024 + c % PANEL / 16 * 512 + r % 32 * 16;
            _mm512_storeu_si512(to, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
#endif
        } else {
            store(reinterpret_cast<float*>(to + size_t(r) * PANEL + c % PANEL), even);
            store(reinterpret_cast<float*>(to + size_t(r + 1) * PANEL + c % PANEL), odd);
        }
    }
};

template <class P>
struct Work {
    typedef typename P::Act Act;
    Pages<P> prefix_keys, prefix_values, prefix_mixed, own_keys, own_values, own_mixed;
    Room<Act> query, grad, query_turned, grad_turned, low;
    Room<float> score, slope, mixed, prefix_dk, prefix_dv, own_dk, own_dv;
    Packed<P> chances, slopes;
    std::vector<const Act*> parts;
};

template <class P>
struct Segments {
    typedef typename P::Act Act;
    Heads heads;
    Unit unit;
    const Act* qkv;  // [tokens, (queries + 2 keys) size]
    const Span* spans;
    Act* out;    // [tokens, queries size]
    float* lse;  // [tokens, queries]
    const Act* grad_out = nullptr;
    Act* grad_qkv = nullptr;
    float* sums = nullptr;  // [slots, 2 keys size]

    int width() const { return up(heads.size, TOKENS); }
    size_t stride() const { return size_t(heads.queries + 2 * heads.keys) * heads.size; }
    const Act* query(int row, int head) const { return qkv + row * stride() + size_t(head) * heads.size; }
    const Act* key(int row, int head) const { return query(row, heads.queries + head); }
    const Act* value(int row, int head) const { return query(row, heads.queries + heads.keys + head); }

    void forward(Team team, const Piece* pieces, int n) const {
        team.run(n * heads.keys, [&](int task) { forward_task(pieces[task / heads.keys], task % heads.keys, work()); });
    }

    void backward(Team team, const Piece* pieces, int n, const Sum* prompts, int n_prompts) const {
        team.run(n * heads.keys, [&](int task) { backward_task(pieces[task / heads.keys], task % heads.keys, work()); });
        team.run(n_prompts, [&](int i) { add_up(prompts[i]); });
    }

  private:
    Work<P>& work() const {
        static thread_local Work<P> own;
#ifdef QUINTET_AMX
        if (P::PAIRED && unit == TILES) tiles_for(16);
#endif
        return own;
    }

    void forward_task(const Piece& piece, int head, Work<P>& w) const {
        pack(w.prefix_keys, w.prefix_values, piece.prefix, piece.length, head);
        for (int s = 0; s < piece.count; ++s) {
            const Span span = spans[piece.first + s];
            pack(w.own_keys, w.own_values, span.start, span.length, head);
            each_block(span, head, [&](int h, int first, int rows) { forward_block(span, h, first, rows, w); });
        }
    }

    template <class Body>
    void each_block(Span span, int head, const Body& body) const {
        const int repeats = heads.queries / heads.keys;
        for (int h = head * repeats; h < (head + 1) * repeats; ++h)
            for (int first = 0; first < span.length; first += QUERIES)
                body(h, first, std::min(QUERIES, span.length - first));
    }

    // Keys as columns, values along the inner size.
    void pack(Pages<P>& keys, Pages<P>& values, int start, int length, int head) const {
        keys.shape(length, width()), values.shape(length, width());
        if (!length) return;
        keys.columns(key(start, head), stride(), heads.size);
        values.inner(value(start, head), stride(), heads.size);
    }

    // Rows of one head of [tokens, stride] as [rows, width], zeros beyond, up to a multiple of 32 rows.
    const Act* take(Room<Act>& room, const Act* from, size_t from_stride, int rows) const {
        Act* to = room.at(size_t(QUERIES) * width());
        for (int r = 0; r < rows; ++r, from += from_stride) {
            std::copy(from, from + heads.size, to + size_t(r) * width());
            std::fill(to + size_t(r) * width() + heads.size, to + size_t(r + 1) * width(), Act(0));
        }
        std::fill(to + size_t(rows) * width(), to + size_t(up(rows, TOKENS)) * width(), Act(0));
        return to;
    }

    // left [rows, width] x pages [begin, end) with the tokens as columns.
    void score(const Act* left, int rows, const Pages<P>& pages, int begin, int end, float* to, int ld) const {
        for (int p = begin; p < end; ++p)
            for (int c = 0; c < TOKENS; c += PANEL) {
                const Act* panel = pages.page(p) + size_t(c) * width();
                for (int r = 0; r < rows; r += BLOCK)
                    block(left + size_t(r) * width(), width(), std::min(BLOCK, rows - r), {&panel, 1, width()},
                          {to + size_t(r) * ld + size_t(p - begin) * TOKENS + c, ld, false}, unit, {});
            }
    }

    // to [rows, width] = or += left [rows, ld] x the pages of `parts`, tokens along the inner size; `parts` is used up.
    void mix(const Act* left, int ld, int rows, std::vector<const Act*>& parts, float* to, bool onto) const {
        for (int d = 0; d < width(); d += PANEL) {
            for (int r = 0; r < rows; r += BLOCK)
                block(left + size_t(r) * ld, ld, std::min(BLOCK, rows - r), {parts.data(), int(parts.size()), TOKENS},
                      {to + size_t(r) * width() + d, width(), onto}, unit, {});
            for (const Act*& part : parts) part += size_t(PANEL) * TOKENS;
        }
    }

    void forward_block(Span span, int h, int first, int rows, Work<P>& w) const {
        const int before = w.prefix_keys.n, own = (first + rows + TOKENS - 1) / TOKENS;
        const int columns = (before + own) * TOKENS, row = span.start + first;
        const Act* q = take(w.query, query(row, h), stride(), rows);
        float* s = w.score.at(size_t(QUERIES) * columns);
        Act* chance = w.low.at(size_t(QUERIES) * columns);
        score(q, rows, w.prefix_keys, 0, before, s, columns);
        score(q, rows, w.own_keys, 0, own, s + before * TOKENS, columns);
        float total[QUERIES];
        for (int r = 0; r < rows; ++r) {
            float* at = s + size_t(r) * columns;
            std::fill(at + w.prefix_keys.tokens, at + before * TOKENS, -INFINITY);
            std::fill(at + before * TOKENS + first + r + 1, at + columns, -INFINITY);
            vf top = splat(-INFINITY);
            for (int c = 0; c < columns; c += VL) top = vmax(load(at + c), top);
            const float peak = largest(top) * heads.scale;
            vf mass = {};
            for (int c = 0; c < columns; c += VL) {
                const vf e = vexp(load(at + c) * heads.scale - peak);
                mass += e;
                P::put(chance + size_t(r) * columns + c, e);
            }
            total[r] = sum(mass);
            lse[size_t(row + r) * heads.queries + h] = peak + std::log(total[r]);
        }
        w.parts.clear();
        for (int p = 0; p < before; ++p) w.parts.push_back(w.prefix_values.page(p));
        for (int p = 0; p < own; ++p) w.parts.push_back(w.own_values.page(p));
        float* mixed = w.mixed.at(size_t(QUERIES) * width());
        mix(chance, columns, rows, w.parts, mixed, false);
        for (int r = 0; r < rows; ++r) {
            Act* to = out + (size_t(row + r) * heads.queries + h) * heads.size;
            for (int d = 0; d < heads.size; d += VL)
                put<P>(to + d, load(mixed + size_t(r) * width() + d) * (1.0f / total[r]), heads.size - d);
        }
    }

    void backward_task(const Piece& piece, int head, Work<P>& w) const {
        pack_all(w.prefix_keys, w.prefix_values, w.prefix_mixed, piece.prefix, piece.length, head);
        float* dk = zeros(w.prefix_dk, w.prefix_keys), *dv = zeros(w.prefix_dv, w.prefix_keys);
        for (int s = 0; s < piece.count; ++s) {
            const Span span = spans[piece.first + s];
            pack_all(w.own_keys, w.own_values, w.own_mixed, span.start, span.length, head);
            float* own_dk = zeros(w.own_dk, w.own_keys), *own_dv = zeros(w.own_dv, w.own_keys);
            each_block(span, head, [&](int h, int first, int rows) {
                backward_block(span, h, first, rows, w, dk, dv, own_dk, own_dv);
            });
            if (piece.own_slot < 0)
                write_own(span, head, own_dk, own_dv, w.own_keys.n * TOKENS);
            else
                write_slot(piece.own_slot, span.length, head, own_dk, own_dv, w.own_keys.n * TOKENS);
        }
        if (piece.length) write_slot(piece.prefix_slot, piece.length, head, dk, dv, w.prefix_keys.n * TOKENS);
    }

    // Keys as columns and along the inner size, values as columns.
    void pack_all(Pages<P>& keys, Pages<P>& values, Pages<P>& mixed, int start, int length, int head) const {
        keys.shape(length, width()), values.shape(length, width()), mixed.shape(length, width());
        if (!length) return;
        keys.columns(key(start, head), stride(), heads.size);
        values.columns(value(start, head), stride(), heads.size);
        mixed.inner(key(start, head), stride(), heads.size);
    }

    float* zeros(Room<float>& room, const Pages<P>& like) const {
        const size_t size = size_t(like.n) * TOKENS * width();
        float* at = room.at(size);
        std::fill(at, at + size, 0.0f);
        return at;
    }

    void backward_block(Span span, int h, int first, int rows, Work<P>& w, float* dk, float* dv, float* own_dk,
                        float* own_dv) const {
        const int row = span.start + first, head_row = heads.queries * heads.size, deep = up(rows, TOKENS);
        const Act* q = take(w.query, query(row, h), stride(), rows);
        const size_t at = size_t(row) * head_row + size_t(h) * heads.size;
        const Act* g = take(w.grad, grad_out + at, head_row, rows);
        float delta[QUERIES];
        for (int r = 0; r < rows; ++r) {
            vf dot = {};
            for (int d = 0; d < heads.size; d += VL) {
                const size_t i = at + size_t(r) * head_row + d;
                dot += get<P>(out + i, heads.size - d) * get<P>(grad_out + i, heads.size - d);
            }
            delta[r] = sum(dot);
        }
        const Act* q_turned = turned(w.query_turned, q, deep);
        const Act* g_turned = turned(w.grad_turned, g, deep);
        float* dq = w.mixed.at(size_t(QUERIES) * width());
        std::fill(dq, dq + size_t(rows) * width(), 0.0f);
        const float* log_sums = lse + size_t(row) * heads.queries + h;
        auto chunk = [&](const Pages<P>& keys, const Pages<P>& values, const Pages<P>& mixed, int begin, int end,
                         int hidden_from, float* to_dk, float* to_dv) {
            const int columns = (end - begin) * TOKENS;
            float *s = w.score.at(size_t(QUERIES) * CHUNK), *slope = w.slope.at(size_t(QUERIES) * CHUNK);
            Act* low = w.low.at(size_t(QUERIES) * CHUNK);
            score(q, rows, keys, begin, end, s, CHUNK);
            score(g, rows, values, begin, end, slope, CHUNK);
            w.chances.shape(rows), w.slopes.shape(rows);
            for (int r = 0; r < deep; r += 2) {
                float seen[2], lines[2], deltas[2];  // of both rows; a row beyond the last sees nothing
                for (int i = 0; i < 2; ++i) {
                    const bool real = r + i < rows;
                    seen[i] = !real ? 0 : float(hidden_from < 0 ? keys.tokens - begin * TOKENS
                                                                : hidden_from + r + i + 1 - begin * TOKENS);
                    lines[i] = real ? log_sums[size_t(r + i) * heads.queries] : 0.0f;
                    deltas[i] = real ? delta[r + i] : 0.0f;
                }
                for (int c = 0; c < columns; c += VL) {
                    vf p[2], ds[2];
                    for (int i = 0; i < 2; ++i) {
                        const size_t place = size_t(r + i) * CHUNK + c;
                        const vf e = vexp(load(s + place) * heads.scale - lines[i]);
                        p[i] = order() + float(c) < splat(seen[i]) ? e : vf{};
                        ds[i] = p[i] > vf{} ? p[i] * (load(slope + place) - deltas[i]) * heads.scale : vf{};
                        P::put(low + place, ds[i]);
                    }
                    w.chances.put(r, c, p[0], p[1]);
                    w.slopes.put(r, c, ds[0], ds[1]);
                }
            }
            const int ld = keys.n * TOKENS;
            for (int c = 0; c < columns; c += PANEL) {
                onto(g_turned, deep, w.chances.panel(c), to_dv + begin * TOKENS + c, ld);
                onto(q_turned, deep, w.slopes.panel(c), to_dk + begin * TOKENS + c, ld);
            }
            w.parts.clear();
            for (int p = begin; p < end; ++p) w.parts.push_back(mixed.page(p));
            mix(low, CHUNK, rows, w.parts, dq, true);
        };
        const int step = CHUNK / TOKENS, own = (first + rows + TOKENS - 1) / TOKENS;
        for (int p = 0; p < w.prefix_keys.n; p += step)
            chunk(w.prefix_keys, w.prefix_values, w.prefix_mixed, p, std::min(p + step, w.prefix_keys.n), -1, dk, dv);
        for (int p = 0; p < own; p += step)
            chunk(w.own_keys, w.own_values, w.own_mixed, p, std::min(p + step, own), first, own_dk, own_dv);
        for (int r = 0; r < rows; ++r) {
            Act* to = grad_qkv + (row + r) * stride() + size_t(h) * heads.size;
            for (int d = 0; d < heads.size; d += VL)
                put<P>(to + d, load(dq + size_t(r) * width() + d), heads.size - d);
        }
    }

    static vf order() {
        vf v;
        for (int i = 0; i < VL; ++i) v[i] = float(i);
        return v;
    }

    // [deep, width] -> [width, deep]
    const Act* turned(Room<Act>& room, const Act* from, int deep) const {
        Act* to = room.at(size_t(QUERIES) * width());
        for (int r = 0; r < deep; r += SIDE)
            for (int d = 0; d < width(); d += SIDE)
                turn(from + size_t(r) * width() + d, width(), to + size_t(d) * deep + r, deep);
        return to;
    }

    // to [width, ld] += left [width, deep] x one panel.
    void onto(const Act* left, int deep, const Act* panel, float* to, int ld) const {
        for (int d = 0; d < width(); d += BLOCK)
            block(left + size_t(d) * deep, deep, BLOCK, {&panel, 1, deep}, {to + size_t(d) * ld, ld, true}, unit, {});
    }

    // Gradients [width, ld] of keys and values into their rows.
    void write_own(Span span, int head, const float* dk, const float* dv, int ld) const {
        Act* keys = grad_qkv + span.start * stride() + size_t(heads.queries + head) * heads.size;
        write(dk, ld, span.length, keys, stride());
        write(dv, ld, span.length, keys + size_t(heads.keys) * heads.size, stride());
    }
    void write_slot(int slot, int length, int head, const float* dk, const float* dv, int ld) const {
        const size_t row = size_t(2) * heads.keys * heads.size;
        float* keys = sums + slot * row + size_t(head) * heads.size;
        write(dk, ld, length, keys, row);
        write(dv, ld, length, keys + size_t(heads.keys) * heads.size, row);
    }

    template <class T>
    void write(const float* from, int ld, int length, T* to, size_t row) const {
        T lines[SIDE * SIDE], square[SIDE * SIDE];
        for (int t = 0; t < length; t += SIDE)
            for (int d = 0; d < heads.size; d += SIDE) {
                for (int i = 0; i < SIDE; ++i) store_8(lines + i * SIDE, from + size_t(d + i) * ld + t);
                turn(lines, SIDE, square, SIDE);
                const int n = std::min(SIDE, heads.size - d);
                for (int i = 0; i < std::min(SIDE, length - t); ++i)
                    std::copy(square + i * SIDE, square + i * SIDE + n, to + (t + i) * row + d);
            }
    }

    void add_up(const Sum& prompt) const {
        const int n = 2 * heads.keys * heads.size;
        for (int t = 0; t < prompt.length; ++t) {
            Act* to = grad_qkv + (prompt.start + t) * stride() + size_t(heads.queries) * heads.size;
            for (int i = 0; i < n; i += VL) {
                vf total = {};
                for (int s = 0; s < prompt.count; ++s)
                    total += get<F32>(sums + (size_t(prompt.slot) + s * prompt.length + t) * n + i, n - i);
                put<P>(to + i, total, n - i);
            }
        }
    }
};
