"""The report of `bench.forecasts`: forecasts against what was measured, hit rates, Brier scores, a calibration picture.

The numbers of all runs are in docs/results/forecasts.json, one line per run, so that the report can be made again.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from bench.measure import Bar, console, report
from trimtab.analysis.findings import Findings, Result, Source, Status, clean, measure
from trimtab.analysis.measure import group_by
from trimtab.analysis.predict import Recipe, join_odds
from trimtab.analysis.thresholds import CRITICAL_LOGIT, EDGE_WEIGHT, FIRM

RESULTS = Path("docs/results/forecasts.json")
PAGE, PICTURE = RESULTS.with_suffix(".md"), Path("docs/figures/forecasts.svg")
SMALL = 200_000  # parameters: sizes below it are trained before the forecast
SIZES = {"786k": (200_000, 1.5e6), "3M": (1.5e6, 1e7)}
KEPT = (
    *("name", "size", "arm", "lr", "seed", "status", "kind", "params", "depth", "width", "loss", "first", "planned"),
    *("logit_max", "logit_step", "logit_ends", "grad_rms", "logz_drift", "eps", "bounded", "seconds"),
)
TEXT = """\
# Are the forecasts of the lab right?

Made by `python -m bench.forecasts --texts FOLDER`, from which every number of this page comes. The numbers of its
{runs} runs are in `docs/results/forecasts.json`. Last written on {date}. The runs took {hours:.1f} hours of one core.

{count} recipes were trained at three sizes up to 154k parameters: seven learning rates, 500 steps, seed 0. From these
runs alone the lab forecasts which learning rates fail at about 786k and at about 3M parameters. Then each recipe was
trained there at five learning rates. What fails is defined on the page of [the lab](../lab.md). Recipes of the
benchmark that were not trained yet: {left}.

Recipes, sizes, learning rates and the two halves were fixed before the first run. The constants of the forecast come
from the half *set*: {constants}. `trimtab/analysis/thresholds.py` has them rounded. The half *reported* had no part in
them.

## Result

A verdict is *fails* from a probability of 80 % on, *holds* up to 20 %, *cannot tell* between. The Brier score is the
mean squared error of the probability: 0 is perfect, 0.25 is a coin. The baselines have probabilities of 0 and 1. *Same
edge* says that a learning rate fails if it is above the edge of stability of the largest size that was run. *Paper's
1e4* says so if the fitted attention logit is above 1e4.

| half | size | right | wrong | cannot tell | Brier score | same edge | paper's 1e4 |
|---|---|---|---|---|---|---|---|
{scores}

![Share of failures against the forecast probability](../figures/forecasts.svg)

## Each recipe

The edge of stability at the largest of the three sizes, its forecast at the larger ones, and what was measured there.
In brackets: the learning rates that fail with a probability of 20 % and 80 %.

| recipe | half | edge | 786k: forecast | measured | 3M: forecast | measured | right / wrong / cannot tell |
|---|---|---|---|---|---|---|---|
{recipes}

## The weight of the two signs

The half *set*, with other weights of the edge of stability against the attention logits. `EDGE_WEIGHT` is {weight}.

| weight | log loss | Brier score | wrong | cannot tell |
|---|---|---|---|---|
{weights}

## Every wrong verdict

