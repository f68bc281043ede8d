"""The first minute on a GPU: every op, optimizer and layer against its definition. `trimtab doctor --gpu`.

A check yields what is wrong, in words; nothing if all is right. With --interpret the same checks run the GPU kernels on
the CPU, in Triton's interpreter; what needs a real device is listed as not run.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trimtab import optim
from trimtab.nn.linear import SwitchBackLinear
from trimtab.ops import backends, blockwise, float8, gelu, int8
from trimtab.ops.checks import FLOATS
from trimtab.ops.codebook import load_codebook
from trimtab.ops.doctor import CHECKS
from trimtab.ops.step import RULES, fused
from trimtab.ops.step.rules import DECAY, GRAD_SCALE, LR, adam_averages, rows
from trimtab.ops.step.storage import Batch, Storage, encode_flat

SIZES = (1, 63, 256, 257, 1031, 5003)  # below, at and above a block; primes; more than a tile
FEW = (1, 63, 257)  # for the interpreter, which takes a minute for the others
STEPS = 20
LIMITS = {32: 1e-5, 8: 0.05}  # of the error over the way gone, by the bits of the state
SIGNS = 0.2  # the same for Lion with 8 bits: where m is near zero, rounding it changes the sign of the whole step
Wrong = Iterator[str]


@dataclass(frozen=True)
class Result:
    name: str
    wrong: list[str]
    not_run: str | None = None


def examine_gpu(device: torch.device) -> Iterator[Result]:
    """One result per check, as soon as it is there."""
    checks: dict[str, Callable[[torch.device], Wrong]] = {
        "ops on small inputs": _small,
        "block-wise quantization": _blockwise,
        "int8 quantization and products": _int8,
        "fused steps": _steps,
        "GELU": _gelu,
        f"optimizers, {STEPS} steps against float64": _optimizers,
        "linear layers against float": _layers,
        "a step in a CUDA graph": _graph,
        "a step on another stream": _stream,
    }
    real = ("a step in a CUDA graph", "a step on another stream")
    for name, check in checks.items():
        if name in real and device.type != "cuda":
            yield Result(name, [], "needs a GPU")
            continue
        try:
            with np.errstate(all="ignore"):  # of Triton's interpreter, where values overflow on purpose
                wrong = list(check(device))
            yield Result(name, wrong)
        except Exception as error:  # whatever it is, it goes into the report
            yield Result(name, [f"{type(error).__name__}: {error}"])
    reason = float8.why_simulated(device)
    if reason is not None:
        yield Result("float8 products", [], reason)


# --- Ops


def _small(device: torch.device) -> Wrong:
    for op, check in CHECKS.items():
        if "triton" in backends.OPS[op] and not check(str(device)):
            yield op


def _sizes(device: torch.device) -> tuple[int, ...]:
    return SIZES if device.type == "cuda" else FEW


def _values(size: int, device: torch.device, dtype: torch.dtype = torch.float32, *, seed: int = 0) -> Tensor:
    """Values of very different sizes, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    x, spread = (torch.randn(size, generator=generator) for _ in range(2))
    return (x * 10 ** (spread / 2)).to(device, dtype)


def _same(*pairs: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in pairs)


def _blockwise(device: torch.device) -> Wrong:
    for signed in (True, False):
        book = load_codebook(signed=signed).to(device)
        for size in _sizes(device):
            for dtype in FLOATS:
                x = _values(size, device, dtype)
                expected = blockwise.quantize_reference(x, book, 256)
                if not _same(*zip(blockwise.quantize_blockwise(x, book), expected, strict=True)):
                    yield f"quantize_blockwise of {size} values in {dtype}"
                back = blockwise.dequantize_reference(*expected, book, 256, dtype)
                if not _same((blockwise.dequantize_blockwise(*expected, book, dtype=dtype), back)):
                    yield f"dequantize_blockwise of {size} values to {dtype}"


