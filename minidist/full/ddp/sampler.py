"""Which rank trains on which samples: every sample exactly once per epoch, for any number of ranks.

    order of the epoch    7 2 9 0 │ 4 1 8 5 │ 3 6      10 samples in global batches of 4
    rank 0 of 2           7 2     │ 4 1     │ 3
    rank 1 of 2               9 0 │     8 5 │   6

The order is a pure function of (seed, epoch). It is cut into *global* batches first, and a rank
takes its contiguous slice of each. So step k trains on the same samples, whatever the number of
ranks: a run on eight ranks reproduces the serial run, and a checkpoint can continue on another
number of ranks.

torch's `DistributedSampler` makes all shares equally long instead: it repeats samples or drops
some. It also needs a call of `set_epoch` before every epoch, and without it deals every epoch in
the same order. Ours counts epochs itself.

Cost per rank: 8 bytes of memory for each sample of the epoch, and no message.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
State = dict[str, int]

# batches that are sorted by length together: more need less padding, fewer are mixed better
POOL = 32


def share(rows: int, ranks: int, rank: int) -> slice:
    """Return the rows of a global batch that `rank` holds: the cut of `numpy.array_split`.

    The shares follow each other without a gap, and differ by at most one row (the first `rows %
    ranks` have it). A share is empty when there are fewer rows than ranks.
    """
    size, larger = divmod(rows, ranks)
    first = rank * size + min(rank, larger)
    return slice(first, first + size + (rank < larger))


class DistributedSampler:
    """Deals samples out to ranks and remembers its position.

    A `for` loop yields this rank's indices of one global batch after the other, to the end of the
    epoch; the next `for` deals the next epoch. It can serve as the `batch_sampler` of a torch
    `DataLoader`. (With worker processes a loader reads ahead, and then the saved position is ahead
    of the training, too.)

    Within a global batch the shares differ by at most one sample. If `ranks` does not divide
    `batch`, the first ranks have one sample more in *each* batch.

    Parameters
    ----------
    length : int
        Number of samples, at least 1.
    ranks, rank : int
        Size of the data axis and this rank's place on it: ranks that work on the *same* samples
        (tensor, pipeline) pass the same `rank`.
    seed : int
        Not negative; the same on every rank.
    batch : int, optional
        Samples per *global* batch. By default about one for each rank: the fewest that leave none
        without a sample in an epoch's last batch. (With another batch a share may be empty, which
        a `DataLoader` cannot collate.)
    shuffle : bool
        Draw the order of each epoch, or keep 0, 1, 2, ...
    lengths : array [length], optional
        Tokens of each sample. If given, samples of similar length share a batch, so that less is
        padded.

    Raises
    ------
    ValueError
        If a number is out of its range, or if there are fewer samples than ranks and no `batch`.
    """

    def __init__(
        self,
        length: int,
        ranks: int = 1,
        rank: int = 0,
        seed: int = 0,
        *,
        batch: int | None = None,
        shuffle: bool = True,
        lengths: Indices | None = None,
    ) -> None:
        self.length, self.seed = length, seed
        self.ranks, self.rank = ranks, rank
        self.shuffle, self.lengths = shuffle, lengths
        self.epoch = 0
        self.position = 0  # samples of this epoch that were dealt out, over all ranks
        if length < 1:
            raise ValueError(f"length = {length}: a sampler needs at least one sample to deal out")
        if not 0 <= rank < ranks:
            raise ValueError(f"rank = {rank} of {ranks} ranks: ranks count from 0 to ranks - 1")
        if batch is None and length < ranks:
            raise ValueError(
                f"length = {length} samples for {ranks} ranks: some would have none, so use fewer "
                "ranks, or pass batch= and expect empty shares"
            )
        sizes = range(ranks, length + 1)
        full = (size for size in sizes if length % size == 0 or length % size >= ranks)
        self.batch = next(full) if batch is None else batch
        if self.batch < 1:
            raise ValueError(f"batch = {self.batch}: a global batch needs at least one sample")
        if seed < 0:
            raise ValueError(f"seed = {seed}: a seed must not be negative")
        if lengths is not None and len(lengths) != length:
            raise ValueError(
                f"{len(lengths)} lengths were given for {length} samples: give one for each"
            )

    def __len__(self) -> int:
        """Return the number of global batches in a whole epoch."""
        return -(-self.length // self.batch)

    def __iter__(self) -> Iterator[list[int]]:
        for whole in self.rest_of_epoch():
            yield whole[share(len(whole), self.ranks, self.rank)].tolist()

    def rest_of_epoch(self) -> Iterator[Indices]:
        """Yield the *global* batches that are left of this epoch, and move the position along."""
        for whole in self.epoch_batches(self.epoch, self.position):
            # Before the yield: a state saved while this batch is being used must point at the next
            # one.
            self.position += len(whole)
            if self.position == self.length:
                self.epoch, self.position = self.epoch + 1, 0
            yield whole

    def epoch_batches(self, epoch: int, start: int = 0) -> list[Indices]:
        """Return the global batches of any epoch, from its sample `start` on: indices, together
        each once.

        The order depends on the seed and the epoch alone (a new version of numpy may draw another
        permutation from the same seed). The last batch is shorter if the batch does not divide the
        length. The sampler stays where it is.
        """
        generator = np.random.default_rng([self.seed, epoch])
        order: Indices = (
            generator.permutation(self.length) if self.shuffle else np.arange(self.length)
        )
        if self.lengths is not None:
            pools = np.split(order, range(POOL * self.batch, self.length, POOL * self.batch))
            order = np.concatenate(
                [pool[np.argsort(self.lengths[pool], kind="stable")] for pool in pools]
            )
            if self.shuffle:
                # Sorting put short samples first: mix the batches again. An incomplete batch stays
                # at the end, so that batch k begins at sample k * batch and a position in the epoch
                # is one number.
                complete = order[: self.length - self.length % self.batch]
                complete[:] = generator.permutation(complete.reshape(-1, self.batch)).reshape(-1)
        return [
            order[first : first + self.batch] for first in range(start, self.length, self.batch)
        ]

    def state_dict(self) -> State:
        """Return the sampler's position, which is the same on every rank, as numbers that JSON can
        hold.
        """
        return {"epoch": self.epoch, "position": self.position} | self._order()

    def load_state_dict(self, state: State) -> None:
        """Continue where `state` was taken, on any number of ranks.

        Another batch size is fine as well: the order of the samples does not depend on it, unless
        they are grouped by length.

        Raises
        ------
        ValueError
            If the saved sampler dealt in another order: some samples would be lost and others
            repeated.
        """
        saved = {name: state.get(name) for name in self._order()}
        if saved != self._order():
            raise ValueError(
                f"the saved sampler dealt with {saved}, this one with {self._order()}, so samples "
                "would be lost and others repeated: use the saved values, or start the data from "
                "the beginning"
            )
        if not 0 <= state["position"] < self.length:
            raise ValueError(f"position = {state['position']} is none among {self.length} samples")
        self.epoch, self.position = state["epoch"], state["position"]

    def _order(self) -> State:
        """Return all on which the order of the samples depends, without the epoch."""
        grouped = 0 if self.lengths is None else self.batch
        return {
            "length": self.length,
            "seed": self.seed,
            "shuffle": int(self.shuffle),
            "grouped": grouped,
        }
