"""NUMBERS: tensors in, tensors out; no modules, no state, no files.

Each op has one name: `ls blockwise*` lists its reference, its CPU kernel and its GPU kernel. The fused optimizer step
is in step/; what all C++ kernels share is in native/.
"""

from trimtab.ops import float8, int8
from trimtab.ops.blockwise import (
    dequantize_blockwise,
    dequantize_tensorwise,
    quantize_blockwise,
    quantize_tensorwise,
)
from trimtab.ops.codebook import load_codebook
from trimtab.ops.step import fused_step, gradient_norms, gradient_ratios, step_norms
from trimtab.ops.step import rules as step_rules

__all__ = [
    "dequantize_blockwise",
    "dequantize_tensorwise",
    "float8",
    "fused_step",
    "gradient_norms",
    "gradient_ratios",
    "int8",
    "load_codebook",
    "quantize_blockwise",
    "quantize_tensorwise",
    "step_norms",
    "step_rules",
]
