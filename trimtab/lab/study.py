"""A study: one question, and the grid of runs that answers it.

    sizes × arms × learning rates × seeds  ->  cells  ->  one run folder each

An arm is a named set of interventions (interventions.py). The subject is what is trained: a recipe, or the user's own
model (subjects.py). All configs of the grid are built and checked before the first run.

    study = default_study()                      three sizes, seven learning rates, plain and steadied
    study = read_study("my_study.toml")          a study file (study_file.py)
    for cell in study.cells(): train(cell.config, out / cell.folder)

Sizes and arms may have any name; `slug` makes a safe folder name of it.
"""

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from trimtab.lab.budget import seconds
from trimtab.lab.interventions import apply, steadied
from trimtab.lab.sizes import Size, ladder, scaled
from trimtab.lab.subjects import open_subject, study_base
from trimtab.runs.folder import CELLS, FORMAT
from trimtab.runs.records import whole
from trimtab.train.config import ConfigError, RunConfig, flatten, from_json, to_json, upgrade
from trimtab.train.plan import simulate

# Fields of the base that another version may have set: when signals are measured and checkpoints are written, and the
# learning rate, which `cells` replaces.
_MAY_CHANGE = ("optim.lr", "checkpoint_every", "watch.every", "watch.deep_every", "watch.record_every")


@dataclass(frozen=True)
class Arm:
    """A named set of interventions, such as "qk-norm" or "z-loss=1e-4", applied in this order."""

    name: str
    switches: tuple[str, ...] = ()


class Extra(NamedTuple):
    """A run beside the grid: another seed, or a learning rate between two of the grid (refine.py)."""

    size: str
    arm: str
    lr: float
    seed: int


@dataclass(frozen=True)
class Cell:
    """One run of the grid. `name` is safe as a path; `size` and `arm` are the names as given."""

    name: str
    size: str
    lr: float
    arm: str
    seed: int
    config: RunConfig
    extra: bool = False

    @property
    def folder(self) -> Path:
        return Path(CELLS) / self.name


@dataclass(frozen=True, kw_only=True)
class Study:
    name: str
    question: str
    subject: str  # a recipe, or module:function
    base: RunConfig  # the subject at any size: `cells` sets size, interventions, learning rate and seed
    sizes: tuple[Size, ...]
    lrs: tuple[float, ...]
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    refined: bool = False  # whether runs are added around the edge of stability
    extra: tuple[Extra, ...] = ()

    def __post_init__(self) -> None:
        check_grid(self)

    def cells(self) -> list[Cell]:
        """Every run of the grid, size by size. Raises ConfigError, with the cell's name, if a config is impossible."""
        return list(self._cells)

    @cached_property
    def _cells(self) -> tuple[Cell, ...]:
        sizes, arms = slugs(size.name for size in self.sizes), slugs(arm.name for arm in self.arms)
        base_width = min((size.width for size in self.sizes if size.width), default=None)
        cells = []
        for size in self.sizes:
            for arm in self.arms:
                place = f"{sizes[size.name]}/{arms[arm.name]}"
                config = self._build(place, size, arm, base_width)
                grid = [(lr, seed) for lr in self.lrs for seed in self.seeds]
                more = [(x.lr, x.seed) for x in self.extra if (x.size, x.arm) == (size.name, arm.name)]
                for lr, seed in dict.fromkeys([*grid, *more]):
                    name = f"{place}/lr-{number(lr)}/seed-{seed}"
                    run = replace(config, optim=replace(config.optim, lr=float(lr)), seed=seed)
                    extra = lr not in self.lrs or seed not in self.seeds
                    cells.append(Cell(name, size.name, lr, arm.name, seed, run, extra))
        return tuple(cells)

    def _build(self, place: str, size: Size, arm: Arm, base_width: int | None) -> RunConfig:
        try:
            config = scaled(self.base, size)
            for switch in arm.switches:
                config = apply(config, switch, base_width=base_width)
            simulate(config)  # checks that the schedules fit into the run
        except ValueError as error:
            raise ConfigError(f"cell {place}: {error}") from None
        return config

    @property
    def minutes(self) -> float | None:
        """Estimated duration on two cores, with the runs that a refinement adds; None for a user-defined model."""
        known = [found for cell in self._cells if not cell.extra and (found := seconds(cell.config)) is not None]
        share = 1 + REFINEMENT / (len(self.lrs) * len(self.seeds)) if self.refined else 1.0
        return share * sum(known) / 60 if known else None

    def to_json(self) -> dict[str, Any]:
        cells = [
            {"name": c.name, "size": c.size, "lr": c.lr, "arm": c.arm, "seed": c.seed, "folder": c.folder.as_posix()}
            | ({"extra": True} if c.extra else {})
            for c in self._cells
        ]
        return {**self.axes(), "cells": cells}

    def axes(self) -> dict[str, Any]:
        """All fields as JSON. Does not build the cells, which would import the code of a user-defined model."""
        return {
            "format": FORMAT,
            "name": self.name,
            "question": self.question,
            "subject": self.subject,
            "base": to_json(self.base),
            "sizes": [{**vars(size), "options": dict(size.options)} for size in self.sizes],
            "lrs": list(self.lrs),
            "arms": [{"name": arm.name, "switches": list(arm.switches)} for arm in self.arms],
            "seeds": list(self.seeds),
            "refined": self.refined,
            "extra": [list(cell) for cell in self.extra],
        }

    def identity(self) -> dict[str, Any]:
        """The fields that must not change when a study is continued: wording, what is added to the grid, and the steps
        at which its runs are measured may. As JSON, and the base by dotted names."""
        grows = ("question", "sizes", "lrs", "refined", "extra")
        axes = {key: value for key, value in self.axes().items() if key not in grows}
        return {**axes, "base": {key: value for key, value in flatten(axes["base"]).items() if key not in _MAY_CHANGE}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Study":
        """Read what `to_json` wrote, in this format or an earlier one. The cells follow from the rest."""
        format_ = whole(data.get("format")) or 1
        if format_ > FORMAT:
            raise ConfigError(f"the study has format {format_}, this version reads up to {FORMAT}; upgrade trimtab")
        try:
            return cls(
                name=data["name"],
                question=data["question"],
                subject=data["subject"],
                base=from_json(data["base"] if format_ > 1 else upgrade(data["base"])),
                sizes=tuple(Size(**size) for size in data["sizes"]),
                lrs=tuple(data["lrs"]),
                arms=tuple(Arm(arm["name"], tuple(arm["switches"])) for arm in data["arms"]),
                seeds=tuple(data["seeds"]),
                refined=bool(data.get("refined", False)),
                extra=tuple(Extra(*cell) for cell in data.get("extra", ())),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"not a saved study: {type(error).__name__} {error}") from None


# --- Names


def slug(name: str) -> str:
    """A name as one part of a path: a space becomes _. If more has to change, a hash of the name is added."""
    plain = re.sub(r"[^A-Za-z0-9_.=+,-]+", "-", name.replace(" ", "_")).strip("-._")[:60]
    return plain if plain == name.replace(" ", "_") else "-".join(filter(None, (plain, _hash(name))))


def slugs(names: Iterable[str]) -> dict[str, str]:
    """Different folder names for different names, also on disks that ignore case."""
    found: dict[str, str] = {}
    for name in sorted(names, key=lambda name: (slug(name) != name, name)):
        used = {other.lower() for other in found.values()}
        found[name] = slug(name) if slug(name).lower() not in used else f"{slug(name)}-{_hash(name)}"
    return found


def _hash(name: str) -> str:
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]


