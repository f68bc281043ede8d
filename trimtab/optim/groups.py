"""Parameter groups: 32-bit state, weight decay and learning-rate scale by name, module or predicate.

Embeddings get gradients in a few rows at a time, some of them very large, and can become unstable with 8-bit state
(Dettmers et al. 2022). By default they keep 32-bit state.
"""

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

# Names of embeddings in GPT-2, Llama, BERT, minGPT (tok_emb), BLOOM and XLNet (word_emb), T5 and BART (shared).
EMBEDDINGS = (
    *("*embed*", "*Embed*", "emb.*", "*.emb.*", "*wte*", "*wpe*"),
    *("*tok_emb*", "*word_emb*", "*pos_emb*", "shared.weight", "*.shared.weight"),
)

Keep = str | nn.Module | Tensor | Callable[[str, Tensor], bool]


def as_rules(keep: Keep | Iterable[Keep]) -> tuple[Keep, ...]:
    """One rule or several, checked."""
    several = isinstance(keep, Iterable) and not isinstance(keep, str | nn.Module | Tensor)
    rules: tuple[Any, ...] = tuple(keep) if several else (keep,)  # type: ignore[arg-type]
    for rule in rules:
        if isinstance(rule, type):
            raise TypeError(
                f"keep32 got the class {rule.__name__}, but an optimizer has no modules. Pass the modules themselves, "
                f"or build the groups with trimtab.optim.groups(model, keep32={rule.__name__})"
            )
        if not (isinstance(rule, str | nn.Module | Tensor) or callable(rule)):
            raise TypeError(
                "keep32 takes name patterns, modules, parameters or a function of (name, parameter), "
                f"got {type(rule).__name__}"
            )
    return rules


def matches(rule: Keep, name: str | None, p: Tensor) -> bool:
    if isinstance(rule, str):
        return name is not None and fnmatchcase(name, rule)
    if isinstance(rule, Tensor):
        return rule is p
    if isinstance(rule, nn.Module):
        return any(q is p for q in rule.parameters())
    return bool(rule(name or "", p))


def reason(rule: Keep) -> str:
    """Why a parameter that matches the rule keeps 32-bit state."""
    if isinstance(rule, str):
        return f"name matches {rule!r}"
    if isinstance(rule, Tensor):
        return "listed in keep32"
    if isinstance(rule, nn.Module):
        return f"in a module of class {type(rule).__name__}"
    return f"chosen by {getattr(rule, '__name__', 'a predicate')}"


def groups(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.01,
    no_decay: str | Sequence[str] = (),
    keep32: Keep | type[nn.Module] | Sequence[Keep | type[nn.Module]] = (nn.Embedding, nn.EmbeddingBag, *EMBEDDINGS),
    mup_ratio: float = 1.0,
    independent_decay: bool = False,
) -> list[dict[str, Any]]:
    """Parameter groups of a model, for any optimizer of trimtab.

    Args:
        lr: the learning rate of all parameters that muParam does not scale.
        weight_decay: of tensors with two dimensions or more; vectors (biases, gains) never decay.
        no_decay: name patterns of further tensors that do not decay.
        keep32: the parameters with 32-bit state: patterns, modules, predicates, and classes of modules. By default
            embeddings, by class and by name, except modules with `keep32 = False`.
        mup_ratio: base width / width. Multiplies the learning rate of every linear layer's weight; decay is not scaled.
        independent_decay: decay by weight_decay * lr / lr_max, independent of the peak learning rate.
    """
    if mup_ratio <= 0:
        raise ValueError(f"mup_ratio is base width / width and must be positive, got {mup_ratio}")
    given = keep32 if isinstance(keep32, Sequence) and not isinstance(keep32, str) else (keep32,)
    classes = tuple(rule for rule in given if isinstance(rule, type))
    named = as_rules([rule for rule in given if not isinstance(rule, type)])
    # A module can opt out, as StableEmbedding(keep32=False) does.
    found = [m for m in model.modules() if isinstance(m, classes)]
    rules = (*(m for m in found if getattr(m, "keep32", True)), *named)
    declined = {id(p) for m in found if not getattr(m, "keep32", True) for p in m.parameters()}
    patterns = (no_decay,) if isinstance(no_decay, str) else tuple(no_decay)
    # Hugging Face's Conv1D is GPT-2's linear layer with its weight transposed.
    names = ("Conv1D", "SwitchBackConv1D")
    linear = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear) or type(m).__name__ in names}
    members: dict[tuple[bool, bool, bool], list[tuple[str, Tensor]]] = {}
    for name, p in model.named_parameters():
        decays = p.dim() >= 2 and not any(fnmatchcase(name, pattern) for pattern in patterns)
        members.setdefault((decays, id(p) in linear, id(p) in declined), []).append((name, p))
    result = []
    for (decays, scaled, opted_out), params in sorted(members.items(), reverse=True):
        ratio = mup_ratio if scaled else 1.0
        decay = weight_decay if independent_decay else weight_decay / ratio
        result.append(
            {
                "params": params,
                "lr": lr * ratio,
                "weight_decay": decay if decays else 0.0,
                "independent_decay": independent_decay,
                "keep32": [r for r in rules if not opted_out and any(matches(r, name, p) for name, p in params)],
            }
        )
    return result
