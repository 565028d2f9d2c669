"""What a training run is told: the six dataclasses of `options.py`, checked once, before any work
starts.

    each option alone, and beside the others       here: `Config` cannot be made otherwise
    for so many ranks, and for this model          `checked.py`, which asks each strategy of `parallel/`
    on this machine: files and memory              `cli/train_checks.py`

What does not fit together among strategies is refused in the words of those who call `parallelize`;
`Config.in_flags` says the same in flags.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from torch import nn

from minidist.full.apply import ORDER
from minidist.full.data.files import retold
from minidist.full.data.options import DataOptions
from minidist.full.launch.parser import flag
from minidist.full.memory.offload import OffloadedOptimizer
from minidist.full.model import GPTConfig
from minidist.full.options import flags_of
from minidist.full.precision.masters import MasterWeights
from minidist.full.recipe import Recipe
from minidist.full.strategy import Strategy
from minidist.full.trainer.options import (
    MemoryOptions,
    ModelOptions,
    OptimizerOptions,
    RunOptions,
    SpreadOptions,
)

Groups = list[dict[str, Any]]
Sections = dict[str, dict[str, Any]]
"""The options of a run as plain data: by section, then by name."""


class ConfigError(ValueError):
    """No run can be made of these options; the message says which value is wrong, and the fix."""


@dataclass(frozen=True)
class Config:
    """A whole run.

    A subclass may have more options in its sections, and more strategies that read them.

    Raises
    ------
    ConfigError
        If no run can be made of it: naming the option, its value, and what it may be.
    """

    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataOptions = field(default_factory=DataOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    parallel: SpreadOptions = field(default_factory=SpreadOptions)
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    run: RunOptions = field(default_factory=RunOptions)

    recipe: ClassVar[type[Recipe]] = Recipe
    strategies: ClassVar[Sequence[Strategy]] = ORDER

    def __post_init__(self) -> None:
        """Refuse options that no run can be made of."""
        if fault := next(self._faults(), None):
            raise ConfigError(fault)
        self.gpt(vocabulary=1)  # raises

    def _faults(self) -> Iterator[str]:
        """Yield a sentence for each fault.

        Take only the first: later questions rely on the earlier ones.
        """
        sections = [getattr(self, each.name) for each in fields(self)]
        said = {
            declared.name: (getattr(section, declared.name), declared)
            for section in sections
            for declared in flags_of(section)
        }
        changed = {
            name: value for name, (value, declared) in said.items() if value != declared.default
        }
        for name, (value, declared) in said.items():
            limit = declared.metadata["limit"]
            if limit is not None and not limit.holds(value):
                yield f"{flag(name)} {value} cannot be: it must be {limit.words}"
        for name, value in changed.items():
            asked = flag(name) if value is True else f"{flag(name)} {value}"
            needs = said[name][1].metadata["needs"]
            if needs is not None and not needs.holds(said[needs.option][0]):
                yield (
                    f"{asked} is for runs with {needs.words}: add that, or leave {flag(name)} out"
                )
            if self.run.verify and not said[name][1].metadata["exact"]:
                yield (
                    f"{flag(name)} changes what is sent, so its parameters are "
                    f"not those of the serial run: leave out --verify, or {flag(name)}"
                )
        if self.data.eval_text and "held_out" in changed:
            both = f"--held-out {self.data.held_out} and --eval-text both say what to measure on"
            yield f"{both}: leave one of them out"
        if self.data.pack and self.data.by_length:
            yield (
                "--pack and --by-length both say which paragraphs go together: leave one of them out"
            )
        if self.data.pack and self.model.experts:
            yield (
                f"--pack packs paragraphs into rows, of which --experts {self.model.experts} would be "
                "balanced over all and their padding: leave one of them out"
            )
        yield from self._faults_of_parallel_options()
        memory, layers = self.memory, self.model.layers
        kind, _, blocks = memory.recompute.partition(" ")
        if kind == "every" and int(blocks) > layers:
            longer = (
                f'--recompute "{memory.recompute}" makes segments of more blocks than --layers '
                f"{layers}"
            )
            yield f'{longer}: use at most "every {layers}"'
        if memory.offload == "disk" and not (memory.offload_folder or self.run.save):
            yield "--offload disk needs a folder: add --offload-folder FOLDER, or --save FOLDER"

    def _faults_of_parallel_options(self) -> Iterator[str]:
        parallel, batch = self.parallel, self.data.batch
        if parallel.accumulate > batch:
            cuts = (
                f"--accumulate {parallel.accumulate} cuts --batch {batch} into more parts than it "
                "has sequences"
            )
            yield f"{cuts}: use at most --accumulate {batch}"
        if self.scales_loss and parallel.keeps_back:
            yield (
                f"--compress {parallel.compress} keeps gradients for later steps, and with "
                f"--precision {self.precision} these have another loss scale: use --precision bfloat16, or "
                "--compress int8"
            )
        if self.scales_loss and parallel.dcn > 1:
            yield (
                f"--dcn {parallel.dcn} sites would leave out steps at different times with "
                f"--precision {self.precision}: use --precision bfloat16"
            )
        if parallel.pp > 1 and parallel.accumulate > 1:
            instead = f"with --pp {parallel.pp} say --microbatches {parallel.accumulate}"
            yield f"--accumulate {parallel.accumulate} is for runs without a pipeline: {instead}"
        if parallel.plan and parallel.microbatches:
            yield (
                f"--plan {parallel.plan} has its own number of microbatches: leave --microbatches "
                "out"
            )
        if parallel.plan and parallel.schedule != SpreadOptions.schedule:
            yield (
                f"--plan {parallel.plan} takes the place of --schedule {parallel.schedule}: leave "
                "one of them out"
            )

    @property
    def offload_to(self) -> Path | Literal["cpu"] | None:
        """Where the optimizer's state lives; None: beside the parameters."""
        if self.memory.offload == "disk":
            return Path(self.memory.offload_folder or self.run.save)
        return "cpu" if self.memory.offload == "memory" else None

    def updater(self, model: nn.Module, groups: Groups) -> tuple[Any, Groups]:
        """Return the kind of optimizer, and its groups, given those of AdamW: the matrices of a
        model, and its other parameters.
        """
        if self.offload_to:
            return partial(OffloadedOptimizer, to=self.offload_to), groups
        return MasterWeights, groups

    @property
    def precision(self) -> str:
        """The precision of computing."""
        return precision_of(self.run.precision, self.run.verify)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of parameters and activations.

        With fp8 it is float32, as only operands of products have 8 bits; and with autocast, which
        narrows them as well.
        """
        wide = self.precision == "fp8" or self.autocast
        found: torch.dtype = getattr(torch, "float32" if wide else self.precision)
        return found

    @property
    def autocast(self) -> str:
        """The dtype of products under autocast; empty: there is none."""
        before, _, dtype = self.precision.partition("autocast-")
        return "" if before else dtype

    @property
    def scales_loss(self) -> bool:
        """Whether gradients pass through float16, in which small ones would vanish."""
        return "float16" in (self.precision, self.autocast)

    @property
    def adapter_rank(self) -> int:
        """Rank of the adapters; 0: none."""
        return self.run.adapter_rank

    def gpt(self, vocabulary: int) -> GPTConfig:
        """Return the model's sizes for a tokenizer's vocabulary."""
        with retold(ConfigError, ValueError, words=self.in_flags):
            sizes = GPTConfig(
                vocabulary=vocabulary, sequence=self.data.sequence, **asdict(self.model)
            )
            sizes.check_learns()
        return sizes

    @classmethod
    def kinds(cls) -> dict[str, Any]:
        """Return the dataclass of each section."""
        return {each.name: each.default_factory for each in fields(cls)}

    @classmethod
    def in_flags(cls, sentence: str) -> str:
        """Return a sentence on arguments, such as `raw_weights=True`, as one on flags:
        `--raw-weights`.

        Who calls `parallelize` or makes a `GPTConfig` reads the names of arguments, and who types a
        command reads flags.
        """
        named = {option.name for kind in cls.kinds().values() for option in flags_of(kind)}
        return re.sub(ARGUMENT, lambda found: _as_flag(found, named), sentence)

    def without_files(self) -> Self:
        """Return the run that computes the same, measures nothing beside, and leaves nothing on the
        disk.
        """
        names = [
            "save",
            "save_every",
            "keep",
            "keep_every",
            "mtbf",
            "resume",
            "metrics",
            "trace",
            "profile",
        ]
        names += ["eval_every", "eval_batches"]
        unsaved: dict[str, Any] = {name: getattr(RunOptions, name) for name in names}
        memory = self.memory
        if memory.offload == "disk" and not memory.offload_folder:
            memory = replace(memory, offload_folder=self.run.save)
        return replace(self, memory=memory, run=replace(self.run, **unsaved))

    def sections(self) -> Sections:
        """Return plain dictionaries, as they stand in a TOML file."""
        found: Sections = {}
        for each in fields(self):
            section = getattr(self, each.name)
            found[each.name] = {
                option.name: getattr(section, option.name) for option in flags_of(section)
            }
        return found


def precision_of(said: str, verify: bool) -> str:
    """Return the precision of computing, given the options `--precision` and `--verify`."""
    return said or ("float64" if verify else "float32")


ELSEWHERE = {"fp8": "precision fp8", "autocast": "precision autocast"}
"""Names of `Recipe` that are not those of flags."""


ARGUMENT = (
    r"(?<![\w/.=-])([a-z][a-z_0-9]*)(?:=('[^']*'(?: or '[^']*')*|[\w.+-]*\w(?:,\w+)*))?(?![\w/=-])"
)


def _as_flag(found: re.Match[str], named: set[str]) -> str:
    """Return a word, or name=value, as a flag if it is an argument.

    A plain word such as heads stays one.
    """
    name, value = found[1], found[2]
    if name not in named | ELSEWHERE.keys() or (value is None and "_" not in name):
        return found[0]
    known = flag(ELSEWHERE.get(name, name))
    if value is None or value == "True":
        return known
    if value == "False":
        return f"--no-{known[2:]}"
    return known + " " + value.replace("'", "")
