"""Attacks on who is in the data: whom a model trained on, whom a peer knows."""
