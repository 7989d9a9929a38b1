// A Llama-style decoder: packed weights, paged KV and one forward pass with sampling, the threads of a pool sharing each stage.
#pragma once
#include <memory>

#include "attention.h"
#include "sampler.h"

struct Spec {
    int32_t vocabulary, hidden, intermediate, layers, heads, kv_heads, head_dim, threads;
    int32_t qkv_bias, output_bias, mlp_bias, qk_norm, unit;
    float norm_eps;
    int64_t pages;
};

// One forward pass. Members are sequences; member m has member_count[m] consecutive new tokens, the first at position
// member_position[m], and sees all shared pages of its group, then its own pages (row member_row[m] of own_table),
// which held own_before[m] tokens before. member_writes[m] 0: its tokens' KV is cached already and is not written.
struct Step {
    int32_t tokens, members, groups, logits, samplers;
    const int32_t *ids, *member_start, *member_count, *member_position, *member_row, *own_before, *member_writes;
    const int32_t* own_table;
    int64_t own_stride;
    const int32_t *group_start, *shared_start, *shared_ids, *shared_counts;  // [groups + 1] twice; flat lists
    const float *cosines, *sines;                                            // [positions, head_dim / 2]
    const int32_t* logit_token;                                              // [logits]
    const int32_t* sampler_logit;                                            // [samplers], ascending
    const Draw* draws;                                                       // [samplers]
    int32_t* sampled;                                                        // out: [samplers]
    float* logprobs;                                                         // out: [samplers]
    float* all_logits;                                                       // out, may be null: [logits, vocabulary]
};

enum Part { EMBEDDING, HEAD, NORM, INPUT_NORM, MLP_NORM, Q_NORM, K_NORM, Q, K, V, OUTPUT, GATE, UP, DOWN };

struct Decoder {
    virtual ~Decoder() = default;
    virtual void take(int layer, int part, int bias, const void* from, int from_bf16) = 0;
    virtual void step(const Step& step) = 0;
    virtual void products(int rows) = 0;
    virtual float read(const float* memory, int64_t bytes) = 0;
    virtual void clear_pages(const int32_t* pages, int n) = 0;
    virtual void read_pages(const int32_t* pages, const int32_t* counts, int n, void* plain) = 0;
    virtual void write_pages(const int32_t* pages, const int32_t* counts, int n, const void* plain) = 0;
    virtual int64_t weight_bytes() const = 0;
    virtual int64_t page_bytes() const = 0;
};

constexpr int LOGIT_ROWS = 256;  // rows of logits held at once

struct Task {  // attention of consecutive tokens of one group under one KV head
    int group, first, last, head;
};

template <class P>
class Model : public Decoder {
    typedef typename P::Act Act;
    typedef typename P::Row Row;
    typedef typename P::Left Left;
    struct Layer {
        Matrix<P> qkv, output, gate_up, down;
        std::vector<float> input_norm, mlp_norm, q_norm, k_norm;
    };

    const Spec spec;
    Multiplier by;
    Attention<P> attention;
    std::vector<Layer> layers;
    Matrix<P> head;
    std::vector<float> norm;
    Act* embedding = nullptr;  // [vocabulary, hidden]
    std::unique_ptr<Memory> weights, cache;
    size_t layer_pages;  // entries of one layer's cache

    // Of the step in progress. Row strides: residual and fused are whole panels, the rest whole inner blocks.
    int capacity = 0, width_x, width_in, width_fused, width_q, width_hidden, width_logits;
    Buffer<float> residual, fused, logits, query_units;
    Buffer<Left> queries;
    Buffer<Row> normed, mixed, hidden;
    std::vector<Task> tasks;
    std::vector<int> member_of;
    std::vector<Scratch<P>> scratch;
    std::vector<Sampler> samplers;
    Pool pool;

