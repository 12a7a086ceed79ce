// Vectors of the width the build was given, in the compiler's own vector extension: one source
// serves SSE2, AVX2, AVX-512 and whatever else has vectors of four floats.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace ow {

#if defined(__AVX512F__)
constexpr int W = 16;   // lanes
constexpr int MR = 12;  // rows of a register block: MR x 2 accumulators of 32 registers
#elif defined(__AVX2__)
constexpr int W = 8;
constexpr int MR = 6;  // of 16 registers
#else
constexpr int W = 4;
constexpr int MR = 6;
#endif

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef float vf_any __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef uint16_t vh_any __attribute__((vector_size(W * 2), aligned(2), may_alias));

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

inline vf splat(float x) { return x - vf{}; }
inline vf load(const float* p) { return *reinterpret_cast<const vf_any*>(p); }
inline void store(float* p, vf x) { *reinterpret_cast<vf_any*>(p) = x; }
inline vf max(vf a, vf b) { return a > b ? a : b; }

template <class To, class From>
inline To bits_as(From x) {
  static_assert(sizeof(To) == sizeof(From), "same bits");
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

inline vf load(const bf16* p) {
  vu x = __builtin_convertvector(*reinterpret_cast<const vh_any*>(p), vu);
  return bits_as<vf>(x << 16);
}

inline vf load(const f16* p) {
#if defined(__F16C__) && defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__) && defined(__AVX2__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  vu x = __builtin_convertvector(*reinterpret_cast<const vh_any*>(p), vu);
  vu magnitude = (x & 0x7fffu) << 13;
  // Moves the exponent from half's bias to float's; a denormal half is a denormal float here, so
  // the product normalises it.
  vu scaled = bits_as<vu>(bits_as<vf>(magnitude) * 0x1p112f);
  vu special = magnitude >= 0x0f800000u ? vu{} + 0x7f800000u : vu{};
  return bits_as<vf>(scaled | special | (x & 0x8000u) << 16);
#endif
}

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return bits_as<float>(uint32_t(x.bits) << 16); }
inline float to_float(f16 x) {
  uint32_t magnitude = (x.bits & 0x7fffu) << 13;
  uint32_t scaled = bits_as<uint32_t>(bits_as<float>(magnitude) * 0x1p112f);
  if (magnitude >= 0x0f800000u) scaled |= 0x7f800000u;
  return bits_as<float>(scaled | (x.bits & 0x8000u) << 16);
}

// Both round to nearest, ties to even, as torch does.
inline void from_float(float x, float* out) { *out = x; }
inline void from_float(float x, bf16* out) {
  uint32_t u = bits_as<uint32_t>(x);
  bool nan = (u & 0x7fffffffu) > 0x7f800000u;
  out->bits = nan ? 0x7fc0 : uint16_t((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}
inline void from_float(float x, f16* out) {
  uint32_t u = bits_as<uint32_t>(x);
  uint16_t sign = (u >> 16) & 0x8000u;
  u &= 0x7fffffffu;
  if (u >= 0x47800000u) {  // 2^16 and beyond, infinity, NaN
    out->bits = sign | (u > 0x7f800000u ? 0x7e00 : 0x7c00);
  } else if (u < 0x38800000u) {  // below 2^-14: a denormal half; 0.5 aligns and rounds it
    out->bits = sign | uint16_t(bits_as<uint32_t>(bits_as<float>(u) + 0.5f) - 0x3f000000u);
  } else {
    out->bits = sign | uint16_t((u + 0xc8000fffu + ((u >> 13) & 1)) >> 13);
  }
}

template <int Bit, bool High, size_t... I>
inline vf exchange(vf a, vf b, std::index_sequence<I...>) {
  // Lane l of the low result: a[l] where bit `Bit` of l is clear, else b[l ^ Bit]; high likewise.
#define OW_LANE int(High ? ((I & Bit) ? W + I : (I ^ Bit)) : ((I & Bit) ? W + (I ^ Bit) : I))
#if defined(__clang__)
  return __builtin_shufflevector(a, b, OW_LANE...);
#else
  return __builtin_shuffle(a, b, vi{OW_LANE...});
#endif
#undef OW_LANE
}

template <int Bit>
inline void transpose_stage(vf (&x)[W]) {
  using lanes = std::make_index_sequence<W>;
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) {
    if (i & Bit) continue;
    vf a = x[i], b = x[i | Bit];
    x[i] = exchange<Bit, false>(a, b, lanes{});
    x[i | Bit] = exchange<Bit, true>(a, b, lanes{});
  }
}

inline void transpose(vf (&x)[W]) {
  transpose_stage<1>(x);
  transpose_stage<2>(x);
  if constexpr (W > 4) transpose_stage<4>(x);
  if constexpr (W > 8) transpose_stage<8>(x);
}

inline float sum(vf x) {
  float s = 0;
  for (int i = 0; i < W; ++i) s += x[i];
  return s;
}
inline float max(vf x) {
  float m = x[0];
  for (int i = 1; i < W; ++i) m = x[i] > m ? x[i] : m;
  return m;
}

// 2^x for x <= 0, within two units in the last place; exactly 1 at 0, exactly 0 below -126, and NaN
// stays NaN: a broken key must not pass for an unimportant one.
inline vf exp2(vf x) {
  constexpr float round = 0x1.8p23f;  // adding it leaves the nearest integer in the low bits
  vf clamped = x < -126.0f ? splat(-126.0f) : x;
  vf shifted = clamped + round;
  vf f = clamped - (shifted - round);  // [-0.5, 0.5]
  vf p = splat(1.5403530393381608e-4f);
  p = p * f + 1.3333558146428443e-3f;
  p = p * f + 9.618129107628477e-3f;
  p = p * f + 5.550410866482158e-2f;
  p = p * f + 2.402265069591007e-1f;
  p = p * f + 6.931471805599453e-1f;
  p = p * f + 1.0f;
  vf y = bits_as<vf>(bits_as<vi>(p) + (bits_as<vi>(shifted) << 23));
  return x < -126.0f ? vf{} : y;
}
inline float exp2(float x) { return exp2(splat(x))[0]; }

}  // namespace ow
