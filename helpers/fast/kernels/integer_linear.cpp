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

#include <algorithm>
#include <cfloat>

#include "prefetch.h"
#include "shares.h"
#include "tiles.h"
#include "vectors.h"
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#include <immintrin.h>
#endif

constexpr int ROWS = LANES == 16 ? 8 : 4;  // see linear.cpp
constexpr int VECTORS = PANEL / LANES;
constexpr long AHEAD = 4096;  // bytes

typedef uint32_t Quads __attribute__((vector_size(LANES)));  // four bytes a word

// Round a row of x to integers. The bits of absolute values, read as integers, have the order of the values, and those of
// NaN are larger than all. A row with NaN or infinity gets zeros, and a scale that makes all outputs NaN.
template <typename Number> static RoundedRow round_row(const Number* x, int8_t* integers, long in) {
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
    Ints rounded = bit_cast<Ints>(value + 12582912) - bit_cast<int32_t>(12582912.0f);  // 1.5 * 2^23: the lowest bits
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
template <int R> static void multiply(const uint32_t* x, const uint32_t* w, const RoundedRow* rows, int32_t* sums, long words) {
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

template <int R> static int multiply_rows(long left, const uint32_t* x, const uint32_t* w, const RoundedRow* rows, int32_t* sums,
                                          long words) {
  if constexpr (R > 1)
    if (left < R) return multiply_rows<R / 2>(left, x, w, rows, sums, words);
  multiply<R>(x, w, rows, sums, words);
  return R;
}

template <typename Number> void round_rows(const Number* x, RoundedRows rounded, Range rows, long in) {
  for (long r = rows.begin; r < rows.end; r++) rounded.rows[r] = round_row(x + r * in, rounded.integers + r * in, in);
}

template <typename Number>
Range integer_share(RoundedRows x, const Linear<Number>& layer, Number* y, long rows, long step) {
  const long words = layer.in / 4;
  const auto *w = (const uint32_t*)layer.weight, *integers = (const uint32_t*)x.integers;
  const auto* scales = (const float*)layer.scales;
  const bool tiles = words % TILE == 0 && may_use_tiles();
  const Range panels = share_of((layer.out + PANEL - 1) / PANEL);
  const Range own = {panels.begin * PANEL, std::min(panels.end * PANEL, layer.out)};
  const long blocks = tiles ? blocks_of_rows(rows, words) : rows > 0;
  if (tiles) configure_tiles(rows);
  for (long block = 0; block < blocks; block++)
    for (long c = own.begin; c < own.end; c += PANEL) {
      const Range some = block_of_rows(block, blocks, rows);
      auto store = [&](long r, const int32_t* sums) {
        Floats products[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
          Ints some;
          memcpy(&some, sums + v * LANES, sizeof some);
          products[v] = __builtin_convertvector(some, Floats) * x.rows[r].scale * load(scales + c + v * LANES);
        }
        store_sums<VECTORS>(products, layer.bias ? layer.bias + c : nullptr, y + r * step + c,
                            std::min<long>(PANEL, own.end - c));
      };
      const uint32_t* panel = w + c * words;
      if (tiles) {
        multiply_panel<int32_t>(integers + some.begin * words, some.end - some.begin, panel, words, false,
                                [&](long r, const int32_t* sums) { store(some.begin + r, sums); });
        continue;
      }
      for (long r = some.begin; r < some.end;) {
        alignas(64) int32_t sums[ROWS][PANEL];
        const long first = r;
        r += multiply_rows<ROWS>(some.end - r, integers + r * words, panel, x.rows + r, *sums, words);
        for (long i = first; i < r; i++) store(i, sums[i - first]);
      }
    }
  if (tiles) release_tiles();
  return own;
}

// x [rows, in], y [rows, out]; the rounded rows are a buffer. The layer's weight [panels, in / 4, PANEL], scales
// [panels, 1, PANEL]; `in` is a multiple of 32.
#define INTEGER_LINEAR(dtype, Number)                                                                                    \
  template void round_rows(const Number*, RoundedRows, Range, long);                                                     \
  template Range integer_share(RoundedRows, const Linear<Number>&, Number*, long, long);                                 \
  extern "C" void integer_linear_##dtype(const Number* x, const Linear<Number>* layer, Number* y, int8_t* integers,      \
                                         RoundedRow* rounded, long rows, int threads) {                                  \
    bool few = rows <= ROWS; /* waking threads takes longer than rounding these */                                       \
    _Pragma("omp parallel num_threads(threads) if (!few)")                                                               \
    round_rows(x, {integers, rounded}, share_of(rows), layer->in);                                                       \
    _Pragma("omp parallel num_threads(threads)")                                                                         \
    integer_share({integers, rounded}, *layer, y, rows, layer->out);                                                     \
  }

INTEGER_LINEAR(float32, float)
INTEGER_LINEAR(bfloat16, uint16_t)
