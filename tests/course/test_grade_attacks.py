"""Answers that want points without work. None may score, each leaves no process behind and the
grader in one piece.

What stays possible is written in `minidist/course/grader/__init__.py`.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from faults import bearing
from test_grade import HONEST, LESSON, pick

from minidist.course.grader.contract import Task, barred
from minidist.course.grader.grading import AT_ONCE, Graded, grade
from minidist.course.grader.runner import clean_environment, warm_processes
from minidist.course.grader.warm import Warm
from minidist.course.lesson import Answer, find_lesson

NAMES = ("ring_reduce_scatter", "ring_all_gather", "ring_all_reduce", "all_reduce_cost")
EVERYWHERE = "".join(f"def {name}(*arguments):\n    return attack(*arguments)\n" for name in NAMES)
FOLDER = "from pathlib import Path; folder = Path(__file__).parent\n"
HONEST_CUT = "def cut(n, ranks):\n    return [n // ranks + (i < n % ranks) for i in range(ranks)]\n"
# by lesson, what runs its simulated cases; begun with the first that needs it
SHARED: dict[str, Warm] = {}
FEW = "unequal"  # two cases of task 1, two of task 2


def attack(
    tmp_path: Path,
    source: str,
    *,
    task: int = 0,
    wire: str = "threads",
    title: str = "",
    limit: float = 60.0,
    lesson: str = "02",
    alone: bool = False,
) -> list[Graded]:
    """Grade a student's file, by the processes that all attacks share, or `alone`, by some that are
    started for it.
    """
    path = tmp_path / "exercise.py"
    path.write_text(source)
    warm = None if alone else SHARED[lesson]
    only = pick(task, wire, title)
    return grade(
        find_lesson(LESSON.folder.parent, lesson), Answer(path), limit=limit, only=only, warm=warm
    )


@pytest.fixture(autouse=True, scope="module")
def shared() -> Iterator[None]:
    with warm_processes([LESSON], AT_ONCE) as plain:
        with warm_processes([find_lesson(LESSON.folder.parent, "12")], AT_ONCE) as with_torch:
            SHARED.update({"02": plain, "09": with_torch, "12": with_torch, "14": with_torch})
            yield
        SHARED.clear()


def with_environment(variable: str) -> list[int]:
    """Return the processes that were started with `variable` (NAME=value, or how it begins)."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is not ours
            lines = (entry / "environ").read_bytes().split(b"\0")
            if any(line.startswith(variable.encode()) for line in lines):
                found.append(int(entry.name))
    return found


def scores(tests: list[Graded]) -> float:
    assert tests
    return sum(test.score for test in tests)


@pytest.mark.parametrize("where", (pytest.param("import", marks=pytest.mark.soak), "call"))
@pytest.mark.parametrize(
    "code",
    (
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise SystemExit('PASS')",
        "raise KeyboardInterrupt",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import os; os.abort()",
    ),
)
def test_exit_early(where: str, code: str, tmp_path: Path) -> None:
    source = code if where == "import" else f"def attack(*_):\n    {code}\n{EVERYWHERE}"
    tests = attack(tmp_path, source, task=2)
    assert scores(tests) == 0
    assert all("left no record" in test.output or "raised" in test.output for test in tests), tests[
        0
    ].output


@pytest.mark.parametrize(
    ("rank", "code"),
    (
        (0, "sys.exit(0)"),
        (1, "os._exit(0)"),
        pytest.param(0, "os._exit(0)", marks=pytest.mark.soak),
        pytest.param(1, "sys.exit(0)", marks=pytest.mark.soak),
    ),
)
def test_one_rank_exits_early_under_mpirun(rank: int, code: str, tmp_path: Path) -> None:
    """Under MPICH such a job ends with status 0. Its other ranks have the right result."""
    quit = (
        "\nimport os, sys\nring = ring_all_gather\ndef ring_all_gather(chunks, comm):\n    "
        "ring(chunks, comm)\n"
    )
    tests = attack(
        tmp_path, HONEST + quit + f"    comm.rank == {rank} and {code}\n", task=2, wire="mpi"
    )
    assert scores(tests) == 0
    assert f"rank {rank}" in tests[0].output or "left no record" in tests[0].output


def test_print_pass(tmp_path: Path) -> None:
    shout = (
        "import sys, os\nos.write(1, b'PASS 100 of 100\\n')\nos.write(2, "
        "b'PASS\\n')\nprint('PASS')\n"
    )
    assert (
        scores(attack(tmp_path, shout + "def attack(*_):\n    print('PASS')\n" + EVERYWHERE)) == 0
    )


FORGED = (
    FOLDER
    + """
import os, numpy as np
from minidist.course.grader import record
def attack(*_):
    for rank in range(8):
        for name in (f"record-{rank}", f"given-{rank}"):
            record.write(folder / name, {"done": True, "error": None, "notes": []}, {"chunks": np.ones(6)}, "0" * 32)
    (folder / "results.json").write_text('{"score": 100}')
"""
)


