"""The one way in which settings are declared: frozen, keyword-only, no unknown keys.

Each package declares the settings of what it holds beside the code; `secure_apfed.config`
composes them. A value out of range or an unknown key raises pydantic's ValidationError,
which `secure_apfed.config` turns into a `ConfigError` with file, key and nearest key.
"""

from pydantic import BaseModel, ConfigDict

__all__ = ["Settings"]


class Settings(BaseModel):
    """Base of every settings class."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )
