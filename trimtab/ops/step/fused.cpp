// The fused optimizer step. A task is a range of one tensor; each block of it is decoded, updated and encoded while it is
// in the cache. The rules are the equations of rules.py, operation by operation. The build disables the contraction of
// a * b + c into one instruction, so the results equal the reference to the last bit.
#include "step/quadratic.h"

namespace trimtab::TRIMTAB_LEVEL {

// --- The rules. `advance` computes the new moments; `update` is the change of the parameter before the learning rate. A
// rule that is `split` divides by the root of the second moment, which `update` is given; else `advance` returns the update.

template <Rule R>
struct Math;

template <Rule R>
constexpr int states_of = __builtin_strlen(STATES[(int)R]);
template <Rule R>
constexpr bool is_signed(int i) { return STATES[(int)R][i] != 'v'; }

template <>
struct Math<Rule::adamw> {
  static constexpr bool split = true;
  INLINE void advance(const Scalars& s, vf g, vf* state) {
    state[0] = s.beta1 * state[0] + s.gain1 * g;
    state[1] = s.beta2 * state[1] + s.gain2 * (g * g);
  }
  INLINE vf update(const Scalars& s, vf, const vf* state, vf root) { return state[0] / (root * s.debias + s.eps); }
};

template <>
struct Math<Rule::momentum> {
  static constexpr bool split = false;
  INLINE vf advance(const Scalars& s, vf g, vf* state) {
    vf m = state[0] = s.beta1 * state[0] + s.gain1 * g;
    return s.mix_m * m + s.mix_g * g;
  }
};

template <>
struct Math<Rule::lion> {
  static constexpr bool split = false;
  INLINE vf advance(const Scalars& s, vf g, vf* state) {
    vf c = s.mix_m * state[0] + s.mix_g * g;
    state[0] = s.beta1 * state[0] + s.gain1 * g;
    vf sign = c > 0 ? splat(1.0f) : c < 0 ? splat(-1.0f) : vf{};
    return c == c ? sign : c;  // the sign of NaN is NaN
  }
};

template <>
struct Math<Rule::rms> {
  static constexpr bool split = true;
  INLINE void advance(const Scalars& s, vf g, vf* state) { state[0] = s.beta2 * state[0] + s.gain2 * (g * g); }
  INLINE vf update(const Scalars& s, vf g, const vf*, vf root) { return g / (root * s.debias + s.eps); }
};

template <>
struct Math<Rule::ademamix> {
  static constexpr bool split = true;
  INLINE void advance(const Scalars& s, vf g, vf* state) {
    state[0] = s.beta1 * state[0] + s.gain1 * g;
    state[1] = s.beta3 * state[1] + s.gain3 * g;
    state[2] = s.beta2 * state[2] + s.gain2 * (g * g);
  }
  INLINE vf update(const Scalars& s, vf, const vf* state, vf root) {
    return (s.mix_m * state[0] + s.mix_g * state[1]) / (root * s.debias + s.eps);
  }
};

template <>
struct Math<Rule::rms_momentum> {
  static constexpr bool split = false;  // the momentum itself depends on the root
  INLINE vf advance(const Scalars& s, vf g, vf* state) {
    state[1] = s.beta2 * state[1] + s.gain2 * (g * g);
    return state[0] = s.beta1 * state[0] + s.gain1 * (g / (root(state[1]) * s.debias + s.eps));
  }
};

template <>
struct Math<Rule::rms_centered> {
  static constexpr bool split = false;  // the root is that of another number than the state
  INLINE vf advance(const Scalars& s, vf g, vf* state) {
    state[0] = s.beta3 * state[0] + s.gain3 * g;
    state[1] = s.beta2 * state[1] + s.gain2 * (g * g);
    const vf variance = state[1] - state[0] * state[0];
    return g / (root(variance < 0 ? vf{} : variance) * s.debias + s.eps);
  }
};

template <>
struct Math<Rule::rms_centered_momentum> {
  static constexpr bool split = false;
  INLINE vf advance(const Scalars& s, vf g, vf* state) {
    const vf update = Math<Rule::rms_centered>::advance(s, g, state + 1);
    return state[0] = s.beta1 * state[0] + s.gain1 * update;
  }
};

// --- One block. Its moments lie in float32 buffers: the state itself, or scratch that codes are decoded into.

template <bool WHOLE>
INLINE vf load_lanes(const float* from, int lanes) {
  return WHOLE ? load(from) : load_part(from, lanes);
}
template <bool WHOLE>
INLINE void store_lanes(float* to, vf x, int lanes) {
  if (WHOLE) store(to, x);
  else memcpy(to, &x, 4 * lanes);
}
template <bool WHOLE>
INLINE vf only(vf x, int lanes) {
  return WHOLE ? x : load_lanes<false>((const float*)&x, lanes);
}

// Where the moments are: in the state itself; decoded into scratch before the update; or decoded by the update, vector by
// vector. On sixteen lanes divisions and square roots leave other units idle, so there the last is fastest; on eight
// lanes the loop becomes too long (docs/log.md). The quadratic code is decoded by the update too, and its own update is
// `Quadratic` below.
enum class Storage { float32, before, beside, quadratic };

template <Rule R>
constexpr bool has_second = !is_signed<R>(states_of<R> - 1);  // then the quadratic code keeps the other moments in its units
template <Rule R>
constexpr Kind kind_of(int i) {
  return !is_signed<R>(i) ? Kind::root : has_second<R> && STATES[(int)R][i] == 'm' ? Kind::unit : Kind::plain;
}

// The moments of one vector in the quadratic code.
template <Rule R, bool WIDE>
INLINE void decode_quadratic(const uint8_t* const* codes, int64_t k, const Scale* scale, vf* state) {
  constexpr int states = states_of<R>;
  if constexpr (!has_second<R>) {
    state[0] = decode_plain(codes[0] + k) * scale[0].unit;
    return;
  }
  const vi stored = root_bits<WIDE>(load_codes(codes[states - 1] + k), scale[states - 1]);
  const vf root = (vf)stored, unit = (vf)unit_bits<WIDE>(stored, scale[states - 1]);
  for (int i = 0; i < states - 1; i++)
    if (kind_of<R>(i) == Kind::unit) state[i] = decode_unit(codes[i] + k) * (unit * scale[i].unit);
    else state[i] = decode_plain(codes[i] + k) * scale[i].unit;
  state[states - 1] = root * root;
}

// The hardware does not prefetch across the end of a page, so the lines of 64 values are prefetched here. Addresses
// beyond the end of a tensor are allowed.
constexpr int64_t AHEAD = 1024;
template <int STATES>
INLINE void fetch(const float* param, const float* grad, const uint8_t* const* codes, int64_t k) {
  for (int64_t line = k + AHEAD; line < k + AHEAD + 64; line += 16) {
    __builtin_prefetch(param + line);
    __builtin_prefetch(grad + line);
  }
  for (int i = 0; i < STATES; i++) __builtin_prefetch(codes[i] + k + AHEAD);
}

// The gradient times its scale, and with weight decay through the gradient: g <- g * grad_scale + coupled * p.
INLINE void scale_gradient(const float* grad, const float* param, Scalars& s, int64_t count, float* out) {
  if (s.coupled != 0)
    for (int64_t k = 0; k < count; k++) out[k] = grad[k] * s.grad_scale + s.coupled * param[k];
  else
    for (int64_t k = 0; k < count; k++) out[k] = grad[k] * s.grad_scale;
  s.grad_scale = 1;
}

// A bfloat16 parameter with eight more bits, as in split.py.
INLINE vf join(vh param, const uint8_t* extra) {
  const vi h = __builtin_convertvector(param, vi), magnitude = larger(((h & 0x7fff) << 8) + load_signed_codes(extra), vi{});
  return (vf)((vu)magnitude << 8 | ((vu)h & 0x8000) << 16);
}
static float* join(const StepTensor& x, int64_t start, int64_t count, float* scratch) {
  const uint16_t* const param = (const uint16_t*)x.param + start;
  const uint8_t* const extra = x.extra + start;
  int64_t k = 0;
  for (; k + W <= count; k += W) store(scratch + k, join(load<vh>(param + k), extra + k));
  if (k < count) {
    vh last{};
    uint8_t bytes[W] = {};
    memcpy(&last, param + k, 2 * (count - k));
    memcpy(bytes, extra + k, count - k);
    store(scratch + k, join(last, bytes));
  }
  return scratch;
}
static void split(const float* weights, const StepTensor& x, int64_t start, int64_t count) {
  constexpr uint32_t PER_STEP = 0x9e3779b9, PER_VALUE = 0xc13fa9a9;
  const uint32_t first = (uint32_t)x.scalars->step * PER_STEP + (uint32_t)start * PER_VALUE;
  vu phase = (vu)by_lane<vi>([=](int l) { return (int32_t)(first + l * PER_VALUE); });
  uint16_t* const to = (uint16_t*)x.param + start;
  uint8_t* const more = x.extra + start;
  for (int64_t k = 0; k < count; k += W, phase += W * PER_VALUE) {
    const vf w = load_part(weights + k, count - k);
    const vi kept = (vi)(((vu)bits(w) + (phase >> 24)) >> 8), nearest = (kept + 128) >> 8;
    const vh param = __builtin_convertvector(w == w ? nearest : splat(0x7fc0), vh);
    const vb extra = __builtin_convertvector(w == w ? kept - (nearest << 8) : vi{}, vb);
    if (k + W <= count) {
      store(to + k, param);
      store(more + k, extra);
    } else {
      memcpy(to + k, &param, 2 * (count - k));
      memcpy(more + k, &extra, count - k);
    }
  }
}

INLINE float* read_param(const StepTensor& x, int64_t start, int64_t count, float* scratch) {
  if (x.extra) return join(x, start, count, scratch);
  return (float*)read(at(x.param, x.param_dtype, start), x.param_dtype, count, scratch);
}
INLINE const float* read_grad(const StepTensor& x, int64_t start, int64_t count, float* scratch) {
  return read(at(x.grad, x.grad_dtype, start), x.grad_dtype, count, scratch);
}
INLINE void write_param(const float* values, const StepTensor& x, int64_t start, int64_t count) {
  if (x.extra) return split(values, x, start, count);
  write(values, count, at(x.param, x.param_dtype, start), x.param_dtype);
}

// What the inner loop works on. Kept by value in its own frame: a store through a pointer then cannot change it.
template <Rule R, Storage S>
struct Block {
  static constexpr int states = states_of<R>;
  static constexpr bool coded = S != Storage::float32;
  static constexpr bool quadratic = S == Storage::quadratic;
  const DecodeSigned* decode_signed;
  const DecodeUnsigned* decode_unsigned;
  const uint8_t* codes[max_states];
  float absmax[max_states];
  Scale scale[max_states];  // of the quadratic code
  Scalars scalars;
  float* param;
  const float* grad;
  float* moment[max_states];
  vi largest[max_states] = {};
  vf sums[max_sums] = {};

