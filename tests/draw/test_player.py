"""The player: recordings of real runs, and the page in a real browser."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import BROWSER, Page
from matplotlib import image

from minidist import Cluster, run
from minidist.context import RingAttention
from minidist.draw.attention import record_attention
from minidist.draw.filmstrip import filmstrip, in_words, key_frames
from minidist.draw.player import COLOURS, INKS, MET, Recording, player
from minidist.draw.recording import Watching, record
from minidist.full.collectives import all_reduce, broadcast, reduce_scatter
from minidist.full.collectives.choose import TABLE
from minidist.full.comm import Link
from minidist.full.context.flash import flash_attention, page_forward
from minidist.full.context.order import meeting
from minidist.full.context.ring import Ring

ALL = (1, 1, 1, 1)
OUTSIDE = """[...document.querySelectorAll('svg *')].filter(e => {
    const a = e.getBoundingClientRect(), b = e.ownerSVGElement.getBoundingClientRect();
    return a.left < b.left - 1 || a.right > b.right + 1 || a.top < b.top - 1 || a.bottom > b.bottom + 1;
}).map(e => e.outerHTML)"""


def ring(comm: Watching) -> None:
    buffer = comm.watch("buffer", np.full(8, comm.contribution), cells=comm.size)
    all_reduce(buffer, comm, algorithm="ring")


def pair(comm: Watching) -> None:
    buffer = comm.watch("buffer", np.full(3, comm.contribution * (comm.rank == 0)))
    comm.send(buffer, to=1) if comm.rank == 0 else comm.recv(buffer, source=0)


def deadlock(comm: Watching) -> None:
    buffer = comm.watch("buffer", np.full(2, float(comm.contribution)))
    comm.send(buffer, to=(comm.rank + 1) % comm.size)
    comm.recv(buffer, source=(comm.rank - 1) % comm.size)


def relay(comm: Watching) -> None:
    """Pass a buffer on from the last rank to the first."""
    buffer = comm.watch("buffer", np.full(1, comm.contribution))
    if comm.rank < comm.size - 1:
        comm.recv(buffer, source=comm.rank + 1)
    if comm.rank > 0:
        comm.send(buffer, to=comm.rank - 1)


@pytest.fixture(scope="module")
def recording() -> Recording:
    return record(ring, 4, formulas={"bytes sent": "2 (P − 1)/P · n = 2 · 3/4 · 64 = 96"})


# ---------------------------------------------------------------- recordings


def test_a_ring_is_recorded_as_it_ran(recording: Recording) -> None:
    assert [step.buffers for step in recording.at(0)] == [
        {"buffer": 4 * (tuple(int(r == rank) for r in range(4)),)} for rank in range(4)
    ]
    assert [step.buffers["buffer"] for step in recording.at(68)] == 4 * [4 * (ALL,)]
    kinds = [step.kind for step in recording.steps if step.rank == 2]
    assert kinds == [
        "begins",
        *3 * ["sends", "receives", "adds"],
        *3 * ["sends", "receives"],
        "ends",
    ]
    third = [step for step in recording.steps if step.rank == 2 and step.kind == "adds"]
    assert [step.text for step in third] == [
        "rank 2 adds: temporary 1 (ranks 1 + 2)",
        "rank 2 adds: temporary 2 (ranks 0 + 1 + 2)",
        "rank 2 adds: buffer[2] (all ranks)",
    ]


def test_a_round_ends_before_the_next_message_is_sent(recording: Recording) -> None:
    """Three rounds of a send, a receive and a sum by each of four ranks, three without sums; a
    begin and an end.
    """
    assert recording.rounds == [4 + 12, 28, 40, 48, 56, 68]
    assert all(not recording.under_way(count) for count in recording.rounds)
    assert record(relay, 4).rounds == [2, 4, 6] and record(deadlock, 3).rounds == [6]


def test_lines_are_the_algorithms_own(recording: Recording) -> None:
    for step in recording.steps:
        file, number = step.line
        source = recording.sources[file][number - 1]
        expected = {
            "sends": "comm.exchange(",
            "receives": "comm.exchange(",
            "adds": "reduce(arriving, own, leaving)",
        }
        assert expected.get(step.kind, "comm.carry_out(") in source
        # the all-gather is the plain page's, the reduce-scatter the one that keeps its temporaries
        rings = ("ring.py", "fast_ring.py")
        assert Path(file).name in (rings if step.kind in expected else ("operations.py",))


def test_what_came_early_is_shown_once_it_has_been_waited_for() -> None:
    def program(comm: Watching) -> None:
        buffer, token = comm.watch("buffer", np.full(1, comm.contribution)), np.zeros(1)
        if comm.rank == 0:
            requests = [comm.isend(buffer, 1), comm.isend(token, 1, tag=1)]
            comm.recv(token, 1)
        else:
            comm.recv(token, 0, tag=1)  # so the other message is there, too
            requests = [comm.irecv(buffer, 0)]
            comm.send(token, 0)
        for request in requests:
            request.wait()

    shown = [
        (step.kind, step.buffers["buffer"]) for step in record(program, 2).steps if step.rank == 1
    ]
    assert shown[-2:] == [("sends", ((0, 1),)), ("receives", ((1, 0),))]


def test_counters_are_those_of_an_unwatched_run(recording: Recording) -> None:
    def plain(comm: Any) -> tuple[int, int]:
        all_reduce(np.zeros(8, np.int64), comm, algorithm="ring")
        return comm.traffic.messages, comm.traffic.bytes

    assert [step.counters[:2] for step in recording.at(68)] == run(plain, 4) == 4 * [(6, 96)]
    # the buffer and two temporaries
    assert [step.counters[2] for step in recording.at(68)] == 4 * [64 + 2 * 16]


def test_the_bubble_is_the_time_without_computing() -> None:
    """Two stages, three microbatches of one second: each rank computes 3 of 4 seconds."""

    def forward(comm: Watching) -> None:
        activation = comm.watch("activation", np.zeros(1, np.int64))
        for _ in range(3):
            if comm.rank == 1:
                comm.recv(activation, source=0)
            comm.advance(1.0)
            if comm.rank == 0:
                comm.isend(activation, to=1)
        comm.barrier()

    recording = record(
        forward,
        2,
        cluster=Cluster.uniform(0.0, 1e30),
        formulas={"bubble": "(p − 1)/(m + p − 1) = 25 %"},
    )
    assert [step.counters[3] for step in recording.at(10**9)] == [25, 25]
    assert '["bubble","(p − 1)/(m + p − 1) = 25 %"]' in player(recording).replace(", ", ",")
    assert not record(ring, 2).computes


@pytest.mark.parametrize(
    "cluster", (None, Cluster.uniform(1e-6, 1e9)), ids=("no clock", "virtual clock")
)
def test_the_same_run_gives_the_same_page(cluster: Cluster | None) -> None:
    pages = {player(record(ring, 5, cluster)) for _ in range(5)}
    assert len(pages) == 1


@pytest.mark.parametrize("cluster", (None, Cluster.uniform(1e-6, 1e9), Cluster.uniform(0, 1e30)))
@pytest.mark.parametrize("program", (ring, relay))
def test_causes_come_before_effects(
    program: Callable[[Watching], None], cluster: Cluster | None
) -> None:
    sent: set[str] = set()
    latest = [(0.0, 0)] * 6
    for step in record(program, 6, cluster).steps:
        assert step.kind != "receives" or step.message in sent
        sent |= {step.message} if step.kind == "sends" else set()
        assert (step.seconds, step.moment) > latest[step.rank]
        latest[step.rank] = (step.seconds, step.moment)


@pytest.mark.parametrize("ranks", (2, 3, 4, 7))
@pytest.mark.parametrize("algorithm", sorted(TABLE["all_reduce"].keys() - {"shared"}))
def test_every_algorithm_ends_with_every_contribution_once(algorithm: str, ranks: int) -> None:
    def program(comm: Watching) -> None:
        all_reduce(
            comm.watch("buffer", np.full(2 * ranks, comm.contribution), ranks),
            comm,
            algorithm=algorithm,
        )

    recording = record(program, ranks, Cluster(Link(1e-6, 1e9), Link(1e-5, 1e9), ranks_per_node=2))
    for step in recording.at(len(recording.steps)):
        assert step.buffers["buffer"] == ranks * ((1,) * ranks,)
    counts = range(len(recording.steps) + 1)
    assert any(recording.under_way(count) for count in counts) and not recording.under_way(
        counts[-1]
    )


def test_a_contribution_that_is_in_twice_is_told() -> None:
    def program(comm: Watching) -> None:
        buffer = comm.watch("buffer", np.full(4, float(comm.contribution)), cells=2)
        broadcast(buffer, comm)
        buffer[:2] += buffer[:2]
        buffer[3] = 0.5

    last = record(program, 3).at(100)[1]
    assert last.buffers["buffer"] == ((2, 0, 0), "mixed")
    assert last.text == "rank 1 writes: buffer[1] (mixed)" and "buffer[3] = 0.5" in last_line(
        record(program, 3)
    )


def last_line(recording: Recording) -> str:
    file, number = recording.steps[-1].line
    return recording.sources[file][number - 1]


def test_a_deadlock_is_recorded_up_to_where_it_stops() -> None:
    recording = record(deadlock, 3)
    assert [step.text for step in recording.steps[-3:]] == [
        f"rank {rank} waits to send to rank {(rank + 1) % 3}" for rank in range(3)
    ]
    assert "each waits for the next: 0 -> 1 -> 2 -> 0" in recording.deadlock
    assert "comm.send(buffer" in last_line(recording)
    assert len(recording.under_way(6)) == 3


def test_buffers_may_come_later_and_be_split() -> None:
    def program(comm: Watching) -> None:
        half = comm.split(comm.rank % 2)
        assert isinstance(half, Watching)
        half.watch(
            "shard", reduce_scatter(np.full(4, comm.contribution), half, algorithm="pairwise")
        )

    recording = record(program, 4)
    assert [step.buffers["shard"] for step in recording.at(100)] == [
        ((1, 0, 1, 0),),
        ((0, 1, 0, 1),),
    ] * 2


def test_what_cannot_be_recorded_is_refused() -> None:
    with pytest.raises(ValueError, match="ranks=17: a recording tells at most 16 ranks"):
        record(ring, 17)
    with pytest.raises(TypeError, match=r"ranks=2\.5 must be a whole number"):
        record(ring, 2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no counter 'seconds'"):
        record(ring, 2, formulas={"seconds": "0"})
    with pytest.raises(TypeError, match="'x' is float32"):
        record(lambda comm: comm.watch("x", np.ones(2, np.float32)), 2)
    with pytest.raises(TypeError, match="a buffer is a plain numpy array"):
        record(lambda comm: comm.watch("x", [1, 2]), 2)  # type: ignore[type-var]
    with pytest.raises(ValueError, match="cells=0 must be at least 1"):
        record(lambda comm: comm.watch("x", np.ones(2), cells=0), 2)
    with pytest.raises(ValueError, match="without forks"):
        record(lambda comm: comm.fork(), 2)
    with pytest.raises(ValueError, match="shows no overlap"):
        record(lambda comm: comm.stream(), 2, Cluster.uniform(0, 1e30))
    with pytest.raises(ZeroDivisionError):
        record(lambda comm: 1 // 0, 2)


def test_registered_memory_is_recorded_as_if_each_rank_had_a_machine_of_its_own() -> None:
    """Nobody reads another's memory: what travels is a message, and the cells show it."""

    def program(comm: Watching) -> None:
        buffer = comm.watch("buffer", comm.allocate(4, "int64"))
        buffer[:] = comm.contribution
        all_reduce(buffer, comm)

    recording = record(program, 2)
    assert [step.buffers["buffer"] for step in recording.at(100)] == [((1, 1),)] * 2
    assert [step.counters[:2] for step in recording.at(100)] == [(1, 32)] * 2


