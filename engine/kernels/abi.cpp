// The sizes of the structures as this build lays them out, for the loader to compare.

#include "abi.h"

extern "C" {

// 0 past the last one.
__attribute__((visibility("default"))) int64_t ow_abi(int32_t index) {
  constexpr int64_t sizes[] = {sizeof(ow::OwAttention), sizeof(ow::OwWrite), sizeof(ow::OwLinear)};
  return index < int32_t(sizeof sizes / sizeof *sizes) ? sizes[index] : 0;
}
}
