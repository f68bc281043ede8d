// Shared by the kernels: argument types, the list of kernels of one instruction set, and threads.
//
// blockwise.cpp, gelu.cpp, int8.cpp and those of float32 and step are compiled once per instruction set, each time in its own
// namespace TRIMTAB_LEVEL. They use no standard-library templates: the linker keeps one copy of such a function for the
// whole library, possibly with instructions that this CPU does not have.
#pragma once
#include <cstdint>

#include "table.h"

namespace trimtab {

// A codebook. The dynamic tables are recognised by their values and need no lookup.
struct Codebook {
  enum Kind { any, dynamic_signed, dynamic_symmetric, dynamic_unsigned } kind;
  int count;
  float values[256];
  float midpoints[256];  // count - 1 decision boundaries, then +inf
};

struct Quantize {
  const void* x;
  Dtype dtype;
  int64_t count, block;
  const Codebook* codebook;
  uint8_t* codes;
  float* absmax;
  int threads;
};

struct Dequantize {
  const uint8_t* codes;
  const float* absmax;
  int64_t count, block;
  const Codebook* codebook;
  void* out;
  Dtype dtype;
  int threads;
};

constexpr int max_sums = 2;

struct StepTensor {
  void* param;
  const void* grad;
  void* state[max_states];  // uint8 codes, or float32 moments where absmax is null
  float* absmax[max_states];
  int64_t count;
  const Scalars* scalars;
  Dtype param_dtype, grad_dtype;
  uint8_t* extra;  // int8: eight more bits of a bfloat16 parameter, or null
};

struct Step {
  Rule rule;
  StepTensor* tensors;
  int64_t tensor_count, block;
  const Codebook *signed_book, *unsigned_book;
  bool quantized;
  bool quadratic;  // in the quadratic code, which needs no codebook
  Pass pass;
  double* sums;  // [tensors][max_sums], written by every pass but the update
  int threads;
};

struct QuantizeInt8 {
  const void* x;
  Dtype dtype;
  int64_t rows, columns;
  bool by_column;
  int8_t* codes;
  float* absmax;
  int threads;
};

struct Rescale {
  const int32_t* total;
  int64_t rows, columns;
  const float *row, *column;  // absmax
  bool row_is_scalar, column_is_scalar;
  const float* bias;  // or null
  void* out;
  Dtype dtype;
  int threads;
};

struct Matmul {
  const void* a;  // [rows, inner]: int8 codes, or values of `dtype` where the rescale has no row: quantized by row then
  Dtype dtype;
  const int8_t* b;  // [inner, columns]
  int64_t rows, inner, columns;
  bool a_transposed, b_transposed;  // codes only
  Rescale rescale;  // its total is not used: the sums never leave the registers
};

struct Product {
  const float *a, *b;  // [inner, rows] and [inner, columns]
  float* out;          // a^T b
  int64_t inner, rows, columns;
  int threads;
};

// A tensor [batch, time, heads, width] whose last dimension is contiguous; the other strides in values.
struct Strided {
  const float* data;
  int64_t batch, time, head;
};

struct Attend {
  Strided q, k, v, out;
  Strided grad, dq, dk, dv;  // backward where grad has data; then out is not used
  float* logsum;             // [batch, heads, time], written forward and read backward
  int64_t batch, time, heads, width;
  float scale;
  bool causal;
  int threads;
};

struct Score {
  float* logits;  // [classes, tokens]; overwritten with the gradient
  const int64_t* index;
  const bool* valid;
  float *ce, *logz;
  int64_t classes, tokens;
  float z_loss;
  int threads;
};

struct Gelu {
  const void *x, *grad;  // forward where grad is null, else backward
  void* out;
  Dtype dtype;  // of all three
  int64_t count;
  int threads;
};

struct Kernels {
  const char* level;
  void (*quantize)(const Quantize&);
  void (*dequantize)(const Dequantize&);
  void (*step)(const Step&);
  void (*gradient_norms)(const Step&);  // sums of squares of the gradients, into the first sum
  void (*traffic)(const Step&);         // the loads and stores of a step and no arithmetic: the speed limit
  void (*quantize_int8)(const QuantizeInt8&);
  void (*rescale)(const Rescale&);
  void (*gelu)(const Gelu&);
  void (*product)(const Product&);
  void (*attend)(const Attend&);
  void (*score)(const Score&);
  void (*matmul)(const Matmul&);  // with pairs of int16; null where this level has no such instruction
};

// fingerprint.cpp; the same at every level.
uint64_t fingerprint(const uint8_t* data, int64_t bytes, int threads);

// Whether kernels run on PyTorch's OpenMP threads from now on: if that is allowed and they are there.
bool share_threads(bool allowed);

// Run body(context, task, worker) for every task on up to `threads` threads.
void run_tasks(int64_t tasks, int threads, void (*body)(void*, int64_t task, int worker), void* context);

template <class Body>
static inline void parallel(int64_t tasks, int threads, Body body) {
  run_tasks(tasks, threads, [](void* context, int64_t task, int worker) { (*(Body*)context)(task, worker); }, &body);
}

}  // namespace trimtab
