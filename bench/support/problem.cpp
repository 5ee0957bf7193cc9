// SPDX-License-Identifier: MIT
#include "support/problem.hpp"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstddef>
#include <stdexcept>

#include <Eigen/Core>

#include <attn/detail/checks.hpp>

#include "support/normal_noise.hpp"
#include "support/safetensors.hpp"

namespace attn::bench {
namespace {

template <class T>
aligned_vector<T> noise(index_t n, std::uint64_t seed) {
  normal_noise draw(seed);
  aligned_vector<T> elements(static_cast<std::size_t>(n));
  for (T& x : elements) x = static_cast<T>(draw());
  return elements;
}

std::string lower_case(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

std::string find_tensor(const safetensors_file& file, const std::string& letter,
                        const std::string& word) {
  for (const auto& [name, tensor] : file.tensors()) {
    if (lower_case(name) == letter || lower_case(name) == word) return name;
  }
  throw safetensors_error(file.path().string() + ": has no tensor \"" + letter + "\" or \"" + word +
                          "\" (see --tensors)");
}

template <class T>
struct loaded {
  std::array<index_t, 4> extents{1, 1, 1, 1};
  aligned_vector<T> elements;

  loaded(const safetensors_file& file, const std::string& name) {
    const auto values = file.read<T>(name);
    const auto& shape = file.tensors().at(name).shape;
    if (shape.size() < 2 || shape.size() > 4) {
      throw shape_error(file.path().string() + ": tensor \"" + name + "\" has rank " +
                        std::to_string(shape.size()) + ", expected 2 to 4");
    }
    std::copy_backward(shape.begin(), shape.end(), extents.end());
    elements.assign(values.begin(), values.end());
  }
  [[nodiscard]] tensor_view<const T> view() const {
    return {elements.data(), extents[0], extents[1], extents[2], extents[3]};
  }
};

}  // namespace

double problem_shape::pairs() const {
  double per_head = 0;
  for (index_t i = 0; i < n_q; ++i) per_head += static_cast<double>(keys(i));
  return per_head * static_cast<double>(n_batch) * static_cast<double>(n_heads);
}

template <class T>
problem<T> random_problem(const problem_shape& s, std::uint64_t seed) {
  return {s, noise<T>(s.n_batch * s.n_heads * s.n_q * s.d_qk, 3 * seed),
          noise<T>(s.n_batch * s.n_kv_heads * s.n_kv * s.d_qk, 3 * seed + 1),
          noise<T>(s.n_batch * s.n_kv_heads * s.n_kv * s.d_v, 3 * seed + 2)};
}

template <class T>
problem<T> load_problem(const std::filesystem::path& path, const std::vector<std::string>& names,
                        bool causal) {
  const safetensors_file file(path);
  const bool named = !names.empty();
  if (named && names.size() != 3) {
    throw std::invalid_argument("--tensors has " + std::to_string(names.size()) +
                                " names, expected Q,K,V");
  }
  loaded<T> q(file, named ? names[0] : find_tensor(file, "q", "query"));
  loaded<T> k(file, named ? names[1] : find_tensor(file, "k", "key"));
  loaded<T> v(file, named ? names[2] : find_tensor(file, "v", "value"));

  const std::string where = path.string();
  const auto require = [&](const char* argument, const loaded<T>& x, int r, index_t expected,
                           const char* reason) {
    detail::check_extent(where, argument, x.view(), r, expected, reason);
  };
  require("k", k, 0, q.extents[0], "batch of q");
  require("v", v, 0, q.extents[0], "batch of q");
  require("k", k, 3, q.extents[3], "dim of q");
  require("v", v, 1, k.extents[1], "heads of k");
  require("v", v, 2, k.extents[2], "length of k");
  for (const loaded<T>* x : {&q, &k, &v}) {
    if (x->elements.empty()) {
      detail::raise_shape(where,
                          x == &q   ? "q"
                          : x == &k ? "k"
                                    : "v",
                          x->extents, "at least one element");
    }
  }
  if (q.extents[1] % k.extents[1] != 0) {
    detail::raise_shape(where, "k", k.extents,
                        "heads that divide " + std::to_string(q.extents[1]) + " (heads of q)");
  }

  const problem_shape shape{.n_batch = q.extents[0],
                            .n_heads = q.extents[1],
                            .n_kv_heads = k.extents[1],
                            .n_q = q.extents[2],
                            .n_kv = k.extents[2],
                            .d_qk = q.extents[3],
                            .d_v = v.extents[3],
                            .causal = causal};
  return {shape, std::move(q.elements), std::move(k.elements), std::move(v.elements)};
}

#define ATTN_BENCH_INSTANTIATE(T)                                                                  \
  template problem<T> random_problem(const problem_shape&, std::uint64_t);                         \
  template problem<T> load_problem(const std::filesystem::path&, const std::vector<std::string>&,  \
                                   bool);
ATTN_BENCH_INSTANTIATE(float)
ATTN_BENCH_INSTANTIATE(double)
ATTN_BENCH_INSTANTIATE(Eigen::half)
ATTN_BENCH_INSTANTIATE(Eigen::bfloat16)

}  // namespace attn::bench
