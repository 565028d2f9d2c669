"""The command line of `bench`, checked before anything starts. The workers are given the same
arguments again.
"""

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from minidist.full.collectives import COLLECTIVES, algorithms
from minidist.full.launch.parser import Parser, flag_of
from minidist.full.options import NOT_NEGATIVE, RANKS, Limit, shown

TRAINING = (
    "ddp",
    "zero",
    "pipeline",
    "tensor",
    "checkpoint",
    "recompute",
    "adamw",
    "context",
    "flash",
    "experts",
    "compress",
)
NAMES = ("copy", "p2p", *COLLECTIVES, *TRAINING, "threads")
ON_GPUS = ("gpu", "nccl")  # not among `all`
APART = ("engines", "elastic")  # with options of their own
PEERS = ("native", "tuned", "gloo")
ALGORITHMS = ("auto", "handle", "registered")
NCCL_ALGORITHMS = ("recursive", "ring", "tree", "pairwise")  # the first for a power of two of ranks
DTYPES = ("float16", "float32", "float64", "int8", "int16", "int32", "int64")
SIZES = "4KiB,64KiB,1MiB,16MiB,64MiB"
MOST_BYTES = 64 << 30
HEADS = LAYERS = 4  # of the models that are trained
EXPERTS = 8  # of those that have some
SHORTEST = 512  # tokens of a sequence that `context` shares out
# What a bench deals out evenly to its ranks: how many, and what.
DEALT = {
    **dict.fromkeys(("tensor", "checkpoint"), (HEADS, f"the {HEADS} heads of its model")),
    "context": (SHORTEST // 2, f"{SHORTEST} tokens, in two pieces a rank"),
    "experts": (EXPERTS, f"its {EXPERTS} experts"),
}
WIDTH = Limit(
    "a multiple of 8: the model has 4 heads with pairs of channels",
    lambda it: it > 0 and it % 8 == 0,
)
UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
}


class Options(NamedTuple):
    """What to measure. `rounds=0` takes each bench's own number, and so do empty sizes of the model
    of `gpu`.
    """

    names: tuple[str, ...]
    ranks: int
    sizes: tuple[int, ...]
    dtype: str
    rounds: int
    algorithms: tuple[str, ...]
    peers: tuple[str, ...]
    hidden: tuple[int, ...]
    json: str
    device: str
    layers: int
    batch: int
    case: tuple[str, ...]

    @property
    def collectives(self) -> tuple[str, ...]:
        """The collectives among the names."""
        return (
            COLLECTIVES
            if self.names == ("nccl",)
            else tuple(name for name in self.names if name in COLLECTIVES)
        )

    @property
    def launches(self) -> tuple[str, ...]:
        """The launches of `mpirun`, by what MPI is told, see `minidist.bench`; `nccl` by torchrun;
        `here`.
        """
        if self.names == ("nccl",):
            return ("nccl",)
        here = ("here",) if {"gpu", "threads"} & set(self.names) else ()
        tuned = ("tuned",) if "tuned" in self.peers and self.collectives else ()
        shipped = ("shipped",) if set(self.names) - {"gpu", "threads"} else ()
        return (*shipped, *tuned, *here)


