// What the Python side passes, field by field: `native.py` holds the same structures.
#pragma once

#include <cstdint>

namespace ow {

enum DType : int32_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

// How a packed weight lies in memory: see panels.h. The first three are the dtypes' numbers.
enum Format : int32_t { Q4_1 = 3, Q8_0 = 4, Q4_0 = 5 };

// Runs a function on up to `num_threads` threads, the caller's among them: libgomp's GOMP_parallel.
typedef void (*Parallel)(void (*)(void*), void*, unsigned num_threads, unsigned flags);

extern "C" {

// Strides count elements. All pages and rows are contiguous along their last dimension.
struct OwPages {
  void* keys;  // [block, head, token, dim]
  void* values;
  int64_t block_stride, head_stride, token_stride;
  int32_t num_kv_heads, head_dim, block_size, dtype;
};

struct OwAttention {
  OwPages pages;
  const void* query;  // [head, row, dim]
  void* out;          // [row, head, dim], contiguous
  int64_t query_head_stride, query_row_stride;
  const int32_t* query_start;   // [num_seqs + 1]
  const int32_t* context_len;   // [num_seqs]
  const int32_t* block_tables;  // [num_seqs, table_stride]
  int64_t table_stride;
  int32_t num_seqs, num_heads;
  int32_t window;  // 0: none
  int32_t num_threads;
  float scale, softcap;  // softcap 0: none
  Parallel parallel;     // null: the calling thread alone
};

struct OwWrite {
  OwPages pages;
  const void *key, *value;  // [head, row, dim]
  int64_t key_head_stride, key_row_stride, value_head_stride, value_row_stride;
  const int64_t* slots;  // [num_rows]
  int64_t num_rows;
};

struct OwLinear {
  const void* x;       // [row, input], contiguous along the inputs
  void* out;           // [row, output], contiguous along the outputs
  const void* panels;  // of the weight [output, input], aligned to 64 bytes
  const float* bias;   // [num_outputs], or null
  int64_t x_stride, out_stride;
  int64_t num_rows;
  int32_t num_inputs, num_outputs;
  int32_t dtype;   // of x and out
  int32_t format;  // of the panels
  int32_t num_threads;
  Parallel parallel;  // null: the calling thread alone
};
}

}  // namespace ow
