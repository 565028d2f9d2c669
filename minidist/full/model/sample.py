"""Sample text from a model, one token at a time."""

import torch
from torch import Tensor

from minidist.full.model.gpt import GPT


def generate(
    model: GPT,
    tokens: Tensor,
    new_tokens: int,
    generator: torch.Generator,
    temperature: float = 1.0,
    top_k: int | None = None,
) -> Tensor:
    """Return `tokens` [B, T] followed by `new_tokens` sampled tokens: [B, T + new_tokens].

    It is plain on purpose: there is no cache of keys and values, so each new token costs a whole
    forward. The model reads at most the last `config.sequence` tokens.

    Parameters
    ----------
    tokens : Tensor
        The beginnings of the texts, int64 [B, T], T at least 1.
    generator : torch.Generator
        Draws the tokens, on its own device.
    temperature : float
        Divides the logits, more than 0: below 1 likely tokens become likelier.
    top_k : int, optional
        Choose among the k likeliest tokens (Fan et al. 2018), and any as likely as the k-th.

    Raises
    ------
    ValueError
        If there is no token to start from, the temperature is not positive, k is below 1, or
        fewer than no tokens are asked for.
    """
    if tokens.dim() != 2 or tokens.shape[1] == 0:
        raise ValueError(
            f"tokens has shape {tuple(tokens.shape)}: give [B, T] with at least one token to "
            "start from."
        )
    if not temperature > 0 or (top_k is not None and top_k < 1):
        raise ValueError(
            f"temperature={temperature} and top_k={top_k}: use a temperature above 0, and k from "
            "1 up."
        )
    if new_tokens < 0:
        raise ValueError(f"new_tokens={new_tokens}: ask for 0 or more.")
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for _ in range(new_tokens):
                logits = model(tokens[:, -model.config.sequence :])[:, -1]  # [B, V]
                if top_k is not None:
                    weakest = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
                    logits = logits.masked_fill(logits < weakest, float("-inf"))
                probabilities = torch.softmax(
                    logits.to(generator.device, torch.float32) / temperature, dim=-1
                )
                chosen = torch.multinomial(probabilities, 1, generator=generator)  # [B, 1]
                tokens = torch.cat((tokens, chosen.to(tokens.device)), dim=1)
    finally:
        model.train(was_training)
    return tokens
