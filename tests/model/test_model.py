"""The serial GPT: the same numbers as Hugging Face's Llama, and dropout that any layout can
slice.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from minidist import model as book
from minidist.full.model import GPT, GPTConfig, Where, cross_entropy_sum, generate
from minidist.full.model.dropout import Dropout, child, dropout_mask
from minidist.full.model.gpt import rotary_table
from minidist.full.trainer.foreign.llama import load_llama, read_llama_config, save_llama
from minidist.full.trainer.foreign.llama_names import llama_name

SMALL = GPTConfig(
    vocabulary=37,
    layers=2,
    hidden=32,
    heads=4,
    key_value_heads=2,
    intermediate=48,
    sequence=16,
    rope_theta=500.0,
)
TIED = dataclasses.replace(SMALL, tied=True)
DROPPING = dataclasses.replace(SMALL, dropout=0.3)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some_tokens(config: GPTConfig, batch: int = 3, time: int = 16) -> Tensor:
    return torch.randint(config.vocabulary, (batch, time), generator=seeded(9))


def rough_model(config: GPTConfig, dtype: torch.dtype = torch.float64) -> GPT:
    """A model whose weights are large and whose norms are not one, so that a mistake anywhere shows
    in the logits.
    """
    model = GPT(config, seeded(1), dtype=dtype)
    draws = seeded(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                torch.randn(parameter.shape, generator=draws, dtype=torch.float64)
                .mul_(0.2)
                .to(dtype)
            )
    return model


# ---- against Hugging Face ----


class ExactNorm(nn.Module):
    """Hugging Face's norm rounds to float32; this one is the formula, for comparing in float64."""

    def __init__(self, weight: nn.Parameter, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = weight, epsilon

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)


class ExactRotary(nn.Module):
    """Hugging Face's rotary table is a float32; this one is the formula, element by element."""

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        self.head_dim, self.theta = head_dim, theta

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        half = self.head_dim // 2
        angles = [
            [
                position * self.theta ** (-2 * (channel % half) / self.head_dim)
                for channel in range(self.head_dim)
            ]
            for position in position_ids[0].tolist()
        ]
        table = torch.tensor(angles, dtype=x.dtype)[None]
        return table.cos(), table.sin()


def hugging_face(config: GPTConfig) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocabulary,
            num_hidden_layers=config.layers,
            hidden_size=config.hidden,
            num_attention_heads=config.heads,
            num_key_value_heads=config.key_value_heads,
            intermediate_size=config.intermediate,
            max_position_embeddings=config.sequence,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            rms_norm_eps=config.norm_epsilon,
            tie_word_embeddings=config.tied,
            initializer_range=0.2,
        )
    ).eval()


def with_exact_parts(theirs: Any, config: GPTConfig) -> Any:
    theirs = theirs.double()
    theirs.model.rotary_emb = ExactRotary(config.head_dim, config.rope_theta)
    for name, module in list(theirs.named_modules()):
        if name.endswith("norm"):
            theirs.set_submodule(name, ExactNorm(module.weight, config.norm_epsilon))
    return theirs


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("key_value_heads", [1, 2, 4])
def test_logits_and_gradients_equal_hugging_face_in_float64(
    tied: bool, key_value_heads: int
) -> None:
    config = dataclasses.replace(SMALL, tied=tied, key_value_heads=key_value_heads)
    ours, theirs = rough_model(config), with_exact_parts(hugging_face(config), config)
    weights = {llama_name(name): parameter for name, parameter in ours.named_parameters()}
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(weights.pop(name))
    assert not weights
    tokens = some_tokens(config)
    our_logits, their_logits = ours(tokens), theirs(tokens).logits
    torch.testing.assert_close(our_logits, their_logits, rtol=1e-12, atol=1e-12)
    cross_entropy_sum(our_logits[:, :-1], tokens[:, 1:]).backward()
    cross_entropy_sum(their_logits[:, :-1], tokens[:, 1:]).backward()
    gradients = {llama_name(name): parameter.grad for name, parameter in ours.named_parameters()}
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("config", [SMALL, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "index"])
def test_reads_what_hugging_face_saves(tmp_path: Path, config: GPTConfig, sharded: bool) -> None:
    theirs = hugging_face(config)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB" if sharded else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == sharded
    ours = load_llama(tmp_path)
    assert ours.config == config
    tokens = some_tokens(config)
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("config", [SMALL, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hugging_face_reads_what_we_save(
    tmp_path: Path, config: GPTConfig, dtype: torch.dtype
) -> None:
    transformers = pytest.importorskip("transformers")
    ours = rough_model(config, dtype)
    save_llama(ours, tmp_path / "new")
    theirs, report = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "new", output_loading_info=True
    )
    assert theirs.dtype == dtype
    assert not any(report.values())
    tokens = some_tokens(config)
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=tolerance, atol=tolerance)


