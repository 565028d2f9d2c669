# task 2: multiplies before it sorts back, with weights by token on rows by expert.
import torch
from solution import *  # noqa: F403

from minidist.full.adjoint import all_to_all as exchange
from minidist.full.collectives import all_to_all


def dispatch(x, choice, weights, experts, held, comm):
    k, ranks, wanted = choice.shape[1], comm.size, choice.flatten()
    order = wanted.argsort(stable=True)
    counts = wanted.bincount(minlength=held * ranks).view(ranks, held)
    coming = all_to_all(counts, comm)
    sent, came = counts.sum(1).tolist(), coming.sum(1).tolist()
    arrived = exchange(x[order // k], comm, sent, came)
    parts = zip(arrived.split(came), coming.tolist(), strict=True)
    made = torch.cat([experts(part, of_sender) for part, of_sender in parts])
    back = exchange(made, comm, came, sent)
    back = (back * weights.flatten()[:, None])[order.argsort()].view(len(x), k, x.shape[1])
    return back.sum(1)
