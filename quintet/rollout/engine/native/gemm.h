// Matrix products with packed weights. A matrix [N, K] is kept in panels of 2 x VL columns (N). float32:
// [panel][K][2 VL]. bf16: [panel][K / 32][2][16][16][2], which is at once what an AMX tile and what `vdpbf16ps` read.
// A product is a loop over panels that OpenMP hands out as threads come free; each finished block of rows x panel
// goes to an epilogue while it is in the first-level cache.
#pragma once
#include <cstdlib>
#include <sys/mman.h>
#include <vector>

#include "simd.h"

constexpr int BLOCK = 32;       // rows of a finished block
constexpr int ROWS = 256;       // rows that are computed against a panel before the next panel: fits the L2 cache
constexpr int64_t HUGE = 2 << 20;

// Zeroed pages from the system, taken when first touched; large pages where the system gives them.
struct Memory {
    void* at = nullptr;
    size_t bytes = 0;
    explicit Memory(size_t n) : bytes(n) {
        void* p = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) throw std::bad_alloc();
        at = p;
        madvise(at, n, MADV_HUGEPAGE);
    }
    Memory(const Memory&) = delete;
    ~Memory() { munmap(at, bytes); }
};

template <class P>
struct Matrix {
    typedef typename P::Act Act;
    int n = 0, k = 0, depth = 0, panels = 0;
    Act* data = nullptr;
    std::vector<float> bias;  // empty, or one per packed column
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

// Left rows [rows <= BLOCK, lda] times a packed panel into out[rows, ld], PANEL columns of it.
template <int N>
static inline void tile_f32(const float* a, int lda, Right<float> right, float* out, int ld) {
    vf acc[N][2] = {};
    for (int part = 0; part < right.count; ++part, a += right.depth) {
        const float* b = right.parts[part];
        for (int k = 0; k < right.depth; ++k) {
            vf b0 = load(b + k * PANEL), b1 = load(b + k * PANEL + VL);
#pragma GCC unroll 16
            for (int r = 0; r < N; ++r) {
                vf x = splat(a[r * lda + k]);
                acc[r][0] += x * b0;
                acc[r][1] += x * b1;
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < N; ++r) store(out + r * ld, acc[r][0]), store(out + r * ld + VL, acc[r][1]);
}

constexpr int TALL = VL == 16 ? 8 : 4;  // rows of a register tile

static inline void block(const float* a, int lda, int rows, Right<float> right, float* out, int ld, bool) {
    int r = 0;
    for (; r + TALL <= rows; r += TALL) tile_f32<TALL>(a + r * lda, lda, right, out + r * ld, ld);
    for (; r < rows; ++r) tile_f32<1>(a + r * lda, lda, right, out + r * ld, ld);
}

#ifdef QUINTET_BF16
template <int N>
static inline void tile_bf16(const bf16* a, int lda, Right<bf16> right, float* out, int ld) {
    __m512 acc[N][2];
#pragma GCC unroll 16
    for (int r = 0; r < N; ++r) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
    for (int part = 0; part < right.count; ++part, a += right.depth) {
        for (int k = 0; k < right.depth; k += 2) {
            const bf16* b = right.parts[part] + k / 32 * 1024 + k % 32 * 16;
            __m512bh b0 = pairs(b), b1 = pairs(b + 512);
#pragma GCC unroll 16
            for (int r = 0; r < N; ++r) {
                __m512bh x = pair(a + r * lda + k);
                acc[r][0] = _mm512_dpbf16_ps(acc[r][0], x, b0);
                acc[r][1] = _mm512_dpbf16_ps(acc[r][1], x, b1);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < N; ++r) {
        _mm512_storeu_ps(out + r * ld, acc[r][0]);
        _mm512_storeu_ps(out + r * ld + VL, acc[r][1]);
    }
}

#ifdef QUINTET_AMX
// Rows beyond the last are computed too and mean nothing: both sides have room for whole tiles.
static inline void block_amx(const bf16* a, int lda, int rows, Right<bf16> right, float* out, int ld) {
    const bool tall = rows > 16;
    const int stride = lda * 2;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int part = 0; part < right.count; ++part, a += right.depth) {
        const bf16* b = right.parts[part];
        for (int k = 0; k < right.depth; k += 32, b += 1024) {
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
    _tile_stored(0, out, ld * 4);
    _tile_stored(1, out + 16, ld * 4);
    if (!tall) return;
    _tile_stored(2, out + 16 * ld, ld * 4);
    _tile_stored(3, out + 16 * ld + 16, ld * 4);
}
#endif

static inline void block(const bf16* a, int lda, int rows, Right<bf16> right, float* out, int ld, bool amx) {
#ifdef QUINTET_AMX
    if (amx) return block_amx(a, lda, rows, right, out, ld);
#endif
    int r = 0;
    for (; r + 8 <= rows; r += 8) tile_bf16<8>(a + r * lda, lda, right, out + r * ld, ld);
    for (; r < rows; ++r) tile_bf16<1>(a + r * lda, lda, right, out + r * ld, ld);
}
#endif

// To be called by all threads of a parallel region. epilogue(row, rows, panel, block) gets finished blocks.
template <class P, class Epilogue>
static void product(const typename P::Act* a, int lda, int rows, const Matrix<P>& w, bool amx, Epilogue epilogue) {
    const int chunks = (rows + ROWS - 1) / ROWS;
#pragma omp for schedule(dynamic, 1)
    for (int task = 0; task < chunks * w.panels; ++task) {
        const int p = task % w.panels, first = task / w.panels * ROWS, last = std::min(rows, first + ROWS);
        alignas(64) float out[BLOCK * PANEL];
        const typename P::Act* panel = w.panel(p);
        for (int r = first; r < last; r += BLOCK) {
            const int count = std::min(BLOCK, last - r);
            block(a + size_t(r) * lda, lda, count, {&panel, 1, w.depth}, out, PANEL, amx);
            epilogue(r, count, p, out);
        }
    }
}

static inline void add_bias(const std::vector<float>& bias, int rows, int p, float* out) {
    if (bias.empty()) return;
    const float* b = bias.data() + size_t(p) * PANEL;
    for (int r = 0; r < rows; ++r)
        for (int c = 0; c < PANEL; c += VL) store(out + r * PANEL + c, load(out + r * PANEL + c) + load(b + c));
}

// out[row] = product (+ bias). `ld` is a multiple of PANEL, so whole panels are written.
template <class P>
struct Store {
    const Matrix<P>& w;
    float* to;
    size_t ld;
    void operator()(int row, int rows, int p, float* out) const {
        add_bias(w.bias, rows, p, out);
        for (int r = 0; r < rows; ++r)
            for (int c = 0; c < PANEL; c += VL) store(to + (row + r) * ld + p * PANEL + c, load(out + r * PANEL + c));
    }
};

// residual[row] += product (+ bias).
template <class P>
struct Add {
    const Matrix<P>& w;
    float* to;
    size_t ld;
    void operator()(int row, int rows, int p, float* out) const {
        add_bias(w.bias, rows, p, out);
        for (int r = 0; r < rows; ++r)
            for (int c = 0; c < PANEL; c += VL) {
                float* x = to + (row + r) * ld + p * PANEL + c;
                store(x, load(x) + load(out + r * PANEL + c));
            }
    }
};

// The panel holds VL gates and their VL ups: out = SiLU(gate) * up.
template <class P>
struct Gate {
    const Matrix<P>& w;
    typename P::Act* to;
    size_t ld;
    void operator()(int row, int rows, int p, float* out) const {
        add_bias(w.bias, rows, p, out);
        for (int r = 0; r < rows; ++r) {
            vf gate = load(out + r * PANEL), other = load(out + r * PANEL + VL);
            vf decay = vexp(gate > vf{} ? -gate : gate);  // e^-|gate|: never overflows
            vf sigmoid = (gate > vf{} ? splat(1.0f) : decay) / (decay + 1.0f);
            P::put(to + (row + r) * ld + p * VL, gate * sigmoid * other);
        }
    }
};
