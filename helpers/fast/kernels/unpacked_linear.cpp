// y = x W + bias for a few rows x, with W in the order in which the layer stores it: no copy of W is needed.
//
// As in linear.cpp, the product waits for memory, so weights are prefetched some thousand bytes before they are used. With
// few rows they are read once, which decides the hint (prefetch.h).
//
// nn.Linear stores W as [out, in]. A vector holds inputs of one output, and its lanes are added at the end. GPT-2's Conv1D
// stores W as [in, out]. There a vector holds outputs, and a tile of weights adds to the sums of the tiles before it.
//
// A row is always summed in the same order, so its numbers do not depend on the other rows of the batch.

#include "prefetch.h"
#include "vectors.h"

// Rows of x begin `row` numbers apart, and the stored rows of the weight `stride` numbers.
struct Sizes {
  long rows, in, out, row, stride;
};

enum Prefetch { NOT = -1, ONCE = PREFETCH_ONCE, OFTEN = PREFETCH_OFTEN };  // how often the prefetched data will be used

template <typename Vector, typename Number> static inline Vector load_vector(const Number* x) {
  Vector v;
  memcpy(&v, x, sizeof v);
  return v;
}

// Load `count` numbers; the others of the vector are zero.
template <typename Vector, typename Number> static inline Vector load_some(const Number* x, long count) {
  Vector v{};
  memcpy(&v, x, count * sizeof *x);
  return v;
}

// --- W [out, in] ------------------------------------------------------------------------------------------------------

constexpr int ROWS = LANES == 16 ? 4 : 2, OUTPUTS = 4;  // the sums take 16 of AVX-512's 32 registers, or 8 of AVX2's 16

// Multiply R rows by the weights of OUTPUTS outputs, or of fewer at the end. Meanwhile the weights of the next ones are
// prefetched, in the order in which they lie in memory.
template <int R, Prefetch HOW, typename Vector, typename Number>
static void dot_products(const Number* x, const Number* w, const Number* bias, Number* y, Sizes sizes, long outputs) {
  constexpr long STEP = sizeof(Vector) / sizeof(Number);
  const Number* weights[OUTPUTS];
  for (int o = 0; o < OUTPUTS; o++) weights[o] = w + (o < outputs ? o : 0) * sizes.stride;
  Floats sums[R][OUTPUTS] = {};
  auto add = [&](long k, auto load) __attribute__((always_inline)) {
    Vector inputs[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) inputs[r] = load(x + r * sizes.row + k);
#pragma GCC unroll 4
    for (int o = 0; o < OUTPUTS; o++) {
      Vector weight = load(weights[o] + k);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) sums[r][o] = add_products(sums[r][o], weight, inputs[r]);
    }
  };
  long k = 0;
  for (; k + STEP <= sizes.in; k += STEP) {
    if constexpr (HOW != NOT)
#pragma GCC unroll 4
      for (int o = 0; o < OUTPUTS; o++) __builtin_prefetch(w + OUTPUTS * (sizes.stride + k) + o * STEP, 0, HOW);
    add(k, [](const Number* p) { return load_vector<Vector>(p); });
  }
  if (k < sizes.in) add(k, [&](const Number* p) { return load_some<Vector>(p, sizes.in - k); });
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) {
    Four four = sum(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
    for (int o = 0; o < outputs; o++) store(y + r * sizes.out + o, four[o] + (bias ? to_float(bias[o]) : 0));
  }
}

// Multiply as many rows as the largest compiled `dot_products` that is not too large, and return how many.
template <int R, Prefetch HOW, typename Vector, typename Number>
static int dot_rows(long rows, const Number* x, const Number* w, const Number* bias, Number* y, Sizes sizes, long outputs) {
  if constexpr (R > 1)
    if (rows < R) return dot_rows<R / 2, HOW, Vector>(rows, x, w, bias, y, sizes, outputs);
  dot_products<R, HOW, Vector>(x, w, bias, y, sizes, outputs);
  return R;
}

