# task 4: divides by the bare root of the mean square, which is far too small in the first steps.
from solution import *  # noqa: F403


def offloaded_step(parameters, slow, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
    used = [number for number, parameter in enumerate(parameters) if parameter.grad is not None]
    ahead = slow.fetch(used[0])
    for number, following in zip(used, [*used[1:], None], strict=True):
        state, ahead = ahead, slow.fetch(following) if following is not None else None
        parameter, gradient = parameters[number].data, parameters[number].grad
        state["step"] += 1
        state["exp_avg"].lerp_(gradient, 1 - betas[0])
        state["exp_avg_sq"].mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
        parameter.mul_(1 - lr * weight_decay)
        parameter.sub_(lr * state["exp_avg"] / (state["exp_avg_sq"].sqrt() + eps))
        slow.keep(number, state)
