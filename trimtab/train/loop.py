"""One run, top to bottom: lengths and rates from the schedules, batches, backward, step, log, evaluation, checkpoint.

Four clocks, kept apart: steps (sequence length and warm-up run on them), samples (the position in the data), tokens
(decay and the end of the run), seconds. Only tokens that were really trained on count, not those that were cut off.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from trimtab.data import Prefetcher
from trimtab.nn import ConfigError
from trimtab.runs import End, EventKind, Result, RunError, RunLog, StepRecord
from trimtab.train.build import Task, build_optimizer, build_task
from trimtab.train.checkpoint import Checkpoints
from trimtab.train.compilations import Compilations, batch_sizes
from trimtab.train.config import FREE, RunConfig, differences, load_config, to_json
from trimtab.train.plan import foretell
from trimtab.train.processes import Processes, ProcessLost, processes
from trimtab.train.progress import Line
from trimtab.train.randomness import mix_seed, read_generators, restore_generators
from trimtab.train.stopping import Asked, catch_signals
from trimtab.train.tensorboard import Board
from trimtab.train.watcher import Watcher
from trimtab.watch import Alarm

# In a row, above `diverged_at` times the first validation loss: such a run is over.
HOPELESS_EVALUATIONS, HOPELESS_STEPS = 3, 100
MOST_RETURNS = 3  # to one checkpoint; what still goes wrong then, goes wrong without this batch too


@dataclass
class Clock:
    step: int = 0
    samples: int = 0
    tokens: int = 0
    seconds: float = 0.0
    # When the learning rate had reached its peak; its fall counts from there.
    warmup_steps: int | None = None
    warmup_tokens: int | None = None


@dataclass
class Progress:
    """What a run remembers besides its weights."""

    clock: Clock = field(default_factory=Clock)
    best_loss: float | None = None  # on validation
    first_loss: float | None = None
    bad_evaluations: int = 0  # in a row, above `diverged_at`
    bad_steps: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0


def train(config: RunConfig, out: Path, *, console: Console | None = None) -> dict[str, Any]:
    """Train from the start; returns what result.json holds."""
    with processes(config.parallel) as here, _threads(config.threads):
        log = RunLog(out, writes=here.rank == 0)
        log.check_free()
        # Everything is built before anything is written: bad input leaves nothing behind.
        task = build_task(config, here)
        run = _Run(config, task, log, here, console)
        here.barrier()  # all have seen that the folder is free
        with here.locked(out):
            try:
                here.together(lambda: log.create(to_json(config), **_facts(task)))
            except OSError as error:
                raise RunError(f"cannot write to {out}: {error.strerror}") from None
            return run.go()


def resume(
    out: Path,
    config: RunConfig | None = None,
    *,
    step: int | None = None,
    force: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Go on from the last checkpoint, or from that of `step`. A changed config is refused unless `force`."""
    saved, facts = load_config(out)
    config = config or saved
    changed = [(name, old, new) for name, old, new in differences(saved, config) if name not in FREE]
    if changed and not force:
        name, old, new = changed[0]
        raise RunError(
            f"{name} was {old} and is now {new}: the run would not be the one that was started. Use --force if that is "
            "what you want"
        )
    with processes(config.parallel) as here, _threads(config.threads), here.locked(out):
        task = build_task(config, here)
        if task.sha256 != facts.sha256 and not force:
            raise RunError(
                f"the data has changed: sha256 {task.sha256[:12]} now, {facts.sha256[:12]} when the run was "
                "started; use --force to go on all the same"
            )
        log = RunLog(out, writes=here.rank == 0)
        run = _Run(config, task, log, here, console)
        run.load(step, force=force)
        if task.sha256 != facts.sha256:
            changed.append(("sha256", facts.sha256, task.sha256))
        if changed:
            # What a run is, is what its config says: the next resume goes on from there.
            here.together(lambda: log.write_config(to_json(config), **_facts(task)))
            log.event(EventKind.FORCED, changed={name: [old, new] for name, old, new in changed})
        return run.go()


