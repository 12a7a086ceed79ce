// x W^T + bias over a packed weight, on the threads of one parallel region.
//
// Few rows are bound by reading the weight: each panel is read once and expanded in registers. Many
// rows are bound by multiplying: a piece of a panel is expanded into the first-level cache once, and
// all rows of a task pass over it in register blocks, while their own piece stays in the second.
//
// Every element is one sum in ascending k, started at zero, the bias added last. So a row's result
// has the same bits alone and among any number of rows, with any number of threads, and the same for
// every format that holds the same values.

#include <algorithm>
#include <atomic>
#include <type_traits>

#include "abi.h"
#include "matmul.h"
#include "panels.h"
#include "scratch.h"

namespace ow {
namespace {

constexpr int FEW = 6;               // rows that are few: compiled one by one
constexpr int ROWS = 144;            // of a task: a multiple of MR; what they read stays in L2
constexpr int DEPTH = 6144 / PANEL;  // of a piece of a panel: 24 KiB of float32
constexpr int PANELS = 4;            // of a task over many rows
constexpr int64_t AHEAD = 2048;      // bytes of a panel that are fetched before they are read
constexpr int64_t SERIAL_MACS = 1 << 15;  // less work than this is not worth waking threads
static_assert(FEW <= MR && ROWS % MR == 0 && DEPTH % QUANT_GROUP == 0, "tasks are made of whole blocks");

thread_local Slab slab;

// A piece of a panel; at each step a little more of the next one is fetched. Left to themselves the
// reading of a piece and the passes of the rows over it would take turns.
struct Approached {
  const float* base;
  const char* ahead;
  int64_t step;
  const float* operator()(int k) const {
    __builtin_prefetch(ahead + k * step, 0, 2);
    return base + k * PANEL;
  }
};

// Panels that M rows pass over together: enough independent sums to hide their latency.
template <class Group, int M>
constexpr int abreast() {
  return std::max(1, std::min(Group::ABREAST, Group::SUMS / M));
}

// How far on what is wanted AHEAD bytes later lies: in the same panel, or in the one that will be
// read in its place. Panels of levels are so short that the processor, left to itself, is at the
// beginning of one most of the time.
template <class Group>
inline int64_t ahead_of(int64_t done, int64_t panel_bytes, int abreast) {
  const int64_t ahead = std::min(AHEAD / Group::GROUP_BYTES * Group::GROUP_BYTES, panel_bytes);
  return done + ahead < panel_bytes ? ahead : ahead + (abreast - 1) * panel_bytes;
}

template <int64_t Bytes>
inline void approach(const char* from) {
  for (int64_t at = 0; at < Bytes; at += 64) __builtin_prefetch(from + at);
}

// c[m][0..N * PANEL) = sum over k of x[m][k] * (N panels)[k], for M rows.
template <class Group, int M, int N>
inline void stream(const char* panels, int64_t panel_bytes, int depth, const float* x, int64_t ldx,
                   float* c, int64_t ldc) {
  vf acc[N][M][2] = {};
  Group group[N];
  for (int k = 0; k < depth; k += Group::GROUP, panels += Group::GROUP_BYTES) {
    const int64_t ahead = ahead_of<Group>(k / Group::GROUP * Group::GROUP_BYTES, panel_bytes, N);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const char* from = panels + n * panel_bytes;
      approach<Group::HEAD_BYTES>(from + ahead);
      group[n].open(from);
    }
    for (int run = 0; run < Group::GROUP; run += Group::RUN) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        const int64_t at = Group::HEAD_BYTES + run / Group::RUN * Group::RUN_BYTES;
        approach<Group::RUN_BYTES>(panels + n * panel_bytes + ahead + at);
        group[n].fetch(run);
      }
#pragma GCC unroll 8
      for (int step = 0; step < Group::RUN; ++step) {
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
          const vf b0 = group[n].value(step, 0), b1 = group[n].value(step, 1);
#pragma GCC unroll 16
          for (int m = 0; m < M; ++m) {
            const vf a = splat(x[m * ldx + k + run + step]);
            acc[n][m][0] += a * b0;
            acc[n][m][1] += a * b1;
          }
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) {
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      store(c + m * ldc + n * PANEL, acc[n][m][0]);
      store(c + m * ldc + n * PANEL + W, acc[n][m][1]);
    }
  }
}

template <class Group, int M, int N = abreast<Group, M>()>
void stream_panels(const char* panels, int64_t panel_bytes, int count, int depth, const float* x,
                   int64_t ldx, float* c, int64_t ldc) {
  for (; count >= N; count -= N, panels += N * panel_bytes, c += N * PANEL) {
    stream<Group, M, N>(panels, panel_bytes, depth, x, ldx, c, ldc);
  }
  if constexpr (N > 1) {
    if (count) stream_panels<Group, M, N - 1>(panels, panel_bytes, count, depth, x, ldx, c, ldc);
  }
}

