"""TRL's SFTTrainer with packing: int8 layers, an 8-bit optimizer, alarms and sequence length warmup.

pip install 'trimtab[hf]' trl
python examples/trl_sft.py                     a few seconds; no download
"""

import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import trimtab as tt
from trimtab.hosts.hf_trainer import SeqLenWarmupCallback, WatchCallback


def tokenizer() -> PreTrainedTokenizerFast:
    letters = {letter: i for i, letter in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "<eos>", "<pad>"])}
    bytes_only = Tokenizer(models.BPE(vocab=letters, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=bytes_only, eos_token="<eos>", pad_token="<pad>")


def main() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=258, max_position_embeddings=64))
    tt.nn.convert_linears(model, "switchback", when="always")  # <- added; `when` only because it is so small
    optimizer = tt.optim.StableAdamW(model.named_parameters(), lr=3e-3, bits=8)  # <- changed

    data = Dataset.from_dict({"text": [f"the number {i} follows the number {i - 1}" for i in range(400)]})
    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(
            folder,
            packing=True,
            max_length=64,
            max_steps=20,
            logging_steps=5,
            logging_nan_inf_filter=False,  # <- added: the watcher must see every loss
            save_strategy="no",
            report_to=[],
            bf16=False,
            use_cpu=True,
            disable_tqdm=True,
        )
        options = {"train_dataset": data, "processing_class": tokenizer(), "optimizers": (optimizer, None)}
        trainer = SFTTrainer(model, args, **options)
        WatchCallback(every=5).attach(trainer)  # <- added
        SeqLenWarmupCallback(tt.SeqLenWarmup(start=16, end=64, steps=10)).attach(trainer)  # <- added
        trainer.train()
    for row in trainer.state.log_history[:-1]:
        print(f"step {row['step']:3d}  length {row['seqlen']}  loss {row['loss']:.4f}")


if __name__ == "__main__":
    main()
