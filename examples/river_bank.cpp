// SPDX-License-Identifier: MIT
//
// Attention by hand: "the river bank flooded", four words of two numbers each, small enough to
// follow every step. What does "bank" mean here? It asks, the other words answer.
#include <attn/attention_weights.hpp>
#include <attn/attn.hpp>

#include <Eigen/Core>

#include <array>
#include <cmath>
#include <cstdio>
#include <vector>

namespace {

using matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

constexpr std::array words{"the", "river", "bank", "flooded"};
constexpr int bank = 2, flooded = 3;

bool all_as_expected = true;

// Prints a row of numbers after a word and compares it with what the arithmetic on paper gives.
void show(const char* word, const Eigen::RowVectorXd& row, const std::vector<double>& on_paper,
          int digits = 6) {
  std::printf("  %-8s", word);
  for (const double x : row) std::printf(" %9.*f", digits, x);
  std::printf("\n");
  for (std::size_t i = 0; i < on_paper.size(); ++i) {
    const double off = row(static_cast<Eigen::Index>(i)) - on_paper[i];
    if (!(std::abs(off) <= 0.5000001 * std::pow(10.0, -digits))) all_as_expected = false;
  }
}

}  // namespace

int main() {
  std::printf("1. Each word is a vector x: (about water, about money or ground).\n");
  matrix x(4, 2);
  x << 0.1, 0.1,  // the
      1.0, 0.0,   // river
      0.5, 0.5,   // bank: undecided
      0.8, 0.2;   // flooded
  for (int i = 0; i < 4; ++i) show(words[static_cast<std::size_t>(i)], x.row(i), {}, 1);

  std::printf("\n2. Three linear maps give what a word asks (q), what it offers (k) and what it\n"
              "   says (v). Here q = (x1 + x2/2, x1/2 + x2), k = (2 x1, x2), v = x:\n"
              "           q                   k\n");
  matrix w_q(2, 2), w_k(2, 2);
  w_q << 1, 0.5, 0.5, 1;
  w_k << 2, 0, 0, 1;
  const matrix q = x * w_q, k = x * w_k, v = x;
  for (int i = 0; i < 4; ++i) {
    Eigen::RowVectorXd both(4);
    both << q.row(i), k.row(i);
    show(words[static_cast<std::size_t>(i)], both, {}, 2);
  }

  std::printf("\n3. A score is a dot product: how well an offer fits a question. Of \"bank\":\n");
  const Eigen::RowVectorXd scores = q.row(bank) * k.transpose();
  show("q . k", scores, {0.225, 1.5, 1.125, 1.35}, 3);

  std::printf(
      "\n4. Scores are divided by sqrt(2), 2 being the dimension of q and k, and the softmax\n"
      "   makes weights of them: positive, and each row sums to 1.\n  %-8s",
      "");
  for (const char* word : words) std::printf(" %9s", word);
  std::printf("\n");
  matrix weights(4, 4);
  attn::attention_weights(q, k, weights);
  show("the", weights.row(0), {0.221937, 0.265790, 0.252062, 0.260211});
  show("river", weights.row(1), {0.107958, 0.372107, 0.218952, 0.300982});
  show("bank", weights.row(2), {0.132124, 0.325481, 0.249669, 0.292726});
  show("flooded", weights.row(3), {0.117259, 0.353356, 0.231183, 0.298202});

  std::printf("\n5. The answer is the weighted mean of what the words say. \"bank\", (0.5, 0.5)\n"
              "   before, has moved to the water:\n");
  const matrix out = attn::dense_attention(q, k, v);
  show("the", out.row(0), {0.622183, 0.200267});
  show("river", out.row(1), {0.733165, 0.180468});
  show("bank", out.row(2), {0.697708, 0.196592});
  show("flooded", out.row(3), {0.719235, 0.186958});

  std::printf(
      "\n6. Every row gives most to \"river\", even that of \"the\": its key is the longest.\n"
      "   Length draws attention, not only direction.\n");
  show("|k|", k.rowwise().norm().transpose(), {}, 3);
  for (int i = 0; i < 4; ++i) {
    Eigen::Index most = 0;
    weights.row(i).maxCoeff(&most);
    if (most != 1) all_as_expected = false;
  }

  std::printf(
      "\n7. With \"flooded\" masked, the other weights of \"bank\" rise: they still sum to 1.\n");
  std::array<bool, 4> allowed{true, true, true, true};
  allowed[flooded] = false;
  const attn::boolean_mask mask{attn::bhld<const bool>(allowed.data(), 1, 1, 1, 4)};
  attn::attention_weights(q, k, weights, mask);
  show("bank", weights.row(bank), {0.186807, 0.460190, 0.353002, 0});
  matrix masked(4, 2);
  attn::dense_attention(q, k, v, masked, mask);
  show("answer", masked.row(bank), {0.655372, 0.195182});

  std::printf("\n8. Why divide? Longer vectors have larger scores, and a softmax of large scores\n"
              "   collapses to its maximum. Eight times the scores, not divided:\n");
  show("scores", 8 * scores, {1.8, 12, 9, 10.8}, 1);
  attn::attention_weights(q, k, weights, attn::no_mask{}, {.scale = 8});
  show("weights", weights.row(bank), {0.00003}, 5);

  std::printf("\n9. The order of the words does not matter. \"flooded bank river the\":\n");
  const matrix q_back = q.colwise().reverse(), k_back = k.colwise().reverse();
  attn::attention_weights(q_back, k_back, weights);
  show("bank", weights.row(3 - bank), {0.292726, 0.249669, 0.325481, 0.132124});

  std::printf(
      "\n10. Nor need all words be there at once: \"the river\" and \"bank flooded\" each give\n"
      "    a mean and the logarithm of their weight, which is enough to join them.\n");
  matrix left(4, 2), right(4, 2), lse_left(4, 1), lse_right(4, 1);
  attn::dense_attention(q, k.topRows(2), v.topRows(2), left, lse_left);
  attn::dense_attention(q, k.bottomRows(2), v.bottomRows(2), right, lse_right);
  attn::merge_attention(left, lse_left, right, lse_right, left, lse_left);
  show("bank", left.row(bank), {0.697708, 0.196592});

  std::printf("\n11. Four words cost 16 dot products, 4096 words cost %d: n words ask n words.\n",
              4096 * 4096);
  if (!all_as_expected) std::printf("\nSome number is not the one on paper.\n");
  return all_as_expected ? 0 : 1;
}
