// Vectors of one instruction set, on the compilers' own vector types, which have + - * / and ?:.
//
// W lanes of float (vf) or int32 (vi): 16 with AVX-512, else 8, which the compiler splits where registers are shorter.
#pragma once
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>

#include "native/native.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace trimtab::TRIMTAB_LEVEL {

#ifdef __AVX512F__
constexpr int W = 16;
#else
constexpr int W = 8;
#endif
typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));
typedef uint8_t vb __attribute__((vector_size(W)));
typedef int8_t vc __attribute__((vector_size(W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));

#define INLINE static inline __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))

template <class V, class T>
INLINE V load(const T* from) {
  V v;
  memcpy(&v, from, sizeof v);
  return v;
}
template <class V, class T>
INLINE void store(T* to, V v) {
  memcpy(to, &v, sizeof v);
}
INLINE vf load(const float* from) { return load<vf>(from); }
INLINE vf load_part(const float* from, int64_t lanes) {  // zeros in the other lanes
  if (lanes >= W) return load(from);
  vf v{};
  memcpy(&v, from, 4 * lanes);
  return v;
}
INLINE vf splat(float x) { return x - vf{}; }
INLINE vi splat(int32_t x) { return x - vi{}; }
INLINE vi bits(vf x) { return (vi)x; }
INLINE vf magnitude(vf x) { return (vf)(bits(x) & 0x7fffffff); }

// One expression per instruction set; only the chosen one is compiled.
#if defined(__AVX512F__)
#define CHOOSE(avx512, avx2, plain) avx512
#elif defined(__AVX2__)
#define CHOOSE(avx512, avx2, plain) avx2
#else
#define CHOOSE(avx512, avx2, plain) plain
#endif

// A vector computed lane by lane.
template <class V, class Lane>
INLINE V by_lane(Lane lane) {
  V y;
  for (int l = 0; l < W; l++) y[l] = lane(l);
  return y;
}

INLINE vf root(vf x) {
  return (vf)CHOOSE(_mm512_sqrt_ps((__m512)x), _mm256_sqrt_ps((__m256)x), by_lane<vf>([&](int l) { return __builtin_sqrtf(x[l]); }));
}

// Half to even. For |x| < 2^22. Without instructions, adding 1.5 * 2^23 rounds: it leaves no bits for a fraction.
INLINE vi round_to_int(vf x) {
  return (vi)CHOOSE(_mm512_cvtps_epi32((__m512)x), _mm256_cvtps_epi32((__m256)x),
                    (bits(x + splat(12582912.0f)) - bits(splat(12582912.0f))));
}

// Toward zero.
INLINE vi cut(vf x) {
  return (vi)CHOOSE(_mm512_cvttps_epi32((__m512)x), _mm256_cvttps_epi32((__m256)x), __builtin_convertvector(x, vi));
}

#if defined(__AVX512F__)
// The bytes of four packed vectors, which `packs` leaves interleaved.
INLINE __m512i in_order(__m512i bytes) {
  return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), bytes);
}
#elif defined(__AVX2__)
INLINE __m256i in_order(__m256i bytes) {
  return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
#endif

// Widen W codes.
INLINE vi load_codes(const uint8_t* from) {
  return (vi)CHOOSE(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from)),
                    _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from)), __builtin_convertvector(load<vb>(from), vi));
}
INLINE vi load_signed_codes(const uint8_t* from) {
  return (vi)CHOOSE(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)),
                    _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)), __builtin_convertvector(load<vc>(from), vi));
}

// a * b + c where the last bit does not matter, or where a * b is exact.
INLINE vf roughly_fma(vf a, vf b, vf c) {
  return (vf)CHOOSE(_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c), _mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c), (a * b + c));
}

// table[index % 8] in every lane.
struct Eight {
  float values[W];
};
INLINE vf lookup(const Eight& table, vi index) {
  return (vf)CHOOSE(_mm512_permutexvar_ps((__m512i)index, (__m512)load(table.values)),
                    _mm256_permutevar8x32_ps((__m256)load(table.values), (__m256i)index),
                    by_lane<vf>([&](int l) { return table.values[index[l] & 7]; }));
}

// Logical shifts; counts of 32 and more, and negative ones, give 0.
INLINE vi shift_right(vi x, vi count) {
  return (vi)CHOOSE(_mm512_srlv_epi32((__m512i)x, (__m512i)count), _mm256_srlv_epi32((__m256i)x, (__m256i)count),
                    by_lane<vi>([&](int l) { return (uint32_t)count[l] > 31 ? 0 : (int32_t)((uint32_t)x[l] >> count[l]); }));
}
INLINE vi shift_left(vi x, vi count) {
  return (vi)CHOOSE(_mm512_sllv_epi32((__m512i)x, (__m512i)count), _mm256_sllv_epi32((__m256i)x, (__m256i)count),
                    by_lane<vi>([&](int l) { return (uint32_t)count[l] > 31 ? 0 : (int32_t)((uint32_t)x[l] << count[l]); }));
}

INLINE vi shift_right_signed(vi x, vi count) {  // counts from 0 to 31
  return (vi)CHOOSE(_mm512_srav_epi32((__m512i)x, (__m512i)count), _mm256_srav_epi32((__m256i)x, (__m256i)count), (x >> count));
}

