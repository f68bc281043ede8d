"""The training loop: schedules, batch, backward, optimizer step, log, evaluation, checkpoint.

There are four clocks: steps (for sequence length and warmup), samples (the position in the data), tokens (for the decay
and the end of the run) and seconds. Only tokens that were trained on count, not those that a warmup cut off.
"""

import functools
import math
import time
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
from rich.console import Console
from torch import Tensor, nn

from trimtab.data import Prefetcher
from trimtab.nn import ConfigError
from trimtab.optim import Release
from trimtab.runs import Clock, End, EventKind, Result, RunError, RunLog, StepRecord
from trimtab.train.boards import Boards
from trimtab.train.build import Task, build_optimizer, build_task, check_data, split
from trimtab.train.checkpoint import Checkpoints
from trimtab.train.compilations import batch_sizes, count_shapes, limit_compilations
from trimtab.train.config import FREE, RunConfig, differences, load_config, to_json
from trimtab.train.memory import check_memory
from trimtab.train.plan import simulate
from trimtab.train.processes import Processes, ProcessLost, processes
from trimtab.train.progress import ProgressLine
from trimtab.train.stopping import StopRequest, catch_signals
from trimtab.train.tensors import CheckpointError
from trimtab.train.watcher import Watcher
from trimtab.watch import Alarm

# A run has diverged after so many evaluations or steps in a row above `diverged_at` times the first validation loss.
DIVERGED_EVALUATIONS, DIVERGED_STEPS = 3, 100
MAX_ROLLBACKS = 3  # to one checkpoint
MOST = 2**53  # of any clock; floats are exact up to there
_Position = Annotated[int, msgspec.Meta(ge=0, le=MOST)]  # in the data


@dataclass(kw_only=True)
class Progress:
    """The state of a run besides weights, optimizer, data and generators."""

    clock: Clock = field(default_factory=Clock)
    best_loss: float | None = None  # on validation
    first_loss: float | None = None
    bad_evaluations: int = 0  # in a row, above `diverged_at`
    bad_steps: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    evaluated: tuple[int, float] = (-1, math.nan)  # step and validation loss of the last evaluation


def train(config: RunConfig, out: Path, *, numbered: bool = False, console: Console | None = None) -> dict[str, Any]:
    """Train from the start into an empty folder; returns the result as JSON, with the folder.

    With `numbered` the folder is the first of `out`, `out`-2, `out`-3, ... that does not exist.
    """
    with processes(config.parallel, config.threads) as group:
        log = RunLog(out, writes=group.rank == 0)
        if not numbered:
            log.check_free()
        # Everything is built before anything is written: bad input leaves no files.
        check_memory(config, group)
        task = build_task(config, group)
        run = _Run(config, task, log, group, console)
        group.barrier()  # all processes have checked the folder
        with closing(run.watcher), group.locked(out, numbered=numbered) as folder:
            log.move(folder)
            try:
                group.run_on_first(lambda: log.create(to_json(config), **_facts(task)))
            except OSError as error:
                raise RunError(f"cannot write to {folder}: {error.strerror}") from None
            return run.run()


