"""State dicts: two formats of our own, and those of PyTorch, bitsandbytes and torchao.

    packed      exp_avg_codes, exp_avg_absmax      as in memory: small, and a resume continues bit for bit
    portable    exp_avg                            float32 under PyTorch's names: any such optimizer, any sharding

Decoded 8-bit state is stored again as the same values. So a resume from portable state continues bit for bit too, on
the same number of processes: there the blocks are the same. (Exception: the published table "dynamic" has no
-1, so a block whose largest magnitude is negative gets another scale.) Everything is plain tensors, numbers and
strings: `torch.load(weights_only=True)` reads it.

8-bit state has a label under PyTorch's name of each moment (`label`). It says what the codes mean; and hosts that look
up a flat checkpoint by the names in memory (TorchTitan, `flatten_optimizer_state_dict=True`) find a portable
moment under it.

A load is checked and built completely before anything changes: a load that fails does not change the optimizer.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from trimtab.ops.blockwise import count_blocks, dequantize_blockwise
from trimtab.ops.sharding import home_of_numbers, is_sharded, local, shard_like, wrap_like
from trimtab.ops.step import RULES
from trimtab.ops.step.split import KEPT
from trimtab.ops.step.storage import Storage, decode, encode

if TYPE_CHECKING:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    from trimtab.optim.optimizer import Optimizer

Format = Literal["packed", "portable"]
Entry = dict[str, Any]  # the state of a parameter, or a parameter group
Later = dict[int, tuple[Entry, Callable[[], Entry]]]  # by the id of packed state: itself, and what makes it portable

# Options that a load does not change, and PyTorch's switches, which have no effect here.
_OWN = ("bits", "block", "codebook", "min_8bit_size")
_TORCH = ("foreach", "fused", "capturable", "differentiable", "amsgrad", "decoupled_weight_decay")
PACKING = 3  # the version of the codes in packed state
_WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_SHAPED = tuple(KEPT.values())  # like the parameter
_EXTRAS = ("skipped", "grad_norms", *_SHAPED)  # optional state besides step and moments


# --- Saving


def save(optimizer: "Optimizer", format: Format | None) -> dict[str, Any]:
    for pre in optimizer._optimizer_state_dict_pre_hooks.values():
        pre(optimizer)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    sharded, coded = any(is_sharded(p) for p in params), optimizer.has_8bit_state()
    format = format or optimizer.default_format or ("portable" if sharded else "packed")
    if format not in ("packed", "portable"):
        raise ValueError(f"format must be packed or portable, got {format!r}")
    if format == "packed" and sharded:
        raise ValueError("packed codes are valid only for the blocks of one sharding; save sharded state as portable")
    places: dict[Tensor, int] = {}  # PyTorch's indices, also where a parameter is listed twice
    start = 0
    for group in optimizer.param_groups:
        places |= {p: i for i, p in enumerate(group["params"], start) if p not in places}
        start += len(group["params"])
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        | {"params": [places[p] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    # State under keys that are not parameters is saved too, as in PyTorch.
    state: dict[Any, Any] = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    later: Later = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if optimizer.state.get(p):
                portable = partial(_to_portable, optimizer, p, group, optimizer.state[p])
                state[places[p]] = entry = dict(optimizer.state[p]) if format == "packed" else portable()
                later[id(entry)] = entry, portable
    result: dict[str, Any] = {"state": state, "param_groups": groups}
    if format == "packed" and coded:
        result["state"] = PackedState(state, later)
    for post in optimizer._optimizer_state_dict_post_hooks.values():
        changed = post(optimizer, result)
        result = result if changed is None else changed
    return result


class PackedState(dict[Any, Any]):
    """Packed state by the index of the parameter; saved as an OrderedDict.

    torch.distributed.checkpoint (DCP) replaces the indices by names, to load the state on any processes. Codes of whole
    tensors cannot be sharded, so under a name the state is portable.
    """

    def __init__(self, state: Mapping[Any, Any], later: Later | None = None) -> None:
        """`later`: how to make portable state. (Accelerate copies a dict as type(x)(items), without it.)"""
        super().__init__(state)
        self._later = later or {}

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(key, str) and id(value) in self._later:
            _, portable = self._later[id(value)]
            value = portable()
        super().__setitem__(key, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter(self.items())


def label(storage: Storage, names: tuple[str, ...]) -> Entry:
    """What the codes of each moment are: the version of the code, which moment, and of how many."""
    if storage.bits == 32:
        return {}
    return {name: torch.tensor([PACKING, place, len(names)]) for place, name in enumerate(names)}


def _to_portable(optimizer: "Optimizer", p: Tensor, group: Entry, entry: Entry) -> Entry:
    portable: Entry = {"step": entry["step"].clone()}
    names, kinds = optimizer.states_of(group), RULES[optimizer.rule_of(group)].states
    for name, moment in decode(entry, names, kinds, optimizer.storage_of(p, group)).items():
        portable[name] = wrap_like(moment, p)
    for name in (*optimizer.extras_of(p), *_EXTRAS):
        if name in entry:
            portable[name] = wrap_like(entry[name], p) if name in _SHAPED else entry[name]
    return portable


# --- Loading


def load(optimizer: "Optimizer", state_dict: Mapping[str, Any], *, convert: bool) -> None:
    state_dict = dict(state_dict)
    for pre in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed = pre(optimizer, state_dict)
        state_dict = state_dict if changed is None else changed
    saved_groups = state_dict["param_groups"]
    _check_groups(optimizer, saved_groups, state_dict["state"])
    known = {place for saved in saved_groups for place in saved["params"]}  # indices, or DCP's names
    state = {key: x for key, x in state_dict["state"].items() if key not in known and not isinstance(key, int)}
    storages: dict[Tensor, Storage] = {}
    groups: list[dict[str, Any]] = []
    names = iter(optimizer.names)
    for group, saved in zip(optimizer.param_groups, saved_groups, strict=True):
        if saved.get("amsgrad"):
            raise ValueError("the state was saved with amsgrad=True, whose running maximum is not supported")
        switches = [name for name in _TORCH if name not in optimizer.defaults]
        ours = ("params", "packing", "moments", "debiased", *_OWN, *switches)
        kept = {key: value for key, value in saved.items() if key not in ours}
        if "param_names" in group:
            kept["param_names"] = group["param_names"]  # a wrapped model has other names
        groups.append({**group, **deepcopy(kept)})
        optimizer.check_group(groups[-1])
        for p, place in zip(group["params"], saved["params"], strict=True):
            name = next(names)
            if not state_dict["state"].get(place):
                continue  # it has no step yet
            storages[p] = optimizer.storage_of(p, groups[-1])
            to, entry = _Place(p, name, storages[p], optimizer._home(local(p))), state_dict["state"][place]
            state[p] = _read(optimizer, to, groups[-1], saved, entry, convert=convert)
    for group, loaded in zip(optimizer.param_groups, groups, strict=True):
        group.update(loaded)
    optimizer.state.clear()
    optimizer.state.update(state)
    optimizer._storage.clear()
    optimizer._storage.update(storages)
    for post in optimizer._optimizer_load_state_dict_post_hooks.values():
        post(optimizer)


def _check_groups(optimizer: "Optimizer", saved: list[dict[str, Any]], state: Mapping[Any, Any]) -> None:
    mine = optimizer.param_groups
    if len(saved) != len(mine):
        raise ValueError(f"the state dict has {len(saved)} parameter groups, this optimizer has {len(mine)}")
    for i, (group, other) in enumerate(zip(mine, saved, strict=True)):
        if len(group["params"]) != len(other["params"]):
            raise ValueError(
                f"group {i} of the state dict has {len(other['params'])} parameters, "
                f"that of this optimizer {len(group['params'])}"
            )
        names, others = group.get("param_names"), other.get("param_names")
        for a, b in zip(names or (), others or (), strict=False):
            if a != b and _unwrapped(a) != _unwrapped(b):
                raise ValueError(f"group {i} expects {a!r} where the state dict has {b!r}; order them alike")
    known = {place for other in saved for place in other["params"]}
    extra = {key for key in state if isinstance(key, int) and key not in known}
    if extra:
        raise ValueError(f"the state dict holds state of parameters that are in no group: {sorted(extra, key=str)}")


def _unwrapped(name: str) -> str:
    """A parameter's name without the prefixes of torch.compile, DDP, FSDP1 and activation checkpointing."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def adopt(optimizer: "Optimizer", p: Tensor, group: dict[str, Any], entry: Entry) -> Storage:
    """Convert state that the user assigned to `optimizer.state` to this optimizer's storage."""
    storage = optimizer.storage_of(p, group)
    to, saved = _Place(p, "a parameter", storage, optimizer._home(local(p))), group | {"packing": PACKING}
    read = _read(optimizer, to, group, saved, entry, convert=False)
    entry.clear()
    entry.update(read)
    return storage


