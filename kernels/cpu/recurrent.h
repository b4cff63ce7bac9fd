// Layers with a recurrent state, as in `reference_recurrent.py`: all nodes of a draft's tree, the commit of a path, and a
// prompt. What the state gives to nodes is a product with all of them; the writes of ancestors are added one by one.

#pragma once

#include "attention.h"

constexpr int64_t CHUNK = 32;  // tokens of a prompt that are read at once

struct Nodes {  // of one head; a stride is from a node to the next
    int64_t n, K, V;
    const float *q, *k, *v, *beta, *g;  // beta: null without the delta rule
    int64_t q_at, k_at, v_at, beta_at, g_at;
    const bool* ancestors;  // [n, n]; null: a chain
    float *o, *u, *G;       // u [n, V] and G [n] are contiguous
    int64_t o_at;
};

struct Room {  // for intermediate results
    std::vector<float> rows, faded, before, reads, ones;
    std::vector<float*> out;
    Room(int64_t n, int64_t K, int64_t V)
        : rows(2 * n * K), faded(2 * n * K), before(2 * n * V), reads(2 * n * n), ones(MOST, 1.0f), out(2 * n) {}
};

static inline void add_scaled(float* y, float scale, const float* x, int64_t count) {
    for (int64_t i = 0; i < count; i++) y[i] += scale * x[i];
}

// R rows of x [R, K] times each of N rows of w [N, K], which is y [R, N].
static void dots(const float* x, const float* w, float* y, int64_t R, int64_t K, int64_t N) {
    int64_t i = 0;
    for (; i + COLUMNS <= N; i += COLUMNS) blocks<COLUMNS>(x, w + i * K, (const float*)nullptr, y + i, R, K, N);
    for (; i < N; i++) blocks<1>(x, w + i * K, (const float*)nullptr, y + i, R, K, N);
}

// Reads all nodes of a head. The state is [K, V]; `column` is its stride over V, 1 or K.
static void read(const Nodes& a, const float* state, int64_t column, Room& room) {
    const int64_t n = a.n, K = a.K, V = a.V, R = a.beta ? 2 * n : n;  // queries, then keys under the delta rule
    float *rows = room.rows.data(), *faded = room.faded.data(), *before = room.before.data(), *reads = room.reads.data();
    auto above = [&](int64_t i, int64_t j) { return !a.ancestors || a.ancestors[i * n + j]; };
    for (int64_t i = 0; i < n; i++) {
        a.G[i] = 0.0f;
        for (int64_t j = 0; j <= i; j++)
            if (above(i, j)) a.G[i] += a.g[j * a.g_at];
        std::copy_n(a.q + i * a.q_at, K, rows + i * K);
        std::copy_n(a.k + i * a.k_at, K, rows + (n + i) * K);
    }
    for (int64_t r = 0; r < R; r++) {
        float fade = std::exp(a.G[r % n]);
        for (int64_t d = 0; d < K; d++) faded[r * K + d] = rows[r * K + d] * fade;
        room.out[r] = before + r * V;
    }
    if (column == 1)
        for (int64_t r = 0; r < R; r += MOST)
            mixed<MOST>(std::min<int64_t>(MOST, R - r), faded + r * K, K, state, K, V, room.ones.data(), &room.out[r]);
    else
        dots(faded, state, before, R, K, V);
    dots(rows, rows + n * K, reads, R, K, n);
    for (int64_t i = 0; i < n; i++) {
        float *write = a.u + i * V, *read = a.o + i * a.o_at;
        std::copy_n(a.v + i * a.v_at, V, write);
        std::copy_n(before + i * V, V, read);
        if (a.beta) add_scaled(write, -1.0f, before + (n + i) * V, V);
        for (int64_t j = 0; j < i; j++) {
            if (!above(i, j)) continue;
            float fade = std::exp(a.G[i] - a.G[j]);
            if (a.beta) add_scaled(write, -fade * reads[(n + i) * n + j], a.u + j * V, V);
            add_scaled(read, fade * reads[i * n + j], a.u + j * V, V);
        }
        if (a.beta)
            for (int64_t e = 0; e < V; e++) write[e] *= a.beta[i * a.beta_at];
        add_scaled(read, reads[i * n + i], write, V);
    }
}

// Updates the state [K, V] of a head to `last`, the end of a path: `path` [n] marks its nodes; null: all are.
static void fold(const Nodes& a, const bool* path, int64_t last, float* state) {
    std::vector<int64_t> nodes;
    std::vector<float> weights;
    for (int64_t i = 0; i < a.n; i++)
        if (!path || path[i]) nodes.push_back(i), weights.push_back(std::exp(a.G[last] - a.G[i]));
    if (nodes.empty()) return;
    float fade = std::exp(a.G[last]);
    for (int64_t d = 0; d < a.K; d++) {
        float* row = state + d * a.V;
        for (int64_t e = 0; e < a.V; e++) row[e] *= fade;
        for (size_t i = 0; i < nodes.size(); i++)
            add_scaled(row, weights[i] * a.k[nodes[i] * a.k_at + d], a.u + nodes[i] * a.V, a.V);
    }
}

// Reads a chain, a chunk at a time, and leaves the state [K, V] at its end; `u` and `G` have room for a chunk.
static void read_chain(Nodes a, float* state, Room& room) {
    for (int64_t left = a.n; left > 0; left -= CHUNK) {
        a.n = std::min(left, CHUNK);
        read(a, state, 1, room);
        fold(a, nullptr, a.n - 1, state);
        a.q += CHUNK * a.q_at, a.k += CHUNK * a.k_at, a.v += CHUNK * a.v_at, a.g += CHUNK * a.g_at;
        a.o += CHUNK * a.o_at;
        if (a.beta) a.beta += CHUNK * a.beta_at;
    }
}
