// The kernels of one instruction set, in one object: compiled once per level, with that level's flags.
#include "blockwise.cpp"
#include "gelu.cpp"
#include "int8.cpp"
#include "float32/product.cpp"
#include "float32/attention.cpp"
#include "float32/score.cpp"
#include "step/fused.cpp"

namespace trimtab::TRIMTAB_LEVEL {

#define NAME_OF(x) #x
#define NAME(x) NAME_OF(x)

extern const Kernels kernels = {
    NAME(TRIMTAB_LEVEL), quantize, dequantize, step, gradient_norms, traffic, quantize_int8, rescale, gelu,
    product, attend, score,
#ifdef __AVX2__
    matmul,
#else
    nullptr,
#endif
};

}  // namespace trimtab::TRIMTAB_LEVEL
