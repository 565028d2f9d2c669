"""The course: what is handed out, how it is graded, and what each lesson's twin starts with.

`lesson.py` is a lesson's folder; `handout.py` leaves the answers out; `package.py` is the zip for Gradescope; `grader/`
runs and judges answers; `twin.py` trains at full scale; `course.py`, `grade.py` and `notebooks.py` are the commands.
"""
