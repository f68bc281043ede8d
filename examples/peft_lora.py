"""Fine-tune with LoRA on a frozen int8 model, and merge the adapter.

    pip install 'trimtab[hf]' peft
    python examples/peft_lora.py                about ten seconds; no download

The model is a small GPT-2 with random weights over bytes. With a frozen weight SwitchBack stores no activations for its
gradient, and both products with it are in int8.
"""

import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

import trimtab as tt
from trimtab.hosts.hf import restore

STEPS, TEXT = 20, b"the quick brown fox jumps over the lazy dog. " * 8


def main() -> None:
    torch.manual_seed(0)
    sizes = {"n_embd": 128, "n_layer": 2, "n_head": 4, "vocab_size": 256, "n_positions": 64}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    base = GPT2LMHeadModel(GPT2Config(**sizes, **ends, resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0))

    report = tt.nn.convert_linears(base, "switchback", when="always")  # <- added; `when` only because it is so small
    print(str(report).splitlines()[0])
    config = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM", fan_in_fan_out=True)
    model = get_peft_model(base, config)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = tt.optim.AdamW(trained, lr=1e-2, bits=8)  # <- changed

    tokens = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8).long()
    rows = torch.stack([tokens[i : i + 64] for i in range(0, 256, 16)])
    for step in range(1, STEPS + 1):
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0 or step == 1:
            print(f"step {step:3d}  loss {loss.item():.4f}", flush=True)

    merged = model.merge_and_unload()
    with tempfile.TemporaryDirectory() as folder:
        merged.save_pretrained(folder)  # a plain checkpoint, which opens without Trimtab
        again = restore(GPT2LMHeadModel.from_pretrained(folder))  # int8 layers again
    print(f"merged, saved and restored: loss {again(input_ids=rows, labels=rows).loss.item():.4f}")


if __name__ == "__main__":
    main()
