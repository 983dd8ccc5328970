// Products of tiles of integers in the processor's matrix registers (AMX), of 16 rows by 64 bytes each.
//
// Intel's Xeons have them since Sapphire Rapids. A tile of W is 16 words of 16 outputs in a panel of quantized.cpp, as they
// lie in memory.

#pragma once
#include "shares.h"

#if defined(__AMX_INT8__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

static bool may_use_tiles() {  // Linux gives a process the matrix registers on request
  static int granted = -1;  // not asked yet
  if (granted < 0) granted = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0;
  return granted;
}

// Tiles 0 to 3: sums, of 16 rows by 16 outputs each. 4 and 5: x, 16 rows by 64 inputs; 6 and 7: W, 64 inputs by 16 outputs.
static void configure_tiles() {
  static constexpr struct Config {
    uint8_t palette = 1, start = 0, unused[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  _tile_loadconfig(&config);
}

static void release_tiles() { _tile_release(); }

// Multiply BLOCKS * TILE rows of x by a panel; sums [BLOCKS * TILE, PANEL].
template <int BLOCKS> static void multiply_tiles(const uint32_t* x, const uint32_t* w, int32_t* sums, long words) {
  constexpr int stride = 4 * PANEL;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (long k = 0; k < words; k += TILE) {
    _tile_loadd(6, w + k * PANEL, stride);
    _tile_loadd(7, w + k * PANEL + TILE, stride);
    _tile_loadd(4, x + k, 4 * words);
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    if constexpr (BLOCKS == 2) {
      _tile_loadd(5, x + TILE * words + k, 4 * words);
      _tile_dpbssd(2, 5, 6);
      _tile_dpbssd(3, 5, 7);
    }
  }
  _tile_stored(0, sums, stride);
  _tile_stored(1, sums + TILE, stride);
  if constexpr (BLOCKS == 2) {
    _tile_stored(2, sums + TILE * PANEL, stride);
    _tile_stored(3, sums + TILE * PANEL + TILE, stride);
  }
}

// Multiply up to 2 * TILE rows and return how many; the memory of x must hold whole tiles.
static long multiply_tiles(long left, const uint32_t* x, const uint32_t* w, int32_t* sums, long words) {
  if (left > TILE) multiply_tiles<2>(x, w, sums, words);
  else multiply_tiles<1>(x, w, sums, words);
  return left < 2 * TILE ? left : 2 * TILE;
}
#else
static bool may_use_tiles() { return false; }
static void configure_tiles() {}
static void release_tiles() {}
static long multiply_tiles(long, const uint32_t*, const uint32_t*, int32_t*, long) { return 0; }
#endif
