// A whole decoder layer: its products, its attention and what lies between, one behind the other,
// with no return to Python. Each part is the operator that Python can call by itself, so that a
// layer has the same bits either way.

#include "decoder_layer.h"

#include <algorithm>

#include "layer_ops.h"
#include "scratch.h"

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

class Layer {
 public:
  Layer(const OwLayer& layer, const OwPass& pass) : a(layer), p(pass) {}

  int run() {
    if (p.num_rows == 0) return 0;
    Carver measure{nullptr};
    carve(measure);
    char* memory = slab.reserve(measure.used);
    if (!memory) return 1;
    Carver carver{memory};
    carve(carver);
    int status = attention();
    if (!status) status = mlp();
    return status;
  }

 private:
  const OwLayer& a;
  const OwPass& p;
  // Rows of the working memory. `wide` and `narrow` serve attention, then the MLP.
  char *wide = nullptr;    // queries, keys, values; then gates and what they let through
  char *narrow = nullptr;  // what was attended; then the gated
  char *normed = nullptr, *delta = nullptr, *total = nullptr;  // [hidden]

  int32_t hidden() const { return a.qkv.num_inputs; }

  void carve(Carver& c) {
    const int64_t bytes = p.num_rows * (a.dtype == FLOAT32 ? 4 : 2);
    wide = c.take<char>(bytes * std::max(a.qkv.num_outputs, a.gate_up.num_outputs));
    narrow = c.take<char>(bytes * std::max(a.attention_out.num_inputs, a.down.num_inputs));
    for (char** rows : {&normed, &delta, &total}) *rows = c.take<char>(bytes * hidden());
  }

  int attention() {
    int status = norm(p.x, nullptr, nullptr, a.before_attention, normed);
    if (!status) status = linear(a.qkv, normed, wide);
    if (!status) status = rotary();
    if (!status) status = attend();
    if (!status) status = linear(a.attention_out, narrow, delta);
    if (!status && a.after_attention) {
      status = norm(delta, nullptr, nullptr, a.after_attention, delta);
    }
    return status;
  }

  int mlp() {
    int status = norm(delta, p.x, total, a.before_mlp, normed);
    if (!status) status = linear(a.gate_up, normed, wide);
    if (!status) status = gate();
    if (!status) status = linear(a.down, narrow, delta);
    if (!status && a.after_mlp) status = norm(delta, nullptr, nullptr, a.after_mlp, delta);
    if (!status) status = norm(delta, total, p.out, nullptr, nullptr);
    return status;
  }

  int norm(const void* x, const void* residual, void* sum, const float* weight, void* out) const {
    const OwNorm args{x,      residual, sum,   out,           weight,        p.num_rows, hidden(),
                      a.dtype, a.eps,    a.rounds_once, p.num_threads, p.parallel};
    return ow_norm(&args);
  }

  int linear(OwLinear args, const void* x, void* out) const {
    args.x = x;
    args.out = out;
    args.x_stride = args.num_inputs;
    args.out_stride = args.num_outputs;
    args.num_rows = p.num_rows;
    args.num_threads = p.num_threads;
    args.parallel = p.parallel;
    return ow_linear(&args);
  }

  int rotary() const {
    const OwRotary args{p.pages,     wide,         p.cos, p.sin,         a.query_norm,  a.key_norm,
                        p.slots,     p.num_rows,   a.num_heads, p.rotary_dim, a.eps, a.rounds_once,
                        p.num_threads, p.parallel};
    return ow_rotary(&args);
  }

  int attend() const {
    const OwAttention args{p.pages,      wide,         narrow,        p.pages.head_dim,
                           a.qkv.num_outputs, p.query_start, p.context_len, p.block_tables,
                           p.table_stride, p.num_seqs, a.num_heads,   a.window,
                           p.num_threads, a.scale,     a.softcap,     p.parallel};
    return ow_attend(&args);
  }

  int gate() const {
    const OwGate args{wide,    narrow,       p.num_rows,    a.down.num_inputs,
                      a.dtype, a.activation, p.num_threads, p.parallel};
    return ow_gate(&args);
  }
};

}  // namespace
}  // namespace ow

extern "C" {

// Returns 0, or 1 where memory for the work could not be had, or 2 for an unknown dtype or format.
__attribute__((visibility("default"))) int ow_decoder_layer(const ow::OwLayer* layer,
                                                            const ow::OwPass* pass) {
  return ow::Layer(*layer, *pass).run();
}

// The sizes of the two structures as this build lays them out, for the loader to compare.
__attribute__((visibility("default"))) int64_t ow_decoder_layer_abi() {
  return int64_t(sizeof(ow::OwLayer)) << 32 | int64_t(sizeof(ow::OwPass));
}
}
