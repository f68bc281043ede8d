"""What usually helps, in a sentence, for each kind of alarm."""

from collections.abc import Mapping
from typing import Any


def advise(kind: str, signal: str, value: float, hints: Mapping[str, Any]) -> str:
    """`hints` are the hyper-parameters of the tensor's group, where they are known."""
    eps, betas = hints.get("eps"), hints.get("betas")
    now = f" (now {float(betas[1]):g})" if betas else ""
    stable = "clip_threshold" in hints
    match kind:
        case "rms spike":
            shortens = "StableAdamW has shortened the step" if stable else "use StableAdamW"
            return (
                "Gradients have outrun their second moment, and a loss spike often follows within 8 steps: "
                f"lower β₂{now}, {shortens}, or warm up longer"
            )
        case "loss spike":
            return (
                "Lower β₂ or use StableAdamW if an RMS spike came first; else a lower learning rate, a longer warm-up, "
                "or sequence length warmup"
            )
        case "gradient near eps":
            now = f" (now {float(eps):g})" if eps is not None else ""
            return f"eps shrinks these updates: take a smaller eps{now}, down to 1e-15, never a larger one"
        case "attention logits":
            return "Attention comes close to where training dies: use qk-norm, or lower the learning rate"
        case "drift" if signal == "logz":
            return "The output logits drift: add a z-loss of 1e-4"
        case "drift" if signal == "param_rms":
            return "These weights keep moving one way: check weight decay and learning rate"
        case "drift":
            return "The logits keep growing: add a z-loss of 1e-4, or qk-norm if they are those of attention"
        case "non-finite" if signal == "loss":
            return "Skip this step; look at the first tensor or layer reported beside it"
        case "non-finite":
            return "Skip such steps (skip_nonfinite=True), check the loss scale, lower the learning rate"
    return ""
