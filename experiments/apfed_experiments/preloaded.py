"""Imports of the server of `apfed_experiments.workers` before it forks: all that runs need."""

from apfed_experiments.workers import end_with_parent, pause_collection

with pause_collection():
    # For those that are forked from here; torch's optimizers import its compiler when they begin.
    import torch._dynamo  # noqa: F401

    import apfed_experiments.main_job  # noqa: F401

end_with_parent()
