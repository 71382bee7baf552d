"""What the algorithms of the xla platform share."""
