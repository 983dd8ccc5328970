// Attention of all sequences of an iteration, whose keys and values lie in the blocks of their block tables.
//
// The idea is PagedAttention's (Kwon et al., vLLM, SOSP 2023). The kernel reads the block tables itself, so one call serves
// all sequences. The softmax is computed piece by piece (Milakov and Gimelshein, 2018): when a piece contains a much higher
// score, the sums so far are scaled down. Only one piece's scores exist at a time, as in FlashAttention (Dao et al., 2022).
//
// A decode has one query per head, so its keys and values are read where they lie, once for several heads that share them.
// A chunk has many queries, so it waits for arithmetic. Its keys and values are first packed, in the order in which several
// queries multiply them: this file does so in vectors, tile_attention.h in matrix registers. A query skips the keys behind it,
// and those before its window.
//
// A quantized cache (features/quantized_kv_cache) has integers of 8 bits. A decode multiplies these, and then each score by
// its key's scale, and each weight by its value's. Chunks pack the products of integers and scales.
//
// Sums are always made in the same order, so a query's result depends on no other sequence, nor on the size of its chunk.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdlib>

#include "attention.h"
#include "shares.h"
#include "tile_attention.h"
#include "tiles.h"
#include "vectors.h"

constexpr int KEYS = 256;          // of a piece, at most
constexpr int PIECE_BYTES = 8192;  // of a decode's keys, so that they and their values stay in the first-level cache
// Below this number of products, one thread finishes before a second one would have woken up.
constexpr long MIN_PARALLEL_PRODUCTS = 1 << 16;

// --- keys and values --------------------------------------------------------------------------------------------------

// Multiply numbers [count] by the scales of vectors from `slot` on, if these have any.
template <typename Stored> static inline void multiply_by_scales(float* x, Vectors<Stored> vectors, long slot, int count) {
  if constexpr (sizeof(Stored) == 1)
    for (int i = 0; i < count; i++) x[i] *= vectors.scales[slot + i];
}

template <typename Number> void write_vector(const Number* x, Cache cache, long place, long dim) {
  if (!cache.scales) {
    memcpy((Number*)cache.numbers + place * dim, x, dim * sizeof *x);
    return;
  }
  // As models/quantization.py does, bit for bit: a NaN becomes the scale, and ties go to even integers.
  float largest = 0;
  for (long d = 0; d < dim; d++) {
    float size = std::fabs(to_float(x[d]));
    if (!(size <= largest)) largest = size;
    if (size != size) break;
  }
  float scale = largest / 127;
  if (scale < FLT_MIN) scale = FLT_MIN;
  cache.scales[place] = scale;
  int8_t* integers = (int8_t*)cache.numbers + place * dim;
  for (long d = 0; d < dim; d++) integers[d] = std::nearbyint(to_float(x[d]) / scale);
}

// Return the factors of a product that begin at x: words as they are stored, or numbers as floats.
template <typename Vector, typename Stored> static inline Vector load_factors(const Stored* x) {
  if constexpr (std::is_same_v<Vector, Floats>) return load(x);
  Vector v;
  memcpy(&v, x, sizeof v);
  return v;
}

// --- the softmax of a piece -------------------------------------------------------------------------------------------

struct Softmax {
  float shift = -INFINITY, total = 0;

  // Turn scores [count], times `scale`, into weights, in the same place or another; return the factor by which sums of
  // earlier pieces shrink. Both arrays are padded.
  template <typename Number> float add(float* scores, int count, float scale, Number* weights) {
    float shrink;
    add_rows<1>(this, scores, 0, count, scale, weights, 0, &shrink);
    return shrink;
  }

