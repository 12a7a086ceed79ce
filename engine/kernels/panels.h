// A weight [output, input] as it lies packed: panels of PANEL outputs one behind the other, each as
// deep as there are inputs, so that it is read from front to end once.
//
//   float32, bfloat16, float16   [panel][k][PANEL]
//   q4_1   [panel][k / 32] of {f16 scale[PANEL], f16 minimum[PANEL], u32 words[4][PANEL]}
//   q4_0   [panel][k / 32] of {f16 scale[PANEL], u32 words[4][PANEL]}
//   q8_0   [panel][k / 32] of {f16 scale[PANEL], u32 words[8][PANEL]}
//
// A word holds consecutive levels along k of one output, the first in its lowest bits: eight of 4
// bits, worth scale * level + minimum (q4_0: scale * level - 8 * scale), or four signed of 8 bits,
// worth scale * level. A lane is an output from the word to the sum: nothing is shuffled. Outputs
// behind the last are zeros.
//
// A reader `open`s a group of GROUP steps, `fetch`es RUN steps of it, and tells their values. Up to
// ABREAST panels are read at once, while rows x panels are SUMS at most: beside more of them there
// are no registers for what the reader holds, and fetching that again costs more than waiting. The
// products of scale and level are exact in float32, so a value has the same bits fused or not. (Of
// q4_0 the sum is exact, too; only a zero may have another sign, which no sum of products shows.)
#pragma once

#include "simd.h"

namespace ow {

constexpr int PANEL = 2 * W;
constexpr int QUANT_GROUP = 32;

typedef uint32_t vu_any __attribute__((vector_size(W * 4), aligned(4), may_alias));

inline vu load_words(const char* p) { return *reinterpret_cast<const vu_any*>(p); }
inline vf to_floats(vi x) { return __builtin_convertvector(x, vf); }

template <class T>
struct Dense {
  static constexpr int GROUP = 1, RUN = 1, ABREAST = 4, SUMS = MR;
  // Nothing to fetch ahead: the processor does that better where there is nothing to expand.
  static constexpr int64_t HEAD_BYTES = 0, RUN_BYTES = 0, GROUP_BYTES = PANEL * sizeof(T);
  vf part[2];

  void open(const char* group) {
    part[0] = load(reinterpret_cast<const T*>(group));
    part[1] = load(reinterpret_cast<const T*>(group) + W);
  }
  void fetch(int) {}
  vf value(int, int half) const { return part[half]; }
};

template <bool Minimum>
struct Q4Group {
  static constexpr int GROUP = QUANT_GROUP, RUN = 8, ABREAST = 2, SUMS = MR / 3;
  static constexpr int64_t HEAD_BYTES = PANEL * (Minimum ? 4 : 2), RUN_BYTES = PANEL * 4,
                           GROUP_BYTES = HEAD_BYTES + GROUP / RUN * RUN_BYTES;
  const char* levels;
  vf scale[2], minimum[2];
  vu words[2];

  void open(const char* group) {
    const f16* head = reinterpret_cast<const f16*>(group);
    for (int half = 0; half < 2; ++half) {
      scale[half] = load(head + half * W);
      minimum[half] = Minimum ? load(head + PANEL + half * W) : scale[half] * -8.0f;
    }
    levels = group + HEAD_BYTES;
  }
  void fetch(int k) {
    words[0] = load_words(levels + k / RUN * RUN_BYTES);
    words[1] = load_words(levels + k / RUN * RUN_BYTES + W * 4);
  }
  vf value(int step, int half) const {
    return to_floats(vi(words[half] >> 4 * step & 15)) * scale[half] + minimum[half];
  }
};

struct Q8_0Group {
  static constexpr int GROUP = QUANT_GROUP, RUN = 4, ABREAST = 2, SUMS = MR / 3;
  static constexpr int64_t HEAD_BYTES = PANEL * 2, RUN_BYTES = PANEL * 4,
                           GROUP_BYTES = HEAD_BYTES + GROUP / RUN * RUN_BYTES;
  const char* levels;
  vf scale[2];
  vu words[2];

  void open(const char* group) {
    const f16* head = reinterpret_cast<const f16*>(group);
    for (int half = 0; half < 2; ++half) scale[half] = load(head + half * W);
    levels = group + HEAD_BYTES;
  }
  void fetch(int k) {
    words[0] = load_words(levels + k / RUN * RUN_BYTES);
    words[1] = load_words(levels + k / RUN * RUN_BYTES + W * 4);
  }
  vf value(int step, int half) const {
    return to_floats(vi(words[half] << (24 - 8 * step)) >> 24) * scale[half];
  }
};

// Steps [0, depth) of a panel as float32 [depth][PANEL].
template <class Group>
void expand(const char* from, int depth, float* to) {
  Group group;
  for (int k = 0; k < depth; k += Group::GROUP, from += Group::GROUP_BYTES) {
    group.open(from);
    for (int run = 0; run < Group::GROUP; run += Group::RUN) {
      group.fetch(run);
#pragma GCC unroll 8
      for (int step = 0; step < Group::RUN; ++step, to += PANEL) {
        store(to, group.value(step, 0));
        store(to + W, group.value(step, 1));
      }
    }
  }
}

}  // namespace ow
