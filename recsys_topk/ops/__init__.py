"""The hot loops: one file per operation, each with a torch reference and faster backends beside it."""