  template <Pass P, bool WHOLE>
  INLINE_MEMBER void update(int64_t k, int lanes) {
    const Scalars& s = scalars;
    const vf p = P == Pass::ratios ? vf{} : load_lanes<WHOLE>(param + k, lanes);
    const vf g = load_lanes<WHOLE>(grad + k, lanes) * s.grad_scale;
    vf state[max_states];
    if constexpr (quadratic) {
      uint8_t last[states][W] = {};
      const uint8_t* from[states];
      for (int i = 0; i < states; i++) {
        if (!WHOLE) memcpy(last[i], codes[i] + k, lanes);
        from[i] = WHOLE ? codes[i] + k : last[i];
      }
      if (scale[states - 1].wide) decode_quadratic<R, true>(from, 0, scale, state);
      else decode_quadratic<R, false>(from, 0, scale, state);
    } else {
#pragma GCC unroll 3
      for (int i = 0; i < states; i++) {
        if constexpr (S == Storage::beside && WHOLE)
          state[i] = (is_signed<R>(i) ? (*decode_signed)(codes[i] + k) : (*decode_unsigned)(codes[i] + k)) * absmax[i];
        else state[i] = load_lanes<WHOLE>(moment[i] + k, lanes);
      }
    }
    vf update{};
    if constexpr (Math<R>::split) {
      Math<R>::advance(s, g, state);
      update = Math<R>::update(s, g, state, root(state[states - 1]));
    } else {
      update = Math<R>::advance(s, g, state);
    }
    if (P == Pass::norms) {
      const vf change = (s.decay - 1.0f) * p - s.lr * update;
      sums[0] += p * p;
      sums[1] += only<WHOLE>(change * change, lanes);
      return;
    }
    if (P == Pass::ratios) {
      const vf floor = splat(s.eps * s.eps), v = state[states - 1];
      sums[0] += only<WHOLE>(g * g / (v < floor ? floor : v), lanes);
      return;
    }
    store_lanes<WHOLE>(param + k, s.decay * p - s.lr * update, lanes);
    for (int i = 0; i < states; i++) {
      store_lanes<WHOLE>(moment[i] + k, state[i], lanes);
      if (coded) largest[i] = larger(largest[i], magnitude_bits(only<WHOLE>(state[i], lanes)));
    }
  }

