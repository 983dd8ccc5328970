// Attention of decodes: one query a sequence, against keys and values that lie in the blocks of its block table.
//
// The idea is PagedAttention's (Kwon et al., vLLM, SOSP 2023): the kernel itself looks up the block tables, so that nothing
// has to be collected before, and one call answers all sequences. The softmax is taken block by block (Milakov and
// Gimelshein, 2018): where a block holds a higher score than all before it, what was summed up so far is scaled down.

#include <algorithm>
#include <cmath>

#include "numbers.h"

constexpr int LONGEST = 512;  // numbers in a head, at most
constexpr int MOST = 256;     // keys at a time; larger blocks are taken in parts
constexpr long FEW = 1 << 16; // products that are done before another thread would be awake

template <typename Number> static inline void fetch(const Number* vector, int dim) {
  for (int d = 0; d < dim; d += 64 / sizeof(Number)) __builtin_prefetch(vector + d);  // 64 bytes: a line of the cache
}

// One head of one sequence. query and answer [dim]; keys and values [slots, dim] of all sequences, among which the block
// table tells its own. It sees key number `first` and all before `length`. DIM is `dim` where the compiler is to know it, else 0.
template <int DIM, typename Number>
static void attend(const Number* query, const Number* keys, const Number* values, const int* table, int first, int length,
                   int block_size, int dim, float scale, Number* answer) {
  if (DIM > 0) dim = DIM;
  float q[LONGEST], sum[LONGEST], total = 0, highest = -INFINITY;
  for (int d = 0; d < dim; d++) q[d] = scale * number(query[d]), sum[d] = 0;

  auto place = [&](int i) { return ((long)table[i / block_size] * block_size + i % block_size) * dim; };
  for (int start = first, end; start < length; start = end) {
    end = std::min({length, (start / block_size + 1) * block_size, start + MOST});
    long here = place(start), next = end < length ? place(end) : here;
    int count = end - start;

    float scores[MOST], before = highest;
    for (int i = 0; i < count; i++) {
      fetch(values + here + i * dim, dim);
      const Number* key = keys + here + i * dim;
      float score = 0;
#pragma omp simd reduction(+ : score)
      for (int d = 0; d < dim; d++) score += q[d] * number(key[d]);
      scores[i] = score;
      highest = std::max(highest, score);
    }

    float shrink = std::exp(before - highest);
    total *= shrink;
    for (int d = 0; d < dim; d++) sum[d] *= shrink;
    for (int i = 0; i < count; i++) {
      fetch(keys + next + i * dim, dim);
      const Number* value = values + here + i * dim;
      float weight = std::exp(scores[i] - highest);
      total += weight;
#pragma omp simd
      for (int d = 0; d < dim; d++) sum[d] += weight * number(value[d]);
    }
  }
  for (int d = 0; d < dim; d++) store(answer + d, sum[d] / total);
}

template <typename Number>
static void attend_all(const Number* query, long head_step, long token_step, const Number* keys, const Number* values,
                       const int* columns, const int* firsts, const int* lengths, const int* tables, int sequences,
                       int table_size, int heads, int kv_heads, int dim, long slots, int block_size, float scale,
                       Number* answer, int threads) {
  auto one = dim == 64 ? attend<64, Number> : dim == 128 ? attend<128, Number> : attend<0, Number>;
  long products = 0;
  for (int s = 0; s < sequences; s++) products += (long)(lengths[s] - firsts[s]) * heads * dim;
  // Threads share the heads rather than the sequences, which are of unequal lengths.
#pragma omp parallel for collapse(2) num_threads(threads) if (products > FEW)
  for (int head = 0; head < heads; head++)
    for (int s = 0; s < sequences; s++) {
      long kv = head / (heads / kv_heads) * slots * dim;
      one(query + head * head_step + columns[s] * token_step, keys + kv, values + kv, tables + (long)s * table_size,
          firsts[s], lengths[s], block_size, dim, scale, answer + ((long)columns[s] * heads + head) * dim);
    }
}

extern "C" {

// For sequence s, query and answer are in columns[s], it sees key number firsts[s] and all before lengths[s], and its blocks are
// tables [s, table_size]. query: head h of column t begins at h * head_step + t * token_step; keys and values
// [kv_heads, slots, dim]; answer [columns, heads, dim].
#define PAGED_ATTENTION(name, Number)                                                                                   \
  void name(const Number* query, long head_step, long token_step, const Number* keys, const Number* values,            \
            const int* columns, const int* firsts, const int* lengths, const int* tables, int sequences,               \
            int table_size, int heads, int kv_heads, int dim, long slots, int block_size, float scale, Number* answer, \
            int threads) {                                                                                              \
    attend_all(query, head_step, token_step, keys, values, columns, firsts, lengths, tables, sequences, table_size,    \
               heads, kv_heads, dim, slots, block_size, scale, answer, threads);                                       \
  }

PAGED_ATTENTION(paged_attention_float32, float)
PAGED_ATTENTION(paged_attention_bfloat16, uint16_t)
}
