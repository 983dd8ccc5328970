// All blocks of a decoder for the rows of an iteration, in one parallel region.
//
// Apart from reading weights, a decode of one row takes a few microseconds per operation. Called one by one from Python,
// the operations take longer to call than to compute, and meanwhile no weights are read. Here the threads go through all
// blocks together, and wait for each other only where one thread needs what the others have computed.
//
// The rows of an adapter also add its products to every linear layer. Between its two products the threads wait for each
// other, because each needs all of the first one's results.
//
// The other kernels compute the numbers, so these are the same, bit for bit, as with one call after another.

#include <cstring>

#include "shares.h"
#include "vectors.h"

constexpr long FEW_ROWS = 8;  // the norms of so few rows take each thread less time than waiting for the others
constexpr long MLP_ROWS = 512;  // at most so many go through an MLP together: what lies between its layers stays in the caches

// The parts of a block, as blocks.py describes them. Parts without a weight are missing.
template <typename Number> struct Block {
  Norm<Number> attention_norm, query_norm, key_norm, attention_post_norm, mlp_norm, mlp_post_norm;
  Linear<Number> qkv[3], attention_output[1], mlp_inputs[2], mlp_output[1];
  Cache keys, values;
  float scale;
  int window, rotation;
};

// Where an adapter's matrices for these layers are among those of the block.
enum FirstLayer { QKV = 0, ATTENTION_OUTPUT = 3, MLP_INPUTS = 4, MLP_OUTPUT = 6, LAYERS = 7 };

// The rows that have adapters, in their order; inner [3, rows of the pass, largest rank].
template <typename Number> struct Adapters {
  const AdaptedRows<Number>* runs;
  long num_runs;
  float* inner;
  long rank;
};

// What products of integers need: rounded rows, which each thread has for itself if they are few; and for each thread a
// buffer for a panel. `inputs` are the most of a layer.
template <typename Number> struct IntegerBuffers {
  long inputs;
  RoundedRows rounded;
  Number* panel;

  IntegerBuffers of_thread(bool few) const {
    long thread = omp_get_thread_num(), first = few ? thread * FEW_ROWS : 0;
    return {inputs, {rounded.integers + first * inputs, rounded.rows + first}, panel + thread * inputs * PANEL};
  }
};

// `parallel`: attention and MLP read the same hidden states. `interleaved`: query, key and value of a head are neighbors.
struct Sizes {
  long rows, size, inner, heads, kv_heads, dim, rotated, slots;
  int activation, gated, parallel, interleaved;
};

// Multiply by up to N layers, whose outputs follow each other in the rows of y, and add the products of adapters, whose
// matrices for the first of these layers are at `first`. Return which outputs of the last one are this thread's.
template <int N, typename Number>
static Range linear_shares(const Number* x, const Linear<Number> (&layers)[N], Number* y, long rows, long step,
                           const Adapters<Number>& adapters, long first, const IntegerBuffers<Number>& buffers) {
  Range own[N] = {};
  int count = 0;
  long task = 0;
  auto for_adapted_rows = [&](int layer, auto compute) {
    for (long i = 0; i < adapters.num_runs; i++) {
      const AdaptedRows<Number>& run = adapters.runs[i];
      const LowRank<Number>& matrices = run.layers[first + layer];
      float* inner = adapters.inner + (layer * rows + run.begin) * adapters.rank;
      if (matrices.a) compute(matrices, inner, run.begin, run.end - run.begin);
    }
  };
  if (layers[0].rounds) {
    bool few = rows <= FEW_ROWS;
    round_rows(x, buffers.rounded, few ? Range{0, rows} : share_of(rows), layers[0].in);
    if (!few) {
#pragma omp barrier
    }
  }
  for (Number* outputs = y; count < N && layers[count].weight; outputs += layers[count++].out) {
    const Linear<Number>& layer = layers[count];
    own[count] = layer.rounds   ? integer_share(buffers.rounded, layer, outputs, rows, step)
                 : layer.scales ? quantized_share(x, layer, outputs, rows, step, buffers.panel)
                                : linear_share(x, layer, outputs, rows, step);
    long in = layers[count].in;
    for_adapted_rows(count, [&](const LowRank<Number>& matrices, float* inner, long begin, long run_rows) {
      shrink_share(x + begin * in, matrices, inner, run_rows, in, task);
    });
  }
  if (adapters.num_runs) {
#pragma omp barrier
    for (int layer = 0; layer < count; y += layers[layer++].out)
      for_adapted_rows(layer, [&](const LowRank<Number>& matrices, float* inner, long begin, long run_rows) {
        expand_outputs(inner, matrices, y + begin * step, run_rows, layers[layer].out, step, own[layer]);
      });
  }
  return own[count - 1];
}

