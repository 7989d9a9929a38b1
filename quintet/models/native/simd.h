// Vectors, bf16 and exp. One translation unit is compiled for the machine at hand (-march=native), so what the
// processor has is known when this is compiled; only the kernel's permission to use AMX is asked for at run time.
#pragma once
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
constexpr int VL = 16;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int VL = 8;
#else
#error "quintet's kernels need AVX2 and FMA"
#endif
#if defined(__AVX512BF16__)
#define QUINTET_BF16 1
#endif
#if defined(QUINTET_BF16) && defined(__AMX_BF16__)
#define QUINTET_AMX 1
#endif
#if defined(QUINTET_BF16) && defined(__AVX512FP16__)
#define QUINTET_FP16 1
#endif

constexpr int PANEL = 2 * VL;  // columns of a packed matrix that are computed together
constexpr int PAGE = 32;       // tokens of a KV page
constexpr float PAGE_SCALE = 128;  // what keys and values are divided by in fp16: any below 8,188 can be added up, else NaN

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef float vfu __attribute__((vector_size(VL * 4), aligned(4), may_alias));

static inline vf load(const float* p) { return *reinterpret_cast<const vfu*>(p); }
static inline void store(float* p, vf v) { *reinterpret_cast<vfu*>(p) = v; }
static inline vf splat(float x) { return x - vf{}; }
static inline vf vmax(vf a, vf b) { return a > b ? a : b; }

static inline float sum(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float s = 0;
    for (int i = 0; i < VL; ++i) s += v[i];
    return s;
#endif
}

static inline float largest(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float m = v[0];
    for (int i = 1; i < VL; ++i) m = v[i] > m ? v[i] : m;
    return m;
#endif
}

// e^x for x <= 0 to 1 unit in the last place or two; 0 below -87. Range reduction by a magic addition, then the
// polynomial of Cephes' expf.
static inline vf vexp(vf x) {
    const vf magic = splat(12582912.0f);
    vf t = x * 1.44269504088896341f + magic;
    vf n = t - magic;
    vf r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vi bits = ((vi)t << 23) + (vi)p;
    return x < splat(-87.0f) ? vf{} : (vf)bits;
}

static inline vf sigmoid(vf x) {
    const vf decay = vexp(x > vf{} ? -x : x);  // e^-|x|: never overflows
    return (x > vf{} ? splat(1.0f) : decay) / (decay + 1.0f);
}

typedef uint16_t bf16;

static inline float widen(bf16 x) {
    uint32_t bits = uint32_t(x) << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static inline bf16 narrow(float f) {  // to nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t((bits >> 16) | 0x40);
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// How numbers are kept: weights and pages of keys and values as Act, rows between matrix products as Row, the left side
// of a product as Left; and DEPTH = what the inner size of a product is padded to.
struct F32 {
    typedef float Act, Row, Left;
    static constexpr int DEPTH = VL;
    static constexpr bool PAIRED = false, HALF = false;
    static inline void put(float* p, vf v) { store(p, v); }
    static inline void put(float* p, float x) { *p = x; }
    static inline float one(float x) { return x; }
    static inline float get(float x) { return x; }
    static inline float to_page(float x) { return x; }
    static inline float from_page(float x) { return x; }
};

#ifdef QUINTET_BF16
static inline __m512bh pairs(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
static inline __m512bh pair(const bf16* p) {
    int32_t two;
    memcpy(&two, p, 4);
    return (__m512bh)_mm512_set1_epi32(two);
}

struct BF16 {
    typedef bf16 Act, Row, Left;
    static constexpr int DEPTH = 32;
    static constexpr bool PAIRED = true, HALF = false;
    static inline void put(bf16* p, vf v) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh((__m512)v));
    }
    static inline void put(bf16* p, float x) { *p = narrow(x); }
    static inline bf16 one(float x) { return narrow(x); }
    static inline float get(bf16 x) { return widen(x); }
    static inline bf16 to_page(bf16 x) { return x; }
    static inline bf16 from_page(bf16 x) { return x; }
};
#endif

#ifdef QUINTET_FP16
typedef _Float16 half;
static inline void put_halves(half* p, vf v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
}

// bf16 that is computed with in fp16: weights and pages hold bf16 numbers in fp16's form and scaled, rows are rounded
// once, to fp16.
struct FP16 : BF16 {
    typedef float Row;
    typedef half Left;
    static constexpr bool HALF = true;
    using BF16::put;
    static inline void put(float* p, vf v) { store(p, v); }
    static inline void put(float* p, float x) { *p = x; }
    static inline void put(half* p, vf v) { put_halves(p, v); }
    static inline bf16 bits_of(half x) {
        bf16 bits;
        memcpy(&bits, &x, sizeof bits);
        return bits;
    }
    static inline bf16 to_page(bf16 x) { return bits_of(half(widen(x) / PAGE_SCALE)); }
    static inline void to_pages(bf16 (&numbers)[16]) {
        const __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((__m256i*)numbers)), 16);
        put_halves(reinterpret_cast<half*>(numbers), (vf)wide / PAGE_SCALE);
    }
    static inline bf16 from_page(bf16 bits) {
        half number;
        memcpy(&number, &bits, sizeof bits);
        return narrow(float(number) * PAGE_SCALE);
    }
};
#endif

