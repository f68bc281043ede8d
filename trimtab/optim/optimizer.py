"""The base class of all optimizers: options, state, and one step over all parameters in a few calls.

    gather      parameters with a gradient, by group and by how their state is stored         -> batches
    inspect     gradient norms, if an option needs them: skip non-finite, clip by percentile  -> grad_scale
    measure     the first pass of StableAdamW, LAMB and LARS, added up over shards            -> sums
    rows        hyper-parameters and step numbers to one row of coefficients per tensor
    apply       the fused kernel, once per batch

An optimizer is a subclass with a `rule`, the names of its `moments`, and `rows`; two-pass ones also have `measure`.
A step never waits for the device, except for the copies of offloaded state.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar, Self, overload

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from trimtab.ops.blockwise import count_blocks
from trimtab.ops.checks import FLOATS
from trimtab.ops.sharding import (
    add_up_shards,
    flat,
    home_of_numbers,
    is_dense,
    is_sharded,
    local,
    shard_like,
    wrap_like,
)
from trimtab.ops.step import RULES, gradient_norms_unchecked, step_unchecked
from trimtab.ops.step.rules import DECAY, independent_decay
from trimtab.ops.step.split import KEPT, join
from trimtab.ops.step.storage import Batch, Storage, new_moment
from trimtab.ops.step.windows import check_not_captured, cut, is_away, wait_for_copies
from trimtab.optim import checkpoint
from trimtab.optim.chunks import step_in_chunks
from trimtab.optim.describe import Description, describe
from trimtab.optim.groups import EMBEDDINGS, Keep, as_rules, groups, matches, reason
from trimtab.optim.memory.offload import Offloaded, Piece, check_offload
from trimtab.optim.memory.release import NO_HOOKS, Norm, Release, check_release
from trimtab.optim.options import DEFAULTS, Options, check_group, check_options, check_param, choose_storage
from trimtab.optim.places import Place, Places

__all__ = ["Batch", "Optimizer", "Options"]

Key = tuple[
    int, int, int, torch.device
]  # of a batch: the part of the step, the group, the bits of its state, the device
Listed = Iterable[tuple[int, int, dict[str, Any], Tensor]]  # indices of parameter and group, the group, the parameter
HOST = torch.device("cpu")
RING = 100  # gradient norms that percentile clipping keeps


class Optimizer(torch.optim.Optimizer):
    rule: ClassVar[str]  # in trimtab.ops.step.RULES
    default_format: checkpoint.Format | None = None  # of `state_dict()`, where a host calls it without arguments
    moments: ClassVar[tuple[str, ...]]  # their names in a state dict: PyTorch's own where it has the optimizer

    def __init__(self, params: Any, defaults: dict[str, Any], options: Options) -> None:
        given = dict(options)
        keep, offload = given.pop("keep32", None), given.pop("offload", None)
        self._rules: tuple[Keep, ...] = EMBEDDINGS if keep is None else as_rules(keep)  # type: ignore[arg-type]
        self._places = Places()
        self._storage: dict[Tensor, Storage] = {}
        self._measured: list[tuple[list[int], Tensor]] = []
        self._counts: dict[Key, tuple[list[Tensor], Tensor]] = {}
        self._release: Release | None = None
        self._offloaded: Offloaded | None = None
        self._on_host = False  # state is in host memory, whatever the device of its parameter
        self._nameless = False  # a matrix has 8-bit state because its name is not known
        used: set[int] = set()
        self._used_rules: set[int] | None = used
        super().__init__(params, DEFAULTS | check_options(type(self).__name__, given) | defaults)
        self._used_rules = None
        idle = [reason(rule) for i, rule in enumerate(self._rules) if keep is not None and i not in used]
        if idle:
            warnings.warn(f"keep32 exempts nothing: no parameter where {' or '.join(idle)}", stacklevel=3)
        if self._nameless:
            warnings.warn(
                "the parameters have no names, so embeddings cannot be recognised and get 8-bit state, which can make "
                f"training unstable. Pass model.named_parameters(), or call {type(self).__name__}.for_model(model, "
                "...); if there are no embeddings, or 8 bits are meant for them too, pass keep32=()",
                stacklevel=3,
            )
        if offload is not None:
            self._offload(check_offload(offload, [p for group in self.param_groups for p in group["params"]]))

    @overload
    @classmethod
    def for_model(cls, model: nn.Module, **options: Any) -> Self: ...
    @overload
    @classmethod
    def for_model(cls) -> Callable[..., Self]: ...
    @classmethod
    def for_model(cls, model: nn.Module | None = None, **options: Any) -> Self | Callable[..., Self]:
        """An optimizer of the trainable parameters of a model, with their names: embeddings keep 32-bit state.

        >>> optimizer = AdamW.for_model(model, lr=3e-4, weight_decay=0.1, bits=8)
        >>> trainer = Trainer(model, ..., optimizer_cls_and_kwargs=(AdamW.for_model, {"lr": 3e-4, "bits": 8}))

        `options` are those of the class and of `trimtab.optim.groups`: matrices decay and vectors do not, and muParam
        scales learning rates if `mup_ratio` is given. Frozen parameters are left out. Without a model the result is
        this function: the Trainer calls it as `for_model()(model, **options)`.
        """
        if model is None:
            if options:
                raise TypeError(f"{cls.__name__}.for_model needs a model besides {', '.join(options)}")
            return cls.for_model
        own = signature(cls).parameters
        given = {name: own[name].default for name in ("lr", "weight_decay")} | options
        grouped = {name: given.pop(name) for name in signature(groups).parameters if name in given and name != "lr"}
        made = groups(model, lr=given["lr"], **grouped)
        for group in made:
            group["params"] = [(name, p) for name, p in group["params"] if p.requires_grad]
        return cls([group for group in made if group["params"]], **given)

    # --- Defined by subclasses

    def rows(self, batch: Batch, sums: Tensor | None) -> Tensor:
        """One row of `trimtab.ops.step.SCALARS` per tensor. `sums` are those of `measure`, None before it."""
        raise NotImplementedError

    def measure(self, batch: Batch) -> Tensor | None:
        """The first pass, if there is one: sums [tensors, k] over this process's shards."""
        return None

    def initial(self, group: dict[str, Any]) -> float:
        """The initial value of the moments."""
        return 0.0

    def extras_of(self, p: Tensor) -> dict[str, torch.Size]:
        """Names and shapes of further float32 state of a parameter."""
        return {}

    def extra_bytes(self, p: Tensor, group: dict[str, Any]) -> int:
        """Bytes of a parameter's state besides its moments."""
        if p.dtype == torch.float32:
            return 0
        return p.numel() * {"kahan": p.element_size(), "split": 1}.get(group["rounding"], 0)

    def check_group(self, group: dict[str, Any]) -> None:
        """Refuse invalid hyper-parameters."""
        check_group(group)
        wanted = 3 if self.rule == "ademamix" else 2
        if "betas" in group and len(group["betas"]) != wanted:
            raise ValueError(f"{type(self).__name__} takes {wanted} betas, got {group['betas']}")

    def rule_of(self, group: dict[str, Any]) -> str:
        """The rule of this group."""
        return self.rule

    def states_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The moments that this group keeps."""
        return self.moments

    # --- Parameters

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        group = dict(param_group)
        if "offload" in group or self._offloaded is not None:
            raise ValueError("offload is one place, with room for all parameters; make the optimizer with all groups")
        own = as_rules(group.pop("keep32")) if "keep32" in group else ()
        shared = self._rules if "keep32" not in param_group or self._rules is not EMBEDDINGS else ()
        explicit = (*own, *(shared if shared is not EMBEDDINGS else ()))
        super().add_param_group(group)
        group = self.param_groups[-1]
        try:
            self.check_group(group)
            lr = group["lr"]  # a schedule may later end a rounding error below 0
            if not (isinstance(lr, Tensor) and lr.device != HOST) and lr < 0:
                raise ValueError(f"lr must be at least 0, got {lr}")
            names = group.get("param_names", [None] * len(group["params"]))
            if names and names[0] is None and any(isinstance(rule, str) for rule in explicit):
                raise ValueError(
                    "keep32 has name patterns but the parameters have no names; pass model.named_parameters()"
                )
            for name, p in zip(names, group["params"], strict=True):
                check_param(name or "a parameter", p, group["rounding"])
            if group["skip_zeros"] and group["bits"] == 8:
                warnings.warn(
                    "skip_zeros=True keeps the state in 32 bits instead of 8: in an 8-bit block, elements without a "
                    "gradient would change with the scale they share. Put the parameters that need it (embeddings) "
                    "into a group of their own with bits=32",
                    stacklevel=4,
                )
        except Exception:
            self.param_groups.pop()
            raise
        exempt: list[str | None] = []
        for name, p in zip(names, group["params"], strict=True):
            found = [i for i, rule in enumerate(shared) if matches(rule, name, p)]
            why = [rule for rule in own if matches(rule, name, p)] + [shared[i] for i in found]
            exempt.append(reason(why[0]) if why else None)
            if self._used_rules is not None:
                self._used_rules.update(found)
        self._places.add(group, exempt)
        if shared is EMBEDDINGS and names and names[0] is None:
            self._nameless |= any(self.storage_of(p, group).bits == 8 for p in group["params"] if p.dim() == 2)

    @property
    def names(self) -> list[str]:
        """Every parameter's name, in the order of `rms` and `skipped`."""
        return [
            name
            for i, group in enumerate(self.param_groups)
            for name in group.get("param_names", [f"group {i}, parameter {k}" for k in range(len(group["params"]))])
        ]

    def has_8bit_state(self) -> bool:
        """Whether any parameter has, or will have, 8-bit moments."""
        groups = self.param_groups
        return any(self.storage_of(p, group).bits == 8 for group in groups for p in group["params"])

    def storage_of(self, p: Tensor, group: dict[str, Any]) -> Storage:
        """How this parameter's moments are stored, or will be."""
        return self._storage.get(p) or choose_storage(p.numel(), group, self._place_of(p, group).exempt)

    def _place_of(self, p: Tensor, group: dict[str, Any]) -> Place:
        """What is known of this parameter, also if a host has replaced the tensors since this optimizer was made."""
        place = self._places.find(p)
        if place is None:
            self._recognise()
            place = self._places.find(p)
        assert place is not None, "the parameter is in no group"
        return place

    def _recognise(self) -> None:
        """Tensors that a host has put in place of the parameters."""
        found = self._places.match(self.param_groups)
        for group, places in zip(self.param_groups, found, strict=True):
            for place, p in zip(places, group["params"], strict=True):
                if (old := place.tensor()) is p:
                    continue
                check_param(place.name, p, group["rounding"])
                if self._offloaded is not None:
                    raise ValueError(
                        f"{place.name} has been replaced by another tensor, but offload has room for the old one; make "
                        "the optimizer after the host has replaced the parameters"
                    )
                if old is not None and self.state.get(old) and not self.state.get(p):
                    raise ValueError(
                        f"{place.name} has been replaced by another tensor, and its state would be lost; load "
                        "the state afterwards (Accelerate: load_state after prepare; DeepSpeed: engine.load_checkpoint)"
                    )
        self._places.move(self.param_groups, found)

    # --- The step

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient. `closure` is called first, with gradients enabled."""
        loss = None
        if self._release is not None:
            self._check_released_step(closure)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        batches = self._gather(self._listed())
        if self._release is None:
            self._measured = []
        else:
            self._release.finish()
        self._update(batches)
        return loss

    def step_in_backward(self, model: nn.Module, *, max_norm: float | None = None, norm: Norm | None = None) -> Release:
        """From now on update each parameter of `model` during the backward pass, and free its gradient at once.

        `step()` then ends an iteration; it updates what is left, such as parameters that were frozen at this call. A
        second `backward()` before it is refused. Returns a handle with `remove()`.

        Args:
            max_norm: clip by the global norm; needs `norm`. With inf the norm is only measured: `norm` of the handle.
            norm: "previous" clips by the norm of the previous iteration's gradients; the first one is not clipped.
        """
        check_release(self, model, max_norm, norm)
        self._release = Release(self, model, max_norm)
        self._step_supports_amp_scaling = True  # a GradScaler then calls `step` with its scale, which is refused there
        return self._release

    def register_step_pre_hook(self, hook: Any) -> Any:
        if self._release is not None:
            raise ValueError(NO_HOOKS)
        return super().register_step_pre_hook(hook)

    def _check_released_step(self, closure: object) -> None:
        if closure is not None:
            raise ValueError("with step_in_backward, step() takes no closure: call loss.backward(), then step()")
        if self.__dict__.pop("grad_scale", None) is not None:
            raise RuntimeError(
                "a GradScaler scales gradients until step(), but step_in_backward has already used them; train in "
                "bfloat16 without a scaler, or pass a constant loss_scale= to the optimizer"
            )

    def _listed(self) -> Listed:
        """The parameters that have a gradient. One that is listed twice is updated once."""
        where, seen = -1, set()  # by id: hashing a tensor is a call of Python
        for number, group in enumerate(self.param_groups):
            self.check_group(group)  # it may have been changed
            for p in group["params"]:
                where += 1
                if p.grad is not None and id(p) not in seen:
                    seen.add(id(p))
                    yield where, number, group, p

    def _update(self, batches: list[Batch], clip: Tensor | float = 1.0) -> None:
        """Step these tensors. `clip` is a factor on the gradients."""
        if self._on_host:
            check_not_captured()
        for batch in batches:
            batch.grad_scale = clip * (-1.0 if batch.group["maximize"] else 1.0) / batch.group["loss_scale"]
        self._inspect([b for b in batches if _skips(b.group) or b.group["percentile_clipping"] < 100])
        for batch, sums in zip(batches, self._measure(batches), strict=True):
            rows = self._final_rows(batch, sums)
            if is_away(batch):
                self._apply_in_windows(batch, rows)
            else:
                self._apply(batch, rows)
            self._count(batch, rows)
        if self._on_host:
            wait_for_copies(batches)

    def _gather(self, listed: Listed, part: int = -1) -> list[Batch]:
        batches: dict[Key, Batch] = {}
        batch, current, states, storages = None, None, self.state, self._storage
        for where, number, group, p in listed:
            grad = p.grad
            assert grad is not None
            bits, block, codebook = group["bits"], group["block"], group["codebook"]
            state = states[p]
            if not state:
                self._create(p, group, state)
            storage = storages.get(p)
            if storage is None:
                storage = storages[p] = checkpoint.adopt(self, p, group, state)
            if self._offloaded is not None:
                self._offloaded.settle(p, state)
            changed = storage.block != block or storage.codebook != codebook
            changed = changed or (storage.bits == 8 and group["skip_zeros"])
            if changed or (storage.why == "bits=32") != (bits == 32):
                raise ValueError(
                    f"the state was made with {storage.why}, block={storage.block}, codebook={storage.codebook!r}, "
                    f"but the group now has bits={bits}, block={block}, codebook={codebook!r}, "
                    f"skip_zeros={group['skip_zeros']}; load a portable state dict into a new optimizer for that"
                )
            mine = local(p)
            key = (part, number, storage.bits, mine.device)  # block and codebook are the group's
            if batch is None or key != current:
                current, batch = key, batches.get(key)
            if batch is None:
                batch = batches[key] = Batch(group, storage, self.rule_of(group), self.states_of(group))
            batch.owners.append(p)
            batch.where.append(where)
            batch.params.append(mine)
            batch.grads.append(_read_grad(p, grad, mine))
            batch.kept.append(state)
        for key, batch in batches.items():
            self._check_states(batch)
            if batch.group["rounding"] in KEPT:
                _check_kept(batch, HOST if self._on_host else None)
            self._read_steps(key, batch)
        return list(batches.values())

    def _check_states(self, batch: Batch) -> None:
        """Refuse parameters that no longer match their state: the kernel would write to wrong addresses.

        Whole lists are compared first, which is fast; the tensors are checked one by one only if lists differ.
        """
        params, states, block, bits = batch.params, batch.kept, batch.storage.block, batch.storage.bits
        numels, devices = [p.numel() for p in params], [self._home(p) for p in params]
        usual = all(p.is_contiguous() for p in params) and {p.dtype for p in params} <= {*FLOATS}
        for name in batch.names:
            found = [state.get(name if bits == 32 else f"{name}_codes") for state in states]
            kept = [x for x in found if x is not None]
            usual = (
                usual
                and len(kept) == len(found)
                and [x.numel() for x in kept] == numels
                and [x.device for x in kept] == devices
                and all(x.is_contiguous() for x in kept)
                and {x.dtype for x in kept} == {torch.float32 if bits == 32 else torch.uint8}
            )
            if usual and bits == 8:
                scales = [state[f"{name}_absmax"] for state in states]
                usual = [x.numel() for x in scales] == [count_blocks(numel, block) for numel in numels]
        if not usual:
            first = next(iter(batch.names), "")
            for owner, mine, state in zip(batch.owners, params, states, strict=True):
                coded = f"{first}_codes" in state
                if coded != (bits == 8) and (coded or first in state):
                    checkpoint.adopt(self, owner, batch.group, state)  # assigned by the user, in the other format
                self._check_state(mine, state, batch.storage, batch.group)
            batch.params = [flat(p) for p in params]

    def _check_state(self, mine: Tensor, state: dict[str, Any], storage: Storage, group: dict[str, Any]) -> None:
        if mine.dtype not in FLOATS:
            raise ValueError(f"a parameter now has dtype {mine.dtype}; it must stay float32, bfloat16 or float16")
        if not is_dense(mine):
            raise ValueError(f"a parameter now has strides {mine.stride()}, which leave gaps or overlap")
        numel, contiguous = mine.numel(), mine.is_contiguous()
        suffix, dtype = ("", torch.float32) if storage.bits == 32 else ("_codes", torch.uint8)
        for name in self.states_of(group):
            kept = state.get(name + suffix)
            if kept is None:
                raise ValueError(f"the state has no {name}; a moment cannot be switched on during a run")
            if kept.numel() != numel or kept.device != self._home(mine):
                raise ValueError(
                    f"a parameter now has {numel} values on {mine.device}, but its {name} has {kept.numel()} on "
                    f"{kept.device}; build a new optimizer after replacing or moving parameters"
                )
            if kept.is_contiguous() != contiguous or (not contiguous and kept.stride() != mine.stride()):
                raise ValueError(
                    f"a parameter now has strides {mine.stride()}, but its {name} has {kept.stride()}; change the "
                    "memory format before the first step, or load a portable state dict into a new optimizer"
                )
            if kept.dtype is not dtype:
                raise ValueError(f"{name} must be {dtype}, got {kept.dtype}; something has cast the state")
            if suffix and state[f"{name}_absmax"].numel() != count_blocks(numel, storage.block):
                raise ValueError(f"{name} has {state[f'{name}_absmax'].numel()} scales for {numel} values")

    def _read_steps(self, key: Key, batch: Batch) -> None:
        """The step numbers of a batch are views of one tensor, so that counting takes one operation."""
        now = [state["step"] for state in batch.kept]
        views, counts = self._counts.get(key, ((), None))
        if counts is None or len(now) != len(views) or any(a is not b for a, b in zip(now, views, strict=True)):
            counts = torch.stack(now)
            views = list(counts.unbind())
            self._counts[key] = views, counts
            for state, view in zip(batch.kept, views, strict=True):
                state["step"] = view
        batch.counts, batch.steps = counts, counts + 1

    def _create(self, p: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        check_param(self._place_of(p, group).name, p, group["rounding"])  # a host may have changed it
        self._storage[p] = storage = self.storage_of(p, group)
        mine = local(p)
        state["step"] = torch.zeros((), dtype=torch.float32, device=home_of_numbers(mine.device))
        for name, kind in zip(self.states_of(group), RULES[self.rule_of(group)].states, strict=False):
            first, home = self.initial(group), self._home(mine)
            state |= new_moment(mine, name, storage, signed=kind != "v", value=first, device=home)
        state |= checkpoint.label(storage, self.states_of(group))

    def _home(self, mine: Tensor) -> torch.device:
        """Where the moments of a parameter are."""
        return HOST if self._on_host else mine.device

    def _offload(self, folder: Path | None) -> None:
        """Keep the state in this folder, or in host memory."""
        self._offloaded = Offloaded(folder, type(self).__name__, list(self._pieces()))
        self._on_host = True

    def _pieces(self) -> Iterator[tuple[Tensor, Piece]]:
        """The state tensors that are large enough for a file."""
        names = iter(self.names)
        for group in self.param_groups:
            for p in group["params"]:
                name, mine, storage = next(names), local(p), self.storage_of(p, group)
                for moment in self.states_of(group):
                    for key, (dtype, numel) in storage.layout(moment, mine.numel()).items():
                        yield p, Piece(name, key, dtype, numel)
                if mine.dtype != torch.float32 and group["rounding"] in KEPT:
                    key, dtype = _kept(group, mine)
                    yield p, Piece(name, key, dtype, mine.numel())

    def _inspect(self, batches: list[Batch]) -> None:
        """Read the gradients' norms. A NaN in grad_scale makes the kernel skip a tensor, and `_count` counts it."""
        if not batches:
            return
        norms = [gradient_norms_unchecked(batch.grads).view(-1, 1) for batch in batches]
        for batch, squares in zip(batches, _whole(batches, norms), strict=True):
            group, squares = batch.group, squares.squeeze(1)
            scale = torch.zeros_like(squares) + batch.grad_scale
            squares = squares * scale**2
            finite = squares.isfinite()
            if group["percentile_clipping"] < 100:
                scale = scale * self._clip_by_percentile(batch, squares, finite)
            batch.grad_scale = torch.where(finite, scale, torch.nan) if _skips(group) else scale

    def _clip_by_percentile(self, batch: Batch, squares: Tensor, finite: Tensor) -> Tensor:
        """Store this norm in place of the oldest, and return the factor that reduces it to the percentile."""
        now = squares.float()
        rings = [state.get("grad_norms") for state in batch.kept]
        filled = [ring if ring is not None else now[i].expand(RING) for i, ring in enumerate(rings)]
        slots = (batch.steps.long() % RING)[:, None]
        old = torch.stack(filled)
        ring = torch.where(finite[:, None], old.scatter(1, slots, now[:, None]), old)
        ring = torch.where(old.isfinite() | ~finite[:, None], ring, now[:, None])  # until now no norm was finite
        for state in batch.kept:
            if "grad_norms" not in state:
                state["grad_norms"] = torch.empty_like(ring[0])
        torch._foreach_copy_([state["grad_norms"] for state in batch.kept], list(ring.unbind()))
        limit = ring.sort(dim=1).values[:, batch.group["percentile_clipping"]]
        return torch.where(finite & (squares > limit), (limit.double() / squares).sqrt(), 1.0)

    def _measure(self, batches: list[Batch]) -> list[Tensor | None]:
        found = [self.measure(batch) for batch in batches]
        measured = [sums for sums in found if sums is not None]  # all or none
        return list(_whole(batches, measured)) if measured else found

    def _final_rows(self, batch: Batch, sums: Tensor | None) -> Tensor:
        rows, group = self.rows(batch, sums), batch.group
        if rows.device.type == "cpu" and not _skips(group) and not rows.isfinite().all():
            given = {name: group[name] for name in self.defaults if isinstance(group[name], float | tuple)}
            raise ValueError(
                f"the hyper-parameters give coefficients that are not finite, or too large for float32: {given}"
            )
        independent = independent_decay(group)
        if independent is not None:
            rows.select(1, DECAY).zero_().add_(independent)
        return rows.to(batch.params[0].device)  # the same, except where the device has no float64

    def _apply(self, batch: Batch, rows: Tensor) -> None:
        group = batch.group
        fused = group["rounding"] == "nearest" or (
            group["rounding"] == "split" and rows.device.type == "cpu" and not batch.starts
        )
        careful = not fused and any(p.dtype != torch.float32 for p in batch.params)
        if group["skip_zeros"] or careful or not batch.names:
            step_in_chunks(batch, rows)
        else:
            step_unchecked(*batch.arguments(rows))

    def _apply_in_windows(self, batch: Batch, rows: Tensor) -> None:
        for window in cut(batch):
            self._apply(window.batch, window.rows(rows))
            window.write_back()

    def _count(self, batch: Batch, rows: Tensor) -> None:
        """Count the step, except for tensors that were skipped."""
        steps = batch.steps
        if _skips(batch.group):
            skipped = rows.isfinite().all(dim=1).logical_not().to(steps.device)
            steps = torch.where(skipped, batch.counts, steps)
            for state in batch.kept:
                if "skipped" not in state:
                    state["skipped"] = torch.zeros_like(state["step"])
            torch._foreach_add_([state["skipped"] for state in batch.kept], list(skipped.float().unbind()))
        batch.counts.copy_(steps)

    # --- Results

    @property
    def skipped(self) -> Tensor:
        """How often each parameter was skipped because its gradient was not finite, in the order of `names`."""
        params = [p for group in self.param_groups for p in group["params"]]
        counts = [self.state[p].get("skipped") if p in self.state else None for p in params]
        device = next((c.device for c in counts if c is not None), torch.device("cpu"))
        zero = torch.zeros((), device=device)
        return torch.stack([zero if c is None else c for c in counts]) if counts else torch.zeros(0)

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and float32 weights of all parameters, with the extra bits of rounding="split"."""
        params = (p for group in self.param_groups for p in group["params"])
        for name, p in zip(self.names, params, strict=True):
            extra = self.state[p].get("extra_bits") if p in self.state else None
            yield name, p.detach().float() if extra is None else wrap_like(join(local(p).detach(), extra), p)

    def describe(self) -> Description:
        """Which tensors are quantized, which are not and why, and the bytes now and at 32 bits."""
        return describe(self)

    # --- State dicts, copies

    def state_dict(self, *, format: checkpoint.Format | None = None) -> dict[str, Any]:
        """`packed`: codes and scales, for an exact resume. `portable`: float32, for other optimizers and other shards.

        The default is `default_format`; if that is None, packed, or portable if parameters are sharded.
        torch.distributed.checkpoint gets portable state.
        """
        return checkpoint.save(self, format)

    def load_state_dict(self, state_dict: dict[str, Any], *, convert: bool = False) -> None:
        """Load either format, or the state of PyTorch's optimizer of the same name.

        This optimizer's own bits, block and codebook are kept. Codes of another block size or codebook are refused
        unless `convert`, because storing them again rounds once more.
        """
        checkpoint.load(self, state_dict, convert=convert)

    def __getstate__(self) -> dict[str, Any]:
        patterns = tuple(rule for rule in self._rules if isinstance(rule, str))  # the others have been applied already
        listed = [(p, self._place_of(p, group).exempt) for group in self.param_groups for p in group["params"]]
        exempt = {p: why for p, why in listed if why is not None}
        own = {"_rules": patterns, "_exempt": exempt, "_storage": self._storage, "_measured": []}
        return super().__getstate__() | own | {"_on_host": self._on_host}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._used_rules, self._nameless = None, False
        self._places, exempt = Places(), self.__dict__.pop("_exempt")
        for group in self.param_groups:
            self._places.add(group, [exempt.get(p) for p in group["params"]])
        self._counts = {}
        self.__dict__.setdefault("_on_host", False)
        self._offloaded = None  # its state is a copy in memory
        self._release = None  # the hooks are on the parameters of the original
        for group in self.param_groups:
            for key, value in (DEFAULTS | self.defaults).items():
                group.setdefault(key, value)


def _read_grad(p: Tensor, grad: Tensor, mine: Tensor) -> Tensor:
    """This process's gradient in the memory order of its parameter."""
    if grad.layout != torch.strided:
        raise RuntimeError(f"gradients must be dense, got {grad.layout}; build the embedding with sparse=False")
    if mine is not p:
        grad = shard_like(grad, p)  # sequence parallelism leaves partial sums on replicated parameters
    if grad.dtype not in FLOATS:
        raise RuntimeError(f"gradients must be float32, bfloat16 or float16, got {grad.dtype}")
    if grad.numel() != mine.numel():
        raise RuntimeError(f"a gradient has {grad.numel()} values, its parameter {mine.numel()}; was p.data replaced?")
    if grad.is_contiguous() and mine.is_contiguous():
        return grad
    if grad.stride() != mine.stride():
        grad = torch.empty_like(mine, dtype=grad.dtype).copy_(grad)
    return flat(grad)


