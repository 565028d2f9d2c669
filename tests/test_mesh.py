"""The mesh: groups are slices of an array of ranks, and communicators are what the array says."""

from __future__ import annotations

import itertools
import re
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest
from ranks import mpirun

from minidist import Cluster, Communicator, run
from minidist import mesh as book
from minidist.full.collectives import all_reduce
from minidist.full.mesh import ARRAYS, Layout, Mesh

LAYOUTS = [
    Layout(dp, pp, cp, tp, ep, dcn=1 + (dp * pp == 4))
    for dp, pp, cp, tp in itertools.product((1, 2, 3), repeat=4)
    for ep in (1, 2, 3, 4, 6, 9)
    if dp * cp % ep == 0 and dp * pp * cp * tp <= 36
]


def test_the_axes_stand_in_the_order_of_the_docstring() -> None:
    layout = Layout(dp=2, pp=2, cp=1, tp=2, ep=1)
    assert layout.size == 8 and layout.ranks.shape == (1, 2, 2, 1, 2)
    assert layout.groups("tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert layout.groups("pp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert layout.groups("dp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert layout.groups("cp") == [(rank,) for rank in range(8)]
    assert layout.group("tp", 5) == (4, 5) and layout.group(("pp", "tp"), 5) == (4, 5, 6, 7)
    assert layout.group((), 5) == (5,) and layout.group(ARRAYS[0], 5) == tuple(range(8))
    assert layout.coordinate(6) == {"dp": 1, "pp": 1, "cp": 0, "tp": 0, "ep": 0, "edp": 1, "dcn": 0}


def test_the_books_mesh_has_the_same_groups() -> None:
    layout = Layout(dp=2, pp=2, tp=2)

    def program(comm: Communicator) -> None:
        mesh, ours = book.Mesh(comm, {"dp": 2, "pp": 2, "tp": 2}), Mesh(comm, layout)
        for axes in (("dp",), ("pp",), ("tp",), ("dp", "tp"), ("dp", "pp", "tp")):
            group: Any = mesh.group(*axes)
            assert group.members == layout.group(axes, comm.rank) == ours.over(*axes).members
        assert mesh.coordinates.items() <= ours.coordinate.items()

    run(program, 8)


def test_experts_are_cut_from_the_data_axes() -> None:
    layout = Layout(dp=4, pp=1, cp=1, tp=2, ep=2)
    assert layout.groups("ep") == [(0, 2), (1, 3), (4, 6), (5, 7)]  # neighbours along dp
    assert layout.groups("edp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert layout.groups(("ep", "tp")) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    across = Layout(dp=2, cp=2, tp=2, ep=4)  # over both axes
    assert across.groups("ep") == across.groups(("dp", "cp")) == [(0, 2, 4, 6), (1, 3, 5, 7)]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, marks=[pytest.mark.soak] * (number % 3 > 0))
        for number, layout in enumerate(LAYOUTS)
    ],
    ids=repr,
)
def test_groups_divide_the_ranks(layout: Layout) -> None:
    everyone = list(range(layout.size))
    coordinates = [layout.coordinate(rank) for rank in everyone]
    for names, array in zip(ARRAYS, (layout.ranks, layout.expert_ranks), strict=True):
        assert [array[tuple(here[axis] for axis in names)] for here in coordinates] == everyone
        for count in range(len(names) + 1):
            for axes in itertools.combinations(names, count):
                groups = layout.groups(axes)
                size = int(np.prod([getattr(layout, axis) for axis in axes]))
                assert sorted(itertools.chain(*groups)) == everyone and {
                    len(group) for group in groups
                } == {size}
                for group in groups:
                    assert group == tuple(sorted(group)) and all(
                        layout.group(axes, rank) == group for rank in group
                    )
                    kept = [
                        [coordinates[rank][axis] for axis in names if axis not in axes]
                        for rank in group
                    ]
                    assert all(place == kept[0] for place in kept)
    assert layout.groups(("edp", "ep")) == layout.groups(("dp", "cp"))
    # innermost: neighbours
    assert all(np.ptp(group) == layout.tp - 1 for group in layout.groups("tp"))


