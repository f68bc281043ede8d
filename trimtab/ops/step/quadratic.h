// The quadratic code of quadratic.py. Every operation here is rounded once and in the order of the reference, so that the
// codes agree exactly.
#pragma once
#include "blockwise.h"

namespace trimtab::TRIMTAB_LEVEL {

// root: √v; unit: a first moment in units of the stored √v; plain: a first moment of a rule without v.
enum class Kind { root, unit, plain };

// A root is a float32 with its last `shift` bits cut off; the code is its place in a window of 256 such numbers. Where such
// windows are too short, the window is wide: of its numbers below the knee, code 96, only every fourth has a code. absmax of
// roots is the end of the window, and its last bits hold COARSEST - shift, or 0 if it is wide.
constexpr int COARSEST = 18, FINEST = 13, KNEE = 96;
constexpr int32_t EXPONENT = 0x7f800000, LOWEST = (127 - 80) << 23;  // LOWEST: the bits of 2^-80, whose square is zero
constexpr int32_t LARGEST_ROOT = (127 + 63) << 23;                    // of 2^63: one code more does not overflow in the square

// The value of the largest code of a first moment, in units of code 1.
constexpr float top(Kind kind) { return kind == Kind::unit ? 127.0f : 260046848.0f; }

// What a block is decoded with: the value of code 1 of first moments; the window of roots, which starts at the place `low`, or,
// if it is wide, has its knee at `low` + KNEE.
struct Scale {
  float unit;
  int32_t shift, low;
  bool wide;
};

INLINE int32_t later(int32_t a, int32_t b) { return a > b ? a : b; }
INLINE Scale window(int32_t end, int shift, bool wide) {
  const int32_t first = LOWEST >> shift;
  const int32_t low = wide ? later((end - 252 + KNEE) & ~3, first + 4 * KNEE) - KNEE : later(end - 255, first);
  return {0, shift, low, wide};
}

// From the old absmax.
INLINE Scale scale_of(float absmax, Kind kind) {
  if (kind != Kind::root) return {absmax / top(kind), 0, 0, false};
  int32_t end;
  memcpy(&end, &absmax, 4);
  const int finer = end & 7;
  const bool wide = finer == 0;
  const int shift = wide ? COARSEST : COARSEST + 1 - finer;
  return window(end >> shift, shift, wide);
}

// From the smallest and the largest new root: the finest window that holds both.
INLINE int32_t end_of(int32_t most, int shift) { return ((most - 1) >> shift) + 1; }
INLINE Scale window_of(int32_t least, int32_t most) {
  auto fits = [=](int shift) { return end_of(most, shift) - (least >> shift) <= 255; };
  int shift = COARSEST;
  const bool wide = !fits(shift);
  while (shift > FINEST && fits(shift - 1)) shift--;
  return window(end_of(most, shift), shift, wide);
}
INLINE float absmax_of(const Scale& w, int32_t most) {
  const int32_t end = end_of(most, w.shift) << w.shift | (w.wide ? 0 : COARSEST + 1 - w.shift);
  float absmax;
  memcpy(&absmax, &end, 4);
  return absmax;
}

// The inverse of `twice` in quadratic.py. A shift removes the sign.
constexpr int32_t ONE = 0x3f800000, SIGN = (int32_t)0x80000000;
INLINE vf halve(vf x) { return (vf)((bits(x) >> 1) + (ONE >> 1)); }

// The sign of `sign` on a number that is not negative.
INLINE vf signed_as(vf x, vf sign) {
  return (vf)CHOOSE(_mm512_ternarylogic_epi32((__m512i)x, (__m512i)sign, _mm512_set1_epi32(SIGN), 0xf8), (bits(x) | (bits(sign) & SIGN)),
                    (bits(x) | (bits(sign) & SIGN)));
}

// The bits of a root from its code.
template <bool WIDE>
INLINE vi root_bits(vi code, const Scale& w) {
  if (!WIDE) return (code + w.low) << w.shift;
  const vi y = code - KNEE;
  return shift_left(y, COARSEST + ((y >> 31) & 2)) + ((w.low + KNEE) << COARSEST);
}

// The code of a root. `root` becomes the stored one, up to bits after the exponent. `dither` is an odd number below 1024.
template <bool WIDE>
INLINE vi root_code(vi& root, vi dither, const Scale& w) {
  if (!WIDE) {
    root = larger(root + (dither << (w.shift - 10)), splat(w.low << w.shift));
    return (root >> w.shift) - w.low;
  }
  const int32_t knee = (w.low + KNEE) << COARSEST;
  const vi shift = root < knee ? splat(COARSEST + 2) : splat(COARSEST);
  root = larger(root + shift_left(dither, shift - 10), splat(knee - (KNEE << (COARSEST + 2))));
  return shift_right_signed(root - knee, shift) + KNEE;
}

// In units of code 1.
INLINE vf decode_unit(const uint8_t* codes) { return __builtin_convertvector(load_signed_codes(codes), vf); }
INLINE vf decode_plain(const uint8_t* codes) {
  const vf c = __builtin_convertvector(load_signed_codes(codes), vf);
  const vi doubled = larger((bits(c) << 1) - ONE, vi{});
  return signed_as((vf)larger((doubled << 1) - ONE, vi{}), c);
}

// The unit of first moments: the largest power of two in the stored root; in a wide window not below the knee / 2^7.
template <bool WIDE>
INLINE vi unit_bits(vi root, const Scale& w) {
  const int32_t knee = (w.low + KNEE) << COARSEST;
  return (WIDE ? larger(root, splat(knee - (7 << 23))) : root) & EXPONENT;
}

// absmax to 21 bits: float32 state dicts then restore it exactly.
INLINE float keep_21_bits(float absmax) {
  if (!(absmax < INFINITY)) return absmax;
  int32_t b;
  memcpy(&b, &absmax, 4);
  b = (b + 4) & ~7;
  b = b < 0x7f7ffff8 ? b : 0x7f7ffff8;
  memcpy(&absmax, &b, 4);
  return absmax;
}

// What turns a value into units of code 1; the largest number where absmax is zero or too small to divide by.
INLINE vf inverse_of(float absmax, float top) {
  const float largest = 3.402823466e+38f, inverse = top / absmax;
  return splat(inverse < largest ? inverse : largest);
}

// --- Dither: the upper bits of a phase that advances by a constant per step and per value of a block (quadratic.py).

constexpr uint32_t PER_STEP[max_states] = {0xd1b54a33, 0xabc98389, 0x8cb92ba7};
constexpr uint32_t PER_VALUE[max_states] = {0x9e3779b1, 0xc13fa9a9, 0x91e10da5};
constexpr int SECOND = 2;

// One number per value of a block, the same for all blocks. Of roots: an odd number below 1024; of others: in (-1/2, 1/2).
static inline void make_dither(int32_t* table, int64_t count, float step) {
  const uint32_t first = (uint32_t)step * PER_STEP[SECOND];
  for (int64_t k = 0; k < count; k++) table[k] = (int32_t)(first + (uint32_t)k * PER_VALUE[SECOND] >> 23) * 2 + 1;
}
static inline void make_dither(float* table, int64_t count, int moment, float step) {
  const uint32_t first = (uint32_t)step * PER_STEP[moment];
  for (int64_t k = 0; k < count; k++) table[k] = ((int32_t)(first + (uint32_t)k * PER_VALUE[moment] >> 22) - 511.5f) / 1024;
}

// --- Codes of one vector, before they are packed.

// Between the smallest codes of fourth powers the bits have corners of their own; the straight lines from code to code are lower.
INLINE vi signed_code(Kind kind, vf x, vf dither, vf inverse) {
  if (kind == Kind::unit) return round_to_int(x * inverse + dither);
  const vf z = magnitude(x) * inverse;
  vf code = halve(halve(z));
  code = smaller(code, z);
  code = smaller(code, z * (float)(1 / 15.0) + (float)(14 / 15.0));
  code = smaller(code, z * (float)(1 / 48.0) + (float)(5 / 3.0));
  code = smaller(code, z * (float)(1 / 192.0) + (float)(8 / 3.0));
  return round_to_int(signed_as(code + dither, x));
}

// Four vectors of codes to bytes.
INLINE void put_signed(uint8_t* codes, const vi c[4]) {
#if defined(__AVX512F__)
  const __m512i a = _mm512_packs_epi32((__m512i)c[0], (__m512i)c[1]), b = _mm512_packs_epi32((__m512i)c[2], (__m512i)c[3]);
  store(codes, (vi)in_order(_mm512_packs_epi16(a, b)));
#elif defined(__AVX2__)
  const __m256i a = _mm256_packs_epi32((__m256i)c[0], (__m256i)c[1]), b = _mm256_packs_epi32((__m256i)c[2], (__m256i)c[3]);
  store(codes, (vi)in_order(_mm256_packs_epi16(a, b)));
#else
  for (int q = 0; q < 4; q++) store(codes + q * W, __builtin_convertvector(c[q], vb));
#endif
}
INLINE void put_roots(uint8_t* codes, const vi c[4]) {
#if defined(__AVX512F__)
  const __m512i a = _mm512_packs_epi32((__m512i)c[0], (__m512i)c[1]), b = _mm512_packs_epi32((__m512i)c[2], (__m512i)c[3]);
  store(codes, (vi)in_order(_mm512_packus_epi16(a, b)));
#elif defined(__AVX2__)
  const __m256i a = _mm256_packs_epi32((__m256i)c[0], (__m256i)c[1]), b = _mm256_packs_epi32((__m256i)c[2], (__m256i)c[3]);
  store(codes, (vi)in_order(_mm256_packus_epi16(a, b)));
#else
  for (int q = 0; q < 4; q++) store(codes + q * W, __builtin_convertvector(c[q], vb));
#endif
}

// Squares that overflowed, or nearly, although the gradient was finite. Rare, so one by one; a NaN stays.
static inline void limit_roots(float* x, int64_t count) {
  const float limit = 0x1p63f;
  for (int64_t k = 0; k < count; k++) x[k] = x[k] > limit ? limit : x[k];
}

}  // namespace trimtab::TRIMTAB_LEVEL