  // The same for some rows of scores, whose steps take turns, because each waits for the one before.
  template <int ROWS, typename Number>
  static void add_rows(Softmax* rows, float* scores, long step, int count, float scale, Number* weights, long weights_step,
                       float* shrink) {
    const float factor = scale * LOG2_E;
    Floats most[ROWS], sums[ROWS] = {};
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) {
      for (int i = count; i % LANES; i++) scores[r * step + i] = -INFINITY;
      most[r] = load(scores + r * step);
    }
    for (int i = LANES; i < count; i += LANES)
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r++) most[r] = max(load(scores + r * step + i), most[r]);
    float shift[ROWS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) {
      const float highest = largest(most[r]) * factor;
      shrink[r] = 1;
      if (highest > rows[r].shift + SLACK) {
        shrink[r] = std::exp2(rows[r].shift - highest);
        rows[r].shift = highest;
      }
      // While all scores are -inf, their weights are 0. Subtracting -inf from them would give NaN.
      shift[r] = rows[r].shift == -INFINITY ? 0 : rows[r].shift;
    }
    for (int i = 0; i < count; i += LANES)
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r++) {
        Floats x = load(scores + r * step + i) * factor - shift[r];
        Floats weight = sizeof(Number) == 2 ? rough_exp2(x) : exp2(x);
        store(weights + r * weights_step + i, weight);
        sums[r] += weight;
      }
    // The compiler joins a product and a sum only in some places, so that the code around would decide how they are rounded.
    // Hence `fma` is written.
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) rows[r].total = std::fma(rows[r].total, shrink[r], sum(sums[r]));
  }

  // Divide the sums [dim] of values by the sum of all weights.
  template <typename Number> void finish(const float* sums, Number* output, int dim) const {
    float divisor = total == 0 ? INFINITY : total;  // without weights, the sums are 0
    int whole = dim / LANES * LANES;
    for (int d = 0; d < whole; d += LANES) store(output + d, load(sums + d) / divisor);
    for (int d = whole; d < dim; d++) store(output + d, sums[d] / divisor);
  }
};

// --- a decode: one query ----------------------------------------------------------------------------------------------

template <typename Number> static inline void prefetch(const Number* vector, int dim) {
  for (int d = 0; d < dim; d += 64 / sizeof(Number)) __builtin_prefetch(vector + d);  // a cache line has 64 bytes
}

// How many heads of a group are computed together: their sums stay in registers.
template <int DIM> constexpr int TOGETHER = LANES == 16 && DIM > 0 ? 256 / DIM : 1;