  template <Pass P>
  INLINE_MEMBER void run(int64_t count) {
    int64_t k = 0;
    for (; k + W <= count; k += W) {
      if (k % 64 == 0) fetch<coded ? states : 0>(P == Pass::ratios ? grad : param, grad, codes, k);
      update<P, true>(k, W);
    }
    if (k < count) update<P, false>(k, (int)(count - k));
  }
};

// The update of a block in the quadratic code, in three loops: a scale is known only when its loop has ended.
//
//   advance         decode, new moments, √v                          -> the scale of the roots
//   encode_roots    the parameter; codes of the roots; m in units    -> the scales of the first moments
//   encode_firsts   codes of the first moments
//
// EXACT: the count is a multiple of GROUP. Otherwise all buffers have room for one, and what lies behind the count is
// computed too but does not change a scale.
template <Rule R>
struct Quadratic {
  static constexpr int states = states_of<R>, firsts = states - has_second<R>;
  Scalars scalars;
  float* param;
  const float* grad;
  uint8_t* codes[max_states];
  float* moment[max_states];  // scratch
  const float* dither;        // of the first moments, one after the other
  const int32_t* root_dither;
  Scale scale[max_states];   // of the old state
  float absmax[max_states];  // of the new state
  int32_t least, most;       // bits of the smallest and the largest root
  int64_t count, padded;

