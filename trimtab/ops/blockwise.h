// One block: from float32 to codes and back. quantize, dequantize and the optimizer step use these functions.
//
// The definition of a code is in blockwise.py: divide by absmax, then find the nearest codebook entry, ties down.
// A search per value would take ten times as long as the memory traffic, so codes of the dynamic tables are guessed and
// verified:
//
//   guess    The boundaries of one decade are evenly spaced, so inside it the code is a straight line in u = |x|/absmax,
//            cut to a whole number. Eight lines (seven decades and the value 1.0) fit in one register.
//   verify   The guess can be wrong only if the line passes within SLACK of a whole number. Such a group of lanes
//            (one in two hundred) is corrected step by step.
//
// So the codes are always those of the definition, and the common case has no lookup.
#pragma once
#include "native/simd.h"

namespace trimtab::TRIMTAB_LEVEL {

constexpr int GROUP = 4 * W;  // lanes that are encoded together

// Magnitudes as bits order like the numbers do; Inf is larger than every number, and NaN larger than Inf.
INLINE vi magnitude_bits(vf x) { return bits(x) & 0x7fffffff; }

INLINE float absmax_of(vi magnitudes) {
  const int32_t b = largest(magnitudes);
  float absmax;
  memcpy(&absmax, &b, 4);
  return absmax;
}

static inline float absmax_of(const float* x, int64_t count) {
  vi m0{}, m1{}, m2{}, m3{};
  int64_t k = 0;
  for (; k + GROUP <= count; k += GROUP) {
    m0 = larger(m0, magnitude_bits(load(x + k)));
    m1 = larger(m1, magnitude_bits(load(x + k + W)));
    m2 = larger(m2, magnitude_bits(load(x + k + 2 * W)));
    m3 = larger(m3, magnitude_bits(load(x + k + 3 * W)));
  }
  for (; k < count; k += W) m0 = larger(m0, magnitude_bits(load_part(x + k, count - k)));
  return absmax_of(larger(larger(m0, m1), larger(m2, m3)));
}

// --- Decode: codebook[code] in every lane, still to be multiplied by absmax.

// By table: loads and inserts.
struct ByTable {
  const float* values;
  explicit ByTable(const Codebook& book) : values(book.values) {}
  INLINE_MEMBER vf operator()(const uint8_t* codes) const {
#if defined(__AVX2__) && !defined(__AVX512F__)
    return (vf)_mm256_set_m128(four(codes + 4), four(codes));
#else
    vf y;
    for (int l = 0; l < W; l++) y[l] = values[codes[l]];
    return y;
#endif
  }
#if defined(__AVX2__) && !defined(__AVX512F__)
  INLINE_MEMBER __m128 four(const uint8_t* codes) const {
    __m128 y = _mm_insert_ps(_mm_load_ss(values + codes[0]), _mm_load_ss(values + codes[1]), 0x10);
    y = _mm_insert_ps(y, _mm_load_ss(values + codes[2]), 0x20);
    return _mm_insert_ps(y, _mm_load_ss(values + codes[3]), 0x30);
  }
#endif
};

// By closed form. 2j + 1 as a float has decade i as its exponent and (j + 0.5) / 2^i as its mantissa, so that
// value = (9 mantissa - 8) 10^(i-7). The power of ten comes in two parts, the first short enough that its product is
// exact: the sum is then rounded once, as the codebook's own entries were.
template <bool SIGNED>
struct ByFormula {
  Eight high, low;
  int32_t minus_one;  // the code of -1.0, if there is one

  explicit ByFormula(const Codebook& book) : minus_one(book.kind == Codebook::dynamic_symmetric ? 0 : -1) {
    for (int i = 0; i < 8; i++) {
      double power = 1;
      for (int k = i; k < 7; k++) power /= 10;
      if (i == 7) power = SIGNED ? 1 / (9.0 * 257 / 256 - 8) : 1 / (9.0 * 513 / 512 - 8);  // the value 1.0
      float whole = (float)power;
      int32_t b;
      memcpy(&b, &whole, 4);
      b &= ~0x1fff;  // 11 bits
      memcpy(&whole, &b, 4);
      int slot = (127 + i + (SIGNED ? 1 : 2)) & 7;
      for (int l = slot; l < W; l += 8) high.values[l] = whole, low.values[l] = (float)(power - whole);
    }
  }

