"""The advice printed with each kind of alarm: likely cause, then what to change."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


def advise(kind: str, signal: str, hints: Mapping[str, Any] = MappingProxyType({})) -> str:
    """`hints` are the hyper-parameters of the tensor's parameter group; may be empty."""
    eps, betas = hints.get("eps"), hints.get("betas")
    match kind:
        case "rms spike":
            now = f" (now {float(betas[1]):g})" if betas else ""
            stable = "StableAdamW already shortens this step" if "clip_threshold" in hints else "use StableAdamW"
            return (
                "Gradients are much larger than the second moment; a loss spike often follows within 8 steps. "
                f"Lower β₂{now} or warm up longer; {stable}"
            )
        case "loss spike":
            return (
                "If an rms spike came first, lower β₂ or use StableAdamW. "
                "Otherwise lower the learning rate, warm up longer, or use sequence length warmup"
            )
        case "gradient near eps":
            now = f" (now {float(eps):g})" if eps is not None else ""
            return f"eps reduces these updates. Use a smaller eps{now}, down to 1e-15; a larger eps makes it worse"
        case "attention logits":
            return "Training diverges when attention logits grow further. Use qk-norm or lower the learning rate"
        case "drift" if signal == "logz":
            return "log Z of the output moves steadily in one direction. Add a z-loss of 1e-4"
        case "drift" if signal == "param_rms":
            return "The size of these weights moves steadily in one direction. Check weight decay and learning rate"
        case "drift":
            return "Logits move steadily in one direction. Add a z-loss of 1e-4; for attention logits use qk-norm"
        case "non-finite" if signal == "loss":
            return "Skip this step. The alarms of the same step name the first tensor or layer with a NaN or Inf"
        case "non-finite":
            return "Skip such steps (skip_nonfinite=True), check the loss scale, or lower the learning rate"
    return ""
