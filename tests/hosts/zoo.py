"""Small models of real architectures, each with a batch and its loss. Built from configs: nothing is downloaded."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.conftest import seed
from tests.hosts.vision import use_vision

Loss = Callable[[nn.Module], Tensor]
TOKENS = torch.randint(3, 48, (4, 16), generator=seed(0))
IMAGES = torch.randn(4, 3, 32, 32, generator=seed(1))
LABELS = torch.arange(4)
SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


class Model(nn.Module):
    """The smallest with an embedding and a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(128, 64)
        self.fc = nn.Linear(64, 128)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.fc(self.wte(tokens))


def language(model: nn.Module) -> Tensor:
    return model(input_ids=TOKENS, labels=TOKENS).loss


def classes(model: nn.Module) -> Tensor:
    out = model(IMAGES)
    return F.cross_entropy(getattr(out, "logits", out), LABELS)


def pairs(model: nn.Module) -> Tensor:
    tokens = TOKENS.clone()
    tokens[:, -1] = 49
    out = model(input_ids=tokens, pixel_values=IMAGES, return_loss=True) if hasattr(model, "config") else None
    if out is not None:
        return out.loss
    images, texts, scale = model(IMAGES, tokens)[:3]
    return F.cross_entropy(scale * images @ texts.t(), torch.arange(4))


def gpt2() -> tuple[nn.Module, Loss]:
    from transformers import GPT2Config, GPT2LMHeadModel

    drop = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=50, n_positions=32, **drop, **ENDS)
    return GPT2LMHeadModel(config), language


def llama() -> tuple[nn.Module, Loss]:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(vocab_size=50, **SIZES, **ENDS)), language


def mixtral() -> tuple[nn.Module, Loss]:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(vocab_size=50, num_key_value_heads=2, num_local_experts=4, **SIZES, **ENDS)
    return MixtralForCausalLM(config), language


def gpt_oss() -> tuple[nn.Module, Loss]:
    """Experts with biases, stored as [experts, in, out]."""
    from transformers import GptOssConfig, GptOssForCausalLM

    more = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    return GptOssForCausalLM(GptOssConfig(vocab_size=50, **more, **SIZES, **ENDS)), language


def bert() -> tuple[nn.Module, Loss]:
    from transformers import BertConfig, BertForMaskedLM

    drop = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(vocab_size=50, **SIZES, **drop)), language


def t5() -> tuple[nn.Module, Loss]:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
    return T5ForConditionalGeneration(T5Config(vocab_size=50, decoder_start_token_id=0, **sizes)), language


def vit() -> tuple[nn.Module, Loss]:
    from transformers import ViTConfig, ViTForImageClassification

    drop = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, num_labels=4, **SIZES, **drop)), classes


def clip() -> tuple[nn.Module, Loss]:
    from transformers import CLIPConfig, CLIPModel

    text = {"vocab_size": 50, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 49, **SIZES}
    vision = {"image_size": 32, "patch_size": 8, **SIZES}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=32)), pairs


def timm_vit() -> tuple[nn.Module, Loss]:
    use_vision()
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(img_size=32, patch_size=8, num_classes=4, embed_dim=32, depth=2, num_heads=2), classes


def timm_convnext() -> tuple[nn.Module, Loss]:
    use_vision()
    from timm.models.convnext import ConvNeXt

    return ConvNeXt(num_classes=4, depths=(1, 1, 1, 1), dims=(16, 32, 32, 64), ls_init_value=0.5), classes


def open_clip() -> tuple[nn.Module, Loss]:
    use_vision()
    from open_clip import CLIP

    vision = {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8}
    text = {"context_length": 16, "vocab_size": 50, "width": 32, "heads": 2, "layers": 2}
    return CLIP(embed_dim=32, vision_cfg=vision, text_cfg=text), pairs


MODELS = (gpt2, llama, mixtral, gpt_oss, bert, t5, vit, clip, timm_vit, timm_convnext, open_clip)
HUGGING_FACE = (gpt2, llama, mixtral, bert, t5, vit, clip)


def build(make: Callable[[], tuple[nn.Module, Loss]]) -> tuple[nn.Module, Loss]:
    torch.manual_seed(0)
    return make()
