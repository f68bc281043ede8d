"""Replace the linear layers of a model by quantized ones in place, and revert it.

    report = convert_linears(model, "switchback", skip="*router*")
    print(report)                                  # which layers were converted, which were not, and why

Parameters stay the same objects, so optimizers, names and state dicts do not change.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, cast

from torch import Tensor, nn

from trimtab.nn.kinds import LinearKind, why_too_large
from trimtab.nn.linear import Linear, SwitchBackConv1D, SwitchBackLinear, When
from trimtab.ops.checks import FLOATS

# The paper keeps the output layer in float. A Hugging Face model has get_output_embeddings(); other heads, and routers
# of mixtures of experts, are recognised by their usual names.
HEADS = (
    *("head", "*.head", "*lm_head", "head.fc", "*.head.fc", "fc", "output", "*.output", "*output_projection"),
    *("*embed_out", "*visual_projection", "*text_projection", "*score", "*qa_outputs", "*classifier", "*classifier.*"),
    *("*router", "*router.*"),
)

Rule = str | nn.Module | Callable[[str, nn.Module], bool]


@dataclass
class Report:
    """The result of a conversion; print it for a table."""

    kind: str
    converted: dict[str, str] = field(default_factory=dict)  # name -> description of the new layer
    kept: dict[str, str] = field(default_factory=dict)  # name -> reason
    int8_from: dict[str, int] = field(default_factory=dict)  # name -> the smallest number of tokens that is quantized

    def __str__(self) -> str:
        rows = [("converted", *row) for row in self.converted.items()] + [("kept", *row) for row in self.kept.items()]
        width = max([len(name) for _, name, _ in rows], default=0)
        head = f"{len(self.converted)} linear layers converted to {self.kind}, {len(self.kept)} kept"
        return "\n".join([head, *(f"  {what:9}  {name:{width}}  {why}" for what, name, why in rows)])


def convert_linears(
    model: nn.Module,
    kind: LinearKind = "switchback",
    *,
    skip: Rule | Sequence[Rule] = (),
    only: Rule | Sequence[Rule] | None = None,
    threshold: float = 0.0,
    when: When | Mapping[str, int] = "faster",
) -> Report:
    """Replace every nn.Linear and Hugging Face Conv1D by its quantized version; the report has a reason for the others.

    Args:
        skip: name patterns, modules (with all their children) or functions of (name, module).
        only: convert only these. By default all but output heads (`HEADS`).
        when: "faster" runs calls that are too small to benefit in float, as measured on this machine (tuning.py); the
            report has the smallest number of tokens that is quantized. "always" quantizes every call. A number of
            tokens, or one per layer, repeats the choice of another run: `when=report.int8_from`.
    """
    if kind == "float":
        return revert_linears(model)
    if isinstance(model, nn.Linear) or _is_conv1d(model):
        raise ValueError(
            "the model is itself a linear layer and cannot be replaced in place; build a SwitchBackLinear and load its "
            "state dict, or put it in an nn.Sequential"
        )
    skipped, chosen = _as_rules(skip), None if only is None else _as_rules(only)
    places = list(_linears(model))
    for rule in (*skipped, *(chosen or ())):
        if not any(_matches(rule, name, module) for _, _, name, module in places):
            shown = repr(rule) if isinstance(rule, str) else f"a {type(rule).__name__}"
            known = ", ".join(name for _, _, name, _ in places[:8]) or "none"
            raise ValueError(f"skip or only names {shown}, which matches no linear layer of this model; it has {known}")
    tied = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    outputs = [getattr(m, "get_output_embeddings", lambda: None)() for m in model.modules()]
    heads = {id(head) for head in outputs if head is not None}
    report, made = Report(kind), dict[int, Any]()
    for parent, key, name, module in places:
        why = _why_head(name, module, heads) if only is None else None
        why = why or _why_kept(name, module, skipped, chosen, tied) or why_too_large(kind, *_sizes(module))
        if why is None and id(module) not in made:
            made[id(module)] = _quantized(module, kind, threshold, _when_of(name, when))
        if why is None:
            parent._modules[key] = made[id(module)]
            report.converted[name] = made[id(module)].extra_repr()
            report.int8_from[name] = made[id(module)].int8_from
        else:
            report.kept[name] = why
    return report


def _when_of(name: str, when: When | Mapping[str, int]) -> When:
    if not isinstance(when, Mapping):
        return when
    if name not in when:
        raise ValueError(f"when has no choice for the layer {name!r}, only for {', '.join(list(when)[:8]) or 'none'}")
    return when[name]


def revert_linears(model: nn.Module) -> Report:
    """Replace quantized layers by plain ones with the same parameters."""
    report, made = Report("float"), dict[int, nn.Module]()
    for parent, key, name, module in list(_linears(model)):
        if isinstance(module, SwitchBackLinear | SwitchBackConv1D):
            new = made.get(id(module))
            if new is None:
                new = made[id(module)] = _plain(module)
            parent._modules[key] = new
            report.converted[name] = new.extra_repr() if isinstance(new, nn.Linear) else repr(new)
    return report


def freeze_linears(model: nn.Module) -> None:
    """Quantize all weights now for evaluation (SwitchBackLinear.freeze)."""
    for module in model.modules():
        if isinstance(module, SwitchBackLinear | SwitchBackConv1D):
            module.freeze()


def _linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, str, nn.Module]]:
    """Every use of a linear layer as (parent, key, name, layer); a shared layer has several."""
    for prefix, parent in model.named_modules():
        for key, module in parent._modules.items():
            if isinstance(module, nn.Linear | SwitchBackConv1D) or _is_conv1d(module):
                yield parent, key, f"{prefix}.{key}" if prefix else key, module


def _why_kept(
    name: str, module: nn.Module, skipped: tuple[Rule, ...], chosen: tuple[Rule, ...] | None, tied: set[int]
) -> str | None:
    if any(_matches(rule, name, module) for rule in skipped):
        return "skipped"
    if chosen is not None and not any(_matches(rule, name, module) for rule in chosen):
        return "not among `only`"
    if isinstance(module, SwitchBackLinear | SwitchBackConv1D):
        return f"already {module.kind}; revert_linears(model) first"
    if type(module) not in (nn.Linear, Linear) and not _is_conv1d(module):
        return f"a {type(module).__name__}, which has its own forward"
    if id(module.weight) in tied:
        return "its weight is shared with an embedding"
    weight = cast(Tensor, module.weight)
    if weight.dtype not in FLOATS:
        return f"its weight is {weight.dtype}"
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    if any(hooks) or "weight" not in module._parameters:
        return "it has hooks or parametrizations, which a new layer would lose; convert before adding them"
    return None


def _why_head(name: str, module: nn.Module, heads: set[int]) -> str | None:
    """Whether the layer is an output head, by get_output_embeddings() or by its name."""
    pattern = next((pattern for pattern in HEADS if fnmatchcase(name, pattern)), None)
    if id(module) not in heads and pattern is None:
        return None
    how = "the model's get_output_embeddings()" if id(module) in heads else f"name matches {pattern!r}"
    return f"an output head ({how}); name it in `only` to convert it"


def _quantized(module: nn.Module, kind: LinearKind, threshold: float, when: When) -> Any:
    new: SwitchBackLinear | SwitchBackConv1D
    n_in, n_out = _sizes(module)
    if isinstance(module, nn.Linear):
        new = SwitchBackLinear(n_in, n_out, device="meta", kind=kind, threshold=threshold, when=when)
        new.original = type(module)
    else:
        new = SwitchBackConv1D(n_out, n_in, kind=kind, threshold=threshold, when=when)
        new.original = type(module)  # for revert_linears
    return _with_parameters_of(module, new)


def _sizes(module: nn.Module) -> tuple[int, int]:
    """in_features and out_features."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    n_in, n_out = cast(Tensor, module.weight).shape
    return n_in, n_out


