"""Floor 6: the course, how it is handed out and graded. The lessons themselves, with their checks, are in `lessons/`.

Read `lesson.py`, what is in a lesson's folder, then `grader/`, which runs and judges answers. `handout.py` leaves the
answers out; `package.py` is the zip for Gradescope; `twin.py` is what a lesson's *twin* starts with, the training at
full scale in its `cluster.py`. `course.py`, `grade.py` and `notebooks.py` are the commands.
"""
