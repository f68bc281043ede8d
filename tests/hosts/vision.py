"""Makes timm, open_clip and Composer importable: they are in a folder of their own, with a torchvision without ops."""

import functools
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

FOLDER = Path(sys.prefix) / "vision"


@functools.cache
def use_vision() -> None:
    """Call it before importing timm or open_clip; skips the test where they are not installed."""
    if not FOLDER.is_dir():
        pytest.skip("timm and open_clip are not installed in .venv/vision")
    # torchvision describes these two operators for torch.compile when it is imported, and its own library, which
    # defines them, needs another build of torch.
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    use_vision.library = library  # type: ignore[attr-defined]
    with on_path(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import open_clip  # noqa: F401
        import timm  # noqa: F401


@contextmanager
def on_path() -> Iterator[None]:
    """Only while something is imported: processes that tests start inherit the path, and transformers would find a
    torchvision there that it cannot import."""
    sys.path.append(str(FOLDER))
    try:
        yield
    finally:
        sys.path.remove(str(FOLDER))
