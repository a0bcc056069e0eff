"""The runtime of a replica: the state of a fragment, the update that a round computes, and the pipeline beside training."""
