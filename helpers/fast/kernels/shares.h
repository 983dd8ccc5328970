// What the threads of one parallel region compute together. Several such operations follow each other in one region
// (blocks.cpp); each of them also has a function that Python calls by itself, which gives the same bits.

#pragma once
#include <cstdint>
#include <omp.h>

// Outputs of a panel (quantized.cpp, packed_rows.h), rows of a tile (tiles.h).
constexpr int PANEL = 32, TILE = 16;

struct Range {
  long begin, end;
};

// Return this thread's share of `count` equal tasks.
static inline Range share_of(long count) {
  long thread = omp_get_thread_num(), threads = omp_get_num_threads();
  return {count * thread / threads, count * (thread + 1) / threads};
}

// As in elementwise.py. The weight of ZERO_CENTERED_RMS_NORM is stored less one, as in Gemma.
enum NormKind { LAYER_NORM, RMS_NORM, ZERO_CENTERED_RMS_NORM };
enum Activation { TANH_GELU, SILU, GELU, RELU };

// weight, bias (or null) [size].
template <typename Number> struct Norm {
  const Number *weight, *bias;
  float eps;
  int kind;
};

// The weight is packed (linear.cpp) or, if there are scales, consists of integers (quantized.cpp); bias [out] or null. A scale
// has `scale_bytes` and belongs to one of `groups` groups of inputs. A layer that `rounds` multiplies integers by integers
// (integer_linear.cpp).
template <typename Number> struct Linear {
  const void* weight;
  const Number* bias;
  long in, out;
  const void* scales;
  long groups;
  int bits, scale_bytes, rounds;
};

// A row of integers: value = scale * integer.
struct RoundedRow {
  float scale;
  int32_t sum;  // of the integers
};

// Rows that are rounded to integers [rows, in].
struct RoundedRows {
  int8_t* integers;
  RoundedRow* rows;
};

// What an adapter adds to the outputs of a linear layer for inputs x: x a^T b. a [rank, in]; b [rank, out]; null for nothing.
template <typename Number> struct LowRank {
  const Number *a, *b;
  long rank;
};

// Neighboring rows that have one adapter, its matrices for the linear layers of all blocks, and their largest rank.
template <typename Number> struct AdaptedRows {
  const LowRank<Number>* layers;
  long begin, end, rank;
};

// The keys or values of a layer, [kv_heads, slots, dim]: numbers of the model's dtype if there are no scales; otherwise
// integers of 8 bits, times scales [kv_heads, slots].
struct Cache {
  void* numbers;
  float* scales;
};

// Sequence s has tokens[s] queries from columns[s] on, which are the last ones of its lengths[s] tokens, and its block
// table in block_tables [s, table_size].
struct Segments {
  const int *columns, *tokens, *lengths, *block_tables;
  int sequences, table_size, block_size;
};

// --- elementwise.cpp --------------------------------------------------------------------------------------------------

// Add `update` (if not null) to x [size], then write the norm of x to y.
template <typename Number>
void add_norm_row(Number* x, const Number* update, Norm<Number> norm, Number* y, long size);

// Rotate the first `rotated` numbers of a query or key by its position: cos, sin [rotated].
template <typename Number> void rotate_head(Number* x, const Number* cos, const Number* sin, long rotated);

// Write the activation of x, times `factor` (if not null), to y, which may be x; [size] each.
template <typename Number> void activate_row(const Number* x, const Number* factor, Number* y, long size, int activation);

// --- linear.cpp -------------------------------------------------------------------------------------------------------

// Multiply x [rows, in] by a layer; y has rows that begin `step` numbers apart. Return which outputs are this thread's:
// they are complete for all rows.
template <typename Number> Range linear_share(const Number* x, Linear<Number> layer, Number* y, long rows, long step);

// --- quantized.cpp ----------------------------------------------------------------------------------------------------

// The same for a layer with integers; this thread converts a panel into a buffer [in, PANEL] if rows are many.
template <typename Number>
Range quantized_share(const Number* x, const Linear<Number>& layer, Number* y, long rows, long step, Number* buffer);

// --- integer_linear.cpp -----------------------------------------------------------------------------------------------

// Round these rows of x [rows, in].
template <typename Number> void round_rows(const Number* x, RoundedRows rounded, Range rows, long in);

// The same for a layer that rounds.
template <typename Number>
Range integer_share(RoundedRows x, const Linear<Number>& layer, Number* y, long rows, long step);

// --- low_rank.cpp -----------------------------------------------------------------------------------------------------

// Multiply x [rows, in] by an adapter's first matrix: write [rows, rank] to inner. `task` counts the parts of all calls since
// the threads last waited for each other, and each thread computes its share of them.
template <typename Number>
void shrink_share(const Number* x, LowRank<Number> matrices, float* inner, long rows, long in, long& task);

// Add the products of inner [rows, rank] with an adapter's second matrix [rank, out] to these outputs of y.
template <typename Number>
void expand_outputs(const float* inner, LowRank<Number> matrices, Number* y, long rows, long out, long step, Range outputs);

// --- paged_attention.cpp ----------------------------------------------------------------------------------------------

// Write a key or value x [dim] to a place among the kv_heads * slots of a cache.
template <typename Number> void write_vector(const Number* x, Cache cache, long place, long dim);

// Compute the attention of all segments; all threads return when it is complete. In query, head h of column t begins at
// h * head_step + t * token_step. output: [columns, heads, dim]. A query sees at most `window` keys.
template <typename Number>
void attend_share(const Number* query, long head_step, long token_step, Cache keys, Cache values, long slots,
                  Segments segments, int heads, int kv_heads, int dim, int window, float scale, Number* output);
