// A few rows times weights as nn.Linear keeps them: y[m, n] = sum over k of x[m, k] w[n, k], plus b[n].
//
// The threads share the rows of a weight, and each row is read from memory once. A block of COLUMNS rows of w and up to
// MOST rows of x is summed in registers, in LANES partial sums over k. So a row of y does not depend on how many rows
// there are.

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include <torch/csrc/stable/c/shim.h>
#include <torch/headeronly/version.h>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16, COLUMNS = 4, MOST = 6;  // 24 of 32 registers hold sums
#elif defined(__AVX2__)
constexpr int LANES = 8, COLUMNS = 2, MOST = 4;  // 8 of 16
#else
constexpr int LANES = 4, COLUMNS = 2, MOST = 4;
#endif
constexpr int64_t ALONE = 1 << 16;  // multiplications up to which a second thread costs more than it saves

extern "C" int omp_get_thread_num();
extern "C" int omp_get_num_threads();

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4)));

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

// What is loaded at a time: STEP numbers of a row, and how two of these are multiplied into a sum.
static inline Vector load(const float* from) { return *(const Floats*)from; }
static inline Vector add(Vector sum, Vector a, Vector b) { return sum + a * b; }
#if defined(__AVX512BF16__)
static inline __m512bh load(const bfloat16* from) { return (__m512bh)_mm512_loadu_si512(from); }
static inline Vector add(Vector sum, __m512bh a, __m512bh b) { return (Vector)_mm512_dpbf16_ps((__m512)sum, a, b); }
constexpr int BFLOAT16_STEP = 32;
#else
typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
static inline Vector load(const bfloat16* from) {
    return (Vector)(__builtin_convertvector(*(const Halves*)from, Words) << 16);
}
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

// M rows of x by C rows of w. Of the C rows of w that come next, those from FIRST to LAST are prefetched.
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
            if (c >= FIRST && c < LAST) __builtin_prefetch(w + (c + C) * K + k);
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
        case 5: if constexpr (MOST >= 5) return block<5, C, FIRST, LAST>(x, w, b, y, K, N);
        case 6: if constexpr (MOST >= 6) return block<6, C, FIRST, LAST>(x, w, b, y, K, N);
    }
}

