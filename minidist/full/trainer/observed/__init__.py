"""A run seen from outside: what other programs read while it trains.

    Trainer ── meter.py ──▶ StepMetrics ──▶ Reporter ──▶ the screen, metrics.jsonl
                                                   └───▶ exports.py ──▶ TensorBoard

Read `meter.py`, which measures a step; `held_out.py`, the loss on text that is not trained on;
`stragglers.py`, which names a rank that computes too long;
then `exports.py`.
"""
