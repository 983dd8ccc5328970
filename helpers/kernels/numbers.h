// Both dtypes are computed in float32. A bfloat16 is the upper half of a float32.

#pragma once
#include <cstdint>
#include <cstring>

template <typename To, typename From> static inline To bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

static inline float number(float x) { return x; }
static inline float number(uint16_t x) { return bits<float>(uint32_t(x) << 16); }

static inline void store(float* y, float x) { *y = x; }
static inline void store(uint16_t* y, float x) {
  uint32_t word = bits<uint32_t>(x);
  *y = (word + 0x7fff + (word >> 16 & 1)) >> 16;  // to the nearest; of two, to the even one
}