@pytest.mark.parametrize("then", ("os._exit(0)", "return None"))
def test_write_the_results(then: str, tmp_path: Path) -> None:
    tests = attack(tmp_path, FORGED + f"    {then}\n" + EVERYWHERE, task=2)
    assert scores(tests) == 0
    told = (
        "calls minidist.course.grader.record"
        if then == "return None"
        else "left no record of this run"
    )
    assert all(told in test.output for test in tests)


def test_the_nonces_are_gone_before_the_students_code_comes(tmp_path: Path) -> None:
    """Every file in reach is searched for one; the answer tells what it found, and where it stands,
    by its error.
    """
    spy = FOLDER + (
        "import os\nfound = [p.name for p in folder.rglob('*') if p.is_file() and 'non' 'ce' "
        "in p.read_text()]\n"
    )
    spy += "raise ValueError(f'{found} {os.listdir()} {sorted(p.name for p in folder.iterdir())}')"
    for wire in ("threads", "mpi"):
        tests = attack(tmp_path, spy, task=2, wire=wire)
        assert tests[0].output.split("ValueError")[1].split(": ")[1].startswith("[] []"), tests[
            0
        ].output
        assert "given-" not in tests[0].output


PATCHES = {  # by what is replaced: how, where (at import, or in a call), and what the grader says
    "numpy's comparisons": (
        "import numpy as np; np.array_equal = np.allclose = lambda *_, **__: True; "
        "np.argwhere = lambda *_: []",
        "all chunks, one after the other",
    ),
    "numpy's arrays": (
        "import numpy as np; real = np.asarray; np.asarray = lambda value, *_, **__: "
        "real(value) * 0",
        "all chunks, one after the other",
    ),
    "what judges": (
        "import sys; space = sys._getframe(2).f_globals; space['judge_gather'] = "
        "space['expect_ring'] = print",
        "all chunks, one after the other",
    ),
    "all that the judges use": (
        "import sys; space = sys._getframe(2).f_globals; mine = ('judge', 'expec'); "
        "space.update({name: print for name in space if name[:5] in mine})",
        "all chunks, one after the other",
    ),
    "the words of the grader": (
        "import minidist.course.grader.contract as c; c.expect_equal = lambda *_: None; "
        "c.leaning = lambda *_: ''",
        "replaces minidist.course.grader.contract.expect_equal, which belongs to minidist",
    ),
    "what writes records": (
        "import minidist.course.grader.record as r; real = r.write; r.write = lambda path, facts, "
        "*rest: real(path, {**facts, 'error': None, 'done': True, 'notes': []}, *rest)",
        "replaces minidist.course.grader.record.write, which belongs to minidist",
    ),
    "the verdict": (
        "import minidist.course.grader.grading as g; g.verdict = lambda *_: (1, 'passed', '')",
        "all chunks, one after the other",
    ),
    "json": (
        "import json; real = json.dumps; json.dumps = lambda facts, **_: "
        "real({**facts, 'error': None, 'done': True, 'notes': []})",
        "all chunks, one after the other",
    ),
}


@pytest.mark.parametrize("what", PATCHES)
def test_patch_numpy_or_the_checks(what: str, tmp_path: Path) -> None:
    """The judge is in another process, so it goes on; what the grader needs here was taken
    before.
    """
    patch, told = PATCHES[what]
    source = (
        "done = []\ndef attack(*_):\n    if not done:\n        done.append(1)\n        "
        f"{patch}\n{EVERYWHERE}"
    )
    tests = attack(tmp_path, source, task=2, title=FEW)
    assert scores(tests) == 0 and all(told in test.output for test in tests), tests[0].output


def test_a_patched_writer_hides_no_leaning(tmp_path: Path) -> None:
    """An answer that is the package's own, and would have records without the notes that say so."""
    for what in ("what writes records", "json"):
        source = f"{LEANING['the reference itself']}\n{PATCHES[what][0]}\n"
        tests = attack(tmp_path, source, task=2, title=FEW)
        assert scores(tests) == 0 and all("calls minidist.ring" in test.output for test in tests)


REFERENCE = (
    "from minidist import ring\nfrom minidist.full.collectives import all_reduce, all_gather, reduce_scatter\n"
    "import numpy as np, operator\n"
)
LEANING = {
    "the reference itself": REFERENCE
    + """
def ring_reduce_scatter(chunks, comm):
    return ring.ring_reduce_scatter(chunks, comm, operator.iadd).copy()
def ring_all_gather(chunks, comm):
    ring.ring_all_gather(chunks, comm)
def ring_all_reduce(buffer, comm):
    ring.ring_all_reduce(np.array_split(buffer, comm.size), comm, operator.iadd)
""",
    "the package's collectives": REFERENCE
    + """
def ring_reduce_scatter(chunks, comm):
    return reduce_scatter(np.concatenate(chunks), comm, algorithm="ring")
def ring_all_gather(chunks, comm):
    out = np.concatenate(chunks)
    all_gather(chunks[comm.rank], comm, out, algorithm="ring")
    for chunk, part in zip(chunks, np.array_split(out, comm.size)):
        chunk[:] = part
def ring_all_reduce(buffer, comm):
    all_reduce(buffer, comm, algorithm="ring")
""",
    "a roll call": """
import numpy as np
def ring_reduce_scatter(chunks, comm):
    return sum(theirs[comm.rank] for theirs in comm.all_gather_object([chunk.copy() for chunk in chunks]))
def ring_all_gather(chunks, comm):
    for chunk, other in zip(chunks, comm.all_gather_object(chunks[comm.rank].copy())):
        chunk[:] = other
def ring_all_reduce(buffer, comm):
    buffer[:] = sum(comm.all_gather_object(buffer.copy()))
""",
    "registered memory": """
def attack(chunks, comm):
    comm.allocate(10, "float64")
def ring_reduce_scatter(chunks, comm): attack(chunks, comm)
def ring_all_gather(chunks, comm): attack(chunks, comm)
def ring_all_reduce(buffer, comm): attack(buffer, comm)
""",
    "a stream": REFERENCE
    + """
def ring_all_reduce(buffer, comm):
    stream = comm.stream()
    stream.launch(all_reduce, buffer, stream.comm, "sum", "ring").wait()
""",
}


