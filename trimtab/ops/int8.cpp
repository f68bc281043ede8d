// int8 quantization by row or column, the rescale of an int32 product, and the product itself for CPUs without VNNI.
#include "blockwise.h"

namespace trimtab::TRIMTAB_LEVEL {

// --- Quantize. Rows of a contiguous matrix are blocks of `columns` values; only the code differs.

INLINE vc int8_codes(vf x, vf absmax) { return __builtin_convertvector(round_to_int(x / absmax * 127.0f), vc); }

// A row of zeros, or one that is stored as NaN, gets zero codes.
INLINE bool has_scale(float absmax) { return absmax > 0 && absmax < INFINITY; }

static void encode_row(const float* x, int64_t count, float absmax, int8_t* codes) {
  if (!has_scale(absmax)) {
    memset(codes, 0, count);
    return;
  }
  int64_t k = 0;
  for (; k + W <= count; k += W) store(codes + k, int8_codes(load(x + k), splat(absmax)));
  if (k < count) {
    vc c = int8_codes(load_part(x + k, count - k), splat(absmax));
    memcpy(codes + k, &c, count - k);
  }
}

// A task takes a strip of columns down all rows: one pass for the absmax, one for the codes.
static void quantize_columns(const QuantizeInt8& q) {
  constexpr int64_t strip = 8 * W;
  parallel(tasks_for(q.columns, strip), q.threads, [&](int64_t task, int) {
    const int64_t first = task * strip, count = smaller(strip, q.columns - first);
    float scratch[strip], row[strip] = {}, divisor[strip];
    vi largest[8] = {};
    auto load_row = [&](int64_t r) {
      const float* x = read(at(q.x, q.dtype, r * q.columns + first), q.dtype, count, scratch);
      memcpy(row, x, 4 * count);
    };
    for (int64_t r = 0; r < q.rows; r++) {
      load_row(r);
      for (int k = 0; k < 8; k++) largest[k] = larger(largest[k], magnitude_bits(load(row + k * W)));
    }
    float absmax[strip];
    memcpy(absmax, largest, sizeof absmax);
    for (int64_t c = 0; c < strip; c++) divisor[c] = has_scale(absmax[c]) ? absmax[c] : 1.0f;
    for (int64_t c = 0; c < count; c++) q.absmax[first + c] = stored(absmax[c]);
    for (int64_t r = 0; r < q.rows; r++) {
      load_row(r);
      int8_t codes[strip];
      for (int k = 0; k < 8; k++) {
        vf x = load(row + k * W), a = load(absmax + k * W);
        x = a < INFINITY ? x : vf{};
        store(codes + k * W, int8_codes(x, load(divisor + k * W)));
      }
      memcpy(q.codes + r * q.columns + first, codes, count);
    }
  });
}

void quantize_int8(const QuantizeInt8& q) {
  if (q.by_column) return quantize_columns(q);
  each_block(q.x, q.dtype, q.rows * q.columns, q.columns, q.absmax, q.threads,
             [&](const float* x, int64_t start, int64_t count, float absmax) { encode_row(x, count, absmax, q.codes + start); });
}

// --- Rescale: total * row * column + bias, a vector at a time, in the reference's order.

INLINE vf rescaled(vi total, const Rescale& r, float row, const float* column, const float* bias) {
  vf y = __builtin_convertvector(total, vf) * row * (r.column_is_scalar ? splat(*r.column) : load(column));
  return r.bias ? y + load(bias) : y;
}

void rescale(const Rescale& r) {
  const int64_t rows_per_task = tasks_for(CHUNK, r.columns);
  parallel(tasks_for(r.rows, rows_per_task), r.threads, [&](int64_t task, int) {
    const int64_t end = smaller(r.rows, (task + 1) * rows_per_task);
    for (int64_t i = task * rows_per_task; i < end; i++) {
      const float row = r.row[r.row_is_scalar ? 0 : i];
      for (int64_t j = 0; j < r.columns; j += W) {
        const int64_t lanes = smaller(W, r.columns - j), at_ij = i * r.columns + j;
        float y[W], column[W] = {}, bias[W] = {};
        int32_t total[W] = {};
        memcpy(total, r.total + at_ij, 4 * lanes);
        if (!r.column_is_scalar) memcpy(column, r.column + j, 4 * lanes);
        if (r.bias) memcpy(bias, r.bias + j, 4 * lanes);
        store(y, rescaled(load<vi>(total), r, row, column, bias));
        write(y, lanes, at(r.out, r.dtype, at_ij), r.dtype);
      }
    }
  });
}

// --- The product, by multiplying pairs of int16 and adding them into int32 (vpmaddwd): exact, and twice the rate of
// float32 multiply-adds. A tile of 6 rows by two vectors of columns stays in registers over the whole inner dimension.

#ifdef __AVX2__
constexpr int TILE_ROWS = 6, TILE_COLUMNS = 2 * W, BLOCK_ROWS = 16 * TILE_ROWS;

INLINE vi multiply_pairs(vi a, vi b) {
  return (vi)CHOOSE(_mm512_madd_epi16((__m512i)a, (__m512i)b), _mm256_madd_epi16((__m256i)a, (__m256i)b), vi{});
}

// Element (i, k) of an operand whose outer index is i and inner index k, either way round in memory.
struct Operand {
  const int8_t* data;
  int64_t outer, inner, outer_stride, inner_stride;
};

// Rows [first, first + width) of the operand as int16 pairs: [pair of k][row], zero outside.
static void pack(const Operand& x, int64_t first, int width, int16_t* packed) {
  const int64_t pairs = (x.inner + 1) / 2;
  const int rows = (int)smaller(width, x.outer - first);
  memset(packed, 0, pairs * width * 2 * sizeof(int16_t));
  if (x.inner_stride == 1) {
    for (int i = 0; i < rows; i++) {
      const int8_t* row = x.data + (first + i) * x.outer_stride;
      for (int64_t k = 0; k < x.inner; k++) packed[(k / 2 * width + i) * 2 + k % 2] = row[k];
    }
  } else {
    for (int64_t k = 0; k < x.inner; k++) {
      const int8_t* row = x.data + k * x.inner_stride + first * x.outer_stride;
      for (int i = 0; i < rows; i++) packed[(k / 2 * width + i) * 2 + k % 2] = row[i * x.outer_stride];
    }
  }
}

static void tile(const int16_t* a, const int16_t* b, int64_t pairs, vi total[TILE_ROWS][2]) {
  vi sums[TILE_ROWS][2] = {};
#pragma GCC unroll 4
  for (int64_t k = 0; k < pairs; k++) {
    const vi left = load<vi>(b + k * 2 * TILE_COLUMNS), right = load<vi>(b + k * 2 * TILE_COLUMNS + 2 * W);
#pragma GCC unroll 6
    for (int i = 0; i < TILE_ROWS; i++) {
      int32_t pair;
      memcpy(&pair, a + (k * TILE_ROWS + i) * 2, 4);
      const vi x = splat(pair);
      sums[i][0] += multiply_pairs(x, left);
      sums[i][1] += multiply_pairs(x, right);
    }
  }
  memcpy(total, sums, sizeof sums);
}

void matmul(const Matmul& m) {
  const Rescale& r = m.rescale;
  const Operand a{m.a, m.rows, m.inner, m.a_transposed ? 1 : m.inner, m.a_transposed ? m.rows : 1};
  const Operand b{m.b, m.columns, m.inner, m.b_transposed ? m.inner : 1, m.b_transposed ? 1 : m.columns};
  const int64_t pairs = (m.inner + 1) / 2, panels = tasks_for(m.columns, TILE_COLUMNS);
  const int64_t panel_size = pairs * TILE_COLUMNS * 2, strip_size = pairs * TILE_ROWS * 2;
  int16_t* packed_b = (int16_t*)allocate(panels * panel_size * sizeof(int16_t));
  int16_t* packed_a = (int16_t*)allocate(r.threads * BLOCK_ROWS / TILE_ROWS * strip_size * sizeof(int16_t));
  parallel(panels, r.threads, [&](int64_t panel, int) {
    pack(b, panel * TILE_COLUMNS, TILE_COLUMNS, packed_b + panel * panel_size);
  });
  // Parallel over blocks of rows: one block of a stays in the second-level cache while all of b passes by.
  parallel(tasks_for(m.rows, BLOCK_ROWS), r.threads, [&](int64_t block, int worker) {
    int16_t* mine = packed_a + worker * (BLOCK_ROWS / TILE_ROWS) * strip_size;
    const int64_t first = block * BLOCK_ROWS;
    const int64_t strips = tasks_for(smaller(BLOCK_ROWS, m.rows - first), TILE_ROWS);
    for (int64_t s = 0; s < strips; s++) pack(a, first + s * TILE_ROWS, TILE_ROWS, mine + s * strip_size);
    for (int64_t panel = 0; panel < panels; panel++) {
      const int64_t j = panel * TILE_COLUMNS, lanes = smaller(TILE_COLUMNS, m.columns - j);
      float column[TILE_COLUMNS] = {}, bias[TILE_COLUMNS] = {};
      if (!r.column_is_scalar) memcpy(column, r.column + j, 4 * lanes);
      if (r.bias) memcpy(bias, r.bias + j, 4 * lanes);
      for (int64_t s = 0; s < strips; s++) {
        vi total[TILE_ROWS][2];
        tile(mine + s * strip_size, packed_b + panel * panel_size, pairs, total);
        const int64_t i = first + s * TILE_ROWS, rows = smaller(TILE_ROWS, m.rows - i);
        for (int64_t t = 0; t < rows; t++) {
          const float row = r.row[r.row_is_scalar ? 0 : i + t];
          float y[TILE_COLUMNS];
          store(y, rescaled(total[t][0], r, row, column, bias));
          store(y + W, rescaled(total[t][1], r, row, column + W, bias + W));
          write(y, lanes, at(r.out, r.dtype, (i + t) * m.columns + j), r.dtype);
        }
      }
    }
  });
  free(packed_a);
  free(packed_b);
}
#endif

}  // namespace trimtab::TRIMTAB_LEVEL
