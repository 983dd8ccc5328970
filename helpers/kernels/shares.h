// What one thread of a parallel region computes. Several such shares follow each other in one region (gpt2.cpp).

#pragma once
#include <cstdint>
#include <omp.h>

struct Range {
  long begin, end;
};

// Return this thread's share of `count` equal tasks.
static inline Range share_of(long count) {
  long thread = omp_get_thread_num(), threads = omp_get_num_threads();
  return {count * thread / threads, count * (thread + 1) / threads};
}

// Where the keys and values of a few decodes are, one row each: row r writes to slots[r], and reads its first lengths[r]
// tokens through block_tables [rows, table_size]. Each layer's keys and values are [heads, num_slots, dim].
struct Decodes {
  long rows;
  const long* slots;
  const int *lengths, *block_tables;
  long table_size, block_size, num_slots;
};

// linear.cpp: x [rows, in], w and bias as there, y [rows, out]. Returns which outputs are this thread's.
Range linear_share(const float* x, const float* w, const float* bias, float* y, long rows, long in, long out);
Range linear_share(const uint16_t* x, const uint16_t* w, const uint16_t* bias, uint16_t* y, long rows, long in, long out);

// paged_attention.cpp: qkv [rows, 3, heads, dim], output [rows, heads, dim].
void attention_share(const float* qkv, Decodes decodes, float* keys, float* values, long heads, long dim, float scale,
                     float* output);
void attention_share(const uint16_t* qkv, Decodes decodes, uint16_t* keys, uint16_t* values, long heads, long dim, float scale,
                     uint16_t* output);
