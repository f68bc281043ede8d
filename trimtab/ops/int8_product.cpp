// The int8 product: int32 sums in registers, then rescale and bias. a is codes, or values that are quantized on the way.
//
// Compiled once per level with pairs of int16 (vpmaddwd: twice the multiply-adds of float32), and once more with VNNI
// (vpdpbusd: four codes per lane). Both multiply groups of 32 bits, PER codes each:
//
//   a    a block of rows at a time, so that it stays in the second-level cache: codes row by row, one group broadcast
//   b    panels of two vectors of columns: [group][column][PER], all of it packed first
//
// VNNI multiplies unsigned by signed bytes. a is stored plus 128, and the sums start at -128 times the sum of b's column.
#ifdef __AVX2__
#include "int8.h"

namespace trimtab::TRIMTAB_LEVEL {

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
typedef uint8_t Code;
#else
typedef int16_t Code;
#endif
constexpr int PER = 4 / sizeof(Code), TILE_ROWS = W == 16 ? 12 : 6, TILE_COLUMNS = 2 * W;
constexpr int64_t BLOCK_BYTES = 1 << 18;  // of a, per thread

INLINE vi multiply_add(vi sums, vi a, vi b) {
#if defined(__AVX512VNNI__)
  return (vi)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#elif defined(__AVXVNNI__)
  return (vi)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)a, (__m256i)b);
#else
  return sums + (vi)CHOOSE(_mm512_madd_epi16((__m512i)a, (__m512i)b), _mm256_madd_epi16((__m256i)a, (__m256i)b), vi{});
#endif
}

// --- Pack b

// Eight groups of a column, whose codes lie side by side; zeros beyond `count` codes.
INLINE __m256i load_groups(const int8_t* from, int64_t count) {
  int8_t last[8 * PER] = {};
  if (count < 8 * PER) from = (const int8_t*)memcpy(last, from, count > 0 ? count : 0);
  if constexpr (PER == 4) return _mm256_loadu_si256((const __m256i*)from);
  else return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from));
}

// 8 x 8 groups of 32 bits, rows and columns exchanged.
INLINE void transpose(__m256i x[8]) {
  __m256i y[8];
  for (int i = 0; i < 8; i += 2) {
    y[i] = _mm256_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm256_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int h = 0; h < 2; h++) {
      x[i + 2 * h] = _mm256_unpacklo_epi64(y[i + h], y[i + h + 2]);
      x[i + 2 * h + 1] = _mm256_unpackhi_epi64(y[i + h], y[i + h + 2]);
    }
  for (int i = 0; i < 4; i++) {
    y[i] = _mm256_permute2x128_si256(x[i], x[i + 4], 0x20);
    y[i + 4] = _mm256_permute2x128_si256(x[i], x[i + 4], 0x31);
  }
  for (int i = 0; i < 8; i++) x[i] = y[i];
}

// Columns whose codes lie side by side: a row of `from` is a column of b.
static void pack_columns(const int8_t* from, int64_t inner, int64_t count, int32_t* packed) {
  const int64_t groups = tasks_for(inner, PER);
  for (int64_t j = 0; j < TILE_COLUMNS; j += 8)
    for (int64_t g = 0; g < groups; g += 8) {
      __m256i x[8] = {};
      for (int64_t c = 0; c < 8 && j + c < count; c++) x[c] = load_groups(from + (j + c) * inner + g * PER, inner - g * PER);
      transpose(x);
      for (int64_t i = 0; i < 8 && g + i < groups; i++) _mm256_storeu_si256((__m256i*)(packed + (g + i) * TILE_COLUMNS + j), x[i]);
    }
}

