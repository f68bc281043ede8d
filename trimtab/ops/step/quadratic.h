// The quadratic code of quadratic.py. Every operation here is rounded once and in the order of the reference, so that the
// codes agree exactly.
#pragma once
#include "blockwise.h"

namespace trimtab::TRIMTAB_LEVEL {

// root: √v; unit: a first moment in units of the stored √v; plain: a first moment of a rule without v.
enum class Kind { root, unit, plain };

// The value of the largest code, in units of code 1.
constexpr float top(Kind kind) { return kind == Kind::root ? 65024.0f : kind == Kind::unit ? 16128.0f : 260046848.0f; }

INLINE float value_of_code_1(float absmax, Kind kind) { return absmax / top(kind); }

// x² and √x by doubling and halving the bits: linear between 1, 1.5, 2, 3, 4, 6 … and exact inverses of each other.
constexpr int32_t ONE = 0x3f800000;
INLINE vf twice(vf x) { return (vf)larger((bits(x) << 1) - ONE, vi{}); }
INLINE vf halve(vf x) { return (vf)((bits(x) >> 1) + (ONE >> 1)); }

INLINE vf decode_quadratic(const uint8_t* codes, float unit, Kind kind) {
  if (kind == Kind::root) return twice(__builtin_convertvector(load_codes(codes), vf)) * unit;
  const vf c = __builtin_convertvector(load_signed_codes(codes), vf);
  vf value = twice(magnitude(c));
  if (kind == Kind::plain) value = twice(value);
  return (vf)(bits(value) | (bits(c) & (int32_t)0x80000000)) * unit;
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
INLINE vf inverse_of(float absmax, Kind kind) {
  const float largest = 3.402823466e+38f, inverse = top(kind) / absmax;
  return splat(inverse < largest ? inverse : largest);
}

// --- Dither: a phase in 2^-32ths of a code, which advances by a constant per step and per value of a block (quadratic.py).

constexpr int32_t PARTS = 4096, PART_BITS = 12;
constexpr int32_t SMALLEST = 4, SMALLEST_UNIT = 0x41800000;  // code of a positive root, and the bits of its value
constexpr uint32_t PER_STEP[max_states] = {0xd1b54a33, 0xabc98389, 0x8cb92ba7};
constexpr uint32_t PER_VALUE[max_states] = {0x9e3779b1, 0xc13fa9a9, 0x91e10da5};
constexpr int SECOND = 2;

struct Dither {
  vi phase, advance;

  Dither(int moment, float step) {
    const uint32_t first = (uint32_t)step * PER_STEP[moment];
    for (int l = 0; l < W; l++) phase[l] = (int32_t)(first + l * PER_VALUE[moment]);
    advance = splat((int32_t)(W * PER_VALUE[moment]));
  }
  // The phases of the next W values.
  INLINE_MEMBER vi next() {
    const vi now = phase;
    phase += advance;
    return now;
  }
};

// floor(code + dither), the code in parts.
INLINE vi cut(vf parts, vi phase) {
  return (round_to_int(parts) + (vi)((vu)phase >> (32 - PART_BITS))) >> PART_BITS;
}

// PARTS * halve(x): PARTS is a power of two, so it is added to the exponent.
INLINE vf halve_in_parts(vf x) { return (vf)((bits(x) >> 1) + ((ONE >> 1) + (PART_BITS << 23))); }

INLINE vi root_code(vf x, vi phase, vf inverse) {
  return larger(cut(halve_in_parts(x * inverse), phase), smaller_unsigned(bits(x), splat(SMALLEST)));
}

// The largest power of two in the value of a root's code, as bits; for code 0 that of the smallest other code.
INLINE vi unit_bits(vf code) { return larger((bits(code) << 1) - ONE, splat(SMALLEST_UNIT)) & 0x7f800000; }

// Between the smallest codes the bits have corners of their own; there the straight lines from code to code are lower.
template <Kind K>
INLINE vi signed_code(vf x, vi phase, vf inverse) {
  const vf z = magnitude(x) * inverse;
  vf parts = smaller(halve_in_parts(K == Kind::plain ? halve(z) : z), z * (float)PARTS);
  constexpr auto line = [](vf z, double slope, double offset) { return z * (float)(slope * PARTS) + (float)(offset * PARTS); };
  if (K == Kind::unit) parts = smaller(parts, line(z, 1 / 3.0, 2 / 3.0));
  if (K == Kind::plain) {
    parts = smaller(parts, line(z, 1 / 15.0, 14 / 15.0));
    parts = smaller(parts, line(z, 1 / 48.0, 5 / 3.0));
    parts = smaller(parts, line(z, 1 / 192.0, 8 / 3.0));
  }
  return with_sign(cut(parts, phase), bits(x));
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

// --- One block. `x` has room for a multiple of GROUP values, of which `count` matter.

// Write codes group by group; what lies behind `count` is encoded too, but not written.
template <Kind K, class Encode>
INLINE void put_block(int64_t count, uint8_t* codes, const Encode& encode) {
  vi c[4];
  int64_t k = 0;
  for (; k + GROUP <= count; k += GROUP) {
    for (int q = 0; q < 4; q++) c[q] = encode(k + q * W);
    put_quadratic<K>(codes + k, c);
  }
  if (k < count) {
    uint8_t last[GROUP];
    for (int q = 0; q < 4; q++) c[q] = encode(k + q * W);
    put_quadratic<K>(last, c);
    memcpy(codes + k, last, count - k);
  }
}

template <Kind K>
static inline void encode_signed(const float* x, int64_t count, float absmax, Dither dither, uint8_t* codes) {
  if (!(absmax < INFINITY)) {  // NaN: stored as zeros under a scale of NaN
    memset(codes, 0, count);
    return;
  }
  const vf inverse = inverse_of(absmax, K);
  put_block<K>(count, codes, [&](int64_t k) { return signed_code<K>(load(x + k), dither.next(), inverse); });
}

// Encode the roots, and bring the `others` into units of the stored ones; `largest` are their largest magnitudes.
template <int OTHERS>
static inline void encode_root(const float* x, int64_t count, float absmax, Dither dither, uint8_t* codes, float* const* others,
                               vi* largest) {
  const bool finite = absmax < INFINITY;
  for (int i = 0; i < OTHERS; i++) largest[i] = finite ? vi{} : bits(splat(NAN));  // such a block is NaN in every moment
  if (!finite) {
    memset(codes, 0, count);
    return;
  }
  const vf inverse = inverse_of(absmax, Kind::root);
  put_block<Kind::root>(count, codes, [&](int64_t k) {
    const vi code = root_code(load(x + k), dither.next(), inverse);
    const vf per_unit = (vf)(2 * ONE - unit_bits(__builtin_convertvector(code, vf)));  // 1 / unit, exactly
    for (int i = 0; i < OTHERS; i++) {
      const vf u = load(others[i] + k) * per_unit;
      store(others[i] + k, u);
      largest[i] = larger(largest[i], magnitude_bits(u));
    }
    return code;
  });
}

// Squares that overflowed although the gradient was finite: the largest root instead of Inf. Rare, so one by one.
static inline float keep_finite(float* x, int64_t count) {
  const float largest = 1.8446742e19f;
  for (int64_t k = 0; k < count; k++) x[k] = __builtin_isinf(x[k]) ? largest : x[k];
  return largest;
}

}  // namespace trimtab::TRIMTAB_LEVEL
