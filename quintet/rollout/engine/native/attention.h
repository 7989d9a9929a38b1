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

// Pages to come, fetched line by line between the products of those at hand: the processor's own prefetching does not
// follow a list of pages, and waiting for them took as long as computing.
struct Fetch {
    const char* cache = nullptr;
    const int32_t* ids = nullptr;
    size_t stride = 0;  // bytes from page to page
    int pages = 0, lines = 0, page = 0, line = 0;
    bool near = false;  // into the first-level cache

    // Returns how many of `count` lines there were too few.
    int next(int count) {
        while (count > 0 && page < pages) {
            const char* at = cache + ids[page] * stride + size_t(line) * 64;
            const int now = std::min(count, lines - line);
            for (int i = 0; i < now && near; ++i) _mm_prefetch(at + i * 64, _MM_HINT_T0);
            for (int i = 0; i < now && !near; ++i) _mm_prefetch(at + i * 64, _MM_HINT_T1);
            count -= now, line += now;
            if (line == lines) ++page, line = 0;
        }
        return count;
    }
};

template <class P>
struct Scratch {
    typename P::Left chance[LIMIT * COLUMNS] __attribute__((aligned(64)));
    float score[LIMIT * COLUMNS] __attribute__((aligned(64)));
    float peak[LIMIT], total[LIMIT], fade[LIMIT];
    int seen[LIMIT];
    std::vector<float> out;    // [LIMIT, width]
    std::vector<float> mixed;  // [BLOCK, width]
    Fetch fetch, after;  // what is read next, and what then
    void ahead(int lines) { after.next(fetch.next(lines)); }
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
    typedef typename P::Left Left;
    static constexpr float GAIN = P::HALF ? FP16_UNIT * PAGE_SCALE : 1.0f;  // what products with pages are multiplied by
    int width;        // head size padded to a multiple of 32
    int kv_heads;
    Unit unit;

    size_t page_size() const { return size_t(2) * PAGE * width; }  // of one KV head
    int lines() const { return int(page_size() * sizeof(Act) / 64); }
    bool slow() const { return unit == WIDE || unit == HALVES; }
    int scoring() const { return lines() * (slow() ? 2 : 1) / 3; }  // lines a page, by rows that are not few
    bool few(int rows) const { return P::PAIRED && unit == TILES && rows <= 16; }  // take the tile products for few rows
    const Act* keys(const Act* layer, int page, int head) const {
        return layer + (size_t(page) * kv_heads + head) * page_size();
    }

    Fetch fetch(const Act* layer, int head, const int32_t* ids, int n) const {
        const char* cache = reinterpret_cast<const char*>(keys(layer, 0, head));
        return {cache, ids, size_t(lines()) * 64 * kv_heads, n, lines(), 0, 0, slow()};
    }

    // Key and value of one token into its page, both as packed matrices (see Matrix::set).
    void write(Act* layer, int page, int head, int offset, const float* k, const float* v, int head_dim) const {
        if constexpr (P::PAIRED) {
            Act* to = layer + (size_t(page) * kv_heads + head) * page_size();
            Act* values = to + size_t(PAGE) * width + offset / 2 * 32;
            to += offset / 16 * 512 + offset % 16 * 2;
            for (int d = 0; d < head_dim; d += 16) write_16(to, values, d, offset % 2, k, v, std::min(16, head_dim - d));
        } else {
            write_plain(layer, page, head, offset, k, v, head_dim);
        }
    }

    // The same between a page and plain rows of the page's own type.
    void read_plain(Act* layer, int page, int head, int offset, Act* k, Act* v, int head_dim) const {
        visit(layer, page, head, offset, head_dim, [=](Act& from, int d) { k[d] = P::from_page(from); },
              [=](Act& from, int d) { v[d] = P::from_page(from); });
    }
    void write_plain(Act* layer, int page, int head, int offset, const Act* k, const Act* v, int head_dim) const {
        visit(layer, page, head, offset, head_dim, [=](Act& to, int d) { to = P::to_page(k[d]); },
              [=](Act& to, int d) { to = P::to_page(v[d]); });
    }