# ---------------------------------------------------------------- attention


def attend_in(order: str, ring: type[Ring] = Ring) -> Callable[..., object]:
    return lambda query, key, value, comm: ring(comm, order, flash_attention, comm.stream())(
        query, key, value
    )


class Skips(Ring):
    """Rank 3 lets the keys of rank 1 pass by."""

    def blocks(self, mine: Any) -> Iterator[tuple[int, Any]]:
        return (each for each in super().blocks(mine) if (self.comm.rank, each[0]) != (3, 1))


def unmet(recording: Recording) -> set[tuple[int, int]]:
    """The ranks of each query and key that have not met in the end, although the key is not
    later.
    """
    tokens, owners = recording.meetings.tokens, recording.meetings.owners
    return {
        (step.rank, owners[key])
        for step in recording.at(len(recording.steps))
        for query, met in zip(tokens[step.rank], step.buffers[MET], strict=True)
        for key in range(query + 1)
        if not met[key]
    }


@pytest.mark.parametrize("ranks", (1, 2, 4))
@pytest.mark.parametrize("order", ("the book", "contiguous", "zigzag", "striped"))
def test_queries_meet_the_keys_at_hand_that_the_order_says(order: str, ranks: int) -> None:
    name = "contiguous" if order == "the book" else order
    if order == "the book":
        recording = record_attention(RingAttention.apply, ranks, name, output="output")
    else:
        recording = record_attention(attend_in(order), ranks, name)
    tokens = recording.meetings.tokens
    for rank in range(ranks):
        expected = []
        for source in ((rank - hop) % ranks for hop in range(ranks)):
            if met := meeting(name, rank, source, 2):
                asking, asked = tokens[rank][met.queries], tokens[source][met.keys]
                pairs = {
                    (q, k)
                    for i, q in enumerate(asking)
                    for k in (asked[: i + 1] if met.causal else asked)
                }
                expected.append((tuple(int(each == source) for each in range(ranks)), pairs))
        shown, seen = [], set[tuple[int, int]]()
        for step in recording.steps:
            if step.rank == rank and step.kind == "meets":
                rows = dict(zip(tokens[rank], step.buffers[MET], strict=True))
                now = {
                    (query, key)
                    for query, met in rows.items()
                    for key in range(2 * ranks)
                    if met[key]
                }
                shown.append((step.buffers["keys and values"][0], now - seen))
                seen = now
                if order != "the book":
                    assert step.line[0].endswith("blocks.py")
                    assert "output.lerp_(" in recording.sources[step.line[0]][step.line[1] - 1]
        assert shown == expected
    for step in recording.at(len(recording.steps)):
        assert (
            recording.formulas["bytes sent"].endswith(f"= {step.counters[1]}")
            and step.counters[0] == ranks - 1
        )
    assert not unmet(recording)


