"""State in a file or in host memory: the same results, no lost or mixed-up state, no half-changed model."""

import copy
import errno
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import trimtab.optim.chunks
import trimtab.optim.optimizer
from tests.conftest import assert_same
from tests.fake_gpu import fake_gpu
from tests.optim.cases import (
    CASES,
    QUANTIZED,
    assert_same_snapshots,
    make,
    params_of,
    small_model,
    snapshot,
    train,
)
from trimtab import Watch, optim
from trimtab.ops.step import storage, windows
from trimtab.optim.memory.offload import Offloaded, Piece

BFLOAT16 = torch.bfloat16


with_moments = pytest.mark.parametrize(("name", "bits"), [case for case in CASES if case[0] != "Adafactor"])
with_kernels = pytest.mark.parametrize(("name", "bits"), [case for case in CASES if case[0] in QUANTIZED])


@with_moments
def test_state_in_a_file_gives_the_results_of_state_in_memory(name, bits, tmp_path):
    plain = make(name, small_model().named_parameters(), bits)
    mapped = make(name, small_model().named_parameters(), bits, offload=tmp_path)
    for optimizer in (plain, mapped):
        train(optimizer, range(4))
    assert_same_snapshots(snapshot(mapped), snapshot(plain))
    assert_in_file(mapped, tmp_path)


@pytest.mark.parametrize("rounding", ["kahan", "split"])
def test_what_rounding_keeps_is_in_the_file_too(rounding, tmp_path):
    plain = make("AdamW", small_model(BFLOAT16).parameters(), 8, rounding=rounding)
    mapped = make("AdamW", small_model(BFLOAT16).parameters(), 8, rounding=rounding, offload=str(tmp_path))
    for optimizer in (plain, mapped):
        train(optimizer, range(4))
    assert_same_snapshots(snapshot(mapped), snapshot(plain))
    key = "compensation" if rounding == "kahan" else "extra_bits"
    assert_in_file(mapped, tmp_path, key)


def assert_in_file(optimizer: optim.Optimizer, folder: Path, *also: str) -> None:
    """Every moment lies in the mapped range of the file."""
    (line,) = [x for x in Path("/proc/self/maps").read_text().splitlines() if x.endswith(str(folder / "state.bin"))]
    low, high = (int(x, 16) for x in line.split()[0].split("-"))
    for group in optimizer.param_groups:
        for p in group["params"]:
            storage, state = optimizer.storage_of(p, group), optimizer.state[p]
            keys = [key for name in optimizer.states_of(group) for key in storage.keys(name)]
            assert all(low <= state[key].data_ptr() < high for key in (*keys, *also)), state.keys()


def test_channels_last_and_empty_parameters_work(tmp_path):
    def params() -> list[nn.Parameter]:
        conv = torch.arange(5400.0).view(20, 30, 3, 3).to(memory_format=torch.channels_last)
        return [nn.Parameter(conv), nn.Parameter(torch.empty(0, 4))]

    plain, mapped = optim.AdamW(params(), bits=8), optim.AdamW(params(), bits=8, offload=tmp_path)
    for optimizer in (plain, mapped):
        train(optimizer, range(3))
    assert_same_snapshots(snapshot(mapped), snapshot(plain))


@pytest.mark.parametrize("format", ["packed", "portable"])
def test_a_resume_goes_through_the_state_dict(format, tmp_path):
    """The file itself is not read: a step that was interrupted has left it half-written."""
    model = small_model()
    optimizer = make("AdamW", model.named_parameters(), 8, offload=tmp_path / "file")
    train(optimizer, range(3))
    torch.save(optimizer.state_dict(format=format), tmp_path / "state.pt")
    other = copy.deepcopy(model)
    train(optimizer, range(3, 6))
    expected = snapshot(optimizer)
    del optimizer
    gc.collect()
    resumed = make("AdamW", other.named_parameters(), 8, offload=tmp_path / "file")
    assert not resumed.state
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    train(resumed, range(3, 6))
    assert_same_snapshots(snapshot(resumed), expected)
    assert_in_file(resumed, tmp_path / "file")


def test_a_saved_state_dict_is_no_larger_than_the_state(tmp_path):
    optimizer = make("AdamW", [nn.Parameter(torch.randn(8, 4096)) for _ in range(8)], 8, offload=tmp_path)
    train(optimizer, range(1))
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    assert (tmp_path / "state.pt").stat().st_size < 1.2 * optimizer.describe().bytes_now


def test_a_copy_of_the_optimizer_has_its_state_in_memory(tmp_path):
    optimizer = make("AdamW", small_model().parameters(), 8, offload=tmp_path)
    train(optimizer, range(1))
    other = copy.deepcopy(optimizer)
    before = snapshot(optimizer)
    train(other, range(1, 3))
    assert_same_snapshots(snapshot(optimizer), before)


