"""A GPT of trimtab as a model of lm-evaluation-harness, on a task of one's own; nothing is downloaded.

    pip install 'trimtab[eval]'
    python examples/lm_eval_tasks.py            about ten seconds

For a trained run: trimtab eval runs/gpt-tiny --tasks lambada_openai
"""

import json
import tempfile
from pathlib import Path

import torch

import trimtab as tt
from trimtab.data.tokenizers import Bytes
from trimtab.hosts.lm_eval import LanguageModel, run_tasks  # <- added

TEXT = "one two three four five six seven eight "
TASK = """
task: counting
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/counting.jsonl}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""
QUESTIONS = [
    {"question": "one two three", "choices": [" four", " one", " nine"], "answer": 0},
    {"question": "five six", "choices": [" two", " seven"], "answer": 1},
]


def main() -> None:
    torch.manual_seed(0)
    model = tt.nn.GPT(tt.nn.GPTConfig(vocab=257, depth=2, width=64, heads=4, context=64))
    optimizer = tt.optim.AdamW(model.named_parameters(), lr=1e-2)
    row = torch.tensor([[256, *(2 * TEXT).encode()][:65]])
    for step in range(1, 81):
        loss = model.loss(row[:, :-1], row[:, 1:]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 40 == 0 or step == 1:
            print(f"step {step:3d}  loss {loss.item():.4f}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "counting.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
        Path(folder, "counting.yaml").write_text(TASK.replace("FOLDER", folder))
        print(run_tasks(LanguageModel(model, Bytes()), ["counting"], folder=Path(folder)))  # <- added


if __name__ == "__main__":
    main()