    void begin(Scratch<P>& s, int rows) const {
        s.out.resize(size_t(LIMIT) * width), s.mixed.resize(size_t(BLOCK) * width);
        std::fill(s.out.begin(), s.out.begin() + size_t(rows) * width, 0.0f);
        for (int r = 0; r < rows; ++r) s.peak[r] = -INFINITY, s.total[r] = 0.0f;
    }

    // Rows [first, first + rows) of the task; q holds these rows, `units` what each is to be multiplied by (fp16). `seen`
    // (or null): tokens that each row may see.
    void add(Scratch<P>& s, const Act* layer, int head, const Left* q, const float* units, int first, int rows,
             Pages pages, const int* seen) const {
        for (int start = 0; start < pages.n; start += SPAN) {
            const int n = std::min(SPAN, pages.n - start);
            const Act* at[SPAN];
            for (int i = 0; i < n; ++i) at[i] = keys(layer, pages.ids[start + i], head);
            const int last = pages.shown(start + n - 1);
            // As many pages to come: `scoring()` of them while scoring, the rest here, or a third here and a third while
            // few rows are mixed.
            const int share = n * (few(rows) ? lines() / 3 : lines() - scoring()) / rows;
            for (int r = 0; r < rows; r += BLOCK)
                scores(s, q + size_t(r) * width, r, std::min(BLOCK, rows - r), at, n, last);
            for (int i = 0; i < n; ++i) hide(s, rows, i * PAGE + pages.shown(start + i), (i + 1) * PAGE);
            if (seen)
                for (int r = 0; r < rows; ++r) hide_row(s, r, std::max(0, seen[r] - start * PAGE), n * PAGE);
            for (int r = 0; r < rows; ++r) soften(s, r, first + r, n * PAGE, P::HALF ? units[r] : 1.0f), s.ahead(share);
            for (int r = 0; r < rows; r += BLOCK) mix(s, r, first + r, std::min(BLOCK, rows - r), at, n, last);
        }
    }

    void finish(Scratch<P>& s, int row, typename P::Row* to, int head_dim) const {
        const float scale = 1.0f / s.total[row];
        const float* from = s.out.data() + size_t(row) * width;
        int d = 0;
        for (; d + VL <= head_dim; d += VL) P::put(to + d, load(from + d) * scale);
        for (; d < head_dim; ++d) P::put(to + d, from[d] * scale);
    }

  private:
    // Key and value entries of one token in its page: key(entry, d), value(entry, d).
    template <class Key, class Value>
    void visit(Act* layer, int page, int head, int offset, int head_dim, Key key, Value value) const {
        Act* to = layer + (size_t(page) * kv_heads + head) * page_size();
        Act* values = to + size_t(PAGE) * width;
        if (P::PAIRED) {
            to += offset / 16 * 512 + offset % 16 * 2, values += offset / 2 * 32 + offset % 2;
            for (int d = 0; d < head_dim; ++d) key(to[d / 32 * 1024 + d % 32 / 2 * 32 + d % 2], d);
            for (int d = 0; d < head_dim; ++d) value(values[d / 16 * 512 + d % 16 * 2], d);
        } else {
            to += size_t(offset / PANEL) * PANEL * width + offset % PANEL, values += offset * PANEL;
            for (int d = 0; d < head_dim; ++d) key(to[d * PANEL], d);
            for (int d = 0; d < head_dim; ++d) value(values[d / PANEL * PANEL * PAGE + d % PANEL], d);
        }
    }

