// y = x W + bias, where W is stored as integers of 8 or 4 bits with a scale for each group of inputs.
//
// A decode waits for the weights, so it is fast if they take few bytes. The floats are never stored: an integer becomes a
// float in a register, right before it is multiplied. Integers of up to 8 bits are exact in bfloat16, too. Without matrix
// registers, the products of a group are summed first, and each sum is multiplied by the scale of its group.
//
// W lies in panels of PANEL outputs. A panel has one line per word, and a word of 32 bits holds the integers of 32 / BITS
// neighboring inputs of one output: even inputs in its lower half, odd ones in its upper half, so that one instruction
// makes pairs of bfloat16 numbers.
//
// For more than CONVERTED rows, a panel is converted once, into a buffer that stays in the cache. The sums are the same and
// have the same order, so the numbers of a row do not depend on the other rows of the batch.
//
// Matrix registers (tiles.h) multiply by a converted panel, in another order; vectors then multiply few rows in that order.
// Multiplying each group's sums by its scale would take longer than the products themselves. So if a layer has several
// groups, its integers are multiplied by their scales as they are converted, also for few rows. With the scales of
// helpers/models/quantization.py, the products of 4-bit integers are exact in bfloat16. With others, they are rounded to
// bfloat16, ties away from zero. (Matrix registers treat numbers below 2^-126 as zero, and vectors don't. With such weights
// or products, a row may depend on the number of rows.)

#include <algorithm>

#include "prefetch.h"
#include "shares.h"
#include "tiles.h"
#include "vectors.h"
#if defined(__AVX512BW__)
#include <immintrin.h>
#endif

constexpr int ROWS = LANES == 16 ? 8 : 4;  // see linear.cpp
template <typename Number> constexpr long MANY_ROWS = WIDE_PASSES<Number> ? PASS_ROWS : ROWS;  // with a converted panel
constexpr int VECTORS = 2;
constexpr int CONVERTED = 8 * ROWS;  // up to here, converting a panel again for every ROWS rows takes less time
constexpr int IN_VECTORS = 4;         // up to here, vectors are faster than matrix registers,
constexpr int SCALED_IN_VECTORS = 2;  // and up to here if weights are scaled
constexpr long AHEAD = 4096;  // bytes

// Return the integers of one input as floats: shifts move them to the top of the word and back, with their sign.
template <int BITS> static inline Floats integers(Words words, int input) {
  int above = 32 - BITS - (input % 2 * 16 + input / 2 * BITS);
  return __builtin_convertvector(bit_cast<Ints>(words << above) >> (32 - BITS), Floats);
}

// Return the weights of step `n` of a word, before scaling: one input as float32, or two as a pair of bfloat16 numbers.
template <int BITS> static inline void weights_of(Words words, int n, Floats* weights) {
#if defined(__AVX512BW__)
  if constexpr (BITS == 4) {  // the processor looks up the lowest four bits of each index
    const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
    *weights = bit_cast<Floats>(_mm512_permutexvar_ps(bit_cast<__m512i>(words >> (n % 2 * 16 + n / 2 * 4)), table));
    return;
  }
#endif
  *weights = integers<BITS>(words, n);
}

template <int BITS> static inline void weights_of(Words words, int n, Words* weights) {
#if defined(__AVX512BW__)
  if constexpr (BITS == 4) {  // the lowest five bits, of which the fifth makes no difference
    alignas(64) static const uint16_t table[32] = {
        0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
        0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80};
    *weights = bit_cast<Words>(_mm512_permutexvar_epi16(bit_cast<__m512i>(words >> (4 * n)), _mm512_load_si512(table)));
    return;
  }
#endif
  Words even = bit_cast<Words>(integers<BITS>(words, 2 * n)), odd = bit_cast<Words>(integers<BITS>(words, 2 * n + 1));
  *weights = even >> 16 | odd;  // the integers are exact in bfloat16, so the lower halves are zero
}

static inline Words load_words(const uint32_t* w) {
  Words words;
  memcpy(&words, w, sizeof words);
  return words;
}

// The sizes of a product: `steps` per row of x, which are one float32 or two bfloat16 inputs each; words per group. With
// at most ROWS rows a weight is read `once`, and need not stay in the caches (prefetch.h). Rows of y begin `step` apart.
struct Sizes {
  long steps, step, groups, group_words;
  bool once;
};

