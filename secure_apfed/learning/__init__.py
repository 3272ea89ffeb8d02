"""The parties' computations on tensors, without messages, contracts or sockets.

Gradient descent, the arithmetic of each method, guarded releases, and checks of received tensors.
The parties call it between reading and writing envelopes; audits and benchmarks call the same code.
"""
