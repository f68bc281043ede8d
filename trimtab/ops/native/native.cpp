// The Python module: converts arguments, recognises codebooks, and chooses the instruction set when it is loaded.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#ifdef TRIMTAB_X86
#include <cpuid.h>
#endif
#ifdef __linux__
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "native/native.h"

namespace nb = nanobind;
using Address = uintptr_t;

namespace trimtab {

#define LEVEL(name) \
  namespace name {  \
  extern const Kernels kernels; \
  }
LEVEL(baseline)
#ifdef TRIMTAB_X86
LEVEL(avx2)
LEVEL(avx512)
#endif
// The int8 product, compiled for the VNNI of each level.
#ifdef TRIMTAB_AVX512_VNNI
namespace avx512vnni {
void matmul(const Matmul&);
}
#endif
#ifdef TRIMTAB_AVX_VNNI
namespace avxvnni {
void matmul(const Matmul&);
}
#endif

namespace {

// Every level this CPU can run, best first.
std::vector<const Kernels*> supported_levels() {
  std::vector<const Kernels*> levels;
#ifdef TRIMTAB_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    levels.push_back(&avx512::kernels);
  if (avx2) levels.push_back(&avx2::kernels);
#endif
  levels.push_back(&baseline::kernels);
  return levels;
}

const Kernels* active = supported_levels().front();

void set_level(const std::string& name) {
  for (const Kernels* kernels : supported_levels())
    if (name == kernels->level) {
      active = kernels;
      return;
    }
  throw std::invalid_argument("this CPU or this build has no level " + name);
}

bool vnni_allowed = true;

// The int8 product with VNNI for the active level, or null where it is not allowed or the CPU or the compiler lacks it.
using Int8Product = void (*)(const Matmul&);
Int8Product vnni_product() {
#ifdef TRIMTAB_AVX512_VNNI
  static const bool has512 = __builtin_cpu_supports("avx512vnni");
  if (vnni_allowed && has512 && active == &avx512::kernels) return avx512vnni::matmul;
#endif
#ifdef TRIMTAB_AVX_VNNI
  static const bool has256 = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1 << 4);
  }();
  if (vnni_allowed && has256 && active == &avx2::kernels) return avxvnni::matmul;
#endif
  return nullptr;
}

// --- Codebooks

struct Dynamic {
  float positive[129], unsigned_[256];  // magnitudes by index; both start with 0 and end with 1

  Dynamic() {
    positive[0] = unsigned_[0] = 0, positive[128] = unsigned_[255] = 1;
    for (int i = 0, j = 1, k = 1; i < 7; i++) {
      const double scale = std::pow(10.0, i - 6);
      for (int r = 0; r < 1 << i; r++) positive[j++] = (float)(scale * (0.1 + 0.9 * (r + 0.5) / (1 << i)));
      for (int r = 0; r < 2 << i; r++) unsigned_[k++] = (float)(scale * (0.1 + 0.9 * (r + 0.5) / (2 << i)));
    }
  }
};

Codebook::Kind recognise(const float* values, int count) {
  static const Dynamic dynamic;
  if (count != 256) return Codebook::any;
  if (std::memcmp(values, dynamic.unsigned_, sizeof dynamic.unsigned_) == 0) return Codebook::dynamic_unsigned;
  for (int j = 0; j <= 128; j++)
    if (values[127 + j] != dynamic.positive[j]) return Codebook::any;
  for (int j = 1; j < 127; j++)
    if (values[127 - j] != -dynamic.positive[j]) return Codebook::any;
  if (values[0] == -1) return Codebook::dynamic_symmetric;
  return values[0] == -dynamic.positive[127] ? Codebook::dynamic_signed : Codebook::any;
}

Codebook open_codebook(Address values, int count) {
  Codebook book;
  book.count = count;
  // A code beyond a short codebook decodes to NaN.
  std::fill(std::begin(book.values), std::end(book.values), NAN);
  std::fill(std::begin(book.midpoints), std::end(book.midpoints), INFINITY);
  std::memcpy(book.values, (const void*)values, count * sizeof(float));
  for (int k = 0; k + 1 < count; k++) book.midpoints[k] = (book.values[k] + book.values[k + 1]) / 2;
  book.kind = recognise(book.values, count);
  return book;
}

// Request large pages for a new result: clearing small pages can take five times as long as the kernel that fills them.
// Without support in the system this does nothing.
void prefer_huge_pages([[maybe_unused]] Address start, [[maybe_unused]] int64_t bytes) {
#ifdef MADV_HUGEPAGE
  const Address page = 4096, first = (start + page - 1) / page * page, last = (start + bytes) / page * page;
  if (last > first) madvise((void*)first, last - first, MADV_HUGEPAGE);
#endif
}