// All M rows of x, in blocks of about the same size, by C rows of w; the first two blocks share the prefetching.
template <int C, class T>
static inline void blocks(const T* x, const T* w, const T* b, T* y, int64_t M, int64_t K, int64_t N) {
    int64_t count = (M + MOST - 1) / MOST;
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

template <class T>
static void multiply(const T* x, const T* const* w, const T* const* b, T* const* y, const int64_t* N, int64_t count,
                     int64_t M, int64_t K, bool alone) {
    #pragma omp parallel if (!alone)
    {
        int64_t threads = omp_get_num_threads(), me = omp_get_thread_num();
        for (int64_t i = 0; i < count; i++) {
            int64_t groups = N[i] / COLUMNS, end = groups * (me + 1) / threads * COLUMNS;
            const T* bias = b[i];
            for (int64_t n = groups * me / threads * COLUMNS; n < end; n += COLUMNS)
                blocks<COLUMNS>(x, w[i] + n * K, bias ? bias + n : nullptr, y[i] + n, M, K, N[i]);
            if (me == threads - 1)
                for (int64_t n = groups * COLUMNS; n < N[i]; n++)
                    blocks<1>(x, w[i] + n * K, bias ? bias + n : nullptr, y[i] + n, M, K, N[i]);
        }
    }
}

// -- as operations of torch, by its stable C interface ------------------------------------------------------------------

static void succeed(AOTITorchError error) {
    if (error) throw std::runtime_error("torch refused a call of few_rows.cpp");
}

struct Tensor {  // owns a handle
    AtenTensorHandle handle;
    explicit Tensor(StableIValue value) : handle((AtenTensorHandle)value) {}
    Tensor(Tensor&& other) : handle(other.handle) { other.handle = nullptr; }
    ~Tensor() {
        if (handle) aoti_torch_delete_tensor_object(handle);
    }
    StableIValue release() {
        StableIValue value = (StableIValue)handle;
        handle = nullptr;
        return value;
    }
    void* data() const {
        void* pointer;
        succeed(aoti_torch_get_data_ptr(handle, &pointer));
        return pointer;
    }
    int32_t dtype() const {
        int32_t value;
        succeed(aoti_torch_get_dtype(handle, &value));
        return value;
    }
    std::vector<int64_t> sizes() const {
        int64_t dim, *first;
        succeed(aoti_torch_get_dim(handle, &dim));
        succeed(aoti_torch_get_sizes(handle, &first));
        return {first, first + dim};
    }
    bool contiguous() const {
        bool is;
        succeed(aoti_torch_is_contiguous(handle, &is));
        return is;
    }
};

static Tensor contiguous(Tensor x) {
    if (x.contiguous()) return x;
    StableIValue stack[] = {x.release(), (StableIValue)aoti_torch_memory_format_contiguous_format()};
    succeed(torch_call_dispatcher("aten::contiguous", "", stack, TORCH_ABI_VERSION));
    return Tensor(stack[0]);
}

static Tensor empty(const std::vector<int64_t>& sizes, int32_t dtype) {
    std::vector<int64_t> strides(sizes.size(), 1);
    for (size_t i = sizes.size() - 1; i-- > 0;) strides[i] = strides[i + 1] * sizes[i + 1];
    AtenTensorHandle handle;
    succeed(aoti_torch_empty_strided(sizes.size(), sizes.data(), strides.data(), dtype, aoti_torch_device_type_cpu(),
                                     0, &handle));
    return Tensor((StableIValue)handle);
}

template <class T>
static std::vector<Tensor> products(const Tensor& x, const std::vector<Tensor>& weights, const Tensor* bias) {
    std::vector<int64_t> sizes = x.sizes(), N;
    int64_t K = sizes.back(), M = 1, all = 0;
    for (size_t i = 0; i + 1 < sizes.size(); i++) M *= sizes[i];
    std::vector<const T*> w, b;
    std::vector<T*> y;
    std::vector<Tensor> results;
    for (const Tensor& weight : weights) {
        std::vector<int64_t> size = weight.sizes();
        if (size.size() != 2 || size[1] != K || weight.dtype() != x.dtype() || !weight.contiguous())
            throw std::runtime_error("few rows: a weight must be contiguous [N, K] with the dtype of x [..., K]");
        sizes.back() = size[0];
        results.push_back(empty(sizes, x.dtype()));
        N.push_back(size[0]), all += size[0];
        w.push_back((const T*)weight.data()), y.push_back((T*)results.back().data());
        b.push_back(bias ? (const T*)bias->data() : nullptr);
    }
    if (bias && (bias->sizes() != N || bias->dtype() != x.dtype() || !bias->contiguous()))
        throw std::runtime_error("few rows: a bias must be contiguous [N] with the dtype of x");
    multiply<T>((const T*)x.data(), w.data(), b.data(), y.data(), N.data(), w.size(), M, K, M * K * all <= ALONE);
    return results;
}

static std::vector<Tensor> products(const Tensor& x, const std::vector<Tensor>& weights, const Tensor* bias) {
    if (x.dtype() == aoti_torch_dtype_float32()) return products<float>(x, weights, bias);
    if (x.dtype() == aoti_torch_dtype_bfloat16()) return products<bfloat16>(x, weights, bias);
    throw std::runtime_error("few rows: the dtype must be float32 or bfloat16");
}

// linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor
static void linear(StableIValue* stack, uint64_t, uint64_t) {
    std::vector<Tensor> weights;
    Tensor x = contiguous(Tensor(stack[0]));
    weights.emplace_back(stack[1]);
    StableIValue* given = (StableIValue*)stack[2];
    Tensor bias(given ? *given : 0);
    delete given;
    stack[0] = products(x, weights, given ? &bias : nullptr)[0].release();
}

// products(Tensor x, Tensor[] weights) -> Tensor[]
static void products(StableIValue* stack, uint64_t, uint64_t) {
    std::vector<Tensor> weights;
    Tensor x = contiguous(Tensor(stack[0]));
    StableListHandle given = (StableListHandle)stack[1], results;
    size_t count;
    succeed(torch_list_size(given, &count));
    for (size_t i = 0; i < count; i++) {
        StableIValue weight;
        succeed(torch_list_get_item(given, i, &weight));
        weights.emplace_back(weight);
    }
    succeed(torch_delete_list(given));
    succeed(torch_new_list_reserve_size(count, &results));
    for (Tensor& result : products(x, weights, nullptr)) succeed(torch_list_push_back(results, result.release()));
    stack[0] = (StableIValue)results;
}

// Defines both operations in a namespace that has none of these names; false if torch refuses.
extern "C" bool mmspec_define(const char* space) {
    TorchLibraryHandle names, functions;
    return !aoti_torch_library_init_fragment(space, __FILE__, __LINE__, &names) &&
           !aoti_torch_library_def(names, "linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor") &&
           !aoti_torch_library_def(names, "products(Tensor x, Tensor[] weights) -> Tensor[]") &&
           !aoti_torch_library_init_impl(space, "CPU", __FILE__, __LINE__, &functions) &&
           !torch_library_impl(functions, "linear", linear, TORCH_ABI_VERSION) &&
           !torch_library_impl(functions, "products", products, TORCH_ABI_VERSION);
}