@pytest.mark.parametrize("how", LEANING)
def test_lean_on_the_package(how: str, tmp_path: Path) -> None:
    for number in (3,) if how == "a stream" else (1, 2, 3):
        tests = attack(tmp_path, LEANING[how], task=number)
        assert scores(tests) == 0
        if how != "a stream":
            assert all(
                f"task {number} is to be built by hand, but exercise.py:" in test.output
                for test in tests
            )
        else:
            assert "minidist.full.collectives" in tests[0].output


CUT = "from minidist.full.collectives.fast import cut\n"
COST = """
def cost(elements, itemsize, ranks, rank):
    counts = cut(elements, ranks)
    return 2 * (ranks - 1), (2 * elements - counts[rank] - counts[(rank + 1) % ranks]) * itemsize
"""
THREAD = """
from concurrent.futures import ThreadPoolExecutor
def all_reduce_cost(*question):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(cost, *question).result()
"""
UNWATCHED = COST + "def all_reduce_cost(*question):\n    {}\n"
ELSEWHERE = """
def all_reduce_cost(elements, itemsize, ranks, rank):
    counts = [count for found in {} for count in found]
    return 2 * (ranks - 1), (2 * elements - counts[rank] - counts[(rank + 1) % ranks]) * itemsize
"""
CALLS = {
    "a call": (COST + "all_reduce_cost = cost", "calls minidist.full.collectives.fast"),
    "a call on a thread": (COST + THREAD, "calls minidist.full.collectives.fast"),
    "a thread's own target": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        + ELSEWHERE.format("[ThreadPoolExecutor(1).submit(cut, elements, ranks).result()]"),
        "calls minidist.full.collectives.fast",
    ),
    "a map": (
        ELSEWHERE.format("map(cut, [elements], [ranks])"),
        "calls minidist.full.collectives.fast",
    ),
    "a partial function": (
        "from functools import partial\n" + ELSEWHERE.format("[partial(cut, elements)(ranks)]"),
        "calls minidist.full.collectives.fast",
    ),
    "an event loop": (
        "import asyncio\n"
        + ELSEWHERE.format("[asyncio.run(asyncio.to_thread(cut, elements, ranks))]"),
        "calls minidist.full.collectives.fast",
    ),
    "a table made at import": (
        "TABLE = {(n, p): cut(n, p) for n in range(1000) for p in range(1, 9)}\n"
        + ELSEWHERE.format("[TABLE[elements, ranks]]"),
        "in <dictcomp> calls minidist.full.collectives.fast",
    ),
    "unwatched": (
        UNWATCHED.format("import sys; sys.setprofile(None); return cost(*question)"),
        "sys.setprofile",
    ),
    "unwatched for a while": (
        "import sys\n"
        + UNWATCHED.format(
            """before = sys.getprofile()
    try:
        sys.setprofile(None)
    except Exception:
        pass
    found = cost(*question)
    sys.setprofile(before)
    return found"""
        ),
        "calls sys.setprofile, which hides calls",
    ),
    "a thread that is not watched": (
        "import threading\nfrom concurrent.futures import ThreadPoolExecutor\n"
        + UNWATCHED.format(
            """threading.setprofile(None)
    return ThreadPoolExecutor(1).submit(cost, *question).result()"""
        ),
        "calls minidist.full.collectives.fast",
    ),
    "a bare thread": (
        "import _thread, time\n"
        + UNWATCHED.format(
            """found = []
    _thread.start_new_thread(lambda: found.append(cost(*question)), ())
    while not found: time.sleep(0.001)
    return found[0]"""
        ),
        "calls _thread.start_new_thread, which hides calls",
    ),
    "a trace function": (
        "import sys\n"
        + UNWATCHED.format(
            """found = []
    sys.settrace(lambda *_: found.append(cost(*question)))
    (lambda: 0)()
    return found[0]"""
        ),
        "calls sys.settrace, which hides calls",
    ),
    "its text": (
        "from pathlib import Path\nfrom minidist.full.collectives import fast\nspace = {}\n"
        "exec(Path(fast.__file__).read_text(), space)\ncut = space['cut']\n"
        + ELSEWHERE.format("[cut(elements, ranks)]"),
        "runs the code of minidist.full.collectives.fast",
    ),
    "its text under another name": (
        "import json\nfrom pathlib import Path\nfrom minidist.full.collectives import fast\nspace = "
        "{'__name__': 'json'}\nexec(compile(Path(fast.__file__).read_text(), json.__file__, "
        "'exec'), space)\ncut = space['cut']\n" + ELSEWHERE.format("[cut(elements, ranks)]"),
        "runs the code of minidist.full.collectives.fast",
    ),
    "its code": (
        "from types import FunctionType\nmine = cut.__code__.replace(co_filename=__file__, "
        "co_name='mine')\ncut = FunctionType(mine, cut.__globals__)\n"
        + ELSEWHERE.format("[cut(elements, ranks)]"),
        "runs the code of minidist.full.collectives.fast",
    ),
    "its code, by nobody": (
        "from types import FunctionType\nmine = cut.__code__.replace(co_filename=__file__, "
        "co_name='mine')\ncut = FunctionType(mine, {})\n"
        + ELSEWHERE.format("[cut(elements, ranks)]"),
        "runs the code of minidist.full.collectives.fast",
    ),
    "another interpreter": (
        "import os\nfrom inspect import getsource\ntry:\n    import _xxsubinterpreters as others\n"
        "except ImportError:\n    import _interpreters as others\n"
        "def counted(elements, ranks):\n    read, write = os.pipe()\n"
        "    call = f'import os; os.write({write}, repr(cut({elements}, {ranks})).encode())'\n"
        "    others.run_string(others.create(), f'{getsource(cut)}\\n{call}')\n"
        "    return eval(os.read(read, 1000))\n" + ELSEWHERE.format("[counted(elements, ranks)]"),
        "calls cpython.PyInterpreterState_New, which hides calls",
    ),
    "an audit hook": (
        "import sys\n"
        + UNWATCHED.format(
            """found = []
    sys.addaudithook(lambda *_: found or found.append(cost(*question)))
    sys.audit("mine")
    return found[0]"""
        ),
        "calls sys.addaudithook, which hides calls",
    ),
}