    // Entries [d, d + n) of a key and a value: the key's by pairs in a column, the value's beside its neighbour's.
    static void write_16(Act* to, Act* values, int d, int odd, const float* k, const float* v, int n) {
        Act key[16] = {}, value[16] = {};
        if (n == 16) P::put(key, load(k + d)), P::put(value, load(v + d));
        for (int i = 0; i < n && n < 16; ++i) key[i] = P::one(k[d + i]), value[i] = P::one(v[d + i]);
        if constexpr (P::HALF) P::to_pages(key), P::to_pages(value);
        to += d / 32 * 1024 + d % 32 * 16, values += d * 32;
        for (int i = 0; i < 16; i += 2) memcpy(to + i * 16, key + i, 4);
        // The neighbour's halves are left alone: another thread may be writing them.
        const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(value)));
        if (odd)
            _mm512_mask_storeu_epi16(values, 0xaaaaaaaa, _mm512_slli_epi32(wide, 16));
        else
            _mm512_mask_storeu_epi16(values, 0x55555555, wide);
    }

    // `last`: tokens that the last page shows.
    void scores(Scratch<P>& s, const Left* q, int row, int rows, const Act* const* at, int n, int last) const {
#ifdef QUINTET_AMX
        if constexpr (P::PAIRED && !P::HALF)
            if (few(rows)) return few_scores(s, q, at, n, last, s.score + row * COLUMNS);
#endif
        for (int i = 0; i < n; ++i) {
            if (row == 0) s.ahead(scoring());
            for (int c = 0; c < PAGE; c += PANEL) {
                const Act* panel = at[i] + size_t(c) * width;
                block(q, width, rows, {&panel, 1, width}, {s.score + row * COLUMNS + i * PAGE + c, COLUMNS, false}, unit, {});
            }
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
    static void soften(Scratch<P>& s, int local, int row, int columns, float unit) {
        const float* score = s.score + local * COLUMNS;
        Left* chance = s.chance + local * COLUMNS;
        const vf gain = splat(GAIN * unit);
        vf top = load(score);
        for (int c = VL; c < columns; c += VL) top = vmax(top, load(score + c));
        const float peak = std::max(s.peak[row], largest(top) * GAIN * unit);
        const vf base = splat(peak == -INFINITY ? 0.0f : peak);
        vf total = {};
        for (int c = 0; c < columns; c += VL) {
            vf e = vexp(P::HALF ? load(score + c) * gain - base : load(score + c) - base);
            total += e;
            P::put(chance + c, e);
        }
        s.fade[local] = s.total[row] == 0.0f ? 0.0f : vexp(splat(s.peak[row] - peak))[0];
        s.total[row] = s.total[row] * s.fade[local] + sum(total);
        s.peak[row] = peak;
    }

    void mix(Scratch<P>& s, int local, int row, int rows, const Act* const* at, int n, int last) const {
        products(s, s.chance + local * COLUMNS, rows, at, n, last);
        for (int r = 0; r < rows; ++r) {
            float* out = s.out.data() + size_t(row + r) * width;
            const float* mixed = s.mixed.data() + size_t(r) * width;
            const vf fade = splat(s.fade[local + r]);
            for (int d = 0; d < width; d += VL) store(out + d, load(out + d) * fade + load(mixed + d) * GAIN);
        }
    }

    void products(Scratch<P>& s, const Left* chance, int rows, const Act* const* at, int n, int last) const {
#ifdef QUINTET_AMX
        if constexpr (P::PAIRED && !P::HALF)
            if (few(rows)) {
                const bool partial = last <= 16 && rows <= 4;  // then half of the page need not be read
                few_products(s, chance, at, n - partial, s.mixed.data());
                if (partial) tail(chance + (n - 1) * PAGE, rows, at[n - 1] + size_t(PAGE) * width, last, s.mixed.data());
                return;
            }
#endif
        for (int d = 0; d < width; d += PANEL) {
            const Act* parts[SPAN];
            for (int i = 0; i < n; ++i) parts[i] = at[i] + size_t(PAGE) * width + size_t(d) * PAGE;
            block(chance, COLUMNS, rows, {parts, n, PAGE}, {s.mixed.data() + d, width, false}, unit, {});
        }
    }

#ifdef QUINTET_AMX
    // Few rows: what takes time is the latency of a chain of tile products, so four chains run side by side.
    void few_scores(Scratch<P>& s, const bf16* q, const bf16* const* at, int n, int last, float* score) const {
        asm volatile("" : : : "memory");
        for (int i = 0; i < n; i += 2, score += 2 * PAGE) {
            const bf16 *one = at[i], *two = at[std::min(i + 1, n - 1)];
            const bool both = i + 1 < n, half = i + 2 >= n && last <= 16;  // the last page's second half is not seen
            s.ahead(2 * lines() / 3);
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int k = 0; k < width; k += 32) {
                _tile_loadd(4, q + k, width * 2);
                _tile_loadd(6, one + k * 32, 64);
                _tile_dpbf16ps(0, 4, 6);
                if (both || !half) {
                    _tile_loadd(7, one + k * 32 + 512, 64);
                    _tile_dpbf16ps(1, 4, 7);
                }
                if (!both) continue;
                _tile_loadd(6, two + k * 32, 64);
                _tile_dpbf16ps(2, 4, 6);
                if (half) continue;
                _tile_loadd(7, two + k * 32 + 512, 64);
                _tile_dpbf16ps(3, 4, 7);
            }
            _tile_stored(0, score, COLUMNS * 4);
            _tile_stored(1, score + 16, COLUMNS * 4);
            if (!both) return;
            _tile_stored(2, score + 32, COLUMNS * 4);
            _tile_stored(3, score + 48, COLUMNS * 4);
        }
    }

    // The last page's part of `few_products`, up to 4 rows and 16 tokens, by vectors.
    void tail(const bf16* chance, int rows, const bf16* values, int tokens, float* out) const {
        for (int d = 0; d < width; d += 32) {
            __m512 sum[4][2];
            for (int r = 0; r < rows; ++r) {
                sum[r][0] = _mm512_loadu_ps(out + r * width + d);
                sum[r][1] = _mm512_loadu_ps(out + r * width + d + 16);
            }
            for (int t = 0; t < tokens; t += 2) {
                const bf16* v = values + size_t(d) * PAGE + t * 16;
                const __m512bh left = pairs(v), right = pairs(v + 512);
                for (int r = 0; r < rows; ++r) {
                    const __m512bh x = pair(chance + r * COLUMNS + t);
                    sum[r][0] = _mm512_dpbf16_ps(sum[r][0], x, left);
                    sum[r][1] = _mm512_dpbf16_ps(sum[r][1], x, right);
                }
            }
            for (int r = 0; r < rows; ++r) {
                _mm512_storeu_ps(out + r * width + d, sum[r][0]);
                _mm512_storeu_ps(out + r * width + d + 16, sum[r][1]);
            }
        }
    }

    void few_products(Scratch<P>& s, const bf16* chance, const bf16* const* at, int n, float* out) const {
        asm volatile("" : : : "memory");
        for (int d = 0; d < width; d += 64) {
            const int far = d + 32 < width ? 1024 : 0;  // the second panel, where there is one
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int i = 0; i < n; ++i) {
                const bf16* b = at[i] + size_t(PAGE) * width + size_t(d) * PAGE;
                s.ahead(lines() * 64 / width / 3);
                _tile_loadd(4, chance + i * PAGE, COLUMNS * 2);
                _tile_loadd(6, b, 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(7, b + 512, 64);
                _tile_dpbf16ps(1, 4, 7);
                _tile_loadd(6, b + far, 64);
                _tile_dpbf16ps(2, 4, 6);
                _tile_loadd(7, b + far + 512, 64);
                _tile_dpbf16ps(3, 4, 7);
            }
            _tile_stored(0, out + d, width * 4);
            _tile_stored(1, out + d + 16, width * 4);
            if (!far) return;
            _tile_stored(2, out + d + 32, width * 4);
            _tile_stored(3, out + d + 48, width * 4);
        }
    }
#endif
};
