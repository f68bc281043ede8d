"""Run by torchrun on two processes: the Trainer of transformers with DDP or FSDP2 and both callbacks; prints JSON.

torchrun --nproc-per-node 2 -m tests.hosts.two_trainer ddp|fsdp2 FOLDER [RESUME]
"""

import json
import sys
import warnings
from pathlib import Path

import torch
from accelerate import DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from transformers import Trainer

import trimtab as tt
from tests.hosts.test_hf_trainer import LONG, make
from trimtab.hosts.hf_trainer import SeqLenWarmupCallback, WatchCallback
from trimtab.schedule import SeqLenWarmup

FSDP2 = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]}}
WARMUP = SeqLenWarmup(start=8, end=LONG, steps=6)


class Sharded(Trainer):
    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        # Accelerate takes the plugin for GPUs only, and silently uses DDP; its code for FSDP2 works on the CPU too.
        plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
        for state in (PartialState(), self.accelerator.state):
            state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin
        self.is_fsdp_enabled = True


def main():
    warnings.simplefilter("ignore")
    name, folder, *resume = sys.argv[1:]
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "lr_scheduler_type": "constant"}
    options |= {"save_strategy": "steps", "save_steps": 3}  # between two measurements of the watcher
    if name == "fsdp2":
        options |= {"kind": Sharded, **FSDP2}
    trainer = make(Path(folder), **options)
    # The Trainer refuses `optimizers=` with FSDP. Accelerate gives the sharded parameters to the optimizer.
    trainer.optimizer = tt.optim.AdamW(trainer.model.named_parameters(), lr=1e-3, bits=8, min_8bit_size=1)
    lengths = []
    trainer.model.register_forward_pre_hook(
        lambda model, _, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    watch = WatchCallback(every=2, deep_every=2)
    watch.attach(trainer)
    SeqLenWarmupCallback(WARMUP).attach(trainer)
    trainer.train(resume_from_checkpoint=resume[0] if resume else None)
    params = list(trainer.model.parameters())
    values = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in params]
    found = {
        "sharded": all(hasattr(p, "full_tensor") for p in params),
        "replicated": isinstance(trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel),
        "coded": sum("exp_avg_codes" in state for state in trainer.optimizer.state.values()),
        "lengths": lengths,
        "params": [float(p.double().sum()) for p in values],
        "watch": watch.watch.state_dict(),
        "alarms": [str(alarm) for alarm in watch.alarms],
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
    }
    print(json.dumps(found) if torch.distributed.get_rank() == 0 else "", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