@pytest.mark.parametrize("how", CALLS)
def test_lean_without_a_message(how: str, tmp_path: Path) -> None:
    source, told = CALLS[how]
    tests = attack(tmp_path, CUT + source, task=4)
    assert scores(tests) == 0 and all(told in test.output for test in tests), tests[0].output


def test_the_same_cost_with_a_cut_of_its_own_scores(tmp_path: Path) -> None:
    assert (
        scores(
            attack(tmp_path, COST.replace("def cost", "def all_reduce_cost") + HONEST_CUT, task=4)
        )
        > 0
    )


def test_lean_in_one_case_only(tmp_path: Path) -> None:
    """It costs the whole task, and only that."""
    source = HONEST + "\nring = ring_all_reduce\nfrom minidist.full.collectives import all_reduce\n"
    source += (
        "def ring_all_reduce(buffer, comm):\n    (all_reduce if len(buffer) == 10 else "
        "ring)(buffer, comm)\n"
    )
    tests = attack(tmp_path, source)
    tasks = {
        number: [test.score for test in tests if test.check.task.number == number]
        for number in (1, 2, 3, 4)
    }
    assert not any(tasks[3]) and all(tasks[1] + tasks[2] + tasks[4])
    assert {test.output for test in tests if test.check.task.number == 3} == {
        f"task 3 is to be built by hand, but exercise.py:{len(source.splitlines())} in "
        "ring_all_reduce calls minidist.full.collectives.operations"
    }


@pytest.mark.parametrize(
    "native",
    (
        "comm.native.all_reduce(buffer, comm, type('Sum', (), {'op': 'sum'}))",
        "all_reduce(buffer, comm, algorithm='native')",
    ),
)
def test_call_the_native_collective(native: str, tmp_path: Path) -> None:
    source = REFERENCE + f"def ring_all_reduce(buffer, comm):\n    {native}\n"
    for wire in ("threads", "mpi"):
        tests = attack(tmp_path, source, task=3, wire=wire)
        assert scores(tests) == 0
        assert (
            "comm.native" in tests[0].output
            or "calls minidist.full.collectives.operations" in tests[0].output
        )


def test_call_mpi_itself(tmp_path: Path) -> None:
    """The sum is right, but no message was seen."""
    source = "from mpi4py import MPI\ndef ring_all_reduce(buffer, comm):\n"
    tests = attack(
        tmp_path,
        source + "    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, buffer)\n",
        task=3,
        wire="mpi",
    )
    assert scores(tests) == 0 and "sent 0 bytes" in tests[0].output


WITNESS = "import minidist.course.grader.witness as w\n"
HIDE = {
    "patches the watch": (
        "import minidist.course.grader.watch as watch; watch.Watch.stack = lambda *_: ((), "
        "'', False, True)\n",
        "the reference itself",
    ),
    "patches its method": ("w.Witness._see = lambda *_: None\n", "a roll call"),
    "swaps code": (
        "from minidist.course.grader.watch import Watch\n"
        "Watch.stack.__code__ = (lambda *_: ((), '', False, True)).__code__\n",
        "the reference itself",
    ),
}


