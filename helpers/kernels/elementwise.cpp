// The work between two linear layers, in one pass over memory: a residual and its norm, and GELU.
//
// PyTorch's operators make a pass each, and in bfloat16 they round after each. These kernels compute in float32 and round
// once. Rows are independent, so a row's numbers do not depend on the other rows of the batch.

#include <cmath>

#include "vectors.h"

// Below this number of numbers, one thread finishes before a second one would have woken up.
constexpr long MIN_PARALLEL = 1 << 14;

// Add `update` (if not null) to x, then write the norm of x to y: RMSNorm if `rms`, else LayerNorm.
template <typename Number>
static void add_norm_row(Number* x, const Number* update, const Number* weight, const Number* bias, Number* y, long size,
                         float eps, bool rms) {
  long whole = size / LANES * LANES;
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

  float factor = 1 / std::sqrt(variance + eps);
  for (long i = 0; i < whole; i += LANES) {
    Floats number = (load(x + i) - mean) * factor * load(weight + i);
    store(y + i, bias ? number + load(bias + i) : number);
  }
  for (long i = whole; i < size; i++)
    store(y + i, (to_float(x[i]) - mean) * factor * to_float(weight[i]) + (bias ? to_float(bias[i]) : 0));
}

// x / (1 + e^(-2u)) equals x (1 + tanh u) / 2.
static inline Floats gelu(Floats x) {
  Floats u = 0.7978845608f * (x + 0.044715f * x * x * x), exponent = -2 * u;
  return x / (1 + exp(exponent > 88 ? Floats{} + 88 : exponent));
}

template <typename Number> static void gelu_all(Number* x, long size, int threads) {
  long whole = size / LANES * LANES;
#pragma omp parallel for num_threads(threads) if (size > MIN_PARALLEL)
  for (long i = 0; i < whole; i += LANES) store(x + i, gelu(load(x + i)));
  for (long i = whole; i < size; i++) store(x + i, gelu(Floats{} + to_float(x[i]))[0]);
}

extern "C" {

// x, update, y [rows, size]; weight, bias [size]. update and bias may be null.
#define ELEMENTWISE(dtype, Number)                                                                                       \
  void add_norm_##dtype(Number* x, const Number* update, const Number* weight, const Number* bias, Number* y, long rows, \
                        long size, float eps, int rms, int threads) {                                                    \
    _Pragma("omp parallel for num_threads(threads) if (rows * size > MIN_PARALLEL)") for (long r = 0; r < rows; r++)     \
        add_norm_row(x + r * size, update ? update + r * size : nullptr, weight, bias, y + r * size, size, eps, rms);    \
  }                                                                                                                      \
  void gelu_##dtype(Number* x, long size, int threads) { gelu_all(x, size, threads); }

ELEMENTWISE(float32, float)
ELEMENTWISE(bfloat16, uint16_t)
}