class _Place(NamedTuple):
    """Where state goes: a parameter, its name for messages, its storage, and the device of its moments."""

    p: Tensor
    name: str
    storage: Storage
    device: torch.device


def _read(optimizer: "Optimizer", to: _Place, group: Entry, saved: Entry, entry: Entry, *, convert: bool) -> Entry:
    """One parameter's saved state in this optimizer's storage."""
    if "state1" in entry or any(str(key).startswith("__bnb") for key in entry):
        raise ValueError("this is a state dict of bitsandbytes; load from_bitsandbytes(state_dict) instead")
    # Where a flat checkpoint has nothing under a name in memory, DCP gives an empty dict.
    entry = {key: x for key, x in entry.items() if not (isinstance(x, dict) and not x)}
    kind, device, extras = type(optimizer).__name__, local(to.p).device, optimizer.extras_of(to.p)
    names, kinds = optimizer.states_of(group), RULES[optimizer.rule_of(group)].states
    stored = [f"{moment}{end}" for moment in (*optimizer.moments, *names) for end in ("", "_codes", "_absmax")]
    unknown = [
        str(key) for key, x in entry.items() if x is not None and key not in {"step", *extras, *_EXTRAS, *stored}
    ]
    if names and f"{names[0]}_codes" in entry:
        _check_codes(optimizer, entry, to, names, saved)
        moments = _read_codes(entry, to, names, kinds, saved, convert=convert)
    else:
        missing = [moment for moment in (*names, *extras) if moment not in entry]
        if missing:
            raise ValueError(
                f"the state of {to.name} has no {missing[0]}, which {kind} needs; it has {', '.join(entry)}"
            )
        values = {moment: _fit(entry[moment], to, moment).float() for moment in names}
        if saved.get("debiased"):  # StableAdamW of an early version
            _restore_bias(values, saved, float(entry["step"]))
        moments = encode(values, kinds, to.storage)
    if unknown:
        raise ValueError(
            f"the state of {to.name} holds {', '.join(unknown)}, which {kind} does not keep: another optimizer saved it"
        )
    step = torch.as_tensor(entry.get("step", 1.0), dtype=torch.float32).detach().clone()
    step = step.to(home_of_numbers(device)).reshape(())
    result = {"step": step} | moments | label(to.storage, names)
    for extra in (*extras, *_EXTRAS):
        if extra in entry:
            value = entry[extra]
            result[extra] = _fit(value, to, extra) if extra in _SHAPED else value.clone().to(device)
    return result


