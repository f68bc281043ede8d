"""Why must the weight gradient not be int8? Wortsman et al. 2023a, section 2 and appendix.

The paper: rounding noise adds up over the inner dimension of a product, and that of the weight gradient, batch x
tokens, is by far the longest. Here the products of Trimtab's own quantizers are compared with float64. The noise is
measured absolute, as in the paper's formula, and relative to the product: for tokens of equal size the product grows
with the inner dimension as the noise does. What differs between the products are the scales. Those of the weight
gradient are maxima over all tokens, so the spread of the tokens' magnitudes, in X and in G, decides; the last table has
it for a trained GPT.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.analysis.answers import Figure, Line, Panel, Table
from trimtab.lab.executors.worker import run_cell
from trimtab.lab.questions.question import Checks, Measurement, Numbers, judge
from trimtab.lab.subjects import study_base
from trimtab.ops.int8 import int8_matmul, quantize_columnwise, quantize_rowwise, quantize_tensorwise
from trimtab.train import load_run
from trimtab.train.build import build_task
from trimtab.train.processes import Processes

TOKENS = (256, 2048, 16384)  # batch x tokens of the tables
SPREADS = (0.0, 1.0, 2.0, 3.0)  # deviation of the log of a token's magnitude
FEATURES = 256
SEEDS = 5
NOISE = 0.02  # of the paper's formula: rounding noise over the standard deviation of the values
INNER = (64, 1024, 16384)
DOTS = 4096  # inner products per point of the formula
STEPS = 300  # of the GPT whose tokens are measured
ERRORS = ("weight gradient", "forward", "input gradient")  # of the three products


def measure(folder: Path) -> dict[str, Any]:
    rows = [_measure_row(tokens, spread) for spread in SPREADS for tokens in TOKENS]
    noise = [{"inner": inner, **_measure_noise(inner)} for inner in INNER]
    return {"products": rows, "noise": noise, "trained": list(_measure_trained(folder / "gpt"))}


def _measure_row(tokens: int, spread: float) -> dict[str, float]:
    """Mean relative errors over SEEDS draws."""
    errors: dict[str, list[float]] = {}
    for seed in range(SEEDS):
        generator = torch.Generator().manual_seed(seed)
        x, g, w = (
            torch.randn(shape, generator=generator)
            for shape in ((tokens, FEATURES), (tokens, FEATURES), (FEATURES, FEATURES))
        )
        x_sizes, g_sizes = ((spread * torch.randn(tokens, 1, generator=generator)).exp() for _ in range(2))
        for name, error in product_errors(x * x_sizes, g * g_sizes, w).items():
            errors.setdefault(name, []).append(error)
    return {"tokens": tokens, "spread": spread, **{name: fmean(values) for name, values in errors.items()}}


def product_errors(x: Tensor, g: Tensor, w: Tensor) -> dict[str, float]:
    """Relative errors of the three int8 products of a layer: forward and input gradient with a scale per token, weight
    gradient with a scale per feature."""
    (x_codes, x_max), (g_codes, g_max) = quantize_rowwise(x), quantize_rowwise(g)
    w_codes, w_max = quantize_tensorwise(w)
    y, dx = int8_matmul(x_codes, w_codes.t(), x_max, w_max), int8_matmul(g_codes, w_codes, g_max, w_max)
    (x_codes, x_max), (g_codes, g_max) = quantize_columnwise(x), quantize_columnwise(g)
    dw = int8_matmul(g_codes.t(), x_codes, g_max, x_max)
    x, g, w = x.double(), g.double(), w.double()
    return {
        "forward": relative_error(y, x @ w.t()),
        "input gradient": relative_error(dx, g @ w),
        "weight gradient": relative_error(dw, g.t() @ x),
    }


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def _measure_noise(inner: int) -> dict[str, float]:
    """Variance that noise adds to an inner product, and k σq² (σu² + σv² + σq²) of the paper's formula.

    Noise of the products themselves: the variance of a difference of two large sums would be too inexact.
    """
    generator = torch.Generator().manual_seed(inner)
    squares = 0.0
    parts = max(DOTS * inner // 2**24, 1)  # 16 million values at once
    for _ in range(parts):
        u, v, a, b = (torch.randn(DOTS // parts, inner, generator=generator) for _ in range(4))
        added = ((u + NOISE * a) * (v + NOISE * b)).double().sum(1) - (u * v).double().sum(1)
        squares += added.square().sum().item()
    return {"measured": squares / DOTS, "predicted": inner * NOISE**2 * (2 + NOISE**2)}


def _measure_trained(folder: Path) -> Iterator[dict[str, Any]]:
    """Products of the layers of a small GPT after training, from one validation batch."""
    config = study_base("gpt-lab", STEPS)
    run_cell(folder, config)
    _, model, _ = load_run(folder)
    task = build_task(config, Processes())
    seen: dict[str, dict[str, Tensor]] = {}
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and "blocks" in name}
    for name, layer in layers.items():
        layer.register_forward_hook(_keep_input(seen.setdefault(name, {})))
        layer.register_full_backward_hook(_keep_gradient(seen[name]))
    task.loss(model, task.batches("validation", 0).next(config.batch)).backward()
    for name, layer in layers.items():
        x, g = seen[name]["x"], seen[name]["g"]
        errors = product_errors(x, g, layer.weight.detach())
        yield {"layer": name, "tokens": len(x), "spread of X": log_spread(x), "spread of G": log_spread(g), **errors}


def log_spread(rows: Tensor) -> float:
    """Deviation of the log of the rows' lengths; rows of zeros do not count."""
    lengths = rows.double().norm(dim=1)
    return float(lengths[lengths > 0].log().std())


