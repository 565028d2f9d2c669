"""Floor 5: the trainer, which `python -m minidist train` runs on every rank.

    words ──flags.py──▶ Config ──checked.py──▶ CheckedRun ──loop.py──▶ Outcome ──verify.py──▶ Verdict

Read `options.py`; `config.py`, what options must be beside each other; `checked.py`, what they must
be for these ranks and this model; `start.py` and `resume.py`, what a run starts from; then `loop.py`. It takes its
tokens from `data/` and `batches.py`, its optimizer from `optimizer.py`, its learning rate from
`schedule.py` (a pipeline's schedule is in `full/pipeline/`), and reports each step through
`metrics.py`. `verify.py` repeats the run on one rank. Then read `full/checkpoint/`, and `elastic/`, where
ranks are lost and replaced.

`flags.py` makes a `Config` of a command line; `foreign/` reads other programs' options and weights.

To change the sentence that refuses an option, see `config.py` for what is wrong with it alone,
`full/mesh.py` with these ranks, the `faults` and `check` of its strategy with this model, and
`checked.py` with these tokens.
"""