def _restore_bias(values: Mapping[str, Tensor], saved: Entry, step: float) -> None:
    """Bias-corrected moments to Adam's plain ones."""
    for (name, x), beta in zip(values.items(), saved["betas"], strict=True):
        if name != "exp_avg_sq" or saved.get("beta2_power") is None:
            x *= 1 - beta ** max(step, 1)


def _check_codes(optimizer: "Optimizer", entry: Entry, to: _Place, names: tuple[str, ...], saved: Entry) -> None:
    """Refuse codes with another meaning. Earlier versions had the label in the groups."""
    labels = [entry[name].tolist() for name in names if name in entry]
    version = labels[0][0] if labels else saved.get("packing", 1)
    if version != PACKING:
        raise ValueError(
            f"the state dict holds 8-bit codes of packing {version}, this version reads packing {PACKING}: the codes "
            "differ. Load it with the version that saved it, and save it there with state_dict(format='portable')"
        )
    alike = labels == [[PACKING, place, len(names)] for place in range(len(names))]
    if not (alike if labels else list(saved.get("moments", optimizer.moments)) == list(optimizer.moments)):
        held = ", ".join(key.removesuffix("_codes") for key in entry if str(key).endswith("_codes"))
        raise ValueError(
            f"the packed state of {to.name} holds {held} of another optimizer, {type(optimizer).__name__} keeps "
            f"{', '.join(names)}, and codes mean something else there; save it as portable"
        )


