"""What a training run is told: six frozen dataclasses, checked once, before any work starts.

Each field is a flag (`--key-value-heads 2`) and a line of a TOML file (`key_value_heads = 2` under `[model]`).

    each option alone, and beside the others       here: `Config` cannot be made otherwise
    for so many ranks, and for this model          `checked.py`; combinations of strategies: `parallel/recipe.py`
    on this machine: files and memory              `cli/train_checks.py`

`Recipe` refuses the same combinations of strategies, in its own names, for those who call `parallelize` directly.
"""

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from minidist.comm.job.number import AT_LEAST_ONE, FRACTION, NOT_NEGATIVE, POSITIVE, Limit, one_of
from minidist.mesh import AXES
from minidist.model import GPTConfig
from minidist.model.config import BALANCES, SCORES
from minidist.parallel.context.context_parallel import WAYS
from minidist.parallel.context.order import ORDERS
from minidist.parallel.expert.expert_parallel import WAYS as EP_WAYS
from minidist.parallel.pipeline import NAMES
from minidist.parallel.recipe import RECOMPUTES, STRATEGIES, is_policy
from minidist.trainer.files import retold
from minidist.trainer.schedule import SHAPES

PRECISIONS = ("float32", "float64", "bfloat16", "float16", "fp8")
OFFLOADS = ("none", "memory", "disk")

Sections = dict[str, dict[str, Any]]
"""The options of a run as plain data: by section, then by name."""


class ConfigError(ValueError):
    """No run can be made of these options; the message says which value is wrong, and the fix."""


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
    capacity: float = option(0.0, "most tokens of an expert in a sequence, times the mean; 0: all", NOT_NEGATIVE)
    scores: str = option("softmax", f"what the router makes of its products: {', '.join(SCORES)}", one_of(*SCORES))
    raw_weights: bool = option(False, "weight outputs by scores, not by their shares in those of the chosen")
    balance: str = option("none", f"what spreads tokens over experts: {', '.join(BALANCES)}", one_of(*BALANCES))
    balance_rate: float = option(1e-3, "coefficient of the auxiliary loss, or change of a bias", NOT_NEGATIVE)
    z_loss: float = option(0.0, "coefficient of the router's z-loss", NOT_NEGATIVE)


@dataclass(frozen=True)
class DataOptions:
    """What is trained on."""

    text: tuple[str, ...] = option(
        (), "files, or folders of them: text, .jsonl, .parquet; none: the documentation inside Python"
    )
    text_field: str = option("text", "what holds the text: a field of .jsonl, a column of .parquet")
    tokenizer: str = option("", "a tokenizer.json; none: one token a byte")
    sequence: int = option(128, "tokens a sequence", AT_LEAST_ONE)
    batch: int = option(16, "sequences a step, over all ranks", AT_LEAST_ONE)
    by_length: bool = option(False, "train on paragraphs, those of similar length together")
    held_out: float = option(0.05, "fraction of the text kept for measuring", FRACTION)
    eval_text: tuple[str, ...] = option((), "files to measure on, as those of --text, in place of its end")


@dataclass(frozen=True)
class OptimizerOptions:
    """AdamW (Loshchilov & Hutter 2019), and how the learning rate goes up and down."""

    lr: float = option(1e-3, "peak learning rate", POSITIVE)
    base_batch: int = option(0, "batch that --lr is meant for: scale it linearly to --batch; 0: do not", NOT_NEGATIVE)
    warmup: int = option(10, "steps of linear warm-up, cut to --steps", NOT_NEGATIVE)
    weight_decay: float = option(0.1, "decay of matrices; norms have none", NOT_NEGATIVE)
    beta1: float = option(0.9, "decay of the first moment", FRACTION)
    beta2: float = option(0.95, "decay of the second moment", FRACTION)
    clip: float = option(1.0, "largest global gradient norm; 0: do not clip", NOT_NEGATIVE)
    lr_schedule: str = option("cosine", f"how the rate goes on after --warmup: {', '.join(SHAPES)}", one_of(*SHAPES))
    cooldown: int = option(0, "with --lr-schedule wsd: steps of its fall; 0: a fifth of --steps", NOT_NEGATIVE)


