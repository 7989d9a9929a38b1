// What Python calls (ctypes, see library.py). Functions that can fail return 0 or null; nothing here throws.
#include <chrono>
#include <exception>

#include "model.h"

extern "C" {

// What this file was compiled for: 1 AVX2, 2 AVX-512, 3 AVX-512 with bf16.
int quintet_level() {
#if defined(QUINTET_BF16)
    return 3;
#else
    return VL == 16 ? 2 : 1;
#endif
}

int quintet_unit() { return fastest_unit(true); }

int quintet_has_unit(int unit) { return has_unit(Unit(unit)); }

int quintet_page() { return PAGE; }

void* quintet_open(const Spec* spec, int use_bf16) {
    try {
#ifdef QUINTET_FP16
        if (use_bf16 && spec->unit == HALVES) return static_cast<Decoder*>(new Model<FP16>(*spec));
#endif
#ifdef QUINTET_BF16
        if (use_bf16) return static_cast<Decoder*>(new Model<BF16>(*spec));
#endif
        return use_bf16 ? nullptr : static_cast<Decoder*>(new Model<F32>(*spec));
    } catch (const std::exception&) {  // no memory, or no thread
        return nullptr;
    }
}

void quintet_close(void* model) { delete static_cast<Decoder*>(model); }

void quintet_load(void* model, int layer, int part, int bias, const void* from, int from_bf16) {
    static_cast<Decoder*>(model)->take(layer, part, bias, from, from_bf16);
}

int quintet_step(void* model, const Step* step) {
    try {
        static_cast<Decoder*>(model)->step(*step);
        return 1;
    } catch (const std::exception&) {
        return 0;
    }
}

// Tokens from rows of logits [rows, stride], which have room for whole vectors.
int quintet_sample(const float* logits, int rows, int stride, int vocabulary, const Draw* draws, int32_t* ids,
                   float* logprobs) {
    try {
        Sampler sampler;
        sampler.shape(vocabulary);
        for (int r = 0; r < rows; ++r) sampler.draw(logits + size_t(r) * stride, draws[r], ids + r, logprobs + r);
        return 1;
    } catch (const std::exception&) {
        return 0;
    }
}

void quintet_clear_pages(void* model, const int32_t* pages, int n) {
    static_cast<Decoder*>(model)->clear_pages(pages, n);
}

void quintet_read_pages(void* model, const int32_t* pages, const int32_t* counts, int n, void* plain) {
    static_cast<Decoder*>(model)->read_pages(pages, counts, n, plain);
}

void quintet_write_pages(void* model, const int32_t* pages, const int32_t* counts, int n, const void* plain) {
    static_cast<Decoder*>(model)->write_pages(pages, counts, n, plain);
}

int64_t quintet_weight_bytes(void* model) { return static_cast<Decoder*>(model)->weight_bytes(); }
int64_t quintet_page_bytes(void* model) { return static_cast<Decoder*>(model)->page_bytes(); }

// Seconds of the matrix products of one step over `rows` tokens.
double quintet_products(void* model, int rows) {
    auto began = std::chrono::steady_clock::now();
    static_cast<Decoder*>(model)->products(rows);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

// Seconds in which the model's threads read `bytes` of memory once; *sum keeps the reading from being left out.
double quintet_read(void* model, const float* memory, int64_t bytes, float* sum) {
    auto began = std::chrono::steady_clock::now();
    *sum = static_cast<Decoder*>(model)->read(memory, bytes);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}
}