template <typename Vector, typename Number>
static void linear_by_output(const Number* x, const Number* w, const Number* bias, Number* y, Sizes sizes, int threads) {
  auto first = sizes.rows <= ROWS ? dot_rows<ROWS, ONCE, Vector, Number> : dot_rows<ROWS, OFTEN, Vector, Number>;
#pragma omp parallel for num_threads(threads)
  for (long o = 0; o < sizes.out; o += OUTPUTS) {
    long outputs = sizes.out - o < OUTPUTS ? sizes.out - o : OUTPUTS;
    const Number *own_w = w + o * sizes.stride, *own_bias = bias ? bias + o : bias;
    long r = first(sizes.rows, x, own_w, own_bias, y + o, sizes, outputs);
    while (r < sizes.rows)
      r += dot_rows<ROWS, NOT, Vector>(sizes.rows - r, x + r * sizes.row, own_w, own_bias, y + r * sizes.out + o, sizes, outputs);
  }
}

// --- W [in, out] ------------------------------------------------------------------------------------------------------

constexpr int INPUTS = 16, COLUMNS = 2 * LANES;  // of a tile. More lines would not fit in the L1 cache: they may be 4 KB apart
constexpr int TILE_ROWS = LANES == 16 ? 8 : 4;   // the sums take 16 of AVX-512's 32 registers, or 8 of AVX2's 16
constexpr long MAX_ROWS = 64, MAX_WIDTH = 1024, MAX_SUMS = 1 << 14;  // of the sums that a thread keeps
constexpr long AHEAD = 256;                                          // bytes

// Load the weights of one word of inputs and COLUMNS outputs. A word has 32 bits, so it holds two bfloat16 inputs of one
// output: the first vector gets the even outputs, and the second one the odd ones.
static inline void load_weights(Floats* weights, const float* w, long, long, long columns) {
  for (int v = 0; v < 2; v++, columns -= LANES, w += LANES)
    weights[v] = columns >= LANES ? load_vector<Floats>(w) : load_some<Floats>(w, columns > 0 ? columns : 0);
}

static inline void load_weights(Words* weights, const uint16_t* w, long stride, long inputs, long columns) {
  Words first = columns >= COLUMNS ? load_vector<Words>(w) : load_some<Words>(w, columns), second{};
  if (inputs > 1) second = columns >= COLUMNS ? load_vector<Words>(w + stride) : load_some<Words>(w + stride, columns);
  weights[0] = (first & 0xffff) | second << 16;
  weights[1] = first >> 16 | (second & 0xffff0000u);
}

static inline int place_of(int column, const float*) { return column; }
static inline int place_of(int column, const uint16_t*) { return column % 2 * LANES + column / 2; }

// Add the products of R rows of x [R, INPUTS] and a tile of weights to the sums [R, COLUMNS].
template <int R, Prefetch HOW, typename Vector, typename Word, typename Number>
static void add_tile(const Word* x, const Number* w, const Number* ahead, long stride, long inputs, long columns, Floats* sums) {
  constexpr long PER_WORD = sizeof(Word) / sizeof(Number);
  Floats own[R][2];
  memcpy(own, sums, sizeof own);
  auto add = [&](long k, long inputs_left, long columns_left) __attribute__((always_inline)) {
    Vector weights[2];
    load_weights(weights, w + k * stride, stride, inputs_left, columns_left);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) own[r][v] = add_products(own[r][v], weights[v], x[(r * INPUTS + k) / PER_WORD]);
  };
  if (inputs == INPUTS && columns >= COLUMNS) {
    for (long k = 0; k < INPUTS; k += PER_WORD) {
      if constexpr (HOW != NOT)
#pragma GCC unroll 2
        for (int line = 0; line < 2; line++)  // a word of COLUMNS outputs is two lines
          __builtin_prefetch(ahead + (PER_WORD == 2 ? (k + line) * stride : k * stride + line * LANES), 0, HOW);
      add(k, PER_WORD, COLUMNS);
    }
  } else {
    for (long k = 0; k < inputs; k += PER_WORD) add(k, inputs - k, columns);
  }
  memcpy(sums, own, sizeof own);
}

template <int R, Prefetch HOW, typename Vector, typename Word, typename Number>
static int add_tile_rows(long rows, const Word* x, const Number* w, const Number* ahead, long stride, long inputs, long columns,
                         Floats* sums) {
  if constexpr (R > 1)
    if (rows < R) return add_tile_rows<R / 2, HOW, Vector>(rows, x, w, ahead, stride, inputs, columns, sums);
  add_tile<R, HOW, Vector>(x, w, ahead, stride, inputs, columns, sums);
  return R;
}