def _read_codes(
    entry: Entry, to: _Place, moments: tuple[str, ...], kinds: str, saved: Entry, *, convert: bool
) -> Entry:
    p, name, storage, device = to
    theirs, read = Storage(8, saved["block"], saved["codebook"]), {}
    for moment in moments:
        codes, absmax = entry[f"{moment}_codes"], entry[f"{moment}_absmax"]
        blocks = count_blocks(codes.numel(), theirs.block)
        if codes.dtype != torch.uint8 or absmax.dtype != torch.float32 or absmax.shape != (blocks,):
            raise ValueError(
                f"the packed {moment} of {name} must be uint8 codes with {blocks} float32 scales, got {codes.dtype} "
                f"and {tuple(absmax.shape)} {absmax.dtype}; the state was cast or cut"
            )
        read[f"{moment}_codes"] = codes.to(device) if is_sharded(p) else _fit(codes, to, moment)
        read[f"{moment}_absmax"] = absmax.detach().clone().to(device)
    if theirs == storage and not is_sharded(p):
        return read
    if theirs != storage and storage.bits == 8 and not convert:
        raise ValueError(
            f"the state was stored with block={theirs.block}, codebook={theirs.codebook!r}; this optimizer has "
            f"block={storage.block}, codebook={storage.codebook!r}. Build it with the same, or store it again with "
            "load_state_dict(..., convert=True), which rounds once more"
        )
    whole = decode(read, moments, kinds, theirs)  # a shard has other blocks
    return dict(encode({moment: _fit(x, to, moment) for moment, x in whole.items()}, kinds, storage))


def _fit(value: Any, to: _Place, what: str) -> Tensor:
    """A copy of this process's part, in the memory order of its parameter."""
    p, name, _, device = to
    if not isinstance(value, Tensor):
        raise ValueError(f"{what} of {name} must be a tensor, got {type(value).__name__}")
    if type(value).__name__.startswith("OptimState"):
        raise ValueError("this is a state dict of torchao; load from_torchao(state_dict) instead")
    if value.shape != p.shape:
        raise ValueError(f"{what} of {name} has shape {tuple(value.shape)}, its parameter {tuple(p.shape)}")
    part, mine = shard_like(value.detach(), p), local(p)
    return torch.empty_like(mine, dtype=part.dtype, device=device).copy_(part)


# --- torch.distributed.checkpoint


def distributed_state_dict(
    model: nn.Module, optimizer: "Optimizer", *, options: "StateDictOptions | None" = None
) -> dict[str, Any]:
    """The portable state of `optimizer`, by the names of the parameters. Works with DDP, FSDP2 and one process.

    >>> state = {"model": model.state_dict(), "optim": distributed_state_dict(model, optimizer)}
    >>> torch.distributed.checkpoint.save(state, checkpoint_id=path)

    The same as PyTorch's `get_optimizer_state_dict`, which hosts call, also with `flatten_optimizer_state_dict=True`.
    """
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    return get_optimizer_state_dict(model, optimizer, options=options)