def _plain(module: SwitchBackLinear | SwitchBackConv1D) -> nn.Module:
    if isinstance(module, SwitchBackLinear):
        return _with_parameters_of(module, module.original(module.in_features, module.out_features, device="meta"))
    if module.original is None:
        raise ValueError("this SwitchBackConv1D was not converted from a Conv1D, so it cannot be reverted")
    return _with_parameters_of(module, module.original(module.nf, module.nx))


def _with_parameters_of(old: nn.Module, new: nn.Module) -> nn.Module:
    new._parameters["weight"], new._parameters["bias"] = old._parameters["weight"], old._parameters["bias"]
    return new.train(old.training)


def _is_conv1d(module: object) -> bool:
    # By name: transformers is not a dependency, and its Conv1D has moved between modules.
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and hasattr(module, "weight")


def _as_rules(rules: Rule | Sequence[Rule]) -> tuple[Rule, ...]:
    several = isinstance(rules, Sequence) and not isinstance(rules, str)
    found: tuple[Any, ...] = tuple(rules) if several else (rules,)  # type: ignore[arg-type]
    for rule in found:
        if not (isinstance(rule, str | nn.Module) or callable(rule)) or isinstance(rule, type):
            raise TypeError(
                "skip and only take name patterns, modules or functions of (name, module), "
                f"got {rule if isinstance(rule, type) else type(rule).__name__}"
            )
    return found


def _matches(rule: Rule, name: str, module: nn.Module) -> bool:
    if isinstance(rule, str):
        return fnmatchcase(name, rule)
    if isinstance(rule, nn.Module):
        return any(module is inner for inner in rule.modules())
    return rule(name, module)
