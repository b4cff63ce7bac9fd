// Attention of a few queries to cached keys and values. The heads of a group are stacked as queries of one head. Keys are
// turned, WIDTH of them at a time, if there are enough queries to pay for it, so that the lanes of a vector are keys.

#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "products.h"

typedef int32_t Integers __attribute__((vector_size(4 * LANES)));

static inline Vector exponential(Vector x) {  // of x <= 0, by a polynomial of Cephes (S. Moshier); 0 below -87
    const Vector magic = Vector{} + 12582912.0f;  // adding 1.5 * 2^23 rounds to a whole number
    Vector shifted = x * 1.44269504f + magic, n = shifted - magic;
    Vector r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Vector y = Vector{} + 1.9875691500e-4f;
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        y = y * r + c;
    y = y * r * r + r + 1.0f;
    Integers exponent = ((Integers)shifted - (Integers)magic + 127) << 23;
    return x < -87.0f ? Vector{} : y * (Vector)exponent;
}

template <int... I>
static inline Vector zipped(Vector a, Vector b, int half, std::integer_sequence<int, I...>) {
    return half ? __builtin_shufflevector(a, b, (LANES / 2 + I / 2 + I % 2 * LANES)...)
                : __builtin_shufflevector(a, b, (I / 2 + I % 2 * LANES)...);
}

static inline void transpose(Vector* square) {  // LANES vectors, by perfect shuffles
    #pragma GCC unroll 4
    for (int step = 1; step < LANES; step *= 2) {
        Vector next[LANES];
        #pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            next[i] = zipped(square[i / 2], square[i / 2 + LANES / 2], i % 2, std::make_integer_sequence<int, LANES>());
        #pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) square[i] = next[i];
    }
}

constexpr int WIDTH = COLUMNS * LANES;

// M rows of a [M, K] times V vectors of each row of b [K, ...], summed in registers.
template <int M, int V, class T>
static inline void outer(const float* a, int64_t a_row, const T* b, int64_t b_row, int64_t K, Vector* sums) {
    #pragma GCC unroll 32
    for (int i = 0; i < M * V; i++) sums[i] = Vector{};
    for (int64_t k = 0; k < K; k++) {
        Vector v[V];
        #pragma GCC unroll 4
        for (int i = 0; i < V; i++) v[i] = wide(b + k * b_row + i * LANES);
        #pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            Vector u = Vector{} + a[m * a_row + k];
            #pragma GCC unroll 4
            for (int i = 0; i < V; i++) sums[m * V + i] += u * v[i];
        }
    }
}

// Scores of up to M rows of queries [rows, D] for WIDTH keys that are turned: [D, WIDTH].
template <int M>
static inline void score(int64_t rows, const float* queries, const float* turned, float* scores, int64_t D,
                         int64_t stride) {
    if constexpr (M > 1)
        if (rows < M) return score<M - 1>(rows, queries, turned, scores, D, stride);
    Vector sums[M * COLUMNS];
    outer<M, COLUMNS>(queries, D, turned, WIDTH, D, sums);
    #pragma GCC unroll 8
    for (int m = 0; m < M; m++)
        #pragma GCC unroll 4
        for (int i = 0; i < COLUMNS; i++) *(Floats*)(scores + m * stride + i * LANES) = sums[m * COLUMNS + i];
}

// A row of scores [T], with room up to a multiple of LANES, becomes weights that are yet to be divided by their sum,
// which is returned; the room gets zeros. `mask`: what is added to the scores, or whether they are seen; null: all are.
template <class Mask>
static float weigh(float* scores, int64_t T, const Mask* mask) {
    int64_t end = (T + LANES - 1) / LANES * LANES;
    if (mask)
        for (int64_t t = 0; t < T; t++) {
            if constexpr (sizeof(Mask) == 1)
                scores[t] = mask[t] ? scores[t] : -INFINITY;
            else
                scores[t] += number(mask[t]);
        }
    std::fill(scores + T, scores + end, -INFINITY);
    Vector tops = load(scores);
    for (int64_t t = LANES; t < end; t += LANES) {
        Vector score = load(scores + t);
        tops = score > tops ? score : tops;
    }
    float top = tops[0];
    for (int i = 1; i < LANES; i++) top = tops[i] > top ? tops[i] : top;
    top = top == -INFINITY ? 0.0f : top;  // no key is seen: the weights are zero
    Vector sum = {};
    for (int64_t t = 0; t < end; t += LANES) {
        Vector weight = exponential(load(scores + t) - top);
        *(Floats*)(scores + t) = weight;
        sum += weight;
    }
    float lanes[LANES];
    totals<1>(&sum, lanes);
    return lanes[0];
}

// V vectors of M rows of the result: weights [M, T] times values [T, E], divided by the sums.
template <int M, int V, class Number>
static inline void mix(const float* weights, int64_t stride, const Number* values, int64_t T, int64_t E,
                       const float* sums, Number* const* out) {
    Vector results[M * V];
    outer<M, V>(weights, stride, values, E, T, results);
    #pragma GCC unroll 8
    for (int m = 0; m < M; m++)
        #pragma GCC unroll 4
        for (int i = 0; i < V; i++) put(out[m] + i * LANES, results[m * V + i] / sums[m]);
}

