// y = x W + bias for a few rows x: in the time that it takes to read W once.
//
// A product of a few rows does so little with each weight that it waits for memory. Two things keep memory busy. The
// weights lie in the order of their use: in panels of COLUMNS outputs, and in a panel line after line, a line for each
// input (linear.py packs them). And with every line, the one AHEAD bytes further on is asked for, so that it is there
// when its turn comes. With no more than ROWS rows it is asked for as data that will not be used again, so that it does
// not push everybody else's out of the caches, which makes a whole decode of one request 8% faster.
//
// ROWS x COLUMNS sums stay in registers while a panel passes by; with more rows it passes again, out of the cache. A row
// is summed in the same order however many there are, so that its numbers do not depend on the batch it is in.

#include "numbers.h"

#if defined(__AVX512F__)
constexpr int LANES = 16, ROWS = 8;  // 16 of 32 registers hold sums
#else
constexpr int LANES = 8, ROWS = 4;  // 8 of AVX2's 16
#endif
constexpr int VECTORS = 2, COLUMNS = VECTORS * LANES;
constexpr long AHEAD = 4096;

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));

// A word of weights or inputs, 32 bits, is one float32, or the bfloat16 of two neighbouring inputs.

static inline Floats add_products(Floats sum, Floats w, float x) { return sum + w * x; }

#if defined(__AVX512BF16__)
#include <immintrin.h>
static inline Floats add_products(Floats sum, Words w, uint32_t x) {
  return bits<Floats>(_mm512_dpbf16_ps(bits<__m512>(sum), bits<__m512bh>(w), bits<__m512bh>(_mm512_set1_epi32(x))));
}
#else
static inline Floats add_products(Floats sum, Words w, uint32_t x) {
  sum += bits<Floats>(w << 16) * bits<float>(x << 16);
  return sum + bits<Floats>(w & 0xffff0000u) * bits<float>(x & 0xffff0000u);
}
#endif

// R rows of a panel: x [R, in], w [in, COLUMNS], y [R, columns] in a matrix of `out` columns. All loops over r and v are
// unrolled, else the sums would not be kept in registers.
template <int R, bool ONCE, typename Vector, typename Word, typename Number>
static void multiply(const Word* x, const Word* w, const Number* bias, Number* y, long in, long out, long columns) {
  Floats sums[R][VECTORS] = {};
  for (long k = 0; k < in; k++) {
    for (int c = 0; c < COLUMNS; c += 16) __builtin_prefetch((char*)(w + k * COLUMNS + c) + AHEAD, 0, ONCE ? 0 : 3);
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; v++) {
      Vector weights;
      memcpy(&weights, w + k * COLUMNS + v * LANES, sizeof weights);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) sums[r][v] = add_products(sums[r][v], weights, x[r * in + k]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    float sum[COLUMNS];
    memcpy(sum, sums[r], sizeof sum);
    for (int c = 0; c < columns; c++) store(y + r * out + c, sum[c] + (bias ? number(bias[c]) : 0));
  }
}

// The compiler makes a `multiply` for every number of rows up to ROWS; this calls the one for `rows`.
template <int R, bool ONCE, typename Vector, typename Word, typename Number>
static void multiply_rows(long rows, const Word* x, const Word* w, const Number* bias, Number* y, long in, long out,
                          long columns) {
  if (rows >= R) return multiply<R, ONCE, Vector>(x, w, bias, y, in, out, columns);
  if constexpr (R > 1) multiply_rows<R - 1, ONCE, Vector>(rows, x, w, bias, y, in, out, columns);
}

template <typename Vector, typename Word, typename Number>
static void linear(const Word* x, const Word* w, const Number* bias, Number* y, long rows, long in, long out, int threads) {
#pragma omp parallel for num_threads(threads)
  for (long c = 0; c < out; c += COLUMNS) {
    long columns = out - c < COLUMNS ? out - c : COLUMNS;  // the last panel may be filled up with zeros
    auto multiply = rows <= ROWS ? multiply_rows<ROWS, true, Vector, Word, Number>
                                 : multiply_rows<ROWS, false, Vector, Word, Number>;
    for (long r = 0; r < rows; r += ROWS)
      multiply(rows - r, x + r * in, w + c * in, bias ? bias + c : bias, y + r * out + c, in, out, columns);
  }
}

extern "C" {

int panel_columns() { return COLUMNS; }

// x [rows, in], w [panels, in, COLUMNS], bias [out] or null, y [rows, out].
void linear_float32(const float* x, const float* w, const float* bias, float* y, long rows, long in, long out, int threads) {
  linear<Floats>(x, w, bias, y, rows, in, out, threads);
}

// The same, two inputs a word: w [panels, in / 2, COLUMNS, 2].
void linear_bfloat16(const uint32_t* x, const uint32_t* w, const uint16_t* bias, uint16_t* y, long rows, long in, long out,
                     int threads) {
  linear<Words>(x, w, bias, y, rows, in / 2, out, threads);
}
}
