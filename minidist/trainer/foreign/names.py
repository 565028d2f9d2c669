"""What DeepSpeed and Megatron-LM call the options of a run, and what becomes of each here: one table for both.

    "zero_optimization": {"stage": 2, "overlap_comm": true}        --num-layers 12  --log-interval 10
                           │                 │                          │                 │
                     [parallel] zero      a note                 [model] layers        a note

A name that begins with dashes is a flag of Megatron's; any other is a key of DeepSpeed's, behind its sections. They
come from the page "DeepSpeed Configuration JSON" and from `megatron/training/arguments.py`. An option that the user
leaves out keeps the default of minidist, which may differ from the other program's: heads are untied, say, and
gradients are clipped. A name that is not in the table is refused: what is not offered cannot pass unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


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


def at_least_one(value: int) -> int:
    """Refuse a count below 1."""
    if value < 1:
        raise ValueError("it must be at least 1")
    return value


# ---------------------------------------------------------------- the table

# What they call the batch of all ranks, a microbatch of one rank, and the number of microbatches (Megatron counts it).
DEEPSPEED_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
MEGATRON_BATCH = ("--global-batch-size", "--micro-batch-size", "")
ZERO, STATE, PARAMETERS = (f"zero_optimization{inner}." for inner in ("", ".offload_optimizer", ".offload_param"))
ADAM, SCHEDULE = "optimizer.params.", "scheduler.params."

TRANSLATED = [
    # the model and the text
    Row("--num-layers", int, "model.layers"),
    Row("--hidden-size", int, "model.hidden"),
    Row("--ffn-hidden-size", int, "model.intermediate"),
    Row("--num-attention-heads", int, "model.heads"),
    Row("--num-query-groups", int, "model.key_value_heads"),
    Row("--hidden-dropout", float, "model.dropout"),
    Row("--untie-embeddings-and-output-weights", bool, "model.tied", lambda untied: not untied),
    Row("--seq-length", int, "data.sequence"),
    Row("--data-path", tuple[str, ...], "data.text", note="the files are read as plain text"),
    *(Row(name, int, convert=at_least_one) for name in (*DEEPSPEED_BATCH, *MEGATRON_BATCH) if name),
    # the optimizer and the rate
    Row("optimizer.type", str, convert=only("the optimizer is AdamW, use that", "adam", "adamw")),
    Row("--optimizer", str, convert=only("the optimizer is AdamW, use adam", "adam")),
    Row(f"{ADAM}lr", float, "optimizer.lr"),
    Row(f"{ADAM}weight_decay", float, "optimizer.weight_decay"),
    Row(f"{ADAM}betas", tuple[float, float]),
    Row("--adam-beta1", float, "optimizer.beta1"),
    Row("--adam-beta2", float, "optimizer.beta2"),
    Row("gradient_clipping", float, "optimizer.clip"),
    Row("--clip-grad", float, "optimizer.clip"),
    Row("scheduler.type", str, convert=only("the rate warms up and falls along a cosine, use WarmupCosineLR",
        "warmuplr", "warmupdecaylr", "warmupcosinelr"), note="the rate always falls along a cosine after its warm-up"),
    Row(f"{SCHEDULE}warmup_max_lr", float, "optimizer.lr"),
    Row(f"{SCHEDULE}warmup_num_steps", int, "optimizer.warmup"),
    Row("--lr-warmup-iters", int, "optimizer.warmup"),
    Row(f"{SCHEDULE}total_num_steps", int, "run.steps", note="the run ends where the rate has fallen"),
    Row("--train-iters", int, "run.steps"),
    Row("--save-interval", int, "run.save_every"),
    Row("--load", str, "run.resume", lambda folder: True, "the run continues from the newest checkpoint in --save"),
    # ranks, memory and precision
    Row("--tensor-model-parallel-size", int, "parallel.tp"),
    Row("--pipeline-model-parallel-size", int, "parallel.pp"),
    Row("--sequence-parallel", bool, "parallel.sp"),
    Row(f"{ZERO}stage", int, "parallel.zero"),
    Row("--zero-stage", int, "parallel.zero"),
    Row("--use-distributed-optimizer", bool, "parallel.zero", if_on(1)),
    Row(f"{ZERO}reduce_bucket_size", float),
    Row(f"{STATE}device", str, "memory.offload", among({"none": "none", "cpu": "memory", "nvme": "disk"})),
    Row(f"{STATE}nvme_path", str, "memory.offload_folder"),
    Row("--checkpoint-activations", bool, "memory.recompute", if_on("full")),
    Row("--recompute-activations", bool, "memory.recompute", if_on("selective")),
    Row("--recompute-granularity", str, "memory.recompute", among({"full": "full", "selective": "selective"})),
    Row("--recompute-method", str, convert=only("all blocks are recomputed, use uniform", "uniform")),
    Row("--recompute-num-layers", int, convert=only('use 1, or our --recompute "every K"', 1)),
    *(Row(name, bool, "run.precision", if_on("float16")) for name in ("fp16.enabled", "--fp16")),
    *(Row(name, bool, "run.precision", if_on("bfloat16")) for name in ("bf16.enabled", "bfloat16.enabled", "--bf16")),
]  # fmt: skip

# By the reason why they have no effect here. A flag of Megatron's with `=` behind it takes a value.
WITHOUT_EFFECT: dict[str, list[str]] = {
    "every step is reported": ["steps_per_print", "--log-interval="],
    "--metrics writes what each step measures, --trace when it did what": [
        "wall_clock_breakdown", "--tensorboard-dir="],
    "nothing is measured on the held-out text while training": ["--eval-interval=", "--eval-iters="],
    "--held-out says which part of the text is not trained on": ["--split="],
    "tokens are bytes, or those of a tokenizer.json: --tokenizer FILE": [
        "--tokenizer-type=", "--tokenizer-model=", "--vocab-file=", "--merge-file="],
    "the model is minidist's GPT: rotary positions with base 10,000, RMSNorm with epsilon 1e-5, SwiGLU, no bias": [
        "--attention-dropout=", "--max-position-embeddings=", "--position-embedding-type=", "--normalization=",
        "--norm-epsilon=", "--swiglu", "--disable-bias-linear"],
    "--num-query-groups alone says how many heads keys and values have": ["--group-query-attention"],
    "the kernels are PyTorch's own": ["--use-flash-attn", "--use-mcore-models", "--transformer-impl="],
    "epsilon is always 1e-8": [f"{ADAM}eps", "--adam-eps="],
    "the rate rises along a line from its peak divided by the steps of the warm-up, and falls along a cosine to a "
    "tenth of it until the last step": [
        f"{SCHEDULE}warmup_min_lr", "--lr-decay-style=", "--lr-decay-iters=", "--min-lr="],
    "the scale of the loss starts at 2**16, doubles after 2,000 steps without an overflow, and halves at each": [
        "fp16.loss_scale", "fp16.initial_scale_power", "fp16.loss_scale_window", "fp16.hysteresis",
        "fp16.min_loss_scale", "bf16.loss_scale", "bf16.loss_scale_window", "--loss-scale=", "--initial-loss-scale="],
    "losses are divided by the tokens of the whole batch, so gradients only have to be summed": ["prescale_gradients"],
    "gradients are always reduced during backward": [f"{ZERO}overlap_comm", "--overlap-grad-reduce"],
    "the strategy decides what is sent together, and what overlaps": [
        f"{ZERO}contiguous_gradients", f"{ZERO}reduce_scatter", f"{ZERO}allgather_partitions",
        f"{ZERO}allgather_bucket_size"],
    "--zero 3 gathers a block as a whole, from all ranks that share it, while the one before is computed": [
        f"{ZERO}stage3_prefetch_bucket_size", f"{ZERO}stage3_param_persistence_threshold",
        f"{ZERO}stage3_max_live_parameters", f"{ZERO}stage3_max_reuse_distance"],
    "--offload works on one chunk of the state, of its own size, while the next is fetched": [
        f"{ZERO}sub_group_size", f"{STATE}pin_memory", f"{PARAMETERS}pin_memory"],
    "the parameters of --zero 3 go where --offload sends the state of the optimizer": [
        f"{PARAMETERS}device", f"{PARAMETERS}nvme_path"],
    "each rank writes its own pieces of a checkpoint, any number of ranks loads all that it has": [
        f"{ZERO}stage3_gather_16bit_weights_on_model_save"],
    "the launcher decides how ranks talk: mpirun or torchrun": ["--distributed-backend="],
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
