"""Tables of users, without torch: the schema, ids, features, readers and Arrow files. Training and serving use it."""
