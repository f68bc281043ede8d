"""Taps: listeners get values with their full path; without listeners a tap has no effect and almost no cost."""

import gc
import pickle
import threading
import weakref
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trimtab.nn import tap as module
from trimtab.nn.tap import has_listener, listen, tap


class Leaf(nn.Module):
    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.fails = fails
        self.asked: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        x = tap(x * 2, "double")
        if self.fails:
            raise RuntimeError("leaf fell")
        self.asked.append(has_listener("rare"))
        return x


class Tree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = Leaf()
        self.branch = nn.ModuleList([Leaf(), Leaf()])

    def forward(self, x: Tensor) -> Tensor:
        x = tap(x, "in")
        for leaf in (self.left, *self.branch):
            x = leaf(x)
        return tap(x, "out")


def record(tree: nn.Module, x: Tensor, **options: object) -> list[str]:
    names: list[str] = []
    with listen(tree, lambda name, _: names.append(name), **options):
        tree(x)
    return names


def test_a_listener_hears_whole_paths_in_the_order_of_the_run():
    paths = ["in", "left.double", "branch.0.double", "branch.1.double", "out"]
    assert record(Tree(), torch.ones(1)) == paths
    assert record(nn.Sequential(Tree()), torch.ones(1)) == [f"0.{path}" for path in paths]


def test_patterns_choose_what_is_heard():
    assert record(Tree(), torch.ones(1), patterns="branch.*") == ["branch.0.double", "branch.1.double"]
    assert record(Tree(), torch.ones(1), patterns=("in", "*.0.*")) == ["in", "branch.0.double"]
    assert record(Tree(), torch.ones(1), patterns=()) == []


def test_has_listener_is_true_for_matching_names_while_a_listener_is_registered():
    tree = Tree()
    tree(torch.ones(1))
    with listen(tree, lambda *_: None, patterns="branch.0.rare"):
        tree(torch.ones(1))
    tree(torch.ones(1))
    assert [tree.left.asked, *(leaf.asked for leaf in tree.branch)] == [[False] * 3, [False, True, False], [False] * 3]


def test_values_are_heard_as_they_are_and_without_their_history():
    values: dict[str, Tensor] = {}
    x = torch.ones(1, requires_grad=True)
    tree = Tree()
    with listen(tree, values.__setitem__):
        out = tree(x)
    assert {name: value.item() for name, value in values.items() if "double" in name} == {
        "left.double": 2,
        "branch.0.double": 4,
        "branch.1.double": 8,
    }
    assert not any(value.requires_grad for value in values.values())
    out.backward()
    assert x.grad is not None
    assert x.grad.item() == 8  # the taps are not in the way


def test_nothing_heard_is_kept_alive():
    alive: list[weakref.ref[Tensor]] = []
    tree, x = Tree(), torch.ones(1)
    with listen(tree, lambda name, value: alive.append(weakref.ref(value))):
        out = tree(x)
        del out
        gc.collect()
        assert len(alive) == 5
        assert [ref() for ref in alive] == [None] * 5
    tree_ref = weakref.ref(tree)
    del tree
    gc.collect()
    assert tree_ref() is None


def test_nothing_is_left_behind():
    tree = Tree()
    with pytest.raises(ZeroDivisionError), listen(tree, lambda *_: 1 / 0):
        tree(torch.ones(1))
    assert module._running == []
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in tree.modules())


def test_a_silent_model_does_no_more_than_one_test(monkeypatch):
    def forbidden(*_: object) -> None:
        raise AssertionError("more than one test")

    monkeypatch.setattr(module, "_call_handlers", forbidden)
    monkeypatch.setattr(module, "_any_listener", forbidden)
    x = torch.ones(3)
    assert tap(x, "x") is x
    assert has_listener("x") is False
    Tree()(x)


def test_listeners_can_be_nested_and_each_hears_its_own_model():
    outer, inner, other = [], [], []
    tree, stranger = Tree(), Tree()
    with (
        listen(nn.Sequential(tree), lambda name, _: outer.append(name), patterns="*.in"),
        listen(tree, lambda name, _: inner.append(name), patterns="out"),
        listen(stranger, lambda name, _: other.append(name)),
    ):
        tree(torch.ones(1))
    assert (outer, inner, other) == (["0.in"], ["out"], [])


