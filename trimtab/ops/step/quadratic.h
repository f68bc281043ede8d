// The quadratic code of quadratic.py. Every operation here is rounded once and in the order of the reference, so that the
// codes agree exactly.
#pragma once
#include "blockwise.h"

namespace trimtab::TRIMTAB_LEVEL {

// root: √v; unit: a first moment in units of the stored √v; plain: a first moment of a rule without v.
enum class Kind { root, unit, plain };

// The codes of roots: FINE of quadratic.py. `choice` is kept in the last bits of absmax.
struct Fine {
  float offset, lowest, top, limit;
};
constexpr Fine FINE[4] = {{0, 4, 65024.0f, -1},
                          {256, 257, 261120.0f, (float)(16384 / 65024.0 * (1 + 5e-7))},
                          {768, 769, 1046528.0f, (float)(131072 / 261120.0 * (1 + 5e-7))},
                          {1792, 1793, 4190208.0f, (float)(786432 / 1046528.0 * (1 + 5e-7))}};
constexpr int32_t CHOICE = 3;

// The value of the largest code of a first moment, in units of code 1.
constexpr float top(Kind kind) { return kind == Kind::unit ? 16124.0f : 260046848.0f; }

// What a block is decoded with: the value of code 1, and the offset of roots.
struct Scale {
  float unit, offset;
};
INLINE Scale scale_of(float absmax, Kind kind) {
  if (kind != Kind::root) return {absmax / top(kind), 0};
  int32_t b;
  memcpy(&b, &absmax, 4);
  const Fine& fine = FINE[b & CHOICE];
  b &= ~CHOICE;
  memcpy(&absmax, &b, 4);
  return {absmax / fine.top, fine.offset};
}

// x² and √x by doubling and halving the bits: linear between 1, 1.5, 2, 3, 4, 6 … and exact inverses of each other. A shift
// removes the sign. `twice` is for numbers that are not zero.
constexpr int32_t ONE = 0x3f800000, SIGN = (int32_t)0x80000000;
INLINE vf twice(vf x) { return (vf)((bits(x) << 1) - ONE); }
INLINE vf halve(vf x) { return (vf)((bits(x) >> 1) + (ONE >> 1)); }

// The sign of `sign` on a number that is not negative.
INLINE vf signed_as(vf x, vf sign) {
  return (vf)CHOOSE(_mm512_ternarylogic_epi32((__m512i)x, (__m512i)sign, _mm512_set1_epi32(SIGN), 0xf8), (bits(x) | (bits(sign) & SIGN)),
                    (bits(x) | (bits(sign) & SIGN)));
}

// In units of code 1.
INLINE vf decode_root(const uint8_t* codes, float offset) {
  return twice(__builtin_convertvector(load_codes(codes), vf) + offset);
}
INLINE vf decode_unit(const uint8_t* codes) {
  const vf c = __builtin_convertvector(load_signed_codes(codes), vf);
  return signed_as(twice(c) - 4.0f, c);
}
INLINE vf decode_plain(const uint8_t* codes) {
  const vf c = __builtin_convertvector(load_signed_codes(codes), vf);
  const vi doubled = larger((bits(c) << 1) - ONE, vi{});
  return signed_as((vf)larger((doubled << 1) - ONE, vi{}), c);
}

// The largest power of two in the value of a root.
INLINE vf unit_of(vf value) { return (vf)(bits(value) & 0x7f800000); }

// 1 / unit_of(twice(f)), exactly. Rounding f down to its code does not change it.
INLINE vf per_unit_of(vf f) { return (vf)(3 * (uint32_t)ONE - (((vu)f << 1) & 0xff800000u)); }

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

INLINE float with_choice(float absmax, int choice) {
  int32_t b;
  memcpy(&b, &absmax, 4);
  b |= choice;
  memcpy(&absmax, &b, 4);
  return absmax;
}
INLINE int choose(float smallest, float absmax) {
  int choice = 0;
  for (int i = 1; i < 4; i++) choice += smallest > FINE[i].limit * absmax;
  return choice;
}

// --- Dither: the upper bits of a phase that advances by a constant per step and per value of a block (quadratic.py).

constexpr uint32_t PER_STEP[max_states] = {0xd1b54a33, 0xabc98389, 0x8cb92ba7};
constexpr uint32_t PER_VALUE[max_states] = {0x9e3779b1, 0xc13fa9a9, 0x91e10da5};
constexpr int SECOND = 2;

// One number in (0, 1) per value of a block; the same for all blocks.
static inline void make_dither(float* table, int64_t count, int moment, float step) {
  const uint32_t first = (uint32_t)step * PER_STEP[moment];
  for (int64_t k = 0; k < count; k++) table[k] = ((first + (uint32_t)k * PER_VALUE[moment] >> 22) + 0.5f) / 1024;
}

// --- Codes of one vector, before they are packed.

// Between the smallest codes of fourth powers the bits have corners of their own; the straight lines from code to code are lower.
template <Kind K>
INLINE vi signed_code(vf x, vf dither, vf inverse) {
  const vf z = magnitude(x) * inverse;
  vf code = K == Kind::unit ? halve(z + 4.0f) : halve(halve(z));
  if (K == Kind::plain) {
    code = smaller(code, z);
    code = smaller(code, z * (float)(1 / 15.0) + (float)(14 / 15.0));
    code = smaller(code, z * (float)(1 / 48.0) + (float)(5 / 3.0));
    code = smaller(code, z * (float)(1 / 192.0) + (float)(8 / 3.0));
  }
  return cut(signed_as(code + dither, x));
}

// Four vectors of codes to bytes. `offset` is that of roots.
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
INLINE void put_roots(uint8_t* codes, const vi c[4], float offset) {
#if defined(__AVX512F__)
  const __m512i a = _mm512_packs_epi32((__m512i)c[0], (__m512i)c[1]), b = _mm512_packs_epi32((__m512i)c[2], (__m512i)c[3]);
  const __m512i o = _mm512_set1_epi16((short)offset);
  store(codes, (vi)in_order(_mm512_packus_epi16(_mm512_sub_epi16(a, o), _mm512_sub_epi16(b, o))));
#elif defined(__AVX2__)
  const __m256i a = _mm256_packs_epi32((__m256i)c[0], (__m256i)c[1]), b = _mm256_packs_epi32((__m256i)c[2], (__m256i)c[3]);
  const __m256i o = _mm256_set1_epi16((short)offset);
  store(codes, (vi)in_order(_mm256_packus_epi16(_mm256_sub_epi16(a, o), _mm256_sub_epi16(b, o))));
#else
  for (int q = 0; q < 4; q++) store(codes + q * W, __builtin_convertvector(smaller(c[q] - (int32_t)offset, splat(255)), vb));
#endif
}

// Squares that overflowed although the gradient was finite: the largest root instead of Inf. Rare, so one by one.
static inline float keep_finite(float* x, int64_t count) {
  const float largest = 1.8446742e19f;
  for (int64_t k = 0; k < count; k++) x[k] = __builtin_isinf(x[k]) ? largest : x[k];
  return largest;
}

}  // namespace trimtab::TRIMTAB_LEVEL
