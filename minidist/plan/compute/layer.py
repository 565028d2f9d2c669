"""How long a layer computes: its products, its attention, its experts and what is element-wise.

`layer` times one layer and one microbatch in both directions, `head` the logits and the loss.
"""

from dataclasses import dataclass
from functools import cache

from minidist.plan.compute.attention import attention
from minidist.plan.compute.products import Share
from minidist.plan.model import Product

ACCUMULATED = 8  # bytes for an element of a gradient that is added to one in 32 bits
CAST = 4  # bytes that a cast to 8 bits moves for an element: it is read, and written twice, for two products


@dataclass(frozen=True)
class Layer:
    """Seconds of one layer and one microbatch: forward and backward without attention's scores, and
    those scores.

    `products` are all products forward, `last` the last of them. `parts` are what is cheap: norms, the
    activation, and what latent channels make.
    """

    forward: float
    backward: float
    attention: float
    attention_back: float
    products: float
    last: float
    parts: float


@cache
def layer(share: Share) -> Layer:
    """Return the seconds of a layer by kind of work.

    Its backward has two products for each of the forward.
    """
    model, tokens, tp = share.model, share.tokens, share.tp
    forward, back = [], []
    cast = cast_back = 0.0
    for p in model.products(tokens, tp):
        forward.append(share.product(p, precision=share.precision))
        back.append(share.product(of_input(p), precision=share.precision))
        back.append(share.product(of_weights(p), precision=share.precision))
        cast += p.m * p.k
        cast_back += p.m * p.n
    routed, groups = model.routed(tokens, tp, share.ep)
    for p in routed:
        forward.append(share.grouped(p, groups, share.precision, share.width))
        back.append(share.grouped(of_input(p), groups, share.precision, share.width))
        back.append(share.grouped(of_weights(p), groups, share.precision, ACCUMULATED))
        cast += groups * p.m * p.k
        cast_back += groups * p.m * p.n
    # what is element-wise, counted for fused kernels and 16 bits
    scale = share.passes * share.width / 2
    aside = aside_back = 0.0
    for each in model.elements(tokens, tp, share.sp):
        aside += share.streamed(scale * each.forward)
        aside_back += share.streamed(scale * each.backward)
    cheap = sum(share.streamed(scale * each) for each in model.cheap(tokens, tp, share.sp))
    if model.latent:  # of what is multiplied, queries, and keys with values
        cheap += sum(forward[1:3])
    if groups:
        rows = groups * routed[0].m
        moved = share.width * rows * (model.hidden + 2 * model.ffn)
        aside += share.streamed(share.routing * moved)
        aside_back += share.streamed(2 * share.routing * moved)
    if share.precision != "bf16":
        aside += share.streamed(CAST * cast)
        aside_back += share.streamed(CAST * cast_back)
    return Layer(
        forward=sum(forward) + aside,
        backward=sum(back) + aside_back,
        attention=attention(share, back=False),
        attention_back=attention(share, back=True),
        products=sum(forward),
        last=forward[-1],
        parts=cheap,
    )


def of_input(p: Product) -> Product:
    """Return the product that gives the gradient of a product's input."""
    return Product(p.m, p.k, p.n)


def of_weights(p: Product) -> Product:
    """Return the product that gives the gradient of a product's weights."""
    return Product(p.k, p.n, p.m)


@cache
def head(share: Share, loss_bytes: tuple[int, int]) -> float:
    """Return the seconds of logits and loss, forward and backward: three products, and bytes for
    each logit.
    """
    columns = -(-share.model.vocabulary // share.tp // 64) * 64
    seconds = sum(share.streamed(each * share.tokens * columns) for each in loss_bytes)
    return seconds + 3 * share.product(Product(share.tokens, columns, share.model.hidden))