# ---- the checkpoint format ----


def test_configurations_of_older_versions_are_read(tmp_path: Path) -> None:
    save_llama(GPT(SMALL), tmp_path)
    edit_config(
        tmp_path, rope_parameters=None, rope_scaling=None, num_key_value_heads=None, head_dim=None
    )
    assert read_llama_config(tmp_path) == dataclasses.replace(SMALL, key_value_heads=4)
    for beside in (None, {"rope_type": "default", "rope_theta": 10_000.0}):
        edit_config(
            tmp_path, rope_parameters=beside, rope_scaling={"type": "linear", "factor": 2.0}
        )
        with pytest.raises(ValueError, match="rope_type='linear'"):
            read_llama_config(tmp_path)


@pytest.mark.parametrize("config", [SMALL, TIED], ids=["untied", "tied"])
def test_saving_and_loading_changes_nothing(tmp_path: Path, config: GPTConfig) -> None:
    model = rough_model(config)
    save_llama(model, tmp_path)
    loaded = load_llama(tmp_path)
    assert loaded.config == config
    assert [name for name, _ in loaded.named_parameters()] == [
        name for name, _ in model.named_parameters()
    ]
    for ours, again in zip(model.parameters(), loaded.parameters(), strict=True):
        assert again.requires_grad and torch.equal(ours, again)
    assert load_llama(tmp_path, dtype=torch.bfloat16).embedding.weight.dtype == torch.bfloat16
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_a_loaded_model_can_be_saved_over_its_own_files(tmp_path: Path) -> None:
    save_llama(rough_model(SMALL), tmp_path)
    loaded = load_llama(tmp_path)
    before = loaded.head.weight.detach().clone()
    save_llama(GPT(dataclasses.replace(SMALL, layers=1)), tmp_path)
    assert torch.equal(loaded.head.weight, before)
    save_llama(loaded, tmp_path)
    assert torch.equal(load_llama(tmp_path).head.weight, before)