// Columns whose codes lie `stride` apart: PER rows are interleaved.
static void pack_rows(const int8_t* from, int64_t inner, int64_t stride, int64_t count, int32_t* packed) {
  for (int64_t k = 0; k < inner; k += PER, packed += TILE_COLUMNS) {
    int8_t rows[PER][TILE_COLUMNS] = {};
    for (int t = 0; t < PER && k + t < inner; t++) {
      const int8_t* row = from + (k + t) * stride;
      if (count == TILE_COLUMNS) memcpy(rows[t], row, TILE_COLUMNS);
      else memcpy(rows[t], row, count);
    }
    for (int j = 0; j < TILE_COLUMNS; j += 16) {
      __m128i r[PER];
      for (int t = 0; t < PER; t++) r[t] = _mm_loadu_si128((const __m128i*)(rows[t] + j));
      const __m128i low = _mm_unpacklo_epi8(r[0], r[1]), high = _mm_unpackhi_epi8(r[0], r[1]);
      __m128i* to = (__m128i*)(packed + j);
      if constexpr (PER == 4) {
        const __m128i low2 = _mm_unpacklo_epi8(r[2], r[3]), high2 = _mm_unpackhi_epi8(r[2], r[3]);
        _mm_storeu_si128(to, _mm_unpacklo_epi16(low, low2)), _mm_storeu_si128(to + 1, _mm_unpackhi_epi16(low, low2));
        _mm_storeu_si128(to + 2, _mm_unpacklo_epi16(high, high2)), _mm_storeu_si128(to + 3, _mm_unpackhi_epi16(high, high2));
      } else {
        _mm256_storeu_si256((__m256i*)to, _mm256_cvtepi8_epi16(low));
        _mm256_storeu_si256((__m256i*)(to + 2), _mm256_cvtepi8_epi16(high));
      }
    }
  }
}

// A panel begins with what its sums start at.
static void pack_panel(const Matmul& m, int64_t j, int32_t* packed) {
  const int64_t count = smaller(TILE_COLUMNS, m.columns - j);
  int32_t* groups = packed + TILE_COLUMNS;
  if (m.b_transposed) pack_columns(m.b + j * m.inner, m.inner, count, groups);
  else pack_rows(m.b + j, m.inner, m.columns, count, groups);
  vi sums[2] = {};
  if (PER == 4)
    for (int64_t g = 0; g < tasks_for(m.inner, PER); g++)
      for (int q = 0; q < 2; q++) sums[q] = multiply_add(sums[q], splat((int32_t)0x80808080), load<vi>(groups + g * TILE_COLUMNS + q * W));
  for (int q = 0; q < 2; q++) store(packed + q * W, -sums[q]);
}

// --- Pack a: rows of codes. The stride is a multiple of GROUP codes; what follows the last code meets zeros of b.

INLINE Code as_code(int8_t x) { return (Code)(PER == 4 ? x ^ 0x80 : x); }

static void copy_row(const int8_t* from, int64_t count, Code* to) {
  for (int64_t k = 0; k < count; k++) to[k] = as_code(from[k]);
}

// Rows [0, rows) of the transpose of `from`, in squares, so that both sides stay in the first-level cache.
static void copy_transposed(const int8_t* from, int64_t from_stride, int64_t rows, int64_t inner, Code* to, int64_t stride) {
  constexpr int64_t square = 64;
  for (int64_t k0 = 0; k0 < inner; k0 += square)
    for (int64_t i = 0; i < rows; i++)
      for (int64_t k = k0; k < smaller(inner, k0 + square); k++) to[i * stride + k] = as_code(from[k * from_stride + i]);
}

// --- Multiply

INLINE void tile(const Code* a, int64_t stride, const int32_t* b, int64_t groups, vi total[TILE_ROWS][2]) {
  constexpr int THIRDS = TILE_ROWS / 3;
  vi sums[TILE_ROWS][2];
#pragma GCC unroll 12
  for (int i = 0; i < TILE_ROWS; i++) sums[i][0] = load<vi>(b), sums[i][1] = load<vi>(b + W);
  b += TILE_COLUMNS;
  const Code* rows[THIRDS];
  for (int i = 0; i < THIRDS; i++) rows[i] = a + 3 * i * stride;
#pragma GCC unroll 4
  for (int64_t g = 0; g < groups; g++) {
    const vi left = load<vi>(b + g * TILE_COLUMNS), right = load<vi>(b + g * TILE_COLUMNS + W);
#pragma GCC unroll 12
    for (int i = 0; i < TILE_ROWS; i++) {
      int32_t group;
      memcpy(&group, rows[i / 3] + i % 3 * stride + g * PER, 4);
      const vi x = splat(group);
      sums[i][0] = multiply_add(sums[i][0], x, left);
      sums[i][1] = multiply_add(sums[i][1], x, right);
    }
  }
  memcpy(total, sums, sizeof sums);
}

