"""Zero-shot classification with a CLIP: pictures of concepts that it never saw, named by prompts.

    prompts of a concept --encode, mean, normalise--> class embedding        nearest to the picture's: the answer

The classes are the held-out concepts of the corpus. A caption says more than the concept, so one prompt gives a noisy
embedding, and the mean over several a better one (Radford et al. 2021, section 3.1.4). The result with the first prompt
alone is reported too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from trimtab.data import Pairs
from trimtab.data.pictures import PLACES, RADII
from trimtab.nn import CLIP, ByteTokenizer

ROWS = 256  # encoded at once
# The captions of `shapes` have a size and a place. Those of emoji, and of most shards, have no fixed form.
SHAPE_PROMPTS = ("a {}", *(f"a {size} {{}} {place}" for size in RADII for place in PLACES))
PROMPTS = ("{}", "a {}", "a picture of {}", "a picture of a {}", "a photo of a {}", "a drawing of a {}")


@dataclass(frozen=True)
class ZeroShot:
    top1: float  # share of pictures with the right class, prompts together
    single: float  # the same with the first prompt only
    classes: int
    pictures: int
    prompts: int

    @property
    def chance(self) -> float:
        return 1 / self.classes


def prompts_for(corpus: str) -> tuple[str, ...]:
    """Templates with {} for the concept."""
    return SHAPE_PROMPTS if corpus == "shapes" else PROMPTS


@torch.no_grad()
def classify(model: CLIP, pairs: Pairs, prompts: Sequence[str] = ()) -> ZeroShot:
    """Name each validation picture of a corpus by the nearest of its held-out concepts."""
    prompts = prompts or prompts_for(pairs.name)
    images, _ = pairs.load("validation")
    concepts = pairs.concepts("validation")
    names = sorted(set(concepts))
    right = torch.tensor([names.index(concept) for concept in concepts])
    features = encode_images(model, images)
    classes = embed_classes(model, names, prompts)

    def share(embeddings: Tensor) -> float:
        return (features.cpu() @ embeddings.t().cpu()).argmax(dim=1).eq(right).float().mean().item()

    single = embed_classes(model, names, prompts[:1])
    return ZeroShot(share(classes), share(single), len(names), len(right), len(prompts))


@torch.no_grad()
def embed_classes(model: CLIP, names: Sequence[str], prompts: Sequence[str]) -> Tensor:
    """Normalised means over the prompts, [names, E]."""
    encoded = encode_captions(model, [prompt.format(name) for name in names for prompt in prompts])
    return normalize(encoded.view(len(names), len(prompts), -1).mean(dim=1), dim=-1)


@torch.no_grad()
def encode_captions(model: CLIP, captions: Sequence[str]) -> Tensor:
    tokens = ByteTokenizer(context=model.config.context).encode(captions)
    return torch.cat([model.encode_text(part.to(model.logit_scale.device)) for part in tokens.split(ROWS)])


@torch.no_grad()
def encode_images(model: CLIP, images: Tensor) -> Tensor:
    return torch.cat([model.encode_image(part.to(model.logit_scale.device)) for part in images.split(ROWS)])
