"""What parties compute, on tensors: no message, contract or socket is known here.

Descent, the arithmetic of each method, releases behind a guard, and checks of what comes in. The
parties call it between reading and writing envelopes; the audit and the benchmarks call the same.
"""