// Compute HEADS heads of one sequence, whose queries begin `head_step` numbers apart: query [HEADS, dim], output [HEADS, dim],
// keys and values [slots, dim]. A key or value is loaded once for all of them. The cache holds all sequences; the block table
// selects the keys of this one. The query sees keys `first` to `length` - 1. DIM equals `dim` if it is known at compile time,
// else it is 0.
template <int DIM, int HEADS, typename Number, typename Stored>
static void attend(const Number* query, long head_step, Vectors<Stored> keys, Vectors<Stored> values, const int* block_table,
                   int first, int length, int block_size, int dim, float scale, Number* output) {
  // Words of keys are multiplied by words of the query, but integers by floats.
  constexpr bool WORDS = sizeof(Number) == sizeof(Stored);
  typedef std::conditional_t<WORDS, typename Product<Number>::Vector, Floats> Vector;
  constexpr int FACTORS = sizeof(Vector) / (WORDS ? sizeof(Number) : sizeof(float)), COUNT = DIM / FACTORS;
  if (DIM > 0) dim = DIM;
  const int whole = dim / FACTORS * FACTORS;  // numbers of a key that vectors multiply; the rest follows one by one
  alignas(64) float sums[HEADS][MAX_HEAD_DIM], weights[HEADS][KEYS + LANES];
  Vector q[HEADS][COUNT + 1];
  for (int h = 0; h < HEADS; h++) {
    for (int v = 0; v < COUNT; v++) q[h][v] = load_factors<Vector>(query + h * head_step + v * FACTORS);
    for (int d = 0; d < dim; d++) sums[h][d] = 0;
  }
  Softmax softmax[HEADS];

  auto slot_of = [&](int i) { return (long)block_table[i / block_size] * block_size + i % block_size; };
  int piece = std::clamp<int>(PIECE_BYTES / (dim * sizeof(Stored)), 4, KEYS);
  for (int start = first, end; start < length; start = end) {
    end = std::min(length, start + piece);
    auto for_each_block = [&](auto visit) {  // with a slot, where its weight is, and the number of slots
      for (int i = start, next; i < end; i = next) {
        next = std::min(end, (i / block_size + 1) * block_size);
        visit(slot_of(i), i - start, next - i);
      }
    };
    for_each_block([&](long slot, int place, int count) {
      const Stored *some_keys = keys.numbers + slot * dim, *some_values = values.numbers + slot * dim;
      if (sizeof(Stored) == 1) prefetch(values.scales + slot, count);
      auto add_key = [&](int i, Floats (&products)[HEADS]) {
        prefetch(some_values + i * dim, dim);
        for (int h = 0; h < HEADS; h++) products[h] = Floats{};
#pragma GCC unroll 16
        for (int v = 0; v < COUNT; v++) {
          Vector key = load_factors<Vector>(some_keys + i * dim + v * FACTORS);
#pragma GCC unroll 4
          for (int h = 0; h < HEADS; h++) products[h] = add_products(products[h], key, q[h][v]);
        }
        for (int d = 0; DIM == 0 && d < whole; d += FACTORS)
          products[0] = add_products(products[0], load_factors<Vector>(some_keys + i * dim + d), load_factors<Vector>(query + d));
      };
      int i = 0;
      for (; DIM > 0 && i + 4 <= count; i += 4) {
        Floats products[4][HEADS];
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) add_key(i + k, products[k]);
#pragma GCC unroll 4
        for (int h = 0; h < HEADS; h++) {
          Four four = sum(products[0][h], products[1][h], products[2][h], products[3][h]);
          memcpy(&weights[h][place + i], &four, sizeof four);
        }
      }
      for (; i < count; i++) {
        Floats products[HEADS];
        add_key(i, products);
        for (int h = 0; h < HEADS; h++) {
          float score = sum(products[h]);
          for (int d = whole; d < dim; d++) score += to_float(query[d]) * to_float(some_keys[i * dim + d]);
          weights[h][place + i] = score;
        }
      }
      for (int h = 0; h < HEADS; h++) multiply_by_scales(&weights[h][place], keys, slot, count);
    });
    Floats parts[HEADS][DIM / LANES + 1];  // the sums, in registers
    for (int h = 0; h < HEADS; h++) {
      float shrink = softmax[h].add(weights[h], end - start, scale, weights[h]);
      for (int v = 0; v < DIM / LANES; v++) parts[h][v] = load(&sums[h][v * LANES]) * shrink;
      for (int d = 0; DIM == 0 && d < dim; d++) sums[h][d] *= shrink;
    }
    int ahead = end;  // of a block whose keys are prefetched
    for_each_block([&](long slot, int place, int count) {
      const Stored* some_values = values.numbers + slot * dim;
      long next = ahead < length ? slot_of(ahead) : slot;
      ahead += count;
      if (sizeof(Stored) == 1) prefetch(keys.scales + next, count);
      for (int h = 0; h < HEADS; h++) multiply_by_scales(&weights[h][place], values, slot, count);
      for (int i = 0; i < count; i++) {
        prefetch(keys.numbers + (next + i) * dim, dim);
#pragma GCC unroll 16
        for (int v = 0; v < DIM / LANES; v++) {
          Floats value = load(some_values + i * dim + v * LANES);
#pragma GCC unroll 4
          for (int h = 0; h < HEADS; h++) parts[h][v] += weights[h][place + i] * value;
        }
        const float weight = weights[0][place + i];
        int d = DIM;
        for (; DIM == 0 && d + LANES <= dim; d += LANES)
          store(&sums[0][d], load(&sums[0][d]) + weight * load(some_values + i * dim + d));
        for (; d < dim; d++) sums[0][d] += weight * to_float(some_values[i * dim + d]);
      }
    });
    for (int h = 0; h < HEADS; h++)
      for (int v = 0; v < DIM / LANES; v++) store(&sums[h][v * LANES], parts[h][v]);
  }
  for (int h = 0; h < HEADS; h++) softmax[h].finish(sums[h], output + h * dim, dim);
}

// Compute a group of heads, as many together as the largest compiled `attend` takes.
template <int DIM, int HEADS, typename Number, typename Stored>
static void attend_group(const Number* query, long head_step, int heads, Vectors<Stored> keys, Vectors<Stored> values,
                         const int* block_table, int first, int length, int block_size, int dim, float scale, Number* output) {
  for (; heads >= HEADS; heads -= HEADS, query += HEADS * head_step, output += HEADS * dim)
    attend<DIM, HEADS>(query, head_step, keys, values, block_table, first, length, block_size, dim, scale, output);
  if constexpr (HEADS > 1)
    attend_group<DIM, HEADS - 1>(query, head_step, heads, keys, values, block_table, first, length, block_size, dim, scale, output);
}

// --- a chunk: many queries --------------------------------------------------------------------------------------------

// That are computed together: their sums fit in the registers. AVX2's 16 registers also hold parts of bfloat16 numbers.
template <typename Number> constexpr int VECTOR_QUERIES = LANES == 16 ? 8 : sizeof(Number) == 4 ? 6 : 4;
constexpr int COLUMNS = 2 * LANES;            // of a panel
constexpr int BLOCK = 64;                     // queries that use a piece in turn, while it is in the second-level cache
constexpr long TASK_QUERIES[] = {128, 2048};  // that share packed keys and values: the least and the most
constexpr int TASKS = 4;                      // of a thread, or more if even the largest tasks are many

