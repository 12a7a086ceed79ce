// Paged attention over the KV pages in place, and the write of new keys and values into them.
//
// One code path serves a decoding row and a prompt chunk. A *tile* is a few consecutive rows of a
// sequence for one or more heads of keys and values, with the `group` of query heads that share
// each: M = rows x group query vectors a head. Its context is walked in *partitions* of PARTITION
// tokens, each in *key tiles* of KEYS tokens, in each of them head by head, as the pages lie, with
// an online softmax: scores = Q K^T, weights = 2^(scores - running maximum), acc += weights V, in
// float32. Partitions are merged in their order.
//
// Tile and partition bounds are multiples of an absolute position, a key outside a row's sight
// weighs exactly 0, and every sum runs in one order. So a row's result has the same bits alone,
// batched, in whatever chunk, with any number of threads, and whether partitions were computed by
// one thread or by several.

#include <algorithm>
#include <atomic>
#include <limits>
#include <type_traits>

#include "abi.h"
#include "matmul.h"
#include "scratch.h"
#include "simd.h"

namespace ow {

constexpr int KEYS = 64;
constexpr int PARTITION = 256;
constexpr int TILE_ROWS = 96;  // query vectors of a tile: a multiple of MR that stays in L2
constexpr float EMPTY = -std::numeric_limits<float>::infinity();
constexpr int64_t SERIAL_MACS = 100000;  // less work than this is not worth waking threads

namespace {

thread_local Slab slab;

// ------------------------------------------------------------------------------------ a tile

struct Task {
  int32_t seq;
  int32_t head, heads;  // of keys and values
  int32_t row, rows;    // rows of the sequence within this step
  int32_t first, last;  // partitions [first, last)
  int32_t split;        // index of the split tile it belongs to, or -1
};

// Positions [start, end) of a context; those before `first` are out of sight of all rows.
struct KeyTile {
  int32_t start, first, end;
};

// Result of one partition (or of several merged): weights are 2^(score - peak).
struct Partial {
  float* acc;   // [heads * M][padded]
  float* peak;  // [heads * M]
  float* mass;  // [heads * M]
};

struct Split {
  Task whole;
  float* partials;  // [last - first] of partial_floats each
  std::atomic<int32_t> missing;
};

template <class T>
struct Scratch {
  float* query;   // [heads * M][padded], scaled
  float* keys;    // [KEYS / 2W][padded][2W]: transposed, in panels of 2W keys
  float* rows;    // [KEYS][padded]: converted or padded pages
  float* scores;  // [M][KEYS]
  float* decay;   // [M]
  float* zeros;   // [padded]
  const float** row;  // [KEYS]
  const T** place;    // [KEYS]: of the key tile's keys in the first head
  const T** next_place;
  Partial part, total;
};

template <class T>
class Attention {
 public:
  explicit Attention(const OwAttention& args)
      : a(args),
        group(args.num_heads / args.pages.num_kv_heads),
        tile_rows(std::max(1, TILE_ROWS / group)),
        max_heads(args.pages.num_kv_heads),
        padded(round_up(args.pages.head_dim, 2 * W)) {
    constexpr float log2e = 1.44269504088896340736f;
    // Scores are kept in powers of two. With a soft cap that factor comes after the cap.
    query_scale = a.softcap > 0 ? a.scale / a.softcap : a.scale * log2e;
    cap = a.softcap * log2e;
  }

