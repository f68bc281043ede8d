"""The fused step: the rules against PyTorch and the papers, the kernels against the definition."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.conftest import assert_same, seed, spread
from tests.ops.rows import row
from trimtab.ops import fused_step, gradient_norms, gradient_ratios, load_codebook, step_norms, step_rules
from trimtab.ops.blockwise import count_blocks, dequantize_blockwise
from trimtab.ops.codebook import dynamic
from trimtab.ops.step.fused import (
    gradient_norms_native,
    gradient_norms_reference,
    norms_native,
    norms_reference,
    ratios_native,
    ratios_reference,
    step_native,
    step_reference,
)
from trimtab.ops.step.rules import EPS, GRAD_SCALE, RULES, SCALARS

SIGNED, UNSIGNED = load_codebook(), load_codebook(signed=False)
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, 7, 255, 256, 1000, 3001, 0]

# One optimizer per rule, with everything it can do switched on.
ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "adamw": lambda t: row("AdamW", t, lr=1e-2, weight_decay=0.1, grad_scale=0.5),
    "momentum": lambda t: row("SGD", t, momentum=0.9, lr=1e-2, weight_decay=0.1, nesterov=True, dampening=0.0),
    "lion": lambda t: row("Lion", t, lr=1e-2, weight_decay=0.1),
    "rms": lambda t: row("RMSprop", t, lr=1e-2, weight_decay=0.01),
    "ademamix": lambda t: row("AdEMAMix", t, lr=1e-2, weight_decay=0.1),
    "rms_momentum": lambda t: row("RMSprop", t, lr=1e-2, weight_decay=0.01, momentum=0.9),
    "rms_centered": lambda t: row("RMSprop", t, lr=1e-2, weight_decay=0.01, alpha=0.9),
    "rms_centered_momentum": lambda t: row("RMSprop", t, lr=1e-2, weight_decay=0.01, alpha=0.9, momentum=0.9),
}


class Tensors:
    """Parameters and fresh state of some sizes."""

    def __init__(
        self,
        rule: str,
        sizes: list[int],
        *,
        quantized: bool,
        block: int = 256,
        dtype: torch.dtype = torch.float32,
        code: str = "codebook",
    ):
        generator = seed(0)
        self.rule, self.block, self.quantized, self.code = rule, block, quantized, code
        self.params = [torch.randn(n, generator=generator).to(dtype) for n in sizes]
        zeros = [127 if signed else 0 for signed in RULES[rule].signed]
        if quantized:
            self.states = [[torch.full((n,), zero, dtype=torch.uint8) for n in sizes] for zero in zeros]
            self.absmax = [[torch.zeros(count_blocks(n, block)) for n in sizes] for _ in zeros]
        else:
            self.states = [[torch.zeros(n) for n in sizes] for _ in zeros]
            self.absmax = []

    def all(self) -> list[Tensor]:
        return [*self.params, *(x for group in (*self.states, *self.absmax) for x in group)]

    def arguments(self, grads: list[Tensor], scalars: Tensor) -> tuple:
        flat = [[x for group in groups for x in group] for groups in (self.states, self.absmax)]
        return (self.params, grads, *flat, scalars, SIGNED, UNSIGNED, self.rule, self.code, self.block)

    def ratio_arguments(self, grads: list[Tensor], scalars: Tensor) -> tuple:
        absmax = self.absmax[-1] if self.quantized else []
        return (grads, grads, self.states[-1], absmax, scalars, SIGNED, UNSIGNED, "rms", self.code, self.block)

    def ratios(self, grads: list[Tensor], scalars: Tensor) -> Tensor:
        absmax = self.absmax[-1] if self.quantized else None
        return gradient_ratios(grads, self.states[-1], scalars, absmax=absmax, block=self.block, code=self.code)

    def step(self, grads: list[Tensor], scalars: Tensor) -> None:
        absmax = self.absmax if self.quantized else None
        fused_step(self.rule, self.params, grads, self.states, scalars, absmax=absmax, block=self.block, code=self.code)

    def norms(self, grads: list[Tensor], scalars: Tensor) -> Tensor:
        absmax = self.absmax if self.quantized else None
        return step_norms(
            self.rule, self.params, grads, self.states, scalars, absmax=absmax, block=self.block, code=self.code
        )


def steps(number: int, count: int = 1) -> Tensor:
    return torch.full((count,), float(number))


# --- Kernels against the definition


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("block", [256, 33])
@pytest.mark.parametrize("code", ["float32", "codebook", "quadratic"])
@pytest.mark.parametrize("rule", RULES)
def test_native_steps_match_the_reference_to_the_last_bit(level, rule, code, block, dtype):
    quantized = code != "float32"
    mine, theirs = (
        Tensors(rule, SIZES, quantized=quantized, block=block, dtype=dtype, code=code if quantized else "codebook")
        for _ in range(2)
    )
    generator = seed(1)
    for number in range(1, 4):
        grads = [spread(n, generator, decades=4).to(dtype) for n in SIZES]
        row = ROWS[rule](steps(number, len(SIZES)))
        got, expected = norms_native(*mine.arguments(grads, row)), norms_reference(*theirs.arguments(grads, row))
        # Sums are in another order; float32 sums over one block, float64 between blocks.
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-10)
        if not RULES[rule].signed[-1]:
            torch.testing.assert_close(
                ratios_native(*mine.ratio_arguments(grads, row)), ratios_reference(*theirs.ratio_arguments(grads, row)),
                rtol=1e-5, atol=1e-10,
            )  # fmt: skip
        step_native(*mine.arguments(grads, row))
        step_reference(*theirs.arguments(grads, row))
        for a, b in zip(mine.all(), theirs.all(), strict=True):
            assert_same(a, b)


def test_gradients_may_have_another_dtype_than_parameters(level):
    mine, theirs = (Tensors("adamw", [1000], quantized=True, dtype=torch.bfloat16) for _ in range(2))
    grads = [spread(1000, seed(1), decades=4)]
    step_native(*mine.arguments(grads, ROWS["adamw"](steps(1))))
    step_reference(*theirs.arguments(grads, ROWS["adamw"](steps(1))))
    for a, b in zip(mine.all(), theirs.all(), strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("quantized", [True, False])
def test_the_number_of_threads_changes_nothing(quantized):
    results, before, sizes = [], torch.get_num_threads(), [100_001, 50, 70_000]
    grads = [spread(n, seed(2), decades=4) for n in sizes]
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        x = Tensors("adamw", sizes, quantized=quantized)
        x.step(grads, ROWS["adamw"](steps(1, 3)))
        row = ROWS["adamw"](steps(2, 3))
        results.append([x.norms(grads, row), x.ratios(grads, row), gradient_norms(grads), *x.all()])
    torch.set_num_threads(before)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert_same(a, b)


def test_many_tensors_in_one_call_equal_one_at_a_time():
    sizes = [5, 4096, 100, 1, 70_000]
    together = Tensors("adamw", sizes, quantized=True)
    grads = [spread(n, seed(n), decades=4) for n in sizes]
    rows = ROWS["adamw"](torch.tensor([1.0, 2, 3, 4, 5]))
    alone = Tensors("adamw", sizes, quantized=True)
    together.step(grads, rows)
    for i in range(len(sizes)):
        fused_step(
            "adamw", [alone.params[i]], [grads[i]], [[s[i]] for s in alone.states], rows[i : i + 1],
            absmax=[[a[i]] for a in alone.absmax],
        )  # fmt: skip
    for a, b in zip(together.all(), alone.all(), strict=True):
        assert_same(a, b)


def test_gradients_on_two_devices_are_refused():
    with pytest.raises(ValueError, match=r"grads\[1\] is on meta but grads\[0\] is on cpu"):
        gradient_norms([torch.ones(3), torch.ones(3, device="meta")])


def test_gradient_norms_match_the_reference(level):
    grads = [spread(n, seed(n), decades=4).to(d) for n, d in zip([1, 1000, 40_001], FLOATS, strict=True)]
    torch.testing.assert_close(gradient_norms_native(grads), gradient_norms_reference(grads), rtol=1e-5, atol=0)
    grads[1][3] = math.inf
    assert gradient_norms(grads).isfinite().tolist() == [True, False, True]


# --- The rules against PyTorch's own optimizers, 32-bit state


def _torch_equivalent(rule: str) -> tuple[Callable[[Tensor], Tensor], Callable[[list[Tensor]], torch.optim.Optimizer]]:
    return {
        "adamw": (
            lambda t: row("AdamW", t, lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
            lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
        ),
        "momentum": (
            lambda t: row("SGD", t, lr=1e-2, momentum=0.9, dampening=0.1, weight_decay=0.1),
            lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, dampening=0.1, weight_decay=0.1),
        ),
        "nesterov": (
            lambda t: row("SGD", t, lr=1e-2, momentum=0.9, weight_decay=0.1, nesterov=True),
            lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.1, nesterov=True),
        ),
        "rms": (
            lambda t: row("RMSprop", t, lr=1e-2, alpha=0.9, eps=1e-6, weight_decay=0.1),
            lambda p: torch.optim.RMSprop(p, lr=1e-2, alpha=0.9, eps=1e-6, weight_decay=0.1),
        ),
        "rms_momentum": (
            lambda t: row("RMSprop", t, lr=1e-3, alpha=0.9, eps=1e-6, weight_decay=0.1, momentum=0.8),
            lambda p: torch.optim.RMSprop(p, lr=1e-3, alpha=0.9, eps=1e-6, weight_decay=0.1, momentum=0.8),
        ),
        "rms_centered": (
            lambda t: row("RMSprop", t, lr=1e-2, alpha=0.9, eps=1e-6, weight_decay=0.1),
            lambda p: torch.optim.RMSprop(p, lr=1e-2, alpha=0.9, eps=1e-6, weight_decay=0.1, centered=True),
        ),
        "rms_centered_momentum": (
            lambda t: row("RMSprop", t, lr=1e-3, alpha=0.9, eps=1e-6, weight_decay=0.1, momentum=0.8),
            lambda p: torch.optim.RMSprop(
                p, lr=1e-3, alpha=0.9, eps=1e-6, weight_decay=0.1, momentum=0.8, centered=True
            ),
        ),
        "adagrad": (
            lambda t: row("Adagrad", t, lr=1e-2, lr_decay=0.1, weight_decay=0.1),
            lambda p: torch.optim.Adagrad(p, lr=1e-2, lr_decay=0.1, weight_decay=0.1),
        ),
    }[rule]


@pytest.mark.parametrize(
    "name",
    ["adamw", "momentum", "nesterov", "rms", "adagrad", "rms_momentum", "rms_centered", "rms_centered_momentum"],
)
def test_the_rules_are_those_of_torch(name):
    rule = {"nesterov": "momentum", "adagrad": "rms"}.get(name, name)
    rows, make = _torch_equivalent(name)
    x = Tensors(rule, [1000], quantized=False)
    theirs = torch.nn.Parameter(x.params[0].clone())
    optimizer = make([theirs])
    for number in range(1, 11):
        grad = spread(1000, seed(number), decades=3)
        theirs.grad = grad.clone()
        optimizer.step()
        x.step([grad], rows(steps(number)))
        # Ours rounds in another order: a few units in the last place of a parameter of size 1.
        torch.testing.assert_close(x.params[0], theirs.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", ["rms_centered", "rms_centered_momentum"])
def test_a_variance_that_rounding_makes_negative_counts_as_zero(rule):
    """v - mean² = -1: torch's root would be NaN."""
    for step in (step_native, step_reference):
        x = Tensors(rule, [300], quantized=False)
        before = x.params[0].clone()
        x.states[-2][0].fill_(2.0)
        x.states[-1][0].fill_(3.0)
        row = step_rules.rows(steps(1), beta2=1.0, beta3=1.0, beta1=0.5, gain1=1.0, eps=0.25, lr=1.0)
        step(*x.arguments([torch.full((300,), 0.5)], row))
        assert_same(x.params[0], before - 2)


