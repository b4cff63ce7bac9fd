// What this folder computes as operations of torch, by its stable interface for C++.

#include <optional>
#include <stdexcept>
#include <tuple>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "attention.h"
#include "products.h"
#include "recurrent.h"

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Optional = std::optional<Tensor>;
using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;

static Tensor packed(const Tensor& x) { return x.is_contiguous() ? x : torch::stable::contiguous(x); }

static Tensor with_rows(const Tensor& x) {  // a copy, unless the elements of the last dimension are adjacent
    return x.dim() && x.stride(x.dim() - 1) == 1 ? x : packed(x);
}

static Tensor empty(const std::vector<int64_t>& sizes, const Tensor& like) {
    std::vector<int64_t> strides(sizes.size(), 1);
    for (size_t i = sizes.size() - 1; i-- > 0;) strides[i] = strides[i + 1] * sizes[i + 1];
    int32_t dtype;
    AtenTensorHandle handle;
    if (aoti_torch_get_dtype(like.get(), &dtype) ||
        aoti_torch_empty_strided(sizes.size(), sizes.data(), strides.data(), dtype, aoti_torch_device_type_cpu(), 0,
                                 &handle))
        throw std::runtime_error("torch refused a call of kernels/cpu");
    return Tensor(handle);
}

template <class T>
static std::vector<Tensor> products(const Tensor& x, const std::vector<Tensor>& weights, const Optional& bias) {
    std::vector<int64_t> sizes = x.sizes().vec(), N;
    int64_t K = sizes.back(), M = 1, all = 0;
    for (size_t i = 0; i + 1 < sizes.size(); i++) M *= sizes[i];
    std::vector<const T*> w, b;
    std::vector<T*> y;
    std::vector<Tensor> results;
    for (const Tensor& weight : weights) {
        Sizes size = weight.sizes();
        if (size.size() != 2 || size[1] != K || weight.scalar_type() != x.scalar_type() || !weight.is_contiguous())
            throw std::runtime_error("few rows: a weight must be contiguous [N, K] with the dtype of x [..., K]");
        sizes.back() = size[0];
        results.push_back(empty(sizes, x));
        N.push_back(size[0]), all += size[0];
        w.push_back((const T*)weight.data_ptr()), y.push_back((T*)results.back().data_ptr());
        b.push_back(bias ? (const T*)bias->data_ptr() : nullptr);
    }
    if (bias && (!bias->sizes().equals(N) || bias->scalar_type() != x.scalar_type() || !bias->is_contiguous()))
        throw std::runtime_error("few rows: a bias must be contiguous [N] with the dtype of x");
    multiply<T>((const T*)x.data_ptr(), w.data(), b.data(), y.data(), N.data(), w.size(), M, K, M * K * all <= ALONE);
    return results;
}

static std::vector<Tensor> products(const Tensor& x, const std::vector<Tensor>& weights, const Optional& bias) {
    if (x.scalar_type() == ScalarType::Float) return products<float>(x, weights, bias);
    if (x.scalar_type() == ScalarType::BFloat16) return products<bfloat16>(x, weights, bias);
    throw std::runtime_error("few rows: the dtype must be float32 or bfloat16");
}

// linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor
static Tensor linear(const Tensor& x, const Tensor& weight, const Optional& bias) {
    return products(packed(x), {weight}, bias)[0];
}

// products(Tensor x, Tensor[] weights) -> Tensor[]
static std::vector<Tensor> all_products(const Tensor& x, const std::vector<Tensor>& weights) {
    return products(packed(x), weights, std::nullopt);
}

static bool fits(const Tensor& t, Sizes size) {
    return t.scalar_type() == ScalarType::Float && t.sizes().equals(size);
}

