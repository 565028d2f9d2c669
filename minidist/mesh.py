"""The mesh: an array of ranks with named axes. A group is a slice of the array.

    Mesh(comm, {"dp": 2, "pp": 2, "tp": 2})

              pp 0     pp 1          tensor parallel groups      (0 1) (2 3) (4 5) (6 7)      neighbours
    dp 0     [0 1]    [2 3]          pipeline parallel groups    (0 2) (1 3) (4 6) (5 7)
    dp 1     [4 5]    [6 7]          data parallel groups        (0 4) (1 5) (2 6) (3 7)      far apart

Launchers number the ranks node by node, so ranks along the last axis are neighbours and have the
fastest links. Therefore the axis that sends most comes last:

    tp   tensor parallelism     activations, several times a layer; little computation hides them
    cp   context parallelism    keys and values, once a layer, while attention computes
    pp   pipeline parallelism   the activations of a stage, once a microbatch
    dp   data parallelism       gradients, once a step, while backward computes

(Narayanan et al. 2021, section 3; Llama 3, 2024, section 3.3.)
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np

from minidist.comm import Communicator


class Mesh:
    """This rank's place and its groups; to run, `minidist.Mesh`. Making one is collective.

    `sizes` are the numbers of ranks along each axis, outermost first.
    """

    def __init__(self, comm: Communicator, sizes: Mapping[str, int]) -> None:
        self.comm = comm
        product = prod(sizes.values())
        if product != comm.size:
            axes = "*".join(sizes)
            found = f"{axes} = {product}, but {comm.size} ranks were started"
            raise ValueError(f"{found}: start as many ranks as the axes multiply to")
        self.array = np.arange(product).reshape(tuple(sizes.values()))
        place = np.argwhere(self.array == comm.rank)[0].tolist()
        self.coordinates: dict[str, int] = dict(zip(sizes, place, strict=True))
        self.groups: dict[tuple[str, ...], Communicator] = {}

    def group(self, *axes: str) -> Communicator:
        """Return the ranks that differ from this one along `axes` alone. Collective at first use.

        `mesh.group("tp")` is a row of the array above; `mesh.group("dp", "tp")` a plane, by rank.
        """
        if axes not in self.groups:
            # Take every place along `axes`, and this rank's own along the others.
            where: dict[str, int | slice] = {**self.coordinates}
            for axis in axes:
                where[axis] = slice(None)
            members = self.array[tuple(where.values())]
            first = int(members.min())  # no two groups share it, so it can be the color
            self.groups[axes] = self.comm.split(color=first)
        return self.groups[axes]

    def __getitem__(self, axis: str) -> Communicator:
        return self.group(axis)