// Multiply the sums of a group by its scales, and add them to the totals.
template <int R, typename Scale>
static inline void add_group(Floats (&totals)[R][VECTORS], Floats (&sums)[R][VECTORS], const Scale* scales) {
#pragma GCC unroll 2
  for (int v = 0; v < VECTORS; v++) {
    Floats scale = load(scales + v * LANES);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) totals[r][v] += sums[r][v] * scale;
  }
}

// Add the bias to the totals, and write the first `columns` outputs of each row.
template <int R, typename Number>
static inline void store_totals(Floats (&totals)[R][VECTORS], const Number* bias, Number* y, Sizes sizes, long columns) {
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) store_sums<VECTORS>(totals[r], bias, y + r * sizes.step, columns);
}

// Multiply R rows by VECTORS * LANES outputs of a panel w [words, PANEL].
template <int R, int BITS, typename Vector, typename Word, typename Number, typename Scale>
static void multiply(const Word* x, const uint32_t* w, const Scale* scales, const Number* bias, Number* y, Sizes sizes,
                     long columns) {
  constexpr int STEPS = 32 / BITS / (sizeof(Word) / sizeof(Number));
  Floats totals[R][VECTORS] = {};
  for (long group = 0, k = 0; group < sizes.groups; group++) {
    Floats sums[R][VECTORS] = {};
    for (long word = 0; word < sizes.group_words; word++, k += STEPS) {
      Words words[VECTORS];
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; v++) {
        words[v] = load_words(w + k / STEPS * PANEL + v * LANES);
        const char* ahead = (const char*)(w + k / STEPS * PANEL + v * LANES) + AHEAD;
        if (sizes.once) __builtin_prefetch(ahead, 0, PREFETCH_ONCE);
        else __builtin_prefetch(ahead, 0, PREFETCH_OFTEN);
      }
#pragma GCC unroll 8
      for (int n = 0; n < STEPS; n++) {
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) {
          Vector weights;
          weights_of<BITS>(words[v], n, &weights);
#pragma GCC unroll 8
          for (int r = 0; r < R; r++) sums[r][v] = add_products(sums[r][v], weights, x[r * sizes.steps + k + n]);
        }
      }
    }
    add_group(totals, sums, scales + group * PANEL);
  }
  store_totals(totals, bias, y, sizes, columns);
}

// Multiply MANY_ROWS rows by VECTORS * LANES outputs of a converted panel w [steps, PANEL]. This is not `multiply` with
// another template argument, because GCC then kept some sums in memory.
template <typename Vector, typename Word, typename Number, typename Scale>
static void multiply_converted(const Word* x, const uint32_t* w, const Scale* scales, const Number* bias, Number* y, Sizes sizes,
                               long columns) {
  Floats totals[MANY_ROWS<Number>][VECTORS] = {};
  for (long group = 0, k = 0; group < sizes.groups; group++) {
    Floats sums[MANY_ROWS<Number>][VECTORS] = {};
    for (const long end = sizes.steps / sizes.groups * (group + 1); k < end; k++) {
      Vector weights[VECTORS];
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; v++) weights[v] = bit_cast<Vector>(load_words(w + k * PANEL + v * LANES));
#pragma GCC unroll 12
      for (int r = 0; r < MANY_ROWS<Number>; r++)
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) sums[r][v] = add_products(sums[r][v], weights[v], x[r * sizes.steps + k]);
    }
    add_group(totals, sums, scales + group * PANEL);
  }
  store_totals(totals, bias, y, sizes, columns);
}

// Multiply as many rows as the largest compiled `multiply` that is not too large, and return how many. Only powers of two
// are compiled, because each takes the compiler a while.
template <int R, int BITS, typename Vector, typename Word, typename Number, typename Scale>
static int multiply_rows(long rows, const Word* x, const uint32_t* w, const Scale* scales, const Number* bias, Number* y,
                         Sizes sizes, long columns) {
  if constexpr (R > 1)
    if (rows < R) return multiply_rows<R / 2, BITS, Vector>(rows, x, w, scales, bias, y, sizes, columns);
  multiply<R, BITS, Vector>(x, w, scales, bias, y, sizes, columns);
  return R;
}

// What scales multiply: the sums of a group, or each weight. A scaled weight is exact in bfloat16, or has to be rounded.
enum Scaling { SUMS, EXACT_WEIGHTS, ROUNDED_WEIGHTS };