  public:
    explicit Model(const Spec& s)
        : spec(s), by{P::PAIRED ? Unit(s.unit) : PAIRS, {}, {}}, layers(s.layers), scratch(s.threads), samplers(s.threads),
          pool(s.threads) {
        const int inner = spec.heads * spec.head_dim, kv = spec.kv_heads * spec.head_dim;
        attention = {up(spec.head_dim, 32), spec.kv_heads, by.unit};
        width_x = up(spec.hidden, PANEL), width_in = up(spec.hidden, P::DEPTH);
        width_fused = up(inner + 2 * kv, PANEL), width_q = up(inner, P::DEPTH);
        width_hidden = up(spec.intermediate, std::max(VL, P::DEPTH)), width_logits = up(spec.vocabulary, PANEL);
        size_t entries = size_t(spec.vocabulary) * spec.hidden;
        std::vector<Matrix<P>*> all{&head};
        head.shape(spec.vocabulary, spec.hidden, false);
        for (Layer& layer : layers) {
            layer.qkv.shape(inner + 2 * kv, spec.hidden, spec.qkv_bias);
            layer.output.shape(spec.hidden, inner, spec.output_bias);
            layer.gate_up.shape(2 * up(spec.intermediate, VL), spec.hidden, spec.mlp_bias);
            layer.down.shape(spec.hidden, spec.intermediate, spec.mlp_bias);
            layer.input_norm.resize(spec.hidden), layer.mlp_norm.resize(spec.hidden);
            layer.q_norm.resize(spec.head_dim), layer.k_norm.resize(spec.head_dim);
            for (Matrix<P>* m : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) all.push_back(m);
        }
        norm.resize(spec.hidden);
        for (Matrix<P>* m : all) entries += up(m->size(), 64);
        weights = std::make_unique<Memory>((entries + 64) * sizeof(Act));
        Act* at = static_cast<Act*>(weights->at);
        for (Matrix<P>* m : all) m->data = at, at += up(m->size(), 64);
        embedding = at;
        layer_pages = size_t(spec.pages) * spec.kv_heads * attention.page_size();
        cache = std::make_unique<Memory>(layer_pages * spec.layers * sizeof(Act));
        for (Sampler& sampler : samplers) sampler.shape(spec.vocabulary);
    }

    int64_t weight_bytes() const override { return weights->bytes; }
    int64_t page_bytes() const override {
        return int64_t(spec.layers) * spec.kv_heads * attention.page_size() * sizeof(Act);
    }

    // A tensor of a Hugging Face state dict, row-major. Padding was zeroed when the memory was taken and stays so.
    void take(int layer, int part, int bias, const void* from, int from_bf16) override {
        Layer* l = layer < 0 ? nullptr : &layers[layer];
        const int inner = spec.heads * spec.head_dim, kv = spec.kv_heads * spec.head_dim, mlp = spec.intermediate;
        auto matrix = [&](Matrix<P>& m, int rows, auto column) { pack(m, rows, bias, from, from_bf16, column); };
        auto vector = [&](std::vector<float>& v) {
            for (size_t i = 0; i < v.size(); ++i) v[i] = entry(from, from_bf16, i);
        };
        switch (part) {
            case EMBEDDING: return embed(from, from_bf16);
            case HEAD: return matrix(head, spec.vocabulary, [](int i) { return i; });
            case NORM: return vector(norm);
            case INPUT_NORM: return vector(l->input_norm);
            case MLP_NORM: return vector(l->mlp_norm);
            case Q_NORM: return vector(l->q_norm);
            case K_NORM: return vector(l->k_norm);
            case Q: return matrix(l->qkv, inner, [](int i) { return i; });
            case K: return matrix(l->qkv, kv, [=](int i) { return inner + i; });
            case V: return matrix(l->qkv, kv, [=](int i) { return inner + kv + i; });
            case OUTPUT: return matrix(l->output, spec.hidden, [](int i) { return i; });
            case GATE: return matrix(l->gate_up, mlp, [](int i) { return i / VL * PANEL + i % VL; });
            case UP: return matrix(l->gate_up, mlp, [](int i) { return i / VL * PANEL + VL + i % VL; });
            case DOWN: return matrix(l->down, spec.hidden, [](int i) { return i; });
        }
    }

    void clear_pages(const int32_t* pages, int n) override {
        const size_t page = spec.kv_heads * attention.page_size();
        for (int l = 0; l < spec.layers; ++l)
            for (int i = 0; i < n; ++i) std::fill_n(layer_cache(l) + pages[i] * page, page, Act(0));
    }

