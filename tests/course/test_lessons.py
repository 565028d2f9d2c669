"""Every lesson: its reference scores everything, its handout nothing, its mistakes lose points, its
text is true.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import mpirun, torchrun

from minidist.course.grader.contract import Check
from minidist.course.grader.grading import AT_ONCE, FAILED, NOT_STARTED, PASSED, Graded, grade
from minidist.course.grader.report import leaderboard, totals
from minidist.course.grader.runner import warm_processes
from minidist.course.lesson import Answer, Lesson, find_lesson, lessons_in, reference_answer

ROOT = Path(__file__).parents[2]
FOLDERS = lessons_in(ROOT / "lessons")
NAMES = [folder.name for folder in FOLDERS]
MISTAKES = [
    (folder.name, path.stem) for folder in FOLDERS for path in sorted(folder.glob("mistakes/*.py"))
]
PARTS = ("README.md", "exercise.py", "solution.py", "honest.py", "checks.py", "cluster.py")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


WITHOUT_TORCH = ("01", "02", "03", "21")  # lessons that begin in less than a second
# that differ most there: requests, groups, streams, a pipeline, files
UNDER_MPIRUN = ("01", "03", "04", "09", "15")
LEANS = "is to be built by hand, but"
# whose twins do something else on four than on two
FOUR_RANKS = ("03", "10", "14", "16", "21", "22")

ON_TWO = [name for name in NAMES if name[:2] not in FOUR_RANKS]

BOARDS: dict[str, dict[str, float]] = {  # figures of a leaderboard
    # two units of D = 4, of FSDP; else one
    "06_fsdp": {"peak bytes of whole parameters": 2 * 8 * (4 * 5 + 5 + 5 * 4)},
    "09_pipeline": {
        "bubble of GPipe": 2 / 6,
        "bubble of 1F1B": 4 / 6,
        "microbatches held by 1F1B": 4,
    },
    "10_zero_bubble": {"bubble of interleaved": 3 / 15, "bubble of ZB-H1": 4 / 19},
}

Grader = Callable[..., list[Graded]]
EACH = pytest.mark.parametrize("name", NAMES)


@functools.cache
def load(name: str) -> Lesson:
    return find_lesson(ROOT / "lessons", name)


def with_cases(lesson: Lesson, chosen: slice) -> Lesson:
    """Return the lesson with some cases of each check alone."""

    def few(check: Check) -> Check:
        return replace(check, draw=lambda chance: check.draw(chance)[chosen])

    return lesson._replace(checks=[few(check) for check in lesson.checks])


FIRST, LAST = slice(1), slice(-1, None)  # cases of a check


def one_by_one(lesson: Lesson, seed: int) -> Iterator[tuple[int, Lesson]]:
    """Yield the place of each check and the lesson with one case of it, case after case."""
    for index, check in enumerate(lesson.checks):
        for case in range(len(check.draw(np.random.default_rng([seed, index])))):
            yield index, with_cases(lesson, slice(case, case + 1))


@pytest.fixture(scope="module")
def graded() -> Iterator[Grader]:
    """Grade a lesson's cases of one wire, by processes shared with the lessons that import torch,
    or do not.
    """
    plain, others = (
        [load(name) for name in NAMES if (name[:2] in WITHOUT_TORCH) is so] for so in (True, False)
    )
    with (
        warm_processes(plain, AT_ONCE) as without_torch,
        warm_processes(others, AT_ONCE) as with_torch,
    ):

        def grader(
            name: str, answer: Answer, task: int = 0, wire: str = "threads", **options: Any
        ) -> list[Graded]:
            lesson = load(name)
            # a machine may be busy: what is right may take its time
            patient = {"limit": 60.0, "warm": without_torch, **options}
            if name[:2] not in WITHOUT_TORCH:
                patient["warm"] = with_torch
            enough, chosen = patient.pop("enough", None), patient.pop("cases", slice(None))
            places = [
                place
                for place, each in enumerate(lesson.checks)
                if each.wire == wire and task in (0, each.task.number)
            ]
            if patient.pop("last", False):
                last = {lesson.checks[place].task.number: place for place in places}
                places = [*last.values()]

            def of(some: Lesson, *places: int) -> list[Graded]:
                checks = [some.checks[place] for place in places]
                only = {"only": lambda check: any(check is each for each in checks)}
                return grade(some, answer, **only, **patient)

            if enough is None:
                return of(with_cases(lesson, chosen), *places)
            tests: list[Graded] = []
            for place, one in one_by_one(with_cases(lesson, chosen), patient.get("seed", 0)):
                if place in places:
                    tests += of(one, place)
                    if enough(tests[-1]):
                        break
            return tests

        yield grader


@EACH
def test_a_lesson_is_whole(name: str) -> None:
    folder = ROOT / "lessons" / name
    assert [part for part in PARTS if not (folder / part).is_file()] == []
    assert (ROOT / "notebooks/src" / f"{name}.py").is_file() and (
        ROOT / "notebooks" / f"{name}.ipynb"
    ).is_file()
    tasks = {check.task.number for check in load(name).checks}
    about = [
        number
        for lesson, mistake in MISTAKES
        if lesson == name
        for number in [task_of(name, mistake)]
    ]
    assert tasks == set(range(1, len(tasks) + 1)) and 2 <= len(tasks) <= 5
    assert set(about) == tasks and len(about) >= 5, "at least five mistakes, one for each task"
    assert len((folder / "cluster.py").read_text().splitlines()) < 125
    assert any(check.hidden for check in load(name).checks)
    assert sum(check.points for check in load(name).checks) == 100


def task_of(lesson: str, mistake: str) -> int:
    """Return which task a mistake is about: its first line says that, and what is wrong."""
    said = re.match(
        r"# task (\d): .{20}",
        (ROOT / "lessons" / lesson / "mistakes" / f"{mistake}.py").read_text(),
    )
    assert said, "the first line is `# task N: what is wrong`"
    return int(said[1])


@pytest.fixture(scope="module")
def reference(graded: Grader) -> Callable[[str], list[Graded]]:
    """Return what grades a lesson's solution, once."""

    @functools.cache
    def of(name: str) -> list[Graded]:
        cases = slice(None) if name in BOARDS else LAST
        return graded(name, reference_answer(load(name)), cases=cases, last=name not in BOARDS)

    return of


