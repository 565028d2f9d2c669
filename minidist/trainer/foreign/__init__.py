"""What other programs read and write: `llama.py` Hugging Face's weights, `megatron.py` and `deepspeed.py` options.

`options.py` is the engine of the tables in the last two.
"""

from minidist.trainer.foreign.llama import load_llama, save_llama

__all__ = ["load_llama", "save_llama"]