def _keep_input(seen: dict[str, Tensor]) -> Any:
    def hook(_: nn.Module, given: tuple[Tensor, ...], __: Tensor) -> None:
        seen["x"] = given[0].detach().flatten(0, -2).contiguous()

    return hook


def _keep_gradient(seen: dict[str, Tensor]) -> Any:
    def hook(_: nn.Module, __: Any, gradients: tuple[Tensor, ...]) -> None:
        seen["g"] = gradients[0].detach().flatten(0, -2).contiguous()

    return hook


# --- Claims


def check(found: Numbers) -> Checks:
    by = {(row["tokens"], row["spread"]): row for row in found["products"]}
    last, first = TOKENS[-1], TOKENS[0]
    uneven = by[last, 2.0]
    claim = "tokens of uneven magnitude (spread 2): the weight gradient's error is at least 5 times the forward's"
    yield judge(claim, {name: uneven[name] for name in ("weight gradient", "forward")}, lambda a, b: a >= 5 * b)
    claim = "forward and input gradient, with a scale per token, stay below an error of 2%"
    errors = {name: max(row[name] for row in found["products"]) for name in ("forward", "input gradient")}
    yield judge(claim, errors, lambda *values: max(values) < 0.02)
    noise = {str(row["inner"]): row["measured"] / row["predicted"] for row in found["noise"]}
    claim = "the variance of the noise grows with the inner dimension as the formula says, within 10%"
    yield judge(claim, noise, lambda *ratios: all(abs(ratio - 1) < 0.1 for ratio in ratios), note="measured/predicted")
    claim = "the inner dimension alone increases the error: tokens of equal size, the longest by at least half"
    even = {str(tokens): by[tokens, 0.0]["weight gradient"] for tokens in (first, last)}
    yield judge(claim, even, lambda short, long: long >= 1.5 * short)
    trained = {name: max(row[name] for row in found["trained"]) for name in ERRORS}
    claim = "in a trained GPT the weight gradient has the largest error of the three"
    yield judge(claim, trained, lambda worst, *others: worst > max(others), note="worst layer")


def tables(found: Numbers) -> Iterable[Table]:
    rows = [(row["spread"], row["tokens"], *(row[name] for name in ERRORS)) for row in found["products"]]
    title = f"Relative errors of int8 products, {FEATURES} features, mean of {SEEDS} draws"
    yield Table(title, ("spread of token magnitudes", "batch x tokens", *ERRORS), rows)
    columns = ("inner dimension", "variance of the noise", "the paper's formula")
    noise = [(row["inner"], row["measured"], row["predicted"]) for row in found["noise"]]
    yield Table(f"Inner products with noise of {NOISE:g} in both operands", columns, noise)
    shown = ("layer", "tokens", "spread of X", "spread of G", *ERRORS)
    yield Table(
        f"A GPT of 147k parameters after {STEPS} steps", shown, [[row[x] for x in shown] for row in found["trained"]]
    )


def figures(found: Numbers) -> Iterable[Figure]:
    panels = []
    for name in ("weight gradient", "forward"):
        lines = [
            Line(f"spread {spread:g}", TOKENS, [row[name] for row in found["products"] if row["spread"] == spread])
            for spread in SPREADS
        ]
        panels.append(Panel(name, lines))
    yield Figure(
        name="errors",
        title="Relative error of int8 products against float64",
        x="batch x tokens",
        y="relative error",
        panels=panels,
        log_x=True,
        log_y=True,
    )


QUESTION = Measurement(
    "weight-gradient",
    __doc__,
    measure,
    check,
    minutes=1.0,
    paper="P1",
    design=(
        f"Products of {FEATURES} x {FEATURES} features over {', '.join(map(str, TOKENS))} tokens, {SEEDS} draws, the "
        f"tokens of X and of G multiplied by exp(spread * normal); the layers of one GPT (3x64) after {STEPS} "
        "steps, one batch."
    ),
    figures=figures,
    tables=tables,
)
