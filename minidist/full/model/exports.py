"""What `minidist.full.model` exports."""

from minidist.full.model.config import GPTConfig
from minidist.full.model.dropout import Dropout, Where
from minidist.full.model.gpt import GPT
from minidist.full.model.sample import generate
from minidist.model import cross_entropy_sum

__all__ = ["GPT", "Dropout", "GPTConfig", "Where", "cross_entropy_sum", "generate"]
