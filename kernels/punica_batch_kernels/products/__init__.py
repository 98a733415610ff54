"""A linear layer's product, into a new tensor or onto one that is there."""