def test_a_block_that_was_skipped_is_not_met(tmp_path: Path) -> None:
    whole, skipped = (
        record_attention(attend_in("zigzag", ring), 4, "zigzag") for ring in (Ring, Skips)
    )
    assert whole.steps[24].text == "rank 0 meets: query 7 sees keys 3 + 4", "and not key 0 again"
    assert unmet(whole) == set() and unmet(skipped) == {(3, 1)}
    assert "query 3 sees keys 0 + 1 + 2 + 3, query 4 sees keys 0 + 1 + 2 + 3 + 4" in in_words(whole)
    assert "query 3 sees keys 0 + 2 + 3, query 4 sees keys 0 + 2 + 3 + 4" in in_words(skipped)
    orange = []
    for recording in (whole, skipped):
        filmstrip(recording, tmp_path / "ring.png", frames=2)
        pixels = image.imread(tmp_path / "ring.png")[:, :, :3].reshape(-1, 3)
        orange.append((abs(pixels - [0xE6 / 255, 0x9F / 255, 0]).max(axis=1) < 0.01).sum())
    assert orange[1] < orange[0]
    with pytest.raises(ValueError, match="no query met a key: keep what"):
        record_attention(
            lambda query, key, value, comm: flash_attention(query, key, value, True), 2
        )


