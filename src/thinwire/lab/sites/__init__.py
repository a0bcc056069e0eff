"""HALoS: local servers at sites, one above them."""
