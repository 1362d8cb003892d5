"""Raw ids as integer keys, their counts, and the vocabularies that map them to rows of embedding tables."""
