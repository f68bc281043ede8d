"""The callbacks inside a real Trainer of Lightning."""

import csv
import json
import math
import subprocess
import sys

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

import trimtab as tt
from trimtab.hosts.lightning import SeqLenWarmupCallback, WatchCallback
from trimtab.schedule import SeqLenWarmup

LONG, VOCAB = 32, 50

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:.*`weights_only` was not set"),
    pytest.mark.filterwarnings("ignore:.*number of training batches"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but"),
]


def rows(count=48, length=LONG):
    text = torch.randint(0, VOCAB, (count, LONG + 1), generator=torch.Generator().manual_seed(1))
    return [{"tokens": row[:-1][:length], "targets": row[1:][:length]} for row in text]


class Module(L.LightningModule):
    def __init__(self, bits=8, length=LONG):
        super().__init__()
        torch.manual_seed(0)
        self.model = tt.nn.GPT(tt.nn.GPTConfig(vocab=VOCAB, depth=2, width=32, heads=2, context=LONG))
        tt.nn.convert_linears(self.model, when="always")
        self.bits, self.length = bits, length
        self.lengths, self.losses = [], []

    def training_step(self, batch, _):
        self.lengths.append(batch["tokens"].shape[1])
        loss = self.model.loss(**batch).loss
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, _):
        assert batch["tokens"].shape[1] == LONG
        self.log("val", self.model.loss(**batch).loss)

    def configure_optimizers(self):
        return tt.optim.StableAdamW(self.named_parameters(), lr=1e-3, bits=self.bits, min_8bit_size=1)

    def train_dataloader(self):
        return DataLoader(rows(length=self.length), batch_size=4)

    def val_dataloader(self):
        return DataLoader(rows(8), batch_size=4)


