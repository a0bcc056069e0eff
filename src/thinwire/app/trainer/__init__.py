"""The trainer: the settings of a run, its text and language model, and the processes of its replicas. A user of the library like any other."""
