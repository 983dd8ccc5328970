// What both ways to compute attention share: in vectors (paged_attention.cpp) and in matrix registers (tile_attention.h).

#pragma once
#include "numbers.h"

constexpr int MAX_HEAD_DIM = 512;  // of one head, as in paged_attention.py

// A weight is 2 to the power of a score less a shift, which is the highest score of some piece so far. As in FlashAttention-4,
// the shift stays until a score exceeds it by more than SLACK. A weight may exceed 1 meanwhile, and sums rarely shrink.
constexpr float SLACK = 8;

// Keys or values of one kv head, [slots, dim]. Scales [slots] belong to integers.
template <typename Stored> struct Vectors {
  const Stored* numbers;
  const float* scales;
};

// Return vector `slot` as numbers of the model's dtype; `room` holds them if they are not stored.
template <typename Number>
static inline const Number* read_vector(Vectors<Number> vectors, long slot, long dim, Number*) {
  return vectors.numbers + slot * dim;
}
template <typename Number>
static inline const Number* read_vector(Vectors<int8_t> vectors, long slot, long dim, Number* room) {
  for (long d = 0; d < dim; d++) store(room + d, vectors.scales[slot] * to_float(vectors.numbers[slot * dim + d]));
  return room;
}

static inline long round_up(long size, long multiple) { return (size + multiple - 1) / multiple * multiple; }
