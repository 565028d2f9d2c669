"""The site, made of what is in the repository: nothing is written twice for it.

    README, docs/, lessons/, notebooks/, pages/ ─▶ stage.py ─▶ build/site/pages ─▶ Sphinx ─▶ site/
    minidist/**/*.py ─▶ reference.py (docstrings, folder by folder), sources.py (pages of source lines)

Read `stage.py` first: it puts every page in its place. `links.py` says where a link of a Markdown
file leads on the site; `lessons.py` adds to a lesson its player, its files and its neighbours.

Then what Sphinx calls. `extension.py` registers the rest with it. `reference.py` makes a page of each
folder of the package: `objects.py` finds what a file defines, `docstrings.py` reads what it says of
it, `taught.py` finds the lessons that teach it. `sources.py` writes a page for each source file, with
a place to link to for each line. `printed.py` links numbers in a text to the command that prints
them, and `described.py` gives each page its description, and notebooks' pictures their words;
`named.py` links the files that a text names, `fragments.py` and `drawing.py` put in players, figures
and the map, `paths.py` the paths through the course, and `stops.py` says below each lesson where its
paths lead on. `navigation.py` is the menu beside every page, `run_here.py` the page that runs the
package.
"""