def test_the_tiles_of_one_rank_are_shown_as_the_page_meets_them() -> None:
    """Nothing of the program runs yet when its rank starts: the first line is its own, not one of
    what runs it.
    """

    def by_tiles(query: Any, key: Any, value: Any, _: Watching) -> object:
        return page_forward(query, key, value, causal=True, tile=2)

    recording = record_attention(by_tiles, ranks=1, tokens=6, block="", output="output")
    tiles = [(0, 0), (2, 0), (2, 2), (4, 0), (4, 2), (4, 4)]  # none above the diagonal
    met = [set(re.findall(r"query (\d)", step.text)) for step in recording.steps]
    assert met == [{str(row), str(row + 1)} for row, _ in tiles]
    assert [step.text.rpartition(" ")[2] for step in recording.steps] == [
        str(left + 1) for _, left in tiles
    ]
    assert Path(recording.start[0].line[0]) == Path(__file__) and recording.start[0].line[1] > 0
    assert list(recording.start[0].buffers) == [MET]


def test_what_is_held_is_one_block_and_the_next() -> None:
    recording = record_attention(attend_in("zigzag"), 4, "zigzag")
    assert {tuple(step.buffers) for step in recording.steps} == {
        ("keys and values", MET),
        ("keys and values", MET, "temporary 1"),
    }
    block, output = 2 * 2 * 8 * 8, 2 * 8 * 8
    assert {step.counters[2] for step in recording.steps} == {block + output, 2 * block + output}
    assert [step.buffers["keys and values"] for step in recording.at(52)] == [
        (tuple(int(each == (rank + 1) % 4) for each in range(4)),) for rank in range(4)
    ]


