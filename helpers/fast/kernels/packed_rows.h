// Many rows of float32 numbers, copied into the order in which vectors multiply them: [inputs, PASS_ROWS] for each pass.
//
// A pass multiplies up to PASS_ROWS rows by a panel. In a matrix, the same inputs of neighboring rows are thousands of bytes
// apart. Here they are neighbors, and a pass reads two contiguous arrays: its rows and the panel.
//
// Each thread multiplies some of the rows by all panels, not all rows by some panels. So a row is copied once, by the thread
// that uses it. A block of rows stays in a core's second-level cache while the panels pass. A long panel would take up that
// cache, so both are cut into pieces of the inputs; until the last piece, y holds the sums so far.

#pragma once
#include <algorithm>

#include "shares.h"
#include "vectors.h"

constexpr long MANY_PER_THREAD = 48;  // rows: with fewer, it is faster to share out the panels
constexpr long MOST_INPUTS = 1024;    // of a piece
constexpr long MOST_NUMBERS = 1 << 17, MOST_PASSES = 64;  // of a block

// Pack some inputs of up to PASS_ROWS rows of x [rows, in]. If there are fewer, the last row fills the places left.
static inline void pack_rows(const float* x, float* packed, Range rows, Range inputs, long in) {
  for (long four = 0; four < PASS_ROWS; four += 4) {
    const float* row[4];
    for (long i = 0; i < 4; i++) row[i] = x + std::min(rows.begin + four + i, rows.end - 1) * in;
    float* y = packed + four;
    long k = inputs.begin;
#if defined(__AVX512F__)
    for (; k + 4 <= inputs.end; k += 4, y += 4 * PASS_ROWS) {
      __m128 a = _mm_loadu_ps(row[0] + k), b = _mm_loadu_ps(row[1] + k), c = _mm_loadu_ps(row[2] + k), d = _mm_loadu_ps(row[3] + k);
      _MM_TRANSPOSE4_PS(a, b, c, d);
      _mm_storeu_ps(y, a), _mm_storeu_ps(y + PASS_ROWS, b), _mm_storeu_ps(y + 2 * PASS_ROWS, c), _mm_storeu_ps(y + 3 * PASS_ROWS, d);
    }
#endif
    for (; k < inputs.end; k++, y += PASS_ROWS)
      for (long i = 0; i < 4; i++) y[i] = row[i][k];
  }
}

struct Pass {
  Range rows;
  const float* x;  // packed
};

static inline bool are_many(long rows) { return rows >= MANY_PER_THREAD * omp_get_num_threads(); }

// Pack this thread's rows of x [rows, in], block by block. For each piece of a block and each panel, call `multiply` with the
// block's passes, the piece's inputs and the panel's first output. The threads wait for each other at the end: what follows
// divides y among them by outputs. Not inlined, or every product would reserve this large stack frame.
template <typename Multiply>
__attribute__((noinline)) static void multiply_packed(const float* x, long rows, long in, long out, Multiply multiply) {
  alignas(64) float packed[MOST_NUMBERS];
  Pass some[MOST_PASSES];
  const Range own = share_of(rows);
  const long count = own.end - own.begin, passes = (count + PASS_ROWS - 1) / PASS_ROWS;
  const long pieces = (in + MOST_INPUTS - 1) / MOST_INPUTS, size = (in + pieces - 1) / pieces * PASS_ROWS;
  const long most = std::min(MOST_NUMBERS / size, MOST_PASSES), blocks = (passes + most - 1) / most;
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
}