{wrong}
"""
WEIGHTS = (0.0, 0.3, 0.5, 0.7, 1.0)
BINS = (0.0, 0.05, 0.2, 0.4, 0.6, 0.8, 0.95, 1.0)


# --- The numbers of the runs


def save_results(by_recipe: Mapping[str, Sequence[Result]], path: Path = RESULTS) -> None:
    lines = [json.dumps({"recipe": name} | to_row(result)) for name, rows in by_recipe.items() for result in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def load_results(path: Path = RESULTS) -> dict[str, list[Result]]:
    rows = json.loads(path.read_text())
    by_recipe = group_by(rows, lambda row: row.pop("recipe"))
    return {name: [from_row(row) for row in those] for name, those in by_recipe.items()}


def to_row(result: Result) -> dict[str, Any]:
    """The fields of a result that forecasts need, in five digits."""
    return {key: _short(clean(getattr(result, key))) for key in KEPT}


def from_row(row: Mapping[str, Any]) -> Result:
    known = {key: math.nan if value is None and key != "logit_step" else value for key, value in row.items()}
    ends = tuple(math.nan if x is None else x for x in row["logit_ends"])
    return Result(
        **known | {"status": Status(row["status"]), "logit_ends": ends, "loss": _infinite(row["loss"])},
        study="forecasts",
        folder=Path(row["name"]),
    )


def _infinite(loss: float | None) -> float:
    return math.inf if loss is None else loss


def _short(value: Any) -> Any:
    if isinstance(value, list):
        return [_short(x) for x in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


# --- Forecasts and what was measured


@dataclass(frozen=True)
class Row:
    recipe: str
    half: str
    size: str  # a key of SIZES
    params: int
    lr: float
    probability: float
    outcome: str
    failed: bool
    edge: float | None  # the probability by the edge of stability alone
    logits: float | None  # and by the attention logits alone
    same_edge: float  # baseline: it fails above the edge of the largest size that was run
    paper: float  # baseline: it fails if the fitted logit is above the paper's critical value


def rows_of(name: str, half: str, results: Sequence[Result]) -> list[Row]:
    """Every learning rate of the large sizes of a recipe."""
    arm = results[0].arm
    small = Recipe(_measure([r for r in results if (r.params or 0) < SMALL]), "forecasts", arm)
    truth = Recipe(_measure(results), "forecasts", arm)
    edge = small.curves[-1].edge or math.inf
    rows = []
    for curve in truth.curves:
        size = next((name for name, ends in SIZES.items() if ends[0] <= (curve.params or 0) < ends[1]), None)
        for lr in curve.lrs if size is not None else ():
            said = small.rate(curve.params or 0, lr)
            logit = said.sign("logits").value
            rows.append(
                Row(
                    recipe=name,
                    half=half,
                    size=str(size),
                    params=curve.params or 0,
                    lr=lr,
                    probability=said.probability,
                    outcome=said.outcome,
                    failed=truth.rate(curve.params or 0, lr).outcome == "fails",
                    edge=said.sign("edge").probability,
                    logits=said.sign("logits").probability,
                    same_edge=float(lr > edge),
                    paper=float(logit > CRITICAL_LOGIT),
                )
            )
    return rows


def _measure(results: Sequence[Result]) -> Findings:
    return measure(results, [Source(name="forecasts", folder=Path("forecasts"))])


def brier(rows: Sequence[Row], column: str = "probability") -> float:
    """Mean squared difference between the probability and what happened; 0 is perfect, 0.25 is a coin."""
    return fmean((getattr(row, column) - row.failed) ** 2 for row in rows) if rows else math.nan


def counts(rows: Sequence[Row]) -> tuple[int, int, int]:
    """Right, wrong, cannot tell."""
    firm = [row for row in rows if row.outcome != "cannot tell"]
    right = sum((row.outcome == "fails") == row.failed for row in firm)
    return right, len(firm) - right, len(rows) - len(firm)


# --- The constants of the half "set"


def constants(by_recipe: Mapping[str, Sequence[Result]]) -> dict[str, float]:
    """What thresholds.py has rounded: from the edges of all five sizes of each recipe."""
    slopes, residuals, gaps = [], list[float](), list[float]()
    for results in by_recipe.values():
        curves = [curve for curve in _measure(results).curves if curve.edge is not None and curve.params]
        x, y = [math.log10(c.params or 1) for c in curves], [math.log10(c.edge or 1) for c in curves]
        if len(x) >= 3:
            line = np.polyfit(x, y, 1)
            slopes.append(float(line[0]))
            residuals += [float(b - np.polyval(line, a)) for a, b in zip(x, y, strict=True)]
        gaps += [math.log10((c.edge or 1) / c.best_lr) for c in curves]
    free = len(residuals) - 2 * len(slopes)
    return {
        "SLOPE": fmean(slopes),
        "SLOPE_SPREAD": stdev(slopes),
        "GAP": fmean(gaps),
        "spread of the gap": stdev(gaps),
        "EDGE_SPREAD": math.sqrt(sum(x * x for x in residuals) / max(free, 1)),
    }


# --- The page


def write_report(halves: Mapping[str, str]) -> None:
    by_recipe = load_results()
    rows = [row for name, results in by_recipe.items() for row in rows_of(name, halves[name], results)]
    reported = [row for row in rows if row.half == "reported"]
    found = constants({name: results for name, results in by_recipe.items() if halves[name] == "set"})
    PICTURE.write_text(picture(rows))
    PAGE.write_text(page(by_recipe, rows, found, halves))
    bars = []
    for size, least in (("786k", 0.85), ("3M", 0.75)):
        right, wrong, _ = counts([row for row in reported if row.size == size])
        bars.append(Bar(f"share of firm verdicts that are right at {size}", right / max(right + wrong, 1), least, True))
    unsure = counts(reported)[2] / max(len(reported), 1)
    bars.append(Bar("share of verdicts that cannot tell", unsure, 1 / 3))
    for name, column in (("the same edge as the largest size", "same_edge"), ("the paper's 1e4", "paper")):
        bars.append(Bar(f"Brier score, less that of {name!r}", brier(reported) - brier(reported, column), 0.0))
    console.print(f"the page: {PAGE}, {PICTURE}", highlight=False)
    report(bars)


def page(
    by_recipe: Mapping[str, Sequence[Result]],
    rows: Sequence[Row],
    found: Mapping[str, float],
    halves: Mapping[str, str],
) -> str:
    runs = [result for results in by_recipe.values() for result in results]
    scores = []
    for half in ("reported", "set"):
        for size in (*SIZES, "both"):
            those = [row for row in rows if row.half == half and size in (row.size, "both")]
            if those:
                columns = [f"{brier(those, x):.3f}" for x in ("probability", "same_edge", "paper")]
                scores.append(f"| {' | '.join([half, size, *map(str, counts(those)), *columns])} |")
    recipes = [
        _recipe_line(name, halves[name], results, [row for row in rows if row.recipe == name])
        for name, results in by_recipe.items()
    ]
    wrong = [row for row in rows if row.outcome != "cannot tell" and (row.outcome == "fails") != row.failed]
    misses = [
        f"- {row.recipe} ({row.half}), {row.size}, learning rate {row.lr:g}: said {row.outcome} "
        f"({row.probability:.0%}), it {'failed' if row.failed else 'held'}"
        for row in wrong
    ]
    return TEXT.format(
        runs=len(runs),
        date=f"{datetime.now(UTC):%d %B %Y}",
        hours=sum(run.seconds for run in runs) / 3600,
        count=len(by_recipe),
        left=", ".join(name for name in halves if name not in by_recipe) or "none",
        constants=", ".join(f"{name} {value:.2f}" for name, value in found.items()),
        scores="\n".join(scores),
        recipes="\n".join(recipes),
        weight=EDGE_WEIGHT,
        weights="\n".join(_weight_line(weight, [row for row in rows if row.half == "set"]) for weight in WEIGHTS),
        wrong="\n".join(misses) or "There is none.",
    )


def _recipe_line(name: str, half: str, results: Sequence[Result], rows: Sequence[Row]) -> str:
    arm = results[0].arm
    small = Recipe(_measure([r for r in results if (r.params or 0) < SMALL]), "forecasts", arm)
    cells = [name, half, _edge(small.curves[-1].edge, small.curves[-1].lrs[-1])]
    for ends in SIZES.values():
        curves = [x for x in Recipe(_measure(results), "forecasts", arm).curves if ends[0] <= (x.params or 0) < ends[1]]
        for curve in curves:
            middle, low, high = small.edge(curve.params or 0)
            cells += [f"{middle:.2g} ({low:.2g}–{high:.2g})", _edge(curve.edge, curve.lrs[-1])]
    cells.append(" / ".join(map(str, counts(rows))))
    return f"| {' | '.join(cells)} |"


def _weight_line(weight: float, rows: Sequence[Row]) -> str:
    loss = score = wrong = unsure = 0.0
    for row in rows:
        parts = [(row.edge, weight), (row.logits, 1 - weight)] if row.logits is not None else [(row.edge, 1.0)]
        chance = join_odds([(x, w) for x, w in parts if x is not None and w > 0])
        loss -= math.log(chance if row.failed else 1 - chance) / len(rows)
        score += (chance - row.failed) ** 2 / len(rows)
        firm = chance >= FIRM or chance <= 1 - FIRM
        unsure += not firm
        wrong += firm and (chance >= FIRM) != row.failed
    return f"| {weight:g} | {loss:.3f} | {score:.3f} | {wrong:.0f} | {unsure:.0f} |"


def _edge(edge: float | None, highest: float) -> str:
    return f"above {highest:g}" if edge is None else f"{edge:.2g}"


def picture(rows: Sequence[Row]) -> str:
    """Share of failures against the forecast probability, in bins; the area of a point is its number of verdicts."""
    left, top, side = 60, 24, 300
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + side + 190} {top + side + 56}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<rect x="{left}" y="{top}" width="{side}" height="{side}" fill="none" stroke="#bbb"/>',
        f'<line x1="{left}" y1="{top + side}" x2="{left + side}" y2="{top}" stroke="#bbb" stroke-dasharray="4 4"/>',
    ]
    for share in (0.0, 0.5, 1.0):
        parts.append(f'<text x="{left + share * side}" y="{top + side + 18}" text-anchor="middle">{share:.0%}</text>')
        parts.append(f'<text x="{left - 8}" y="{top + (1 - share) * side + 5}" text-anchor="end">{share:.0%}</text>')
    parts.append(
        f'<text x="{left + side / 2}" y="{top + side + 42}" text-anchor="middle">forecast probability of failure</text>'
    )
    parts.append(f'<text x="{left}" y="{top - 9}">share that failed</text>')
    for half, colour, y in (("reported", "#c43c00", top + 12), ("set", "#1f78a4", top + 36)):
        parts.append(f'<circle cx="{left + side + 24}" cy="{y}" r="7" fill="{colour}" opacity="0.7"/>')
        parts.append(f'<text x="{left + side + 40}" y="{y + 5}">half “{half}”</text>')
        for low, high in pairwise(BINS):
            those = [row for row in rows if row.half == half and low <= row.probability < high + (high == 1.0)]
            if those:
                across = left + side * fmean(row.probability for row in those)
                up = top + side * (1 - fmean(row.failed for row in those))
                size = 2 + 1.6 * math.sqrt(len(those))
                parts.append(f'<circle cx="{across:.1f}" cy="{up:.1f}" r="{size:.1f}" fill="{colour}" opacity="0.7"/>')
                parts.append(f'<text x="{across + size + 3:.1f}" y="{up + 4:.1f}" font-size="10">{len(those)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