def resume(
    out: Path,
    config: RunConfig | None = None,
    *,
    step: int | None = None,
    force: bool = False,
    trust: str | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Continue from the last checkpoint, or from that of `step`; 0 is the start. A run that is complete is left as it
    is unless `step` is given. A changed config is refused unless `force`."""
    named = getattr(config.model, "build", None) if config is not None else trust  # a config that is given is trusted
    saved, facts = load_config(out, trust=named)
    config = config or saved
    changed = [(name, old, new) for name, old, new in differences(saved, config) if name not in FREE]
    if changed and not force:
        name, old, new = changed[0]
        raise RunError(f"{name} was {old} and is now {new}, which changes the run; use --force to continue with it")
    with (
        processes(config.parallel, config.threads) as group,
        group.locked(out),
        closing(RunLog(out, writes=group.rank == 0)) as log,
    ):
        log.check_files()
        if log.paths.require_config() != facts:  # between reading and locking
            raise RunError(f"{out} was just changed by another process; try again")
        step = facts.continue_from if step is None else step
        ended = None if changed or step is not None else group.run_on_first(log.paths.read_result)
        if ended is not None:
            return _leave(log, ended)
        check_memory(config, group)
        task = build_task(config, group)
        if not force:
            check_data(task, facts)
        if task.sha256 != facts.sha256:
            changed.append(("sha256", facts.sha256, task.sha256))
        run = _Run(config, task, log, group, console)
        with closing(run.watcher):
            run.resume(step, changed, force=force, forced=facts.forced)
            return run.run()


def _leave(log: RunLog, ended: Result) -> dict[str, Any]:
    """The result of a complete run, which is not continued. Raises RunError if its files are damaged."""
    damage = log.paths.damage()
    if damage:
        raise RunError(
            f"{log.folder} holds a complete run, but {damage[0]}; `--step` with the step of a checkpoint trains it "
            "again from there"
        )
    return ended.to_json() | {"folder": str(log.folder)}


class _Run:
    def __init__(self, config: RunConfig, task: Task, log: RunLog, group: Processes, console: Console | None) -> None:
        self.config, self.task, self.log, self.group = config, task, log, group
        self.model = group.wrap(task.model)
        self.optimizer = build_optimizer(self.model, config.optim)
        self.options = [{k: x for k, x in g.items() if not k.startswith("param")} for g in self.optimizer.param_groups]
        self.watcher = Watcher(config, self.model, self.optimizer, log)
        self.release = _release(config, self.model, self.optimizer, group)
        self.rollbacks: dict[int, int] = {}  # by the step of the checkpoint
        self.compiled: Any = torch.compile(self.model, dynamic=False) if config.compile else self.model
        _check_sizes(config, group.world)
        self.source = task.batches("train", config.seed)
        task.batches("validation", 0)  # raises if there is too little data
        self.state = Progress()
        self.lengths, self.sizes = config.seqlen_warmup, config.batch_warmup
        self.lr = simulate(config).rate  # with the end of its decay filled in
        self.boards = Boards(config, writes=group.rank == 0)
        bfloat16 = config.autocast == "bfloat16"
        self.autocast = functools.partial(torch.autocast, group.device.type, torch.bfloat16, enabled=bfloat16)
        self.console, self.saved = console, 0  # the step of the last checkpoint, or of the last attempt
        # All processes start with the same weights; their random numbers differ from here on.
        if group.rank:
            group.seed_generators(config.seed, 0)

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.log.paths.checkpoints, self.config.keep, self.group)

    # --- The loop

    def run(self) -> dict[str, Any]:
        config, step = self.config, self.state.clock.step
        self.line = ProgressLine(config, shows=self.group.rank == 0, console=self.console)
        self.batches = Prefetcher(self.source, depth=config.data.prefetch)
        self.boards.open(self.log.paths, to_json(config), step)
        if step:
            self.line.print(f"resumed at step {step}")
        most = count_shapes(config) if config.compile else None
        if most is not None:
            self.line.print(f"torch.compile: at most {most} compilations, one per batch shape")
        try:
            with catch_signals() as stop, limit_compilations(most) as count:
                why = self._loop(stop)
        except RuntimeError as error:
            if not self.group.is_lost(error):
                raise
            self.log.event(EventKind.STOPPED, reason=f"another process has ended: {str(error).splitlines()[0]}")
            raise ProcessLost(
                f"another process has ended, so this one stops; continue with `trimtab resume {self.log.folder}`"
            ) from error
        finally:
            for output in (self.line, self.batches, self.log, self.boards):
                output.close()
        if why == End.DONE and self.group.any(self.log.pending_error is not None):
            why = End.NOT_SAVED
        result = Result(
            why=why,
            **vars(self.state.clock),
            validation_loss=self.state.best_loss,
            skipped=self.state.skipped,
            waited_s=round(self.batches.waited_s, 3),
            compilations=None if most is None else count(),
            most_compilations=most,
        )
        if not why.resumable:
            self.log.finish(result)
        return result.to_json() | {"folder": str(self.log.folder)}

    def _loop(self, stop: StopRequest) -> End:
        config = self.config
        if self.state.clock.step == 0:
            self._evaluate()
        while True:
            clock = self.state.clock  # a rollback replaces it
            if clock.step >= config.steps or (config.tokens is not None and clock.tokens >= config.tokens):
                return self._finish()
            record = self._step()
            self.line.show(record)
            self._record(record)
            if self.state.skipped_in_a_row >= config.stop_after_skips:
                reason = f"{config.stop_after_skips} steps in a row without a finite loss"
                self.log.event(EventKind.STOPPED, reason=reason)
                return End.NOT_FINITE
            if self._diverged("steps", record.loss):  # evaluations may be far apart
                return End.DIVERGED
            if self.watcher.rollback_alarm and self._roll_back(self.watcher.rollback_alarm):
                continue
            stopping = self.group.any(stop.name is not None)
            if clock.step % config.eval_every == 0 and self._evaluate():
                return End.DIVERGED
            if (stopping or clock.step % config.checkpoint_every == 0) and self.saved != clock.step:
                self._checkpoint()
            if stopping:
                self.log.event(EventKind.STOPPED, reason=str(stop.name or "another process received a signal"))
                return stop.name or End.TERMINATED

    def _finish(self) -> End:
        clock = self.state.clock
        if self.state.evaluated[0] != clock.step:
            self._evaluate()
        if self.saved == clock.step:
            self.group.run_on_first(lambda: self.checkpoints.set_loss(*self.state.evaluated))
        else:
            self._checkpoint()
        if clock.step not in self.group.run_on_first(self.checkpoints.list_steps):
            self.log.event(EventKind.STOPPED, reason="the last checkpoint could not be written")
            return End.NOT_SAVED
        finite = math.isfinite(self.state.evaluated[1])
        if not finite:
            self.log.event(EventKind.STOPPED, reason="the last validation loss is not finite")
        self.log.event(EventKind.DONE, step=clock.step, tokens=clock.tokens)
        return End.DONE if finite else End.NOT_FINITE

    def _step(self) -> StepRecord:
        clock, started = self.state.clock, time.perf_counter()
        step = clock.step + 1
        length, size = self.lengths.at(step), self.sizes.at(clock.samples)
        lr = self.lr.at(self.config.optim.lr, step, clock.tokens, clock.warmup_tokens, clock.warmup_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_ratio"]
        batch = self.batches.next(size)
        if length < self.lengths.end:
            batch = self.lengths.cut(batch, step)
        loss = self._backward(batch)
        norm = self._clip()
        # A finite loss can have gradients that are not finite, and one such step would destroy the weights.
        finite = bool(loss.isfinite()) and math.isfinite(norm)
        if finite or self.release is not None:  # with release, it only ends the iteration
            self.optimizer.step()
            self.task.after_step()
        else:
            self.watcher.skip()
        self.optimizer.zero_grad()
        self.watcher.step(loss, norm)
        self.state.skipped_in_a_row = 0 if finite else self.state.skipped_in_a_row + 1
        if not finite:
            self.state.skipped += 1
            what = "weights and optimizer state" if self.release is None else "the tensors where it is not"
            reason = f"the loss or its gradient is not finite; {what} are unchanged"
            self._report(EventKind.SKIPPED, f"skipped: {reason}", step=step, reason=reason)
        clock.step, clock.samples = step, clock.samples + size
        clock.tokens += size * self.lengths.tokens_at(step)
        if clock.warmup_steps is None and self.lr.warmed(step, clock.tokens):
            clock.warmup_steps, clock.warmup_tokens = step, clock.tokens
        seconds = time.perf_counter() - started
        clock.seconds += seconds
        rms = getattr(self.optimizer, "rms", torch.empty(0))
        rms = rms[rms.isfinite()]
        return StepRecord(
            **vars(clock),
            step_seconds=round(seconds, 6),
            loss=loss.item(),
            lr=lr,
            length=length,
            batch=size,
            grad_norm=norm,
            rms_max=float(rms.max()) if rms.numel() else None,
        )

    def _backward(self, batch: dict[str, Any]) -> Tensor:
        """Accumulate the gradients of the mean loss over the micro-batches; returns the mean over all processes."""
        parts = split(batch, self.config.micro_batch)
        total = torch.zeros((), device=self.group.device)
        for i, part in enumerate(parts):
            with self.group.accumulate(self.model, i == len(parts) - 1), self.autocast():
                loss = self.task.loss(self.compiled, part) / len(parts)
                if self.release is None or bool(loss.isfinite()):
                    loss.backward()
            total += loss.detach()
        return self.group.mean(total)

    def _clip(self) -> float:
        """Clip the gradients and return their norm before. A norm that is not finite leaves them as they are, so that
        the watcher can name the tensor."""
        if self.release is not None:
            return float(self.release.norm)
        params = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        found: Any = nn.utils.get_total_norm([p.grad for p in params])
        norm = float(found.full_tensor() if hasattr(found, "full_tensor") else found)
        if self.config.optim.clip_norm is not None and math.isfinite(norm):
            nn.utils.clip_grads_with_norm_(params, self.config.optim.clip_norm, found)
        return norm

    # --- Evaluation and log

    def _evaluate(self) -> bool:
        """Validate at full length; True if the run has diverged."""
        state, clock = self.state, self.state.clock
        with self.autocast():
            found = self.task.validate(self.model, self.config.eval_batches)
        means: dict[str, Any] = {name: self.group.mean(x).item() for name, x in found.items()}
        text, loss = "  ".join(f"{k} {v:.4f}" for k, v in means.items()), means["loss"]
        clocks: dict[str, Any] = {"step": clock.step, "tokens": clock.tokens, "seconds": clock.seconds}
        self._report(EventKind.EVALUATED, f"validation {text}", **clocks, **means)
        self.boards.add("validation", means, clock.step)
        state.evaluated = (clock.step, loss)
        if state.first_loss is None and math.isfinite(loss):
            state.first_loss = loss
        if math.isfinite(loss) and (state.best_loss is None or loss < state.best_loss):
            state.best_loss = loss
        return self._diverged("evaluations", loss)

    def _diverged(self, what: Literal["evaluations", "steps"], loss: float) -> bool:
        """Count the losses in a row that are too high; True if there are too many."""
        limit, first = self.config.diverged_at, self.state.first_loss
        high = limit is not None and first is not None and not loss <= limit * first
        count = getattr(self.state, f"bad_{what}") + 1 if high else 0
        setattr(self.state, f"bad_{what}", count)
        most = DIVERGED_STEPS if what == "steps" else DIVERGED_EVALUATIONS
        if count >= most:
            reason = f"{most} {what} in a row above {limit} times the first validation loss"
            self.log.event(EventKind.STOPPED, reason=reason)
        return count >= most

    def _report(self, kind: EventKind, text: str, *, step: int, **values: Any) -> None:
        self.log.event(kind, step=step, **values)
        self.line.print(f"step {step}  {text}")

    def _record(self, record: StepRecord) -> None:
        before = self.log.pending_error
        self.log.step(record)
        if self.log.pending_error and not before:
            self.line.print(f"step {record.step}  cannot write the log: {self.log.pending_error}; its lines are kept")
        totals = self.watcher.write(record.step, totals=bool(self.boards))
        for alarm in self.watcher.alarms:
            self.line.print(str(alarm))
        self.boards.add("train", record.to_json(), record.step)
        self.boards.add("watch", totals, record.step)

    # --- Checkpoints

    def _checkpoint(self) -> None:
        step, started = self.state.clock.step, time.perf_counter()
        self.saved = step
        state: dict[str, Any] = {"progress": asdict(self.state), "data": self.batches.state()}
        state |= {"generators": self.group.read_generators(), "watch": self.watcher.state()}
        loss = self.state.evaluated[1] if self.state.evaluated[0] == step else math.nan
        facts: dict[str, Any] = {"validation_loss": loss, "log": self.log.records()}
        try:
            path = self.checkpoints.save(step, self.model, self.optimizer, state, **facts)
        except OSError as error:  # a full disk does not end the run: earlier checkpoints are still there
            reason = str(error.strerror or error)
            text = f"no checkpoint: {reason}; earlier ones are intact, training continues"
            self._report(EventKind.CHECKPOINT_FAILED, text, step=step, reason=reason)
            return
        seconds = round(time.perf_counter() - started, 3)
        self.log.event(EventKind.CHECKPOINT, step=step, path=path.name, seconds=seconds)

    def resume(self, step: int | None, changed: list[tuple[str, Any, Any]], *, force: bool, forced: int | None) -> None:
        """Load a checkpoint, and remove what follows it. Nothing is removed before everything has been loaded.

        What `force` allows stays allowed for the checkpoints up to `forced`, the step of an earlier resume with it.
        """
        checkpoints, log = self.checkpoints, self.log
        # A run that was killed before its first checkpoint starts again.
        chosen = 0 if step == 0 or (step is None and checkpoints.empty) else checkpoints.choose(step)
        force = force or (forced is not None and chosen <= forced)
        if chosen:
            self._load(chosen, force=force)
            damage = log.paths.compare(checkpoints.log_records(chosen), prefix=True)
            if damage and not force:
                raise RunError(f"{log.folder}: {damage[0]}; use --force to continue without the lost lines")
            changed = [*changed, *(("log", "intact", text) for text in damage)]
        self.saved = chosen
        if changed:
            log.event(EventKind.FORCED, changed={name: [old, new] for name, old, new in changed})
        facts = _facts(self.task) | {"forced": chosen if changed else forced}
        config = to_json(self.config)
        if changed or step is not None:  # a process that is killed from here on is continued by the next resume
            self.group.run_on_first(lambda: log.write_config(config, **facts, continue_from=chosen))
        checkpoints.remove_after(chosen)
        log.truncate(chosen)
        log.event(EventKind.RESUMED, step=chosen, processes=self.group.world)
        if changed or step is not None:
            self.group.run_on_first(lambda: log.write_config(config, **facts))

    def _load(self, step: int, *, force: bool) -> None:
        """Restore everything that a checkpoint has."""
        try:
            saved = self._load_weights(step)
            # With --force the data may differ; only the number of rows read is kept.
            position = {"position": msgspec.convert(saved["data"]["position"], _Position)}
            self.source.load(self.source.state() | position if force else saved["data"])
            if len(saved["generators"]) == self.group.world:
                self.group.restore_generators(saved["generators"])
            else:
                self.group.seed_generators(self.config.seed, step)
        except (RunError, CheckpointError, ConfigError):
            raise
        except (KeyError, TypeError, AttributeError, IndexError, ValueError, RuntimeError, OverflowError) as error:
            if isinstance(error, RuntimeError) and self.group.is_lost(error):
                raise
            path = self.checkpoints.path(step)
            raise CheckpointError(f"{path} is intact, but its state is not that of a run: {error!r}") from None

    def _roll_back(self, alarm: Alarm) -> bool:
        """Load the last checkpoint and continue with the next batches: those since the checkpoint are left out."""
        self.watcher.rollback_alarm = None
        steps, now = self.checkpoints.list_steps(), self.state.clock.step
        count = self.rollbacks.get(steps[-1], 0) if steps else MAX_ROLLBACKS
        cause = f"{alarm.kind} in {alarm.where}"
        if count >= MAX_ROLLBACKS:
            why = f"{count} times already" if steps else "there is no checkpoint yet"
            self._report(EventKind.NOT_ROLLED_BACK, f"not rolled back: {why}", step=now, reason=f"{cause}; {why}")
            return False
        self.rollbacks[steps[-1]] = count + 1
        self._load_weights(steps[-1])
        self.group.barrier()  # no process writes to the log while it is truncated
        self.log.truncate(steps[-1])
        text = f"back to step {steps[-1]}: {cause}"
        self._report(EventKind.ROLLED_BACK, text, step=now, to=steps[-1], reason=cause)
        return True

    def _load_weights(self, step: int) -> dict[str, Any]:
        """Restore model, optimizer, clocks and watcher; returns everything that was saved."""
        saved = self.checkpoints.load(step, self.model, self.optimizer)
        self.state = msgspec.convert(saved["progress"], Progress)
        clock = self.state.clock
        if clock.step != step or not all(x is None or 0 <= x <= MOST for x in vars(clock).values()):
            raise ValueError(f"its clock is {clock}")
        self.watcher.load(saved.get("watch"), step)
        # The options of the optimizer follow from the config, which --force may have changed, except for a β₂ that the
        # watcher has lowered for some steps.
        for group, options in zip(self.optimizer.param_groups, self.options, strict=True):
            group.update({k: x for k, x in options.items() if k != "betas" or not self.watcher.lowers_beta2})
        return saved


def _release(config: RunConfig, model: nn.Module, optimizer: Any, group: Processes) -> Release | None:
    if not config.optim.release:
        return None
    if group.world > 1:
        raise ConfigError(
            f"optim.release updates before gradients are averaged over the {group.world} processes; start one, or try "
            "optim.release=False"
        )
    released: Release = optimizer.step_in_backward(model, max_norm=math.inf, norm="previous")
    return released


def _facts(task: Task) -> dict[str, Any]:
    """What is saved with the config. A model's own count of parameters is used if it has one, as a GPT."""
    model: Any = task.model
    own = hasattr(model, "count_params")
    params = model.count_params() if own else sum(p.numel() for p in model.parameters())
    return {"sha256": task.sha256, "params": int(params), "torch": torch.__version__}


def _check_sizes(config: RunConfig, world: int) -> None:
    """Every batch of the run must split over processes and micro-batches."""
    parts = world * (config.micro_batch or 1)
    for size in batch_sizes(config):
        if size % parts:
            micro = f" and micro_batch={config.micro_batch}" if config.micro_batch else ""
            raise ConfigError(
                f"a batch of {size} does not split over {world} processes{micro}; try a multiple of {parts}"
            )
