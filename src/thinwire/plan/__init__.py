"""Before a run: what links and machines carry (probe), what a setting will cost, and which one is best."""
