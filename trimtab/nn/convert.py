"""Replace the linear layers of a model by quantized ones in place, and revert it.

    report = convert_linears(model, "switchback", skip="*router*")
    print(report)                                  # which layers were converted, which were not, and why

Parameters stay the same objects, so optimizers, names and state dicts do not change.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from trimtab.nn.experts import SwitchBackExperts, is_experts, matrices_of, quantize_experts
from trimtab.nn.kinds import LinearKind, why_too_large
from trimtab.nn.linear import Linear, SwitchBackConv1D, SwitchBackLinear, When, _Quantized
from trimtab.nn.multihead import SEPARATE, SwitchBackAttention, quantize_attention
from trimtab.nn.parts import CHILD, adopt, adopted_from, find_part
from trimtab.ops.checks import FLOATS

# The paper keeps the output layer in float. Hugging Face and timm models say which layer it is (`_heads`); others are
# recognised by their usual names. Compared with a name up to its first number, so that `layers.0.output` in a block is
# no head, and `classifier.1` is one.
HEADS = (
    *("head", "*.head", "head.*", "*.head.*", "*_head", "*_head.*", "heads.head", "head_dist", "fc", "last_linear"),
    *(
        "output",
        "*.output",
        "*output_projection",
        "*embed_out",
        "*score",
        "*qa_outputs",
        "*classifier",
        "*classifier.*",
    ),
    *("*dense_prediction", "*seq_relationship", "*visual_projection", "*text_projection", "text.proj"),
)
ROUTERS = ("*router", "*router.*")  # of mixtures of experts
GATE = "a gate beside experts"  # the other usual name
MARK = "trimtab_linears"  # the entry of a Hugging Face config: which layers are quantized (`trimtab.hosts.hf.restore`)
SMALLEST = 16  # rows and columns of a 3-D parameter that is reported as a stack of matrices

Rule = str | nn.Module | Callable[[str, nn.Module], bool]


@dataclass
class Report:
    """The result of a conversion; print it for a table."""

    kind: str
    converted: dict[str, str] = field(default_factory=dict)  # name -> description of the new layer
    kept: dict[str, str] = field(default_factory=dict)  # name -> reason
    int8_from: dict[str, int] = field(default_factory=dict)  # name -> the smallest number of tokens that is quantized
    share: float = 0.0  # converted parameters / all matrix parameters except embeddings

    def __str__(self) -> str:
        rows = [("converted", *row) for row in self.converted.items()] + [("kept", *row) for row in self.kept.items()]
        width = max([len(name) for _, name, _ in rows], default=0)
        head = (
            f"{len(self.converted)} linear layers converted to {self.kind}, {len(self.kept)} kept; converted: "
            f"{self.share:.1%} of the matrix parameters without embeddings"
        )
        return "\n".join([head, *(f"  {what:9}  {name:{width}}  {why}" for what, name, why in rows)])


@dataclass
class Place:
    """A matrix that can be quantized: a layer, or a parameter of an attention or of experts."""

    name: str
    module: nn.Module  # the layer, or the module that owns the parameter
    weight: Tensor
    sizes: tuple[int, int]  # in_features and out_features
    quantize: Callable[..., _Quantized] | None  # puts the quantized version in its place; None: its class is not known
    quantized: _Quantized | None  # if it is already


def convert_linears(
    model: nn.Module,
    kind: LinearKind = "switchback",
    *,
    skip: Rule | Sequence[Rule] = (),
    only: Rule | Sequence[Rule] | None = None,
    threshold: float = 0.0,
    when: When | Mapping[str, int] = "faster",
) -> Report:
    """Replace linear layers by their quantized versions; the report has a reason for those that stay.

    Converted are nn.Linear, Hugging Face's Conv1D, the projections of nn.MultiheadAttention and the experts of Hugging
    Face's mixtures. A Hugging Face config gets an entry, from which `trimtab.hosts.hf.restore` repeats the conversion.

    Args:
        skip: name patterns, modules (with all their children) or functions of (name, module).
        only: convert only these. By default all but output heads (`HEADS`) and routers.
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
    _check_not_compiled(model)
    skipped, chosen = _as_rules(skip), None if only is None else _as_rules(only)
    places = list(_places(model))
    for rule in (*skipped, *(chosen or ())):
        if not any(_matches(rule, place.name, place.module) for place in places):
            shown = repr(rule) if isinstance(rule, str) else f"a {type(rule).__name__}"
            known = ", ".join(place.name for place in places[:8]) or "none"
            raise ValueError(f"skip or only names {shown}, which matches no linear layer of this model; it has {known}")
    tied = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    heads = _heads(model)
    report, made = Report(kind), dict[int, _Quantized]()
    for place in places:
        why = _why_head(place, heads) if only is None else None
        why = why or _why_kept(place, skipped, chosen, tied) or why_too_large(kind, *place.sizes)
        if why is not None:
            report.kept[place.name] = why
            continue
        assert place.quantize is not None
        options = {"kind": kind, "threshold": threshold, "when": _when_of(place.name, when)}
        new = made[id(place.module)] = place.quantize(made.get(id(place.module)), **options)
        experts = f"{len(place.weight)} experts of " if isinstance(place.module, SwitchBackExperts) else ""
        report.converted[place.name] = experts + new.extra_repr()
        report.int8_from[place.name] = new.int8_from
    _leave_fast_path(model)
    _mark(model)
    return _with_shares(report, model)