@EACH
def test_the_reference_scores_everything(
    reference: Callable[[str], list[Graded]], name: str
) -> None:
    """By the last case, the largest, of the last check of each task; the long run has all of them,
    and an honest answer passes all checks below.
    """
    tests = reference(name)
    assert lost(tests) == []
    sends = {test.check.task.number for test in tests if test.figures["messages sent"]}
    confirmed = {check.task.number for check in load(name).checks if check.wire == "mpi"}
    assert sends <= confirmed, "every task that sends is confirmed under mpirun"


def honest(name: str) -> Answer:
    """Return the answer that was written by hand, from the handout alone; it may lean on
    nothing.
    """
    return Answer(load(name).folder / "honest.py")


@EACH
def test_an_honest_answer_scores_everything(graded: Grader, name: str) -> None:
    """Unlike solutions and mistakes, which are the package's own, with all bans in force.

    Of each check its first case; the long run has all of them.
    """
    assert lost(graded(name, honest(name), seed=7, cases=FIRST)) == []


STYLES = (  # lesson, task, what the honest answer says, and what is as right
    (
        "17_flash_attention",
        3,
        "p.sum(-1)",
        "(p @ torch.ones(p.shape[-1], 1, dtype=p.dtype)).squeeze(-1)",
    ),
    (
        "17_flash_attention",
        4,
        "(gradient * output).sum(-1)",
        'torch.einsum("bhqd,bhqd->bhq", gradient, output)',
    ),
    (
        "18_context_parallel",
        2,
        "from minidist.full.context.flash import attend, attend_backward\n",
        """from minidist.full.context.flash import attend_backward


def attend(query, key, value, causal):
    heads = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(heads, 1)[:, :, None] for x in (key, value))
    scores = (query[:, :, :, None] * key).sum(-1) / query.shape[-1] ** 0.5
    if causal:
        scores = scores.where(torch.ones_like(scores).tril() > 0, -torch.inf)
    return (scores.softmax(-1)[..., None] * value).sum(-2), scores.logsumexp(-1)
""",
    ),
)


@pytest.mark.parametrize(("name", "task", "said", "instead"), STYLES)
def test_the_same_in_another_style_scores_everything(
    graded: Grader, name: str, task: int, said: str, instead: str, tmp_path: Path
) -> None:
    text = honest(name).path.read_text()
    assert text.count(said) == 1
    path = tmp_path / "exercise.py"
    path.write_text(text.replace(said, instead))
    assert lost(graded(name, Answer(path), task, seed=7, cases=LAST)) == []


