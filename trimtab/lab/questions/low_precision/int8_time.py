"""Where does the speed of SwitchBack come from, and where is it lost? Wortsman et al. 2023a, section 2.3.

The paper, on A100 GPUs: int8 products take about half the time of 16-bit ones; quantization takes less than a quarter
of the layer's time and a smaller share of wider layers, so wider layers gain more. Here the two linear layers of an MLP
block are timed on this machine's CPU against float32, whose products the int8 ones replace. The kernel quantizes the
input while it multiplies; so the same work is also timed as quantization and product one after the other, and the share
is that of the quantization in their sum. The weight is quantized once per step. Freed memory is kept, as in the lab's
workers: in a first run some results of width 256 took four times as long as others, because the system had to provide
their memory page by page.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from trimtab.analysis.answers import Figure, Line, Panel, Table
from trimtab.lab.executors.worker import keep_memory
from trimtab.lab.questions.question import Checks, Measurement, Numbers, falls, judge
from trimtab.ops import backends, doctor
from trimtab.ops.float32.product import linear, product_nn, product_tn
from trimtab.ops.int8 import int8_linear, int8_matmul, quantize_rowwise, quantize_tensorwise

WIDTHS = (128, 256, 512, 1024, 2048)
TOKENS = 2048
ROUNDS = 9  # a median of fewer is not reliable on a machine that does other things
RATIO = 4  # of an MLP block: width -> 4 width -> width
# Parts of a training step with SwitchBack, one after the other. The weight gradient stays float.
QUANTIZATION = ("quantize X", "quantize W", "quantize G")
PRODUCTS = ("X W int8", "G W int8", "G X float")

Work = Callable[[], object]


def measure(_: Path) -> dict[str, Any]:
    keep_memory()
    product, why = backends.int8_product()
    machine = {"flags": " ".join(doctor.cpu_features()), "int8 product": f"{product}: {why}"}
    return {"machine": {**machine, "threads": torch.get_num_threads()}, "widths": [time_width(x) for x in WIDTHS]}


def time_width(width: int) -> dict[str, Any]:
    """Milliseconds of each part of the layers width -> 4 width and 4 width -> width together."""
    layers = {"up": parts_of(TOKENS, width, RATIO * width), "down": parts_of(TOKENS, RATIO * width, width)}
    timed = interleave({f"{layer} {name}": run for layer, parts in layers.items() for name, run in parts.items()})
    parts = {name: timed[f"up {name}"] + timed[f"down {name}"] for name in layers["up"]}
    return {"width": width, "ms": parts, **summarise(parts)}


def parts_of(tokens: int, inner: int, outer: int) -> dict[str, Work]:
    """The calls of a training step of one layer, and those of nn.Linear."""
    generator = torch.Generator().manual_seed(0)
    x, g, w = (torch.randn(s, generator=generator) for s in ((tokens, inner), (tokens, outer), (outer, inner)))
    (x_codes, x_max), (g_codes, g_max) = quantize_rowwise(x), quantize_rowwise(g)
    w_codes, w_max = quantize_tensorwise(w)
    return {
        "quantize X": lambda: quantize_rowwise(x),
        "quantize W": lambda: quantize_tensorwise(w),
        "quantize G": lambda: quantize_rowwise(g),
        "X W int8": lambda: int8_matmul(x_codes, w_codes.t(), x_max, w_max),
        "G W int8": lambda: int8_matmul(g_codes, w_codes, g_max, w_max),
        "G X float": lambda: product_tn(g, x),
        "X W fused": lambda: int8_linear(x, w_codes.t(), w_max),
        "G W fused": lambda: int8_linear(g, w_codes, w_max),
        "X W float": lambda: linear(x, w),
        "G W float": lambda: product_nn(g, w),
    }


def interleave(candidates: Mapping[str, Work], rounds: int | None = None) -> dict[str, float]:
    """Median milliseconds. Every candidate runs once per round, so that a slow moment slows all of them alike."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for counted in [False] + [True] * (rounds or ROUNDS):
        for name, run in candidates.items():
            begun = time.perf_counter()
            run()
            if counted:
                seconds[name].append(time.perf_counter() - begun)
    return {name: 1000 * statistics.median(values) for name, values in seconds.items()}


