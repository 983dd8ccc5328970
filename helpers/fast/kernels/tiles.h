// Products of tiles in the processor's matrix registers (AMX), of 16 rows by 64 bytes each: of integers of 8 bits, or of
// bfloat16 numbers.
//
// Intel's Xeons have them since Sapphire Rapids. A tile of W is 16 words of 16 outputs in a panel (of 16 queries in
// tile_attention.h), as they lie in memory.

#pragma once
#include <algorithm>
#include <type_traits>

#include "prefetch.h"
#include "shares.h"

constexpr long MOST_ROWS = 1024;  // whose sums with a panel fit on the stack

// Return in how many blocks rows of so many words are multiplied. A block stays in a core's second-level cache meanwhile.
static inline long blocks_of_rows(long rows, long words) {
  const long most = ((1 << 20) / (4 * words) + 2 * TILE - 1) / (2 * TILE) * 2 * TILE;
  const long some = std::clamp(most, 2L * TILE, MOST_ROWS);
  return (rows + some - 1) / some;
}

// Return the rows of one of them. It begins at a multiple of 2 * TILE, as many as are multiplied together. The last one begins
// earlier if it would have fewer than TILE: some rows are then computed twice, to the same bits.
static inline Range block_of_rows(long block, long blocks, long rows) {
  const long all = (rows + 2 * TILE - 1) / (2 * TILE);
  const long end = std::min(all * (block + 1) / blocks * 2 * TILE, rows);
  return {std::clamp(end - TILE, 0L, all * block / blocks * 2 * TILE), end};
}

// Two vectors are a row of a panel. tile_attention.h rounds pairs of numbers to bfloat16.
#if defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define TILES
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

static bool may_use_tiles() {  // Linux gives a process the matrix registers on request
  static int granted = -1;  // not asked yet
  if (granted < 0) granted = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0;
  return granted;
}

