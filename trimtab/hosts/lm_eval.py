"""A trained GPT as a model of EleutherAI's lm-evaluation-harness: `trimtab eval RUN --tasks lambada_openai piqa`.

    results = run_tasks(LanguageModel(model, tokenizer), ["my_task"], folder=Path("tasks"))

Tasks are the harness's own, which it downloads, or files of a folder (its YAML format), which need no network if their
data is local. Documents begin with the tokenizer's end token, as in training. What does not fit into the model's
context is cut off at the left; perplexities of longer texts are of windows that do not overlap.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lm_eval
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from torch.nn.functional import pad
from tqdm import tqdm  # type: ignore[import-untyped]

from trimtab.data.tokenizers import TextTokenizer
from trimtab.hosts.versions import check_version
from trimtab.nn import GPT

check_version("lm_eval")
Pair = tuple[list[int], list[int]]  # tokens of a context, and of its continuation


class LanguageModel(TemplateLM):  # type: ignore[misc]
    """A GPT and its tokenizer, as the harness calls them."""

    backend = "causal"

    def __init__(self, model: GPT, tokenizer: TextTokenizer, *, batch: int = 16) -> None:
        super().__init__()
        if tokenizer.end is None:
            raise ValueError("the tokenizer has no end token, which begins every document here")
        self.model, self.tokenizer, self.batch = model.eval(), tokenizer, batch
        self.max_length = model.config.context
        self.at = next(model.parameters()).device

    @property
    def eot_token_id(self) -> int:
        assert self.tokenizer.end is not None
        return self.tokenizer.end

    @property
    def tokenizer_name(self) -> str:
        return type(self.tokenizer).__name__

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return list(self.tokenizer.encode(string))

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """The log probability of each continuation, and whether it is the most likely one."""
        pairs: list[Pair] = [(context, continuation) for _, context, continuation in requests]
        order = sorted(range(len(pairs)), key=lambda i: -len(pairs[i][0]) - len(pairs[i][1]))
        found: dict[int, tuple[float, bool]] = {}
        with tqdm(total=len(pairs), disable=disable_tqdm, desc="continuations") as bar:
            for start in range(0, len(order), self.batch):
                chosen = order[start : start + self.batch]
                found |= dict(zip(chosen, self._score([pairs[i] for i in chosen]), strict=True))
                bar.update(len(chosen))
        return [found[i] for i in range(len(pairs))]

    @torch.no_grad()
    def _score(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        rows = [(context + continuation)[-self.max_length - 1 :] for context, continuation in pairs]
        longest = max(len(row) for row in rows)
        # Padding at the right: no earlier token sees it.
        tokens = torch.stack([pad(torch.tensor(row), (0, longest - len(row))) for row in rows]).to(self.at)
        logits = self.model(tokens[:, :-1])[..., : self.tokenizer.vocab].float()
        scores = []
        for row, text, (_, continuation), each in zip(rows, tokens, pairs, logits, strict=True):
            last = len(row) - 1
            where = slice(max(0, last - len(continuation)), last)
            target, log_p = text[1:][where], each[where].log_softmax(-1)
            total = log_p.gather(1, target[:, None]).sum().item()
            scores.append((total, bool((log_p.argmax(-1) == target).all())))
        return scores

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log probability of whole texts."""
        windows, counts = list[tuple[Any, list[int], list[int]]](), list[int]()
        for request in requests:
            tokens = self.tok_encode(request.args[0])
            parts = get_rolling_token_windows(tokens, self.eot_token_id, self.max_length, context_len=1)
            made = [(None, *make_disjoint_window(part)) for part in parts]
            windows += made
            counts.append(len(made))
        scores = iter(self._loglikelihood_tokens(windows, disable_tqdm))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    @torch.no_grad()
    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The most likely continuation, up to one of the given ends."""
        return [self._generate(*request.args) for request in tqdm(requests, disable=disable_tqdm, desc="texts")]

    def _generate(self, context: str, options: dict[str, Any]) -> str:
        if options.get("do_sample") and options.get("temperature", 1.0) > 0:
            raise ValueError("this model is evaluated with its most likely tokens; set do_sample: false in the task")
        ends = options.get("until") or []
        ends = [ends] if isinstance(ends, str) else ends
        tokens, made = [self.eot_token_id, *self.tok_encode(context)], list[int]()
        while len(made) < options.get("max_gen_toks", 256):
            window = torch.tensor([(tokens + made)[-self.max_length :]], device=self.at)
            logits: Tensor = self.model(window)[0, -1, : self.tokenizer.vocab]
            made.append(int(logits.argmax()))
            text = self.tokenizer.decode(made)
            if made[-1] == self.eot_token_id or any(end in text for end in ends):
                break
        text = self.tokenizer.decode([token for token in made if token != self.eot_token_id])
        for end in ends:
            text = text.split(end)[0]
        return text


def run_tasks(
    model: LanguageModel,
    tasks: Sequence[str],
    *,
    folder: Path | None = None,
    examples: int | None = None,
    shots: int | None = None,
) -> dict[str, dict[str, float]]:
    """The metrics of each task. `examples` limits each task to its first ones; `shots` are examples in the context."""
    own_folder = None if folder is None else str(folder)
    manager = TaskManager(include_path=own_folder, include_defaults=False)
    if not set(tasks) <= set(manager.all_tasks):
        manager = TaskManager(include_path=own_folder)  # reads thousands of files: some seconds
    unknown = [name for name in tasks if name not in manager.all_tasks]
    if unknown:
        own = "" if folder is None else f", nor of {folder}"
        raise ValueError(
            f"{', '.join(unknown)} is no task of lm-evaluation-harness{own}; `lm-eval ls tasks` lists them"
        )
    found = lm_eval.simple_evaluate(
        model=model,
        tasks=list(tasks),
        task_manager=manager,
        limit=examples,
        num_fewshot=shots,
        bootstrap_iters=0,
        log_samples=False,
    )
    assert found is not None
    return {
        name: {key.split(",")[0]: x for key, x in values.items() if isinstance(x, float)}
        for name, values in found["results"].items()
    }