  bool run() {
    int64_t macs = 0;
    tiles([&](const Task&, int64_t cost) { macs += cost; });
    if (macs == 0) return true;
    unsigned threads = a.parallel && macs > SERIAL_MACS ? std::max(1, a.num_threads) : 1;
    int64_t fair = threads > 1 ? macs / (4 * threads) : std::numeric_limits<int64_t>::max();
    // Only tiles of more than a fair share are split. Long runs of memory are read faster, so heads
    // are parted only where there are too few partitions to go round.
    auto splits_up = [&](const Task& t, int64_t cost) {
      return cost > fair && t.last - t.first > 1;
    };
    int64_t num_tasks, num_splits, num_partials;
    for (;; max_heads = (max_heads + 1) / 2) {
      num_tasks = num_splits = num_partials = 0;
      tiles([&](const Task& t, int64_t cost) {
        bool split = splits_up(t, cost);
        num_tasks += split ? t.last - t.first : 1;
        num_splits += split;
        num_partials += split ? t.last - t.first : 0;
      });
      if (max_heads == 1 || num_tasks >= 4 * threads || threads == 1) break;
    }
    threads = std::min<int64_t>(threads, num_tasks);

    Carver measure{nullptr};
    carve(measure, threads, num_tasks, num_splits, num_partials);
    char* memory = slab.reserve(measure.used);
    if (!memory) return false;
    Carver carver{memory};
    carve(carver, threads, num_tasks, num_splits, num_partials);

    num_tasks = num_splits = num_partials = 0;
    tiles([&](const Task& tile, int64_t cost) {
      if (!splits_up(tile, cost)) {
        tasks[num_tasks++] = tile;
        return;
      }
      Split& split = splits[num_splits];
      split.whole = tile;
      split.partials = partials + num_partials * partial_floats();
      split.missing.store(tile.last - tile.first, std::memory_order_relaxed);
      for (int p = tile.first; p < tile.last; ++p, ++num_partials) {
        Task task = tile;
        task.first = p, task.last = p + 1, task.split = num_splits;
        tasks[num_tasks++] = task;
      }
      ++num_splits;
    });
    task_count = num_tasks;
    if (threads > 1) {
      a.parallel([](void* self) { static_cast<Attention*>(self)->work(); }, this, threads, 0);
    } else {
      work();
    }
    return true;
  }

 private:
  // Keys that will be wanted next: rows[i] + offset.
  struct Ahead {
    const T* const* rows;
    int32_t count;
    int64_t offset;
  };

  const OwAttention& a;
  const int32_t group, tile_rows;
  int32_t max_heads;  // of a tile
  const int64_t padded;
  float query_scale, cap;
  Task* tasks = nullptr;
  Split* splits = nullptr;
  float* partials = nullptr;
  char* scratch = nullptr;
  int64_t scratch_bytes = 0, task_count = 0;
  std::atomic<int64_t> next_task{0};
  std::atomic<int32_t> next_worker{0};

  int64_t max_m() const { return int64_t(tile_rows) * group; }
  int64_t partial_floats() const { return round_up(max_m() * (padded + 2), 16); }

  // Calls f(tile, cost) for every tile of the batch; cost in multiply-adds.
  template <class F>
  void tiles(F f) const {
    for (int s = 0; s < a.num_seqs; ++s) {
      int rows = a.query_start[s + 1] - a.query_start[s];
      int before = a.context_len[s] - rows;
      const int together = std::max(
          1, std::min(max_heads, TILE_ROWS / (group * std::max(1, std::min(rows, tile_rows)))));
      for (int head = 0; head < a.pages.num_kv_heads; head += together) {
        const int heads = std::min(together, a.pages.num_kv_heads - head);
        for (int row = 0; row < rows; row += tile_rows) {
          int count = std::min(tile_rows, rows - row);
          int end = before + row + count, start = first_seen(before + row);
          int last = (end + PARTITION - 1) / PARTITION;
          f(Task{s, head, heads, row, count, start / PARTITION, last, -1},
            int64_t(end - start) * count * heads * group * padded * 2);
        }
      }
    }
  }

  int first_seen(int position) const {
    return a.window > 0 ? std::max(0, position - a.window + 1) : 0;
  }

  void carve(Carver& c, int threads, int64_t num_tasks, int64_t num_splits, int64_t num_partials) {
    tasks = c.take<Task>(num_tasks);
    splits = c.take<Split>(num_splits);
    partials = c.take<float>(num_partials * partial_floats());
    Carver one{nullptr};
    carve_scratch(one);
    scratch_bytes = one.used;
    scratch = c.take<char>(threads * scratch_bytes);
  }

  Scratch<T> carve_scratch(Carver& c) const {
    Scratch<T> s;
    s.query = c.take<float>(max_m() * padded);
    s.keys = c.take<float>(KEYS * padded);
    s.rows = c.take<float>(KEYS * padded);
    s.scores = c.take<float>(max_m() * KEYS);
    s.decay = c.take<float>(max_m());
    s.zeros = c.take<float>(padded);
    s.row = c.take<const float*>(KEYS);
    s.place = c.take<const T*>(KEYS);
    s.next_place = c.take<const T*>(KEYS);
    for (Partial* p : {&s.part, &s.total}) {
      p->acc = c.take<float>(max_m() * padded);
      p->peak = c.take<float>(max_m());
      p->mass = c.take<float>(max_m());
    }
    return s;
  }

  Partial partial_at(float* memory) const {
    return {memory, memory + max_m() * padded, memory + max_m() * (padded + 1)};
  }

