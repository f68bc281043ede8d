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
constexpr bool is_signed(int i) { return STATES[(int)R][i] == 'm'; }

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
// lanes the loop becomes too long (docs/log.md).
// The quadratic code is decoded by the update too: that takes it two multiplications.
enum class Storage { float32, before, beside, quadratic };

// What the inner loop works on. Kept by value in its own frame: a store through a pointer then cannot change it.
template <Rule R, Storage S>
struct Block {
  static constexpr int states = states_of<R>;
  static constexpr bool coded = S != Storage::float32;
  static constexpr bool quadratic = S == Storage::quadratic;
  static constexpr bool has_second = !is_signed<R>(states - 1);  // then the other moments are kept in units of its root
  static constexpr Kind kind(int i) { return !is_signed<R>(i) ? Kind::root : has_second ? Kind::unit : Kind::plain; }
  // With the quadratic code, roots and divisions are in two loops: in one loop their latencies do not overlap.
  template <Pass P>
  static constexpr bool later = quadratic && Math<R>::split && P == Pass::update;
  const DecodeSigned* decode_signed;
  const DecodeUnsigned* decode_unsigned;
  const uint8_t* codes[max_states];
  float absmax[max_states];
  Scalars scalars;
  float* param;
  const float* grad;
  float* moment[max_states];
  vi largest[max_states] = {};
  vf sums[max_sums] = {};

