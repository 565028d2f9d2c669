"""Runs described for other programs: Megatron's flags and DeepSpeed's JSON. `options.py` is the table's engine."""
