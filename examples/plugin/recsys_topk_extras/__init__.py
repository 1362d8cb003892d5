"""An example plug-in with a loss and an operator."""