@dataclass(frozen=True)
class ParallelOptions:
    """How the work is spread over ranks."""

    dp: int = option(0, "ranks of the data axis; 0: all that the others leave", NOT_NEGATIVE)
    tp: int = option(1, "ranks of the tensor axis, which share every matrix", AT_LEAST_ONE)
    sp: bool = option(False, "with --tp: sequence parallelism between the matrices")
    cp: int = option(1, "ranks of the context axis, which share the tokens of each sequence", AT_LEAST_ONE)
    cp_comm: str = option("ring", f"how attention reaches all tokens: {', '.join(WAYS)}", one_of(*WAYS))
    cp_order: str = option("zigzag", f"which tokens a rank has: {', '.join(ORDERS)}", one_of(*ORDERS))
    ep: int = option(1, "ranks of the axes dp and cp that share the experts", AT_LEAST_ONE)
    ep_comm: str = option("direct", f"how tokens reach experts: {', '.join(EP_WAYS)}", one_of(*EP_WAYS))
    ep_fp8: bool = option(False, "with --ep: send tokens to experts in 8 bits")
    pp: int = option(1, "ranks of the pipeline axis, which share the layers", AT_LEAST_ONE)
    order: str = option(",".join(AXES), "axes from the outermost, whose ranks are far apart; those of one rank may go")
    schedule: str = option("1f1b", f"of the pipeline: {', '.join(NAMES)}", one_of(*NAMES))
    chunks: int = option(0, "stages a rank, of the interleaved schedule; 0: 2", NOT_NEGATIVE)
    microbatches: int = option(0, "microbatches a step in a pipeline; 0: two for each stage", NOT_NEGATIVE)
    plan: str = option(
        "", "file with a schedule of your own, or torch's CSV, in place of --schedule and --microbatches"
    )
    strategy: str = option("ddp", f"how gradients are reduced: {', '.join(STRATEGIES)}", one_of(*STRATEGIES))
    zero: int = option(0, "ZeRO: shard the optimizer's state (1), and gradients (2), and parameters (3)", STAGE)
    hsdp: int = option(0, "with --zero 3: ranks in a group that shares parameters out; 0: all", NOT_NEGATIVE)
    zeropp: bool = option(False, "with --zero 3: ZeRO++, a quarter of the bytes between nodes")
    accumulate: int = option(1, "microbatches a step, on each rank", AT_LEAST_ONE)
    compile: bool = option(False, "compile each block's forward, and the loss, by torch.compile")
    bucket_mib: float = option(25.0, "MiB of a gradient bucket (ddp, and --zero 1 and 2)", BUCKET)


@dataclass(frozen=True)
class MemoryOptions:
    """What saves memory: computing twice, or a slower place."""

    recompute: str = option("none", f"what backward computes again: {RECOMPUTES}", POLICY)
    offload: str = option("none", f"where the optimizer's state lives: {', '.join(OFFLOADS)}", one_of(*OFFLOADS))
    offload_folder: str = option("", "folder on the disk for --offload disk; none: --save")


@dataclass(frozen=True)
class RunOptions:
    """How long, what is written, what is checked."""

    steps: int = option(100, "optimizer steps", AT_LEAST_ONE)
    seed: int = option(0, "what weights, order of samples and dropout are drawn from", SEED)
    init: str = option(
        "", "folder of a Hugging Face Llama to start from: weights, sizes, tokenizer; none: draw weights"
    )
    lora: int = option(0, "with --init: train adapters of this rank, and nothing else; 0: none", NOT_NEGATIVE)
    qlora: bool = option(False, "with --init: adapters (of --lora, or rank 8) beside matrices stored in 4 bits")
    precision: str = option("", f"{', '.join(PRECISIONS)}; none: float32, float64 with --verify", PRECISION)
    log_every: int = option(0, "steps between two lines on the screen; 0: some forty lines in all", NOT_NEGATIVE)
    eval_every: int = option(0, "steps between two measurements on held-out text; 0: none", NOT_NEGATIVE)
    eval_batches: int = option(0, "with --eval-every: batches to measure on, the first ones; 0: all", NOT_NEGATIVE)
    verify: bool = option(False, "afterwards repeat the run on one rank and compare; the exit status is the verdict")
    save: str = option("", "folder for checkpoints; none: save nothing")
    save_every: int = option(0, "steps between two checkpoints; 0: only at the end", NOT_NEGATIVE)
    keep: int = option(2, "newest checkpoints to keep", AT_LEAST_ONE)
    keep_every: int = option(0, "keep those of every so many steps, too; 0: none", NOT_NEGATIVE)
    mtbf: float = option(0.0, "hours between two failures of the job, for advice on --save-every; 0: none", HOURS)
    resume: bool = option(False, "continue from the newest checkpoint in --save")
    metrics: str = option(
        "", "file for one JSON object a step, and *.serial.* of --verify; none: metrics.jsonl in --save"
    )
    trace: str = option("", "file for a trace that Perfetto opens")
    profile: str = option("", "folder for torch.profiler's trace of steps 2 to 4, a file a rank; none: no profile")
    sample: int = option(0, "tokens of text to write at the end", NOT_NEGATIVE)
    peak_tflops: float = option(0.0, "peak of one rank's device, for FLOPs utilisation; 0: as known", NOT_NEGATIVE)
    debug: bool = option(False, "have collectives compare what the ranks call")