// Choose for a panel with these scales [groups, PANEL], in matrix registers. A product is exact if an integer of BITS - 1
// digits and a scale have at most 8 digits together. (The smallest integer, a power of two, has one digit.)
template <int BITS, typename Scale> static Scaling scaling_in_tiles(const Scale* scales, long groups) {
  if (groups == 1) return SUMS;
  uint32_t digits = 0;
  for (long i = 0; i < groups * PANEL; i++) digits |= bit_cast<uint32_t>(to_float(scales[i]));
  return digits << (17 - BITS) ? ROUNDED_WEIGHTS : EXACT_WEIGHTS;
}

// Return the weights of step `n` of a word as floats that are exact in bfloat16: of an even input, and of the odd one after it.
template <int BITS, Scaling SCALING> static inline void even_and_odd(Words words, int n, Floats scale, Floats (&weights)[2]) {
#pragma GCC unroll 2
  for (int odd = 0; odd < 2; odd++) {
    weights_of<BITS>(words, 2 * n + odd, &weights[odd]);
    if constexpr (SCALING != SUMS) weights[odd] *= scale;
    if constexpr (SCALING == ROUNDED_WEIGHTS)  // ties to even would take three operations more
      weights[odd] = bit_cast<Floats>((bit_cast<Words>(weights[odd]) + 0x8000) & 0xffff0000u);
  }
}

// Convert a panel [words, PANEL] to [steps, PANEL], for scales [groups, PANEL].
template <int BITS, Scaling SCALING, typename Vector, typename Scale>
static void convert(const uint32_t* w, const Scale* scales, uint32_t* converted, Sizes sizes) {
  constexpr int STEPS = 32 / BITS / (std::is_same_v<Vector, Words> ? 2 : 1);
  for (long group = 0; group < sizes.groups; group++, scales += PANEL) {
    Floats scale[PANEL / LANES];
    for (int v = 0; v < PANEL / LANES; v++) scale[v] = load(scales + v * LANES);
    for (long word = 0; word < sizes.group_words; word++, w += PANEL, converted += STEPS * PANEL)
#pragma GCC unroll 4
      for (int v = 0; v < PANEL / LANES; v++) {
        const Words words = load_words(w + v * LANES);
        __builtin_prefetch((const char*)(w + v * LANES) + AHEAD, 0, PREFETCH_ONCE);
#pragma GCC unroll 8
        for (int n = 0; n < STEPS; n++) {
          Vector weights;
          if constexpr (SCALING == SUMS) {
            weights_of<BITS>(words, n, &weights);
          } else {
            Floats both[2];
            even_and_odd<BITS, SCALING>(words, n, scale[v], both);
            weights = bit_cast<Words>(both[0]) >> 16 | bit_cast<Words>(both[1]);
          }
          memcpy(converted + n * PANEL + v * LANES, &weights, sizeof weights);
        }
      }
  }
}

// Scale the sums unless the weights were scaled, add the bias, and write the first `columns` outputs.
template <Scaling SCALING>
static inline void store_scaled(Floats* sums, const Floats* scale, const uint16_t* bias, uint16_t* y, long columns) {
  // Added to zero: else the compiler might fuse the product with the bias, which rounds once, in one place and not in another.
  for (int v = 0; v < VECTORS && SCALING == SUMS; v++) sums[v] = Floats{} + sums[v] * scale[v];
  store_sums<VECTORS>(sums, bias, y, columns);
}

// Multiply R rows by a panel w [words, PANEL] in the order of matrix registers: the products of even and of odd inputs of a
// tile are summed apart, and then both are added.
template <int R, int BITS, Scaling SCALING, typename Scale>
static void multiply_in_their_order(const uint32_t* x, const uint32_t* w, const Scale* scales, const uint16_t* bias,
                                    uint16_t* y, Sizes sizes, long columns) {
  constexpr int STEPS = 16 / BITS;
  Floats sums[R][VECTORS] = {}, scale[VECTORS];
  for (long group = 0; group < sizes.groups; group++) {
    for (int v = 0; v < VECTORS; v++) scale[v] = load(scales + group * PANEL + v * LANES);
    for (long word = 0; word < sizes.group_words; word += TILE / STEPS) {
      Floats parts[R][VECTORS][2] = {};
      for (long end = TILE / STEPS; end; end--, w += PANEL, x += STEPS)
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) {
          Words words = load_words(w + v * LANES);
          __builtin_prefetch((const char*)(w + v * LANES) + AHEAD, 0, PREFETCH_ONCE);
#pragma GCC unroll 4
          for (int n = 0; n < STEPS; n++) {
            Floats weights[2];
            even_and_odd<BITS, SCALING>(words, n, scale[v], weights);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
              uint32_t inputs = x[r * sizes.steps + n];
              parts[r][v][0] += weights[0] * bit_cast<float>(inputs << 16);
              parts[r][v][1] += weights[1] * bit_cast<float>(inputs & 0xffff0000u);
            }
          }
        }
#pragma GCC unroll 4
      for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) sums[r][v] += parts[r][v][0] + parts[r][v][1];
    }
  }
  for (int r = 0; r < R; r++) store_scaled<SCALING>(sums[r], scale, bias, y + r * sizes.step, columns);
}