def test_lion_follows_its_equations():
    x = Tensors("lion", [1000], quantized=False)
    p, m = x.params[0].double(), torch.zeros(1000, dtype=torch.float64)
    for number in range(1, 6):
        grad = spread(1000, seed(number), decades=2)
        x.step([grad], row("Lion", steps(number), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1))
        g = grad.double()
        p = p * (1 - 1e-2 * 0.1) - 1e-2 * (0.9 * m + 0.1 * g).sign()
        m = 0.99 * m + 0.01 * g
        torch.testing.assert_close(x.params[0].double(), p, rtol=0, atol=1e-5)


def test_ademamix_follows_its_equations():
    x = Tensors("ademamix", [1000], quantized=False)
    p = x.params[0].double()
    m, slow, v = (torch.zeros(1000, dtype=torch.float64) for _ in range(3))
    for t in range(1, 6):
        grad = spread(1000, seed(t), decades=2)
        x.step([grad], row("AdEMAMix", steps(t), lr=1e-2, betas=(0.9, 0.99, 0.999), alpha=3.0, weight_decay=0.1))
        g = grad.double()
        m, slow, v = 0.9 * m + 0.1 * g, 0.999 * slow + 0.001 * g, 0.99 * v + 0.01 * g * g
        update = (m / (1 - 0.9**t) + 3 * slow) / ((v / (1 - 0.99**t)).sqrt() + 1e-8)
        p = p * (1 - 1e-3) - 1e-2 * update
        torch.testing.assert_close(x.params[0].double(), p, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("clipped", "expected"), [(False, [0.80503169, 1.01050522]), (True, [0.81009377, 1.01671778])])
