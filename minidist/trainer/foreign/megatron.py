"""A run described in the flags of Megatron-LM and Megatron-DeepSpeed, beside our own.

    python -m minidist train --megatron --tensor-model-parallel-size 2 --num-layers 12 --global-batch-size 64 --dp 4

`--lr`, `--weight-decay`, `--seed` and `--save` are written alike in both. What is left out keeps the default of
minidist: heads are untied, and nothing is dropped out, say. The flags are those of `megatron/training/arguments.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minidist.comm.job.number import NOT_NEGATIVE, read_number
from minidist.trainer.config import Config, ConfigError, Sections
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

BATCH = ("--global-batch-size", "--micro-batch-size", "")
TEXTS = tuple[str, ...]
GRANULARITY, METHOD, BLOCKS = "--recompute-granularity", "--recompute-method", "--recompute-num-layers"
STAGE_LAYERS, STAGES = "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"


def text_files(words: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse weights between the files."""
    if any(word.replace(".", "", 1).isdecimal() for word in words):
        raise ValueError("files are not blended by weights, give their names only")
    return words


def held_out(shares: str) -> float:
    """Return what training, validation and test leave of 1 without training."""
    try:
        first, *others = [read_number(share, float, NOT_NEGATIVE) for share in shares.split(",")]
        return round(sum(others) / (first + sum(others)), 9)
    except (ValueError, ZeroDivisionError):
        raise ValueError("it must be shares such as 949,50,1") from None


MODEL: list[Row] = [
    Row("--num-layers", int, "model.layers"),
    Row("--hidden-size", int, "model.hidden"),
    Row("--ffn-hidden-size", int, "model.intermediate"),
    Row("--num-attention-heads", int, "model.heads"),
    Row("--group-query-attention", bool),
    Row("--num-query-groups", int),
    Row("--seq-length", int, "data.sequence"),
    Row("--hidden-dropout", float, "model.dropout"),
    Row("--untie-embeddings-and-output-weights", bool, "model.tied", lambda untied: not untied),
    *unused("attention weights are never dropped", float, "--attention-dropout"),
    *unused("rotary positions have no table: --seq-length is the limit", int, "--max-position-embeddings"),
    *unused("positions are always rotary, with base 10,000", str, "--position-embedding-type"),
    *unused("positions are always rotary, with base 10,000", bool, "--use-rotary-position-embeddings",
            "--no-position-embedding", "--no-rope-fusion"),
    *unused("positions are always rotary, with base 10,000", float, "--rotary-base", "--rotary-percent"),
    *unused("norms are always RMSNorm", str, "--normalization"),
    *unused("norms always use an epsilon of 1e-5", float, "--norm-epsilon", "--layernorm-epsilon"),
    *unused("the MLP is always SwiGLU", bool, "--swiglu"),
    *unused("matrices never have a bias", bool, "--disable-bias-linear"),
    *unused("weights are always drawn with deviation 0.02", float, "--init-method-std"),
    *unused("the kernels are PyTorch's own", bool, "--use-flash-attn", "--use-mcore-models", "--no-persist-layer-norm",
            "--attention-softmax-in-fp32", "--no-masked-softmax-fusion", "--no-bias-gelu-fusion",
            "--no-bias-swiglu-fusion", "--no-bias-dropout-fusion", "--no-gradient-accumulation-fusion",
            "--no-query-key-layer-scaling"),
    *unused("the model is minidist's own", str, "--transformer-impl", "--attention-backend"),
    *refused("experts are not trained here, leave it out", int, "--num-experts"),
]  # fmt: skip