def test_a_loaded_model_does_not_follow_changes_of_the_file(tmp_path: Path) -> None:
    save_llama(rough_model(SMALL), tmp_path)
    loaded = load_llama(tmp_path)
    before = [parameter.detach().clone() for parameter in loaded.parameters()]
    file = tmp_path / "model.safetensors"
    size = file.stat().st_size
    # in place, as a copy tool would: weights still mapped to the file would change
    with file.open("r+b") as opened:
        opened.write(bytes(size))
    assert all(map(torch.equal, before, loaded.parameters()))


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(directory: Path, **changes: Tensor | None) -> None:
    weights: dict[str, Tensor | None] = dict(load_file(directory / "model.safetensors"))
    weights |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
    kept = {name: tensor.clone() for name, tensor in weights.items() if tensor is not None}
    save_file(kept, directory / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda d: edit_weights(d, model__norm__weight=None),
            r"model\.norm\.weight is missing, not \(32,\)",
        ),
        (lambda d: edit_weights(d, extra=torch.ones(1)), r"extra is \(1,\), not left out"),
        (
            lambda d: edit_weights(d, lm_head__weight=torch.ones(9, 32)),
            r"lm_head\.weight is \(9, 32\), not \(37, 32\)",
        ),
        (
            lambda d: edit_weights(d, lm_head__weight=torch.ones(37, 32, dtype=torch.int8)),
            "as I8.*unquantised",
        ),
        (
            lambda d: edit_config(d, num_hidden_layers=9),
            r"is missing, not .*and 60 more\).*same model",
        ),
        (lambda d: edit_config(d, num_attention_heads=5), "hidden=32 does not divide by heads=5"),
        (lambda d: edit_config(d, model_type="gemma"), "model_type='gemma'.*'llama'"),
        (lambda d: edit_config(d, head_dim=16), "head_dim=16.*only do 8"),
        (lambda d: edit_config(d, head_dim=0), "head_dim=0.*only do 8"),
        (lambda d: edit_config(d, intermediate_size=0), "intermediate_size = 0, .* at least 1"),
        (lambda d: edit_config(d, num_key_value_heads=0), "_heads = 0, which must be at least 1"),
        (lambda d: edit_config(d, rope_parameters={"rope_type": "yarn"}), "rope_type='yarn'"),
        (lambda d: edit_config(d, mlp_bias=True), "mlp_bias=True"),
        (lambda d: edit_config(d, vocab_size=None), "does not say vocab_size"),
        (
            lambda d: (d / "config.json").write_text('{"model_type": "llama"}'),
            "does not say vocab_size",
        ),
        (lambda d: (d / "config.json").write_text("{"), "config.json is not JSON"),
        (lambda d: (d / "config.json").write_text("[]"), "must be a section"),
        (lambda d: (d / "config.json").unlink(), "config.json cannot be read: No such file"),
        (lambda d: (d / "model.safetensors").unlink(), "neither model.safetensors nor"),
    ],
)
def test_a_wrong_checkpoint_is_refused_in_one_sentence(
    tmp_path: Path, change: Any, sentence: str
) -> None:
    save_llama(GPT(SMALL), tmp_path)
    change(tmp_path)
    with pytest.raises(ValueError, match=sentence) as refusal:
        load_llama(tmp_path)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 400 + len(str(tmp_path))


