"""The border between host and device: a plan becomes padded arrays, the arrays go through one jitted step."""
