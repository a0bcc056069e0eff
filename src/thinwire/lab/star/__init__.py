"""An exchange that a hub averages."""
