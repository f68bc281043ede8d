"""The plain loop that the sweep is measured against trains the same thing."""

from dataclasses import replace

import pytest
import torch

from bench.lab import run_swept, sample, train_plainly
from trimtab.lab.study import default_study


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_plain_loop_and_the_sweep_end_at_the_same_losses():
    study = sample(default_study(), 12)
    study = replace(study, base=replace(study.base, eval_batches=2), sizes=study.sizes[:1], lrs=(0.01,))
    _, swept = run_swept(study, 2)
    assert len(swept) == len(study.arms)
    for cell in study.cells():
        first = cell.config.model.vocab  # as many guesses: where it began
        assert swept[cell.name] < torch.tensor(first).log() - 0.1
        assert train_plainly(cell.config) == pytest.approx(swept[cell.name], abs=2e-4)


def test_the_sample_keeps_every_size_and_arm():
    study = default_study()
    few = sample(study, 50)
    assert (few.sizes, few.arms) == (study.sizes, study.arms)
    assert {cell.config.steps for cell in few.cells()} == {50}
    assert set(few.lrs) <= set(study.lrs)
    shares = [(x.base.steps / x.base.eval_every + 1) * x.base.eval_batches / x.base.steps for x in (study, few)]
    assert shares[1] == pytest.approx(shares[0], rel=0.1)  # of batches that are evaluated
