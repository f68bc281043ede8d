"""Cut a batch to a shorter sequence, whatever the batch is made of.

    truncate    [B, L] -> [B, c]                 the rest of each row is not trained on
    reshape     [B, L] -> [B * (L // c), c]      the rest becomes more rows; L mod c tokens of each row are dropped

Targets have to be shifted before the cut (`targets[i] = tokens[i + 1]`): then the last kept position keeps its true
next token, and c positions give c targets. Text that is shifted later is cut with `extra=1`.

What is a sequence? The first 2-D tensor of whole numbers is (in a dict: the one called input_ids, tokens, inputs or
text), and so is every tensor of the same [B, L]. Masks [.., L, L] and positions [L] or [.., B, L] go by their names, in
tuples a mask must be boolean. All else, images above all, is handed on as it is. Tensors are anything with `shape`,
`dtype` and `[]`: PyTorch's, NumPy's.
"""

# B batch, L length of the batch, c length to cut to, k rows made of one

import copy
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Literal

Mode = Literal["truncate", "reshape"]

LEADERS = ("input_ids", "tokens", "inputs", "text", "inputs_embeds")  # who says how long the batch is, first found
FOLLOWERS = ("labels", "targets", "shift_labels", "loss_mask", "token_type_ids")  # another length would be an error
MASKS = ("attention_mask", "attn_mask")
POSITIONS = ("position_ids", "positions", "cache_position")
PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens")


def cut(batch: Any, length: int, *, mode: Mode = "truncate", extra: int = 0) -> Any:
    """The same kind of batch with sequences of `length` tokens; itself if nothing is longer. Never written to.

    Args:
        batch: a dict or the like (a Hugging Face `BatchEncoding`), a tuple, list or NamedTuple, or one tensor.
        extra: 1 for text that holds its targets, one token longer than its inputs: length + 1 tokens are kept.
    """
    if length < 1:
        raise ValueError(f"length={length} would leave nothing of the batch; try length=8")
    if mode == "reshape" and extra:
        raise ValueError("rows cannot be cut up before their targets are shifted; shift first, then cut with extra=0")
    if isinstance(batch, Mapping):
        return _cut_mapping(batch, length, mode, extra)
    if isinstance(batch, tuple | list):
        return _cut_sequence(batch, length, mode, extra)
    if not hasattr(batch, "shape"):
        raise ValueError(f"a batch is a dict, a tuple, a list or a tensor, got {type(batch).__name__}; cut its tensors")
    return _cut_sequence((batch,), length, mode, extra)[0]


def kept(row: int, length: int, mode: Mode) -> int:
    """How many of a row's tokens are left."""
    length = min(length, row)
    return row - row % length if mode == "reshape" else length


@dataclass(frozen=True)
class _Cut:
    rows: int  # B
    before: int  # L
    after: int  # c
    mode: Mode

    @property
    def pieces(self) -> int:
        """k"""
        return self.before // self.after if self.mode == "reshape" else 1

    def sequence(self, x: Any) -> Any:
        """[B, L, ...] -> [B * k, c, ...]"""
        kept = _own(x[:, : self.pieces * self.after])
        return kept if self.pieces == 1 else kept.reshape(-1, self.after, *x.shape[2:])

    def positions(self, name: str, x: Any) -> Any:
        """[L], [B, L] or [.., B, L]; pieces of a row keep the positions that they had in it."""
        if len(x.shape) == 2 and tuple(x.shape) == (self.rows, self.before):
            return self.sequence(x)
        if not x.shape or x.shape[-1] != self.before:
            return x
        if self.pieces > 1:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, and pieces of a row need positions of their own; give one row of "
                "positions for each row of tokens, or leave them out"
            )
        return _own(x[..., : self.after])

    def mask(self, name: str, x: Any) -> Any:
        """[B, L], [L, L], or [.., L, L] with any of the two possibly 1."""
        if len(x.shape) == 2 and (x.shape[0] == self.rows or x.shape[0] != self.before):
            return self.sequence(x) if x.shape[1] == self.before else x
        if len(x.shape) < 2 or self.before not in tuple(x.shape[-2:]):
            return x
        if self.pieces > 1:
            return self._diagonal(name, x)
        rows, columns = (slice(self.after) if size == self.before else slice(None) for size in x.shape[-2:])
        return _own(x[..., rows, columns])

    def _diagonal(self, name: str, x: Any) -> Any:
        """[B, h, L, L] -> [B * k, h, c, c]: each piece sees itself only."""
        if len(x.shape) != 4 or x.shape[2] != x.shape[3]:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; rows can be cut up with masks of shape [B, L] or [B, 1, L, L]"
            )
        k, c, each = self.pieces, self.after, list(range(self.pieces))
        blocks = x[..., : k * c, : k * c].reshape(*x.shape[:2], k, c, k, c)
        # Two index lists with a slice between them put their common axis first: [k, B, h, c, c].
        blocks = blocks[:, :, each, :, each]
        if x.shape[0] == self.rows:
            return _own(blocks.swapaxes(0, 1).reshape(-1, x.shape[1], c, c))
        if not bool((blocks == blocks[:1]).all()):
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, one for all rows, and differs from piece to piece of a row; give "
                f"one for each of the {self.rows} rows"
            )
        return _own(blocks[0])

    def check_bystander(self, name: str, x: Any) -> None:
        if self.pieces > 1 and _is_tensor(x) and x.shape and x.shape[0] == self.rows:
            raise ValueError(
                f"one row becomes {self.pieces}, and {name} of shape {tuple(x.shape)} has no time to be cut along; "
                "try cut_mode='truncate'"
            )


