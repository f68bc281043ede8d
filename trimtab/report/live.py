"""A live run on the terminal: `show("runs/gpt")` draws loss, signals by layer and alarms until the run ends.

Reads only what was appended since the last look, and keeps a few hundred points per curve however long the run is: when
a curve is full, neighbours are joined and the larger one stays, since spikes are what the eye is looking for.
"""

import json
import math
import re
import time
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from trimtab.runs.reader import Lines, Record

BLOCKS = "▁▂▃▄▅▆▇█"
MISSING = "×"  # where there is no number
POINTS = 512
RMS_LIMIT = 2.3
LAYER_SIGNALS = ("logit_max", "entropy", "out_rms")
LOUD = ("alarm", "skipped", "stopped", "checkpoint failed", "rolled back", "not rolled back", "resumed", "done")
ENDS = ("stopped", "done")


class Curve:
    """At most `POINTS` numbers for a curve of any length."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.last = math.nan
        self._stride, self._pending = 1, list[float]()

    def add(self, value: float) -> None:
        self.last = value
        self._pending.append(value)
        if len(self._pending) < self._stride:
            return
        self.values.append(_worst(self._pending))
        self._pending.clear()
        if len(self.values) >= POINTS:
            self.values = [_worst(self.values[i : i + 2]) for i in range(0, len(self.values), 2)]
            self._stride *= 2

    def draw(self, width: int) -> str:
        return sparkline([*self.values, *([_worst(self._pending)] if self._pending else [])], width)


class View:
    """What there is to see of a run folder; `update` reads on, `render` draws."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise ValueError(f"{self.folder} is not a folder; give that of a run, like runs/gpt")
        self._files = {name: Lines(self.folder / f"{name}.jsonl") for name in ("log", "signals", "events")}
        self.curves: dict[tuple[str, str], Curve] = {}  # by layer and signal; the run itself is layer ""
        self.record: Record = {}
        self.news: deque[Record] = deque(maxlen=8)
        self.alarms, self.ended = 0, False

    def update(self) -> None:
        for record in self._files["log"].read():
            self._add("", "loss", record.get("loss"))
            self._add("", "grad_norm", record.get("grad_norm"))
            self.record = record
        for record in self._files["signals"].read():
            self._add_signals(record)
        for event in self._files["events"].read():
            self.alarms += event.get("event") == "alarm"
            if event.get("event") in LOUD:
                self.news.append(event)
            self.ended = event.get("event") in ENDS
        self.ended |= (self.folder / "result.json").exists()

    def render(self, width: int = 100, rows: int = 30) -> RenderableType:
        room = max(10, width - 40)
        parts: list[RenderableType] = [self._head(), *self._run_lines(room)]
        if any(layer for layer, _ in self.curves):
            parts.append(self._layers(width, rows))
        if self.news:
            lines = [
                Text(_event_words(event), style=_style(event), no_wrap=True, overflow="ellipsis") for event in self.news
            ]
            parts.append(Panel(Group(*lines), title=f"{self.alarms} alarms", title_align="left"))
        return Group(*parts)

    def _head(self) -> Text:
        state = "ended" if self.ended else "running"
        if not self.record:
            return Text(f"{self.folder}: {state}, no step yet" if self.ended else f"{self.folder}: waiting for a step")
        words = [f"step {self.record.get('step')}"]
        words += [
            f"{key} {_short(self.record.get(key))}" for key in ("tokens", "lr", "length", "batch") if key in self.record
        ]
        return Text(f"{self.folder}: {state}, {', '.join(words)}", style="bold")

    def _run_lines(self, room: int) -> Iterable[Text]:
        for signal in ("loss", "grad_norm"):
            curve = self.curves.get(("", signal))
            if curve is not None:
                yield Text(f"{signal:<10}{_short(curve.last):>10}  {curve.draw(room)}", no_wrap=True)

    def _layers(self, width: int, rows: int) -> Table:
        """One row per layer, one column per signal that some layer has. The layers with the highest RMS_t stay."""
        signals = [s for s in ("rms", *LAYER_SIGNALS) if any(signal == s for _, signal in self.curves)]
        layers = list(dict.fromkeys(layer for layer, _ in self.curves if layer))
        shown = set(sorted(layers, key=self._alarming)[:rows])
        table = Table("layer", *signals, box=None, pad_edge=False, expand=False)
        room = max(4, (width - 30) // max(1, len(signals)) - 11)
        for layer in layers:
            if layer in shown:
                table.add_row(layer[-28:], *(self._cell(layer, signal, room) for signal in signals))
        if len(layers) > rows:
            table.add_row(f"... {len(layers) - rows} more")
        return table

    def _alarming(self, layer: str) -> float:
        curve = self.curves.get((layer, "rms"))
        return -math.inf if curve is None or math.isnan(curve.last) else -curve.last

    def _cell(self, layer: str, signal: str, room: int) -> Text:
        curve = self.curves.get((layer, signal))
        if curve is None:
            return Text("")
        loud = not math.isfinite(curve.last) or (signal == "rms" and curve.last >= RMS_LIMIT)
        return Text(f"{_short(curve.last):>9} {curve.draw(room)}", style="bold red" if loud else "", no_wrap=True)

    def _add_signals(self, record: Record) -> None:
        highest: dict[str, list[float]] = {}
        for name, signals in _dicts(record.get("tensors")):
            highest.setdefault(layer_of(name), []).append(_number(signals.get("rms")))
        for layer, values in highest.items():
            self._add(layer, "rms", _worst(values))
        for name, signals in _dicts(record.get("layers")):
            for signal in LAYER_SIGNALS:
                if signal in signals:
                    self._add(layer_of(name), signal, signals[signal])

    def _add(self, layer: str, signal: str, value: Any) -> None:
        if value is not None or signal != "grad_norm" or (layer, signal) in self.curves:
            self.curves.setdefault((layer, signal), Curve()).add(_number(value))


def show(folder: str | Path, *, once: bool = False, every: float = 1.0, console: Console | None = None) -> None:
    """Draw a run until it ends or Ctrl-C; once only if asked, or where the output is no terminal."""
    console = console or Console()
    view = View(folder)
    view.update()
    if once or not console.is_terminal:
        console.print(view.render(console.width))
        return
    try:
        with Live(view.render(console.width, _rows(console)), console=console, auto_refresh=False) as live:
            while not view.ended:
                time.sleep(every)
                view.update()
                if view.ended:
                    view.update()  # the log may have been read just before its last lines came
                live.update(view.render(console.width, _rows(console)), refresh=True)
    except KeyboardInterrupt:
        pass


def sparkline(values: Sequence[float], width: int) -> str:
    """Bars from the lowest to the highest finite value; of what does not fit, the largest of neighbours."""
    if len(values) > width:
        edges = [len(values) * i // width for i in range(width + 1)]
        values = [_worst(values[a:b]) for a, b in pairwise(edges)]
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return MISSING * len(values)
    low, high = min(finite), max(finite)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((v - low) * scale)] if math.isfinite(v) else MISSING for v in values)


