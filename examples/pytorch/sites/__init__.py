"""Sites that train with PyTorch."""