  // Move a block that is no multiple of GROUP into buffers that are, with zeros behind the count.
  void make_room(float* wide, float* gradient, uint8_t* bytes, int64_t padded) {
    const int64_t rest = (count + GROUP - 1) / GROUP * GROUP - count;
    if (param != wide) memcpy(wide, param, 4 * count);
    if (grad != gradient) memcpy(gradient, grad, 4 * count);
    memset(wide + count, 0, 4 * rest);
    memset(gradient + count, 0, 4 * rest);
    param = wide, grad = gradient;
    for (int i = 0; i < states; i++) {
      uint8_t* const to = bytes + i * padded;
      memcpy(to, codes[i], count);
      memset(to + count, 0, rest);
      codes[i] = to;
    }
  }

  template <bool EXACT>
  INLINE_MEMBER vi valid(int64_t k) const {
    if (EXACT) return splat(-1);
    return splat((int32_t)smaller(count - k, W)) > by_lane<vi>([](int l) { return l; });
  }

  INLINE_MEMBER void advance() {
    const bool wide = scale[states - 1].wide;
    if (count % GROUP) wide ? advance<false, true>() : advance<false, false>();
    else wide ? advance<true, true>() : advance<true, false>();
  }

  template <bool EXACT, bool WIDE>
  INLINE_MEMBER void advance() {
    const Quadratic b = *this;
    const Scalars& s = b.scalars;
    vi largest[max_states] = {}, small = splat(0x7fffffff);
    for (int64_t k = 0; k < b.count; k += W) {
      if (k % 64 == 0) fetch<states>(b.param, b.grad, b.codes, k);
      const vf g = load(b.grad + k);
      vf state[max_states];
      decode_quadratic<R, WIDE>(b.codes, k, b.scale, state);
      if constexpr (Math<R>::split) {
        Math<R>::advance(s, g, state);
      } else {
        const vf update = Math<R>::advance(s, g, state);
        store(b.param + k, s.decay * load(b.param + k) - s.lr * update);
      }
      if constexpr (has_second<R>) {
        const vi r = magnitude_bits(state[states - 1] = root(state[states - 1]));
        largest[0] = larger(largest[0], r & valid<EXACT>(k));
        small = smaller(small, EXACT ? r : (r | ~valid<EXACT>(k)) & 0x7fffffff);
      } else {
        for (int i = 0; i < states; i++) largest[i] = larger(largest[i], magnitude_bits(state[i]) & valid<EXACT>(k));
      }
      for (int i = 0; i < states; i++) store(b.moment[i] + k, state[i]);
    }
    if constexpr (has_second<R>) least = smallest(small), most = trimtab::TRIMTAB_LEVEL::largest(largest[0]);
    else
      for (int i = 0; i < states; i++) absmax[i] = absmax_of(largest[i]);
  }

