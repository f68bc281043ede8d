"""The benchmark's own claims: it takes turns, and it refuses to time something else than it says."""

import pytest
import torch

from bench import hosts, memory
from bench.measure import interleave, must_call
from bench.nano_gpt import NanoGPT
from bench.ops import gpt2_shapes
from bench.step import FLOAT, INT8, Size, measure_step
from trimtab.nn import GPT, GPTConfig
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


def test_nano_gpt_is_the_same_model_as_ours():
    shape = {"vocab": 50, "context": 16, "depth": 2, "width": 32, "heads": 2}
    nano, ours = NanoGPT(**shape), GPT(GPTConfig(**shape, positions="learned", tied=True, norm_eps=1e-5))
    names = {"up": "mlp.up", "down": "mlp.down", "qkv": "attention.qkv", "out": "attention.out"}
    state = {}
    for name, p in nano.named_parameters():
        parts = name.split(".")
        if parts[0] == "blocks":
            parts = ["transformer", "blocks", parts[1], names.get(parts[2], parts[2]), *parts[3:]]
        state[".".join(parts)] = p
    ours.load_state_dict(state, strict=True)
    tokens = torch.randint(0, 50, (2, 17), generator=torch.Generator().manual_seed(0))
    inputs, targets = tokens[:, :-1], tokens[:, 1:].contiguous()
    # exact GELU there, its tanh form here
    torch.testing.assert_close(nano(inputs, targets), ours.loss(inputs, targets).loss, rtol=1e-4, atol=1e-4)


def test_a_whole_step_is_measured_for_every_candidate(monkeypatch):
    monkeypatch.setattr("bench.step.hugging_face", lambda config: None)
    tiny = Size(1, 16, 2, vocab=32, context=8, batch=2, rounds=1, steps=1, int8_bar=1.2)
    bars = measure_step((tiny,))
    assert [bar.bar for bar in bars][:2] == [1.0, 1.0]
    assert [FLOAT in bars[0].what, INT8 in bars[2].what] == [True, True]
    assert all(bar.measured > 0 for bar in bars)


@pytest.mark.parametrize("setting", ["torch", "lean"])
def test_memory_of_steps_is_that_of_a_new_process(setting):
    result = memory.run(memory.Task(setting, 1, 64, 2, vocab=300, context=16))
    assert result.parameters == 12 * 64**2 + 13 * 64 + (300 + 16) * 64 + 2 * 64
    assert 0 < result.before <= result.built <= result.peak < memory.GIB
    assert result.seconds > 0
    assert 4 < result.loss < 10


def test_a_process_that_fails_says_why():
    with pytest.raises(SystemExit, match=r"width=64 does not split into heads=3"):
        memory.run(memory.Task("8-bit", 1, 64, 3, vocab=300, context=16))


def test_a_size_that_does_not_fit_is_predicted_by_the_line_and_not_run(monkeypatch, capsys):
    smaller = [memory.Result(n, 100, 200, 1000 + 16 * n, 1.0, 5.0) for n in (10**8, 3 * 10**8)]
    task = memory.Task("torch", *memory.SHAPES["1.5B"])
    monkeypatch.setattr(memory, "available", lambda: 20 * memory.GIB)
    needs = memory.measure_or_predict(task, smaller)
    assert needs == pytest.approx(16 * 1.5576e9, rel=0.01)
    assert memory.largest(smaller, 1000 + 16 * 10**9) == pytest.approx(10**9)
    memory.show({"torch": {"124M": smaller[0], "355M": smaller[1], "1.5B": needs}})
    header, _, row, *_ = capsys.readouterr().out.splitlines()
    assert header.count("|") == row.count("|") == 9
    assert "no: about 23" in row


def test_model_sizes_in_words():
    assert [memory.in_words(n) for n in (3.349e8, 9.96e8, 1.94e9)] == ["335M", "1B", "1.9B"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("host", hosts.HOSTS)
def test_callbacks_are_measured_beside_a_trainer_without_them(host):
    bars = hosts.measure(host, rounds=1, steps=2, batch=2, depth=1, width=16)
    assert [bar.bar for bar in bars] == [1.03] * 3
    assert all(bar.measured > 0.1 for bar in bars)
