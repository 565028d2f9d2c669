"""Distributed training from scratch: ranks and messages, then every strategy, on pages to be read."""

__version__ = "0.0.0"
