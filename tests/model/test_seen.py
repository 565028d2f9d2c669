"""Attention that sees a part of what is before it: windows and documents, beside the mask written
out.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minidist.full.layers.compiled import as_they_were, compile_blocks
from minidist.full.model import GPT, GPTConfig, Where, cross_entropy_sum, seen
from minidist.full.model.attention import SlidingWindow, causal_attention
from minidist.full.model.config import attended_pairs
from minidist.full.model.seen import among, beginnings, causal, first_seen
from minidist.full.recompute import recompute
from minidist.full.trainer.foreign import load_llama, save_llama
from minidist.full.trainer.foreign.llama import read_llama_config, write_llama

CONFIG = GPTConfig(
    vocabulary=37,
    layers=2,
    hidden=32,
    heads=4,
    key_value_heads=2,
    intermediate=48,
    sequence=300,
    attention_window=5,
)


def drawn(time: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return query, key and value with shared heads."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, time, 8) for heads in (4, 2, 2)]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in shapes
    ]


def masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


def explicit(time: int, window: int = 0, documents: Tensor | None = None) -> Tensor:
    """Return the mask written out: [T, T], or [B, 1, T, T] with documents."""
    places = torch.arange(time)
    mask = places <= places[:, None]
    if window:
        mask = mask & (places[:, None] - places < window)
    if documents is not None:
        mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
    return mask


def packed(*cuts: list[int]) -> Tensor:
    return torch.stack([beginnings(torch.tensor(cut)) for cut in cuts])


def same(found: Tensor, right: Tensor, leaves: list[Tensor]) -> None:
    """Compare outputs and gradients, to 1e-12."""
    weights = torch.randn(right.shape, generator=torch.Generator().manual_seed(1)).to(right.dtype)
    ours, theirs = (torch.autograd.grad((it * weights).sum(), leaves) for it in (found, right))
    for mine, other in zip((found, *ours), (right, *theirs), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", (1, 2, 5, 127, 128, 129, 299))
def test_a_window_is_softmax_with_its_mask(window: int) -> None:
    leaves = drawn(300)
    same(SlidingWindow(window)(*leaves), masked(*leaves, explicit(300, window)), leaves)


def test_a_window_as_wide_as_the_sequence_is_full_attention_bit_for_bit() -> None:
    leaves = drawn(300)
    for window in (300, 301, 10**9):
        assert torch.equal(SlidingWindow(window)(*leaves), causal_attention(*leaves))


@pytest.mark.parametrize("window", (0, 7))
def test_documents_are_softmax_with_their_mask(window: int) -> None:
    """Rows with other documents each; an empty one, and one of a single token."""
    leaves = drawn(300)
    documents = packed([0, 5, 5, 130, 300], [0, 299, 300])
    attend = SlidingWindow(window) if window else causal_attention
    right = masked(*leaves, explicit(300, window, documents))
    same(attend(*leaves, documents), right, leaves)


def test_what_no_query_of_a_band_sees_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of T² pairs: with a window less than T (W + 256), with documents those of whole bands."""
    pairs = []
    plain = F.scaled_dot_product_attention

    def counted(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        pairs.append(query.shape[2] * key.shape[2])
        return plain(query, key, value, **how)

    monkeypatch.setattr(seen.F, "scaled_dot_product_attention", counted)
    leaves = drawn(1024)
    SlidingWindow(64)(*leaves)
    assert sum(pairs) == 128 * 128 + 7 * 128 * 256 < 1024 * (64 + 256)
    pairs.clear()
    causal_attention(*leaves, packed([0, 256, 512, 1024], [0, 256, 640, 1024]))
    # a band sees what the row whose document is longer sees
    assert pairs == [128 * 128 * number for number in (1, 2, 1, 2, 3, 2, 3, 4)]


def test_backward_holds_one_mask_for_all_bands_of_a_window() -> None:
    leaves = drawn(2048, torch.float32)
    masks = set()

    def note(tensor: Tensor) -> Tensor:
        if tensor.shape[-2:] == (128, 256):
            masks.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        SlidingWindow(16)(*leaves)
    assert len(masks) == 1


@pytest.mark.parametrize("window", (0, 1, 3, 9, 10, 11))
def test_pairs_are_counted(window: int) -> None:
    places = torch.arange(10)
    found = among(first_seen(10, window), places, places)
    assert int((found.end - found.first).sum()) == attended_pairs(10, window)
    assert torch.equal(found.mask(slice(0, 10), slice(0, 10))[0], explicit(10, window))
    if window == 0:
        assert torch.equal(found.end, causal(10).end) and torch.equal(found.first, causal(10).first)


def test_flops_count_a_window_as_the_longest_sequence_that_a_token_sees() -> None:
    full = replace(CONFIG, attention_window=0)
    assert CONFIG.flops_per_token(100) == full.flops_per_token(5)
    assert CONFIG.flops_per_token(3) == full.flops_per_token(3)
    assert full.flops_per_token() == full.flops_per_token(300)


@pytest.mark.parametrize("window", (-1, 2.0, "3"))
def test_a_window_that_is_no_number_of_tokens_is_refused(window: Any) -> None:
    with pytest.raises(
        ValueError, match=r"attention_window=.* is not a whole number of at least 0: give one"
    ):
        replace(CONFIG, attention_window=window)


@pytest.mark.parametrize("cut", ([0], [1, 3], [0, 3, 2], []))
def test_ends_of_documents_that_are_none_are_refused(cut: list[int]) -> None:
    with pytest.raises(ValueError, match=r"cu_seqlens=.* are no ends of documents: give 0, and "):
        beginnings(torch.tensor(cut, dtype=torch.int64))


# ---------------------------------------------------------------- in the model


def text(time: int) -> Tensor:
    return torch.randint(37, (2, time + 1), generator=torch.Generator().manual_seed(2))


def step(model: GPT, tokens: Tensor, where: Where) -> list[Tensor]:
    """Return the loss and all gradients."""
    model.zero_grad()
    loss = cross_entropy_sum(model(tokens[:, :-1], where), tokens[:, 1:])
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = [parameter.grad for parameter in model.parameters()]
    return [loss.detach(), *(gradient.clone() for gradient in gradients if gradient is not None)]


def test_a_token_depends_on_no_token_outside_its_window() -> None:
    """With two layers, it reaches as far as two windows."""
    model, tokens = GPT(CONFIG, dtype=torch.float64), text(40)[:, :40]
    other = tokens.clone()
    other[:, 20] = (other[:, 20] + 1) % 37
    differs = (model(tokens) != model(other)).any(-1).any(0).nonzero().flatten().tolist()
    assert differs == list(range(20, 20 + 2 * (5 - 1) + 1))


@pytest.mark.parametrize("policy", ("selective", "full", "every 2"))
@pytest.mark.parametrize("documents", (None, packed([0, 7, 40], [0, 40])), ids=("", "packed"))
def test_recomputation_changes_nothing(policy: str, documents: Tensor | None) -> None:
    model = GPT(replace(CONFIG, dropout=0.2), dtype=torch.float64)
    where = Where(seed=1, documents=documents)
    plain = step(model, text(40), where)
    recompute(model, policy)
    assert all(map(torch.equal, step(model, text(40), where), plain))


@pytest.mark.parametrize("documents", (None, packed([0, 7, 40], [0, 40])), ids=("", "packed"))
def test_compiled_blocks_compute_the_same(documents: Tensor | None) -> None:
    model = GPT(CONFIG, dtype=torch.float64)
    plain = step(model, text(40), Where(documents=documents))
    compile_blocks(model.layers, "aot_eager")
    for mine, right in zip(step(model, text(40), Where(documents=documents)), plain, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)
    as_they_were(model.layers)


def test_a_packed_row_is_its_documents_one_by_one() -> None:
    """Loss and gradients. Each document alone has its own positions; dropout goes by its place in
    the row, so that two documents draw other masks.
    """
    for window in (0, 4):
        config = replace(CONFIG, attention_window=window, dropout=0.3)
        model, tokens = GPT(config, dtype=torch.float64), text(40)
        cuts = [0, 9, 10, 33, 40]
        where = Where(seed=3, step=5, rows=7)
        whole = step(model, tokens[:1], replace(where, documents=packed(cuts)))
        totals = [torch.zeros_like(term) for term in whole]
        for begin, end in pairwise(cuts):
            # rotation depends on distances alone: these positions are for dropout
            alone = step(model, tokens[:1, begin : end + 1], replace(where, positions=begin))
            for total, term in zip(totals, alone, strict=True):
                total += term
        for mine, right in zip(whole, totals, strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)


def test_positions_begin_again_at_each_document() -> None:
    """Bit for bit: the second document's rotation is that of a row of its own."""
    where = Where(documents=packed([0, 3, 8]))
    assert where.in_document(torch.arange(8)).tolist() == [[[0, 1, 2, 0, 1, 2, 3, 4]]]
    model = GPT(CONFIG, dtype=torch.float64)
    given: list[Any] = []
    model.layers[0].register_forward_pre_hook(lambda _, inputs: given.append(inputs[1]))
    model(text(8)[:1, :8], where)
    model(text(8)[:1, 3:8])
    turned, alone = given
    for of_row, of_document in zip(turned, alone, strict=True):
        assert torch.equal(of_row[0, 0, 3:], of_document)


# ---------------------------------------------------------------- in Hugging Face's words


def test_mistral_computes_the_same_and_comes_back(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model, tokens = GPT(CONFIG, dtype=torch.float32), text(40)[:, :40]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    save_llama(model, tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    assert said["architectures"] == ["MistralForCausalLM"] and said["sliding_window"] == 5
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager"
    )
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, model(tokens), rtol=1e-4, atol=1e-5)
    assert load_llama(tmp_path).config == CONFIG
    theirs.save_pretrained(tmp_path / "theirs")
    assert load_llama(tmp_path / "theirs").config == CONFIG


@pytest.mark.parametrize("kind", ["llama", "mistral", "mixtral"])
def test_what_a_configuration_leaves_out_is_what_transformers_takes_it_for(
    kind: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 16,
    }
    experts = {"num_local_experts": 2, "num_experts_per_tok": 2} if kind == "mixtral" else {}
    said = {"model_type": kind, **sizes, **experts}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(said))
    theirs, ours = transformers.AutoConfig.from_pretrained(tmp_path), read_llama_config(tmp_path)
    assert ours.key_value_heads == theirs.num_key_value_heads
    assert ours.sequence == theirs.max_position_embeddings
    assert ours.norm_epsilon == theirs.rms_norm_eps
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.tied == theirs.tie_word_embeddings
    assert ours.attention_window == (getattr(theirs, "sliding_window", None) or 0)
    null = {"sliding_window": None, "num_key_value_heads": None}
    file.write_text(json.dumps(said | null))
    ours = read_llama_config(tmp_path)
    assert (ours.attention_window, ours.key_value_heads) == (0, 16)


