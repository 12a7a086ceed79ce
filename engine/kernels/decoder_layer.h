// What Python passes for a whole decoder layer: `decoder_layer.py` holds the same structures.
#pragma once

#include <cstdint>

#include "abi.h"

namespace ow {
extern "C" {

// What stays from pass to pass. The products lack their rows and threads.
struct OwLayer {
  OwLinear qkv, attention_out, gate_up, down;
  const float *before_attention, *before_mlp;  // norms, [hidden]
  const float *after_attention, *after_mlp;    // of what is added; or null
  const float *query_norm, *key_norm;          // [dim], or null
  int32_t dtype, activation, num_heads;
  int32_t window;  // 0: none
  float scale, softcap;  // of the scores; softcap 0: none
  float eps;
  int32_t rounds_once;
};

struct OwPass {
  OwPages pages;
  const void* x;           // [row, hidden]
  void* out;               // [row, hidden]
  const void *cos, *sin;   // [row, rotary_dim]
  const int64_t* slots;    // [row]
  const int32_t* query_start;   // [num_seqs + 1]
  const int32_t* context_len;   // [num_seqs]
  const int32_t* block_tables;  // [num_seqs, table_stride]
  int64_t table_stride, num_rows;
  int32_t num_seqs, rotary_dim;
  int32_t num_threads;
  Parallel parallel;  // null: the calling thread alone
};
}

}  // namespace ow
