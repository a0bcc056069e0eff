"""What is trained, and on what: the protocol of a job, and jobs in files of the user's own."""
