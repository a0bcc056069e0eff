"""What `thinwire simulate` can study, one a file."""
