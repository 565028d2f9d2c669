"""The serial models: what every strategy must reproduce.

Read `config` for the sizes, `gpt` for the model with `mlp`, then `attention` and `dropout`;
`generate` samples text. With experts, `moe` takes the place of each MLP: it routes tokens to what
is in `experts`.
"""

from minidist.model.config import GPTConfig
from minidist.model.dropout import Dropout, Where
from minidist.model.generate import generate
from minidist.model.gpt import GPT, cross_entropy_sum

__all__ = ["GPT", "Dropout", "GPTConfig", "Where", "cross_entropy_sum", "generate"]
