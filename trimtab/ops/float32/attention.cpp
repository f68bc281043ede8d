// Softmax attention and its gradient, one head at a time. Definition: attention.py.
//
// Logits of a panel of PANEL queries are kept transposed, [key][query]: the maximum and the sum over keys are then
// operations between vectors. All products are sums over k of a(i, k) * b[k][j], in tiles of TILE rows by a panel;
// operands of b are copied so that a panel is contiguous.
#include "blockwise.h"

namespace trimtab::TRIMTAB_LEVEL {

constexpr int64_t PANEL = 2 * W, TILE = W / 2;

struct Sums {
  vf of[TILE][2];
};

// a(i, k) is a[i * row + k * step], b[k] is at b + k * next.
INLINE Sums sum_products(const float* a, int64_t row, int64_t step, const float* b, int64_t next, int64_t depth) {
  vf sums[TILE][2] = {};
  for (int64_t k = 0; k < depth; k++, a += step, b += next) {
    const vf left = load(b), right = load(b + W);
#pragma GCC unroll 8
    for (int64_t i = 0; i < TILE; i++) {
      const vf x = splat(a[i * row]);
      sums[i][0] = roughly_fma(x, left, sums[i][0]);
      sums[i][1] = roughly_fma(x, right, sums[i][1]);
    }
  }
  Sums result;
  memcpy(&result, sums, sizeof sums);
  return result;
}

// e^x for x <= 0, or NaN; 0 below the smallest normal number.
INLINE vf power_of_e(vf x) {
  const vf t = x * splat(-1.44269504f), magic = splat(12582912.0f);
  const vf bounded = t > splat(200.0f) ? splat(200.0f) : t, shifted = bounded + magic, n = shifted - magic;
  // x log2(e) + n, with log2(e) in two parts.
  const vf f = roughly_fma(x, splat(-1.92596299e-8f), roughly_fma(x, splat(-1.44269504f), -n));
  vf p = splat(POWER[0]);
  for (int k = 1; k < 7; k++) p = roughly_fma(p, f, splat(POWER[k]));
  const vi whole = bits(shifted) - bits(magic);
  const vf e = whole > 125 ? splat(0.0f) : (vf)(bits(p) - (whole << 23));
  return x == x ? e : x;
}

// One head: copies of its operands, [time][width], both rounded up to whole panels and filled with zeros.
struct Head {
  const Attend& a;
  int64_t time, wide, batch, head;

  Head(const Attend& a, int64_t task)
      : a(a), time(tasks_for(a.time, PANEL) * PANEL), wide(tasks_for(a.width, PANEL) * PANEL), batch(task / a.heads),
        head(task % a.heads) {}

  const float* at_row(const Strided& x, int64_t t) const { return x.data + batch * x.batch + t * x.time + head * x.head; }

  void copy(const Strided& x, float scale, float* to) const {
    memset(to, 0, 4 * time * wide);
    for (int64_t t = 0; t < a.time; t++) {
      const float* from = at_row(x, t);
      for (int64_t k = 0; k < a.width; k++) to[t * wide + k] = from[k] * scale;
    }
  }

  // Rows [first, first + PANEL) of a copy, transposed.
  void transpose(const float* copied, int64_t first, float* to) const {
    for (int64_t t = 0; t < PANEL; t++)
      for (int64_t k = 0; k < a.width; k++) to[k * PANEL + t] = copied[(first + t) * wide + k];
  }

  int64_t keys_for(int64_t query) const { return a.causal ? query + PANEL : time; }

  // Products of `keys` rows with a transposed panel: [key][query].
  void multiply_panel(const float* rows, const float* panel, int64_t keys, float* out) const {
    for (int64_t i = 0; i < keys; i += TILE) {
      const Sums sums = sum_products(rows + i * wide, wide, 1, panel, PANEL, a.width);
      memcpy(out + i * PANEL, &sums, sizeof sums);
    }
  }

  // Logits of keys that a query does not see become -inf.
  void mask(int64_t first, int64_t keys, float* logits) const {
    for (int64_t i = a.causal ? first : 0; i < keys; i++)
      for (int64_t q = 0; q < PANEL; q++)
        if (i >= a.time || (a.causal && i > first + q)) logits[i * PANEL + q] = -INFINITY;
  }

