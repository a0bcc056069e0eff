"""Jobs, which give a run its model, data and loss: the protocol, and jobs in the user's own files."""
