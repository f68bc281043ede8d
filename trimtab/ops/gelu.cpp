// GELU in its tanh form, and its gradient. Definition: gelu.py.
//
// x * s with s = 1 / (1 + e^-z), which needs one exponential: e = 2^-t with t = |z| log2(e), split into a whole
// number n, which goes into the exponent, and a rest f within half a unit, which goes through a polynomial.
#include "blockwise.h"

namespace trimtab::TRIMTAB_LEVEL {

typedef double vd __attribute__((vector_size(8 * W)));

constexpr double SLOPE = 1.5957691216057308, CUBIC = 0.044715 * SLOPE;  // z = x * (SLOPE + CUBIC * x^2)
constexpr double LOG2E = 1.4426950408889634;
// 2^-f for |f| <= 1/2, highest power first; the error is below 2e-9.
constexpr float POWER[7] = {1.5345812e-4f, -1.3399931e-3f, 9.6184890e-3f, -5.5503288e-2f, 2.4022647e-1f, -6.9314721e-1f, 1};
constexpr float FAR = 14;  // beyond it s is 0 or 1 in float32, and so is the gradient

// t - n in float64, where t is so large that its last bit in float32 would affect the result.
INLINE vf rest(vf x, vf n) {
  const vd wide = __builtin_convertvector(x, vd);
  const vd t = wide * (wide * wide * (CUBIC * LOG2E) + SLOPE * LOG2E);  // negative, as x is
  return __builtin_convertvector(-t - __builtin_convertvector(n, vd), vf);
}

struct Logistic {
  vf s, other;  // other = 1 - s, exact where s is near 1
};

// Of z(x), for x within FAR of zero, or NaN.
INLINE Logistic logistic(vf x) {
  const vf t = magnitude(x * roughly_fma(x * x, splat((float)(CUBIC * LOG2E)), splat((float)(SLOPE * LOG2E))));
  const vf magic = splat(12582912.0f), shifted = t + magic, n = shifted - magic;  // as in round_to_int
  vf f = t - n;
  const vi tail = x < splat(-3.0f);
  if (any(tail)) f = tail ? rest(x, n) : f;
  vf p = splat(POWER[0]);
  for (int k = 1; k < 7; k++) p = roughly_fma(p, f, splat(POWER[k]));
  const vi whole = bits(shifted) - bits(magic);
  const vf e = whole > 125 ? splat(0.0f) : (vf)(bits(p) - (whole << 23));  // not below the smallest normal number
  const vf near = 1.0f / (1.0f + e), far = e * near;
  const vi positive = x > splat(0.0f);
  return {positive ? near : far, positive ? far : near};
}

// Comparisons are false for NaN, which passes.
INLINE vf not_below(vf x, float least) { return x < splat(least) ? splat(least) : x; }
INLINE vf not_above(vf x, float most) { return x > splat(most) ? splat(most) : x; }

INLINE vf forward(vf x) {
  x = not_below(x, -FAR);  // -inf * 0 would be NaN
  return x * logistic(not_above(x, FAR)).s;
}

// d(x s)/dx = s * (1 + x z' (1 - s))
INLINE vf slope(vf x) {
  x = not_above(not_below(x, -FAR), FAR);
  const Logistic z = logistic(x);
  const vf bend = roughly_fma(x * x, splat((float)(3 * CUBIC)), splat((float)SLOPE));
  return z.s * roughly_fma(x * bend, z.other, splat(1.0f));
}

template <class Function>
INLINE void each_vector(int64_t count, Function function) {
  int64_t k = 0;
  for (; k + W <= count; k += W) function(k, W);
  if (k < count) function(k, count - k);
}

// Parallel over chunks. The forward pass where there is no gradient.
void gelu(const Gelu& a) {
  parallel(tasks_for(a.count, CHUNK), a.threads, [&](int64_t task, int) {
    const int64_t start = task * CHUNK, count = smaller(CHUNK, a.count - start);
    float x_scratch[CHUNK], grad_scratch[CHUNK], out_scratch[CHUNK];
    const float* x = read(at(a.x, a.dtype, start), a.dtype, count, x_scratch);
    float* out = a.dtype == Dtype::float32 ? (float*)a.out + start : out_scratch;
    auto put = [&](int64_t k, int64_t lanes, vf y) { memcpy(out + k, &y, 4 * lanes); };
    if (a.grad) {
      const float* grad = read(at(a.grad, a.dtype, start), a.dtype, count, grad_scratch);
      each_vector(count, [&](int64_t k, int64_t lanes) {
        put(k, lanes, load_part(grad + k, lanes) * slope(load_part(x + k, lanes)));
      });
    } else {
      each_vector(count, [&](int64_t k, int64_t lanes) { put(k, lanes, forward(load_part(x + k, lanes))); });
    }
    write(out, count, at(a.out, a.dtype, start), a.dtype);
  });
}

}  // namespace trimtab::TRIMTAB_LEVEL
