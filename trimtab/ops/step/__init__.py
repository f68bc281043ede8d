"""The fused optimizer step.

rules.py      the equations and their coefficients
fused.py      the op; its kernels are fused.cpp and fused_triton.py
quadratic.py  the 8-bit code of the state
split.py      bfloat16 parameters with eight more bits
storage.py    how the state of many tensors is stored
"""

from trimtab.ops.step.fused import (
    Code,
    fused_step,
    gradient_norms,
    gradient_norms_unchecked,
    gradient_ratios,
    step_norms,
    step_unchecked,
)
from trimtab.ops.step.rules import RULES, SCALARS

__all__ = [
    "RULES",
    "SCALARS",
    "Code",
    "fused_step",
    "gradient_norms",
    "gradient_norms_unchecked",
    "gradient_ratios",
    "step_norms",
    "step_unchecked",
]
