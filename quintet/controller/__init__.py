"""Controller: the loop that moves ids and references between the four other modules."""