def test_stable_adamw_gives_the_worked_example(clipped, expected):
    p, m, v = torch.ones(2), torch.zeros(2), torch.zeros(2)
    options = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.2, "decay_clipped": clipped}
    rms = torch.zeros(1)
    for number, grad in ((1, [1.0, -2.0]), (2, [10.0, 20.0])):
        g, t = torch.tensor(grad), steps(number)
        ratios = gradient_ratios([g], [v], step_rules.debiased(row("StableAdamW", t, **options)))
        rms = step_rules.rms_from_ratios(ratios, torch.tensor([2]))
        fused_step("adamw", [p], [g], [[m], [v]], row("StableAdamW", t, sums=ratios[:, None], numel=2, **options))
        if number == 1:
            assert rms.item() == pytest.approx(1.0, abs=1e-6)
            assert p.tolist() == pytest.approx([0.8800001, 1.0799999], abs=1e-6)
    assert rms.item() == pytest.approx(1.403742, abs=1e-5)
    assert (m / (1 - 0.9**2)).tolist() == pytest.approx([5.736842, 9.578947], rel=1e-5)
    assert (v / (1 - 0.99**2)).tolist() == pytest.approx([50.74874, 202.99497], rel=1e-5)
    assert p.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("beta2", [0.5, 0.9, 0.99])
