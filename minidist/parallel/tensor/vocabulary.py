"""Cross-entropy over logits that are split by vocabulary: no rank ever holds a token's full row of logits.

    rank r holds   logits [N, V/P] of its words     N = B T tokens
    1  the largest logit of each token                all_reduce max, N numbers     subtracted from all
    2  Σ exp(logit), and the target's logit or 0      all_reduce sum, 2N numbers
    3  loss = Σ over tokens of log(Σ) - target        the same on every rank

With V = 128,000 and N = 8,192 the logits in float32 are 4.2 GB; gathering them would move nearly that much, where this
moves 3N numbers. The sums are differentiable: `reduce_from` hands the gradient to each rank's terms, so backward is
softmax minus one-hot on this rank's words, and needs no message.

Cost a rank: two all-reduces in forward, of 4N and 8N bytes in float32; none in backward. It holds N V/P numbers twice,
logits and their exponentials. (Shoeybi et al. 2019, section 3, "output embedding".)
"""

from __future__ import annotations

import torch
from torch import Tensor

from minidist.collectives import all_reduce
from minidist.collectives.fast import cut
from minidist.comm import Communicator
from minidist.parallel.adjoint import reduce_from

IGNORED = -100  # the target of a token that does not count


def vocabulary_parallel_cross_entropy_sum(
    logits: Tensor, targets: Tensor, comm: Communicator, vocabulary: int
) -> Tensor:
    """Sum of -log p(target) over tokens, in nats: what `cross_entropy_sum` gives of the whole logits.

    Parameters
    ----------
    logits : Tensor
        [..., V/P]: this rank's part of the vocabulary, as a head split by `ColumnParallel` returns it.
    targets : Tensor
        Token ids of the whole vocabulary, int64 [...], the same on every rank; those of -100 do not count.
    vocabulary : int
        V.

    Returns
    -------
    Tensor
        A scalar, at least float32; every rank holds the same. Call backward on all ranks: it is one loss, of which
        each has a copy.

    Raises
    ------
    ValueError
        If the logits are not this rank's part of such a vocabulary.
    IndexError
        If a target is not in the vocabulary; on a GPU, where asking would stop it, this is not checked.
    """
    mine = part_of(vocabulary, comm)
    if logits.shape[-1] != len(mine):
        raise ValueError(
            f"rank {comm.rank} of {comm.size} brings logits of {logits.shape[-1]} words, but of a vocabulary of "
            f"{vocabulary} it has {len(mine)}: split the head with ColumnParallel(), and do not gather what it returns"
        )
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)  # [N, V/P]
    words = targets.flatten()  # [N]
    counts = words != IGNORED
    check_ids(words.masked_fill(~counts, 0), vocabulary)  # of one shape, so that it works on `meta`, too
    largest = wide.detach().amax(-1)  # [N]; any constant would do, this one keeps exp from overflowing
    all_reduce(largest, comm, "max")
    shifted = wide - largest[:, None]  # [N, V/P]
    normalizer = shifted.exp().sum(-1)  # [N]
    here = (words >= mine.start) & (words < mine.stop)
    picked = shifted.gather(-1, (words - mine.start).masked_fill(~here, 0)[:, None])[:, 0]  # [N]
    total, target = reduce_from(torch.stack((normalizer, picked.masked_fill(~here, 0))), comm)
    losses = total.log() - target
    summed: Tensor = losses.masked_fill(~counts, 0).sum()
    return summed


def part_of(vocabulary: int, comm: Communicator) -> range:
    """Return the words of this rank: `numpy.array_split`'s part, so that no vocabulary needs padding."""
    counts = cut(vocabulary, comm.size)
    start = sum(counts[: comm.rank])
    return range(start, start + counts[comm.rank])


def check_ids(ids: Tensor, vocabulary: int) -> None:
    """Raise IndexError unless all ids are in the vocabulary. Split over ranks, a stray one would be nobody's: zero."""
    if ids.device.type == "cpu" and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise IndexError(
            f"token ids from {int(ids.min())} to {int(ids.max())} for a vocabulary of {vocabulary}: they must lie in "
            f"0 to {vocabulary - 1}"
        )
