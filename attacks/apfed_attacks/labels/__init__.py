"""Attacks on the active's labels, one file each; what they share is in `completion`."""
