"""The experts of Hugging Face's mixtures (Mixtral, Qwen3-MoE, GPT-OSS ...) with quantized products.

    tokens --sort by expert--> one product per expert and projection --weight, sum--> tokens

transformers 5 stores all experts of a layer as one parameter [experts, out, in]. The class of the module is changed and
its parameters stay, so state dicts and optimizers do not change. Every expert has its own scale. The number of tokens
of an expert depends on the data, so torch.compile leaves these modules out of its graphs.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trimtab.nn.parts import Part, add_part, adopt, find_part

# What transformers' decorator `use_experts_implementation` gives to a class of experts.
TRAITS = ("num_experts", "has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "_apply_gate", "config")


class SwitchBackExperts(nn.Module):
    """Made by `convert_linears`; the same arguments and results as the experts it was made from."""

    num_experts: int

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        module: Any = self
        if getattr(module, "_is_expert_parallel", False):
            raise ValueError(
                "quantized experts do not support expert parallelism; leave them out with skip='*experts*'"
            )
        chosen, ids = top_k_index.shape[-1], top_k_index.reshape(-1)
        order = ids.argsort(stable=True)
        counts = torch.bincount(ids, minlength=self.num_experts).tolist()
        x = hidden_states[order // chosen]
        x = self._product(x, "gate_up_proj" if module.has_gate else "up_proj", counts)
        x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
        x = self._product(x, "down_proj", counts)
        if module.has_post_expert_norm:
            x = module.post_expert_norm(x)
        x = x * top_k_weights.reshape(-1)[order, None]
        # Back to the order of the tokens, and summed there: index_add_ would not be deterministic on a GPU.
        x = x[order.argsort()].view(len(hidden_states), chosen, x.shape[-1]).sum(dim=1)
        return x.to(hidden_states.dtype)

    def _product(self, x: Tensor, name: str, counts: list[int]) -> Tensor:
        module, parts = self, find_part(self, name)
        has_bias, transposed = getattr(module, "has_bias", False), getattr(module, "is_transposed", False)
        # One backward node for all experts: separate slices would each have a gradient of the whole parameter.
        weights: tuple[Tensor, ...] = getattr(module, name).unbind(0)
        biases = getattr(module, f"{name}_bias").unbind(0) if has_bias else (None,) * len(weights)
        outs = []
        for i, rows in enumerate(x.split(counts)):
            if parts is not None and len(rows):
                outs.append(parts[i](rows, weights[i], biases[i]))
            else:
                outs.append(F.linear(rows, weights[i].t() if transposed else weights[i], biases[i]))
        return torch.cat(outs)


def is_experts(module: nn.Module) -> bool:
    """Whether this is a module of experts as in transformers 5, plain or quantized."""
    if isinstance(module, nn.ModuleList) or not all(hasattr(module, trait) for trait in TRAITS):
        return False
    return all(name in module._parameters for name in matrices_of(module))


def matrices_of(module: nn.Module) -> tuple[str, str]:
    return "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj", "down_proj"


def quantize_experts(module: nn.Module, name: str, **options: Any) -> Part:
    """Quantize one of `matrices_of(module)` for all experts; returns the part of the first expert."""
    kind: Any = module
    bias = f"{name}_bias" if kind.has_bias else None
    parts = [
        Part(module, name, i, bias=bias, transposed=kind.is_transposed, **options) for i in range(kind.num_experts)
    ]
    if not isinstance(module, SwitchBackExperts):
        module.__class__ = adopt(SwitchBackExperts, type(module))
    add_part(module, name, nn.ModuleList(parts))
    return parts[0]
