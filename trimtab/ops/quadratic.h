// The quadratic code of quadratic.py. Every operation here is rounded once and in the order of the reference, so that the
// codes agree exactly.
#pragma once
#include "blockwise.h"

namespace trimtab::TRIMTAB_LEVEL {

// root: √v; unit: m in units of √v; plain: m where there is no v.
enum class Kind { root, unit, plain };

constexpr float levels(Kind kind) { return kind == Kind::root ? 255 : 127; }

// The value of code 1.
INLINE float unit_of(float absmax, Kind kind) {
  return absmax / (kind == Kind::unit ? levels(kind) : levels(kind) * levels(kind));
}

INLINE vf decode_quadratic(const uint8_t* codes, float unit, Kind kind) {
  if (kind == Kind::root) {
    const vf c = __builtin_convertvector(load_codes(codes), vf);
    return c * c * unit;
  }
  const vf c = __builtin_convertvector(load_signed_codes(codes), vf);
  return (kind == Kind::unit ? c : c * magnitude(c)) * unit;
}

// Codes are worked out in parts of this size, to which the dither, mixed from the digits of x and the step's seed, is
// added before it is cut. A positive root never becomes code 0.
constexpr int32_t PARTS = 4096, PART_BITS = 12;

template <Kind K>
INLINE vi quadratic_code(vf x, vi seed, vf inverse) {
  vf parts = x * inverse;
  if (K == Kind::root) parts = root(parts) * (levels(K) * PARTS);
  if (K == Kind::plain) parts = (vf)(bits(root(magnitude(parts)) * (levels(K) * PARTS)) | (bits(x) & (int32_t)0x80000000));
  const vi dither = shift_right(((bits(x) & 0x7fffff) ^ seed) * (int32_t)0x9e3779b1, splat(32 - PART_BITS));
  const vi code = (round_to_int(parts) + dither) >> PART_BITS;
  return K == Kind::root ? larger(code, smaller_unsigned(bits(x), splat(1))) : code;
}

template <Kind K>
INLINE void put_quadratic(uint8_t* codes, const vi c[4]) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  __m256i a = _mm256_packs_epi32((__m256i)c[0], (__m256i)c[1]), b = _mm256_packs_epi32((__m256i)c[2], (__m256i)c[3]);
  __m256i packed = K == Kind::root ? _mm256_packus_epi16(a, b) : _mm256_packs_epi16(a, b);
  packed = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256((__m256i*)codes, packed);
#else
  for (int q = 0; q < 4; q++)
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i*)(codes + q * W), _mm512_cvtepi32_epi8((__m512i)c[q]));
#else
    store(codes + q * W, __builtin_convertvector(c[q], vb));
#endif
#endif
}

template <Kind K>
static inline void encode_quadratic(const float* x, vi seed, int64_t count, float absmax, uint8_t* codes) {
  if (!(absmax < INFINITY)) {  // NaN: stored as zeros under a scale of NaN
    memset(codes, 0, count);
    return;
  }
  const float largest = 3.402823466e+38f, reciprocal = (K == Kind::unit ? levels(K) * PARTS : 1) / absmax;
  const vf inverse = splat(reciprocal < largest ? reciprocal : largest);  // zeros, and numbers too small to divide by
  vi c[4];
  int64_t k = 0;
  for (; k + GROUP <= count; k += GROUP) {
    for (int q = 0; q < 4; q++) c[q] = quadratic_code<K>(load(x + k + q * W), seed, inverse);
    put_quadratic<K>(codes + k, c);
  }
  if (k < count) {
    float last[GROUP] = {};
    uint8_t last_codes[GROUP];
    memcpy(last, x + k, 4 * (count - k));
    for (int q = 0; q < 4; q++) c[q] = quadratic_code<K>(load(last + q * W), seed, inverse);
    put_quadratic<K>(last_codes, c);
    memcpy(codes + k, last_codes, count - k);
  }
}

static inline void encode_quadratic(Kind kind, const float* x, vi seed, int64_t count, float absmax, uint8_t* codes) {
  switch (kind) {
    case Kind::root: return encode_quadratic<Kind::root>(x, seed, count, absmax, codes);
    case Kind::unit: return encode_quadratic<Kind::unit>(x, seed, count, absmax, codes);
    case Kind::plain: return encode_quadratic<Kind::plain>(x, seed, count, absmax, codes);
  }
}

}  // namespace trimtab::TRIMTAB_LEVEL