  template <Pass P, bool WHOLE>
  INLINE_MEMBER void update(int64_t k, int lanes) {
    const Scalars& s = scalars;
    const vf p = P == Pass::ratios || later<P> ? vf{} : load_lanes<WHOLE>(param + k, lanes);
    const vf g = load_lanes<WHOLE>(grad + k, lanes) * s.grad_scale;
    vf state[max_states];
    uint8_t last[states][W] = {};
    for (int i = 0; quadratic && !WHOLE && i < states; i++) memcpy(last[i], codes[i] + k, lanes);
#pragma GCC unroll 3
    for (int i = 0; i < states; i++) {
      if constexpr (quadratic) state[i] = decode_quadratic(WHOLE ? codes[i] + k : last[i], absmax[i], kind(i));
      else if constexpr (S == Storage::beside && WHOLE)
        state[i] = (is_signed<R>(i) ? (*decode_signed)(codes[i] + k) : (*decode_unsigned)(codes[i] + k)) * absmax[i];
      else state[i] = load_lanes<WHOLE>(moment[i] + k, lanes);
    }
    if constexpr (quadratic && has_second) {
      const vf code = __builtin_convertvector(load_codes(WHOLE ? codes[states - 1] + k : last[states - 1]), vf);
      for (int i = 0; i < states - 1; i++) state[i] *= (vf)unit_bits(code);
      state[states - 1] *= state[states - 1];
    }
    vf update{};
    if constexpr (Math<R>::split) {
      Math<R>::advance(s, g, state);
      if constexpr (!later<P>) update = Math<R>::update(s, g, state, root(state[states - 1]));
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
    if constexpr (quadratic && has_second) state[states - 1] = root(state[states - 1]);
    if constexpr (!later<P>) store_lanes<WHOLE>(param + k, s.decay * p - s.lr * update, lanes);
    for (int i = 0; i < states; i++) {
      store_lanes<WHOLE>(moment[i] + k, state[i], lanes);
      if (coded) largest[i] = larger(largest[i], magnitude_bits(only<WHOLE>(state[i], lanes)));
    }
  }

  // The second half of the update where it is split: the moments and the root lie in scratch.
  template <bool WHOLE>
  INLINE_MEMBER void move(int64_t k, int lanes) {
    const Scalars& s = scalars;
    const vf p = load_lanes<WHOLE>(param + k, lanes), g = load_lanes<WHOLE>(grad + k, lanes) * s.grad_scale;
    vf state[max_states];
    for (int i = 0; i < states; i++) state[i] = load(moment[i] + k);
    if constexpr (Math<R>::split) {
      const vf update = Math<R>::update(s, g, state, state[states - 1]);
      store_lanes<WHOLE>(param + k, s.decay * p - s.lr * update, lanes);
    }
  }

  // The hardware does not prefetch across the end of a page, so the lines of 64 values are prefetched here. Addresses
  // beyond the end of a tensor are allowed.
  static constexpr int64_t AHEAD = 512;
  INLINE_MEMBER void fetch(int64_t k) const {
    for (int line = 0; line < 64; line += 16) {
      __builtin_prefetch(param + k + line, 1);
      __builtin_prefetch(grad + k + line);
    }
    for (int i = 0; coded && i < states; i++) __builtin_prefetch(codes[i] + k, 1);
  }

  template <Pass P>
  INLINE_MEMBER void run(int64_t count) {
    int64_t k = 0;
    for (; k + W <= count; k += W) {
      if (k % 64 == 0) fetch(k + AHEAD);
      update<P, true>(k, W);
    }
    if (k < count) update<P, false>(k, (int)(count - k));
    if constexpr (later<P>) {
      for (k = 0; k + W <= count; k += W) move<true>(k, W);
      if (k < count) move<false>(k, (int)(count - k));
    }
  }

  // The quadratic code of the new moments. `absmax` holds their largest magnitudes and leaves with the scales to store.
  INLINE_MEMBER void encode(const StepTensor& x, const Dither* dither, int64_t start, int64_t count, float* absmax) {
    constexpr int others = states - has_second;
    if (count % GROUP)
      for (int i = 0; i < states; i++) memset(moment[i] + count, 0, 4 * (GROUP - count % GROUP));
    if constexpr (has_second) {
      float& second = absmax[others];
      if (__builtin_isinf(second)) second = keep_finite(moment[others], count);
      second = keep_21_bits(second);
      uint8_t* const codes = (uint8_t*)x.state[others] + start;
      encode_root<others>(moment[others], count, second, dither[SECOND], codes, moment, largest);
      for (int i = 0; i < others; i++) absmax[i] = absmax_of(largest[i]);
    }
    for (int i = 0; i < others; i++) {
      absmax[i] = keep_21_bits(absmax[i]);
      encode_signed<kind(0)>(moment[i], count, absmax[i], dither[i], (uint8_t*)x.state[i] + start);
    }
  }

  // Weight decay through the gradient: g <- g * grad_scale + coupled * p, into `scratch`.
  INLINE_MEMBER void couple(int64_t count, float* scratch) {
    for (int64_t k = 0; k < count; k++) scratch[k] = grad[k] * scalars.grad_scale + scalars.coupled * param[k];
    grad = scratch;
    scalars.grad_scale = 1;
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
    const float number = x.scalars->step;
    const Dither dither[max_states] = {{0, number}, {1, number}, {2, number}};
    double sums[max_sums] = {};
    for (int64_t start = task.start; start < task.end; start += unit) {
      const int64_t count = smaller(task.end - start, unit), block = start / unit;
      B b;
      b.scalars = *x.scalars;
      b.decode_signed = &decode_signed, b.decode_unsigned = &decode_unsigned;
      b.param = nullptr;
      if (P != Pass::ratios) b.param = (float*)read(at(x.param, x.param_dtype, start), x.param_dtype, count, buffer);
      b.grad = read(at(x.grad, x.grad_dtype, start), x.grad_dtype, count, buffer + padded);
      for (int i = 0; i < states; i++) {
        float* const moment = CODED ? buffer + padded * (2 + i) : (float*)x.state[i] + start;
        b.moment[i] = moment;
        if (CODED) {
          b.codes[i] = (const uint8_t*)x.state[i] + start;
          b.absmax[i] = x.absmax[i][block];
          if constexpr (B::quadratic) {
            b.absmax[i] = value_of_code_1(b.absmax[i], B::kind(i));
            continue;
          }
          const int64_t whole = S == Storage::beside ? count / W * W : 0;
          decode(*books[i], b.codes[i] + whole, count - whole, b.absmax[i],
                 [=](int64_t k, vf y, int lanes) { memcpy(moment + whole + k, &y, 4 * lanes); });
        }
      }
      if (P != Pass::ratios && b.scalars.coupled != 0) b.couple(count, buffer + padded);
      b.template run<P>(count);
      if (P != Pass::update) {
        for (int i = 0; i < max_sums; i++) sums[i] += sum(b.sums[i]);
        continue;
      }
      write(b.param, count, at(x.param, x.param_dtype, start), x.param_dtype);
      if (!CODED) continue;
      float absmax[states];  // all of them first: the encoding of one state overlaps with the scale of the next
      for (int i = 0; i < states; i++) absmax[i] = absmax_of(b.largest[i]);
      if constexpr (B::quadratic) {
        b.encode(x, dither, start, count, absmax);
      } else {
        for (int i = 0; i < states; i++) {
          uint8_t* codes = (uint8_t*)x.state[i] + start;
          if (is_signed<R>(i)) encode<false>(*books[i], b.moment[i], count, absmax[i], codes);
          else encode<true>(*books[i], b.moment[i], count, absmax[i], codes);
        }
      }
      for (int i = 0; i < states; i++) x.absmax[i][block] = stored(absmax[i]);
    }
    memcpy(partial + max_sums * index, sums, sizeof sums);
  });
  if (P != Pass::update) gather(tasks, partial, step);
  free(partial);
  free(scratch);
}

template <Rule R, Storage S>
static void run_pass(const Step& step) {
  switch (step.pass) {
    case Pass::update: return run<R, S, Pass::update>(step);
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
