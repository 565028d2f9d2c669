"""The MLP of a block, and the sizes of a model as the book reads them."""

from dataclasses import fields

from torch import Tensor

from minidist import model as book
from minidist.full.model.config import GPTConfig
from minidist.full.model.dropout import ORIGIN, Where


class MLP(book.MLP):
    """The book's MLP, called as a mixture of experts is, which takes its place."""

    def forward(self, x: Tensor, where: Where = ORIGIN) -> Tensor:
        """Map every position of `x` [B, T, D] separately, wherever it is."""
        return super().forward(x)


def sizes(config: GPTConfig, **others: int) -> book.GPTConfig:
    """Return what the book's modules read of a configuration, with some `others`."""
    read = {field.name: getattr(config, field.name) for field in fields(book.GPTConfig)}
    return book.GPTConfig(**(read | others))
