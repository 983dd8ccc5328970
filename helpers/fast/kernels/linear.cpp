// y = x W + bias for a few rows x, in the time that it takes to read W once.
//
// With a few rows there is so little arithmetic per weight that the product waits for memory. Two measures keep memory
// busy. First, linear.py packs the weights in the order in which they are used: in panels of COLUMNS outputs, and within a
// panel one line per input. Second, each line prefetches the one that lies AHEAD bytes further on. With at most ROWS rows
// the weights are read once, which decides the hint (prefetch.h).
//
// ROWS x COLUMNS sums stay in registers while a panel is read. With more rows the panel is read again, from the cache. A
// row is always summed in the same order, so its numbers do not depend on the other rows of the batch.

#include <algorithm>

#include "prefetch.h"
#include "shares.h"
#include "vectors.h"

constexpr int ROWS = LANES == 16 ? 8 : 4;  // the sums take 16 of AVX-512's 32 registers, or 8 of AVX2's 16
constexpr int VECTORS = 2, COLUMNS = VECTORS * LANES;
constexpr long AHEAD = 4096;

// Multiply R rows by one panel: x [R, in], w [in, COLUMNS], y [R, columns] with rows that
// begin `step` numbers apart. All loops over
// r and v are unrolled; otherwise the sums would not stay in registers.
template <int R, bool ONCE, typename Vector, typename Word, typename Number>
static void multiply(const Word* x, const Word* w, const Number* bias, Number* y, long in, long step, long columns) {
  Floats sums[R][VECTORS] = {};
  for (long k = 0; k < in; k++) {
    for (int c = 0; c < COLUMNS; c += 16)
      __builtin_prefetch((char*)(w + k * COLUMNS + c) + AHEAD, 0, ONCE ? PREFETCH_ONCE : PREFETCH_OFTEN);
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; v++) {
      Vector weights;
      memcpy(&weights, w + k * COLUMNS + v * LANES, sizeof weights);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) sums[r][v] = add_products(sums[r][v], weights, x[r * in + k]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) store_sums<VECTORS>(sums[r], bias, y + r * step, columns);
}

// Call the `multiply` that is compiled for this number of rows, or the one for R rows if there are more.
template <int R, bool ONCE, typename Vector, typename Word, typename Number>
static void multiply_rows(long rows, const Word* x, const Word* w, const Number* bias, Number* y, long in, long step,
                          long columns) {
  if (rows >= R) return multiply<R, ONCE, Vector>(x, w, bias, y, in, step, columns);
  if constexpr (R > 1) multiply_rows<R - 1, ONCE, Vector>(rows, x, w, bias, y, in, step, columns);
}

// The weight: float32 [panels, in, COLUMNS], or bfloat16 [panels, in / 2, COLUMNS, 2].
template <typename Number> Range linear_share(const Number* x, Linear<Number> layer, Number* y, long rows, long step) {
  typedef typename Product<Number>::Vector Vector;
  typedef typename Product<Number>::Word Word;
  auto multiply = rows <= ROWS ? multiply_rows<ROWS, true, Vector, Word, Number>
                               : multiply_rows<ROWS, false, Vector, Word, Number>;
  long in = layer.in * sizeof(Number) / sizeof(Word);
  const Word *words = (const Word*)x, *w = (const Word*)layer.weight;
  Range panels = share_of((layer.out + COLUMNS - 1) / COLUMNS);
  Range own = {panels.begin * COLUMNS, std::min(panels.end * COLUMNS, layer.out)};  // the last panel may be padded
  for (long c = own.begin; c < own.end; c += COLUMNS)
    for (long r = 0; r < rows; r += ROWS)
      multiply(rows - r, words + r * in, w + c * in, layer.bias ? layer.bias + c : nullptr, y + r * step + c, in, step,
               std::min<long>(COLUMNS, own.end - c));
  return own;
}

extern "C" int panel_columns() { return COLUMNS; }

// x [rows, in], w packed, bias [out] or null, y [rows, out].
#define LINEAR(dtype, Number)                                                                                            \
  template Range linear_share(const Number*, Linear<Number>, Number*, long, long);                                       \
  extern "C" void linear_##dtype(const Number* x, const Number* w, const Number* bias, Number* y, long rows, long in,    \
                                 long out, int threads) {                                                                \
    _Pragma("omp parallel num_threads(threads)") linear_share(x, Linear<Number>{w, bias, in, out}, y, rows, out);                      \
  }

LINEAR(float32, float)
LINEAR(bfloat16, uint16_t)