def test_the_rms_stays_below_its_bound(beta2):
    x = Tensors("adamw", [512], quantized=False)
    for number in range(1, 30):
        grad = spread(512, seed(number), decades=1) * (1000.0 if number == 20 else 1.0)
        t, options = steps(number), {"lr": 0.0, "betas": (0.9, beta2)}
        ratios = x.ratios([grad], step_rules.debiased(row("StableAdamW", t, **options)))
        rms = step_rules.rms_from_ratios(ratios, torch.tensor([512]))
        assert rms.item() <= (1 - beta2) ** -0.5 * 1.0001
        if number == 20:
            assert rms.item() > 0.95 * min((1 - beta2) ** -0.5, (1 - beta2**20) ** 0.5 / (1 - beta2) ** 0.5)
        x.step([grad], row("StableAdamW", t, **options))


@pytest.mark.parametrize("quantized", [True, False])
def test_lamb_and_lars_really_apply_their_norms(quantized):
    grad = spread(5000, seed(3), decades=1)
    for rule, kind in (("adamw", "LAMB"), ("momentum", "LARS")):
        x = Tensors(rule, [5000], quantized=quantized)
        before = x.params[0].clone()
        options = {"lr": 0.1, "weight_decay": 0.01, "max_unorm": None}
        sums = x.norms([grad], row(kind, steps(1), **options))
        x.step([grad], row(kind, steps(1), sums=sums, **options))
        # The trust ratio makes the step as long as lr times the weights, whatever the gradient's size.
        moved = (x.params[0] - before).norm() / before.norm()
        assert moved.item() == pytest.approx(0.1, rel=1e-4)