def number(x: float) -> str:
    """The shortest text that is exactly this number."""
    return f"{x:g}" if float(f"{x:g}") == x else repr(float(x))


# --- Checks


def check_grid(study: Study) -> None:
    axes = {"sizes": study.sizes, "lrs": study.lrs, "arms": study.arms, "seeds": study.seeds}
    for axis, values in axes.items():
        if not values:
            raise ConfigError(f"study {study.name!r} has no {axis}, so there is nothing to run; give at least one")
    keys: dict[str, Sequence[Any]] = {axis: [getattr(v, "name", v) for v in values] for axis, values in axes.items()}
    for lr in study.lrs:
        if isinstance(lr, bool) or not isinstance(lr, int | float) or not 1e-20 < lr < 1e20:
            raise ConfigError(f"lrs: {lr!r} is not a learning rate; try numbers above zero, such as 0.001")
    for seed in study.seeds:
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ConfigError(f"seeds: {seed!r} is not a seed; try whole numbers from 0")
    for axis in ("sizes", "arms"):
        for key in keys[axis]:
            if not isinstance(key, str) or not key.strip():
                raise ConfigError(f"{axis}: {key!r} is not a name; try one with letters")
    for axis, given in keys.items():
        for i, value in enumerate(given):
            if value in given[:i]:
                raise ConfigError(f"{axis}: {value!r} is given twice; every run of a grid must be different")


# --- The studies of `trimtab lab`

SIZES, STEPS, QUICK_STEPS = ladder("joint", 3), 500, 250
REFINEMENT = 5  # runs that refine.py adds for an arm and size: one between two learning rates, two seeds at two of them
QUESTION = "How sensitive is this recipe to its learning rate, what fails first, at which size, and what prevents it?"


def half_decades(lr: float, first: int, last: int) -> tuple[float, ...]:
    """Learning rates from `first` to `last` half decades above `lr`: 1 and 3 times powers of ten, multiplied by the
    ratio of `lr` to the nearest of them."""
    nearest = round(2 * math.log10(lr))
    factor = lr / _half_decade(nearest)
    # Three digits: 0.6 * 0.003 is not exactly 0.0018.
    return tuple(float(f"{factor * _half_decade(nearest + i):.3g}") if i else lr for i in range(first, last + 1))


def _half_decade(i: int) -> float:
    return float(f"{(1, 3)[i % 2]}e{i // 2}")


def lr_grid(peak: float) -> tuple[float, ...]:
    """Three decades, as in the paper, with the recipe's own learning rate in the middle."""
    return half_decades(peak, -3, 3)


LRS = lr_grid(open_subject("gpt-lab").optim.lr)


def default_study(subject: str = "gpt-lab") -> Study:
    """Three sizes, seven learning rates, plain and steadied; three seeds around the edge of stability."""
    return compare(subject, name="default", seeds=(0,), refined=True, steps=STEPS)


def quick_study(subject: str = "gpt-lab") -> Study:
    """The same question with fewer steps and one seed."""
    return compare(subject, name="quick", seeds=(0,), steps=QUICK_STEPS)


def compare(
    subject: str, *, steps: int, sizes: Iterable[Size] = SIZES, lrs: Iterable[float] | None = None, **axes: Any
) -> Study:
    """A subject without changes and with the interventions that the papers recommend. `axes`: fields of the study."""
    base = study_base(subject, steps)
    first = Arm("plain" if subject == "gpt-lab" else "as it is")
    arms = (first, Arm("steadied", steadied(base))) if steadied(base) else (first,)
    lrs = lr_grid(base.optim.lr) if lrs is None else tuple(lrs)
    return Study(question=QUESTION, subject=subject, base=base, sizes=tuple(sizes), lrs=lrs, arms=arms, **axes)