def _int8(device: torch.device) -> Wrong:
    for m, k, n in ((1, 1, 1), (5, 17, 3), (33, 64, 48), (65, 130, 129), (17, 256, 32)):
        for dtype in FLOATS:
            x, w = _values(m * k, device, dtype).view(m, k), _values(n * k, device, dtype, seed=1).view(n, k)
            for dim in (0, 1):
                quantize = int8.quantize_columnwise if dim == 0 else int8.quantize_rowwise
                if not _same(*zip(quantize(x), int8.quantize_reference(x, dim), strict=True)):
                    yield f"quantize_int8 of {m} x {k} in {dtype}, dim {dim}"
            codes, absmax = int8.quantize_rowwise(x)
            weight, transposed, scale = int8.quantize_both_layouts(w)
            if not _same((weight, int8.quantize_tensorwise(w)[0]), (transposed, weight.t())):
                yield f"quantize_both_layouts of {n} x {k} in {dtype}"
            kept = int8.empty_both_layouts(w)
            for changed in (w, w, -w):
                int8.requantize_both_layouts(changed, *kept)
                if not _same(*zip(kept[:3], int8.both_layouts_reference(changed), strict=True)):
                    yield f"requantize_both_layouts of {n} x {k} in {dtype}"
            bias = _values(n, device, dtype, seed=2)
            for b in (weight.t(), weight.t().contiguous()):
                expected = int8.matmul_reference(codes, b, absmax, scale, bias, dtype)
                if not _same((int8.int8_matmul(codes, b, absmax, scale, bias, dtype=dtype), expected)):
                    yield f"int8_matmul of {m} x {k} by {k} x {n} to {dtype}"


def _steps(device: torch.device) -> Wrong:
    """Every rule: 8-bit state in both codes and 32-bit state, in one call with tensors of all sizes."""
    steps = torch.full((len(_sizes(device)),), 3.0, device=device)
    averages = adam_averages((0.9, 0.99), steps.double())
    more = {"beta3": 0.95, "gain3": 0.05, "mix_m": 0.7, "mix_g": 0.3, "decay": 0.99, "lr": 0.01, "eps": 1e-8}
    table = rows(steps, **averages, **more)
    for rule, meaning in RULES.items():
        for code, bits in (("quadratic", 8), ("codebook", 8), ("codebook", 32)):
            if code == "quadratic" and "centered" in rule:
                continue  # has 32-bit state
            for dtype in FLOATS:
                given = _step_arguments(meaning.states, bits, code, dtype, device)
                tensors = [given.params, given.grads, given.states, given.absmax]
                both = [[[x.clone() for x in group] for group in tensors] for _ in range(2)]
                rest = (table, *(load_codebook(signed=s).to(device) for s in (True, False)), rule, code, 256, [])
                fused.step_unchecked(*both[0], *rest)
                fused.step_reference(*both[1], *rest)
                pairs = [(a, b) for x, y in zip(*both, strict=True) for a, b in zip(x, y, strict=True)]
                if not _same(*pairs):
                    yield f"fused_step of {rule}, {bits}-bit state ({code}), {dtype}"


def _step_arguments(states: str, bits: int, code: str, dtype: torch.dtype, device: torch.device) -> fused.Arguments:
    """Parameters, gradients and a state after one step from zero, by the reference."""
    sizes = _sizes(device)
    params, grads = ([_values(size, device, dtype, seed=k) for size in sizes] for k in (0, 1))
    moments = [[_values(size, device, seed=2 + i) for size in sizes] for i in range(len(states))]
    moments[-1] = [x.square() for x in moments[-1]] if states[-1] == "v" else moments[-1]
    if bits == 32:
        return _arguments(params, grads, [x for group in moments for x in group], [])
    storage = Storage(8, 256, "quadratic" if code == "quadratic" else "dynamic-symmetric")
    stored = [encode_flat([group[i] for group in moments], states, storage) for i in range(len(sizes))]
    flat = [stored[i][k] for k in range(len(states)) for i in range(len(sizes))]
    return _arguments(params, grads, [codes for codes, _ in flat], [absmax for _, absmax in flat])


