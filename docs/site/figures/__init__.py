"""Interactive figures: numbers of real runs, and a fragment of a page that shows them.

    a file of this folder runs the package ─▶ data/NAME.json, with command and commit ─▶ fragment.py ─▶ a page

`shapes.py` says what every figure is made of: rows of blocks, for each combination of choices.
`pipelines.py`, `zero.py`, `collectives.py`, `context.py`, `experts.py` and `planner.py` each make
one, from runs of the package. `fragment.py` writes HTML: the picture and its numbers as text, for a
page without scripts and in print, and the script of `figure.html`, which draws the other choices.

`python docs/site/make_figures.py` runs them again. A test compares what they give with what is
committed, as it does with notebooks.
"""
