"""One run folder, in any state, becomes one `Result`.

An unfinished, half-written or damaged run raises nothing: its `status` and `why` show it. Two parts of a run are used:

    SNAPSHOT    attention logits for forecasts: the geometric mean of the records in this part of the run
    TAIL        gradients, updates and outputs: the mean over this last part

Wortsman et al. 2023b use the logits of step 2,000 of 100,000, in the middle of the warmup. Of 500 steps that is the
tenth, which is too early. Measured on GPTs of 6k, 25k and 147k parameters with a warmup of 25 of 500 steps: the two
smaller sizes predict the logits of the largest within 1.4x at all learning rates from steps 20 and 30, within 5x from
steps 50 to 80, and not at all after a third of the run, when the logits of failing runs no longer grow. In steps 20 and
30 the runs that will fail have logits of 114 and above, the others 47 and below; up to step 40 both are as good. One
record is a maximum over one batch, so several are averaged. A run that stopped earlier has its last record used.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trimtab.analysis.findings import Points, Result, Status, geometric_mean
from trimtab.analysis.one_run import loss_ratios, losses_of, rules_for
from trimtab.analysis.spikes import find_peak, loss_spans
from trimtab.analysis.thresholds import ABSURD_LOSS
from trimtab.runs import End, EventKind, Run, RunError, RunFolder, SavedConfig, read_run
from trimtab.runs.reader import Floats
from trimtab.runs.records import LayerSignal, TensorSignal, number, whole

SNAPSHOT = (0.03, 0.08)
TAIL = 0.1
MOST_POINTS = 400  # of a training curve
_SIGNALS: tuple[TensorSignal, ...] = ("grad_rms", "update_rms", "param_rms")
_NO_EPS = ("lion", "sgd", "adafactor")  # optimizers without eps


def read_result(empty: Result) -> Result:
    """Read the folder of a result that has only names, and size, learning rate and seed if a study file has them."""
    paths = RunFolder(empty.folder)
    if not empty.folder.is_dir():
        return empty
    try:
        config = paths.require_config(newer=True)
    except RunError as error:
        return _unreadable(empty, str(error))
    planned = _from_config(empty, config)
    own = number(config.values.get("optim.lr")), whole(config.values.get("seed")) or 0
    if math.isfinite(empty.lr) and own != (empty.lr, empty.seed):
        return _unreadable(planned, f"{paths.config} is of another cell: its learning rate or seed differs")
    try:
        run = read_run(empty.folder, tensor_signals=_SIGNALS)
    except RunError:
        ended = paths.read_result() is not None
        return _unreadable(planned, "its log is missing") if ended else replace(planned, status=Status.RUNNING)
    except OSError as error:
        return _unreadable(planned, str(error.strerror))
    except OverflowError as error:
        return _unreadable(planned, f"a number is out of range: {error}")
    return _add_result(_add_log(planned, run, config), run)


def _unreadable(result: Result, why: str) -> Result:
    return replace(result, status=Status.UNREADABLE, why=why)


def _from_config(empty: Result, saved: SavedConfig) -> Result:
    config, in_study = saved.values, math.isfinite(empty.lr)
    depth, width = whole(config.get("model.depth")), whole(config.get("model.width"))
    params = saved.params
    if params is None and depth is not None and width is not None:
        params = (4 + 2 * (whole(config.get("model.mlp_ratio")) or 4)) * depth * width**2  # as GPT.count_params
    return replace(
        empty,
        kind=str(config.get("kind", "")),
        size=empty.size if empty.size != "?" else f"{params} parameters" if depth is None else f"{depth}x{width}",
        lr=empty.lr if in_study else number(config.get("optim.lr")),
        seed=empty.seed if in_study else whole(config.get("seed")) or 0,
        params=params if params and params > 0 else None,
        depth=depth,
        width=width,
        planned=whole(config.get("steps")) or 0,
        sha256=saved.sha256,
        versions=saved.versions,
        eps=math.nan if config.get("optim.name") in _NO_EPS else number(config.get("optim.eps")),
        bounded=config.get("model.qk_norm", "off") not in ("off", None, False) or config.get("model.kappa") is not None,
    )


def _add_log(planned: Result, run: Run, saved: SavedConfig) -> Result:
    evaluations, logits = _evaluations(run), _logits(run)
    steps, losses = losses_of(run)
    taken = int(steps[-1]) if len(steps) else 0
    rules = rules_for(run)
    spans = loss_spans(steps, losses, rules)
    peaks = [find_peak(steps, losses, span, rules) for span in spans]
    snapshot = _snapshot(logits, planned.planned or taken)
    first_mlp = _first(run, "mlp")  # the matrix that the paper measures
    outputs = run.signals.layers("out_rms")
    outs = tuple(_mean_of_tail(run, outputs[name]) for name in sorted(outputs, key=_natural))
    return replace(
        planned,
        steps=taken,
        tokens=int(_last(run.log.tokens)),
        seconds=_last(run.log.seconds),
        evaluations=evaluations,
        first=next((loss for step, loss in evaluations if step == 0 and math.isfinite(loss)), math.nan),
        best=min((loss for _, loss in evaluations if math.isfinite(loss)), default=math.nan),
        losses=_thin(steps, losses, [*(span[0] for span in spans), *(peak[0] for peak in peaks)]),
        logits=logits,
        lengths=_of_largest(run, "q_norm", "k_norm"),
        cosines=_of_largest(run, "cosine"),
        logit_max=geometric_mean(value for _, value in snapshot),
        logit_step=snapshot[-1][0] if snapshot else None,
        logit_ends=(snapshot[0][1], snapshot[-1][1]) if snapshot else (math.nan, math.nan),
        logz=(logz := _points(run, run.signals.total("logz"))),
        logz_drift=max((abs(value - logz[0][1]) for _, value in logz), default=math.nan),
        grad_rms=_tail(run, "grad_rms", first_mlp),
        update_rms=_tail(run, "update_rms", first_mlp),
        delta_rms=_delta(run, first_mlp, saved),
        qkv_grad_rms=_tail(run, "grad_rms", name) if (name := _first(run, "attention.qkv")) else math.nan,
        out_rms=outs[-1] if outs else math.nan,
        outs=outs,
        spikes=tuple((span[0], _infinite(peak[1])) for span, peak in zip(spans, peaks, strict=True)),
        loss_ratio=loss_ratios(losses).highest if len(losses) else math.nan,
        alarms=len(run.of_kind(EventKind.ALARM)),
        broken=run.broken,
    )


def _add_result(logged: Result, run: Run) -> Result:
    ended = run.result
    if run.damage:  # numbers from such files would be wrong
        return _unreadable(logged, run.damage[0])
    if ended is None:
        return replace(logged, status=Status.RUNNING)
    status = Status.DONE if ended.why == End.DONE else Status.STOPPED
    # A run that was stopped early has no final loss.
    final = _infinite(logged.evaluations[-1][1]) if logged.evaluations else math.nan
    return replace(
        logged,
        status=status,
        why=str(getattr(ended.why, "value", ended.why)),
        loss=final if status is Status.DONE else math.inf,
        steps=ended.step or logged.steps,
        tokens=ended.tokens or logged.tokens,
        seconds=logged.seconds if math.isnan(ended.seconds) else ended.seconds,
    )


def _evaluations(run: Run) -> Points:
    """(step, validation loss) in order. A resume discards later ones; of a step evaluated twice the last counts."""
    found: dict[int, float] = {}
    for event in run.of_kind(EventKind.EVALUATED, EventKind.RESUMED):
        if event.step is not None and event.kind == EventKind.RESUMED:
            found = {step: loss for step, loss in found.items() if step <= event.step}
        elif event.step is not None:
            found[event.step] = event.loss if abs(event.loss) < ABSURD_LOSS else math.nan
    return tuple(sorted(found.items()))


def _logits(run: Run) -> Points:
    """(step, largest attention logit of all layers); steps at which a layer is not finite are left out."""
    columns = [column for column in run.signals.layers("logit_max").values() if np.isfinite(column).any()]
    return _points(run, np.max(columns, axis=0)) if columns else ()


def _of_largest(run: Run, *signals: LayerSignal) -> Points:
    """(step, product of these signals) of the layer whose logit is the largest at that step."""
    logits = run.signals.layers("logit_max")
    names = [name for name, column in logits.items() if np.isfinite(column).any()]
    if not names or any(name not in run.signals.layers(signal) for signal in signals for name in names):
        return ()
    place = np.nan_to_num(np.array([logits[name] for name in names]), nan=-np.inf).argmax(axis=0)
    product = np.ones(len(place))
    for signal in signals:
        columns = run.signals.layers(signal)
        product = product * np.array([columns[name] for name in names])[place, np.arange(len(place))]
    return _points(run, product)


def _delta(run: Run, name: str | None, saved: SavedConfig) -> float:
    """RMS of the updates in units of the learning rate. Decay is subtracted as if it were at right angles to them."""
    config, columns = saved.values, [run.signals.tensors(signal) for signal in ("update_rms", "param_rms")]
    if name is None or any(name not in column for column in columns):
        return math.nan
    update, param = (column[name] for column in columns)
    lr_at = dict(zip(run.log.steps.tolist(), run.log.column("lr").tolist(), strict=True))
    lr = np.array([lr_at.get(step, math.nan) for step in run.signals.steps.tolist()])
    peak = number(config.get("optim.lr")) if config.get("optim.independent_decay") else 1.0
    decay = number(config.get("optim.weight_decay")) * lr / peak * param
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        return _mean_of_tail(run, np.sqrt(np.maximum(update**2 - decay**2, 0)) / lr)


def _first(run: Run, part: str) -> str | None:
    """The first matrix of the first block whose name has this part; in the order of the model within the block."""
    names = [name for name in run.signals.tensors("grad_rms") if part in name and name.endswith("weight")]
    return min(names, key=lambda name: _natural(name.partition(part)[0]), default=None)


def _snapshot(logits: Points, steps: int) -> Points:
    """The records in that part of the run; without one, the last before it, else the first after."""
    inside = tuple(point for point in logits if SNAPSHOT[0] * steps < point[0] <= SNAPSHOT[1] * steps and point[1] > 0)
    before = [point for point in logits if point[0] <= SNAPSHOT[1] * steps]
    return inside or tuple(before[-1:]) or logits[:1]


def _tail(run: Run, signal: TensorSignal, name: str | None) -> float:
    """Mean of the last records of a tensor; without a name, the median over all tensors."""
    by_tensor = run.signals.tensors(signal)
    columns = by_tensor.values() if name is None else [by_tensor[name]] if name in by_tensor else []
    means = [value for column in columns if math.isfinite(value := _mean_of_tail(run, column))]
    return float(np.median(means)) if means else math.nan


def _mean_of_tail(run: Run, column: Floats) -> float:
    steps, known = run.signals.steps, np.isfinite(column)
    late = column[known & (steps > (1 - TAIL) * steps[-1])] if len(steps) else column
    late = late if len(late) else column[known][-1:]
    return float(late.mean()) if len(late) else math.nan


def _thin(steps: Any, losses: Floats, keep: Sequence[int]) -> Points:
    """Equally spaced steps, the last, and as many of `keep` as MOST_POINTS allows."""
    stride = max(1, -(-len(steps) // (MOST_POINTS - 1)))
    places = {*range(0, len(steps), stride), len(steps) - 1} if len(steps) else set()
    room = MOST_POINTS - len(places)
    places |= {int(np.searchsorted(steps, step)) for step in sorted(set(keep))[: max(room, 0)]}
    return tuple((int(steps[i]), float(losses[i])) for i in sorted(places))


def _points(run: Run, column: Floats) -> Points:
    steps = run.signals.steps
    return tuple((int(step), float(x)) for step, x in zip(steps, column, strict=True) if math.isfinite(x))


def _infinite(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _last(column: Floats) -> float:
    known = column[np.isfinite(column)]
    return float(known[-1]) if len(known) else 0.0


def _natural(name: str) -> tuple[Any, ...]:
    """blocks.2 before blocks.10."""
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split("."))
