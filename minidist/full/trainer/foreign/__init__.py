"""What other programs read and write: `llama.py` Hugging Face's weights, as `llama_names.py` says;
`peft.py` adapters.

`options.py` translates the options of DeepSpeed and Megatron by the table in `names.py`.
"""

from minidist.full.trainer.foreign.llama import load_llama, save_llama

__all__ = ["load_llama", "save_llama"]
