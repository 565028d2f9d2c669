"""Sites that a slow wire joins: what it costs to train them as one, and what to train them apart.

    ddp                 2 (S - 1)/S n bytes of gradients a step; backward hides some of it
    compressed          the same, with fewer bytes
    local steps         2 (S - 1)/S n bytes every H steps, in 32 bits; nothing hides it
    in fragments        1/F of it, F times in H steps; `delay` steps hide it
    sparse              (S - 1) n/4096 chunks of 120 bytes every H steps

Each of S sites has the planned machine and batch, so together they train on S times the tokens a
step. A site sends through one wire. With w seconds on the wire, of which h hide behind computing,

    seconds of a step = seconds inside a site + max(0, w - h) / steps from one meeting to the next

What is not exact changes the numbers, not only the time: `docs/slow-wires.md` has losses after
equal tokens.
"""

from collections.abc import Callable
from typing import NamedTuple

from minidist.plan.model import Model
from minidist.plan.search import Found

CLOSE = 0.05  # of a site's step: so much longer, a way is as good as free
BACKWARD = 2 / 3  # of the computing
BLOCK = 256  # numbers that share a scale of 32 bits
CHUNK = 4096


class Wire(NamedTuple):
    """What joins the sites: how many there are, and bytes/s that each sends."""

    sites: int
    bandwidth: float


class Way(NamedTuple):
    """A way to train on several sites.

    Attributes
    ----------
    flags : str
        Of `train`.
    bytes : callable
        `bytes(model, bytes of a gradient, sites)`: what a site sends when sites meet.
    every : int
        Steps from one meeting to the next.
    delay : int
        Steps that hide a meeting; 0: backward hides it, if sites meet in every step.
    whole : bool
        It compresses whole gradients, so no rank may keep only a shard of them.
    chosen : bool
        It sends the largest elements of what a rank has, which has to be the same on all ranks that
        have copies: no slices of what another axis cuts, too.
    """

    flags: str
    bytes: Callable[[Model, int, int], float]
    every: int = 1
    delay: int = 0
    whole: bool = False
    chosen: bool = False


class Joined(NamedTuple):
    """What a way makes of a wire: bytes of a meeting, steps from one to the next, seconds of a step,
    the bandwidth from which on it takes at most 5 % longer than a site alone, and the share of the
    time that trains when machines fail.
    """

    bytes: float
    every: int
    seconds: float
    enough: float
    trains: float = 1.0

    @property
    def lasting(self) -> float:
        """Seconds of a step that counts: what failures take is in them."""
        return self.seconds / self.trains


def reduced(bytes: float, sites: int) -> float:
    """Return what one of so many sites sends in a ring all-reduce."""
    return 2 * (sites - 1) / sites * bytes


def matrices(model: Model) -> list[tuple[int, int, int]]:
    """Return the matrices of a model: how many of each, and their sides."""
    width, heads = model.hidden, model.head_dim * model.heads
    keys = model.head_dim * model.kv
    experts = max(1, model.experts + model.shared)
    inner = model.layers * experts * (2 if model.gated else 1)
    ends = 1 if model.tied else 2
    return [
        (2 * model.layers, heads, width),
        (2 * model.layers, keys, width),
        (inner, model.ffn, width),
        (model.layers * experts, width, model.ffn),
        (ends, model.vocabulary, width),
    ]


def power_sgd(columns: int) -> Callable[[Model, int, int], float]:
    """Return what a site sends with PowerSGD: two factors of so many columns for each matrix."""

    def bytes(model: Model, width: int, sites: int) -> float:
        factors = sum(count * columns * (n + m) for count, n, m in matrices(model))
        return reduced(4 * factors, sites)

    return bytes


def in_blocks(bits: float) -> Callable[[Model, int, int], float]:
    """Return what a site sends with so many bits an element, and a scale for each block."""

    def bytes(model: Model, width: int, sites: int) -> float:
        return reduced(model.parameters * (bits / 8 + 4 / BLOCK), sites)

    return bytes


WAYS = {
    "ddp": Way("--dp", lambda model, width, sites: reduced(width * model.parameters, sites)),
    "int8": Way("--compress int8", in_blocks(8), whole=True),
    "1bit": Way("--compress 1bit", in_blocks(1), whole=True),
    "powersgd": Way("--compress powersgd:4", power_sgd(4), whole=True),
    "topk": Way(
        "--compress topk:0.01",
        lambda model, width, sites: (sites - 1) * 0.01 * model.parameters * 8,
        whole=True,
    ),
    "diloco": Way(
        "--dcn {sites} --local-steps 50",
        lambda model, width, sites: reduced(4 * model.parameters, sites),
        every=50,
    ),
    "streaming": Way(
        "--dcn {sites} --local-steps 50 --fragments 5 --outer-delay 5 --mixing 0.5",
        lambda model, width, sites: reduced(4 * model.parameters / 5, sites),
        every=10,
        delay=5,
    ),
    "sparse": Way(
        "--dcn {sites} --local-steps 50 --outer-topk 0.0156 --outer-momentum 0 --outer-lr 1",
        lambda model, width, sites: (sites - 1) * model.parameters / CHUNK * 120,
        every=50,
        chosen=True,
    ),
}
"""By name, those that change the numbers least first."""


def seconds_of_step(inside: float, wire: float, hidden: float, every: int) -> float:
    """Return the seconds of a step that takes `inside` in a site, if a meeting after every so many
    steps takes `wire` and `hidden` of that are hidden.
    """
    return inside + max(0.0, wire - hidden) / every


def join(found: Found, wire: Wire) -> dict[str, Joined]:
    """Return what each way makes of sites that each have a planned layout.

    Ways that `train` does not run with it are left out.
    """
    inside, width = found.seconds, found.run.gradients
    backward = BACKWARD * found.step["computing"]
    joined = {}
    for name, way in WAYS.items():
        run = found.run
        if run.zero and (way.whole or (way.chosen and max(run.tp, run.ep, run.pp) > 1)):
            continue
        bytes = way.bytes(found.run.model, width, wire.sites)
        hidden = way.delay * inside
        if way.every == 1:
            hidden = backward
        seconds = seconds_of_step(inside, bytes / wire.bandwidth, hidden, way.every)
        enough = bytes / (hidden + CLOSE * inside * way.every)
        joined[name] = Joined(bytes, way.every, seconds, enough)
    return joined


def as_good_as_free(way: Joined, alone: float) -> bool:
    """Tell whether a step that counts takes at most 5 % longer than in a site alone."""
    return way.lasting <= (1 + CLOSE) * alone


def best(joined: dict[str, Joined], alone: float, sites: int) -> str:
    """Return the way that changes the numbers least among those that take at most 5 % longer than a
    site alone; if there is none, the fastest; nothing if one site alone is faster.
    """
    for name, each in joined.items():
        if as_good_as_free(each, alone):
            return name
    fastest = min(joined, key=lambda name: joined[name].lasting)
    return fastest if joined[fastest].lasting < sites * alone else ""
