"""The program of `test_your_loop.py`: what docs/your-loop.md says, on the ranks that it was started
on.

It prints one line of JSON on rank 0: for each thing that was tried, what came of it.
"""

from __future__ import annotations

import copy
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import minidist
from minidist.full import DDP, FSDP, ZeRO1, ZeRO2

PAGE = Path(__file__).parents[1] / "docs" / "your-loop.md"
KINDS: dict[str, Callable[..., Any]] = {"DDP": DDP, "FSDP": FSDP, "ZeRO1": ZeRO1, "ZeRO2": ZeRO2}
CONFIG = LlamaConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def blocks() -> dict[str, str]:
    """Return the page's blocks by the comment that each begins with."""
    found = re.findall(r"^```python\n# (.*?)\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    return dict(found)


def wrong_lines() -> list[tuple[str, str, str]]:
    """Return the rows of the last table: strategy, line, and the sentence it gets."""
    rows = re.findall(
        r"^\| (\w+) \| `(.*?)` \| (.*?) \|$", PAGE.read_text().split("## What a wrong")[1], re.M
    )
    return [(kind, line, said) for kind, line, said in rows]


def build() -> LlamaForCausalLM:
    """Return the same small Llama on every rank."""
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG)


def given(comm: minidist.Communicator) -> dict[str, Any]:
    """Return what the blocks take for granted."""
    generator = torch.Generator().manual_seed(comm.rank)

    def batch() -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 97, (2, 16), generator=generator)
        return {"input_ids": tokens, "labels": tokens}

    pairs = [(batch(), batch()) for _ in range(3)]
    everyones = torch.randint(0, 97, (1, 6), generator=torch.Generator().manual_seed(9))
    return {
        "comm": comm,
        "torch": torch,
        "batches": pairs,
        "held_out": batch(),
        "prompt": everyones,
        "seen": [],
        "device": "cpu",
    }


def same(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    """Tell whether two states have the same names and the same bits."""
    return list(mine) == list(theirs) and all(
        torch.equal(mine[name], theirs[name]) for name in mine
    )


def trained(kind: str, page: dict[str, str], comm: minidist.Communicator) -> dict[str, bool]:
    """Train by torch's class and by ours; compare what is left, and what comes after training."""
    torchs, ours = given(comm) | {"model": build()}, given(comm) | {"model": build()}
    exec(page[f"{kind}, torch"], torchs)
    exec(page[f"{kind}, minidist"], ours)
    outcome = {"bit-equal": same(ours["state"], torchs["state"])}
    serial = build()
    outcome["it has trained"] = not same(ours["state"], dict(serial.state_dict()))
    for space in (torchs, ours):
        exec(page["evaluate"], space)
    outcome["evaluates alike"] = torch.equal(ours["loss"], torchs["loss"])
    serial.load_state_dict(ours["state"])
    exec(page["generate"], ours)
    with torch.no_grad():
        expected = serial.generate(ours["prompt"], max_new_tokens=8, do_sample=False)
    outcome["generates alike"] = torch.equal(ours["tokens"], expected)
    if kind == "FSDP":
        with ours["model"].gathered():
            outcome["generates alike, gathered"] = torch.equal(
                ours["model"].module.generate(ours["prompt"], max_new_tokens=8, do_sample=False),
                expected,
            )
    exec(page["hooks"], ours)
    exec(page["evaluate"], ours)
    outcome["hooks run once"] = len(ours["seen"]) == 1
    ours["handle"].remove()
    for space in (torchs, ours):
        space["model"].train()
        exec(page["scale"], space)
    # what the last line of the loop reads
    for space, whose in ((torchs, "torch"), (ours, "minidist")):
        exec(page[f"{kind}, {whose}"].splitlines()[-1], space)
    outcome["bit-equal, scaled"] = same(ours["state"], torchs["state"])
    return outcome | goes_on(kind, page, ours)


def goes_on(kind: str, page: dict[str, str], ours: dict[str, Any]) -> dict[str, bool]:
    """Save, go on, load, and go on again: both ends must be the same."""
    model, optimizer = ours["model"], ours["optimizer"]
    exec(page["the optimizer, DDP and FSDP"], ours)
    kept = copy.deepcopy(ours["state"])
    exec(page[f"save and load, {kind}"], ours)
    weights = {name: value.clone() for name, value in ours["state"].items()}
    ends = []
    for _ in range(2):
        model.train()
        optimizer.zero_grad()
        model(**ours["held_out"]).loss.backward()
        optimizer.step()
        exec(page[f"save and load, {kind}"], ours)
        ends.append({name: value.clone() for name, value in ours["state"].items()})
        (model.load if kind == "FSDP" else model.module.load_state_dict)(weights)
        optimizer.load_state_dict(kept)
    return {"goes on as before": same(*ends), "a step was taken": not same(ends[0], weights)}


def said(kind: str, line: str, comm: minidist.Communicator) -> str:
    """Return what a wrong line says: the error of the line, or of the next step of training."""
    space = given(comm) | {"model": build(), "minidist": minidist, "copy": copy} | KINDS
    first, second = space["batches"][0]
    if kind in KINDS:
        space["model"] = KINDS[kind](space["model"], comm, op="mean")
        space["optimizer"] = space["model"].optimizer(torch.optim.AdamW, lr=1e-2)
        space["model"](**first).loss.backward()
    try:
        exec(line, space)
        space["model"](**second).loss.backward()
        space["optimizer"].step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def main() -> None:
    """Try everything."""
    comm = minidist.init()
    if not dist.is_initialized():  # under mpirun: torch's own classes need a group, too
        dist.init_process_group(
            "gloo", init_method=f"file://{sys.argv[1]}", rank=comm.rank, world_size=comm.size
        )
    page = blocks()
    os.chdir(Path(sys.argv[1]).parent)  # a wrong line may leave files behind
    exec(page["start"], {})
    outcome: dict[str, Any] = {kind: trained(kind, page, comm) for kind in ("DDP", "FSDP")}
    outcome["wrong"] = [
        [line, expected, said(kind, line, comm)] for kind, line, expected in wrong_lines()
    ]
    everyones = comm.all_gather_object(outcome)
    if comm.rank == 0:
        print(json.dumps(everyones))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
