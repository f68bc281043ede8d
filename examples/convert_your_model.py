"""Convert a Hugging Face model to SwitchBack and train it for some steps beside the float32 one.

    pip install 'trimtab[hf]'
    python examples/convert_your_model.py            about a minute on two cores; no download

The text is the source code of Python's standard library, in bytes; the model is a small GPT-2 with random weights. For
your own model, use the same two lines: `convert_linears`, and the optimizer if you want 2 bytes of state per parameter.
"""

import copy
import sysconfig
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import trimtab as tt

STEPS, BATCH, CONTEXT = 20, 16, 128


def read_corpus() -> Tensor:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)


def draw_batch(corpus: Tensor, generator: torch.Generator) -> Tensor:
    starts = torch.randint(0, len(corpus) - CONTEXT, (BATCH,), generator=generator).tolist()
    return torch.stack([corpus[i : i + CONTEXT] for i in starts]).long()


def main() -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=768, n_layer=2, n_head=12, vocab_size=256, n_positions=CONTEXT, resid_pdrop=0, attn_pdrop=0, embd_pdrop=0
    )
    plain = GPT2LMHeadModel(config)
    converted = copy.deepcopy(plain)
    print(tt.nn.convert_linears(converted, "switchback"))  # the report lists calls that stay in float

    models: dict[str, nn.Module] = {"float32": plain, "switchback": converted}
    optimizers = {
        name: tt.optim.StableAdamW(model.named_parameters(), lr=1e-3, bits=8) for name, model in models.items()
    }
    corpus, generator = read_corpus(), torch.Generator().manual_seed(1)
    seconds = dict.fromkeys(models, 0.0)
    for step in range(1, STEPS + 1):
        tokens, losses = draw_batch(corpus, generator), {}
        for name, model in models.items():
            start = time.perf_counter()
            loss = model(tokens, labels=tokens).loss
            loss.backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
            losses[name] = loss.item()
            seconds[name] += time.perf_counter() - start
        if step % 5 == 0 or step == 1:
            print(f"step {step:3d}  " + "  ".join(f"{name} {loss:.4f}" for name, loss in losses.items()), flush=True)
    tokens_seen = STEPS * BATCH * CONTEXT
    print("  ".join(f"{name} {tokens_seen / s:.0f} tokens/s" for name, s in seconds.items()))

    tt.nn.revert_linears(converted)  # plain layers with the same parameters
    print(f"converted back: {type(converted.transformer.h[0].mlp.c_fc).__name__}, with the same state dict")


if __name__ == "__main__":
    main()
