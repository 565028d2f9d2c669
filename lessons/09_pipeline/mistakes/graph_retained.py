# task 5: backward(retain_graph=True), and every output kept to the end: what autograd saved is never freed.
import torch
from solution import *  # noqa: F403


def run_step(words, stage, loss, inputs, targets, comm):
    last, entered, left, sending = comm.rank == comm.size - 1, {}, {}, []
    for word in words:
        m = int(word[1:])
        if word[0] == "F":
            x = entered[m] = inputs[m] if comm.rank == 0 else torch.empty_like(inputs[m])
            if comm.rank > 0:
                comm.recv(x, comm.rank - 1, tag=m)
                x.requires_grad_()
            left[m] = loss(stage(x), targets[m]) / len(inputs) if last else stage(x)
            if not last:
                sending.append(comm.isend(left[m].detach(), comm.rank + 1, tag=m))
        else:
            gradient = torch.ones_like(left[m])
            if not last:
                comm.recv(gradient, comm.rank + 1, tag=m)
            left[m].backward(gradient, retain_graph=True)
            if comm.rank > 0:
                sending.append(comm.isend(entered[m].grad, comm.rank - 1, tag=m))
    for request in sending:
        request.wait()
    return sum(loss.item() for loss in left.values()) if last else 0.0
