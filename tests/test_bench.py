"""The benchmark's own claims: it takes turns, and it refuses to time something else than it says."""

import pytest
import torch

from bench.measure import interleave, must_call
from bench.ops import gpt2_shapes
from trimtab.ops import load_codebook, quantize_blockwise


def test_candidates_take_turns_and_the_first_round_does_not_count():
    order: list[str] = []
    timings = interleave({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=3)
    assert order == ["a", "b"] * 4
    assert [len(t.seconds) for t in timings.values()] == [3, 3]


def test_a_benchmark_of_something_else_fails():
    with must_call("quantize"):
        quantize_blockwise(torch.ones(10), load_codebook())
    with pytest.raises(SystemExit, match=r"\['step'\] did not run"), must_call("quantize", "step"):
        quantize_blockwise(torch.ones(10), load_codebook())


def test_gpt2_has_its_148_tensors_and_124_million_parameters():
    shapes = gpt2_shapes()
    assert len(shapes) == 148
    assert sum(torch.Size(shape).numel() for shape in shapes) == 124_439_808
