// Matrix products with packed weights. A matrix [N, K] is kept in panels of 2 x VL columns (N). float32:
// [panel][K][2 VL]. bf16: [panel][K / 32][2][16][16][2], which is at once what an AMX tile and what `vdpbf16ps` read;
// fp16 lies in the same places.
// A product is a loop over panels that threads take as they come free; each finished block of rows x panel goes where
// it belongs, or through an epilogue while it is in the first-level cache.
#pragma once
#include <cstdlib>
#include <sys/mman.h>
#include <algorithm>
#include <memory>
#include <new>
#include <vector>

#include "pool.h"
#include "simd.h"

constexpr int BLOCK = 32;       // rows of a finished block
constexpr int ROWS = 256;       // rows that are computed against a panel before the next panel: fits the L2 cache
constexpr size_t HUGE_PAGE = 2 << 20;

static inline size_t up64(size_t n, size_t to) { return (n + to - 1) / to * to; }

// Zeroed pages from the system, taken when first touched; large pages where the system gives them.
struct Memory {
    void *base, *at;
    size_t bytes;
    explicit Memory(size_t n) : bytes(n) {
        bytes += HUGE_PAGE;  // room to begin at a large page
        base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (base == MAP_FAILED) throw std::bad_alloc();
        madvise(base, bytes, MADV_HUGEPAGE);
        at = reinterpret_cast<void*>(up64(reinterpret_cast<size_t>(base), HUGE_PAGE));
    }
    Memory(const Memory&) = delete;
    ~Memory() { munmap(base, bytes); }
};

// An array in such memory that grows, its contents forgotten; zero at first. Rows of activations lie a page or more
// apart, so small pages would cost a TLB miss each.
template <class T>
struct Buffer {
    std::unique_ptr<Memory> memory;
    size_t size = 0;
    T* data() const { return static_cast<T*>(memory->at); }
    T& operator[](size_t i) const { return data()[i]; }
    void reserve(size_t n) {
        if (n <= size) return;
        memory = std::make_unique<Memory>(up64(n * sizeof(T), HUGE_PAGE));
        size = n;
    }
};

template <class P>
struct Matrix {
    typedef typename P::Act Act;
    int n = 0, k = 0, depth = 0, panels = 0;
    Act* data = nullptr;
    std::vector<float> bias;   // empty, or one per packed column
    std::vector<float> scale;  // of fp16 columns, else empty: powers of two that their numbers were divided by
    size_t size() const { return size_t(panels) * PANEL * depth; }

    void shape(int columns, int inner, bool with_bias) {
        n = columns, k = inner;
        depth = up(inner, P::DEPTH);
        panels = up(columns, PANEL) / PANEL;
        if (with_bias) bias.assign(size_t(panels) * PANEL, 0.0f);
    }
    const Act* panel(int p) const { return data + size_t(p) * PANEL * depth; }
    void set(int column, int at, Act x) {
        size_t place = size_t(column / PANEL) * PANEL * depth;
        int c = column % PANEL;
        if (P::PAIRED)
            place += size_t(at / 32) * 1024 + (c / 16) * 512 + (at % 32 / 2) * 32 + (c % 16) * 2 + at % 2;
        else
            place += size_t(at) * PANEL + c;
        data[place] = x;
    }
};

// The packed right side of a block: `count` parts of `depth` inner entries each, one after the other.
template <class Act>
struct Right {
    const Act* const* parts;
    int count, depth;
};

static inline void fetch(const void* at, int far) { _mm_prefetch(static_cast<const char*>(at) + far, _MM_HINT_T0); }

// Sums of a register tile, from and to `out`.
template <int N>
[[gnu::always_inline]] static inline void begin(vf (&sums)[N][2], const float* out, int ld, bool onto) {
#pragma GCC unroll 16
    for (int r = 0; r < N; ++r) {
        sums[r][0] = onto ? load(out + r * ld) : vf{};
        sums[r][1] = onto ? load(out + r * ld + VL) : vf{};
    }
}
template <int N>
[[gnu::always_inline]] static inline void end(const vf (&sums)[N][2], float* out, int ld) {
#pragma GCC unroll 16
    for (int r = 0; r < N; ++r) store(out + r * ld, sums[r][0]), store(out + r * ld + VL, sums[r][1]);
}

