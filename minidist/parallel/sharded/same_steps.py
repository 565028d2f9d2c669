"""All ranks must gather and reduce the same units in the same order: FSDP checks it at each step.

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

from itertools import zip_longest

from minidist.comm import Communicator, MismatchError


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
        everyones = self.comm.roll_call(self.steps) if self.comm.size > 1 else [self.steps]
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
            fault = f"the ranks do not call the same units of the model in the same order ({said})"
            raise MismatchError(
                f"{fault}: have every rank call all, or let a policy choose a module around them"
            )
