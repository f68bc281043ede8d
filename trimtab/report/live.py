"""A running training on the terminal: `show("runs/gpt")` draws loss, signals by layer and alarms until the run ends.

Each update reads only the lines that were appended since the last one. A curve keeps a few hundred points: when it is
full, neighbours are merged into the larger one, so that spikes stay visible.
"""

import json
import math
import re
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from trimtab.analysis.thresholds import RMS_SPIKE
from trimtab.runs import Event, EventKind, Lines, RunFolder, SignalRecord
from trimtab.runs.records import Json, LayerSignal, number
from trimtab.screen import printable

BLOCKS = "▁▂▃▄▅▆▇█"
MISSING = "×"  # not a number
POINTS = 512
LAYER_SIGNALS: tuple[LayerSignal, ...] = ("logit_max", "entropy", "out_rms")
HIDDEN = (EventKind.EVALUATED, EventKind.CHECKPOINT, EventKind.FORCED)  # events that are not shown
ENDS = (EventKind.STOPPED, EventKind.DONE)
STYLES: dict[str, str] = {
    EventKind.ALARM: "yellow",
    EventKind.SKIPPED: "red",
    EventKind.STOPPED: "bold red",
    EventKind.CHECKPOINT_FAILED: "red",
}


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
    """The state of a run folder; `update` reads new lines, `render` draws."""

    def __init__(self, folder: str | Path) -> None:
        self.folder, self.paths = Path(folder), RunFolder(folder)
        if not self.folder.is_dir():
            raise ValueError(f"{self.folder} is not a folder; give the folder of a run, such as runs/gpt")
        paths = (self.paths.log, self.paths.signals, self.paths.events)
        self._log, self._signals, self._events = map(Lines, paths)
        self.curves: dict[tuple[str, str], Curve] = {}  # by layer and signal; layer "" is the whole run
        self.record: Json = {}
        self.recent: deque[Event] = deque(maxlen=8)
        self.alarms, self.ended = 0, False
        self.complete, self.damage = False, tuple[str, ...]()  # there is a result; what differs from it

    def update(self) -> None:
        for record in self._log.read():
            for signal in ("loss", "grad_norm"):
                value = number(record.get(signal))
                if signal == "loss" or ("", signal) in self.curves or not math.isnan(value):
                    self._add("", signal, value)
            self.record = record
        for record in self._signals.read():
            self._add_signals(SignalRecord.from_json(record))
        for event in map(Event.from_json, self._events.read()):
            self.alarms += event.kind == EventKind.ALARM
            if event.kind not in HIDDEN:
                self.recent.append(event)
            self.ended = event.kind in ENDS
        if self.paths.complete and not self.complete:
            self.complete, self.damage = True, self.paths.damage()
        self.ended |= self.complete

    def render(self, width: int = 100, rows: int = 30) -> RenderableType:
        room = max(10, width - 40)
        parts: list[RenderableType] = [self._head()]
        parts += [Text(f"not as the run wrote it: {text}", style="bold red") for text in self.damage]
        for signal in ("loss", "grad_norm"):
            if (curve := self.curves.get(("", signal))) is not None:
                parts.append(Text(f"{signal:<10}{_short(curve.last):>10}  {curve.draw(room)}", no_wrap=True))
        if any(layer for layer, _ in self.curves):
            parts.append(self._layers(width, rows))
        if self.recent:
            styled = [(event_words(event), STYLES.get(event.kind, "")) for event in self.recent]
            lines = [Text(words, style, no_wrap=True, overflow="ellipsis") for words, style in styled]
            parts.append(Panel(Group(*lines), title=f"{self.alarms} alarms", title_align="left"))
        return Group(*parts)

    def _head(self) -> Text:
        state = "ended" if self.ended else "running"
        if not self.record:
            return Text(f"{self.folder}: {state}, no step yet" if self.ended else f"{self.folder}: waiting for a step")
        keys = [key for key in ("tokens", "lr", "length", "batch") if key in self.record]
        words = [f"step {self.record.get('step')}", *(f"{key} {_short(self.record[key])}" for key in keys)]
        return Text(printable(f"{self.folder}: {state}, {', '.join(words)}"), style="bold")

    def _layers(self, width: int, rows: int) -> Table:
        """A row per layer and a column per signal. If there are too many layers, those with the highest RMS_t."""
        signals = [s for s in ("rms", *LAYER_SIGNALS) if any(signal == s for _, signal in self.curves)]
        layers = list(dict.fromkeys(layer for layer, _ in self.curves if layer))
        shown = set(sorted(layers, key=self._last_rms, reverse=True)[:rows])
        table = Table("layer", *signals, box=None, pad_edge=False, expand=False)
        room = max(4, (width - 30) // max(1, len(signals)) - 11)
        for layer in layers:
            if layer in shown:
                table.add_row(Text(layer[-28:]), *(self._cell(layer, signal, room) for signal in signals))
        if len(layers) > rows:
            table.add_row(f"... {len(layers) - rows} more")
        return table

    def _last_rms(self, layer: str) -> float:
        """Infinite if it is NaN or was not measured."""
        curve = self.curves.get((layer, "rms"))
        return math.inf if curve is None or math.isnan(curve.last) else curve.last

    def _cell(self, layer: str, signal: str, room: int) -> Text:
        curve = self.curves.get((layer, signal))
        if curve is None:
            return Text("")
        red = not math.isfinite(curve.last) or (signal == "rms" and curve.last >= RMS_SPIKE)
        return Text(f"{_short(curve.last):>9} {curve.draw(room)}", style="bold red" if red else "", no_wrap=True)

    def _add_signals(self, record: SignalRecord) -> None:
        highest: dict[str, list[float]] = {}
        for name, signals in record.tensors.items():
            if "rms" in signals:
                highest.setdefault(layer_of(name), []).append(signals["rms"])
        for layer, values in highest.items():
            self._add(layer, "rms", _worst(values))
        for name, signals in record.layers.items():
            for signal in LAYER_SIGNALS:
                if signal in signals:
                    self._add(layer_of(name), signal, signals[signal])

    def _add(self, layer: str, signal: str, value: float) -> None:
        self.curves.setdefault((layer, signal), Curve()).add(value)


def show(folder: str | Path, *, once: bool = False, every: float = 1.0, console: Console | None = None) -> None:
    """Draw a run until it ends or Ctrl-C; only once with `once`, or if the output is not a terminal."""
    console = console or Console()
    view = View(folder)
    view.update()
    if once or not console.is_terminal:
        console.print(view.render(console.width))
        return
    with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(view.render(console.width, max(3, console.height - 18)), refresh=True)
            if view.ended:
                return
            time.sleep(every)
            view.update()
            if view.ended:
                view.update()  # the last lines of the log may have been written after it was read


def sparkline(values: Sequence[float], width: int) -> str:
    """Bars from the lowest to the highest finite value; if there are too many values, the largest of neighbours."""
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
    """The largest, or NaN if one is NaN: it must stay visible."""
    return math.nan if any(math.isnan(value) for value in values) else max(values)


def _short(value: Any) -> str:
    if not isinstance(value, int | float) or math.isnan(value):
        return "NaN"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def event_words(event: Event) -> str:
    step = f"step {'?' if event.step is None else event.step}"
    if event.kind == EventKind.ALARM:
        alarm = event.alarm
        low, high = alarm.usual
        usual = "" if math.isnan(low) or math.isnan(high) else f" (usually {_short(low)} to {_short(high)})"
        return f"{step}  {alarm.kind}  {alarm.where}  {alarm.signal} {_short(alarm.value)}{usual}. {alarm.advice}"
    known = {"reason": event.reason, **event.values} | ({} if math.isnan(event.loss) else {"loss": event.loss})
    shown = {key: value for key, value in known.items() if value not in (None, "")}
    words = ", ".join(f"{k} {v if isinstance(v, str | int) else json.dumps(v)}" for k, v in shown.items())
    return printable(f"{step}  {event.kind}  {words}")