def test_paths_are_right_again_after_a_forward_that_raised():
    tree = Tree()
    names: list[str] = []
    with listen(tree, lambda name, _: names.append(name)):
        tree.branch[0].fails = True
        with pytest.raises(RuntimeError, match="leaf fell"):
            tree(torch.ones(1))
        tree.branch[0].fails = False
        names.clear()
        tap(torch.ones(1), "outside")
        tree(torch.ones(1))
    assert names == ["in", "left.double", "branch.0.double", "branch.1.double", "out"]


def test_an_interrupt_leaves_no_path_behind_once_the_model_runs_again():
    tree, names = Tree(), []
    with listen(tree, lambda name, _: names.append(name)):
        tree.left.forward = lambda x: (_ for _ in ()).throw(KeyboardInterrupt)  # torch runs no hooks after this one
        with pytest.raises(KeyboardInterrupt):
            tree(torch.ones(1))
        del tree.left.forward
        names.clear()
        tree(torch.ones(1))
        assert len(names) == 5
        tap(torch.ones(1), "outside")
    assert names == ["in", "left.double", "branch.0.double", "branch.1.double", "out"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_value_computed_again_by_checkpointing_is_heard_once(reentrant):
    tree, names = Tree(), []
    x = torch.ones(1, requires_grad=True)
    with listen(tree, lambda name, _: names.append(name)):
        # the square needs all of the tree again
        checkpoint(lambda x: tree(x).square(), x, use_reentrant=reentrant).backward()
    assert len(names) == 5
    assert len(tree.left.asked) == 2  # it did run twice


def test_threads_do_not_see_each_others_paths():
    """Each thread is inside its own leaf when it taps; a shared path would name the other's."""
    tree, names = Tree(), []
    together = threading.Barrier(2, timeout=20)

    def meet(*_: object) -> None:
        together.wait()

    with listen(tree, lambda name, value: names.append((name, value.item()))):
        for leaf in tree.branch:
            leaf.register_forward_pre_hook(meet)  # after the listener's own hook: both are inside
        threads = [
            threading.Thread(target=leaf, args=(torch.tensor([float(i)]),)) for i, leaf in enumerate(tree.branch)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(names) == [("branch.0.double", 0.0), ("branch.1.double", 2.0)]


def test_a_compiled_model_is_one_graph_without_listeners_and_calls_them_if_there_are_any():
    torch._dynamo.reset()
    tree, x = Tree(), torch.ones(1)
    whole = torch.compile(tree, fullgraph=True, backend="eager")
    torch.testing.assert_close(whole(x), 8 * x)
    free = torch.compile(tree, backend="eager")
    assert record(free, x) == ["in", "left.double", "branch.0.double", "branch.1.double", "out"]
    torch.testing.assert_close(whole(x), 8 * x)
    torch._dynamo.reset()


def test_a_listener_that_is_never_closed_changes_no_other_model_and_is_freed_with_its_own():
    torch._dynamo.reset()
    forgotten, tree, names = Tree(), Tree(), []
    forgotten.listening = listen(forgotten, lambda name, _: names.append(name))
    forgotten.listening.__enter__()
    forgotten(torch.ones(1))
    assert len(names) == 5
    compiled = torch.compile(tree, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(torch.ones(1)), torch.full((1,), 8.0))
    assert len(names) == 5
    model = weakref.ref(forgotten)
    del forgotten
    gc.collect()
    assert model() is None
    torch._dynamo.reset()


def test_a_model_can_be_copied_while_a_listener_is_registered():
    tree, names = Tree(), []
    with listen(tree, lambda name, _: names.append(name)):
        copy = pickle.loads(pickle.dumps(deepcopy(tree)))
        copy(torch.ones(1))
        assert names == []
        tree(torch.ones(1))
        assert len(names) == 5
