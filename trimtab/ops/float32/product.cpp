// The float32 product a^T b, with a sum over rows: the gradient of a linear layer's weight. Definition: product.py.
//
// A tile of the result, PRODUCT_ROWS by two vectors, stays in registers while DEPTH rows of both operands pass by. Both
// are copied first, so that a tile reads them in order; rows of a and b are already in the order of the copies.
#include "blockwise.h"

namespace trimtab::TRIMTAB_LEVEL {

#ifdef __AVX512F__
constexpr int PRODUCT_ROWS = 12;
#else
constexpr int PRODUCT_ROWS = 6;
#endif
constexpr int64_t PRODUCT_COLUMNS = 2 * W, DEPTH = 256;
// Of the result, per task: DEPTH rows of both operands fit into the second-level cache.
constexpr int64_t BLOCK_HIGH = 16 * PRODUCT_ROWS, BLOCK_WIDE = 12 * PRODUCT_COLUMNS;

// Rows [0, depth) of `count` columns, as panels of `width` columns: [panel][row][width], zero outside.
template <int width>
static void pack_panels(const float* from, int64_t stride, int64_t depth, int64_t count, float* packed) {
  for (int64_t first = 0; first < count; first += width, packed += depth * width) {
    const int64_t lanes = smaller(width, count - first);
    for (int64_t k = 0; k < depth; k++) {
      if (lanes == width) {
        memcpy(packed + k * width, from + k * stride + first, 4 * width);
      } else {
        memset(packed + k * width, 0, 4 * width);
        memcpy(packed + k * width, from + k * stride + first, 4 * lanes);
      }
    }
  }
}

static void product_tile(const float* a, const float* b, int64_t depth, vf total[PRODUCT_ROWS][2]) {
  vf sums[PRODUCT_ROWS][2] = {};
  for (int64_t k = 0; k < depth; k++, a += PRODUCT_ROWS, b += PRODUCT_COLUMNS) {
    const vf left = load(b), right = load(b + W);
#pragma GCC unroll 12
    for (int i = 0; i < PRODUCT_ROWS; i++) {
      const vf x = splat(a[i]);
      sums[i][0] = roughly_fma(x, left, sums[i][0]);
      sums[i][1] = roughly_fma(x, right, sums[i][1]);
    }
  }
  memcpy(total, sums, sizeof sums);
}

// Write the tile, or add it to the sums of the rows before.
static void put_tile(const vf total[PRODUCT_ROWS][2], bool add, float* out, int64_t stride, int64_t rows, int64_t lanes) {
  for (int64_t i = 0; i < rows; i++) {
    float* to = out + i * stride;
    if (lanes == PRODUCT_COLUMNS) {
      store(to, add ? load(to) + total[i][0] : total[i][0]);
      store(to + W, add ? load(to + W) + total[i][1] : total[i][1]);
    } else {
      float y[PRODUCT_COLUMNS];
      memcpy(y, total[i], sizeof y);
      for (int64_t j = 0; j < lanes; j++) to[j] = add ? to[j] + y[j] : y[j];
    }
  }
}

// Parallel over blocks of the result. The order of the sums does not depend on the number of threads.
void product(const Product& p) {
  // Equally many blocks for every thread, each a whole number of tiles high.
  const int64_t each = tasks_for(tasks_for(p.rows, BLOCK_HIGH), p.threads) * p.threads;
  const int64_t high = tasks_for(tasks_for(p.rows, each), PRODUCT_ROWS) * PRODUCT_ROWS;
  const int64_t wide = smaller(BLOCK_WIDE, tasks_for(p.columns, PRODUCT_COLUMNS) * PRODUCT_COLUMNS);
  const int64_t blocks_down = tasks_for(p.rows, high), blocks_across = tasks_for(p.columns, wide);
  const int64_t scratch = DEPTH * (high + wide);
  float* memory = (float*)allocate(p.threads * scratch * sizeof(float));
  parallel(blocks_down * blocks_across, p.threads, [&](int64_t task, int worker) {
    const int64_t i0 = task / blocks_across * high, j0 = task % blocks_across * wide;
    const int64_t rows = smaller(high, p.rows - i0), columns = smaller(wide, p.columns - j0);
    float *a = memory + worker * scratch, *b = a + DEPTH * high;
    for (int64_t k0 = 0; k0 < p.inner; k0 += DEPTH) {
      const int64_t depth = smaller(DEPTH, p.inner - k0);
      pack_panels<PRODUCT_ROWS>(p.a + k0 * p.rows + i0, p.rows, depth, rows, a);
      pack_panels<PRODUCT_COLUMNS>(p.b + k0 * p.columns + j0, p.columns, depth, columns, b);
      for (int64_t j = 0; j < columns; j += PRODUCT_COLUMNS)
        for (int64_t i = 0; i < rows; i += PRODUCT_ROWS) {
          vf total[PRODUCT_ROWS][2];
          product_tile(a + i * depth, b + j * depth, depth, total);
          put_tile(total, k0 > 0, p.out + (i0 + i) * p.columns + j0 + j, p.columns, smaller(PRODUCT_ROWS, rows - i),
                   smaller(PRODUCT_COLUMNS, columns - j));
        }
    }
  });
  free(memory);
}

}  // namespace trimtab::TRIMTAB_LEVEL
