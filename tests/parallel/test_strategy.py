"""A strategy has one home: its options are declared once, and a new one is a folder and a line."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from clipped_by_value.strategy import ClippingByValue, ClippingRecipe
from torch import nn

import minidist
from minidist.full.apply import check_fit, check_recipe
from minidist.full.comm import Communicator
from minidist.full.data_axis import DataAxis
from minidist.full.mesh import Layout, Mesh
from minidist.full.options import flags_of
from minidist.full.recipe import RecipeError
from minidist.full.strategy import Facts
from minidist.further import ORDER, Config, Recipe, parallelize
from minidist.plan.run import Setup

PLACE = next(number for number, each in enumerate(ORDER) if isinstance(each, DataAxis))
LONGER = (*ORDER[:PLACE], ClippingByValue(), *ORDER[PLACE:])  # the line


def test_a_new_strategy_is_a_folder_and_a_line() -> None:
    """Its gradients are the sums of what each rank has clipped; afterwards its hooks are gone."""

    def program(comm: Communicator) -> None:
        model = nn.Linear(3, 2, bias=False, dtype=torch.float64)
        mesh = Mesh(comm, Layout(dp=2))
        fit = check_fit(model, mesh, ClippingRecipe(largest=0.5), LONGER)
        parallel = parallelize(model, mesh, fit, lambda output, _: output.sum())
        x = torch.tensor([[0.25, 2.0, -3.0]], dtype=torch.float64) * (1 + comm.rank)
        parallel.step([x], [None])
        each = torch.tensor([0.25 + 0.5, 0.5 + 0.5, -0.5 - 0.5], dtype=torch.float64)
        assert model.weight.grad is not None
        torch.testing.assert_close(model.weight.grad, each.expand(2, 3))
        parallel.unwrap()
        model(x).sum().backward()
        torch.testing.assert_close(model.weight.grad, each + x.expand(2, 3))

    minidist.run(program, 2)


def test_it_is_refused_in_its_own_words_and_left_out_where_nobody_asks_for_it() -> None:
    with pytest.raises(RecipeError, match=r"largest=0\.5 sees no weight gradients"):
        check_recipe(ClippingRecipe(largest=0.5), Layout(pp=2), Facts(layers=4), LONGER)
    check_recipe(ClippingRecipe(), Layout(pp=2), Facts(layers=4), LONGER)


def test_an_option_is_declared_once() -> None:
    """The command line and the planner have the very fields that a strategy declares."""
    sections = {option.name: option for cls in Config.kinds().values() for option in flags_of(cls)}
    for option in flags_of(Recipe):
        assert sections[option.name] is option, f"{option.name} is declared twice"
    alone = Recipe().settled(Layout())
    planned = {option.name: option for option in fields(Setup)}
    shared = planned.keys() & {option.name for option in fields(Recipe)}
    assert shared == {
        "zero", "hsdp", "sp", "schedule", "chunks", "recompute", "autocast", "cp_comm",
    }  # fmt: skip
    for name in shared:
        assert planned[name].default == getattr(alone, name), name


def test_every_strategy_says_what_it_is_asked() -> None:
    """None is wanted without its options, and each is named once."""
    assert len({type(each) for each in ORDER}) == len(ORDER)
    alone = Recipe().settled(Layout())
    assert [each for each in ORDER if each.wanted(alone, Layout(), Facts(layers=4))] == []