class _Run:
    def __init__(self, config: RunConfig, task: Task, log: RunLog, here: Processes, console: Console | None) -> None:
        self.config, self.task, self.log, self.here = config, task, log, here
        self.model = here.spread(task.model)
        self.optimizer = build_optimizer(self.model, config.optim)
        self.watcher = Watcher(config, self.model, self.optimizer, log)
        self.returns: dict[int, int] = {}  # by the step of the checkpoint
        self.called: Any = torch.compile(self.model, dynamic=False) if config.compile else self.model
        _check_sizes(config, here.world)
        self.source = task.batches("train", config.seed)
        task.batches("validation", 0)  # is there enough of it?
        self.checkpoints = Checkpoints(log.folder / "checkpoints", config.keep, here)
        self.state = Progress()
        self.lengths, self.sizes = config.seqlen_warmup, config.batch_warmup
        self.lr = foretell(config).rate  # a fall that was left open ends with the run
        self.board = Board() if config.tensorboard and here.rank == 0 else None
        self.console, self.saved = console, 0  # the step that was saved last, or tried to be
        self.evaluated = (0, math.nan)  # step and validation loss
        # All processes start with the same weights; what they draw from now on differs.
        if here.rank:
            torch.manual_seed(mix_seed(config.seed, 0, here.rank))

    # --- The loop

    def go(self) -> dict[str, Any]:
        config = self.config
        self.line = Line(
            steps=config.steps,
            tokens=config.tokens,
            every=config.log_every,
            shows=self.here.rank == 0,
            console=self.console,
        )
        self.batches = Prefetcher(self.source, depth=config.data.prefetch)
        if self.board is not None:
            self.board.open(self.log.folder, self.state.clock.step)
        if self.state.clock.step:
            self.line.say(f"resumed at step {self.state.clock.step}")
        try:
            with catch_signals() as asked, Compilations(config) as compilations:
                if config.compile:
                    self.line.say(f"torch.compile: at most {compilations.most} compilations, one per shape of a batch")
                why = self._loop(asked)
        except RuntimeError as error:
            if not self.here.lost(error):
                raise
            text = f"another process is gone, so this one stops; go on with `trimtab resume {self.log.folder}`"
            self._event(EventKind.STOPPED, reason=f"another process is gone: {str(error).splitlines()[0]}")
            raise ProcessLost(text) from error
        finally:
            self.line.close()
            self.batches.close()
            self.log.close()
            if self.board is not None:
                self.board.close()
        result = Result(
            why=why,
            **asdict(self.state.clock),
            validation_loss=self.state.best_loss,
            skipped=self.state.skipped,
            waited_s=round(self.batches.waited_s, 3),
            compilations=compilations.count if config.compile else None,
            most_compilations=compilations.most if config.compile else None,
        )
        if not why.resumable:
            self.log.finish(result)
        return result.to_json()

    def _loop(self, asked: Asked) -> End:
        config = self.config
        if self.state.clock.step == 0:
            self._evaluate()
        while True:
            clock = self.state.clock
            if clock.step >= config.steps or (config.tokens is not None and clock.tokens >= config.tokens):
                why = End.DONE
                break
            record = self._step()
            self.line.show(record)
            self._record(record)
            if self.state.skipped_in_a_row >= config.stop_after_skips:
                self._event(EventKind.STOPPED, reason=f"{config.stop_after_skips} steps in a row without a finite loss")
                return End.NOT_FINITE
            if self._hopeless(record.loss):
                return End.DIVERGED
            if self.watcher.wants_back and self._roll_back(self.watcher.wants_back):
                continue
            signalled = self.here.any(asked.name is not None)
            due = clock.step % config.eval_every == 0
            if due and self._evaluate():
                return End.DIVERGED
            if signalled or clock.step % config.checkpoint_every == 0:
                self._checkpoint()
            if signalled:
                self._event(EventKind.STOPPED, reason=asked.name or "another process was asked to stop")
                return End(asked.name or End.TERMINATED)
        if clock.step % config.eval_every:
            self._evaluate()
        if self.saved == clock.step:
            self.checkpoints.mark_best(*self.evaluated)
        else:
            self._checkpoint()
        if self.evaluated[0] == clock.step and not math.isfinite(self.evaluated[1]):
            why = End.NOT_FINITE
            self._event(EventKind.STOPPED, reason="the last validation loss is not finite")
        self._event(EventKind.DONE, step=clock.step, tokens=clock.tokens)
        return why

    def _step(self) -> StepRecord:
        config, clock, started = self.config, self.state.clock, time.perf_counter()
        number = clock.step + 1
        length, size = self.lengths.at(number), self.sizes.at(clock.samples)
        used = self.lengths.tokens_at(number)
        lr = self.lr.at(config.optim.lr, number, clock.tokens, clock.warmup_tokens, clock.warmup_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_ratio"]
        batch = self.batches.next(size)
        if length < self.lengths.end:
            batch = self.lengths.cut(batch, number)
        loss = self._backward(batch)
        norm = self._clip()
        # Finite losses can have gradients that are not, and one of those in the weights is there for good.
        finite = bool(loss.isfinite()) and math.isfinite(norm)
        if finite:
            self.optimizer.step()
            self.task.after_step()
        else:
            self.watcher.skip()
        self.optimizer.zero_grad()
        self.watcher.step(loss, norm)
        self._count(finite, number)
        clock.step, clock.samples, clock.tokens = number, clock.samples + size, clock.tokens + size * used
        if clock.warmup_steps is None and self.lr.warmed(number, clock.tokens):
            clock.warmup_steps, clock.warmup_tokens = number, clock.tokens
        seconds = time.perf_counter() - started
        clock.seconds += seconds
        return StepRecord(
            **asdict(clock),
            step_seconds=round(seconds, 6),
            loss=loss.item(),
            lr=lr,
            length=length,
            batch=size,
            grad_norm=norm,
            rms_max=self._rms(),
        )

    def _backward(self, batch: dict[str, Any]) -> Tensor:
        """Gradients of the mean over the batch, micro-batch by micro-batch; returns that mean over all processes."""
        parts = split(batch, self.config.micro_batch)
        total = torch.zeros((), device=self.here.device)
        for i, part in enumerate(parts):
            with self.here.accumulate(self.model, i == len(parts) - 1), self._autocast():
                loss = self.task.loss(self.called, part) / len(parts)
                loss.backward()
            total += loss.detach()
        return self.here.mean(total)

    def _clip(self) -> float:
        """The norm of all gradients, before they are shortened. Where it is not finite they stay as they are, so that
        the watcher can say whose gradient it was."""
        params = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        found: Any = nn.utils.get_total_norm([p.grad for p in params])
        norm, limit = (
            float(found.full_tensor() if hasattr(found, "full_tensor") else found),
            self.config.optim.clip_norm,
        )
        if limit is not None and math.isfinite(norm):
            nn.utils.clip_grads_with_norm_(params, limit, found)
        return norm

    def _count(self, finite: bool, number: int) -> None:
        state = self.state
        state.skipped_in_a_row = 0 if finite else state.skipped_in_a_row + 1
        if not finite:
            state.skipped += 1
            reason = "the loss or its gradient is not finite; weights and state stay as they were"
            self._event(EventKind.SKIPPED, step=number, reason=reason)
            self.line.say(f"step {number}  skipped: {reason}")

    def _rms(self) -> float | None:
        """The largest RMS_t of the step, if the optimizer measures it; 2.3 is the paper's alarm."""
        rms = getattr(self.optimizer, "rms", torch.empty(0))
        finite = rms[rms.isfinite()]
        return float(finite.max()) if finite.numel() else None

    def _autocast(self) -> Any:
        if self.config.autocast == "off":
            return nullcontext()
        return torch.autocast(self.here.device.type, getattr(torch, self.config.autocast))

    # --- Beside the steps

    @torch.no_grad()
    def _evaluate(self) -> bool:
        """At full length; True if the run has diverged."""
        config, state = self.config, self.state
        self.model.eval()
        batches = self.task.batches("validation", 0)
        sums: dict[str, Tensor] = {}
        for _ in range(config.eval_batches):
            with self._autocast():
                found = self.task.evaluate(self.model, batches.next(self.task.eval_batch))
            for name, x in found.items():
                sums[name] = sums.get(name, torch.zeros((), device=self.here.device)) + x.detach().float()
        self.model.train()
        means = {name: self.here.mean(x / config.eval_batches).item() for name, x in sums.items()}
        loss = means["loss"]
        self._event(
            EventKind.EVALUATED, step=state.clock.step, tokens=state.clock.tokens, seconds=state.clock.seconds, **means
        )
        self.line.say(f"step {state.clock.step}  validation " + "  ".join(f"{k} {v:.4f}" for k, v in means.items()))
        if state.first_loss is None:
            state.first_loss = loss
        if self.board is not None:
            self.board.add("validation", means, state.clock.step)
        self.evaluated = (state.clock.step, loss)
        if math.isfinite(loss) and (state.best_loss is None or loss < state.best_loss):
            state.best_loss = loss
        bad = config.diverged_at is not None and not loss <= config.diverged_at * state.first_loss
        state.bad_evaluations = state.bad_evaluations + 1 if bad else 0
        return self._gives_up(state.bad_evaluations, HOPELESS_EVALUATIONS, "evaluations")

    def _hopeless(self, loss: float) -> bool:
        """Between evaluations, which may be far apart, the training loss tells."""
        state, limit = self.state, self.config.diverged_at
        bad = limit is not None and state.first_loss is not None and not loss <= limit * state.first_loss
        state.bad_steps = state.bad_steps + 1 if bad else 0
        return self._gives_up(state.bad_steps, HOPELESS_STEPS, "steps")

    def _gives_up(self, count: int, most: int, what: str) -> bool:
        if count >= most:
            reason = f"{most} {what} in a row above {self.config.diverged_at} times the first validation loss"
            self._event(EventKind.STOPPED, reason=reason)
        return count >= most

    def _record(self, record: StepRecord) -> None:
        before = self.log.pending_error
        self.log.step(record)
        if self.log.pending_error and not before:
            self.line.say(f"step {record.step}  the log cannot be written: {self.log.pending_error}; its lines wait")
        totals = self.watcher.write(record.step, totals=self.board is not None)
        for alarm in self.watcher.alarms:
            self.line.say(str(alarm))
        if self.board is not None:
            self.board.add("train", record.to_json(), record.step)
            self.board.add("watch", totals, record.step)

    def _checkpoint(self) -> None:
        step, started = self.state.clock.step, time.perf_counter()
        self.saved = step
        generators = self.here.gather(read_generators(self.here.device))
        state: dict[str, Any] = {"progress": asdict(self.state), "data": self.batches.state()}
        state |= {"generators": generators, "watch": self.watcher.state()}
        loss = self.evaluated[1] if self.evaluated[0] == step else math.nan
        try:
            path = self.checkpoints.save(step, self.model, self.optimizer, state, validation_loss=loss)
        except OSError as error:
            # A full disk must not cost the run: what was saved before is still there.
            self._event(EventKind.CHECKPOINT_FAILED, step=step, reason=f"{error.strerror or error}")
            self.line.say(f"step {step}  no checkpoint: {error.strerror or error}; earlier ones are intact, going on")
            return
        self._event(EventKind.CHECKPOINT, step=step, path=path.name, seconds=round(time.perf_counter() - started, 3))

    def load(self, step: int | None, *, force: bool = False) -> None:
        steps = self.checkpoints.list_steps()
        if not steps:
            raise RunError(f"{self.checkpoints.folder} has no complete checkpoint; start the run anew")
        chosen = steps[-1] if step is None else step
        if chosen not in steps:
            raise RunError(f"there is no checkpoint of step {chosen}; there are {', '.join(map(str, steps))}")
        saved = self._load_weights(chosen)
        # Forced on to other data or another order, a run goes on at the same number of rows.
        position = {"position": saved["data"]["position"]}
        self.source.load(self.source.state() | position if force else saved["data"])
        if len(saved["generators"]) == self.here.world:
            restore_generators(saved["generators"][self.here.rank], self.here.device)
        else:
            torch.manual_seed(mix_seed(self.config.seed, chosen, self.here.rank))
        self.saved = chosen
        self.checkpoints.forget_after(chosen)
        self.log.truncate(chosen)
        self._event(EventKind.RESUMED, step=chosen, processes=self.here.world)

    def _roll_back(self, alarm: Alarm) -> bool:
        """To the last checkpoint, and on with the batches that come next: those since then are left out."""
        self.watcher.wants_back = None
        steps, at = self.checkpoints.list_steps(), self.state.clock.step
        returns = self.returns.get(steps[-1], 0) if steps else MOST_RETURNS
        if returns >= MOST_RETURNS:
            why = f"{returns} times already" if steps else "there is no checkpoint yet"
            self._event(EventKind.NOT_ROLLED_BACK, step=at, reason=f"{alarm.kind} in {alarm.where}; {why}")
            self.line.say(f"step {at}  not rolled back: {why}")
            return False
        self.returns[steps[-1]] = returns + 1
        self._load_weights(steps[-1])
        self.here.barrier()  # nobody writes to a log that is being cut
        self.log.truncate(steps[-1])
        self._event(EventKind.ROLLED_BACK, step=at, to=steps[-1], reason=f"{alarm.kind} in {alarm.where}")
        self.line.say(f"step {at}  back to step {steps[-1]}: {alarm.kind} in {alarm.where}")
        return True

    def _load_weights(self, step: int) -> dict[str, Any]:
        """Model, optimizer, clocks and windows as they were; returns what else was saved."""
        saved = self.checkpoints.load(step, self.model, self.optimizer)
        progress = saved["progress"]
        self.state = Progress(**(progress | {"clock": Clock(**progress["clock"])}))
        self.watcher.load(saved.get("watch"), step)
        return saved

    def _event(self, kind: EventKind, **values: Any) -> None:
        self.log.event(kind, **values)


def _facts(task: Task) -> dict[str, Any]:
    """What is saved with the config."""
    return {"sha256": task.sha256, "params": count_params(task.model), "torch": torch.__version__}


def count_params(model: nn.Module) -> int:
    """How large a model is called: as it counts itself (a GPT counts its blocks' matrices), or all it has."""
    counted = getattr(model, "count_params", lambda: sum(p.numel() for p in model.parameters()))
    return int(counted())


def split(batch: dict[str, Any], rows: int | None) -> list[dict[str, Any]]:
    """Micro-batches of equal size."""
    count = len(next(iter(batch.values())))
    if rows is None or rows >= count:
        return [batch]
    if count % rows:
        raise ValueError(f"a batch of {count} rows does not split into micro-batches of {rows}")
    return [{key: value[i : i + rows] for key, value in batch.items()} for i in range(0, count, rows)]


def _check_sizes(config: RunConfig, world: int) -> None:
    """Every batch of the run splits over processes and micro-batches."""
    parts = world * (config.micro_batch or 1)
    for size in batch_sizes(config):
        if size % parts:
            micro = f" and micro_batch={config.micro_batch}" if config.micro_batch else ""
            raise ConfigError(
                f"a batch of {size} does not split over {world} processes{micro}; try a multiple of {parts}"
            )


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