def _arguments(params: Any, grads: Any, states: Any, absmax: Any) -> fused.Arguments:
    empty = torch.empty(0)
    return fused.Arguments(params, grads, states, absmax, empty, empty, empty, "", "", 256)


def _gelu(device: torch.device) -> Wrong:
    for size in _sizes(device):
        x = _values(size, device)
        exact = gelu.gelu_reference(x.double())
        if not torch.allclose(gelu.gelu(x).double(), exact, rtol=1e-5, atol=1e-30):
            yield f"gelu of {size} values"


# --- Optimizers


def _optimizers(device: torch.device) -> Wrong:
    for name in optim.__all__:
        kind = getattr(optim, name)
        if not (isinstance(kind, type) and issubclass(kind, optim.Optimizer)) or kind is optim.Optimizer:
            continue
        if name.startswith("Adafactor"):
            continue  # has no kernel
        for bits in (32, 8):
            error = _drift(kind, bits, device)
            if not error <= (SIGNS if name == "Lion" and bits == 8 else LIMITS[bits]):
                yield f"{name} with {bits}-bit state is {error:.2g} away from float64"


def _drift(kind: type[optim.Optimizer], bits: int, device: torch.device) -> float:
    """|p - p64| / |p64 - p0|, less the rounding of p itself. p64 follows the same coefficients, without rounding."""
    params = [nn.Parameter(_gaussian(size, device, seed=0)) for size in _sizes(device)[-2:]]
    before = [p.detach().double() for p in params]
    own = {"momentum": 0.9} if kind is optim.SGD else {}
    optimizer = kind(params, lr=1e-2, bits=bits, min_8bit_size=1, **own)  # type: ignore[call-arg, arg-type]
    shadow = _Shadow(optimizer, params)
    for step in range(STEPS):
        for k, p in enumerate(params):
            p.grad = _gaussian(p.numel(), device, seed=10 + 2 * step + k)
        optimizer.step()
    mine, exact, start = (torch.cat([x.detach().double() for x in xs]) for xs in (params, shadow.params, before))
    away = (mine - exact).norm() - STEPS * 2.0**-24 * exact.norm()
    return float(away / (exact - start).norm())


