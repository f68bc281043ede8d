// A 64-bit fingerprint of bytes. Definition: fingerprint.py.
#include <cstring>
#include <vector>

#include "native/native.h"

namespace trimtab {
namespace {

constexpr int LANES = 8, ROUNDS = 64;
constexpr int64_t CHUNK = 8 * LANES * ROUNDS, CHUNKS_PER_TASK = 64;

inline uint64_t mix(uint64_t h, uint64_t word) {
  const uint64_t product = (h ^ word) * 0x9E3779B97F4A7C15u;
  return product << 31 | product >> 33;
}

uint64_t hash_chunk(const uint8_t* data) {
  uint64_t h[LANES], words[LANES], all = 0;
  for (int lane = 0; lane < LANES; lane++) h[lane] = lane + 1;
  for (int round = 0; round < ROUNDS; round++) {
    memcpy(words, data + 8 * LANES * round, sizeof words);
    for (int lane = 0; lane < LANES; lane++) h[lane] = mix(h[lane], words[lane]);
  }
  for (int lane = 0; lane < LANES; lane++) all = mix(all, h[lane]);
  return all;
}

}  // namespace

uint64_t fingerprint(const uint8_t* data, int64_t bytes, int threads) {
  const int64_t chunks = (bytes + CHUNK - 1) / CHUNK;
  std::vector<uint64_t> each(chunks);
  // Parallel over runs of chunks.
  parallel((chunks + CHUNKS_PER_TASK - 1) / CHUNKS_PER_TASK, threads, [&](int64_t task, int) {
    for (int64_t i = task * CHUNKS_PER_TASK; i < chunks && i < (task + 1) * CHUNKS_PER_TASK; i++) {
      if ((i + 1) * CHUNK <= bytes) {
        each[i] = hash_chunk(data + i * CHUNK);
      } else {
        uint8_t padded[CHUNK] = {};
        memcpy(padded, data + i * CHUNK, bytes - i * CHUNK);
        each[i] = hash_chunk(padded);
      }
    }
  });
  uint64_t total = 0;
  for (uint64_t chunk : each) total = mix(total, chunk);
  return mix(total, bytes);
}

}  // namespace trimtab
