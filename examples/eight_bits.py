"""Train the same small GPT with 32-bit and with 8-bit optimizer state and draw both loss curves.

    python examples/eight_bits.py                  about two minutes on two cores; writes eight_bits.svg

The text is the source code of Python's standard library: no download. Model, seed and batches are equal; only `bits`
differs.
"""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn

import trimtab as tt

STEPS, BATCH, CONTEXT, WIDTH, DEPTH = 300, 16, 128, 128, 2


class TinyGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.positions = nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.layers(self.embed(tokens) + self.positions, mask=self.mask, is_causal=True)
        return self.head(x)


def read_corpus() -> Tensor:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)


def train(corpus: Tensor, name: str, bits: int) -> list[float]:
    torch.manual_seed(0)
    model, batches = TinyGPT(), torch.Generator().manual_seed(1)
    optimizer = getattr(tt.optim, name)(model.named_parameters(), lr=3e-3, betas=(0.9, 0.99), bits=bits)
    losses = []
    for step in range(1, STEPS + 1):
        starts = torch.randint(0, len(corpus) - CONTEXT - 1, (BATCH,), generator=batches).tolist()
        text = torch.stack([corpus[i : i + CONTEXT + 1] for i in starts]).long()
        loss = nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 50 == 0:
            print(f"  step {step:4d}  loss {sum(losses[-50:]) / 50:.4f}", flush=True)
    print(optimizer.describe().summary())
    return losses


def smooth(losses: list[float], window: int = 10) -> list[float]:
    return [sum(losses[max(0, i - window + 1) : i + 1]) / (i + 1 - max(0, i - window + 1)) for i in range(len(losses))]


def draw(curves: dict[str, list[float]], path: Path, width: int = 720, height: int = 400, skip: int = 15) -> None:
    """Write an SVG: one line per run, without the first `skip` steps, whose loss is far above the rest."""
    curves = {name: losses[skip:] for name, losses in curves.items()}
    low, high = min(map(min, curves.values())), max(map(max, curves.values()))
    x = lambda i, n: 50 + (width - 70) * i / (n - 1)  # noqa: E731
    y = lambda loss: 20 + (height - 60) * (high - loss) / (high - low)  # noqa: E731
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for tick in range(int(5 * low) + 1, int(5 * high) + 1):
        at = y(tick / 5)
        parts.append(f'<line x1="50" x2="{width - 20}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="42" y="{at + 4:.1f}" text-anchor="end" font-size="13">{tick / 5:.1f}</text>')
    for k, (name, losses) in enumerate(curves.items()):
        color, dash = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd")[k % 4], ("", "6 4", "", "6 4")[k % 4]
        points = " ".join(f"{x(i, len(losses)):.1f},{y(loss):.1f}" for i, loss in enumerate(losses))
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2" stroke-dasharray="{dash}"/>'
        )
        parts.append(f'<text x="{width - 30}" y="{40 + 20 * k}" text-anchor="end" fill="{color}">{name}</text>')
    parts.append(
        f'<text x="{width / 2}" y="{height - 12}" text-anchor="middle">training loss over {STEPS} steps</text>'
    )
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


def main() -> None:
    corpus, curves = read_corpus(), {}
    for name in ("AdamW", "StableAdamW"):
        for bits in (32, 8):
            print(f"{name}, {bits}-bit state")
            curves[f"{name}, {bits} bits"] = smooth(train(corpus, name, bits))
    draw(curves, Path("eight_bits.svg"))
    for name in ("AdamW", "StableAdamW"):
        wide, narrow = curves[f"{name}, 32 bits"], curves[f"{name}, 8 bits"]
        gap = max(abs(a - b) for a, b in zip(wide, narrow, strict=True))
        print(f"{name}: last loss {wide[-1]:.4f} at 32 bits, {narrow[-1]:.4f} at 8; largest gap {gap:.4f}")
    print("wrote eight_bits.svg")


if __name__ == "__main__":
    main()