INLINE vf smaller(vf a, vf b) { return a < b ? a : b; }
INLINE vf larger(vf a, vf b) {
  return (vf)CHOOSE(_mm512_max_ps((__m512)a, (__m512)b), _mm256_max_ps((__m256)a, (__m256)b), (a > b ? a : b));
}
INLINE vi smaller(vi a, vi b) { return a > b ? b : a; }
INLINE vi larger(vi a, vi b) { return a > b ? a : b; }
INLINE vi smaller_unsigned(vi a, vi b) {
  return (vi)CHOOSE(_mm512_min_epu32((__m512i)a, (__m512i)b), _mm256_min_epu32((__m256i)a, (__m256i)b),
                    ((vu)a > (vu)b ? (vu)b : (vu)a));
}

// x + 1 where a > b.
INLINE vi one_more_if_larger(vi x, vi a, vi b) {
  return CHOOSE((vi)_mm512_mask_add_epi32((__m512i)x, _mm512_cmpgt_epi32_mask((__m512i)a, (__m512i)b), (__m512i)x, _mm512_set1_epi32(1)),
                x - (a > b), x - (a > b));
}

// -x where `sign` is negative. (AVX2's instruction gives 0 where `sign` is 0, and there x is 0 too.)
INLINE vi with_sign(vi x, vi sign) {
  return (vi)CHOOSE(_mm512_mask_sub_epi32((__m512i)x, _mm512_movepi32_mask((__m512i)sign), __m512i{}, (__m512i)x),
                    _mm256_sign_epi32((__m256i)x, (__m256i)sign), ((x ^ (sign >> 31)) - (sign >> 31)));
}

INLINE bool any(vi mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#elif defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
  int32_t set = 0;
  for (int l = 0; l < W; l++) set |= mask[l];
  return set;
#endif
}

INLINE int32_t largest(vi x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)x);
#elif defined(__AVX2__)
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1)));
#else
  int32_t y = x[0];
  for (int l = 1; l < W; l++) y = x[l] > y ? x[l] : y;
  return y;
#endif
}

INLINE int32_t smallest(vi x) {
#if defined(__AVX512F__)
  return _mm512_reduce_min_epi32((__m512i)x);
#else
  return ~largest(~x);
#endif
}

INLINE double sum(vf x) {
  double y = 0;
  for (int l = 0; l < W; l++) y += x[l];
  return y;
}

// --- bfloat16 and float16 to and from float32. Rounding is to nearest, ties to even; NaN stays NaN.

INLINE vf from_bfloat16(vh x) { return (vf)(__builtin_convertvector(x, vi) << 16); }
INLINE vh to_bfloat16(vf x) {
  vi b = bits(x);
  vi rounded = (vi)((b + 0x7fff + ((b >> 16) & 1)) >> 16);
  return __builtin_convertvector(x == x ? rounded : splat(0x7fc0), vh);
}

#if defined(__aarch64__)
typedef __fp16 half;
#else
typedef _Float16 half;
#endif
INLINE float widen(uint16_t bits) {
  half h;
  memcpy(&h, &bits, 2);
  return (float)h;
}
INLINE uint16_t narrow(float x) {
  const half h = (half)x;
  uint16_t bits;
  memcpy(&bits, &h, 2);
  return bits;
}

INLINE vf from_float16(vh x) {
  return (vf)CHOOSE(_mm512_cvtph_ps((__m256i)x), _mm256_cvtph_ps((__m128i)x), by_lane<vf>([&](int l) { return widen(x[l]); }));
}
INLINE vh to_float16(vf x) {
  return (vh)CHOOSE(_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT), _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT),
                    by_lane<vh>([&](int l) { return narrow(x[l]); }));
}

// Scratch memory, aligned for any vector. Throws if there is none, which becomes a MemoryError in Python.
static inline void* allocate(int64_t bytes) {
  void* memory = aligned_alloc(64, (bytes + 64) / 64 * 64);
  if (!memory) throw std::bad_alloc();
  return memory;
}

INLINE int64_t bytes_of(Dtype dtype) { return dtype == Dtype::float32 ? 4 : 2; }
INLINE void* at(void* base, Dtype dtype, int64_t index) { return (char*)base + index * bytes_of(dtype); }
INLINE const void* at(const void* base, Dtype dtype, int64_t index) { return (const char*)base + index * bytes_of(dtype); }

// `count` values as float32: in place when they are, else converted into `scratch`, which holds a multiple of W.
static inline const float* read(const void* from, Dtype dtype, int64_t count, float* scratch) {
  if (dtype == Dtype::float32) return (const float*)from;
  const uint16_t* half = (const uint16_t*)from;
  for (int64_t k = 0; k < count; k += W) {
    vh x{};
    if (k + W <= count) x = load<vh>(half + k);
    else memcpy(&x, half + k, 2 * (count - k));
    store(scratch + k, dtype == Dtype::bfloat16 ? from_bfloat16(x) : from_float16(x));
  }
  return scratch;
}

// The inverse. Nothing to do where `values` already are the destination.
static inline void write(const float* values, int64_t count, void* to, Dtype dtype) {
  if (dtype == Dtype::float32) {
    if (values != to) memcpy(to, values, 4 * count);
    return;
  }
  uint16_t* half = (uint16_t*)to;
  for (int64_t k = 0; k < count; k += W) {
    const vf x = load_part(values + k, count - k);
    vh y = dtype == Dtype::bfloat16 ? to_bfloat16(x) : to_float16(x);
    if (k + W <= count) store(half + k, y);
    else memcpy(half + k, &y, 2 * (count - k));
  }
}

}  // namespace trimtab::TRIMTAB_LEVEL
