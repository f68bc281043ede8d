// Block-wise quantize and dequantize over a whole tensor. The arithmetic of one block is in blockwise.h.
#include "blockwise.h"

namespace trimtab::TRIMTAB_LEVEL {

void quantize(const Quantize& q) {
  each_block(q.x, q.dtype, q.count, q.block, q.absmax, q.threads, [&](const float* x, int64_t start, int64_t count, float absmax) {
    encode<false>(*q.codebook, x, count, absmax, q.codes + start);
  });
}

void dequantize(const Dequantize& q) {
  parallel(tasks_for(q.count, CHUNK), q.threads, [&](int64_t task, int) {
    const int64_t end = smaller(q.count, (task + 1) * CHUNK);
    for (int64_t start = task * CHUNK, stop; start < end; start = stop) {
      stop = smaller(end, (start / q.block + 1) * q.block);
      const float absmax = q.absmax[start / q.block];
      const auto decode_to = [&](auto put) { decode(*q.codebook, q.codes + start, stop - start, absmax, put); };
      float* full = (float*)q.out + start;
      uint16_t* half = (uint16_t*)q.out + start;
      const auto put_half = [half](int64_t k, vh y, int lanes) { memcpy(half + k, &y, 2 * lanes); };
      if (q.dtype == Dtype::float32) decode_to([full](int64_t k, vf y, int lanes) { memcpy(full + k, &y, 4 * lanes); });
      else if (q.dtype == Dtype::bfloat16) decode_to([=](int64_t k, vf y, int lanes) { put_half(k, to_bfloat16(y), lanes); });
      else decode_to([=](int64_t k, vf y, int lanes) { put_half(k, to_float16(y), lanes); });
    }
  });
}

}  // namespace trimtab::TRIMTAB_LEVEL
