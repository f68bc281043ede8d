"""Run folders of version 0.1.0 can be read."""

import pytest

from tests.runs.old import INTERRUPTED, unpack
from trimtab.runs import End, EventKind, read_run


@pytest.fixture(scope="module")
def v1(tmp_path_factory):
    return unpack(tmp_path_factory.mktemp("old"))


def test_a_complete_run_is_read(v1):
    run = read_run(v1 / "run")
    assert run.log.steps.tolist() == list(range(1, 31))
    assert run.log.loss.min() > 0
    assert run.signals.steps.tolist()
    assert run.signals.tensors("grad_rms")
    assert len(run.of_kind(EventKind.EVALUATED)) == 4
    assert run.config is not None
    assert (run.config.format, run.config.params, run.config.versions["trimtab"]) == (1, 3072, "0.1.0")
    assert run.result is not None
    assert (run.result.why, run.result.step, run.broken) == (End.DONE, 30, 0)


def test_an_interrupted_run_is_read(v1):
    run = read_run(v1 / INTERRUPTED)
    assert (len(run.log.steps), run.result, run.events[-1].kind) == (22, None, EventKind.STOPPED)


def test_every_run_of_the_old_studies_is_read(v1):
    configs = sorted(v1.glob("*/cells/**/config.json"))
    assert len(configs) > 10
    for path in configs:
        run = read_run(path.parent)
        assert run.config is not None
        assert run.broken == 0
        assert run.result is None or type(run.result.why) is End