def test_release_and_split_weights_work_with_a_file(tmp_path):
    """2 bytes of weight, 1 of extra bits, and the rest is on the disk."""
    nets = [small_model(BFLOAT16) for _ in range(2)]
    plain = make("AdamW", nets[0].parameters(), 8, rounding="split")
    mapped = make("AdamW", nets[1].parameters(), 8, rounding="split", offload=tmp_path)
    mapped.step_in_backward(nets[1])
    for net, optimizer in zip(nets, (plain, mapped), strict=True):
        for number in range(3):
            net(torch.full((2, 65), 1.0 + number, dtype=BFLOAT16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_snapshots(snapshot(mapped), snapshot(plain))


# --- Host memory. There is no GPU here: the same code copies to tensors on the CPU, and to fake ones on a GPU.


def stream(monkeypatch: pytest.MonkeyPatch, optimizer: optim.Optimizer) -> optim.Optimizer:
    """From now on the kernel gets copies of the state, in windows that cut the larger tensors."""
    monkeypatch.setattr(windows, "WINDOW", 1024)
    for module in (windows, storage, trimtab.optim.optimizer):
        monkeypatch.setattr(module, "is_away", lambda b: bool(b.names) and not isinstance(b.kept[0], windows.Staged))
    optimizer._offload(None)
    return optimizer


@with_kernels
def test_windows_give_the_results_of_state_in_place(name, bits, monkeypatch):
    plain, other = (make(name, small_model().named_parameters(), bits, skip_nonfinite=True) for _ in range(2))
    train(plain, range(4))
    train(stream(monkeypatch, other), range(4))
    if name in ("StableAdamW", "LAMB", "LARS"):  # sums of pieces are added in another order
        for mine, theirs in zip(params_of(other), params_of(plain), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-8)
    else:
        assert_same_snapshots(snapshot(other), snapshot(plain))


@pytest.mark.parametrize("rounding", ["kahan", "stochastic"])
def test_windows_round_bfloat16_as_in_place(rounding, monkeypatch):
    plain, other = (make("AdamW", small_model(BFLOAT16).parameters(), 8, rounding=rounding) for _ in range(2))
    # A chunk of a whole tensor and a window must begin at the same places to give the same random numbers.
    monkeypatch.setattr(trimtab.optim.chunks, "CHUNK", 1024)
    train(plain, range(4))
    train(stream(monkeypatch, other), range(4))
    assert_same_snapshots(snapshot(other), snapshot(plain))


def test_a_resume_and_a_copy_keep_the_state_in_host_memory(monkeypatch, tmp_path):
    plain, other, third = (make("AdamW", small_model().named_parameters(), 8) for _ in range(3))
    train(plain, range(6))
    train(stream(monkeypatch, other), range(3))
    torch.save(other.state_dict(), tmp_path / "state.pt")
    for mine, theirs in zip(params_of(third), params_of(other), strict=True):
        mine.data.copy_(theirs)
    stream(monkeypatch, third).load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    train(third, range(3, 6))
    assert_same_snapshots(snapshot(third), snapshot(plain))
    again = copy.deepcopy(other)
    train(again, range(3, 6))
    assert_same_snapshots(snapshot(again), snapshot(plain))


def test_watch_reads_state_in_host_memory(monkeypatch):
    found = []
    for make_state in (lambda x: x, lambda x: stream(monkeypatch, x)):
        model = small_model()
        optimizer = make_state(make("AdamW", model.named_parameters(), 8))
        watch = Watch(model, optimizer)
        for number in range(3):
            train(optimizer, [number])
            watch.step(1.0)
        found.append({(name, key): x for name, row in watch.record["tensors"].items() for key, x in row.items()})
        watch.close()
    assert found[1] == pytest.approx(found[0], rel=1e-6)


@with_kernels
def test_on_a_gpu_only_copies_are_given_to_the_kernel(name, bits, monkeypatch):
    monkeypatch.setattr(windows, "WINDOW", 1024)
    with fake_gpu() as gpu:
        params = [nn.Parameter(torch.zeros(*shape, device="cuda")) for shape in ((65, 67), (67,), (0, 3))]
        optimizer = make(name, params, bits, offload="cpu")
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        with gpu.no_waits():
            optimizer.step()
        for p in params:
            keys = [key for key in optimizer.state[p] if key != "step"]
            assert keys
            assert {optimizer.state[p][key].device.type for key in keys} == {"cpu"}


@pytest.mark.parametrize("rounding", ["kahan", "split"])
def test_what_rounding_keeps_is_copied_also_without_moments(rounding):
    with fake_gpu():
        p = nn.Parameter(torch.zeros(65, 67, device="cuda", dtype=BFLOAT16))
        p.grad = torch.ones_like(p)
        optim.SGD([p], lr=0.1, rounding=rounding, offload="cpu").step()


def test_host_memory_is_unlocked_when_nothing_uses_it(monkeypatch):
    """Else its pages stay, and the next optimizer at the same address is refused."""
    calls: list[str] = []

    class Cudart:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            calls.append(f"lock {address}")
            return 0

        def cudaHostUnregister(self, address: int) -> int:
            calls.append(f"unlock {address}")
            return 0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    p, state = nn.Parameter(torch.zeros(100)), {"exp_avg": torch.ones(100)}
    Offloaded(None, "AdamW", [(p, Piece("p", "exp_avg", torch.float32, 100))]).settle(p, state)
    gc.collect()
    assert [call.split()[0] for call in calls] == ["lock"]  # the state is in it
    state.clear()
    gc.collect()
    assert calls == [calls[0], f"un{calls[0]}"]


def test_a_capture_in_a_graph_is_refused(monkeypatch):
    with fake_gpu():
        p = nn.Parameter(torch.zeros(65, 67, device="cuda"))
        p.grad = torch.ones_like(p)
        optimizer = optim.AdamW([p], offload="cpu")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph"):
            optimizer.step()


# --- Errors before anything changes


def test_a_full_disk_is_an_error_when_the_optimizer_is_made(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model = small_model()
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match=r"cannot allocate [\d,]+ bytes .*No space left.* no parameter has changed"):
            make("AdamW", model.parameters(), 8, offload=tmp_path)
    assert sorted(x.name for x in tmp_path.iterdir()) in ([], ["state.lock"])
    make("AdamW", model.parameters(), 8, offload=tmp_path)


def test_more_than_the_disk_has_is_refused_by_the_real_disk(tmp_path):
    p = nn.Parameter(torch.zeros(1))
    with pytest.raises(OSError, match="cannot allocate"):
        Offloaded(tmp_path, "AdamW", [(p, Piece("p", "exp_avg", torch.float32, 1 << 52))])
    assert not (tmp_path / "state.bin").exists()


def test_every_block_of_the_file_is_on_the_disk(tmp_path):
    make("AdamW", [nn.Parameter(torch.zeros(1 << 20))], 8, offload=tmp_path)
    stat = (tmp_path / "state.bin").stat()
    assert stat.st_blocks * 512 >= stat.st_size >= 2 << 20


@pytest.mark.parametrize("change", ["optimizer", "names", "shapes", "bits", "damaged", "foreign"])
def test_a_file_of_another_run_is_refused_and_kept(change, tmp_path):
    first = make("AdamW", small_model().named_parameters(), 8, offload=tmp_path)
    train(first, range(1))
    del first
    gc.collect()
    content = (tmp_path / "state.bin").read_bytes()
    model, name, bits = small_model(), "AdamW", 8
    params = list(model.named_parameters())
    if change == "optimizer":
        name = "StableAdamW"
    elif change == "names":
        params = [(f"other.{name}", p) for name, p in params]
    elif change == "shapes":
        params[0] = ("0.weight", nn.Parameter(torch.zeros(70, 70)))
    elif change == "bits":
        bits = 32
    elif change == "damaged":
        (tmp_path / "state.json").write_text("{")
    else:
        (tmp_path / "state.json").unlink()
    with pytest.raises(ValueError, match=r"holds the state of another run \(|exists without its state.json"):
        make(name, params, bits, offload=tmp_path)
    assert (tmp_path / "state.bin").read_bytes() == content


def test_a_folder_in_use_is_refused_here_and_in_another_process(tmp_path):
    optimizer = make("AdamW", small_model().parameters(), 8, offload=tmp_path)
    with pytest.raises(ValueError, match="in use by another optimizer or process; give each its own folder"):
        make("AdamW", small_model().parameters(), 8, offload=tmp_path)
    program = (
        "from tests.optim.cases import make, small_model\n"
        f"make('AdamW', small_model().parameters(), 8, offload={str(tmp_path)!r})"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "in use by another optimizer or process" in other.stderr
    before = snapshot(optimizer)
    assert len(before) == 6


def test_what_cannot_be_offloaded_is_refused_with_the_remedy(tmp_path):
    p = nn.Parameter(torch.ones(5))
    with pytest.raises(ValueError, match="where the state of CPU parameters is already; pass a folder"):
        optim.AdamW([p], offload="cpu")
    with pytest.raises(TypeError, match="offload must be a folder or 'cpu', got int"):
        optim.AdamW([p], offload=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="offload is one place, with room for all parameters"):
        optim.AdamW([{"params": [p], "offload": tmp_path}])
    optimizer = optim.AdamW([p], offload=tmp_path)
    with pytest.raises(ValueError, match="make the optimizer with all groups"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert_same(params_of(optimizer)[0].detach(), torch.ones(5))
