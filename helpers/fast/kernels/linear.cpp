// y = x W + bias for a few rows x, in the time that it takes to read W once.
//
// With a few rows there is so little arithmetic per weight that the product waits for memory. Two measures keep memory
// busy. First, linear.py packs the weights in the order in which they are used: in panels of COLUMNS outputs, and within a
// panel one line per input. Second, each line prefetches one that is used later. With at most ROWS rows the weights are
// read once, which decides the hint (prefetch.h).
//
// ROWS x COLUMNS sums stay in registers while a panel is read. With more rows the panel is read several times, from the
// cache. If only the first pass prefetched, memory would be idle during the others, so each pass prefetches its part of the
// next panel. 16 rows of float32 take two thirds as long this way on an AMD EPYC (Zen 3), and 64 rows four fifths on an Intel
// Xeon with AVX-512. With wide passes (vectors.h), 12 rows of float32 fit into one. Up to 32 take a few, over a block of the
// panel instead of all of it: it stays in the first-level cache, and the sums so far wait on the stack. From 48 rows per
// thread on, rows are packed (packed_rows.h); in between, passes have 8 rows.
//
// Matrix registers (tiles.h) multiply bfloat16, whatever the number of rows: one row takes as long as in vectors, and 32
// take a quarter of the time. A row is always summed in the same order, so its numbers do not depend on the other rows.

#include <algorithm>

#include "packed_rows.h"
#include "prefetch.h"
#include "shares.h"
#include "tiles.h"
#include "vectors.h"

constexpr int ROWS = LANES == 16 ? 8 : 6;  // the sums take 16 of AVX-512's 32 registers, or 12 of AVX2's 16
template <typename Number> constexpr int FEW = WIDE_PASSES<Number> ? 32 : ROWS;
template <typename Number> constexpr int FEW_ROWS = WIDE_PASSES<Number> ? PASS_ROWS : ROWS;  // of a pass, up to FEW
constexpr long BLOCK = 64;  // inputs
constexpr int VECTORS = 2, COLUMNS = VECTORS * LANES;
constexpr long AHEAD = 4096, LINE = 4 * COLUMNS;  // bytes
static_assert(!WIDE_PASSES<float> || COLUMNS == PANEL);

// The sums so far, in rows that begin `step` numbers apart. The last panel may have fewer than COLUMNS `columns`; for the
// others, the size of a copy is known at compile time.
struct Partial {
  float* sums;
  long step, columns;

  void read(long r, Floats (&row)[VECTORS]) const {
    float some[COLUMNS] = {};
    if (columns < COLUMNS) memcpy(some, sums + r * step, columns * sizeof *sums);
    memcpy(row, columns < COLUMNS ? some : sums + r * step, sizeof row);
  }

  void write(long r, const Floats (&row)[VECTORS]) const {
    float some[COLUMNS];
    memcpy(columns < COLUMNS ? some : sums + r * step, row, sizeof row);
    if (columns < COLUMNS) memcpy(sums + r * step, some, columns * sizeof *sums);
  }
};

// How `multiply` reads its operands. WHOLE: all inputs. PARTIAL: some inputs, whose products are added to the sums so far.
// PACKED: as PARTIAL, but from packed rows. Choosing at run time made products of 512 rows a seventh slower.
enum Reading { WHOLE, PARTIAL, PACKED };

// Multiply R rows by some inputs of one panel: x [R, in] (packed: [inputs, PASS_ROWS]), w [inputs, COLUMNS], y [R, columns] with
// rows that begin `step` numbers apart. Each line prefetches one, and these begin `pace` bytes apart. The loop over r is
// unrolled; otherwise the sums would not stay in registers.
template <int R, bool ONCE, Reading READING, typename Vector, typename Word, typename Number>
static void multiply(const Word* x, const Word* w, const Number* bias, Number* y, long in, long step, long columns,
                     const char* ahead, long pace, Range inputs, Partial partial) {
  Floats sums[R][VECTORS] = {};
  if constexpr (READING != WHOLE)
    if (inputs.begin > 0) {
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) partial.read(r, sums[r]);
    }
  for (long k = 0; k < (READING == WHOLE ? in : inputs.end - inputs.begin); k++) {
    for (long byte = 0; byte < LINE; byte += 64)
      __builtin_prefetch(ahead + k * pace + byte, 0, ONCE ? PREFETCH_ONCE : PREFETCH_OFTEN);
    Vector first, second;  // both are loaded before the rows use them: else GCC loads them again for each row of AVX2
    memcpy(&first, w + k * COLUMNS, sizeof first);
    memcpy(&second, w + k * COLUMNS + LANES, sizeof second);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const Word number = READING == PACKED ? x[k * PASS_ROWS + r] : x[r * in + k];
      sums[r][0] = add_products(sums[r][0], first, number);
      sums[r][1] = add_products(sums[r][1], second, number);
    }
  }
  if constexpr (READING != WHOLE)
    if (inputs.end < in) {
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) partial.write(r, sums[r]);
      return;
    }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) store_sums<VECTORS>(sums[r], bias, y + r * step, columns);
}