// Left rows [rows <= BLOCK, lda] times a packed panel into out[rows, ld], PANEL columns of it. `onto`: the product is
// added to what `out` holds. A block of AMX computes rows beyond the last too: both sides have room for 32. `far`: what
// lies so many bytes behind the packed numbers is fetched.
template <int N>
static inline void tile(const float* a, int lda, Right<float> right, float* out, int ld, bool onto, int far) {
    vf acc[N][2];
    begin(acc, out, ld, onto);
    for (int part = 0; part < right.count; ++part, a += right.depth) {
        const float* b = right.parts[part];
        for (int k = 0; k < right.depth; ++k) {
            fetch(b + k * PANEL, far), fetch(b + k * PANEL + VL, far);
            vf b0 = load(b + k * PANEL), b1 = load(b + k * PANEL + VL);
#pragma GCC unroll 16
            for (int r = 0; r < N; ++r) {
                vf x = splat(a[r * lda + k]);
                acc[r][0] += x * b0;
                acc[r][1] += x * b1;
            }
        }
    }
    end(acc, out, ld);
}

constexpr int TALL = VL == 16 ? 8 : 4;  // rows of a register tile
constexpr int TALL_WIDE = 12;           // ... of float32 rows times bf16 columns

// Memory to fetch while a block is computed. Tiles: `lines` cache lines from `at` on for each 32 inner entries. Vectors:
// what lies `bytes` behind the packed numbers at hand; left to itself the processor reads them at half the speed.
struct Ahead {
    const char* at = nullptr;
    int lines = 0, bytes = 0;
};
constexpr int FAR = 4096;

constexpr float FP16_UNIT = 0x1p112f;  // what fp16's bits, moved into a float32's place, have to be multiplied by

struct Out {
    float* at;
    int ld;
    bool onto;
};

#ifdef QUINTET_BF16
template <int N>
static inline void tile(const bf16* a, int lda, Right<bf16> right, float* out, int ld, bool onto, int far) {
    vf acc[N][2];
    begin(acc, out, ld, onto);
    for (int part = 0; part < right.count; ++part, a += right.depth) {
        for (int k = 0; k < right.depth; k += 2) {
            const bf16* b = right.parts[part] + k / 32 * 1024 + k % 32 * 16;
            fetch(b, far), fetch(b + 512, far);
            __m512bh b0 = pairs(b), b1 = pairs(b + 512);
#pragma GCC unroll 16
            for (int r = 0; r < N; ++r) {
                __m512bh x = pair(a + r * lda + k);
                acc[r][0] = (vf)_mm512_dpbf16_ps((__m512)acc[r][0], x, b0);
                acc[r][1] = (vf)_mm512_dpbf16_ps((__m512)acc[r][1], x, b1);
            }
        }
    }
    end(acc, out, ld);
}

// The same from rows that have been widened: a word of the packed side is two numbers of a column, one in each half.
template <int N>
static inline void tile(const float* a, int lda, Right<bf16> right, float* out, int ld, bool onto, int far) {
    vf acc[N][2];
    begin(acc, out, ld, onto);
    const __m512i second = _mm512_set1_epi32(int(0xffff0000));
    for (int part = 0; part < right.count; ++part, a += right.depth) {
        for (int k = 0; k < right.depth; k += 2) {
            const bf16* b = right.parts[part] + k / 32 * 1024 + k % 32 * 16;
            fetch(b, far), fetch(b + 512, far);
            const __m512i w0 = _mm512_loadu_si512(b), w1 = _mm512_loadu_si512(b + 512);
#pragma GCC unroll 2
            for (int i = 0; i < 2; ++i) {
                const vf b0 = (vf)(i ? _mm512_and_si512(w0, second) : _mm512_slli_epi32(w0, 16));
                const vf b1 = (vf)(i ? _mm512_and_si512(w1, second) : _mm512_slli_epi32(w1, 16));
#pragma GCC unroll 16
                for (int r = 0; r < N; ++r) {
                    const vf x = splat(a[r * lda + k + i]);
                    acc[r][0] += x * b0;
                    acc[r][1] += x * b1;
                }
            }
        }
    }
    end(acc, out, ld);
}
#endif

#ifdef QUINTET_FP16
constexpr int RUN = 64;  // inner entries whose products are added up in fp16

