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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Row:
    """One name of another program.

    Attributes
    ----------
    name, kind
        As it is written there, and the type of its value: a key of `trainer.files.WORDS`, or `object` for any. In the
        table below, names that mean the same share a row.
    to : str
        Our section and option, such as "parallel.zero". Empty if the name has no counterpart, or only with others.
    choices : mapping, optional
        From their value to ours, None to decide nothing; others are refused. Without it, their value is ours.
    note : str
        What the user should know: why the name has no effect here, or how its effect differs.
    """

    name: str
    kind: Any
    to: str = ""
    choices: Mapping[Any, Any] | None = None
    note: str = ""


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
    Row("--untie-embeddings-and-output-weights", bool, "model.tied", {True: False}),
    Row("--seq-length", int, "data.sequence"),
    Row("--data-path", tuple[str, ...], "data.text", note="the files are read as plain text"),
    Row(" ".join((*DEEPSPEED_BATCH, *MEGATRON_BATCH)), int),
    # the optimizer and the rate
    Row("optimizer.type --optimizer", str, "", {"adam": None, "adamw": None}),
    Row(f"{ADAM}lr {SCHEDULE}warmup_max_lr", float, "optimizer.lr"),
    Row(f"{ADAM}weight_decay", float, "optimizer.weight_decay"),
    Row(f"{ADAM}betas", tuple[float, float]),
    Row("--adam-beta1", float, "optimizer.beta1"),
    Row("--adam-beta2", float, "optimizer.beta2"),
    Row("gradient_clipping --clip-grad", float, "optimizer.clip"),
    Row("scheduler.type", str, "", {"warmuplr": None, "warmupdecaylr": None, "warmupcosinelr": None},
        "the rate always falls along a cosine after its warm-up"),
    Row(f"{SCHEDULE}warmup_num_steps --lr-warmup-iters", int, "optimizer.warmup"),
    Row(f"{SCHEDULE}total_num_steps", int, "run.steps", note="the run ends where the rate has fallen"),
    Row("--train-iters", int, "run.steps"),
    Row("--save-interval", int, "run.save_every"),
    # ranks, memory and precision
    Row("--tensor-model-parallel-size", int, "parallel.tp"),
    Row("--pipeline-model-parallel-size", int, "parallel.pp"),
    Row("--context-parallel-size", int, "parallel.cp"),
    Row("--sequence-parallel", bool, "parallel.sp"),
    Row(f"{ZERO}stage --zero-stage", int, "parallel.zero"),
    Row("--use-distributed-optimizer", bool, "parallel.zero", {True: 1}),
    Row(f"{ZERO}reduce_bucket_size", float),
    Row(f"{STATE}device", str, "memory.offload", {"none": "none", "cpu": "memory", "nvme": "disk"}),
    Row(f"{STATE}nvme_path", str, "memory.offload_folder"),
    Row("--checkpoint-activations", bool, "memory.recompute", {True: "full"}),
    Row("--recompute-activations", bool, "memory.recompute", {True: "selective"}),
    Row("--recompute-granularity", str, "memory.recompute", {"full": "full", "selective": "selective"}),
    Row("--recompute-method", str, "", {"uniform": None}),
    Row("--recompute-num-layers", int, "", {1: None}),
    Row("fp16.enabled --fp16", bool, "run.precision", {True: "float16", False: None}),
    Row("bf16.enabled bfloat16.enabled --bf16", bool, "run.precision", {True: "bfloat16", False: None}),
]  # fmt: skip

# By the reason why they have no effect here. A flag of Megatron's with `=` behind it takes a value.
WITHOUT_EFFECT = {
    "every step is reported": "steps_per_print --log-interval=",
    "--metrics writes what each step measures, --trace when it did what": "wall_clock_breakdown --tensorboard-dir=",
    "nothing is measured on the held-out text while training": "--eval-interval= --eval-iters=",
    "--held-out says which part of the text is not trained on": "--split=",
    "tokens are bytes, or those of a tokenizer.json: --tokenizer FILE":
        "--tokenizer-type= --tokenizer-model= --vocab-file= --merge-file=",
    "the model is minidist's GPT: rotary positions with base 10,000, RMSNorm with epsilon 1e-5, SwiGLU, no bias":
        "--attention-dropout= --max-position-embeddings= --position-embedding-type= --normalization= --norm-epsilon= "
        "--swiglu --disable-bias-linear",
    "--num-query-groups alone says how many heads keys and values have": "--group-query-attention",
    "the kernels are PyTorch's own": "--use-flash-attn --use-mcore-models --transformer-impl=",
    "epsilon is always 1e-8": f"{ADAM}eps --adam-eps=",
    "the rate rises along a line from its peak divided by the steps of the warm-up, and falls along a cosine to a "
    "tenth of it until the last step": f"{SCHEDULE}warmup_min_lr --lr-decay-style= --lr-decay-iters= --min-lr=",
    "the scale of the loss starts at 2**16, doubles after 2,000 steps without an overflow, and halves at each":
        "fp16.loss_scale fp16.initial_scale_power fp16.loss_scale_window fp16.hysteresis fp16.min_loss_scale "
        "bf16.loss_scale bf16.loss_scale_window --loss-scale= --initial-loss-scale=",
    "losses are divided by the tokens of the whole batch, so gradients only have to be summed": "prescale_gradients",
    "the strategy decides what is sent together, and what overlaps":
        f"{ZERO}overlap_comm {ZERO}contiguous_gradients {ZERO}reduce_scatter {ZERO}allgather_partitions "
        f"{ZERO}allgather_bucket_size --overlap-grad-reduce",
    "--zero 3 gathers a block as a whole, from all ranks that share it, while the one before is computed":
        f"{ZERO}stage3_prefetch_bucket_size {ZERO}stage3_param_persistence_threshold "
        f"{ZERO}stage3_max_live_parameters {ZERO}stage3_max_reuse_distance",
    "--offload works on one chunk of the state, of its own size, while the next is fetched":
        f"{ZERO}sub_group_size {STATE}pin_memory {PARAMETERS}pin_memory",
    "the parameters of --zero 3 go where --offload sends the state of the optimizer":
        f"{PARAMETERS}device {PARAMETERS}nvme_path",
    "--resume continues from the newest checkpoint in --save": "--load=",
    "each rank writes its own pieces of a checkpoint, any number of ranks loads all that it has":
        f"{ZERO}stage3_gather_16bit_weights_on_model_save",
    "the launcher decides how ranks talk: mpirun or torchrun": "--distributed-backend=",
}  # fmt: skip


def rows() -> Iterator[Row]:
    """Yield the whole table, a name a row."""
    for row in TRANSLATED:
        yield from (replace(row, name=name) for name in row.name.split())
    for why, names in WITHOUT_EFFECT.items():
        for name in names.split():
            kind = object if not name.startswith("--") else str if name.endswith("=") else bool
            yield Row(name.removesuffix("="), kind, note=why)


DEEPSPEED = [row for row in rows() if not row.name.startswith("--")]
MEGATRON = [row for row in rows() if row.name.startswith("--")]