    // Tokens of pages of which page i holds counts[i], as plain keys and values [2, layers, kv_heads, tokens, head_dim].
    void read_pages(const int32_t* pages, const int32_t* counts, int n, void* plain) override {
        Act* to = static_cast<Act*>(plain);
        exchange(counts, n, [&](int l, int h, int i, int t, size_t k, size_t v) {
            attention.read_plain(layer_cache(l), pages[i], h, t, to + k, to + v, spec.head_dim);
        });
    }
    void write_pages(const int32_t* pages, const int32_t* counts, int n, const void* plain) override {
        const Act* from = static_cast<const Act*>(plain);
        exchange(counts, n, [&](int l, int h, int i, int t, size_t k, size_t v) {
            attention.write_plain(layer_cache(l), pages[i], h, t, from + k, from + v, spec.head_dim);
        });
    }

    float read(const float* memory, int64_t bytes) override {
        std::vector<float> sums(spec.threads * 16);  // a cache line each
        constexpr int64_t size = 1 << 16;
        pool.run(int(bytes / 4 / size), [&](int i, int worker) { sums[worker * 16] += read_block(memory + i * size, size); });
        return sums[0];
    }

    void step(const Step& step) override {
        prepare(step);
        embed_tokens(step);
        for (int l = 0; l < spec.layers; ++l) run_layer(step, layers[l], layer_cache(l));
        for (int first = 0; first < step.logits; first += LOGIT_ROWS) finish(step, first);
    }

    // The matrix products of a step over `rows` tokens and nothing else: what a step cannot be quicker than.
    void products(int rows) override {
        reserve(rows);
        logits.reserve(size_t(std::min(rows, LOGIT_ROWS) + BLOCK) * width_logits);
        for (Layer& l : layers) {
            product(pool, normed.data(), width_in, rows, l.qkv, by, Into{fused.data(), width_fused, false, l.qkv.bias});
            product(pool, mixed.data(), width_q, rows, l.output, by, Into{residual.data(), width_x, true, l.output.bias});
            product(pool, normed.data(), width_in, rows, l.gate_up, by,
                    Gate<Row>{hidden.data(), width_hidden, l.gate_up.bias});
            product(pool, hidden.data(), width_hidden, rows, l.down, by,
                    Into{residual.data(), width_x, true, l.down.bias});
        }
        for (int first = 0; first < rows; first += LOGIT_ROWS)
            product(pool, normed.data(), width_in, std::min(LOGIT_ROWS, rows - first), head, by,
                    Into{logits.data(), width_logits, false, head.bias});
    }

  private:
    Act* layer_cache(int l) const { return static_cast<Act*>(cache->at) + layer_pages * l; }

    // move(layer, head, page, token of the page, place of the plain key, of the plain value) for every token.
    template <class Move>
    void exchange(const int32_t* counts, int n, Move move) {
        std::vector<size_t> first(n + 1);
        for (int i = 0; i < n; ++i) first[i + 1] = first[i] + counts[i];
        const size_t rows = first[n], all = size_t(spec.layers) * spec.kv_heads * rows;
        pool.run_many(spec.layers * spec.kv_heads * n, [&](int at, int) {
            const int i = at % n, head = at / n;  // of all layers' heads
            for (int t = 0; t < counts[i]; ++t) {
                const size_t row = head * rows + first[i] + t;
                move(head / spec.kv_heads, head % spec.kv_heads, i, t, row * spec.head_dim, (all + row) * spec.head_dim);
            }
        });
    }

    static float entry(const void* from, int from_bf16, size_t i) {
        return from_bf16 ? widen(static_cast<const bf16*>(from)[i]) : static_cast<const float*>(from)[i];
    }

    void embed(const void* from, int from_bf16) {
        pool.run_many(spec.vocabulary, [&](int row, int) {
            for (size_t i = size_t(row) * spec.hidden; i < size_t(row + 1) * spec.hidden; ++i)
                embedding[i] = P::one(entry(from, from_bf16, i));
        });
    }

    template <class Column>
    void pack(Matrix<P>& m, int rows, int bias, const void* from, int from_bf16, Column column) {
        if (bias) {
            for (int i = 0; i < rows; ++i) m.bias[column(i)] = entry(from, from_bf16, i);
            return;
        }
        if (by.unit == HALVES) m.scale.resize(size_t(m.panels) * PANEL);
        pool.run_many(rows, [&](int i, int) {
            const int c = column(i);
            const auto number = [&](int k) { return P::one(entry(from, from_bf16, size_t(i) * m.k + k)); };
            if (by.unit == HALVES) return halve(m, c, number);
            for (int k = 0; k < m.k; ++k) m.set(c, k, number(k));
        });
    }

