"""The model's building blocks, named as in the checkpoint."""
