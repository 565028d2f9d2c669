"""Write adapters as Hugging Face's PEFT reads them: `adapter_config.json` and
`adapter_model.safetensors`.

    ours                               theirs
    layers.0.attention.query.A         base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight    [r, inputs]
    layers.0.attention.query.B         base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight    [outputs, r]

The weights that they stand beside are in another folder, which the configuration names. Both
compute W + alpha/r BA.
"""

import json
from pathlib import Path

from safetensors.torch import save_file

from minidist.full.adapters import LoRALinear
from minidist.full.model import GPT
from minidist.full.trainer.foreign.llama_names import llama_name

ADAPTER_FILES = ("adapter_model.safetensors", "adapter_config.json")


def write_peft(model: GPT, base: str, folder: Path) -> None:
    """Write the adapters of a model, whose frozen weights the folder `base` has."""
    adapters = {
        name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)
    }
    theirs = {name: llama_name(f"{name}.weight").removesuffix(".weight") for name in adapters}
    tensors = {
        f"base_model.model.{theirs[name]}.lora_{half}.weight": getattr(adapter, half)
        .detach()
        .cpu()
        .contiguous()
        for name, adapter in adapters.items()
        for half in "AB"
    }
    first = next(iter(adapters.values()))
    rank = len(first.A)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": first.scale * rank,
        "lora_dropout": 0.0,
        "target_modules": sorted({name.rpartition(".")[2] for name in theirs.values()}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    weights, config = ADAPTER_FILES
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / weights, metadata={"format": "pt"})
    (folder / config).write_text(json.dumps(settings, indent=2) + "\n")