    // A column of bf16 numbers as fp16 ones below 1 and their scale.
    template <class Number>
    static void halve([[maybe_unused]] Matrix<P>& m, [[maybe_unused]] int column, [[maybe_unused]] Number number) {
#ifdef QUINTET_FP16
        if constexpr (P::HALF) {
            float largest = 0;
            for (int k = 0; k < m.k; ++k) largest = std::max(largest, std::fabs(widen(number(k))));
            m.scale[column] = size_of(largest);
            for (int k = 0; k < m.k; ++k) m.set(column, k, P::bits_of(half(widen(number(k)) / m.scale[column])));
        }
#endif
    }

    // Room for `tokens` rows and the rows that a block may touch beyond them.
    void reserve(int tokens) {
        if (tokens <= capacity) return;
        capacity = up(tokens, BLOCK);
        const size_t rows = capacity + BLOCK;
        residual.reserve(rows * width_x), fused.reserve(rows * width_fused);
        normed.reserve(rows * width_in), mixed.reserve(rows * width_q), hidden.reserve(rows * width_hidden);
    }

    int query_group() const { return spec.heads / spec.kv_heads; }

    void prepare(const Step& step) {
        reserve(step.tokens);
        const int group = query_group(), per_task = LIMIT / group;
        queries.reserve((size_t(step.tokens) * spec.heads + LIMIT) * attention.width);
        query_units.reserve(size_t(step.tokens) * spec.heads);
        logits.reserve(size_t(std::min(step.logits, LOGIT_ROWS) + BLOCK) * width_logits);
        member_of.resize(step.tokens);
        tasks.clear();
        for (int m = 0; m < step.members; ++m)
            for (int i = 0; i < step.member_count[m]; ++i) member_of[step.member_start[m] + i] = m;
        for (int g = 0; g < step.groups; ++g) {
            const int end = step.group_start[g + 1] - 1;
            const int first = step.member_start[step.group_start[g]];
            const int last = step.member_start[end] + step.member_count[end];
            for (int h = 0; h < spec.kv_heads; ++h)
                for (int t = first; t < last; t += per_task)
                    tasks.push_back({g, t, std::min(last, t + per_task), h});
        }
    }

    void embed_tokens(const Step& step) {
        pool.run_many(step.tokens, [&](int t, int) {
            const Act* from = embedding + size_t(step.ids[t]) * spec.hidden;
            float* to = &residual[size_t(t) * width_x];
            for (int i = 0; i < spec.hidden; ++i) to[i] = P::get(from[i]);
        });
    }

    void run_layer(const Step& step, Layer& l, Act* pages) {
        const int n = step.tokens;
        normalise(n, l.input_norm);
        product(pool, normed.data(), width_in, n, l.qkv, by, Into{fused.data(), width_fused, false, l.qkv.bias});
        rotate_runs(step, l, pages);
        attend(step, l, pages);
        product(pool, mixed.data(), width_q, n, l.output, by, Into{residual.data(), width_x, true, l.output.bias});
        normalise(n, l.mlp_norm);
        product(pool, normed.data(), width_in, n, l.gate_up, by,
                Gate<Row>{hidden.data(), width_hidden, l.gate_up.bias});
        product(pool, hidden.data(), width_hidden, n, l.down, by, Into{residual.data(), width_x, true, l.down.bias});
    }

    // RMS normalisation in float32 (arXiv 1910.07467).
    void normalise_row(const float* x, const std::vector<float>& weight, Row* to) const {
        vf squares = {};
        int i = 0;
        for (; i + VL <= spec.hidden; i += VL) squares += load(x + i) * load(x + i);
        float total = sum(squares);
        for (; i < spec.hidden; ++i) total += x[i] * x[i];
        const float scale = 1.0f / std::sqrt(total / spec.hidden + spec.norm_eps);
        for (i = 0; i + VL <= spec.hidden; i += VL) P::put(to + i, load(x + i) * scale * load(&weight[i]));
        for (; i < spec.hidden; ++i) P::put(to + i, x[i] * scale * weight[i]);
    }

    void normalise(int tokens, const std::vector<float>& weight) {
        pool.run_many(tokens, [&](int t, int) {
            normalise_row(&residual[size_t(t) * width_x], weight, &normed[size_t(t) * width_in]);
        });
    }

