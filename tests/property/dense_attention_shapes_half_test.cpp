// SPDX-License-Identifier: MIT
#include "property/dense_attention_shapes.hpp"

ATTN_TEST_DENSE_SHAPES(Eigen::half)