template <int M, class Number>
static inline void mixed(int64_t rows, const float* weights, int64_t stride, const Number* values, int64_t T, int64_t E,
                         const float* sums, Number** out) {
    if constexpr (M > 1)
        if (rows < M) return mixed<M - 1>(rows, weights, stride, values, T, E, sums, out);
    int64_t e = 0;
    for (; e + COLUMNS * LANES <= E; e += COLUMNS * LANES) {
        mix<M, COLUMNS>(weights, stride, values + e, T, E, sums, out);
        for (int m = 0; m < M; m++) out[m] += COLUMNS * LANES;
    }
    for (; e < E; e += LANES) {
        mix<M, 1>(weights, stride, values + e, T, E, sums, out);
        for (int m = 0; m < M; m++) out[m] += LANES;
    }
}

template <class Number>
struct Attention {
    int64_t B, heads, groups, n, T, D, E;  // D and E, the widths of keys and values, are multiples of LANES
    const Number *q, *k, *v;               // [B, heads, n, D], [B, groups, T, D], [B, groups, T, E]
    int64_t q_b, q_h, q_n, k_b, k_g, v_b, v_g, m_b, m_n;  // strides; those of k and v over T are D and E
    float scale;
    Number* y;         // [B, n, heads, E]
    const void* mask;  // of bool, if `seen`, or of numbers that are added; null: all keys are seen
    bool seen;
};

static inline const float* widened(const float* from, int64_t, float*) { return from; }
static inline const float* widened(const bfloat16* from, int64_t count, float* room) {
    for (int64_t i = 0; i < count; i += LANES) put(room + i, wide(from + i));
    return room;
}

// Scores [R, stride] of R queries [R, D], with room for all keys up to a multiple of WIDTH; `room` is for WIDTH keys.
template <class Number>
static void score_all(const float* queries, const Number* keys, float* scores, float* room, int64_t R, int64_t T,
                      int64_t D, int64_t stride) {
    if (R < 8) {  // turning the keys would take longer
        for (int64_t t = 0; t < T; t += t + COLUMNS <= T ? COLUMNS : 1)
            if (t + COLUMNS <= T) {
                const float* some = widened(keys + t * D, COLUMNS * D, room);
                blocks<COLUMNS>(queries, some, (float*)nullptr, scores + t, R, D, stride);
            } else
                blocks<1>(queries, widened(keys + t * D, D, room), (float*)nullptr, scores + t, R, D, stride);
        return;
    }
    for (int64_t t = 0; t < T; t += WIDTH) {
        for (int i = 0; i < COLUMNS; i++)
            for (int64_t d = 0; d < D; d += LANES) {
                Vector square[LANES];
                #pragma GCC unroll 16
                for (int j = 0; j < LANES; j++) {
                    int64_t key = t + i * LANES + j;
                    square[j] = key < T ? wide(keys + key * D + d) : Vector{};
                }
                transpose(square);
                #pragma GCC unroll 16
                for (int j = 0; j < LANES; j++) put(room + (d + j) * WIDTH + i * LANES, square[j]);
            }
        for (int64_t r = 0; r < R; r += MOST)
            score<MOST>(std::min<int64_t>(MOST, R - r), queries + r * D, room, scores + r * stride + t, D, stride);
    }
}

template <class Number>
static void attend(const Attention<Number>& a) {
    int64_t share = a.heads / a.groups, queries = share * a.n, pairs = a.B * a.groups;
    int64_t stride = (a.T + WIDTH - 1) / WIDTH * WIDTH;
    bool alone = a.B * a.heads * a.n * a.T * a.D <= ALONE;
    #pragma omp parallel if (!alone)
    {
        int64_t threads = omp_get_num_threads(), me = omp_get_thread_num();
        int64_t parts = threads / std::gcd(pairs, threads), most = (queries + parts - 1) / parts;
        std::vector<float> scores(most * stride), packed(most * a.D), room(WIDTH * a.D), sums(most);
        std::vector<Number*> out(most);
        for (int64_t task = pairs * parts * me / threads; task < pairs * parts * (me + 1) / threads; task++) {
            int64_t part = task % parts, g = task / parts % a.groups, b = task / parts / a.groups;
            int64_t begin = queries * part / parts, R = queries * (part + 1) / parts - begin;
            const Number *keys = a.k + b * a.k_b + g * a.k_g, *values = a.v + b * a.v_b + g * a.v_g;
            for (int64_t r = 0; r < R; r++) {
                int64_t head = g * share + (begin + r) / a.n, node = (begin + r) % a.n;
                const Number* query = a.q + b * a.q_b + head * a.q_h + node * a.q_n;
                for (int64_t d = 0; d < a.D; d++) packed[r * a.D + d] = number(query[d]) * a.scale;
                out[r] = a.y + ((b * a.n + node) * a.heads + head) * a.E;
            }
            if (R) score_all(packed.data(), keys, scores.data(), room.data(), R, a.T, a.D, stride);
            for (int64_t r = 0; r < R; r++) {
                int64_t at = b * a.m_b + (begin + r) % a.n * a.m_n;
                float sum = a.seen ? weigh(&scores[r * stride], a.T, (const bool*)a.mask + at)
                                   : weigh(&scores[r * stride], a.T, a.mask ? (const Number*)a.mask + at : nullptr);
                sums[r] = sum == 0.0f ? 1.0f : sum;
            }
            for (int64_t r = 0; r < R; r += MOST)
                mixed<MOST>(std::min<int64_t>(MOST, R - r), &scores[r * stride], stride, values, a.T, a.E, &sums[r],
                            &out[r]);
        }
    }
}
