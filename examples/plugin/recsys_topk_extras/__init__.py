"""An example plug-in: a loss and an operator of one's own."""