def test_trust_can_be_bounded_and_is_one_where_a_norm_is_zero():
    sums = torch.tensor([[4.0, 1.0], [1.0, 16.0], [0.0, 1.0], [1.0, 0.0]])
    assert step_rules.trust_from_norms(sums).tolist() == [2.0, 0.25, 1.0, 1.0]
    assert step_rules.trust_from_norms(sums, bound=1.0).tolist() == [1.0, 0.25, 1.0, 1.0]


# --- 8-bit state


def test_the_first_step_is_exact_because_it_uses_the_fresh_moments():
    narrow, wide = Tensors("adamw", [3000], quantized=True), Tensors("adamw", [3000], quantized=False)
    grad = spread(3000, seed(5), decades=6)
    for x in (narrow, wide):
        x.step([grad], ROWS["adamw"](steps(1)))
    assert_same(narrow.params[0], wide.params[0])
    assert not torch.equal(dequantize_blockwise(narrow.states[0][0], narrow.absmax[0][0], SIGNED), wide.states[0][0])


def _run_adam(quantized: bool, block: int = 256) -> Tensor:
    """200 steps on gradients whose scale differs per element (specs/p2 section 4.1); returns the last update."""
    generator, count = seed(0), 65_536
    scale = 10 ** (0.4 * torch.randn(count, generator=generator) - 3)
    x = Tensors("adamw", [count], quantized=quantized, block=block)
    for number in range(1, 201):
        before = x.params[0].clone()
        grad = torch.randn(count, generator=generator) * scale
        x.step([grad], row("AdamW", steps(number), lr=1.0, betas=(0.9, 0.995)))
    return before - x.params[0]


def test_recursive_8_bit_adam_stays_as_close_as_the_paper_says():
    exact, narrow = _run_adam(False), _run_adam(True)
    error = (narrow - exact).abs().sum() / exact.abs().sum()
    assert error.item() == pytest.approx(0.07, abs=0.01)
    assert narrow.abs().max() < 2.0


def test_a_positive_second_moment_is_never_stored_as_zero():
    x = Tensors("adamw", [256], quantized=True)
    grad = torch.full((256,), 1e-6)
    grad[0], grad[1] = 1e3, 0.0
    for number in range(1, 4):
        x.step([grad], ROWS["adamw"](steps(number)))
        codes = x.states[1][0]
        assert codes[0] == 255
        assert codes[1] == 0
        assert (codes[2:] == 1).all()


def test_wide_blocks_do_not_blow_up():
    # A peer's 8-bit AdamW moved parameters by 9.9 here, because small second moments were rounded to zero.
    x = Tensors("adamw", [4096], quantized=True)
    before, generator = x.params[0].clone(), seed(7)
    scale = 10 ** (-6 * torch.rand(4096, generator=generator))
    for number in range(1, 31):
        grad = torch.randn(4096, generator=generator) * scale
        x.step([grad], row("AdamW", steps(number), lr=1e-4))
    assert (x.params[0] - before).abs().max() < 0.01


@pytest.mark.parametrize("beta", [0.9, 0.99, 0.999])
def test_a_steady_negative_momentum_keeps_its_size(beta):
    x = Tensors("momentum", [256], quantized=True)
    grad = -torch.rand(256, generator=seed(8))
    row = step_rules.rows(torch.ones(1), beta1=beta, gain1=1 - beta, mix_m=1.0, lr=0.0)
    for _ in range(round(5 / (1 - beta))):
        x.step([grad], row)
    m = dequantize_blockwise(x.states[0][0], x.absmax[0][0], SIGNED)
    assert m.min().item() == pytest.approx(grad.min().item(), rel=0.02)


