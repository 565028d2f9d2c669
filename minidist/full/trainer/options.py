"""The options of a training run: each is declared once, with its default, its help and its limit.

Those of a strategy are declared in its folder, and come here by inheritance. Each field is a flag
(`--key-value-heads 2`) and a line of a TOML file (`key_value_heads = 2` under `[model]`). What
options must be beside each other is in `config.py`.
"""

from dataclasses import dataclass

from minidist.full.context.options import ContextParallelOptions
from minidist.full.ddp.options import DataParallelOptions, ShardingOptions
from minidist.full.expert.options import ExpertParallelOptions
from minidist.full.layers.options import AdapterOptions, CompileOptions, RecomputeOptions
from minidist.full.mesh import AXES
from minidist.full.model.config import BALANCES, SCORES
from minidist.full.options import (
    AT_LEAST_ONE,
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    Limit,
    Needs,
    one_of,
    option,
    up_to,
)
from minidist.full.pipeline.options import STAGES, PipelineOptions
from minidist.full.slow_wires.options import LOCAL, SiteOptions
from minidist.full.tensor.options import TensorParallelOptions
from minidist.full.trainer.schedule import SHAPES

PRECISIONS = (
    *("float32", "float64", "bfloat16", "float16", "fp8"),
    *("autocast-bfloat16", "autocast-float16"),
)
OPTIMIZERS = ("adamw",)
OFFLOADS = ("none", "memory", "disk")

HOURS = Limit("from 0 to 1e9", lambda value: 0 <= value <= 1e9)
SEED = Limit("from 0 to 2**63 - 1", lambda value: 0 <= value < 1 << 63)


PRECISION = one_of("", *PRECISIONS)


EXPERTS = Needs("--experts NUMBER", "experts", lambda count: count > 0)
DISK = Needs("--offload disk", "offload", lambda place: place == "disk")
MEASURED = Needs("--eval-every STEPS", "eval_every", lambda steps: steps > 0)
STABLE = Needs("--lr-schedule wsd", "lr_schedule", lambda name: name == "wsd")
SAVED = Needs("--save FOLDER", "save", bool)


@dataclass(frozen=True)
class ModelOptions:
    """Sizes of the GPT; `minidist.full.model.GPTConfig` knows what fits together."""

    layers: int = option(4, "transformer blocks")
    hidden: int = option(128, "channels of the residual stream")
    heads: int = option(4, "attention heads")
    key_value_heads: int = option(0, "heads of keys and values; 0: as many as heads")
    intermediate: int = option(0, "channels inside the MLP; 0: 8/3 of hidden")
    attention_window: int = option(
        0, "tokens that a token attends to, itself and those before it; 0: all", NOT_NEGATIVE
    )
    dropout: float = option(0.0, "probability of dropping an element, in training")
    tied: bool = option(False, "let the head reuse the embedding's matrix")
    experts: int = option(0, "experts in place of each MLP; 0: none", up_to(10_000))
    top_k: int = option(2, "experts that each token is sent to", AT_LEAST_ONE)
    shared_experts: int = option(0, "experts more, which all tokens go through", NOT_NEGATIVE)
    capacity: float = option(
        0.0,
        "capacity factor: an expert takes at most this times the mean tokens of a sequence; "
        "0: no limit",
        NOT_NEGATIVE,
    )
    scores: str = option(
        "softmax", f"what the router makes of its products: {', '.join(SCORES)}", one_of(*SCORES)
    )
    raw_weights: bool = option(False, "do not renormalise the scores of the top-k experts")
    balance: str = option(
        "none", f"what spreads tokens over experts: {', '.join(BALANCES)}", one_of(*BALANCES)
    )
    balance_rate: float = option(
        1e-3, "coefficient of the auxiliary loss, or change of a bias", NOT_NEGATIVE
    )
    z_loss: float = option(0.0, "coefficient of the router's z-loss", NOT_NEGATIVE)


@dataclass(frozen=True)
class OptimizerOptions:
    """AdamW (Loshchilov & Hutter 2019), and the learning rate."""

    optimizer: str = option(
        "adamw",
        f"what updates parameters: {', '.join(OPTIMIZERS)}",
        one_of(*OPTIMIZERS),
    )
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
        0,
        "with --lr-schedule wsd: steps of its fall; 0: a fifth of --steps",
        NOT_NEGATIVE,
        needs=STABLE,
    )