template <class Group, int M = FEW>
void stream_rows(int rows, const char* panels, int64_t panel_bytes, int count, int depth,
                 const float* x, int64_t ldx, float* c, int64_t ldc) {
  if (rows == M) {
    stream_panels<Group, M>(panels, panel_bytes, count, depth, x, ldx, c, ldc);
  } else if constexpr (M > 1) {
    stream_rows<Group, M - 1>(rows, panels, panel_bytes, count, depth, x, ldx, c, ldc);
  }
}

// What is compiled for each format.
struct FormatCode {
  void (*stream)(int rows, const char* panels, int64_t panel_bytes, int count, int depth,
                 const float* x, int64_t ldx, float* c, int64_t ldc);
  void (*expand)(const char* from, int depth, float* to);  // null: they are float32 already
  int group, abreast;
  int64_t group_bytes;
};

template <class Group>
constexpr FormatCode format_code() {
  return {stream_rows<Group>, std::is_same_v<Group, Dense<float>> ? nullptr : expand<Group>,
          Group::GROUP, Group::ABREAST, Group::GROUP_BYTES};
}

// In the order of abi.h.
constexpr FormatCode FORMATS[] = {format_code<Dense<float>>(), format_code<Dense<bf16>>(),
                                  format_code<Dense<f16>>(), format_code<Q4Group<true>>(),
                                  format_code<Q8_0Group>(),  format_code<Q4Group<false>>()};

template <class T>
void widen(const void* from, int64_t count, float* to) {
  const T* x = static_cast<const T*>(from);
  int64_t i = 0;
  for (; i + W <= count; i += W) store(to + i, load(x + i));
  for (; i < count; ++i) to[i] = to_float(x[i]);
}

template <class T>
void narrow(const float* sums, const float* bias, int64_t count, void* to) {
  T* out = static_cast<T*>(to);
  if (bias) {
    for (int64_t i = 0; i < count; ++i) from_float(sums[i] + bias[i], out + i);
  } else {
    for (int64_t i = 0; i < count; ++i) from_float(sums[i], out + i);
  }
}

// What is compiled for each type of x and out.
struct TypeCode {
  void (*widen)(const void* from, int64_t count, float* to);  // null: they are float32 already
  void (*narrow)(const float* sums, const float* bias, int64_t count, void* to);
  int64_t size;
};

constexpr TypeCode TYPES[] = {{nullptr, narrow<float>, 4},
                              {widen<bf16>, narrow<bf16>, 2},
                              {widen<f16>, narrow<f16>, 2}};

class Linear {
 public:
  explicit Linear(const OwLinear& args)
      : a(args), format(FORMATS[args.format]), type(TYPES[args.dtype]) {
    num_panels = (a.num_outputs + PANEL - 1) / PANEL;
    panel_bytes = bytes_of(a.num_inputs);
  }

  bool run() {
    if (a.num_rows == 0 || a.num_outputs == 0) return true;
    const double macs = double(a.num_rows) * a.num_inputs * a.num_outputs;
    unsigned threads = a.parallel && macs > SERIAL_MACS ? std::max(1, a.num_threads) : 1;
    divide(threads);
    threads = std::min<int64_t>(threads, num_tasks);

    Carver measure{nullptr};
    carve(measure, threads);
    char* memory = slab.reserve(measure.used);
    if (!memory) return false;
    Carver carver{memory};
    carve(carver, threads);
    take_rows();
    if (threads > 1) {
      a.parallel([](void* self) { static_cast<Linear*>(self)->work(); }, this, threads, 0);
    } else {
      work();
    }
    return true;
  }

 private:
  struct Scratch {
    float* sums;      // [task_rows][task_panels * PANEL]
    float* expanded;  // [DEPTH][PANEL]
  };

  const OwLinear& a;
  const FormatCode& format;
  const TypeCode& type;
  int64_t num_panels, panel_bytes;
  int64_t task_rows = 0, task_panels = 0, num_columns = 0, num_tasks = 0;
  const float* x = nullptr;
  int64_t ldx = 0;
  float* converted = nullptr;  // x in float32, where it is not
  char* scratch = nullptr;
  int64_t scratch_bytes = 0;
  std::atomic<int64_t> next_task{0};
  std::atomic<int32_t> next_worker{0};

  bool few() const { return a.num_rows <= FEW; }

  int64_t bytes_of(int64_t depth) const { return depth / format.group * format.group_bytes; }

  // A task is a run of rows by a run of panels, as many for one thread as for another. Few rows have
  // four tasks a thread, so that one that was held up does not hold up all.
  void divide(int64_t threads) {
    const int64_t row_runs = few() ? 1 : (a.num_rows + ROWS - 1) / ROWS;
    task_rows = few() ? a.num_rows : round_up((a.num_rows + row_runs - 1) / row_runs, MR);
    num_columns = few() ? 4 * threads : round_up((num_panels + PANELS - 1) / PANELS, threads);
    num_columns = std::min(num_columns, num_panels);
    task_panels = (num_panels + num_columns - 1) / num_columns;  // at most
    num_tasks = (a.num_rows + task_rows - 1) / task_rows * num_columns;
  }