@pytest.mark.parametrize("how", HIDE)
def test_hide_from_the_witness(how: str, tmp_path: Path) -> None:
    patch, leaning = HIDE[how]
    tests = attack(tmp_path, WITNESS + patch + LEANING[leaning], title=FEW)
    assert scores(tests) == 0
    assert (
        "which belongs to minidist" in tests[0].output
        or "is to be built by hand" in tests[0].output
    )


REPLACED = {
    "a function": "tree.broadcast = print",
    "its code": "tree.broadcast.__code__ = (lambda *_: None).__code__",
    "a method": "Communicator.recv = print",
    "a module": "sys.modules[tree.__name__] = sys",
}


@pytest.mark.parametrize("wire", ("threads", "mpi"))
@pytest.mark.parametrize("what", REPLACED)
def test_who_replaces_a_part_of_the_package_scores_nothing(
    what: str, wire: str, tmp_path: Path
) -> None:
    """Also with an answer that does not use it."""
    source = (
        f"{HONEST}\nimport sys\nfrom minidist import Communicator\nfrom minidist.full.collectives "
        "import tree\n"
    )
    tests = attack(
        tmp_path, source + REPLACED[what], task=1, wire=wire, title=FEW if wire == "threads" else ""
    )
    assert scores(tests) == 0 and all(
        "which belongs to minidist" in test.output for test in tests
    ), tests[0].output


PAST = {
    "the wire below": "type(comm)(comm.wire.inner, comm.ledger)",
    "a ledger of its own": "type(comm)(comm.wire.inner, type(comm.ledger)())",
    "another wire around it": "type(comm)(type('Around', type(comm.wire).__mro__[1:2], {'split': None, 'fork': "
    "None})(comm.wire.inner), type(comm.ledger)())",
}


@pytest.mark.parametrize("way", PAST)
def test_go_past_the_witness(way: str, tmp_path: Path) -> None:
    """A sum on the wire below, and beside it a ring of messages of the right size."""
    source = HONEST.replace("def ring_all_reduce", "def honest")
    source += "def ring_all_reduce(buffer, comm):\n    honest(buffer.copy(), comm)\n"
    source += f"    honest(buffer, {PAST[way]})\n"
    tests = attack(tmp_path, source, task=3)
    assert scores(tests) == 0 and "calls comm.wire.inner, which hides calls" in tests[0].output


def test_go_past_the_witness_without_a_message(tmp_path: Path) -> None:
    source = HONEST.replace("def ring_all_reduce", "def honest")
    source += "def ring_all_reduce(buffer, comm):\n    honest(buffer.copy(), comm)\n"
    source += "    buffer[:] = sum(comm.wire.inner.all_gather_object(buffer.copy()))\n"
    tests = attack(tmp_path, source, task=3)
    assert (
        scores(tests) == 0
        and "in ring_all_reduce uses comm.all_gather_object, which tells ranks more"
        in tests[0].output
    )


BY_SOCKETS = """
import os, socket
def ring_all_reduce(buffer, comm):
    names = [f"\\0{os.getpid()}-{rank}" for rank in range(comm.size)]
    mine = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    mine.bind(names[comm.rank])
    honest(buffer.copy(), comm)
    for name in names:
        mine.sendto(buffer.tobytes(), name)
    buffer[:] = sum(np.frombuffer(mine.recv(1 << 16), buffer.dtype) for _ in names)
"""


def test_data_beside_the_messages_does_not_go_through_sockets(tmp_path: Path) -> None:
    source = HONEST.replace("def ring_all_reduce", "def honest") + BY_SOCKETS
    tests = attack(tmp_path, source, task=3)
    assert scores(tests) == 0 and "calls socket.bind, which hides calls" in tests[0].output


def test_an_answer_that_rewrites_the_judges_changes_no_lesson(tmp_path: Path) -> None:
    """It finds their files by the functions that call it."""
    lesson = tmp_path / "in" / LESSON.name
    shutil.copytree(LESSON.folder, lesson)
    judges = lesson / "judges_cost.py"
    before = judges.read_text()
    (tmp_path / "exercise.py").write_text(
        f"{HONEST}\nimport sys\nfrom pathlib import Path\nhonestly = all_reduce_cost\n"
        "def all_reduce_cost(*question):\n"
        "    beside = Path(sys._getframe(1).f_code.co_filename).parent\n"
        "    (beside / 'judges_cost.py').write_text('raise SystemExit')\n"
        "    return honestly(*question)\n"
    )
    answer = Answer(tmp_path / "exercise.py")
    tests = grade(find_lesson(lesson.parent, "02"), answer, only=pick(4))
    assert judges.read_text() == before
    assert scores(tests) == sum(test.max_score for test in tests), tests


def test_the_watch_is_not_switched_off(tmp_path: Path) -> None:
    source = (
        HONEST.replace("def ring_all_gather", "def honest")
        + "from minidist.full.collectives.fast import cut\n"
    )
    source += (
        "def ring_all_gather(chunks, comm):\n    watch, honestly = comm.wire._watch, "
        "honest(chunks, comm)\n"
    )
    source += "    try:\n        watch.switch(None)\n    except Exception:\n        pass\n"
    source += "    cut(10, comm.size)\n    watch.switch(watch.calls)\n"
    tests = attack(tmp_path, source, task=2)
    assert (
        scores(tests) == 0
        and "in ring_all_gather calls sys.setprofile, which hides calls" in tests[0].output
    )