  INLINE_MEMBER vf operator()(const uint8_t* codes) const {
    const vi code = load_codes(codes);
    vi index = code, sign{};
    if (SIGNED) {
      index = code - 127;
      sign = index & (int32_t)0x80000000;
      index = index < 0 ? -index : index;
      index -= code == minus_one;
    }
    const vf odd = roughly_fma(__builtin_convertvector(index, vf), splat(2.0f), splat(SIGNED ? 1.0f : 3.0f));
    const vi decade = bits(odd) >> 23;
    const vf d = roughly_fma((vf)((bits(odd) & 0x7fffff) | 0x3f800000), splat(9.0f), splat(-8.0f));
    const vf value = roughly_fma(d, lookup(high, decade), d * lookup(low, decade));
    return (vf)((bits(value) & (index != 0)) | sign);
  }
};

// The faster of the two for a dynamic table. A permute of eight lanes takes AVX2 two micro-operations, and the signed
// formula is the longer one, so there the table is faster.
#if defined(__AVX512F__)
using DecodeSigned = ByFormula<true>;
using DecodeUnsigned = ByFormula<false>;
#elif defined(__AVX2__)
using DecodeSigned = ByTable;
using DecodeUnsigned = ByFormula<false>;
#else
using DecodeSigned = ByTable;
using DecodeUnsigned = ByTable;
#endif

// Decode a part of one block, a vector at a time: put(k, values, lanes).
template <class Decode, class Put>
INLINE void decode_with(const Decode decode, const uint8_t* codes, int64_t count, float absmax, Put put) {
  int64_t k = 0;
  for (; k + W <= count; k += W) put(k, decode(codes + k) * absmax, W);
  if (k < count) {
    uint8_t last[W] = {};
    memcpy(last, codes + k, count - k);
    put(k, decode(last) * absmax, (int)(count - k));
  }
}

template <class Put>
static inline void decode(const Codebook& book, const uint8_t* codes, int64_t count, float absmax, Put put) {
  // A formula is the same for every book of its kind, and is made once. A table belongs to its book and is not kept.
  if constexpr (!__is_same(DecodeUnsigned, ByTable)) {
    static const DecodeUnsigned formula(book);
    if (book.kind == Codebook::dynamic_unsigned) return decode_with(formula, codes, count, absmax, put);
  }
  if constexpr (!__is_same(DecodeSigned, ByTable)) {
    if (book.kind == Codebook::dynamic_signed || book.kind == Codebook::dynamic_symmetric)
      return decode_with(DecodeSigned(book), codes, count, absmax, put);
  }
  decode_with(ByTable(book), codes, count, absmax, put);
}

// --- Encode

// The definition, for one value: how many boundaries lie below it.
INLINE int search(float u, const Codebook& book) {
  const float* from = book.midpoints;
  for (int half = 128; half; half /= 2) {
    int reach = (int)(from - book.midpoints) + half;
    if (reach < book.count && from[half - 1] < u) from += half;
  }
  return (int)(from - book.midpoints);
}

// The eight lines of a dynamic table. In decade i, with t = u * 10^(7-i) / 9 + 8/9, the magnitude index is
// 2^i * t, cut to a whole number (2^(i+1) * t - 1 if unsigned). Adding 3 puts t into [4, 8), where the float's last
// bits count in steps of 2^-21: the index is then those bits, shifted.
template <bool SIGNED>
struct Lines {
  static constexpr int32_t SLACK = 3;         // in steps of 2^-21; the error of t is below 1.7 of them (tests/ops)
  static constexpr int32_t BORDER_SLACK = 4;  // in steps of u's last bit, of which it can be wrong by 3
  static constexpr int32_t MULTIPLIER = 160;  // (upper half of u's bits * 160) >> 16 = 32 + decade, or one more
  static constexpr int32_t FIRST = 33;
  static constexpr int32_t ONE = 1 << 21;  // t = 1
  static constexpr int32_t ORIGIN = 0x40800000 - ONE;

