// SPDX-License-Identifier: MIT
//
// Shortens a sequence of 12 word vectors to 3 by their scores, softly, so that the scores learn.
#include <attn/soft_topk.hpp>
#include <attn/topk_baselines.hpp>

#include <cstdio>

#include <Eigen/Core>

using attn::index_t;
using row_matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

int main() {
  constexpr index_t n = 12, k = 3, d = 4;

  // One vector per word, and how much each matters: here by hand, in a model by a scorer.
  const char* words[n] = {"the", "old",  "man", "went", "down",  "to",
                          "the", "bank", "of",  "the",  "river", "."};
  row_matrix x(n, d);
  for (index_t i = 0; i < n; ++i)
    for (index_t c = 0; c < d; ++c) x(i, c) = static_cast<float>((i * (c + 3) + c) % 7) - 3;
  Eigen::VectorXf scores(n);
  scores << 0.1f, 0.4f, 0.9f, 0.6f, 0.3f, 0.1f, 0.1f, 0.8f, 0.1f, 0.1f, 0.7f, 0.05f;

  // The plan: which of the 3 slots each word ends in, with what weight.
  const attn::tournament t(scores, k);
  for (index_t r = 0; r < k; ++r) {
    std::printf("slot %td is %s (score %.2f):", r, words[t.champion(0, 0, r)],
                t.scores()(0, 0, r, 0));
    for (index_t i = 0; i < n; ++i)
      if (t.slot(0, 0, i) == r) std::printf("  %.3f %s", t.weight(0, 0, i), words[i]);
    std::printf("\n");
  }

  // The plan applied to the vectors.
  row_matrix pooled(k, d);
  attn::soft_topk(t, x, pooled);

  // Training: the gradient of a loss, here the sum of all pooled elements, reaches every score.
  const row_matrix d_pooled = row_matrix::Ones(k, d);
  const Eigen::VectorXf d_pooled_scores = Eigen::VectorXf::Zero(k);
  row_matrix d_x(n, d);
  Eigen::VectorXf d_scores(n);
  attn::soft_topk_backward(t, x, d_pooled, d_pooled_scores, d_x, d_scores);

  // The same in one call, when the plan is not needed again.
  row_matrix again(k, d);
  Eigen::VectorXf pooled_scores(k);
  attn::soft_topk(x, scores, again, pooled_scores);

  // How near that is to the three best words themselves (1 is all of them), and how near an
  // iterative soft top-k comes, which takes as many passes over x as there are slots.
  row_matrix best(k, d), iterative(k, d);
  attn::hard_topk(x, scores, best, pooled_scores);
  const double alpha = attn::iterative_topk_options::tuned_alpha(n);
  attn::iterative_topk(x, scores, iterative, pooled_scores, {.alpha = alpha});
  std::printf("nCCS: tournament %.3f, iterative %.3f\n",
              attn::chamfer_cosine_similarity(best, pooled),
              attn::chamfer_cosine_similarity(best, iterative));

  const bool champions_stay_in_order = t.champion(0, 0, 0) < t.champion(0, 0, 1);
  return champions_stay_in_order && again == pooled ? 0 : 1;
}