def test_simulated_ranks_share_no_variable_of_the_answer(tmp_path: Path) -> None:
    """A sum through one, and beside it a ring of messages of the right size."""
    source = (
        HONEST.replace("def ring_all_reduce", "def honest")
        + "BOX = {}\ndef ring_all_reduce(buffer, comm):\n"
    )
    source += (
        "    BOX[comm.rank] = buffer.copy()\n    honest(buffer.copy(), comm)\n    buffer[:] = "
        "sum(BOX.values())\n"
    )
    tests = attack(tmp_path, source, task=3, title="adds up")
    assert scores(tests) == 0 and "after the call the caller's buffer" in tests[0].output


def test_colors_of_a_split_carry_no_data(tmp_path: Path) -> None:
    """Who is in one's group tells what the others hold. Else it is the honest answer."""
    reduce = 'all_reduce(flag, self.comm, op="max")'
    honest = (find_lesson(LESSON.folder.parent, "12").folder / "honest.py").read_text()
    assert reduce in honest
    split = "flag[0] |= self.comm.split(int(flag[0])).size < self.comm.size"
    tests = attack(tmp_path, honest.replace(reduce, split), task=2, lesson="12")
    assert (
        scores(tests) == 0
        and "in overflowed uses comm.split, which tells ranks more" in tests[0].output
    )


def test_a_rank_splits_only_a_few_times(tmp_path: Path) -> None:
    """Where a task offers it: one split of two colors tells a bit of every rank."""
    honest = (find_lesson(LESSON.folder.parent, "14").folder / "honest.py").read_text()
    more = honest.replace(
        "    return comm.split(", "    comm.split(0), comm.split(1)\n    return comm.split("
    )
    assert more != honest
    tests = attack(tmp_path, more, task=1, lesson="14", title="three axes")
    assert (
        scores(tests) == 0
        and "calls of comm.split on 8 ranks, expected 4 on each at most" in tests[0].output
    )
    assert scores(attack(tmp_path, honest, task=1, lesson="14", title="three axes")) > 0


BALANCE = "from minidist.full.pipeline.stage import balance\n"
LENT = {
    "its own name": "cut_layers = balance",
    "torch, as an argument": """
from functools import partial
from torch.utils._pytree import tree_map
def cut_layers(costs, stages):
    return tree_map(partial(balance, list(costs)), stages)
""",
    "a module of torch's": """
from torch import nn
class Layer(nn.Module):
    forward = staticmethod(balance)
def cut_layers(costs, stages):
    return Layer()(costs, stages)
""",
}


@pytest.mark.parametrize("to", LENT)
def test_the_package_s_answer_is_not_lent(to: str, tmp_path: Path) -> None:
    tests = attack(tmp_path, BALANCE + LENT[to], task=1, lesson="09")
    assert scores(tests) == 0 and "calls minidist.full.pipeline.stage" in tests[0].output


BYTES = """
import sys
{}
def bytes_per_step(sizes, stage, *, layers, hidden, intermediate, tokens, microbatches, itemsize):
    model = layers, hidden, intermediate, tokens, microbatches, itemsize
    return {}(sizes["dp"], sizes["pp"], sizes["tp"], stage, model)
"""
LOADED = """
import importlib.util
def load(judge):
    spec = importlib.util.spec_from_file_location("mine", judge.__code__.co_filename)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
"""
WHERE = {
    "by name": ("from judges import bytes_along", "bytes_along", "No module named 'judges'"),
    "in the caller": (
        "",
        "sys._getframe(1).f_globals['judge_counted'].__globals__['bytes_along']",
        "in bytes_per_step calls checks",
    ),
    "in the file": (
        LOADED,
        "load(sys._getframe(1).f_globals['judge_counted']).bytes_along",
        "in bytes_per_step calls checks",
    ),
    "in memory": (
        "import gc",
        "next(x for x in gc.get_objects() if getattr(x, '__name__', '') == 'bytes_along')",
        "calls gc.get_objects, which hides",
    ),
}


@pytest.mark.parametrize("where", WHERE)
def test_what_the_checks_compare_with_is_out_of_reach(where: str, tmp_path: Path) -> None:
    first, call, told = WHERE[where]
    tests = attack(tmp_path, BYTES.format(first, call), task=2, lesson="14")
    assert scores(tests) == 0 and told in tests[0].output, tests[0].output


def test_no_file_of_judges_is_lent(tmp_path: Path) -> None:
    assert barred(Task(1, "any"), "judges_cost") and not barred(Task(1, "any"), "numpy")
    tests = attack(tmp_path, "import judges_cost", task=1, lesson="03", alone=True)
    assert "No module named 'judges_cost'" in tests[0].output, tests[0].output