// Tiles 0 to 3: sums, of up to TILE of `rows` by 16 outputs each. 4 and 5: x, as many rows by 16 words; 6 and 7: W, 16 words
// by 16 outputs.
static void configure_tiles(long rows = TILE) {
  struct Config {
    uint8_t palette = 1, start = 0, unused[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  for (int tile = 0; tile < 6; tile++) config.rows[tile] = std::clamp<long>(rows, 1, TILE);
  asm volatile("ldtilecfg %0" ::"m"(config));  // GCC's intrinsic says that only the first 8 bytes are read
}

static void release_tiles() { _tile_release(); }

// The intrinsics take the numbers of registers, as constants.
#define ADD_PRODUCTS(sums, x, w)                                                                                         \
  if constexpr (std::is_same_v<Sum, float>) _tile_dpbf16ps(sums, x, w);                                                  \
  else _tile_dpbssd(sums, x, w)

// Multiply a block of rows of x by a panel and, if BOTH, a second block that begins `second` rows later. Rows of x and of
// the sums begin `x_step` words and `sums_step` sums apart. If ADDS, the products are added to the sums. Each 16 words of
// the panel prefetch `pace` bytes.
template <bool BOTH, bool ADDS, typename Sum>
static inline void multiply_blocks(const uint32_t* x, long x_step, long second, const uint32_t* w, long words, Sum* sums,
                                   long sums_step, const char* ahead = nullptr, long pace = 0) {
  constexpr long LINE = 4 * PANEL;  // bytes
  const uint32_t* second_x = x + second * x_step;
  Sum* second_sums = sums + second * sums_step;
  asm volatile("" ::: "memory");  // GCC's intrinsics do not say that they read memory, so all stores must come first
  if constexpr (ADDS) {
    _tile_loadd(0, sums, 4 * sums_step);
    _tile_loadd(1, sums + TILE, 4 * sums_step);
    if constexpr (BOTH) _tile_loadd(2, second_sums, 4 * sums_step);
    if constexpr (BOTH) _tile_loadd(3, second_sums + TILE, 4 * sums_step);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (long k = 0; k < words; k += TILE, ahead += pace) {
    for (long byte = 0; byte < pace; byte += 64) __builtin_prefetch(ahead + byte, 0, PREFETCH_ONCE);
    _tile_loadd(6, w + k * PANEL, LINE);
    _tile_loadd(4, x + k, 4 * x_step);
    ADD_PRODUCTS(0, 4, 6);
    _tile_loadd(7, w + k * PANEL + TILE, LINE);
    ADD_PRODUCTS(1, 4, 7);
    if constexpr (BOTH) {
      _tile_loadd(5, second_x + k, 4 * x_step);
      ADD_PRODUCTS(2, 5, 6);
      ADD_PRODUCTS(3, 5, 7);
    }
  }
  _tile_stored(0, sums, 4 * sums_step);
  _tile_stored(1, sums + TILE, 4 * sums_step);
  if constexpr (BOTH) _tile_stored(2, second_sums, 4 * sums_step);
  if constexpr (BOTH) _tile_stored(3, second_sums + TILE, 4 * sums_step);
}
#undef ADD_PRODUCTS

// Multiply rows of x [rows, x_step], of which `words` count, by a panel [words, PANEL]: at most 2 * TILE of them, from row
// `r` on; sums [2 * TILE, PANEL], to which the products are added if `adds`. Return whose sums these are: a last block of
// fewer than TILE rows begins earlier.
template <typename Sum>
static Range multiply_tiles(const uint32_t* x, long x_step, long r, long rows, const uint32_t* w, long words, Sum* sums,
                            bool adds, const char* ahead, long pace) {
  const long last = std::max(rows - TILE, 0L), first = std::min(r, last), second = std::min(r + TILE, last) - first;
  const bool both = rows - r > TILE;
  auto multiply = both ? adds ? multiply_blocks<true, true, Sum> : multiply_blocks<true, false, Sum>
                       : adds ? multiply_blocks<false, true, Sum> : multiply_blocks<false, false, Sum>;
  multiply(x + first * x_step, x_step, both ? second : 0, w, words, sums, PANEL, ahead, pace);
  return {first, std::min(r + 2 * TILE, rows)};
}

// Multiply a block of rows x [rows, words], at most MOST_ROWS, by a panel [words, PANEL], and call `store` for each row
// with its sums [PANEL]. If there are several passes, the panel is cut into pieces: a piece and the same inputs of the rows
// of a pass stay in the first-level cache. The passes prefetch the next piece together, if told to.
template <typename Sum, typename Store>
static void multiply_panel(const uint32_t* x, long rows, const uint32_t* w, long words, bool prefetches, Store store) {
  constexpr long PIECE = 128, LINE = 4 * PANEL, AHEAD = 4096;  // words; bytes
  alignas(64) Sum sums[MOST_ROWS][PANEL];
  const long passes = (rows + 2 * TILE - 1) / (2 * TILE), pieces = passes == 1 ? 1 : std::max(words / PIECE, 1L);
  const long pace = prefetches ? (TILE * LINE / passes + 63) / 64 * 64 : 0;
  for (long piece = 0; piece < pieces; piece++) {
    const long begin = words / TILE * piece / pieces * TILE, some = words / TILE * (piece + 1) / pieces * TILE - begin;
    const char* ahead = (const char*)(w + begin * PANEL) + (passes == 1 ? AHEAD : some * LINE);
    for (long r = 0; r < rows; r += 2 * TILE, ahead += some / TILE * pace) {
      Range own = multiply_tiles(x + begin, words, r, rows, w + begin * PANEL, some, sums[r], piece > 0, ahead, pace);
      if (piece + 1 == pieces)
        for (long i = own.begin; i < own.end; i++) store(i, sums[r + i - own.begin]);
    }
  }
}
#else
static bool may_use_tiles() { return false; }
static void configure_tiles(long = TILE) {}
static void release_tiles() {}
template <typename Sum, typename Store>
static void multiply_panel(const uint32_t*, long, const uint32_t*, long, bool, Store) {}
#endif
