"""What DeepSpeed and Megatron-LM call the options of a run, and what becomes of each here: one table for both.

    "zero_optimization": {"stage": 2, "overlap_comm": true}        --num-layers 12  --log-interval 10
                           │                 │                          │                 │
                     [parallel] zero      a note                 [model] layers        a note

A name that begins with dashes is a flag of Megatron's; any other is a key of DeepSpeed's, behind its sections. They
come from the page "DeepSpeed Configuration JSON" and from `megatron/training/arguments.py`. An option that the user
leaves out keeps the default of minidist, which may differ from the other program's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from minidist.comm.job.number import NOT_NEGATIVE, read_number


@dataclass(frozen=True)
class Row:
    """One name of another program.

    Attributes
    ----------
    name, kind
        As it is written there, and the type of its value: a key of `trainer.files.WORDS`, or `object` for any.
    to : str
        Our section and option, such as "parallel.zero". Empty if the name has no counterpart, or only with others.
    convert
        From their value to ours, None to decide nothing. A ValueError refuses the value, and says what it must be.
    note : str
        What the user should know: why the name has no effect here, or how its effect differs.
    """

    name: str
    kind: Any
    to: str = ""
    convert: Callable[[Any], Any] = lambda value: value
    note: str = ""


# ---------------------------------------------------------------- from their values to ours


def among(choices: Mapping[Any, Any], why: str = "") -> Callable[[Any], Any]:
    """Return a conversion by a table, which refuses other values."""

    def choose(value: Any) -> Any:
        word = value.lower() if isinstance(value, str) else value
        if word not in choices:
            raise ValueError(why or f"it must be one of {', '.join(choices)}")
        return choices[word]

    return choose


def if_on(ours: Any) -> Callable[[Any], Any]:
    """Return the conversion of a switch that, when on, stands for a value of ours."""
    return among({True: ours, False: None})


def only(why: str, *choices: Any) -> Callable[[Any], Any]:
    """Return a conversion that accepts only values that ask for what happens here anyway."""
    return among(dict.fromkeys(choices), why)


def refuse(why: str) -> Callable[[Any], Any]:
    """Return a conversion that refuses all values but a section that is off."""

    def convert(value: Any) -> None:
        if not (isinstance(value, dict) and value.get("enabled") is False):
            raise ValueError(why)

    return convert


def at_least_one(value: int) -> int:
    """Refuse a count below 1."""
    if value < 1:
        raise ValueError("it must be at least 1")
    return value


def text_files(words: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse numbers between the files: Megatron blends files by weights."""
    if any(word.replace(".", "", 1).isdecimal() for word in words):
        raise ValueError("files are not blended by weights, give their names only")
    return words


def held_out(shares: str) -> float:
    """Return the fraction that is held out, from shares of training, validation and test."""
    try:
        first, *others = [read_number(share, float, NOT_NEGATIVE) for share in shares.split(",")]
        return round(sum(others) / (first + sum(others)), 9)
    except (ValueError, ZeroDivisionError):
        raise ValueError("it must be shares such as 949,50,1") from None


# ---------------------------------------------------------------- the table

DEEPSPEED_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
MEGATRON_BATCH = ("--global-batch-size", "--micro-batch-size", "")
FILES, PAIR = tuple[str, ...], tuple[float, float]
ZERO, STATE, PARAMETERS = (f"zero_optimization{inner}." for inner in ("", ".offload_optimizer", ".offload_param"))
ADAM, SCHEDULE, CHECKPOINTING = "optimizer.params.", "scheduler.params.", "activation_checkpointing."
GRANULARITY, METHOD, BLOCKS = "--recompute-granularity", "--recompute-method", "--recompute-num-layers"
STAGE_LAYERS, STAGES = "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"
ADAMW_ONLY = "the optimizer is AdamW, use"

