"""Files of models as they are published: the parameters that are counted of them are the published
ones, and what a size alone does not say is read, or refused.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from minidist.full.trainer.config import ModelOptions
from minidist.plan.device import PlanError
from minidist.plan.model import Model, model

FALCON: dict[str, Any] = {
    "model_type": "falcon", "vocab_size": 65024, "multi_query": True, "parallel_attn": True
}  # fmt: skip
QWEN: dict[str, Any] = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
    "sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 20,
}  # fmt: skip
PUBLISHED: tuple[tuple[float, dict[str, Any]], ...] = (  # billions of parameters, and config.json
    (6.922, FALCON | {"hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32,
                      "new_decoder_architecture": False}),
    (41.303, FALCON | {"hidden_size": 8192, "num_attention_heads": 128, "num_hidden_layers": 60, "num_kv_heads": 8,
                       "new_decoder_architecture": True}),
    (6.649, {"model_type": "mpt", "d_model": 4096, "n_layers": 32, "n_heads": 32, "expansion_ratio": 4,
             "vocab_size": 50432, "attn_config": {"alibi": True}}),
    (176.247, {"model_type": "bloom", "n_embed": 14336, "n_layer": 70, "num_attention_heads": 112,
               "n_inner": None, "vocab_size": 250880, "hidden_dropout": 0.0}),
    (20.554, {"model_type": "gpt_neox", "hidden_size": 6144, "intermediate_size": 24576, "num_hidden_layers": 44,
              "num_attention_heads": 64, "vocab_size": 50432, "use_parallel_residual": True}),
    (6.051, {"model_type": "gptj", "n_embd": 4096, "n_head": 16, "n_layer": 28, "n_inner": None,
             "vocab_size": 50400}),
    (15.706, {"model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944, "head_dim": 64,
              "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16, "vocab_size": 102400,
              "num_key_value_heads": 16, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
              "first_k_dense_replace": 1, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128,
              "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_layer_freq": 1, "tie_word_embeddings": False}),
    (7.616, QWEN),
)  # fmt: skip


def read(folder: Path, said: dict[str, Any]) -> Model:
    path = folder / "config.json"
    path.write_text(json.dumps(said))
    return model(str(path))


@pytest.mark.parametrize(("billions", "said"), PUBLISHED)
def test_a_published_config_has_its_parameters(
    billions: float, said: dict[str, Any], tmp_path: Path
) -> None:
    found = read(tmp_path, said)
    assert found.parameters / 1e9 == pytest.approx(billions, rel=1e-3)
    # attention and MLP of these read the same norm
    assert found.parallel == (said["model_type"] in ("falcon", "gpt_neox", "gptj"))


def test_heads_of_falcon(tmp_path: Path) -> None:
    """All share one key in the first architecture, and `num_kv_heads` counts in the second."""
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "num_hidden_layers": 2, "num_kv_heads": 4}  # fmt: skip
    first = read(tmp_path, FALCON | sizes)
    second = read(tmp_path, FALCON | sizes | {"new_decoder_architecture": True})
    every = read(tmp_path, FALCON | sizes | {"multi_query": False, "parallel_attn": False})
    assert (first.kv, second.kv, every.kv) == (1, 4, 8)
    assert first.parallel and second.parallel and not every.parallel


def test_the_first_layers_of_a_qwen_have_no_window(tmp_path: Path) -> None:
    windows = [
        (each.window, each.unwindowed)
        for change in ({}, {"max_window_layers": 28}, {"use_sliding_window": False})
        for each in [read(tmp_path, QWEN | change)]
    ]
    assert windows == [(4096, 20), (0, 0), (0, 0)]


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"decoder_sparse_step": 2}, "has decoder_sparse_step, which no plan is made for"),
        ({"word_embed_proj_dim": 512}, "has word_embed_proj_dim, which no plan is made for"),
        ({"layer_types": ["full_attention"] * 3}, "has 3 layer_types for 28 layers: give one for"),
        (
            {"model_type": "mistral3", "text_config": {"model_type": "mistral"}},
            "the text_config may be one if it is in a file of its own",
        ),
    ),
)
def test_layers_that_differ_are_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match=message):
        read(tmp_path, QWEN | change)


@pytest.mark.parametrize(
    "said",
    (
        {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}},
        {"model_type": "qwen3_next", "layer_types": ["linear_attention"] * 28},
    ),
)
def test_advice_for_a_kind_that_is_not_planned_does_not_lead_to_the_next_refusal(
    said: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match=r"no plan is made for: there are plans for .*, mpt$"):
        read(tmp_path, QWEN | said)


def test_an_unknown_key_of_a_toml_is_refused(tmp_path: Path) -> None:
    """It would be left unread, and a window that is misspelt would be none."""
    path = tmp_path / "mine.toml"
    sizes = "layers = 4\nhidden = 256\nheads = 4\nvocabulary = 1000\n"
    written = asdict(ModelOptions(attention_window=32)) | {"vocabulary": 1000}
    path.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in written.items()))
    assert model(str(path)).window == 32  # all that `train` writes is read
    path.write_text(f"{sizes}attention-window = 64\n")
    with pytest.raises(PlanError, match="unknown key attention-window: did you mean attention_win"):
        model(str(path))
    path.write_text(f"{sizes}experts = 4\ntop_k = 2\nffn = 64\ndense_layers = 1\ndense_ffn = 512\n")
    assert (model(str(path)).ffn, model(str(path)).dense_ffn) == (64, 512)
    path.write_text(f"{sizes}windwo = 64\n")
    with pytest.raises(PlanError, match="has an unknown key windwo: did you mean window"):
        model(str(path))
