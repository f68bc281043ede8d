"""MODEL: modules with parameters, and losses. SwitchBack linears, stable embedding, GPT and CLIP."""

from trimtab.nn.clip import CLIP, CLIP_SIZES, CLIPConfig
from trimtab.nn.config import ConfigError, TransformerConfig
from trimtab.nn.contrastive import contrastive_loss
from trimtab.nn.convert import convert_linears, freeze_linears, revert_linears
from trimtab.nn.embedding import StableEmbedding
from trimtab.nn.gpt import GPT, GPT_SIZES, GPTConfig
from trimtab.nn.kinds import LinearKind
from trimtab.nn.linear import SwitchBackConv1D, SwitchBackLinear
from trimtab.nn.loss import IGNORE, Loss, cross_entropy, linear_cross_entropy
from trimtab.nn.rounding import measure_rounding
from trimtab.nn.tap import listen
from trimtab.nn.tokenizer import ByteTokenizer, WordTokenizer, load_tokenizer
from trimtab.nn.transformer import Transformer

__all__ = [
    "CLIP",
    "CLIP_SIZES",
    "GPT",
    "GPT_SIZES",
    "IGNORE",
    "ByteTokenizer",
    "CLIPConfig",
    "ConfigError",
    "GPTConfig",
    "LinearKind",
    "Loss",
    "StableEmbedding",
    "SwitchBackConv1D",
    "SwitchBackLinear",
    "Transformer",
    "TransformerConfig",
    "WordTokenizer",
    "contrastive_loss",
    "convert_linears",
    "cross_entropy",
    "freeze_linears",
    "linear_cross_entropy",
    "listen",
    "load_tokenizer",
    "measure_rounding",
    "revert_linears",
]