def _check_kept(batch: Batch, device: torch.device | None) -> None:
    """Refuse what rounding keeps if it does not fit the parameters; make what is missing."""
    for p, state in zip(batch.owners, batch.kept, strict=True):
        mine = local(p)
        if mine.dtype == torch.float32:
            continue
        key, dtype = _kept(batch.group, mine)
        if key not in state:
            state[key] = torch.zeros_like(mine, dtype=dtype, device=device)
        kept = state[key]
        if kept.dtype != dtype or kept.shape != mine.shape or kept.stride() != mine.stride():
            raise ValueError(
                f"a parameter now has shape {tuple(mine.shape)} and strides {mine.stride()}, but its {key} are "
                f"{kept.dtype} with {tuple(kept.shape)} and {kept.stride()}; build a new optimizer after replacing "
                "parameters"
            )


def _kept(group: dict[str, Any], mine: Tensor) -> tuple[str, torch.dtype]:
    """The key and the dtype of what rounding keeps of this parameter."""
    return KEPT[group["rounding"]], torch.int8 if group["rounding"] == "split" else mine.dtype


def _skips(group: dict[str, Any]) -> bool:
    return bool(group["skip_nonfinite"] or group["loss_scale"] != 1)


def _whole(batches: list[Batch], sums: list[Tensor]) -> Iterable[Tensor]:
    """Sums of shards to sums of whole tensors, for all batches in one collective."""
    owners = [p for batch in batches for p in batch.owners]
    if not any(is_sharded(p) for p in owners):
        return [part.to(home_of_numbers(part.device)).double() for part in sums]
    if len({part.device for part in sums}) > 1:
        return [add_up_shards(batch.owners, part) for batch, part in zip(batches, sums, strict=True)]
    return torch.split(add_up_shards(owners, torch.cat(sums)), [len(part) for part in sums])
