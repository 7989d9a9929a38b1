// One token from a row of logits by inverting the cumulative distribution in vocabulary order, over sums of blocks
// first and then inside one block, as quintet/rollout/engine/sampling.py does; and its log-probability.
#pragma once
#include <algorithm>
#include <vector>

#include "simd.h"

constexpr int SUMMED = 256;  // vocabulary entries summed at once

struct Draw {
    float temperature;  // 0: greedy
    int32_t top_k;      // 0: all
    double top_p;
    double min_p;
    double uniform;  // in [0, 1)
};

struct Sampler {
    int vocabulary, padded;
    std::vector<float> mass;   // [padded], 0 beyond the vocabulary
    std::vector<double> sums;  // per block

    void shape(int size) {
        vocabulary = size, padded = up(size, SUMMED);
        mass.assign(padded, 0.0f);
        sums.resize(padded / SUMMED);
    }

    // The row has room for whole vectors; what lies beyond the vocabulary is not read.
    void draw(const float* logits, const Draw& by, int32_t* id, float* logprob) {
        float peak;
        if (!find_peak(logits, &peak)) {
            *id = 0, *logprob = NAN;
            return;
        }
        const bool greedy = by.temperature == 0.0f;
        const float cold = greedy ? 1.0f : 1.0f / by.temperature;
        double total = weigh(logits, peak, cold);
        if (!greedy) total = truncate(by, total);
        *id = greedy ? int32_t(std::find(logits, logits + vocabulary, peak) - logits) : invert(by.uniform * total);
        *logprob = float(double((logits[*id] - peak) * cold) - std::log(total));
    }

  private:
    bool find_peak(const float* logits, float* peak) const {
        vf top = splat(-INFINITY);
        vi good = ~vi{};
        int i = 0;
        for (; i + VL <= vocabulary; i += VL) {
            vf x = load(logits + i);
            top = vmax(x, top);
            good &= x < splat(INFINITY);  // neither NaN nor infinite
        }
        float best = largest(top);
        bool finite = true;
        for (int j = 0; j < VL; ++j) finite &= good[j] != 0;
        for (; i < vocabulary; ++i) best = std::max(best, logits[i]), finite &= logits[i] < INFINITY;
        *peak = best;
        return finite && best > -INFINITY;
    }

    double weigh(const float* logits, float peak, float cold) {
        for (int i = 0; i < vocabulary; i += VL) store(&mass[i], vexp((load(logits + i) - peak) * cold));
        std::fill(mass.begin() + vocabulary, mass.end(), 0.0f);
        return add_up();
    }

    double add_up() {
        double total = 0;
        for (int b = 0; b < padded / SUMMED; ++b) {
            vf part = {};
            for (int i = 0; i < SUMMED; i += VL) part += load(&mass[b * SUMMED + i]);
            total += sums[b] = sum(part);
        }
        return total;
    }

    double mass_from(float least) const {
        double total = 0;
        for (int b = 0; b < padded / SUMMED; ++b) {
            vf part = {};
            for (int i = 0; i < SUMMED; i += VL) {
                vf m = load(&mass[b * SUMMED + i]);
                part += m >= splat(least) ? m : vf{};
            }
            total += sum(part);
        }
        return total;
    }

    int count_from(float least) const {
        vi count = {};
        for (int i = 0; i < padded; i += VL) count -= load(&mass[i]) >= splat(least);
        int total = 0;
        for (int i = 0; i < VL; ++i) total += count[i];
        return total;
    }

    static float of_bits(int32_t bits) {
        float f;
        memcpy(&f, &bits, 4);
        return f;
    }

    // The largest float t in (0, 1] for which enough(t): positive floats are ordered as their bits are.
    template <class Enough>
    static float largest_with(Enough enough) {
        int32_t low = 1, high = 0x3f800000;  // 1.0f: the mass of the likeliest token
        while (low < high) {
            int32_t middle = low + (high - low + 1) / 2;
            if (enough(of_bits(middle)))
                low = middle;
            else
                high = middle - 1;
        }
        return of_bits(low);
    }

    void drop_below(float least) {
        for (int i = 0; i < padded; i += VL) {
            vf m = load(&mass[i]);
            store(&mass[i], m >= splat(least) ? m : vf{});
        }
    }

    double truncate(const Draw& by, double total) {
        if (by.top_k > 0 && by.top_k < vocabulary) {
            const int k = by.top_k;
            drop_below(largest_with([&](float t) { return count_from(t) >= k; }));
            total = add_up();
        }
        float least = float(by.min_p);
        if (by.top_p < 1.0) {
            const double wanted = by.top_p * total;
            least = std::max(least, largest_with([&](float t) { return mass_from(t) >= wanted; }));
        }
        if (least == 0.0f) return total;
        drop_below(least);
        return add_up();
    }

    int32_t invert(double target) const {
        int block = 0, last = 0;
        double below = 0, reached = 0;
        for (int b = 0; b < padded / SUMMED; ++b) {
            if (sums[b] <= 0) continue;
            last = b, below = reached, reached += sums[b], block = b;
            if (reached > target) break;
        }
        block = last;
        const float* inner = &mass[block * SUMMED];
        double total = 0;
        for (int i = 0; i < SUMMED; ++i) total += inner[i];
        const double share = std::max(0.0, target - below) / sums[block] * total;
        int found = 0;
        double passed = 0;
        for (int i = 0; i < SUMMED; ++i) {
            if (inner[i] <= 0) continue;
            found = i, passed += inner[i];
            if (passed > share) break;
        }
        return block * SUMMED + found;
    }
};