// Norm and rotate this thread's share of the queries and keys of qkv [rows, heads and twice kv_heads, dim]; write keys and
// values to their slots.
template <typename Number>
static void place_heads(const Block<Number>& block, const Sizes& sizes, const long* slots, const Number* cos,
                        const Number* sin, Number* qkv) {
  long dim = sizes.dim, keys = sizes.heads, values = keys + sizes.kv_heads, all = values + sizes.kv_heads;
  const Range own = share_of(sizes.rows * all);
  for (long i = own.begin; i < own.end; i++) {
    const long r = i / all, n = i % all, head = sizes.interleaved ? n % 3 * sizes.heads + n / 3 : n;
    const long angles = (block.rotation * sizes.rows + r) * sizes.rotated;
    Number* x = qkv + i * dim;
    const Norm<Number>& norm = head < keys ? block.query_norm : block.key_norm;
    if (head < values && norm.weight) add_norm_row<Number>(x, nullptr, norm, x, dim);
    if (head < values && cos) rotate_head(x, cos + angles, sin + angles, sizes.rotated);
    if (head >= values) write_vector(x, block.values, (head - values) * sizes.slots + slots[r], dim);
    else if (head >= keys) write_vector(x, block.keys, (head - keys) * sizes.slots + slots[r], dim);
  }
}