@pytest.mark.parametrize("kept", [0, 5, 1000, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, kept: int) -> None:
    save_llama(GPT(SMALL), tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read .*copy it again"):
        load_llama(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_llama(GPT(SMALL), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"lm_head.weight": "part-2.safetensors"}}'
    )
    with pytest.raises(ValueError, match=r"part-2\.safetensors cannot be read \(No such file"):
        load_llama(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="does not say weight_map"):
        load_llama(tmp_path)


def test_a_tied_head_that_is_saved_all_the_same_must_be_the_embedding(tmp_path: Path) -> None:
    """Version 5 of transformers would take another head, version 4 the embedding."""
    model = rough_model(TIED)
    save_llama(model, tmp_path)
    embedding = model.embedding.weight.detach()
    edit_weights(tmp_path, lm_head__weight=embedding.clone())
    assert torch.equal(load_llama(tmp_path).head.weight, embedding)
    edit_weights(tmp_path, lm_head__weight=embedding + 1)
    with pytest.raises(ValueError, match="tie_word_embeddings=true, and yet a lm_head"):
        load_llama(tmp_path)
    edit_config(tmp_path, tie_word_embeddings=False)
    assert torch.equal(load_llama(tmp_path).head.weight, embedding + 1)


def test_a_part_of_a_model_is_not_saved_as_a_whole(tmp_path: Path) -> None:
    model = GPT(SMALL)
    del model.layers[1]
    with pytest.raises(ValueError, match="the model to save holds other weights"):
        save_llama(model, tmp_path)


# ---- sizes ----


@pytest.mark.parametrize(
    "config", [SMALL, TIED, GPTConfig(), GPTConfig(hidden=96, heads=6, key_value_heads=2)]
)
def test_parameters_and_flops_are_counted(config: GPTConfig) -> None:
    model = GPT(config, device="meta")
    assert (
        sum(parameter.numel() for parameter in model.parameters()) == model.config.parameter_count
    )
    multiplied = sum(
        p.numel()
        for name, p in model.named_parameters()
        if config.tied or name != "embedding.weight"
    )
    assert config.flops_per_token(8) == 6 * multiplied + 12 * config.layers * config.hidden * 8
    assert config.flops_per_token() == config.flops_per_token(config.sequence)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"hidden": 100, "heads": 8}, "hidden=100 does not divide by heads=8: .*use hidden=104"),
        ({"hidden": 12, "heads": 4}, "heads of 3 channels, an odd number.*use hidden=16"),
        ({"heads": 4, "key_value_heads": 3}, "heads=4 does not divide by key_value_heads=3"),
        ({"layers": 0}, "layers=0 is not a whole number of at least 1"),
        ({"hidden": 64.0}, r"hidden=64\.0 is not a whole number"),
        ({"sequence": True}, "sequence=True is not a whole number"),
        ({"intermediate": -1}, "intermediate=-1 is not"),
        ({"dropout": 1.0}, r"dropout=1\.0 is not a probability"),
        ({"dropout": float("nan")}, "dropout=nan is not a probability"),
        ({"rope_theta": 0.0}, r"rope_theta=0\.0"),
        ({"norm_epsilon": 0.0}, r"norm_epsilon=0\.0"),
    ],
)
def test_a_wrong_size_is_refused_in_one_sentence(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        GPTConfig(**wrong)


def test_derived_sizes() -> None:
    config = GPTConfig(hidden=100, heads=2)
    assert (config.key_value_heads, config.intermediate, config.head_dim) == (2, 272, 50)
    assert GPTConfig(hidden=96, heads=2).intermediate == 256


def test_too_long_a_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="17 tokens in a row, but the model was made for 16"):
        GPT(SMALL)(some_tokens(SMALL, time=17))


@pytest.mark.parametrize("shape", [(), (5,), (1, 2, 5)])
def test_tokens_that_are_no_rows_are_refused(shape: tuple[int, ...]) -> None:
    words = re.escape(f"tokens are {list(shape)}, not rows of one length: give rows of tokens")
    with pytest.raises(ValueError, match=words):
        GPT(SMALL)(torch.zeros(shape, dtype=torch.int64))


# ---- weights ----


def test_a_seed_gives_the_same_weights_for_every_dtype_and_leaves_the_global_generator_alone() -> (
    None
):
    state = torch.random.get_rng_state()
    single = GPT(SMALL, seeded(5))
    for dtype in (torch.float64, torch.bfloat16):
        other = GPT(SMALL, seeded(5), dtype=dtype)
        for a, b in zip(single.parameters(), other.parameters(), strict=True):
            assert b.dtype == dtype and torch.equal(a.to(dtype), b)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not torch.equal(GPT(SMALL, seeded(6)).head.weight, single.head.weight)
    assert torch.equal(GPT(SMALL).head.weight, GPT(SMALL, seeded(0)).head.weight)


def test_a_model_on_the_meta_device_tells_the_weights_of_the_real_one() -> None:
    skeleton = GPT(TIED, device="meta")
    assert skeleton(some_tokens(TIED).to("meta")).shape == (3, 16, 37)
    drawn = dict(skeleton.initial_weights(seeded(5)))
    real = GPT(TIED, seeded(5))
    assert list(drawn) == [name for name, _ in real.named_parameters()]
    assert all(torch.equal(drawn[name], parameter) for name, parameter in real.named_parameters())
    skeleton.to_empty(device="cpu")
    skeleton.tie()
    skeleton.initialize(seeded(5))
    assert torch.equal(skeleton(some_tokens(TIED)), real(some_tokens(TIED)))


