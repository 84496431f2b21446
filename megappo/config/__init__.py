"""Typed configuration: `load` gives a validated, read-only `Config` or raises `ConfigError`."""

from megappo.config.load import ConfigError, dump, load
from megappo.config.sections import Config

__all__ = ["Config", "ConfigError", "dump", "load"]
