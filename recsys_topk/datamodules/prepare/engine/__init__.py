"""The engine of preparations: reads tables once, numbers ids, and sorts rows in bounded memory."""
