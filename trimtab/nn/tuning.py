"""From how many tokens a linear layer is faster in int8 than in float32: measured once per machine and shape.

    forward + backward of n_in x n_out, at 4096, 1024, 256 and 64 tokens, in float32 and in int8
    int8_from(n_in, n_out) -> the smallest of these numbers from which int8 gains 3 % or more, or NEVER

A measurement takes a few hundred milliseconds and is kept in a file of the cache folder (Linux:
~/.cache/trimtab/int8.json), by CPU, instruction set, threads and version of PyTorch, or by GPU, dtype and Triton;
`trimtab doctor --tune` measures ahead on the CPU. One that other processes disturbed is used once and not kept. A layer
asks once and keeps the answer. Without a file every process measures again, and may decide differently where the two
are close; `convert_linears(..., when=report.int8_from)` repeats the choices of another run.
"""

import json
import os
import secrets
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from platformdirs import user_cache_path
from torch import Tensor

from trimtab.nn.kinds import SwitchBack
from trimtab.ops import backends
from trimtab.ops.fingerprint import fingerprint
from trimtab.ops.float32.product import product_nn, product_nt, product_tn

NEVER = 2**62
GAIN = 1.03  # int8 rounds, so it is not chosen for less
TOKENS = (4096, 1024, 256, 64)
LARGEST = 2**32  # multiply-adds of a measured product; larger ones take too long
GPU_TOKENS, GPU_LARGEST = (16384, 4096, 1024, 256), 2**40
CPU = torch.device("cpu")
ROUNDS, BUDGET_S = 9, 0.06  # per number of tokens: at least 3 rounds
ALONE = 0.7  # share of the CPU time below which other processes disturbed a measurement: it is not stored
FORMAT = 1

Times = dict[str, list[float]]  # tokens -> milliseconds in float32 and in int8


def int8_from(n_in: int, n_out: int, device: torch.device = CPU, dtype: torch.dtype = torch.float32) -> int:
    """The smallest number of tokens from which int8 gains on this device, or NEVER. `dtype` counts on a GPU only."""
    if device.type == "cuda" and backends.triton_missing is None:
        return _choose(_measure(n_in, n_out, _gpu(device, dtype), device, dtype))
    if device.type not in ("cpu", "meta") or backends.int8_product()[0] == "reference":
        return NEVER
    return _choose(measure(n_in, n_out))


# torch.compile calls it while compiling, and takes the result as a constant.
int8_from._dynamo_marked_constant = True  # type: ignore[attr-defined]


def measure(n_in: int, n_out: int) -> Times:
    """Milliseconds of a layer's forward and backward, from the cache or measured now."""
    return _measure(n_in, n_out, machine(), CPU, torch.float32)


def machine() -> str:
    """What a measurement depends on besides the shape."""
    assert backends.native is not None or backends.int8_product()[0] != "native"
    level = "none" if backends.native is None else f"{backends.native.level()} {backends.native.SOURCES[:12]}"
    product = f"int8 {backends.int8_product()[0]}, float32 {backends.float_product()[0]}"
    return f"{_cpu_model()}; kernels {level}; {product}; {torch.get_num_threads()} threads; torch {torch.__version__}"


def _gpu(device: torch.device, dtype: torch.dtype) -> str:
    """The same for a GPU."""
    name, triton = torch.cuda.get_device_name(device), metadata.version("triton")
    return f"{name}; {str(dtype).removeprefix('torch.')}; triton {triton}; torch {torch.__version__}"


@cache
def _measure(n_in: int, n_out: int, where: str, device: torch.device, dtype: torch.dtype) -> Times:
    path, shape = cache_file(), f"{n_in}x{n_out}"
    known = {} if path is None else _read(path)
    found = known.get(where, {}).get(shape)
    if found is None:
        found, share = _time_shape(n_in, n_out, device, dtype)
        if path is not None and share >= ALONE:
            _add(path, where, shape, found)
    return found


def _choose(times: Times) -> int:
    """Downwards from the largest number of tokens, as long as int8 gains."""
    chosen = NEVER
    for tokens in sorted(map(int, times), reverse=True):
        in_float, in_int8 = times[str(tokens)]
        if in_float < GAIN * in_int8:
            break
        chosen = tokens
    return chosen


# --- Timing. The products of a layer without its module: the layer itself asks for the result.


