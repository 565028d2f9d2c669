"""The options of a training run: each is declared once, with its default, its help and its limit.

Each field is a flag (`--key-value-heads 2`) and a line of a TOML file (`key_value_heads = 2` under
`[model]`). What options must be beside each other is in `config.py`.
"""

from dataclasses import dataclass, field
from typing import Any

from minidist.comm.job.number import AT_LEAST_ONE, FRACTION, NOT_NEGATIVE, POSITIVE, Limit, one_of
from minidist.mesh import AXES
from minidist.model.config import BALANCES, SCORES
from minidist.parallel.context.context_parallel import WAYS
from minidist.parallel.context.order import ORDERS
from minidist.parallel.expert.expert_parallel import WAYS as EP_WAYS
from minidist.parallel.pipeline import NAMES
from minidist.parallel.recipe import RECOMPUTES, STRATEGIES, is_policy
from minidist.trainer.schedule import SHAPES

PRECISIONS = ("float32", "float64", "bfloat16", "float16", "fp8")
OFFLOADS = ("none", "memory", "disk")

BUCKET = Limit("above 0 and at most 1e9", lambda value: 0 < value <= 1e9)
HOURS = Limit("from 0 to 1e9", lambda value: 0 <= value <= 1e9)
STAGE = Limit("0, 1, 2 or 3", lambda stage: 0 <= stage <= 3)
POLICY = Limit(f"one of {RECOMPUTES}", is_policy)
SEED = Limit("from 0 to 2**63 - 1", lambda value: 0 <= value < 1 << 63)


PRECISION = one_of("", *PRECISIONS)


def option(default: Any, help: str, limit: Limit | None = None) -> Any:
    """Declare a field, with the sentence that `--help` shows and what it may be."""
    return field(default=default, metadata={"help": help, "limit": limit})


@dataclass(frozen=True)
class ModelOptions:
    """Sizes of the GPT; `minidist.model.GPTConfig` knows what fits together."""

    layers: int = option(4, "transformer blocks")
    hidden: int = option(128, "channels of the residual stream")
    heads: int = option(4, "attention heads")
    key_value_heads: int = option(0, "heads of keys and values; 0: as many as heads")
    intermediate: int = option(0, "channels inside the MLP; 0: 8/3 of hidden")
    dropout: float = option(0.0, "probability of dropping an element, in training")
    tied: bool = option(False, "let the head reuse the embedding's matrix")
    experts: int = option(0, "experts in place of each MLP; 0: none", NOT_NEGATIVE)
    top_k: int = option(2, "experts that each token is sent to", AT_LEAST_ONE)
    shared_experts: int = option(0, "experts more, which all tokens go through", NOT_NEGATIVE)
    capacity: float = option(
        0.0, "most tokens of an expert in a sequence, times the mean; 0: all", NOT_NEGATIVE
    )
    scores: str = option(
        "softmax", f"what the router makes of its products: {', '.join(SCORES)}", one_of(*SCORES)
    )
    raw_weights: bool = option(
        False, "weight outputs by scores, not by their shares in those of the chosen"
    )
    balance: str = option(
        "none", f"what spreads tokens over experts: {', '.join(BALANCES)}", one_of(*BALANCES)
    )
    balance_rate: float = option(
        1e-3, "coefficient of the auxiliary loss, or change of a bias", NOT_NEGATIVE
    )
    z_loss: float = option(0.0, "coefficient of the router's z-loss", NOT_NEGATIVE)


@dataclass(frozen=True)
class DataOptions:
    """What is trained on."""

    text: tuple[str, ...] = option(
        (),
        "files, or folders of them: text, .jsonl, .parquet; none: the documentation inside Python",
    )
    text_field: str = option("text", "what holds the text: a field of .jsonl, a column of .parquet")
    tokenizer: str = option("", "a tokenizer.json; none: one token a byte")
    sequence: int = option(128, "tokens a sequence", AT_LEAST_ONE)
    batch: int = option(16, "sequences a step, over all ranks", AT_LEAST_ONE)
    by_length: bool = option(False, "train on paragraphs, those of similar length together")
    held_out: float = option(0.05, "fraction of the text kept for measuring", FRACTION)
    eval_text: tuple[str, ...] = option(
        (), "files to measure on, as those of --text, in place of its end"
    )


@dataclass(frozen=True)
class OptimizerOptions:
    """AdamW (Loshchilov & Hutter 2019), and how the learning rate goes up and down."""

    lr: float = option(1e-3, "peak learning rate", POSITIVE)
    base_batch: int = option(
        0, "batch that --lr is meant for: scale it linearly to --batch; 0: do not", NOT_NEGATIVE
    )
    warmup: int = option(10, "steps of linear warm-up, cut to --steps", NOT_NEGATIVE)
    weight_decay: float = option(0.1, "decay of matrices; norms have none", NOT_NEGATIVE)
    beta1: float = option(0.9, "decay of the first moment", FRACTION)
    beta2: float = option(0.95, "decay of the second moment", FRACTION)
    clip: float = option(1.0, "largest global gradient norm; 0: do not clip", NOT_NEGATIVE)
    lr_schedule: str = option(
        "cosine", f"how the rate goes on after --warmup: {', '.join(SHAPES)}", one_of(*SHAPES)
    )
    cooldown: int = option(
        0, "with --lr-schedule wsd: steps of its fall; 0: a fifth of --steps", NOT_NEGATIVE
    )