  void work() {
    Carver carver{scratch + next_worker.fetch_add(1) * scratch_bytes};
    Scratch<T> s = carve_scratch(carver);
    std::fill_n(s.zeros, padded, 0.0f);
    for (;;) {
      int64_t index = next_task.fetch_add(1);
      if (index >= task_count) return;
      const Task& task = tasks[index];
      const int vectors = task.heads * task.rows * group;
      load_query(task, s);
      if (task.split < 0) {
        std::fill_n(s.total.peak, vectors, EMPTY);
        for (int p = task.first; p < task.last; ++p) {
          partition(task, p, s, s.part);
          merge(s.total, s.part, vectors);
        }
        finish(task, s.total);
        continue;
      }
      Split& split = splits[task.split];
      float* own = split.partials + (task.first - split.whole.first) * partial_floats();
      partition(task, task.first, s, partial_at(own));
      if (split.missing.fetch_sub(1, std::memory_order_acq_rel) > 1) continue;
      std::fill_n(s.total.peak, vectors, EMPTY);
      for (int p = 0; p < split.whole.last - split.whole.first; ++p) {
        merge(s.total, partial_at(split.partials + p * partial_floats()), vectors);
      }
      finish(task, s.total);
    }
  }

  void load_query(const Task& t, Scratch<T>& s) const {
    const int64_t first_row = a.query_start[t.seq] + t.row;
    const int dim = a.pages.head_dim;
    float* to = s.query;
    for (int head = t.head; head < t.head + t.heads; ++head) {
      for (int r = 0; r < t.rows; ++r) {
        for (int g = 0; g < group; ++g, to += padded) {
          const T* from = static_cast<const T*>(a.query) +
                          (head * group + g) * a.query_head_stride +
                          (first_row + r) * a.query_row_stride;
          for (int d = 0; d < dim; ++d) to[d] = to_float(from[d]) * query_scale;
          std::fill(to + dim, to + padded, 0.0f);
        }
      }
    }
  }

  // Points rows[i] at the tile's first head's key of position start + i, up to `end`.
  void locate(const Task& t, int start, int end, const T** rows) const {
    const OwPages& p = a.pages;
    const int32_t* table = a.block_tables + t.seq * a.table_stride;
    const T* head = static_cast<const T*>(p.keys) + t.head * p.head_stride;
    int page = start / p.block_size, offset = start % p.block_size;
    while (start < end) {
      const T* from = head + table[page] * p.block_stride;
      const int stop = std::min(p.block_size, offset + end - start);
      start += stop - offset;
      for (; offset < stop; ++offset) *rows++ = from + offset * p.token_stride;
      offset = 0;
      ++page;
    }
  }

  // Pages lie apart in memory, and at the start of each the hardware's prefetcher starts anew.
  void prefetch(const T* const* rows, int count, int64_t offset) const {
    for (int k = 0; k < count; ++k) {
      const char* line = reinterpret_cast<const char*>(rows[k] + offset);
      for (const char* end = line + a.pages.head_dim * sizeof(T); line < end; line += 64) {
        __builtin_prefetch(line, 0, 2);
      }
    }
  }

  const float* float_row(const T* from, float* to) const {
    const int dim = a.pages.head_dim;
    if constexpr (std::is_same_v<T, float>) {
      if (dim == padded) return from;
    }
    int d = 0;
    for (; d + W <= dim; d += W) store(to + d, load(from + d));
    for (; d < dim; ++d) to[d] = to_float(from[d]);
    std::fill(to + dim, to + padded, 0.0f);
    return to;
  }

  // Lays `count` rows (a multiple of 2W) out as panels of 2W keys, dimension by dimension.
  void transpose_keys(int count, Scratch<T>& s, Ahead ahead) const {
    for (int k = 0; k < count; k += W) {
      prefetch(ahead.rows + k, std::min(W, ahead.count - k), ahead.offset);
      float* panel = s.keys + (k / (2 * W)) * padded * 2 * W + k % (2 * W);
      for (int64_t d = 0; d < padded; d += W) {
        vf x[W];
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) x[i] = load(s.row[k + i] + d);
        transpose(x);
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) store(panel + (d + i) * 2 * W, x[i]);
      }
    }
  }