// What bf16 products run on: pairs by vectors (`vdpbf16ps`), AMX tiles, float32 vectors, the numbers widened on the
// way, or fp16 vectors (gemm.h), where both sides can be prepared for them. As enum values they are passed to and from
// Python.
enum Unit : int32_t { PAIRS, TILES, WIDE, HALVES };

// Ask Linux for the use of AMX tiles (ARCH_REQ_XCOMP_PERM of XTILEDATA).
static inline bool request_amx() {
#ifdef QUINTET_AMX
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
    return false;
#endif
}

#ifdef QUINTET_BF16
// Seconds of 1,000 times 16 instructions that add to 16 sums of their own.
template <class Sum, class Multiply>
static inline double seconds_of(Multiply multiply) {
    Sum sums[16] = {};
    double best = 1e9;
    for (int turn = 0; turn < 10; ++turn) {
        const auto began = std::chrono::steady_clock::now();
        for (int i = 0; i < 1000; ++i) {
#pragma GCC unroll 16
            for (int j = 0; j < 16; ++j) sums[j] = multiply(sums[j]);
        }
        best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
    }
    for (Sum& sum : sums) asm volatile("" : : "v"(sum));
    return best;
}

// The vector unit that does the same products in clearly less time than pairs do: on Zen 4 float32 vectors take twice
// as long, on Intel's processors half as long, and fp16 vectors half of that. Takes 0.3 ms.
static inline Unit fastest_vectors(bool prepared) {
    __m512 x = _mm512_set1_ps(1.0f);
    asm volatile("" : "+v"(x));  // nothing is known of it when this is compiled
    double best = 0.8 * seconds_of<__m512>([x](__m512 s) { return _mm512_dpbf16_ps(s, (__m512bh)x, (__m512bh)x); });
    Unit unit = PAIRS;
    const double wide = 2 * seconds_of<__m512>([x](__m512 s) { return _mm512_fmadd_ps(x, x, s); });
    if (wide < best) best = 0.8 * wide, unit = WIDE;
#ifdef QUINTET_FP16
    const double halves = seconds_of<__m512h>([x](__m512h s) { return _mm512_fmadd_ph((__m512h)x, (__m512h)x, s); });
    if (prepared && halves < best) unit = HALVES;
#endif
    return unit;
}
#endif

// Of products whose both sides are `prepared`, or are bf16 as they are.
static inline Unit fastest_unit(bool prepared) {
    if (request_amx()) return TILES;
#ifdef QUINTET_BF16
    return fastest_vectors(prepared);
#endif
    return PAIRS;
}

// Whether products can run on it here.
static inline bool has_unit(Unit unit) {
#ifdef QUINTET_FP16
    if (unit == HALVES) return true;
#endif
#ifdef QUINTET_BF16
    return unit == TILES ? request_amx() : unit != HALVES;
#endif
    return false;
}

static inline int up(int n, int to) { return (n + to - 1) / to * to; }

#ifdef QUINTET_AMX
// Tile shapes of a thread: registers 0-3 accumulate, 4-5 hold left rows, 6-7 hold the packed right side. `rows` is
// how many left rows there are, 16 at most.
struct __attribute__((packed)) TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
    explicit TileConfig(int left_rows) {
        for (int i = 0; i < 8; ++i) {
            bytes[i] = 64;
            rows[i] = uint8_t(i < 6 ? left_rows : 16);
        }
    }
};
static inline void tiles_for(int left_rows) {
    TileConfig config(left_rows);
    asm volatile("" : : "m"(config) : "memory");  // the intrinsic names 8 bytes of it only
    _tile_loadconfig(&config);
}
#endif
