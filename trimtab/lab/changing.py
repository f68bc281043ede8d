"""A GPT and a CLIP whose gradients change: phases in which an optimizer's second moment is out of date.

    trimtab.lab.changing:gpt     bytes of Python's standard library; in a phase all gradients are 16 times larger
    trimtab.lab.changing:clip    drawn shapes; in a phase the pictures have 4 times the contrast

Phases are steps 201 to 240, 401 to 440, and so on (`is_changed`). These are subjects of studies as a user would write
them. A loss is reported as it is, never multiplied.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count

import torch
from torch import Tensor, nn

from trimtab.data import PairBatches, TextBatches, open_corpus, open_pairs
from trimtab.lab.sizes import count_heads
from trimtab.nn import CLIP, CLIP_SIZES, GPT, GPTConfig, WordTokenizer

EVERY, LENGTH = 200, 40
LARGER, CONTRAST = 16.0, 4.0
CONTEXT, ROWS = 32, 16  # few tokens per step: the gradients of a GPT are mostly noise, as in real trainings
PAIRS, WORDS, PATCH = 220, 12, 16  # half of the shapes, words of a caption, few patches

Batches = Callable[[str, int], Iterator[dict[str, Tensor]]]


def is_changed(step: int) -> bool:
    """Steps 201 to 240, 401 to 440, and so on."""
    return step > EVERY and (step - 1) % EVERY < LENGTH


class ChangingGPT(nn.Module):
    def __init__(self, width: int, depth: int, vocab: int) -> None:
        super().__init__()
        self.gpt = GPT(GPTConfig(vocab=vocab, context=CONTEXT, depth=depth, width=width, heads=count_heads(width)))

    def forward(self, tokens: Tensor, targets: Tensor, larger: Tensor) -> Tensor:
        """The loss, whose gradients are `larger` times as large."""
        loss = self.gpt.loss(tokens, targets).loss
        return loss + (larger - 1) * (loss - loss.detach())


class ChangingCLIP(nn.Module):
    def __init__(self, width: int, depth: int, vocab: int) -> None:
        super().__init__()
        heads = count_heads(width)
        image = replace(CLIP_SIZES["tiny"], depth=depth, width=width, heads=heads, patch=PATCH, embed=width)
        text = replace(image, text_depth=max(depth // 2, 1), text_width=width, text_heads=heads, context=WORDS)
        self.clip = CLIP(replace(text, vocab=vocab))

    def forward(self, images: Tensor, captions: Tensor) -> Tensor:
        if self.training:
            self.clip.clamp_logit_scale()  # after the optimizer's step, and before it is used
        return self.clip.loss(images, captions).loss


def gpt(width: int = 64, depth: int = 2) -> tuple[nn.Module, Batches, str]:
    """The model, its data, and the hash of the data."""
    corpus = open_corpus("stdlib")

    def batches(split: str, seed: int) -> Iterator[dict[str, Tensor]]:
        rows = TextBatches(corpus, split, context=CONTEXT, seed=seed)
        for step in count(1):
            changed = split == "train" and is_changed(step)
            yield {**rows.next(ROWS), "larger": torch.tensor(LARGER if changed else 1.0)}

    return ChangingGPT(width, depth, corpus.vocab), batches, corpus.sha256


def clip(width: int = 32, depth: int = 2) -> tuple[nn.Module, Batches, str]:
    """The model, its data, and the hash of the data."""
    pairs = open_pairs("shapes")
    tokenizer = WordTokenizer.from_captions(pairs.captions("train"), context=WORDS)

    def batches(split: str, seed: int) -> Iterator[dict[str, Tensor]]:
        chosen = PairBatches(pairs, split, seed=seed, tokenizer=tokenizer.encode)
        for step in count(1):
            batch = chosen.next(min(PAIRS, len(chosen.chosen)))
            if split == "train" and is_changed(step):
                batch["images"] = CONTRAST * batch["images"]
            yield batch

    return ChangingCLIP(width, depth, tokenizer.vocab), batches, pairs.sha256
