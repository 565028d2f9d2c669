"""A run described in the flags of Megatron-LM and Megatron-DeepSpeed, beside our own.

    python -m minidist train --megatron --tensor-model-parallel-size 2 --num-layers 12 --global-batch-size 64 --dp 4

`--lr`, `--weight-decay`, `--seed` and `--save` are written alike in both. What is left out keeps the default of
minidist: heads are untied, and nothing is dropped out, say.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minidist.trainer.config import Config, ConfigError, Sections
from minidist.trainer.foreign.names import BLOCKS, GRANULARITY, MEGATRON, MEGATRON_BATCH, METHOD, STAGE_LAYERS, STAGES
from minidist.trainer.foreign.options import batch_sections, merged, translate


def read_megatron(given: dict[str, Any], files: Sections, flags: Sections) -> tuple[Sections, list[str]]:
    """Return our options for Megatron's flags, and notes on flags with no effect here, or another effect.

    Parameters
    ----------
    given
        Values by flag; a switch is True.
    files, flags
        What our own files say, which Megatron's flags overrule, and our own flags, which overrule those. The number of
        microbatches depends on their `dp`, for one.

    Raises
    ------
    ConfigError
        For values that cannot be, contradict each other, or need something that is not known.
    """
    sections, notes = translate(MEGATRON, given)
    whole = merged(Config().sections(), files, sections, flags)
    sections = merged(
        sections,
        _query_groups(given),
        _virtual_stages(given, whole),
        _recompute(given, whole),
        _warm_up(given, whole),
        batch_sections(MEGATRON_BATCH, given, whole["parallel"]),
    )
    folder, save = given.get("--load"), whole["run"]["save"]
    if folder is not None and (not save or Path(folder) != Path(save)):
        raise ConfigError(f"--load {folder} must be the folder that the run saves to: add --save {folder}")
    return sections, notes


def _query_groups(given: dict[str, Any]) -> Sections:
    groups = given.get("--num-query-groups")
    if "--group-query-attention" in given:
        return {"model": {"key_value_heads": groups or 1}}
    if groups is not None:
        raise ConfigError(f"--num-query-groups {groups} has an effect only with --group-query-attention: add that")
    return {}


def _virtual_stages(given: dict[str, Any], whole: Sections) -> Sections:
    """Interleave; the number of stages on a rank may be said by the layers of each."""
    if STAGES in given:
        return {"parallel": {"schedule": "interleaved"}}
    if STAGE_LAYERS not in given:
        return {}
    each, layers, pp = given[STAGE_LAYERS], whole["model"]["layers"], whole["parallel"]["pp"]
    if layers % (pp * each):
        raise ConfigError(
            f"{STAGE_LAYERS} {each} cannot be: {layers} layers on {pp} pipeline ranks make no whole stages of it"
        )
    return {"parallel": {"schedule": "interleaved", "chunks": layers // (pp * each)}}


def _warm_up(given: dict[str, Any], whole: Sections) -> Sections:
    fraction, steps = given.get("--lr-warmup-fraction"), whole["run"]["steps"]
    if fraction is None:
        return {}
    if "--lr-warmup-iters" in given or not 0 <= fraction <= 1:
        raise ConfigError(
            f"--lr-warmup-fraction {fraction} must be from 0 to 1 of the {steps} steps, and --lr-warmup-iters left out"
        )
    return {"optimizer": {"warmup": round(fraction * steps)}}


def _recompute(given: dict[str, Any], whole: Sections) -> Sections:
    """Turn full recomputation of several blocks at a time into our "every K"."""
    method, blocks = given.get(METHOD), given.get(BLOCKS, 1)
    if METHOD not in given and BLOCKS not in given:
        return {}
    if whole["memory"]["recompute"] != "full":
        raise ConfigError(f"{METHOD} and {BLOCKS} say how blocks are recomputed: add {GRANULARITY} full")
    if method == "block" and blocks < whole["model"]["layers"] / whole["parallel"]["pp"]:
        raise ConfigError(
            f"{METHOD} block leaves all but {blocks} of a rank's blocks out, which is not offered: use uniform"
        )
    return {"memory": {"recompute": "full" if method == "block" or blocks == 1 else f"every {blocks}"}}
