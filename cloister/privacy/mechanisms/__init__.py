"""How contributions are bounded and noised: the mathematics, without Flower and without configuration."""
