"""What the server of `experiments.workers` imports before it forks: all that runs need."""

from experiments.workers import uncollected

with uncollected():
    import experiments.main_job  # noqa: F401  # for those that are forked from here

__all__: list[str] = []