def test_initial_deviations() -> None:
    config = GPTConfig(layers=8, hidden=128)
    for name, weight in GPT(config, device="meta").initial_weights(seeded()):
        if weight.dim() == 1:
            assert (weight == 1).all()
        else:
            expected = 0.02 / 4 if name.endswith(("output.weight", "down.weight")) else 0.02
            assert float(weight.std()) == pytest.approx(expected, rel=0.03)


def test_the_loss_of_a_new_model_is_that_of_a_guess() -> None:
    tokens = some_tokens(SMALL)
    loss = cross_entropy_sum(GPT(SMALL)(tokens), tokens.flip(0))
    assert float(loss.detach()) / tokens.numel() == pytest.approx(math.log(37), rel=0.01)


# ---- the pieces ----


def test_norm_and_rotary_table_are_exact_in_float64_and_wide_in_bfloat16() -> None:
    x = torch.randn(5, 32, dtype=torch.float64, generator=seeded())
    norm = book.RMSNorm(book.GPTConfig(hidden=32)).double()
    expected = torch.stack(
        [row / math.sqrt(sum(v * v for v in row.tolist()) / 32 + 1e-5) for row in x]
    )
    torch.testing.assert_close(norm(x), expected, rtol=1e-14, atol=1e-14)
    large = torch.full((1, 32), 60_000.0, dtype=torch.float16)  # its square overflows float16
    assert norm.half()(large).tolist() == [[1.0] * 32]
    cosine, sine = rotary_table(torch.tensor([0, 123_456]), 8, 10_000.0, torch.float64)
    assert cosine[0].tolist() == [1.0] * 4 and sine[0].tolist() == [0.0] * 4
    assert sine[1].tolist() == pytest.approx(
        [math.sin(123_456 * 10_000 ** (-i / 4)) for i in range(4)], abs=1e-10
    )


def test_the_model_is_causal_and_depends_on_distances_only() -> None:
    model, tokens = rough_model(SMALL), some_tokens(SMALL)
    logits = model(tokens)
    changed = tokens.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % 37
    assert torch.equal(model(changed)[:, :10], logits[:, :10])
    assert not torch.allclose(model(changed)[:, 10:], logits[:, 10:])
    torch.testing.assert_close(model(tokens, Where(positions=1000)), logits, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        model(tokens, Where(positions=torch.arange(5, 21))), logits, rtol=1e-9, atol=1e-9
    )
    assert not torch.allclose(model(tokens, Where(positions=3 * torch.arange(16))), logits)


def test_an_empty_batch_is_a_batch() -> None:
    model = rough_model(DROPPING)
    logits = model(some_tokens(SMALL)[:0])
    assert logits.shape == (0, 16, 37)
    cross_entropy_sum(logits, some_tokens(SMALL)[:0]).backward()
    assert all(
        parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters()
    )


def test_the_loss_is_a_sum_in_at_least_float32() -> None:
    logits = torch.randn(2, 3, 7, generator=seeded(), dtype=torch.float64)
    targets = torch.tensor([[1, 2, 3], [4, -100, 6]])
    expected = -sum(
        float(logits[b, t].log_softmax(0)[target])
        for b, row in enumerate(targets.tolist())
        for t, target in enumerate(row)
        if target >= 0
    )
    assert float(cross_entropy_sum(logits, targets)) == pytest.approx(expected, rel=1e-14)
    rounded = logits.bfloat16()
    assert torch.equal(
        cross_entropy_sum(rounded, targets), cross_entropy_sum(rounded.float(), targets)
    )


# ---- dropout ----


def splitmix64(state: int) -> int:
    """One step of the published generator, in Python's own integers."""
    bits = (state + 0x9E3779B97F4A7C15) % 2**64
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB % 2**64
    return bits ^ (bits >> 31)


