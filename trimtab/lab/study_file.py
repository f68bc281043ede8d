"""A study from a TOML file.

    name = "wide"                                 every key is optional
    question = "Does my model need qk-norm?"
    subject = "gpt-lab"                           a recipe, or package.file:function
    sizes = ["2x16", "2x32", "3x64"]              or a ladder: "joint:3", "width", "depth"
    lrs = [3e-3, 1e-2, 3e-2, 1e-1]
    seeds = 2                                     how many, or a list
    steps = 500                                   the schedules of the subject are scaled to it

    [arms]                                        `trimtab lab --list` lists the switches
    plain = []
    steadied = ["qk-norm", "z-loss=1e-4"]

    [set]                                         any field of the run, as on the command line; applied last
    batch = 32
    "optim.betas" = [0.9, 0.999]

The sizes of package.file:function may be tables of its options: `{name = "small", hidden = 64}`.
"""

import importlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trimtab.lab.sizes import Size, parse_sizes
from trimtab.lab.study import LRS, QUESTION, SEEDS, SIZES, Arm, Study, compare
from trimtab.lab.subjects import open_subject
from trimtab.train.config import ConfigError, did_you_mean, flatten, with_values

KEYS = ("name", "question", "subject", "sizes", "lrs", "seeds", "steps", "arms", "set")
# Fields that the grid sets. It would overwrite an override, so that is refused.
GRID = {"optim.lr": "lrs", "seed": "seeds", "steps": "steps"}
GRID |= {f"model.{name}": "sizes" for name in ("depth", "width", "heads")}


def read_study(path: str | Path) -> Study:
    """Read a study and build all its configs. Raises ConfigError with the place of a mistake in the file."""
    path = Path(path)
    try:
        study = make_study(_parse(path), name=path.stem)
        study.cells()
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return study


def make_study(data: Mapping[str, Any], *, name: str = "study") -> Study:
    """A study from the contents of a file; `name` is used if it has none."""
    unknown = next((key for key in data if key not in KEYS), None)
    if unknown is not None:
        hint = did_you_mean(unknown, KEYS)
        raise ConfigError(f"{unknown!r} is not a key of a study.{hint} The keys are {', '.join(KEYS)}")
    subject = _text(data, "subject", "gpt-lab")
    steps = data.get("steps", open_subject(subject).steps)
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise ConfigError(f"steps={steps!r} is not a whole number; try steps=500")
    study = compare(
        subject,
        name=_text(data, "name", name),
        sizes=_sizes(data["sizes"]) if "sizes" in data else SIZES,
        lrs=_list(data, "lrs") if "lrs" in data else LRS,
        seeds=_seeds(data["seeds"]) if "seeds" in data else SEEDS,
        steps=steps,
    )
    base = with_values(study.base, _overrides(data.get("set", {})))
    arms = _arms(data["arms"]) if "arms" in data else study.arms
    return replace(study, base=base, arms=arms, question=_text(data, "question", QUESTION))


def _parse(path: Path) -> dict[str, Any]:
    try:
        parser = importlib.import_module("tomllib")  # since Python 3.11
    except ModuleNotFoundError:
        try:
            parser = importlib.import_module("tomli")
        except ModuleNotFoundError:
            raise ConfigError("study files need Python 3.11, or `pip install tomli`") from None
    try:
        result: dict[str, Any] = parser.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"is not TOML: {error}") from None
    return result


def _text(data: Mapping[str, Any], key: str, default: str) -> str:
    value = data.get(key, default)
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{key}={value!r} is not text; try {key} = {default!r}")
    return value


def _list(data: Mapping[str, Any], key: str) -> list[Any]:
    value = data[key]
    if not isinstance(value, list):
        raise ConfigError(f"{key}={value!r} is not a list; try {key} = [{value!r}]")
    return value


def _sizes(value: Any) -> list[Size]:
    found: list[Size] = []
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, Mapping):
            options = {key: value for key, value in item.items() if key != "name"}
            if not options:
                raise ConfigError(f"sizes: {dict(item)} has no options; try {{name = 'small', width = 64}}")
            name = item.get("name", ",".join(f"{key}={value}" for key, value in options.items()))
            found.append(Size(name=name, options=options))
        elif isinstance(item, str):
            found += parse_sizes(item)
        else:
            raise ConfigError(f"sizes: {item!r} is not a size; try '3x64', a ladder, or a table of options")
    return found


def _seeds(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"seeds={value!r} is neither a count nor a list; try seeds = 2, or seeds = [0, 1]")
    return list(range(value))


def _arms(value: Any) -> tuple[Arm, ...]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"arms={value!r} is not a table; try [arms] and below it: steadied = ['qk-norm']")
    arms = []
    for name, switches in value.items():
        listed = [switches] if isinstance(switches, str) else switches
        if not isinstance(listed, list) or not all(isinstance(switch, str) for switch in listed):
            raise ConfigError(f"arms: {name} = {switches!r} is not a list of switches; try ['qk-norm', 'z-loss']")
        arms.append(Arm(name, tuple(listed)))
    return tuple(arms)


def _overrides(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"set={value!r} is not a table; try [set] and below it: batch = 16")
    for name in flatten(value):
        if name in GRID:
            raise ConfigError(f"set: the grid sets {name}; use {GRID[name]!r} instead")
    return value