def _when_of(name: str, when: When | Mapping[str, int]) -> When:
    if not isinstance(when, Mapping):
        return when
    if name not in when:
        raise ValueError(f"when has no choice for the layer {name!r}, only for {', '.join(list(when)[:8]) or 'none'}")
    return when[name]


def revert_linears(model: nn.Module) -> Report:
    """Replace quantized layers by plain ones with the same parameters."""
    report, made = Report("float"), dict[int, nn.Module]()
    for place in [place for place in _places(model) if place.quantized is not None]:
        report.converted[place.name] = f"{place.sizes[0]}, {place.sizes[1]}"
    for name, module in list(model.named_modules()):
        for key, child in list(module._modules.items()):
            if isinstance(child, SwitchBackLinear | SwitchBackConv1D):
                new = made.setdefault(id(child), _plain(child))
                module._modules[key] = new
                where = f"{name}.{key}" if name else key
                report.converted[where] = new.extra_repr() if isinstance(new, nn.Linear) else repr(new)
        if isinstance(module, SwitchBackAttention | SwitchBackExperts):
            # The class changes back; one that something else has changed since, such as fully_shard, would be lost.
            plain: Any = nn.MultiheadAttention if type(module) is SwitchBackAttention else adopted_from(type(module))
            if plain is None:
                raise ValueError(f"{name} is now a {type(module).__name__}; revert before sharding or wrapping it")
            module.__class__ = plain
            module._modules.pop(CHILD, None)
    _leave_fast_path(model)
    _mark(model)
    return _with_shares(report, model)


def freeze_linears(model: nn.Module) -> None:
    """Quantize all weights now for evaluation (SwitchBackLinear.freeze)."""
    for module in model.modules():
        if isinstance(module, _Quantized):
            module.freeze()


# --- What there is to convert


def _places(model: nn.Module) -> Iterator[Place]:
    """Every matrix of a linear layer; a layer that is used in two places appears twice."""
    for prefix, parent in model.named_modules():
        dot = f"{prefix}." if prefix else ""
        if isinstance(parent, nn.MultiheadAttention):
            known = type(parent) in (nn.MultiheadAttention, SwitchBackAttention)
            for name in ("in_proj_weight", *SEPARATE):
                matrix = parent._parameters.get(name)
                if matrix is not None:
                    change = partial(_quantize_matrix, quantize_attention, parent, name) if known else None
                    n_out, n_in = matrix.shape
                    yield Place(f"{dot}{name}", parent, matrix, (n_in, n_out), change, find_part(parent, name))
        if is_experts(parent):
            for name in matrices_of(parent):
                weight, parts = cast(Tensor, parent._parameters[name]), find_part(parent, name)
                n_out, n_in = reversed(weight.shape[1:]) if parent.is_transposed else weight.shape[1:]
                change = partial(_quantize_matrix, quantize_experts, parent, name)
                yield Place(f"{dot}{name}", parent, weight, (n_in, n_out), change, None if parts is None else parts[0])
        for key, module in parent._modules.items():
            if isinstance(module, nn.Linear | SwitchBackConv1D) or _is_conv1d(module):
                weight = cast(Tensor, module.weight)
                n_out, n_in = weight.shape if isinstance(module, nn.Linear) else reversed(weight.shape)
                change = partial(_quantize_layer, parent, key, module) if _has_known_forward(parent, module) else None
                done = module if isinstance(module, _Quantized) else None
                yield Place(f"{dot}{key}", module, weight, (n_in, n_out), change, done)


