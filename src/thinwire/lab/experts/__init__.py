"""Experts, mixtures and ensembles."""