def test_zero_gradients_do_no_harm():
    for rule in RULES:
        x = Tensors(rule, [300], quantized=True)
        before = x.params[0].clone()
        for number in range(1, 4):
            x.step(
                [torch.zeros(300)],
                step_rules.rows(
                    steps(number), beta1=0.9, gain1=0.1, beta2=0.99, gain2=0.01, eps=1e-8, lr=1.0, mix_m=1.0
                ),
            )
        assert_same(x.params[0], before)
        assert all((a == 0).all() for group in x.absmax for a in group)


@pytest.mark.parametrize("block", [10**10, 2**63 - 1])
def test_a_block_longer_than_every_tensor_is_one_block(block):
    mine, theirs = Tensors("adamw", [100, 7], quantized=True, block=block), Tensors("adamw", [100, 7], quantized=True)
    grads = [spread(n, seed(n), decades=3) for n in (100, 7)]
    for x in (mine, theirs):
        x.step(grads, ROWS["adamw"](steps(1, 2)))
    for a, b in zip(mine.all(), theirs.all(), strict=True):
        assert_same(a, b)


def test_rules_are_worked_out_in_float64_whatever_they_are_given():
    expected = row("AdamW", steps(2), lr=2.0**-10, weight_decay=0.1)
    assert_same(row("AdamW", steps(2), lr=torch.tensor(2.0**-10, dtype=torch.bfloat16), weight_decay=0.1), expected)
    expected, old = row("SGD", steps(2), lr=0.1, momentum=0.9, dampening=0.1), torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        number = torch.full((1,), 2.0, dtype=torch.float32)
        assert_same(row("SGD", number, lr=0.1, momentum=0.9, dampening=0.1), expected)
    finally:
        torch.set_default_dtype(old)


@pytest.mark.parametrize(
    ("number", "message"),
    [(torch.zeros(1), "steps start at 1, got 0"), (torch.tensor(1.0), r"steps must be a vector .* \(\)")],
)
def test_impossible_steps_are_refused(number, message):
    with pytest.raises(ValueError, match=message):
        row("AdamW", number, lr=0.1)


def test_compiled_code_steps_without_a_graph_break():
    mine, theirs = Tensors("adamw", [300], quantized=True), Tensors("adamw", [300], quantized=True)
    grads, row = [spread(300, seed(11), decades=3)], ROWS["adamw"](steps(1))
    torch.compile(mine.step, fullgraph=True, backend="aot_eager")(grads, row)
    theirs.step(grads, row)
    for a, b in zip(mine.all(), theirs.all(), strict=True):
        assert_same(a, b)


# --- Non-finite gradients