// attend(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale) -> Tensor
static Tensor attended(const Tensor& q, const Tensor& k, const Tensor& v, const Optional& mask, double scale) {
    auto qs = q.sizes(), ks = k.sizes(), vs = v.sizes();
    ScalarType dtype = q.scalar_type();
    auto fits = [dtype](const Tensor& t) {
        return t.scalar_type() == dtype && t.dim() == 4 && t.size(3) % LANES == 0;
    };
    bool narrow = dtype == ScalarType::BFloat16;
    if ((!narrow && dtype != ScalarType::Float) || !fits(q) || !fits(k) || !fits(v) || qs[1] % ks[1] ||
        ks[0] != qs[0] || ks[3] != qs[3] || vs[0] != ks[0] || vs[1] != ks[1] || vs[2] != ks[2])
        throw std::runtime_error("few queries: q [B, heads, n, D], k [B, groups, T, D] and v [B, groups, T, E] must all "
                                 "be float32 or bfloat16, and D and E multiples of the CPU's vectors");
    Sizes q_at = q.strides(), k_at = k.strides(), v_at = v.strides();
    int64_t m_row = 0, m_at = 0;
    if (q_at[3] != 1 || k_at[3] != 1 || v_at[3] != 1 || k_at[2] != ks[3] || v_at[2] != vs[3])
        throw std::runtime_error("few queries: rows of q, k and v must be contiguous, and those of k and v adjacent");
    bool seen = false;
    if (mask) {
        auto ms = mask->sizes();
        seen = mask->scalar_type() == ScalarType::Bool;
        bool known = seen || mask->scalar_type() == dtype;
        if (!known || ms.size() != 4 || (ms[0] != 1 && ms[0] != qs[0]) || ms[1] != 1 || ms[2] != qs[2] ||
            ms[3] != ks[2] || mask->stride(3) != 1)
            throw std::runtime_error("few queries: the mask must be bool, or of the dtype of q, [B or 1, 1, n, T]");
        m_row = ms[0] == 1 ? 0 : mask->stride(0), m_at = mask->stride(2);
    }
    Tensor y = empty({qs[0], qs[2], qs[1], vs[3]}, q);
    auto run = [&](auto zero) {
        using Number = decltype(zero);
        attend(Attention<Number>{qs[0], qs[1], ks[1], qs[2], ks[2], qs[3], vs[3], (const Number*)q.data_ptr(),
                                 (const Number*)k.data_ptr(), (const Number*)v.data_ptr(), q_at[0], q_at[1], q_at[2],
                                 k_at[0], k_at[1], v_at[0], v_at[1], m_row, m_at, (float)scale, (Number*)y.data_ptr(),
                                 mask ? mask->data_ptr() : nullptr, seen});
    };
    narrow ? run(bfloat16{}) : run(0.0f);
    return y;
}

namespace {
struct Heads {  // the arguments of a recurrent layer
    Tensor q, k, v, g;
    Optional beta;
    int64_t B, H, n, K, V;
    Heads(const Tensor& q_, const Tensor& k_, const Tensor& v_, const Optional& beta_, const Tensor& g_)
        : q(with_rows(q_)), k(with_rows(k_)), v(with_rows(v_)), g(g_), beta(beta_) {
        auto size = q.sizes(), last = v.sizes();
        if (size.size() != 4 || last.size() != 4) throw std::runtime_error("scan: q and v must have four dimensions");
        B = size[0], H = size[1], n = size[2], K = size[3], V = last[3];
        if (!fits(q, size) || !fits(k, size) || !fits(v, {B, H, n, V}) || !fits(g, {B, H, n}) ||
            (beta && !fits(*beta, {B, H, n})))
            throw std::runtime_error("scan: q and k [B, H, n, K], v [B, H, n, V], beta and g [B, H, n] must be float32");
    }
    // Of head h of row b, with o [B, n, H, V], and u and G of this head.
    Nodes nodes(int64_t b, int64_t h, float* o, float* u, float* G) const {
        auto at = [&](const Tensor& t) {
            Sizes stride = t.strides();
            return std::pair{(const float*)t.data_ptr() + b * stride[0] + h * stride[1], stride[2]};
        };
        auto [q_, q_at] = at(q);
        auto [k_, k_at] = at(k);
        auto [v_, v_at] = at(v);
        auto [g_, g_at] = at(g);
        auto [beta_, beta_at] = beta ? at(*beta) : std::pair<const float*, int64_t>{nullptr, 0};
        return {n, K, V, q_, k_, v_, beta_, g_, q_at, k_at, v_at, beta_at, g_at, nullptr, o + (b * n * H + h) * V, u, G,
                H * V};
    }
};
}  // namespace

// scan(Tensor q, Tensor k, Tensor v, Tensor? beta, Tensor g, Tensor state, Tensor ancestors)
//     -> (Tensor o, Tensor u, Tensor G)
static std::tuple<Tensor, Tensor, Tensor> scan(const Tensor& q, const Tensor& k, const Tensor& v, const Optional& beta,
                                               const Tensor& g, const Tensor& state, const Tensor& tree) {
    Heads a(q, k, v, beta, g);
    Tensor ancestors = packed(tree);
    Sizes at = state.strides();
    bool adjacent = (at[3] == 1 && at[2] == a.V && a.V % LANES == 0) || (at[2] == 1 && at[3] == a.K);
    if (!fits(state, {a.B, a.H, a.K, a.V}) || !adjacent || a.K == 1 || ancestors.scalar_type() != ScalarType::Bool ||
        !ancestors.sizes().equals({a.B, a.n, a.n}))
        throw std::runtime_error("scan: the state must be float32 [B, H, K, V] with adjacent rows or columns, and "
                                 "ancestors bool [B, n, n]");
    Tensor o = empty({a.B, a.n, a.H, a.V}, q), u = empty({a.B, a.H, a.n, a.V}, q), G = empty({a.B, a.H, a.n}, q);
    auto *out = (float*)o.data_ptr(), *writes = (float*)u.data_ptr(), *decay = (float*)G.data_ptr();
    const auto* before = (const float*)state.data_ptr();
    const auto* seen = (const bool*)ancestors.data_ptr();
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
    return {o, u, G};
}

