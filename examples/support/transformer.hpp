// SPDX-License-Identifier: MIT
//
// The parts of a Transformer around its attention, in Eigen: enough for the examples, and small
// enough to copy. Rows are positions; post-norm, ReLU, sinusoidal positions, as in Vaswani et al.,
// "Attention Is All You Need", 2017.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include <Eigen/Core>

#include <attn/multi_head.hpp>
#include <attn/view.hpp>

namespace transformer {

using attn::index_t;
using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using vector = Eigen::RowVectorXf;

/// Stand-in for trained parameters: the same on every machine, of the size that Glorot and Bengio
/// (2010) give them.
class random_parameters {
 public:
  explicit random_parameters(std::uint64_t seed) : state_(seed) {}

  [[nodiscard]] float uniform() {  // splitmix64, in [-1, 1)
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return static_cast<float>((z ^ (z >> 31)) >> 40) * 0x1p-23f - 1;
  }
  [[nodiscard]] matrix weights(index_t n_in, index_t n_out) {
    const float size = std::sqrt(6.0f / static_cast<float>(n_in + n_out));
    return matrix::NullaryExpr(n_in, n_out, [&] { return size * uniform(); });
  }

 private:
  std::uint64_t state_;
};

/// Positions of a batch of sequences as rows: sequence b is rows [b n, (b + 1) n), of which the
/// first lengths[b] are real and the others padding.
struct sequences {
  matrix rows;
  std::vector<index_t> lengths;

  [[nodiscard]] index_t n_batch() const { return static_cast<index_t>(lengths.size()); }
  [[nodiscard]] index_t n() const { return rows.rows() / n_batch(); }
  [[nodiscard]] index_t width() const { return rows.cols(); }

  /// [B, 1, n, width]
  [[nodiscard]] attn::tensor_view<float> view() {
    return {rows.data(), n_batch(), 1, n(), width()};
  }
  [[nodiscard]] attn::tensor_view<const float> view() const {
    return {rows.data(), n_batch(), 1, n(), width()};
  }
};

/// Row i: sin(i / 10000^(2c / width)) in the first half of the channels, cos in the second.
[[nodiscard]] inline matrix sinusoidal_positions(index_t n, index_t width) {
  matrix p(n, width);
  const index_t half = width / 2;
  for (index_t c = 0; c < half; ++c) {
    const double rate = std::pow(10000.0, -static_cast<double>(c) /
                                              static_cast<double>(std::max<index_t>(1, half - 1)));
    for (index_t i = 0; i < n; ++i) {
      const double angle = rate * static_cast<double>(i);
      p(i, c) = static_cast<float>(std::sin(angle));
      p(i, half + c) = static_cast<float>(std::cos(angle));
    }
  }
  return p;
}

/// Rows to mean 0 and variance 1, then scaled and shifted.
class layer_norm {
 public:
  explicit layer_norm(index_t width) : gain_(vector::Ones(width)), shift_(vector::Zero(width)) {}

  void operator()(matrix& x) const {
    for (index_t i = 0; i < x.rows(); ++i) {
      auto row = x.row(i);
      row.array() -= row.mean();
      const float scale = 1 / std::sqrt(row.squaredNorm() / static_cast<float>(x.cols()) + 1e-5f);
      row = row.cwiseProduct(gain_) * scale + shift_;
    }
  }

 private:
  vector gain_, shift_;
};

/// ReLU(x w1 + b1) w2 + b2
class feed_forward {
 public:
  feed_forward(index_t width, index_t hidden, random_parameters& random)
      : w1_(random.weights(width, hidden)), w2_(random.weights(hidden, width)),
        b1_(vector::Zero(hidden)), b2_(vector::Zero(width)) {}

