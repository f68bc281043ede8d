"""Quantized products with matrices that another module owns: a slice of a parameter, or one expert of many.

nn.MultiheadAttention and the experts of Hugging Face's mixtures keep several matrices in one parameter. Their quantized
versions change the class of the module and leave its parameters alone, so names, state dicts, optimizers and hooks do
not change. Each matrix has a `Part`, a child module without parameters, which quantizes it and keeps its codes.
"""

from typing import Any

from torch import Tensor, nn

from trimtab.nn.kinds import LinearKind
from trimtab.nn.linear import When, _Quantized

CHILD = "quantized"  # the name of the child that holds the parts
_ADOPTED: dict[tuple[type, type], type] = {}


class Part(_Quantized):
    """The products of one matrix: `parameter[index]` of the owner, [out, in], or [in, out] if `transposed`.

    The owner passes the matrix to `forward` as one of several outputs of `unbind` or `chunk`: the gradient of each
    separate slice would have the size of the whole parameter.
    """

    def __init__(
        self,
        owner: nn.Module,
        parameter: str,
        index: int | slice,
        *,
        bias: str | None = None,
        bias_index: int | slice | None = None,
        transposed: bool = False,
        kind: LinearKind = "switchback",
        threshold: float = 0.0,
        when: When = "always",
    ) -> None:
        super().__init__()
        # Not registered as a child: it is the parent.
        self.__dict__["owner"] = owner
        self.parameter, self.index, self.transposed = parameter, index, transposed
        self.bias_name, self.bias_index = bias, index if bias_index is None else bias_index
        self._given: tuple[Tensor, Tensor | None] | None = None
        out_features, in_features = reversed(self.weight.shape) if transposed else self.weight.shape
        self.in_features, self.out_features = in_features, out_features
        self._set_kind(in_features, out_features, kind, threshold, when)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        if self._given is not None:
            return self._given[0]
        whole: Tensor = getattr(self.owner, self.parameter)
        return whole[self.index]

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        if self._given is not None:
            return self._given[1]
        whole = None if self.bias_name is None else getattr(self.owner, self.bias_name)
        return None if whole is None else whole[self.bias_index]

    def matrix(self) -> Tensor:
        return self.weight.t() if self.transposed else self.weight

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # type: ignore[override]
        self._given = weight, bias
        try:
            return super().forward(x)
        finally:
            self._given = None


def adopt(ours: Any, theirs: Any) -> Any:
    """A class that behaves as `ours` and is an instance of `theirs`, for code that asks with isinstance."""

    if (ours, theirs) in _ADOPTED:
        return _ADOPTED[ours, theirs]

    def reduce(self: nn.Module, protocol: Any) -> Any:
        return _remake, (ours, theirs), self.__getstate__()

    made = _ADOPTED[ours, theirs] = type(
        ours.__name__, (ours, theirs), {"__reduce_ex__": reduce, "__module__": ours.__module__}
    )
    return made


def adopted_from(made: type) -> Any:
    """The class `theirs` of a class made by `adopt`; None for any other class."""
    return next((theirs for (_, theirs), known in _ADOPTED.items() if known is made), None)


def _remake(ours: type, theirs: type) -> Any:
    cls = adopt(ours, theirs)
    return cls.__new__(cls)


def add_part(owner: nn.Module, name: str, part: nn.Module) -> None:
    if CHILD not in owner._modules:
        owner.add_module(CHILD, nn.ModuleDict())
    parts = owner._modules[CHILD]
    assert isinstance(parts, nn.ModuleDict)
    parts[name] = part.train(owner.training)


def find_part(owner: nn.Module, name: str) -> Any:
    """The part of this name, or None: its matrix is not quantized."""
    parts = owner._modules.get(CHILD)
    return parts[name] if isinstance(parts, nn.ModuleDict) and name in parts else None