// Call the `multiply` that is compiled for this number of rows, at most R.
template <int R, bool ONCE, Reading READING, typename Vector, typename Word, typename Number>
static void multiply_rows(long rows, const Word* x, const Word* w, const Number* bias, Number* y, long in, long step, long columns,
                          const char* ahead, long pace, Range inputs, Partial partial) {
  if (rows == R) return multiply<R, ONCE, READING, Vector>(x, w, bias, y, in, step, columns, ahead, pace, inputs, partial);
  if constexpr (R > 1)
    multiply_rows<R - 1, ONCE, READING, Vector>(rows, x, w, bias, y, in, step, columns, ahead, pace, inputs, partial);
}

// Compute some panels in matrix registers, for x [rows, in] and w [panels, in, COLUMNS] of words.
static void multiply_in_tiles(const uint32_t* x, const uint32_t* w, const uint16_t* bias, uint16_t* y, long rows, long in,
                              long step, Range columns) {
  const long blocks = blocks_of_rows(rows, in);
  configure_tiles(rows);
  for (long block = 0; block < blocks; block++)
    for (long c = columns.begin; c < columns.end; c += COLUMNS) {
      const Range own = block_of_rows(block, blocks, rows);
      multiply_panel<float>(x + own.begin * in, own.end - own.begin, w + c * in, in, true, [&](long r, const float* sums) {
        Floats vectors[VECTORS];
        memcpy(vectors, sums, sizeof vectors);
        store_sums<VECTORS>(vectors, bias ? bias + c : nullptr, y + (own.begin + r) * step + c, columns.end - c);
      });
    }
  release_tiles();
}

// The weight: float32 [panels, in, COLUMNS], or bfloat16 [panels, in / 2, COLUMNS, 2].
template <typename Number> Range linear_share(const Number* x, Linear<Number> layer, Number* y, long rows, long step) {
  typedef typename Product<Number>::Vector Vector;
  typedef typename Product<Number>::Word Word;
  const bool few = rows <= FEW<Number>;
  const long in = layer.in * sizeof(Number) / sizeof(Word), most = few ? FEW_ROWS<Number> : ROWS;
  const long passes = std::max(1L, (rows + most - 1) / most), block = few && passes > 1 ? BLOCK : in;
  const long pace = LINE / passes;  // the passes prefetch the next panel or block together
  auto multiply = passes == 1 ? multiply_rows<FEW_ROWS<Number>, true, WHOLE, Vector, Word, Number>
                  : few       ? multiply_rows<FEW_ROWS<Number>, false, PARTIAL, Vector, Word, Number>
                              : multiply_rows<ROWS, false, WHOLE, Vector, Word, Number>;
  const Word *words = (const Word*)x, *w = (const Word*)layer.weight;
  Range panels = share_of((layer.out + COLUMNS - 1) / COLUMNS);
  Range own = {panels.begin * COLUMNS, std::min(panels.end * COLUMNS, layer.out)};  // the last panel may be padded
  if constexpr (sizeof(Number) == 2)
    if (in % TILE == 0 && may_use_tiles()) {
      multiply_in_tiles(words, w, layer.bias, y, rows, in, step, own);
      return own;
    }
  if constexpr (WIDE_PASSES<Number>)
    if (are_many(rows)) {
      multiply_packed(x, rows, in, layer.out, [&](const Pass* pass, const Pass* end, Range inputs, long c) {
        const long pace = LINE / (end - pass), columns = std::min<long>(COLUMNS, layer.out - c);
        const Word* piece = w + c * in + inputs.begin * COLUMNS;
        const char* ahead = (const char*)(piece + in * COLUMNS);  // the next panel
        for (; pass < end; pass++, ahead += (inputs.end - inputs.begin) * pace) {
          Number* outputs = y + pass->rows.begin * step + c;
          multiply_rows<PASS_ROWS, false, PACKED, Vector>(pass->rows.end - pass->rows.begin, pass->x, piece,
                                                          layer.bias ? layer.bias + c : nullptr, outputs, in, step, columns,
                                                          ahead, pace, inputs, {outputs, step, columns});
        }
      });
      return own;
    }
  alignas(64) float partial[FEW<Number>][COLUMNS];
  for (long c = own.begin; c < own.end; c += COLUMNS)
    for (long k = 0; k < in; k += block) {
      const Range inputs = {k, std::min(k + block, in)};
      const Word* some = w + c * in + k * COLUMNS;
      for (long pass = 0; pass < passes; pass++) {
        long begin = rows * pass / passes, end = rows * (pass + 1) / passes;
        const char* ahead = (const char*)some + (passes == 1 ? AHEAD : (inputs.end - k) * (LINE + pass * pace));
        multiply(end - begin, words + begin * in + k, some, layer.bias ? layer.bias + c : nullptr, y + begin * step + c, in,
                 step, std::min<long>(COLUMNS, own.end - c), ahead, pace, inputs,
                 {few ? partial[begin] : nullptr, COLUMNS, COLUMNS});
      }
    }
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
