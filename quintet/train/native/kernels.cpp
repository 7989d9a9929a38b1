// What Python calls (ctypes, see library.py). `low`: numbers between matrix products are bf16, else float32.

#include "adapters.h"
#include "segments.h"

// F<BF16>(arguments) or F<F32>(arguments), the numbers cast to match
#ifdef QUINTET_BF16
#define EITHER(low, call)         \
    if (low) {                    \
        typedef BF16 P;           \
        typedef BF16::Act Act;    \
        call;                     \
        return;                   \
    }                             \
    typedef F32 P;                \
    typedef F32::Act Act;         \
    call;
#else
#define EITHER(low, call) \
    typedef F32 P;        \
    typedef F32::Act Act; \
    call;
#endif
#define IN(x) static_cast<const Act*>(x)
#define OUT(x) static_cast<Act*>(x)

extern "C" {

// Whether bf16 can be computed with at all.
int quintet_low() {
#ifdef QUINTET_BF16
    return 1;
#else
    return 0;
#endif
}

int quintet_unit() { return fastest_unit(false); }

int quintet_parts() { return PARTS; }

void quintet_norm(Team team, int low, int rows, int width, const float* x, const void* branch, float* sum,
                  const float* weight, float eps, void* out, float* inverse) {
    EITHER(low, norm<P>(team, rows, width, x, IN(branch), sum, weight, eps, OUT(out), inverse))
}

void quintet_norm_again(Team team, int low, int rows, int width, const float* x, const float* weight,
                        const float* inverse, void* out) {
    EITHER(low, norm_again<P>(team, rows, width, x, weight, inverse, OUT(out)))
}

void quintet_norm_backward(Team team, int low, int rows, int width, const void* g, const float* x,
                           const float* inverse, const float* weight, float* grad, void* low_grad, float* parts) {
    EITHER(low, norm_backward<P>(team, rows, width, IN(g), x, inverse, weight, grad, OUT(low_grad), parts))
}

void quintet_add(Team team, int low, int64_t n, const float* x, const void* other, float* out) {
    EITHER(low, add<P>(team, n, x, IN(other), out))
}

void quintet_swiglu(Team team, int low, int rows, int width, const void* gate_up, void* inner) {
    EITHER(low, swiglu<P>(team, rows, width, IN(gate_up), OUT(inner)))
}

void quintet_swiglu_backward(Team team, int low, int rows, int width, const void* grad, const void* gate_up,
                             void* grad_gate_up) {
    EITHER(low, swiglu_backward<P>(team, rows, width, IN(grad), IN(gate_up), OUT(grad_gate_up)))
}

void quintet_rotate(Team team, int low, int rows, int stride, int heads, int size, void* x, const float* cos,
                    const float* sin, float sign) {
    EITHER(low, rotate<P>(team, rows, stride, heads, size, OUT(x), cos, sin, sign))
}

void quintet_head_statistics(Team team, int low, int rows, int vocabulary, const void* logits, float factor,
                             const int64_t* target, float* lse, float* logprob, float* entropy) {
    EITHER(low, head_statistics<P>(team, rows, vocabulary, IN(logits), factor, target, lse, logprob, entropy))
}

void quintet_head_gradient(Team team, int low, int rows, int vocabulary, void* logits, float factor,
                           const int64_t* target, const float* lse, const float* entropy, const float* grad_logprob,
                           const float* grad_entropy) {
    EITHER(low, head_gradient<P>(team, rows, vocabulary, OUT(logits), factor, target, lse, entropy, grad_logprob,
                                 grad_entropy))
}

void quintet_adapters_backward(Team team, int low, int rows, int inputs, int outputs, const void* x, const void* grad,
                               const Adapter* adapters, int n) {
    EITHER(low, adapters_backward<P>(team, rows, inputs, outputs, IN(x), IN(grad), adapters, n))
}

void quintet_merge(Team team, int low, int outputs, int inputs, const float* base, const Adapter* adapters, int n,
                   void* out) {
    EITHER(low, merge<P>(team, outputs, inputs, base, adapters, n, OUT(out)))
}

void quintet_attention(Team team, int low, int unit, Heads heads, const void* qkv, const Span* spans,
                       const Piece* pieces, int n_pieces, void* out, float* lse) {
    EITHER(low, (Segments<P>{heads, Unit(unit), IN(qkv), spans, OUT(out), lse}).forward(team, pieces, n_pieces))
}

void quintet_attention_backward(Team team, int low, int unit, Heads heads, const void* qkv, const Span* spans,
                                const Piece* pieces, int n_pieces, const Sum* prompts, int n_prompts, const void* out,
                                const float* lse, const void* grad_out, void* grad_qkv, float* sums) {
    EITHER(low, (Segments<P>{heads, Unit(unit), IN(qkv), spans, const_cast<Act*>(IN(out)), const_cast<float*>(lse),
                             IN(grad_out), OUT(grad_qkv), sums})
                    .backward(team, pieces, n_pieces, prompts, n_prompts))
}
}