def layer_of(name: str) -> str:
    """The block that a tensor or module belongs to, or else the module: "transformer.blocks.3", "embedding"."""
    block = re.match(r"(.*?\b\d+)(?:\.|$)", name)
    return block[1] if block else name.rsplit(".", 1)[0]


def _worst(values: Sequence[float]) -> float:
    """The largest, or NaN as soon as one is: what is not a number must not be hidden."""
    return math.nan if any(math.isnan(value) for value in values) else max(values)


def _dicts(values: Any) -> list[tuple[str, Record]]:
    return [(k, v) for k, v in values.items() if isinstance(v, dict)] if isinstance(values, dict) else []


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _short(value: Any) -> str:
    if not isinstance(value, int | float) or math.isnan(value):
        return "NaN"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _event_words(event: Record) -> str:
    step = f"step {event.get('step', '?')}"
    if event.get("event") == "alarm":
        low, high = (*(event.get("usual") or ()), None, None)[:2]
        usual = "" if low is None or high is None else f" (usually {_short(low)} to {_short(high)})"
        value = f"{event.get('signal', '')} {_short(event.get('value'))}{usual}"
        return f"{step}  {event.get('kind')}  {event.get('where', '')}  {value}. {event.get('advice', '')}"
    rest = {k: v for k, v in event.items() if k not in ("event", "time", "step") and v not in (None, "")}
    words = ", ".join(f"{k} {v if isinstance(v, str | int) else json.dumps(v)}" for k, v in rest.items())
    return f"{step}  {event.get('event')}  {words}"


def _style(event: Record) -> str:
    return {"alarm": "yellow", "skipped": "red", "stopped": "bold red", "checkpoint failed": "red"}.get(
        event["event"], ""
    )


def _rows(console: Console) -> int:
    return max(3, console.height - 18)
