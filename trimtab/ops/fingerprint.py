"""A 64-bit fingerprint of a tensor's bytes, to detect changes.

PyTorch's version counter does not count writes through `.data`, nor FSDP's writes to a parameter. So values derived
from a weight (its int8 codes) are cached together with the weight's fingerprint. Reading the bytes once takes a third
of the time of quantizing them.

    word by word, in eight lanes:      h <- rotate((h ^ word) * P, 31)

The order of the words matters, and each step is invertible: two tensors that differ in one word never have the same
fingerprint, others with a probability of 2^-64. It is not a cryptographic hash.

Kernel: fingerprint.cpp (CPU).
"""

import torch
from torch import Tensor

from trimtab.ops import backends

P = 0x9E3779B97F4A7C15
LANES, ROUNDS = 8, 64
CHUNK = 8 * LANES * ROUNDS  # bytes that are hashed separately, so that threads can share the work
_MASK = 2**64 - 1


def fingerprint(x: Tensor) -> int:
    """The fingerprint of a CPU tensor, read in the order of its dimensions."""
    if x.device.type != "cpu":
        raise ValueError(f"fingerprint reads CPU memory, got a tensor on {x.device}")
    x = x.detach().contiguous()
    if backends.native is None:
        return fingerprint_reference(x)
    return int(backends.native.fingerprint(x.data_ptr(), x.nbytes, torch.get_num_threads()))


def fingerprint_reference(x: Tensor) -> int:
    """The definition: the lanes of every chunk in parallel, then the chunks and the length in order."""
    data = x.detach().contiguous().view(-1).view(torch.uint8) if x.numel() else torch.empty(0, dtype=torch.uint8)
    chunks = -(-len(data) // CHUNK)
    padded = torch.zeros(chunks * CHUNK, dtype=torch.uint8)
    padded[: len(data)] = data
    words = padded.view(torch.int64).view(chunks, ROUNDS, LANES)
    h = torch.arange(1, LANES + 1).expand(chunks, LANES)
    for word in words.unbind(dim=1):
        h = _mix(h, word)
    each = torch.zeros(chunks, dtype=torch.int64)
    for lane in h.unbind(dim=1):
        each = _mix(each, lane)
    total = 0
    for word in [*each.tolist(), x.nbytes]:
        product = (total ^ (word & _MASK)) * P & _MASK
        total = (product << 31 | product >> 33) & _MASK
    return total


def _mix(h: Tensor, word: Tensor) -> Tensor:
    product = (h ^ word) * (P - 2**64)  # int64 wraps around, as intended
    return product << 31 | (product >> 33) & (2**31 - 1)
