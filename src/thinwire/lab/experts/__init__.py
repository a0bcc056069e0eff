"""Experts, mixtures and ensembles."""

from thinwire.lazy import lazily

__getattr__ = lazily(__name__, {})
