"""What is called how in Hugging Face's Llama, in Mistral, which is a Llama with a window, and in
Mixtral.

ours                               theirs
embedding                          model.embed_tokens
layers.0.attention_norm            model.layers.0.input_layernorm
layers.0.attention.query           model.layers.0.self_attn.q_proj
layers.0.mlp.gate                  model.layers.0.mlp.gate_proj
layers.0.mlp.routed.router         model.layers.0.block_sparse_moe.gate
layers.0.mlp.routed.experts.gate   model.layers.0.block_sparse_moe.experts.N.w1      each expert N by itself
head                               lm_head                               absent where tied

All names are in `llama.toml`.
"""

import tomllib
from pathlib import Path
from typing import Any

from minidist.full.model.config import GPTConfig

TABLES = tomllib.loads(Path(__file__).with_name("llama.toml").read_text(encoding="utf-8"))
SIZES, WINDOW, EXPERT_SIZES = TABLES["sizes"], TABLES["window"], TABLES["expert_sizes"]
NULL, LLAMA_NAMES, STACKS = TABLES["null"], TABLES["parameters"], TABLES["stacks"]
FIXED: dict[str, dict[str, Any]] = {  # by model_type, for this GPT
    "llama": {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    "mistral": {"hidden_act": "silu"},
    "mixtral": {"hidden_act": "silu"},
}


def check_known(config: GPTConfig) -> None:
    """Raise ValueError if a model has experts such as Mixtral does not know."""
    unknown = ["shared_experts", "capacity", "scores", "raw_weights"]
    if config.balance == "bias":  # it selects experts; other ways do not
        unknown.append("balance")
    for name in unknown:
        if (value := getattr(config, name)) != getattr(GPTConfig, name):
            raise ValueError(
                f"Mixtral has no {name}={value!r}: such a model cannot be written as one"
            )


def sizes_of(kind: str) -> dict[str, str]:
    """Return the sizes in a model's configuration, ours to theirs, by its model_type."""
    sizes: dict[str, str] = SIZES | (EXPERT_SIZES if kind == "mixtral" else {})
    return sizes if kind == "llama" else sizes | WINDOW


def left_out_of(kind: str) -> dict[str, Any]:
    """Return what a configuration of some model_type means that does not say it, by our names."""
    means: dict[str, Any] = TABLES["left_out"] | TABLES.get(f"left_out_of_{kind}", {})
    return means


def kind_of(config: GPTConfig) -> str:
    """Return the model_type that a model has there."""
    if config.experts:
        return "mixtral"
    return "mistral" if config.attention_window else "llama"


def llama_name(name: str) -> str:
    """Translate the name of a parameter, `layers.3.mlp.up.weight` to
    `model.layers.3.mlp.up_proj.weight`.
    """
    module = name.removesuffix(".weight")
    if not module.startswith("layers."):
        return f"{LLAMA_NAMES[module]}.weight"
    _, index, part = module.split(".", maxsplit=2)
    return f"model.layers.{index}.{LLAMA_NAMES[part]}.weight"


def is_stack(name: str) -> bool:
    """Tell whether a parameter is a stack of experts' matrices, of which Mixtral keeps each by
    itself.
    """
    return ".experts." in name


def their_names(name: str, config: GPTConfig) -> list[str]:
    """Return the names of the tensors that hold a parameter: one, or one for each expert."""
    if not is_stack(name):
        return [llama_name(name)]
    layer, _, stack = name.partition(".experts.")
    block = llama_name(layer).removesuffix(".weight")
    return [f"{block}.experts.{number}.{STACKS[stack]}.weight" for number in range(config.experts)]
