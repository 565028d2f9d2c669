"""The ranks of a sharded model: who cuts which parameters, and on what these travel.

    FSDP             [0 1 2 3]           all ranks cut, each has 1/4
    shard_ranks=2    [0 1] [2 3]         `shard_comm`: each pair cuts, each rank has 1/2
                      0 ─── 2            `across`: those that have the same shard
    experts          their copies cut, wherever all else is cut

What the stream sends travels on communicators that no other thread uses.

All ranks must gather and reduce the same units in the same order: FSDP checks it at each step.

    rank 0   gather layers.0   gather layers.1 ─┐
    rank 1   gather layers.0   gather layers.2 ─┴▶ MismatchError on both, with these words

If a model chooses its way by its data, ranks may call different units. Two units of the same size
would be mixed up, and the numbers would be wrong without a word; with different sizes a rank would
wait for ever. Therefore each rank tells the others which step it is about to take: a roll call on
the stream, hidden behind computing as gathering is.

On a GPU the hosts queue work far ahead, and a roll call at each unit would make them wait for each
other. There they compare all steps when a forward or backward ends, before its gradients are used,
and no GPU has to wait.
"""

from collections.abc import Iterable
from itertools import zip_longest

from torch import nn

from minidist.full.comm import Communicator, MismatchError
from minidist.full.ddp.buckets import links_of
from minidist.full.fsdp.flat import Direct, Flat
from minidist.full.placement import copies_of


class Ranks:
    """The communicators of a sharded model. Building it is collective.

    Parameters
    ----------
    comm : Communicator
        The ranks of the data axis.
    parameters : Iterable[nn.Parameter]
        All that are sharded, trained or frozen.
    shard_ranks : int, optional
        How many neighbouring ranks form a group that cuts the parameters; by default all.
    replicated : bool
        Whether every rank has some parameters whole.

    Attributes
    ----------
    shard_comm : Communicator
        The ranks that cut all but experts.
    across : Communicator or None
        In hybrid sharding, those that have the same shards.
    stream : Stream
        The stream on which units are gathered, and gradients reduced.
    single : Communicator
        This rank alone, if some parameters are replicated.
    same : SameSteps
        What the ranks that cut use to compare what they do. `compared` are this and, in hybrid
        sharding, that across groups.
    """

    def __init__(
        self,
        comm: Communicator,
        parameters: Iterable[nn.Parameter],
        shard_ranks: int | None,
        replicated: bool,
    ) -> None:
        parameters = list(parameters)
        self.comm, self.shard_comm = comm, comm
        self.across: Communicator | None = None
        if shard_ranks is not None:
            self.shard_comm, across = comm.levels(shard_ranks)
            self.across = across.fork()
        self.stream = self.shard_comm.stream()
        experts = any(copies_of(parameter, comm) is not comm for parameter in parameters)
        if experts and shard_ranks is not None:
            raise ValueError(
                f"shard_ranks={shard_ranks} knows no experts that ranks have shared out: leave it "
                "out"
            )
        # for the stream's thread
        self.links = {self.shard_comm: self.stream.comm}
        if experts:
            self.links = links_of(parameters, comm, self.stream)
        self.directs: dict[Communicator, Direct] = {}
        self.single = comm.split(comm.rank) if replicated else comm
        at_once = all(parameter.device.type != "cuda" for parameter in parameters)
        self.same = SameSteps(self.stream.comm, at_once)
        self.compared = [self.same]
        if self.across is not None:
            self.compared.append(SameSteps(self.across, at_once))

    def cutting(self, parameters: list[nn.Parameter]) -> Communicator:
        """Return the ranks that cut these parameters: of experts that have fewer copies than all
        else, the copies.
        """
        copies = copies_of(parameters[0], self.comm)
        return self.shard_comm if copies is self.comm else copies

    def link(self, parameters: list[nn.Parameter]) -> Communicator:
        """Return what the stream uses to reach the ranks that cut these parameters."""
        return self.links[self.cutting(parameters)]

    def direct(self, parameters: list[nn.Parameter]) -> Direct:
        """Return the plain transport between the ranks that cut these parameters: one for all that
        the same ranks cut.
        """
        link = self.link(parameters)
        return self.directs.setdefault(link, Direct(link, self.across))

    def volume(
        self, flats: list[Flat], of_root: list[Flat], microbatches: int
    ) -> tuple[str, float]:
        """Return what a rank sends in a step of FSDP: a formula in words, and its bytes."""
        ranks, group, m = self.comm.size, self.shard_comm.size, microbatches
        inside, n, trained = 0.0, 0, 0
        for flat in flats:
            times = m if flat in of_root else 2 * m
            size = sum(parameter.nbytes for parameter in flat.parameters)
            link = self.link(flat.parameters)
            inside += (link.size - 1) / link.size * size * (times + m * flat.trained)
            n += size
            trained += size * flat.trained
        if group == ranks:
            more = f"{2 * m} x bytes + {m} x those trained"
            units = f"{3 * m} x bytes" if trained == n else more
            copies = ", of experts with P copies" if len(self.links) > 1 else ""
            return f"(P - 1)/P x ({units} - {m} x root's){copies}", inside
        across = 2 * m * (1 - group / ranks) * trained / group
        return f"the formula for groups of {group}", inside + across

    def step(self, what: str) -> None:
        """Note what this rank does next, which all ranks must do. Runs on the stream."""
        for same in self.compared:
            same.step(what)

    def pass_ended(self, which: str) -> None:
        """Let the ranks compare their steps.

        On a GPU this waits for the other hosts, but for no GPU.
        """
        groups = self.compared if which == "backward" else [self.same]
        for same in groups:
            self.stream.launch(same.step, f"the end of {which}", True)


class SameSteps:
    """The steps that this rank has taken since the ranks last compared them.

    Parameters
    ----------
    comm : Communicator
        The ranks that must take the same steps. Only one thread may use it.
    at_once : bool
        Compare each step before it is taken, and not only at the end of a forward or backward.
    """

    def __init__(self, comm: Communicator, at_once: bool) -> None:
        self.comm, self.at_once = comm, at_once
        self.steps: list[str] = []

    def step(self, what: str, last: bool = False) -> None:
        """Note what this rank does next; `last` ends a forward or backward.

        Raises
        ------
        MismatchError
            On every rank, if the steps are compared now, and differ.
        """
        self.steps.append(what)
        if not (self.at_once or last):
            return
        everyones = self.comm.all_gather_object(self.steps) if self.comm.size > 1 else [self.steps]
        self.steps = []
        apart = [
            steps
            for steps in zip_longest(*everyones, fillvalue="nothing more")
            if len(set(steps)) > 1
        ]
        if apart:
            said = "; ".join(
                f"rank {member}: {step}"
                for member, step in zip(self.comm.members, apart[0], strict=True)
            )
            raise MismatchError(
                f"the ranks do not call the same units of the model in the same order ({said}): "
                "have every rank call all, or let a policy choose a module around them"
            )
