"""The pieces a strategy is composed of: frozen values that are their own configuration."""