@dataclass(frozen=True)
class ParallelOptions:
    """How the work is spread over ranks."""

    dp: int = option(0, "ranks of the data axis; 0: all that the others leave", NOT_NEGATIVE)
    tp: int = option(1, "ranks of the tensor axis, which share every matrix", AT_LEAST_ONE)
    sp: bool = option(False, "with --tp: sequence parallelism between the matrices")
    cp: int = option(
        1, "ranks of the context axis, which share the tokens of each sequence", AT_LEAST_ONE
    )
    cp_comm: str = option(
        "ring", f"how attention reaches all tokens: {', '.join(WAYS)}", one_of(*WAYS)
    )
    cp_order: str = option(
        "zigzag", f"which tokens a rank has: {', '.join(ORDERS)}", one_of(*ORDERS)
    )
    ep: int = option(1, "ranks of the axes dp and cp that share the experts", AT_LEAST_ONE)
    ep_comm: str = option(
        "direct", f"how tokens reach experts: {', '.join(EP_WAYS)}", one_of(*EP_WAYS)
    )
    ep_fp8: bool = option(False, "with --ep: send tokens to experts in 8 bits")
    pp: int = option(1, "ranks of the pipeline axis, which share the layers", AT_LEAST_ONE)
    order: str = option(
        ",".join(AXES),
        "axes from the outermost, whose ranks are far apart; those of one rank may go",
    )
    schedule: str = option("1f1b", f"of the pipeline: {', '.join(NAMES)}", one_of(*NAMES))
    chunks: int = option(0, "stages a rank, of the interleaved schedule; 0: 2", NOT_NEGATIVE)
    microbatches: int = option(
        0, "microbatches a step in a pipeline; 0: two for each stage", NOT_NEGATIVE
    )
    plan: str = option(
        "",
        "file with a schedule of your own, or torch's CSV, in place of --schedule and "
        "--microbatches",
    )
    strategy: str = option(
        "ddp", f"how gradients are reduced: {', '.join(STRATEGIES)}", one_of(*STRATEGIES)
    )
    zero: int = option(
        0, "ZeRO: shard the optimizer's state (1), and gradients (2), and parameters (3)", STAGE
    )
    hsdp: int = option(
        0, "with --zero 3: ranks in a group that shares parameters out; 0: all", NOT_NEGATIVE
    )
    zeropp: bool = option(False, "with --zero 3: ZeRO++, a quarter of the bytes between nodes")
    accumulate: int = option(1, "microbatches a step, on each rank", AT_LEAST_ONE)
    compile: bool = option(False, "compile each block's forward, and the loss, by torch.compile")
    bucket_mib: float = option(25.0, "MiB of a gradient bucket (ddp, and --zero 1 and 2)", BUCKET)


@dataclass(frozen=True)
class MemoryOptions:
    """What saves memory: computing twice, or a slower place."""

    recompute: str = option("none", f"what backward computes again: {RECOMPUTES}", POLICY)
    offload: str = option(
        "none", f"where the optimizer's state lives: {', '.join(OFFLOADS)}", one_of(*OFFLOADS)
    )
    offload_folder: str = option("", "folder on the disk for --offload disk; none: --save")


@dataclass(frozen=True)
class RunOptions:
    """How long, what is written, what is checked."""

    steps: int = option(100, "optimizer steps", AT_LEAST_ONE)
    seed: int = option(0, "what weights, order of samples and dropout are drawn from", SEED)
    init: str = option(
        "",
        "folder of a Hugging Face Llama to start from: weights, sizes, tokenizer; none: draw "
        "weights",
    )
    lora: int = option(
        0, "with --init: train adapters of this rank, and nothing else; 0: none", NOT_NEGATIVE
    )
    qlora: bool = option(
        False, "with --init: adapters (of --lora, or rank 8) beside matrices stored in 4 bits"
    )
    precision: str = option(
        "", f"{', '.join(PRECISIONS)}; none: float32, float64 with --verify", PRECISION
    )
    log_every: int = option(
        0, "steps between two lines on the screen; 0: some forty lines in all", NOT_NEGATIVE
    )
    eval_every: int = option(
        0, "steps between two measurements on held-out text; 0: none", NOT_NEGATIVE
    )
    eval_batches: int = option(
        0, "with --eval-every: batches to measure on, the first ones; 0: all", NOT_NEGATIVE
    )
    verify: bool = option(
        False, "afterwards repeat the run on one rank and compare; the exit status is the verdict"
    )
    save: str = option("", "folder for checkpoints; none: save nothing")
    save_every: int = option(0, "steps between two checkpoints; 0: only at the end", NOT_NEGATIVE)
    keep: int = option(2, "newest checkpoints to keep", AT_LEAST_ONE)
    keep_every: int = option(0, "keep those of every so many steps, too; 0: none", NOT_NEGATIVE)
    mtbf: float = option(
        0.0, "hours between two failures of the job, for advice on --save-every; 0: none", HOURS
    )
    resume: bool = option(False, "continue from the newest checkpoint in --save")
    metrics: str = option(
        "",
        "file for one JSON object a step, and *.serial.* of --verify; none: metrics.jsonl in "
        "--save",
    )
    trace: str = option("", "file for a trace that Perfetto opens")
    profile: str = option(
        "", "folder for torch.profiler's trace of steps 2 to 4, a file a rank; none: no profile"
    )
    sample: int = option(0, "tokens of text to write at the end", NOT_NEGATIVE)
    peak_tflops: float = option(
        0.0, "peak of one rank's device, for FLOPs utilisation; 0: as known", NOT_NEGATIVE
    )
    debug: bool = option(False, "have collectives compare what the ranks call")
