"""From a checkpoint to recommendations: export the stages, index the catalogue, recommend, serve.

`twin` and `export` need torch; everything else here runs where torch is not installed.
"""
