"""Cut a batch of any structure to a shorter sequence length.

    truncate    [B, L] -> [B, c]                 the rest of each row is not trained on
    reshape     [B, L] -> [B * (L // c), c]      the rest becomes more rows; L mod c tokens of each row are dropped

Shift targets before the cut (`targets[i] = tokens[i + 1]`): the last kept position then has its true next token, and c
positions give c targets. Cut text that is shifted later with `extra=1`.

What is cut: the first 2-D tensor of integers (in a dict the one called input_ids, tokens, inputs or text), and every
tensor of the same [B, L]. Masks [.., L, L] and positions [L] or [.., B, L] are recognised by name; in tuples a mask is
a boolean 4-D tensor. Everything else, such as images, is returned unchanged. A tensor is any object with `shape`,
`dtype` and `[]`, as in PyTorch and NumPy.

One row with positions [1, L] may be many packed sequences, whose positions restart at 0. Each of them is truncated: the
tokens at positions below c are kept, and the ends of the sequences (`cu_seq_lens_q`) move accordingly.
"""

# B batch, L length of the batch, c length to cut to, k rows made of one

import copy
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Literal

Mode = Literal["truncate", "reshape"]

LEADERS = ("input_ids", "tokens", "inputs", "text", "inputs_embeds")  # the first found gives the length of the batch
FOLLOWERS = ("labels", "targets", "shift_labels", "loss_mask", "token_type_ids")  # must have that length too
MASKS = ("attention_mask", "attn_mask")
POSITIONS = ("position_ids", "positions", "cache_position")
ENDS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens")  # of packed sequences: [0, first end, .., L]
LONGEST = ("max_length_q", "max_length_k", "max_seqlen")  # of packed sequences


def cut(batch: Any, length: int, *, mode: Mode = "truncate", extra: int = 0) -> Any:
    """A batch of the same type with sequences of `length` tokens; the batch itself if nothing is longer.

    The given batch is never modified.

    Args:
        batch: a mapping (dict, Hugging Face `BatchEncoding`), a tuple, list or NamedTuple, or one tensor.
        extra: 1 for text that includes its targets, one token longer than its inputs: keep length + 1 tokens.
    """
    if length < 1:
        raise ValueError(f"length={length} would leave an empty batch; try length=8")
    if mode == "reshape" and extra:
        raise ValueError("mode='reshape' needs targets that are already shifted; shift first, then cut with extra=0")
    if isinstance(batch, Mapping):
        return _cut_mapping(batch, length, mode, extra)
    if isinstance(batch, tuple | list):
        return _cut_sequence(batch, length, mode, extra)
    if not hasattr(batch, "shape"):
        raise ValueError(f"a batch is a dict, a tuple, a list or a tensor, got {type(batch).__name__}; cut its tensors")
    return _cut_sequence((batch,), length, mode, extra)[0]


def kept(row: int, length: int, mode: Mode) -> int:
    """The number of tokens kept of a row of `row` tokens."""
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
        kept = _copied(x[:, : self.pieces * self.after])
        return kept if self.pieces == 1 else kept.reshape(-1, self.after, *x.shape[2:])

    def positions(self, name: str, x: Any) -> Any:
        """[L], [B, L] or [.., B, L]; the pieces of a row keep their positions in the row."""
        if len(x.shape) == 2 and tuple(x.shape) == (self.rows, self.before):
            return self.sequence(x)
        if not x.shape or x.shape[-1] != self.before:
            return x
        if self.pieces > 1:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, but mode='reshape' needs positions for each row of tokens; "
                f"try shape {(self.rows, self.before)}, or leave them out"
            )
        return _copied(x[..., : self.after])

    def mask(self, name: str, x: Any) -> Any:
        """[B, L], [L, L], or [.., L, L] in which either L may be 1."""
        if len(x.shape) == 2 and (x.shape[0] == self.rows or x.shape[0] != self.before):
            return self.sequence(x) if x.shape[1] == self.before else x
        if len(x.shape) < 2 or self.before not in tuple(x.shape[-2:]):
            return x
        if self.pieces > 1:
            return self._diagonal(name, x)
        rows, columns = (slice(self.after) if size == self.before else slice(None) for size in x.shape[-2:])
        return _copied(x[..., rows, columns])

    def _diagonal(self, name: str, x: Any) -> Any:
        """[B, h, L, L] -> [B * k, h, c, c]: each piece attends to itself only."""
        if len(x.shape) != 4 or x.shape[2] != x.shape[3]:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; mode='reshape' supports masks [B, L] or [B, 1, L, L]")
        k, c, each = self.pieces, self.after, list(range(self.pieces))
        blocks = x[..., : k * c, : k * c].reshape(*x.shape[:2], k, c, k, c)
        # Two index lists with a slice between them put their common axis first: [k, B, h, c, c].
        blocks = blocks[:, :, each, :, each]
        if x.shape[0] == self.rows:
            return _copied(blocks.swapaxes(0, 1).reshape(-1, x.shape[1], c, c))
        if not bool((blocks == blocks[:1]).all()):
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, one for all rows, and differs from piece to piece of a row; give "
                f"one for each of the {self.rows} rows"
            )
        return _copied(blocks[0])

    def check_uncut(self, name: str, x: Any) -> None:
        """Refuse a tensor that is not cut if its number of rows would be wrong."""
        if self.pieces > 1 and _is_tensor(x) and x.shape and x.shape[0] == self.rows:
            raise ValueError(
                f"each row is split into {self.pieces}, but {name} of shape {tuple(x.shape)} has no time dimension; "
                "try cut_mode='truncate'"
            )


