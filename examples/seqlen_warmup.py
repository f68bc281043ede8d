"""Sequence length warmup in a plain PyTorch loop: the same tokens with it and without.

    python examples/seqlen_warmup.py               under a minute on two cores; no download

Two lines are new: the one that creates `warmup` and the one that cuts the batch. If steps have different sizes, the
learning rate should decay by tokens and the run should end by tokens, as in both runs here.
The text is the source code of Python's standard library, in bytes.
"""

import sysconfig
import time
from pathlib import Path

import torch
from torch import Tensor

import trimtab as tt
from trimtab.schedule import LearningRate, SeqLenWarmup

TOKENS, BATCH, CONTEXT, PEAK, WARMUP_STEPS = 400_000, 16, 128, 1e-2, 20
Batch = dict[str, Tensor]


def read_corpus() -> Tensor:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)


def draw_batch(corpus: Tensor, generator: torch.Generator, batch: int = BATCH) -> Batch:
    starts = torch.randint(0, len(corpus) - CONTEXT - 1, (batch,), generator=generator).tolist()
    text = torch.stack([corpus[i : i + CONTEXT + 1] for i in starts]).long()
    return {"tokens": text[:, :-1], "targets": text[:, 1:]}  # shifted before the cut


def train(corpus: Tensor, held_out: Batch, warmup: SeqLenWarmup) -> None:
    torch.manual_seed(0)
    model = tt.nn.GPT(tt.nn.GPTConfig(vocab=256, depth=3, width=64, heads=4, context=CONTEXT))
    optimizer = tt.optim.AdamW(model.named_parameters(), lr=PEAK, betas=(0.9, 0.95), weight_decay=0.01)
    rate = LearningRate(warmup=WARMUP_STEPS, decay=TOKENS, decay_unit="tokens", floor=PEAK / 15)
    generator, begun = torch.Generator().manual_seed(1), time.perf_counter()
    step, tokens, warmup_tokens = 0, 0, None
    print("  step  length    tokens  seconds  loss")
    while tokens < TOKENS:
        step += 1
        batch = warmup.cut(draw_batch(corpus, generator), step)
        for group in optimizer.param_groups:
            group["lr"] = rate.at(PEAK, step, tokens, warmup_tokens)
        loss = model.loss(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        tokens += batch["tokens"].numel()
        if warmup_tokens is None and rate.warmed(step, tokens):
            warmup_tokens = tokens
        if step % 50 == 0:
            seconds = time.perf_counter() - begun
            print(f"{step:6d}  {warmup.at(step):6d}  {tokens:8d}  {seconds:7.1f}  {loss.item():.3f}", flush=True)
    seconds = time.perf_counter() - begun
    with torch.no_grad():  # always at full length
        final = model.loss(**held_out).loss.item()
    print(f"  {step} steps, {tokens} tokens, {seconds:.1f} s; held-out loss at full length {final:.3f}\n")


def main() -> None:
    torch.set_num_threads(1)  # enough for a model this small, and times are more comparable
    corpus = read_corpus()
    split = len(corpus) * 9 // 10
    held_out = draw_batch(corpus[split:], torch.Generator().manual_seed(2), batch=64)
    print(f"without: every step has {CONTEXT} tokens a row")
    train(corpus[:split], held_out, SeqLenWarmup(start=CONTEXT, end=CONTEXT, steps=1))
    warmup = SeqLenWarmup(start=8, end=CONTEXT, steps=120)
    print(f"with: from {warmup.start} to {warmup.end} over {warmup.steps} steps")
    train(corpus[:split], held_out, warmup)


if __name__ == "__main__":
    main()
