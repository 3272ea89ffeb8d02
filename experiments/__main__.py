"""`python -m experiments`: the commands of `experiments.cli`, with workers where they play runs."""

import sys

from experiments import workers

__all__ = ["main"]

_PLAYING = {"main", "sweep", "references", "gains"}
"""Commands that play many runs in several processes."""


def main() -> None:
    """Run one command."""
    if _PLAYING.intersection(sys.argv[1:2]):
        workers.begin()
    with workers.uncollected():
        from experiments.cli import main as run
    run()


if __name__ == "__main__":
    main()
