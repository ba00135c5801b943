"""AWPO: training language models to use tools, with a judge's reasoning reward let in by a variance-aware gate."""

__version__ = "0.1.0"
