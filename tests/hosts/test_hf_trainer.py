"""The callbacks inside a real Trainer of transformers."""

import json
import math
import shutil
import subprocess
import sys

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import trimtab as tt
from trimtab.hosts.hf_trainer import SeqLenWarmupCallback, WatchCallback
from trimtab.schedule import SeqLenWarmup

LONG, SHORT = 32, 8


class Tokens(torch.utils.data.Dataset):
    def __init__(self, length=LONG, count=64):
        self.rows = torch.randint(0, 97, (count, LONG), generator=torch.Generator().manual_seed(1))[:, :length]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


def make(tmp_path, data=None, model=None, kind=Trainer, **options):
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=97, n_positions=LONG, bos_token_id=0, eos_token_id=0)
    config.resid_pdrop = config.attn_pdrop = config.embd_pdrop = 0.0
    base = {
        "output_dir": str(tmp_path / "out"),
        "per_device_train_batch_size": 4,
        "max_steps": 8,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "logging_nan_inf_filter": False,
        "learning_rate": 1e-3,
        "seed": 3,
        "use_cpu": True,
    }
    data = data or Tokens()
    return kind(
        model or GPT2LMHeadModel(config),
        TrainingArguments(**base | options),
        train_dataset=data,
        eval_dataset=Tokens(count=8),
    )


def losses(trainer):
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}, {"dataloader_num_workers": 2}])
def test_a_warmup_trains_like_a_dataset_of_short_rows(tmp_path, options):
    short = make(tmp_path, Tokens(SHORT), **options)
    short.train()
    cut = make(tmp_path, **options)
    SeqLenWarmupCallback(SeqLenWarmup(start=SHORT, end=LONG, steps=100, kind="two-stage")).attach(cut)
    cut.train()
    assert losses(cut) == losses(short)
    assert 3.9 < losses(cut)[0] < 5.5  # the mean over the tokens that are left
    for name, p in cut.model.named_parameters():
        assert torch.equal(p, short.model.get_parameter(name)), name


def test_lengths_follow_the_optimizer_steps_and_evaluation_is_at_full_length(tmp_path):
    trainer = make(tmp_path, Tokens(count=96), gradient_accumulation_steps=3, eval_strategy="steps", eval_steps=4)
    seen = []
    trainer.model.register_forward_pre_hook(
        lambda model, _, kwargs: seen.append((model.training, kwargs["input_ids"].shape[1])), with_kwargs=True
    )
    warmup = SeqLenWarmup(start=8, end=LONG, steps=6)
    SeqLenWarmupCallback(warmup).attach(trainer)
    trainer.train()
    trained = [length for training, length in seen if training]
    assert trained == [warmup.at(step) for step in range(1, 9) for _ in range(3)]
    assert {length for training, length in seen if not training} == {LONG}
    assert [row["seqlen"] for row in trainer.state.log_history if "seqlen" in row] == trained[::3]


