// Attention of a chunk's queries in matrix registers (tiles.h).
//
// All matrices are transposed: a row of scores belongs to a key, a column to a query. So each lane of a vector holds a number
// of a different query, and a softmax needs no sum and no maximum across lanes. A product of keys and queries writes its scores
// to memory, where the vectors find them. Hence a piece has few keys: up to a head dim of 128, what one product reads and
// writes fits in the first-level cache.

#pragma once
#include <algorithm>
#include <cmath>

#include "attention.h"
#include "tiles.h"
#include "vectors.h"

constexpr int TILE_QUERIES = 2 * TILE;  // that are computed together

#if defined(TILES)
constexpr int TILE_KEYS = 64;  // of a piece; pieces begin at multiples of it, so that sums are always made in the same order
constexpr int QUERY_VECTORS = TILE_QUERIES / LANES;

// Transpose TILE by TILE words: exchange the two blocks of HALF by HALF words beside the diagonal, then do the same in each
// block, down to single words.
template <int HALF = TILE / 2> static inline void transpose(Words (&rows)[TILE]) {
  Words upper, lower;
#pragma GCC unroll 16
  for (int i = 0; i < TILE; i++) {
    upper[i] = i & HALF ? TILE + i - HALF : i;
    lower[i] = i & HALF ? TILE + i : i + HALF;
  }
#pragma GCC unroll 16
  for (int i = 0; i < TILE; i++)
    if (!(i & HALF)) {
      auto a = bit_cast<__m512i>(rows[i]), b = bit_cast<__m512i>(rows[i + HALF]);
      rows[i] = bit_cast<Words>(_mm512_permutex2var_epi32(a, bit_cast<__m512i>(upper), b));
      rows[i + HALF] = bit_cast<Words>(_mm512_permutex2var_epi32(a, bit_cast<__m512i>(lower), b));
    }
  if constexpr (HALF > 1) transpose<HALF / 2>(rows);
}

// Make a matrix of TILE by TILE words from rows that `row` returns, and pass each row of its transpose to `store`.
template <typename Row, typename Store> static inline void transpose(Row row, Store store) {
  Words rows[TILE];
#pragma GCC unroll 16
  for (int r = 0; r < TILE; r++) rows[r] = row(r);
  transpose(rows);
#pragma GCC unroll 16
  for (int r = 0; r < TILE; r++) store(r, rows[r]);
}

// Round numbers to bfloat16, and return words of two: `first` in the lower half, `second` in the upper one.
static inline Words round_pairs(Floats first, Floats second) {
  Words order;  // number i of `first`, then number i of `second`
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++) order[i] = (LANES + i) << 16 | i;
  auto rounded = bit_cast<__m512i>(_mm512_cvtne2ps_pbh(bit_cast<__m512>(second), bit_cast<__m512>(first)));
  return bit_cast<Words>(_mm512_permutexvar_epi16(bit_cast<__m512i>(order), rounded));
}

// Copy the keys from `begin` to `length` - 1, one after the other, and the values transposed: [dim, TILE_KEYS] for each piece.
// The rest of the last piece is zero.
template <typename Stored>
static void pack_in_tiles(Vectors<Stored> keys, Vectors<Stored> values, const int* block_table, int block_size, long begin,
                          long length, long dim, uint16_t* packed_keys, uint32_t* packed_values) {
  alignas(64) uint16_t some[2 * TILE][MAX_HEAD_DIM], room[MAX_HEAD_DIM];
  for (long i = begin; i < begin + round_up(length - begin, TILE_KEYS); i += 2 * TILE) {
    for (long k = 0; k < 2 * TILE; k++, packed_keys += dim) {
      if (i + k >= length) {  // no NaN behind the last key
        memset(packed_keys, 0, dim * sizeof *packed_keys);
        memset(some[k], 0, dim * sizeof **some);
        continue;
      }
      const long slot = (long)block_table[(i + k) / block_size] * block_size + (i + k) % block_size;
      memcpy(packed_keys, read_vector(keys, slot, dim, room), dim * sizeof *packed_keys);
      memcpy(some[k], read_vector(values, slot, dim, room), dim * sizeof **some);
    }
    const long place = i - begin;
    uint32_t* pairs = packed_values + place / TILE_KEYS * (TILE_KEYS / 2) * dim + place % TILE_KEYS / 2;
    auto pair = [](const uint16_t* first, const uint16_t* second) {
      return bit_cast<Words>(load(first)) >> 16 | bit_cast<Words>(load(second));
    };
    for (long d = 0; d < dim; d += TILE)
      transpose([&](int r) { return pair(&some[2 * r][d], &some[2 * r + 1][d]); },
                [&](int r, Words row) { memcpy(pairs + (d + r) * (TILE_KEYS / 2), &row, sizeof row); });
  }
}

