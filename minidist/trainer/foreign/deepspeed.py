"""A run described as for DeepSpeed: its JSON file, with `//` and `/* */` comments.

    {"train_batch_size": 32,                                [data] batch = 32
     "fp16": {"enabled": true},                      ──▶    [run] precision = "float16"
     "zero_optimization": {"stage": 2}}                     [parallel] zero = 2

What the file leaves out keeps the default of minidist: without `gradient_clipping`, `--clip` is 1 here and off there.
The keys are those of the page "DeepSpeed Configuration JSON" of its documentation.
"""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Any

from minidist.trainer.config import Config, ConfigError, Sections
from minidist.trainer.files import FileError, read_tree, typed
from minidist.trainer.foreign.options import (
    Row,
    among,
    at_least_one,
    batch_sections,
    if_on,
    merged,
    only,
    refused,
    translate,
    unused,
)

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
PAIR = tuple[float, float]
ZERO = "zero_optimization."
STATE, PARAMETERS = f"{ZERO}offload_optimizer.", f"{ZERO}offload_param."
ADAM, WARMUP, CHECKPOINTING = "optimizer.params.", "scheduler.params.", "activation_checkpointing."
ADAMW_ONLY = "the optimizer is AdamW, use that"
METRICS = "--metrics writes what each step measures, --trace when it did what"