    // Normalise (where the model does) and rotate one head in place, halves convention (arXiv 2104.09864).
    void rotate_head(float* x, const std::vector<float>& weight, const float* cosine, const float* sine) const {
        const int d = spec.head_dim, half = d / 2;
        if (spec.qk_norm) {
            float total = 0;
            for (int i = 0; i < d; ++i) total += x[i] * x[i];
            const float scale = 1.0f / std::sqrt(total / d + spec.norm_eps);
            for (int i = 0; i < d; ++i) x[i] *= scale * weight[i];
        }
        int i = 0;
        for (; i + VL <= half; i += VL) {
            const vf left = load(x + i), right = load(x + i + half), c = load(cosine + i), s = load(sine + i);
            store(x + i, left * c - right * s);
            store(x + i + half, right * c + left * s);
        }
        for (; i < half; ++i) {
            const float left = x[i], right = x[i + half];
            x[i] = left * cosine[i] - right * sine[i];
            x[i + half] = right * cosine[i] + left * sine[i];
        }
    }

    // A query, scaled. fp16: below 16, and what its scores are to be multiplied by.
    static void put_query(const float* x, float scale, Left* to, float* unit, int n) {
#ifdef QUINTET_FP16
        if constexpr (P::HALF) {
            *unit = halve_row(x, n, 16, to) * scale;
        } else
#endif
        {
            int i = 0;
            for (; i + VL <= n; i += VL) P::put(to + i, load(x + i) * scale);
            for (; i < n; ++i) P::put(to + i, x[i] * scale);
        }
    }

    // Members of several tokens, before any of them is attended to; others when their task comes to them.
    void rotate_runs(const Step& step, const Layer& l, Act* pages) {
        if (step.tokens == step.members) return;
        pool.run_many(step.tokens, [&](int t, int) {
            if (step.member_count[member_of[t]] == 1) return;
            for (int h = 0; h < spec.kv_heads; ++h) rotate_queries(step, l, t, h), write_key(step, l, pages, t, h);
        });
    }

    size_t angles(const Step& step, int t) const {
        const int m = member_of[t];
        return size_t(step.member_position[m] + t - step.member_start[m]) * (spec.head_dim / 2);
    }

    // The queries of one KV head.
    void rotate_queries(const Step& step, const Layer& l, int t, int head) {
        const int d = spec.head_dim, group = query_group();
        const size_t angle = angles(step, t);
        const float scale = 1.0f / std::sqrt(float(d));
        float* x = &fused[size_t(t) * width_fused + head * group * d];
        for (int j = 0; j < group; ++j, x += d) {
            rotate_head(x, l.q_norm, step.cosines + angle, step.sines + angle);
            const size_t at = query(step, head, t) + j;
            put_query(x, scale, &queries[at * attention.width], &query_units[at], d);
        }
    }

    // Key and value of one KV head into the token's page.
    void write_key(const Step& step, const Layer& l, Act* pages, int t, int head) {
        const int d = spec.head_dim, m = member_of[t], place = step.own_before[m] + t - step.member_start[m];
        if (!step.member_writes[m]) return;
        const size_t at = angles(step, t);
        const int page = step.own_table[step.member_row[m] * step.own_stride + place / PAGE];
        float* key = &fused[size_t(t) * width_fused + (spec.heads + head) * d];
        rotate_head(key, l.k_norm, step.cosines + at, step.sines + at);
        attention.write(pages, page, head, place % PAGE, key, key + size_t(spec.kv_heads) * d, d);
    }

    // Queries are kept [kv_heads, tokens, query group, width]: the rows of a task follow each other. Returns the first.
    size_t query(const Step& step, int head, int token) const {
        return (size_t(head) * step.tokens + token) * query_group();
    }

    // Queries of tokens of a task, from token `first` on, over pages.
    void add(const Step& step, Scratch<P>& s, const Act* pages, const Task& task, int first, int rows, Pages over,
             const int* seen) {
        const size_t at = query(step, task.head, first);
        attention.add(s, pages, task.head, &queries[at * attention.width], &query_units[at],
                      (first - task.first) * query_group(), rows, over, seen);
    }

    void attend(const Step& step, const Layer& l, Act* pages) {
        pool.run(int(tasks.size()), [&](int i, int worker) { attend_task(step, l, pages, tasks[i], scratch[worker]); });
    }

