"""What 8 bits would do to Adam: the order of the data types in the paper, and a path that only the rounding changes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import assert_same, seed, spread
from tests.ops.rows import row
from trimtab import optim
from trimtab.ops import load_codebook
from trimtab.ops.step import RULES
from trimtab.ops.step import fused as step_module

SIZE = 20_011


def adam(gradient: Callable[[torch.Generator], Tensor], kind: type = torch.optim.AdamW) -> torch.optim.Optimizer:
    """Twenty steps with 32-bit state."""
    generator, p = seed(0), nn.Parameter(torch.zeros(SIZE))
    optimizer = kind([p], lr=1e-3, betas=(0.9, 0.995))
    for _ in range(20):
        p.grad = gradient(generator)
        optimizer.step()
    return optimizer


def uneven(generator: torch.Generator) -> Tensor:
    """Each element with a size of its own, over the decades of real gradients (specs: 10^(0.4 N - 3))."""
    scales = 10 ** (0.4 * torch.randn(SIZE, generator=seed(1)) - 3)
    return torch.randn(SIZE, generator=generator) * scales


def analyse(optimizer: torch.optim.Optimizer, method: str, block: int | None) -> optim.ErrorAnalysis:
    analysis = optim.ErrorAnalysis(method, block=block)
    analysis.observe(optimizer)
    return analysis


@pytest.mark.parametrize("kind", [torch.optim.AdamW, optim.AdamW])
@pytest.mark.parametrize(("method", "block"), [("quadratic", 256), ("dynamic", 256), ("quantile", None)])
def test_every_value_is_counted_once_per_look(kind, method, block):
    analysis, optimizer = optim.ErrorAnalysis(method, block=block), adam(uneven, kind)
    for looks in (1, 2):
        analysis.observe(optimizer)
        assert analysis.counts.shape == analysis.absolute.shape == analysis.relative.shape == (256, 256)
        assert analysis.counts.sum() == looks * SIZE
    assert (analysis.absolute[analysis.counts == 0] == 0).all()
    assert analysis.mean_absolute_error == pytest.approx(analysis.absolute.sum().item() / (2 * SIZE))


def test_the_errors_are_those_of_the_update():
    """With one value per block everything is a block's largest, and nothing is rounded."""
    optimizer = adam(uneven)
    exact = analyse(optimizer, "dynamic-symmetric", 1)
    assert exact.mean_relative_error < 1e-6
    rounded = analyse(optimizer, "dynamic-symmetric", 256)
    state = next(iter(optimizer.state.values()))
    m, v = state["exp_avg"].double(), state["exp_avg_sq"].double()
    u = m / (v.sqrt() + 1e-8)
    # Two roundings of one or two percent each, of m and of √v.
    assert 0.005 < rounded.mean_relative_error < 0.05
    assert 0.002 < rounded.mean_absolute_error / u.abs().mean() < 0.05


def test_the_order_of_the_data_types_is_that_of_the_paper():
    """specs/p2 4.1: linear is far worse than dynamic, and one scale for a tensor worse than one per block."""
    optimizer = adam(uneven)
    error = {
        (method, block): analyse(optimizer, method, block).mean_absolute_error
        for method in ("linear", "dynamic")
        for block in (None, 2048, 256)
    }
    assert error["dynamic", 256] < error["dynamic", 2048] < error["dynamic", None]
    for block in (None, 2048, 256):
        assert error["linear", block] > 10 * error["dynamic", block]


def test_the_default_is_the_code_of_the_optimizers_and_better_than_the_tables():
    """Also where the sizes of gradients in a block differ by a thousand."""
    optimizer = adam(uneven)
    mine, tables = optim.ErrorAnalysis(), optim.ErrorAnalysis("dynamic")
    for analysis in (mine, tables):
        analysis.observe(optimizer)
    assert mine.method == optim.AdamW([nn.Parameter(torch.ones(9))]).defaults["codebook"]
    assert mine.mean_absolute_error < tables.mean_absolute_error
    by_m, by_v = mine.counts.sum(1), mine.counts.sum(0)
    assert by_m[1] > 0 < by_m[255]  # codes -127 and 127, the largest of some block
    assert by_m[0] == 0  # and no -128
    assert by_v[251:].sum() >= SIZE // 256  # the largest root of a block is at the end of its window
    with pytest.raises(ValueError, match="unknown method 'cubic'; choose one of quadratic"):
        optim.ErrorAnalysis("cubic")


