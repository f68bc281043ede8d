"""The states of the random generators of a process, for checkpoints, and seeds for new ones."""

import hashlib

import torch


def read_generators(device: torch.device) -> dict[str, str]:
    """The states as hexadecimal text, for JSON."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {name: bytes(x.tolist()).hex() for name, x in states.items()}


def restore_generators(states: dict[str, str], device: torch.device) -> None:
    tensors = {name: torch.tensor(list(bytes.fromhex(x)), dtype=torch.uint8) for name, x in states.items()}
    torch.set_rng_state(tensors["cpu"])
    if device.type == "cuda" and "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"], device)


def mix_seed(seed: int, step: int, rank: int) -> int:
    """A seed for a process that starts at some step without a saved state."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{step}:{rank}".encode()).digest()[:7], "big")