@pytest.mark.parametrize("rule", RULES)
def test_a_nan_gradient_makes_its_parameter_nan_under_every_rule(rule):
    for step in (step_native, step_reference):
        for quantized in (True, False):
            x = Tensors(rule, [300], quantized=quantized)
            grad = torch.ones(300)
            grad[7] = math.nan
            step(*x.arguments([grad], ROWS[rule](steps(1))))
            assert x.params[0].isnan().nonzero().flatten().tolist() == [7]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_gradient_is_never_hidden(bad):
    for step in (step_native, step_reference):
        x = Tensors("adamw", [600], quantized=True)
        grad = torch.ones(600)
        grad[300] = bad
        step(*x.arguments([grad], ROWS["adamw"](steps(1))))
        assert x.params[0][300].isnan()
        assert x.params[0].isnan().sum() == 1
        assert x.absmax[0][0].isnan().tolist() == [False, True, False]
        step(*x.arguments([torch.ones(600)], ROWS["adamw"](steps(2))))
        assert x.params[0][256:512].isnan().all()
        assert x.params[0][:256].isfinite().all()


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("column", [GRAD_SCALE, EPS])
def test_a_tensor_whose_row_is_not_finite_does_not_change(quantized, column):
    for step in (step_native, step_reference):
        x = Tensors("adamw", [300, 300], quantized=quantized)
        before = [y.clone() for y in x.all()]
        rows = ROWS["adamw"](steps(1, 2))
        rows[0, column] = math.nan
        step(*x.arguments([torch.ones(300), torch.ones(300)], rows))
        untouched = [torch.equal(a, b) for a, b in zip(x.all(), before, strict=True)]
        assert untouched[::2] == [True] * (len(untouched) // 2)
        assert untouched[1] is False


def test_the_gradient_norm_finds_the_tensor_to_skip():
    x = Tensors("adamw", [300, 300], quantized=True)
    grads = [torch.ones(300), torch.ones(300)]
    grads[0][5] = math.nan
    skip = torch.where(gradient_norms(grads).isfinite(), 1.0, math.nan)
    before = x.params[0].clone()
    x.step(grads, row("AdamW", steps(1, 2), lr=0.1, grad_scale=skip))
    assert_same(x.params[0], before)
    assert x.params[1].isfinite().all()


# --- Interface


def test_the_ops_pass_the_checks_of_torch_library():
    x = Tensors("adamw", [300], quantized=True)
    arguments = x.arguments([torch.ones(300)], ROWS["adamw"](steps(1)))
    torch.library.opcheck(torch.ops.trimtab.fused_step.default, (*arguments, []))
    torch.library.opcheck(torch.ops.trimtab.step_norms.default, (*arguments, []))
    torch.library.opcheck(torch.ops.trimtab.gradient_norms.default, ([torch.ones(300)],))
    torch.library.opcheck(
        torch.ops.trimtab.gradient_ratios.default, (*x.ratio_arguments([torch.ones(300)], ROWS["adamw"](steps(1))), [])
    )


def test_empty_calls_do_nothing():
    fused_step("adamw", [], [], [[], []], torch.zeros(0, len(SCALARS)))
    assert step_norms("adamw", [], [], [[], []], torch.zeros(0, len(SCALARS))).shape == (0, 2)
    assert gradient_ratios([], [], torch.zeros(0, len(SCALARS))).shape == (0,)
    assert gradient_norms([]).shape == (0,)


def _call(**changes: object) -> None:
    x = Tensors("adamw", [300], quantized=True)
    arguments = {
        "rule": "adamw", "params": x.params, "grads": [torch.ones(300)], "states": x.states,
        "scalars": ROWS["adamw"](steps(1)), "absmax": x.absmax,
    }  # fmt: skip
    fused_step(**(arguments | changes))  # type: ignore[arg-type]


shared = torch.zeros(300)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rule": "adam"}, "unknown rule 'adam'; choose one of adamw, momentum"),
        ({"grads": []}, "got 1 params but 0 grads"),
        ({"states": [[]]}, r"rule 'adamw' needs states as 2 lists of 1 tensors, got lists of lengths \[0\]"),
        ({"grads": [torch.ones(299)]}, r"grads\[0\] must have shape \(300,\)"),
        ({"grads": [torch.ones(600)[::2]]}, r"grads\[0\] must be contiguous"),
        (
            {"grads": [torch.ones(300, dtype=torch.float64)]},
            r"grads\[0\] must be float32 or bfloat16 or float16, got float64",
        ),
        ({"params": [torch.ones(300, device="meta")]}, "is on"),
        ({"absmax": None}, r"states\[0\]\[0\] must be float32, got uint8"),
        ({"block": 64}, r"absmax\[0\]\[0\] must have shape \(5,\) \(one per block of 64\)"),
        ({"scalars": torch.zeros(1, 3)}, r"scalars must have shape \(1, 15\)"),
        ({"params": [shared], "grads": [shared]}, r"share memory"),
        ({"unsigned": dynamic(signed=False, exponent_bits=4)}, "must hold one zero at most"),
        ({"signed": torch.zeros(300)}, "codebook must be a vector of 2 to 256"),
    ],
)
def test_bad_input_is_refused_with_what_would_work(changes, message):
    with pytest.raises(ValueError, match=message):
        _call(**changes)


def test_unknown_scalars_are_refused():
    with pytest.raises(ValueError, match=r"unknown scalars \['learning_rate'\]; choose from grad_scale"):
        step_rules.rows(steps(1), learning_rate=0.1)
