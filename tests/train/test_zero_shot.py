"""Zero-shot classification: known embeddings give known answers, and several prompts average out what one says."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trimtab.data import open_pairs
from trimtab.nn import CLIP, CLIP_SIZES, ByteTokenizer
from trimtab.train.zero_shot import PROMPTS, classify, embed_classes, prompts_for


class Oracle(nn.Module):
    """A CLIP that knows every concept, except that the prompt "a {}" points away from it."""

    def __init__(self, pairs, *, bad_single: bool) -> None:
        super().__init__()
        self.names = sorted(set(pairs.concepts("validation")))
        self.concepts, self.bad_single = pairs.concepts("validation"), bad_single
        self.config, self.tokenizer = SimpleNamespace(context=48), ByteTokenizer(context=48)
        self.logit_scale, self.seen = torch.zeros(1), 0

    def encode_image(self, images):
        part = self.concepts[self.seen : self.seen + len(images)]
        self.seen += len(images)
        return self.unit([self.names.index(concept) for concept in part])

    def encode_text(self, tokens):
        rows = self.tokenizer.decode(tokens)
        found = [next(i for i, name in enumerate(self.names) if name in row) for row in rows]
        if self.bad_single:
            found = [i + 1 if row == f"a {self.names[i]}" else i for i, row in zip(found, rows, strict=True)]
        return self.unit([i % len(self.names) for i in found])

    def unit(self, places):
        return torch.eye(len(self.names))[places]


@pytest.fixture
def pairs(tmp_path):
    return open_pairs("shapes", cache=tmp_path)


def test_the_classes_are_concepts_that_were_never_trained_on(pairs):
    names = set(pairs.concepts("validation"))
    assert not names & set(pairs.concepts("train"))
    found = classify(Oracle(pairs, bad_single=False), pairs)
    assert (found.top1, found.single) == (1.0, 1.0)
    assert (found.classes, found.pictures, found.prompts) == (len(names), len(pairs.indices("validation")), 11)
    assert found.chance == pytest.approx(1 / len(names))


def test_several_prompts_outvote_a_bad_one(pairs):
    found = classify(Oracle(pairs, bad_single=True), pairs)
    assert (found.top1, found.single) == (1.0, 0.0)


def test_a_class_is_the_normalised_mean_of_its_prompts(pairs):
    torch.manual_seed(0)
    model = CLIP(CLIP_SIZES["tiny"]).eval()
    prompts = ("a {}", "a small {} in the middle")
    embedded = embed_classes(model, ["red ring", "blue cross"], prompts)
    tokens = ByteTokenizer(context=64).encode(["a red ring", "a small red ring in the middle"])
    with torch.no_grad():
        mean = model.encode_text(tokens).mean(dim=0)
    torch.testing.assert_close(embedded[0], mean / mean.norm())
    assert 0 <= classify(model, pairs).top1 <= 1


def test_every_corpus_has_prompts_with_a_place_for_the_name():
    for corpus in ("shapes", "emoji", "folder"):
        assert len(prompts_for(corpus)) == len(set(prompts_for(corpus))) > 1
        assert all(prompt.count("{}") == 1 for prompt in prompts_for(corpus))
    assert prompts_for("emoji") == PROMPTS
