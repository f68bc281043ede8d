// int8 quantization by row or column, the rescale of an int32 product, and the product itself.
//
// Compiled once per level, and once more for the VNNI of AVX-512 and of AVX, of which only the product is used.
#include "blockwise.h"

namespace trimtab::TRIMTAB_LEVEL {

// --- The codes of a row: round(x / absmax * 127), half to even. A division takes a third of the time, so a code is
// computed with one multiplication and verified: the two can differ only where the product is within SLACK of a half. One
// group in a hundred is then divided.

constexpr float SLACK = 0x1p-14f;  // twice the largest difference, 127 * 2^-22

INLINE vi divided_codes(vf x, vf absmax) { return round_to_int(x / absmax * 127.0f); }

// A row of zeros, or one that is stored as NaN, gets zero codes.
INLINE bool has_scale(float absmax) { return absmax > 0 && absmax < INFINITY; }

// Four vectors of codes, as int8, as uint8 plus 128 (for VNNI) or as int16 (for pairs).
INLINE void store_codes(int8_t* to, const vi codes[4]) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i low = _mm256_packs_epi32((__m256i)codes[0], (__m256i)codes[1]);
  const __m256i high = _mm256_packs_epi32((__m256i)codes[2], (__m256i)codes[3]);
  _mm256_storeu_si256((__m256i*)to, in_order(_mm256_packs_epi16(low, high)));
#else
  for (int q = 0; q < 4; q++) store(to + q * W, __builtin_convertvector(codes[q], vc));
#endif
}
INLINE void store_codes(uint8_t* to, const vi codes[4]) {
  int8_t bytes[GROUP];
  store_codes(bytes, codes);
  for (int k = 0; k < GROUP; k++) to[k] = (uint8_t)(bytes[k] ^ 0x80);
}
INLINE void store_codes(int16_t* to, const vi codes[4]) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  for (int q = 0; q < 4; q += 2) {
    const __m256i pair = _mm256_packs_epi32((__m256i)codes[q], (__m256i)codes[q + 1]);
    _mm256_storeu_si256((__m256i*)(to + q * W), _mm256_permute4x64_epi64(pair, 0xd8));
  }
#else
  for (int q = 0; q < 4; q++) store(to + q * W, __builtin_convertvector(codes[q], vh));
#endif
}

template <class Code>
INLINE void encode_group(const float* x, float absmax, float scale, Code* codes) {
  constexpr float whole = 12582912.0f;  // 1.5 * 2^23: adding it rounds
  vi code[4];
  vf worst{};
  for (int q = 0; q < 4; q++) {
    const vf u = load(x + q * W) * scale, rounded = u + whole;
    worst = larger(worst, magnitude(u - (rounded - whole)));
    code[q] = bits(rounded) - bits(splat(whole));
  }
  if (__builtin_expect(scale == 0 || any(worst > 0.5f - SLACK), 0))
    for (int q = 0; q < 4; q++) code[q] = divided_codes(load(x + q * W), splat(absmax));
  store_codes(codes, code);
}

// Codes of `count` values. Where `count` is not a multiple of GROUP, zeros follow up to the next multiple.
template <class Code>
static inline void encode_row(const float* x, int64_t count, float absmax, Code* codes) {
  const bool zero = !has_scale(absmax);
  const float divisor = zero ? 1.0f : absmax;
  // Outside these bounds 127 / absmax is not a normal number: scale 0, and every group is divided.
  const float scale = divisor > 0x1p-110f && divisor < 0x1p120f ? 127.0f / divisor : 0.0f;
  int64_t k = 0;
  for (; k + GROUP <= count && !zero; k += GROUP) encode_group(x + k, divisor, scale, codes + k);
  for (; k < count; k += GROUP) {
    float last[GROUP] = {};
    if (!zero) memcpy(last, x + k, 4 * (count - k));
    encode_group(last, divisor, scale, codes + k);
  }
}

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

// --- Rescale: total * row * column + bias, in the reference's order.

// `count` vectors of columns from column j on, with their scales and biases.
template <int count>
struct Columns {
  const Rescale& r;
  int64_t j, lanes;
  bool whole;  // all lanes, as float32
  vf scale[count], bias[count];

  Columns(const Rescale& rescale, int64_t first) : r(rescale), j(first), lanes(smaller(count * W, rescale.columns - first)) {
    whole = lanes == count * W && r.dtype == Dtype::float32;
    for (int q = 0; q < count; q++) {
      scale[q] = splat(r.column_is_scalar ? *r.column : 0.0f), bias[q] = vf{};
      const int64_t left = lanes - q * W;
      if (left > 0 && !r.column_is_scalar) scale[q] = load_part(r.column + j + q * W, left);
      if (left > 0 && r.bias) bias[q] = load_part(r.bias + j + q * W, left);
      scale[q] /= 127.0f;
    }
  }

  // One row of the result.
  INLINE_MEMBER void put(const vi total[count], int64_t i, float row) const {
    vf y[count];
    for (int q = 0; q < count; q++) {
      y[q] = __builtin_convertvector(total[q], vf) * row * scale[q];
      if (r.bias) y[q] += bias[q];
    }
    void* to = at(r.out, r.dtype, i * r.columns + j);
    if (whole)
      for (int q = 0; q < count; q++) store((float*)to + q * W, y[q]);
    else
      write((const float*)y, lanes, to, r.dtype);
  }
};

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

// --- The product: int32 sums in registers, then the rescale. a is codes, or values that are quantized on the way.
//
// Without VNNI it multiplies pairs of int16 (vpmaddwd: twice the multiply-adds of float32), with it four bytes per lane
// (vpdpbusd). Both take groups of 32 bits, PER codes each:
//
//   a    a block of rows at a time, so that it stays in the second-level cache: codes row by row, one group broadcast
//   b    panels of two vectors of columns: [group][column][PER], all of it packed first
//
// VNNI multiplies unsigned by signed bytes. a is stored plus 128, and the sums start at -128 times the sum of b's column.

#ifdef __AVX2__
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

// One tile over the whole inner dimension. `put` gets each row of sums.
template <class Put>
INLINE void tile(const Code* a, int64_t stride, const int32_t* b, int64_t groups, int64_t count, Put put) {
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
#pragma GCC unroll 12
  for (int i = 0; i < TILE_ROWS; i++)
    if (i < count) put(i, sums[i]);
}

// Kept between calls by the calling thread: megabytes that come and go between tensors would fragment the heap.
struct Scratch {
  char* memory = nullptr;
  int64_t size = 0;
  ~Scratch() { free(memory); }
  char* at_least(int64_t bytes) {
    if (bytes > size) {
      free(memory);
      memory = nullptr, size = 0;
      memory = (char*)allocate(bytes);
      size = bytes;
    }
    return memory;
  }
};

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
  static thread_local Scratch scratch_of_thread;
  char* memory = scratch_of_thread.at_least(panels * panel_size * 4 + 64 + r.threads * worker_bytes);
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
        tile(a + i * stride, stride, packed + panel * panel_size, groups, rows - i,
             [&](int t, const vi total[2]) { columns.put(total, first + i + t, row[i + t]); });
      }
    }
  });
}
#endif

}  // namespace trimtab::TRIMTAB_LEVEL
