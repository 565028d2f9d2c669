"""Choose an algorithm: a table of all algorithms, and the written rule of `algorithm="auto"`.

The rule (`explain`) considers the operation, the bytes, the number of ranks and the wire, but no
measured time. So two runs of a program make the same choices and give the same bits.

The functions of one operation are all called alike, with flat arrays; so are the engines' own
(`comm.native`).
"""

from collections.abc import Callable

from minidist.full.collectives import (
    central,
    fast_ring,
    hierarchical,
    pairwise,
    recursive,
    shared,
    tree,
)
from minidist.full.comm import Communicator
from minidist.ring import ring_all_gather

SMALL = 1 << 15  # up to this many bytes latency dominates: few rounds beat few bytes

TABLE: dict[str, dict[str, Callable[..., None]]] = {
    "all_reduce": {
        "central": central.all_reduce,
        "ring": fast_ring.all_reduce,
        "recursive": recursive.all_reduce,
        "halving_doubling": recursive.halving_doubling,
        "tree": tree.all_reduce,
        "hierarchical": hierarchical.all_reduce,
        "shared": shared.all_reduce,
    },
    "reduce_scatter": {
        "ring": fast_ring.reduce_scatter,
        "recursive": recursive.reduce_scatter,
        "pairwise": pairwise.reduce_scatter,
        "shared": shared.reduce_scatter,
    },
    "all_gather": {
        "ring": ring_all_gather,
        "recursive": recursive.all_gather,
        "pairwise": pairwise.all_gather,
        "shared": shared.all_gather,
    },
    "broadcast": {"central": central.broadcast, "tree": tree.broadcast, "shared": shared.broadcast},
    "reduce": {"central": central.reduce, "tree": tree.reduce},
    "gather": {"central": central.gather, "tree": tree.gather},
    "scatter": {"central": central.scatter, "tree": tree.scatter},
    "all_to_all": {"pairwise": pairwise.all_to_all},
}
COLLECTIVES = tuple(TABLE)


def algorithms(operation: str) -> tuple[str, ...]:
    """Return the values that `algorithm=` accepts for an operation, `auto` and `native`
    included. ValueError if there is no such operation.
    """
    _check(operation)
    return ("auto", *TABLE[operation], "native")


def explain(operation: str, bytes: int, comm: Communicator) -> tuple[str, str]:
    """Return the algorithm that `auto` takes for a buffer of `bytes`, and the reason. ValueError if
    there is no such operation.
    """
    _check(operation)
    ranks = comm.size
    if comm.wire.carries_cuda:
        return "native", "NCCL knows the links between GPUs"
    if operation == "all_to_all":
        return "pairwise", "every chunk goes straight to its owner"
    if operation in ("gather", "scatter"):
        few = bytes <= SMALL and ranks > 4
        return (
            ("tree", "few bytes: few rounds") if few else ("central", "nothing moves fewer bytes")
        )
    if comm.wire.kind == "mpi" and operation != "reduce" and shared.possible(comm):
        return "shared", "all ranks share memory: no message is needed"
    if operation in ("broadcast", "reduce"):
        return "tree", "log2 P rounds instead of P - 1"
    if (
        operation == "all_reduce"
        and len(comm.node) < ranks
        and any(len(node) > 1 for node in comm.nodes)
    ):
        return (
            "hierarchical",
            "several ranks a node: only 1/G of the bytes of each cross between nodes",
        )
    power = recursive.power_below(ranks) == ranks
    if bytes <= SMALL and (power or operation == "all_reduce"):
        return (
            "recursive",
            f"at most {SMALL} bytes: log2 P rounds, instead of P - 1 or twice as many",
        )
    return "ring", "many bytes: none leaves a rank twice"


def _check(operation: str) -> None:
    if operation not in COLLECTIVES:
        raise ValueError(
            f"there is no collective {operation!r}: choose one of {', '.join(COLLECTIVES)}"
        )


class Found(dict[tuple[str, str, int], tuple[str, Callable[..., None]]]):
    """What `find` has returned on a communicator, by its arguments."""


def find(
    operation: str, algorithm: str, bytes: int, comm: Communicator
) -> tuple[str, Callable[..., None]]:
    """Return the name and the function of an algorithm; `auto` becomes the algorithm that it takes.

    Raises
    ------
    ValueError
        If the operation has no such algorithm, or these ranks cannot run it.
    """
    known = comm.kept.get(Found) or comm.keep(Found, Found)
    key = (operation, algorithm, bytes)
    found: tuple[str, Callable[..., None]] | None = known.get(key)
    if found is None:
        found = _find(operation, algorithm, bytes, comm)
        if bytes <= SMALL and found[0] != "native":  # only small ones notice how long this takes
            known[key] = found
    return found


def _find(
    operation: str, algorithm: str, bytes: int, comm: Communicator
) -> tuple[str, Callable[..., None]]:
    if algorithm == "auto":
        algorithm = explain(operation, bytes, comm)[0]
    elif algorithm not in algorithms(operation):
        raise ValueError(
            f"{operation} has no algorithm {algorithm!r}: use one of "
            f"{', '.join(algorithms(operation))}"
        )
    elif algorithm == "native" and comm.native is None:
        raise ValueError(
            f"the {comm.wire.kind} wire has no native collectives: use algorithm='auto'"
        )
    elif algorithm == "shared" and not shared.possible(comm):
        here = (
            f"of these {comm.size} on the {comm.wire.kind} wire rank {comm.rank} has "
            f"{len(comm.node)} on its node"
        )
        raise ValueError(
            f"algorithm='shared' needs ranks that share memory, but {here}: use 'auto'"
        )
    elif (
        algorithm == "recursive"
        and operation != "all_reduce"
        and recursive.power_below(comm.size) != comm.size
    ):
        raise ValueError(
            f"recursive {operation} needs a power of two of ranks, not {comm.size}: use 'ring'"
        )
    return algorithm, getattr(comm.native, operation) if algorithm == "native" else TABLE[
        operation
    ][algorithm]


# ---------------------------------------------------------------- the least that a rank must send


def least(operation: str, whole: int, own: int, ranks: int, behind: int) -> int:
    """Return the fewest elements that a rank must send if the work is shared out evenly.

    `whole` is the number of elements, `own` that of this rank's shard, and `behind` is
    (rank - root) mod P. The sum over the ranks is the least that brings everything where it belongs.
    """
    foreign, to_all = whole - own, (ranks - 1) * own
    return {
        "all_reduce": foreign + to_all,  # reduced at the owners, then handed out
        "reduce_scatter": foreign,
        "all_gather": to_all,
        "broadcast": whole if behind < ranks - 1 else 0,  # from rank to rank: the last sends none
        "reduce": whole if behind else 0,
        "gather": own if behind else 0,
        "scatter": 0 if behind else foreign,
        "all_to_all": foreign,
    }[operation]