def _cut_mapping(batch: Mapping[str, Any], length: int, mode: Mode, extra: int) -> Any:
    name = next((name for name in LEADERS if _is_text(batch.get(name), name)), None)
    plan = _plan(batch[name], length, mode, extra) if name else None
    if plan is None:
        return batch
    packed = _packed(batch, plan)
    # A copy keeps the type: a BatchEncoding has more than its keys.
    result = copy.copy(batch) if isinstance(batch, MutableMapping) else dict(batch)
    for name, value in batch.items():
        part = _cut_tensor(name, value, plan, name in MASKS) if packed is None else _keep(name, value, plan, packed)
        if part is not value:
            result[name] = part
    return result


def _packed(batch: Mapping[str, Any], plan: _Cut) -> Any:
    """Which tokens of one row of packed sequences to keep, [L]; None if it is not one."""
    positions = next((batch[name] for name in POSITIONS if _is_tensor(batch.get(name))), None)
    ends = next((name for name in ENDS if batch.get(name) is not None), None)
    if positions is None or tuple(positions.shape) != (1, plan.before):
        if ends is not None:
            got = "none" if positions is None else f"those of shape {tuple(positions.shape)}"
            raise ValueError(
                f"{ends} holds the ends of packed sequences; to cut them, the batch needs position_ids of shape "
                f"{(1, plan.before)}, got {got}"
            )
        return None
    if ends is None and not bool((positions[0, 1:] == 0).any()):
        return None
    if plan.mode == "reshape":
        raise ValueError("one row of packed sequences cannot be split into pieces; try cut_mode='truncate'")
    return positions[0] < plan.after


def _keep(name: str, value: Any, plan: _Cut, kept: Any) -> Any:
    """Those tokens of a tensor [1, L, ...], and where sequences end then. A mask of pairs of tokens is refused."""
    if name in ENDS and value is not None:
        ends = _copied(value)
        ends[1:] = kept.cumsum(0)[value[1:] - 1]
        return ends
    if name in LONGEST and value is not None:
        return min(value, plan.after)
    if not _is_tensor(value) or tuple(value.shape[:2]) != (1, plan.before):
        if name in MASKS and _is_tensor(value) and value.shape and value.shape[-1] == plan.before:
            raise ValueError(f"{name} of shape {tuple(value.shape)} beside one row of packed sequences; leave it out")
        return value
    return value[:, kept]


def _cut_tensor(name: str, value: Any, plan: _Cut, is_mask: bool) -> Any:
    if not _is_tensor(value):
        return value
    if is_mask:
        return plan.mask(name, value)
    if name in POSITIONS:
        return plan.positions(name, value)
    if tuple(value.shape[:2]) == (plan.rows, plan.before) and (len(value.shape) == 2 or name == "inputs_embeds"):
        return plan.sequence(value)
    if name in FOLLOWERS and _is_text(value):
        raise ValueError(
            f"{name} has shape {tuple(value.shape)} beside tokens of shape {(plan.rows, plan.before)}, so a cut would "
            "not keep them aligned; shift targets before the cut and keep all positions"
        )
    plan.check_uncut(name, value)
    return value


def _cut_sequence(batch: Any, length: int, mode: Mode, extra: int) -> Any:
    text = next((value for value in batch if _is_text(value)), None)
    plan = None if text is None else _plan(text, length, mode, extra)
    parts = []
    for i, value in enumerate(batch):
        if isinstance(value, Mapping | tuple | list):
            parts.append(cut(value, length, mode=mode, extra=extra))
        elif plan is None or not _is_tensor(value):
            parts.append(value)
        else:  # a 4-D tensor that is not boolean may be an image as large as the text is long
            is_mask = len(value.shape) == 4 and "bool" in str(value.dtype)
            parts.append(_cut_tensor(f"batch[{i}]", value, plan, is_mask))
    if all(part is value for part, value in zip(parts, batch, strict=True)):
        return batch
    # The constructor of a NamedTuple takes its fields one by one.
    return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)


def _plan(text: Any, length: int, mode: Mode, extra: int) -> _Cut | None:
    """How to cut the batch of this text; None if it is short enough."""
    rows, before = text.shape[:2]
    return _Cut(rows=rows, before=before, after=length + extra, mode=mode) if before > length + extra else None


def _is_text(value: Any, name: str = "") -> bool:
    if not _is_tensor(value):
        return False
    if name == "inputs_embeds":
        return len(value.shape) == 3
    return len(value.shape) == 2 and not any(kind in str(value.dtype) for kind in ("float", "complex", "bool"))


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _copied(part: Any) -> Any:
    """A view would keep the whole batch in memory, and writing to it would change the batch."""
    return part.clone() if hasattr(part, "clone") else part.copy()
