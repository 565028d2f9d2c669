"""What `minidist.model` exports."""

from minidist.model.config import GPTConfig
from minidist.model.dropout import Dropout, Where
from minidist.model.gpt import GPT, cross_entropy_sum
from minidist.model.sample import generate

__all__ = ["GPT", "Dropout", "GPTConfig", "Where", "cross_entropy_sum", "generate"]
