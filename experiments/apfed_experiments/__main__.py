"""`python -m apfed_experiments`: `apfed_experiments.cli`, with workers where it plays runs."""

import sys

from apfed_experiments import workers

__all__ = ["main"]

_PLAYING = {"main", "sweep", "references", "gains"}
"""Commands that play many runs in several processes."""


def main() -> None:
    """Run one command."""
    if _PLAYING.intersection(sys.argv[1:2]):
        workers.begin()
    with workers.uncollected():
        from apfed_experiments.cli import main as run
    run()


if __name__ == "__main__":
    main()
