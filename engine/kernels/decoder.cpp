// All layers of a decoder: products, attention and what lies between, one behind the other, with no
// return to Python and in one parallel region. Each part is the operator that Python can call by itself, so that a layer has
// the same bits either way.

#include "decoder.h"

#include <algorithm>

#include "layer_ops.h"
#include "scratch.h"
#include "team.h"

extern "C" {
int ow_attend(const ow::OwAttention*);
int ow_linear(const ow::OwLinear*);
int ow_norm(const ow::OwNorm*);
int ow_rotary(const ow::OwRotary*);
int ow_gate(const ow::OwGate*);
}

namespace ow {
namespace {

thread_local Slab slab;

// Rows of working memory; each layer uses all of it anew.
struct Buffers {
  char* wide;    // queries, keys, values; then gates and what they let through
  char* narrow;  // what was attended; then the gated
  char *normed, *delta, *total;  // [hidden]
  char* between[2];              // a layer's rows on their way to the next
};

Buffers carve(Carver& c, const OwDecoder& d) {
  int64_t wide = 0, narrow = 0, hidden = 0;
  for (int i = 0; i < d.num_layers; ++i) {
    const OwLayer& a = d.layers[i];
    wide = std::max<int64_t>({wide, a.qkv.num_outputs, a.gate_up.num_outputs});
    narrow = std::max<int64_t>({narrow, a.attention_out.num_inputs, a.down.num_inputs});
    hidden = std::max<int64_t>(hidden, a.qkv.num_inputs);
  }
  const int64_t bytes = d.num_rows * (d.layers[0].dtype == FLOAT32 ? 4 : 2);
  Buffers b;
  b.wide = c.take<char>(bytes * wide);
  b.narrow = c.take<char>(bytes * narrow);
  for (char** rows : {&b.normed, &b.delta, &b.total, &b.between[0], &b.between[1]}) {
    *rows = c.take<char>(bytes * hidden);
  }
  return b;
}

class Layer {
 public:
  Layer(const OwDecoder& decoder, const OwLayer& layer, const Buffers& buffers)
      : d(decoder), a(layer), b(buffers), group(decoder.groups[layer.group]), pages(group.pages) {
    const int64_t bytes = a.place * group.layer_stride * (pages.dtype == FLOAT32 ? 4 : 2);
    pages.keys = static_cast<char*>(pages.keys) + bytes;
    pages.values = static_cast<char*>(pages.values) + bytes;
  }

  int run(const void* x, void* out) const {
    int status = norm(x, nullptr, nullptr, a.before_attention, b.normed);
    if (!status) status = linear(a.qkv, b.normed, b.wide);
    if (!status) status = rotary();
    if (!status) status = attend();
    if (!status) status = linear(a.attention_out, b.narrow, b.delta);
    if (!status && a.after_attention) status = norm_delta(a.after_attention);
    if (!status) status = norm(b.delta, x, b.total, a.before_mlp, b.normed);
    if (!status) status = linear(a.gate_up, b.normed, b.wide);
    if (!status) status = gate();
    if (!status) status = linear(a.down, b.narrow, b.delta);
    if (!status && a.after_mlp) status = norm_delta(a.after_mlp);
    if (!status) status = norm(b.delta, b.total, out, nullptr, nullptr);
    return status;
  }

 private:
  const OwDecoder& d;
  const OwLayer& a;
  const Buffers& b;
  const OwGroup& group;
  OwPages pages;

  // Over all rows of the pass, on all its threads.
  template <class Args>
  void spread(Args& args) const {
    args.num_rows = d.num_rows;
    args.num_threads = d.num_threads;
    args.parallel = d.parallel;
  }

  int norm_delta(const float* weight) const {
    return norm(b.delta, nullptr, nullptr, weight, b.delta);
  }

