// SPDX-License-Identifier: MIT
//
// Everything in the library.
#pragma once

#include <attn/attention_state.hpp>
#include <attn/attention_weights.hpp>
#include <attn/blockwise_attention.hpp>
#include <attn/context.hpp>
#include <attn/dense_attention.hpp>
#include <attn/dense_attention_backward.hpp>
#include <attn/dense_options.hpp>
#include <attn/diagnostics.hpp>
#include <attn/eigen.hpp>
#include <attn/error.hpp>
#include <attn/learned_scorers.hpp>
#include <attn/lsh.hpp>
#include <attn/multi_head.hpp>
#include <attn/pooled_attention.hpp>
#include <attn/score_rule.hpp>
#include <attn/scorers.hpp>
#include <attn/smyrf_attention.hpp>
#include <attn/smyrf_clusters.hpp>
#include <attn/smyrf_options.hpp>
#include <attn/soft_topk.hpp>
#include <attn/soft_topk_options.hpp>
#include <attn/topk_baselines.hpp>
#include <attn/version.hpp>
#include <attn/view.hpp>