    void attend_task(const Step& step, const Layer& l, Act* pages, const Task& task, Scratch<P>& s) {
        const int group = query_group(), d = spec.head_dim, begin = step.shared_start[task.group];
        const int shared = step.shared_start[task.group + 1] - begin;
#ifdef QUINTET_AMX
        if (by.unit == TILES) tiles_for(16);
#endif
        const int rows = (task.last - task.first) * group;
        s.fetch = attention.fetch(pages, task.head, step.shared_ids + begin, shared);
        s.after = own_pages(step, pages, task, task.first);
        s.ahead(2 * attention.lines());
        for (int t = task.first; t < task.last; ++t)
            if (step.member_count[member_of[t]] == 1) rotate_queries(step, l, t, task.head);
        attention.begin(s, rows);
        if (shared)
            add(step, s, pages, task, task.first, rows,
                {step.shared_ids + begin, step.shared_counts + begin, shared, 0}, nullptr);
        for (int t = task.first; t < task.last;) {
            const int m = member_of[t], end = std::min(task.last, step.member_start[m] + step.member_count[m]);
            s.ahead(INT32_MAX);
            s.fetch = own_pages(step, pages, task, end), s.after = {};
            if (step.member_count[m] == 1) write_key(step, l, pages, t, task.head);
            if (step.member_writes[m]) attend_own(step, pages, task, s, m, t, end);
            t = end;
        }
        for (int t = task.first; t < task.last; ++t)
            for (int j = 0; j < group; ++j)
                attention.finish(s, (t - task.first) * group + j,
                                 &mixed[size_t(t) * width_q + (task.head * group + j) * d], d);
    }

    // To be fetched: the own pages of the member that token t of the task belongs to.
    Fetch own_pages(const Step& step, const Act* pages, const Task& task, int t) const {
        if (t >= task.last || !step.member_writes[member_of[t]]) return {};
        const int m = member_of[t], visible = step.own_before[m] + t - step.member_start[m] + 1;
        return attention.fetch(pages, task.head, step.own_table + step.member_row[m] * step.own_stride,
                               up(visible, PAGE) / PAGE);
    }

    // Tokens [first, last) of member m over its own pages, each up to itself.
    void attend_own(const Step& step, const Act* pages, const Task& task, Scratch<P>& s, int m, int first, int last) {
        const int group = query_group(), rows = (last - first) * group;
        const int before = step.own_before[m] - step.member_start[m];  // token t is own token before + t
        const int visible = before + last;
        for (int r = 0; r < rows; ++r) s.seen[r] = before + first + r / group + 1;
        const Pages own{step.own_table + step.member_row[m] * step.own_stride, nullptr, up(visible, PAGE) / PAGE,
                        visible};
#ifdef QUINTET_AMX
        if (by.unit == TILES) tiles_for(std::min(rows, 16));
#endif
        add(step, s, pages, task, first, rows, own, last - first > 1 ? s.seen : nullptr);
    }

    void finish(const Step& step, int first) {
        const int rows = std::min(LOGIT_ROWS, step.logits - first);
        pool.run_many(rows, [&](int r, int) {
            const size_t token = step.logit_token[first + r];
            normalise_row(&residual[token * width_x], norm, &normed[size_t(r) * width_in]);
        });
        product(pool, normed.data(), width_in, rows, head, by, Into{logits.data(), width_logits, false, head.bias});
        pool.run(step.samplers, [&](int i, int worker) {
            const int row = step.sampler_logit[i] - first;
            if (row >= 0 && row < rows)
                samplers[worker].draw(&logits[size_t(row) * width_logits], step.draws[i], step.sampled + i,
                                      step.logprobs + i);
        });
        if (!step.all_logits) return;
        for (int r = 0; r < rows; ++r)
            memcpy(step.all_logits + size_t(first + r) * spec.vocabulary, &logits[size_t(r) * width_logits],
                   sizeof(float) * spec.vocabulary);
    }

    static float read_block(const float* p, int64_t n) {  // n: a multiple of 4 VL
        vf s[4] = {};
        for (int64_t i = 0; i < n; i += 4 * VL)
            for (int j = 0; j < 4; ++j) s[j] += load(p + i + j * VL);
        return sum(s[0] + s[1] + s[2] + s[3]);
    }
};
