"""The mesh: an array of ranks with named axes. A group is a slice of the array.

    Layout(dp=2, pp=2, tp=2)

              pp 0     pp 1          tensor parallel groups      (0 1) (2 3) (4 5) (6 7)      neighbours
    dp 0     [0 1]    [2 3]          pipeline parallel groups    (0 2) (1 3) (4 6) (5 7)
    dp 1     [4 5]    [6 7]          data parallel groups        (0 4) (1 5) (2 6) (3 7)      far apart

Launchers number the ranks node by node, so the innermost axis has the fastest links. The axis that
sends most comes innermost:

    tp   tensor parallelism     activations, several times a layer; little computation hides them
    cp   context parallelism    keys and values, once a layer, while attention computes
    pp   pipeline parallelism   the activations of a stage, once a microbatch
    dp   data parallelism       gradients, once a step, while backward computes

`Layout(..., order=("pp", "dp", "cp", "tp"))` has another order, whose stages are far apart. `links`
says which axes leave a node.

(Narayanan et al. 2021, section 3; Llama 3, 2024, section 3.3.)

Experts live on the data axes. Every rank along `dp` and `cp` has a copy of the dense layers.
Experts divide the same dp * cp ranks in another way: `ep` neighbouring ranks share the experts,
because tokens travel to an expert and back in every layer, and there are `edp` copies of such a
group. (Singh et al. 2023.)

Sites that only a slow wire joins are one more axis, outside of all others: `dcn` (data-center
network). Each site trains a replica of its own, and they meet now and then: see `full/slow_wires/`.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minidist.full.comm import Cluster, Communicator
from minidist.full.comm.agree import same_call
from minidist.full.comm.ledger import Traffic

AXES = ("dp", "pp", "cp", "tp")  # outermost first
EXPERT_AXES = ("edp", "ep", "pp", "tp")  # the same ranks: edp * ep = dp * cp
SITES = "dcn"  # outside of all these
ARRAYS = ((SITES, *AXES), (SITES, *EXPERT_AXES))
SIZES = (*AXES, "ep", SITES)  # what a layout is asked for
CARRIED = {  # along the axes inside a replica
    "tp": "activations sent along tp",
    "pp": "activations sent along pp",
    "cp": "keys and values sent along cp",
    "ep": "tokens sent to experts and back",
}

Ranks = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Layout:
    """The number of ranks along each axis. It is plain data: using it needs no process.

    Attributes
    ----------
    dp, pp, cp, tp : int
        Data, pipeline, context and tensor parallel size.
    ep : int
        Expert parallel size. Expert groups consist of ranks of the data axes, so it must divide `dp
        * cp`.
    dcn : int
        Sites, each with all the axes above.
    order : tuple of str
        The axes dp, pp, cp and tp, outermost first: ranks along the last one have neighbouring
        numbers. cp stands after dp, so that the ranks of the data axes are numbered alike in every
        order.

    Raises
    ------
    ValueError
        If a size is not a whole number of at least 1, `ep` does not divide `dp * cp`, or `order` is
        no such order.
    """

    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    dcn: int = 1
    order: tuple[str, ...] = AXES

    def __post_init__(self) -> None:
        for axis in SIZES:
            size = getattr(self, axis)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(
                    f"{axis}={size!r}: the size of an axis is a whole number, at least 1"
                )
        if self.data % self.ep:
            raise ValueError(
                f"ep={self.ep} must divide dp*cp = {self.data}: the experts are dealt out "
                "among the ranks of the data axes"
            )
        known = sorted(self.order) == sorted(AXES)
        misplaced = False
        if known and self.dp > 1 and self.cp > 1:
            misplaced = self.order.index("cp") < self.order.index("dp")
        if not known or misplaced:
            raise ValueError(
                f"order={','.join(self.order)} must name dp, pp, cp and tp once each, cp "
                f"after dp: as {','.join(AXES)}"
            )

    # ---------------------------------------------------------------- the array

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.dcn * self.dp * self.pp * self.cp * self.tp

    @property
    def data(self) -> int:
        """The number of ranks of a site's data axis, dp and cp together: copies of each
        parameter.
        """
        return self.dp * self.cp

    @property
    def edp(self) -> int:
        """The number of copies of each expert in a site."""
        return self.data // self.ep

    @property
    def ranks(self) -> Ranks:
        """The ranks as an array. Its axes are sites, and `AXES`: [dcn, dp, pp, cp, tp]."""
        sizes = [getattr(self, axis) for axis in self.order]
        places = [1 + self.order.index(axis) for axis in AXES]
        return np.arange(self.size).reshape(self.dcn, *sizes).transpose(0, *places)

    @property
    def expert_ranks(self) -> Ranks:
        """The ranks as the experts see them. Its axes are sites, and `EXPERT_AXES`:
        [dcn, edp, ep, pp, tp].
        """
        data_first = self.ranks.transpose(0, 1, 3, 2, 4)  # [dcn, dp, cp, pp, tp]
        return data_first.reshape(self.dcn, self.edp, self.ep, self.pp, self.tp)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the coordinate of a rank on every axis, `ep` and `edp` included; ValueError for an
        unknown rank.
        """
        if not 0 <= rank < self.size:
            raise ValueError(
                f"rank={rank} is not in this layout: its ranks are 0 to {self.size - 1}"
            )
        place = np.argwhere(self.ranks == rank)[0]
        found = {axis: int(index) for axis, index in zip(ARRAYS[0], place, strict=True)}
        among_data = found["dp"] * self.cp + found["cp"]
        edp, ep = divmod(among_data, self.ep)
        return found | {"ep": ep, "edp": edp}

    # ---------------------------------------------------------------- groups

    def group(self, axes: str | Iterable[str], rank: int) -> tuple[int, ...]:
        """Return the ranks whose coordinates equal those of `rank` on all other axes, sorted,
        `rank` included.

        `group("tp", 5)` or `group(("dp", "cp"), 5)`.

        Raises
        ------
        ValueError
            For an unknown axis or rank, and for `ep` or `edp` together with `dp` or `cp`, which
            divide the same ranks.
        """
        self.coordinate(rank)  # refuses an unknown rank
        return next(group for group in self.groups(axes) if rank in group)

    def groups(self, axes: str | Iterable[str]) -> list[tuple[int, ...]]:
        """Return every group along these axes, in the order of their first ranks.

        Raises as `group`.
        """
        axes, names = _known(axes)
        array = self.ranks if names == ARRAYS[0] else self.expert_ranks
        # Move the asked axes to the end, so that a group becomes a row.
        inside = [names.index(axis) for axis in axes]
        last = range(-len(inside), 0)
        array = np.moveaxis(array, inside, last)
        outside = array.shape[: len(names) - len(inside)]
        rows = array.reshape(math.prod(outside), -1).tolist()
        return sorted(tuple(sorted(row)) for row in rows)

    def links(self, cluster: Cluster) -> dict[str, str]:
        """Return which links of a cluster the messages along each axis use.

        `none`: the group is one rank. `inside`: each group lies within a node. `across`: no two
        ranks of a group share a node. `both`: a group spans several nodes and has several ranks in
        one, so hierarchical collectives pay.
        """
        cluster.check(self.size)
        node_of = [cluster.node_of(rank) for rank in range(self.size)]
        return self.links_between(node_of)

    def links_between(self, node_of: Sequence[object]) -> dict[str, str]:
        """Return the same for ranks whose nodes are known: `node_of[rank]` is a name of the rank's
        node.
        """
        return {axis: self._link(axis, node_of) for axis in (SITES, *AXES, "ep", "edp")}

    def _link(self, axis: str, node_of: Sequence[object]) -> str:
        groups = self.groups(axis)
        if len(groups[0]) == 1:
            return "none"
        inside = across = True
        for group in groups:
            nodes = {node_of[rank] for rank in group}
            inside = inside and len(nodes) == 1
            across = across and len(nodes) == len(group)
        if inside:
            return "inside"
        return "across" if across else "both"

    # ---------------------------------------------------------------- words

    def check(self, ranks: int) -> None:
        """Raise ValueError, naming ways out, unless the layout has exactly this number of ranks."""
        if ranks == self.size:
            return
        sizes = {axis: getattr(self, axis) for axis in (*AXES, SITES)}
        named = [axis for axis, size in sizes.items() if size > 1] or list(AXES)
        fixes = [f"mpirun -n {self.size}"]
        for axis, size in sizes.items():
            others = self.size // size
            needed = ranks // others
            data_ranks = self.data // size * needed  # if this axis is one of the data's
            fits_experts = axis not in ("dp", "cp") or data_ranks % self.ep == 0
            if ranks % others == 0 and fits_experts and len(fixes) == 1:
                fixes.append(f"--{axis} {needed}")
        started = f"{ranks} rank was" if ranks == 1 else f"{ranks} ranks were"
        raise ValueError(
            f"{'*'.join(named)} = {self.size}, but {started} started: use {', or '.join(fixes)}"
        )

    def __str__(self) -> str:
        """Return a picture: a row for each `dp` of each site, a column for each `pp`, a bracket of
        `tp` ranks for each `cp`.
        """
        sizes = [f"{axis}={size}" for axis in ARRAYS[0] if (size := getattr(self, axis)) > 1]
        lines = [f"{self.size} ranks: {' × '.join(sizes)}" if sizes else "1 rank"]
        rows = {"": [f"pp {stage}" for stage in range(self.pp)]}
        for site, replicas in enumerate(self.ranks):
            where = f"site {site} " if self.dcn > 1 else ""
            for dp, replica in enumerate(replicas):
                rows[f"{where}dp {dp}"] = ["".join(map(_bracket, stage)) for stage in replica]
        width = max(len(cell) for name, row in rows.items() if name for cell in row)
        margin = max(8, *(len(name) + 2 for name in rows))
        for name, row in rows.items():
            cells = [cell.ljust(width) for cell in row]
            lines.append(name.ljust(margin) + "  ".join(cells))
        if self.ep > 1:
            lines.append(f"ep={self.ep}".ljust(8) + " ".join(map(_bracket, self.groups("ep"))))
        return "\n".join(line.rstrip() for line in lines)


