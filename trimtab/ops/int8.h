// Shared by int8.cpp and int8_product.cpp: the codes of a row, round(x / absmax * 127) half to even, and the rescale.
//
// A division takes as long as all the rest, so a code is computed with one multiplication and verified: the two can differ
// only where the product is within SLACK of a half. One group in a hundred is then divided.
#pragma once
#include "blockwise.h"

namespace trimtab::TRIMTAB_LEVEL {

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

// --- Rescale: `count` vectors of columns from column j on, with their scales and biases.

template <int count>
struct Columns {
  const Rescale& r;
  int64_t j, lanes;
  vf scale[count], bias[count];

  Columns(const Rescale& rescale, int64_t first) : r(rescale), j(first), lanes(smaller(count * W, rescale.columns - first)) {
    for (int q = 0; q < count; q++) {
      scale[q] = splat(r.column_is_scalar ? *r.column : 0.0f), bias[q] = vf{};
      const int64_t left = lanes - q * W;
      if (left > 0 && !r.column_is_scalar) scale[q] = load_part(r.column + j + q * W, left);
      if (left > 0 && r.bias) bias[q] = load_part(r.bias + j + q * W, left);
      scale[q] /= 127.0f;
    }
  }

  // One row of the result, in the reference's order: total * row * column + bias.
  INLINE_MEMBER void put(const vi total[count], int64_t i, float row) const {
    float y[count * W];
    for (int q = 0; q < count; q++) {
      const vf product = __builtin_convertvector(total[q], vf) * row * scale[q];
      store(y + q * W, r.bias ? product + bias[q] : product);
    }
    void* to = at(r.out, r.dtype, i * r.columns + j);
    if (r.dtype == Dtype::float32 && lanes == count * W) memcpy(to, y, sizeof y);
    else write(y, lanes, to, r.dtype);
  }
};

}  // namespace trimtab::TRIMTAB_LEVEL
