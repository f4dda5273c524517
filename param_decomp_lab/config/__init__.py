"""Parses and validates configuration files, once, into typed, immutable objects."""

from param_decomp_lab.config.checks import term_names
from param_decomp_lab.config.resolve import RunConfig, difference, load_config
from param_decomp_lab.config.site_patterns import match_sites

__all__ = ["RunConfig", "difference", "load_config", "match_sites", "term_names"]