// Multiply at most MAX_ROWS rows by all inputs of at most MAX_WIDTH columns.
template <Prefetch HOW, typename Vector, typename Word, typename Number>
static void multiply_columns(const Number* x, const Number* w, const Number* bias, Number* y, Sizes sizes, long columns) {
  constexpr long PER_WORD = sizeof(Word) / sizeof(Number), STEP = AHEAD / sizeof(Number);
  Floats sums[MAX_SUMS / LANES];  // [columns / COLUMNS, rows, COLUMNS]
  memset(sums, 0, (columns + COLUMNS - 1) / COLUMNS * sizes.rows * 2 * sizeof *sums);
  for (long k = 0; k < sizes.in; k += INPUTS) {
    const Number* tiles = w + k * sizes.stride;
    long inputs = sizes.in - k < INPUTS ? sizes.in - k : INPUTS;
    Word own_x[MAX_ROWS * INPUTS / PER_WORD] = {};  // in one place: rows may be 4 KB apart
    for (long r = 0; r < sizes.rows; r++)
      memcpy((Number*)own_x + r * INPUTS, x + r * sizes.row + k, inputs * sizeof *x);
    for (long c = 0; c < columns; c += COLUMNS) {
      const Number* ahead = tiles + (c + STEP < columns ? c + STEP : c + STEP - columns + INPUTS * sizes.stride);
      Floats* own = sums + c / COLUMNS * sizes.rows * 2;
      long r = add_tile_rows<TILE_ROWS, HOW, Vector>(sizes.rows, own_x, tiles + c, ahead, sizes.stride, inputs, columns - c, own);
      while (r < sizes.rows)
        r += add_tile_rows<TILE_ROWS, NOT, Vector>(sizes.rows - r, own_x + r * INPUTS / PER_WORD, tiles + c, ahead, sizes.stride,
                                                   inputs, columns - c, own + r * 2);
    }
  }
  for (long r = 0; r < sizes.rows; r++)
    for (long c = 0; c < columns; c += COLUMNS) {
      float own[COLUMNS];
      memcpy(own, sums + (c / COLUMNS * sizes.rows + r) * 2, sizeof own);
      for (int d = 0; d < COLUMNS && c + d < columns; d++)
        store(y + r * sizes.out + c + d, own[place_of(d, w)] + (bias ? to_float(bias[c + d]) : 0));
    }
}

template <typename Vector, typename Word, typename Number>
static void linear_by_input(const Number* x, const Number* w, const Number* bias, Number* y, Sizes sizes, int threads) {
  if (!sizes.rows) return;
  auto multiply = sizes.rows <= TILE_ROWS ? multiply_columns<ONCE, Vector, Word, Number> : multiply_columns<OFTEN, Vector, Word, Number>;
  long most = MAX_SUMS / (sizes.rows < MAX_ROWS ? sizes.rows : MAX_ROWS) / COLUMNS * COLUMNS;
  if (most > MAX_WIDTH) most = MAX_WIDTH;
  long share = (sizes.out + threads - 1) / threads, pieces = threads * ((share + most - 1) / most);
  long width = ((sizes.out + pieces - 1) / pieces + COLUMNS - 1) / COLUMNS * COLUMNS;
#pragma omp parallel for num_threads(threads)
  for (long c = 0; c < sizes.out; c += width)
    for (long r = 0; r < sizes.rows; r += MAX_ROWS) {
      Sizes own = sizes;
      own.rows = sizes.rows - r < MAX_ROWS ? sizes.rows - r : MAX_ROWS;
      multiply(x + r * sizes.row, w + c, bias ? bias + c : bias, y + r * sizes.out + c, own,
               sizes.out - c < width ? sizes.out - c : width);
    }
}

extern "C" {

// x [rows, row], of which the first `in` numbers of each row count; w [out, stride], or [in, stride] if by_input; bias [out]
// or null; y [rows, out].
void unpacked_linear_float32(const float* x, const float* w, const float* bias, float* y, long rows, long in, long out, long row,
                             long stride, int by_input, int threads) {
  if (by_input) linear_by_input<Floats, float>(x, w, bias, y, {rows, in, out, row, stride}, threads);
  else linear_by_output<Floats>(x, w, bias, y, {rows, in, out, row, stride}, threads);
}

void unpacked_linear_bfloat16(const uint16_t* x, const uint16_t* w, const uint16_t* bias, uint16_t* y, long rows, long in, long out,
                              long row, long stride, int by_input, int threads) {
  if (by_input) linear_by_input<Words, uint32_t>(x, w, bias, y, {rows, in, out, row, stride}, threads);
  else linear_by_output<Words>(x, w, bias, y, {rows, in, out, row, stride}, threads);
}
}
