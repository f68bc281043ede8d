"""How matrices start: truncated normal with standard deviation 1 / sqrt(fan in), biases at zero.

Cutting a normal at two deviations makes it narrower; it is widened first, so that what remains has the deviation
asked for (Flax's lecun_normal). Wortsman et al. 2023b, section 2.
"""

import math

from torch import nn

CUT_STD = 0.87962566103423978  # of a unit normal cut at two deviations


def init_linear(linear: nn.Linear, std: float | None = None) -> None:
    """Fill a linear layer; `std` replaces 1 / sqrt(fan in)."""
    wide = (std if std is not None else 1 / math.sqrt(linear.in_features)) / CUT_STD
    nn.init.trunc_normal_(linear.weight, std=wide, a=-2 * wide, b=2 * wide)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
