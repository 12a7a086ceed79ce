// Working memory of a call: one buffer that grows, and pieces of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>

namespace ow {

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// A growing buffer of the calling thread. Workers get their slices of it.
struct Slab {
  void* memory = nullptr;
  size_t size = 0;
  ~Slab() { std::free(memory); }
  char* reserve(size_t bytes) {
    if (bytes > size) {
      std::free(memory);
      size = 0;
      memory = std::aligned_alloc(64, round_up(bytes + bytes / 4, 4096));
      if (memory) size = bytes + bytes / 4;
    }
    return static_cast<char*>(memory);
  }
};

// Hands out 64-byte aligned pieces; with no memory behind it, it only measures.
struct Carver {
  char* base;
  size_t used = 0;
  template <class P>
  P* take(int64_t count) {
    P* piece = reinterpret_cast<P*>(base + used);
    used += round_up(count * int64_t(sizeof(P)), 64);
    return piece;
  }
};

}  // namespace ow
