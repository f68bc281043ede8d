"""Run by torchrun on two processes: Lightning with DDP or FSDP2, with both callbacks; prints one line of JSON.

torchrun --nproc-per-node 2 -m tests.hosts.two_lightning ddp|fsdp2|fabric-ddp|fabric-fsdp2 FOLDER STEPS [RESUME]
"""

import json
import sys
import warnings
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import trimtab as tt
from tests.hosts.test_lightning import LONG, VOCAB, Module, rows
from trimtab.hosts.lightning import SeqLenWarmupCallback, WatchCallback
from trimtab.schedule import SeqLenWarmup

WARMUP = SeqLenWarmup(start=8, end=LONG, steps=6)


class Replicated(Module):
    def train_dataloader(self):
        # Divided here: the sampler that Lightning would add has another order after a resume.
        return DataLoader(rows()[self.trainer.global_rank :: 2], batch_size=4)


class Sharded(Replicated):
    def configure_model(self):
        if not hasattr(self, "mesh_used"):
            self.mesh_used = True
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])


def strategy_of(name):
    if name == "ddp":
        return "ddp"
    from lightning.pytorch.strategies import ModelParallelStrategy

    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=False)


def with_trainer(name, folder, steps, resume):
    module = (Replicated if name == "ddp" else Sharded)()
    watch = WatchCallback(every=3, deep_every=3, taps=False)  # saved between two measurements
    saving = ModelCheckpoint(folder, "end", save_on_train_epoch_end=True, enable_version_counter=False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy_of(name),
        max_epochs=steps // 4,
        limit_train_batches=4,  # Lightning resumes at the beginning of an epoch
        limit_val_batches=0,
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[watch, SeqLenWarmupCallback(WARMUP), saving],
    )
    trainer.fit(module, ckpt_path=resume)
    return module.model, watch.watch, module.lengths


def with_fabric(name, folder, steps, resume):
    from lightning.fabric.strategies import ModelParallelStrategy

    strategy = "ddp"
    if name == "fabric-fsdp2":

        def shard(model, mesh):
            fully_shard(model, mesh=mesh["data_parallel"])
            return model

        strategy = ModelParallelStrategy(
            shard, data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=False
        )
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    model = tt.nn.GPT(tt.nn.GPTConfig(vocab=VOCAB, depth=2, width=32, heads=2, context=LONG))
    model = fabric.setup_module(model)
    model.mark_forward_method("loss")
    optimizer = tt.optim.StableAdamW(model.named_parameters(), lr=1e-3, bits=8, min_8bit_size=1)
    optimizer = fabric.setup_optimizers(optimizer)
    watch, begin, lengths = tt.Watch(model, optimizer, every=3, taps=False), 0, []
    if resume:
        rest = fabric.load(resume, {"model": model, "optimizer": optimizer})
        watch.load_state_dict(rest["watch"])
        begin = rest["step"]
    loader = list(DataLoader(rows(), batch_size=4))
    for step in range(begin + 1, steps + 1):
        batch = WARMUP.cut(loader[(2 * step + fabric.global_rank) % len(loader)], step)
        lengths.append(batch["tokens"].shape[1])
        loss = model.loss(**batch).loss
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        watch.step(loss)
    watch.share()
    state = {"model": model, "optimizer": optimizer, "watch": watch.state_dict(), "step": steps}
    fabric.save(folder / "end.ckpt", state)
    return model, watch, lengths


def main():
    warnings.simplefilter("ignore")
    name, folder, steps, *resume = sys.argv[1:]
    run = with_fabric if name.startswith("fabric") else with_trainer
    model, watch, lengths = run(name, Path(folder), int(steps), resume[0] if resume else None)
    values = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    found = {"lengths": lengths, "params": [float(p.double().sum()) for p in values], "watch": watch.state_dict()}
    print(json.dumps(found) if torch.distributed.get_rank() == 0 else "", flush=True)


if __name__ == "__main__":
    main()
