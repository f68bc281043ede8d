"""A fingerprint changes when the tensor does, whoever wrote to it and however."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import seed
from trimtab.ops.fingerprint import CHUNK, fingerprint, fingerprint_reference


@pytest.mark.parametrize("count", [0, 1, 7, CHUNK // 4 - 1, CHUNK // 4, CHUNK // 4 + 1, 300_007])  # around a chunk
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_the_kernel_agrees_with_the_reference(count, dtype):
    x = (100 * torch.randn(count, generator=seed(count))).to(dtype)
    assert fingerprint(x) == fingerprint_reference(x)


@given(i=st.integers(0, 4999), j=st.integers(0, 4999), bit=st.integers(0, 31))
def test_a_bit_flipped_anywhere_and_two_values_exchanged_are_seen(i, j, bit):
    x = torch.randn(5000, generator=seed(0))
    before = fingerprint(x)
    flipped = x.clone()
    flipped.view(torch.int32)[i] ^= 1 << bit if bit < 31 else -(2**31)
    assert fingerprint(flipped) != before
    if x[i] != x[j]:
        x[[i, j]] = x[[j, i]]
        assert fingerprint(x) != before


def test_changes_that_cancel_in_a_plain_sum_are_seen():
    x = torch.randn(64, 128, generator=seed(1))
    seen = {fingerprint(y) for y in (x, -x, x.flip(0), x.flip(1), x.t(), x.abs(), torch.zeros_like(x), x * x.sign())}
    assert len(seen) == 7  # x.abs() and x * x.sign() are the same values
    assert fingerprint(torch.zeros(3)) != fingerprint(torch.zeros(4))


def test_a_tensor_elsewhere_is_refused():
    with pytest.raises(ValueError, match="CPU memory, got a tensor on meta"):
        fingerprint(torch.zeros(3, device="meta"))
