"""What a study trains: a recipe by its name, or somebody's own model and data as `module:function`.

    open_subject("gpt-lab")                        a recipe
    open_subject("my_project.small:build")         a function that returns a model and its data (train/module.py)
    with_values(config, {"batch": 32, "optim.betas": [0.9, 0.999]})

Overrides are checked against the types of the config, one by one, so that a study file with a slip in it is refused
before anything is trained.
"""

import difflib
import math
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from trimtab.recipes import RECIPES
from trimtab.train.config import KINDS, ConfigError, RunConfig, from_json, kind_of, to_json
from trimtab.train.module import module_run


def open_subject(text: str) -> RunConfig:
    if ":" in text:
        return module_run(text)
    if text not in RECIPES:
        raise ConfigError(
            f"there is no recipe {text!r}{did_you_mean(text, RECIPES)} `trimtab recipes` lists them; a model of your "
            "own is package.file:function"
        )
    return RECIPES[text]()


def did_you_mean(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f". Did you mean {close[0]!r}?" if close else "."


def with_steps(config: RunConfig, steps: int) -> RunConfig:
    """The same run in more or fewer steps: every clock shrinks alike, and decay grows so that as much of it is done.

    Weight decay times steps stays, as in the paper's small scale, where short runs need more of it per step.
    """
    if steps < 1:
        raise ConfigError(f"steps={steps} is too small; try steps=100")
    if steps == config.steps:
        return config
    share = steps / config.steps

    def part(x: int) -> int:
        return max(round(x * share), 1) if x else 0

    schedule = config.schedule
    until = tuple(part(x) for x in schedule.seqlen.until)
    seqlen = replace(schedule.seqlen, steps=until[-1] if until else part(schedule.seqlen.steps), until=until)
    lr = replace(schedule.lr, warmup=part(schedule.lr.warmup), decay=part(schedule.lr.decay))
    batch = replace(schedule.batch, samples=part(schedule.batch.samples))
    return replace(
        config,
        steps=steps,
        tokens=None if config.tokens is None else part(config.tokens),
        eval_every=part(config.eval_every),
        optim=replace(config.optim, weight_decay=config.optim.weight_decay / share),
        schedule=replace(schedule, lr=lr, seqlen=seqlen, batch=batch),
        watch=replace(config.watch, every=part(config.watch.every)),
    )


def with_values(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """Fields changed by dotted names. The schedules that end with `batch` and `model.context` follow them."""
    flat = dict(_flatten(values))
    data = to_json(config)
    for name, value in {**_followers(config, flat), **flat}.items():
        _set(data, KINDS[kind_of(config)], name.replace("-", "_").split("."), value, name)
    try:
        return from_json(data)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _followers(config: RunConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    batch, seqlen = config.schedule.batch, config.schedule.seqlen
    if "batch" in given and batch.start == batch.end:
        found |= {"schedule.batch.start": given["batch"], "schedule.batch.end": given["batch"]}
    if "model.context" in given:
        found["schedule.seqlen.end"] = given["model.context"]
        if seqlen.start == seqlen.end:
            found["schedule.seqlen.start"] = given["model.context"]
    return found


def _set(data: dict[str, Any], cls: Any, path: list[str], value: Any, name: str) -> None:
    """Put one value where its dotted name says, if its type is right."""
    hints = get_type_hints(cls)
    head, *rest = path
    if head not in {item.name for item in fields(cls)}:
        known = [item.name for item in fields(cls)]
        raise ConfigError(
            f"{name}: {cls.__name__} has no {head!r}{did_you_mean(head, known)} It has {', '.join(known)}"
        )
    inner = next((kind for kind in (hints[head], *get_args(hints[head])) if is_dataclass(kind)), None)
    if rest and get_origin(hints[head]) is dict:
        place = data[head] = dict(data[head])
        for key in rest[:-1]:
            place = place.setdefault(key, {})
        place[rest[-1]] = value
    elif rest and inner is not None and isinstance(data[head], dict):
        _set(data[head], inner, rest, value, name)
    elif rest or inner is not None:
        what = "has fields of its own; name one" if inner is not None else "has no fields"
        raise ConfigError(f"{name}: {head} {what}")
    else:
        data[head] = _checked(hints[head], value, name)


def _checked(hint: Any, value: Any, name: str) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        if value is None or value == "none":
            return None
        return _checked(next(kind for kind in get_args(hint) if kind is not type(None)), value, name)
    if get_origin(hint) is Literal:
        if value in get_args(hint) and not isinstance(value, bool):
            return value
        raise ConfigError(f"{name}={value!r} is not known; try one of {', '.join(map(repr, get_args(hint)))}")
    if get_origin(hint) is tuple:
        return _checked_tuple(get_args(hint), value, name)
    right = {
        bool: isinstance(value, bool),
        int: isinstance(value, int) and not isinstance(value, bool),
        float: isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value),
        str: isinstance(value, str),
    }
    if not right.get(hint, True):
        words = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text"}
        raise ConfigError(f"{name}={value!r} is not {words[hint]}")
    return float(value) if hint is float else value


def _checked_tuple(kinds: tuple[Any, ...], value: Any, name: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{name}={value!r} is not a list; try [{value!r}]")
    if kinds[-1] is Ellipsis:
        kinds = kinds[:1] * len(value)
    if len(kinds) != len(value):
        raise ConfigError(f"{name}={value!r} has {len(value)} values; it needs {len(kinds)}")
    return [_checked(kind, item, f"{name}[{i}]") for i, (kind, item) in enumerate(zip(kinds, value, strict=True))]