// Multiply rows by a panel w [words, PANEL]: many in matrix registers, after converting it to `converted` [steps, PANEL]; few in
// vectors, in the same order.
template <int BITS, Scaling SCALING, typename Scale>
static void multiply_in_tiles(const uint32_t* x, const uint32_t* w, const Scale* scales, const uint16_t* bias, uint16_t* y,
                              long rows, Sizes sizes, long columns, uint32_t* converted) {
  if (rows <= (SCALING == SUMS ? IN_VECTORS : SCALED_IN_VECTORS)) {
    auto multiply = rows == 1 ? multiply_in_their_order<1, BITS, SCALING, Scale> : multiply_in_their_order<2, BITS, SCALING, Scale>;
    if constexpr (SCALING == SUMS)
      if (rows > 2)
        multiply = rows == 3 ? multiply_in_their_order<3, BITS, SUMS, Scale> : multiply_in_their_order<4, BITS, SUMS, Scale>;
    return multiply(x, w, scales, bias, y, sizes, columns);
  }
  convert<BITS, SCALING, Words>(w, scales, converted, sizes);
  multiply_panel<float>(x, rows, converted, sizes.steps, false, [&](long r, const float* numbers) {
    Floats sums[VECTORS], scale[VECTORS];
    for (int v = 0; v < VECTORS; v++) sums[v] = load(numbers + v * LANES), scale[v] = load(scales + v * LANES);
    store_scaled<SCALING>(sums, scale, bias, y + r * sizes.step, columns);
  });
}

template <int BITS, typename Scale, typename Number>
static Range quantized_share(const Number* x, const Linear<Number>& layer, Number* y, long rows, long step, Number* buffer) {
  typedef typename Product<Number>::Vector Vector;
  typedef typename Product<Number>::Word Word;
  constexpr int PER_STEP = sizeof(Word) / sizeof(Number);
  const long words = layer.in * BITS / 32;
  const Sizes sizes = {layer.in / PER_STEP, step, layer.groups, words / layer.groups, rows <= ROWS};
  const Word* inputs = (const Word*)x;
  uint32_t* converted = (uint32_t*)buffer;
  const Range panels = share_of((layer.out + PANEL - 1) / PANEL);
  const Range own = {panels.begin * PANEL, std::min(panels.end * PANEL, layer.out)};
  const bool tiles = rows > 0 && PER_STEP == 2 && sizes.steps / sizes.groups % TILE == 0 && may_use_tiles();
  const long blocks = tiles ? blocks_of_rows(rows, sizes.steps) : rows > 0;
  if (tiles) configure_tiles(rows);
  for (long block = 0; block < blocks; block++) {
    const Range some = block_of_rows(block, blocks, rows);
    for (long c = own.begin; c < own.end; c += PANEL) {
      const uint32_t* panel = (const uint32_t*)layer.weight + c * words;
      const Scale* scales = (const Scale*)layer.scales + c * layer.groups;
      if constexpr (PER_STEP == 2)
        if (tiles) {
          const Scaling scaling = scaling_in_tiles<BITS>(scales, layer.groups);
          auto multiply = scaling == SUMS            ? multiply_in_tiles<BITS, SUMS, Scale>
                          : scaling == EXACT_WEIGHTS ? multiply_in_tiles<BITS, EXACT_WEIGHTS, Scale>
                                                     : multiply_in_tiles<BITS, ROUNDED_WEIGHTS, Scale>;
          multiply(inputs + some.begin * sizes.steps, panel, scales, layer.bias ? layer.bias + c : nullptr,
                   y + some.begin * step + c, some.end - some.begin, sizes, std::min<long>(PANEL, own.end - c), converted);
          continue;
        }
      if (rows > CONVERTED) convert<BITS, SUMS, Vector>(panel, scales, converted, sizes);
      for (long d = c; d < std::min(c + PANEL, own.end); d += VECTORS * LANES) {
        const long columns = std::min<long>(VECTORS * LANES, own.end - d);
        const Scale* scale = scales + d - c;
        const Number* bias = layer.bias ? layer.bias + d : nullptr;
        if (rows > CONVERTED)
          for (long r = 0; r < rows; r += MANY_ROWS<Number>) {
            const long first = std::min(r, rows - MANY_ROWS<Number>);  // the last pass may repeat rows: same bits
            multiply_converted<Vector>(inputs + first * sizes.steps, converted + d - c, scale, bias, y + first * step + d, sizes,
                                       columns);
          }
        else
          for (long r = 0; r < rows;)
            r += multiply_rows<ROWS, BITS, Vector>(rows - r, inputs + r * sizes.steps, panel + d - c, scale, bias,
                                                   y + r * step + d, sizes, columns);
      }
    }
  }
  if (tiles) release_tiles();
  return own;
}

