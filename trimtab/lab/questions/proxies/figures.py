"""Figures that several questions draw from their runs, as the papers have them."""

from collections.abc import Callable, Sequence
from statistics import fmean

from trimtab.analysis.answers import Figure, Line, Panel
from trimtab.analysis.findings import Points, Result, geometric_mean
from trimtab.lab.questions.question import Evidence, known

Number = Callable[[Result], float]
Course = Callable[[Result], Points]


def sensitivity_figure(found: Evidence, arms: Sequence[str], sizes: Sequence[str]) -> Figure:
    """Sensitivity against the number of parameters; of the whole grid, and of its part above the best learning rate."""
    curves = {arm: [curve for size in sizes if (curve := found.curve(arm, size)) is not None] for arm in arms}

    def line(arm: str, part: str) -> Line:
        mine = sorted(curves[arm], key=lambda curve: curve.params or 0)
        ends = [[getattr(curve, f"sensitivity_{end}") for curve in mine] for end in ("low", "high")]
        values = [known(getattr(curve, part)) for curve in mine]
        return Line(arm, [curve.params or 0 for curve in mine], values, *(ends if part == "sensitivity" else ()))

    parts = {"whole grid": "sensitivity", "above the best learning rate": "unstable"}
    panels = [Panel(title, [line(arm, part) for arm in arms if curves[arm]]) for title, part in parts.items()]
    return Figure(
        name="sensitivity",
        title="Sensitivity to the learning rate against the size",
        x="parameters",
        y="nats",
        panels=panels,
        log_x=True,
    )


def over_time(
    found: Evidence,
    course: Course,
    places: Sequence[tuple[str, float]],
    arms: Sequence[str],
    *,
    name: str,
    title: str,
    y: str,
    log_y: bool = False,
) -> Figure:
    """A signal over the steps of the first seed: a panel per size and learning rate, a line per arm."""
    panels = []
    for size, lr in places:
        courses = [(arm, course(run)) for arm in arms for run in found.runs(arm, size, lr)[:1]]
        lines = [Line(arm, [step for step, _ in one], [known(y) for _, y in one]) for arm, one in courses if one]
        panels.append(Panel(f"{size}, learning rate {lr:g}", lines))
    return Figure(name=name, title=title, x="step", y=y, panels=panels, log_y=log_y)


def losses_over_time(found: Evidence, places: Sequence[tuple[str, float]], arms: Sequence[str]) -> Figure:
    return over_time(found, lambda run: smooth(run.losses), places, arms, name="loss", title="Training loss", y="nats")


def logits_over_time(found: Evidence, places: Sequence[tuple[str, float]], arms: Sequence[str]) -> Figure:
    title = "Largest attention logit of all layers"
    return over_time(found, lambda run: run.logits, places, arms, name="logits", title=title, y="logit", log_y=True)


def against_size(
    found: Evidence,
    value: Number,
    arms: Sequence[str],
    sizes: Sequence[str],
    lrs: Sequence[float],
    *,
    name: str,
    title: str,
    y: str,
) -> Figure:
    """A number of the runs against the parameters: a panel per arm, a line per learning rate, the mean over seeds."""

    def line(arm: str, lr: float) -> Line:
        cells = [runs for size in sizes if (runs := found.runs(arm, size, lr)) and runs[0].params]
        cells.sort(key=lambda runs: runs[0].params or 0)
        values = [[x for run in runs if (x := value(run)) > 0] for runs in cells]
        low, high = ([end(some, default=None) for some in values] for end in (min, max))
        means = [known(geometric_mean(some)) for some in values]
        return Line(f"learning rate {lr:g}", [runs[0].params or 0 for runs in cells], means, low, high)

    panels = [Panel(arm, [line(arm, lr) for lr in lrs]) for arm in arms]
    return Figure(name=name, title=title, x="parameters", y=y, panels=panels, log_x=True, log_y=True)


def smooth(points: Points, width: int = 5) -> Points:
    """The mean of each loss and those before it: single batches differ by more than the arms."""
    values = [value for _, value in points]
    return tuple((step, fmean(values[max(i - width + 1, 0) : i + 1])) for i, (step, _) in enumerate(points))
