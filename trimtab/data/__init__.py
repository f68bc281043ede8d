"""BATCHES of text, token files and image-caption pairs: the same order on every machine, resumable at any position."""

from trimtab.data.batches import TextBatches
from trimtab.data.cache import cache_dir
from trimtab.data.corpus import Corpus, open_corpus
from trimtab.data.pairs import PairBatches, Pairs, open_pairs
from trimtab.data.pictures import Pair
from trimtab.data.prefetch import Batches, Prefetcher
from trimtab.data.shards import pack_pairs, read_shards, write_shards
from trimtab.data.tokenizers import TextTokenizer, load_tokenizer
from trimtab.hints import MissingExtra

__all__ = [
    "Batches",
    "Corpus",
    "MissingExtra",
    "Pair",
    "PairBatches",
    "Pairs",
    "Prefetcher",
    "TextBatches",
    "TextTokenizer",
    "cache_dir",
    "load_tokenizer",
    "open_corpus",
    "open_pairs",
    "pack_pairs",
    "read_shards",
    "write_shards",
]
