"""Muon for matrices of hidden layers, AdamW for everything else, as one optimizer with masters.

    group {"muon": True}     gradients ─▶ momentum ─▶ owner: orthogonal ─▶ masters ─▶ parameters
    group {"muon": False}    gradients ─▶ AdamW's two moments           ─▶ masters ─▶ parameters

Muon is for matrices that map hidden channels to hidden channels. An embedding is a table of rows
that are looked up one by one, the head its counterpart, and norms have no matrix: these go on with
AdamW. (Jordan et al. 2024, Muon.) With the scale of Liu et al. 2025, section 2.2, which gives
Muon's changes the size of AdamW's, both have the same learning rate and the same decay.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

from minidist.full.precision.masters import Chunk, MasterWeights, Visit, wide
from minidist.full.trainer.config import Groups
from minidist.further.muon.muon import Matrices, Part, options_of


class MuonWithAdamW(MasterWeights):
    """`MasterWeights` whose groups say which of the two optimizers updates them.

    Building it and `step` are collective.

    Parameters
    ----------
    params : list of dict
        Groups over parameters, or over slices of them, the same on every rank. One with `muon` =
        True may have options of `torch.optim.Muon`; its parameters are matrices. The `lr` and
        `weight_decay` that a group lacks are those of **options, or AdamW's.
    **options
        As for `MasterWeights`, with AdamW as the optimizer inside.
    """

    elementwise = True  # Muon puts the parts together, AdamW needs no whole

    def __init__(self, params: Iterable[dict[str, Any]], **options: Any) -> None:
        usual = dict(torch.optim.Muon([nn.Parameter(torch.zeros(1, 1))]).defaults)
        for name in ("lr", "weight_decay"):
            del usual[name]  # the same for both
        groups: list[dict[str, Any]] = []
        for given in params:
            group = {"muon": False, **dict(given)}
            groups.append({**usual, **group} if group["muon"] else group)
        super().__init__(groups, **{"optimizer": AdamW, **options})
        matrices = []
        for group in self.param_groups:
            if group["muon"]:
                matrices += group["params"]
        self.matrices = Matrices(matrices)

    def volume(self) -> float:
        """Return how many bytes this rank sends in a step for Muon's updates, by formula."""
        itemsize = wide(self.param_groups[0]["params"][0]).itemsize  # all have one dtype
        return self.matrices.elements() * itemsize

    def _chunks(self) -> Iterator[Chunk]:
        """Yield Muon's matrices all at once: ranks have unequal slices, and have to send
        together.
        """
        for group, parameters in super()._chunks():
            if not group["muon"]:
                yield group, parameters
        for group in self.param_groups:
            present = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["muon"] and present:
                yield group, present

    def _advance(self, visit: Visit) -> None:
        """Run the step of the group's optimizer on a chunk."""
        if not visit.group["muon"]:
            super()._advance(visit)
            return
        options, parts = options_of(visit.group), []
        for piece, master, state in zip(visit.parameters, visit.masters, visit.states, strict=True):
            assert master.grad is not None, "`_chunks` has chosen those that have one"
            parts.append(Part(piece, master, master.grad, state, options))
        self.matrices.update(parts)


def muon_groups(model: nn.Module, groups: Groups) -> Groups:
    """Return the groups, and of the first the matrices inside layers as one more, for Muon.

    The embedding and the head stay: an embedding is a table, of which a step sees some rows.
    """
    hidden = []
    for name, parameter in model.named_parameters():
        if name.startswith("layers."):
            hidden.append(parameter)
    matrices, others = groups
    inside = set(hidden)
    ours = [parameter for parameter in matrices["params"] if parameter in inside]
    rest = [parameter for parameter in matrices["params"] if parameter not in inside]
    # so that the changes are as large as AdamW's, and one --lr is right for both
    scale = {"muon": True, "adjust_lr_fn": "match_rms_adamw"}
    orthogonal = matrices | scale | {"params": ours}
    return [orthogonal, matrices | {"params": rest}, others]
