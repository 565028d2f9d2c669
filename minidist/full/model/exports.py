"""What `minidist.full.model` exports."""

from minidist.full.model.config import GPTConfig
from minidist.full.model.dropout import Dropout, Where
from minidist.full.model.gpt import GPT, cross_entropy_sum
from minidist.full.model.sample import generate

__all__ = ["GPT", "Dropout", "GPTConfig", "Where", "cross_entropy_sum", "generate"]
