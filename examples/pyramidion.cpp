// SPDX-License-Identifier: MIT
//
// Pyramidion: pooling between layers too. A document of 8192 tokens is 2048 vectors after the first
// encoder layer and 512 after the second; the vanilla encoder keeps 8192 and attends to all of
// them.
#include <chrono>
#include <cstdio>

#include "support/pooling_model.hpp"

using namespace transformer;

int main() {
  constexpr index_t n = 8192, t = 64;
  const std::vector<std::vector<index_t>> document{made_up_document(n, 1000, 1)};
  const std::vector<std::vector<index_t>> target{made_up_document(t, 1000, 2)};
  const std::vector<index_t> lengths{n - 100};
  attn::context ctx(2);

  // Multiples of a 512 x 512 block that the encoder's attention takes: 16 + 4 instead of 16 + 16
  // (and 256 + 256 with full attention); of 512 positions that each decoder layer attends to: 1,
  // not 16.
  const pooling_options pyramidion{.block = 512, .encoder_widths = {2048, 512}};
  const pooling_options blockwise{.block = 512};
  double seconds[2];
  index_t kept[2];
  bool finite = true;
  for (const bool is_blockwise : {false, true}) {
    pooling_model model(is_blockwise ? blockwise : pyramidion, 1);
    const auto start = std::chrono::steady_clock::now();
    const sequences memory = model.encode(document, lengths, ctx);
    const sequences decoded = model.decode(target, memory, ctx);
    seconds[is_blockwise] =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    kept[is_blockwise] = memory.n();
    finite = finite && decoded.rows.allFinite();
    std::printf("%-10s %td tokens to %td vectors, encoder and decoder %.2f s\n",
                is_blockwise ? "blockwise" : "Pyramidion", n, memory.n(), seconds[is_blockwise]);
  }
  std::printf("%.1f times faster\n", seconds[1] / seconds[0]);
  return finite && kept[0] == 512 && kept[1] == n ? 0 : 1;
}
