"""Read the `curriculum_learning` block of a DeepSpeed config.

    {"curriculum_learning": {"enabled": true, "curriculum_type": "seqlen", "min_difficulty": 64, "max_difficulty": 1024,
        "schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 45000, "difficulty_step": 8}}}

gives the same length at every step as DeepSpeed, with its floating-point arithmetic. (Newer versions of DeepSpeed
refuse the block.) Settings that would give other lengths and unknown keys are refused: a schedule that is read wrongly
would only show in the loss.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab.schedule.seqlen import SeqLenWarmup

_KEYS = ("enabled", "curriculum_type", "min_difficulty", "max_difficulty", "schedule_type", "schedule_config")
_SETTINGS = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
}


def read_deepspeed(config: str | Path | Mapping[str, Any]) -> SeqLenWarmup:
    """The schedule of a DeepSpeed config: a whole config or its block, as a dict, JSON text or a file."""
    block = _find_block(_load(config))
    _check_keys("curriculum_learning", block, _KEYS)
    if block["enabled"] is not True:
        raise ValueError(f"the block has enabled={block['enabled']!r}, so DeepSpeed used no warmup; leave it out")
    if block["curriculum_type"] != "seqlen":
        raise ValueError(f"curriculum_type={block['curriculum_type']!r} is not supported; only 'seqlen' is read")
    kind, settings = block["schedule_type"], block["schedule_config"]
    if kind == "custom":
        raise ValueError("schedule_type='custom' keeps its function outside the config; try SeqLenWarmup.custom(...)")
    if kind not in _SETTINGS:
        raise ValueError(f"schedule_type={kind!r} is not known; try {' or '.join(map(repr, _SETTINGS))}")
    _check_keys(f"schedule_config of {kind}", settings, _SETTINGS[kind])
    first, last = block["min_difficulty"], block["max_difficulty"]
    if kind != "fixed_discrete":
        root = {"kind": "root", "degree": settings["root_degree"]} if kind == "fixed_root" else {}
        steps, multiple = settings["total_curriculum_step"], settings["difficulty_step"]
        return SeqLenWarmup(start=first, end=last, steps=steps, multiple=multiple, arithmetic="deepspeed", **root)
    warmup = SeqLenWarmup.discrete(settings["difficulty"], settings["max_step"])
    if (warmup.start, warmup.end) != (first, last):
        raise ValueError(
            f"difficulty={list(warmup.lengths)} does not go from min_difficulty={first} to max_difficulty={last}; "
            f"try min_difficulty={warmup.start} and max_difficulty={warmup.end}"
        )
    return warmup


def _load(config: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    is_text = isinstance(config, str) and config.lstrip().startswith("{")
    try:
        loaded = json.loads(str(config) if is_text else Path(config).read_text())
    except json.JSONDecodeError as error:
        where = "the text" if is_text else str(config)
        raise ValueError(f"{where} is not JSON ({error}); numbers take no underscores: 45000, not 45_000") from error
    except OSError as error:
        raise ValueError(f"cannot read {config} ({error.strerror}); give a file, JSON text or a dict") from error
    if not isinstance(loaded, Mapping):
        raise ValueError(f"a DeepSpeed config is a JSON object, got a {type(loaded).__name__}")
    return loaded


def _find_block(config: Mapping[str, Any]) -> Any:
    if "curriculum_learning" in config:
        return config["curriculum_learning"]
    if "data_efficiency" in config:
        raise ValueError(
            "data_efficiency chooses samples as well as lengths and is not read; write its length schedule as "
            "SeqLenWarmup(start=..., end=..., steps=...)"
        )
    if "schedule_type" not in config:
        raise ValueError(f"no curriculum_learning block among {sorted(config)}")
    return config


def _check_keys(where: str, block: Any, expected: tuple[str, ...]) -> None:
    if not isinstance(block, Mapping):
        raise ValueError(f"{where} is {block!r}, which is not a JSON object with {', '.join(expected)}")
    missing = [key for key in expected if key not in block]
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    unknown = sorted(set(block) - set(expected))
    if unknown:
        raise ValueError(f"{where} has {', '.join(unknown)}, which is not supported; try only {', '.join(expected)}")
