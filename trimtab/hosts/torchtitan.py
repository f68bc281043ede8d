"""TorchTitan: its container of optimizers, with those of trimtab.

    optimizer=trimtab.hosts.torchtitan.Optimizers.Config(
        param_groups=[ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 8e-4, "bits": 8})]
    )

TorchTitan saves flat state, which it looks up by the names in memory, on any number of processes. So the state is
portable.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchtitan.components.optimizer import OptimizersContainer  # type: ignore[import-untyped, unused-ignore]

from trimtab import optim


class Optimizers(OptimizersContainer):  # type: ignore[misc]
    """`optimizer_name` is that of a class in trimtab.optim."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):  # type: ignore[misc]
        pass

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., optim.Optimizer]:
        kinds = {key: kind for key, kind in vars(optim).items() if isinstance(kind, type)}
        kinds = {key: kind for key, kind in kinds.items() if issubclass(kind, optim.Optimizer)}
        if name not in kinds or name == "Optimizer":
            known = ", ".join(sorted(kinds.keys() - {"Optimizer"}))
            raise ValueError(f"optimizer_name must be one of {known}, got {name!r}")

        def make(*args: Any, **kwargs: Any) -> optim.Optimizer:
            optimizer: optim.Optimizer = kinds[name](*args, **kwargs)
            optimizer.default_format = "portable"  # also on one process: others may load it
            return optimizer

        return make

    def _register_bf16_optimizer_state_hook(self) -> None:
        raise ValueError(
            "implementation='fused_opt_states_bf16' is for PyTorch's Adam; leave it out, and set bits=8 in the "
            "optimizer_kwargs of a group for less memory"
        )
