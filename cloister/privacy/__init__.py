"""Mathematics of privacy: mechanisms, accounting, DP-SGD and claims, independent of Flower and of the configuration."""