def _has_known_forward(parent: nn.Module, module: nn.Module) -> bool:
    # The plain attention reads the weight of its out_proj and does not call it; ours does.
    if type(module) is NonDynamicallyQuantizableLinear:
        return type(parent) in (nn.MultiheadAttention, SwitchBackAttention)
    return type(module) in (nn.Linear, Linear) or _is_conv1d(module)


def _quantize_matrix(
    quantize: Callable[..., _Quantized], owner: nn.Module, name: str, _: _Quantized | None, **options: Any
) -> _Quantized:
    return quantize(owner, name, **options)


def _quantize_layer(
    parent: nn.Module, key: str, module: nn.Module, made: _Quantized | None, **options: Any
) -> _Quantized:
    """Replace a layer; `made` is what it was replaced by in another place."""
    new: Any = made if made is not None else _quantized(module, **options)
    parent._modules[key] = new
    if type(parent) is nn.MultiheadAttention:
        parent.__class__ = SwitchBackAttention
    return cast(_Quantized, new)


def _why_kept(place: Place, skipped: tuple[Rule, ...], chosen: tuple[Rule, ...] | None, tied: set[int]) -> str | None:
    name, module = place.name, place.module
    if any(_matches(rule, name, module) for rule in skipped):
        return "skipped"
    if chosen is not None and not any(_matches(rule, name, module) for rule in chosen):
        return "not among `only`"
    if place.quantized is not None:
        return f"already {place.quantized.kind}; revert_linears(model) first"
    if place.quantize is None:
        return f"a {type(module).__name__}, which has its own forward"
    if id(place.weight) in tied:
        return "its weight is shared with an embedding"
    if place.weight.dtype not in FLOATS:
        return f"its weight is {place.weight.dtype}"
    if place.weight is not getattr(module, "weight", None):
        return None  # an attention or experts, which keep their hooks
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    if any(hooks) or "weight" not in module._parameters:
        return "it has hooks or parametrizations, which a new layer would lose; convert before adding them"
    return None


def _heads(model: nn.Module) -> dict[int, str]:
    """Output heads that models name themselves, by id, and how: those of Hugging Face and timm, and routers."""
    heads: dict[int, str] = {}
    for module in model.modules():
        if "experts" in module._modules and isinstance(module._modules.get("gate"), nn.Linear):
            heads[id(module.gate)] = GATE
        for ask in ("get_output_embeddings", "get_classifier"):
            found = getattr(module, ask, lambda: None)() if hasattr(type(module), ask) else None
            for head in found if isinstance(found, tuple) else (found,):
                heads |= {} if head is None else {id(head): f"the model's {ask}()"}
        base = getattr(module, "base_model", None) if hasattr(type(module), "base_model_prefix") else None
        if isinstance(base, nn.Module) and base is not module:
            body = {id(inner) for inner in base.modules()}
            outside = [(name, inner) for name, inner in module.named_modules() if id(inner) not in body]
            heads = {id(inner): f"outside of {type(base).__name__}" for n, inner in outside if n == _stem(n)} | heads
    return heads


def _why_head(place: Place, heads: dict[int, str]) -> str | None:
    """Whether the layer is an output head or a router: because the model says so, or by its name."""
    how, pattern = heads.get(id(place.module)), head_pattern(place.name)
    if how is None and pattern is None:
        return None
    what = "a router" if how == GATE or pattern in ROUTERS else "an output head"
    return f"{what} ({how or f'name matches {pattern!r}'}); name it in `only` to convert it"