def _cut_mapping(batch: Mapping[str, Any], length: int, mode: Mode, extra: int) -> Any:
    name = next((name for name in LEADERS if _is_text(batch.get(name), name)), None)
    plan = _plan(batch[name], length, mode, extra) if name else None
    if plan is None:
        return batch
    for name in PACKED:
        if batch.get(name) is not None:
            raise ValueError(f"{name} says where packed sequences end, and a cut moves that; collate without it")
    # A copy keeps the kind: a BatchEncoding has more to it than its keys.
    result = copy.copy(batch) if isinstance(batch, MutableMapping) else dict(batch)
    for name, value in batch.items():
        part = _cut_named(name, value, plan)
        if part is not value:
            result[name] = part
    return result


def _cut_named(name: str, value: Any, plan: _Cut) -> Any:
    if not _is_tensor(value):
        return value
    if name in MASKS:
        return plan.mask(name, value)
    if name in POSITIONS:
        return plan.positions(name, value)
    if tuple(value.shape[:2]) == (plan.rows, plan.before) and (len(value.shape) == 2 or name == "inputs_embeds"):
        return plan.sequence(value)
    if name in FOLLOWERS and len(value.shape) == 2 and not _is_no_id(value):
        raise ValueError(
            f"{name} has shape {tuple(value.shape)} beside tokens of shape {(plan.rows, plan.before)}, so a cut would "
            "not keep them aligned; shift targets before the cut and keep all positions"
        )
    plan.check_bystander(name, value)
    return value


def _cut_sequence(batch: Any, length: int, mode: Mode, extra: int) -> Any:
    text = next((value for value in batch if _is_text(value)), None)
    plan = None if text is None else _plan(text, length, mode, extra)
    parts = [_cut_placed(i, value, plan, length, mode, extra) for i, value in enumerate(batch)]
    if all(part is value for part, value in zip(parts, batch, strict=True)):
        return batch
    # NamedTuples take their fields one by one, tuples and lists take them together.
    return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)


def _cut_placed(place: int, value: Any, plan: _Cut | None, length: int, mode: Mode, extra: int) -> Any:
    if isinstance(value, Mapping | tuple | list):
        return cut(value, length, mode=mode, extra=extra)
    if plan is None or not _is_tensor(value):
        return value
    if tuple(value.shape) == (plan.rows, plan.before):
        return plan.sequence(value)
    # Boolean, or else it might be an image that is as large as the text is long.
    if len(value.shape) == 4 and "bool" in str(value.dtype):
        return plan.mask(f"batch[{place}]", value)
    plan.check_bystander(f"batch[{place}]", value)
    return value


def _plan(text: Any, length: int, mode: Mode, extra: int) -> _Cut | None:
    """How to cut the batch to which this text belongs, if it is too long."""
    rows, before = text.shape[:2]
    return _Cut(rows=rows, before=before, after=length + extra, mode=mode) if before > length + extra else None


def _is_text(value: Any, name: str = "") -> bool:
    if not _is_tensor(value):
        return False
    return len(value.shape) == 3 if name == "inputs_embeds" else len(value.shape) == 2 and not _is_no_id(value)


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _is_no_id(value: Any) -> bool:
    """Not the numbers of tokens."""
    return any(kind in str(value.dtype) for kind in ("float", "complex", "bool"))


def _own(part: Any) -> Any:
    """A copy: a view would keep the whole batch alive, and what is written to it would reach the batch."""
    return part.clone() if hasattr(part, "clone") else part.copy()
