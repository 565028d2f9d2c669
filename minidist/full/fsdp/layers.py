"""What `plain.py` asks of its layers before it cuts them: that it can, and that all ranks' are
equal.
"""

from collections import Counter
from collections.abc import Sequence

from torch import nn

from minidist.full.comm import Communicator
from minidist.full.ddp.replicas import make_equal
from minidist.full.placement import any_experts


def start_equal(layers: Sequence[nn.Module], comm: Communicator, stage: int) -> None:
    """Check the layers, and overwrite all parameters by rank 0's; see `make_equal`. Collective.

    Raises
    ------
    ValueError
        If `PlainZeRO` cannot cut these layers into a shard each; nothing is sent then.
    """
    check_layers(layers, stage)
    make_equal(nn.ModuleList(layers), comm)


def check_layers(layers: Sequence[nn.Module], stage: int) -> None:
    """Raise ValueError if `PlainZeRO` cannot cut these layers into a shard each."""
    if stage not in (1, 2, 3):
        raise ValueError(f"stage={stage}: ZeRO has the stages 1, 2 and 3")
    users = Counter(parameter for layer in layers for parameter in set(layer.parameters()))
    if any_experts(users):
        raise ValueError(
            "ranks have shared out the experts of a layer, which PlainZeRO would cut over all "
            "ranks: use ZeRO1 or FSDP"
        )
    for number, layer in enumerate(layers):
        trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        if len({parameter.dtype for parameter in trained}) != 1 or any(
            users[parameter] > 1 for parameter in trained
        ):
            raise ValueError(
                f"layer {number}, a {type(layer).__name__}, has nothing to train, more than one "
                "dtype, or a parameter of another layer: join it with that or a neighbour in an "
                "nn.Sequential, or use FSDP"
            )
