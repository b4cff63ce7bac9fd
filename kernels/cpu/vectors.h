// Vectors of float32 in the widest registers that this CPU has, and how bfloat16 is read into them.

#pragma once

#include <cstdint>
#include <cstring>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16, COLUMNS = 4, MOST = 6, NARROW = 3, TALL = 9;  // 24 or 27 of 32 registers hold sums
#elif defined(__AVX2__)
constexpr int LANES = 8, COLUMNS = 2, MOST = 4, NARROW = 2, TALL = 4;  // 8 of 16
#else
constexpr int LANES = 4, COLUMNS = 2, MOST = 4, NARROW = 2, TALL = 4;
#endif

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));

struct bfloat16 {
    uint16_t bits;
};

static inline float number(float value) { return value; }
static inline float number(bfloat16 value) {
    uint32_t bits = (uint32_t)value.bits << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}
static inline float add(float sum, float a, float b) {
#if defined(__FMA__)
    return __builtin_fmaf(a, b, sum);  // whether the compiler would fuse them may depend on the number of rows
#else
    return sum + a * b;
#endif
}
static inline void store(float* to, float value) { *to = value; }
static inline void store(bfloat16* to, float value) {  // to the nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &value, 4);
    to->bits = value != value ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// LANES numbers, in float32.
static inline Vector wide(const float* from) { return *(const Floats*)from; }
static inline Vector wide(const bfloat16* from) {
    return (Vector)(__builtin_convertvector(*(const Halves*)from, Words) << 16);
}
static inline void put(float* to, Vector value) { *(Floats*)to = value; }
static __attribute__((noinline)) void put(bfloat16* to, Vector value) {
    float lanes[LANES];
    put(lanes, value);
    for (int i = 0; i < LANES; i++) store(to + i, lanes[i]);
}

// What is loaded at a time: STEP numbers of a row, and how two of these are multiplied into a sum.
static inline Vector load(const float* from) { return wide(from); }
static inline Vector add(Vector sum, Vector a, Vector b) { return sum + a * b; }
#if defined(__AVX512BF16__)
static inline __m512bh load(const bfloat16* from) { return (__m512bh)_mm512_loadu_si512(from); }
static inline Vector add(Vector sum, __m512bh a, __m512bh b) { return (Vector)_mm512_dpbf16_ps((__m512)sum, a, b); }
constexpr int BFLOAT16_STEP = 32;
#else
static inline Vector load(const bfloat16* from) { return wide(from); }
constexpr int BFLOAT16_STEP = LANES;
#endif
template <class T> constexpr int STEP = LANES;
template <> constexpr int STEP<bfloat16> = BFLOAT16_STEP;

static inline Vector halved(Vector a, Vector b) {  // neighbours of a, and behind them those of b, added
#if defined(__AVX512F__)
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#elif defined(__AVX2__)
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14) +
           __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
#else
    return __builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7);
#endif
}

template <int COUNT>
static inline void totals(const Vector* sums, float* to) {  // the lanes of each vector, added
    Vector t[LANES];
    #pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) t[i] = i < COUNT ? sums[i] : Vector{};
    #pragma GCC unroll 4
    for (int half = LANES / 2; half; half /= 2)
        #pragma GCC unroll 8
        for (int i = 0; i < half; i++) t[i] = halved(t[2 * i], t[2 * i + 1]);
    *(Floats*)to = t[0];
    if constexpr (COUNT > LANES) totals<COUNT - LANES>(sums + LANES, to + LANES);
}