// Parallel over panels of b, then over blocks of a; over panels too if there are fewer blocks than threads.
void matmul(const Matmul& m) {
  const Rescale& r = m.rescale;
  const int64_t groups = tasks_for(m.inner, PER), panels = tasks_for(m.columns, TILE_COLUMNS);
  const int64_t panel_size = (groups + 1) * TILE_COLUMNS;
  // Not a power of two, or all rows would compete for the same lines of the first-level cache.
  const int64_t stride = tasks_for(m.inner, GROUP) * GROUP + GROUP;
  const int64_t fitting = BLOCK_BYTES / (int64_t)(stride * sizeof(Code)) / TILE_ROWS * TILE_ROWS;
  const int64_t most = fitting < TILE_ROWS ? TILE_ROWS : fitting > 16 * TILE_ROWS ? 16 * TILE_ROWS : fitting;
  // Equally many blocks for every thread, each a whole number of tiles high.
  const int64_t each = tasks_for(tasks_for(m.rows, most), r.threads) * r.threads;
  const int64_t high = tasks_for(tasks_for(m.rows, each), TILE_ROWS) * TILE_ROWS;
  const int64_t blocks = tasks_for(m.rows, high), parts = blocks < r.threads ? smaller(r.threads, panels) : 1;
  const int64_t block_bytes = high * stride * sizeof(Code), worker_bytes = block_bytes + 4 * (high + stride);
  char* memory = (char*)allocate(panels * panel_size * 4 + 64 + r.threads * worker_bytes);
  int32_t* packed = (int32_t*)memory;
  parallel(panels, r.threads, [&](int64_t panel, int) { pack_panel(m, panel * TILE_COLUMNS, packed + panel * panel_size); });
  parallel(blocks * parts, r.threads, [&](int64_t task, int worker) {
    Code* a = (Code*)(memory + panels * panel_size * 4 + worker * worker_bytes);
    float *row = (float*)(a + high * stride), *scratch = row + high;
    const int64_t first = task / parts * high, rows = smaller(high, m.rows - first);
    if (!r.row) {
      for (int64_t i = 0; i < rows; i++) {
        const float* x = read(at(m.a, m.dtype, (first + i) * m.inner), m.dtype, m.inner, scratch);
        const float absmax = absmax_of(x, m.inner);
        encode_row(x, m.inner, absmax, a + i * stride);
        row[i] = stored(absmax) / 127.0f;
      }
    } else {
      const int8_t* codes = (const int8_t*)m.a;
      if (m.a_transposed) copy_transposed(codes + first, m.rows, rows, m.inner, a, stride);
      for (int64_t i = 0; i < rows; i++) {
        if (!m.a_transposed) copy_row(codes + (first + i) * m.inner, m.inner, a + i * stride);
        row[i] = r.row[r.row_is_scalar ? 0 : first + i] / 127.0f;
      }
    }
    const int64_t end = panels * (task % parts + 1) / parts;
    for (int64_t panel = panels * (task % parts) / parts; panel < end; panel++) {
      const Columns<2> columns(r, panel * TILE_COLUMNS);
      for (int64_t i = 0; i < rows; i += TILE_ROWS) {
        vi total[TILE_ROWS][2];
        tile(a + i * stride, stride, packed + panel * panel_size, groups, total);
        for (int64_t t = 0; t < smaller(TILE_ROWS, rows - i); t++) columns.put(total[t], first + i + t, row[i + t]);
      }
    }
  });
  free(memory);
}

}  // namespace trimtab::TRIMTAB_LEVEL
#endif
