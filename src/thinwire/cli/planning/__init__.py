"""What stands beside `thinwire plan`: one file each."""
