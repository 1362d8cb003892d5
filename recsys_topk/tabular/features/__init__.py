"""Features of users, items and requests: their description, how they are fitted, encoded and guessed."""
