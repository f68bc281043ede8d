"""What the layers and models cost against PyTorch's nn.Linear and Hugging Face's GPT-2, in one run.

    python -m bench.nn                      everything: about twelve minutes on two cores
    python -m bench.nn --only linear        one part: linear, small, memory, gpt

A layer's time is that of forward and backward together. `speed-up` is time of the baseline over time of the candidate.
Peers that are not installed are left out and said so (`make bench` installs them).
"""

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import tyro
from rich.table import Table
from torch import Tensor, nn

from bench.measure import Bar, Timing, console, interleave, must_call, report
from trimtab.nn.convert import convert_linears
from trimtab.nn.gpt import GPT, GPTConfig
from trimtab.nn.linear import SwitchBackLinear
from trimtab.nn.tuning import NEVER, int8_from
from trimtab.ops import backends

Part = Literal["linear", "small", "memory", "gpt"]
SHAPES = ((4096, 768, 3072), (4096, 1024, 4096))  # tokens, in, out
FLOAT = "nn.Linear, float32"


def main(rounds: int = 7, threads: int = 2, only: Part | None = None) -> None:
    """Measure layers and models.

    Args:
        rounds: how often each layer is timed; whole models are timed three times
        threads: for everything that is measured
        only: one part instead of all
    """
    torch.set_num_threads(threads)
    product, why = backends.int8_product()
    console.print(f"int8 products by {product}: {why}\n", highlight=False)
    parts: dict[Part, Callable[[], list[Bar]]] = {
        "linear": lambda: measure_linear(rounds),
        "small": lambda: measure_small(rounds),
        "memory": measure_memory,
        "gpt": measure_gpt,
    }
    report([bar for name, run in parts.items() if only in (None, name) for bar in run()])


# --- One layer


def measure_linear(rounds: int) -> list[Bar]:
    bars = []
    for tokens, n_in, n_out in SHAPES:
        layers: dict[str, nn.Module] = {FLOAT: nn.Linear(n_in, n_out)}
        for kind in ("switchback", "switchback-m", "switchback-q", "llm-int8", "fp8-switchback"):
            layers[kind] = SwitchBackLinear(n_in, n_out, kind=kind)  # type: ignore[arg-type]
        theirs = torchao_layer(n_in, n_out)
        if theirs is not None:
            layers["torchao, int8 mixed precision"] = theirs
        with must_call("quantize_int8", *(("matmul",) if backends.int8_product()[0] == "native" else ())):
            timings = time_layers(layers, tokens, n_in, n_out, rounds)
        show(f"forward + backward, {tokens} x {n_in} x {n_out}", timings, FLOAT)
        bars.append(
            Bar(
                f"SwitchBack over nn.Linear at {tokens} x {n_in} x {n_out}",
                gain(timings, "switchback", FLOAT),
                1.6,
                True,
            )
        )
    return bars


def time_layers(layers: Mapping[str, nn.Module], tokens: int, n_in: int, n_out: int, rounds: int) -> dict[str, Timing]:
    x, g = torch.randn(tokens, n_in, requires_grad=True), torch.randn(tokens, n_out)

    def step(layer: nn.Module) -> Callable[[], None]:
        def run() -> None:
            layer.zero_grad()
            x.grad = None
            layer(x).backward(g)

        return run

    return interleave({name: step(layer) for name, layer in layers.items()}, rounds)


def measure_small(rounds: int) -> list[Bar]:
    """Around the number of tokens from which a layer chooses int8, and far above."""
    table = Table("in x out", "int8 from", "tokens: speed-up where int8 is chosen", box=None, pad_edge=False)
    worst = float("inf")
    for n_in, n_out in ((256, 256), (512, 512), (768, 768), (768, 3072), (3072, 768), (1024, 4096), (2048, 2048)):
        least = int8_from(n_in, n_out)
        if least == NEVER:
            table.add_row(f"{n_in} x {n_out}", "never", "")
            continue
        shown = []
        for tokens in sorted({least, 2 * least, max(4096, 2 * least)}):
            layers = {FLOAT: nn.Linear(n_in, n_out), "ours": SwitchBackLinear(n_in, n_out, when="faster")}
            many = max(rounds, min(41, int(2e10 / (tokens * n_in * n_out))))
            speed = gain(time_layers(layers, tokens, n_in, n_out, many), "ours", FLOAT)
            worst = min(worst, speed)
            shown.append(f"{tokens}: {speed:.2f}x")
        table.add_row(f"{n_in} x {n_out}", str(least), "   ".join(shown))
    console.print(table, "")
    return [Bar("the smallest speed-up where a layer chooses int8", worst, 1.0, True)] if worst < float("inf") else []


def measure_memory() -> list[Bar]:
    tokens, n_in, n_out = SHAPES[0]
    x = torch.randn(tokens, n_in, requires_grad=True)
    kept: dict[str, int] = {}
    table = Table("kept for the backward pass", "activations, MB", "of float32", box=None, pad_edge=False)
    layers: dict[str, nn.Module] = {FLOAT: nn.Linear(n_in, n_out), "switchback": SwitchBackLinear(n_in, n_out)}
    layers["switchback-m"] = SwitchBackLinear(n_in, n_out, kind="switchback-m")
    for name, layer in layers.items():
        kept[name] = kept_bytes(layer, x)
        table.add_row(name, f"{kept[name] / 2**20:.2f}", f"{kept[name] / kept[FLOAT]:.1%}")
    console.print(table, "")
    return [Bar("SwitchBack-M's saved activations over float32's", kept["switchback-m"] / kept[FLOAT], 0.30)]


