// What Python passes to the operators of a decoder layer: `layer_ops.py` holds the same structures.
#pragma once

#include <cstdint>

#include "abi.h"

namespace ow {

enum Activation : int32_t { SILU = 0, GELU_TANH = 1 };

extern "C" {

// Rows are contiguous and lie one behind the other.
struct OwNorm {
  const void* x;         // [row, width]
  const void* residual;  // [row, width], added to x first; or null
  void* sum;             // [row, width]: x + residual, rounded; null without residual
  void* out;             // [row, width]
  const float* weight;   // [width]; null: the sum alone
  int64_t num_rows;
  int32_t width, dtype;
  float eps;
  int32_t rounds_once;  // to dtype: after the weight alone, not before it as well
  int32_t num_threads;
  Parallel parallel;  // null: the calling thread alone
};

struct OwRotary {
  OwPages pages;
  void* qkv;                            // [row, (heads + 2 kv heads) * dim], changed in place
  const void *cos, *sin;                // [row, rotary_dim]
  const float *query_norm, *key_norm;   // [dim], or null
  const int64_t* slots;                 // [row]
  int64_t num_rows;
  int32_t num_heads, rotary_dim;
  float eps;
  int32_t rounds_once;
  int32_t num_threads;
  Parallel parallel;
};

struct OwGate {
  const void* gate_up;  // [row, 2 * width]: the gates, then what they let through
  void* out;            // [row, width]
  int64_t num_rows;
  int32_t width, dtype, activation;
  int32_t num_threads;
  Parallel parallel;
};
}

}  // namespace ow
