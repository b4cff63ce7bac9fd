// A few rows times weights as nn.Linear keeps them: y[m, n] = sum over k of x[m, k] w[n, k], plus b[n].
//
// The threads share the rows of a weight, and each row is read from memory once. A block of COLUMNS rows of w and up to
// MOST rows of x, or of NARROW and up to TALL, is summed in registers, in LANES partial sums over k. So a row of y does
// not depend on how many rows there are.

#pragma once

#include "vectors.h"

extern "C" int omp_get_thread_num();
extern "C" int omp_get_num_threads();

constexpr int64_t ALONE = 1 << 16;  // multiplications up to which a second thread costs more than it saves
template <int C> constexpr int HEIGHT = C == NARROW ? TALL : MOST;  // rows of x in a block

// M rows of x by C rows of w. Of the C rows of w that come next, those from FIRST to LAST are prefetched into the second
// cache: the buffers through which the first one is filled are too few for what is computed and for what comes next.
template <int M, int C, int FIRST, int LAST, class T>
static inline void block(const T* x, const T* w, const T* b, T* y, int64_t K, int64_t N) {
    Vector sums[M * C];
    #pragma GCC unroll 32
    for (int i = 0; i < M * C; i++) sums[i] = Vector{};
    int64_t k = 0;
    for (; k + STEP<T> <= K; k += STEP<T>) {
        decltype(load(w)) v[C];
        #pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
            v[c] = load(w + c * K + k);
            if (c >= FIRST && c < LAST) __builtin_prefetch(w + (c + C) * K + k, 0, 2);
        }
        #pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            auto u = load(x + m * K + k);
            #pragma GCC unroll 4
            for (int c = 0; c < C; c++) sums[m * C + c] = add(sums[m * C + c], u, v[c]);
        }
    }
    float total[(M * C + LANES - 1) / LANES * LANES];
    totals<M * C>(sums, total);
    for (; k < K; k++)
        for (int i = 0; i < M * C; i++) total[i] = add(total[i], number(x[i / C * K + k]), number(w[i % C * K + k]));
    if (b)
        for (int i = 0; i < M * C; i++) total[i] += number(b[i % C]);
    #pragma GCC unroll 8
    for (int m = 0; m < M; m++)
        for (int c = 0; c < C; c++) store(y + m * N + c, total[m * C + c]);
}

template <int C, int FIRST, int LAST, class T>
static inline void rows(int64_t M, const T* x, const T* w, const T* b, T* y, int64_t K, int64_t N) {
    switch (M) {
        case 1: return block<1, C, FIRST, LAST>(x, w, b, y, K, N);
        case 2: return block<2, C, FIRST, LAST>(x, w, b, y, K, N);
        case 3: return block<3, C, FIRST, LAST>(x, w, b, y, K, N);
        case 4: return block<4, C, FIRST, LAST>(x, w, b, y, K, N);
        case 5: if constexpr (HEIGHT<C> >= 5) return block<5, C, FIRST, LAST>(x, w, b, y, K, N);
        case 6: if constexpr (HEIGHT<C> >= 6) return block<6, C, FIRST, LAST>(x, w, b, y, K, N);
        case 7: if constexpr (HEIGHT<C> >= 7) return block<7, C, FIRST, LAST>(x, w, b, y, K, N);
        case 8: if constexpr (HEIGHT<C> >= 8) return block<8, C, FIRST, LAST>(x, w, b, y, K, N);
        case 9: if constexpr (HEIGHT<C> >= 9) return block<9, C, FIRST, LAST>(x, w, b, y, K, N);
    }
}

template <int C>
static inline int64_t passes(int64_t M) { return (M + HEIGHT<C> - 1) / HEIGHT<C>; }

// All M rows of x, in blocks of about the same size, by C rows of w; the first two blocks share the prefetching.
template <int C, class T>
static inline void blocks(const T* x, const T* w, const T* b, T* y, int64_t M, int64_t K, int64_t N) {
    int64_t count = passes<C>(M);
    for (int64_t i = 0; i < count; i++) {
        int64_t m = M / count + (i < M % count);
        if (count == 1)
            rows<C, 0, C>(m, x, w, b, y, K, N);
        else if (i == 0)
            rows<C, 0, C / 2>(m, x, w, b, y, K, N);
        else if (i == 1)
            rows<C, C / 2, C>(m, x, w, b, y, K, N);
        else
            rows<C, 0, 0>(m, x, w, b, y, K, N);
        x += m * K;
        y += m * N;
    }
}

// This thread's rows of w, C at a time.
template <int C, class T>
static inline void share(const T* x, const T* w, const T* b, T* y, int64_t M, int64_t K, int64_t N) {
    int64_t threads = omp_get_num_threads(), me = omp_get_thread_num();
    int64_t groups = N / C, end = groups * (me + 1) / threads * C;
    for (int64_t n = groups * me / threads * C; n < end; n += C)
        blocks<C>(x, w + n * K, b ? b + n : nullptr, y + n, M, K, N);
    if (me == threads - 1)
        for (int64_t n = groups * C; n < N; n++) blocks<1>(x, w + n * K, b ? b + n : nullptr, y + n, M, K, N);
}

template <class T>
static void multiply(const T* x, const T* const* w, const T* const* b, T* const* y, const int64_t* N, int64_t count,
                     int64_t M, int64_t K, bool alone) {
    #pragma omp parallel if (!alone)
    for (int64_t i = 0; i < count; i++)
        if (passes<NARROW>(M) < passes<COLUMNS>(M))
            share<NARROW>(x, w[i], b[i], y[i], M, K, N[i]);
        else
            share<COLUMNS>(x, w[i], b[i], y[i], M, K, N[i]);
}