def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path):
    """Lengths, the watcher's windows, 8-bit state: nothing is lost in the Trainer's checkpoint."""

    def run(folder, steps, resume=None):
        trainer = make(
            tmp_path / folder, save_strategy="steps", save_steps=4, max_steps=steps, lr_scheduler_type="constant"
        )
        trainer.optimizer = tt.optim.AdamW(trainer.model.named_parameters(), lr=1e-3, bits=8, min_8bit_size=1)
        watch = WatchCallback(every=2, deep_every=2)
        watch.attach(trainer)
        SeqLenWarmupCallback(SeqLenWarmup(start=8, end=LONG, steps=6)).attach(trainer)
        trainer.train(resume_from_checkpoint=resume)
        return trainer, watch

    whole, first = run("whole", 8)
    run("parts", 4)
    parts, second = run("parts", 8, resume=str(tmp_path / "parts" / "out" / "checkpoint-4"))
    for name, p in whole.model.named_parameters():
        assert torch.equal(p, parts.model.get_parameter(name)), name
    assert second.watch.state_dict() == first.watch.state_dict()
    assert second.watch.steps == 8
    state = json.loads((tmp_path / "parts" / "out" / "checkpoint-8" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["trimtab.watch"]["attributes"]["steps"] == 8


@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_watcher_sees_the_loss_of_its_own_step(tmp_path, accumulation):
    trainer = make(tmp_path, gradient_accumulation_steps=accumulation)
    WatchCallback(every=1).attach(trainer)
    trainer.train()
    seen = trainer.state.log_history
    watched = [row["watch/loss"] for row in seen if "watch/loss" in row]
    logged = [row["loss"] for row in seen if "loss" in row]
    assert len(watched) == len(logged) == 8
    assert watched == pytest.approx(logged, abs=5.1e-5)  # transformers 4 logs four digits
    assert all("watch/grad_norm" in row for row in seen if "watch/loss" in row)
    assert not any(name.startswith("watch/rms/") for row in seen for name in row)


def test_the_watcher_changes_nothing_and_reports_to_tensorboard(tmp_path):
    plain = make(tmp_path)
    plain.train()
    watched = make(tmp_path, report_to=["tensorboard"])
    WatchCallback(log_tensors=True).attach(watched)
    watched.train()
    assert losses(watched) == losses(plain)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = {path.parent for path in (tmp_path).rglob("events.out.tfevents*")}
    events = EventAccumulator(str(folder))
    events.Reload()
    tags = events.Tags()["scalars"]
    assert {"train/watch/grad_norm", "train/watch/rms/transformer.h.0.mlp.c_fc.weight"} <= set(tags)


def test_alarms_are_logged_and_counted(tmp_path, caplog):
    trainer = make(tmp_path)
    with torch.no_grad():
        trainer.model.transformer.h[0].mlp.c_fc.weight[0, 0] = math.nan
    callback = WatchCallback(every=1)
    callback.attach(trainer)
    with caplog.at_level("WARNING"):
        trainer.train()
    assert callback.alarms[0].kind == "non-finite"
    assert any("non-finite" in record.getMessage() for record in caplog.records)
    counted = [row["alarms/non-finite"] for row in trainer.state.log_history if "alarms/non-finite" in row]
    assert counted[0] >= 1
    assert counted == sorted(counted)


def test_what_cannot_work_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(ValueError, match="logging_nan_inf_filter=False"):
        WatchCallback().attach(make(tmp_path, logging_nan_inf_filter=True))
    for callback in (WatchCallback(), SeqLenWarmupCallback(SeqLenWarmup(start=8, end=16, steps=2))):
        trainer = make(tmp_path)
        trainer.add_callback(callback)
        with pytest.raises(RuntimeError, match=r"attach\(trainer\)"):
            trainer.train()
        callback.attach(trainer)
        with pytest.raises(ValueError, match="already"):
            callback.attach(make(tmp_path))
    with pytest.raises(TypeError, match="SeqLenWarmup"):
        SeqLenWarmupCallback(64)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_resume_as_if_never_stopped(tmp_path, strategy):
    """8-bit state, the watcher and the lengths, through the Trainer's own checkpoints."""

    def run(folder, *resume):
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
        command = [*launch, "-m", "tests.hosts.two_trainer", strategy, str(tmp_path / folder), *resume]
        done = subprocess.run(command, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stderr
        return json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"')))

    whole = run("whole")
    assert (whole["sharded"], whole["replicated"]) == (strategy == "fsdp2", strategy == "ddp")
    assert whole["coded"] == len(whole["params"]) - 2  # all but the embeddings of tokens and positions
    assert not whole["alarms"]
    warmup = SeqLenWarmup(start=8, end=LONG, steps=6)
    assert whole["lengths"] == [warmup.at(step) for step in range(1, 9) for _ in range(2)]
    assert whole["watch"]["detector"]["losses"] == pytest.approx(whole["losses"], abs=5.1e-5)
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    rest = run("parts", str(tmp_path / "parts" / "out" / "checkpoint-3"))
    assert rest["lengths"] == whole["lengths"][6:]
    assert (rest["params"], rest["watch"]) == (whole["params"], whole["watch"])
