"""`recsys-topk dashboard`."""
