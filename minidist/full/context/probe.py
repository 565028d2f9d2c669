"""Is a model's own `attend` plain causal attention? Ring and all_gather compute that, whatever
`attend` was before.

A few tokens tell. Where the values are the unit matrix, attention returns its own weights, one row
for each query:

    plain             another scale      a window           not causal         dropout
    1.0   .   .       1.0   .   .        1.0   .   .        0.2 0.5 0.3        differs from
    0.3 0.7   .       0.1 0.9   .        0.3 0.7   .        0.3 0.6 0.1        call to call
    0.2 0.5 0.3       0.1 0.8 0.1          . 0.6 0.4        0.2 0.5 0.3

A window is only seen by more tokens than it is wide. So a second probe asks whether the last of
many tokens sees the first ones. Nothing is sent, no graph is made, and torch's own random numbers
go on as if nobody had asked.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minidist.full.model.attention import causal_attention
from minidist.full.model.gpt import Attend
from minidist.full.recompute.segments import checkpoint

TOKENS = 16  # of the probe that looks at weights
MANY = 1056  # of the one that looks for windows, before the model has been called
# how some faults begin
REFUSES, RETURNS, MULTIPLIES = "cannot be tried", "returns", "multiplies scores"
MOST = 4352  # and later at most, however long the sequence is


class Heads(NamedTuple):
    """What an `attend` is called with: heads of queries, heads of keys and values, and channels of
    each head.
    """

    queries: int
    groups: int
    channels: int


GUESSES = (16, 64, 128, *range(8, 257, 8))  # channels of a head, of attention that does not say


class Probe:
    """Asks a module's `attend`, once for each shape that it is called with, and before anything is
    sent.

    It does not keep the module alive.
    """

    def __init__(self, module: nn.Module, attend: Attend, way: str) -> None:
        self.module, self.attend, self.way = weakref.ref(module), attend, way
        self.asked: set[tuple[Heads, int]] = set()

    def ask(self, query: Tensor, key: Tensor, tokens: int) -> None:
        """Raise ValueError unless `attend` is plain with these queries and keys, for so many tokens
        of all ranks.
        """
        heads = Heads(query.shape[1], key.shape[1], query.shape[3])
        question = heads, min(tokens, MOST)
        module = self.module()
        if question in self.asked or module is None:
            return
        if fault := attend_fault(module, self.attend, *question):
            raise ValueError(not_plain("attend", fault, self.way))
        self.asked.add(question)


def not_plain(name: str, fault: str, way: str) -> str:
    """Return the sentence for an `attend` of this name that differs."""
    instead = f"{way} computes plain causal attention at 1/√d in its place"
    return f"{name} {fault}, but {instead}: use 'ulysses', which keeps the model's own attend"


class Tried(NamedTuple):
    """An `attend` that took what it was given: where, and in which dtype."""

    attend: Attend
    device: torch.device
    dtype: torch.dtype

    @property
    def tolerance(self) -> float:
        """How far outputs may be off; some kernels compute their softmax in 32 bits, whatever comes
        in.
        """
        return 1e-4 if self.dtype.itemsize >= 4 else 0.05

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return the output in float64, on the CPU."""
        return self.attend(*(x.to(self.device, self.dtype) for x in inputs)).to(
            "cpu", torch.float64
        )


def attend_fault(module: nn.Module, attend: Attend, heads: Heads, tokens: int = MANY) -> str:
    """Say what makes an `attend` differ from causal attention at 1/√d, as a verb and its object;
    empty if nothing does.

    Parameters
    ----------
    module : nn.Module
        The module that has this attention. Dropout is looked for as if it were in training.
    heads : Heads
        The heads with which `attend` is called.
    tokens : int
        The length at which windows are looked for.

    Cost: a few calls with 16 tokens, and one with `tokens`, of one row and one head.
    """
    attend = without_checkpoint(attend)
    if attend is causal_attention:
        return ""
    with in_training(module):
        tried, refusal = try_out(module, attend, heads)
        if tried is None:
            return refusal
        if learns(tried, heads):
            return "has trained parameters of its own, which would get no gradient"
        return fault_of_weights(tried, heads) or fault_of_window(tried, heads, tokens)


def guessed_fault(module: nn.Module, attend: Attend) -> str:
    """Do as `attend_fault` for attention whose heads are unknown: they are guessed until it takes
    them.

    A scale may be right for another number of channels. So an `attend` with a fixed scale passes
    here, if it is right for some number; see `Probe.ask`. Any other fault does not depend on the
    heads.
    """
    first = ""
    for channels, ratio in product(GUESSES, range(1, 9)):
        fault = attend_fault(module, attend, Heads(2 * ratio, 2, channels))
        if not fault or not fault.startswith((REFUSES, RETURNS, MULTIPLIES)):
            return fault
        if not first or first.startswith((REFUSES, RETURNS)):
            first = fault
    return first


def without_checkpoint(attend: Any) -> Any:
    """Return an `attend` as it was before `recompute` had it computed again."""
    while isinstance(attend, partial) and attend.func is checkpoint:
        attend = attend.args[0]
    return attend


@contextmanager
def in_training(module: nn.Module) -> Iterator[None]:
    """Put a module into training, and keep what is done from being recorded and from using up
    random numbers.
    """
    before = {part: part.training for part in module.modules()}
    gpus = {parameter.device for parameter in module.parameters() if parameter.is_cuda}
    try:
        with torch.random.fork_rng(gpus), torch.no_grad(), torch.autocast("cpu", enabled=False):
            for part in before:
                part.training = True
            yield
    finally:
        for part, training in before.items():
            part.training = training


