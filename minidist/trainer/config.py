"""What a training run is told: five frozen dataclasses, checked once, before any work starts.

Each field is a flag (`--key-value-heads 2`) and a line of a TOML file (`key_value_heads = 2` under `[model]`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from minidist.model import GPTConfig

PRECISIONS = ("float32", "float64")
STRATEGIES = ("ddp", "naive", "server")


class ConfigError(ValueError):
    """A run that cannot be; the message says which value, and the fix."""


def option(default: Any, help: str) -> Any:
    """Declare a field with the sentence that `--help` shows."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class ModelOptions:
    """Sizes of the GPT; see `minidist.model.GPTConfig`."""

    layers: int = option(4, "transformer blocks")
    hidden: int = option(128, "channels of the residual stream")
    heads: int = option(4, "attention heads")
    key_value_heads: int = option(0, "heads of keys and values; 0: as many as heads")
    intermediate: int = option(0, "channels inside the MLP; 0: 8/3 of hidden")
    dropout: float = option(0.0, "probability of dropping an element, in training")
    tied: bool = option(False, "let the head reuse the embedding's matrix")


@dataclass(frozen=True)
class DataOptions:
    """What is trained on."""

    text: tuple[str, ...] = option((), "text files; none: the documentation inside Python")
    tokenizer: str = option("", "a tokenizer.json; none: one token a byte")
    sequence: int = option(128, "tokens a sequence")
    batch: int = option(16, "sequences a step, over all ranks")
    by_length: bool = option(False, "train on paragraphs, those of similar length together")
    held_out: float = option(0.05, "fraction of the text kept for measuring")


@dataclass(frozen=True)
class OptimizerOptions:
    """AdamW (Loshchilov & Hutter 2019) with warm-up and cosine decay."""

    lr: float = option(1e-3, "peak learning rate")
    base_batch: int = option(0, "batch that --lr is meant for: scale it linearly to --batch; 0: do not")
    warmup: int = option(10, "steps of linear warm-up, cut to --steps")
    weight_decay: float = option(0.1, "decay of matrices; norms have none")
    beta1: float = option(0.9, "decay of the first moment")
    beta2: float = option(0.95, "decay of the second moment")
    clip: float = option(1.0, "largest global gradient norm; 0: do not clip")


@dataclass(frozen=True)
class ParallelOptions:
    """How the work is spread over ranks."""

    dp: int = option(0, "ranks of the data axis; 0: all that were started")
    strategy: str = option("ddp", f"how gradients are reduced: {', '.join(STRATEGIES)}")
    accumulate: int = option(1, "microbatches a step, on each rank")
    bucket_mib: float = option(25.0, "MiB of a gradient bucket (ddp)")


@dataclass(frozen=True)
class RunOptions:
    """How long, what is written, what is checked."""

    steps: int = option(100, "optimizer steps")
    seed: int = option(0, "what weights, order of samples and dropout are drawn from")
    precision: str = option("", f"{' or '.join(PRECISIONS)}; none: float32, but float64 with --verify")
    verify: bool = option(False, "afterwards repeat the run on one rank and compare; the exit status is the verdict")
    save: str = option("", "folder for checkpoints; none: save nothing")
    save_every: int = option(0, "steps between two checkpoints; 0: only at the end")
    keep: int = option(2, "checkpoints to keep")
    resume: bool = option(False, "continue from the newest checkpoint in --save")
    metrics: str = option("", "file for one JSON object a step; none: metrics.jsonl in --save")
    trace: str = option("", "file for a trace that Perfetto opens")
    sample: int = option(0, "tokens of text to write at the end")
    peak_tflops: float = option(0.0, "peak of one rank's device, for model FLOPs utilisation; 0: as known")
    debug: bool = option(False, "have collectives compare what the ranks call")


@dataclass(frozen=True)
class Config:
    """A whole run."""

    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataOptions = field(default_factory=DataOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    run: RunOptions = field(default_factory=RunOptions)

    def __post_init__(self) -> None:
        """Refuse what no run can be made of.

        Raises
        ------
        ConfigError
            Naming the option, its value, and what it may be.
        """
        data, optimizer, parallel, run = self.data, self.optimizer, self.parallel, self.run
        for name, value in (("steps", run.steps), ("batch", data.batch), ("sequence", data.sequence)):
            _require(value >= 1, name, value, "at least 1")
        for name, value in (("accumulate", parallel.accumulate), ("keep", run.keep)):
            _require(value >= 1, name, value, "at least 1")
        for name, value in (("dp", parallel.dp), ("warmup", optimizer.warmup), ("seed", run.seed)):
            _require(value >= 0, name, value, "0 or more")
        for name, value in (
            ("save-every", run.save_every),
            ("sample", run.sample),
            ("base-batch", optimizer.base_batch),
        ):
            _require(value >= 0, name, value, "0 or more")
        _require(optimizer.lr > 0, "lr", optimizer.lr, "above 0")
        _require(optimizer.clip >= 0, "clip", optimizer.clip, "0 (off) or more")
        _require(parallel.bucket_mib > 0, "bucket-mib", parallel.bucket_mib, "above 0")
        _require(parallel.strategy in STRATEGIES, "strategy", parallel.strategy, f"one of {', '.join(STRATEGIES)}")
        _require(run.precision in ("", *PRECISIONS), "precision", run.precision, f"one of {', '.join(PRECISIONS)}")
        _require(bool(run.save) or not (run.resume or run.save_every), "save", run.save, "a folder, to save or resume")
        self.gpt(vocabulary=1)

    @property
    def precision(self) -> str:
        """The dtype of parameters and computing."""
        return self.run.precision or ("float64" if self.run.verify else "float32")

    def gpt(self, vocabulary: int) -> GPTConfig:
        """Return the model's sizes for a tokenizer's vocabulary."""
        try:
            return GPTConfig(vocabulary=vocabulary, sequence=self.data.sequence, **asdict(self.model))
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def sections(self) -> dict[str, dict[str, Any]]:
        """Return plain dictionaries, as they stand in a TOML file."""
        return {section.name: asdict(getattr(self, section.name)) for section in fields(self)}


def _require(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise ConfigError(f"--{name} {value!r} cannot be: it must be {wanted}")
