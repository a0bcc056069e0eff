"""Asynchronous training: each replica trains and reports at its own pace, and a syncer holds rounds of the deltas that have arrived."""