def test_one_scale_for_a_tensor_fails_on_spread_values():
    optimizer = adam(lambda generator: spread(SIZE, seed(2), decades=7) * torch.randn(SIZE, generator=generator))
    whole, blocks = analyse(optimizer, "dynamic", None), analyse(optimizer, "dynamic", 16)
    assert whole.mean_absolute_error > 3 * blocks.mean_absolute_error


def test_small_and_huge_tensors_are_left_out():
    params = [nn.Parameter(torch.ones(n)) for n in (100, 8192, 8193, 20_000)]
    optimizer = torch.optim.AdamW(params)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    analysis = optim.ErrorAnalysis(largest=10_000)
    analysis.observe(optimizer)
    assert analysis.counts.sum() == 8193


def test_what_cannot_be_analysed_is_refused():
    p = nn.Parameter(torch.ones(SIZE))
    p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="no state yet"):
        optim.ErrorAnalysis().observe(optim.AdamW([p]))
    for optimizer, message in (
        (optim.AdamW([p], bits=8), "already quantized; use one with bits=32"),
        (optim.SGD([p], momentum=0.9), "needs exp_avg and exp_avg_sq"),
        (torch.optim.Adagrad([p]), "needs exp_avg and exp_avg_sq"),
    ):
        optimizer.step()
        with pytest.raises(ValueError, match=message):
            optim.ErrorAnalysis().observe(optimizer)
    with pytest.raises(ValueError, match="block=None with method='quantile'"):
        optim.ErrorAnalysis("quantile")


# --- Only the rounding is different

ROWS = {
    "adamw": lambda t: row("AdamW", t, lr=1e-2, weight_decay=0.1),
    "momentum": lambda t: row("SGD", t, momentum=0.9, lr=1e-2, weight_decay=0.1),
    "lion": lambda t: row("Lion", t, lr=1e-2, weight_decay=0.1),
    "rms": lambda t: row("RMSprop", t, lr=1e-2, weight_decay=0.1),
    "ademamix": lambda t: row("AdEMAMix", t, lr=1e-2, weight_decay=0.1),
    "rms_momentum": lambda t: row("RMSprop", t, lr=1e-2, weight_decay=0.1, momentum=0.9),
    "rms_centered": lambda t: row("RMSprop", t, lr=1e-2, weight_decay=0.1),
    "rms_centered_momentum": lambda t: row("RMSprop", t, lr=1e-2, weight_decay=0.1, momentum=0.9),
}


@pytest.mark.parametrize("code", ["codebook", "quadratic"])
@pytest.mark.parametrize("rule", RULES)
def test_with_an_identity_quantizer_the_8_bit_path_is_the_32_bit_path(rule, code, monkeypatch):
    calls = []

    def keep(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        calls.append("encode")
        return x, torch.ones(-(-x.numel() // 256))

    def give(x: Tensor, *_: object) -> Tensor:
        calls.append("decode")
        return x

    monkeypatch.setattr(step_module, "quantize_reference", keep)
    monkeypatch.setattr(step_module, "dequantize_reference", give)
    monkeypatch.setattr(step_module, "encode_moments", lambda moments, *_, step: [keep(m) for m in moments])
    monkeypatch.setattr(step_module, "decode_moments", lambda states, *_: [give(s) for s in states])
    books = {"signed": load_codebook(), "unsigned": load_codebook(signed=False)}
    results = []
    for eight in (True, False):
        generator, p = seed(0), torch.randn(1003, generator=seed(1))
        states = [torch.zeros(1003) for _ in RULES[rule].signed]
        absmax = [torch.zeros(4) for _ in states] if eight else []
        for number in range(1, 6):
            grads, scalars = [torch.randn(1003, generator=generator)], ROWS[rule](torch.tensor([float(number)]))
            step_module.step_reference([p], grads, states, absmax, scalars, *books.values(), rule, code, 256)
        results.append([p, *states])
    assert calls == (["decode"] * len(states) + ["encode"] * len(states)) * 5
    for a, b in zip(*results, strict=True):
        assert_same(a, b)
