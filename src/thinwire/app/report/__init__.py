"""Pages and figures of a run: charts, timeline, diagnosis, live progress."""
