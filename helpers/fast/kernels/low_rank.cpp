// What adapters add to a linear layer: x a^T b for the rows of each adapter.
//
// Few rows have the same adapter, so the products wait for memory, and each matrix is read once: `a` by whichever thread
// multiplies by these rows of it, `b` by the threads that have computed the outputs that it adds to. What lies between the
// two products is kept in float32.
//
// A row is always summed in the same order, so its numbers do not depend on the other rows of the batch.

#include <algorithm>

#include "shares.h"
#include "vectors.h"

constexpr int ROWS = LANES == 16 ? 4 : 2, RANKS = 4, VECTORS = 4;  // the sums take 16 of AVX-512's 32 registers, or 8 of AVX2's 16

// Multiply R rows of x by `ranks` rows of a, at most RANKS.
template <int R, typename Number>
static void shrink(const Number* x, const Number* a, float* inner, long in, long ranks, long rank) {
  const Number* rows[RANKS];
  for (int o = 0; o < RANKS; o++) rows[o] = a + (o < ranks ? o : 0) * in;
  Floats sums[R][RANKS] = {};
  long k = 0;
  for (; k + LANES <= in; k += LANES) {
    Floats inputs[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) inputs[r] = load(x + r * in + k);
#pragma GCC unroll 4
    for (int o = 0; o < RANKS; o++) {
      Floats weights = load(rows[o] + k);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) sums[r][o] += weights * inputs[r];
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) {
    Four four = sum(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
    for (int o = 0; o < ranks; o++) {
      float last = 0;
      for (long i = k; i < in; i++) last += to_float(x[r * in + i]) * to_float(rows[o][i]);
      inner[r * rank + o] = four[o] + last;
    }
  }
}

template <typename Number>
void shrink_share(const Number* x, LowRank<Number> matrices, float* inner, long rows, long in, long& task) {
  for (long o = 0; o < matrices.rank; o += RANKS)
    for (long r = 0; r < rows; task++) {
      long count = rows - r < ROWS ? 1 : ROWS;
      auto multiply = count == 1 ? shrink<1, Number> : shrink<ROWS, Number>;
      if (task % omp_get_num_threads() == omp_get_thread_num())
        multiply(x + r * in, matrices.a + o * in, inner + r * matrices.rank + o, in,
                 std::min<long>(RANKS, matrices.rank - o), matrices.rank);
      r += count;
    }
}

// Add the products of R rows to as many groups of V vectors of outputs as there are from c on. Return where they end.
template <int R, int V, typename Number>
static long expand(const float* inner, LowRank<Number> matrices, Number* y, long out, long step, long c, long end) {
  for (; c + V * LANES <= end; c += V * LANES) {
    Floats sums[R][V];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) sums[r][v] = load(y + r * step + c + v * LANES);
    for (long k = 0; k < matrices.rank; k++)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) {
        Floats weights = load(matrices.b + k * out + c + v * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) sums[r][v] += weights * inner[r * matrices.rank + k];
      }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) store(y + r * step + c + v * LANES, sums[r][v]);
  }
  return c;
}

template <int R, typename Number>
static void expand_rows(const float* inner, LowRank<Number> matrices, Number* y, long out, long step, Range outputs) {
  long c = expand<R, VECTORS>(inner, matrices, y, out, step, outputs.begin, outputs.end);
  c = expand<R, 1>(inner, matrices, y, out, step, c, outputs.end);
  for (; c < outputs.end; c++)
    for (int r = 0; r < R; r++) {
      float sum = to_float(y[r * step + c]);
      for (long k = 0; k < matrices.rank; k++) sum += to_float(matrices.b[k * out + c]) * inner[r * matrices.rank + k];
      store(y + r * step + c, sum);
    }
}

template <typename Number>
void expand_outputs(const float* inner, LowRank<Number> matrices, Number* y, long rows, long out, long step, Range outputs) {
  for (long r = 0; r < rows;) {
    long count = rows - r < ROWS ? 1 : ROWS;
    auto add = count == 1 ? expand_rows<1, Number> : expand_rows<ROWS, Number>;
    add(inner + r * matrices.rank, matrices, y + r * step, out, step, outputs);
    r += count;
  }
}

#define LOW_RANK(Number)                                                                                                 \
  template void shrink_share(const Number*, LowRank<Number>, float*, long, long, long&);                                 \
  template void expand_outputs(const float*, LowRank<Number>, Number*, long, long, long, Range);

LOW_RANK(float)
LOW_RANK(uint16_t)
