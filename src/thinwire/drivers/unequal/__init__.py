"""Asynchronous training: each replica trains at its own pace. A syncer holds rounds of the deltas that have arrived, or neighbours meet in pairs."""