template <typename Number>
Range quantized_share(const Number* x, const Linear<Number>& layer, Number* y, long rows, long step, Number* buffer) {
  if (layer.bits == 8) return quantized_share<8, float>(x, layer, y, rows, step, buffer);
  if (layer.scale_bytes == 4) return quantized_share<4, float>(x, layer, y, rows, step, buffer);
  return quantized_share<4, uint16_t>(x, layer, y, rows, step, buffer);
}

// Store the rounded weight [in, out], from w [panels, words, PANEL] and scales [panels, groups, PANEL].
template <int BITS, typename Number, typename Scale>
static void dequantize(const uint32_t* w, const Scale* scales, Number* weight, long in, long out, long groups, int threads) {
  constexpr int INPUTS = 32 / BITS;  // of a word
  const long words = in / INPUTS, group_words = words / groups;
#pragma omp parallel for num_threads(threads)
  for (long c = 0; c < out; c += PANEL)
    for (long k = 0; k < words; k++)
      for (long v = 0; v < PANEL && c + v < out; v += LANES) {
        Words some = load_words(w + c * words + k * PANEL + v);
        Floats scale = load(scales + c * groups + k / group_words * PANEL + v);
        for (int n = 0; n < INPUTS; n++) {
          Floats numbers = integers<BITS>(some, n) * scale;
          store_sums<1>(&numbers, (const Number*)nullptr, weight + (k * INPUTS + n) * out + c + v, out - c - v);
        }
      }
}

template <typename Number>
static void dequantize(const uint32_t* w, const void* scales, Number* weight, long in, long out, long groups, int bits,
                       int scale_bytes, int threads) {
  if (bits == 8) dequantize<8>(w, (const float*)scales, weight, in, out, groups, threads);
  else if (scale_bytes == 4) dequantize<4>(w, (const float*)scales, weight, in, out, groups, threads);
  else dequantize<4>(w, (const uint16_t*)scales, weight, in, out, groups, threads);
}

extern "C" int rows_without_buffer() { return may_use_tiles() ? SCALED_IN_VECTORS : CONVERTED; }
extern "C" int panel_outputs() { return PANEL; }

// x [rows, in], y [rows, out]; buffers [threads, in, PANEL], used for more than `rows_without_buffer` rows. The layer's weight
// [panels, in * bits / 32, PANEL], scales [panels, groups, PANEL] (float32, or bfloat16 for 4 bits).
#define QUANTIZED(dtype, Number)                                                                                         \
  template Range quantized_share(const Number*, const Linear<Number>&, Number*, long, long, Number*);                    \
  extern "C" void quantized_linear_##dtype(const Number* x, const Linear<Number>* layer, Number* y, Number* buffers,     \
                                           long rows, int threads) {                                                     \
    _Pragma("omp parallel num_threads(threads)")                                                                         \
    quantized_share(x, *layer, y, rows, layer->out, buffers + omp_get_thread_num() * layer->in * PANEL);                 \
  }                                                                                                                      \
  extern "C" void dequantize_##dtype(const uint32_t* w, const void* scales, Number* weight, long in, long out,           \
                                     long groups, int bits, int scale_bytes, int threads) {                              \
    dequantize(w, scales, weight, in, out, groups, bits, scale_bytes, threads);                                          \
  }

QUANTIZED(float32, float)
QUANTIZED(bfloat16, uint16_t)