  Eight border, slope;
  float offset;

  explicit Lines(const Codebook& book) {
    // u passes into decade i above the boundary between the last code of decade i - 1 and the first of decade i.
    const float* boundary = SIGNED ? book.midpoints + 127 : book.midpoints;
    float power = 1e7f;
    for (int i = 0; i < 8; i++, power /= 10) {
      int32_t b = 0;
      float line = power / 9;
      if (i == 0) {
        b = (int32_t)0x80000000;                           // below everything
        if (SIGNED) line = (2 - 8 / 9.0f) / boundary[1];  // a whole number at its upper border, as in the others
      } else {
        memcpy(&b, &boundary[SIGNED ? (1 << i) - 1 : (2 << i) - 2], 4);
        b += i == 7 ? -BORDER_SLACK : BORDER_SLACK;
      }
      if (i == 7) line = (1 - 8 / 9.0f) / boundary[SIGNED ? 127 : 254];  // the value 1.0: a whole number at its lower border
      for (int l = i; l < W; l += 8) memcpy(&border.values[l], &b, 4);
      for (int l = (i + 1) % 8; l < W; l += 8) slope.values[l] = line;  // looked up one higher, above the border
    }
    offset = 3 + 8 / 9.0f + SLACK / 2097152.0f;  // a whole number that is SLACK ahead counts as just passed
  }
};

// Guess the codes of four vectors, stage by stage so that their latencies overlap. Codes come as signed or unsigned
// magnitude indices. Returns a mask with a lane set if one of them may be wrong.
template <bool SIGNED, bool KEEP_POSITIVE>
INLINE vi guess(const Lines<SIGNED>& lines, const float* x, vf inverse, vi index[4]) {
  using L = Lines<SIGNED>;
  vf u[4];
  vi decade[4], near{}, fraction = splat(-1);
  for (int q = 0; q < 4; q++) {
    u[q] = load(x + q * W) * inverse;
    if (SIGNED) u[q] = magnitude(u[q]);
  }
  for (int q = 0; q < 4; q++)
    decade[q] = CHOOSE((vi)_mm512_mulhi_epu16((__m512i)u[q], _mm512_set1_epi32(L::MULTIPLIER << 16)) >> 16,
                       (vi)_mm256_srli_epi32(_mm256_mulhi_epu16((__m256i)u[q], _mm256_set1_epi32(L::MULTIPLIER << 16)), 16),
                       (bits(u[q]) >> 16) * L::MULTIPLIER >> 16);
  // Above the border u is in this decade, else in the one before. Near the border, u is near a whole number of that line
  // and is verified.
  for (int q = 0; q < 4; q++) decade[q] = one_more_if_larger(decade[q], bits(u[q]), bits(lookup(lines.border, decade[q])));
  for (int q = 0; q < 4; q++) {
    vi t = bits(roughly_fma(u[q], lookup(lines.slope, decade[q]), splat(lines.offset))) - L::ORIGIN;
    vi shift = (SIGNED ? 21 : 20) + L::FIRST - decade[q];
    fraction = smaller_unsigned(fraction, shift_left(t, 32 - shift));
    // Between a decade's last code and the border, the line continues but the code does not.
    index[q] = shift_right(smaller(t, splat(2 * L::ONE - 1)), shift);
  }
  for (int q = 0; q < 4; q++) {
    vi b = bits(load(x + q * W));
    if (SIGNED) {
      near |= index[q] == 1;  // decade 0 has a boundary off its line, inside this cell
      index[q] = with_sign(index[q], b);
    } else if (KEEP_POSITIVE) {
      index[q] = larger(index[q], smaller_unsigned(b + b, splat(2)));  // index 2 is code 1
    } else {
      near |= index[q] == 2;  // decade 0 has a boundary off its line, at the bottom of this cell
    }
  }
  // How far past the last whole number, of a whole: in the finest decade a step of 2^-21 is 2^-15 of the way, unsigned 2^-14.
  constexpr int32_t limit = (2 * L::SLACK) << (SIGNED ? 17 : 18);
  return near | (smaller_unsigned(fraction, splat(limit)) == fraction);
}

// Write the four vectors of indices as codes; true if the group must be verified. Code 0 of the symmetric table is -1.0,
// which is on no line: index -127 is verified, -128 is certain.
template <bool SIGNED>
INLINE bool put(uint8_t* codes, const vi index[4], vi near) {
  constexpr int zero = SIGNED ? 127 : -1;
#if defined(__AVX2__) && !defined(__AVX512F__)
  __m256i a = _mm256_packs_epi32((__m256i)index[0], (__m256i)index[1]);
  __m256i b = _mm256_packs_epi32((__m256i)index[2], (__m256i)index[3]);
  a = _mm256_add_epi16(a, _mm256_set1_epi16(zero));
  b = _mm256_add_epi16(b, _mm256_set1_epi16(zero));
  if (SIGNED) {
    __m256i none = _mm256_setzero_si256();
    near |= (vi)_mm256_or_si256(_mm256_cmpeq_epi16(a, none), _mm256_cmpeq_epi16(b, none));
  }
  __m256i packed = _mm256_packus_epi16(a, b);
  packed = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256((__m256i*)codes, packed);
#else
  vi least = splat(-1);
  for (int q = 0; q < 4; q++) {
    const vi code = index[q] + zero;
    least = smaller_unsigned(least, code);
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i*)(codes + q * W), _mm512_cvtusepi32_epi8((__m512i)larger(code, vi{})));
#else
    store(codes + q * W, __builtin_convertvector(smaller(larger(code, vi{}), splat(255)), vb));
#endif
  }
  if (SIGNED) near |= least == 0;