@dataclass(frozen=True)
class Config:
    """A whole run.

    Raises
    ------
    ConfigError
        If no run can be made of it: naming the option, its value, and what it may be.
    """

    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataOptions = field(default_factory=DataOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    run: RunOptions = field(default_factory=RunOptions)

    def __post_init__(self) -> None:
        """Refuse options that no run can be made of."""
        if fault := next(self._faults(), None):
            raise ConfigError(fault)
        self.gpt(vocabulary=1)  # raises

    def _faults(self) -> Iterator[str]:
        """Yield a sentence for each fault. Take only the first: later questions rely on the earlier ones."""
        changed: dict[str, Any] = {}
        for section in (getattr(self, each.name) for each in fields(self)):
            for declared in fields(section):
                limit, value = declared.metadata["limit"], getattr(section, declared.name)
                if limit is not None and not limit.holds(value):
                    yield f"{flag(declared.name)} {value} cannot be: it must be {limit.words}"
                if value != declared.default:
                    changed[declared.name] = value
        for need, (there, names) in self._needs().items():
            for name in names:
                if name in changed and not there:
                    asked = flag(name) if changed[name] is True else f"{flag(name)} {changed[name]}"
                    yield f"{asked} is for runs with {need}: add that, or leave {flag(name)} out"
        if self.data.eval_text and "held_out" in changed:
            both = f"--held-out {self.data.held_out} and --eval-text both say what to measure on"
            yield f"{both}: leave one of them out"
        yield from self._faults_of_parallel_options()
        memory, layers = self.memory, self.model.layers
        kind, _, blocks = memory.recompute.partition(" ")
        if kind == "every" and int(blocks) > layers:
            longer = f'--recompute "{memory.recompute}" makes segments of more blocks than --layers {layers}'
            yield f'{longer}: use at most "every {layers}"'
        if memory.offload == "disk" and not (memory.offload_folder or self.run.save):
            yield "--offload disk needs a folder: add --offload-folder FOLDER, or --save FOLDER"

    def _needs(self) -> dict[str, tuple[bool, tuple[str, ...]]]:
        """Return whether the run has what some options are for, and which options these are."""
        parallel, run = self.parallel, self.run
        return {
            "--strategy ddp": (parallel.strategy == "ddp", ("zero", "bucket_mib")),
            "--zero 3": (parallel.zero == 3, ("hsdp", "zeropp")),
            "--tp RANKS": (parallel.tp > 1, ("sp",)),
            "--cp RANKS": (parallel.cp > 1, ("cp_comm", "cp_order")),
            "--experts NUMBER": (self.model.experts > 0, ("ep",)),
            "--ep RANKS": (parallel.ep > 1, ("ep_comm", "ep_fp8")),
            "--pp RANKS": (parallel.pp > 1, ("schedule", "microbatches", "plan")),
            "--schedule interleaved": (parallel.schedule == "interleaved", ("chunks",)),
            "--offload disk": (self.memory.offload == "disk", ("offload_folder",)),
            "--init FOLDER": (bool(run.init), ("lora", "qlora")),
            "--eval-every STEPS": (run.eval_every > 0, ("eval_batches",)),
            "--lr-schedule wsd": (self.optimizer.lr_schedule == "wsd", ("cooldown",)),
            "--save FOLDER": (bool(run.save), ("resume", "save_every", "keep", "keep_every", "mtbf")),
        }

    def _faults_of_parallel_options(self) -> Iterator[str]:
        parallel, batch = self.parallel, self.data.batch
        if parallel.accumulate > batch:
            cuts = f"--accumulate {parallel.accumulate} cuts --batch {batch} into more parts than it has sequences"
            yield f"{cuts}: use at most --accumulate {batch}"
        if parallel.zeropp and parallel.hsdp:
            yield f"--zeropp shards over all ranks of the data axis, not in --hsdp {parallel.hsdp}: leave one out"
        for name in ("zeropp", "ep_fp8"):
            if getattr(parallel, name) and self.run.verify:
                why = f"{flag(name)} rounds what it sends to 8 bits or fewer, so its parameters are not those of the"
                yield f"{why} serial run: leave out --verify, or {flag(name)}"
        if parallel.pp > 1 and parallel.accumulate > 1:
            instead = f"with --pp {parallel.pp} say --microbatches {parallel.accumulate}"
            yield f"--accumulate {parallel.accumulate} is for runs without a pipeline: {instead}"
        if parallel.plan and parallel.microbatches:
            yield f"--plan {parallel.plan} has its own number of microbatches: leave --microbatches out"
        if parallel.plan and parallel.schedule != ParallelOptions.schedule:
            yield f"--plan {parallel.plan} takes the place of --schedule {parallel.schedule}: leave one of them out"

    @property
    def offload_to(self) -> Path | Literal["cpu"] | None:
        """Where the optimizer's state lives; None: beside the parameters."""
        if self.memory.offload == "disk":
            return Path(self.memory.offload_folder or self.run.save)
        return "cpu" if self.memory.offload == "memory" else None

    @property
    def precision(self) -> str:
        """What is computed in."""
        return self.run.precision or ("float64" if self.run.verify else "float32")

    @property
    def dtype(self) -> torch.dtype:
        """Of parameters and activations. With fp8 it is float32: only operands of products have 8 bits."""
        found: torch.dtype = getattr(torch, "float32" if self.precision == "fp8" else self.precision)
        return found

    @property
    def adapter_rank(self) -> int:
        """Rank of the adapters; 0: none."""
        return self.run.lora or 8 * self.run.qlora

    def gpt(self, vocabulary: int) -> GPTConfig:
        """Return the model's sizes for a tokenizer's vocabulary."""
        with retold(ConfigError, ValueError, words=in_flags):
            sizes = GPTConfig(vocabulary=vocabulary, sequence=self.data.sequence, **asdict(self.model))
            sizes.check_learns()
        return sizes

    def without_files(self) -> "Config":
        """Return the run that computes the same, measures nothing beside, and leaves nothing on the disk."""
        names = ["save", "save_every", "keep", "keep_every", "mtbf", "resume", "metrics", "trace", "profile"]
        names += ["eval_every", "eval_batches"]
        unsaved: dict[str, Any] = {name: getattr(RunOptions, name) for name in names}
        memory = self.memory
        if memory.offload == "disk" and not memory.offload_folder:
            memory = replace(memory, offload_folder=self.run.save)
        return replace(self, memory=memory, run=replace(self.run, **unsaved))

    def sections(self) -> Sections:
        """Return plain dictionaries, as they stand in a TOML file."""
        return asdict(self)


def flag(name: str) -> str:
    """Return how an option is written on the command line."""
    return f"--{name.replace('_', '-')}"


ELSEWHERE = {"shard_ranks": "hsdp", "sequence": "sp", "fp8": "precision fp8"}
"""Names of `Recipe` that are not those of flags. (Where `sequence` is a number, it is of tokens.)"""


def in_flags(sentence: str) -> str:
    """Return a sentence on arguments, such as `raw_weights=True`, as one on flags: `--raw-weights`.

    Who calls `parallelize` or makes a `GPTConfig` reads the names of arguments, and who types a command reads flags.
    """
    sections = (ModelOptions, DataOptions, OptimizerOptions, ParallelOptions, MemoryOptions, RunOptions)
    named = {option.name for section in sections for option in fields(section)}
    return re.sub(ARGUMENT, lambda found: _as_flag(found, named), sentence)


ARGUMENT = r"(?<![\w/.=-])([a-z][a-z_0-9]*)(?:=('[^']*'(?: or '[^']*')*|[\w.+-]*\w(?:,\w+)*))?(?![\w/=-])"


def _as_flag(found: re.Match[str], named: set[str]) -> str:
    """Return a word, or name=value, as a flag if it is an argument; a plain word such as heads stays one."""
    name, value = found[1], found[2]
    if name not in named | ELSEWHERE.keys() or (value is None and "_" not in name):
        return found[0]
    switch = value in ("True", "False")
    known = ELSEWHERE.get(name, name) if switch or name not in named else name
    if value is None or value == "True":
        return flag(known)
    return f"--no-{flag(known)[2:]}" if switch else flag(known) + " " + value.replace("'", "")
