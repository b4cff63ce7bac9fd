// What this folder computes as operations of torch, by its stable C interface.

#include <stdexcept>
#include <vector>

#include <torch/csrc/stable/c/shim.h>
#include <torch/headeronly/version.h>

#include "attention.h"
#include "products.h"
#include "recurrent.h"

static void succeed(AOTITorchError error) {
    if (error) throw std::runtime_error("torch refused a call of kernels/cpu");
}

struct Tensor {  // owns a handle
    AtenTensorHandle handle;
    explicit Tensor(StableIValue value) : handle((AtenTensorHandle)value) {}
    Tensor(Tensor&& other) : handle(other.handle) { other.handle = nullptr; }
    Tensor& operator=(Tensor&& other) {
        std::swap(handle, other.handle);
        return *this;
    }
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
    const int64_t* strides() const {
        int64_t* first;
        succeed(aoti_torch_get_strides(handle, &first));
        return first;
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

static Tensor with_rows(Tensor x) {  // a copy, unless the elements of the last dimension are adjacent
    size_t dim = x.sizes().size();
    return dim && x.strides()[dim - 1] == 1 ? std::move(x) : contiguous(std::move(x));
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

static Tensor optional(StableIValue value) {  // without a handle if there is none
    StableIValue* given = (StableIValue*)value;
    Tensor tensor(given ? *given : 0);
    delete given;
    return tensor;
}

// linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor
static void linear(StableIValue* stack, uint64_t, uint64_t) {
    std::vector<Tensor> weights;
    Tensor x = contiguous(Tensor(stack[0]));
    weights.emplace_back(stack[1]);
    Tensor bias = optional(stack[2]);
    stack[0] = products(x, weights, bias.handle ? &bias : nullptr)[0].release();
}

static bool fits(const Tensor& t, const std::vector<int64_t>& size) {
    return t.dtype() == aoti_torch_dtype_float32() && t.sizes() == size;
}

static std::vector<Tensor> list(StableIValue value) {
    StableListHandle given = (StableListHandle)value;
    std::vector<Tensor> tensors;
    size_t count;
    succeed(torch_list_size(given, &count));
    for (size_t i = 0; i < count; i++) {
        StableIValue tensor;
        succeed(torch_list_get_item(given, i, &tensor));
        tensors.emplace_back(tensor);
    }
    succeed(torch_delete_list(given));
    return tensors;
}

// products(Tensor x, Tensor[] weights) -> Tensor[]
static void products(StableIValue* stack, uint64_t, uint64_t) {
    Tensor x = contiguous(Tensor(stack[0]));
    std::vector<Tensor> weights = list(stack[1]);
    StableListHandle results;
    succeed(torch_new_list_reserve_size(weights.size(), &results));
    for (Tensor& result : products(x, weights, nullptr)) succeed(torch_list_push_back(results, result.release()));
    stack[0] = (StableIValue)results;
}

// attend(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale) -> Tensor
static void attend(StableIValue* stack, uint64_t, uint64_t) {
    Tensor q(stack[0]), k(stack[1]), v(stack[2]), mask = optional(stack[3]);
    double scale;
    memcpy(&scale, &stack[4], sizeof scale);
    auto qs = q.sizes(), ks = k.sizes(), vs = v.sizes();
    auto dtype = q.dtype();
    auto fits = [dtype](const Tensor& t, const std::vector<int64_t>& size) {
        return t.dtype() == dtype && size.size() == 4 && size[3] % LANES == 0;
    };
    bool narrow = dtype == aoti_torch_dtype_bfloat16();
    if ((!narrow && dtype != aoti_torch_dtype_float32()) || !fits(q, qs) || !fits(k, ks) || !fits(v, vs) ||
        qs[1] % ks[1] || ks[0] != qs[0] || ks[3] != qs[3] || vs[0] != ks[0] || vs[1] != ks[1] || vs[2] != ks[2])
        throw std::runtime_error("few queries: q [B, heads, n, D], k [B, groups, T, D] and v [B, groups, T, E] must all "
                                 "be float32 or bfloat16, and D and E multiples of the CPU's vectors");
    const int64_t *q_at = q.strides(), *k_at = k.strides(), *v_at = v.strides(), *m_at = nullptr;
    if (q_at[3] != 1 || k_at[3] != 1 || v_at[3] != 1 || k_at[2] != ks[3] || v_at[2] != vs[3])
        throw std::runtime_error("few queries: rows of q, k and v must be contiguous, and those of k and v adjacent");
    bool seen = false;
    if (mask.handle) {
        auto ms = mask.sizes();
        m_at = mask.strides();
        seen = mask.dtype() == aoti_torch_dtype_bool();
        bool known = seen || mask.dtype() == dtype;
        if (!known || ms.size() != 4 || (ms[0] != 1 && ms[0] != qs[0]) || ms[1] != 1 || ms[2] != qs[2] ||
            ms[3] != ks[2] || m_at[3] != 1)
            throw std::runtime_error("few queries: the mask must be bool, or of the dtype of q, [B or 1, 1, n, T]");
        if (ms[0] == 1) m_at = nullptr;
    }
    Tensor y = empty({qs[0], qs[2], qs[1], vs[3]}, dtype);
    auto run = [&](auto zero) {
        using Number = decltype(zero);
        Attention<Number> a = {qs[0], qs[1], ks[1], qs[2], ks[2], qs[3], vs[3], (const Number*)q.data(),
                               (const Number*)k.data(), (const Number*)v.data(), q_at[0], q_at[1], q_at[2], k_at[0],
                               k_at[1], v_at[0], v_at[1], m_at ? m_at[0] : 0, mask.handle ? mask.strides()[2] : 0,
                               (float)scale, (Number*)y.data(), mask.handle ? mask.data() : nullptr, seen};
        attend(a);
    };
    narrow ? run(bfloat16{}) : run(0.0f);
    stack[0] = y.release();
}

struct Heads {  // the arguments of a recurrent layer
    Tensor q, k, v, beta, g;
    int64_t B, H, n, K, V;
    explicit Heads(StableIValue* stack)
        : q(with_rows(Tensor(stack[0]))), k(with_rows(Tensor(stack[1]))), v(with_rows(Tensor(stack[2]))),
          beta(optional(stack[3])), g(stack[4]) {
        auto size = q.sizes(), last = v.sizes();
        if (size.size() != 4 || last.size() != 4) throw std::runtime_error("scan: q and v must have four dimensions");
        B = size[0], H = size[1], n = size[2], K = size[3], V = last[3];
        if (!fits(q, size) || !fits(k, size) || !fits(v, {B, H, n, V}) || !fits(g, {B, H, n}) ||
            (beta.handle && !fits(beta, {B, H, n})))
            throw std::runtime_error("scan: q and k [B, H, n, K], v [B, H, n, V], beta and g [B, H, n] must be float32");
    }
    // Of head h of row b, with o [B, n, H, V], and u and G of this head.
    Nodes nodes(int64_t b, int64_t h, float* o, float* u, float* G) const {
        auto at = [&](const Tensor& t) {
            const int64_t* stride = t.strides();
            return std::pair{(const float*)t.data() + b * stride[0] + h * stride[1], stride[2]};
        };
        auto [q_, q_at] = at(q);
        auto [k_, k_at] = at(k);
        auto [v_, v_at] = at(v);
        auto [g_, g_at] = at(g);
        auto [beta_, beta_at] = beta.handle ? at(beta) : std::pair<const float*, int64_t>{nullptr, 0};
        return {n, K, V, q_, k_, v_, beta_, g_, q_at, k_at, v_at, beta_at, g_at, nullptr, o + (b * n * H + h) * V, u, G,
                H * V};
    }
};

// scan(Tensor q, Tensor k, Tensor v, Tensor? beta, Tensor g, Tensor state, Tensor ancestors)
//     -> (Tensor o, Tensor u, Tensor G)
static void scan(StableIValue* stack, uint64_t, uint64_t) {
    Tensor state(stack[5]), ancestors = contiguous(Tensor(stack[6]));  // before anything is refused, so that it is freed
    Heads a(stack);
    const int64_t* at = state.strides();
    bool adjacent = (at[3] == 1 && at[2] == a.V && a.V % LANES == 0) || (at[2] == 1 && at[3] == a.K);
    if (!fits(state, {a.B, a.H, a.K, a.V}) || !adjacent || a.K == 1 || ancestors.dtype() != aoti_torch_dtype_bool() ||
        ancestors.sizes() != std::vector<int64_t>{a.B, a.n, a.n})
        throw std::runtime_error("scan: the state must be float32 [B, H, K, V] with adjacent rows or columns, and "
                                 "ancestors bool [B, n, n]");
    Tensor o = empty({a.B, a.n, a.H, a.V}, a.q.dtype()), u = empty({a.B, a.H, a.n, a.V}, a.q.dtype());
    Tensor G = empty({a.B, a.H, a.n}, a.q.dtype());
    auto *out = (float*)o.data(), *writes = (float*)u.data(), *decay = (float*)G.data();
    const auto* before = (const float*)state.data();
    const auto* seen = (const bool*)ancestors.data();
    #pragma omp parallel if (a.B * a.H * 2 * a.n * a.K * a.V > ALONE)
    {
        Room room(a.n, a.K, a.V);
        #pragma omp for collapse(2)
        for (int64_t b = 0; b < a.B; b++)
            for (int64_t h = 0; h < a.H; h++) {
                int64_t head = b * a.H + h;
                Nodes nodes = a.nodes(b, h, out, writes + head * a.n * a.V, decay + head * a.n);
                nodes.ancestors = seen + b * a.n * a.n;
                read(nodes, before + b * at[0] + h * at[1], at[3] == 1 && at[2] == a.V ? 1 : a.K, room);
            }
    }
    stack[0] = o.release(), stack[1] = u.release(), stack[2] = G.release();
}

// chain(Tensor q, Tensor k, Tensor v, Tensor? beta, Tensor g, Tensor? state) -> (Tensor o, Tensor state)
static void chain(StableIValue* stack, uint64_t, uint64_t) {
    Tensor given = optional(stack[5]);
    Heads a(stack);
    if ((given.handle && (!fits(given, {a.B, a.H, a.K, a.V}) || !given.contiguous())) || a.V % LANES)
        throw std::runtime_error("chain: the state must be contiguous float32 [B, H, K, V], V a multiple of the CPU's "
                                 "vectors");
    Tensor o = empty({a.B, a.n, a.H, a.V}, a.q.dtype()), state = empty({a.B, a.H, a.K, a.V}, a.q.dtype());
    auto *out = (float*)o.data(), *after = (float*)state.data();
    const float* before = given.handle ? (const float*)given.data() : nullptr;
    #pragma omp parallel if (a.B * a.H * 2 * a.n * a.K * a.V > ALONE)
    {
        Room room(CHUNK, a.K, a.V);
        std::vector<float> u(CHUNK * a.V), G(CHUNK);
        #pragma omp for collapse(2)
        for (int64_t b = 0; b < a.B; b++)
            for (int64_t h = 0; h < a.H; h++) {
                float* own = after + (b * a.H + h) * a.K * a.V;
                if (before)
                    std::copy_n(before + (own - after), a.K * a.V, own);
                else
                    std::fill_n(own, a.K * a.V, 0.0f);
                read_chain(a.nodes(b, h, out, u.data(), G.data()), own, room);
            }
    }
    stack[0] = o.release(), stack[1] = state.release();
}

// fold(Tensor(a!)[] states, Tensor[] k, Tensor[] u, Tensor[] G, Tensor path, Tensor last) -> ()
static void fold(StableIValue* stack, uint64_t, uint64_t) {
    std::vector<Tensor> states = list(stack[0]), k = list(stack[1]), u = list(stack[2]), G = list(stack[3]);
    Tensor path = contiguous(Tensor(stack[4])), last = contiguous(Tensor(stack[5]));
    auto size = path.sizes(), shape = states.at(0).sizes();
    if (size.size() != 2 || shape.size() != 4 || k.size() != states.size() || u.size() != states.size() ||
        G.size() != states.size() || path.dtype() != aoti_torch_dtype_bool() ||
        last.dtype() != aoti_torch_dtype_int64() || last.sizes() != std::vector<int64_t>{size[0]})
        throw std::runtime_error("fold: path must be bool [B, n], last int64 [B], and the lists of one length");
    int64_t B = shape[0], H = shape[1], K = shape[2], V = shape[3], n = size[1];
    for (size_t i = 0; i < states.size(); i++) {
        k[i] = with_rows(std::move(k[i])), u[i] = contiguous(std::move(u[i])), G[i] = contiguous(std::move(G[i]));
        if (B != size[0] || !fits(states[i], shape) || !states[i].contiguous() || !fits(k[i], {B, H, n, K}) ||
            !fits(u[i], {B, H, n, V}) || !fits(G[i], {B, H, n}))
            throw std::runtime_error("fold: states [B, H, K, V], k [B, H, n, K], u [B, H, n, V] and G [B, H, n] must be "
                                     "float32, and the states contiguous");
    }
    int64_t heads = B * H, tasks = heads * states.size();
    #pragma omp parallel for if (tasks * K * V > ALONE)
    for (int64_t task = 0; task < tasks; task++) {
        int64_t i = task / heads, head = task % heads, b = head / H;
        const int64_t* at = k[i].strides();
        Nodes a = {};
        a.n = n, a.K = K, a.V = V, a.k_at = at[2];
        a.k = (const float*)k[i].data() + b * at[0] + head % H * at[1];
        a.u = (float*)u[i].data() + head * n * V, a.G = (float*)G[i].data() + head * n;
        fold(a, (const bool*)path.data() + b * n, ((const int64_t*)last.data())[b], (float*)states[i].data() + head * K * V);
    }
}

// Defines all operations in a namespace that has none of these names; false if torch refuses.
extern "C" bool mmspec_define(const char* space) {
    TorchLibraryHandle names, functions;
    return !aoti_torch_library_init_fragment(space, __FILE__, __LINE__, &names) &&
           !aoti_torch_library_def(names, "linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor") &&
           !aoti_torch_library_def(names, "products(Tensor x, Tensor[] weights) -> Tensor[]") &&
           !aoti_torch_library_def(names, "attend(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale) -> Tensor") &&
           !aoti_torch_library_def(names, "scan(Tensor q, Tensor k, Tensor v, Tensor? beta, Tensor g, Tensor state, "
                                          "Tensor ancestors) -> (Tensor, Tensor, Tensor)") &&
           !aoti_torch_library_def(names, "chain(Tensor q, Tensor k, Tensor v, Tensor? beta, Tensor g, Tensor? state) "
                                          "-> (Tensor, Tensor)") &&
           !aoti_torch_library_def(names, "fold(Tensor(a!)[] states, Tensor[] k, Tensor[] u, Tensor[] G, Tensor path, "
                                          "Tensor last) -> ()") &&
           !aoti_torch_library_init_impl(space, "CPU", __FILE__, __LINE__, &functions) &&
           !torch_library_impl(functions, "linear", linear, TORCH_ABI_VERSION) &&
           !torch_library_impl(functions, "products", products, TORCH_ABI_VERSION) &&
           !torch_library_impl(functions, "attend", attend, TORCH_ABI_VERSION) &&
           !torch_library_impl(functions, "scan", scan, TORCH_ABI_VERSION) &&
           !torch_library_impl(functions, "chain", chain, TORCH_ABI_VERSION) &&
           !torch_library_impl(functions, "fold", fold, TORCH_ABI_VERSION);
}
