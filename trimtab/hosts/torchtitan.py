"""TorchTitan: its container of optimizers, with those of trimtab, and a converter to int8 layers.

    optimizer=trimtab.hosts.torchtitan.Optimizers.Config(
        param_groups=[ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 8e-4, "bits": 8})]
    )
    converters=[trimtab.hosts.torchtitan.SwitchBackConverter.Config()]

TorchTitan saves flat state, which it looks up by the names in memory, on any number of processes. So the state is
portable. It builds a model from a tree of configs, so the converter replaces configs, not layers.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torchtitan.components.optimizer import OptimizersContainer  # type: ignore[import-untyped, unused-ignore]
from torchtitan.components.quantization import QuantizationConverter  # type: ignore[import-untyped, unused-ignore]
from torchtitan.models.common.linear import Linear  # type: ignore[import-untyped, unused-ignore]
from torchtitan.protocols.module import Module  # type: ignore[import-untyped, unused-ignore]

from trimtab import optim
from trimtab.nn.convert import head_pattern
from trimtab.nn.kinds import LinearKind, why_too_large
from trimtab.nn.linear import SwitchBackLinear, When


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


class QuantizedLinear(SwitchBackLinear, Module):  # type: ignore[misc]
    """A SwitchBackLinear that TorchTitan builds from a config and initialises."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):  # type: ignore[misc]
        kind: LinearKind = "switchback"
        when: When = "faster"

    def __init__(self, config: Config) -> None:
        sizes = config.in_features, config.out_features
        SwitchBackLinear.__init__(self, *sizes, bias=config.bias, kind=config.kind, when=config.when)


class SwitchBackConverter(QuantizationConverter):  # type: ignore[misc]
    """Replaces the configs of linear layers, but not of output heads and routers."""

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):  # type: ignore[misc]
        kind: LinearKind = "switchback"
        when: When = "faster"
        skip: list[str] = field(default_factory=list)  # patterns of names that stay in float, such as "layers.0.*"

    def __init__(self, config: Config) -> None:
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """Change the config of a model in place, and return it."""
        for name, found, parent, key in list(model_config.traverse(Linear.Config)):
            if type(found) is not Linear.Config:  # a subclass has its own forward
                continue
            if head_pattern(name) or any(fnmatchcase(name, pattern) for pattern in self.config.skip):
                continue
            if why_too_large(self.config.kind, found.in_features, found.out_features) is not None:
                continue
            new = QuantizedLinear.Config(
                in_features=found.in_features,
                out_features=found.out_features,
                bias=found.bias,
                param_init=found.param_init,
                kind=self.config.kind,
                when=self.config.when,
            )
            if isinstance(parent, list):
                parent[key] = new
            else:
                setattr(parent, key, new)
        return model_config
