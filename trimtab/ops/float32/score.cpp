// Cross entropy of columns of logits, which become their gradient in place. Definition: score.py.
#include "blockwise.h"

namespace trimtab::TRIMTAB_LEVEL {

constexpr int SCORE_VECTORS = 4;  // of neighbouring tokens per task: whole cache lines

// A task takes a strip of tokens down all classes: the maximum, then exponentials and their sum, then the gradient.
struct Strip {
  const Score& s;
  int64_t first, lanes;

  // Call body(class, vector, values) for every vector of the strip; a value that it returns is written.
  template <class Body>
  INLINE_MEMBER void each(int64_t row, Body body) const {
    float* y = s.logits + row * s.tokens + first;
#pragma GCC unroll 4
    for (int k = 0; k < SCORE_VECTORS; k++) {
      const int64_t left = lanes - k * W;
      if (left >= W) {
        store(y + k * W, body(k, load(y + k * W)));
      } else if (left > 0) {
        const vf x = body(k, load_part(y + k * W, left));
        memcpy(y + k * W, &x, 4 * left);
      }
    }
  }

  void run() const {
    vf most[SCORE_VECTORS], total[SCORE_VECTORS] = {};
    float target[SCORE_VECTORS * W] = {}, largest[SCORE_VECTORS * W], sum[SCORE_VECTORS * W], share[SCORE_VECTORS * W] = {};
    for (int64_t t = 0; t < lanes; t++) target[t] = s.logits[s.index[first + t] * s.tokens + first + t];
    for (vf& m : most) m = splat(-INFINITY);
    for (int64_t row = 0; row < s.classes; row++) find_larger(row, most);
    // In two levels, so that the rounding errors of long sums do not add up.
    for (int64_t start = 0; start < s.classes; start += 256) {
      vf part[SCORE_VECTORS] = {};
      for (int64_t row = start; row < smaller(s.classes, start + 256); row++)
        each(row, [&](int k, vf y) {
          const vf e = power_of_e(y - most[k]);
          part[k] += e;
          return e;
        });
      for (int k = 0; k < SCORE_VECTORS; k++) total[k] += part[k];
    }
    memcpy(largest, most, sizeof largest), memcpy(sum, total, sizeof sum);
    for (int64_t t = 0; t < lanes; t++) {
      const float logz = largest[t] + logf(sum[t]), counts = s.valid[first + t] ? 1.0f : 0.0f;
      s.logz[first + t] = logz, s.ce[first + t] = logz - target[t];
      share[t] = counts * (1 + 2 * s.z_loss * logz) / sum[t];
    }
    for (int64_t row = 0; row < s.classes; row++) each(row, [&](int k, vf y) { return y * load(share + k * W); });
    for (int64_t t = 0; t < lanes; t++)
      if (s.valid[first + t]) s.logits[s.index[first + t] * s.tokens + first + t] -= 1;
  }

  INLINE_MEMBER void find_larger(int64_t row, vf* most) const {
    const float* y = s.logits + row * s.tokens + first;
    for (int k = 0; k < SCORE_VECTORS && k * W < lanes; k++) {
      const vf x = load_part(y + k * W, lanes - k * W);
      most[k] = x > most[k] ? x : most[k];
    }
  }
};

// Parallel over strips of tokens.
void score(const Score& s) {
  const int64_t width = SCORE_VECTORS * W;
  parallel(tasks_for(s.tokens, width), s.threads, [&](int64_t task, int) {
    Strip{s, task * width, smaller(width, s.tokens - task * width)}.run();
  });
}

}  // namespace trimtab::TRIMTAB_LEVEL