// --- Entry points. Python has checked the arguments. The interpreter lock is released while they run (`call_guard`).

void quantize(Address x, int dtype, int64_t count, int64_t block, Address codebook, int entries, Address codes,
              Address absmax, int threads) {
  const Codebook book = open_codebook(codebook, entries);
  active->quantize({(const void*)x, (Dtype)dtype, count, block, &book, (uint8_t*)codes, (float*)absmax, threads});
}

void dequantize(Address codes, Address absmax, int64_t count, int64_t block, Address codebook, int entries, Address out,
                int dtype, int threads) {
  const Codebook book = open_codebook(codebook, entries);
  active->dequantize({(const uint8_t*)codes, (const float*)absmax, count, block, &book, (void*)out, (Dtype)dtype, threads});
}

// One flat list per kind of argument, tensor by tensor; states and absmax state by state, as in step/fused.py.
std::vector<StepTensor> step_tensors(const std::vector<Address>& params, const std::vector<Address>& grads,
                                     const std::vector<Address>& states, const std::vector<Address>& absmax,
                                     const std::vector<int64_t>& counts, const std::vector<int>& param_dtypes,
                                     const std::vector<int>& grad_dtypes, const std::vector<Address>& extras,
                                     Address scalars) {
  std::vector<StepTensor> tensors(grads.size());
  const size_t total = tensors.size(), kept = total ? states.size() / total : 0;
  for (size_t t = 0; t < total; t++) {
    StepTensor& x = tensors[t];
    x.param = params.empty() ? nullptr : (void*)params[t];
    x.grad = (const void*)grads[t];
    x.count = counts[t];
    x.scalars = (const Scalars*)scalars + t;
    x.param_dtype = params.empty() ? Dtype::float32 : (Dtype)param_dtypes[t];
    x.grad_dtype = (Dtype)grad_dtypes[t];
    x.extra = extras.empty() ? nullptr : (uint8_t*)extras[t];
    for (size_t k = 0; k < max_states; k++) {
      x.state[k] = k < kept ? (void*)states[k * total + t] : nullptr;
      x.absmax[k] = k < kept && !absmax.empty() ? (float*)absmax[k * total + t] : nullptr;
    }
  }
  return tensors;
}

std::vector<double> step(int rule, const std::vector<Address>& params, const std::vector<Address>& grads,
                         const std::vector<Address>& states, const std::vector<Address>& absmax,
                         const std::vector<int64_t>& counts, const std::vector<int>& param_dtypes,
                         const std::vector<int>& grad_dtypes, const std::vector<Address>& extras, Address scalars,
                         int64_t block, Address signed_book, int signed_entries, Address unsigned_book,
                         int unsigned_entries, bool quadratic, int pass, int threads) {
  auto tensors = step_tensors(params, grads, states, absmax, counts, param_dtypes, grad_dtypes, extras, scalars);
  std::vector<double> sums((Pass)pass == Pass::update ? 0 : max_sums * tensors.size());
  const Codebook s = open_codebook(signed_book, signed_entries), u = open_codebook(unsigned_book, unsigned_entries);
  active->step({(Rule)rule, tensors.data(), (int64_t)tensors.size(), block, &s, &u, !absmax.empty(), quadratic,
                (Pass)pass, sums.data(), threads});
  return sums;
}

std::vector<double> gradient_norms(const std::vector<Address>& grads, const std::vector<int64_t>& counts,
                                   const std::vector<int>& dtypes, int threads) {
  auto tensors = step_tensors({}, grads, {}, {}, counts, {}, dtypes, {}, 0);
  std::vector<double> sums(max_sums * tensors.size()), squares(tensors.size());
  active->gradient_norms({Rule::adamw, tensors.data(), (int64_t)tensors.size(), 0, nullptr, nullptr, false, false,
                          Pass::norms, sums.data(), threads});
  for (size_t t = 0; t < squares.size(); t++) squares[t] = sums[max_sums * t];
  return squares;
}

void traffic(Address param, Address grad, Address m, Address v, int64_t count, bool quantized, int threads) {
  auto tensors = step_tensors({param}, {grad}, {m, v}, {}, {count}, {0}, {0}, {}, 0);
  active->traffic({Rule::adamw, tensors.data(), 1, 0, nullptr, nullptr, quantized, false, Pass::update, nullptr, threads});
}

void quantize_int8(Address x, int dtype, int64_t rows, int64_t columns, bool by_column, Address codes, Address absmax,
                   int threads) {
  active->quantize_int8({(const void*)x, (Dtype)dtype, rows, columns, by_column, (int8_t*)codes, (float*)absmax, threads});
}