PARALLEL: list[Row] = [
    Row("--tensor-model-parallel-size", int, "parallel.tp"),
    Row("--pipeline-model-parallel-size", int, "parallel.pp"),
    Row(STAGE_LAYERS, int, convert=at_least_one),
    Row(STAGES, int, "parallel.chunks"),
    Row("--sequence-parallel", bool, "parallel.sp"),
    Row("--zero-stage", int, "parallel.zero"),
    Row("--use-distributed-optimizer", bool, "parallel.zero", if_on(1)),
    Row("--checkpoint-activations", bool, "memory.recompute", if_on("full")),
    Row("--recompute-activations", bool, "memory.recompute", if_on("selective")),
    Row(GRANULARITY, str, "memory.recompute", among({"full": "full", "selective": "selective"})),
    Row(METHOD, str, convert=among({"uniform": None, "block": None})),
    Row(BLOCKS, int, convert=at_least_one),
    Row("--bf16", bool, "run.precision", if_on("bfloat16")),
    Row("--fp16", bool, "run.precision", if_on("float16")),
    *unused("the scale of the loss is always found while training", float, "--loss-scale"),
    *unused("the loss scale always starts at 2**16", float, "--initial-loss-scale"),
    *unused("the loss scale always doubles after 2,000 steps without an overflow", float, "--loss-scale-window"),
    *unused("every overflow halves the loss scale", int, "--hysteresis"),
    *unused("the loss scale never falls below 1", float, "--min-loss-scale"),
    *unused("gradients travel in --precision", bool, "--accumulate-allreduce-grads-in-fp32"),
    *unused("gradients are always reduced during backward", bool, "--overlap-grad-reduce"),
    *unused("--zero decides when parameters are gathered", bool, "--overlap-param-gather"),
    *unused("the strategy decides what overlaps", bool, "--no-async-tensor-model-parallel-allreduce",
            "--tp-comm-overlap", "--no-overlap-p2p-communication"),
    *unused("recomputation keeps its inputs where they are", bool, "--distribute-saved-activations"),
    *unused("the launcher decides how ranks talk: mpirun or torchrun", str, "--distributed-backend"),
    *unused("the launcher decides how long ranks wait", int, "--distributed-timeout-minutes"),
    Row("--context-parallel-size", int, convert=only("sequences are not split over ranks here, use 1", 1)),
    Row("--expert-model-parallel-size", int, convert=only("experts are not trained here, use 1", 1)),
]  # fmt: skip

TRAINING: list[Row] = [
    *(Row(name, int, convert=at_least_one) for name in BATCH if name),
    Row("--train-iters", int, "run.steps"),
    Row("--lr-warmup-iters", int, "optimizer.warmup"),
    Row("--adam-beta1", float, "optimizer.beta1"),
    Row("--adam-beta2", float, "optimizer.beta2"),
    Row("--clip-grad", float, "optimizer.clip"),
    Row("--optimizer", str, convert=only("the optimizer is AdamW, use adam", "adam")),
    *unused("epsilon is always 1e-8", float, "--adam-eps"),
    *unused("after its warm-up the rate always falls along a cosine", str, "--lr-decay-style"),
    *unused("the rate always falls until the last step, and warms up for a fraction of all", int, "--lr-decay-iters"),
    *unused("the rate always falls to a tenth of its peak", float, "--min-lr"),
    *unused("the rate always starts at its peak divided by the steps of the warm-up", float, "--lr-warmup-init"),
    Row("--lr-warmup-fraction", float),
    *refused("the batch does not grow here, leave it out", TEXTS, "--rampup-batch-size"),
    *refused("say it in steps, with --train-iters and --lr-warmup-iters", int, "--train-samples",
             "--lr-decay-samples", "--lr-warmup-samples"),
    Row("--save-interval", int, "run.save_every"),
    Row("--load", str, "run.resume", lambda folder: True),
    *unused("a checkpoint is saved and loaded with all it has", bool, "--no-save-optim", "--no-save-rng",
            "--no-load-optim", "--no-load-rng"),
    *refused("a run is continued with its step and its optimizer, leave it out", bool, "--finetune"),
    *unused("every step is reported", int, "--log-interval"),
    *unused("--metrics FILE has what each step measures", str, "--tensorboard-dir"),
    *unused("nothing is measured on the held-out text while training", int, "--eval-interval", "--eval-iters"),
    Row("--data-path", TEXTS, "data.text", text_files, "the files are read as plain text"),
    Row("--split", str, "data.held_out", held_out, "all but the first share is held out"),
    *unused("tokens are bytes, or those of a tokenizer.json: --tokenizer FILE", str, "--tokenizer-type",
            "--tokenizer-model", "--vocab-file", "--merge-file"),
    *unused("the vocabulary is that of the tokenizer", int, "--vocab-size", "--make-vocab-size-divisible-by"),
    *unused("one thread reads ahead", int, "--num-workers"),
]  # fmt: skip

ROWS = (*MODEL, *PARALLEL, *TRAINING)


def read_megatron(given: dict[str, Any], files: Sections, flags: Sections) -> tuple[Sections, list[str]]:
    """Return the options that flags of Megatron stand for, and notes on those with no effect or another one.

    Parameters
    ----------
    given
        Values by flag; a switch is True.
    files, flags
        What our own files say, which is overruled, and our own flags, which overrule; such as the `dp` to count
        microbatches with.

    Raises
    ------
    ConfigError
        For values that cannot be, contradict each other, or need something that is not known.
    """
    sections, notes = translate(ROWS, given)
    whole = merged(Config().sections(), files, sections, flags)
    sections = merged(
        sections,
        _query_groups(given),
        _virtual_stages(given, whole),
        _recompute(given, whole),
        _warm_up(given, whole),
        batch_sections(BATCH, given, whole["parallel"]),
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
