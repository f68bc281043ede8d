"""HF Trainer with our optimizers: names through a factory, the losses of adamw_torch, its own checkpoints."""

import argparse
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import assert_same
from trimtab import optim

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]

TEXT = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
ROWS = [{"input_ids": row, "labels": row} for row in TEXT[: 256 * 32].view(-1, 32)]
OURS = {"lr": 3e-3, "weight_decay": 0.01, "bits": 8, "min_8bit_size": 1024}
HARD = {"bf16": True, "gradient_accumulation_steps": 2, "gradient_checkpointing": True, "max_grad_norm": 0.5}


def make(folder: Path, optimizer: Any = (optim.AdamW.for_model, OURS), **options: Any) -> Any:
    transformers.set_seed(0)
    shape = {"vocab_size": 256, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(**shape, bos_token_id=0, eos_token_id=0)
    given = {
        "max_steps": 8,
        "per_device_train_batch_size": 8,
        "learning_rate": 3e-3,
        "weight_decay": 0.01,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return transformers.Trainer(
        transformers.GPT2LMHeadModel(config),
        transformers.TrainingArguments(str(folder), **(given | options)),
        train_dataset=ROWS,
        optimizer_cls_and_kwargs=optimizer,
        callbacks=[],
    )


def losses(trainer: Any) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def ours(trainer: Any) -> optim.Optimizer:
    found = trainer.optimizer.optimizer
    assert isinstance(found, optim.Optimizer)
    return found


def test_fifty_steps_have_the_losses_of_adamw_torch(tmp_path):
    theirs = make(tmp_path, None, optim="adamw_torch", max_steps=50)
    theirs.train()
    mine = make(tmp_path, max_steps=50)
    mine.train()
    bits = {entry.name: entry.bits for entry in ours(mine).describe().entries}
    assert bits["transformer.wte.weight"] == bits["transformer.wpe.weight"] == 32
    assert bits["transformer.h.0.mlp.c_fc.weight"] == 8
    assert losses(theirs)[-1] < 0.8 * losses(theirs)[0]  # it learned
    for mine_, theirs_ in zip(losses(mine), losses(theirs), strict=True):
        assert abs(mine_ / theirs_ - 1) < 0.01


def resume(folder: Path, name: str, options: dict[str, Any]) -> None:
    factory = (getattr(optim, name).for_model, OURS)
    straight = make(folder, factory, save_strategy="steps", save_steps=4, **options)
    straight.train()
    again = make(folder, factory, **options)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    assert losses(again) == losses(straight)
    for p, q in zip(again.model.parameters(), straight.model.parameters(), strict=True):
        assert_same(p.detach(), q.detach())
    mine, theirs = ours(again).state_dict()["state"], ours(straight).state_dict()["state"]
    assert any("exp_avg_codes" in entry for entry in theirs.values())
    for place, entry in theirs.items():
        for key, x in entry.items():
            assert_same(mine[place][key], x)


@pytest.mark.parametrize(("name", "options"), [("StableAdamW", {}), ("AdamW", HARD)])
def test_a_resume_through_its_own_checkpoint_continues_bit_for_bit(tmp_path, name, options):
    resume(tmp_path, name, options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["AdamW", "StableAdamW", "AdEMAMix", "Lion"])
@pytest.mark.parametrize("chosen", list(itertools.product([False, True], repeat=len(HARD))))
def test_a_resume_continues_bit_for_bit_with_every_choice_of_options(tmp_path, name, chosen):
    resume(tmp_path, name, {key: HARD[key] for key, wanted in zip(HARD, chosen, strict=True) if wanted})


def test_the_class_itself_gets_no_names_and_says_what_to_pass(tmp_path):
    trainer = make(tmp_path, (optim.AdamW, OURS))
    with pytest.warns(UserWarning, match=r"no names, .* call AdamW\.for_model"):
        trainer.create_optimizer()
