"""The subjects whose gradients change: larger in the phases only, with the same loss."""

import pytest
import torch

from trimtab.lab import changing
from trimtab.lab.changing import CONTRAST, EVERY, LARGER, LENGTH, is_changed


def test_phases_are_the_first_steps_of_every_period_but_the_first():
    changed = [step for step in range(1, 3 * EVERY + 1) if is_changed(step)]
    assert changed == [*range(EVERY + 1, EVERY + LENGTH + 1), *range(2 * EVERY + 1, 2 * EVERY + LENGTH + 1)]


def test_gradients_of_the_gpt_are_larger_in_a_phase_and_its_loss_is_the_same():
    model, batches, _ = changing.gpt(width=16, depth=1)
    batch = next(batches("train", 0))
    losses, gradients = [], []
    for larger in (1.0, LARGER):
        model.zero_grad()
        losses.append(model(batch["tokens"], batch["targets"], torch.tensor(larger)))
        losses[-1].backward()
        gradients.append(model.gpt.embedding.weight.grad.clone())
    assert losses[0].item() == losses[1].item()
    torch.testing.assert_close(gradients[1], LARGER * gradients[0])


def test_training_batches_of_the_gpt_change_and_those_for_validation_do_not(monkeypatch):
    monkeypatch.setattr(changing, "EVERY", 2)
    monkeypatch.setattr(changing, "LENGTH", 1)
    _, batches, _ = changing.gpt(width=16, depth=1)
    seen = {split: [] for split in ("train", "validation")}
    for split, factors in seen.items():
        rows = batches(split, 0)
        factors.extend(next(rows)["larger"].item() for _ in range(5))
    assert seen == {"train": [1, 1, LARGER, 1, LARGER], "validation": [1] * 5}


def test_pictures_of_the_clip_have_more_contrast_in_a_phase_of_the_training(monkeypatch):
    usual = {split: next_images(split, steps=3) for split in ("train", "validation")}
    monkeypatch.setattr(changing, "EVERY", 2)
    monkeypatch.setattr(changing, "LENGTH", 1)
    changed = next_images("train", steps=3)
    assert torch.equal(changed[1], usual["train"][1])
    torch.testing.assert_close(changed[2], CONTRAST * usual["train"][2])
    assert torch.equal(next_images("validation", steps=3)[2], usual["validation"][2])


def next_images(split: str, steps: int) -> list[torch.Tensor]:
    _, batches, _ = changing.clip(width=16, depth=1)
    rows = batches(split, 0)
    return [next(rows)["images"] for _ in range(steps)]


@pytest.mark.parametrize("training", [True, False])
def test_the_logit_scale_of_the_clip_is_clamped_in_training(training):
    model, batches, _ = changing.clip(width=16, depth=1)
    with torch.no_grad():
        model.clip.logit_scale.fill_(10.0)
    with torch.no_grad():
        model.train(training)(**next(batches("validation", 0)))
    assert (model.clip.logit_scale.item() < 5) == training
