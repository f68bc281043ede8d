// int8 quantization by row or column, and the rescale of an int32 product.
#include "int8.h"

namespace trimtab::TRIMTAB_LEVEL {

// --- Quantize. Rows of a contiguous matrix are blocks of `columns` values; only the code differs.

static void encode_exactly(const float* x, int64_t count, float absmax, int8_t* codes) {
  const int64_t whole = count / GROUP * GROUP;
  encode_row(x, whole, absmax, codes);
  int8_t last[GROUP];
  encode_row(x + whole, count - whole, absmax, last);
  memcpy(codes + whole, last, count - whole);
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
        store(codes + k * W, __builtin_convertvector(divided_codes(x, load(divisor + k * W)), vc));
      }
      memcpy(q.codes + r * q.columns + first, codes, count);
    }
  });
}

void quantize_int8(const QuantizeInt8& q) {
  if (q.by_column) return quantize_columns(q);
  each_block(q.x, q.dtype, q.rows * q.columns, q.columns, q.absmax, q.threads,
             [&](const float* x, int64_t start, int64_t count, float absmax) { encode_exactly(x, count, absmax, q.codes + start); });
}

// --- Rescale: total * row * column + bias, a vector at a time.

void rescale(const Rescale& r) {
  const int64_t rows_per_task = tasks_for(CHUNK, r.columns);
  parallel(tasks_for(r.rows, rows_per_task), r.threads, [&](int64_t task, int) {
    const int64_t end = smaller(r.rows, (task + 1) * rows_per_task);
    for (int64_t j = 0; j < r.columns; j += W) {
      const Columns<1> columns(r, j);
      for (int64_t i = task * rows_per_task; i < end; i++) {
        int32_t total[W] = {};
        memcpy(total, r.total + i * r.columns + j, 4 * columns.lanes);
        const vi sums[1] = {load<vi>(total)};
        columns.put(sums, i, r.row[r.row_is_scalar ? 0 : i] / 127.0f);
      }
    }
  });
}

}  // namespace trimtab::TRIMTAB_LEVEL
