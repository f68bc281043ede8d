"""`Watch` looks at every step of a training and says when something is about to go wrong.

    watch = Watch(model, optimizer)
    for batch in loader:
        loss = model(batch); loss.backward()
        optimizer.step(); optimizer.zero_grad()
        for alarm in watch.step(loss): print(alarm)

It measures inside `optimizer.step`, through the optimizer's own step hooks: there the gradients are final and the
moments still those of the step before. So `watch.step` may come before or after `zero_grad`.

    before the step    gradients, RMS_t, then actions, then the update to come           signals.py, actions.py
    after the step     totals of the state                                               totals.py
    watch.step         layers heard during the forward pass, one transfer, rules, alarms  taps.py, events.py

With actions off nothing is written to: a training with a watcher is, bit for bit, the one without. An error in here is
reported once, as an alarm, and switches the watcher off, on all processes together.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.watch import taps as layers_of
from trimtab.watch import totals as totals_of
from trimtab.watch.actions import Actions, Actor
from trimtab.watch.events import NOTHING, Alarm, Detector, Rules
from trimtab.watch.losses import as_number, exchange
from trimtab.watch.processes import Together, unwrap
from trimtab.watch.signals import GRAD, Plan, Signals, clean, has_second_moment, name_parameters, to_record
from trimtab.watch.taps import Ear

Loss = float | Tensor | None
Patterns = str | Sequence[str]


class Watch:
    """Signals, alarms and, if asked for, actions.

    Args:
        model: as the loop calls it; with DDP the wrapped one, so that losses of all processes are averaged.
        optimizer: any that keeps a second moment; others are watched without RMS_t.
        every: steps between two looks at the tensors. Losses are all looked at.
        deep_every: steps between two looks at what costs more: layers, totals of the state, rounding errors.
        tensors: patterns of parameter names.
        taps: False for no layers; patterns for other taps than `trimtab.watch.taps.DEFAULT`.
        actions: what to do about alarms; nothing unless given.
        rules: the constants of the alarms.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        every: int = 1,
        deep_every: int = 10,
        tensors: Patterns = "*",
        taps: bool | Patterns = True,
        actions: Actions | None = None,
        rules: Rules | None = None,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        for name, value in (("every", every), ("deep_every", deep_every)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.model, self.optimizer = unwrap(model), _innermost(optimizer)
        self.every, self.deep_every = every, deep_every
        self.patterns = (tensors,) if isinstance(tensors, str) else tuple(tensors)
        self.steps = 0
        self.detector = Detector(rules or Rules(), every)
        self.actor = Actor(actions or Actions(), self.optimizer)
        self._params: list[Tensor] = []
        self._plan = Plan([], [])
        self._replan()
        if not self._plan.names:
            raise ValueError(f"no parameter of the optimizer matches {', '.join(self.patterns)}")
        self._together = Together(model, self._params)
        self._ear = Ear(self.model, taps, self._note_error) if taps is not False else None
        self._error: str | None = None
        self._agreed = False  # all processes know of it
        self._skipped = False  # this step was left out: look at it whenever it is
        self._signals: Signals | None = None
        self._deep: list[Tensor] = []  # rounding of the state, then totals
        self._losses: list[Any] = []  # since the last look
        self._clipped: list[int] = []
        self._alarms = [] if has_second_moment(self.optimizer) else [_reduced(self.optimizer)]
        self._record: dict[str, Any] = {}
        self._hooks = [
            self.optimizer.register_step_pre_hook(self._before),
            self.optimizer.register_step_post_hook(self._after),
        ]
        self._listen()

    def step(self, loss: Loss = None, *, grad_norm: Loss = None) -> list[Alarm]:
        """Call once per step, after `optimizer.step`. `grad_norm` is the one before clipping, if there is clipping."""
        if not self._hooks:
            return []
        self.steps += 1
        self.actor.after_step()
        self._losses.append(None)
        self._try(lambda: self._losses.__setitem__(-1, as_number(loss)))
        skipped, self._skipped = self._skipped, False
        if self.steps % self.every and not skipped:
            self._try(self._listen)
            return []
        try:
            alarms = self._look(grad_norm)
            self._listen()
        except Exception as error:
            self._note_error(error)
            if self._together.several and not self._agreed:
                return []  # the others would wait for us: tell them at the next look, and leave together
            self.close()
            return [self._own_alarm()]
        return alarms

    def skip(self) -> None:
        """Call where the loop leaves out `optimizer.step`: the gradients are looked at, at every such step."""
        self._skipped = self.active
        if self._skipped:
            with torch.no_grad():
                self._try(self._measure)

    @property
    def record(self) -> dict[str, Any]:
        """What was measured at the last look, for a line of signals.jsonl; null where a number is not finite."""
        return clean(self._record)

    @property
    def active(self) -> bool:
        """False once it was closed, or has switched itself off."""
        return bool(self._hooks)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, fit for JSON: with them a resumed run continues all windows."""
        losses = [None if x is None else float(x) for x in self._losses]
        own = {"steps": self.steps, "losses": losses, "clipped": list(self._clipped)}
        return own | {"detector": self.detector.state_dict(), "actor": self.actor.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.detector.load_state_dict(state["detector"])
        self.actor.load_state_dict(state["actor"])
        self.steps, self._losses = state["steps"], list(state["losses"])
        self._clipped, self._signals, self._deep = list(state["clipped"]), None, []
        self._listen()

    def close(self) -> None:
        """Take all hooks away. The optimizer and the model are as they were."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._ear is not None:
            self._ear.close()

    # --- Around the optimizer's step

    @torch.no_grad()
    def _before(self, *_: Any) -> None:
        if self._is_due(self.steps + 1):
            self._try(self._measure)

    def _measure(self) -> None:
        self._replan()
        signals = self._signals = Signals(*self._where())
        signals.measure_gradients()
        if self.actor.actions.before:
            self._act(signals)
        signals.measure_updates()
        if self._is_deep(self.steps + 1):
            self._deep = [totals_of.measure_state_error(*self._where(), self.steps // self.deep_every)]

    @torch.no_grad()
    def _after(self, *_: Any) -> None:
        self.actor.after_step()
        if self._signals is not None and self._is_due(self.steps + 1):
            self._try(self._signals.measure_samples)
            if self._deep:
                self._try(lambda: self._deep.append(totals_of.measure_totals(*self._where())))

    def _where(self) -> tuple[torch.optim.Optimizer, Plan, Together, Callable[[Exception], None]]:
        return self.optimizer, self._plan, self._together, self._note_error

    def _act(self, signals: Signals) -> None:
        """Decide together: what one process sees, all act on."""
        step, names = self.steps + 1, self._plan.names
        rms = dict(zip(names, signals.rms().tolist(), strict=True))
        spiking = self.detector.spiking(step, rms)
        finite = signals.sums[:, GRAD].isfinite().tolist()
        broken = [name for name, ok in zip(names, finite, strict=True) if not ok]
        worst = [
            max([1.0, *(rms[names[self._plan.places[p]]] for p in group["params"] if p in self._plan.places)])
            for group in self.optimizer.param_groups
        ]
        worst = [x if math.isfinite(x) else 1.0 for x in worst]
        agreed = self._together.gather(torch.tensor([len(spiking), len(broken), *worst], dtype=torch.float64))
        any_spiking, any_broken, *worst = agreed.amax(0).tolist()
        elsewhere = {"another process": max(worst)}
        self._alarms += self.actor.before_step(
            step,
            (spiking or elsewhere) if any_spiking else {},
            (broken or list(elsewhere)) if any_broken else [],
            worst,
        )

    # --- After it

    def _look(self, grad_norm: Loss) -> list[Alarm]:
        step, deep = self.steps, self._ear if self._is_deep(self.steps) else None
        means: list[layers_of.Key] = []
        maxima: list[layers_of.Key] = []
        heard = torch.zeros(0, dtype=torch.float64)
        if deep is not None:
            deep.close()
            means, maxima, heard = deep.read()
        failed, pending, self._losses = self._error is not None, self._losses, []
        shared = exchange(self._together, pending, width=self.every, failed=failed, names=(means, maxima))
        self._agreed = shared.failed
        if shared.failed:
            raise RuntimeError("an error in the watcher of another process")
        if self._together.several and shared.alike and len(heard):
            heard = layers_of.combine(means, maxima, self._together.gather(heard))
        signals, state = self._signals, self._deep
        self._signals, self._deep = None, []
        device = self._together.device
        sums = signals.sums if signals is not None else torch.zeros(0, dtype=torch.float64)
        # Everything in one transfer: a device is asked once per look.
        parts = [shared.losses, heard, sums.flatten(), *state]
        host = torch.cat([x.to(device, torch.float64).flatten() for x in parts]).cpu()
        losses, heard, sums, *last = host.split([x.numel() for x in parts])
        tensors = to_record(self._plan, sums.view(-1, 6)) if signals is not None else {}
        layers = layers_of.name_layers(means, maxima, heard.tolist())
        totals = totals_of.summarise(tensors, layers, self._plan, [x.tolist() for x in last])
        self._count_clips(totals, grad_norm)
        given = [x if known else None for x, known in zip(losses.tolist(), shared.given, strict=True)]
        alarms = self._alarms + self._judge(step, given, tensors, layers, totals)
        self._alarms = []
        loss = given[-1] if given else None
        self._record = {"step": step, "loss": loss, "tensors": tensors, "layers": layers, "totals": totals}
        return alarms + self.actor.after_alarms(step, alarms)

    def _judge(
        self,
        step: int,
        losses: Sequence[float | None],
        tensors: Mapping[str, Mapping[str, float]],
        layers: Mapping[str, Mapping[str, float]],
        totals: dict[str, float],
    ) -> list[Alarm]:
        alarms: list[Alarm] = []
        for number, loss in enumerate(losses, start=step - len(losses) + 1):
            if loss is not None:
                totals["loss_ratio"] = self.detector.loss_ratio(loss, self.detector.best)
                alarms += self.detector.see_loss(number, loss)
        alarms += self.detector.see_tensors(step, tensors, self._hints)
        alarms += self.detector.see_layers(step, layers)
        if self._is_deep(step):
            moving = {(name, "param_rms"): x["param_rms"] for name, x in tensors.items()}
            moving |= {(name, "logit_max"): x["logit_max"] for name, x in layers.items() if "logit_max" in x}
            moving |= {("output", signal): totals[signal] for signal in ("logz", "logit_max") if signal in totals}
            alarms += self.detector.see_drift(step, moving)
        return alarms

    def _count_clips(self, totals: dict[str, float], grad_norm: Loss) -> None:
        if grad_norm is not None and "grad_norm" in totals:
            clipped = float(grad_norm) > 1.001 * totals["grad_norm"]
            self._clipped = [*self._clipped, int(clipped)][-self.detector.rules.window :]
            totals["clip_fraction"] = sum(self._clipped) / len(self._clipped)

    # --- What it is made of

    def _is_due(self, step: int) -> bool:
        return bool(self._hooks) and step % self.every == 0

    def _is_deep(self, step: int) -> bool:
        return self._is_due(step) and step % self.deep_every < self.every

    def _listen(self) -> None:
        """Be ready for the next step's forward pass."""
        if self._ear is not None and self._is_deep(self.steps + 1):
            self._ear.open()

    def _replan(self) -> None:
        """Parameters may come and go."""
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        if len(params) == len(self._params) and all(a is b for a, b in zip(params, self._params, strict=True)):
            return
        before = set(self._plan.names)
        names = name_parameters(self.model, self.optimizer)
        watched = {p: name for p, name in names.items() if any(fnmatchcase(name, x) for x in self.patterns)}
        self._params, self._plan = params, Plan(list(watched.values()), list(watched))
        self.detector.forget(before - set(self._plan.names))
        self._hints = {
            names[p]: group for group in self.optimizer.param_groups for p in group["params"] if p in watched
        }

    def _try(self, run: Callable[[], None]) -> None:
        try:
            run()
        except Exception as error:
            self._note_error(error)

    def _note_error(self, error: Exception) -> None:
        self._error = self._error or f"{type(error).__name__}: {error}"

    def _own_alarm(self) -> Alarm:
        text = f"{self._error}. The training goes on without its watcher"
        return Alarm(self.steps, "watcher error", "the watcher itself", "error", math.nan, NOTHING, text)


def _innermost(optimizer: Any) -> torch.optim.Optimizer:
    """Some libraries wrap the optimizer in one of their own."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    found: torch.optim.Optimizer = optimizer
    return found


def _reduced(optimizer: torch.optim.Optimizer) -> Alarm:
    name = type(optimizer).__name__
    text = "It keeps no second moment, so RMS_t and the share of eps are not measured, and RMS spikes not found"
    return Alarm(0, "reduced", name, "rms", math.nan, NOTHING, text)
