"""The random generators of a process: saved with a checkpoint, given back by a resume, or seeded anew."""

import hashlib

import torch


def read_generators(device: torch.device) -> dict[str, str]:
    """Their states in hexadecimal, for JSON."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {name: bytes(x.tolist()).hex() for name, x in states.items()}


def mix_seed(seed: int, step: int, rank: int) -> int:
    """A seed for each process that starts anew at some step."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{step}:{rank}".encode()).digest()[:7], "big")


def restore_generators(states: dict[str, str], device: torch.device) -> None:
    torch.set_rng_state(torch.tensor(list(bytes.fromhex(states["cpu"])), dtype=torch.uint8))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(torch.tensor(list(bytes.fromhex(states["cuda"])), dtype=torch.uint8), device)
