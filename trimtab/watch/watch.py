"""`Watch` measures every step of a training and returns an alarm when a signal shows an instability.

    watch = Watch(model, optimizer)
    for batch in loader:
        loss = model(batch); loss.backward()
        optimizer.step(); optimizer.zero_grad()
        for alarm in watch.step(loss): print(alarm)

It measures inside `optimizer.step`, through the optimizer's step hooks: there the gradients are final and the moments
are still those of the previous step. `watch.step` may therefore come before or after `zero_grad`. If the step gets a
closure, it measures after the closure, which computes the gradients.

    before the step    gradients, RMS_t, then actions, then the size of the update       signals.py, actions.py
    after the step     totals of the state                                               totals.py
    watch.step         layer statistics, one transfer to the host, alarm rules           taps.py, events.py

Without actions nothing is modified: a training with a watcher is bit for bit equal to one without. An error in the
watcher is reported once, as an alarm, and disables the watcher on all processes.
"""

import math
from collections import ChainMap
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.watch import totals as totals_of
from trimtab.watch.actions import Actions, Actor
from trimtab.watch.events import NO_RANGE, Alarm, Detector, Records, Rules
from trimtab.watch.processes import Errors, Processes, as_scalar, innermost, share_losses, unwrap_all
from trimtab.watch.signals import GRAD, Plan, Signals, clean, has_second_moment, name_parameters, to_record
from trimtab.watch.taps import Key, LayerRecorder, combine, name_layers

Loss = float | Tensor | None
Patterns = str | Sequence[str]
QUERY_NORMS = ("q_norm", "query_norm", "norm_q", "q_layernorm")  # in trimtab, transformers, timm and diffusers


