"""From a checkpoint to recommendations: export the stages, index the catalogue, recommend, serve.

`twin` and `export` need torch. All other modules run without torch.
"""