TRANSLATED = [
    # the model and the text
    Row("--num-layers", int, "model.layers"),
    Row("--hidden-size", int, "model.hidden"),
    Row("--ffn-hidden-size", int, "model.intermediate"),
    Row("--num-attention-heads", int, "model.heads"),
    Row("--group-query-attention", bool),
    Row("--num-query-groups", int),
    Row("--hidden-dropout", float, "model.dropout"),
    Row("--untie-embeddings-and-output-weights", bool, "model.tied", lambda untied: not untied),
    Row("--seq-length", int, "data.sequence"),
    Row("--data-path", FILES, "data.text", text_files, "the files are read as plain text"),
    Row("--split", str, "data.held_out", held_out, "all but the first share is held out"),
    *(Row(name, int, convert=at_least_one) for name in (*DEEPSPEED_BATCH, *MEGATRON_BATCH) if name),
    # the optimizer and the rate
    Row("optimizer.type", str, convert=only(f"{ADAMW_ONLY} that", "adam", "adamw")),
    Row("--optimizer", str, convert=only(f"{ADAMW_ONLY} adam", "adam")),
    Row(f"{ADAM}adam_w_mode", bool, convert=only(f"{ADAMW_ONLY} that", True)),
    Row(f"{ADAM}bias_correction", bool, convert=only("moments are always corrected, use true", True)),
    Row(f"{ADAM}amsgrad", bool, convert=only("AMSGrad is not offered, use false", False)),
    Row(f"{ADAM}lr", float, "optimizer.lr"),
    Row(f"{ADAM}weight_decay", float, "optimizer.weight_decay"),
    Row(f"{ADAM}betas", PAIR),
    Row("--adam-beta1", float, "optimizer.beta1"),
    Row("--adam-beta2", float, "optimizer.beta2"),
    Row("gradient_clipping", float, "optimizer.clip"),
    Row("--clip-grad", float, "optimizer.clip"),
    Row("scheduler.type", str, convert=only("the rate warms up and falls along a cosine, use WarmupCosineLR",
        "warmuplr", "warmupdecaylr", "warmupcosinelr"), note="the rate always falls along a cosine after its warm-up"),
    Row(f"{SCHEDULE}warmup_max_lr", float, "optimizer.lr"),
    Row(f"{SCHEDULE}warmup_num_steps", int, "optimizer.warmup"),
    Row("--lr-warmup-iters", int, "optimizer.warmup"),
    Row("--lr-warmup-fraction", float),
    Row(f"{SCHEDULE}total_num_steps", int, "run.steps", note="the run ends where the rate has fallen"),
    Row("--train-iters", int, "run.steps"),
    Row("--save-interval", int, "run.save_every"),
    Row("--load", str, "run.resume", lambda folder: True),
    # ranks, memory and precision
    Row("--tensor-model-parallel-size", int, "parallel.tp"),
    Row("--pipeline-model-parallel-size", int, "parallel.pp"),
    Row(STAGE_LAYERS, int, convert=at_least_one),
    Row(STAGES, int, "parallel.chunks"),
    Row("--sequence-parallel", bool, "parallel.sp"),
    Row("--context-parallel-size", int, convert=only("sequences are not split over ranks here, use 1", 1)),
    Row("--expert-model-parallel-size", int, convert=only("experts are not trained here, use 1", 1)),
    Row(f"{ZERO}stage", int, "parallel.zero"),
    Row("--zero-stage", int, "parallel.zero"),
    Row("--use-distributed-optimizer", bool, "parallel.zero", if_on(1)),
    Row(f"{ZERO}mics_shard_size", int, "parallel.hsdp", lambda ranks: ranks if ranks > 0 else None),
    Row(f"{ZERO}reduce_bucket_size", int),
    Row(f"{STATE}device", str, "memory.offload", among({"none": "none", "cpu": "memory", "nvme": "disk"})),
    Row(f"{STATE}nvme_path", str),
    Row(f"{ZERO}cpu_offload", bool, "memory.offload", if_on("memory")),
    Row("--checkpoint-activations", bool, "memory.recompute", if_on("full")),
    Row("--recompute-activations", bool, "memory.recompute", if_on("selective")),
    Row(GRANULARITY, str, "memory.recompute", among({"full": "full", "selective": "selective"})),
    Row(METHOD, str, convert=among({"uniform": None, "block": None})),
    Row(BLOCKS, int, convert=at_least_one),
    Row("fp16.enabled", bool, "run.precision", if_on("float16")),
    *(Row(name, bool, "run.precision", if_on("bfloat16")) for name in ("bf16.enabled", "bfloat16.enabled", "--bf16")),
    Row("--fp16", bool, "run.precision", if_on("float16")),
    # what would change the result, and is not offered
    *(Row(name, dict, convert=refuse("it is not offered here, leave it out"), note="it is not offered here") for name in
        ("amp", "autotuning", "compression_training", "elasticity", "curriculum_learning", "data_efficiency",
         "progressive_layer_drop", "sparse_attention")),
    *(Row(name, int, convert=refuse("say it in steps, with --train-iters and --lr-warmup-iters")) for name in
        ("--train-samples", "--lr-decay-samples", "--lr-warmup-samples")),
    Row("--rampup-batch-size", FILES, convert=refuse("the batch does not grow here, leave it out")),
    Row("--num-experts", int, convert=refuse("experts are not trained here, leave it out")),
    Row("--finetune", bool, convert=refuse("a run is continued with its step and its optimizer, leave it out")),
]  # fmt: skip


def inside(section: str, *names: str) -> list[str]:
    """Return the names of a section of DeepSpeed's."""
    return [section + name for name in names]


