// Attention of decodes: one query per sequence, whose keys and values lie in the blocks of the sequence's block table.
//
// The idea is PagedAttention's (Kwon et al., vLLM, SOSP 2023). The kernel reads the block tables itself, so keys and values
// are not gathered first, and one call serves all sequences. The softmax is computed block by block (Milakov and
// Gimelshein, 2018): when a block contains a new highest score, the sums so far are scaled down.

#include <algorithm>
#include <cmath>

#include "numbers.h"

constexpr int MAX_HEAD_DIM = 512;  // of one head, as in paged_attention.py
constexpr int MAX_KEYS = 256;      // processed at a time; larger blocks are split
// Below this number of products, one thread finishes before a second one would have woken up.
constexpr long MIN_PARALLEL_PRODUCTS = 1 << 16;

template <typename Number> static inline void prefetch(const Number* vector, int dim) {
  for (int d = 0; d < dim; d += 64 / sizeof(Number)) __builtin_prefetch(vector + d);  // a cache line has 64 bytes
}

// Compute one head of one sequence: query and output [dim], keys and values [slots, dim]. The cache holds all sequences;
// the block table selects the keys of this one. The query sees keys `first` to `length` - 1. DIM equals `dim` if it is
// known at compile time, else it is 0.
template <int DIM, typename Number>
static void attend(const Number* query, const Number* keys, const Number* values, const int* block_table, int first,
                   int length, int block_size, int dim, float scale, Number* output) {
  if (DIM > 0) dim = DIM;
  float q[MAX_HEAD_DIM], sum[MAX_HEAD_DIM], total = 0, highest = -INFINITY;
  for (int d = 0; d < dim; d++) q[d] = scale * to_float(query[d]), sum[d] = 0;

  auto offset = [&](int i) { return ((long)block_table[i / block_size] * block_size + i % block_size) * dim; };
  for (int start = first, end; start < length; start = end) {
    end = std::min({length, (start / block_size + 1) * block_size, start + MAX_KEYS});
    long here = offset(start), next = end < length ? offset(end) : here;
    int count = end - start;

    float scores[MAX_KEYS], before = highest;
    for (int i = 0; i < count; i++) {
      prefetch(values + here + i * dim, dim);
      const Number* key = keys + here + i * dim;
      float score = 0;
#pragma omp simd reduction(+ : score)
      for (int d = 0; d < dim; d++) score += q[d] * to_float(key[d]);
      scores[i] = score;
      highest = std::max(highest, score);
    }

    // While all scores are -inf, their weights are 0. Subtracting -inf from them would give NaN.
    float shift = highest == -INFINITY ? 0 : highest;
    float shrink = std::exp(before - shift);
    total *= shrink;
    for (int d = 0; d < dim; d++) sum[d] *= shrink;
    for (int i = 0; i < count; i++) {
      prefetch(keys + next + i * dim, dim);
      const Number* value = values + here + i * dim;
      float weight = std::exp(scores[i] - shift);
      total += weight;
#pragma omp simd
      for (int d = 0; d < dim; d++) sum[d] += weight * to_float(value[d]);
    }
  }
  for (int d = 0; d < dim; d++) store(output + d, total == 0 ? 0 : sum[d] / total);
}

template <typename Number>
static void attend_all(const Number* query, long head_step, long token_step, const Number* keys, const Number* values,
                       const int* columns, const int* firsts, const int* lengths, const int* block_tables, int sequences,
                       int table_size, int heads, int kv_heads, int dim, long slots, int block_size, float scale,
                       Number* output, int threads) {
  auto attend_one = dim == 64 ? attend<64, Number> : dim == 128 ? attend<128, Number> : attend<0, Number>;
  long products = 0;
  for (int s = 0; s < sequences; s++) products += (long)(lengths[s] - firsts[s]) * heads * dim;
  // The heads come first in the order that threads divide, because sequences have unequal lengths.
#pragma omp parallel for collapse(2) num_threads(threads) if (products > MIN_PARALLEL_PRODUCTS)
  for (int head = 0; head < heads; head++)
    for (int s = 0; s < sequences; s++) {
      long kv = head / (heads / kv_heads) * slots * dim;
      attend_one(query + head * head_step + columns[s] * token_step, keys + kv, values + kv,
                 block_tables + (long)s * table_size, firsts[s], lengths[s], block_size, dim, scale,
                 output + ((long)columns[s] * heads + head) * dim);
    }
}

extern "C" {

// Sequence s has its query and output in columns[s], sees keys firsts[s] to lengths[s] - 1, and has its block table in
// block_tables [s, table_size]. In query, head h of column t begins at h * head_step + t * token_step. keys and values:
// [kv_heads, slots, dim]. output: [columns, heads, dim].
#define PAGED_ATTENTION(name, Number)                                                                                   \
  void name(const Number* query, long head_step, long token_step, const Number* keys, const Number* values,            \
            const int* columns, const int* firsts, const int* lengths, const int* block_tables, int sequences,         \
            int table_size, int heads, int kv_heads, int dim, long slots, int block_size, float scale, Number* output, \
            int threads) {                                                                                              \
    attend_all(query, head_step, token_step, keys, values, columns, firsts, lengths, block_tables, sequences,          \
               table_size, heads, kv_heads, dim, slots, block_size, scale, output, threads);                           \
  }

PAGED_ATTENTION(paged_attention_float32, float)
PAGED_ATTENTION(paged_attention_bfloat16, uint16_t)
}
