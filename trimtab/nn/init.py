"""Initialisation of linear layers: truncated normal with standard deviation 1 / sqrt(fan in), biases zero.

Truncation at two deviations reduces the deviation of a normal; it is divided by `CUT_STD` to correct that, as in Flax's
lecun_normal. Wortsman et al. 2023b, section 2.
"""

import math

from torch import nn

CUT_STD = 0.87962566103423978  # standard deviation of a unit normal truncated at ±2


def init_linear(linear: nn.Linear, std: float | None = None) -> None:
    """Fill a linear layer; `std` replaces 1 / sqrt(fan in)."""
    wide = (std if std is not None else 1 / math.sqrt(linear.in_features)) / CUT_STD
    nn.init.trunc_normal_(linear.weight, std=wide, a=-2 * wide, b=2 * wide)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
