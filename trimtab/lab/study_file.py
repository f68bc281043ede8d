"""A study from a TOML file.

    name = "wide"                                 every key is optional
    question = "Does my model need qk-norm?"
    subject = "gpt-lab"                           a recipe, or package.file:function
    sizes = ["2x16", "2x32", "3x64"]              or a ladder: "joint:3", "width", "depth"
    lrs = [3e-3, 1e-2, 3e-2, 1e-1]
    seeds = 2                                     how many, or a list; without it, three around the edge of stability
    steps = 500                                   the schedules of the subject are scaled to it

    [arms]                                        `trimtab lab --list` lists the switches
    plain = []
    steadied = ["qk-norm", "z-loss=1e-4"]

    [set]                                         any field of the run, as on the command line; applied last
    batch = 32
    "optim.betas" = [0.9, 0.999]

The sizes of package.file:function may be tables of its options: `{name = "small", hidden = 64}`.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from trimtab.hints import did_you_mean
from trimtab.lab.sizes import Size, parse_sizes
from trimtab.lab.study import QUESTION, SIZES, Arm, Study, compare
from trimtab.lab.subjects import open_subject
from trimtab.screen import printable
from trimtab.train.config import ConfigError, flatten, with_values

# Type and example of each key.
KEYS: dict[str, tuple[Any, str]] = {
    "name": (str, 'name = "wide"'),
    "question": (str, 'question = "Does my model need qk-norm?"'),
    "subject": (str, 'subject = "gpt-lab"'),
    "sizes": (str | list[str | dict[str, Any]], 'sizes = ["2x16", "3x64"], a ladder, or tables of options'),
    "lrs": (list[float], "lrs = [0.001, 0.01]"),
    "seeds": (int | list[int], "seeds = 2, or seeds = [0, 1]"),
    "steps": (int, "steps = 500"),
    "arms": (dict[str, str | list[str]], '[arms] and below it: steadied = ["qk-norm", "z-loss"]'),
    "set": (dict[str, Any], "[set] and below it: batch = 16"),
}
# Fields that other keys set. They would overwrite an override, so that is refused.
GRID = {"optim.lr": "lrs", "seed": "seeds", "steps": "steps", "model.build": "subject"}
GRID |= {f"model.{name}": "sizes" for name in ("depth", "width", "heads")}


def read_study(path: str | Path, *, trust: str | None = None) -> Study:
    """Read a study and build all its configs. Raises ConfigError with the place of a mistake in the file.

    The code of a user-defined model is imported only if `trust` names it: the file may be somebody else's.
    """
    path = Path(path)
    try:
        data = _parse(path)
        subject = data.get("subject")
        if isinstance(subject, str) and ":" in subject and subject != trust:
            shown = printable(subject)
            raise ConfigError(
                f"its subject {shown} is code that runs on this machine; if you trust it, --trust {shown}"
            )
        study = make_study(data, name=path.stem)
        study.cells()
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return study


def make_study(data: Mapping[str, Any], *, name: str = "study") -> Study:
    """A study from the contents of a file; `name` is used if it has none."""
    for key, value in data.items():
        _check(key, value)
    subject = data.get("subject", "gpt-lab")
    seeds, arms = data.get("seeds", 1), data.get("arms")
    study = compare(
        subject,
        name=data.get("name", name),
        sizes=_sizes(data["sizes"]) if "sizes" in data else SIZES,
        lrs=data.get("lrs"),
        seeds=tuple(range(seeds) if isinstance(seeds, int) else seeds),
        refined="seeds" not in data,
        steps=data.get("steps", open_subject(subject).steps),
    )
    if arms is not None:
        listed = {arm: (x,) if isinstance(x, str) else tuple(x) for arm, x in arms.items()}
        study = replace(study, arms=tuple(Arm(arm, switches) for arm, switches in listed.items()))
    base = with_values(study.base, data.get("set", {}))
    return replace(study, base=base, question=data.get("question", QUESTION))


def _parse(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"is not TOML: {error}") from None


def _check(key: str, value: Any) -> None:
    if key not in KEYS:
        hint = did_you_mean(key, KEYS)
        raise ConfigError(f"{key!r} is not a key of a study.{hint} The keys are {', '.join(KEYS)}")
    kind, example = KEYS[key]
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        reason = str(error).replace("`$", f"`{key}").replace("array", "list").replace("object", "table")
        raise ConfigError(f"{key}={value!r}: {reason[:1].lower()}{reason[1:]}; try {example}") from None
    if value == 0 or (kind is str and not value.strip()):
        raise ConfigError(f"{key}={value!r} is too small or empty; try {example}")
    for name in flatten(value) if key == "set" else ():
        if name in GRID:
            raise ConfigError(f"set: {name} is set by another key; use {GRID[name]!r} instead")


def _sizes(value: str | list[Any]) -> list[Size]:
    found: list[Size] = []
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, str):
            found += parse_sizes(item)
            continue
        options = {key: x for key, x in item.items() if key != "name"}
        if not options:
            raise ConfigError(f"sizes: {item} has no options; try {{name = 'small', width = 64}}")
        name = item.get("name", ",".join(f"{key}={x}" for key, x in options.items()))
        found.append(Size(name=name, options=options))
    return found