  /// x += ReLU(x w1 + b1) w2 + b2, a residual; rows in pieces, for the hidden layer is wide.
  void add_to(matrix& x) {
    constexpr index_t piece = 256;
    for (index_t first = 0; first < x.rows(); first += piece) {
      auto rows = x.middleRows(first, std::min(piece, x.rows() - first));
      hidden_.noalias() = rows * w1_;
      hidden_.rowwise() += b1_;
      hidden_ = hidden_.cwiseMax(0.0f);
      rows.noalias() += hidden_ * w2_;
      rows.rowwise() += b2_;
    }
  }

 private:
  matrix w1_, w2_, hidden_;
  vector b1_, b2_;
};

/// Multi-head attention with its residual: x += attention(x, source).
class attention {
 public:
  attention(index_t width, index_t n_heads, random_parameters& random)
      : w_q_(random.weights(width, width)), w_k_(random.weights(width, width)),
        w_v_(random.weights(width, width)), w_o_(random.weights(width, width)),
        layer_({.w_q = attn::view(std::as_const(w_q_)),
                .w_k = attn::view(std::as_const(w_k_)),
                .w_v = attn::view(std::as_const(w_v_)),
                .w_o = attn::view(std::as_const(w_o_))},
               {.n_heads = n_heads}) {}
  attention(const attention&) = delete;  // the layer looks at the matrices
  attention& operator=(const attention&) = delete;

  /// kernel(q, k, v, out) is the attention itself.
  template <class Kernel>
  void add_self(sequences& x, const Kernel& kernel, attn::context& ctx) {
    y_.resize(x.rows.rows(), x.rows.cols());
    layer_.self_attention(std::as_const(x).view(), y_view(x), kernel, ctx);
    x.rows += y_;
  }
  template <class Kernel>
  void add_cross(sequences& x, const sequences& source, const Kernel& kernel, attn::context& ctx) {
    y_.resize(x.rows.rows(), x.rows.cols());
    layer_.cross_attention(std::as_const(x).view(), source.view(), y_view(x), kernel, ctx);
    x.rows += y_;
  }

 private:
  [[nodiscard]] attn::tensor_view<float> y_view(const sequences& x) {
    return {y_.data(), x.n_batch(), 1, x.n(), x.width()};
  }

  matrix w_q_, w_k_, w_v_, w_o_, y_;
  attn::multi_head_attention<float> layer_;
};

/// Self-attention, feed-forward; each a residual with a layer norm behind it.
class encoder_layer {
 public:
  encoder_layer(index_t width, index_t n_heads, index_t hidden, random_parameters& random)
      : attention_(width, n_heads, random), feed_forward_(width, hidden, random), norm_1_(width),
        norm_2_(width) {}

  template <class Kernel>
  void operator()(sequences& x, const Kernel& kernel, attn::context& ctx) {
    attention_.add_self(x, kernel, ctx);
    norm_1_(x.rows);
    feed_forward_.add_to(x.rows);
    norm_2_(x.rows);
  }

 private:
  attention attention_;
  feed_forward feed_forward_;
  layer_norm norm_1_, norm_2_;
};

/// Causal self-attention, attention to the encoder's output, feed-forward.
class decoder_layer {
 public:
  decoder_layer(index_t width, index_t n_heads, index_t hidden, random_parameters& random)
      : self_(width, n_heads, random), cross_(width, n_heads, random),
        feed_forward_(width, hidden, random), norm_1_(width), norm_2_(width), norm_3_(width) {}

  template <class SelfKernel, class CrossKernel>
  void operator()(sequences& x, const sequences& source, const SelfKernel& self,
                  const CrossKernel& cross, attn::context& ctx) {
    self_.add_self(x, self, ctx);
    norm_1_(x.rows);
    cross_.add_cross(x, source, cross, ctx);
    norm_2_(x.rows);
    feed_forward_.add_to(x.rows);
    norm_3_(x.rows);
  }

 private:
  attention self_, cross_;
  feed_forward feed_forward_;
  layer_norm norm_1_, norm_2_, norm_3_;
};

}  // namespace transformer