class Watch:
    """Signals, alarms and, if requested, actions.

    Args:
        model: as the loop calls it. With DDP pass the wrapped model: losses are then averaged over processes. A
            model of Accelerate or Fabric, or an engine of DeepSpeed, will do.
        optimizer: any, also wrapped by these. Without a second moment, RMS_t is not measured.
        every: steps between two measurements of the tensors. Every loss is checked; if it is a number or on the CPU,
            at once.
        deep_every: steps between two measurements that cost more: layers, totals of the state, rounding errors.
        tensors: patterns of parameter names.
        taps: False for no layers; patterns to replace `trimtab.watch.taps.DEFAULT`.
        actions: which alarms start which action; none by default.
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
        if not isinstance(innermost(optimizer), torch.optim.Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        if every < 1 or deep_every < 1:
            raise ValueError(f"every and deep_every must be at least 1, got {every} and {deep_every}")
        self.model = unwrap_all(model)[-1]
        self.optimizer: torch.optim.Optimizer = innermost(optimizer)
        self.every, self.deep_every = every, deep_every
        self.patterns = (tensors,) if isinstance(tensors, str) else tuple(tensors)
        self.steps = 0
        self.detector = Detector(rules or Rules(), every, deep_every)
        self.actor = Actor(actions or Actions(), self.optimizer)
        self._errors = Errors()
        self._processes = Processes(model, self._all_parameters())
        self._params: list[Tensor] = []
        self._plan = self._make_plan({})
        self._remedies = _remedies_of(self.model)
        self._replan()
        if not self._plan.names:
            raise ValueError(f"no parameter of the optimizer matches {', '.join(self.patterns)}")
        self._recorder = LayerRecorder(self.model, taps, self._errors) if taps is not False else None
        self._error_shared = False  # all processes have received it
        self._skipped = False  # the loop left out `optimizer.step`: measure now, whatever `every` is
        self._signals: Signals | None = None
        self._deep: list[Tensor] = []  # rounding error of the state, then totals
        self._losses: list[Any] = []  # since the last measurement
        self._clipped: list[int] = []
        self._alarms = [] if has_second_moment(self.optimizer) else [_reduced_alarm(self.optimizer)]
        self._record: dict[str, Any] = {}
        self._hooks = [
            self.optimizer.register_step_pre_hook(self._before),
            self.optimizer.register_step_post_hook(self._after),
        ]
        self._open_taps()

    def step(self, loss: Loss = None, *, grad_norm: Loss = None) -> list[Alarm]:
        """Call once per step, after `optimizer.step`. `grad_norm` is the norm before clipping, if there is clipping."""
        if not self._hooks:
            return []
        self.steps += 1
        self.actor.after_step()
        self._losses.append(None)
        with self._errors:
            self._losses[-1] = as_scalar(loss)
        skipped, self._skipped = self._skipped, False
        with self._errors:
            between = self.steps % self.every and not skipped
            alarms = self._check_between() if between else self._finish_step(grad_norm)
            self._open_taps()
            return alarms
        if self._processes.groups and not self._error_shared:
            return []  # the other processes would hang: share the error first, then close together
        self.close()
        text = f"{self._errors.first}. The watcher is now disabled; the training continues without it"
        return [Alarm(self.steps, "watcher error", "watcher", "error", math.nan, NO_RANGE, text)]

    def skip(self) -> None:
        """Call in place of `optimizer.step` when the loop skips it: the gradients are still measured."""
        self._skipped = self.active
        if self._skipped:
            with self._errors, torch.no_grad():
                self._measure()

    @property
    def record(self) -> dict[str, Any]:
        """The last measurement, ready for JSON: `step`, `loss`, `tensors`, `layers`, `totals`. None: not finite."""
        record: dict[str, Any] = clean(self._record)
        return record

    def scalars(self) -> dict[str, float]:
        """The last measurement as finite numbers by name, for any logger: "grad_norm", "rms/blocks.0.mlp.up.weight"."""
        if not self._record:
            return {}
        flat = {"loss": self._record["loss"], **self._record["totals"]}
        for group in ("tensors", "layers"):
            for name, signals in self._record[group].items():
                flat |= {f"{signal}/{name}": x for signal, x in signals.items()}
        return {name: float(x) for name, x in flat.items() if x is not None and math.isfinite(x)}

    @property
    def active(self) -> bool:
        """False after `close`, or after an error in the watcher."""
        return bool(self._hooks)

    def share(self) -> None:
        """Average the losses since the last measurement over processes, so that `state_dict()` is equal in all of them.

        A collective: call it in all processes, before one of them saves its state for all.
        """
        if self._processes.groups and self.active:
            shared = share_losses(self._processes, self._losses, width=self.every, failed=False, names=())
            losses = zip(shared.losses.tolist(), shared.given, strict=True)
            self._losses = [loss if given else None for loss, given in losses]

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON. A resumed run that loads them continues all windows exactly; see `share`."""
        losses = [None if x is None else float(x) for x in self._losses]
        own = {"steps": self.steps, "losses": losses, "clipped": list(self._clipped), "announced": not self._alarms}
        return own | {"detector": self.detector.state_dict(), "actor": self.actor.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.detector.load_state_dict(state["detector"])
        self.actor.load_state_dict(state["actor"])
        self.steps = state["steps"]
        self._losses = [None if loss is None else float(loss) for loss in state["losses"]]
        self._clipped, self._signals, self._deep = list(state["clipped"]), None, []
        if state.get("announced", True):  # what this optimizer does not measure is reported once per run
            self._alarms = []
        self._open_taps()

    def close(self) -> None:
        """Remove all hooks from the optimizer and the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._recorder is not None:
            self._recorder.close()

    # --- Around the optimizer's step

    def _before(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._is_due(self.steps + 1):
            return None
        given = [(place, x) for place, x in enumerate(args[1:], start=1) if callable(x)]
        closure = given[0][1] if given else kwargs.get("closure")
        if closure is None:
            with self._errors, torch.no_grad():
                self._measure()
            return None
        # Gradients are computed by the closure (Lightning, LBFGS): measure after its first call.
        measured = False

        def closure_then_measure() -> Any:
            nonlocal measured
            loss = closure()
            if not measured:
                measured = True
                with self._errors, torch.no_grad():
                    self._measure()
            return loss

        if given:
            place = given[0][0]
            return (*args[:place], closure_then_measure, *args[place + 1 :]), kwargs
        return args, kwargs | {"closure": closure_then_measure}

    def _measure(self) -> None:
        self._replan()
        signals = self._signals = Signals(self._plan)
        signals.measure_gradients()
        if self.actor.actions.before:
            self._act(signals)
            signals.forget()
        signals.measure_updates()
        if self._is_deep(self.steps + 1):
            self._deep = [totals_of.measure_state_error(self._plan, self.steps // self.deep_every)]

    def _after(self, *_: Any) -> None:
        self.actor.after_step()
        if self._signals is not None and self._is_due(self.steps + 1):
            with self._errors, torch.no_grad():
                self._signals.measure_samples()
            if self._deep:
                with self._errors:
                    self._deep.append(totals_of.measure_totals(self._plan))

    def _act(self, signals: Signals) -> None:
        """Decide on actions together: an alarm in one process makes all processes act."""
        step, names = self.steps + 1, self._plan.names
        rms = dict(zip(names, signals.rms().tolist(), strict=True))
        spiking = list(self.detector.spiking(step, rms))
        finite = signals.sums[:, GRAD].isfinite().tolist()
        broken = [name for name, ok in zip(names, finite, strict=True) if not ok]
        worst = []  # the largest RMS_t of each group
        for group in self.optimizer.param_groups:
            largest = max([1.0, *(rms[names[self._plan.places[p]]] for p in group["params"] if p in self._plan.places)])
            worst.append(largest if math.isfinite(largest) else 1.0)
        gathered = self._processes.gather(torch.tensor([len(spiking), len(broken), *worst], dtype=torch.float64))
        any_spiking, any_broken, *worst = gathered.amax(0).tolist()
        spiking = (spiking or ["another process"]) if any_spiking else []
        broken = (broken or ["another process"]) if any_broken else []
        self._alarms += self.actor.before_step(step, spiking, broken, worst)

    # --- In `watch.step`

    def _check_between(self) -> list[Alarm]:
        """Between two measurements: check the losses that are on the host. To read the others would wait for a device,
        and those of several processes are averaged first: they are checked at the next measurement."""
        if self._processes.groups or any(isinstance(x, Tensor) and x.device.type != "cpu" for x in self._losses):
            return []
        losses, self._losses = [None if x is None else float(x) for x in self._losses], []
        alarms = self._check_losses(losses)[0]
        return alarms + self.actor.after_alarms(self.steps, alarms) if alarms else []

    def _check_losses(self, losses: Sequence[float | None]) -> tuple[list[Alarm], dict[str, float]]:
        """Alarms of the losses up to this step, and the loss ratio of the last one."""
        alarms: list[Alarm] = []
        ratio: dict[str, float] = {}
        for number, loss in enumerate(losses, start=self.steps - len(losses) + 1):
            if loss is not None:
                ratio = {"loss_ratio": self.detector.loss_ratio(loss)}
                alarms += self.detector.check_loss(number, loss, self._options)
        return alarms, ratio

    def _finish_step(self, grad_norm: Loss) -> list[Alarm]:
        means: list[Key] = []
        maxima: list[Key] = []
        stats = torch.zeros(0, dtype=torch.float64)
        if self._recorder is not None and self._is_deep(self.steps):
            self._recorder.close()
            means, maxima, stats = self._recorder.read()
        failed, pending, self._losses = self._errors.first is not None, self._losses, []
        shared = share_losses(self._processes, pending, width=self.every, failed=failed, names=(means, maxima))
        self._error_shared = shared.failed
        if shared.failed:
            raise RuntimeError("an error in the watcher of another process")
        if self._processes.groups and shared.same_layers and len(stats):
            stats = combine(len(means), self._processes.gather(stats))
        signals, state = self._signals, self._deep
        self._signals, self._deep = None, []
        sums = signals.sums if signals is not None else torch.zeros(0, dtype=torch.float64)
        # One transfer for everything: the device is synchronised once per measurement.
        parts = [shared.losses, stats, sums.flatten(), *state]
        host = torch.cat([x.to(self._processes.device, torch.float64).flatten() for x in parts]).cpu()
        split: Any = torch.split(host, [x.numel() for x in parts])
        losses, stats, sums, *last = split
        tensors = to_record(self._plan, sums.view(-1, 6)) if signals is not None else {}
        layers = name_layers([*means, *maxima], stats.tolist())
        totals = totals_of.summarise(tensors, layers, self._plan, [x.tolist() for x in last])
        if grad_norm is not None and "grad_norm" in totals:
            clipped = float(grad_norm) > 1.001 * totals["grad_norm"]
            self._clipped = [*self._clipped, int(clipped)][-self.detector.rules.window :]
            totals["clip_fraction"] = sum(self._clipped) / len(self._clipped)
            self._remedies["clipped"] = any(self._clipped)
        given = [x if known else None for x, known in zip(losses.tolist(), shared.given, strict=True)]
        alarms, self._alarms = self._alarms + self._check(given, tensors, layers, totals), []
        loss = given[-1] if given else None
        self._record = {"step": self.steps, "loss": loss, "tensors": tensors, "layers": layers, "totals": totals}
        return alarms + self.actor.after_alarms(self.steps, alarms)

    def _check(
        self, losses: Sequence[float | None], tensors: Records, layers: Records, totals: dict[str, float]
    ) -> list[Alarm]:
        step, detector, options = self.steps, self.detector, self._options
        alarms, ratio = self._check_losses(losses)
        totals |= ratio
        alarms += detector.check_tensors(step, tensors, self._hints)
        alarms += detector.check_layers(step, layers, options)
        if self._is_deep(step):
            moving = {(name, "param_rms"): x["param_rms"] for name, x in tensors.items()}
            moving |= {(name, "logit_max"): x["logit_max"] for name, x in layers.items() if "logit_max" in x}
            moving |= {("output", signal): totals[signal] for signal in ("logz", "logit_max") if signal in totals}
            alarms += detector.check_drift(step, moving, options)
        return alarms

    @property
    def _options(self) -> dict[str, Any]:
        """For the advice of an alarm about no tensor: the options of the first group, and what the model has."""
        return self.optimizer.param_groups[0] | self._remedies

    def _is_due(self, step: int) -> bool:
        return bool(self._hooks) and step % self.every == 0

    def _is_deep(self, step: int) -> bool:
        return self._is_due(step) and step % self.deep_every < self.every

    def _open_taps(self) -> None:
        """Record the next step's forward pass, if it is due."""
        if self._recorder is not None and self._is_deep(self.steps + 1):
            self._recorder.open()

    def _replan(self) -> None:
        """Update the list of watched tensors if the optimizer's parameters have changed."""
        params = self._all_parameters()
        if len(params) == len(self._params) and all(a is b for a, b in zip(params, self._params, strict=True)):
            return
        before = set(self._plan.names)
        names = name_parameters(self.model, self.optimizer)
        watched = {p: name for p, name in names.items() if any(fnmatchcase(name, x) for x in self.patterns)}
        self._params, self._plan = params, self._make_plan(watched)
        self.detector.forget(before - set(self._plan.names))
        self._hints = {
            names[p]: ChainMap(self._remedies, group)
            for group in self.optimizer.param_groups
            for p in group["params"]
            if p in watched
        }

    def _all_parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _make_plan(self, watched: Mapping[Tensor, str]) -> Plan:
        return Plan(self.optimizer, list(watched.values()), list(watched), self._processes.device, self._errors)


def _remedies_of(model: nn.Module) -> dict[str, bool]:
    """Whether a model normalises queries and keys, and has a z-loss. Advice leaves out what it has."""
    norms = [module for name, module in model.named_modules() if name.rpartition(".")[2] in QUERY_NORMS]
    z_loss = getattr(getattr(model, "config", None), "z_loss", 0)
    return {"qk_norm": any(not isinstance(x, nn.Identity) for x in norms), "z_loss": bool(z_loss)}


def _reduced_alarm(optimizer: torch.optim.Optimizer) -> Alarm:
    text = (
        "This optimizer keeps no second moment: RMS_t and eps_share are not measured, and rms spikes are not detected"
    )
    return Alarm(0, "reduced", type(optimizer).__name__, "rms", math.nan, NO_RANGE, text)