  void partition(const Task& t, int index, Scratch<T>& s, Partial out) const {
    const int m = t.rows * group;
    const int before = a.context_len[t.seq] - (a.query_start[t.seq + 1] - a.query_start[t.seq]);
    const int seen_from = first_seen(before + t.row), seen_to = before + t.row + t.rows;
    const int from = std::max(index * PARTITION, seen_from / KEYS * KEYS);
    const int to = std::min((index + 1) * PARTITION, seen_to);
    std::fill_n(out.peak, t.heads * m, EMPTY);
    std::fill_n(out.mass, t.heads * m, 0.0f);
    std::fill_n(out.acc, t.heads * m * padded, 0.0f);
    // Keys before the window may be in pages that were given back: never read them.
    KeyTile tile{from, std::max(from, seen_from), std::min(from + KEYS, to)};
    locate(t, tile.first, tile.end, s.place);
    while (tile.start < to) {
      const int start = tile.start + KEYS;
      const KeyTile next{start, start, std::min(start + KEYS, to)};
      locate(t, next.first, next.end, s.next_place);
      for (int h = 0; h < t.heads; ++h) {
        const Ahead ahead =
            h + 1 < t.heads
                ? Ahead{s.place, tile.end - tile.first, (h + 1) * a.pages.head_stride}
                : Ahead{s.next_place, std::max(0, next.end - next.start), 0};
        const Partial head{out.acc + h * m * padded, out.peak + h * m, out.mass + h * m};
        key_tile(t, h, before + t.row, tile, ahead, s, head);
      }
      std::swap(s.place, s.next_place);
      tile = next;
    }
  }

  // One key tile of the h-th head; `position` is that of the tile's first row.
  void key_tile(const Task& t, int h, int position, KeyTile tile, Ahead ahead, Scratch<T>& s,
                Partial out) const {
    const int m = t.rows * group, width = tile.end - tile.start;
    const int columns = round_up(width, 2 * W);
    const int64_t to_values =
        static_cast<const T*>(a.pages.values) - static_cast<const T*>(a.pages.keys);
    const int64_t to_head = h * a.pages.head_stride;
    load_tile(tile, to_head, columns, s);
    transpose_keys(columns, s, ahead);
    const float* query = s.query + h * m * padded;
    for (int c = 0; c < columns; c += 2 * W) {
      column_block<false>(m, padded, query, padded, Panel{s.keys + c * padded}, s.scores + c, KEYS,
                          s.decay);
    }
    for (int r = 0; r < t.rows; ++r) {
      const int sees_to = std::min(width, position + r + 1 - tile.start);
      const int sees_from = std::max(tile.first, first_seen(position + r)) - tile.start;
      for (int g = 0; g < group; ++g) {
        const int row = r * group + g;
        s.decay[row] = softmax(s.scores + row * KEYS, columns, sees_from, sees_to, out.peak[row],
                               out.mass[row]);
      }
    }
    load_tile(tile, to_head + to_values, columns, s);
    const int step = (2 * W * KEYS + padded - 1) / padded;
    for (int64_t d = 0; d < padded; d += 2 * W) {
      const int k = d / (2 * W) * step;
      prefetch(ahead.rows + k, std::min(step, ahead.count - k), ahead.offset + to_values);
      column_block<true>(m, width, s.scores, KEYS, Scattered{s.row, d}, out.acc + d, padded,
                         s.decay);
    }
  }

  // Points s.row at the tile's rows as float32; what is out of sight, up to `columns`, is zeros.
  void load_tile(KeyTile tile, int64_t offset, int columns, Scratch<T>& s) const {
    const int skip = tile.first - tile.start;
    std::fill_n(s.row, skip, s.zeros);
    for (int k = 0; k < tile.end - tile.first; ++k) {
      s.row[skip + k] = float_row(s.place[k] + offset, s.rows + k * padded);
    }
    std::fill(s.row + (tile.end - tile.start), s.row + columns, s.zeros);
  }

  // Turns one row of scores into weights; only [from, to) is in sight. Returns what the weights
  // summed up so far must be multiplied by.
  float softmax(float* scores, int columns, int from, int to, float& peak, float& mass) const {
    if (from >= to) {
      std::fill_n(scores, columns, 0.0f);
      return 1.0f;
    }
    vf lane;
    for (int i = 0; i < W; ++i) lane[i] = i;
    const bool masked = from > 0 || to < columns;
    vf top = splat(EMPTY);
    for (int c = 0; c < columns; c += W) {
      vf x = load(scores + c);
      if (a.softcap > 0) x = capped(x);
      if (masked) {
        vf at = lane + float(c);
        x = at < float(from) ? splat(EMPTY) : x;
        x = at < float(to) ? x : splat(EMPTY);
      }
      store(scores + c, x);
      top = max(x, top);
    }
    const float old = peak, now = std::max(old, max(top));
    vf total{};
    for (int c = 0; c < columns; c += W) {
      vf weight = exp2(load(scores + c) - now);
      store(scores + c, weight);
      total += weight;
    }
    const float decay = now == old ? 1.0f : exp2(old - now);
    peak = now;
    mass = mass * decay + sum(total);
    return decay;
  }

