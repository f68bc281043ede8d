"""LoRA on converted models, and TRL's trainer with int8 layers and an 8-bit optimizer. Real packages, no downloads."""

import copy

import pytest
import torch

from tests.hosts import zoo
from trimtab import optim
from trimtab.hosts.hf import restore
from trimtab.nn import SwitchBackConv1D, SwitchBackLinear, convert_linears

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft.*"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]


@pytest.mark.parametrize("make", [zoo.gpt2, zoo.llama])
def test_lora_trains_saves_loads_and_merges_on_converted_models(make, tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model

    base, loss = zoo.build(make)
    model = copy.deepcopy(base)
    report = convert_linears(model, when="always")
    # A Conv1D is [in, out]; PEFT sets the option itself, with a warning.
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", fan_in_fan_out=make is zoo.gpt2)
    lora = get_peft_model(model, config)
    wrapped = [m for m in lora.modules() if isinstance(m, SwitchBackConv1D | SwitchBackLinear)]
    assert len(wrapped) == len(report.converted)
    assert sum("lora_A" in name for name, _ in lora.named_parameters()) == len(report.converted)
    frozen = {name: p.clone() for name, p in lora.named_parameters() if not p.requires_grad}
    trained = [(name, p) for name, p in lora.named_parameters() if p.requires_grad]
    optimizer, first = optim.AdamW(trained, lr=1e-2, bits=8), loss(lora).item()
    for _ in range(8):
        loss(lora).backward()
        optimizer.step()
        optimizer.zero_grad()
    lora.eval()
    last = loss(lora).item()
    assert last < first - 0.1
    assert all(torch.equal(p, frozen[name]) for name, p in lora.named_parameters() if name in frozen)

    lora.save_pretrained(tmp_path / "adapter")
    fresh = copy.deepcopy(base)
    convert_linears(fresh, when="always")
    assert loss(PeftModel.from_pretrained(fresh, tmp_path / "adapter").eval()).item() == last
    plain = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapter").eval()
    assert loss(plain).item() == pytest.approx(last, rel=0.01)  # the adapter is no int8 thing

    merged = lora.merge_and_unload()
    assert loss(merged).item() == pytest.approx(last, rel=0.01)
    merged.save_pretrained(tmp_path / "merged")
    opened = restore(type(merged).from_pretrained(tmp_path / "merged").eval())
    assert loss(opened).item() == loss(merged).item()


@pytest.mark.slow
def test_trl_s_trainer_runs_with_int8_layers_and_an_8_bit_optimizer(tmp_path):
    run_sft(tmp_path, 20)


def test_trl_s_trainer_runs_a_few_steps(tmp_path):
    run_sft(tmp_path, 4)


def run_sft(folder, steps: int) -> None:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    from trimtab.hosts.export import _byte_tokenizer

    model, _ = zoo.build(zoo.llama)
    model.resize_token_embeddings(256)
    convert_linears(model, when="always")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=_byte_tokenizer(), eos_token="!", pad_token="~")
    data = Dataset.from_dict({"text": [f"the number {i} follows {i - 1}" for i in range(64)]})
    args = SFTConfig(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        max_length=32,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    optimizer = optim.StableAdamW(model.named_parameters(), lr=1e-2, bits=8)
    trainer = SFTTrainer(
        model=model, args=args, train_dataset=data, processing_class=tokenizer, optimizers=(optimizer, None)
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == steps
    assert losses[-1] < losses[0] - 0.3
