"""Selection from lists: counts, orders, thresholds, memberships."""
