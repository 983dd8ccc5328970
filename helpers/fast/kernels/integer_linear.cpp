// y = x W + bias, where both x and W are integers of 8 bits: sums of integers are exact, in any order and in any batch.
//
// Each row of x is rounded with a scale of its own, the largest absolute value / 127, as helpers/models/quantization.py
// rounds the outputs of W. W lies in the panels of quantized.cpp. A word holds four inputs of an output in the order 0, 2,
// 1, 3. The inputs of a row are put in this order, too; then the processor's products of four pairs (VNNI) and of tiles
// (AMX) read the words of W where they are.
//
// The floats are those of PyTorch, bit for bit: sum * scale of the row * scale of the output + bias, rounded three times.

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("fp-contract=off")  // no fused multiply-add, which rounds once instead of twice
#endif

#include <cfloat>

#include "prefetch.h"
#include "tiles.h"
#include "vectors.h"
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#include <immintrin.h>
#endif

constexpr int ROWS = LANES == 16 ? 8 : 4;  // see linear.cpp
constexpr int VECTORS = PANEL / LANES;
constexpr long AHEAD = 4096;  // bytes

typedef uint32_t Quads __attribute__((vector_size(LANES)));  // four bytes a word

// A rounded row: value = scale * integer.
struct Row {
  float scale;
  int32_t sum;  // of the integers
};

// Round a row of x to integers. The bits of absolute values, read as integers, have the order of the values, and those of
// NaN are larger than all. A row with NaN or infinity gets zeros, and a scale that makes all outputs NaN.
template <typename Number> static Row round_row(const Number* x, int8_t* integers, long in) {
  Ints most = {}, total = {};
  for (long k = 0; k < in; k += LANES) {
    Ints bits = bit_cast<Ints>(load(x + k)) & 0x7fffffff;
    most = bits > most ? bits : most;
  }
  int32_t largest = 0, sum = 0;
  for (int lane = 0; lane < LANES; lane++) largest = most[lane] > largest ? most[lane] : largest;
  float scale = bit_cast<float>(largest) / 127;
  if (scale < FLT_MIN) scale = FLT_MIN;  // a row of zeros
  for (long k = 0; k < in; k += LANES) {
    Floats value = load(x + k) / scale;
    value = value == value ? value : Floats{};
    Ints rounded = bit_cast<Ints>(value + 12582912) - bit_cast<int32_t>(12582912.0f);  // the rounder of exp, vectors.h
    total += rounded;
    Quads words = bit_cast<Quads>(__builtin_convertvector(rounded, Bytes));
    words = (words & 0xff0000ff) | (words >> 8 & 0xff00) | (words << 8 & 0xff0000);
    memcpy(integers + k, &words, sizeof words);
  }
  for (int lane = 0; lane < LANES; lane++) sum += total[lane];
  return {scale, sum};
}

// Add the products of four pairs of bytes: unsigned ones of w, 128 too large, and signed ones of x.
static inline Ints add_four(Ints sums, Words w, uint32_t x) {
#if defined(__AVX512VNNI__)
  return bit_cast<Ints>(_mm512_dpbusd_epi32(bit_cast<__m512i>(sums), bit_cast<__m512i>(w), _mm512_set1_epi32(x)));
#elif defined(__AVXVNNI__)
  return bit_cast<Ints>(_mm256_dpbusd_avx_epi32(bit_cast<__m256i>(sums), bit_cast<__m256i>(w), _mm256_set1_epi32(x)));
#else
#pragma GCC unroll 4
  for (int n = 0; n < 4; n++) sums += bit_cast<Ints>(w >> (8 * n) & 0xff) * int32_t(int8_t(x >> (8 * n)));
  return sums;
#endif
}

// Multiply R rows of x [rows, words] by a panel w [words, PANEL]; sums [R, PANEL].
template <int R> static void multiply(const uint32_t* x, const uint32_t* w, const Row* rows, int32_t* sums, long words) {
  Ints totals[R][VECTORS];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) totals[r][v] = Ints{} - 128 * rows[r].sum;
  for (long k = 0; k < words; k++)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
      Words some;
      memcpy(&some, w + k * PANEL + v * LANES, sizeof some);
      const char* ahead = (const char*)(w + k * PANEL + v * LANES) + AHEAD;
      if (R < ROWS) __builtin_prefetch(ahead, 0, PREFETCH_ONCE);
      else __builtin_prefetch(ahead, 0, PREFETCH_OFTEN);
      some ^= 0x80808080;
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) totals[r][v] = add_four(totals[r][v], some, x[r * words + k]);
    }
  memcpy(sums, totals, sizeof totals);
}

template <int R> static int multiply_rows(long left, const uint32_t* x, const uint32_t* w, const Row* rows, int32_t* sums,
                                          long words) {
  if constexpr (R > 1)
    if (left < R) return multiply_rows<R / 2>(left, x, w, rows, sums, words);
  multiply<R>(x, w, rows, sums, words);
  return R;
}

template <typename Number>
static void integer_linear(const Number* x, const uint32_t* w, const float* scales, const Number* bias, Number* y,
                           int8_t* integers, Row* rounded, long rows, long in, long out, int threads) {
  const long words = in / 4;
  const bool tiles = words % TILE == 0 && may_use_tiles();
#pragma omp parallel for num_threads(threads) if (rows > ROWS)  // waking threads takes longer than a few rows
  for (long r = 0; r < rows; r++) rounded[r] = round_row(x + r * in, integers + r * in, in);
#pragma omp parallel num_threads(threads)
  {
    if (tiles) configure_tiles();
#pragma omp for
    for (long c = 0; c < out; c += PANEL) {
      alignas(64) int32_t sums[2 * TILE * PANEL];
      const long columns = out - c < PANEL ? out - c : PANEL;
      for (long r = 0, n; r < rows; r += n) {
        const uint32_t *panel = w + c * words, *numbers = (const uint32_t*)integers + r * words;
        n = tiles ? multiply_tiles(rows - r, numbers, panel, sums, words)
                  : multiply_rows<ROWS>(rows - r, numbers, panel, rounded + r, sums, words);
        for (long i = 0; i < n; i++) {
          Floats products[VECTORS];
          for (int v = 0; v < VECTORS; v++) {
            Ints some;
            memcpy(&some, sums + i * PANEL + v * LANES, sizeof some);
            products[v] = __builtin_convertvector(some, Floats) * rounded[r + i].scale * load(scales + c + v * LANES);
          }
          store_sums<VECTORS>(products, bias ? bias + c : bias, y + (r + i) * out + c, columns);
        }
      }
    }
    if (tiles) release_tiles();
  }
}

extern "C" {

// x [rows, in], w [panels, in / 4, PANEL], scales [panels, 1, PANEL], bias [out] or null, y [rows, out]; buffers: integers
// [rows, up to a multiple of 2 * TILE; in], rounded [rows, 2]. `in` is a multiple of 32.
void integer_linear_float32(const float* x, const uint32_t* w, const float* scales, const float* bias, float* y,
                            int8_t* integers, Row* rounded, long rows, long in, long out, int threads) {
  integer_linear(x, w, scales, bias, y, integers, rounded, rows, in, out, threads);
}

void integer_linear_bfloat16(const uint16_t* x, const uint32_t* w, const float* scales, const uint16_t* bias, uint16_t* y,
                             int8_t* integers, Row* rounded, long rows, long in, long out, int threads) {
  integer_linear(x, w, scales, bias, y, integers, rounded, rows, in, out, threads);
}
}
