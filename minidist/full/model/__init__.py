"""The serial models: what every strategy must reproduce.

Read `config` for the sizes, `gpt` for the model with `mlp`, then `attention` and `dropout`; `seen`
says which keys a query sees with a window or documents, and `sample` generates text. With experts,
what is in `moe/` takes the place of each MLP: it sends each token to some of many.

All but `config` need torch, so the names that are exported stand in `exports`, which is imported
when one of them is asked for.
"""

from typing import TYPE_CHECKING

from minidist.full.model.config import GPTConfig as GPTConfig

if TYPE_CHECKING:
    from minidist.full.model.exports import *
else:
    from importlib import import_module

    def __getattr__(name):
        return getattr(import_module("minidist.full.model.exports"), name)
