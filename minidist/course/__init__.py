"""Floor 6: the course, how it is handed out and graded. The lessons themselves, with their checks, are in `lessons/`.

Read `lesson.py`, which says what a lesson's folder holds, then `grader/`, which runs and judges answers. `handout.py`
copies the course without its answers; `package.py` writes the zip for Gradescope; `twin.py` is shared by the lessons'
*twins*, which train at full scale, each in its lesson's `cluster.py`. `course.py`, `grade.py` and `notebooks.py` are
the commands.
"""
