"""Hugging Face models on disk: `restore` makes a saved model quantized again.

    convert_linears(model, "switchback")
    model.save_pretrained(folder)                                            # a plain checkpoint: opens without Trimtab
    model = restore(AutoModelForCausalLM.from_pretrained(folder))            # with the same quantized layers as before

`convert_linears` writes into the model's config which layers are quantized. transformers keeps the entry and does not
use it.
"""

from typing import Any, TypeVar

from torch import nn

from trimtab.nn.convert import MARK, Report, convert_linears
from trimtab.nn.linear import When

Model = TypeVar("Model", bound=nn.Module)


def restore(model: Model, *, when: When | None = None) -> Model:
    """Convert the layers that were quantized when the model was saved, in place; returns the model.

    Args:
        when: as in `convert_linears`; None repeats the choices of the saved model, so it computes the same.
    """
    config: Any = getattr(model, "config", None)
    mark = getattr(config, MARK, None)
    if not mark:
        raise ValueError(
            "the model's config does not say that its layers were quantized; convert_linears(model) converts a plain "
            "model"
        )
    try:
        groups = [(str(g["kind"]), float(g["threshold"]), _names(model, g["int8_from"])) for g in mark]
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"the entry {MARK!r} of the model's config is damaged: {error!r}; remove it") from None
    for kind, threshold, chosen in groups:
        report: Report = convert_linears(
            model,
            kind,  # type: ignore[arg-type]
            only=lambda name, _, chosen=chosen: name in chosen,
            threshold=threshold,
            when=chosen if when is None else when,
        )
        missing = {name: report.kept.get(name, "not in the model") for name in chosen.keys() - report.converted.keys()}
        if missing:
            name, why = next(iter(sorted(missing.items())))
            raise ValueError(f"{len(missing)} layers could not be quantized again, such as {name}: {why}")
    return model


def _names(model: nn.Module, saved: dict[str, int]) -> dict[str, int]:
    """The saved names in this model: it may have been saved without its head, or with one that it does not have now."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    for names in (saved, {prefix + name: n for name, n in saved.items()}):
        if all(_has(model, name) for name in names):
            return dict(names)
    # Without the prefix, and without layers of the head.
    inner = {name.removeprefix(prefix): n for name, n in saved.items() if name.startswith(prefix)}
    if inner and all(_has(model, name) for name in inner):
        return inner
    gone = next(name for name in saved if not _has(model, name))
    raise ValueError(f"the saved model had a quantized layer {gone}, and this {type(model).__name__} has none")


def _has(model: nn.Module, name: str) -> bool:
    owner, _, last = name.rpartition(".")
    try:
        return hasattr(model.get_submodule(owner), last)
    except AttributeError:
        return False
