"""Typed configuration: `load` gives a validated, read-only `Config` or raises `ConfigError`."""

from megappo.config.load import ConfigError, dump, load, load_any
from megappo.config.sections import Config
from megappo.config.supervised import SupervisedConfig

__all__ = ["Config", "ConfigError", "SupervisedConfig", "dump", "load", "load_any"]