// fp16 sums of the two halves of pairs, added to float32 sums in units of 1 / FP16_UNIT. What is not finite in fp16 becomes
// NaN: its bits, moved, would be an ordinary number.
static inline void add_sums(__m512h sums, float* out) {
    asm volatile("" : "+v"(sums) : : "memory");  // one after the other: GCC would copy all of them first
    const __m512h both = _mm512_add_ph(sums, (__m512h)_mm512_rol_epi32((__m512i)sums, 16));
    const __m512i kept = _mm512_set1_epi32(int(0x8fffe000));  // sign, exponent and fraction in their new place
    const __m512i moved = _mm512_and_si512(_mm512_srai_epi32((__m512i)both, 3), kept);
    const __mmask32 lost = _mm512_fpclass_ph_mask(both, 0x99);  // NaN of either kind, infinity of either sign
    store(out, load(out) + (vf)_mm512_mask_mov_epi16(moved, lost, _mm512_set1_epi16(0x7fc0)));
}

// The same from rows and columns of fp16: twice the products of float32 in an instruction. Sums of RUN products are
// exact enough (their rounding is half of that of a row to bf16); the sums of sums are float32.
template <int N>
static inline void tile(const half* a, int lda, Right<bf16> right, float* out, int ld, bool onto, int far) {
    for (int r = 0; r < N && !onto; ++r) store(out + r * ld, vf{}), store(out + r * ld + VL, vf{});
    for (int part = 0, at = 0; part < right.count;) {
        __m512h acc[N][2];
#pragma GCC unroll 16
        for (int r = 0; r < N; ++r) acc[r][0] = acc[r][1] = _mm512_setzero_ph();
        for (int left = RUN; left > 0 && part < right.count;) {
            const int stop = std::min(right.depth, at + left);
            left -= stop - at;
            for (; at < stop; at += 2) {
                const bf16* b = right.parts[part] + at / 32 * 1024 + at % 32 * 16;
                fetch(b, far), fetch(b + 512, far);
                const __m512h b0 = (__m512h)pairs(b), b1 = (__m512h)pairs(b + 512);
#pragma GCC unroll 16
                for (int r = 0; r < N; ++r) {
                    const __m512h x = (__m512h)pair(reinterpret_cast<const bf16*>(a + r * lda + at));
                    acc[r][0] = _mm512_fmadd_ph(x, b0, acc[r][0]);
                    acc[r][1] = _mm512_fmadd_ph(x, b1, acc[r][1]);
                }
            }
            if (at == right.depth) at = 0, ++part, a += right.depth;
        }
#pragma GCC unroll 16
        for (int r = 0; r < N; ++r) add_sums(acc[r][0], out + r * ld), add_sums(acc[r][1], out + r * ld + VL);
    }
}

// A power of two that brings numbers of this size into [0.5, 1).
static inline float size_of(float largest) {
    int exponent = 0;
    if (largest > 0 && largest < INFINITY) std::frexp(largest, &exponent);
    return std::ldexp(1.0f, std::max(exponent, -100));
}

// A row by what the largest of its numbers becomes less than `below`. Returns what its products are to be multiplied by.
static inline float halve_row(const float* from, int n, float below, half* to) {
    vf tops = {};
    float top = 0;
    int i = 0;
    for (; i + VL <= n; i += VL) tops = vmax(tops, (vf)_mm512_abs_ps((__m512)load(from + i)));
    for (; i < n; ++i) top = std::max(top, std::fabs(from[i]));
    const float unit = size_of(std::max(top, largest(tops))) / below;
    for (i = 0; i + VL <= n; i += VL) put_halves(to + i, load(from + i) * (1.0f / unit));
    for (; i < n; ++i) to[i] = half(from[i] / unit);
    return unit;
}
#endif

// The last rows, N at most, in one tile: a row by itself would wait for the end of every sum.
template <int N, class Left, class Act>
static inline void rest(const Left* a, int lda, int rows, Right<Act> right, Out out, int far) {
    if (rows == N) return tile<N>(a, lda, right, out.at, out.ld, out.onto, far);
    if constexpr (N > 1) rest<N - 1>(a, lda, rows, right, out, far);
}

template <int N, class Left, class Act>
static inline void by_vectors(const Left* a, int lda, int rows, Right<Act> right, Out out, int far) {
    int r = 0;
    for (; r + N <= rows; r += N) tile<N>(a + r * lda, lda, right, out.at + r * out.ld, out.ld, out.onto, far);
    rest<N - 1>(a + r * lda, lda, rows - r, right, {out.at + r * out.ld, out.ld, out.onto}, far);
}

static inline void block(const float* a, int lda, int rows, Right<float> right, Out out, Unit, Ahead ahead) {
    by_vectors<TALL>(a, lda, rows, right, out, ahead.bytes);
}

