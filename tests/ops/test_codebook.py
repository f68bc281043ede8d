"""The 256 values, against the paper's anchors."""

import pytest
import torch

from trimtab.ops import load_codebook
from trimtab.ops.codebook import dynamic, dynamic_symmetric, linear, midpoints, quantile, quantile_chunked

SIGNED = {
    0: -0.99296875, 1: -0.97890625, 63: -0.10703125, 64: -0.09859375, 126: -5.5e-7, 127: 0.0, 128: 5.5e-7,
    129: 3.25e-6, 130: 7.75e-6, 191: 0.10703125, 219: 0.50078125, 254: 0.99296875, 255: 1.0,
}  # fmt: skip
UNSIGNED = {
    0: 0.0, 1: 3.25e-7, 2: 7.75e-7, 3: 2.125e-6, 30: 9.71875e-4, 63: 0.010703125, 127: 0.103515625,
    183: 0.49726563, 254: 0.99648437, 255: 1.0,
}  # fmt: skip


@pytest.mark.parametrize(("signed", "anchors"), [(True, SIGNED), (False, UNSIGNED)])
def test_the_dynamic_tables_hold_the_published_values(signed, anchors):
    table = dynamic(signed=signed)
    for index, value in anchors.items():
        assert table[index].item() == pytest.approx(value, rel=1e-7, abs=0)


def test_the_dynamic_tables_have_the_published_sums_and_counts():
    signed, unsigned = dynamic(signed=True), dynamic(signed=False)
    assert signed.double().sum().item() == 1.0
    assert unsigned.double().sum().item() == pytest.approx(75.105263, abs=1e-6)
    assert [(signed < 0).sum(), (signed == 0).sum(), (signed > 0).sum()] == [127, 1, 128]
    assert [(unsigned == 0).sum(), (unsigned > 0).sum()] == [1, 255]
    per_decade = [((signed > 10.0**-e * 0.1) & (signed < 10.0**-e)).sum().item() for e in range(6, -1, -1)]
    assert per_decade == [1, 2, 4, 8, 16, 32, 64]


def test_the_closed_form_is_the_table():
    j = torch.arange(1, 128, dtype=torch.float64)
    i = j.log2().floor()
    magnitudes = 10 ** (i - 6) * (0.9 * (j + 0.5) / 2**i - 0.8)
    assert torch.allclose(dynamic()[128:255].double(), magnitudes, rtol=1e-7, atol=0)
    j = torch.arange(1, 255, dtype=torch.float64)
    i = (j + 1).log2().floor() - 1
    magnitudes = 10 ** (i - 6) * (0.9 * (j + 1.5) / 2 ** (i + 1) - 0.8)
    assert torch.allclose(dynamic(signed=False)[1:255].double(), magnitudes, rtol=1e-7, atol=0)


def test_the_default_table_differs_only_in_holding_minus_one():
    table = load_codebook()
    assert table[0] == -1.0
    assert torch.equal(table[1:], dynamic()[1:])
    assert torch.equal(dynamic_symmetric(), table)
    assert torch.equal(load_codebook(signed=False), dynamic(signed=False))


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize(("bits", "exponent_bits"), [(8, 7), (8, 4), (8, 1), (6, 5), (5, 3), (4, 3), (2, 1)])
def test_every_width_gives_a_sorted_table_that_ends_at_one(signed, bits, exponent_bits):
    table = dynamic(signed=signed, exponent_bits=exponent_bits, bits=bits)
    assert table.numel() == 2**bits
    assert torch.equal(table, table.sort().values)
    assert table[-1] == 1.0
    assert (table == 0).any()
    if signed:
        assert table.double().sum().item() == pytest.approx(1.0, abs=1e-6)


def test_four_bit_tables_have_the_values_of_the_rule():
    expected = [-0.8875, -0.6625, -0.4375, -0.2125, -0.0775, -0.0325, -0.0055, 0.0]
    expected += [0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875, 1.0]
    assert torch.allclose(dynamic(exponent_bits=3, bits=4), torch.tensor(expected))


def test_linear_tables_are_even():
    unsigned, signed = linear(signed=False), linear(signed=True)
    assert torch.allclose(unsigned.diff(), torch.full((255,), 1 / 255), rtol=1e-4)
    assert torch.allclose(signed.diff(), torch.full((255,), 2 / 255), rtol=1e-4)
    assert [unsigned[0], unsigned[-1], signed[0], signed[-1]] == [0, 1, -1, 1]
    assert torch.equal(signed, -signed.flip(0))


@pytest.mark.parametrize("name", ["dynamic", "linear"])
def test_a_flushing_table_is_the_published_one_with_a_second_zero(name):
    table, flushing = load_codebook(name, signed=False), load_codebook(f"{name}-flush", signed=False)
    assert len(flushing) == 256
    assert 0 < flushing[1] < 1e-20
    assert torch.equal(flushing[2:255], table[1:254])
    assert torch.equal(load_codebook(name, signed=True), load_codebook(f"{name}-flush", signed=True))


def test_tables_are_float32_whatever_the_default_dtype():
    old = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float16)
        assert {dynamic().dtype, dynamic(signed=False).dtype, linear().dtype} == {torch.float32}
        assert torch.equal(dynamic()[128:130], torch.tensor([5.5e-7, 3.25e-6], dtype=torch.float32))
        assert quantile(torch.randn(1000, dtype=torch.float32)).dtype == torch.float32
    finally:
        torch.set_default_dtype(old)


def test_quantiles_are_those_of_the_distribution():
    x = torch.rand(1 << 16, generator=torch.Generator().manual_seed(0))
    expected = torch.linspace(1 / 512, 511 / 512, 256)
    assert (quantile(x) - expected).abs().max() < 0.01
    assert (quantile_chunked(x) - expected).abs().max() < 0.01
    assert (quantile(x) - quantile_chunked(x)).abs().max() < 0.002


def test_the_chunked_estimate_averages_whole_chunks_and_leaves_out_a_short_half():
    x = torch.randn(4096 * 2 + 2047, generator=torch.Generator().manual_seed(1))
    halves = torch.stack([quantile(x[:4096]).double(), quantile(x[4096:8192]).double()]).mean(0).float()
    assert torch.allclose(quantile_chunked(x), halves, atol=1e-6)
    assert not torch.allclose(quantile_chunked(torch.cat([x, x[:1]])), halves, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: load_codebook("dynamik"), "unknown codebook 'dynamik'; choose one of dynamic-symmetric"),
        (lambda: dynamic(bits=9), "2 <= bits <= 8"),
        (lambda: dynamic(exponent_bits=8), "got bits=8, exponent_bits=8"),
        (lambda: linear(bits=1), "bits must be between 2 and 8, got 1"),
        (lambda: quantile(torch.randn(255)), "needs at least 256 values, got 255"),
        (lambda: quantile(torch.full((300,), float("nan"))), "NaN or Inf"),
        (lambda: quantile(torch.randn(300), offset=0.5), "offset must be between 0 and 0.5"),
        (lambda: quantile_chunked(torch.randn(3000), chunk=100), "chunk must hold at least 256"),
    ],
)
def test_bad_requests_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_midpoints_lie_between():
    table = load_codebook()
    assert ((midpoints(table) > table[:-1]) & (midpoints(table) < table[1:])).all()