def try_out(module: nn.Module, attend: Attend, heads: Heads) -> tuple[Tried | None, str]:
    """Return an `attend` that takes the probe in float64 on the CPU, or else as the parameters are;
    or why none does.

    Neither is returned for a module on `meta` whose `attend` needs parameters: there are no numbers
    to be wrong.
    """
    like = next(module.parameters(), torch.empty(0))
    inputs = random_inputs(heads)
    refusal = ""
    for device, dtype in ((torch.device("cpu"), torch.float64), (like.device, like.dtype)):
        tried = Tried(attend, device, dtype)
        if device.type == "meta":
            return None, ""
        try:
            shape = tried(*inputs).shape
        except Exception as error:  # anything that a user's function may raise
            refusal = (
                f"{REFUSES} ({type(error).__name__}: "
                f"{str(error).splitlines()[0] if str(error) else ''})"
            )
        else:
            if shape == inputs[0].shape:
                return tried, ""
            refusal = f"{RETURNS} {list(shape)} for queries {list(inputs[0].shape)}"
    return None, refusal


def learns(tried: Tried, heads: Heads) -> bool:
    """Tell whether an `attend` has trained parameters: its output has a graph, although its inputs
    have none.
    """
    with torch.enable_grad():
        output = tried.attend(*(x.to(tried.device, tried.dtype) for x in random_inputs(heads)))
    return output.requires_grad


def random_inputs(heads: Heads, tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    """Return query [1, H, T, d], key and value [1, H_kv, T, d], the same at each call."""
    generator = torch.Generator("cpu").manual_seed(0)
    rows = [
        torch.Size((1, count, tokens, heads.channels))
        for count in (heads.queries, heads.groups, heads.groups)
    ]
    query, key, value = (
        torch.randn(r, generator=generator, dtype=torch.float64, device="cpu") for r in rows
    )
    return query, key, value


def fault_of_weights(tried: Tried, heads: Heads) -> str:
    """Say what a probe with few tokens finds."""
    query, key, value = random_inputs(heads)
    found, plain = tried(query, key, value), causal_attention(query, key, value)
    if not close(found, tried(query, key, value), tried.tolerance):
        return "has dropout: two calls with the same numbers differ"
    if close(found, plain, tried.tolerance):
        return ""
    weights = weights_of(tried, query, key, heads)  # [H, T, T]
    values = value[0].repeat_interleave(heads.queries // heads.groups, 0)
    if not close(weights @ values, found[0], 10 * tried.tolerance):
        return f"differs from it by {float((found - plain).abs().max()):.2g} of about 1"
    scores = (query[0] @ key[0].repeat_interleave(heads.queries // heads.groups, 0).mT).tril()
    return (
        " and ".join(differences(weights, scores, heads))
        or "adds something to its scores, or bends them"
    )


def weights_of(tried: Tried, query: Tensor, key: Tensor, heads: Heads) -> Tensor:
    """Return the weights [H, T, T] of each query, by giving the keys unit vectors for values: d
    columns at a time.
    """
    unit = torch.eye(TOKENS, dtype=torch.float64, device="cpu")
    columns = []
    for part in torch.split(unit, heads.channels, dim=1):
        value = torch.zeros_like(key)
        value[..., : part.shape[1]] = part
        columns.append(tried(query, key, value)[0, :, :, : part.shape[1]])
    return torch.cat(columns, dim=2)


def differences(weights: Tensor, scores: Tensor, heads: Heads) -> list[str]:
    """Return what weights [H, T, T] say of how they were made from `scores` [H, T, T], which are
    not scaled.
    """
    found, time = [], len(weights[0])
    sees = (weights.abs() > 1e-7).any(0)  # [T, T]: query i sees key j
    if bool(sees.triu(1).any()):
        found.append("lets tokens see later ones")
    apart = torch.arange(time, device="cpu")[:, None] - torch.arange(time, device="cpu")
    width = int(apart[sees].max()) + 1
    if width < time:
        found.append(f"has a window of {width} tokens")
    totals = weights.sum(-1)
    if not close(totals, torch.ones_like(totals), 1e-3):
        found.append(f"has weights that add up to {float(totals.min()):.2g}, as beside a sink")
    last = sees[-1] & (apart[-1] >= 0)  # softmax: log weight = scale * score - the row's own number
    logs, raw = weights[:, -1, last].log(), scores[:, -1, last]
    logs, raw = logs - logs.mean(1, keepdim=True), raw - raw.mean(1, keepdim=True)
    scale, usual = float((logs * raw).sum() / (raw * raw).sum()), heads.channels**-0.5
    if not close(logs, scale * raw, 1e-2):
        found.append("adds something to its scores, or bends them")
    elif abs(scale / usual - 1) > 1e-3:
        found.append(f"{MULTIPLIES} by {scale:.4g} (1/√{heads.channels} is {usual:.4g})")
    return found


def fault_of_window(tried: Tried, heads: Heads, tokens: int) -> str:
    """Say whether the last of many tokens lacks the first ones.

    Channels and heads are as few as `attend` takes.
    """
    ratio, tokens = heads.queries // heads.groups, max(TOKENS, tokens // 16 * 16)
    for few in (Heads(1, 1, 8), Heads(ratio, 1, heads.channels), heads):
        query, key, value = (torch.zeros_like(x) for x in random_inputs(few, tokens))
        value[:, :, : tokens // 16] = 1
        try:
            seen = float(tried(query, key, value)[0, 0, -1, 0])
        except Exception:  # it needs the heads that it has in the model
            continue
        return (
            ""
            if abs(16 * seen - 1) < 0.1
            else f"has a window: the last of {tokens} tokens does not see the first"
        )
    return ""


def close(found: Tensor, wanted: Tensor, tolerance: float) -> bool:
    """Tell whether numbers of about 1 are the same."""
    return bool(((found - wanted).abs() <= tolerance).all())