#ifdef QUINTET_BF16
#ifdef QUINTET_AMX
static inline void block_amx(const bf16* a, int lda, int rows, Right<bf16> right, Out out, Ahead ahead) {
    const bool tall = rows > 16;
    const int stride = lda * 2, width = out.ld * 4;
    float* const lower = out.at + 16 * out.ld;
    asm volatile("" : : : "memory");  // GCC's tile loads do not say that they read memory
    if (out.onto) {
        _tile_loadd(0, out.at, width);
        _tile_loadd(1, out.at + 16, width);
        _tile_loadd(2, lower, width);
        _tile_loadd(3, lower + 16, width);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int part = 0; part < right.count; ++part, a += right.depth) {
        const bf16* b = right.parts[part];
        for (int k = 0; k < right.depth; k += 32, b += 1024) {
            for (int i = 0; i < ahead.lines; ++i, ahead.at += 64) _mm_prefetch(ahead.at, _MM_HINT_T1);
            _tile_loadd(4, a + k, stride);
            _tile_loadd(6, b, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, b + 512, 64);
            _tile_dpbf16ps(1, 4, 7);
            if (!tall) continue;
            _tile_loadd(5, a + 16 * lda + k, stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, out.at, width);
    _tile_stored(1, out.at + 16, width);
    if (!tall) return;
    _tile_stored(2, lower, width);
    _tile_stored(3, lower + 16, width);
}
#endif

static inline void block(const float* a, int lda, int rows, Right<bf16> right, Out out, Unit, Ahead ahead) {
    by_vectors<TALL_WIDE>(a, lda, rows, right, out, ahead.bytes);
}

#ifdef QUINTET_FP16
static inline void block(const half* a, int lda, int rows, Right<bf16> right, Out out, Unit, Ahead ahead) {
    by_vectors<TALL_WIDE>(a, lda, rows, right, out, ahead.bytes);
}
#endif

static inline void widen_row(const bf16* from, int n, float* to) {  // n: a multiple of 32, as every inner size is
    for (int i = 0; i < n; i += VL)
        store(to + i, (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(from + i))), 16));
}

static inline void block(const bf16* a, int lda, int rows, Right<bf16> right, Out out, Unit unit, Ahead ahead) {
#ifdef QUINTET_AMX
    if (unit == TILES) return block_amx(a, lda, rows, right, out, ahead);
#endif
    if (unit != WIDE) return by_vectors<TALL>(a, lda, rows, right, out, ahead.bytes);
    static thread_local std::vector<float> wide;
    const int depth = right.count * right.depth;
    if (wide.size() < size_t(BLOCK) * depth) wide.resize(size_t(BLOCK) * depth);
    for (int r = 0; r < rows; ++r) widen_row(a + size_t(r) * lda, depth, &wide[size_t(r) * depth]);
    block(wide.data(), depth, rows, right, out, unit, ahead);
}
#endif

// Tasks are runs of panels, so that the next panel can be fetched while one is computed: a panel comes from memory once
// and its computing time is of the order of that transfer. multiply(first row, rows, panel, out, ahead).
template <class P, class Finish, class Multiply>
static void by_panels(Pool& pool, int rows, const Matrix<P>& w, Unit unit, Finish finish, Multiply multiply) {
    const int chunks = (rows + ROWS - 1) / ROWS, run = std::max(1, std::min(8, w.panels / 16));
    const int runs = (w.panels + run - 1) / run, steps = std::max(1, w.depth / 32);
    pool.run(chunks * runs, [&](int task, int) {
#ifdef QUINTET_AMX
        if (unit == TILES) tiles_for(16);
#endif
        const int first = task / runs * ROWS, last = std::min(rows, first + ROWS);
        const int begin = task % runs * run, end = std::min(w.panels, begin + run);
        const int lines = w.depth * PANEL * int(sizeof(typename P::Act)) / 64;
        const int blocks = (last - first + BLOCK - 1) / BLOCK;
        for (int p = begin; p < end; ++p) {
            const char* next = reinterpret_cast<const char*>(w.panel(p + 1));
            const int each = p + 1 < end ? (lines + blocks * steps - 1) / (blocks * steps) : 0;
            for (int r = first; r < last; r += BLOCK, next += size_t(each) * steps * 64)
                finish.template run<P>(r, std::min(BLOCK, last - r), p, [&](int count, Out out) {
                    multiply(r, count, p, out, Ahead{next, each, FAR});
                });
        }
    });
}