@pytest.mark.parametrize("name", [name for name in NAMES if name[:2] in UNDER_MPIRUN])
def test_an_honest_answer_scores_under_mpirun(graded: Grader, name: str) -> None:
    """Of the other lessons in the long run: there the same programs and judges are at work as on
    simulated ranks.
    """
    tests = graded(name, honest(name), wire="mpi")
    assert tests and lost(tests) == []


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", (0, 7, 8))
@EACH
def test_both_score_everything_with_other_seeds_and_under_mpirun(name: str, seed: int) -> None:
    for answer in (reference_answer(load(name)), honest(name)):
        assert lost(grade(load(name), answer, seed=seed)) == []


def lost(tests: list[Graded]) -> list[tuple[str, str]]:
    """Return what did not get all its points, and why."""
    return [(test.name, test.output) for test in tests if test.score < test.max_score]


@pytest.mark.parametrize("name", BOARDS)
def test_the_leaderboard_shows_what_a_lesson_is_about(
    reference: Callable[[str], list[Graded]], name: str
) -> None:
    figures = BOARDS[name]
    board = {row["name"]: row["value"] for row in leaderboard(reference(name))}
    assert {name: board[name] for name in figures} == pytest.approx(figures, abs=1e-6)


@EACH
def test_the_handout_is_not_started(graded: Grader, name: str, tmp_path: Path) -> None:
    """By the last check of each task."""
    not_started(graded, name, tmp_path, last=True)


@pytest.mark.soak
@EACH
def test_the_handout_is_not_started_for_any_check(
    graded: Grader, name: str, tmp_path: Path
) -> None:
    not_started(graded, name, tmp_path)


def not_started(graded: Grader, name: str, tmp_path: Path, **options: Any) -> None:
    handout = tmp_path / "exercise.py"
    handout.write_text((load(name).folder / "exercise.py").read_text() + "\nchanged = True\n")
    tests = graded(name, Answer(handout), cases=FIRST, **options)
    tasks = {test.check.task.number for test in tests}
    assert totals(tests)[0] == 0 and tasks == {check.task.number for check in load(name).checks}
    assert {(test.status, test.output) for test in tests} == {
        (NOT_STARTED, f"task {test.check.task.number} is not started") for test in tests
    }


@EACH
def test_leaning_on_the_package_s_own_answer_scores_nothing(graded: Grader, name: str) -> None:
    """The solution, handed in by a student, is just that, but where the package has no answer."""
    leaned = set()
    answer = Answer(load(name).folder / "solution.py")
    for task in {check.task for check in load(name).checks}:
        tests = graded(
            name, answer, task.number, seed=7, cases=FIRST, enough=lambda test: LEANS in test.output
        )
        if any(LEANS in test.output for test in tests):
            assert sum(test.score for test in tests) == 0
            leaned.add(task.number)
        else:
            assert all(test.status == PASSED for test in tests)
    assert leaned