def fit(tmp_path, module, *callbacks, resume=None, **options):
    base = {"max_steps": 8, "accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
    base |= {"logger": CSVLogger(tmp_path), "log_every_n_steps": 1, "enable_checkpointing": False}
    trainer = L.Trainer(**base | options, callbacks=list(callbacks))
    trainer.fit(module, ckpt_path=resume)
    return trainer


def read_log(trainer, name):
    trainer.logger.save()
    with open(f"{trainer.logger.log_dir}/metrics.csv") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


def test_a_warmup_trains_like_short_rows_and_validates_at_full_length(tmp_path):
    short, cut = Module(length=8), Module()
    fit(tmp_path / "short", short, limit_val_batches=0)
    warmup = SeqLenWarmup(start=8, end=LONG, steps=100, kind="two-stage")
    trainer = fit(tmp_path / "cut", cut, SeqLenWarmupCallback(warmup), val_check_interval=4)
    assert cut.losses == short.losses
    assert set(read_log(trainer, "seqlen")) == {8}
    assert read_log(trainer, "val")
    for name, p in cut.named_parameters():
        assert torch.equal(p, short.get_parameter(name)), name


def test_lengths_follow_the_optimizer_steps(tmp_path):
    module, warmup = Module(), SeqLenWarmup(start=8, end=LONG, steps=4)
    fit(tmp_path, module, SeqLenWarmupCallback(warmup), accumulate_grad_batches=3, max_steps=4)
    assert module.lengths == [warmup.at(step) for step in range(1, 5) for _ in range(3)]
    assert "on_before_batch_transfer" not in vars(module)  # nothing is left behind


def test_the_hook_of_a_data_module_is_kept(tmp_path):
    class Data(L.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(rows(), batch_size=4)

        def on_before_batch_transfer(self, batch, dataloader_idx):
            return batch | {"targets": batch["targets"].clamp(max=9)}

    module, warmup = Module(), SeqLenWarmup(start=8, end=LONG, steps=4)
    module.train_dataloader = module.val_dataloader = None
    base = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = L.Trainer(
        **base, max_steps=3, enable_checkpointing=False, limit_val_batches=0, callbacks=[SeqLenWarmupCallback(warmup)]
    )
    trainer.fit(module, datamodule=Data())
    assert module.lengths == [warmup.at(step) for step in (1, 2, 3)]


@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_watcher_sees_the_gradients_and_the_loss_of_its_own_step(tmp_path, accumulation):
    """Lightning computes gradients in a closure of the step, and divides the loss by the accumulation."""
    module, watch = Module(bits=32), WatchCallback(every=1)
    trainer = fit(tmp_path, module, watch, accumulate_grad_batches=accumulation, max_steps=4, gradient_clip_val=0.5)
    expected = [
        sum(module.losses[i : i + accumulation]) / accumulation for i in range(0, 4 * accumulation, accumulation)
    ]
    assert read_log(trainer, "watch/loss") == pytest.approx(expected, rel=1e-5)
    norms = read_log(trainer, "watch/grad_norm")
    assert norms == pytest.approx([0.5] * 4, rel=1e-3)  # clipped: of this step, as the optimizer reads them


def test_the_watcher_changes_nothing(tmp_path):
    plain, watched = Module(), Module()
    fit(tmp_path / "plain", plain)
    fit(tmp_path / "watched", watched, WatchCallback())
    assert plain.losses == watched.losses


def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path):
    def run(folder, steps, resume=None):
        module, watch = Module(), WatchCallback(every=2, deep_every=2)
        warmup = SeqLenWarmupCallback(SeqLenWarmup(start=8, end=LONG, steps=6))
        options = {"max_steps": steps, "limit_train_batches": 4}  # Lightning resumes at the beginning of an epoch
        trainer = fit(tmp_path / folder, module, watch, warmup, resume=resume, **options)
        return trainer, module, watch

    _, whole, first = run("whole", 8)
    trainer, _, _ = run("part", 4)
    trainer.save_checkpoint(tmp_path / "part.ckpt")
    _, resumed, second = run("rest", 8, resume=tmp_path / "part.ckpt")
    assert whole.losses[4:] == resumed.losses
    assert second.watch.state_dict() == first.watch.state_dict()
    for name, p in whole.named_parameters():
        assert torch.equal(p, resumed.get_parameter(name)), name


def test_alarms_are_logged_and_counted(tmp_path, caplog):
    module, watch = Module(), WatchCallback(every=1)
    with torch.no_grad():
        next(p for name, p in module.named_parameters() if "weight" in name)[0, 0] = math.nan
    with caplog.at_level("WARNING"):
        trainer = fit(tmp_path, module, watch, limit_val_batches=0)
    assert watch.alarms[0].kind == "non-finite"
    assert any("non-finite" in record.getMessage() for record in caplog.records)
    assert read_log(trainer, "alarms/non-finite")[-1] >= 1


def test_fabric(tmp_path):
    """A plain loop with Fabric's objects: Watch unwraps them, the state makes the round trip."""
    fabric = L.Fabric(accelerator="cpu", devices=1)

    def build():
        torch.manual_seed(0)
        model = tt.nn.GPT(tt.nn.GPTConfig(vocab=VOCAB, depth=2, width=32, heads=2, context=LONG))
        optimizer = tt.optim.StableAdamW(model.named_parameters(), lr=1e-3, bits=8, min_8bit_size=1)
        model, optimizer = fabric.setup(model, optimizer)
        model.mark_forward_method("loss")
        return model, optimizer, tt.Watch(model, optimizer)

    def steps(model, optimizer, watch, numbers):
        for k in numbers:
            batch = {key: torch.stack([row[key] for row in rows()[4 * k : 4 * k + 4]]) for key in ("tokens", "targets")}
            loss = model.loss(**batch).loss
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss)

    model, optimizer, watch = build()
    assert isinstance(watch.model, tt.nn.GPT)
    steps(model, optimizer, watch, range(3))
    state = {"model": model, "optimizer": optimizer, "watch": watch.state_dict()}
    fabric.save(tmp_path / "state.ckpt", state)
    steps(model, optimizer, watch, range(3, 6))
    again, other, second = build()
    rest = fabric.load(tmp_path / "state.ckpt", {"model": again, "optimizer": other})
    second.load_state_dict(rest["watch"])
    steps(again, other, second, range(3, 6))
    for (name, p), q in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q), name
    assert second.state_dict() == watch.state_dict()
    assert {f"rms/{name}" for name, _ in watch.model.named_parameters()} <= set(second.scalars())


def test_what_cannot_work_is_refused(tmp_path):
    class Two(Module):
        automatic_optimization = False

        def configure_optimizers(self):
            return [torch.optim.SGD(self.parameters(), 0.1), torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)]

    with pytest.raises(ValueError, match="one optimizer"):
        fit(tmp_path, Two(), WatchCallback())
    with pytest.raises(TypeError, match="SeqLenWarmup"):
        SeqLenWarmupCallback(64)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "fabric-ddp", "fabric-fsdp2"])
def test_two_processes_resume_as_if_never_stopped(tmp_path, strategy):
    """8-bit state, the watcher and the lengths, through Lightning's own checkpoints."""

    def run(folder, steps, *resume):
        (tmp_path / folder).mkdir(exist_ok=True)
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
        command = [*launch, "-m", "tests.hosts.two_lightning", strategy, str(tmp_path / folder), str(steps), *resume]
        done = subprocess.run(command, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stderr
        return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))

    whole = run("whole", 8)
    run("parts", 4)
    rest = run("parts", 8, str(tmp_path / "parts" / "end.ckpt"))
    assert whole["lengths"][4:] == rest["lengths"]
    assert (whole["params"], whole["watch"]) == (rest["params"], rest["watch"])
