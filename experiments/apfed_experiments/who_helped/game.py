"""The arithmetic of who helped: Shapley values and leave-one-out, of coalitions that may be asked.

Shapley (1953): what a player adds to those before it, averaged over the orders in which players
enter. A contract does not allow sums of fewer than `minimum` passives, so the first `minimum` of an
order enter together here, and share what they add equally; with a minimum of 1 these are Shapley's
own values. In every order what all add telescopes to the worth of all minus that of nobody, so the
values sum to the total gain whether all orders are taken or some are drawn.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from secure_apfed.seeds import derive_seed

__all__ = ["EXACT", "Coalition", "Game"]

Coalition: TypeAlias = frozenset[str]
"""Passives that train with the active; the empty one: it trains alone."""

EXACT = 6
"""Of so many passives or fewer all orders are taken: 720 orders of 64 coalitions."""


@dataclass(frozen=True, kw_only=True)
class Game:
    """Who plays, and in which orders they enter.

    Attributes:
        players: passives, at least one more than `minimum`.
        minimum: contributors below which no sum is opened; at least 1.
        orders: each a permutation of `players`.
        exact: whether `orders` are all that there are.
    """

    players: tuple[str, ...]
    minimum: int
    orders: tuple[tuple[str, ...], ...]
    exact: bool

    @classmethod
    def of(
        cls, players: Sequence[str], *, minimum: int, seed: int, drawn: int | None = None
    ) -> "Game":
        """All orders of few players, or some drawn ones.

        Args:
            players: passives.
            minimum: see the class.
            seed: of the draw.
            drawn: orders to draw; None: all up to `EXACT` players, and 32 orders of more.
        """
        if drawn is None and len(players) <= EXACT:
            orders = tuple(itertools.permutations(players))
            return cls(players=tuple(players), minimum=minimum, orders=orders, exact=True)
        draw = np.random.default_rng(derive_seed(seed, "orders of passives"))
        orders = tuple(
            tuple(str(one) for one in draw.permutation(players)) for _ in range(drawn or 32)
        )
        return cls(players=tuple(players), minimum=minimum, orders=orders, exact=False)

    @property
    def everybody(self) -> Coalition:
        return frozenset(self.players)

    @property
    def coalitions(self) -> tuple[Coalition, ...]:
        """Whose worth is needed, for Shapley values and leave-one-out; smaller ones first."""
        needed = {frozenset[str](), self.everybody}
        needed |= {one for one in map(self._without, self.players) if len(one) >= self.minimum}
        for order in self.orders:
            needed |= {frozenset(order[:size]) for size in range(self.minimum, len(order))}
        return tuple(sorted(needed, key=lambda one: (len(one), sorted(one))))

    @property
    def never_asked(self) -> tuple[Coalition, ...]:
        """Those that the minimum forbids."""
        sizes = range(1, self.minimum)
        return tuple(frozenset(one) for size in sizes for one in itertools.combinations(
            self.players, size
        ))  # fmt: skip

    def shapley(self, worth: Mapping[Coalition, float]) -> NDArray[np.float64]:
        """What each player adds in each order, (orders, players); values are means over orders."""
        place = {name: at for at, name in enumerate(self.players)}
        added = np.zeros((len(self.orders), len(self.players)))
        for line, order in zip(added, self.orders, strict=True):
            before = worth[frozenset()]
            for size in range(self.minimum, len(order) + 1):
                entering = order[:size] if size == self.minimum else order[size - 1 : size]
                after = worth[frozenset(order[:size])]
                line[[place[name] for name in entering]] = (after - before) / len(entering)
                before = after
        return added

    def leave_one_out(self, worth: Mapping[Coalition, float]) -> dict[str, float | None]:
        """What all lose without each; None where the others alone are too few for a sum."""
        lost = {name: worth.get(self._without(name)) for name in self.players}
        every = worth[self.everybody]
        return {name: None if rest is None else every - rest for name, rest in lost.items()}

    def gain(self, worth: Mapping[Coalition, float]) -> float:
        """The worth of all minus that of the active alone."""
        return worth[self.everybody] - worth[frozenset()]

    def _without(self, name: str) -> Coalition:
        return self.everybody - {name}