#endif
  return any(near);
}

// From any guess to the code of the definition, a step at a time.
template <bool KEEP_POSITIVE>
static __attribute__((noinline)) void verify(const Codebook& book, const float* x, int64_t count, float absmax, uint8_t* codes) {
  for (int64_t k = 0; k < count; k++) {
    float u = x[k] / absmax;
    int code = codes[k] < book.count ? codes[k] : book.count - 1;
    while (book.midpoints[code] < u) code++;
    while (code > 0 && book.midpoints[code - 1] >= u) code--;
    codes[k] = (uint8_t)(KEEP_POSITIVE && code == 0 && x[k] > 0 ? 1 : code);
  }
}

template <bool SIGNED, bool KEEP_POSITIVE>
static inline void encode_dynamic(const Codebook& book, const float* x, int64_t count, float absmax, uint8_t* codes) {
  static const Lines<SIGNED> lines(book);  // the same for every book of this kind
  const vf inverse = splat(1 / absmax);
  vi index[4];
  int64_t k = 0;
  for (; k + GROUP <= count; k += GROUP) {
    const vi near = guess<SIGNED, KEEP_POSITIVE>(lines, x + k, inverse, index);
    if (__builtin_expect(put<SIGNED>(codes + k, index, near), 0)) verify<KEEP_POSITIVE>(book, x + k, GROUP, absmax, codes + k);
  }
  if (k < count) {
    float last[GROUP] = {};
    uint8_t last_codes[GROUP];
    memcpy(last, x + k, 4 * (count - k));
    const vi near = guess<SIGNED, KEEP_POSITIVE>(lines, last, inverse, index);
    if (put<SIGNED>(last_codes, index, near)) verify<KEEP_POSITIVE>(book, last, GROUP, absmax, last_codes);
    memcpy(codes + k, last_codes, count - k);
  }
}

