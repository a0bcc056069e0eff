"""Replicas of unequal speed that wait for nobody: each trains and reports at its own pace, a syncer holds rounds of what has come."""
