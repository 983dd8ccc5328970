// Many rows of float32 numbers, copied into the order in which vectors multiply them: [inputs, PASS] for each pass.
//
// A pass multiplies up to PASS rows by a panel. As they lie in a matrix, the same inputs of its rows are thousands of bytes
// apart. Here they are neighbors, and a pass reads two sequences of numbers: that of its rows and that of the panel.
//
// Each thread multiplies some of the rows by all panels, not all rows by some panels. So a row is copied once, by the thread that
// uses it. A block of rows stays in a core's second-level cache while the panels pass. A long panel would take up that
// cache, so it is cut into pieces, and meanwhile y holds the sums so far.

#pragma once
#include <algorithm>

#include "shares.h"
#include "vectors.h"

constexpr long PASS = 12;  // rows: their sums with a panel take 24 of AVX-512's 32 registers
constexpr long MANY = 48;  // rows of each thread: with fewer, it is faster to share out the panels
constexpr long MOST_INPUTS = 1024, MOST_PASSES = 64, BLOCK_NUMBERS = 1 << 17;

#if defined(AMD)  // not measured there
template <typename Number> constexpr bool MAY_PACK = false;
#else
template <typename Number> constexpr bool MAY_PACK = LANES == 16 && sizeof(Number) == 4;
#endif

// Copy some inputs of x [rows, in]: up to PASS rows.
static inline void pack_rows(const float* x, float* packed, Range rows, Range inputs, long in) {
  for (long four = 0; four < PASS; four += 4) {
    const float* row[4];
    for (long i = 0; i < 4; i++) row[i] = x + std::min(rows.begin + four + i, rows.end - 1) * in;
    float* y = packed + four;
    long k = inputs.begin;
#if defined(__AVX512F__)
    for (; k + 4 <= inputs.end; k += 4, y += 4 * PASS) {
      __m128 a = _mm_loadu_ps(row[0] + k), b = _mm_loadu_ps(row[1] + k), c = _mm_loadu_ps(row[2] + k), d = _mm_loadu_ps(row[3] + k);
      _MM_TRANSPOSE4_PS(a, b, c, d);
      _mm_storeu_ps(y, a), _mm_storeu_ps(y + PASS, b), _mm_storeu_ps(y + 2 * PASS, c), _mm_storeu_ps(y + 3 * PASS, d);
    }
#endif
    for (; k < inputs.end; k++, y += PASS)
      for (long i = 0; i < 4; i++) y[i] = row[i][k];
  }
}

struct Pass {
  Range rows;
  const float* x;  // packed
};

// If x [rows, in] has many rows, call `multiply` with the passes of a block, their inputs and the first output of a panel, until
// this thread's rows are multiplied by all panels. All threads return when y is complete. Return whether the rows were many.
template <typename Multiply> static bool multiply_packed(const float* x, long rows, long in, long out, Multiply multiply) {
  if (rows < MANY * omp_get_num_threads()) return false;
  alignas(64) float packed[BLOCK_NUMBERS];
  Pass some[MOST_PASSES];
  const Range own = share_of(rows);
  const long count = own.end - own.begin, passes = (count + PASS - 1) / PASS;
  const long pieces = (in + MOST_INPUTS - 1) / MOST_INPUTS, size = PASS * std::min(in, MOST_INPUTS);
  const long most = std::min(BLOCK_NUMBERS / size, MOST_PASSES), blocks = (passes + most - 1) / most;
  for (long block = 0; block < blocks; block++)
    for (long piece = 0; piece < pieces; piece++) {
      const Range inputs = {in * piece / pieces, in * (piece + 1) / pieces};
      const long first = passes * block / blocks, number = passes * (block + 1) / blocks - first;
      for (long i = 0; i < number; i++) {
        const Range of_pass = {own.begin + count * (first + i) / passes, own.begin + count * (first + i + 1) / passes};
        some[i] = {of_pass, packed + i * size};
        pack_rows(x, packed + i * size, of_pass, inputs, in);
      }
      for (long c = 0; c < out; c += PANEL) multiply(some, some + number, inputs, c);
    }
#pragma omp barrier
  return true;
}