def kept_bytes(layer: nn.Module, x: Tensor) -> int:
    """Bytes of what autograd keeps and that depends on x: not the weight, nor its codes."""
    kept: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        if t.dim() and len(t) == len(x):
            kept[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        layer(x)
    return sum(t.untyped_storage().nbytes() for t in kept.values())


# --- A whole model


def measure_gpt(depth: int = 12, width: int = 768, context: int = 512, batch: int = 8) -> list[Bar]:
    """GPT-2's size and shape: biases, learned positions, a tied head, no dropout; the same weights everywhere."""
    config = GPTConfig(
        vocab=50_257,
        depth=depth,
        width=width,
        heads=width // 64,
        context=context,
        bias=True,
        positions="learned",
        tied=True,
        norm_eps=1e-5,
    )
    torch.manual_seed(0)
    plain, quantized = GPT(config), GPT(config)
    theirs = hugging_face(config)
    if theirs is not None:
        copy_weights(theirs, plain)
    quantized.load_state_dict(plain.state_dict())
    convert_linears(quantized, "switchback")
    tokens = torch.randint(0, config.vocab, (batch, context + 1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:].contiguous()
    losses: dict[str, float] = {}

    def step(name: str, model: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            model.zero_grad()
            value = loss()
            value.backward()
            losses[name] = value.item()

        return run

    ours, ours_int8, peer = "trimtab GPT, float32", "trimtab GPT, SwitchBack", "Hugging Face GPT-2, float32"
    runs = {
        ours: step(ours, plain, lambda: plain.loss(inputs, targets).loss),
        ours_int8: step(ours_int8, quantized, lambda: quantized.loss(inputs, targets).loss),
    }
    if theirs is not None:
        # Hugging Face shifts the labels itself, so its last token has none: the same tokens, one fewer is scored.
        runs[peer] = step(peer, theirs, lambda: hugging_face_loss(theirs, inputs, targets))
    timings = interleave(runs, rounds=3)
    show(f"training step, {depth} layers x {width}, context {context}, batch {batch}", timings, ours)
    for name, loss in losses.items():
        console.print(f"  loss {loss:.5f}  {name}", highlight=False)
    bars = [Bar("a GPT step with SwitchBack over float32", gain(timings, ours_int8, ours), 1.25, True)]
    if theirs is not None:
        bars.append(Bar("our float32 GPT over Hugging Face's GPT-2", gain(timings, ours, peer), 1.15, True))
        bars.append(Bar("difference of the two losses", abs(losses[ours] - losses[peer]), 1e-3))
    return bars


def hugging_face(config: GPTConfig) -> Any:
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        console.print("transformers is not installed, so its row is missing; pip install 'trimtab[hf]'\n")
        return None
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=config.vocab,
            n_embd=config.width,
            n_layer=config.depth,
            n_head=config.heads,
            n_positions=config.context,
            resid_pdrop=0.0,
            attn_pdrop=0.0,
            embd_pdrop=0.0,
        )
    ).train()


def hugging_face_loss(model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    return model(inputs, labels=targets, shift_labels=targets).loss


def copy_weights(theirs: Any, ours: GPT) -> None:
    """GPT-2's weights under our names; Conv1D keeps its matrices the other way round."""
    turned = {
        "attn.c_attn": "attention.qkv",
        "attn.c_proj": "attention.out",
        "mlp.c_fc": "mlp.up",
        "mlp.c_proj": "mlp.down",
    }
    state = {
        "embedding.weight": theirs.transformer.wte.weight,
        "positions.weight": theirs.transformer.wpe.weight,
        "norm.weight": theirs.transformer.ln_f.weight,
        "norm.bias": theirs.transformer.ln_f.bias,
    }
    for i, block in enumerate(theirs.transformer.h):
        prefix = f"transformer.blocks.{i}"
        for their_name, our_name in turned.items():
            layer = block.get_submodule(their_name)
            state[f"{prefix}.{our_name}.weight"] = layer.weight.t()
            state[f"{prefix}.{our_name}.bias"] = layer.bias
        for k, norm in ((1, block.ln_1), (2, block.ln_2)):
            state[f"{prefix}.norm{k}.weight"], state[f"{prefix}.norm{k}.bias"] = norm.weight, norm.bias
    ours.load_state_dict(state, strict=True)


# --- Tables


def torchao_layer(n_in: int, n_out: int) -> nn.Module | None:
    """torchao's int8 training in its default setting."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            training = importlib.import_module("torchao.prototype.quantized_training")
            quantize_ = importlib.import_module("torchao").quantize_
        layer = nn.Sequential(nn.Linear(n_in, n_out))
        quantize_(layer, training.int8_mixed_precision_training())
    except Exception as error:
        console.print(f"torchao's int8 training is left out: {error}\n", highlight=False)
        return None
    return layer


def gain(timings: Mapping[str, Timing], name: str, baseline: str) -> float:
    return timings[baseline].median_ms / timings[name].median_ms


def show(title: str, timings: Mapping[str, Timing], baseline: str) -> None:
    table = Table(title, "best ms", "median ms", "speed-up", box=None, pad_edge=False, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, timing in timings.items():
        speed = f"{gain(timings, name, baseline):.2f}x"
        table.add_row(name, f"{timing.best_ms:.1f}", f"{timing.median_ms:.1f}", speed)
    console.print(table, "")


if __name__ == "__main__":
    tyro.cli(main)