  int norm(const void* x, const void* residual, void* sum, const float* weight, void* out) const {
    OwNorm args{};
    args.x = x;
    args.residual = residual;
    args.sum = sum;
    args.out = out;
    args.weight = weight;
    args.width = a.qkv.num_inputs;
    args.dtype = a.dtype;
    args.eps = a.eps;
    args.rounds_once = a.rounds_once;
    spread(args);
    return ow_norm(&args);
  }

  int linear(OwLinear args, const void* x, void* out) const {
    args.x = x;
    args.out = out;
    args.x_stride = args.num_inputs;
    args.out_stride = args.num_outputs;
    spread(args);
    return ow_linear(&args);
  }

  int rotary() const {
    const OwAngles& angles = d.angles[a.angles];
    OwRotary args{};
    args.pages = pages;
    args.qkv = b.wide;
    args.cos = angles.cos;
    args.sin = angles.sin;
    args.query_norm = a.query_norm;
    args.key_norm = a.key_norm;
    args.slots = group.slots;
    args.num_heads = a.num_heads;
    args.rotary_dim = angles.rotary_dim;
    args.eps = a.eps;
    args.rounds_once = a.rounds_once;
    spread(args);
    return ow_rotary(&args);
  }

  int attend() const {
    OwAttention args{};
    args.pages = pages;
    args.query = b.wide;
    args.out = b.narrow;
    args.query_head_stride = pages.head_dim;
    args.query_row_stride = a.qkv.num_outputs;
    args.query_start = d.query_start;
    args.context_len = d.context_len;
    args.block_tables = group.block_tables;
    args.table_stride = group.table_stride;
    args.num_seqs = d.num_seqs;
    args.num_heads = a.num_heads;
    args.window = a.window;
    args.num_threads = d.num_threads;
    args.scale = a.scale;
    args.softcap = a.softcap;
    args.parallel = d.parallel;
    return ow_attend(&args);
  }

  int gate() const {
    OwGate args{};
    args.gate_up = b.wide;
    args.out = b.narrow;
    args.width = a.down.num_inputs;
    args.dtype = a.dtype;
    args.activation = a.activation;
    spread(args);
    return ow_gate(&args);
  }
};

struct Decoding {
  const OwDecoder& d;
  const Buffers& buffers;
  int status = 0;

  void run() {
    const void* x = d.x;
    for (int i = 0; i < d.num_layers && !status; ++i) {
      void* out = i + 1 < d.num_layers ? buffers.between[i % 2] : d.out;
      status = Layer(d, d.layers[i], buffers).run(x, out);
      x = out;
    }
  }
};

int decode(OwDecoder d) {
  if (d.num_rows == 0 || d.num_layers == 0) return 0;
  Carver measure{nullptr};
  carve(measure, d);
  char* memory = slab.reserve(measure.used);
  if (!memory) return 1;
  Carver carver{memory};
  const Buffers buffers = carve(carver, d);
  const Parallel parallel = d.parallel;
  Decoding decoding{d, buffers};
  if (!parallel || d.num_threads < 2) {
    d.parallel = nullptr;
    decoding.run();
  } else {
    d.parallel = Team::share;
    Team::gather(
        parallel, d.num_threads, [](void* self) { static_cast<Decoding*>(self)->run(); }, &decoding);
  }
  return decoding.status;
}

}  // namespace
}  // namespace ow

extern "C" {

// Returns 0, or 1 where memory for the work could not be had, or 2 for an unknown dtype or format.
__attribute__((visibility("default"))) int ow_decode(const ow::OwDecoder* args) {
  return ow::decode(*args);
}

// The sizes of the structures as this build lays them out, for the loader to compare.
__attribute__((visibility("default"))) int64_t ow_decoder_abi(int32_t index) {
  constexpr int64_t sizes[] = {sizeof(ow::OwLayer), sizeof(ow::OwGroup), sizeof(ow::OwAngles),
                               sizeof(ow::OwDecoder)};
  return index < 4 ? sizes[index] : 0;
}
}
