"""Cross-entropy of logits that are split by vocabulary: no rank ever holds the full row of logits
of a token.

    rank r holds   logits [N, V/P] of its words     N = B T tokens
    1  the largest logit of each token                all_reduce max, N numbers     subtracted from all
    2  Σ exp(logit), and the target's logit or 0      all_reduce sum, 2N numbers
    3  loss = Σ over tokens of log(Σ) - target        the same on every rank

With V = 128,000 and N = 8,192 the logits take 4.2 GB in float32. Gathering them would move nearly
as much; this function moves 3N numbers. The sums are differentiable: `reduce_from` hands the
gradient to each rank's terms, so backward computes softmax minus one-hot for this rank's words, and
sends nothing.

Cost: in forward two all-reduces, of 4N and 8N bytes in float32; in backward none. Each rank holds N
V/P numbers twice: logits and their exponentials. (Shoeybi et al. 2019, section 3, "output
embedding".)
"""

import torch
from torch import Tensor

from minidist.full.adjoint import reduce_from
from minidist.full.collectives import all_reduce
from minidist.full.comm import Communicator
from minidist.full.ddp.sampler import share

IGNORED = -100  # the target of a token that does not count, as in torch


def vocabulary_parallel_cross_entropy_sum(
    logits: Tensor, targets: Tensor, comm: Communicator, vocabulary: int
) -> Tensor:
    """Return the sum of -log p(target) over tokens, in nats: what `cross_entropy_sum` returns for
    the whole logits.

    Parameters
    ----------
    logits : Tensor
        [..., V/P], of this rank's words: what a head that `ColumnParallel` has split returns.
    targets : Tensor
        Token ids of the whole vocabulary, int64 [...], the same on every rank. A token with -100
        does not count.
    comm : Communicator
        The ranks of the tensor axis.
    vocabulary : int
        V, the number of words.

    Returns
    -------
    Tensor
        A scalar, at least float32, the same on every rank. Call backward on all ranks: it is one
        loss, of which each rank has a copy.

    Raises
    ------
    ValueError
        If the logits are not this rank's part of such a vocabulary.
    IndexError
        If a target is not in the vocabulary. On a GPU this is not checked, because the check would
        have to wait for it.
    """
    mine = part_of(vocabulary, comm)
    if logits.shape[-1] != len(mine):
        fault = f"rank {comm.rank} of {comm.size} brings logits of {logits.shape[-1]} words"
        own = f"of a vocabulary of {vocabulary} it has {len(mine)}"
        raise ValueError(
            f"{fault}, but {own}: split the head with ColumnParallel(), and do not gather what it "
            "returns"
        )
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)  # [N, V/P]
    words = targets.flatten()  # [N]
    counts = words != IGNORED
    # masked, not selected: `meta` tensors need a known shape
    check_ids(words.masked_fill(~counts, 0), vocabulary)
    # [N]; any constant would do, this one keeps exp from overflowing
    largest = wide.detach().amax(-1)
    all_reduce(largest, comm, "max")
    shifted = wide - largest[:, None]  # [N, V/P]
    normalizer = shifted.exp().sum(-1)  # [N]
    here = (words >= mine.start) & (words < mine.stop)
    picked = shifted.gather(-1, (words - mine.start).masked_fill(~here, 0)[:, None])[:, 0]  # [N]
    total, target = reduce_from(torch.stack((normalizer, picked.masked_fill(~here, 0))), comm)
    return (total.log() - target).masked_fill(~counts, 0).sum()  # type: ignore[no-any-return]


def part_of(vocabulary: int, comm: Communicator) -> range:
    """Return the words of this rank, cut as by `numpy.array_split`: no vocabulary needs padding."""
    return range(vocabulary)[share(vocabulary, comm.size, comm.rank)]


def check_ids(ids: Tensor, vocabulary: int) -> None:
    """Raise IndexError unless all ids are in the vocabulary: a stray id would be no rank's, and its
    vector zero.
    """
    if (
        ids.device.type == "cpu"
        and ids.numel()
        and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary
    ):
        fault = (
            f"token ids from {int(ids.min())} to {int(ids.max())} for a vocabulary of {vocabulary}"
        )
        raise IndexError(f"{fault}: they must lie in 0 to {vocabulary - 1}")