  // softcap * tanh(x), in powers of two; 1 - 2 / (e^2|x| + 1) by way of 2^-y to stay in range.
  vf capped(vf x) const {
    constexpr float two_log2e = 2.88539008177792681472f;
    vf magnitude = x < 0.0f ? -x : x;
    vf e = exp2(magnitude * -two_log2e);
    vf t = (1.0f - e) / (1.0f + e);
    return (x < 0.0f ? -t : t) * cap;
  }

  void merge(Partial& into, const Partial& from, int m) const {
    for (int row = 0; row < m; ++row) {
      if (from.peak[row] == EMPTY) continue;
      float* to_acc = into.acc + row * padded;
      const float* from_acc = from.acc + row * padded;
      if (into.peak[row] == EMPTY) {
        std::copy_n(from_acc, padded, to_acc);
        into.peak[row] = from.peak[row];
        into.mass[row] = from.mass[row];
        continue;
      }
      const float peak = std::max(into.peak[row], from.peak[row]);
      const float x = exp2(into.peak[row] - peak), y = exp2(from.peak[row] - peak);
      for (int64_t d = 0; d < padded; d += W) {
        store(to_acc + d, load(to_acc + d) * x + load(from_acc + d) * y);
      }
      into.peak[row] = peak;
      into.mass[row] = into.mass[row] * x + from.mass[row] * y;
    }
  }

  void finish(const Task& t, const Partial& result) const {
    const int64_t first_row = a.query_start[t.seq] + t.row;
    const int dim = a.pages.head_dim;
    int64_t row = 0;
    for (int head = t.head; head < t.head + t.heads; ++head) {
      for (int r = 0; r < t.rows; ++r) {
        T* to = static_cast<T*>(a.out) + ((first_row + r) * a.num_heads + head * group) * dim;
        for (int g = 0; g < group; ++g, ++row, to += dim) {
          const float scale = 1.0f / result.mass[row];
          for (int d = 0; d < dim; ++d) from_float(result.acc[row * padded + d] * scale, to + d);
        }
      }
    }
  }
};

template <class T>
void write(const OwWrite& a) {
  const OwPages& p = a.pages;
  const size_t bytes = p.head_dim * sizeof(T);
  for (int64_t row = 0; row < a.num_rows; ++row) {
    const int64_t at = a.slots[row] / p.block_size * p.block_stride +
                       a.slots[row] % p.block_size * p.token_stride;
    for (int64_t head = 0; head < p.num_kv_heads; ++head) {
      std::memcpy(static_cast<T*>(p.keys) + at + head * p.head_stride,
                  static_cast<const T*>(a.key) + row * a.key_row_stride + head * a.key_head_stride,
                  bytes);
      std::memcpy(
          static_cast<T*>(p.values) + at + head * p.head_stride,
          static_cast<const T*>(a.value) + row * a.value_row_stride + head * a.value_head_stride,
          bytes);
    }
  }
}

}  // namespace
}  // namespace ow

extern "C" {

// Both return 0, or 1 where memory for the work could not be had, or 2 for an unknown dtype.
__attribute__((visibility("default"))) int ow_attend(const ow::OwAttention* args) {
  switch (args->pages.dtype) {
    case ow::FLOAT32:
      return !ow::Attention<float>(*args).run();
    case ow::BFLOAT16:
      return !ow::Attention<ow::bf16>(*args).run();
    case ow::FLOAT16:
      return !ow::Attention<ow::f16>(*args).run();
  }
  return 2;
}

__attribute__((visibility("default"))) int ow_write_kv(const ow::OwWrite* args) {
  if (args->pages.dtype < ow::FLOAT32 || args->pages.dtype > ow::FLOAT16) return 2;
  if (args->pages.dtype == ow::FLOAT32) {
    ow::write<float>(*args);
  } else {
    ow::write<uint16_t>(*args);
  }
  return 0;
}
}
