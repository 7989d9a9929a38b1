// What happens to each row between two matrix products: norms, SwiGLU, rotations, the softmax over the vocabulary.
// Numbers are kept as P::Act and computed as float32.
#pragma once
#include <algorithm>
#include <cmath>

#include "simd.h"
#include "team.h"

template <class P>
static inline vf get(const typename P::Act* p);
template <>
inline vf get<F32>(const float* p) {
    return load(p);
}
#ifdef QUINTET_BF16
template <>
inline vf get<BF16>(const bf16* p) {
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(low), 16);
}
#endif

// The same for the last n < VL numbers of a row; zeros in their place.
template <class P>
static inline vf get(const typename P::Act* p, int n) {
    typename P::Act full[VL] = {};
    if (n >= VL) return get<P>(p);
    std::copy(p, p + n, full);
    return get<P>(full);
}
template <class P>
static inline void put(typename P::Act* p, vf v, int n) {
    typename P::Act full[VL];
    if (n >= VL) return P::put(p, v);
    P::put(full, v);
    std::copy(full, full + n, p);
}

constexpr int PARTS = 16;  // a sum over rows is made in so many parts, whatever the number of threads: the same bits

// out = x / rms(x) * weight, inverse = 1 / rms(x); with a branch, sum = x + branch comes first and takes x's place.
template <class P>
static void norm(Team team, int rows, int width, const float* x, const typename P::Act* branch, float* sum_out,
                 const float* weight, float eps, typename P::Act* out, float* inverse) {
    team.rows(rows, 8, [&](int begin, int end) {
        for (int r = begin; r < end; ++r) {
            const size_t at = size_t(r) * width;
            const float* from = x + at;
            vf square = {};
            for (int i = 0; i < width; i += VL) {
                const int n = width - i;
                vf v = get<F32>(from + i, n);
                if (branch) put<F32>(sum_out + at + i, v = v + get<P>(branch + at + i, n), n);
                square += v * v;
            }
            if (branch) from = sum_out + at;
            const float scale = 1.0f / std::sqrt(sum(square) / width + eps);
            inverse[r] = scale;
            for (int i = 0; i < width; i += VL) {
                const int n = width - i;
                put<P>(out + at + i, get<F32>(from + i, n) * scale * get<F32>(weight + i, n), n);
            }
        }
    });
}

template <class P>
static void norm_again(Team team, int rows, int width, const float* x, const float* weight, const float* inverse,
                       typename P::Act* out) {
    team.rows(rows, 8, [&](int begin, int end) {
        for (int r = begin; r < end; ++r)
            for (int i = 0; i < width; i += VL) {
                const size_t at = size_t(r) * width + i;
                const int n = width - i;
                put<P>(out + at, get<F32>(x + at, n) * inverse[r] * get<F32>(weight + i, n), n);
            }
    });
}

// grad += inverse (g w - n mean(g w n)), n = x * inverse; low (or null) = grad as it is then; weight_parts [PARTS,
// width] (or null) = sums of g n.
template <class P>
static void norm_backward(Team team, int rows, int width, const typename P::Act* g, const float* x,
                          const float* inverse, const float* weight, float* grad, typename P::Act* low,
                          float* weight_parts) {
    team.run(PARTS, [&](int part) {
        const int begin = int(int64_t(rows) * part / PARTS), end = int(int64_t(rows) * (part + 1) / PARTS);
        float* to = weight_parts ? weight_parts + size_t(part) * width : nullptr;
        if (to) std::fill(to, to + width, 0.0f);
        for (int r = begin; r < end; ++r) {
            const size_t row = size_t(r) * width;
            vf dot = {};
            for (int i = 0; i < width; i += VL) {
                const int n = width - i;
                const vf gn = get<P>(g + row + i, n) * get<F32>(x + row + i, n) * inverse[r];
                if (to) put<F32>(to + i, get<F32>(to + i, n) + gn, n);
                dot += gn * get<F32>(weight + i, n);
            }
            const float mean = sum(dot) / width;
            for (int i = 0; i < width; i += VL) {
                const int n = width - i;
                const vf gw = get<P>(g + row + i, n) * get<F32>(weight + i, n);
                const vf d = get<F32>(grad + row + i, n) + (gw - get<F32>(x + row + i, n) * inverse[r] * mean) * inverse[r];
                put<F32>(grad + row + i, d, n);
                if (low) put<P>(low + row + i, d, n);
            }
        }
    });
}

template <class P>
static void add(Team team, int64_t n, const float* x, const typename P::Act* other, float* out) {
    constexpr int64_t EACH = 1 << 14;
    team.run(int((n + EACH - 1) / EACH), [&](int part) {
        for (int64_t i = part * EACH, end = std::min(n, i + EACH); i < end; i += VL) {
            const int left = int(std::min<int64_t>(end - i, VL));
            put<F32>(out + i, get<F32>(x + i, left) + get<P>(other + i, left), left);
        }
    });
}

// gate_up [rows, 2 width] -> inner = SiLU(gate) * up [rows, width]
template <class P>
static void swiglu(Team team, int rows, int width, const typename P::Act* gate_up, typename P::Act* inner) {
    team.rows(rows, 8, [&](int begin, int end) {
        for (int r = begin; r < end; ++r) {
            const typename P::Act* from = gate_up + size_t(r) * 2 * width;
            for (int i = 0; i < width; i += VL) {
                const vf gate = get<P>(from + i, width - i);
                put<P>(inner + size_t(r) * width + i, gate * sigmoid(gate) * get<P>(from + width + i, width - i), width - i);
            }
        }
    });
}