def test_layers_of_a_mistral_are_all_of_the_kind_that_it_names(tmp_path: Path) -> None:
    """`AutoModel` makes a Ministral of it then, whose layers may differ in their windows."""
    transformers = pytest.importorskip("transformers")
    save_llama(GPT(CONFIG, dtype=torch.float32), tmp_path)
    file = tmp_path / "config.json"
    said, tokens = json.loads(file.read_text()), text(40)[:, :40]
    for name in ("sliding_attention", "full_attention"):
        file.write_text(json.dumps(said | {"layer_types": [name] * CONFIG.layers}))
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, attn_implementation="eager"
        )
        with torch.no_grad():
            ours = load_llama(tmp_path)(tokens)
            torch.testing.assert_close(theirs(tokens).logits, ours, rtol=1e-4, atol=1e-5)
    kinds = ["full_attention", *["sliding_attention"] * (CONFIG.layers - 1)]
    file.write_text(json.dumps(said | {"layer_types": kinds}))
    with pytest.raises(ValueError, match=r"layer_types=\['full_attention', 'sliding_attention'\]"):
        read_llama_config(tmp_path)


def test_a_mistral_trained_on_longer_sequences_still_reads_all_that_it_read_before(
    tmp_path: Path,
) -> None:
    """Its configuration may leave the longest sequence out, and then it is 131,072."""
    model = GPT(replace(CONFIG, sequence=4096))
    save_llama(model, tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    del said["max_position_embeddings"]
    weights = dict(model.named_parameters())
    write_llama(model.config, weights, tmp_path, said)
    assert "max_position_embeddings" not in json.loads((tmp_path / "config.json").read_text())