HOOKED = """
from functools import partial
import numpy as np, torch
from minidist.course.grader.contract import Case, Check, Task
from minidist.full.adjoint import copy_to
def once(rng): return [Case(({},), "one")]
def program(exercise, comm, given):
    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(partial(copy_to, comm=comm))
    exercise.train(weight, comm)
    return {"gradient": weight.grad}
def judge(case, results, notes): assert results[0]["gradient"].tolist() == [2, 2]
CHECKS = [Check(Task(1, "train", ("minidist.full.adjoint",)), "trains", 1, once, program, judge)]
"""


def test_a_hook_that_the_answer_did_not_install_is_not_its_doing(tmp_path: Path) -> None:
    """Whoever calls `backward` has torch call all hooks there are; to install one is another
    matter.
    """
    (tmp_path / "01_hook").mkdir()
    (tmp_path / "01_hook/checks.py").write_text(HOOKED)
    lesson, path = find_lesson(tmp_path, "01"), tmp_path / "exercise.py"
    path.write_text("def train(weight, comm):\n    (2 * weight).sum().backward()\n")
    with warm_processes([lesson], AT_ONCE) as warm:
        assert [(test.score, test.output) for test in grade(lesson, Answer(path), warm=warm)] == [
            (1, "")
        ]
        path.write_text(
            "from functools import partial\nfrom minidist.full.adjoint import copy_to\ndef "
            "train(weight, comm):\n    weight.register_hook(partial(copy_to, comm=comm))\n    (2 "
            "* weight).sum().backward()\n"
        )
        tests = grade(lesson, Answer(path), warm=warm)
    assert (
        scores(tests) == 0
        and "exercise.py:4 in train calls minidist.full.adjoint" in tests[0].output
    )


@pytest.mark.parametrize(
    "code",
    (
        "import os\nos.fork() or time.sleep(600)",
        "import os\nos.fork() and os._exit(0)",
        "import os\nif os.fork() == 0:\n        os.setsid()\n        os.fork()\n        "
        "time.sleep(600)",
        "from subprocess import Popen\nPopen(['sh', '-c', 'sleep 600; :', marker], "
        "start_new_session=True)",
        "while True:\n        pass",
        "import threading\nthreading.Thread(target=time.sleep, args=(600,)).start()",
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\nwhile "
        "True: time.sleep(1)",
        "import faulthandler\nfaulthandler.cancel_dump_traceback_later()\nwhile True: "
        "time.sleep(1)",
        "import atexit\natexit.register(time.sleep, 600)",
        "while True: print('PASS' * 1000)",
    ),
)
def test_forks_and_loops_leave_no_process(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = "marker-" + secrets.token_hex(8)
    body = textwrap.indent(code.replace("\n        ", "\n    "), "    ")
    source = (
        f"import time\nmarker = {marker!r}\ndef attack(*_):\n{body}\n    return None\n{EVERYWHERE}"
    )
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # which the grader hands on to all that it starts
    assert scores(attack(tmp_path, source, title=FEW, task=1, limit=0.5, alone=True)) == 0
    assert not bearing(marker) and not with_environment(f"TMPDIR={tmp_path}")


@pytest.mark.parametrize("when", ("True", "{'PMI_RANK', 'OMPI_COMM_WORLD_RANK'} & {*os.environ}"))
def test_who_ends_the_grader_finds_nothing_left(when: str, tmp_path: Path) -> None:
    """As `timeout`, a job's scheduler or a closed terminal do."""
    (tmp_path / "there").mkdir()
    marker, mark = "marker-" + secrets.token_hex(8), tmp_path / "started"
    (tmp_path / "exercise.py").write_text(
        f"import os, subprocess, time\ndef wait(*_):\n    assert {when}\n    open({str(mark)!r}, 'w')\n    "
        f"subprocess.Popen(['sh', '-c', 'sleep 600; :', {marker!r}], start_new_session=True)\n    "
        f"time.sleep(600)\nring_all_gather = wait\n"
    )
    command = [sys.executable, "-m", "minidist", "grade", "02", "--task", "2"]
    command += ["--student", str(tmp_path), "--lessons", str(LESSON.folder.parent)]
    environment = {**os.environ, "TMPDIR": str(tmp_path / "there")}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as grader:
        while grader.poll() is None and not (mark.exists() and bearing(marker)):
            time.sleep(0.05)
        grader.send_signal(signal.SIGTERM)
        _, said = grader.communicate(timeout=60)
    assert (grader.returncode, said) == (128 + signal.SIGTERM, b"")
    assert not [*(tmp_path / "there").iterdir()] and not bearing(marker)
    assert not with_environment(f"TMPDIR={tmp_path / 'there'}")


@pytest.mark.parametrize("wire", ("threads", "mpi"))
def test_temporary_files_of_an_answer_go_with_its_case(
    wire: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "there"))
    monkeypatch.setattr("tempfile.tempdir", None)
    source = "import tempfile\ntempfile.mkdtemp()\n" + HONEST
    tests = attack(tmp_path, source, task=2, wire=wire, title=FEW * (wire != "mpi"), alone=True)
    assert scores(tests) == sum(test.max_score for test in tests)
    assert not [*(tmp_path / "there").iterdir()]


def test_eat_all_memory(tmp_path: Path) -> None:
    source = (
        "import numpy as np\ndef attack(*_):\n    kept = [np.empty(1 << 27) for _ in range(64)]\n"
        + EVERYWHERE
    )
    tests = attack(tmp_path, source, task=4, title="fewer")
    assert scores(tests) == 0
    assert "MemoryError" in tests[0].output


