"""What other programs read and write: `llama.py` Hugging Face's weights, as `llama_names.py` says;
`peft.py` adapters.

Of DeepSpeed's and Megatron's options, `names.py` is the table and `options.py` its engine.
"""

from minidist.trainer.foreign.llama import load_llama, save_llama

__all__ = ["load_llama", "save_llama"]
