"""Floor 5: the planner. It predicts which layout is fastest, how long it takes and what it costs,
before a run starts or anything is rented.

    the book              here
    parameters            `Model.parameters` (`model.py`): of GPTs, of experts, of latent attention
    bytes_held            `bytes_held` (`memory/`): as each software keeps them, for every schedule
    bytes_sent            `traffic.py`: on every link
    step_seconds          `step` (`step.py`): products by their tiles, element-wise work, latencies
    bill                  `cost.py`, with energy and failures

Read `minidist/budget.py` first: a step, a GPU and a bill in closed form. Then read on in this
order:

    equation.py                          the formulas of two papers for bytes
    device.py, model.py, config.py       what is computed on what; a model as its file says it
    compute/, links.py                   how long a layer computes, and how long messages take
    run.py                               a run: model, machine, layout and software
    stages.py, parts/, step.py           the seconds of a layer, of a stage, of a step
    traffic.py, memory/                  the bytes it sends, the bytes of a GPU
    search/, cost.py                     which layout, and what the run costs
    sites/                               several such machines that a slow wire joins

The tables beside them have the numbers with their sources: `constants.toml` those of all
predictions, `devices.toml` those of a card (with the speed that its links reach), `clusters.toml`
those of a network; the hours that failures cost stand at the head of `cost.py`, and how a run goes on
after one in `failures/`. `ranges.toml` says what a number may be. `python -m minidist plan` prints the
predictions. `published/` compares them with published runs (`plan check`), whose words and sources are
in `rows.toml` and `sources.toml`, and `trust/` says how far an answer may be off, and plans the named
runs of `runs.toml` as they were published. The proof of the planner is `tests/plan/published/`.
"""

from minidist.plan.equation import ModelStates, layer_activations, model_states

__all__ = ["ModelStates", "layer_activations", "model_states"]
