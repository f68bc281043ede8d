"""TRL's SFTTrainer with both callbacks: packed and padding-free batches, LoRA, bfloat16."""

import itertools

import pytest
import torch

from tests.hosts import zoo
from trimtab import optim
from trimtab.hosts.hf_trainer import SeqLenWarmupCallback, WatchCallback
from trimtab.schedule import SeqLenWarmup

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft.*"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]
WARMUP = SeqLenWarmup(start=8, end=32, steps=4)
PACKINGS = {
    "padded": {},
    "padding-free": {"padding_free": True, "max_length": None},
    "packed": {"packing": True},
    "wrapped": {"packing": True, "packing_strategy": "wrapped"},
}


def make(folder, *, lora=False, **options):
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    from trimtab.hosts.export import _byte_tokenizer

    model, _ = zoo.build(zoo.llama)
    model.resize_token_embeddings(256)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=_byte_tokenizer(), eos_token="!", pad_token="~")
    data = Dataset.from_dict({"text": ["ab" * (2 + 5 * i % 12) for i in range(64)]})
    base = {
        "output_dir": str(folder),
        "max_steps": 5,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "max_length": 32,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
    }
    lora_config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(**base | options),
        train_dataset=data,
        processing_class=tokenizer,
        peft_config=lora_config,
    )
    trained = [(name, p) for name, p in trainer.model.named_parameters() if p.requires_grad]
    trainer.optimizer = optim.AdamW(trained, lr=1e-2, bits=8, min_8bit_size=1)
    return trainer


def train(trainer):
    """Runs with both callbacks; returns what the model got, and the watcher."""
    seen = []
    trainer.model.register_forward_pre_hook(
        lambda model, _, kwargs: seen.append(dict(kwargs)) if model.training else None, with_kwargs=True
    )
    watch = WatchCallback(every=1)
    watch.attach(trainer)
    SeqLenWarmupCallback(WARMUP).attach(trainer)
    trainer.train()
    return seen, watch


def assert_cut(batch, length):
    """Each sequence of a batch has at most this length, and everything that describes them agrees."""
    tokens, positions = batch["input_ids"], batch.get("position_ids")
    assert batch["labels"].shape == tokens.shape
    if "cu_seq_lens_q" not in batch:
        assert tokens.shape[1] <= length
        return
    lengths = batch["cu_seq_lens_q"].diff().tolist()
    assert max(lengths) == batch["max_length_q"] <= length
    assert positions.tolist() == [[i for n in lengths for i in range(n)]]
    assert tokens.shape == (1, sum(lengths))
    assert (batch["labels"][positions == 0] == -100).all()


@pytest.mark.parametrize("packing", PACKINGS)
def test_every_sequence_is_cut_and_the_watcher_sees_the_logged_loss(tmp_path, packing):
    trainer = make(tmp_path, **PACKINGS[packing])
    seen, watch = train(trainer)
    assert len(seen) == 2 * 5
    for i, batch in enumerate(seen):
        assert_cut(batch, WARMUP.at(1 + i // 2))
    assert ("cu_seq_lens_q" in seen[0]) == (packing in ("padding-free", "packed"))
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["watch/loss"] for row in rows] == pytest.approx([row["loss"] for row in rows], abs=1e-5)
    assert [row["seqlen"] for row in rows] == [WARMUP.at(step) for step in range(1, 6)]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert watch.watch.steps == 5
    assert "watcher error" not in {alarm.kind for alarm in watch.alarms}


@pytest.mark.parametrize("options", [{"lora": True}, {"bf16": True}])
def test_lora_and_bfloat16(tmp_path, options):
    trainer = make(tmp_path, packing=True, **options)
    seen, watch = train(trainer)
    for i, batch in enumerate(seen):
        assert_cut(batch, WARMUP.at(1 + i // 2))
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["watch/loss"] for row in rows] == pytest.approx([row["loss"] for row in rows], abs=1e-5)
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert watch.watch.steps == 5
    assert "watcher error" not in {alarm.kind for alarm in watch.alarms}
    watched = set(watch.watch.record["tensors"])
    assert watched == {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert all("lora" in name for name in watched) == ("lora" in options)


def test_a_packed_warmup_trains_like_short_packed_sequences(tmp_path):
    """The loss of a cut batch is that of its sequences one by one, at the length of the step."""
    trainer = make(tmp_path, packing=True, learning_rate=0.0, max_steps=1, gradient_accumulation_steps=1)
    for group in trainer.optimizer.param_groups:
        group["lr"] = group["weight_decay"] = 0.0
    seen, _ = train(trainer)
    (batch,) = seen
    ends, total, count = batch["cu_seq_lens_q"].tolist(), 0.0, 0
    with torch.no_grad():
        for begin, end in itertools.pairwise(ends):
            tokens = batch["input_ids"][:, begin:end]
            if end - begin > 1:
                total += trainer.model(input_ids=tokens, labels=tokens).loss.item() * (end - begin - 1)
                count += end - begin - 1
    assert trainer.state.log_history[0]["loss"] == pytest.approx(total / count, abs=1e-4)
