// Vectors of float32 numbers, as wide as the processor's registers, in the notation that GCC and Clang share.

#pragma once
#include "numbers.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif

// The rows of a wide pass: their sums with a panel take 24 of AVX-512's 32 registers.
constexpr int PASS_ROWS = 12;

// Whether products use wide passes: in float32 with AVX-512. On AMD's processors, they were not measured.
#if defined(AMD)
template <typename Number> constexpr bool WIDE_PASSES = false;
#else
template <typename Number> constexpr bool WIDE_PASSES = LANES == 16 && sizeof(Number) == 4;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
typedef int8_t Bytes __attribute__((vector_size(LANES)));

static inline Floats load(const float* x) {
  Floats v;
  memcpy(&v, x, sizeof v);
  return v;
}

static inline Floats load(const uint16_t* x) {
  Halves v;
  memcpy(&v, x, sizeof v);
  return bit_cast<Floats>(__builtin_convertvector(v, Words) << 16);
}

static inline Floats load(const int8_t* x) {
  Bytes v;
  memcpy(&v, x, sizeof v);
  // GCC converts the bytes of a vector one by one; these instructions convert all of them.
#if defined(__AVX512F__)
  return __builtin_convertvector(bit_cast<Ints>(_mm512_cvtepi8_epi32(bit_cast<__m128i>(v))), Floats);
#elif defined(__AVX2__)
  return __builtin_convertvector(bit_cast<Ints>(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)x))), Floats);
#else
  return __builtin_convertvector(__builtin_convertvector(v, Ints), Floats);
#endif
}

static inline void store(float* y, Floats x) { memcpy(y, &x, sizeof x); }

static inline void store(uint16_t* y, Floats x) {
#if defined(__AVX512BF16__)
  auto converted = _mm512_cvtneps_pbh(bit_cast<__m512>(x));
#else
  Words word = bit_cast<Words>(x);
  Halves converted = __builtin_convertvector((word + 0x7fff + (word >> 16 & 1)) >> 16, Halves);
#endif
  memcpy(y, &converted, sizeof converted);
}

// What products are made of. A word has 32 bits: one float32, or the bfloat16 numbers of two neighboring inputs.
template <typename Number> struct Product;
template <> struct Product<float> {
  typedef float Word;
  typedef Floats Vector;
};
template <> struct Product<uint16_t> {
  typedef uint32_t Word;
  typedef Words Vector;
};

// Add w * x. Of two bfloat16 numbers in a word, both products are added.
static inline Floats add_products(Floats sums, Floats w, Floats x) { return sums + w * x; }

#if defined(__AVX512BF16__)
static inline Floats add_products(Floats sums, Words w, Words x) {
  return bit_cast<Floats>(_mm512_dpbf16_ps(bit_cast<__m512>(sums), bit_cast<__m512bh>(w), bit_cast<__m512bh>(x)));
}
#else
static inline Floats add_products(Floats sums, Words w, Words x) {
  sums += bit_cast<Floats>(w << 16) * bit_cast<Floats>(x << 16);
  return sums + bit_cast<Floats>(w & 0xffff0000u) * bit_cast<Floats>(x & 0xffff0000u);
}
#endif

static inline Floats add_products(Floats sums, Floats w, float x) { return sums + w * x; }
static inline Floats add_products(Floats sums, Words w, uint32_t x) { return add_products(sums, w, Words{} + x); }

// Add the bias (if not null) to the sums of VECTORS * LANES outputs, and write the first `count` of them to y.
template <int VECTORS, typename Number>
static inline void store_sums(const Floats* sums, const Number* bias, Number* y, long count) {
  Number some[VECTORS * LANES] = {}, numbers[VECTORS * LANES];
  bool whole = count >= VECTORS * LANES;
  if (bias && !whole) memcpy(some, bias, count * sizeof *bias);
  const Number* b = bias && whole ? bias : some;
#pragma GCC unroll 2
  for (int v = 0; v < VECTORS; v++) store((whole ? y : numbers) + v * LANES, sums[v] + load(b + v * LANES));
  if (!whole) memcpy(y, numbers, count * sizeof *y);
}