// Some queries of one head, the scores of one piece, and the softmax and the sums of values so far.
struct TileOfQueries {
  alignas(64) uint32_t q[MAX_HEAD_DIM / 2][TILE_QUERIES];
  alignas(64) float scores[TILE_KEYS][TILE_QUERIES], sums[MAX_HEAD_DIM][TILE_QUERIES];
  Floats shift[QUERY_VECTORS], total[QUERY_VECTORS];  // as in `Softmax` (paged_attention.cpp)

  // Begin with `rows` queries, at most TILE_QUERIES. The other columns are zero.
  void begin(const uint16_t* query, long token_step, int rows, long dim) {
    auto words = [&](int r, long d) {
      Words some = {};
      if (r < rows) memcpy(&some, query + r * token_step + d, sizeof some);
      return some;
    };
    for (int first = 0; first < TILE_QUERIES; first += TILE)
      for (long d = 0; d < dim; d += 2 * TILE)
        transpose([&](int r) { return words(first + r, d); },
                  [&](int r, Words row) { memcpy(&q[d / 2 + r][first], &row, sizeof row); });
    memset(sums, 0, dim * sizeof *sums);
    for (int v = 0; v < QUERY_VECTORS; v++) shift[v] = Floats{} - INFINITY, total[v] = Floats{};
  }

  // Hide from each query the keys behind it, and those before its window. The first query is at position `own`.
  void mask(long key, long used, int own, int window) {
    for (int v = 0; v < QUERY_VECTORS; v++) {
      Ints positions;
      for (int i = 0; i < LANES; i++) positions[i] = own + v * LANES + i;
      for (long k = 0; k < used; k++) {
        const int at = key + k;
        float* some = scores[k] + v * LANES;
        store(some, at > positions || at <= positions - window ? Floats{} - INFINITY : load(some));
      }
    }
  }

  // Turn the scores, times `factor`, into weights: [TILE_KEYS / 2, TILE_QUERIES] words of two keys each, in the place of the
  // first half of the scores.
  void compute_weights(long used, float factor, long dim) {
    auto scores_of = [&](long key, int v) { return load(scores[key] + v * LANES); };
    Floats most[QUERY_VECTORS], base[QUERY_VECTORS], sum[QUERY_VECTORS] = {};
    for (int v = 0; v < QUERY_VECTORS; v++) most[v] = scores_of(0, v);
    for (long k = 1; k < used; k++)
      for (int v = 0; v < QUERY_VECTORS; v++) most[v] = max(scores_of(k, v), most[v]);
    for (int v = 0; v < QUERY_VECTORS; v++) {
      const Floats highest = most[v] * factor;
      const Ints grows = highest > shift[v] + SLACK;
      if (_mm512_test_epi32_mask(bit_cast<__m512i>(grows), bit_cast<__m512i>(grows))) {
        const Floats shrink = grows ? exp2(shift[v] - highest) : Floats{} + 1;
        shift[v] = grows ? highest : shift[v];
        total[v] *= shrink;
        for (long d = 0; d < dim; d++) store(sums[d] + v * LANES, load(sums[d] + v * LANES) * shrink);
      }
      base[v] = shift[v] == -INFINITY ? Floats{} : shift[v];  // -inf less -inf would be NaN
    }
    for (long k = 0; k < used; k += 2)
      for (int v = 0; v < QUERY_VECTORS; v++) {
        const Floats first = rough_exp2(scores_of(k, v) * factor - base[v]);
        const Floats second = rough_exp2(scores_of(k + 1, v) * factor - base[v]);
        sum[v] += first + second;
        Words pairs = round_pairs(first, second);
        memcpy(scores[k / 2] + v * LANES, &pairs, sizeof pairs);
      }
    for (int v = 0; v < QUERY_VECTORS; v++) total[v] += sum[v];
  }