template <typename Number>
static void compute_blocks(const Block<Number>* blocks, long num_blocks, const Sizes& sizes, const Segments& segments,
                           Adapters<Number> adapters, const IntegerBuffers<Number>& integers, const long* slots,
                           const Number* cos, const Number* sin, Number* hidden, Number* update, Number* buffers,
                           int threads) {
  long rows = sizes.rows, size = sizes.size, dim = sizes.dim, inner = sizes.inner, width = rows * size;
  long qkv_step = (sizes.heads + 2 * sizes.kv_heads) * dim, inner_step = sizes.gated ? 2 * inner : inner;
  Number *qkv = buffers, *attended = qkv + rows * qkv_step, *inputs = attended + rows * sizes.heads * dim;
  Number *activated = inputs + rows * inner_step, *normed = activated + rows * inner;
  bool few = rows <= FEW_ROWS;
  long parts = adapters.num_runs ? 1 : (rows + MLP_ROWS - 1) / MLP_ROWS;
#pragma omp parallel num_threads(threads)
  {
    // With few rows, every thread has hidden states of its own and computes all norms.
    Number* x = few ? normed + omp_get_thread_num() * 2 * width : normed;
    Number* own_hidden = few ? x + width : hidden;
    if (few) memcpy(own_hidden, hidden, width * sizeof *hidden);
    const IntegerBuffers<Number> own_integers = integers.of_thread(few);
    // Add an update, or its norm, to the hidden states, and compute the norm of these: `before` or after that.
    auto norm = [&](Number* added, const Norm<Number>* post_norm, const Norm<Number>& layer, bool before = false) {
      Range own = few ? Range{0, rows} : share_of(rows);
      for (long r = own.begin; r < own.end; r++) {
        Number *row = added ? added + r * size : nullptr, *state = own_hidden + r * size, *y = x + r * size;
        if (row && post_norm->weight) {
          add_norm_row<Number>(row, nullptr, *post_norm, y, size);
          row = y;
        }
        add_norm_row(state, before ? nullptr : row, layer, y, size);
        for (long i = 0; before && i < size; i++) store(state + i, to_float(state[i]) + to_float(row[i]));
      }
      if (!few) {
#pragma omp barrier
      }
    };
    const Norm<Number>* post_norm = nullptr;  // of the last update
    for (const Block<Number>* block = blocks; block < blocks + num_blocks; block++) {
      norm(post_norm ? update : nullptr, post_norm, block->attention_norm);
      long first = (block - blocks) * LAYERS;
      linear_shares(x, block->qkv, qkv, rows, qkv_step, adapters, first + QKV, own_integers);
#pragma omp barrier
      place_heads(*block, sizes, slots, cos, sin, qkv);
#pragma omp barrier
      attend_share<Number>(qkv, sizes.interleaved ? 3 * dim : dim, qkv_step, block->keys, block->values, sizes.slots,
                           segments, sizes.heads, sizes.kv_heads, dim, block->window, block->scale, attended);
      linear_shares(attended, block->attention_output, update, rows, size, adapters, first + ATTENTION_OUTPUT, own_integers);
#pragma omp barrier
      norm(update, &block->attention_post_norm, block->mlp_norm, sizes.parallel);
      for (long part = 0; part < parts; part++) {
        long begin = rows * part / parts, some = rows * (part + 1) / parts - begin;
        Range own = linear_shares(x + begin * size, block->mlp_inputs, inputs, some, inner_step, adapters, first + MLP_INPUTS,
                                  own_integers);
        if (sizes.gated && !block->mlp_inputs[1].weight) {  // one layer: this thread's gates may belong to others' inputs
#pragma omp barrier
          own = share_of(inner);
        }
        for (long r = 0; r < some; r++) {
          const Number* gate = inputs + r * inner_step + own.begin;
          activate_row(gate, sizes.gated ? gate + inner : nullptr, activated + r * inner + own.begin, own.end - own.begin,
                       sizes.activation);
        }
#pragma omp barrier
        linear_shares(activated, block->mlp_output, update + begin * size, some, size, adapters, first + MLP_OUTPUT,
                      own_integers);
#pragma omp barrier
      }
      post_norm = &block->mlp_post_norm;
    }
    const Range own = share_of(post_norm->weight ? rows : 0);
    for (long r = own.begin; r < own.end; r++)
      add_norm_row<Number>(update + r * size, nullptr, *post_norm, update + r * size, size);
    if (few && omp_get_thread_num() == 0) memcpy(hidden, own_hidden, width * sizeof *hidden);
  }
}

extern "C" int few_rows() { return FEW_ROWS; }

// hidden [rows, size], without the last block's update [rows, size]. slots [rows]; cos, sin [rotations, rows, rotated] or null.
// buffers: [rows, heads and kv_heads * dim twice, up to three times `inner`, `size` twice for each thread].
#define BLOCKS(dtype, Number)                                                                                            \
  extern "C" void blocks_##dtype(const Block<Number>* blocks, long num_blocks, const Sizes* sizes,                       \
                                 const Segments* segments, const Adapters<Number>* adapters,                             \
                                 const IntegerBuffers<Number>* integers, const long* slots,                              \
                                 const Number* cos, const Number* sin, Number* hidden, Number* update, Number* buffers,  \
                                 int threads) {                                                                          \
    compute_blocks(blocks, num_blocks, *sizes, *segments, *adapters, *integers, slots, cos, sin, hidden, update,         \
                   buffers, threads);                                                                                    \
  }

BLOCKS(float32, float)
BLOCKS(bfloat16, uint16_t)
