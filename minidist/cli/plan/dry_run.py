"""Asking `train` about a planned run: its own parser and checks, on ranks that exist on paper alone.

    words of a command line ──complaint──▶ what `train` says to them: nothing if it takes them
                            ──bytes_of_host──▶ the memory for which it asks a node

Nothing is sent, and no weight is drawn. It takes torch, in which `train` builds the model without
memory.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

from minidist.cli.train_checks import host_memory
from minidist.full.comm import Communicator
from minidist.full.comm.ledger import Ledger
from minidist.full.comm.wire import Wire
from minidist.full.mesh import AXES, Layout, Mesh
from minidist.full.trainer.checked import CheckedRun, check_order, check_run, layout_of
from minidist.full.trainer.config import ConfigError
from minidist.further import parse
from minidist.plan.run import Setup


def complaint(words: Sequence[str], run: Setup) -> str:
    """Return why `train` refuses these words of its command line; nothing if it takes them."""
    try:
        dry_run(words, run)
    except ConfigError as error:
        return str(error)
    return ""


def bytes_of_host(words: Sequence[str], run: Setup, node: int) -> float:
    """Return the bytes that a node of `node` ranks needs on its host until each rank has its share.

    Raises
    ------
    ConfigError
        What `train` says, if it refuses the words.
    """
    checked = dry_run(words, run)
    return host_memory(checked.config, checked.sizes, node)


def dry_run(words: Sequence[str], run: Setup) -> CheckedRun:
    """Have `train` read its command line and check it for the ranks of a planned run.

    Files and memory are those of another machine, so they are not checked.

    Raises
    ------
    ConfigError
        What `train` says.
    """
    config = parse(words)
    mesh = PaperMesh(layout_of(config, run.machine.total), run.machine.hosted)
    if config.parallel.order != ",".join(AXES):
        check_order(mesh.layout, mesh.world.nodes)
    return check_run(config, mesh, run.model.vocabulary)


class PaperWire(Wire):
    """The wire of a rank whose other ranks do not exist: it knows where they would be, and sends
    nothing.
    """

    kind = "paper"

    def nothing(self, *words: Any, **named: Any) -> NoReturn:
        """Refuse to send, to receive and to form groups, of which PaperMesh has all."""
        raise NotImplementedError("ranks on paper send nothing")

    isend = nothing
    irecv = nothing
    all_gather_object = nothing
    derive = nothing
    allocate = nothing
    fail = nothing


class PaperMesh(Mesh):
    """The mesh of rank 0 among ranks on paper, of which each node has `node`.

    Checks ask it for sizes and places.
    """

    def __init__(self, layout: Layout, node: int) -> None:
        homes = [rank // node for rank in range(layout.size)]

        def among(*axes: str) -> Communicator:
            members = layout.group(axes, 0)
            wire = PaperWire(0, members, "paper", homes)
            return Communicator(wire, Ledger())

        self.layout = layout
        self.coordinate = layout.coordinate(0)
        self.world = among(*AXES)
        for axis in (*AXES, "ep"):
            setattr(self, axis, among(axis))
        self.data = among("dp", "cp")
