"""The real lm-evaluation-harness on the local tasks of tests/hosts/tasks; nothing is downloaded."""

import json
import math
from pathlib import Path

import datasets
import pytest
import torch
from lm_eval.api.instance import Instance

import trimtab as tt
from tests.test_cli import call
from tests.train.runs import quiet, tiny
from trimtab.data.tokenizers import Bytes
from trimtab.hosts.lm_eval import LanguageModel, run_tasks
from trimtab.train import train

TASKS = Path("tests/hosts/tasks")
CONTEXT = 48
NAMES = ["trimtab_choice", "trimtab_continue", "trimtab_last_word", "trimtab_text"]

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return tt.nn.GPT(tt.nn.GPTConfig(vocab=320, depth=2, width=32, heads=2, context=CONTEXT))  # more than the tokenizer


def test_log_probabilities_are_those_of_the_model(model):
    generator = torch.Generator().manual_seed(1)
    lengths = [(1, 1), (3, 9), (40, 8), (40, 9), (200, 5), (10, 47)]
    pairs = [
        (torch.randint(257, (a,), generator=generator).tolist(), torch.randint(257, (b,), generator=generator).tolist())
        for a, b in lengths
    ]
    subject = LanguageModel(model, Bytes(), batch=4)
    found = subject._loglikelihood_tokens([(None, *pair) for pair in pairs], disable_tqdm=True)
    for (context, continuation), (total, greedy) in zip(pairs, found, strict=True):
        row = torch.tensor([(context + continuation)[-CONTEXT - 1 :]])
        with torch.no_grad():
            log_p = model(row[:, :-1])[0, :, :257].log_softmax(-1)[-len(continuation) :]
        expected = sum(log_p[k, token].item() for k, token in enumerate(continuation))
        assert total == pytest.approx(expected, rel=1e-4)
        assert greedy == (log_p.argmax(-1).tolist() == continuation)


def test_the_windows_of_a_long_text_cover_every_token_once(model):
    text = "the quick brown fox jumps over the lazy dog. " * 4
    subject = LanguageModel(model, Bytes())
    request = Instance(request_type="loglikelihood_rolling", doc={}, arguments=(text,), idx=0)
    (total,) = subject.loglikelihood_rolling([request], disable_tqdm=True)
    tokens, expected = [256, *text.encode()], 0.0
    for start in range(1, len(tokens), CONTEXT):
        part = tokens[start - 1 : start + CONTEXT]
        with torch.no_grad():
            log_p = model(torch.tensor([part[:-1]]))[0, :, :257].log_softmax(-1)
        if len(part) == CONTEXT + 1:
            expected += sum(log_p[k, token].item() for k, token in enumerate(part[1:]))
        else:  # the last window reaches back
            part = tokens[-CONTEXT - 1 :]
            with torch.no_grad():
                log_p = model(torch.tensor([part[:-1]]))[0, :, :257].log_softmax(-1)
            new = len(tokens) - start
            expected += sum(log_p[k, part[1:][k]].item() for k in range(CONTEXT - new, CONTEXT))
    assert total == pytest.approx(expected, rel=1e-3)


def test_a_model_that_knows_the_texts_solves_the_tasks():
    torch.manual_seed(0)
    context = 64
    model = tt.nn.GPT(tt.nn.GPTConfig(vocab=257, depth=2, width=64, heads=4, context=context))
    optimizer = tt.optim.AdamW(model.named_parameters(), lr=1e-2)
    texts = [json.loads(line)["text"] for line in (TASKS / "last_word.jsonl").read_text().splitlines()]
    texts += ["one two three\n", "the cat sat\n"]
    rows = [[256, *text.encode(), 256][-context - 1 :] for text in texts]
    longest = max(map(len, rows))
    data = torch.tensor([row + [256] * (longest - len(row)) for row in rows])
    before = run_tasks(LanguageModel(model, Bytes()), NAMES, folder=TASKS)
    for _ in range(120):
        model.loss(data[:, :-1], data[:, 1:]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = run_tasks(LanguageModel(model, Bytes()), NAMES, folder=TASKS)
    assert after["trimtab_choice"]["acc"] == 1.0
    assert after["trimtab_last_word"]["acc"] == 1.0
    assert after["trimtab_last_word"]["perplexity"] < 1.5 < before["trimtab_last_word"]["perplexity"]
    assert after["trimtab_text"]["bits_per_byte"] < before["trimtab_text"]["bits_per_byte"]
    assert before["trimtab_text"]["bits_per_byte"] == pytest.approx(math.log2(257), rel=0.2)


def test_the_command_and_its_refusals(tmp_path, capsys):
    run = tmp_path / "run"
    train(tiny(tmp_path), run, console=quiet())
    options = ["--task-folder", str(TASKS), "--examples", "1"]
    code, out, _ = call(capsys, "eval", str(run), "--tasks", "trimtab_choice", "trimtab_last_word", *options)
    assert code == 0
    assert "trimtab_choice" in out
    assert "acc" in out
    code, _, err = call(capsys, "eval", str(run), "--tasks", "trimtab_chioce", *options)
    assert code != 0
    assert "trimtab_chioce is no task" in err