// What a model multiplies with; the memory is for rows in another form.
struct Multiplier {
    Unit unit;
    Buffer<float> wide;        // widened rows, or of fp16 rows what their results are to be multiplied by
    Buffer<uint16_t> halves;   // fp16 rows
};

template <class P, class Left, class Finish>
static void plain_product(Pool& pool, const Left* a, int lda, int rows, const Matrix<P>& w, Unit unit, Finish finish) {
    by_panels<P>(pool, rows, w, unit, finish, [&](int row, int count, int p, Out out, Ahead ahead) {
        const typename P::Act* panel = w.panel(p);
        block(a + size_t(row) * lda, lda, count, {&panel, 1, w.depth}, out, unit, ahead);
    });
}

template <class P, class Finish>
static void product(Pool& pool, const typename P::Row* a, int lda, int rows, const Matrix<P>& w, Multiplier& by,
                    Finish finish) {
    if constexpr (P::PAIRED)
        if (by.unit == WIDE) {
            by.wide.reserve(size_t(rows) * w.depth);
            pool.run_many(rows, [&](int r, int) { widen_row(a + size_t(r) * lda, w.depth, &by.wide[size_t(r) * w.depth]); });
            return plain_product(pool, by.wide.data(), w.depth, rows, w, WIDE, finish);
        }
    plain_product(pool, a, lda, rows, w, by.unit, finish);
}

#ifdef QUINTET_FP16
template <class Finish>
static void product(Pool& pool, const float* a, int lda, int rows, const Matrix<FP16>& w, Multiplier& by, Finish finish) {
    by.halves.reserve(size_t(rows) * w.depth);
    by.wide.reserve(rows);
    half* const halves = reinterpret_cast<half*>(by.halves.data());
    float* const units = by.wide.data();
    pool.run_many(rows, [&](int r, int) {  // below 512: RUN products with numbers below 1 stay far from fp16's end
        units[r] = halve_row(a + size_t(r) * lda, w.depth, 512, halves + size_t(r) * w.depth);
    });
    by_panels(pool, rows, w, HALVES, finish, [&](int row, int count, int p, Out out, Ahead ahead) {
        alignas(64) float sums[BLOCK * PANEL];
        const bf16* panel = w.panel(p);
        const half* from = halves + size_t(row) * w.depth;
        block(from, w.depth, count, Right<bf16>{&panel, 1, w.depth}, {sums, PANEL, false}, HALVES, ahead);
        const float* scale = w.scale.data() + size_t(p) * PANEL;
        for (int r = 0; r < count; ++r)
            for (int c = 0; c < PANEL; c += VL) {
                float* to = out.at + r * out.ld + c;
                const vf product = load(sums + r * PANEL + c) * FP16_UNIT * units[row + r] * load(scale + c);
                store(to, out.onto ? load(to) + product : product);
            }
    });
}
#endif

static inline void add_bias(const std::vector<float>& bias, int rows, int p, Out out) {
    if (bias.empty()) return;
    const float* b = bias.data() + size_t(p) * PANEL;
    for (int r = 0; r < rows; ++r)
        for (int c = 0; c < PANEL; c += VL)
            store(out.at + r * out.ld + c, load(out.at + r * out.ld + c) + load(b + c));
}

// What becomes of finished blocks. to[row] = or += product (+ bias); `ld` is a multiple of PANEL.
struct Into {
    float* to;
    int ld;
    bool onto;
    const std::vector<float>& bias;
    template <class P, class Block>
    void run(int row, int rows, int p, Block compute) const {
        const Out out{to + size_t(row) * ld + size_t(p) * PANEL, ld, onto};
        compute(rows, out);
        add_bias(bias, rows, p, out);
    }
};

// The panel holds VL gates and their VL ups: to[row] = SiLU(gate) * up.
template <class Row>
struct Gate {
    Row* to;
    int ld;
    const std::vector<float>& bias;
    template <class P, class Block>
    void run(int row, int rows, int p, Block compute) const {
        alignas(64) float both[BLOCK * PANEL];
        compute(rows, Out{both, PANEL, false});
        add_bias(bias, rows, p, Out{both, PANEL, false});
        for (int r = 0; r < rows; ++r) {
            vf gate = load(both + r * PANEL), other = load(both + r * PANEL + VL);
            P::put(to + size_t(row + r) * ld + p * VL, gate * sigmoid(gate) * other);
        }
    }
};
