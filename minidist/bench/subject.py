"""How a bench is declared: which competitors do the same thing, in which cases, and how fast
minidist has to be.

    @subject(peers=("local", "torch DDP"))
    def ddp(setting: Setting) -> Iterator[Case]:
        for hidden in setting.options.hidden:
            yield Case(f"D={hidden}, 8 x 128", {"DDP": ..., "torch DDP": ...})

The bounds stand in `bounds.toml`: `[ddp.DDP] "torch DDP" = { "D=256, 8 x 128" = 0.96 }`. The rest
is the same for every bench: `measured` lets the competitors of a case take turns, `report.py`
prints ratios.
"""

import importlib
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from minidist.bench.measure import Measurement, Run, alternate
from minidist.bench.options import Options
from minidist.full.collectives import COLLECTIVES
from minidist.full.comm import Communicator

# the parts of `bench gpu`
ON_ONE_GPU = ("sharded", "replicated", "eight_bits", "products", "attention")
FILES = {
    **dict.fromkeys((*COLLECTIVES, "p2p"), "subjects.messages"),
    **dict.fromkeys(("flash", "adamw", "recompute"), "subjects.alone"),
    **dict.fromkeys(ON_ONE_GPU, "gpu.subjects"),
}
RANKS, DTYPE = 2, "float32"  # for which the bounds are


class Bound(NamedTuple):
    """`competitor` takes at most `limit` times what `peer` does; without a peer, its own value is
    at most `limit`, or with `least` at least that.

    A ratio is the median of the rounds' ratios between two competitors that took turns, on 2 ranks
    in float32, with the two cores near each other (see `subjects/copy.py`). `native tuned` is MPI's
    own in a launch that is told to keep freed memory.
    """

    case: str
    competitor: str
    peer: str
    limit: float
    least: bool = False


class Setting(NamedTuple):
    """What a bench is given.

    Attributes
    ----------
    options : Options
        The command line.
    launch : str
        `shipped`, `tuned` (the whole run was told to keep freed memory), `nccl` or `here` (one
        process).
    comm : Communicator
        All ranks of the launch; `here` this process alone.
    gloo : module or None
        `torch.distributed` with a group of the same ranks, where a peer needs it.
    when : str
        `before` or `after` the other benches, for the probe of the machine.
    """

    options: Options
    launch: str
    comm: Communicator
    gloo: Any = None
    when: str = "before"


class Case(NamedTuple):
    """Competitors that do the same thing, each by a function without arguments; a call is `units`
    units of work.

    `bytes` is the size of the whole buffer, where there is one.
    """

    name: str
    runs: Mapping[str, Run]
    bytes: int = 0
    units: int = 1
    rounds: int = 0  # 0: those of the bench


class Counted(NamedTuple):
    """What a bench has measured itself for each competitor: a value for each round."""

    name: str
    values: Mapping[str, Sequence[float]]
    unit: str = "s"
    bytes: int = 0
    ranks: int = 0  # 0: those of the launch
    flops: int = 0


Cases: TypeAlias = Callable[[Setting], Iterable[Case | Counted]]


class Subject(NamedTuple):
    """One bench.

    Attributes
    ----------
    name : str
        `ddp`, as on the command line.
    cases : callable
        Sets up one case after the other. Its docstring says what is measured, and against what.
    peers : tuple of str
        The competitors to which the report gives ratios, in the order of its columns.
    rounds : int
        Turns of every competitor, unless the command line says otherwise.
    gloo : bool
        Whether one of the competitors is torch.distributed.
    """

    name: str
    cases: Cases
    peers: tuple[str, ...]
    rounds: int
    gloo: bool

    @property
    def bounds(self) -> Iterator[Bound]:
        """What `bounds.toml` promises."""
        promised = tomllib.loads(
            Path(__file__).with_name("bounds.toml").read_text(encoding="utf-8")
        )
        for competitor, peers in promised.get(self.name, {}).items():
            for peer, limits in peers.items():
                other = "" if peer in ("at most", "at least") else peer
                yield from (
                    Bound(case, competitor, other, limit, peer == "at least")
                    for case, limit in limits.items()
                )


def subject(
    peers: tuple[str, ...] = (), rounds: int = 8, gloo: bool = True
) -> Callable[[Cases], Subject]:
    """Make a function that yields cases the `Subject` of its name."""
    return lambda cases: Subject(cases.__name__, cases, peers, rounds, gloo)


def find_subject(name: str) -> Subject:
    """Return the bench of this name: `ddp` is in `subjects/ddp.py`; `FILES` has those that share a
    file.
    """
    file = FILES.get(name, f"subjects.{name}")
    found: Subject = getattr(importlib.import_module(f"minidist.bench.{file}"), name)
    return found


def measured(subject: Subject, setting: Setting) -> Iterator[Measurement]:
    """Yield what a bench measures, case by case. Collective."""
    for case in subject.cases(setting):
        if isinstance(case, Case):
            rounds = setting.options.rounds or case.rounds or subject.rounds
            times = alternate(case.runs, setting.comm, rounds).items()
            seconds = {name: [each / case.units for each in values] for name, values in times}
            # its models make room for what the next one counts
            case = Counted(case.name, seconds, bytes=case.bytes)
        found = partial(
            Measurement,
            subject.name,
            case.name,
            launch=setting.launch,
            unit=case.unit,
            bytes=case.bytes,
        )
        for name, values in case.values.items():
            yield found(
                name, values=tuple(values), ranks=case.ranks or setting.comm.size, flops=case.flops
            )
