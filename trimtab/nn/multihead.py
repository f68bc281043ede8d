"""nn.MultiheadAttention with quantized projections: the attention of open_clip and of PyTorch's own Transformer layers.

    q, k, v = x Win (one product in self-attention)      y = softmax(q k^T / sqrt(K) + masks) v      out_proj(y)

The class of the module is changed and its parameters stay, so state dicts and optimizers do not change.
"""

# B batch, T queries, S keys, E width, H heads, K head width

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trimtab.nn.parts import Part, add_part, find_part

SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")  # if keys or values have another width than queries


class SwitchBackAttention(nn.MultiheadAttention):
    """Made by `convert_linears` from an nn.MultiheadAttention: the same arguments and results; no nested tensors."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if query.is_nested or key.is_nested or value.is_nested:
            raise ValueError("a quantized attention takes no nested tensors; pass padded ones with key_padding_mask")
        batched = query.dim() == 3
        # The same checks and messages as in the plain module.
        F._mha_shape_check(query, key, value, key_padding_mask, attn_mask, self.num_heads)  # type: ignore[attr-defined]
        if is_causal and attn_mask is None:
            raise ValueError("is_causal is a hint about attn_mask and needs one; nn.Transformer can generate it")
        q, k, v = self._project(query, key, value)
        if not batched:
            q, k, v = q[None], k[None], v[None]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        mask = self._mask(q, k, key_padding_mask, attn_mask)
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.to(k.dtype).expand(len(k), -1, -1)], dim=1)
            v = torch.cat([v, self.bias_v.to(v.dtype).expand(len(v), -1, -1)], dim=1)
            mask = None if mask is None else F.pad(mask, (0, 1))
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
            mask = None if mask is None else F.pad(mask, (0, 1))
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            z_BHTS = q @ k.transpose(-1, -2) / math.sqrt(self.head_dim)
            weights = F.dropout((z_BHTS if mask is None else z_BHTS + mask).softmax(dim=-1), dropout)
            y_BHTK = weights @ v
            weights = weights.mean(dim=1) if average_attn_weights else weights
        else:
            y_BHTK = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        y = self.out_proj(y_BHTK.transpose(1, 2).flatten(-2))
        if not batched:
            return y[0], None if weights is None else weights[0]
        return y if self.batch_first else y.transpose(0, 1), weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        whole, bias = self.in_proj_weight, self.in_proj_bias
        if whole is not None and query is key and key is value:
            q, k, v = _product(find_part(self, "in_proj_weight"), query, whole, bias).chunk(3, dim=-1)
            return q, k, v
        named: dict[str, Tensor] = dict(self.named_parameters(recurse=False))
        weights = [named[name] for name in SEPARATE] if whole is None else whole.chunk(3)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        parts = (find_part(self, name) for name in SEPARATE)
        q, k, v = map(_product, parts, (query, key, value), weights, biases)
        return q, k, v

    def _mask(self, q: Tensor, k: Tensor, padding: Tensor | None, mask: Tensor | None) -> Tensor | None:
        """Both masks as one float mask [B or 1, H or 1, T or 1, S], which is added to the logits; None if none."""
        if mask is not None and mask.dim() == 3:
            mask = mask.unflatten(0, (len(q), self.num_heads))
        found = [x for x in (padding if padding is None else padding[:, None, None, :], mask) if x is not None]
        if not found:
            return None
        floats = [q.new_zeros(x.shape).masked_fill(x, -math.inf) if x.dtype == torch.bool else x.to(q) for x in found]
        total = sum(floats[1:], start=floats[0])
        return total if total.dim() == 4 else total[None, None]


def _product(part: Part | None, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = F.linear(x, weight, bias) if part is None else part(x, weight, bias)
    return y


def quantize_attention(module: nn.MultiheadAttention, name: str, **options: Any) -> Part:
    """Quantize a projection of the module: `name` is in_proj_weight, or one of SEPARATE. Returns its part."""
    width, bias = module.embed_dim, "in_proj_bias"
    rows = [slice(i * width, (i + 1) * width) for i in range(3)]
    if name == "in_proj_weight":
        # Queries, keys and values in one product if they come from the same tensor, and one by one if not.
        parts = {name: Part(module, name, slice(None), bias=bias, **options)}
        parts |= {one: Part(module, name, its, bias=bias, **options) for one, its in zip(SEPARATE, rows, strict=True)}
    else:
        its = rows[SEPARATE.index(name)]
        parts = {name: Part(module, name, slice(None), bias=bias, bias_index=its, **options)}
    module.__class__ = SwitchBackAttention
    for one, part in parts.items():
        add_part(module, one, part)
    return parts[name]
