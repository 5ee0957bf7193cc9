// SPDX-License-Identifier: MIT
//
// An encoder-decoder that may attend in blocks and may shorten its sequence between layers:
//
//     vanilla       full attention, no pooling
//     blockwise     attention in blocks
//     Transpooler   blocks, and one soft top-k after the last encoder layer
//     Pyramidion    blocks, and a soft top-k after other layers too: 8k, 2k, 512, ...
//
// after Pietruszka, Borchmann, Garncarek, "Sparsifying Transformer Models with Trainable
// Representation Pooling", ACL 2022. Post-norm as in the paper; padding is masked everywhere, which
// the released code leaves out; decoder without positions, as in the paper.
#pragma once

#include <algorithm>
#include <cmath>
#include <deque>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include <attn/blockwise_attention.hpp>
#include <attn/dense_attention.hpp>
#include <attn/scorers.hpp>
#include <attn/soft_topk.hpp>

#include "transformer.hpp"

namespace transformer {

struct pooling_options {
  index_t width = 512, hidden = 2048, n_heads = 8;
  index_t n_tokens = 1000;  ///< of the vocabulary
  index_t n_decoder_layers = 2;
  index_t block = 0;  ///< 0: full attention in the encoder

  /// What is left of the sequence after each encoder layer; 0 leaves it as it is.
  std::vector<index_t> encoder_widths = {0, 0};
};

/// Linear scorer, sigmoid, soft top-k over the whole sequence.
class pooler {
 public:
  pooler(index_t width, index_t kept, random_parameters& random) : kept_(kept) {
    for (index_t c = 0; c < width; ++c) {
      w_.push_back(random.uniform() * 4 / std::sqrt(static_cast<float>(width)));
    }
  }

  [[nodiscard]] sequences operator()(const sequences& x, attn::context& ctx) const {
    if (const index_t shortest = *std::min_element(x.lengths.begin(), x.lengths.end());
        shortest < kept_) {
      throw std::invalid_argument("a document of " + std::to_string(shortest) +
                                  " tokens cannot be pooled to " + std::to_string(kept_));
    }
    const index_t n_batch = x.n_batch();
    std::vector<float> scores(static_cast<std::size_t>(n_batch * x.n()));
    const auto s = attn::bhld(scores.data(), n_batch, 1, x.n(), 1);
    attn::linear_scorer<float>{w_}(x.view(), s, ctx);
    attn::squash_scores(s, s);

    // Padding is past the lengths: it takes no part.
    sequences pooled{matrix(n_batch * kept_, x.width()),
                     std::vector<index_t>(static_cast<std::size_t>(n_batch), kept_)};
    std::vector<float> pooled_scores(static_cast<std::size_t>(n_batch * kept_));
    attn::soft_topk(x.view(), s, pooled.view(),
                    attn::bhld(pooled_scores.data(), n_batch, 1, kept_, 1), {.lengths = x.lengths},
                    ctx);
    return pooled;
  }

 private:
  index_t kept_;
  std::vector<float> w_;
};

class pooling_model {
 public:
  pooling_model(const pooling_options& options, std::uint64_t seed)
      : options_(options), random_(seed),
        embedding_(random_.weights(options.n_tokens, options.width)) {
    for (const index_t kept : options.encoder_widths) {
      encoder_.emplace_back(options.width, options.n_heads, options.hidden, random_);
      poolers_.emplace_back(options.width, kept, random_);
    }
    for (index_t layer = 0; layer < options.n_decoder_layers; ++layer) {
      decoder_.emplace_back(options.width, options.n_heads, options.hidden, random_);
    }
  }

  /// Token ids [B][n], padded to one n with anything; lengths[b] of them are real.
  [[nodiscard]] sequences encode(const std::vector<std::vector<index_t>>& tokens,
                                 const std::vector<index_t>& lengths, attn::context& ctx) {
    sequences x = embed(tokens, lengths);
    // Positions are those in the document, whatever the blocks.
    const matrix positions = sinusoidal_positions(x.n(), x.width());
    for (index_t b = 0; b < x.n_batch(); ++b) x.rows.middleRows(b * x.n(), x.n()) += positions;

    for (std::size_t layer = 0; layer < encoder_.size(); ++layer) {
      const attn::key_lengths padding{x.lengths};
      encoder_[layer](
          x,
          [&](const auto& q, const auto& k, const auto& v, const auto& out) {
            if (options_.block > 0)
              attn::blockwise_attention(q, k, v, out, padding, {.block = options_.block}, ctx);
            else
              attn::dense_attention(q, k, v, out, padding, {}, ctx);
          },
          ctx);
      if (options_.encoder_widths[layer] > 0) x = poolers_[layer](x, ctx);
    }
    return x;
  }

  /// Hidden states of the target tokens, [B t, width]: every position sees itself, the ones before
  /// it and what the encoder left.
  [[nodiscard]] sequences decode(const std::vector<std::vector<index_t>>& targets,
                                 const sequences& source, attn::context& ctx) {
    const std::vector<index_t> lengths(targets.size(), static_cast<index_t>(targets[0].size()));
    sequences x = embed(targets, lengths);
    const attn::key_lengths padding{source.lengths};
    for (auto& layer : decoder_) {
      layer(
          x, source,
          [&](const auto& q, const auto& k, const auto& v, const auto& out) {
            attn::dense_attention(q, k, v, out, attn::causal_mask{}, {}, ctx);
          },
          [&](const auto& q, const auto& k, const auto& v, const auto& out) {
            attn::dense_attention(q, k, v, out, padding, {}, ctx);
          },
          ctx);
    }
    return x;
  }

  /// Scores of the next token, [B t, n_tokens]: the embedding is shared.
  [[nodiscard]] matrix logits(const sequences& decoded) const {
    return decoded.rows * embedding_.transpose();
  }

 private:
  [[nodiscard]] sequences embed(const std::vector<std::vector<index_t>>& tokens,
                                const std::vector<index_t>& lengths) const {
    const auto n_batch = static_cast<index_t>(tokens.size());
    const auto n = static_cast<index_t>(tokens[0].size());
    sequences x{matrix(n_batch * n, options_.width), lengths};
    const float scale = std::sqrt(static_cast<float>(options_.width));
    for (index_t b = 0; b < n_batch; ++b) {
      for (index_t i = 0; i < n; ++i) {
        const index_t token = tokens[static_cast<std::size_t>(b)][static_cast<std::size_t>(i)];
        x.rows.row(b * n + i) = scale * embedding_.row(token);
      }
    }
    return x;
  }

  pooling_options options_;
  random_parameters random_;
  matrix embedding_;
  std::deque<encoder_layer> encoder_;  // layers stay where they are
  std::deque<decoder_layer> decoder_;
  std::vector<pooler> poolers_;
};

/// A made-up document: token ids that repeat like words do.
[[nodiscard]] inline std::vector<index_t> made_up_document(index_t n, index_t n_tokens,
                                                           std::uint64_t seed) {
  random_parameters random(seed);
  std::vector<index_t> tokens;
  for (index_t i = 0; i < n; ++i) {
    const float u = (random.uniform() + 1) / 2;
    tokens.push_back(static_cast<index_t>(u * u * static_cast<float>(n_tokens - 1)));
  }
  return tokens;
}

}  // namespace transformer