SLIPS = {  # by mistake, what its rejection says
    "scales_the_query_itself": "query has other values after the call",
    "scales_in_place": "x has other values after the call",
    "counts_tokens_from_its_own_first": "tokens has other values after the call",
    "receives_into_its_keys": "key has other values after the call",
    "writes_for_all": "comm.all_gather_object is given the values of this rank's piece",
    "a_part_of_a_node_in_full": "if nodes are rounded up, and a part of a node is paid in full",
    "sums_all_in_one": "several are put into one: one for each parameter",
    "reduces_in_finish": "the hook that completes a bucket launches it, and not `finish`",
    "stores_everything": "nothing is recomputed, each part is stored",
    "noise_of_eight_bits": "0 went up, expected about 1953: the noise has to have all values",
    "letters_times_places": "if the digest is a sum of letters times their places",
    "compares_with_a_whole_mean": "if the mean is rounded down to a whole number",
    "asks_for_every_epoch": "so ask for epoch 0 and the step's own alone",
    "every_zero_travels": "if all elements travel that are not smaller than number k",
    "all_casts_at_first": "if before the first update the scale goes by all casts so far",
    "alpha_without_rank": "if the adapter is scaled by alpha, not by alpha/rank",
    "forgets_to_enter": "if nothing is summed in backward where the region is entered",
    "adds_norms": "if the ranks' norms are added, not their squares",
    "slices_rounded_up": "if slices have n/dp elements, rounded up, and the last one what is left",
    "forgets_the_step": "if the count of steps is not restored",
    "order_of_letters_lost": "if the digest does not depend on the letters' order",
    "the_last_of_equal_peaks": "if of equal peaks the last sample is taken",
    "rescales_the_values_alone": "if the weighted values are rescaled when a larger score comes, and the sum of the",
    "counts_from_the_bottom_right": "if the mask counts from the bottom right, not from the top left",
    "delta_of_a_tile": "if Δ is a sum over the keys of a tile, not rowsum(dO · O)",
    "any_earlier_look": "rank 1 did something else at the look before",
    "softmax_after_the_choice": "and its gradient 0, so the router learns nothing",
    "does_not_sort_back": "taken in the order in which it was sent, by expert: undo the sort",
    "never_attached": "if the auxiliary loss is never attached",
    "capacity_of_its_own_tokens": "if capacity and tokens are counted on each rank alone",
    "counts_forwards_with_gradients": "each forward that has gradients: recomputation runs it twice",
    "divides_experts_by_ep": "if the experts' gradients are divided by ep",
    "bits_for_bytes": "if the card's Gb/s are taken for GB/s: a byte has 8 bits",
    "bubble_of_the_whole_step": "which is the bubble's share of the whole step",
    "recomputing_as_useful": "that is HFU, of the hardware, not MFU",
    "activations_by_tp": "without sequence parallelism 10 of 34 bytes stay whole on every rank",
    "optimizer_sharded_twice": "if the optimizer state is divided by tp and pp twice",
    "fastest_before_memory": "First what does not fit is refused, then time counts",
    "never_blames_a_stage": "so no other schedule helps: a stage or a link is slow",
    "fails_like_one_gpu": "if the cluster is taken to fail as seldom as one GPU",
    "one_card_for_a_node": "share one card",
    "at_least_one_failure": "at least one failure is expected",
    "how_many_more": "not how many more",
    "largest_begins_at_zero": "the largest score so far begins at 0, not at -inf",
    "one_largest_score_for_all": "one largest score serves all queries",
    "a_mask_of_zeros": "a masked score becomes 0, not -inf",
    "a_mask_that_ends": "not -inf, and some scores lie below",
    "masks_after_the_sum": "weights are masked when their sum has been taken",
    "empty_rank_weighs": "lse is 0, not -inf, on a rank without keys",
    "adds_to_what_is_there": "reduce adds to the gradient that a slice has",
    "lse_is_the_larger": "lse becomes the larger of the two",
    "counts_inputs": "tokens count that are no padding themselves",
    "deals_heads_like_cards": "heads are dealt like cards",
    "never_refuses_heads": "raises no ValueError for 3 heads, 1 of keys, on 2 ranks",
    "ties_by_topk": "experts with equal scores come in any order",
    "leaves_none_after_the_sum": "when synchronize returns, `.grad` of its experts is None",
    "closes_before_it_overflows": "a bucket is closed before a parameter that would take it beyond the limit",
    "in_the_order_of_backward": "they come in the order of backward",
    "stops_at_the_largest": "what rounds up beyond the largest bfloat16 stays at it",
    "fails_less_with_more_ranks": "the time between failures is multiplied by the ranks",
    "attention_forward_alone": "attention counts 4 L s h, its forward alone",
    "one_buffer_for_all_sends": "so each needs a tensor of its own",
    "half_of_the_mean": "a rank is compared with the mean of all",
    "works_on_all_rows_at_once": "expected one row, (2,)",
    "an_empty_bucket_at_the_end": "is one opened that nothing comes into?",
    "gathers_before_the_update": "if slices are gathered before they are updated, not after",
    "refuses_too_few_heads_only": "4 heads on 3 ranks: attention_slices raised no ValueError",
    "norm_of_the_sum": "if the norm comes after the sum with x, not before up",
    "clock_with_costs_swapped": "F takes the time of B, and B that of F",
    "half_is_enough": "half of the voters is enough, whoever they are",
    "takes_the_step_that_nobody_took": "also if nobody has taken it",
    "weighs_all_alike": "all microbatches weigh the same, though they differ in size",
    "median_of_two_ranks": "of two ranks nobody is then 1.3 times as slow",
    "spares_by_the_mean": "many more failures then find no spare",
    "keeps_nothing": "what is not sent is lost for good, so there is no error feedback",
    "error_of_the_sum": "what all ranks have sent, not what this rank has sent",
    "same_places_overwrite": "overwrite each other instead of adding up",
    "after_less_before": "the gradient has the other sign, after minus before",
    "starts_from_its_own": "the outer step starts where this site is now",
    "backward_with_newer_weights": "it has to use those of its forward",
    "rate_of_a_delay_from_zero": "the delay is counted from 0",
    "computes_and_throws_away": "with a block of a later rank nothing is computed, not even to be",
    "multiplies_in_numpy": "those of numpy are not counted",
    "gradients_of_later_ranks": "with a block of a later rank nothing is computed, not even to be",
    "overwrites_what_overflows": "gradients[0] has other values after the call",
    "agrees_once_more": "calls 34 collectives, expected 17: one all-reduce a step",
    "scales_the_weights_themselves": "weights has other values after the call",
    "reads_weights_in_float64": "dequantize returns float64, expected float32",
    "weighs_the_values_themselves": "value has other values after the call",
    "marks_padding_in_the_tokens": "tokens has other values after the call",
    "divides_the_bias_itself": "down.bias has other values after the call",
    "subtracts_from_the_logits": "logits has other values after the call",
    "makes_paces_of_the_seconds": "seconds has other values after the call",
    "weights_as_floats": "one in a thousand is NaN, which is not equal to itself",
    "digests_as_floats": "one in a thousand is NaN, which is not equal to itself",
    "shrinks_to_nothing": "after gather a parameter has shape (0,), expected (",
    "written_as_a_gather": "sends the chunk that it has for itself to all, as an all-gather does",
    "the_last_module_stays": "if the last module stays whole, as its backward comes next",
    "divided_at_every_stage": "each stage divides the gradient that comes by the number of microbatches",
    "slope_at_the_input": "if tanh's slope is taken at the input of a layer, behind its weight",
    "the_last_block_is_free": "if what the last block saves does not count",
    "scales_of_32_bits": "if each block has a scale of 4 bytes, and nothing else",
    "predicts_itself": "if labels are the inputs themselves, not the tokens after them",
    "first_choices_first": "if all tokens' first choices are served before the second ones",
    "gradients_travel_in_32_bits": "gradients travel in the 4 bytes in which they are added up",
    "the_lowest_may_be_dead": "with the lowest member of the last view, who may be dead",
    "exponent_of_everything": "if all losses are in the exponent",
    "keeps_its_own_where_nobody_sent": "own gradient stays in place where nobody has sent anything",
    "velocity_before_its_update": "or adds the velocity as it was before this meeting",
    "own_start": "if nothing is broadcast, and each rank keeps the parameters that it drew",
    "both_zero": "if A is zero, as B is: then neither ever gets a gradient",
    "warm_up_one_longer": "as if the warm-up were one forward longer",
    "against_its_own_history": "compared with its own first step, not with its peers",
    "against_its_own_mean": "compared with its own mean over the steps, not with its peers",
    "bubble_by_m_less_one": "m - 1 is taken for m: the first microbatch computes, too",
    "formula_by_m_less_one": "m - 1 is taken for m: the first microbatch computes, too",
    "twice_the_outer_rate": "it is multiplied by 2 lr, not by lr",
    "twice_the_largest_rate": "it is twice that, with which x grows",
    "slope_of_one_minus_y": "if tanh's derivative is taken for 1 - y, not 1 - y²",
}