def test_bits_are_the_published_splitmix64() -> None:
    # the first number of the sequence with this seed
    assert splitmix64(1234567) == 6457827717110365317
    keys = torch.tensor([0, 1234567, -1, -(2**63), 2**63 - 1])
    for index in (0, 1, 1000):
        skipped = [(key + index * 0x9E3779B97F4A7C15) % 2**64 for key in keys.tolist()]
        assert [bits % 2**64 for bits in child(keys, torch.tensor(index)).tolist()] == list(
            map(splitmix64, skipped)
        )


def mask(
    where: Where,
    batch: int = 8,
    time: int = 16,
    site: int = 0,
    rate: float = 0.3,
    channels: int = 32,
) -> Tensor:
    return dropout_mask(torch.Size((batch, time, channels)), rate, site, where, torch.device("cpu"))


def test_a_slice_of_the_batch_gets_the_slice_of_the_serial_mask() -> None:
    whole = mask(Where(seed=7, step=3))
    assert torch.equal(mask(Where(7, 3, rows=5), batch=3), whole[5:])
    assert torch.equal(mask(Where(7, 3, positions=4), time=2), whole[:, 4:6])
    rows, positions = torch.tensor([6, 1]), torch.tensor([15, 0, 3])
    assert torch.equal(
        mask(Where(7, 3, rows, positions), batch=2, time=3), whole[rows][:, positions]
    )
    with pytest.raises(
        ValueError, match=r"Where\.rows has shape \(2,\), but the batch at hand has 3 rows"
    ):
        mask(Where(rows=rows), batch=3)


def test_masks_repeat_and_differ_in_everything_they_depend_on() -> None:
    here = Where(seed=1, step=1, rows=1, positions=1)
    base = mask(here)
    assert torch.equal(mask(here), base)
    others = [
        mask(dataclasses.replace(here, **{name: 2}))
        for name in ("seed", "step", "rows", "positions")
    ]
    for other in [*others, mask(here, site=1)]:
        # Independent masks agree where both drop or both keep: 0.3² + 0.7² = 0.58.
        assert float((other == base).float().mean()) == pytest.approx(0.58, abs=0.04)


@pytest.mark.parametrize("rate", [1e-3, 0.1, 0.5, 0.9])
def test_the_share_of_dropped_elements_is_the_rate_along_every_dim(rate: float) -> None:
    dropped = mask(Where(), batch=64, time=64, channels=64, rate=rate).double()
    deviation = math.sqrt(rate * (1 - rate))
    assert abs(float(dropped.mean()) - rate) < 4 * deviation / 512
    for dim in range(3):
        shares = dropped.transpose(0, dim).flatten(1).mean(1)  # 64 shares of 4096 elements each
        assert float((shares - rate).abs().max()) < 5 * deviation / 64
        neighbours = (dropped.narrow(dim, 0, 63) * dropped.narrow(dim, 1, 63)).mean()
        assert abs(float(neighbours) - rate**2) < 5 * rate / 500


def test_dropout_keeps_the_mean_and_does_nothing_in_evaluation_or_at_rate_zero() -> None:
    x = torch.full((8, 16, 32), 2.0, requires_grad=True)
    dropout = Dropout(0.5, site=0)
    y = dropout(x, Where())
    assert sorted(set(y.flatten().tolist())) == [0.0, 4.0]
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, y.detach() / 2)
    assert dropout.eval()(x, Where()) is x
    assert Dropout(0.0, site=0)(x, Where()) is x


def test_any_slice_of_the_batch_gives_the_serial_logits_and_gradients() -> None:
    model, tokens = rough_model(DROPPING), some_tokens(SMALL, batch=6)
    serial = model(tokens, Where(seed=3, step=11))
    cross_entropy_sum(serial, tokens).backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    for rows in (torch.tensor([0, 3]), torch.tensor([5, 1, 2]), torch.tensor([4])):
        part = model(tokens[rows], Where(seed=3, step=11, rows=rows))
        torch.testing.assert_close(part, serial[rows], rtol=1e-12, atol=1e-12)
        cross_entropy_sum(part, tokens[rows]).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-10, atol=1e-10)
    assert not torch.allclose(model(tokens, Where(seed=3, step=12)), serial)
    assert torch.equal(model.eval()(tokens, Where(step=12)), model(tokens))


