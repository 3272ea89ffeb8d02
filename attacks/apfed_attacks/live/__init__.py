"""Live runs in which one party deviates: the real parties, links and sums, and an adversary."""