class Mesh:
    """The communicators of a layout, one along every axis. The one to read is `minidist.mesh.Mesh`,
    whose groups are the same. Making a mesh is collective.

    Attributes
    ----------
    world : Communicator
        All ranks.
    dcn, dp, pp, cp, tp, ep : Communicator
        This rank's group along that axis; this rank alone where the axis has size 1.
    data : Communicator
        Along dp and cp together: the ranks that have the same parameters, and sum their gradients.
    rows : Communicator
        Along dcn and dp together: the ranks that share out the rows of a batch.
    site : Communicator
        All ranks of this rank's site.
    coordinate : dict[str, int]
        The coordinate of this rank on every axis.

    Raises
    ------
    ValueError
        On every rank, before anything is sent, if the layout and `comm` differ in the number of
        ranks.
    MismatchError
        On every rank, if the ranks bring different layouts.
    """

    def __init__(self, comm: Communicator, layout: Layout) -> None:
        if isinstance(comm, Layout):
            raise TypeError("a Mesh takes the communicator first: Mesh(comm, layout)")
        layout.check(comm.size)
        same_call(comm, "Mesh", repr(layout))
        self.world, self.layout = comm, layout
        self.coordinate = layout.coordinate(comm.rank)
        self._communicators: dict[tuple[str, ...], Communicator] = {}
        self.dp = self.over("dp")
        self.pp = self.over("pp")
        self.cp = self.over("cp")
        self.tp = self.over("tp")
        self.ep = self.over("ep")
        self.dcn = self.over(SITES)
        self.rows = self.over(SITES, "dp")
        self.site = self.over(*AXES) if layout.dcn > 1 else comm
        self.data = self.dp
        if layout.cp > 1:
            # A communicator of its own, even where dp=1 and `cp` has the same ranks: what is sent
            # along an axis is counted by communicator.
            first = layout.group(("dp", "cp"), comm.rank)[0]
            self.data = comm.split(first)

    def __getitem__(self, axis: str) -> Communicator:
        """Return the communicator along an axis: `mesh["tp"]`, as of torch's `DeviceMesh`."""
        return self.over(axis)

    def over(self, *axes: str) -> Communicator:
        """Return the communicator along several axes together, as in `over("dp", "cp")`.

        Collective the first time.

        Axes of size 1 add no rank: `over("dp", "cp")` with cp=1 is `dp`. Raises as `Layout.group`.
        """
        known = _known(axes)[0]
        key = tuple(axis for axis in known if getattr(self.layout, axis) > 1)
        if key not in self._communicators:
            first = self.layout.group(key, self.world.rank)[0]
            self._communicators[key] = self.world.split(color=first)
        return self._communicators[key]

    def traffic(self) -> dict[str, Traffic]:
        """Return what this rank has sent along each axis; `dp` is the whole data axis."""
        comms = {"dp": self.data, "pp": self.pp, "cp": self.cp, "tp": self.tp}
        if self.layout.ep > 1:
            comms |= {"ep": self.over("ep", "tp"), "edp": self.over("edp")}
        if self.layout.dcn > 1:
            comms[SITES] = self.dcn
        return {axis: comm.traffic for axis, comm in comms.items()}


def _known(axes: str | Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return these axes in the order of the array that has them all, and all axes of that array."""
    asked = {axes} if isinstance(axes, str) else set(axes)
    for names in ARRAYS:
        if asked <= set(names):
            return tuple(axis for axis in names if axis in asked), names
    there = (SITES, *AXES, "ep", "edp")
    unknown = asked - {*there}
    if unknown:
        raise ValueError(f"axis {min(unknown)!r} does not exist: there are {', '.join(there)}")
    raise ValueError(
        f"axes {', '.join(sorted(asked))} cut the same ranks in two ways: combine ep and edp with "
        "dcn, pp and tp only, and note that edp with ep is dp with cp"
    )


def _bracket(ranks: Iterable[int]) -> str:
    return "[" + " ".join(str(rank) for rank in ranks) + "]"