  void carve(Carver& c, int64_t threads) {
    converted = c.take<float>(type.widen ? a.num_rows * a.num_inputs : 0);
    Carver one{nullptr};
    carve_scratch(one);
    scratch_bytes = one.used;
    scratch = c.take<char>(threads * scratch_bytes);
  }

  Scratch carve_scratch(Carver& c) const {
    Scratch s;
    s.sums = c.take<float>(task_rows * task_panels * PANEL);
    s.expanded = c.take<float>(few() ? 0 : DEPTH * PANEL);
    return s;
  }

  void take_rows() {
    x = static_cast<const float*>(a.x);
    ldx = a.x_stride;
    if (!type.widen) return;
    for (int64_t row = 0; row < a.num_rows; ++row) {
      type.widen(static_cast<const char*>(a.x) + row * a.x_stride * type.size, a.num_inputs,
                 converted + row * a.num_inputs);
    }
    x = converted;
    ldx = a.num_inputs;
  }

  void work() {
    Carver carver{scratch + next_worker.fetch_add(1) * scratch_bytes};
    const Scratch s = carve_scratch(carver);
    for (;;) {
      const int64_t task = next_task.fetch_add(1);
      if (task >= num_tasks) return;
      const int64_t row = task / num_columns * task_rows, column = task % num_columns;
      const int64_t panel = column * num_panels / num_columns;
      const int rows = std::min(task_rows, a.num_rows - row);
      const int panels = (column + 1) * num_panels / num_columns - panel;
      const char* from = static_cast<const char*>(a.panels) + panel * panel_bytes;
      const float* own = x + row * ldx;
      if (few()) {
        format.stream(rows, from, panel_bytes, panels, a.num_inputs, own, ldx, s.sums,
                      panels * PANEL);
      } else {
        multiply(rows, panels, from, own, s);
      }
      finish(row, rows, panel * PANEL, panels * PANEL, s.sums);
    }
  }

  void multiply(int rows, int panels, const char* from, const float* own, const Scratch& s) const {
    const int pieces = (a.num_inputs + DEPTH - 1) / DEPTH;
    const int deep = round_up((a.num_inputs + pieces - 1) / pieces, QUANT_GROUP);
    for (int k = 0; k < a.num_inputs; k += deep) {
      const int depth = std::min(deep, a.num_inputs - k);
      for (int p = 0; p < panels; ++p) {
        const char* piece = from + p * panel_bytes + bytes_of(k);
        const char* next = piece + panel_bytes;
        if (p + 1 == panels) next = from + bytes_of(k + depth < a.num_inputs ? k + depth : 0);
        if (format.expand) format.expand(piece, depth, s.expanded);
        const float* values = format.expand ? s.expanded : reinterpret_cast<const float*>(piece);
        pass(rows, depth, own + k, values, k > 0, next, s.sums + p * PANEL, panels * PANEL);
      }
    }
  }

  // All rows over one piece of a panel, while the next piece is brought near.
  void pass(int rows, int depth, const float* own, const float* values, bool further,
            const char* next, float* sums, int64_t ld) const {
    float one[MR];
    std::fill_n(one, MR, 1.0f);
    const int blocks = (rows + MR - 1) / MR;
    const int64_t step = (bytes_of(depth) + blocks * depth - 1) / (blocks * depth);
    for (int i = 0, row = 0; i < blocks; ++i) {
      const int count = (rows - row) / (blocks - i);
      const Approached b{values, next + i * depth * step, step};
      const float* x = own + row * ldx;
      float* c = sums + row * ld;
      if (further) {
        column_block<true>(count, depth, x, ldx, b, c, ld, one);
      } else {
        column_block<false>(count, depth, x, ldx, b, c, ld, one);
      }
      row += count;
    }
  }

  void finish(int64_t row, int rows, int64_t column, int64_t columns, const float* sums) const {
    const int64_t width = std::min(columns, a.num_outputs - column);
    const float* bias = a.bias ? a.bias + column : nullptr;
    for (int64_t r = row; r < row + rows; ++r, sums += columns) {
      type.narrow(sums, bias, width,
                  static_cast<char*>(a.out) + (r * a.out_stride + column) * type.size);
    }
  }
};

}  // namespace
}  // namespace ow

extern "C" {

// Returns 0, or 1 where memory for the work could not be had, or 2 for an unknown dtype or format.
__attribute__((visibility("default"))) int ow_linear(const ow::OwLinear* args) {
  if (args->dtype < ow::FLOAT32 || args->dtype > ow::FLOAT16) return 2;
  if (args->format < ow::FLOAT32 || args->format > ow::Q4_0) return 2;
  return !ow::Linear(*args).run();
}

// Outputs of a panel in this build.
__attribute__((visibility("default"))) int32_t ow_panel_width() { return ow::PANEL; }
}
