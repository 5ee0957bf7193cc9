// SPDX-License-Identifier: MIT
//
// Transpooler: a two-layer encoder reads documents of 2048 tokens in blocks of 512, keeps 512
// vectors by a soft top-k, and a two-layer decoder attends to those. Two documents, one of them
// padded.
#include <chrono>
#include <cmath>
#include <cstdio>

#include "support/pooling_model.hpp"

using namespace transformer;

int main() {
  constexpr index_t n = 2048, kept = 512, t = 64;
  const pooling_options options{.block = 512, .encoder_widths = {0, kept}};
  pooling_model model(options, 1);
  attn::context ctx(2);

  std::vector<std::vector<index_t>> documents{made_up_document(n, options.n_tokens, 1),
                                              made_up_document(n, options.n_tokens, 2)};
  const std::vector<index_t> lengths{n, 1500};
  const std::vector<std::vector<index_t>> targets{made_up_document(t, options.n_tokens, 3),
                                                  made_up_document(t, options.n_tokens, 4)};

  const auto start = std::chrono::steady_clock::now();
  const sequences memory = model.encode(documents, lengths, ctx);
  const auto encoded = std::chrono::steady_clock::now();
  const matrix logits = model.logits(model.decode(targets, memory, ctx));
  const auto decoded = std::chrono::steady_clock::now();
  const auto ms = [](auto d) { return std::chrono::duration<double, std::milli>(d).count(); };
  std::printf("encoder: 2 documents of %td tokens to %td vectors each, %.0f ms\n", n, memory.n(),
              ms(encoded - start));
  std::printf("decoder: %td target tokens each, %.0f ms; logits %td x %td\n", t,
              ms(decoded - encoded), logits.rows(), logits.cols());

  // Padding is masked in every layer and in the pooling: other tokens there change nothing.
  for (index_t i = lengths[1]; i < n; ++i) documents[1][static_cast<std::size_t>(i)] = 7;
  const sequences again = model.encode(documents, lengths, ctx);
  const bool same = again.rows == memory.rows;
  std::printf("other padding, %s\n", same ? "same vectors" : "OTHER VECTORS");
  return same && logits.allFinite() && memory.n() == kept ? 0 : 1;
}
