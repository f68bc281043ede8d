"""One run folder, whatever state it is in, becomes one `Result`.

Nothing here raises for a run that is unfinished, half-written or damaged: its status and `why` say so. Two moments of a
run are singled out:

    SNAPSHOT    the attention logits that predictions are made from: geometric mean of the looks in this part of the run
    TAIL        gradients, updates and outputs are means over this last share of it

Wortsman et al. 2023b take the logits of step 2,000 of 100,000, in the middle of the warm-up. Of 500 steps that is the
tenth: too early. Measured on GPTs of 6, 25 and 147 thousand weights, warmed up over 25 of 500 steps, the two smaller
predict the logits of the largest within 1.4x at all learning rates when looked at in steps 20 and 30, within 5x in
steps 50 to 80, and not at all after a third of the run, when failing runs have levelled off. In steps 20 and 30 runs
that will fail are at 114 and above, those that will not at 47 and below; up to step 40 both are as good. One look is a
maximum over one batch, so several are averaged. A run that stopped before has its last look taken.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.analysis.findings import Points, Result, Status
from trimtab.analysis.one_run import loss_ratios, losses_of
from trimtab.analysis.spikes import PAPER, Floats, find_peak, loss_spans
from trimtab.runs.reader import Run, read_run

SNAPSHOT = (0.03, 0.08)
TAIL = 0.1
MOST_POINTS = 400  # of a training curve
ABSURD = 1e30  # a loss like this is as good as infinite, and sums of such overflow
_SIGNALS = ("grad_rms", "update_rms")
_NO_EPS = ("lion", "sgd")  # optimizers that do not divide


@dataclass(frozen=True)
class Place:
    """Where a cell should be, and what its study says of it."""

    folder: Path
    name: str
    study: str
    size: str = ""
    arm: str = ""
    lr: float = math.nan
    seed: int | None = None


def read_result(place: Place) -> Result:
    """Read one run folder."""
    empty = Result(
        folder=place.folder,
        name=place.name,
        study=place.study,
        size=place.size or "?",
        arm=place.arm,
        lr=place.lr,
        seed=place.seed or 0,
        status="missing",
        why="it was not run",
    )
    if not place.folder.is_dir():
        return empty
    facts = read_json(place.folder / "config.json")
    if facts is None or not isinstance(facts.get("config"), Mapping):
        why = "config.json cannot be read" if (place.folder / "config.json").exists() else "there is no config.json"
        return replace(empty, status="unreadable", why=why)
    told = _told(empty, facts, place)
    try:
        run = read_run(place.folder, tensor_signals=_SIGNALS)
    except ValueError:
        return replace(told, status="running", why="it has not taken a step")
    except OSError as error:
        return replace(told, status="unreadable", why=f"cannot be read: {error.strerror}")
    except OverflowError:
        return replace(told, status="unreadable", why="cannot be read: it has numbers that no run writes")
    return _ended(_seen(told, run), run)


def _told(empty: Result, facts: Mapping[str, Any], place: Place) -> Result:
    """What the run was told to do, from config.json."""
    config = as_mapping(facts.get("config"))
    model, optim = as_mapping(config.get("model")), as_mapping(config.get("optim"))
    depth, width = _whole(model.get("depth")), _whole(model.get("width"))
    params = _whole(facts.get("params"))
    if params is None and depth is not None and width is not None:
        params = (4 + 2 * (_whole(model.get("mlp_ratio")) or 4)) * depth * width**2  # as GPT.count_params
    lr, seed = _float(optim.get("lr")), _whole(config.get("seed"))
    return replace(
        empty,
        kind=str(config.get("kind", "")),
        size=place.size or (f"{depth}x{width}" if depth is not None else f"{params} parameters"),
        lr=place.lr if math.isfinite(place.lr) else lr,
        seed=place.seed if place.seed is not None else seed or 0,
        params=params if params and params > 0 else None,
        depth=depth,
        width=width,
        planned=_whole(config.get("steps")) or 0,
        sha256=str(facts.get("sha256") or ""),
        versions={str(key): str(value) for key, value in as_mapping(facts.get("versions")).items()},
        eps=math.nan if optim.get("name") in _NO_EPS else _float(optim.get("eps")),
        bounded=model.get("qk_norm", "off") not in ("off", None, False) or model.get("kappa") is not None,
    )


def _seen(told: Result, run: Run) -> Result:
    """What was logged on the way."""
    evaluations = _evaluations(run)
    steps, losses = losses_of(run)
    taken = int(steps[-1]) if len(steps) else 0
    rules = PAPER.fitted(taken)
    spans = loss_spans(steps, losses, rules)
    peaks = [find_peak(steps, losses, span, rules) for span in spans]
    logits, logz = _logits(run), _points(run, run.signals.column("totals/logz"))
    at = _snapshot(logits, told.planned or taken)
    name = _first_mlp(run)
    finite = [loss for _, loss in evaluations if math.isfinite(loss)]
    return replace(
        told,
        steps=taken,
        tokens=int(_last(run.log.column("tokens"))),
        seconds=_last(run.log.column("seconds")),
        evaluations=evaluations,
        first=next((loss for step, loss in evaluations if step == 0 and math.isfinite(loss)), math.nan),
        best=min(finite, default=math.nan),
        losses=_thin(steps, losses, [*(span[0] for span in spans), *(peak[0] for peak in peaks)]),
        logits=logits,
        logit_max=at[1] if at else math.nan,
        logit_step=at[0] if at else None,
        logz=logz,
        grad_rms=_tail(run, "grad_rms", name),
        update_rms=_tail(run, "update_rms", name),
        out_rms=_out_rms(run),
        spikes=tuple((span[0], _infinite(peak[1])) for span, peak in zip(spans, peaks, strict=True)),
        loss_ratio=loss_ratios(losses).highest if len(losses) else math.nan,
        alarms=len(run.of_kind("alarm")),
        broken=run.broken,
    )


def _ended(seen: Result, run: Run) -> Result:
    """How it ended, from result.json, which is written last."""
    if run.result is None:
        if (seen.folder / "result.json").exists():
            return replace(seen, status="unreadable", why="result.json cannot be read")
        return replace(seen, status="running", why=f"at step {seen.steps} of {seen.planned}")
    why = str(run.result.get("why", ""))
    status: Status = "done" if why == "done" else "stopped"
    # A run that was stopped as hopeless has no final loss, and one without a finite one none either.
    final = _infinite(seen.evaluations[-1][1]) if seen.evaluations else math.nan
    return replace(
        seen,
        status=status,
        why=why,
        loss=final if status == "done" else math.inf,
        steps=_whole(run.result.get("step")) or seen.steps,
        tokens=_whole(run.result.get("tokens")) or seen.tokens,
        seconds=_float(run.result.get("seconds")) if "seconds" in run.result else seen.seconds,
    )


def _evaluations(run: Run) -> Points:
    """(step, validation loss) in order; those that a resume has taken back are gone, those taken twice are the last."""
    found: dict[int, float] = {}
    for event in run.of_kind("evaluated", "resumed"):
        step = _whole(event.get("step"))
        if step is None:
            continue
        if event["event"] == "resumed":
            found = {at: loss for at, loss in found.items() if at <= step}
        else:
            loss = _float(event.get("loss"))
            found[step] = loss if abs(loss) < ABSURD else math.nan
    return tuple(sorted(found.items()))


def _logits(run: Run) -> Points:
    """(step, largest attention logit of all layers); looks at which a layer was not finite are left out."""
    columns = [column for column in run.layers("logit_max").values() if np.isfinite(column).any()]
    return _points(run, np.max(columns, axis=0)) if columns else ()


def _snapshot(logits: Points, steps: int) -> tuple[int, float] | None:
    """Step and value; where nobody looked in that part of the run, the last look before it, else the first after."""
    inside = [point for point in logits if SNAPSHOT[0] * steps < point[0] <= SNAPSHOT[1] * steps and point[1] > 0]
    if inside:
        return inside[-1][0], float(np.exp(np.mean(np.log([value for _, value in inside]))))
    before = [point for point in logits if point[0] <= SNAPSHOT[1] * steps]
    return before[-1] if before else logits[0] if logits else None


def _first_mlp(run: Run) -> str | None:
    """The tensor the paper looks at: the first matrix of the first MLP."""
    names = [name for name in run.tensors("grad_rms") if "mlp" in name and name.endswith("weight")]
    return min(names, key=_natural, default=None)


def _tail(run: Run, signal: str, name: str | None) -> float:
    """Mean of the last looks at a tensor; of a model without MLPs that of its middle tensor."""
    by_tensor = run.tensors(signal)
    chosen = by_tensor if name is None else {name: by_tensor[name]} if name in by_tensor else {}
    means = [value for column in chosen.values() if math.isfinite(value := _mean_of_tail(run, column))]
    return float(np.median(means)) if means else math.nan


def _mean_of_tail(run: Run, column: Floats) -> float:
    steps, known = run.signals.steps, np.isfinite(column)
    late = column[known & (steps > (1 - TAIL) * steps[-1])] if len(steps) else column
    late = late if len(late) else column[known][-1:]
    return float(late.mean()) if len(late) else math.nan


def _out_rms(run: Run) -> float:
    layers = run.layers("out_rms")
    return _mean_of_tail(run, layers[max(layers, key=_natural)]) if layers else math.nan


def _thin(steps: Any, losses: Floats, keep: Sequence[int]) -> Points:
    """Every so many steps, the last, and the steps that must be seen."""
    stride = max(1, -(-len(steps) // (MOST_POINTS - 1)))
    places = {*range(0, len(steps), stride), len(steps) - 1} if len(steps) else set()
    room = MOST_POINTS - len(places)
    places |= {int(np.searchsorted(steps, step)) for step in sorted(set(keep))[: max(room, 0)]}
    return tuple((int(steps[i]), float(losses[i])) for i in sorted(places))


def _points(run: Run, column: Floats) -> Points:
    steps = run.signals.steps
    return tuple((int(step), float(x)) for step, x in zip(steps, column, strict=True) if math.isfinite(x))


# --- JSON that may be anything


def read_json(path: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def as_mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _float(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _infinite(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _last(column: Floats) -> float:
    known = column[np.isfinite(column)]
    return float(known[-1]) if len(known) else 0.0


def _natural(name: str) -> tuple[Any, ...]:
    """blocks.2 before blocks.10."""
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split("."))