  // Write the sums, divided by the sums of all weights, to the output of the first `rows` queries.
  void finish(uint16_t* output, long output_step, int rows, long dim) {
    for (int v = 0; v < QUERY_VECTORS; v++) {
      const Floats divisor = total[v] == 0 ? Floats{} + INFINITY : total[v];  // without weights, the sums are 0
      for (long d = 0; d < dim; d += TILE)
        transpose([&](int r) { return bit_cast<Words>(load(sums[d + r] + v * LANES) / divisor); },
                  [&](int r, Words row) {
                    if (r += v * LANES; r < rows) store(output + r * output_step + d, bit_cast<Floats>(row));
                  });
    }
  }
};

// As `attend_chunk` in paged_attention.cpp, for a `dim` that is a multiple of 2 * TILE.
template <typename Stored>
static void attend_in_tiles(const uint16_t* query, long head_step, long token_step, int tokens, int past, int window,
                            Vectors<Stored> keys, Vectors<Stored> values, const int* block_table, int block_size, int heads,
                            int dim, float scale, uint16_t* output, long output_step, uint32_t* packed) {
  auto first_piece = [window](int position) -> long { return std::max(0, position + 1 - window) / TILE_KEYS * TILE_KEYS; };
  const long words = dim / 2, length = past + tokens, begin = first_piece(past);
  uint32_t *packed_keys = packed, *packed_values = packed + round_up(length - begin, TILE_KEYS) * words;
  pack_in_tiles(keys, values, block_table, block_size, begin, length, dim, (uint16_t*)packed_keys, packed_values);
  TileOfQueries tile;
  for (int head = 0; head < heads; head++)
    for (int t = 0; t < tokens; t += TILE_QUERIES) {
      // `own` is the position of the first query, and of the last key that it sees.
      const int rows = std::min(TILE_QUERIES, tokens - t), own = past + t;
      tile.begin(query + head * head_step + t * token_step, token_step, rows, dim);
      for (long key = first_piece(own); key < own + rows; key += TILE_KEYS) {
        const long used = round_up(std::min<long>(TILE_KEYS, own + rows - key), 2 * TILE), place = (key - begin) * words;
        for (long k = 0; k < used; k += 2 * TILE)
          multiply_blocks<true, false>(packed_keys + place + k * words, words, TILE, *tile.q, words, tile.scores[k],
                                       TILE_QUERIES);
        const bool see_all = key + used <= own + 1 && key >= own + rows - window;
        if (!see_all) tile.mask(key, used, own, window);
        tile.compute_weights(used, scale * LOG2_E, dim);
        for (long d = 0; d < dim; d += 2 * TILE)
          multiply_blocks<true, true>(packed_values + place + d * (TILE_KEYS / 2), TILE_KEYS / 2, TILE, (uint32_t*)*tile.scores,
                                      used / 2, tile.sums[d], TILE_QUERIES);
      }
      tile.finish(output + t * output_step + head * dim, output_step, rows, dim);
    }
}
#else
template <typename Stored>
static void attend_in_tiles(const uint16_t*, long, long, int, int, int, Vectors<Stored>, Vectors<Stored>, const int*, int, int,
                            int, float, uint16_t*, long, uint32_t*) {}
#endif