  // Rows of a result in the layout of `to`, without the zeros.
  void put(const float* values, int64_t stride, int64_t first, int64_t rows, const Strided& to) const {
    for (int64_t t = first; t < first + rows && t < a.time; t++)
      memcpy((float*)at_row(to, t), values + (t - first) * stride, 4 * a.width);
  }
};

static void attend_head(const Head& h, float* scratch) {
  const Attend& a = h.a;
  float *q = scratch, *k = q + h.time * h.wide, *v = k + h.time * h.wide, *logits = v + h.time * h.wide;
  float *q_panel = logits + h.time * PANEL, *out = q_panel + h.wide * PANEL;
  h.copy(a.q, a.scale, q), h.copy(a.k, 1, k), h.copy(a.v, 1, v);
  for (int64_t first = 0; first < h.time; first += PANEL) {
    const int64_t keys = h.keys_for(first);
    h.transpose(q, first, q_panel);
    h.multiply_panel(k, q_panel, keys, logits);
    h.mask(first, keys, logits);
    float total[PANEL], largest[PANEL];
    for (int64_t part = 0; part < PANEL; part += W) {
      vf most = load(logits + part), sum = {};
      for (int64_t i = 1; i < keys; i++) {
        const vf x = load(logits + i * PANEL + part);
        most = x > most ? x : most;
      }
      for (int64_t i = 0; i < keys; i++) {
        float* x = logits + i * PANEL + part;
        const vf e = power_of_e(load(x) - most);
        store(x, e);
        sum += e;
      }
      store(total + part, sum), store(largest + part, most);
    }
    for (int64_t i = 0; i < PANEL; i += TILE)
      for (int64_t j = 0; j < h.wide; j += PANEL) {
        Sums sums = sum_products(logits + i, 1, PANEL, v + j, h.wide, keys);
        for (int64_t r = 0; r < TILE; r++) {
          store(out + (i + r) * h.wide + j, sums.of[r][0] / total[i + r]);
          store(out + (i + r) * h.wide + j + W, sums.of[r][1] / total[i + r]);
        }
      }
    h.put(out, h.wide, first, PANEL, a.out);
    for (int64_t t = 0; t < PANEL && first + t < a.time; t++)
      a.logsum[(h.batch * a.heads + h.head) * a.time + first + t] = largest[t] + logf(total[t]);
  }
}

// Add the products of the rows of a [key][query] panel with the panel's rows of b.
static void add_rows(const Head& h, const float* panel, const float* b, int64_t keys, float* total) {
  for (int64_t i = 0; i < keys; i += TILE)
    for (int64_t j = 0; j < h.wide; j += PANEL) {
      const Sums sums = sum_products(panel + i * PANEL, PANEL, 1, b + j, h.wide, PANEL);
      for (int64_t r = 0; r < TILE; r++) {
        float* to = total + (i + r) * h.wide + j;
        store(to, load(to) + sums.of[r][0]), store(to + W, load(to + W) + sums.of[r][1]);
      }
    }
}

static void attend_head_backward(const Head& h, float* scratch) {
  const Attend& a = h.a;
  const int64_t size = h.time * h.wide;
  float *q = scratch, *k = q + size, *v = k + size, *g = v + size, *dk = g + size, *dv = dk + size;
  float *p = dv + size, *dp = p + h.time * PANEL, *panel = dp + h.time * PANEL, *dq = panel + h.wide * PANEL;
  h.copy(a.q, a.scale, q), h.copy(a.k, 1, k), h.copy(a.v, 1, v), h.copy(a.grad, 1, g);
  memset(dk, 0, 8 * size);  // and dv
  for (int64_t first = 0; first < h.time; first += PANEL) {
    const int64_t keys = h.keys_for(first);
    float logsum[PANEL] = {};
    memcpy(logsum, a.logsum + (h.batch * a.heads + h.head) * a.time + first, 4 * smaller(PANEL, a.time - first));
    h.transpose(q, first, panel);
    h.multiply_panel(k, panel, keys, p);
    h.mask(first, keys, p);
    h.transpose(g, first, panel);
    h.multiply_panel(v, panel, keys, dp);
    for (int64_t part = 0; part < PANEL; part += W) {
      const vf z = load(logsum + part);
      vf along = {};
      for (int64_t i = part; i < keys * PANEL; i += PANEL) {
        const vf e = power_of_e(load(p + i) - z);
        store(p + i, e);
        along += e * load(dp + i);
      }
      for (int64_t i = part; i < keys * PANEL; i += PANEL) store(dp + i, load(p + i) * (load(dp + i) - along));
    }
    add_rows(h, p, g + first * h.wide, keys, dv);
    add_rows(h, dp, q + first * h.wide, keys, dk);
    for (int64_t i = 0; i < PANEL; i += TILE)
      for (int64_t j = 0; j < h.wide; j += PANEL) {
        Sums sums = sum_products(dp + i, 1, PANEL, k + j, h.wide, keys);
        for (int64_t r = 0; r < TILE; r++) {
          store(dq + (i + r) * h.wide + j, sums.of[r][0] * a.scale);
          store(dq + (i + r) * h.wide + j + W, sums.of[r][1] * a.scale);
        }
      }
    h.put(dq, h.wide, first, PANEL, a.dq);
  }
  h.put(dk, h.wide, 0, a.time, a.dk), h.put(dv, h.wide, 0, a.time, a.dv);
}

// Parallel over batch and heads.
void attend(const Attend& a) {
  const Head any(a, 0);
  const int64_t bufs = a.grad.data ? 6 : 3, panels = a.grad.data ? 2 : 1;
  const int64_t size = bufs * any.time * any.wide + panels * any.time * PANEL + 2 * any.wide * PANEL;
  float* memory = (float*)allocate(a.threads * size * sizeof(float));
  parallel(a.batch * a.heads, a.threads, [&](int64_t task, int worker) {
    const Head head(a, task);
    if (a.grad.data) attend_head_backward(head, memory + worker * size);
    else attend_head(head, memory + worker * size);
  });
  free(memory);
}

}  // namespace trimtab::TRIMTAB_LEVEL
