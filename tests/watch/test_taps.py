"""Layer statistics equal their definitions, and are recorded in training steps only."""

import math

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import seed
from trimtab.nn import GPT, GPTConfig, measure_rounding
from trimtab.nn.tap import listen
from trimtab.watch import Watch


def build(**switches: object) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(depth=2, width=32, heads=2, vocab=53, context=16, **switches))


def batch(rows: int = 4) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(53, (rows, 13), generator=seed(1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def train(model: GPT, watch: Watch, optimizer: torch.optim.Optimizer, parts: int = 1) -> None:
    tokens, targets = batch()
    for a, b in zip(tokens.chunk(parts), targets.chunk(parts), strict=True):
        (model.loss(a, b).loss / parts).backward()
    optimizer.step()
    optimizer.zero_grad()
    watch.step()


def record(model: GPT) -> dict[str, Tensor]:
    values: dict[str, Tensor] = {}
    with listen(model, lambda name, x: values.setdefault(name, x.double()), "*"), torch.no_grad():
        model.loss(*batch())
    return values


@pytest.mark.parametrize("parts", [1, 2])
def test_statistics_of_layers(parts):
    model = build()
    expected = record(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    watch = Watch(model, optimizer, deep_every=1, taps="*")
    train(model, watch, optimizer, parts)
    layers, totals = watch.record["layers"], watch.record["totals"]
    for i in range(2):
        block = f"transformer.blocks.{i}"
        z, q, k, out = (expected[f"{block}.{x}"] for x in ("attention.logits", "attention.q", "attention.k", "out"))
        a = z.softmax(-1)
        unit_q, unit_k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
        definitions = {
            "logit_max": z.max(),
            "entropy": -(a * a.clamp(min=1e-300).log()).sum(-1).mean(),
            "q_norm": q.norm(dim=-1).mean(),
            "k_norm": k.norm(dim=-1).mean(),
            "cosine": (unit_q @ unit_k.transpose(-1, -2)).mean(),
        }
        assert layers[f"{block}.attention"] == pytest.approx({n: float(x) for n, x in definitions.items()}, rel=1e-4)
        sizes = {"out_rms": out.square().mean().sqrt(), "out_max": out.abs().max()}
        assert layers[block] == pytest.approx({n: float(x) for n, x in sizes.items()}, rel=1e-4)
    assert "" not in layers
    assert totals["logz"] == pytest.approx(float(expected["logz"].mean()), rel=1e-4)
    logits = expected["logits"]
    for name, x in (("logit_mean", logits.mean()), ("logit_min", logits.min()), ("logit_max", logits.max())):
        assert totals[name] == pytest.approx(float(x), rel=1e-3, abs=1e-6)


def test_layers_are_values_at_deep_steps_only_and_never_during_an_evaluation():
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    watch = Watch(model, optimizer, deep_every=3)
    seen = []
    for _ in range(6):
        model.eval()
        model.embedding.weight.data *= 100
        with torch.no_grad():
            model.loss(*batch())
        model.embedding.weight.data /= 100
        model.train()
        train(model, watch, optimizer)
        seen.append(watch.record["layers"].get("transformer.blocks.0", {}).get("out_max"))
    assert [x is not None for x in seen] == [False, False, True, False, False, True]
    assert all(x < 50 for x in seen if x is not None)


def test_output_logits_are_computed_only_on_request():
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    watch = Watch(model, optimizer, deep_every=1)
    train(model, watch, optimizer)
    assert "logz" in watch.record["totals"]
    assert "logit_mean" not in watch.record["totals"]
    silent = Watch(model, optimizer, deep_every=1, taps=False)
    train(model, silent, optimizer)
    assert silent.record["layers"] == {}


def test_rounding_errors_of_int8_layers_are_those_that_measure_rounding_finds():
    model = build(linear="switchback")
    with measure_rounding(model) as seen:
        model.loss(*batch()).loss.backward()
    model.zero_grad()
    optimizer = torch.optim.AdamW(model.parameters())
    watch = Watch(model, optimizer, deep_every=1)
    train(model, watch, optimizer)
    layers = watch.record["layers"]
    for name, rounding in seen.items():
        found = {f"{operand}_error": rounding.error(operand) for operand in ("input", "weight", "grad")}
        assert {n: layers[name][n] for n in found} == pytest.approx(found, rel=1e-4)
    mean = math.fsum(x.error("input") for x in seen.values()) / len(seen)
    assert watch.record["totals"]["int8_error"] == pytest.approx(mean, rel=1e-4)
    watch.close()
    assert all(module.rounding is None for module in model.modules() if hasattr(module, "rounding"))


def test_a_nan_in_a_layer_is_an_alarm_with_its_name():
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    watch = Watch(model, optimizer, deep_every=1)
    with torch.no_grad():
        # A query and a value: PyTorch's attention on AVX-512 returns zeros, not NaN, where only the logits are NaN.
        model.transformer.blocks[1].attention.qkv.weight[[0, -1], 0] = math.nan
    loss = model.loss(*batch()).loss
    loss.backward()
    optimizer.step()
    alarms = watch.step(loss)
    where = {(alarm.signal, alarm.where) for alarm in alarms if alarm.kind == "non-finite"}
    assert ("logit_max", "transformer.blocks.1.attention") in where
    assert ("out_max", "transformer.blocks.1") in where
    assert ("loss", "loss") in where


def test_models_without_taps_are_watched():
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    watch = Watch(model, optimizer, deep_every=1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert watch.step(1.0) == []
    assert set(watch.record["tensors"]) == {"weight", "bias"}
