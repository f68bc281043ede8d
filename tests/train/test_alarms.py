"""Real trainings that fail: the alarms and the explanation name the step and the cause. A calm one gives none."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.runs import read_events, tiny
from tests.train.test_loop import changed_task, go
from trimtab.report.explain import Explanation, Finding, explain
from trimtab.schedule import LearningRate
from trimtab.train import OptimConfig, ScheduleConfig
from trimtab.train.config import WatchConfig, with_model


def train(folder: Path, lr: float, steps: int, *, rate: LearningRate | None = None, **model: Any) -> Explanation:
    """AdamW, watched as by default: tensors at every 4th step, layers at every 40th."""
    config = tiny(folder, steps=steps, eval_every=1000, checkpoint_every=1000, watch=WatchConfig())
    optim = OptimConfig(name="adamw", lr=lr, bits=32)
    schedule = ScheduleConfig(lr=rate or LearningRate(kind="cosine", warmup=steps // 20))
    config = replace(config, optim=optim, schedule=schedule)
    go(with_model(config, **{"qk_norm": "off", "z_loss": 0.0} | model), folder / "run")
    return explain(folder / "run")


def alarms(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [alarm for alarm in read_events(folder / "run", "alarm") if alarm["kind"] == kind]


def only(found: Explanation, kind: str) -> Finding:
    (finding,) = [finding for finding in found.findings if finding.kind == kind]
    return finding


def test_a_calm_run_has_no_alarm_and_no_problem(tmp_path):
    assert not train(tmp_path, 1e-2, 200)
    assert read_events(tmp_path / "run", "alarm") == []


def test_attention_logits_that_exploded_before_the_first_look_are_reported(tmp_path):
    """They grow within a few steps and then stay: no early value is small."""
    found = only(train(tmp_path, 0.2, 120, rate=LearningRate(kind="cosine")), "attention logits")
    (alarm,) = alarms(tmp_path, "attention logits")
    assert alarm["step"] == found.step == 40
    assert alarm["value"] > 100
    assert "they grew before the first measurement: before training they are below 10" in str(found)
    assert "qk-norm" in found.advice
    assert "qk-norm" in alarm["advice"]


def test_qk_norm_is_not_recommended_to_a_run_that_has_it(tmp_path):
    found = only(train(tmp_path, 2.0, 120, qk_norm="shared"), "attention logits")
    (alarm, *_) = alarms(tmp_path, "attention logits")
    for advice in (found.advice, alarm["advice"]):
        assert "qk-norm" not in advice
        assert "lower" in advice
        assert "the gains of the norm, or kappa, are too large" in advice


def scrambled_at(step: int) -> Any:
    """A loss that gets one batch of random tokens."""
    calls = [0]

    def change(real: Any) -> Any:
        def loss(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
            calls[0] += model.training
            if calls[0] == step and model.training:
                shape = batch["targets"].shape
                batch = batch | {"targets": torch.randint(256, shape, generator=torch.Generator().manual_seed(0))}
            found: torch.Tensor = real(model, batch)
            return found

        return loss

    return change


def test_one_bad_batch_between_two_looks_is_reported_with_its_step(tmp_path, monkeypatch):
    changed_task(monkeypatch, loss=scrambled_at(82))
    found = train(tmp_path, 1e-2, 120)
    (alarm,) = read_events(tmp_path / "run", "alarm")
    assert (alarm["kind"], alarm["step"], alarm["where"]) == ("loss spike", 82, "loss")
    assert "check the batch of this step" in alarm["advice"]
    assert [(finding.kind, finding.step) for finding in found.findings] == [("bad batch", 82)]
    assert "gradient clipping" not in found.findings[0].advice  # it has it


@pytest.mark.parametrize(("lr", "warmup"), [(10.0, 0), (100.0, 20)])
def test_an_explosion_in_the_first_steps_is_explained(tmp_path, lr, warmup):
    found = train(tmp_path, lr, 20, rate=LearningRate(kind="constant", warmup=warmup)).findings[0]
    (alarm,) = alarms(tmp_path, "explosion")
    assert found.kind == "explosion"
    assert alarm["step"] == found.step == 2
    now = lr * min(1, 2 / (warmup or 1))
    assert f"at learning rate {now:g}" in found.what
    assert "the loss was 6.15" in found.evidence[0]
    assert f"at most a tenth of {now:g}" in found.advice
    assert ("longer warmup" in found.advice) == (warmup == 0)  # 20 of 20 steps are long enough
    assert "before training" in alarm["advice"]
    assert f"the learning rate (now {lr * min(1, 3 / (warmup or 1)):g})" in alarm["advice"]  # confirmed at step 3


def test_a_run_that_ends_above_its_best_by_more_than_the_margin_of_the_lab_diverges(tmp_path):
    """The learning rate rises until the end; the loss ends 10 to 40 % above its best, by the seed."""
    found = only(train(tmp_path, 1.2, 300, rate=LearningRate(kind="constant", warmup=300)), "divergence")
    assert "above it" in found.what
    assert "longer warmup" not in found.advice  # the whole run is one
    assert "a lower learning rate" in found.advice