def one_of_each_task() -> list[tuple[str, str]]:
    """Return a mistake for every task of every lesson, and all whose rejection must say certain
    words.
    """
    first = {
        (name, task_of(name, mistake)): (name, mistake) for name, mistake in reversed(MISTAKES)
    }
    return [each for each in MISTAKES if each in first.values() or each[1] in SLIPS]


EVERY_MISTAKE = pytest.mark.parametrize(("name", "mistake"), MISTAKES, ids=map("-".join, MISTAKES))


@pytest.mark.parametrize(
    ("name", "mistake"), one_of_each_task(), ids=map("-".join, one_of_each_task())
)
def test_a_mistake_loses_points_on_the_task_it_is_about(
    graded: Grader, name: str, mistake: str
) -> None:
    """Case by case, until one fails and says why."""
    loses(graded, name, mistake, enough=lambda test: slipped(test, mistake))


@pytest.mark.soak
@EVERY_MISTAKE
def test_every_mistake_loses_points_and_crashes_nowhere(
    graded: Grader, name: str, mistake: str
) -> None:
    loses(graded, name, mistake)


def loses(graded: Grader, name: str, mistake: str, **options: Any) -> None:
    answer = reference_answer(load(name), f"mistakes/{mistake}.py")
    tests = graded(name, answer, task_of(name, mistake), **options)
    failed = [test for test in tests if slipped(test)]
    assert failed and {test.status for test in failed} == {FAILED}
    assert not any(re.match(r"rank \d+ raised|the check fails", test.output) for test in failed), (
        "it crashes"
    )
    assert any(slipped(test, mistake) for test in failed), "the rejection names the slip"
    if not options:
        points, most = totals(tests)
        assert most - points >= 0.0999 * most, "it costs a tenth of its task"


