"""Strategies that few people need: `stale/` has pipelines and servers that use old weights."""
