# task 2: pads what goes to each rank to the largest number of all: it sends rows that nobody chose.
import torch
from solution import *  # noqa: F403

from minidist.full.adjoint import all_to_all as exchange
from minidist.full.collectives import all_reduce, all_to_all


def dispatch(x, choice, weights, experts, held, comm):
    k, ranks, wanted = choice.shape[1], comm.size, choice.flatten()
    order = wanted.argsort(stable=True)
    counts = wanted.bincount(minlength=held * ranks).view(ranks, held)
    coming = all_to_all(counts, comm)
    sent, came = counts.sum(1).tolist(), coming.sum(1).tolist()
    most = len(x) * k if ranks == 1 else torch.tensor(max(sent))
    if ranks > 1:
        all_reduce(most, comm, "max")
    most = int(most)

    def padded(rows, counts):
        return torch.cat(
            [
                torch.cat((part, part.new_zeros(most - len(part), x.shape[1])))
                for part in rows.split(counts)
            ]
        )

    def cut(rows, counts):
        return torch.cat(
            [part[:count] for part, count in zip(rows.split(most), counts, strict=True)]
        )

    arrived = cut(exchange(padded(x[order // k], sent), comm, [most] * ranks, [most] * ranks), came)
    parts = zip(arrived.split(came), coming.tolist(), strict=True)
    made = torch.cat([experts(part, of_sender) for part, of_sender in parts])
    back = cut(exchange(padded(made, came), comm, [most] * ranks, [most] * ranks), sent)
    back = back[order.argsort()].view(len(x), k, x.shape[1])
    return (back * weights[..., None]).sum(1)
