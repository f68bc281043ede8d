"""Hugging Face's Trainer with 8-bit optimizer state. Run: python examples/hf_trainer.py

A small GPT-2 is built from a config and trained on the bytes of a file of the Python standard library; nothing is
downloaded.
"""

import argparse
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import trimtab as tt  # line 1


def main(steps: int = 50) -> SimpleNamespace:
    set_seed(0)
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    rows = [{"input_ids": row, "labels": row} for row in text[: len(text) // 64 * 64].view(-1, 64)]
    shape = {"vocab_size": 256, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            learning_rate=3e-3,
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
        )
        # Learning rate and weight decay are given here: the Trainer passes a factory nothing but this dict.
        options = {"lr": arguments.learning_rate, "weight_decay": 0.1, "bits": 8}
        trainer = Trainer(
            model,
            arguments,
            train_dataset=rows,
            optimizer_cls_and_kwargs=(tt.optim.AdamW.for_model, options),  # line 2
        )
        trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    optimizer = trainer.optimizer.optimizer
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}\n{optimizer.describe().summary()}")
    return SimpleNamespace(losses=losses, optimizer=optimizer)


if __name__ == "__main__":
    main()
