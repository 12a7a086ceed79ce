// Matrix products in blocks of MR x 2W that stay in registers. Each element of the result is one sum
// in the order of k, whatever block it falls into.
#pragma once

#include <algorithm>

#include "simd.h"

namespace ow {

// The right-hand matrix of a block: rows of a panel, or rows wherever they lie.
struct Panel {
  const float* base;
  const float* operator()(int k) const { return base + k * 2 * W; }
};
struct Scattered {
  const float* const* rows;
  int64_t offset;
  const float* operator()(int k) const { return rows[k] + offset; }
};

// c[m][0..2W) = init + sum over k of a[m][k] * b(k)[0..2W), for M rows.
template <int M, bool Accumulate, class Rows>
inline void block(int depth, const float* a, int64_t lda, Rows b, float* c, int64_t ldc,
                  const float* decay) {
  vf acc[M][2];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
    if constexpr (Accumulate) {
      acc[m][0] = load(c + m * ldc) * decay[m];
      acc[m][1] = load(c + m * ldc + W) * decay[m];
    } else {
      acc[m][0] = acc[m][1] = vf{};
    }
  }
  for (int k = 0; k < depth; ++k) {
    const float* row = b(k);
    vf b0 = load(row), b1 = load(row + W);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      vf x = splat(a[m * lda + k]);
      acc[m][0] += x * b0;
      acc[m][1] += x * b1;
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
    store(c + m * ldc, acc[m][0]);
    store(c + m * ldc + W, acc[m][1]);
  }
}

template <int M, bool Accumulate, class Rows>
inline void blocks_up_to(int rows, int depth, const float* a, int64_t lda, Rows b, float* c,
                         int64_t ldc, const float* decay) {
  if (rows == M) {
    block<M, Accumulate>(depth, a, lda, b, c, ldc, decay);
  } else if constexpr (M > 1) {
    blocks_up_to<M - 1, Accumulate>(rows, depth, a, lda, b, c, ldc, decay);
  }
}

// Out of line and free of the pages' type, so that it is compiled once.
template <bool Accumulate, class Rows>
__attribute__((noinline)) void column_block(int rows, int depth, const float* a, int64_t lda,
                                            Rows b, float* c, int64_t ldc, const float* decay) {
  for (int m = 0; m < rows; m += MR) {
    blocks_up_to<MR, Accumulate>(std::min(MR, rows - m), depth, a + m * lda, lda, b, c + m * ldc,
                                 ldc, decay + m);
  }
}

}  // namespace ow
