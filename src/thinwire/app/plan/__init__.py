"""Planning before a run: measure links and machines (probe), predict the cost of a setting, and find the best one."""
