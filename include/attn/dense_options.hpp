// SPDX-License-Identifier: MIT
//
// Options of dense attention, shared by everything that computes or looks at the same weights.
#pragma once

#include <optional>
#include <span>

namespace attn {

/// How products are rounded. Softmax, running sums and the lse are float (double for double
/// tensors) in every mode.
enum class precision_mode {
  automatic,  ///< the fastest kernel whose error stays within the float bound of docs/numerics.md
  strict,     ///< one order of summation for every n_q: a prompt in chunks has the bits of one call
  bf16x3,     ///< may use three bfloat16 products per float product: about 16 bits per operand
  bf16,       ///< may round operands to bfloat16: 8 bits per operand
};

/// Options of dense attention: designated initialisers, as in
/// `dense_options{.scale = 1.0, .softcap = 30}`.
///
/// A score goes through: scale, softcap, score rule; then the softmax.
struct dense_options {
  /// Factor of q·k; absent is 1/sqrt(d_qk). Any number that is finite in float (double for double
  /// tensors).
  std::optional<double> scale = {};

  /// c > 0 replaces a score s by c·tanh(s/c), which lies in [−c, c]; 0 is off. From 1.2e-38 to 1e31
  /// (double tensors: 2.3e-308 to 9.9e291): beyond, 1/c or s/c would underflow.
  double softcap = 0;

  /// One logit per query head, or none: it joins the maximum and the denominator of every row of
  /// that head and has no value, so that a row may attend to nothing.
  std::span<const float> sinks = {};

  precision_mode precision = precision_mode::automatic;
};

}  // namespace attn
