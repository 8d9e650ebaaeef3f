"""What sections of the configuration are made of: pydantic's models, fields and validators.

They are checked once, by the command that starts the router. Workers get what it checked, and need neither validators
nor pydantic, which would take a quarter of their memory: `run` puts `plain_section` in this module's place before it
loads them.
"""

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

__all__ = ["BaseModel", "ConfigDict", "Field", "SecretStr", "field_validator", "model_validator"]