def summarise(ms: Mapping[str, float]) -> dict[str, float]:
    """Shares of quantization, and times of the layers; a step is forward and backward pass."""
    forward, backward = ms["quantize X"] + ms["quantize W"], ms["quantize G"]
    step = sum(ms[name] for name in (*QUANTIZATION, *PRODUCTS))
    switchback = ms["quantize W"] + ms["X W fused"] + ms["G W fused"] + ms["G X float"]
    plain = ms["X W float"] + ms["G W float"] + ms["G X float"]
    return {
        "share forward": forward / (forward + ms["X W int8"]),
        "share backward": backward / (backward + ms["G W int8"] + ms["G X float"]),
        "share": (forward + backward) / step,
        "product": (ms["X W float"] + ms["G W float"]) / (ms["X W int8"] + ms["G W int8"]),
        "fused": switchback / step,
        "switchback ms": switchback,
        "float ms": plain,
        "saved": 1 - switchback / plain,
    }


# --- Claims


def check(found: Numbers) -> Checks:
    rows = found["widths"]
    first, last = rows[0], rows[-1]
    ends = {str(row["width"]): row["share"] for row in (first, last)}
    yield judge("the widest layers spend a smaller share of their time in quantization", ends, falls)
    wide = {str(row["width"]): row["share"] for row in rows[-2:]}
    yield judge("in the two widest it is less than a quarter", wide, lambda *shares: max(shares) < 0.25)
    product = {str(last["width"]): last["product"]}
    yield judge("int8 products of the widest are at least 1.6 times as fast as float", product, lambda x: x >= 1.6)
    saved = {str(row["width"]): row["saved"] for row in (first, last)}
    claim = "the widest layers save at least 13% of the time of float, and more than the narrowest"
    yield judge(claim, saved, lambda narrow, wide: wide >= 0.13 and wide > narrow)


def tables(found: Numbers) -> Iterable[Table]:
    rows = found["widths"]
    machine = ", ".join(f"{name}: {value}" for name, value in found["machine"].items())
    columns = ("width", *QUANTIZATION, *PRODUCTS, "X W fused", "G W fused", "X W float", "G W float")
    shown = [(str(row["width"]), *(row["ms"][name] for name in columns[1:])) for row in rows]
    yield Table(f"Median milliseconds, {TOKENS} tokens; {machine}", columns, shown)
    keys = ("share forward", "share backward", "share", "product", "fused", "switchback ms", "float ms", "saved")
    titles = (
        *("width", "quantization, forward", "backward", "both", "float / int8 product", "fused / separate"),
        *("SwitchBack ms", "float ms", "time saved"),
    )
    yield Table("Shares and totals", titles, [(str(row["width"]), *(row[name] for name in keys)) for row in rows])


def figures(found: Numbers) -> Iterable[Figure]:
    rows = found["widths"]
    widths = [row["width"] for row in rows]
    shares = [Line(name, widths, [row[name] for row in rows]) for name in ("share forward", "share backward", "share")]
    saved = [Line("time saved", widths, [row["saved"] for row in rows])]
    yield Figure(
        name="shares",
        title="Share of the time in quantization, and time saved against float",
        x="width",
        y="share",
        panels=[Panel("quantization", shares), Panel("SwitchBack against float", saved)],
        log_x=True,
    )


QUESTION = Measurement(
    "int8-time",
    __doc__,
    measure,
    check,
    minutes=1.5,
    paper="P1",
    design=(
        f"Both linear layers of an MLP block, widths {', '.join(map(str, WIDTHS))}, {TOKENS} tokens: medians of "
        f"{ROUNDS} rounds in which every part runs once."
    ),
    figures=figures,
    tables=tables,
)
