"""The blocks of a model: the modules that are cut into stages, recomputed, and compiled."""

from torch import nn


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules in a model's list `layers`; none if it has no such list."""
    layers = getattr(model, "layers", None)
    return list(layers.children()) if isinstance(layers, nn.ModuleList) else []
