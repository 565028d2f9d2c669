"""The mixture of experts: Hugging Face's Mixtral, finite differences, and what is counted when."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_model import rough_model, seeded, some_tokens, with_exact_parts
from torch import Tensor

from minidist.full.model import GPT, GPTConfig, Where, cross_entropy_sum
from minidist.full.model.moe import experts as experts_module
from minidist.full.model.moe.balance import Load, rebalance
from minidist.full.model.moe.experts import grouped, has_kernel
from minidist.full.model.moe.routed import RoutedExperts, routed_in
from minidist.full.model.moe.router import router_logits
from minidist.full.recompute.segments import recompute
from minidist.full.trainer.config import ConfigError
from minidist.full.trainer.foreign import load_llama, save_llama
from minidist.full.trainer.options import ModelOptions
from minidist.further import Config
from minidist.moe import balance_loss, mixture
from minidist.moe import rebalance as move_biases

MIXTRAL = GPTConfig(
    vocabulary=64, layers=2, hidden=32, heads=4, key_value_heads=2, intermediate=24, sequence=16, experts=5, top_k=2,
    rope_theta=1e6,
)  # fmt: skip


def mixtral(config: GPTConfig) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    sizes = transformers.MixtralConfig(
        vocab_size=config.vocabulary,
        num_hidden_layers=config.layers,
        hidden_size=config.hidden,
        num_attention_heads=config.heads,
        num_key_value_heads=config.key_value_heads,
        intermediate_size=config.intermediate,
        max_position_embeddings=config.sequence,
        num_local_experts=config.experts,
        num_experts_per_tok=config.top_k,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        rms_norm_eps=config.norm_epsilon,
        initializer_range=0.2,
    )
    return transformers.MixtralForCausalLM(sizes).eval()


def test_logits_and_gradients_equal_mixtral_in_float64(tmp_path: Path) -> None:
    """Mixtral's softmax is in float32; so are its weights of experts, and the logits agree as
    far.
    """
    theirs = mixtral(MIXTRAL)
    theirs.save_pretrained(tmp_path)
    ours, theirs = load_llama(tmp_path, torch.float64), with_exact_parts(theirs, MIXTRAL)
    theirs.set_experts_implementation("eager")  # the kernel of the others takes no float64
    tokens = some_tokens(MIXTRAL)
    our_logits, their_logits = ours(tokens), theirs(tokens).logits
    torch.testing.assert_close(our_logits, their_logits, rtol=1e-5, atol=1e-6)
    cross_entropy_sum(our_logits[:, :-1], tokens[:, 1:]).backward()
    cross_entropy_sum(their_logits[:, :-1], tokens[:, 1:]).backward()
    for layer, block in zip(ours.layers, theirs.model.layers, strict=True):
        routed, theirs_routed = layer.mlp.routed, block.mlp
        pairs = [
            (routed.router.grad, theirs_routed.gate.weight.grad),
            (
                torch.cat((routed.experts.gate.grad, routed.experts.up.grad), 1),
                theirs_routed.experts.gate_up_proj.grad,
            ),
            (routed.experts.down.grad, theirs_routed.experts.down_proj.grad),
            (layer.attention.query.weight.grad, block.self_attn.q_proj.weight.grad),
        ]
        for mine, other in pairs:
            assert float((mine - other).abs().max()) <= 1e-5 * float(other.abs().max())


def test_mixtral_reads_what_we_save(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = rough_model(MIXTRAL, torch.float32)
    save_llama(ours, tmp_path)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert type(theirs).__name__ == "MixtralForCausalLM" and not any(
        report[name] for name in ("missing_keys", "unexpected_keys")
    )
    tokens = some_tokens(MIXTRAL)
    torch.testing.assert_close(theirs(tokens).logits, ours(tokens), rtol=1e-4, atol=1e-4)
    again = load_llama(tmp_path)
    assert again.config == MIXTRAL
    assert all(
        torch.equal(a, b) for a, b in zip(again.parameters(), ours.parameters(), strict=True)
    )


def test_a_mixtral_with_one_expert_a_token_is_read_and_written_but_not_drawn(
    tmp_path: Path,
) -> None:
    """Its experts' weights are all 1, as Mixtral divides by their sum; a router drawn anew would
    never learn.
    """
    transformers = pytest.importorskip("transformers")
    one = replace(MIXTRAL, top_k=1)
    theirs = mixtral(one)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_llama(tmp_path / "theirs")
    assert ours.config == one
    save_llama(ours, tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    tokens = some_tokens(one)
    for logits in (theirs(tokens).logits, again(tokens).logits):
        torch.testing.assert_close(ours(tokens), logits, rtol=1e-4, atol=1e-4)
    with pytest.raises(
        ValueError,
        match="top_k=1 gives every output the weight 1, so the router would learn nothing",
    ):
        GPT(one)
    with pytest.raises(ConfigError, match="--top-k 1 gives every output the weight 1"):
        Config(model=ModelOptions(experts=5, top_k=1))


@pytest.mark.parametrize(
    "change",
    [
        {"shared_experts": 1},
        {"capacity": 1.5},
        {"scores": "sigmoid"},
        {"raw_weights": True},
        {"balance": "bias"},
    ],
)
def test_what_mixtral_does_not_know_is_not_written(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"Mixtral has no {next(iter(change))}="):
        save_llama(GPT(replace(MIXTRAL, **change)), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_sliding_window_is_read_and_written(tmp_path: Path) -> None:
    save_llama(rough_model(MIXTRAL), tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    assert said["sliding_window"] is None
    (tmp_path / "config.json").write_text(json.dumps(said | {"sliding_window": 3}))
    found = load_llama(tmp_path)
    assert found.config == replace(MIXTRAL, attention_window=3)
    save_llama(found, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == said | {"sliding_window": 3}


def test_what_a_mixtral_leaves_out_is_what_transformers_takes_it_for(tmp_path: Path) -> None:
    """Its defaults are not those of a Llama: a base of 10,000 would turn every head otherwise."""
    transformers = pytest.importorskip("transformers")
    save_llama(rough_model(MIXTRAL), tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    for name in ("rope_theta", "rope_parameters", "rms_norm_eps"):
        del said[name]
    (tmp_path / "config.json").write_text(json.dumps(said))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    config = load_llama(tmp_path).config
    assert config.norm_epsilon == theirs.rms_norm_eps
    assert config.rope_theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    "change",
    [
        {"top_k": 1, "raw_weights": True},
        {"top_k": 2},
        {"top_k": 2, "scores": "sigmoid", "balance": "aux", "balance_rate": 0.3, "z_loss": 0.1},
    ],
    ids=("k1", "k2", "with its losses"),
)
def test_the_router_s_gradient_by_finite_differences(change: dict[str, Any]) -> None:
    config = replace(MIXTRAL, layers=1, **change)
    layer = RoutedExperts(config, 0).double()
    for parameter in layer.parameters():
        parameter.data.normal_(0, 0.5, generator=seeded(1))
    x = torch.randn(2, 8, config.hidden, dtype=torch.float64, generator=seeded(2))

    def loss(router: Tensor) -> Tensor:
        with torch.no_grad():
            layer.router.copy_(router)
        logits = router_logits(x, layer.router)
        scores = logits.softmax(-1) if config.scores == "softmax" else logits.sigmoid()
        own = config.z_loss * logits.logsumexp(-1).square().sum()
        if config.balance == "aux":
            counts = torch.nn.functional.one_hot(layer.choose(scores), 5).sum((1, 2))
            shares = (scores / scores.sum(-1, keepdim=True)).sum(1)
            own = (
                own
                + config.balance_rate * (5 * counts / counts.sum(-1, keepdim=True) * shares).sum()
            )
        return (layer(x) ** 2).sum() + own

    start = layer.router.detach().clone()
    (layer(x) ** 2).sum().backward()
    gradient = layer.router.grad.clone()  # type: ignore[union-attr]
    assert float(gradient.abs().max()) > 1e-3
    for row, column in ((0, 0), (2, 7), (4, 31)):
        nudge = torch.zeros_like(start)
        nudge[row, column] = 1e-6
        with torch.no_grad():
            slope = float(loss(start + nudge) - loss(start - nudge)) / 2e-6
        assert slope == pytest.approx(float(gradient[row, column]), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("biased", (False, True))
def test_the_plain_page_says_what_the_layer_does(biased: bool) -> None:
    """Output, gradients, the balance loss, the counts and the next bias."""
    config = replace(MIXTRAL, layers=1, balance="bias" if biased else "aux", balance_rate=0.1)
    layer = RoutedExperts(config, 0).double()
    for parameter in layer.parameters():
        parameter.data.normal_(0, 0.5, generator=seeded(1))
    layer.bias = torch.tensor([3, -1, 0, 2, 0]) if biased else layer.bias
    bias = layer.bias * config.balance_rate
    x = torch.randn(1, 9, config.hidden, dtype=torch.float64, generator=seeded(2))

    def expert(number: int, rows: Tensor) -> Tensor:
        gate, up, down = (stack[number] for stack in layer.experts.parameters())
        silu = torch.nn.functional.silu
        return (silu(rows @ gate.T) * (rows @ up.T)) @ down.T

    experts = [partial(expert, number) for number in range(config.experts)]
    output, counts = mixture(x[0], layer.router, experts, config.top_k, bias)
    loss = output.square().sum()
    if not biased:
        scores = (x[0] @ layer.router.T).softmax(-1)
        loss = loss + config.balance_rate * 9 * balance_loss(scores, counts)
    told = torch.autograd.grad(loss, tuple(layer.parameters()))
    found = layer(x)
    torch.testing.assert_close(found[0], output)
    found.square().sum().backward()
    for parameter, gradient in zip(layer.parameters(), told, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    assert torch.equal(layer.tally[: config.experts], counts.double())
    rebalance(layer)
    if biased:
        move_biases(bias, counts, config.balance_rate)
        torch.testing.assert_close(layer.bias * config.balance_rate, bias)


def test_equal_scores_choose_the_first_experts() -> None:
    layer = RoutedExperts(MIXTRAL, 0)
    assert layer.choose(torch.zeros(1, 3, 5)).tolist() == [[[0, 1]] * 3]
    layer.bias = torch.tensor([0, 0, 0, 1, 1])
    assert layer.choose(torch.zeros(1, 3, 5)).tolist() == [[[3, 4]] * 3]


def test_a_bias_only_selects() -> None:
    layer, x = (
        RoutedExperts(replace(MIXTRAL, balance="bias"), 0),
        torch.randn(1, 4, 32, generator=seeded(1)),
    )
    for parameter in layer.parameters():
        parameter.data.normal_(generator=seeded())
    plain = layer(x)
    layer.bias += 1000  # of all alike: the same are chosen
    assert torch.equal(layer(x), plain)
    layer.bias[3] += 100_000
    assert (layer.choose(torch.rand(1, 4, 5)) == 3).any(-1).all()


def test_the_router_computes_in_float32() -> None:
    layer = RoutedExperts(MIXTRAL, 0).bfloat16()
    with torch.no_grad():
        layer.router.normal_(generator=seeded())
    x = torch.randn(1, 4, 32, generator=seeded(1)).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        logits = router_logits(x, layer.router)
    assert logits.dtype == torch.float32 and torch.equal(logits, x.float() @ layer.router.float().T)


def test_the_first_tokens_of_a_sequence_have_room() -> None:
    layer = RoutedExperts(replace(MIXTRAL, capacity=1.0), 0)
    # 5 tokens, k = 2, E = 5: 2 each
    choice = torch.tensor([[[0, 1]] * 5, [[0, 1], [2, 3], [0, 4], [1, 2], [0, 3]]])
    kept = layer.kept(choice, Where())
    assert kept[0].tolist() == [[True, True]] * 2 + [[False, False]] * 3
    assert kept[1].tolist() == [[True, True]] * 4 + [[False, True]]
    backwards = torch.arange(4, -1, -1)  # the same tokens, last position first
    assert torch.equal(
        layer.kept(choice[:, backwards], Where(positions=backwards)), kept[:, backwards]
    )


def test_what_is_dropped_adds_nothing() -> None:
    config = replace(MIXTRAL, capacity=1e-9)  # one token of each expert
    layer, x = RoutedExperts(config, 0), torch.ones(1, 8, 32)
    for parameter in layer.parameters():
        parameter.data.normal_(generator=seeded())
    found = layer(x)
    assert found[0, 0].abs().max() > 0 and not found[0, 1:].any()
    found.sum().backward()
    assert rebalance(layer) is not None


def counted(model: GPT, tokens: Tensor, backwards: int = 1) -> tuple[Load | None, list[int]]:
    for _ in range(backwards):
        cross_entropy_sum(model(tokens[:, :-1]), tokens[:, 1:]).backward()
    load = rebalance(model)
    return load, routed_in(model)[0].bias.tolist()


def test_only_what_trains_is_counted_and_only_once() -> None:
    config, tokens = replace(MIXTRAL, balance="bias"), some_tokens(MIXTRAL)
    plain = counted(GPT(config), tokens)
    assert plain[0] is not None and any(plain[1])
    again = GPT(config)
    recompute(again, "full")
    assert counted(again, tokens) == plain
    watched = GPT(config)
    with torch.no_grad():
        watched(tokens)
    watched(tokens)  # no backward
    assert rebalance(watched) is None
    assert counted(watched, tokens) == plain
    # microbatches add up, and the bias moves once
    assert counted(GPT(config), tokens, backwards=2)[1] == plain[1]


def test_a_frozen_router_is_left_alone() -> None:
    model = GPT(replace(MIXTRAL, balance="bias"))
    for layer in routed_in(model):
        layer.router.requires_grad_(False)
    assert counted(model, some_tokens(MIXTRAL)) == (None, [0] * 5)


def test_a_bias_evens_the_load_out() -> None:
    config = replace(MIXTRAL, layers=1, balance="bias", balance_rate=0.02, experts=8)
    model, tokens = rough_model(config), some_tokens(config, batch=32)
    routed_in(model)[0].bias[0] = 20  # all tokens begin with the first expert
    loads = []
    for _ in range(40):
        load, _ = counted(model, tokens)
        assert load is not None
        loads.append(load.imbalance)
    assert loads[0] > 3 and min(loads[-5:]) < 1.2


def test_a_state_dict_keeps_the_bias() -> None:
    config = replace(MIXTRAL, balance="bias")
    model, other = GPT(config), GPT(config)
    _, bias = counted(model, some_tokens(config))
    other.load_state_dict(model.state_dict())
    assert routed_in(other)[0].bias.tolist() == bias and any(bias)


def test_an_expert_without_rows_has_a_gradient_of_zeros() -> None:
    weight = torch.nn.Parameter(torch.randn(3, 4, 5, generator=seeded(), dtype=torch.float64))
    rows = torch.randn(7, 5, generator=seeded(1), dtype=torch.float64, requires_grad=True)
    found = grouped(rows, weight, [3, 0, 4])
    torch.testing.assert_close(found, torch.cat((rows[:3] @ weight[0].T, rows[3:] @ weight[2].T)))
    assert torch.autograd.gradcheck(lambda r, w: grouped(r, w, [3, 0, 4]), (rows, weight))
    found.sum().backward()
    assert weight.grad is not None and not weight.grad[1].any() and weight.grad[2].any()


def test_torch_s_grouped_kernel_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is meant for GPUs, but runs here, too."""
    weight = torch.nn.Parameter(torch.randn(3, 16, 8, generator=seeded()).bfloat16())
    rows = torch.randn(7, 8, generator=seeded(1)).bfloat16().requires_grad_()
    found = []
    for devices in ((), ("cpu",)):
        monkeypatch.setattr(experts_module, "KERNEL_DEVICES", devices)
        assert has_kernel(rows, weight) == bool(devices)
        weight.grad = rows.grad = None
        y = grouped(rows, weight, [3, 0, 4])
        y.square().sum().backward()
        found.append((y, rows.grad, weight.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"top_k": 6}, "top_k=6 is more than experts=5"),
        ({"experts": 0, "top_k": 2, "capacity": 1.0}, "capacity=1.0 is for a model with experts"),
        ({"scores": "linear"}, "scores='linear' is unknown"),
        ({"balance": "hope"}, "balance='hope' is unknown"),
        ({"balance_rate": 0.5}, "balance_rate=0.5 is for balance='aux' or 'bias'"),
        ({"capacity": -1.0}, "capacity=-1.0 is not a number of at least 0"),
        ({"experts": 2.0}, "experts=2.0 is not a whole number"),
    ],
)
def test_a_wrong_size_is_refused_in_one_sentence(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        replace(MIXTRAL, **wrong)


def test_parameters_and_flops_are_counted() -> None:
    config = replace(MIXTRAL, shared_experts=2)
    assert (
        sum(parameter.numel() for parameter in GPT(config, device="meta").parameters())
        == config.parameter_count
    )
    # two of them work all the same; only the router multiplies more
    more = replace(config, experts=10)
    assert more.flops_per_token() - config.flops_per_token() == 6 * 2 * 5 * 32


def test_a_model_with_experts_can_be_pickled() -> None:
    model = GPT(replace(MIXTRAL, balance="aux"), torch.Generator().manual_seed(0))
    twin = pickle.loads(pickle.dumps(model))
    tokens = torch.arange(16)[None]
    for each in (model, twin):
        cross_entropy_sum(each(tokens), tokens).backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None and torch.equal(ours.grad, theirs.grad)