# ---------------------------------------------------------------- pictures


def test_key_frames_show_whole_moments(recording: Recording, tmp_path: Path) -> None:
    counts = key_frames(recording, 6)
    assert (
        counts[0] == 0
        and counts[-1] == 68
        and len(counts) == 6
        and all(count % 4 == 0 for count in counts)
    )
    assert key_frames(record(pair, 2), 6) == [0, 1, 2]
    with pytest.raises(ValueError, match="frames=1"):
        key_frames(recording, 1)
    filmstrip(recording, tmp_path / "ring.png")
    pixels = image.imread(tmp_path / "ring.png")[:, :, :3].reshape(-1, 3)
    for colour in COLOURS[:4]:
        shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        assert (abs(pixels - shares).max(axis=1) < 0.01).sum() > 1000, colour


def test_numbers_can_be_read_on_their_colours() -> None:
    def luminance(colour: str) -> float:
        shares = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
        linear = (
            share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4
            for share in shares
        )
        return sum(
            weight * share for weight, share in zip((0.2126, 0.7152, 0.0722), linear, strict=True)
        )

    for colour, ink in zip(COLOURS, INKS, strict=True):
        light, dark = sorted((luminance(colour), luminance(ink)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5  # WCAG 2, level AA


# ---------------------------------------------------------------- the page in a browser


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    page = Page(tmp_path_factory.mktemp("browser"))
    try:
        page.attach()
        yield page
    finally:
        page.close()


@BROWSER
def test_the_keyboard_steps_to_the_end(page: Page, recording: Recording, tmp_path: Path) -> None:
    html = player(recording)
    assert len(html.encode()) < 150_000
    # only a name
    assert re.findall(r"https?://[^\"']*|@import|url\(|src=", html) == [
        "http://www.w3.org/2000/svg"
    ]
    page.open(html, tmp_path / "ring.html")
    assert {page.cells()[f"{rank} buffer[{cell}]"] for rank in (2,) for cell in range(4)} == {"2"}
    page.run("document.querySelector('input').focus()")
    page.press("ArrowRight", 13)
    assert (
        page.text(".now") == "rank 0 adds: temporary 1 (ranks 0 + 3)"
        and page.text(".count") == "13 of 68"
    )
    assert page.cells()["0 temporary 1[0]"] == "03" and page.cells()["1 temporary 1[0]"] == "0"
    assert "reduce(arriving, own, leaving)" in page.text(".pane.on .lines .on")
    page.press("ArrowLeft")
    assert page.text(".count") == "12 of 68"
    page.press("ArrowRight", 80)
    assert page.run("document.querySelector('input').value") == "68"
    cells = page.cells()
    assert [cells[f"{rank} buffer[{cell}]"] for rank in range(4) for cell in range(4)] == 16 * [
        "0123"
    ]
    assert "bytes sent96969696" + recording.formulas["bytes sent"] in page.text("table")
    page.press("Home")
    assert page.text(".now") == "before the first event"
    assert page.errors == []


@BROWSER
def test_it_steps_by_rounds_and_plays(page: Page, recording: Recording, tmp_path: Path) -> None:
    page.open(player(recording), tmp_path / "ring.html")
    page.run("document.querySelector('.minidist-player').focus()")
    for button, there in (
        ("round forward", 16),
        ("round forward", 28),
        ("round back", 16),
        ("forward", 17),
    ):
        page.run(f"document.querySelector('[data-go=\"{button}\"]').click()")
        assert page.text(".count") == f"{there} of 68"
    assert page.run("document.querySelectorAll('circle').length") == 1, (
        "a message that was sent and not received"
    )
    page.run("document.querySelector('[data-go=play]').click()")
    limit = time.monotonic() + 60
    while page.text(".count") < "19 of 68":
        assert time.monotonic() < limit, "it does not play"
        time.sleep(0.05)
    page.run("document.querySelector('[data-go=play]').click()")
    assert page.text("[data-go=play]") == "play"
    stopped = page.text(".count")
    time.sleep(1.0)
    assert page.text(".count") == stopped and page.errors == []


@BROWSER
def test_the_line_that_runs_is_in_sight(page: Page, recording: Recording, tmp_path: Path) -> None:
    """However narrow the pane, and however the lines around it wrap."""
    page.open(f'<div style="width: 500px">{player(recording)}</div>', tmp_path / "narrow.html")
    page.run("document.querySelector('.minidist-player').focus()")
    page.press("ArrowRight", 13)
    hidden = """[...document.querySelectorAll('.pane')].filter(pane => {
        const a = pane.querySelector('.on').getBoundingClientRect(), b = pane.getBoundingClientRect();
        return a.top < b.top - 1 || a.bottom > b.bottom + 1; }).length"""
    assert page.run(hidden) == 0
    assert (
        page.run(
            "[...document.querySelectorAll('.lines div')].some(e => e.scrollWidth > e.clientWidth "
            "+ 1)"
        )
        is False
    )
    cut = (
        "[...document.querySelectorAll('.pane')].filter(e => e.scrollHeight > "
        "e.clientHeight).length"
    )
    assert page.run(cut) == 0, "a pane shows as many lines as have room"


@BROWSER
def test_a_narrow_player_is_low(page: Page, recording: Recording, tmp_path: Path) -> None:
    """Rows need no room for code that stands below them, of the rank that acts alone."""
    tall = "document.querySelector('.minidist-player').getBoundingClientRect().height"
    panes = "[...document.querySelectorAll('.pane')].map(pane => pane.checkVisibility())"
    heights = {}
    for width in (700, 1600):
        html = f'<div style="width: {width}px">{player(recording)}</div>'
        page.open(html, tmp_path / f"{width}.html")
        heights[width] = page.run(tall)
        page.run("document.querySelector('.minidist-player').focus()")
        page.press("ArrowRight", 4)
        assert page.run(panes).count(True) == (1 if width == 700 else 4)
    assert heights[700] < heights[1600]


@BROWSER
def test_nothing_is_clipped_or_overlaps(page: Page, recording: Recording, tmp_path: Path) -> None:
    page.open(player(recording), tmp_path / "ring.html")
    page.run("document.querySelector('.minidist-player').focus()")
    page.press("End")
    crossing = """(() => { const boxes = [...document.querySelectorAll('.cell')].map(e => e.getBoundingClientRect());
        return boxes.some((a, i) => boxes.some((b, j) => i < j && a.left < b.right - 1 && b.left < a.right - 1
            && a.top < b.bottom - 1 && b.top < a.bottom - 1)); })()"""
    assert page.run(OUTSIDE) == [] and page.run(crossing) is False


@BROWSER
def test_a_square_shows_whose_queries_have_met_whose_keys(page: Page, tmp_path: Path) -> None:
    recording = record_attention(attend_in("zigzag", Skips), 4, "zigzag")
    page.open(player(recording), tmp_path / "zigzag.html")
    page.run("document.querySelector('.minidist-player').focus()")

    def square() -> dict[str, str]:
        return dict(
            page.run(
                "[...document.querySelectorAll('.met')].map(e => [e.dataset.pair, e.textContent])"
            )
        )

    assert len(square()) == 64 and set(square().values()) == {""}
    page.press("ArrowRight", 12)
    assert (
        page.text(".now")
        == recording.steps[11].text
        == "rank 3 meets: query 3 sees key 3, query 4 sees keys 3 + 4"
    )
    assert page.cells()["3 keys and values[0]"] == "3" and page.cells()["3 temporary 1[0]"] == "2"
    assert page.run("document.querySelectorAll('.met [stroke=\"var(--mark)\"]').length") == 3
    assert "output.lerp_(" in page.text(".pane.on .lines .on")
    page.press("ArrowRight")
    assert page.text(".now") == "rank 0 writes: keys and values (rank 3)"
    assert page.cells()["0 keys and values[0]"] == "3" and "0 temporary 1[0]" not in page.cells(), (
        "it is held once"
    )
    page.press("End")
    owners, missing = (0, 1, 2, 3, 3, 2, 1, 0), {(3, 1), (4, 1)}
    met = {(q, k) for q in range(8) for k in range(q + 1)} - missing
    assert square() == {
        f"{q} {k}": str(owners[k]) * ((q, k) in met) for q in range(8) for k in range(8)
    }
    assert page.run("document.querySelectorAll('.met .later').length") == 28
    assert f"bytes sent768768768768{recording.formulas['bytes sent']}" in page.text("table")
    assert page.run(OUTSIDE) == [] and page.errors == []
    page.open(player(record_attention(attend_in("zigzag"), 2, "zigzag")), tmp_path / "two.html")
    assert page.run(OUTSIDE) == [], "of two ranks, whose square is narrower than its name"


@BROWSER
def test_text_from_a_program_stays_text(page: Page, tmp_path: Path) -> None:
    name = (
        "</script><script>document.title='broken'</script><img src=x "
        "onerror=\"document.title='broken'\">&amp;"
    )

    def program(comm: Watching) -> None:
        comm.send(comm.watch(name, np.ones(1)), 1) if comm.rank == 0 else comm.recv(
            comm.watch(name, np.zeros(1)), 0
        )

    page.open(player(record(program, 2, formulas={"bytes sent": name})), tmp_path / "odd.html")
    page.run("document.querySelector('.minidist-player').focus()")
    page.press("End")
    assert (
        page.run("document.title") == "test"
        and page.run("document.querySelectorAll('img').length") == 0
    )
    assert name in page.text("svg") and name in page.text("table") and page.errors == []


@BROWSER
def test_a_deadlock_and_two_players_on_a_page(page: Page, tmp_path: Path) -> None:
    page.open(player(record(deadlock, 3)) + player(record(pair, 2)), tmp_path / "both.html")
    page.run("document.querySelector('.minidist-player').focus()")
    page.press("End")
    assert "no rank can go on" in page.text(".now.bad") and "waits for 1" in page.text("svg")
    assert page.run("document.querySelectorAll('path[stroke-dasharray].arrow').length") == 3
    second = "document.querySelectorAll('.minidist-player')[1].querySelector"
    assert page.run(f"{second}('.now').textContent") == "before the first event"
    assert (
        page.run(f"{second}('.count').textContent") == "0 of 2" and page.text(".count") == "6 of 6"
    )
    assert page.run(f"{second}All('.cell').length") == 2
    assert re.search(r"test_player\.py:\d+", page.text(".where")) and page.errors == []
