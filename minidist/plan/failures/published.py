"""What large runs have reported of failures, and what the policies say: `reported.toml` has the runs."""

from minidist.draw.table import aligned
from minidist.plan.device import table
from minidist.plan.failures.policies import Job, closed_form
from minidist.plan.failures.simulate import simulate


def goodput_text() -> str:
    """Return a row for each run, and what was assumed of it."""
    title = ("run", "policy", "reported", "closed form", "simulated")
    rows, notes = [], []
    for name, said in table("reported").items():
        low, high = said["reported"]
        reported = f"{low:.0%}" if low == high else f"{low:.0%} to {high:.0%}"
        job, policy = Job(**said["job"]), said["policy"]
        share, drawn = closed_form(job, policy), simulate(job, policy).training
        rows.append((name, policy, reported, f"{share:.1%}", f"{drawn:.1%}"))
        notes.append(f"{name}: assumed {said['assumed']}")
    return "\n".join([aligned(title, rows), "", *notes])
