// What a decoder layer does between its matrix products: norms, rotary positions with the write of
// keys and values into their pages, gated activations.
//
// All of it is float32 inside, rounded to the model's type where the model's own code rounds. Each
// row is computed by itself, in one order, on one thread: its bits depend on nothing else in a pass.

#include "layer_ops.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "simd.h"

namespace ow {
namespace {

constexpr int64_t SERIAL_ELEMENTS = 1 << 14;  // less work than this is not worth waking threads

template <class F>
struct RowJob {
  F& f;
  int64_t rows, parts;
  std::atomic<int64_t> next{0};
};

// Out of line, so that it is compiled once for one thread and for several.
template <class F>
__attribute__((noinline)) void work(void* argument) {
  RowJob<F>& job = *static_cast<RowJob<F>*>(argument);
  for (int64_t part; (part = job.next.fetch_add(1)) < job.parts;) {
    const int64_t end = (part + 1) * job.rows / job.parts;
    for (int64_t row = part * job.rows / job.parts; row < end; ++row) job.f(row);
  }
}

// Calls f(row) for every row, on as many threads as it pays.
template <class F>
void for_rows(int64_t rows, int64_t row_elements, int32_t num_threads, Parallel parallel, F f) {
  const int64_t most = parallel && rows * row_elements > SERIAL_ELEMENTS ? num_threads : 1;
  RowJob<F> job{f, rows, std::max<int64_t>(1, std::min(most, rows))};
  if (job.parts > 1) {
    parallel(work<F>, &job, job.parts, 0);
  } else {
    work<F>(&job);
  }
}

// Calls f(first, count) for vectors of W elements and for what is left at the end.
template <class F>
inline void for_vectors(int width, F f) {
  int d = 0;
  for (; d + W <= width; d += W) f(d, W);
  if (d < width) f(d, width - d);
}

template <class T>
inline vf load(const T* from, int count) {
  if (count == W) return ow::load(from);
  T whole[W] = {};
  std::memcpy(whole, from, count * sizeof(T));
  return ow::load(whole);
}

inline void round_to(float* to, vf x) { ow::store(to, x); }
inline void round_to(bf16* to, vf x) {
  const vu u = bits_as<vu>(x);
  const vu rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const vu bits = (u & 0x7fffffffu) > 0x7f800000u ? vu{} + 0x7fc0u : rounded;
  *reinterpret_cast<vh_any*>(to) = __builtin_convertvector(bits, vh_any);
}
inline void round_to(f16* to, vf x) {
#if defined(__F16C__) && defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__) && defined(__AVX2__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < W; ++i) from_float(x[i], to + i);
#endif
}

template <class T>
inline void store(T* to, vf x, int count) {
  if (count == W) return round_to(to, x);
  T whole[W];
  round_to(whole, x);
  std::memcpy(to, whole, count * sizeof(T));
}

template <class T>
inline vf rounded(vf x) {
  if constexpr (std::is_same_v<T, float>) return x;
  T whole[W];
  round_to(whole, x);
  return ow::load(whole);
}

// ------------------------------------------------------------------------------------------ norms

struct Scale {
  const float* weight;
  float eps;
  bool rounds_once;  // after the weight alone, not before it as well
};

// out = x / rms(x) * weight, where `total` is the sum of x's squares. May work in place.
template <class T>
inline void normalise(const T* x, float total, Scale s, T* out, int width) {
  const float factor = 1.0f / std::sqrt(total / float(width) + s.eps);
  for_vectors(width, [&](int d, int count) {
    vf y = load(x + d, count) * factor;
    if (!s.rounds_once) y = rounded<T>(y);
    store(out + d, y * load(s.weight + d, count), count);
  });
}

template <class T>
inline float sum_of_squares(const T* x, int width) {
  vf total{};
  for_vectors(width, [&](int d, int count) {
    const vf y = load(x + d, count);
    total += y * y;
  });
  return sum(total);
}

template <class T>
void norm(const OwNorm& a) {
  const int width = a.width;
  const Scale scale{a.weight, a.eps, a.rounds_once != 0};
  for_rows(a.num_rows, width, a.num_threads, a.parallel, [&](int64_t row) {
    const T* x = static_cast<const T*>(a.x) + row * width;
    if (a.residual) {
      const T* residual = static_cast<const T*>(a.residual) + row * width;
      T* total = static_cast<T*>(a.sum) + row * width;
      for_vectors(width, [&](int d, int count) {
        store(total + d, load(residual + d, count) + load(x + d, count), count);
      });
      x = total;
      if (!a.weight) return;
    }
    normalise(x, sum_of_squares(x, width), scale, static_cast<T*>(a.out) + row * width, width);
  });
}

// ----------------------------------------------------------------------------------------- rotary

// Turns the pairs (d, d + half) of a head by the row's angles, in place.
template <class T>
inline void rotate(T* head, const T* cos, const T* sin, int half) {
  for_vectors(half, [&](int d, int count) {
    const vf x = load(head + d, count), y = load(head + half + d, count);
    const vf left = rounded<T>(x * load(cos + d, count)) - rounded<T>(y * load(sin + d, count));
    const vf right = rounded<T>(y * load(cos + half + d, count)) +
                     rounded<T>(x * load(sin + half + d, count));
    store(head + d, left, count);
    store(head + half + d, right, count);
  });
}

template <class T>
void rotary(const OwRotary& a) {
  const OwPages& p = a.pages;
  const int dim = p.head_dim, num_kv = p.num_kv_heads, half = a.rotary_dim / 2;
  const int64_t elements = int64_t(a.num_heads + 2 * num_kv) * dim;
  const size_t bytes = dim * sizeof(T);
  for_rows(a.num_rows, elements, a.num_threads, a.parallel, [&](int64_t row) {
    T* query = static_cast<T*>(a.qkv) + row * elements;
    T* key = query + a.num_heads * dim;
    const T* value = key + num_kv * dim;
    const T* cos = static_cast<const T*>(a.cos) + row * a.rotary_dim;
    const T* sin = static_cast<const T*>(a.sin) + row * a.rotary_dim;
    for (int head = 0; head < a.num_heads + num_kv; ++head) {
      T* own = query + head * dim;
      if (const float* weight = head < a.num_heads ? a.query_norm : a.key_norm) {
        const Scale scale{weight, a.eps, a.rounds_once != 0};
        normalise(own, sum_of_squares(own, dim), scale, own, dim);
      }
      rotate(own, cos, sin, half);
    }
    const int64_t at = a.slots[row] / p.block_size * p.block_stride +
                       a.slots[row] % p.block_size * p.token_stride;
    for (int head = 0; head < num_kv; ++head) {
      const int64_t to = at + head * p.head_stride;
      std::memcpy(static_cast<T*>(p.keys) + to, key + head * dim, bytes);
      std::memcpy(static_cast<T*>(p.values) + to, value + head * dim, bytes);
    }
  });
}

// ----------------------------------------------------------------------------------------- gates

// 1 / (1 + e^-x), by way of e^-|x| to stay in range.
inline vf sigmoid(vf x) {
  constexpr float log2e = 1.44269504088896340736f;
  const vf e = exp2((x < 0.0f ? x : -x) * log2e);
  return (x < 0.0f ? e : splat(1.0f)) / (1.0f + e);
}

inline vf silu(vf x) { return x * sigmoid(x); }

// x (1 + tanh(u)) / 2 = x sigmoid(2u), u = sqrt(2 / pi) (x + 0.044715 x^3)
inline vf gelu_tanh(vf x) {
  constexpr float twice = 1.5957691216057308f;
  return x * sigmoid(twice * (x + 0.044715f * x * x * x));
}

template <class T>
void gate(const OwGate& a) {
  const int width = a.width;
  for_rows(a.num_rows, width, a.num_threads, a.parallel, [&](int64_t row) {
    const T* gates = static_cast<const T*>(a.gate_up) + row * 2 * width;
    T* out = static_cast<T*>(a.out) + row * width;
    for_vectors(width, [&](int d, int count) {
      const vf x = load(gates + d, count);
      const vf y = rounded<T>(a.activation == SILU ? silu(x) : gelu_tanh(x));
      store(out + d, y * load(gates + width + d, count), count);
    });
  });
}

template <class A>
int by_dtype(int32_t dtype, const A& args, void (*f)(const A&), void (*b)(const A&),
             void (*h)(const A&)) {
  if (dtype < FLOAT32 || dtype > FLOAT16) return 2;
  (dtype == FLOAT32 ? f : dtype == BFLOAT16 ? b : h)(args);
  return 0;
}

}  // namespace
}  // namespace ow

extern "C" {

// Each returns 0, or 2 for an unknown dtype.
__attribute__((visibility("default"))) int ow_norm(const ow::OwNorm* a) {
  return ow::by_dtype(a->dtype, *a, ow::norm<float>, ow::norm<ow::bf16>, ow::norm<ow::f16>);
}

__attribute__((visibility("default"))) int ow_rotary(const ow::OwRotary* a) {
  return ow::by_dtype(a->pages.dtype, *a, ow::rotary<float>, ow::rotary<ow::bf16>,
                      ow::rotary<ow::f16>);
}

__attribute__((visibility("default"))) int ow_gate(const ow::OwGate* a) {
  return ow::by_dtype(a->dtype, *a, ow::gate<float>, ow::gate<ow::bf16>, ow::gate<ow::f16>);
}

// The sizes of the structures as this build lays them out, for the loader to compare.
__attribute__((visibility("default"))) int64_t ow_layer_ops_abi(int32_t index) {
  constexpr int64_t sizes[] = {sizeof(ow::OwNorm), sizeof(ow::OwRotary), sizeof(ow::OwGate)};
  return index < 3 ? sizes[index] : 0;
}
}