  INLINE_MEMBER void encode_roots() {
    const bool finite = most <= EXPONENT;  // Inf: g² overflowed, but the gradient was finite
    if (most > LARGEST_ROOT) {
      limit_roots(moment[states - 1], count);
      most = LARGEST_ROOT, least = least < LARGEST_ROOT ? least : LARGEST_ROOT;
    }
    const Scale window = window_of(least, most);
    if (count % GROUP) window.wide ? encode_roots<false, true>(window) : encode_roots<false, false>(window);
    else window.wide ? encode_roots<true, true>(window) : encode_roots<true, false>(window);
    absmax[states - 1] = absmax_of(window, most);
    if (finite) return;
    // A block that holds a NaN is NaN in every moment: code 255 is the end of the window, the scale itself.
    for (int j = 0; j < states; j++) absmax[j] = NAN;
    memset(codes[states - 1], 255, count);
  }

  template <bool EXACT, bool WIDE>
  INLINE_MEMBER void encode_roots(const Scale window) {
    constexpr int second = states - 1;
    const Quadratic b = *this;
    const Scalars& s = b.scalars;
    vi largest[max_states] = {}, c[4];
    for (int64_t k = 0; k < b.count; k += GROUP) {
#pragma GCC unroll 4
      for (int q = 0; q < 4; q++) {
        const int64_t i = k + q * W;
        vf state[max_states];
        for (int j = 0; j < states; j++) state[j] = load(b.moment[j] + i);
        const vf r = state[second];
        if constexpr (Math<R>::split) {
          const vf update = Math<R>::update(s, load(b.grad + i), state, r);
          store(b.param + i, s.decay * load(b.param + i) - s.lr * update);
        }
        vi stored = bits(r);
        c[q] = root_code<WIDE>(stored, load<vi>(b.root_dither + i), window);
        const vf per_unit = (vf)(2 * ONE - unit_bits<WIDE>(stored, window));  // 1 / unit, exactly
        for (int j = 0; j < firsts; j++) {
          const vf u = kind_of<R>(j) == Kind::unit ? state[j] * per_unit : state[j];
          store(b.moment[j] + i, u);
          largest[j] = larger(largest[j], magnitude_bits(u) & valid<EXACT>(i));
        }
      }
      put_roots(b.codes[second] + k, c);
    }
    for (int j = 0; j < firsts; j++) absmax[j] = trimtab::TRIMTAB_LEVEL::absmax_of(largest[j]);
  }

  INLINE_MEMBER void encode_firsts() {
    for (int j = 0; j < firsts; j++) {
      const float top_value = keep_21_bits(absmax[j]);
      absmax[j] = stored(top_value);
      if (!(top_value < INFINITY)) {  // NaN: stored as zeros under a scale of NaN
        memset(codes[j], 0, count);
        continue;
      }
      const Kind kind = kind_of<R>(j);
      const vf inverse = inverse_of(top_value, top(kind));
      const float *x = moment[j], *d = dither + j * padded;
      uint8_t* const to = codes[j];
      const int64_t n = count;
      vi c[4];
      for (int64_t k = 0; k < n; k += GROUP) {
#pragma GCC unroll 4
        for (int q = 0; q < 4; q++) c[q] = signed_code(kind, load(x + k + q * W), load(d + k + q * W), inverse);
        put_signed(to + k, c);
      }
    }
  }
};

// --- Tasks: ranges of whole blocks, a few tens of thousands of values long.

struct Task {
  int64_t tensor, start, end;
};

struct Tasks {
  Task* list = nullptr;
  int64_t count = 0;

