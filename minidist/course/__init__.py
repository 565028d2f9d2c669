"""Floor 6: the course, how it is handed out and graded. The lessons themselves, with their checks,
are in `lessons/`.

Read `lesson.py`, which says what a lesson's folder holds, then `grader/`, which runs and judges
answers. `here.py` grades in its own process, for a page that runs Python. `package.py` writes the
zip for Gradescope, whose scripts are in `autograder/`; `twin.py` is shared by the lessons' *twins*,
which train at full scale, each in its lesson's `cluster.py`. `texts.py` recognizes code of modules
that a task bars, wherever it runs. `grade.py` and `course.py` are the commands; the latter writes
the handout, and by `notebooks.py` the notebooks.

To change a check, open `checks.py` of the lesson (what is given, and the points) and the judges
beside it (what is right).
"""
