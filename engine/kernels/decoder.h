// What Python passes for all layers of a decoder: `decoder.py` holds the same structures.
#pragma once

#include <cstdint>

#include "abi.h"

namespace ow {
extern "C" {

// A layer, as it stays from pass to pass. The products lack their rows and threads.
struct OwLayer {
  OwLinear qkv, attention_out, gate_up, down;
  const float *before_attention, *before_mlp;  // norms, [hidden]
  const float *after_attention, *after_mlp;    // of what is added; or null
  const float *query_norm, *key_norm;          // [dim], or null
  int32_t dtype, activation, num_heads;
  int32_t window;        // 0: none
  float scale, softcap;  // of the scores; softcap 0: none
  float eps;
  int32_t rounds_once;
  int32_t angles;        // which of a pass's
  int32_t group, place;  // of its KV: the group, and which of the layers in a block of that
};

// The KV of layers that share block tables.
struct OwGroup {
  OwPages pages;         // of the first layer in a block
  int64_t layer_stride;  // elements from one layer of a block to the next
  const int64_t* slots;  // [row]
  const int32_t* block_tables;  // [num_seqs, table_stride]
  int64_t table_stride;
};

struct OwAngles {
  const void *cos, *sin;  // [row, rotary_dim]
  int64_t rotary_dim;
};

struct OwDecoder {
  const OwLayer* layers;
  const OwGroup* groups;
  const OwAngles* angles;
  const void* x;  // [row, hidden]
  void* out;      // [row, hidden]
  const int32_t* query_start;  // [num_seqs + 1]
  const int32_t* context_len;  // [num_seqs]
  int64_t num_rows;
  int32_t num_layers, num_seqs;
  int32_t num_threads;
  Parallel parallel;  // null: the calling thread alone
};
}

}  // namespace ow