def parse(argv: list[str]) -> Options:
    """Return the options, or leave with status 2 and a sentence that says what is wrong."""
    parser = build_parser()
    given = parser.parse_args(argv)
    name = given.names.replace("-", "_")
    if name not in (*NAMES, *ON_GPUS, "all"):
        parser.error(
            f"there is no bench {given.names!r}: choose one of {', '.join((*NAMES, *ON_GPUS, *APART))}, all"
        )
    if given.ranks < 2:
        parser.error(f"--ranks {given.ranks}: communication takes at least 2")
    given.hidden = given.hidden or (() if name == "gpu" else (256, 512))
    for_nccl = NCCL_ALGORITHMS[given.ranks & given.ranks - 1 > 0 :]
    given.algorithms = given.algorithms or (for_nccl if name == "nccl" else ALGORITHMS)
    options = Options(**vars(given) | {"names": NAMES if name == "all" else (name,)})
    _check_choices(parser, options)
    return options


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of `python -m minidist bench`."""
    what = (
        "Measure minidist beside its peers in one run, taking turns. Start it plainly: it "
        "launches mpirun."
    )
    parser = Parser(prog="python -m minidist bench", description=what)
    add, numbers = parser.add_argument, flag_of(int, NOT_NEGATIVE)
    add(
        "names",
        metavar="NAME",
        help=f"{', '.join(NAMES)}, or all; gpu, nccl; - and _ mean the same; "
        f"{' and '.join(APART)} have their own --help",
    )
    add(
        "--ranks",
        type=flag_of(int, RANKS),
        default=2,
        help="processes (default 2, for which the bounds are)",
    )
    add("--sizes", type=_each(_size), default=SIZES, help=f"of the whole buffer (default {SIZES})")
    add("--dtype", default="float32", choices=DTYPES, help="of the elements (default float32)")
    add(
        "--rounds",
        type=numbers,
        default=0,
        help="turns of every competitor (default 15; 8 for steps, 5 for gpu)",
    )
    how = (
        "of minidist; handle: auto, prepared once; registered: auto, on buffers of comm.allocate, "
        f"for all-reduce (default {','.join(ALGORITHMS)}; for "
    )
    add("--algorithms", type=_words, help=f"{how}nccl {','.join(NCCL_ALGORITHMS)})")
    peers = (
        "native (MPI as shipped), tuned (MPI in a second launch that keeps freed memory), gloo; "
        "or none"
    )
    add("--peers", type=_words, default=PEERS, help=peers)
    widths = (
        "channels of the GPT of ddp, zero, pipeline and tensor, and of recompute and gpu the "
        "least (default "
    )
    add("--hidden", type=_each(flag_of(int, WIDTH)), help=f"{widths}256,512; for gpu 2048)")
    add(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="of gpu and nccl; cpu is to try them (default cuda)",
    )
    add("--layers", type=numbers, default=0, help="of the GPT of gpu (default 16)")
    add("--batch", type=numbers, default=0, help="sequences of a step of gpu (default 4, and 8)")
    add(
        "--case",
        type=_words,
        default=(),
        help="of gpu: only cases with this in their names, such as eager,8 x 2048",
    )
    add("--json", metavar="FILE", default="", help="write all values there; - for standard output")
    return parser


def size_text(bytes: int) -> str:
    """Return `64 KiB` for 65536."""
    for unit, text in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if bytes >= unit and bytes % unit == 0:
            return f"{bytes // unit} {text}"
    return f"{bytes} B"


def _each(read: Callable[[str], int]) -> Callable[[str], tuple[int, ...]]:
    # each once: cases have these for names
    return lambda text: tuple(dict.fromkeys(map(read, text.split(","))))


def _size(word: str) -> int:
    match = re.fullmatch(rf"([0-9]{{1,15}}) *({'|'.join(UNITS)})", word.strip().upper())
    if match is None:
        raise argparse.ArgumentTypeError(f"{shown(word)} is not a size: write 4096,64KiB,16MiB")
    size = int(match[1]) * UNITS[match[2]]
    if not 0 < size <= MOST_BYTES:
        raise argparse.ArgumentTypeError(
            f"{shown(word)} must be from 1 B to {size_text(MOST_BYTES)}"
        )
    return size


def _words(text: str) -> tuple[str, ...]:
    return tuple(
        word.strip().replace("-", "_")
        for word in text.split(",")
        if word.strip() not in ("", "none")
    )


def _check_choices(parser: argparse.ArgumentParser, options: Options) -> None:
    """Refuse what none of the chosen benches knows. What some of them do not know, those leave
    out.
    """
    known = {*ALGORITHMS}.union(*(algorithms(name) for name in options.collectives)) - {"native"}
    for algorithm in sorted(set(options.algorithms) - known):
        offered = ", ".join(sorted(known))
        parser.error(
            f"--algorithms {algorithm}: {' '.join(options.names)} offers {offered}; native is one "
            "of --peers"
        )
    for peer in sorted(set(options.peers) - set(PEERS)):
        parser.error(f"--peers {peer}: choose among {', '.join(PEERS)}, or none")
    check_writable(parser, options.json)
    if options.dtype == "int16" and "nccl" in options.names:
        parser.error("--dtype int16: NCCL and gloo know no such numbers: give another")
    if options.dtype == "int16" and options.collectives and "gloo" in options.peers:
        parser.error("--dtype int16: gloo knows no such numbers: add --peers native,tuned")
    for name in options.names:
        many, what = DEALT.get(name, (0, ""))
        if many % options.ranks:
            fit = [str(ranks) for ranks in range(2, many + 1) if many % ranks == 0]
            parser.error(
                f"--ranks {options.ranks}: {name} deals out {what}, so use {', '.join(fit[:-1])} "
                f"or {fit[-1]}"
            )
    if "pipeline" in options.names and options.ranks > LAYERS:
        parser.error(
            f"--ranks {options.ranks}: pipeline deals out its {LAYERS} layers, so use at most "
            f"{LAYERS}"
        )


def check_writable(parser: argparse.ArgumentParser, file: str) -> None:
    """Refuse a file for the figures that cannot be written, before anything is measured."""
    try:
        if file not in ("", "-"):
            Path(file).open("a").close()
    except OSError as error:
        parser.error(f"--json {file} cannot be written ({error.strerror}): give another file")
