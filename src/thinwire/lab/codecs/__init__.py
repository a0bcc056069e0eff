"""Codecs that few compositions use."""