def slipped(test: Graded, mistake: str = "") -> bool:
    """Return whether a case was rejected, and in the words that this mistake is to be told."""
    return test.score < test.max_score and SLIPS.get(mistake, "") in test.output


def test_a_missing_error_costs_its_own_share_alone(graded: Grader) -> None:
    """What is computed is right, and has its points."""
    lesson = "18_context_parallel"
    tests = graded(lesson, reference_answer(load(lesson), "mistakes/never_refuses_heads.py"), 4)
    assert {test.check.title for test in tests if not test.score} == {
        "heads that cannot be shared out"
    }


def test_who_clears_the_folder_is_told_so(graded: Grader) -> None:
    """Looking after every call must not wait for the folder to come back."""
    lesson = "15_checkpoints"
    tests = graded(lesson, reference_answer(load(lesson), "mistakes/clears_the_folder.py"), 2)
    assert tests and all(
        "the earlier checkpoint step-00000003 is gone" in test.output for test in tests
    )


def test_the_exercises_run_as_handed_out() -> None:
    """One after the other in one job, which imports torch once."""
    program = (
        "import runpy, sys\nfor path in sys.argv[1:]: runpy.run_path(path, run_name='__main__')"
    )
    outcome = mpirun(2, program, *(str(folder / "exercise.py") for folder in FOLDERS))
    assert outcome.returncode == 0, outcome.stderr
    tasks = [sorted({check.task.number for check in load(name).checks}) for name in NAMES]
    expected = [
        f"task {number}: task {number} is not started" for numbers in tasks for number in numbers
    ]
    assert outcome.stdout.splitlines() == expected


@EACH
def test_the_text_prints_what_it_says(name: str) -> None:
    """Python blocks run one after the other; a plain block right below one is what it prints."""
    blocks = BLOCK.findall((ROOT / "lessons" / name / "README.md").read_text())
    space: dict[str, Any] = {"__name__": "lesson"}
    shown = 0
    for (language, code), (after, text) in zip(blocks, [*blocks[1:], ("end", "")], strict=True):
        if language == "python":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(code, f"{name}/README.md", "exec"), space)
            if after == "":
                assert [
                    line.rstrip() for line in printed.getvalue().splitlines()
                ] == text.splitlines()
                shown += 1
    assert shown, "a lesson shows what the reader's own run prints"


@functools.cache
def losses(ranks: int, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return what each rank tells of some lessons' twins; nothing if one of them fails."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "losses.json")
        paths = [str(ROOT / "lessons" / name / "cluster.py") for name in names]
        outcome = torchrun(ranks, ROOT / "tests" / "twins.py", str(out), *paths, timeout=110)
        print(outcome.stderr)
        told: list[dict[str, Any]] = json.loads(out.read_text()) if outcome.returncode == 0 else []
    return told


def both_twins_give_the_same_losses(name: str, ranks: int, names: Sequence[str]) -> None:
    everyones = [told[name] for told in losses(ranks, tuple(names))]
    assert len(everyones) == ranks
    first = everyones[0]
    assert len(first["ours"]) >= 3 and first["ours"][-1] < first["ours"][0], "it trains"
    for told in everyones:
        np.testing.assert_allclose(told["ours"], told["production"], rtol=first["tolerance"])
        assert told["ours"] == first["ours"], "the same on every rank"


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ON_TWO)
def test_both_twins_give_the_same_losses(name: str) -> None:
    both_twins_give_the_same_losses(name, 2, ON_TWO)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", [name for name in NAMES if name[:2] in FOUR_RANKS])
def test_both_twins_give_the_same_losses_on_four_ranks(name: str) -> None:
    """Of the other lessons in the long run: four of their ranks do nothing that two do not."""
    both_twins_give_the_same_losses(name, 4, [name for name in NAMES if name[:2] in FOUR_RANKS])


@pytest.mark.soak
@pytest.mark.timeout(240)
@pytest.mark.parametrize("ranks", (2, 4))
@EACH
def test_both_twins_of_every_lesson_give_the_same_losses(name: str, ranks: int) -> None:
    both_twins_give_the_same_losses(name, ranks, NAMES)