static inline Floats max(Floats a, Floats b) { return a > b ? a : b; }

typedef float Four __attribute__((vector_size(16)));

// Combine halves until four lanes are left.
template <typename Combine> static inline Four fold(Floats x, Combine combine) {
  typedef float Eight __attribute__((vector_size(32)));
  Eight parts[LANES / 8];
  memcpy(parts, &x, sizeof x);
  if constexpr (LANES == 16) parts[0] = combine(parts[0], parts[LANES / 8 - 1]);
  Four halves[2];
  memcpy(halves, parts, sizeof halves);
  return combine(halves[0], halves[1]);
}

static inline Four fold(Floats x) {
  return fold(x, [](auto a, auto b) { return a + b; });
}

// Return the largest lane.
static inline float largest(Floats x) {
  Four four = fold(x, [](auto a, auto b) { return a > b ? a : b; });
  float first = four[0] > four[1] ? four[0] : four[1], second = four[2] > four[3] ? four[2] : four[3];
  return first > second ? first : second;
}

// Return the sum of all lanes.
static inline float sum(Floats x) {
  Four four = fold(x);
  return (four[0] + four[2]) + (four[1] + four[3]);
}

// Return the sums of all lanes of four vectors.
static inline Four sum(Floats a, Floats b, Floats c, Floats d) {
  Four i = fold(a), j = fold(b), k = fold(c), l = fold(d);
  Four first = Four{i[0], j[0], i[1], j[1]} + Four{i[2], j[2], i[3], j[3]};
  Four second = Four{k[0], l[0], k[1], l[1]} + Four{k[2], l[2], k[3], l[3]};
  return Four{first[0], first[1], second[0], second[1]} + Four{first[2], first[3], second[2], second[3]};
}

// Return x minus the largest whole number that does not exceed it.
static inline Floats fraction(Floats x) {
#if defined(__AVX512DQ__)
  return bit_cast<Floats>(_mm512_reduce_ps(bit_cast<__m512>(x), 1));
#elif defined(__AVX512F__)
  return x - bit_cast<Floats>(_mm512_floor_ps(bit_cast<__m512>(x)));
#elif defined(__AVX2__)
  return x - bit_cast<Floats>(_mm256_floor_ps(bit_cast<__m256>(x)));
#else
  Floats whole = __builtin_convertvector(__builtin_convertvector(x, Ints), Floats);
  return x - (whole > x ? whole - 1 : whole);
#endif
}

// Return 2^x for the fraction r of x and p, about 2^r; 0, or less than 2^-126, for x below -126.
static inline Floats scaled_power(Floats x, Floats r, Floats p) {
#if defined(__AVX512DQ__)
  return bit_cast<Floats>(_mm512_scalef_ps(bit_cast<__m512>(p), bit_cast<__m512>(x)));
#else
  p *= bit_cast<Floats>((__builtin_convertvector(x - r, Ints) + 127) << 23);
  return x < -126 ? Floats{} : p;
#endif
}

// Return 2^x, to two units in the last place for x up to 127; at most 2^-126 below -126. NaN stays NaN. A polynomial, fitted
// for the smallest relative error from 0 to 1, approximates 2^r for the fraction r.
static inline Floats exp2(Floats x) {
  Floats r = fraction(x), p = r * 2.161292854e-4f + 1.246784288e-3f;
  p = p * r + 9.675451910e-3f;
  p = p * r + 5.548528047e-2f;
  p = p * r + 2.402293056e-1f;
  p = p * r + 6.931470444e-1f;
  return scaled_power(x, r, p * r + 1);
}

// The same to one part in 10,000, where the result is rounded to bfloat16.
static inline Floats rough_exp2(Floats x) {
  Floats r = fraction(x), p = r * 7.705447e-2f + 2.2765868e-1f;
  p = p * r + 6.9511377e-1f;
  return scaled_power(x, r, p * r + 1);
}

constexpr float LOG2_E = 1.44269504f;  // e^x is 2^(x log2(e))

// Return e^x. The error grows with x, to 65 units in the last place for 88. At most 2^-126 below -87.3. NaN stays NaN.
static inline Floats exp(Floats x) { return exp2(x * LOG2_E); }