@dataclass(frozen=True)
class AxisOptions:
    """How many ranks each axis has."""

    dp: int = option(0, "ranks of the data axis; 0: all that the others leave", NOT_NEGATIVE)
    tp: int = option(1, "ranks of the tensor axis, which share every matrix", AT_LEAST_ONE)
    cp: int = option(
        1, "ranks of the context axis, which share the tokens of each sequence", AT_LEAST_ONE
    )
    ep: int = option(
        1, "ranks of the axes dp and cp that share the experts", AT_LEAST_ONE, needs=EXPERTS
    )
    pp: int = option(1, "ranks of the pipeline axis, which share the layers", AT_LEAST_ONE)
    dcn: int = option(
        1,
        "sites that a slow wire joins, each with all other axes; they train apart",
        AT_LEAST_ONE,
        needs=LOCAL,
    )
    order: str = option(
        ",".join(AXES),
        "axes from the outermost, whose ranks are far apart; those of one rank may go",
    )


@dataclass(frozen=True)
class SpreadOptions(
    CompileOptions,
    SiteOptions,
    ShardingOptions,
    DataParallelOptions,
    PipelineOptions,
    ExpertParallelOptions,
    ContextParallelOptions,
    TensorParallelOptions,
    AxisOptions,
):
    """How the work is spread over ranks."""

    plan: str = option(
        "",
        "file with a schedule of your own, or torch's CSV, in place of --schedule and "
        "--microbatches",
        needs=STAGES,
    )
    accumulate: int = option(
        1, "microbatches a step, on each rank, without a pipeline", AT_LEAST_ONE
    )


@dataclass(frozen=True)
class MemoryOptions(RecomputeOptions):
    """What saves memory: computing twice, or a slower place."""

    offload: str = option(
        "none", f"where the optimizer's state lives: {', '.join(OFFLOADS)}", one_of(*OFFLOADS)
    )
    offload_folder: str = option(
        "", "folder on the disk for --offload disk; none: --save", needs=DISK
    )


@dataclass(frozen=True)
class RunOptions(AdapterOptions):
    """How long, what is written, what is checked."""

    steps: int = option(100, "optimizer steps", AT_LEAST_ONE)
    seed: int = option(0, "what weights, order of samples and dropout are drawn from", SEED)
    init: str = option(
        "",
        "folder of a Hugging Face Llama to start from: weights, sizes, tokenizer; none: draw "
        "weights",
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
        0,
        "with --eval-every: batches to measure on, the first ones; 0: all",
        NOT_NEGATIVE,
        needs=MEASURED,
    )
    verify: bool = option(
        False, "afterwards repeat the run on one rank and compare; the exit status is the verdict"
    )
    save: str = option("", "folder for checkpoints; none: save nothing")
    save_every: int = option(
        0, "steps between two checkpoints; 0: only at the end", NOT_NEGATIVE, needs=SAVED
    )
    keep: int = option(2, "newest checkpoints to keep", AT_LEAST_ONE, needs=SAVED)
    keep_every: int = option(
        0, "keep those of every so many steps, too; 0: none", NOT_NEGATIVE, needs=SAVED
    )
    mtbf: float = option(
        0.0,
        "hours between two failures of the job, for advice on --save-every; 0: none",
        HOURS,
        needs=SAVED,
    )
    resume: bool = option(False, "continue from the newest checkpoint in --save", needs=SAVED)
    metrics: str = option(
        "",
        "file for one JSON object a step, and *.serial.* of --verify; none: metrics.jsonl in "
        "--save",
    )
    trace: str = option("", "file for a trace that Perfetto opens")
    profile: str = option(
        "", "folder for torch.profiler's trace of steps 2 to 4, a file a rank; none: no profile"
    )
    tensorboard: str = option("", "folder for curves that TensorBoard shows; none: none")
    sample: int = option(0, "tokens of text to write at the end", up_to(1_000_000))
    peak_tflops: float = option(
        0.0, "peak of one rank's device, for FLOPs utilisation; 0: as known", NOT_NEGATIVE
    )
    debug: bool = option(False, "have collectives compare what the ranks call")

    @property
    def observed(self) -> bool:
        """Whether somebody looks at the ranks one by one, at their memory and their messages."""
        return bool(self.tensorboard)