  // Tensors whose row is not finite are left out where `skip` is set.
  Tasks(const Step& step, int64_t unit, bool skip) {
    const int64_t range = unit * (unit >= 32768 ? 1 : 32768 / unit);
    int64_t total = 0;
    for (int64_t t = 0; t < step.tensor_count; t++) total += step.tensors[t].count / range + 1;
    list = (Task*)allocate(total * sizeof(Task));
    for (int64_t t = 0; t < step.tensor_count; t++) {
      const StepTensor& x = step.tensors[t];
      if (skip && !finite(*x.scalars)) continue;
      for (int64_t start = 0; start < x.count; start += range) {
        const int64_t end = start + range;
        list[count++] = {t, start, end < x.count ? end : x.count};
      }
    }
  }
  ~Tasks() { free(list); }
  Tasks(const Tasks&) = delete;

  static bool finite(const Scalars& row) {
    const float* values = (const float*)&row;
    bool ok = true;
    for (unsigned i = 0; i < sizeof row / sizeof(float); i++) ok &= __builtin_isfinite(values[i]);
    return ok;
  }
};

// Add the sums of the tasks in order: the result does not depend on the number of threads.
static void gather(const Tasks& tasks, const double* partial, const Step& step) {
  for (int64_t i = 0; i < max_sums * step.tensor_count; i++) step.sums[i] = 0;
  for (int64_t t = 0; t < tasks.count; t++)
    for (int i = 0; i < max_sums; i++) step.sums[max_sums * tasks.list[t].tensor + i] += partial[max_sums * t + i];
}

template <Rule R, Storage S, Pass P>
static void run(const Step& step) {
  using B = Block<R, S>;
  constexpr int states = B::states;
  constexpr bool CODED = B::coded;
  const DecodeSigned decode_signed(*step.signed_book);
  const DecodeUnsigned decode_unsigned(*step.unsigned_book);
  const Codebook* books[states];
  for (int i = 0; i < states; i++) books[i] = is_signed<R>(i) ? step.signed_book : step.unsigned_book;
  const int64_t unit = CODED ? step.block : 1024;
  const int64_t padded = (unit + GROUP - 1) / GROUP * GROUP, buffers = 2 + states;
  const Tasks tasks(step, unit, P == Pass::update);
  float* scratch = (float*)allocate(step.threads * padded * buffers * sizeof(float));
  double* partial = (double*)allocate(tasks.count * max_sums * sizeof(double));
  // Parallel over ranges; the blocks of one range are contiguous in memory.
  parallel(tasks.count, step.threads, [&](int64_t index, int worker) {
    const Task task = tasks.list[index];
    const StepTensor x = step.tensors[task.tensor];
    float* const buffer = scratch + worker * padded * buffers;
    double sums[max_sums] = {};
    for (int64_t start = task.start; start < task.end; start += unit) {
      const int64_t count = smaller(task.end - start, unit), block = start / unit;
      B b;
      b.scalars = *x.scalars;
      b.decode_signed = &decode_signed, b.decode_unsigned = &decode_unsigned;
      b.param = nullptr;
      if (P != Pass::ratios) b.param = read_param(x, start, count, buffer);
      b.grad = read_grad(x, start, count, buffer + padded);
      for (int i = 0; i < states; i++) {
        float* const moment = CODED ? buffer + padded * (2 + i) : (float*)x.state[i] + start;
        b.moment[i] = moment;
        if (CODED) {
          b.codes[i] = (const uint8_t*)x.state[i] + start;
          b.absmax[i] = x.absmax[i][block];
          if constexpr (B::quadratic) {
            b.scale[i] = scale_of(b.absmax[i], kind_of<R>(i));
            continue;
          }
          const int64_t whole = S == Storage::beside ? count / W * W : 0;
          decode(*books[i], b.codes[i] + whole, count - whole, b.absmax[i],
                 [=](int64_t k, vf y, int lanes) { memcpy(moment + whole + k, &y, 4 * lanes); });
        }
      }
      if (P != Pass::ratios && b.scalars.coupled != 0) {
        scale_gradient(b.grad, b.param, b.scalars, count, buffer + padded);
        b.grad = buffer + padded;
      }
      b.template run<P>(count);
      if (P != Pass::update) {
        for (int i = 0; i < max_sums; i++) sums[i] += sum(b.sums[i]);
        continue;
      }
      write_param(b.param, x, start, count);
      if (!CODED) continue;
      float absmax[states];  // all of them first: the encoding of one state overlaps with the scale of the next
      for (int i = 0; i < states; i++) absmax[i] = absmax_of(b.largest[i]);
      for (int i = 0; i < states; i++) {
        uint8_t* codes = (uint8_t*)x.state[i] + start;
        if (is_signed<R>(i)) encode<false>(*books[i], b.moment[i], count, absmax[i], codes);
        else encode<true>(*books[i], b.moment[i], count, absmax[i], codes);
      }
      for (int i = 0; i < states; i++) x.absmax[i][block] = stored(absmax[i]);
    }
    memcpy(partial + max_sums * index, sums, sizeof sums);
  });
  if (P != Pass::update) gather(tasks, partial, step);
  free(partial);
  free(scratch);
}

// The update of 8-bit state in the quadratic code. Two blocks at a time, loop by loop: while the scale of one block is being
// reduced to a number, the other one has work left.
template <Rule R>
static void run_quadratic(const Step& step) {
  using Q = Quadratic<R>;
  constexpr int states = Q::states, together = 2;
  const int64_t unit = step.block, padded = (unit + GROUP - 1) / GROUP * GROUP;
  const int64_t buffers = states + 3;  // moments, parameter, gradient, and codes, which take less than a buffer
  const int64_t room = padded * (states + together * buffers) + GROUP;
  const Tasks tasks(step, unit, true);
  float* scratch = (float*)allocate(step.threads * room * sizeof(float));
  for (int w = 0; w < step.threads; w++) scratch[w * room] = -1;  // the step that a worker's dither is made for
  // Parallel over ranges; the blocks of one range are contiguous in memory.
  parallel(tasks.count, step.threads, [&](int64_t index, int worker) {
    const Task task = tasks.list[index];
    const StepTensor x = step.tensors[task.tensor];
    float* const made_for = scratch + worker * room;
    float* const dither = made_for + GROUP;
    int32_t* const root_dither = (int32_t*)(dither + Q::firsts * padded);
    if (*made_for != x.scalars->step) {
      for (int i = 0; i < Q::firsts; i++) make_dither(dither + i * padded, padded, i, x.scalars->step);
      if (has_second<R>) make_dither(root_dither, padded, x.scalars->step);
      *made_for = x.scalars->step;
    }
    for (int64_t first = task.start; first < task.end; first += together * unit) {
      Q q[together];
      int blocks = 0;
      for (int64_t start = first; start < smaller(task.end, first + together * unit); start += unit, blocks++) {
        Q& b = q[blocks];
        float* const buffer = dither + padded * (states + blocks * buffers);
        float* const wide = buffer + states * padded;
        b.count = smaller(task.end - start, unit), b.padded = padded;
        b.dither = dither, b.root_dither = root_dither;
        b.scalars = *x.scalars;
        b.param = read_param(x, start, b.count, wide);
        b.grad = read_grad(x, start, b.count, wide + padded);
        if (b.scalars.coupled != 0 || b.scalars.grad_scale != 1) {
          scale_gradient(b.grad, b.param, b.scalars, b.count, wide + padded);
          b.grad = wide + padded;
        }
        for (int i = 0; i < states; i++) {
          b.codes[i] = (uint8_t*)x.state[i] + start;
          b.moment[i] = buffer + i * padded;
          b.scale[i] = scale_of(x.absmax[i][start / unit], kind_of<R>(i));
        }
        if (b.count % GROUP) b.make_room(wide, wide + padded, (uint8_t*)(wide + 2 * padded), padded);
      }
      for (int i = 0; i < blocks; i++) q[i].advance();
      if constexpr (has_second<R>)
        for (int i = 0; i < blocks; i++) q[i].encode_roots();
      for (int i = 0; i < blocks; i++) q[i].encode_firsts();
      for (int i = 0; i < blocks; i++) {
        const int64_t start = first + i * unit;
        write_param(q[i].param, x, start, q[i].count);
        for (int j = 0; j < states; j++) {
          uint8_t* const codes = (uint8_t*)x.state[j] + start;
          if (q[i].codes[j] != codes) memcpy(codes, q[i].codes[j], q[i].count);
          x.absmax[j][start / unit] = q[i].absmax[j];
        }
      }
    }
  });
  free(scratch);
}

template <Rule R, Storage S>
static void run_pass(const Step& step) {
  switch (step.pass) {
    case Pass::update:
      if constexpr (S == Storage::quadratic) return run_quadratic<R>(step);
      else return run<R, S, Pass::update>(step);
    case Pass::norms: return run<R, S, Pass::norms>(step);
    case Pass::ratios:  // used with this rule only
      if constexpr (R == Rule::rms) run<R, S, Pass::ratios>(step);
  }
}

template <Rule R>
static void run_rule(const Step& step) {
  if (!step.quantized) return run_pass<R, Storage::float32>(step);
  if (step.quadratic) return run_pass<R, Storage::quadratic>(step);
  if constexpr (W == 16) {
    const auto kind = step.signed_book->kind;
    const bool dynamic = (kind == Codebook::dynamic_signed || kind == Codebook::dynamic_symmetric) &&
                         step.unsigned_book->kind == Codebook::dynamic_unsigned;
    if (dynamic) return run_pass<R, Storage::beside>(step);
  }
  run_pass<R, Storage::before>(step);
}

void step(const Step& step) {
#define RUN(rule) \
  case Rule::rule: return run_rule<Rule::rule>(step);
  switch (step.rule) { TRIMTAB_RULES(RUN) }
#undef RUN
}

void gradient_norms(const Step& step) {
  constexpr int64_t unit = 1024;
  const Tasks tasks(step, unit, false);
  double* partial = (double*)allocate(tasks.count * max_sums * sizeof(double));
  parallel(tasks.count, step.threads, [&](int64_t index, int) {
    const Task task = tasks.list[index];
    const StepTensor& x = step.tensors[task.tensor];
    float scratch[unit];
    double total = 0;
    for (int64_t start = task.start; start < task.end; start += unit) {
      const int64_t count = task.end - start < unit ? task.end - start : unit;
      const float* g = read(at(x.grad, x.grad_dtype, start), x.grad_dtype, count, scratch);
      vf sums{};
      int64_t k = 0;
      for (; k + W <= count; k += W) sums += load(g + k) * load(g + k);
      const vf last = load_part(g + k, count - k);
      sums += last * last;
      total += sum(sums);
    }
    const double row[max_sums] = {total, 0};
    memcpy(partial + max_sums * index, row, sizeof row);
  });
  gather(tasks, partial, step);
  free(partial);
}

void traffic(const Step& step) {
  const Tasks tasks(step, 1024, false);
  parallel(tasks.count, step.threads, [&](int64_t index, int) {
    const Task task = tasks.list[index];
    const StepTensor& x = step.tensors[task.tensor];
    float *p = (float*)x.param, *wide[2] = {(float*)x.state[0], (float*)x.state[1]};
    const float* g = (const float*)x.grad;
    uint8_t* narrow[2] = {(uint8_t*)x.state[0], (uint8_t*)x.state[1]};
    int64_t k = task.start;
    for (; k + W <= task.end; k += W) {
      store(p + k, load(p + k) - load(g + k));
      for (int i = 0; i < 2; i++)
        if (step.quantized) store(narrow[i] + k, load<vb>(narrow[i] + k) ^ 1);
        else store(wide[i] + k, -load(wide[i] + k));
    }
  });
}

}  // namespace trimtab::TRIMTAB_LEVEL