// KEEP_POSITIVE: a value above zero is never stored as code 0, the zero of an unsigned table.
template <bool KEEP_POSITIVE>
static inline void encode(const Codebook& book, const float* x, int64_t count, float absmax, uint8_t* codes) {
  if (!(absmax > 0) || absmax == INFINITY) {  // zeros, or NaN: stored as zeros
    memset(codes, search(0, book), count);
    return;
  }
  // Outside these bounds 1/absmax is not a normal number, and the guess would be wrong.
  bool ordinary = absmax > 0x1p-120f && absmax < 0x1p120f;
  if (ordinary && (book.kind == Codebook::dynamic_signed || book.kind == Codebook::dynamic_symmetric))
    return encode_dynamic<true, false>(book, x, count, absmax, codes);
  if (ordinary && book.kind == Codebook::dynamic_unsigned)
    return encode_dynamic<false, KEEP_POSITIVE>(book, x, count, absmax, codes);
  for (int64_t k = 0; k < count; k++) {
    int code = search(x[k] / absmax, book);
    codes[k] = (uint8_t)(KEEP_POSITIVE && code == 0 && x[k] > 0 ? 1 : code);
  }
}

// absmax as it is stored: NaN for a block that holds a NaN or an Inf.
INLINE float stored(float absmax) { return absmax < INFINITY ? absmax : NAN; }

// --- A whole tensor, block by block

constexpr int64_t CHUNK = 1 << 13;  // values per task: enough work for a thread, and its scratch fits on the stack

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t tasks_for(int64_t count, int64_t size) { return (count + size - 1) / size; }

// Find the absmax of every block and call encode(x, start, count, absmax) on the float32 values of each.
template <class Encode>
static void each_block(const void* values, Dtype dtype, int64_t count, int64_t block, float* absmax, int threads, Encode encode) {
  auto floats = [&](int64_t start, int64_t length, float* scratch) { return read(at(values, dtype, start), dtype, length, scratch); };
  if (block <= CHUNK) {
    // A task takes whole blocks, each read once from memory and encoded from the cache.
    const int64_t per_task = block * (CHUNK / block);
    parallel(tasks_for(count, per_task), threads, [&](int64_t task, int) {
      float scratch[CHUNK];
      const int64_t end = smaller(count, (task + 1) * per_task);
      for (int64_t start = task * per_task; start < end; start += block) {
        const int64_t length = smaller(block, end - start);
        const float* x = floats(start, length, scratch);
        const float largest = absmax_of(x, length);
        encode(x, start, length, largest);
        absmax[start / block] = stored(largest);
      }
    });
    return;
  }
  // Blocks larger than a task: first every absmax, then the codes, both in parallel over slices of a block.
  const int64_t slices = tasks_for(block, CHUNK), blocks = tasks_for(count, block);
  auto slice = [&](int64_t task, int64_t& start, int64_t& length) {
    const int64_t offset = task % slices * CHUNK;
    start = task / slices * block + offset;
    length = smaller(smaller(CHUNK, block - offset), count - start);
    return length > 0;
  };
  int32_t* absmax_bits = (int32_t*)absmax;
  memset(absmax_bits, 0, 4 * blocks);
  parallel(slices * blocks, threads, [&](int64_t task, int) {
    float scratch[CHUNK];
    int64_t start, length;
    if (!slice(task, start, length)) return;
    const float largest = absmax_of(floats(start, length, scratch), length);
    int32_t mine, *shared = absmax_bits + task / slices;
    memcpy(&mine, &largest, 4);
    int32_t seen = __atomic_load_n(shared, __ATOMIC_RELAXED);
    while (mine > seen && !__atomic_compare_exchange_n(shared, &seen, mine, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
  });
  parallel(slices * blocks, threads, [&](int64_t task, int) {
    float scratch[CHUNK];
    int64_t start, length;
    if (slice(task, start, length)) encode(floats(start, length, scratch), start, length, absmax[task / slices]);
  });
  for (int64_t b = 0; b < blocks; b++) absmax[b] = stored(absmax[b]);
}

}  // namespace trimtab::TRIMTAB_LEVEL