def load_distributed_state_dict(
    model: nn.Module, optimizer: "Optimizer", state: dict[str, Any], *, options: "StateDictOptions | None" = None
) -> None:
    """Load what `distributed_state_dict` returned, here or on another number of processes.

    >>> state = {"optim": distributed_state_dict(model, optimizer)}  # tensors to read into
    >>> torch.distributed.checkpoint.load(state, checkpoint_id=path)
    >>> load_distributed_state_dict(model, optimizer, state["optim"])
    """
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    set_optimizer_state_dict(model, optimizer, state, options=options)


# --- Other libraries


def from_bitsandbytes(
    state_dict: Mapping[str, Any], moments: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
) -> dict[str, Any]:
    """A bitsandbytes state dict, 8-bit or 32-bit, as a portable one. `moments`: those of the optimizer that loads it.

    >>> optimizer = trimtab.optim.Lion(model.named_parameters(), bits=8)
    >>> optimizer.load_state_dict(from_bitsandbytes(torch.load("optimizer.pt"), optimizer.moments))
    """
    # Its groups have every optimizer's hyper-parameters under Adam's names; only those with the same meaning are used.
    taken = ["lr", "initial_lr", "weight_decay", "params", "param_names"]
    taken += ["betas"] if moments[0] == "exp_avg" else []
    taken += ["eps"] if len(moments) > 1 else []
    taken += ["alpha", "t_alpha", "t_beta3"] if len(moments) == 3 else []

    def read(entry: Mapping[str, Any]) -> Entry:
        # Newer versions of bitsandbytes nest the quantized tensors one level deeper.
        entry = {**entry, **next((value for key, value in entry.items() if str(key).startswith("__bnb")), {})}
        decoded = [x for i in (1, 2) if f"state{i}" in entry for x in _read_bitsandbytes(entry, i, len(moments) == 3)]
        if len(decoded) != len(moments):
            raise ValueError(f"the state holds {len(decoded)} moments, but {len(moments)} are named: {moments}")
        step = torch.tensor(float(entry["step"]), dtype=torch.float32)
        return {"step": step} | dict(zip(moments, decoded, strict=True))

    groups = [{key: group[key] for key in taken if key in group} for group in state_dict["param_groups"]]
    return {"state": {place: read(entry) for place, entry in state_dict["state"].items()}, "param_groups": groups}


def from_torchao(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A torchao state dict (8-bit, 4-bit or float8) as a portable one. Needs torchao only to unpickle it.

    >>> optimizer.load_state_dict(from_torchao(torchao_optimizer.state_dict()))
    """

    def read(entry: Mapping[str, Any]) -> Entry:
        decoded = {key: x.dequantize().float() if hasattr(x, "codes") else x for key, x in entry.items()}
        return decoded | {"step": torch.as_tensor(entry["step"], dtype=torch.float32).reshape(())}

    # Its learning rates are tensors; as numbers they work with any scheduler.
    groups = [{**group, "lr": float(group["lr"])} for group in state_dict["param_groups"]]
    return {"state": {place: read(entry) for place, entry in state_dict["state"].items()}, "param_groups": groups}


def _read_bitsandbytes(entry: Mapping[str, Any], i: int, stacked: bool) -> list[Tensor]:
    """Its state1 or state2 in float32. AdEMAMix stacks two averages in state1."""
    values, scales = entry[f"state{i}"], entry.get(f"absmax{i}")
    if not (i == 1 and stacked):
        values, scales = [values], [scales]
    pairs = zip(values, scales if scales is not None else [None, None], strict=True)
    return [x.float() if x.dtype != torch.uint8 else _decode(x, absmax, entry[f"qmap{i}"]) for x, absmax in pairs]


def _decode(codes: Tensor, absmax: Tensor, codebook: Tensor) -> Tensor:
    sizes = (256, 2048, 4096, 1024, 512, 128, 64)
    block = next((size for size in sizes if count_blocks(codes.numel(), size) == absmax.numel()), None)
    if block is None:
        raise ValueError(f"{absmax.numel()} scales for {codes.numel()} codes fit no block size of bitsandbytes")
    return dequantize_blockwise(codes.contiguous(), absmax.float(), codebook.float(), block=block)