// y [QUERIES, y_step] = x [QUERIES, x_step] times a panel w [size, COLUMNS], plus y * shrink [QUERIES] if that is given. Not
// inlined: else GCC may keep `first` and `second` in memory, which took 1.4 times as long in float32 on an AMD EPYC (Zen 4).
template <int QUERIES, typename Vector, typename Word>
__attribute__((noinline)) static void multiply_in_vectors(const Word* x, long x_step, const Word* w, long size,
                                                          const float* shrink, float* y, long y_step) {
  Floats sums[QUERIES][2];
#pragma GCC unroll 8
  for (int r = 0; r < QUERIES; r++)
    for (int v = 0; v < 2; v++) sums[r][v] = shrink ? load(y + r * y_step + v * LANES) * shrink[r] : Floats{};
  for (long k = 0; k < size; k++) {
    Vector first, second;  // as in linear.cpp
    memcpy(&first, w + k * COLUMNS, sizeof first);
    memcpy(&second, w + k * COLUMNS + LANES, sizeof second);
#pragma GCC unroll 8
    for (int r = 0; r < QUERIES; r++) {
      sums[r][0] = add_products(sums[r][0], first, x[r * x_step + k]);
      sums[r][1] = add_products(sums[r][1], second, x[r * x_step + k]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < QUERIES; r++)
    for (int v = 0; v < 2; v++) store(y + r * y_step + v * LANES, sums[r][v]);
}

// Compute `tokens` queries of the heads that share one kv head. query, output: the first query of the first head. `past`
// keys precede the first query's own. `packed` has room for the keys and values of all pieces that the queries see.
template <typename Number, typename Stored>
static void attend_chunk(const Number* query, long head_step, long token_step, int tokens, int past, int window,
                         Vectors<Stored> keys, Vectors<Stored> values, const int* block_table, int block_size, int heads,
                         int dim, float scale, Number* output, long output_step, typename Product<Number>::Word* packed) {
  typedef typename Product<Number>::Vector Vector;
  typedef typename Product<Number>::Word Word;
  constexpr int QUERIES = VECTOR_QUERIES<Number>;
  constexpr int PER_WORD = sizeof(Word) / sizeof(Number);
  long words = dim / PER_WORD, panel_dim = round_up(dim, COLUMNS);
  auto first_key = [&](int position) -> long { return std::max(0, position + 1 - window); };
  // Pieces begin at multiples of KEYS, whichever queries are computed together: the order of sums never changes.
  long begin = first_key(past) / KEYS * KEYS, length = past + tokens, end = round_up(length, KEYS);
  Word *packed_keys = packed, *packed_values = packed + (end - begin) * words;
  memset(packed, 0, (end - begin) * (words + panel_dim / PER_WORD) * sizeof(Word));  // no NaN behind the last key
  for (long i = begin; i < length; i++) {
    long slot = (long)block_table[i / block_size] * block_size + i % block_size, place = i - begin;
    // Keys: panels of COLUMNS keys, [words, COLUMNS] each. Values: panels of COLUMNS dims, [KEYS, COLUMNS] in each piece.
    Number room[MAX_HEAD_DIM];
    Word* key = packed_keys + place / COLUMNS * COLUMNS * words + place % COLUMNS;
    const Number* numbers = read_vector(keys, slot, dim, room);
    for (long k = 0; k < words; k++) memcpy(key + k * COLUMNS, numbers + k * PER_WORD, sizeof(Word));
    Word* value = packed_values + place / KEYS * (KEYS / PER_WORD) * panel_dim + place % KEYS / PER_WORD * COLUMNS;
    numbers = read_vector(values, slot, dim, room);
    for (long d = 0; d < dim; d += COLUMNS, value += KEYS / PER_WORD * COLUMNS)
      for (long c = 0; c < std::min<long>(COLUMNS, dim - d); c++)
        if constexpr (PER_WORD == 2) value[c] |= Word(numbers[d + c]) << place % 2 * 16;  // the other half is 0 so far
        else value[c] = numbers[d + c];
  }

  constexpr int MOST = BLOCK / QUERIES * QUERIES, TOGETHER = 4;
  for (int head = 0; head < heads; head++)
    for (int t = 0; t < tokens; t += MOST) {
      const long rows = std::min(MOST, tokens - t), padded = round_up(rows, QUERIES);
      alignas(64) Word q[MOST * MAX_HEAD_DIM / PER_WORD], weights[MOST * KEYS / PER_WORD];
      alignas(64) float scores[MOST][KEYS], sums[MOST * MAX_HEAD_DIM];
      float shrink[MOST];
      memset(q, 0, padded * words * sizeof *q);
      memset(sums, 0, padded * panel_dim * sizeof *sums);
      for (int r = 0; r < rows; r++)
        memcpy(q + r * words, query + head * head_step + (t + r) * token_step, dim * sizeof(Number));
      Softmax softmax[MOST];
      for (long key = first_key(past + t) / KEYS * KEYS; key < past + t + rows; key += KEYS) {
        // Each step is made for all queries that see this piece, QUERIES at a time, so that it need not wait for what has just
        // been written. It gets the first query of each, its position, and the number of keys in whole panels.
        auto for_queries = [&](auto step) {
          for (long r = 0; r < rows; r += QUERIES) {
            const long own = past + t + r, end = std::min(own + QUERIES, past + t + rows);  // a query's own key is its last
            if (key < end && key + KEYS > first_key(own)) step(r, own, round_up(std::min<long>(KEYS, end - key), COLUMNS));
          }
        };
        for_queries([&](long r, long, long used) {
          for (long c = 0; c < used; c += COLUMNS)
            multiply_in_vectors<QUERIES, Vector>(q + r * words, words, packed_keys + (key - begin + c) * words, words, nullptr,
                                                 &scores[r][c], KEYS);
        });
        for_queries([&](long first, long own, long used) {
          const bool see_all = key + used <= own + 1 && key >= first_key(own + QUERIES - 1);
          for (long r = first; !see_all && r < first + QUERIES; r++, own++) {
            for (long i = std::max(own + 1 - key, 0L); i < used; i++) scores[r][i] = -INFINITY;
            for (long i = 0; i < std::min(first_key(own) - key, used); i++) scores[r][i] = -INFINITY;
          }
          long r = first;
          for (; r + TOGETHER <= first + QUERIES; r += TOGETHER)
            Softmax::add_rows<TOGETHER>(softmax + r, scores[r], KEYS, used, scale, (Number*)weights + r * KEYS, KEYS,
                                        shrink + r);
          for (; r < first + QUERIES; r++)
            shrink[r] = softmax[r].add(scores[r], used, scale, (Number*)weights + r * KEYS);
        });
        const Word* piece = packed_values + (key - begin) / PER_WORD * panel_dim;
        for_queries([&](long r, long, long used) {
          for (long d = 0; d < dim; d += COLUMNS)
            multiply_in_vectors<QUERIES, Vector>(weights + r * KEYS / PER_WORD, KEYS / PER_WORD, piece + d * (KEYS / PER_WORD),
                                                 used / PER_WORD, shrink + r, sums + r * panel_dim + d, panel_dim);
        });
      }
      for (int r = 0; r < rows; r++) softmax[r].finish(sums + r * panel_dim, output + (t + r) * output_step + head * dim, dim);
    }
}

// --- all sequences ----------------------------------------------------------------------------------------------------

template <typename Stored, typename Number>
static void attend_all(const Number* query, long head_step, long token_step, Vectors<Stored> keys, Vectors<Stored> values,
                       long slots, Segments segments, int heads, int kv_heads, int dim, int window, float scale,
                       Number* output) {
  typedef typename Product<Number>::Word Word;
  const int *tokens = segments.tokens, *lengths = segments.lengths;
  auto attend_one = dim == 64    ? attend_group<64, TOGETHER<64>, Number, Stored>
                    : dim == 128 ? attend_group<128, TOGETHER<128>, Number, Stored>
                    : dim == 256 ? attend_group<256, TOGETHER<256>, Number, Stored>
                                 : attend_group<0, TOGETHER<0>, Number, Stored>;
  const bool in_tiles = sizeof(Number) == 2 && dim % (2 * TILE) == 0 && may_use_tiles();
  const int queries_together = in_tiles ? TILE_QUERIES : VECTOR_QUERIES<Number>;
  auto attend_many = attend_chunk<Number, Stored>;
  if constexpr (sizeof(Number) == 2)
    if (in_tiles) attend_many = attend_in_tiles<Stored>;
  long most_keys = 0, most_tasks = 0, queries = 0;
  for (int s = 0; s < segments.sequences; s++)
    if (tokens[s] > 1) {
      most_keys = std::max<long>(most_keys, round_up(lengths[s], KEYS));
      queries += (long)tokens[s] * heads;
    }
  long task_queries = std::clamp(queries / (TASKS * omp_get_num_threads()), TASK_QUERIES[0], TASK_QUERIES[1]);
  int group = heads / kv_heads, task_tokens = std::max<long>(queries_together, task_queries / group);
  for (int s = 0; s < segments.sequences; s++)
    most_tasks = std::max<long>(most_tasks, (tokens[s] + task_tokens - 1) / task_tokens);
  // The heads of a group read the same keys, so one thread computes them all. But with few decodes, some threads would have
  // no work.
  bool split_groups = !most_keys && kv_heads * segments.sequences < 2 * omp_get_num_threads();
  int splits = split_groups ? group : 1, split_heads = group / splits;
  size_t bytes = most_keys * (dim + round_up(dim, COLUMNS)) * sizeof(Number);
  Word* packed = bytes ? (Word*)aligned_alloc(64, round_up(bytes, 64)) : nullptr;
  // Later tasks of a chunk see more keys, so they come first. Threads take a task at a time: tasks are unequal.
  if (in_tiles) configure_tiles();
#pragma omp for collapse(3) schedule(dynamic)
  for (long task = most_tasks - 1; task >= 0; task--)
    for (int split = 0; split < kv_heads * splits; split++)
      for (int s = 0; s < segments.sequences; s++) {
        long first = task * task_tokens, past = lengths[s] - tokens[s] + first;
        if (first >= tokens[s]) continue;
        const int* block_table = segments.block_tables + (long)s * segments.table_size;
        long kv = split / splits * slots, head = (long)split * split_heads, column = segments.columns[s] + first;
        Vectors<Stored> own_keys = {keys.numbers + kv * dim, keys.scales + kv};
        Vectors<Stored> own_values = {values.numbers + kv * dim, values.scales + kv};
        const Number* q = query + head * head_step + column * token_step;
        Number* y = output + (column * heads + head) * dim;
        if (tokens[s] > 1)
          attend_many(q, head_step, token_step, std::min<long>(task_tokens, tokens[s] - first), past, window,
                      own_keys, own_values, block_table, segments.block_size, split_heads, dim, scale, y,
                      (long)heads * dim, packed);
        else
          attend_one(q, head_step, split_heads, own_keys, own_values, block_table, std::max(0, lengths[s] - window), lengths[s],
                     segments.block_size, dim, scale, y);
      }
  if (in_tiles) release_tiles();
  free(packed);
}

template <typename Number>
void attend_share(const Number* query, long head_step, long token_step, Cache keys, Cache values, long slots,
                  Segments segments, int heads, int kv_heads, int dim, int window, float scale, Number* output) {
  auto attend = [&](auto stored) {
    typedef decltype(stored) Stored;
    auto typed = [](Cache cache) { return Vectors<Stored>{(Stored*)cache.numbers, cache.scales}; };
    attend_all(query, head_step, token_step, typed(keys), typed(values), slots, segments, heads, kv_heads, dim, window, scale,
               output);
  };
  if (keys.scales) attend(int8_t());
  else attend(Number());
}

#define PAGED_ATTENTION(dtype, Number)                                                                                   \
  template void write_vector(const Number*, Cache, long, long);                                                          \
  template void attend_share(const Number*, long, long, Cache, Cache, long, Segments, int, int, int, int, float,         \
                             Number*);                                                                                   \
  extern "C" void paged_attention_##dtype(const Number* query, long head_step, long token_step, const Cache* keys,       \
                                          const Cache* values, long slots, const Segments* segments, int heads,          \
                                          int kv_heads, int dim, int window, float scale, Number* output, int threads) { \
    long products = 0;                                                                                                   \
    for (int s = 0; s < segments->sequences; s++) products += (long)segments->tokens[s] * segments->lengths[s];          \
    _Pragma("omp parallel num_threads(threads) if (products * heads * dim > MIN_PARALLEL_PRODUCTS)")                     \
        attend_share(query, head_step, token_step, *keys, *values, slots, *segments, heads, kv_heads, dim, window,       \
                     scale, output);                                                                                     \
  }

PAGED_ATTENTION(float32, float)
PAGED_ATTENTION(bfloat16, uint16_t)
