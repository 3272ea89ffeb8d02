"""A run of several organisations: projects, one party's process, counters, joint prediction."""