def test_delete_files(tmp_path: Path) -> None:
    """What lies in reach of the answer by its own path; the rest is a matter of the user's
    rights.
    """
    source = FOLDER + "import os, shutil\nshutil.rmtree(folder, ignore_errors=True)\n" + HONEST
    tests = attack(tmp_path, source, task=2)
    assert scores(tests) == 0 and "left no record" in tests[0].output
    assert (tmp_path / "exercise.py").is_file() and (LESSON.folder / "checks.py").is_file()


IMPORTER = """
import faulthandler, fcntl, os, signal, time
importer = os.getppid()
def opened():
    return [int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]
"""


@pytest.mark.parametrize(
    "code",
    (
        "os.kill(importer, signal.SIGKILL)",
        "os.kill(importer, signal.SIGSTOP); time.sleep(600)",
        "os.write(1, b'.' * 100); os._exit(0)",
        "[os.write(number, b'0') for number in opened()]; time.sleep(600)",
        "[fcntl.fcntl(number, fcntl.F_SETFL, 0) for number in opened()]; "
        "faulthandler.cancel_dump_traceback_later()\n    time.sleep(600)",
    ),
)
def test_attack_the_warm_process(code: str, tmp_path: Path) -> None:
    """It costs the case, not the ones after it, and nobody is left behind, not even the one that
    was stopped.
    """
    path = tmp_path / "exercise.py"
    path.write_text(f"{IMPORTER}{HONEST}\ndef all_reduce_cost(*_):\n    {code}\n")
    token = secrets.token_hex(8)
    environment = {**clean_environment(None), "TOKEN": token}
    with Warm([LESSON.folder / "checks.py"], environment, 1) as warm:
        attacked = grade(LESSON, Answer(path), limit=1.0, only=pick(4, title="fewer"), warm=warm)
        honest = grade(
            LESSON, Answer(path), limit=60.0, only=pick(3, title="do not divide"), warm=warm
        )
    assert scores(attacked) == 0
    assert all(test.score == test.max_score for test in honest), honest
    assert not with_environment(f"TOKEN={token}")


def test_a_case_that_cannot_be_started_keeps_no_core_from_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where `--user` may not run this Python: they would wait for it for ever."""

    def refuse(*_: object) -> None:
        raise PermissionError

    with Warm([], {}, 1) as warm:
        monkeypatch.setattr(warm, "ready", refuse)
        with pytest.raises(PermissionError):
            warm.run(tmp_path, tmp_path, 1.0)
        assert warm.cores.qsize() == 1


def test_one_process_imports_for_cases_beside_each_other(tmp_path: Path) -> None:
    tests = attack(tmp_path, f"{IMPORTER}raise ValueError(importer)", alone=True)
    told = {test.output.partition(" (the call: ")[0] for test in tests}
    assert len(told) == 1 and not any(f": {os.getpid()}" in each for each in told)


@pytest.mark.parametrize(
    "kind", ("os.mkfifo(path)", "os.mkdir(path)", "os.symlink('/dev/zero', path)")
)
def test_put_something_else_where_the_record_goes(kind: str, tmp_path: Path) -> None:
    source = (
        FOLDER
        + "import os\nfor rank in range(8):\n    path = folder / f'record-{rank}'\n    "
        + kind
    )
    tests = attack(tmp_path, source + "\ndef attack(*_): pass\n" + EVERYWHERE, task=2, limit=0.5)
    told = ("left no record of this run",)
    if "fifo" in kind:
        told = "did not end within 0.5 seconds", "not tried, since 3 cases in a row"
    heard = [any(words in test.output for words in told) for test in tests]
    assert scores(tests) == 0 and all(heard), tests[0].output


def test_files_beside_the_answer_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # so the grader has found its mpirun, before files are in its way
    attack(tmp_path, HONEST, task=2, wire="mpi")
    for name in (
        "sitecustomize.py",
        "conftest.py",
        "usercustomize.py",
        "numpy.py",
        "checks.py",
        "solution.py",
        "json.py",
    ):
        (tmp_path / name).write_text("raise SystemExit('this file was imported')")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --nonsense")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONSTARTUP", str(tmp_path / "json.py"))
    monkeypatch.chdir(tmp_path)
    tests = attack(tmp_path, HONEST, task=2, wire="", alone=True)
    assert scores(tests) == sum(test.max_score for test in tests)
    assert (
        "No module named 'solution'"
        in attack(tmp_path, "import solution", task=2, alone=True)[0].output
    )


def test_the_environment_holds_nothing_to_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADER_SECRET", "42")
    tests = attack(tmp_path, "import os\nraise ValueError(sorted(os.environ))", task=2, alone=True)
    assert (
        "PATH" in tests[0].output
        and "SECRET" not in tests[0].output
        and "PYTHON" not in tests[0].output
    )
    assert os.environ["GRADER_SECRET"] == "42"


def test_lesson_is_the_checkout_s() -> None:
    assert find_lesson(LESSON.folder.parent, LESSON.name).folder == LESSON.folder
