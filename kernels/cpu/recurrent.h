// Layers with a recurrent state, as in `reference_recurrent.py`: all nodes of a draft's tree, and the commit of a path.
// What the state gives to the nodes is a product with all of them; the writes of ancestors are added one after the other.

#pragma once

#include "attention.h"

struct Scan {
    int64_t B, H, n, K, V;
    const float *q, *k, *v, *beta, *g, *state;  // [B, H, n, K] twice, [B, H, n, V], [B, H, n] twice, [B, H, K, V]
    const int64_t *q_at, *k_at, *v_at, *beta_at, *g_at, *state_at;  // strides; those of rows of q, k and v are 1
    const bool* ancestors;                                          // [B, n, n]
    float *o, *u, *G;                                               // [B, n, H, V], [B, H, n, V], [B, H, n]
};

static inline void add_scaled(float* y, float scale, const float* x, int64_t count) {
    for (int64_t i = 0; i < count; i++) y[i] += scale * x[i];
}

// x [R, K] times the state of a head, [K, V]; `row` and `column` are its strides, one of which is 1.
static void times_state(const float* x, const float* state, int64_t row, int64_t column, float* y, float** out,
                        const float* ones, int64_t R, int64_t K, int64_t V) {
    if (column == 1 && row == V) {
        for (int64_t r = 0; r < R; r++) out[r] = y + r * V;
        for (int64_t r = 0; r < R; r += MOST)
            mixed<MOST>(std::min<int64_t>(MOST, R - r), x + r * K, K, state, K, V, ones, out + r);
        return;
    }
    int64_t v = 0;
    for (; v + COLUMNS <= V; v += COLUMNS) blocks<COLUMNS>(x, state + v * K, (const float*)nullptr, y + v, R, K, V);
    for (; v < V; v++) blocks<1>(x, state + v * K, (const float*)nullptr, y + v, R, K, V);
}

static void scan(const Scan& a) {
    const int64_t n = a.n, K = a.K, V = a.V, R = a.beta ? 2 * n : n;  // queries, then keys under the delta rule
    bool alone = a.B * a.H * R * K * V <= ALONE;
    #pragma omp parallel for collapse(2) if (!alone)
    for (int64_t b = 0; b < a.B; b++)
        for (int64_t h = 0; h < a.H; h++) {
            std::vector<float> rows(2 * n * K), faded(R * K), before(R * V), reads(R * n), ones(MOST, 1.0f);
            std::vector<float*> out(R);
            const bool* above = a.ancestors + b * n * n;
            float *u = a.u + (b * a.H + h) * n * V, *G = a.G + (b * a.H + h) * n;
            for (int64_t i = 0; i < n; i++) {
                G[i] = 0.0f;
                for (int64_t j = 0; j <= i; j++)
                    if (above[i * n + j]) G[i] += a.g[b * a.g_at[0] + h * a.g_at[1] + j * a.g_at[2]];
                std::copy_n(a.q + b * a.q_at[0] + h * a.q_at[1] + i * a.q_at[2], K, &rows[i * K]);
                std::copy_n(a.k + b * a.k_at[0] + h * a.k_at[1] + i * a.k_at[2], K, &rows[(n + i) * K]);
            }
            for (int64_t r = 0; r < R; r++) {
                float fade = std::exp(G[r % n]);
                for (int64_t d = 0; d < K; d++) faded[r * K + d] = rows[r * K + d] * fade;
            }
            times_state(faded.data(), a.state + b * a.state_at[0] + h * a.state_at[1], a.state_at[2], a.state_at[3],
                        before.data(), out.data(), ones.data(), R, K, V);
            for (int64_t j = 0; j < n; j++)
                blocks<1>(rows.data(), &rows[(n + j) * K], (const float*)nullptr, &reads[j], R, K, n);
            for (int64_t i = 0; i < n; i++) {
                float *write = u + i * V, *read = a.o + ((b * n + i) * a.H + h) * V;
                std::copy_n(a.v + b * a.v_at[0] + h * a.v_at[1] + i * a.v_at[2], V, write);
                std::copy_n(&before[i * V], V, read);
                if (a.beta) add_scaled(write, -1.0f, &before[(n + i) * V], V);
                for (int64_t j = 0; j < i; j++) {
                    if (!above[i * n + j]) continue;
                    float fade = std::exp(G[i] - G[j]);
                    if (a.beta) add_scaled(write, -fade * reads[(n + i) * n + j], u + j * V, V);
                    add_scaled(read, fade * reads[i * n + j], u + j * V, V);
                }
                if (a.beta) {
                    float beta = a.beta[b * a.beta_at[0] + h * a.beta_at[1] + i * a.beta_at[2]];
                    for (int64_t e = 0; e < V; e++) write[e] *= beta;
                }
                add_scaled(read, reads[i * n + i], write, V);
            }
        }
}

struct Fold {
    int64_t B, H, n, K, V;
    const bool* path;     // [B, n]
    const int64_t* last;  // [B]
};

// Updates the state [B, H, K, V] of a layer to the end of the path; `k_at`, `u_at` and `G_at` are strides.
static void fold(const Fold& a, int64_t b, int64_t h, float* state, const float* k, const int64_t* k_at, const float* u,
                 const int64_t* u_at, const float* G, const int64_t* G_at) {
    std::vector<int64_t> nodes;
    for (int64_t i = 0; i < a.n; i++)
        if (a.path[b * a.n + i]) nodes.push_back(i);
    if (nodes.empty()) return;
    k += b * k_at[0] + h * k_at[1], u += b * u_at[0] + h * u_at[1], G += b * G_at[0] + h * G_at[1];
    float end = G[a.last[b] * G_at[2]], fade = std::exp(end);
    std::vector<float> weights;
    for (int64_t i : nodes) weights.push_back(std::exp(end - G[i * G_at[2]]));
    for (int64_t d = 0; d < a.K; d++) {
        float* row = state + ((b * a.H + h) * a.K + d) * a.V;
        for (int64_t e = 0; e < a.V; e++) row[e] *= fade;
        for (size_t i = 0; i < nodes.size(); i++)
            add_scaled(row, weights[i] * k[nodes[i] * k_at[2] + d], u + nodes[i] * u_at[2], a.V);
    }
}
