"""Which parameter a tensor is, also after a host has replaced the tensors.

Accelerate replaces the parameters of an optimizer by shards (FSDP2), DeepSpeed by float32 copies. What the optimizer
knows of a parameter (its name, why it keeps 32-bit state) is therefore kept by its place in its group. A tensor that is
met for the first time at a step gets the knowledge of its place. ZeRO and FSDP1 concatenate parameters to flat
tensors, which have no such place: they are refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor

FLATTENED = (
    "names, keep32, min_8bit_size, RMS_t and trust ratios would be those of the piece, not of the layers. Use FSDP2 "
    "(fully_shard), DDP, or DeepSpeed with ZeRO stage 0, which keep each tensor"
)


@dataclass(frozen=True)
class Place:
    """One parameter of a group. The tensor is not kept alive: hosts replace it to free its memory."""

    tensor: "ref[Tensor]"
    shape: torch.Size | None  # None: not initialized yet
    trained: bool  # False: frozen when the optimizer was made; DeepSpeed leaves these out
    name: str
    exempt: str | None  # why it keeps 32-bit state


class Places:
    """The places of all groups, in the order of the groups."""

    def __init__(self) -> None:
        self._groups: list[list[Place]] = []
        self._by_id: dict[int, Place] = {}

    def add(self, group: Mapping[str, Any], exempt: Sequence[str | None]) -> None:
        number, params = len(self._groups), group["params"]
        names = group.get("param_names") or [f"group {number}, parameter {k}" for k in range(len(params))]
        made = [
            Place(ref(p), _shape(p), p.requires_grad, *kept) for p, *kept in zip(params, names, exempt, strict=True)
        ]
        self._groups.append(made)
        self._by_id |= {id(p): place for p, place in zip(params, made, strict=True)}

    def find(self, p: Tensor) -> Place | None:
        """None: the tensor is new here."""
        place = self._by_id.get(id(p))
        return place if place is not None and place.tensor() is p else None

    def match(self, groups: Sequence[Mapping[str, Any]]) -> list[Sequence[Place]]:
        """The places of the tensors that the groups have now. Flattened tensors are refused."""
        known = self._groups
        if len(known) != len(groups):  # DeepSpeed removes empty groups
            known = [places for places in known if places]
        if len(known) != len(groups):
            raise ValueError(
                f"this optimizer was made with {len(known)} parameter groups, and now has {len(groups)} with "
                f"unknown parameters; {FLATTENED}"
            )
        return [self._match(group["params"], places) for group, places in zip(groups, known, strict=True)]

    def move(self, groups: Sequence[dict[str, Any]], places: Sequence[Sequence[Place]]) -> None:
        """From now on these are the tensors of these places."""
        self._groups, self._by_id = [], {}
        for group, before in zip(groups, places, strict=True):
            if "param_names" in group:
                group["param_names"] = [place.name for place in before]
            pairs = zip(before, group["params"], strict=True)
            self._groups.append([replace(place, tensor=ref(p), shape=_shape(p)) for place, p in pairs])
            self._by_id |= {id(p): place for p, place in zip(group["params"], self._groups[-1], strict=True)}

    def _match(self, params: Sequence[Tensor], places: Sequence[Place]) -> Sequence[Place]:
        """All places of the group, or all that are trained."""
        found = [place for p in params if (place := self.find(p)) is not None]
        if len(found) == len(params):
            return found
        for candidates in (places, [place for place in places if place.trained]):
            if len(candidates) == len(params) and all(map(_fits, candidates, params)):
                return candidates
        raise ValueError(
            f"the {len(places)} parameters of a group ({', '.join(place.name for place in places[:3])}, …) have been "
            f"replaced by {len(params)} of other shapes, the first with {tuple(params[0].shape)}: pieces of several "
            f"concatenated parameters (ZeRO stages 1 to 3, FSDP1), or new layers. Of pieces, {FLATTENED}. For new "
            "layers make a new optimizer, or call add_param_group"
        )


def _fits(place: Place, p: Tensor) -> bool:
    """A parameter may grow or shrink, but a flat tensor in place of a matrix is a partition."""
    return place.shape is None or len(place.shape) == p.dim()


def _shape(p: Tensor) -> torch.Size | None:
    return None if torch.nn.parameter.is_lazy(p) else p.shape
