"""What the server of `experiments.workers` imports before it forks: all that runs need."""

from experiments.workers import end_with_parent, uncollected

with uncollected():
    import experiments.main_job  # noqa: F401  # for those that are forked from here

end_with_parent()

__all__: list[str] = []
