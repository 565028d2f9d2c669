"""What other programs read and write: `llama.py` Hugging Face's weights, `megatron.py` and `deepspeed.py` options.
`peft.py` writes adapters alone.

`names.py` is the table of both programs' names, `options.py` its engine.
"""

from minidist.trainer.foreign.llama import load_llama, save_llama

__all__ = ["load_llama", "save_llama"]