Rescale rescale_of(Address total, int64_t rows, int64_t columns, Address row, bool row_is_scalar, Address column,
                   bool column_is_scalar, Address bias, Address out, int dtype, int threads) {
  return {(const int32_t*)total, rows, columns, (const float*)row, (const float*)column, row_is_scalar, column_is_scalar,
          (const float*)bias, (void*)out, (Dtype)dtype, threads};
}

void rescale(Address total, int64_t rows, int64_t columns, Address row, bool row_is_scalar, Address column,
             bool column_is_scalar, Address bias, Address out, int dtype, int threads) {
  active->rescale(rescale_of(total, rows, columns, row, row_is_scalar, column, column_is_scalar, bias, out, dtype, threads));
}

// `row` is 0 where a holds values of `a_dtype` instead of codes.
void matmul(Address a, int a_dtype, bool a_transposed, Address b, bool b_transposed, int64_t inner, int64_t rows,
            int64_t columns, Address row, bool row_is_scalar, Address column, bool column_is_scalar, Address bias,
            Address out, int dtype, int threads) {
  const Rescale r = rescale_of(0, rows, columns, row, row_is_scalar, column, column_is_scalar, bias, out, dtype, threads);
  const Int8Product vnni = vnni_product();
  (vnni ? vnni : active->matmul)(
      {(const void*)a, (Dtype)a_dtype, (const int8_t*)b, rows, inner, columns, a_transposed, b_transposed, r});
}

void gelu(Address x, Address grad, Address out, int dtype, int64_t count, int threads) {
  active->gelu({(const void*)x, (const void*)grad, (void*)out, (Dtype)dtype, count, threads});
}

void product(Address a, Address b, Address out, int64_t inner, int64_t rows, int64_t columns, int threads) {
  active->product({(const float*)a, (const float*)b, (float*)out, inner, rows, columns, threads});
}

void score(Address logits, Address index, Address valid, Address ce, Address logz, int64_t classes, int64_t tokens,
           double z_loss, int threads) {
  active->score({(float*)logits, (const int64_t*)index, (const bool*)valid, (float*)ce, (float*)logz, classes, tokens,
                 (float)z_loss, threads});
}

// Every tensor as address and strides (batch, time, head); an empty list where there is none.
Strided strided(const std::vector<int64_t>& x) {
  return x.empty() ? Strided{} : Strided{(const float*)x[0], x[1], x[2], x[3]};
}

void attend(const std::vector<std::vector<int64_t>>& tensors, Address logsum, int64_t batch, int64_t time, int64_t heads,
            int64_t width, double scale, bool causal, int threads) {
  Strided s[8] = {};
  for (size_t i = 0; i < tensors.size() && i < 8; i++) s[i] = strided(tensors[i]);
  active->attend({s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], (float*)logsum, batch, time, heads, width, (float)scale,
                  causal, threads});
}

}  // namespace
}  // namespace trimtab

NB_MODULE(_native, m) {
  using namespace trimtab;
  m.doc() = "CPU kernels. They do not check the addresses they get: call them through trimtab.ops.";
  m.attr("TABLE") = TABLE;
  m.attr("SOURCES") = SOURCES;
  m.def("levels", [] {
    std::vector<std::string> names;
    for (const Kernels* kernels : supported_levels()) names.emplace_back(kernels->level);
    return names;
  });
  m.def("level", [] { return std::string(active->level); });
  m.def("set_level", &set_level);
  m.def("share_threads", &share_threads);
  m.def("allow_vnni", [](bool allowed) { vnni_allowed = allowed; });
  m.def("has_vnni", [] { return vnni_product() != nullptr; });
  m.def("has_matmul", [] { return active->matmul != nullptr; });
  m.def("has_closed_form", [](Address values, int count) { return recognise((const float*)values, count) != Codebook::any; });
  m.def("prefer_huge_pages", &prefer_huge_pages);
  const auto run = [&](const char* name, auto kernel) { m.def(name, kernel, nb::call_guard<nb::gil_scoped_release>()); };
  run("quantize", &quantize);
  run("dequantize", &dequantize);
  run("step", &step);
  run("gradient_norms", &gradient_norms);
  run("traffic", &traffic);
  run("quantize_int8", &quantize_int8);
  run("rescale", &rescale);
  run("matmul", &matmul);
  run("gelu", &gelu);
  run("product", &product);
  run("attend", &attend);
  run("score", &score);
  run("fingerprint", [](Address data, int64_t bytes, int threads) { return fingerprint((const uint8_t*)data, bytes, threads); });
}
