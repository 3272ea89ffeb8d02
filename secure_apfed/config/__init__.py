"""Configuration: what a run is told, read from YAML, with errors that name the line."""

from secure_apfed.config.run import AttackChoice, Config

__all__ = ["AttackChoice", "Config"]
