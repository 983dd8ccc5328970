// All blocks of GPT-2 for a few decodes, in one parallel region.
//
// Apart from reading weights, a decode of one row takes a few microseconds per operation. Called one by one from Python,
// the operations take longer to call than to compute, and meanwhile no weights are read. Here the threads go through all
// blocks together. They wait for each other only where one thread needs what the others have computed. Each thread
// computes the norms for itself, because those of a few rows take less time than waiting.
//
// The other kernels compute the numbers, so these are the same, bit for bit, as with one call after another.

#include <cstring>

#include "shares.h"

// A norm or a linear layer.
template <typename Number> struct Layer {
  const Number *weight, *bias;
};

template <typename Number> struct Block {
  Layer<Number> ln_1, c_attn, attention_c_proj, ln_2, c_fc, mlp_c_proj;
  Number *keys, *values;
  float eps[2], scale;
};

extern "C" {  // elementwise.cpp
void add_norm_float32(float*, const float*, const float*, const float*, float*, long, long, float, int, int);
void add_norm_bfloat16(uint16_t*, const uint16_t*, const uint16_t*, const uint16_t*, uint16_t*, long, long, float, int, int);
void gelu_float32(float*, long, int);
void gelu_bfloat16(uint16_t*, long, int);
}
static constexpr auto add_norm(float*) { return add_norm_float32; }
static constexpr auto add_norm(uint16_t*) { return add_norm_bfloat16; }
static constexpr auto gelu(float*) { return gelu_float32; }
static constexpr auto gelu(uint16_t*) { return gelu_bfloat16; }

template <typename Number>
static void gpt2(const Block<Number>* blocks, long num_blocks, Decodes decodes, long size, long inner_size, long heads,
                 Number* hidden, Number* update, Number* buffers, int threads) {
  long rows = decodes.rows, width = rows * size;
  Number *qkv = buffers, *attended = qkv + 3 * width, *inner = attended + width, *normed = inner + rows * inner_size;
#pragma omp parallel num_threads(threads)
  {
    Number *own_hidden = normed + omp_get_thread_num() * 2 * width, *x = own_hidden + width;
    memcpy(own_hidden, hidden, width * sizeof *hidden);
    auto norm = [&](const Number* added, Layer<Number> layer, float eps) {
      add_norm(x)(own_hidden, added, layer.weight, layer.bias, x, rows, size, eps, false, 1);
    };
    auto linear = [&](const Number* x, Layer<Number> layer, Number* y, long in, long out) {
      return linear_share(x, layer.weight, layer.bias, y, rows, in, out);
    };
    for (const Block<Number>* block = blocks; block < blocks + num_blocks; block++) {
      norm(block == blocks ? nullptr : update, block->ln_1, block->eps[0]);
      linear(x, block->c_attn, qkv, size, 3 * size);
#pragma omp barrier
      attention_share(qkv, decodes, block->keys, block->values, heads, size / heads, block->scale, attended);
#pragma omp barrier
      linear(attended, block->attention_c_proj, update, size, size);
#pragma omp barrier
      norm(update, block->ln_2, block->eps[1]);
      Range own = linear(x, block->c_fc, inner, size, inner_size);
      for (long r = 0; r < rows; r++) gelu(x)(inner + r * inner_size + own.begin, own.end - own.begin, 1);
#pragma omp barrier
      linear(inner, block->mlp_c_proj, update, inner_size, size);
#pragma omp barrier
    }
    if (omp_get_thread_num() == 0) memcpy(hidden, own_hidden, width * sizeof *hidden);
  }
}

extern "C" {

// hidden [rows, size], without the last block's update [rows, size]. buffers: [rows, 4 * size + inner_size + 2 * size for
// each thread].
#define GPT2(dtype, Number)                                                                                              \
  void gpt2_##dtype(const Block<Number>* blocks, long num_blocks, long rows, const long* slots, const int* lengths,      \
                    const int* block_tables, long table_size, long block_size, long num_slots, long size,                \
                    long inner_size, long heads, Number* hidden, Number* update, Number* buffers, int threads) {         \
    Decodes decodes = {rows, slots, lengths, block_tables, table_size, block_size, num_slots};                           \
    gpt2(blocks, num_blocks, decodes, size, inner_size, heads, hidden, update, buffers, threads);                        \
  }

GPT2(float32, float)
GPT2(bfloat16, uint16_t)
}