def head_pattern(name: str) -> str | None:
    """The pattern of HEADS or ROUTERS that a layer's name matches."""
    pattern = next((pattern for pattern in HEADS if fnmatchcase(_stem(name), pattern)), None)
    return pattern or next((pattern for pattern in ROUTERS if fnmatchcase(name, pattern)), None)


def _stem(name: str) -> str:
    """A name up to its first number: outside of lists of blocks it is the whole name."""
    parts = name.split(".")
    return ".".join(parts[: next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts))])


def _with_shares(report: Report, model: nn.Module) -> Report:
    """Add the converted share of all matrices, and stacks of matrices that are not known here."""
    places = list(_places(model))
    tables = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    matrices = {id(p): p for p in model.parameters() if p.dim() >= 2 and id(p) not in tables}
    total = max(1, sum(p.numel() for p in matrices.values()))
    done = {id(place.weight): place.weight for place in places if place.quantized is not None}
    report.share = sum(p.numel() for p in done.values()) / total
    known = {id(place.weight) for place in places}
    for prefix, module in model.named_modules():
        if type(module).__module__.startswith("torch.nn."):
            continue  # convolutions
        for name, p in module.named_parameters(prefix, recurse=False):
            if p.dim() == 3 and len(p) > 1 and min(p.shape[1:]) >= SMALLEST and id(p) not in known:
                shape = " x ".join(map(str, p.shape))
                why = f"a 3-D parameter ({shape}) of a {type(module).__name__}, which has its own forward"
                report.kept[name] = f"{why}; {p.numel() / total:.1%} of the matrix parameters"
    return report


# --- What else depends on it


def _check_not_compiled(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None:
            raise ValueError(
                f"{name or 'the model'} is compiled, and its compiled code would keep the plain layers; convert first: "
                "convert_linears(model), then model = torch.compile(model)"
            )


def _leave_fast_path(model: nn.Module) -> None:
    """PyTorch's Transformer layers have a fast path in evaluation that reads the weights and does not call the layers.

    Switch it off where a layer is quantized, and on again where none is.
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerEncoder):
            name = "use_nested_tensor" if isinstance(module, nn.TransformerEncoder) else "activation_relu_or_gelu"
            saved, state = f"_plain_{name}", module.__dict__
            if any(isinstance(inner, _Quantized) for inner in module.modules()):
                state.setdefault(saved, state[name])
                state[name] = 0
            elif saved in state:
                state[name] = state.pop(saved)


def _mark(model: nn.Module) -> None:
    """Write into a Hugging Face config which layers are quantized; other libraries ignore the entry."""
    config: Any = getattr(model, "config", None)
    if not hasattr(type(config), "save_pretrained") or not hasattr(type(model), "base_model_prefix"):
        return  # not a model of its own, as PEFT's wrapper, which shows the config of the model inside
    groups = dict[tuple[str, float], dict[str, int]]()
    for place in _places(model):
        if place.quantized is not None:
            layer = place.quantized
            groups.setdefault((layer.kind, layer.threshold), {})[place.name] = layer.int8_from
    if groups:
        mark = [{"kind": kind, "threshold": at, "int8_from": found} for (kind, at), found in groups.items()]
        setattr(config, MARK, mark)
    elif hasattr(config, MARK):
        delattr(config, MARK)


# --- Layers


def _quantized(module: nn.Module, *, kind: LinearKind, threshold: float, when: When) -> nn.Module:
    new: SwitchBackLinear | SwitchBackConv1D
    if isinstance(module, nn.Linear):
        n_in, n_out = module.in_features, module.out_features
        new = SwitchBackLinear(n_in, n_out, device="meta", kind=kind, threshold=threshold, when=when)
        new.original = type(module)
    else:
        n_in, n_out = cast(Tensor, module.weight).shape
        new = SwitchBackConv1D(n_out, n_in, kind=kind, threshold=threshold, when=when)
        new.original = type(module)  # for revert_linears
        new.__class__ = adopt(SwitchBackConv1D, type(module))  # PEFT asks whether it is a Conv1D
    return _with_parameters_of(module, new)


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
