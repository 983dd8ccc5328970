// The work between two linear layers, in one pass over memory: a residual and its norm, rotary positions, and the
// activation of an MLP.
//
// PyTorch's operators make a pass each, and in bfloat16 they round after each. These kernels compute in float32 and round
// once. Rows are independent, so a row's numbers do not depend on the other rows of the batch.

#include <cmath>

#include "shares.h"
#include "vectors.h"

// Below this number of numbers, one thread finishes before a second one would have woken up.
constexpr long MIN_PARALLEL = 1 << 14;

template <typename Number>
void add_norm_row(Number* x, const Number* update, Norm<Number> norm, Number* y, long size) {
  long whole = size / LANES * LANES;
  bool rms = norm.kind != LAYER_NORM;
  Floats sums = {};
  float total = 0;
  for (long i = 0; i < whole; i += LANES) {
    if (update) store(x + i, load(x + i) + load(update + i));
    Floats number = load(x + i);  // rounded, as the residual is
    sums += rms ? number * number : number;
  }
  for (long i = whole; i < size; i++) {
    if (update) store(x + i, to_float(x[i]) + to_float(update[i]));
    float number = to_float(x[i]);
    total += rms ? number * number : number;
  }
  total += sum(sums);

  float mean = rms ? 0 : total / size, variance = total / size;
  if (!rms) {
    sums = Floats{}, total = 0;
    for (long i = 0; i < whole; i += LANES) {
      Floats difference = load(x + i) - mean;
      sums += difference * difference;
    }
    for (long i = whole; i < size; i++) total += (to_float(x[i]) - mean) * (to_float(x[i]) - mean);
    variance = (total + sum(sums)) / size;
  }

  float factor = 1 / std::sqrt(variance + norm.eps), center = norm.kind == ZERO_CENTERED_RMS_NORM ? 1 : 0;
  for (long i = 0; i < whole; i += LANES) {
    Floats number = (load(x + i) - mean) * factor * (load(norm.weight + i) + center);
    store(y + i, norm.bias ? number + load(norm.bias + i) : number);
  }
  for (long i = whole; i < size; i++)
    store(y + i, (to_float(x[i]) - mean) * factor * (to_float(norm.weight[i]) + center) + (norm.bias ? to_float(norm.bias[i]) : 0));
}

template <typename Number> void rotate_head(Number* x, const Number* cos, const Number* sin, long rotated) {
  long half = rotated / 2, whole = half / LANES * LANES;
  for (long i = 0, j = half; i < whole; i += LANES, j += LANES) {
    Floats first = load(x + i), second = load(x + j);
    store(x + i, first * load(cos + i) - second * load(sin + i));
    store(x + j, second * load(cos + j) + first * load(sin + j));
  }
  for (long i = whole, j = half + whole; i < half; i++, j++) {
    float first = to_float(x[i]), second = to_float(x[j]);
    store(x + i, first * to_float(cos[i]) - second * to_float(sin[i]));
    store(x + j, second * to_float(cos[j]) + first * to_float(sin[j]));
  }
}

// 1 + erf(x / sqrt(2)), off by at most 2e-7: Abramowitz and Stegun (1964), 7.1.26.
static inline Floats one_plus_erf(Floats x) {
  Floats size = (x < 0 ? -x : x) * 0.70710678f, t = 1 / (1 + 0.3275911f * size);
  Floats tail = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
  Floats rest = tail * exp(size > 9 ? Floats{} - 81 : -size * size);
  return x < 0 ? rest : 2 - rest;
}

// GELU's tanh form and SiLU are x / (1 + e^-u): u = x in SiLU, and x (1 + tanh u/2) / 2 is GELU's tanh form.
static inline Floats activate(Floats x, int activation) {
  if (activation == RELU) return x > 0 ? x : Floats{};
  if (activation == GELU) return 0.5f * x * one_plus_erf(x);
  Floats exponent = activation == SILU ? -x : -2 * (0.7978845608f * (x + 0.044715f * x * x * x));
  return x / (1 + exp(exponent > 88 ? Floats{} + 88 : exponent));
}

template <typename Number> void activate_row(const Number* x, const Number* factor, Number* y, long size, int activation) {
  long whole = size / LANES * LANES;
  for (long i = 0; i < whole; i += LANES) {
    Floats number = activate(load(x + i), activation);
    store(y + i, factor ? number * load(factor + i) : number);
  }
  for (long i = whole; i < size; i++) {
    float number = activate(Floats{} + to_float(x[i]), activation)[0];
    store(y + i, factor ? number * to_float(factor[i]) : number);
  }
}

// add_norm: x, update, y [rows, size]; weight, bias [size]. update and bias may be null.
// rotate: x [rows, heads, dim] with rows that begin `step` numbers apart; cos, sin [rows, rotated].
// activate: x [rows, size] with rows that begin `step` numbers apart; factor the same, or null; y [rows, size].
#define ELEMENTWISE(dtype, Number)                                                                                       \
  template void add_norm_row(Number*, const Number*, Norm<Number>, Number*, long);                                       \
  template void rotate_head(Number*, const Number*, const Number*, long);                                                \
  template void activate_row(const Number*, const Number*, Number*, long, int);                                          \
  extern "C" {                                                                                                           \
  void add_norm_##dtype(Number* x, const Number* update, const Number* weight, const Number* bias, Number* y, long rows, \
                        long size, float eps, int kind, int threads) {                                                   \
    _Pragma("omp parallel for num_threads(threads) if (rows * size > MIN_PARALLEL)") for (long r = 0; r < rows; r++)     \
        add_norm_row(x + r * size, update ? update + r * size : nullptr, {weight, bias, eps, kind}, y + r * size, size); \
  }                                                                                                                      \
  void rotate_##dtype(Number* x, const Number* cos, const Number* sin, long rows, long heads, long dim, long rotated,    \
                      long step, int threads) {                                                                          \
    _Pragma("omp parallel for num_threads(threads) if (rows * heads * dim > MIN_PARALLEL)")                              \
    for (long r = 0; r < rows; r++)                                                                                      \
      for (long h = 0; h < heads; h++) rotate_head(x + r * step + h * dim, cos + r * rotated, sin + r * rotated, rotated); \
  }                                                                                                                      \
  void activate_##dtype(const Number* x, const Number* factor, Number* y, long rows, long size, long step,               \
                        int activation, int threads) {                                                                   \
    _Pragma("omp parallel for num_threads(threads) if (rows * size > MIN_PARALLEL)") for (long r = 0; r < rows; r++)     \
        activate_row(x + r * step, factor ? factor + r * step : nullptr, y + r * size, size, activation);                \
  }                                                                                                                      \
  }

ELEMENTWISE(float32, float)
ELEMENTWISE(bfloat16, uint16_t)
