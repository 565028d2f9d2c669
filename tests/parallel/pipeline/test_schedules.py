"""Pipeline schedules: what the papers promise of them, counted from the plans; and what the checker
refuses.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import defaultdict, deque
from dataclasses import replace
from itertools import pairwise, product

import pytest

from minidist.full.pipeline import (
    NAMES,
    Action,
    Kind,
    Plan,
    ScheduleError,
    check,
    peak_activations,
    peak_deferred,
    plan,
    read_plan,
    simulate,
    with_communication,
)
from minidist.full.pipeline.errors import grid
from minidist.full.pipeline.order import in_order
from minidist.full.pipeline.schedules import CHUNKED
from minidist.full.pipeline.simulate import course

COSTS = ((1.0, 2.0), (1.0, 1.0), (2.0, 1.0), (0.7, 1.9))  # of a forward and a backward
SIZES = [
    (ranks, microbatches) for ranks in range(1, 8) for microbatches in (1, 2, 3, 4, 5, 7, 8, 12, 13)
]
UNGROUPED = ((2, 1), (2, 3), (3, 2), (3, 8), (4, 3), (4, 5), (4, 10), (5, 9), (7, 13))


def all_plans() -> list[Plan]:
    plans = [plan(name, p, m) for name in NAMES if name not in CHUNKED for p, m in SIZES]
    plans += [
        plan(name, p, p * k, v)
        for name in CHUNKED
        for p in range(1, 7)
        for k in (1, 2, 3)
        for v in (1, 2, 3)
    ]
    # fewer microbatches than ranks, and groups of more than there are ranks
    return plans + [plan("zb1p", p, m, v) for p, m in UNGROUPED for v in (1, 2, 3)]


PLANS = all_plans()


# ---------------------------------------------------------------- what the papers say


def bubble_share(ranks: int, microbatches: int, chunks: int = 1) -> float:
    """Return the idle share of the step, from 0 to 1: gpipe and 1f1b, and interleaved with its
    `chunks` a rank.

    (Huang et al. 2019, "GPipe", section 2.3, as O((K-1)/(M+K-1)).)
    """
    return (ranks - 1) / (chunks * microbatches + ranks - 1)


def bubble_ratio(ranks: int, microbatches: int, chunks: int = 1) -> float:
    """Return idle time to ideal time of the same schedules. (Narayanan et al. 2021, sections 2.2.1
    and 2.2.2.)
    """
    return (ranks - 1) / (chunks * microbatches)


def naive_share(ranks: int) -> float:
    """Return the idle share of the step, from 0 to 1, if one rank works at a time."""
    return (ranks - 1) / ranks


def zb_h1_idle(ranks: int, microbatches: int, forward: float, input: float, weight: float) -> float:
    """Return how long each rank idles in zb-h1, in the unit of the costs. (Qi et al. 2023, section
    2.3, table 2.)

    `forward`, `input` and `weight` are the times of F, I (the paper's B) and W. It holds as long as
    W takes no longer than F and no longer than I. With fewer microbatches than ranks there are only
    m - 1 weight gradients to fill with.
    """
    return (ranks - 1) * (forward + input) - min(ranks - 1, microbatches - 1) * weight


def activations_1f1b(ranks: int, microbatches: int, stage: int) -> int:
    """Return the most microbatches that a stage of 1f1b holds. (Narayanan et al. 2019, "PipeDream",
    section 3.2.)
    """
    return min(ranks - stage, microbatches)


# ---------------------------------------------------------------- what the plans are


def test_actions_and_plans_as_they_are_written() -> None:
    assert str(Action(Kind.FORWARD, 2, 0)) == "2F0" and str(Action(Kind.REDUCE, 2)) == "2R"
    assert plan("1f1b", 2, 3).text() == "0F0 0F1 0B0 0F2 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2\n"
    assert plan("gpipe", 2, 2).text() == "0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1\n"
    assert plan("naive", 2, 2).text() == "0F0 0B0 0F1 0B1\n1F0 1B0 1F1 1B1\n"
    assert plan("interleaved", 2, 2, 2).rank_of == (0, 1, 0, 1)
    assert plan("zb-v", 3, 2).rank_of == plan("dualpipe-v", 3, 2).rank_of == (0, 1, 2, 2, 1, 0)


def test_zb_h1_is_figure_3_of_its_paper() -> None:
    assert plan("zb-h1", 4, 8).text().splitlines() == [
        "0F0 0F1 0F2 0F3 0I0 0W0 0F4 0I1 0W1 0F5 0I2 0W2 0F6 0I3 0W3 0F7 0I4 0W4 0I5 0W5 0I6 "
        "0W6 0I7 0W7",
        "1F0 1F1 1F2 1I0 1F3 1I1 1W0 1F4 1I2 1W1 1F5 1I3 1W2 1F6 1I4 1W3 1F7 1I5 1W4 1I6 1W5 "
        "1I7 1W6 1W7",
        "2F0 2F1 2I0 2F2 2I1 2F3 2I2 2W0 2F4 2I3 2W1 2F5 2I4 2W2 2F6 2I5 2W3 2F7 2I6 2W4 2I7 "
        "2W5 2W6 2W7",
        "3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3W0 3F4 3I4 3W1 3F5 3I5 3W2 3F6 3I6 3W3 3F7 3I7 3W4 "
        "3W5 3W6 3W7",
    ]


def test_every_schedule_is_one_with_and_without_its_messages() -> None:
    for each in PLANS:
        check(each)
        check(with_communication(each))


def test_text_round_trip() -> None:
    for each in PLANS:
        whole = with_communication(each)
        assert read_plan(each.text()) == each
        assert read_plan(whole.text()) == whole
        assert read_plan(with_communication(each, reduce=True).csv()) == each
        assert whole.compute_only() == each
        assert len(each.text().splitlines()) == each.ranks
    assert read_plan("# mine\n\n0F0 0B0  # the only one\n") == plan("naive", 1, 1)


def test_torchs_csv_leaves_out_messages_and_refuses_what_torch_does_not_have() -> None:
    two = with_communication(plan("1f1b", 2, 1), reduce=True)
    assert two.csv() == "0F0,0B0\n1F0,1B0\n"
    assert Plan("", 2, 1, 1, (1,), ((), plan("1f1b", 1, 1).actions[0])).csv() == ",\n0F0,0B0\n"
    for word in ("0U0", "0OFF0"):
        with pytest.raises(ScheduleError, match=f"torch's plans have no action like {word}"):
            read_plan(f"0F0 0B0 {word}").csv()


def test_reductions_stand_behind_all_backwards_of_a_rank_and_move_nothing_else() -> None:
    for each in PLANS[::5]:
        whole, plain = with_communication(each, reduce=True), with_communication(each)
        check(whole)
        assert whole.reduces and not plain.reduces and read_plan(whole.text()) == whole
        for rank, (row, before) in enumerate(zip(whole.actions, plain.actions, strict=True)):
            assert row == (*before, *(Action(Kind.REDUCE, stage) for stage in each.stages_of(rank)))
    with pytest.raises(ValueError, match="has its reductions already"):
        with_communication(whole.compute_only(), reduce=True)


def test_a_reduction_takes_the_time_that_it_is_given() -> None:
    each = plan("1f1b", 3, 4)
    whole = with_communication(each, reduce=True)
    free, dear = simulate(whole), simulate(whole, reduce=5.0)
    assert free.length == simulate(each).length and free.bubble == simulate(each).bubble
    assert [dear.spans(rank)[-1] for rank in range(3)] == [
        (Action(Kind.REDUCE, rank), end[-2], end[-2] + 5) for rank, end in enumerate(dear.end)
    ]


# ---- costs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_of_gpipe_and_1f1b(name: str) -> None:
    for p, m in SIZES:
        for forward, backward in COSTS:
            timeline = simulate(plan(name, p, m), forward, backward)
            assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)
            assert timeline.bubble == pytest.approx(bubble_share(p, m), abs=1e-12)
            assert timeline.ratio == pytest.approx((p - 1) / m, abs=1e-12)
            assert timeline.ratio == pytest.approx(bubble_ratio(p, m), abs=1e-12)


def test_bubble_of_interleaved() -> None:
    for p in range(1, 7):
        for v in (1, 2, 3, 4):
            for m in (p, 2 * p, 5 * p):
                for forward, backward in COSTS:
                    timeline = simulate(plan("interleaved", p, m, v), forward, backward)
                    assert timeline.bubble == pytest.approx((p - 1) / (v * m + p - 1), abs=1e-12)
                    assert timeline.bubble == pytest.approx(bubble_share(p, m, v), abs=1e-12)
                    assert timeline.ratio == pytest.approx((p - 1) / (v * m), abs=1e-12)
                    assert timeline.ratio == pytest.approx(bubble_ratio(p, m, v), abs=1e-12)


def test_bubble_of_naive() -> None:
    for p, m in SIZES:
        assert simulate(plan("naive", p, m)).bubble == pytest.approx(naive_share(p))


def test_bubble_of_zb_h1() -> None:
    draw = random.Random(0)
    for p, m in SIZES:
        for _ in range(4):
            forward, input = draw.random(), draw.random()
            weight = draw.random() * min(forward, input)
            idle = simulate(plan("zb-h1", p, m), forward, input=input, weight=weight).idle
            assert idle == pytest.approx([zb_h1_idle(p, m, forward, input, weight)] * p, abs=1e-9)
            if m >= p:
                assert idle == pytest.approx([(p - 1) * (forward + input - weight)] * p, abs=1e-9)


def test_bubble_of_zb1p() -> None:
    """That of zb-h1, of stages with 1/v of the layers; and less than interleaved has."""
    draw = random.Random(0)
    sizes = [(p, p * k) for p in range(1, 7) for k in (1, 2, 5)]
    sizes += [(p, m) for p, m in UNGROUPED if m >= p]
    for (p, m), v in product(sizes, (1, 2, 3, 4)):
        forward, input = draw.random(), draw.random()
        weight = draw.random() * min(forward, input)
        idle = simulate(plan("zb1p", p, m, v), forward, input=input, weight=weight).idle
        assert idle == pytest.approx([(p - 1) * (forward + input - weight)] * p, abs=1e-9)
        if m % p == 0 and p > 1:
            other = plan("interleaved", p, m, v)
            assert idle[0] < simulate(other, forward, input + weight).idle[0]


def test_zb1p_with_one_chunk_is_zb_h1() -> None:
    for p, m in SIZES:
        if m < p or m % (m // p) == 0:
            assert plan("zb1p", p, m) == plan("zb-h1", p, m)


@pytest.mark.parametrize(("name", "enough"), [("zb-v", -1), ("dualpipe-v", 0)])
def test_v_shaped_schedules_idle_only_before_their_first_and_after_their_last_action(
    name: str, enough: int
) -> None:
    for p in range(1, 8):
        for m in (2 * p + enough, 2 * p + 3, 5 * p):
            timeline = simulate(plan(name, p, m))
            assert timeline.idle == pytest.approx([p - 1.0] * p)
            if name == "zb-v":
                assert all(
                    end[-1] - start[0] == 6 * m
                    for start, end in zip(timeline.start, timeline.end, strict=True)
                )


def test_dualpipe_v_has_a_forward_before_each_backward_of_the_other_stage() -> None:
    """Of the 2 m backwards of rank r, all but the first and last, 3 p - r - 1: such a pair would run
    at once. In zb-v, which idles as little and holds about as much, every backward is split.
    """
    for p in range(1, 6):
        for m in (2 * p, 2 * p + 3):
            for rank, row in enumerate(plan("dualpipe-v", p, m).actions):
                pairs = [
                    (first, then)
                    for first, then in pairwise(row)
                    if first.kind == Kind.FORWARD and then.kind == Kind.BACKWARD
                ]
                assert all(first.stage != then.stage for first, then in pairs)
                assert len(pairs) == 2 * m - (3 * p - rank - 1)


def test_peaks() -> None:
    for p, m in SIZES:
        first = peak_activations(plan("1f1b", p, m))
        assert list(first) == [min(p - stage, m) for stage in range(p)]
        assert list(first) == [activations_1f1b(p, m, stage) for stage in range(p)]
        assert peak_activations(plan("gpipe", p, m)) == (m,) * p
        assert peak_activations(plan("naive", p, m)) == (1,) * p
        split = plan("zb-h1", p, m)
        assert max(peak_activations(split)) <= max(first)
        assert peak_activations(split) == first
        assert list(peak_deferred(split)) == [min(rank + 1, m) for rank in range(p)]
        assert max(peak_activations(plan("zb-v", p, m))) <= 2 * p
        assert max(peak_activations(plan("dualpipe-v", p, m))) <= 2 * p + 1
        assert peak_deferred(plan("1f1b", p, m)) == (0,) * p
    for p, v in ((2, 2), (4, 2), (3, 4)):
        assert max(peak_activations(plan("interleaved", p, 4 * p, v))) == p * (v + 1) - 1
        split = plan("zb1p", p, 4 * p, v)
        assert list(peak_activations(split)) == [p * v - rank for rank in range(p)]
        assert list(peak_deferred(split)) == [rank + 1 for rank in range(p)]


def test_a_timeline_by_hand() -> None:
    timeline = simulate(plan("gpipe", 2, 1), forward=1, backward=2, latency=0.5)
    assert timeline.start == ((0, 5), (1.5, 2.5)) and timeline.end == ((1, 7), (2.5, 4.5))
    assert timeline.length == 7.0 and timeline.busy == (3, 3) and timeline.idle == (4.0, 4.0)
    assert timeline.bubble == pytest.approx(8 / 14) and timeline.ratio == pytest.approx(8 / 6)


def test_latency_lies_between_ranks_only() -> None:
    assert simulate(plan("zb-v", 1, 3), latency=5).idle == (0,)
    plain, late = (simulate(plan("1f1b", 3, 4), latency=latency).length for latency in (0.0, 0.25))
    assert late >= plain + 4 * 0.25


@pytest.mark.parametrize("name", NAMES)
def test_a_course_is_run_again_with_other_costs(name: str) -> None:
    whole = with_communication(plan(name, 3, 6))
    ready = course(whole)
    first = simulate(ready)
    other = simulate(ready, forward=0.7, backward=1.9, input=0.5, latency=0.1)
    assert other == simulate(whole, forward=0.7, backward=1.9, input=0.5, latency=0.1) != first
    assert simulate(ready) == first == simulate(whole)


@pytest.mark.parametrize(
    "cost", [{"forward": -1.0}, {"latency": float("nan")}, {"weight": float("inf")}]
)
def test_a_cost_that_is_no_time(cost: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(cost))}=.* is no time"):
        simulate(plan("1f1b", 2, 2), **cost)


# ---- messages --------------------------------------------------------------------------------------------------------


def channel_order(whole: Plan) -> dict[tuple[int, int], list[list[tuple[str, int, int]]]]:
    """Return, for each pair of ranks, the messages as either end meets them."""
    met: dict[tuple[int, int], list[list[tuple[str, int, int]]]] = defaultdict(lambda: [[], []])
    for rank, row in enumerate(whole.actions):
        for action in row:
            if action.communicates:
                a, b = sorted((rank, whole.rank_of[action.neighbour]))
                maker = action.stage + {"RECV_F": -1, "RECV_B": 1}.get(action.kind, 0)
                met[a, b][rank == b].append((action.kind[-1], maker, action.microbatch))
    return met


def test_both_ends_meet_their_messages_in_the_same_order() -> None:
    for each in PLANS:
        whole = with_communication(each)
        crossings = sum(a != b for a, b in zip(each.rank_of, each.rank_of[1:], strict=False))
        met = channel_order(whole)
        assert all(one == other for one, other in met.values())
        assert sum(len(one) for one, _ in met.values()) == 2 * each.microbatches * crossings


def test_sends_behind_their_action_and_receives_in_time() -> None:
    for each in PLANS:
        for row in with_communication(each).actions:
            at = {action.key: position for position, action in enumerate(row)}
            for action in row:
                flow = (action.kind[-1], action.stage, action.microbatch)
                if action.kind.startswith("SEND"):
                    between = row[at[flow] + 1 : at[action.key]]
                    assert all(other.kind.startswith("RECV") for other in between)
                elif action.kind.startswith("RECV"):
                    assert at[action.key] < at[flow]


def test_receives_are_posted_ahead() -> None:
    """The next forward's receive stands before the forward during which its message comes."""
    second = with_communication(plan("gpipe", 2, 4)).text().splitlines()[1].split()
    assert second[:6] == ["1RECV_F0", "1RECV_F1", "1F0", "1RECV_F2", "1F1", "1RECV_F3"]


def test_ranks_that_stop_at_every_send_and_receive_finish() -> None:
    """A model of its own, not the checker's: every rank looks only at the heads of all lists, over
    and over.
    """
    for each in PLANS[::7]:
        rows = [deque(row) for row in with_communication(each).actions]
        moved = True
        while moved:
            moved = False
            for rank, row in enumerate(rows):
                while row and not row[0].communicates:
                    row.popleft()
                    moved = True
                if (
                    row
                    and (other := rows[each.rank_of[row[0].neighbour]])
                    and other[0].communicates
                ):
                    mine, theirs = row[0], other[0]
                    ends = {mine.kind[:4], theirs.kind[:4]}
                    meet = each.rank_of[theirs.neighbour] == rank
                    if meet and mine.kind[-1] == theirs.kind[-1] and ends == {"SEND", "RECV"}:
                        assert (
                            mine.microbatch == theirs.microbatch
                            and abs(mine.stage - theirs.stage) == 1
                        )
                        other.popleft()
                        row.popleft()
                        moved = True
        assert not any(rows), each.name


def test_messages_are_added_once() -> None:
    with pytest.raises(ValueError, match="has its sends and receives already"):
        with_communication(with_communication(plan("1f1b", 2, 2)))


@pytest.mark.soak
def test_64_stages_and_512_microbatches_within_5_seconds() -> None:
    begin = time.process_time()
    each = plan("1f1b", 64, 512)
    check(each)
    check(with_communication(each))
    assert time.process_time() - begin <= 5


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("2f2b", 2, 2), "there is no schedule '2f2b': choose one of naive, gpipe, 1f1b"),
        (("1f1b", 2, 0), "microbatches=0, but a schedule needs at least 1"),
        (("1f1b", 0, 2), "ranks=0, but"),
        (("interleaved", 2, 2, 0), "chunks=0, but"),
        (
            ("interleaved", 4, 6, 2),
            "groups of 4, one for each rank, but there are 6: make it 4 or 8",
        ),
        (("interleaved", 4, 3, 2), "but there are 3: make it 4, or use 1f1b"),
        (
            ("zb1p", 4, 9, 2),
            "zb1p takes microbatches in 2 equal groups of at least 4, one for each rank, but "
            "there are 9: make it 8 or 10, or use zb-h1",
        ),
        (("zb1p", 3, 10, 1), "but there are 10: make it 9 or 12, or use zb-h1"),
        (("gpipe", 4, 4, 2), "gpipe has 1 chunk a rank, not 2"),
        (("zb-v", 4, 4, 3), "zb-v has 2 chunks a rank, not 3"),
    ],
)
def test_sizes_that_make_no_schedule(arguments: tuple[str, int, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        plan(*arguments)


@pytest.mark.parametrize(
    ("text", "sentence", "marked"),
    [
        ("", "the text holds no action", ""),
        ("0F0 0X0", "rank 0, word 2: '0X0' is no action", "[0X0]"),
        ("0F0 0B0 F1", "word 3: 'F1' is no action", "[F1]"),
        ("0F0 0B0\n2F0 2B0", "no rank holds stage 1, but stage 2 is there", ""),
        (
            "0F0 0B0 0F1\n1F0 1B0 1F1 1B1",
            "stage 0, microbatch 1: the plan has 0F1, but this needs 0F1, and either 0B1 or "
            "both 0I1 and 0W1",
            "[0F1]",
        ),
        (
            "0F0 0F1 0B0 0B1\n1F0 1B0",
            "stage 1, microbatch 1: the plan has nothing, but this needs 1F1, and",
            "[?]",
        ),
        ("0F0 0B0 0B0", "0B0 stands twice", "[0B0]"),
        ("0F0 0I0", "has 0F0, 0I0, but this needs 0F0, and either 0B0 or both", "[0I0]"),
        ("0F0 0W0", "has 0F0, 0W0, but this needs 0F0, and either 0B0 or both", "[0W0]"),
        ("0F0 0B0 0W0", "has 0F0, 0B0, 0W0, but this needs 0F0, and either 0B0 or", "[0W0]"),
        ("0F0 1B0\n1F0 0B0", "1F0 stands on rank 1, but stage 1 is on rank 0", "[1F0]"),
        ("0B0 0F0", "rank 0, word 1: 0B0 stands before 0F0, which it needs", "[0B0]"),
        ("0F0 0W0 0I0", "word 2: 0W0 stands before 0I0", "[0W0]"),
        ("0F0 0R 0B0", "rank 0, word 2: 0R stands before 0B0, which it needs", "[0R]"),
        ("0F0 0I0 0R 0W0", "word 3: 0R stands before 0W0", "[0R]"),
        ("0F0 1F0 1B0 1R 0B0 0R", "word 4: 1R stands before 0B0", "[1R]"),
        ("0F0 0B0 0R\n1F0 1B0", "1R is missing", "[1F0]"),
        ("0F0 0B0 0R 0R", "0R stands twice", "[0R]"),
        ("0F0 0B0 0R0", "'0R0' is no action", "[0R0]"),
        ("1F0 0F0 1B0 0B0", "word 1: 1F0 stands before 0F0", "[1F0]"),
        ("0F0 1F0 0B0 1B0", "word 3: 0B0 stands before 1B0", "[0B0]"),
        (
            "0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0",
            "deadlock, a cycle of 2 ranks: rank 0 waits at 0B0 for 1B0, rank 1 waits at 1F1 "
            "for 0F1",
            "[0B0]",
        ),
        (
            "0F0 0SEND_F0 0RECV_B0 0B0\n1F0 1RECV_F0 1B0 1SEND_B0",
            "1F0 stands before 1RECV_F0",
            "[1F0]",
        ),
        ("0F0 0SEND_F0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0", "0RECV_B0 is missing", "[0F0]"),
        (
            "0F0 1F0 1RECV_F0 1B0 0B0",
            "1RECV_F0 is needless: stage 0 is on the same rank 0",
            "[1RECV_F0]",
        ),
        ("0F0 0SEND_F0 0B0", "0SEND_F0 has no other end: there is no stage 1", "[0SEND_F0]"),
        (
            "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n1RECV_F0 1F0 1B0 1SEND_B0 "
            "1RECV_F1 1F1 1B1 1SEND_B1",
            "a cycle of 2 ranks: rank 0 waits at 0SEND_F1 for 1RECV_F1, rank 1 waits at "
            "1SEND_B0 for 0RECV_B0",
            "[0SEND_F1]",
        ),
    ],
)
def test_texts_that_are_no_schedule(text: str, sentence: str, marked: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        check(read_plan(text))
    message = str(caught.value)
    assert sentence in message.splitlines()[0]
    assert marked in message.partition("\n")[2]
    assert isinstance(caught.value, ValueError)


def test_a_cycle_that_leaves_out_some_ranks_is_named_without_them() -> None:
    text = "0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1\n2F0 2F1 2B1 2B0\n3F1 3B1 3F0 3B0"
    check(read_plan(text))  # unusual, but it can be run
    stuck = text.replace("2F0 2F1 2B1 2B0", "2F0 2B0 2F1 2B1")
    with pytest.raises(
        ScheduleError, match="rank 2 waits at 2B0 for 3B0, rank 3 waits at 3F1 for 2F1"
    ) as caught:
        check(read_plan(stuck))
    assert sorted(caught.value.cells) == [(2, 1), (3, 0)]


def test_lengths_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="2 stages on 1 ranks was given the ranks of 1 stages"):
        Plan("mine", 1, 2, 1, (0,), ((Action(Kind.FORWARD, 0, 0),),))


def test_every_action_that_is_left_out_or_doubled_is_found() -> None:
    draw = random.Random(1)
    for each in PLANS[::11]:
        for whole in (each, with_communication(each)):
            rank = draw.randrange(whole.ranks)
            row, at = whole.actions[rank], draw.randrange(len(whole.actions[rank]))
            for broken in (row[:at] + row[at + 1 :], row[: at + 1] + row[at:]):
                with pytest.raises(ScheduleError) as caught:
                    check(
                        replace(
                            whole,
                            actions=(*whole.actions[:rank], broken, *whole.actions[rank + 1 :]),
                        )
                    )
                assert "[" in str(caught.value)


def test_shuffled_rows_are_run_or_refused_as_a_plain_search_says() -> None:
    draw = random.Random(2)
    verdicts = set()
    for _ in range(300):
        each = plan(
            draw.choice(["1f1b", "zb-h1", "gpipe", "zb-v"]),
            draw.choice([2, 3]),
            draw.choice([2, 3]),
        )
        rows = [list(row) for row in each.actions]
        for _ in range(draw.choice([1, 2, 3])):
            row = draw.choice(rows)
            at = draw.randrange(len(row) - 1)
            row[at], row[at + 1] = row[at + 1], row[at]
        shuffled = replace(each, actions=tuple(map(tuple, rows)))
        try:
            check(shuffled)
            verdict = True
        except ScheduleError:
            verdict = False
        assert verdict == can_finish(shuffled)
        verdicts.add(verdict)
    assert verdicts == {True, False}


def can_finish(each: Plan) -> bool:
    """Say whether the plan can be run, by trying every rank again until none moves."""
    done: set[tuple[str, int, int]] = set()
    rows = [deque(row) for row in each.actions]
    moved = True
    while moved:
        moved = False
        for row in rows:
            if not row:
                continue
            kind, s, m = row[0]
            if kind == "F":
                ready = s == 0 or ("F", s - 1, m) in done
            elif kind == "W":
                ready = ("I", s, m) in done
            else:
                behind = {("B", s + 1, m), ("I", s + 1, m)}
                ready = ("F", s, m) in done and (s == each.stages - 1 or bool(behind & done))
            if ready:
                done.add(row.popleft())
                moved = True
    return not any(rows)


def test_the_grid_of_a_large_plan_shows_what_surrounds_the_fault() -> None:
    each = plan("1f1b", 64, 512)
    with pytest.raises(
        ScheduleError, match=r"stage 30, microbatch 100: the plan has 30F100, but"
    ) as caught:
        check(read_plan(each.text().replace(" 30B100 ", " ", 1)))
    lines = str(caught.value).splitlines()
    assert "[30F100]" in str(caught.value)
    assert [line[:7] for line in lines[3:]] == [f"rank {rank}" for rank in range(24, 36)]
    assert max(map(len, lines)) < 200
    assert caught.value.cells == [
        (30, [str(action) for action in each.actions[30]].index("30F100"))
    ]
    assert grid(each.actions, [(0, 0)]).startswith("           1")


def test_execution_order_covers_everything_once() -> None:
    whole = with_communication(plan("zb-v", 3, 6))
    order = [(rank, action) for rank, action, _ in in_order(whole)]
    for rank, row in enumerate(whole.actions):
        assert [action for where, action in order if where == rank] == [*row]


def test_huge_numbers_in_a_text_take_no_time_and_no_memory() -> None:
    with pytest.raises(
        ScheduleError, match="microbatch 1: the plan has nothing, but this needs 0F1"
    ):
        check(read_plan("0F0 0B0 0F999999999 0B999999999"))
    with pytest.raises(ScheduleError, match="no rank holds stage 1, but stage 999999999 is there"):
        read_plan("0F0 0B0 999999999F0")
    with pytest.raises(ScheduleError, match="is no action"):
        read_plan("0F" + "9" * 5000)


def test_the_files_of_schedules_import_no_torch() -> None:
    """The folder around them does; so they are loaded here with that folder left empty."""
    program = (
        "import sys, types, importlib.util, pathlib\n"
        "root = pathlib.Path(importlib.util.find_spec('minidist').origin).parent\n"
        "empty = types.ModuleType('minidist.full')\n"
        "empty.__path__ = [str(root / 'full')]\n"
        "import minidist\n"
        "sys.modules['minidist.full'] = empty\n"
        "import minidist.full.pipeline, minidist.draw.pipeline\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
