# task 4: lets the weights decay after the update, so that the update decays, too.
import torch
from solution import *  # noqa: F403


@torch.no_grad()
def offloaded_step(parameters, slow, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
    numbers = [number for number, parameter in enumerate(parameters) if parameter.grad is not None]
    ahead = slow.fetch(numbers[0]) if numbers else {}
    for place, number in enumerate(numbers):
        state, w = ahead, parameters[number]
        if place + 1 < len(numbers):
            ahead = slow.fetch(numbers[place + 1])
        state["step"] += 1
        m, v, step = state["exp_avg"], state["exp_avg_sq"], int(state["step"])
        m.lerp_(w.grad, 1 - betas[0])
        v.mul_(betas[1]).addcmul_(w.grad, w.grad, value=1 - betas[1])
        w.sub_(lr * (m / (1 - betas[0] ** step)) / ((v / (1 - betas[1] ** step)).sqrt() + eps))
        w.mul_(1 - lr * weight_decay)
        slow.keep(number, state)