template <class P>
static void swiglu_backward(Team team, int rows, int width, const typename P::Act* grad, const typename P::Act* gate_up,
                            typename P::Act* grad_gate_up) {
    team.rows(rows, 8, [&](int begin, int end) {
        for (int r = begin; r < end; ++r) {
            const typename P::Act* from = gate_up + size_t(r) * 2 * width;
            typename P::Act* to = grad_gate_up + size_t(r) * 2 * width;
            for (int i = 0; i < width; i += VL) {
                const int n = width - i;
                const vf gate = get<P>(from + i, n), up = get<P>(from + width + i, n);
                const vf g = get<P>(grad + size_t(r) * width + i, n), s = sigmoid(gate);
                put<P>(to + i, g * up * s * (1.0f + gate * (1.0f - s)), n);
                put<P>(to + width + i, g * gate * s, n);
            }
        }
    });
}

// The first `heads` heads of each row turned in place by halves; `sign` -1 turns back. cos, sin: [rows, size].
template <class P>
static void rotate(Team team, int rows, int stride, int heads, int size, typename P::Act* x, const float* cos,
                   const float* sin, float sign) {
    const int half = size / 2;
    team.rows(rows, 8, [&](int begin, int end) {
        for (int r = begin; r < end; ++r) {
            const float *c = cos + size_t(r) * size, *s = sin + size_t(r) * size;
            for (int h = 0; h < heads; ++h) {
                typename P::Act* at = x + size_t(r) * stride + size_t(h) * size;
                for (int i = 0; i < half; i += VL) {
                    const int n = half - i;
                    const vf a = get<P>(at + i, n), b = get<P>(at + half + i, n);
                    put<P>(at + i, a * get<F32>(c + i, n) - b * get<F32>(s + i, n) * sign, n);
                    put<P>(at + half + i, b * get<F32>(c + half + i, n) + a * get<F32>(s + half + i, n) * sign, n);
                }
            }
        }
    });
}

constexpr int SUMMED = 256;  // vocabulary entries summed in float32 before they go to a double

// Of logits z = factor * row: log-sum-exp, log-probability of the target, entropy.
template <class P>
static void head_statistics(Team team, int rows, int vocabulary, const typename P::Act* logits, float factor,
                            const int64_t* target, float* lse, float* logprob, float* entropy) {
    team.rows(rows, 1, [&](int begin, int end) {
        for (int r = begin; r < end; ++r) {
            const typename P::Act* row = logits + size_t(r) * vocabulary;
            vf top = splat(-INFINITY);
            int whole = vocabulary / VL * VL;
            for (int i = 0; i < whole; i += VL) top = vmax(get<P>(row + i) * factor, top);
            float peak = largest(top);
            for (int i = whole; i < vocabulary; ++i) peak = std::max(peak, P::get(row[i]) * factor);
            double total = 0, mean = 0;  // sums of e^(z - peak), and of that times (z - peak)
            for (int start = 0; start < whole; start += SUMMED) {
                vf mass = {}, weighted = {};
                for (int i = start; i < std::min(start + SUMMED, whole); i += VL) {
                    const vf z = get<P>(row + i) * factor - peak, e = vexp(z);
                    mass += e, weighted += e > vf{} ? e * z : vf{};
                }
                total += sum(mass), mean += sum(weighted);
            }
            for (int i = whole; i < vocabulary; ++i) {
                const float z = P::get(row[i]) * factor - peak, e = std::exp(z);
                total += e, mean += e > 0.0f ? e * z : 0.0f;
            }
            const double log_total = std::log(total);
            lse[r] = float(peak + log_total);
            logprob[r] = float(double(P::get(row[target[r]]) * factor - peak) - log_total);
            entropy[r] = float(log_total - mean / total);
        }
    });
}

// d(loss)/d(row) in the place of each row of logits. grad_logprob and grad_entropy may be null.
template <class P>
static void head_gradient(Team team, int rows, int vocabulary, typename P::Act* logits, float factor,
                          const int64_t* target, const float* lse, const float* entropy, const float* grad_logprob,
                          const float* grad_entropy) {
    team.rows(rows, 1, [&](int begin, int end) {
        for (int r = begin; r < end; ++r) {
            typename P::Act* row = logits + size_t(r) * vocabulary;
            const float to_logprob = grad_logprob ? grad_logprob[r] : 0.0f;
            const float to_entropy = grad_entropy ? grad_entropy[r] : 0.0f;
            const float chosen = P::get(row[target[r]]) * factor - lse[r];
            for (int i = 0; i < vocabulary; i += VL) {
                const vf logp = get<P>(row + i, vocabulary - i) * factor - lse[r];
                const vf e = vexp(logp < vf{} ? logp : vf{});
                vf weight = splat(to_logprob);
                if (to_entropy != 0.0f) weight += to_entropy * (logp + entropy[r]);
                put<P>(row + i, e > vf{} ? -factor * e * weight : vf{}, vocabulary - i);
            }
            const float p = std::exp(chosen);
            const float weight = to_logprob + (to_entropy != 0.0f ? to_entropy * (chosen + entropy[r]) : 0.0f);
            row[target[r]] = P::one(factor * (to_logprob - p * weight));
        }
    });
}