// chain(Tensor q, Tensor k, Tensor v, Tensor? beta, Tensor g, Tensor? state) -> (Tensor o, Tensor state)
static std::tuple<Tensor, Tensor> chain(const Tensor& q, const Tensor& k, const Tensor& v, const Optional& beta,
                                        const Tensor& g, const Optional& given) {
    Heads a(q, k, v, beta, g);
    if ((given && (!fits(*given, {a.B, a.H, a.K, a.V}) || !given->is_contiguous())) || a.V % LANES)
        throw std::runtime_error("chain: the state must be contiguous float32 [B, H, K, V], V a multiple of the CPU's "
                                 "vectors");
    Tensor o = empty({a.B, a.n, a.H, a.V}, q), state = empty({a.B, a.H, a.K, a.V}, q);
    auto *out = (float*)o.data_ptr(), *after = (float*)state.data_ptr();
    const float* before = given ? (const float*)given->data_ptr() : nullptr;
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
    return {o, state};
}

// fold(Tensor(a!)[] states, Tensor[] k, Tensor[] u, Tensor[] G, Tensor path, Tensor last) -> ()
static void folded(const std::vector<Tensor>& states, std::vector<Tensor> k, std::vector<Tensor> u,
                   std::vector<Tensor> G, const Tensor& accepted, const Tensor& ends) {
    Tensor path = packed(accepted), last = packed(ends);
    Sizes size = path.sizes(), shape = states.at(0).sizes();
    if (size.size() != 2 || shape.size() != 4 || k.size() != states.size() || u.size() != states.size() ||
        G.size() != states.size() || path.scalar_type() != ScalarType::Bool ||
        last.scalar_type() != ScalarType::Long || !last.sizes().equals({size[0]}))
        throw std::runtime_error("fold: path must be bool [B, n], last int64 [B], and the lists of one length");
    int64_t B = shape[0], H = shape[1], K = shape[2], V = shape[3], n = size[1];
    for (size_t i = 0; i < states.size(); i++) {
        k[i] = with_rows(k[i]), u[i] = packed(u[i]), G[i] = packed(G[i]);
        if (B != size[0] || !fits(states[i], shape) || !states[i].is_contiguous() || !fits(k[i], {B, H, n, K}) ||
            !fits(u[i], {B, H, n, V}) || !fits(G[i], {B, H, n}))
            throw std::runtime_error("fold: states [B, H, K, V], k [B, H, n, K], u [B, H, n, V] and G [B, H, n] must be "
                                     "float32, and the states contiguous");
    }
    int64_t heads = B * H, tasks = heads * states.size();
    #pragma omp parallel for if (tasks * K * V > ALONE)
    for (int64_t task = 0; task < tasks; task++) {
        int64_t i = task / heads, head = task % heads, b = head / H;
        Sizes at = k[i].strides();
        Nodes a = {};
        a.n = n, a.K = K, a.V = V, a.k_at = at[2];
        a.k = (const float*)k[i].data_ptr() + b * at[0] + head % H * at[1];
        a.u = (float*)u[i].data_ptr() + head * n * V, a.G = (float*)G[i].data_ptr() + head * n;
        fold(a, (const bool*)path.data_ptr() + b * n, ((const int64_t*)last.data_ptr())[b],
             (float*)states[i].data_ptr() + head * K * V);
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
           !torch_library_impl(functions, "linear", TORCH_BOX(&linear), TORCH_ABI_VERSION) &&
           !torch_library_impl(functions, "products", TORCH_BOX(&all_products), TORCH_ABI_VERSION) &&
           !torch_library_impl(functions, "attend", TORCH_BOX(&attended), TORCH_ABI_VERSION) &&
           !torch_library_impl(functions, "scan", TORCH_BOX(&scan), TORCH_ABI_VERSION) &&
           !torch_library_impl(functions, "chain", TORCH_BOX(&chain), TORCH_ABI_VERSION) &&
           !torch_library_impl(functions, "fold", TORCH_BOX(&folded), TORCH_ABI_VERSION);
}
