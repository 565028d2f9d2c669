"""Pictures of pipelines: the text by the letter, the SVG by its boxes."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from minidist.draw.pipeline import draw_svg, draw_text
from minidist.full.pipeline import (
    NAMES,
    Plan,
    plan,
    read_plan,
    simulate,
    with_communication,
    with_offload,
)
from minidist.full.pipeline.schedules import CHUNKED

SVG = "{http://www.w3.org/2000/svg}"


def boxes(svg: str) -> list[tuple[str, float, float, float, str]]:
    """Return title, left edge, top, width and colour of each action."""
    found = []
    for group in ElementTree.fromstring(svg).iter(f"{SVG}g"):
        title, rectangle = group[0], group[1]
        left, top, width = (float(rectangle.attrib[name]) for name in ("x", "y", "width"))
        found.append((title.text or "", left, top, width, rectangle.attrib["fill"]))
    return found


def sample(name: str) -> Plan:
    return plan(name, 4, 8, 2 if name in CHUNKED else 1)


def test_1f1b_in_letters() -> None:
    assert draw_text(simulate(plan("1f1b", 3, 4))).splitlines() == [
        "rank 0  F0 F1 F2 ............B0--- F3 B1--- ...B2--- ...B3---",
        "rank 1  ...F0 F1 ......B0--- F2 B1--- F3 B2--- ...B3--- ......",
        "rank 2  ......F0 B0--- F1 B1--- F2 B2--- F3 B3--- ............",
        "bubble: 33.3% of the step, 50.0% of the ideal time",
    ]


def test_stages_are_written_where_a_rank_has_several() -> None:
    first = draw_text(simulate(plan("zb-v", 2, 3))).splitlines()[0]
    assert first.split()[2:6] == ["0F0", "0F1", "0F2", "3F0"]
    last = draw_text(simulate(plan("gpipe", 12, 1))).splitlines()[11]
    assert last == "rank 11  " + 11 * "..." + "F0 B0--- " + 22 * "..."


def test_a_reduction_that_takes_time_is_drawn_and_one_that_hides_is_not() -> None:
    whole = with_communication(plan("1f1b", 2, 2), reduce=True)
    shown, hidden = simulate(whole, reduce=2.0), simulate(whole)
    assert draw_text(shown).splitlines()[:2] == [
        "rank 0  F0 F1 ......B0--- ...B1--- R----",
        "rank 1  ...F0 B0--- F1 B1--- R---- ......",
    ]
    assert draw_text(hidden) == draw_text(simulate(plan("1f1b", 2, 2)))
    assert "reduction over the data axis" in draw_svg(shown) and "reduction" not in draw_svg(hidden)
    assert [title for title, *_ in boxes(draw_svg(shown)) if "R" in title] == [
        "0R: 9 to 11",
        "1R: 7 to 9",
    ]


def test_copies_to_the_host_are_bars_below_the_boxes_and_not_in_the_letters() -> None:
    before = plan("interleaved", 2, 4, 2)
    leaving = with_offload(before, 0.5)
    priced = simulate(leaving, transfer=0.5)
    assert draw_text(priced) == draw_text(simulate(before))
    found = {title.split(":")[0]: box for title, *box in boxes(draw_svg(priced))}
    copies = [a for row in leaving.actions for a in row if a.kind in ("OFF", "FETCH")]
    drawn = [a for a in copies if a.kind == "FETCH" or a.microbatch == 0]  # others take no time
    assert drawn and found.keys() & set(map(str, copies)) == set(map(str, drawn))
    tops = {found[str(a)][1] - found[f"{a.stage}F0"][1] for a in drawn}
    assert tops == {26.0}  # the height of a row
    assert "weights to the host" in draw_svg(priced)
    assert "weights" not in draw_svg(simulate(leaving))


def test_uneven_costs_keep_all_labels() -> None:
    text = draw_text(simulate(plan("zb-h1", 3, 12), forward=1.0, input=1.3, weight=0.7))
    for rank, line in enumerate(text.splitlines()[:3]):
        words = line.replace(".", " ").replace("-", " ").split()[2:]
        assert words == [str(action)[1:] for action in plan("zb-h1", 3, 12).actions[rank]]


@pytest.mark.parametrize("name", NAMES)
def test_boxes_are_where_the_simulation_says(name: str) -> None:
    timeline = simulate(sample(name))
    found = boxes(draw_svg(timeline))
    actions = [action for row in timeline.plan.actions for action in row]
    assert [title.split(":")[0] for title, *_ in found] == [str(action) for action in actions]
    for each, (_, left, top, width, _) in enumerate(found):
        for _, other_left, other_top, other_width, _ in found[:each]:
            assert (
                top != other_top
                or left + width <= other_left + 0.11
                or other_left + other_width <= left + 0.11
            )
    starts, ends = (
        [moment for row in rows for moment in row] for rows in (timeline.start, timeline.end)
    )
    scale = (found[-1][1] - found[0][1]) / (starts[-1] - starts[0])
    for start, end, (_, left, _, width, _) in zip(starts, ends, found, strict=True):
        assert left == pytest.approx(62.5 + start * scale, abs=0.3)
        assert width == pytest.approx((end - start) * scale - 1, abs=0.3)


def test_colours_tell_kinds_and_chunks() -> None:
    found = boxes(draw_svg(simulate(plan("interleaved", 2, 4, 3))))
    colours = {(title[0], title[1]): colour for title, *_, colour in found}
    first_rank = {colours[stage, kind] for stage in "024" for kind in "FB"}
    assert len(first_rank) == 6
    assert all(colours[str(stage), "F"] == colours[str(stage + 1), "F"] for stage in (0, 2, 4))
    assert (
        int(colours["0", "F"][1:3], 16)
        < int(colours["2", "F"][1:3], 16)
        < int(colours["4", "F"][1:3], 16)
    )


def test_numbers_can_be_read_on_their_boxes() -> None:
    def luminance(colour: str) -> float:
        shares = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
        linear = (
            share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4
            for share in shares
        )
        return sum(
            weight * share for weight, share in zip((0.2126, 0.7152, 0.0722), linear, strict=True)
        )

    for name in NAMES:
        for group in ElementTree.fromstring(draw_svg(simulate(sample(name)))).iter(f"{SVG}g"):
            box, number = luminance(group[1].attrib["fill"]), luminance(group[2].attrib["fill"])
            assert (max(box, number) + 0.05) / (min(box, number) + 0.05) >= 4.5  # WCAG 2, level AA


def test_the_picture_holds_all_it_shows() -> None:
    for name in NAMES:
        root = ElementTree.fromstring(draw_svg(simulate(sample(name))))
        width, height = float(root.attrib["width"]), float(root.attrib["height"])
        for each in root.iter():
            if "x" in each.attrib:
                wide = float(each.attrib.get("width", 7 * len(each.text or "")))
                assert float(each.attrib["x"]) + wide <= width and float(each.attrib["y"]) < height


def test_a_name_and_costs_of_any_kind() -> None:
    odd = read_plan("0F0 0B0\n1F0 1B0", name="<mine> & yours")
    root = ElementTree.fromstring(draw_svg(simulate(odd)))
    assert root[0].text == "Pipeline schedule <mine> & yours"
    nothing = simulate(odd, 0, 0)
    assert (
        "0.0% of the step" in draw_text(nothing)
        and ElementTree.fromstring(draw_svg(nothing)) is not None
    )
    uneven = simulate(odd, 1e-6, 1.0)
    assert max(map(len, draw_text(uneven).splitlines())) < 6000
    assert float(ElementTree.fromstring(draw_svg(uneven)).attrib["width"]) < 31_000