@torch.inference_mode(False)
@torch.no_grad()
def _time_shape(n_in: int, n_out: int, device: torch.device, dtype: torch.dtype) -> tuple[Times, float]:
    """Also the smallest share of the CPU time that the process could have had."""
    generator = torch.Generator(device).manual_seed(0)  # the random numbers of a run must not change
    on_cpu = device.type == "cpu"
    usual, largest = (TOKENS, LARGEST) if on_cpu else (GPU_TOKENS, GPU_LARGEST)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    w, times, share = draw(n_out, n_in), Times(), 1.0
    fits = [tokens for tokens in usual if tokens * n_in * n_out <= largest] or [usual[-1]]
    for tokens in fits:
        x, g = draw(tokens, n_in), draw(tokens, n_out)
        best, had = _time_both(partial(_run_float, x, w, g), partial(_run_int8, x, w, g))
        had = had if on_cpu else 1.0
        times[str(tokens)], share = [round(ms, 4) for ms in best], min(share, had)
        if _choose(times) != tokens:
            break  # no smaller number can be chosen
    return times, share


def _time_both(*runs: Callable[[], None]) -> tuple[list[float], float]:
    """The best milliseconds of each, alternating, after one round that does not count; and the share of CPU time."""
    for run in runs:
        run()
    best, begun, used = [float("inf")] * len(runs), time.perf_counter(), time.process_time()
    for round_ in range(ROUNDS):
        for k, run in enumerate(runs):
            start = time.perf_counter()
            run()
            best[k] = min(best[k], 1e3 * (time.perf_counter() - start))
        if round_ >= 2 and time.perf_counter() - begun > BUDGET_S:
            break
    possible = (time.perf_counter() - begun) * torch.get_num_threads()
    return best, (time.process_time() - used) / possible


def _run_float(x: Tensor, w: Tensor, g: Tensor) -> None:
    product_nt(x, w), product_nn(g, w), product_tn(g, x)
    _wait(x)


def _run_int8(x: Tensor, w: Tensor, g: Tensor) -> None:
    products = SwitchBack()
    if w.device.type == "cpu":
        fingerprint(w)
    codes = products.quantize_weight(w)
    _, kept = products.forward(x, w, codes, None)
    products.grad_input(g, codes)
    products.grad_weight(g, kept)
    _wait(x)


def _wait(x: Tensor) -> None:
    if x.device.type == "cuda":
        torch.cuda.synchronize(x.device)


# --- The cache file: {"format": 1, "machines": {machine: {"768x3072": {"1024": [12.1, 6.5], ...}}}}


def cache_file() -> Path | None:
    """The file of all measurements; None where there is no home folder."""
    chosen = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(chosen).expanduser() / "trimtab" if chosen else user_cache_path("trimtab", appauthor=False)
    except RuntimeError:
        return None
    return folder / "int8.json" if folder.is_absolute() else None


def _read(path: Path) -> dict[str, dict[str, Times]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        if not isinstance(error, OSError):
            _warn_damaged(path)
        return {}
    try:
        found = json.loads(text)
        machines = found["machines"] if found["format"] == FORMAT else None
        if machines is None or not all(_is_times(t) for shapes in machines.values() for t in shapes.values()):
            raise ValueError
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        _warn_damaged(path)
        return {}
    checked: dict[str, dict[str, Times]] = machines
    return checked


def _is_times(value: Any) -> bool:
    return bool(value) and all(
        tokens.isdecimal() and len(pair) == 2 and all(type(ms) in (int, float) and 0 < ms < 1e9 for ms in pair)
        for tokens, pair in value.items()
    )


@cache
def _warn_damaged(path: Path) -> None:
    warnings.warn(
        f"{path} is damaged or from another version, so int8 is measured again and the file is replaced", stacklevel=2
    )


def _add(path: Path, where: str, shape: str, times: Times) -> None:
    """Write the file with one more measurement, under a temporary name first. A folder without access is no error."""
    known = _read(path)
    known.setdefault(where, {})[shape] = times
    work = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        work.write_text(json.dumps({"format": FORMAT, "machines": known}, indent=1), encoding="utf-8")
        os.replace(work, path)
    except OSError:
        with suppress(OSError):
            work.unlink(missing_ok=True)


@cache
def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = ("vendor_id", "cpu family", "model", "model name", "CPU part")
    values = {line.split(":")[0].strip(): line.split(":")[1].strip() for line in lines if ":" in line}
    return " ".join(values[name] for name in named if name in values) or "unknown CPU"