def test_every_dropout_of_the_model_has_masks_of_its_own() -> None:
    sites = [
        module.site
        for module in GPT(DROPPING, device="meta").modules()
        if isinstance(module, Dropout)
    ]
    assert sites == [0, 1, 2, 3]


def test_recomputing_a_layer_needs_no_state() -> None:
    model, tokens = rough_model(DROPPING), some_tokens(SMALL)
    where = Where(seed=1, step=2, rows=3)
    x = model.embedding(tokens).detach()
    rotary = model.rotary(torch.arange(16), torch.float64)
    layer, gradients = model.layers[1], []
    for recompute in (False, True):
        leaf = x.clone().requires_grad_()
        if recompute:  # not restoring the generator: an ordinary dropout would draw another mask
            y = checkpoint(
                layer, leaf, rotary, where, use_reentrant=False, preserve_rng_state=False
            )
        else:
            y = layer(leaf, rotary, where)
        y.square().sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(gradients[0], gradients[1])


# ---- sampling ----


def test_generation_follows_the_generator_and_the_distribution() -> None:
    model, start = rough_model(SMALL), some_tokens(SMALL, batch=2, time=3)
    sampled = generate(model, start, 20, seeded(4))  # grows beyond the 16 positions of the model
    assert sampled.shape == (2, 23) and torch.equal(sampled[:, :3], start)
    assert torch.equal(generate(model, start, 20, seeded(4)), sampled)
    assert not torch.equal(generate(model, start, 20, seeded(5)), sampled)
    greedy = generate(model, start, 5, seeded(4), top_k=1)
    assert torch.equal(generate(model, start, 5, seeded(6), top_k=1), greedy)
    assert torch.equal(greedy[:, 3], model(start)[:, -1].argmax(-1))


def test_generation_samples_from_the_tempered_distribution() -> None:
    model, start = rough_model(SMALL), some_tokens(SMALL, batch=1, time=3)
    best = model(start)[0, -1].detach().topk(5)
    # the fifth is e² times less likely than the first
    temperature = float(best.values[0] - best.values[4]) / 2
    many = generate(model, start.expand(4000, 3), 1, seeded(), temperature, top_k=5)[:, -1]
    shares = torch.stack([(many == token).double().mean() for token in best.indices])
    torch.testing.assert_close(shares, (best.values / temperature).softmax(0), rtol=0, atol=0.03)


def test_generation_computes_without_dropout_and_restores_the_mode() -> None:
    model, start = rough_model(DROPPING), some_tokens(SMALL, batch=1, time=3)
    plain = rough_model(SMALL)
    assert torch.equal(generate(model, start, 5, seeded(1)), generate(plain, start, 5, seeded(1)))
    assert model.training
    with pytest.raises(ValueError, match=r"shape \(1, 0\)"):
        generate(model, start[:, :0], 1, seeded())
    with pytest.raises(ValueError, match="temperature=-1"):
        generate(model, start, 1, seeded(), temperature=-1)
    with pytest.raises(ValueError, match="temperature=nan"):
        generate(model, start, 1, seeded(), temperature=math.nan)
    with pytest.raises(ValueError, match="new_tokens=-1: ask for 0 or more"):
        generate(model, start, -1, seeded())


@pytest.mark.parametrize("rate", [-0.1, 1.0, math.nan])
def test_a_rate_that_is_no_probability_is_refused(rate: float) -> None:
    """`GPTConfig` refuses it, but a layer that was made alone scaled by 1/1.1, or by infinity."""
    with pytest.raises(ValueError, match=re.escape(f"rate={rate} is not a probability")):
        Dropout(rate, site=0)
