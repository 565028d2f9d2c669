"""All ranks gather and reduce the same units, in the same order: FSDP makes sure of it as they go.

    rank 0   gather layers.0   gather layers.1 ─┐
    rank 1   gather layers.0   gather layers.2 ─┴▶ MismatchError on both, with these words

If a model chooses its way by its data, ranks may call different units. Two units of one size would be taken for each
other, and the numbers be wrong in silence; units of different sizes would leave a rank waiting. Each rank therefore
tells the others what step it is about to take: a roll call, beside the program's messages, on the stream, and so hidden
as gathering itself is.

On a GPU the hosts queue work far ahead of it, and would have to wait for each other at each unit. There they compare
all steps of a forward or backward at once when it ends, before its gradients are used, and wait for no GPU.
"""

from __future__ import annotations

from itertools import zip_longest

from minidist.comm import Communicator, MismatchError


class SameSteps:
    """The steps that this rank has taken since the ranks last compared theirs.

    Parameters
    ----------
    comm : Communicator
        Of the ranks that have to do the same; no other thread uses it.
    at_once : bool
        Compare each step before it is taken, not only at the end of a forward or backward.
    """

    def __init__(self, comm: Communicator, at_once: bool) -> None:
        self.comm, self.at_once = comm, at_once
        self.steps: list[str] = []

    def step(self, what: str, last: bool = False) -> None:
        """Note what this rank does next; `last` ends a forward or backward.

        Raises
        ------
        MismatchError
            On every rank, if they are to compare their steps and these differ.
        """
        self.steps.append(what)
        if not (self.at_once or last):
            return
        everyones = self.comm.roll_call(self.steps) if self.comm.size > 1 else [self.steps]
        self.steps = []
        apart = [steps for steps in zip_longest(*everyones, fillvalue="nothing more") if len(set(steps)) > 1]
        if apart:
            said = "; ".join(f"rank {member}: {step}" for member, step in zip(self.comm.members, apart[0], strict=True))
            raise MismatchError(
                f"the ranks do not call the same units of the model in the same order ({said}): have every rank call "
                "them all, or let a policy choose a module around them as one unit"
            )
