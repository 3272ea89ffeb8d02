"""Attacks on features, representations and single contributions, one file each."""