@pytest.mark.parametrize("axis", ["dp", "pp", "cp", "tp", "ep"])
@pytest.mark.parametrize("size", [0, -2, 1.5, "2", True, None])
def test_a_size_is_a_whole_number(axis: str, size: object) -> None:
    with pytest.raises(
        ValueError, match=f"{axis}={size!r}: the size of an axis is a whole number, at least 1"
    ):
        Layout(**{axis: size})  # type: ignore[arg-type]


def test_ep_divides_the_data_axes() -> None:
    with pytest.raises(ValueError, match=r"ep=4 must divide dp\*cp = 6: the experts"):
        Layout(dp=3, cp=2, tp=4, ep=4)


def test_a_layout_is_a_value() -> None:
    layout = Layout(tp=2)
    assert layout == Layout(1, 1, 1, 2, 1) and len({layout, Layout(tp=2)}) == 1
    with pytest.raises(FrozenInstanceError):
        layout.tp = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("layout", "ranks", "sentence"),
    [
        (
            Layout(dp=2, pp=2, tp=2),
            4,
            "dp*pp*tp = 8, but 4 ranks were started: use mpirun -n 8, or --dp 1",
        ),
        (Layout(dp=2, pp=2, tp=2), 1, "dp*pp*tp = 8, but 1 rank was started: use mpirun -n 8"),
        (Layout(), 4, "dp*pp*cp*tp = 1, but 4 ranks were started: use mpirun -n 1, or --dp 4"),
        (Layout(tp=3), 4, "tp = 3, but 4 ranks were started: use mpirun -n 3, or --tp 4"),
        (
            Layout(dp=4, tp=2, ep=4),
            4,
            "dp*tp = 8, but 4 ranks were started: use mpirun -n 8, or --tp 1",
        ),
    ],
)
def test_a_layout_that_does_not_fit_names_a_way_out(
    layout: Layout, ranks: int, sentence: str
) -> None:
    with pytest.raises(ValueError) as error:
        layout.check(ranks)
    assert str(error.value) == sentence


def test_every_way_out_is_one() -> None:
    for layout in LAYOUTS:
        layout.check(layout.size)
        for ranks in range(1, 40):
            if ranks == layout.size:
                continue
            with pytest.raises(ValueError) as error:
                layout.check(ranks)
            if option := re.search(r"--(\w+) (\d+)", str(error.value)):
                replace(layout, **{option[1]: int(option[2])}).check(ranks)


def test_links() -> None:
    layout = Layout(dp=2, pp=2, cp=2, tp=4, ep=2)  # 32 ranks on 4 nodes of 8
    assert layout.links(Cluster.h100(4)) == {
        "dp": "across", "pp": "across", "cp": "inside", "tp": "inside", "ep": "inside", "edp": "across",
        "dcn": "none",
    }  # fmt: skip
    assert Layout(dp=16).links(Cluster.h100(2))["dp"] == "both"
    near = layout.links(Cluster.uniform(1e-6, 1e9))
    assert near.pop("dcn") == "none" and set(near.values()) == {"inside"}
    assert Layout(tp=2).links(Cluster.ethernet(2)) == {
        "dp": "none", "pp": "none", "cp": "none", "tp": "across", "ep": "none", "edp": "none",
        "dcn": "none",
    }  # fmt: skip
    with pytest.raises(ValueError, match="32 ranks do not fit"):
        layout.links(Cluster.h100(3))


def test_the_picture() -> None:
    expected = """\
16 ranks: dp=2 × pp=2 × cp=2 × tp=2
        pp 0            pp 1
dp 0    [0 1][2 3]      [4 5][6 7]
dp 1    [8 9][10 11]    [12 13][14 15]
ep=4    [0 2 8 10] [1 3 9 11] [4 6 12 14] [5 7 13 15]"""
    assert str(Layout(dp=2, pp=2, cp=2, tp=2, ep=4)) == expected
    assert str(Layout()) == "1 rank\n        pp 0\ndp 0    [0]"