TOP: list[Row] = [
    *(Row(name, int, convert=at_least_one) for name in BATCH),
    Row("gradient_clipping", float, "optimizer.clip"),
    Row("fp16.enabled", bool, "run.precision", if_on("float16")),
    Row("bf16.enabled", bool, "run.precision", if_on("bfloat16")),
    Row("bfloat16.enabled", bool, "run.precision", if_on("bfloat16")),
    *unused("every step is reported", int, "steps_per_print"),
    *unused(METRICS, bool, "wall_clock_breakdown", "memory_breakdown", "dump_state"),
    *unused("losses are divided by the tokens of the whole batch, so gradients only have to be summed", bool,
            "prescale_gradients"),
    *unused("gradients are summed, and never divided", float, "gradient_predivide_factor"),
    *unused("gradients travel in --precision", bool, "fp32_allreduce"),
    *unused("gradients travel in --precision", str, "communication_data_type"),
    *unused("gradients are added up in --precision", str, "data_types.grad_accum_dtype"),
    *unused("the gradient of the embedding travels whole", bool, "sparse_gradients"),
    *unused("--zero and --offload work for AdamW, the only optimizer here", bool,
            "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
    *unused("the scale of the loss is always found while training", float, "fp16.loss_scale"),
    *unused("the loss scale always starts at 2**16", int, "fp16.initial_scale_power"),
    *unused("the loss scale always doubles after 2,000 steps without an overflow", int, "fp16.loss_scale_window"),
    *unused("every overflow halves the loss scale", int, "fp16.hysteresis"),
    *unused("every overflow halves the loss scale", bool, "fp16.consecutive_hysteresis"),
    *unused("the loss scale never falls below 1", float, "fp16.min_loss_scale"),
    *unused("the inputs are tokens, which are not cast", bool, "fp16.auto_cast"),
    *unused("--recompute says what backward computes again, and keeps its inputs where they are", bool,
            *(CHECKPOINTING + name for name in ("partition_activations", "cpu_checkpointing", "profile",
            "contiguous_memory_optimization", "synchronize_checkpoint_boundary"))),
    *unused('--recompute "every K" says how many there are', int, f"{CHECKPOINTING}number_checkpoints"),
    *unused(METRICS, dict, "tensorboard", "wandb", "comet", "csv_monitor", "comms_logger", "flops_profiler"),
    *unused("offloaded files are mapped into memory", dict, "aio"),
    *unused("each rank writes its own pieces of a checkpoint, while training goes on", dict, "checkpoint"),
    *refused("it is not offered here, leave it out", dict, "amp", "autotuning", "compression_training", "elasticity",
             "curriculum_learning", "data_efficiency", "progressive_layer_drop", "sparse_attention"),
]  # fmt: skip

OPTIMIZER: list[Row] = [
    Row("optimizer.type", str, convert=only(ADAMW_ONLY, "adam", "adamw")),
    Row(f"{ADAM}lr", float, "optimizer.lr"),
    Row(f"{ADAM}betas", PAIR),
    Row(f"{ADAM}weight_decay", float, "optimizer.weight_decay"),
    *unused("epsilon is always 1e-8", float, f"{ADAM}eps"),
    *unused("AdamW is always PyTorch's", bool, f"{ADAM}torch_adam", f"{ADAM}fused"),
    Row(f"{ADAM}adam_w_mode", bool, convert=only(ADAMW_ONLY, True)),
    Row(f"{ADAM}bias_correction", bool, convert=only("moments are always corrected, use true", True)),
    Row(f"{ADAM}amsgrad", bool, convert=only("AMSGrad is not offered, use false", False)),
    Row("scheduler.type", str, convert=only("the rate warms up and falls along a cosine, use WarmupCosineLR",
        "warmuplr", "warmupdecaylr", "warmupcosinelr"), note="the rate always falls along a cosine after its warm-up"),
    Row(f"{WARMUP}warmup_num_steps", int, "optimizer.warmup"),
    Row(f"{WARMUP}warmup_max_lr", float, "optimizer.lr"),
    Row(f"{WARMUP}total_num_steps", int, "run.steps", note="the run ends where the rate has fallen"),
    *unused("the rate always starts at its peak divided by the steps of the warm-up", float,
            f"{WARMUP}warmup_min_lr", f"{WARMUP}warmup_min_ratio"),
    *unused("the rate always rises along a line", str, f"{WARMUP}warmup_type"),
    *unused("the rate always falls to a tenth of its peak", float, f"{WARMUP}cos_min_ratio"),
    *unused("a resumed run knows its step", int, f"{WARMUP}last_batch_iteration"),
]  # fmt: skip

SHARDING: list[Row] = [
    Row(f"{ZERO}stage", int, "parallel.zero"),
    Row(f"{ZERO}mics_shard_size", int, "parallel.hsdp", lambda ranks: ranks if ranks > 0 else None),
    Row(f"{ZERO}reduce_bucket_size", int),
    *unused("gradients are always reduced during backward", bool, f"{ZERO}overlap_comm", f"{ZERO}grad_hooks"),
    *unused("the gradients of a bucket always lie in one piece", bool, f"{ZERO}contiguous_gradients"),
    *unused("gradients are always reduce-scattered from --zero 1 on", bool, f"{ZERO}reduce_scatter"),
    *unused("updated parameters are always all-gathered", bool, f"{ZERO}allgather_partitions"),
    *unused("parameters are gathered in the buckets of their gradients", int, f"{ZERO}allgather_bucket_size"),
    *unused("every bucket is shared out over all ranks", bool, f"{ZERO}round_robin_gradients"),
    *unused("the model uses all its parameters", bool, f"{ZERO}ignore_unused_parameters"),
    *unused("checkpoints fit any number of ranks", bool, f"{ZERO}elastic_checkpoint"),
    *unused("a checkpoint is loaded with all it has", bool, f"{ZERO}load_from_fp32_weights"),
    *unused("--offload cuts the state into chunks of its own", int, f"{ZERO}sub_group_size"),
    *unused("the next block is always gathered ahead, as a whole", int, f"{ZERO}stage3_prefetch_bucket_size"),
    *unused("parameters that are in no block stay whole, all others are sharded", int,
            f"{ZERO}stage3_param_persistence_threshold", f"{ZERO}stage3_model_persistence_threshold"),
    *unused("at most two blocks are whole at a time", int,
            f"{ZERO}stage3_max_live_parameters", f"{ZERO}stage3_max_reuse_distance"),
    *unused("each rank writes its own pieces of a checkpoint; export puts them together", bool,
            f"{ZERO}stage3_gather_16bit_weights_on_model_save", f"{ZERO}stage3_gather_fp16_weights_on_model_save"),
    *unused("training sends what it sends in --precision", bool,
            f"{ZERO}zero_quantized_weights", f"{ZERO}zero_quantized_gradients"),
    *unused("parameters are gathered from all ranks that share them", int, f"{ZERO}zero_hpz_partition_size"),
    Row(f"{STATE}device", str, "memory.offload", among({"none": "none", "cpu": "memory", "nvme": "disk"})),
    Row(f"{ZERO}cpu_offload", bool, "memory.offload", if_on("memory")),
    Row(f"{STATE}nvme_path", str),
    *unused("all of the state is offloaded", float, f"{STATE}ratio"),
    *unused("--offload decides what memory is pinned", bool, f"{STATE}pin_memory", f"{PARAMETERS}pin_memory"),
    *unused("--offload always works on one chunk while the next is fetched", bool,
            *(STATE + name for name in ("pipeline", "pipeline_read", "pipeline_write", "fast_init"))),
    *unused("--offload keeps two chunks in memory, of its own size", int, f"{STATE}buffer_count",
            *(PARAMETERS + name for name in ("buffer_count", "buffer_size", "max_in_cpu"))),
    *unused("the parameters of --zero 3 go where --offload sends the state of the optimizer", str,
            f"{PARAMETERS}device", f"{PARAMETERS}nvme_path"),
]  # fmt: skip

ROWS = (*TOP, *OPTIMIZER, *SHARDING)


def read_deepspeed(path: Path, known: Sections | None = None) -> tuple[Sections, list[str]]:
    """Return the options in a DeepSpeed JSON, and notes on what has no effect or another one.

    train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * dp: of the three in the file any
    two will do if `known` has the ranks of the data axis; all three say how many ranks that has to be.

    Parameters
    ----------
    known
        What is known otherwise: `dp` and `pp` in its section "parallel" are looked at.

    Raises
    ------
    ConfigError
        If the file cannot be read, or for a key or a value that cannot be, naming the nearest one that exists.
    """
    try:
        given = _flatten(_load(path))
        sections, notes = translate(ROWS, given)
        parallel = merged(Config().sections(), known or {})["parallel"]
        sections = merged(sections, batch_sections(BATCH, given, parallel))
        betas, elements = given.get(f"{ADAM}betas"), given.get(f"{ZERO}reduce_bucket_size")
        if betas is not None:
            sections = merged(sections, {"optimizer": {"beta1": betas[0], "beta2": betas[1]}})
        if elements is not None:
            bytes = 2 if "precision" in sections.get("run", {}) else 4  # of an element in float16 or bfloat16, float32
            sections = merged(sections, {"parallel": {"bucket_mib": elements * bytes / (1 << 20)}})
        folder = given.get(f"{STATE}nvme_path")
        if folder is not None and sections.get("memory", {}).get("offload") == "disk":
            sections = merged(sections, {"memory": {"offload_folder": folder}})
        elif folder is not None:
            notes.append(f"{STATE}nvme_path: no effect here, the state goes to a disk only if device is nvme")
    except ConfigError as error:
        raise ConfigError(f"--deepspeed {path}: {error}") from None
    return sections, notes


# ---------------------------------------------------------------- the file


def _load(path: Path) -> dict[str, Any]:
    try:
        return read_tree(path, lambda text: json.loads(_without_comments(text), object_pairs_hook=_once))
    except FileError as error:
        raise ConfigError(f"it {error}") from None


def _without_comments(text: str) -> str:
    """Blank out comments; strings with slashes stay, and so do the places that JSON's errors name."""
    string_or_comment = r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/'

    def blank(match: re.Match[str]) -> str:
        return match[0] if match[0].startswith('"') else re.sub(r"[^\n]", " ", match[0])

    return re.sub(string_or_comment, blank, text, flags=re.DOTALL)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise FileError(f"has {twice[0]} twice in one section: leave one out")
    return dict(pairs)


def _flatten(options: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return values by their dotted names, checked to be ones that DeepSpeed has, of the right type."""
    kinds = {row.name: row.kind for row in ROWS}
    flat: dict[str, Any] = {}
    for key, value in options.items():
        name = prefix + key
        inner = any(known.startswith(f"{name}.") for known in kinds)
        if name not in kinds and not inner:
            raise ConfigError(f"there is no key {name}: {_nearest(name, list(kinds))}")
        if value == "auto":
            raise ConfigError(f'{name} is "auto", which only Hugging Face\'s Trainer fills in: write its value')
        if value is None:  # as if it were left out
            continue
        kind = dict if inner else kinds[name]
        try:
            whole = kind is int and type(value) is float and value.is_integer()  # such as sizes of 5e8
            value = typed(int(value) if whole else value, kind)
        except ValueError as error:
            raise ConfigError(f"{name} = {json.dumps(value)[:60]} {error}") from None
        flat |= _flatten(value, f"{name}.") if inner else {name: value}
    return flat


def _nearest(name: str, known: list[str]) -> str:
    """Name the key that was meant: misspelt, or in the wrong section."""
    known = list(dict.fromkeys(".".join(name.split(".")[:end]) for name in known for end in range(1, 5)))
    last = name.rpartition(".")[2]
    elsewhere = {full.rpartition(".")[2]: full for full in reversed(known)}
    near = [elsewhere[last]] if last in elsewhere else difflib.get_close_matches(name, known, n=1)
    near = near or [elsewhere[other] for other in difflib.get_close_matches(last, elsewhere, n=1)]
    return f"did you mean {near[0]}?" if near else "leave it out, or see DeepSpeed's documentation"
