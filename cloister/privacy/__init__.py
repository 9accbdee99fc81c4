"""The mathematics of privacy: mechanisms, accounting, DP-SGD and claims. It knows no Flower and no configuration."""
