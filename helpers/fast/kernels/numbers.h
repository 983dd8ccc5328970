// Conversions: both dtypes are computed in float32. A bfloat16 is the upper half of a float32.

#pragma once
#include <cstdint>
#include <cstring>

template <typename To, typename From> static inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

static inline float to_float(float x) { return x; }
static inline float to_float(int8_t x) { return x; }
static inline float to_float(uint16_t x) { return bit_cast<float>(uint32_t(x) << 16); }

static inline void store(float* y, float x) { *y = x; }
static inline void store(uint16_t* y, float x) {
  uint32_t word = bit_cast<uint32_t>(x);
  *y = (word + 0x7fff + (word >> 16 & 1)) >> 16;  // round to nearest, ties to even
}
