"""Sample arguments of the operations, on which the backends are compared with their reference."""
