"""Where this package reaches into PyTorch: what it changes there, and what it stands in for."""