def _gaussian(size: int, device: torch.device, *, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(device)


class _Shadow:
    """The same updates in float64, with the coefficients that the optimizer computes."""

    def __init__(self, optimizer: optim.Optimizer, params: list[nn.Parameter]) -> None:
        self.params = [p.detach().double() for p in params]
        self._moments: dict[int, list[Tensor]] = {}
        self._apply, self._initial = optimizer._apply, optimizer.initial
        optimizer._apply = self._follow  # type: ignore[method-assign, assignment]

    def _follow(self, batch: Batch, table: Tensor) -> None:
        for k, p in enumerate(batch.owners):
            where = batch.where[k]
            assert p.grad is not None
            row, rule, first = table[k].double().tolist(), RULES[str(batch.rule)], self._initial(batch.group)
            kept = self._moments.get(where) or [torch.full_like(self.params[where], first) for _ in rule.states]
            update, moments = rule.update(self.params[where], p.grad.double() * row[GRAD_SCALE], *kept, row)
            self._moments[where] = list(moments)
            self.params[where] = row[DECAY] * self.params[where] - row[LR] * update
        self._apply(batch, table)


# --- Layers


def _layers(device: torch.device) -> Wrong:
    kinds = ("switchback", "switchback-m", "switchback-q", "llm-int8", "fp8-switchback", "fp8-tensorwise")
    for kind in kinds:
        for n_in, n_out, tokens in ((96, 48, 17), (33, 65, 5)):
            for dtype in (torch.float32, torch.bfloat16):
                limit = 0.08 if kind.startswith("fp8") else 0.03
                for what, error in _layer_errors(kind, n_in, n_out, tokens, dtype, device):
                    if not error < limit:
                        yield f"{what} of {kind}, {n_in} x {n_out}, {dtype}: off by {error:.2g}"
        yield from _frozen(kind, device)
        yield from _changed(kind, device)


def _changed(kind: Any, device: torch.device) -> Wrong:
    """In training, codes are kept from call to call until the weight changes, also behind PyTorch's back."""
    layer = SwitchBackLinear(96, 48, device=device, kind=kind)
    x = _gaussian(5 * 96, device, seed=1).view(5, 96).requires_grad_()
    plain = layer(x)
    if not torch.equal(layer(x), plain):
        yield f"{kind}: a second call gives another result"
    for p in layer.parameters():
        p.data.mul_(2)
    if not torch.allclose(layer(x), 2 * plain, rtol=1e-5):
        yield f"{kind}: a write through .data is not noticed"


def _frozen(kind: Any, device: torch.device) -> Wrong:
    """Frozen codes give the same result, until the weight changes."""
    layer = SwitchBackLinear(96, 48, device=device, kind=kind).eval()
    x = _gaussian(5 * 96, device, seed=1).view(5, 96)
    with torch.no_grad():
        plain = layer(x)
        layer.freeze()
        if not torch.equal(layer(x), plain):
            yield f"{kind} after freeze()"
        layer.weight.mul_(2)
        layer.bias.mul_(2)  # type: ignore[union-attr]
        if not torch.allclose(layer(x), 2 * plain, rtol=1e-5):
            yield f"{kind}: a changed weight after freeze() is not noticed"


def _layer_errors(
    kind: Any, n_in: int, n_out: int, tokens: int, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, float]]:
    """The relative errors of Y, dX and dW against float64."""
    generator = torch.Generator().manual_seed(0)
    x, g, w = (torch.randn(*s, generator=generator) for s in ((tokens, n_in), (tokens, n_out), (n_out, n_in)))
    layer = SwitchBackLinear(n_in, n_out, device=device, dtype=dtype, kind=kind)
    with torch.no_grad():
        layer.weight.copy_(w)
    mine = x.to(device, dtype, copy=True).requires_grad_()
    y = layer(mine)
    y.backward(g.to(device, dtype))
    weight, bias = layer.weight.detach().double().cpu(), layer.bias.detach().double().cpu()  # type: ignore[union-attr]
    x, g = x.to(dtype).double(), g.to(dtype).double()
    expected = {"Y": x @ weight.t() + bias, "dX": g @ weight, "dW": g.t() @ x}
    assert mine.grad is not None
    assert layer.weight.grad is not None
    for (what, exact), got in zip(expected.items(), (y, mine.grad, layer.weight.grad), strict=True):
        yield what, float((got.detach().double().cpu() - exact).norm() / exact.norm())


# --- What only a device has


def _pair(device: torch.device) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    first, second = ([nn.Parameter(_values(size, device)) for size in (5003, 257)] for _ in range(2))
    for k, (p, q) in enumerate(zip(first, second, strict=True)):
        p.grad, q.grad = (_values(p.numel(), device, seed=5 + k) for _ in range(2))
    return first, second


def _graph(device: torch.device) -> Wrong:
    for kind in (optim.AdamW, optim.StableAdamW):
        for bits in (8, 32):
            eager, captured = _pair(device)
            one, two = (kind(p, lr=1e-2, bits=bits, min_8bit_size=1) for p in (eager, captured))
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                two.step()  # makes the state
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                two.step()
            for _ in range(3):
                graph.replay()
            for _ in range(4):
                one.step()
            if not _same(*zip(eager, captured, strict=True)):
                yield f"{kind.__name__} with {bits}-bit state: three replays differ from three steps"


def _stream(device: torch.device) -> Wrong:
    for bits in (8, 32):
        plain, other = _pair(device)
        one, two = (optim.StableAdamW(p, lr=1e-2, bits=bits, min_8bit_size=1) for p in (plain, other))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        for _ in range(3):
            one.step()
            with torch.cuda.stream(side):
                two.step()
        torch.cuda.synchronize()
        if not _same(*zip(plain, other, strict=True)):
            yield f"StableAdamW with {bits}-bit state"