# By the reason why they have no effect here. A flag of Megatron's with `=` behind it takes a value.
WITHOUT_EFFECT: dict[str, list[str]] = {
    "every step is reported": ["steps_per_print", "--log-interval="],
    "--metrics writes what each step measures, --trace when it did what": [
        "wall_clock_breakdown", "memory_breakdown", "dump_state", "tensorboard", "wandb", "comet", "csv_monitor",
        "comms_logger", "flops_profiler", "--tensorboard-dir="],
    "nothing is measured on the held-out text while training": ["--eval-interval=", "--eval-iters="],
    "tokens are bytes, or those of a tokenizer.json: --tokenizer FILE": [
        "--tokenizer-type=", "--tokenizer-model=", "--vocab-file=", "--merge-file=", "--vocab-size=",
        "--make-vocab-size-divisible-by="],
    "one thread reads ahead": ["--num-workers="],
    "the model is minidist's GPT: rotary positions with base 10,000, RMSNorm with epsilon 1e-5, SwiGLU, no bias": [
        "--attention-dropout=", "--max-position-embeddings=", "--position-embedding-type=", "--rotary-base=",
        "--rotary-percent=", "--use-rotary-position-embeddings", "--no-position-embedding", "--normalization=",
        "--norm-epsilon=", "--layernorm-epsilon=", "--swiglu", "--disable-bias-linear", "--init-method-std="],
    "the kernels are PyTorch's own": [
        "--use-flash-attn", "--use-mcore-models", "--no-persist-layer-norm", "--attention-softmax-in-fp32",
        "--no-masked-softmax-fusion", "--no-bias-gelu-fusion", "--no-bias-swiglu-fusion", "--no-bias-dropout-fusion",
        "--no-gradient-accumulation-fusion", "--no-query-key-layer-scaling", "--no-rope-fusion",
        "--transformer-impl=", "--attention-backend="],
    "epsilon is always 1e-8": [f"{ADAM}eps", "--adam-eps="],
    "AdamW is always PyTorch's": [
        *inside(ADAM, "torch_adam", "fused"), "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"],
    "the rate rises along a line from its peak divided by the steps of the warm-up, and falls along a cosine to a "
    "tenth of it until the last step": [
        *inside(SCHEDULE, "warmup_min_lr", "warmup_min_ratio", "warmup_type", "cos_min_ratio", "last_batch_iteration"),
        "--lr-decay-style=", "--lr-decay-iters=", "--min-lr=", "--lr-warmup-init="],
    "the scale of the loss starts at 2**16, doubles after 2,000 steps without an overflow, and halves at each": [
        *inside("fp16.", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis",
                "consecutive_hysteresis", "min_loss_scale", "auto_cast"),
        "--loss-scale=", "--initial-loss-scale=", "--loss-scale-window=", "--hysteresis=", "--min-loss-scale="],
    "losses are divided by the tokens of the whole batch, so gradients only have to be summed": [
        "prescale_gradients", "gradient_predivide_factor"],
    "gradients are added up and travel in --precision, whole": [
        "fp32_allreduce", "communication_data_type", "data_types.grad_accum_dtype", "sparse_gradients",
        *inside(ZERO, "zero_quantized_weights", "zero_quantized_gradients"), "--accumulate-allreduce-grads-in-fp32"],
    "gradients are always reduced during backward": [
        *inside(ZERO, "overlap_comm", "grad_hooks"), "--overlap-grad-reduce"],
    "the strategy decides what is sent together, and what overlaps": [
        *inside(ZERO, "contiguous_gradients", "reduce_scatter", "allgather_partitions", "allgather_bucket_size",
                "round_robin_gradients", "ignore_unused_parameters"),
        "--no-async-tensor-model-parallel-allreduce", "--tp-comm-overlap", "--no-overlap-p2p-communication"],
    "--zero 3 gathers a block as a whole, from all ranks that share it, while the one before is computed": [
        *inside(ZERO, "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
                "stage3_model_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance",
                "zero_hpz_partition_size"),
        "--overlap-param-gather"],
    "--offload works on one chunk of the state, of its own size, while the next is fetched": [
        *inside(STATE, "ratio", "pin_memory", "pipeline", "pipeline_read", "pipeline_write", "fast_init",
                "buffer_count"),
        *inside(PARAMETERS, "pin_memory", "buffer_count", "buffer_size", "max_in_cpu"), f"{ZERO}sub_group_size", "aio"],
    "the parameters of --zero 3 go where --offload sends the state of the optimizer": [
        *inside(PARAMETERS, "device", "nvme_path")],
    "--recompute says what backward computes again, and keeps its inputs where they are": [
        *inside(CHECKPOINTING, "partition_activations", "cpu_checkpointing", "profile", "number_checkpoints",
                "contiguous_memory_optimization", "synchronize_checkpoint_boundary"),
        "--distribute-saved-activations"],
    "each rank writes its own pieces of a checkpoint, any number of ranks loads all that it has": [
        "checkpoint", *inside(ZERO, "elastic_checkpoint", "load_from_fp32_weights",
                              "stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"),
        "--no-save-optim", "--no-save-rng", "--no-load-optim", "--no-load-rng"],
    "the launcher decides how ranks talk: mpirun or torchrun": [
        "--distributed-backend=", "--distributed-timeout-minutes="],
}  # fmt: skip


def rows() -> Iterator[Row]:
    """Yield the whole table."""
    yield from TRANSLATED
    for why, names in WITHOUT_EFFECT.items():
        for name in names:
            kind = object if not name.startswith("--") else str if name.endswith("=") else bool
            yield Row(name.removesuffix("="), kind, note=why)


DEEPSPEED = [row for row in rows() if not row.name.startswith("--")]
MEGATRON = [row for row in rows() if row.name.startswith("--")]
