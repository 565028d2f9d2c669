# task 5: sends with comm.send: under 1F1B two neighbours send to each other, and both wait. (GPipe hides it.)
import torch
from solution import *  # noqa: F403


def run_step(words, stage, loss, inputs, targets, comm):
    last, entered, left, total = comm.rank == comm.size - 1, {}, {}, 0.0
    for word in words:
        m = int(word[1:])
        if word[0] == "F":
            x = entered[m] = inputs[m] if comm.rank == 0 else torch.empty_like(inputs[m])
            if comm.rank > 0:
                comm.recv(x, comm.rank - 1, tag=m)
                x.requires_grad_()
            left[m] = loss(stage(x), targets[m]) / len(inputs) if last else stage(x)
            total += left[m].item() if last else 0.0
            if not last:
                comm.send(left[m].detach(), comm.rank + 1, tag=m)
        else:
            gradient = torch.ones_like(left[m])
            if not last:
                comm.recv(gradient, comm.rank + 1, tag=m)
            left.pop(m).backward(gradient)
            if comm.rank > 0:
                comm.send(entered.pop(m).grad, comm.rank - 1, tag=m)
    return total
