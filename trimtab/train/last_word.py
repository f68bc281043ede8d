"""Zero-shot evaluation of a small language model: the last word of passages of the validation text.

    passage     a window of the validation text, up to its last whole word of at least four letters
    choice      share of passages whose last word is more likely, per letter, than those of three others; chance 0.25
    exact       share of passages after which the model would write the whole word
    bits        of the last word, mean

As LAMBADA (Paperno et al. 2016), which small models cannot do, made easier by the choice. `trimtab eval RUN --tasks`
has the tasks of lm-evaluation-harness; this one needs neither the harness nor a file, so that the lab can use it.
"""

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import pad

from trimtab.data import Corpus, open_corpus
from trimtab.nn import GPT
from trimtab.runs import RunError
from trimtab.train.config import GPTRun
from trimtab.train.evaluate import load_run

PASSAGES, CHOICES, ROWS = 256, 4, 64  # rows: scored at once
WORD = re.compile(r" ([A-Za-z]{4,12})(?=[^A-Za-z])")


@dataclass(frozen=True)
class LastWords:
    choice: float
    exact: float
    bits: float
    passages: int


def last_words(folder: Path) -> LastWords:
    """Of a run of a GPT."""
    config, model, _ = load_run(folder)
    if not isinstance(config, GPTRun) or not isinstance(model, GPT):
        raise RunError(f"{folder} holds no language model, so it cannot continue a passage")
    corpus = open_corpus(config.data.corpus, tokenizer=config.data.tokenizer, cache=config.data.cache)
    return score_last_words(model, corpus)


def score_last_words(model: GPT, corpus: Corpus) -> LastWords:
    if corpus.end is None:
        raise RunError(f"{corpus.name} has no end token, which begins every passage here")
    found = find_passages(corpus, model.config.context)
    if len(found) < CHOICES:
        raise RunError(f"the validation text of {corpus.name} has {len(found)} passages, too few; use a longer text")
    drawn = random.Random(0)
    right, exact, bits = 0, 0, 0.0
    for i in range(0, len(found), ROWS // CHOICES):
        rows: list[tuple[str, str]] = []
        for text, word in found[i : i + ROWS // CHOICES]:
            others = sorted({other for _, other in found if other != word})
            rows += [(text, word), *((text, other) for other in drawn.sample(others, CHOICES - 1))]
        scores = _score(model, corpus, rows)
        for first in range(0, len(rows), CHOICES):
            each = [score / len(word) for (score, _), (_, word) in zip(scores, rows, strict=True)][
                first : first + CHOICES
            ]
            right += each[0] == max(each)
            exact += scores[first][1]
            bits -= scores[first][0] / math.log(2)
    return LastWords(right / len(found), exact / len(found), bits / len(found), len(found))


def find_passages(corpus: Corpus, context: int) -> list[tuple[str, str]]:
    """(passage, its last word with the space before it), from equally spaced windows; the end token comes first."""
    tokens = corpus.tokens("validation")
    starts = range(0, max(len(tokens) - context, 1), max((len(tokens) - context) // (2 * PASSAGES), 1))
    found: list[tuple[str, str]] = []
    for start in starts:
        window = [int(x) for x in tokens[start : start + context - 12]]  # another word may be longer than the right one
        words = list(WORD.finditer(corpus.decode(window))) if corpus.end not in window else []
        if words and words[-1].start() > 0:
            found.append((words[-1].string[: words[-1].start()], " " + words[-1][1]))
    return found[:: max(len(found) // PASSAGES, 1)][:PASSAGES]


@torch.no_grad()
def _score(model: GPT, corpus: Corpus, rows: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
    """The log probability of each word after its passage, and whether each of its tokens is the most likely one."""
    assert corpus.end is not None
    words = [corpus.encode(word) for _, word in rows]
    texts = [[corpus.end, *corpus.encode(text), *word] for (text, _), word in zip(rows, words, strict=True)]
    longest = max(map(len, texts))
    # Padding at the right: no earlier token sees it.
    tokens = torch.stack([pad(torch.tensor(text), (0, longest - len(text))) for text in texts])
    log_p = model(tokens[:, :-1])[..., : corpus.vocab].float().log_softmax(-1)
    scores = []
    for text, word, each in zip(texts, words, log_p, strict=True):
        target, part = torch.tensor(word), each[len(text) - 1 - len(word) : len(text) - 1]
        likely = bool((part.argmax(-1) == target).all())
        scores.append((part.gather(1, target[:, None]).sum().item(), likely))
    return scores
