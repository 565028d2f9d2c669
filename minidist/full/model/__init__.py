"""The serial models: what every strategy must reproduce.

    the book              here
    GPTConfig             `GPTConfig` (`config.py`)
    GPT                   `GPT` (`gpt.py`), with dropout, windows, documents and experts
    causal_attention      `causal_attention` (`attention.py`): by the fastest kernel there is
    rotary_table          `rotary_table`, for any positions
    cross_entropy_sum     `cross_entropy_sum`, which ignores some targets

Read `minidist/model.py` first, then `config` for the sizes, `gpt` for the model with `mlp`,
`attention` and `dropout`; `seen` says which keys a query sees with a window or documents, and
`sample` generates text. With experts, what is in `moe/` takes the place of each MLP: it sends each
token to some of many.

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
