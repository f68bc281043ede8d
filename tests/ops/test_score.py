"""Cross entropy by the kernel is that of the definition in float64, and so is its gradient."""

import pytest
import torch

from tests.conftest import seed
from trimtab.ops import backends
from trimtab.ops.float32.score import score_, score_reference_

pytestmark = pytest.mark.skipif(backends.native is None, reason="needs the native kernels")


# classes, tokens: below, at and above a vector, a strip of tokens and a partial sum.
@pytest.mark.parametrize("sizes", [(1, 1), (5, 7), (256, 64), (257, 65), (1031, 131), (50_304, 17)])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_loss_and_gradient_match_float64(level, sizes, z_loss):
    y = 4 * torch.randn(sizes, generator=seed(0))
    index = torch.randint(0, sizes[0], (sizes[1],), generator=seed(1))
    valid = torch.arange(sizes[1]) % 5 != 3
    wide = y.double()
    expected = (*score_reference_(wide, index, valid, z_loss), wide)
    got = (*score_(y, index, valid, z_loss), y)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other.float(), rtol=1e-5, atol=1e-5)


def test_nan_and_inf_reach_the_loss_of_their_token_only():
    y = torch.randn(40, 3, generator=seed(0))
    y[7, 0], y[7, 1] = torch.nan, torch.inf
    ce, logz = score_(y, torch.zeros(3, dtype=torch.int64), torch.ones(3, dtype=torch.bool), 0.0)
    assert ce.isnan().tolist() == logz.isnan().tolist() == [True, True, False]