def test_sites_are_outside_of_all_axes() -> None:
    layout = Layout(dcn=2, dp=2, tp=2, ep=2, order=("tp", "dp", "pp", "cp"))
    assert layout.group("dcn", 1) == (1, 5) and layout.size == 8
    assert layout.groups("dp") == [(0, 1), (2, 3), (4, 5), (6, 7)]  # none leaves a site
    assert layout.groups(("dcn", "edp", "ep")) == [(0, 1, 4, 5), (2, 3, 6, 7)]
    cluster = Cluster.h100(2)
    assert Layout(dcn=2, dp=8).links(cluster)["dcn"] == "across"
    expected = """\
4 ranks: dcn=2 × tp=2
             pp 0
site 0 dp 0  [0 1]
site 1 dp 0  [2 3]"""
    assert str(Layout(dcn=2, tp=2)) == expected
    asked = "tp*dcn = 4, but 8 ranks were started: use mpirun -n 4, or --dp 2"
    with pytest.raises(ValueError, match=re.escape(asked)):
        Layout(dcn=2, tp=2).check(8)


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ("xp", "axis 'xp' does not exist: there are dcn, dp, pp, cp, tp"),
        (("ep", "dp"), "cut the same ranks in two ways"),
    ],
)
def test_axes_that_cannot_be(axes: str | tuple[str, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Layout(dp=2).group(axes, 0)
    with pytest.raises(ValueError, match=words):
        Layout(dp=2).groups(axes)
    with pytest.raises(ValueError, match="rank=2 is not in this layout: its ranks are 0 to 1"):
        Layout(dp=2).coordinate(2)


# ---------------------------------------------------------------- communicators


@pytest.mark.parametrize(
    "layout",
    [Layout(dp=2, pp=2, tp=2), Layout(dp=2, cp=3, tp=2, ep=3), Layout(), Layout(dp=4, ep=2, pp=2)],
    ids=repr,
)
def test_communicators_are_the_groups(layout: Layout) -> None:
    def program(comm: Communicator) -> None:
        mesh = Mesh(comm, layout)
        assert mesh.world is comm and mesh.coordinate == layout.coordinate(comm.rank)
        for axis in ("dp", "pp", "cp", "tp", "ep"):
            group: Communicator = getattr(mesh, axis)
            assert group.members == layout.group(axis, comm.rank) and group.size == getattr(
                layout, axis
            )
            assert group.rank == mesh.coordinate[axis]
            assert mesh.over(axis) is group
        for axes in (("dp", "cp"), ("edp",), ("pp", "ep"), ("tp", "pp"), ("dp", "pp", "cp", "tp")):
            group = mesh.over(*axes)
            assert (
                group.members == layout.group(axes, comm.rank)
                and mesh.over(*reversed(axes)) is group
            )
            total = np.array([comm.rank])
            all_reduce(total, group)
            assert total[0] == sum(group.members)
        assert (mesh.over("dp", "cp") is mesh.dp) == (layout.cp == 1)
        with pytest.raises(ValueError, match="in two ways"):
            mesh.over("dp", "ep")

    run(program, layout.size)


def test_groups_of_different_axes_do_not_mix_their_messages() -> None:
    def program(comm: Communicator) -> list[int]:
        mesh = Mesh(comm, Layout(dp=2, tp=2))
        buffers = [np.zeros(1, int), np.zeros(1, int)]
        pending = [
            mesh.tp.irecv(buffers[0], 1 - mesh.tp.rank),
            mesh.dp.irecv(buffers[1], 1 - mesh.dp.rank),
        ]
        pending += [mesh.dp.isend(np.array([10 + comm.rank]), 1 - mesh.dp.rank)]
        pending += [mesh.tp.isend(np.array([20 + comm.rank]), 1 - mesh.tp.rank)]
        for request in pending:
            request.wait()
        return [int(buffer[0]) for buffer in buffers]

    assert run(program, 4) == [[21, 12], [20, 13], [23, 10], [22, 11]]


def test_a_mesh_that_does_not_fit_says_so_on_every_rank_before_anything_is_sent() -> None:
    def program(comm: Communicator) -> tuple[str, int]:
        try:
            Mesh(comm, Layout(dp=2, tp=3))
        except ValueError as error:
            return str(error), comm.traffic.messages
        return "", -1

    sentence = "dp*tp = 6, but 4 ranks were started: use mpirun -n 6, or --tp 2"
    assert run(program, 4) == [(sentence, 0)] * 4


def test_names_of_other_courses_lead_to_the_communicator() -> None:
    def program(comm: Communicator) -> None:
        mesh = Mesh(comm, Layout(dp=2, tp=2))
        assert mesh["tp"] is mesh.tp
        with pytest.raises(ValueError, match="axis 'model' does not exist: there are dcn, dp"):
            mesh["model"]
        exchanged: tuple[Any, Any] = (mesh.layout, comm)
        with pytest.raises(TypeError, match=r"takes the communicator first: Mesh\(comm, layout\)"):
            Mesh(*exchanged)

    run(program, 4)


def test_mesh_over_processes() -> None:
    outcome = mpirun(4, """
        import numpy as np
        from minidist import init
        from minidist.full.collectives import all_reduce
        from minidist.full.mesh import Layout, Mesh

        comm = init()
        mesh = Mesh(comm, Layout(dp=2, tp=2))
        total = np.array([comm.rank])
        all_reduce(total, mesh.tp)
        assert total[0] == sum(mesh.tp.members) == [1, 1, 5, 5][comm.rank]
        all_reduce(total, mesh.over("dp", "cp"))
        assert total[0] == 6
    """)  # fmt: skip
    assert outcome.returncode == 0, outcome.stderr


# ---------------------------------------------------------------- another order


@pytest.mark.parametrize(
    "order", [("pp", "dp", "cp", "tp"), ("tp", "dp", "pp", "cp"), ("dp", "cp", "tp", "pp")]
)
def test_another_order_numbers_the_same_mesh_otherwise(order: tuple[str, ...]) -> None:
    layout = Layout(dp=2, pp=3, cp=2, tp=4, ep=2, order=order)
    assert sorted(layout.ranks.flatten()) == list(range(48))
    inner = order[-1]
    assert layout.group(inner, 0) == tuple(range(getattr(layout, inner)))
    for rank in range(48):
        at = layout.coordinate(rank)
        assert layout.ranks[0, at["dp"], at["pp"], at["cp"], at["tp"]] == rank
        assert (
            layout.group("pp", rank)[at["pp"]] == rank
            and layout.group("ep", rank)[at["ep"]] == rank
        )


def test_stages_across_pairs_of_nodes() -> None:
    """Four of tp inside a node of 8, stages on two nodes, as people mean it, and as the default has
    it.
    """
    known, asked = (
        Layout(dp=8, pp=2, tp=4),
        Layout(dp=8, pp=2, tp=4, order=("pp", "dp", "cp", "tp")),
    )
    assert known.group("pp", 0) == (0, 4) and asked.group("pp", 0) == (0, 32)
    assert (known.links(Cluster.h100(8))["pp"], asked.links(Cluster.h100(8))["pp"]) == (
        "inside",
        "across",
    )
    assert asked.links(Cluster.h100(8))["tp"] == "inside"


@pytest.mark.parametrize(
    "order", [("dp", "pp", "tp"), ("dp", "pp", "cp", "cp"), ("cp", "dp", "pp", "tp")]
)
def test_an_order_names_each_axis_once(order: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="must name dp, pp, cp and tp once each, cp after dp"):
        Layout(dp=2, cp=2, order=order)
